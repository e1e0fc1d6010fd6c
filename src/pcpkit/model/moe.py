"""The mixture-of-experts feed-forward of one layer (model-spec section 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from pcpkit.config import ModelConfig
from pcpkit.kernels.expert_outputs import expert_outputs, sum_outputs
from pcpkit.kernels.experts import route, routed_experts, swiglu
from pcpkit.kernels.linear import linear_bf16, linear_fp8, linear_fp8_pair
from pcpkit.model.observe import Observer
from pcpkit.model.weights import MoeWeights
from pcpkit.parallel.ep import gather_routed, return_outputs, return_sums
from pcpkit.parallel.groups import Groups
from pcpkit.parallel.tp import Reduce
from pcpkit.plan.rows import LayerRows


def moe_forward(
    config: ModelConfig,
    weights: MoeWeights,
    x: Tensor,
    *,
    rows: LayerRows,
    groups: Groups,
    reduce: Reduce,
    quantize: bool,
    observe: Observer,
) -> Tensor:
    """Route every row, run routed and shared experts, add them.

    Args:
        config: the model.
        weights: this rank's weights.
        x: ``(num_rows, hidden)`` bf16 after ffn_norm, this rank's rows.
        rows: of the layer, for the rows of the other ranks.
        groups: this rank's groups; experts are split over ``groups.ep``.
        reduce: how expert outputs of several ranks are added.
        quantize: released numerics (quantized activations).
        observe: sees ``route_ids`` and ``route_weights``.

    Returns:
        ``(num_rows, hidden)`` bf16: FP32 sum over routed experts in ascending id, then the shared
        expert, rounded once.
    """
    logits = linear_bf16(x, weights.gate, torch.float32)
    ids, route_weights = route(
        logits, weights.gate_bias, config.num_experts_per_tok, config.routed_scaling_factor
    )
    observe("route_ids", ids)
    observe("route_weights", route_weights)
    stacks = (
        weights.w1.weight,
        weights.w1.scale,
        weights.w3.weight,
        weights.w3.scale,
        weights.w2.weight,
        weights.w2.scale,
        weights.first_expert,
        config.swiglu_limit,
        quantize,
    )
    if groups.ep.size == 1:
        routed = routed_experts(x, ids, route_weights, *stacks)
    else:
        is_row = rows.window_slots >= 0
        everyone = gather_routed(groups, x, ids, route_weights, rows.num_padded_rows, is_row)
        if reduce == "ordered":
            outputs = return_outputs(groups, expert_outputs(*everyone, *stacks), x.shape[0])
            routed = sum_outputs(outputs)
        else:
            routed = return_sums(groups, routed_experts(*everyone, *stacks), x.shape[0])
    w1, w3 = weights.shared_w1, weights.shared_w3
    gate, up = linear_fp8_pair(x, w1.weight, w1.scale, w3.weight, w3.scale, quantize)
    hidden = swiglu(gate, up, config.swiglu_limit)
    shared = linear_fp8(hidden, weights.shared_w2.weight, weights.shared_w2.scale, quantize)
    return (routed + shared.float()).bfloat16()
