"""Engram: hash, lookup (table on the device and in pinned host memory) and gated injection."""

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
    Run,
    copy_peer,
    one,
    require_close,
    require_equal,
    sample_rows,
)
from benchmarks.inputs import EPS, HIDDEN, Draw
from benchmarks.timing import Call
from pcpkit.formats import quantize_mxfp8
from pcpkit.kernels.engram import (
    engram_gather,
    engram_gather_reference,
    engram_inject,
    engram_rows,
    engram_rows_reference,
)
from pcpkit.kernels.engram_inject import engram_inject_reference
from tests.kernels.inputs_engram import released_hash

COLUMNS = 24
STREAMS = 4
BUS_COPY = Peer(name="host to device copy, bytes read")


def make_hash(num_rows: int, device: str) -> Run:
    """Build a case of ``engram_rows``."""
    given = released_hash(num_rows).to(device)

    def call() -> Tensor:
        return engram_rows(*given.args)

    def check(output: Output) -> str:
        return require_equal("rows", one(output), engram_rows_reference(*given.args))

    num_bytes = given.token_windows.nbytes + 8.0 * num_rows * given.offsets.numel()
    return Run(
        call=call, check=check, flops=0.0, num_bytes=num_bytes, peers=copy_peer(num_bytes, device)
    )


def make_gather(num_rows: int, table_rows: int, dim: int, on_host: bool, device: str) -> Run:
    """Build a case of ``engram_gather``; a table of one layer has 384 million rows."""
    draw = Draw.on(device)
    codes, scales = quantize_mxfp8(draw.latents(min(table_rows, 1 << 16), dim))
    repeats = table_rows // codes.shape[0]
    table, scale = codes.repeat(repeats, 1), scales.repeat(repeats, 1)
    rows = draw.integers(0, table_rows, num_rows, COLUMNS, dtype=torch.int64)
    near = (table, scale)
    placed = near
    if on_host and device != "cpu":
        placed = (table.cpu().pin_memory(), scale.cpu().pin_memory())

    def call() -> Tensor:
        return engram_gather(rows, *placed)

    def check(output: Output) -> str:
        return require_equal("values", one(output), engram_gather_reference(rows, *near))

    read = rows.numel() * (dim + dim // 32)

    def bus_copy() -> Call:
        source = torch.randint(0, 256, (read,), dtype=torch.uint8)
        source = source.pin_memory() if device != "cpu" else source
        target = torch.empty_like(source, device=device)
        return lambda: target.copy_(source, non_blocking=True)

    num_bytes = read + rows.numel() * (8.0 + 2 * dim)
    peers = {BUS_COPY.name: bus_copy} if on_host else copy_peer(num_bytes, device)
    return Run(call=call, check=check, flops=0.0, num_bytes=num_bytes, peers=peers)


def make_inject(num_rows: int, dim: int, device: str) -> Run:
    """Build a case of ``engram_inject``."""
    draw = Draw.on(device)
    streams = draw.activations(num_rows, STREAMS, dim)
    key_value = draw.activations(num_rows, (STREAMS + 1) * dim)
    query_weight, key_weight = draw.norm_weight(STREAMS, dim), draw.norm_weight(STREAMS, dim)

    def call() -> Tensor:
        return engram_inject(streams, key_value, query_weight, key_weight, EPS)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 128, device)
        want = engram_inject_reference(
            streams[rows], key_value[rows], query_weight, key_weight, EPS
        )
        return require_close("streams", one(output)[rows], want, ROUNDING_LIMIT)

    num_bytes = 2.0 * streams.nbytes + key_value.nbytes
    return Run(
        call=call, check=check, flops=0.0, num_bytes=num_bytes, peers=copy_peer(num_bytes, device)
    )


def cases(tiny: bool = False) -> list[BenchCase]:
    """4,096 rows of 24 columns."""
    num_rows, table_rows, dim, hidden = (8, 64, 32, 64) if tiny else (4096, 1 << 21, 256, HIDDEN)
    host_rows = 64 if tiny else 1 << 19
    shapes = (
        (f"engram_rows T={num_rows}", COPY, partial(make_hash, num_rows)),
        (
            f"engram_gather T={num_rows}",
            COPY,
            partial(make_gather, num_rows, table_rows, dim, False),
        ),
        (
            f"engram_gather T={num_rows}, pinned host table",
            BUS_COPY,
            partial(make_gather, num_rows, host_rows, dim, True),
        ),
        (
            f"engram_inject T={num_rows} {STREAMS}x{hidden}",
            COPY,
            partial(make_inject, num_rows, hidden),
        ),
    )
    return [
        BenchCase(op="engram", shape=shape, make=make, peers=(peer,))
        for shape, peer, make in shapes
    ]
