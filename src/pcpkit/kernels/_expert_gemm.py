"""Grouped GEMM over FP4 expert weights, and the permutation of rows that feeds it.

A *pair* is one (row, choice) of the router: pair ``row * top_k + j``. Pairs of local experts are
sorted by expert, stable, so the pairs of an expert are neighbours; a *tile* is up to ``block_rows``
of them. The number of tiles depends on the ids, so the grid is sized by a bound that holds for all
ids and programs past the last tile return: nothing is read back, a CUDA graph can capture it.

The GEMM is that of ``_gemm``: weights on the left from registers, one chain of ``wgmma`` steps in
operand order per output element, at least 64 weight rows a warp group. A pair's bits therefore do
not depend on its tile, on the tile size or on the other pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels._jit import INTERPRETED, dot, e2m1_decode, e8m0_decode, to_bfloat16
from pcpkit.kernels._operand import in_order

BLOCK_DEPTH = 128
"""Channels of one step: one block of the operand order, four scales a weight row."""

# Eight E2M1 codes (4 bytes) -> BF16 times a scale, in integer operations on pairs. The bits of a
# code moved under the exponent of a BF16 are its value times 2^-126 (code 1 becomes a subnormal);
# two exact products restore the exponent and apply the scale. $0, $1: low nibbles; $2, $3: high.
_DECODE_ASM = tl.constexpr(
    """{
    .reg .b32 a, b, t;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shl.b32 t, a, 12; and.b32 t, t, 0x80008000; shl.b32 $0, a, 6;
    lop3.b32 $0, $0, 0x01C001C0, t, 0xEA;
    shl.b32 t, b, 12; and.b32 t, t, 0x80008000; shl.b32 $1, b, 6;
    lop3.b32 $1, $1, 0x01C001C0, t, 0xEA;
    shl.b32 t, a, 8; and.b32 t, t, 0x80008000; shl.b32 $2, a, 2;
    lop3.b32 $2, $2, 0x01C001C0, t, 0xEA;
    shl.b32 t, b, 8; and.b32 t, t, 0x80008000; shl.b32 $3, b, 2;
    lop3.b32 $3, $3, 0x01C001C0, t, 0xEA;
    mov.b32 t, 0x7E807E80;
    mul.rn.bf16x2 $0, $0, t; mul.rn.bf16x2 $1, $1, t;
    mul.rn.bf16x2 $2, $2, t; mul.rn.bf16x2 $3, $3, t;
    mul.rn.bf16x2 $0, $0, $5; mul.rn.bf16x2 $1, $1, $6;
    mul.rn.bf16x2 $2, $2, $5; mul.rn.bf16x2 $3, $3, $6;
    }"""
)


@triton.jit
def fp4_values(packed, scales, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """BF16 weights [ROWS, DEPTH] of E2M1 pairs [ROWS, DEPTH / 2] and E8M0 [ROWS, DEPTH / 32]."""
    factor = e8m0_decode(scales)[:, :, None]
    factor = tl.broadcast_to(factor, [ROWS, DEPTH // 32, 16])
    factor = tl.reshape(factor, [ROWS, DEPTH // 2])
    if INTERPRETED:
        low = (e2m1_decode(packed & 15) * factor).to(tl.bfloat16)
        high = (e2m1_decode(packed >> 4) * factor).to(tl.bfloat16)
    else:
        low, high = tl.inline_asm_elementwise(
            _DECODE_ASM,
            "=&r,=&r,=&r,=&r,r,r,r",
            [packed, factor.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return tl.reshape(tl.join(low, high), [ROWS, DEPTH])


@triton.jit
def swiglu_values(gate, up, limit):
    """FP32 ``silu(min(gate, limit)) * clamp(up, -limit, limit)`` of FP32 values; NaN stays NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate * (1.0 / (1.0 + tl.exp(-gate))) * up


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids_ptr, counts_ptr, num_pairs, first_expert, BLOCK: tl.constexpr):
    """Program e counts the pairs of local expert e."""
    expert = tl.program_id(0)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        count += ((ids == expert + first_expert) & (pairs < num_pairs)).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    ids_ptr,
    counts_ptr,
    sorted_ptr,
    row_starts_ptr,
    tile_starts_ptr,
    num_pairs,
    num_experts,
    first_expert,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program e writes the pairs of expert e behind those of all lower experts, in pair order."""
    expert = tl.program_id(0)
    others = tl.arange(0, BLOCK_EXPERTS)
    counts = tl.load(counts_ptr + others, mask=others < num_experts, other=0)
    tiles = (counts + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    place = tl.sum(tl.where(others < expert, counts, 0), axis=0)
    tl.store(row_starts_ptr + expert, place)
    tl.store(tile_starts_ptr + expert, tl.sum(tl.where(others < expert, tiles, 0), axis=0))
    if expert == num_experts - 1:
        tl.store(row_starts_ptr + num_experts, tl.sum(counts, axis=0))
        tl.store(tile_starts_ptr + num_experts, tl.sum(tiles, axis=0))
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        mine = (ids == expert + first_expert) & (pairs < num_pairs)
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(sorted_ptr + place + rank - 1, pairs, mask=mine)
        place += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["top_k"])
def _expert_kernel(
    x_ptr,
    out_ptr,
    sorted_ptr,
    row_starts_ptr,
    tile_starts_ptr,
    weights_ptr,
    gate_ptr,
    gate_scale_ptr,
    up_ptr,
    up_scale_ptr,
    num_experts,
    num_cols,
    depth,
    top_k,
    limit,
    stride_x,
    stride_out,
    stride_expert,
    stride_weight,
    stride_scale_expert,
    stride_scale,
    GATED: tl.constexpr,
    SCALE_UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WEIGHTS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """One program owns one tile of pairs x one block of columns of its expert.

    GATED: the weight rows of a program are 8 of W1, the same 8 of W3 and so on, so that one lane
    holds gate and up of a column; x is indexed by row, the result (SwiGLU times routing weight) by
    place. Otherwise: x is indexed by place, the result by pair. A scale stride counts SCALE_UNIT
    bytes, which lets the compiler see that four scales may be read as one word.
    """
    OUT_COLS: tl.constexpr = BLOCK_WEIGHTS // 2 if GATED else BLOCK_WEIGHTS
    col_tiles = tl.cdiv(num_cols, OUT_COLS)
    tile = tl.program_id(0) // col_tiles
    others = tl.arange(0, BLOCK_EXPERTS)
    ends = tl.load(tile_starts_ptr + 1 + others, mask=others < num_experts, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    if expert >= num_experts:
        return
    first = tl.load(row_starts_ptr + expert)
    first += (tile - tl.load(tile_starts_ptr + expert)) * BLOCK_ROWS
    places = first + tl.arange(0, BLOCK_ROWS)
    inside = places < tl.load(row_starts_ptr + expert + 1)
    # Places past the last pair of the expert repeat its first one; their results are not stored.
    places = tl.where(inside, places, first).to(tl.int64)
    source = (tl.load(sorted_ptr + places) // top_k).to(tl.int64) if GATED else places

    first_col = (tl.program_id(0) % col_tiles) * OUT_COLS
    lane = tl.arange(0, BLOCK_WEIGHTS)
    cols = first_col + (lane // 16 * 8 + lane % 8 if GATED else lane)
    cols = tl.where(cols < num_cols, cols, 0).to(tl.int64)
    expert = expert.to(tl.int64)
    offset = tl.arange(0, BLOCK_DEPTH)
    half = tl.arange(0, BLOCK_DEPTH // 2)
    group = tl.arange(0, BLOCK_DEPTH // 32)
    weight_offset = (expert * stride_expert + cols * stride_weight)[:, None] + half[None, :]
    scale_row = (expert * stride_scale_expert + cols * stride_scale) * SCALE_UNIT
    scale_offset = scale_row[:, None] + group[None, :]
    weight_ptrs = gate_ptr + weight_offset
    scale_ptrs = gate_scale_ptr + scale_offset
    if GATED:
        is_gate = ((lane // 8) % 2 == 0)[:, None]
        weight_ptrs = tl.where(is_gate, weight_ptrs, up_ptr + weight_offset)
        scale_ptrs = tl.where(is_gate, scale_ptrs, up_scale_ptr + scale_offset)
    x_ptrs = x_ptr + source[None, :] * stride_x + offset[:, None]

    acc = tl.zeros([BLOCK_WEIGHTS, BLOCK_ROWS], tl.float32)
    if EVEN:
        scales = tl.load(scale_ptrs)
    else:
        scales = tl.load(scale_ptrs, mask=(group * 32 < depth)[None, :], other=0)
    for start in range(0, depth, BLOCK_DEPTH):
        # Operands are padded to whole blocks, weights are not.
        x = tl.load(x_ptrs + start)
        ahead = start + BLOCK_DEPTH
        if EVEN:
            packed = tl.load(weight_ptrs + start // 2)
            ahead = tl.where(ahead < depth, ahead, 0)
            following = tl.load(scale_ptrs + ahead // 32)
        else:
            packed = tl.load(
                weight_ptrs + start // 2, mask=(start + half * 2 < depth)[None, :], other=0
            )
            following = tl.load(
                scale_ptrs + ahead // 32, mask=(ahead + group * 32 < depth)[None, :], other=0
            )
        weight = fp4_values(packed, scales, BLOCK_WEIGHTS, BLOCK_DEPTH)
        weight = in_order(weight, BLOCK_WEIGHTS, BLOCK_DEPTH, 4)
        scales = following
        acc = dot(weight, x, acc)

    if GATED:
        pair_up = tl.reshape(acc, [BLOCK_WEIGHTS // 16, 2, 8, BLOCK_ROWS])
        gate, up = tl.split(tl.permute(pair_up, [0, 2, 3, 1]))
        gate = to_bfloat16(tl.reshape(gate, [OUT_COLS, BLOCK_ROWS])).to(tl.float32)
        up = to_bfloat16(tl.reshape(up, [OUT_COLS, BLOCK_ROWS])).to(tl.float32)
        factor = tl.load(weights_ptr + tl.load(sorted_ptr + places))
        acc = factor[None, :] * swiglu_values(gate, up, limit)
    cols = first_col + tl.arange(0, OUT_COLS)
    target = places if GATED else tl.load(sorted_ptr + places).to(tl.int64)
    tl.store(
        out_ptr + target[None, :] * stride_out + cols[:, None],
        to_bfloat16(acc),
        mask=(cols < num_cols)[:, None] & inside[None, :],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoice:
    """Tile and pipeline: pairs x weight rows (gate and up rows together in the gated GEMM)."""

    block_rows: int
    block_weights: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def choose_experts(num_pairs: int, num_experts: int) -> ExpertChoice:
    """Tile by the mean number of pairs an expert.

    A second tile of an expert decodes its weights once more; padding costs tensor core time. A
    program decodes and multiplies in turn, so three small ones share an SM (168 registers a thread)
    and one multiplies while another decodes. Beyond 72 pairs, fewer programs that each read the
    rows count for more. The limits lie between the sizes that were measured on an H200: 32 rows of
    a chunk to 16,384, half a pair to 256.
    """
    mean = num_pairs / num_experts
    if mean > 72:
        return ExpertChoice(block_rows=128, block_weights=256, num_warps=8, num_stages=3)
    if mean > 11:
        return ExpertChoice(
            block_rows=64 if mean > 28 else 32,
            block_weights=128,
            num_warps=4,
            num_stages=3,
            max_registers=168,
        )
    return ExpertChoice(block_rows=16, block_weights=128, num_warps=4, num_stages=3)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SortedPairs:
    """Pairs of local experts in expert order.

    Attributes:
        pairs: ``(num_pairs,)`` int32, pair of every place; undefined behind ``row_starts[-1]``.
        row_starts: ``(num_experts + 1,)`` int32, first place of every expert.
        tile_starts: ``(num_experts + 1,)`` int32, first tile of every expert.
        max_tiles: a bound of ``tile_starts[-1]`` for any ids.
    """

    pairs: Tensor
    row_starts: Tensor
    tile_starts: Tensor
    max_tiles: int


def max_tiles(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """Most tiles that ``num_pairs`` pairs can need: one a non-empty expert and one a full tile."""
    return min(num_pairs, num_experts) + num_pairs // block_rows


def sort_pairs(
    ids: Tensor, first_expert: int, num_experts: int, block_rows: int, *, block: int | None = None
) -> SortedPairs:
    """Sort the pairs of local experts, stable, without reading anything back.

    Args:
        ids: ``(num_rows, top_k)`` int32, contiguous; ids outside the local range are left out.
        first_expert: global id of local expert 0.
        num_experts: local experts.
        block_rows: pairs of one tile.
        block: pairs that a program looks at in one step, a power of two.
    """
    num_pairs = ids.numel()
    counts = ids.new_empty(num_experts)
    found = SortedPairs(
        pairs=ids.new_empty(num_pairs),
        row_starts=ids.new_empty(num_experts + 1),
        tile_starts=ids.new_empty(num_experts + 1),
        max_tiles=max_tiles(num_pairs, num_experts, block_rows),
    )
    # Two sizes: every other one would be compiled in the middle of serving.
    block = block or (512 if num_pairs <= 2048 else 4096)
    _count_kernel[(num_experts,)](ids, counts, num_pairs, first_expert, BLOCK=block)
    _place_kernel[(num_experts,)](
        ids,
        counts,
        found.pairs,
        found.row_starts,
        found.tile_starts,
        num_pairs,
        num_experts,
        first_expert,
        BLOCK_ROWS=block_rows,
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK=block,
    )
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Fp4Stack:
    """Packed weights ``(num_experts, num_cols, depth / 2)`` and scales ``(.., depth / 32)``."""

    weight: Tensor
    scale: Tensor


def expert_gemm(
    x: Tensor,
    found: SortedPairs,
    top_k: int,
    gate: Fp4Stack,
    out: Tensor,
    choice: ExpertChoice,
    *,
    up: Fp4Stack | None = None,
    weights: Tensor | None = None,
    limit: float = 0.0,
) -> None:
    """``out[pair] = W[expert of pair] x[place]``, or with ``up`` the gated first half of an expert.

    Args:
        x: operand in FP4 order, ``(num_rows, padded)`` bf16 with ``up``, else by place.
        found: sorted pairs for ``choice.block_rows``.
        top_k: pairs of a row.
        gate: W1 with ``up``, else W2.
        out: ``(num_pairs, num_cols)`` bf16, contiguous rows; by place with ``up``, else by pair.
            Only the rows of local pairs are written.
        choice: tile.
        up: W3, laid out as W1.
        weights: ``(num_pairs,)`` fp32 routing weights, with ``up``.
        limit: SwiGLU clamp, with ``up``.

    Raises:
        ValueError: a weight's last dim is not contiguous, or W1 and W3 differ in their strides.
    """
    second = gate if up is None else up
    for name in ("weight", "scale"):
        first_stride, stride = getattr(gate, name).stride(), getattr(second, name).stride()
        if first_stride != stride or stride[-1] != 1:
            raise ValueError(
                f"expert {name} expected equal strides and a contiguous last dim, got "
                f"{first_stride} and {stride}; stack the experts as the loader does"
            )
    num_experts, num_cols, half_depth = gate.weight.shape
    scale_strides = gate.scale.stride()[:2]
    unit = 1 if any(stride % 4 for stride in scale_strides) else 4
    out_cols = choice.block_weights // 2 if up is not None else choice.block_weights
    _expert_kernel[(found.max_tiles * triton.cdiv(num_cols, out_cols),)](
        x,
        out,
        found.pairs,
        found.row_starts,
        found.tile_starts,
        weights if weights is not None else out,
        gate.weight,
        gate.scale,
        second.weight,
        second.scale,
        num_experts,
        num_cols,
        2 * half_depth,
        top_k,
        limit,
        x.stride(0),
        out.stride(0),
        gate.weight.stride(0),
        gate.weight.stride(1),
        scale_strides[0] // unit,
        scale_strides[1] // unit,
        GATED=up is not None,
        SCALE_UNIT=unit,
        EVEN=2 * half_depth % BLOCK_DEPTH == 0,
        BLOCK_ROWS=choice.block_rows,
        BLOCK_WEIGHTS=choice.block_weights,
        BLOCK_DEPTH=BLOCK_DEPTH,
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts),
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        maxnreg=choice.max_registers,
    )
