"""Arguments of routing and routed experts: random rows, ids and FP4 weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from pcpkit.formats import fp4_row_dequantize

LIMIT: Final = 10.0
"""SwiGLU clamp of the released configuration."""


ExpertArguments = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, float, bool
]
"""Positional arguments of ``routed_experts``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertInputs:
    """One call of ``routed_experts``; every stack is (packed weights, scales)."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w1: tuple[Tensor, Tensor]
    w3: tuple[Tensor, Tensor]
    w2: tuple[Tensor, Tensor]
    first_expert: int = 0
    quantize: bool = True
    limit: float = LIMIT

    @property
    def args(self) -> ExpertArguments:
        rows = (self.x, self.ids, self.weights)
        return (*rows, *self.w1, *self.w3, *self.w2, self.first_expert, self.limit, self.quantize)

    def rows(self, chosen: Tensor) -> ExpertInputs:
        """The same experts with these rows only, in this order."""
        return replace(self, x=self.x[chosen], ids=self.ids[chosen], weights=self.weights[chosen])

    def to(self, device: str) -> ExpertInputs:
        def move(stack: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return stack[0].to(device), stack[1].to(device)

        return replace(
            self,
            x=self.x.to(device),
            ids=self.ids.to(device),
            weights=self.weights.to(device),
            w1=move(self.w1),
            w3=move(self.w3),
            w2=move(self.w2),
        )

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """W1, W3, W2 as BF16 ``(experts, out, in)``: what a ``grouped_mm`` peer multiplies."""
        w1, w3, w2 = (
            torch.stack([fp4_row_dequantize(w, s).bfloat16() for w, s in zip(*stack, strict=True)])
            for stack in (self.w1, self.w3, self.w2)
        )
        return w1, w3, w2


def draw_experts(
    num_rows: int,
    *,
    num_experts: int = 6,
    num_local: int | None = None,
    first_expert: int = 0,
    top_k: int = 3,
    hidden: int = 128,
    inter: int = 96,
    quantize: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> ExpertInputs:
    """Distinct uniform ids among ``num_experts``, of which ``num_local`` from ``first_expert`` on
    are local; weights of about 0.02, all codes of E2M1, scales of three sizes."""
    generator = torch.Generator(device).manual_seed(seed)
    kw: dict[str, Any] = {"generator": generator, "device": device}
    local = num_experts if num_local is None else num_local

    def stack(out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
        shape = (local, out_features, in_features // 2)
        codes = torch.empty(shape, dtype=torch.uint8, device=device).random_(generator=generator)
        shape = (local, out_features, in_features // 32)
        scale = torch.empty(shape, dtype=torch.uint8, device=device)
        return codes, scale.random_(118, 121, generator=generator)

    ids = torch.rand(num_rows, num_experts, **kw).topk(top_k, dim=1).indices.sort(dim=1).values
    return ExpertInputs(
        x=torch.randn(num_rows, hidden, **kw).bfloat16(),
        ids=ids.int(),
        weights=torch.rand(num_rows, top_k, **kw) + 0.1,
        w1=stack(inter, hidden),
        w3=stack(inter, hidden),
        w2=stack(hidden, inter),
        first_expert=first_expert,
        quantize=quantize,
    )


def bench_inputs(num_rows: int = 4096, device: str = "cuda", num_local: int = 384) -> ExpertInputs:
    """The released layer: 384 experts, top-6, 5120 x 2304; ``num_local`` of them on this rank.

    Peer at ``num_local`` = 384: rows gathered and sorted by expert beforehand, then three
    ``torch._grouped_mm`` (W1, W3, W2) over ``dense()`` with the offsets of the experts.
    """
    return draw_experts(
        num_rows,
        num_experts=384,
        num_local=num_local,
        top_k=6,
        hidden=5120,
        inter=2304,
        device=device,
    )


def draw_logits(
    num_rows: int, num_experts: int = 384, *, seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Router logits and bias."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(num_rows, num_experts, generator=generator, device=device) * 2
    return logits, torch.randn(num_experts, generator=generator, device=device) * 0.1
