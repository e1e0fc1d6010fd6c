"""Field scenarios of blocks and of the prefix cache: classes K1 and K18, and K2.

`Watched` runs TINY and checks blocks, bytes and contents after every step; see tests/cases/tiny.py.
COLD is bit for bit: tokens and logits. What each scenario was, and which test covers those that are
not here: docs/field-scenarios.md.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from pcpkit.cache.replay import BoundedReplay, ExactReplay, ReplayPolicy, SnapshotReplay
from pcpkit.config import CacheConfig
from pcpkit.engine.request import Phase
from pcpkit.engine.tables import CacheTables
from pcpkit.model.decoder import TextModel
from pcpkit.testing.compare import same_bits
from tests.engine.scheduling import fake_engine

from .tiny import (
    BLOCK,
    TEXT,
    PageOrder,
    Watched,
    ask,
    assert_cold,
    assert_same,
    flow_model,
    other,
    real_model,
    replay_reference,
)

BOTH = pytest.mark.parametrize("model_of", [flow_model, real_model], ids=["flow", "real"])
ModelOf = Callable[[], TextModel]


# --- K1: blocks and work in flight --------------------------------------------------------------


@BOTH
def test_b001_an_aborted_transfer_keeps_its_blocks_to_itself(model_of: ModelOf) -> None:
    """A's transfer still writes when B takes all that remains."""
    watched = Watched(model_of(), num_blocks=10, spare=0)
    watched.submit(ask("a", 16, 9))
    watched.step()
    transferred = watched.held("a")
    watched.blocks.quarantine("transfer of a", transferred)
    assert watched.engine.abort("a")
    assert watched.blocks.num_free == 6
    watched.submit(ask("b", other(21, 0), 4))
    outputs = []
    for byte in range(200):
        watched.fill(transferred, byte)
        if not watched.engine.has_work:
            break
        outputs += watched.step(5).finished
        if watched.engine.has_work:
            assert not set(watched.held("b")) & set(transferred)
    assert len(outputs) == 1
    assert_cold(model_of(), outputs)
    assert watched.blocks.num_free == 6
    watched.blocks.release("transfer of a")
    watched.assert_no_leak()


def test_b001_b006_who_needs_the_blocks_of_a_transfer_waits() -> None:
    """Decisions alone: an engine has no transfers yet, so nothing else would wake it."""
    engine = fake_engine(num_blocks=4, num_spare_blocks=0)
    first = engine.submit("a", 8, 9)
    engine.step()
    engine.tables.blocks.quarantine("transfer of a", first.tables.blocks)
    engine.scheduler.remove(first)
    second = engine.submit("b", 16, 1)
    for _ in range(3):
        assert engine.step() == []
        assert second.phase is Phase.WAITING
    engine.tables.blocks.release("transfer of a")
    assert engine.step() == [("b", 0, 16)]
    assert engine.tables.blocks.num_free == 4


def test_b003_no_block_changes_hands_during_a_forward() -> None:
    """There is no run-ahead. An abort in the middle of a forward waits for the end of the step."""
    watched = Watched(flow_model(), num_blocks=10)
    free: list[int] = []

    def abort() -> None:
        assert watched.engine.abort("a")
        free.append(watched.blocks.num_free)

    watched.submit(ask("a", 16, 9), ask("b", other(9, 1), 2))
    watched.model.during = abort
    watched.step()
    watched.model.during = lambda: None
    assert free == [10 - 4 - 3]
    assert watched.blocks.num_free == 10 - 3
    assert_cold(flow_model(), watched.run())
    # And the watch works.
    watched.submit(ask("c", 4))
    watched.model.during = lambda: watched.blocks.free(watched.held("c"))
    with pytest.raises(AssertionError, match="free during a forward"):
        watched.step()


def test_b004_optimism_is_not_retired() -> None:
    """W = 128, B = 32, 158 tokens settled, one more in flight."""
    sizes = CacheConfig(
        num_blocks=64, num_window_blocks=64, num_requests=1, block_size=32, window_block_size=32
    )
    tables = CacheTables(sizes, sliding_window=128)
    request = tables.open()
    tables.extend(request, 159)
    tables.retire(request, 158)
    assert request.num_retired == 0
    tables.retire(request, 159)
    assert request.num_retired == 1
    assert request.window_blocks[0] == -1
    assert all(block >= 0 for block in request.window_blocks[1:])


@BOTH
def test_b006_cached_blocks_of_a_pending_send_are_not_evicted(model_of: ModelOf) -> None:
    """A load needs every free block before the other side has read A's."""
    watched = Watched(model_of(), num_blocks=10, spare=0)
    watched.answer(ask("a", 16))
    sent = list(watched.prefix._hash_of)
    assert [watched.blocks.ref_count(block) for block in sent] == [0] * 4
    snapshot = watched.bytes_of(sent)
    watched.blocks.quarantine("send of a", sent)
    load = ask("load", other(24, 1))
    watched.submit(load)
    outputs = []
    while watched.engine.has_work:
        outputs += watched.step(7).finished
    assert [watched.blocks.ref_count(block) for block in sent] == [1] * 4
    assert all(same_bits(*pair) for pair in zip(snapshot, watched.bytes_of(sent), strict=True))
    assert watched.matched(TEXT[:16]) == 16
    watched.blocks.release("send of a")
    everything = watched.answer(ask("everything", other(39, 2)))
    assert watched.matched(TEXT[:16]) == 0
    assert_cold(model_of(), [*outputs, everything])


def test_b009_blocks_stay_in_quarantine_however_long_it_takes() -> None:
    """No time limit gives them back: requests come and go beside them."""
    watched = Watched(flow_model(), num_blocks=12, spare=0)
    watched.submit(ask("a", 18, 9))
    watched.step()
    kept = watched.held("a")
    watched.blocks.quarantine("slow", kept)
    assert watched.engine.abort("a")
    outputs = []
    for number in range(12):
        watched.submit(ask(str(number), other(9 + number, number), 3))
        while watched.engine.has_work:
            outputs += watched.step().finished
            assert not set(kept) & {*watched.blocks._free, *watched.blocks._cached_free}
            watched.fill(kept, number)
    assert len(outputs) == 12
    assert watched.engine.stats.num_evictions > 0
    assert_cold(flow_model(), outputs)
    watched.blocks.release("slow")
    watched.assert_no_leak()


# --- K2: what a cached block is -----------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("replay", [ExactReplay(), SnapshotReplay(), BoundedReplay()], ids=str)
def test_b025_two_requests_with_a_new_prefix_in_one_step(
    model_of: ModelOf, replay: ReplayPolicy
) -> None:
    """The second waits for the first one's blocks rather than to take them before they exist."""
    watched = Watched(model_of(), replay)
    for name in "ab":
        watched.submit(ask(name, (*TEXT[:12], *other(4, ord(name))), 3))
    outputs = watched.run()
    first, second = (
        next(i for i, step in enumerate(watched.rows()) if name in [row[0] for row in step])
        for name in "ab"
    )
    assert first < second
    hits = {output.request.request_id: output.num_cached_tokens for output in outputs}
    assert hits == {"a": 0, "b": 12}
    if replay.exact_only:
        assert_cold(model_of(), outputs)
    elif model_of is flow_model:
        for output in outputs:
            hit = output.num_cached_tokens
            assert output.token_ids == replay_reference(output.request.prompt_token_ids, 3, hit)


@BOTH
def test_b026_a_half_filled_block_is_not_there(model_of: ModelOf) -> None:
    """Prompt 24 in chunks of 13; whoever comes after the first finds 12 tokens, never 16."""
    watched = Watched(model_of(), BoundedReplay(), num_blocks=12, spare=0)
    watched.submit(ask("a", 24))
    watched.step(13)
    assert watched.matched(TEXT[:24]) == 12
    # With a better priority it does not wait for the rest.
    watched.submit(ask("b", 24, priority=-1))
    outputs = []
    while watched.engine.has_work:
        outputs += watched.step(13).finished
    hits = {output.request.request_id: output.num_cached_tokens for output in outputs}
    assert hits == {"a": 0, "b": 12}
    assert_cold(model_of(), [o for o in outputs if o.request.request_id == "a"])
    if model_of is flow_model:
        (found,) = (o for o in outputs if o.request.request_id == "b")
        assert found.token_ids == replay_reference(TEXT[:24], 1, 12)


def test_b026_taking_a_cached_block_up_keeps_its_name_and_it_counts_as_free() -> None:
    watched = Watched(flow_model(), num_blocks=7)
    hits = [watched.answer(ask(name, 24)).num_cached_tokens for name in "abcd"]
    assert hits == [0, 20, 20, 20]
    assert (watched.blocks.num_free, watched.blocks.num_cached_free) == (7, 7)
    # All free blocks are cached ones; a request that needs all of them runs at once.
    watched.submit(ask("e", other(27, 0)))
    assert watched.step().num_prompt_rows == 27
    watched.run()
    assert watched.matched(TEXT[:24]) == 0


@BOTH
def test_b027_an_evicted_block_is_not_found(model_of: ModelOf) -> None:
    """C takes one block of A's prefix, its last one."""
    watched = Watched(model_of(), num_blocks=8, spare=0)
    outputs = [watched.answer(ask("a", 21))]
    assert watched.matched(TEXT[:20]) == 20
    outputs.append(watched.answer(ask("c", other(16, 0))))
    evicted = [event.block for event in watched.events if event.kind == "evicted"]
    assert len(evicted) == 1
    assert watched.matched(TEXT[:20]) == 16
    outputs.append(watched.answer(ask("again", 21)))
    assert outputs[-1].num_cached_tokens == 16
    assert_cold(model_of(), outputs)


@pytest.mark.parametrize(
    ("model_of", "rounds"), [(flow_model, 10), (real_model, 2)], ids=["flow", "real"]
)
def test_b028_churn_leaves_what_survives_and_nothing_else(model_of: ModelOf, rounds: int) -> None:
    """64 blocks; a prefix of 40, again, two others of 40, the prefix once more; ten times over."""
    watched = Watched(model_of(), num_blocks=64)
    prefix = TEXT[:160]
    for number in range(rounds):
        survived: list[int] = []
        for place, prompt in enumerate(
            (prefix, prefix, other(160, 2 * number), other(160, 2 * number + 1), prefix)
        ):
            output = watched.answer(ask(f"{number}.{place}", prompt))
            if prompt == prefix and survived:
                # The last token is computed again, with its block.
                assert output.num_cached_tokens == min(survived[-1], 39 * BLOCK)
            assert_cold(model_of(), [output])
            # `Watched` compares what the test knows of contents with the index after every step.
            held = {tokens for _, tokens in watched._contents.values()}
            ends = range(BLOCK, 161, BLOCK)
            survived.append(next((end - BLOCK for end in ends if prefix[:end] not in held), 160))
            assert watched.matched(prefix) == survived[-1]
        assert survived == [160, 160, 96, 0, 160]
    assert watched.engine.stats.num_evictions >= 40 * rounds


@BOTH
def test_b030_a_match_is_no_promise_until_the_request_is_admitted(model_of: ModelOf) -> None:
    """No rows are left for A; then B takes everything that is free, A's prefix too."""
    watched = Watched(model_of(), num_blocks=10, spare=0)
    watched.answer(ask("donor", 16))
    a = (*TEXT[:16], *other(4, 1))
    watched.submit(ask("r", other(16, 2)), ask("a", a))
    watched.step(15)
    assert watched.matched(a) == 16
    assert watched.engine._states["a"].phase is Phase.WAITING
    watched.submit(ask("b", other(24, 3), priority=-1))
    outputs = list(watched.step().finished)
    assert watched.matched(a) == 0
    outputs += watched.run()
    assert {o.request.request_id: o.num_cached_tokens for o in outputs} == dict.fromkeys("rab", 0)
    assert_cold(model_of(), outputs)


@BOTH
def test_b031_a_failed_admission_remembers_nothing(model_of: ModelOf) -> None:
    """A finds four blocks and has no room; when it has, they are gone."""
    watched = Watched(model_of(), num_blocks=12, spare=0)
    watched.answer(ask("donor", 16))
    a = (*TEXT[:16], *other(12, 1))
    watched.submit(ask("r", other(24, 2), 24))
    watched.step()
    watched.submit(ask("a", a))
    watched.step()
    assert watched.matched(a) == 16
    assert watched.engine._states["a"].phase is Phase.WAITING
    outputs = watched.run()
    (output,) = (o for o in outputs if o.request.request_id == "a")
    assert output.num_cached_tokens == 0
    assert [row for step in watched.rows() for row in step if row[0] == "a"] == [("a", 0, 28)]
    assert_cold(model_of(), outputs)


@BOTH
@pytest.mark.parametrize("new_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_b035_any_order_of_pages_gives_the_same_answer(model_of: ModelOf, new_tokens: int) -> None:
    prompt = (*TEXT[:24], *other(new_tokens, 0))
    outputs = []
    orders: list[PageOrder] = ["ascending", "descending", "shuffled"]
    for pages in orders:
        watched = Watched(model_of(), BoundedReplay(), pages=pages)
        watched.answer(ask("donor", 25))
        outputs.append(watched.answer(ask("r", prompt, 3)))
        table = watched.steps[-1].batch.block_table[0].tolist()
        assert (table == sorted(table)) == (pages == "ascending")
        assert (table[:6] == sorted(table[:6], reverse=True)) == (pages == "descending")
    for output in outputs:
        assert output.num_cached_tokens == 24
        assert_same(output, outputs[0])
        if model_of is flow_model:
            assert output.token_ids == replay_reference(prompt, 3, 24)


# --- K18: names of blocks -----------------------------------------------------------------------


def test_b149_nothing_is_named_by_the_interpreters_own_hash() -> None:
    """Its seed differs between processes."""
    folder = Path(__file__).resolve().parents[2] / "src"
    files = sorted(folder.rglob("*.py"))
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "hash", f"{file.name}:{node.lineno}"
