"""hc_mix: reference against a loop, kernel against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.kernels import hyper_connection_mix as module
from pcpkit.kernels.hyper_connection import hc_mix
from pcpkit.kernels.hyper_connection_mix import hc_mix_reference

from .bits import MODES, same_bits, spaced
from .inputs_hyper_connection import EPS, HC_EPS, ITERATIONS, StreamInputs, bench_inputs

Coefficients = tuple[Tensor, ...]


def coefficients(inputs: StreamInputs, dtype: torch.dtype) -> Coefficients:
    """The formulas in one precision, with torch's own products, sums and softmax."""
    count = inputs.streams.shape[1]
    x, fn = inputs.streams.flatten(1).to(dtype), inputs.fn.to(dtype)
    mixed = (x @ fn.t()) / torch.sqrt(x.square().mean(1, keepdim=True) + EPS)
    pre, post, comb = mixed.split([count, count, count * count], dim=1)
    base = inputs.base.to(dtype).split([count, count, count * count])
    scale = inputs.scale.to(dtype)
    pre = (pre * scale[0] + base[0]).sigmoid() + HC_EPS
    post = 2 * (post * scale[1] + base[1]).sigmoid()
    comb = (comb * scale[2] + base[2]).unflatten(1, (count, count)).softmax(2) + HC_EPS
    comb = comb / (comb.sum(1, keepdim=True) + HC_EPS)
    for _ in range(ITERATIONS - 1):
        comb = comb / (comb.sum(2, keepdim=True) + HC_EPS)
        comb = comb / (comb.sum(1, keepdim=True) + HC_EPS)
    return pre, post, comb


def run(inputs: StreamInputs) -> Coefficients:
    """The kernels' coefficients: interpreted on the CPU, where few large programs are faster."""
    choice = module._choose_launch()
    if inputs.streams.device.type == "cpu":
        choice = replace(choice, coefficient_rows=128)
    return module._launch(*inputs.mix, choice=choice)


def assert_as_good_as_float32(got: Coefficients, inputs: StreamInputs) -> None:
    """Error against float64 at most four times that of the same formulas in torch FP32.

    Four, because the largest errors of two FP32 chains of different order are compared; and no less
    than eight units in the last place of the largest coefficient, for when torch is exact.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    wanted, plain = coefficients(inputs, torch.float64), coefficients(inputs, torch.float32)
    for out, want, float32 in zip(got, wanted, plain, strict=True):
        assert out.dtype == torch.float32
        want = want.to(out.device)
        allowed = 4 * (float32.to(out.device) - want).abs().max()
        allowed = torch.maximum(allowed, 8 * 2.0**-24 * want.abs().max())
        assert (out - want).abs().max() <= allowed


def test_reference_is_the_formula_in_a_loop() -> None:
    """Python floats; the reference rounds to FP32 some 50 times, each below 2^-24 of about one."""
    inputs = bench_inputs(2, "cpu", dim=6)
    pre, post, comb = hc_mix(*inputs.mix)
    fn, base, scale = inputs.fn.tolist(), inputs.base.tolist(), inputs.scale.tolist()
    for row, streams in enumerate(inputs.streams.flatten(1).tolist()):
        r = 1 / math.sqrt(math.fsum(v * v for v in streams) / 24 + EPS)
        m = [r * math.fsum(a * b for a, b in zip(line, streams, strict=True)) for line in fn]
        for k in range(4):
            gate = 1 / (1 + math.exp(-(m[k] * scale[0] + base[k]))) + HC_EPS
            assert abs(gate - float(pre[row, k])) < 50 * 2.0**-24
            gate = 2 / (1 + math.exp(-(m[4 + k] * scale[1] + base[4 + k])))
            assert abs(gate - float(post[row, k])) < 50 * 2.0**-24
        c = [
            [math.exp(m[8 + 4 * j + k] * scale[2] + base[8 + 4 * j + k]) for k in range(4)]
            for j in range(4)
        ]
        c = [[v / sum(line) + HC_EPS for v in line] for line in c]
        for step in range(2 * ITERATIONS - 1):
            if step % 2:
                c = [[v / (sum(line) + HC_EPS) for v in line] for line in c]
            else:
                sums = [sum(line[k] for line in c) + HC_EPS for k in range(4)]
                c = [[v / s for v, s in zip(line, sums, strict=True)] for line in c]
        assert (torch.tensor(c, dtype=torch.float64) - comb[row]).abs().max() < 50 * 2.0**-24


def test_columns_of_comb_sum_to_one() -> None:
    pre, post, comb = hc_mix(*bench_inputs(20, "cpu", dim=16).mix)
    # The last step divides each column by its sum plus 1e-6.
    assert ((comb.sum(1) - 1).abs() < 1e-5).all()
    assert ((pre > HC_EPS) & (pre < 1 + HC_EPS)).all()
    assert ((post > 0) & (post < 2)).all()


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize(
    ("num_rows", "count", "dim"), [(3, 4, 300), (66, 4, 8), (5, 2, 48), (2, 1, 7)]
)
def test_kernel_is_as_good_as_float32(num_rows: int, count: int, dim: int, device: str) -> None:
    """One or more slices of K, a last one that is not full, more rows than a tile."""
    inputs = bench_inputs(num_rows, "cpu", dim, count)
    here = inputs.to(device)
    got = run(replace(here, streams=spaced(here.streams)))
    assert_as_good_as_float32(got, here)
    padded = replace(
        here,
        streams=torch.cat([here.streams.flatten(1)] * 2, 1)[:, : count * dim].view_as(here.streams),
    )
    assert all(same_bits(a, b) for a, b in zip(run(padded), got, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 64, 4096])
def test_kernel_is_as_good_as_float32_at_real_sizes(num_rows: int) -> None:
    inputs = bench_inputs(num_rows, "cuda")
    got = module._launch(*inputs.mix)
    assert_as_good_as_float32(got, inputs)
    assert_as_good_as_float32(hc_mix_reference(*inputs.mix), inputs)


def test_terms_of_fn_cancel_exactly() -> None:
    """fn = 1 + 2^-23 against streams that cancel the ones: only the last bit of fn is left.

    Interpreted only: tensor cores align the products of one step to the largest and lose that bit,
    within the bound of ``test_kernel_is_as_good_as_float32``.
    """
    device = "cpu"
    inputs = bench_inputs(1, "cpu", dim=16)
    streams = torch.ones(1, 4, 16)
    streams[:, 2:] = -1.0
    fn = torch.ones(24, 64)
    fn[:, 0] += 2.0**-23
    exact = replace(
        inputs,
        streams=streams.bfloat16(),
        fn=fn,
        base=torch.zeros(24),
        scale=torch.full((3,), 2.0**21),
    )
    pre, post, _ = module._launch(*exact.to(device).mix)
    # m = 2^-23, affine 2^-2.
    gate = 1 / (1 + math.exp(-0.25))
    assert (pre.cpu() - gate - HC_EPS).abs().max() < 2.0**-23
    assert (post.cpu() - 2 * gate).abs().max() < 2.0**-22


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # numpy's maximum, interpreted
@pytest.mark.parametrize("device", MODES)
def test_bad_rows_give_nan_in_their_row(device: str) -> None:
    inputs = bench_inputs(4, "cpu", dim=16)
    inputs.streams[1, 2, 3], inputs.streams[2, 0, 0] = torch.nan, torch.inf
    for out in module._launch(*inputs.to(device).mix):
        assert out.flatten(1).isnan().all(dim=1).tolist() == [False, True, True, False]
        assert out.flatten(1).isnan().any(dim=1).tolist() == [False, True, True, False]
    for out in hc_mix(*inputs.mix):
        assert out.flatten(1).isnan().all(dim=1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("device", MODES)
def test_zero_rows_depend_on_base_only(device: str) -> None:
    inputs = bench_inputs(2, "cpu", dim=16)
    zero = replace(inputs, streams=torch.zeros_like(inputs.streams)).to(device)
    pre, _, _ = module._launch(*zero.mix)
    want = inputs.base[:4].double().sigmoid().float() + HC_EPS
    assert torch.equal(pre.cpu(), want.expand(2, 4))


@pytest.mark.parametrize("device", MODES)
@settings(max_examples=6)  # interpreted, an example takes a second
@given(seed=st.integers(0, 2**31), chosen=st.lists(st.integers(0, 69), min_size=1, max_size=66))
def test_a_row_does_not_depend_on_the_others(device: str, seed: int, chosen: list[int]) -> None:
    """Other rows of the tile, another tile, another place in it: the same bits."""
    inputs = bench_inputs(70, "cpu", dim=24, seed=seed)
    inputs.streams[5] = 1e30
    index = torch.tensor(chosen)
    whole, some = inputs.to(device), inputs.rows(index).to(device)
    for out, all_rows in zip(run(some), run(whole), strict=True):
        assert same_bits(out, all_rows[index.to(device)])


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), chosen=st.lists(st.integers(0, 69), max_size=66))
def test_a_row_of_the_reference_does_not_depend_on_the_others(seed: int, chosen: list[int]) -> None:
    inputs = bench_inputs(70, "cpu", dim=24, seed=seed)
    index = torch.tensor(chosen, dtype=torch.int64)
    whole = hc_mix_reference(*inputs.mix)
    for out, all_rows in zip(hc_mix_reference(*inputs.rows(index).mix), whole, strict=True):
        assert same_bits(out, all_rows[index])


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others_at_real_sizes() -> None:
    inputs = bench_inputs(4096, "cuda")
    whole = module._launch(*inputs.mix)
    for index in (torch.tensor([77]), torch.arange(100, 165), torch.randperm(4096)):
        index = index.cuda()
        for out, all_rows in zip(module._launch(*inputs.rows(index).mix), whole, strict=True):
            assert same_bits(out, all_rows[index])


@pytest.mark.parametrize("device", MODES)
def test_no_rows(device: str) -> None:
    none = bench_inputs(2, "cpu", dim=16).rows(torch.zeros(0, dtype=torch.int64)).to(device)
    assert [tuple(out.shape) for out in module._launch(*none.mix)] == [(0, 4), (0, 4), (0, 4, 4)]


def test_launch_choice_divides_its_slices() -> None:
    choice = module._choose_launch()
    assert choice.slice_size % choice.block_k == 0


def test_public_function_names_what_does_not_fit() -> None:
    inputs = bench_inputs(4, "cpu", dim=16)
    with pytest.raises(ValueError, match="streams expected dtype bfloat16, got float32"):
        hc_mix(*replace(inputs, streams=inputs.streams.float()).mix)
    with pytest.raises(ValueError, match=r"fn expected shape \(24, 64\), got \(24, 63\)"):
        hc_mix(*replace(inputs, fn=inputs.fn[:, 1:]).mix)
    with pytest.raises(ValueError, match="fn expected dtype float32, got bfloat16"):
        hc_mix(*replace(inputs, fn=inputs.fn.bfloat16()).mix)
    with pytest.raises(ValueError, match=r"base expected shape \(24\), got \(20\)|base expected"):
        hc_mix(*replace(inputs, base=inputs.base[4:]).mix)
    with pytest.raises(ValueError, match="scale expected"):
        hc_mix(*replace(inputs, scale=inputs.scale[1:]).mix)
    with pytest.raises(ValueError, match="streams expected a power of two of streams, got 3"):
        module._launch(*bench_inputs(2, "cpu", dim=16, count=3).mix)


def test_op_is_registered_correctly() -> None:
    torch.library.opcheck(torch.ops.pcpkit.hc_mix.default, bench_inputs(3, "cpu", dim=16).mix)


def test_compiles_into_one_graph() -> None:
    inputs = bench_inputs(3, "cpu", dim=16)
    got = torch.compile(hc_mix, fullgraph=True, backend="aot_eager")(*inputs.mix)
    assert all(same_bits(a, b) for a, b in zip(got, hc_mix(*inputs.mix), strict=True))


@pytest.mark.gpu
def test_inductor_and_cuda_graph_give_the_same_bits() -> None:
    inputs = bench_inputs(64, "cuda")
    want = hc_mix(*inputs.mix)
    got = torch.compile(hc_mix, fullgraph=True)(*inputs.mix)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    captured, graph = (
        replace(inputs, streams=torch.zeros_like(inputs.streams)),
        torch.cuda.CUDAGraph(),
    )
    with torch.cuda.graph(graph):
        got = hc_mix(*captured.mix)
    captured.streams.copy_(inputs.streams)
    graph.replay()
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
def test_offsets_past_2_to_31() -> None:
    """Rows of streams 2^30 elements apart: the third lies beyond 2^31."""
    needed = ((3 << 30) + 4 * 512) * 2
    if torch.cuda.mem_get_info()[0] < needed + (1 << 30):
        pytest.skip(f"needs {needed} bytes of device memory")
    inputs = bench_inputs(4, "cuda", dim=512)
    buffer = torch.empty(needed // 2, dtype=torch.bfloat16, device="cuda")
    far = buffer.as_strided((4, 4, 512), (1 << 30, 512, 1))
    far.copy_(inputs.streams)
    got, want = module._launch(*replace(inputs, streams=far).mix), module._launch(*inputs.mix)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
