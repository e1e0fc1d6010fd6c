"""Rows of a step, over all ranks and on the fullest one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pcpkit.engine.row_budget import RankLimit, RowBudget
from pcpkit.plan.partition import STRATEGIES, dual_chunk_swap, levelled


def test_without_a_limit_a_rank_only_the_sum_counts() -> None:
    budget = RowBudget(left=10)
    assert budget.room(7, True) == 7
    budget.take(7, True)
    assert (budget.room(7, True), budget.left) == (3, 3)


def test_the_example_of_the_docstring() -> None:
    budget = RowBudget(left=100, limit=RankLimit(max_rows=3, size=2, strategy=levelled))
    assert budget.room(1, False) == 1
    budget.take(1, False)
    assert budget.room(50, True) == 5
    budget.take(5, True)
    assert budget.room(1, False) == 0


def test_lumps_of_the_seed_strategy_are_seen() -> None:
    """9 rows on 4 ranks are dealt 2, 2, 2, 3."""
    limit = RankLimit(max_rows=2, size=4, strategy=dual_chunk_swap)
    assert limit.excess([9], [True]) == 1
    assert RowBudget(left=100, limit=limit).room(9, True) == 8


requests = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=6)


@given(
    asked=requests,
    limit=st.integers(1, 12),
    size=st.integers(1, 8),
    strategy=st.sampled_from(sorted(STRATEGIES)),
)
def test_what_is_allowed_fits_and_something_always_does(
    asked: list[tuple[int, bool]], limit: int, size: int, strategy: str
) -> None:
    rank = RankLimit(max_rows=limit, size=size, strategy=STRATEGIES[strategy])
    budget = RowBudget(left=60, limit=rank)
    for place, (wanted, is_prefilling) in enumerate(asked):
        count = budget.room(wanted if is_prefilling else 1, is_prefilling)
        assert 0 <= count <= min(wanted, budget.left)
        assert count > 0 or place > 0, "the first request always gets a row"
        if count:
            budget.take(count, is_prefilling)
            assert rank.excess(budget.query_lens, budget.is_prefilling) <= 0
