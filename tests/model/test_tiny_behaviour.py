"""How the tiny checkpoints behave when they run: every part counts, and rounding noise stays small.

A checkpoint that amplifies noise decides its tokens by luck: two right implementations that round a
few FP32 sums differently would disagree. One whose parts do little would hide their mistakes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from pcpkit.config import CacheConfig, ModelConfig
from pcpkit.model import attention, decoder, moe
from pcpkit.model.checkpoint_schema import expected_tensors
from pcpkit.model.decoder import TextModel
from pcpkit.model.engram_tables import EngramHash
from pcpkit.model.tiny import PRESETS, tiny_config
from pcpkit.model.tiny_weights import draw_tensors
from pcpkit.model.weights import load_weights

from .stepping import Checkpoint, next_plan, whole_pool

NUM_TOKENS = {"tiny": 320, "tiny-real-heads": 200}  # past every window, pool and top-k
SIZES = CacheConfig(num_blocks=16, num_window_blocks=32, num_requests=1)
COMPRESSED_VOCAB = 1000

# Relative RMS of the logits: 0.018 and 0.009 for 320 tokens of the presets, and 0.44 and 0.15 with
# compressed rows as heavy as the window's and sub-layer outputs ten times as large.
NOISE_LIMIT = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A model, its logits of every row of a prompt, and what was seen inside."""

    model: TextModel
    logits: Tensor
    seen: dict[str, Tensor]
    swiglu_inputs: Tensor
    """Gates and ups of the shared experts, one after the other."""
    gate_steps: Tensor
    """Differences of the two gates of a ratio-2 pair."""

    def of_layers(self, leaf: str) -> list[Tensor]:
        layers = range(self.model.config.num_hidden_layers)
        return [self.seen[f"layer{i}.{leaf}"] for i in layers if f"layer{i}.{leaf}" in self.seen]


def forward(model: TextModel, num_tokens: int, seen: dict[str, Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, model.config.vocab_size, (num_tokens,), generator=generator).tolist()
    pool, request = whole_pool(model.config, SIZES)
    return model.forward(next_plan(model.config, SIZES, [(request, ids)]), pool, seen.__setitem__)


@pytest.fixture(scope="module", params=PRESETS)
def ran(request: pytest.FixtureRequest) -> Ran:
    config = ModelConfig.from_dict(tiny_config(request.param, COMPRESSED_VOCAB))
    tensors = draw_tensors(expected_tensors(config), 0)
    weights = load_weights(config, ((name, tensor) for name, (tensor, _) in tensors.items()))
    engram = EngramHash.from_config(config, torch.arange(config.vocab_size) % COMPRESSED_VOCAB)
    model = Checkpoint(config=config, weights=weights, engram=engram).model()
    seen = dict[str, Tensor]()
    swiglu_inputs, gate_steps = list[Tensor](), list[Tensor]()
    swiglu, close = moe.swiglu, attention.close_and_write_ring

    def seeing_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
        swiglu_inputs.append(torch.cat([gate, up.abs()]).flatten())
        return swiglu(gate, up, limit)

    def seeing_close_groups(rows: Tensor, *rest: Any) -> Tensor:
        gates = rows[:, rows.shape[1] // 2 :]
        gate_steps.append((gates[1::2] - gates[::2]).flatten())
        return close(rows, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "swiglu", seeing_swiglu)
        patch.setattr(attention, "close_and_write_ring", seeing_close_groups)
        logits = forward(model, NUM_TOKENS[request.param], seen)
    return Ran(
        model=model,
        logits=logits,
        seen=seen,
        swiglu_inputs=torch.cat(swiglu_inputs).float(),
        gate_steps=torch.cat(gate_steps),
    )


def rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())


def test_streams_keep_their_size_and_every_part_moves_them(ran: Ran) -> None:
    assert 1.8 < float(ran.logits.std()) < 2.3
    for streams in ran.of_layers("resid"):
        assert 0.8 < rms(streams) < 1.5
    # BF16 resolves 0.004 of a stream: what is added is far above that, and far below the stream.
    for leaf in ("attn_out", "ffn_out"):
        assert all(0.02 < rms(added) < 0.1 for added in ran.of_layers(leaf)), leaf


def test_clamps_gates_experts_and_selections_are_exercised(ran: Ran) -> None:
    config = ran.model.config
    clamped = float((ran.swiglu_inputs > config.swiglu_limit).float().mean())
    assert 0.002 < clamped < 0.03
    # Neither an even mix nor a choice of one of the two.
    assert 1.0 < float(ran.gate_steps.std()) < 4.0
    for ids in ran.of_layers("route_ids"):
        load = ids.flatten().bincount(minlength=config.n_routed_experts) / ids.numel()
        even = 1 / config.n_routed_experts
        assert 0.1 * even < float(load.min()) <= float(load.max()) < 4 * even
    for topk in ran.of_layers("topk"):
        full = topk[(topk >= 0).all(1)]
        visible = int(topk.max()) + 1
        assert len(full.unique()) > 0.8 * visible, "nearly every position is selected by some row"
        rows = [set(row) for row in full[-32:].tolist()]
        both = [len(row & following) for row, following in pairwise(rows)]
        share, chance = sum(both) / len(both) / config.index_topk, config.index_topk / visible
        assert share < chance + 0.15, "rows select differently"


def test_rounding_noise_stays_small(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP32 noise in the coefficients of the streams, as a kernel has it, in every sub-layer."""
    generator, hc_mix = torch.Generator().manual_seed(0), decoder.hc_mix

    def noisy(*args: Any) -> tuple[Tensor, ...]:
        return tuple(
            x * (1 + 6e-8 * torch.randn(x.shape, generator=generator)) for x in hc_mix(*args)
        )

    monkeypatch.setattr(decoder, "hc_mix", noisy)
    logits = forward(ran.model, len(ran.logits), {})
    noise = (logits - ran.logits).norm(dim=1) / ran.logits.norm(dim=1)
    assert 0 < float(noise[len(noise) // 2 :].median()) < NOISE_LIMIT
