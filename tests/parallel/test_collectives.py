"""Real process groups: the same results as virtual ranks, and errors instead of hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.config import ParallelConfig
from pcpkit.parallel.collectives import (
    CollectiveError,
    JobMember,
    start_process_groups,
    stop_process_groups,
    world_rank,
)
from pcpkit.parallel.groups import Groups
from pcpkit.parallel.virtual import run_virtual_ranks
from pcpkit.testing.compare import same_bits
from pcpkit.testing.ranks import RankPool, RanksFailed
from tests.testing import rank_jobs

TWO = ParallelConfig(pcp_size=2)
FOUR = ParallelConfig(tp_size=2, pcp_size=2, expert_parallel=True)
DEADLINE_S = 3.0
DTYPES = (torch.uint8, torch.int64, torch.bfloat16, torch.float32)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((TWO, "cpu"), marks=pytest.mark.dist, id="2-gloo"),
        pytest.param((FOUR, "cpu"), marks=pytest.mark.dist, id="4-gloo"),
        pytest.param((TWO, "cuda"), marks=pytest.mark.dist_gpu, id="2-nccl"),
    ],
)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    config, device = request.param
    with RankPool(config, device=device, deadline_s=DEADLINE_S) as started:
        yield started


@st.composite
def inputs(draw: st.DrawFn) -> Tensor:
    """By world rank ``(rows, columns)`` small integers: their sums are exact in every order."""
    shape = (4, draw(st.integers(0, 5)), draw(st.integers(1, 9)))
    values = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randint(0, 8, shape, generator=values).to(draw(st.sampled_from(DTYPES)))


@given(tensor=inputs(), data=st.data())
@example(tensor=torch.zeros(4, 0, 3), data=None)
def test_real_ranks_do_what_virtual_ranks_do(
    pool: RankPool, tensor: Tensor, data: st.DataObject | None
) -> None:
    """Every dtype, empty tensors, inputs that are not contiguous."""
    names = ["pcp", "tp", "ep"] if pool.config == FOUR else ["pcp"]
    name = data.draw(st.sampled_from(names)) if data is not None else "pcp"
    real = pool.run(rank_jobs.every_call, name, tensor, pool.device)

    def body(rank: int, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
        return rank_jobs.every_call(rank, groups, name, tensor)

    virtual = run_virtual_ranks(pool.config, body, deadline_s=20)
    for rank, (found, expected) in enumerate(zip(real, virtual, strict=True)):
        for op, got, want in zip(("gather", "reduce", "scatter"), found, expected, strict=True):
            assert same_bits(got, want), (rank, op)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_tensors(pool: RankPool, dtype: torch.dtype) -> None:
    """More than a socket buffers."""
    tensor = (torch.arange(4 * 500 * 1000).view(4, 500, 1000) % 7).to(dtype)
    gathered, total, _ = pool.run(rank_jobs.every_call, "pcp", tensor, pool.device)[0]
    members = [0, 1] if pool.config == TWO else [0, 2]
    assert torch.equal(gathered, tensor[members])
    assert torch.equal(total, tensor[members[0]] + tensor[members[1]])


def test_ranks_know_their_place(pool: RankPool) -> None:
    world = pool.config.world_size
    assert pool.run(rank_jobs.job_place) == [(rank, world) for rank in range(world)]


def test_a_job_of_another_size_is_refused(pool: RankPool) -> None:
    world = pool.config.world_size
    for told in pool.run(rank_jobs.join_a_larger_world):
        assert told == (
            f"world size expected tp_size x pcp_size = 3 x 5, got {world}; start torchrun with "
            "--nproc-per-node 15"
        )


def test_a_killed_rank_ends_the_others_within_the_deadline(pool: RankPool) -> None:
    """Each with the named error. The pool goes on: a test after this one gets new processes."""
    if pool.device != "cpu":
        pytest.skip("NCCL ends the process itself")
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        pool.run(rank_jobs.one_dies, timeout_s=60)
    # A second for the machine to be busy in.
    assert time.monotonic() - began < DEADLINE_S + 1
    failures = {one.rank: one for one in caught.value.failures}
    assert failures.pop(1).text == "exit status -9"
    assert len(failures) == pool.config.world_size - 1
    for failure in failures.values():
        assert failure.kind == CollectiveError.__name__
        assert f"all_reduce of (8,) expected all {pool.config.world_size} ranks" in failure.text


# --- in this process, which is in no job --------------------------------------------------------


def test_outside_a_job() -> None:
    assert world_rank() == (0, 1)
    stop_process_groups()


def test_refuses_to_start_without_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"^job expected .*; use torchrun --nproc-per-node 2$"):
        start_process_groups(ParallelConfig(pcp_size=2), "cpu")
    assert world_rank() == (0, 1)


def test_refuses_a_job_of_another_size_and_leaves_it(tmp_path: Path) -> None:
    alone = JobMember(init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    with pytest.raises(ValueError, match=r"^world size expected .* = 2 x 1, got 1; start torchrun"):
        start_process_groups(ParallelConfig(tp_size=2), "cpu", member=alone)
    assert world_rank() == (0, 1)


def test_a_peer_that_never_joins_is_an_error(tmp_path: Path) -> None:
    member = JobMember(init_method=(tmp_path / "store").as_uri(), rank=0, world_size=2)
    began = time.monotonic()
    with pytest.raises(CollectiveError, match=r"^job expected all 2 ranks to join, got: .+; look"):
        start_process_groups(TWO, "cpu", deadline_s=0.5, member=member)
    assert time.monotonic() - began < 20
    assert world_rank() == (0, 1)


def test_a_job_of_one_rank_needs_no_peer(tmp_path: Path) -> None:
    alone = JobMember(init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        groups = start_process_groups(ParallelConfig(), "cpu", member=alone)
        assert torch.equal(groups.pcp.all_reduce(torch.ones(2)), torch.ones(2))
    finally:
        stop_process_groups()
    assert world_rank() == (0, 1)
