"""The `plan` command: what a checkpoint of a config holds and how many bytes each rank reads of it.

Needs the config only, no checkpoint: `python -m pcpkit.model.checkpoint plan CONFIG --tp 8 --ep 8`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from pcpkit.config import ModelConfig, ParallelConfig
from pcpkit.model.checkpoint_schema import (
    RankPosition,
    TensorSpec,
    expected_tensors,
    rank_slice,
)

# First match wins; the text before the part is `layers.N.` or `mtp.N.`.
PARTS = (
    (".experts.", "routed experts"),
    (".shared_experts.", "shared experts"),
    (".gate.", "router"),
    (".engram.embed.", "engram tables"),
    (".engram.", "engram projections"),
    (".indexer.", "indexer"),
    (".compressor.", "compressor"),
    (".attn.", "attention"),
    (".hc_", "hyper connections"),
    (".markov_head.", "markov head"),
    (".main_proj.", "main projection"),
    ("embed.weight", "embedding and head"),
    ("head.weight", "embedding and head"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Totals of one part; `rank_bytes` = (fewest, most) bytes over all (TP, EP) ranks."""

    name: str
    num_tensors: int
    num_bytes: int
    rank_bytes: tuple[int, int]


def plan_rows(config: ModelConfig, tp_size: int, ep_size: int) -> list[PlanRow]:
    """One row per part, in checkpoint order, then the sums `text`, `draft` and `text + draft`.

    Raises ConfigError if TP cannot split the model, ValueError if EP cannot split the experts.
    """
    ParallelConfig(tp_size=tp_size).validate(config)
    RankPosition(ep_size=ep_size)  # refuses a size below 1
    specs = list(expected_tensors(config).values())
    parts: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        parts.setdefault(_part_name(spec), []).append(spec)
    sums = {
        "text": [spec for spec in specs if spec.section == "text"],
        "draft": [spec for spec in specs if spec.section == "draft"],
        "text + draft": specs,
    }
    return [_row(name, group, tp_size, ep_size) for name, group in (parts | sums).items() if group]


def _row(name: str, specs: list[TensorSpec], tp_size: int, ep_size: int) -> PlanRow:
    # Experts depend on the EP rank only and all else on the TP rank only, so the extremes add up.
    experts = [spec for spec in specs if spec.shard == "expert"]
    others = [spec for spec in specs if spec.shard != "expert"]
    by_ep = [
        _rank_bytes(experts, RankPosition(ep_rank=rank, ep_size=ep_size)) for rank in range(ep_size)
    ]
    by_tp = [
        _rank_bytes(others, RankPosition(tp_rank=rank, tp_size=tp_size)) for rank in range(tp_size)
    ]
    return PlanRow(
        name=name,
        num_tensors=len(specs),
        num_bytes=sum(spec.num_bytes for spec in specs),
        rank_bytes=(min(by_ep) + min(by_tp), max(by_ep) + max(by_tp)),
    )


def _rank_bytes(specs: Iterable[TensorSpec], position: RankPosition) -> int:
    total = 0
    for spec in specs:
        part = rank_slice(spec, position)
        if part is not None:
            total += torch.Size(part.shape).numel() * spec.item_bytes
    return total


def _part_name(spec: TensorSpec) -> str:
    part = next((part for marker, part in PARTS if marker in spec.name), "norms and other")
    return part if spec.section == "text" else f"draft {part}"


def format_plan(rows: Sequence[PlanRow], tp_size: int, ep_size: int) -> str:
    """The plan as plain text: totals first, then one line per part."""
    total = rows[-1]
    fewest, most = total.rank_bytes
    lines = [
        f"{total.name}: {total.num_tensors:,} tensors, {total.num_bytes:,} bytes "
        f"({total.num_bytes / 2**30:,.1f} GiB)",
        f"per rank (tp {tp_size}, ep {ep_size}): {fewest:,} to {most:,} bytes "
        f"({fewest / 2**30:,.2f} to {most / 2**30:,.2f} GiB)",
        "",
        f"{'part':<24}{'tensors':>9}{'bytes':>19}{'rank min':>18}{'rank max':>18}",
    ]
    for row in rows:
        low, high = row.rank_bytes
        lines.append(
            f"{row.name:<24}{row.num_tensors:>9,}{row.num_bytes:>19,}{low:>18,}{high:>18,}"
        )
    lines += ["", "Rank bytes leave out gate.bias_vl, which a text-only model does not read."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m pcpkit.model.checkpoint`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pcpkit.model.checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="tensors and bytes of a checkpoint, per part and rank")
    plan.add_argument("config", help="config.json, or the directory that holds it")
    plan.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    plan.add_argument("--ep", type=int, default=1, help="expert-parallel ranks (default 1)")
    options = parser.parse_args(arguments)
    try:
        rows = plan_rows(ModelConfig.from_file(options.config), options.tp, options.ep)
    except ValueError as error:  # ConfigError, or experts that do not divide
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_plan(rows, options.tp, options.ep))
    return 0
