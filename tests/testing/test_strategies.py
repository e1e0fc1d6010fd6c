"""What the strategies draw is valid, and the awkward cases are among it."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import find, given
from hypothesis import strategies as st

from pcpkit.config import CacheConfig, ParallelConfig
from pcpkit.plan.batch import StepBatch, check_batch, row_positions, row_requests
from pcpkit.plan.step import plan_step
from pcpkit.testing import strategies
from pcpkit.testing.batches import RaggedBatch, Steps
from pcpkit.testing.strategies import (
    block_tables,
    cache_layouts,
    chunk_splits,
    parallel_sizes,
    partitions,
    ragged_batches,
    step_batches,
    step_schedules,
    step_sequences,
    topk_sets,
)


def occurs(strategy: st.SearchStrategy[Any], condition: Callable[[Any], object]) -> bool:
    """Whether it is drawn sooner or later; raises NoSuchExample otherwise."""
    find(strategy, lambda value: bool(condition(value)))
    return True


# --- batches ------------------------------------------------------------------------------------


@given(batch=ragged_batches(max_requests=4, max_query_len=9, max_computed=20, max_drafts=3))
def test_ragged_batches_keep_their_bounds(batch: RaggedBatch) -> None:
    assert 1 <= len(batch.requests) <= 4
    for index, rows in enumerate(batch.requests):
        assert rows.request == index
        assert 1 <= rows.query_len <= (9 if rows.is_prefilling else 4)
        assert (0 if rows.is_prefilling else 1) <= rows.num_computed_tokens <= 20
        assert 0 <= rows.num_logits <= rows.query_len
    assert len(batch.places) == len(set(batch.places)) == batch.num_tokens


@pytest.mark.parametrize(
    "condition",
    [
        lambda batch: any(rows.query_len == 0 for rows in batch.requests),
        lambda batch: not batch.requests,
        lambda batch: any(n > 1 for n, p in zip(*sides(batch), strict=True) if not p),
        lambda batch: any(n == 1 for n, p in zip(*sides(batch), strict=True) if p),
        lambda batch: any(r.is_prefilling and r.num_computed_tokens % 2 for r in batch.requests),
        lambda batch: len(set(batch.is_prefilling)) == 2,
        lambda batch: len(batch.requests) > 2 and batch.is_prefilling[:3] == [True, False, True],
    ],
    ids=["rests", "empty", "drafts", "one-row", "odd-start", "mixed", "not-sorted"],
)
def test_awkward_batches_occur(condition: Callable[[RaggedBatch], object]) -> None:
    assert occurs(ragged_batches(min_requests=0, resting=True), condition)


def sides(batch: RaggedBatch) -> tuple[list[int], list[bool]]:
    return batch.query_lens, batch.is_prefilling


@given(batch=ragged_batches(kinds=["decode", "drafts"], max_drafts=0))
def test_kinds_can_be_chosen(batch: RaggedBatch) -> None:
    assert not any(batch.is_prefilling)
    assert set(batch.query_lens) == {1}


@given(config=parallel_sizes(max_ranks=4))
def test_parallel_sizes_keep_their_bounds(config: ParallelConfig) -> None:
    assert config.world_size <= 4


def test_partitions_leave_ranks_empty_and_levels_uneven() -> None:
    drawn = ragged_batches().flatmap(lambda batch: partitions(batch, min_ranks=2))
    assert occurs(drawn, lambda found: any(len(rows) == 0 for rows in found.rows))
    assert occurs(drawn, lambda found: max(map(len, found.segments)) > 4)


# --- what a batch refers to ---------------------------------------------------------------------


@given(lengths=st.lists(st.integers(0, 40), max_size=4), size=st.integers(1, 9), data=st.data())
def test_block_tables_map_what_is_needed(
    lengths: list[int], size: int, data: st.DataObject
) -> None:
    firsts = [data.draw(st.integers(-3, length)) for length in lengths]
    table = data.draw(block_tables(lengths, size, first_positions=firsts))
    assert table.dtype == torch.int32
    for row, first, length in zip(table.tolist(), firsts, lengths, strict=True):
        for index, block in enumerate(row):
            needed = (index + 1) * size > first and index * size < length
            assert (block >= 0) == needed
    mapped = table[table >= 0].tolist()
    assert len(mapped) == len(set(mapped))
    assert max(mapped, default=0) < sum(-(-n // size) for n in lengths) + 3


def test_block_tables_are_permuted() -> None:
    drawn = block_tables([20], 4)
    assert occurs(drawn, lambda t: t[0, :5].tolist() == [0, 1, 2, 3, 4])
    assert occurs(drawn, lambda t: t[0, 0] > t[0, 1] and t.max() > 5)


@given(visible=st.lists(st.integers(0, 12), max_size=5), k=st.integers(1, 8), data=st.data())
def test_topk_sets_are_ascending_and_visible(
    visible: list[int], k: int, data: st.DataObject
) -> None:
    selected = data.draw(topk_sets(visible, k))
    assert (selected.dtype, selected.shape) == (torch.int32, (len(visible), k))
    for row, count in zip(selected.tolist(), visible, strict=True):
        chosen = [index for index in row if index >= 0]
        assert row == chosen + [-1] * (k - len(chosen))
        assert chosen == sorted(set(chosen))
        assert all(index < count for index in chosen)


def test_topk_sets_are_full_and_empty() -> None:
    for count in (0, 4):
        assert occurs(topk_sets([9], 4), lambda t, n=count: int((t >= 0).sum()) == n)


# --- several steps ------------------------------------------------------------------------------


@given(length=st.integers(0, 60), most=st.integers(1, 6), data=st.data())
def test_chunks_add_up(length: int, most: int, data: st.DataObject) -> None:
    chunks = data.draw(chunk_splits(length, max_chunks=most))
    assert sum(chunks) == length
    assert all(chunk > 0 for chunk in chunks)
    assert len(chunks) <= most


@given(steps=step_schedules(max_drafts=2))
def test_schedules_continue_every_request_to_its_end(steps: tuple[RaggedBatch, ...]) -> None:
    computed = Counter[int]()
    decoding: dict[int, bool] = {}
    for step in steps:
        names = [rows.request for rows in step.requests]
        assert len(names) == len(set(names)) >= 1
        for rows in step.requests:
            if rows.num_computed_tokens == 0:
                computed[rows.request], decoding[rows.request] = 0, False
            assert rows.num_computed_tokens == computed[rows.request]
            assert not (decoding[rows.request] and rows.is_prefilling)
            assert rows.query_len <= (40 if rows.is_prefilling else 3)
            decoding[rows.request] = not rows.is_prefilling
            computed[rows.request] += rows.query_len


def restarts(steps: tuple[RaggedBatch, ...]) -> bool:
    starts = Counter(
        rows.request for step in steps for rows in step.requests if rows.num_computed_tokens == 0
    )
    return max(starts.values()) > 1


def test_preemption_occurs() -> None:
    assert occurs(step_schedules(), restarts)


@given(steps=step_schedules(preemption=False))
def test_preemption_can_be_ruled_out(steps: tuple[RaggedBatch, ...]) -> None:
    assert not restarts(steps)


@given(steps=step_sequences(window_size=8))
def test_steps_can_be_planned(steps: Steps) -> None:
    """Every row has its slots, in blocks that no other request of the step holds."""
    plan_step(
        steps.batches[-1],
        ratios=(1, 2),
        block_size=steps.cache.block_size,
        window_block_size=steps.cache.window_block_size,
        ring_rows=steps.cache.ring_rows,
    )
    for rows, batch in zip(steps.rows, steps.batches, strict=True):
        check_batch(batch)
        assert batch.query_lens.tolist() == rows.query_lens
        assert batch.is_prefilling.tolist() == rows.is_prefilling
        limits = (
            (batch.block_table, steps.cache.num_blocks),
            (batch.window_block_table, steps.cache.num_window_blocks),
            (batch.ring_blocks, steps.cache.num_requests),
        )
        for table, limit in limits:
            held = table[table >= 0].tolist()
            assert len(held) == len(set(held))
            assert max(held) < limit


@given(steps=step_sequences(window_size=8))
def test_blocks_stay_while_a_request_needs_them(steps: Steps) -> None:
    """A mapped block keeps its number; a window block goes when no row can read it any more."""
    held: dict[tuple[int, str, int], int] = {}
    for rows, batch in zip(steps.rows, steps.batches, strict=True):
        for index, one in enumerate(rows.requests):
            if one.num_computed_tokens == 0:
                held = {key: block for key, block in held.items() if key[0] != one.request}
            for name, size in (
                ("block_table", steps.cache.block_size),
                ("window_block_table", steps.cache.window_block_size),
            ):
                for place, block in enumerate(getattr(batch, name)[index].tolist()):
                    readable = (place + 1) * size > one.num_computed_tokens - 7
                    needed = place * size < one.seq_len and (readable or name == "block_table")
                    assert (block >= 0) == needed
                    if block >= 0:
                        assert held.setdefault((one.request, name, place), block) == block


def test_freed_blocks_are_taken_by_others() -> None:
    def recycles(steps: Steps) -> bool:
        owners: dict[int, set[int]] = {}
        for rows, batch in zip(steps.rows, steps.batches, strict=True):
            for one, block in zip(rows.requests, batch.ring_blocks.tolist(), strict=True):
                owners.setdefault(block, set()).add(one.request)
        return any(len(names) > 1 for names in owners.values())

    assert occurs(step_sequences(), recycles)


@given(batch=step_batches(window_size=4, vocab_size=5, layouts=cache_layouts()))
def test_single_steps_are_valid(batch: StepBatch) -> None:
    check_batch(batch)
    assert int(batch.token_ids.max()) < 5
    back = row_positions(batch)[batch.query_start_loc[:-1].long()]
    known = (batch.lookback_token_ids >= 0).sum(1)
    assert torch.equal(known, back.clamp(max=3))
    assert len(row_requests(batch)) == batch.num_tokens


@given(layout=cache_layouts(num_blocks=7))
def test_layouts_are_small(layout: CacheConfig) -> None:
    assert layout.num_blocks == 7
    assert layout.block_size <= 16


def test_without_hypothesis_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    spec = importlib.util.spec_from_file_location("strategies_alone", strategies.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(ImportError, match=r"hypothesis expected .* pip install 'pcpkit\[test\]'"):
        spec.loader.exec_module(module)
