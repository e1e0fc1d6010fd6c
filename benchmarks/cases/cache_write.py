"""Cache writes: RoPE, quantize and store 4,096 rows at shuffled slots; some rows are skipped."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.case import (
    COPY,
    BenchCase,
    Output,
    Peer,
    PeerRow,
    Run,
    copy_peer,
    one,
    require_equal,
)
from benchmarks.inputs import Draw, rope_angles
from pcpkit.formats import RECORD_FORMATS
from pcpkit.kernels.cache_write import (
    cache_write,
    cache_write_reference,
    encode_records,
    scatter_records,
)

PAGE = 64
POISON = 0xEE

VLLM_WRITE = Peer(
    name="vLLM RoPE+quantize+insert 528B",
    row=PeerRow(
        section="helpers", name="vLLM triton rope_quant_insert 528B ratio 1", shape="T=4096"
    ),
    recorded_us=9.9,
    target="<= 1x",
    max_ratio=1.0,
)


def make(num_rows: int, dim: int, record: str, route: str, device: str) -> Run:
    """Build one case.

    Args:
        num_rows: rows of the step.
        dim: channels of a row.
        record: record format.
        route: "fused" (one op) or "gather" (records first, as ranks exchange them, then stored).
        device: where.
    """
    draw = Draw.on(device)
    rope_dim = 64 if dim >= 128 else 32
    latents = draw.latents(num_rows, dim)
    positions = torch.arange(num_rows, device=device) + 1000
    angles = rope_angles(num_rows + 1000, rope_dim, device)
    num_pages = num_rows // PAGE + 3
    # Whole pages in shuffled order, as a block table hands them out.
    pages = draw.permutation(num_pages)
    row = torch.arange(num_rows, device=device)
    slots = pages[row // PAGE] * PAGE + row % PAGE
    slots[::17] = -1
    size = RECORD_FORMATS[record].record_bytes(dim)
    cache = torch.full((num_pages, PAGE, size), POISON, dtype=torch.uint8, device=device)

    def call() -> Tensor:
        if route == "fused":
            cache_write(latents, positions, angles, slots, cache, record)
        else:
            scatter_records(encode_records(latents, positions, angles, record), slots, cache)
        return cache

    def check(output: Output) -> str:
        want = torch.full_like(cache, POISON)
        cache_write_reference(latents, positions, angles, slots, want, record)
        return require_equal("cache", one(output), want)

    written = num_rows * (2.0 * dim + size + 8 + 8 + 4 * rope_dim)
    return Run(
        call=call, check=check, flops=0.0, num_bytes=written, peers=copy_peer(written, device)
    )


def cases(tiny: bool = False) -> list[BenchCase]:
    """The 528, 288 and 68-byte records, fused; and the 528-byte one in two steps."""
    num_rows = 64 if tiny else 4096
    found: list[BenchCase] = []
    for dim, record, route in (
        (512, "mxfp8", "fused"),
        (512, "nvfp4", "fused"),
        (128, "mxfp4", "fused"),
        (512, "mxfp8", "gather"),
    ):
        dim = dim // 4 if tiny and dim == 512 else dim
        size = RECORD_FORMATS[record].record_bytes(dim)
        name = "cache_write" if route == "fused" else "encode_records + scatter_records"
        peers = (VLLM_WRITE, COPY) if record == "mxfp8" else (COPY,)
        if route == "gather":
            peers = (replace(VLLM_WRITE, target="", max_ratio=None), COPY)
        found.append(
            BenchCase(
                op="cache_write",
                shape=f"{name} T={num_rows} {size}B",
                make=partial(make, num_rows, dim, record, route),
                peers=peers,
                quick=route == "fused",
            )
        )
    return found
