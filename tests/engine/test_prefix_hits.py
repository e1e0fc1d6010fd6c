"""What requests take over from the prefix cache, on a model that moves data as the real one does.

Answers are compared with cold runs, so every test here also checks blocks, slots and floors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from pcpkit.cache.prefix import HashPrefixCache, PrefixEvent
from pcpkit.cache.replay import (
    BoundedReplay,
    ExactReplay,
    NoReplay,
    ReplayPolicy,
    SnapshotReplay,
)
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.engine import Engine, EngineConfig, Request, RequestOutput, StepResult
from pcpkit.engine.runner import ComputedStep
from pcpkit.engine.sizing import TrimSetting

from .dataflow_model import dataflow_config, dataflow_model
from .small_model import random_prompt, request

MODEL = dataflow_config()  # window 4, 4 layers: a cone of 12 rows
LIMITS = EngineConfig(chunk_tokens=64, max_requests=4, block_size=4, window_block_size=4)
PREFIX = random_prompt(64, 0)


def _engine(
    replay: ReplayPolicy, config: EngineConfig = LIMITS, *, budget: int = 10**6, **options: Any
) -> Engine:
    store = SnapshotStore(budget) if replay.uses_snapshots else None
    return Engine(
        dataflow_model(MODEL),
        config,
        replay=replay,
        snapshots=store,
        **options,
    )


def _ask(name: str, suffix: int, length: int = 8, prefix: int = 64, **params: Any) -> Request:
    params = {"max_new_tokens": 3, "logits": "last", "ignore_eos": True} | params
    return request(name, (*PREFIX[:prefix], *random_prompt(length, 100 + suffix)), **params)


def _cold(asked: Request) -> RequestOutput:
    (output,) = _engine(NoReplay()).generate([asked])
    return output


def _assert_cold(output: RequestOutput) -> None:
    expected = _cold(output.request)
    assert output.token_ids == expected.token_ids
    assert output.logits is not None
    assert expected.logits is not None
    assert torch.equal(output.logits, expected.logits)


def _one_by_one(engine: Engine, asked: Sequence[Request]) -> Iterator[RequestOutput]:
    for one in asked:
        yield from engine.generate([one])
        engine.check_invariants()


def test_each_policy_computes_what_it_says() -> None:
    asked = [_ask(str(number), number) for number in range(4)]
    seen: dict[str, list[tuple[int, int]]] = {}
    for replay in (NoReplay(), BoundedReplay(), ExactReplay(), SnapshotReplay()):
        outputs = list(_one_by_one(_engine(replay), asked))
        seen[type(replay).__name__] = [(o.num_cached_tokens, o.num_replayed_rows) for o in outputs]
        exact = not isinstance(replay, BoundedReplay)
        assert [output.exact for output in outputs] == [True] + [exact] * 3
        if exact:
            for output in outputs:
                _assert_cold(output)
    assert seen == {
        "NoReplay": [(0, 0)] * 4,
        "BoundedReplay": [(0, 0), (64, 4), (64, 4), (64, 4)],
        "ExactReplay": [(0, 0), (64, 12), (64, 12), (64, 12)],
        "SnapshotReplay": [(0, 0), (64, 12), (64, 0), (64, 0)],
    }


def test_a_hit_leaves_at_least_one_token_to_compute() -> None:
    """Invariant 19: H <= tokens - 1, whole blocks."""
    engine = _engine(ExactReplay())
    lengths = (40, 40, 41, 43, 44, 45, 39)
    asked = [
        request(str(n), PREFIX[:length], max_new_tokens=1, logits="last")
        for n, length in enumerate(lengths)
    ]
    outputs = list(_one_by_one(engine, asked))
    assert [o.num_cached_tokens for o in outputs] == [0, 36, 40, 40, 40, 44, 36]
    for output in outputs:
        _assert_cold(output)


def test_a_request_that_needs_every_row_reads_nothing_but_leaves_its_blocks() -> None:
    engine = _engine(ExactReplay())
    first, every, last = _one_by_one(
        engine, [_ask("0", 0), _ask("1", 1, logits="all"), _ask("2", 1)]
    )
    assert (first.num_cached_tokens, every.num_cached_tokens) == (0, 0)
    assert every.logits is not None
    assert every.logits.shape[0] == 72 + 2
    assert last.num_cached_tokens == 68, "its own suffix was published"
    assert engine.stats.num_queries == 2
    _assert_cold(last)


def test_tenants_share_nothing() -> None:
    """Salts a, b, a, none, none (field scenario B148)."""
    engine = _engine(ExactReplay())
    asked = [_ask(str(n), 0, cache_salt=salt) for n, salt in enumerate(("a", "b", "a", "", ""))]
    hits = [output.num_cached_tokens for output in _one_by_one(engine, asked)]
    assert hits == [0, 0, 68, 0, 68]
    # The chain of a prompt below a block starts only when something was generated.
    short = request("s", PREFIX[:2], max_new_tokens=14, cache_salt="a", ignore_eos=True)
    (output,) = engine.generate([short])
    tokens = (*PREFIX[:2], *output.token_ids)
    for salt, hit in (("", 0), ("a", 12)):
        asked = request(f"long{salt}", tokens, max_new_tokens=1, cache_salt=salt)
        assert engine.generate([asked])[0].num_cached_tokens == hit


def test_generated_tokens_are_found_again() -> None:
    """A conversation: the next prompt is the last one with its answer."""
    engine = _engine(ExactReplay())
    (first,) = engine.generate([_ask("0", 0, max_new_tokens=20)])
    follow = request(
        "1", (*first.request.prompt_token_ids, *first.token_ids, 5, 6), max_new_tokens=2
    )
    (second,) = engine.generate([follow])
    # 91 tokens were computed: 22 full blocks.
    assert second.num_cached_tokens == 88
    assert second.token_ids == _cold(follow).token_ids


def test_a_chunk_that_ends_inside_the_replay_takes_no_block() -> None:
    """Field scenario B016, with an exact cone: rows 52 .. 71 in steps of 4."""
    for replay in (ExactReplay(), BoundedReplay()):
        seen: list[tuple[int, int, int]] = []

        def watch(step: ComputedStep, seen: list[tuple[int, int, int]] = seen) -> None:
            blocks = int((step.batch.block_table >= 0).sum())
            starts = step.batch.replay
            first = -1 if starts is None else int(starts.layer_starts[0, 0])
            seen.append((int(step.batch.num_computed_tokens[0]), blocks, first))

        engine = _engine(replay, observe=watch)
        engine.generate([_ask("0", 0)])
        seen.clear()
        engine.submit(_ask("1", 1))
        while engine.has_work:
            engine.step(4)
        start = 52 if isinstance(replay, ExactReplay) else 60
        assert [entry for entry in seen if entry[0] < 64] == [
            (position, 16, start) for position in range(start, 64, 4)
        ]
        assert seen[-1][0] == 73
        assert {first for _, _, first in seen} == {start}, "the start did not stay"


def test_window_blocks_follow_the_window_behind_a_long_prefix() -> None:
    """A prompt of 50 windows that is all cached takes what one chunk takes (scenario B162)."""
    for replay in (BoundedReplay(), ExactReplay(), SnapshotReplay()):
        held: list[int] = []

        def watch(step: ComputedStep, held: list[int] = held) -> None:
            held.append(int((step.batch.window_block_table >= 0).sum()))

        config = EngineConfig(chunk_tokens=8, max_requests=1, block_size=4, window_block_size=4)
        engine = _engine(replay, config, observe=watch)
        prompt = random_prompt(50 * 4, 8)
        for n in range(3):
            held.clear()
            engine.submit(request(str(n), (*prompt, 3, n + 4), max_new_tokens=2))
            engine.run()
            # Window and chunk in blocks of 4, and one that they straddle.
            assert max(held) <= (4 + 8) // 4 + 1


# --- publishing ---------------------------------------------------------------------------------


def test_a_block_is_found_only_after_the_step_that_filled_it() -> None:
    """Half-filled blocks and blocks of this very step are not there (B026, B025)."""
    engine = _engine(ExactReplay())
    engine.submit(request("0", PREFIX[:60], max_new_tokens=1))
    engine.step(50)
    probe = request("1", (*PREFIX[:50], 3, 4, 5), max_new_tokens=1, priority=-1)
    engine.submit(probe)
    states = engine._states
    engine.step(5)
    assert states["1"].first_plan is not None
    assert states["1"].first_plan.num_cached_tokens == 48


def test_what_never_ran_is_never_found() -> None:
    """Aborted before its first step, and between two (field scenario B032)."""
    events: list[PrefixEvent] = []
    engine = _engine(ExactReplay(), observe_prefix=events.append)
    engine.submit(_ask("0", 0))
    assert engine.abort("0")
    engine.submit(_ask("0", 0))
    engine.step(10)
    assert engine.abort("0")
    assert not engine.abort("0")
    assert len(events) == 2, "blocks of 10 computed tokens"
    (again,) = engine.generate([_ask("0", 0)])
    assert again.num_cached_tokens == 8
    _assert_cold(again)


def test_approximate_blocks_are_marked_and_exact_policies_refuse_them() -> None:
    """One pool, two policies: provenance travels with the block."""
    events: list[PrefixEvent] = []
    engine = _engine(BoundedReplay(), observe_prefix=events.append)
    list(_one_by_one(engine, [_ask("0", 0), _ask("1", 1, length=12)]))
    assert [event.exact for event in events] == [True] * 18 + [False] * 3
    # The same engine under an exact policy from now on.
    engine._scheduler._reader._policy = ExactReplay()
    exact, longer = _one_by_one(engine, [_ask("2", 2), _ask("3", 1, length=16)])
    assert (exact.num_cached_tokens, longer.num_cached_tokens) == (64, 64)
    assert engine.stats.num_refused_blocks == 3
    for output in (exact, longer):
        _assert_cold(output)
    assert [event.exact for event in events[21:]] == [True] * (2 + 4)


def test_a_prefix_cache_of_ones_own() -> None:
    made: list[HashPrefixCache] = []

    def make(pool, block_size, *, observe):
        made.append(
            HashPrefixCache(pool, block_size, digest_function=hashlib.sha3_256, observe=observe)
        )
        return made[-1]

    engine = _engine(ExactReplay(), make_prefix_cache=make)
    outputs = list(_one_by_one(engine, [_ask("0", 0), _ask("1", 1)]))
    assert outputs[1].num_cached_tokens == 64
    assert len(made[0]) == 18 + 2


# --- requests that arrive together --------------------------------------------------------------


def _run_together(engine: Engine, asked: Sequence[Request]) -> tuple[list[RequestOutput], int]:
    for one in asked:
        engine.submit(one)
    outputs: list[RequestOutput] = []
    rows = 0
    while engine.has_work:
        result = engine.step()
        engine.check_invariants()
        rows += result.num_prompt_rows
        outputs += result.finished
    return sorted(outputs, key=lambda output: output.request.request_id), rows


@pytest.mark.parametrize("replay", [ExactReplay(), BoundedReplay()], ids=["exact", "bounded"])
def test_a_new_prefix_is_computed_once(replay: ReplayPolicy) -> None:
    engine = _engine(replay)
    outputs, rows = _run_together(engine, [_ask(str(n), n) for n in range(4)])
    replayed = 12 if isinstance(replay, ExactReplay) else 4
    assert [output.num_cached_tokens for output in outputs] == [0, 64, 64, 64]
    assert rows == 72 + 3 * (8 + replayed)


def test_the_windows_before_a_hit_are_rebuilt_once() -> None:
    """The second of four rebuilds and keeps them, the others restore."""
    engine = _engine(SnapshotReplay())
    outputs, rows = _run_together(engine, [_ask(str(n), n) for n in range(4)])
    assert [output.num_replayed_rows for output in outputs] == [0, 12, 0, 0]
    assert rows == 72 + 12 + 3 * 8
    for output in outputs:
        _assert_cold(output)


def test_nobody_waits_for_a_snapshot_that_no_store_can_hold() -> None:
    engine = _engine(SnapshotReplay(), budget=10)
    outputs, _ = _run_together(engine, [_ask(str(n), n) for n in range(4)])
    # The second found out that the store is too small.
    assert [output.num_replayed_rows for output in outputs] == [0, 12, 12, 12]
    later, rows = _run_together(engine, [_ask(str(n), n) for n in range(4)])
    assert [output.num_replayed_rows for output in later] == [12] * 4
    assert rows == 4 * (4 + 12)
    for output in (*outputs, *later):
        _assert_cold(output)


def test_others_pass_a_request_that_waits_for_a_prefix() -> None:
    engine = _engine(ExactReplay(), EngineConfig(chunk_tokens=48, block_size=4))
    for one in (_ask("0", 0), _ask("1", 1), request("2", random_prompt(5, 9), max_new_tokens=1)):
        engine.submit(one)
    engine.step()  # 48 rows of the first
    result = engine.step()
    assert [output.request.request_id for output in result.finished] == ["2"]
    assert engine._states["1"].stay is None
    engine.step()
    assert engine._states["1"].stay is not None
    engine.run()


def test_a_better_request_does_not_wait_for_a_worse_one() -> None:
    engine = _engine(ExactReplay(), EngineConfig(chunk_tokens=16, block_size=4))
    engine.submit(_ask("worse", 0, priority=1))
    engine.step()
    engine.submit(_ask("better", 1, priority=0))
    engine.step()
    # It starts behind the 16 tokens that are there, and takes all rows.
    assert engine._states["better"].num_computed_tokens == 16 - 12 + 16
    assert engine._states["worse"].num_computed_tokens == 16
    outputs = {output.request.request_id: output for output in engine.run()}
    assert outputs["better"].num_cached_tokens == 16
    for output in outputs.values():
        _assert_cold(output)


def test_a_prefix_that_saves_nothing_is_not_waited_for() -> None:
    """A bounded replay drops hits of a window or less."""
    for shared, together in ((4, True), (8, False)):
        engine = _engine(BoundedReplay())
        for n in range(2):
            prompt = (*PREFIX[:shared], *random_prompt(20, n))
            engine.submit(request(str(n), prompt, max_new_tokens=2))
        engine.step()
        assert (engine._states["1"].stay is not None) == together
        engine.run()


def test_an_abort_of_the_one_waited_for_lets_the_others_go() -> None:
    engine = _engine(ExactReplay(), EngineConfig(chunk_tokens=16, block_size=4))
    engine.submit(_ask("0", 0))
    engine.submit(_ask("1", 1))
    engine.step()
    assert engine._states["1"].stay is None
    engine.abort("0")
    engine.step()
    assert engine._states["1"].stay is not None
    (output,) = engine.run()
    assert output.num_cached_tokens == 16
    _assert_cold(output)


# --- snapshots ----------------------------------------------------------------------------------


def test_a_longer_prefix_starts_behind_the_last_snapshot_and_leaves_the_next() -> None:
    """Turns of a conversation: each restores what the turn before it left."""
    engine = _engine(SnapshotReplay())
    asked = [_ask("0", 0), _ask("1", 1)]
    list(_one_by_one(engine, asked))  # leaves a snapshot at 64
    prompt = (*PREFIX, *random_prompt(40, 7))
    cuts = (84, 104, 104)
    outputs = list(
        _one_by_one(
            engine,
            [
                request(f"t{n}", (*prompt[:cut], 3, 4), max_new_tokens=2, logits="last")
                for n, cut in enumerate(cuts)
            ],
        )
    )
    # The second found 84 tokens, and 20 rows behind the snapshot at 64 are more than a cone of 12
    # is, so it rebuilds at 84; the third finds 104.
    assert [output.num_cached_tokens for output in outputs] == [64, 84, 104]
    for output in outputs:
        _assert_cold(output)


@pytest.mark.parametrize("chunk", [3, 64])
def test_a_near_snapshot_is_better_than_a_cone(chunk: int) -> None:
    events: list[PrefixEvent] = []
    config = EngineConfig(chunk_tokens=chunk, block_size=4, window_block_size=4)
    engine = _engine(SnapshotReplay(), config, observe_prefix=events.append)
    list(_one_by_one(engine, [_ask("0", 0), _ask("1", 1, 4)]))  # a snapshot at 64
    events.clear()
    asked = [_ask(name, 1, 5, max_new_tokens=1) for name in "234"]
    outputs = list(_one_by_one(engine, asked))
    # 68 tokens are taken. Four rows from 64 on cost less than the cone at 68, and leave its result.
    assert [(o.num_cached_tokens, o.num_replayed_rows) for o in outputs] == [
        (68, 4),
        (68, 0),
        (68, 0),
    ]
    assert events == [], "a block is stored twice"
    for output in outputs:
        _assert_cold(output)


def test_a_budget_of_one_snapshot_keeps_the_last() -> None:
    """A budget of one entry: each prefix pushes the other's out."""
    hits_only = SnapshotReplay(keeps_prompt_ends=False)
    engine = _engine(hits_only)
    list(_one_by_one(engine, [_ask("0", 0), _ask("1", 1)]))
    assert engine._snapshots is not None
    size = engine._snapshots.num_bytes
    engine = _engine(hits_only, budget=size)
    other = random_prompt(64, 50)
    asked = [
        _ask("0", 0),
        _ask("1", 1),
        request("o0", (*other, 3), max_new_tokens=1, logits="last"),
        request("o1", (*other, 4), max_new_tokens=1, logits="last"),
        _ask("2", 2),
    ]
    outputs = list(_one_by_one(engine, asked))
    assert engine._snapshots is not None
    assert engine._snapshots.num_evictions == 2
    assert [output.num_replayed_rows for output in outputs] == [0, 12, 0, 12, 12]
    for output in outputs:
        _assert_cold(output)


def test_policy_and_store_belong_together() -> None:
    model = dataflow_model(MODEL)
    with pytest.raises(ValueError, match=r"^snapshots expected a store for SnapshotReplay, got "):
        Engine(model, LIMITS, replay=SnapshotReplay())
    with pytest.raises(ValueError, match=r"^snapshots expected None for ExactReplay, got a store"):
        Engine(model, LIMITS, replay=ExactReplay(), snapshots=SnapshotStore(10))


# --- trim ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [7, 64])
def test_a_bounded_trim_is_told_and_an_exact_one_changes_nothing(chunk: int) -> None:
    config = dataflow_config(compress_ratios=(2, 1, 1, 1, 0))
    asked = [_ask(str(n), n) for n in range(3)]

    def run(trim: TrimSetting) -> list[RequestOutput]:
        engine = Engine(
            dataflow_model(config),
            EngineConfig(chunk_tokens=chunk, block_size=4, window_block_size=4, trim=trim),
            replay=SnapshotReplay(),
            snapshots=SnapshotStore(10**6),
        )
        return list(_one_by_one(engine, asked))

    off, exact, bounded = (run(setting) for setting in ("off", "exact", "bounded"))
    for left, right in zip(off, exact, strict=True):
        assert left.token_ids == right.token_ids
        assert right.exact
    differs = [left.token_ids != right.token_ids for left, right in zip(off, bounded, strict=True)]
    assert any(differs)
    assert not any(other and output.exact for other, output in zip(differs, bounded, strict=True))
    # The second was not trimmed before it left its snapshot.
    assert [output.exact for output in (bounded[0], bounded[2])] == [False, False]
    # What the cache keeps is exact all the same: the same hits, and a snapshot to restore.
    assert [output.num_replayed_rows for output in bounded] == [0, 15, 0]


# --- accounting ---------------------------------------------------------------------------------


def test_steps_and_counters_say_what_was_saved() -> None:
    engine = _engine(ExactReplay())
    results: list[StepResult] = []
    for n in range(3):
        engine.submit(_ask(str(n), n, max_new_tokens=1))
        while engine.has_work:
            results.append(engine.step())
    assert [(r.num_prompt_rows, r.num_replayed_rows) for r in results if r.num_prompt_rows] == [
        (64, 0),
        (8, 0),
        (20, 12),
        (20, 12),
    ]
    stats = engine.stats
    assert (stats.num_queries, stats.num_query_tokens, stats.num_hit_tokens) == (3, 216, 128)
    assert (stats.num_replayed_rows, stats.num_computed_rows) == (24, 72 + 20 + 20)
    assert stats.hit_ratio == 128 / 216


def test_evictions_and_hits_of_a_small_pool() -> None:
    """Pool of a request and two blocks: A, A, B, A (field scenario B182)."""
    config = EngineConfig(
        chunk_tokens=64, max_requests=2, block_size=4, window_block_size=4, num_blocks=12
    )
    engine = _engine(BoundedReplay(), config)
    a, b = PREFIX[:40], random_prompt(5, 3)
    asked = [request(str(n), p, max_new_tokens=1) for n, p in enumerate((a, a, b, a))]
    hits = [output.num_cached_tokens for output in _one_by_one(engine, asked)]
    assert hits[:3] == [0, 36, 0]
    assert hits[3] >= 28
