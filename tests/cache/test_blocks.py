"""Blocks: order of reuse, references, eviction, quarantine; nothing changes on a refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.cache.blocks import NULL_BLOCK, BlockPool, OutOfBlocks, blocks_in


def _cached_free(pool: BlockPool, count: int) -> list[int]:
    """Allocate `count` blocks, cache and free them."""
    blocks = pool.allocate(count)
    for block in blocks:
        pool.mark_cached(block)
    pool.free(blocks)
    return blocks


def test_uncached_blocks_go_first_and_the_last_freed_among_them() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.free([blocks[2]])
    pool.free([blocks[0], blocks[1]])
    assert pool.allocate(4) == [0, 1, 2, 3]


def test_the_tail_of_a_request_is_evicted_before_its_head() -> None:
    evicted: list[int] = []
    pool = BlockPool(6, evicted.append)
    older, newer = pool.allocate(3), pool.allocate(3)
    for block in (*older, *newer):
        pool.mark_cached(block)
    pool.free(older)
    pool.free(newer)
    assert (pool.num_free, pool.num_cached_free) == (6, 6)
    assert pool.allocate(4) == [2, 1, 0, 5]
    assert evicted == [2, 1, 0, 5]


def test_eviction_is_reported_before_the_block_is_held_and_after_it_lost_its_cache_mark() -> None:
    seen: list[tuple[int, int, bool]] = []

    def record(block: int) -> None:
        seen.append((block, pool.ref_count(block), pool.is_cached(block)))

    pool = BlockPool(2, record)
    _cached_free(pool, 1)
    assert pool.allocate(2) == [1, 0]
    assert seen == [(0, 0, False)]
    pool.check_invariants([[0, 1]])


def test_too_large_an_allocation_takes_and_evicts_nothing() -> None:
    evicted: list[int] = []
    pool = BlockPool(3, evicted.append)
    _cached_free(pool, 2)
    with pytest.raises(OutOfBlocks, match="expected 4 free, got 3 of 3"):
        pool.allocate(4)
    assert (pool.num_free, pool.num_cached_free, evicted) == (3, 2, [])
    assert pool.allocate(0) == []
    with pytest.raises(ValueError, match="count expected >= 0, got -1"):
        pool.allocate(-1)


def test_an_acquired_block_survives_any_allocation() -> None:
    pool = BlockPool(3)
    blocks = _cached_free(pool, 2)
    pool.acquire([blocks[0]])  # free: leaves the queue
    pool.acquire([blocks[0]])  # held: a second request
    assert (pool.num_free, pool.num_cached_free, pool.ref_count(0)) == (2, 1, 2)
    assert pool.allocate(2) == [2, 1]
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.free([0])
    assert pool.num_free == 0
    pool.free([0])
    assert (pool.num_free, pool.is_cached(0)) == (1, True)


def test_use_renews_a_cached_block() -> None:
    pool = BlockPool(3)
    _cached_free(pool, 3)
    pool.acquire([2])
    pool.free([2])  # was the next to go, is the last now
    assert pool.allocate(3) == [1, 0, 2]


def test_a_block_without_worth_is_reused_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(3, evicted.append)
    _cached_free(pool, 2)
    pool.mark_uncached(0)
    assert (pool.num_free, pool.num_cached_free) == (3, 1)
    assert pool.allocate(1) == [0]
    assert evicted == []
    pool.mark_cached(0)
    pool.mark_uncached(0)  # held: stays held
    pool.check_invariants([[0]])


def test_quarantined_blocks_outlive_their_request() -> None:
    """B001, B009: a transfer writes on after the abort; nobody may get its blocks before."""
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.quarantine("transfer 7", blocks)
    pool.free(blocks)
    assert pool.num_free == 2
    assert pool.quarantined == ("transfer 7",)
    assert pool.allocate(2) == [2, 3]
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.release("transfer 7")
    assert pool.quarantined == ()
    assert pool.allocate(2) == blocks


def test_two_quarantines_of_a_block_both_have_to_end() -> None:
    """B005: one of two transfers of a request fails; the other still writes."""
    pool = BlockPool(1)
    pool.quarantine("first", pool.allocate(1))
    pool.quarantine("second", [0])
    pool.free([0])
    pool.release("first")
    assert pool.num_free == 0
    pool.check_invariants([])
    pool.release("second")
    assert pool.num_free == 1


def test_a_free_cached_block_can_be_quarantined() -> None:
    pool = BlockPool(1)
    _cached_free(pool, 1)
    pool.quarantine("save", [0])
    assert (pool.num_free, pool.num_cached_free, pool.ref_count(0)) == (0, 0, 1)
    pool.release("save")
    assert (pool.num_cached_free, pool.is_cached(0)) == (1, True)


def _busy_pool() -> BlockPool:
    """0 held and cached, 1 free and cached, 2 held by a quarantine alone, 3 held, 4 free."""
    pool = BlockPool(5)
    pool.allocate(4)
    pool.mark_cached(0)
    pool.mark_cached(1)
    pool.quarantine("work", [2])
    pool.free([1])
    pool.free([2])
    return pool


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda pool: pool.free([3, 4]), "held blocks, got 4"),
        (lambda pool: pool.free([3, 1]), "held blocks, got 1"),
        (lambda pool: pool.free([3, 2]), "held blocks, got 2"),
        (lambda pool: pool.free([3, 3]), "distinct"),
        (lambda pool: pool.free([3, NULL_BLOCK]), "NULL_BLOCK"),
        (lambda pool: pool.free([3, 5]), "ids in 0 .. 4"),
        (lambda pool: pool.acquire([1, 4]), "held or cached ones, got 4"),
        (lambda pool: pool.acquire([1, 1]), "distinct"),
        (lambda pool: pool.acquire([1, NULL_BLOCK]), "NULL_BLOCK"),
        (lambda pool: pool.acquire([1, 5]), "ids in 0 .. 4"),
        (lambda pool: pool.quarantine("more", [1, 4]), "held or cached ones, got 4"),
        (lambda pool: pool.quarantine("more", [NULL_BLOCK]), "NULL_BLOCK"),
        (lambda pool: pool.quarantine("work", [0]), "name expected a new one, got 'work'"),
        (lambda pool: pool.release("more"), "one of .'work'., got 'more'"),
        (lambda pool: pool.mark_cached(4), "got free block 4"),
        (lambda pool: pool.mark_cached(0), "got cached block 0"),
        (lambda pool: pool.mark_cached(NULL_BLOCK), "NULL_BLOCK"),
        (lambda pool: pool.mark_uncached(3), "block expected cached, got 3"),
        (lambda pool: pool.mark_uncached(NULL_BLOCK), "NULL_BLOCK"),
        (lambda pool: pool.ref_count(NULL_BLOCK), "NULL_BLOCK"),
        (lambda pool: pool.is_cached(5), "ids in 0 .. 4"),
    ],
)
def test_a_refusal_changes_nothing(refused: Callable[[BlockPool], None], message: str) -> None:
    pool = _busy_pool()
    with pytest.raises(ValueError, match=message):
        refused(pool)
    pool.check_invariants([[0], [3]])
    assert [pool.ref_count(block) for block in range(5)] == [1, 0, 1, 1, 0]
    assert [pool.is_cached(block) for block in range(5)] == [True, True, False, False, False]
    assert (pool.num_free, pool.num_cached_free, pool.quarantined) == (2, 1, ("work",))
    assert pool.allocate(2) == [4, 1]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[0]], "references and holders"),
        ([[0], [3], [3]], "references and holders"),
        ([[0], [2, 3]], "references and holders"),
        ([[0, 1], [3]], "references and holders"),
    ],
)
def test_invariants_find_lost_and_invented_references(
    tables: list[list[int]], message: str
) -> None:
    pool = _busy_pool()
    pool.check_invariants([[0, NULL_BLOCK], [3]])
    with pytest.raises(AssertionError, match=message):
        pool.check_invariants(tables)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(4),
        lambda pool: pool._free.append(3),
        lambda pool: pool._free.remove(4),
        lambda pool: pool._cached_free.update({3: None}),
        lambda pool: pool._cached_free.pop(1),
        lambda pool: pool._cached.__setitem__(4, True),
        lambda pool: pool._ref_counts.__setitem__(2, 0),
        lambda pool: pool._num_quarantined.update([0]),
    ],
)
def test_invariants_find_damage(damage: Callable[[BlockPool], object]) -> None:
    pool = _busy_pool()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check_invariants()


def test_capacity_from_a_byte_budget() -> None:
    assert [blocks_in(budget, 300) for budget in (300, 599, 600)] == [1, 1, 2]
    with pytest.raises(ValueError, match=r"byte_budget expected >= 300 \(one block\), got 299"):
        blocks_in(299, 300)
    with pytest.raises(ValueError, match="bytes_per_block expected >= 1, got 0"):
        blocks_in(299, 0)
    with pytest.raises(ValueError, match="num_blocks expected >= 0"):
        BlockPool(-1)


class _OneQueue:
    """The rule as the specification states it: one queue, and a search where a pool has an index.

    Pop at the head; a freed block goes to the tail if it is cached, to the head if not.
    """

    def __init__(self, num_blocks: int) -> None:
        self.queue = list(range(num_blocks))
        self.references = dict.fromkeys(range(num_blocks), 0)
        self.cached: set[int] = set()

    def allocate(self, count: int) -> tuple[list[int], list[int]]:
        """Blocks taken, and those of them that were evicted."""
        taken, self.queue = self.queue[:count], self.queue[count:]
        evicted = [block for block in taken if block in self.cached]
        self.cached -= set(taken)
        self.references.update(dict.fromkeys(taken, 1))
        return taken, evicted

    def acquire(self, block: int) -> None:
        self.references[block] += 1
        if block in self.queue:
            self.queue.remove(block)

    def free(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                self.queue.insert(len(self.queue) if block in self.cached else 0, block)


@given(data=st.data(), num_blocks=st.integers(0, 7))
def test_every_block_is_dealt_as_by_one_queue(data: st.DataObject, num_blocks: int) -> None:
    evicted: list[int] = []
    pool, model = BlockPool(num_blocks, evicted.append), _OneQueue(num_blocks)
    holders: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 30), "steps")):
        step = data.draw(st.sampled_from(["allocate", "acquire", "free", "cache"]), "step")
        if step == "allocate":
            count = data.draw(st.integers(0, len(model.queue)), "count")
            evicted.clear()
            taken = pool.allocate(count)
            assert (taken, evicted) == model.allocate(count)
            holders.append(taken)
        elif step == "acquire":
            usable = [b for b, n in model.references.items() if n or b in model.cached]
            chosen = data.draw(st.lists(st.sampled_from(usable), unique=True)) if usable else []
            pool.acquire(chosen)
            for block in chosen:
                model.acquire(block)
            holders.append(chosen)
        elif step == "free" and holders:
            blocks = holders.pop(data.draw(st.integers(0, len(holders) - 1), "holder"))
            pool.free(blocks)
            model.free(blocks)
        elif step == "cache":
            fresh = [b for b, n in model.references.items() if n and b not in model.cached]
            if fresh:
                block = data.draw(st.sampled_from(fresh), "cached")
                pool.mark_cached(block)
                model.cached.add(block)
        pool.check_invariants(holders)
        assert pool.num_free == len(model.queue)
        assert pool.num_cached_free == len(model.cached & set(model.queue))
