"""routed_experts compiled, at the sizes of the model: error, row-invariance, graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pcpkit.kernels import experts as module
from pcpkit.kernels.experts import routed_experts

from .bits import same_bits
from .inputs_experts import ExpertInputs, bench_inputs, draw_experts
from .test_experts import CHOICES, check_halves

pytestmark = pytest.mark.gpu


def relative_error(got: Tensor, want: Tensor) -> float:
    difference = (got.double() - want.double()).square().mean().sqrt()
    return float(difference / want.double().square().mean().sqrt())


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("num_rows", [3, 200])
def test_error_at_real_sizes(num_rows: int, quantize: bool) -> None:
    """Within 2^-9 of the reference, root mean square: half of one BF16 rounding.

    Values that FP32 sums move over a rounding boundary are one in a thousand and change by a BF16
    step; one channel left out, or one scale byte misread, changes 2^-6 of a result or more.
    """
    inputs = draw_experts(
        num_rows,
        num_experts=12,
        top_k=6,
        hidden=5120,
        inter=2304,
        quantize=quantize,
        device="cuda",
    )
    got = routed_experts(*inputs.args)
    want = module.routed_experts_reference(*inputs.args)
    assert relative_error(got, want) <= 2**-9


def test_halves_are_within_fp32_error_for_every_choice() -> None:
    inputs = draw_experts(40, num_experts=3, top_k=2, hidden=640, inter=352, seed=1)
    for choice in CHOICES:
        check_halves(inputs, "cuda", choice)


def last_experts(inputs: ExpertInputs, count: int) -> ExpertInputs:
    """The call of a rank that owns only the last ``count`` experts."""
    first = inputs.w1[0].shape[0] - count
    stacks = {
        name: tuple(tensor[first:] for tensor in getattr(inputs, name))
        for name in ("w1", "w3", "w2")
    }
    return replace(inputs, first_expert=first, **stacks)


def test_released_layer() -> None:
    """384 experts: stacks of more than 2^31 bytes; any number of rows gives a row the same bits."""
    inputs = bench_inputs(4096)
    assert inputs.w1[0].nbytes > 2**31
    whole = routed_experts(*inputs.args)
    for count in (1, 8, 64, 700, 2048):
        chosen = torch.randperm(4096, generator=torch.Generator().manual_seed(count))
        chosen = chosen[:count].cuda()
        assert same_bits(routed_experts(*inputs.rows(chosen).args), whole[chosen]), count
    few = inputs.rows(torch.arange(16, device="cuda"))
    few.ids.copy_(torch.arange(378, 384, device="cuda").int().expand(16, 6))
    got, part = routed_experts(*few.args), last_experts(few, 6)
    assert same_bits(routed_experts(*part.args), got)
    assert relative_error(got, module.routed_experts_reference(*part.args)) <= 2**-9


def test_one_expert_may_take_all_rows() -> None:
    """The grid is sized by a bound that holds for any ids."""
    inputs = draw_experts(1000, num_experts=40, top_k=2, hidden=256, inter=128, device="cuda")
    even = routed_experts(*inputs.args)
    inputs.ids[1:] = torch.tensor([3, 39], dtype=torch.int32, device="cuda")
    got = routed_experts(*inputs.args)
    assert same_bits(got[:1], even[:1])
    assert relative_error(got, module.routed_experts_reference(*inputs.args)) <= 2**-9


def test_every_choice_gives_the_same_bits() -> None:
    inputs = draw_experts(150, num_experts=3, top_k=2, hidden=1280, inter=608, device="cuda")
    want = module._launch_experts(*inputs.args, choice=CHOICES[0])
    for choice in CHOICES[1:]:
        assert same_bits(module._launch_experts(*inputs.args, choice=choice), want), choice


def test_inductor_and_cuda_graph_give_the_same_bits() -> None:
    inputs = draw_experts(40, num_experts=8, top_k=3, hidden=256, inter=128, device="cuda")
    want = routed_experts(*inputs.args)
    assert same_bits(torch.compile(routed_experts, fullgraph=True)(*inputs.args), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = routed_experts(*inputs.args)
    # Other ids on replay: the captured grid and buffers must hold for them too.
    other = draw_experts(40, num_experts=8, top_k=3, hidden=256, inter=128, seed=1, device="cuda")
    inputs.ids.copy_(other.ids)
    graph.replay()
    assert same_bits(got, routed_experts(*inputs.args))


def test_offsets_past_2_to_31() -> None:
    """Input rows 2^30 channels apart."""
    needed = 12 << 30
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed} bytes of device memory")
    inputs = draw_experts(4, num_experts=4, top_k=2, hidden=256, inter=64, device="cuda")
    buffer = torch.empty((3 << 30) + 256, dtype=torch.bfloat16, device="cuda")
    far = buffer.as_strided((4, 256), (1 << 30, 1))
    far.copy_(inputs.x)
    want = routed_experts(*inputs.args)
    assert same_bits(routed_experts(*replace(inputs, x=far).args), want)
    gate = buffer.as_strided((4, 256), (1 << 30, 1))
    assert same_bits(
        module._launch_swiglu(gate, gate, 10.0), module._launch_swiglu(inputs.x, inputs.x, 10.0)
    )
