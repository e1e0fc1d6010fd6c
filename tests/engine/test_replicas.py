"""Comparing what ranks hold: every kind of difference, named alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from pcpkit.config import ParallelConfig
from pcpkit.engine import RequestOutput, compare_replicas
from pcpkit.parallel.groups import Groups, SingleRank
from pcpkit.parallel.virtual import run_virtual_ranks

from .small_model import request


def _cache() -> dict[str, Tensor]:
    return {"window.0": torch.arange(6, dtype=torch.uint8).view(2, 3), "ring.1": torch.zeros(4)}


def _output() -> RequestOutput:
    return RequestOutput(
        request=request("r", (3, 4)),
        token_ids=(5, 6),
        finish_reason="length",
        logits=torch.zeros(2, 3),
        ttft_s=1.0,
        decode_s=1.0,
    )


@dataclass
class Held:
    """What one rank has; stands in for its recorder."""

    output: RequestOutput = field(default_factory=_output)
    tensors: dict[str, Tensor] = field(default_factory=_cache)

    def cache_bytes(self, request_id: str) -> dict[str, Tensor]:
        assert request_id == "r"
        return self.tensors


def _compare(spoil: Callable[[Held], None]) -> list[list[str]]:
    def body(rank: int, groups: Groups) -> list[str]:
        held = Held()
        if rank == 1:
            spoil(held)
        return compare_replicas(groups.pcp, [held.output], held)  # pyright: ignore[reportArgumentType]

    return run_virtual_ranks(ParallelConfig(pcp_size=3), body)


def _flip(held: Held) -> None:
    held.tensors["window.0"][1, 2] ^= 1


def _lose(held: Held) -> None:
    del held.tensors["ring.1"]


def _token(held: Held) -> None:
    held.output = replace(held.output, token_ids=(5, 7))


def _negative_zero(held: Held) -> None:
    assert held.output.logits is not None
    held.output.logits[0, 0] = -0.0


@pytest.mark.parametrize(
    ("spoil", "name"),
    [(_flip, "window.0"), (_lose, "ring.1"), (_token, "tokens"), (_negative_zero, "logits")],
)
def test_a_difference_is_named_on_every_rank(spoil: Callable[[Held], None], name: str) -> None:
    assert _compare(spoil) == [[f"rank 1, request r: {name} differs from rank 0"]] * 3


def _nothing(held: Held) -> None:
    """Times differ between ranks, and do not count."""
    held.output = replace(held.output, ttft_s=2.0)


def test_equal_ranks_have_no_difference() -> None:
    assert _compare(_nothing) == [[]] * 3


def test_one_rank_is_like_itself() -> None:
    held = Held()
    group = SingleRank("world")
    assert compare_replicas(group, [held.output], held) == []  # pyright: ignore[reportArgumentType]
