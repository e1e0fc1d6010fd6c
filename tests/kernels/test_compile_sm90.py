"""Kernels compile for the H200 on a machine without one, and keep their values in registers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import triton

SCRIPT = Path(__file__).with_name("compile_sm90.py")


def test_kernels_compile_for_sm90_without_spilling(tmp_path: Path) -> None:
    source = Path(__file__).resolve().parents[2] / "src"
    packages = Path(triton.__file__).resolve().parents[1]
    command = [
        "env",
        "-u",
        "TRITON_INTERPRET",
        f"TRITON_CACHE_DIR={tmp_path}",
        f"PYTHONPATH={packages}:{source}",
        sys.executable,
        str(SCRIPT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 20
    spilling = [line for line in lines if not line.endswith(", 0 bytes of stack")]
    assert not spilling, "\n".join(spilling)
