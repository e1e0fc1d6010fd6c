"""linear_fp8, linear_grouped, linear_bf16: reference by hand, kernel within FP32 error of exact.

A kernel adds K exact products in FP32, on the GPU 16 at a time with truncation. Each of at most K
additions errs by at most 2^-23 of the sum of magnitudes so far, so ``error_bound`` holds for any
order; tests/kernels/test_linear_device.py compares the actual error with that of cuBLAS.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.formats import e4m3_decode, e8m0_decode
from pcpkit.kernels import linear as module
from pcpkit.kernels._gemm import _TILES, choose_gemm, gemm
from pcpkit.kernels._operand import prepare_operand
from pcpkit.kernels.linear import linear_bf16, linear_fp8, linear_grouped, quantized_input

from .bits import MODES, base_of, bits, same_bits, spaced
from .inputs_linear import LinearInputs, draw_linear

few = settings(max_examples=15)
seeds = st.integers(0, 2**31)


def error_bound(x: Tensor, dense: Tensor) -> Tensor:
    """Of any FP32 sum of ``x [n, k]`` times ``dense [m, k]``: K 2^-23 times the magnitudes."""
    return x.shape[1] * 2**-23 * (x.double().abs() @ dense.double().abs().t())


def check_close(got: Tensor, x: Tensor, dense: Tensor) -> None:
    """``got`` lies between the roundings of exact minus bound and exact plus bound."""
    exact, bound = x.double() @ dense.double().t(), error_bound(x, dense)
    assert (got >= (exact - bound).to(got.dtype)).all()
    assert (got <= (exact + bound).to(got.dtype)).all()


def mxfp8_by_hand(values: list[float]) -> list[float]:
    """One group of 32: nearest multiple of the E4M3 step at a power-of-two scale, ties to even."""
    scale = 2.0 ** math.ceil(math.log2(max(1e-4, *(abs(v) for v in values)) / 448))
    result = []
    for value in values:
        scaled = value / scale
        step = 2.0 ** (max(math.frexp(scaled)[1] - 1, -6) - 3)
        result.append(max(-448.0, min(448.0, round(scaled / step) * step)) * scale)
    return result


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_fp8_reference_by_hand(quantize: bool, parts: int) -> None:
    x, weight, scale = draw_linear(2, 40, 128, seed=1).fp8
    got = linear_fp8(x, weight, scale, quantize, parts)
    values, factors = e4m3_decode(weight).tolist(), e8m0_decode(scale).tolist()
    for row in range(2):
        channels = x[row].tolist()
        if quantize:
            channels = [v for i in range(0, 128, 32) for v in mxfp8_by_hand(channels[i : i + 32])]
        for col in (0, 31, 32, 39):
            terms = [
                channel * values[col][k] * factors[col // 32][k // 32]
                for k, channel in enumerate(channels)
            ]
            size = 128 // parts
            total = torch.zeros((), dtype=torch.float32)
            for start in range(0, 128, size):
                total += torch.tensor(math.fsum(terms[start : start + size]), dtype=torch.float32)
            assert got[row, col] == total.bfloat16()


def test_grouped_reference_is_one_linear_a_group() -> None:
    x, weight, scale = draw_linear(3 * 2, 128, 64, seed=2).fp8
    got = linear_grouped(x.view(3, 2, 64), weight, scale)
    for group in range(2):
        rows = slice(64 * group, 64 * (group + 1))
        scales = scale[2 * group : 2 * (group + 1)]
        want = linear_fp8(x.view(3, 2, 64)[:, group], weight[rows], scales, False)
        assert same_bits(got[:, group], want)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "num_cols", "depth", "parts"),
    [(3, 96, 128, 1), (17, 64, 192, 1), (2, 72, 96, 1), (2, 40, 32, 1), (5, 64, 384, 3)],
)
def test_fp8_kernel_is_within_fp32_error(
    device: str, quantize: bool, num_rows: int, num_cols: int, depth: int, parts: int
) -> None:
    inputs = draw_linear(num_rows, num_cols, depth, seed=num_cols)
    got = module._launch_fp8(*inputs.to(device).fp8, quantize, parts).cpu()
    check_close(got, quantized_input(inputs.x, quantize), inputs.dense)


@pytest.mark.parametrize("device", MODES)
def test_grouped_kernel_is_within_fp32_error(device: str) -> None:
    """Groups of 40 columns: tiles, scale blocks and groups all end at different columns."""
    inputs = draw_linear(5 * 3, 3 * 40, 96, seed=3)
    there = inputs.to(device)
    x, weight, scale = there.fp8
    got = module._launch_grouped(x.view(5, 3, 96), weight, scale).cpu()
    for group in range(3):
        rows, dense = inputs.x.view(5, 3, 96)[:, group], inputs.dense.view(3, 40, 96)[group]
        check_close(got[:, group], rows, dense)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bf16_kernel_is_within_fp32_error(
    device: str, x_dtype: torch.dtype, weight_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """FP32 operands keep all 24 bits: a product rounded to TF32 would miss by 2^-11."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5, 100, generator=generator).to(x_dtype)
    weight = torch.randn(70, 100, generator=generator).to(weight_dtype)
    got = module._launch_bf16(x.to(device), weight.to(device), out_dtype).cpu()
    assert got.dtype == out_dtype
    check_close(got, x, weight)


def integer_inputs(num_rows: int, num_cols: int, depth: int) -> LinearInputs:
    """Sums of small integers: exact in FP32 in any order, so results are equal, not close."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-8, 9, (num_rows, depth), generator=generator).bfloat16()
    codes = torch.randint(0, 0x50, (num_cols, depth), generator=generator).to(torch.uint8) & 0xF8
    signs = torch.randint(0, 2, (num_cols, depth), generator=generator).to(torch.uint8) << 7
    scale = torch.randint(133, 136, (-(-num_cols // 32), depth // 32), generator=generator)
    return LinearInputs(x=x, weight=codes | signs, scale=scale.to(torch.uint8))


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("kind", ["fp8", "fp8 parts", "bf16", "fp32"])
def test_every_tile_computes_the_same(device: str, kind: str) -> None:
    """Rows, columns and channels end within every tile; what lies around the output is kept."""
    parts = 2 if kind == "fp8 parts" else 1
    inputs = integer_inputs(19, 72, 192)
    want = module.linear_fp8_reference(*inputs.fp8, False, parts)
    there = inputs.to(device)
    for tile in _TILES[kind]:
        out = spaced(torch.zeros(19, 1, 72, dtype=torch.bfloat16, device=device))
        x, weight, scale = there.x, there.weight, there.scale
        if scale is None or not kind.startswith("fp8"):
            weight, scale = there.dense.bfloat16(), None
        order = 8 if kind == "fp8" else 0
        x = prepare_operand(x, False, order)
        if kind == "fp32":
            x = x.float()
        gemm(x.unsqueeze(1), weight, scale, out, num_parts=parts, order=order, choice=tile)
        assert same_bits(out[:, 0], want), tile
        out.fill_(float("nan"))
        assert base_of(out).isnan().all(), tile


@pytest.mark.parametrize("device", MODES)
def test_strided_tensors_between_nan(device: str) -> None:
    inputs = integer_inputs(5, 96, 128)
    x, weight, scale = (spaced(tensor) for tensor in inputs.to(device).fp8)
    for quantize in (True, False):
        want = module.linear_fp8_reference(*inputs.fp8, quantize)
        assert same_bits(module._launch_fp8(x, weight, scale, quantize), want)
    columns = inputs.x.to(device).t().contiguous().t()
    assert columns.stride(1) != 1
    got = module._launch_fp8(columns, weight, scale, True)
    assert same_bits(got, module.linear_fp8_reference(*inputs.fp8, True))
    grouped = spaced(inputs.x.to(device).view(5, 2, 64))
    got = module._launch_grouped(grouped, weight[:, :64], scale[:, :2])
    want = module.linear_grouped_reference(
        inputs.x.view(5, 2, 64), inputs.weight[:, :64], inputs.fp8[2][:, :2]
    )
    assert same_bits(got, want)
    dense = spaced(inputs.dense.bfloat16().to(device))
    want = module.linear_bf16_reference(inputs.x, inputs.dense.bfloat16(), torch.float32)
    assert same_bits(module._launch_bf16(x, dense, torch.float32), want)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("quantize", [True, False])
def test_special_inputs_stay_in_their_row(device: str, quantize: bool) -> None:
    """NaN and infinity spoil every output of their row and no other; zero rows give zero."""
    specials = [math.nan, math.inf, -math.inf, 3e38, 1e-40, 448.0, 449.0, 1e-4]
    inputs = integer_inputs(len(specials) + 2, 64, 128)
    x = inputs.x.clone()
    for row, value in enumerate(specials):
        x[row, 70] = value
    x[-2] = 0.0
    x[-1] = -0.0
    got = module._launch_fp8(x.to(device), *inputs.to(device).fp8[1:], quantize).cpu()
    want = module.linear_fp8_reference(x, *inputs.fp8[1:], quantize)
    # An infinity meets zero weights, so the row mixes NaN and infinities unless it is quantized.
    assert torch.equal(got[:3].isfinite(), want[:3].isfinite())
    assert not got[0].isfinite().any()
    check_close(got[3:], quantized_input(x[3:], quantize), inputs.dense)
    assert (got[-2:] == 0).all()


@pytest.mark.parametrize("device", MODES)
def test_nan_weights_stay_in_their_columns(device: str) -> None:
    inputs = integer_inputs(3, 96, 128)
    weight, scale = inputs.weight.clone(), inputs.fp8[2].clone()
    weight[5, 100] = 0x7F
    scale[2, 1] = 255
    want = module.linear_fp8_reference(inputs.x, weight, scale, False)
    got = module._launch_fp8(inputs.x.to(device), weight.to(device), scale.to(device), False)
    assert want[:, 5].isnan().all()
    assert want[:, 64:].isnan().all()
    assert same_bits(got, want)


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=seeds, data=st.data())
def test_rows_do_not_depend_on_each_other(device: str, seed: int, data: st.DataObject) -> None:
    inputs = draw_linear(6, 64, 128, seed=seed)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, 5), max_size=9)), dtype=torch.int64)
    want = module.linear_fp8_reference(*inputs.fp8, True)
    assert same_bits(module.linear_fp8_reference(*inputs.rows(chosen).fp8, True), want[chosen])
    there = inputs.to(device)
    whole = module._launch_fp8(*there.fp8, True, 2)
    some = there.rows(chosen.to(device))
    assert same_bits(module._launch_fp8(*some.fp8, True, 2), whole[chosen.to(device)])


@pytest.mark.parametrize("device", MODES)
def test_no_rows(device: str) -> None:
    x, weight, scale = draw_linear(0, 64, 64).to(device).fp8
    assert module._launch_fp8(x, weight, scale, True).shape == (0, 64)
    assert module._launch_grouped(x.view(0, 2, 64), weight, scale).shape == (0, 2, 32)
    assert module._launch_bf16(x, weight.bfloat16(), torch.float32).shape == (0, 64)


def test_public_functions_name_what_does_not_fit() -> None:
    x, weight, scale = draw_linear(2, 64, 128).fp8
    with pytest.raises(ValueError, match=r"x expected shape \(\*, 128\), got \(2, 127\)"):
        linear_fp8(x[:, 1:], weight, scale, True)
    with pytest.raises(ValueError, match="weight expected dtype uint8, got bfloat16"):
        linear_fp8(x, weight.bfloat16(), scale, True)
    with pytest.raises(ValueError, match="num_groups expected to cut 128 input features"):
        linear_fp8(x, weight, scale, True, 3)
    with pytest.raises(ValueError, match=r"x expected shape \(\*, \*, 128\), got \(2, 128\)"):
        linear_grouped(x, weight, scale)
    with pytest.raises(ValueError, match="x expected dtype bfloat16 or float32, got uint8"):
        linear_bf16(weight, weight)
    with pytest.raises(ValueError, match="weight expected a contiguous last dim, got strides"):
        module._launch_bf16(x, weight.bfloat16().t().contiguous().t())


@pytest.mark.parametrize(
    ("kind", "num_rows", "num_cols", "rows", "cols"),
    [
        ("fp8", 4096, 32768, 256, 128),
        ("fp8", 4096, 1280, 128, 128),
        ("fp8", 1, 512, 16, 64),
        ("fp8", 64, 5120, 64, 64),
        ("fp8 parts", 4096, 5120, 128, 128),
        ("bf16", 1, 129280, 16, 64),
        ("fp32", 300, 24, 32, 64),
    ],
)
def test_launch_choice(kind: str, num_rows: int, num_cols: int, rows: int, cols: int) -> None:
    choice = choose_gemm(kind, num_rows, num_cols, 1)
    assert (choice.block_rows, choice.block_cols) == (rows, cols)


def test_every_tile_keeps_the_instruction() -> None:
    """64 weight rows a group of four warps: the condition under which Triton emits wgmma."""
    for tiles in (_TILES["fp8"], _TILES["fp8 parts"], _TILES["bf16"]):
        for tile in tiles:
            assert tile.num_warps % 4 == 0
            assert tile.block_cols % (16 * tile.num_warps) == 0


def test_ops_are_registered_correctly() -> None:
    x, weight, scale = draw_linear(2, 64, 64).fp8
    torch.library.opcheck(torch.ops.pcpkit.linear_fp8.default, (x, weight, scale, True, 1))
    torch.library.opcheck(
        torch.ops.pcpkit.linear_grouped.default, (x.view(1, 2, 64), weight, scale)
    )
    dense = weight.bfloat16()
    torch.library.opcheck(torch.ops.pcpkit.linear_bf16.default, (x, dense, torch.float32))


def test_compiles_into_one_graph() -> None:
    x, weight, scale = draw_linear(2, 64, 64).fp8

    def layer(x: Tensor) -> Tensor:
        return linear_bf16(linear_fp8(x, weight, scale, True), weight.bfloat16())

    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert same_bits(got, layer(x))
    assert bits(got).any()
