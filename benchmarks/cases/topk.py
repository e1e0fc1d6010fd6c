"""Top-k of index scores beside torch.topk, which leaves the order of ties open."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.case import BenchCase, Output, Peer, Run, one, require_equal, sample_rows
from benchmarks.cases.indexer import causal_counts
from benchmarks.inputs import Draw, short
from benchmarks.timing import Call
from pcpkit.kernels.topk import topk, topk_reference

BF16_PEER = "torch.topk, the same BF16"
FP32_PEER = "torch.topk, FP32"

_VLLM_RECORDED: dict[tuple[int, int], float] = {
    (4096, 8192): 111.0,
    (4096, 32768): 313.0,
    (2048, 131072): 453.0,
}


def make(num_rows: int, num_keys: int, k: int, device: str) -> Run:
    """Build one case: sums of rectified terms, causal counts at the end of the context."""
    draw = Draw.on(device)
    scores = draw.normal(num_rows, num_keys).bfloat16()
    visible = causal_counts(num_rows, num_keys, device)
    scores.masked_fill_(torch.arange(num_keys, device=device) >= visible[:, None], float("-inf"))

    def call() -> Tensor:
        return topk(scores, visible, k)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 128, device)
        want = topk_reference(scores[rows], visible[rows], k)
        return require_equal("positions", one(output)[rows], want)

    def wide() -> Call:
        copy = scores.float()
        return lambda: copy.topk(k, dim=1)

    return Run(
        call=call,
        check=check,
        flops=0.0,
        num_bytes=scores.nbytes + 4.0 * num_rows * k,
        peers={BF16_PEER: lambda: lambda: scores.topk(k, dim=1), FP32_PEER: wide},
    )


def _peers(num_rows: int, num_keys: int) -> tuple[Peer, ...]:
    asked = (num_rows, num_keys) == (4096, 32768)
    target, bound = (">= 3x faster", 1 / 3) if asked else ("", None)
    peers = (
        Peer(name=BF16_PEER, target=target, max_ratio=bound),
        Peer(name=FP32_PEER, target=target, max_ratio=bound),
    )
    recorded = _VLLM_RECORDED.get((num_rows, num_keys))
    # Its CUDA library cannot be loaded outside vLLM, so there is only the recorded time.
    return peers if recorded is None else (*peers, Peer(name="vLLM CUDA", recorded_us=recorded))


def cases(tiny: bool = False) -> list[BenchCase]:
    """512 of 8k and 32k for 4,096 rows, of 128k for 2,048."""
    k = 8 if tiny else 512
    shapes = ((16, 64),) if tiny else ((4096, 8192), (4096, 32768), (2048, 131072))
    return [
        BenchCase(
            op="topk",
            shape=f"T={num_rows} S={short(num_keys)} k={k}",
            make=partial(make, num_rows, num_keys, k),
            peers=_peers(num_rows, num_keys),
            quick=(num_rows, num_keys) == (4096, 32768),
        )
        for num_rows, num_keys in shapes
    ]
