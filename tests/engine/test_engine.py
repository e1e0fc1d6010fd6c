"""The engine on a real (small) model: the promises that users see."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcpkit.engine import Engine, EngineConfig, Request, RequestOutput
from pcpkit.engine.runner import ComputedStep
from pcpkit.model.decoder import TextModel

from .small_model import random_prompt, request

# A forward takes 0.1 s or more: a few examples that differ are worth more than many.
FEW = settings(max_examples=4)
SMALL = EngineConfig(chunk_tokens=5, max_requests=2)


def _run(
    model: TextModel, requests: Sequence[Request], config: EngineConfig, steps: Sequence[int] = ()
) -> list[RequestOutput]:
    """Run to the end; the first steps have the given sizes."""
    engine = Engine(model, config)
    for asked in requests:
        engine.submit(asked)
    outputs: dict[str, RequestOutput] = {}
    sizes = iter(steps)
    while engine.has_work:
        result = engine.step(next(sizes, None))
        engine.check_invariants()
        assert result.num_prompt_rows + result.num_decode_rows <= config.chunk_tokens
        outputs |= {output.request.request_id: output for output in result.finished}
    return [outputs[asked.request_id] for asked in requests]


def _assert_same(left: RequestOutput, right: RequestOutput) -> None:
    assert left.token_ids == right.token_ids
    assert left.finish_reason == right.finish_reason
    assert (left.logits is None) == (right.logits is None)
    if left.logits is not None and right.logits is not None:
        assert torch.equal(left.logits, right.logits)


def _sampled(name: str, length: int, seed: int) -> Request:
    return request(
        name,
        random_prompt(length, seed),
        max_new_tokens=4,
        temperature=0.8,
        top_p=0.9,
        seed=seed,
        logits="all",
        ignore_eos=True,
    )


@pytest.fixture(scope="module")
def mixed() -> list[Request]:
    """Greedy and sampled requests of odd and even lengths, past the window and top-k."""
    greedy = request("greedy", random_prompt(53, 0), max_new_tokens=4, logits="all")
    return [greedy, _sampled("s1", 38, 1), _sampled("s2", 1, 2)]


@pytest.fixture(scope="module")
def alone(model: TextModel, mixed: list[Request]) -> list[RequestOutput]:
    return [_run(model, [asked], EngineConfig(chunk_tokens=64))[0] for asked in mixed]


@FEW
@given(steps=st.lists(st.integers(1, 40), max_size=6))
def test_chunking_changes_nothing(
    model: TextModel, mixed: list[Request], alone: list[RequestOutput], steps: list[int]
) -> None:
    (output,) = _run(model, mixed[:1], EngineConfig(chunk_tokens=40), steps)
    _assert_same(output, alone[0])


@FEW
@given(
    order=st.permutations(range(3)), chunk=st.sampled_from([7, 32, 128]), slots=st.integers(1, 3)
)
def test_company_changes_nothing(
    model: TextModel,
    mixed: list[Request],
    alone: list[RequestOutput],
    order: list[int],
    chunk: int,
    slots: int,
) -> None:
    config = EngineConfig(chunk_tokens=chunk, max_requests=slots)
    outputs = _run(model, [mixed[place] for place in order], config)
    for output, place in zip(outputs, order, strict=True):
        _assert_same(output, alone[place])


def test_block_sizes_and_reuse_of_dirty_blocks_change_nothing(
    model: TextModel, mixed: list[Request], alone: list[RequestOutput]
) -> None:
    """A pool that holds one request at a time, so that the later ones get used blocks."""
    config = EngineConfig(
        chunk_tokens=32, max_requests=2, num_blocks=15, block_size=4, window_block_size=8
    )
    outputs = _run(model, [mixed[0], mixed[1], mixed[2]], config)
    for output, expected in zip(outputs, alone, strict=True):
        _assert_same(output, expected)


def test_the_record_of_compressed_rows_matters(
    model: TextModel, mixed: list[Request], alone: list[RequestOutput]
) -> None:
    (output,) = _run(model, mixed[:1], EngineConfig(compressed_format="mxfp8"))
    assert output.logits is not None
    assert alone[0].logits is not None
    assert not torch.equal(output.logits, alone[0].logits)


def test_greedy_tokens_are_the_largest_logits(alone: list[RequestOutput]) -> None:
    output = alone[0]
    assert output.logits is not None
    prompt = len(output.request.prompt_token_ids)
    assert output.logits.shape == (prompt + len(output.token_ids) - 1, 320)
    assert output.logits.dtype == torch.float32
    assert tuple(output.logits[prompt - 1 :].argmax(1).tolist()) == output.token_ids


@pytest.mark.parametrize(("kept", "rows"), [("none", None), ("last", 3), ("all", 11)])
def test_logits_are_kept_as_asked(model: TextModel, kept: str, rows: int | None) -> None:
    prompt = random_prompt(9, 5)
    everything = _run(model, [request("r", prompt, max_new_tokens=3, logits="all")], SMALL)[0]
    (output,) = _run(model, [request("r", prompt, max_new_tokens=3, logits=kept)], SMALL)
    if rows is None:
        assert output.logits is None
        return
    assert output.logits is not None
    assert everything.logits is not None
    assert torch.equal(output.logits, everything.logits[-rows:])


def test_stop_tokens_end_a_request(model: TextModel) -> None:
    prompt = random_prompt(9, 5)
    (free,) = _run(model, [request("r", prompt, max_new_tokens=6, ignore_eos=True)], SMALL)
    assert (len(free.token_ids), free.finish_reason) == (6, "length")
    stop = free.token_ids[2]
    first = free.token_ids.index(stop)
    asked = request("r", prompt, max_new_tokens=6, ignore_eos=True, stop_token_ids=(stop,))
    (output,) = _run(model, [asked], SMALL)
    assert (output.token_ids, output.finish_reason) == (free.token_ids[: first + 1], "stop")


def test_the_models_end_of_sentence_ends_a_request(model: TextModel) -> None:
    prompt = random_prompt(9, 5)
    (free,) = _run(model, [request("r", prompt, max_new_tokens=4, ignore_eos=True)], SMALL)
    eos = free.token_ids[1]
    ending = copy.copy(model)
    ending.config = replace(model.config, eos_token_id=eos)
    (output,) = _run(ending, [request("r", prompt, max_new_tokens=4)], SMALL)
    assert output.token_ids == free.token_ids[: free.token_ids.index(eos) + 1]
    assert output.finish_reason == "stop"
    (ignoring,) = _run(ending, [request("r", prompt, max_new_tokens=4, ignore_eos=True)], SMALL)
    assert ignoring.token_ids == free.token_ids


def test_window_storage_follows_the_window_and_not_the_length(model: TextModel) -> None:
    """A request of 200 tokens at window 16 never holds more than window + chunk, in blocks."""
    held: list[int] = []

    def watch(step: ComputedStep) -> None:
        held.append(int((step.batch.window_block_table >= 0).sum()))

    config = EngineConfig(chunk_tokens=24, max_requests=1, window_block_size=8)
    engine = Engine(model, config, observe=watch)
    engine.submit(request("r", random_prompt(200, 0), max_new_tokens=3))
    engine.run()
    assert len(held) == 11
    # 16 + 24 - 1 consecutive positions touch at most 6 blocks of 8; a decode row's 16 at most 3.
    assert max(held) <= 6
    assert max(held[-2:]) <= 3
    engine.check_invariants()


def test_requests_wait_and_all_of_them_finish(model: TextModel) -> None:
    """Five requests, room for one or two: results in the order asked, nothing left behind."""
    config = EngineConfig(chunk_tokens=16, max_requests=2, num_blocks=4, block_size=8)
    engine = Engine(model, config)
    lengths = (20, 3, 29, 8, 14)
    asked = [
        request(str(place), random_prompt(length, place), max_new_tokens=2, ignore_eos=True)
        for place, length in enumerate(lengths)
    ]
    outputs = engine.generate(asked)
    assert [output.request for output in outputs] == asked
    assert all(len(output.token_ids) == 2 for output in outputs)
    assert not engine.has_work
    engine.check_invariants()
    # The same engine serves the same ids again.
    (again,) = engine.generate(asked[:1])
    assert again.token_ids == outputs[0].token_ids


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (request("r", ()), "at least one prompt token"),
        (request("r", (3, 320)), "token ids 0 .. 319, got 320"),
        (request("r", [3] * 512, max_new_tokens=1), "at most 512 tokens"),
        (request("r", [3] * 60, max_new_tokens=6), "at most 8 blocks, got 9 for 65 tokens"),
    ],
)
def test_what_can_never_run_is_refused_at_submission(
    model: TextModel, asked: Request, problem: str
) -> None:
    engine = Engine(model, EngineConfig(num_blocks=8, block_size=8))
    with pytest.raises(ValueError, match=problem):
        engine.submit(asked)
    with pytest.raises(ValueError, match=problem):
        engine.generate([request("fine", (3, 4)), asked])
    assert not engine.has_work


@pytest.mark.parametrize("reserve", [False, True])
def test_the_last_sampled_token_needs_no_block(model: TextModel, reserve: bool) -> None:
    """24 + 1 tokens in 6 blocks of 4; the same with 22 + 3, and one more is refused."""
    engine = Engine(
        model, EngineConfig(num_blocks=6, block_size=4, window_block_size=4, reserve=reserve)
    )
    for length, new in ((24, 1), (22, 3)):
        asked = request("r", random_prompt(length, 0), max_new_tokens=new, ignore_eos=True)
        (output,) = engine.generate([asked])
        assert len(output.token_ids) == new
        engine.check_invariants()
        more = request("r", random_prompt(length, 0), max_new_tokens=new + 1)
        with pytest.raises(ValueError, match="at most 6 blocks, got 7 for 25 tokens"):
            engine.submit(more)


@pytest.mark.parametrize("spare", [None, 0, 100])
def test_the_default_pool_runs_all_requests_at_their_longest(
    model: TextModel, spare: int | None
) -> None:
    """They start in one step, whatever an admission leaves free, and none is preempted."""
    longest = model.max_model_len
    for length in (5, longest - 40):
        config = EngineConfig(
            chunk_tokens=3 * longest, max_requests=3, block_size=32, num_spare_blocks=spare
        )
        engine = Engine(model, config)
        for seed in range(3):
            engine.submit(
                request(
                    str(seed),
                    random_prompt(length, seed),
                    max_new_tokens=3,
                    ignore_eos=True,
                )
            )
        assert engine.step().num_prompt_rows == 3 * length
        assert [output.num_preemptions for output in engine.run()] == [0, 0, 0]


def test_a_request_id_is_used_once_at_a_time(model: TextModel) -> None:
    engine = Engine(model, SMALL)
    asked = request("r", (3, 4), max_new_tokens=1)
    engine.submit(asked)
    with pytest.raises(ValueError, match="'r' again"):
        engine.submit(asked)
    with pytest.raises(ValueError, match="'twice' again"):
        engine.generate([request("twice", (3,)), request("twice", (4,))])
    assert len(engine.run()) == 1


def test_a_step_needs_a_budget(model: TextModel) -> None:
    with pytest.raises(ValueError, match="max_rows expected at least 1, got 0"):
        Engine(model, SMALL).step(0)


def test_a_step_without_requests_does_nothing(model: TextModel) -> None:
    result = Engine(model, SMALL).step()
    assert (result.num_prompt_rows, result.num_decode_rows, result.finished) == (0, 0, ())


def test_times_come_from_the_clock(model: TextModel) -> None:
    """A clock that ticks once a reading: first token after the wait, then the decode steps."""
    ticks = iter(range(1000))
    engine = Engine(model, SMALL, clock=lambda: float(next(ticks)))
    (output,) = engine.generate([request("r", (3, 4, 5), max_new_tokens=3, ignore_eos=True)])
    # Readings: submit 0; per step start, sampling, end: 1 2 3, 4 5 6, 7 8 9.
    assert (output.ttft_s, output.decode_s) == (2.0, 6.0)
