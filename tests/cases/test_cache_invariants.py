"""Invariants 18, 19, 22, 23, 30, 31 and 32 of pcp-spec section 10, over random requests.

The others, and more tests of these, are listed in docs/field-scenarios.md.
"""

from __future__ import annotations

from typing import Literal

from hypothesis import example, given
from hypothesis import strategies as st

from pcpkit.cache.blocks import BlockPool
from pcpkit.cache.prefix import HashPrefixCache, block_hashes
from pcpkit.cache.replay import (
    BoundedReplay,
    ExactReplay,
    NoReplay,
    ReplayPolicy,
    ReplayShape,
    SnapshotReplay,
)
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.engine.adoption import PrefixReader
from pcpkit.engine.request import RequestOutput, RequestState

from .tiny import (
    BLOCK,
    TEXT,
    WINDOW,
    Watched,
    ask,
    assert_cold,
    flow_model,
    other,
    replay_reference,
)

EXACT: list[ReplayPolicy] = [NoReplay(), ExactReplay(), SnapshotReplay()]
POLICIES: list[ReplayPolicy] = [*EXACT, BoundedReplay()]
policies = st.sampled_from(POLICIES)


@given(
    replay=policies,
    num_layers=st.integers(1, 4),
    window=st.integers(1, 20),
    block_size=st.sampled_from([2, 4, 6, 8]),
    num_published=st.integers(0, 10),
    length=st.integers(1, 60),
    shared=st.integers(0, 60),
    logits=st.sampled_from(["none", "last", "all"]),
)
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(
    replay: ReplayPolicy,
    num_layers: int,
    window: int,
    block_size: int,
    num_published: int,
    length: int,
    shared: int,
    logits: Literal["none", "last", "all"],
) -> None:
    """Invariant 19. Bounded: 0 or above W; exact: 0 or above W - 1, the first that saves a row."""
    pool = BlockPool(10)
    cache = HashPrefixCache(pool, block_size)
    blocks = pool.allocate(num_published)
    for block, name in zip(blocks, block_hashes(TEXT, block_size), strict=False):
        cache.publish(block, name, exact=True)
    shape = ReplayShape(num_layers=num_layers, sliding_window=window, block_size=block_size)
    reader = PrefixReader(cache, replay, shape, SnapshotStore(0))
    prompt = (*TEXT[:shared], *other(60, 0))[:length]
    asked = ask("r", prompt, logits=logits)
    state = RequestState(request=asked, token_ids=list(prompt), submitted_at=0.0)
    adoption = reader.find(state)
    hit = adoption.plan.num_cached_tokens
    assert len(adoption.blocks) * block_size == hit
    assert list(adoption.blocks) == blocks[: hit // block_size]
    assert hit <= length - 1
    assert hit % block_size == hit % 2 == 0
    matched = min(num_published, min(shared, length - 1) // block_size) * block_size
    least = window + 1 if isinstance(replay, BoundedReplay) else window
    reads = logits != "all" and not isinstance(replay, NoReplay)
    assert hit == (matched if reads and matched >= least else 0)


@given(
    replay=policies,
    shared=st.integers(0, WINDOW + BLOCK - 1),
    rest=st.integers(1, 20),
    new=st.integers(1, 5),
    steps=st.lists(st.integers(1, 9), max_size=5),
)
def test_a_hit_within_the_window_is_a_cold_run(
    replay: ReplayPolicy, shared: int, rest: int, new: int, steps: list[int]
) -> None:
    """Invariant 31: whatever is found of at most W tokens, the answer is COLD."""
    watched = Watched(flow_model(), replay)
    watched.answer(ask("donor", (*TEXT[:shared], *other(BLOCK, 1))))
    prompt = (*TEXT[:shared], *other(rest, 2))
    watched.submit(ask("r", prompt, new))
    sizes = iter(steps)
    outputs: list[RequestOutput] = []
    while watched.engine.has_work:
        outputs += watched.step(next(sizes, None)).finished
    if isinstance(replay, BoundedReplay):
        assert outputs[0].num_cached_tokens == 0
    assert_cold(flow_model(), outputs)
    watched.assert_no_leak()


@given(
    replay=policies,
    prompts=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    new=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    shared=st.sampled_from([0, 0, 20]),
    spare=st.integers(0, 3),
    steps=st.lists(st.sampled_from([None, 1, 3, 7]), max_size=12),
)
@example(replay=BoundedReplay(), prompts=(4, 24), new=(6, 9), shared=0, spare=0, steps=[])
def test_a_preempted_request_goes_on_as_if_it_had_not_been(
    replay: ReplayPolicy,
    prompts: tuple[int, int],
    new: tuple[int, int],
    shared: int,
    spare: int,
    steps: list[int | None],
) -> None:
    """Invariants 32 and 30: COLD where all is exact; else REPLAYREF with the hit of the resumption.

    `Watched` looks after 18 (the names in the index are those of the contents, after any chunks and
    preemptions), 22, 23, 24 and 26. Preemptions do happen: the example has one.
    """
    first, late = (
        ask(name, (*TEXT[:shared], *other(40, place))[:length], count, logits="none")
        for place, (name, length, count) in enumerate(
            zip(("first", "late"), prompts, new, strict=True)
        )
    )
    needed = max(-(-one.max_tokens // BLOCK) for one in (first, late))
    watched = Watched(flow_model(), replay, num_blocks=needed + spare, chunk_tokens=16, spare=0)
    starts: dict[int, tuple[int, int]] = {}

    def note_start() -> None:
        """Tokens known and adopted when `late` started, by preemptions before."""
        state = watched.engine._states.get("late")
        if state is not None and state.stay is not None:
            plan = state.stay.replay
            if state.num_preemptions not in starts:
                assert state.num_computed_tokens in (0, plan.start), "a start survived"
                starts[state.num_preemptions] = (len(state.token_ids), plan.num_cached_tokens)

    watched.model.during = note_start
    watched.submit(first, late)
    sizes, outputs = iter(steps), dict[str, RequestOutput]()
    while watched.engine.has_work:
        finished = watched.step(next(sizes, None)).finished
        outputs |= {output.request.request_id: output for output in finished}
    watched.assert_no_leak()
    if replay.exact_only:
        assert_cold(flow_model(), [outputs["first"], outputs["late"]])
    elif not shared:
        # Both started cold, so what the first resumption adopts is exact.
        tokens = (*late.prompt_token_ids, *outputs["late"].token_ids)
        ends = [*[known for known, _ in starts.values()][1:3], len(tokens)]
        for (known, hit), end in zip([*starts.values()][:2], ends, strict=False):
            assert tokens[known:end] == replay_reference(tokens[:known], end - known, hit)
