"""The scheduler alone, with a model that takes no time: budget, order, admission, progress."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.config import CacheConfig
from pcpkit.engine.request import Phase, RequestState
from pcpkit.engine.scheduler import ScheduledRows, Scheduler
from pcpkit.engine.sizing import num_window_blocks
from pcpkit.engine.tables import CacheTables

from .small_model import request

WINDOW, BLOCK = 6, 4


def _scheduler(*, budget: int, num_blocks: int = 1000, num_requests: int = 4) -> Scheduler:
    sizes = CacheConfig(
        num_blocks=num_blocks,
        num_window_blocks=num_window_blocks(
            max_requests=num_requests,
            chunk_tokens=budget,
            sliding_window=WINDOW,
            window_block_size=BLOCK,
        ),
        num_requests=num_requests,
        block_size=BLOCK,
        window_block_size=BLOCK,
    )
    return Scheduler(CacheTables(sizes, WINDOW), budget)


def _enqueue(scheduler: Scheduler, name: str, prompt: int, new: int) -> RequestState:
    asked = request(name, [7] * prompt, max_new_tokens=new)
    state = RequestState(request=asked, token_ids=[7] * prompt, submitted_at=0.0)
    scheduler.enqueue(state)
    return state


def _compute(scheduler: Scheduler, scheduled: Sequence[ScheduledRows]) -> None:
    """What the engine does after a forward, with token 9 sampled every time."""
    sampling = [rows.state for rows in scheduled if rows.samples]
    for rows in scheduled:
        scheduler.advance(rows)
    for state in sampling:
        state.token_ids.append(9)
        if state.finish_reason(eos_token_id=1) is not None:
            scheduler.finish(state)
    scheduler.check_invariants()


def _shape(scheduled: Sequence[ScheduledRows]) -> list[tuple[str, int, int]]:
    return [(rows.state.request.request_id, rows.start, rows.num_rows) for rows in scheduled]


def test_decodes_come_first_then_prompts_under_way_then_new_ones() -> None:
    scheduler = _scheduler(budget=10)
    _enqueue(scheduler, "a", prompt=14, new=3)
    _enqueue(scheduler, "b", prompt=3, new=3)
    _enqueue(scheduler, "c", prompt=20, new=3)
    seen: list[list[tuple[str, int, int]]] = []
    for _ in range(5):
        scheduled = scheduler.schedule(10)
        seen.append(_shape(scheduled))
        _compute(scheduler, scheduled)
    assert seen == [
        [("a", 0, 10)],
        [("a", 10, 4), ("b", 0, 3), ("c", 0, 3)],
        [("a", 14, 1), ("b", 3, 1), ("c", 3, 8)],
        [("a", 15, 1), ("b", 4, 1), ("c", 11, 8)],
        [("c", 19, 1)],
    ]


def test_rows_say_what_they_are() -> None:
    scheduler = _scheduler(budget=4)
    asked = request("a", [3, 4, 5, 6, 7], max_new_tokens=2, logits="all")
    scheduler.enqueue(RequestState(request=asked, token_ids=[3, 4, 5, 6, 7], submitted_at=0.0))
    _enqueue(scheduler, "b", prompt=2, new=1)
    first = scheduler.schedule(4)
    assert [(r.token_ids, r.num_prompt_rows, r.samples, r.num_logits) for r in first] == [
        ([3, 4, 5, 6], 4, False, 4)
    ]
    _compute(scheduler, first)
    second = scheduler.schedule(4)
    assert [(r.token_ids, r.num_prompt_rows, r.samples, r.num_logits) for r in second] == [
        ([7], 1, True, 1),
        ([7, 7], 2, True, 1),
    ]
    _compute(scheduler, second)
    third = scheduler.schedule(4)
    assert [(r.token_ids, r.num_prompt_rows, r.samples) for r in third] == [([9], 0, True)]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    scheduler = _scheduler(budget=100, num_blocks=6)
    first = _enqueue(scheduler, "a", prompt=14, new=2)  # 4 of 6 blocks
    large = _enqueue(scheduler, "b", prompt=16, new=4)  # 5 blocks: waits
    small = _enqueue(scheduler, "c", prompt=2, new=2)  # 1 block: would fit
    scheduled = scheduler.schedule(100)
    assert _shape(scheduled) == [("a", 0, 14)]
    assert (first.phase, large.phase, small.phase) == (Phase.RUNNING, Phase.WAITING, Phase.WAITING)
    _compute(scheduler, scheduled)
    _compute(scheduler, scheduler.schedule(100))
    assert first.phase is Phase.FINISHED
    assert _shape(scheduler.schedule(100)) == [("b", 0, 16), ("c", 0, 2)]


def test_a_budget_below_the_number_of_decodes_serves_the_oldest() -> None:
    scheduler = _scheduler(budget=8)
    for name in "abc":
        _enqueue(scheduler, name, prompt=2, new=5)
    _compute(scheduler, scheduler.schedule(8))
    assert _shape(scheduler.schedule(2)) == [("a", 2, 1), ("b", 2, 1)]


@pytest.mark.parametrize("budget", [1, 3])
def test_the_limit_of_the_scheduler_holds_as_well(budget: int) -> None:
    scheduler = _scheduler(budget=budget)
    _enqueue(scheduler, "a", prompt=9, new=1)
    assert _shape(scheduler.schedule(100)) == [("a", 0, budget)]


requests = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=8)


@given(asked=requests, budget=st.integers(1, 16), slots=st.integers(1, 4), data=st.data())
def test_every_mix_of_requests_ends_within_budget_and_without_a_leak(
    asked: list[tuple[int, int]], budget: int, slots: int, data: st.DataObject
) -> None:
    """A pool that barely holds the largest request; requests arrive at any time."""
    num_blocks = max(-(-(prompt + new) // BLOCK) for prompt, new in asked)
    scheduler = _scheduler(budget=budget, num_blocks=num_blocks, num_requests=slots)
    arrivals = list(enumerate(asked))
    states: list[RequestState] = []
    admitted: list[str] = []
    total_rows = 0
    for _ in range(2000):
        while arrivals and (not states or data.draw(st.booleans())):
            place, (prompt, new) = arrivals.pop(0)
            states.append(_enqueue(scheduler, str(place), prompt, new))
        scheduled = scheduler.schedule(budget)
        rows = sum(entry.num_rows for entry in scheduled)
        assert rows <= budget
        assert len(scheduled) == len({entry.state.request.request_id for entry in scheduled})
        waiting_or_running = any(state.phase is not Phase.FINISHED for state in states)
        assert bool(scheduled) == waiting_or_running, "a step without rows"
        for entry in scheduled:
            assert entry.start == entry.state.num_computed_tokens, "a row is skipped or repeated"
            assert len(entry.tables.blocks) * BLOCK >= entry.end
            if entry.start == 0:
                admitted.append(entry.state.request.request_id)
        total_rows += rows
        _compute(scheduler, scheduled)
        if not arrivals and not waiting_or_running:
            break
    assert all(state.phase is Phase.FINISHED for state in states)
    assert admitted == [str(place) for place in range(len(asked))]
    # The last sampled token of a request is never computed.
    assert total_rows == sum(prompt + new - 1 for prompt, new in asked)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
    scheduler.check_invariants()
