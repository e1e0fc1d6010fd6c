"""RMSNorm of latents and hidden states; at 512 channels it is the whole compressor of ratio 1."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.case import (
    COPY,
    ROUNDING_LIMIT,
    BenchCase,
    Output,
    Peer,
    PeerRow,
    Run,
    copy_peer,
    one,
    require_close,
    sample_rows,
)
from benchmarks.inputs import EPS, Draw
from pcpkit.kernels.norm import rms_norm, rms_norm_reference

VLLM_COMPRESS = Peer(
    name="vLLM compress+norm ratio 1",
    row=PeerRow(
        section="helpers", name="vLLM triton fused_save_compress_norm ratio 1", shape="T=4096"
    ),
    recorded_us=9.1,
)


def make(num_rows: int, dim: int, dtype: torch.dtype, device: str) -> Run:
    """Build one case."""
    draw = Draw.on(device)
    x = draw.normal(num_rows, dim, std=3.0).to(dtype)
    weight = draw.norm_weight(dim)

    def call() -> Tensor:
        return rms_norm(x, weight, EPS)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 256, device)
        want = rms_norm_reference(x[rows], weight, EPS)
        return require_close("y", one(output)[rows], want, ROUNDING_LIMIT)

    num_bytes = x.nbytes + 2.0 * x.numel()
    return Run(
        call=call, check=check, flops=0.0, num_bytes=num_bytes, peers=copy_peer(num_bytes, device)
    )


def cases(tiny: bool = False) -> list[BenchCase]:
    """512 channels (compressor of ratio 1, window latents), 1,280 (queries), 5,120 (hidden)."""
    num_rows = 8 if tiny else 4096
    found: list[BenchCase] = []
    for dim in (512, 1280, 5120):
        width = 64 if tiny else dim
        found.append(
            BenchCase(
                op="norm",
                shape=f"rms_norm {num_rows}x{width}",
                make=partial(make, num_rows, width, torch.bfloat16),
                peers=(VLLM_COMPRESS, COPY) if dim == 512 else (COPY,),
                quick=dim == 512,
            )
        )
    return found
