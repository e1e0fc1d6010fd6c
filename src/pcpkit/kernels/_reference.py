"""Arithmetic of the torch references: wide inside, rounded once where the specification rounds.

The model's rows must not depend on the batch they sit in, so no reference may use an operation
whose summation order depends on a shape or a thread count. The operands of every product here
carry at most 24 significant bits, so a float64 product is exact and a float64 sum is exact or wrong
only near its 53rd bit; rounding it to FP32 then gives the same bits for every order. Matrix
products run in fixed row tiles as well, so the same BLAS kernel sees every row.
See docs/decisions/0001 and docs/numerics.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW_TILE = 32
"""Rows of one matrix product; the last tile is padded with zero rows."""


def matmul_f64(x: Tensor, weight: Tensor) -> Tensor:
    """``x [n, k] @ weight [m, k].T`` in float64, in tiles of ``ROW_TILE`` rows; returns FP32."""
    num_rows, inner = x.shape
    padded = -(-num_rows // ROW_TILE) * ROW_TILE
    rows = torch.zeros(padded, inner, dtype=torch.float64, device=x.device)
    rows[:num_rows] = x
    wide = weight.double().t()
    out = torch.empty(padded, weight.shape[0], dtype=torch.float64, device=x.device)
    for start in range(0, padded, ROW_TILE):
        tile = slice(start, start + ROW_TILE)
        torch.mm(rows[tile], wide, out=out[tile])
    return out[:num_rows].float()


def mean_square(x: Tensor) -> Tensor:
    """Mean of squares over the last dim, FP32 ``[..., 1]``."""
    return x.double().square().mean(-1, keepdim=True).float()


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` over the last dim with IEEE FP32 square root and division.

    torch's own FP32 square root is not always correctly rounded on the CPU; float64's, rounded, is.
    """
    return 1.0 / torch.sqrt((mean_square(x) + eps).double()).float()


def exp(x: Tensor) -> Tensor:
    """FP32 ``exp`` rounded once from float64."""
    return x.double().exp().float()


def sigmoid(x: Tensor) -> Tensor:
    """FP32 logistic function rounded once from float64."""
    return x.double().sigmoid().float()


def silu(x: Tensor) -> Tensor:
    """FP32 ``x * sigmoid(x)`` rounded once from float64."""
    wide = x.double()
    return (wide * wide.sigmoid()).float()


def ordered_sum(x: Tensor, dim: int) -> Tensor:
    """FP32 sum over ``dim`` in ascending index order, each step rounded to FP32."""
    total = x.select(dim, 0).clone()
    for index in range(1, x.shape[dim]):
        total += x.select(dim, index)
    return total
