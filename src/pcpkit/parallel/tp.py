"""What tensor-parallel ranks exchange.

``ordered`` sums follow one defined order, so results do not depend on the number of ranks; ``fast``
sums are the backend's all-reduce.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pcpkit.parallel.groups import Group

Reduce = Literal["ordered", "fast"]
"""``ordered``: the same bits for every number of ranks. ``fast``: all-reduce and reduce-scatter."""


def sum_exclusive(group: Group, tensor: Tensor) -> Tensor:
    """Sum of tensors of which, element by element, at most one rank's is not zero.

    The bits are added as integers: exact, in any order, zeros keep their sign.

    Args:
        group: the ranks.
        tensor: bf16 or fp32, last dim a multiple of 4 bytes, zero where another rank has the value.
    """
    if group.size == 1:
        return tensor
    bits = tensor.contiguous().view(torch.int32)
    return group.all_reduce(bits).view(tensor.dtype)


def lookup_rows(group: Group, table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table of which each rank holds an equal, consecutive part.

    Args:
        group: the ranks.
        table: ``(num_rows / size, dim)`` this rank's rows.
        ids: ``(n,)`` int64 global row ids, the same on all ranks.

    Returns:
        ``(n, dim)``.
    """
    if group.size == 1:
        return table[ids]
    local = ids - group.rank * table.shape[0]
    inside = (local >= 0) & (local < table.shape[0])
    rows = table[local.clamp(0, table.shape[0] - 1)]
    return sum_exclusive(group, torch.where(inside[:, None], rows, torch.zeros_like(rows)))


def gather_columns(group: Group, tensor: Tensor) -> Tensor:
    """``(n, c)`` of every rank side by side: ``(n, size * c)``."""
    if group.size == 1:
        return tensor
    return group.all_gather(tensor).transpose(0, 1).flatten(1)


def sum_groups(group: Group, partials: Tensor, reduce: Reduce) -> Tensor:
    """Sum the FP32 partial outputs of all output groups of all ranks.

    Args:
        group: the ranks.
        partials: ``(n, num_local_groups, dim)`` fp32.
        reduce: ``ordered`` adds the groups one by one in ascending order over all ranks.

    Returns:
        ``(n, dim)`` bf16.
    """
    if reduce == "ordered":
        every = group.all_gather(partials).transpose(0, 1).flatten(1, 2)
        return _ascending_sum(every).bfloat16()
    return group.all_reduce(_ascending_sum(partials)).bfloat16()


def _ascending_sum(parts: Tensor) -> Tensor:
    """Sum over dim 1 in order."""
    total = parts[:, 0].clone()
    for index in range(1, parts.shape[1]):
        total += parts[:, index]
    return total
