"""hc_collapse, hc_expand and the fused forms: bits of the references. hc_mix has its own file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.kernels import hyper_connection as module
from pcpkit.kernels.hyper_connection import (
    hc_collapse,
    hc_collapse_norm,
    hc_collapse_norm_reference,
    hc_collapse_reference,
    hc_expand,
    hc_expand_collapse_norm,
    hc_expand_collapse_norm_reference,
    hc_expand_reference,
)

from .bits import MODES, bits, same_bits, spaced
from .inputs_cache_write import hostile_latents
from .inputs_hyper_connection import StreamInputs, bench_inputs

few = settings(max_examples=20)
Outputs = tuple[Tensor, ...]
Function = Callable[[StreamInputs], Outputs]


def hostile(num_rows: int, count: int, dim: int, seed: int) -> StreamInputs:
    """Every magnitude, raw bit patterns and signed zeros in streams and outputs."""
    inputs = bench_inputs(num_rows, "cpu", dim, count, seed)
    streams = hostile_latents(num_rows * count, dim, seed).view(num_rows, count, dim)
    return replace(inputs, streams=streams, output=hostile_latents(num_rows, dim, seed + 1))


def reference(inputs: StreamInputs) -> Outputs:
    """All outputs of all references."""
    return (
        hc_collapse_reference(*inputs.collapse),
        hc_expand_reference(*inputs.expand),
        hc_collapse_norm_reference(*inputs.collapse_norm),
        *hc_expand_collapse_norm_reference(*inputs.expand_collapse_norm),
    )


def kernel(inputs: StreamInputs) -> Outputs:
    """The same from the kernels."""
    return (
        module._launch_collapse(*inputs.collapse),
        module._launch_expand(*inputs.expand),
        module._launch_collapse_norm(*inputs.collapse_norm),
        *module._launch_expand_collapse_norm(*inputs.expand_collapse_norm),
    )


def all_same(got: Outputs, want: Outputs) -> bool:
    return all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_references_are_the_formulas() -> None:
    """Element by element in numpy FP32 scalars, streams in ascending order."""
    inputs = bench_inputs(3, "cpu", dim=5)
    x, y = inputs.streams.float().numpy(), inputs.output.float().numpy()
    pre, post, comb = inputs.pre.numpy(), inputs.post.numpy(), inputs.comb.numpy()
    collapsed, expanded = np.empty((3, 5), np.float32), np.empty((3, 4, 5), np.float32)
    for row in range(3):
        for d in range(5):
            collapsed[row, d] = pre[row, 0] * x[row, 0, d]
            for k in range(1, 4):
                collapsed[row, d] += pre[row, k] * x[row, k, d]
            for k in range(4):
                mixed = comb[row, 0, k] * x[row, 0, d]
                for j in range(1, 4):
                    mixed += comb[row, j, k] * x[row, j, d]
                expanded[row, k, d] = post[row, k] * y[row, d] + mixed
    assert same_bits(hc_collapse(*inputs.collapse), torch.tensor(collapsed).bfloat16())
    assert same_bits(hc_expand(*inputs.expand), torch.tensor(expanded).bfloat16())


def test_one_hot_coefficients_select_a_stream() -> None:
    inputs = bench_inputs(4, "cpu", dim=8)
    one_hot = torch.tensor([0.0, 0.0, 1.0, 0.0]).expand(4, 4)
    assert torch.equal(hc_collapse(inputs.streams, one_hot), inputs.streams[:, 2])
    identity = torch.eye(4).expand(4, 4, 4)
    nothing = torch.zeros(4, 4)
    assert torch.equal(hc_expand(inputs.output, inputs.streams, nothing, identity), inputs.streams)
    # comb is [input, output]: the transpose of a shift moves streams the other way.
    shift = identity.roll(1, dims=2)
    moved = hc_expand(inputs.output, inputs.streams, nothing, shift)
    assert torch.equal(moved, inputs.streams.roll(1, dims=1))


# Bits, norms included: the float64 sums of squares differ in order only, which shows in the FP32
# mean about once in 10^8 rows.
@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize(("count", "dim"), [(4, 1500), (4, 48), (2, 64), (3, 1)])
def test_kernels_equal_the_references(count: int, dim: int, device: str) -> None:
    """Hostile values; streams and outputs apart in poisoned buffers, coefficients strided."""
    inputs = hostile(6, count, dim, seed=dim)
    here = inputs.to(device)
    apart = replace(
        here,
        streams=spaced(here.streams),
        output=spaced(here.output),
        pre=spaced(here.pre),
        post=spaced(here.post),
        comb=here.comb.mT.contiguous().mT,
        weight=here.weight.repeat_interleave(2)[::2],
    )
    want = reference(inputs)
    assert all_same(kernel(apart), want)
    swapped = here.streams.transpose(1, 2).contiguous().transpose(1, 2)
    assert all_same(kernel(replace(here, streams=swapped)), want)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 4096])
def test_kernels_equal_the_references_at_real_sizes(num_rows: int) -> None:
    inputs = bench_inputs(num_rows, "cuda")
    want = reference(inputs)
    some = torch.arange(0, num_rows, 97)
    on_cpu = reference(inputs.rows(some.cuda()).to("cpu"))
    assert all_same(tuple(out[some.cuda()] for out in want), on_cpu)
    for got, expected in zip(kernel(inputs), want, strict=True):
        assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("device", MODES)
def test_bad_values_stay_in_their_row_and_channel(device: str) -> None:
    inputs = bench_inputs(3, "cpu", dim=32)
    inputs.streams[1, 2, 7] = torch.nan
    collapsed, expanded, normed, fused, _ = kernel(inputs.to(device))
    assert collapsed.isnan().sum() == 1
    assert expanded.isnan().sum() == 4
    assert same_bits(fused, expanded)
    # A norm spreads it over its row.
    assert normed.isnan().all(dim=1).tolist() == [False, True, False]
    assert normed.isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=st.integers(0, 2**31), chosen=st.lists(st.integers(0, 4), max_size=6))
def test_a_row_does_not_depend_on_the_others(device: str, seed: int, chosen: list[int]) -> None:
    inputs = hostile(5, 4, 24, seed)
    index = torch.tensor(chosen, dtype=torch.int64)
    want = tuple(out[index] for out in reference(inputs))
    assert all_same(reference(inputs.rows(index)), want)
    assert all_same(kernel(inputs.rows(index).to(device)), want)


@pytest.mark.parametrize("device", MODES)
def test_no_rows(device: str) -> None:
    none = bench_inputs(2, "cpu", dim=16).rows(torch.zeros(0, dtype=torch.int64)).to(device)
    shapes = [tuple(out.shape) for out in kernel(none)]
    assert shapes == [(0, 16), (0, 4, 16), (0, 16), (0, 4, 16), (0, 16)]


@pytest.mark.parametrize(
    ("dim", "block_dim", "num_warps"), [(5120, 1024, 4), (512, 512, 2), (48, 64, 1), (1, 1, 1)]
)
def test_launch_choice_depends_on_the_row_only(dim: int, block_dim: int, num_warps: int) -> None:
    choice = module._choose_launch(dim)
    assert (choice.block_dim, choice.num_warps) == (block_dim, num_warps)


def test_public_functions_name_what_does_not_fit() -> None:
    inputs = bench_inputs(4, "cpu", dim=16)
    with pytest.raises(ValueError, match="streams expected dtype bfloat16, got float32"):
        hc_collapse(inputs.streams.float(), inputs.pre)
    with pytest.raises(ValueError, match=r"pre expected shape \(4, 4\), got \(4, 3\)"):
        hc_collapse(inputs.streams, inputs.pre[:, 1:])
    with pytest.raises(ValueError, match=r"output expected shape \(4, 16\), got \(4, 8\)"):
        hc_expand(*replace(inputs, output=inputs.output[:, :8]).expand)
    with pytest.raises(ValueError, match="comb expected dtype float32, got float64"):
        hc_expand(*replace(inputs, comb=inputs.comb.double()).expand)
    with pytest.raises(ValueError, match="weight expected dtype bfloat16, got float32"):
        hc_collapse_norm(*replace(inputs, weight=inputs.weight.float()).collapse_norm)
    with pytest.raises(
        ValueError, match=r"weight expected shape \(16\), got \(8\)|weight expected"
    ):
        hc_expand_collapse_norm(*replace(inputs, weight=inputs.weight[:8]).expand_collapse_norm)


def test_ops_are_registered_correctly() -> None:
    inputs, ops = bench_inputs(3, "cpu", dim=16), torch.ops.pcpkit
    torch.library.opcheck(ops.hc_collapse.default, inputs.collapse)
    torch.library.opcheck(ops.hc_expand.default, inputs.expand)
    torch.library.opcheck(ops.hc_collapse_norm.default, inputs.collapse_norm)
    torch.library.opcheck(ops.hc_expand_collapse_norm.default, inputs.expand_collapse_norm)


def step(inputs: StreamInputs) -> Outputs:
    """All public functions."""
    return (
        hc_collapse(*inputs.collapse),
        hc_expand(*inputs.expand),
        hc_collapse_norm(*inputs.collapse_norm),
        *hc_expand_collapse_norm(*inputs.expand_collapse_norm),
    )


def test_compiles_into_one_graph() -> None:
    inputs = bench_inputs(3, "cpu", dim=16)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all_same(compiled(inputs), step(inputs))


@pytest.mark.gpu
def test_inductor_and_cuda_graph_give_the_same_bits() -> None:
    inputs = bench_inputs(64, "cuda")
    want = step(inputs)
    assert all_same(torch.compile(step, fullgraph=True)(inputs), want)
    captured, graph = (
        replace(inputs, streams=torch.zeros_like(inputs.streams)),
        torch.cuda.CUDAGraph(),
    )
    with torch.cuda.graph(graph):
        got = step(captured)
    captured.streams.copy_(inputs.streams)
    graph.replay()
    assert all_same(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("strides", [(1 << 30, 512, 1), (512, 1 << 30, 1)])
def test_offsets_past_2_to_31(strides: tuple[int, int, int]) -> None:
    """Rows, then streams, 2^30 elements apart: the third lies beyond 2^31."""
    needed = ((3 << 30) + 4 * 512) * 2
    if torch.cuda.mem_get_info()[0] < needed + (1 << 30):
        pytest.skip(f"needs {needed} bytes of device memory")
    inputs = bench_inputs(4, "cpu", dim=512)
    far = torch.empty(needed // 2, dtype=torch.bfloat16, device="cuda")
    far = far.as_strided((4, 4, 512), strides)
    far.copy_(inputs.streams)
    assert all_same(kernel(replace(inputs.to("cuda"), streams=far)), reference(inputs))
