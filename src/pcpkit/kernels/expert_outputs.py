"""Outputs of single experts, and their ordered sum: what expert-parallel ranks exchange.

``routed_experts`` adds a row's experts in ascending id. When the experts of a row live on several
ranks, each rank computes the outputs of its own (``expert_outputs``), every output travels once,
and the owner of the row adds them in the same order (``sum_outputs``): the same bits on any number
of ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.formats import fp4_row_dequantize
from pcpkit.kernels import _reference as wide
from pcpkit.kernels._ops import check_dtype, check_shape, register_op
from pcpkit.kernels.experts import launch_pairs, swiglu_reference
from pcpkit.kernels.linear import quantized_input


def expert_outputs(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    w3: Tensor,
    w3_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    first_expert: int,
    limit: float,
    quantize: bool,
) -> Tensor:
    """Output of every (row, chosen expert) of this rank's experts.

    Arguments as of :func:`pcpkit.kernels.experts.routed_experts`.

    Returns:
        ``(num_rows, top_k, hidden)`` bf16, zero for ids outside the local range and for -1.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_dtype("x", x, torch.bfloat16)
    check_shape("ids", ids, x.shape[0], None, remedy="one list of experts a row")
    check_shape("weights", weights, *ids.shape, remedy="one weight an expert id")
    check_shape("w1", w1, None, None, x.shape[1] // 2, remedy="pack two codes a byte")
    return _expert_outputs_op(
        x,
        ids,
        weights,
        w1,
        w1_scale,
        w3,
        w3_scale,
        w2,
        w2_scale,
        first_expert,
        limit,
        quantize,
    )


def expert_outputs_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    w3: Tensor,
    w3_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    first_expert: int,
    limit: float,
    quantize: bool,
) -> Tensor:
    """The specification of :func:`expert_outputs`: one expert after the other."""
    outputs = x.new_zeros(*ids.shape, x.shape[1])
    operand = quantized_input(x, quantize)
    for local in range(w1.shape[0]):
        rows, column = (ids == first_expert + local).nonzero(as_tuple=True)
        if rows.numel() == 0:
            continue
        gate = wide.matmul_f64(operand[rows], fp4_row_dequantize(w1[local], w1_scale[local]))
        up = wide.matmul_f64(operand[rows], fp4_row_dequantize(w3[local], w3_scale[local]))
        hidden = swiglu_reference(gate.bfloat16(), up.bfloat16(), limit, weights[rows, column])
        down = fp4_row_dequantize(w2[local], w2_scale[local])
        outputs[rows, column] = wide.matmul_f64(quantized_input(hidden, quantize), down).bfloat16()
    return outputs


def sum_outputs(outputs: Tensor) -> Tensor:
    """Sum of a row's expert outputs in order.

    Args:
        outputs: ``(num_rows, top_k, hidden)`` bf16, by ascending expert id.

    Returns:
        ``(num_rows, hidden)`` fp32, each addition rounded to FP32.
    """
    check_dtype("outputs", outputs, torch.bfloat16)
    return _sum_outputs_op(outputs)


def sum_outputs_reference(outputs: Tensor) -> Tensor:
    """The specification of :func:`sum_outputs`."""
    total = torch.zeros(outputs.shape[0], outputs.shape[2], device=outputs.device)
    for choice in range(outputs.shape[1]):
        total += outputs[:, choice].float()
    return total


@triton.jit
def _sum_kernel(
    outputs_ptr,
    out_ptr,
    dim,
    stride_row,
    stride_choice,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program owns ``BLOCK`` channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < dim
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        at = outputs_ptr + row * stride_row + choice * stride_choice + channel
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * dim + channel, total, mask=inside)


def _launch_outputs(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    w3: Tensor,
    w3_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    first_expert: int,
    limit: float,
    quantize: bool,
) -> Tensor:
    outputs = x.new_zeros(ids.numel(), x.shape[1])
    launch_pairs(
        x,
        ids,
        weights,
        w1,
        w1_scale,
        w3,
        w3_scale,
        w2,
        w2_scale,
        first_expert,
        limit,
        quantize,
        outputs,
    )
    return outputs.unflatten(0, ids.shape)


def _launch_sum(outputs: Tensor) -> Tensor:
    num_rows, top_k, dim = outputs.shape
    outputs = outputs if outputs.stride(2) == 1 else outputs.contiguous()
    out = torch.empty(num_rows, dim, dtype=torch.float32, device=outputs.device)
    if out.numel() == 0:
        return out
    block = 512
    _sum_kernel[(num_rows, triton.cdiv(dim, block))](
        outputs,
        out,
        dim,
        outputs.stride(0),
        outputs.stride(1),
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
    )
    return out


def _fake_outputs(x: Tensor, ids: Tensor, *_: object) -> Tensor:
    return x.new_empty(*ids.shape, x.shape[1])


def _fake_sum(outputs: Tensor) -> Tensor:
    return outputs.new_empty(outputs.shape[0], outputs.shape[2], dtype=torch.float32)


_expert_outputs_op = register_op(
    "expert_outputs(Tensor x, Tensor ids, Tensor weights, Tensor w1, Tensor w1_scale, Tensor w3,"
    " Tensor w3_scale, Tensor w2, Tensor w2_scale, int first_expert, float limit, bool quantize)"
    " -> Tensor",
    reference=expert_outputs_reference,
    fake=_fake_outputs,
    launch=_launch_outputs,
)
_sum_outputs_op = register_op(
    "sum_outputs(Tensor outputs) -> Tensor",
    reference=sum_outputs_reference,
    fake=_fake_sum,
    launch=_launch_sum,
)
