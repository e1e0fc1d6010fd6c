"""linear_fp8_partials: the sums that linear_fp8 adds, one by one and over a split of the input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.formats import e4m3_decode, e8m0_decode
from pcpkit.kernels import linear as module
from pcpkit.kernels.linear import linear_fp8, linear_fp8_partials, quantized_input

from .bits import MODES, same_bits, spaced
from .inputs_linear import LinearInputs, draw_linear
from .test_linear import integer_inputs

few = settings(max_examples=15)
seeds = st.integers(0, 2**31)


def run(inputs: LinearInputs, device: str, groups: int, quantize: bool = True) -> Tensor:
    """The kernels' result: interpreted on the CPU, compiled on CUDA."""
    return module._launch_fp8_partials(*inputs.to(device).fp8, quantize, groups)


def added(partials: Tensor) -> Tensor:
    """In ascending group order, each addition rounded to FP32, then once to BF16."""
    total = partials[:, 0].clone()
    for group in range(1, partials.shape[1]):
        total += partials[:, group]
    return total.bfloat16()


def part(inputs: LinearInputs, index: int, size: int) -> LinearInputs:
    """What rank `index` of `size` holds: its channels of the rows and of the weight."""
    x, weight, scale = inputs.fp8
    count = x.shape[1] // size
    cut = slice(index * count, (index + 1) * count)
    blocks = slice(index * count // 32, (index + 1) * count // 32)
    return LinearInputs(x=x[:, cut], weight=weight[:, cut], scale=scale[:, blocks])


@pytest.mark.parametrize("quantize", [True, False])
def test_reference_by_hand(quantize: bool) -> None:
    """Exact sums in Python, rounded once to FP32."""
    inputs = draw_linear(2, 40, 96, seed=1)
    got = linear_fp8_partials(*inputs.fp8, quantize, 3)
    assert got.shape == (2, 3, 40)
    assert got.dtype == torch.float32
    rows = quantized_input(inputs.x, quantize).tolist()
    weight, scale = inputs.fp8[1:]
    values, factors = e4m3_decode(weight).tolist(), e8m0_decode(scale).tolist()
    for row in range(2):
        for group in range(3):
            span = range(32 * group, 32 * (group + 1))
            for column in (0, 31, 32, 39):
                terms = [
                    rows[row][k] * values[column][k] * factors[column // 32][k // 32] for k in span
                ]
                assert float(got[row, group, column]) == float(torch.tensor(math.fsum(terms)))


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(("depth", "groups"), [(128, 1), (128, 2), (128, 4), (384, 3), (192, 6)])
def test_sum_is_linear_fp8(device: str, quantize: bool, depth: int, groups: int) -> None:
    """Bit for bit, groups of 32 and of 64 channels and more; random values, so order shows."""
    inputs = draw_linear(7, 72, depth, seed=depth + groups)
    assert same_bits(
        added(linear_fp8_partials(*inputs.fp8, quantize, groups)),
        linear_fp8(*inputs.fp8, quantize, groups),
    )
    whole = module._launch_fp8(*inputs.to(device).fp8, quantize, groups)
    assert same_bits(added(run(inputs, device, groups, quantize)), whole)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("quantize", [True, False])
def test_ranks_hold_the_partials_of_one(device: str, size: int, quantize: bool) -> None:
    """A rank's slice of the channels gives its partials, whatever the other ranks hold."""
    inputs = draw_linear(5, 64, 256, seed=size)
    parts = [part(inputs, index, size) for index in range(size)]
    whole = linear_fp8_partials(*inputs.fp8, quantize, 4)
    split = [linear_fp8_partials(*one.fp8, quantize, 4 // size) for one in parts]
    assert same_bits(torch.cat(split, dim=1), whole)
    split = [run(one, device, 4 // size, quantize) for one in parts]
    assert same_bits(torch.cat(split, dim=1), run(inputs, device, 4, quantize))


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(("depth", "groups"), [(128, 2), (192, 3), (96, 3), (64, 1)])
def test_kernel_equals_the_reference_on_exact_sums(
    device: str, quantize: bool, depth: int, groups: int
) -> None:
    inputs = integer_inputs(19, 72, depth)
    want = module.linear_fp8_partials_reference(*inputs.fp8, quantize, groups)
    assert same_bits(run(inputs, device, groups, quantize), want)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("quantize", [True, False])
def test_kernel_is_within_fp32_error(device: str, quantize: bool) -> None:
    inputs = draw_linear(6, 72, 256, seed=4)
    got = run(inputs, device, 2, quantize).cpu().double()
    rows, dense = quantized_input(inputs.x, quantize).double(), inputs.dense.double()
    for group in range(2):
        cut = slice(128 * group, 128 * (group + 1))
        exact = rows[:, cut] @ dense[:, cut].t()
        bound = 128 * 2**-23 * (rows[:, cut].abs() @ dense[:, cut].abs().t())
        assert ((got[:, group] - exact).abs() <= bound).all()


@pytest.mark.parametrize("device", MODES)
def test_strided_tensors_between_nan(device: str) -> None:
    inputs = integer_inputs(5, 96, 128)
    x, weight, scale = (spaced(tensor) for tensor in inputs.to(device).fp8)
    for quantize in (True, False):
        want = module.linear_fp8_partials_reference(*inputs.fp8, quantize, 2)
        assert same_bits(module._launch_fp8_partials(x, weight, scale, quantize, 2), want)
        columns = x.t().contiguous().t()
        got = module._launch_fp8_partials(columns, weight, scale, quantize, 2)
        assert same_bits(got, want)


@pytest.mark.parametrize("device", MODES)
def test_special_values_stay_in_their_row_and_group(device: str) -> None:
    inputs = integer_inputs(4, 64, 128)
    x = inputs.x.clone()
    x[1, 3], x[2, 100] = math.nan, math.inf
    for quantize in (True, False):
        got = module._launch_fp8_partials(x.to(device), *inputs.to(device).fp8[1:], quantize, 2)
        want = module.linear_fp8_partials_reference(inputs.x, *inputs.fp8[1:], quantize, 2)
        assert got[1, 0].isnan().all()
        assert not got[2, 1].isfinite().any() if quantize else not got[2, 1].isfinite().all()
        clean = torch.ones(4, 2, dtype=torch.bool)
        clean[1, 0] = clean[2, 1] = False
        assert same_bits(got.cpu()[clean], want[clean])


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=seeds, data=st.data())
def test_rows_do_not_depend_on_each_other(device: str, seed: int, data: st.DataObject) -> None:
    inputs = draw_linear(6, 64, 128, seed=seed)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, 5), max_size=9)), dtype=torch.int64)
    want = linear_fp8_partials(*inputs.fp8, True, 2)
    assert same_bits(linear_fp8_partials(*inputs.rows(chosen).fp8, True, 2), want[chosen])
    whole = run(inputs, device, 2).cpu()
    assert same_bits(run(inputs.rows(chosen), device, 2).cpu(), whole[chosen])


@pytest.mark.parametrize("device", MODES)
def test_no_rows(device: str) -> None:
    assert run(draw_linear(0, 64, 64), device, 2).shape == (0, 2, 64)


def test_public_function_names_what_does_not_fit() -> None:
    x, weight, scale = draw_linear(2, 64, 128).fp8
    with pytest.raises(ValueError, match=r"x expected shape \(\*, 128\), got \(2, 127\)"):
        linear_fp8_partials(x[:, 1:], weight, scale, True, 2)
    with pytest.raises(ValueError, match="x expected dtype bfloat16, got float32"):
        linear_fp8_partials(x.float(), weight, scale, True, 2)
    with pytest.raises(ValueError, match="weight expected dtype uint8, got bfloat16"):
        linear_fp8_partials(x, weight.bfloat16(), scale, True, 2)
    with pytest.raises(ValueError, match="num_groups expected to cut 128 input features"):
        linear_fp8_partials(x, weight, scale, True, 3)


def test_op_is_registered_correctly() -> None:
    x, weight, scale = draw_linear(2, 64, 64).fp8
    torch.library.opcheck(torch.ops.pcpkit.linear_fp8_partials.default, (x, weight, scale, True, 2))


def test_compiles_into_one_graph() -> None:
    x, weight, scale = draw_linear(2, 64, 64).fp8

    def layer(x: Tensor) -> Tensor:
        return linear_fp8_partials(x, weight, scale, True, 2)

    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert same_bits(got, layer(x))


# --- compiled, at the size of the model ---------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 128, 300, 2048])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_output_projection_split_over_ranks(num_rows: int, size: int) -> None:
    """Eight groups of 1,024 channels: one rank's `linear_fp8` has the bits of any split."""
    inputs = draw_linear(num_rows, 5120, 8192, seed=size, device="cuda")
    want = linear_fp8(*inputs.fp8, True, 8)
    parts = [part(inputs, index, size) for index in range(size)]
    split = [linear_fp8_partials(*one.fp8, True, 8 // size) for one in parts]
    assert same_bits(added(torch.cat(split, dim=1)), want)


@pytest.mark.gpu
def test_inductor_and_cuda_graph_give_the_same_bits() -> None:
    x, weight, scale = draw_linear(40, 512, 512, device="cuda").fp8

    def layer(x: Tensor) -> Tensor:
        return linear_fp8_partials(x, weight, scale, True, 2)

    want = layer(x)
    assert same_bits(torch.compile(layer, fullgraph=True)(x), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layer(x)
    got.zero_()
    graph.replay()
    assert same_bits(got, want)
