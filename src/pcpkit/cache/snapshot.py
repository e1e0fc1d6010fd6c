"""Copies of the window records before the end of a prefix, so that a hit need not replay.

An entry holds the records of positions [max(H - W + 1, 0), H) of every layer, as one tensor
``(num_layers, num_rows, record_bytes)``. Its key is the block hash at H, which names the tokens; so
it stays valid whatever happens to the blocks. Store only what an exact run computed.

Entries leave in order of last use when the byte budget needs it, acquired ones never. What is kept
depends only on the calls, not on devices or time: stores of all ranks agree, and each holds its
own rank's bytes (window KV is replicated over TP and PCP).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcpkit.cache.pool import CachePool
from pcpkit.kernels.record_move import gather_records, scatter_records


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlace:
    """Where the window records of an entry lie in the caches, or are to lie."""

    key: bytes
    """Block hash of the prefix that ends at ``num_tokens``."""
    window_blocks: Sequence[int]
    """A request's row of the window block table, by logical block."""
    num_tokens: int
    """H, the end of the prefix."""


@dataclass(slots=True, eq=False)
class _Entry:
    """`records` as in the module docstring, of `positions`; `num_users` keep it from eviction."""

    records: Tensor
    positions: range
    num_users: int


class SnapshotStore:
    """Window records by block hash, least recently used first out.

    Args:
        byte_budget: bytes of all entries together.
        pinned_host: keep entries in page-locked host memory instead of on the pool's device. A pool
            on the CPU is in host memory as it is.

    Raises:
        ValueError: the budget is negative.

    Example:
        >>> record = torch.arange(4, dtype=torch.uint8).reshape(1, 4, 1)  # block 0, positions 0..3
        >>> pool = CachePool(window={0: torch.cat([record, 0 * record])}, compressed={},
        ...                  index_keys={}, ring={}, compressed_record="nvfp4")
        >>> store = SnapshotStore(1024)
        >>> place = SnapshotPlace(key=b"key", window_blocks=[0], num_tokens=4)
        >>> store.capture([place], pool, sliding_window=3)
        [True]
        >>> store.num_bytes  # two records of one byte: positions 2 and 3
        2
        >>> place = SnapshotPlace(key=b"key", window_blocks=[1], num_tokens=4)
        >>> store.restore([place], pool, sliding_window=3)
        >>> pool.window[0][1].flatten().tolist()
        [0, 0, 2, 3]
    """

    def __init__(self, byte_budget: int, *, pinned_host: bool = False) -> None:
        if byte_budget < 0:
            raise ValueError(f"byte_budget expected >= 0, got {byte_budget}; 0 stores nothing")
        self._byte_budget = byte_budget
        self._pinned_host = pinned_host
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._num_bytes = 0
        self._num_evictions = 0
        self._num_refused = 0
        self._is_too_small = False

    def __contains__(self, key: bytes) -> bool:
        """Whether `key` is stored; not a use."""
        return key in self._entries

    def __len__(self) -> int:
        """Entries."""
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return self._num_bytes

    @property
    def num_evictions(self) -> int:
        """Entries that made room for others."""
        return self._num_evictions

    @property
    def num_refused(self) -> int:
        """Captures for which there was no room, even without all entries that may leave."""
        return self._num_refused

    @property
    def is_too_small(self) -> bool:
        """Whether a capture was refused that is larger than the whole budget."""
        return self._is_too_small

    def capture(
        self, places: Sequence[SnapshotPlace], pool: CachePool, *, sliding_window: int
    ) -> list[bool]:
        """Copy the window records before the end of some prefixes, with few launches for all.

        A key that is stored already is only marked as used: equal keys mean equal bytes. Those are
        marked first, and what is stored by one call is not evicted by it.

        Args:
            places: rows below their ends have been computed, exactly. A key may stand twice.
            pool: the caches of this rank; every layer's window is read.
            sliding_window: W, tokens a row sees, its own included.

        Returns:
            Of each, whether its key is stored now. False if it does not fit beside the acquired
            entries: counted in `num_refused`, nothing evicted for it.

        Raises:
            ValueError: a block that is needed is not mapped, or a size is out of range; nothing was
                stored.
        """
        spans = [_positions(place.num_tokens, sliding_window) for place in places]
        slots = [
            _window_slots(pool, place.window_blocks, span)
            for place, span in zip(places, spans, strict=True)
        ]
        for place in places:
            if place.key in self._entries:
                self._entries.move_to_end(place.key)
        taken: dict[bytes, int] = {}
        num_bytes = 0
        for index, place in enumerate(places):
            if place.key in self._entries or place.key in taken:
                continue
            more = _num_layer_bytes(pool) * len(spans[index])
            if self._make_room(num_bytes + more):
                taken[place.key] = index
                num_bytes += more
            else:
                self._num_refused += 1
                self._is_too_small |= more > self._byte_budget
        copies = self._copies(pool, [slots[index] for index in taken.values()])
        for (key, index), records in zip(taken.items(), copies, strict=True):
            self._entries[key] = _Entry(records, spans[index], 0)
            self._num_bytes += records.nbytes
        return [place.key in self._entries for place in places]

    def restore(
        self, places: Sequence[SnapshotPlace], pool: CachePool, *, sliding_window: int
    ) -> None:
        """Write the records of entries into the window blocks of requests; a use of each entry.

        Args:
            places: of stored keys, and of requests that share no window block; the blocks of
                positions [max(H - W + 1, 0), H) are private to them. A key may stand twice.
            pool: the caches of this rank; ``pool.window`` is mutated.
            sliding_window: as in `capture`.

        Raises:
            ValueError: a key is not stored, an entry holds other positions or fits another pool, or
                as in `capture`; nothing was written.
        """
        if not places:
            return
        slots = [slot for place in places for slot in self._slots_of(place, pool, sliding_window)]
        device = _device(pool)
        records = [self._entries[one.key].records.to(device, non_blocking=True) for one in places]
        for place in places:
            self._entries.move_to_end(place.key)
        together = records[0] if len(records) == 1 else torch.cat(records, dim=1)
        on_device = _uploaded(slots, device)
        for index, layer in enumerate(sorted(pool.window)):
            scatter_records(together[index], on_device, pool.window[layer])

    def acquire(self, key: bytes) -> None:
        """Keep an entry until `release`, from the decision to restore it on; a use of it.

        Raises:
            ValueError: the key is not stored.
        """
        self._entry(key).num_users += 1
        self._entries.move_to_end(key)

    def release(self, key: bytes) -> None:
        """Undo one `acquire`.

        Raises:
            ValueError: the key is not stored or not acquired.
        """
        entry = self._entry(key)
        if not entry.num_users:
            raise ValueError(f"key expected an acquired one, got {key.hex()}; release once")
        entry.num_users -= 1

    def check_invariants(self) -> None:
        """Assert that the bytes are counted right and within the budget."""
        total = sum(entry.records.nbytes for entry in self._entries.values())
        assert total == self._num_bytes, f"{total} bytes stored, {self._num_bytes} counted"
        assert total <= self._byte_budget, f"{total} bytes stored, budget {self._byte_budget}"
        assert all(entry.num_users >= 0 for entry in self._entries.values()), "released too often"

    def _copies(self, pool: CachePool, slots: Sequence[list[int]]) -> list[Tensor]:
        """The records of each list of slots, all layers, where entries are kept."""
        if not slots:
            return []
        on_device = _uploaded([slot for its in slots for slot in its], _device(pool))
        records = torch.stack(
            [gather_records(pool.window[layer], on_device) for layer in sorted(pool.window)]
        )
        # Each in memory of its own, since it may leave before the others.
        parts = [
            part.clone(memory_format=torch.contiguous_format)
            for part in records.split([len(its) for its in slots], dim=1)
        ]
        if not self._pinned_host or not records.is_cuda:
            return parts
        # Ordered by the stream, and the host allocator waits for a copy before any reuse.
        return [
            torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(
                part, non_blocking=True
            )
            for part in parts
        ]

    def _slots_of(self, place: SnapshotPlace, pool: CachePool, sliding_window: int) -> list[int]:
        """Slots that the records of an entry go to, if it is one of these positions."""
        entry = self._entry(place.key)
        positions = _positions(place.num_tokens, sliding_window)
        if entry.positions != positions:
            raise ValueError(
                f"key expected an entry of positions {positions.start} .. {positions.stop - 1}, "
                f"got {entry.positions.start} .. {entry.positions.stop - 1}; "
                "take the key from the hash of the last adopted block"
            )
        slots = _window_slots(pool, place.window_blocks, positions)
        expected = (len(pool.window), len(positions), pool.window[min(pool.window)].shape[2])
        if entry.records.shape != expected:
            raise ValueError(
                f"pool expected the (layers, rows, bytes) {tuple(entry.records.shape)} of the "
                f"entry, got {expected}; use one store for one model"
            )
        return slots

    def _entry(self, key: bytes) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise ValueError(f"key expected a stored one, got {key.hex()}; ask `key in store`")
        return entry

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until `num_bytes` fit; evict nothing if they cannot."""
        unused = [key for key, entry in self._entries.items() if not entry.num_users]
        evictable = sum(self._entries[key].records.nbytes for key in unused)
        if self._num_bytes - evictable + num_bytes > self._byte_budget:
            return False
        for key in unused:
            if self._num_bytes + num_bytes <= self._byte_budget:
                break
            self._num_bytes -= self._entries.pop(key).records.nbytes
            self._num_evictions += 1
        return True


def _device(pool: CachePool) -> torch.device:
    return pool.window[min(pool.window)].device


def _num_layer_bytes(pool: CachePool) -> int:
    """Bytes of one position's records in all layers."""
    return sum(window.shape[2] for window in pool.window.values())


def _positions(num_tokens: int, sliding_window: int) -> range:
    """Positions below `num_tokens` that the row at `num_tokens` reads."""
    if num_tokens < 1 or sliding_window < 1:
        raise ValueError(
            f"num_tokens and sliding_window expected >= 1, got {num_tokens} and {sliding_window}; "
            "a cold request has no snapshot"
        )
    return range(max(num_tokens - sliding_window + 1, 0), num_tokens)


def _uploaded(slots: list[int], device: torch.device) -> Tensor:
    """int64 on the device. From page-locked memory, so that no step is waited for."""
    on_host = torch.tensor(slots, dtype=torch.int64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def _window_slots(pool: CachePool, window_blocks: Sequence[int], positions: range) -> list[int]:
    num_blocks, block_size, _ = pool.window[min(pool.window)].shape
    needed = sorted({position // block_size for position in positions})
    if needed and (
        needed[-1] >= len(window_blocks)
        or not all(0 <= window_blocks[index] < num_blocks for index in needed)
    ):
        raise ValueError(
            f"window_blocks expected blocks in 0 .. {num_blocks - 1} at {needed}, "
            f"got {list(window_blocks)}; map them first, and retire them later"
        )
    return [
        window_blocks[position // block_size] * block_size + position % block_size
        for position in positions
    ]
