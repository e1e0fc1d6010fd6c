"""A model small enough for dozens of virtual ranks, in every layer mode, and runs of it.

Five layers: 0 window only, 1 Full and 2 Reuse at ratio 2 (1 also has the Engram), 3 Full with the
candidates and 4 Reindex at ratio 1. Window 8, four selected of at most eight candidates, so that
prompts of twenty tokens leave all of them behind.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pcpkit.cache.pool import CachePool, allocate_pool
from pcpkit.config import CacheConfig, ModelConfig, ParallelConfig
from pcpkit.model.checkpoint_schema import RankPosition, expected_tensors, rank_slice
from pcpkit.model.decoder import Numerics, TextModel
from pcpkit.model.engram_tables import EngramHash, engram_primes
from pcpkit.model.tiny_weights import draw_tensors
from pcpkit.model.weights import ModelWeights, load_weights
from pcpkit.parallel.groups import Groups
from pcpkit.parallel.tp import Reduce
from pcpkit.parallel.trace import Call, TracedGroup
from pcpkit.parallel.virtual import run_virtual_ranks
from pcpkit.plan.batch import StepBatch
from pcpkit.plan.partition import PartitionStrategy, dual_chunk_swap, make_partition
from pcpkit.plan.step import StepPlan, plan_step
from pcpkit.plan.trace import expected_trace
from pcpkit.plan.trim import Trim
from pcpkit.testing.batches import RaggedBatch, Steps
from pcpkit.testing.compare import assert_same_calls, bits

CONFIG_FILE = Path(__file__).parent.parent / "data" / "small-config.json"
VOCAB_SIZE = 64
WINDOW_SIZE = 8
MAX_MODEL_LEN = 128
LAYOUT = CacheConfig(
    num_blocks=1, num_window_blocks=1, num_requests=1, block_size=4, window_block_size=4
)
"""Blocks so small that a short prompt fills several; ``assemble_steps`` sets the counts."""
SINGLE = ParallelConfig()

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW_SIZE,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 4,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
    "engram_vocab_size": 20,
    # Three primes add up to an odd table height, which no TP size divides.
    "engram_n_heads": 1,
    "engram_head_dim": 64,
    "engram_compressed_vocab_size": 40,
    "num_nextn_predict_layers": 0,
    "dspark_target_layer_ids": [],
    "dspark_noise_token_id": VOCAB_SIZE - 1,
}
FIVE_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 5,
    "compress_ratios": [0, 2, 2, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3,
    "engram_layer_ids": [1],
}
RELEASED_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 40,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "engram_layer_ids": [1, 14],
}
"""The schedule of the release (model-spec 1.2)."""


class Micro:
    """A random model and the weights of all its ranks, each loaded once."""

    def __init__(self, layers: dict[str, Any], num_experts: int) -> None:
        document = json.loads(CONFIG_FILE.read_text(encoding="utf-8"))
        text = document["text_config"]
        text.update(_SIZES | layers, n_routed_experts=num_experts)
        primes = engram_primes(
            num_layers=len(text["engram_layer_ids"]),
            max_ngram_size=text["engram_max_ngram_size"],
            num_heads=text["engram_n_heads"],
            vocab_size=text["engram_vocab_size"],
        )
        text["engram_num_embeddings"] = [int(columns.sum()) for columns in primes]
        document["image_token_id"] = VOCAB_SIZE
        self.config = ModelConfig.from_dict(document)
        self.ratios = tuple(
            sorted({self.config.compress_ratio(one) for one in self.config.kv_source_layer_ids})
        )
        token_map = torch.arange(VOCAB_SIZE) % self.config.engram_compressed_vocab_size
        self._engram = EngramHash.from_config(self.config, token_map)
        self._specs = {n: s for n, s in expected_tensors(self.config).items() if s.is_read}
        self._tensors = draw_tensors(self._specs, seed=0)
        for name, (tensor, _) in self._tensors.items():
            if name.endswith("ffn.gate.bias"):
                # Rows choose among eight experts, evenly spread over the ranks: the reference
                # decodes the weights of every expert that is chosen at all.
                tensor[num_experts // 16 :: num_experts // 8] += 4
        self._loaded: dict[RankPosition, ModelWeights] = {}

    def prepare(self, parallel: ParallelConfig) -> None:
        """Load the weights of every rank, before threads want them."""
        parallel.validate(self.config)
        for rank in range(parallel.world_size):
            self._weights(_position(parallel, rank))

    def model(
        self,
        parallel: ParallelConfig,
        rank: int,
        groups: Groups,
        reduce: Reduce,
        numerics: Numerics,
    ) -> TextModel:
        return TextModel(
            self.config,
            self._weights(_position(parallel, rank)),
            self._engram,
            max_model_len=MAX_MODEL_LEN,
            numerics=numerics,
            groups=groups,
            reduce=reduce,
        )

    def plan(
        self,
        sizes: CacheConfig,
        batch: StepBatch,
        strategy: PartitionStrategy,
        size: int,
        rank: int,
        trim: Trim | None = None,
    ) -> StepPlan:
        partition = make_partition(
            batch.query_lens.tolist(), batch.is_prefilling.tolist(), size, strategy
        )
        return plan_step(
            batch,
            ratios=self.ratios,
            block_size=sizes.block_size,
            window_block_size=sizes.window_block_size,
            ring_rows=sizes.ring_rows,
            partition=partition,
            rank=rank,
            sliding_window=self.config.sliding_window,
            trim=trim,
        )

    def _weights(self, position: RankPosition) -> ModelWeights:
        if position not in self._loaded:
            count = self.config.n_routed_experts // position.ep_size
            self._loaded[position] = load_weights(
                self.config,
                self._stream(position),
                first_expert=position.ep_rank * count,
                num_local_experts=count,
            )
        return self._loaded[position]

    def _stream(self, position: RankPosition) -> Iterator[tuple[str, Tensor]]:
        for name, spec in self._specs.items():
            part = rank_slice(spec, position)
            if part is not None:
                columns = () if part.columns is None else (slice(*part.columns),)
                yield name, self._tensors[name][0][(slice(*part.rows), *columns)]


def _position(parallel: ParallelConfig, rank: int) -> RankPosition:
    return RankPosition(
        tp_rank=rank % parallel.tp_size,
        tp_size=parallel.tp_size,
        ep_rank=rank if parallel.expert_parallel else 0,
        ep_size=parallel.ep_size,
    )


@cache
def micro(num_experts: int = 24) -> Micro:
    """Five layers; 24 experts can be dealt to 1, 2, 3, 4, 6 or 8 ranks."""
    return Micro(FIVE_LAYERS, num_experts)


# --- runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRun:
    """What one rank computed and called, by step."""

    logits: list[Tensor] = field(default_factory=list[Tensor])
    digests: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """Of every cache tensor after the step."""
    caches: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """After the last step."""
    records: dict[int, dict[str, Tensor]] = field(default_factory=dict[int, dict[str, Tensor]])
    """By request that has ended: its records by name, from position 0 (-1 rows are unmapped)."""
    calls: list[list[Call]] = field(default_factory=list[list[Call]])
    """On groups of more than one rank."""
    plans: list[StepPlan] = field(default_factory=list[StepPlan])


def run_ranks(
    model: Micro,
    parallel: ParallelConfig,
    steps: Steps,
    strategies: Sequence[PartitionStrategy] = (dual_chunk_swap,),
    *,
    reduce: Reduce = "ordered",
    numerics: Numerics = "released",
    filler: int = 0xFF,
    trim: Trim | None = None,
) -> list[RankRun]:
    """Run the steps on virtual ranks, each with a pool full of poison.

    Step ``i`` is dealt by ``strategies[i % len(strategies)]``; ``filler`` is the byte of memory
    that nobody wrote, 0xFF is NaN in every record and in the ring.
    """
    model.prepare(parallel)

    def body(rank: int, groups: Groups) -> RankRun:
        calls: list[Call] = []
        traced = Groups(
            tp=TracedGroup(groups.tp, calls),
            pcp=TracedGroup(groups.pcp, calls),
            ep=TracedGroup(groups.ep, calls),
        )
        sizes = {group.name: group.size for group in (groups.tp, groups.pcp, groups.ep)}
        text_model = model.model(parallel, rank, traced, reduce, numerics)
        pool = allocate_pool(model.config, steps.cache)
        for tensor in pool.tensors().values():
            tensor.view(torch.uint8).fill_(filler)
        tenants, run = _Tenants(pool, filler, steps.cache.block_size), RankRun()
        for index, (rows, batch) in enumerate(zip(steps.rows, steps.batches, strict=True)):
            tenants.evict(rows, batch)
            strategy = strategies[index % len(strategies)]
            pcp = groups.pcp
            plan = model.plan(steps.cache, batch, strategy, parallel.pcp_size, pcp.rank, trim)
            run.logits.append(text_model.forward(plan, pool))
            run.digests.append({name: _digest(one) for name, one in pool.tensors().items()})
            run.calls.append([call for call in calls if sizes[call.group] > 1])
            calls.clear()
            run.plans.append(plan)
            later = {one.request for step in steps.rows[index + 1 :] for one in step.requests}
            for place, one in enumerate(rows.requests):
                if one.request not in later:
                    run.records[one.request] = request_records(
                        model.config, steps.cache, pool, batch, place
                    )
        run.caches.update(pool.tensors())
        return run

    return run_virtual_ranks(parallel, body, deadline_s=60)


def run_single(
    model: Micro, steps: Steps, *, numerics: Numerics = "released", trim: Trim | None = None
) -> RankRun:
    """The yardstick: one rank."""
    return run_ranks(model, SINGLE, steps, numerics=numerics, trim=trim)[0]


def assert_traces(
    model: Micro, parallel: ParallelConfig, steps: Steps, runs: Sequence[RankRun], reduce: Reduce
) -> None:
    """Every rank made the calls that its plan foretells, in step with its peers."""
    for step in range(len(steps.batches)):
        made = [run.calls[step] for run in runs]
        for calls, run in zip(made, runs, strict=True):
            planned = expected_trace(
                model.config,
                parallel,
                run.plans[step],
                compressed_record=steps.cache.compressed_format,
                reduce=reduce,
            )
            assert_same_calls([calls], planned)
        assert_in_step(parallel, made)


def assert_in_step(parallel: ParallelConfig, traces: Sequence[Sequence[Call]]) -> None:
    """The same ops on the same groups on all ranks, and equal shapes wherever ranks meet.

    Two TP groups have different rows, so only shapes of TP calls may differ between them.
    """
    order = [[(call.group, call.op) for call in calls] for calls in traces]
    assert all(one == order[0] for one in order)
    assert_same_calls([[call for call in calls if call.group == "pcp"] for calls in traces])
    for first in range(0, parallel.world_size, parallel.tp_size):
        assert_same_calls(traces[first : first + parallel.tp_size])


class _Tenants:
    """Poisons a block when it passes from one request to another, so that none reads its bytes."""

    def __init__(self, pool: CachePool, filler: int, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._filler = filler
        self._owners: dict[tuple[str, int], tuple[int, int]] = {}
        self._lives: dict[int, int] = {}

    def evict(self, rows: RaggedBatch, batch: StepBatch) -> None:
        pool = self._pool
        kinds = (
            ("window", batch.window_block_table, (pool.window,)),
            ("compressed", batch.block_table, (pool.compressed, pool.index_keys)),
            ("ring", batch.ring_blocks[:, None], (pool.ring,)),
        )
        for place, one in enumerate(rows.requests):
            if one.num_computed_tokens == 0:
                self._lives[one.request] = self._lives.get(one.request, 0) + 1
            owner = (one.request, self._lives.get(one.request, 0))
            for kind, table, stores in kinds:
                blocks = table[place].tolist()
                if one.hit is not None and one.hit.donor is not None and kind == "compressed":
                    # They come with content, which stays its donor's.
                    blocks = blocks[one.hit.num_tokens // self._block_size :]
                for block in blocks:
                    if block < 0 or self._owners.get((kind, block)) == owner:
                        continue
                    self._owners[kind, block] = owner
                    for tensor in (tensor for store in stores for tensor in store.values()):
                        tensor[block].view(torch.uint8).fill_(self._filler)


def _digest(tensor: Tensor) -> str:
    return hashlib.blake2b(bits(tensor).numpy().tobytes(), digest_size=8).hexdigest()


def request_records(
    config: ModelConfig, sizes: CacheConfig, pool: CachePool, batch: StepBatch, place: int
) -> dict[str, Tensor]:
    """What the caches hold of a request after a step, by name; slots are worked out here.

    Window rows whose block is gone are zero. The ring counts only if the last pair is open.
    """
    length, out = int(batch.seq_lens[place]), dict[str, Tensor]()
    for layer, store in pool.window.items():
        table = batch.window_block_table[place]
        out[f"window.{layer}"] = _paged(store, table, sizes.window_block_size, length)
    for layer in config.kv_source_layer_ids:
        ratio, table = config.compress_ratio(layer), batch.block_table[place]
        rows, count = sizes.block_size // ratio, length // ratio
        out[f"compressed.{layer}"] = _paged(pool.compressed[layer], table, rows, count)
        out[f"index_keys.{layer}"] = _paged(pool.index_keys[layer], table, rows, count)
    if length % 2:
        block = int(batch.ring_blocks[place])
        for layer, ring in pool.ring.items():
            out[f"ring.{layer}"] = ring[block, (length - 1) % sizes.ring_rows].clone()
    return out


def _paged(store: Tensor, table: Tensor, rows_per_page: int, count: int) -> Tensor:
    where = torch.arange(count)
    pages = table[where // rows_per_page].long()
    rows = store[pages.clamp(min=0), where % rows_per_page].clone()
    rows[pages < 0] = 0
    return rows
