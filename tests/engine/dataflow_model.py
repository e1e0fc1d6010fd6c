"""A stand-in for the model that moves data as the real one does, and computes with hashes.

Every record is eight bytes that depend on all records its row reads: of the layer's window, of the
compressed groups it sees, of the ring. It executes the real `StepPlan` on the real `CachePool`, so
a wrong block, slot, floor or missing row changes the answer, at a fraction of a forward's time. It
runs on one rank. Logits are one-hot: the token is a hash of the last row.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from pcpkit.cache.pool import CachePool
from pcpkit.config import ModelConfig
from pcpkit.model.decoder import TextModel
from pcpkit.parallel.groups import single_rank
from pcpkit.plan.rows import LayerRows
from pcpkit.plan.step import StepPlan

from .small_model import small_document

MASK = (1 << 62) - 1
NUM_GROUPS_READ = 3
"""Compressed groups that a row reads: the newest, and some that its own value chooses."""


def dataflow_config(
    *, sliding_window: int = 4, compress_ratios: tuple[int, ...] = (0, 2, 1, 1)
) -> ModelConfig:
    """Few small layers; the first layer of each ratio is a source."""
    document = small_document()
    text = document["text_config"]
    sources = sorted(compress_ratios.index(ratio) for ratio in set(compress_ratios) - {0})
    ratio1 = compress_ratios.index(1)
    text |= {
        "num_hidden_layers": len(compress_ratios),
        "compress_ratios": list(compress_ratios),
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": sources,
        "candidate_source_layer_id": ratio1,
        "sliding_window": sliding_window,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "index_head_dim": 32,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
    }
    return ModelConfig.from_dict(document)


def dataflow_model(config: ModelConfig, max_model_len: int = 4096) -> TextModel:
    """For `Engine(...)`, which uses no more of a model than this one has."""
    return cast(TextModel, DataflowModel(config, max_model_len))


class DataflowModel:
    """See the module. `num_rows_run` counts rows summed over the layers."""

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.groups = single_rank()
        self.device = torch.device("cpu")
        self.num_rows_run = 0

    def forward(self, plan: StepPlan, pool: CachePool) -> Tensor:
        """One-hot logits of the wanted rows; writes the caches."""
        values = [_digest(-1, *window) for window in plan.token_windows.tolist()]
        for layer in range(self.config.num_hidden_layers):
            rows = plan.layer_rows(layer)
            # Layers that share one object run the same rows.
            if rows.kept is not None and (layer == 0 or plan.layer_rows(layer - 1) is not rows):
                values = [values[index] for index in rows.kept.tolist()]
            if not values:
                continue
            self.num_rows_run += len(values)
            values = self._layer(plan, pool, rows, layer, values)
        wanted = [values[index] for index in plan.logits.local_rows.tolist()]
        logits = torch.zeros(len(wanted), self.config.vocab_size)
        for row, value in enumerate(wanted):
            logits[row, 3 + value % (self.config.vocab_size - 3)] = 1.0
        return logits[plan.logits.restore_index]

    def _layer(
        self, plan: StepPlan, pool: CachePool, rows: LayerRows, layer: int, values: list[int]
    ) -> list[int]:
        window = _words(pool.window[layer])
        for slot, value in zip(rows.window_slots.tolist(), values, strict=True):
            window[slot] = _digest(layer, value)
        if self.config.is_kv_source(layer):
            self._write_groups(pool, rows, layer, values)
        source = self.config.kv_source(layer) if self.config.compress_ratio(layer) else None
        tables, window_tables = plan.block_table.tolist(), plan.window_block_table.tolist()
        size = pool.window[layer].shape[1]
        results: list[int] = []
        for value, position, request, floor in zip(
            values,
            rows.positions.tolist(),
            rows.row_request.tolist(),
            rows.window_floor.tolist(),
            strict=True,
        ):
            low = max(position - self.config.sliding_window + 1, floor, 0)
            read = [
                int(window[_slot(window_tables[request], size, p)])
                for p in range(low, position + 1)
            ]
            if source is not None:
                read += self._read_groups(pool, source, tables[request], position, value)
            results.append(_digest(layer, value, *read))
        return results

    def _write_groups(
        self, pool: CachePool, rows: LayerRows, layer: int, values: list[int]
    ) -> None:
        ratio = self.config.compress_ratio(layer)
        group, compressed = rows.groups[ratio], _words(pool.compressed[layer])
        closing, slots = group.closing_rows.tolist(), group.slots.tolist()
        if ratio == 1:
            for row, slot in zip(closing, slots, strict=True):
                compressed[slot] = _digest(layer, 1, values[row])
            return
        links, ring = rows.links, _words(pool.ring[layer])
        exchanged = [values[row] if row >= 0 else 0 for row in links.last_rows.tolist()]
        for row, slot, before in zip(closing, slots, links.predecessors.tolist(), strict=True):
            if before < len(values):
                first = values[before]
            elif before < len(values) + len(exchanged):
                first = exchanged[before - len(values)]
            else:
                first = int(ring[before - len(values) - len(exchanged)])
            compressed[slot] = _digest(layer, 2, first, values[row])
        for row, slot in zip(links.open_rows.tolist(), links.open_slots.tolist(), strict=True):
            ring[slot] = exchanged[row]

    def _read_groups(
        self, pool: CachePool, source: int, table: list[int], position: int, value: int
    ) -> list[int]:
        visible = (position + 1) // self.config.compress_ratio(source)
        if not visible:
            return []
        compressed, size = _words(pool.compressed[source]), pool.compressed[source].shape[1]
        chosen = [visible - 1, *(value // k % visible for k in range(1, NUM_GROUPS_READ))]
        return [int(compressed[_slot(table, size, group)]) for group in chosen]


def _slot(table: list[int], size: int, place: int) -> int:
    block = table[place // size]
    assert block >= 0, f"record {place} is read from a block that is not mapped"
    return block * size + place % size


def _words(cache: Tensor) -> np.ndarray:
    """The first eight bytes of every record, writable."""
    flat = cache.flatten(0, 1)
    raw = flat.numpy().view(np.uint8).reshape(flat.shape[0], -1)
    return np.ndarray((raw.shape[0],), np.int64, raw.data, strides=(raw.strides[0],))


def _digest(*values: int) -> int:
    # The same in every process: hashes of integers and of tuples of them are not randomized.
    return hash(values) & MASK
