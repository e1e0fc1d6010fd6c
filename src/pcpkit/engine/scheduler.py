"""Which rows run in the next step, and which requests hold blocks.

*Order.* By priority; within one, decodes first (one row each), then prefills under way, then
waiting requests while there is room, each by arrival. So the rows of a step go to a new request
before they go to a running one of a worse priority; only seats and blocks are not taken from it.

*Admission is optimistic.* The blocks of all tokens a request knows must be free, beside what
running requests still need for theirs and a few spare ones; what it will sample is not promised
(`reserve` promises it). Nobody overtakes a request that waits for blocks. A request waits for the
prefix, or the snapshot behind it, that a running one is about to leave, and may be overtaken then.

*Preemption.* A running request that needs a block takes it from the one that goes last, if that one
goes after itself; else it rests. The victim loses all its blocks and computes again later, with a
new look-up. So the first of all requests is never stopped, whatever the others hold, and since it
fits into the pool alone (`Engine.submit` sees to it), nothing deadlocks: every schedule with
requests has rows.

*All ranks decide alike.* A decision depends on the calls so far alone: on requests, sampled tokens,
blocks and stored snapshots, never on a clock or a device. Ranks that are told the same in the same
order schedule alike.

*Nothing is freed between dispatch and retire.* `schedule` frees only what no step in flight uses,
since the engine is synchronous: it calls `schedule`, `advance` and `remove` between steps, never
during one.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from pcpkit.cache.prefix import PrefixStats
from pcpkit.cache.replay import ReplayPlan, rows_to_compute
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.engine.adoption import Adoption, PrefixReader, UnderWay
from pcpkit.engine.publishing import PrefixPublisher
from pcpkit.engine.request import Phase, RequestState, SnapshotPoint, Stay
from pcpkit.engine.row_budget import RankLimit, RowBudget
from pcpkit.engine.tables import CacheTables, RequestTables


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduledRows:
    """`num_rows` rows of one request, from position `start`, its first token without caches."""

    state: RequestState
    start: int
    num_rows: int

    @property
    def tables(self) -> RequestTables:
        """The request's blocks, which cover the rows."""
        return self.state.tables

    @property
    def stay(self) -> Stay:
        """The request's stay."""
        assert self.state.stay is not None, "a scheduled request runs"
        return self.state.stay

    @property
    def end(self) -> int:
        """Tokens with caches after the step."""
        return self.start + self.num_rows

    @property
    def token_ids(self) -> list[int]:
        """Ids of the rows."""
        return self.state.token_ids[self.start : self.end]

    @property
    def samples(self) -> bool:
        """True if the last row is the request's newest token, so that its logits are sampled."""
        return self.end == len(self.state.token_ids)

    @property
    def num_prompt_rows(self) -> int:
        """Rows that stand in the prompt, or in what a resumed request had sampled before."""
        return max(min(self.end, self.state.num_prefill_tokens) - self.start, 0)

    @property
    def num_replayed_rows(self) -> int:
        """Rows below the adopted tokens."""
        return max(min(self.end, self.stay.replay.num_cached_tokens) - self.start, 0)

    @property
    def num_logits(self) -> int:
        """How many of the last rows need logits."""
        if self.state.request.params.logits == "all":
            # A resumed request has those of its first rows already.
            return max(self.end - max(self.start, self.state.num_logits_kept), 0)
        return int(self.samples)

    @property
    def captures(self) -> tuple[SnapshotPoint, ...]:
        """Snapshots to be kept after the step."""
        return tuple(point for point in self.stay.captures if point.num_tokens <= self.end)

    @property
    def may_trim(self) -> bool:
        """True if no row but the last one is needed above the last KV source."""
        # Rows that a snapshot keeps must all be there, and have been computed from whole windows.
        wanted = self.state.request.params.logits == "all" or bool(self.stay.captures)
        return self.state.is_prefilling and not wanted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """What one step computes, and who lost its blocks for it."""

    rows: tuple[ScheduledRows, ...]
    """At most one entry a request; empty only if there is no request at all."""
    preempted: tuple[RequestState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of a scheduler."""

    max_rows: int
    """Of a step, over all ranks."""
    rank: RankLimit | None = None
    """None: no limit a rank."""
    num_spare_blocks: int | None = None
    """Blocks that an admission leaves free; None is one for each running request."""
    reserve: bool = False
    """Promise at admission what a request can ever need."""


class Scheduler:
    """Queue, running requests and their blocks.

    Args:
        tables: deals the blocks.
        limits: of a step and of admission.
        reader: what a request takes over from the prefix cache.
        publisher: what a step leaves in it.
        snapshots: those that `reader` plans with; entries to be restored are held in it.
        stats: counters of the prefix cache, mutated.
    """

    def __init__(
        self,
        tables: CacheTables,
        limits: SchedulerLimits,
        reader: PrefixReader,
        publisher: PrefixPublisher,
        snapshots: SnapshotStore | None = None,
        stats: PrefixStats | None = None,
    ) -> None:
        self._tables = tables
        self._limits = limits
        self._reader = reader
        self._publisher = publisher
        self._snapshots = snapshots
        self._stats = PrefixStats() if stats is None else stats
        self._waiting: list[RequestState] = []
        self._running: list[RequestState] = []
        self._num_arrivals = 0

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing: new ones and preempted ones."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    def enqueue(self, state: RequestState) -> None:
        """Take a new request in."""
        state.arrival = self._num_arrivals
        self._num_arrivals += 1
        insort(self._waiting, state, key=lambda other: other.rank)

    def schedule(self, max_rows: int) -> Schedule:
        """Choose the rows of one step, preempt and admit requests for it and map their blocks.

        Args:
            max_rows: budget of this step; at most the scheduler's own counts.
        """
        preempted: list[RequestState] = []
        while True:
            scheduled = self._deal(self._budget(max_rows), preempted)
            if all(rows.state.phase is Phase.RUNNING for rows in scheduled):
                return Schedule(rows=tuple(scheduled), preempted=tuple(preempted))
            # A victim had been given rows: deal again without it, which changes other rows too.

    def advance(self, rows: ScheduledRows) -> None:
        """Account for rows that were computed, and for the snapshots restored and kept with them.

        Full blocks are published and window blocks retired.
        """
        rows.state.num_computed_tokens = rows.end
        rows.stay.captures = tuple(p for p in rows.stay.captures if p.num_tokens > rows.end)
        self._let_snapshot_go(rows.stay)
        self._publisher.publish(rows.state)
        self._tables.retire(rows.tables, rows.end)

    def remove(self, state: RequestState) -> None:
        """Forget a request wherever it is: waiting, preempted, in its prefill or in decode."""
        if state.phase is Phase.RUNNING:
            self._leave(state)
        else:
            self._waiting.remove(state)
        state.phase = Phase.FINISHED

    def check_invariants(self) -> None:
        """Assert that blocks, prefix cache, snapshots and requests agree."""
        assert all(state.phase is Phase.RUNNING for state in self._running), "phase of a runner"
        assert all(state.phase is Phase.WAITING for state in self._waiting), "phase of a waiter"
        for state in self._waiting:
            assert state.stay is None, "a waiting request holds something"
            assert state.num_computed_tokens == 0, "a start survived a preemption"
        assert self._waiting == sorted(self._waiting, key=lambda s: s.rank), "order of the queue"
        self._tables.check_invariants([state.tables for state in self._running])
        self._publisher.check_invariants(self._running)
        if self._snapshots is not None:
            self._snapshots.check_invariants()

    def _deal(self, budget: RowBudget, preempted: list[RequestState]) -> list[ScheduledRows]:
        """Deal the rows of a step in turn: running requests go on, waiting ones are admitted."""
        turns = sorted([*self._running, *self._waiting], key=_turn)
        running = set(self._running)
        under_way = self._reader.under_way(self._running if self._waiting else ())
        scheduled: list[ScheduledRows] = []
        is_open = True
        for state in turns:
            if state in running:
                if state.phase is Phase.RUNNING:  # not preempted a moment ago
                    self._continue(state, budget, scheduled, preempted)
            elif is_open and not preempted:
                is_open = self._try_admit(state, under_way, budget, scheduled)
        return scheduled

    def _continue(
        self,
        state: RequestState,
        budget: RowBudget,
        scheduled: list[ScheduledRows],
        preempted: list[RequestState],
    ) -> None:
        """Rows of a running request, as many as there are blocks for."""
        num_rows = budget.room(state.num_pending_tokens, state.is_prefilling)
        self._make_room(state, num_rows, preempted)
        fitting = max(self._tables.reach(state.tables) - state.num_computed_tokens, 0)
        if fitting < num_rows:
            num_rows = budget.room(fitting, state.is_prefilling)
        self._take(state, num_rows, budget, scheduled)

    def _make_room(self, state: RequestState, num_rows: int, preempted: list[RequestState]) -> None:
        """Preempt requests that go after this one until the blocks for its rows are free."""
        missing = self._tables.num_missing(state.tables, state.num_computed_tokens + num_rows)
        while self._tables.blocks.num_free < missing:
            victim = max(self._running, key=lambda other: other.rank)
            if victim.rank <= state.rank:
                return
            self._leave(victim)
            victim.phase = Phase.WAITING
            victim.num_preemptions += 1
            insort(self._waiting, victim, key=lambda other: other.rank)
            preempted.append(victim)

    def _try_admit(
        self,
        state: RequestState,
        under_way: UnderWay,
        budget: RowBudget,
        scheduled: list[ScheduledRows],
    ) -> bool:
        """Admit a waiting request if it can run now; whether those behind it may be looked at."""
        if not budget.left or not self._tables.has_seat:
            return False
        adoption = self._reader.find(state)
        if self._reader.should_wait(state, adoption, under_way):
            return True
        num_rows = budget.room(rows_to_compute(adoption.plan, len(state.token_ids)), True)
        if not num_rows or not self._has_room(state, adoption):
            return False
        self._admit(state, adoption)
        self._take(state, num_rows, budget, scheduled)
        self._reader.add_under_way(under_way, state)
        return True

    def _has_room(self, state: RequestState, adoption: Adoption) -> bool:
        """Whether the blocks of everything the request knows are free, beside what others need."""
        blocks = self._tables.blocks
        # Adopted blocks that nobody holds leave the free queue as well.
        revived = sum(blocks.ref_count(block) == 0 for block in adoption.blocks)
        needed = self._num_promised(state) - len(adoption.blocks) + revived
        if not self._running:
            return needed <= blocks.num_free
        outstanding = growth = 0
        for other in self._running:
            held, promised = len(other.tables.blocks), self._num_promised(other)
            outstanding += max(promised - held, 0)
            growth += max(self._num_at_most(other) - max(promised, held), 0)
        spare = self._limits.num_spare_blocks
        spare = len(self._running) if spare is None else spare
        # Where nobody can grow any more, nothing has to be kept for it.
        return needed + outstanding + min(spare, growth) <= blocks.num_free

    def _num_promised(self, state: RequestState) -> int:
        """Blocks that an admitted request can count on."""
        if self._limits.reserve:
            return self._num_at_most(state)
        return self._tables.num_blocks(len(state.token_ids))

    def _num_at_most(self, state: RequestState) -> int:
        """Blocks of a request at its longest; its last sampled token is never computed."""
        return self._tables.num_blocks(state.request.max_tokens - 1)

    def _admit(self, state: RequestState, adoption: Adoption) -> None:
        plan = adoption.plan
        # Take over first, allocate later: an allocation evicts only what nobody holds.
        tables = self._tables.open(adoption.blocks, plan.layer_starts[0])
        state.stay = Stay(
            tables=tables,
            replay=plan,
            num_prefill_tokens=len(state.token_ids),
            num_published=len(adoption.blocks),
            restore=adoption.restore,
            captures=adoption.captures,
        )
        if adoption.restore is not None:
            assert self._snapshots is not None, "a restored snapshot has a store"
            self._snapshots.acquire(adoption.restore.key)
        state.num_computed_tokens = plan.start
        state.exact = state.exact and plan.exact
        state.phase = Phase.RUNNING
        self._waiting.remove(state)
        self._running.append(state)
        if state.first_plan is None:
            state.first_plan = plan
            if self._reader.reads(state):
                self._count(state, plan, adoption.num_refused)

    def _count(self, state: RequestState, plan: ReplayPlan, num_refused: int) -> None:
        stats = self._stats
        stats.num_queries += 1
        stats.num_query_tokens += len(state.token_ids)
        stats.num_hit_tokens += plan.num_cached_tokens
        stats.num_replayed_rows += plan.num_replayed_rows
        stats.num_computed_rows += rows_to_compute(plan, len(state.token_ids))
        stats.num_refused_blocks += num_refused

    def _leave(self, state: RequestState) -> None:
        """Everything a running request holds goes back."""
        assert state.stay is not None, "a running request has a stay"
        self._running.remove(state)
        self._let_snapshot_go(state.stay)
        self._tables.close(state.stay.tables)
        state.stay = None
        state.num_computed_tokens = 0

    def _let_snapshot_go(self, stay: Stay) -> None:
        if stay.restore is not None:
            assert self._snapshots is not None, "a restored snapshot has a store"
            self._snapshots.release(stay.restore.key)
            stay.restore = None

    def _budget(self, max_rows: int) -> RowBudget:
        rank = self._limits.rank
        left = min(max_rows, self._limits.max_rows)
        if rank is not None:
            left = min(left, rank.max_rows * rank.size)
        return RowBudget(left=left, limit=rank)

    def _take(
        self, state: RequestState, num_rows: int, budget: RowBudget, scheduled: list[ScheduledRows]
    ) -> None:
        if num_rows > 0:
            rows = ScheduledRows(state=state, start=state.num_computed_tokens, num_rows=num_rows)
            self._tables.extend(rows.tables, rows.end)
            budget.take(num_rows, state.is_prefilling)
            scheduled.append(rows)


def _turn(state: RequestState) -> tuple[int, int, int]:
    """Place of a request in a step."""
    kind = 2 if state.phase is Phase.WAITING else int(state.is_prefilling)
    return state.request.priority, kind, state.arrival
