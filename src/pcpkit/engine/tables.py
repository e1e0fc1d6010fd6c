"""Block tables of the running requests: which physical blocks hold which positions.

A request holds three kinds of storage (docs/cache-layout.md):

- compressed blocks for every token it has computed. All it can ever need are promised when it is
  admitted and taken one by one, so a running request never waits for a block;
- window blocks for the tokens that its next rows can still read. A block that lies wholly below
  the window of the next token is given back, so the number held is O(window + chunk);
- one ring block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pcpkit.cache.blocks import BlockAllocator
from pcpkit.config import CacheConfig

NO_BLOCK = -1
"""Entry of a block table without a block: retired or never mapped."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestTables:
    """Physical blocks of one running request, indexed by logical block; `CacheTables` mutates it.

    `num_promised_blocks` counts the compressed blocks it may hold at its longest, and
    `num_retired` the leading window blocks that were given back (their entries are NO_BLOCK).
    """

    ring_block: int
    num_promised_blocks: int
    blocks: list[int]
    window_blocks: list[int]
    num_retired: int

    @property
    def live_window_blocks(self) -> list[int]:
        """Window blocks that are held."""
        return self.window_blocks[self.num_retired :]


class CacheTables:
    """Deals blocks to requests and takes them back.

    Args:
        cache: sizes of the pools.
        sliding_window: tokens a row sees in the window, its own included.
    """

    def __init__(self, cache: CacheConfig, sliding_window: int) -> None:
        self._cache = cache
        self._sliding_window = sliding_window
        self._blocks = BlockAllocator(cache.num_blocks)
        self._window_blocks = BlockAllocator(cache.num_window_blocks)
        self._ring_blocks = BlockAllocator(cache.num_requests)
        self._num_promised = 0

    @property
    def num_free_blocks(self) -> int:
        """Compressed blocks that nobody holds."""
        return self._blocks.num_free

    @property
    def num_free_window_blocks(self) -> int:
        """Window blocks that nobody holds."""
        return self._window_blocks.num_free

    def num_blocks(self, num_tokens: int) -> int:
        """Compressed blocks of a request of `num_tokens` tokens."""
        return -(-num_tokens // self._cache.block_size)

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of at most `num_tokens` tokens can be opened now."""
        promised = self._num_promised + self.num_blocks(num_tokens)
        return promised <= self._cache.num_blocks and self._ring_blocks.num_free > 0

    def open(self, num_tokens: int) -> RequestTables:
        """Empty tables for a request of at most `num_tokens` tokens; call `fits` first."""
        assert self.fits(num_tokens), "open() without room"
        promised = self.num_blocks(num_tokens)
        self._num_promised += promised
        return RequestTables(
            ring_block=self._ring_blocks.allocate(1)[0],
            num_promised_blocks=promised,
            blocks=[],
            window_blocks=[],
            num_retired=0,
        )

    def extend(self, tables: RequestTables, num_tokens: int) -> None:
        """Map blocks up to `num_tokens` tokens, before the step that computes them."""
        missing = self.num_blocks(num_tokens) - len(tables.blocks)
        assert len(tables.blocks) + missing <= tables.num_promised_blocks, "more than promised"
        tables.blocks += self._blocks.allocate(max(missing, 0))
        missing = -(-num_tokens // self._cache.window_block_size) - len(tables.window_blocks)
        tables.window_blocks += self._window_blocks.allocate(max(missing, 0))

    def retire(self, tables: RequestTables, num_computed_tokens: int) -> None:
        """Give back the window blocks that no row from `num_computed_tokens` on can read."""
        lowest_read = max(num_computed_tokens - self._sliding_window + 1, 0)
        retired = lowest_read // self._cache.window_block_size
        start = tables.num_retired
        self._window_blocks.free(tables.window_blocks[start:retired])
        tables.window_blocks[start:retired] = [NO_BLOCK] * (retired - start)
        tables.num_retired = retired

    def close(self, tables: RequestTables) -> None:
        """Take back everything, the newest blocks first; the tables must not be used again."""
        self._window_blocks.free(tables.live_window_blocks)
        self._blocks.free(tables.blocks)
        self._ring_blocks.free([tables.ring_block])
        self._num_promised -= tables.num_promised_blocks
        tables.blocks, tables.window_blocks, tables.num_retired = [], [], 0

    def check_invariants(self, running: Iterable[RequestTables]) -> None:
        """Assert that `running` hold exactly the blocks that are not free, each once."""
        tables = list(running)
        held = [
            (self._blocks, [block for table in tables for block in table.blocks]),
            (self._window_blocks, [b for table in tables for b in table.live_window_blocks]),
            (self._ring_blocks, [table.ring_block for table in tables]),
        ]
        for allocator, blocks in held:
            allocator.check_invariants()
            assert len(set(blocks)) == len(blocks), f"a block has two owners: {sorted(blocks)}"
            assert NO_BLOCK not in blocks, "a retired block counts as held"
            assert allocator.num_free + len(blocks) == allocator.num_blocks, "a block has no owner"
        promised = sum(table.num_promised_blocks for table in tables)
        assert promised == self._num_promised, "promises and running requests disagree"
        for table in tables:
            assert len(table.blocks) <= table.num_promised_blocks, "more blocks than promised"
