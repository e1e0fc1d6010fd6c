"""engram_inject: reference against its definition, kernel against reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.kernels import engram_inject as module
from pcpkit.kernels.engram import engram_inject
from pcpkit.kernels.engram_inject import engram_inject_reference

from .bits import MODES, differing, same_bits, spaced
from .inputs_engram import EPS, InjectInputs, inject_inputs

few = settings(max_examples=15)
seeds = st.integers(0, 2**31)


def run(inputs: InjectInputs, device: str) -> Tensor:
    """The kernel's streams: interpreted on the CPU, compiled on CUDA."""
    return module._launch(*inputs.to(device).args)


def gate_by_hand(query: Tensor, key: Tensor, weight: Tensor) -> float:
    """Of one stream, in Python floats with exact sums and no rounding to FP32."""
    dim = len(query)
    rows = list(zip(query.tolist(), key.tolist(), weight.tolist(), strict=True))
    dot = math.fsum(q * w * k for q, k, w in rows)
    for squares in ((q * q for q, _, _ in rows), (k * k for _, k, _ in rows)):
        dot /= math.sqrt(math.fsum(squares) / dim + EPS)
    dot /= math.sqrt(dim)
    root = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)
    return 1 / (1 + math.exp(-root))


@pytest.mark.parametrize("dim", [24, 160])
def test_reference_is_the_definition(dim: int) -> None:
    """Before its last rounding the reference is within 2^-20 of the exact value of each term.

    Its gate carries at most seven FP32 roundings (2^-24 each, relative; the square root and the
    logistic function do not enlarge them), the product and the sum one each.
    """
    inputs = inject_inputs(3, count=2, dim=dim, seed=dim)
    got = engram_inject(*inputs.args)
    weights = inputs.query_weight.double() * inputs.key_weight.double()
    for row in range(3):
        keys = inputs.key_value[row, : 2 * dim].view(2, dim).double()
        value = inputs.key_value[row, 2 * dim :].double()
        for stream in range(2):
            query = inputs.streams[row, stream].double()
            added = gate_by_hand(query, keys[stream], weights[stream]) * value
            bound = 2**-20 * (query.abs() + added.abs())
            low, high = (query + added - bound).bfloat16(), (query + added + bound).bfloat16()
            assert (got[row, stream] >= low).all()
            assert (got[row, stream] <= high).all()


# Bits: sums and logistic function are rounded once from float64, where kernel and reference differ
# in the last bits at most; an FP32 number changes for that about once in 10^8.
@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize(("count", "dim"), [(4, 5120), (2, 160), (1, 24), (3, 1)])
def test_kernel_equals_reference(device: str, count: int, dim: int) -> None:
    inputs = inject_inputs(3, count=count, dim=dim, seed=dim)
    assert same_bits(run(inputs, device), engram_inject_reference(*inputs.args))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 129, 4096])
def test_kernel_equals_reference_at_real_sizes(num_rows: int) -> None:
    inputs = inject_inputs(num_rows)
    fraction, largest = differing(run(inputs, "cuda"), engram_inject_reference(*inputs.args))
    # The sigmoid in float64 by two libraries.
    assert fraction <= 1e-5
    assert largest <= 1


@pytest.mark.parametrize("device", MODES)
def test_every_launch_gives_the_same_bits(device: str) -> None:
    """The order of the float64 sums, and the order of the programs, do not show in the result."""
    inputs = inject_inputs(3, count=2, dim=2112, seed=1)
    want = engram_inject_reference(*inputs.args)
    for block_dim, num_warps, rows_per_turn in ((1024, 8, 2), (1024, 4, 1), (256, 2, 128)):
        choice = module.LaunchChoice(
            block_dim=block_dim, num_warps=num_warps, rows_per_turn=rows_per_turn
        )
        assert same_bits(module._launch(*inputs.to(device).args, choice=choice), want)


@pytest.mark.parametrize("device", MODES)
def test_strided_tensors_between_nan(device: str) -> None:
    inputs = inject_inputs(4, count=3, dim=40, seed=2)
    there = inputs.to(device)
    apart = InjectInputs(
        streams=spaced(there.streams),
        key_value=spaced(there.key_value),
        query_weight=spaced(there.query_weight),
        key_weight=there.key_weight.t().contiguous().t(),
    )
    assert apart.key_weight.stride(1) != 1
    assert same_bits(module._launch(*apart.args), engram_inject_reference(*inputs.args))


@pytest.mark.parametrize("device", MODES)
def test_special_values_stay_in_their_stream(device: str) -> None:
    """NaN, infinities, huge, subnormal and zero channels in streams, keys and the value."""
    specials = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-40, 0.0, -0.0])
    count = len(specials)
    clean = inject_inputs(3 * count + 2, count=2, dim=32, seed=3)
    streams, key_value = clean.streams.clone(), clean.key_value.clone()
    for index, value in enumerate(specials):
        streams[index, 1, 5] = value
        key_value[count + index, 32 + 6] = value
        key_value[2 * count + index, 64 + 7] = value
    streams[-2] = 0.0
    key_value[-1] = 0.0
    inputs = replace(clean, streams=streams, key_value=key_value)
    got = run(inputs, device).cpu()
    assert same_bits(got, engram_inject_reference(*inputs.args))
    assert same_bits(got[: 2 * count, 0], engram_inject_reference(*clean.args)[: 2 * count, 0])
    others = torch.arange(32) != 7
    assert got[2 * count : 3 * count][..., others].isfinite().all()
    assert got[0, 1].isnan().all(), "a NaN channel spoils the gate of its stream"
    # A stream of zeros has dot 0: the gate is that of sqrt(1e-6), not one half.
    half = torch.sigmoid(torch.tensor(1e-6).sqrt().double()).float() * key_value[-2, 64:].float()
    assert same_bits(got[-2], half.bfloat16().expand(2, 32))
    assert same_bits(got[-1], streams[-1])


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=seeds, data=st.data())
def test_rows_do_not_depend_on_each_other(device: str, seed: int, data: st.DataObject) -> None:
    inputs = inject_inputs(4, count=2, dim=48, seed=seed)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, 3), max_size=6)), dtype=torch.int64)
    want = engram_inject_reference(*inputs.args)[chosen]
    assert same_bits(engram_inject_reference(*inputs.pick(chosen).args), want)
    assert same_bits(run(inputs.pick(chosen), device), want)


@pytest.mark.gpu
def test_real_rows_do_not_depend_on_each_other() -> None:
    inputs = inject_inputs(300, "cuda")
    chosen = torch.randint(0, 300, (257,), generator=torch.Generator().manual_seed(0)).cuda()
    whole = module._launch(*inputs.args)
    assert same_bits(module._launch(*inputs.pick(chosen).args), whole[chosen])
    assert same_bits(module._launch(*inputs.pick(chosen[:1]).args), whole[chosen[:1]])


@pytest.mark.parametrize("device", MODES)
def test_no_rows(device: str) -> None:
    assert run(inject_inputs(0, count=2, dim=32), device).shape == (0, 2, 32)


def test_public_function_names_what_does_not_fit() -> None:
    inputs = inject_inputs(2, count=2, dim=32)
    with pytest.raises(ValueError, match=r"key_value expected shape \(2, 96\), got \(2, 95\)"):
        engram_inject(*replace(inputs, key_value=inputs.key_value[:, 1:]).args)
    with pytest.raises(ValueError, match="streams expected dtype bfloat16, got float32"):
        engram_inject(*replace(inputs, streams=inputs.streams.float()).args)
    with pytest.raises(ValueError, match=r"key_weight expected shape \(2, 32\), got \(1, 32\)"):
        engram_inject(*replace(inputs, key_weight=inputs.key_weight[:1]).args)


@pytest.mark.parametrize(
    ("dim", "block_dim", "num_warps"), [(5120, 1024, 8), (512, 512, 4), (48, 64, 1), (1, 32, 1)]
)
def test_launch_choice(dim: int, block_dim: int, num_warps: int) -> None:
    choice = module._choose_launch(dim)
    assert (choice.block_dim, choice.num_warps) == (block_dim, num_warps)


def test_op_is_registered_correctly() -> None:
    inputs = inject_inputs(2, count=2, dim=32)
    torch.library.opcheck(torch.ops.pcpkit.engram_inject.default, inputs.args)


def test_compiles_into_one_graph() -> None:
    inputs = inject_inputs(2, count=2, dim=32)
    got = torch.compile(engram_inject, fullgraph=True, backend="aot_eager")(*inputs.args)
    assert same_bits(got, engram_inject_reference(*inputs.args))


@pytest.mark.gpu
def test_inductor_and_cuda_graph_give_the_same_bits() -> None:
    inputs = inject_inputs(40, "cuda")
    want = engram_inject(*inputs.args)
    assert same_bits(torch.compile(engram_inject, fullgraph=True)(*inputs.args), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = engram_inject(*inputs.args)
    got.zero_()
    graph.replay()
    assert same_bits(got, want)


@pytest.mark.gpu
def test_offsets_past_2_to_31() -> None:
    """Rows 2^30 elements apart: the third starts beyond 2^31."""
    stride, needed = 1 << 30, ((3 << 30) + 5120) * 2
    if torch.cuda.mem_get_info()[0] < needed + (1 << 30):
        pytest.skip(f"needs {needed} bytes of device memory")
    inputs = inject_inputs(4, count=4, dim=512)
    buffer = torch.empty(needed // 2, dtype=torch.bfloat16, device="cuda")
    there = inputs.to("cuda")
    streams = buffer.as_strided((4, 4, 512), (stride, 512, 1))
    key_value = buffer.as_strided((4, 2560), (stride, 1), 2048)
    streams.copy_(there.streams)
    key_value.copy_(there.key_value)
    far = replace(there, streams=streams, key_value=key_value)
    assert same_bits(module._launch(*far.args), engram_inject_reference(*inputs.args))
