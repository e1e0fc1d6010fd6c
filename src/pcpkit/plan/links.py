"""Ratio-2 pair links: from where the predecessor of each closing row comes.

Positions ``2j`` and ``2j + 1`` form group ``j``; the odd row closes it (pcp-spec section 3). Its
predecessor is the row before it on the same rank, or, when the group is split between segments, the
last row of another segment, which all ranks exchange, or, for the first row of a request's query,
the row that the previous step left in the ring. After the step every rank stores the same open
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pcpkit.plan.batch import StepBatch, cached_tokens
from pcpkit.plan.partition import Partition


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairLinks:
    """Arguments of ``close_groups`` and ``write_ring`` on one rank for one step."""

    last_rows: Tensor
    """``(num_padded_segments,)`` int64, local row that ends each segment, -1 = padding: what this
    rank contributes to the exchange."""
    predecessors: Tensor
    """``(num_closing,)`` int64: local row, then ``num_rows`` + exchanged row, then ring slot."""
    open_rows: Tensor
    """``(num_open,)`` int64, exchanged row that stays open after the step, alike on all ranks."""
    open_slots: Tensor
    """``(num_open,)`` int64, ring slot it is stored in."""


def link_pairs(batch: StepBatch, partition: Partition, rank: int, ring_rows: int) -> PairLinks:
    """Link the ratio-2 groups that ``rank`` closes.

    Args:
        batch: the global batch; groups below ``num_cached_tokens`` are not closed.
        partition: rows of every rank, those that run in the layer; all from there on.
        rank: whose links.
        ring_rows: rows of a ring block; position ``p`` lives in row ``p % ring_rows``.

    Example:
        One request at 5 computed tokens, query of 3 (positions 5, 6, 7), one rank, ring block 0, 8
        ring rows: local rows 0 and 2 close; row 0's predecessor is ring slot 4, row 2's is row 1;
        nothing stays open.
    """
    width = max(len(segments) for segments in partition.segments)
    computed, cached = batch.num_computed_tokens.tolist(), cached_tokens(batch).tolist()
    ring_blocks = batch.ring_blocks.tolist()
    # Exchanged row of the segment that ends at a request's query offset.
    ends = {
        (segment.request, segment.stop): owner * width + index
        for owner, segments in enumerate(partition.segments)
        for index, segment in enumerate(segments)
    }
    num_rows = len(partition.rows[rank])
    exchanged = len(partition.segments) * width
    last_rows, predecessors, local = [], [torch.empty(0, dtype=torch.int64)], 0
    for segment in partition.segments[rank]:
        request, first = segment.request, computed[segment.request] + segment.start
        closing = local + max(cached[request] - first, 0)
        closing += 1 - (first + closing - local) % 2
        if closing == local:
            if segment.start > 0:
                before = num_rows + ends[request, segment.start]
            else:
                slot = ring_blocks[request] * ring_rows + (first - 1) % ring_rows
                before = num_rows + exchanged + slot
            predecessors.append(torch.tensor([before]))
            closing += 2
        # From the second row on, every odd position follows its partner in the same segment.
        local += segment.num_rows
        if closing < local:
            predecessors.append(torch.arange(closing - 1, local - 1, 2))
        last_rows.append(local - 1)
    open_rows, open_slots = [], []
    for request, length in enumerate(batch.query_lens.tolist()):
        newest = computed[request] + length - 1
        if newest % 2 == 0 and (request, length) in ends:
            open_rows.append(ends[request, length])
            open_slots.append(ring_blocks[request] * ring_rows + newest % ring_rows)
    last_rows += [-1] * (width - len(last_rows))
    return PairLinks(
        last_rows=torch.tensor(last_rows, dtype=torch.int64),
        predecessors=torch.cat(predecessors),
        open_rows=torch.tensor(open_rows, dtype=torch.int64),
        open_slots=torch.tensor(open_slots, dtype=torch.int64),
    )


def no_links() -> PairLinks:
    """Of a layer that can be no source: nothing is exchanged, closed or kept open."""
    nothing = torch.empty(0, dtype=torch.int64)
    return PairLinks(last_rows=nothing, predecessors=nothing, open_rows=nothing, open_slots=nothing)
