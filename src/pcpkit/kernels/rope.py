"""Rotary position embedding of the last channels of a row, forward or inverse.

Adjacent channels ``(2i, 2i+1)`` of the last ``rope_dim`` form a complex number that is multiplied
by ``cos + i sin`` (its conjugate when ``inverse``) of the row's position in FP32, then rounded to
BF16 (model-spec section 0.8). Channels before them are copied bit for bit. Tables come from
``pcpkit.model.rope``: one row per position, ``rope_dim / 2`` cosines then as many sines.

Rounding points: each product, each sum, the cast to BF16. A position outside the table rotates by
NaN, so exactly that row's rotated channels become NaN and nothing outside the table is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels import _jit
from pcpkit.kernels._ops import check_dtype, check_shape, register_op


def apply_rope(x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last ``rope_dim`` channels of every head of every row.

    Args:
        x: ``(num_rows, num_heads, head_dim)`` bf16; rows and heads may be strided.
        positions: ``(num_rows,)`` int64, absolute position of each row in its request.
        cos_sin: ``(num_positions, rope_dim)`` fp32.
        inverse: rotate by the negative angle (attention output, section 3.8).

    Returns:
        A new contiguous tensor like ``x``.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Example:
        A row at position 0 comes back unchanged: every angle is 0.
    """
    _check(x, positions, cos_sin)
    return _apply_rope_op(x, positions, cos_sin, inverse)


def apply_rope_(x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool = False) -> None:
    """:func:`apply_rope` in place: touches only the rotated channels of ``x``.

    Args: as of :func:`apply_rope`; mutates ``x``, whose channels must be contiguous.
    """
    _check(x, positions, cos_sin)
    if x.stride(2) != 1:
        raise ValueError(f"x expected contiguous channels, got strides {x.stride()}; copy it first")
    _apply_rope_inplace_op(x, positions, cos_sin, inverse)


def _check(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    check_shape("x", x, positions.shape[0], None, None, remedy="pass (rows, heads, head_dim)")
    check_dtype("x", x, torch.bfloat16)
    check_dtype("positions", positions, torch.int64)
    check_dtype("cos_sin", cos_sin, torch.float32)
    rope_dim, head_dim = cos_sin.shape[1], x.shape[2]
    if rope_dim % 2 or head_dim % 2 or rope_dim > head_dim:
        raise ValueError(
            f"cos_sin expected an even number of columns <= head_dim {head_dim} (even), got "
            f"{rope_dim}; pass this layer's table"
        )


def apply_rope_reference(
    x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool = False
) -> Tensor:
    """The specification of :func:`apply_rope`; each product and sum is one FP32 rounding."""
    out = x.clone(memory_format=torch.contiguous_format)
    apply_rope_inplace_reference(out, positions, cos_sin, inverse)
    return out


def apply_rope_inplace_reference(
    x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool = False
) -> None:
    """The specification of :func:`apply_rope_`."""
    num_positions, rope_dim = cos_sin.shape
    known = (positions >= 0) & (positions < num_positions)
    if num_positions == 0:
        angles = cos_sin.new_full((positions.shape[0], rope_dim), torch.nan)
    else:
        angles = cos_sin[torch.where(known, positions, 0)].masked_fill(~known[:, None], torch.nan)
    cos = angles[:, None, : rope_dim // 2]
    sin = angles[:, None, rope_dim // 2 :]
    if inverse:
        sin = -sin
    tail = x[..., x.shape[-1] - rope_dim :]
    even, odd = tail[..., 0::2].float(), tail[..., 1::2].float()
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    tail.copy_(rotated.flatten(-2))


@triton.jit
def load_angles(
    cos_sin_ptr,
    positions,
    num_positions,
    stride_position,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Angles of rows at ``positions`` (int64 [ROWS]): cos and sin, FP32 [ROWS, BLOCK_DIM / 2].

    They belong to the channel pairs of a row; NaN outside the table, and for pairs that do not
    rotate (all but the last ``ROPE_DIM / 2`` of ``DIM / 2``).
    """
    angle = tl.arange(0, BLOCK_DIM // 2)[None, :] - (DIM - ROPE_DIM) // 2
    known = (positions >= 0) & (positions < num_positions)
    angle_ptr = cos_sin_ptr + positions[:, None] * stride_position + angle
    mask = (angle >= 0) & (angle < ROPE_DIM // 2) & known[:, None]
    cos = tl.load(angle_ptr, mask=mask, other=float("nan"))
    sin = tl.load(angle_ptr + ROPE_DIM // 2, mask=mask, other=float("nan"))
    return cos, sin


@triton.jit
def rotate(x, cos, sin, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, INVERSE: tl.constexpr):
    """BF16 ``x`` [ROWS, BLOCK_DIM] with the last ``ROPE_DIM`` of ``DIM`` channels rotated.

    The angles are those of :func:`load_angles`, of every row or of one row that all share. Launch
    with ``enable_fp_fusion=False``.
    """
    ROWS: tl.constexpr = x.shape[0]
    BLOCK_DIM: tl.constexpr = x.shape[1]
    pairs = tl.reshape(_jit.from_bfloat16(x), [ROWS, BLOCK_DIM // 2, 2])
    even, odd = tl.split(pairs)
    if INVERSE:
        sin = -sin
    rotated = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    rotated = _jit.to_bfloat16(tl.reshape(rotated, [ROWS, BLOCK_DIM]))
    if ROPE_DIM == DIM:
        return rotated
    channels = tl.arange(0, BLOCK_DIM)[None, :]
    # Selected after the cast: copied channels keep every bit, also the payload of a NaN.
    return tl.where((channels >= DIM - ROPE_DIM) & (channels < DIM), rotated, x)


@triton.jit
def _apply_rope_kernel(
    x_ptr,
    out_ptr,
    positions_ptr,
    cos_sin_ptr,
    num_heads,
    num_positions,
    stride_x_row,
    stride_x_head,
    stride_out_row,
    stride_out_head,
    stride_position,
    stride_table,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """One program owns ``BLOCK_HEADS`` heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    channels = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (heads < num_heads) & (channels < DIM)
    # One row has one position: the angles are a row of their own that broadcasts over heads.
    position = tl.load(positions_ptr + row * stride_position + tl.arange(0, 1))
    cos, sin = load_angles(
        cos_sin_ptr, position, num_positions, stride_table, DIM, ROPE_DIM, BLOCK_DIM
    )
    x_offset = row * stride_x_row + heads.to(tl.int64) * stride_x_head + channels
    x = tl.load(x_ptr + x_offset, mask=mask, other=0.0)
    out_offset = row * stride_out_row + heads.to(tl.int64) * stride_out_head + channels
    tl.store(out_ptr + out_offset, rotate(x, cos, sin, DIM, ROPE_DIM, INVERSE), mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """Heads a program owns and its warps; no row's result depends on either."""

    block_heads: int
    num_warps: int


def _choose_launch(num_heads: int, dim: int) -> LaunchChoice:
    """About 4,096 channels a program (two 16-byte accesses a thread), at most all heads of a row.

    Args:
        num_heads: heads of a row.
        dim: channels read of one head.
    """
    block_heads = max(1, min(triton.next_power_of_2(num_heads), 4096 // dim))
    num_warps = min(4, max(1, block_heads * dim // 512))
    return LaunchChoice(block_heads=block_heads, num_warps=num_warps)


def _rotate_into(
    out: Tensor,
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    inverse: bool,
    choice: LaunchChoice | None,
) -> None:
    """Rotate the last channels of ``x`` into ``out`` (which may be ``x``)."""
    num_rows, num_heads, dim = x.shape
    if num_rows == 0 or num_heads == 0 or dim == 0:
        return
    if cos_sin.stride(1) != 1:
        cos_sin = cos_sin.contiguous()
    block_dim = triton.next_power_of_2(dim)
    choice = choice or _choose_launch(num_heads, block_dim)
    grid = (num_rows, triton.cdiv(num_heads, choice.block_heads))
    _apply_rope_kernel[grid](
        x,
        out,
        positions,
        cos_sin,
        num_heads,
        cos_sin.shape[0],
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        positions.stride(0),
        cos_sin.stride(0),
        DIM=dim,
        ROPE_DIM=cos_sin.shape[1],
        BLOCK_DIM=block_dim,
        BLOCK_HEADS=choice.block_heads,
        INVERSE=inverse,
        num_warps=choice.num_warps,
        enable_fp_fusion=False,
    )


def _launch(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    inverse: bool = False,
    choice: LaunchChoice | None = None,
) -> Tensor:
    """Triton launcher of :func:`apply_rope`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x if x.stride(2) == 1 else x.contiguous()
    _rotate_into(out, x, positions, cos_sin, inverse, choice)
    return out


def _launch_inplace(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    inverse: bool = False,
    choice: LaunchChoice | None = None,
) -> None:
    """Triton launcher of :func:`apply_rope_`."""
    tail = x[:, :, x.shape[2] - cos_sin.shape[1] :]
    _rotate_into(tail, tail, positions, cos_sin, inverse, choice)


def _fake(x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    return x.new_empty(x.shape)


def _fake_inplace(x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool = False) -> None:
    return None


_apply_rope_op = register_op(
    "apply_rope(Tensor x, Tensor positions, Tensor cos_sin, bool inverse=False) -> Tensor",
    reference=apply_rope_reference,
    fake=_fake,
    launch=_launch,
)
_apply_rope_inplace_op = register_op(
    "apply_rope_(Tensor(a!) x, Tensor positions, Tensor cos_sin, bool inverse=False) -> ()",
    reference=apply_rope_inplace_reference,
    fake=_fake_inplace,
    launch=_launch_inplace,
)
