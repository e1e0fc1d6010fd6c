"""Residual streams and mHC coefficients, realistic ones for benchmarks included."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

EPS = 1e-20
HC_EPS = 1e-6
ITERATIONS = 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamInputs:
    """Arguments of every function of ``hyper_connection``."""

    streams: Tensor
    output: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor
    weight: Tensor
    fn: Tensor
    base: Tensor
    scale: Tensor

    @property
    def collapse(self) -> tuple[Tensor, Tensor]:
        return self.streams, self.pre

    @property
    def collapse_norm(self) -> tuple[Tensor, Tensor, Tensor, float]:
        return self.streams, self.pre, self.weight, EPS

    @property
    def expand(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.output, self.streams, self.post, self.comb

    @property
    def expand_collapse_norm(
        self,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        return self.output, self.streams, self.post, self.comb, self.pre, self.weight, EPS

    @property
    def mix(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int, float, float]:
        return self.streams, self.fn, self.base, self.scale, ITERATIONS, HC_EPS, EPS

    def to(self, device: str) -> StreamInputs:
        """The same on another device; strides are not kept."""
        names = self.__slots__
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def rows(self, chosen: Tensor) -> StreamInputs:
        """The same with these rows only."""
        names = ("streams", "output", "pre", "post", "comb")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})


def bench_inputs(
    num_rows: int, device: str, dim: int = 5120, count: int = 4, seed: int = 0
) -> StreamInputs:
    """Streams of magnitude one, coefficients as ``hc_mix`` gives them; drawn on the device."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    outputs = count * (2 + count)
    return StreamInputs(
        streams=normal(num_rows, count, dim).bfloat16(),
        output=normal(num_rows, dim).bfloat16(),
        pre=normal(num_rows, count).sigmoid(),
        post=2 * normal(num_rows, count).sigmoid(),
        comb=normal(num_rows, count, count).softmax(2),
        weight=normal(dim).bfloat16(),
        fn=normal(outputs, count * dim) * (2.0 / (count * dim) ** 0.5),
        base=normal(outputs),
        scale=torch.tensor([1.0, 0.5, 1.5], device=device),
    )
