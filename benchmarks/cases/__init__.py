"""Benchmark cases, one module a kernel file; the ones with a target of the project come first."""

from __future__ import annotations

from importlib import import_module

from benchmarks.case import BenchCase

OPS = (
    "sparse_mla",
    "cache_write",
    "compressor",
    "slot_gather",
    "indexer",
    "topk",
    "linear",
    "experts",
    "norm",
    "rope",
    "hyper_connection",
    "engram",
)


def cases_of(op: str, *, tiny: bool) -> list[BenchCase]:
    """The cases of one of ``OPS``; ``tiny`` ones run on a CPU in milliseconds.

    The module is imported here, so that an op whose file does not import costs its own rows only.
    """
    return import_module(f"{__name__}.{op}").cases(tiny)
