"""Compressor of ratio 2: pool pairs, normalize, keep the open rows in the ring."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from benchmarks.case import (
    ROUNDING_LIMIT,
    BenchCase,
    Output,
    Peer,
    PeerRow,
    Run,
    require_close,
    require_equal,
    several,
)
from pcpkit.kernels.compressor import (
    close_and_write_ring,
    close_groups_reference,
    write_ring_reference,
)
from tests.kernels.inputs_compressor import bench_inputs

VLLM_COMPRESS = Peer(
    name="vLLM save+compress+norm ratio 2",
    row=PeerRow(
        section="helpers", name="vLLM triton fused_save_compress_norm ratio 2", shape="T=4096"
    ),
    recorded_us=14.8,
    target="<= 1x",
    max_ratio=1.0,
)


def make(num_rows: int, dim: int, device: str) -> Run:
    """Build one case: two requests, the second of which closes a group with a ring row."""
    given = bench_inputs(num_rows, device, dim=dim)
    before = given.ring.clone()

    def call() -> tuple[Tensor, Tensor]:
        latents = close_and_write_ring(*given.close, *given.open[:3])
        return latents, given.ring

    def check(output: Output) -> str:
        latents, ring = several(output)
        # Repeated calls leave the ring rows that were read alone, so `before` serves all of them.
        want_ring = before.clone()
        rows, source_rows, ring_slots, _ = given.open
        write_ring_reference(rows, source_rows, ring_slots, want_ring)
        require_equal("ring", ring, want_ring)
        want = close_groups_reference(*given.close)
        return require_close("latents", latents, want, ROUNDING_LIMIT)

    num_bytes = given.rows.nbytes + given.closing_rows.shape[0] * (2.0 * dim + 16)
    return Run(call=call, check=check, flops=0.0, num_bytes=num_bytes)


def cases(tiny: bool = False) -> list[BenchCase]:
    """4,096 rows of 512 + 512 channels."""
    num_rows, dim = (16, 32) if tiny else (4096, 512)
    return [
        BenchCase(
            op="compressor",
            shape=f"close_and_write_ring T={num_rows} ratio 2",
            make=partial(make, num_rows, dim),
            peers=(VLLM_COMPRESS,),
            quick=True,
        )
    ]
