"""What requests wrote into the caches, in position order and independent of blocks: for comparison.

A `CacheRecorder` is a step observer. It copies every record right after the step that wrote it, so
it also has the window records of blocks that are given back later. It finds records by the block
tables of the batch and not by the plan, so a plan that writes to a wrong slot shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcpkit.config import ModelConfig
from pcpkit.engine.runner import ComputedStep


class CacheRecorder:
    """Collects the cache bytes of every request; pass it as `Engine(..., observe=recorder)`."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._records: dict[str, dict[str, list[Tensor]]] = {}
        self._open_rows: dict[str, dict[str, Tensor]] = {}

    def __call__(self, step: ComputedStep) -> None:
        """Copy what the step wrote to the host."""
        starts = step.batch.num_computed_tokens.tolist()
        ends = step.batch.seq_lens.tolist()
        tables = step.batch.block_table.tolist()
        window_tables = step.batch.window_block_table.tolist()
        for index, request_id in enumerate(step.request_ids):
            start, end, pool = starts[index], ends[index], step.pool
            for layer, cache in pool.window.items():
                records = _read(cache, window_tables[index], start, end)
                self._add(request_id, f"window.{layer}", records)
            for kind, caches in (("compressed", pool.compressed), ("index_keys", pool.index_keys)):
                for layer, cache in caches.items():
                    ratio = self._config.compress_ratio(layer)
                    records = _read(cache, tables[index], start // ratio, end // ratio)
                    self._add(request_id, f"{kind}.{layer}", records)
            ring_block = int(step.batch.ring_blocks[index])
            self._open_rows[request_id] = {
                f"ring.{layer}": _bytes(ring[ring_block, (end - 1) % ring.shape[1]])
                for layer, ring in pool.ring.items()
                if end % 2
            }

    def cache_bytes(self, request_id: str) -> dict[str, Tensor]:
        """Everything a request wrote, uint8 on the host, by name.

        `window.L` (tokens, record bytes), `compressed.L` and `index_keys.L` (groups, record bytes);
        `ring.L` (bytes,), the open row, only if the request stopped at an odd number of tokens.
        """
        records = self._records.get(request_id, {})
        named = {name: torch.cat(parts) for name, parts in records.items()}
        return named | self._open_rows.get(request_id, {})

    def _add(self, request_id: str, name: str, records: Tensor) -> None:
        self._records.setdefault(request_id, {}).setdefault(name, []).append(records)


def _read(cache: Tensor, table: Sequence[int], start: int, end: int) -> Tensor:
    """Records `start` .. `end - 1` of a request on the host; `table` counts pages of the cache."""
    where = torch.arange(start, end)
    pages = torch.tensor(table)[where // cache.shape[1]]
    rows = where % cache.shape[1]
    return cache[pages.to(cache.device), rows.to(cache.device)].cpu()


def _bytes(row: Tensor) -> Tensor:
    return row.detach().cpu().clone().view(torch.uint8)
