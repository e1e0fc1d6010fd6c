"""Row-invariant linear layers ``y = x W^T`` over released FP8, BF16 and FP32-promoted weights.

- ``linear_fp8``: E4M3 weight ``(out, in)`` with one E8M0 scale per 32 x 32 block; the BF16 input is
  quantized to E4M3 with one E8M0 scale per 32 channels (``quantize=True``, the released numerics)
  or used as it is (weight-only numerics). The input channels form ``num_groups`` equal groups: one
  FP32 partial sum a group, added in ascending group order, one rounding to BF16. That order is
  what lets an output projection split over tensor-parallel ranks give the same bits.
- ``linear_fp8_pair``: two such layers over the same input, in one.
- ``linear_grouped``: the same for a block-diagonal weight: group ``g`` of the input meets rows
  ``g * out_per_group ...`` of the weight (the grouped output projection, section 3.8).
- ``linear_bf16``: BF16 weight, FP32 accumulation, output rounded to ``BF16`` or kept in FP32.

A row's result depends on that row and the weight only (architecture section 3.6); `_gemm` says why
that holds on the GPU. A NaN or infinity in a row reaches all outputs of that row and of no other.
Source of the arithmetic: model-spec section 0.6.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcpkit.formats import dequantize_mxfp8, fp8_block_dequantize, quantize_mxfp8
from pcpkit.kernels._dense_weight import MANY_ROWS, ScaledWeight, dense_weight, prepare_many
from pcpkit.kernels._gemm import gemm
from pcpkit.kernels._gemm_many import gemm_many
from pcpkit.kernels._operand import CHANNEL_ORDER, ORDER_BLOCK, prepare_operand
from pcpkit.kernels._ops import check_dtype, check_shape, register_op
from pcpkit.kernels._reference import matmul_f64


def quantized_input(x: Tensor, quantize: bool) -> Tensor:
    """The activation as a quantized GEMM sees it: MXFP8-rounded BF16, or ``x`` itself."""
    return dequantize_mxfp8(*quantize_mxfp8(x)) if quantize else x


def linear_fp8(
    x: Tensor, weight: Tensor, scale: Tensor, quantize: bool, num_groups: int = 1
) -> Tensor:
    """Linear layer over a block-scaled FP8 weight.

    Args:
        x: ``(num_rows, in_features)`` bf16.
        weight: ``(out_features, in_features)`` uint8, raw E4M3 bytes.
        scale: ``(ceil(out_features / 32), in_features / 32)`` uint8, raw E8M0 bytes.
        quantize: quantize ``x`` to MXFP8 first (released numerics).
        num_groups: input groups whose FP32 partial sums are added in ascending order; each a
            multiple of 32 channels.

    Returns:
        ``(num_rows, out_features)`` bf16.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_fp8(x, weight, num_groups)
    return _linear_fp8_op(x, weight, scale, quantize, num_groups)


def _check_fp8(x: Tensor, weight: Tensor, num_groups: int) -> None:
    check_shape("x", x, None, weight.shape[1], remedy="match the weight's in_features")
    check_dtype("x", x, torch.bfloat16)
    check_dtype("weight", weight, torch.uint8)
    if weight.shape[1] % (32 * num_groups):
        raise ValueError(
            f"num_groups expected to cut {weight.shape[1]} input features into multiples of 32, "
            f"got {num_groups}; use the o_groups this rank owns"
        )


def linear_fp8_reference(
    x: Tensor, weight: Tensor, scale: Tensor, quantize: bool, num_groups: int = 1
) -> Tensor:
    """The specification of :func:`linear_fp8`."""
    operand = quantized_input(x, quantize)
    dense = fp8_block_dequantize(weight, scale)
    size = weight.shape[1] // num_groups
    total = matmul_f64(operand[:, :size], dense[:, :size])
    for start in range(size, weight.shape[1], size):
        total += matmul_f64(operand[:, start : start + size], dense[:, start : start + size])
    return total.bfloat16()


def linear_fp8_pair(
    x: Tensor,
    first: Tensor,
    first_scale: Tensor,
    second: Tensor,
    second_scale: Tensor,
    quantize: bool,
) -> tuple[Tensor, Tensor]:
    """Two layers over the same rows, which are quantized once.

    Bit for bit :func:`linear_fp8` of each.

    Args:
        x: ``(num_rows, in_features)`` bf16.
        first, second: weights ``(out_features, in_features)`` uint8, raw E4M3 bytes.
        first_scale, second_scale: their E8M0 bytes, one per 32 x 32 block.
        quantize: quantize ``x`` to MXFP8 first (released numerics).

    Returns:
        Both results, bf16, as columns of one tensor: a row is contiguous, rows are not.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_fp8(x, first, 1)
    _check_fp8(x, second, 1)
    both = _linear_fp8_pair_op(x, first, first_scale, second, second_scale, quantize)
    return both[:, : first.shape[0]], both[:, first.shape[0] :]


def linear_fp8_pair_reference(
    x: Tensor,
    first: Tensor,
    first_scale: Tensor,
    second: Tensor,
    second_scale: Tensor,
    quantize: bool,
) -> Tensor:
    """The specification of :func:`linear_fp8_pair`: both results side by side."""
    results = [
        linear_fp8_reference(x, first, first_scale, quantize),
        linear_fp8_reference(x, second, second_scale, quantize),
    ]
    return torch.cat(results, dim=1)


def linear_fp8_partials(
    x: Tensor, weight: Tensor, scale: Tensor, quantize: bool, num_groups: int
) -> Tensor:
    """The FP32 partial sums that :func:`linear_fp8` adds, for a layer split over ranks by input.

    Arguments as of :func:`linear_fp8`.

    Returns:
        ``(num_rows, num_groups, out_features)`` fp32; added in ascending group order over all
        ranks and rounded once, they are the unsplit layer.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_fp8(x, weight, num_groups)
    return _linear_fp8_partials_op(x, weight, scale, quantize, num_groups)


def linear_fp8_partials_reference(
    x: Tensor, weight: Tensor, scale: Tensor, quantize: bool, num_groups: int
) -> Tensor:
    """The specification of :func:`linear_fp8_partials`."""
    operand = quantized_input(x, quantize)
    dense = fp8_block_dequantize(weight, scale)
    size = weight.shape[1] // num_groups
    cuts = [slice(group * size, (group + 1) * size) for group in range(num_groups)]
    return torch.stack([matmul_f64(operand[:, cut], dense[:, cut]) for cut in cuts], dim=1)


def linear_grouped(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Block-diagonal linear layer with unquantized input.

    Args:
        x: ``(num_rows, num_groups, in_per_group)`` bf16.
        weight: ``(num_groups * out_per_group, in_per_group)`` uint8, raw E4M3 bytes.
        scale: E8M0 bytes, one per 32 x 32 block of ``weight``.

    Returns:
        ``(num_rows, num_groups, out_per_group)`` bf16.
    """
    check_shape("x", x, None, None, weight.shape[1], remedy="match the weight's in_features")
    check_dtype("x", x, torch.bfloat16)
    return _linear_grouped_op(x, weight, scale)


def linear_grouped_reference(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The specification of :func:`linear_grouped`."""
    num_rows, num_groups, _ = x.shape
    dense = fp8_block_dequantize(weight, scale).unflatten(0, (num_groups, -1))
    out = x.new_empty(num_rows, num_groups, dense.shape[1])
    for group in range(num_groups):
        out[:, group] = matmul_f64(x[:, group], dense[group]).bfloat16()
    return out


def linear_bf16(x: Tensor, weight: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Linear layer over a BF16 weight with FP32 accumulation.

    Args:
        x: ``(num_rows, in_features)`` bf16 or fp32.
        weight: ``(out_features, in_features)`` bf16 or fp32.
        out_dtype: ``torch.bfloat16`` (rounded once) or ``torch.float32`` (kept: router, head,
            ratio-2 compressor).

    Returns:
        ``(num_rows, out_features)`` in ``out_dtype``.
    """
    check_shape("x", x, None, weight.shape[1], remedy="match the weight's in_features")
    check_dtype("x", x, torch.bfloat16, torch.float32)
    return _linear_bf16_op(x, weight, out_dtype)


def linear_bf16_reference(
    x: Tensor, weight: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The specification of :func:`linear_bf16`."""
    return matmul_f64(x, weight).to(out_dtype)


def _contiguous_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch_fp8(
    x: Tensor, weight: Tensor, scale: Tensor, quantize: bool, num_groups: int = 1
) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    if out.numel() == 0:
        return out
    _multiply_fp8(x, [(weight, scale)], out, quantize, num_groups)
    return out


def _multiply_fp8(
    x: Tensor, weights: Sequence[ScaledWeight], out: Tensor, quantize: bool, num_groups: int
) -> None:
    """``out`` = the layers of one or two weights side by side."""
    x = _contiguous_channels(x)
    # The order is a property of the weight: it never depends on the rows.
    ordered = quantize and (x.shape[1] // num_groups) % ORDER_BLOCK[8] == 0
    order = 8 if ordered else CHANNEL_ORDER
    columns = out.unsqueeze(1)
    if x.shape[0] >= MANY_ROWS:
        operand, dense = prepare_many(x, weights, quantize, order)
        gemm_many(operand.unsqueeze(1), dense, columns, num_parts=num_groups)
        return
    operand = prepare_operand(x, quantize, order).unsqueeze(1)
    start = 0
    for weight, scale in weights:
        part = columns[:, :, start : start + weight.shape[0]]
        gemm(operand, weight, scale, part, num_parts=num_groups, order=order)
        start += weight.shape[0]


def _launch_fp8_pair(
    x: Tensor,
    first: Tensor,
    first_scale: Tensor,
    second: Tensor,
    second_scale: Tensor,
    quantize: bool,
) -> Tensor:
    out = x.new_empty(x.shape[0], first.shape[0] + second.shape[0])
    if out.numel():
        _multiply_fp8(x, [(first, first_scale), (second, second_scale)], out, quantize, 1)
    return out


def _launch_fp8_partials(
    x: Tensor, weight: Tensor, scale: Tensor, quantize: bool, num_groups: int
) -> Tensor:
    out = x.new_empty(x.shape[0], num_groups, weight.shape[0], dtype=torch.float32)
    if out.numel() == 0:
        return out
    size = x.shape[1] // num_groups
    order = 8 if quantize and size % ORDER_BLOCK[8] == 0 else CHANNEL_ORDER
    operand = prepare_operand(_contiguous_channels(x), quantize, order)
    for group in range(num_groups):
        cut = slice(group * size, (group + 1) * size)
        blocks = slice(group * size // 32, (group + 1) * size // 32)
        gemm(
            operand[:, None, cut],
            weight[:, cut],
            scale[:, blocks],
            out[:, group : group + 1],
            order=order,
        )
    return out


def _launch_grouped(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1], weight.shape[0] // x.shape[1])
    if out.numel() == 0:
        return out
    if x.shape[0] >= MANY_ROWS:
        gemm_many(_contiguous_channels(x), dense_weight(weight, scale, CHANNEL_ORDER), out)
    else:
        gemm(_contiguous_channels(x), weight, scale, out)
    return out


def _launch_bf16(x: Tensor, weight: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)
    if out.numel() == 0:
        return out
    rows = _contiguous_channels(x).unsqueeze(1)
    if x.shape[0] >= MANY_ROWS:
        gemm_many(rows, weight, out.unsqueeze(1))
    else:
        gemm(rows, weight, None, out.unsqueeze(1))
    return out


def _fake_fp8(
    x: Tensor, weight: Tensor, scale: Tensor, quantize: bool, num_groups: int = 1
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _fake_fp8_pair(
    x: Tensor, first: Tensor, first_scale: Tensor, second: Tensor, *_: object
) -> Tensor:
    return x.new_empty(x.shape[0], first.shape[0] + second.shape[0])


def _fake_fp8_partials(
    x: Tensor, weight: Tensor, scale: Tensor, quantize: bool, num_groups: int
) -> Tensor:
    return x.new_empty(x.shape[0], num_groups, weight.shape[0], dtype=torch.float32)


def _fake_grouped(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[0] // x.shape[1])


def _fake_bf16(x: Tensor, weight: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)


_linear_fp8_op = register_op(
    "linear_fp8(Tensor x, Tensor weight, Tensor scale, bool quantize, int num_groups=1) -> Tensor",
    reference=linear_fp8_reference,
    fake=_fake_fp8,
    launch=_launch_fp8,
)
_linear_fp8_pair_op = register_op(
    "linear_fp8_pair(Tensor x, Tensor first, Tensor first_scale, Tensor second,"
    " Tensor second_scale, bool quantize) -> Tensor",
    reference=linear_fp8_pair_reference,
    fake=_fake_fp8_pair,
    launch=_launch_fp8_pair,
)
_linear_fp8_partials_op = register_op(
    "linear_fp8_partials(Tensor x, Tensor weight, Tensor scale, bool quantize, int num_groups)"
    " -> Tensor",
    reference=linear_fp8_partials_reference,
    fake=_fake_fp8_partials,
    launch=_launch_fp8_partials,
)
_linear_grouped_op = register_op(
    "linear_grouped(Tensor x, Tensor weight, Tensor scale) -> Tensor",
    reference=linear_grouped_reference,
    fake=_fake_grouped,
    launch=_launch_grouped,
)
_linear_bf16_op = register_op(
    "linear_bf16(Tensor x, Tensor weight, ScalarType out_dtype) -> Tensor",
    reference=linear_bf16_reference,
    fake=_fake_bf16,
    launch=_launch_bf16,
)
