"""The same bits on every layout: caches, ring and logits of a batch do not depend on its ranks.

Two yardsticks, both on one rank: the same steps, of which every byte of every pool must be equal
after every step (also the bytes nobody wrote, which are poison), and each prompt alone in one step.
Ranks are virtual; tests/parallel/test_collectives.py shows that real ones add up alike.
Invariants 10 to 16 of pcp-spec section 10; 14 to 16 are also in tests/plan/test_links.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pcpkit.config import CompressedFormat, ParallelConfig
from pcpkit.model.decoder import Numerics
from pcpkit.plan.partition import STRATEGIES, PartitionStrategy, dual_chunk_swap, levelled
from pcpkit.testing.batches import RaggedBatch, Steps
from pcpkit.testing.strategies import parallel_sizes, partition_strategies

from .micro import LAYOUT, RankRun, assert_traces, micro, run_ranks, run_single
from .schedules import (
    MIXED,
    assembled,
    assert_like_alone,
    assert_same_run,
    check,
    one_request,
    schedules,
    whole_prompts,
)

# An example is several steps of a whole model on up to eight ranks.
FEW = settings(max_examples=max(5, settings().max_examples // 40))
FEWER = settings(max_examples=max(3, settings().max_examples // 64))

PCP_SIZES = (1, 2, 3, 4, 8)
TP_SIZES = (1, 2, 4)
LAYOUTS = [
    ParallelConfig(tp_size=tp, pcp_size=pcp, expert_parallel=ep)
    for tp in TP_SIZES
    for pcp in PCP_SIZES
    for ep in (False, True)
]


# --- tests --------------------------------------------------------------------------------------


@FEW
@given(
    schedule=schedules(),
    parallel=parallel_sizes(),
    strategies=st.lists(partition_strategies(), min_size=1, max_size=3),
    numerics=st.sampled_from(get_args(Numerics)),
    record=st.sampled_from(get_args(CompressedFormat)),
    seed=st.integers(0, 2**16),
)
@example(
    schedule=one_request([1], 2),
    parallel=ParallelConfig(pcp_size=8, expert_parallel=True),
    strategies=[dual_chunk_swap],
    numerics="released",
    record="nvfp4",
    seed=0,
)
@example(
    schedule=one_request([13, 8], 1),
    parallel=ParallelConfig(tp_size=2, pcp_size=3),
    strategies=[levelled, dual_chunk_swap],
    numerics="released",
    record="mxfp8",
    seed=0,
)
def test_any_schedule_on_any_layout(
    schedule: tuple[RaggedBatch, ...],
    parallel: ParallelConfig,
    strategies: list[PartitionStrategy],
    numerics: Numerics,
    record: CompressedFormat,
    seed: int,
) -> None:
    """Ordered sums; who owns which rows, decodes included, may change from step to step."""
    steps = assembled(schedule, seed, replace(LAYOUT, compressed_format=record))
    found = check(micro(), parallel, steps, strategies, numerics=numerics)
    alone = run_single(micro(), whole_prompts(steps, seed), numerics=numerics)
    assert_like_alone(steps, found, alone)


@pytest.mark.parametrize("parallel", LAYOUTS, ids=lambda one: layout_name(one))
def test_every_layout(parallel: ParallelConfig) -> None:
    """TP x PCP x EP without gaps: 96 experts can be dealt to 12 and to 32 ranks."""
    # Quantized activations are row-local: for the largest worlds the cheaper numerics will do.
    numerics = "released" if parallel.world_size <= 8 else "weight_only"
    strategy = STRATEGIES[sorted(STRATEGIES)[parallel.world_size % len(STRATEGIES)]]
    check_mixed(parallel, strategy, numerics)


def check_mixed(parallel: ParallelConfig, strategy: PartitionStrategy, numerics: Numerics) -> None:
    steps, expected = mixed_on_one_rank(numerics)
    check(micro(96), parallel, steps, [strategy], numerics=numerics, expected=expected)


@cache
def mixed_on_one_rank(numerics: Numerics) -> tuple[Steps, RankRun]:
    steps = assembled(MIXED, 1)
    return steps, run_single(micro(96), steps, numerics=numerics)


def layout_name(parallel: ParallelConfig) -> str:
    ep = "ep" if parallel.expert_parallel else "no-ep"
    return f"tp{parallel.tp_size}-pcp{parallel.pcp_size}-{ep}"


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize("pcp_size", [2, 3, 4])
def test_every_named_strategy(name: str, pcp_size: int) -> None:
    """Chunk borders between pairs, between segments of one rank, and at the window."""
    check_mixed(ParallelConfig(pcp_size=pcp_size), STRATEGIES[name], "weight_only")


@FEWER
@given(
    schedule=schedules(),
    tp_size=st.sampled_from([1, 2]),
    pcp_size=st.sampled_from(PCP_SIZES[1:4]),
    strategy=partition_strategies(),
    seed=st.integers(0, 2**16),
)
def test_fast_sums_at_fixed_tp(
    schedule: tuple[RaggedBatch, ...],
    tp_size: int,
    pcp_size: int,
    strategy: PartitionStrategy,
    seed: int,
) -> None:
    """Without expert parallelism a row's sums are taken by its TP ranks alone, whatever PCP is."""
    steps = assembled(schedule, seed)
    narrow = ParallelConfig(tp_size=tp_size)
    expected = run_ranks(micro(), narrow, steps, reduce="fast", numerics="weight_only")[0]
    wide = replace(narrow, pcp_size=pcp_size)
    found = run_ranks(micro(), wide, steps, [strategy], reduce="fast", numerics="weight_only")
    for run in found:
        assert_same_run(run, expected)
    assert_traces(micro(), wide, steps, found, "fast")


def test_fast_sums_with_expert_parallelism_agree_between_ranks() -> None:
    """They may differ from one rank's by rounding, but never from one rank to the next."""
    steps = assembled(MIXED, 3)
    parallel = ParallelConfig(tp_size=2, pcp_size=2, expert_parallel=True)
    found = run_ranks(micro(), parallel, steps, reduce="fast")
    assert_traces(micro(), parallel, steps, found, "fast")
    first, *others = found
    for run in others:
        assert_same_run(run, first)
    expected = run_single(micro(), steps)
    for got, want in zip(first.logits, expected.logits, strict=True):
        assert float((got - want).norm() / want.norm()) < 0.1
