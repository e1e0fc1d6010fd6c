"""Prefill context parallelism for DeepSeek-V4.1-Flash.

The names below are the ones most programs need; everything else is imported from its module, e.g.
`from pcpkit.kernels.topk import topk`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pcpkit.config import CacheConfig, ModelConfig, ParallelConfig
    from pcpkit.engine import (
        Engine,
        EngineConfig,
        Request,
        RequestOutput,
        SamplingParams,
        load_model,
        open_checkpoint,
    )

try:
    __version__ = version("pcpkit")
except PackageNotFoundError:  # a checkout on the path that was never installed
    __version__ = "0+uninstalled"

__all__ = [
    "CacheConfig",
    "Engine",
    "EngineConfig",
    "ModelConfig",
    "ParallelConfig",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "load_model",
    "open_checkpoint",
]

_CONFIGS = ("CacheConfig", "ModelConfig", "ParallelConfig")


def __getattr__(name: str) -> object:
    """Import a public name on first use.

    Importing one module of pcpkit must not import all of them, and `python -m pcpkit.model.tiny`
    must not find itself imported already.
    """
    if name not in __all__:
        raise AttributeError(f"module 'pcpkit' has no attribute {name!r}")
    return getattr(import_module("pcpkit.config" if name in _CONFIGS else "pcpkit.engine"), name)
