"""Which rows run in the next step: first come, first served, under a budget of rows.

Order within a step: decodes first (one row each), then prompts that are under way, then waiting
requests while there is room. A waiting request is admitted only when all blocks it can ever need
can be promised, so a running request never waits and nothing deadlocks; nobody overtakes the head
of the queue. The decision depends on the submitted requests alone, so ranks that are told the same
requests in the same order schedule alike.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pcpkit.engine.request import Phase, RequestState
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
        assert self.state.tables is not None, "a scheduled request has tables"
        return self.state.tables

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
        """Rows that stand in the prompt."""
        return max(min(self.end, self.state.num_prompt_tokens) - self.start, 0)

    @property
    def num_logits(self) -> int:
        """How many of the last rows need logits."""
        if self.state.request.params.logits == "all":
            return self.num_rows
        return int(self.samples)


class Scheduler:
    """Queue, running requests and their blocks.

    Args:
        tables: deals the blocks.
        max_rows: budget of a step in rows.
    """

    def __init__(self, tables: CacheTables, max_rows: int) -> None:
        self._tables = tables
        self._max_rows = max_rows
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    def enqueue(self, state: RequestState) -> None:
        """Put a new request at the end of the queue."""
        self._waiting.append(state)

    def schedule(self, max_rows: int) -> list[ScheduledRows]:
        """Choose the rows of one step, admit requests for it and map their blocks.

        Args:
            max_rows: budget of this step; at most the scheduler's own counts.

        Returns:
            At most one entry a request; empty only if there is no request at all.
        """
        budget = min(max_rows, self._max_rows)
        # A stable sort: within each kind the order of arrival stays.
        ordered = sorted(self._running, key=lambda state: state.is_prefilling)
        scheduled: list[ScheduledRows] = []
        for state in ordered:
            budget = self._take(state, budget, scheduled)
        while budget and self._waiting and self._tables.fits(self._waiting[0].request.max_tokens):
            state = self._waiting.popleft()
            state.tables = self._tables.open(state.request.max_tokens)
            state.phase = Phase.RUNNING
            self._running.append(state)
            budget = self._take(state, budget, scheduled)
        return scheduled

    def advance(self, rows: ScheduledRows) -> None:
        """Account for rows that were computed; give back window blocks below the window."""
        rows.state.num_computed_tokens = rows.end
        self._tables.retire(rows.tables, rows.end)

    def finish(self, state: RequestState) -> None:
        """Take a running request's blocks back and forget it."""
        assert state.tables is not None, "only a running request can finish"
        self._running.remove(state)
        self._tables.close(state.tables)
        state.tables = None
        state.phase = Phase.FINISHED

    def check_invariants(self) -> None:
        """Assert that blocks, promises and running requests agree."""
        assert all(state.phase is Phase.RUNNING for state in self._running), "phase of a runner"
        assert all(state.phase is Phase.WAITING for state in self._waiting), "phase of a waiter"
        self._tables.check_invariants(
            [state.tables for state in self._running if state.tables is not None]
        )

    def _take(self, state: RequestState, budget: int, scheduled: list[ScheduledRows]) -> int:
        """Schedule what fits of a running request; returns the budget that is left."""
        rows = ScheduledRows(
            state=state,
            start=state.num_computed_tokens,
            num_rows=min(state.num_pending_tokens, budget),
        )
        if rows.num_rows:
            self._tables.extend(rows.tables, rows.end)
            scheduled.append(rows)
        return budget - rows.num_rows
