"""Safetensors files: header validation, range reads of one slice, read-only memory maps.

Layout of a file: 8 bytes little-endian header length, a JSON header (name -> dtype, shape,
data_offsets), then the data of all tensors without gaps. The headers are read here rather than by
the safetensors library because a memory map of an Engram table needs the byte offsets, and because
one error should name everything that is wrong with a set of files.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import warnings
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from pcpkit.model.checkpoint_schema import DTYPE_BITS, RankSlice

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[A-Za-z0-9_.-]+\.safetensors")
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_LISTED_PROBLEMS = 8
SCRATCH_BYTES = 16 * 2**20  # rows of a matrix read at once when only some columns are kept
MAX_READ_BYTES = 2**30  # Linux moves at most 2 GiB per call


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the one-line message lists what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLocation:
    """Where a tensor's data lies: absolute byte offset `start` in `file`, `num_bytes` long."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class Catalog:
    """All tensors found in a checkpoint directory, and everything that is wrong with its files.

    `promised` holds the names that the index places in a file that could not be read.
    """

    locations: dict[str, TensorLocation] = field(default_factory=dict[str, TensorLocation])
    problems: list[str] = field(default_factory=list[str])
    promised: set[str] = field(default_factory=set[str])


class _BadFileError(Exception):
    """Carries one finding about one file to the catalog."""


def checkpoint_error(place: Path, problems: list[str], remedy: str) -> CheckpointError:
    """Returns one error for all `problems`, listing the first few and counting the rest."""
    listed = "; ".join(problems[:MAX_LISTED_PROBLEMS])
    more = len(problems) - MAX_LISTED_PROBLEMS
    tail = f"; and {more} more" if more > 0 else ""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return CheckpointError(
        f"checkpoint {place} expected complete released files, "
        f"got {count}: {listed}{tail}; {remedy}"
    )


def read_catalog(directory: Path) -> Catalog:
    """Reads the headers of model.safetensors or of all shards of the index; never any data."""
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    catalog = Catalog()
    if index.exists() and single.exists():
        catalog.problems.append(f"both {SINGLE_FILE} and {INDEX_FILE} exist, so one is stale")
    elif index.exists():
        _read_shards(directory, index, catalog)
    elif single.exists():
        _add_file(single, catalog)
    else:
        shards = len(list(directory.glob("*.safetensors"))) if directory.is_dir() else 0
        found = f" ({shards} other .safetensors files)" if shards else ""
        catalog.problems.append(f"neither {SINGLE_FILE} nor {INDEX_FILE} is there{found}")
    return catalog


def _read_shards(directory: Path, index: Path, catalog: Catalog) -> None:
    try:
        weight_map = _read_index(index)
    except _BadFileError as error:
        catalog.problems.append(str(error))
        return
    for name in sorted(set(weight_map.values())):
        listed = {tensor for tensor, file in weight_map.items() if file == name}
        known = set(catalog.locations)
        if not _add_file(directory / name, catalog):
            catalog.promised |= listed
            continue
        found = set(catalog.locations) - known
        catalog.problems += [
            f"{tensor!r} is not in {name}, where the index places it"
            for tensor in sorted(listed - found - known)
        ]
        catalog.problems += [
            f"{tensor!r} in {name} is not in the index" for tensor in sorted(found - listed)
        ]


def _read_index(index: Path) -> dict[str, str]:
    try:
        document: Any = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _BadFileError(f"{index.name} is not readable JSON ({error})") from error
    raw: Any = cast("dict[str, Any]", document).get("weight_map") if _is_dict(document) else None
    if not _is_dict(raw) or not raw:
        raise _BadFileError(f"{index.name} has no weight_map")
    weight_map = cast("dict[str, Any]", raw)
    for tensor, name in weight_map.items():
        # A shard lies beside its index: a path elsewhere is a damaged or a hostile file.
        if type(name) is not str or SHARD_NAME.fullmatch(name) is None:
            raise _BadFileError(f"{index.name} places {tensor!r} in {name!r}, not a shard name")
    return weight_map


def _add_file(path: Path, catalog: Catalog) -> bool:
    """Adds the tensors of one file; False (and a problem) if the file is unusable."""
    try:
        found = read_header(path)
    except _BadFileError as error:
        catalog.problems.append(f"{path.name} {error}")
        return False
    for name, location in found.items():
        if name in catalog.locations:
            first = catalog.locations[name].file.name
            catalog.problems.append(f"{name!r} is in both {first} and {path.name}")
        catalog.locations[name] = location
    return True


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Parses one file's header and checks it against the file size. Raises _BadFileError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix + file.read(8) == b"version https://":
                raise _BadFileError("is a git-lfs pointer, not data (run git lfs pull)")
            if len(prefix) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise _BadFileError(
                    "is no safetensors file or is truncated "
                    f"(header of {length} bytes in a file of {size})"
                )
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        reason = (
            "is missing" if isinstance(error, FileNotFoundError) else f"is unreadable ({error})"
        )
        raise _BadFileError(reason) from error
    try:
        header: Any = json.loads(raw, object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise _BadFileError(f"has a damaged header ({error})") from error
    if not _is_dict(header):
        raise _BadFileError("has a header that is not a JSON object")
    entries = cast("dict[str, Any]", header)
    entries.pop("__metadata__", None)
    found = {name: _read_entry(path, name, entries[name], 8 + length) for name in entries}
    _check_extent(found, 8 + length, size)
    return found


def _read_entry(path: Path, name: str, entry: Any, data_start: int) -> TensorLocation:
    if not _is_dict(entry) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _BadFileError(f"has a damaged header entry {name!r}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPE_BITS:
        raise _BadFileError(f"gives {name!r} the unknown dtype {dtype!r}")
    if not _is_int_list(shape) or not all(size > 0 for size in shape):
        raise _BadFileError(f"gives {name!r} the shape {shape!r}, not a list of positive sizes")
    if not _is_int_list(offsets) or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise _BadFileError(f"gives {name!r} the data_offsets {offsets!r}")
    num_bytes = -(-prod(shape) * DTYPE_BITS[dtype] // 8)
    if offsets[1] - offsets[0] != num_bytes:
        raise _BadFileError(
            f"gives {name!r} data_offsets {offsets!r}, "
            f"but {dtype} {shape!r} needs {num_bytes} bytes"
        )
    return TensorLocation(
        file=path,
        dtype=dtype,
        shape=tuple(shape),
        start=data_start + offsets[0],
        num_bytes=num_bytes,
    )


def _check_extent(found: dict[str, TensorLocation], data_start: int, size: int) -> None:
    """Tensors must cover the data without gap or overlap up to the end of the file."""
    if not found:
        raise _BadFileError("holds no tensors")
    ordered = sorted(found.items(), key=lambda item: item[1].start)
    if ordered[0][1].start != data_start:
        raise _BadFileError(f"has a gap before the data of {ordered[0][0]!r}")
    for (left_name, left), (right_name, right) in pairwise(ordered):
        end = left.start + left.num_bytes
        if end != right.start:
            fault = "an overlap" if end > right.start else "a gap"
            raise _BadFileError(f"has {fault} between {left_name!r} and {right_name!r}")
    end = ordered[-1][1].start + ordered[-1][1].num_bytes
    if end > size:
        raise _BadFileError(f"is truncated: it has {size} bytes, its header needs {end}")
    if end < size:
        raise _BadFileError(f"has {size - end} bytes after its last tensor")


def read_slice(descriptor: int, location: TensorLocation, part: RankSlice) -> Tensor:
    """Reads one rank's part of a tensor, uint8 [rows, bytes per row] (flat if 1-D).

    Allocates the result and, for a column range, SCRATCH_BYTES at most (or one row).
    """
    item = DTYPE_BITS[location.dtype] // 8
    first, last = part.rows
    if part.columns is None:
        result = torch.empty((last - first) * item, dtype=torch.uint8)
        _read_into(descriptor, result, location.start + first * item, location)
        return result
    stride = location.shape[1] * item
    low, high = (column * item for column in part.columns)
    result = torch.empty((last - first, high - low), dtype=torch.uint8)
    if high - low == stride:
        _read_into(descriptor, result, location.start + first * stride, location)
        return result
    step = max(1, SCRATCH_BYTES // stride)
    scratch = torch.empty((min(step, last - first), stride), dtype=torch.uint8)
    for row in range(first, last, step):
        rows = scratch[: min(step, last - row)]
        _read_into(descriptor, rows, location.start + row * stride, location)
        result[row - first : row - first + rows.shape[0]] = rows[:, low:high]
    return result


def _read_into(descriptor: int, target: Tensor, offset: int, location: TensorLocation) -> None:
    view = target.numpy().data.cast("B") if target.numel() else memoryview(b"")
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done : done + MAX_READ_BYTES]], offset + done)
        if count == 0:
            raise CheckpointError(
                f"{location.file} expected {len(view)} bytes at offset {offset}, got {done}; "
                "the file changed while it was read: restore it and load again"
            )
        done += count


def map_rows(location: TensorLocation, rows: tuple[int, int]) -> Tensor:
    """Maps a row range of a one-byte tensor read-only, uint8 [rows, columns]; no data is copied.

    Pages are read from the file on first use and can be dropped again by the system. Writing to
    the tensor crashes the process, as the mapping is not writable.
    """
    height, width = rows[1] - rows[0], location.shape[1]
    if height == 0:
        return torch.empty((0, width), dtype=torch.uint8)
    start = location.start + rows[0] * width
    aligned = start - start % mmap.ALLOCATIONGRANULARITY
    length = start - aligned + height * width
    with location.file.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=aligned)
    mapping.madvise(mmap.MADV_RANDOM)  # rows are looked up by hash: read-ahead would be wasted
    with warnings.catch_warnings():
        # torch warns that it cannot mark the tensor read-only; the docstring says so.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(
            mapping, dtype=torch.uint8, count=height * width, offset=start - aligned
        )
    return flat.view(height, width)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice")
    return result


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_int_list(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(type(item) is int for item in cast("list[Any]", value))
