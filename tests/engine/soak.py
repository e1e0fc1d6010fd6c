"""Thousands of requests through an engine whose pool is far too small, checked one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from pcpkit.cache.replay import ReplayPolicy
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.engine import Engine, EngineConfig, Request, RequestOutput
from pcpkit.model.decoder import TextModel

from .small_model import random_prompt, request

NUM_ROOTS, ROOT_TOKENS, NUM_SUFFIXES, MAX_SUFFIX, MAX_NEW = 12, 32, 3, 16, 10
LARGEST = ROOT_TOKENS + MAX_SUFFIX + MAX_NEW
BLOCK = 4
MAX_REQUESTS = 32
NUM_BLOCKS = MAX_REQUESTS * -(-LARGEST // BLOCK) // 10
"""A tenth of what as many requests as may run would fill."""


@dataclass(slots=True, kw_only=True)
class SoakResult:
    """What a soak saw."""

    num_steps: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_hits: int = 0
    num_restored: int = 0
    num_evictions: int = 0
    wrong: list[str] = field(default_factory=list[str])


def soak_requests(count: int, seed: int) -> list[Request]:
    """Prompts of all lengths, most of them with a root in common with many others."""
    draw = random.Random(seed)
    asked: list[Request] = []
    for number in range(count):
        root = random_prompt(ROOT_TOKENS, draw.randrange(NUM_ROOTS))
        suffix = random_prompt(MAX_SUFFIX, 1000 + draw.randrange(NUM_SUFFIXES))
        prompt = (*root[: draw.choice((8, 32, 32, 32))], *suffix[: draw.randrange(MAX_SUFFIX + 1)])
        asked.append(
            request(
                str(number),
                prompt,
                max_new_tokens=draw.choice((1, 1, 2, MAX_NEW)),
                priority=draw.choice((0, 0, 0, 1)),
                ignore_eos=True,
            )
        )
    return asked


def cold_answers(model: TextModel, asked: list[Request]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The longest answer to each prompt, without any reuse, in a pool that holds everything."""
    prompts = sorted({one.prompt_token_ids for one in asked})
    engine = Engine(
        model,
        EngineConfig(chunk_tokens=512, max_requests=128, block_size=BLOCK, num_blocks=128 * 15),
    )
    outputs = engine.generate(
        request(str(place), prompt, max_new_tokens=MAX_NEW, ignore_eos=True)
        for place, prompt in enumerate(prompts)
    )
    return {output.request.prompt_token_ids: output.token_ids for output in outputs}


def run_soak(
    model: TextModel, asked: list[Request], replay: ReplayPolicy, *, seed: int, chunk_tokens: int
) -> SoakResult:
    """Submit in bursts, abort a few at any phase, compare every answer, check for leaks."""
    draw = random.Random(seed)
    answers = cold_answers(model, asked)
    store = SnapshotStore(40_000) if replay.uses_snapshots else None
    engine = Engine(
        model,
        EngineConfig(
            chunk_tokens=chunk_tokens,
            max_requests=MAX_REQUESTS,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK,
            window_block_size=4,
            num_spare_blocks=0,
        ),
        replay=replay,
        snapshots=store,
    )
    result = SoakResult()
    live: set[str] = set()
    waiting = iter(asked)
    finished: list[RequestOutput] = []
    while True:
        for one in _burst(waiting, draw, len(live)):
            engine.submit(one)
            live.add(one.request_id)
        if not live:
            break
        if draw.random() < 0.06:
            name = draw.choice(sorted(live))
            assert engine.abort(name)
            live.remove(name)
            result.num_aborted += 1
            continue
        step = engine.step()
        assert step.num_prompt_rows + step.num_decode_rows > 0, "stuck"
        result.num_steps += 1
        result.num_preemptions += len(step.preempted)
        finished += step.finished
        live -= {output.request.request_id for output in step.finished}
        if result.num_steps % 50 == 0:
            engine.check_invariants()
    engine.check_invariants()
    assert not engine.has_work
    blocks = engine._tables.blocks
    assert blocks.num_free == NUM_BLOCKS, "a block leaked"
    assert engine._tables.num_free_window_blocks == engine._tables._window_blocks.num_blocks
    assert len(finished) + result.num_aborted == len(asked), "a request got lost"
    for output in finished:
        expected = answers[output.request.prompt_token_ids][: len(output.token_ids)]
        if output.token_ids != expected:
            result.wrong.append(f"{output.request.request_id}: {output.token_ids}, cold {expected}")
        result.num_hits += output.num_cached_tokens > 0
        result.num_restored += output.num_cached_tokens > 0 and not output.num_replayed_rows
    result.num_evictions = engine.stats.num_evictions
    return result


def _burst(waiting: Iterator[Request], draw: random.Random, num_live: int) -> Iterator[Request]:
    """Requests that arrive now: none, or several at once."""
    if num_live < 64 and draw.random() < 0.5:
        for _, one in zip(range(draw.randint(1, 16)), waiting, strict=False):
            yield one
    elif not num_live:
        yield from (one for _, one in zip(range(1), waiting, strict=False))
