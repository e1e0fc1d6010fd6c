"""Padding of replayed rows: bounded replay writes no cacheable bytes.

A request that was admitted with a prefix hit ``H`` recomputes its last ``window_size`` hit tokens
``[s, s + window_size)``, ``s = H - window_size``, to rebuild window KV. The compressed KV and index
keys of those positions are already cached, and other requests read them, so their slots in the
*cacheable* groups become -1; window and ring groups are written as usual (pcp-spec section 5.4,
appendix D). The rule is positional: it needs ``s`` and the window only.

The row of a ratio-2 group is that of its last token, so a state is padded with it; ``s`` and the
window are even, so no pair straddles the end of the replay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels._ops import check_dtype, check_shape, register_op
from pcpkit.kernels.slot_gather import LaunchChoice, choose_launch


def pad_replayed(
    slots: Tensor,
    positions: Tensor,
    row_request: Tensor,
    gather_index: Tensor,
    replay_start: Tensor,
    cacheable: Sequence[bool],
    window_size: int,
) -> None:
    """Set the slots of replayed rows to -1 in all cacheable groups, in one launch.

    Args:
        slots: ``(num_groups, num_gathered)`` int64, mutated; from
            :func:`pcpkit.kernels.slot_gather.gather_slots`.
        positions: ``(num_tokens,)`` int64, absolute position of every row of the global batch.
        row_request: ``(num_tokens,)`` int32, request of every global row.
        gather_index: ``(num_gathered,)`` int64, global row of every gathered row.
        replay_start: ``(num_reqs,)`` int32, first replayed position of every request; 0 = the
            request does not replay. A request keeps it for its lifetime.
        cacheable: one flag a group; false for window and ring groups.
        window_size: tokens a replay recomputes.

    A row whose index or request is out of range is left alone.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Example:
        Window 128, ``replay_start = [128]``: the rows of positions 128 ... 255 are padded, that of
        256 keeps its slot.
    """
    check_dtype("slots", slots, torch.int64)
    check_dtype("positions", positions, torch.int64)
    check_dtype("row_request", row_request, torch.int32)
    check_dtype("gather_index", gather_index, torch.int64)
    check_dtype("replay_start", replay_start, torch.int32)
    check_shape(
        "slots", slots, len(cacheable), gather_index.shape[0], remedy="one row of slots a group"
    )
    check_shape("row_request", row_request, positions.shape[0], remedy="one request a row")
    _pad_replayed_op(
        slots, positions, row_request, gather_index, replay_start, list(cacheable), window_size
    )


def pad_replayed_reference(
    slots: Tensor,
    positions: Tensor,
    row_request: Tensor,
    gather_index: Tensor,
    replay_start: Tensor,
    cacheable: Sequence[bool],
    window_size: int,
) -> None:
    """The specification of :func:`pad_replayed`."""
    num_tokens, num_reqs = positions.shape[0], replay_start.shape[0]
    if num_tokens == 0 or num_reqs == 0:
        return
    known = (gather_index >= 0) & (gather_index < num_tokens)
    row = torch.where(known, gather_index, 0)
    request = row_request[row].long()
    known &= (request >= 0) & (request < num_reqs)
    start = replay_start[request.clamp(0, num_reqs - 1)].long()
    where = positions[row]
    replayed = known & (start > 0) & (where >= start) & (where < start + window_size)
    for group_slots, pads in zip(slots, cacheable, strict=True):
        if pads:
            group_slots.masked_fill_(replayed, -1)


@triton.jit(do_not_specialize=["num_gathered", "num_tokens", "num_reqs", "window_size"])
def _pad_replayed_kernel(
    slots_ptr,
    positions_ptr,
    request_ptr,
    gather_ptr,
    start_ptr,
    num_gathered,
    num_tokens,
    num_reqs,
    window_size,
    stride_slot_group,
    stride_slot_row,
    CACHEABLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One program owns BLOCK_ROWS gathered rows in every group; it reads no slots."""
    item = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = tl.load(gather_ptr + item, mask=item < num_gathered, other=-1)
    known = (row >= 0) & (row < num_tokens)
    position = tl.load(positions_ptr + row, mask=known, other=0)
    request = tl.load(request_ptr + row, mask=known, other=-1).to(tl.int64)
    known = known & (request >= 0) & (request < num_reqs)
    start = tl.load(start_ptr + request, mask=known, other=0).to(tl.int64)
    replayed = (start > 0) & (position >= start) & (position < start + window_size)

    pad = tl.full([BLOCK_ROWS], -1, tl.int64)
    for group in tl.static_range(len(CACHEABLE)):  # pyright: ignore[reportGeneralTypeIssues]
        if CACHEABLE[group]:
            slot_ptr = slots_ptr + group * stride_slot_group + item * stride_slot_row
            tl.store(slot_ptr, pad, mask=replayed)


def _launch(
    slots: Tensor,
    positions: Tensor,
    row_request: Tensor,
    gather_index: Tensor,
    replay_start: Tensor,
    cacheable: Sequence[bool],
    window_size: int,
    choice: LaunchChoice | None = None,
) -> None:
    """Launch :func:`pad_replayed`. The slots may have any strides."""
    num_gathered = gather_index.shape[0]
    if num_gathered == 0 or not any(cacheable):
        return
    choice = choice or choose_launch(num_gathered)
    _pad_replayed_kernel[(triton.cdiv(num_gathered, choice.block_rows),)](
        slots,
        positions.contiguous(),
        row_request.contiguous(),
        gather_index.contiguous(),
        replay_start.contiguous(),
        num_gathered,
        positions.shape[0],
        replay_start.shape[0],
        window_size,
        slots.stride(0),
        slots.stride(1),
        CACHEABLE=tuple(cacheable),
        BLOCK_ROWS=choice.block_rows,
        num_warps=choice.num_warps,
    )


def _fake(
    slots: Tensor,
    positions: Tensor,
    row_request: Tensor,
    gather_index: Tensor,
    replay_start: Tensor,
    cacheable: Sequence[bool],
    window_size: int,
) -> None:
    return None


_pad_replayed_op = register_op(
    "pad_replayed(Tensor(a!) slots, Tensor positions, Tensor row_request, Tensor gather_index,"
    " Tensor replay_start, bool[] cacheable, int window_size) -> ()",
    reference=pad_replayed_reference,
    fake=_fake,
    launch=_launch,
)
