"""expert_outputs and sum_outputs: what routed_experts adds, one by one and over ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.kernels import expert_outputs as module
from pcpkit.kernels import experts
from pcpkit.kernels.expert_outputs import expert_outputs, sum_outputs
from pcpkit.kernels.experts import routed_experts

from .bits import MODES, same_bits, spaced
from .inputs_experts import ExpertInputs, bench_inputs, draw_experts
from .test_experts import simple_inputs

few = settings(max_examples=8)
seeds = st.integers(0, 2**31)


def run(inputs: ExpertInputs, device: str) -> Tensor:
    """The kernels' result: interpreted on the CPU, compiled on CUDA."""
    return module._launch_outputs(*inputs.to(device).args)


def share(inputs: ExpertInputs, rank: int, size: int) -> ExpertInputs:
    """What rank `rank` of `size` owns: a block of consecutive experts."""
    count = inputs.w1[0].shape[0] // size
    first = rank * count
    stacks = {
        name: tuple(tensor[first : first + count] for tensor in getattr(inputs, name))
        for name in ("w1", "w3", "w2")
    }
    return replace(inputs, first_expert=first, **stacks)


def only(inputs: ExpertInputs, row: int, choice: int) -> ExpertInputs:
    """One row that goes to one of its experts."""
    ids, weights = inputs.ids[row, choice].view(1, 1), inputs.weights[row, choice].view(1, 1)
    return replace(inputs, x=inputs.x[row, None], ids=ids, weights=weights)


# --- the outputs --------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", [True, False])
def test_reference_is_one_expert_at_a_time(quantize: bool) -> None:
    """`routed_experts` of a single pair, which tests/kernels/test_experts.py checks by hand."""
    inputs = draw_experts(5, num_experts=6, num_local=4, first_expert=1, quantize=quantize, seed=1)
    inputs.ids[2, 0] = -1
    got = expert_outputs(*inputs.args)
    assert got.shape == (5, 3, 128)
    assert got.dtype == torch.bfloat16
    owned = (inputs.ids >= 1) & (inputs.ids < 5)
    assert owned.any()
    assert not owned.all()
    for row in range(5):
        for choice in range(3):
            want = routed_experts(*only(inputs, row, choice).args)[0]
            assert torch.equal(got[row, choice].float(), want)
            assert bool(want.any()) == bool(owned[row, choice])


@pytest.mark.parametrize("device", MODES)
def test_kernel_equals_the_reference_on_exact_values(device: str) -> None:
    """More rows than a tile for one expert, none for another, foreign and missing ids."""
    inputs = simple_inputs(20, num_experts=6, top_k=2, seed=2)
    inputs.ids[:18, 1] = 5
    inputs.ids[inputs.ids == 3] = -1
    inputs = replace(share(inputs, 1, 2), first_expert=3)
    want = module.expert_outputs_reference(*inputs.args)
    assert same_bits(run(inputs, device), want)
    assert bool(want[inputs.ids < 3].eq(0).all())


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_sum_is_routed_experts(device: str, quantize: bool, size: int) -> None:
    """Bit for bit, on one rank and over ranks, whose outputs add up as integers."""
    inputs = draw_experts(9, num_experts=6, quantize=quantize, seed=size)
    inputs.ids[4] = -1
    shares = [share(inputs, rank, size) for rank in range(size)]
    want = routed_experts(*inputs.args)
    outputs = sum(expert_outputs(*one.args).view(torch.int16).int() for one in shares)
    assert isinstance(outputs, Tensor)
    assert same_bits(sum_outputs(outputs.to(torch.int16).view(torch.bfloat16)), want)
    assert bool((want[4] == 0).all())

    whole = experts._launch_experts(*inputs.to(device).args)
    outputs = sum(run(one, device).view(torch.int16).int() for one in shares)
    assert isinstance(outputs, Tensor)
    got = module._launch_sum(outputs.to(torch.int16).view(torch.bfloat16))
    assert same_bits(got, whole)


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=seeds, data=st.data())
def test_rows_do_not_depend_on_each_other(device: str, seed: int, data: st.DataObject) -> None:
    inputs = draw_experts(4, num_experts=3, top_k=2, hidden=64, inter=32, seed=seed)
    rows = st.lists(st.integers(0, 3), min_size=1, max_size=6)
    chosen = torch.tensor(data.draw(rows))
    whole = expert_outputs(*inputs.args)
    assert same_bits(expert_outputs(*inputs.rows(chosen).args), whole[chosen])
    whole = run(inputs, device).cpu()
    assert same_bits(run(inputs.rows(chosen), device).cpu(), whole[chosen])


@pytest.mark.parametrize("device", MODES)
def test_strided_tensors_between_nan(device: str) -> None:
    inputs = simple_inputs(4, num_experts=3, top_k=2, seed=4)
    there = inputs.to(device)
    apart = replace(
        there,
        x=spaced(there.x),
        ids=spaced(there.ids),
        weights=spaced(there.weights),
        w1=(spaced(there.w1[0]), spaced(there.w1[1])),
        w3=(spaced(there.w3[0]), spaced(there.w3[1])),
        w2=(spaced(there.w2[0]), spaced(there.w2[1])),
    )
    assert same_bits(run(apart, device), module.expert_outputs_reference(*inputs.args))


@pytest.mark.parametrize("device", MODES)
def test_special_values_stay_in_their_pair(device: str) -> None:
    inputs = simple_inputs(3, num_experts=3, top_k=2, seed=5)
    clean = module.expert_outputs_reference(*inputs.args)
    x, weights = inputs.x.clone(), inputs.weights.clone()
    x[0, 5] = math.nan
    weights[1, 1] = math.nan
    got = run(replace(inputs, x=x, weights=weights), device).cpu()
    assert got[0].isnan().all()
    assert got[1, 1].isnan().all()
    assert same_bits(got[1, 0], clean[1, 0])
    assert same_bits(got[2], clean[2])


@pytest.mark.parametrize("device", MODES)
def test_nothing_to_do(device: str) -> None:
    inputs = draw_experts(3, num_experts=2, top_k=2, hidden=64, inter=32)
    assert run(inputs.rows(torch.arange(0)), device).shape == (0, 2, 64)
    inputs.ids.fill_(-1)
    assert (run(inputs, device) == 0).all()
    assert (expert_outputs(*inputs.args) == 0).all()


# --- their sum ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", MODES)
@few
@given(
    values=st.lists(
        st.floats(width=16, allow_nan=True, allow_infinity=True), min_size=1, max_size=8
    )
)
def test_sum_is_in_order(device: str, values: list[float]) -> None:
    """Each addition rounded to FP32, as Python floats rounded one by one; also -0, NaN, inf."""
    outputs = torch.tensor(values).bfloat16().view(1, -1, 1)
    total = torch.zeros(())
    for value in outputs.flatten().tolist():
        total = (total.double() + value).float()
    want = total.view(1, 1)
    assert same_bits(sum_outputs(outputs), want)
    assert same_bits(module._launch_sum(outputs.to(device)), want)


@pytest.mark.parametrize("device", MODES)
def test_order_of_the_sum_shows(device: str) -> None:
    """2^30 swallows 1 unless it is cancelled first."""
    large, one = 2.0**30, 1.0
    outputs = torch.tensor([[large, one, -large], [large, -large, one]]).bfloat16()[:, :, None]
    for got in (sum_outputs(outputs), module._launch_sum(outputs.to(device))):
        assert got.flatten().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("dim", [1, 511, 513])
def test_sum_of_strided_outputs_between_nan(device: str, dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    outputs = torch.randn(4, 3, dim, generator=generator).bfloat16()
    want = module.sum_outputs_reference(outputs)
    apart = spaced(outputs.to(device))
    assert same_bits(module._launch_sum(apart), want)
    turned = outputs.to(device).transpose(1, 2).contiguous().transpose(1, 2)
    assert same_bits(module._launch_sum(turned), want)
    assert same_bits(module._launch_sum(apart[1:3]), want[1:3])
    assert module._launch_sum(apart[:0]).shape == (0, dim)


def test_public_functions_name_what_does_not_fit() -> None:
    inputs = draw_experts(2, num_experts=2, top_k=2, hidden=64, inter=32)
    with pytest.raises(ValueError, match=r"ids expected shape \(2, \*\), got \(1, 2\)"):
        expert_outputs(*replace(inputs, ids=inputs.ids[:1]).args)
    with pytest.raises(ValueError, match=r"weights expected shape \(2, 2\), got \(2, 1\)"):
        expert_outputs(*replace(inputs, weights=inputs.weights[:, :1]).args)
    with pytest.raises(ValueError, match="x expected dtype bfloat16, got float32"):
        expert_outputs(*replace(inputs, x=inputs.x.float()).args)
    with pytest.raises(ValueError, match="outputs expected dtype bfloat16, got float32"):
        sum_outputs(torch.zeros(1, 2, 3))


def test_ops_are_registered_correctly() -> None:
    inputs = draw_experts(2, num_experts=2, top_k=2, hidden=64, inter=32)
    torch.library.opcheck(torch.ops.pcpkit.expert_outputs.default, inputs.args)
    outputs = torch.ones(2, 3, 4, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.pcpkit.sum_outputs.default, (outputs,))


def test_compiles_into_one_graph() -> None:
    inputs = draw_experts(2, num_experts=2, top_k=2, hidden=64, inter=32)

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return sum_outputs(expert_outputs(x, ids, weights, *inputs.args[3:]))

    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs.args[:3])
    assert same_bits(got, layer(*inputs.args[:3]))


# --- compiled, at the size of the model ---------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 64, 700])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_layer_split_over_ranks(num_rows: int, size: int) -> None:
    """5120 x 2304, top-6 of 24: `routed_experts` on one rank has the bits of any split.

    A rank with fewer experts takes other tiles, so this also says that tiles agree.
    """
    inputs = draw_experts(
        num_rows, num_experts=24, top_k=6, hidden=5120, inter=2304, seed=size, device="cuda"
    )
    outputs = torch.zeros(num_rows, 6, 5120, dtype=torch.bfloat16, device="cuda")
    for rank in range(size):
        # At most one rank has bits in a place, so adding is placing.
        outputs.view(torch.int16).add_(
            expert_outputs(*share(inputs, rank, size).args).view(torch.int16)
        )
    assert same_bits(sum_outputs(outputs), routed_experts(*inputs.args))


@pytest.mark.gpu
def test_released_layer() -> None:
    """384 experts: the last ranks' stacks begin past 2^31 bytes of one rank's."""
    inputs = bench_inputs(64)
    outputs = sum(
        expert_outputs(*share(inputs, rank, 4).args).view(torch.int16).int() for rank in range(4)
    )
    assert isinstance(outputs, Tensor)
    got = sum_outputs(outputs.to(torch.int16).view(torch.bfloat16))
    assert same_bits(got, routed_experts(*inputs.args))


@pytest.mark.gpu
def test_inductor_and_cuda_graph_give_the_same_bits() -> None:
    inputs = draw_experts(40, num_experts=8, top_k=3, hidden=256, inter=128, device="cuda")

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return sum_outputs(expert_outputs(x, ids, weights, *inputs.args[3:]))

    want = layer(*inputs.args[:3])
    assert same_bits(torch.compile(layer, fullgraph=True)(*inputs.args[:3]), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layer(*inputs.args[:3])
    got.zero_()
    graph.replay()
    assert same_bits(got, want)
