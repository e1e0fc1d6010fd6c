"""Random inputs that look like the model's: normal latents, quantized weights, permuted pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pcpkit.config import RopeScaling
from pcpkit.formats import (
    RECORD_FORMATS,
    e4m3_encode,
    e8m0_encode,
    pow2ceil,
    quantize_mxfp4,
)
from pcpkit.model.rope import inverse_frequencies

HIDDEN = 5120
EPS = 1e-20
"""``rms_norm_eps`` of the release."""

_YARN = RopeScaling(
    factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """A seeded source of tensors on one device."""

    device: str
    generator: torch.Generator

    @classmethod
    def on(cls, device: str, seed: int = 0) -> Draw:
        """A source with a seed of its own."""
        return cls(device=device, generator=torch.Generator(device).manual_seed(seed))

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        """FP32, standard deviation ``std``."""
        return torch.randn(shape, generator=self.generator, device=self.device) * std

    def activations(self, *shape: int) -> Tensor:
        """BF16 rows as an RMSNorm leaves them."""
        return self.normal(*shape).bfloat16()

    def latents(self, num_rows: int, dim: int) -> Tensor:
        """BF16 rows whose sizes differ, so that scales do."""
        size = 0.5 + torch.rand(num_rows, 1, generator=self.generator, device=self.device)
        return (self.normal(num_rows, dim) * size).bfloat16()

    def norm_weight(self, *shape: int) -> Tensor:
        """BF16 weights of an RMSNorm: around 1."""
        return (1 + self.normal(*shape, std=0.1)).bfloat16()

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Uniform in ``[low, high)``."""
        return torch.randint(
            low, high, shape, generator=self.generator, device=self.device, dtype=dtype
        )

    def permutation(self, count: int) -> Tensor:
        """int64."""
        return torch.randperm(count, generator=self.generator, device=self.device)

    def fp8_weight(self, num_out: int, num_in: int) -> tuple[Tensor, Tensor]:
        """E4M3 bytes ``(num_out, num_in)`` and E8M0 bytes of the 32 x 32 blocks; sizes in 32s."""
        dense = self.normal(num_out, num_in, std=0.02)
        blocks = dense.view(num_out // 32, 32, num_in // 32, 32)
        scale = pow2ceil(blocks.abs().amax((1, 3)) / 448.0)
        codes = e4m3_encode(blocks / scale[:, None, :, None])
        return codes.view(num_out, num_in), e8m0_encode(scale)

    def fp4_experts(self, num_experts: int, num_out: int, num_in: int) -> tuple[Tensor, Tensor]:
        """Packed E2M1 ``(experts, num_out, num_in / 2)`` and E8M0 bytes a row and 32 channels.

        Four experts are drawn; the others are those with their rows rotated.
        """
        drawn = min(4, num_experts)
        packed, scale = quantize_mxfp4(self.normal(drawn, num_out, num_in, std=0.02))
        codes = torch.empty(num_experts, *packed.shape[1:], dtype=torch.uint8, device=self.device)
        scales = torch.empty(num_experts, *scale.shape[1:], dtype=torch.uint8, device=self.device)
        for expert in range(num_experts):
            codes[expert] = packed[expert % drawn].roll(expert, 0)
            scales[expert] = scale[expert % drawn].roll(expert, 0)
        return codes, scales

    def paged(self, rows: Tensor, record: str, rows_per_page: int) -> tuple[Tensor, Tensor]:
        """Rows as records in shuffled pages.

        Args:
            rows: ``(num_rows, dim)`` bf16, row ``i`` of position ``i``.
            record: name of the record format.
            rows_per_page: divides the number of rows.

        Returns:
            ``cache (num_pages, rows_per_page, record_bytes)`` uint8, with two more pages that
            decode to NaN, and ``pages (num_rows / rows_per_page,)`` int32.
        """
        records = RECORD_FORMATS[record].encode(rows)
        num_pages = rows.shape[0] // rows_per_page
        pages = self.permutation(num_pages + 2)[:num_pages]
        cache = records.new_full((num_pages + 2, rows_per_page, records.shape[1]), 0xFF)
        cache[pages] = records.view(num_pages, rows_per_page, -1)
        return cache, pages.int()

    def selection(self, num_rows: int, num_positions: int, count: int) -> Tensor:
        """``(num_rows, count)`` int32 positions, ascending and distinct in a row.

        The peers' keys: uniform, other ones for every row.
        """
        base = self.permutation(num_positions)[:count]
        shift = self.integers(0, num_positions, num_rows, 1, dtype=torch.int64)
        return ((base + shift) % num_positions).sort(dim=1).values.int()


def rope_angles(num_positions: int, rope_dim: int, device: str) -> Tensor:
    """``(num_positions, rope_dim)`` fp32, the table of layers with compressed KV."""
    frequency = inverse_frequencies(rope_dim, 160000.0, _YARN)
    angle = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency).double()
    return torch.cat([angle.cos(), angle.sin()], dim=1).float().to(device)


def short(number: int) -> str:
    """``32768`` as ``32k``."""
    return f"{number // 1024}k" if number >= 8192 and number % 1024 == 0 else str(number)
