"""FP8 weights as BF16, once a call, for many rows.

A GEMM over many rows reads every weight tile again for every tile of rows. Dequantizing the weight
into a workspace first costs 3 bytes of traffic a weight and leaves a plain BF16 GEMM, which ran
1.35 times as fast on an H200 before `_gemm_many` made it faster still. The values are exact and
stand in the operand order of the fused path, so both paths give the same bits and the number of
rows may choose between them.

One launch prepares everything a call needs: its programs take a tile of the rows, to be quantized,
or of a weight. Two weights over the same rows stand below each other, so that one GEMM and one
quantization of the rows serve both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels._gemm import fp8_values
from pcpkit.kernels._operand import in_order, mxfp8_rounded

MANY_ROWS = 1024
"""From this many rows on the workspace is used. Measured at 4,096 rows only (32768 x 1280: 528 us
with `_gemm_many`, 738 us without a workspace); where it starts to pay is an estimate."""

_ROWS, _DEPTH, _WARPS = 4, 512, 4
"""Tile of one program. On an H200 2 to 16 rows and 4 or 8 warps differ by 5 %."""

ScaledWeight = tuple[Tensor, Tensor]
"""E4M3 bytes ``(num_cols, depth)``, last dim contiguous, and E8M0 bytes, one a 32 x 32 block."""


@triton.jit
def _weight_tile(
    weight_ptr,
    scale_ptr,
    out_ptr,
    tile,
    num_cols,
    depth,
    stride_weight,
    stride_scale,
    ORDER: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Dequantize ``COLS`` weight rows x ``DEPTH`` channels."""
    tiles_across = tl.cdiv(depth, DEPTH)
    start = tile % tiles_across * DEPTH
    col = (tile // tiles_across).to(tl.int64) * COLS + tl.arange(0, COLS)
    channel = start + tl.arange(0, DEPTH)
    block = start // 32 + tl.arange(0, DEPTH // 32)
    inside = (col < num_cols)[:, None]
    codes = tl.load(
        weight_ptr + col[:, None] * stride_weight + channel[None, :],
        mask=inside & (channel < depth)[None, :],
        other=0,
    )
    scales = tl.load(
        scale_ptr + (col // 32)[:, None] * stride_scale + block[None, :],
        mask=inside & (block < depth // 32)[None, :],
        other=127,
    )
    values = in_order(fp8_values(codes, scales, COLS, DEPTH), COLS, DEPTH, ORDER)
    tl.store(
        out_ptr + col[:, None] * depth + channel[None, :],
        values,
        mask=inside & (channel < depth)[None, :],
    )


@triton.jit
def _operand_tile(
    x_ptr,
    out_ptr,
    tile,
    num_rows,
    depth,
    stride_x,
    ORDER: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Quantize ``ROWS`` rows x ``DEPTH`` channels."""
    tiles_across = tl.cdiv(depth, DEPTH)
    row = (tile // tiles_across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tile % tiles_across * DEPTH + tl.arange(0, DEPTH)
    mask = (row < num_rows)[:, None] & (channel < depth)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_x + channel[None, :], mask=mask, other=0.0)
    x = in_order(mxfp8_rounded(x, ROWS, DEPTH), ROWS, DEPTH, ORDER)
    tl.store(out_ptr + row[:, None] * depth + channel[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "first_cols", "second_cols"])
def _prepare_kernel(
    first_ptr,
    first_scale_ptr,
    second_ptr,
    second_scale_ptr,
    weights_ptr,
    x_ptr,
    operand_ptr,
    num_rows,
    first_cols,
    second_cols,
    depth,
    stride_first,
    stride_first_scale,
    stride_second,
    stride_second_scale,
    stride_x,
    ORDER: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program owns a tile of the first weight, of the second one or of the rows."""
    tile = tl.program_id(0)
    tiles_across = tl.cdiv(depth, DEPTH)
    first_tiles = tl.cdiv(first_cols, ROWS) * tiles_across
    weight_tiles = first_tiles + tl.cdiv(second_cols, ROWS) * tiles_across
    if tile < first_tiles:
        _weight_tile(
            first_ptr,
            first_scale_ptr,
            weights_ptr,
            tile,
            first_cols,
            depth,
            stride_first,
            stride_first_scale,
            ORDER,
            ROWS,
            DEPTH,
        )
    elif tile < weight_tiles:
        _weight_tile(
            second_ptr,
            second_scale_ptr,
            weights_ptr + first_cols.to(tl.int64) * depth,
            tile - first_tiles,
            second_cols,
            depth,
            stride_second,
            stride_second_scale,
            ORDER,
            ROWS,
            DEPTH,
        )
    else:
        _operand_tile(
            x_ptr, operand_ptr, tile - weight_tiles, num_rows, depth, stride_x, ORDER, ROWS, DEPTH
        )


def prepare_many(
    x: Tensor, weights: Sequence[ScaledWeight], quantize: bool, order: int
) -> tuple[Tensor, Tensor]:
    """Both operands of a quantized linear layer, or of two over the same rows.

    Args:
        x: ``(num_rows, depth)`` bf16, last dim contiguous.
        weights: one weight, or two with the same ``depth``.
        quantize: round ``x`` to MXFP8, as ``prepare_operand`` does; else it is returned as it is.
        order: operand order along ``depth``, whose whole blocks ``depth`` consists of.

    Returns:
        The operand ``(num_rows, depth)`` bf16, and the values of the weights below each other
        ``(sum of num_cols, depth)`` bf16.
    """
    (first, first_scale), (second, second_scale) = weights[0], weights[-1]
    depth = first.shape[1]
    second_cols = second.shape[0] if len(weights) == 2 else 0
    num_rows = x.shape[0] if quantize else 0
    operand = torch.empty_like(x, memory_format=torch.contiguous_format) if quantize else x
    dense = torch.empty(
        first.shape[0] + second_cols, depth, dtype=torch.bfloat16, device=first.device
    )
    row_tiles = sum(triton.cdiv(rows, _ROWS) for rows in (first.shape[0], second_cols, num_rows))
    _prepare_kernel[(row_tiles * triton.cdiv(depth, _DEPTH),)](
        first,
        first_scale,
        second,
        second_scale,
        dense,
        x,
        operand,
        num_rows,
        first.shape[0],
        second_cols,
        depth,
        first.stride(0),
        first_scale.stride(0),
        second.stride(0),
        second_scale.stride(0),
        x.stride(0),
        ORDER=order,
        ROWS=_ROWS,
        DEPTH=_DEPTH,
        num_warps=_WARPS,
    )
    return operand, dense


def dense_weight(weight: Tensor, scale: Tensor, order: int) -> Tensor:
    """BF16 values ``(num_cols, depth)`` of one weight; ``order`` as in :func:`prepare_many`."""
    no_rows = torch.empty(0, weight.shape[1], dtype=torch.bfloat16, device=weight.device)
    return prepare_many(no_rows, [(weight, scale)], False, order)[1]
