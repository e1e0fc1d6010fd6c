"""Hits, preemptions and snapshots on several ranks: all decide alike, and get the bits of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from pcpkit.cache.prefix import PrefixEvent
from pcpkit.cache.replay import BoundedReplay, ExactReplay, ReplayPolicy, SnapshotReplay
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.config import ParallelConfig
from pcpkit.engine import (
    CacheRecorder,
    Engine,
    EngineConfig,
    OpenCheckpoint,
    RequestOutput,
    compare_requests,
    compare_with_cold,
    load_model,
    open_checkpoint,
)
from pcpkit.engine.runner import ComputedStep
from pcpkit.model.decoder import TextModel
from pcpkit.parallel.groups import Groups, single_rank
from pcpkit.parallel.virtual import run_virtual_ranks
from pcpkit.plan.partition import STRATEGIES

from .small_model import random_prompt, request, write_micro_checkpoint

PREFIX = random_prompt(32, 11)
# The pool holds one of them with little to spare.
CONFIG = EngineConfig(
    chunk_tokens=24,
    max_requests=3,
    num_blocks=14,
    block_size=4,
    window_block_size=4,
    num_spare_blocks=0,
)
REQUESTS = [
    request(
        str(number),
        (*PREFIX[:shared], *random_prompt(suffix, number)),
        max_new_tokens=new,
        logits="last",
        ignore_eos=True,
        priority=number % 2,
    )
    for number, (shared, suffix, new) in enumerate(
        [(32, 5, 2), (32, 6, 9), (8, 3, 10), (32, 1, 6), (16, 9, 8)]
    )
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank saw."""

    outputs: list[RequestOutput]
    recorder: CacheRecorder
    events: list[PrefixEvent]
    steps: list[list[tuple[str, int, int]]]
    preempted: list[tuple[str, ...]]
    replay_rows: list[list[int]]
    """By step and rank: rows below a hit, in steps that have any."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> OpenCheckpoint:
    return open_checkpoint(write_micro_checkpoint(tmp_path_factory.mktemp("replay-ranks")))


def _load(checkpoint: OpenCheckpoint, groups: Groups) -> TextModel:
    return load_model(checkpoint, max_model_len=128, groups=groups, reduce="ordered")


def _run(model: TextModel, replay: ReplayPolicy, config: EngineConfig, strategy: str) -> Outcome:
    recorder = CacheRecorder(model.config)
    events: list[PrefixEvent] = []
    steps: list[list[tuple[str, int, int]]] = []
    preempted: list[tuple[str, ...]] = []
    replay_rows: list[list[int]] = []

    def watch(step: ComputedStep) -> None:
        recorder(step)
        starts, lengths = step.batch.num_computed_tokens.tolist(), step.batch.query_lens.tolist()
        steps.append(list(zip(step.request_ids, starts, lengths, strict=True)))
        if step.batch.replay is not None:
            cached = step.batch.replay.num_cached_tokens.tolist()
            replay_rows.append(
                [
                    sum(
                        max(min(starts[s.request] + s.stop, cached[s.request]) - first, 0)
                        for s in segments
                        for first in [starts[s.request] + s.start]
                    )
                    for segments in step.partition.segments
                ]
            )

    engine = Engine(
        model,
        config,
        replay=replay,
        snapshots=SnapshotStore(2000) if replay.uses_snapshots else None,
        observe=watch,
        observe_prefix=events.append,
        strategy=STRATEGIES[strategy],
    )
    outputs: dict[str, RequestOutput] = {}
    for one in REQUESTS:
        engine.submit(one)
        for _ in range(3):
            result = engine.step()
            preempted.append(result.preempted)
            outputs |= {output.request.request_id: output for output in result.finished}
    while engine.has_work:
        result = engine.step()
        engine.check_invariants()
        preempted.append(result.preempted)
        outputs |= {output.request.request_id: output for output in result.finished}
    return Outcome(
        outputs=[outputs[one.request_id] for one in REQUESTS],
        recorder=recorder,
        events=events,
        steps=steps,
        preempted=preempted,
        replay_rows=replay_rows,
    )


def _ranks(
    checkpoint: OpenCheckpoint,
    parallel: ParallelConfig,
    replay: ReplayPolicy,
    strategy: str,
    config: EngineConfig = CONFIG,
) -> Sequence[Outcome]:
    def body(rank: int, groups: Groups) -> Outcome:
        return _run(_load(checkpoint, groups), replay, config, strategy)

    return run_virtual_ranks(parallel, body)


@pytest.fixture(scope="module")
def alone(checkpoint: OpenCheckpoint) -> dict[str, Outcome]:
    """On one rank, by policy."""
    model = _load(checkpoint, single_rank())
    return {
        type(replay).__name__: _run(model, replay, CONFIG, "levelled")
        for replay in (BoundedReplay(), ExactReplay(), SnapshotReplay())
    }


@pytest.fixture(scope="module")
def cold(checkpoint: OpenCheckpoint) -> tuple[list[RequestOutput], CacheRecorder]:
    """On one rank, one after the other, without a prefix cache."""
    model = _load(checkpoint, single_rank())
    recorder = CacheRecorder(model.config)
    engine = Engine(
        model,
        EngineConfig(chunk_tokens=64, max_requests=1, block_size=4, window_block_size=4),
        observe=recorder,
    )
    return engine.generate(REQUESTS), recorder


def test_the_workload_hits_replays_and_preempts(alone: dict[str, Outcome]) -> None:
    for name, outcome in alone.items():
        assert any(outcome.preempted), name
        assert any(output.num_cached_tokens for output in outcome.outputs), name
        assert any(event.kind == "evicted" for event in outcome.events), name


@pytest.mark.parametrize(
    ("replay", "tp", "pcp", "expert_parallel", "strategy"),
    [
        (BoundedReplay(), 1, 2, False, "levelled"),
        (BoundedReplay(), 1, 4, True, "dual"),
        (ExactReplay(), 1, 4, False, "levelled"),
        (ExactReplay(), 2, 2, False, "cyclic"),
        (SnapshotReplay(), 1, 2, False, "dual"),
        (SnapshotReplay(), 1, 4, True, "levelled"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int | str) else str(value),
)
def test_every_layout_gives_the_bits_of_one_rank(
    checkpoint: OpenCheckpoint,
    alone: dict[str, Outcome],
    cold: tuple[list[RequestOutput], CacheRecorder],
    replay: ReplayPolicy,
    tp: int,
    pcp: int,
    expert_parallel: bool,
    strategy: str,
) -> None:
    """Steps, preemptions, cache events, tokens, logits and cache bytes, on each rank."""
    expected = alone[type(replay).__name__]
    parallel = ParallelConfig(tp_size=tp, pcp_size=pcp, expert_parallel=expert_parallel)
    for outcome in _ranks(checkpoint, parallel, replay, strategy):
        assert outcome.steps == expected.steps
        assert outcome.preempted == expected.preempted
        assert outcome.events == expected.events
        for left, right in zip(expected.outputs, outcome.outputs, strict=True):
            name = left.request.request_id
            bytes_of = expected.recorder.cache_bytes(name), outcome.recorder.cache_bytes(name)
            assert not compare_requests(left, right, *bytes_of)
        if replay.exact_only:
            for left, right in zip(cold[0], outcome.outputs, strict=True):
                assert not compare_with_cold(left, right, cold[1], outcome.recorder)


def test_steps_occur_where_only_some_ranks_replay(checkpoint: OpenCheckpoint) -> None:
    parallel = ParallelConfig(pcp_size=4)
    (outcome, *_) = _ranks(checkpoint, parallel, BoundedReplay(), "dual")
    assert any(0 in rows and any(rows) for rows in outcome.replay_rows)
    assert any(not any(rows) for rows in outcome.replay_rows)


def test_no_rank_gets_more_rows_than_its_limit(checkpoint: OpenCheckpoint) -> None:
    """And the answers are the same: a limit only cuts steps elsewhere."""
    config = EngineConfig(
        chunk_tokens=64,
        max_requests=3,
        max_rows_per_rank=5,
        block_size=4,
        window_block_size=4,
    )
    parallel = ParallelConfig(pcp_size=2)
    for strategy in ("dual", "levelled"):
        first, second = _ranks(checkpoint, parallel, ExactReplay(), strategy, config)
        assert first.steps == second.steps
        largest = max(sum(rows for _, _, rows in step) for step in first.steps)
        assert largest == 10
