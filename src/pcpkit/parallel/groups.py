"""The groups a rank belongs to, as values that are passed to whoever communicates.

Rank order, outermost to innermost: PCP, then TP (pcp-spec section 0.3). So a TP group is
``tp_size`` consecutive ranks, a PCP group the ranks of equal TP index, and the EP group all ranks
of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pcpkit.config import ParallelConfig


class Group(Protocol):
    """Ranks that communicate; every rank of a group makes the same calls in the same order.

    All tensors of one call have the same shape and dtype on every rank. A group of one rank
    communicates with nobody and returns its input.
    """

    @property
    def name(self) -> str:
        """``"tp"``, ``"pcp"`` or ``"ep"``: how traces and errors call the group."""
        ...

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        ...

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``(size, *shape)``: every rank's tensor, in rank order."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks; the order of the additions is the backend's."""
        ...

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """``tensor (size, *shape)``: the sum over ranks of part ``rank``, ``(*shape)``.

        Raises:
            ValueError: ``tensor`` has not one part a rank.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """The three groups of one rank."""

    tp: Group
    pcp: Group
    ep: Group


class SingleRank:
    """The group of a rank alone."""

    def __init__(self, name: str) -> None:
        """``name`` as in :class:`Group`."""
        self.name = name
        self.rank = 0
        self.size = 1

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See :class:`Group`."""
        return tensor[None]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See :class:`Group`."""
        return tensor

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """See :class:`Group`."""
        check_parts(tensor, 1)
        return tensor[0]


def check_parts(tensor: Tensor, size: int) -> None:
    """Refuse a reduce-scatter that has not one part a rank.

    Raises:
        ValueError: ``tensor`` is not ``(size, *shape)``.
    """
    if tensor.dim() == 0 or tensor.shape[0] != size:
        raise ValueError(
            f"tensor expected shape ({size}, ..), got {tuple(tensor.shape)}; one part a rank"
        )


def single_rank() -> Groups:
    """The groups of a model on one rank."""
    return Groups(tp=SingleRank("tp"), pcp=SingleRank("pcp"), ep=SingleRank("ep"))


def group_members(config: ParallelConfig, rank: int) -> dict[str, list[int]]:
    """World ranks of the groups of ``rank``, by group name, in group order.

    Example:
        TP 2 x PCP 2, rank 1: ``tp [0, 1]``, ``pcp [1, 3]``, ``ep [0, 1, 2, 3]`` (``[1]`` without
        expert parallelism).

    Raises:
        ValueError: ``rank`` is outside the world.
    """
    if not 0 <= rank < config.world_size:
        raise ValueError(
            f"rank expected 0 .. {config.world_size - 1}, got {rank}; start tp_size x pcp_size "
            "ranks"
        )
    column, row = rank % config.tp_size, rank // config.tp_size
    everyone = list(range(config.world_size))
    return {
        "tp": everyone[row * config.tp_size : (row + 1) * config.tp_size],
        "pcp": everyone[column :: config.tp_size],
        "ep": everyone if config.expert_parallel else [rank],
    }
