"""Hostile memory: reads outside the rows that are given show up, and so do writes.

Poison is a bit pattern that spoils what is computed from it: NaN in floating-point tensors, 0xFF
in bytes (NaN in every E4M3 code and E8M0 or E4M3 scale of a cache record), a number far out of
range in signed integers (-1 would mean "skip").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcpkit.testing.compare import bits

_FAR_OUT = 0x5A
"""Byte of poisoned signed integers: int32 1,515,870,810, where -1 would hide as "skip"."""


class CanaryError(AssertionError):
    """Memory outside a guarded tensor was written."""


def poison(tensor: Tensor) -> Tensor:
    """Fill a tensor in place, whatever its strides, and return it."""
    return tensor.copy_(_pattern(tensor.dtype, tensor.device))


def poisoned(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """A new tensor full of poison: what ``torch.empty`` may hold at its worst."""
    return poison(torch.empty(shape, dtype=dtype, device=device))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guarded:
    """A tensor inside a larger poisoned buffer."""

    view: Tensor
    """What to pass to the code under test."""
    base: Tensor
    """The whole buffer, margins included."""
    inside: tuple[slice, ...]
    """``base[inside]`` is ``view``."""

    def check(self) -> None:
        """Look at the margins.

        Raises:
            CanaryError: naming the first element outside ``view`` that is not poison any more.
        """
        touched = bits(self.base) != bits(_pattern(self.base.dtype, self.base.device))
        touched[self.inside] = False
        if bool(touched.any()):
            place = tuple(touched.nonzero()[0].tolist())
            lows = [part.start for part in self.inside]
            relative = tuple(index - low for index, low in zip(place, lows, strict=False))
            raise CanaryError(
                f"margins expected poison, got {self.base[place].tolist()} at index "
                f"{[*relative, *place[len(lows) :]]} of the view with shape "
                f"{tuple(self.view.shape)} and {int(touched.sum()) - 1} more; write inside the view"
            )


def guard(tensor: Tensor, *, margin: int = 3, strided: bool = True) -> Guarded:
    """Copy a tensor into a poisoned buffer.

    Args:
        tensor: at least one dimension; not changed.
        margin: poisoned elements on each side of each dimension that has margins.
        strided: margins around every dimension, so that rows lie apart and the view is not
            contiguous; otherwise around the first one only, and the view is contiguous.

    Raises:
        ValueError: ``tensor`` has no dimension, or ``margin`` is negative.

    Example:
        ``guard(torch.zeros(2, 4)).view.stride()`` is ``(10, 1)``; ``.check()`` passes until
        something writes before, behind or between the rows.
    """
    if tensor.dim() == 0 or margin < 0:
        raise ValueError(
            f"tensor expected a dimension and margin >= 0, got shape {tuple(tensor.shape)} and "
            f"margin {margin}; use tensor[None]"
        )
    around = tensor.dim() if strided else 1
    shape = [size + 2 * margin for size in tensor.shape[:around]]
    base = poisoned(*shape, *tensor.shape[around:], dtype=tensor.dtype, device=tensor.device)
    inside = tuple(slice(margin, margin + size) for size in tensor.shape[:around])
    view = base[inside]
    view.copy_(tensor)
    return Guarded(view=view, base=base, inside=inside)


def check_all(guarded: Sequence[Guarded]) -> None:
    """:meth:`Guarded.check` of each.

    Raises:
        CanaryError: from the first whose margins were written.
    """
    for one in guarded:
        one.check()


def _pattern(dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element of poison, without dimensions."""
    if dtype == torch.bool:
        # Any other byte is no bool.
        return torch.ones((), dtype=dtype, device=device)
    signed_integer = not dtype.is_floating_point and not dtype.is_complex and dtype.is_signed
    byte = _FAR_OUT if signed_integer else 0xFF
    size = torch.empty((), dtype=dtype).element_size()
    return torch.full((size,), byte, dtype=torch.uint8, device=device).view(dtype)[0]
