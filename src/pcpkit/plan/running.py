"""What layers run of a partition's segments, where replay and trim leave out first rows.

Rows and segments are in *dealt* order: those of rank 0, then of rank 1, .., without padding. What a
layer runs of a segment is a range, so the rows of all layers follow from a few numbers a segment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from pcpkit.plan.batch import run_of_each
from pcpkit.plan.partition import Partition


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunningSegments:
    """What some layers run of each segment: its last rows, since they leave out first ones only."""

    requests: Tensor
    """``(num_segments,)`` int64."""
    first_rows: Tensor
    """``(num_segments,)`` int64."""
    segment_of_row: Tensor
    """``(num_tokens,)`` int32."""
    left_out: Tensor
    """``(num_layers, num_segments)`` int64, first rows that do not run."""
    num_rows: Tensor
    """``(num_layers, num_segments)`` int64, rows that run."""
    segments: list[int]
    """First segment of each rank, then their number."""
    rows: list[int]
    """First row of each rank, then their number."""
    counts: list[list[int]]
    """By layer and rank, rows that run."""

    def owned(self, rank: int) -> slice:
        """Segments of a rank."""
        return slice(*self.segments[rank : rank + 2])

    def cuts(self, rows: Tensor) -> list[int]:
        """Where the rows of each rank start among some ascending ones, then their number."""
        if len(self.rows) == 2:
            return [0, rows.shape[0]]
        return torch.searchsorted(rows, torch.tensor(self.rows)).tolist()

    def first_layers(self, count: int) -> RunningSegments:
        """The same of the first ``count`` layers."""
        if count == len(self.counts):
            return self
        return replace(
            self,
            left_out=self.left_out[:count],
            num_rows=self.num_rows[:count],
            counts=self.counts[:count],
        )

    @property
    def is_all(self) -> bool:
        """A single layer that runs all rows, as in most steps."""
        return len(self.counts) == 1 and sum(self.counts[0]) == self.rows[-1]

    def local_rows(self, rank: int, rows: Tensor) -> Tensor:
        """Where some rows of a rank are among those that it runs in each layer.

        Args:
            rank: whose.
            rows: ``(count,)`` int64 of its rows, counted from its first, that run in all layers.

        Returns:
            ``(num_layers, count)`` int64.
        """
        if self.is_all:
            return rows[None]
        segment = self.segment_of_row[self.rows[rank] :].index_select(0, rows) - self.segments[rank]
        return rows - self.left_out[:, self.owned(rank)].cumsum(1).index_select(1, segment)

    def spread(self, first_rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
        """The rows of some ranks that run, layer by layer and segment by segment.

        Returns:
            ``(count,)`` int32 where each row's layer and segment are in a flattened
            ``(num_layers, num_segments)`` array of these ranks, and ``(count,)`` int64 the row.
        """
        start, stop = (self.rows[rank] for rank in (first_rank, first_rank + num_ranks))
        first, last = (self.segments[rank] for rank in (first_rank, first_rank + num_ranks))
        if self.is_all:
            return self.segment_of_row[start:stop] - first, torch.arange(start, stop)
        lengths = self.num_rows[:, first:last].reshape(-1)
        ends = lengths.cumsum(0)
        count = sum(sum(by_rank[first_rank:][:num_ranks]) for by_rank in self.counts)
        run = run_of_each(ends, count)
        first_rows = (self.first_rows[first:last] + self.left_out[:, first:last]).view(-1)
        shift = first_rows - ends + lengths
        return run, torch.arange(count) + shift.index_select(0, run)


def running_segments(partition: Partition, num_dropped: Tensor) -> RunningSegments:
    """The segments of a step in layers that leave out rows.

    Args:
        partition: of the step.
        num_dropped: ``(num_layers, num_reqs)`` integers, a layer leaves out the rows of a request
            with a smaller query offset.
    """
    every = [segment for owned in partition.segments for segment in owned]
    requests = torch.tensor([segment.request for segment in every], dtype=torch.int64)
    starts = torch.tensor([segment.start for segment in every], dtype=torch.int64)
    ends = torch.tensor([segment.stop for segment in every], dtype=torch.int64)
    lengths = ends - starts
    left_out = (num_dropped.index_select(1, requests) - starts).clamp(min=0).minimum(lengths)
    num_rows = lengths - left_out
    segments = [0, *accumulate(len(owned) for owned in partition.segments)]
    rows = [0, *accumulate(part.shape[0] for part in partition.rows)]
    by_rank = num_rows.split([len(owned) for owned in partition.segments], 1)
    last = lengths.cumsum(0)
    return RunningSegments(
        requests=requests,
        first_rows=last - lengths,
        segment_of_row=run_of_each(last, rows[-1]),
        left_out=left_out,
        num_rows=num_rows,
        segments=segments,
        rows=rows,
        counts=torch.stack([owned.sum(1) for owned in by_rank], 1).tolist(),
    )
