"""Opening and loading a checkpoint folder; which device `auto` is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import pcpkit
from pcpkit.engine import Engine, EngineConfig, load_model, open_checkpoint, resolve_device
from pcpkit.model.decoder import TextModel
from pcpkit.model.engram_tables import TOKEN_MAP_FILE

from .small_model import random_prompt, request, write_small_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_a_loaded_model_is_the_model_in_the_files(folder: Path, model: TextModel) -> None:
    told: list[tuple[int, int]] = []
    opened = open_checkpoint(folder)
    loaded = load_model(
        opened, max_model_len=64, progress=lambda done, total: told.append((done, total))
    )
    assert opened.tokenizer is None
    assert (loaded.max_model_len, loaded.numerics) == (64, "released")
    done = [count for count, _ in told]
    assert done == sorted(done)
    assert {total for _, total in told} == {opened.reader.num_bytes()}
    assert done[-1] == opened.reader.num_bytes() == loaded.weights.num_bytes
    asked = request("r", random_prompt(20, 0), max_new_tokens=2, logits="all")
    ours, theirs = (Engine(m, EngineConfig()).generate([asked])[0] for m in (loaded, model))
    assert ours.logits is not None
    assert theirs.logits is not None
    assert torch.equal(ours.logits, theirs.logits)


def test_a_folder_is_opened_on_the_way(folder: Path) -> None:
    loaded = load_model(folder, numerics="weight_only")
    assert loaded.numerics == "weight_only"
    assert loaded.max_model_len == loaded.config.max_position_embeddings


def _copy(folder: Path, out: Path) -> Path:
    shutil.copytree(folder, out)
    return out


def test_no_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint expected a directory, got .*/nowhere"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_folder_without_token_map_is_a_clear_error(folder: Path, tmp_path: Path) -> None:
    broken = _copy(folder, tmp_path / "c")
    (broken / TOKEN_MAP_FILE).unlink()
    with pytest.raises(ValueError, match=TOKEN_MAP_FILE):
        open_checkpoint(broken)


def test_problems_are_found_before_any_weight_is_read(folder: Path, tmp_path: Path) -> None:
    broken = _copy(folder, tmp_path / "c")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
        open_checkpoint(broken)
    config = json.loads((broken / "config.json").read_text())
    config["text_config"]["swiglu_limit"] = -1
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="swiglu_limit"):
        open_checkpoint(broken)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device expected auto, cpu or cuda, got 'tpu'"):
        resolve_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="got none on this machine; use cpu or auto"):
        resolve_device("cuda")


def test_cuda_without_all_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = {
        "CPU": ["aten::add", "pcpkit::topk", "pcpkit::route"],
        "CUDA": ["aten::add", "pcpkit::topk"],
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch._C, "_dispatch_get_registrations_for_dispatch_key", registered.__getitem__
    )
    with pytest.raises(ValueError, match="no CUDA kernel for route in this version"):
        resolve_device("cuda")
    assert resolve_device("auto") == torch.device("cpu")
    registered["CUDA"].append("pcpkit::route")
    assert resolve_device("cuda") == resolve_device("auto") == torch.device("cuda")


def test_every_op_the_model_uses_counts() -> None:
    from pcpkit.engine.loading import _ops_for

    assert {"topk", "linear_fp8", "sparse_mla", "route", "engram_rows"} <= _ops_for("CPU")


def test_public_names_exist() -> None:
    for name in pcpkit.__all__:
        assert getattr(pcpkit, name) is not None
    assert pcpkit.Engine is Engine
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        pcpkit.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
