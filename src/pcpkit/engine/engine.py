"""The step loop: schedule, plan, forward, sample, account. Synchronous, one thread.

A model on several ranks has an engine on each, and each is given the same requests in the same
order. Then all decide alike, and nothing is broadcast: the scheduler sees the requests alone, the
plan follows from the batch, logits arrive on every rank with the same bits, and a draw depends on
the request's seed and the number of the token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcpkit.engine.batching import build_batch
from pcpkit.engine.request import Request, RequestOutput, RequestState, check_request
from pcpkit.engine.runner import ModelRunner, StepObserver, ignore_step
from pcpkit.engine.sampling import next_tokens
from pcpkit.engine.scheduler import ScheduledRows, Scheduler
from pcpkit.engine.sizing import EngineConfig, cache_config
from pcpkit.engine.tables import CacheTables
from pcpkit.model.decoder import TextModel
from pcpkit.plan.partition import PartitionStrategy, levelled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What one step did."""

    num_prompt_rows: int
    """Rows of prompts."""
    num_decode_rows: int
    """Rows of sampled tokens."""
    seconds: float
    finished: tuple[RequestOutput, ...]
    """Requests that ended with this step."""


class Engine:
    """Runs requests on one model, or on this rank of it.

    Args:
        model: whose `max_model_len` bounds every request.
        config: limits; the caches are sized by them. Budgets are global: rows of all ranks.
        observe: is shown every step after its forward.
        strategy: deals the rows of a step to the model's PCP ranks; changes no result.
        clock: seconds, for the times in the results. Nothing is decided by it.

    Example:
        >>> engine = Engine(model)                                          # doctest: +SKIP
        >>> engine.submit(Request(request_id="0", prompt_token_ids=(0, 5, 7)))  # doctest: +SKIP
        >>> [output.token_ids for output in engine.run()]                   # doctest: +SKIP
    """

    def __init__(
        self,
        model: TextModel,
        config: EngineConfig | None = None,
        *,
        observe: StepObserver = ignore_step,
        strategy: PartitionStrategy = levelled,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.config = EngineConfig() if config is None else config
        cache = cache_config(model.config, self.config, model.max_model_len)
        self._tables = CacheTables(cache, model.config.sliding_window)
        self._num_blocks = cache.num_blocks
        self._scheduler = Scheduler(self._tables, self.config.chunk_tokens)
        self._runner = ModelRunner(
            model, cache, max_rows=self.config.chunk_tokens, observe=observe, strategy=strategy
        )
        self._clock = clock
        self._request_ids: set[str] = set()

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
        self._check(request, self._request_ids)
        self._request_ids.add(request.request_id)
        state = RequestState(
            request=request,
            token_ids=list(request.prompt_token_ids),
            submitted_at=self._clock(),
        )
        self._scheduler.enqueue(state)

    def step(self, max_rows: int | None = None) -> StepResult:
        """Run one step.

        Args:
            max_rows: a smaller budget for this step, to cut a prompt at a chosen place.

        Raises:
            ValueError: max_rows below 1.
        """
        budget = self.config.chunk_tokens if max_rows is None else max_rows
        if budget < 1:
            raise ValueError(f"max_rows expected at least 1, got {budget}; leave it out")
        start = self._clock()
        scheduled = self._scheduler.schedule(budget)
        assert scheduled or not self.has_work, "a step without rows would never end"
        prompt_rows = sum(rows.num_prompt_rows for rows in scheduled)
        all_rows = sum(rows.num_rows for rows in scheduled)
        finished = self._compute(scheduled) if scheduled else ()
        return StepResult(
            num_prompt_rows=prompt_rows,
            num_decode_rows=all_rows - prompt_rows,
            seconds=self._clock() - start,
            finished=finished,
        )

    def run(self) -> list[RequestOutput]:
        """Step until nothing is left; results in the order the requests finished."""
        finished: list[RequestOutput] = []
        while self.has_work:
            finished += self.step().finished
        return finished

    def generate(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Submit requests, run everything to the end, return their results in the order given.

        Raises ValueError as `submit`, before any of them is queued.
        """
        asked = list(requests)
        ids_in_use = set(self._request_ids)
        for request in asked:
            self._check(request, ids_in_use)
            ids_in_use.add(request.request_id)
        for request in asked:
            self.submit(request)
        outputs = {output.request.request_id: output for output in self.run()}
        return [outputs[request.request_id] for request in asked]

    def check_invariants(self) -> None:
        """Assert that blocks and requests agree (for tests and debugging)."""
        self._scheduler.check_invariants()

    def _check(self, request: Request, ids_in_use: Collection[str]) -> None:
        check_request(
            request,
            vocab_size=self.model.config.vocab_size,
            max_model_len=self.model.max_model_len,
        )
        needed = self._tables.num_blocks(request.max_tokens)
        if needed > self._num_blocks:
            raise ValueError(
                f"request {request.request_id} expected to need at most {self._num_blocks} "
                f"blocks, got {needed} for {request.max_tokens} tokens; raise num_blocks or "
                "shorten the request"
            )
        if request.request_id in ids_in_use:
            raise ValueError(
                f"request_id expected one that is not in use, got {request.request_id!r} again; "
                "number the requests"
            )

    def _compute(self, scheduled: Sequence[ScheduledRows]) -> tuple[RequestOutput, ...]:
        request_ids = tuple(rows.state.request.request_id for rows in scheduled)
        batch = build_batch(scheduled, self.model.config.engram_max_ngram_size - 1)
        logits = self._runner.run(batch, request_ids)
        pieces = logits.split([rows.num_logits for rows in scheduled])
        for rows, piece in zip(scheduled, pieces, strict=True):
            if piece.shape[0] and rows.state.request.params.logits != "none":
                # A copy: a view would keep the logits of the whole step alive.
                rows.state.kept_logits.append(piece.to("cpu", copy=True))
        sampling = [
            (rows.state, piece[-1])
            for rows, piece in zip(scheduled, pieces, strict=True)
            if rows.samples
        ]
        for rows in scheduled:
            self._scheduler.advance(rows)
        return self._sample([state for state, _ in sampling], [row for _, row in sampling])

    def _sample(
        self, states: Sequence[RequestState], rows: Sequence[Tensor]
    ) -> tuple[RequestOutput, ...]:
        if not states:
            return ()
        tokens = next_tokens(
            torch.stack(list(rows)),
            [state.request.params for state in states],
            [len(state.output_token_ids) for state in states],
        )
        now = self._clock()
        finished: list[RequestOutput] = []
        for state, token in zip(states, tokens, strict=True):
            state.token_ids.append(token)
            if state.first_token_at is None:
                state.first_token_at = now
            reason = state.finish_reason(self.model.config.eos_token_id)
            if reason is None:
                continue
            self._scheduler.finish(state)
            self._request_ids.discard(state.request.request_id)
            self._runner.forget(state.request.request_id)
            finished.append(
                RequestOutput(
                    request=state.request,
                    token_ids=tuple(state.output_token_ids),
                    finish_reason=reason,
                    logits=torch.cat(state.kept_logits) if state.kept_logits else None,
                    ttft_s=state.first_token_at - state.submitted_at,
                    decode_s=now - state.first_token_at,
                )
            )
        return tuple(finished)
