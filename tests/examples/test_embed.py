"""examples/embed.py: pcpkit's parts serve a stranger's model, without pcpkit's model or engine."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch import Tensor

from pcpkit.parallel import pcp

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "embed.py"
PARTS = ("cache", "kernels", "parallel", "plan")


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *args])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(("args", "size"), [((), 2), (("3",), 3), (("8",), 8)])
def test_ranks_agree(
    args: tuple[str, ...],
    size: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *args) == 0
    *requests, verdict = capsys.readouterr().out.splitlines()
    assert verdict == f"PCP {size} and PCP 1 agree bit for bit"
    assert [line.split(" tokens")[0].strip() for line in requests] == ["21", "3", "11"]
    assert all(len(line.split("[")[1].split(",")) == 6 for line in requests)


def test_a_difference_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that sends another last row spoils the pairs and the ring."""
    honest = pcp.pick_rows

    def wrong(rows: Tensor, index: Tensor) -> Tensor:
        picked = honest(rows, index)
        return -picked if threading.current_thread().name == "rank1" else picked

    monkeypatch.setattr(pcp, "pick_rows", wrong)
    assert run(monkeypatch) == 1
    assert "PCP 2 and PCP 1 differ: [False, False]" in capsys.readouterr().out


def test_imports_four_parts_only() -> None:
    names: list[str] = []
    for node in ast.walk(ast.parse(EXAMPLE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    ours = [name.split(".") for name in names if name.split(".")[0] == "pcpkit"]
    assert {name[1] for name in ours} == set(PARTS)
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 100


def test_a_fresh_process_loads_neither_model_nor_engine() -> None:
    code = (
        "import runpy, sys; sys.argv[1:] = []\n"
        f"try: runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
        "except SystemExit as ended: assert ended.code == 0\n"
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('pcpkit.')})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=EXAMPLE.parents[1] / "src",
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert loaded.isdisjoint({"model", "engine", "transfer", "testing"})
    assert loaded > set(PARTS)
