"""The slice of the released model: its size from the schema, and the same code at small widths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.layer_slice import (
    MAX_LAYERS,
    NUM_LAYERS,
    RELEASED,
    describe,
    make_model,
    needed_bytes,
    slice_config,
    weight_bytes,
    weight_specs,
)
from benchmarks.prefix_run import PolicyRun, differing_requests, engine_config, run_policy
from benchmarks.prefix_workload import WorkloadShape, make_workload
from torch import Tensor

from benchmarks import layer_slice, prefix_repetition
from pcpkit.config import ModelConfig
from pcpkit.model.decoder import TextModel
from pcpkit.model.tiny_weights import stream_tensors
from pcpkit.model.weights import load_weights

ROOT = Path(__file__).resolve().parent.parent.parent

# The released widths over 4 to 36; window and selections cut what they cut in prompts of 1,152.
NARROW: dict[str, Any] = {
    **RELEASED,
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 8,
    "head_dim": 128,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "n_routed_experts": 24,
    "sliding_window": 16,
    "index_n_heads": 8,
    "index_topk": 16,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 4,
    "engram_n_heads": 2,
    "engram_head_dim": 64,
}
# A hit rebuilt exactly needs rows from 7 windows before its end: prefixes are longer than that.
SHAPE = WorkloadShape(
    num_prefixes=1, prefix_len=160, suffix_len=16, num_prompts=4, num_warmups=1, seed=3
)


def narrow_config(num_layers: int = NUM_LAYERS) -> ModelConfig:
    return slice_config(num_layers, NARROW)


def narrow_model(seed: int = 0, device: str = "cpu") -> TextModel:
    return make_model(narrow_config(), device=device, max_model_len=SHAPE.prompt_len + 1, seed=seed)


@pytest.fixture(scope="module")
def model() -> TextModel:
    return narrow_model()


@pytest.fixture(scope="module")
def cold(model: TextModel) -> PolicyRun:
    return run("none", model)


def run(policy: str, model: TextModel) -> PolicyRun:
    limits = engine_config(SHAPE, concurrency=2, chunk_tokens=128, block_size=16)
    return run_policy(policy, model, limits, make_workload(SHAPE, model.config.vocab_size))


def logits_of(served: PolicyRun) -> Tensor:
    rows = [item.output.logits for item in served.served]
    return torch.stack([row for row in rows if row is not None])


# --- the config ---------------------------------------------------------------------------------


def test_the_kept_fields_are_the_released_ones() -> None:
    folders = (ROOT / "tests" / "data" / "golden", ROOT.parent / "shared" / "golden")
    files = [folder / "released-config.json" for folder in folders]
    found = next((path for path in files if path.is_file()), None)
    if found is None:
        pytest.skip("released-config.json is in no golden folder")
    document = json.loads(found.read_text(encoding="utf-8"))
    text: dict[str, Any] = document["text_config"]
    sliced = layer_slice._sliced_fields(NUM_LAYERS, RELEASED)
    assert {name: value for name, value in text.items() if name not in sliced} == dict(RELEASED)
    assert set(sliced) <= set(text)
    ratio = text["engram_compressed_vocab_size"] / text["vocab_size"]
    assert round(ratio * layer_slice.VOCAB_SIZE) == layer_slice.COMPRESSED_VOCAB_SIZE


def test_the_default_slice_has_one_layer_of_each_kind() -> None:
    config = slice_config()
    assert config.compress_ratios == (0, 2, 2, 1, 1, 1, 1)
    assert config.kv_source_layer_ids == (1, 3)
    assert config.index_source_layer_ids == (1, 3, 5)
    assert (config.candidate_source_layer_id, config.engram_layer_ids) == (3, (1,))


@pytest.mark.parametrize("num_layers", range(NUM_LAYERS, MAX_LAYERS + 1))
def test_every_depth_has_every_kind_of_layer(num_layers: int) -> None:
    config = slice_config(num_layers)
    kinds = {
        (
            config.compress_ratio(layer),
            "Full"
            if config.is_kv_source(layer)
            else "Reindex"
            if config.is_index_source(layer)
            else f"Reuse of {'Full' if config.is_kv_source(source) else 'Reindex'}",
        )
        for layer in range(1, num_layers)
        if (source := config.selection_source(layer)) is not None
    }
    assert config.compress_ratio(0) == 0
    assert kinds == {
        *((2, "Full"), (2, "Reuse of Full")),
        *((1, "Full"), (1, "Reuse of Full"), (1, "Reindex"), (1, "Reuse of Reindex")),
    }


def test_the_deepest_slice_has_the_released_distances() -> None:
    """18 layers of ratio 2 with a source every 6; Reindex every 4 (model-spec section 1.2)."""
    config = slice_config(MAX_LAYERS)
    assert config.compress_ratios == (0, *[2] * 18, *[1] * 21)
    assert config.kv_source_layer_ids == (1, 7, 13, 19)
    assert config.index_source_layer_ids == (1, 7, 13, 19, 23, 27, 31, 35, 39)


@pytest.mark.parametrize("num_layers", [0, 6, 41])
def test_a_depth_that_cannot_be(num_layers: int) -> None:
    with pytest.raises(ValueError, match=rf"num_layers expected 7 \.\. 40, got {num_layers}; "):
        slice_config(num_layers)


# --- the size -----------------------------------------------------------------------------------


def test_bytes_of_the_default_slice() -> None:
    """By hand: half a byte a weight and a scale byte for 32 of them, 3 matrices an expert."""
    config = slice_config()
    experts = 7 * 384 * 3 * 5120 * 2304 * 17 // 32
    specs = weight_specs(config).values()
    assert sum(spec.num_bytes for spec in specs if spec.expert is not None) == experts
    assert weight_bytes(config) == 52_111_125_032
    assert needed_bytes(config) == 52_111_125_032 + 32 * 25_600 * 6_144
    assert describe(config) == (
        "7 layers, 16,358 tensors, 52.1 GB of weights (50.5 GB of routed experts), "
        "57.1 GB with room to run"
    )


def test_the_model_holds_the_bytes_of_the_schema(model: TextModel) -> None:
    """So every tensor has a place in the weights: what is not used is not held there."""
    assert model.weights.num_bytes == weight_bytes(model.config)


# --- the weights --------------------------------------------------------------------------------


def test_the_stream_is_the_schema() -> None:
    config = narrow_config()
    specs = weight_specs(config)
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    drawn = dict(layer_slice._stream(config, 0, torch.device("cpu")))
    assert set(drawn) == set(specs)
    for name, tensor in drawn.items():
        assert tuple(tensor.shape) == specs[name].shape, name
        assert tensor.dtype == dtypes.get(specs[name].dtype, torch.uint8), name
        if specs[name].dtype == "F8_E4M3":
            assert not ((tensor & 0x7F) == 0x7F).any(), f"{name} has NaN codes"
        if specs[name].dtype == "F8_E8M0":
            assert not (tensor == 0xFF).any(), f"{name} has NaN scales"
    del drawn["layers.3.attn.compressor.norm.weight"]
    with pytest.raises(ValueError, match=r"layers\.3\.attn\.compressor\.norm\.weight expected"):
        load_weights(config, drawn.items())


def test_tensors_are_drawn_one_by_one() -> None:
    """The first of 50 GB is there at once: nothing is collected before it is yielded."""
    specs = weight_specs(slice_config())
    first = next(name for name in specs if name.endswith("attn_norm.weight"))
    rest = {name: specs[name] for name in list(specs)[list(specs).index(first) :]}
    name, tensor = next(stream_tensors(rest, 0))
    assert (name, tuple(tensor.shape)) == (first, (5120,))


def test_the_seed_decides_the_weights(model: TextModel, cold: PolicyRun) -> None:
    again, other = narrow_model(), narrow_model(seed=1)
    assert torch.equal(logits_of(run("none", again)), logits_of(cold))
    for pick in ("embed", "head", "norm"):
        mine, same, changed = (getattr(m.weights, pick) for m in (model, again, other))
        assert torch.equal(mine, same), pick
        assert not torch.equal(mine, changed), pick


def test_logits_are_of_a_healthy_size(cold: PolicyRun) -> None:
    """Standard deviation 2 by the gain of the head; an activation that grows or dies moves it."""
    logits = logits_of(cold)
    assert len(logits) == 5
    assert logits.isfinite().all()
    assert 1.5 < float(logits.std()) < 2.5


@pytest.mark.parametrize("policy", ["exact", "snapshot"])
def test_replay_is_exact(model: TextModel, cold: PolicyRun, policy: str) -> None:
    replayed = run(policy, model)
    outputs = [served.output for served in replayed.served]
    assert any(out.num_replayed_rows < out.num_cached_tokens for out in outputs)
    assert differing_requests(cold, replayed) == []


def test_bounded_replay_differs(model: TextModel, cold: PolicyRun) -> None:
    """So the comparison above can fail."""
    assert differing_requests(cold, run("bounded", model))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Everything is drawn there, except what is read from page-locked memory; replay is exact."""
    model = narrow_model(device="cuda")
    table = model.weights.layers[1].engram
    assert table is not None
    assert table.table.weight.is_pinned()
    assert table.wkv.weight.device.type == "cuda"
    cold = run("none", model)
    assert logits_of(cold).isfinite().all()
    assert torch.equal(logits_of(run("none", narrow_model(device="cuda"))), logits_of(cold))
    assert differing_requests(cold, run("exact", model)) == []


# --- as a program -------------------------------------------------------------------------------

SMALL = (
    *("--device", "cpu", "--preset", "layer-slice", "--commit", "abc", "--no-plot"),
    *("--num-prefixes", "1", "--num-prompts", "3", "--warmups", "1", "--concurrency", "2"),
    *("--prefix-len", "64", "--suffix-len", "16", "--block-size", "16", "--chunk-tokens", "128"),
)


def test_the_benchmark_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layer_slice, "slice_config", narrow_config)
    flags = ("--results", str(tmp_path), "--policies", "snapshot", "--num-layers", "8")
    assert prefix_repetition.main([*SMALL, *flags]) == 0
    lines = (tmp_path / "cpu-prefix-repetition.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["policy"], row["model"], row["num_differing"]) for row in rows] == [
        ("none", "layer-slice-8", 0),
        ("snapshot", "layer-slice-8", 0),
    ]
    assert "layer-slice-8: 8 layers, " in capsys.readouterr().err


def test_a_device_that_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before anything is drawn, with the size of the whole slice."""

    def free(_device: torch.device) -> int:
        return 57_144_289_831

    def drawn(*_arguments: Any) -> None:
        pytest.fail("a tensor was drawn")

    monkeypatch.setattr(layer_slice, "free_bytes", free)
    monkeypatch.setattr(layer_slice, "stream_tensors", drawn)
    assert prefix_repetition.main([*SMALL, "--results", str(tmp_path)]) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("layer-slice-7: 7 layers, 16,358 tensors, 52.1 GB of weights")
    assert err[1].startswith("error: device expected 57.1 GB of free memory for a slice of 7 layer")
    assert list(tmp_path.iterdir()) == []


def test_memory_of_this_machine_is_known() -> None:
    assert layer_slice.free_bytes(torch.device("cpu")) > needed_bytes(narrow_config())


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--num-layers", "6"), "num_layers expected 7 .. 40, got 6"),
        (("--preset", "tiny", "--num-layers", "7"), "--num-layers expected with --preset layer-"),
        (("--checkpoint", "x", "--num-layers", "7"), "got 7 with x; drop it"),
    ],
)
def test_bad_flags(
    tmp_path: Path, flags: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prefix_repetition.main([*SMALL, "--results", str(tmp_path), *flags]) == 2
    assert problem in capsys.readouterr().err
