"""Traces: every call is recorded as it is made, and passed on unchanged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.config import ParallelConfig
from pcpkit.parallel.groups import Group, Groups, SingleRank
from pcpkit.parallel.trace import Call, TracedGroup
from pcpkit.parallel.virtual import run_virtual_ranks
from pcpkit.testing.compare import assert_same_calls

SIZE = 3
calls = st.lists(
    st.tuples(
        st.sampled_from(["all_gather", "all_reduce", "reduce_scatter"]),
        st.integers(0, 4),
        st.sampled_from([torch.uint8, torch.int64, torch.bfloat16, torch.float32]),
    ),
    max_size=6,
)


@given(plan=calls)
def test_trace_is_what_was_called(plan: list[tuple[str, int, torch.dtype]]) -> None:
    """Also zero rows, and results as without a trace."""
    traces: list[list[Call]] = [[] for _ in range(SIZE)]

    def body(rank: int, groups: Groups) -> None:
        traced = TracedGroup(groups.pcp, traces[rank])
        assert (traced.name, traced.rank, traced.size) == ("pcp", rank, SIZE)
        for op, rows, dtype in plan:
            tensor = torch.full((SIZE, rows), rank, dtype=dtype)
            got, want = (getattr(group, op)(tensor) for group in (traced, groups.pcp))
            assert torch.equal(got, want)

    run_virtual_ranks(ParallelConfig(pcp_size=SIZE), body, deadline_s=20)
    assert_same_calls(traces, [Call("pcp", op, (SIZE, rows), dtype) for op, rows, dtype in plan])


def test_groups_of_a_rank_may_share_a_trace() -> None:
    """The order over groups is kept, and calls of one-rank groups count."""
    traces: dict[int, list[Call]] = {0: [], 1: []}

    def body(rank: int, groups: Groups) -> None:
        record = traces[rank]
        tp, pcp = (TracedGroup(group, record) for group in (groups.tp, groups.pcp))
        pcp.all_gather(torch.zeros(2))
        tp.all_reduce(torch.zeros(1).int())
        pcp.reduce_scatter(torch.zeros(2, 4))

    run_virtual_ranks(ParallelConfig(pcp_size=2), body, deadline_s=20)
    expected = [
        Call("pcp", "all_gather", (2,), torch.float32),
        Call("tp", "all_reduce", (1,), torch.int32),
        Call("pcp", "reduce_scatter", (2, 4), torch.float32),
    ]
    assert traces == {0: expected, 1: expected}


def test_a_call_that_fails_is_recorded_first() -> None:
    record: list[Call] = []
    group: Group = TracedGroup(SingleRank("ep"), record)
    with pytest.raises(ValueError, match="one part a rank"):
        group.reduce_scatter(torch.zeros(2))
    assert record == [Call("ep", "reduce_scatter", (2,), torch.float32)]
