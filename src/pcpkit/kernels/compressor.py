"""Closing of ratio-2 compressor groups and the ring of open rows, in one launch or in two.

A raw row is FP32 ``[value | gate]`` of one token. Group ``j`` pools the rows of positions ``2j``
and ``2j + 1`` channel by channel: ``w = softmax(gate)`` over the two tokens,
``latent = sum(w * value)``, rounded to BF16, then RMSNorm (model-spec section 3.4). A group is
closed by its odd token. The even token's row comes from the same batch, from the rows other ranks
sent, or from the ring, where the previous step left it (pcp-spec section 3).

Predecessor index of a closing row: ``i < num_rows`` is a batch row, then follow the gathered rows,
then the ring slots. -1 marks padding; an index outside its range is treated like -1 and nothing is
read for it. The output row of padding is zero.

``close_and_write_ring`` closes and then writes the ring in one launch. A ring row may be read and
replaced in the same step: then the program that closes its group also stores the new row, after the
read, and the program of the open row leaves it alone. A ring row is read by at most one group.

Rounding points: every FP32 product, quotient and sum of the pooling; ``exp`` once, from float64;
the pooled latent to BF16; then those of RMSNorm. With ``top`` the larger gate, the larger weight
is ``exp(0)``, so the kernel computes one exponential a channel. A NaN or infinity spoils its own
group only (the norm spreads it over the group's channels).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels import _jit
from pcpkit.kernels import _reference as wide
from pcpkit.kernels._jit import from_bfloat16, to_bfloat16
from pcpkit.kernels._ops import check_dtype, check_shape, register_op
from pcpkit.kernels.norm import rms_norm_reference


def close_groups(
    rows: Tensor,
    gathered_rows: Tensor,
    ring: Tensor,
    closing_rows: Tensor,
    predecessors: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """Pool and normalize every group that a row of this rank closes.

    Args:
        rows: ``(num_rows, 2 * dim)`` fp32, ``[value | gate]`` of this rank's tokens.
        gathered_rows: ``(num_gathered, 2 * dim)`` fp32, last rows of all ranks' segments (may be
            empty).
        ring: ``(num_ring_blocks, ring_rows, 2 * dim)`` fp32, open rows of earlier steps.
        closing_rows: ``(num_groups,)`` int64, batch row of each odd token; -1 = padding.
        predecessors: ``(num_groups,)`` int64, see the module docstring; -1 = padding.
        norm_weight: ``(dim,)`` bf16.
        eps: of the RMSNorm.

    Returns:
        ``(num_groups, dim)`` bf16 latents before RoPE; padding rows are zero.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Example:
        ``num_rows = 3``, no gathered rows: ``closing_rows = [0, 2]``, ``predecessors = [3 + 6, 1]``
        closes one group with ring slot 6 and one with batch row 1.
    """
    _check_close(rows, gathered_rows, ring, closing_rows, predecessors, norm_weight)
    return _close_groups_op(rows, gathered_rows, ring, closing_rows, predecessors, norm_weight, eps)


def _check_close(
    rows: Tensor,
    gathered_rows: Tensor,
    ring: Tensor,
    closing_rows: Tensor,
    predecessors: Tensor,
    norm_weight: Tensor,
) -> None:
    for name, tensor in (("rows", rows), ("gathered_rows", gathered_rows), ("ring", ring)):
        check_dtype(name, tensor, torch.float32)
    check_dtype("closing_rows", closing_rows, torch.int64)
    check_dtype("predecessors", predecessors, torch.int64)
    check_shape("ring", ring, None, None, 2 * norm_weight.shape[0], remedy="match norm_weight")
    check_shape("rows", rows, None, ring.shape[2], remedy="concatenate value and gate")
    check_shape("gathered_rows", gathered_rows, None, ring.shape[2], remedy="send raw rows")
    check_shape("predecessors", predecessors, closing_rows.shape[0], remedy="one a closing row")


def close_groups_reference(
    rows: Tensor,
    gathered_rows: Tensor,
    ring: Tensor,
    closing_rows: Tensor,
    predecessors: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """The specification of :func:`close_groups`."""
    dim = rows.shape[1] // 2
    num_rows, num_gathered = rows.shape[0], gathered_rows.shape[0]
    flat_ring = ring.flatten(0, 1)
    even = torch.zeros(closing_rows.shape[0], 2 * dim, device=rows.device)
    odd = torch.zeros_like(even)
    num_sources = num_rows + num_gathered + flat_ring.shape[0]
    valid = (closing_rows >= 0) & (closing_rows < num_rows)
    valid &= (predecessors >= 0) & (predecessors < num_sources)
    for source, first, count in (
        (rows, 0, num_rows),
        (gathered_rows, num_rows, num_gathered),
        (flat_ring, num_rows + num_gathered, flat_ring.shape[0]),
    ):
        local = predecessors - first
        here = valid & (local >= 0) & (local < count)
        even[here] = source[local[here]]
    odd[valid] = rows[closing_rows[valid]]
    top = torch.maximum(even[:, dim:], odd[:, dim:])
    weight_even = wide.exp(even[:, dim:] - top)
    weight_odd = wide.exp(odd[:, dim:] - top)
    total = weight_even + weight_odd
    pooled = weight_even / total * even[:, :dim] + weight_odd / total * odd[:, :dim]
    latents = rms_norm_reference(pooled.bfloat16(), norm_weight, eps)
    return torch.where(valid[:, None], latents, torch.zeros_like(latents))


@triton.jit
def _find_reader(closing_ptr, predecessor_ptr, num_groups, num_rows, wanted, SCAN: tl.constexpr):
    """1 if a valid group has the predecessor ``wanted``, else 0."""
    found = tl.zeros([SCAN], tl.int32)
    for start in range(0, num_groups, SCAN):
        group = start + tl.arange(0, SCAN)
        closing = tl.load(closing_ptr + group, mask=group < num_groups, other=-1)
        predecessor = tl.load(predecessor_ptr + group, mask=group < num_groups, other=-1)
        reads = (closing >= 0) & (closing < num_rows) & (predecessor == wanted)
        found = tl.maximum(found, reads.to(tl.int32))
    return tl.max(found, axis=0)


@triton.jit
def _find_open_row(slots_ptr, sources_ptr, num_open, num_open_rows, slot, SCAN: tl.constexpr):
    """The row to be stored in ring slot ``slot``; -1 for none."""
    found = tl.full([SCAN], -1, tl.int64)
    for start in range(0, num_open, SCAN):
        item = start + tl.arange(0, SCAN)
        there = tl.load(slots_ptr + item, mask=item < num_open, other=-1)
        source = tl.load(sources_ptr + item, mask=item < num_open, other=-1)
        wanted = (there == slot) & (source < num_open_rows)
        found = tl.maximum(found, tl.where(wanted, source, -1))
    return tl.max(found, axis=0)


@triton.jit
def _copy_row(source_ptr, target_ptr, keep, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Copy WIDTH channels if ``keep``."""
    channel = tl.arange(0, BLOCK_WIDTH)
    mask = channel < tl.where(keep, WIDTH, 0)
    tl.store(target_ptr + channel, tl.load(source_ptr + channel, mask=mask, other=0.0), mask=mask)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_gathered",
        "num_ring_slots",
        "num_groups",
        "num_open_rows",
        "num_open",
    ]
)
def _close_groups_kernel(
    rows_ptr,
    gathered_ptr,
    ring_ptr,
    closing_ptr,
    predecessor_ptr,
    weight_ptr,
    out_ptr,
    open_ptr,
    source_ptr,
    slot_ptr,
    num_rows,
    num_gathered,
    num_ring_slots,
    num_groups,
    num_open_rows,
    num_open,
    eps,
    stride_row,
    stride_gathered,
    stride_ring_block,
    stride_ring_row,
    stride_open,
    RING_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WRITE: tl.constexpr,
):
    """One program owns one group, all channels of its latent; with WRITE the last own open rows."""
    group = tl.program_id(0).to(tl.int64)
    if WRITE and group >= num_groups:
        item = group - num_groups
        slot = tl.load(slot_ptr + item)
        source = tl.load(source_ptr + item)
        keep = (source >= 0) & (source < num_open_rows) & (slot >= 0) & (slot < num_ring_slots)
        wanted = num_rows.to(tl.int64) + num_gathered + slot
        read = _find_reader(closing_ptr, predecessor_ptr, num_groups, num_rows, wanted, 512)
        target = slot // RING_ROWS * stride_ring_block + slot % RING_ROWS * stride_ring_row
        _copy_row(
            open_ptr + source * stride_open,
            ring_ptr + target,
            tl.where(read == 0, keep, False),
            2 * DIM,
            2 * BLOCK_DIM,
        )
        return
    channel = tl.arange(0, BLOCK_DIM)
    inside = channel < DIM
    weight = from_bfloat16(tl.load(weight_ptr + channel, mask=inside, other=0.0))
    closing = tl.load(closing_ptr + group)
    predecessor = tl.load(predecessor_ptr + group)
    first_ring = num_rows.to(tl.int64) + num_gathered
    valid = (closing >= 0) & (closing < num_rows)
    valid &= (predecessor >= 0) & (predecessor < first_ring + num_ring_slots)

    # Only pointers are selected: one row is read for the predecessor, wherever it lies.
    slot = predecessor - first_ring
    ring_row = slot // RING_ROWS * stride_ring_block + slot % RING_ROWS * stride_ring_row
    gathered_row = (predecessor - num_rows) * stride_gathered
    even_ptr = tl.where(
        predecessor < num_rows,
        rows_ptr + predecessor * stride_row,
        tl.where(predecessor < first_ring, gathered_ptr + gathered_row, ring_ptr + ring_row),
    )
    odd_ptr = rows_ptr + closing * stride_row
    # A scalar bound: the interpreter mangles a scalar truth value that is spread over a block.
    mask = channel < tl.where(valid, DIM, 0)
    even_gate = tl.load(even_ptr + DIM + channel, mask=mask, other=0.0)
    odd_gate = tl.load(odd_ptr + DIM + channel, mask=mask, other=0.0)
    even = tl.load(even_ptr + channel, mask=mask, other=0.0)
    odd = tl.load(odd_ptr + channel, mask=mask, other=0.0)
    if WRITE and valid & (slot >= 0):
        source = _find_open_row(slot_ptr, source_ptr, num_open, num_open_rows, slot, 128)
        # The ring row has been read by the whole program before any part of it is replaced.
        tl.debug_barrier()
        at = open_ptr + source * stride_open
        _copy_row(at, ring_ptr + ring_row, source >= 0, 2 * DIM, 2 * BLOCK_DIM)

    # Softmax over the two tokens. ``one`` is NaN where the larger gate is not finite.
    even_leads = even_gate >= odd_gate
    top = tl.where(even_leads, even_gate, odd_gate)
    low = tl.where(even_leads, odd_gate, even_gate)
    one = (top - top) + 1.0
    small = _jit.exp(low - top)
    total = one + small
    high_share = tl.math.div_rn(one, total)
    low_share = tl.math.div_rn(small, total)
    pooled = tl.where(even_leads, high_share, low_share) * even
    pooled += tl.where(even_leads, low_share, high_share) * odd

    # RMSNorm of the rounded latent. Padded channels hold 0 / total * 0 = 0.
    latent = from_bfloat16(to_bfloat16(pooled))
    latent = weight * (latent * _jit.inverse_rms(latent, DIM, eps))
    latent = tl.where(mask, latent, 0.0)
    tl.store(out_ptr + group * DIM + channel, to_bfloat16(latent), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """How one row of ``2 * dim`` floats is spread over a program."""

    block_dim: int
    num_warps: int


def _choose_launch(dim: int) -> LaunchChoice:
    """By ``dim`` alone: a group's bits must not depend on how many groups close.

    At 512 channels four warps hold 4 channels a thread: every load is 16 bytes, and nearly all of
    the 2,048 groups of T = 4,096 are resident on the H200 at once. [measured, one launch, cold:
    12.2 us; 1, 2 and 8 warps take 15.3, 13.0 and 12.8.]
    """
    block_dim = triton.next_power_of_2(dim)
    return LaunchChoice(block_dim=block_dim, num_warps=min(8, max(1, block_dim // 128)))


def _launch(
    rows: Tensor,
    gathered_rows: Tensor,
    ring: Tensor,
    closing_rows: Tensor,
    predecessors: Tensor,
    norm_weight: Tensor,
    eps: float,
    open_rows: Tensor | None = None,
    source_rows: Tensor | None = None,
    ring_slots: Tensor | None = None,
    choice: LaunchChoice | None = None,
) -> Tensor:
    """Launch :func:`close_groups`, or with open rows :func:`close_and_write_ring`.

    Rows, ring blocks and ring rows may be strided.
    """
    num_groups, dim = closing_rows.shape[0], norm_weight.shape[0]
    out = rows.new_empty(num_groups, dim, dtype=torch.bfloat16)
    writes = open_rows is not None and ring.numel() > 0
    num_open = ring_slots.shape[0] if writes and ring_slots is not None else 0
    if num_groups + num_open == 0:
        return out
    if open_rows is None or source_rows is None or ring_slots is None:
        open_rows, source_rows, ring_slots = rows, closing_rows, predecessors
    _require_contiguous_channels(
        rows=rows, gathered_rows=gathered_rows, ring=ring, open_rows=open_rows
    )
    choice = choice or _choose_launch(dim)
    _close_groups_kernel[(num_groups + num_open,)](
        rows,
        gathered_rows,
        ring,
        closing_rows.contiguous(),
        predecessors.contiguous(),
        norm_weight.contiguous(),
        out,
        open_rows,
        source_rows.contiguous(),
        ring_slots.contiguous(),
        rows.shape[0],
        gathered_rows.shape[0],
        ring.shape[0] * ring.shape[1],
        num_groups,
        open_rows.shape[0],
        num_open,
        eps,
        rows.stride(0),
        gathered_rows.stride(0),
        ring.stride(0),
        ring.stride(1),
        open_rows.stride(0),
        RING_ROWS=max(1, ring.shape[1]),
        DIM=dim,
        BLOCK_DIM=choice.block_dim,
        WRITE=num_open > 0,
        num_warps=choice.num_warps,
        enable_fp_fusion=False,
    )
    return out


def _require_contiguous_channels(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} expected channels of stride 1, got stride {tensor.stride(-1)}; "
                "only rows and blocks may be strided"
            )


def write_ring(rows: Tensor, source_rows: Tensor, ring_slots: Tensor, ring: Tensor) -> None:
    """Store the open row of every request whose computed count becomes odd.

    Args:
        rows: ``(num_rows, 2 * dim)`` fp32.
        source_rows: ``(num_open,)`` int64, row to store; -1 or out of range = nothing.
        ring_slots: ``(num_open,)`` int64, ``ring_block * ring_rows + position % ring_rows``;
            -1 or out of range = nothing. Stored slots are distinct.
        ring: ``(num_ring_blocks, ring_rows, 2 * dim)`` fp32, mutated.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_write(rows, source_rows, ring_slots, ring)
    _write_ring_op(rows, source_rows, ring_slots, ring)


def _check_write(rows: Tensor, source_rows: Tensor, ring_slots: Tensor, ring: Tensor) -> None:
    check_dtype("rows", rows, torch.float32)
    check_dtype("ring", ring, torch.float32)
    check_dtype("source_rows", source_rows, torch.int64)
    check_dtype("ring_slots", ring_slots, torch.int64)
    check_shape("rows", rows, None, ring.shape[2], remedy="concatenate value and gate")
    check_shape("ring_slots", ring_slots, source_rows.shape[0], remedy="one slot a row")


def write_ring_reference(
    rows: Tensor, source_rows: Tensor, ring_slots: Tensor, ring: Tensor
) -> None:
    """The specification of :func:`write_ring`."""
    num_slots = ring.shape[0] * ring.shape[1]
    keep = (source_rows >= 0) & (source_rows < rows.shape[0])
    keep &= (ring_slots >= 0) & (ring_slots < num_slots)
    slots = ring_slots[keep]
    ring[slots // ring.shape[1], slots % ring.shape[1]] = rows[source_rows[keep]]


def close_and_write_ring(
    rows: Tensor,
    gathered_rows: Tensor,
    ring: Tensor,
    closing_rows: Tensor,
    predecessors: Tensor,
    norm_weight: Tensor,
    eps: float,
    open_rows: Tensor,
    source_rows: Tensor,
    ring_slots: Tensor,
) -> Tensor:
    """:func:`close_groups`, then :func:`write_ring`, in one launch.

    Args: as of :func:`close_groups`, then those of :func:`write_ring`, whose ``rows`` are here
    called ``open_rows``. No two groups have the same ring slot as predecessor.

    Returns:
        As :func:`close_groups`, which reads the ring as it was before the call.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_close(rows, gathered_rows, ring, closing_rows, predecessors, norm_weight)
    _check_write(open_rows, source_rows, ring_slots, ring)
    return _close_and_write_op(
        rows,
        gathered_rows,
        ring,
        closing_rows,
        predecessors,
        norm_weight,
        eps,
        open_rows,
        source_rows,
        ring_slots,
    )


def close_and_write_ring_reference(
    rows: Tensor,
    gathered_rows: Tensor,
    ring: Tensor,
    closing_rows: Tensor,
    predecessors: Tensor,
    norm_weight: Tensor,
    eps: float,
    open_rows: Tensor,
    source_rows: Tensor,
    ring_slots: Tensor,
) -> Tensor:
    """The specification of :func:`close_and_write_ring`."""
    closing = (rows, gathered_rows, ring, closing_rows, predecessors, norm_weight, eps)
    latents = close_groups_reference(*closing)
    write_ring_reference(open_rows, source_rows, ring_slots, ring)
    return latents


def _launch_write_ring(rows: Tensor, source_rows: Tensor, ring_slots: Tensor, ring: Tensor) -> None:
    """Launch :func:`write_ring`: no group, so the weight is not read."""
    none = source_rows[:0]
    weight = rows.new_empty(ring.shape[2] // 2, dtype=torch.bfloat16)
    _launch(rows, rows[:0], ring, none, none, weight, 0.0, rows, source_rows, ring_slots)


def _fake_close(
    rows: Tensor, gathered_rows: Tensor, ring: Tensor, closing_rows: Tensor, *_: object
) -> Tensor:
    return rows.new_empty(closing_rows.shape[0], rows.shape[1] // 2, dtype=torch.bfloat16)


def _fake_ring(rows: Tensor, source_rows: Tensor, ring_slots: Tensor, ring: Tensor) -> None:
    return None


_close_groups_op = register_op(
    "close_groups(Tensor rows, Tensor gathered_rows, Tensor ring, Tensor closing_rows,"
    " Tensor predecessors, Tensor norm_weight, float eps) -> Tensor",
    reference=close_groups_reference,
    fake=_fake_close,
    launch=_launch,
)
_close_and_write_op = register_op(
    "close_and_write_ring(Tensor rows, Tensor gathered_rows, Tensor(a!) ring, Tensor closing_rows,"
    " Tensor predecessors, Tensor norm_weight, float eps, Tensor open_rows, Tensor source_rows,"
    " Tensor ring_slots) -> Tensor",
    reference=close_and_write_ring_reference,
    fake=_fake_close,
    launch=_launch,
)
_write_ring_op = register_op(
    "write_ring(Tensor rows, Tensor source_rows, Tensor ring_slots, Tensor(a!) ring) -> ()",
    reference=write_ring_reference,
    fake=_fake_ring,
    launch=_launch_write_ring,
)
