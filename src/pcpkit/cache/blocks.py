"""Physical blocks: who holds which, and which are free.

A free list hands out the blocks that were freed longest ago last, so a small working set stays
small; blocks come back in reverse order, the tail of a request first.
"""

from __future__ import annotations

from collections.abc import Sequence


class OutOfBlocks(RuntimeError):
    """An allocation asked for more blocks than are free; nothing was allocated."""


class BlockAllocator:
    """Free list over ``num_blocks`` block ids ``0 .. num_blocks - 1``.

    Example:
        >>> blocks = BlockAllocator(3)
        >>> blocks.allocate(2)
        [0, 1]
        >>> blocks.free([0, 1])
        >>> blocks.allocate(1)
        [0]
    """

    def __init__(self, num_blocks: int) -> None:
        """Start with every block free."""
        if num_blocks < 0:
            raise ValueError(f"num_blocks expected >= 0, got {num_blocks}; size the pool first")
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held = [False] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return len(self._held)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks.

        Raises:
            OutOfBlocks: fewer are free; none was taken.
        """
        if count > len(self._free):
            raise OutOfBlocks(
                f"blocks expected {count} free, got {len(self._free)} of {len(self._held)}; wait "
                "for a request to finish or enlarge the pool"
            )
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._held[block] = True
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back, last one first.

        Raises:
            ValueError: a block is not held, or is named twice; nothing was freed.
        """
        if len(set(blocks)) != len(blocks) or not all(
            0 <= block < len(self._held) and self._held[block] for block in blocks
        ):
            raise ValueError(f"blocks expected distinct held ids, got {list(blocks)}; free once")
        for block in reversed(blocks):
            self._held[block] = False
            self._free.append(block)

    def check_invariants(self) -> None:
        """Assert that every block is either free once or held."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        held = {block for block, flag in enumerate(self._held) if flag}
        assert not free & held, f"blocks {sorted(free & held)} are both free and held"
        assert len(free) + len(held) == len(self._held), "a block is lost"
