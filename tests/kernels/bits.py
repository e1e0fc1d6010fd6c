"""Comparison by bits, the two modes a kernel test runs in, and hostile memory around tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

MODES = [pytest.param("cpu", id="interpreted"), pytest.param("cuda", marks=pytest.mark.gpu)]
"""Devices of a test body: the kernel runs interpreted on the CPU, compiled on CUDA."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The tensor's bytes as integers of the same width."""
    return x.contiguous().view(_INTEGERS[x.element_size()])


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Same shape, dtype and bits, on any devices; all NaNs of a float tensor count as one value."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    got, want = got.cpu(), want.cpu()
    if not got.is_floating_point():
        return torch.equal(got, want)
    return torch.equal(got.isnan(), want.isnan()) and bool(
        ((bits(got) == bits(want)) | got.isnan()).all()
    )


def spaced(x: Tensor, gap: int = 3) -> Tensor:
    """A copy of ``x`` [..., n, d] as a view whose rows and blocks lie apart; NaN or -1 between."""
    poison = float("nan") if x.is_floating_point() else 255 if x.dtype == torch.uint8 else -1
    shape = [size + gap for size in x.shape]
    view = torch.full(shape, poison, dtype=x.dtype, device=x.device)[
        tuple(slice(1, 1 + size) for size in x.shape)
    ]
    view.copy_(x)
    return view


def base_of(view: Tensor) -> Tensor:
    """The whole buffer behind a view of :func:`spaced`."""
    base = view._base
    assert base is not None, "expected a view"
    return base


def differing(got: Tensor, want: Tensor) -> tuple[float, int]:
    """Fraction of BF16 elements whose bits differ, and the largest difference in units of bits.

    For results behind float64 arithmetic whose last bit depends on the library or the order: such a
    bit seldom moves a BF16 rounding, and then by one. The caller states how seldom.
    """
    ours, theirs = bits(got.cpu()).int(), bits(want.cpu()).int()
    gap = (ours - theirs).abs()
    return float((gap != 0).double().mean()), int(gap.max())
