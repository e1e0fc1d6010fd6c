"""Acceptance R4: 2,000 requests in a pool ten times too small; every answer is the cold one.

The micro model is real: its answers come out of the released arithmetic. The dataflow model takes a
tenth of the time and is stricter, since any wrong record changes its answer.
"""

from __future__ import annotations

import pytest

from pcpkit.cache.replay import (
    BoundedReplay,
    ExactReplay,
    NoReplay,
    ReplayPolicy,
    SnapshotReplay,
)

from .dataflow_model import dataflow_config, dataflow_model
from .small_model import micro_model
from .soak import SoakResult, run_soak, soak_requests

NUM_REQUESTS = 2000
BY_NAME: dict[str, ReplayPolicy] = {
    "none": NoReplay(),
    "bounded": BoundedReplay(),
    "exact": ExactReplay(),
    "snapshot": SnapshotReplay(),
}


def _check(result: SoakResult, *, scale: int = 1) -> None:
    """Nothing is wrong, and everything that can go wrong was tried."""
    assert not result.wrong, result.wrong[:5]
    assert result.num_aborted >= 30 * scale
    assert result.num_preemptions >= 10 * scale
    assert result.num_evictions >= 1000 * scale


def test_answers_of_the_real_arithmetic_are_cold_ones() -> None:
    asked = soak_requests(NUM_REQUESTS, seed=0)
    result = run_soak(micro_model(), asked, SnapshotReplay(), seed=1, chunk_tokens=96)
    _check(result)
    assert result.num_restored >= 300


@pytest.mark.parametrize("name", ["none", "exact"])
def test_answers_of_a_model_that_forgives_nothing_are_cold_ones(name: str) -> None:
    asked = soak_requests(NUM_REQUESTS, seed=2)
    model = dataflow_model(dataflow_config())
    result = run_soak(model, asked, BY_NAME[name], seed=3, chunk_tokens=24)
    if name == "none":
        assert not result.wrong, result.wrong[:5]
        assert result.num_hits == 0
    else:
        _check(result)
        assert result.num_hits >= 300


def test_an_approximate_replay_is_found_out_and_leaks_nothing() -> None:
    """The check can fail: answers behind a bounded replay differ from cold ones."""
    model = dataflow_model(dataflow_config())
    result = run_soak(
        model, soak_requests(300, seed=4), BY_NAME["bounded"], seed=5, chunk_tokens=48
    )
    assert result.wrong


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["exact", "snapshot"])
@pytest.mark.parametrize("chunk", [7, 200])
def test_a_long_soak(name: str, chunk: int) -> None:
    asked = soak_requests(20 * NUM_REQUESTS, seed=6)
    model = dataflow_model(dataflow_config(compress_ratios=(0, 2, 2, 1, 1, 0)))
    _check(run_soak(model, asked, BY_NAME[name], seed=7, chunk_tokens=chunk), scale=20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_long_soak_of_the_real_arithmetic() -> None:
    asked = soak_requests(5 * NUM_REQUESTS, seed=8)
    _check(run_soak(micro_model(), asked, ExactReplay(), seed=9, chunk_tokens=48), scale=5)
