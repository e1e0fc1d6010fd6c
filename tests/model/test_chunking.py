"""Any chunking, batching and placement of a prompt gives the same cache bytes and logits bits.

The yardstick is the prompt alone in one step. Pools start as 0xFF bytes (NaN in every record and in
the ring), blocks are mapped only when they are needed and poisoned again once the window has left
them, so reading a slot that is not the row's to read shows up as NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from pcpkit.cache.pool import CachePool
from pcpkit.config import CacheConfig, CompressedFormat
from pcpkit.model.decoder import Numerics, TextModel

from .golden import GoldenDir
from .stepping import (
    Request,
    compressed_rows,
    index_rows,
    load_checkpoint,
    next_plan,
    open_row,
    poisoned_pool,
    whole_pool,
    window_rows,
)

ModelOf = Callable[[str, Numerics], TextModel]

MAX_LENGTH = 40
MAX_REQUESTS = 3
# Blocks far smaller than in use, so that a short prompt fills several and outlives some.
CACHE = CacheConfig(
    num_blocks=MAX_REQUESTS * 3 + 2,
    num_window_blocks=MAX_REQUESTS * 5 + 2,
    num_requests=MAX_REQUESTS + 1,
    block_size=16,
    window_block_size=8,
)
# An example is several steps of a whole model, so a profile's count of examples is too many.
FEW = settings(max_examples=max(5, settings().max_examples // 10))


@pytest.fixture(scope="module")
def model_of(golden_dir: GoldenDir) -> ModelOf:
    @cache
    def load(case: str, numerics: Numerics) -> TextModel:
        return replace(load_checkpoint(golden_dir(case)), numerics=numerics).model()

    return load


# --- what is compared ---------------------------------------------------------------------------


def cache_rows(model: TextModel, pool: CachePool, request: Request) -> dict[str, Tensor]:
    """Every record of compressed KV and index keys, and the open ring rows, by name."""
    config, out = model.config, dict[str, Tensor]()
    for layer in config.kv_source_layer_ids:
        count = len(request.ids) // config.compress_ratio(layer)
        out[f"compressed.{layer}"] = compressed_rows(pool, request, layer, 0, count)
        out[f"index_keys.{layer}"] = index_rows(pool, request, layer, 0, count)
    for layer in config.ratio2_sources:
        row = open_row(pool, request, layer)
        if row is not None:
            out[f"ring.{layer}"] = row
    return out


def one_step(model: TextModel, sizes: CacheConfig, ids: Sequence[int]) -> dict[str, Tensor]:
    """The prompt alone in one step: logits of every row and all cache rows, by name."""
    pool, request = whole_pool(model.config, sizes)
    plan = next_plan(model.config, sizes, [(request, ids)])
    out = {"logits": model.forward(plan, pool)} | cache_rows(model, pool, request)
    for layer in range(model.config.num_hidden_layers):
        out[f"window.{layer}"] = window_rows(pool, request, layer, 0, len(ids))
    return out


def assert_same_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        same = found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
        assert torch.equal(*same), name
    assert bool(expected["logits"].isfinite().all()), "the yardstick read poisoned memory"


# --- schedules ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of one request in one step."""

    request: int
    count: int
    num_logits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Prompts of several requests and the steps that compute them."""

    lengths: tuple[int, ...]
    steps: tuple[tuple[Part, ...], ...]
    seed: int
    """Draws the token ids and the physical blocks."""
    alphabet: int
    """Distinct token ids; few make equal index keys, hence tied scores."""
    compressed_format: CompressedFormat = "nvfp4"


def alone(chunks: Sequence[int]) -> Schedule:
    """One request, cut as told."""
    steps = tuple((Part(request=0, count=count, num_logits=count),) for count in chunks)
    return Schedule(lengths=(sum(chunks),), steps=steps, seed=0, alphabet=MAX_LENGTH)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    lengths = draw(st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=MAX_REQUESTS))
    left, steps = list(lengths), list[tuple[Part, ...]]()
    sizes = st.sampled_from([MAX_LENGTH, 1, 2, 3, 7, 16])
    while any(left):
        waiting = draw(st.permutations([i for i, count in enumerate(left) if count]))
        parts: list[Part] = []
        for request in waiting[: draw(st.integers(1, len(waiting)))]:
            count = min(left[request], draw(sizes))
            num_logits = draw(st.sampled_from([count, 1, 0]))
            parts.append(Part(request=request, count=count, num_logits=num_logits))
            left[request] -= count
        steps.append(tuple(parts))
    return Schedule(
        lengths=tuple(lengths),
        steps=tuple(steps),
        seed=draw(st.integers(0, 2**16)),
        alphabet=draw(st.sampled_from([MAX_LENGTH, 3])),
        compressed_format=draw(st.sampled_from(["nvfp4", "mxfp8"])),
    )


class Batch:
    """Requests of one schedule in one pool, blocks scattered over it."""

    def __init__(self, model: TextModel, sizes: CacheConfig, schedule: Schedule) -> None:
        generator = torch.Generator().manual_seed(schedule.seed)

        def shuffled(count: int) -> list[int]:
            return torch.randperm(count, generator=generator).tolist()

        self.model, self.sizes = model, sizes
        self.pool = poisoned_pool(model.config, sizes)
        letters = shuffled(model.config.vocab_size)[: schedule.alphabet]
        self.prompts = [
            [letters[i] for i in torch.randint(len(letters), (n,), generator=generator).tolist()]
            for n in schedule.lengths
        ]
        self._free = shuffled(sizes.num_blocks)
        self._free_window = shuffled(sizes.num_window_blocks)
        rings = shuffled(sizes.num_requests)
        self.requests = [Request(blocks=[], window_blocks=[], ring_block=r) for r in rings]
        self.requests = self.requests[: len(self.prompts)]
        self.logits: list[dict[int, Tensor]] = [{} for _ in self.prompts]
        self.windows: list[dict[str, list[Tensor]]] = [{} for _ in self.prompts]

    def run(self, step: Sequence[Part]) -> None:
        """One step; keeps logits by position and the window records just written."""
        parts: list[tuple[Request, list[int]]] = []
        for part in step:
            request = self.requests[part.request]
            start, end = len(request.ids), len(request.ids) + part.count
            self._retire(request)
            self._map(request, end)
            parts.append((request, self.prompts[part.request][start:end]))
        counts = [part.num_logits for part in step]
        plan = next_plan(self.model.config, self.sizes, parts, counts)
        logits = self.model.forward(plan, self.pool).split(counts)
        for part, rows in zip(step, logits, strict=True):
            request = self.requests[part.request]
            end = len(request.ids)
            self.logits[part.request] |= dict(zip(range(end - len(rows), end), rows, strict=True))
            for layer in range(self.model.config.num_hidden_layers):
                written = window_rows(self.pool, request, layer, end - part.count, end)
                kept = self.windows[part.request].setdefault(f"window.{layer}", [])
                kept.append(written)

    def result(self, index: int) -> dict[str, Tensor]:
        """What `one_step` gives, the logits only of positions in `logits[index]`."""
        positions = sorted(self.logits[index])
        vocab_size = self.model.config.vocab_size
        rows = [self.logits[index][position] for position in positions]
        out = {"logits": torch.stack(rows) if rows else torch.empty(0, vocab_size)}
        out |= cache_rows(self.model, self.pool, self.requests[index])
        return out | {name: torch.cat(kept) for name, kept in self.windows[index].items()}

    def assert_rest_is_poison(self) -> None:
        """No byte was written besides the records of the requests and their ring blocks."""
        rest = {name: tensor.clone() for name, tensor in self.pool.tensors().items()}
        for request in self.requests:
            for name, tensor in rest.items():
                kind, layer = name.split(".")
                if kind == "ring":
                    tensor[request.ring_block] = torch.nan
                    continue
                ratio = 1 if kind == "window" else self.model.config.compress_ratio(int(layer))
                where = torch.arange(len(request.ids) // ratio)
                blocks = request.window_blocks if kind == "window" else request.blocks
                pages = torch.tensor(blocks)[where // tensor.shape[1]]
                mapped = pages >= 0
                tensor[pages[mapped], where[mapped] % tensor.shape[1]] = 0xFF
        for name, tensor in rest.items():
            clean = tensor.isnan() if tensor.is_floating_point() else tensor == 0xFF
            assert bool(clean.all()), name

    def _map(self, request: Request, end: int) -> None:
        while len(request.blocks) * self.sizes.block_size < end:
            request.blocks.append(self._free.pop())
        while len(request.window_blocks) * self.sizes.window_block_size < end:
            request.window_blocks.append(self._free_window.pop())

    def _retire(self, request: Request) -> None:
        """Unmap and poison window blocks that no row from here on may read."""
        floor = len(request.ids) - self.model.config.sliding_window + 1
        for index in range(max(0, floor) // self.sizes.window_block_size):
            block = request.window_blocks[index]
            if block >= 0:
                for tensor in self.pool.window.values():
                    tensor[block] = 0xFF
                request.window_blocks[index] = -1
                self._free_window.append(block)  # next to be taken


def check(model: TextModel, schedule: Schedule, sizes: CacheConfig = CACHE) -> None:
    """Run the schedule; every request equals its prompt alone in one step."""
    sizes = replace(sizes, compressed_format=schedule.compressed_format)
    batch = Batch(model, sizes, schedule)
    for step in schedule.steps:
        batch.run(step)
    for index, ids in enumerate(batch.prompts):
        expected = one_step(model, sizes, ids)
        expected["logits"] = expected["logits"][sorted(batch.logits[index])]
        assert_same_bytes(batch.result(index), expected)
    batch.assert_rest_is_poison()


# --- tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "numerics"),
    [("tiny-main", "released"), ("tiny-dspark", "released"), ("tiny-dspark", "weight_only")],
)
@FEW
@given(schedule=schedules())
@example(schedule=alone([7, 9]))
@example(schedule=alone([1] * 20))
@example(schedule=alone([17, 8, 1, 14]))  # the 8 rows read and replace one ring row
def test_any_schedule_equals_one_step(
    case: str, numerics: Numerics, model_of: ModelOf, schedule: Schedule
) -> None:
    check(model_of(case, numerics), schedule)


@pytest.mark.parametrize(("case", "prompt"), [("tiny-main", 1), ("tiny-dspark", 1)])
def test_token_by_token_decode_equals_prefill(
    case: str, prompt: int, model_of: ModelOf, golden_dir: GoldenDir
) -> None:
    """A golden prompt, long enough that positions, blocks and window rows have dropped out."""
    ids = load_file(golden_dir(case) / "golden.safetensors")[f"p{prompt}.tokens"].tolist()
    model = model_of(case, "released")
    sizes = CacheConfig(num_blocks=1, num_window_blocks=2, num_requests=1)
    pool, request = whole_pool(model.config, sizes)
    rows = [
        model.forward(next_plan(model.config, sizes, [(request, [token])]), pool) for token in ids
    ]
    found = {"logits": torch.cat(rows)} | cache_rows(model, pool, request)
    for layer in range(model.config.num_hidden_layers):
        found[f"window.{layer}"] = window_rows(pool, request, layer, 0, len(ids))
    assert_same_bytes(found, one_step(model, sizes, ids))


def test_released_head_sizes_in_chunks(model_of: ModelOf) -> None:
    """512 channels, 16 heads, 128 window rows and 64 selected: other matrix shapes than above."""
    sizes = CacheConfig(num_blocks=4, num_window_blocks=6, num_requests=1)
    check(model_of("tiny-real-heads", "released"), alone([67, 1, 80]), sizes)
