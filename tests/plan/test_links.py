"""Pair links against an oracle that knows every raw row, over random schedules and partitions.

Invariants 14 to 16 of pcp-spec section 10: each group is pooled once from its own two rows, the
ring of every rank holds the open row of each request, and recycled ring blocks leak nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.config import CacheConfig
from pcpkit.plan.batch import StepBatch, cached_tokens, row_positions, row_requests
from pcpkit.plan.links import PairLinks, link_layers
from pcpkit.plan.partition import Partition, dual_chunk_swap, make_partition, whole_batch
from pcpkit.plan.running import running_segments
from pcpkit.testing.batches import RaggedBatch, RequestRows, Steps, assemble_steps
from pcpkit.testing.compare import assert_replicas_equal
from pcpkit.testing.strategies import (
    cache_layouts,
    partitions,
    ragged_batches,
    step_schedules,
    step_sequences,
)

from .linking import link_pairs

NOTHING = -1
LAYOUT = CacheConfig(num_blocks=1, num_window_blocks=1, num_requests=1)


@dataclass(slots=True, kw_only=True)
class Oracle:
    """Ring replicas of all ranks, and the raw rows that every group should be made of."""

    ring_rows: int
    rings: list[Tensor]
    lives: dict[int, int] = field(default_factory=dict[int, int])
    closed: dict[int, int] = field(default_factory=dict[int, int])
    """By raw row of the odd token: that of the even one."""

    def raw(self, request: int, position: int) -> int:
        """The raw row, as a number that tells requests and their lives apart."""
        return (self.lives.get(request, 0) * 100 + request) * 1000 + position

    def run(
        self,
        rows: RaggedBatch,
        batch: StepBatch,
        partition: Partition,
        dropped: list[int] | None = None,
    ) -> None:
        """Pool, exchange and write one step the way the ranks do it, then look at everything.

        `dropped` first rows of each request do not run.
        """
        for one in rows.requests:
            if one.num_computed_tokens == 0:
                self.lives[one.request] = self.lives.get(one.request, 0) + 1
        raw = torch.tensor([self.raw(*place) for place in rows.places])
        positions, owners = row_positions(batch), row_requests(batch).long()
        closes = (positions % 2 == 1) & (positions >= cached_tokens(batch)[owners])
        first = batch.num_computed_tokens + torch.tensor(dropped or [0] * batch.num_reqs)
        runs = positions >= first[owners]
        local = [raw[mine[runs[mine]]] for mine in partition.rows]
        links = [
            self._links(batch, partition, rank, closes, dropped) for rank in range(partition.size)
        ]
        exchanged = torch.cat(
            [
                torch.where(one.last_rows >= 0, part[one.last_rows], NOTHING)
                if len(part)
                else torch.full_like(one.last_rows, NOTHING)
                for one, part in zip(links, local, strict=True)
            ]
        )
        for rank, one in enumerate(links):
            assert len(one.last_rows) == len(links[0].last_rows), "ranks exchange equally many"
            mine = partition.rows[rank]
            sources = torch.cat([local[rank], exchanged, self.rings[rank]])
            self._close(sources[one.predecessors], raw[mine[closes[mine]]])
            assert torch.equal(one.open_rows, links[0].open_rows)
            assert torch.equal(one.open_slots, links[0].open_slots)
            assert len(one.open_slots.unique()) == len(one.open_slots)
            # Only now: pooling reads what the step before left.
            self.rings[rank][one.open_slots] = exchanged[one.open_rows]
        self._check_rings(rows, batch)

    def _links(
        self,
        batch: StepBatch,
        partition: Partition,
        rank: int,
        closes: Tensor,
        dropped: list[int] | None,
    ) -> PairLinks:
        if dropped is None:
            return link_pairs(batch, partition, rank, self.ring_rows)
        closing = closes[partition.rows[rank]].nonzero()[:, 0]
        # Together with a layer below, where everything runs.
        running = running_segments(partition, torch.tensor([[0] * len(dropped), dropped]))
        local = running.local_rows(rank, closing)
        _, links = link_layers(batch, partition, rank, self.ring_rows, running, closing, local)
        return links

    def _close(self, first: Tensor, second: Tensor) -> None:
        assert len(first) == len(second)
        for even, odd in zip(first.tolist(), second.tolist(), strict=True):
            assert even == odd - 1
            assert odd not in self.closed, "a group is pooled once"
            self.closed[odd] = even

    def _check_rings(self, rows: RaggedBatch, batch: StepBatch) -> None:
        assert_replicas_equal([{"ring": ring} for ring in self.rings])
        for one, block in zip(rows.requests, batch.ring_blocks.tolist(), strict=True):
            newest, cached = one.seq_len - 1, 0 if one.hit is None else one.hit.num_tokens
            if newest % 2 == 0 and newest >= cached:
                slot = block * self.ring_rows + newest % self.ring_rows
                assert int(self.rings[0][slot]) == self.raw(one.request, newest)


def oracle_for(steps: Steps, size: int) -> Oracle:
    slots = steps.cache.num_requests * steps.cache.ring_rows
    rings = [torch.full((slots,), NOTHING) for _ in range(size)]
    return Oracle(ring_rows=steps.cache.ring_rows, rings=rings)


def check_all_closed(oracle: Oracle, steps: Steps) -> None:
    """Every group up to the last computed position, in every life of a request."""
    lives: dict[int, int] = {}
    expected: set[int] = set()
    for step in steps.rows:
        for one in step.requests:
            if one.num_computed_tokens == 0:
                lives[one.request] = lives.get(one.request, 0) + 1
            first = (lives.get(one.request, 0) * 100 + one.request) * 1000
            cached = 0 if one.hit is None else one.hit.num_tokens
            span = range(max(one.num_computed_tokens, cached), one.seq_len)
            expected |= {first + position for position in span if position % 2 == 1}
    assert oracle.closed.keys() == expected


@given(
    steps=step_sequences(step_schedules(max_requests=3, max_prompt=24, max_drafts=2)),
    data=st.data(),
)
def test_links_over_any_schedule(steps: Steps, data: st.DataObject) -> None:
    """The number of ranks stays, who computes what changes from step to step."""
    size = data.draw(st.sampled_from([1, 2, 3, 4, 8]), label="ranks")
    oracle = oracle_for(steps, size)
    for rows, batch in zip(steps.rows, steps.batches, strict=True):
        partition = data.draw(partitions(rows, min_ranks=size, max_ranks=size), label="partition")
        oracle.run(rows, batch, partition)
    check_all_closed(oracle, steps)


@given(
    steps=step_sequences(step_schedules(max_requests=3, max_prompt=24, num_layers=4)),
    layer=st.integers(0, 3),
    data=st.data(),
)
def test_links_of_a_layer_behind_a_hit(steps: Steps, layer: int, data: st.DataObject) -> None:
    """Each layer drops its own first rows; from the hit on it closes what a cold request would."""
    size = data.draw(st.sampled_from([1, 2, 3, 4]), label="ranks")
    oracle = oracle_for(steps, size)
    for rows, batch in zip(steps.rows, steps.batches, strict=True):
        partition = data.draw(partitions(rows, min_ranks=size, max_ranks=size), label="partition")
        starts = [0 if one.hit is None else one.hit.layer_starts[layer] for one in rows.requests]
        dropped = [
            min(max(start - one.num_computed_tokens, 0), one.query_len)
            for start, one in zip(starts, rows.requests, strict=True)
        ]
        oracle.run(rows, batch, partition, dropped)
    check_all_closed(oracle, steps)


@given(steps=step_sequences(step_schedules(max_requests=3, max_prompt=24, max_drafts=2)))
def test_links_on_one_rank(steps: Steps) -> None:
    """Rows in batch order: nothing is read from the exchange, only from the batch and the ring."""
    oracle = oracle_for(steps, 1)
    for rows, batch in zip(steps.rows, steps.batches, strict=True):
        partition = whole_batch(rows.query_lens)
        links = link_pairs(batch, partition, 0, oracle.ring_rows)
        exchange = range(rows.num_tokens, rows.num_tokens + len(links.last_rows))
        assert not set(links.predecessors.tolist()) & set(exchange)
        oracle.run(rows, batch, partition)
    check_all_closed(oracle, steps)


@given(rows=ragged_batches(), layout=cache_layouts(), data=st.data())
def test_exchange_is_as_long_as_the_rank_with_most_segments(
    rows: RaggedBatch, layout: CacheConfig, data: st.DataObject
) -> None:
    """Invariant 7: R is the true maximum, known to every rank (appendix D)."""
    batch = assemble_steps([rows], layout).batches[0]
    partition = data.draw(partitions(rows))
    most = max(len(segments) for segments in partition.segments)
    for rank, segments in enumerate(partition.segments):
        links = link_pairs(batch, partition, rank, 8)
        ends = torch.tensor([segment.num_rows for segment in segments]).cumsum(0) - 1
        padding = [-1] * (most - len(segments))
        assert links.last_rows.tolist() == [*ends.tolist(), *padding]


# --- appendix A ---------------------------------------------------------------------------------


def one_request(computed: int, query_len: int, *, prefilling: bool) -> tuple[StepBatch, Partition]:
    rows = RequestRows(
        request=0,
        num_computed_tokens=computed,
        query_len=query_len,
        is_prefilling=prefilling,
        num_logits=1,
    )
    step = RaggedBatch(requests=(rows,))
    batch = assemble_steps([step], LAYOUT).batches[0]
    return batch, make_partition(step.query_lens, step.is_prefilling, 2, dual_chunk_swap)


def predecessor_names(links: PairLinks, num_rows: int, num_exchanged: int) -> list[tuple[str, int]]:
    names: list[tuple[str, int]] = []
    for source in links.predecessors.tolist():
        if source < num_rows:
            names.append(("row", source))
        elif source < num_rows + num_exchanged:
            names.append(("exchanged", source - num_rows))
        else:
            names.append(("ring", source - num_rows - num_exchanged))
    return names


def test_worked_example() -> None:
    """Rows 5, 6, 7, 14 on rank 0; 8 .. 10 and 11 .. 13 on rank 1; last rows 7, 14 | 10, 13."""
    batch, partition = one_request(5, 10, prefilling=True)
    first, second = (link_pairs(batch, partition, rank, 8) for rank in range(2))
    assert first.last_rows.tolist() == [2, 3]
    assert second.last_rows.tolist() == [2, 5]
    # (4, 5) from the ring, (6, 7) from the row before.
    assert predecessor_names(first, 4, 4) == [("ring", 4), ("row", 1)]
    # (8, 9); (10, 11) from this rank's own exchanged row; (12, 13).
    assert predecessor_names(second, 6, 4) == [("row", 0), ("exchanged", 2), ("row", 4)]
    for links in (first, second):
        assert links.open_rows.tolist() == [1], "position 14, last row of rank 0's second segment"
        assert links.open_slots.tolist() == [14 % 8]


def test_worked_example_next_step() -> None:
    """The decode at 15 closes group 7 from the ring and leaves nothing open; rank 1 has no rows."""
    batch, partition = one_request(15, 1, prefilling=False)
    first, second = (link_pairs(batch, partition, rank, 8) for rank in range(2))
    assert predecessor_names(first, 1, 2) == [("ring", 6)]
    assert second.predecessors.tolist() == []
    assert second.last_rows.tolist() == [-1]
    assert first.open_rows.tolist() == second.open_rows.tolist() == []


@pytest.mark.parametrize(("computed", "expected"), [(0, [("row", 0)]), (1, [("ring", 0)])])
def test_first_pair_of_a_request(computed: int, expected: list[tuple[str, int]]) -> None:
    batch, _ = one_request(computed, 2, prefilling=True)
    links = link_pairs(batch, whole_batch([2]), 0, 8)
    assert predecessor_names(links, 2, 1) == expected
