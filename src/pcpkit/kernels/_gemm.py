"""The row-invariant GEMM under every linear layer: ``out = x W^T`` over FP8, BF16 or FP32 weights.

One program computes ``W_tile x_tile^T``: weights are the left operand of the tensor cores. FP8
weights are dequantized in registers, from where ``wgmma`` reads its left operand, so a weight byte
crosses shared memory once and the BF16 rows, shared by all warps, stream in beside it.

*Row-invariance.* An output element is a chain of ``wgmma`` steps over 16 operand positions each,
in ascending order, into one FP32 accumulator (one a part, parts added in ascending order). Zeros
that pad the last step add nothing. A tile only decides which program runs the chain of an element,
so the launch may choose any tile from the sizes and a row gets the same bits among any other rows.
What must not change with the number of rows is the instruction family: the weight tile has at least
64 rows a warp group of 4 warps, which keeps every choice on ``wgmma``; and the operand order, which
is a property of the weight. FP32 operands run as FP32 multiply-adds in ascending order.

``_operand`` says how operand positions map to channels. Weights below 2^-126 (scale bytes under 10)
may be flushed to zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels._jit import dot, e4m3_decode, e8m0_decode, to_bfloat16
from pcpkit.kernels._operand import CHANNEL_ORDER, in_order

NUM_SMS = 132
"""Multiprocessors of an H100 or H200: what `choose_gemm` spreads tiles over."""


@triton.jit
def fp8_values(codes, scales, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """BF16 weights of E4M3 ``codes`` [ROWS, DEPTH] and E8M0 ``scales`` [ROWS, DEPTH / 32]."""
    values = tl.reshape(e4m3_decode(codes).to(tl.float32), [ROWS, DEPTH // 32, 32])
    values = values * e8m0_decode(scales)[:, :, None]
    return tl.reshape(values.to(tl.bfloat16), [ROWS, DEPTH])


@triton.jit(do_not_specialize=["num_rows"])
def _gemm_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    num_cols,
    depth,
    stride_x_row,
    stride_x_group,
    stride_weight,
    stride_scale,
    stride_out_row,
    stride_out_group,
    NUM_PARTS: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
    ORDER: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    """One program owns BLOCK_ROWS rows x BLOCK_COLS columns of one group's output.

    ``depth`` channels a part; EVEN = a part is a whole number of BLOCK_DEPTH.
    """
    # Programs that run together share SPAN row tiles, so that L2 serves their weights.
    num_row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    per_span = SPAN * tl.cdiv(num_cols, BLOCK_COLS)
    first = tl.program_id(0) // per_span * SPAN
    height = tl.minimum(num_row_tiles - first, SPAN)
    within = tl.program_id(0) % per_span
    group = tl.program_id(1).to(tl.int64)
    rows = (first + within % height).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = (within // height).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    rows_inside = rows < num_rows
    cols_inside = cols < num_cols

    # Rows and columns outside read row 0 and column 0; their results are not stored.
    source_rows = tl.where(rows_inside, rows, 0)
    source_cols = tl.where(cols_inside, cols, 0) + group * num_cols
    offset = tl.arange(0, BLOCK_DEPTH)
    x_ptrs = x_ptr + group * stride_x_group + source_rows[None, :] * stride_x_row + offset[:, None]
    weight_ptrs = weight_ptr + source_cols[:, None] * stride_weight + offset[None, :]
    if FP8:
        scale_offset = tl.arange(0, BLOCK_DEPTH // 32)
        scale_ptrs = scale_ptr + (source_cols // 32)[:, None] * stride_scale + scale_offset[None, :]

    total = tl.zeros([BLOCK_COLS, BLOCK_ROWS], tl.float32)
    for part in range(NUM_PARTS):
        begin = part * depth
        end = begin + depth
        acc = tl.zeros([BLOCK_COLS, BLOCK_ROWS], tl.float32)
        if FP8:
            scales = tl.load(
                scale_ptrs + begin // 32, mask=(scale_offset < depth // 32)[None, :], other=0
            )
        for start in range(begin, end, BLOCK_DEPTH):
            if EVEN:
                weight = tl.load(weight_ptrs + start)
                x = tl.load(x_ptrs + start)
            else:
                inside = start + offset < end
                weight = tl.load(weight_ptrs + start, mask=inside[None, :], other=0)
                x = tl.load(x_ptrs + start, mask=inside[:, None], other=0.0)
            if FP8:
                weight = fp8_values(weight, scales, BLOCK_COLS, BLOCK_DEPTH)
                weight = in_order(weight, BLOCK_COLS, BLOCK_DEPTH, ORDER)
                # The next scales: too narrow for asynchronous copies, so requested one step ahead.
                ahead = start + BLOCK_DEPTH
                scales = tl.load(
                    scale_ptrs + ahead // 32,
                    mask=(ahead // 32 + scale_offset < end // 32)[None, :],
                    other=0,
                )
            if WIDE:
                weight = weight.to(tl.float32)
                x = x.to(tl.float32)
            acc = dot(weight, x, acc)
        if NUM_PARTS == 1:
            total = acc
        else:
            total += acc

    out_ptrs = out_ptr + group * stride_out_group + rows[None, :] * stride_out_row + cols[:, None]
    if out_ptr.dtype.element_ty == tl.bfloat16:
        total = to_bfloat16(total)
    tl.store(out_ptrs, total, mask=cols_inside[:, None] & rows_inside[None, :])


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmChoice:
    """Tile and pipeline of one launch.

    Attributes:
        block_rows, block_cols, block_depth: tile of rows x weight rows x channels.
        num_warps, num_stages: as Triton takes them.
        speed: estimated rate of the inner loop, 1 = the fastest tile.
    """

    block_rows: int
    block_cols: int
    block_depth: int
    num_warps: int
    num_stages: int
    speed: float


def _tile(rows: int, cols: int, depth: int, warps: int, stages: int, speed: float) -> GemmChoice:
    return GemmChoice(
        block_rows=rows,
        block_cols=cols,
        block_depth=depth,
        num_warps=warps,
        num_stages=stages,
        speed=speed,
    )


# `speed` follows the bytes a tile takes from L2: 8.5 TB/s over the chip [measured: performance.md]
# against 2 x rows x cols FLOP a channel. Compiled by Triton 3.6 for sm_90 no tile spills: 72 to 200
# registers with FP8 weights, up to 254 with BF16 ones, at most 156 KB of shared memory.
_TILES = {
    "fp8": (
        _tile(256, 128, 64, 8, 4, 1.0),
        _tile(128, 128, 64, 8, 4, 0.9),
        _tile(64, 128, 64, 8, 4, 0.68),
        _tile(64, 64, 64, 4, 4, 0.46),
        _tile(32, 64, 128, 4, 4, 0.33),
        _tile(16, 64, 128, 4, 4, 0.22),
    ),
    "fp8 parts": (
        _tile(128, 128, 64, 8, 4, 0.8),
        _tile(64, 128, 64, 8, 4, 0.68),
        _tile(64, 64, 64, 4, 4, 0.46),
        _tile(32, 64, 128, 4, 4, 0.33),
        _tile(16, 64, 128, 4, 4, 0.22),
    ),
    "bf16": (
        _tile(256, 128, 64, 8, 3, 1.0),
        _tile(128, 128, 64, 8, 3, 0.75),
        _tile(64, 128, 64, 8, 4, 0.5),
        _tile(64, 64, 64, 4, 4, 0.37),
        _tile(32, 64, 128, 4, 4, 0.25),
        _tile(16, 64, 128, 4, 4, 0.15),
    ),
    "bf16 parts": (
        _tile(128, 128, 64, 8, 4, 0.75),
        _tile(64, 128, 64, 8, 4, 0.5),
        _tile(64, 64, 64, 4, 4, 0.37),
    ),
    "fp32": (_tile(32, 64, 32, 4, 2, 1.0),),
}


@lru_cache(maxsize=4096)
def choose_gemm(kind: str, num_rows: int, num_cols: int, num_groups: int) -> GemmChoice:
    """The tile with the least estimated time: waves of programs over the chip x time of a tile.

    Args:
        kind: "fp8", "bf16", either with " parts" (several ordered partial sums), or "fp32".
        num_rows: rows of the input.
        num_cols: output features of one group.
        num_groups: blocks of a block-diagonal weight.
    """

    def cost(tile: GemmChoice) -> float:
        programs = triton.cdiv(num_rows, tile.block_rows) * triton.cdiv(num_cols, tile.block_cols)
        waves = triton.cdiv(programs * num_groups, NUM_SMS)
        return waves * tile.block_rows * tile.block_cols / tile.speed

    return min(_TILES[kind], key=cost)


def gemm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    out: Tensor,
    *,
    num_parts: int = 1,
    order: int = CHANNEL_ORDER,
    choice: GemmChoice | None = None,
) -> None:
    """``out[:, g] = x[:, g] weight[g]^T`` for every group g of a block-diagonal weight.

    Args:
        x: ``(num_rows, num_groups, depth)`` bf16 or fp32, last dim contiguous, at least one row.
        weight: ``(num_groups * num_cols, depth)``, last dim contiguous: uint8 E4M3 bytes if
            ``scale`` is given, else bf16 or fp32.
        scale: one E8M0 byte per 32 x 32 block of ``weight``, last dim contiguous.
        out: ``(num_rows, num_groups, num_cols)`` bf16 or fp32, last dim contiguous, overwritten.
        num_parts: equal parts of ``depth``, one FP32 partial sum each, added in ascending order.
        order: operand order of ``x`` along ``depth`` (8 only with FP8 weights).
        choice: tile, default :func:`choose_gemm`.

    Raises:
        ValueError: a last dim is not contiguous.
    """
    for name, tensor in (("x", x), ("weight", weight), ("scale", scale), ("out", out)):
        if tensor is not None and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} expected a contiguous last dim, got strides {tensor.stride()}; "
                "call .contiguous() once, outside the step"
            )
    num_rows, num_groups, num_cols = out.shape
    wide = torch.float32 in (x.dtype, weight.dtype)
    if choice is None:
        kind = "fp32" if wide else "bf16" if scale is None else "fp8"
        kind = f"{kind} parts" if kind != "fp32" and num_parts > 1 else kind
        choice = choose_gemm(kind, num_rows, num_cols, num_groups)
    depth = x.shape[-1] // num_parts
    row_tiles = triton.cdiv(num_rows, choice.block_rows)
    _gemm_kernel[(row_tiles * triton.cdiv(num_cols, choice.block_cols), num_groups)](
        x,
        weight,
        scale if scale is not None else weight,
        out,
        num_rows,
        num_cols,
        depth,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        scale.stride(0) if scale is not None else 0,
        out.stride(0),
        out.stride(1),
        NUM_PARTS=num_parts,
        FP8=scale is not None,
        WIDE=wide,
        ORDER=order,
        EVEN=depth % choice.block_depth == 0,
        BLOCK_ROWS=choice.block_rows,
        BLOCK_COLS=choice.block_cols,
        BLOCK_DEPTH=choice.block_depth,
        SPAN=8,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )
