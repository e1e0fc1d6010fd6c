"""The numbers in the tiny checkpoints: healthy, varied, and decided by seed and name alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import sqrt

import pytest
import torch

from pcpkit.config import ModelConfig
from pcpkit.formats import e4m3_decode, e8m0_decode, fp4_row_dequantize, fp8_block_dequantize
from pcpkit.model.checkpoint_schema import TensorSpec, expected_tensors
from pcpkit.model.tiny import PRESETS, tiny_config
from pcpkit.model.tiny_weights import draw_tensors

Tensors = dict[str, torch.Tensor]


def quick_document(preset: str = "tiny") -> dict[str, object]:
    """A config document without training a tokenizer; the compressed size is arbitrary."""
    return tiny_config(preset, 1000)


@pytest.fixture(scope="module", params=PRESETS)
def drawn(request: pytest.FixtureRequest) -> Tensors:
    """All tensors of a preset, quantised ones as uint8 bytes."""
    specs = expected_tensors(ModelConfig.from_dict(quick_document(request.param)))
    return {name: tensor for name, (tensor, _) in draw_tensors(specs, 0).items()}


def matrices(drawn: Tensors) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, fp32 values, scale bytes) of the quantised matrices."""
    for name, scale in drawn.items():
        if not name.endswith(".scale"):
            continue
        weight = drawn[f"{name.removesuffix('.scale')}.weight"]
        if ".ffn.experts." in name:
            values = fp4_row_dequantize(weight, scale)
        elif ".engram.embed." in name:
            grouped = e4m3_decode(weight).unflatten(1, (-1, 32))
            values = (grouped * e8m0_decode(scale).unsqueeze(-1)).flatten(1)
        else:
            values = fp8_block_dequantize(weight, scale)
        yield name.removesuffix(".scale"), values, scale


GAINS = {
    "wq_b": 1.5, "wo_a": 2.0, "wo_b": 0.06, "engram.wkv": 0.6, "w1": 4.0, "w3": 3.0, "w2": 0.006
}  # fmt: skip


def test_quantised_weights_are_healthy(drawn: Tensors) -> None:
    seen: set[str] = set()
    for name, values, scale in matrices(drawn):
        assert values.isfinite().all(), name
        # Several scales per matrix, or a wrong scale index would go unnoticed.
        assert len(scale.unique()) >= 3, name
        for ending, gain in GAINS.items():
            if name.endswith(ending) and "indexer" not in name:
                seen.add(ending)
                # Block factors make the estimate of a small matrix rough: 64 blocks give ~8 %.
                measured = float(values.std()) * sqrt(values.shape[1])
                assert measured == pytest.approx(gain, rel=0.35), name
    assert seen == set(GAINS)


def test_codes_use_their_whole_range(drawn: Tensors) -> None:
    for name, values, scale in matrices(drawn):
        if ".engram.embed" in name or ".ffn.experts." in name:
            groups = values.unflatten(1, (-1, 32)).abs().amax(-1)
            limit = 6.0 if ".ffn.experts." in name else 448.0
        else:
            blocks = values.unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
            groups, limit = blocks.abs().amax((1, 3)), 448.0
        largest = groups / e8m0_decode(scale)
        # pow2ceil leaves the largest code in the top octave, up to one rounding.
        assert (largest <= limit).all(), name
        assert (largest >= limit / 2 - limit / 16).all(), name


def test_norms_sinks_router_and_mixing_are_not_trivial(drawn: Tensors) -> None:
    for name, tensor in drawn.items():
        if name.endswith("norm.weight"):
            mean = 0.5 if name.endswith("compressor.norm.weight") else 1.0
            assert float(tensor.float().mean()) == pytest.approx(mean, abs=0.15), name
            assert 0.1 < float(tensor.float().std()) < 0.3, name
            assert (tensor > 0).all(), name
        if name.endswith(("attn_sink", "gate.bias", "_base", "_scale")):
            assert len(tensor.unique()) > 1, name
        if name.endswith("gate.bias_vl"):
            assert not torch.equal(tensor, drawn[name.removesuffix("_vl")]), name


def test_projections_into_norms_have_spread_magnitudes(drawn: Tensors) -> None:
    """They tell eps 1e-20 from 1e-6 only if some are small."""
    inputs = [
        float(values.std() * sqrt(values.shape[1]))
        for name, values, _ in matrices(drawn)
        if name.endswith(("attn.wq_a", "attn.wkv"))
    ]
    assert min(inputs) < 2.0**-7
    assert max(inputs) > 2.0**-3


def test_seed_and_name_alone_decide_a_tensor() -> None:
    specs = expected_tensors(ModelConfig.from_dict(quick_document()))
    some = ["layers.3.attn.wo_b", "layers.0.ffn.experts.5.w1", "layers.4.engram.embed"]
    names = [f"{name}.{part}" for name in some for part in ("weight", "scale")]
    names += ["layers.9.hc_attn_fn", "norm.weight"]
    picked = {name: specs[name] for name in names}
    together, other_seed = draw_tensors(picked, 3), draw_tensors(picked, 4)
    assert list(together) == names
    for name in names:
        weight = name.replace(".scale", ".weight")
        pair = {weight, f"{weight.removesuffix('.weight')}.scale"} & set(names)
        alone = draw_tensors({item: specs[item] for item in sorted(pair)}, 3)
        assert torch.equal(alone[name][0], together[name][0]), name
        assert together[name][0].shape == specs[name].shape
        assert together[name][1] == specs[name].dtype
        if not name.endswith(".scale"):
            assert not torch.equal(together[name][0], other_seed[name][0]), name


@pytest.fixture
def draft_config() -> ModelConfig:
    document = quick_document()
    text = document["text_config"]
    assert isinstance(text, dict)
    text |= {
        "num_nextn_predict_layers": 2,
        "compress_ratios": [*text["compress_ratios"], 0, 0],
        "dspark_target_layer_ids": [9, 10, 11],
        "dspark_n_routed_experts": 2,
        "dspark_num_experts_per_tok": 1,
        "n_routed_experts": 4,
    }
    return ModelConfig.from_dict(document)


def test_every_released_tensor_has_a_drawing_rule(draft_config: ModelConfig) -> None:
    """Draft tensors included, for a caller that draws a checkpoint with a draft model."""
    specs = expected_tensors(draft_config)
    drawn = draw_tensors(specs, 0)
    assert list(drawn) == list(specs)
    assert any(name.startswith("mtp.") for name in drawn)


def test_unknown_tensor_is_refused() -> None:
    spec = TensorSpec(
        name="layers.0.novelty", dtype="F32", shape=(4,), shard="replicated", section="text"
    )
    with pytest.raises(ValueError, match=r"drawing rule, got layers\.0\.novelty"):
        draw_tensors({spec.name: spec}, 0)
    bias = replace(spec, name="layers.0.ffn.gate.bias")
    assert draw_tensors({bias.name: bias}, 0)[bias.name][0].shape == (4,)
