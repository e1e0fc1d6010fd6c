"""Device code of the index scores: two kernels that compute the same defined number.

T rows, H heads, D <= 128 channels in groups of 32, N keys. A record holds D / 2 bytes of E2M1 pairs
and D / 32 scale bytes (docs/cache-layout.md). Both kernels are exact, so either may serve any row:

* `tile_kernel` (prefill) owns tiles of BLOCK_M rows x BLOCK_N keys. It decodes its keys to BF16
  once, keeps them in shared memory, and runs over the heads with one matrix product each; the sum
  over the heads stays in registers. Head by head, because that sum is defined as sequential.
* `row_kernel` (decode, and whatever `tile_kernel` leaves) owns BLOCK_N keys of a few rows and puts
  the heads on the other axis of the product.

**Why a product is exact.** A decoded value is an integer of at most 12 halves times its group's
scale, so the sum over one group is an integer below 2^13 in units of a quarter of the product of
the two scales. If the scale exponents within a key plus those within a query spread over at most
``MAX_SPREAD`` = 9, all products and every partial sum of four groups are integers below 2^24 of one
unit: FP32 accumulation is exact in any order, also where tensor cores align to 24 bits. A pair
beyond that, or one with extreme scales, goes to `row_kernel`, which adds the four exact group sums
in float64 in ascending order and rounds once to FP32, as the reference does.

BF16 subnormals, infinities and NaN follow IEEE arithmetic everywhere, so no record is an exception.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pcpkit.kernels._jit import (
    INTERPRETED,
    dot,
    e2m1_decode,
    e8m0_decode,
    minus_zeros,
    to_bfloat16,
)

MAX_SPREAD = tl.constexpr(9)
_INF = tl.constexpr(float("inf"))
_SIZES = ["num_rows", "max_visible", "num_pages", "num_reqs", "table_span", "num_blocks"]
"""Arguments that change from step to step: no new compilation."""

_EXTREME = tl.constexpr(1 << 16)
"""Spread of a record whose scales are outside 2^-40 ... 2^40: no sum is known to be exact."""


@triton.jit
def _group_values(packed):
    """FP32 E2M1 values [ROWS, 2 * BYTES] of packed bytes [ROWS, BYTES], without the scale."""
    pairs = tl.join(e2m1_decode(packed), e2m1_decode(packed >> 4))
    return tl.reshape(pairs, [packed.shape[0], 2 * packed.shape[1]])


@triton.jit
def _decode_records(record_ptr, inside, ROWS: tl.constexpr, DIM: tl.constexpr):
    """BF16 values [ROWS, DIM] of the records at ``record_ptr`` [ROWS * DIM / 32].

    The address of a record is repeated for each of its groups. Records that are not ``inside``
    decode to zero.
    """
    GROUPS: tl.constexpr = DIM // 32
    group = tl.arange(0, ROWS * GROUPS) % GROUPS
    byte = tl.arange(0, 16)[None, :]
    packed = tl.load((record_ptr + group * 16)[:, None] + byte, mask=inside[:, None], other=0)
    scale = tl.load(record_ptr + GROUPS * 16 + group, mask=inside, other=127)
    values = _group_values(packed) * e8m0_decode(scale)[:, None]
    return tl.reshape(to_bfloat16(values), [ROWS, DIM])


@triton.jit
def _largest_spread(record_ptr, inside, DIM: tl.constexpr):
    """Largest spread of scale exponents within one of the records at ``record_ptr`` [ROWS].

    A zero group (scale 2^-126 by the quantiser) does not count, nor does a NaN group: it is NaN in
    any order. Scales outside 2^-40 ... 2^40 count as ``_EXTREME``.
    """
    GROUPS: tl.constexpr = DIM // 32
    scale_ptr = record_ptr[:, None] + GROUPS * 16 + tl.arange(0, GROUPS)[None, :]
    exponent = tl.load(scale_ptr, mask=inside[:, None], other=127).to(tl.int32)
    tiny = exponent <= 1
    counts = (exponent > 1) & (exponent < 255)
    high = tl.max(tl.where(counts, exponent, 0), axis=1)
    low = tl.min(tl.where(counts, exponent, 255), axis=1)
    extreme = (high > 127 + 40) | (low < 127 - 40)
    spread = tl.maximum(tl.max(tl.where(extreme, _EXTREME, high - low), axis=0), 0)
    if tl.max(tl.max(tiny.to(tl.int32), axis=1), axis=0) > 0:
        for group in tl.static_range(GROUPS):
            byte = group * 16 + tl.arange(0, 16)[None, :]
            packed = tl.load(record_ptr[:, None] + byte, mask=inside[:, None], other=0)
            scale = tl.load(record_ptr + GROUPS * 16 + group, mask=inside, other=127)
            nonzero = tl.max((packed & 0x77).to(tl.int32), axis=1) > 0
            hidden = (nonzero & (scale.to(tl.int32) <= 1)).to(tl.int32)
            spread = tl.maximum(spread, tl.max(hidden, axis=0) * _EXTREME)
    return spread


@triton.jit
def _key_records(
    cache,
    pages_ptr,
    first,
    limit,
    ROWS: tl.constexpr,
    REPEAT: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
):
    """(Record addresses, which exist) of positions ``first ...``, each repeated ``REPEAT`` times.

    ``cache`` is (pointer, pages, page stride). Positions at or above ``limit``, and
    those whose page is not mapped, do not exist.
    """
    cache_ptr, num_pages, stride_page = cache
    position = first + tl.arange(0, ROWS * REPEAT) // REPEAT
    inside = position < limit
    page = tl.load(pages_ptr + position // ROWS_PER_PAGE, mask=inside, other=-1)
    inside = inside & (page >= 0) & (page < num_pages)
    page = tl.where(inside, page, 0).to(tl.int64)
    return cache_ptr + page * stride_page + position % ROWS_PER_PAGE * SLOT_BYTES, inside


@triton.jit
def _rounded(x):
    """FP32 ``x`` rounded to BF16 and widened again; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x != x, x, bits.to(tl.float32, bitcast=True))


@triton.jit
def _weighted(dots, weight):
    """``BF16(max(BF16(dots), 0) * weight)`` as FP32; an interpreted cast breaks subnormals."""
    wide = weight.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    kept = _rounded(dots)
    return _rounded(tl.where(kept < 0.0, 0.0, kept) * wide.to(tl.float32, bitcast=True))


@triton.jit
def _add_head(total, dots, weight):
    """``total + BF16(max(BF16(dots), 0) * weight)``, six instructions for two elements on sm_90.

    Written out because Triton 3.6 converts, clamps and multiplies BF16 one element at a time, at
    twice the cost; `_weighted` is the same arithmetic.
    """
    weight = tl.broadcast_to(weight, dots.shape)
    if INTERPRETED:
        return total + _weighted(dots, weight)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 kept, term;
        .reg .f32 low, high;
        cvt.rn.relu.bf16x2.f32 kept, $5, $4;
        mul.rn.bf16x2 term, kept, $6;
        shl.b32 low, term, 16;
        and.b32 high, term, 0xffff0000;
        add.rn.f32 $0, $2, low;
        add.rn.f32 $1, $3, high;
        }""",
        "=f,=f,f,f,f,f,r",
        [total, dots, weight],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _shown(visible, column, mark_ptr, CANDIDATE_BLOCK: tl.constexpr):
    """[M, N] bool: position ``column`` [N] is visible and in a candidate block of the row.

    ``mark_ptr`` [M]: the rows' candidate marks; ``CANDIDATE_BLOCK`` 0: every block is a candidate.
    """
    shown = column[None, :] < visible[:, None]
    if CANDIDATE_BLOCK > 0:
        block = (column // CANDIDATE_BLOCK)[None, :]
        shown = tl.load(mark_ptr[:, None] + block, mask=shown, other=0) != 0
    return shown


@triton.jit
def _store_tile(out_ptr, row, column, stride_out, wanted, scores):
    """Store BF16 of ``scores`` [M, N] in the rows that are ``wanted`` [M].

    The mask of the columns is the padded row, whose length is a multiple of 64: vectors stay whole.
    """
    pointers = out_ptr + row[:, None] * stride_out + column[None, :]
    mask = wanted[:, None] & (column < stride_out)[None, :]
    tl.store(pointers, to_bfloat16(scores), mask=mask)


@triton.jit
def decode_queries_kernel(
    records_ptr,
    out_ptr,
    spread_ptr,
    stride_row,
    HEAD_BYTES: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """One program decodes the heads of one row to BF16 and stores their largest spread."""
    GROUPS: tl.constexpr = DIM // 32
    row = tl.program_id(0).to(tl.int64)
    records_ptr += row * stride_row
    head = tl.arange(0, BLOCK_HEADS * GROUPS) // GROUPS
    values = _decode_records(records_ptr + head * HEAD_BYTES, head < NUM_HEADS, BLOCK_HEADS, DIM)
    head = tl.arange(0, BLOCK_HEADS)
    spread = _largest_spread(records_ptr + head * HEAD_BYTES, head < NUM_HEADS, DIM)
    tl.store(spread_ptr + row, spread)
    out_ptr += row * (NUM_HEADS * DIM) + head[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out_ptr, values, mask=(head < NUM_HEADS)[:, None])


@triton.jit
def mark_candidates_kernel(
    candidates_ptr,
    mark_ptr,
    num_blocks,
    stride_row,
    stride_column,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """One program sets the bytes of one row's candidate blocks; other ids are ignored."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_WIDTH)
    block = tl.load(
        candidates_ptr + row * stride_row + column * stride_column, mask=column < WIDTH, other=-1
    )
    known = (block >= 0) & (block < num_blocks)
    one = tl.full([BLOCK_WIDTH], 1, tl.uint8)
    tl.store(mark_ptr + row * num_blocks + block, one, mask=known)


@triton.jit(do_not_specialize=_SIZES)
def tile_kernel(
    queries_ptr,
    query_spread_ptr,
    weights_ptr,
    cache_ptr,
    table_ptr,
    request_ptr,
    visible_ptr,
    mark_ptr,
    left_ptr,
    out_ptr,
    num_rows,
    max_visible,
    num_pages,
    num_reqs,
    table_span,
    num_blocks,
    stride_page,
    stride_table,
    stride_out,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    CANDIDATE_BLOCK: tl.constexpr,
    MIN_ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program scores ``TILES`` tiles of ``BLOCK_M`` rows against ``BLOCK_N`` positions.

    One request after the other: its keys are decoded once for all tiles. Requests with fewer than
    ``MIN_ROWS`` rows here, and those whose products may be inexact, are left to `row_kernel`: their
    rows get a 1 in ``left`` (num_rows, programs of axis 0). ``CANDIDATE_BLOCK`` 0: no candidates.
    """
    first = tl.program_id(0) * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    first_row = tl.program_id(1).to(tl.int64) * (TILES * BLOCK_M)
    row = first_row + tl.arange(0, TILES * BLOCK_M)
    inside = row < num_rows
    visible = tl.minimum(tl.load(visible_ptr + row, mask=inside, other=0), max_visible)
    request = tl.load(request_ptr + row, mask=inside, other=-1)
    spread = tl.load(query_spread_ptr + row, mask=inside, other=0)
    active = (visible > first) & (request >= 0) & (request < num_reqs)
    limit = tl.minimum(tl.max(tl.where(active, visible, 0), axis=0), table_span)
    last = tl.max(tl.where(active, request, -1), axis=0)
    cache = (cache_ptr, num_pages, stride_page)
    left = tl.zeros([TILES * BLOCK_M], tl.int32)
    for current in range(tl.min(tl.where(active, request, last + 1), axis=0), last + 1):
        mine = active & (request == current)
        count = tl.sum(mine.to(tl.int32), axis=0)
        if count > 0:
            pages_ptr = table_ptr + current * stride_table
            record_ptr, mapped = _key_records(
                cache, pages_ptr, first, limit, BLOCK_N, 1, ROWS_PER_PAGE, SLOT_BYTES
            )
            largest = tl.max(tl.where(mine, spread, 0), axis=0)
            largest += _largest_spread(record_ptr, mapped, DIM)
            if (count < MIN_ROWS) | (largest > MAX_SPREAD):
                left = tl.where(mine, 1, left)
            else:
                group_ptr, exists = _key_records(
                    cache, pages_ptr, first, limit, BLOCK_N, DIM // 32, ROWS_PER_PAGE, SLOT_BYTES
                )
                keys = _decode_records(group_ptr, exists, BLOCK_N, DIM)
                for tile in range(TILES):
                    rows = first_row + tile * BLOCK_M + tl.arange(0, BLOCK_M)
                    seen = tl.load(visible_ptr + rows, mask=rows < num_rows, other=0)
                    owner = tl.load(request_ptr + rows, mask=rows < num_rows, other=-1)
                    wanted = ((seen > first) & (owner == current)).to(tl.int32)
                    if tl.max(wanted, axis=0) > 0:
                        # Rows past the end repeat the last one; their products are dropped.
                        source = tl.minimum(rows, num_rows - 1)[:, None]
                        channel = tl.arange(0, DIM)[None, :]
                        query_ptr = queries_ptr + source * (NUM_HEADS * DIM) + channel
                        weight_ptr = weights_ptr + source * NUM_HEADS
                        # -0 is the neutral element: the first term keeps its bits.
                        total = minus_zeros([BLOCK_M, BLOCK_N])
                        for head in tl.range(0, NUM_HEADS, num_stages=STAGES):
                            query = tl.load(query_ptr + head * DIM)
                            weight = tl.load(weight_ptr + head)
                            zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                            total = _add_head(total, dot(query, tl.trans(keys), zero), weight)
                        # Loaded again, so that no mask stays in registers over the heads.
                        seen = tl.load(visible_ptr + rows, mask=rows < num_rows, other=0)
                        seen = tl.minimum(seen, tl.minimum(max_visible, table_span))
                        page_ptr = pages_ptr + column // ROWS_PER_PAGE
                        page = tl.load(page_ptr, mask=column < limit, other=-1)
                        marks_ptr = mark_ptr + rows * num_blocks
                        shown = _shown(seen, column, marks_ptr, CANDIDATE_BLOCK)
                        shown = shown & ((page >= 0) & (page < num_pages))[None, :]
                        total = tl.where(shown, total, -_INF)
                        _store_tile(out_ptr, rows, column, stride_out, wanted > 0, total)
    left_ptr += row * tl.num_programs(0) + tl.program_id(0)
    tl.store(left_ptr, left.to(tl.uint8), mask=inside)
    nothing = tl.full([BLOCK_M, BLOCK_N], -_INF, tl.float32)
    for tile in range(TILES):
        rows = first_row + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        seen = tl.load(visible_ptr + rows, mask=rows < num_rows, other=0)
        owner = tl.load(request_ptr + rows, mask=rows < num_rows, other=-1)
        hidden = (seen <= first) | (owner < 0) | (owner >= num_reqs)
        _store_tile(out_ptr, rows, column, stride_out, hidden & (rows < num_rows), nothing)


@triton.jit
def _add_heads(total, terms, BLOCK_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr):
    """``total`` [N] + the columns of ``terms`` [N, BLOCK_HEADS] that are heads, in order.

    A column is picked by adding bits as integers, which keeps NaN and the sign of zero.
    """
    bits = terms.to(tl.int32, bitcast=True)
    column = tl.arange(0, BLOCK_HEADS)[None, :]
    for head in tl.static_range(NUM_HEADS):
        picked = tl.sum(tl.where(column == head, bits, 0), axis=1)
        total = total + picked.to(tl.float32, bitcast=True)
    return total


@triton.jit
def _wide_group(record_ptr, inside, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """(BF16 values [ROWS, 32] without their scale, float64 scales [ROWS]) of one group."""
    byte = GROUP * 16 + tl.arange(0, 16)[None, :]
    packed = tl.load(record_ptr[:, None] + byte, mask=inside[:, None], other=0)
    scale = e8m0_decode(tl.load(record_ptr + GROUPS * 16 + GROUP, mask=inside, other=127))
    values = _group_values(packed)
    # What overflows BF16 is infinite in the record already.
    scaled = values * scale[:, None]
    values = tl.where(tl.abs(scaled) == float("inf"), scaled, values)
    return to_bfloat16(values), scale.to(tl.float64)


@triton.jit
def _wide_dots(
    key_ptr, exists, query_ptr, is_head, ROWS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr
):
    """FP32 dot products [ROWS, HEADS] whatever the scales: exact group sums, added in float64."""
    total = tl.zeros([ROWS, HEADS], tl.float64)
    for group in tl.static_range(DIM // 32):
        keys, key_scale = _wide_group(key_ptr, exists, group, DIM // 32)
        queries, query_scale = _wide_group(query_ptr, is_head, group, DIM // 32)
        sums = dot(keys, tl.trans(queries), tl.zeros([ROWS, HEADS], tl.float32))
        total += sums.to(tl.float64) * (key_scale[:, None] * query_scale[None, :])
    return total.to(tl.float32)


@triton.jit(do_not_specialize=_SIZES)
def row_kernel(
    records_ptr,
    stride_row,
    weights_ptr,
    cache_ptr,
    table_ptr,
    request_ptr,
    visible_ptr,
    mark_ptr,
    left_ptr,
    out_ptr,
    num_rows,
    max_visible,
    num_pages,
    num_reqs,
    table_span,
    num_blocks,
    stride_page,
    stride_table,
    stride_out,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    CANDIDATE_BLOCK: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    LEFT_ONLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program scores ``BLOCK_M`` rows, one at a time, against ``PARTS * BLOCK_N`` positions.

    ``LEFT_ONLY``: only the rows that `tile_kernel` marked for this program in ``left``.
    """
    start = tl.program_id(0) * (PARTS * BLOCK_N)
    first_row = tl.program_id(1).to(tl.int64) * BLOCK_M
    if LEFT_ONLY:
        left_ptr += tl.program_id(0)
        row = first_row + tl.arange(0, BLOCK_M)
        left = tl.load(left_ptr + row * tl.num_programs(0), mask=row < num_rows, other=0)
        if tl.max(left.to(tl.int32), axis=0) == 0:
            return
    head = tl.arange(0, BLOCK_HEADS)
    cache = (cache_ptr, num_pages, stride_page)
    for row in range(first_row, tl.minimum(first_row + BLOCK_M, num_rows)):
        wanted = 1
        if LEFT_ONLY:
            wanted = tl.load(left_ptr + row * tl.num_programs(0)).to(tl.int32)
        visible = tl.minimum(tl.load(visible_ptr + row), max_visible)
        request = tl.load(request_ptr + row).to(tl.int64)
        known = (request >= 0) & (request < num_reqs)
        limit = tl.where(known, tl.minimum(visible, table_span), 0)
        pages_ptr = table_ptr + tl.where(known, request, 0) * stride_table
        query_ptr = records_ptr + row * stride_row + head * HEAD_BYTES
        for part in range(PARTS * wanted):
            first = start + part * BLOCK_N
            column = first + tl.arange(0, BLOCK_N)
            scores = tl.full([BLOCK_N], -_INF, tl.float32)
            if first < limit:
                key_ptr, mapped = _key_records(
                    cache, pages_ptr, first, limit, BLOCK_N, 1, ROWS_PER_PAGE, SLOT_BYTES
                )
                dots = _wide_dots(
                    key_ptr, mapped, query_ptr, head < NUM_HEADS, BLOCK_N, BLOCK_HEADS, DIM
                )
                weight = tl.load(
                    weights_ptr + row * NUM_HEADS + head, mask=head < NUM_HEADS, other=0.0
                )
                nothing = minus_zeros([BLOCK_N, BLOCK_HEADS])
                terms = _add_head(nothing, dots, weight[None, :])
                nothing = minus_zeros([BLOCK_N])
                total = _add_heads(nothing, terms, BLOCK_HEADS, NUM_HEADS)
                shown = (column < limit) & mapped
                if CANDIDATE_BLOCK > 0:
                    block = column // CANDIDATE_BLOCK
                    shown = tl.load(mark_ptr + row * num_blocks + block, mask=shown, other=0) != 0
                scores = tl.where(shown, total, -_INF)
            tl.store(
                out_ptr + row * stride_out + column,
                to_bfloat16(scores),
                mask=column < stride_out,
            )
