"""Expert parallelism: every row meets its experts wherever they are, padding meets none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.config import ParallelConfig
from pcpkit.kernels.expert_outputs import expert_outputs, sum_outputs
from pcpkit.kernels.experts import routed_experts
from pcpkit.model import moe
from pcpkit.parallel import pcp
from pcpkit.parallel.ep import gather_routed, return_outputs, return_sums
from pcpkit.parallel.groups import Groups
from pcpkit.parallel.trace import Call, TracedGroup
from pcpkit.parallel.virtual import run_virtual_ranks
from pcpkit.plan.partition import levelled
from pcpkit.testing.batches import RaggedBatch
from pcpkit.testing.compare import assert_same_calls, same_bits
from pcpkit.testing.strategies import parallel_sizes
from tests.kernels.inputs_experts import ExpertInputs, draw_experts

from .micro import micro, run_ranks
from .schedules import assembled, rows

NUM_EXPERTS, TOP_K, HIDDEN = 24, 2, 64
few = settings(max_examples=max(10, settings().max_examples // 5))
# 24 experts can be dealt to 1, 2, 3, 4, 6 or 8 ranks; TP x PCP = 4 x 3 is left out.
parallels = parallel_sizes(max_ranks=8).map(lambda one: replace(one, expert_parallel=True))


@st.composite
def row_counts(draw: st.DrawFn, size: int) -> list[int]:
    return draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))


class Ranks:
    """Rows of one batch, dealt to PCP ranks as told, and the experts that each rank owns."""

    def __init__(self, parallel: ParallelConfig, counts: list[int], seed: int) -> None:
        self.parallel, self.counts = parallel, counts
        self.num_padded = max(counts)
        self.inputs = draw_experts(
            sum(counts),
            num_experts=NUM_EXPERTS,
            top_k=TOP_K,
            hidden=HIDDEN,
            inter=32,
            quantize=False,
            seed=seed,
        )
        flags = [[j < count for j in range(self.num_padded)] for count in counts]
        self.is_row = torch.tensor(flags, dtype=torch.bool).flatten()

    def rows(self, pcp_rank: int) -> slice:
        first = sum(self.counts[:pcp_rank])
        return slice(first, first + self.counts[pcp_rank])

    def call(self, groups: Groups) -> ExpertInputs:
        """The rank's call of an expert kernel: everyone's rows, its own experts."""
        count = NUM_EXPERTS // groups.ep.size
        first = groups.ep.rank * count
        x, ids, weights = self.gather(groups)
        stacks = {
            name: tuple(tensor[first : first + count] for tensor in getattr(self.inputs, name))
            for name in ("w1", "w3", "w2")
        }
        return replace(self.inputs, x=x, ids=ids, weights=weights, first_expert=first, **stacks)

    def gather(self, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
        mine, one = self.rows(groups.pcp.rank), self.inputs
        return gather_routed(
            groups, one.x[mine], one.ids[mine], one.weights[mine], self.num_padded, self.is_row
        )


def outputs_of(ranks: Ranks, groups: Groups) -> Tensor:
    """The ordered way: outputs travel, the owner adds them."""
    outputs = expert_outputs(*ranks.call(groups).args)
    return return_outputs(groups, outputs, ranks.counts[groups.pcp.rank])


@few
@given(parallel=parallels, data=st.data(), seed=st.integers(0, 2**16))
def test_gathered_rows_and_routes(parallel: ParallelConfig, data: st.DataObject, seed: int) -> None:
    """Rank-major, every bit kept (also NaN weights), padding routed nowhere; one call."""
    ranks = Ranks(parallel, data.draw(row_counts(parallel.pcp_size)), seed)
    ranks.inputs.weights[::2] = torch.nan
    traces: list[list[Call]] = [[] for _ in range(parallel.world_size)]

    def body(rank: int, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
        return ranks.gather(replace(groups, pcp=TracedGroup(groups.pcp, traces[rank])))

    one = ranks.inputs
    for x, ids, weights in run_virtual_ranks(parallel, body, deadline_s=20):
        assert same_bits(x[ranks.is_row], one.x)
        assert torch.equal(ids[ranks.is_row], one.ids)
        assert same_bits(weights[ranks.is_row], one.weights)
        assert bool((ids[~ranks.is_row] == -1).all())
        assert len(x) == parallel.pcp_size * ranks.num_padded, "invariant 38: P x n rows"
    width = 2 * HIDDEN + 8 * TOP_K
    shape = (ranks.num_padded, width)
    assert_same_calls(traces, [Call("pcp", "all_gather", shape, torch.uint8)])


@few
@given(parallel=parallels, data=st.data(), seed=st.integers(0, 2**16))
def test_ordered_sum_is_that_of_one_rank(
    parallel: ParallelConfig, data: st.DataObject, seed: int
) -> None:
    ranks = Ranks(parallel, data.draw(row_counts(parallel.pcp_size)), seed)
    expected = routed_experts(*ranks.inputs.args)
    want = expert_outputs(*ranks.inputs.args)

    def body(rank: int, groups: Groups) -> tuple[Tensor, Tensor]:
        outputs = outputs_of(ranks, groups)
        return outputs, sum_outputs(outputs)

    for rank, (outputs, total) in enumerate(run_virtual_ranks(parallel, body, deadline_s=20)):
        mine = ranks.rows(rank // parallel.tp_size)
        assert same_bits(outputs, want[mine])
        assert same_bits(total, expected[mine])


@few
@given(parallel=parallels, data=st.data(), seed=st.integers(0, 2**16))
def test_fast_sum_is_near_that_of_one_rank(
    parallel: ParallelConfig, data: st.DataObject, seed: int
) -> None:
    """Two outputs a row: their FP32 sum has no order, but a rank may start from -0."""
    ranks = Ranks(parallel, data.draw(row_counts(parallel.pcp_size)), seed)
    expected = routed_experts(*ranks.inputs.args)

    def body(rank: int, groups: Groups) -> Tensor:
        sums = routed_experts(*ranks.call(groups).args)
        return return_sums(groups, sums, ranks.counts[groups.pcp.rank])

    for rank, total in enumerate(run_virtual_ranks(parallel, body, deadline_s=20)):
        assert torch.equal(total, expected[ranks.rows(rank // parallel.tp_size)])


@pytest.mark.parametrize("filler", [0xFF, 0x7F, 0x01])
def test_contents_of_padding_do_not_matter(filler: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 37: NaN or any other row in the place of padding, routed to whatever expert."""
    parallel = ParallelConfig(tp_size=2, pcp_size=3, expert_parallel=True)
    ranks = Ranks(parallel, [3, 0, 1], seed=1)

    def filled(rows: Tensor, num_rows: int) -> Tensor:
        missing = num_rows - rows.shape[0]
        rest = rows.new_empty(missing, *rows.shape[1:])
        rest.view(torch.uint8).fill_(filler)
        return torch.cat([rows, rest])

    monkeypatch.setattr(pcp, "pad_rows", filled)

    def body(rank: int, groups: Groups) -> tuple[Tensor, Tensor]:
        padding = ranks.gather(groups)[0][~ranks.is_row]
        assert bool((padding.view(torch.uint8) == filler).all()), "the filler arrived"
        return padding, outputs_of(ranks, groups)

    want = expert_outputs(*ranks.inputs.args)
    for rank, (_, outputs) in enumerate(run_virtual_ranks(parallel, body, deadline_s=20)):
        assert same_bits(outputs, want[ranks.rows(rank // 2)])


def test_two_pcp_calls_a_layer() -> None:
    """One brings rows to the experts, one brings outputs back; ranks without rows make both."""
    parallel = ParallelConfig(pcp_size=4, expert_parallel=True)
    ranks = Ranks(parallel, [1, 0, 0, 0], seed=2)
    traces: list[list[Call]] = [[] for _ in range(4)]

    def body(rank: int, groups: Groups) -> Tensor:
        return outputs_of(ranks, replace(groups, pcp=TracedGroup(groups.pcp, traces[rank])))

    run_virtual_ranks(parallel, body, deadline_s=20)
    assert_same_calls(traces)
    assert [call.op for call in traces[0]] == ["all_gather", "reduce_scatter"]


def test_experts_without_rows() -> None:
    """All rows go to the experts of the last rank; the others compute nothing and send zeros."""
    parallel = ParallelConfig(tp_size=2, pcp_size=2, expert_parallel=True)
    ranks = Ranks(parallel, [2, 1], seed=3)
    ranks.inputs.ids[:] = torch.tensor([NUM_EXPERTS - 2, NUM_EXPERTS - 1])
    want = expert_outputs(*ranks.inputs.args)
    found = run_virtual_ranks(parallel, lambda _, groups: outputs_of(ranks, groups), deadline_s=20)
    for rank, outputs in enumerate(found):
        assert same_bits(outputs, want[ranks.rows(rank // 2)])


def test_the_model_routes_padding_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine rows on two ranks, five and four: nine routed rows and one that is not, per layer."""
    seen: list[Tensor] = []

    def watched(x: Tensor, ids: Tensor, *rest: Any) -> Tensor:
        seen.append(ids)
        return expert_outputs(x, ids, *rest)

    monkeypatch.setattr(moe, "expert_outputs", watched)
    steps = assembled((RaggedBatch(requests=(rows(0, 0, 9),)),), seed=0)
    parallel = ParallelConfig(pcp_size=2, expert_parallel=True)
    run_ranks(micro(), parallel, steps, [levelled], numerics="weight_only")
    assert len(seen) == 2 * micro().config.num_hidden_layers
    for ids in seen:
        assert ids.shape[0] == 10, "invariant 38: buffers follow the rows that arrive"
        assert (ids < 0).all(dim=1).tolist() == [False] * 9 + [True]
