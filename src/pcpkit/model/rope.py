"""Rotary tables of the two kinds of layer (model-spec section 0.8).

Window-only layers use ``rope_theta`` plainly. Every layer with compressed KV uses
``compress_rope_theta`` with YaRN on the frequencies only, for its queries, its window KV, its
compressed KV and its index keys alike; there is no attention factor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pcpkit.config import ModelConfig, RopeScaling


def inverse_frequencies(rope_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """``(rope_dim / 2,)`` fp32 frequencies in radians a position.

    Args:
        rope_dim: rotating channels.
        theta: base; the power is taken in FP32.
        scaling: YaRN of compressed layers, or ``None``.
    """
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    frequency = 1.0 / torch.pow(torch.tensor(theta, dtype=torch.float32), exponent)
    if scaling is None:
        return frequency
    low, high = yarn_bounds(rope_dim, theta, scaling)
    pairs = torch.arange(rope_dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / (high - low)).clamp(0, 1)
    return frequency / scaling.factor * ramp + frequency * (1 - ramp)


def yarn_bounds(rope_dim: int, theta: float, scaling: RopeScaling) -> tuple[int, float]:
    """Pair indices between which YaRN interpolates: below ``low`` unchanged, above ``high`` scaled.

    Example:
        The released values give ``(15, 25)``.
    """

    def pair(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return rope_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(scaling.beta_fast)), 0)
    high = min(math.ceil(pair(scaling.beta_slow)), rope_dim - 1)
    # A zero-width ramp would divide by zero; the released code widens it by this much.
    return low, high + 0.001 if low == high else high


def rope_table(config: ModelConfig, *, compressed: bool, num_positions: int) -> Tensor:
    """Cosines then sines of every position, ``(num_positions, qk_rope_head_dim)`` fp32.

    The angle is the FP32 product of position and frequency; its cosine and sine are rounded once.

    Args:
        config: the model.
        compressed: the table of layers with compressed KV, else of window-only layers.
        num_positions: table length in tokens.
    """
    theta = config.compress_rope_theta if compressed else config.rope_theta
    scaling = config.rope_scaling if compressed else None
    frequency = inverse_frequencies(config.qk_rope_head_dim, theta, scaling)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angle = torch.outer(positions, frequency).double()
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()
