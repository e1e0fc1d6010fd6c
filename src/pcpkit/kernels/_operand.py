"""Activations as the quantized GEMMs read them: MXFP8-rounded BF16 rows, in tensor core order.

A GEMM over quantized weights multiplies BF16 values: a dequantized weight (at most 4 significant
bits times a power of two) and a dequantized activation are exact in BF16. The activations are
rounded once by the kernel here; the weights are dequantized in the main loop of the GEMM.

*Tensor core order.* In a ``wgmma`` with its left operand in registers, lane ``q`` of a quad holds,
of every 16 consecutive k, those at ``2 q + p`` and ``8 + 2 q + p`` (p = 0, 1). Read in channel
order, those are pairs of bytes scattered over a row of weights. So operand position and channel are
permuted within a block, for weights and activations alike, such that a lane's weights of a block
are 16 neighbouring bytes in memory and share one scale:

| weights | block        | channel                     | position in the block       |
|---------|--------------|-----------------------------|-----------------------------|
| E4M3    | 64 channels  | 16 q + 4 s + 2 u + p        | 16 s + 8 u + 2 q + p        |
| E2M1    | 128 channels | 32 q + 8 s + 4 u + 2 p + h  | 64 h + 16 s + 8 u + 2 q + p |

with q, s = 0..3 and u, p, h = 0, 1; h tells the nibbles of a byte apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels._jit import e4m3_decode, e8m0_decode, quantize_mxfp8, to_bfloat16

CHANNEL_ORDER = 0
"""`order` of operands that stay in channel order."""

ORDER_BLOCK = {CHANNEL_ORDER: 1, 4: 128, 8: 64}
"""Channels of one block of the operand order, by the bits of a weight."""


@triton.jit
def in_order(values, ROWS: tl.constexpr, DEPTH: tl.constexpr, ORDER: tl.constexpr):
    """``values`` [ROWS, DEPTH] with channels moved to the positions of the module's table."""
    if ORDER == 8:
        grouped = tl.reshape(values, [ROWS, DEPTH // 64, 4, 4, 2, 2])
        return tl.reshape(tl.permute(grouped, [0, 1, 3, 4, 2, 5]), [ROWS, DEPTH])
    if ORDER == 4:
        grouped = tl.reshape(values, [ROWS, DEPTH // 128, 4, 4, 2, 2, 2])
        return tl.reshape(tl.permute(grouped, [0, 1, 6, 3, 4, 2, 5]), [ROWS, DEPTH])
    return values


@triton.jit
def mxfp8_rounded(x, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """BF16 values of ``x`` [ROWS, DEPTH] rounded to MXFP8, 32 channels a group."""
    codes, scales = quantize_mxfp8(x.to(tl.float32), ROWS, DEPTH, 32)
    groups = tl.reshape(codes, [ROWS, DEPTH // 32, 32])
    values = e4m3_decode(groups).to(tl.float32) * e8m0_decode(scales)[:, :, None]
    return to_bfloat16(tl.reshape(values, [ROWS, DEPTH]))


@triton.jit(do_not_specialize=["num_rows"])
def _operand_kernel(
    x_ptr,
    out_ptr,
    used_ptr,
    num_rows,
    depth,
    stride_x,
    stride_out,
    QUANTIZE: tl.constexpr,
    ORDER: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """One program owns ``BLOCK_ROWS`` x ``BLOCK_DEPTH`` channels; those from ``depth`` on are 0."""
    if LIMITED:
        num_rows = tl.load(used_ptr)
        if tl.program_id(0) * BLOCK_ROWS >= num_rows:
            return
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channels = tl.program_id(1) * BLOCK_DEPTH + tl.arange(0, BLOCK_DEPTH)
    inside = (rows < num_rows)[:, None]
    x = tl.load(
        x_ptr + rows[:, None] * stride_x + channels[None, :],
        mask=inside & (channels < depth)[None, :],
        other=0.0,
    )
    if QUANTIZE:
        x = mxfp8_rounded(x, BLOCK_ROWS, BLOCK_DEPTH)
    x = in_order(x, BLOCK_ROWS, BLOCK_DEPTH, ORDER)
    tl.store(
        out_ptr + rows[:, None] * stride_out + channels[None, :],
        x,
        mask=inside & (channels < stride_out)[None, :],
    )


def prepare_operand(
    x: Tensor, quantize: bool, order: int, used_rows: Tensor | None = None
) -> Tensor:
    """Round and reorder activations in one pass.

    Args:
        x: ``(num_rows, depth)`` bf16, last dim contiguous, at least one row.
        quantize: round to MXFP8 (``depth`` is then a multiple of 32).
        order: 0 = channel order, 4 or 8 = tensor core order for weights of so many bits.
        used_rows: ``(1,)`` int32; rows from this one on are left undefined.

    Returns:
        ``(num_rows, padded)`` bf16, ``padded`` = ``depth`` rounded up to a whole order block with
        zeros; ``x`` itself if there is nothing to do.
    """
    if not quantize and order == CHANNEL_ORDER:
        return x
    num_rows, depth = x.shape
    block = ORDER_BLOCK[order]
    padded = -(-depth // block) * block
    out = torch.empty(num_rows, padded, dtype=torch.bfloat16, device=x.device)
    block_rows, block_depth = 4, 512
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(padded, block_depth))
    _operand_kernel[grid](
        x,
        out,
        x if used_rows is None else used_rows,
        num_rows,
        depth,
        x.stride(0),
        out.stride(0),
        QUANTIZE=quantize,
        ORDER=order,
        LIMITED=used_rows is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_DEPTH=block_depth,
        num_warps=4,
    )
    return out
