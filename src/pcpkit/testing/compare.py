"""Comparison by bits: two tensors, the replicas of several ranks, the collectives they made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pcpkit.parallel.trace import Call

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaMismatch(AssertionError):
    """A rank holds other bytes than rank 0."""


class TraceMismatch(AssertionError):
    """A rank made another collective than rank 0, or than was expected."""


def bits(tensor: Tensor) -> Tensor:
    """The elements as integers of the same width, contiguous.

    Raises:
        ValueError: elements of another width than 1, 2, 4 or 8 bytes.
    """
    integer = _INTEGERS.get(tensor.element_size())
    if integer is None:
        raise ValueError(
            f"tensor expected elements of 1, 2, 4 or 8 bytes, got {tensor.dtype}; view its parts"
        )
    return tensor.contiguous().view(integer)


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Same shape, dtype and bits, on any devices; all NaNs of a float tensor count as one value."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    got, want = got.cpu(), want.cpu()
    equal = bits(got) == bits(want)
    if got.is_floating_point():
        equal |= got.isnan() & want.isnan()
    return bool(equal.all())


def assert_replicas_equal(replicas: Sequence[Mapping[str, Tensor]]) -> None:
    """Demand that every rank holds the same tensors, byte for byte (NaNs included).

    Args:
        replicas: by rank, tensors by name, on any devices. For example ``pool.tensors()`` of each.

    Raises:
        ReplicaMismatch: naming the first rank that differs from rank 0, the tensor, the index of
            the first element, both values with their bits, and how many elements differ.

    Example:
        ``assert_replicas_equal([{"kv": a}, {"kv": b}])``
    """
    for rank, replica in enumerate(replicas[1:], start=1):
        first = replicas[0]
        if replica.keys() != first.keys():
            odd = sorted(replica.keys() ^ first.keys())
            raise ReplicaMismatch(f"rank {rank} expected the tensors of rank 0, differs in {odd}")
        for name, tensor in replica.items():
            difference = _difference(tensor, first[name])
            if difference:
                raise ReplicaMismatch(f"rank {rank} tensor {name!r} {difference}")


def _difference(got: Tensor, want: Tensor) -> str:
    """Where and how ``got`` differs from rank 0's ``want``; empty if it does not."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return (
            f"expected {want.dtype} {tuple(want.shape)} as on rank 0, got {got.dtype} "
            f"{tuple(got.shape)}"
        )
    got, want = got.cpu(), want.cpu()
    got_bits, want_bits = bits(got), bits(want)
    if torch.equal(got_bits, want_bits):
        return ""
    places = (got_bits != want_bits).nonzero()
    place = tuple(places[0].tolist())
    digits = 2 * got.element_size()

    def shown(tensor: Tensor, as_bits: Tensor) -> str:
        # Python's int of a negative number has no width.
        code = int(as_bits[place]) & ((1 << 4 * digits) - 1)
        return f"{tensor[place].tolist()} (0x{code:0{digits}x})"

    return (
        f"at index {list(place)} expected {shown(want, want_bits)} as on rank 0, got "
        f"{shown(got, got_bits)}; {len(places)} of {got.numel()} elements differ"
    )


def assert_same_calls(
    traces: Sequence[Sequence[Call]], expected: Sequence[Call] | None = None
) -> None:
    """Demand that every rank made the same collectives in the same order.

    Args:
        traces: by rank, the calls that a :class:`~pcpkit.parallel.trace.TracedGroup` recorded.
        expected: what every rank should have called; by default what rank 0 called.

    Raises:
        TraceMismatch: naming the first call that differs, its place and the rank.

    Example:
        ``assert_same_calls([calls_of_rank_0, calls_of_rank_1])``
    """
    if expected is None:
        if not traces:
            return
        expected, source = traces[0], "as rank 0"
    else:
        source = "as planned"
    for rank, calls in enumerate(traces):
        for place in range(max(len(calls), len(expected))):
            got = calls[place] if place < len(calls) else None
            want = expected[place] if place < len(expected) else None
            if got != want:
                raise TraceMismatch(
                    f"rank {rank} call {place} expected {_shown(want)} {source}, got {_shown(got)}"
                )


def _shown(call: Call | None) -> str:
    if call is None:
        return "no more calls"
    return f"{call.group} {call.op} of {call.shape} {call.dtype}"
