"""The self-checks of model-spec section 12 that concern the forward.

Elsewhere: primes, table heights and multipliers in test_engram_tables.py, tensor counts and bytes
in the checkpoint tests, chunked prefill in test_chunking.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.config import CacheConfig, ModelConfig, RopeScaling
from pcpkit.formats import RECORD_FORMATS
from pcpkit.kernels.engram import engram_inject
from pcpkit.kernels.hyper_connection import hc_mix
from pcpkit.kernels.norm import rms_norm
from pcpkit.kernels.sparse_mla import sparse_mla
from pcpkit.model.rope import inverse_frequencies, rope_table, yarn_bounds
from pcpkit.plan.rows import LayerRows

from .golden import GoldenDir
from .stepping import Checkpoint, Request, load_checkpoint, next_plan, whole_pool

RELEASED_YARN = RopeScaling(
    factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536
)
ROPE_DIM, THETA, COMPRESSED_THETA = 64, 10_000.0, 160_000.0
EPS, HC_EPS = 1e-20, 1e-6
CACHE = CacheConfig(num_blocks=4, num_window_blocks=8, num_requests=1)


@pytest.fixture(scope="module")
def checkpoint(golden_dir: GoldenDir) -> Checkpoint:
    return load_checkpoint(golden_dir("tiny-main"))


@pytest.fixture(scope="module")
def config(checkpoint: Checkpoint) -> ModelConfig:
    return checkpoint.config


# --- rotary tables ------------------------------------------------------------------------------


def test_released_yarn_interpolates_pairs_15_to_25() -> None:
    assert yarn_bounds(ROPE_DIM, COMPRESSED_THETA, RELEASED_YARN) == (15, 25)


def test_released_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain = inverse_frequencies(ROPE_DIM, COMPRESSED_THETA, None)
    found = inverse_frequencies(ROPE_DIM, COMPRESSED_THETA, RELEASED_YARN)
    assert torch.equal(found[:16], plain[:16])
    assert torch.equal(found[25:], plain[25:] / 16)
    between, ramp = plain[16:25].double(), torch.arange(1, 10).double() / 10
    expected = between / 16 * ramp + between * (1 - ramp)
    # Three FP32 roundings: a few parts in 1e7.
    torch.testing.assert_close(found[16:25].double(), expected, rtol=5e-7, atol=0.0)


def test_plain_frequencies_are_powers_of_theta() -> None:
    found = inverse_frequencies(ROPE_DIM, THETA, None)
    expected = torch.tensor([THETA ** (-2 * i / ROPE_DIM) for i in range(ROPE_DIM // 2)])
    # An FP32 power may be off by one unit in the last place, and so may its reciprocal.
    torch.testing.assert_close(found, expected, rtol=2.5e-7, atol=0.0)


def test_window_only_layers_have_no_yarn(checkpoint: Checkpoint) -> None:
    model = checkpoint.model()
    pool, request = whole_pool(model.config, CACHE)
    step = model.attention_step(next_plan(model.config, CACHE, [(request, [5])]), pool)
    scaled = model.config.rope_scaling
    for layer in range(model.config.num_hidden_layers):
        compressed = model.config.compress_ratio(layer) > 0
        theta = model.config.compress_rope_theta if compressed else model.config.rope_theta
        frequency = inverse_frequencies(ROPE_DIM, theta, scaled if compressed else None)
        assert torch.equal(step.rope(layer)[1, :32], frequency.double().cos().float()), layer
        assert torch.equal(step.rope(layer)[1, 32:], frequency.double().sin().float()), layer
    assert model.config.compress_ratio(0) == 0, "the case has no window-only layer"


def test_angle_is_one_fp32_product(config: ModelConfig) -> None:
    """Cosines then sines of fl32(position * frequency), rounded once; no attention factor."""
    table = rope_table(config, compressed=True, num_positions=1000)
    frequency = inverse_frequencies(ROPE_DIM, config.compress_rope_theta, config.rope_scaling)
    for position in (0, 1, 2, 511, 999):
        angle = torch.tensor(float(position)) * frequency
        cosines = [math.cos(x) for x in angle.tolist()]
        sines = [math.sin(x) for x in angle.tolist()]
        assert torch.equal(table[position], torch.tensor(cosines + sines))


# --- positions of compressed rows ---------------------------------------------------------------


def rows_of(config: ModelConfig, start: int, count: int) -> LayerRows:
    """Positions `start .. start + count - 1` of one request."""
    request = Request(blocks=[2, 0, 3, 1], window_blocks=list(range(8)), ids=[7] * start)
    return next_plan(config, CACHE, [(request, [7] * count)]).layer_rows(0)


def test_visible_rows_by_position(config: ModelConfig) -> None:
    rows = rows_of(config, 0, 6)
    assert rows.num_visible(2).tolist() == [0, 1, 1, 2, 2, 3]
    assert rows.num_visible(1).tolist() == [1, 2, 3, 4, 5, 6]


@given(start=st.integers(0, 200), count=st.integers(1, 50))
def test_a_group_sits_at_its_first_token_and_opens_with_its_last(
    config: ModelConfig, start: int, count: int
) -> None:
    rows = rows_of(config, start, count)
    for ratio in (1, 2):
        group = rows.groups[ratio]
        closing = [p for p in range(start, start + count) if p % ratio == ratio - 1]
        assert (group.closing_rows + start).tolist() == closing
        assert group.positions.tolist() == [p - (ratio - 1) for p in closing]
        # The row that closes group j is the first to see it.
        assert rows.num_visible(ratio)[group.closing_rows].tolist() == [
            p // ratio + 1 for p in closing
        ]
        assert rows.max_visible(ratio) == (start + count) // ratio


# --- hyper-connections --------------------------------------------------------------------------


@given(seed=st.integers(0, 2**16), log_size=st.integers(-20, 20), layer=st.integers(0, 10))
def test_sinkhorn_sums_and_ranges(
    checkpoint: Checkpoint, seed: int, log_size: int, layer: int
) -> None:
    """Columns (over the input stream) sum to 1, rows nearly; pre and post stay in their ranges."""
    config, site = checkpoint.config, checkpoint.weights.layers[layer].hc_ffn
    generator = torch.Generator().manual_seed(seed)
    shape = 3, config.hc_mult, config.hidden_size
    streams = (torch.randn(shape, generator=generator) * 2.0**log_size).bfloat16()
    pre, post, comb = hc_mix(
        streams, site.fn, site.base, site.scale, config.hc_sinkhorn_iters, HC_EPS, EPS
    )
    ones = torch.ones(3, config.hc_mult)
    torch.testing.assert_close(comb.sum(1), ones, rtol=0.0, atol=1e-5)
    # The last step is a column step; twenty iterations bring the rows this near.
    torch.testing.assert_close(comb.sum(2), ones, rtol=0.0, atol=1e-2)
    assert bool((comb > 0).all())
    assert bool(((pre > HC_EPS) & (pre < 1 + HC_EPS)).all())
    assert bool(((post > 0) & (post < 2)).all())


# --- rows of zeros ------------------------------------------------------------------------------


def test_a_zero_row_stays_zero_in_every_norm(checkpoint: Checkpoint) -> None:
    x = torch.zeros(2, checkpoint.config.hidden_size, dtype=torch.bfloat16)
    x[1] = 1e-6
    out = rms_norm(x, checkpoint.weights.norm, EPS)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    # Not damped: 1e-20 is nothing next to 1e-12, where 1e-6 would make this row vanish.
    assert torch.equal(out[1], checkpoint.weights.norm)


@pytest.mark.parametrize("name", sorted(RECORD_FORMATS))
def test_a_zero_row_survives_its_record(name: str) -> None:
    record = RECORD_FORMATS[name]
    zeros = torch.zeros(1, 128, dtype=torch.bfloat16)
    assert torch.equal(record.decode(record.encode(zeros)), zeros)


def test_zero_streams_mix_and_inject_finitely(checkpoint: Checkpoint) -> None:
    config, site = checkpoint.config, checkpoint.weights.layers[1].hc_attn
    engram = checkpoint.weights.layers[1].engram
    assert engram is not None
    streams = torch.zeros(1, config.hc_mult, config.hidden_size, dtype=torch.bfloat16)
    for part in hc_mix(streams, site.fn, site.base, site.scale, 20, HC_EPS, EPS):
        assert bool(part.isfinite().all())
    key_value = torch.zeros(1, (config.hc_mult + 1) * config.hidden_size, dtype=torch.bfloat16)
    injected = engram_inject(streams, key_value, engram.q_weight, engram.k_weight, EPS)
    assert torch.equal(injected, streams)


def test_a_query_without_slots_gives_zeros() -> None:
    """Nothing in the window, nothing selected: the sink takes all probability."""
    num_heads, dim = 2, 128
    nothing = torch.full((1, 1), -1, dtype=torch.int32)

    def poison(record: str) -> Tensor:
        size = RECORD_FORMATS[record].record_bytes(dim)
        return torch.full((1, 4, size), 0xFF, dtype=torch.uint8)

    out = sparse_mla(
        torch.ones(1, num_heads, dim, dtype=torch.bfloat16),
        torch.tensor([3]),
        torch.zeros(1, dtype=torch.int32),
        poison("mxfp8"),
        nothing,
        torch.zeros(1, dtype=torch.int32),
        poison("nvfp4"),
        nothing,
        nothing,
        torch.zeros(num_heads),
        dim**-0.5,
        16,
        "nvfp4",
    )
    assert torch.equal(out, torch.zeros_like(out))


def test_zero_embedding_runs_through_the_model(checkpoint: Checkpoint) -> None:
    """A row of zeros meets every norm, quantizer and softmax of all layers and stays finite."""
    embed = checkpoint.weights.embed.clone()
    embed[9] = 0
    weights = replace(checkpoint.weights, embed=embed)
    model = replace(checkpoint, weights=weights).model()
    pool, request = whole_pool(model.config, CACHE)
    logits = model.forward(next_plan(model.config, CACHE, [(request, [9, 9, 3, 9])]), pool)
    assert bool(logits.isfinite().all())
