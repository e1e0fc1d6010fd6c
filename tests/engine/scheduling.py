"""A scheduler over a model that takes no time, for tests of decisions alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pcpkit.cache.prefix import HashPrefixCache, PrefixStats
from pcpkit.cache.replay import NoReplay, ReplayPolicy, ReplayShape
from pcpkit.config import CacheConfig
from pcpkit.engine.adoption import PrefixReader
from pcpkit.engine.publishing import PrefixPublisher
from pcpkit.engine.request import RequestState
from pcpkit.engine.row_budget import RankLimit
from pcpkit.engine.scheduler import Schedule, Scheduler, SchedulerLimits
from pcpkit.engine.sizing import num_window_blocks
from pcpkit.engine.tables import CacheTables

from .small_model import request

WINDOW, BLOCK, NUM_LAYERS = 6, 4, 2
Shape = list[tuple[str, int, int]]


@dataclass(slots=True, kw_only=True, eq=False)
class FakeEngine:
    """Schedules and accounts as the engine does; every sampled token is `next_token(state)`."""

    scheduler: Scheduler
    tables: CacheTables
    stats: PrefixStats
    next_token: Callable[[RequestState], int] = lambda _: 9
    states: list[RequestState] = field(default_factory=list[RequestState])

    def submit(
        self, name: str, prompt: int | Sequence[int], new: int = 1, **fields: Any
    ) -> RequestState:
        """A request of a prompt, or of so many tokens 7."""
        ids = [7] * prompt if isinstance(prompt, int) else list(prompt)
        asked = request(name, ids, max_new_tokens=new, ignore_eos=True, **fields)
        state = RequestState(request=asked, token_ids=ids, submitted_at=0.0)
        self.states.append(state)
        self.scheduler.enqueue(state)
        return state

    def schedule(self, max_rows: int = 1000) -> Schedule:
        """Decide one step; `compute` it before the next."""
        return self.scheduler.schedule(max_rows)

    def compute(self, schedule: Schedule) -> None:
        """What the engine does after a forward."""
        for rows in schedule.rows:
            self.scheduler.advance(rows)
        for rows in schedule.rows:
            state = rows.state
            if state.num_computed_tokens == len(state.token_ids):
                state.token_ids.append(self.next_token(state))
                if state.finish_reason(eos_token_id=1) is not None:
                    self.scheduler.remove(state)
        self.scheduler.check_invariants()

    def step(self, max_rows: int = 1000) -> Shape:
        """Both; what ran as (name, first position, rows)."""
        schedule = self.schedule(max_rows)
        self.compute(schedule)
        return shape(schedule)

    def run(self) -> list[Shape]:
        """Step until nothing is left."""
        steps: list[Shape] = []
        while self.scheduler.num_waiting or self.scheduler.num_running:
            steps.append(self.step())
            assert steps[-1], "a step without rows"
        return steps


def shape(schedule: Schedule) -> Shape:
    """What runs as (name, first position, rows)."""
    return [(rows.state.request.request_id, rows.start, rows.num_rows) for rows in schedule.rows]


def fake_engine(
    *,
    budget: int = 1000,
    num_blocks: int = 1000,
    num_requests: int = 4,
    replay: ReplayPolicy | None = None,
    rank: RankLimit | None = None,
    num_spare_blocks: int | None = None,
    reserve: bool = False,
) -> FakeEngine:
    """Window 6, blocks of 4, 2 layers; no prefix cache without a policy."""
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
    tables, stats = CacheTables(sizes, WINDOW), PrefixStats()
    prefix = None if replay is None else HashPrefixCache(tables.blocks, BLOCK)
    reader = PrefixReader(
        prefix,
        NoReplay() if replay is None else replay,
        ReplayShape(num_layers=NUM_LAYERS, sliding_window=WINDOW, block_size=BLOCK),
        None,
    )
    limits = SchedulerLimits(
        max_rows=budget, rank=rank, num_spare_blocks=num_spare_blocks, reserve=reserve
    )
    scheduler = Scheduler(tables, limits, reader, PrefixPublisher(prefix, BLOCK), None, stats)
    return FakeEngine(scheduler=scheduler, tables=tables, stats=stats)
