"""Block tables: what is mapped, what is given back, and that the computed pool sizes suffice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.cache.blocks import NULL_BLOCK, OutOfBlocks
from pcpkit.cache.pool import allocate_pool
from pcpkit.config import CacheConfig, ConfigError, ModelConfig
from pcpkit.engine.sizing import (
    EngineConfig,
    bytes_per_block,
    cache_config,
    num_window_blocks,
)
from pcpkit.engine.tables import CacheTables

from .small_model import small_document


def _tables(
    *, window: int, num_window_blocks: int, num_blocks: int = 64, num_requests: int = 2
) -> CacheTables:
    sizes = CacheConfig(
        num_blocks=num_blocks,
        num_window_blocks=num_window_blocks,
        num_requests=num_requests,
        block_size=8,
        window_block_size=4,
    )
    return CacheTables(sizes, window)


def test_window_blocks_are_given_back_when_nothing_reads_them() -> None:
    tables = _tables(window=6, num_window_blocks=10)
    request = tables.open()
    tables.extend(request, 12)
    assert request.window_blocks == [0, 1, 2]
    tables.retire(request, 8)  # the row at 8 reads 3 .. 8: block 0 still holds position 3
    assert request.window_blocks == [0, 1, 2]
    tables.retire(request, 9)  # the row at 9 reads 4 .. 9
    assert request.window_blocks == [NULL_BLOCK, 1, 2]
    assert request.live_window_blocks == [1, 2]
    assert tables.num_free_window_blocks == 8
    tables.check_invariants([request])


def test_blocks_are_taken_as_needed_and_all_come_back() -> None:
    tables = _tables(window=6, num_window_blocks=10)
    first, second = tables.open(), tables.open()
    assert first.ring_block != second.ring_block
    assert not tables.has_seat
    assert tables.num_missing(first, 9) == 2
    tables.extend(first, 9)
    assert (len(first.blocks), len(second.blocks)) == (2, 0)
    assert tables.num_missing(first, 16) == 0
    tables.extend(first, 9)  # nothing new
    assert len(first.blocks) == 2
    tables.extend(second, 1)
    tables.check_invariants([first, second])
    with pytest.raises(AssertionError, match="disagree"):
        tables.check_invariants([first])
    tables.close(first)
    tables.close(second)
    tables.check_invariants([])
    assert (tables.blocks.num_free, tables.num_free_window_blocks) == (64, 10)


def test_a_table_reaches_as_far_as_the_free_blocks() -> None:
    tables = _tables(window=4, num_window_blocks=20, num_blocks=3)
    request = tables.open()
    tables.extend(request, 5)
    assert tables.reach(request) == 3 * 8
    other = tables.open()
    tables.extend(other, 8)
    assert tables.reach(request) == 2 * 8
    with pytest.raises(OutOfBlocks):
        tables.extend(request, 17)


def test_adopted_blocks_are_held_before_anything_is_allocated() -> None:
    """A pool where the only free blocks are the adopted ones and one more."""
    tables = _tables(window=6, num_window_blocks=10, num_blocks=3)
    first = tables.open()
    tables.extend(first, 16)
    for block in first.blocks:
        tables.blocks.mark_cached(block)
    hit = list(first.blocks)
    tables.close(first)
    second = tables.open(hit, window_start=9)
    tables.extend(second, 17)
    assert second.blocks[:2] == hit
    assert second.blocks[2] not in hit
    # Position 9 lies in window block 2: the two below are never taken.
    assert second.window_blocks[:2] == [NULL_BLOCK] * 2
    assert len(second.live_window_blocks) == 3
    tables.check_invariants([second])
    third = tables.open(hit)
    tables.check_invariants([second, third])
    tables.close(second)
    assert [tables.blocks.ref_count(block) for block in hit] == [1, 1]
    tables.close(third)
    assert tables.blocks.num_free == 3


def test_a_replay_retires_from_its_own_rows_and_never_backwards() -> None:
    """The first rows of a replay stand less than a window above the first block it has."""
    tables = _tables(window=9, num_window_blocks=10)
    request = tables.open(window_start=17)  # block 4 holds 16 .. 19
    tables.extend(request, 21)
    tables.retire(request, 21)  # the row at 21 reads 13 .. 21
    assert request.num_retired == 4
    assert request.window_blocks[:4] == [NULL_BLOCK] * 4
    assert len(request.live_window_blocks) == 2
    tables.extend(request, 29)
    tables.retire(request, 28)  # reads 20 .. 28
    assert request.num_retired == 5
    tables.check_invariants([request])


def test_optimism_is_not_retired() -> None:
    """Only settled tokens count (field scenario B004)."""
    tables = _tables(window=128, num_window_blocks=80, num_blocks=64)
    request = tables.open()
    tables.extend(request, 160)
    tables.retire(request, 158)
    assert request.num_retired == 31 // 4


@given(
    window=st.integers(1, 40),
    block=st.integers(1, 9),
    chunk=st.integers(1, 30),
    requests=st.integers(1, 4),
    data=st.data(),
)
def test_the_window_pool_always_suffices(
    window: int, block: int, chunk: int, requests: int, data: st.DataObject
) -> None:
    """Requests at any lengths advance by steps that share the budget: no block is ever missing."""
    count = num_window_blocks(
        max_requests=requests,
        chunk_tokens=chunk,
        sliding_window=window,
        window_block_size=block,
    )
    sizes = CacheConfig(
        num_blocks=1000,
        num_window_blocks=count,
        num_requests=requests,
        block_size=8,
        window_block_size=block,
    )
    tables = CacheTables(sizes, window)
    running = [tables.open() for _ in range(requests)]
    lengths = [0] * requests
    for _ in range(data.draw(st.integers(1, 8))):
        budget = chunk
        for place, request in enumerate(running):
            rows = data.draw(st.integers(0, budget))
            budget -= rows
            lengths[place] += rows
            tables.extend(request, lengths[place])
        tables.check_invariants(running)
        for request, length in zip(running, lengths, strict=True):
            tables.retire(request, length)
            readable = range(max(length - window + 1, 0), length)
            assert all(request.window_blocks[p // block] != NULL_BLOCK for p in readable)
            # What is held: the readable positions, widened to whole blocks.
            assert len(request.live_window_blocks) <= (window + 2 * block - 2) // block
    for request in running:
        tables.close(request)
    tables.check_invariants([])


def test_pool_sizes_follow_model_and_limits() -> None:
    config = ModelConfig.from_dict(small_document())
    sizes = cache_config(config, EngineConfig(max_requests=3, chunk_tokens=64), 1000)
    assert (sizes.num_requests, sizes.num_blocks) == (3, 3 * 16)
    assert sizes.ring_rows == 8  # two more than the draft block of 5, made even
    # Window 16 in blocks of 32: at most 2 blocks a request, one more for its chunk, 2 for the rows.
    assert sizes.num_window_blocks == 3 * 3 + 2
    few = cache_config(config, EngineConfig(num_blocks=5, compressed_format="mxfp8"), 1000)
    assert (few.num_blocks, few.compressed_format) == (5, "mxfp8")


def test_the_pool_can_be_sized_in_bytes() -> None:
    config = ModelConfig.from_dict(small_document())
    limits = EngineConfig(block_size=8)
    size = bytes_per_block(config, 8, limits.compressed_format)
    pool = allocate_pool(config, cache_config(config, limits, 64))
    held = [*pool.compressed.values(), *pool.index_keys.values()]
    assert size == sum(tensor[0].nbytes for tensor in held)
    sizes = cache_config(config, EngineConfig(block_size=8, cache_bytes=5 * size + 1), 64)
    assert sizes.num_blocks == 5
    with pytest.raises(ValueError, match="byte_budget expected"):
        cache_config(config, EngineConfig(block_size=8, cache_bytes=size - 1), 64)
    with pytest.raises(ConfigError, match="cache_bytes"):
        EngineConfig(cache_bytes=1000, num_blocks=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_rows_per_rank", 0), ("num_spare_blocks", -1), ("trim", "some"), ("reserve", 1)],
)
def test_settings_outside_their_range_are_refused(field: str, value: object) -> None:
    settings: dict[str, object] = {field: value}
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**settings)  # pyright: ignore[reportArgumentType]


def test_the_ring_grows_with_the_draft_block() -> None:
    document = small_document()
    document["text_config"]["dspark_block_size"] = 9
    sizes = cache_config(ModelConfig.from_dict(document), EngineConfig(), 100)
    assert sizes.ring_rows == 12


@pytest.mark.parametrize("field", ["chunk_tokens", "max_requests", "num_blocks", "block_size"])
def test_limits_below_one_are_refused(field: str) -> None:
    limits: dict[str, int] = {field: 0}
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**limits)  # pyright: ignore[reportArgumentType]


def test_a_block_that_splits_a_pair_is_refused() -> None:
    config = ModelConfig.from_dict(small_document())
    with pytest.raises(ConfigError, match="block_size"):
        cache_config(config, EngineConfig(block_size=7), 100)
