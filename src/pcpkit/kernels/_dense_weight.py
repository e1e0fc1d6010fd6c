"""FP8 weights as BF16, once a call, for many rows.

A GEMM over many rows reads every weight tile again for every tile of rows. Dequantizing the weight
into a workspace first costs 3 bytes of traffic a weight and leaves a plain BF16 GEMM, which runs
1.35 times as fast (measured on an H200). The values are exact and stand in the operand order of the
fused path, so both paths give the same bits and the number of rows may choose between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels._gemm import fp8_values
from pcpkit.kernels._operand import in_order

MANY_ROWS = 1024
"""From this many rows on the workspace is used. Measured at 4,096 rows only (32768 x 1280: 591
against 738 us); where it starts to pay is an estimate."""


@triton.jit
def _dense_weight_kernel(
    weight_ptr,
    scale_ptr,
    out_ptr,
    num_cols,
    depth,
    stride_weight,
    stride_scale,
    stride_out,
    ORDER: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program owns ``COLS`` weight rows x ``DEPTH`` channels."""
    col = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    channel = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    block = tl.program_id(1) * (DEPTH // 32) + tl.arange(0, DEPTH // 32)
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
        out_ptr + col[:, None] * stride_out + channel[None, :],
        values,
        mask=inside & (channel < depth)[None, :],
    )


def dense_weight(weight: Tensor, scale: Tensor, order: int) -> Tensor:
    """BF16 values of a block-scaled FP8 weight.

    Args:
        weight: ``(num_cols, depth)`` uint8, last dim contiguous.
        scale: E8M0 bytes, one per 32 x 32 block.
        order: operand order along ``depth``, whose whole blocks ``depth`` consists of.

    Returns:
        ``(num_cols, depth)`` bf16.
    """
    num_cols, depth = weight.shape
    out = torch.empty(num_cols, depth, dtype=torch.bfloat16, device=weight.device)
    cols, block_depth = 8, 512
    _dense_weight_kernel[(triton.cdiv(num_cols, cols), triton.cdiv(depth, block_depth))](
        weight,
        scale,
        out,
        num_cols,
        depth,
        weight.stride(0),
        scale.stride(0),
        out.stride(0),
        ORDER=order,
        COLS=cols,
        DEPTH=block_depth,
        num_warps=8,
    )
    return out
