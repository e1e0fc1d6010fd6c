"""Coefficients of manifold-constrained hyper-connections: projection, affine, Sinkhorn steps.

``x`` is the row's ``S`` streams one after the other (K = ``S * dim`` channels), ``fn`` the
``2 S + S * S`` projections. All FP32 (model-spec section 2.2).

The kernel takes two launches. The first multiplies on the tensor cores: ``fn`` is the exact sum of
three BF16 terms, so every product is exact; a chunk of ``K`` is accumulated there (smallest term
first) and added to an FP32 sum with one IEEE addition, because a long accumulation on the tensor
cores truncates at every step. Slices of ``K`` of a fixed size go to programs of their own. The
second launch adds the slices in order and does the rest of a row in registers. Neither slices nor
tiles depend on the number of rows, so a row's bits do not either.

Rounding of the kernel: products and sums in FP32 as above, squares of ``x`` in FP32 (a row beyond
1e19 loses its coefficients), the exponential once from float64, the rest IEEE FP32; sums of ``S``
values pairwise. NaN and infinity give NaN in their row.
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


def hc_mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of one mHC site.

    ``m = (fn . x) * r`` with ``r`` the inverse RMS of the flattened streams; then, affine and
    fused, ``pre = sigmoid(.) + eps``, ``post = 2 sigmoid(.)``, ``comb`` = softmax over the output
    stream, plus eps, one column step and ``sinkhorn_iters - 1`` row and column steps.

    Args:
        streams: ``(num_rows, S, dim)`` bf16.
        fn: ``(2 S + S * S, S * dim)`` fp32.
        base: ``(2 S + S * S,)`` fp32.
        scale: ``(3,)`` fp32 factors of pre, post, comb.
        sinkhorn_iters: Sinkhorn iterations, the softmax step included.
        hc_eps: added to ``pre`` and in every normalization.
        norm_eps: added to the mean square.

    Returns:
        ``pre (num_rows, S)``, ``post (num_rows, S)``, ``comb (num_rows, S, S)`` (input stream,
        output stream), all fp32.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    count = streams.shape[1]
    outputs, remedy = count * (2 + count), "pass the hc_* tensors of this site"
    check_dtype("streams", streams, torch.bfloat16)
    check_shape("fn", fn, outputs, count * streams.shape[2], remedy=remedy)
    check_shape("base", base, outputs, remedy=remedy)
    check_shape("scale", scale, 3, remedy=remedy)
    for name, tensor in (("fn", fn), ("base", base), ("scale", scale)):
        check_dtype(name, tensor, torch.float32)
    return _hc_mix_op(streams, fn, base, scale, sinkhorn_iters, hc_eps, norm_eps)


def hc_mix_reference(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification of :func:`hc_mix`."""
    count = streams.shape[1]
    flat = streams.flatten(1).float()
    mixed = wide.matmul_f64(flat, fn) * wide.inverse_rms(flat, norm_eps)
    factor = scale.repeat_interleave(scale.new_tensor([count, count, count * count]).long())
    affine = (mixed.double() * factor.double() + base.double()).float()
    pre = wide.sigmoid(affine[:, :count]) + hc_eps
    post = 2.0 * wide.sigmoid(affine[:, count : 2 * count])
    comb = affine[:, 2 * count :].unflatten(1, (count, count))
    comb = wide.exp(comb - comb.amax(-1, keepdim=True))
    comb = comb / wide.ordered_sum(comb, 2)[:, :, None] + hc_eps
    comb = comb / (wide.ordered_sum(comb, 1)[:, None, :] + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (wide.ordered_sum(comb, 2)[:, :, None] + hc_eps)
        comb = comb / (wide.ordered_sum(comb, 1)[:, None, :] + hc_eps)
    return pre, post, comb


@triton.jit
def _split(x):
    """BF16 terms of FP32 ``x``, largest first; their sum is exact between 2^-110 and 3.38e38."""
    high = _jit.to_bfloat16(x)
    rest = x - _jit.from_bfloat16(high)
    middle = _jit.to_bfloat16(rest)
    return high, middle, _jit.to_bfloat16(rest - _jit.from_bfloat16(middle))


@triton.jit
def _project_kernel(
    streams_ptr,
    fn_ptr,
    partial_ptr,
    squares_ptr,
    num_rows,
    stride_row,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr,
):
    """One program owns ``BLOCK_ROWS`` rows and one slice of K.

    Writes the slice's projections ``(slices, num_rows, OUTPUTS)`` and sums of squares
    ``(slices, num_rows)``.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outputs = tl.arange(0, BLOCK_OUTPUTS)
    exists = (rows < num_rows)[:, None]
    first = tl.program_id(1) * SLICE
    sums = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
    squares = tl.zeros([BLOCK_ROWS, BLOCK_K], tl.float32)
    for start in range(0, SLICE, BLOCK_K):
        k = (first + start + tl.arange(0, BLOCK_K))[None, :]
        x_ptr = streams_ptr + rows[:, None] * stride_row + k
        x = tl.load(x_ptr, mask=exists & (k < K), other=0.0)
        fn_mask = (outputs < OUTPUTS)[:, None] & (k < K)
        fn = tl.load(fn_ptr + outputs[:, None] * K + k, mask=fn_mask, other=0.0)
        high, middle, low = _split(fn)
        chunk = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
        chunk = _jit.dot(x, tl.trans(low), chunk)
        chunk = _jit.dot(x, tl.trans(middle), chunk)
        chunk = _jit.dot(x, tl.trans(high), chunk)
        sums += chunk
        channel = _jit.from_bfloat16(x)
        squares = tl.fma(channel, channel, squares)
    slot = tl.program_id(1).to(tl.int64) * num_rows + rows
    partial_at = partial_ptr + slot[:, None] * OUTPUTS + outputs[None, :]
    tl.store(partial_at, sums, mask=exists & (outputs < OUTPUTS)[None, :])
    tl.store(squares_ptr + slot, tl.sum(squares, axis=1), mask=rows < num_rows)


@triton.jit
def _affine(
    partial_ptr,
    base_ptr,
    factor,
    inverse,
    rows,
    num_rows,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr,
):
    """``fma(m, factor, base)`` of outputs ``FIRST .. FIRST + COUNT``, FP32 [ROWS, COUNT]."""
    outputs = FIRST + tl.arange(0, COUNT)[None, :]
    mask = (rows < num_rows)[:, None] & (outputs < OUTPUTS)
    total = tl.zeros([rows.shape[0], COUNT], tl.float32)
    partial_at = partial_ptr + rows[:, None] * OUTPUTS + outputs
    for _ in tl.static_range(SLICES):
        total += tl.load(partial_at, mask=mask, other=0.0)
        partial_at += num_rows * OUTPUTS
    base = tl.broadcast_to(tl.load(base_ptr + outputs), total.shape)
    return tl.fma(total * inverse[:, None], tl.broadcast_to(factor, total.shape), base)


@triton.jit
def _sinkhorn(comb, eps, ITERATIONS: tl.constexpr):
    """Softmax over the last axis of [ROWS, S, S], then alternating normalization."""
    comb = _jit.exp(comb - tl.max(comb, axis=2, keep_dims=True))
    comb = tl.math.div_rn(comb, tl.sum(comb, axis=2, keep_dims=True)) + eps
    comb = tl.math.div_rn(comb, tl.sum(comb, axis=1, keep_dims=True) + eps)
    for _ in range(ITERATIONS - 1):
        comb = tl.math.div_rn(comb, tl.sum(comb, axis=2, keep_dims=True) + eps)
        comb = tl.math.div_rn(comb, tl.sum(comb, axis=1, keep_dims=True) + eps)
    return comb


@triton.jit
def _coefficients_kernel(
    partial_ptr,
    squares_ptr,
    base_ptr,
    scale_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    num_rows,
    hc_eps,
    norm_eps,
    ITERATIONS: tl.constexpr,
    K: tl.constexpr,
    STREAMS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One program turns the projections of ``BLOCK_ROWS`` rows into their coefficients."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = rows < num_rows
    square = tl.zeros([BLOCK_ROWS], tl.float32)
    for _ in tl.static_range(SLICES):
        square += tl.load(squares_ptr + rows, mask=exists, other=0.0)
        squares_ptr += num_rows
    inverse = tl.math.div_rn(1.0, tl.math.sqrt_rn(tl.math.div_rn(square, 1.0 * K) + norm_eps))

    OUTPUTS: tl.constexpr = STREAMS * (2 + STREAMS)
    SQUARE: tl.constexpr = STREAMS * STREAMS
    pre = _affine(
        partial_ptr, base_ptr, tl.load(scale_ptr), inverse, rows, num_rows,
        0, STREAMS, OUTPUTS, SLICES,
    )  # fmt: skip
    post = _affine(
        partial_ptr, base_ptr, tl.load(scale_ptr + 1), inverse, rows, num_rows,
        STREAMS, STREAMS, OUTPUTS, SLICES,
    )  # fmt: skip
    comb = _affine(
        partial_ptr, base_ptr, tl.load(scale_ptr + 2), inverse, rows, num_rows,
        2 * STREAMS, SQUARE, OUTPUTS, SLICES,
    )  # fmt: skip
    comb = tl.reshape(comb, [BLOCK_ROWS, STREAMS, STREAMS])
    comb = tl.reshape(_sinkhorn(comb, hc_eps, ITERATIONS), [BLOCK_ROWS, SQUARE])

    at = rows[:, None] * STREAMS + tl.arange(0, STREAMS)[None, :]
    tl.store(pre_ptr + at, _jit.sigmoid(pre) + hc_eps, mask=exists[:, None])
    tl.store(post_ptr + at, 2.0 * _jit.sigmoid(post), mask=exists[:, None])
    at = rows[:, None] * SQUARE + tl.arange(0, SQUARE)[None, :]
    tl.store(comb_ptr + at, comb, mask=exists[:, None])


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """Tiles of the two launches.

    ``slice_size``, ``block_k`` and ``num_warps`` fix the order of the sums, so nothing here depends
    on the number of rows.
    """

    block_rows: int
    block_k: int
    slice_size: int
    num_warps: int
    num_stages: int
    coefficient_rows: int


def _choose_launch() -> LaunchChoice:
    """Slices of 1,024: 20 at K = 20,480, so that one tile of rows still occupies 20 SMs."""
    return LaunchChoice(
        block_rows=64, block_k=64, slice_size=1024, num_warps=4, num_stages=3, coefficient_rows=8
    )


def _launch(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
    choice: LaunchChoice | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Triton launcher of :func:`hc_mix`."""
    num_rows, count, dim = streams.shape
    if count & (count - 1):
        raise ValueError(f"streams expected a power of two of streams, got {count}; pad them")
    pre, post, comb = _fake_mix(streams, fn, base, scale, sinkhorn_iters, hc_eps, norm_eps)
    if num_rows == 0:
        return pre, post, comb
    if streams.stride(2) != 1 or streams.stride(1) != dim:
        streams = streams.contiguous()
    choice = choice or _choose_launch()
    size, outputs = count * dim, fn.shape[0]
    slices = triton.cdiv(size, choice.slice_size)
    partial = fn.new_empty(slices, num_rows, outputs)
    squares = fn.new_empty(slices, num_rows)
    _project_kernel[(triton.cdiv(num_rows, choice.block_rows), slices)](
        streams,
        fn.contiguous(),
        partial,
        squares,
        num_rows,
        streams.stride(0),
        K=size,
        OUTPUTS=outputs,
        BLOCK_OUTPUTS=max(16, triton.next_power_of_2(outputs)),
        BLOCK_ROWS=choice.block_rows,
        BLOCK_K=choice.block_k,
        SLICE=choice.slice_size,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )
    _coefficients_kernel[(triton.cdiv(num_rows, choice.coefficient_rows),)](
        partial,
        squares,
        base.contiguous(),
        scale.contiguous(),
        pre,
        post,
        comb,
        num_rows,
        hc_eps,
        norm_eps,
        ITERATIONS=sinkhorn_iters,
        K=size,
        STREAMS=count,
        SLICES=slices,
        BLOCK_ROWS=choice.coefficient_rows,
        num_warps=choice.num_warps,
        enable_fp_fusion=False,
    )
    return pre, post, comb


def _fake_mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, count = streams.shape[:2]
    return fn.new_empty(rows, count), fn.new_empty(rows, count), fn.new_empty(rows, count, count)


_hc_mix_op = register_op(
    "hc_mix(Tensor streams, Tensor fn, Tensor base, Tensor scale, int sinkhorn_iters,"
    " float hc_eps, float norm_eps) -> (Tensor, Tensor, Tensor)",
    reference=hc_mix_reference,
    fake=_fake_mix,
    launch=_launch,
)
