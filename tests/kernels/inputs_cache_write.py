"""Rows for the cache writers and the rotary embedding, realistic ones for benchmarks included."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pcpkit.formats import RECORD_FORMATS

REAL_DIMS = {"mxfp8": 512, "nvfp4": 512, "mxfp4": 128}
"""Channels of each record in the released model: 528, 288 and 68 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowInputs:
    """Arguments of ``cache_write`` but for the cache."""

    latents: Tensor
    positions: Tensor
    cos_sin: Tensor
    slots: Tensor
    record: str

    @property
    def encode(self) -> tuple[Tensor, Tensor, Tensor, str]:
        """Arguments of ``encode_records``."""
        return self.latents, self.positions, self.cos_sin, self.record

    def write(self, cache: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, str]:
        """Arguments of ``cache_write``."""
        return self.latents, self.positions, self.cos_sin, self.slots, cache, self.record

    @property
    def record_bytes(self) -> int:
        return RECORD_FORMATS[self.record].record_bytes(self.latents.shape[1])

    def to(self, device: str) -> RowInputs:
        """The same on another device; strides are not kept."""
        names = ("latents", "positions", "cos_sin", "slots")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def rows(self, chosen: Tensor) -> RowInputs:
        """The same with these rows only."""
        return replace(
            self,
            latents=self.latents[chosen],
            positions=self.positions[chosen],
            slots=self.slots[chosen],
        )


def rope_table(num_positions: int, rope_dim: int) -> Tensor:
    """Cosines and sines ``(num_positions, rope_dim)`` at plausible frequencies."""
    pairs = torch.arange(rope_dim // 2)
    frequency = 10000.0 ** (-2.0 * pairs / max(rope_dim, 1))
    angle = torch.arange(num_positions)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()


def hostile_latents(num_rows: int, dim: int, seed: int) -> Tensor:
    """Latents of every magnitude: normal ones, raw bit patterns (NaN, inf, subnormal), +-0."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-8, 4, num_rows)[torch.randperm(num_rows, generator=generator)]
    normal = (torch.randn(num_rows, dim, generator=generator) * scale[:, None]).bfloat16()
    raw = torch.randint(-(2**15), 2**15, (num_rows, dim), generator=generator)
    # Most rows keep most of their groups finite.
    wild = torch.rand(num_rows, dim, generator=generator) < 0.004
    latents = torch.where(wild, raw.short().view(torch.bfloat16), normal)
    latents[::5] = torch.where(torch.arange(dim) % 2 == 0, 0.0, -0.0).bfloat16()
    return latents


def draw_rows(
    record: str, num_rows: int, dim: int, rope_dim: int, num_slots: int, seed: int
) -> RowInputs:
    """Hostile rows, positions and slots; some of both are -1 or out of range."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_slots + 8, generator=generator) - 4
    return RowInputs(
        latents=hostile_latents(num_rows, dim, seed),
        positions=torch.randint(-1, 41, (num_rows,), generator=generator),
        cos_sin=rope_table(40, rope_dim),
        slots=slots[:num_rows],
        record=record,
    )


def bench_inputs(num_rows: int, record: str, device: str, seed: int = 0) -> RowInputs:
    """A step of ``num_rows`` consecutive tokens whose slots fill pages in a random order."""
    generator = torch.Generator().manual_seed(seed)
    page = 64
    num_pages = -(-num_rows // page)
    pages = torch.randperm(2 * num_pages, generator=generator)[:num_pages]
    slots = (pages[:, None] * page + torch.arange(page)).flatten()[:num_rows]
    inputs = RowInputs(
        latents=torch.randn(num_rows, REAL_DIMS[record], generator=generator).bfloat16(),
        positions=torch.arange(num_rows) + 1000,
        cos_sin=rope_table(num_rows + 1000, 64),
        slots=slots,
        record=record,
    )
    return inputs.to(device)


def bench_cache(inputs: RowInputs, device: str) -> Tensor:
    """Zero pages of 64 records that hold every slot of ``bench_inputs``."""
    num_pages = 2 * -(-inputs.latents.shape[0] // 64)
    return torch.zeros(num_pages, 64, inputs.record_bytes, dtype=torch.uint8, device=device)
