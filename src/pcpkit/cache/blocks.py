"""Physical blocks: who holds which, which are free, and which of the free ones are worth keeping.

A block has a reference count: one reference for each block table that names it, and one for each
quarantine (work in flight that still reads or writes its bytes). At zero it is free. A free block
that is *cached* keeps its bytes and can be taken up again (`acquire`) until an allocation needs it.

The order of reuse is one queue: free blocks without cached bytes first, the last freed first, so a
small working set stays small; then cached ones, the least recently freed first. Blocks come back
last one first, so the tail of a request is evicted before its head: a prefix shrinks from its end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

NULL_BLOCK = -1
"""Entry of a block table without a block; never allocated, freed, acquired or counted."""


class OutOfBlocks(RuntimeError):
    """An allocation asked for more blocks than are free; nothing was allocated."""


def blocks_in(byte_budget: int, bytes_per_block: int) -> int:
    """Blocks that fit into a budget.

    Args:
        byte_budget: bytes that all blocks together may take.
        bytes_per_block: bytes of one block over all layers that share its id.

    Raises:
        ValueError: not even one block fits.

    Example:
        >>> blocks_in(1000, 300)
        3
    """
    if bytes_per_block < 1:
        raise ValueError(
            f"bytes_per_block expected >= 1, got {bytes_per_block}; sum the records of all layers"
        )
    if byte_budget < bytes_per_block:
        raise ValueError(
            f"byte_budget expected >= {bytes_per_block} (one block), got {byte_budget}; "
            "raise it or choose a smaller block_size"
        )
    return byte_budget // bytes_per_block


class BlockPool:
    """Reference counts and the free queue over block ids ``0 .. num_blocks - 1``.

    Every method checks its arguments before it changes anything. What it decides depends only on
    the calls so far, so pools that see the same calls agree on every rank.

    Example:
        >>> pool = BlockPool(3)
        >>> pool.allocate(2)
        [0, 1]
        >>> pool.mark_cached(0)  # its bytes are worth keeping
        >>> pool.free([0, 1])
        >>> pool.num_free, pool.num_cached_free
        (3, 1)
        >>> pool.allocate(2)  # the cached block goes last
        [1, 2]
        >>> pool.acquire([0])  # a later request has the same prefix
        >>> pool.num_free
        0
    """

    on_evict: Callable[[int], None] | None
    """Called with each cached block that `allocate` takes, before it is handed out; the block is
    not cached any more then. Must not raise and must not call `allocate`."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        """Start with every block free and none cached."""
        if num_blocks < 0:
            raise ValueError(f"num_blocks expected >= 0, got {num_blocks}; size the pool first")
        self.on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._cached = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: its end is the queue's head
        self._cached_free: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self._quarantines: dict[str, tuple[int, ...]] = {}
        self._num_quarantined: Counter[int] = Counter()  # quarantines of each block

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: nobody refers to them. Cached ones count."""
        return len(self._free) + len(self._cached_free)

    @property
    def num_cached_free(self) -> int:
        """Free blocks that are cached."""
        return len(self._cached_free)

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Names of the quarantines, the oldest first."""
        return tuple(self._quarantines)

    def ref_count(self, block: int) -> int:
        """References to `block`, quarantines included; 0 is free."""
        self._check_ids([block])
        return self._ref_counts[block]

    def is_cached(self, block: int) -> bool:
        """Whether the bytes of `block` are marked as worth keeping."""
        self._check_ids([block])
        return self._cached[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the free queue, one reference each.

        Raises:
            OutOfBlocks: fewer are free; none was taken or evicted.
            ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"count expected >= 0, got {count}; free() gives blocks back")
        if count > self.num_free:
            raise OutOfBlocks(
                f"blocks expected {count} free, got {self.num_free} of {self.num_blocks}; wait "
                "for a request to finish or enlarge the pool"
            )
        return [self._take_head() for _ in range(count)]

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block; a cached block that is free leaves the free queue.

        Raises:
            ValueError: an id is outside the pool or named twice, or a block is free and not cached
                (its bytes may be anything).
        """
        self._check_usable(blocks)
        for block in blocks:
            self._add_reference(block)

    def free(self, blocks: Sequence[int]) -> None:
        """Take one reference from each block, last one first.

        Raises:
            ValueError: an id is outside the pool or named twice, or nobody but a quarantine refers
                to the block; nothing was freed.
        """
        self._check_ids(blocks)
        for block in blocks:
            if self._ref_counts[block] <= self._num_quarantined[block]:
                raise ValueError(
                    f"blocks expected held blocks, got {block} of {list(blocks)}; free once, and "
                    "end a quarantine with release()"
                )
        self._drop_references(blocks)

    def mark_cached(self, block: int) -> None:
        """Keep the bytes of a held block when it becomes free.

        Raises:
            ValueError: the block is free or cached already.
        """
        self._check_ids([block])
        if not self._ref_counts[block] or self._cached[block]:
            state = "cached" if self._cached[block] else "free"
            raise ValueError(
                f"block expected held and not cached, got {state} block {block}; mark it once, "
                "after its bytes are written and before it is freed"
            )
        self._cached[block] = True

    def mark_uncached(self, block: int) -> None:
        """The bytes of a cached block are worth nothing any more; if free, it is reused first.

        Raises:
            ValueError: the block is not cached.
        """
        self._check_ids([block])
        if not self._cached[block]:
            raise ValueError(f"block expected cached, got {block}; mark_cached() comes first")
        self._cached[block] = False
        if block in self._cached_free:
            del self._cached_free[block]
            self._free.append(block)

    def quarantine(self, name: str, blocks: Sequence[int]) -> None:
        """Add one reference to each block on behalf of work in flight, until `release`.

        The blocks stay out of the free queue even when every request that held them has gone.

        Args:
            name: of the work; unique among the running ones.
            blocks: held ones, or cached ones that are free.

        Raises:
            ValueError: the name is in use, or a block as in `acquire`.
        """
        if name in self._quarantines:
            raise ValueError(f"name expected a new one, got {name!r}; release() it first")
        self._check_usable(blocks)
        for block in blocks:
            self._add_reference(block)
        self._num_quarantined.update(blocks)
        self._quarantines[name] = tuple(blocks)

    def release(self, name: str) -> None:
        """End a quarantine: its blocks lose one reference each, last one first.

        Raises:
            ValueError: there is no quarantine of this name.
        """
        if name not in self._quarantines:
            raise ValueError(
                f"name expected one of {list(self._quarantines)}, got {name!r}; release once"
            )
        blocks = self._quarantines.pop(name)
        self._num_quarantined -= Counter(blocks)
        self._drop_references(blocks)

    def check_invariants(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Assert that every block is free once or referred to.

        Args:
            tables: the blocks of every holder, NULL_BLOCK entries allowed. If given, they and the
                quarantines must be exactly the references.
        """
        stacked, queued = set(self._free), set(self._cached_free)
        assert len(stacked) == len(self._free), "a block is free twice"
        assert not stacked & queued, f"blocks {sorted(stacked & queued)} are free twice"
        for block, count in enumerate(self._ref_counts):
            is_free = block in stacked or block in queued
            assert count >= self._num_quarantined[block], f"block {block} lost a quarantine"
            assert (count == 0) == is_free, f"block {block}: {count} references, free: {is_free}"
            expected = queued if self._cached[block] else stacked
            assert not is_free or block in expected, f"block {block} is in the wrong free list"
        quarantined = Counter(block for held in self._quarantines.values() for block in held)
        assert quarantined == self._num_quarantined, "quarantines are miscounted"
        if tables is not None:
            held = Counter(block for table in tables for block in table if block != NULL_BLOCK)
            references = {block: n for block, n in enumerate(self._ref_counts) if n}
            assert held + quarantined == references, "references and holders disagree"

    def _check_ids(self, blocks: Sequence[int]) -> None:
        if len(set(blocks)) != len(blocks) or not all(
            0 <= block < self.num_blocks for block in blocks
        ):
            raise ValueError(
                f"blocks expected distinct ids in 0 .. {self.num_blocks - 1}, got {list(blocks)}; "
                "leave out NULL_BLOCK entries and name a block once"
            )

    def _check_usable(self, blocks: Sequence[int]) -> None:
        """Held, or free with its bytes kept."""
        self._check_ids(blocks)
        for block in blocks:
            if not self._ref_counts[block] and not self._cached[block]:
                raise ValueError(
                    f"blocks expected held or cached ones, got {block} of {list(blocks)}; look "
                    "the prefix up again"
                )

    def _take_head(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached_free.popitem(last=False)
            self._cached[block] = False
            if self.on_evict is not None:
                self.on_evict(block)
        self._ref_counts[block] = 1
        return block

    def _add_reference(self, block: int) -> None:
        if not self._ref_counts[block]:
            del self._cached_free[block]
        self._ref_counts[block] += 1

    def _drop_references(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                if self._cached[block]:
                    self._cached_free[block] = None
                else:
                    self._free.append(block)
