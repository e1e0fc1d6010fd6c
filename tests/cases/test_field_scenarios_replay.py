"""Field scenarios of the sliding window and of replay (class K3), and what hits do to others.

`Watched` runs TINY (window 8, blocks of 4) and checks blocks, bytes and reads after every step; see
tests/cases/tiny.py. REPLAYREF is `replay_reference`, a bounded replay without blocks or steps. What
each scenario was, and which test covers those that are not here: docs/field-scenarios.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from pcpkit.cache.replay import BoundedReplay, ExactReplay, ReplayPolicy, SnapshotReplay
from pcpkit.engine.request import RequestOutput
from pcpkit.formats import RECORD_FORMATS
from pcpkit.kernels.sparse_mla import sparse_mla
from pcpkit.model.decoder import TextModel
from pcpkit.testing.compare import same_bits

from .tiny import (
    BLOCK,
    TEXT,
    WINDOW,
    Watched,
    ask,
    assert_cold,
    assert_same,
    cold_run,
    flow_model,
    other,
    real_model,
    replay_reference,
)

BOTH = pytest.mark.parametrize("model_of", [flow_model, real_model], ids=["flow", "real"])
# Without snapshots at the ends of prompts, so that a repeated prompt has something to replay.
REPLAYS = pytest.mark.parametrize(
    "replay",
    [BoundedReplay(), ExactReplay(), SnapshotReplay(keeps_prompt_ends=False)],
    ids=lambda p: type(p).__name__,
)
ModelOf = Callable[[], TextModel]


def assert_finite(output: RequestOutput) -> None:
    assert output.logits is not None
    assert bool(output.logits.isfinite().all())


def assert_replayed(model_of: ModelOf, output: RequestOutput, hit: int) -> None:
    """REPLAYREF(H); of the real model it is known that it read no poison."""
    assert output.num_cached_tokens == hit
    assert_finite(output)
    if model_of is flow_model:
        prompt = output.request.prompt_token_ids
        assert output.token_ids == replay_reference(prompt, len(output.token_ids), hit)


def with_prefix(shared: int, rest: int, seed: int) -> tuple[int, ...]:
    return (*TEXT[:shared], *other(rest, seed))


# --- hits ---------------------------------------------------------------------------------------


@BOTH
@REPLAYS
def test_b011_a_repeated_prompt_reads_its_own_windows(
    model_of: ModelOf, replay: ReplayPolicy
) -> None:
    """P = 3 W; A still decodes, so B has another ring and other window blocks."""
    watched = Watched(model_of(), replay)
    watched.submit(ask("a", 24, 20))
    for _ in range(3):
        watched.step()
    watched.submit(ask("b", 24, 3))
    watched.step()
    rings = watched.steps[-1].batch.ring_blocks.tolist()
    assert len(set(rings)) == 2
    outputs = {output.request.request_id: output for output in watched.run()}
    hit = outputs["b"].num_cached_tokens
    assert hit == 20
    of_a, of_b = (watched.recorder.spans(name)["window.0"] for name in "ab")
    wanted = torch.arange(hit - WINDOW, hit)
    found = [span.records[torch.isin(span.positions, wanted)] for span in (of_a, of_b)]
    assert len(found[0]) == WINDOW
    assert same_bits(*found)
    assert_cold(model_of(), [outputs["a"]])
    if replay.exact_only:
        assert_cold(model_of(), [outputs["b"]])
    else:
        assert_replayed(model_of, outputs["b"], 20)


@BOTH
def test_b012_a_replay_starts_in_a_block_of_its_own(model_of: ModelOf) -> None:
    """15 tokens in common are a hit of 12: positions 4 .. are replayed, in window block 1."""
    watched = Watched(model_of(), BoundedReplay())
    watched.answer(ask("a", with_prefix(15, 5, 1)))
    watched.submit(ask("b", with_prefix(15, 5, 2), 3))
    watched.step()
    assert watched.rows()[-1] == [("b", 4, 20)]
    (table,) = watched.steps[-1].batch.window_block_table.tolist()
    assert table[0] == -1
    assert len(set(table[1:])) == 4
    assert min(table[1:]) >= 0
    (output,) = watched.run()
    assert_replayed(model_of, output, 12)


@BOTH
def test_b013_windows_of_replayed_rows_grow_from_one_to_w(model_of: ModelOf) -> None:
    watched = Watched(model_of(), BoundedReplay())
    watched.answer(ask("a", with_prefix(24, 3, 1)))
    watched.submit(ask("b", with_prefix(24, 3, 2), 3))
    watched.step()
    (table,) = watched.steps[-1].batch.window_block_table.tolist()
    assert [block < 0 for block in table] == [True] * 4 + [False] * 3
    read = watched.reads[-1]
    assert {position: len(read["b", position]) for _, position in read} == {
        position: min(position - 15, WINDOW) for position in range(16, 27)
    }
    assert read["b", 24] == list(range(17, 25))
    (output,) = watched.run()
    assert_replayed(model_of, output, 24)


@BOTH
@pytest.mark.parametrize(
    ("shared", "hit", "computed"), [(4, 0, 20), (8, 0, 20), (12, 12, 16)], ids=str
)
def test_b015_a_hit_within_the_window_is_dropped(
    model_of: ModelOf, shared: int, hit: int, computed: int
) -> None:
    watched = Watched(model_of(), BoundedReplay())
    watched.answer(ask("a", with_prefix(shared, 20 - shared, 1)))
    watched.submit(ask("b", with_prefix(shared, 20 - shared, 2), 3))
    assert watched.matched(TEXT[:shared]) == shared
    result = watched.step()
    assert watched.rows()[-1] == [("b", 20 - computed, 20)]
    assert (result.num_prompt_rows, result.num_replayed_rows) == (computed, WINDOW * (hit > 0))
    (output,) = watched.run()
    if hit:
        assert_replayed(model_of, output, hit)
    else:
        assert_cold(model_of(), [output])


@BOTH
@REPLAYS
def test_b016_chunks_that_end_inside_the_replayed_range(
    model_of: ModelOf, replay: ReplayPolicy
) -> None:
    """H = 12, budget 4, P = 18. The exact cone of two layers starts at 0 instead of 4."""
    start = 4 if isinstance(replay, BoundedReplay) else 0
    outputs: list[RequestOutput] = []
    for budget in (4, 64):
        watched = Watched(model_of(), replay)
        watched.answer(ask("a", with_prefix(12, 6, 1)))
        before = len(watched.steps)
        watched.submit(ask("b", with_prefix(12, 6, 2), 1))
        while watched.engine.has_work:
            outputs += watched.step(budget).finished
        watched.assert_no_leak()
        steps = watched.steps[before:]
        for step in steps:
            assert step.batch.replay is not None
            assert int(step.batch.replay.layer_starts[0, 0]) == start
        if budget == 4:
            cuts = [(begin, min(begin + 4, 18)) for begin in range(start, 18, 4)]
            assert watched.rows()[before:] == [[("b", *cut)] for cut in cuts]
            blocks = [int((step.batch.block_table >= 0).sum()) for step in steps]
            assert blocks == [max(3, -(-end // BLOCK)) for _, end in cuts]
    assert_same(*outputs)
    if start:
        assert_replayed(model_of, outputs[0], 12)
    else:
        assert_cold(model_of(), outputs)


@REPLAYS
def test_b019_window_blocks_are_never_cached(replay: ReplayPolicy) -> None:
    """P = 6 W in chunks of W: early window blocks go back during the prefill; then B hits."""
    watched = Watched(flow_model(), replay, chunk_tokens=WINDOW)
    window = watched.pools["window"]

    def step() -> None:
        watched.step()
        assert not any(window.is_cached(block) for block in range(window.num_blocks))

    watched.submit(ask("a", 48, 40))
    for _ in range(6):
        step()
        assert len(watched.window_blocks("a")) <= WINDOW // BLOCK
    watched.submit(ask("b", 48, 5))
    together = 0
    while watched.engine.has_work:
        step()
        states = watched.engine._states
        if all(name in states and states[name].stay is not None for name in "ab"):
            together += 1
            assert not set(watched.window_blocks("a")) & set(watched.window_blocks("b"))
    assert together >= 5
    assert window.on_evict is None
    watched.assert_no_leak()


@BOTH
@pytest.mark.parametrize(
    ("length", "hit", "start", "computed"), [(16, 12, 4, 12), (12, 0, 0, 12)], ids=str
)
def test_b171_the_whole_prompt_is_cached(
    model_of: ModelOf, length: int, hit: int, start: int, computed: int
) -> None:
    watched = Watched(model_of(), BoundedReplay())
    first = watched.answer(ask("a", length, 3))
    assert watched.matched(TEXT[:length]) == length
    watched.submit(ask("b", length, 3))
    watched.step()
    assert watched.rows()[-1] == [("b", start, length)]
    assert length - start == computed
    (again,) = watched.run()
    assert_cold(model_of(), [first] if hit else [first, again])
    if hit:
        assert_replayed(model_of, again, hit)


@BOTH
@pytest.mark.parametrize("hit", [12, 16])
def test_b079_pairs_behind_a_hit(model_of: ModelOf, hit: int) -> None:
    """P = 22 in chunks of 3, 1, 5 and the rest: 11 entries; the ring holds the open position."""
    prompt = with_prefix(hit, 22 - hit, 2)
    watched = Watched(model_of(), BoundedReplay())
    watched.answer(ask("a", with_prefix(hit, 22 - hit, 1)))
    watched.submit(ask("b", prompt, 2))
    sizes = iter((3, 1, 5))
    outputs: list[RequestOutput] = []
    while watched.engine.has_work:
        outputs += watched.step(next(sizes, None)).finished
    assert_replayed(model_of, outputs[0], hit)
    _, cold_recorder = cold_run(model_of(), ask("b", prompt, 2))
    found = watched.recorder.cache_bytes("b")
    want = cold_recorder.cache_bytes("cold")["compressed.0"]
    # 22 tokens and the first sampled one: 11 pairs, which in layer 0 depend on no window. That
    # nothing below the hit changes is checked by `Watched` in every step.
    assert len(found["compressed.0"]) == len(want) == 11
    used = 8 if model_of is flow_model else want.shape[1]  # a record of hashes has eight bytes
    assert same_bits(found["compressed.0"][:, :used], want[:, :used])
    assert [name for name in found if "ring" in name] == ["ring.0"], "position 22 is open"


# --- decode -------------------------------------------------------------------------------------


@BOTH
def test_b020_a_retired_block_leaves_the_table_at_once(model_of: ModelOf) -> None:
    """P = 9, 16 more; every block that is given back is poisoned and goes to somebody else."""
    watched = Watched(model_of(), max_requests=2)
    watched.submit(ask("a", 9, 16), ask("b", other(2, 0), 20))
    outputs = []
    while watched.engine.has_work:
        outputs += watched.step().finished
        step = watched.steps[-1]
        if "a" not in step.request_ids or len(watched.steps) == 1:
            continue
        index = step.request_ids.index("a")
        query = int(step.batch.num_computed_tokens[index])
        table = step.batch.window_block_table[index].tolist()[: query // BLOCK + 1]
        first = max(query - WINDOW + 1, 0) // BLOCK
        assert [block < 0 for block in table] == [place < first for place in range(len(table))]
        read = watched.reads[-1]["a", query]
        assert read == list(range(max(query - WINDOW + 1, 0), query + 1))
        assert {position // BLOCK for position in read} == set(range(first, len(table)))
    # Blocks did move from one to the other.
    owners: dict[int, set[str]] = {}
    for step in watched.steps:
        for name, table in zip(
            step.request_ids, step.batch.window_block_table.tolist(), strict=True
        ):
            for block in table:
                owners.setdefault(block, set()).add(name)
    assert any(len(names) == 2 for block, names in owners.items() if block >= 0)
    assert_cold(model_of(), outputs)
    watched.assert_no_leak()


@REPLAYS
def test_b021_every_window_record_is_that_of_its_reader(replay: ReplayPolicy) -> None:
    """1,000 random steps with hits, preemption, aborts and churn; the shadow is in `Watched`."""
    draw = random.Random(21)
    watched = Watched(flow_model(), replay, num_blocks=22, chunk_tokens=24, spare=0)
    live: set[str] = set()
    hits = preemptions = 0
    for number in range(1000):
        if len(live) < 6 and draw.random() < 0.5:
            prompt = with_prefix(
                draw.choice((0, 9, 20, 33)), draw.randint(1, 12), draw.randrange(4)
            )
            watched.submit(ask(str(number), prompt, draw.choice((1, 2, 25)), logits="none"))
            live.add(str(number))
        if live and draw.random() < 0.03:
            name = draw.choice(sorted(live))
            watched.engine.abort(name)
            live.remove(name)
        result = watched.step(draw.choice((None, None, 1, 5)))
        preemptions += len(result.preempted)
        for output in result.finished:
            live.remove(output.request.request_id)
            hits += output.num_cached_tokens > 0
            if replay.exact_only:
                assert_cold(flow_model(), [output])
    watched.run()
    assert hits >= 50
    assert preemptions >= 10
    assert watched.engine.stats.num_evictions >= 100


@pytest.mark.parametrize("query", range(WINDOW - 2, WINDOW + 2))
def test_b024_the_window_counts_the_query_itself(query: int) -> None:
    """Token t has the one-hot value t, and all scores are equal."""
    length, dim = WINDOW + 4, 32
    values = torch.eye(length, dim).bfloat16()
    records = RECORD_FORMATS["mxfp8"].encode(values).view(length // BLOCK, BLOCK, -1)
    out = sparse_mla(
        torch.zeros(1, 1, dim).bfloat16(),
        torch.tensor([query]),
        torch.zeros(1, dtype=torch.int32),
        records,
        torch.arange(length // BLOCK, dtype=torch.int32)[None],
        torch.zeros(1, dtype=torch.int32),
        records[:1],
        torch.zeros(1, 1, dtype=torch.int32),
        torch.empty(1, 0, dtype=torch.int32),
        torch.full((1,), -torch.inf),
        1.0,
        WINDOW,
        "mxfp8",
    )[0, 0]
    first = {WINDOW: 1, WINDOW + 1: 2}.get(query, 0)
    count = query - first + 1
    want = torch.zeros(dim)
    want[first : query + 1] = 1 / count
    assert same_bits(out, want.bfloat16())
