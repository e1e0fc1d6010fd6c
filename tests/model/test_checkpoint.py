"""What a checkpoint must hold, what a rank reads of it, and how much memory that takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from pcpkit.config import ConfigError, ModelConfig
from pcpkit.model import checkpoint_files
from pcpkit.model.checkpoint import (
    CheckpointError,
    CheckpointReader,
    TensorSpec,
    expected_tensors,
    pin_engram_table,
    write_checkpoint,
)

SMALL_CONFIG = Path(__file__).resolve().parent.parent / "data" / "small-config.json"
GOLDEN_CASES = ("tiny-main", "tiny-dspark", "tiny-real-heads")

# The split of model-spec sections 3.9 and 9, written down a second time.
ROWS = re.compile(
    r"^(embed|head)\.weight$|\.attn\.(attn_sink$|wq_b\.|wo_a\.)|\.markov_head\.|\.engram\.embed\."
)
COLUMNS = re.compile(r"\.attn\.wo_b\.")
EXPERT = re.compile(r"^(layers|mtp)\.\d+\.ffn\.experts\.(\d+)\.")

Stored = dict[str, tuple[Tensor, str]]


def random_tensor(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """Random bits, NaN patterns included: a loader must not look at values."""
    raw = torch.randint(0, 256, (spec.num_bytes,), dtype=torch.uint8, generator=generator)
    dtype = {"BF16": torch.bfloat16, "F32": torch.float32}.get(spec.dtype, torch.uint8)
    return raw.view(dtype).view(spec.shape)


def same_bits(left: Tensor, right: Tensor) -> bool:
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_file(SMALL_CONFIG)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(SMALL_CONFIG.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def stored(config: ModelConfig) -> Stored:
    generator = torch.Generator().manual_seed(7)
    specs = expected_tensors(config).values()
    return {spec.name: (random_tensor(spec, generator), spec.dtype) for spec in specs}


@pytest.fixture(scope="module")
def directory(
    document: dict[str, Any], stored: Stored, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    target = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(target, document, stored, max_shard_bytes=3_000_000)
    return target


# ---- schema --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_schema_is_that_of_the_golden_checkpoints(
    golden_dir: Callable[[str], Path], case: str
) -> None:
    folder = golden_dir(case)
    expected = expected_tensors(ModelConfig.from_file(folder))
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
        found = {
            name: (part.get_dtype(), tuple(part.get_shape()))
            for name in names
            if (part := file.get_slice(name))
        }
    assert {name: (spec.dtype, spec.shape) for name, spec in expected.items()} == found


def test_sections_and_order(config: ModelConfig) -> None:
    specs = list(expected_tensors(config).values())
    assert [spec.name for spec in specs[:3]] == ["embed.weight", "head.weight", "norm.weight"]
    sections = [spec.section for spec in specs]
    assert sections == sorted(sections, reverse=True)  # all text, then all draft
    for spec in specs:
        assert (spec.section == "draft") == spec.name.startswith("mtp.")
        assert (spec.expert is not None) == bool(EXPERT.match(spec.name))


# ---- streaming -----------------------------------------------------------------------------------


def test_stream_follows_the_schema(directory: Path, config: ModelConfig, stored: Stored) -> None:
    reader = CheckpointReader(directory, config)
    specs = reader.tensors
    streamed = dict(reader.stream(include_draft=True))
    wanted = [name for name in specs if not name.endswith("gate.bias_vl")]
    assert list(streamed) == wanted
    for name, tensor in streamed.items():
        assert tensor.device.type == "cpu"
        assert tensor.is_contiguous()
        raw = specs[name].dtype in ("F8_E4M3", "F8_E8M0", "I8")
        assert (tensor.dtype is torch.uint8) == raw, name
        assert same_bits(tensor, stored[name][0]), name


def test_text_stream_leaves_the_draft_unread(directory: Path, config: ModelConfig) -> None:
    names = [name for name, _ in CheckpointReader(directory, config).stream()]
    assert names
    assert not [name for name in names if name.startswith("mtp.")]


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 4), (4, 2)])
def test_rank_slices_reassemble_bit_for_bit(
    directory: Path, config: ModelConfig, stored: Stored, tp: int, ep: int
) -> None:
    reader = CheckpointReader(directory, config)
    ranks = {
        (i, j): dict(reader.stream(i, tp, j, ep, include_draft=True))
        for i, j in product(range(tp), range(ep))
    }
    for name, (full, _) in stored.items():
        holders = {rank: parts[name] for rank, parts in ranks.items() if name in parts}
        if name.endswith("gate.bias_vl"):
            assert not holders
        elif match := EXPERT.match(name):
            count = config.n_routed_experts
            if match[1] == "mtp":
                count = config.dspark_n_routed_experts
            owner = int(match[2]) // (count // ep)
            assert {rank[1] for rank in holders} == {owner}, name
            assert len(holders) == tp
            assert all(same_bits(part, full) for part in holders.values()), name
        else:
            assert len(holders) == tp * ep, name
            for j in range(ep):
                parts = [holders[i, j] for i in range(tp)]
                if ROWS.search(name) or COLUMNS.search(name):
                    joined = torch.cat(parts, dim=1 if COLUMNS.search(name) else 0)
                    assert same_bits(joined, full), name
                else:
                    assert all(same_bits(part, full) for part in parts), name


def test_last_engram_block_is_shorter(directory: Path, config: ModelConfig) -> None:
    reader = CheckpointReader(directory, config)
    name = "layers.1.engram.embed.weight"
    heights = [dict(reader.stream(rank, 4))[name].shape[0] for rank in range(4)]
    assert heights == [158, 158, 158, 156]  # ceil(630 / 4), model-spec section 5.6


@pytest.mark.parametrize("arguments", [(0, 1, 0, 1), (1, 2, 1, 4), (3, 4, 0, 2)])
@pytest.mark.parametrize("include_draft", [False, True])
def test_num_bytes_counts_what_is_streamed(
    directory: Path, config: ModelConfig, arguments: tuple[int, int, int, int], include_draft: bool
) -> None:
    reader = CheckpointReader(directory, config)
    streamed = reader.stream(*arguments, include_draft=include_draft)
    total = sum(tensor.numel() * tensor.element_size() for _, tensor in streamed)
    assert reader.num_bytes(*arguments, include_draft=include_draft) == total


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, 2, 0, 1), "tp_rank expected 0 .. tp_size - 1, got rank 2 of 2"),
        ((-1, 2, 0, 1), "tp_rank expected"),
        ((0, 1, 1, 1), "ep_rank expected"),
        ((0, 0, 0, 1), "tp_rank expected"),
        ((0, 8, 0, 1), "tp_size expected a divisor of o_groups"),
        ((0, 1, 0, 3), "expected a length divisible by 3 ranks"),
    ],
)
def test_impossible_ranks_are_refused_before_reading(
    directory: Path, config: ModelConfig, arguments: tuple[int, int, int, int], words: str
) -> None:
    reader = CheckpointReader(directory, config)
    with pytest.raises(ValueError, match=words):
        reader.stream(*arguments)
    with pytest.raises(ValueError, match=words):
        reader.num_bytes(*arguments)


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_golden_checkpoints_are_read_bit_for_bit(
    golden_dir: Callable[[str], Path], case: str
) -> None:
    folder = golden_dir(case)
    reader = CheckpointReader(folder, ModelConfig.from_file(folder))
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name, tensor in reader.stream(include_draft=True):
            reference = file.get_tensor(name)
            if tensor.dtype is torch.uint8:
                reference = reference.view(torch.uint8)
            assert same_bits(tensor, reference), name


# ---- memory --------------------------------------------------------------------------------------


def test_engram_tables_are_maps_of_the_file(
    document: dict[str, Any], config: ModelConfig, stored: Stored, tmp_path: Path
) -> None:
    """A byte changed in the file afterwards shows in the tensor, so nothing was copied."""
    write_checkpoint(tmp_path, document, stored)
    name = "layers.1.engram.embed.weight"
    table = dict(CheckpointReader(tmp_path, config).stream(1, 2))[name]
    before = int(table[3, 5])
    start = checkpoint_files.read_header(tmp_path / "model.safetensors")[name].start
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(start + (315 + 3) * config.engram_head_dim + 5)
        file.write(bytes([before ^ 0xFF]))
    assert int(table[3, 5]) == before ^ 0xFF


def write_hollow_checkpoint(path: Path, config: ModelConfig) -> int:
    """A valid file of zeros that takes no disk space; returns its size in bytes."""
    header: dict[str, Any] = {}
    offset = 0
    for name, spec in expected_tensors(config).items():
        end = offset + spec.num_bytes
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return 8 + len(text) + offset


def large_config(config: ModelConfig) -> ModelConfig:
    """128 MiB each for embedding, head, wo_a and wo_b of both layers; 64 MiB of Engram codes."""
    return replace(
        config,
        vocab_size=2**18,
        engram_num_embeddings=(2**20,),
        o_lora_rank=2**17,
        num_nextn_predict_layers=0,
        num_hidden_layers=2,
        compress_ratios=(2, 1),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1),
        candidate_source_layer_id=1,
        dspark_target_layer_ids=(),
    )


@pytest.fixture
def peak_growth() -> Callable[[Callable[[], object]], int]:
    """Measures by how many bytes the resident memory rises at most while a function runs."""

    def resident(field: str) -> int:
        text = Path("/proc/self/status").read_text()
        found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
        if found is None:
            pytest.skip(f"the kernel does not report {field}")
        return int(found[1]) * 1024

    def measure(action: Callable[[], object]) -> int:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # peak := current
        except OSError:
            pytest.skip("the kernel does not reset the peak of the resident memory")
        before = resident("VmRSS")
        action()
        return resident("VmHWM") - before

    return measure


def consume(stream: Iterator[tuple[str, Tensor]]) -> int:
    total = 0
    for _name, tensor in stream:
        total += tensor.numel() * tensor.element_size()
        del tensor
    return total


def test_reading_holds_one_slice_and_the_scratch(
    config: ModelConfig, tmp_path: Path, peak_growth: Callable[[Callable[[], object]], int]
) -> None:
    large = large_config(config)
    size = write_hollow_checkpoint(tmp_path / "model.safetensors", large)
    assert size > 800 * 2**20
    reader = CheckpointReader(tmp_path, large)
    growth = peak_growth(lambda: consume(reader.stream(1, 4)))
    # The largest slice is a quarter of 128 MiB; one more may overlap with it while the consumer
    # lets go. A whole tensor in memory would exceed this.
    assert growth < 2 * 32 * 2**20 + checkpoint_files.SCRATCH_BYTES + 8 * 2**20


def test_a_column_slice_is_read_in_steps_of_whole_rows(
    directory: Path, config: ModelConfig, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the steps do not divide the rows: 7 of 256 rows of 128 bytes."""
    monkeypatch.setattr(checkpoint_files, "SCRATCH_BYTES", 7 * 128 + 5)
    sizes: list[int] = []
    read_into = checkpoint_files._read_into

    def record(descriptor: int, target: Tensor, offset: int, location: Any) -> None:
        sizes.append(target.numel())
        read_into(descriptor, target, offset, location)

    monkeypatch.setattr(checkpoint_files, "_read_into", record)
    name = "layers.0.attn.wo_b.weight"
    part = next(t for n, t in CheckpointReader(directory, config).stream(2, 4) if n == name)
    assert same_bits(part, stored[name][0][:, 64:96].contiguous())
    assert sizes[-37:] == [7 * 128] * 36 + [4 * 128]


def test_large_reads_are_split(
    directory: Path, config: ModelConfig, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One system call moves 2 GiB at most; here the limit is 1,000 bytes."""
    monkeypatch.setattr(checkpoint_files, "MAX_READ_BYTES", 1000)
    name, tensor = next(CheckpointReader(directory, config).stream())
    assert same_bits(tensor, stored[name][0])


def test_a_file_that_shrinks_while_it_is_read(
    document: dict[str, Any], config: ModelConfig, stored: Stored, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, document, stored)
    reader = CheckpointReader(tmp_path, config)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(CheckpointError, match="the file changed while it was read"):
        consume(reader.stream())


def test_all_files_are_closed_when_a_stream_is_left(directory: Path, config: ModelConfig) -> None:
    def opened() -> int:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(str(directory) in str(link.readlink()) for link in links)

    stream = CheckpointReader(directory, config).stream()
    next(stream)
    assert opened() == 1
    del stream
    assert opened() == 0


@pytest.mark.gpu
def test_a_pinned_table_is_a_page_locked_copy(directory: Path, config: ModelConfig) -> None:
    table = dict(CheckpointReader(directory, config).stream(1, 2))["layers.1.engram.embed.weight"]
    pinned = pin_engram_table(table)
    assert pinned.is_pinned()
    assert torch.equal(pinned, table)


# ---- refusals ------------------------------------------------------------------------------------

Edit = Callable[[Stored], object]


def refusal_of(directory: Path, config: ModelConfig) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(directory, config)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"checkpoint {directory} expected complete released files, got ")
    return message


def reshape(name: str, shape: tuple[int, ...]) -> Edit:
    return lambda stored: stored.update({name: (stored[name][0].reshape(shape), stored[name][1])})


def retype(name: str, dtype: str) -> Edit:
    return lambda stored: stored.update({name: (stored[name][0], dtype)})


def add(name: str) -> Edit:
    return lambda stored: stored.update({name: (torch.zeros(2), "F32")})


WRONG_TENSORS: list[tuple[Edit, str]] = [
    (lambda stored: stored.pop("norm.weight"), "got 1 problem: norm.weight is missing;"),
    (add("layers.7.attn_norm.weight"), "'layers.7.attn_norm.weight' is not a tensor of this model"),
    (add("bad\nname"), r"'bad\nname' is not a tensor of this model"),
    (reshape("head.weight", (256, 320)), "head.weight has shape [256, 320] instead of [320, 256]"),
    (
        retype("layers.0.attn.wkv.scale", "I8"),
        "layers.0.attn.wkv.scale has dtype I8 instead of F8_E8M0",
    ),
    (
        lambda stored: stored.update({"norm.weight": (torch.zeros(256), "F32")}),
        "norm.weight has dtype F32 instead of BF16",
    ),
    (lambda stored: stored.pop("mtp.1.norm.weight"), "mtp.1.norm.weight is missing"),
    (
        lambda stored: stored.pop("layers.0.ffn.gate.bias_vl"),
        "layers.0.ffn.gate.bias_vl is missing",
    ),
    (add("model.layers.0.self_attn.q_proj.weight"), "previous generation (DeepSeek-V4 or V3)"),
    (add("layers.2.attn.compressor.ape"), "previous generation (DeepSeek-V4 or V3)"),
    (add("hc_head_fn"), "previous generation (DeepSeek-V4 or V3)"),
]


@pytest.mark.parametrize(("edit", "words"), WRONG_TENSORS)
def test_a_wrong_tensor_is_named(
    edit: Edit,
    words: str,
    document: dict[str, Any],
    config: ModelConfig,
    stored: Stored,
    tmp_path: Path,
) -> None:
    edited = dict(stored)
    edit(edited)
    write_checkpoint(tmp_path, document, edited)
    assert words in refusal_of(tmp_path, config)


def test_all_problems_come_in_one_capped_message(
    document: dict[str, Any], config: ModelConfig, stored: Stored, tmp_path: Path
) -> None:
    """Here 2 wrong, 20 missing and 1 unknown tensor."""
    edited = dict(stored)
    reshape("head.weight", (256, 320))(edited)
    retype("norm.weight", "BF16")(edited)
    edited["layers.0.attn_norm.weight"] = (torch.zeros(256), "F32")
    for name in [name for name in stored if name.startswith("layers.3.attn.")][:20]:
        del edited[name]
    add("unknown")(edited)
    write_checkpoint(tmp_path, document, edited)
    message = refusal_of(tmp_path, config)
    assert "got 23 problems: head.weight has shape" in message
    assert "layers.0.attn_norm.weight has dtype F32" in message
    assert message.count(" is missing") == 6
    assert "; and 15 more; check that config.json belongs to these files" in message


def test_vision_tensors_are_known_and_unread(
    document: dict[str, Any], config: ModelConfig, stored: Stored, tmp_path: Path
) -> None:
    edited = dict(stored)
    for name in ("vision.blocks.0.attn.weight", "aligner.fc.weight", "image_newline"):
        add(name)(edited)
    write_checkpoint(tmp_path, document, edited)
    names = [name for name, _ in CheckpointReader(tmp_path, config).stream(include_draft=True)]
    assert set(names) < set(stored)


def test_draft_tensors_are_unread_without_draft_layers(
    directory: Path, config: ModelConfig, stored: Stored
) -> None:
    ratios = config.compress_ratios[: config.num_hidden_layers]
    without = replace(config, num_nextn_predict_layers=0, compress_ratios=ratios)
    names = {name for name, _ in CheckpointReader(directory, without).stream(include_draft=True)}
    unread = {name for name in stored if name.startswith("mtp.") or name.endswith("bias_vl")}
    assert names == set(stored) - unread


def test_the_reader_checks_the_split_with_the_config_rules(
    directory: Path, config: ModelConfig
) -> None:
    with pytest.raises(ConfigError):
        CheckpointReader(directory, config).stream(0, 16)
