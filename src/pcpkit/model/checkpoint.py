"""Reads a released checkpoint rank by rank, in slices, never holding a whole large tensor.

The public names of the checkpoint code are here; the steps are in checkpoint_schema (what there
should be), checkpoint_files (headers, range reads), checkpoint_writer and checkpoint_plan (the
`plan` command: `python -m pcpkit.model.checkpoint plan CONFIG --tp 8 --ep 8`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from pcpkit.config import ModelConfig, ParallelConfig
from pcpkit.model.checkpoint_files import (
    CheckpointError,
    TensorLocation,
    checkpoint_error,
    map_rows,
    read_catalog,
    read_slice,
)
from pcpkit.model.checkpoint_schema import (
    DRAFT_PREFIX,
    VISION_PREFIXES,
    RankPosition,
    RankSlice,
    TensorSpec,
    expected_tensors,
    rank_slice,
)
from pcpkit.model.checkpoint_writer import write_checkpoint

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "TensorSpec",
    "expected_tensors",
    "pin_engram_table",
    "write_checkpoint",
]

# One-byte formats stay raw: a numeric cast of E8M0 to an integer would destroy the exponent.
TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


class CheckpointReader:
    """A validated checkpoint directory.

    Construction reads all headers and raises one CheckpointError that names every missing, unknown
    or wrong tensor and every damaged file. Holds no file open and no weights.

    Attributes:
        directory: where model.safetensors, or the index and its shards, lie.
        config: the model the checkpoint was validated against.
        tensors: every text and draft tensor by name, in the order of `stream`.
    """

    def __init__(self, directory: str | Path, config: ModelConfig) -> None:
        self.directory = Path(directory)
        self.config = config
        self.tensors: Mapping[str, TensorSpec] = expected_tensors(config)
        self._locations = _locate(self.directory, self.tensors, config)

    def stream(
        self,
        tp_rank: int = 0,
        tp_size: int = 1,
        ep_rank: int = 0,
        ep_size: int = 1,
        include_draft: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, this rank's part), one CPU tensor at a time, in the order of `tensors`.

        E4M3, E8M0 and packed FP4 data come as uint8 raw bytes, BF16 and F32 as themselves. Engram
        tables (`*.engram.embed.*`) are read-only memory maps (uint8, this rank's rows; see
        `map_rows`), everything else is a fresh tensor. Experts of other EP ranks and
        `gate.bias_vl` are not read. Memory: the tensor being yielded plus at most 16 MiB.

        Raises ValueError at once if the model cannot be split so, CheckpointError if a file
        changes.
        """
        position = RankPosition(tp_rank=tp_rank, tp_size=tp_size, ep_rank=ep_rank, ep_size=ep_size)
        return self._read(self._parts(position, include_draft))

    def num_bytes(
        self,
        tp_rank: int = 0,
        tp_size: int = 1,
        ep_rank: int = 0,
        ep_size: int = 1,
        include_draft: bool = False,
    ) -> int:
        """Bytes that `stream` yields with the same arguments, memory maps included."""
        position = RankPosition(tp_rank=tp_rank, tp_size=tp_size, ep_rank=ep_rank, ep_size=ep_size)
        parts = self._parts(position, include_draft)
        return sum(torch.Size(part.shape).numel() * spec.item_bytes for spec, part in parts)

    def _parts(
        self, position: RankPosition, include_draft: bool
    ) -> list[tuple[TensorSpec, RankSlice]]:
        ParallelConfig(tp_size=position.tp_size).validate(self.config)
        wanted = [s for s in self.tensors.values() if include_draft or s.section == "text"]
        parts = [(spec, rank_slice(spec, position)) for spec in wanted]
        return [(spec, part) for spec, part in parts if part is not None]

    def _read(self, parts: list[tuple[TensorSpec, RankSlice]]) -> Iterator[tuple[str, Tensor]]:
        with ExitStack() as stack:
            descriptors: dict[Path, int] = {}
            for spec, part in parts:
                location = self._locations[spec.name]
                if spec.shard == "engram_rows":
                    yield spec.name, map_rows(location, part.rows)
                    continue
                if location.file not in descriptors:
                    descriptors[location.file] = os.open(location.file, os.O_RDONLY)
                    stack.callback(os.close, descriptors[location.file])
                raw = read_slice(descriptors[location.file], location, part)
                dtype = TORCH_DTYPES.get(spec.dtype, torch.uint8)
                yield spec.name, raw.view(dtype).view(part.shape)


def pin_engram_table(table: Tensor) -> Tensor:
    """Copies a mapped Engram table into page-locked host memory, for zero-copy reads by a GPU.

    Needs CUDA, and as much free host memory again as the table has bytes: 12.7 GB per rank and
    layer at TP 8. torch may round the allocation up to the next power of two.
    """
    return table.pin_memory()


def _locate(
    directory: Path, expected: Mapping[str, TensorSpec], config: ModelConfig
) -> dict[str, TensorLocation]:
    """Finds every expected tensor; raises one CheckpointError for all that is wrong."""
    catalog = read_catalog(directory)
    found, problems = catalog.locations, catalog.problems
    if not found:
        raise checkpoint_error(directory, problems, "download the release again")
    old = next((name for name in sorted(found) if _is_foreign_layout(name)), None)
    if old is not None:
        problem = f"{old!r} belongs to a previous generation (DeepSeek-V4 or V3) or another layout"
        remedy = "pcpkit reads the released DeepSeek-V4.1-Flash files only: download those"
        raise checkpoint_error(directory, [problem, *problems], remedy)
    for name, spec in expected.items():
        if name in found:
            problems += _compare(spec, found[name])
        elif name not in catalog.promised:
            problems.append(f"{name} is missing")
    ignored = VISION_PREFIXES if config.num_draft_layers else (*VISION_PREFIXES, DRAFT_PREFIX)
    for name in found:
        if name not in expected and not name.startswith(ignored):
            problems.append(f"{name!r} is not a tensor of this model")
    if problems:
        remedy = "check that config.json belongs to these files, or download them again"
        raise checkpoint_error(directory, problems, remedy)
    return {name: found[name] for name in expected}


def _compare(spec: TensorSpec, location: TensorLocation) -> Iterator[str]:
    if location.shape != spec.shape:
        yield f"{spec.name} has shape {list(location.shape)} instead of {list(spec.shape)}"
    if location.dtype != spec.dtype:
        yield f"{spec.name} has dtype {location.dtype} instead of {spec.dtype}"


def _is_foreign_layout(name: str) -> bool:
    """True for names of DeepSeek-V3 and V4: HF module paths, position biases, a learned HC head."""
    return (
        name.startswith(("model.", "lm_head.", "hc_head_"))
        or name.endswith((".ape", ".tid2eid"))
        or ".hc_head_" in name
    )


if __name__ == "__main__":
    from pcpkit.model.checkpoint_plan import main

    sys.exit(main())
