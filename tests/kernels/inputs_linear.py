"""Arguments of the linear layers: random rows and weights, and the projections of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from pcpkit.formats import e4m3_encode, fp8_block_dequantize


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Sizes of one projection: ``groups`` diagonal blocks, ``parts`` ordered partial sums."""

    out_features: int
    in_features: int
    groups: int = 1
    parts: int = 1
    fp8: bool = True
    quantize: bool = True
    fp32_out: bool = False


PROJECTIONS: Final = {
    "wq_a": Projection(out_features=1280, in_features=5120),
    "wq_b tp1": Projection(out_features=32768, in_features=1280),
    "wq_b tp2": Projection(out_features=16384, in_features=1280),
    "wq_b tp4": Projection(out_features=8192, in_features=1280),
    "wkv": Projection(out_features=512, in_features=5120),
    "wo_a": Projection(out_features=8192, in_features=4096, groups=8, quantize=False),
    "wo_b": Projection(out_features=5120, in_features=8192, parts=8),
    "shared w1": Projection(out_features=2304, in_features=5120),
    "shared w2": Projection(out_features=5120, in_features=2304),
    "compressor": Projection(out_features=512, in_features=5120, fp8=False, fp32_out=True),
    "router": Projection(out_features=384, in_features=5120, fp8=False, fp32_out=True),
    "head": Projection(out_features=129280, in_features=5120, fp8=False, fp32_out=True),
}
"""The model's linear layers on one rank (TP 1 unless named)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearInputs:
    """``x`` [rows, in] and an FP8 weight with its scales, or a BF16 weight (``scale`` None)."""

    x: Tensor
    weight: Tensor
    scale: Tensor | None

    def rows(self, chosen: Tensor) -> LinearInputs:
        """The same weight with these rows only, in this order."""
        return replace(self, x=self.x[chosen])

    def to(self, device: str) -> LinearInputs:
        scale = None if self.scale is None else self.scale.to(device)
        return LinearInputs(x=self.x.to(device), weight=self.weight.to(device), scale=scale)

    @property
    def fp8(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self.scale is not None, "a BF16 weight"
        return self.x, self.weight, self.scale

    @property
    def dense(self) -> Tensor:
        """The weight as FP32; exact in BF16, so also what a BF16 peer multiplies."""
        if self.scale is None:
            return self.weight.float()
        return fp8_block_dequantize(self.weight, self.scale)


def draw_linear(
    num_rows: int,
    out_features: int,
    in_features: int,
    *,
    fp8: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> LinearInputs:
    """Normal rows, each of another magnitude; weights of about 0.02 with scales of three sizes."""
    generator = torch.Generator(device).manual_seed(seed)
    kw: dict[str, Any] = {"generator": generator, "device": device}
    x = torch.randn(num_rows, in_features, **kw)
    x *= torch.exp2(torch.randint(-4, 5, (num_rows, 1), **kw).float())
    if not fp8:
        weight = (torch.randn(out_features, in_features, **kw) * 0.02).bfloat16()
        return LinearInputs(x=x.bfloat16(), weight=weight, scale=None)
    # In slices: the FP32 numbers of a large weight need not exist at once.
    chunks = [
        e4m3_encode(torch.randn(min(4096, rest), in_features, **kw) * 100)
        for rest in range(out_features, 0, -4096)
    ]
    shape = (-(-out_features // 32), in_features // 32)
    scale = torch.randint(114, 117, shape, **kw).to(torch.uint8)
    return LinearInputs(x=x.bfloat16(), weight=torch.cat(chunks), scale=scale)


def bench_inputs(name: str, num_rows: int = 4096, device: str = "cuda") -> LinearInputs:
    """Inputs of one of ``PROJECTIONS``; with groups, ``x`` is ``(num_rows, groups, in_features)``.

    Peer: ``torch.mm(x, dense.bfloat16().t())`` (``torch.bmm`` a group), output in BF16.
    """
    sizes = PROJECTIONS[name]
    inputs = draw_linear(
        num_rows * sizes.groups,
        sizes.out_features,
        sizes.in_features,
        fp8=sizes.fp8,
        device=device,
    )
    if sizes.groups == 1:
        return inputs
    return replace(inputs, x=inputs.x.view(num_rows, sizes.groups, sizes.in_features))
