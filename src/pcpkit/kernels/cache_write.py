"""Rows into the paged quantized caches: RoPE, quantize, store.

``encode_records`` turns BF16 latents into finished cache records (RoPE of the last channels at the
row's position, rounded to BF16, then quantized over all channels: model-spec sections 3.2, 3.4,
3.5). ``cache_write`` also stores them at their slots in the same pass, for callers that do not
gather records across ranks in between; others follow with ``scatter_records``. Slots and pages: see
``record_move``. Record bytes: docs/cache-layout.md.

Rounding points: those of ``rope``, then those of ``formats``. A position outside the table gives
NaN in the groups of the rotated channels; a group with NaN or infinity is stored as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.formats import RECORD_FORMATS
from pcpkit.kernels import _jit
from pcpkit.kernels._ops import check_dtype, check_shape, register_op
from pcpkit.kernels.record_move import (
    PAD_SLOT_ID,
    check_cache,
    gather_records,
    record_alignment,
    record_offsets,
    scatter_records,
    scatter_records_reference,
)
from pcpkit.kernels.rope import apply_rope_reference, load_angles, rotate

__all__ = ["PAD_SLOT_ID", "cache_write", "encode_records", "gather_records", "scatter_records"]


def encode_records(latents: Tensor, positions: Tensor, cos_sin: Tensor, record: str) -> Tensor:
    """Rotate and quantize rows into cache records.

    Args:
        latents: ``(num_rows, dim)`` bf16, normalized, before RoPE.
        positions: ``(num_rows,)`` int64: own position of a window row, first position of the group
            for compressed rows and index keys.
        cos_sin: ``(num_positions, rope_dim)`` fp32 of this layer's table; a table without columns
            rotates nothing.
        record: ``"mxfp8"`` (528 bytes at 512 channels), ``"nvfp4"`` (288) or ``"mxfp4"`` (68 at
            128).

    Returns:
        ``(num_rows, record_bytes)`` uint8.

    Raises:
        ValueError: unknown record, shapes or dtypes that do not fit.
    """
    _check_rows(latents, positions, cos_sin, record)
    return _encode_records_op(latents, positions, cos_sin, record)


def _check_rows(latents: Tensor, positions: Tensor, cos_sin: Tensor, record: str) -> None:
    if record not in RECORD_FORMATS:
        raise ValueError(f"record expected one of {sorted(RECORD_FORMATS)}, got {record!r}")
    check_dtype("latents", latents, torch.bfloat16)
    check_shape("latents", latents, None, None, remedy="pass (rows, channels)")
    check_dtype("positions", positions, torch.int64)
    check_shape("positions", positions, latents.shape[0], remedy="pass one position per row")
    check_dtype("cos_sin", cos_sin, torch.float32)
    dim, rope_dim = latents.shape[1], cos_sin.shape[1]
    if rope_dim % 2 or rope_dim > dim:
        raise ValueError(
            f"cos_sin expected an even number of columns <= {dim}, got {rope_dim}; "
            "pass this layer's table"
        )


def encode_records_reference(
    latents: Tensor, positions: Tensor, cos_sin: Tensor, record: str
) -> Tensor:
    """The specification of :func:`encode_records`."""
    rotated = apply_rope_reference(latents[:, None], positions, cos_sin)[:, 0]
    return RECORD_FORMATS[record].encode(rotated)


def cache_write(
    latents: Tensor, positions: Tensor, cos_sin: Tensor, slots: Tensor, cache: Tensor, record: str
) -> None:
    """:func:`encode_records` followed by :func:`scatter_records`, without the records in memory.

    Args: as of the two functions. Mutates ``cache``.
    """
    _check_rows(latents, positions, cos_sin, record)
    size = RECORD_FORMATS[record].record_bytes(latents.shape[1])
    check_cache(cache, size)
    check_shape("slots", slots, latents.shape[0], remedy="pass one slot per row, -1 to skip")
    check_dtype("slots", slots, torch.int64)
    _cache_write_op(latents, positions, cos_sin, slots, cache, record)


def cache_write_reference(
    latents: Tensor, positions: Tensor, cos_sin: Tensor, slots: Tensor, cache: Tensor, record: str
) -> None:
    """The specification of :func:`cache_write`."""
    records = encode_records_reference(latents, positions, cos_sin, record)
    scatter_records_reference(records, slots, cache)


@triton.jit
def _store_channels(
    out_ptr,
    offset,
    kept,
    x,
    RECORD: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Quantize channels ``FIRST .. FIRST + COUNT`` (BF16 [ROWS, BLOCK]) into kept records."""
    ROWS: tl.constexpr = x.shape[0]
    BLOCK: tl.constexpr = x.shape[1]
    PER_BYTE: tl.constexpr = 1 if RECORD == "mxfp8" else 2
    if RECORD == "mxfp8":
        codes, scales = _jit.quantize_mxfp8(_jit.from_bfloat16(x), ROWS, BLOCK, GROUP)
    elif RECORD == "mxfp4":
        codes, scales = _jit.quantize_mxfp4(_jit.from_bfloat16(x), ROWS, BLOCK, GROUP)
    else:
        codes, scales = _jit.quantize_nvfp4(_jit.from_bfloat16(x), ROWS, BLOCK, GROUP)
    byte = tl.arange(0, BLOCK // PER_BYTE)[None, :]
    code_ptr = out_ptr + offset[:, None] + (FIRST // PER_BYTE + byte)
    tl.store(code_ptr, codes, mask=kept[:, None] & (byte < COUNT // PER_BYTE))
    group = tl.arange(0, BLOCK // GROUP)[None, :]
    scale_ptr = out_ptr + offset[:, None] + (DIM // PER_BYTE + FIRST // GROUP + group)
    tl.store(scale_ptr, scales, mask=kept[:, None] & (group < COUNT // GROUP))


@triton.jit
def _encode_kernel(
    latents_ptr,
    positions_ptr,
    cos_sin_ptr,
    slots_ptr,
    out_ptr,
    num_rows,
    num_positions,
    num_slots,
    stride_latent,
    stride_position,
    stride_table,
    stride_slot,
    stride_page,
    stride_row,
    ROWS_PER_PAGE: tl.constexpr,
    ALIGN: tl.constexpr,
    RECORD: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One program turns ``BLOCK_ROWS`` latents into records and stores each at its slot.

    Without slots (``slots_ptr`` None) row ``i`` has slot ``i``. The last
    ``TAIL`` channels are whole groups that hold the ``ROPE_DIM`` rotated ones; the channels before
    them are a tile of their own, so that their threads do not go through the rotation.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = rows < num_rows
    HEAD: tl.constexpr = DIM - TAIL

    # All loads first, none waits for the slots: a skipped row costs bandwidth, not a round trip.
    latent_ptr = latents_ptr + rows[:, None] * stride_latent
    if TAIL > 0:
        positions = tl.load(positions_ptr + rows * stride_position, mask=exists, other=0)
        channels = tl.arange(0, BLOCK_TAIL)[None, :]
        mask = exists[:, None] & (channels < TAIL)
        tail = tl.load(latent_ptr + HEAD + channels, mask=mask, other=0.0)
    if HEAD > 0:
        channels = tl.arange(0, BLOCK_HEAD)[None, :]
        mask = exists[:, None] & (channels < HEAD)
        head = tl.load(latent_ptr + channels, mask=mask, other=0.0)
    slots = rows  # past the last row these lie outside, as -1 does
    if slots_ptr is not None:
        slots = tl.load(slots_ptr + rows * stride_slot, mask=exists, other=-1)
    offset, kept = record_offsets(slots, num_slots, stride_page, stride_row, ROWS_PER_PAGE, ALIGN)
    if TAIL > 0:
        cos, sin = load_angles(
            cos_sin_ptr, positions, num_positions, stride_table, TAIL, ROPE_DIM, BLOCK_TAIL
        )

    if HEAD > 0:
        _store_channels(out_ptr, offset, kept, head, RECORD, GROUP, DIM, 0, HEAD)
    if TAIL > 0:
        tail = rotate(tail, cos, sin, TAIL, ROPE_DIM, False)
        _store_channels(out_ptr, offset, kept, tail, RECORD, GROUP, DIM, HEAD, TAIL)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """Rows a program owns and its warps; no row's bytes depend on either."""

    block_rows: int
    num_warps: int


def _choose_encode(dim: int) -> LaunchChoice:
    """A warp a row of 512 channels: two 16-byte loads and one 16-byte store a thread."""
    return LaunchChoice(block_rows=max(1, 2048 // triton.next_power_of_2(dim)), num_warps=4)


def _encode_into(
    out: Tensor,
    latents: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor | None,
    record: str,
    choice: LaunchChoice | None,
) -> None:
    """Encode rows into ``out`` ``(num_pages, rows_per_page, record_bytes)``."""
    num_rows, dim = latents.shape
    num_slots = out.shape[0] * out.shape[1]
    if num_rows == 0 or num_slots == 0:
        return
    if out.stride(2) != 1:
        raise ValueError(f"cache expected contiguous record bytes, got strides {out.stride()}")
    group, rope_dim = RECORD_FORMATS[record].group, cos_sin.shape[1]
    latents = latents if latents.stride(1) == 1 else latents.contiguous()
    cos_sin = cos_sin if cos_sin.stride(1) == 1 else cos_sin.contiguous()
    tail = triton.cdiv(rope_dim, group) * group
    choice = choice or _choose_encode(dim)
    _encode_kernel[(triton.cdiv(num_rows, choice.block_rows),)](
        latents,
        positions,
        cos_sin,
        slots,
        out,
        num_rows,
        cos_sin.shape[0],
        num_slots,
        latents.stride(0),
        positions.stride(0),
        cos_sin.stride(0),
        0 if slots is None else slots.stride(0),
        out.stride(0),
        out.stride(1),
        ROWS_PER_PAGE=out.shape[1],
        ALIGN=record_alignment(out),
        RECORD=record,
        GROUP=group,
        DIM=dim,
        ROPE_DIM=rope_dim,
        TAIL=tail,
        BLOCK_HEAD=triton.next_power_of_2(max(dim - tail, 1)),
        BLOCK_TAIL=triton.next_power_of_2(max(tail, 1)),
        BLOCK_ROWS=choice.block_rows,
        num_warps=choice.num_warps,
        enable_fp_fusion=False,
    )


def _launch_encode(
    latents: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    record: str,
    choice: LaunchChoice | None = None,
) -> Tensor:
    """Triton launcher of :func:`encode_records`."""
    out = _fake_encode(latents, positions, cos_sin, record)
    # One page of one row each: the page size is compiled in, the number of rows must not be.
    _encode_into(out[:, None], latents, positions, cos_sin, None, record, choice)
    return out


def _launch_write(
    latents: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    record: str,
    choice: LaunchChoice | None = None,
) -> None:
    """Triton launcher of :func:`cache_write`."""
    _encode_into(cache, latents, positions, cos_sin, slots, record, choice)


def _fake_encode(latents: Tensor, positions: Tensor, cos_sin: Tensor, record: str) -> Tensor:
    size = RECORD_FORMATS[record].record_bytes(latents.shape[1])
    return latents.new_empty(latents.shape[0], size, dtype=torch.uint8)


def _fake_write(*_: object) -> None:
    return None


_encode_records_op = register_op(
    "encode_records(Tensor latents, Tensor positions, Tensor cos_sin, str record) -> Tensor",
    reference=encode_records_reference,
    fake=_fake_encode,
    launch=_launch_encode,
)
_cache_write_op = register_op(
    "cache_write(Tensor latents, Tensor positions, Tensor cos_sin, Tensor slots,"
    " Tensor(a!) cache, str record) -> ()",
    reference=cache_write_reference,
    fake=_fake_write,
    launch=_launch_write,
)
