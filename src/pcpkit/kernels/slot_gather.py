"""Slots of a step's rows in every cache group, from block tables and positions.

A group has a block table in units of ``block_size`` tokens and a ratio ``r``: a state stands for
``r`` tokens, is stored by the last of them, and a page holds ``block_size / r`` states. So the row
at position ``p`` owns slot

    ``block_table[p // block_size] * (block_size // r) + (p // r) % (block_size // r)``

if ``(p + 1) % r == 0`` and that block is mapped, else -1 (pcp-spec appendix D, state slots).

An index out of range gives slot -1 and reads nothing: a gathered row outside the batch, a request
without a block-table row, a position that is negative or beyond the table. Everything is integer
arithmetic, so kernel and reference agree in every value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels._ops import check_dtype, check_shape, register_op


def gather_slots(
    positions: Tensor,
    row_request: Tensor,
    gather_index: Tensor,
    write_mask: Tensor,
    block_tables: Tensor,
    block_sizes: Sequence[int],
    ratios: Sequence[int],
) -> Tensor:
    """Slots of gathered rows for all groups.

    Args:
        positions: ``(num_tokens,)`` int64, absolute position of every row of the global batch.
        row_request: ``(num_tokens,)`` int32, request (block-table row) of every global row.
        gather_index: ``(num_gathered,)`` int64, global row of every gathered row; padding points
            at any row.
        write_mask: ``(num_gathered,)`` bool, false for padding and for replicated copies.
        block_tables: ``(num_groups, num_reqs, max_blocks)`` int32, -1 = not mapped.
        block_sizes: tokens a block, one per group.
        ratios: tokens a state, one per group; divides the block size.

    Returns:
        ``(num_groups, num_gathered)`` int64, -1 = do not write.

    Raises:
        ValueError: shapes or dtypes do not fit, or a ratio does not divide its block size.

    On CUDA the block sizes and ratios are compiled into the kernel: a model has one set of them,
    and nothing is copied to the device in the hot path.

    Example:
        Block table ``[7]`` of one request, block size 4: position 3 has slot 31 at ratio 1 and
        slot 15 at ratio 2; position 2 has slot 30 and -1.
    """
    check_dtype("positions", positions, torch.int64)
    check_dtype("row_request", row_request, torch.int32)
    check_dtype("gather_index", gather_index, torch.int64)
    check_dtype("write_mask", write_mask, torch.bool)
    check_dtype("block_tables", block_tables, torch.int32)
    check_shape("block_tables", block_tables, len(ratios), None, None, remedy="one table a group")
    check_shape("row_request", row_request, positions.shape[0], remedy="one request a row")
    check_shape("write_mask", write_mask, gather_index.shape[0], remedy="one flag a gathered row")
    for block_size, ratio in zip(block_sizes, ratios, strict=True):
        if ratio < 1 or block_size < 1 or block_size % ratio:
            raise ValueError(
                f"block_sizes expected positive multiples of the group's ratio, got {block_size} "
                f"for ratio {ratio}; quote block sizes in tokens"
            )
    return _gather_slots_op(
        positions,
        row_request,
        gather_index,
        write_mask,
        block_tables,
        list(block_sizes),
        list(ratios),
    )


def gather_slots_reference(
    positions: Tensor,
    row_request: Tensor,
    gather_index: Tensor,
    write_mask: Tensor,
    block_tables: Tensor,
    block_sizes: Sequence[int],
    ratios: Sequence[int],
) -> Tensor:
    """The specification of :func:`gather_slots`."""
    num_tokens, (_, num_reqs, max_blocks) = positions.shape[0], block_tables.shape
    if not ratios or num_tokens == 0 or num_reqs == 0 or max_blocks == 0:
        return gather_index.new_full((len(ratios), gather_index.shape[0]), -1)
    known = (gather_index >= 0) & (gather_index < num_tokens)
    row = torch.where(known, gather_index, 0)
    where = positions[row]
    request = row_request[row].long()
    known &= write_mask & (where >= 0) & (request >= 0) & (request < num_reqs)
    request = request.clamp(0, num_reqs - 1)
    out: list[Tensor] = []
    for table, block_size, ratio in zip(block_tables, block_sizes, ratios, strict=True):
        states = block_size // ratio
        block = where // block_size
        page = table[request, block.clamp(0, max_blocks - 1)].long()
        keep = known & (block < max_blocks) & (page >= 0) & ((where + 1) % ratio == 0)
        out.append(torch.where(keep, page * states + (where // ratio) % states, -1))
    return torch.stack(out)


@triton.jit(do_not_specialize=["num_gathered", "num_tokens", "num_reqs", "max_blocks"])
def _gather_slots_kernel(
    positions_ptr,
    request_ptr,
    gather_ptr,
    write_ptr,
    table_ptr,
    out_ptr,
    num_gathered,
    num_tokens,
    num_reqs,
    max_blocks,
    stride_table_group,
    stride_table_req,
    stride_table_block,
    BLOCK_SIZES: tl.constexpr,
    RATIOS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One program owns the slots of BLOCK_ROWS gathered rows in one group."""
    item = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    group = tl.program_id(1).to(tl.int64)
    inside = item < num_gathered
    row = tl.load(gather_ptr + item, mask=inside, other=-1)
    write = tl.load(write_ptr + item, mask=inside, other=0)
    keep = inside & (row >= 0) & (row < num_tokens)
    position = tl.load(positions_ptr + row, mask=keep, other=-1)
    request = tl.load(request_ptr + row, mask=keep, other=-1).to(tl.int64)
    keep = keep & (write != 0) & (position >= 0) & (request >= 0) & (request < num_reqs)
    # The arithmetic below stays in range for rows that are not kept.
    position = tl.where(keep, position, 0)

    table_ptr += group * stride_table_group
    out_ptr += group * num_gathered
    for index in tl.static_range(len(RATIOS)):  # pyright: ignore[reportGeneralTypeIssues]
        # A branch per group: sizes are constants, so the divisions are shifts.
        if index == group:
            states = BLOCK_SIZES[index] // RATIOS[index]
            block = position // BLOCK_SIZES[index]
            stored = keep & (block < max_blocks) & ((position + 1) % RATIOS[index] == 0)
            entry = request * stride_table_req + block * stride_table_block
            page = tl.load(table_ptr + entry, mask=stored, other=-1).to(tl.int64)
            slot = page * states + (position // RATIOS[index]) % states
            tl.store(out_ptr + item, tl.where(page >= 0, slot, -1), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """Rows a program takes; one row a thread."""

    block_rows: int
    num_warps: int


def choose_launch(num_gathered: int) -> LaunchChoice:
    """Latency-bound: spread the rows over all SMs, at least a warp and at most 128 rows each.

    Shared with ``replay_pad``. A row's slots do not depend on the choice.
    """
    rows_per_sm = triton.next_power_of_2(max(1, num_gathered // 132))
    block_rows = min(128, max(32, rows_per_sm))
    return LaunchChoice(block_rows=block_rows, num_warps=block_rows // 32)


def _launch(
    positions: Tensor,
    row_request: Tensor,
    gather_index: Tensor,
    write_mask: Tensor,
    block_tables: Tensor,
    block_sizes: Sequence[int],
    ratios: Sequence[int],
    choice: LaunchChoice | None = None,
) -> Tensor:
    """Launch :func:`gather_slots`. The block tables may have any strides."""
    num_gathered = gather_index.shape[0]
    out = gather_index.new_empty(len(ratios), num_gathered)
    if out.numel() == 0:
        return out
    choice = choice or choose_launch(num_gathered)
    _gather_slots_kernel[(triton.cdiv(num_gathered, choice.block_rows), len(ratios))](
        positions.contiguous(),
        row_request.contiguous(),
        gather_index.contiguous(),
        write_mask.contiguous(),
        block_tables,
        out,
        num_gathered,
        positions.shape[0],
        block_tables.shape[1],
        block_tables.shape[2],
        *block_tables.stride(),
        BLOCK_SIZES=tuple(block_sizes),
        RATIOS=tuple(ratios),
        BLOCK_ROWS=choice.block_rows,
        num_warps=choice.num_warps,
    )
    return out


def _fake(
    positions: Tensor,
    row_request: Tensor,
    gather_index: Tensor,
    write_mask: Tensor,
    block_tables: Tensor,
    block_sizes: Sequence[int],
    ratios: Sequence[int],
) -> Tensor:
    return positions.new_empty(len(ratios), gather_index.shape[0])


_gather_slots_op = register_op(
    "gather_slots(Tensor positions, Tensor row_request, Tensor gather_index, Tensor write_mask,"
    " Tensor block_tables, int[] block_sizes, int[] ratios) -> Tensor",
    reference=gather_slots_reference,
    fake=_fake,
    launch=_launch,
)
