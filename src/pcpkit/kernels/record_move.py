"""Move finished cache records between rows and slots of a paged cache, byte for byte.

A slot is ``page * rows_per_page + row``. A slot of -1 (padding, replayed or open group) is skipped
by a scatter and reads as zeros; any other slot outside the cache is an error of the plan and is
treated in the same way. Pages and rows of a cache may be strided and padded (64-bit addressing);
the bytes of one record are contiguous. Record bytes: docs/cache-layout.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels._ops import check_dtype, check_shape, register_op

PAD_SLOT_ID = -1
"""The slot of a row that must not be written."""


def scatter_records(records: Tensor, slots: Tensor, cache: Tensor) -> None:
    """Store finished records at their slots.

    Args:
        records: ``(num_rows, record_bytes)`` uint8.
        slots: ``(num_rows,)`` int64; -1 skips the row. Distinct rows have distinct slots.
        cache: ``(num_pages, rows_per_page, record_bytes)`` uint8, mutated; pages may be strided.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Example:
        ``slots = [3, -1]`` with 2 rows a page writes row 0 to page 1, row 1, and drops row 1.
    """
    check_dtype("records", records, torch.uint8)
    check_cache(cache, records.shape[1])
    check_shape("slots", slots, records.shape[0], remedy="pass one slot per record, -1 to skip")
    check_dtype("slots", slots, torch.int64)
    _scatter_records_op(records, slots, cache)


def scatter_records_reference(records: Tensor, slots: Tensor, cache: Tensor) -> None:
    """The specification of :func:`scatter_records`."""
    num_slots = cache.shape[0] * cache.shape[1]
    kept = (slots >= 0) & (slots < num_slots)
    chosen = slots[kept]
    cache[chosen // cache.shape[1], chosen % cache.shape[1]] = records[kept]


def gather_records(cache: Tensor, slots: Tensor) -> Tensor:
    """Read records back.

    Args:
        cache: ``(num_pages, rows_per_page, record_bytes)`` uint8; pages may be strided.
        slots: ``(num_rows,)`` int64; -1 and slots outside the cache read as zero bytes.

    Returns:
        ``(num_rows, record_bytes)`` uint8.
    """
    check_cache(cache, None)
    check_dtype("slots", slots, torch.int64)
    return _gather_records_op(cache, slots)


def gather_records_reference(cache: Tensor, slots: Tensor) -> Tensor:
    """The specification of :func:`gather_records`."""
    num_slots = cache.shape[0] * cache.shape[1]
    if num_slots == 0:
        return cache.new_zeros(slots.shape[0], cache.shape[2])
    kept = (slots >= 0) & (slots < num_slots)
    safe = torch.where(kept, slots, 0)
    records = cache[safe // cache.shape[1], safe % cache.shape[1]]
    return torch.where(kept[:, None], records, torch.zeros_like(records))


def check_cache(cache: Tensor, record_bytes: int | None) -> None:
    check_dtype("cache", cache, torch.uint8)
    check_shape("cache", cache, None, None, record_bytes, remedy="use the cache's record format")
    if cache.stride(2) != 1:
        raise ValueError(
            f"cache expected contiguous record bytes, got strides {cache.stride()}; "
            "slice pages or rows, not bytes"
        )


@triton.jit
def record_offsets(
    slots, num_slots, stride_page, stride_row, ROWS_PER_PAGE: tl.constexpr, ALIGN: tl.constexpr
):
    """(byte offset, whether the slot lies in the cache) of every slot, int64."""
    page = slots // ROWS_PER_PAGE
    offset = page * stride_page + (slots - page * ROWS_PER_PAGE) * stride_row
    return tl.multiple_of(offset, [ALIGN]), (slots >= 0) & (slots < num_slots)


@triton.jit
def _move_records_kernel(
    records_ptr,
    slots_ptr,
    cache_ptr,
    num_rows,
    num_slots,
    stride_record,
    stride_slot,
    stride_page,
    stride_row,
    ROWS_PER_PAGE: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    SCATTER: tl.constexpr,
):
    """One program moves ``BLOCK_ROWS`` whole records, in units of ``UNIT`` bytes.

    ``SCATTER`` copies records to their slots; otherwise slots are read into the records, zeros for
    a slot outside the cache. ``UNIT`` divides the record size, every stride and both addresses.
    """
    UNITS: tl.constexpr = RECORD_BYTES // UNIT
    unit = tl.arange(0, BLOCK_UNITS)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + unit // UNITS
    exists = (unit < BLOCK_ROWS * UNITS) & (row < num_rows)
    slots = tl.load(slots_ptr + row * stride_slot, mask=exists, other=-1)
    offset, kept = record_offsets(slots, num_slots, stride_page, stride_row, ROWS_PER_PAGE, UNIT)
    within = (unit % UNITS * UNIT)[:, None] + tl.arange(0, UNIT)[None, :]
    record_ptr = records_ptr + tl.multiple_of(row * stride_record, [UNIT])[:, None] + within
    slot_ptr = cache_ptr + offset[:, None] + within
    if SCATTER:
        value = tl.load(record_ptr, mask=exists[:, None], other=0)
        tl.store(slot_ptr, value, mask=kept[:, None])
    else:
        value = tl.load(slot_ptr, mask=kept[:, None], other=0)
        tl.store(record_ptr, value, mask=exists[:, None])


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """Rows a program owns and its warps; no row's bytes depend on either."""

    block_rows: int
    num_warps: int


def _choose_launch(units: int) -> LaunchChoice:
    """About four units a thread.

    Args:
        units: accesses (of 16 bytes at best) that one record takes.
    """
    return LaunchChoice(block_rows=max(1, 512 // units), num_warps=4)


def record_alignment(*tensors: Tensor) -> int:
    """Largest power of two <= 16 that divides every record's address and size, in bytes."""
    multiple = 16
    for tensor in tensors:
        multiple = math.gcd(multiple, tensor.data_ptr(), tensor.shape[-1], *tensor.stride()[:-1])
    return multiple


def _move(
    records: Tensor, slots: Tensor, cache: Tensor, scatter: bool, choice: LaunchChoice | None
) -> None:
    num_rows, record_bytes = records.shape
    if num_rows == 0 or record_bytes == 0:
        return
    if cache.stride(2) != 1:
        raise ValueError(f"cache expected contiguous record bytes, got strides {cache.stride()}")
    unit = record_alignment(records, cache)
    choice = choice or _choose_launch(record_bytes // unit)
    _move_records_kernel[(triton.cdiv(num_rows, choice.block_rows),)](
        records,
        slots,
        cache,
        num_rows,
        cache.shape[0] * cache.shape[1],
        records.stride(0),
        slots.stride(0),
        cache.stride(0),
        cache.stride(1),
        ROWS_PER_PAGE=max(cache.shape[1], 1),
        RECORD_BYTES=record_bytes,
        UNIT=unit,
        BLOCK_ROWS=choice.block_rows,
        BLOCK_UNITS=triton.next_power_of_2(choice.block_rows * (record_bytes // unit)),
        SCATTER=scatter,
        num_warps=choice.num_warps,
    )


def _launch_scatter(
    records: Tensor, slots: Tensor, cache: Tensor, choice: LaunchChoice | None = None
) -> None:
    """Triton launcher of :func:`scatter_records`."""
    records = records if records.stride(1) == 1 else records.contiguous()
    _move(records, slots, cache, True, choice)


def _launch_gather(cache: Tensor, slots: Tensor, choice: LaunchChoice | None = None) -> Tensor:
    """Triton launcher of :func:`gather_records`."""
    out = _fake_gather(cache, slots)
    _move(out, slots, cache, False, choice)
    return out


def _fake_scatter(records: Tensor, slots: Tensor, cache: Tensor) -> None:
    return None


def _fake_gather(cache: Tensor, slots: Tensor) -> Tensor:
    return cache.new_empty(slots.shape[0], cache.shape[2])


_scatter_records_op = register_op(
    "scatter_records(Tensor records, Tensor slots, Tensor(a!) cache) -> ()",
    reference=scatter_records_reference,
    fake=_fake_scatter,
    launch=_launch_scatter,
)
_gather_records_op = register_op(
    "gather_records(Tensor cache, Tensor slots) -> Tensor",
    reference=gather_records_reference,
    fake=_fake_gather,
    launch=_launch_gather,
)
