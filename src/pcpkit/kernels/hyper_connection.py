"""Manifold-constrained hyper-connections: mix, collapse and expand the residual streams.

A token carries ``S`` BF16 streams ``X_k`` (4 in the release). Each sub-layer computes from them, in
FP32, the coefficients ``pre`` (how streams collapse into a sub-layer's input), ``post`` (how its
output is added back) and ``comb`` (how streams mix), ``comb`` made doubly stochastic by Sinkhorn
steps (:mod:`hyper_connection_mix`). Source: model-spec section 2.

Rounding points: every product and every sum in FP32, streams in ascending order; a collapsed row
and every expanded stream once to BF16, also in front of a fused norm, which then is that of
:mod:`norm`. So every kernel here has the bits of its reference. NaN and infinity stay in their row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels import _jit
from pcpkit.kernels import _reference as wide
from pcpkit.kernels._ops import check_dtype, check_shape, register_op
from pcpkit.kernels.hyper_connection_mix import hc_mix
from pcpkit.kernels.norm import rms_norm_reference

__all__ = ["hc_collapse", "hc_collapse_norm", "hc_expand", "hc_expand_collapse_norm", "hc_mix"]


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Input of a sub-layer: ``BF16(sum_k pre_k * X_k)``, streams added in order in FP32.

    Args:
        streams: ``(num_rows, S, dim)`` bf16.
        pre: ``(num_rows, S)`` fp32.

    Returns:
        ``(num_rows, dim)`` bf16.
    """
    _check_streams(streams, pre=pre)
    return _hc_collapse_op(streams, pre)


def hc_collapse_reference(streams: Tensor, pre: Tensor) -> Tensor:
    """The specification of :func:`hc_collapse`."""
    return wide.ordered_sum(pre[:, :, None] * streams.float(), 1).bfloat16()


def hc_collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm(hc_collapse(streams, pre), weight, eps)`` in one pass over the streams.

    Args:
        streams: ``(num_rows, S, dim)`` bf16.
        pre: ``(num_rows, S)`` fp32.
        weight: ``(dim,)`` bf16.
        eps: added to the mean square.

    Returns:
        ``(num_rows, dim)`` bf16.
    """
    _check_streams(streams, pre=pre)
    _check_weight(weight, streams)
    return _hc_collapse_norm_op(streams, pre, weight, eps)


def hc_collapse_norm_reference(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The specification of :func:`hc_collapse_norm`."""
    return rms_norm_reference(hc_collapse_reference(streams, pre), weight, eps)


def hc_expand(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Streams after a sub-layer: ``X'_k = BF16(post_k * y + sum_j comb_jk * X_j)``.

    Args:
        output: ``(num_rows, dim)`` bf16, the sub-layer's ``y``.
        streams: ``(num_rows, S, dim)`` bf16, streams before it.
        post: ``(num_rows, S)`` fp32.
        comb: ``(num_rows, S, S)`` fp32, ``[input stream j, output stream k]``.

    Returns:
        ``(num_rows, S, dim)`` bf16.
    """
    _check_streams(streams, post=post)
    _check_output(output, streams, comb)
    return _hc_expand_op(output, streams, post, comb)


def hc_expand_reference(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The specification of :func:`hc_expand`; the sum over ``j`` comes first, in order."""
    wide_streams = streams.float()
    out = torch.empty_like(streams)
    for k in range(streams.shape[1]):
        mixed = wide.ordered_sum(comb[:, :, k, None] * wide_streams, 1)
        out[:, k] = (post[:, k, None] * output.float() + mixed).bfloat16()
    return out


def hc_expand_collapse_norm(
    output: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """:func:`hc_expand`, and the next sub-layer's input from the streams while they are at hand.

    Args: as of :func:`hc_expand` and, for the next sub-layer, of :func:`hc_collapse_norm`.

    Returns:
        The new streams ``(num_rows, S, dim)`` and ``hc_collapse_norm`` of them ``(num_rows, dim)``.
    """
    _check_streams(streams, post=post, pre=pre)
    _check_output(output, streams, comb)
    _check_weight(weight, streams)
    return _hc_expand_collapse_norm_op(output, streams, post, comb, pre, weight, eps)


def hc_expand_collapse_norm_reference(
    output: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The specification of :func:`hc_expand_collapse_norm`."""
    expanded = hc_expand_reference(output, streams, post, comb)
    return expanded, hc_collapse_norm_reference(expanded, pre, weight, eps)


def _check_streams(streams: Tensor, **coefficients: Tensor) -> None:
    check_shape("streams", streams, None, None, None, remedy="pass (rows, streams, channels)")
    check_dtype("streams", streams, torch.bfloat16)
    for name, tensor in coefficients.items():
        check_shape(name, tensor, *streams.shape[:2], remedy="one coefficient a stream")
        check_dtype(name, tensor, torch.float32)


def _check_output(output: Tensor, streams: Tensor, comb: Tensor) -> None:
    rows, count, dim = streams.shape
    check_shape("output", output, rows, dim, remedy="match the streams")
    check_dtype("output", output, torch.bfloat16)
    check_shape("comb", comb, rows, count, count, remedy="pass (rows, input, output stream)")
    check_dtype("comb", comb, torch.float32)


def _check_weight(weight: Tensor, streams: Tensor) -> None:
    check_shape("weight", weight, streams.shape[2], remedy="pass the norm of the next sub-layer")
    check_dtype("weight", weight, torch.bfloat16)


@triton.jit
def _load_streams(streams_ptr, stride_stream, channels, mask, COUNT: tl.constexpr):
    """The streams of a row at ``channels``, a tuple of FP32 blocks."""
    streams = ()
    for _ in tl.static_range(COUNT):
        x = tl.load(streams_ptr + channels, mask=mask, other=0.0)
        streams += (_jit.from_bfloat16(x),)
        streams_ptr += stride_stream
    return streams


@triton.jit
def _load_factors(factor_ptr, COUNT: tl.constexpr):
    """``COUNT`` scalars as a tuple: loaded once, before stores that might alias them."""
    factors = ()
    for k in tl.static_range(COUNT):
        factors += (tl.load(factor_ptr + k),)
    return factors


@triton.jit
def _weighted_sum(streams, factors, FIRST: tl.constexpr, STRIDE: tl.constexpr):
    """``sum_j factors[FIRST + j STRIDE] * streams_j`` in ascending order."""
    total = factors[FIRST] * streams[0]
    for j in tl.static_range(1, len(streams)):
        total += factors[FIRST + j * STRIDE] * streams[j]
    return total


@triton.jit
def _expand(y, streams, post, comb):
    """The new streams of a row, a tuple of BF16 blocks."""
    COUNT: tl.constexpr = len(streams)
    expanded = ()
    for k in tl.static_range(COUNT):
        expanded += (_jit.to_bfloat16(post[k] * y + _weighted_sum(streams, comb, k, COUNT)),)
    return expanded


@triton.jit
def _collapse_kernel(
    streams_ptr,
    pre_ptr,
    out_ptr,
    stride_row,
    stride_stream,
    COUNT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program owns ``BLOCK_DIM`` channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask = channels < DIM
    streams = _load_streams(streams_ptr + row * stride_row, stride_stream, channels, mask, COUNT)
    total = _weighted_sum(streams, _load_factors(pre_ptr + row * COUNT, COUNT), 0, 1)
    tl.store(out_ptr + row * DIM + channels, _jit.to_bfloat16(total), mask=mask)


@triton.jit
def _expand_kernel(
    output_ptr,
    streams_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    stride_output,
    stride_row,
    stride_stream,
    COUNT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program owns ``BLOCK_DIM`` channels of one row, in all streams."""
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask = channels < DIM
    streams = _load_streams(streams_ptr + row * stride_row, stride_stream, channels, mask, COUNT)
    y = tl.load(output_ptr + row * stride_output + channels, mask=mask, other=0.0)
    post = _load_factors(post_ptr + row * COUNT, COUNT)
    comb = _load_factors(comb_ptr + row * COUNT * COUNT, COUNT * COUNT)
    expanded = _expand(_jit.from_bfloat16(y), streams, post, comb)
    for k in tl.static_range(COUNT):
        tl.store(out_ptr + (row * COUNT + k) * DIM + channels, expanded[k], mask=mask)


@triton.jit
def _collapse_norm_kernel(
    output_ptr,
    streams_ptr,
    post_ptr,
    comb_ptr,
    pre_ptr,
    weight_ptr,
    expanded_ptr,
    out_ptr,
    eps,
    stride_output,
    stride_row,
    stride_stream,
    EXPAND: tl.constexpr,
    COUNT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program owns one row; the collapsed row stays in registers until its norm is known."""
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK_DIM)
    pre = _load_factors(pre_ptr + row * COUNT, COUNT)
    if EXPAND:
        post = _load_factors(post_ptr + row * COUNT, COUNT)
        comb = _load_factors(comb_ptr + row * COUNT * COUNT, COUNT * COUNT)
    chunks = ()
    squares = tl.zeros([BLOCK_DIM], tl.float64)
    for first in tl.static_range(0, DIM, BLOCK_DIM):
        at = first + channels
        mask = at < DIM
        streams = _load_streams(streams_ptr + row * stride_row, stride_stream, at, mask, COUNT)
        if EXPAND:
            y = tl.load(output_ptr + row * stride_output + at, mask=mask, other=0.0)
            expanded = _expand(_jit.from_bfloat16(y), streams, post, comb)
            streams = ()
            for k in tl.static_range(COUNT):
                tl.store(expanded_ptr + (row * COUNT + k) * DIM + at, expanded[k], mask=mask)
                streams += (_jit.from_bfloat16(expanded[k]),)
        collapsed = _jit.to_bfloat16(_weighted_sum(streams, pre, 0, 1))
        summand = _jit.from_bfloat16(collapsed).to(tl.float64)
        squares = tl.fma(summand, summand, squares)
        chunks += (collapsed,)
    inverse = _jit.inverse_root_mean(tl.sum(squares, axis=0), DIM, eps)
    for first in tl.static_range(0, DIM, BLOCK_DIM):
        at = first + channels
        weight = tl.load(weight_ptr + at, mask=at < DIM, other=0.0)
        collapsed = _jit.from_bfloat16(chunks[first // BLOCK_DIM])
        y = _jit.from_bfloat16(weight) * (collapsed * inverse)
        tl.store(out_ptr + row * DIM + at, _jit.to_bfloat16(y), mask=at < DIM)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """Channels of a chunk and warps of a program; they follow from ``dim`` alone."""

    block_dim: int
    num_warps: int


def _choose_launch(dim: int) -> LaunchChoice:
    """Chunks of 1,024 channels for 4 warps: 16-byte accesses, no idle lane at 5,120 channels."""
    block_dim = min(1024, triton.next_power_of_2(dim))
    return LaunchChoice(block_dim=block_dim, num_warps=min(4, max(1, block_dim // 256)))


def _with_dense_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch_collapse(streams: Tensor, pre: Tensor, choice: LaunchChoice | None = None) -> Tensor:
    """Triton launcher of :func:`hc_collapse`."""
    num_rows, count, dim = streams.shape
    out = _fake_collapse(streams, pre)
    if out.numel() == 0:
        return out
    streams = _with_dense_channels(streams)
    choice = choice or _choose_launch(dim)
    _collapse_kernel[(num_rows, triton.cdiv(dim, choice.block_dim))](
        streams,
        pre.contiguous(),
        out,
        streams.stride(0),
        streams.stride(1),
        COUNT=count,
        DIM=dim,
        BLOCK_DIM=choice.block_dim,
        num_warps=choice.num_warps,
        enable_fp_fusion=False,
    )
    return out


def _launch_expand(
    output: Tensor, streams: Tensor, post: Tensor, comb: Tensor, choice: LaunchChoice | None = None
) -> Tensor:
    """Triton launcher of :func:`hc_expand`."""
    num_rows, count, dim = streams.shape
    out = _fake_expand(output, streams, post, comb)
    if out.numel() == 0:
        return out
    output, streams = _with_dense_channels(output), _with_dense_channels(streams)
    choice = choice or _choose_launch(dim)
    _expand_kernel[(num_rows, triton.cdiv(dim, choice.block_dim))](
        output,
        streams,
        post.contiguous(),
        comb.contiguous(),
        out,
        output.stride(0),
        streams.stride(0),
        streams.stride(1),
        COUNT=count,
        DIM=dim,
        BLOCK_DIM=choice.block_dim,
        num_warps=choice.num_warps,
        enable_fp_fusion=False,
    )
    return out


def _launch_collapse_norm(
    streams: Tensor, pre: Tensor, weight: Tensor, eps: float, choice: LaunchChoice | None = None
) -> Tensor:
    """Triton launcher of :func:`hc_collapse_norm`."""
    num_rows, count, dim = streams.shape
    out = _fake_collapse(streams, pre)
    if out.numel() == 0:
        return out
    streams = _with_dense_channels(streams)
    choice = choice or _choose_launch(dim)
    _collapse_norm_kernel[(num_rows,)](
        None,
        streams,
        None,
        None,
        pre.contiguous(),
        weight.contiguous(),
        None,
        out,
        eps,
        0,
        streams.stride(0),
        streams.stride(1),
        EXPAND=False,
        COUNT=count,
        DIM=dim,
        BLOCK_DIM=choice.block_dim,
        num_warps=choice.num_warps,
        enable_fp_fusion=False,
    )
    return out


def _launch_expand_collapse_norm(
    output: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weight: Tensor,
    eps: float,
    choice: LaunchChoice | None = None,
) -> tuple[Tensor, Tensor]:
    """Triton launcher of :func:`hc_expand_collapse_norm`."""
    num_rows, count, dim = streams.shape
    expanded, out = _fake_expand_collapse_norm(output, streams, post, comb, pre, weight, eps)
    if out.numel() == 0:
        return expanded, out
    output, streams = _with_dense_channels(output), _with_dense_channels(streams)
    choice = choice or _choose_launch(dim)
    _collapse_norm_kernel[(num_rows,)](
        output,
        streams,
        post.contiguous(),
        comb.contiguous(),
        pre.contiguous(),
        weight.contiguous(),
        expanded,
        out,
        eps,
        output.stride(0),
        streams.stride(0),
        streams.stride(1),
        EXPAND=True,
        COUNT=count,
        DIM=dim,
        BLOCK_DIM=choice.block_dim,
        num_warps=choice.num_warps,
        enable_fp_fusion=False,
    )
    return expanded, out


def _fake_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return streams.new_empty(streams.shape[0], streams.shape[2])


def _fake_expand(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return streams.new_empty(streams.shape)


def _fake_collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _fake_collapse(streams, pre)


def _fake_expand_collapse_norm(
    output: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return _fake_expand(output, streams, post, comb), _fake_collapse(streams, pre)


_hc_collapse_op = register_op(
    "hc_collapse(Tensor streams, Tensor pre) -> Tensor",
    reference=hc_collapse_reference,
    fake=_fake_collapse,
    launch=_launch_collapse,
)
_hc_expand_op = register_op(
    "hc_expand(Tensor output, Tensor streams, Tensor post, Tensor comb) -> Tensor",
    reference=hc_expand_reference,
    fake=_fake_expand,
    launch=_launch_expand,
)
_hc_collapse_norm_op = register_op(
    "hc_collapse_norm(Tensor streams, Tensor pre, Tensor weight, float eps) -> Tensor",
    reference=hc_collapse_norm_reference,
    fake=_fake_collapse_norm,
    launch=_launch_collapse_norm,
)
_hc_expand_collapse_norm_op = register_op(
    "hc_expand_collapse_norm(Tensor output, Tensor streams, Tensor post, Tensor comb, Tensor pre,"
    " Tensor weight, float eps) -> (Tensor, Tensor)",
    reference=hc_expand_collapse_norm_reference,
    fake=_fake_expand_collapse_norm,
    launch=_launch_expand_collapse_norm,
)
