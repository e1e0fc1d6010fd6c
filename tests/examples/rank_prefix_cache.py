"""The prefix cache example on the ranks of a pool; one may spoil answers or get odd arguments."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from pcpkit.engine import Engine, Request, RequestOutput
from pcpkit.parallel.groups import Groups

from .rank_prefill import EXAMPLES, RankResult


class SpoiltEngine(Engine):
    """Flips the sign of the first logit of every answer that used a cached prefix."""

    def generate(self, requests: Iterable[Request]) -> list[RequestOutput]:
        outputs = super().generate(requests)
        return [_spoilt(output) if output.num_cached_tokens else output for output in outputs]


def _spoilt(output: RequestOutput) -> RequestOutput:
    assert output.logits is not None
    logits = output.logits.clone()
    logits[0, 0] *= -1
    return replace(output, logits=logits)


def prefix_cache(
    rank: int,
    groups: Groups,
    arguments: Sequence[str],
    spoilt_rank: int | None = None,
    odd_rank: int | None = None,
    odd_arguments: Sequence[str] = (),
) -> RankResult:
    """Run the example's `main`."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    example: Any = importlib.import_module("prefix_cache")
    out, err = io.StringIO(), io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        if rank == spoilt_rank:
            stack.enter_context(patch.object(example, "Engine", SpoiltEngine))
        try:
            code = example.main(list(odd_arguments if rank == odd_rank else arguments))
        except SystemExit as error:
            code = int(str(error.code))
    return RankResult(code=code, out=out.getvalue(), err=err.getvalue())
