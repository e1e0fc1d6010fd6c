"""Acceptance R2: behind a hit or a preemption a request gets the bits of a cold run.

Tokens, logits and cache bytes, of the real arithmetic: the micro model for many cases, the small
one and the tiny preset for a few. One rank here, several in test_replay_ranks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcpkit.cache.replay import BoundedReplay, ExactReplay, ReplayPolicy, SnapshotReplay
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.engine import (
    CacheRecorder,
    Engine,
    EngineConfig,
    Request,
    RequestOutput,
    compare_requests,
    compare_with_cold,
    load_model,
    verify_requests,
)
from pcpkit.engine.runner import ComputedStep
from pcpkit.engine.sizing import TrimSetting
from pcpkit.model.decoder import TextModel
from pcpkit.model.tiny import make_tiny_checkpoint

from .small_model import micro_model, random_prompt, request

# An example runs some ten steps of 0.05 s and a cold run of each request.
SOME = settings(max_examples=4)
HITS_ONLY = SnapshotReplay(keeps_prompt_ends=False)
EXACT: list[ReplayPolicy] = [ExactReplay(), SnapshotReplay(), HITS_ONLY]


COLD_RUNS: WeakKeyDictionary[TextModel, dict[object, Run]] = WeakKeyDictionary()


@pytest.fixture(scope="module")
def micro() -> TextModel:
    return micro_model()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Results in the order asked, and what was written."""

    outputs: list[RequestOutput]
    recorder: CacheRecorder
    engine: Engine


def _run(
    model: TextModel,
    asked: Sequence[Request],
    config: EngineConfig,
    replay: ReplayPolicy,
    *,
    steps: Sequence[int] = (),
    snapshot_bytes: int = 10**7,
) -> Run:
    """Every second request arrives when the one before it has finished."""
    recorder = CacheRecorder(model.config)
    store = SnapshotStore(snapshot_bytes) if replay.uses_snapshots else None
    engine = Engine(model, config, replay=replay, snapshots=store, observe=recorder)
    sizes, outputs = iter(steps), dict[str, RequestOutput]()
    for place, one in enumerate(asked):
        engine.submit(one)
        if place % 2 == 0:
            continue
        while engine.has_work:
            result = engine.step(next(sizes, None))
            engine.check_invariants()
            outputs |= {output.request.request_id: output for output in result.finished}
    outputs |= {output.request.request_id: output for output in engine.run()}
    engine.check_invariants()
    return Run(outputs=[outputs[one.request_id] for one in asked], recorder=recorder, engine=engine)


def _cold(model: TextModel, asked: Request, config: EngineConfig) -> Run:
    """Alone in one step, without a prefix cache; made once a request and block size."""
    key = (asked.request_id, asked.prompt_token_ids, asked.params, config.block_size)
    made: dict[object, Run] = COLD_RUNS.setdefault(model, {})
    if key not in made:
        made[key] = _run_cold(model, asked, config)
    return made[key]


def _run_cold(model: TextModel, asked: Request, config: EngineConfig) -> Run:
    recorder = CacheRecorder(model.config)
    alone = EngineConfig(
        chunk_tokens=256,
        max_requests=1,
        block_size=config.block_size,
        window_block_size=config.window_block_size,
    )
    engine = Engine(model, alone, observe=recorder)
    return Run(outputs=engine.generate([asked]), recorder=recorder, engine=engine)


def _assert_cold(model: TextModel, run: Run, config: EngineConfig) -> None:
    for output in run.outputs:
        cold = _cold(model, output.request, config)
        found = compare_with_cold(cold.outputs[0], output, cold.recorder, run.recorder)
        assert not found, found[:5]
        assert output.exact


def _requests(lengths: Sequence[tuple[int, int, int]], new: int = 3) -> list[Request]:
    """(tokens of the common prefix, suffix tokens, suffix seed)."""
    prefix = random_prompt(64, 77)
    return [
        request(
            str(place),
            (*prefix[:shared], *random_prompt(suffix, seed)),
            max_new_tokens=new,
            logits="last",
            ignore_eos=True,
        )
        for place, (shared, suffix, seed) in enumerate(lengths)
    ]


@SOME
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([20, 33, 64]), st.integers(1, 9), st.integers(0, 2)),
        min_size=3,
        max_size=5,
    ),
    replay=st.sampled_from(EXACT),
    block_size=st.sampled_from([2, 4, 8]),
    chunk=st.sampled_from([5, 16, 64]),
    steps=st.lists(st.integers(1, 20), max_size=6),
    trim=st.sampled_from(["off", "exact"]),
)
def test_hits_give_the_bits_of_a_cold_run(
    micro: TextModel,
    lengths: list[tuple[int, int, int]],
    replay: ReplayPolicy,
    block_size: int,
    chunk: int,
    steps: list[int],
    trim: str,
) -> None:
    config = EngineConfig(
        chunk_tokens=chunk,
        max_requests=3,
        block_size=block_size,
        window_block_size=4,
        trim=trim,  # pyright: ignore[reportArgumentType]
    )
    run = _run(micro, _requests(lengths), config, replay, steps=steps)
    _assert_cold(micro, run, config)


@SOME
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([12, 24]), st.integers(1, 9), st.integers(0, 2)),
        min_size=4,
        max_size=6,
    ),
    replay=st.sampled_from(EXACT),
    chunk=st.sampled_from([6, 32]),
    new=st.sampled_from([4, 13]),
    entries=st.integers(0, 2),
)
def test_evictions_and_preemptions_in_between_change_nothing(
    micro: TextModel,
    lengths: list[tuple[int, int, int]],
    replay: ReplayPolicy,
    chunk: int,
    new: int,
    entries: int,
) -> None:
    """A pool of one request and a little more, and room for few snapshots."""
    config = EngineConfig(
        chunk_tokens=chunk,
        max_requests=4,
        num_blocks=13,
        block_size=4,
        window_block_size=4,
        num_spare_blocks=0,
    )
    entry = 3 * 3 * (micro.config.head_dim + micro.config.head_dim // 32)
    asked = _requests(lengths, new)
    run = _run(micro, asked, config, replay, snapshot_bytes=entries * entry)
    _assert_cold(micro, run, config)


def test_a_preempted_request_keeps_its_logits_once(micro: TextModel) -> None:
    """Of every row of the prompt and of every sampled token, in order."""
    config = EngineConfig(
        chunk_tokens=16,
        max_requests=2,
        num_blocks=9,
        block_size=4,
        window_block_size=4,
        num_spare_blocks=0,
    )
    asked = [
        request(name, random_prompt(8, seed), max_new_tokens=20, logits="all", ignore_eos=True)
        for seed, name in enumerate("ab")
    ]
    run = _run(micro, asked, config, ExactReplay())
    assert [output.num_preemptions for output in run.outputs] == [0, 1]
    for output in run.outputs:
        assert output.logits is not None
        assert output.logits.shape[0] == 8 + 19
    _assert_cold(micro, run, config)


def test_the_small_model_replays_its_whole_cone(model: TextModel) -> None:
    """7 layers of window 16 and Engram: 105 rows below a hit of 112 tokens."""
    config = EngineConfig(chunk_tokens=64, max_requests=2, block_size=16, window_block_size=8)
    prefix = random_prompt(112, 5)
    asked = [
        request(
            str(seed),
            (*prefix, *random_prompt(5, seed)),
            max_new_tokens=2,
            logits="last",
            ignore_eos=True,
        )
        for seed in range(3)
    ]
    for replay, rows in (
        (ExactReplay(), [0, 105, 105]),
        (HITS_ONLY, [0, 105, 0]),
        (SnapshotReplay(), [0, 0, 0]),
    ):
        run = _run(model, asked, config, replay)
        assert [output.num_replayed_rows for output in run.outputs] == rows
        _assert_cold(model, run, config)
        # The check that examples run: again, cold, alone and cut into other steps.
        assert verify_requests(model, config, run.outputs[-1:], run.recorder) == []


@pytest.mark.parametrize("trim", ["off", "exact"])
@pytest.mark.parametrize("chunk", [3, 64])
def test_a_snapshot_within_the_hit_gives_the_bits_of_a_cold_run(
    model: TextModel, chunk: int, trim: TrimSetting
) -> None:
    """A snapshot stands at 112 of 128 cached tokens: 16 rows in 7 layers, of the cone's 420
    row-layers 112, give the windows before 128, and the next snapshot."""
    config = EngineConfig(
        chunk_tokens=chunk, max_requests=1, block_size=16, window_block_size=8, trim=trim
    )
    prompt, others = random_prompt(140, 5), [random_prompt(9, seed) for seed in range(3)]
    asked = [
        request(str(place), ids, max_new_tokens=3, logits="last", ignore_eos=True)
        for place, ids in enumerate(
            (
                prompt,  # leaves 128 tokens
                (*prompt[:112], *others[0]),  # and this one a snapshot at 112
                (*prompt[:130], *others[1]),  # between them
                (*prompt[:130], *others[2]),
            )
        )
    ]
    run = _run(model, asked, config, HITS_ONLY)
    assert [output.num_cached_tokens for output in run.outputs] == [0, 112, 128, 128]
    assert [output.num_replayed_rows for output in run.outputs] == [0, 105, 16, 0]
    _assert_cold(model, run, config)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder: Path = make_tiny_checkpoint(tmp_path_factory.mktemp("replay") / "tiny")
    return load_model(folder, max_model_len=512)


def test_the_tiny_preset_replays_exactly(tiny: TextModel) -> None:
    """All layer modes, blocks of 64: 180 rows rebuild 12 layers of window 16 before 256."""
    config = EngineConfig(chunk_tokens=300, max_requests=2)
    prefix = random_prompt(256, 6)
    asked = [
        request(
            str(seed),
            (*prefix, *random_prompt(17, seed)),
            max_new_tokens=2,
            logits="last",
            ignore_eos=True,
        )
        for seed in range(3)
    ]
    for replay, rows in (
        (ExactReplay(), [0, 180, 180]),
        (HITS_ONLY, [0, 180, 0]),
        (SnapshotReplay(), [0, 0, 0]),
    ):
        run = _run(tiny, asked, config, replay)
        assert [output.num_cached_tokens for output in run.outputs] == [0, 256, 256]
        assert [output.num_replayed_rows for output in run.outputs] == rows
        _assert_cold(tiny, run, config)


# --- the approximation --------------------------------------------------------------------------


def test_a_bounded_replay_reads_nothing_below_its_start(micro: TextModel) -> None:
    """Everything that it must not touch is spoilt: window blocks of others, unwritten slots."""
    config = EngineConfig(chunk_tokens=64, max_requests=2, block_size=4, window_block_size=4)
    asked = _requests([(32, 5, 0), (32, 5, 1), (32, 5, 1)])
    plain = _run(micro, asked, config, BoundedReplay())
    assert [output.num_cached_tokens for output in plain.outputs] == [0, 32, 36]
    assert [output.exact for output in plain.outputs] == [True, False, False]

    recorder = CacheRecorder(micro.config)
    engine = Engine(micro, config, replay=BoundedReplay(), observe=recorder)
    pool = engine._runner._pool
    outputs: list[RequestOutput] = []
    for one in asked:
        outputs += engine.generate([one])
        for cache in (*pool.window.values(), *pool.ring.values()):
            cache.view(torch.uint8).fill_(0x7F)  # nobody runs, so nobody needs them
    for left, right in zip(plain.outputs, outputs, strict=True):
        assert left.token_ids == right.token_ids
        assert left.logits is not None
        assert right.logits is not None
        assert torch.isfinite(right.logits).all()
        assert torch.equal(left.logits, right.logits)


def test_a_bounded_replay_is_the_same_in_any_chunks(micro: TextModel) -> None:
    """Invariant 28: cuts inside the replayed rows and behind them."""
    asked = _requests([(32, 5, 0), (32, 9, 1)])
    runs = [
        _run(
            micro,
            asked,
            EngineConfig(chunk_tokens=chunk, max_requests=1, block_size=4, window_block_size=4),
            BoundedReplay(),
        )
        for chunk in (64, 1, 3)
    ]
    for run in runs[1:]:
        for left, right in zip(runs[0].outputs, run.outputs, strict=True):
            name = left.request.request_id
            bytes_of = (one.recorder.cache_bytes(name) for one in (runs[0], run))
            assert not compare_requests(left, right, *bytes_of)
    assert [output.num_cached_tokens for output in runs[0].outputs] == [0, 32]


def test_a_hit_of_a_window_or_less_is_a_cold_run(micro: TextModel) -> None:
    """Invariant 31 and scenario B015: window 4, blocks of 2."""
    config = EngineConfig(chunk_tokens=64, max_requests=1, block_size=2, window_block_size=4)
    for shared, adopted in ((2, 0), (4, 0), (6, 6)):
        run = _run(micro, _requests([(shared, 9, 0), (shared, 9, 1)]), config, BoundedReplay())
        assert run.outputs[1].num_cached_tokens == adopted
        assert run.outputs[1].exact == (adopted == 0)
        if not adopted:
            _assert_cold(micro, run, config)


@pytest.mark.parametrize("replay", [BoundedReplay(), *EXACT], ids=lambda p: type(p).__name__)
def test_a_hit_leaves_cached_bytes_alone(micro: TextModel, replay: ReplayPolicy) -> None:
    """Invariant 24 and scenario B014: not a byte below the hit is written, in no step."""
    config = EngineConfig(chunk_tokens=7, max_requests=2, block_size=4, window_block_size=4)
    asked = _requests([(32, 5, 0), (32, 5, 1), (32, 5, 2)])
    before: list[torch.Tensor] = []
    checked: list[int] = []

    def watch(step: ComputedStep) -> None:
        if step.batch.replay is None:
            return
        cached = int(step.batch.replay.num_cached_tokens[0])
        blocks = step.batch.block_table[0, : cached // 4].long()
        caches = (*step.pool.compressed.values(), *step.pool.index_keys.values())
        now = [cache[blocks] for cache in caches]
        assert all(torch.equal(a[: len(b)], b) for a, b in zip(before, now, strict=True))
        checked.append(cached)

    store = SnapshotStore(10**6) if replay.uses_snapshots else None
    engine = Engine(micro, config, replay=replay, snapshots=store, observe=watch)
    engine.generate(asked[:1])
    pool = engine._runner._pool
    hashes = engine._scheduler._reader._prefix
    assert hashes is not None
    names: list[bytes] = []
    hashes.extend_hashes(names, asked[0].prompt_token_ids)
    blocks = list(hashes.match(names[:8], exact_only=True).blocks)
    caches = (*pool.compressed.values(), *pool.index_keys.values())
    before += [cache[blocks].clone() for cache in caches]
    for one in asked[1:]:
        engine.generate([one])
    assert set(checked) == {32}
    assert len(checked) >= 6
