"""Cache records: sizes, layouts, re-encoding, weights, golden bytes; the codecs on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from pcpkit.formats import (
    MXFP4,
    MXFP8,
    NVFP4,
    RECORD_FORMATS,
    RecordFormat,
    dequantize_mxfp8,
    dequantize_nvfp4,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    e8m0_decode,
    e8m0_encode,
    fp4_row_dequantize,
    fp8_block_dequantize,
    pack_e2m1,
    pow2ceil,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
    unpack_e2m1,
)

ALL_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
CASES = ("tiny-main", "tiny-real-heads", "tiny-dspark")
each_format = pytest.mark.parametrize(
    "record", RECORD_FORMATS.values(), ids=lambda record: record.name
)


def bits(x: Tensor) -> Tensor:
    """Integer view, so that NaN equals itself and -0 differs from 0."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    different = int((bits(actual) != bits(expected)).sum())
    assert different == 0, f"{different} of {expected.numel()} differ"


def random_rows(record: RecordFormat, num_rows: int, seed: int) -> Tensor:
    """fp32 rows of 4 groups, from below every floor to far above the E4M3 scale's maximum."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(-30, 16, (num_rows, 4, 1), generator=generator)
    values = torch.randn(num_rows, 4, record.group, generator=generator) * torch.exp2(size.float())
    return values.flatten(1)


# Sizes and refusals


def test_record_sizes_of_the_released_model() -> None:
    assert (MXFP8.record_bytes(512), MXFP8.code_bytes(512)) == (528, 512)
    assert (NVFP4.record_bytes(512), NVFP4.code_bytes(512)) == (288, 256)
    assert (MXFP4.record_bytes(128), MXFP4.code_bytes(128)) == (68, 64)
    assert dict(RECORD_FORMATS) == {"mxfp8": MXFP8, "nvfp4": NVFP4, "mxfp4": MXFP4}


@each_format
def test_dim_of_inverts_record_bytes_and_refuses_all_other_sizes(record: RecordFormat) -> None:
    sizes = {record.record_bytes(dim): dim for dim in range(record.group, 600, record.group)}
    for size in range(-1, max(sizes) + 1):
        if size in sizes:
            assert record.dim_of(size) == sizes[size]
        else:
            with pytest.raises(ValueError, match=f"record_bytes expected .* got {size};"):
                record.dim_of(size)


@each_format
def test_record_is_codes_then_scales_in_channel_order(record: RecordFormat) -> None:
    quantize = {"mxfp8": quantize_mxfp8, "mxfp4": quantize_mxfp4, "nvfp4": quantize_nvfp4}
    x = random_rows(record, 3, seed=0)
    codes, scales = quantize[record.name](x)
    out = record.encode(x)
    assert_bits(out[:, : record.code_bytes(x.shape[1])], codes)
    assert_bits(out[:, record.code_bytes(x.shape[1]) :], scales)
    assert out.is_contiguous()
    # One channel, one code: channel 1 of group 2 alone, at full scale.
    single = torch.zeros(4, record.group)
    single[2, 1] = -6.0
    out = record.encode(single.flatten())
    code = 0xFC if record.name == "mxfp8" else 0xF0
    assert out[(2 * record.group + 1) * record.element_bits // 8] == code
    zero = record.encode(torch.zeros(4 * record.group))
    assert (out != zero).nonzero().flatten().tolist() == [
        (2 * record.group + 1) * record.element_bits // 8,
        record.code_bytes(4 * record.group) + 2,
    ]


@pytest.mark.parametrize(
    ("record", "expected", "values"),
    [
        (MXFP8, {0: 0x70, 1: 0xFA, 2: 0x62, 31: 0x7C, 32: 0x78}, [1.0, -2.5, 0.3125, 3.0]),
        (MXFP4, {0: 0xE4, 1: 0x01, 15: 0x70, 16: 0x7E}, [1.0, -2.0, 0.25, 3.0]),
        (NVFP4, {0: 0xE4, 1: 0x01, 7: 0x70, 8: 0x30}, [1.0, -2.0, 0.25, 3.0]),
    ],
)
def test_example_of_the_layout_page(
    record: RecordFormat, expected: dict[int, int], values: list[float]
) -> None:
    """docs/cache-layout.md, "Example"."""
    x = torch.zeros(record.group)
    x[[0, 1, 2, -1]] = torch.tensor([1.0, -2.5, 0.3, 3.0])
    out = record.encode(x)
    assert {index: byte for index, byte in enumerate(out.tolist()) if byte} == expected
    assert record.decode(out)[[0, 1, 2, -1]].tolist() == values


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MXFP8.encode(torch.zeros(2, 33)), "x expected .* divisible by 32, got .*33"),
        (lambda: NVFP4.encode(torch.zeros(2, 0)), "x expected .* divisible by 16, got"),
        (lambda: MXFP4.encode(torch.tensor(1.0)), "x expected .* divisible by 32"),
        (lambda: MXFP8.encode(torch.zeros(32).half()), "x expected dtype bfloat16 or float32"),
        (lambda: MXFP8.encode(torch.zeros(32).double()), "x expected dtype bfloat16 or float32"),
        (lambda: pow2ceil(torch.ones(1).bfloat16()), "x expected dtype float32, got"),
        (lambda: e8m0_encode(torch.ones(1).bfloat16()), "scale expected dtype float32, got"),
        (lambda: e4m3_encode(torch.ones(1, dtype=torch.int32)), "x expected dtype"),
        (lambda: e2m1_encode(torch.ones(1).double()), "x expected dtype"),
        (lambda: e4m3_decode(torch.ones(1)), "codes expected raw bytes .* never cast"),
        (lambda: e8m0_decode(torch.ones(1, dtype=torch.int16)), "codes expected raw bytes"),
        (lambda: pack_e2m1(ALL_BYTES[:3]), "codes expected uint8 with an even last axis"),
        (lambda: pack_e2m1(torch.zeros(2)), "codes expected uint8"),
        (lambda: MXFP8.decode(ALL_BYTES[:32]), "record_bytes expected .* 33 for mxfp8, got 32"),
        (lambda: MXFP8.decode(ALL_BYTES[:33].view(torch.int8)), "records expected uint8"),
        (lambda: NVFP4.record_bytes(24), "dim expected a positive multiple of 16 for nvfp4"),
        (lambda: MXFP8.code_bytes(0), "dim expected a positive multiple of 32"),
        (lambda: dequantize_mxfp8(ALL_BYTES[:64], ALL_BYTES[:3]), "scales expected shape"),
        (lambda: dequantize_nvfp4(ALL_BYTES.view(2, 128), ALL_BYTES[:16]), "scales expected"),
        (
            lambda: fp8_block_dequantize(ALL_BYTES.view(4, 64), ALL_BYTES[:2].view(2, 1)),
            r"scale expected shape \(1, 2\), got \(2, 1\)",
        ),
        (lambda: fp8_block_dequantize(ALL_BYTES, ALL_BYTES), r"codes expected shape \[N, K\]"),
        (
            lambda: fp4_row_dequantize(ALL_BYTES.view(4, 64), ALL_BYTES[:4].view(4, 1)),
            r"scale expected shape \(4, 4\)",
        ),
        (
            lambda: RecordFormat(name="x", group=32, element_bits=8, scale="e4m3"),
            r"element_bits, scale expected .* got \(8, e4m3\)",
        ),
        (
            lambda: RecordFormat(name="x", group=0, element_bits=8, scale="e8m0"),
            "group expected an even number",
        ),
    ],
)
def test_errors_name_the_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# Encoding decoded values again


def same_bytes_again(record: RecordFormat, out: Tensor) -> Tensor:
    """Groups [n, dim/group] whose bytes encode(decode()) must reproduce.

    MX formats: the largest code sits in the upper half of its scale, except that it may round down
    onto the lower edge (224 = code 0x76, 3 = code 5): then the next smaller scale holds the same
    values, unless the scale is already at the floor. NVFP4: the largest element is +-6, so the
    scale divides out exactly, except that scale byte 2 (2^-8) also occurs with a largest element of
    4, whose amax / 6 rounds to byte 1.
    """
    dim = record.dim_of(out.shape[-1])
    codes, scales = out[:, : record.code_bytes(dim)], out[:, record.code_bytes(dim) :]
    if record.element_bits == 4:
        codes = unpack_e2m1(codes) & 7
    largest = (codes & 0x7F).unflatten(-1, (-1, record.group)).amax(-1)
    if record.name == "nvfp4":
        return ~((scales == 2) & (largest == 6))
    edge, floor_byte = (0x76, 127 - 22) if record.name == "mxfp8" else (5, 1)
    return (largest != edge) | (scales == floor_byte)


def assert_reencodes(record: RecordFormat, out: Tensor) -> None:
    """encode(decode(out)) has the same values, and the same bytes wherever that is implied."""
    again = record.encode(record.decode(out))
    dim = record.dim_of(out.shape[-1])
    same = same_bytes_again(record, out)
    assert_bits(again[:, record.code_bytes(dim) :][same], out[:, record.code_bytes(dim) :][same])
    channels = same.repeat_interleave(record.group, dim=1)
    per_byte = channels[:, :: 8 // record.element_bits]
    assert_bits(again[:, : per_byte.shape[1]][per_byte], out[:, : per_byte.shape[1]][per_byte])
    keeps_values = channels if record.name == "nvfp4" else torch.ones_like(channels)
    assert_bits(record.decode(again)[keeps_values], record.decode(out)[keeps_values])


@given(seed=st.integers(0, 2**31), power=st.integers(-100, 100))
@each_format
def test_encoding_decoded_values_again(record: RecordFormat, seed: int, power: int) -> None:
    assert_reencodes(record, record.encode(random_rows(record, 20, seed) * 2.0**power))


@each_format
def test_encoding_decoded_random_rows_again(record: RecordFormat) -> None:
    out = record.encode(random_rows(record, 2000, seed=3))
    assert_reencodes(record, out)
    # About one mxfp4 group in eight rounds down onto the lower edge of its scale.
    assert same_bytes_again(record, out).float().mean() > 0.85, "the test compares too little"


@pytest.mark.parametrize("record", [MXFP8, MXFP4], ids=["mxfp8", "mxfp4"])
def test_only_values_above_2_127_may_round_up_to_infinity(record: RecordFormat) -> None:
    edge = torch.full((record.group,), 2.0**127)
    assert_bits(record.decode(record.encode(edge)), edge.bfloat16())
    largest = torch.full((record.group,), torch.finfo(torch.bfloat16).max)
    assert record.decode(record.encode(largest)).isinf().all()


def test_the_stated_exceptions_to_idempotence_are_real() -> None:
    window = MXFP8.encode(torch.tensor([[225.0] + [1.0] * 31]))
    assert (window[0, 0], window[0, 32]) == (0x76, 127)
    again = MXFP8.encode(MXFP8.decode(window))
    assert (again[0, 0], again[0, 32]) == (0x7E, 126)
    compressed = NVFP4.encode(torch.tensor([[9.5 * 2.0**-9] + [0.0] * 15]))
    assert compressed[0, [0, 8]].tolist() == [6, 2]
    assert NVFP4.decode(compressed)[0, 0] == 8 * 2.0**-9
    assert NVFP4.decode(NVFP4.encode(NVFP4.decode(compressed)))[0, 0] == 6 * 2.0**-9


# Independence, shapes, memory layouts


@given(seed=st.integers(0, 2**31))
@each_format
def test_rows_and_groups_are_independent(record: RecordFormat, seed: int) -> None:
    x = random_rows(record, 3, seed)
    out = record.encode(x)
    half = record.code_bytes(record.group)
    for row in range(3):
        assert_bits(out[row : row + 1], record.encode(x[row : row + 1]))
        assert_bits(out[row], record.encode(x[row]))
        for index, values in enumerate(x[row].unflatten(0, (4, record.group))):
            alone = record.encode(values)
            assert_bits(out[row, index * half : (index + 1) * half], alone[:half])
            assert out[row, 4 * half + index] == alone[half]


@each_format
def test_strided_inputs_give_the_bytes_of_contiguous_ones(record: RecordFormat) -> None:
    dim = 2 * record.group
    base = torch.randn(6, 3 * dim, generator=torch.Generator().manual_seed(4)).bfloat16()
    views = [base[::2, dim : 2 * dim], base[:, : 2 * dim : 2], base.t()[:dim], base[1, :dim]]
    views += [base[:1, :dim].expand(5, dim), base.view(3, 2, 3 * dim).transpose(0, 1)[..., :dim]]
    views[2] = base.t().contiguous().t()[:, :dim]
    for view in views:
        out = record.encode(view)
        assert_bits(out, record.encode(view.contiguous()))
        padded = torch.full((*out.shape[:-1], out.shape[-1] + 5), 0xAA, dtype=torch.uint8)
        padded[..., 3:-2] = out
        assert_bits(record.decode(padded[..., 3:-2]), record.decode(out))


@each_format
def test_inputs_are_not_modified_and_shapes_are_kept(record: RecordFormat) -> None:
    x = torch.randn(2, 3, 2 * record.group)
    before = x.clone()
    out = record.encode(x)
    copy = out.clone()
    assert out.shape == (2, 3, record.record_bytes(2 * record.group))
    assert record.decode(out).shape == x.shape
    assert_bits(x, before)
    assert_bits(out, copy)


@each_format
def test_empty_inputs(record: RecordFormat) -> None:
    dim = 2 * record.group
    out = record.encode(torch.empty(0, 3, dim))
    assert out.shape == (0, 3, record.record_bytes(dim))
    decoded = record.decode(out)
    assert (decoded.shape, decoded.dtype) == ((0, 3, dim), torch.bfloat16)
    assert e4m3_encode(torch.empty(0)).shape == e2m1_decode(torch.empty(0, dtype=torch.uint8)).shape


# Weights


@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (64, 96), (33, 40), (1, 1), (0, 64)])
def test_fp8_blocks_match_a_loop(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.int32)
    scale_shape = (-(-rows // 32), -(-columns // 32))
    scale = torch.randint(100, 150, scale_shape, generator=generator, dtype=torch.int32)
    codes, scale = codes.to(torch.uint8), scale.to(torch.uint8)
    values, factors = e4m3_decode(codes), e8m0_decode(scale)
    expected = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            expected[row, column] = values[row, column] * factors[row // 32, column // 32]
    for raw in (codes, codes.view(torch.int8), codes.view(torch.float8_e4m3fn)):
        actual = fp8_block_dequantize(raw, scale.view(torch.float8_e8m0fnu))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_fp4_rows_match_a_loop() -> None:
    generator = torch.Generator().manual_seed(6)
    packed = torch.randint(0, 256, (2, 3, 32), generator=generator, dtype=torch.int32)
    scale = torch.randint(100, 150, (2, 3, 2), generator=generator, dtype=torch.int32)
    packed, scale = packed.to(torch.uint8), scale.to(torch.uint8)
    expected = torch.empty(2, 3, 64)
    for expert, row, k in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(64)):
        nibble = packed[expert, row, k // 2] >> (4 * int(k % 2)) & 15
        expected[expert, row, k] = e2m1_decode(nibble) * e8m0_decode(scale[expert, row, k // 32])
    assert_bits(fp4_row_dequantize(packed, scale), expected)
    assert_bits(fp4_row_dequantize(packed.view(torch.int8), scale), expected)
    assert_bits(fp4_row_dequantize(packed[0], scale[0].view(torch.float8_e8m0fnu)), expected[0])


# Golden vectors of the official code


def record_format(name: str) -> RecordFormat:
    """Format of a golden cache tensor, dequantised or raw."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf.startswith("window"):
        return MXFP8
    return NVFP4 if leaf.startswith("compressed") else MXFP4


def twin_of(name: str) -> str:
    """Dequantised tensor of a raw record tensor; `index_record` belongs to `index_k`."""
    return name.replace("index_record", "index_k_record").replace("_record", "")


@pytest.mark.parametrize("case", CASES)
def test_golden_records_decode_to_their_twins(case: str, golden_dir: Callable[[str], Path]) -> None:
    tensors = load_file(golden_dir(case) / "golden.safetensors")
    pairs = [(name, twin_of(name)) for name in tensors if "_record" in name]
    pairs = [(name, twin) for name, twin in pairs if twin in tensors]
    # Case B keeps dequantised twins of the window records only.
    kinds = {"window"} if case == "tiny-real-heads" else {"window", "compressed", "index_k"}
    assert {twin.rsplit(".", 1)[-1] for _, twin in pairs} == kinds
    for name, twin in pairs:
        assert_bits(record_format(name).decode(tensors[name]), tensors[twin])


@pytest.mark.parametrize("case", CASES)
def test_golden_records_encode_again(case: str, golden_dir: Callable[[str], Path]) -> None:
    """Every raw record tensor, with or without a dequantised twin (index queries have none)."""
    tensors = load_file(golden_dir(case) / "golden.safetensors")
    names = [name for name in tensors if "_record" in name]
    assert {record_format(name).name for name in names} == set(RECORD_FORMATS)
    for name in names:
        assert_reencodes(record_format(name), tensors[name].flatten(0, -2))


@pytest.mark.parametrize("case", CASES)
def test_golden_cache_values_survive_encoding(case: str, golden_dir: Callable[[str], Path]) -> None:
    """Dequantised tensors are values of their format, so encoding loses nothing."""
    tensors = load_file(golden_dir(case) / "golden.safetensors")
    kinds = ("window", "window_last", "window_ring", "compressed", "compressed_new")
    kinds += ("index_k", "index_k_new")
    names = [name for name in tensors if name.rsplit(".", 1)[-1] in kinds]
    assert names
    for name in names:
        record, values = record_format(name), tensors[name]
        out = record.encode(values)
        # The exception of `same_bytes_again` cannot be seen in `out`; here it does not occur.
        assert_bits(record.decode(out), values)


# CUDA


@pytest.mark.gpu
def test_codecs_give_the_same_bits_on_cuda() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    # Every bf16 value (NaNs and infinities too) and its fp32 neighbours, which hit all midpoints.
    as_int = every.float().view(torch.int32)
    x = torch.cat([as_int - 1, as_int, as_int + 1]).view(torch.float32)
    scales = torch.tensor([1.0, -1.0, float("nan"), 2.0**-127, 3.0]).repeat(10)
    for values in (x, every):
        assert_bits(e4m3_encode(values.cuda()).cpu(), e4m3_encode(values))
        assert_bits(e2m1_encode(values.cuda()).cpu(), e2m1_encode(values))
    assert_bits(pow2ceil(x.cuda()).cpu(), pow2ceil(x))
    assert_bits(e8m0_encode(scales.cuda()).cpu(), e8m0_encode(scales))
    for decode in (e4m3_decode, e2m1_decode, e8m0_decode, unpack_e2m1):
        assert_bits(decode(ALL_BYTES.cuda()).cpu(), decode(ALL_BYTES))
    for record in RECORD_FORMATS.values():
        rows = torch.cat([random_rows(record, 4000, seed=7), torch.zeros(1, 4 * record.group)])
        rows[5, 3], rows[6, 7], rows[7, 1] = float("nan"), float("-inf"), -0.0
        for wide in (rows, rows.bfloat16(), x[: len(x) // 128 * 128].view(-1, 128)):
            out = record.encode(wide)
            assert_bits(record.encode(wide.cuda()).cpu(), out)
            on_device, reference = record.decode(out.cuda()).cpu(), record.decode(out)
            finite = ~reference.isnan()
            assert torch.equal(on_device.isnan(), ~finite)
            assert_bits(on_device[finite], reference[finite])
    codes, scale = ALL_BYTES.repeat(10).view(40, 64), ALL_BYTES[120:124].view(2, 2)
    expected = fp8_block_dequantize(codes, scale)
    actual = fp8_block_dequantize(codes.cuda(), scale.cuda()).cpu()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    scale = ALL_BYTES[80:240].view(40, 4)
    actual = fp4_row_dequantize(codes.cuda(), scale.cuda()).cpu()
    assert_bits(actual, fp4_row_dequantize(codes, scale))
