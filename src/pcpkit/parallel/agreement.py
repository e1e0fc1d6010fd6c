"""What all ranks of a job tell each other besides the model: input, refusals, a verdict.

Every function is called by every rank, and gives all of them the same answer. Tensors are on the
CPU: pass the group of :func:`~pcpkit.parallel.collectives.join_job`, or any other CPU group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from pcpkit.parallel.groups import Group

BEAT_S = 0.5
"""Seconds between two signs of life of a rank that the others wait for."""


def gather_bytes(group: Group, data: bytes) -> list[bytes]:
    """Every rank's bytes, of any length, in rank order."""
    sizes = group.all_gather(torch.tensor([len(data)]))[:, 0].tolist()
    padded = bytearray(data.ljust(max(*sizes, 1), b"\0"))
    rows = group.all_gather(torch.frombuffer(padded, dtype=torch.uint8))
    return [bytes(row[:size].tolist()) for row, size in zip(rows, sizes, strict=True)]


def share_bytes(group: Group, data: bytes) -> bytes:
    """The first rank's bytes; what the others pass is not looked at."""
    return gather_bytes(group, data if group.rank == 0 else b"")[0]


def wait_for_all(group: Group) -> None:
    """Return when every rank has come here.

    A launcher stops all ranks when the first one ends with an error: wait for what one of them
    still has to tell.
    """
    group.all_reduce(torch.tensor([0]))


def first_problem(group: Group, problem: str | None) -> str | None:
    """The problem of the lowest rank that has one, None if no rank has.

    So that a refusal which only one rank can see ends all of them, instead of leaving the others to
    wait for it.

    Args:
        group: the ranks.
        problem: this rank's, None if it can go on.
    """
    told = gather_bytes(group, (problem or "").encode())
    return next((text.decode() for text in told if text), None)


def check_alike(group: Group, name: str, data: bytes) -> None:
    """Refuse, on every rank, ranks that were not given the same.

    Args:
        group: the ranks.
        name: of what is compared, for the error.
        data: this rank's, or a digest of it.

    Raises:
        ValueError: a rank has other bytes than the first; names it.
    """
    told = gather_bytes(group, data)
    others = [rank for rank, other in enumerate(told) if other != told[0]]
    if others:
        raise ValueError(
            f"{name} expected the same on all {group.size} ranks, got another on rank {others[0]}; "
            "give every rank the same arguments, files and devices"
        )


def run_on_first(
    group: Group, work: Callable[[Callable[[], None]], Sequence[str]]
) -> tuple[str, ...]:
    """Let the first rank do something alone while the others wait; its result on all.

    The others do not wait for the whole work within the deadline of one collective, but for the
    next sign of life: ``work`` is given a function to call at least every few seconds.

    Args:
        group: the ranks.
        work: called on the first rank with that function; returns lines of text.
    """
    if group.rank == 0:
        lines = work(_beat(group))
        group.all_reduce(torch.tensor([1]))
    else:
        lines = ()
        while int(group.all_reduce(torch.tensor([0]))) == 0:
            pass
    shared = share_bytes(group, "\0".join(lines).encode())
    return tuple(shared.decode().split("\0")) if shared else ()


def _beat(group: Group) -> Callable[[], None]:
    last = time.monotonic()

    def beat() -> None:
        nonlocal last
        if time.monotonic() - last >= BEAT_S:
            group.all_reduce(torch.tensor([0]))
            last = time.monotonic()

    return beat
