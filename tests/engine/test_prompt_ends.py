"""Snapshots at the ends of prompts: sent again, gone on from; and who waits for a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pcpkit.cache.replay import NoReplay, ReplayPolicy, SnapshotReplay
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.engine import Engine, EngineConfig, Request, RequestOutput
from pcpkit.engine.sizing import TrimSetting

from .dataflow_model import dataflow_config, dataflow_model
from .small_model import random_prompt, request

MODEL = dataflow_config()  # window 4, 4 layers: a cone of 12 rows
ENTRY_BYTES = 3 * 4 * (MODEL.head_dim + MODEL.head_dim // 32)
PROMPT = random_prompt(70, 0)  # 68 tokens are full blocks of 4


def _engine(
    replay: ReplayPolicy | None = None, *, chunk: int = 100, trim: TrimSetting = "off"
) -> Engine:
    replay = SnapshotReplay() if replay is None else replay
    config = EngineConfig(chunk_tokens=chunk, block_size=4, window_block_size=4, trim=trim)
    store = SnapshotStore(10**6) if replay.uses_snapshots else None
    return Engine(dataflow_model(MODEL), config, replay=replay, snapshots=store)


def _ask(name: str, ids: Sequence[int], max_new_tokens: int = 3) -> Request:
    return request(name, ids, max_new_tokens=max_new_tokens, logits="last", ignore_eos=True)


def _assert_cold(output: RequestOutput) -> None:
    (expected,) = _engine(NoReplay()).generate([output.request])
    assert output.token_ids == expected.token_ids
    assert output.logits is not None
    assert expected.logits is not None
    assert torch.equal(output.logits, expected.logits)


def _starts(outputs: Sequence[RequestOutput]) -> list[tuple[int, int]]:
    for output in outputs:
        _assert_cold(output)
    return [(output.num_cached_tokens, output.num_replayed_rows) for output in outputs]


def _one_by_one(engine: Engine, asked: Sequence[Request]) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for one in asked:
        outputs += engine.generate([one])
        engine.check_invariants()
    return outputs


@pytest.mark.parametrize("chunk", [1, 3, 67, 68, 69, 100])
def test_a_prompt_that_is_sent_again_replays_nothing(chunk: int) -> None:
    """Wherever its chunks end: the step that reaches 68 has the window before it."""
    asked = [_ask(name, PROMPT) for name in "abc"]
    assert _starts(_one_by_one(_engine(chunk=chunk), asked)) == [(0, 0), (68, 0), (68, 0)]
    hits_only = _engine(SnapshotReplay(keeps_prompt_ends=False), chunk=chunk)
    assert _starts(_one_by_one(hits_only, asked)) == [(0, 0), (68, 12), (68, 0)]


def test_every_turn_of_a_conversation_starts_behind_the_prompt_before() -> None:
    """An answer of 6, then 2 tokens more: rows from the last prompt's end on, never a cone."""
    engine, ids = _engine(), tuple(PROMPT)
    outputs: list[RequestOutput] = []
    for turn in range(3):
        outputs += _one_by_one(engine, [_ask(str(turn), ids, max_new_tokens=6)])
        ids = (*ids, *outputs[-1].token_ids, 3, 4)
    # Prompts of 70, 78 and 86 tokens; the last sampled token of each was never computed. From 68 to
    # the end of the hit at 72 are 4 rows, from 76 to 80 too.
    assert _starts(outputs) == [(0, 0), (72, 4), (80, 4)]


def test_a_prefix_shorter_than_a_window_is_found_too() -> None:
    """Without a snapshot a hit of fewer than W tokens is cold: no layer would gain."""
    config = dataflow_config(sliding_window=12)
    engine = Engine(
        dataflow_model(config),
        EngineConfig(block_size=4, window_block_size=4),
        replay=SnapshotReplay(),
        snapshots=SnapshotStore(10**6),
    )
    outputs = _one_by_one(engine, [_ask(name, PROMPT[:9]) for name in "ab"])
    assert [(o.num_cached_tokens, o.num_replayed_rows) for o in outputs] == [(0, 0), (8, 0)]
    assert outputs[0].token_ids == outputs[1].token_ids


def test_a_hit_keeps_its_own_end_and_that_of_its_prompt() -> None:
    engine = _engine()
    asked = [_ask(str(n), (*PROMPT[:64], *random_prompt(10, n))) for n in (1, 2, 2)]
    asked.append(_ask("other", (*PROMPT[:64], *random_prompt(10, 3))))
    assert _starts(_one_by_one(engine, asked)) == [(0, 0), (64, 12), (72, 0), (64, 0)]
    assert engine._snapshots is not None
    # At 72 of three prompts, and at 64.
    assert engine._snapshots.num_bytes == 4 * ENTRY_BYTES


def test_the_two_ends_of_a_prefill_may_lie_in_different_steps() -> None:
    """64 shared tokens and 20 more, in chunks of 14: the second end is not forgotten."""
    tails = [random_prompt(20, n) for n in (1, 2)]
    asked = [_ask(str(n), (*PROMPT[:64], *tails[n])) for n in (0, 1)]
    asked.append(_ask("again", (*PROMPT[:64], *tails[1])))
    assert _starts(_one_by_one(_engine(chunk=14), asked)) == [(0, 0), (64, 12), (80, 0)]


def test_a_prompt_behind_a_hit_is_waited_for_too() -> None:
    """Both ends of a running request count: the second has its prompt's before it starts."""
    engine = _engine()
    engine.generate([_ask("first", PROMPT)])
    longer = (*PROMPT[:68], *random_prompt(10, 1))
    outputs = engine.generate([_ask(name, longer) for name in "ab"])
    assert _starts(outputs) == [(68, 0), (76, 0)]


def test_who_sends_the_same_prompt_at_once_waits_for_its_end() -> None:
    engine = _engine()
    outputs = engine.generate([_ask(name, PROMPT) for name in "abc"])
    assert _starts(outputs) == [(0, 0), (68, 0), (68, 0)]
    assert engine.stats.num_computed_rows == 70 + 2 + 2


@pytest.mark.parametrize("trim", ["exact", "bounded"])
def test_a_trimmed_prefill_keeps_only_what_a_hit_asks_for(trim: TrimSetting) -> None:
    """It does not run the rows of a snapshot in its last layers, and goes on not running them."""
    engine = _engine(trim=trim)
    outputs = _one_by_one(engine, [_ask(name, PROMPT) for name in "abc"])
    assert [output.num_replayed_rows for output in outputs] == [0, 12, 0]


@pytest.mark.parametrize(("priority", "rows"), [(0, 12 + 8), (1, 0)])
def test_only_snapshots_of_better_or_equal_requests_are_waited_for(
    priority: int, rows: int
) -> None:
    """One of priority 1 rebuilds the windows; one of 0 does it again rather than wait."""
    engine = _engine(SnapshotReplay(keeps_prompt_ends=False))
    first, keeper, other = (
        _ask(name, (*PROMPT[:64], *random_prompt(8, seed)))
        for seed, name in enumerate(("first", "keeper", "other"))
    )
    engine.generate([first])
    engine.submit(replace(keeper, priority=1))
    engine.step(4)  # a part of its cone
    engine.submit(replace(other, priority=priority))
    assert engine._states["keeper"].num_computed_tokens == 64 - 12 + 4
    engine.step(rows or 4)
    state = engine._states["other"]
    assert (state.num_computed_tokens - 52 if state.stay else 0) == rows
    outputs = {output.request.request_id: output for output in engine.run()}
    assert outputs["other"].num_replayed_rows == (12 if rows else 0)
    _starts(list(outputs.values()))


@pytest.mark.parametrize("is_short_one_stored", [False, True])
def test_nobody_waits_for_what_is_larger_than_the_store(is_short_one_stored: bool) -> None:
    """Whether the end of a prompt shorter than a window fits, and is there, or not."""
    config = dataflow_config(sliding_window=12)
    row = 4 * (config.head_dim + config.head_dim // 32)
    store = SnapshotStore(6 * row)
    engine = Engine(
        dataflow_model(config),
        EngineConfig(chunk_tokens=200, block_size=4, window_block_size=4),
        replay=SnapshotReplay(),
        snapshots=store,
    )
    engine.generate([_ask("first", (*PROMPT[:64], *random_prompt(8, 1)), 1)])
    if is_short_one_stored:
        engine.generate([_ask("short", random_prompt(6, 77), 1)])
    assert (len(store), store.is_too_small) == (int(is_short_one_stored), True)
    for seed in (2, 3, 4):
        engine.submit(_ask(str(seed), (*PROMPT[:64], *random_prompt(8, seed)), 1))
    assert len(engine.step().finished) == 3
