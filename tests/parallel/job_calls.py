"""What the ranks of a pool do with their job as a whole: functions a spawned process can import."""

from __future__ import annotations

from unittest.mock import patch

import torch

from pcpkit.config import ParallelConfig
from pcpkit.parallel import collectives
from pcpkit.parallel.groups import Groups


def world_of(rank: int, groups: Groups) -> tuple[str, int, int, list[int], bool]:
    """Name, rank, size and an exchange of the world group, whatever sizes are wanted."""
    world = collectives.join_job(ParallelConfig(tp_size=5, pcp_size=7))
    everyone = world.all_gather(torch.tensor([rank])).flatten().tolist()
    return world.name, world.rank, world.size, everyone, collectives.in_job()


def world_over_gloo(rank: int, groups: Groups) -> list[int]:
    """The world group of a job that somebody else joined over NCCL."""

    def backend(group: object = None) -> str:
        return "nccl" if group is None else "gloo"

    with patch.object(collectives.dist, "get_backend", backend):
        world = collectives.join_job(ParallelConfig(pcp_size=2), deadline_s=10)
    assert world.name == "world"
    return world.all_reduce(torch.tensor([rank + 1])).tolist()


def refused_devices(rank: int, groups: Groups) -> list[str]:
    """What a model on CUDA is told by groups over gloo; the CPU is fine."""
    collectives.check_backend(groups, torch.device("cpu"))
    try:
        collectives.check_backend(groups, torch.device("cuda", 0))
    except ValueError as error:
        return [str(error)]
    return []


def number_on_host(rank: int, groups: Groups) -> int:
    return collectives.host_rank()
