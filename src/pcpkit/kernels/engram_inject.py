"""Gated injection of looked-up Engram values into the residual streams (model-spec section 5.4).

Per stream, with a key of its own and a value that the streams of a row share:

    ``g = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot))``, ``stream += g * value``,
    ``dot = sum(stream * query_weight * key_weight * key) / (rms(stream) rms(key) sqrt(dim))``

Rounding points: the three sums over the channels are float64, where every product is exact, and are
rounded to FP32 once; so is the logistic function. Their FP32 bits do not depend on the order of a
sum (up to its 53rd bit), so kernel and reference agree. Every other FP32 operation rounds; the
result is rounded to BF16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels import _jit
from pcpkit.kernels import _reference as wide
from pcpkit.kernels._jit import from_bfloat16, to_bfloat16
from pcpkit.kernels._ops import check_dtype, check_shape, register_op


def engram_inject(
    streams: Tensor, key_value: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float
) -> Tensor:
    """Add the gated Engram value to every stream (model-spec section 5.4).

    Args:
        streams: ``(num_rows, S, dim)`` bf16.
        key_value: ``(num_rows, (S + 1) * dim)`` bf16: one key a stream, then the shared value.
        query_weight, key_weight: ``(S, dim)`` bf16.
        eps: added to the mean squares.

    Returns:
        ``(num_rows, S, dim)`` bf16. A NaN or infinity stays in its stream (in its row, if it comes
        from the value).

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    for name, tensor in (
        ("streams", streams),
        ("key_value", key_value),
        ("query_weight", query_weight),
        ("key_weight", key_weight),
    ):
        check_dtype(name, tensor, torch.bfloat16)
    count, dim = streams.shape[1:]
    check_shape("query_weight", query_weight, count, dim, remedy="one weight row a stream")
    check_shape("key_weight", key_weight, count, dim, remedy="one weight row a stream")
    check_shape(
        "key_value", key_value, streams.shape[0], (count + 1) * dim, remedy="apply engram.wkv"
    )
    return _engram_inject_op(streams, key_value, query_weight, key_weight, eps)


def engram_inject_reference(
    streams: Tensor, key_value: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float
) -> Tensor:
    """The specification of :func:`engram_inject`."""
    count, dim = streams.shape[1:]
    query = streams.float()
    key = key_value[:, : count * dim].unflatten(1, (count, dim)).float()
    value = key_value[:, None, count * dim :].float()
    weight = (query_weight.float() * key_weight.float()).double()
    dot = (query.double() * weight * key.double()).sum(-1, keepdim=True).float()
    dot = dot * wide.inverse_rms(query, eps) * wide.inverse_rms(key, eps) * dim**-0.5
    root = dot.abs().clamp(min=1e-6).double().sqrt().float()
    gate = wide.sigmoid(torch.copysign(root, dot))
    return (query + gate * value).bfloat16()


@triton.jit(do_not_specialize=["num_rows", "rows_per_turn"])
def _engram_inject_kernel(
    stream_ptr,
    key_value_ptr,
    query_weight_ptr,
    key_weight_ptr,
    out_ptr,
    num_rows,
    rows_per_turn,
    eps,
    root,
    stride_row,
    stride_stream,
    stride_key_value,
    stride_query_weight,
    stride_key_weight,
    STREAMS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One program owns one stream of one row; it reads the stream twice, the second time from L2.

    Programs take turns: stream 0 of ``rows_per_turn`` rows, then stream 1 of the same rows and so
    on. So the weights of a stream stay in L1, and the value that the streams of a row share in L2.
    """
    turn, place = tl.program_id(0) // rows_per_turn, tl.program_id(0) % rows_per_turn
    index = turn % STREAMS
    row = (turn // STREAMS * rows_per_turn + place).to(tl.int64)
    if row >= num_rows:
        return
    stream_ptr += row * stride_row + index * stride_stream
    key_value_ptr += row * stride_key_value
    query_weight_ptr += index * stride_query_weight
    key_weight_ptr += index * stride_key_weight
    out_ptr += (row * STREAMS + index) * DIM
    lane = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]

    dots = tl.zeros([LANES, VECTOR], tl.float64)
    query_squares = tl.zeros([LANES, VECTOR], tl.float64)
    key_squares = tl.zeros([LANES, VECTOR], tl.float64)
    for start in tl.static_range(0, DIM, LANES * VECTOR):  # pyright: ignore[reportGeneralTypeIssues]
        channel = start + lane
        mask = channel < DIM
        query = tl.load(stream_ptr + channel, mask=mask, other=0.0)
        key = tl.load(key_value_ptr + index * DIM + channel, mask=mask, other=0.0)
        weight = tl.load(query_weight_ptr + channel, mask=mask, other=0.0)
        key_weight = tl.load(key_weight_ptr + channel, mask=mask, other=0.0)
        query, key = from_bfloat16(query).to(tl.float64), from_bfloat16(key).to(tl.float64)
        weight = (from_bfloat16(weight) * from_bfloat16(key_weight)).to(tl.float64)
        # The products are exact, so fused steps change nothing but the time.
        dots = tl.fma(query * weight, key, dots)
        query_squares = tl.fma(query, query, query_squares)
        key_squares = tl.fma(key, key, key_squares)
    dot = tl.sum(dots).to(tl.float32)
    dot *= _jit.inverse_root_mean(tl.sum(query_squares), DIM, eps)
    dot *= _jit.inverse_root_mean(tl.sum(key_squares), DIM, eps)
    dot *= root

    # copysign(sqrt(max(|dot|, 1e-6)), dot); NaN is below nothing and stays.
    size = tl.abs(dot)
    size = tl.math.sqrt_rn(tl.where(size < 1e-6, 1e-6, size))
    sign = dot.to(tl.int32, bitcast=True) < 0
    gate = _jit.sigmoid(tl.where(sign, -size, size))

    for start in tl.static_range(0, DIM, LANES * VECTOR):  # pyright: ignore[reportGeneralTypeIssues]
        channel = start + lane
        mask = channel < DIM
        query = from_bfloat16(tl.load(stream_ptr + channel, mask=mask, other=0.0))
        value = tl.load(key_value_ptr + STREAMS * DIM + channel, mask=mask, other=0.0)
        mixed = query + gate * from_bfloat16(value)
        tl.store(out_ptr + channel, to_bfloat16(mixed), mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """Channels a program takes at a time, its warps, and rows before the next stream's turn."""

    block_dim: int
    num_warps: int
    rows_per_turn: int = 128


def _choose_launch(dim: int) -> LaunchChoice:
    """By ``dim`` alone: a row's bits must not depend on how many rows there are.

    5,120 channels are 5 rounds of 1,024, 4 a thread: 80 registers, so 24 warps an SM.
    """
    block_dim = min(1024, max(32, triton.next_power_of_2(dim)))
    return LaunchChoice(block_dim=block_dim, num_warps=max(1, block_dim // 128))


def _launch(
    streams: Tensor,
    key_value: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    choice: LaunchChoice | None = None,
) -> Tensor:
    """Launch :func:`engram_inject`. Channels must be contiguous, other dims may be strided."""
    num_rows, count, dim = streams.shape
    out = streams.new_empty(num_rows, count, dim)
    if out.numel() == 0:
        return out
    # A wrong stride of an activation costs a copy; the weights are 40 KiB.
    tensors = (streams, key_value, query_weight, key_weight)
    streams, key_value, query_weight, key_weight = (
        tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors
    )
    choice = choice or _choose_launch(dim)
    rows_per_turn = min(choice.rows_per_turn, num_rows)
    num_turns = triton.cdiv(num_rows, rows_per_turn) * count
    _engram_inject_kernel[(num_turns * rows_per_turn,)](
        streams,
        key_value,
        query_weight,
        key_weight,
        out,
        num_rows,
        rows_per_turn,
        eps,
        dim**-0.5,
        streams.stride(0),
        streams.stride(1),
        key_value.stride(0),
        query_weight.stride(0),
        key_weight.stride(0),
        STREAMS=count,
        DIM=dim,
        LANES=32 * choice.num_warps,
        VECTOR=choice.block_dim // (32 * choice.num_warps),
        num_warps=choice.num_warps,
        enable_fp_fusion=False,
    )
    return out


def _fake(
    streams: Tensor, key_value: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float
) -> Tensor:
    return streams.new_empty(streams.shape)


_engram_inject_op = register_op(
    "engram_inject(Tensor streams, Tensor key_value, Tensor query_weight, Tensor key_weight,"
    " float eps) -> Tensor",
    reference=engram_inject_reference,
    fake=_fake,
    launch=_launch,
)
