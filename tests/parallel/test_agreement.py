"""What ranks tell each other: the same answer on all of them, whoever had something to say."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.config import ParallelConfig
from pcpkit.parallel import agreement
from pcpkit.parallel.agreement import (
    check_alike,
    first_problem,
    gather_bytes,
    run_on_first,
    share_bytes,
    wait_for_all,
)
from pcpkit.parallel.groups import Group, SingleRank
from pcpkit.parallel.virtual import run_virtual_ranks

Result = TypeVar("Result")
texts = st.lists(st.binary(max_size=6), min_size=1, max_size=4)


def on_ranks(
    size: int, body: Callable[[Group], Result], *, deadline_s: float = 20.0
) -> list[Result]:
    config = ParallelConfig(pcp_size=size)
    return run_virtual_ranks(config, lambda _, groups: body(groups.pcp), deadline_s=deadline_s)


@given(data=texts)
def test_bytes_of_any_length_arrive_in_rank_order(data: list[bytes]) -> None:
    """Empty ones, and zero bytes at an end, which are no padding."""
    gathered = on_ranks(len(data), lambda group: gather_bytes(group, data[group.rank]))
    assert gathered == [data] * len(data)
    shared = on_ranks(len(data), lambda group: share_bytes(group, data[group.rank]))
    assert shared == [data[0]] * len(data)


@given(problems=st.lists(st.sampled_from([None, "a", "\u00e9 long one"]), min_size=1, max_size=4))
def test_the_first_problem_is_everybodys(problems: list[str | None]) -> None:
    told = on_ranks(len(problems), lambda group: first_problem(group, problems[group.rank]))
    expected = next((problem for problem in problems if problem is not None), None)
    assert told == [expected] * len(problems)


@pytest.mark.parametrize("odd", [1, 2])
def test_ranks_with_different_input_all_refuse(odd: int) -> None:
    def body(group: Group) -> str:
        check_alike(group, "job", b"same")
        with pytest.raises(ValueError, match=r"^job expected the same on all 3 ranks") as caught:
            check_alike(group, "job", b"other" if group.rank == odd else b"same")
        return str(caught.value)

    for message in on_ranks(3, body):
        assert f"got another on rank {odd}; give every rank the same" in message


def test_the_others_wait_for_signs_of_life_and_not_for_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Work of twice the deadline passes if it beats; without a beat the others give up."""
    monkeypatch.setattr(agreement, "BEAT_S", 0.1)

    def work(beat: Callable[[], None]) -> Sequence[str]:
        for _ in range(40):
            time.sleep(0.1)
            beat()
        return ["one", "two words"]

    expected = [("one", "two words")] * 3
    assert on_ranks(3, lambda group: run_on_first(group, work), deadline_s=2.0) == expected

    def silent(beat: Callable[[], None]) -> Sequence[str]:
        time.sleep(2)
        return []

    with pytest.raises(RuntimeError, match=r"all_reduce of \(1,\) torch.int64 until 0.5 s passed"):
        on_ranks(2, lambda group: run_on_first(group, silent), deadline_s=0.5)


def test_only_the_first_rank_works() -> None:
    ran: list[int] = []

    def body(group: Group) -> tuple[str, ...]:
        def work(beat: Callable[[], None]) -> Sequence[str]:
            ran.append(group.rank)
            return []

        return run_on_first(group, work)

    assert on_ranks(3, body) == [()] * 3
    assert ran == [0]


def test_nobody_passes_before_all_have_come() -> None:
    came: list[int] = []

    def body(group: Group) -> int:
        if group.rank == 1:
            time.sleep(0.3)
        came.append(group.rank)
        wait_for_all(group)
        return len(came)

    assert on_ranks(3, body) == [3] * 3


def test_alone_there_is_nobody_to_ask() -> None:
    group = SingleRank("world")
    assert gather_bytes(group, b"") == [b""]
    assert share_bytes(group, b"x") == b"x"
    assert first_problem(group, None) is None
    assert run_on_first(group, lambda beat: ["x"]) == ("x",)
    check_alike(group, "job", torch.zeros(3).numpy().tobytes())
    wait_for_all(group)
