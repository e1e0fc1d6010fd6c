"""Routed experts over FP4 weights beside grouped GEMMs over BF16 ones; routing and SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    several,
)
from benchmarks.inputs import HIDDEN, Draw
from benchmarks.timing import Call
from pcpkit.kernels.experts import (
    route,
    route_reference,
    routed_experts,
    routed_experts_reference,
    swiglu,
    swiglu_reference,
)

GROUPED = "3 grouped_mm, BF16 weights"
EXPERT_LIMIT = 5e-3
"""A hidden value that rounds to the other BF16 may take another E4M3 code (2^-4); few do."""
SWIGLU_LIMIT = 10.0
SCALING = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """One expert layer."""

    num_rows: int
    num_experts: int = 384
    hidden: int = HIDDEN
    inter: int = 2304
    top_k: int = 6


def make_routed(sizes: Sizes, device: str) -> Run:
    """Build a case of ``routed_experts``; the peer has no gather, activation or combine."""
    draw = Draw.on(device)
    x = draw.activations(sizes.num_rows, sizes.hidden)
    logits = draw.normal(sizes.num_rows, sizes.num_experts)
    bias = draw.normal(sizes.num_experts, std=0.1)
    ids, weights = route_reference(logits, bias, sizes.top_k, SCALING)
    w1, w1_scale = draw.fp4_experts(sizes.num_experts, sizes.inter, sizes.hidden)
    w3, w3_scale = draw.fp4_experts(sizes.num_experts, sizes.inter, sizes.hidden)
    w2, w2_scale = draw.fp4_experts(sizes.num_experts, sizes.hidden, sizes.inter)
    rest = (w1, w1_scale, w3, w3_scale, w2, w2_scale, 0, SWIGLU_LIMIT, True)

    def call() -> Tensor:
        return routed_experts(x, ids, weights, *rest)

    def check(output: Output) -> str:
        rows = sample_rows(sizes.num_rows, 8, device)
        want = routed_experts_reference(x[rows], ids[rows], weights[rows], *rest)
        return require_close("y", one(output)[rows], want, EXPERT_LIMIT)

    # Experts nobody chose are not read.
    used = ids.unique().numel() / sizes.num_experts
    read = sum(t.nbytes for t in (w1, w1_scale, w3, w3_scale, w2, w2_scale))
    pairs = float(ids.numel())
    return Run(
        call=call,
        check=check,
        flops=3.0 * 2.0 * pairs * sizes.hidden * sizes.inter,
        num_bytes=used * read + x.nbytes + 4.0 * x.numel(),
        peers={GROUPED: partial(_grouped_peer, sizes, x, ids)},
    )


def _grouped_peer(sizes: Sizes, x: Tensor, ids: Tensor) -> Call:
    """Up, gate and down as grouped GEMMs over rows that lie sorted by expert already.

    All three read one buffer of BF16 weights (9 GB): it is far larger than the L2, so that takes as
    long as three buffers.
    """
    experts = ids.flatten().long()
    order = experts.argsort(stable=True)
    sorted_x = x[order // sizes.top_k]
    ends = torch.bincount(experts, minlength=sizes.num_experts).cumsum(0).int()
    weight = torch.empty(
        sizes.num_experts, sizes.inter, sizes.hidden, dtype=torch.bfloat16, device=x.device
    )
    for expert in weight:
        expert.normal_(std=0.02)
    up = weight.transpose(1, 2)
    down = weight.view(sizes.num_experts, sizes.hidden, sizes.inter).transpose(1, 2)
    hidden = torch.randn(sorted_x.shape[0], sizes.inter, device=x.device, dtype=torch.bfloat16)
    product = _grouped_mm()

    def run() -> object:
        return product(sorted_x, up, ends), product(sorted_x, up, ends), product(hidden, down, ends)

    return run


def _grouped_mm() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``(rows, weights (experts, in, out), ends)``, public since torch 2.10."""
    public: Any = getattr(torch.nn.functional, "grouped_mm", None)
    function: Any = public or getattr(torch, "_grouped_mm", None)
    return lambda rows, weights, ends: function(rows, weights, offs=ends)


def make_route(num_rows: int, num_experts: int, top_k: int, device: str) -> Run:
    """Build a case of ``route``."""
    draw = Draw.on(device)
    logits = draw.normal(num_rows, num_experts)
    bias = draw.normal(num_experts, std=0.1)

    def call() -> tuple[Tensor, Tensor]:
        return route(logits, bias, top_k, SCALING)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 256, device)
        ids, weights = (tensor[rows] for tensor in several(output))
        want_ids, want_weights = route_reference(logits[rows], bias, top_k, SCALING)
        require_equal("ids", ids, want_ids)
        # Square root, sum and quotient in FP32.
        return require_close("weights", weights, want_weights, 1e-6)

    num_bytes = logits.nbytes + num_rows * top_k * 8.0
    return Run(
        call=call, check=check, flops=0.0, num_bytes=num_bytes, peers=copy_peer(num_bytes, device)
    )


def make_swiglu(num_rows: int, dim: int, device: str) -> Run:
    """Build a case of ``swiglu``, as the shared expert calls it."""
    draw = Draw.on(device)
    gate, up = (draw.normal(num_rows, dim, std=3.0).bfloat16() for _ in range(2))

    def call() -> Tensor:
        return swiglu(gate, up, SWIGLU_LIMIT)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 256, device)
        want = swiglu_reference(gate[rows], up[rows], SWIGLU_LIMIT)
        return require_close("y", one(output)[rows], want, ROUNDING_LIMIT)

    num_bytes = 3.0 * gate.nbytes
    return Run(
        call=call, check=check, flops=0.0, num_bytes=num_bytes, peers=copy_peer(num_bytes, device)
    )


def _routed(sizes: Sizes, *, target: bool) -> BenchCase:
    return BenchCase(
        op="experts",
        shape=f"routed_experts T={sizes.num_rows} {sizes.num_experts} experts top-{sizes.top_k}",
        make=partial(make_routed, sizes),
        peers=(
            Peer(
                name=GROUPED,
                target="<= 1.5x" if target else "",
                max_ratio=1.5 if target else None,
            ),
        ),
        quick=target,
    )


def cases(tiny: bool = False) -> list[BenchCase]:
    """A chunk and a decode batch through all experts; router; shared expert's activation."""
    small = Sizes(num_rows=8, num_experts=4, hidden=64, inter=32, top_k=2)
    layers = (small,) if tiny else (Sizes(num_rows=4096), Sizes(num_rows=64))
    base = small if tiny else Sizes(num_rows=4096)
    found = [_routed(sizes, target=sizes.num_rows == 4096) for sizes in layers]
    found.append(
        BenchCase(
            op="experts",
            shape=f"route T={base.num_rows} {base.num_experts} experts top-{base.top_k}",
            make=partial(make_route, base.num_rows, base.num_experts, base.top_k),
            peers=(COPY,),
        )
    )
    found.append(
        BenchCase(
            op="experts",
            shape=f"swiglu {base.num_rows}x{base.inter}",
            make=partial(make_swiglu, base.num_rows, base.inter),
            peers=(COPY,),
        )
    )
    return found
