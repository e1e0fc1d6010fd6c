"""Does a step continue what the caches hold? Refused before anything is computed.

The engine's own scheduler cannot get this wrong. The check is for whoever drives the runner with a
scheduler of their own, and it is the same on every rank, so a refusal never leaves a peer waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pcpkit.plan.batch import StepBatch

NO_SNAPSHOTS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Progress:
    """Of one request: the next position, and the start that it keeps until it is forgotten."""

    next_position: int
    num_cached_tokens: int
    layer_starts: tuple[int, ...]


class ComputedTokens:
    """How many tokens of each request the caches hold.

    A request starts at 0, where its replay of a cached prefix does, or where the window records end
    that a snapshot in that prefix brings. It keeps that replay in every step. To start anew, after
    a preemption, it has to be forgotten first.

    Args:
        max_rows: rows of one step at most, over all requests.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._progress: dict[str, _Progress] = {}

    def check(
        self,
        batch: StepBatch,
        request_ids: Sequence[str],
        restored: Mapping[str, int] = NO_SNAPSHOTS,
    ) -> None:
        """Refuse a batch that is too large, or whose rows are not the next ones of its requests.

        Args:
            batch: the global batch.
            request_ids: of its requests, in order.
            restored: by id, where the window records end that come from a snapshot.

        Raises:
            ValueError: more rows than the budget, not one id a request, an id twice, a request that
                does not start where its last step ended, a new one that does not start at 0 or
                where its replay or its snapshot says, another replay than before, a snapshot that
                ends outside the cached tokens, or a restored request that is not new.
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
        for name, start, replay in zip(
            request_ids, batch.num_computed_tokens.tolist(), _replays(batch), strict=True
        ):
            self._check_start(name, start, replay, restored.get(name))

    def advance(self, batch: StepBatch, request_ids: Sequence[str]) -> None:
        """Account for a step that was computed."""
        for name, end, (cached, starts) in zip(
            request_ids, batch.seq_lens.tolist(), _replays(batch), strict=True
        ):
            self._progress[name] = _Progress(
                next_position=end, num_cached_tokens=cached, layer_starts=starts
            )

    def forget(self, request_id: str) -> None:
        """A request ended or lost its blocks; its id may start again."""
        self._progress.pop(request_id, None)

    def _check_start(
        self, name: str, start: int, replay: tuple[int, tuple[int, ...]], restored_at: int | None
    ) -> None:
        cached, starts = replay
        before = self._progress.get(name)
        if restored_at is not None and not 0 < restored_at <= cached:
            raise ValueError(
                f"request {name} expected a snapshot that ends in its {cached} cached tokens, got "
                f"one at {restored_at}; restore one of the adopted prefix"
            )
        if before is None:
            held = max(starts[:1], default=0) if restored_at is None else restored_at
        elif restored_at is not None:
            raise ValueError(
                f"request {name} expected no snapshot after its first step, got one to restore; "
                "forget the request first"
            )
        else:
            held = before.next_position
            if (before.num_cached_tokens, before.layer_starts) != (cached, starts):
                raise ValueError(
                    f"request {name} expected to keep its {before.num_cached_tokens} cached tokens "
                    f"and layer starts, got {cached} and other starts; forget it to start anew"
                )
        if start != held:
            raise ValueError(
                f"request {name} expected to continue at position {held}, got {start}; "
                "schedule its rows in order, each once"
            )


def _replays(batch: StepBatch) -> list[tuple[int, tuple[int, ...]]]:
    """Cached tokens and layer starts of every request; (0, ()) for a cold one."""
    if batch.replay is None:
        return [(0, ())] * batch.num_reqs
    cached = batch.replay.num_cached_tokens.tolist()
    starts: list[list[int]] = batch.replay.layer_starts.tolist()
    return [
        (tokens, tuple(row) if tokens else ()) for tokens, row in zip(cached, starts, strict=True)
    ]
