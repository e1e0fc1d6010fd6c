"""Virtual ranks: order, sums, and that nothing hangs when ranks disagree, fail or leave."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import permutations
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.config import ParallelConfig
from pcpkit.parallel.groups import Group, Groups, group_members
from pcpkit.parallel.virtual import RankMismatch, run_virtual_ranks
from pcpkit.testing.strategies import parallel_sizes

Result = TypeVar("Result")

# Long enough that a test which waits for it is seen to.
LONG_S = 60.0
FOUR = ParallelConfig(pcp_size=4)


def run(body: Callable[[int, Groups], Result], *, deadline_s: float = LONG_S) -> list[Result]:
    """Four PCP ranks; a rank that is left waiting would take a minute."""
    began = time.monotonic()
    try:
        return run_virtual_ranks(FOUR, body, deadline_s=deadline_s)
    finally:
        assert time.monotonic() - began < LONG_S / 2, "a rank waited for the deadline"


# --- what a call gives --------------------------------------------------------------------------


@given(config=parallel_sizes(), rows=st.integers(0, 3), columns=st.integers(1, 3))
def test_calls_on_every_group(config: ParallelConfig, rows: int, columns: int) -> None:
    """Each call against the inputs of the group's members, gathered by their world ranks."""
    inputs = torch.randint(-50, 50, (config.world_size, rows, columns))

    def body(rank: int, groups: Groups) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        for group in (groups.tp, groups.pcp, groups.ep):
            parts = torch.stack([inputs[rank] * (part + 1) for part in range(group.size)])
            found[group.name] = (
                group.all_gather(inputs[rank]),
                group.all_reduce(inputs[rank]),
                group.reduce_scatter(parts),
            )
        return found

    for rank, found in enumerate(run_virtual_ranks(config, body, deadline_s=LONG_S)):
        for name, members in group_members(config, rank).items():
            gathered, total, part = found[name]
            assert torch.equal(gathered, inputs[members])
            assert torch.equal(total, inputs[members].sum(0))
            assert torch.equal(part, inputs[members].sum(0) * (members.index(rank) + 1))


def test_results_are_in_rank_order() -> None:
    def body(rank: int, groups: Groups) -> tuple[int, int]:
        time.sleep(0.02 * (3 - rank))
        return rank, groups.pcp.rank

    assert run(body) == [(rank, rank) for rank in range(4)]


def test_a_result_may_be_none() -> None:
    assert run(lambda rank, groups: rank if rank % 2 else None) == [None, 1, None, 3]


def test_sums_are_in_rank_order() -> None:
    """Bit for bit; among 1,000 FP32 numbers every other order rounds one of them differently."""
    values = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))

    def in_order(*ranks: int) -> Tensor:
        total = values[ranks[0]]
        for rank in ranks[1:]:
            total = total + values[rank]
        return total

    def body(rank: int, groups: Groups) -> tuple[Tensor, Tensor]:
        parts = values[rank].repeat(4, 1)
        return groups.pcp.all_reduce(values[rank]), groups.pcp.reduce_scatter(parts)

    for reduced, scattered in run(body):
        assert torch.equal(reduced, in_order(0, 1, 2, 3))
        assert torch.equal(scattered, in_order(0, 1, 2, 3))
    for order in permutations(range(4)):
        # The first addition commutes.
        assert torch.equal(in_order(*order), in_order(0, 1, 2, 3)) == (order[2:] == (2, 3))


def test_inputs_may_be_strided_and_are_not_changed() -> None:
    table = torch.arange(24.0).view(4, 6)

    def body(rank: int, groups: Groups) -> Tensor:
        mine = table.t()[:, rank][1::2]
        assert not mine.is_contiguous()
        groups.pcp.all_reduce(mine)
        return groups.pcp.all_gather(mine)

    for gathered in run(body):
        assert torch.equal(gathered, table[:, 1::2])
    assert torch.equal(table, torch.arange(24.0).view(4, 6))


def test_a_rank_may_reuse_its_buffer_after_a_call() -> None:
    """Peers have read it by then, as with a real collective."""

    def body(rank: int, groups: Groups) -> bool:
        buffer, right = torch.empty(4096), True
        for step in range(50):
            buffer.fill_(step * 10 + rank)
            gathered = groups.pcp.all_gather(buffer)
            buffer.fill_(-1)
            expected = torch.arange(4.0)[:, None] + step * 10
            right &= torch.equal(gathered, expected.expand(4, 4096))
        return right

    assert all(run(body))


def test_wrap_sees_every_group_of_every_rank() -> None:
    seen: list[tuple[str, int, int]] = []

    def wrap(group: Group) -> Group:
        seen.append((group.name, group.rank, group.size))
        return group

    run_virtual_ranks(ParallelConfig(tp_size=2), lambda rank, groups: None, wrap=wrap)
    assert sorted(seen) == sorted(
        [("tp", 0, 2), ("tp", 1, 2), ("pcp", 0, 1), ("pcp", 0, 1), ("ep", 0, 1), ("ep", 0, 1)]
    )


# --- ranks that disagree ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "shown"),
    [
        (lambda group: group.all_gather(torch.zeros(3)), "all_gather of (3,) torch.float32"),
        (lambda group: group.all_gather(torch.zeros(2).int()), "all_gather of (2,) torch.int32"),
        (lambda group: group.all_reduce(torch.zeros(2)), "all_reduce of (2,) torch.float32"),
    ],
)
def test_a_different_call_is_named(odd: Callable[..., Tensor], shown: str) -> None:
    def body(rank: int, groups: Groups) -> None:
        groups.pcp.all_gather(torch.zeros(1))
        if rank == 2:
            odd(groups.pcp)
        else:
            groups.pcp.all_gather(torch.zeros(2))

    with pytest.raises(RankMismatch) as caught:
        run(body)
    message = str(caught.value)
    assert message.startswith("pcp expected the same call on every rank, got rank 0: all_gather")
    assert f"rank 2: {shown}" in message
    assert "rank 1: all_gather of (2,) torch.float32" in message


def test_a_call_left_out_is_named_at_once() -> None:
    def body(rank: int, groups: Groups) -> None:
        if rank != 1:
            groups.pcp.all_reduce(torch.zeros(5))

    with pytest.raises(RankMismatch) as caught:
        run(body)
    message = str(caught.value)
    assert "rank 0 waited in pcp all_reduce of (5,) torch.float32 until a peer ended" in message
    assert "rank 1 returned" in message


def test_the_deadline_is_respected() -> None:
    """Rank 0 waits for 1 in TP, 1 for 3 in PCP, 3 for 2 in TP, 2 for 0 in PCP: only time tells."""

    def body(rank: int, groups: Groups) -> None:
        (groups.tp if rank in (0, 3) else groups.pcp).all_gather(torch.zeros(1))

    config = ParallelConfig(tp_size=2, pcp_size=2)
    began = time.monotonic()
    with pytest.raises(RankMismatch, match=r"rank \d waited in (tp|pcp) all_gather of \(1,\)"):
        run_virtual_ranks(config, body, deadline_s=0.3)
    assert 0.25 < time.monotonic() - began < LONG_S / 2


@pytest.mark.parametrize("shape", [(), (3, 2), (5,)])
def test_refuses_parts_that_are_not_one_a_rank(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^tensor expected shape \(4, \.\.\), got "):
        run(lambda rank, groups: groups.pcp.reduce_scatter(torch.zeros(shape)))


# --- ranks that fail ----------------------------------------------------------------------------


def fail_here() -> None:
    raise LookupError("the reason")


@pytest.mark.parametrize("guilty", [0, 1, 3])
def test_a_failing_rank_releases_its_peers(guilty: int) -> None:
    def body(rank: int, groups: Groups) -> None:
        groups.pcp.all_gather(torch.zeros(1))
        if rank == guilty:
            fail_here()
        groups.pcp.all_gather(torch.zeros(1))

    with pytest.raises(LookupError, match=r"^the reason") as caught:
        run(body)
    assert caught.traceback[-1].name == "fail_here"
    assert caught.value.__notes__ == [f"raised on virtual rank {guilty}"]


def test_the_first_of_several_failures_is_raised() -> None:
    def body(rank: int, groups: Groups) -> None:
        if rank in (1, 2):
            raise LookupError(f"rank {rank}")
        groups.pcp.all_gather(torch.zeros(1))

    with pytest.raises(LookupError, match=r"^rank 1\n"):
        run(body)


def test_a_failure_in_one_group_reaches_ranks_that_wait_in_another() -> None:
    """Rank 3 fails; 2 waits for it in TP, 1 in PCP, and 0 for 1 and 2: all are released."""

    def body(rank: int, groups: Groups) -> None:
        if rank == 3:
            fail_here()
        (groups.pcp if rank == 1 else groups.tp).all_gather(torch.zeros(1))

    began = time.monotonic()
    with pytest.raises(LookupError):
        run_virtual_ranks(ParallelConfig(tp_size=2, pcp_size=2), body, deadline_s=LONG_S)
    assert time.monotonic() - began < LONG_S / 2
