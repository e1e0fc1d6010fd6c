"""Registration of pcpkit's operators with torch: the device of the arguments decides what runs.

A CPU tensor runs the torch reference, a CUDA tensor runs the Triton launcher; anything else raises
in torch's dispatcher. There is no switch and no silent fallback. ``define`` + ``impl`` is used
rather than ``custom_op`` (an eighth of the call overhead) or ``triton_op`` (which cannot run under
the interpreter and so cannot be tested without a GPU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("pcpkit", "DEF")


def register_op(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    launch: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define ``pcpkit::<schema>`` and return its bound overload.

    Args:
        schema: torch schema string, mutated arguments marked ``Tensor(a!)``.
        reference: the specification, run for CPU tensors.
        fake: shapes and dtypes only, for tracing.
        launch: the Triton launcher, run for CUDA tensors; ``None`` leaves CUDA unimplemented.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CPU")
    if launch is not None:
        _LIBRARY.impl(name, launch, "CUDA")
    torch.library.register_fake(f"pcpkit::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.pcpkit, name).default


def check_shape(name: str, tensor: torch.Tensor, *expected: int | None, remedy: str) -> None:
    """Raise ``ValueError`` unless ``tensor`` has the expected sizes (``None`` matches any size)."""
    if torch.compiler.is_compiling():
        return
    shape = tuple(tensor.shape)
    if len(shape) != len(expected) or any(
        want is not None and want != got for want, got in zip(expected, shape, strict=True)
    ):
        wanted = "(" + ", ".join("*" if size is None else str(size) for size in expected) + ")"
        raise ValueError(f"{name} expected shape {wanted}, got {shape}; {remedy}")


def check_dtype(name: str, tensor: torch.Tensor, *expected: torch.dtype) -> None:
    """Raise ``ValueError`` unless ``tensor`` has one of the expected dtypes."""
    if torch.compiler.is_compiling():
        return
    if tensor.dtype not in expected:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected)
        got = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{name} expected dtype {wanted}, got {got}; convert it before the call")
