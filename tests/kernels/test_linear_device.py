"""The linear layers compiled, at the sizes of the model: error, row-invariance, graphs, offsets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pcpkit.kernels import linear as module
from pcpkit.kernels._gemm import _TILES, gemm
from pcpkit.kernels._operand import prepare_operand
from pcpkit.kernels.linear import linear_bf16, linear_fp8, linear_grouped, quantized_input

from .bits import same_bits
from .inputs_linear import PROJECTIONS, LinearInputs, bench_inputs, draw_linear

pytestmark = pytest.mark.gpu

ROW_COUNTS = (1, 2, 16, 17, 33, 64, 65, 128, 300, 1000, 4096)
"""Numbers of rows for which the launch takes every tile."""


def run(name: str, inputs: LinearInputs) -> Tensor:
    """The public function of a projection, as the model calls it."""
    sizes = PROJECTIONS[name]
    if not sizes.fp8:
        out_dtype = torch.float32 if sizes.fp32_out else torch.bfloat16
        return linear_bf16(inputs.x, inputs.weight, out_dtype)
    if sizes.groups > 1:
        return linear_grouped(*inputs.fp8)
    return linear_fp8(*inputs.fp8, sizes.quantize, sizes.parts)


def root_mean_square(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("name", ["wq_a", "wq_b tp4", "wkv", "shared w2", "router"])
def test_error_is_that_of_cublas(name: str) -> None:
    """FP32 results: the error against float64 is at most four times that of cuBLAS.

    Both add exact products of BF16 operands in FP32 on the tensor cores, which truncate, so the
    error grows with the length of a chain of additions. cuBLAS may cut K into a few chains, hence
    the factor. FP8 instructions, which keep about 14 bits of a sum, would miss it by far.
    """
    num_rows = 4096
    inputs = bench_inputs(name, num_rows)
    x = quantized_input(inputs.x, PROJECTIONS[name].fp8 and PROJECTIONS[name].quantize)
    out = torch.full((num_rows, 1, inputs.weight.shape[0]), torch.nan, device="cuda")
    gemm(x.unsqueeze(1), inputs.weight, inputs.scale, out)
    dense = inputs.dense
    exact = x.double() @ dense.double().t()
    peer = torch.mm(x, dense.bfloat16().t(), out_dtype=torch.float32)
    assert root_mean_square(out[:, 0] - exact) <= 4 * root_mean_square(peer - exact)


@pytest.mark.parametrize("name", [name for name in PROJECTIONS if name != "head"])
def test_projection_is_within_fp32_error(name: str) -> None:
    """At most K additions, each within 2^-23 of the magnitudes so far; one rounding at the end."""
    sizes = PROJECTIONS[name]
    inputs = bench_inputs(name, 150)
    got = run(name, inputs).view(150, sizes.groups, -1)
    rows = quantized_input(inputs.x, sizes.fp8 and sizes.quantize).view(150, sizes.groups, -1)
    dense = inputs.dense.view(sizes.groups, -1, sizes.in_features)
    for group in range(sizes.groups):
        x, weight = rows[:, group].double(), dense[group].double()
        exact = x @ weight.t()
        bound = sizes.in_features * 2**-23 * (x.abs() @ weight.abs().t())
        assert (got[:, group] >= (exact - bound).to(got.dtype)).all()
        assert (got[:, group] <= (exact + bound).to(got.dtype)).all()


@pytest.mark.parametrize("name", PROJECTIONS)
def test_rows_do_not_depend_on_the_number_of_rows(name: str) -> None:
    counts = [count for count in ROW_COUNTS if name != "head" or count <= 300]
    inputs = bench_inputs(name, max(counts))
    whole = run(name, inputs)
    for count in counts:
        chosen = torch.randperm(max(counts), generator=torch.Generator().manual_seed(count))
        chosen = chosen[:count].cuda()
        assert same_bits(run(name, inputs.rows(chosen)), whole[chosen]), count


@pytest.mark.parametrize("kind", ["fp8", "fp8 parts", "bf16"])
def test_every_tile_gives_the_same_bits(kind: str) -> None:
    """Random values, so every order of additions and every instruction would show."""
    inputs = draw_linear(300, 720, 1344, fp8=kind != "bf16", seed=1, device="cuda")
    parts, order = (7, 8) if kind == "fp8 parts" else (1, 8 if kind == "fp8" else 0)
    x = prepare_operand(inputs.x, kind != "bf16", order).unsqueeze(1)
    results: list[Tensor] = []
    for tile in _TILES[kind]:
        out = torch.full((300, 1, 720), torch.nan, device="cuda")
        gemm(x, inputs.weight, inputs.scale, out, num_parts=parts, order=order, choice=tile)
        results.append(out)
    for tile, out in zip(_TILES[kind], results, strict=True):
        assert same_bits(out, results[0]), tile


def test_fp32_operands_at_a_real_size() -> None:
    x = torch.randn(70, 5120, device="cuda")
    weight = torch.randn(24, 5120, device="cuda")
    exact = x.double() @ weight.double().t()
    got = linear_bf16(x, weight, torch.float32)
    bound = 5120 * 2**-24 * (x.double().abs() @ weight.double().abs().t())
    assert ((got - exact).abs() <= bound).all()
    assert same_bits(linear_bf16(x[3:5], weight, torch.float32), got[3:5])


def test_inductor_and_cuda_graph_give_the_same_bits() -> None:
    inputs = draw_linear(40, 512, 512, device="cuda")
    x, weight, scale = inputs.fp8

    def layer(x: Tensor) -> Tensor:
        hidden = linear_fp8(x, weight, scale, True, 2)
        return linear_bf16(hidden, weight.bfloat16(), torch.float32)

    want = layer(x)
    assert same_bits(torch.compile(layer, fullgraph=True)(x), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layer(x)
    got.zero_()
    graph.replay()
    assert same_bits(got, want)


def test_offsets_past_2_to_31() -> None:
    """Rows 2^30 channels apart in, and more than 2^31 results out."""
    needed = 12 << 30
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed} bytes of device memory")
    inputs = draw_linear(4, 256, 128, device="cuda")
    buffer = torch.empty((3 << 30) + 128, dtype=torch.bfloat16, device="cuda")
    far = buffer.as_strided((4, 128), (1 << 30, 1))
    far.copy_(inputs.x)
    for quantize in (True, False):
        want = module._launch_fp8(*inputs.fp8, quantize)
        assert same_bits(module._launch_fp8(far, *inputs.fp8[1:], quantize), want)
    del buffer, far
    wide = draw_linear(16640, 129280, 64, device="cuda")
    got = linear_fp8(*wide.fp8, False)
    want = linear_fp8(*wide.rows(torch.tensor([0, 16639], device="cuda")).fp8, False)
    assert same_bits(got[[0, 16639]], want)
