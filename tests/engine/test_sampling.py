"""Greedy and sampled tokens: ties, the nucleus, probabilities, independence of the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.engine.request import SamplingParams
from pcpkit.engine.sampling import greedy_tokens, next_tokens, sample_token, uniform

# Few distinct values, so that ties are common.
logit = st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0])
rows = st.lists(st.lists(logit, min_size=6, max_size=6), min_size=1, max_size=4)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0], [-5.0, -7.0, -1.0]])
    assert greedy_tokens(logits) == [1, 0, 2]


def test_greedy_ignores_negative_infinity() -> None:
    assert greedy_tokens(torch.tensor([[-math.inf, -9.0, -math.inf]])) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_an_error_that_names_the_row(temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan, 1.0]])
    params = SamplingParams(temperature=temperature)
    with pytest.raises(FloatingPointError, match="NaN in row 1 of 2"):
        next_tokens(logits, [params, params], [0, 0])


def test_no_rows_give_no_tokens() -> None:
    assert next_tokens(torch.empty(0, 4), [], []) == []


def test_uniform_numbers_are_pinned_and_differ() -> None:
    # Changing these changes what every seed means: a numerics change for the changelog.
    assert uniform(0, 0) == 0.0564663990004608
    numbers = {uniform(seed, index) for seed in range(20) for index in range(50)}
    assert len(numbers) == 1000
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(2**64 - 1, 2**64 - 1) < 1
    # The mean of 1,000 uniform numbers lies within 5 of its standard deviations of 0.00913.
    assert abs(sum(numbers) / 1000 - 0.5) < 0.046


def _nucleus(row: list[float], temperature: float, top_p: float) -> list[tuple[int, float]]:
    """Ids and probabilities by the definition: most likely first, until top_p is reached."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    weights = [math.exp((row[token] - max(row)) / temperature) for token in order]
    kept, total = 0, 0.0
    while kept < len(row) and total < top_p * sum(weights):
        total += weights[kept]
        kept += 1
    kept = max(kept, 1)
    return [(order[i], weights[i] / sum(weights[:kept])) for i in range(kept)]


@given(
    row=st.lists(logit, min_size=1, max_size=8),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.05, 0.5, 0.87, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 1000),
)
def test_a_sample_is_the_inverse_of_the_cumulated_nucleus(
    row: list[float], temperature: float, top_p: float, seed: int, index: int
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    token = sample_token(torch.tensor(row), params, index)
    below, u = 0.0, uniform(seed, index)
    for candidate, probability in _nucleus(row, temperature, top_p):
        if candidate == token:
            # The oracle adds in another order than cumsum: an ulp of slack at the ends.
            assert below - 1e-12 <= u <= below + probability + 1e-12
            return
        below += probability
    pytest.fail(f"{token} is outside the nucleus")


def test_samples_follow_the_probabilities() -> None:
    row, draws = torch.tensor([1.0, 0.0, -1.0, 3.0]), 4000
    params = [SamplingParams(temperature=1.5, seed=seed) for seed in range(draws)]
    tokens = next_tokens(row.expand(draws, -1), params, [0] * draws)
    for token, probability in enumerate((row.double() / 1.5).softmax(0).tolist()):
        # Five standard deviations of a binomial count.
        slack = 5 * math.sqrt(draws * probability * (1 - probability))
        assert abs(tokens.count(token) - draws * probability) < slack


def test_seed_and_index_change_the_token() -> None:
    row = torch.zeros(64)
    base = SamplingParams(temperature=1.0, seed=1)
    by_index = {sample_token(row, base, index) for index in range(40)}
    by_seed = {sample_token(row, SamplingParams(temperature=1.0, seed=s), 0) for s in range(40)}
    assert len(by_index) > 15
    assert len(by_seed) > 15


def test_a_small_nucleus_is_greedy() -> None:
    row = torch.tensor([0.1, 0.3, 0.3, 0.2])
    params = [SamplingParams(temperature=5.0, top_p=1e-9, seed=seed) for seed in range(50)]
    assert set(next_tokens(row.expand(50, -1), params, list(range(50)))) == {1}


@given(rows=rows, seeds=st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_a_row_does_not_see_the_others(rows: list[list[float]], seeds: list[int]) -> None:
    logits = torch.tensor(rows)
    # Odd rows greedy, even rows sampled.
    params = [
        SamplingParams(temperature=float(place % 2 == 0), seed=seeds[place])
        for place in range(len(rows))
    ]
    indices = list(range(len(rows)))
    together = next_tokens(logits, params, indices)
    alone = [
        next_tokens(logits[place : place + 1], [params[place]], [place])[0]
        for place in range(len(rows))
    ]
    assert together == alone


@pytest.mark.parametrize(("u", "token"), [(0.0, 0), (0.49, 0), (0.5, 1), (0.99, 1)])
def test_a_boundary_belongs_to_the_id_above_it(
    u: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two equal ids, then one whose probability is zero in float64: it is never taken."""
    monkeypatch.setattr("pcpkit.engine.sampling.uniform", lambda seed, index: u)
    row = torch.tensor([0.0, 0.0, -1e4])
    assert sample_token(row, SamplingParams(temperature=1.0), 0) == token


def test_a_nucleus_that_is_reached_exactly_ends_there() -> None:
    row = torch.zeros(2)
    params = [SamplingParams(temperature=1.0, top_p=0.5, seed=seed) for seed in range(50)]
    assert set(next_tokens(row.expand(50, -1), params, [0] * 50)) == {0}
