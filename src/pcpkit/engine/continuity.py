"""Does a step continue what the caches hold? Refused before anything is computed.

The engine's own scheduler cannot get this wrong. The check is for whoever drives the runner with a
scheduler of their own, and it is the same on every rank, so a refusal never leaves a peer waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

from pcpkit.plan.batch import StepBatch


class ComputedTokens:
    """How many tokens of each request the caches hold.

    Args:
        max_rows: rows of one step at most, over all requests.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._counts: dict[str, int] = {}

    def check(self, batch: StepBatch, request_ids: Sequence[str]) -> None:
        """Refuse a batch that is too large, or whose rows are not the next ones of its requests.

        Args:
            batch: the global batch.
            request_ids: of its requests, in order.

        Raises:
            ValueError: more rows than the budget, not one id a request, an id twice, or a request
                that does not start where its last step ended (a new one: at 0).
        """
        if batch.num_tokens > self._max_rows:
            raise ValueError(
                f"batch expected at most {self._max_rows} rows, got {batch.num_tokens}; raise "
                "chunk_tokens or schedule fewer"
            )
        if len(request_ids) != batch.num_reqs:
            raise ValueError(
                f"request_ids expected {batch.num_reqs} ids, got {len(request_ids)}; one a request"
            )
        twice = sorted({name for name in request_ids if request_ids.count(name) > 1})
        if twice:
            raise ValueError(
                f"request_ids expected each id once a step, got {twice[0]!r} again; number the "
                "requests, and put all rows of one into one entry"
            )
        for name, start in zip(request_ids, batch.num_computed_tokens.tolist(), strict=True):
            held = self._counts.get(name, 0)
            if start != held:
                raise ValueError(
                    f"request {name} expected to continue at position {held}, got {start}; "
                    "schedule its rows in order, each once"
                )

    def advance(self, batch: StepBatch, request_ids: Sequence[str]) -> None:
        """Account for a step that was computed."""
        self._counts.update(zip(request_ids, batch.seq_lens.tolist(), strict=True))

    def forget(self, request_id: str) -> None:
        """A request ended; its id may start again at 0."""
        self._counts.pop(request_id, None)
