"""Row exchange between PCP ranks: any ragged numbers of rows, any content, one call."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.config import ParallelConfig
from pcpkit.parallel.groups import Groups, SingleRank
from pcpkit.parallel.pcp import gather_rows, pad_rows, pick_rows
from pcpkit.parallel.trace import Call, TracedGroup
from pcpkit.parallel.virtual import run_virtual_ranks
from pcpkit.plan.partition import PartitionStrategy, make_partition
from pcpkit.testing.batches import RaggedBatch
from pcpkit.testing.compare import assert_same_calls, bits, same_bits
from pcpkit.testing.poison import guard
from pcpkit.testing.strategies import partition_strategies, ragged_batches

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64]


def random_rows(seed: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Any bits, so NaNs too."""
    generator = torch.Generator().manual_seed(seed)
    width = shape[-1] * dtype.itemsize
    raw = torch.randint(256, (*shape[:-1], width), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def test_padding_is_zero_rows() -> None:
    rows = torch.ones(2, 3, 4)
    padded = pad_rows(rows, 5)
    assert padded.shape == (5, 3, 4)
    assert padded.sum() == rows.sum()
    assert torch.equal(padded[:2], rows)
    assert pad_rows(rows, 2) is rows, "nothing to add, nothing to copy"
    assert pad_rows(rows[:0], 2).shape == (2, 3, 4)


@given(
    batch=ragged_batches(resting=True, min_requests=0),
    size=st.integers(1, 5),
    strategy=partition_strategies(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_gathered_rows_restore_to_the_batch(
    batch: RaggedBatch, size: int, strategy: PartitionStrategy, dtype: torch.dtype, seed: int
) -> None:
    """B115, B116: also if some ranks, or all, have no rows."""
    partition = make_partition(batch.query_lens, batch.is_prefilling, size, strategy)
    content = random_rows(seed, batch.num_tokens, 3, dtype=dtype)
    traces: list[list[Call]] = [[] for _ in range(size)]

    def body(rank: int, groups: Groups) -> Tensor:
        group = TracedGroup(groups.pcp, traces[rank])
        return gather_rows(group, content[partition.rows[rank]], partition.num_padded_rows)

    for gathered in run_virtual_ranks(ParallelConfig(pcp_size=size), body, deadline_s=20):
        assert gathered.shape == (size * partition.num_padded_rows, 3)
        assert same_bits(gathered[partition.restore_index], content)
        assert bool((bits(gathered)[~partition.write_mask] == 0).all())
    shape = (partition.num_padded_rows, 3)
    assert_same_calls(traces, [Call("pcp", "all_gather", shape, dtype)])


def test_gathers_strided_rows_and_reads_nothing_around_them() -> None:
    def body(rank: int, groups: Groups) -> Tensor:
        rows = guard(torch.full((rank + 1, 2, 3), float(rank)))
        gathered = gather_rows(groups.pcp, rows.view, 2)
        rows.check()
        return gathered

    for gathered in run_virtual_ranks(ParallelConfig(pcp_size=2), body, deadline_s=20):
        assert gathered[:, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
        assert bool(gathered.isfinite().all())


def test_one_rank_gathers_its_own_rows() -> None:
    rows = torch.arange(6.0).view(3, 2)
    assert torch.equal(gather_rows(SingleRank("pcp"), rows, 3), rows)


def test_more_rows_than_planned_are_an_error() -> None:
    with pytest.raises(RuntimeError):
        gather_rows(SingleRank("pcp"), torch.zeros(3, 2), 2)


@given(
    num_rows=st.integers(0, 5),
    picks=st.lists(st.integers(-1, 4), max_size=8),
    seed=st.integers(0, 2**16),
)
def test_picked_rows(num_rows: int, picks: list[int], seed: int) -> None:
    """Row by row; -1 is a zero row, also where the rank has no rows at all."""
    index = [pick if pick < num_rows else -1 for pick in picks]
    rows = random_rows(seed, num_rows, 4, dtype=torch.float32)
    got = pick_rows(rows, torch.tensor(index, dtype=torch.int64))
    assert got.shape == (len(index), 4)
    for row, pick in zip(got, index, strict=True):
        assert same_bits(row, rows[pick] if pick >= 0 else torch.zeros(4))
