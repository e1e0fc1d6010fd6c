"""Block hashes and the index over them: names are canonical, hits are what was published."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.cache.blocks import BlockPool
from pcpkit.cache.prefix import (
    DigestFunction,
    HashPrefixCache,
    PrefixEvent,
    PrefixMatch,
    PrefixStats,
    block_hashes,
    extend_hashes,
)

GOLDEN_TOKENS = [1, 2, 3, 4, 129279, 0]
# Computed apart from pcpkit: sha-256, ids as 4 bytes little-endian, blocks of 2.
GOLDEN = {
    "": [
        "c0d21ee970f6f423d849f556dba7a3c9fbc6a3036c34a84260c8a74b334d1d43",
        "2ddfe328a306a20aa54f18c0c0c8deafca8b2e82ddbf41af4ab8e463a010f728",
        "45549ddbbeb402e764d8d4b034353f86804d872346742f2219246bc29b436de2",
    ],
    "tenant": [
        "1b4b5c4affd928da6cbd0c3d60d7ea7d1940b0d0a11c6112e4b59359ce599992",
        "d2a0175800ea1ea25fc80f611414566259934c13b535a6897ebc9851fde5f70f",
        "7f448e42f5d16068c4244d9dc59fca906b191bf689dfccb131f7596fc5477a29",
    ],
}

TOKENS = st.lists(st.integers(0, 2), max_size=24)  # few ids, so that prefixes repeat


@pytest.mark.parametrize("salt", GOLDEN)
def test_digests_are_those_of_the_golden_chain(salt: str) -> None:
    assert [name.hex() for name in block_hashes(GOLDEN_TOKENS, 2, salt)] == GOLDEN[salt]


def test_another_process_computes_the_same_digests() -> None:
    """B149: nothing depends on the interpreter's own hash seed."""
    code = (
        "from pcpkit.cache.prefix import block_hashes\n"
        f"print(*(name.hex() for name in block_hashes({GOLDEN_TOKENS}, 2, 'tenant')))"
    )
    for seed in ("0", "1", "random"):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert result.stdout.split() == GOLDEN["tenant"]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_numpy_ids_name_the_same_blocks(dtype: type[np.generic]) -> None:
    ids = np.array(GOLDEN_TOKENS, dtype=dtype)
    assert block_hashes(ids.tolist(), 2) == block_hashes(GOLDEN_TOKENS, 2)
    assert block_hashes(list(ids), 2) == block_hashes(GOLDEN_TOKENS, 2)


@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 24)), block_size=st.integers(1, 5))
def test_a_growing_sequence_gets_the_names_of_the_whole(
    tokens: list[int], cuts: list[int], block_size: int
) -> None:
    hashes: list[bytes] = []
    for cut in sorted(cuts):
        extend_hashes(hashes, tokens[:cut], block_size, "salt")
        assert len(hashes) == min(cut, len(tokens)) // block_size
    extend_hashes(hashes, tokens, block_size, "salt")
    assert hashes == block_hashes(tokens, block_size, "salt")


@given(left=TOKENS, right=TOKENS, block_size=st.integers(1, 5))
def test_names_are_equal_where_all_tokens_so_far_are(
    left: list[int], right: list[int], block_size: int
) -> None:
    ours, theirs = block_hashes(left, block_size), block_hashes(right, block_size)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        end = (index + 1) * block_size
        assert (one == other) == (left[:end] == right[:end])
    assert len(set(ours)) == len(ours), "a repeated block has another name each time"
    assert not set(ours) & set(block_hashes(left, block_size, "salt"))


def test_each_extension_continues_from_the_last_name() -> None:
    hashes: list[bytes] = []
    for end in range(1, len(GOLDEN_TOKENS) + 1):
        extend_hashes(hashes, GOLDEN_TOKENS[:end], 2, "tenant")
        assert [name.hex() for name in hashes] == GOLDEN["tenant"][: end // 2]


def test_ids_do_not_run_into_each_other() -> None:
    """Fixed width: [1, 0] and [0, 1], [1] and [256], differ however they are split."""
    blocks = [[1, 0], [0, 1], [256, 0], [0, 256], [65536, 0], [1, 256]]
    assert len({block_hashes(block, 2)[0] for block in blocks}) == len(blocks)


def test_a_partly_filled_block_has_no_name() -> None:
    assert block_hashes([1, 2, 3], 4) == []
    assert block_hashes([], 4) == []
    assert len(block_hashes([1, 2, 3, 4], 4)) == 1
    assert len(block_hashes([1, 2, 3, 4, 5, 6, 7], 4)) == 1


@pytest.mark.parametrize(
    ("tokens", "block_size", "message"),
    [
        ([1, 2, 3, 4, -1, 6], 2, "token_ids expected integers"),
        ([1, 2, 3, 4, 2**32, 6], 2, "token_ids expected integers"),
        ([1, 2, 3, 4, 1.0, 6], 2, "token_ids expected integers"),
        ([1], 2, "token_ids expected >= 2 tokens"),
        ([1, 2], 0, "block_size expected >= 1"),
    ],
)
def test_a_refused_extension_appends_nothing(
    tokens: list[int], block_size: int, message: str
) -> None:
    hashes = block_hashes([1, 2], 2)
    before = list(hashes)
    with pytest.raises(ValueError, match=message):
        extend_hashes(hashes, tokens, block_size)
    assert hashes == before
    assert block_hashes([2**32 - 1, 0], 2)


def _eight_bits(content: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=1)


@pytest.mark.parametrize("digest", [hashlib.md5, hashlib.sha1, hashlib.sha224, _eight_bits])
def test_a_short_digest_is_refused_at_the_start(digest: DigestFunction) -> None:
    """B147: the digest alone decides, so it must not collide."""
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="digest_function expected >= 256 bits, got"):
        HashPrefixCache(pool, 2, digest_function=digest)
    assert pool.on_evict is None
    with pytest.raises(ValueError, match="digest_function expected >= 256 bits, got"):
        block_hashes([1, 2], 2, digest_function=digest)


def test_a_cache_names_blocks_by_its_own_digest() -> None:
    cache = HashPrefixCache(BlockPool(1), 2, digest_function=hashlib.sha3_512)
    hashes: list[bytes] = []
    cache.extend_hashes(hashes, GOLDEN_TOKENS, "tenant")
    assert hashes == block_hashes(GOLDEN_TOKENS, 2, "tenant", digest_function=hashlib.sha3_512)
    assert {len(name) for name in hashes} == {64}
    with pytest.raises(ValueError, match="block_hash expected 64 bytes, got 32"):
        cache.publish(0, block_hashes([1, 2], 2)[0], exact=True)


def _stored(cache: HashPrefixCache, pool: BlockPool, names: list[bytes], *exact: bool) -> list[int]:
    """A request that computes and publishes the blocks of `names`, and still holds them."""
    blocks = pool.allocate(len(names))
    for block, name, flag in zip(blocks, names, exact, strict=True):
        cache.publish(block, name, exact=flag)
    return blocks


NAMES = block_hashes(range(16), 4)


def test_a_hit_is_the_published_run_from_the_first_block_on() -> None:
    pool = BlockPool(8)
    cache = HashPrefixCache(pool, 4)
    assert cache.match(NAMES, exact_only=True) == PrefixMatch(blocks=(), exact=True, num_refused=0)
    blocks = pool.allocate(4)
    for index in (3, 0, 2):
        cache.publish(blocks[index], NAMES[index], exact=True)
    assert cache.match(NAMES, exact_only=True).blocks == (blocks[0],)  # a gap at 1
    cache.publish(blocks[1], NAMES[1], exact=True)
    assert cache.match(NAMES, exact_only=True).blocks == tuple(blocks)
    assert cache.match(NAMES[:3], exact_only=True).blocks == tuple(blocks[:3])
    assert cache.match(NAMES[1:], exact_only=True).blocks == (blocks[1], *blocks[2:])
    assert len(cache) == 4


def test_a_lookup_changes_nothing() -> None:
    """B030: it neither holds the blocks nor renews them."""
    pool = BlockPool(3)
    cache = HashPrefixCache(pool, 4)
    pool.free(_stored(cache, pool, NAMES[:3], True, True, True))
    before = (pool.num_free, pool.num_cached_free, len(cache))
    for _ in range(2):
        assert cache.match(NAMES[:1], exact_only=False).blocks == (0,)
    assert (pool.num_free, pool.num_cached_free, len(cache)) == before
    assert pool.allocate(3) == [2, 1, 0]


def test_an_exact_copy_is_preferred_then_the_oldest() -> None:
    pool = BlockPool(8)
    cache = HashPrefixCache(pool, 4)
    (first,) = _stored(cache, pool, NAMES[:1], False)
    (second,) = _stored(cache, pool, NAMES[:1], False)
    for exact_only in (False, True):
        match = cache.match(NAMES, exact_only=exact_only)
        expected = () if exact_only else (first,)
        assert match == PrefixMatch(blocks=expected, exact=exact_only, num_refused=int(exact_only))
    (third,) = _stored(cache, pool, NAMES[:1], True)
    _stored(cache, pool, NAMES[:1], True)
    for exact_only in (False, True):
        match = cache.match(NAMES, exact_only=exact_only)
        assert match == PrefixMatch(blocks=(third,), exact=True, num_refused=0)
    cache.check_invariants()
    assert second != first


def test_an_exact_hit_ends_at_the_first_approximate_block_and_counts_the_rest() -> None:
    pool = BlockPool(8)
    cache = HashPrefixCache(pool, 4)
    blocks = _stored(cache, pool, NAMES[:4], True, False, True, False)
    match = cache.match(NAMES, exact_only=False)
    assert match == PrefixMatch(blocks=tuple(blocks), exact=False, num_refused=0)
    match = cache.match(NAMES, exact_only=True)
    assert match == PrefixMatch(blocks=(blocks[0],), exact=True, num_refused=3)
    match = cache.match(NAMES[:1], exact_only=False)
    assert match == PrefixMatch(blocks=(blocks[0],), exact=True, num_refused=0)
    cache.forget(blocks[2])
    assert cache.match(NAMES, exact_only=True).num_refused == 1  # nothing beyond the gap
    match = cache.match(NAMES[1:3], exact_only=False)
    assert match == PrefixMatch(blocks=(blocks[1],), exact=False, num_refused=0)


@pytest.mark.parametrize("first", [False, True])
def test_one_approximate_block_makes_the_hit_approximate(first: bool) -> None:
    pool = BlockPool(8)
    cache = HashPrefixCache(pool, 4)
    blocks = _stored(cache, pool, NAMES[:2], first, not first)
    match = cache.match(NAMES, exact_only=False)
    assert match == PrefixMatch(blocks=tuple(blocks), exact=False, num_refused=0)


@pytest.mark.parametrize("lost", [False, True])
def test_an_approximate_and_an_exact_copy_leave_on_their_own(lost: bool) -> None:
    pool = BlockPool(8)
    cache = HashPrefixCache(pool, 4)
    copies = {exact: _stored(cache, pool, NAMES[:1], exact)[0] for exact in (False, True)}
    cache.forget(copies[lost])
    match = cache.match(NAMES, exact_only=False)
    assert match == PrefixMatch(blocks=(copies[not lost],), exact=not lost, num_refused=0)
    cache.check_invariants()


def test_a_block_dealt_anew_is_not_found_any_more() -> None:
    """B027."""
    pool = BlockPool(4)
    cache = HashPrefixCache(pool, 4)
    pool.free(_stored(cache, pool, NAMES[:3], True, True, True))
    assert pool.allocate(2) == [3, 2]  # the unused block, then the tail of the prefix
    assert cache.match(NAMES, exact_only=True).blocks == (0, 1)
    cache.check_invariants()
    pool.allocate(2)
    assert cache.match(NAMES, exact_only=True).blocks == ()
    assert len(cache) == 0
    cache.check_invariants()


def test_a_published_block_stays_when_its_request_ends_and_other_requests_adopt_it() -> None:
    """B026: taking up a free cached block keeps its name."""
    pool = BlockPool(2)
    cache = HashPrefixCache(pool, 4)
    pool.free(_stored(cache, pool, NAMES[:2], True, True))
    for _ in range(3):
        hit = cache.match(NAMES, exact_only=True).blocks
        assert hit == (0, 1)
        pool.acquire(hit)
    for _ in range(3):
        pool.free([0, 1])
    cache.check_invariants()
    assert cache.match(NAMES, exact_only=True).blocks == (0, 1)


def test_a_copy_stays_when_the_other_is_evicted() -> None:
    """B180: two requests computed the same prefix; each block has its own references."""
    pool = BlockPool(2)
    cache = HashPrefixCache(pool, 4)
    first = _stored(cache, pool, NAMES[:1], True)
    second = _stored(cache, pool, NAMES[:1], True)
    pool.free(first)
    assert pool.allocate(1) == first
    assert cache.match(NAMES, exact_only=True).blocks == tuple(second)
    assert pool.ref_count(second[0]) == 1
    cache.check_invariants()


def test_tenants_see_only_their_own_blocks() -> None:
    """B148: salts a, b, a, none, none hit 0, 0, 12, 0, 12 of 16 tokens (the last must run)."""
    pool = BlockPool(32)
    cache = HashPrefixCache(pool, 4)
    hits: list[int] = []
    for salt in ("a", "b", "a", "", ""):
        hashes: list[bytes] = []
        cache.extend_hashes(hashes, range(16), salt)
        hits.append(4 * len(cache.match(hashes[:3], exact_only=True).blocks))
        if not hits[-1]:
            pool.free(_stored(cache, pool, hashes, True, True, True, True))
    assert hits == [0, 0, 12, 0, 12]


def test_forgotten_blocks_are_reused_first_and_held_ones_stay_held() -> None:
    pool = BlockPool(4)
    cache = HashPrefixCache(pool, 4)
    blocks = _stored(cache, pool, NAMES[:3], True, True, True)
    cache.forget(blocks[0])
    assert pool.ref_count(blocks[0]) == 1
    pool.free(blocks)
    cache.forget(blocks[1])
    assert cache.match(NAMES[1:], exact_only=True).blocks == ()
    assert pool.allocate(3) == [blocks[1], blocks[0], 3]
    cache.check_invariants()


def test_events_tell_what_entered_and_left() -> None:
    pool = BlockPool(2)
    events: list[PrefixEvent] = []
    cache = HashPrefixCache(pool, 4, observe=events.append)
    pool.free(_stored(cache, pool, NAMES[:2], True, False))
    cache.match(NAMES, exact_only=True)
    pool.allocate(1)
    cache.forget(0)
    assert [(event.kind, event.block_hash, event.block, event.exact) for event in events] == [
        ("stored", NAMES[0], 0, True),
        ("stored", NAMES[1], 1, False),
        ("evicted", NAMES[1], 1, False),
        ("evicted", NAMES[0], 0, True),
    ]


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda cache: cache.publish(0, NAMES[1], exact=True), "got cached block 0"),
        (lambda cache: cache.publish(2, NAMES[1], exact=True), "got free block 2"),
        (lambda cache: cache.publish(-1, NAMES[1], exact=True), "NULL_BLOCK"),
        (lambda cache: cache.publish(1, b"short", exact=True), "block_hash expected 32 bytes"),
        (lambda cache: cache.forget(1), "published one, got 1"),
        (lambda cache: cache.forget(-1), "published one, got -1"),
    ],
)
def test_a_refusal_changes_nothing(
    refused: Callable[[HashPrefixCache], None], message: str
) -> None:
    pool = BlockPool(3)
    events: list[PrefixEvent] = []
    cache = HashPrefixCache(pool, 4, observe=events.append)
    _stored(cache, pool, NAMES[:1], True)
    pool.allocate(1)
    with pytest.raises(ValueError, match=message):
        refused(cache)
    cache.check_invariants()
    pool.check_invariants([[0], [1]])
    assert (len(events), len(cache)) == (1, 1)
    assert cache.match(NAMES, exact_only=True).blocks == (0,)


def test_a_pool_has_one_prefix_cache() -> None:
    pool = BlockPool(1)
    HashPrefixCache(pool, 4)
    with pytest.raises(ValueError, match=r"pool\.on_evict expected None"):
        HashPrefixCache(pool, 4)
    with pytest.raises(ValueError, match="block_size expected >= 1, got 0"):
        HashPrefixCache(BlockPool(1), 0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: cache._hash_of.pop(0),
        lambda cache: cache._hash_of.update({0: NAMES[1]}),
        lambda cache: cache._copies[NAMES[0]].approximate.update({0: None}),
        lambda cache: cache._copies[NAMES[0]].exact.update({1: None}),
        lambda cache: cache._copies.update({NAMES[3]: type(cache._copies[NAMES[0]])({}, {})}),
        lambda cache: cache._pool.mark_uncached(0),
        lambda cache: cache._pool.mark_cached(1),
    ],
)
def test_invariants_find_damage(damage: Callable[[HashPrefixCache], object]) -> None:
    pool = BlockPool(3)
    cache = HashPrefixCache(pool, 4)
    _stored(cache, pool, NAMES[:1], True)
    pool.allocate(1)
    cache.check_invariants()
    damage(cache)
    with pytest.raises(AssertionError):
        cache.check_invariants()


def test_the_hit_ratio_counts_tokens() -> None:
    stats = PrefixStats()
    assert stats.hit_ratio == 0.0
    stats.num_queries += 88
    stats.num_query_tokens += 101_376
    stats.num_hit_tokens += 80_384
    assert round(100 * stats.hit_ratio, 2) == 79.29
