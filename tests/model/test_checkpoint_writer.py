"""The writer: same bytes, released dtypes, all or nothing. And the `plan` command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from pcpkit.config import ModelConfig
from pcpkit.model import checkpoint_plan, checkpoint_writer
from pcpkit.model.checkpoint import CheckpointError, CheckpointReader, write_checkpoint
from pcpkit.model.checkpoint_files import INDEX_FILE, SINGLE_FILE, read_header

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL_CONFIG = ROOT / "tests" / "data" / "small-config.json"
CONFIG = {"model_type": "deepseek_v41"}

Stored = dict[str, tuple[Tensor, str]]


def few_tensors() -> Stored:
    """One tensor of every accepted dtype, odd sizes, in no particular order."""
    raw = torch.arange(256, dtype=torch.uint8)
    return {
        "z.codes": (raw[:15].reshape(3, 5), "F8_E4M3"),
        "packed": (raw[100:107].view(torch.int8), "I8"),
        "scale": (raw[250:253], "F8_E8M0"),
        "bias": (torch.tensor([1.5, -0.0, float("nan")]), "F32"),
        "a.weight": (torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16), "BF16"),
        "strided": (torch.arange(6.0).reshape(2, 3).t(), "F32"),
        "typed": (raw[:4].view(torch.float8_e4m3fn), "F8_E4M3"),
        "exponents": (raw[:4].view(torch.float8_e8m0fnu), "F8_E8M0"),
    }


def test_the_library_reads_back_the_same_bits(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, few_tensors())
    with safe_open(tmp_path / SINGLE_FILE, "pt") as file:
        assert set(file.keys()) == set(few_tensors())
        for name, (tensor, dtype) in few_tensors().items():
            part = file.get_slice(name)
            assert (part.get_dtype(), part.get_shape()) == (dtype, list(tensor.shape))
            wanted, found = tensor.contiguous(), file.get_tensor(name)
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), name
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG


def test_every_tensor_is_aligned_to_its_element(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, few_tensors())
    for name, at in read_header(tmp_path / SINGLE_FILE).items():
        assert at.start % (at.num_bytes // torch.Size(at.shape).numel()) == 0, name


def test_bytes_do_not_depend_on_the_order_given(tmp_path: Path) -> None:
    tensors = few_tensors()
    write_checkpoint(tmp_path / "one", CONFIG, tensors)
    write_checkpoint(tmp_path / "two", CONFIG, dict(reversed(tensors.items())))
    one, two = ((tmp_path / name / SINGLE_FILE).read_bytes() for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("case", ["tiny-main", "tiny-dspark", "tiny-real-heads"])
def test_a_golden_checkpoint_is_rewritten_byte_for_byte(
    golden_dir: Callable[[str], Path], case: str, tmp_path: Path
) -> None:
    """The golden files were written by the safetensors library."""
    source = golden_dir(case) / SINGLE_FILE
    tensors: Stored = {}
    with safe_open(source, "pt") as file:
        for name in list(file.keys()):
            tensors[name] = (file.get_tensor(name), file.get_slice(name).get_dtype())
    write_checkpoint(tmp_path, CONFIG, tensors)
    assert (tmp_path / SINGLE_FILE).read_bytes() == source.read_bytes()


@pytest.mark.parametrize("limit", [1, 20, 30, 10**6])
def test_shards_hold_at_most_the_limit_and_the_index_lists_all(tmp_path: Path, limit: int) -> None:
    tensors = few_tensors()
    write_checkpoint(tmp_path, CONFIG, tensors, max_shard_bytes=limit)
    shards = sorted(tmp_path.glob("*.safetensors"))
    placed: dict[str, str] = {}
    for path in shards:
        found = read_header(path)
        assert len(found) == 1 or sum(at.num_bytes for at in found.values()) <= limit
        placed |= dict.fromkeys(found, path.name)
    assert set(placed) == set(tensors)
    assert len(shards) == {1: 8, 20: 5, 30: 4, 10**6: 1}[limit]
    if len(shards) == 1:
        assert shards[0].name == SINGLE_FILE
        return
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    total = sum(tensor.numel() * tensor.element_size() for tensor, _ in tensors.values())
    assert index == {"metadata": {"total_size": total}, "weight_map": placed}
    assert [path.name for path in shards] == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]


@pytest.mark.parametrize(
    ("tensor", "dtype", "words"),
    [
        (torch.zeros(2), "F64", "x expected a dtype of F32, BF16, F8_E8M0, F8_E4M3, I8, got 'F64'"),
        (torch.zeros(2), "BF16", "x expected torch.bfloat16 for BF16, got torch.float32"),
        (torch.zeros(2), "F8_E8M0", "x expected torch.uint8 or torch.float8_e8m0fnu"),
        (torch.zeros(2, dtype=torch.int8), "F8_E4M3", "pass raw bytes, do not cast"),
        (torch.zeros(0, 3), "F32", "at least one dimension and element, got shape (0, 3)"),
        (torch.tensor(1.0), "F32", "at least one dimension and element, got shape ()"),
    ],
)
def test_an_unsuitable_tensor_is_refused(
    tmp_path: Path, tensor: Tensor, dtype: str, words: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        write_checkpoint(tmp_path / "out", CONFIG, {**few_tensors(), "x": (tensor, dtype)})
    assert not (tmp_path / "out").exists()


def test_no_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensors expected at least one tensor, got none"):
        write_checkpoint(tmp_path, CONFIG, {})


@pytest.mark.parametrize("limit", [None, 20])
def test_an_existing_checkpoint_is_not_overwritten(tmp_path: Path, limit: int | None) -> None:
    write_checkpoint(tmp_path, CONFIG, few_tensors(), max_shard_bytes=limit)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="directory expected no checkpoint, got"):
        write_checkpoint(tmp_path, {}, {"other": (torch.ones(1), "F32")})
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


class Interruption(BaseException):
    """Stands for Ctrl-C or a full disk."""


@pytest.mark.parametrize("step", ["_write_file", "fsync", "replace"])
@pytest.mark.parametrize(("limit", "call"), [(None, 1), (20, 1), (20, 3)])
def test_an_interrupted_write_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, step: str, call: int
) -> None:
    """Interrupted at the first or third write, flush or rename; other files stay."""
    (tmp_path / "tokenizer.json").write_text("{}")
    owner: Any = checkpoint_writer if step == "_write_file" else os
    original = getattr(owner, step)
    calls = 0

    def interrupt(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Interruption
        return original(*arguments)

    monkeypatch.setattr(owner, step, interrupt)
    with pytest.raises(Interruption):
        write_checkpoint(tmp_path, CONFIG, few_tensors(), max_shard_bytes=limit)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_nothing_has_its_final_name_until_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the index, which makes the directory a checkpoint, is renamed last."""
    renamed: list[str] = []
    replace = os.replace

    def record(source: Path, target: Path) -> None:
        if not renamed:
            assert {path.suffix for path in tmp_path.iterdir()} == {".partial"}
        renamed.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", record)
    write_checkpoint(tmp_path, CONFIG, few_tensors(), max_shard_bytes=20)
    assert renamed[-1] == INDEX_FILE
    assert set(renamed) == {path.name for path in tmp_path.iterdir()}


# ---- plan ----------------------------------------------------------------------------------------


def released_config() -> Path:
    for folder in (ROOT / "tests" / "data" / "golden", ROOT.parent / "shared" / "golden"):
        if (folder / "released-config.json").is_file():
            return folder / "released-config.json"
    pytest.skip("released-config.json is in no golden folder")


def test_plan_of_the_release_from_the_command_line() -> None:
    command = [sys.executable, "-m", "pcpkit.model.checkpoint", "plan", str(released_config())]
    done = subprocess.run(
        [*command, "--tp", "8", "--ep", "8"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT / "src",
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "text + draft: 95,819 tensors, 509,315,486,040 bytes (474.3 GiB)"
    assert "66,048,970,176 to 66,048,971,760 bytes" in lines[1]


def test_plan_parts_of_the_release() -> None:
    """Against the sizes worked out by hand from model-spec sections 9 and 14."""
    config = ModelConfig.from_file(released_config())
    rows = {row.name: row for row in checkpoint_plan.plan_rows(config, 8, 8)}
    experts = 40 * 384 * 3 * (2304 * 2560 + 2304 * 160)
    assert rows["routed experts"].num_tensors == 40 * 384 * 6
    assert rows["routed experts"].num_bytes == experts
    assert rows["routed experts"].rank_bytes == (experts // 8, experts // 8)
    heights = (384006168, 384016682)
    assert rows["engram tables"].num_bytes == 264 * sum(heights)
    last = 264 * (48000771 + 48002086 - 6)  # the last block of layer 14 is 6 rows shorter
    assert rows["engram tables"].rank_bytes == (last, last + 264 * 6)
    assert rows["embedding and head"].num_bytes == 2 * 129280 * 5120 * 2
    assert rows["text + draft"].num_tensors == rows["text"].num_tensors + rows["draft"].num_tensors
    parts = [row for name, row in rows.items() if name not in ("text", "draft", "text + draft")]
    assert sum(row.num_bytes for row in parts) == 509_315_486_040
    assert sum(row.num_tensors for row in parts) == 95_819


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (4, 2)])
def test_plan_counts_what_the_reader_streams(tmp_path: Path, tp: int, ep: int) -> None:
    config = ModelConfig.from_file(SMALL_CONFIG)
    header: dict[str, Any] = {}
    offset = 0
    for name, spec in checkpoint_plan.expected_tensors(config).items():
        end = offset + spec.num_bytes
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(offset))
    reader = CheckpointReader(tmp_path, config)
    sizes = [
        reader.num_bytes(i, tp, j, ep, include_draft=True) for i in range(tp) for j in range(ep)
    ]
    total = checkpoint_plan.plan_rows(config, tp, ep)[-1]
    assert total.rank_bytes == (min(sizes), max(sizes))


def test_plan_prints_one_line_per_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint_plan.main(["plan", str(SMALL_CONFIG), "--tp", "2", "--ep", "2"]) == 0
    output = capsys.readouterr().out
    for part in ("routed experts", "engram tables", "attention", "draft markov head", "text"):
        assert re.search(rf"^{part} +[\d,]+ +[\d,]+ +[\d,]+ +[\d,]+$", output, re.MULTILINE), part


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.json"], "config file expected readable"),
        ([str(SMALL_CONFIG), "--tp", "3"], "tp_size expected a divisor"),
        ([str(SMALL_CONFIG), "--ep", "3"], "expected a length divisible by 3 ranks"),
        ([str(SMALL_CONFIG), "--ep", "0"], "ep_rank expected"),
    ],
)
def test_plan_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert checkpoint_plan.main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err
