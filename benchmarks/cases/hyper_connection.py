"""Hyper-connections over 4 streams of 5,120 channels: memory-bound, beside a device copy."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.case import (
    COPY,
    ROUNDING_LIMIT,
    BenchCase,
    Output,
    Run,
    copy_peer,
    one,
    require_close,
    require_equal,
    sample_rows,
    several,
)
from benchmarks.inputs import EPS, HIDDEN, Draw
from pcpkit.kernels.hyper_connection import (
    hc_collapse,
    hc_collapse_norm,
    hc_collapse_norm_reference,
    hc_collapse_reference,
    hc_expand,
    hc_expand_collapse_norm,
    hc_expand_collapse_norm_reference,
    hc_expand_reference,
)
from pcpkit.kernels.hyper_connection_mix import hc_mix, hc_mix_reference

STREAMS = 4
SINKHORN_STEPS = 20
HC_EPS = 1e-6
MIX_LIMIT = 1e-4
"""FP32 sums of 20,480 products, through an exponential; TF32 would be off by 3e-4 and more."""


def make_mix(num_rows: int, dim: int, device: str) -> Run:
    """Build a case of ``hc_mix``."""
    draw = Draw.on(device)
    streams = draw.activations(num_rows, STREAMS, dim)
    count = STREAMS * (2 + STREAMS)
    fn = draw.normal(count, STREAMS * dim, std=0.02)
    base, scale = draw.normal(count), draw.normal(3).abs()
    rest = (fn, base, scale, SINKHORN_STEPS, HC_EPS, EPS)

    def call() -> tuple[Tensor, Tensor, Tensor]:
        return hc_mix(streams, *rest)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 64, device)
        want = hc_mix_reference(streams[rows], *rest)
        names = ("pre", "post", "comb")
        notes = [
            require_close(name, got[rows], exact, MIX_LIMIT)
            for name, got, exact in zip(names, several(output), want, strict=True)
        ]
        return ", ".join(notes)

    num_bytes = streams.nbytes + fn.nbytes + 4.0 * num_rows * count
    return Run(
        call=call,
        check=check,
        flops=2.0 * num_rows * fn.numel(),
        num_bytes=num_bytes,
        peers=copy_peer(num_bytes, device),
    )


def make_collapse(num_rows: int, dim: int, device: str) -> Run:
    """Build a case of ``hc_collapse``."""
    draw = Draw.on(device)
    streams = draw.activations(num_rows, STREAMS, dim)
    pre = torch.sigmoid(draw.normal(num_rows, STREAMS))

    def call() -> Tensor:
        return hc_collapse(streams, pre)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 256, device)
        want = hc_collapse_reference(streams[rows], pre[rows])
        return require_equal("y", one(output)[rows], want)

    num_bytes = streams.nbytes + pre.nbytes + 2.0 * num_rows * dim
    return Run(
        call=call, check=check, flops=0.0, num_bytes=num_bytes, peers=copy_peer(num_bytes, device)
    )


def make_expand(num_rows: int, dim: int, device: str) -> Run:
    """Build a case of ``hc_expand``."""
    draw = Draw.on(device)
    streams = draw.activations(num_rows, STREAMS, dim)
    output_rows = draw.activations(num_rows, dim)
    post = 2 * torch.sigmoid(draw.normal(num_rows, STREAMS))
    comb = torch.softmax(draw.normal(num_rows, STREAMS, STREAMS), dim=-1)

    def call() -> Tensor:
        return hc_expand(output_rows, streams, post, comb)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 256, device)
        want = hc_expand_reference(output_rows[rows], streams[rows], post[rows], comb[rows])
        return require_equal("streams", one(output)[rows], want)

    num_bytes = 2.0 * streams.nbytes + output_rows.nbytes + post.nbytes + comb.nbytes
    return Run(
        call=call, check=check, flops=0.0, num_bytes=num_bytes, peers=copy_peer(num_bytes, device)
    )


def make_collapse_norm(num_rows: int, dim: int, device: str) -> Run:
    """Build a case of ``hc_collapse_norm``."""
    draw = Draw.on(device)
    streams = draw.activations(num_rows, STREAMS, dim)
    pre = torch.sigmoid(draw.normal(num_rows, STREAMS))
    weight = draw.norm_weight(dim)

    def call() -> Tensor:
        return hc_collapse_norm(streams, pre, weight, EPS)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 256, device)
        want = hc_collapse_norm_reference(streams[rows], pre[rows], weight, EPS)
        return require_close("y", one(output)[rows], want, ROUNDING_LIMIT)

    num_bytes = streams.nbytes + pre.nbytes + 2.0 * num_rows * dim
    return Run(
        call=call, check=check, flops=0.0, num_bytes=num_bytes, peers=copy_peer(num_bytes, device)
    )


def make_expand_collapse_norm(num_rows: int, dim: int, device: str) -> Run:
    """Build a case of ``hc_expand_collapse_norm``."""
    draw = Draw.on(device)
    streams = draw.activations(num_rows, STREAMS, dim)
    output_rows = draw.activations(num_rows, dim)
    post = 2 * torch.sigmoid(draw.normal(num_rows, STREAMS))
    comb = torch.softmax(draw.normal(num_rows, STREAMS, STREAMS), dim=-1)
    pre = torch.sigmoid(draw.normal(num_rows, STREAMS))
    weight = draw.norm_weight(dim)

    def call() -> tuple[Tensor, Tensor]:
        return hc_expand_collapse_norm(output_rows, streams, post, comb, pre, weight, EPS)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 256, device)
        want_streams, want = hc_expand_collapse_norm_reference(
            output_rows[rows], streams[rows], post[rows], comb[rows], pre[rows], weight, EPS
        )
        expanded, normed = several(output)
        require_equal("streams", expanded[rows], want_streams)
        return require_close("y", normed[rows], want, ROUNDING_LIMIT)

    num_bytes = 2.0 * streams.nbytes + 2.0 * output_rows.nbytes + post.nbytes + comb.nbytes
    return Run(
        call=call, check=check, flops=0.0, num_bytes=num_bytes, peers=copy_peer(num_bytes, device)
    )


def cases(tiny: bool = False) -> list[BenchCase]:
    """4,096 rows."""
    num_rows, dim = (8, 64) if tiny else (4096, HIDDEN)
    return [
        BenchCase(
            op="hyper_connection",
            shape=f"{name} T={num_rows} {STREAMS}x{dim}",
            make=partial(make, num_rows, dim),
            peers=(COPY,),
            quick=True,
        )
        for name, make in (
            ("hc_mix", make_mix),
            ("hc_collapse", make_collapse),
            ("hc_expand", make_expand),
            ("hc_collapse_norm", make_collapse_norm),
            ("hc_expand_collapse_norm", make_expand_collapse_norm),
        )
    ]
