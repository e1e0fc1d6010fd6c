"""The model's projections beside cuBLAS on BF16 weights; FP8 ones quantize their input too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.case import BenchCase, Output, Peer, Run, one, require_close, sample_rows, several
from benchmarks.inputs import HIDDEN, Draw
from benchmarks.timing import Call
from pcpkit.formats import fp8_block_dequantize
from pcpkit.kernels.linear import (
    linear_bf16,
    linear_bf16_reference,
    linear_fp8,
    linear_fp8_pair,
    linear_fp8_reference,
    linear_grouped,
    linear_grouped_reference,
)

CUBLAS = "cuBLAS BF16"
BF16_LIMIT = 2e-3
"""Half a BF16 unit: FP32 sums in another order seldom round to another BF16."""
FP32_LIMIT = 1e-4
"""FP32 accumulation of thousands of products: some 1e-5. A rounding to BF16 would be 2e-3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A weight of the model; ``groups`` are input groups ("fp8") or diagonal blocks ("grouped").

    A "pair" is two FP8 weights over the same input, of ``num_out`` and ``second_out`` rows.
    """

    name: str
    kind: str
    num_out: int
    num_in: int
    groups: int = 1
    keeps_fp32: bool = False
    second_out: int = 0


# Attention, compressor and indexer, then MoE, Engram and head.
PROJECTIONS = (
    Projection(name="wq_a", kind="fp8", num_out=1280, num_in=HIDDEN),
    Projection(name="wq_b", kind="fp8", num_out=32768, num_in=1280),
    Projection(name="wkv", kind="fp8", num_out=512, num_in=HIDDEN),
    Projection(name="wq_a + wkv", kind="pair", num_out=1280, second_out=512, num_in=HIDDEN),
    Projection(name="wo_a", kind="grouped", num_out=8192, num_in=4096, groups=8),
    Projection(name="wo_b", kind="fp8", num_out=HIDDEN, num_in=8192, groups=8),
    Projection(name="indexer.wq_b", kind="fp8", num_out=4096, num_in=1280),
    Projection(name="shared.w1", kind="fp8", num_out=2304, num_in=HIDDEN),
    Projection(name="shared.w1 + w3", kind="pair", num_out=2304, second_out=2304, num_in=HIDDEN),
    Projection(name="shared.w2", kind="fp8", num_out=HIDDEN, num_in=2304),
    Projection(name="engram.wkv", kind="fp8", num_out=25600, num_in=6144),
    Projection(name="compressor.wkv", kind="bf16", num_out=512, num_in=HIDDEN, keeps_fp32=True),
    Projection(name="indexer.wk", kind="bf16", num_out=128, num_in=512),
    Projection(name="weights_proj", kind="bf16", num_out=32, num_in=HIDDEN),
    Projection(name="gate", kind="bf16", num_out=384, num_in=HIDDEN, keeps_fp32=True),
    Projection(name="head", kind="bf16", num_out=129280, num_in=HIDDEN, keeps_fp32=True),
)
ALONE = ("wq_a", "wkv", "shared.w1")
"""What the model runs in pairs; alone for information."""
TINY = (
    Projection(name="wo_a", kind="grouped", num_out=128, num_in=64, groups=2),
    Projection(name="wq_a + wkv", kind="pair", num_out=64, second_out=32, num_in=128),
    Projection(name="wo_b", kind="fp8", num_out=64, num_in=128, groups=2),
    Projection(name="gate", kind="bf16", num_out=48, num_in=64, keeps_fp32=True),
)


def make(projection: Projection, num_rows: int, device: str) -> Run:
    """Build one case."""
    draw = Draw.on(device)
    if projection.kind == "bf16":
        return _make_bf16(draw, projection, num_rows)
    if projection.kind == "grouped":
        return _make_grouped(draw, projection, num_rows)
    if projection.kind == "pair":
        return _make_pair(draw, projection, num_rows)
    return _make_fp8(draw, projection, num_rows)


def _make_fp8(draw: Draw, projection: Projection, num_rows: int) -> Run:
    x = draw.activations(num_rows, projection.num_in)
    weight, scale = draw.fp8_weight(projection.num_out, projection.num_in)

    def call() -> Tensor:
        return linear_fp8(x, weight, scale, True, projection.groups)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 16, draw.device)
        want = linear_fp8_reference(x[rows], weight, scale, True, projection.groups)
        return require_close("y", one(output)[rows], want, BF16_LIMIT)

    def cublas() -> Call:
        dense = fp8_block_dequantize(weight, scale).bfloat16()
        return lambda: x @ dense.t()

    flops = 2.0 * num_rows * weight.numel()
    num_bytes = x.nbytes + weight.nbytes + scale.nbytes + 2.0 * num_rows * weight.shape[0]
    return Run(call=call, check=check, flops=flops, num_bytes=num_bytes, peers={CUBLAS: cublas})


def _make_pair(draw: Draw, projection: Projection, num_rows: int) -> Run:
    x = draw.activations(num_rows, projection.num_in)
    sizes = (projection.num_out, projection.second_out)
    weights = [draw.fp8_weight(num_out, projection.num_in) for num_out in sizes]

    def call() -> tuple[Tensor, Tensor]:
        return linear_fp8_pair(x, *weights[0], *weights[1], True)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 16, draw.device)
        note = ""
        for name, got, weight in zip(("first", "second"), several(output), weights, strict=True):
            want = linear_fp8_reference(x[rows], *weight, True)
            note = require_close(name, got[rows], want, BF16_LIMIT)
        return note

    def cublas() -> Call:
        first, second = (fp8_block_dequantize(*weight).bfloat16() for weight in weights)
        return lambda: (x @ first.t(), x @ second.t())

    num_weights = projection.num_in * sum(sizes)
    num_bytes = x.nbytes + num_weights * (1 + 1 / 1024) + 2.0 * num_rows * sum(sizes)
    flops = 2.0 * num_rows * num_weights
    return Run(call=call, check=check, flops=flops, num_bytes=num_bytes, peers={CUBLAS: cublas})


def _make_grouped(draw: Draw, projection: Projection, num_rows: int) -> Run:
    groups = projection.groups
    x = draw.activations(num_rows, groups, projection.num_in)
    weight, scale = draw.fp8_weight(projection.num_out, projection.num_in)

    def call() -> Tensor:
        return linear_grouped(x, weight, scale)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 16, draw.device)
        want = linear_grouped_reference(x[rows], weight, scale)
        return require_close("y", one(output)[rows], want, BF16_LIMIT)

    def cublas() -> Call:
        dense = fp8_block_dequantize(weight, scale).bfloat16().unflatten(0, (groups, -1))
        by_group = x.transpose(0, 1)
        return lambda: torch.bmm(by_group, dense.transpose(1, 2))

    flops = 2.0 * num_rows * weight.numel()
    num_bytes = x.nbytes + weight.nbytes + scale.nbytes + 2.0 * num_rows * weight.shape[0]
    return Run(call=call, check=check, flops=flops, num_bytes=num_bytes, peers={CUBLAS: cublas})


def _make_bf16(draw: Draw, projection: Projection, num_rows: int) -> Run:
    x = draw.activations(num_rows, projection.num_in)
    weight = draw.normal(projection.num_out, projection.num_in, std=0.02).bfloat16()
    out_dtype = torch.float32 if projection.keeps_fp32 else torch.bfloat16

    def call() -> Tensor:
        return linear_bf16(x, weight, out_dtype)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 16, draw.device)
        columns = sample_rows(projection.num_out, 2048, draw.device)
        want = linear_bf16_reference(x[rows], weight[columns], out_dtype)
        limit = FP32_LIMIT if projection.keeps_fp32 else BF16_LIMIT
        return require_close("y", one(output)[rows][:, columns], want, limit)

    num_bytes = x.nbytes + weight.nbytes + num_rows * weight.shape[0] * float(out_dtype.itemsize)
    return Run(
        call=call,
        check=check,
        flops=2.0 * num_rows * weight.numel(),
        num_bytes=num_bytes,
        peers={CUBLAS: lambda: lambda: x @ weight.t()},
    )


def _case(projection: Projection, num_rows: int, *, target: bool, quick: bool) -> BenchCase:
    peer = Peer(
        name=CUBLAS,
        target=">= 70% rate" if target else "",
        max_ratio=1 / 0.7 if target else None,
    )
    second = f"+{projection.second_out}" if projection.second_out else ""
    sizes = f"{projection.num_out}{second}x{projection.num_in}"
    return BenchCase(
        op="linear",
        shape=f"{projection.name} M={num_rows} {sizes} {projection.kind}",
        make=partial(make, projection, num_rows),
        peers=(peer,),
        quick=quick,
    )


def cases(tiny: bool = False) -> list[BenchCase]:
    """Every projection for a chunk of 4,096 rows (the head for few) and for decode batches."""
    if tiny:
        return [_case(projection, 4, target=False, quick=True) for projection in TINY]
    found: list[BenchCase] = []
    for num_rows in (4096, 64, 1):
        for projection in PROJECTIONS:
            if num_rows == 4096 and projection.name == "head":
                continue
            quick = num_rows == 4096 and projection.name in ("wq_b", "wo_a", "wo_b")
            target = num_rows == 4096 and projection.name not in ALONE
            found.append(_case(projection, num_rows, target=target, quick=quick))
    return found
