"""Ends that are no results: aborts in every phase, steps that fail; and resumed requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pcpkit.cache.pool import CachePool
from pcpkit.cache.prefix import PrefixEvent
from pcpkit.cache.replay import BoundedReplay, ExactReplay, NoReplay, ReplayPolicy, SnapshotReplay
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.engine import Engine, EngineConfig, RequestOutput
from pcpkit.engine.runner import ComputedStep
from pcpkit.plan.step import StepPlan

from .dataflow_model import dataflow_config, dataflow_model
from .small_model import random_prompt, request

MODEL = dataflow_config()
LIMITS = EngineConfig(
    chunk_tokens=16,
    max_requests=2,
    num_blocks=20,
    block_size=4,
    window_block_size=4,
    num_spare_blocks=0,
)
PREFIX = random_prompt(32, 0)
OTHER = request("other", random_prompt(30, 9), max_new_tokens=6, ignore_eos=True)
VICTIM = request("victim", (*PREFIX, 5, 6, 7), max_new_tokens=20, ignore_eos=True)


def _engine(replay: ReplayPolicy, **options: Any) -> Engine:
    store = SnapshotStore(10**6) if replay.uses_snapshots else None
    return Engine(dataflow_model(MODEL), LIMITS, replay=replay, snapshots=store, **options)


def _alone(asked: RequestOutput) -> tuple[int, ...]:
    (output,) = _engine(NoReplay()).generate([asked.request])
    return output.token_ids


def _warm(engine: Engine) -> None:
    """The prefix is cached, and a snapshot stands behind it where there are any."""
    for name in "ab":
        engine.generate([request(name, (*PREFIX, 8, ord(name)), max_new_tokens=1)])


def _assert_clean(engine: Engine) -> None:
    engine.check_invariants()
    assert not engine.has_work
    assert engine._tables.blocks.num_free == LIMITS.num_blocks
    assert engine._tables.num_free_window_blocks == engine._tables._window_blocks.num_blocks
    if engine._snapshots is not None:
        assert all(not entry.num_users for entry in engine._snapshots._entries.values())


@pytest.mark.parametrize("replay", [NoReplay(), ExactReplay(), SnapshotReplay()], ids=str)
@pytest.mark.parametrize("steps", range(14))
def test_an_abort_in_any_phase_leaves_nothing_behind(replay: ReplayPolicy, steps: int) -> None:
    """Before the first step, in the prefill, in the replay, in decode, and while it waits again."""
    engine = _engine(replay)
    _warm(engine)
    engine.submit(VICTIM)
    engine.submit(OTHER)
    finished: list[RequestOutput] = []
    for _ in range(steps):
        finished += engine.step(5).finished
    assert engine.abort("victim")
    assert not engine.abort("victim")
    engine.check_invariants()
    finished += engine.run()
    assert [output.request for output in finished] == [OTHER]
    assert finished[0].token_ids == _alone(finished[0])
    _assert_clean(engine)
    # The id is free, and the answer is the right one.
    (again,) = engine.generate([VICTIM])
    assert again.token_ids == _alone(again)


def test_a_preempted_request_can_be_aborted() -> None:
    engine = _engine(ExactReplay())
    engine.submit(request("first", random_prompt(8, 1), max_new_tokens=60, ignore_eos=True))
    engine.submit(request("second", random_prompt(8, 2), max_new_tokens=60, ignore_eos=True))
    while not (result := engine.step()).preempted:
        pass
    assert result.preempted == ("second",)
    engine.check_invariants()
    assert engine.abort("second")
    engine.run()
    _assert_clean(engine)


def test_an_abort_from_within_a_step_waits_for_its_end() -> None:
    """No block changes hands while rows of the step are computed (field scenario B003)."""
    seen: list[int] = []

    def watch(step: ComputedStep) -> None:
        if "victim" in step.request_ids and int(step.batch.seq_lens[0]) >= 37:
            before = engine._tables.blocks.num_free
            assert engine.abort("victim")
            assert not engine.abort("victim")
            assert engine._tables.blocks.num_free == before, "freed between dispatch and retire"
            seen.append(before)

    engine = _engine(ExactReplay(), observe=watch)
    engine.submit(VICTIM)
    outputs = engine.generate([OTHER])
    assert [output.request.request_id for output in outputs] == ["other"]
    assert len(seen) == 1
    _assert_clean(engine)


def test_an_observer_that_aborts_what_generate_asked_for() -> None:
    engine = _engine(NoReplay(), observe=lambda step: engine.abort("victim") and None)
    outputs = engine.generate([VICTIM, OTHER])
    assert [output.request.request_id for output in outputs] == ["other"]


class _Spoilt:
    """A forward whose logits become NaN when the step has so many tokens of a request."""

    def __init__(self, forward: Callable[[StepPlan, CachePool], Tensor]) -> None:
        self._forward = forward
        self.armed = False

    def __call__(self, plan: StepPlan, pool: CachePool) -> Tensor:
        logits = self._forward(plan, pool)
        return torch.full_like(logits, torch.nan) if self.armed else logits


@pytest.mark.parametrize("replay", [ExactReplay(), SnapshotReplay()], ids=str)
def test_a_step_that_fails_takes_its_requests_along_and_no_others(replay: ReplayPolicy) -> None:
    events: list[PrefixEvent] = []
    engine = _engine(replay, observe_prefix=events.append)
    _warm(engine)
    spoilt = _Spoilt(engine.model.forward)
    engine.model.forward = spoilt  # pyright: ignore[reportAttributeAccessIssue]
    events.clear()
    engine.submit(VICTIM)
    engine.submit(request("waits", (*PREFIX, 1, 2, 3, 4, 5), max_new_tokens=2, ignore_eos=True))
    engine.submit(OTHER)
    spoilt.armed = True
    with pytest.raises(FloatingPointError):
        engine.run()
    assert not events, "rows of a failed step were published"
    engine.check_invariants()
    spoilt.armed = False
    outputs = engine.run()
    assert outputs, "nobody was left"
    for output in outputs:
        assert output.token_ids == _alone(output)
    _assert_clean(engine)


def test_a_step_that_fails_leaves_no_snapshot() -> None:
    """Neither of a hit nor of a prompt: its window records are as wrong as its logits."""
    engine = _engine(SnapshotReplay())
    forward = engine.model.forward

    def spoil(plan: StepPlan, pool: CachePool) -> Tensor:
        logits = forward(plan, pool)
        for window in pool.window.values():
            window.fill_(1)
        return torch.full_like(logits, torch.nan)

    asked = request("asked", PREFIX[:15], max_new_tokens=2, ignore_eos=True)
    engine.model.forward = spoil  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(FloatingPointError):
        engine.generate([asked])
    assert engine._snapshots is not None
    assert len(engine._snapshots) == 0
    engine.model.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
    for hit in (0, 12):
        (output,) = engine.generate([asked])
        assert output.num_cached_tokens == hit
        assert output.token_ids == _alone(output)
    _assert_clean(engine)


def test_errors_do_not_add_up() -> None:
    """Fifty prompts, a pool for one: finish, abort and failure in turn (field scenario B181)."""
    engine = _engine(ExactReplay())
    spoilt = _Spoilt(engine.model.forward)
    engine.model.forward = spoilt  # pyright: ignore[reportAttributeAccessIssue]
    for number in range(50):
        asked = request(str(number), random_prompt(50, number), max_new_tokens=2)
        engine.submit(asked)
        if number % 3 == 0:
            engine.run()
        elif number % 3 == 1:
            engine.step()
            engine.abort(str(number))
        else:
            spoilt.armed = True
            with pytest.raises(FloatingPointError):
                engine.run()
            spoilt.armed = False
        _assert_clean(engine)
    assert engine.stats.num_evictions > 0


# --- resumed requests ---------------------------------------------------------------------------


def _preempted(replay: ReplayPolicy) -> tuple[RequestOutput, list[tuple[int, int]]]:
    """A request that is preempted once, and (tokens known, tokens adopted) when it resumed."""
    resumed: list[tuple[int, int]] = []

    def watch(step: ComputedStep) -> None:
        state = engine._states["late"]
        if state.num_preemptions and not resumed and "late" in step.request_ids:
            assert state.stay is not None
            resumed.append((len(state.token_ids), state.stay.replay.num_cached_tokens))

    engine = _engine(replay, observe=watch)
    engine.submit(request("early", random_prompt(32, 1), max_new_tokens=30, ignore_eos=True))
    engine.submit(request("late", random_prompt(24, 2), max_new_tokens=30, ignore_eos=True))
    outputs = {output.request.request_id: output for output in engine.run()}
    assert outputs["late"].num_preemptions == 1
    assert outputs["early"].num_preemptions == 0
    return outputs["late"], resumed


@pytest.mark.parametrize("replay", [NoReplay(), ExactReplay(), SnapshotReplay()], ids=str)
def test_a_resumed_request_goes_on_as_if_nothing_had_happened(replay: ReplayPolicy) -> None:
    """Invariant 32, exact modes."""
    output, resumed = _preempted(replay)
    assert output.token_ids == _alone(output)
    assert (resumed[0][1] > 0) == (not isinstance(replay, NoReplay)), "its own blocks"
    assert output.num_cached_tokens == 0, "what it finds of its own is no reuse (B185)"


def test_a_resumed_request_equals_a_fresh_one_with_the_same_hit() -> None:
    """Invariant 32, under an approximate replay."""
    output, resumed = _preempted(BoundedReplay())
    ((known, adopted),) = resumed
    assert adopted > MODEL.sliding_window
    assert not output.exact
    tokens = (*output.request.prompt_token_ids, *output.token_ids)
    fresh = _engine(BoundedReplay())
    # Leaves exact blocks of the same tokens, as the first stay did.
    fresh.generate([request("first", tokens[: adopted + 1], max_new_tokens=1, ignore_eos=True)])
    left = len(tokens) - known
    (again,) = fresh.generate(
        [request("again", tokens[:known], max_new_tokens=left, ignore_eos=True)]
    )
    assert again.num_cached_tokens == adopted
    assert again.token_ids == tokens[known:]


def test_statistics_count_a_request_once() -> None:
    engine = _engine(ExactReplay())
    for name, seed in (("a", 1), ("b", 2)):
        asked = request(name, random_prompt(24, seed), max_new_tokens=40, ignore_eos=True)
        engine.submit(asked)
    preempted = 0
    while engine.has_work:
        preempted += len(engine.step().preempted)
    assert preempted > 0
    assert (engine.stats.num_queries, engine.stats.num_query_tokens) == (2, 48)
    assert (engine.stats.num_hit_tokens, engine.stats.num_replayed_rows) == (0, 0)
