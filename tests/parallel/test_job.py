"""The job as a whole: its world group, its size, and the device of each of its ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pcpkit.config import ParallelConfig
from pcpkit.parallel.collectives import (
    check_backend,
    check_world_size,
    device_of_rank,
    host_rank,
    in_job,
    join_job,
    launched_by_torchrun,
)
from pcpkit.parallel.groups import single_rank
from pcpkit.testing.ranks import RankPool

from . import job_calls

TWO = ParallelConfig(pcp_size=2)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(TWO, deadline_s=10) as started:
        yield started


@pytest.mark.dist
def test_the_world_is_every_rank_of_the_job(pool: RankPool) -> None:
    """Of whatever size: ranks can then agree on refusing it."""
    assert pool.run(job_calls.world_of) == [("world", rank, 2, [0, 1], True) for rank in (0, 1)]


@pytest.mark.dist
def test_the_world_meets_on_the_cpu_whoever_joined(pool: RankPool) -> None:
    assert pool.run(job_calls.world_over_gloo) == [[3], [3]]


@pytest.mark.dist
def test_groups_that_do_not_serve_the_device_are_refused(pool: RankPool) -> None:
    expected = (
        "pcp group expected tensors on cpu, got a model on cuda; start the groups with "
        "device='cuda'"
    )
    assert pool.run(job_calls.refused_devices) == [[expected], [expected]]
    check_backend(single_rank(), torch.device("cuda", 0))


@pytest.mark.dist
def test_without_a_launcher_the_rank_is_the_number_on_the_host(pool: RankPool) -> None:
    assert pool.run(job_calls.number_on_host) == [0, 1]


def test_a_job_of_another_size_is_named() -> None:
    config = ParallelConfig(tp_size=2, pcp_size=3)
    check_world_size(config, 6)
    with pytest.raises(ValueError, match=r"^world size expected .* = 2 x 3, got 5; .* 6$"):
        check_world_size(config, 5)


def test_outside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert (in_job(), host_rank(), launched_by_torchrun()) == (False, 0, False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert (in_job(), host_rank(), launched_by_torchrun()) == (False, 3, True)
    with pytest.raises(ValueError, match=r"^job expected ranks that torchrun started"):
        join_job(TWO)
    assert not in_job()


def test_every_rank_of_a_host_has_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of_rank(torch.device("cuda")) == torch.device("cuda", 1)
    assert current == [1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(
        ValueError, match=r"^device expected one CUDA device for each .* 2 for rank"
    ):
        device_of_rank(torch.device("cuda"))
    assert device_of_rank(torch.device("cpu")) == torch.device("cpu")
    assert current == [1]
