"""Block tables of the running requests: which physical blocks hold which positions.

A request holds three kinds of storage (docs/cache-layout.md):

- compressed blocks for every token it has computed or taken over from the prefix cache, whose
  blocks several requests may hold at once;
- window blocks, its own, for the tokens that its next rows can still read. A block that lies wholly
  below the window of the next token is given back, and none is taken for what lies below the first
  window record it needs, so the number held is O(window + chunk) also behind a long prefix;
- one ring block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pcpkit.cache.blocks import NULL_BLOCK, BlockPool
from pcpkit.config import CacheConfig


@dataclass(slots=True, kw_only=True, eq=False)
class RequestTables:
    """Physical blocks of one running request, indexed by logical block; `CacheTables` mutates it.

    `num_retired` counts the leading window blocks that were given back or never taken; their
    entries are NULL_BLOCK.
    """

    ring_block: int
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
        self._blocks = BlockPool(cache.num_blocks)
        self._window_blocks = BlockPool(cache.num_window_blocks)
        self._ring_blocks = BlockPool(cache.num_requests)

    @property
    def blocks(self) -> BlockPool:
        """The compressed blocks; a prefix cache keeps its index over them."""
        return self._blocks

    @property
    def num_free_window_blocks(self) -> int:
        """Window blocks that nobody holds."""
        return self._window_blocks.num_free

    @property
    def has_seat(self) -> bool:
        """Whether one more request can run: a ring block is free."""
        return self._ring_blocks.num_free > 0

    def num_blocks(self, num_tokens: int) -> int:
        """Compressed blocks of a request of `num_tokens` tokens."""
        return -(-num_tokens // self._cache.block_size)

    def num_missing(self, tables: RequestTables, num_tokens: int) -> int:
        """Compressed blocks that `extend` to `num_tokens` tokens would take."""
        return max(self.num_blocks(num_tokens) - len(tables.blocks), 0)

    def reach(self, tables: RequestTables) -> int:
        """Tokens the request can hold with its blocks and all free ones."""
        return (len(tables.blocks) + self._blocks.num_free) * self._cache.block_size

    def open(self, hit_blocks: Sequence[int] = (), window_start: int = 0) -> RequestTables:
        """Tables of a request that starts to run; there must be a seat.

        Args:
            hit_blocks: taken over from the prefix cache; they are held from now on, so no later
                allocation can evict them.
            window_start: lowest position whose window record the request writes or restores.
        """
        assert self.has_seat, "open() without a seat"
        self._blocks.acquire(hit_blocks)
        first = window_start // self._cache.window_block_size
        return RequestTables(
            ring_block=self._ring_blocks.allocate(1)[0],
            blocks=list(hit_blocks),
            window_blocks=[NULL_BLOCK] * first,
            num_retired=first,
        )

    def extend(self, tables: RequestTables, num_tokens: int) -> None:
        """Map blocks up to `num_tokens` tokens, before the step that computes them.

        Raises:
            OutOfBlocks: too few are free; see `num_missing`.
        """
        tables.blocks += self._blocks.allocate(self.num_missing(tables, num_tokens))
        missing = -(-num_tokens // self._cache.window_block_size) - len(tables.window_blocks)
        tables.window_blocks += self._window_blocks.allocate(max(missing, 0))

    def retire(self, tables: RequestTables, num_computed_tokens: int) -> None:
        """Give back the window blocks that no row from `num_computed_tokens` on can read."""
        lowest_read = max(num_computed_tokens - self._sliding_window + 1, 0)
        start, retired = tables.num_retired, lowest_read // self._cache.window_block_size
        if retired <= start:  # also in a replay, whose first rows stand above blocks never taken
            return
        self._window_blocks.free(tables.window_blocks[start:retired])
        tables.window_blocks[start:retired] = [NULL_BLOCK] * (retired - start)
        tables.num_retired = retired

    def close(self, tables: RequestTables) -> None:
        """Take back everything, the newest blocks first; the tables must not be used again."""
        self._window_blocks.free(tables.live_window_blocks)
        self._blocks.free(tables.blocks)
        self._ring_blocks.free([tables.ring_block])
        tables.blocks, tables.window_blocks, tables.num_retired = [], [], 0

    def check_invariants(self, running: Iterable[RequestTables]) -> None:
        """Assert that `running` hold exactly the blocks that are not free.

        Window and ring blocks have one owner each; compressed ones as many as there are references.
        """
        tables = list(running)
        self._blocks.check_invariants([table.blocks for table in tables])
        own = [
            (self._window_blocks, [b for table in tables for b in table.live_window_blocks]),
            (self._ring_blocks, [table.ring_block for table in tables]),
        ]
        for pool, held in own:
            pool.check_invariants([held])
            assert len(set(held)) == len(held), f"a block has two owners: {sorted(held)}"
        for table in tables:
            retired = table.window_blocks[: table.num_retired]
            assert set(retired) <= {NULL_BLOCK}, "a retired window block is still in the table"
            assert NULL_BLOCK not in table.live_window_blocks, "a retired block counts as held"
            assert NULL_BLOCK not in table.blocks, "a compressed block is missing"
