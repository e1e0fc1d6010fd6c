"""Requests that share prefixes over one pool, one prefix cache and one snapshot store.

A dict says what every block holds, as the tokens a reader would take it for. Requests come, hit,
write block by block, publish, are put in quarantine, end early or late; blocks are forgotten,
snapshots taken and restored. After every rule: nothing leaks, nothing in use is dealt again, the
bytes of a published block are those it was published with, and a hit is never longer than what was
stored and not yet evicted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pcpkit.cache.blocks import BlockPool, OutOfBlocks
from pcpkit.cache.pool import CachePool
from pcpkit.cache.prefix import HashPrefixCache, PrefixEvent, block_hashes
from pcpkit.cache.snapshot import SnapshotPlace, SnapshotStore

BLOCK_SIZE = 2
WINDOW = 3
RECORD_BYTES = 4
NUM_WINDOW_BLOCKS = 8
PREFIXES = [[1] * 8, [1] * 4 + [2] * 4, [3] * 8]
"""Token sequences; requests are a part of one, then tokens of their own."""


@dataclass(eq=False)
class Request:
    """`blocks` is its table, the first `num_written` blocks hold what it says."""

    tokens: list[int]
    hashes: list[bytes]
    blocks: list[int]
    num_written: int
    exact: bool


def _content(request: Request, index: int) -> tuple[object, ...]:
    """What an exact run writes into block `index`; an approximate one writes something else."""
    cold = tuple(request.tokens[: (index + 1) * BLOCK_SIZE])
    return ("exact", cold) if request.exact else ("approximate", cold, id(request))


class CacheMachine(RuleBasedStateMachine):
    """Rules pick requests by number, so that a failing run can be read."""

    @initialize(num_blocks=st.integers(3, 10), num_snapshots=st.integers(0, 3))
    def start(self, num_blocks: int, num_snapshots: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.from_events: dict[int, tuple[bytes, bool]] = {}
        self.cache = HashPrefixCache(self.pool, BLOCK_SIZE, observe=self._observe)
        self.store = SnapshotStore(num_snapshots * (WINDOW - 1) * RECORD_BYTES)
        shape = (NUM_WINDOW_BLOCKS, BLOCK_SIZE, RECORD_BYTES)
        self.caches = CachePool(
            window={0: torch.zeros(shape, dtype=torch.uint8)},
            compressed={},
            index_keys={},
            ring={},
            compressed_record="mxfp8",
        )
        self.requests: list[Request] = []
        self.held: dict[str, list[int]] = {}  # by quarantine
        self.bytes_of: dict[int, tuple[object, ...]] = {}
        self.published: dict[int, tuple[bytes, bool, tuple[object, ...]]] = {}
        self.acquired: list[bytes] = []
        self.num_names = 0

    def _observe(self, event: PrefixEvent) -> None:
        if event.kind == "stored":
            assert event.block not in self.from_events
            self.from_events[event.block] = (event.block_hash, event.exact)
        else:
            assert self.from_events.pop(event.block) == (event.block_hash, event.exact)

    def _longest_hit(self, hashes: list[bytes], exact_only: bool) -> int:
        """By search through all that is published."""
        found = {name for name, exact, _ in self.published.values() if exact or not exact_only}
        return next((n for n, name in enumerate(hashes) if name not in found), len(hashes))

    @rule(
        prefix=st.sampled_from(PREFIXES),
        num_shared=st.sampled_from([8, 6, 4, 3]),
        suffix=st.lists(st.integers(4, 5), max_size=2),
        exact=st.booleans(),
        count=st.sampled_from([6, 1, 0]),
    )
    def admit(
        self, prefix: list[int], num_shared: int, suffix: list[int], exact: bool, count: int
    ) -> None:
        """Look up, acquire, then allocate, all or nothing; and compute the first chunk."""
        tokens = [*prefix[:num_shared], *suffix, 9]
        hashes = block_hashes(tokens, BLOCK_SIZE)
        usable = hashes[: (len(tokens) - 1) // BLOCK_SIZE]
        match = self.cache.match(usable, exact_only=exact)
        assert len(match.blocks) == self._longest_hit(usable, exact)
        assert len(match.blocks) + match.num_refused == self._longest_hit(usable, False)
        num_hit = len(match.blocks)
        assert match.exact == (self._longest_hit(usable[:num_hit], True) == num_hit)
        for index, block in enumerate(match.blocks):
            name, is_exact, content = self.published[block]
            assert name == usable[index]
            assert content[1] == tuple(tokens[: (index + 1) * BLOCK_SIZE])
            assert self.bytes_of[block] == content
            assert is_exact or not exact
        held_before = self._in_use()
        self.pool.acquire(match.blocks)
        missing = -(-len(tokens) // BLOCK_SIZE) - num_hit
        num_free = self.pool.num_free
        try:
            fresh = self.pool.allocate(missing)
        except OutOfBlocks:
            assert num_free < missing
            self.pool.free(match.blocks)
            return
        assert not set(fresh) & (held_before | set(match.blocks)), "a block in use was dealt"
        for block in fresh:
            self.published.pop(block, None)
            self.bytes_of[block] = ("poison",)
        blocks = [*match.blocks, *fresh]
        request = Request(tokens, hashes, blocks, num_hit, exact and match.exact)
        self.requests.append(request)
        self._write(request, count)

    def _write(self, request: Request, count: int) -> None:
        """Compute the next blocks, and publish those that are full."""
        end = min(request.num_written + count, len(request.blocks))
        for index in range(request.num_written, end):
            block = request.blocks[index]
            assert block not in self.published, "bytes of a published block would change"
            content = self.bytes_of[block] = _content(request, index)
            if index < len(request.hashes):
                self.cache.publish(block, request.hashes[index], exact=request.exact)
                self.published[block] = (request.hashes[index], request.exact, content)
        request.num_written = end

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 99), count=st.integers(1, 6), ends=st.booleans())
    def step(self, number: int, count: int, ends: bool) -> None:
        """A chunk of one request, which may be its last one."""
        request = self.requests[number % len(self.requests)]
        self._write(request, count)
        if ends:
            self.requests.remove(request)
            self.pool.free(request.blocks)

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 99))
    def end(self, number: int) -> None:
        """Aborted or preempted, at any point: the same for its blocks."""
        self.pool.free(self.requests.pop(number % len(self.requests)).blocks)

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 99))
    def quarantine(self, number: int) -> None:
        """Work that reads or writes all blocks of a request starts."""
        self.num_names += 1
        name = f"work {self.num_names}"
        self.held[name] = list(self.requests[number % len(self.requests)].blocks)
        self.pool.quarantine(name, self.held[name])

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99))
    def release(self, number: int) -> None:
        name = list(self.held)[number % len(self.held)]
        self.pool.release(name)
        del self.held[name]

    @precondition(lambda self: self.published)
    @rule(number=st.integers(0, 99))
    def forget(self, number: int) -> None:
        block = list(self.published)[number % len(self.published)]
        self.cache.forget(block)
        del self.published[block]

    @rule(prefix=st.sampled_from(PREFIXES), num_blocks=st.integers(1, 4), restore=st.booleans())
    def snapshot(self, prefix: list[int], num_blocks: int, restore: bool) -> None:
        """Window records that spell the prefix go in; what comes out spells it, too."""
        num_tokens = num_blocks * BLOCK_SIZE
        key = block_hashes(prefix[:num_tokens], BLOCK_SIZE)[-1]
        first = max(num_tokens - WINDOW + 1, 0)
        records = (
            torch.tensor(list(key[:RECORD_BYTES]), dtype=torch.uint8).repeat(num_tokens - first, 1)
            + torch.arange(first, num_tokens, dtype=torch.uint8)[:, None]
        )
        window = self.caches.window[0]
        window.fill_(255)
        table = list(range(num_blocks))
        rows = window.view(-1, RECORD_BYTES)[first:num_tokens]
        place = SnapshotPlace(key=key, window_blocks=table, num_tokens=num_tokens)
        if not restore:
            rows.copy_(records)
            (stored,) = self.store.capture([place], self.caches, sliding_window=WINDOW)
            assert stored == (key in self.store)
        elif key in self.store:
            self.store.restore([place], self.caches, sliding_window=WINDOW)
            assert torch.equal(rows, records)

    @precondition(lambda self: len(self.store) > 0)
    @rule(number=st.integers(0, 99))
    def acquire_snapshot(self, number: int) -> None:
        stored = sorted(self.store._entries)
        key = stored[number % len(stored)]
        self.store.acquire(key)
        self.acquired.append(key)

    @precondition(lambda self: self.acquired)
    @rule(number=st.integers(0, 99))
    def release_snapshot(self, number: int) -> None:
        self.store.release(self.acquired.pop(number % len(self.acquired)))

    def _in_use(self) -> set[int]:
        tables = [*(request.blocks for request in self.requests), *self.held.values()]
        return {block for table in tables for block in table}

    @invariant()
    def nothing_leaks(self) -> None:
        self.pool.check_invariants(request.blocks for request in self.requests)
        self.cache.check_invariants()
        self.store.check_invariants()
        assert self.pool.num_free + len(self._in_use()) == self.pool.num_blocks
        assert all(key in self.store for key in self.acquired)

    @invariant()
    def published_bytes_never_change(self) -> None:
        assert set(self.published) == set(self.from_events)
        for block, (name, exact, content) in self.published.items():
            assert self.bytes_of[block] == content
            assert self.from_events[block] == (name, exact)

    @invariant()
    def requests_keep_their_bytes(self) -> None:
        for request in self.requests:
            for index, block in enumerate(request.blocks[: request.num_written]):
                expected = tuple(request.tokens[: (index + 1) * BLOCK_SIZE])
                assert self.bytes_of[block][1] == expected

    def teardown(self) -> None:
        """Everything ends, and all blocks are free again."""
        for request in self.requests:
            self.pool.free(request.blocks)
        for name in self.held:
            self.pool.release(name)
        self.pool.check_invariants([])
        assert self.pool.num_free == self.pool.num_blocks


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=40)
