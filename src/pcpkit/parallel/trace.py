"""The sequence of collectives a rank makes, to compare between ranks and with the plan.

NCCL matches calls by their order alone: a rank that skips or reorders one hangs or corrupts its
peers. So the trace, not only the result, is part of what tests compare.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pcpkit.parallel.groups import Group


@dataclass(frozen=True, slots=True)
class Call:
    """One collective as a rank made it."""

    group: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class TracedGroup:
    """A group that records every call into a shared list before making it."""

    def __init__(self, group: Group, calls: list[Call]) -> None:
        """Record the calls on ``group`` in ``calls``; calls of one-rank groups are recorded too."""
        self._group = group
        self._calls = calls

    @property
    def name(self) -> str:
        """See :class:`~pcpkit.parallel.groups.Group`."""
        return self._group.name

    @property
    def rank(self) -> int:
        """See :class:`~pcpkit.parallel.groups.Group`."""
        return self._group.rank

    @property
    def size(self) -> int:
        """See :class:`~pcpkit.parallel.groups.Group`."""
        return self._group.size

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See :class:`~pcpkit.parallel.groups.Group`."""
        self._record("all_gather", tensor)
        return self._group.all_gather(tensor)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See :class:`~pcpkit.parallel.groups.Group`."""
        self._record("all_reduce", tensor)
        return self._group.all_reduce(tensor)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """See :class:`~pcpkit.parallel.groups.Group`."""
        self._record("reduce_scatter", tensor)
        return self._group.reduce_scatter(tensor)

    def _record(self, op: str, tensor: Tensor) -> None:
        self._calls.append(Call(self.name, op, tuple(tensor.shape), tensor.dtype))
