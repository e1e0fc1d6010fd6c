"""RMSNorm of BF16 or FP32 rows.

``y = BF16(w * (x * r))``, ``r = 1 / sqrt(mean(x^2) + eps)``, everything FP32, one rounding to BF16
at the end (model-spec section 0.7; eps is 1e-20 for every text norm, so a zero row gives zeros and
no row is damped). The mean square is a float64 sum rounded to FP32: see docs/numerics.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels import _jit
from pcpkit.kernels._ops import check_dtype, check_shape, register_op
from pcpkit.kernels._reference import inverse_rms


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise every row of ``x``.

    Args:
        x: ``(num_rows, dim)`` bf16 or fp32; rows may be strided.
        weight: ``(dim,)`` bf16.
        eps: added to the mean square.

    Returns:
        ``(num_rows, dim)`` bf16. A row with NaN or infinity gives NaN in that row only.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_shape("x", x, None, weight.shape[0], remedy="flatten leading dims and match weight")
    check_dtype("x", x, torch.bfloat16, torch.float32)
    check_dtype("weight", weight, torch.bfloat16)
    return _rms_norm_op(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The specification of :func:`rms_norm`."""
    wide = x.float()
    return (weight.float() * (wide * inverse_rms(wide, eps))).bfloat16()


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    stride_row,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program owns ``BLOCK_ROWS`` rows and keeps them in registers, in chunks of channels."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    channels = tl.arange(0, BLOCK_DIM)[None, :]
    chunks = ()
    squares = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float64)
    for first in tl.static_range(0, DIM, BLOCK_DIM):
        mask = (rows < num_rows) & (channels < DIM - first)
        x = tl.load(x_ptr + rows * stride_row + (first + channels), mask=mask, other=0.0)
        wide = _jit.widen(x).to(tl.float64)
        squares = tl.fma(wide, wide, squares)
        chunks += (x,)
    inverse = _jit.inverse_root_mean(tl.sum(squares, axis=1), DIM, eps)[:, None]
    for first in tl.static_range(0, DIM, BLOCK_DIM):
        inside = channels < DIM - first
        weight = tl.load(weight_ptr + first + channels, mask=inside, other=0.0)
        y = _jit.from_bfloat16(weight) * (_jit.widen(chunks[first // BLOCK_DIM]) * inverse)
        out = out_ptr + rows * DIM + (first + channels)
        tl.store(out, _jit.to_bfloat16(y), mask=(rows < num_rows) & inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """Rows and channels of a tile. A row's sum may depend on them, so they follow from ``dim``."""

    block_rows: int
    block_dim: int
    num_warps: int


def _choose_launch(dim: int) -> LaunchChoice:
    """Tiles of 1,024 values for 4 warps: one 16-byte load of BF16 a thread and chunk."""
    block_dim = min(1024, triton.next_power_of_2(dim))
    return LaunchChoice(block_rows=1024 // block_dim, block_dim=block_dim, num_warps=4)


def _launch(x: Tensor, weight: Tensor, eps: float, choice: LaunchChoice | None = None) -> Tensor:
    """Triton launcher of :func:`rms_norm`."""
    num_rows, dim = x.shape
    out = _fake(x, weight, eps)
    if num_rows == 0 or dim == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    choice = choice or _choose_launch(dim)
    _rms_norm_kernel[(triton.cdiv(num_rows, choice.block_rows),)](
        x,
        weight.contiguous(),
        out,
        num_rows,
        eps,
        x.stride(0),
        DIM=dim,
        BLOCK_ROWS=choice.block_rows,
        BLOCK_DIM=choice.block_dim,
        num_warps=choice.num_warps,
        enable_fp_fusion=False,
    )
    return out


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bfloat16)


_rms_norm_op = register_op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    reference=rms_norm_reference,
    fake=_fake,
    launch=_launch,
)
