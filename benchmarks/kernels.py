"""Times pcpkit's operators on one CUDA device beside the kernels their users run today.

    python3 benchmarks/kernels.py --peers .peer            # everything
    python3 benchmarks/kernels.py --only sparse_mla,topk   # some ops

Each op is checked against its reference first; a wrong output gets no time. Prints a table of all
rows, then one of those with a target, and appends a JSON line a row to
``benchmarks/results/<gpu>-kernels.jsonl``. ``--device cpu --tiny`` checks the benchmark itself and
times nothing. Exit status: 1 if an op is wrong or failed, 3 if one broke the CUDA context, else 0;
a missed target is a row of the table, not a failure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Run as a program from a checkout in which nothing is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.case import BenchCase
from benchmarks.cases import OPS, cases_of
from benchmarks.peer_rows import run_peers, sections_for
from benchmarks.report import Row, append_rows, failed_row, machine, results_file, table
from benchmarks.session import ContextLost, Session
from benchmarks.timing import Stopwatch

RESULTS = Path(__file__).resolve().parent / "results"
WARM_TIMEOUT_S = 240
CASES_PER_PROCESS = 6
REPETITIONS = 31
QUICK_REPETITIONS = 15
CONTEXT_LOST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A few cases of one op, from its case number ``first`` on; or why there are none."""

    op: str
    first: int
    cases: tuple[BenchCase, ...]
    problem: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    given = _parse(arguments)
    ops = given.only.split(",") if given.only else list(OPS)
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise SystemExit(f"--only expected ops of {', '.join(OPS)}, got {', '.join(unknown)}")
    if given.device == "cpu" and not given.tiny:
        raise SystemExit("--device cpu expected --tiny, got no such flag; the sizes are a GPU's")
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {line}", file=sys.stderr, flush=True)

    timed = given.device != "cpu" and not given.check_only
    crashed: Mapping[int, str] = {}
    parts = _parts(ops, given)
    peer_rows: list[dict[str, Any]] = []
    if timed and given.jobs:
        crashed = _warm_up(parts, given)
        say(f"compiled and checked in {len(parts)} processes, {len(crashed)} of them crashed")
    if timed and given.peers is not None:
        peer_rows = run_peers(given.peers, sections_for(ops), quick=given.quick)
        say(f"{len(peer_rows)} rows of the peers' script")
    repetitions = QUICK_REPETITIONS if given.quick else REPETITIONS
    session = Session(
        device=given.device,
        stopwatch=Stopwatch(repetitions) if timed else None,
        peer_rows=peer_rows,
        deadline=began + given.budget,
        say=say,
    )
    facts = machine(given.device, given.commit)
    rows: list[Row] = []
    for new in _run_all(parts, crashed, session):
        rows += new
        if not given.check_only:
            append_rows(results_file(given.results, facts["gpu"]), new, facts)
        say(f"{new[0].op} {new[0].shape}: {new[0].status} {new[0].note}")
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(table(rows))
    asked = [row for row in rows if row.target or row.status != "ok"]
    if asked:
        print("\nTargets, and what did not run")
        print(table(asked), flush=True)
    return _exit_status(rows)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--only", default="", help="ops, separated by commas; default: all")
    parser.add_argument("--peers", type=Path, help="folder made by the peers' prepare.py")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repetitions")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to check the benchmark")
    parser.add_argument("--check-only", action="store_true", help="compile and check, no times")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile first; 0: none")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, default=1e9, help="start no case after so many s")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="where there is no .git: the commit that is measured")
    return parser.parse_args(arguments)


def _exit_status(rows: Sequence[Row]) -> int:
    statuses = {row.status for row in rows}
    if "crashed" in statuses:
        return CONTEXT_LOST
    return 1 if statuses & {"RED", "error"} else 0


def _parts(ops: Sequence[str], given: argparse.Namespace) -> list[Part]:
    """The selected cases of these ops, cut into parts of a few cases."""
    parts: list[Part] = []
    for op in ops:
        try:
            cases = cases_of(op, tiny=given.tiny)
        except ImportError as error:
            parts.append(Part(op=op, first=0, cases=(), problem=f"ImportError: {error}"))
            continue
        cases = [case for case in cases if case.quick] if given.quick else cases
        for first in range(0, len(cases), CASES_PER_PROCESS):
            chosen = tuple(cases[first : first + CASES_PER_PROCESS])
            parts.append(Part(op=op, first=first, cases=chosen))
    if given.first is not None:
        parts = [part for part in parts if part.first == given.first]
    return parts


def _warm_up(parts: Sequence[Part], given: argparse.Namespace) -> dict[int, str]:
    """Compile and check every part in a process of its own; returns what broke one, by its index.

    They fill Triton's cache on disk side by side, and a kernel that breaks its CUDA context breaks
    no other part's.
    """
    options = ["--check-only", "--device", given.device]
    options += [flag for flag in ("--quick", "--tiny") if getattr(given, flag[2:])]
    with ThreadPoolExecutor(given.jobs) as pool:
        broken = pool.map(partial(_warm_one, options), parts)
        return {index: why for index, why in enumerate(broken) if why}


def _warm_one(options: Sequence[str], part: Part) -> str:
    command = [sys.executable, str(Path(__file__).resolve()), "--only", part.op]
    command += ["--first", str(part.first), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WARM_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no end after {WARM_TIMEOUT_S} s"
    # 1 is a wrong output or a refused launch: the measuring process sees and reports it again.
    if done.returncode in (0, 1):
        return ""
    return f"exit status {done.returncode}: {done.stderr[-200:]}"


def _run_all(
    parts: Sequence[Part], crashed: Mapping[int, str], session: Session
) -> Iterator[list[Row]]:
    """Rows of case after case; cases that cannot run any more get a row that says so."""
    lost = ""
    for index, part in enumerate(parts):
        if part.problem:
            yield [failed_row(part.op, "all shapes", "error", part.problem)]
        for case in part.cases:
            why = lost or crashed.get(index, "")
            if not why:
                try:
                    yield session.run(case)
                    continue
                except ContextLost as error:
                    lost = why = f"CUDA context lost in {case.op} {case.shape}: {error}"
            yield [failed_row(case.op, case.shape, "crashed", why)]


if __name__ == "__main__":
    sys.exit(main())
