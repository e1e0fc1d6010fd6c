"""Every device helper of `_jit` against `formats` and `_reference`: all codes, all BF16 values.

Interpreted on the CPU, compiled on the GPU; both run the same bodies.
"""

# A launch passes ints for constexpr parameters.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit import formats
from pcpkit.kernels import _jit, _reference

from .bits import MODES, same_bits

BLOCK = 4096


@triton.jit
def _elementwise_kernel(x_ptr, out_ptr, num_values, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < num_values, other=0)
    tl.store(out_ptr + at, FUNCTION(x), mask=at < num_values)


@triton.jit
def _quantize_kernel(
    x_ptr, code_ptr, scale_ptr, num_rows, FUNCTION: tl.constexpr, GROUP: tl.constexpr,
    CODES: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    channels = tl.arange(0, DIM)[None, :]
    x = tl.load(x_ptr + rows * DIM + channels, mask=rows < num_rows, other=0.0)
    codes, scales = FUNCTION(x, ROWS, DIM, GROUP)
    code = tl.arange(0, CODES)[None, :]
    tl.store(code_ptr + rows * CODES + code, codes, mask=rows < num_rows)
    group = tl.arange(0, DIM // GROUP)[None, :]
    tl.store(scale_ptr + rows * (DIM // GROUP) + group, scales, mask=rows < num_rows)


@triton.jit
def _inverse_rms_kernel(x_ptr, out_ptr, eps, DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * DIM + at, mask=at < DIM, other=0.0)
    tl.store(out_ptr + row, _jit.inverse_rms(x, DIM, eps))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a = tl.load(a_ptr + rows * N + columns)
    b = tl.load(b_ptr + rows * N + columns)
    acc = tl.full([N, N], 0.5, tl.float32)
    tl.store(out_ptr + rows * N + columns, _jit.dot(a, b, acc))


@triton.jit
def _minus_zeros_kernel(out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, _jit.minus_zeros([BLOCK]))


@pytest.mark.parametrize("device", MODES)
def test_minus_zeros_keep_their_sign(device: str) -> None:
    """The compiler makes +0.0 of `tl.full(shape, -0.0, ..)`, the interpreter does not."""
    out = torch.ones(16, device=device)
    _minus_zeros_kernel[(1,)](out, 16)
    assert same_bits(out, torch.full((16,), -0.0))


def _run(function: Any, x: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """FUNCTION of every value of the CPU tensor `x`, back on the CPU."""
    source = x.to(device)
    out = torch.empty(x.shape, dtype=dtype, device=device)
    _elementwise_kernel[(triton.cdiv(x.numel(), BLOCK),)](source, out, x.numel(), function, BLOCK)
    return out.cpu()


def _quantize(
    function: Any, x: Tensor, group: int, per_byte: int, device: str
) -> tuple[Tensor, Tensor]:
    rows, dim = x.shape
    codes = torch.empty(rows, dim // per_byte, dtype=torch.uint8, device=device)
    scales = torch.empty(rows, dim // group, dtype=torch.uint8, device=device)
    block = 2048 if device == "cpu" else 8
    _quantize_kernel[(triton.cdiv(rows, block),)](
        x.to(device), codes, scales, rows, function, group, dim // per_byte, block, dim
    )
    return codes.cpu(), scales.cpu()


def _all_bfloat16() -> Tensor:
    """Every BF16 value, as FP32."""
    return (torch.arange(65536, dtype=torch.int32) << 16).view(torch.float32)


def _around(values: Tensor) -> Tensor:
    """The FP32 values, their neighbours, and the negatives of all."""
    bits = values.abs().view(torch.int32)
    near = torch.cat([bits, bits - 1, bits + 1]).clamp(min=0).view(torch.float32)
    return torch.cat([near, -near])


def _random_bits(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).int().view(torch.float32)


@pytest.mark.parametrize("device", MODES)
def test_to_bfloat16_rounds_to_nearest_even(device: str) -> None:
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    bits = (torch.arange(65536, dtype=torch.int32) << 16)[:, None] + low
    x = bits.flatten().view(torch.float32)
    assert same_bits(_run(_jit.to_bfloat16, x, torch.bfloat16, device), x.bfloat16())


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("function", [_jit.from_bfloat16, _jit.widen])
def test_bfloat16_widens_exactly(function: Any, device: str) -> None:
    x = _all_bfloat16()
    assert same_bits(_run(function, x.bfloat16(), torch.float32, device), x)


@pytest.mark.parametrize("device", MODES)
def test_round_even_over_its_domain(device: str) -> None:
    halves = torch.cat([torch.arange(4096) / 2, 2.0**22 - torch.arange(4096) / 2])
    x = torch.cat([halves, torch.linspace(0, 2.0**22, 4096)])
    assert torch.equal(_run(_jit.round_even, x, torch.float32, device), torch.round(x))
    assert torch.equal(_run(_jit.round_even_int, x, torch.int32, device), torch.round(x).int())


@pytest.mark.parametrize("device", MODES)
def test_pow2ceil_matches_formats(device: str) -> None:
    powers = (torch.arange(256, dtype=torch.int32) << 23).view(torch.float32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3.4e38])
    x = torch.cat([_around(powers), special, _random_bits(BLOCK)])
    assert same_bits(_run(_jit.pow2ceil, x, torch.float32, device), formats.pow2ceil(x))


@pytest.mark.parametrize("device", MODES)
def test_e8m0_codec_and_inverse_over_all_bytes(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    scales = formats.e8m0_decode(codes)
    assert same_bits(_run(_jit.e8m0_decode, codes, torch.float32, device), scales)
    x = torch.cat([scales, torch.tensor([torch.inf, -torch.inf, -2.0, 0.0])])
    assert torch.equal(_run(_jit.e8m0_encode, x, torch.uint8, device), formats.e8m0_encode(x))
    powers = scales[1:254]
    assert torch.equal(_run(_jit.pow2_inverse, powers, torch.float32, device), 1.0 / powers)


@pytest.mark.parametrize("device", MODES)
def test_e4m3_codec_matches_formats(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = formats.e4m3_decode(codes)
    assert same_bits(_run(_jit.e4m3_decode, codes, torch.float16, device), values.half())
    finite = values[:127]
    midpoints = (finite[1:] + finite[:-1]) / 2
    edges = torch.tensor([448.0, 464.0, 480.0, torch.inf, 2.0**-10])
    x = torch.cat(
        [_all_bfloat16(), _around(torch.cat([finite, midpoints, edges])), _random_bits(65536)]
    )
    expected = torch.where(x.isnan(), 0x7F, formats.e4m3_encode(x))
    assert torch.equal(_run(_jit.e4m3_encode, x, torch.uint8, device), expected)


@pytest.mark.parametrize("device", MODES)
def test_e2m1_codec_matches_formats(device: str) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = formats.e2m1_decode(codes)
    assert same_bits(_run(_jit.e2m1_decode, codes, torch.float32, device), values)
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, torch.inf])
    near = _around(torch.cat([values[:8], midpoints]))
    x = torch.cat([_all_bfloat16(), near[~near.isnan()], _random_bits(65536)])
    # The sign bit of a NaN is part of the rule: +-6.
    expected = formats.e2m1_encode(x).int()
    assert torch.equal(_run(_jit.e2m1_encode, x, torch.int32, device), expected)


FORMATS = [
    pytest.param(_jit.quantize_mxfp8, formats.quantize_mxfp8, 32, 1, id="mxfp8"),
    pytest.param(_jit.quantize_mxfp4, formats.quantize_mxfp4, 32, 2, id="mxfp4"),
    pytest.param(_jit.quantize_nvfp4, formats.quantize_nvfp4, 16, 2, id="nvfp4"),
]
Quantizer = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def _assert_quantized(
    function: Any, reference: Quantizer, x: Tensor, group: int, per_byte: int, device: str
) -> None:
    codes, scales = _quantize(function, x, group, per_byte, device)
    expected_codes, expected_scales = reference(x, group)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected_codes)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize(("function", "reference", "group", "per_byte"), FORMATS)
def test_quantize_every_magnitude_as_the_largest(
    function: Any, reference: Quantizer, group: int, per_byte: int, device: str
) -> None:
    """Each BF16 value leads a group of its halves, ties, zeros; NaN and inf are among them."""
    largest = _all_bfloat16()[:, None]
    # Few-bit fractions hit the ties of E2M1 and E4M3 whenever the scale is exact.
    fractions = torch.arange(group, 0, -1) / group
    x = (largest * fractions).bfloat16().float()
    x[:, 1::2] *= -1.0
    x[:, -1] = -0.0
    _assert_quantized(function, reference, x, group, per_byte, device)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize(("function", "reference", "group", "per_byte"), FORMATS)
def test_quantize_random_and_hostile_groups(
    function: Any, reference: Quantizer, group: int, per_byte: int, device: str
) -> None:
    generator = torch.Generator().manual_seed(group + per_byte)
    x = torch.randn(256, 64, generator=generator) * torch.logspace(-9, 6, 256)[:, None]
    x = torch.cat([x.bfloat16().float(), _all_bfloat16().view(-1, 64)[torch.randperm(1024)[:256]]])
    x[0], x[1], x[2] = 0.0, -0.0, 2.0**-133
    # One bad value spoils its own group only; both infinities and a NaN with its sign bit set.
    x[3, 5], x[4, 40], x[5, 63] = torch.nan, torch.inf, -torch.inf
    x[6, 0] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    _assert_quantized(function, reference, x, group, per_byte, device)


@pytest.mark.parametrize("device", MODES)
def test_nvfp4_without_division_gives_the_code_of_every_quotient(device: str) -> None:
    """All BF16 values a group can hold, under each of the 127 scales: the bits of true division."""
    values = _all_bfloat16()[:32640]  # 0 and up, finite
    scales = formats.e4m3_decode(torch.arange(1, 127, dtype=torch.uint8))
    rows: list[Tensor] = []
    for scale in scales:
        # The largest BF16 value that still rounds to this scale leads each group.
        ratio = formats.e4m3_decode(formats.e4m3_encode(values / torch.tensor(6.0)))
        same = values[ratio == scale]
        leader = same.max()
        members = values[(values <= leader) & (values >= leader * 2.0**-8)]
        padding = -members.numel() % 15
        groups = torch.cat([members, members.new_zeros(padding)]).view(-1, 15)
        rows.append(torch.cat([leader.expand(groups.shape[0], 1), groups], dim=1))
    x = torch.cat(rows)
    x[:, 2::3] *= -1.0
    _assert_quantized(_jit.quantize_nvfp4, formats.quantize_nvfp4, x, 16, 2, device)


@pytest.mark.parametrize("device", MODES)
def test_exp_and_sigmoid_round_once_from_float64(device: str) -> None:
    x = torch.cat([torch.linspace(-110, 95, 65536), torch.tensor([torch.inf, -torch.inf, 0.0])])
    assert same_bits(_run(_jit.exp, x, torch.float32, device), _reference.exp(x))
    assert same_bits(_run(_jit.sigmoid, x, torch.float32, device), _reference.sigmoid(x))
    nan = torch.full((1,), torch.nan)
    assert _run(_jit.exp, nan, torch.float32, device).isnan().all()
    assert _run(_jit.sigmoid, nan, torch.float32, device).isnan().all()


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("dim", [1, 96, 512])
def test_inverse_rms_matches_reference(dim: int, device: str) -> None:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(24, dim, generator=generator) * torch.logspace(-30, 30, 24)[:, None]
    x[0], x[1, 0], x[2, 0] = 0.0, torch.inf, torch.nan
    out = torch.empty(24, device=device)
    _inverse_rms_kernel[(24,)](x.to(device), out, 1e-20, dim, triton.next_power_of_2(dim))
    assert same_bits(out.cpu(), _reference.inverse_rms(x, 1e-20)[:, 0])


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dot_multiplies_sixteen_bit_operands_exactly(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randint(-64, 65, (2, 32, 32), generator=generator).to(dtype)
    out = torch.empty(32, 32, device=device)
    _dot_kernel[(1,)](a.to(device), b.to(device), out, 32)
    # Integers below 2^24: every sum is exact in any order.
    assert torch.equal(out.cpu(), a.float() @ b.float() + 0.5)


def test_widening_dot_keeps_subnormal_operands() -> None:
    a, b = torch.zeros(2, 32, 32, dtype=torch.bfloat16)
    a[0, 0], b[0, 0] = 2.0**-130, 2.0**120
    out = torch.empty(32, 32)
    _dot_kernel[(1,)](a, b, out, 32)
    assert out[0, 0] == 0.5 + 2.0**-10
