"""Replay and trim on several ranks: the bits of one rank; exact ones, the bits of a cold run.

Prefixes are handed on inside one schedule: request 0 computes them, others start behind them, while
cold prefills and decodes run beside. Invariants 24 to 29 and 33 to 35 of pcp-spec section 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pcpkit.config import ParallelConfig
from pcpkit.plan.partition import STRATEGIES, PartitionStrategy, dual_chunk_swap, levelled
from pcpkit.plan.trim import Trim, TrimMode
from pcpkit.testing.batches import PrefixHit, RaggedBatch, RequestRows, Steps, assemble_steps
from pcpkit.testing.compare import assert_same_calls, same_bits
from pcpkit.testing.strategies import chunk_splits, parallel_sizes, partition_strategies

from .micro import (
    LAYOUT,
    VOCAB_SIZE,
    WINDOW_SIZE,
    Micro,
    RankRun,
    assert_traces,
    run_ranks,
    run_single,
)
from .schedules import assert_same_run, rows

# An example is several steps of a whole model on up to eight ranks.
FEW = settings(max_examples=max(4, settings().max_examples // 50))

NUM_LAYERS, CUT = 7, 3
SEVEN_LAYERS: dict[str, Any] = {
    "num_hidden_layers": NUM_LAYERS,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "candidate_source_layer_id": 3,
    "engram_layer_ids": [1],
}
"""As in micro.py, with three layers above the last KV source."""
HOP = WINDOW_SIZE - 1
EXACT_TRIM = Trim(mode="exact", cut=CUT, num_layers=NUM_LAYERS, sliding_window=WINDOW_SIZE)


@cache
def seven(num_experts: int = 24) -> Micro:
    return Micro(SEVEN_LAYERS, num_experts)


# --- schedules ----------------------------------------------------------------------------------


def bounded(hit: int) -> PrefixHit:
    return PrefixHit(num_tokens=hit, layer_starts=(hit - WINDOW_SIZE,) * NUM_LAYERS, donor=0)


def exact(hit: int) -> PrefixHit:
    starts = tuple(max(hit - HOP * (NUM_LAYERS - layer), 0) for layer in range(NUM_LAYERS))
    return PrefixHit(num_tokens=hit, layer_starts=starts, donor=0)


def chunked(
    request: int, chunks: Sequence[int], hit: PrefixHit | None = None, decodes: int = 0
) -> list[RequestRows]:
    """The steps of one request; logits of all rows that have them in a cold run, too."""
    out: list[RequestRows] = []
    start = 0 if hit is None else hit.layer_starts[0]
    for index, count in enumerate([*chunks, *[1] * decodes]):
        end = start + count
        first = start if hit is None else max(start, hit.num_tokens)
        one = rows(request, start, count, decode=index >= len(chunks))
        out.append(replace(one, num_logits=max(end - first, 0), hit=hit))
        start = end
    return out


def beside(donor: Sequence[RequestRows], *others: Sequence[RequestRows]) -> list[RaggedBatch]:
    """The donor's first step, then the others from the second on, each its next step."""
    steps = [[donor[0]]]
    for index in range(max(len(donor) - 1, *(len(one) for one in others))):
        parts = [donor[1:], *others]
        # Another order in every step: the batch's order says nothing about requests.
        turn = index % len(parts)
        steps.append([one[index] for one in parts[turn:] + parts[:turn] if index < len(one)])
    return [RaggedBatch(requests=tuple(step)) for step in steps if step]


@st.composite
def shared_prefixes(draw: st.DrawFn, kind: str) -> tuple[RaggedBatch, ...]:
    """A donor that decodes on, one or two hits of its prompt, sometimes a cold prefill beside."""
    policy = bounded if kind == "bounded" else exact
    lowest = 3 if kind == "bounded" else 1
    prompt = draw(st.integers(4 * lowest, 64))
    others: list[list[RequestRows]] = []
    for request in range(1, 1 + draw(st.integers(1, 2))):
        hit = policy(4 * draw(st.integers(lowest, prompt // 4)))
        count = hit.num_tokens + draw(st.integers(1, 12)) - hit.layer_starts[0]
        chunks = draw(chunk_splits(count, max_chunks=4))
        others.append(chunked(request, chunks, hit, draw(st.integers(0, 2))))
    if draw(st.booleans()):
        chunks = draw(chunk_splits(draw(st.integers(1, 20)), max_chunks=2))
        others.append(chunked(len(others) + 1, chunks))
    return tuple(beside(chunked(0, [prompt], decodes=draw(st.integers(0, 3))), *others))


def assembled(schedule: Sequence[RaggedBatch], seed: int) -> Steps:
    return assemble_steps(
        schedule, LAYOUT, seed=seed, vocab_size=VOCAB_SIZE, window_size=WINDOW_SIZE
    )


def cold_steps(steps: Steps) -> Steps:
    """Every request of the schedule alone in one step, without a hit."""
    lengths = [len(known) for known in steps.token_ids]
    alone = [RaggedBatch(requests=(rows(one, 0, count),)) for one, count in enumerate(lengths)]
    return assemble_steps(alone, LAYOUT, vocab_size=VOCAB_SIZE, token_ids=steps.token_ids)


def may_trim(schedule: Sequence[RaggedBatch]) -> list[RaggedBatch]:
    """All prefills may be trimmed, so they want their last row's logits at most."""
    return [
        RaggedBatch(
            requests=tuple(
                replace(one, may_trim=True, num_logits=min(one.num_logits, 1))
                if one.is_prefilling
                else one
                for one in step.requests
            )
        )
        for step in schedule
    ]


# --- what must be equal -------------------------------------------------------------------------


def check_ranks(
    steps: Steps,
    parallel: ParallelConfig,
    strategies: Sequence[PartitionStrategy],
    trim: Trim | None = None,
) -> RankRun:
    """All ranks equal one rank, byte by byte, and call what their plans foretell."""
    expected = run_single(seven(), steps, trim=trim)
    found = run_ranks(seven(), parallel, steps, strategies, trim=trim)
    for run in found:
        assert_same_run(run, expected)
    assert_traces(seven(), parallel, steps, found, "ordered")
    return found[0]


def assert_cold(steps: Steps, found: RankRun, *, last_window: bool = False) -> None:
    """Logits, compressed caches, and the window records that rows from the hit on may read.

    With `last_window` only those that rows behind the last one may read.
    """
    alone = run_single(seven(), cold_steps(steps))
    hits = {one.request: one.hit for step in steps.rows for one in step.requests}
    for request, want in alone.records.items():
        got, hit = found.records[request], hits[request]
        assert got.keys() == want.keys()
        for name, expected in want.items():
            records = got[name]
            assert records.shape == expected.shape, name
            if name.startswith("window"):
                first = max(len(expected) - WINDOW_SIZE, 0)
                newest = slice(first, None)
                assert same_bits(records[newest], expected[newest]), f"{name} of {request}"
                if last_window:
                    continue
                first = 0 if hit is None else max(hit.num_tokens - HOP, 0)
                # Blocks that the window has left may be given back; they read as zeros.
                mapped = first + (records[first:] != 0).any(dim=1).nonzero()[:, 0]
                records, expected = records[mapped], expected[mapped]
            assert same_bits(records, expected), f"{name} of {request}"
    for step, logits in zip(steps.rows, found.logits, strict=True):
        wanted = [
            alone.logits[one.request][position]
            for one in step.requests
            for position in range(one.seq_len - one.num_logits, one.seq_len)
        ]
        assert len(logits) == len(wanted)
        assert not wanted or same_bits(logits, torch.stack(wanted))


# --- replay -------------------------------------------------------------------------------------


@FEW
@given(
    schedule=shared_prefixes("bounded"),
    parallel=parallel_sizes(tp_sizes=(1, 2), pcp_sizes=(2, 3, 4)),
    strategies=st.lists(partition_strategies(), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_bounded_replay_on_any_layout(
    schedule: tuple[RaggedBatch, ...],
    parallel: ParallelConfig,
    strategies: list[PartitionStrategy],
    seed: int,
) -> None:
    """Invariant 29."""
    check_ranks(assembled(schedule, seed), parallel, strategies)


@FEW
@given(
    schedule=shared_prefixes("exact"),
    parallel=parallel_sizes(tp_sizes=(1, 2), pcp_sizes=(1, 2, 3, 4)),
    strategies=st.lists(partition_strategies(), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_exact_replay_on_any_layout(
    schedule: tuple[RaggedBatch, ...],
    parallel: ParallelConfig,
    strategies: list[PartitionStrategy],
    seed: int,
) -> None:
    steps = assembled(schedule, seed)
    assert_cold(steps, check_ranks(steps, parallel, strategies))


MIXED_HITS = {
    # Only the first ranks hold rows below the hit; a decode of the donor beside.
    "long suffix": beside(chunked(0, [24], decodes=3), chunked(1, [40], bounded(12), 1)),
    # Steps of replayed rows alone: no slot, no logits; then the rest.
    "small budget": beside(chunked(0, [61], decodes=2), chunked(1, [3, 3, 2, 1, 5], bounded(60))),
    "two hits and a cold prefill": beside(
        chunked(0, [64], decodes=1),
        chunked(1, [20], exact(60), 2),
        chunked(2, [7, 30, 8], bounded(48)),
        chunked(3, [9, 4], None, 1),
    ),
}


@pytest.mark.parametrize("pcp_size", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(MIXED_HITS))
def test_hits_beside_other_rows(name: str, pcp_size: int) -> None:
    steps = assembled(MIXED_HITS[name], 3)
    strategy = STRATEGIES[sorted(STRATEGIES)[(pcp_size + len(name)) % 3]]
    found = check_ranks(steps, ParallelConfig(pcp_size=pcp_size, expert_parallel=True), [strategy])
    assert all(bool(one.isfinite().all()) for one in found.logits)


def test_bounded_replay_is_not_the_cold_run() -> None:
    """So the comparison with a cold run can fail."""
    steps = assembled(MIXED_HITS["small budget"], 3)
    with pytest.raises(AssertionError, match="of 1"):
        assert_cold(steps, run_single(seven(), steps))


def test_only_some_ranks_hold_replayed_rows() -> None:
    """Hit 12, 40 rows on four ranks: rows below 12 are on the first ranks only."""
    steps = assembled(MIXED_HITS["long suffix"], 0)
    found = run_ranks(seven(), ParallelConfig(pcp_size=4), steps, [dual_chunk_swap])
    names = [one.request for one in steps.rows[1].requests]
    counts = [
        int(((part.row_request == names.index(1)) & (part.positions < 12)).sum())
        for part in (run.plans[1].layer_rows(0) for run in found)
    ]
    assert counts == [5, 3, 0, 0]


def test_a_layer_without_rows_is_skipped_on_all_ranks() -> None:
    """The first chunks of an exact replay end below the upper layers' starts: fewer collectives."""
    hit = exact(64)
    assert hit.layer_starts == (15, 22, 29, 36, 43, 50, 57)
    steps = assembled(beside(chunked(0, [64]), chunked(1, [5, 9, 40, 6], hit, 1)), 5)
    parallel = ParallelConfig(tp_size=2, pcp_size=2, expert_parallel=True)
    assert_cold(steps, check_ranks(steps, parallel, [levelled]))
    found = run_ranks(seven(), parallel, steps, [levelled])
    running = [
        sum(plan.layer_rows(layer).num_padded_rows > 0 for layer in range(NUM_LAYERS))
        for plan in found[0].plans
    ]
    assert running == [7, 1, 2, 7, 7, 7]
    assert len(found[0].calls[1]) < len(found[0].calls[0])
    for run in found[1:]:
        order = [[(call.group, call.op) for call in calls] for calls in run.calls]
        assert order == [[(call.group, call.op) for call in calls] for calls in found[0].calls]
    pcp = [[call for call in run.calls[1] if call.group == "pcp"] for run in found]
    assert_same_calls(pcp)


# --- trim ---------------------------------------------------------------------------------------


@st.composite
def trimmed_schedules(draw: st.DrawFn) -> tuple[RaggedBatch, ...]:
    """Prompts in long and short chunks, decodes behind them, sometimes an exact hit."""
    prompt = draw(st.integers(8, 64))
    others = [chunked(1, draw(chunk_splits(draw(st.integers(1, 60)), max_chunks=3)), None, 2)]
    if draw(st.booleans()):
        hit = exact(4 * draw(st.integers(1, prompt // 4)))
        count = hit.num_tokens + draw(st.integers(1, 40)) - hit.layer_starts[0]
        others.append(chunked(2, draw(chunk_splits(count, max_chunks=3)), hit, 1))
    donor = chunked(0, [prompt], decodes=draw(st.integers(0, 3)))
    return tuple(may_trim(beside(donor, *others)))


@FEW
@given(
    schedule=trimmed_schedules(),
    parallel=parallel_sizes(tp_sizes=(1, 2), pcp_sizes=(1, 2, 3, 4)),
    strategies=st.lists(partition_strategies(), min_size=1, max_size=2),
    seed=st.integers(0, 2**16),
)
@example(
    schedule=tuple(may_trim(beside(chunked(0, [64], decodes=2), chunked(1, [50, 3], None, 2)))),
    parallel=ParallelConfig(pcp_size=4, expert_parallel=True),
    strategies=[dual_chunk_swap],
    seed=0,
)
def test_exact_trim_on_any_layout(
    schedule: tuple[RaggedBatch, ...],
    parallel: ParallelConfig,
    strategies: list[PartitionStrategy],
    seed: int,
) -> None:
    """Nothing that is read later differs from an untrimmed cold run."""
    steps = assembled(schedule, seed)
    found = check_ranks(steps, parallel, strategies, EXACT_TRIM)
    assert_cold(steps, found, last_window=True)


@FEW
@given(
    schedule=trimmed_schedules(),
    parallel=parallel_sizes(tp_sizes=(1, 2), pcp_sizes=(2, 3, 4)),
    strategies=st.lists(partition_strategies(), min_size=1, max_size=2),
    seed=st.integers(0, 2**16),
)
def test_bounded_trim_on_any_layout(
    schedule: tuple[RaggedBatch, ...],
    parallel: ParallelConfig,
    strategies: list[PartitionStrategy],
    seed: int,
) -> None:
    """An approximation, but the same one on any number of ranks."""
    check_ranks(
        assembled(schedule, seed), parallel, strategies, replace(EXACT_TRIM, mode="bounded")
    )


@pytest.mark.parametrize("mode", ["exact", "bounded"])
def test_trimmed_layers_have_fewer_rows(mode: TrimMode) -> None:
    schedule = may_trim([RaggedBatch(requests=(rows(0, 0, 60), rows(1, 9, 1, decode=True)))])
    steps, trim = assembled(schedule, 0), replace(EXACT_TRIM, mode=mode)
    plain, trimmed = (
        [
            seven().plan(steps.cache, steps.batches[0], dual_chunk_swap, 2, rank, one)
            for rank in (0, 1)
        ]
        for one in (None, trim)
    )
    counts = [
        sum(plan.layer_rows(layer).num_rows for plan in trimmed) for layer in range(NUM_LAYERS)
    ]
    upper = [WINDOW_SIZE + 2 * HOP, WINDOW_SIZE + HOP, WINDOW_SIZE]
    kept = upper if mode == "exact" else [WINDOW_SIZE] * 3
    assert counts == [61] * 4 + [1 + count for count in kept]
    assert sum(plan.layer_rows(6).num_rows for plan in plain) == 61
