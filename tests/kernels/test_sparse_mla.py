"""sparse_mla: reference against brute force, kernels against the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.formats import RECORD_FORMATS
from pcpkit.kernels import sparse_mla as module
from pcpkit.kernels.sparse_mla import choose_launch, sparse_mla, sparse_mla_reference
from pcpkit.kernels.sparse_mla_decode import attend_few
from pcpkit.kernels.sparse_mla_rows import POOL, QUERIES, REQUESTS, choose_part, collect_rows

from .bits import MODES, base_of, same_bits, spaced
from .inputs_sparse_mla import AttentionInputs, draw_inputs

# An interpreted launch costs tens of milliseconds a row.
few = settings(max_examples=15)


def outputs(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """NaN-filled outputs: whatever is not written shows."""
    out = torch.full_like(inputs.query, float("nan"), memory_format=torch.contiguous_format)
    return out, torch.full(inputs.query.shape[:2], float("nan"), device=out.device)


def run_kernel(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    out, lse = outputs(inputs)
    module._launch(*inputs.arguments, out, lse)
    return out, lse


def run_reference(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    out, lse = outputs(inputs)
    sparse_mla_reference(*inputs.arguments, out, lse)
    return out, lse


def slots_of(inputs: AttentionInputs, row: int) -> list[Tensor]:
    """Dequantized rows a query attends to, straight from the definition."""
    position, request = int(inputs.positions[row]), int(inputs.row_request[row])
    found: list[Tensor] = []

    def read(cache: Tensor, table: Tensor, record: str, where: int) -> None:
        block, offset = divmod(where, cache.shape[1])
        if block < table.shape[1] and int(table[request, block]) >= 0:
            found.append(RECORD_FORMATS[record].decode(cache[int(table[request, block]), offset]))

    first = max(position - inputs.window_size + 1, int(inputs.window_floor[row]), 0)
    for where in range(first, position + 1):
        read(inputs.window_cache, inputs.window_block_table, "mxfp8", where)
    for where in inputs.selection[row].tolist():
        if where >= 0:
            read(inputs.compressed_cache, inputs.block_table, inputs.compressed_record, where)
    return found


def exact(inputs: AttentionInputs, row: int) -> tuple[Tensor, Tensor]:
    """Float64 attention of one row without any rounding, and its log-sum-exp."""
    query = inputs.query[row].double()
    rows = slots_of(inputs, row)
    if not rows:
        return torch.zeros_like(query), torch.full((query.shape[0],), -math.inf).double()
    keys = torch.stack(rows).double()
    scores = query @ keys.t() * query.shape[1] ** -0.5
    lse = scores.logsumexp(-1)
    total = torch.logaddexp(lse, inputs.sink.double())
    return (scores - total[:, None]).exp() @ keys, lse


def bf16_bound(inputs: AttentionInputs, row: int) -> float:
    """Error that BF16 probabilities and a BF16 result alone allow, doubled for running maxima.

    Each probability is off by 2^-9 of itself and the result by 2^-9 of itself; a convex combination
    of rows is at most their largest magnitude.
    """
    rows = slots_of(inputs, row)
    largest = max((float(key.abs().max()) for key in rows), default=0.0)
    return 2 * (2**-9 + 2**-9) * largest


@pytest.mark.parametrize("record", ["nvfp4", "mxfp8"])
def test_reference_is_the_definition(record: str) -> None:
    inputs = draw_inputs(num_rows=9, record=record, seed=3)
    inputs.block_table[1, 0] = -1
    out, lse = run_reference(inputs)
    for row in range(9):
        want, want_lse = exact(inputs, row)
        assert float((out[row].double() - want).abs().max()) <= bf16_bound(inputs, row)
        # FP32 scores of order 1: the log-sum-exp keeps 20 bits.
        torch.testing.assert_close(lse[row].double(), want_lse, rtol=0, atol=1e-5)


SHAPES = [
    pytest.param(dict(num_heads=8, head_dim=64), id="8x64"),
    pytest.param(dict(num_heads=3, head_dim=128, record="mxfp8"), id="3x128"),
    pytest.param(dict(num_heads=20, head_dim=64, num_selected=70), id="20x64"),
    pytest.param(dict(num_heads=8, head_dim=64, num_selected=0), id="window only"),
    pytest.param(dict(num_heads=33, head_dim=512, window_size=128, num_rows=2), id="33x512"),
]


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_stays_within_the_bf16_bound(shape: dict[str, Any], device: str) -> None:
    sizes: dict[str, Any] = {"num_rows": 6, **shape}
    inputs = draw_inputs(**sizes, device=device, seed=1)
    out, lse = run_kernel(inputs)
    want, want_lse = run_reference(inputs)
    assert not out.isnan().any()
    for row in range(out.shape[0]):
        error = float((out[row].double() - want[row].double()).abs().max())
        assert error <= bf16_bound(inputs, row)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [8, 16, 32, 64])
@pytest.mark.parametrize("record", ["nvfp4", "mxfp8"])
def test_model_shapes(num_heads: int, record: str) -> None:
    """Prefill sizes; both errors are measured against a float64 softmax over the same rows."""
    inputs = draw_inputs(
        num_rows=0,
        num_heads=num_heads,
        head_dim=512,
        window_size=128,
        num_selected=512,
        num_reqs=2,
        length=4096,
        tail=300,
        record=record,
        device="cuda",
    )
    out, lse = run_kernel(inputs)
    want, want_lse = run_reference(inputs)
    for row in (0, 150, 299, 300, 599):
        exact_row, _ = exact(inputs, row)
        ours = (out[row].double() - exact_row).norm()
        reference = (want[row].double() - exact_row).norm()
        # Running maxima round a probability relative to a smaller maximum: the same 2^-9.
        assert float(ours) <= 1.25 * float(reference)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", MODES)
def test_hostile_memory(device: str) -> None:
    """NaN records that nothing may read, strided query and pages, canaries around the output."""
    inputs = draw_inputs(num_rows=5, device=device, seed=5)
    want, want_lse = run_kernel(inputs)
    used_window = inputs.window_block_table.flatten().long()
    spare = torch.full_like(inputs.window_cache[:2], 255)
    window = torch.cat([spare, inputs.window_cache])
    window_table = (used_window + 2).int().view_as(inputs.window_block_table)
    compressed = torch.cat(
        [torch.full_like(inputs.compressed_cache[:1], 255), inputs.compressed_cache]
    )
    hostile = replace(
        inputs,
        query=spaced(inputs.query),
        window_cache=spaced(window),
        window_block_table=spaced(window_table),
        compressed_cache=spaced(compressed),
        block_table=spaced(inputs.block_table + 1),
        selection=spaced(inputs.selection),
    )
    buffer = torch.full((7, *inputs.query.shape[1:]), float("nan"), device=device).bfloat16()
    out = buffer[1:6]
    lse = torch.empty_like(want_lse)
    module._launch(*hostile.arguments, out, lse)
    assert same_bits(out, want)
    assert same_bits(lse, want_lse)
    assert bool(buffer[0].isnan().all())
    assert bool(buffer[6].isnan().all())
    assert base_of(hostile.window_cache).numel() > hostile.window_cache.numel()


@pytest.mark.parametrize("device", MODES)
def test_skipped_slots(device: str) -> None:
    """-1, unmapped pages, entries beyond the table, the floor; a row without a slot is zero."""
    inputs = draw_inputs(num_rows=4, num_reqs=1, device=device, seed=7)
    inputs.selection[0] = -1
    inputs.window_floor[0] = 10_000
    inputs.selection[1] = 5000
    inputs.window_block_table[0, int(inputs.positions[2]) // 32] = -1
    inputs.block_table[0, 0] = -1
    out, lse = run_kernel(inputs)
    want, want_lse = run_reference(inputs)
    assert bool((out[0] == 0).all())
    assert bool((lse[0] == -math.inf).all())
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-5)
    for row in range(4):
        error = float((out[row].double() - want[row].double()).abs().max())
        assert error <= bf16_bound(inputs, row)


@pytest.mark.parametrize("device", MODES)
def test_a_hostile_row_stays_alone(device: str) -> None:
    """A NaN query and a NaN record reach the rows that read them and no other row."""
    inputs = draw_inputs(num_rows=4, device=device, seed=2)
    want, _ = run_kernel(inputs)
    inputs.query[1, 2] = float("nan")
    out, _ = run_kernel(inputs)
    assert bool(out[1, 2].isnan().all())
    keep = torch.ones(4, 8, dtype=torch.bool)
    keep[1, 2] = False
    assert same_bits(out.cpu()[keep], want.cpu()[keep])


@pytest.mark.parametrize("device", MODES)
def test_no_rows(device: str) -> None:
    inputs = draw_inputs(num_rows=3, device=device).rows(torch.empty(0, dtype=torch.int64))
    out, _ = run_kernel(inputs)
    assert out.shape == (0, 8, 64)


@few
@given(seed=st.integers(0, 100), chosen=st.lists(st.integers(0, 5), min_size=1, max_size=7))
def test_a_row_does_not_see_its_neighbours(seed: int, chosen: list[int]) -> None:
    """Any subset, order and repetition: shared and private workspaces alike, bit for bit."""
    inputs = draw_inputs(num_rows=6, seed=seed, length=64, num_reqs=1)
    part = inputs.rows(torch.tensor(chosen))
    for run in (run_kernel, run_reference):
        whole, whole_lse = run(inputs)
        out, lse = run(part)
        assert same_bits(out, whole[chosen])
        assert same_bits(lse, whole_lse[chosen])


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [8, 16, 32, 64])
def test_a_row_does_not_see_its_neighbours_compiled(num_heads: int) -> None:
    """1, 3, 64, 65 and 700 rows: every route and workspace gives a row the same bits."""
    inputs = draw_inputs(
        num_rows=700,
        num_heads=num_heads,
        head_dim=512,
        window_size=128,
        num_selected=512,
        num_reqs=3,
        length=2000,
        device="cuda",
    )
    whole, whole_lse = run_kernel(inputs)
    for count in (1, 3, 64, 65, 300):
        chosen = torch.randperm(700, device="cuda")[:count]
        out, lse = run_kernel(inputs.rows(chosen))
        assert same_bits(out, whole[chosen])
        assert same_bits(lse, whole_lse[chosen])


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("num_selected", [0, 40, 64])
def test_both_routes_give_the_same_bits(num_selected: int, device: str) -> None:
    inputs = draw_inputs(
        num_rows=3, num_heads=16, window_size=64, num_selected=num_selected, device=device
    )
    want, want_lse = run_kernel(inputs)
    out, lse = outputs(inputs)
    attend_few(*inputs.arguments, out, lse, heads=16, slots=64)
    assert same_bits(out, want)
    assert same_bits(lse, want_lse)


@pytest.mark.parametrize(
    ("pool", "requests", "queries", "holds"),
    [
        (10**7, 8 * 32_768, 8 * 512, QUERIES),
        (10**7, 8192, 4096 * 512, REQUESTS),
        (32_768, 1024 * 32_768, 1024 * 512, POOL),
    ],
)
def test_workspace_is_the_smallest(pool: int, requests: int, queries: int, holds: object) -> None:
    part = choose_part(pool=pool, requests=requests, queries=queries)
    assert part.holds == holds
    assert part.num_rows == min(pool, requests, queries)


def with_spare_pages(inputs: AttentionInputs, count: int) -> AttentionInputs:
    """The same call with ``count`` more pages of NaN records in both caches."""

    def grown(cache: Tensor) -> Tensor:
        return torch.cat([cache, cache.new_full((count, *cache.shape[1:]), 255)])

    return replace(
        inputs,
        window_cache=grown(inputs.window_cache),
        compressed_cache=grown(inputs.compressed_cache),
    )


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("num_rows", [1, 9, 40])
@pytest.mark.parametrize("spare_pages", [0, 40])
def test_every_workspace_gives_the_same_bits(num_rows: int, spare_pages: int, device: str) -> None:
    """1 row holds queries; 40 rows hold the pool, or the requests when the pool is large."""
    inputs = draw_inputs(num_rows=40, num_reqs=1, device=device, seed=9)
    want, _ = run_kernel(inputs.rows(torch.arange(40, device=device)))
    larger = with_spare_pages(inputs, spare_pages)
    out, _ = run_kernel(larger.rows(torch.arange(num_rows, device=device)))
    assert same_bits(out, want[:num_rows])


def assert_collects(inputs: AttentionInputs, queries: list[int]) -> None:
    """Every slot of ``queries`` leads to the bytes of its decoded record, or is -1 if skipped."""
    arguments = inputs.arguments
    rows, index = collect_rows(*arguments[1:9], *arguments[11:], inputs.query)
    for query in queries:
        used = index[query][index[query] >= 0]
        want = slots_of(inputs, query)
        assert used.shape[0] == len(want)
        if want:
            assert same_bits(rows[used.long()], torch.stack(want).to(rows.dtype))


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("record", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("num_rows", [1, 9, 40])
@pytest.mark.parametrize("spare_pages", [0, 40])
def test_collected_rows_are_the_records(
    num_rows: int, spare_pages: int, record: str, device: str
) -> None:
    """All parts of the one launch, whatever the workspace holds; unmapped pages and -1 skipped."""
    inputs = draw_inputs(num_rows=40, num_reqs=2, record=record, device=device, seed=11)
    inputs.selection[0, :3] = -1
    inputs.block_table[1, 0] = -1
    part = with_spare_pages(inputs, spare_pages).rows(torch.arange(num_rows, device=device))
    assert_collects(part, list(range(0, num_rows, 4)))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [17, 64, 700])
def test_collected_rows_of_model_shapes(num_rows: int) -> None:
    inputs = draw_inputs(
        num_rows=num_rows,
        num_heads=8,
        head_dim=512,
        window_size=128,
        num_selected=512,
        num_reqs=3,
        length=2000,
        device="cuda",
    )
    assert_collects(inputs, [0, 5, num_rows // 2, num_rows - 1])


def test_launch_depends_on_heads_only() -> None:
    assert choose_launch(64, 512, hopper_gpu=True).gluon
    assert not choose_launch(64, 512, hopper_gpu=False).gluon
    assert choose_launch(8, 512, hopper_gpu=True).heads == 16
    assert choose_launch(32, 512, hopper_gpu=True).heads == 32


def test_bad_arguments_are_refused() -> None:
    inputs = draw_inputs(num_rows=3)
    with pytest.raises(ValueError, match="positions expected shape"):
        sparse_mla(*replace(inputs, positions=inputs.positions[:2]).arguments)
    with pytest.raises(ValueError, match="store mxfp8 records"):
        sparse_mla(*replace(inputs, compressed_record="mxfp8").arguments)


def test_opcheck_and_compile() -> None:
    inputs = draw_inputs(num_rows=3)
    out, lse = outputs(inputs)
    torch.library.opcheck(torch.ops.pcpkit.sparse_mla.default, (*inputs.arguments, out, lse))
    compiled = torch.compile(sparse_mla, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(*inputs.arguments), sparse_mla(*inputs.arguments))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    inputs = draw_inputs(num_rows=70, num_heads=64, head_dim=512, window_size=128, device="cuda")
    want, _ = run_kernel(inputs)
    out, lse = outputs(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module._launch(*inputs.arguments, out, lse)
    out.fill_(float("nan"))
    graph.replay()
    assert same_bits(out, want)


@pytest.mark.gpu
def test_pages_beyond_int32_bytes() -> None:
    """The last pages of a cache of more than 2^31 bytes."""
    inputs = draw_inputs(num_rows=5, head_dim=512, window_size=128, device="cuda")
    want, _ = run_kernel(inputs)
    pages = 2**31 // (64 * 288) + 50
    cache = torch.full((pages, 64, 288), 255, dtype=torch.uint8, device="cuda")
    held = inputs.compressed_cache.shape[0]
    cache[-held:] = inputs.compressed_cache
    moved = replace(inputs, compressed_cache=cache, block_table=inputs.block_table + (pages - held))
    out, _ = run_kernel(moved)
    assert same_bits(out, want)
