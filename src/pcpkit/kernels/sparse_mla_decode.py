"""Sparse MLA for few query rows: one program a tile of slots, then one a slice of channels.

One program a query cannot use a GPU when there are a handful of queries. Here the first kernel
dequantizes one tile of slots of one query and computes its scores, the second walks the tiles for a
slice of the value channels. A score and a value channel are computed by the same operations in the
same order as in ``sparse_mla._attend_kernel`` and ``sparse_mla_hopper``, so both routes give the
same bits: which one runs may depend on the number of queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels._jit import dot, e2m1_decode, e4m3_decode, e8m0_decode
from pcpkit.kernels.sparse_mla_rows import locate


@triton.jit
def _decode_records(record, held, DIM: tl.constexpr, PACKED: tl.constexpr, SLOTS: tl.constexpr):
    """BF16 rows ``[SLOTS, DIM]`` of records; zeros where not held."""
    if PACKED:
        byte = tl.arange(0, DIM // 2)
        packed = tl.load(record[:, None] + byte[None, :], mask=held[:, None], other=0)
        group = tl.arange(0, DIM // 16)
        scale_at = record[:, None] + DIM // 2 + group[None, :]
        scales = e4m3_decode(tl.load(scale_at, mask=held[:, None], other=0)).to(tl.float32)
        scale = tl.reshape(
            tl.broadcast_to(scales[:, :, None], [SLOTS, DIM // 16, 8]), [SLOTS, DIM // 2]
        )
        even = (e2m1_decode(packed & 15) * scale).to(tl.bfloat16)
        odd = (e2m1_decode(packed >> 4) * scale).to(tl.bfloat16)
        return tl.reshape(tl.join(even, odd), [SLOTS, DIM])
    channel = tl.arange(0, DIM)
    codes = tl.load(record[:, None] + channel[None, :], mask=held[:, None], other=0)
    group = tl.arange(0, DIM // 32)
    scale_at = record[:, None] + DIM + group[None, :]
    scales = e8m0_decode(tl.load(scale_at, mask=held[:, None], other=0))
    scale = tl.reshape(tl.broadcast_to(scales[:, :, None], [SLOTS, DIM // 32, 32]), [SLOTS, DIM])
    value = e4m3_decode(codes).to(tl.float32) * scale
    return tl.where(held[:, None], value, 0.0).to(tl.bfloat16)


@triton.jit
def _scores_kernel(
    query_ptr,
    rows_ptr,
    scores_ptr,
    positions_ptr,
    request_ptr,
    floor_ptr,
    window_ptr,
    window_table_ptr,
    compressed_ptr,
    table_ptr,
    selection_ptr,
    num_heads,
    num_selected,
    num_slots,
    stride_query_row,
    stride_query_head,
    stride_window_page,
    stride_window_row,
    stride_window_table,
    window_table_width,
    stride_page,
    stride_row,
    stride_table,
    table_width,
    stride_selection,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_PAGE: tl.constexpr,
    PAGE: tl.constexpr,
    PACKED: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program owns ``TILES`` tiles of slots of one query: their rows and all heads' scores."""
    query_row = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + query_row)
    last = tl.load(positions_ptr + query_row).to(tl.int32)
    floor = tl.maximum(tl.load(floor_ptr + query_row), 0)
    dim = tl.arange(0, DIM)
    head = tl.arange(0, HEADS)
    query_at = query_ptr + query_row * stride_query_row + head[:, None] * stride_query_head
    query = tl.load(query_at + dim[None, :], mask=(head < num_heads)[:, None], other=0.0)
    log2e: tl.constexpr = 1.4426950408889634
    first = tl.program_id(1) * (TILES * SLOTS)
    for start in range(first, min(first + TILES * SLOTS, num_slots), SLOTS):
        slot = start + tl.arange(0, SLOTS)
        if start < WINDOW:
            position = last - WINDOW + 1 + slot
            position = tl.where(position >= floor, position, -1)
            page, row = locate(
                window_table_ptr,
                request,
                position,
                stride_window_table,
                window_table_width,
                WINDOW_PAGE,
            )
            record = window_ptr + page.to(tl.int64) * stride_window_page + row * stride_window_row
            keys = _decode_records(record, page >= 0, DIM, False, SLOTS)
        else:
            entry = slot - WINDOW
            selected = selection_ptr + query_row * stride_selection + entry
            position = tl.load(selected, mask=entry < num_selected, other=-1)
            page, row = locate(table_ptr, request, position, stride_table, table_width, PAGE)
            record = compressed_ptr + page.to(tl.int64) * stride_page + row * stride_row
            keys = _decode_records(record, page >= 0, DIM, PACKED, SLOTS)
        inside = slot < num_slots
        out = rows_ptr + (query_row * num_slots + slot[:, None]) * DIM + dim[None, :]
        tl.store(out, keys, mask=inside[:, None])
        scores = dot(query, tl.trans(keys), tl.zeros([HEADS, SLOTS], tl.float32))
        scores = tl.where((page >= 0)[None, :], scores * (scale * log2e), float("-inf"))
        at = scores_ptr + (query_row * HEADS + head[:, None]) * num_slots + slot[None, :]
        tl.store(at, scores, mask=inside[None, :])


@triton.jit
def _values_kernel(
    rows_ptr,
    scores_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    num_heads,
    num_slots,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SLICE: tl.constexpr,
    SLOTS: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """One program owns ``SLICE`` value channels of one query, all heads."""
    query_row = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    head = tl.arange(0, HEADS)
    top = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, SLICE], tl.float32)
    for start in range(0, num_slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        inside = slot < num_slots
        at = scores_ptr + (query_row * HEADS + head[:, None]) * num_slots + slot[None, :]
        scores = tl.load(at, mask=inside[None, :], other=float("-inf"))
        row_at = rows_ptr + (query_row * num_slots + slot[:, None]) * DIM + dim[None, :]
        values = tl.load(row_at, mask=inside[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(scores, 1))
        decay = tl.exp2(top - new_top)
        weight = tl.exp2(scores - new_top[:, None])
        units = (weight + 1.0).to(tl.int32, bitcast=True) - 0x3F800000
        total = total * decay + tl.sum(units, 1).to(tl.float32) * 1.1920928955078125e-07
        acc = dot(weight.to(tl.bfloat16), values, acc * decay[:, None])
        top = new_top
    own = head < num_heads
    log2e: tl.constexpr = 1.4426950408889634
    sink = tl.load(sink_ptr + head, mask=own, other=0.0)
    denominator = total + tl.exp2(sink * log2e - top)
    out = (acc / denominator[:, None]).to(tl.bfloat16)
    out_at = out_ptr + (query_row * num_heads + head[:, None]) * DIM + dim[None, :]
    tl.store(out_at, out, mask=own[:, None])
    if STORE_LSE and tl.program_id(1) == 0:
        tl.store(lse_ptr + query_row * num_heads + head, top / log2e + tl.log(total), mask=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class FewChoice:
    """Launch of the two kernels; none of it changes a bit, so it may follow the number of rows."""

    key_slots: int = 16
    key_warps: int = 8
    tiles: int = 2
    slice_dim: int = 64
    value_warps: int = 4
    value_stages: int = 4


def choose_few(num_rows: int) -> FewChoice:
    """Narrower slices of channels for the fewest rows (timed on an H200, 2026-11-29)."""
    return FewChoice(slice_dim=32 if num_rows <= 8 else 64)


def attend_few(
    query: Tensor,
    positions: Tensor,
    row_request: Tensor,
    window_cache: Tensor,
    window_block_table: Tensor,
    window_floor: Tensor,
    compressed_cache: Tensor,
    block_table: Tensor,
    selection: Tensor,
    sink: Tensor,
    softmax_scale: float,
    window_size: int,
    compressed_record: str,
    out: Tensor,
    lse: Tensor,
    *,
    heads: int,
    slots: int,
    choice: FewChoice | None = None,
) -> None:
    """``sparse_mla`` for few queries.

    Args: as ``sparse_mla``; ``heads`` is the padded number of heads and ``slots`` the tile, which
    divides the window: both must be those of the kernel for many queries.
    """
    choice = choice or choose_few(query.shape[0])
    num_rows, num_heads, head_dim = query.shape
    num_slots = window_size + selection.shape[1]
    rows = query.new_empty(num_rows, num_slots, head_dim)
    scores = query.new_empty(num_rows, heads, num_slots, dtype=torch.float32)
    _scores_kernel[(num_rows, triton.cdiv(num_slots, choice.key_slots * choice.tiles))](
        query,
        rows,
        scores,
        positions,
        row_request,
        window_floor,
        window_cache,
        window_block_table,
        compressed_cache,
        block_table,
        selection,
        num_heads,
        selection.shape[1],
        num_slots,
        query.stride(0),
        query.stride(1),
        window_cache.stride(0),
        window_cache.stride(1),
        window_block_table.stride(0),
        window_block_table.shape[1],
        compressed_cache.stride(0),
        compressed_cache.stride(1),
        block_table.stride(0),
        block_table.shape[1],
        selection.stride(0),
        softmax_scale,
        HEADS=heads,
        DIM=head_dim,
        SLOTS=choice.key_slots,
        WINDOW=window_size,
        WINDOW_PAGE=window_cache.shape[1],
        PAGE=max(compressed_cache.shape[1], 1),
        PACKED=compressed_record == "nvfp4",
        TILES=choice.tiles,
        num_warps=choice.key_warps,
    )
    slice_dim = min(choice.slice_dim, head_dim)
    _values_kernel[(num_rows, head_dim // slice_dim)](
        rows,
        scores,
        sink,
        out,
        lse,
        num_heads,
        num_slots,
        HEADS=heads,
        DIM=head_dim,
        SLICE=slice_dim,
        SLOTS=slots,
        STORE_LSE=lse.shape[0] > 0,
        num_warps=choice.value_warps,
        num_stages=choice.value_stages,
    )
