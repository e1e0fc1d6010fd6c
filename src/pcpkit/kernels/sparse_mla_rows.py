"""First phase of sparse MLA on CUDA: dequantize the rows that queries read, and index them.

One launch does all of it: its programs take a share of the compressed part, of the window part or
of the index. Three launches cost a decode step of 8 to 128 rows 7 to 9 us more [measured: H200].

The attention kernels read BF16 rows of one workspace through a table ``row_index`` of shape
``(num_rows, window_size + num_selected)``: window oldest to newest, then the selection as listed;
-1 marks a slot that is skipped. Dequantization is exact, so a workspace changes no bit; it takes
the decoding out of the attention's inner loop, where plain Triton cannot hide it.

A part of the workspace (window or compressed) holds one of three things: every row of the *pool*,
addressed by ``page * rows_per_page + row``; every position of the *requests*, addressed by
``request * span + position``; or every slot of the *queries*. The smallest is chosen from shapes
alone (:func:`choose_part`), so no device value is needed on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels._jit import e2m1_decode, e4m3_decode, e8m0_decode

_ROWS_PER_PROGRAM = 8
_SLOTS_PER_PROGRAM = 128
_WARPS = 2
"""The fastest of 4, 8, 16 rows and 2, 4, 8 warps for 64 queries on an H200; 8 and 128 queries take
no more than 0.6 us from their own best."""


POOL = tl.constexpr(0)
REQUESTS = tl.constexpr(1)
QUERIES = tl.constexpr(2)
"""What a part of the workspace holds a row for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the workspace: what it holds (POOL, REQUESTS or QUERIES) and how many rows."""

    holds: int
    num_rows: int


def choose_part(*, pool: int, requests: int, queries: int) -> Part:
    """The cheapest way to hold a part.

    Args:
        pool: rows of the cache.
        requests: positions that all block-table rows cover.
        queries: slots of all query rows.

    Example:
        4,096 queries of 512 slots on one request of 8,192 positions in a large pool hold the
        request; 8 such queries hold their 4,096 slots.
    """
    counts = {POOL.value: pool, REQUESTS.value: requests, QUERIES.value: queries}
    holds = min(counts, key=lambda kind: counts[kind])
    return Part(holds=holds, num_rows=counts[holds])


@triton.jit
def locate(table_ptr, request, position, stride_table, table_width, ROWS_PER_PAGE: tl.constexpr):
    """Page and row of a position; page -1 if it is negative, outside the table or not mapped."""
    block = position // ROWS_PER_PAGE
    inside = (position >= 0) & (block < table_width)
    entry = table_ptr + request.to(tl.int64) * stride_table + block
    page = tl.load(entry, mask=inside, other=-1)
    return page, position % ROWS_PER_PAGE


@triton.jit
def _source(
    row,
    positions_ptr,
    request_ptr,
    table_ptr,
    selection_ptr,
    num_slots,
    stride_table,
    table_width,
    stride_selection,
    in_range,
    HOLDS: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
):
    """Page and row of the cache that workspace row ``row`` holds; page -1 for none."""
    major, minor = row // num_slots, row % num_slots
    if HOLDS == POOL:
        return tl.where(in_range, major, -1), minor
    if HOLDS == REQUESTS:
        request = major
        position = minor
    else:
        request = tl.load(request_ptr + major, mask=in_range, other=0)
        if WINDOW:
            last = tl.load(positions_ptr + major, mask=in_range, other=0).to(tl.int32)
            position = last - num_slots + 1 + minor
        else:
            position = tl.load(
                selection_ptr + major.to(tl.int64) * stride_selection + minor,
                mask=in_range,
                other=-1,
            )
    position = tl.where(in_range, position, -1)
    return locate(table_ptr, request, position, stride_table, table_width, ROWS_PER_PAGE)


@triton.jit
def _dequantize_tile(
    tile,
    cache_ptr,
    out_ptr,
    positions_ptr,
    request_ptr,
    table_ptr,
    selection_ptr,
    num_out,
    num_slots,
    stride_table,
    table_width,
    stride_selection,
    stride_page,
    stride_row,
    HOLDS: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    DIM: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Dequantize ``ROWS`` workspace rows; rows without a source are left unwritten."""
    # A workspace has fewer than 2^31 rows (they are indexed by int32); bytes need more.
    row = tile * ROWS + tl.arange(0, ROWS)
    in_range = row < num_out
    page, page_row = _source(
        row,
        positions_ptr,
        request_ptr,
        table_ptr,
        selection_ptr,
        num_slots,
        stride_table,
        table_width,
        stride_selection,
        in_range,
        HOLDS,
        WINDOW,
        ROWS_PER_PAGE,
    )
    held = page >= 0
    record = cache_ptr + page.to(tl.int64) * stride_page + page_row * stride_row
    if PACKED:
        # A byte holds an even channel (low) and an odd one; 16 channels share an E4M3 scale. Both
        # products have at most 8 significant bits: the upper half of the FP32 is the BF16.
        byte = tl.arange(0, DIM // 2)
        packed = tl.load(record[:, None] + byte[None, :], mask=held[:, None], other=0)
        group = tl.arange(0, DIM // 16)
        scale_at = record[:, None] + DIM // 2 + group[None, :]
        scales = e4m3_decode(tl.load(scale_at, mask=held[:, None], other=0)).to(tl.float32)
        scale = tl.reshape(
            tl.broadcast_to(scales[:, :, None], [ROWS, DIM // 16, 8]), [ROWS, DIM // 2]
        )
        even = (e2m1_decode(packed & 15) * scale).to(tl.int32, bitcast=True)
        odd = (e2m1_decode(packed >> 4) * scale).to(tl.int32, bitcast=True)
        pair = ((even >> 16) & 0xFFFF) | (odd & -65536)
        out = (
            out_ptr.to(tl.pointer_type(tl.int32))
            + row.to(tl.int64)[:, None] * (DIM // 2)
            + byte[None, :]
        )
        tl.store(out, pair, mask=held[:, None])
    else:
        channel = tl.arange(0, DIM)
        codes = tl.load(record[:, None] + channel[None, :], mask=held[:, None], other=0)
        group = tl.arange(0, DIM // 32)
        scale_at = record[:, None] + DIM + group[None, :]
        scales = e8m0_decode(tl.load(scale_at, mask=held[:, None], other=0))
        scale = tl.reshape(tl.broadcast_to(scales[:, :, None], [ROWS, DIM // 32, 32]), [ROWS, DIM])
        value = e4m3_decode(codes).to(tl.float32) * scale
        out = out_ptr + row.to(tl.int64)[:, None] * DIM + channel[None, :]
        tl.store(out, value.to(tl.bfloat16), mask=held[:, None])


@triton.jit
def _index_tile(
    tile,
    index_ptr,
    positions_ptr,
    request_ptr,
    floor_ptr,
    window_table_ptr,
    table_ptr,
    selection_ptr,
    window_span,
    compressed_span,
    window_rows,
    num_selected,
    stride_window_table,
    window_table_width,
    stride_table,
    table_width,
    stride_selection,
    WINDOW: tl.constexpr,
    WINDOW_HOLDS: tl.constexpr,
    COMPRESSED_HOLDS: tl.constexpr,
    WINDOW_PAGE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill ``BLOCK`` slots of one query's row of ``row_index``."""
    tiles_per_query = tl.cdiv(WINDOW + num_selected, BLOCK)
    query = (tile // tiles_per_query).to(tl.int64)
    request = tl.load(request_ptr + query)
    last = tl.load(positions_ptr + query).to(tl.int32)
    floor = tl.maximum(tl.load(floor_ptr + query), 0)
    num_slots = WINDOW + num_selected
    slot = tile % tiles_per_query * BLOCK + tl.arange(0, BLOCK)
    in_window = slot < WINDOW
    position = last - WINDOW + 1 + slot
    position = tl.where(in_window & (position >= floor), position, -1)
    page, row = locate(
        window_table_ptr, request, position, stride_window_table, window_table_width, WINDOW_PAGE
    )
    if WINDOW_HOLDS == POOL:
        row = page * WINDOW_PAGE + row
    elif WINDOW_HOLDS == REQUESTS:
        row = request * window_span + position
    else:
        row = query.to(tl.int32) * WINDOW + slot
    window_row = tl.where(page >= 0, row, -1)
    entry = slot - WINDOW
    chosen = (entry >= 0) & (entry < num_selected)
    selected = selection_ptr + query * stride_selection + entry
    where = tl.load(selected, mask=chosen, other=-1)
    page, row = locate(table_ptr, request, where, stride_table, table_width, PAGE)
    if COMPRESSED_HOLDS == POOL:
        row = page * PAGE + row
    elif COMPRESSED_HOLDS == REQUESTS:
        row = request * compressed_span + where
    else:
        row = query.to(tl.int32) * num_selected + entry
    row = tl.where(page >= 0, window_rows + row, -1)
    row = tl.where(in_window, window_row, row)
    tl.store(index_ptr + query * num_slots + slot, row, mask=slot < num_slots)


@triton.jit(do_not_specialize=["window_rows", "compressed_rows"])
def _collect_kernel(
    window_ptr,
    compressed_ptr,
    rows_ptr,
    index_ptr,
    positions_ptr,
    request_ptr,
    floor_ptr,
    window_table_ptr,
    table_ptr,
    selection_ptr,
    window_rows,
    compressed_rows,
    window_slots,
    compressed_slots,
    window_span,
    compressed_span,
    num_selected,
    stride_window_table,
    window_table_width,
    stride_table,
    table_width,
    stride_selection,
    stride_window_page,
    stride_window_row,
    stride_page,
    stride_row,
    WINDOW: tl.constexpr,
    WINDOW_HOLDS: tl.constexpr,
    COMPRESSED_HOLDS: tl.constexpr,
    WINDOW_PAGE: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program owns a tile of the compressed part, of the window part or of the index."""
    tile = tl.program_id(0)
    compressed_tiles = tl.cdiv(compressed_rows, ROWS)
    window_tiles = tl.cdiv(window_rows, ROWS)
    if tile < compressed_tiles:
        _dequantize_tile(
            tile,
            compressed_ptr,
            rows_ptr + window_rows.to(tl.int64) * DIM,
            positions_ptr,
            request_ptr,
            table_ptr,
            selection_ptr,
            compressed_rows,
            compressed_slots,
            stride_table,
            table_width,
            stride_selection,
            stride_page,
            stride_row,
            COMPRESSED_HOLDS,
            False,
            PAGE,
            DIM,
            PACKED,
            ROWS,
        )
    elif tile < compressed_tiles + window_tiles:
        _dequantize_tile(
            tile - compressed_tiles,
            window_ptr,
            rows_ptr,
            positions_ptr,
            request_ptr,
            window_table_ptr,
            selection_ptr,
            window_rows,
            window_slots,
            stride_window_table,
            window_table_width,
            stride_selection,
            stride_window_page,
            stride_window_row,
            WINDOW_HOLDS,
            True,
            WINDOW_PAGE,
            DIM,
            False,
            ROWS,
        )
    else:
        _index_tile(
            tile - compressed_tiles - window_tiles,
            index_ptr,
            positions_ptr,
            request_ptr,
            floor_ptr,
            window_table_ptr,
            table_ptr,
            selection_ptr,
            window_span,
            compressed_span,
            window_rows,
            num_selected,
            stride_window_table,
            window_table_width,
            stride_table,
            table_width,
            stride_selection,
            WINDOW,
            WINDOW_HOLDS,
            COMPRESSED_HOLDS,
            WINDOW_PAGE,
            PAGE,
            BLOCK,
        )


def collect_rows(
    positions: Tensor,
    row_request: Tensor,
    window_cache: Tensor,
    window_block_table: Tensor,
    window_floor: Tensor,
    compressed_cache: Tensor,
    block_table: Tensor,
    selection: Tensor,
    window_size: int,
    compressed_record: str,
    query_like: Tensor,
) -> tuple[Tensor, Tensor]:
    """Dequantize and index the rows of a sparse attention call.

    Arguments as in ``sparse_mla``, with at least one query; the rows get device, dtype and channels
    of ``query_like``.

    Returns:
        ``rows (num_workspace_rows, head_dim)`` bf16, unwritten where nothing maps to a row, and
        ``row_index (num_rows, window_size + num_selected)`` int32, -1 = skip.
    """
    num_rows, num_selected = selection.shape
    num_reqs, compressed_width = block_table.shape
    # A window-only layer may pass a cache without pages.
    window_page, page = window_cache.shape[1], max(compressed_cache.shape[1], 1)
    window_span = window_block_table.shape[1] * window_page
    compressed_span = compressed_width * page
    window = choose_part(
        pool=window_cache.shape[0] * window_page,
        requests=num_reqs * window_span,
        queries=num_rows * window_size,
    )
    compressed = choose_part(
        pool=compressed_cache.shape[0] * page,
        requests=num_reqs * compressed_span,
        queries=num_rows * num_selected,
    )
    rows = query_like.new_empty(window.num_rows + compressed.num_rows, query_like.shape[2])
    index = selection.new_empty(num_rows, window_size + num_selected)
    num_tiles = triton.cdiv(window.num_rows, _ROWS_PER_PROGRAM)
    num_tiles += triton.cdiv(compressed.num_rows, _ROWS_PER_PROGRAM)
    num_tiles += num_rows * triton.cdiv(index.shape[1], _SLOTS_PER_PROGRAM)
    _collect_kernel[(num_tiles,)](
        window_cache,
        compressed_cache,
        rows,
        index,
        positions,
        row_request,
        window_floor,
        window_block_table,
        block_table,
        selection,
        window.num_rows,
        compressed.num_rows,
        (window_page, window_span, window_size)[window.holds],
        (page, compressed_span, num_selected)[compressed.holds],
        window_span,
        compressed_span,
        num_selected,
        window_block_table.stride(0),
        window_block_table.shape[1],
        block_table.stride(0),
        compressed_width,
        selection.stride(0),
        window_cache.stride(0),
        window_cache.stride(1),
        compressed_cache.stride(0),
        compressed_cache.stride(1),
        WINDOW=window_size,
        WINDOW_HOLDS=window.holds,
        COMPRESSED_HOLDS=compressed.holds,
        WINDOW_PAGE=window_page,
        PAGE=page,
        DIM=rows.shape[1],
        PACKED=compressed_record == "nvfp4",
        ROWS=_ROWS_PER_PROGRAM,
        BLOCK=_SLOTS_PER_PROGRAM,
        num_warps=_WARPS,
    )
    return rows, index
