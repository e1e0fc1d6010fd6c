"""Tensors for ``close_groups`` and ``write_ring``, realistic ones for the benchmark included."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

EPS = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompressorInputs:
    """Arguments of both ops of one step."""

    rows: Tensor
    gathered_rows: Tensor
    ring: Tensor
    closing_rows: Tensor
    predecessors: Tensor
    norm_weight: Tensor
    source_rows: Tensor
    ring_slots: Tensor

    @property
    def close(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        """Arguments of ``close_groups``."""
        return (
            self.rows,
            self.gathered_rows,
            self.ring,
            self.closing_rows,
            self.predecessors,
            self.norm_weight,
            EPS,
        )

    @property
    def open(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Arguments of ``write_ring``."""
        return self.rows, self.source_rows, self.ring_slots, self.ring

    def to(self, device: str) -> CompressorInputs:
        """The same on another device; strides are not kept."""
        names = self.__slots__
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def bench_inputs(num_rows: int, device: str, dim: int = 512, seed: int = 0) -> CompressorInputs:
    """A step of two requests of about ``num_rows / 2`` rows, the shape that peers are timed with.

    The first starts at position 100; the second at 301, so its first row closes a group with a ring
    row. What is open at the end is written to the ring.
    """
    generator = torch.Generator().manual_seed(seed)
    first = num_rows // 2 - 1 + (num_rows // 2) % 2
    positions = torch.cat([torch.arange(first) + 100, torch.arange(num_rows - first) + 301])
    blocks = torch.tensor([1, 3])
    odd = (positions % 2 == 1).nonzero()[:, 0]
    predecessors = odd - 1
    predecessors[odd == first] = num_rows + int(blocks[1]) * 8 + 300 % 8
    last = torch.tensor([first - 1, num_rows - 1])
    is_open = positions[last] % 2 == 0
    inputs = CompressorInputs(
        rows=torch.randn(num_rows, 2 * dim, generator=generator),
        gathered_rows=torch.empty(0, 2 * dim),
        ring=torch.randn(4, 8, 2 * dim, generator=generator),
        closing_rows=odd,
        predecessors=predecessors,
        norm_weight=(1 + 0.1 * torch.randn(dim, generator=generator)).bfloat16(),
        source_rows=torch.where(is_open, last, -1),
        ring_slots=torch.where(is_open, blocks * 8 + positions[last] % 8, -1),
    )
    return inputs.to(device)
