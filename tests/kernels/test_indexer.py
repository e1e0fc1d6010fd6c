"""index_scores: brute force, both kernels against the reference bit for bit, hostile memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.formats import MXFP4
from pcpkit.kernels import indexer as module
from pcpkit.kernels.indexer import (
    LaunchChoice,
    choose_launch,
    index_scores,
    index_scores_reference,
)

from .bits import MODES, same_bits, spaced
from .inputs_indexer import IndexInputs, bench_inputs, draw_inputs

seeds = st.integers(0, 2**31)
# An interpreted launch takes up to a second.
few = settings(max_examples=5)

ROWS = LaunchChoice(tiled=False)
TILES = LaunchChoice(tiled=True, tiles=2, block_rows=16, block_keys=64, num_warps=4, min_rows=1)
LEFT = replace(TILES, min_rows=8)
"""Requests of fewer than 8 rows in a program go to the row kernel."""
REAL = LaunchChoice(tiled=True, tiles=4)
CHOICES = [
    pytest.param(choice, id=name)
    for name, choice in (("rows", ROWS), ("tiles", TILES), ("left", LEFT))
]
# wgmma needs 64 rows; the interpreter needs small tiles.
DEVICE_CHOICES = [
    pytest.param(choice, id=name)
    for name, choice in (
        ("rows", ROWS),
        ("64x256", REAL),
        ("64x128", LaunchChoice(tiled=True, block_keys=128, num_warps=4, min_rows=1)),
        ("128x128", LaunchChoice(tiled=True, tiles=2, block_rows=128, block_keys=128)),
    )
]


def run(device: str, given: IndexInputs, choice: LaunchChoice | None = None) -> Tensor:
    """The kernels' scores: interpreted on the CPU, compiled on CUDA."""
    return module._launch_scores(*given.to(device).arguments, choice=choice).cpu()


def reference(given: IndexInputs) -> Tensor:
    return index_scores_reference(*given.arguments)


def to_bf16(value: float) -> float:
    """Rounded to FP32, then to BF16."""
    return float(torch.tensor(value, dtype=torch.float32).bfloat16())


def score_by_hand(given: IndexInputs, row: int, position: int) -> float:
    """One score in Python floats; the head sum is rounded to FP32 at each step."""
    if position >= int(given.num_visible[row]):
        return float("-inf")
    if given.candidates is not None:
        block = position // given.candidate_block_size
        if block not in given.candidates[row].tolist():
            return float("-inf")
    page_rows = given.key_cache.shape[1]
    page = int(given.block_table[int(given.row_request[row]), position // page_rows])
    key = MXFP4.decode(given.key_cache[page, position % page_rows]).tolist()
    total: float | None = None
    for record, weight in zip(
        given.query_records[row], given.head_weights[row].tolist(), strict=True
    ):
        dot = sum(a * b for a, b in zip(MXFP4.decode(record).tolist(), key, strict=True))
        term = to_bf16(max(to_bf16(dot), 0.0) * weight)
        total = term if total is None else float(torch.tensor(total + term, dtype=torch.float32))
    assert total is not None
    return to_bf16(total)


@settings(max_examples=20)
@given(seed=seeds, num_candidates=st.integers(0, 2))
def test_reference_is_the_formula(seed: int, num_candidates: int) -> None:
    given = draw_inputs(
        num_rows=3,
        num_heads=3,
        dim=32,
        max_visible=19,
        rows_per_page=8,
        num_candidates=num_candidates,
        seed=seed,
    )
    want = [[score_by_hand(given, row, position) for position in range(19)] for row in range(3)]
    assert reference(given).tolist() == want
    assert index_scores(*given.arguments).tolist() == want


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("choice", CHOICES)
@few
@given(
    seed=seeds,
    shape=st.sampled_from([(5, 4, 64), (20, 3, 32), (9, 8, 128)]),
    num_reqs=st.integers(1, 3),
    num_candidates=st.sampled_from([0, 4]),
)
def test_kernels_equal_reference(
    device: str,
    choice: LaunchChoice,
    seed: int,
    shape: tuple[int, int, int],
    num_reqs: int,
    num_candidates: int,
) -> None:
    num_rows, num_heads, dim = shape
    given = draw_inputs(
        num_rows=num_rows,
        num_heads=num_heads,
        dim=dim,
        num_reqs=num_reqs,
        max_visible=70,
        num_candidates=num_candidates,
        seed=seed,
    )
    got = module._launch_scores(*given.to(device).arguments, choice=choice)
    assert got.stride(0) % 64 == 0
    assert same_bits(got, reference(given))


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("choice", CHOICES)
@few
@given(seed=seeds, spread=st.sampled_from([3, 5, 9, 30]))
# The sums of large groups cancel, and what is left is the small group: not to be lost to rounding.
@example(seed=389, spread=30)
def test_scales_far_apart(device: str, choice: LaunchChoice, seed: int, spread: int) -> None:
    """Whether a pair of records is exact in FP32 or not, its score has the reference's bits."""
    given = draw_inputs(num_rows=9, num_heads=2, dim=64, max_visible=40, spread=spread, seed=seed)
    assert same_bits(run(device, given, choice), reference(given))


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("choice", CHOICES)
def test_large_groups_that_cancel(device: str, choice: LaunchChoice) -> None:
    """24 - 24 in the first group, 3 * 2^-60 in the second: the score is the second's."""
    query, key = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    query[0, [0, 31]], key[0, [0, 31]] = 4.0, torch.tensor([6.0, -6.0], dtype=torch.bfloat16)
    query[0, 40], key[0, 40] = 2.0**-30, 3 * 2.0**-30
    given = IndexInputs(
        query_records=MXFP4.encode(query)[None],
        head_weights=torch.ones(1, 1, dtype=torch.bfloat16),
        key_cache=MXFP4.encode(key)[None],
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        row_request=torch.zeros(1, dtype=torch.int32),
        num_visible=torch.ones(1, dtype=torch.int32),
        max_visible=1,
    )
    assert reference(given).tolist() == [[3 * 2.0**-60]]
    assert run(device, given, choice).tolist() == [[3 * 2.0**-60]]


def limit_inputs(spread: int) -> IndexInputs:
    """Products that cancel in their large groups, with scales ``spread`` apart: no bit to spare."""
    given = draw_inputs(num_rows=4, num_heads=2, dim=128, max_visible=64, num_reqs=1, seed=spread)
    generator = torch.Generator().manual_seed(spread)
    for records in (given.query_records, given.key_cache):
        half = torch.randint(0, 256, records[..., :32].shape, generator=generator)
        records[..., :32] = half.to(torch.uint8)
        # The second half of the channels repeats the first: with the sign turned in the keys, the
        # sum is that of the few codes that differ.
        flip = 0x88 if records is given.key_cache else 0
        records[..., 32:64] = records[..., :32] ^ flip
        records[..., 40] = torch.randint(0, 256, records[..., 40].shape, generator=generator).to(
            torch.uint8
        )
    given.query_records[..., 64:] = torch.tensor([127, 120, 127, 120], dtype=torch.uint8)
    exponent = 127 - (spread - 7)
    given.key_cache[..., 64:] = torch.tensor([127, exponent] * 2, dtype=torch.uint8)
    return replace(given, num_visible=torch.full_like(given.num_visible, 64))


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("spread", [8, 9, 10, 14, 24])
def test_at_the_limit_of_exact_sums(device: str, spread: int) -> None:
    given = limit_inputs(spread)
    want = reference(given)
    for choice in (ROWS, TILES) if device == "cpu" else (ROWS, TILES, replace(REAL, min_rows=1)):
        assert same_bits(run(device, given, choice), want)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("choice", CHOICES)
def test_hostile_scales(device: str, choice: LaunchChoice) -> None:
    """Zero groups, subnormal and huge scales, and NaN groups, which stay in their row or key."""
    given = draw_inputs(num_rows=8, num_heads=2, dim=64, max_visible=64, num_reqs=1, seed=4)
    given = replace(given, num_visible=torch.full_like(given.num_visible, 64))
    keys = given.key_cache.view(-1, 34)
    keys[::7, :16] = 0x80  # zeros of both signs ...
    keys[::7, 32] = 1  # ... with the scale that the quantiser gives them
    keys[1::7, 32] = 0
    keys[2::7, 33] = 250
    keys[3::7, 32:] = torch.tensor([96, 130], dtype=torch.uint8)
    keys[4::7, 33] = 255
    keys[5::7, 32] = 254  # values of 2 and more are infinite
    given.query_records[3, 1, 32] = 255
    given.query_records[5, 0, 32:] = 1
    want = reference(given)
    assert want[3].isnan().all()
    assert 0 < want[4].isnan().sum() < 64
    assert same_bits(run(device, given, choice), want)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("choice", CHOICES)
def test_indices_out_of_range(device: str, choice: LaunchChoice) -> None:
    """Pages and requests that do not exist score -inf, and nothing else changes."""
    given = draw_inputs(num_rows=20, num_heads=2, dim=32, max_visible=100, num_reqs=2, seed=1)
    table, request, visible = (
        given.block_table.clone(),
        given.row_request.clone(),
        given.num_visible.clone(),
    )
    visible[:4] = 1000
    visible[4] = -5
    good = replace(given, num_visible=visible.clamp(max=100))
    table[0, 1], table[1, 2] = -1, 1 << 20
    request[1], request[15] = -1, 2
    bad = replace(given, block_table=table, row_request=request, num_visible=visible)
    want = reference(good).clone()
    position = torch.arange(100)
    want[(given.row_request == 0)[:, None] & (position // 32 == 1)] = float("-inf")
    want[(given.row_request == 1)[:, None] & (position // 32 == 2)] = float("-inf")
    want[[1, 15]] = float("-inf")
    assert same_bits(reference(bad), want)
    assert same_bits(run(device, bad, choice), want)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("choice", CHOICES)
def test_strided_and_poisoned_memory(device: str, choice: LaunchChoice) -> None:
    """Padded pages, slots, rows and heads, 0xff (NaN) between them and in every unused page."""
    given = draw_inputs(num_rows=9, num_heads=3, dim=64, max_visible=50, seed=2)
    want = reference(given)
    used = torch.zeros(given.key_cache.shape[0]).bool()
    used[given.block_table.long()] = True
    cache = given.key_cache.clone()
    cache[~used] = 255
    apart = replace(
        given.to(device),
        query_records=spaced(given.query_records.to(device)),
        key_cache=spaced(cache.to(device), gap=5),
        block_table=spaced(given.block_table.to(device)),
        head_weights=spaced(given.head_weights.to(device)),
    )
    assert same_bits(module._launch_scores(*apart.arguments, choice=choice).cpu(), want)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("choice", CHOICES)
@settings(max_examples=3)
@given(seed=seeds, data=st.data())
def test_rows_do_not_depend_on_each_other(
    device: str, choice: LaunchChoice, seed: int, data: st.DataObject
) -> None:
    given = draw_inputs(num_rows=12, num_heads=2, dim=32, num_candidates=3, seed=seed)
    chosen = torch.tensor(
        data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=20)), dtype=torch.int64
    )
    want = reference(given)[chosen]
    assert same_bits(reference(given.rows(chosen)), want)
    assert same_bits(run(device, given.rows(chosen), choice), want)


@pytest.mark.parametrize("device", MODES)
def test_empty(device: str) -> None:
    given = draw_inputs(num_rows=3, max_visible=20)
    none = given.rows(torch.zeros(0, dtype=torch.int64))
    assert run(device, none).shape == reference(none).shape == (0, 20)
    unseen = replace(given, max_visible=0, num_visible=torch.zeros(3).int())
    assert run(device, unseen).shape == reference(unseen).shape == (3, 0)
    hidden = replace(given, num_visible=torch.zeros(3).int())
    assert (run(device, hidden) == float("-inf")).all()


def test_launch_choice() -> None:
    """Tiles from 16 rows a request on; four a program where that leaves four programs an SM."""
    assert not choose_launch(15, 1, 32768).tiled
    assert not choose_launch(64, 8, 32768).tiled
    assert choose_launch(4096, 1, 32768) == LaunchChoice(tiled=True, tiles=4)
    assert choose_launch(4096, 1, 8192) == LaunchChoice(tiled=True, tiles=2)
    assert choose_launch(64, 1, 8192) == LaunchChoice(tiled=True, tiles=1)
    assert not choose_launch(0, 0, 0).tiled


def test_wrong_arguments() -> None:
    given = draw_inputs(num_rows=3, max_visible=20)
    with pytest.raises(ValueError, match="query_records expected shape"):
        index_scores(*replace(given, query_records=given.query_records[..., :-1]).arguments)
    with pytest.raises(ValueError, match="head_weights expected dtype bfloat16"):
        index_scores(*replace(given, head_weights=given.head_weights.float()).arguments)
    turned = given.key_cache.permute(0, 2, 1).contiguous().permute(0, 2, 1)
    with pytest.raises(ValueError, match="key_cache expected bytes of stride 1"):
        module._launch_scores(*replace(given, key_cache=turned).arguments)
    odd = draw_inputs(num_rows=3, dim=96, max_visible=20)
    with pytest.raises(ValueError, match="key_cache expected 32, 64 or 128 channels, got 96"):
        module._launch_scores(*odd.arguments)


def test_opcheck_and_compile() -> None:
    given = draw_inputs(num_rows=3, dim=32, max_visible=20, num_candidates=2)
    torch.library.opcheck(torch.ops.pcpkit.index_scores.default, given.arguments)
    compiled = torch.compile(index_scores, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(*given.arguments), reference(given))


@pytest.mark.gpu
@pytest.mark.parametrize("choice", DEVICE_CHOICES)
@pytest.mark.parametrize("num_candidates", [0, 400])
def test_real_sizes(choice: LaunchChoice, num_candidates: int) -> None:
    """300 rows of three requests, 4,999 keys, 32 heads of 128: causal, not a multiple of a tile."""
    given = bench_inputs(300, 4999, "cuda", num_reqs=3, num_candidates=num_candidates)
    got = module._launch_scores(*given.arguments, choice=choice)
    assert same_bits(got, reference(given))


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "num_reqs"), [(4096, 1), (64, 64), (1, 1), (700, 90)])
def test_launch_choices_at_real_sizes(num_rows: int, num_reqs: int) -> None:
    given = bench_inputs(num_rows, 8192, "cuda", num_reqs=num_reqs)
    got = index_scores(*given.arguments)
    rows = torch.linspace(0, num_rows - 1, min(num_rows, 60), device="cuda").long()
    assert same_bits(got[rows], reference(given.rows(rows)))


@pytest.mark.gpu
@pytest.mark.parametrize("choice", [ROWS, REAL])
def test_offsets_beyond_2_31(choice: LaunchChoice) -> None:
    """Pages 1 GiB apart: the third starts at byte 2^31."""
    given = draw_inputs(num_rows=64, dim=128, num_reqs=1, max_visible=32, seed=3, device="cuda")
    stride, pages = 2**30, given.key_cache.shape[0]
    buffer = torch.empty(
        (pages - 1) * stride + given.key_cache[0].numel(), dtype=torch.uint8, device="cuda"
    )
    far = buffer.as_strided(given.key_cache.shape, (stride, given.key_cache.stride(1), 1))
    far.copy_(given.key_cache)
    table = torch.full_like(given.block_table, pages - 1)
    want = reference(replace(given, block_table=table))
    given = replace(given, block_table=table, key_cache=far)
    assert same_bits(module._launch_scores(*given.arguments, choice=choice), want)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "num_reqs"), [(128, 1), (8, 8)])
def test_cuda_graph(num_rows: int, num_reqs: int) -> None:
    given = bench_inputs(num_rows, 2048, "cuda", num_reqs=num_reqs, num_candidates=20)
    index_scores(*given.arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = index_scores(*given.arguments)
    given.query_records.copy_(given.query_records.flip(0))
    graph.replay()
    assert same_bits(out, reference(given))


@pytest.mark.gpu
def test_compile_on_device() -> None:
    given = bench_inputs(64, 1000, "cuda")
    compiled = torch.compile(index_scores, fullgraph=True)
    assert same_bits(compiled(*given.arguments), reference(given))
