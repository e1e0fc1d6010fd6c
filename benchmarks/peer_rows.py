"""Runs the peers' script (``peers.py`` in a folder made by its ``prepare.py``) and finds its rows.

In a process of its own: the script loads libraries with global symbols and stub modules that must
not meet ours. Run as a program, this file is that process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.case import PeerRow

TIMEOUT_S = 200
# Shapes of the "prefill" section (rows, heads, compressed rows): those that we measure. Last, the
# one that the script does not measure on its own: should it fail, the others are there.
PREFILL_SHAPES = (
    (4096, 64, 32768),
    (4096, 32, 32768),
    (4096, 8, 32768),
    (4096, 64, 131072),
    (4096, 8, 131072),
    (4096, 16, 32768),
)
QUICK_PREFILL_SHAPES = (*PREFILL_SHAPES[:3], PREFILL_SHAPES[-1])
# Which sections of the script hold peers of which op.
SECTIONS = {
    "sparse_mla": ("prefill", "chain", "decode"),
    "cache_write": ("helpers",),
    "compressor": ("helpers",),
    "norm": ("helpers",),
    "indexer": ("indexer",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A peer's time: medians in microseconds, and its rate if the script counts operations."""

    cold_us: float
    hot_us: float | None
    tflops: float | None


def sections_for(ops: Sequence[str]) -> list[str]:
    """Sections to run for these ops, each once; the one with a shape of ours last."""
    wanted = {section for op in ops for section in SECTIONS.get(op, ())}
    return sorted(wanted, key=lambda section: (section == "prefill", section))


def run_peers(folder: Path, sections: Sequence[str], *, quick: bool) -> list[dict[str, Any]]:
    """Rows of the peers' script; none if it fails, with its output on stderr.

    Args:
        folder: holds ``peers.py``, ``bin/`` and ``src/``.
        sections: to run.
        quick: fewer prefill shapes.
    """
    if not sections:
        return []
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "peers.json"
        command = [sys.executable, str(Path(__file__).resolve()), str(folder.resolve())]
        command += ["--only", ",".join(sections), "--json", str(report)]
        command += ["--quick"] if quick else []
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            print(f"peers: nothing after {TIMEOUT_S} s; going on without them", file=sys.stderr)
            return []
        if done.returncode:
            print(f"peers: exit status {done.returncode}\n{done.stdout[-3000:]}", file=sys.stderr)
        if not report.is_file():
            return []
        return json.loads(report.read_text(encoding="utf-8"))["rows"]


def find_row(rows: Sequence[dict[str, Any]], wanted: PeerRow) -> Measured | None:
    """The first row of that section, name and shape whose own check passed."""
    for row in rows:
        if (
            row["section"] == wanted.section
            and row["name"].startswith(wanted.name)
            # Whole words, so that T=64 does not find T=640.
            and f"{row['shape']} ".startswith(f"{wanted.shape} ")
            and row["status"] == "ok"
            and row["cold_us"]
        ):
            return Measured(cold_us=row["cold_us"], hot_us=row["hot_us"], tflops=row["tflops"])
    return None


def _run_script(
    folder: Path, only: str, report: str, shapes: Sequence[tuple[int, int, int]]
) -> None:
    """Run the script in this process with our prefill shapes; it ends the process."""
    spec = importlib.util.spec_from_file_location("peers", folder / "peers.py")
    assert spec is not None, f"no peers.py in {folder}"
    assert spec.loader is not None, "a file has a loader"
    script: Any = importlib.util.module_from_spec(spec)
    sys.modules["peers"] = script
    spec.loader.exec_module(script)
    script.sweep = lambda _arguments: list(shapes)
    sys.argv = ["peers.py", "--only", only, "--json", report]
    script.main()


def main() -> None:
    """Entry of the process that runs the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", required=True)
    parser.add_argument("--json", required=True)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    shapes = QUICK_PREFILL_SHAPES if given.quick else PREFILL_SHAPES
    _run_script(given.folder, given.only, given.json, shapes)


if __name__ == "__main__":
    main()
