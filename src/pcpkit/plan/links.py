"""Ratio-2 pair links: from where the predecessor of each closing row comes.

Positions ``2j`` and ``2j + 1`` form group ``j``; the odd row closes it (pcp-spec section 3). Its
predecessor is the row before it on the same rank, or, when the group is split between segments, the
last row of another segment, which all ranks exchange, or, for the first row of a request's query,
the row that the previous step left in the ring. After the step every rank stores the same open
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pcpkit.plan.batch import StepBatch, cached_tokens
from pcpkit.plan.partition import Partition
from pcpkit.plan.running import RunningSegments


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairLinks:
    """Arguments of ``close_and_write_ring`` on one rank for one step."""

    last_rows: Tensor
    """``(num_padded_segments,)`` int64, local row that ends each segment, -1 = padding: what this
    rank contributes to the exchange."""
    predecessors: Tensor
    """``(num_closing,)`` int64: local row, then ``num_rows`` + exchanged row, then ring slot."""
    open_rows: Tensor
    """``(num_open,)`` int64, exchanged row that stays open after the step, alike on all ranks."""
    open_slots: Tensor
    """``(num_open,)`` int64, ring slot it is stored in."""


def link_layers(
    batch: StepBatch,
    partition: Partition,
    rank: int,
    ring_rows: int,
    running: RunningSegments,
    closing: Tensor,
    local: Tensor,
) -> list[PairLinks]:
    """Link the ratio-2 groups that ``rank`` closes in layers that all close the same ones.

    Args:
        batch: the global batch.
        partition: rows of every rank.
        rank: whose links.
        ring_rows: rows of a ring block.
        running: what each layer runs, the closing rows and their predecessors among it.
        closing: ``(num_closing,)`` int64, which of the rank's rows close a group.
        local: ``(num_layers, num_closing)`` int64, where they are among those of each layer.

    Returns:
        One entry a layer.

    Example:
        One request at 5 computed tokens, query of 3 (positions 5, 6, 7), one rank, ring block 0, 8
        ring rows, a layer that runs all of it: local rows 0 and 2 close; row 0's predecessor is
        ring slot 4, row 2's is row 1; nothing stays open.
    """
    exchange = _exchange(partition, running)
    # Within a segment an odd row follows its partner.
    predecessors = local - 1
    firsts, sources = _first_predecessors(batch, partition, rank, ring_rows, exchange)
    if firsts:
        columns = torch.searchsorted(closing, torch.tensor(firsts))
        num_rows = torch.tensor([[counts[rank]] for counts in running.counts])
        predecessors[:, columns] = num_rows + sources
    last_rows = _last_rows(rank, exchange, running)
    open_rows, open_slots = _open_rows(batch, ring_rows, exchange)
    return [
        PairLinks(last_rows=last, predecessors=before, open_rows=rows, open_slots=slots)
        for last, before, rows, slots in zip(
            last_rows, predecessors.unbind(0), open_rows, open_slots, strict=True
        )
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Exchange:
    """The last rows of the segments of all ranks, as some layers exchange them."""

    ends: dict[tuple[int, int], int]
    """Segment that ends at a request's query offset."""
    runs: Tensor
    """``(num_layers, num_segments)`` bool."""
    rows: Tensor
    """``(num_layers, num_segments)`` int64, exchanged row of a segment that runs."""
    width: Tensor
    """``(num_layers, 1)`` int64, segments of the rank that runs most."""


def _exchange(partition: Partition, running: RunningSegments) -> _Exchange:
    segments = [segment for owned in partition.segments for segment in owned]
    runs = running.num_rows > 0
    counts = [owned.cumsum(1) for owned in runs.split([len(o) for o in partition.segments], 1)]
    sizes = [count[:, -1:] for count in counts if count.shape[1]]
    width = torch.cat(sizes, 1).amax(1, keepdim=True)
    return _Exchange(
        ends={(segment.request, segment.stop): index for index, segment in enumerate(segments)},
        runs=runs,
        rows=torch.cat([rank * width + count - 1 for rank, count in enumerate(counts)], 1),
        width=width,
    )


def _first_predecessors(
    batch: StepBatch, partition: Partition, rank: int, ring_rows: int, exchange: _Exchange
) -> tuple[list[int], Tensor]:
    """First rows of segments that close a group, and from where theirs comes in every layer.

    Returns:
        Which of the rank's rows, and ``(num_layers, num_firsts)`` int64 exchanged row or, after
        those of all ranks, ring slot.
    """
    computed, cached = batch.num_computed_tokens.tolist(), cached_tokens(batch).tolist()
    ring_blocks = batch.ring_blocks.tolist()
    firsts, before, slots, local = list[int](), list[int](), list[int](), 0
    for segment in partition.segments[rank]:
        request, position = segment.request, computed[segment.request] + segment.start
        if position % 2 == 1 and position >= cached[request]:
            # Layers run such a row and the one before it, so none starts the segment elsewhere.
            firsts.append(local)
            is_first = segment.start == 0
            before.append(0 if is_first else exchange.ends[request, segment.start])
            slot = ring_blocks[request] * ring_rows + (position - 1) % ring_rows
            slots.append(slot if is_first else -1)
        local += segment.num_rows
    of_ring = torch.tensor(slots, dtype=torch.int64)
    exchanged = exchange.rows.index_select(1, torch.tensor(before, dtype=torch.int64))
    num_exchanged = partition.size * exchange.width
    return firsts, torch.where(of_ring < 0, exchanged, num_exchanged + of_ring)


def _last_rows(rank: int, exchange: _Exchange, running: RunningSegments) -> list[Tensor]:
    """What the rank contributes to the exchange of every layer, padded with -1."""
    owned = running.owned(rank)
    last = running.num_rows[:, owned].cumsum(1) - 1
    widths = exchange.width[:, 0].tolist()
    # Segments that do not run go to a column that is cut off.
    places = exchange.rows[:, owned] - rank * exchange.width
    places.masked_fill_(~exchange.runs[:, owned], max(widths))
    padded = torch.full((len(widths), max(widths) + 1), -1, dtype=torch.int64)
    padded.scatter_(1, places, last)
    return [rows[:width] for rows, width in zip(padded.unbind(0), widths, strict=True)]


def _open_rows(
    batch: StepBatch, ring_rows: int, exchange: _Exchange
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Exchanged rows that stay open in every layer, and their ring slots."""
    segments, slots = list[int](), list[int]()
    starts = batch.query_start_loc.tolist()
    computed, ring_blocks = batch.num_computed_tokens.tolist(), batch.ring_blocks.tolist()
    every = zip(pairwise(starts), computed, ring_blocks, strict=True)
    for request, ((start, stop), before, ring_block) in enumerate(every):
        length = stop - start
        newest = before + length - 1
        if newest % 2 == 0:
            segments.append(exchange.ends[request, length])
            slots.append(ring_block * ring_rows + newest % ring_rows)
    last = torch.tensor(segments, dtype=torch.int64)
    runs, rows = exchange.runs.index_select(1, last), exchange.rows.index_select(1, last)
    counts = runs.sum(1).tolist()
    open_slots = torch.tensor(slots, dtype=torch.int64).expand_as(rows)
    return rows.masked_select(runs).split(counts), open_slots.masked_select(runs).split(counts)


def no_links() -> PairLinks:
    """Of a layer that can be no source: nothing is exchanged, closed or kept open."""
    nothing = torch.empty(0, dtype=torch.int64)
    return PairLinks(last_rows=nothing, predecessors=nothing, open_rows=nothing, open_slots=nothing)
