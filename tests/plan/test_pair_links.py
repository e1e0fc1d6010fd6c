"""Pair links as the kernels take them: latents and rings of all ranks against the whole sequence.

test_links.py follows the indices; here `close_groups` and `write_ring` read them, on raw rows that
no other position has, in rings full of NaN. Pooling is row-local, so latents are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.config import CacheConfig, ParallelConfig
from pcpkit.kernels.compressor import close_groups, write_ring
from pcpkit.parallel.groups import Groups
from pcpkit.parallel.pcp import gather_rows, pick_rows
from pcpkit.parallel.virtual import run_virtual_ranks
from pcpkit.plan.batch import row_positions
from pcpkit.plan.partition import (
    STRATEGIES,
    Partition,
    PartitionStrategy,
    dual_chunk_swap,
    make_partition,
)
from pcpkit.testing.batches import RaggedBatch, RequestRows, Steps, assemble_steps
from pcpkit.testing.compare import assert_replicas_equal, same_bits
from pcpkit.testing.strategies import partition_strategies, step_schedules, step_sequences

from .linking import link_pairs

DIM, EPS = 8, 1e-6
NORM = torch.linspace(0.5, 1.5, DIM).bfloat16()
RAW = torch.randn(8, 128, 2 * DIM, generator=torch.Generator().manual_seed(0))
"""By request and position: value, then gate."""


def whole(request: int, length: int) -> Tensor:
    """Latents of all groups of a sequence, from its raw rows side by side."""
    raw, odd = RAW[request, :length], torch.arange(1, length, 2)
    nothing = raw[:0]
    return close_groups(raw, nothing, nothing.view(0, 2, 2 * DIM), odd, odd - 1, NORM, EPS)


def run_pairs(
    steps: Steps, size: int, strategy_of: Callable[[int], PartitionStrategy]
) -> tuple[dict[tuple[int, int], Tensor], list[Tensor]]:
    """Latents by request and group, each closed once a life, and the rings of all ranks."""
    partitions = [
        make_partition(step.query_lens, step.is_prefilling, size, strategy_of(index))
        for index, step in enumerate(steps.rows)
    ]

    def body(rank: int, groups: Groups) -> tuple[list[dict[tuple[int, int], Tensor]], Tensor]:
        ring = torch.full((steps.cache.num_requests, steps.cache.ring_rows, 2 * DIM), torch.nan)
        closed = [
            one_step(steps, index, partition, rank, groups, ring)
            for index, partition in enumerate(partitions)
        ]
        return closed, ring

    results = run_virtual_ranks(ParallelConfig(pcp_size=size), body, deadline_s=20)
    latents: dict[tuple[int, int], Tensor] = {}
    for index in range(len(steps.rows)):
        found = [latent for closed, _ in results for latent in closed[index].items()]
        assert len(found) == len({place for place, _ in found}), "one rank closes a group"
        for (request, group), latent in found:
            assert (request, group) not in latents or preempted(steps, request)
            latents[request, group] = latent
    return latents, [ring for _, ring in results]


def preempted(steps: Steps, request: int) -> bool:
    """Whether it starts twice, so that it closes its first groups twice."""
    starts = [
        one.num_computed_tokens
        for step in steps.rows
        for one in step.requests
        if one.request == request
    ]
    return starts.count(0) > 1


def one_step(
    steps: Steps, index: int, partition: Partition, rank: int, groups: Groups, ring: Tensor
) -> dict[tuple[int, int], Tensor]:
    """What the model does at a ratio-2 source."""
    batch, rows = steps.batches[index], partition.rows[rank]
    links = link_pairs(batch, partition, rank, steps.cache.ring_rows)
    places = [steps.rows[index].places[row] for row in rows.tolist()]
    raw = torch.stack([RAW[place] for place in places]) if places else RAW[0, :0]
    closing = (row_positions(batch)[rows] % 2 == 1).nonzero()[:, 0]
    last = gather_rows(groups.pcp, pick_rows(raw, links.last_rows), len(links.last_rows))
    latents = close_groups(raw, last, ring, closing, links.predecessors, NORM, EPS)
    write_ring(last, links.open_rows, links.open_slots, ring)
    owners = [places[row] for row in closing.tolist()]
    return {(name, odd // 2): one for (name, odd), one in zip(owners, latents, strict=True)}


def check_pairs(
    steps: Steps, size: int, strategy_of: Callable[[int], PartitionStrategy]
) -> dict[int, int]:
    """Every group as in the whole sequence, rings alike; returns the entries by request."""
    latents, rings = run_pairs(steps, size, strategy_of)
    assert_replicas_equal([{"ring": ring} for ring in rings])
    lengths: dict[int, int] = {}
    for step in steps.rows:
        lengths |= {one.request: one.seq_len for one in step.requests}
    for request, length in lengths.items():
        want = whole(request, length)
        assert bool(want.isfinite().all())
        got = [latents[request, group] for group in range(length // 2)]
        assert all(same_bits(*pair) for pair in zip(got, want, strict=True))
    check_open_rows(steps, rings[0])
    return {request: length // 2 for request, length in lengths.items()}


def check_open_rows(steps: Steps, ring: Tensor) -> None:
    """Requests of the last step: an odd count leaves the newest row, nothing else is asked for."""
    step, batch = steps.rows[-1], steps.batches[-1]
    for one, block in zip(step.requests, batch.ring_blocks.tolist(), strict=True):
        newest = one.seq_len - 1
        if newest % 2 == 0:
            got = ring[block, newest % steps.cache.ring_rows]
            assert same_bits(got, RAW[one.request, newest])


# --- tests --------------------------------------------------------------------------------------


@settings(max_examples=max(10, settings().max_examples // 2))
@given(
    steps=step_sequences(step_schedules(max_requests=3, max_prompt=30, max_drafts=2)),
    size=st.sampled_from([1, 2, 3, 4, 8]),
    strategies=st.lists(partition_strategies(), min_size=1, max_size=4),
)
def test_any_schedule(steps: Steps, size: int, strategies: list[PartitionStrategy]) -> None:
    """Requests join, rest, are preempted, leave; ring blocks pass from one to the next."""
    check_pairs(steps, size, lambda index: strategies[index % len(strategies)])


LAYOUT = CacheConfig(num_blocks=1, num_window_blocks=1, num_requests=1)


def chunks_of(lengths: Sequence[int], *, decode: bool = False) -> Steps:
    """One request in chunks, the last ones decodes if told."""
    rows = [
        RequestRows(
            request=0,
            num_computed_tokens=sum(lengths[:index]),
            query_len=length,
            is_prefilling=not decode or index == 0,
            num_logits=1,
        )
        for index, length in enumerate(lengths)
    ]
    return assemble_steps([RaggedBatch(requests=(one,)) for one in rows], LAYOUT)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 3, 5, 22])
def test_chunks(chunk: int, size: int) -> None:
    """B079: 22 tokens in chunks of 1, 3, 5 and 22 give the same 11 entries."""
    lengths = [min(chunk, 22 - start) for start in range(0, 22, chunk)]
    assert check_pairs(chunks_of(lengths), size, lambda _: dual_chunk_swap) == {0: 11}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_packed_requests(size: int) -> None:
    """B084: lengths 3, 5, 1, 2 have 1, 2, 0, 1 entries and leave 2, 4, 0 and nothing open."""
    rows = tuple(
        RequestRows(
            request=index,
            num_computed_tokens=0,
            query_len=length,
            is_prefilling=True,
            num_logits=1,
        )
        for index, length in enumerate((3, 5, 1, 2))
    )
    steps = assemble_steps([RaggedBatch(requests=rows)], LAYOUT)
    for strategy in STRATEGIES.values():
        entries = check_pairs(steps, size, lambda _, strategy=strategy: strategy)
        assert entries == {0: 1, 1: 2, 2: 0, 3: 1}
    latents, rings = run_pairs(steps, size, lambda _: dual_chunk_swap)
    assert len(latents) == 4
    written = [int(block) for block in steps.batches[0].ring_blocks[:3]]
    kept = rings[0].isfinite().all(dim=2)
    assert kept.nonzero().tolist() == sorted(
        [block, newest % 8] for block, newest in zip(written, (2, 4, 0), strict=True)
    )


@pytest.mark.parametrize(("size", "length"), [(2, 10), (4, 13), (4, 50)])
def test_pairs_across_chunk_borders(size: int, length: int) -> None:
    """B078: at 10 tokens on two ranks, (2, 3) and (8, 9) have owners that differ."""
    if length == 10:
        partition = make_partition([10], [True], 2, dual_chunk_swap)
        owner = {
            int(row): rank for rank, rows in enumerate(partition.rows) for row in rows.tolist()
        }
        assert [j for j in range(5) if owner[2 * j] != owner[2 * j + 1]] == [1, 4]
    assert check_pairs(chunks_of([length]), size, lambda _: dual_chunk_swap) == {0: length // 2}


def test_decode_token_by_token() -> None:
    """Every second step closes a group from the ring, whoever owns the token."""
    steps = chunks_of([5, *[1] * 10], decode=True)
    for size in (1, 2, 3):
        assert check_pairs(steps, size, lambda _: dual_chunk_swap) == {0: 7}
