"""Writes a checkpoint in the released format: same bytes for same tensors, or nothing at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pcpkit.model.checkpoint_files import INDEX_FILE, SINGLE_FILE, CheckpointError

# In the order of the data in a file: wide elements first, so that every tensor is aligned.
ACCEPTED_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "F32": (torch.float32,),
    "BF16": (torch.bfloat16,),
    "F8_E8M0": (torch.uint8, torch.float8_e8m0fnu),
    "F8_E4M3": (torch.uint8, torch.float8_e4m3fn),
    "I8": (torch.uint8, torch.int8),
}
TEMPORARY_SUFFIX = ".partial"

StoredTensor = tuple[Tensor, str]


def write_checkpoint(
    directory: str | Path,
    config_dict: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    max_shard_bytes: int | None = None,
) -> None:
    """Writes config.json and the tensors (data, safetensors dtype string) into `directory`.

    One-byte formats take uint8 raw bytes or the matching torch dtype. Without `max_shard_bytes`
    there is one model.safetensors, else shards of at most that many data bytes (one tensor at
    least) and an index. Nothing appears under a final name before everything is written, and the
    file that makes the directory a checkpoint comes last. Raises CheckpointError for an existing
    checkpoint or an unsuitable tensor.
    """
    target = Path(directory)
    for name in (SINGLE_FILE, INDEX_FILE):
        if (target / name).exists():
            raise CheckpointError(
                f"directory expected no checkpoint, got {target / name}; choose another directory"
            )
    if not tensors:
        raise CheckpointError("tensors expected at least one tensor, got none; pass the weights")
    for name, (tensor, dtype) in tensors.items():
        _check_tensor(name, tensor, dtype)
    groups = _split(tensors, max_shard_bytes)
    target.mkdir(parents=True, exist_ok=True)
    config_text = json.dumps(dict(config_dict), indent=2) + "\n"
    with _all_or_nothing(target) as stage:
        stage("config.json").write_text(config_text, encoding="utf-8")
        if len(groups) == 1:
            _write_file(stage(SINGLE_FILE), tensors, groups[0])
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(groups, start=1):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            _write_file(stage(file), tensors, names)
            weight_map |= dict.fromkeys(names, file)
        total = sum(_data_bytes(tensor) for tensor, _ in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        stage(INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _check_tensor(name: str, tensor: Tensor, dtype: str) -> None:
    if dtype not in ACCEPTED_DTYPES:
        known = ", ".join(ACCEPTED_DTYPES)
        raise CheckpointError(f"{name} expected a dtype of {known}, got {dtype!r}; convert it")
    if tensor.dtype not in ACCEPTED_DTYPES[dtype]:
        wanted = " or ".join(str(item) for item in ACCEPTED_DTYPES[dtype])
        raise CheckpointError(
            f"{name} expected {wanted} for {dtype}, got {tensor.dtype}; pass raw bytes, do not cast"
        )
    if tensor.ndim == 0 or tensor.numel() == 0:
        raise CheckpointError(
            f"{name} expected at least one dimension and element, got shape {tuple(tensor.shape)}; "
            "leave it out"
        )


def _split(tensors: Mapping[str, StoredTensor], max_shard_bytes: int | None) -> list[list[str]]:
    """Deals the tensors, in the given order, to files of at most `max_shard_bytes`."""
    if max_shard_bytes is None:
        return [list(tensors)]
    groups: list[list[str]] = []
    used = 0
    for name, (tensor, _) in tensors.items():
        size = _data_bytes(tensor)
        if not groups or used + size > max_shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _write_file(path: Path, tensors: Mapping[str, StoredTensor], names: Sequence[str]) -> None:
    rank = {dtype: number for number, dtype in enumerate(ACCEPTED_DTYPES)}
    ordered = sorted(names, key=lambda name: (rank[tensors[name][1]], name))
    header: dict[str, dict[str, object]] = {}
    offset = 0
    for name in ordered:
        tensor, dtype = tensors[name]
        end = offset + _data_bytes(tensor)
        shape, offsets = list(tensor.shape), [offset, end]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in ordered:
            flat = tensors[name][0].detach().cpu().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)


def _data_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def _all_or_nothing(directory: Path) -> Generator[Callable[[str], Path]]:
    """Yields a function from a final name to the path to write; renames all at the end, in order.

    If anything fails, no file that was not there before remains.
    """
    staged: list[tuple[Path, Path]] = []

    def stage(name: str) -> Path:
        final = directory / name
        staged.append((directory / f"{name}{TEMPORARY_SUFFIX}", final))
        return staged[-1][0]

    created: list[Path] = []
    try:
        yield stage
        for temporary, _ in staged:
            # A rename may reach the disk before the data does.
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        for temporary, final in staged:
            if not final.exists():
                created.append(final)
            os.replace(temporary, final)
    except BaseException:
        for path in [*(temporary for temporary, _ in staged), *created]:
            path.unlink(missing_ok=True)
        raise
