"""Every kind of damage to a safetensors file, an index or a directory is named in the error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pcpkit.config import ModelConfig
from pcpkit.model.checkpoint import (
    CheckpointError,
    CheckpointReader,
    expected_tensors,
    write_checkpoint,
)
from pcpkit.model.checkpoint_files import INDEX_FILE, SINGLE_FILE, read_catalog, read_header

SMALL_CONFIG = Path(__file__).resolve().parent.parent / "data" / "small-config.json"

Header = dict[str, Any]


def header() -> Header:
    """Two tensors: 24 bytes of F32 and 4 bytes of E8M0."""
    return {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [24, 28]},
    }


def file_bytes(head: object, data: bytes = bytes(28)) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


def refusal_of(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(directory, ModelConfig.from_file(SMALL_CONFIG))
    message = str(caught.value)
    assert "\n" not in message
    return message


def edited(name: str, **changes: object) -> Header:
    head = header()
    head[name].update(changes)
    return head


def without(name: str, key: str) -> Header:
    head = header()
    del head[name][key]
    return head


def gap() -> Header:
    """`b` starts 4 bytes late."""
    return edited("b", data_offsets=[28, 32])


TWICE = (
    b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
)
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5\n"

DAMAGED_FILES: list[tuple[bytes, str]] = [
    (b"", "is no safetensors file or is truncated (header of 0 bytes in a file of 0)"),
    (b"\x10\x00", "is no safetensors file or is truncated"),
    (b"<!DOCTYPE html><html></html>", "is no safetensors file or is truncated"),
    (LFS_POINTER, "is a git-lfs pointer, not data (run git lfs pull)"),
    ((10**6).to_bytes(8, "little") + b"{}", "header of 1000000 bytes in a file of 10"),
    ((2**63).to_bytes(8, "little") + b"{}", "is no safetensors file or is truncated"),
    (bytes(8) + bytes(28), "header of 0 bytes"),
    (file_bytes(header())[:-1], "is truncated: it has"),
    (file_bytes(header(), bytes(29)), "has 1 bytes after its last tensor"),
    (file_bytes(b'{"a": '), "has a damaged header"),
    (file_bytes(b"\xff\xff\xff"), "has a damaged header"),
    (file_bytes(b"[" * 100_000), "has a damaged header"),
    (file_bytes([1, 2]), "has a header that is not a JSON object"),
    (file_bytes({}), "holds no tensors"),
    (file_bytes({"__metadata__": {}}), "holds no tensors"),
    (file_bytes(TWICE, bytes(1)), "'a' is given twice"),
    (file_bytes({"a": 3}), "has a damaged header entry 'a'"),
    (file_bytes(without("a", "dtype")), "has a damaged header entry 'a'"),
    (file_bytes(without("b", "shape")), "has a damaged header entry 'b'"),
    (file_bytes(without("b", "data_offsets")), "has a damaged header entry 'b'"),
    (file_bytes(edited("b", dtype="F8_E9M9")), "gives 'b' the unknown dtype 'F8_E9M9'"),
    (file_bytes(edited("b", dtype=["F32"])), "gives 'b' the unknown dtype ['F32']"),
    (file_bytes(edited("a", shape=[0, 3])), "gives 'a' the shape [0, 3], not a list of positive"),
    (file_bytes(edited("a", shape=[-2, -3])), "gives 'a' the shape [-2, -3]"),
    (file_bytes(edited("a", shape=[2.0, 3])), "gives 'a' the shape [2.0, 3]"),
    (file_bytes(edited("a", shape=6)), "gives 'a' the shape 6"),
    (file_bytes(edited("a", shape=[2, 4])), "but F32 [2, 4] needs 32 bytes"),
    (file_bytes(edited("a", data_offsets=[0])), "gives 'a' the data_offsets [0]"),
    (file_bytes(edited("a", data_offsets=[24, 0])), "gives 'a' the data_offsets [24, 0]"),
    (file_bytes(edited("a", data_offsets=[-24, 0])), "gives 'a' the data_offsets [-24, 0]"),
    (file_bytes(edited("a", data_offsets=[0, True])), "gives 'a' the data_offsets [0, True]"),
    (file_bytes(edited("b", data_offsets=[20, 24])), "has an overlap between 'a' and 'b'"),
    (file_bytes(gap(), bytes(32)), "has a gap between 'a' and 'b'"),
    (file_bytes(edited("a", data_offsets=[10**9, 10**9 + 24])), "has a gap before the data of 'b'"),
    (file_bytes(edited("b", data_offsets=[10**9, 10**9 + 4])), "has a gap between 'a' and 'b'"),
]


@pytest.mark.parametrize(("content", "words"), DAMAGED_FILES)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(content)
    message = refusal_of(tmp_path)
    assert f"got 1 problem: {SINGLE_FILE} {words}" in message or words in message
    assert "missing" not in message, "one damaged file must not report hundreds of missing tensors"


def test_a_sound_header_is_located(tmp_path: Path) -> None:
    content = file_bytes(header())
    (tmp_path / "x.safetensors").write_bytes(content)
    found = read_header(tmp_path / "x.safetensors")
    assert {name: (at.dtype, at.shape, at.num_bytes) for name, at in found.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("F8_E8M0", (4,), 4),
    }
    assert found["a"].start == len(content) - 28
    assert found["b"].start == len(content) - 4


def test_an_empty_or_absent_directory(tmp_path: Path) -> None:
    words = f"neither {SINGLE_FILE} nor {INDEX_FILE} is there"
    assert words in refusal_of(tmp_path)
    assert words in refusal_of(tmp_path / "absent")


def test_shards_without_an_index(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(file_bytes(header()))
    assert f"nor {INDEX_FILE} is there (1 other .safetensors files)" in refusal_of(tmp_path)


def test_a_directory_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).mkdir()
    assert f"{SINGLE_FILE} is unreadable" in refusal_of(tmp_path)


# ---- shards --------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A sound checkpoint of zeros in three or more shards."""
    specs = expected_tensors(ModelConfig.from_file(SMALL_CONFIG)).values()
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    tensors = {
        spec.name: (
            torch.zeros(spec.shape, dtype=dtypes.get(spec.dtype, torch.uint8)),
            spec.dtype,
        )
        for spec in specs
    }
    write_checkpoint(tmp_path, json.loads(SMALL_CONFIG.read_text()), tensors, 2_500_000)
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    assert len(CheckpointReader(tmp_path, ModelConfig.from_file(SMALL_CONFIG)).tensors) == len(
        specs
    )
    return tmp_path


def shard(directory: Path, number: int) -> Path:
    return sorted(directory.glob("*.safetensors"))[number]


def edit_index(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = directory / INDEX_FILE
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def test_a_missing_shard_is_the_only_problem(sharded: Path) -> None:
    name = shard(sharded, 1).name
    shard(sharded, 1).unlink()
    assert f"got 1 problem: {name} is missing;" in refusal_of(sharded)


def test_a_truncated_shard_is_the_only_problem(sharded: Path) -> None:
    path = shard(sharded, 0)
    path.write_bytes(path.read_bytes()[:-1])
    assert f"got 1 problem: {path.name} is truncated: it has" in refusal_of(sharded)


def test_two_damaged_shards_are_both_named(sharded: Path) -> None:
    names = [shard(sharded, number).name for number in (0, 1)]
    for name in names:
        (sharded / name).write_bytes(LFS_POINTER)
    message = refusal_of(sharded)
    assert "got 2 problems:" in message
    assert all(name in message for name in names)


def test_all_shards_missing(sharded: Path) -> None:
    count = len(list(sharded.glob("*.safetensors")))
    for path in list(sharded.glob("*.safetensors")):
        path.unlink()
    assert f"got {count} problems:" in refusal_of(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    """The second shard is replaced by one with an extra copy of a tensor of the first."""
    first, second = shard(sharded, 0), shard(sharded, 1)
    found = read_header(second)
    start = min(at.start for at in found.values())
    entries: Header = {
        name: {
            "dtype": at.dtype,
            "shape": at.shape,
            "data_offsets": [at.start - start, at.start - start + at.num_bytes],
        }
        for name, at in found.items()
    }
    end = max(entry["data_offsets"][1] for entry in entries.values())
    copy = {"dtype": "BF16", "shape": [256], "data_offsets": [end, end + 512]}
    entries["norm.weight"] = copy
    second.write_bytes(file_bytes(entries, second.read_bytes()[start:] + bytes(512)))
    words = f"got 1 problem: 'norm.weight' is in both {first.name} and {second.name};"
    assert words in refusal_of(sharded)


def test_a_tensor_the_index_does_not_know(sharded: Path) -> None:
    edit_index(sharded, lambda document: document["weight_map"].pop("norm.weight"))
    name = shard(sharded, 0).name
    assert f"got 1 problem: 'norm.weight' in {name} is not in the index;" in refusal_of(sharded)


def test_a_tensor_the_index_invents(sharded: Path) -> None:
    name = shard(sharded, 2).name
    edit_index(sharded, lambda document: document["weight_map"].update(ghost=name))
    words = f"got 1 problem: 'ghost' is not in {name}, where the index places it;"
    assert words in refusal_of(sharded)


@pytest.mark.parametrize(
    "place", ["../x.safetensors", "/etc/x.safetensors", "x\0.safetensors", "", "..", 3, None]
)
def test_an_index_must_not_point_elsewhere(sharded: Path, place: object) -> None:
    edit_index(sharded, lambda document: document["weight_map"].update({"norm.weight": place}))
    assert f"places 'norm.weight' in {place!r}, not a shard name" in refusal_of(sharded)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not readable JSON"),
        (b"\xff\xff", "is not readable JSON"),
        (b"[" * 100_000, "is not readable JSON"),
        (b"[]", "has no weight_map"),
        (b"{}", "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
        (b'{"weight_map": []}', "has no weight_map"),
    ],
)
def test_a_damaged_index(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / INDEX_FILE).write_bytes(content)
    assert f"{INDEX_FILE} {words}" in refusal_of(tmp_path)


def test_an_index_beside_a_single_file_is_ambiguous(sharded: Path) -> None:
    (sharded / SINGLE_FILE).write_bytes(file_bytes(header()))
    assert f"both {SINGLE_FILE} and {INDEX_FILE} exist, so one is stale" in refusal_of(sharded)


def test_reading_the_catalog_opens_no_data(sharded: Path) -> None:
    """Headers only: the data may be anything of the right length."""
    path = shard(sharded, 0)
    start = min(at.start for at in read_header(path).values())
    content = path.read_bytes()
    path.write_bytes(content[:start] + b"\xff" * (len(content) - start))
    assert read_catalog(sharded).problems == []
