"""What requests wrote into the caches, by position and independent of blocks: for comparison.

A `CacheRecorder` is a step observer. It copies every record right after the step that wrote it, so
it also has the window records of blocks that are given back later. It finds records by the block
tables of the batch and not by the plan, so a plan that writes to a wrong slot shows.

Of a request that starts behind a cached prefix it has the compressed records from position 0 on,
adopted ones as its steps found them, and the window records from where each layer starts: restored
ones and those of its own rows. Of a preempted one it has what the last start wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pcpkit.config import ModelConfig
from pcpkit.engine.runner import ComputedStep


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordSpan:
    """Cache records of one request in one cache."""

    positions: Tensor
    """(records,) int64 ascending: tokens in a window cache, groups in a compressed one."""
    records: Tensor
    """(records, bytes) uint8 on the host."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Recorded:
    """Of one request, since it last started."""

    next_position: int = -1
    parts: dict[str, list[RecordSpan]] = field(default_factory=dict[str, list[RecordSpan]])
    open_rows: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


class CacheRecorder:
    """Collects the cache bytes of every request; pass it as `Engine(..., observe=recorder)`."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._recorded: dict[str, _Recorded] = {}

    def __call__(self, step: ComputedStep) -> None:
        """Copy what the step wrote to the host."""
        for index, request_id in enumerate(step.request_ids):
            start = int(step.batch.num_computed_tokens[index])
            recorded = self._recorded.get(request_id)
            is_first = recorded is None or start != recorded.next_position
            if recorded is None or is_first:
                recorded = self._recorded[request_id] = _Recorded()
            self._record(recorded, step, index, is_first)

    def cache_bytes(self, request_id: str) -> dict[str, Tensor]:
        """Everything a request wrote or took over, uint8 on the host, by name, in position order.

        `window.L` (tokens, record bytes), `compressed.L` and `index_keys.L` (groups, record bytes);
        `ring.L` (bytes,), the open row, only if the request stopped at an odd number of tokens.
        """
        named = {name: span.records for name, span in self.spans(request_id).items()}
        recorded = self._recorded.get(request_id, _Recorded())
        return named | recorded.open_rows

    def spans(self, request_id: str) -> dict[str, RecordSpan]:
        """The same without `ring.L`, with the positions that records belong to."""
        recorded = self._recorded.get(request_id, _Recorded())
        return {name: _joined(parts) for name, parts in recorded.parts.items()}

    def _record(self, recorded: _Recorded, step: ComputedStep, index: int, is_first: bool) -> None:
        batch, pool = step.batch, step.pool
        start, end = int(batch.num_computed_tokens[index]), int(batch.seq_lens[index])
        recorded.next_position = end
        table = batch.block_table[index].tolist()
        window_table = batch.window_block_table[index].tolist()
        for layer, cache in pool.window.items():
            ran_from = 0 if step.layer_starts is None else int(step.layer_starts[index, layer])
            # The first step of a restored request finds more than it wrote.
            low = ran_from if is_first else max(ran_from, start)
            _add(recorded, f"window.{layer}", cache, window_table, low, end)
        for kind, caches in (("compressed", pool.compressed), ("index_keys", pool.index_keys)):
            for layer, cache in caches.items():
                ratio = self._config.compress_ratio(layer)
                low = 0 if is_first else start // ratio
                _add(recorded, f"{kind}.{layer}", cache, table, low, end // ratio)
        ring_block = int(batch.ring_blocks[index])
        recorded.open_rows = {
            f"ring.{layer}": _bytes(ring[ring_block, (end - 1) % ring.shape[1]])
            for layer, ring in pool.ring.items()
            if end % 2
        }


def _add(
    recorded: _Recorded, name: str, cache: Tensor, table: Sequence[int], start: int, end: int
) -> None:
    """Records `start` .. `end - 1` of a request; `table` counts pages of the cache."""
    where = torch.arange(start, max(start, end))
    pages = torch.tensor(table)[where // cache.shape[1]]
    rows = where % cache.shape[1]
    records = cache[pages.to(cache.device), rows.to(cache.device)].cpu()
    span = RecordSpan(positions=where, records=records)
    recorded.parts.setdefault(name, []).append(span)


def _joined(parts: Sequence[RecordSpan]) -> RecordSpan:
    return RecordSpan(
        positions=torch.cat([part.positions for part in parts]),
        records=torch.cat([part.records for part in parts]),
    )


def _bytes(row: Tensor) -> Tensor:
    return row.detach().cpu().clone().view(torch.uint8)
