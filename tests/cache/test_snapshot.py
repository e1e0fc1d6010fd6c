"""Snapshots: the right bytes come back, the budget holds, entries in use stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.cache.pool import CachePool
from pcpkit.cache.snapshot import SnapshotPlace, SnapshotStore

RECORD_BYTES = 3
BLOCK_SIZE = 4
NUM_BLOCKS = 6
WINDOW = 3  # entries of W - 1 = 2 rows


def _pool(num_layers: int = 2, seed: int = 0, device: str = "cpu") -> CachePool:
    """Random bytes; the pages of a layer lie apart from one another."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_BLOCKS, 2 * BLOCK_SIZE, RECORD_BYTES)
    window = {
        layer: torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)[
            :, BLOCK_SIZE:
        ]
        for layer in range(num_layers)
    }
    return CachePool(
        window=window, compressed={}, index_keys={}, ring={}, compressed_record="mxfp8"
    )


def _entry_bytes(num_layers: int = 2, rows: int = WINDOW - 1) -> int:
    return num_layers * rows * RECORD_BYTES


def _place(key: bytes, window_blocks: list[int], num_tokens: int = 8) -> SnapshotPlace:
    return SnapshotPlace(key=key, window_blocks=window_blocks, num_tokens=num_tokens)


def _capture(
    store: SnapshotStore, key: bytes, pool: CachePool | None = None, num_tokens: int = 8
) -> bool:
    pool = _pool() if pool is None else pool
    (stored,) = store.capture([_place(key, [1, 0], num_tokens)], pool, sliding_window=WINDOW)
    return stored


def _restore(store: SnapshotStore, key: bytes, pool: CachePool, num_tokens: int = 8) -> None:
    store.restore([_place(key, [4, 5], num_tokens)], pool, sliding_window=WINDOW)


def _record(window: Tensor, blocks: list[int], position: int) -> list[int]:
    return window[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE].tolist()


@given(
    num_tokens=st.integers(1, 16),
    window=st.integers(1, 20),
    num_layers=st.integers(1, 3),
    source=st.permutations(range(NUM_BLOCKS)),
    target=st.permutations(range(NUM_BLOCKS)),
)
def test_the_last_records_come_back_into_other_blocks_and_nothing_else_changes(
    num_tokens: int, window: int, num_layers: int, source: list[int], target: list[int]
) -> None:
    first, last = max(num_tokens - window + 1, 0), num_tokens
    retired = first // BLOCK_SIZE
    source = [-1] * retired + source[: 4 - retired]  # what lies below the window is not mapped
    target = [-1] * retired + target[: 4 - retired]
    before, other = _pool(num_layers), _pool(num_layers, seed=1)
    expected = {layer: tensor.clone() for layer, tensor in other.window.items()}
    for layer, tensor in expected.items():
        for position in range(first, last):
            record = before.window[layer][
                source[position // BLOCK_SIZE], position % BLOCK_SIZE
            ].clone()
            tensor[target[position // BLOCK_SIZE], position % BLOCK_SIZE] = record
    store = SnapshotStore(10_000)
    of_source, of_target = (_place(b"key", blocks, num_tokens) for blocks in (source, target))
    assert store.capture([of_source], before, sliding_window=window) == [True]
    assert store.num_bytes == _entry_bytes(num_layers, last - first)
    for tensor in before.window.values():
        tensor.fill_(7)  # an entry is a copy: the blocks are dealt anew and overwritten
    store.restore([of_target], other, sliding_window=window)
    for layer, tensor in other.window.items():
        assert torch.equal(tensor, expected[layer]), f"layer {layer}"
    store.check_invariants()


def test_an_entry_is_captured_once() -> None:
    store = SnapshotStore(1000)
    assert _capture(store, b"a", _pool(seed=1))
    assert _capture(store, b"a", _pool(seed=2))
    assert (len(store), store.num_bytes) == (1, _entry_bytes())
    pool = _pool(seed=3)
    _restore(store, b"a", pool)
    assert _record(pool.window[1], [4, 5], 7) == _record(_pool(seed=1).window[1], [1, 0], 7)


def _touch_by_capture(store: SnapshotStore) -> None:
    assert _capture(store, b"a")


def _touch_by_restore(store: SnapshotStore) -> None:
    _restore(store, b"a", _pool())


def _touch_by_acquire(store: SnapshotStore) -> None:
    store.acquire(b"a")
    store.release(b"a")


def _look(store: SnapshotStore) -> None:
    assert b"a" in store


@pytest.mark.parametrize(
    ("use", "evicted"),
    [
        (_touch_by_capture, b"b"),
        (_touch_by_restore, b"b"),
        (_touch_by_acquire, b"b"),
        (_look, b"a"),
    ],
)
def test_the_least_recently_used_entry_makes_room(
    use: Callable[[SnapshotStore], None], evicted: bytes
) -> None:
    store = SnapshotStore(3 * _entry_bytes() - 1)
    assert _capture(store, b"a")
    assert _capture(store, b"b")
    use(store)
    assert _capture(store, b"c")
    assert [key for key in (b"a", b"b", b"c") if key not in store] == [evicted]
    assert (store.num_evictions, store.num_refused, len(store)) == (1, 0, 2)
    assert store.num_bytes == 2 * _entry_bytes()
    store.check_invariants()


def test_an_acquired_entry_stays() -> None:
    store = SnapshotStore(2 * _entry_bytes())
    _capture(store, b"a")
    _capture(store, b"b")
    store.acquire(b"a")
    store.acquire(b"a")
    store.release(b"a")  # one user is left
    assert _capture(store, b"c")
    assert (b"a" in store, b"b" in store) == (True, False)
    store.acquire(b"c")
    assert not _capture(store, b"d")
    assert (b"a" in store, b"c" in store, store.num_refused) == (True, True, 1)
    store.release(b"a")
    assert _capture(store, b"d")
    assert b"a" not in store
    store.check_invariants()


def test_an_entry_that_cannot_fit_evicts_nothing() -> None:
    store = SnapshotStore(2 * _entry_bytes())
    _capture(store, b"a")
    _capture(store, b"b")
    store.acquire(b"b")
    assert not _capture(store, b"large", _pool(num_layers=4))  # would fit without b
    assert not _capture(store, b"larger", _pool(num_layers=5))  # would not fit at all
    assert (b"a" in store, b"b" in store, len(store)) == (True, True, 2)
    assert (store.num_evictions, store.num_refused) == (0, 2)
    store.release(b"b")
    assert _capture(store, b"large", _pool(num_layers=4))  # the whole budget
    assert (len(store), store.num_evictions) == (1, 2)
    store.check_invariants()


def test_no_budget_stores_nothing() -> None:
    store = SnapshotStore(0)
    assert not _capture(store, b"a")
    assert (len(store), store.num_bytes, store.num_refused) == (0, 0, 1)
    with pytest.raises(ValueError, match="byte_budget expected >= 0"):
        SnapshotStore(-1)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda store, pool: _restore(store, b"b", pool), "key expected a stored one, got 62"),
        (lambda store, pool: store.acquire(b"b"), "key expected a stored one"),
        (lambda store, pool: store.release(b"b"), "key expected a stored one"),
        (lambda store, pool: store.release(b"a"), "key expected an acquired one, got 61"),
        (lambda store, pool: _restore(store, b"a", pool, num_tokens=7), "5 .. 6, got 6 .. 7"),
        (lambda store, pool: _restore(store, b"a", _pool(num_layers=1)), r"got \(1, 2, 3\)"),
        (lambda store, pool: _capture(store, b"b", pool, num_tokens=9), "at .1, 2., got .1, 0."),
        (lambda store, pool: _capture(store, b"b", pool, num_tokens=0), "num_tokens and"),
        (
            lambda store, pool: store.capture([_place(b"b", [0, -1])], pool, sliding_window=WINDOW),
            r"at \[1\], got \[0, -1\]",
        ),
        (
            lambda store, pool: store.restore(
                [_place(b"a", [0, NUM_BLOCKS])], pool, sliding_window=WINDOW
            ),
            r"at \[1\], got \[0, 6\]",
        ),
        (
            lambda store, pool: store.capture([_place(b"b", [0, 1])], pool, sliding_window=0),
            "num_tokens and sliding_window expected >= 1, got 8 and 0",
        ),
    ],
)
def test_a_refusal_changes_nothing(
    refused: Callable[[SnapshotStore, CachePool], object], message: str
) -> None:
    store, pool = SnapshotStore(2 * _entry_bytes()), _pool()
    _capture(store, b"a")
    before = {layer: tensor.clone() for layer, tensor in pool.window.items()}
    with pytest.raises(ValueError, match=message):
        refused(store, pool)
    for layer, tensor in pool.window.items():
        assert torch.equal(tensor, before[layer])
    assert (len(store), b"a" in store, store.num_bytes) == (1, True, _entry_bytes())
    assert (store.num_refused, store.num_evictions) == (0, 0)
    store.check_invariants()


def test_several_are_restored_as_one_by_one() -> None:
    """Of different lengths, one of them twice; and each is a use of its entry."""
    store, source = SnapshotStore(1000), _pool(seed=2)
    for key, num_tokens in ((b"a", 8), (b"b", 6), (b"c", 1)):
        _capture(store, key, source, num_tokens)
    targets = [
        _place(b"a", [-1, 3]),
        _place(b"c", [2], num_tokens=1),
        _place(b"b", [0, 4], num_tokens=6),
        _place(b"a", [-1, 5]),
    ]
    single, together = _pool(), _pool()
    for one in targets:
        store.restore([one], single, sliding_window=WINDOW)
    store.restore(targets, together, sliding_window=WINDOW)
    for layer, window in single.window.items():
        assert torch.equal(window, together.window[layer])
        assert not torch.equal(window, _pool().window[layer])
    assert list(store._entries) == [b"c", b"b", b"a"]
    store.restore([], together, sliding_window=WINDOW)


def test_several_are_captured_as_one_by_one() -> None:
    """Of different lengths, one of them twice, one stored already: that one counts as used."""
    pool = _pool(seed=2)
    places = [
        _place(b"a", [1, 0]),
        _place(b"c", [2], num_tokens=1),
        _place(b"old", [1, 0]),
        _place(b"b", [5, 3], num_tokens=6),
        _place(b"a", [1, 0]),
    ]
    single, together = SnapshotStore(1000), SnapshotStore(1000)
    for store in (single, together):
        _capture(store, b"old", pool)
        _capture(store, b"older", pool)
    for one in places:
        single.capture([one], pool, sliding_window=WINDOW)
    assert together.capture(places, pool, sliding_window=WINDOW) == [True] * 5
    together.check_invariants()
    assert list(together._entries) == [b"older", b"old", b"a", b"c", b"b"]
    for key, entry in together._entries.items():
        assert torch.equal(entry.records, single._entries[key].records)
        assert entry.positions == single._entries[key].positions
        assert entry.records.untyped_storage().nbytes() == entry.records.nbytes
    assert together.capture([], pool, sliding_window=WINDOW) == []


def test_what_is_captured_together_does_not_evict_one_another() -> None:
    store, pool = SnapshotStore(2 * _entry_bytes()), _pool()
    for key in (b"x", b"y"):
        _capture(store, key)
    store.acquire(b"x")
    places = [_place(key, [1, 0]) for key in (b"a", b"b")]
    assert store.capture(places, pool, sliding_window=WINDOW) == [True, False]
    assert (list(store._entries), store.num_evictions, store.num_refused) == ([b"x", b"a"], 1, 1)
    with pytest.raises(ValueError, match="window_blocks expected"):
        store.capture([_place(b"c", [1, 0]), _place(b"d", [1])], pool, sliding_window=WINDOW)
    assert list(store._entries) == [b"x", b"a"]
    store.check_invariants()


@pytest.mark.parametrize("wrong", [_place(b"b", [4, 5]), _place(b"a", [4, -1])])
def test_if_one_cannot_be_restored_none_is(wrong: SnapshotPlace) -> None:
    store, pool = SnapshotStore(1000), _pool()
    _capture(store, b"a")
    _capture(store, b"c")
    with pytest.raises(ValueError, match="expected"):
        store.restore([_place(b"a", [2, 3]), wrong], pool, sliding_window=WINDOW)
    for layer, window in _pool().window.items():
        assert torch.equal(pool.window[layer], window)
    assert list(store._entries) == [b"a", b"c"]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["capture", "use", "acquire", "release"]), st.integers(0, 4)),
        max_size=40,
    ),
    num_fitting=st.integers(0, 4),
)
def test_stores_of_all_ranks_keep_the_same_entries(
    steps: list[tuple[str, int]], num_fitting: int
) -> None:
    """Other bytes, other places, the same calls; and a list in order of use as the model."""
    budget = num_fitting * _entry_bytes()
    ranks = [SnapshotStore(budget), SnapshotStore(budget, pinned_host=True)]
    pools = [_pool(seed=1), _pool(seed=2)]
    order: list[bytes] = []
    users: dict[bytes, int] = {}
    for step, number in steps:
        key = bytes([number])
        stored = key in order
        if step == "capture":
            idle = [one for one in order if not users[one]]
            if not stored and len(order) == num_fitting and idle:
                order.remove(idle[0])
            kept = stored or len(order) < num_fitting
            for store, pool in zip(ranks, pools, strict=True):
                assert _capture(store, key, pool) == kept
            if kept and not stored:
                order.append(key)
                users[key] = 0
            if not kept:
                continue
        elif not stored or (step == "release" and not users[key]):
            continue
        elif step == "use":
            for store, pool in zip(ranks, pools, strict=True):
                _restore(store, key, pool)
        else:
            for store in ranks:
                getattr(store, step)(key)
            users[key] += 1 if step == "acquire" else -1
        if step != "release":
            order.remove(key)
            order.append(key)
        for store in ranks:
            store.check_invariants()
            assert [key for key in map(bytes, ([n] for n in range(5))) if key in store] == sorted(
                order
            )


@pytest.mark.parametrize(
    "damage",
    [
        lambda store: setattr(store, "_num_bytes", 0),
        lambda store: setattr(store, "_byte_budget", 1),
        lambda store: setattr(store._entries[b"a"], "num_users", -1),
        lambda store: store._entries.pop(b"a"),
    ],
)
def test_invariants_find_damage(damage: Callable[[SnapshotStore], object]) -> None:
    store = SnapshotStore(1000)
    _capture(store, b"a")
    damage(store)
    with pytest.raises(AssertionError):
        store.check_invariants()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned_host", [False, True])
def test_records_survive_a_stay_in_host_memory(pinned_host: bool) -> None:
    store = SnapshotStore(1000, pinned_host=pinned_host)
    source, other = _pool(device="cuda"), _pool(seed=1, device="cuda")
    assert _capture(store, b"a", source)
    assert store._entries[b"a"].records.is_pinned() == pinned_host
    expected = [
        [_record(window, [1, 0], position) for position in (6, 7)]
        for window in source.window.values()
    ]
    for window in source.window.values():
        window.fill_(7)
    _restore(store, b"a", other)
    for window, records in zip(other.window.values(), expected, strict=True):
        assert [_record(window, [4, 5], position) for position in (6, 7)] == records
