"""A step must continue what the caches hold; every refusal, and that it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pcpkit.engine.continuity import ComputedTokens
from pcpkit.engine.runner import ComputedStep, ModelRunner
from pcpkit.engine.sizing import EngineConfig, cache_config
from pcpkit.model.decoder import TextModel
from pcpkit.plan.batch import BatchReplay, StepBatch


def batch(starts: Sequence[int], lengths: Sequence[int], cached: Sequence[int] = ()) -> StepBatch:
    """Requests 0, 1, .. with their own blocks, 64 tokens each at most.

    `cached`: adopted tokens, behind which each layer starts two tokens after the one below.
    """
    replay = None
    if cached:
        hits = torch.tensor(cached, dtype=torch.int32)
        ahead = torch.tensor([4, 2], dtype=torch.int32)
        replay = BatchReplay(
            num_cached_tokens=hits, layer_starts=(hits[:, None] - ahead).clamp(min=0)
        )
    count, total = len(lengths), sum(lengths)
    blocks = torch.arange(count, dtype=torch.int32)
    return StepBatch(
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int(),
        num_computed_tokens=torch.tensor(starts, dtype=torch.int32),
        is_prefilling=torch.ones(count, dtype=torch.bool),
        token_ids=torch.arange(3, 3 + total),
        lookback_token_ids=torch.full((count, 3), -1),
        block_table=blocks[:, None],
        window_block_table=torch.stack([2 * blocks, 2 * blocks + 1], dim=1),
        ring_blocks=blocks,
        num_logits=torch.ones(count, dtype=torch.int32),
        replay=replay,
    )


def test_rows_that_continue_are_taken() -> None:
    computed = ComputedTokens(max_rows=8)
    for step, names in (
        (batch([0, 0], [3, 5]), ("a", "b")),
        (batch([5, 0], [1, 2]), ("b", "c")),
        (batch([2, 3], [4, 4]), ("c", "a")),
    ):
        computed.check(step, names)
        computed.advance(step, names)
    computed.forget("a")
    computed.forget("never seen")
    computed.check(batch([0, 6], [1, 1]), ("a", "b"))


@pytest.mark.parametrize(
    ("step", "names", "problem"),
    [
        (batch([4], [9]), ("a",), "batch expected at most 8 rows, got 9; raise chunk_tokens"),
        (batch([4, 0], [1, 1]), ("a",), "request_ids expected 2 ids, got 1"),
        (batch([4, 4], [1, 1]), ("a", "a"), "request_ids expected each id once a step, got 'a'"),
        (batch([0], [5]), ("a",), "request a expected to continue at position 4, got 0"),
        (batch([5], [1]), ("a",), "request a expected to continue at position 4, got 5"),
        (batch([4, 1], [1, 1]), ("a", "b"), "request b expected to continue at position 0, got 1"),
    ],
)
def test_what_does_not_continue_is_refused(
    step: StepBatch, names: tuple[str, ...], problem: str
) -> None:
    computed = ComputedTokens(max_rows=8)
    first = batch([0], [4])
    computed.check(first, ("a",))
    computed.advance(first, ("a",))
    with pytest.raises(ValueError, match=f"^{problem}") as caught:
        computed.check(step, names)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value), "no remedy"


def test_a_replay_starts_below_its_hit_and_stays() -> None:
    computed = ComputedTokens(max_rows=8)
    for step in (batch([4, 0], [2, 3], [8, 0]), batch([6, 3], [5, 1], [8, 0])):
        computed.check(step, ("hit", "cold"))
        computed.advance(step, ("hit", "cold"))
    # The step has no other replay, so the batch of a cold request alone may carry none.
    computed.check(batch([4], [1]), ("cold",))
    with pytest.raises(ValueError, match=r"^request hit expected to keep its 8 cached tokens "):
        computed.check(batch([11], [1], [10]), ("hit",))
    with pytest.raises(ValueError, match=r"^request hit expected to keep its 8 cached tokens "):
        computed.check(batch([11], [1]), ("hit",))
    # Preempted: a fresh start anywhere, without the old one.
    computed.forget("hit")
    computed.check(batch([0], [1]), ("hit",))
    computed.check(batch([8], [1], [12]), ("hit",))
    with pytest.raises(ValueError, match="continue at position 8, got 11"):
        computed.check(batch([11], [1], [12]), ("hit",))


@pytest.mark.parametrize("stored", [6, 8])
def test_a_restored_request_starts_at_its_snapshot(stored: int) -> None:
    """At the end of the hit, or within it."""
    computed = ComputedTokens(max_rows=8)
    step = batch([stored], [2], [8])
    with pytest.raises(ValueError, match=f"continue at position 4, got {stored}"):
        computed.check(step, ("hit",))
    for other in (4, 7, 9, 14 - stored):
        with pytest.raises(ValueError, match=f"continue at position {stored}, got {other}"):
            computed.check(batch([other], [2], [8]), ("hit",), {"hit": stored})
    computed.check(step, ("hit",), {"hit": stored})
    computed.advance(step, ("hit",))
    after = batch([stored + 2], [1], [8])
    with pytest.raises(ValueError, match=r"^request hit expected no snapshot after its first step"):
        computed.check(after, ("hit",), {"hit": stored})
    computed.check(after, ("hit",))


@pytest.mark.parametrize("stored", [0, 9])
def test_a_snapshot_outside_the_hit_is_refused(stored: int) -> None:
    computed = ComputedTokens(max_rows=8)
    problem = f"^request hit expected a snapshot that ends in its 8 cached tokens, got .* {stored};"
    with pytest.raises(ValueError, match=problem):
        computed.check(batch([stored], [1], [8]), ("hit",), {"hit": stored})
    with pytest.raises(ValueError, match="ends in its 0 cached tokens, got one at 8"):
        computed.check(batch([0], [1]), ("cold",), {"cold": 8})


def test_the_runner_refuses_before_it_computes(model: TextModel) -> None:
    seen: list[ComputedStep] = []
    limits = EngineConfig(max_requests=2, chunk_tokens=8)
    runner = ModelRunner(
        model, cache_config(model.config, limits, 64), max_rows=8, observe=seen.append
    )
    whole = batch([0], [6])
    logits = runner.run(whole, ("a",))
    assert logits.shape == (1, 320)
    before = {name: tensor.clone() for name, tensor in seen[0].pool.tensors().items()}
    for step, names in (
        (whole, ("a",)),
        (batch([6], [9]), ("a",)),
        (batch([6, 6], [1, 1]), ("a", "a")),
        (replace(batch([6], [1]), num_logits=torch.tensor([2], dtype=torch.int32)), ("a",)),
    ):
        with pytest.raises(ValueError, match=" expected "):
            runner.run(step, names)
    assert len(seen) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in seen[0].pool.tensors().items())
    # A refused step counts for nothing: the next rows are still the next ones.
    runner.run(batch([6], [1]), ("a",))
    runner.forget("a")
    assert torch.equal(runner.run(whole, ("a",)), logits)
