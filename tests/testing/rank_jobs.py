"""What the ranks of a pool run in the tests: functions that a spawned process can import."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor

from pcpkit.config import ParallelConfig
from pcpkit.parallel.collectives import start_process_groups, world_rank
from pcpkit.parallel.groups import Groups


def places(rank: int, groups: Groups) -> tuple[int, int, int, int]:
    """World rank and the rank in each group."""
    return rank, groups.tp.rank, groups.pcp.rank, groups.ep.rank


def gathered(rank: int, groups: Groups, scale: int) -> Tensor:
    return groups.pcp.all_gather(torch.full((2,), rank * scale))


def process_id(rank: int, groups: Groups) -> int:
    return os.getpid()


def raise_alike(rank: int, groups: Groups) -> None:
    raise LookupError(f"rank {rank} does not find it")


def one_raises(rank: int, groups: Groups) -> None:
    if rank == 1:
        raise LookupError("only rank 1")
    groups.pcp.all_gather(torch.zeros(1))


def one_dies(rank: int, groups: Groups) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    everyone = max((groups.tp, groups.pcp, groups.ep), key=lambda group: group.size)
    for _ in range(100_000):
        everyone.all_reduce(torch.zeros(8))


def one_sleeps(rank: int, groups: Groups) -> None:
    if rank == 1:
        sleep_here()


def sleep_here() -> None:
    time.sleep(60)


def returns_a_function(rank: int, groups: Groups) -> object:
    return lambda: rank


def fails_like_pytest(rank: int, groups: Groups) -> None:
    raise SystemExit(3)


def example_function(rank: int, groups: Groups, code: str, name: str, *arguments: Any) -> Any:
    """A function of a piece of code, by name."""
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(code, namespace)
    return namespace[name](rank, groups, *arguments)


def strided(tensor: Tensor) -> Tensor:
    """The same values with other strides."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def every_call(
    rank: int, groups: Groups, name: str, inputs: Tensor, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """All-gather, all-reduce and reduce-scatter of one group, from ``inputs`` by world rank."""
    group = {"tp": groups.tp, "pcp": groups.pcp, "ep": groups.ep}[name]
    mine = strided(inputs[rank].to(device))
    parts = torch.stack([mine * (part + 1) for part in range(group.size)]).flip(0)
    found = group.all_gather(mine), group.all_reduce(mine), group.reduce_scatter(strided(parts))
    assert torch.equal(mine.cpu(), inputs[rank]), "an input was changed"
    gathered, total, part = (tensor.cpu() for tensor in found)
    return gathered, total, part


def join_a_larger_world(rank: int, groups: Groups) -> str:
    """What a rank is told whose sizes are not those of its job."""
    try:
        start_process_groups(ParallelConfig(tp_size=3, pcp_size=5), "cpu")
    except ValueError as error:
        return str(error)
    return "no error"


def job_place(rank: int, groups: Groups) -> tuple[int, int]:
    return world_rank()
