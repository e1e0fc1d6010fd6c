"""RoPE of queries and, inverse, of attention outputs."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.case import (
    COPY,
    BenchCase,
    Output,
    Run,
    copy_peer,
    one,
    require_equal,
    sample_rows,
)
from benchmarks.inputs import Draw, rope_angles
from pcpkit.kernels.rope import apply_rope, apply_rope_, apply_rope_reference


def make(num_rows: int, num_heads: int, head_dim: int, device: str) -> Run:
    """Build one case."""
    x = Draw.on(device).activations(num_rows, num_heads, head_dim)
    positions = torch.arange(num_rows, device=device) + 1000
    angles = rope_angles(num_rows + 1000, head_dim // 8, device)

    def call() -> Tensor:
        return apply_rope(x, positions, angles)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 256, device)
        want = apply_rope_reference(x[rows], positions[rows], angles)
        return require_equal("rotated", one(output)[rows], want)

    num_bytes = 2.0 * x.nbytes + num_rows * (8 + angles.shape[1] * 4)
    return Run(
        call=call, check=check, flops=0.0, num_bytes=num_bytes, peers=copy_peer(num_bytes, device)
    )


def make_inplace(num_rows: int, num_heads: int, head_dim: int, device: str) -> Run:
    """Build a case of ``apply_rope_``: only the rotated eighth of the channels moves.

    Repeated calls must agree, so the angles are 0; those of row 0 are no angles and clear it.
    """
    x = Draw.on(device).activations(num_rows, num_heads, head_dim)
    before, rope_dim = x.clone(), head_dim // 8
    positions = torch.arange(num_rows, device=device)
    angles = torch.zeros(num_rows, rope_dim, device=device)
    angles[1:, : rope_dim // 2] = 1.0

    def call() -> Tensor:
        apply_rope_(x, positions, angles)
        return x

    def check(output: Output) -> str:
        want = before.clone()
        want[0, :, -rope_dim:] = 0.0
        # Adding 0 makes every zero positive.
        return require_equal("rotated", one(output) + 0.0, want + 0.0)

    num_bytes = 2.0 * x.nbytes / 8 + num_rows * (8 + rope_dim * 4)
    return Run(
        call=call, check=check, flops=0.0, num_bytes=num_bytes, peers=copy_peer(num_bytes, device)
    )


def cases(tiny: bool = False) -> list[BenchCase]:
    """All heads of the model, and those of one rank of eight."""
    num_rows, head_dim = (8, 128) if tiny else (4096, 512)
    return [
        BenchCase(
            op="rope",
            shape=f"{name} T={num_rows} H={heads}",
            make=partial(build, num_rows, heads, head_dim),
            peers=(COPY,),
            quick=heads == 64,
        )
        for name, build in (("apply_rope", make), ("apply_rope_", make_inplace))
        for heads in ((2,) if tiny else (64, 8))
    ]
