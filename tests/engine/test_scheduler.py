"""The scheduler alone, with a model that takes no time: budget, order, admission, preemption."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.cache.replay import BoundedReplay
from pcpkit.engine.request import Phase, RequestState
from pcpkit.engine.row_budget import RankLimit
from pcpkit.plan.partition import (
    STRATEGIES,
    dual_chunk_swap,
    levelled,
    make_partition,
)

from .scheduling import BLOCK, fake_engine, shape


def test_decodes_come_first_then_prompts_under_way_then_new_ones() -> None:
    engine = fake_engine(budget=10)
    engine.submit("a", 14, 3)
    engine.submit("b", 3, 3)
    engine.submit("c", 20, 3)
    assert [engine.step() for _ in range(5)] == [
        [("a", 0, 10)],
        [("a", 10, 4), ("b", 0, 3), ("c", 0, 3)],
        [("a", 14, 1), ("b", 3, 1), ("c", 3, 8)],
        [("a", 15, 1), ("b", 4, 1), ("c", 11, 8)],
        [("c", 19, 1)],
    ]


def test_rows_say_what_they_are() -> None:
    engine = fake_engine(budget=4)
    engine.submit("a", [3, 4, 5, 6, 7], 2, logits="all")
    engine.submit("b", 2)
    first = engine.schedule()
    assert [(r.token_ids, r.num_prompt_rows, r.samples, r.num_logits) for r in first.rows] == [
        ([3, 4, 5, 6], 4, False, 4)
    ]
    engine.compute(first)
    second = engine.schedule()
    assert [(r.token_ids, r.num_prompt_rows, r.samples, r.num_logits) for r in second.rows] == [
        ([7], 1, True, 1),
        ([7, 7], 2, True, 1),
    ]
    engine.compute(second)
    third = engine.schedule()
    assert [(r.token_ids, r.num_prompt_rows, r.samples) for r in third.rows] == [([9], 0, True)]


def test_a_budget_below_the_number_of_decodes_serves_the_oldest() -> None:
    engine = fake_engine(budget=8)
    for name in "abc":
        engine.submit(name, 2, 5)
    engine.step()
    assert engine.step(2) == [("a", 2, 1), ("b", 2, 1)]


@pytest.mark.parametrize("budget", [1, 3])
def test_the_limit_of_the_scheduler_holds_as_well(budget: int) -> None:
    engine = fake_engine(budget=budget)
    engine.submit("a", 9)
    assert engine.step(100) == [("a", 0, budget)]


# --- priorities ---------------------------------------------------------------------------------


def test_a_better_priority_goes_first_and_arrival_decides_among_equals() -> None:
    engine = fake_engine(budget=5, num_requests=2)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0), ("e", -1)):
        engine.submit(name, 5, priority=priority)
    assert [steps[0][0] for steps in engine.run()] == ["e", "b", "d", "a", "c"]


def test_a_better_prompt_goes_before_worse_decodes() -> None:
    engine = fake_engine(budget=4)
    engine.submit("late", 2, 4, priority=5)
    assert engine.step() == [("late", 0, 2)]
    engine.submit("soon", 6, 1, priority=0)
    assert engine.step() == [("soon", 0, 4)]
    assert engine.step() == [("soon", 4, 2), ("late", 2, 1)]
    # For a seat or a block nothing is preempted.
    crowded = fake_engine(num_requests=1)
    crowded.submit("late", 2, 2, priority=5)
    crowded.step()
    crowded.submit("soon", 6, 1, priority=0)
    assert crowded.step() == [("late", 2, 1)]
    assert crowded.step() == [("soon", 0, 6)]


# --- admission ----------------------------------------------------------------------------------


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    engine = fake_engine(num_blocks=6, num_spare_blocks=0)
    first = engine.submit("a", 14, 2)  # 4 of 6 blocks
    large = engine.submit("b", 16, 1)  # 4 blocks: waits
    small = engine.submit("c", 2, 2)  # 1 block: would fit
    assert engine.step() == [("a", 0, 14)]
    assert (first.phase, large.phase, small.phase) == (Phase.RUNNING, Phase.WAITING, Phase.WAITING)
    engine.step()
    assert first.phase is Phase.FINISHED
    assert engine.step() == [("b", 0, 16), ("c", 0, 2)]


@pytest.mark.parametrize(("spare", "together"), [(0, True), (1, False), (None, False)])
def test_an_admission_leaves_spare_blocks(spare: int | None, together: bool) -> None:
    engine = fake_engine(num_blocks=4, num_spare_blocks=spare)
    engine.submit("a", 8, 2)
    engine.submit("b", 8, 2)
    assert len(engine.step()) == 1 + together


def test_nothing_is_kept_for_requests_that_cannot_grow() -> None:
    """A pool sized for all of them holds all of them."""
    engine = fake_engine(num_blocks=8)
    for name in "abcd":
        engine.submit(name, 6, 3)  # 8 tokens are computed at most: 2 blocks from the start
    assert len(engine.step()) == 4
    engine.run()
    assert not any(state.num_preemptions for state in engine.states)


def test_a_prompt_under_way_keeps_the_blocks_it_still_needs() -> None:
    """16 tokens of `a` are known, 4 computed: its other three blocks are not given away."""
    engine = fake_engine(budget=4, num_blocks=5, num_spare_blocks=0)
    engine.submit("a", 16, 1)
    engine.submit("b", 8, 1)
    assert [step[0][0] for step in engine.run()] == ["a"] * 4 + ["b"] * 2


def test_reserving_admits_only_what_can_be_promised() -> None:
    for reserve, together in ((False, True), (True, False)):
        engine = fake_engine(num_blocks=6, num_spare_blocks=0, reserve=reserve)
        engine.submit("a", 4, 9)  # 12 tokens are computed at most: 3 blocks
        engine.submit("b", 4, 10)  # 13: 4 blocks
        assert len(engine.step()) == 1 + together
        engine.run()
        assert all(not state.num_preemptions for state in engine.states) or not reserve


def test_seats_are_limited() -> None:
    engine = fake_engine(num_requests=2)
    for name in "abc":
        engine.submit(name, 3, 2)
    assert [len(step) for step in engine.run()] == [2, 2, 1, 1]


# --- preemption ---------------------------------------------------------------------------------


def test_who_goes_last_gives_its_blocks_and_starts_anew() -> None:
    """Two requests of 4 tokens in 3 blocks; both need a second block at the same time."""
    engine = fake_engine(num_blocks=3, num_spare_blocks=0)
    first, second = engine.submit("a", 4, 5), engine.submit("b", 4, 3)
    assert engine.step() == [("a", 0, 4), ("b", 0, 4)]
    # One block is left. `b` finds none and rests rather than to give up what it has.
    assert engine.step() == [("a", 4, 1)]
    assert second.phase is Phase.RUNNING
    assert [engine.step() for _ in range(3)] == [[("a", 5, 1)], [("a", 6, 1)], [("a", 7, 1)]]
    assert first.phase is Phase.FINISHED
    assert engine.step() == [("b", 4, 1)]
    assert (first.num_preemptions, second.num_preemptions) == (0, 0)


def test_a_better_request_takes_blocks_from_a_worse_one() -> None:
    engine = fake_engine(num_blocks=3, num_spare_blocks=0, num_requests=2)
    worse = engine.submit("worse", 4, 8, priority=1)
    engine.submit("better", 4, 8)
    assert engine.step() == [("better", 0, 4), ("worse", 0, 4)]
    for _ in range(4):
        engine.step()  # `better` grows into the third block, `worse` rests
    assert worse.num_computed_tokens == 4
    schedule = engine.schedule()
    assert shape(schedule) == [("better", 8, 1)]
    assert schedule.preempted == (worse,)
    assert (worse.phase, worse.num_computed_tokens, worse.stay) == (Phase.WAITING, 0, None)
    engine.compute(schedule)
    steps = engine.run()
    # What it had sampled is prefilled again.
    first = next(step for step in steps if step[0][0] == "worse")
    assert first == [("worse", 0, 5)]
    assert (worse.num_preemptions, len(worse.output_token_ids)) == (1, 8)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_resumed_rows_are_a_prefill_in_any_chunks(chunk: int) -> None:
    """Everything known is computed again before the next token is sampled (scenario B130)."""
    engine = fake_engine(num_blocks=4, num_spare_blocks=0)
    victim = engine.submit("victim", 3, 13, priority=1)
    while len(victim.output_token_ids) < 5:
        engine.step()
    engine.submit("better", 4, 12, priority=0)
    while not victim.num_preemptions:
        engine.step()
    known = len(victim.token_ids)
    assert known == 3 + 6
    schedule = engine.schedule(chunk)
    while victim.phase is Phase.WAITING:
        engine.compute(schedule)
        schedule = engine.schedule(chunk)
    rows: list[tuple[str, int, int]] = []
    while True:
        rows += shape(schedule)
        assert all(entry.num_prompt_rows == entry.num_rows for entry in schedule.rows)
        assert victim.is_prefilling
        engine.compute(schedule)
        if len(victim.token_ids) > known:
            break
        schedule = engine.schedule(chunk)
    assert [start for _, start, _ in rows] == list(range(0, known, chunk))
    assert sum(count for _, _, count in rows) == known
    assert not victim.is_prefilling
    engine.run()
    assert len(victim.output_token_ids) == 13


def test_the_rows_of_a_victim_are_dealt_again() -> None:
    """A decode is dealt first; a prompt that came before it then needs its block."""
    engine = fake_engine(num_blocks=8, num_spare_blocks=0, budget=5, replay=BoundedReplay())
    prefix = list(range(50, 62))
    engine.submit("first", [*prefix, 3], 1)
    prompt = engine.submit("prompt", [*prefix, *range(70, 86)], 1)  # waits for the prefix
    victim = engine.submit("victim", [4, 5], 30)
    assert [engine.step() for _ in range(7)] == [
        [("first", 0, 5)],
        [("first", 5, 5)],
        [("first", 10, 3), ("victim", 0, 2)],
        [("victim", 2, 1), ("prompt", 6, 4)],
        [("victim", 3, 1), ("prompt", 10, 4)],
        [("victim", 4, 1), ("prompt", 14, 4)],
        [("victim", 5, 1), ("prompt", 18, 4)],
    ]
    schedule = engine.schedule()
    assert shape(schedule) == [("prompt", 22, 5)]
    assert schedule.preempted == (victim,)
    engine.compute(schedule)
    engine.run()
    assert (prompt.num_preemptions, victim.num_preemptions) == (0, 1)


requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(0, 2)), min_size=1, max_size=8
)


@given(
    asked=requests,
    budget=st.integers(1, 16),
    slots=st.integers(1, 4),
    spare=st.sampled_from([None, 0, 2]),
    reserve=st.booleans(),
    data=st.data(),
)
def test_every_mix_of_requests_ends_within_budget_and_without_a_leak(
    asked: list[tuple[int, int, int]],
    budget: int,
    slots: int,
    spare: int | None,
    reserve: bool,
    data: st.DataObject,
) -> None:
    """A pool that barely holds the largest request; requests arrive and are aborted at any time."""
    num_blocks = max(-(-(prompt + new) // BLOCK) for prompt, new, _ in asked)
    engine = fake_engine(
        budget=budget,
        num_blocks=num_blocks,
        num_requests=slots,
        num_spare_blocks=spare,
        reserve=reserve,
    )
    arrivals = list(enumerate(asked))
    aborted: list[RequestState] = []
    for _ in range(3000):
        while arrivals and (not engine.states or data.draw(st.booleans())):
            place, (prompt, new, priority) = arrivals.pop(0)
            engine.submit(str(place), prompt, new, priority=priority)
        live = [state for state in engine.states if state.phase is not Phase.FINISHED]
        if live and data.draw(st.integers(0, 9)) == 0:
            aborted.append(data.draw(st.sampled_from(live)))
            engine.scheduler.remove(aborted[-1])
            engine.scheduler.check_invariants()
            continue
        schedule = engine.schedule(budget)
        assert sum(rows.num_rows for rows in schedule.rows) <= budget
        names = [rows.state.request.request_id for rows in schedule.rows]
        assert len(names) == len(set(names))
        assert bool(schedule.rows) == bool(live), "a step without rows"
        for rows in schedule.rows:
            assert rows.start == rows.state.num_computed_tokens, "a row is skipped or repeated"
            assert len(rows.tables.blocks) * BLOCK >= rows.end
            assert not set(schedule.preempted) & {rows.state}
        best = min(live, key=lambda state: state.rank, default=None)
        assert best not in schedule.preempted, "the first of all was stopped"
        engine.compute(schedule)
        if not arrivals and not live:
            break
    for state in engine.states:
        assert state.phase is Phase.FINISHED
        assert (
            state in aborted or len(state.output_token_ids) == state.request.params.max_new_tokens
        )
        assert not (reserve and state.num_preemptions)
    assert (engine.scheduler.num_waiting, engine.scheduler.num_running) == (0, 0)
    assert engine.tables.blocks.num_free == num_blocks


# --- rows of one rank ---------------------------------------------------------------------------


@given(
    asked=requests,
    size=st.sampled_from([1, 2, 3, 4]),
    limit=st.integers(1, 9),
    strategy=st.sampled_from(sorted(STRATEGIES)),
)
def test_no_rank_gets_more_rows_than_its_limit(
    asked: list[tuple[int, int, int]], size: int, limit: int, strategy: str
) -> None:
    deal = STRATEGIES[strategy]
    engine = fake_engine(
        budget=64, rank=RankLimit(max_rows=limit, size=size, strategy=deal), num_requests=3
    )
    for place, (prompt, new, priority) in enumerate(asked):
        engine.submit(str(place), prompt, new, priority=priority)
    while engine.scheduler.num_waiting or engine.scheduler.num_running:
        schedule = engine.schedule()
        assert schedule.rows, "a step without rows"
        lengths = [rows.num_rows for rows in schedule.rows]
        flags = [rows.state.is_prefilling for rows in schedule.rows]
        assert make_partition(lengths, flags, size, deal).num_padded_rows <= limit
        engine.compute(schedule)


def test_a_level_strategy_fills_every_rank() -> None:
    for strategy, rows in ((levelled, 16), (dual_chunk_swap, 16)):
        rank = RankLimit(max_rows=4, size=4, strategy=strategy)
        engine = fake_engine(rank=rank)
        engine.submit("a", 40, 1)
        assert engine.step() == [("a", 0, rows)]
