"""encode_records, cache_write, scatter_records, gather_records: bytes against the references."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.formats import RECORD_FORMATS
from pcpkit.kernels import cache_write as module
from pcpkit.kernels import record_move
from pcpkit.kernels.cache_write import (
    cache_write,
    cache_write_reference,
    encode_records,
    encode_records_reference,
    gather_records,
    scatter_records,
)
from pcpkit.kernels.record_move import gather_records_reference, scatter_records_reference

from .bits import MODES, base_of, spaced
from .inputs_cache_write import (
    REAL_DIMS,
    RowInputs,
    bench_cache,
    bench_inputs,
    draw_rows,
    rope_table,
)

# Interpreted launches take milliseconds: few examples, small rows.
few = settings(max_examples=25)

# (record, dim, rope_dim): the released shapes; no rotation; everything rotates; dims and tails that
# are no power of two; a tail that is not a whole group.
SHAPES = [
    ("mxfp8", 512, 64),
    ("nvfp4", 512, 64),
    ("mxfp4", 128, 64),
    ("mxfp8", 64, 0),
    ("nvfp4", 48, 0),
    ("mxfp4", 64, 64),
    ("mxfp8", 96, 24),
    ("nvfp4", 80, 40),
]


def pages_of(inputs: RowInputs, device: str, fill: int = 0xA5) -> Tensor:
    """Six pages of four records inside a larger buffer of 255s; its own bytes are ``fill``."""
    pages = torch.full((6, 4, inputs.record_bytes), fill, dtype=torch.uint8, device=device)
    return spaced(pages)


def rotate_by_hand(row: Tensor, position: int, table: Tensor) -> Tensor:
    """One latent, pair by pair in numpy FP32 scalars."""
    half = table.shape[1] // 2
    out, first = row.clone(), row.shape[0] - 2 * half
    with np.errstate(all="ignore"):
        for pair in range(half):
            even, odd = (np.float32(float(row[first + 2 * pair + k])) for k in (0, 1))
            cos, sin = (np.float32(float(table[position, pair + k])) for k in (0, half))
            rotated = torch.tensor([even * cos - odd * sin, even * sin + odd * cos])
            out[first + 2 * pair : first + 2 * pair + 2] = rotated.bfloat16()
    return out


@pytest.mark.parametrize(("record", "dim", "rope_dim"), SHAPES[3:])
def test_reference_is_rotate_then_quantize_row_by_row(record: str, dim: int, rope_dim: int) -> None:
    inputs = draw_rows(record, 9, dim, rope_dim, 24, seed=dim)
    inputs = replace(inputs, positions=inputs.positions.clamp(0, 39))
    got = encode_records_reference(*inputs.encode)
    cache = torch.zeros(6, 4, inputs.record_bytes, dtype=torch.uint8)
    cache_write_reference(*inputs.write(cache))
    want = torch.zeros_like(cache)
    for index, (row, position) in enumerate(
        zip(inputs.latents, inputs.positions.tolist(), strict=True)
    ):
        rotated = rotate_by_hand(row, position, inputs.cos_sin)
        encoded = RECORD_FORMATS[record].encode(rotated)
        assert torch.equal(got[index], encoded)
        slot = int(inputs.slots[index])
        if 0 <= slot < 24:
            want[slot // 4, slot % 4] = encoded
    assert torch.equal(cache, want)
    assert want.any()


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize(("record", "dim", "rope_dim"), SHAPES)
def test_kernels_give_the_bytes_of_the_reference(
    record: str, dim: int, rope_dim: int, device: str
) -> None:
    """Hostile values, positions and slots; latents and pages apart in poisoned buffers."""
    inputs = draw_rows(record, 19, dim, rope_dim, 24, seed=rope_dim)
    want = encode_records_reference(*inputs.encode)
    here = inputs.to(device)
    here = replace(
        here,
        latents=spaced(here.latents),
        cos_sin=spaced(here.cos_sin),
        positions=here.positions.repeat_interleave(2)[::2],
        slots=here.slots.repeat_interleave(3)[::3],
    )
    assert torch.equal(module._launch_encode(*here.encode).cpu(), want)
    cache, expected = pages_of(here, device), pages_of(inputs, "cpu")
    module._launch_write(*here.write(cache))
    cache_write_reference(*inputs.write(expected))
    assert torch.equal(base_of(cache).cpu(), base_of(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("record", REAL_DIMS)
@pytest.mark.parametrize("num_rows", [1, 4096, 16384])
def test_kernels_give_the_bytes_of_the_reference_at_real_sizes(record: str, num_rows: int) -> None:
    inputs = bench_inputs(num_rows, record, "cuda")
    cache = bench_cache(inputs, "cuda")
    expected = cache.cpu()
    cache_write_reference(*inputs.to("cpu").write(expected))
    module._launch_write(*inputs.write(cache))
    assert torch.equal(cache.cpu(), expected)
    # The reference on the device gives the same bytes as on the CPU.
    records = encode_records_reference(*inputs.encode)
    assert torch.equal(records, module._launch_encode(*inputs.encode))
    other = torch.zeros_like(cache)
    record_move._launch_scatter(records, inputs.slots, other)
    assert torch.equal(other, cache)
    assert torch.equal(record_move._launch_gather(cache, inputs.slots), records)


@pytest.mark.parametrize("device", MODES)
def test_a_bad_row_spoils_its_own_groups_only(device: str) -> None:
    inputs = replace(draw_rows("mxfp8", 3, 128, 64, 24, seed=1), record="mxfp8")
    inputs = replace(
        inputs,
        latents=torch.randn(3, 128).bfloat16(),
        positions=torch.tensor([5, 40, 7]),  # the table ends at 39
    )
    inputs.latents[0, 40] = torch.inf
    records = module._launch_encode(*inputs.to(device).encode).cpu()
    scales = records[:, 128:]
    # Row 0: group 1 holds the infinity. Row 1: its rotated channels, groups 2 and 3.
    bad = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    assert torch.equal(scales == 255, bad)
    codes = records[:, :128].unflatten(1, (4, 32))
    assert not codes[bad].any()
    assert codes[~bad].any(dim=1).all()


@pytest.mark.parametrize("device", MODES)
@few
@given(
    shape=st.sampled_from([SHAPES[2], SHAPES[6], SHAPES[7]]),
    seed=st.integers(0, 2**31),
    chosen=st.lists(st.integers(0, 9), max_size=12),
)
def test_a_row_does_not_depend_on_the_others(
    device: str, shape: tuple[str, int, int], seed: int, chosen: list[int]
) -> None:
    """Subsets, permutations and repetitions of the rows give the same bytes."""
    record, dim, rope_dim = shape
    inputs = draw_rows(record, 10, dim, rope_dim, 24, seed)
    index = torch.tensor(chosen, dtype=torch.int64)
    whole = encode_records_reference(*inputs.encode)
    assert torch.equal(encode_records_reference(*inputs.rows(index).encode), whole[index])
    fewer = inputs.rows(index).to(device)
    assert torch.equal(module._launch_encode(*fewer.encode).cpu(), whole[index])


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("record_bytes", [528, 288, 68, 33, 1])
def test_scatter_and_gather_move_every_byte(record_bytes: int, device: str) -> None:
    """Any record size and alignment, strided records and pages, -1 and slots out of range."""
    generator = torch.Generator().manual_seed(record_bytes)
    records = torch.randint(0, 256, (17, record_bytes), generator=generator, dtype=torch.uint8)
    slots = torch.randperm(32, generator=generator)[:17] - 4
    slots[3], slots[4] = 2**40, -(2**40)
    pages = torch.randint(0, 256, (5, 5, record_bytes), generator=generator, dtype=torch.uint8)
    want, got = spaced(pages), spaced(pages.to(device))
    for record, slot in zip(records, slots.tolist(), strict=True):
        if 0 <= slot < 25:
            want[slot // 5, slot % 5] = record
    reference = spaced(pages)
    scatter_records_reference(records, slots, reference)
    record_move._launch_scatter(spaced(records.to(device)), slots.to(device), got)
    assert torch.equal(base_of(reference), base_of(want))
    assert torch.equal(base_of(got).cpu(), base_of(want))

    kept = (slots >= 0) & (slots < 25)
    expected = torch.where(kept[:, None], records, 0).to(torch.uint8)
    assert torch.equal(gather_records_reference(want, slots), expected)
    assert torch.equal(record_move._launch_gather(got, slots.to(device)).cpu(), expected)


@pytest.mark.parametrize("device", MODES)
def test_nothing_to_do(device: str) -> None:
    inputs = draw_rows("mxfp4", 4, 64, 32, 24, seed=0).to(device)
    none = inputs.rows(torch.zeros(0, dtype=torch.int64))
    cache = pages_of(inputs, device)
    module._launch_write(*none.write(cache))
    record_move._launch_scatter(cache[0, :0], none.slots, cache)
    assert (cache == 0xA5).all()
    assert module._launch_encode(*none.encode).shape == (0, inputs.record_bytes)
    assert record_move._launch_gather(cache, none.slots).shape == (0, inputs.record_bytes)
    # A cache without pages: every slot is out of range.
    empty = cache[:0]
    module._launch_write(*inputs.write(empty))
    assert not record_move._launch_gather(empty, inputs.slots).any()
    assert not gather_records_reference(empty, inputs.slots).any()


@pytest.mark.parametrize("device", MODES)
def test_a_table_without_positions_rotates_by_nan(device: str) -> None:
    inputs = draw_rows("mxfp8", 3, 64, 32, 24, seed=0)
    inputs = replace(inputs, cos_sin=rope_table(0, 32))
    want = encode_records_reference(*inputs.encode)
    assert (want[:, 65] == 255).all()
    assert torch.equal(module._launch_encode(*inputs.to(device).encode).cpu(), want)


def test_docstring_example_of_scatter() -> None:
    cache = torch.zeros(2, 2, 4, dtype=torch.uint8)
    records = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.uint8)
    scatter_records(records, torch.tensor([3, -1]), cache)
    assert cache[1, 1].tolist() == [1, 2, 3, 4]
    assert int(cache.count_nonzero()) == 4


def test_public_functions_name_what_does_not_fit() -> None:
    inputs = draw_rows("mxfp8", 4, 64, 32, 24, seed=0)
    cache = torch.zeros(6, 4, inputs.record_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"record expected one of .*'mxfp8'.*, got 'fp8'"):
        encode_records(*replace(inputs, record="fp8").encode)
    with pytest.raises(ValueError, match="latents expected dtype bfloat16, got float32"):
        encode_records(*replace(inputs, latents=inputs.latents.float()).encode)
    with pytest.raises(ValueError, match="positions expected dtype int64, got int32"):
        encode_records(*replace(inputs, positions=inputs.positions.int()).encode)
    with pytest.raises(
        ValueError, match="cos_sin expected an even number of columns <= 64, got 80"
    ):
        encode_records(*replace(inputs, cos_sin=rope_table(4, 80)).encode)
    with pytest.raises(ValueError, match=r"cache expected shape \(\*, \*, 66\), got \(6, 4, 65\)"):
        cache_write(*inputs.write(cache[:, :, 1:]))
    with pytest.raises(ValueError, match="slots expected dtype int64, got int32"):
        cache_write(*replace(inputs, slots=inputs.slots.int()).write(cache))
    apart = torch.zeros(6, 66, 4, dtype=torch.uint8).mT
    with pytest.raises(ValueError, match="cache expected contiguous record bytes, got strides"):
        cache_write(*inputs.write(apart))
    with pytest.raises(ValueError, match="cache expected contiguous record bytes, got strides"):
        gather_records(apart, inputs.slots)
    with pytest.raises(ValueError, match=r"slots expected shape \(4\), got \(3\)|slots expected"):
        scatter_records(torch.zeros(4, 66, dtype=torch.uint8), inputs.slots[:3], cache)


@pytest.mark.parametrize(
    ("dim", "block_rows"), [(512, 4), (128, 16), (448, 4), (96, 16), (4096, 1)]
)
def test_encode_launch_choice(dim: int, block_rows: int) -> None:
    assert module._choose_encode(dim).block_rows == block_rows


@pytest.mark.parametrize(("units", "block_rows"), [(33, 15), (17, 30), (600, 1)])
def test_move_launch_choice(units: int, block_rows: int) -> None:
    assert record_move._choose_launch(units).block_rows == block_rows


def test_alignment_is_that_of_the_worst_record() -> None:
    pages = torch.zeros(4, 64, 528, dtype=torch.uint8)
    assert record_move.record_alignment(pages) == 16
    assert record_move.record_alignment(pages, torch.zeros(4, 64, 68, dtype=torch.uint8)) == 4
    assert record_move.record_alignment(pages[:, :, 2:514]) == 2
    assert record_move.record_alignment(pages[:, 1:]) == 16


def test_ops_are_registered_correctly() -> None:
    inputs = draw_rows("nvfp4", 5, 32, 16, 24, seed=0)
    cache = torch.zeros(6, 4, inputs.record_bytes, dtype=torch.uint8)
    records = encode_records(*inputs.encode)
    ops = torch.ops.pcpkit
    torch.library.opcheck(ops.encode_records.default, inputs.encode)
    torch.library.opcheck(ops.cache_write.default, inputs.write(cache))
    torch.library.opcheck(ops.scatter_records.default, (records, inputs.slots, cache))
    torch.library.opcheck(ops.gather_records.default, (cache, inputs.slots))


def step(inputs: RowInputs, cache: Tensor) -> Tensor:
    """All public functions: both ways to write, then read back."""
    records = encode_records(*inputs.encode)
    scatter_records(records, inputs.slots, cache[:6])
    cache_write(*inputs.write(cache[6:]))
    return gather_records(cache, inputs.slots)


def test_compiles_into_one_graph() -> None:
    inputs = draw_rows("mxfp4", 6, 64, 32, 24, seed=0)
    want, got = (torch.zeros(12, 4, inputs.record_bytes, dtype=torch.uint8) for _ in range(2))
    expected = step(inputs, want)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(inputs, got)
    assert torch.equal(compiled, expected)
    assert torch.equal(got, want)


@pytest.mark.gpu
def test_inductor_and_cuda_graph_give_the_same_bytes() -> None:
    inputs = bench_inputs(128, "mxfp8", "cuda")
    inputs = replace(inputs, slots=torch.randperm(24, device="cuda").repeat(6)[:128])
    inputs = replace(inputs, slots=torch.where(torch.arange(128).cuda() < 24, inputs.slots, -1))
    want, got, captured = (
        torch.zeros(12, 4, 528, dtype=torch.uint8, device="cuda") for _ in range(3)
    )
    expected = step(inputs, want)
    assert torch.equal(torch.compile(step, fullgraph=True)(inputs, got), expected)
    assert torch.equal(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step(inputs, captured)
    captured.zero_()
    graph.replay()
    assert torch.equal(replayed, expected)
    assert torch.equal(captured, want)


@pytest.mark.gpu
def test_offsets_past_2_to_31() -> None:
    """Pages 2^30 bytes apart: the third lies beyond 2^31; rows of latents likewise."""
    needed = (3 << 30) + (1 << 20)
    if torch.cuda.mem_get_info()[0] < 2 * needed + (1 << 30):
        pytest.skip(f"needs {2 * needed} bytes of device memory")
    buffer = torch.empty(needed, dtype=torch.uint8, device="cuda")
    cache = buffer.as_strided((4, 4, 528), (1 << 30, 528, 1))
    source = torch.empty(needed // 2, dtype=torch.bfloat16, device="cuda")
    inputs = draw_rows("mxfp8", 4, 512, 64, 16, seed=3)
    inputs = replace(inputs, slots=torch.tensor([15, 3, 12, 8]))
    latents = source.as_strided((4, 512), (1 << 29, 1))
    latents.copy_(inputs.latents)
    far = replace(inputs.to("cuda"), latents=latents)
    want = encode_records_reference(*inputs.encode)
    module._launch_write(*far.write(cache))
    assert torch.equal(record_move._launch_gather(cache, far.slots).cpu(), want)
    cache.zero_()
    record_move._launch_scatter(want.cuda(), far.slots, cache)
    assert torch.equal(cache[3, 3].cpu(), want[0])
    assert torch.equal(record_move._launch_gather(cache, far.slots).cpu(), want)
