"""Which data meets which, over any schedule on any ranks: exact, on hashes instead of a model.

Invariants 10 to 13, 34 and 37 of pcp-spec section 10, each with a profile's full count of examples.
A run executes the real plans of all its ranks (tests/parallel/hashed_forward.py) and fails if their
pools are not equal after every layer of every step, so each test here shows invariant 10. That the
model itself keeps the bits is shown with fewer examples in test_invariance.py and test_replay.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from pcpkit.config import CacheConfig
from pcpkit.plan.partition import PartitionStrategy, Segment, dual_chunk_swap
from pcpkit.plan.trim import Trim, TrimMode
from pcpkit.testing.batches import RaggedBatch, RequestRows, Steps, assemble_steps
from pcpkit.testing.strategies import partition_strategies, step_schedules, step_sequences

from .hashed_forward import (
    CUT,
    EXPERT,
    NUM_LAYERS,
    PAIR,
    RATIOS,
    SOURCES,
    WINDOW,
    HashedRun,
    Words,
    combine,
    fold,
    records_of,
    run_hashed,
)

EXACT = Trim(mode="exact", cut=CUT, num_layers=NUM_LAYERS, sliding_window=WINDOW)
BOUNDED = replace(EXACT, mode="bounded")
ONE_RANK = [dual_chunk_swap]

sizes = st.sampled_from([2, 1, 3, 4, 8])
dealings = st.lists(partition_strategies(), min_size=1, max_size=3)
trims = st.sampled_from([None, EXACT, BOUNDED])
mixed = step_sequences(
    step_schedules(
        max_requests=3, max_prompt=18, max_decodes=2, max_drafts=2, num_layers=NUM_LAYERS
    ),
    window_size=WINDOW,
)
"""Chunks, decodes and drafts, preemption, hits, and rows that may be trimmed."""
cold = step_sequences(
    step_schedules(max_requests=3, max_prompt=20, max_decodes=3, max_drafts=2), window_size=WINDOW
)
decoding = step_sequences(
    step_schedules(max_requests=4, max_prompt=4, max_decodes=3, num_layers=NUM_LAYERS),
    window_size=WINDOW,
)


def assert_same_run(found: HashedRun, expected: HashedRun) -> None:
    """Logits, and every word of the pools after every step."""
    for step, (got, want) in enumerate(zip(found.logits, expected.logits, strict=True)):
        assert np.array_equal(got, want), f"logits of step {step}"
    for step, (got, want) in enumerate(zip(found.caches, expected.caches, strict=True)):
        assert_same_words(got, want, f"after step {step}")


def assert_same_words(found: dict[str, Words], expected: dict[str, Words], when: str) -> None:
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        assert np.array_equal(found[name], want), f"{name} {when}"


# --- invariants 10, 11, 12 ----------------------------------------------------------------------


@given(steps=mixed, size=sizes, strategies=dealings, trim=trims)
def test_any_number_of_ranks(
    steps: Steps, size: int, strategies: list[PartitionStrategy], trim: Trim | None
) -> None:
    """Invariants 10 and 11; the yardstick also plans without dropping idle bounds."""
    found = run_hashed(steps, size, strategies, salt=1, trim=trim)
    expected = run_hashed(steps, 1, ONE_RANK, salt=2, trim=trim, sliding_window=None)
    assert_same_run(found, expected)


def moved_decodes(strategy: PartitionStrategy, seed: int) -> PartitionStrategy:
    """The same prefill rows on every rank, decodes on any rank."""

    def deal(
        query_lens: Sequence[int], is_prefilling: Sequence[bool], size: int
    ) -> list[list[Segment]]:
        source = random.Random(repr((seed, list(query_lens))))
        dealt = strategy(query_lens, is_prefilling, size)
        ranks = [[one for one in mine if is_prefilling[one.request]] for mine in dealt]
        for one in sorted(one for mine in dealt for one in mine):
            if not is_prefilling[one.request]:
                source.choice(ranks).append(one)
        return ranks

    return deal


@given(
    steps=decoding,
    size=sizes.filter(lambda size: size > 1),
    strategies=dealings,
    seeds=st.lists(st.integers(0, 99), min_size=3, max_size=3),
)
def test_any_owner_of_a_decode(
    steps: Steps, size: int, strategies: list[PartitionStrategy], seeds: list[int]
) -> None:
    """Invariant 12: owners of decodes drawn anew for every step."""
    moved = [moved_decodes(strategies[i % len(strategies)], seed) for i, seed in enumerate(seeds)]
    kept = [strategies[i % len(strategies)] for i in range(len(seeds))]
    found = run_hashed(steps, size, moved, salt=1)
    assert_same_run(found, run_hashed(steps, size, kept, salt=2))


# --- invariant 13 -------------------------------------------------------------------------------


def whole_request(ids: Sequence[int]) -> tuple[dict[str, Words], Words]:
    """All records of a request, and its rows' last words, from the definitions and without a plan.

    A ring has every raw row here.
    """
    positions, records = np.arange(len(ids)), dict[str, Words]()
    history = np.array([-1, -1, -1, *ids])
    windows = np.stack([history[3 - back : len(history) - back] for back in range(4)], axis=1)
    tokens = fold(windows.astype(np.uint64), np.ones(windows.shape, np.bool_))
    values, groups = combine(np.array(ids, np.uint64)), np.empty(0, np.uint64)
    for layer, ratio in enumerate(RATIOS):
        raw = combine(values, positions.astype(np.uint64), layer)
        records[f"window.{layer}"] = raw
        if layer in SOURCES:
            odd, even = raw[ratio - 1 :: ratio], raw[: len(ids) // ratio * ratio : ratio]
            firsts = np.arange(len(odd), dtype=np.uint64) * np.uint64(ratio)
            groups = combine(combine(even, odd, PAIR) if ratio == 2 else odd, firsts)
            records[f"compressed.{layer}"] = groups
            records |= {f"ring.{layer}": raw} if ratio == 2 else {}
        where = positions[:, None] - np.arange(WINDOW)
        read: list[Words | int] = [fold(raw[np.maximum(where, 0)], where >= 0), 0]
        if ratio:
            visible = np.arange(len(groups)) < ((positions + 1) // ratio)[:, None]
            read[1] = fold(np.broadcast_to(groups, visible.shape), visible)
        attended = combine(values, tokens, *read, layer)
        values = combine(attended, combine(attended, EXPERT))
    return records, values


@given(steps=cold, size=sizes, strategies=dealings)
def test_any_chunks(steps: Steps, size: int, strategies: list[PartitionStrategy]) -> None:
    """Invariant 13: after every step, all that a request holds is that of a single chunk."""
    found = run_hashed(steps, size, strategies, salt=1)
    wholes = [whole_request(ids) for ids in steps.token_ids]
    for step, rows in enumerate(steps.rows):
        wanted = [
            wholes[one.request][1][one.seq_len - one.num_logits : one.seq_len]
            for one in rows.requests
        ]
        assert np.array_equal(found.logits[step], np.concatenate(wanted))
        for place, one in enumerate(rows.requests):
            for name, words in records_of(steps, found, step, place).items():
                assert_like_whole(name, words, wholes[one.request][0][name], one.seq_len)


def assert_like_whole(name: str, words: Words, whole: Words, length: int) -> None:
    """A window may have left its first records behind; a ring counts while its pair is open."""
    if name.startswith("window"):
        kept = np.flatnonzero(words)
        assert kept.tolist()[-WINDOW:] == [*range(max(length - WINDOW, 0), length)], name
        assert np.array_equal(words[kept], whole[kept]), name
    elif name.startswith("compressed"):
        assert np.array_equal(words, whole[: len(words)]), name
    else:
        assert np.array_equal(words, whole[length - 1 : length - 1 + length % 2]), name


# --- invariant 34 -------------------------------------------------------------------------------


def check_trim(
    steps: Steps, size: int, strategies: list[PartitionStrategy], mode: TrimMode
) -> tuple[HashedRun, HashedRun]:
    """Runs with and without; all caches up to the cut are the same, word for word."""
    trim = EXACT if mode == "exact" else BOUNDED
    found = run_hashed(steps, size, strategies, salt=1, trim=trim)
    whole = run_hashed(steps, 1, ONE_RANK, salt=2)
    for step, (got, want) in enumerate(zip(found.caches, whole.caches, strict=True)):
        names = [name for name in want if int(name.split(".")[1]) <= CUT]
        assert len(names) == CUT + 1 + 2 + 1
        for name in names:
            assert np.array_equal(got[name], want[name]), f"{name} after step {step}"
    return found, whole


@given(steps=mixed, size=sizes, strategies=dealings)
def test_exact_trim(steps: Steps, size: int, strategies: list[PartitionStrategy]) -> None:
    """Invariant 34; besides, logits and all window records that a later row reads."""
    found, whole = check_trim(steps, size, strategies, "exact")
    for step, rows in enumerate(steps.rows):
        assert np.array_equal(found.logits[step], whole.logits[step]), f"logits of step {step}"
        for place, one in enumerate(rows.requests):
            got, want = (records_of(steps, run, step, place) for run in (found, whole))
            for layer in range(CUT + 1, NUM_LAYERS):
                name, first = f"window.{layer}", max(one.seq_len - WINDOW, 0)
                assert np.array_equal(got[name][first:], want[name][first:]), f"{name}, {step}"


@given(steps=mixed, size=sizes, strategies=dealings)
def test_bounded_trim(steps: Steps, size: int, strategies: list[PartitionStrategy]) -> None:
    """Invariant 34; that its approximation is the same on any ranks is in the first test."""
    check_trim(steps, size, strategies, "bounded")


# --- invariant 37 -------------------------------------------------------------------------------


def first_position(one: RequestRows, layer: int, trim: Trim | None) -> int:
    """Where a request starts in a layer, from the definitions (pcp-spec sections 5 and 6)."""
    start = 0 if one.hit is None else one.hit.layer_starts[layer]
    if trim is None or not one.may_trim or layer <= CUT:
        return start
    hops = NUM_LAYERS - 1 - layer if trim.mode == "exact" else 0
    first = one.seq_len - WINDOW - hops * (WINDOW - 1)
    return max(start, first) if first > one.num_computed_tokens else start


def two_prompts() -> Steps:
    """One that may be trimmed beside one that must not."""
    trimmed = RequestRows(
        request=0,
        num_computed_tokens=0,
        query_len=12,
        is_prefilling=True,
        num_logits=1,
        may_trim=True,
    )
    whole = replace(trimmed, request=1, may_trim=False)
    layout = CacheConfig(
        num_blocks=1, num_window_blocks=1, num_requests=1, block_size=4, window_block_size=4
    )
    return assemble_steps([RaggedBatch(requests=(trimmed, whole))], layout)


@given(steps=mixed, size=sizes, strategies=dealings, trim=trims)
@example(steps=two_prompts(), size=3, strategies=[dual_chunk_swap], trim=BOUNDED)
def test_padding_meets_no_expert(
    steps: Steps, size: int, strategies: list[PartitionStrategy], trim: Trim | None
) -> None:
    """Invariants 37 and 38: the router sees the rows that run, each once, and P x n in all.

    Two runs with different words in the padding have the same words everywhere else.
    """
    found = run_hashed(steps, size, strategies, salt=1, trim=trim)
    for rows, layers in zip(steps.rows, found.routed, strict=True):
        for layer in range(NUM_LAYERS):
            expected = [
                [one.request, position]
                for one in rows.requests
                for position in range(one.num_computed_tokens, one.seq_len)
                if position >= first_position(one, layer, trim)
            ]
            if layer >= len(layers):
                assert not expected, f"layer {layer} did not run"
                continue
            seen = layers[layer]
            assert len(seen.places) % size == 0
            for is_row in seen.is_row:
                assert np.array_equal(is_row, seen.places[:, 0] >= 0)
                assert sorted(seen.places[is_row].tolist()) == sorted(expected)
    assert_same_run(found, run_hashed(steps, size, strategies, salt=2, trim=trim))
