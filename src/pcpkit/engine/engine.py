"""The step loop: schedule, plan, forward, sample, account. Synchronous, one thread.

A step is over before the next one is scheduled, so no block changes hands between the dispatch of a
step and its end: blocks are freed, published and dealt anew only while no row is being computed. An
`abort` from within a step, by an observer, takes effect when the step is done.

A model on several ranks has an engine on each, and each is given the same calls in the same order.
Then all decide alike, and nothing is broadcast: the scheduler sees requests, blocks and snapshots
alone, the plan follows from the batch, logits arrive on every rank with the same bits, and a draw
depends on the request's seed and the number of the token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcpkit.cache.prefix import HashPrefixCache, PrefixEvent, PrefixStats
from pcpkit.cache.replay import NoReplay, ReplayPolicy, ReplayShape
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.engine.assembly import MakePrefixCache, check_snapshots, make_scheduler, make_trim
from pcpkit.engine.batching import build_batch, snapshot_moves
from pcpkit.engine.metrics import EngineLevels, EngineMetrics, StepCounts
from pcpkit.engine.request import Request, RequestOutput, RequestState, check_request
from pcpkit.engine.runner import ModelRunner, StepObserver, ignore_step
from pcpkit.engine.sampling import next_tokens
from pcpkit.engine.scheduler import Schedule, ScheduledRows
from pcpkit.engine.sizing import EngineConfig, cache_config
from pcpkit.engine.tables import CacheTables
from pcpkit.model.decoder import TextModel
from pcpkit.plan.partition import PartitionStrategy, levelled

NO_REPLAY = NoReplay()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What one step did."""

    num_prompt_rows: int
    """Rows of prompts, and of what preempted requests had sampled and compute again."""
    num_decode_rows: int
    """Rows of sampled tokens."""
    seconds: float
    finished: tuple[RequestOutput, ...]
    """Requests that ended with this step."""
    num_replayed_rows: int = 0
    """Those of the prompt rows that stand below adopted tokens."""
    preempted: tuple[str, ...] = ()
    """Requests that lost their blocks to this step."""


def ignore_event(event: PrefixEvent) -> None:
    """The observer of the prefix cache that looks at nothing."""


class Engine:
    """Runs requests on one model, or on this rank of it.

    Args:
        model: whose `max_model_len` bounds every request.
        config: limits; the caches are sized by them. Budgets are global: rows of all ranks.
        replay: what a hit of the prefix cache computes; `NoReplay` switches the cache off.
        snapshots: this rank's store, for a policy that uses them; one store serves one model.
        metrics: is told what happens; None tells nobody.
        observe: is shown every step after its forward.
        observe_prefix: is told of every block that enters or leaves the prefix cache.
        make_prefix_cache: another prefix cache than the default.
        strategy: deals the rows of a step to the model's PCP ranks; changes no result.
        clock: seconds, for the times in the results. Nothing is decided by it.

    Raises:
        ValueError: a policy that uses snapshots without a store, or a store that nothing uses.

    Example:
        >>> engine = Engine(model, replay=ExactReplay())                    # doctest: +SKIP
        >>> engine.submit(Request(request_id="0", prompt_token_ids=(0, 5, 7)))  # doctest: +SKIP
        >>> [output.token_ids for output in engine.run()]                   # doctest: +SKIP
    """

    def __init__(
        self,
        model: TextModel,
        config: EngineConfig | None = None,
        *,
        replay: ReplayPolicy = NO_REPLAY,
        snapshots: SnapshotStore | None = None,
        metrics: EngineMetrics | None = None,
        observe: StepObserver = ignore_step,
        observe_prefix: Callable[[PrefixEvent], None] = ignore_event,
        make_prefix_cache: MakePrefixCache = HashPrefixCache,
        strategy: PartitionStrategy = levelled,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.config = EngineConfig() if config is None else config
        self.stats = PrefixStats()
        """Counters of the prefix cache since the start."""
        check_snapshots(replay, snapshots)
        self._snapshots = snapshots
        self._metrics = metrics
        self._observe_prefix = observe_prefix
        self._clock = clock
        cache = cache_config(model.config, self.config, model.max_model_len)
        self._tables = CacheTables(cache, model.config.sliding_window)
        self._scheduler = make_scheduler(
            self.config,
            ReplayShape(
                num_layers=model.config.num_hidden_layers,
                sliding_window=model.config.sliding_window,
                block_size=cache.block_size,
            ),
            self._tables,
            replay=replay,
            snapshots=snapshots,
            make_prefix_cache=make_prefix_cache,
            observe_prefix=self._note_prefix_event,
            pcp_size=model.groups.pcp.size,
            strategy=strategy,
            stats=self.stats,
        )
        self._trim = make_trim(self.config.trim, model.config)
        self._runner = ModelRunner(
            model,
            cache,
            max_rows=self.config.chunk_tokens,
            observe=observe,
            strategy=strategy,
            snapshots=snapshots,
            trim=self._trim,
        )
        self._states: dict[str, RequestState] = {}
        self._in_step = False
        self._aborted: list[str] = []

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._scheduler.num_waiting or self._scheduler.num_running)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never be served (see `check_request`), it needs more blocks than the
                pool has, or a request of that id is still in the engine.
        """
        self._check(request, self._states)
        state = RequestState(
            request=request,
            token_ids=list(request.prompt_token_ids),
            submitted_at=self._clock(),
        )
        self._states[request.request_id] = state
        self._scheduler.enqueue(state)

    def abort(self, request_id: str) -> bool:
        """Drop a request in whatever phase it is; it gives no result, and its id is free again.

        During a step (called by an observer) it happens when the step is done. What it published
        stays in the prefix cache.

        Returns:
            Whether there was such a request.
        """
        if request_id not in self._states or request_id in self._aborted:
            return False
        self._aborted.append(request_id)
        if not self._in_step:
            self._drop_aborted()
        return True

    def step(self, max_rows: int | None = None) -> StepResult:
        """Run one step.

        Args:
            max_rows: a smaller budget for this step, to cut a prompt at a chosen place.

        Raises:
            ValueError: max_rows below 1.
            FloatingPointError: a row to sample from holds NaN. As after any error in a step, the
                requests that had rows in it are dropped and all others go on.
        """
        budget = self.config.chunk_tokens if max_rows is None else max_rows
        if budget < 1:
            raise ValueError(f"max_rows expected at least 1, got {budget}; leave it out")
        start = self._clock()
        schedule = self._scheduler.schedule(budget)
        assert schedule.rows or not self.has_work, "a step without rows would never end"
        prompt_rows = sum(rows.num_prompt_rows for rows in schedule.rows)
        all_rows = sum(rows.num_rows for rows in schedule.rows)
        replayed_rows = sum(rows.num_replayed_rows for rows in schedule.rows)
        self._note_starts(schedule, start)
        finished = self._guarded(schedule.rows) if schedule.rows else ()
        result = StepResult(
            num_prompt_rows=prompt_rows,
            num_decode_rows=all_rows - prompt_rows,
            seconds=self._clock() - start,
            finished=finished,
            num_replayed_rows=replayed_rows,
            preempted=tuple(state.request.request_id for state in schedule.preempted),
        )
        self._report(result)
        return result

    def run(self) -> list[RequestOutput]:
        """Step until nothing is left; results in the order the requests finished."""
        finished: list[RequestOutput] = []
        while self.has_work:
            finished += self.step().finished
        return finished

    def generate(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Submit requests, run everything to the end, return their results in the order given.

        Aborted ones are left out. Raises ValueError as `submit`, before any of them is queued.
        """
        asked = list(requests)
        ids_in_use = set(self._states)
        for request in asked:
            self._check(request, ids_in_use)
            ids_in_use.add(request.request_id)
        for request in asked:
            self.submit(request)
        outputs = {output.request.request_id: output for output in self.run()}
        return [outputs[r.request_id] for r in asked if r.request_id in outputs]

    def check_invariants(self) -> None:
        """Assert that blocks, prefix cache, snapshots and requests agree (for tests)."""
        self._scheduler.check_invariants()
        count = self._scheduler.num_running + self._scheduler.num_waiting
        assert count == len(self._states), "a request is lost"

    def _check(self, request: Request, ids_in_use: Collection[str]) -> None:
        check_request(
            request,
            vocab_size=self.model.config.vocab_size,
            max_model_len=self.model.max_model_len,
        )
        # The last sampled token is never computed.
        num_tokens, available = request.max_tokens - 1, self._tables.blocks.num_blocks
        needed = self._tables.num_blocks(num_tokens)
        if needed > available:
            raise ValueError(
                f"request {request.request_id} expected to need at most {available} blocks, got "
                f"{needed} for {num_tokens} tokens; raise num_blocks or shorten the request"
            )
        if request.request_id in ids_in_use:
            raise ValueError(
                f"request_id expected one that is not in use, got {request.request_id!r} again; "
                "number the requests"
            )

    def _note_prefix_event(self, event: PrefixEvent) -> None:
        if event.kind == "evicted":
            self.stats.num_evictions += 1
        self._observe_prefix(event)

    def _note_starts(self, schedule: Schedule, now: float) -> None:
        for state in schedule.preempted:
            self._runner.forget(state.request.request_id)
        for rows in schedule.rows:
            if rows.state.admitted_at is None:
                rows.state.admitted_at = now
                if self._metrics is not None:
                    self._metrics.count_start(now - rows.state.submitted_at)

    def _guarded(self, scheduled: Sequence[ScheduledRows]) -> tuple[RequestOutput, ...]:
        """Compute; if that fails, drop the requests whose caches may be half written."""
        self._in_step = True
        is_done = False
        try:
            finished = self._compute(scheduled)
            is_done = True
        finally:
            self._in_step = False
            if not is_done:
                self._aborted += [
                    rows.state.request.request_id
                    for rows in scheduled
                    if rows.state.request.request_id not in self._aborted
                ]
            self._drop_aborted()
        return finished

    def _compute(self, scheduled: Sequence[ScheduledRows]) -> tuple[RequestOutput, ...]:
        request_ids = tuple(rows.state.request.request_id for rows in scheduled)
        batch = build_batch(
            scheduled,
            self.model.config.engram_max_ngram_size - 1,
            trims=self.config.trim != "off",
        )
        restores, captures = snapshot_moves(scheduled)
        logits = self._runner.run(batch, request_ids, restores=restores)
        pieces = logits.split([rows.num_logits for rows in scheduled])
        sampling = [
            (rows.state, piece[-1])
            for rows, piece in zip(scheduled, pieces, strict=True)
            if rows.samples and rows.state.request.request_id not in self._aborted
        ]
        # Before anything is accounted for: of rows that give NaN nothing is published or kept.
        tokens = _next_tokens(sampling)
        self._runner.capture(batch, captures)
        for rows, piece in zip(scheduled, pieces, strict=True):
            if piece.shape[0] and rows.state.request.params.logits != "none":
                # A copy: a view would keep the logits of the whole step alive.
                rows.state.kept_logits.append(piece.to("cpu", copy=True))
                rows.state.num_logits_kept += piece.shape[0]
            rows.state.exact = rows.state.exact and not self._approximates(rows)
            self._scheduler.advance(rows)
        return self._append([state for state, _ in sampling], tokens)

    def _approximates(self, rows: ScheduledRows) -> bool:
        """Whether the step cuts off windows of these rows above the last KV source.

        Only their answer suffers: what the prefix cache keeps is made below.
        """
        trim = self._trim
        if trim is None or trim.mode != "bounded" or trim.cut == trim.num_layers - 1:
            return False
        return rows.may_trim and rows.num_rows > trim.sliding_window

    def _append(
        self, states: Sequence[RequestState], tokens: Sequence[int]
    ) -> tuple[RequestOutput, ...]:
        if not states:
            return ()
        now = self._clock()
        finished: list[RequestOutput] = []
        for state, token in zip(states, tokens, strict=True):
            state.token_ids.append(token)
            if state.first_token_at is None:
                state.first_token_at = now
            reason = state.finish_reason(self.model.config.eos_token_id)
            if reason is not None:
                finished.append(state.output(reason, now))
                self._drop(state)
        return tuple(finished)

    def _drop_aborted(self) -> None:
        for request_id in self._aborted:
            self._drop(self._states[request_id])
            if self._metrics is not None:
                self._metrics.count_aborted()
        self._aborted.clear()

    def _drop(self, state: RequestState) -> None:
        request_id = state.request.request_id
        self._scheduler.remove(state)
        self._runner.forget(request_id)
        del self._states[request_id]

    def _report(self, result: StepResult) -> None:
        if self._metrics is None:
            return
        for output in result.finished:
            self._metrics.count_finished(output)
        blocks = self._tables.blocks
        self._metrics.count_step(
            StepCounts(
                num_prompt_rows=result.num_prompt_rows,
                num_decode_rows=result.num_decode_rows,
                num_replayed_rows=result.num_replayed_rows,
                num_preemptions=len(result.preempted),
                seconds=result.seconds,
            ),
            self.stats,
            EngineLevels(
                num_running=self._scheduler.num_running,
                num_waiting=self._scheduler.num_waiting,
                num_free_blocks=blocks.num_free,
                num_cached_free_blocks=blocks.num_cached_free,
                snapshot_bytes=0 if self._snapshots is None else self._snapshots.num_bytes,
            ),
        )


def _next_tokens(sampling: Sequence[tuple[RequestState, Tensor]]) -> list[int]:
    if not sampling:
        return []
    return next_tokens(
        torch.stack([row for _, row in sampling]),
        [state.request.params for state, _ in sampling],
        [len(state.output_token_ids) for state, _ in sampling],
    )
