"""Field scenarios of requests: state and limits (K17), admission (K16), accounting (K19).

`Watched` runs TINY and checks blocks, bytes and reads after every step, that no step is empty and
that nothing leaks; see tests/cases/tiny.py. COLD is bit for bit: tokens and logits. What each
scenario was, and which test covers those that are not here: docs/field-scenarios.md.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pcpkit.cache.replay import (
    BoundedReplay,
    ExactReplay,
    NoReplay,
    ReplayPolicy,
    SnapshotReplay,
)
from pcpkit.engine import Engine, Request
from pcpkit.engine.request import RequestOutput
from pcpkit.model.decoder import TextModel
from tests.engine.dataflow_model import dataflow_config, dataflow_model

from .tiny import (
    BLOCK,
    TEXT,
    WINDOW,
    Watched,
    ask,
    assert_cold,
    assert_same,
    cold,
    flow_model,
    other,
    real_model,
    replay_reference,
)

BOTH = pytest.mark.parametrize("model_of", [flow_model, real_model], ids=["flow", "real"])
ModelOf = Callable[[], TextModel]


# --- K17: resume, limits, phase -----------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize(
    ("replay", "hit", "start"),
    [
        (NoReplay(), 0, 0),
        (BoundedReplay(), 24, 16),
        (ExactReplay(), 24, 10),
        (SnapshotReplay(), 24, 20),
        (SnapshotReplay(keeps_prompt_ends=False), 24, 10),
    ],
    ids=["none", "bounded", "exact", "snapshot", "snapshot of hits"],
)
def test_b130_a_resumed_request_prefills_what_it_had_sampled(
    model_of: ModelOf, replay: ReplayPolicy, hit: int, start: int, chunk: int
) -> None:
    """P = 24, preempted with 5 sampled tokens; 6 of its 7 cached blocks are left, or none."""
    watched = Watched(model_of(), replay, num_blocks=9, spare=0)
    late = ask("late", 24, 9, priority=1)
    watched.submit(late, ask("first", other(4, 0), 6))
    outputs: list[RequestOutput] = []
    while not (result := watched.step()).preempted:
        assert not result.finished
    outputs += result.finished
    state = watched.engine._states["late"]
    assert (len(state.output_token_ids), state.num_preemptions) == (5, 1)
    before = len(watched.steps)
    while len(state.output_token_ids) == 5:
        assert state.num_computed_tokens < 29
        outputs += watched.step(chunk).finished
    assert state.stay is not None
    assert state.stay.replay.num_cached_tokens == hit
    # P + 5 - hit, and what is replayed: from the last full block of the prompt with a snapshot.
    cuts = [(begin, min(begin + chunk, 29)) for begin in range(start, 29, chunk)]
    assert watched.rows()[before:] == [[("late", *cut)] for cut in cuts]
    outputs += watched.run()
    assert_cold(model_of(), [o for o in outputs if o.request.request_id == "first"])
    (resumed,) = (o for o in outputs if o.request.request_id == "late")
    assert resumed.num_cached_tokens == 0, "what it finds of its own is no reuse (B185)"
    want = cold(model_of(), late)
    if replay.exact_only:
        assert_same(resumed, want)
        return
    assert resumed.token_ids[:5] == want.token_ids[:5]
    if model_of is flow_model:
        known = (*late.prompt_token_ids, *want.token_ids[:5])
        assert resumed.token_ids[5:] == replay_reference(known, 4, hit)


@BOTH
def test_b132_decodes_write_the_next_position(model_of: ModelOf) -> None:
    """P = 9 and three decode steps: positions 9, 10, 11, which see 10, 11, 12 keys."""
    watched = Watched(model_of(), NoReplay())
    watched.submit(ask("r", 9, 4))
    assert watched.step().num_prompt_rows == 9
    for position in (9, 10, 11):
        (output,) = watched.step().finished or (None,)
        assert watched.rows()[-1] == [("r", position, position + 1)]
        plan, batch = watched.model.plan, watched.steps[-1].batch
        assert plan is not None
        for layer in (0, 1):
            rows = plan.layer_rows(layer)
            assert rows.positions.tolist() == [
                position
            ]  # the one that RoPE and the causal mask see
            assert rows.num_visible(1).tolist() == [position + 1]
            page = int(batch.window_block_table[0, position // BLOCK])
            assert rows.window_slots.tolist() == [page * BLOCK + position % BLOCK]
    assert output is not None
    assert_cold(model_of(), [output])
    watched.assert_no_leak()


@pytest.mark.parametrize(("prompt", "new"), [(31, 1), (28, 4)])
def test_b133_the_longest_requests(prompt: int, new: int) -> None:
    """32 tokens at most, blocks of 4: 8 of them, and never more."""
    watched = Watched(flow_model(), num_blocks=20, max_model_len=32)
    watched.submit(ask("r", prompt, new))
    held: list[int] = []
    outputs: list[RequestOutput] = []
    while watched.engine.has_work:
        outputs += watched.step().finished
        held.append(int((watched.steps[-1].batch.block_table >= 0).sum()))
    (output,) = outputs
    assert (len(output.token_ids), output.finish_reason) == (new, "length")
    assert max(held) == 8
    assert_cold(flow_model(), [output])


@pytest.mark.parametrize(("prompt", "new"), [(32, 1), (28, 100), (29, 4)])
def test_b133_a_request_that_ends_past_the_limit_is_refused(prompt: int, new: int) -> None:
    """Refused, not cut short: the caller asked for more than there can be."""
    watched = Watched(flow_model(), num_blocks=20, max_model_len=32)
    with pytest.raises(ValueError, match="expected at most 32 tokens"):
        watched.submit(ask("r", prompt, new))
    watched.assert_no_leak()


@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize("big_priority", [0, 2])
def test_b136_a_one_row_tail_of_a_prompt_leaves_decodes_alone(
    place: int, big_priority: int
) -> None:
    """Six decodes, a tail and a prompt of 64, arriving in any order."""
    watched = Watched(flow_model(), NoReplay(), max_requests=8, chunk_tokens=128)
    short = [ask(str(number), other(2 + number, number), 3) for number in range(6)]
    arriving: list[Request] = list(short)
    arriving.insert(place, ask("tail", other(9, 10), 3, priority=1))
    watched.submit(*arriving)
    # All of the short ones, and all of the tail's prompt but its last token.
    assert watched.step(sum(range(2, 8)) + 8).num_prompt_rows == 35
    watched.submit(ask("big", other(64, 11), 3, priority=big_priority))
    result = watched.step()
    assert (result.num_decode_rows, result.num_prompt_rows) == (6, 65)
    step = watched.steps[-1]
    decoding = [
        name
        for name, prefilling in zip(
            step.request_ids, step.batch.is_prefilling.tolist(), strict=True
        )
        if not prefilling
    ]
    assert sorted(decoding) == ["0", "1", "2", "3", "4", "5"]
    assert_cold(flow_model(), [*result.finished, *watched.run()])


# --- K16: admission -----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(("prompt", "new"), [(70, 1), (40, 40)])
def test_b159_what_never_fits_is_refused_and_stops_nobody(
    model_of: ModelOf, prompt: int, new: int
) -> None:
    """16 blocks of 4."""
    watched = Watched(model_of(), num_blocks=16)
    with pytest.raises(ValueError, match="expected to need at most 16 blocks"):
        watched.submit(ask("large", prompt, new))
    assert_cold(model_of(), [watched.answer(ask("small", 4, 3))])


def test_b162_a_long_cached_prompt_needs_window_blocks_for_its_replay_alone() -> None:
    """P = 50 W fully cached, window blocks for 2 W tokens: runs at once."""
    watched = Watched(
        flow_model(), BoundedReplay(), chunk_tokens=4, max_requests=1, num_window_blocks=4
    )
    watched.answer(ask("a", 50 * WINDOW))
    before = len(watched.steps)
    watched.submit(ask("b", 50 * WINDOW, 2))
    charged: list[int] = []
    outputs: list[RequestOutput] = []
    while watched.engine.has_work:
        outputs += watched.step().finished
        charged.append(int((watched.steps[-1].batch.window_block_table >= 0).sum()))
    assert watched.rows()[before] == [("b", 396 - WINDOW, 396 - WINDOW + 4)]
    assert max(charged) <= -(-(WINDOW + 4) // BLOCK) + 1
    assert outputs[0].num_cached_tokens == 396
    assert outputs[0].token_ids == replay_reference(TEXT[: 50 * WINDOW], 2, 396)
    watched.assert_no_leak()


# --- K19: leaks and accounting ------------------------------------------------------------------


@pytest.mark.parametrize("first", ["a", "b"])
@BOTH
def test_b180_two_copies_of_a_prefix(model_of: ModelOf, first: str) -> None:
    """Computed at the same time, ended in both orders, evicted. Both copies stay cached till then:
    each block has its own references, and none takes the place of another."""
    watched = Watched(model_of(), num_blocks=14, spare=0)
    for name in "ab":  # who wants the logits of every row looks nothing up
        watched.submit(ask(name, 12, 2 if name == first else 5, logits="all"))
    watched.step()
    held = {name: watched.held(name) for name in "ab"}
    assert not set(held["a"]) & set(held["b"])
    outputs = list(watched.step().finished)
    assert [output.request.request_id for output in outputs] == [first]
    (last,) = set("ab") - {first}
    assert all(watched.blocks.ref_count(block) == 0 for block in held[first][:3])
    assert all(watched.blocks.ref_count(block) == 1 for block in watched.held(last))
    # A hit takes one of the copies, whoever holds it; then everything else is evicted.
    outputs.append(watched.answer_beside(ask("hit", 13)))
    assert outputs[-1].num_cached_tokens == 12
    outputs += watched.run()
    names = [event.block_hash for event in watched.events if event.kind == "stored"]
    assert len(names) == len(set(names)) + 3, "two blocks under each of three names"
    outputs.append(watched.answer(ask("evicts", other(50, 0))))
    assert_cold(model_of(), outputs)


def test_b181_fifty_prompts_in_a_pool_for_three() -> None:
    """They finish, stop, are aborted and fail in turn; nobody's blocks stay behind."""
    watched = Watched(flow_model(), num_blocks=15)
    served = 0
    for number in range(50):
        asked = ask(str(number), other(17, number), 3)
        ending = ("finish", "stop", "abort", "error")[number % 4]
        if ending == "stop":
            stop = cold(flow_model(), asked).token_ids[0]
            asked = ask(str(number), other(17, number), 3, stop_token_ids=(stop,))
        if ending in ("finish", "stop"):
            output = watched.answer(asked)
            assert output.finish_reason == ("stop" if ending == "stop" else "length")
            assert_cold(flow_model(), [output])
            served += 1
            continue
        watched.submit(asked)
        if ending == "abort":
            watched.step(9)
            assert watched.engine.abort(asked.request_id)
        else:
            watched.model.during = _fail
            with pytest.raises(RuntimeError, match="on purpose"):
                watched.step()
            watched.model.during = lambda: None
        watched.check()
        watched.assert_no_leak()
    assert served == 26
    assert watched.engine.stats.num_evictions > 0


def _fail() -> None:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("num_tokens", [256, 257, 384, 640, 1023, 1024])
def test_b184_the_default_granule_is_one_block(num_tokens: int) -> None:
    """The released window, 128, and the default configuration: blocks of 64 for every ratio."""
    config = dataflow_config(sliding_window=128, compress_ratios=(2, 1))
    for replay in (BoundedReplay(), ExactReplay()):
        engine = Engine(dataflow_model(config, 1100), replay=replay)
        granule = engine.config.block_size
        assert granule == 64 <= 128
        prompt = tuple(3 + i % 300 for i in range(num_tokens))
        hits = [
            engine.generate([ask(name, prompt, logits="none")])[0].num_cached_tokens
            for name in "ab"
        ]
        assert hits == [0, (num_tokens - 1) // granule * granule]
