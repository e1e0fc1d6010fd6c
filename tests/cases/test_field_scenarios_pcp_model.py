"""Field scenarios of context parallelism on whole steps of a model, with virtual ranks.

"Cold" is the same request alone, in one step, on one rank. Every run starts with caches full of
poison, compares every byte of every rank's caches with those of one rank after every step, and the
collectives of every rank with what its plan foretells. Scenarios: docs/field-scenarios.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pcpkit.config import ParallelConfig
from pcpkit.parallel import pcp
from pcpkit.plan.partition import STRATEGIES
from pcpkit.testing.batches import RaggedBatch, RequestRows, Steps
from pcpkit.testing.compare import same_bits
from tests.parallel.micro import micro, run_ranks, run_single
from tests.parallel.schedules import (
    MIXED,
    assembled,
    assert_like_alone,
    assert_same_run,
    check,
    rows,
    whole_prompts,
)

FOUR = ParallelConfig(pcp_size=4)
FOUR_SHARED = replace(FOUR, expert_parallel=True)


def batch(*requests: RequestRows) -> RaggedBatch:
    return RaggedBatch(requests=requests)


def prefills(lengths: Sequence[int]) -> RaggedBatch:
    return batch(*(rows(name, 0, count) for name, count in enumerate(lengths)))


def check_cold(schedule: Sequence[RaggedBatch], parallel: ParallelConfig, seed: int = 0) -> Steps:
    """All ranks, one rank and every request alone agree bit for bit."""
    steps = assembled(tuple(schedule), seed)
    found = check(micro(), parallel, steps, list(STRATEGIES.values()), numerics="weight_only")
    alone = run_single(micro(), whole_prompts(steps, seed), numerics="weight_only")
    assert_like_alone(steps, found, alone)
    return steps


# --- K4, K5: shapes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((1, 9, 2), id="B039"),
        pytest.param(tuple(range(1, 10)), id="B166"),
        pytest.param((8, 1, 8), id="B167"),
        pytest.param((1, 8), id="B168-first-empty"),
        pytest.param((8, 1), id="B168-last-empty"),
        pytest.param((1, 1), id="B168-three-ranks-empty"),
    ],
)
def test_short_prompts_side_by_side(lengths: tuple[int, ...]) -> None:
    check_cold([prefills(lengths)], FOUR)


def test_b041_decodes_only() -> None:
    """1, 2, 3 and 5 decodes on four ranks: idle ranks, even ranks, one rank with two."""
    prompts = (2, 1, 3, 1, 2)
    computed, steps = list(prompts), [prefills(prompts)]
    for count in (1, 2, 3, 5):
        steps.append(batch(*(rows(i, computed[i], 1, decode=True) for i in range(count))))
        computed = [done + (i < count) for i, done in enumerate(computed)]
    check_cold(steps, FOUR)


def test_b168_a_decode_beside_the_last_row_of_a_prompt() -> None:
    steps = [prefills((4, 4)), batch(rows(0, 4, 1, decode=True), rows(1, 4, 1))]
    check_cold(steps, FOUR_SHARED)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_b169_chunks_that_leave_one_row(size: int) -> None:
    """Budget 4, two prompts of 9: 4, 4 and 1 rows, while the other one is under way."""
    steps = [
        batch(rows(0, 0, 4)),
        batch(rows(0, 4, 4), rows(1, 0, 4)),
        batch(rows(0, 8, 1), rows(1, 4, 4)),
        batch(rows(0, 9, 1, decode=True), rows(1, 8, 1)),
    ]
    check_cold(steps, ParallelConfig(pcp_size=size))


def test_b170_very_short_prompts_among_decodes() -> None:
    """Prompts of 1 and 2 alone and joining a decode; blocks and ring come from a request before."""
    steps = [
        batch(rows(0, 0, 9)),
        batch(rows(1, 0, 1)),
        batch(rows(2, 0, 2)),
        batch(rows(1, 1, 1, decode=True), rows(3, 0, 1), rows(2, 2, 1, decode=True), rows(4, 0, 2)),
    ]
    check_cold(steps, ParallelConfig(pcp_size=2))


def test_b175_no_compressed_entry_in_the_whole_batch() -> None:
    """32 prompts of one token see no pair: the longest is shorter than the ratio."""
    steps = check_cold([prefills([1] * 32)], ParallelConfig(pcp_size=2))
    (run,) = run_ranks(micro(), ParallelConfig(), steps, numerics="weight_only")
    assert run.plans[0].layer_rows(0).max_visible(2) == 0
    check_cold([prefills([1])], FOUR)


# --- K6: padding --------------------------------------------------------------------------------


def full_tables(steps: Steps) -> Steps:
    """Every unmapped entry names a block that belongs to nobody and is full of poison."""
    used = torch.cat([one.block_table.flatten() for one in steps.batches]).unique().tolist()
    used_window = torch.cat([one.window_block_table.flatten() for one in steps.batches])
    spare = next(i for i in range(steps.cache.num_blocks) if i not in used)
    candidates = range(steps.cache.num_window_blocks)
    spare_window = next(i for i in candidates if i not in used_window.tolist())

    def filled(table: Tensor, block: int) -> Tensor:
        wider = torch.cat([table, torch.full_like(table[:, :1], -1)], dim=1)
        return torch.where(wider < 0, block, wider)

    batches = [
        replace(
            one,
            block_table=filled(one.block_table, spare),
            window_block_table=filled(one.window_block_table, spare_window),
        )
        for one in steps.batches
    ]
    return replace(steps, batches=tuple(batches))


def test_b071_padding_rows_and_tables_full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN arrives in every padding row, tables end in a poisoned page: the same bits."""
    steps = assembled(MIXED, 71)
    parallel = ParallelConfig(pcp_size=3, expert_parallel=True)
    want = run_ranks(micro(), parallel, steps, numerics="weight_only")
    padded = 0

    def poisoned_padding(records: Tensor, num_rows: int) -> Tensor:
        nonlocal padded
        padded += num_rows - records.shape[0]
        rest = records.new_empty(num_rows - records.shape[0], *records.shape[1:])
        rest.view(torch.uint8).fill_(0xFF)
        return torch.cat([records, rest])

    monkeypatch.setattr(pcp, "pad_rows", poisoned_padding)
    found = run_ranks(micro(), parallel, full_tables(steps), numerics="weight_only")
    assert padded > 0
    for got, expected in zip(found, want, strict=True):
        assert bool(torch.cat(got.logits).isfinite().all())
        assert_same_run(got, expected)


def test_b072_unused_slots_of_a_page_do_not_matter() -> None:
    """13 tokens leave three slots of their last page: NaN, zero, anything gives the same bits."""
    steps = assembled((batch(rows(0, 0, 13)), batch(rows(0, 13, 1, decode=True))), 72)
    parallel = ParallelConfig(pcp_size=2)
    runs = [
        run_ranks(micro(), parallel, steps, numerics="weight_only", filler=filler)[1]
        for filler in (0xFF, 0x00, 0x3C)
    ]
    for run in runs[1:]:
        assert all(same_bits(*pair) for pair in zip(run.logits, runs[0].logits, strict=True))
        for name, records in runs[0].records[0].items():
            assert same_bits(run.records[0][name], records), name


# --- K11: compressor ----------------------------------------------------------------------------


def test_b076_a_prompt_of_one_token_after_a_long_request() -> None:
    """It takes the long one's blocks and ring; it sees no entry, whatever was there."""
    schedule = [batch(rows(0, 0, 21)), batch(rows(1, 0, 1)), batch(rows(1, 1, 1, decode=True))]
    steps = check_cold(schedule, ParallelConfig(pcp_size=2))
    before, after = steps.batches[0], steps.batches[1]
    assert torch.equal(before.ring_blocks, after.ring_blocks)
    assert int(after.block_table[0, 0]) in before.block_table.tolist()[0]
    (run,) = run_ranks(micro(), ParallelConfig(), steps, numerics="weight_only")
    assert [plan.layer_rows(0).num_visible(2).tolist() for plan in run.plans[1:]] == [[0], [1]]


def test_b077_decode_one_by_one_is_prefill() -> None:
    """Prompts of 1 .. 9 and six tokens each: entries, rings and logits of the whole sequence."""
    prompts = range(1, 10)
    decodes = [
        batch(*(rows(i, count + step, 1, decode=True) for i, count in enumerate(prompts)))
        for step in range(6)
    ]
    check_cold([prefills(prompts), *decodes], ParallelConfig(pcp_size=2))


@pytest.mark.parametrize(("size", "lengths"), [(2, (10,)), (4, (13, 50))])
def test_b078_pairs_split_between_ranks(size: int, lengths: tuple[int, ...]) -> None:
    check_cold([prefills(lengths)], ParallelConfig(pcp_size=size))


# --- K14: participation -------------------------------------------------------------------------


def test_b111_b112_ranks_that_are_empty_for_many_steps() -> None:
    """One token on four ranks, then two, then one again: every rank makes every call."""
    steps = [
        batch(rows(0, 0, 1)),
        *(batch(rows(0, 1 + i, 1, decode=True)) for i in range(2)),
        batch(rows(1, 0, 2), rows(0, 3, 1, decode=True)),
        batch(rows(1, 2, 1, decode=True)),
        batch(rows(1, 3, 1, decode=True)),
    ]
    check_cold(steps, FOUR_SHARED)
