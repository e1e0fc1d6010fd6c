"""The tiny checkpoints: schema, layer modes, tokenizer, same bytes, safe writing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from pcpkit.config import ModelConfig, ParallelConfig
from pcpkit.model import tiny
from pcpkit.model.checkpoint import CheckpointReader
from pcpkit.model.checkpoint_schema import expected_tensors
from pcpkit.model.engram_tables import EngramHash, load_token_map
from pcpkit.model.tiny import (
    MARKER_FILE,
    PRESETS,
    cached_tiny_checkpoint,
    main,
    make_tiny_checkpoint,
    tiny_config,
    train_tokenizer,
    training_text,
)
from pcpkit.model.tokenizer import decode, encode, load_tokenizer

FILES = {"config.json", "model.safetensors", "tokenizer.json", MARKER_FILE}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both presets, seed 0, written once; the time limit is the one users are promised."""
    root = tmp_path_factory.mktemp("tiny")
    result: dict[str, Path] = {}
    for preset in PRESETS:
        start = time.perf_counter()
        result[preset] = make_tiny_checkpoint(root / preset, preset=preset)
        assert time.perf_counter() - start < 60, f"{preset} took more than a minute"
    return result


@pytest.fixture(scope="module", params=PRESETS)
def checkpoint(request: pytest.FixtureRequest, made: dict[str, Path]) -> Path:
    return made[request.param]


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> ModelConfig:
    return ModelConfig.from_file(checkpoint)


def quick_document(preset: str = "tiny") -> dict[str, object]:
    """A config document without training a tokenizer; the compressed size is arbitrary."""
    return tiny_config(preset, 1000)


# --- schema and configuration -------------------------------------------------------------------


def test_files_and_size(checkpoint: Path) -> None:
    assert {path.name for path in checkpoint.iterdir()} == FILES
    assert sum(path.stat().st_size for path in checkpoint.iterdir()) < 40e6


def test_checkpoint_has_exactly_the_released_schema(checkpoint: Path, config: ModelConfig) -> None:
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert names == set(expected_tensors(config))
    assert not any(name.startswith("mtp.") for name in names)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_power_of_two_group_size_splits_it(
    checkpoint: Path, config: ModelConfig, size: int
) -> None:
    for expert_parallel in (False, True):
        ParallelConfig(tp_size=size, expert_parallel=expert_parallel).validate(config)
    reader = CheckpointReader(checkpoint, config)
    parts = [
        dict(reader.stream(tp_rank=rank, tp_size=size, ep_rank=rank, ep_size=size))
        for rank in range(size)
    ]
    experts = [sum(".ffn.experts." in name for name in part) for part in parts]
    assert experts == [config.num_hidden_layers * config.n_routed_experts // size * 6] * size
    for name in ("embed.weight", "layers.1.engram.embed.weight", "layers.2.attn.wo_a.weight"):
        whole = reader.tensors[name].shape[0]
        assert sum(part[name].shape[0] for part in parts) == whole


def modes(config: ModelConfig) -> list[str]:
    """Layer modes of model-spec 1.2."""
    result: list[str] = []
    for layer in range(config.num_hidden_layers):
        if config.is_kv_source(layer):
            mode = "candidates" if layer == config.candidate_source_layer_id else "full"
        elif config.is_index_source(layer):
            mode = "reindex"
        else:
            source = config.selection_source(layer)
            reindexed = source is not None and not config.is_kv_source(source)
            mode = "reuse of reindex" if reindexed else "reuse"
        result.append(f"{config.compress_ratio(layer)} {mode}" if mode != "reuse" or
                      config.compress_ratio(layer) else "window only")  # fmt: skip
    return result


def test_tiny_has_every_layer_mode() -> None:
    config = ModelConfig.from_dict(quick_document())
    found = modes(config)
    expected = {"window only", "2 full", "2 reuse", "1 candidates", "1 reuse", "1 reindex",
                "1 reuse of reindex"}  # fmt: skip
    assert set(found) == expected
    assert len(config.ratio2_sources) >= 2
    assert len(config.engram_layer_ids) == 2
    assert any(config.is_kv_source(layer) for layer in config.engram_layer_ids)


def test_real_heads_has_the_released_shapes() -> None:
    config = ModelConfig.from_dict(quick_document("tiny-real-heads"))
    assert (config.head_dim, config.qk_rope_head_dim, config.sliding_window) == (512, 64, 128)
    assert (config.index_n_heads, config.index_head_dim, config.engram_head_dim) == (32, 128, 256)
    assert (config.num_attention_heads, config.o_groups) == (16, 8)
    assert (config.rope_theta, config.compress_rope_theta) == (10000, 160000)
    rope = config.rope_scaling
    assert (rope.factor, rope.original_max_position_embeddings) == (16, 65536)
    assert (rope.beta_fast, rope.beta_slow) == (32, 1)
    assert config.max_position_embeddings >= 8192
    assert {"2 full", "2 reuse", "1 candidates", "1 reuse", "1 reindex"} <= set(modes(config))


@pytest.mark.parametrize("preset", PRESETS)
def test_short_prompts_are_enough_for_selection_to_cut(preset: str) -> None:
    config = ModelConfig.from_dict(quick_document(preset))
    pool = config.candidate_topk_blocks * config.candidate_block_size
    # A pool below top-k would leave R's answer undefined (model-spec 11.41).
    assert config.index_topk < pool
    assert pool <= 128


# --- tokenizer and Engram -----------------------------------------------------------------------


def test_tokenizer_belongs_to_the_config(checkpoint: Path, config: ModelConfig) -> None:
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer is not None
    assert tokenizer.get_vocab_size() == config.vocab_size
    special = [tokenizer.id_to_token(token) for token in range(4)]
    assert special[:3] == [
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5c\u2581pad\u2581\uff5c>",
    ]
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, 2)
    text = "def prefill(self, tokens):  # na\xefve \u4e2d\u6587\n    return tokens\n"
    ids = encode(tokenizer, text, bos_token_id=config.bos_token_id)
    assert decode(tokenizer, ids) == text
    assert len(ids) < 0.6 * len(text.encode()), "merges were learned"
    assert min(ids[1:]) > 2
    assert decode(tokenizer, encode(tokenizer, f"{special[0]}a{special[1]}")) == "a"


def test_engram_constants_fit_the_tokenizer(checkpoint: Path, config: ModelConfig) -> None:
    token_map = load_token_map(checkpoint)
    constants = EngramHash.from_config(config, token_map)
    heights = tuple(constants.primes.flatten(1).sum(1).tolist())
    assert heights == config.engram_num_embeddings
    # Case and blank variants really merge, and byte pieces really stay apart.
    assert 0.5 * config.vocab_size < config.engram_compressed_vocab_size < 0.9 * config.vocab_size


def test_training_text_falls_back_to_docstrings(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("pass\n")
    origin, texts = training_text(tmp_path)
    assert origin == "built-in docstrings"
    assert train_tokenizer(texts, vocab_size=2048).get_vocab_size() == 2048
    assert training_text()[0] == "standard library sources"


def test_training_needs_enough_text() -> None:
    with pytest.raises(ValueError, match=r"enough text for 2048 tokens, got \d+ tokens out of 7"):
        train_tokenizer(["too few"], vocab_size=2048)


# --- determinism --------------------------------------------------------------------------------


def test_two_runs_write_the_same_bytes(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run is another process, with another hash seed and thread count."""
    out = tmp_path / "again"
    package_root = Path(tiny.__file__).parents[2]
    command = [sys.executable, "-m", "pcpkit.model.tiny", "--out", str(out)]
    monkeypatch.setenv("PYTHONPATH", str(package_root))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "tiny, seed 0" in run.stdout
    for name in FILES:
        assert (out / name).read_bytes() == (made["tiny"] / name).read_bytes(), name


# --- writing ------------------------------------------------------------------------------------


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the slow steps; what is left is the handling of directories."""

    def write(directory: Path, document: object, tensors: object) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(b"")

    tokenizer = train_tokenizer(["ab ab"], vocab_size=260)
    monkeypatch.setattr(tiny, "write_checkpoint", write)
    monkeypatch.setattr(tiny, "draw_tensors", lambda specs, seed: {})
    monkeypatch.setattr(tiny, "train_tokenizer", lambda texts, vocab_size: tokenizer)


@pytest.mark.usefixtures("instant")
def test_out_may_be_new_empty_or_ours(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    make_tiny_checkpoint(deep)
    assert {path.name for path in deep.iterdir()} == FILES
    make_tiny_checkpoint(deep, seed=5)
    assert '"seed": 5' in (deep / MARKER_FILE).read_text()
    empty = tmp_path / "empty"
    empty.mkdir()
    make_tiny_checkpoint(empty)
    assert {path.name for path in empty.iterdir()} == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "empty"]


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("content", ["config.json", "notes.txt"])
def test_foreign_directory_is_refused_and_untouched(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / content).write_text("precious")
    with pytest.raises(ValueError, match=rf"out expected an empty .* with {content} in it"):
        make_tiny_checkpoint(out)
    assert (out / content).read_text() == "precious"


@pytest.mark.usefixtures("instant")
def test_own_directory_with_a_foreign_file_is_refused(tmp_path: Path) -> None:
    out = make_tiny_checkpoint(tmp_path / "out")
    (out / "notes.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"with notes\.txt in it"):
        make_tiny_checkpoint(out)
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ValueError, match="out expected a directory"):
        make_tiny_checkpoint(file)


@pytest.mark.usefixtures("instant")
def test_a_failed_run_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = make_tiny_checkpoint(tmp_path / "out")
    before = (out / MARKER_FILE).read_text()

    def fail(directory: Path, document: object, tensors: object) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(tiny, "write_checkpoint", fail)
    for target in (out, tmp_path / "new"):
        with pytest.raises(OSError, match="disk full"):
            make_tiny_checkpoint(target, seed=9)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / MARKER_FILE).read_text() == before


@pytest.mark.usefixtures("instant")
def test_cache_makes_once_per_preset_and_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cached_tiny_checkpoint(tmp_path)
    others = {
        cached_tiny_checkpoint(tmp_path, seed=1),
        cached_tiny_checkpoint(tmp_path, preset="tiny-real-heads"),
    }
    assert len(others | {first}) == 3
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in others | {first}}
    monkeypatch.setattr(tiny, "make_tiny_checkpoint", pytest.fail)
    assert cached_tiny_checkpoint(tmp_path) == first


@pytest.mark.usefixtures("instant")
def test_cache_defaults_to_the_home_directory_and_follows_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    first = cached_tiny_checkpoint()
    assert first.parent == tmp_path / ".cache" / "pcpkit" / "tiny"
    monkeypatch.setattr(tiny.platform, "python_version", lambda: "3.99.0")
    assert cached_tiny_checkpoint() != first


@pytest.mark.usefixtures("instant")
def test_cache_accepts_the_directory_of_a_faster_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    winner = make_tiny_checkpoint(tmp_path / "winner")
    root = tmp_path / "cache"

    def make_while_another_finishes(out: Path, *, seed: int, preset: str) -> Path:
        winner.rename(root / f"{preset}-seed{seed}-{tiny_fingerprint}")
        return make_tiny_checkpoint(out, seed=seed, preset=preset)

    tiny_fingerprint = cached_tiny_checkpoint(tmp_path / "probe").name.rsplit("-", 1)[1]
    monkeypatch.setattr(tiny, "make_tiny_checkpoint", make_while_another_finishes)
    result = cached_tiny_checkpoint(root)
    assert {path.name for path in result.iterdir()} == FILES
    assert [path.name for path in root.iterdir()] == [result.name]


def test_unknown_preset_is_named(tmp_path: Path) -> None:
    for make in (make_tiny_checkpoint, cached_tiny_checkpoint):
        with pytest.raises(ValueError, match="preset expected one of tiny, tiny-real-heads, got"):
            make(tmp_path / "out", preset="huge")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("instant")
def test_command_line_reports_errors_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "new"), "--preset", "tiny-real-heads"]) == 0
    assert "tiny-real-heads, seed 0" in capsys.readouterr().out
    (tmp_path / "new" / "notes.txt").write_text("precious")
    assert main(["--out", str(tmp_path / "new")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: out expected")
    assert error.count("\n") == 1
