"""A forward of hashes: all ranks of a step in one thread, each with its own plan and its own pool.

Every value is one 64-bit word that depends on all that the real layer reads: the row's value below,
its position and token window, the window records down to the floor, every visible compressed record
of the rank's pool, and what the experts return. Data moves as in `model/attention.py` and
`model/moe.py`; the plans are real. Six layers in the order of the release's kinds: window only,
Full and Reuse at ratio 2, then ratio 1, of which layer 3, the cut, is the last source.

What nobody wrote is a filler of its own on each rank of each run: padding, fresh blocks, blocks
that come from another request. A row that reads it differs from the same row of another run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pcpkit.config import CacheConfig
from pcpkit.plan.batch import StepBatch
from pcpkit.plan.partition import PartitionStrategy, make_partition
from pcpkit.plan.rows import LayerRows
from pcpkit.plan.step import StepPlan, plan_step
from pcpkit.plan.trim import Trim
from pcpkit.testing.batches import RaggedBatch, Steps

RATIOS = (0, 2, 2, 1, 1, 1)
"""By layer; 0 reads windows only."""
SOURCES = (1, 3)
CUT = 3
NUM_LAYERS = len(RATIOS)
WINDOW = 4

Words = NDArray[np.uint64]
_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
EXPERT, NO_EXPERT, PAIR, HIT = 101, 102, 103, 104


# --- words --------------------------------------------------------------------------------------


def mix(words: Words) -> Words:
    """A permutation of 64-bit words."""
    words = (words ^ (words >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    return words ^ (words >> np.uint64(29))


def combine(first: Words, *rest: Words | int) -> Words:
    """One word of several, elementwise; the order counts."""
    total = mix(first + np.uint64(_STEP))
    for part in rest:
        words = np.uint64(part & _MASK) if isinstance(part, int) else part
        total = mix(total * np.uint64(_STEP) + words)
    return total


def word(*parts: int) -> np.uint64:
    """The same of plain numbers."""
    first, *rest = parts
    return combine(np.array([first & _MASK], np.uint64), *rest)[0]


def fold(words: Words, present: NDArray[np.bool_]) -> Words:
    """``(num_rows, k)`` words to one a row; the column counts, and whether it is there."""
    columns = np.arange(words.shape[1], dtype=np.uint64)
    return np.where(present, combine(words, columns), np.uint64(0)).sum(axis=1, dtype=np.uint64)


def numbers(tensor: Tensor) -> NDArray[np.int64]:
    return tensor.numpy().astype(np.int64)


def unsigned(tensor: Tensor) -> Words:
    return numbers(tensor).astype(np.uint64)


# --- pools --------------------------------------------------------------------------------------


class Pools:
    """The caches of all ranks; the first axis of every array is the rank."""

    def __init__(self, cache: CacheConfig, size: int, salt: int) -> None:
        self.cache = cache
        self.fillers = np.array([word(salt, rank) for rank in range(size)])
        num_window = cache.num_window_blocks * cache.window_block_size
        self.window = self._fresh(num_window, NUM_LAYERS)
        self.compressed = {
            layer: self._fresh(cache.num_blocks * cache.block_size // RATIOS[layer])
            for layer in SOURCES
        }
        self.ring = {
            layer: self._fresh(cache.num_requests * cache.ring_rows)
            for layer in SOURCES
            if RATIOS[layer] == 2
        }
        self._owners: dict[tuple[str, int], tuple[int, int]] = {}
        self._lives: dict[int, int] = {}

    def _fresh(self, num_slots: int, *layers: int) -> Words:
        fillers = self.fillers.reshape(-1, *[1 for _ in layers], 1)
        return np.broadcast_to(fillers, (len(fillers), *layers, num_slots)).copy()

    def admit(self, rows: RaggedBatch, batch: StepBatch) -> None:
        """Poison blocks that change hands, and bring what a request took over."""
        cache = self.cache
        for place, one in enumerate(rows.requests):
            starts = one.num_computed_tokens == 0 or one.request not in self._lives
            if starts:
                self._lives[one.request] = self._lives.get(one.request, 0) + 1
            owner = (one.request, self._lives[one.request])
            fresh = self._taken("window", batch.window_block_table[place], owner)
            self._poison(self.window, fresh, cache.window_block_size)
            fresh = self._taken("ring", batch.ring_blocks[place, None], owner)
            for store in self.ring.values():
                self._poison(store, fresh, cache.ring_rows)
            table = batch.block_table[place]
            fresh = self._taken("compressed", table, owner)
            for layer, store in self.compressed.items():
                self._poison(store, fresh, cache.block_size // RATIOS[layer])
                if one.hit is not None and fresh:
                    self._bring_cached(layer, table, fresh, one.hit.num_tokens, one.request)
            if starts and one.hit is not None:
                table, computed = batch.window_block_table[place], one.num_computed_tokens
                for layer, start in enumerate(one.hit.layer_starts):
                    self._bring_window(layer, table, np.arange(start, computed), one.request)

    def _taken(self, kind: str, table: Tensor, owner: tuple[int, int]) -> list[int]:
        fresh = [b for b in table.tolist() if b >= 0 and self._owners.get((kind, b)) != owner]
        self._owners |= {(kind, block): owner for block in fresh}
        return fresh

    def _poison(self, store: Words, blocks: list[int], size: int) -> None:
        fillers = self.fillers.reshape(-1, *[1] * (store.ndim - 1))
        for block in blocks:
            store[..., block * size : (block + 1) * size] = fillers

    def _bring_cached(
        self, layer: int, table: Tensor, fresh: list[int], cached: int, request: int
    ) -> None:
        """Records of a hit, as their blocks are mapped."""
        size, blocks = self.cache.block_size // RATIOS[layer], table.tolist()
        for block in fresh:
            first = blocks.index(block) * size
            count = min(max(cached // RATIOS[layer] - first, 0), size)
            groups = np.arange(first, first + count, dtype=np.uint64)
            records = combine(groups, request, layer, HIT)
            self.compressed[layer][:, block * size : block * size + count] = records

    def _bring_window(
        self, layer: int, table: Tensor, where: NDArray[np.int64], request: int
    ) -> None:
        """Restored windows from the layer's start to the first row, where blocks are mapped."""
        slots = slots_of(table, self.cache.window_block_size, where)
        records = combine(where.astype(np.uint64), request, layer, HIT)
        self.window[:, layer, slots[slots >= 0]] = records[slots >= 0]

    def seen(self, store: Words) -> Words:
        """All ranks' words, 0 where nobody wrote."""
        return np.where(store == self.fillers[:, None], np.uint64(0), store)

    def stores(self, layer: int) -> list[tuple[str, Words]]:
        """What a layer may have written."""
        kinds = {"compressed": self.compressed, "ring": self.ring}
        owned = [(f"{kind}.{layer}", held[layer]) for kind, held in kinds.items() if layer in held]
        return [(f"window.{layer}", self.window[:, layer]), *owned]

    def assert_replicas(self, layer: int) -> None:
        """All ranks hold the same words of a layer, and wrote the same places (invariant 10)."""
        for name, store in self.stores(layer):
            seen = self.seen(store)
            assert bool((seen == seen[0]).all()), f"{name} differs between ranks"


def slots_of(table: Tensor, size: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Slot of each place of one request, -1 where no block is mapped."""
    blocks = numbers(table)[places // size]
    return np.where(blocks >= 0, blocks * size + places % size, -1)


# --- one run ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routed:
    """What the router sees in one layer of one step."""

    is_row: NDArray[np.bool_]
    """``(size, size * num_padded_rows)``, as each rank has it."""
    places: NDArray[np.int64]
    """Request and position of the gathered rows, ``(size * num_padded_rows, 2)``; -1 = padding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HashedRun:
    """By step."""

    logits: list[Words] = field(default_factory=list[Words])
    caches: list[dict[str, Words]] = field(default_factory=list[dict[str, Words]])
    """Every word of rank 0's pool after the step, by name; 0 = nobody wrote it."""
    routed: list[list[Routed]] = field(default_factory=list[list[Routed]])
    """By layer that ran."""


def run_hashed(
    steps: Steps,
    size: int,
    strategies: Sequence[PartitionStrategy],
    *,
    salt: int,
    trim: Trim | None = None,
    sliding_window: int | None = WINDOW,
) -> HashedRun:
    """Run the steps on ``size`` ranks; the pools of all are equal after every layer, or it fails.

    Step ``i`` is dealt by ``strategies[i % len(strategies)]``; ``salt`` makes the fillers.
    """
    pools, run = Pools(steps.cache, size, salt), HashedRun()
    for index, (rows, batch) in enumerate(zip(steps.rows, steps.batches, strict=True)):
        pools.admit(rows, batch)
        strategy = strategies[index % len(strategies)]
        partition = make_partition(rows.query_lens, rows.is_prefilling, size, strategy)
        plans = [
            plan_step(
                batch,
                ratios=(1, 2),
                block_size=steps.cache.block_size,
                window_block_size=steps.cache.window_block_size,
                ring_rows=steps.cache.ring_rows,
                partition=partition,
                rank=rank,
                sliding_window=sliding_window,
                trim=trim,
            )
            for rank in range(size)
        ]
        step = _Step(plans, pools, [one.request for one in rows.requests])
        run.logits.append(step.forward())
        run.routed.append(step.routed)
        run.caches.append(
            {
                name: pools.seen(store)[0]
                for layer in range(NUM_LAYERS)
                for name, store in pools.stores(layer)
            }
        )
    return run


def records_of(steps: Steps, run: HashedRun, index: int, place: int) -> dict[str, Words]:
    """What a request holds after a step, from position 0; 0 = nobody wrote it."""
    batch, cache, out = steps.batches[index], steps.cache, dict[str, Words]()
    length, ring = int(batch.seq_lens[place]), batch.ring_blocks[place, None]
    for name, words in run.caches[index].items():
        kind, layer = name.split(".")
        table, size, where = batch.window_block_table[place], cache.window_block_size, length
        if kind == "compressed":
            ratio = RATIOS[int(layer)]
            table, size, where = (
                batch.block_table[place],
                cache.block_size // ratio,
                length // ratio,
            )
        places = np.arange(where)
        if kind == "ring":
            table, size = ring, cache.ring_rows
            places = np.array([(length - 1) % size] if length % 2 else [], np.int64)
        slots = slots_of(table, size, places)
        out[name] = np.where(slots >= 0, words[slots], np.uint64(0))
    return out


class _Joined:
    """Rows of one layer on all ranks, one rank after the other, without padding."""

    def __init__(self, rows: list[LayerRows]) -> None:
        lens = [one.num_rows for one in rows]
        self.rows = rows
        self.firsts = np.cumsum([0, *lens])
        self.rank = np.repeat(np.arange(len(rows)), lens)
        self.request = np.concatenate([numbers(one.row_request) for one in rows])
        self.positions = np.concatenate([numbers(one.positions) for one in rows])
        self.floors = np.concatenate([numbers(one.window_floor) for one in rows])
        self.num_visible = {
            ratio: np.concatenate([numbers(one.num_visible(ratio)) for one in rows])
            for ratio in set(RATIOS) - {0}
        }
        self.window_slots = np.stack([one.window_slots.numpy() for one in rows])
        local = np.arange(len(self.rank)) - self.firsts[self.rank]
        self.gathered = self.rank * rows[0].num_padded_rows + local
        """Place of each row after an all-gather."""


class _Step:
    """One step on all ranks."""

    def __init__(self, plans: list[StepPlan], pools: Pools, requests: list[int]) -> None:
        self._plans = plans
        self._pools = pools
        self._requests = np.array(requests)
        self.routed: list[Routed] = []
        self._block_table = np.stack([numbers(plan.block_table) for plan in plans])
        self._window_table = np.stack([numbers(plan.window_block_table) for plan in plans])

    def forward(self) -> Words:
        """Hidden words of the rows that want logits, in batch order, alike on all ranks."""
        windows = np.concatenate([unsigned(plan.token_windows) for plan in self._plans])
        tokens = fold(windows, np.ones(windows.shape, np.bool_))
        values = combine(np.concatenate([unsigned(plan.token_ids) for plan in self._plans]))
        rows = [plan.layer_rows(0) for plan in self._plans]
        joined = None
        for layer in range(NUM_LAYERS):
            below, rows = rows, [plan.layer_rows(layer) for plan in self._plans]
            assert len({one.num_padded_rows for one in rows}) == 1, "the ranks part ways"
            if rows[0].num_padded_rows == 0:
                break
            firsts = np.cumsum([0, *(one.num_rows for one in below)])
            kept = [
                np.arange(one.num_rows) if one is low or one.kept is None else one.kept.numpy()
                for one, low in zip(rows, below, strict=True)
            ]
            picked = np.concatenate([one + first for one, first in zip(kept, firsts, strict=False)])
            values, tokens = values[picked], tokens[picked]
            if joined is None or any(one is not low for one, low in zip(rows, below, strict=True)):
                joined = _Joined(rows)
            values = self._layer(layer, joined, values, tokens)
            self._pools.assert_replicas(layer)
        return self._restored(values, [one.num_rows for one in rows])

    def _restored(self, values: Words, num_rows: list[int]) -> Words:
        wanted, parts = [plan.logits for plan in self._plans], split(values, num_rows)
        picked = [part[one.local_rows.numpy()] for part, one in zip(parts, wanted, strict=True)]
        gathered = self._gather(picked, [one.num_padded for one in wanted])
        results = np.stack([gathered[one.restore_index.numpy()] for one in wanted])
        assert bool((results == results[0]).all()), "logits differ between ranks"
        return results[0]

    def _gather(self, parts: Sequence[Words], num_padded: list[int]) -> Words:
        """Rank-major words; padding is the filler of its rank, for nobody may look at it."""
        assert len(set(num_padded)) == 1, "shapes differ between ranks"
        out = np.repeat(self._pools.fillers, num_padded[0])
        for rank, part in enumerate(parts):
            assert len(part) <= num_padded[0]
            out[rank * num_padded[0] : rank * num_padded[0] + len(part)] = part
        return out

    def _gather_rows(self, rows: _Joined, words: Words) -> Words:
        out = np.repeat(self._pools.fillers, rows.rows[0].num_padded_rows)
        out[rows.gathered] = words
        return out

    def _layer(self, layer: int, rows: _Joined, values: Words, tokens: Words) -> Words:
        raw = combine(values, rows.positions.astype(np.uint64), layer)
        window = self._pools.window[:, layer]
        scatter(window, self._gather_rows(rows, raw), rows.window_slots)
        if layer in SOURCES:
            self._write_compressed(layer, rows, raw)
        where = rows.positions[:, None] - np.arange(WINDOW)
        present = where >= np.maximum(rows.floors, 0)[:, None]
        size = self._pools.cache.window_block_size
        read = fold(self._read(window, self._window_table, size, rows, where), present)
        return self._experts(
            rows, combine(values, tokens, read, self._read_compressed(layer, rows), layer)
        )

    def _write_compressed(self, layer: int, rows: _Joined, raw: Words) -> None:
        groups = [one.groups[RATIOS[layer]] for one in rows.rows]
        closing = [
            group.closing_rows.numpy() + first
            for group, first in zip(groups, rows.firsts, strict=False)
        ]
        latents = raw[np.concatenate(closing)]
        if layer in self._pools.ring:
            latents = combine(self._predecessors(layer, rows, raw), latents, PAIR)
        positions = np.concatenate([unsigned(group.positions) for group in groups])
        parts = split(combine(latents, positions), [len(one) for one in closing])
        gathered = self._gather(parts, [group.num_padded for group in groups])
        slots = np.stack([group.slots.numpy() for group in groups])
        scatter(self._pools.compressed[layer], gathered, slots)

    def _predecessors(self, layer: int, rows: _Joined, raw: Words) -> Words:
        """As `close_and_write_ring`: the ring is read as it was before the step."""
        links, ring = [one.links for one in rows.rows], self._pools.ring[layer]
        local = split(raw, [one.num_rows for one in rows.rows])
        sent: list[Words] = []
        for part, link, filler in zip(local, links, self._pools.fillers, strict=True):
            last = link.last_rows.numpy()
            sent.append(np.full(len(last), filler))
            sent[-1][last >= 0] = part[last[last >= 0]]
        exchanged = self._gather(sent, [len(one) for one in sent])
        before = [
            np.concatenate([part, exchanged, store])[link.predecessors.numpy()]
            for part, store, link in zip(local, ring, links, strict=True)
        ]
        for store, link in zip(ring, links, strict=True):
            store[link.open_slots.numpy()] = exchanged[link.open_rows.numpy()]
        return np.concatenate(before)

    def _read_compressed(self, layer: int, rows: _Joined) -> Words | int:
        ratio = RATIOS[layer]
        if ratio == 0:
            return 0
        store = self._pools.compressed[max(one for one in SOURCES if one <= layer)]
        longest = np.array([one.max_visible(ratio) for one in rows.rows])
        where = np.broadcast_to(np.arange(longest.max()), (len(rows.rank), longest.max()))
        visible = np.minimum(rows.num_visible[ratio], longest[rows.rank])
        present = where < visible[:, None]
        size = self._pools.cache.block_size // ratio
        return fold(self._read(store, self._block_table, size, rows, where), present)

    def _read(
        self,
        store: Words,
        tables: NDArray[np.int64],
        size: int,
        rows: _Joined,
        where: NDArray[np.int64],
    ) -> Words:
        """Records of the rows' own requests in their ranks' pools; fillers where none is mapped."""
        index, rank = where // size, rows.rank[:, None]
        known = (index >= 0) & (index < tables.shape[2])
        blocks = tables[rank, rows.request[:, None], np.where(known, index, 0)]
        words = store[rank, np.maximum(blocks, 0) * size + where % size]
        return np.where(known & (blocks >= 0), words, self._pools.fillers[rank])

    def _experts(self, rows: _Joined, attended: Words) -> Words:
        """Each owner gets back what the experts make of its rows; one rank alone masks nothing."""
        gathered, is_row = self._gather_rows(rows, attended), rows.window_slots >= 0
        places = np.full((len(gathered), 2), -1)
        places[rows.gathered, 0] = self._requests[rows.request]
        places[rows.gathered, 1] = rows.positions
        self.routed.append(Routed(is_row=is_row, places=places))
        seen = is_row if len(rows.rows) > 1 else np.ones_like(is_row)
        outputs = np.where(seen, combine(gathered, EXPERT), np.uint64(NO_EXPERT))
        return combine(attended, outputs[rows.rank, rows.gathered])


def split(words: Words, lens: Sequence[int]) -> list[Words]:
    """Consecutive parts."""
    return np.split(words, np.cumsum(lens)[:-1])


def scatter(store: Words, gathered: Words, slots: NDArray[np.int64]) -> None:
    """The same words into every rank's pool, each by its own slots; -1 writes nothing."""
    assert slots.shape[1] == len(gathered)
    rank, place = (slots >= 0).nonzero()
    store[rank, slots[rank, place]] = gathered[place]
