"""What tensor-parallel ranks exchange: exact sums of exclusive parts, sums in a defined order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.config import ParallelConfig
from pcpkit.parallel.groups import Group, Groups, SingleRank
from pcpkit.parallel.tp import Reduce, gather_columns, lookup_rows, sum_exclusive, sum_groups
from pcpkit.parallel.virtual import run_virtual_ranks
from pcpkit.testing.compare import bits, same_bits

Result = TypeVar("Result")
seeds = st.integers(0, 2**16)
sizes = st.sampled_from([1, 2, 3, 4])
SPECIALS = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-45, -1e-40, 1.5, -3.0]


def run(size: int, body: Callable[[Group], Result]) -> list[Result]:
    def on_rank(rank: int, groups: Groups) -> Result:
        return body(groups.tp)

    return run_virtual_ranks(ParallelConfig(tp_size=size), on_rank, deadline_s=20)


@given(size=sizes, seed=seeds, dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_exclusive_sum_keeps_every_bit(size: int, seed: int, dtype: torch.dtype) -> None:
    """Each element lies on one rank or on none; signs of zero, NaNs and subnormals survive."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor(SPECIALS)[torch.randint(len(SPECIALS), (3, 8), generator=generator)]
    values = values.to(dtype)
    owner = torch.randint(-1, size, (3, 8), generator=generator)
    zero = torch.zeros_like(values)
    want = torch.where(owner >= 0, values, zero)
    for got in run(size, lambda g: sum_exclusive(g, torch.where(owner == g.rank, values, zero))):
        assert got.dtype == dtype
        assert torch.equal(bits(got), bits(want))


def test_exclusive_sum_of_strided_rows() -> None:
    values = torch.arange(12.0).bfloat16().view(2, 6)

    def body(group: Group) -> Tensor:
        mine = values if group.rank == 1 else torch.zeros_like(values)
        return sum_exclusive(group, mine.t().contiguous().t())

    for got in run(2, body):
        assert torch.equal(got, values)


@given(size=sizes, rows=st.integers(1, 4), ids=st.lists(st.integers(0, 3), max_size=6))
def test_looked_up_rows(size: int, rows: int, ids: list[int]) -> None:
    """Ids of every rank's part, in any order, twice too; no ids at all."""
    table = torch.arange(size * rows * 2, dtype=torch.float32).view(-1, 2).bfloat16()
    wanted = torch.tensor(ids, dtype=torch.int64) * 7 % (size * rows)

    def body(group: Group) -> Tensor:
        return lookup_rows(group, table[group.rank * rows : (group.rank + 1) * rows], wanted)

    for got in run(size, body):
        assert torch.equal(got, table[wanted])


@given(size=sizes, rows=st.integers(0, 3), columns=st.integers(1, 3))
def test_gathered_columns(size: int, rows: int, columns: int) -> None:
    whole = torch.arange(rows * size * columns, dtype=torch.float32).view(rows, size * columns)

    def body(group: Group) -> Tensor:
        return gather_columns(group, whole[:, group.rank * columns :][:, :columns])

    for got in run(size, body):
        assert torch.equal(got, whole)


def by_hand(partials: Tensor) -> Tensor:
    """Group after group in FP32 from the first on, then one rounding."""
    total = partials[:, 0].clone()
    for group in range(1, partials.shape[1]):
        total = (total.double() + partials[:, group].double()).float()
    return total.bfloat16()


@given(rows=st.integers(0, 3), seed=seeds)
def test_ordered_sum_is_that_of_one_rank(rows: int, seed: int) -> None:
    """Twelve groups on 1, 2, 3 or 4 ranks; magnitudes far apart, so that order shows."""
    generator = torch.Generator().manual_seed(seed)
    partials = torch.randn(rows, 12, 4, generator=generator)
    partials *= torch.exp2(torch.randint(-20, 21, partials.shape, generator=generator).float())
    want = by_hand(partials)
    for size in (1, 2, 3, 4):
        width = 12 // size

        def body(group: Group, width: int = width) -> Tensor:
            mine = partials[:, group.rank * width : (group.rank + 1) * width]
            return sum_groups(group, mine, "ordered")

        for got in run(size, body):
            assert same_bits(got, want)


def test_order_of_the_sum_shows() -> None:
    """2^30 swallows 1 on a rank's own sum: `fast` adds up ranks, `ordered` groups."""
    large = 2.0**30
    partials = torch.tensor([large, -large, 1.0, large, -large, 1.0]).view(1, 6, 1)

    def body(group: Group) -> tuple[float, float]:
        mine = partials[:, 3 * group.rank : 3 * (group.rank + 1)]
        ordered, fast = (sum_groups(group, mine, reduce) for reduce in ("ordered", "fast"))
        return float(ordered), float(fast)

    assert run(2, body) == [(1.0, 2.0), (1.0, 2.0)]


@pytest.mark.parametrize("reduce", ["ordered", "fast"])
def test_sum_of_one_rank(reduce: Reduce) -> None:
    partials = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    before = partials.clone()
    assert same_bits(sum_groups(SingleRank("tp"), partials, reduce), by_hand(partials))
    assert torch.equal(partials, before), "its input is not overwritten"
