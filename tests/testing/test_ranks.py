"""A pool of real processes: order, every traceback, timeouts, and a fresh start when it must be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import PicklingError
from typing import Any

import pytest
import torch

from pcpkit.config import ParallelConfig
from pcpkit.testing.ranks import RankFailure, RankPool, RanksFailed
from tests.testing import rank_jobs

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(ParallelConfig(pcp_size=2), deadline_s=2.0) as started:
        yield started


def failures_of(pool: RankPool, job: Callable[..., object]) -> list[RankFailure]:
    with pytest.raises(RanksFailed) as caught:
        pool.run(job, timeout_s=3.0)
    assert f"rank_jobs.{job.__name__} failed on" in str(caught.value)
    for failure in caught.value.failures:
        assert failure.text.rstrip() in str(caught.value)
    return list(caught.value.failures)


def test_results_are_in_rank_order(pool: RankPool) -> None:
    assert pool.run(rank_jobs.places) == [(0, 0, 0, 0), (1, 0, 1, 0)]
    for gathered in pool.run(rank_jobs.gathered, 3):
        assert gathered.tolist() == [[0, 0], [3, 3]]


def test_the_example_in_the_docs(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code of docs/testing.md as printed, on the processes that are there already."""
    page = Path(__file__).resolve().parents[2] / "docs" / "testing.md"
    (code,) = re.findall(r"```python\n([^`]*RankPool\(.*?)```", page.read_text("utf-8"), re.DOTALL)

    class SamePool(RankPool):
        def run(
            self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0
        ) -> Any:
            assert self.config == pool.config
            job = (code, function.__name__, *arguments)
            return pool.run(rank_jobs.example_function, *job, timeout_s=timeout_s)

    monkeypatch.setattr("pcpkit.testing.ranks.RankPool", SamePool)
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "[[3, 3, 3], [3, 3, 3]]\n"


def test_processes_stay_when_all_ranks_raise(pool: RankPool) -> None:
    before = pool.run(rank_jobs.process_id)
    failures = failures_of(pool, rank_jobs.raise_alike)
    assert [(one.rank, one.kind) for one in failures] == [(0, "LookupError"), (1, "LookupError")]
    for one in failures:
        assert f"rank {one.rank} does not find it" in one.text
        assert "in raise_alike" in one.text
    assert pool.run(rank_jobs.process_id) == before


@pytest.mark.parametrize(
    ("job", "told"),
    [(rank_jobs.returns_a_function, "pickle"), (rank_jobs.fails_like_pytest, "SystemExit: 3")],
)
def test_whatever_ends_a_function_is_reported(
    pool: RankPool, job: Callable[..., object], told: str
) -> None:
    failures = failures_of(pool, job)
    assert [one.rank for one in failures] == [0, 1]
    assert all(told in one.text for one in failures)


def test_new_processes_after_one_rank_failed_in_a_call(pool: RankPool) -> None:
    """Rank 0 waited for rank 1 in vain: its group is of no use any more."""
    before = pool.run(rank_jobs.process_id)
    kinds = {one.rank: one.kind for one in failures_of(pool, rank_jobs.one_raises)}
    assert kinds == {0: "CollectiveError", 1: "LookupError"}
    assert not set(pool.run(rank_jobs.process_id)) & set(before)


def test_a_stuck_rank_is_stopped_and_shown(pool: RankPool) -> None:
    (failure,) = failures_of(pool, rank_jobs.one_sleeps)
    assert (failure.rank, failure.kind) == (1, "no answer")
    assert "in sleep_here" in failure.text


def test_only_functions_that_a_process_can_import(pool: RankPool) -> None:
    with pytest.raises((AttributeError, PicklingError), match="pickle"):
        pool.run(lambda rank, groups: torch.zeros(1))
