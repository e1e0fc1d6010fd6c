"""Expert parallelism by all-gather and reduce-scatter.

Experts are dealt to all TP x PCP ranks in consecutive blocks. The rows of all PCP ranks are
gathered with their routes, every rank runs its own experts on all of them, and the results return
to the rows' owners. Two PCP collectives a layer; the TP ranks of a column then add up their
experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcpkit.parallel.groups import Groups
from pcpkit.parallel.pcp import gather_rows
from pcpkit.parallel.tp import sum_exclusive


def gather_routed(
    groups: Groups,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_padded: int,
    is_row: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rank-major rows of all PCP ranks with their routes, in one collective.

    Args:
        groups: this rank's groups.
        x: ``(num_rows, hidden)`` bf16.
        ids: ``(num_rows, top_k)`` int32.
        weights: ``(num_rows, top_k)`` fp32.
        num_padded: rows of the longest rank.
        is_row: ``(size * num_padded,)`` bool, false for padding.

    Returns:
        ``x``, ``ids`` and ``weights`` of ``size * num_padded`` rows; padding is routed nowhere
        (-1).
    """
    payload = torch.cat([_bytes(x), _bytes(ids), _bytes(weights)], dim=1)
    gathered = gather_rows(groups.pcp, payload, num_padded)
    top_k = ids.shape[1]
    hidden, routes, shares = gathered.split([2 * x.shape[1], 4 * top_k, 4 * top_k], dim=1)
    routes = routes.contiguous().view(torch.int32)
    return (
        hidden.contiguous().view(torch.bfloat16),
        torch.where(is_row[:, None], routes, -1),
        shares.contiguous().view(torch.float32),
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def return_outputs(groups: Groups, outputs: Tensor, num_rows: int) -> Tensor:
    """Each owner's rows of expert outputs that exactly one rank computed.

    Args:
        groups: this rank's groups.
        outputs: ``(size * num_padded, top_k, hidden)`` bf16, zero for other ranks' experts.
        num_rows: this rank's rows.

    Returns:
        ``(num_rows, top_k, hidden)`` bf16, exact.
    """
    if groups.pcp.size > 1:
        bits = outputs.contiguous().view(torch.int32).unflatten(0, (groups.pcp.size, -1))
        outputs = groups.pcp.reduce_scatter(bits).view(outputs.dtype)
    return sum_exclusive(groups.tp, outputs[:num_rows])


def return_sums(groups: Groups, sums: Tensor, num_rows: int) -> Tensor:
    """Each owner's rows of the FP32 sums over all ranks' experts, in the backend's order.

    Args:
        groups: this rank's groups.
        sums: ``(size * num_padded, hidden)`` fp32 of this rank's experts.
        num_rows: this rank's rows.
    """
    if groups.pcp.size > 1:
        sums = groups.pcp.reduce_scatter(sums.unflatten(0, (groups.pcp.size, -1)))
    return groups.tp.all_reduce(sums[:num_rows])
