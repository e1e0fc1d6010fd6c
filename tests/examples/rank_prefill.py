"""The example on the ranks of a pool, and as a rank that is lost in the middle of a step.

As a program: `python rank_prefill.py HOW RANK ARGUMENTS..` runs prefill.py, and on rank RANK of the
job leaves the forward of the third step HOW: killed, stuck or raising.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from pcpkit.engine import CacheRecorder
from pcpkit.model import decoder
from pcpkit.parallel.collectives import world_rank
from pcpkit.parallel.groups import Groups

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    code: int
    out: str
    err: str


class SpoiltRecorder(CacheRecorder):
    """Flips a bit of what the caches hold."""

    def cache_bytes(self, request_id: str) -> dict[str, Tensor]:
        named = super().cache_bytes(request_id)
        named["window.3"] = named["window.3"].clone()
        named["window.3"][2, 1] ^= 1
        return named


def prefill(
    rank: int,
    groups: Groups,
    arguments: Sequence[str],
    odd_rank: int | None = None,
    odd_arguments: Sequence[str] = (),
    stdin: bytes = b"",
    spoilt: bool = False,
) -> RankResult:
    """Run the example's `main`; one rank gets other arguments, or caches with a wrong bit."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    example: Any = importlib.import_module("prefill")
    out, err = io.StringIO(), io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        # Other ranks have an input of their own, which must not be read.
        own = io.TextIOWrapper(io.BytesIO(stdin if rank == 0 else b"not this"))
        stack.enter_context(patch.object(sys, "stdin", own))
        if spoilt and rank == odd_rank:
            stack.enter_context(patch.object(example, "CacheRecorder", SpoiltRecorder))
        try:
            asked = odd_arguments if rank == odd_rank and not spoilt else arguments
            code = example.main(list(asked))
        except SystemExit as error:
            code = int(str(error.code))
    return RankResult(code=code, out=out.getvalue(), err=err.getvalue())


class Lost(Exception):
    """Raised by a rank on its own."""


def _lose(how: str, rank: int) -> None:
    """Make the rank leave in its third step, after the attention of layer 1."""
    forward, calls = decoder.moe_forward, 0

    def leave(*positional: Any, **named: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 16 and world_rank()[0] == rank:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "stuck":
                time.sleep(600)
            raise Lost(f"rank {rank} has a fault")
        return forward(*positional, **named)

    decoder.moe_forward = leave


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))
    _lose(sys.argv[1], int(sys.argv[2]))
    sys.exit(importlib.import_module("prefill").main(sys.argv[3:]))
