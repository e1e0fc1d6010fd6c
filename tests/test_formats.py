"""Number formats and group quantisers against slow, independent oracles.

The oracles use numpy FP32 arithmetic for what the spec defines in FP32 and search a sorted table in
FP64 for rounding; they share no code with pcpkit.formats.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.formats import (
    NVFP4,
    RECORD_FORMATS,
    RecordFormat,
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_nvfp4,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    e8m0_decode,
    e8m0_encode,
    pack_e2m1,
    pow2ceil,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
    unpack_e2m1,
)

FORMATS = tuple(RECORD_FORMATS.values())
ALL_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
E2M1_GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NAN, INF = math.nan, math.inf
each_format = pytest.mark.parametrize("record", FORMATS, ids=lambda record: record.name)


def e4m3_grid() -> list[float]:
    """Values of codes 0x00 to 0x7e: 4 exponent bits, bias 7, 3 mantissa bits."""
    return [
        (code & 7) / 8 * 2.0**-6 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7)
        for code in range(127)
    ]


def nearest(values: np.ndarray, grid: list[float]) -> np.ndarray:
    """Code of the grid value with the smallest distance; the even code of two; not for NaN."""
    table = np.array(grid, dtype=np.float64)
    magnitude = np.minimum(np.abs(values.astype(np.float64)), table[-1])
    distance = np.abs(magnitude[:, None] - table[None, :])
    best = distance.min(axis=1, keepdims=True)
    # Of two equally near codes (always adjacent) exactly one is even.
    tied = (distance == best).sum(axis=1, keepdims=True) > 1
    odd = np.arange(len(grid))[None, :] % 2 == 1
    distance[tied & odd] = np.inf
    return distance.argmin(axis=1)


def signed(values: np.ndarray, codes: np.ndarray, sign_bit: int) -> np.ndarray:
    return codes + np.where(np.signbit(values), sign_bit, 0)


def with_ulps(values: np.ndarray) -> np.ndarray:
    """values, each with its FP32 neighbours, in both signs."""
    middle = values.astype(np.float32)
    below, above = np.nextafter(middle, np.float32(-1)), np.nextafter(middle, np.float32(1e9))
    every = np.concatenate([below, middle, above])
    return np.concatenate([every, -every])


def around_grid(grid: list[float]) -> np.ndarray:
    """All grid values, all midpoints and the saturation edge, with their neighbours."""
    table = np.array(grid)
    midpoints = (table[:-1] + table[1:]) / 2
    edges = np.array([table[-1] * 1.01, table[-1] * 1.04, table[-1] * 1.08, 1e6, 3e38])
    return with_ulps(np.concatenate([table, midpoints, edges]))


def all_bf16() -> Tensor:
    """Every finite bf16 value."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return every[torch.isfinite(every)]


def bits(x: Tensor) -> Tensor:
    """Integer view, so that NaN equals itself and -0 differs from 0."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    different = bits(actual) != bits(expected)
    assert not different.any(), (
        f"{int(different.sum())} of {different.numel()} differ, first: "
        f"{actual[different][0]} for {expected[different][0]}"
    )


def oracle_group(x: np.ndarray, name: str) -> tuple[list[int], int]:
    """(element codes, scale byte) of one group of finite FP32 values, from the spec text."""
    amax = np.max(np.abs(x))
    if name == "nvfp4":
        ratio = np.float32(max(amax, np.float32(6 * 2.0**-9))) / np.float32(6)
        byte = int(nearest(np.array([ratio]), e4m3_grid())[0])
        scale = np.float32(e4m3_grid()[byte])
    else:
        floor, limit = (1e-4, 448) if name == "mxfp8" else (6 * 2.0**-126, 6)
        inverse = np.float32(1) / np.float32(limit)
        mantissa, exponent = math.frexp(max(amax, np.float32(floor)) * inverse)
        exponent -= mantissa == 0.5
        byte, scale = exponent + 127, np.ldexp(np.float32(1), exponent)
    grid, sign_bit = (e4m3_grid(), 128) if name == "mxfp8" else (E2M1_GRID, 8)
    ratios = x / scale
    assert ratios.dtype == np.float32
    return signed(x, nearest(ratios, grid), sign_bit).tolist(), byte


def oracle_record(x: Tensor, record: RecordFormat) -> Tensor:
    """Record of rows [n, dim], group by group."""
    rows: list[list[int]] = []
    for row in x.float().numpy():
        groups = [oracle_group(part, record.name) for part in row.reshape(-1, record.group)]
        codes = [code for group, _ in groups for code in group]
        if record.element_bits == 4:
            codes = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
        rows.append(codes + [byte for _, byte in groups])
    return torch.tensor(rows, dtype=torch.uint8)


def random_rows(record: RecordFormat, num_rows: int, seed: int) -> Tensor:
    """bf16 rows whose groups range from below every floor to far above the E4M3 scale's maximum."""
    generator = torch.Generator().manual_seed(seed)
    dim = 4 * record.group
    size = torch.randint(-30, 16, (num_rows, 4, 1), generator=generator)
    values = torch.randn(num_rows, 4, record.group, generator=generator) * torch.exp2(size.float())
    return values.reshape(num_rows, dim).bfloat16()


finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def group_values(draw: st.DrawFn, size: int = 32) -> Tensor:
    """One group as fp32: any magnitudes, or magnitudes within a few powers of two."""
    near = st.integers(-40, 20).flatmap(
        lambda e: st.floats(-8.0, 8.0, width=32).map(lambda value: math.ldexp(value, e))
    )
    values = draw(
        st.lists(st.one_of(finite_floats, near, st.just(-0.0)), min_size=size, max_size=size)
    )
    return torch.tensor(values, dtype=torch.float64).float()


# Tables


def test_e4m3_all_codes_decode_and_round_trip() -> None:
    grid = torch.tensor(e4m3_grid())
    expected = torch.cat([grid, torch.tensor([NAN]), -grid, torch.tensor([NAN])])
    decoded = e4m3_decode(ALL_BYTES)
    assert torch.equal(decoded.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert_bits(decoded[finite], expected[finite])
    assert_bits(e4m3_encode(decoded)[finite], ALL_BYTES[finite])
    assert_bits(e4m3_decode(ALL_BYTES.view(torch.float8_e4m3fn)), decoded)
    assert_bits(e4m3_decode(ALL_BYTES.view(torch.int8)), decoded)


def test_e2m1_all_codes_decode_and_round_trip() -> None:
    codes = ALL_BYTES[:16]
    assert_bits(e2m1_decode(codes), torch.tensor(E2M1_GRID + [-value for value in E2M1_GRID]))
    assert_bits(e2m1_encode(e2m1_decode(codes)), codes)
    assert_bits(e2m1_decode(codes | 0xF0), e2m1_decode(codes))


def test_e8m0_all_bytes_decode_and_round_trip() -> None:
    decoded = e8m0_decode(ALL_BYTES)
    expected = torch.tensor([2.0 ** (byte - 127) for byte in range(255)])
    assert_bits(decoded[:255], expected)
    assert decoded[255].isnan()
    assert_bits(e8m0_encode(decoded), ALL_BYTES)
    assert_bits(e8m0_decode(ALL_BYTES.view(torch.float8_e8m0fnu)), decoded)
    hostile = torch.tensor([INF, NAN, -NAN, -1.0, -INF, 0.0])
    assert e8m0_encode(hostile).tolist() == [255, 255, 255, 255, 255, 0]


def test_pack_puts_the_even_channel_low_and_unpack_inverts_all_bytes() -> None:
    assert pack_e2m1(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    rows = ALL_BYTES.view(16, 16)
    assert unpack_e2m1(rows).shape == (16, 32)
    assert_bits(pack_e2m1(unpack_e2m1(rows)), rows)
    assert_bits(unpack_e2m1(rows.view(torch.int8)), unpack_e2m1(rows))


def test_pow2ceil_all_exponents_and_mantissa_edges() -> None:
    exponents = torch.arange(1, 255, dtype=torch.int32) << 23
    mantissas = torch.tensor([0, 1, 2, 0x3FFFFF, 0x400000, 0x7FFFFE, 0x7FFFFF], dtype=torch.int32)
    x = (exponents[:, None] | mantissas).view(torch.float32)
    actual = pow2ceil(x).double()
    assert torch.equal(actual[:-1, 0], x[:-1, 0].double())
    assert torch.equal(actual[:-1, 1:], 2 * x[:-1, :1].double().expand(-1, 6))
    assert actual[-1].tolist() == [2.0**127] + [INF] * 6
    subnormal = torch.tensor([1, 0x400000, 0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert pow2ceil(subnormal).tolist() == [2.0**-126] * 3
    assert pow2ceil(torch.tensor([0.0, INF])).tolist() == [0.0, INF]
    assert pow2ceil(torch.tensor([NAN, -NAN, -1.0, -0.0, -INF])).isnan().all()


# Rounding


def test_e4m3_rounding_matches_brute_force() -> None:
    values = around_grid(e4m3_grid())
    expected = signed(values, nearest(values, e4m3_grid()), 128)
    assert e4m3_encode(torch.from_numpy(values)).tolist() == expected.tolist()


def test_e2m1_rounding_matches_brute_force() -> None:
    values = around_grid(E2M1_GRID)
    expected = signed(values, nearest(values, E2M1_GRID), 8)
    assert e2m1_encode(torch.from_numpy(values)).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_bf16_value_rounds_to_the_nearest_element(dtype: torch.dtype) -> None:
    x = all_bf16()
    values = x.float().numpy()
    expected = signed(values, nearest(values, e4m3_grid()), 128)
    assert_bits(e4m3_encode(x.to(dtype)), torch.from_numpy(expected).to(torch.uint8))
    expected = signed(values, nearest(values, E2M1_GRID), 8)
    assert_bits(e2m1_encode(x.to(dtype)), torch.from_numpy(expected).to(torch.uint8))


def test_e2m1_ties_of_the_specification() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1_encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert e2m1_encode(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_elements_saturate_keep_zero_signs_and_carry_nan() -> None:
    negative_nan = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32)
    x = torch.cat(
        [torch.tensor([0.0, -0.0, INF, -INF, 1e9, -449.0, 1e-45, -1e-45, NAN]), negative_nan]
    )
    expected = [0, 0x80, 0x7E, 0xFE, 0x7E, 0xFE, 0, 0x80, 0x7F, 0xFF]
    assert e4m3_encode(x).tolist() == expected
    assert e2m1_encode(x).tolist() == [0, 8, 7, 15, 7, 15, 0, 8, 7, 15]


# Group quantisers


@each_format
def test_records_match_the_oracle_on_random_rows(record: RecordFormat) -> None:
    x = random_rows(record, 48, seed=1)
    assert_bits(record.encode(x), oracle_record(x, record))
    assert_bits(record.encode(x.float()), record.encode(x))
    wide = x.float() * 1.0009765  # not bf16 any more
    assert_bits(record.encode(wide), oracle_record(wide, record))


@given(x=group_values())
@each_format
def test_records_match_the_oracle_on_any_group(record: RecordFormat, x: Tensor) -> None:
    assert_bits(record.encode(x[None]), oracle_record(x[None], record))


@each_format
def test_scale_rounding_edges_match_the_oracle(record: RecordFormat) -> None:
    """Group maxima at every scale step and midpoint, and one ulp (fp32, bf16) to either side."""
    if record.name == "nvfp4":
        table = np.array(e4m3_grid())
        steps = 6 * np.concatenate([table, (table[:-1] + table[1:]) / 2, [500.0]])
    else:
        limit = 448 if record.name == "mxfp8" else 6
        steps = limit * 2.0 ** np.arange(-124, 118)
    edges = np.abs(with_ulps(steps))
    in_bf16 = torch.from_numpy(steps).bfloat16().view(torch.int16)
    edges = np.concatenate([edges, (in_bf16[1:] - 1).view(torch.bfloat16).float().numpy()])
    x = torch.zeros(len(edges), record.group)
    x[:, 0] = torch.from_numpy(edges)
    x[:, 1:3] = x[:, :1] * torch.tensor([-0.51, 0.249])
    assert_bits(record.encode(x), oracle_record(x, record))


def test_nvfp4_scale_is_a_division_and_not_a_multiplication() -> None:
    """One fp32 ulp below a midpoint, amax * fl32(1/6) rounds onto it, and then up to an even code.

    (For bf16 inputs the two always agree: no bf16 value lies that close to a midpoint.)
    """
    table = torch.tensor(e4m3_grid())
    midpoints = (6 * (table[1:-1] + table[2:]) / 2)[:-1]
    amax = torch.nextafter(midpoints, torch.tensor(0.0))
    by_multiplication = e4m3_encode(amax * (1.0 / 6.0))
    _, scales = quantize_nvfp4(amax[:, None].expand(-1, 16))
    assert scales[:, 0].tolist() == list(range(1, 125))
    assert not torch.equal(scales[:, 0], by_multiplication), "the inputs no longer tell them apart"


@pytest.mark.parametrize("direction", [-1, 0, 1])
def test_nvfp4_elements_are_divided_by_every_scale(direction: int) -> None:
    """Element ties at each of the 126 scales; x * (1 / s) would land beside some of them."""
    scale = torch.tensor(e4m3_grid()[1:])[:, None]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * scale
    ties = (ties.view(torch.int32) + direction).view(torch.float32)
    x = torch.cat([6 * scale, ties, -ties, torch.zeros(126, 1)], dim=1)
    assert_bits(quantize_nvfp4(x)[1], ALL_BYTES[1:127, None])
    assert_bits(NVFP4.encode(x), oracle_record(x, NVFP4))
    by_reciprocal = e2m1_encode(ties * (1.0 / scale))
    if direction == 0:
        assert not torch.equal(e2m1_encode(ties / scale), by_reciprocal), "no tie tells them apart"


@each_format
def test_zero_groups_use_the_floor_scale_and_keep_signs(record: RecordFormat) -> None:
    x = torch.zeros(1, 2 * record.group)
    x[0, 1::2] = -0.0
    out = record.encode(x)
    floor_byte = {"mxfp8": 127 - 22, "mxfp4": 1, "nvfp4": 1}[record.name]
    assert out[0, -2:].tolist() == [floor_byte] * 2
    assert_bits(record.decode(out), x.bfloat16())


def test_saturating_and_smallest_groups() -> None:
    codes, scales = quantize_nvfp4(torch.tensor([[1e30, -2688.0, 2600.0, 100.0] * 4]))
    assert scales.tolist() == [[0x7E]]
    assert dequantize_nvfp4(codes, scales)[0, :4].tolist() == [2688.0, -2688.0, 2688.0, 0.0]
    # 2^-127 is half an E2M1 step of the smallest scale and survives; 2^-128 ties to zero.
    small = torch.tensor([[2.0**-127, 2.0**-128, -(2.0**-128)] + [0.0] * 29])
    codes, scales = quantize_mxfp4(small)
    assert scales.tolist() == [[1]]
    assert_bits(
        dequantize_mxfp4(codes, scales)[0, :3], torch.tensor([2.0**-127, 0.0, -0.0]).bfloat16()
    )
    # E4M3 subnormals beside a large value: 2^-9 of the scale is kept, half of it ties to zero.
    codes, scales = quantize_mxfp8(
        torch.tensor([[448.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10] + [0.0] * 28])
    )
    assert scales.tolist() == [[127]]
    assert dequantize_mxfp8(codes, scales)[0, :4].tolist() == [448.0, 2.0**-9, 0.0, 2.0**-8]


@each_format
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bad_value_poisons_its_group_and_nothing_else(
    record: RecordFormat, bad: float, dtype: torch.dtype
) -> None:
    clean = random_rows(record, 3, seed=2).to(dtype)
    dirty = clean.clone()
    start = 2 * record.group
    dirty[1, start + 3] = bad
    decoded, reference = record.decode(record.encode(dirty)), record.decode(record.encode(clean))
    poisoned = torch.zeros_like(decoded, dtype=torch.bool)
    poisoned[1, start : start + record.group] = True
    assert torch.equal(decoded.isnan(), poisoned)
    assert_bits(decoded[~poisoned], reference[~poisoned])
    # The bytes are defined too: NaN scale, zero codes.
    out = record.encode(dirty)[1]
    assert out[-2] == (0x7F if record.scale == "e4m3" else 0xFF)
    per_group = record.code_bytes(record.group)
    assert out[2 * per_group : 3 * per_group].tolist() == [0] * per_group
