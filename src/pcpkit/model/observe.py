"""A window into the forward: a callable that is shown intermediate tensors by name.

For debugging and for comparing with golden vectors. The forward never reads anything back from it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Observer = Callable[[str, Tensor], None]


def ignore(name: str, tensor: Tensor) -> None:
    """The observer that looks at nothing."""


def prefixed(observe: Observer, prefix: str) -> Observer:
    """An observer that puts ``prefix`` and a dot before every name."""
    if observe is ignore:
        return ignore
    return lambda name, tensor: observe(f"{prefix}.{name}", tensor)
