"""Schedules of a few requests, and what it means that two runs of them are the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from pcpkit.config import CacheConfig, ParallelConfig
from pcpkit.model.decoder import Numerics
from pcpkit.plan.partition import PartitionStrategy
from pcpkit.testing.batches import RaggedBatch, RequestRows, Steps, assemble_steps
from pcpkit.testing.compare import assert_replicas_equal, same_bits
from pcpkit.testing.strategies import chunk_splits

from .micro import (
    LAYOUT,
    VOCAB_SIZE,
    WINDOW_SIZE,
    Micro,
    RankRun,
    assert_traces,
    run_ranks,
    run_single,
)


def rows(request: int, computed: int, count: int, *, decode: bool = False) -> RequestRows:
    return RequestRows(
        request=request,
        num_computed_tokens=computed,
        query_len=count,
        is_prefilling=not decode,
        num_logits=count,
    )


def one_request(prompt: Sequence[int], decodes: int = 0) -> tuple[RaggedBatch, ...]:
    """A request alone, its prompt in chunks as told."""
    starts = [sum(prompt[:index]) for index in range(len(prompt))]
    chunks = [rows(0, start, count) for start, count in zip(starts, prompt, strict=True)]
    tokens = [rows(0, sum(prompt) + index, 1, decode=True) for index in range(decodes)]
    return tuple(RaggedBatch(requests=(one,)) for one in (*chunks, *tokens))


MIXED = (
    RaggedBatch(requests=(rows(0, 0, 9), rows(1, 0, 1))),
    RaggedBatch(requests=(rows(1, 1, 6), rows(0, 9, 1, decode=True))),
)
"""A prefill that ends on an open pair, a one-row prefill; then a chunk beside a decode."""


@st.composite
def schedules(draw: st.DrawFn) -> tuple[RaggedBatch, ...]:
    """Requests that join, rest, decode and leave at different steps; seldom more than seven."""
    steps: dict[int, list[RequestRows]] = {}
    for request in range(draw(st.integers(1, 3))):
        prompt, decodes = draw(st.integers(1, 20)), draw(st.integers(0, 2))
        step, computed = draw(st.integers(0, 2)), 0
        for length in (*draw(chunk_splits(prompt, max_chunks=3)), *[1] * decodes):
            one = rows(request, computed, length, decode=computed >= prompt)
            place = draw(st.integers(0, len(steps.setdefault(step, []))))
            steps[step].insert(place, one)
            step, computed = step + draw(st.sampled_from([1, 1, 2])), computed + length
    return tuple(RaggedBatch(requests=tuple(steps[step])) for step in sorted(steps))


def assembled(schedule: tuple[RaggedBatch, ...], seed: int, layout: CacheConfig = LAYOUT) -> Steps:
    return assemble_steps(
        schedule, layout, seed=seed, vocab_size=VOCAB_SIZE, window_size=WINDOW_SIZE
    )


def whole_prompts(steps: Steps, seed: int) -> Steps:
    """The same requests, each computed alone in one step; `seed` gives them the same ids."""
    lengths: dict[int, int] = {}
    for step in steps.rows:
        lengths |= {one.request: one.seq_len for one in step.requests}
    alone = tuple(RaggedBatch(requests=(rows(one, 0, lengths[one]),)) for one in sorted(lengths))
    return assemble_steps(alone, steps.cache, seed=seed, vocab_size=VOCAB_SIZE)


# --- what must be equal -------------------------------------------------------------------------


def assert_same_run(found: RankRun, expected: RankRun) -> None:
    """Logits and every byte of the pools after every step."""
    for step, (got, want) in enumerate(zip(found.logits, expected.logits, strict=True)):
        assert bool(want.isfinite().all()), "the yardstick read poison"
        assert same_bits(got, want), f"logits of step {step}"
    for step, (got, want) in enumerate(zip(found.digests, expected.digests, strict=True)):
        assert got == want, f"caches after step {step}"
    assert_replicas_equal([expected.caches, found.caches])


def assert_like_alone(steps: Steps, found: RankRun, alone: RankRun) -> None:
    """Records and logits of every request as if it had been computed alone in one step."""
    for request, want in alone.records.items():
        got = found.records[request]
        assert got.keys() == want.keys()
        for name, expected in want.items():
            records = got[name]
            assert records.shape == expected.shape, name
            if name.startswith("window"):
                mapped = (records != 0).any(dim=1)
                assert bool(mapped[-WINDOW_SIZE:].all()), name
                records, expected = records[mapped], expected[mapped]
            assert same_bits(records, expected), f"{name} of request {request}"
    names = sorted(alone.records)
    for step, logits in zip(steps.rows, found.logits, strict=True):
        want = [alone.logits[names.index(name)][position] for name, position in step.places]
        assert same_bits(logits, torch.stack(want))


def check(
    model: Micro,
    parallel: ParallelConfig,
    steps: Steps,
    strategies: Sequence[PartitionStrategy],
    *,
    numerics: Numerics = "released",
    expected: RankRun | None = None,
) -> RankRun:
    """All ranks equal one rank, and call what their plans foretell; returns what rank 0 did."""
    if expected is None:
        expected = run_single(model, steps, numerics=numerics)
    found = run_ranks(model, parallel, steps, strategies, numerics=numerics)
    assert len(found) == parallel.world_size
    for run in found:
        assert_same_run(run, expected)
    assert_traces(model, parallel, steps, found, "ordered")
    return found[0]
