"""Requests behind a prefix hit, and trimmed prefills: which bits of a cold, whole run they have.

All requests live in one pool that started as 0xFF bytes (NaN in every record). A request with a hit
shares the blocks of an earlier one, and its window blocks are fresh but mapped from position 0 on,
so a window record that is read without having been written is NaN in the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.config import CacheConfig
from pcpkit.model.decoder import TextModel
from pcpkit.plan.step import StepPlan
from pcpkit.plan.trim import Trim, TrimMode
from pcpkit.testing.batches import PrefixHit
from pcpkit.testing.compare import same_bits
from pcpkit.testing.strategies import chunk_splits

from .golden import GoldenDir
from .stepping import (
    Request,
    compressed_rows,
    index_rows,
    load_checkpoint,
    next_plan,
    open_row,
    poisoned_pool,
    window_rows,
)

ModelOf = Callable[[str], TextModel]

BLOCK = 16
SIZES = CacheConfig(
    num_blocks=60, num_window_blocks=120, num_requests=4, block_size=BLOCK, window_block_size=8
)
# An example is several steps of a whole model, so a profile's count of examples is too many.
FEW = settings(max_examples=max(4, settings().max_examples // 25))


@pytest.fixture(scope="module")
def model_of(golden_dir: GoldenDir) -> ModelOf:
    @cache
    def load(case: str) -> TextModel:
        return load_checkpoint(golden_dir(case)).model()

    return load


class Pool:
    """Requests of one pool; every block has one first owner."""

    def __init__(self, model: TextModel, sizes: CacheConfig = SIZES) -> None:
        self.model = model
        self.sizes = sizes
        self.caches = poisoned_pool(model.config, sizes)
        self.plans: list[StepPlan] = []
        self.num_blocks = self.num_window_blocks = self.num_requests = 0

    def request(
        self, length: int, donor: Request | None = None, hit: PrefixHit | None = None
    ) -> Request:
        """A request with blocks for `length` tokens, the first ones its donor's."""
        shared: list[int] = []
        if donor is not None and hit is not None:
            shared = donor.blocks[: hit.num_tokens // self.sizes.block_size]
        count = -(-length // self.sizes.block_size) - len(shared)
        blocks = shared + [self.num_blocks + i for i in range(count)]
        windows = -(-length // self.sizes.window_block_size)
        request = Request(
            blocks=blocks,
            window_blocks=[self.num_window_blocks + i for i in range(windows)],
            ring_block=self.num_requests,
            hit=hit,
        )
        self.num_blocks += count
        self.num_window_blocks += windows
        self.num_requests += 1
        return request

    def run(
        self, request: Request, ids: Sequence[int], num_logits: int, trim: Trim | None = None
    ) -> Tensor:
        """One step of one request."""
        parts = [(request, ids)]
        plan = next_plan(self.model.config, self.sizes, parts, [num_logits], trim)
        self.plans.append(plan)
        return self.model.forward(plan, self.caches)

    def records(self, request: Request, first: int) -> dict[str, Tensor]:
        """All compressed records, window records from `first` on, and the open ring rows."""
        config, pool, out = self.model.config, self.caches, dict[str, Tensor]()
        end = len(request.ids)
        for layer in range(config.num_hidden_layers):
            out[f"window.{layer}"] = window_rows(pool, request, layer, first, end)
        for layer in config.kv_source_layer_ids:
            count = end // config.compress_ratio(layer)
            out[f"compressed.{layer}"] = compressed_rows(pool, request, layer, 0, count)
            out[f"index_keys.{layer}"] = index_rows(pool, request, layer, 0, count)
        for layer in config.ratio2_sources:
            row = open_row(pool, request, layer)
            if row is not None:
                out[f"ring.{layer}"] = row
        return out


def assert_same_records(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


def prompt_of(model: TextModel, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()


def cold(pool: Pool, ids: Sequence[int]) -> tuple[Request, Tensor]:
    """The yardstick: all rows in one step."""
    request = pool.request(len(ids))
    logits = pool.run(request, ids, len(ids))
    assert bool(logits.isfinite().all()), "the yardstick read poison"
    return request, logits


# --- starts of the three kinds of replay --------------------------------------------------------


def exact_hit(model: TextModel, num_tokens: int) -> PrefixHit:
    """The rows that the records and outputs from the hit on depend on, one window hop a layer."""
    config, reach = model.config, model.config.sliding_window - 1
    starts = [
        max(num_tokens - reach * (config.num_hidden_layers - layer), 0)
        for layer in range(config.num_hidden_layers)
    ]
    return PrefixHit(num_tokens=num_tokens, layer_starts=tuple(starts))


def flat_hit(model: TextModel, num_tokens: int, start: int) -> PrefixHit:
    """One start in all layers."""
    return PrefixHit(num_tokens=num_tokens, layer_starts=(start,) * model.config.num_hidden_layers)


def run_chunks(
    pool: Pool,
    request: Request,
    ids: Sequence[int],
    first: int,
    chunks: Sequence[int],
    trim: Trim | None = None,
) -> dict[int, Tensor]:
    """Compute `ids` from `first` on; the logits that each chunk may ask for, by position."""
    request.ids[:] = ids[:first]
    start, logits = first, dict[int, Tensor]()
    lowest = 0 if request.hit is None else request.hit.layer_starts[-1]
    for count in chunks:
        end = start + count
        wanted = max(end - max(start, lowest), 0)
        wanted = wanted if trim is None else min(wanted, 1)
        rows = pool.run(request, ids[start:end], wanted, trim)
        logits |= dict(zip(range(end - wanted, end), rows, strict=True))
        start = end
    assert start == len(ids)
    return logits


def donated(pool: Pool, donor: Request) -> dict[str, Tensor]:
    """Every byte a request holds, to see whether somebody else changed it."""
    blocks, windows = torch.tensor(donor.blocks), torch.tensor(donor.window_blocks)
    pages = {"window": windows, "ring": torch.tensor([donor.ring_block])}
    return {
        name: tensor[pages.get(name.split(".")[0], blocks)].clone()
        for name, tensor in pool.caches.tensors().items()
    }


def assert_poison_below(pool: Pool, request: Request) -> None:
    """No window record below a layer's start was written."""
    assert request.hit is not None
    for layer, start in enumerate(request.hit.layer_starts):
        below = window_rows(pool.caches, request, layer, 0, start)
        assert bool((below == 0xFF).all()), f"layer {layer}"


# --- exact --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A prompt of which the first blocks are there."""

    num_blocks: int
    suffix: int
    chunks: tuple[int, ...]
    """Of the rows that run, cut by shares of 1,000."""
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * BLOCK

    @property
    def length(self) -> int:
        return self.num_tokens + self.suffix

    def split(self, first: int) -> list[int]:
        """Chunk lengths of the rows from `first` on."""
        count, cuts = self.length - first, {0}
        cuts |= {count * share // 1000 for share in self.chunks}
        ends = [*sorted(cuts), count]
        return [end - start for start, end in pairwise(ends) if end > start]


@st.composite
def hits(draw: st.DrawFn) -> Hit:
    return Hit(
        num_blocks=draw(st.integers(2, 12)),
        suffix=draw(st.integers(1, 24)),
        chunks=tuple(draw(st.lists(st.integers(0, 999), max_size=3))),
        seed=draw(st.integers(0, 2**16)),
    )


CASES = pytest.mark.parametrize("case", ["tiny-main", "tiny-dspark"])
LONG = Hit(num_blocks=12, suffix=21, chunks=())
"""Longer than the cone of all layers."""
IN_PIECES = Hit(num_blocks=12, suffix=20, chunks=(100, 110, 640, 930))
"""The first chunks end below the starts of the upper layers."""


@CASES
@FEW
@given(hit=hits())
@example(hit=LONG)
@example(hit=IN_PIECES)
@example(hit=Hit(num_blocks=1, suffix=1, chunks=()))
def test_exact_replay_is_the_cold_run(case: str, model_of: ModelOf, hit: Hit) -> None:
    """Logits from the hit on, all records that later rows may read; cached bytes stay as they are.

    Invariants 24, 25 and 28.
    """
    model = model_of(case)
    pool, ids = Pool(model), prompt_of(model, hit.length, hit.seed)
    donor, expected = cold(pool, ids)
    before = donated(pool, donor)
    taken = exact_hit(model, hit.num_tokens)
    request = pool.request(hit.length, donor, taken)
    logits = run_chunks(pool, request, ids, taken.layer_starts[0], hit.split(taken.layer_starts[0]))
    assert logits.keys() >= set(range(hit.num_tokens, hit.length))
    for position in range(hit.num_tokens, hit.length):
        assert same_bits(logits[position], expected[position]), position
    first = max(hit.num_tokens - model.config.sliding_window + 1, 0)
    assert_same_records(pool.records(request, first), pool.records(donor, first))
    assert_same_records(donated(pool, donor), before)
    assert_poison_below(pool, request)


@CASES
def test_no_cone_is_smaller(case: str, model_of: ModelOf) -> None:
    """One row less in any layer, and something is not the cold run's."""
    model, hit = model_of(case), LONG
    pool = Pool(
        model,
        CacheConfig(
            num_blocks=200,
            num_window_blocks=400,
            num_requests=20,
            block_size=BLOCK,
            window_block_size=8,
        ),
    )
    ids = prompt_of(model, hit.length, 0)
    donor, _ = cold(pool, ids)
    taken = exact_hit(model, hit.num_tokens)
    first = hit.num_tokens - model.config.sliding_window + 1
    want = pool.records(donor, first)
    for layer in range(0, model.config.num_hidden_layers, 3):
        starts = list(taken.layer_starts)
        starts[layer] += 1
        fewer = PrefixHit(num_tokens=hit.num_tokens, layer_starts=tuple(starts))
        request = pool.request(hit.length, donor, fewer)
        run_chunks(pool, request, ids, starts[0], hit.split(starts[0]))
        found = pool.records(request, first)
        assert any(not same_bits(found[name], want[name]) for name in want), f"layer {layer}"


def test_chunks_below_the_upper_layers_run_in_the_lower_ones_only(model_of: ModelOf) -> None:
    model = model_of("tiny-main")
    pool, ids = Pool(model), prompt_of(model, IN_PIECES.length, 0)
    donor, _ = cold(pool, ids)
    taken = exact_hit(model, IN_PIECES.num_tokens)
    request = pool.request(IN_PIECES.length, donor, taken)
    first = taken.layer_starts[0]
    run_chunks(pool, request, ids, first, IN_PIECES.split(first))
    plan = pool.plans[1]
    running = [plan.layer_rows(layer).num_padded_rows for layer in range(11)]
    assert running[:3] == [18, 3, 0]
    assert set(running[2:]) == {0}
    assert len(pool.plans[0].layers) == 1, "a cold run shares its rows"


# --- bounded ------------------------------------------------------------------------------------


@CASES
@FEW
@given(hit=hits())
@example(hit=IN_PIECES)
def test_bounded_replay_in_any_chunks(case: str, model_of: ModelOf, hit: Hit) -> None:
    """Invariant 28: as in one chunk; it reads nothing below s and writes nothing below H."""
    model, window = model_of(case), model_of(case).config.sliding_window
    if hit.num_tokens <= window:
        return
    pool, ids = Pool(model), prompt_of(model, hit.length, hit.seed)
    donor, _ = cold(pool, ids)
    before, start = donated(pool, donor), hit.num_tokens - window
    taken = flat_hit(model, hit.num_tokens, start)
    whole, cut = (pool.request(hit.length, donor, taken) for _ in range(2))
    expected = run_chunks(pool, whole, ids, start, [hit.length - start])
    assert len({id(rows) for rows in pool.plans[-1].layers}) == 1
    logits = run_chunks(pool, cut, ids, start, hit.split(start))
    assert sorted(logits) == sorted(expected) == [*range(start, hit.length)]
    for position, row in expected.items():
        assert bool(row.isfinite().all()), "it read below s"
        assert same_bits(logits[position], row), position
    assert_same_records(pool.records(cut, start), pool.records(whole, start))
    assert_same_records(donated(pool, donor), before)
    for request in (whole, cut):
        assert_poison_below(pool, request)


def test_bounded_replay_is_an_approximation(model_of: ModelOf) -> None:
    """The first layer's records are exact, the last layer's are not; so the tests can tell."""
    model = model_of("tiny-main")
    window, last = model.config.sliding_window, model.config.num_hidden_layers - 1
    pool, ids = Pool(model), prompt_of(model, LONG.length, 0)
    donor, _ = cold(pool, ids)
    start = LONG.num_tokens - window
    taken = flat_hit(model, LONG.num_tokens, start)
    request = pool.request(LONG.length, donor, taken)
    run_chunks(pool, request, ids, start, [LONG.length - start])
    found, want = pool.records(request, start), pool.records(donor, start)
    assert same_bits(found["window.0"], want["window.0"])
    assert not same_bits(found[f"window.{last}"], want[f"window.{last}"])


# --- restored windows ---------------------------------------------------------------------------


@CASES
@FEW
@given(hit=hits())
@example(hit=LONG)
@example(hit=Hit(num_blocks=1, suffix=3, chunks=()))
def test_restored_windows_are_the_cold_run(case: str, model_of: ModelOf, hit: Hit) -> None:
    """The window records before the hit come from somewhere else, and no row runs below it."""
    model = model_of(case)
    pool, ids = Pool(model), prompt_of(model, hit.length, hit.seed)
    donor, expected = cold(pool, ids)
    before, first = donated(pool, donor), max(hit.num_tokens - model.config.sliding_window + 1, 0)
    taken = flat_hit(model, hit.num_tokens, first)
    request = pool.request(hit.length, donor, taken)
    where, size = torch.arange(first, hit.num_tokens), SIZES.window_block_size
    for store in pool.caches.window.values():
        source, target = (
            torch.tensor(one.window_blocks)[where // size] for one in (donor, request)
        )
        store[target, where % size] = store[source, where % size]
    logits = run_chunks(pool, request, ids, hit.num_tokens, hit.split(hit.num_tokens))
    assert sorted(logits) == [*range(hit.num_tokens, hit.length)]
    for position, row in logits.items():
        assert same_bits(row, expected[position]), position
    assert_same_records(pool.records(request, first), pool.records(donor, first))
    assert_same_records(donated(pool, donor), before)
    assert_poison_below(pool, request)


# --- trim ---------------------------------------------------------------------------------------


def trim_of(model: TextModel, mode: TrimMode) -> Trim:
    return Trim(
        mode=mode,
        cut=model.config.kv_source_layer_ids[-1],
        num_layers=model.config.num_hidden_layers,
        sliding_window=model.config.sliding_window,
    )


@CASES
@FEW
@given(length=st.integers(1, 130), data=st.data(), seed=st.integers(0, 2**16))
def test_exact_trim_is_the_untrimmed_run(
    case: str, model_of: ModelOf, length: int, data: st.DataObject, seed: int
) -> None:
    """Logits of every chunk's last row, compressed caches, and windows that later rows read; then
    of tokens that are decoded behind it."""
    check_trim(model_of(case), length, data.draw(chunk_splits(length, max_chunks=3)), seed)


@CASES
@pytest.mark.parametrize("chunks", [(130,), (100, 30), (20, 100, 3, 1, 6)])
def test_exact_trim_of_long_chunks(case: str, model_of: ModelOf, chunks: tuple[int, ...]) -> None:
    plans = check_trim(model_of(case), sum(chunks), chunks, 0)
    last = model_of(case).config.num_hidden_layers - 1
    assert [plan.layer_rows(last).num_rows for plan in plans] == [min(one, 16) for one in chunks]


def check_trim(
    model: TextModel, length: int, chunks: Sequence[int], seed: int, num_decodes: int = 3
) -> list[StepPlan]:
    config = model.config
    pool, ids = Pool(model), prompt_of(model, length + num_decodes, seed)
    whole, expected = cold(pool, ids)
    request = pool.request(len(ids))
    logits = run_chunks(pool, request, ids[:length], 0, chunks, trim_of(model, "exact"))
    plans = pool.plans[1:]
    request_end = max(length - config.sliding_window, 0)
    for index, token in enumerate(ids[length:], start=length):
        logits[index] = pool.run(request, [token], 1)[0]
    for position, row in logits.items():
        assert same_bits(row, expected[position]), position
    assert_same_records(pool.records(request, request_end), pool.records(whole, request_end))
    return plans


@CASES
def test_exact_trim_behind_an_exact_hit(case: str, model_of: ModelOf) -> None:
    """Both starts bound the same layers; the later one wins."""
    model, hit = model_of(case), Hit(num_blocks=12, suffix=70, chunks=(500,))
    pool, ids = Pool(model), prompt_of(model, hit.length, 1)
    donor, expected = cold(pool, ids)
    taken = exact_hit(model, hit.num_tokens)
    request = pool.request(hit.length, donor, taken)
    first = taken.layer_starts[0]
    trim = trim_of(model, "exact")
    logits = run_chunks(pool, request, ids, first, hit.split(first), trim)
    assert same_bits(logits[hit.length - 1], expected[-1])
    end = hit.length - model.config.sliding_window
    assert_same_records(pool.records(request, end), pool.records(donor, end))
    last = pool.plans[-1].layer_rows(model.config.num_hidden_layers - 1)
    assert last.num_rows == model.config.sliding_window


@CASES
@pytest.mark.parametrize("chunks", [(130,), (70, 60), (40, 5, 85)])
def test_bounded_trim_keeps_the_caches_of_the_cut(
    case: str, model_of: ModelOf, chunks: tuple[int, ...]
) -> None:
    """Invariant 34: up to the last KV source all caches are those of an untrimmed run."""
    model = model_of(case)
    cut, window = model.config.kv_source_layer_ids[-1], model.config.sliding_window
    pool, ids = Pool(model), prompt_of(model, sum(chunks), 2)
    whole, _ = cold(pool, ids)
    request = pool.request(len(ids))
    logits = run_chunks(pool, request, ids, 0, chunks, trim_of(model, "bounded"))
    assert all(bool(row.isfinite().all()) for row in logits.values()), "a trimmed row was read"
    found, want = pool.records(request, 0), pool.records(whole, 0)
    for name, tensor in want.items():
        kind, layer = name.split(".")
        if kind != "window" or int(layer) <= cut:
            assert same_bits(found[name], tensor), name
    for layer in range(cut + 1, model.config.num_hidden_layers):
        written = (found[f"window.{layer}"] != 0xFF).any(dim=1).nonzero()[:, 0].tolist()
        ends = [sum(chunks[: index + 1]) for index in range(len(chunks))]
        kept = [
            range(max(end - window, end - one), end) for end, one in zip(ends, chunks, strict=True)
        ]
        assert written == [position for span in kept for position in span]
