"""Requests, blocks, prefix cache and snapshots together, against a model made of dicts.

The engine is real, its forward moves data as the model does (`dataflow_model`). The rules are what
a user can do; after each of them everything is compared with what the events so far allow.
"""

from __future__ import annotations

from functools import cache
from itertools import count

import torch
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pcpkit.cache.prefix import PrefixEvent, block_hashes
from pcpkit.cache.replay import (
    BoundedReplay,
    ExactReplay,
    NoReplay,
    ReplayPolicy,
    SnapshotReplay,
)
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.engine import Engine, EngineConfig, RequestOutput
from pcpkit.engine.runner import ComputedStep

from .dataflow_model import dataflow_config, dataflow_model
from .small_model import random_prompt, request

MODEL = dataflow_config()
BLOCK = 4
NUM_BLOCKS = 14
POLICIES: dict[str, ReplayPolicy] = {
    "none": NoReplay(),
    "bounded": BoundedReplay(),
    "exact": ExactReplay(),
    "snapshot": SnapshotReplay(),
}
# Two families of prefixes, which share their first 12 tokens.
ROOT, TAILS = random_prompt(12, 0), [random_prompt(28, seed) for seed in (1, 2)]


@cache
def cold_answer(prompt: tuple[int, ...], new: int) -> tuple[int, ...]:
    """What a request gets alone on an empty engine."""
    limits = EngineConfig(chunk_tokens=64, max_requests=1, block_size=BLOCK, window_block_size=4)
    engine = Engine(dataflow_model(MODEL), limits)
    (output,) = engine.generate([request("r", prompt, max_new_tokens=new, ignore_eos=True)])
    return output.token_ids


class EngineMachine(RuleBasedStateMachine):
    """`names` is the dict model of the prefix cache: block -> (hash, exact), from its events."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count()
        self.live: set[str] = set()
        self.names: dict[int, tuple[bytes, bool]] = {}
        self.ever_published: set[bytes] = set()
        self.bytes_of: dict[int, list[torch.Tensor]] = {}

    @initialize(
        policy=st.sampled_from([*sorted(POLICIES), "snapshot"]),
        chunk=st.sampled_from([3, 8, 20]),
        slots=st.integers(1, 4),
        snapshots=st.sampled_from([3, 1, 0]),
        spare=st.sampled_from([None, 0]),
        trim=st.sampled_from(["off", "exact"]),
    )
    def start(
        self, policy: str, chunk: int, slots: int, snapshots: int, spare: int | None, trim: str
    ) -> None:
        self.policy = POLICIES[policy]
        # One entry: 3 positions of 4 layers.
        entry = 3 * 4 * (MODEL.head_dim + MODEL.head_dim // 32)
        self.store = SnapshotStore(snapshots * entry) if self.policy.uses_snapshots else None
        self.engine = Engine(
            dataflow_model(MODEL),
            EngineConfig(
                chunk_tokens=chunk,
                max_requests=slots,
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK,
                window_block_size=4,
                num_spare_blocks=spare,
                trim=trim,  # pyright: ignore[reportArgumentType]
            ),
            replay=self.policy,
            snapshots=self.store,
            observe=self.watch,
            observe_prefix=self.note,
        )

    def note(self, event: PrefixEvent) -> None:
        """Every event fits what is known."""
        if event.kind == "stored":
            assert event.block not in self.names, "a block is stored twice"
            self.names[event.block] = (event.block_hash, event.exact)
            self.ever_published.add(event.block_hash)
        else:
            assert self.names.pop(event.block) == (event.block_hash, event.exact)
            self.bytes_of.pop(event.block, None)
            assert self.engine._tables.blocks.ref_count(event.block) == 0, "held, and evicted"

    def watch(self, step: ComputedStep) -> None:
        """Nothing is written below a hit, and hits are what was stored."""
        self.pool = step.pool
        self.check_bytes()
        for state in self.engine._scheduler._running:
            if state.stay is not None and state.stay.restore is not None:
                plan, restore = state.stay.replay, state.stay.restore
                assert state.num_computed_tokens == plan.restore_at == restore.num_tokens
                assert restore.key == state.hashes[plan.restore_at // BLOCK - 1]
                is_within = plan.restore_at < plan.num_cached_tokens
                event("a snapshot within a hit" if is_within else "a snapshot at the end of a hit")

    @rule(
        family=st.integers(0, 1),
        length=st.integers(1, 40),
        new=st.integers(1, 8),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "tenant"]),
        logits=st.sampled_from(["none", "none", "all"]),
    )
    def submit(
        self, family: int, length: int, new: int, priority: int, salt: str, logits: str
    ) -> None:
        name = str(next(self.numbers))
        prompt = (*ROOT, *TAILS[family])[:length]
        asked = request(
            name,
            prompt,
            max_new_tokens=new,
            priority=priority,
            cache_salt=salt,
            logits=logits,
            ignore_eos=True,
        )
        self.engine.submit(asked)
        self.live.add(name)

    @rule(family=st.integers(0, 1), length=st.sampled_from([17, 25]))
    def converse(self, family: int, length: int) -> None:
        """Hits with a snapshot at their end and, the last, with one a block before it."""
        for more in (0, 0, 4, 4):
            self.submit(family, length + more, 1, 0, "", "none")
            self.drain()

    @rule(rows=st.sampled_from([None, None, 1, 2, 5]))
    def step(self, rows: int | None) -> None:
        had_work = self.engine.has_work
        result = self.engine.step(rows)
        assert bool(result.num_prompt_rows + result.num_decode_rows) == had_work
        for output in result.finished:
            self.check_answer(output)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        assert self.engine.abort(name)
        self.live.remove(name)

    @rule()
    def drain(self) -> None:
        for output in self.engine.run():
            self.check_answer(output)
        assert not self.live
        blocks = self.engine._tables.blocks
        assert blocks.num_free == NUM_BLOCKS, "a block leaked"

    def check_answer(self, output: RequestOutput) -> None:
        asked = output.request
        self.live.remove(asked.request_id)
        if self.policy.exact_only:
            assert output.exact
            expected = cold_answer(asked.prompt_token_ids, asked.params.max_new_tokens)
            assert output.token_ids == expected
        if asked.params.logits == "all":
            assert output.logits is not None
            rows = len(asked.prompt_token_ids) + len(output.token_ids) - 1
            assert output.logits.shape[0] == rows
        if output.num_cached_tokens:
            hashes = block_hashes(asked.prompt_token_ids, BLOCK, asked.cache_salt)
            adopted = hashes[: output.num_cached_tokens // BLOCK]
            assert set(adopted) <= self.ever_published, "a hit that was never stored"

    def check_bytes(self) -> None:
        """Bytes under a name never change; equal names of exact blocks mean equal bytes."""
        by_name: dict[bytes, list[torch.Tensor]] = {}
        for block, (name, exact) in self.names.items():
            found = [
                cache[block].clone()
                for caches in (self.pool.compressed, self.pool.index_keys)
                for cache in caches.values()
            ]
            before = self.bytes_of.setdefault(block, found)
            others = by_name.setdefault(name, found) if exact else found
            for left, middle, right in zip(before, found, others, strict=True):
                assert torch.equal(left, middle), "cached bytes changed"
                assert torch.equal(middle, right), "one name, other bytes"

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_invariants()
        blocks = self.engine._tables.blocks
        held = sum(blocks.ref_count(block) > 0 for block in range(NUM_BLOCKS))
        assert held + blocks.num_free == NUM_BLOCKS
        assert {b for b in range(NUM_BLOCKS) if blocks.is_cached(b)} == set(self.names)
        if hasattr(self, "pool"):
            self.check_bytes()
        for state in self.engine._scheduler._running:
            assert state.stay is not None
            plan, restore, captures = state.stay.replay, state.stay.restore, state.stay.captures
            adopted = plan.num_cached_tokens // BLOCK
            assert all(blocks.is_cached(block) for block in state.tables.blocks[:adopted])
            # Nothing is held of a snapshot that was copied; those to be kept are at the ends of hit
            # and prompt, and not reached yet.
            assert restore is None, "a snapshot is held behind the step that copied it"
            prompt_end = (state.num_prefill_tokens - 1) // BLOCK * BLOCK
            for point in captures:
                assert point.key == state.hashes[point.num_tokens // BLOCK - 1]
                assert state.num_computed_tokens < point.num_tokens
                assert point.num_tokens in (plan.num_cached_tokens, prompt_end)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(stateful_step_count=16)
