"""Runs a text model step by step for tests: requests, their blocks, and what the caches hold.

Slots are recomputed here from the block tables, apart from the planner, so a planner that writes to
the wrong slot cannot also read it back from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pcpkit.cache.pool import CachePool, allocate_pool
from pcpkit.config import CacheConfig, ModelConfig
from pcpkit.model.checkpoint import CheckpointReader
from pcpkit.model.decoder import Numerics, TextModel
from pcpkit.model.engram_tables import EngramHash, load_token_map
from pcpkit.model.weights import ModelWeights, load_weights
from pcpkit.plan.batch import BatchReplay, StepBatch
from pcpkit.plan.step import StepPlan, plan_step
from pcpkit.plan.trim import Trim
from pcpkit.testing.batches import PrefixHit

MAX_MODEL_LEN = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """What a checkpoint folder holds, in parts that a test may replace."""

    config: ModelConfig
    weights: ModelWeights
    engram: EngramHash | None
    numerics: Numerics = "released"

    def model(self) -> TextModel:
        return TextModel(
            self.config,
            self.weights,
            self.engram,
            max_model_len=MAX_MODEL_LEN,
            numerics=self.numerics,
        )


def load_checkpoint(folder: Path) -> Checkpoint:
    """Load the target model of a checkpoint folder the way a user does."""
    config = ModelConfig.from_file(folder)
    engram = None
    if config.engram_layer_ids:
        engram = EngramHash.from_config(config, load_token_map(folder))
    weights = load_weights(config, CheckpointReader(folder, config).stream())
    return Checkpoint(config=config, weights=weights, engram=engram)


@dataclass(slots=True, kw_only=True)
class Request:
    """One request: the ids computed so far and the blocks it may use (-1 = not mapped)."""

    blocks: list[int]
    window_blocks: list[int]
    ring_block: int = 0
    ids: list[int] = field(default_factory=list[int])
    hit: PrefixHit | None = None


def whole_pool(config: ModelConfig, cache: CacheConfig) -> tuple[CachePool, Request]:
    """A pool and one request that may use all of it, blocks in ascending order."""
    request = Request(
        blocks=list(range(cache.num_blocks)), window_blocks=list(range(cache.num_window_blocks))
    )
    return poisoned_pool(config, cache), request


def poisoned_pool(config: ModelConfig, cache: CacheConfig) -> CachePool:
    """A pool of 0xFF bytes: NaN in every record and in the ring, so a stale read cannot hide."""
    pool = allocate_pool(config, cache)
    for tensor in pool.tensors().values():
        tensor.view(torch.uint8).fill_(0xFF)
    return pool


def next_plan(
    config: ModelConfig,
    cache: CacheConfig,
    parts: Sequence[tuple[Request, Sequence[int]]],
    num_logits: Sequence[int] | None = None,
    trim: Trim | None = None,
) -> StepPlan:
    """Plan a step that appends ids to requests, in the given order; logits of every row by default.

    The requests count the ids as computed from here on. Block tables may have different widths.
    With a trim, all requests may be trimmed.
    """
    lengths = [len(ids) for _, ids in parts]
    back = config.engram_max_ngram_size - 1
    histories = [request.ids[::-1][:back] for request, _ in parts]
    batch = StepBatch(
        query_start_loc=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int(),
        num_computed_tokens=torch.tensor([len(r.ids) for r, _ in parts], dtype=torch.int32),
        is_prefilling=torch.ones(len(parts), dtype=torch.bool),
        token_ids=torch.tensor([token for _, ids in parts for token in ids]),
        lookback_token_ids=torch.tensor(
            [history + [-1] * (back - len(history)) for history in histories]
        ),
        block_table=_table([r.blocks for r, _ in parts]),
        window_block_table=_table([r.window_blocks for r, _ in parts]),
        ring_blocks=torch.tensor([r.ring_block for r, _ in parts], dtype=torch.int32),
        num_logits=torch.tensor(lengths if num_logits is None else num_logits, dtype=torch.int32),
        replay=_replay(config, [request for request, _ in parts]),
        may_trim=None if trim is None else torch.ones(len(parts), dtype=torch.bool),
    )
    for request, ids in parts:
        request.ids += ids
    ratios = sorted({config.compress_ratio(layer) for layer in config.kv_source_layer_ids})
    return plan_step(
        batch,
        ratios=tuple(ratios),
        block_size=cache.block_size,
        window_block_size=cache.window_block_size,
        ring_rows=cache.ring_rows,
        sliding_window=config.sliding_window,
        trim=trim,
    )


def _replay(config: ModelConfig, requests: Sequence[Request]) -> BatchReplay | None:
    if all(request.hit is None for request in requests):
        return None
    cold = PrefixHit(num_tokens=0, layer_starts=(0,) * config.num_hidden_layers)
    hits = [request.hit or cold for request in requests]
    return BatchReplay(
        num_cached_tokens=torch.tensor([hit.num_tokens for hit in hits], dtype=torch.int32),
        layer_starts=torch.tensor([hit.layer_starts for hit in hits], dtype=torch.int32),
    )


def _table(rows: Sequence[Sequence[int]]) -> Tensor:
    """Block ids padded with -1 to one width, int32."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.int32)


def window_rows(pool: CachePool, request: Request, layer: int, start: int, end: int) -> Tensor:
    """Window records of positions ``start .. end - 1``, uint8 ``(end - start, record_bytes)``."""
    return _paged(pool.window[layer], request.window_blocks, start, end)


def compressed_rows(pool: CachePool, request: Request, layer: int, start: int, end: int) -> Tensor:
    """Compressed records ``start .. end - 1`` of a KV source."""
    return _paged(pool.compressed[layer], request.blocks, start, end)


def index_rows(pool: CachePool, request: Request, layer: int, start: int, end: int) -> Tensor:
    """Index-key records ``start .. end - 1`` of a KV source."""
    return _paged(pool.index_keys[layer], request.blocks, start, end)


def open_row(pool: CachePool, request: Request, layer: int) -> Tensor | None:
    """The ring row of the request's unpaired last token, fp32; None after a whole pair.

    Other ring rows are left over from earlier steps, so they depend on where those ended.
    """
    if len(request.ids) % 2 == 0:
        return None
    ring = pool.ring[layer]
    return ring[request.ring_block, (len(request.ids) - 1) % ring.shape[1]].clone()


def _paged(cache: Tensor, blocks: Sequence[int], start: int, end: int) -> Tensor:
    where = torch.arange(start, end)
    pages = torch.tensor(blocks)[where // cache.shape[1]]
    assert bool((pages >= 0).all()), "the test reads a block that is not mapped"
    return cache[pages, where % cache.shape[1]]
