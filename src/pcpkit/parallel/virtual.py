"""Ranks as threads of one process: the same code and the same collectives, no process group.

For tests of breadth and for debugging: a failing rank's traceback arrives, ranks that make
different calls are named at once, and a rank that leaves releases the peers that wait for it. Sums
are in rank order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pcpkit.config import ParallelConfig
from pcpkit.parallel.groups import Group, Groups, SingleRank, check_parts, group_members

Result = TypeVar("Result")


class RankMismatch(RuntimeError):
    """Ranks of one group made different calls, or one of them left out a call."""


class _Abandoned(RuntimeError):
    """A call that a peer never made; says which."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a rank brings to a call."""

    op: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.op} of {tuple(self.tensor.shape)} {self.tensor.dtype}"


class _Meeting:
    """One group's rendezvous: every rank leaves a tensor and reads all of them."""

    def __init__(self, name: str, size: int, deadline_s: float) -> None:
        self._name = name
        self._size = size
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._offers: dict[int, _Offer] = {}
        self._num_read = 0
        self._num_calls = 0
        self._somebody_left = False

    def exchange(
        self, rank: int, offer: _Offer, combine: Callable[[list[Tensor]], Tensor]
    ) -> Tensor:
        """``combine`` of all ranks' tensors; nobody returns before all have read."""
        with self._changed:
            self._offers[rank] = offer
            self._changed.notify_all()
            self._wait(lambda: len(self._offers) == self._size, offer)
            offers = [self._offers[peer] for peer in range(self._size)]
            call = self._num_calls
        if any(str(other) != str(offers[0]) for other in offers):
            listed = ", ".join(f"rank {peer}: {other}" for peer, other in enumerate(offers))
            raise RankMismatch(f"{self._name} expected the same call on every rank, got {listed}")
        result = combine([other.tensor for other in offers])
        with self._changed:
            self._num_read += 1
            if self._num_read == self._size:
                self._offers, self._num_read, self._num_calls = {}, 0, call + 1
                self._changed.notify_all()
            # After the call a rank may overwrite its tensor.
            self._wait(lambda: self._num_calls > call, offer)
        return result

    def leave(self) -> None:
        """Tell the peers that this rank makes no more calls."""
        with self._changed:
            self._somebody_left = True
            self._changed.notify_all()

    def _wait(self, complete: Callable[[], bool], offer: _Offer) -> None:
        self._changed.wait_for(lambda: complete() or self._somebody_left, self._deadline_s)
        if not complete():
            reason = "a peer ended" if self._somebody_left else f"{self._deadline_s} s passed"
            raise _Abandoned(f"waited in {self._name} {offer} until {reason}")


class VirtualGroup:
    """A :class:`~pcpkit.parallel.groups.Group` whose ranks are threads."""

    def __init__(self, name: str, rank: int, size: int, meeting: _Meeting) -> None:
        """Made by :func:`run_virtual_ranks`."""
        self.name = name
        self.rank = rank
        self.size = size
        self._meeting = meeting

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See :class:`~pcpkit.parallel.groups.Group`."""
        return self._exchange("all_gather", tensor, torch.stack)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See :class:`~pcpkit.parallel.groups.Group`."""
        return self._exchange("all_reduce", tensor, _ordered_sum)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """See :class:`~pcpkit.parallel.groups.Group`."""
        check_parts(tensor, self.size)
        return self._exchange(
            "reduce_scatter",
            tensor,
            lambda tensors: _ordered_sum([tensor[self.rank] for tensor in tensors]),
        )

    def _exchange(
        self, op: str, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]
    ) -> Tensor:
        return self._meeting.exchange(self.rank, _Offer(op, tensor), combine)


def _ordered_sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        total += tensor
    return total


class _Run(Generic[Result]):
    """The threads of one call of :func:`run_virtual_ranks` and what came of them."""

    def __init__(
        self,
        config: ParallelConfig,
        deadline_s: float,
        wrap: Callable[[Group], Group] | None,
    ) -> None:
        self._config = config
        self._deadline_s = deadline_s
        self._wrap = wrap
        self._meetings: dict[tuple[str, tuple[int, ...]], _Meeting] = {}
        self.results: dict[int, Result] = {}
        self.failures: dict[int, BaseException] = {}

    def groups(self, rank: int) -> Groups:
        """The groups of a rank; its peers' groups share their meetings."""
        return Groups(
            tp=self._group(rank, "tp"), pcp=self._group(rank, "pcp"), ep=self._group(rank, "ep")
        )

    def thread(self, rank: int, body: Callable[[int, Groups], Result]) -> threading.Thread:
        """A thread that runs ``body`` as ``rank``."""
        groups = self.groups(rank)
        return threading.Thread(
            target=self._run, args=(rank, groups, body), name=f"rank{rank}", daemon=True
        )

    def _group(self, rank: int, name: str) -> Group:
        members = group_members(self._config, rank)[name]
        made: Group = SingleRank(name)
        if len(members) > 1:
            meeting = self._meetings.setdefault(
                (name, tuple(members)), _Meeting(name, len(members), self._deadline_s)
            )
            made = VirtualGroup(name, members.index(rank), len(members), meeting)
        return self._wrap(made) if self._wrap is not None else made

    def _run(self, rank: int, groups: Groups, body: Callable[[int, Groups], Result]) -> None:
        try:
            self.results[rank] = body(rank, groups)
        except BaseException as error:
            self.failures[rank] = error
        for (_, members), meeting in self._meetings.items():
            if rank in members:
                meeting.leave()

    def raise_first(self) -> None:
        """Raise the cause of a failure rather than what it did to the peers that waited."""
        failures = [(rank, self.failures[rank]) for rank in sorted(self.failures)]
        for rank, error in failures:
            if not isinstance(error, _Abandoned):
                error.add_note(f"raised on virtual rank {rank}")
                raise error
        if failures:
            ended = [f"rank {rank} returned" for rank in sorted(self.results)]
            waited = [f"rank {rank} {error}" for rank, error in failures]
            raise RankMismatch(
                f"collective expected all its ranks, got {'; '.join(waited + ended)}; "
                "a rank left out a call or made one more"
            )


def run_virtual_ranks(
    config: ParallelConfig,
    body: Callable[[int, Groups], Result],
    *,
    deadline_s: float = 120.0,
    wrap: Callable[[Group], Group] | None = None,
) -> list[Result]:
    """Run ``body(rank, groups)`` on every rank of ``config`` and return the results in rank order.

    Args:
        config: sizes of the groups.
        body: what a rank does; it must not share mutable state with other ranks.
        deadline_s: seconds a rank waits for its peers in one collective.
        wrap: applied to every group of every rank, for example to trace it.

    Raises:
        RankMismatch: ranks of a group made different calls, or a rank waited in vain.
        BaseException: the first rank's exception; its peers are released, not left waiting.

    Example:
        ``run_virtual_ranks(ParallelConfig(pcp_size=2), lambda rank, groups: groups.pcp.rank)``
        is ``[0, 1]``.
    """
    run = _Run[Result](config, deadline_s, wrap)
    threads = [run.thread(rank, body) for rank in range(config.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.raise_first()
    return [run.results[rank] for rank in range(config.world_size)]
