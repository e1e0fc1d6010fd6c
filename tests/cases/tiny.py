"""TINY of the field scenarios, watched: window 8, blocks of 4, two layers, two heads.

Two models have these numbers: `real_model`, with the released arithmetic, and `flow_model`, whose
rows are hashes of all they read. `Watched` runs either in an engine and looks at every step:

- free blocks, rings and windows are full of 0x7F bytes (NaN in the real model), dealt ones, too,
  until they are written, so a stale read shows in the answer;
- no record changes but those of the step's own rows, none of them below a hit;
- what a window read was written by this very stay of this request, at this position;
- blocks in the prefix cache hold the tokens that their name says;
- no block changes hands during a forward, and no step with requests is empty;
- at the end every block is free again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor

from pcpkit.cache.blocks import NULL_BLOCK, BlockPool
from pcpkit.cache.pool import CachePool
from pcpkit.cache.prefix import HashPrefixCache, PrefixEvent, block_hashes
from pcpkit.cache.replay import ExactReplay, ReplayPolicy
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.config import ModelConfig
from pcpkit.engine import (
    CacheRecorder,
    Engine,
    EngineConfig,
    Request,
    RequestOutput,
    StepResult,
)
from pcpkit.engine.runner import ComputedStep
from pcpkit.model.checkpoint import expected_tensors
from pcpkit.model.decoder import TextModel
from pcpkit.model.tiny_weights import draw_tensors
from pcpkit.model.weights import load_weights
from pcpkit.plan.step import StepPlan
from pcpkit.testing.compare import same_bits
from tests.engine.dataflow_model import (
    MASK,
    NUM_GROUPS_READ,
    dataflow_config,
    dataflow_model,
)
from tests.engine.small_model import micro_document, random_prompt, request

WINDOW, BLOCK, POISON = 8, 4, 0x7F
RATIOS = (2, 1)
MAX_MODEL_LEN = 512
PageOrder = Literal["ascending", "descending", "shuffled"]


@cache
def flow_model() -> TextModel:
    """Data movement alone."""
    return dataflow_model(flow_config(), MAX_MODEL_LEN)


@cache
def flow_config() -> ModelConfig:
    return dataflow_config(sliding_window=WINDOW, compress_ratios=RATIOS)


@cache
def real_model() -> TextModel:
    """The released arithmetic in two layers, top-6."""
    document = micro_document()
    document["text_config"] |= {
        "num_hidden_layers": len(RATIOS),
        "compress_ratios": list(RATIOS),
        "sliding_window": WINDOW,
        "index_topk": 6,
    }
    config = ModelConfig.from_dict(document)
    specs = {n: s for n, s in expected_tensors(config).items() if s.section == "text"}
    stream = ((name, tensor) for name, (tensor, _) in draw_tensors(specs, seed=0).items())
    return TextModel(config, load_weights(config, stream), None, max_model_len=MAX_MODEL_LEN)


def ask(name: str, prompt: Sequence[int] | int, new: int = 1, **options: Any) -> Request:
    """A request; a number is a prompt of so many tokens, the first ones of one long text."""
    ids = TEXT[:prompt] if isinstance(prompt, int) else prompt
    options = {"ignore_eos": True, "logits": "last"} | options
    return request(name, ids, max_new_tokens=new, **options)


TEXT = random_prompt(MAX_MODEL_LEN, 0)


def other(length: int, seed: int) -> tuple[int, ...]:
    """Tokens that have nothing in common with `TEXT`."""
    return random_prompt(length, 1000 + seed)


def cold(model: TextModel, asked: Request) -> RequestOutput:
    """COLD: alone, in one step, nothing cached."""
    return cold_run(model, asked)[0]


def cold_run(model: TextModel, asked: Request) -> tuple[RequestOutput, CacheRecorder]:
    """The same, and what it wrote as request "cold"."""
    return _cold_run(model, replace(asked, request_id="cold", priority=0, cache_salt=""))


@cache
def _cold_run(model: TextModel, asked: Request) -> tuple[RequestOutput, CacheRecorder]:
    recorder = CacheRecorder(model.config)
    limits = EngineConfig(
        chunk_tokens=MAX_MODEL_LEN, max_requests=1, block_size=BLOCK, window_block_size=BLOCK
    )
    (output,) = Engine(model, limits, observe=recorder).generate([asked])
    return output, recorder


def assert_same(left: RequestOutput, right: RequestOutput) -> None:
    """The same tokens, and the same bits of the logits if both kept them."""
    assert left.token_ids == right.token_ids
    if left.logits is not None and right.logits is not None:
        assert same_bits(left.logits, right.logits)


def assert_cold(model: TextModel, outputs: Sequence[RequestOutput]) -> None:
    """Every answer is COLD, bit for bit."""
    for output in outputs:
        assert_same(output, cold(model, output.request))


class _WatchedModel:
    """As much of a model as an engine uses."""

    def __init__(self, model: TextModel, max_model_len: int) -> None:
        self._model = model
        self.config, self.max_model_len = model.config, max_model_len
        self.groups, self.device = model.groups, model.device
        self.plan: StepPlan | None = None
        self.before: dict[str, Tensor] = {}
        self.in_forward = False
        self.during: Callable[[], object] = lambda: None
        """Called in the middle of every forward."""

    def forward(self, plan: StepPlan, pool: CachePool) -> Tensor:
        self.plan = plan
        self.before = {name: tensor.clone() for name, tensor in pool.tensors().items()}
        self.in_forward = True
        try:
            self.during()
            return self._model.forward(plan, pool)
        finally:
            self.in_forward = False


class Watched:
    """An engine over TINY; see the module for what is checked after every step."""

    def __init__(
        self,
        model: TextModel,
        replay: ReplayPolicy | None = None,
        *,
        num_blocks: int = 128,
        chunk_tokens: int = 64,
        max_requests: int = 4,
        spare: int | None = None,
        snapshot_bytes: int = 10**6,
        num_window_blocks: int | None = None,
        max_model_len: int = MAX_MODEL_LEN,
        pages: PageOrder = "ascending",
    ) -> None:
        self.model = _WatchedModel(model, max_model_len)
        replay = ExactReplay() if replay is None else replay
        self.events: list[PrefixEvent] = []
        self.steps: list[ComputedStep] = []
        self.reads: list[dict[tuple[str, int], list[int]]] = []
        """By step: positions that each row (name, position) read in layer 0's window."""
        self.store = SnapshotStore(snapshot_bytes) if replay.uses_snapshots else None
        self.engine = Engine(
            cast(TextModel, self.model),
            EngineConfig(
                chunk_tokens=chunk_tokens,
                max_requests=max_requests,
                num_blocks=num_blocks,
                block_size=BLOCK,
                window_block_size=BLOCK,
                num_spare_blocks=spare,
            ),
            replay=replay,
            snapshots=self.store,
            observe=self._look,
            observe_prefix=self._note,
        )
        tables = self.engine._tables
        if num_window_blocks is not None:  # fewer than an engine takes by itself
            tables._window_blocks = BlockPool(num_window_blocks)
        self.blocks = tables.blocks
        self.pools = {
            "blocks": tables.blocks,
            "window": tables._window_blocks,
            "ring": tables._ring_blocks,
        }
        self.caches = self.engine._runner._pool
        self.recorder = CacheRecorder(model.config)
        self._written: dict[tuple[int, int], tuple[str, int, int]] = {}
        """Who wrote a window record last, by layer and slot: name, stay, position."""
        self._contents: dict[int, tuple[str, tuple[int, ...]]] = {}
        """What a block holds: salt and tokens up to its end."""
        for pool in self.pools.values():
            _order(pool, pages)
            self._guard(pool)

    # --- to drive it ----------------------------------------------------------------------------

    def submit(self, *asked: Request) -> None:
        for one in asked:
            self.engine.submit(one)

    def step(self, max_rows: int | None = None) -> StepResult:
        """One step, with everything that must hold before and after it."""
        self._poison_free()
        had_work = self.engine.has_work
        result = self.engine.step(max_rows)
        assert bool(result.num_prompt_rows + result.num_decode_rows) == had_work, "idle step"
        self.check()
        return result

    def run(self) -> list[RequestOutput]:
        """To the end, where nothing is held any more; results in the order they finished."""
        outputs: list[RequestOutput] = []
        while self.engine.has_work:
            outputs += self.step().finished
        self.assert_no_leak()
        return outputs

    def answer(self, asked: Request) -> RequestOutput:
        """One request, alone."""
        self.submit(asked)
        (output,) = self.run()
        return output

    def answer_beside(self, asked: Request) -> RequestOutput:
        """One request that ends while others go on."""
        self.submit(asked)
        while True:
            for output in self.step().finished:
                if output.request == asked:
                    return output

    # --- to look at it --------------------------------------------------------------------------

    def held(self, name: str) -> list[int]:
        """Compressed blocks of a running request."""
        return list(self.engine._states[name].tables.blocks)

    def window_blocks(self, name: str) -> list[int]:
        """Window blocks of a running request."""
        return list(self.engine._states[name].tables.live_window_blocks)

    def matched(self, tokens: Sequence[int], salt: str = "") -> int:
        """Tokens that a look-up finds, before any rule drops some."""
        hashes = block_hashes(tokens, BLOCK, salt)
        return BLOCK * len(self.prefix.match(hashes, exact_only=False).blocks)

    @property
    def prefix(self) -> HashPrefixCache:
        return cast(HashPrefixCache, self.engine._scheduler._reader._prefix)

    def bytes_of(self, blocks: Sequence[int]) -> list[Tensor]:
        """Compressed records and index keys."""
        caches = (*self.caches.compressed.values(), *self.caches.index_keys.values())
        return [tensor[list(blocks)].clone() for tensor in caches]

    def fill(self, blocks: Sequence[int], value: int) -> None:
        """What a transfer that is still under way may write at any time."""
        for tensor in (*self.caches.compressed.values(), *self.caches.index_keys.values()):
            tensor[list(blocks)] = value

    def rows(self) -> list[list[tuple[str, int, int]]]:
        """By step: name, first position and end of what ran."""
        return [
            list(
                zip(
                    step.request_ids,
                    step.batch.num_computed_tokens.tolist(),
                    step.batch.seq_lens.tolist(),
                    strict=True,
                )
            )
            for step in self.steps
        ]

    def check(self) -> None:
        """What must hold between steps."""
        self.engine.check_invariants()
        if self.engine._scheduler._reader._prefix is not None:
            indexed = self.prefix._hash_of
            known = {block: self._contents[block] for block in indexed if block in self._contents}
            assert known.keys() == indexed.keys(), "a block is published that nobody has filled"
            for block, (salt, tokens) in known.items():
                assert indexed[block] == block_hashes(tokens, BLOCK, salt)[-1], "another content"

    def assert_no_leak(self) -> None:
        """LEAK0."""
        assert not self.engine.has_work
        for name, pool in self.pools.items():
            assert pool.num_free == pool.num_blocks, f"{name} leaked"
        if self.store is not None:
            assert all(not entry.num_users for entry in self.store._entries.values())

    # --- what it does during a step -------------------------------------------------------------

    def _note(self, event: PrefixEvent) -> None:
        self.events.append(event)
        if event.kind == "evicted":
            del self._contents[event.block]
            self.fill([event.block], POISON)

    def _poison_free(self) -> None:
        caches = self.caches
        compressed = (*caches.compressed.values(), *caches.index_keys.values())
        for pool, tensors in (
            (self.pools["blocks"], compressed),
            (self.pools["window"], caches.window.values()),
            (self.pools["ring"], caches.ring.values()),
        ):
            free = [b for b in range(pool.num_blocks) if _is_worthless(pool, b)]
            for tensor in tensors:
                tensor.view(torch.uint8)[free] = POISON

    def _look(self, step: ComputedStep) -> None:
        self.steps.append(step)
        changed = {name: _records(tensor).clone() for name, tensor in step.pool.tensors().items()}
        for name, tensor in changed.items():
            before = _records(self.model.before[name])
            changed[name] = (tensor != before).any(dim=1)
        for index, name in enumerate(step.request_ids):
            self._look_at_request(step, index, name, changed)
        for name, flags in changed.items():
            assert not flags.any(), f"{name}: records {flags.nonzero()[:5, 0].tolist()} changed"
        self._look_at_reads(step)
        self.recorder(step)

    def _look_at_request(
        self, step: ComputedStep, index: int, name: str, changed: dict[str, Tensor]
    ) -> None:
        """Its own records may change (their flags are cleared); note what they are now."""
        state, batch = self.engine._states[name], step.batch
        assert state.stay is not None
        plan, config = state.stay.replay, self.model.config
        start, end = int(batch.num_computed_tokens[index]), int(batch.seq_lens[index])
        table = batch.block_table[index].tolist()
        for layer in config.kv_source_layer_ids:
            ratio = config.compress_ratio(layer)
            groups = range(max(start, plan.num_cached_tokens) // ratio, end // ratio)
            slots = [_slot(table, BLOCK // ratio, group) for group in groups]
            for kind in ("compressed", "index_keys"):
                changed[f"{kind}.{layer}"][slots] = False
        windows = batch.window_block_table[index].tolist()
        for layer, first in enumerate(plan.layer_starts):
            if state.stay.restore is not None:
                for position in range(first, plan.restore_at):
                    self._write(layer, windows, position, name, state.num_preemptions)
            for position in range(max(start, first), end):
                slot = self._write(layer, windows, position, name, state.num_preemptions)
                changed[f"window.{layer}"][slot] = False
        for layer in step.pool.ring:
            rows = step.pool.ring[layer].shape[1]
            own = int(batch.ring_blocks[index]) * rows
            changed[f"ring.{layer}"][own : own + rows] = False
        for place in range(max(plan.num_cached_tokens, start) // BLOCK, -(-end // BLOCK)):
            filled = (place + 1) * BLOCK
            self._contents.pop(table[place], None)
            if filled <= end:
                content = tuple(state.token_ids[:filled])
                self._contents[table[place]] = (state.request.cache_salt, content)

    def _write(self, layer: int, table: list[int], position: int, name: str, stay: int) -> int:
        slot = _slot(table, BLOCK, position)
        self._written[layer, slot] = (name, stay, position)
        return slot

    def _look_at_reads(self, step: ComputedStep) -> None:
        assert self.model.plan is not None
        self.reads.append({})
        tables = self.model.plan.window_block_table.tolist()
        for layer in range(self.model.config.num_hidden_layers):
            rows = self.model.plan.layer_rows(layer)
            for position, index, floor in zip(
                rows.positions.tolist(),
                rows.row_request.tolist(),
                rows.window_floor.tolist(),
                strict=True,
            ):
                name = step.request_ids[index]
                stay = self.engine._states[name].num_preemptions
                read = range(max(position - WINDOW + 1, floor, 0), position + 1)
                for one in read:
                    writer = self._written.get((layer, _slot(tables[index], BLOCK, one)))
                    assert writer == (name, stay, one), f"{name} at {position} reads {writer}"
                if layer == 0:
                    self.reads[-1][name, position] = list(read)

    def _guard(self, pool: BlockPool) -> None:
        """No block changes hands between the dispatch of a step and its end."""

        def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                assert not self.model.in_forward, f"{method.__name__} during a forward"
                return method(*arguments)

            return call

        for name in ("allocate", "acquire", "free", "mark_cached", "mark_uncached"):
            setattr(pool, name, guarded(getattr(pool, name)))


def _order(pool: BlockPool, pages: PageOrder) -> None:
    """PERM: which physical blocks are dealt first. The pool's stack starts with its last block."""
    if pages == "descending":
        pool._free.reverse()
    elif pages == "shuffled":
        order = torch.randperm(len(pool._free), generator=torch.Generator().manual_seed(3))
        pool._free[:] = [pool._free[index] for index in order.tolist()]


def _is_worthless(pool: BlockPool, block: int) -> bool:
    return pool.ref_count(block) == 0 and not pool.is_cached(block)


def _records(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, 1).view(torch.uint8)


def _slot(table: Sequence[int], size: int, place: int) -> int:
    block = table[place // size]
    assert block != NULL_BLOCK, f"record {place} has no block"
    return block * size + place % size


# --- REPLAYREF: a bounded replay of the flow model, without blocks, slots or steps ---------------


def replay_reference(prompt: Sequence[int], new: int, hit: int) -> tuple[int, ...]:
    """Tokens that a request samples behind a hit of `hit` tokens; 0 is a cold run."""
    groups: dict[tuple[int, int], int] = {}
    if hit:
        _run_rows(prompt[:hit], range(hit), 0, 0, groups, {})
    tokens, start = list(prompt), max(hit - WINDOW, 0)
    windows: dict[tuple[int, int], int] = {}
    inputs = range(start, len(tokens))
    for _ in range(new):
        value = _run_rows(tokens, inputs, start, hit, groups, windows)
        tokens.append(3 + value % (flow_config().vocab_size - 3))
        inputs = range(len(tokens) - 1, len(tokens))
    return tuple(tokens[len(prompt) :])


def _run_rows(
    tokens: Sequence[int],
    positions: range,
    floor: int,
    hit: int,
    groups: dict[tuple[int, int], int],
    windows: dict[tuple[int, int], int],
) -> int:
    """Rows in order, each through all layers; `groups` by (layer, group) and `windows` by (layer,
    position) are mutated. Window records are hashes of a row's value, which groups need, too."""
    config, value = flow_config(), 0
    for position in positions:
        newest_first = range(position, position - config.engram_max_ngram_size, -1)
        value = _hash(-1, *(tokens[p] if p >= 0 else -1 for p in newest_first))
        for layer, ratio in enumerate(RATIOS):
            windows[layer, position] = _hash(layer, value)
            windows[-1 - layer, position] = value
            if (position + 1) % ratio == 0 and position >= hit:
                members = range(position - ratio + 1, position + 1)
                group = _hash(layer, ratio, *(windows[-1 - layer, p] for p in members))
                groups[layer, position // ratio] = group
            low = max(position - WINDOW + 1, floor)
            read = [windows[layer, p] for p in range(low, position + 1)]
            visible = (position + 1) // ratio
            if visible:
                chosen = [value // k % visible for k in range(1, NUM_GROUPS_READ)]
                read += [groups[layer, group] for group in (visible - 1, *chosen)]
            value = _hash(layer, value, *read)
    return value


def _hash(*values: int) -> int:
    return hash(values) & MASK
