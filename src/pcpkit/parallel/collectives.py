"""The only caller of torch.distributed: process groups as :class:`~pcpkit.parallel.groups.Group`.

Gloo serves CPU tensors, NCCL serves CUDA tensors. The job itself always meets over gloo, so that
ranks can agree on what to do, and on what is wrong, before the model's groups exist. Every wait has
the deadline that the process group was started with; a peer that dies or stays away ends in a
:class:`CollectiveError` that names the group and the call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import get_node_local_rank

from pcpkit.config import ParallelConfig
from pcpkit.parallel.groups import Group, Groups, SingleRank, check_parts, group_members


class CollectiveError(RuntimeError):
    """A collective did not complete: a peer died, or the deadline passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMember:
    """This process's place in a job that torchrun did not start."""

    init_method: str
    """Where the ranks meet: ``"file:///path"`` (a file that is not there yet) or ``"tcp://.."``."""
    rank: int
    world_size: int


class ProcessGroup:
    """A torch.distributed group of more than one rank."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        """Wrap ``group`` under ``name``."""
        self.name = name
        self.rank = group.rank()
        self.size = group.size()
        self._group = group
        self._gloo = dist.get_backend(group) == "gloo"
        self.serves = "cpu" if self._gloo else "cuda"

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See :class:`~pcpkit.parallel.groups.Group`."""
        out = tensor.new_empty(self.size, *tensor.shape)
        source = tensor.contiguous()
        parts = list(out.unbind(0))
        self._run("all_gather", source, lambda: dist.all_gather(parts, source, group=self._group))
        return out

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See :class:`~pcpkit.parallel.groups.Group`."""
        out = tensor.clone(memory_format=torch.contiguous_format)
        self._run("all_reduce", out, lambda: dist.all_reduce(out, group=self._group))
        return out

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """See :class:`~pcpkit.parallel.groups.Group`."""
        check_parts(tensor, self.size)
        if self._gloo:
            # Gloo has no reduce-scatter of every dtype; a CPU run does not care for the bytes.
            return self.all_reduce(tensor)[self.rank]
        out = tensor.new_empty(tensor.shape[1:])
        parts = [part.contiguous() for part in tensor.unbind(0)]
        self._run(
            "reduce_scatter", tensor, lambda: dist.reduce_scatter(out, parts, group=self._group)
        )
        return out

    def _run(self, op: str, tensor: Tensor, call: Callable[[], object]) -> None:
        if tensor.numel() == 0:
            # The same on every rank: the shapes of a call are equal.
            return
        try:
            call()
        except RuntimeError as error:
            raise CollectiveError(
                f"{self.name} {op} of {tuple(tensor.shape)} expected all {self.size} ranks, rank "
                f"{self.rank} got: {_reason(error)}; look at the first rank that failed"
            ) from error


def join_job(
    config: ParallelConfig, *, deadline_s: float = 120.0, member: JobMember | None = None
) -> Group:
    """Join a job, unless this process is in one already; of whatever size it is.

    Args:
        config: the ranks that are wanted, for errors.
        deadline_s: seconds that joining and any collective of the group may wait for its peers.
        member: this process's place in the job, by default the one torchrun gave it.

    Returns:
        The group ``"world"`` of all ranks, for CPU tensors: for what ranks agree on besides the
        model.

    Raises:
        ValueError: nobody started a job.
        CollectiveError: a peer did not join within the deadline.
    """
    timeout = timedelta(seconds=deadline_s)
    if not dist.is_initialized():
        _join(config, timeout, member)
    size = dist.get_world_size()
    if size == 1:
        return SingleRank("world")
    made: object = dist.group.WORLD
    if dist.get_backend() != "gloo":
        # Somebody else joined, over another backend.
        made = _new_group("world", tuple(range(size)), timeout, "gloo")
    assert isinstance(made, dist.ProcessGroup), "every rank is a member of the world"
    return ProcessGroup("world", made)


def check_world_size(config: ParallelConfig, size: int) -> None:
    """Refuse a job of another size.

    Raises:
        ValueError: ``size`` is not ``tp_size * pcp_size``.
    """
    if size != config.world_size:
        raise ValueError(
            f"world size expected tp_size x pcp_size = {config.tp_size} x {config.pcp_size}, got "
            f"{size}; start torchrun with --nproc-per-node {config.world_size}"
        )


def start_process_groups(
    config: ParallelConfig,
    device: torch.device | str,
    *,
    deadline_s: float = 120.0,
    member: JobMember | None = None,
) -> Groups:
    """Join a job, unless this process is in one already, and make this rank's groups.

    Args:
        config: sizes; their product must be the job's number of ranks.
        device: of the tensors that will be exchanged: CPU starts gloo, CUDA starts NCCL.
        deadline_s: seconds that joining and any collective may wait for its peers.
        member: this process's place in the job, by default the one torchrun gave it.

    Raises:
        ValueError: the world size is not ``tp_size * pcp_size``, or nobody started a job.
        CollectiveError: a peer did not join within the deadline.
    """
    timeout = timedelta(seconds=deadline_s)
    joined = not dist.is_initialized()
    if joined:
        _join(config, timeout, member)
    world = dist.get_world_size()
    try:
        check_world_size(config, world)
    except ValueError:
        if joined:
            stop_process_groups()
        raise
    rank = dist.get_rank()
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    mine: dict[str, Group] = {}
    for name in ("tp", "pcp", "ep"):
        # Every rank makes every group, in one order: torch.distributed requires it.
        everyones = {tuple(group_members(config, other)[name]): None for other in range(world)}
        mine[name] = SingleRank(name)
        for members in everyones:
            made = _new_group(name, members, timeout, backend) if len(members) > 1 else None
            if rank in members and isinstance(made, dist.ProcessGroup):
                mine[name] = ProcessGroup(name, made)
    return Groups(tp=mine["tp"], pcp=mine["pcp"], ep=mine["ep"])


def _join(config: ParallelConfig, timeout: timedelta, member: JobMember | None) -> None:
    try:
        if member is None:
            dist.init_process_group("gloo", timeout=timeout)
        else:
            dist.init_process_group(
                "gloo",
                init_method=member.init_method,
                rank=member.rank,
                world_size=member.world_size,
                timeout=timeout,
            )
    except ValueError as error:
        raise ValueError(
            f"job expected ranks that torchrun started, got: {_reason(error)}; use torchrun "
            f"--nproc-per-node {config.world_size}"
        ) from error
    except RuntimeError as error:
        raise CollectiveError(
            f"job expected all {config.world_size} ranks to join, got: {_reason(error)}; look "
            "at the first rank that failed"
        ) from error


def _new_group(name: str, members: tuple[int, ...], timeout: timedelta, backend: str) -> object:
    """A torch.distributed group, or what it gives to a rank that is not a member."""
    try:
        return dist.new_group(list(members), timeout=timeout, backend=backend)
    except RuntimeError as error:
        raise CollectiveError(
            f"{name} expected ranks {list(members)} to join, got: {_reason(error)}; look at "
            "the first rank that failed"
        ) from error


def _reason(error: Exception) -> str:
    """The backend's own words, less the place in its source and its general advice."""
    first_line = str(error).split("\n", 1)[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first_line).split(" This is typically", 1)[0]


def stop_process_groups() -> None:
    """Leave the job; safe to call when none was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_rank() -> tuple[int, int]:
    """This process's rank and the world size; ``(0, 1)`` outside a job."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def in_job() -> bool:
    """Whether this process has joined a job, of however many ranks."""
    return dist.is_initialized()


def launched_by_torchrun() -> bool:
    """Whether torchrun started this process, with however many others."""
    return dist.is_torchelastic_launched()


def host_rank() -> int:
    """This process's number among those that its launcher started on this host; 0 without one."""
    return get_node_local_rank(fallback_rank=world_rank()[0])


def device_of_rank(device: torch.device) -> torch.device:
    """This rank's own device of a kind: on CUDA one for each rank of a host, made current.

    Raises:
        ValueError: the host has fewer CUDA devices than ranks.
    """
    if device.type != "cuda":
        return device
    count, index = torch.cuda.device_count(), host_rank()
    if index >= count:
        raise ValueError(
            f"device expected one CUDA device for each rank of a host, got {count} for rank "
            f"{index} of it; start --nproc-per-node {count}, or use --device cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def check_backend(groups: Groups, device: torch.device) -> None:
    """Refuse groups whose backend cannot exchange the tensors of a device.

    Raises:
        ValueError: gloo with CUDA, or NCCL with the CPU.
    """
    for group in (groups.tp, groups.pcp, groups.ep):
        if isinstance(group, ProcessGroup) and group.serves != device.type:
            raise ValueError(
                f"{group.name} group expected tensors on {group.serves}, got a model on "
                f"{device.type}; start the groups with device={device.type!r}"
            )
