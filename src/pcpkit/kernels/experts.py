"""Routing and the routed experts of the mixture-of-experts feed-forward.

Scores are ``sqrt(softplus(logit))``; the bias decides which experts are chosen, not their weight.
An expert computes ``y_e = W2 BF16(w_e * silu(min(W1 x, limit)) * clamp(W3 x, -limit, limit))``: the
routing weight enters before the down projection, the gate is clamped from above only (model-spec
section 6). ``W1 x`` and ``W3 x`` round to BF16, the rest of the bracket is FP32. Expert outputs are
BF16 and are added in FP32 in ascending expert id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.formats import fp4_row_dequantize
from pcpkit.kernels import _reference as wide
from pcpkit.kernels._expert_gemm import (
    ExpertChoice,
    Fp4Stack,
    choose_experts,
    expert_gemm,
    sort_pairs,
    swiglu_values,
)
from pcpkit.kernels._jit import to_bfloat16
from pcpkit.kernels._operand import prepare_operand
from pcpkit.kernels._ops import check_dtype, check_shape, register_op
from pcpkit.kernels.linear import quantized_input


def route(
    logits: Tensor, bias: Tensor, top_k: int, routed_scaling_factor: float
) -> tuple[Tensor, Tensor]:
    """Choose the experts of every row.

    Args:
        logits: ``(num_rows, num_experts)`` fp32 router logits.
        bias: ``(num_experts,)`` fp32, added for the choice only.
        top_k: experts a row; ties go to the lower id.
        routed_scaling_factor: the weights of a row sum to this (``top_k > 1``).

    Returns:
        ``ids (num_rows, top_k)`` int32 ascending and ``weights (num_rows, top_k)`` fp32.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_dtype("logits", logits, torch.float32)
    check_shape("logits", logits, None, bias.shape[0], remedy="one logit an expert")
    return _route_op(logits, bias, top_k, routed_scaling_factor)


def route_reference(
    logits: Tensor, bias: Tensor, top_k: int, routed_scaling_factor: float
) -> tuple[Tensor, Tensor]:
    """The specification of :func:`route`; weights are summed in order of the biased score."""
    softplus = torch.nn.functional.softplus(logits.double())
    softplus = torch.where(logits > 20, logits.double(), softplus).float()
    # The square root through float64 is the IEEE one; torch's own FP32 one (MKL) is not always.
    score = softplus.double().sqrt().float()
    order = (score + bias).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = score.gather(1, order)
    if top_k > 1:
        weights = weights / (wide.ordered_sum(weights, 1)[:, None] + 1e-20)
    weights = weights * routed_scaling_factor
    ids, by_id = order.sort(dim=1)
    return ids.int(), weights.gather(1, by_id)


@triton.jit
def _score(logits):
    """``sqrt(softplus(logits))``, softplus linear above 20 and rounded once from float64."""
    wide = logits.to(tl.float64)
    grown = tl.exp(wide)
    total = 1.0 + grown
    # log1p(grown): the quotient cancels the rounding error of `total`.
    small = total == 1.0
    tail = tl.log(total) * (grown / tl.where(small, 1.0, total - 1.0))
    softplus = tl.where(logits > 20.0, wide, tl.where(small, grown, tail))
    return tl.math.sqrt_rn(softplus.to(tl.float32))


@triton.jit
def _order_key(score):
    """int32 in the order of FP32 ``score``: NaN above all, the two zeros alike."""
    bits = score.to(tl.int32, bitcast=True)
    negative = bits >> 31  # -1 or 0
    key = (bits ^ (negative & 0x7FFFFFFF)) - negative  # -0 counts as 0
    return tl.where(score != score, 0x7FFFFFFF, key)


@triton.jit(do_not_specialize=["num_rows"])
def _route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    num_rows,
    num_experts,
    stride_logits,
    factor,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program routes ``BLOCK_ROWS`` rows: TOP_K rounds of choose and strike out."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    experts = tl.arange(0, BLOCK_EXPERTS)
    exists = experts < num_experts
    logits = tl.load(
        logits_ptr + rows[:, None] * stride_logits + experts[None, :],
        mask=(rows < num_rows)[:, None] & exists[None, :],
        other=0.0,
    )
    score = _score(logits)
    bias = tl.load(bias_ptr + experts, mask=exists, other=0.0)
    keys = tl.where(exists[None, :], _order_key(score + bias[None, :]), -2147483648)

    slot = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.full([BLOCK_ROWS, BLOCK_K], 2147483647, tl.int32)
    weights = tl.zeros([BLOCK_ROWS, BLOCK_K], tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for choice in range(TOP_K):
        best = tl.max(keys, axis=1)
        tied = tl.where(keys == best[:, None], experts[None, :], BLOCK_EXPERTS)
        chosen = tl.min(tied, axis=1)
        hit = experts[None, :] == chosen[:, None]
        weight = tl.sum(tl.where(hit, score, 0.0), axis=1)
        keys = tl.where(hit, -2147483648, keys)
        ids = tl.where(slot == choice, chosen[:, None], ids)
        weights = tl.where(slot == choice, weight[:, None], weights)
        total += weight
    if TOP_K > 1:
        divisor = tl.broadcast_to((total + 1e-20)[:, None], [BLOCK_ROWS, BLOCK_K])
        weights = tl.math.div_rn(weights, divisor)
    weights *= factor

    # The rank of an id among the chosen ones is its place in ascending order.
    rank = tl.sum((ids[:, None, :] < ids[:, :, None]).to(tl.int32), axis=2)
    target = rows[:, None] * TOP_K + rank
    stored = (rows < num_rows)[:, None] & (slot < TOP_K)
    tl.store(ids_ptr + target, ids, mask=stored)
    tl.store(weights_ptr + target, weights, mask=stored)


def _launch_route(
    logits: Tensor, bias: Tensor, top_k: int, routed_scaling_factor: float
) -> tuple[Tensor, Tensor]:
    num_rows, num_experts = logits.shape
    ids = logits.new_empty(num_rows, top_k, dtype=torch.int32)
    weights = logits.new_empty(num_rows, top_k)
    if num_rows == 0:
        return ids, weights
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    # One warp a row: every round is two reductions, and a warp needs no barrier for them.
    _route_kernel[(num_rows,)](
        logits,
        bias.contiguous(),
        ids,
        weights,
        num_rows,
        num_experts,
        logits.stride(0),
        routed_scaling_factor,
        TOP_K=top_k,
        BLOCK_ROWS=1,
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return ids, weights


def swiglu(gate: Tensor, up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """Clamped SwiGLU ``BF16(weights * silu(min(gate, limit)) * clamp(up, -limit, limit))``.

    Args:
        gate: ``(num_rows, dim)`` bf16.
        up: ``(num_rows, dim)`` bf16.
        limit: clamp; the gate from above only, before the silu.
        weights: ``(num_rows,)`` fp32 routing weights, or ``None`` for the shared expert.

    Returns:
        ``(num_rows, dim)`` bf16.
    """
    check_shape("up", up, *gate.shape, remedy="gate and up come from equal projections")
    return _swiglu_op(gate, up, limit, weights)


def swiglu_reference(
    gate: Tensor, up: Tensor, limit: float, weights: Tensor | None = None
) -> Tensor:
    """The specification of :func:`swiglu`."""
    hidden = wide.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    if weights is not None:
        hidden = weights[:, None] * hidden
    return hidden.bfloat16()


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_kernel(
    gate_ptr,
    up_ptr,
    weights_ptr,
    out_ptr,
    num_rows,
    dim,
    limit,
    stride_gate,
    stride_up,
    WEIGHTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program owns ``BLOCK_ROWS`` x ``BLOCK_DIM`` channels."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channels = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    inside = (rows < num_rows)[:, None] & (channels < dim)[None, :]
    gate = tl.load(
        gate_ptr + rows[:, None] * stride_gate + channels[None, :], mask=inside, other=0.0
    )
    up = tl.load(up_ptr + rows[:, None] * stride_up + channels[None, :], mask=inside, other=0.0)
    hidden = swiglu_values(gate.to(tl.float32), up.to(tl.float32), limit)
    if WEIGHTED:
        weights = tl.load(weights_ptr + rows, mask=rows < num_rows, other=0.0)
        hidden = weights[:, None] * hidden
    tl.store(out_ptr + rows[:, None] * dim + channels[None, :], to_bfloat16(hidden), mask=inside)


def _launch_swiglu(gate: Tensor, up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    gate = gate if gate.stride(1) == 1 else gate.contiguous()
    up = up if up.stride(1) == 1 else up.contiguous()
    num_rows, dim = gate.shape
    _swiglu_kernel[(triton.cdiv(num_rows, 4), triton.cdiv(dim, 512))](
        gate,
        up,
        gate if weights is None else weights.contiguous(),
        out,
        num_rows,
        dim,
        limit,
        gate.stride(0),
        up.stride(0),
        WEIGHTED=weights is not None,
        BLOCK_ROWS=4,
        BLOCK_DIM=512,
        num_warps=4,
    )
    return out


def routed_experts(
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
    """Sum of the outputs of this rank's experts.

    Args:
        x: ``(num_rows, hidden)`` bf16.
        ids: ``(num_rows, top_k)`` int32 global expert ids ascending and distinct; -1 = none
            (padding rows).
        weights: ``(num_rows, top_k)`` fp32.
        w1, w3: ``(num_local, inter, hidden / 2)`` uint8, two E2M1 codes a byte, even channel low.
        w1_scale, w3_scale: ``(num_local, inter, hidden / 32)`` uint8 E8M0.
        w2: ``(num_local, hidden, inter / 2)`` uint8; w2_scale: ``(num_local, hidden, inter / 32)``.
        first_expert: global id of local expert 0; ids outside the local range contribute nothing.
        limit: SwiGLU clamp.
        quantize: quantize inputs to MXFP8 (released numerics).

    Returns:
        ``(num_rows, hidden)`` fp32: BF16 expert outputs added in ascending expert id.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_dtype("x", x, torch.bfloat16)
    check_shape("ids", ids, x.shape[0], None, remedy="one list of experts a row")
    check_shape("weights", weights, *ids.shape, remedy="one weight an expert id")
    check_shape("w1", w1, None, None, x.shape[1] // 2, remedy="pack two codes a byte")
    return _routed_experts_op(
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


def routed_experts_reference(
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
    """The specification of :func:`routed_experts`: one expert after the other."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    operand = quantized_input(x, quantize)
    for local in range(w1.shape[0]):
        rows, column = (ids == first_expert + local).nonzero(as_tuple=True)
        if rows.numel() == 0:
            continue
        gate = wide.matmul_f64(operand[rows], fp4_row_dequantize(w1[local], w1_scale[local]))
        up = wide.matmul_f64(operand[rows], fp4_row_dequantize(w3[local], w3_scale[local]))
        hidden = swiglu_reference(gate.bfloat16(), up.bfloat16(), limit, weights[rows, column])
        down = fp4_row_dequantize(w2[local], w2_scale[local])
        output = wide.matmul_f64(quantized_input(hidden, quantize), down).bfloat16()
        total[rows] += output.float()
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _combine_kernel(
    pairs_ptr,
    ids_ptr,
    out_ptr,
    num_rows,
    dim,
    first_expert,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program adds the outputs of ``BLOCK_ROWS`` rows in the order of their ids."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channels = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    inside = channels < dim
    exists = rows < num_rows
    total = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for choice in range(TOP_K):
        pairs = rows * TOP_K + choice
        ids = tl.load(ids_ptr + pairs, mask=exists, other=-1)
        local = exists & (ids >= first_expert) & (ids - first_expert < num_experts)
        # Pairs of other ranks were never written: they must not be read.
        output = tl.load(
            pairs_ptr + pairs[:, None] * dim + channels[None, :],
            mask=local[:, None] & inside[None, :],
            other=0.0,
        )
        total += output.to(tl.float32)
    tl.store(
        out_ptr + rows[:, None] * dim + channels[None, :],
        total,
        mask=exists[:, None] & inside[None, :],
    )


def launch_pairs(
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
    outputs: Tensor,
    choice: ExpertChoice | None = None,
) -> None:
    """Write the output of every local (row, choice) pair to its row of ``outputs``.

    Args: as :func:`routed_experts`; ``outputs`` is ``(num_rows * top_k, hidden)`` bf16, contiguous,
    and keeps what it holds for ids of other ranks.
    """
    num_experts, inter, _ = w1.shape
    top_k, num_pairs = ids.shape[1], ids.numel()
    if num_pairs == 0 or num_experts == 0:
        return
    ids = ids.contiguous()
    choice = choice or choose_experts(num_pairs, num_experts)
    found = sort_pairs(ids, first_expert, num_experts, choice.block_rows)
    gate, up, down = Fp4Stack(w1, w1_scale), Fp4Stack(w3, w3_scale), Fp4Stack(w2, w2_scale)

    x = x if x.stride(1) == 1 else x.contiguous()
    operand = prepare_operand(x, quantize, order=4)
    hidden = torch.empty(num_pairs, inter, dtype=torch.bfloat16, device=x.device)
    expert_gemm(
        operand,
        found,
        top_k,
        gate,
        hidden,
        choice,
        up=up,
        weights=weights.contiguous(),
        limit=limit,
    )
    operand = prepare_operand(hidden, quantize, order=4, used_rows=found.row_starts[-1:])
    expert_gemm(operand, found, top_k, down, outputs, choice)


def _launch_experts(
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
    choice: ExpertChoice | None = None,
) -> Tensor:
    num_rows, dim = x.shape
    if ids.numel() == 0 or w1.shape[0] == 0:
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    outputs = torch.empty(ids.numel(), dim, dtype=torch.bfloat16, device=x.device)
    stacks = (w1, w1_scale, w3, w3_scale, w2, w2_scale)
    launch_pairs(x, ids, weights, *stacks, first_expert, limit, quantize, outputs, choice=choice)
    out = torch.empty(num_rows, dim, dtype=torch.float32, device=x.device)
    _combine_kernel[(num_rows, triton.cdiv(dim, 512))](
        outputs,
        ids.contiguous(),
        out,
        num_rows,
        dim,
        first_expert,
        w1.shape[0],
        TOP_K=ids.shape[1],
        BLOCK_ROWS=1,
        BLOCK_DIM=512,
        num_warps=4,
    )
    return out


def _fake_route(
    logits: Tensor, bias: Tensor, top_k: int, routed_scaling_factor: float
) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, top_k, dtype=torch.int32), logits.new_empty(rows, top_k)


def _fake_swiglu(gate: Tensor, up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    return gate.new_empty(gate.shape)


def _fake_experts(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


_route_op = register_op(
    "route(Tensor logits, Tensor bias, int top_k, float routed_scaling_factor) -> (Tensor, Tensor)",
    reference=route_reference,
    fake=_fake_route,
    launch=_launch_route,
)
_swiglu_op = register_op(
    "swiglu(Tensor gate, Tensor up, float limit, Tensor? weights=None) -> Tensor",
    reference=swiglu_reference,
    fake=_fake_swiglu,
    launch=_launch_swiglu,
)
_routed_experts_op = register_op(
    "routed_experts(Tensor x, Tensor ids, Tensor weights, Tensor w1, Tensor w1_scale, Tensor w3,"
    " Tensor w3_scale, Tensor w2, Tensor w2_scale, int first_expert, float limit, bool quantize)"
    " -> Tensor",
    reference=routed_experts_reference,
    fake=_fake_experts,
    launch=_launch_experts,
)
