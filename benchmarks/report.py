"""Rows of the benchmark: what they say, the table, the JSON lines, the machine they come from."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton

from benchmarks.case import BenchCase, Peer, Run
from benchmarks.timing import Timing

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTime:
    """A peer's cold and hot time in microseconds, its rate, and where the numbers come from.

    Attributes:
        source: "this process", "peers.py" (same session) or "recorded" (an earlier one).
    """

    cold_us: float
    hot_us: float | None
    tflops: float | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        status: "ok", "RED" (wrong output), "no kernel", "error", "crashed" or "skipped".
        note: of the check, or what went wrong.
        ratio: our time over the peer's; of rates where the peer says so, the peer's over ours.
        met: whether the target is met; ``None`` if there is none or nothing to compare with.
    """

    op: str
    shape: str
    status: str
    note: str
    timing: Timing | None = None
    tflops: float | None = None
    gbytes_per_s: float | None = None
    peer: str = ""
    peer_time: PeerTime | None = None
    ratio: float | None = None
    target: str = ""
    met: bool | None = None


def failed_row(op: str, shape: str, status: str, note: str) -> Row:
    """The row of a case without a time."""
    return Row(op=op, shape=shape, status=status, note=" ".join(note.split())[:300])


def measured_rows(
    case: BenchCase, run: Run, note: str, timing: Timing | None, peers: Sequence[PeerTime | None]
) -> list[Row]:
    """One row a peer, or one alone; without a timing (CPU) they hold the check only.

    Args:
        case: the case.
        run: for its operation and byte counts.
        note: what the check said.
        timing: of the op.
        peers: times in the order of ``case.peers``.
    """
    pairs: list[tuple[Peer | None, PeerTime | None]] = list(zip(case.peers, peers, strict=True))
    if case.max_us is not None or not pairs:
        pairs.insert(0, (None, None))
    rows: list[Row] = []
    for peer, peer_time in pairs:
        ratio = _ratio(peer, peer_time, run, timing)
        target, bound, value = "", None, ratio
        if peer is not None:
            target, bound = peer.target, peer.max_ratio
        elif case.max_us is not None:
            target, bound = f"<= {case.max_us:g} us", case.max_us
            value = None if timing is None else timing.cold_us
        rows.append(
            Row(
                op=case.op,
                shape=case.shape,
                status="ok",
                note=note,
                timing=timing,
                tflops=run.flops / timing.cold_us / 1e6 if timing and run.flops else None,
                gbytes_per_s=run.num_bytes / timing.cold_us / 1e3 if timing else None,
                peer="" if peer is None else peer.name,
                peer_time=peer_time,
                ratio=ratio,
                target=target,
                met=None if value is None or bound is None else value <= bound,
            )
        )
    return rows


def _ratio(
    peer: Peer | None, peer_time: PeerTime | None, run: Run, timing: Timing | None
) -> float | None:
    if peer is None or peer_time is None or timing is None:
        return None
    if not peer.by_rate:
        return timing.cold_us / peer_time.cold_us
    if not peer_time.tflops:
        return None
    return peer_time.tflops / (run.flops / timing.cold_us / 1e6)


HEADINGS = ("op", "shape", "us", "hot us", "peer", "peer us", "ratio", "target", "")


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, with what ``*`` and brackets mean below where they occur."""
    lines = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    numbers = {2, 3, 5, 6}
    text = [
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "-" * max(map(len, text)))
    if any(row.timing is not None and not row.timing.captured for row in rows):
        text.append("(hot) could not be captured in a CUDA graph: back-to-back calls instead")
    if any(row.peer_time is not None and row.peer_time.source == "recorded" for row in rows):
        text.append("* recorded on an H200 in an earlier session, not measured in this run")
    return "\n".join(text)


def _cells(row: Row) -> tuple[str, ...]:
    timing, peer = row.timing, row.peer_time
    verdict = {None: "", True: "ok", False: "LOSS"}[row.met]
    if row.status != "ok":
        verdict = f"{row.status}: {row.note}"[:60]
    elif timing is None:
        verdict = f"checked, {row.note}"
    peer_us = "" if peer is None else f"{peer.cold_us:.1f}"
    if peer is not None and peer.source == "recorded":
        peer_us += "*"
    hot = ""
    if timing is not None:
        hot = f"{timing.hot_us:.1f}" if timing.captured else f"({timing.hot_us:.1f})"
    return (
        row.op,
        row.shape,
        "" if timing is None else f"{timing.cold_us:.1f}",
        hot,
        row.peer,
        peer_us,
        "" if row.ratio is None else f"{row.ratio:.2f}",
        row.target,
        verdict,
    )


def machine(device: str, commit: str | None) -> dict[str, Any]:
    """What a number needs beside it to mean something: machine, versions, commit, time."""
    facts: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": "cpu",
        "driver": "",
        "clocks": "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit or git_commit(Path(__file__).resolve().parent),
    }
    if device != "cpu":
        facts["gpu"] = torch.cuda.get_device_name()
        query = "driver_version,clocks.sm,clocks.mem"
        line = _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"])
        facts["driver"], _, facts["clocks"] = line.partition(", ")
    return facts


def git_commit(folder: Path) -> str:
    """The commit checked out in ``folder``, ``-dirty`` if files differ, "unknown" without git."""
    commit = _output(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"])
    if not commit:
        return "unknown"
    changed = _output(["git", "-C", str(folder), "status", "--porcelain"])
    return commit + ("-dirty" if changed else "")


def _output(command: list[str]) -> str:
    """Standard output of a command, empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def results_file(folder: Path, gpu: str, benchmark: str = "kernels") -> Path:
    """``<folder>/<gpu>-<benchmark>.jsonl``, the GPU's name in lower case with dashes."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return folder / f"{slug}-{benchmark}.jsonl"


def append_rows(path: Path, rows: Sequence[DataclassInstance], facts: dict[str, Any]) -> None:
    """Append one JSON object a row, which is a dataclass."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({**facts, **asdict(row)}) + "\n")
