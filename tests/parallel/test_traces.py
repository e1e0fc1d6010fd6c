"""The collectives of a step: foretold by the plan, in step on all ranks, none for metadata.

Every run of tests/parallel/test_invariance.py compares its trace with the plan's, too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.config import CacheConfig, ParallelConfig
from pcpkit.formats import MXFP4, MXFP8, NVFP4
from pcpkit.parallel.tp import Reduce
from pcpkit.parallel.trace import Call
from pcpkit.plan.partition import PartitionStrategy, dual_chunk_swap
from pcpkit.plan.trace import expected_trace
from pcpkit.plan.trim import Trim, TrimMode
from pcpkit.testing.batches import RaggedBatch, RequestRows, assemble_steps
from pcpkit.testing.strategies import (
    cache_layouts,
    parallel_sizes,
    partition_strategies,
    ragged_batches,
    step_schedules,
)

from .micro import (
    LAYOUT,
    RELEASED_LAYERS,
    VOCAB_SIZE,
    WINDOW_SIZE,
    Micro,
    assert_in_step,
    assert_traces,
    micro,
    run_ranks,
)

BOTH = ParallelConfig(tp_size=2, pcp_size=2, expert_parallel=True)
MOST = {"window": 40, "records": 4, "last rows": 3, "MoE": 80, "logits": 1}
"""PCP collectives of a step of the released schedule (issue 4, P5)."""


@cache
def released() -> Micro:
    """Tiny layers in the released order."""
    return Micro(RELEASED_LAYERS, num_experts=8)


def traces_of(
    model: Micro,
    rows: RaggedBatch,
    layout: CacheConfig,
    parallel: ParallelConfig,
    strategy: PartitionStrategy,
    reduce: Reduce,
    trim: Trim | None = None,
) -> list[list[Call]]:
    """What the plans foretell, by rank; nothing runs."""
    steps = assemble_steps([rows], layout, vocab_size=VOCAB_SIZE)
    return [
        expected_trace(
            model.config,
            parallel,
            model.plan(
                steps.cache,
                steps.batches[0],
                strategy,
                parallel.pcp_size,
                rank // parallel.tp_size,
                trim,
            ),
            compressed_record=steps.cache.compressed_format,
            reduce=reduce,
        )
        for rank in range(parallel.world_size)
    ]


def pcp_kinds(model: Micro, calls: list[Call]) -> dict[str, int]:
    """PCP collectives by what travels, told by dtype and row width; unknown ones are an error."""
    config = model.config
    state = MXFP4.record_bytes(config.index_head_dim)
    kinds = {
        ("all_gather", torch.uint8, MXFP8.record_bytes(config.head_dim)): "window",
        ("all_gather", torch.uint8, NVFP4.record_bytes(config.head_dim) + state): "records",
        ("all_gather", torch.uint8, MXFP8.record_bytes(config.head_dim) + state): "records",
        ("all_gather", torch.float32, 2 * config.head_dim): "last rows",
        (
            "all_gather",
            torch.uint8,
            2 * config.hidden_size + 8 * config.num_experts_per_tok,
        ): "MoE",
        ("reduce_scatter", torch.int32, config.hidden_size // 2): "MoE",
        ("reduce_scatter", torch.float32, config.hidden_size): "MoE",
        ("all_gather", torch.bfloat16, config.hidden_size): "logits",
    }
    assert len({kind[1:] for kind in kinds if kind[0] == "all_gather"}) == 6, "sizes tell apart"
    found = [kinds[call.op, call.dtype, call.shape[-1]] for call in calls if call.group == "pcp"]
    return dict(Counter(found))


@given(
    rows=ragged_batches(),
    layout=cache_layouts(),
    parallel=parallel_sizes(max_ranks=32),
    strategy=partition_strategies(),
    reduce=st.sampled_from(["ordered", "fast"]),
)
def test_plans_of_all_ranks_foretell_calls_in_step(
    rows: RaggedBatch,
    layout: CacheConfig,
    parallel: ParallelConfig,
    strategy: PartitionStrategy,
    reduce: Reduce,
) -> None:
    """Also of ranks without rows; the shapes follow from sizes that are equal on all ranks."""
    traces = traces_of(micro(), rows, layout, parallel, strategy, reduce)
    assert_in_step(parallel, traces)
    padded = {call.shape[0] for call in traces[0] if call.dtype == torch.uint8}
    assert max(padded, default=0) <= rows.num_tokens, "nothing is longer than the batch"


@given(
    rows=ragged_batches(),
    layout=cache_layouts(),
    pcp_size=st.integers(2, 8),
    strategy=partition_strategies(),
    expert_parallel=st.booleans(),
    reduce=st.sampled_from(["ordered", "fast"]),
)
def test_released_schedule_needs_few_collectives(
    rows: RaggedBatch,
    layout: CacheConfig,
    pcp_size: int,
    strategy: PartitionStrategy,
    expert_parallel: bool,
    reduce: Reduce,
) -> None:
    """Any batch: the same calls, whatever it holds, and each of them carries content."""
    parallel = ParallelConfig(pcp_size=pcp_size, expert_parallel=expert_parallel)
    calls = traces_of(released(), rows, layout, parallel, strategy, reduce)[0]
    expected = MOST if expert_parallel else {k: v for k, v in MOST.items() if k != "MoE"}
    assert pcp_kinds(released(), calls) == expected
    assert len(calls) <= 40 + 4 + 3 + 2 * 40 + 1


@given(
    schedule=step_schedules(max_requests=3, num_layers=5),
    layout=cache_layouts(),
    parallel=parallel_sizes(max_ranks=16),
    strategy=partition_strategies(),
    reduce=st.sampled_from(["ordered", "fast"]),
    mode=st.sampled_from(["exact", "bounded"]),
)
def test_replay_and_trim_add_no_collective(
    schedule: tuple[RaggedBatch, ...],
    layout: CacheConfig,
    parallel: ParallelConfig,
    strategy: PartitionStrategy,
    reduce: Reduce,
    mode: TrimMode,
) -> None:
    """All ranks still agree; a step has the calls of the same step without them, or fewer."""
    trim = Trim(mode=mode, cut=3, num_layers=5, sliding_window=WINDOW_SIZE)
    for rows in schedule[:3]:
        traces = traces_of(micro(), rows, layout, parallel, strategy, reduce, trim)
        assert_in_step(parallel, traces)
        plain = RaggedBatch(
            requests=tuple(replace(one, hit=None, may_trim=False) for one in rows.requests)
        )
        expected = traces_of(micro(), plain, layout, parallel, strategy, reduce)
        for calls, more in zip(traces, expected, strict=True):
            assert len(calls) <= len(more)
            assert sum(map(num_items, calls)) <= sum(map(num_items, more))


def num_items(call: Call) -> int:
    return prod(call.shape)


def request(name: int, computed: int, count: int, *, decode: bool = False) -> RequestRows:
    return RequestRows(
        request=name,
        num_computed_tokens=computed,
        query_len=count,
        is_prefilling=not decode,
        num_logits=1,
    )


@pytest.mark.parametrize("reduce", ["ordered", "fast"])
@pytest.mark.parametrize(
    "parallel", [ParallelConfig(pcp_size=2, expert_parallel=True), ParallelConfig(tp_size=2), BOTH]
)
def test_a_step_of_the_released_schedule_calls_what_was_foretold(
    parallel: ParallelConfig, reduce: Reduce
) -> None:
    """Forty layers run; one request prefills, one decodes, so PCP ranks hold different rows."""
    batch = RaggedBatch(requests=(request(0, 0, 5), request(1, 0, 1, decode=True)))
    steps = assemble_steps([batch], LAYOUT, vocab_size=VOCAB_SIZE)
    runs = run_ranks(
        released(), parallel, steps, [dual_chunk_swap], reduce=reduce, numerics="weight_only"
    )
    assert_traces(released(), parallel, steps, runs, reduce)
    if parallel.pcp_size > 1:
        assert pcp_kinds(released(), runs[0].calls[0]) == MOST


def test_one_rank_needs_nobody() -> None:
    batch = RaggedBatch(requests=(request(0, 0, 3),))
    assert traces_of(
        micro(), batch, LAYOUT, ParallelConfig(expert_parallel=True), dual_chunk_swap, "fast"
    ) == [[]]


def test_shapes_by_hand() -> None:
    """Five layers, PCP 2 with expert parallelism: one prefill of 3 rows, chunks of 1, 1, 1."""
    batch = RaggedBatch(requests=(request(0, 0, 3),))
    parallel = ParallelConfig(pcp_size=2, expert_parallel=True)
    calls = traces_of(micro(), batch, LAYOUT, parallel, dual_chunk_swap, "ordered")[0]
    window = Call("pcp", "all_gather", (2, 66), torch.uint8)
    experts = [
        Call("pcp", "all_gather", (2, 144), torch.uint8),
        Call("pcp", "reduce_scatter", (2, 2, 2, 32), torch.int32),
    ]
    # Rank 1 owns positions 1 and 2 as two segments; 1 closes a pair. 36 + 34 bytes a state.
    last_rows = Call("pcp", "all_gather", (2, 128), torch.float32)
    pairs = Call("pcp", "all_gather", (1, 70), torch.uint8)
    singles = Call("pcp", "all_gather", (2, 70), torch.uint8)
    assert calls == [
        *[window, *experts],
        *[window, last_rows, pairs, *experts],
        *[window, *experts],
        *[window, singles, *experts],
        *[window, *experts],
        Call("pcp", "all_gather", (1, 64), torch.bfloat16),
    ]
