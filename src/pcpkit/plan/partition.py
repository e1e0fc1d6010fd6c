"""Which rank computes which row of a step.

A partition deals the query rows of the global batch to PCP ranks as *segments*: consecutive rows of
one request. It is a pure function of the query lengths, the prefill flags and the number of ranks,
so every rank knows every rank's rows without asking. Everything downstream works from the index
arrays alone; any exact cover is a valid partition.

*Rank-major* layout: the rows of rank 0, then of rank 1, .., each rank padded to the longest one,
which is how rows arrive after an all-gather (pcp-spec section 1.6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Segment:
    """Query offsets ``start .. stop - 1`` of one request, on one rank."""

    request: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Rows of the segment."""
        return self.stop - self.start


PartitionStrategy = Callable[[Sequence[int], Sequence[bool], int], list[list[Segment]]]
"""``(query_lens, is_prefilling, size)`` to the segments of every rank, in any order."""


def dual_chunk_swap(
    query_lens: Sequence[int], is_prefilling: Sequence[bool], size: int
) -> list[list[Segment]]:
    """The seed rule: a prefill is cut into ``2 size`` chunks of ``ceil(q / 2 size)`` rows.

    Rank ``r`` owns chunks ``r`` and ``2 size - 1 - r``, which balances causal work; chunks past the
    end do not exist. Requests in decode are dealt whole, in turn (pcp-spec sections 1.2, 1.3).

    Example:
        ``q = 10``, 2 ranks: chunks of 3; rank 0 owns ``0..2`` and ``9``, rank 1 ``3..5``, ``6..8``.
    """
    ranks: list[list[Segment]] = [[] for _ in range(size)]
    decodes = 0
    for request, (length, prefill) in enumerate(zip(query_lens, is_prefilling, strict=True)):
        if length and not prefill:
            ranks[decodes % size].append(Segment(request=request, start=0, stop=length))
            decodes += 1
            continue
        chunk = -(-length // (2 * size))
        for index in range(2 * size if length else 0):
            start, stop = index * chunk, min((index + 1) * chunk, length)
            if start < stop:
                owner = index if index < size else 2 * size - 1 - index
                ranks[owner].append(Segment(request=request, start=start, stop=stop))
    return ranks


def levelled(
    query_lens: Sequence[int], is_prefilling: Sequence[bool], size: int
) -> list[list[Segment]]:
    """DualChunkSwap with floor-and-remainder chunks and ranks rotated from request to request.

    Requests in decode are dealt whole, in turn. A prefill's rows differ by at most one between
    ranks, and the next one's spare rows start where the last one's ended, so a batch of prefills
    and one-row decodes is level to one row.

    Example:
        ``q = 5``, 2 ranks: chunks of 2, 1, 1, 1; rank 0 owns ``0..1`` and ``4``, rank 1 ``2``,
        ``3``. A second such request swaps the ranks.
    """
    ranks: list[list[Segment]] = [[] for _ in range(size)]
    spare = 0
    order = sorted(range(len(query_lens)), key=lambda request: is_prefilling[request])
    for request in order:
        length = query_lens[request]
        if length and not is_prefilling[request]:
            # One turn however many rows, so that no rank gets two decodes more than another.
            ranks[spare % size].append(Segment(request=request, start=0, stop=length))
            spare += 1
            continue
        base, extra = divmod(length, 2 * size)
        start = 0
        for index in range(2 * size):
            stop = start + base + (index < extra)
            owner = index if index < size else 2 * size - 1 - index
            if extra > size and index >= size:
                # Chunks past the middle run backwards: hand their spare rows out forwards.
                stop = start + base + (owner < extra - size)
            if start < stop:
                segment = Segment(request=request, start=start, stop=stop)
                ranks[(owner + spare) % size].append(segment)
            start = stop
        spare += extra % size
    return ranks


def block_cyclic(block: int) -> PartitionStrategy:
    """Blocks of ``block`` rows dealt in turn, after the requests in decode, dealt whole, in turn.

    Raises:
        ValueError: ``block`` is not positive.
    """
    if block < 1:
        raise ValueError(f"block expected >= 1, got {block}; give the rows of a block")

    def deal(
        query_lens: Sequence[int], is_prefilling: Sequence[bool], size: int
    ) -> list[list[Segment]]:
        ranks: list[list[Segment]] = [[] for _ in range(size)]
        turn = 0
        for request in sorted(range(len(query_lens)), key=lambda request: is_prefilling[request]):
            length = query_lens[request]
            step = block if is_prefilling[request] else max(length, 1)
            for start in range(0, length, step):
                stop = min(start + step, length)
                ranks[turn % size].append(Segment(request=request, start=start, stop=stop))
                turn += 1
        return ranks

    return deal


STRATEGIES: dict[str, PartitionStrategy] = {
    "dual": dual_chunk_swap,
    "levelled": levelled,
    "cyclic": block_cyclic(64),
}
"""By the name a command line uses."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """Segments of every rank in local order, and the index arrays that follow from them."""

    segments: tuple[tuple[Segment, ...], ...]
    rows: tuple[Tensor, ...]
    """By rank: global row of each local row, int64."""
    num_padded_rows: int
    """Rows of the longest rank."""
    gather_index: Tensor
    """``(size * num_padded_rows,)`` int64, global row of each rank-major row; padding is row 0."""
    write_mask: Tensor
    """``(size * num_padded_rows,)`` bool, false for padding: true once per global row."""
    restore_index: Tensor
    """``(num_tokens,)`` int64, rank-major row of each global row."""

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.segments)


def make_partition(
    query_lens: Sequence[int],
    is_prefilling: Sequence[bool],
    size: int,
    strategy: PartitionStrategy = dual_chunk_swap,
) -> Partition:
    """Deal the rows and derive the index arrays.

    Local order: requests in decode first, then prefills, each by request and start.

    Args:
        query_lens: rows of each request this step.
        is_prefilling: whether the request still computes its prompt.
        size: ranks.
        strategy: any exact cover.

    Raises:
        ValueError: lengths and flags differ in number, a length is negative, or the strategy's
            segments are not an exact cover.

    Example:
        One prefill of 10 rows on 2 ranks, dual: ``gather_index [0 1 2 9 0 0 | 3 4 5 6 7 8]``,
        ``restore_index [0 1 2 6 7 8 9 10 11 3]``.
    """
    if len(query_lens) != len(is_prefilling):
        raise ValueError(
            f"is_prefilling expected {len(query_lens)} flags, got {len(is_prefilling)}; "
            "one a request"
        )
    if size < 1:
        raise ValueError(f"size expected >= 1, got {size}; pass the PCP group's size")
    if min(query_lens, default=0) < 0:
        raise ValueError(
            f"query_lens expected counts of rows, got {list(query_lens)}; 0 is a request that rests"
        )
    starts = [0, *accumulate(query_lens)]
    dealt = strategy(query_lens, is_prefilling, size)
    _check_segments(dealt, query_lens)
    ordered = [
        tuple(sorted(segments, key=lambda segment: (is_prefilling[segment.request], segment)))
        for segments in dealt
    ]
    rows = [_rows_of(segments, starts) for segments in ordered]
    _check_cover(rows, starts[-1], size)
    return _with_index_arrays(ordered, rows, starts[-1])


def _rows_of(segments: Sequence[Segment], starts: Sequence[int]) -> Tensor:
    """Global rows of segments one after the other; requests begin at ``starts``."""
    runs: list[tuple[int, int]] = []
    for segment in segments:
        first, stop = (starts[segment.request] + end for end in (segment.start, segment.stop))
        # Neighbours are one run: a rank that has whole requests has few of them.
        if runs and runs[-1][1] == first:
            first = runs.pop()[0]
        runs.append((first, stop))
    if not runs:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.arange(first, stop) for first, stop in runs])


def _with_index_arrays(
    segments: Sequence[tuple[Segment, ...]], rows: Sequence[Tensor], num_tokens: int
) -> Partition:
    width = max(part.shape[0] for part in rows)
    owned = pad_rank_major(rows, -1)
    write_mask = owned >= 0
    restore_index = torch.empty(num_tokens, dtype=torch.int64)
    for rank, part in enumerate(rows):
        restore_index[part] = torch.arange(rank * width, rank * width + part.shape[0])
    return Partition(
        segments=tuple(segments),
        rows=tuple(rows),
        num_padded_rows=width,
        gather_index=owned.clamp(min=0),
        write_mask=write_mask,
        restore_index=restore_index,
    )


def pad_rank_major(parts: Sequence[Tensor], fill: int) -> Tensor:
    """Values of every rank's rows in rank-major layout; ``fill`` pads each rank to the longest.

    Example:
        ``[[5, 6], [7]]`` filled with -1: ``[5, 6, 7, -1]``.
    """
    if len(parts) == 1:
        return parts[0]
    lengths = [part.shape[0] for part in parts]
    filler = parts[0].new_full((max(lengths),), fill)
    pieces: list[Tensor] = []
    for part, length in zip(parts, lengths, strict=True):
        pieces += [part, filler[length:]]
    return torch.cat(pieces)


def _check_segments(dealt: list[list[Segment]], query_lens: Sequence[int]) -> None:
    for rank, segments in enumerate(dealt):
        for segment in segments:
            known = 0 <= segment.request < len(query_lens)
            if not known or not 0 <= segment.start < segment.stop <= query_lens[segment.request]:
                raise ValueError(
                    f"strategy expected rows of one request in each segment, got {segment} on rank "
                    f"{rank}; query lengths are {list(query_lens)}"
                )


def whole_batch(query_lens: Sequence[int]) -> Partition:
    """The partition of a single rank, rows in batch order."""

    def keep(
        query_lens: Sequence[int], is_prefilling: Sequence[bool], size: int
    ) -> list[list[Segment]]:
        lengths = enumerate(query_lens)
        return [
            [Segment(request=index, start=0, stop=length) for index, length in lengths if length]
        ]

    return make_partition(query_lens, [True] * len(query_lens), 1, keep)


def _check_cover(rows: list[Tensor], num_tokens: int, size: int) -> None:
    num_rows = sum(part.shape[0] for part in rows)
    # As many rows as there are, and none of them missing: then none is there twice.
    seen = torch.zeros(num_tokens, dtype=torch.bool)
    for part in rows:
        seen[part] = True
    if len(rows) != size or num_rows != num_tokens or not bool(seen.all()):
        raise ValueError(
            f"strategy expected every one of {num_tokens} rows on exactly one of {size} ranks, got "
            f"{num_rows} rows on {len(rows)}; deal each row once"
        )
