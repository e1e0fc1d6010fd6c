"""Index scores over the paged index-key cache and the candidate blocks of the first level.

Score of a query row against compressed position ``j`` (model-spec section 3.5), with ``iq``, ``k``
dequantized from their 68-byte records and ``w`` the BF16 head weights (scale 1/64 included):

    ``d_h = BF16(iq_h . k_j)``; ``t_h = BF16(max(d_h, 0) * w_h)``; ``score = BF16(sum_h t_h)``

A dot product is rounded to FP32 once (sums of groups are exact, and are added in float64 where FP32
would round), and the head sum is FP32 with heads in ascending order: the score is one defined
number. Position ``j`` is visible to a row iff ``j < num_visible[row]``. Positions that are
invisible, outside the row's candidate blocks, or whose page or request does not exist score -inf. A
NaN group makes the scores of its key, or of its row, NaN.

On CUDA the scores are computed exactly by one of two kernels (``indexer_tiles``): the reference's
bits whatever the batch. The result's rows are padded to 128 bytes, so that `topk` reads vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pcpkit.formats import INDEX_GROUP, RECORD_FORMATS
from pcpkit.kernels import indexer_tiles as tiles
from pcpkit.kernels._ops import check_dtype, check_shape, register_op
from pcpkit.kernels._reference import ordered_sum
from pcpkit.kernels.topk import group_maxima, select

_ROW_BLOCK = 32
"""Positions that `row_kernel` scores at a time. From 64 on Triton 3.6 takes ``wgmma``, which in
that kernel read outside its shared memory on an H200; ``mma.sync`` is as exact."""

_ROWS_TIMES_KEYS = 1 << 21
"""Score elements the reference holds at a time (times the heads, in float64)."""


def index_scores(
    query_records: Tensor,
    head_weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    row_request: Tensor,
    num_visible: Tensor,
    max_visible: int,
    candidates: Tensor | None = None,
    candidate_block_size: int = 1,
) -> Tensor:
    """Scores of every row against the compressed positions of its request.

    Args:
        query_records: ``(num_rows, num_heads, record_bytes)`` uint8, quantized rotated queries.
        head_weights: ``(num_rows, num_heads)`` bf16.
        key_cache: ``(num_pages, rows_per_page, record_bytes)`` uint8.
        block_table: ``(num_reqs, max_blocks)`` int32, page of each ``rows_per_page`` positions.
        row_request: ``(num_rows,)`` int32.
        num_visible: ``(num_rows,)`` int32, visible compressed positions of the row.
        max_visible: columns of the result, at least the largest ``num_visible``.
        candidates: ``(num_rows, max_candidates)`` int32 block ids, -1 = none; ``None`` allows all.
        candidate_block_size: compressed positions a candidate block.

    Returns:
        ``(num_rows, max_visible)`` bf16, a view of rows that start at multiples of 64 elements.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_dtype("query_records", query_records, torch.uint8)
    check_shape(
        "query_records", query_records, None, None, key_cache.shape[2], remedy="encode as mxfp4"
    )
    check_shape("head_weights", head_weights, *query_records.shape[:2], remedy="one a head")
    check_dtype("head_weights", head_weights, torch.bfloat16)
    check_shape("num_visible", num_visible, query_records.shape[0], remedy="one a row")
    return _index_scores_op(
        query_records,
        head_weights,
        key_cache,
        block_table,
        row_request,
        num_visible,
        max_visible,
        candidates,
        candidate_block_size,
    )


def index_scores_reference(
    query_records: Tensor,
    head_weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    row_request: Tensor,
    num_visible: Tensor,
    max_visible: int,
    candidates: Tensor | None = None,
    candidate_block_size: int = 1,
) -> Tensor:
    """The specification of :func:`index_scores`: one request at a time, a few rows at a time."""
    record = RECORD_FORMATS["mxfp4"]
    num_rows = query_records.shape[0]
    scores = _padded_rows(head_weights, num_rows, max_visible).fill_(float("-inf"))
    allowed = torch.arange(max_visible, device=scores.device) < num_visible[:, None]
    if candidates is not None:
        allowed &= _inside(candidates, candidate_block_size, max_visible)
    num_pages, rows_per_page = key_cache.shape[:2]
    num_reqs, max_blocks = block_table.shape
    for request in row_request.unique().tolist():
        if not 0 <= request < num_reqs:
            continue
        rows = (row_request == request).nonzero()[:, 0]
        count = min(int(num_visible[rows].max()), max_visible, max_blocks * rows_per_page)
        if count <= 0:
            continue
        where = torch.arange(count, device=scores.device)
        page = block_table[request, where // rows_per_page].long()
        mapped = (page >= 0) & (page < num_pages)
        page = page.where(mapped, 0)
        key_records = key_cache[page, where % rows_per_page]
        spread = _scale_spread(key_records) + _scale_spread(query_records[rows])
        # Up to here every sum is exact in FP32 (see indexer_tiles); float64 is twice as slow.
        dtype = torch.float32 if spread <= tiles.MAX_SPREAD.value else torch.float64
        keys = record.decode(key_records).to(dtype)
        step = max(1, _ROWS_TIMES_KEYS // count)
        for part in rows.split(step):
            queries = record.decode(query_records[part]).to(dtype)
            dots = _grouped_dots(queries, keys).float().bfloat16()
            terms = dots.clamp(min=0) * head_weights[part, :, None]
            total = ordered_sum(terms.float(), dim=1).bfloat16()
            scores[part, :count] = total.masked_fill_(~mapped, float("-inf"))
    return scores.masked_fill_(~allowed, float("-inf"))


def _grouped_dots(queries: Tensor, keys: Tensor) -> Tensor:
    """``queries @ keys.T``: the sums of the groups of 32 channels, added in ascending order.

    A group's sum is exact in any order. Theirs is exact too, or in float64 rounded in this order:
    large groups that cancel leave the small ones whole.
    """
    if queries.dtype == torch.float32:
        return queries @ keys.t()
    pairs = zip(queries.split(INDEX_GROUP, -1), keys.split(INDEX_GROUP, -1), strict=True)
    total: Tensor | None = None
    for query_part, key_part in pairs:
        part = query_part @ key_part.t()
        total = part if total is None else total + part
    assert total is not None, "a record has a group"
    return total


def _scale_spread(records: Tensor) -> int:
    """Largest spread of scale exponents within a record; large if a scale is out of the ordinary.

    Ordinary are scales of 2^-40 .. 2^40, and the smallest of all, which a group of zeros has.
    """
    record = RECORD_FORMATS["mxfp4"]
    size = record.code_bytes(record.dim_of(records.shape[-1]))
    scales = records[..., size:].int()
    zeros = (records[..., :size] & 0x77).unflatten(-1, (scales.shape[-1], -1)).amax(-1) == 0
    ordinary = (scales - 127).abs() <= 40
    if records.numel() == 0 or not bool((ordinary | zeros).all()):
        return 1 << 16
    high = scales.masked_fill(zeros, 0).amax(-1)
    low = scales.masked_fill(zeros, 255).amin(-1)
    return max(int((high - low).max()), 0)


def _padded_rows(like: Tensor, num_rows: int, width: int) -> Tensor:
    """Empty ``(num_rows, width)`` bf16 whose rows start at multiples of 64 elements."""
    padded = (width + 63) // 64 * 64
    return like.new_empty(num_rows, padded, dtype=torch.bfloat16)[:, :width]


def _inside(candidates: Tensor, block_size: int, max_visible: int) -> Tensor:
    """``(num_rows, max_visible)`` bool: position lies in one of the row's candidate blocks."""
    num_blocks = -(-max_visible // block_size)
    kept = torch.zeros(
        candidates.shape[0], num_blocks + 1, dtype=torch.bool, device=candidates.device
    )
    outside = (candidates < 0) | (candidates >= num_blocks)
    kept.scatter_(1, candidates.masked_fill(outside, num_blocks).long(), True)
    return kept[:, :num_blocks].repeat_interleave(block_size, dim=1)[:, :max_visible]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """Which kernels run, and their tiles. Every choice gives the same bits: both are exact.

    Attributes:
        tiled: `tile_kernel` runs first, `row_kernel` on what it leaves; else `row_kernel` alone.
        tiles: tiles of one program of `tile_kernel`; its keys are decoded once for all of them.
        block_rows, block_keys: rows and positions of a tile.
        num_warps, num_stages, max_registers: of `tile_kernel`.
        min_rows: a request with fewer rows in a program is left to `row_kernel`.
    """

    tiled: bool
    tiles: int = 1
    block_rows: int = 64
    block_keys: int = 256
    num_warps: int = 8
    num_stages: int = 3
    max_registers: int | None = None
    min_rows: int = 16


def choose_launch(num_rows: int, num_reqs: int, max_visible: int) -> LaunchChoice:
    """Tiles where a request has 16 rows or more on average, else one row at a time.

    A query is read from L2 once for the keys of a tile, 8 KB for 256 of them: with fewer keys a
    tile would be bound by L2. Its two accumulators of 64 values a thread leave no room for a larger
    one. Programs of four tiles decode their keys in a thirtieth of their time; fewer tiles while
    there would be fewer than four programs an SM.
    """
    if num_rows < 16 * max(1, num_reqs):
        return LaunchChoice(tiled=False)
    tiles = triton.cdiv(num_rows, 64) * triton.cdiv(max_visible, 256)
    return LaunchChoice(tiled=True, tiles=4 if tiles >= 4 * 528 else 2 if tiles >= 2 * 528 else 1)


def _launch_scores(
    query_records: Tensor,
    head_weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    row_request: Tensor,
    num_visible: Tensor,
    max_visible: int,
    candidates: Tensor | None = None,
    candidate_block_size: int = 1,
    choice: LaunchChoice | None = None,
) -> Tensor:
    """Launch :func:`index_scores`. Pages, slots, query rows and heads may be strided."""
    num_rows, num_heads, _ = query_records.shape
    out = _padded_rows(head_weights, num_rows, max_visible)
    if num_rows == 0 or max_visible == 0:
        return out
    dim = _check_launch(query_records, key_cache)
    num_reqs, max_blocks = block_table.shape
    num_pages, rows_per_page, _ = key_cache.shape
    choice = choice or choose_launch(num_rows, num_reqs, max_visible)
    table = block_table.contiguous()
    num_blocks = triton.cdiv(max_visible, candidate_block_size)
    rows = choice.tiles * choice.block_rows if choice.tiled else 1
    keys = choice.block_keys if choice.tiled else _ROW_BLOCK
    grid = (triton.cdiv(max_visible, keys), triton.cdiv(num_rows, rows))
    arguments = (
        head_weights.contiguous(),
        key_cache,
        table,
        row_request.contiguous(),
        num_visible.contiguous(),
        out if candidates is None else _mark_candidates(candidates, num_blocks),
        table.new_empty(num_rows, grid[0], dtype=torch.uint8),
        out,
        num_rows,
        max_visible,
        num_pages,
        num_reqs,
        max_blocks * rows_per_page,
        num_blocks,
        key_cache.stride(0),
        table.stride(0),
        out.stride(0),
        num_heads,
        dim,
        rows_per_page,
        key_cache.stride(1),
        0 if candidates is None else candidate_block_size,
    )
    if choice.tiled:
        _launch_tiles(choice, grid, _decode_queries(query_records, dim), arguments)
    tiles.row_kernel[grid](
        query_records,
        query_records.stride(0),
        *arguments,
        HEAD_BYTES=query_records.stride(1),
        BLOCK_HEADS=max(16, triton.next_power_of_2(num_heads)),
        LEFT_ONLY=choice.tiled,
        BLOCK_M=rows,
        BLOCK_N=min(keys, _ROW_BLOCK),
        PARTS=max(1, keys // _ROW_BLOCK),
        num_warps=4,
    )
    return out


def _launch_tiles(
    choice: LaunchChoice,
    grid: tuple[int, int],
    queries: tuple[Tensor, Tensor],
    arguments: tuple[Tensor | int, ...],
) -> None:
    """Launch `tile_kernel` on decoded queries and the arguments that both kernels take."""
    tiles.tile_kernel[grid](
        *queries,
        *arguments,
        MIN_ROWS=choice.min_rows,
        TILES=choice.tiles,
        BLOCK_M=choice.block_rows,
        BLOCK_N=choice.block_keys,
        STAGES=choice.num_stages,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        maxnreg=choice.max_registers,
    )


def _check_launch(query_records: Tensor, key_cache: Tensor) -> int:
    """Channels of a record, if the kernels can read these tensors."""
    for name, tensor in (("query_records", query_records), ("key_cache", key_cache)):
        if tensor.stride(2) != 1:
            raise ValueError(
                f"{name} expected bytes of stride 1, got {tensor.stride(2)}; keep records whole"
            )
    dim = RECORD_FORMATS["mxfp4"].dim_of(key_cache.shape[2])
    if dim not in (32, 64, 128):
        raise ValueError(f"key_cache expected 32, 64 or 128 channels, got {dim}; pad the keys")
    return dim


def _decode_queries(query_records: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(BF16 values ``(num_rows, num_heads, dim)``, largest scale spread of every row int32)."""
    num_rows, num_heads, _ = query_records.shape
    out = query_records.new_empty(num_rows, num_heads, dim, dtype=torch.bfloat16)
    spread = query_records.new_empty(num_rows, dtype=torch.int32)
    tiles.decode_queries_kernel[(num_rows,)](
        query_records,
        out,
        spread,
        query_records.stride(0),
        HEAD_BYTES=query_records.stride(1),
        NUM_HEADS=num_heads,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        DIM=dim,
        num_warps=4,
    )
    return out, spread


def _mark_candidates(candidates: Tensor, num_blocks: int) -> Tensor:
    """``(num_rows, num_blocks)`` uint8: 1 where a block is a candidate of the row."""
    num_rows, width = candidates.shape
    marks = candidates.new_zeros(num_rows, num_blocks, dtype=torch.uint8)
    if width:
        tiles.mark_candidates_kernel[(num_rows,)](
            candidates,
            marks,
            num_blocks,
            *candidates.stride(),
            WIDTH=width,
            BLOCK_WIDTH=triton.next_power_of_2(width),
            num_warps=4,
        )
    return marks


def candidate_blocks(
    scores: Tensor, num_visible: Tensor, block_size: int, num_candidates: int
) -> Tensor:
    """First-level selection: the best blocks of ``block_size`` compressed positions a row.

    A block scores the maximum of its positions; the block of the newest visible position is always
    kept; ties go to the lower block; blocks without a visible position are dropped (model-spec
    section 3.6).

    Args:
        scores: ``(num_rows, max_visible)`` bf16, -inf = invisible.
        num_visible: ``(num_rows,)`` int32.
        block_size: positions a block.
        num_candidates: blocks kept at most.

    Returns:
        ``(num_rows, min(num_candidates, num_blocks))`` int32 block ids ascending, -1 at the tail.

    Example:
        Block size 2, scores ``[1, 0, 3, 2, 0]``, 5 visible, 2 candidates: blocks score 1, 3, 0; the
        newest (2) is pinned, then 1: ``[1, 2]``.
    """
    check_shape("num_visible", num_visible, scores.shape[0], remedy="one a row")
    return _candidate_blocks_op(scores, num_visible, block_size, num_candidates)


def candidate_blocks_reference(
    scores: Tensor, num_visible: Tensor, block_size: int, num_candidates: int
) -> Tensor:
    """The specification of :func:`candidate_blocks`."""
    num_rows, width = scores.shape
    num_blocks = -(-width // block_size)
    padded = torch.full((num_rows, num_blocks * block_size), float("-inf"), device=scores.device)
    padded[:, :width] = scores.float().masked_fill(scores.isnan(), float("-inf"))
    best = padded.unflatten(1, (num_blocks, block_size)).amax(-1)
    newest = (num_visible.long() - 1).clamp(min=0) // block_size
    pinned = torch.arange(num_blocks, device=scores.device) == newest[:, None]
    best = best.masked_fill(pinned & (num_visible > 0)[:, None], float("inf"))
    order = best.sort(dim=1, descending=True, stable=True)
    count = min(num_candidates, num_blocks)
    kept = order.indices[:, :count].masked_fill(
        order.values[:, :count] == float("-inf"), num_blocks
    )
    kept = kept.sort(dim=1).values
    return kept.masked_fill(kept == num_blocks, -1).int()


def _launch_candidates(
    scores: Tensor, num_visible: Tensor, block_size: int, num_candidates: int
) -> Tensor:
    """Launch :func:`candidate_blocks`: the maxima of the blocks, then a top-k of those."""
    num_rows, width = scores.shape
    count = min(num_candidates, triton.cdiv(width, block_size))
    if num_rows == 0 or count == 0:
        return scores.new_empty(num_rows, count, dtype=torch.int32)
    if width > 1 and scores.stride(1) != 1:
        scores = scores.contiguous()
    best = group_maxima(scores, num_visible.contiguous(), block_size, pinned=True)
    return select(best, None, count)


def _fake_scores(
    query_records: Tensor,
    head_weights: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    row_request: Tensor,
    num_visible: Tensor,
    max_visible: int,
    candidates: Tensor | None = None,
    candidate_block_size: int = 1,
) -> Tensor:
    return _padded_rows(head_weights, query_records.shape[0], max_visible)


def _fake_candidates(
    scores: Tensor, num_visible: Tensor, block_size: int, num_candidates: int
) -> Tensor:
    num_blocks = (scores.shape[1] + block_size - 1) // block_size
    return scores.new_empty(scores.shape[0], min(num_candidates, num_blocks), dtype=torch.int32)


_index_scores_op = register_op(
    "index_scores(Tensor query_records, Tensor head_weights, Tensor key_cache, Tensor block_table,"
    " Tensor row_request, Tensor num_visible, int max_visible, Tensor? candidates=None,"
    " int candidate_block_size=1) -> Tensor",
    reference=index_scores_reference,
    fake=_fake_scores,
    launch=_launch_scores,
)
_candidate_blocks_op = register_op(
    "candidate_blocks(Tensor scores, Tensor num_visible, int block_size, int num_candidates)"
    " -> Tensor",
    reference=candidate_blocks_reference,
    fake=_fake_candidates,
    launch=_launch_candidates,
)
