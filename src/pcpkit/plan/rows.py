"""The rows that run in each layer of a step: where they write and what they may read.

Without replay and trim all layers run all rows and share one :class:`LayerRows`. Otherwise a layer
runs the rows of a request from a start on that never falls from layer to layer, so its rows are
some of those below it, on the ranks that own them.

The host plans while the device waits, and a small op costs it as much as one over thousands of
rows. So arrays of all layers are computed side by side and cut up at the end. They are in *dealt*
order: the rows of rank 0, then of rank 1, .., without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pcpkit.plan.batch import QueryRows, StepBatch, cached_tokens
from pcpkit.plan.links import PairLinks, link_layers, no_links
from pcpkit.plan.partition import Partition, pad_rank_major
from pcpkit.plan.running import RunningSegments, running_segments


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRows:
    """Compressed rows that a step finishes at the sources of one ratio."""

    closing_rows: Tensor
    """``(num_closing,)`` int64, local row of each group's last token."""
    positions: Tensor
    """``(num_closing,)`` int64, first position of the group (its RoPE position)."""
    num_padded: int
    """Groups of the rank that closes most."""
    slots: Tensor
    """``(size * num_padded,)`` int64 gathered, slot of the finished record."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRows:
    """The rows of this rank that run in a layer; layers with the same rows share one object."""

    kept: Tensor | None
    """``(num_rows,)`` int64, which of the local rows of the layers below go on; ``None`` = all."""
    positions: Tensor
    """``(num_rows,)`` int64."""
    row_request: Tensor
    """``(num_rows,)`` int32."""
    window_floor: Tensor
    """``(num_rows,)`` int32, lowest window position a row may read."""
    num_padded_rows: int
    """Rows of the longest rank; 0 = the layer has no rows anywhere, so it does not run."""
    window_slots: Tensor
    """``(size * num_padded_rows,)`` int64 gathered, slot of each row's window record."""
    groups: dict[int, GroupRows]
    """By compress ratio; empty where rows are trimmed, since no source is there."""
    links: PairLinks
    max_seq_len: int
    """Tokens after the step of the longest request that has rows in the layer."""

    @property
    def num_rows(self) -> int:
        """Local rows; may be 0."""
        return self.positions.shape[0]

    def num_visible(self, ratio: int) -> Tensor:
        """Visible compressed positions of every row, ``(num_rows,)`` int32: ``(P + 1) // r``."""
        return ((self.positions + 1) // ratio).int()

    def max_visible(self, ratio: int) -> int:
        """The largest number of compressed positions that any rank's row sees."""
        return self.max_seq_len // ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """Sizes that slots depend on.

    Raises:
        ValueError: a block is empty or does not hold whole states.
    """

    ratios: tuple[int, ...]
    block_size: int
    window_block_size: int
    ring_rows: int

    def __post_init__(self) -> None:
        """See the class."""
        if self.window_block_size < 1:
            raise ValueError(
                f"window_block_size expected >= 1, got {self.window_block_size}; quote block sizes "
                "in tokens"
            )
        if any(
            ratio < 1 or self.block_size < 1 or self.block_size % ratio for ratio in self.ratios
        ):
            raise ValueError(
                f"block_size expected a positive multiple of the ratios {self.ratios}, got "
                f"{self.block_size}; quote block sizes in tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """What the rows of all layers are taken from, rows in dealt order."""

    batch: StepBatch
    partition: Partition
    rank: int
    layout: SlotLayout
    requests: Tensor
    """``(num_tokens,)`` int32."""
    positions: Tensor
    """``(num_tokens,)`` int64."""
    seq_lens: Tensor
    """``(num_reqs,)`` int32."""
    max_seq_len: int
    bounds: Tensor
    """``(num_layers, num_reqs)`` int32, starts of layers that differ from the layer below."""
    running: RunningSegments
    """In these layers."""


def plan_layers(
    batch: StepBatch,
    rows: QueryRows,
    partition: Partition,
    rank: int,
    layout: SlotLayout,
    starts: Tensor | None,
) -> tuple[tuple[LayerRows, ...], Sequence[Tensor]]:
    """Rows of every layer, and of all ranks in the last one.

    Args:
        batch: the global batch.
        rows: its query rows.
        partition: of all rows.
        rank: whose rows.
        layout: sizes of blocks and groups.
        starts: ``(num_reqs, num_layers)`` int32 first position that runs in a layer and lowest
            window position that is read there, ascending; 0 = no bound. ``None``: 0 everywhere.

    Returns:
        One entry a layer, or a single one that stands for all if there are no starts. And by rank
        the global rows that run in the last layer, ``(num_rows,)`` int64.

    Raises:
        ValueError: a row has no slot in its block table.
    """
    bounds, chosen = _distinct_bounds(rows, starts)
    dealt = partition.rows[0] if partition.size == 1 else torch.cat(partition.rows)
    step = _Step(
        batch=batch,
        partition=partition,
        rank=rank,
        layout=layout,
        requests=rows.requests.index_select(0, dealt),
        positions=rows.positions.index_select(0, dealt),
        seq_lens=rows.seq_lens,
        max_seq_len=int(rows.seq_lens.max()),
        bounds=bounds,
        running=running_segments(partition, bounds - batch.num_computed_tokens),
    )
    run, row = step.running.spread(rank, 1)
    every_row = row if partition.size == 1 else step.running.spread(0, partition.size)[1]
    layers = _distinct_layers(step, run, row, _window_slots(step, every_row))
    counts = step.running.counts[-1]
    if sum(counts) == batch.num_tokens:
        last_rows = partition.rows
    else:
        last = every_row[every_row.shape[0] - sum(counts) :]
        last_rows = dealt.index_select(0, last).split(counts)
    return tuple(layers[index] for index in chosen), last_rows


def _distinct_bounds(rows: QueryRows, starts: Tensor | None) -> tuple[Tensor, list[int]]:
    """Starts of layers that differ from the layer below, and which of them each layer has.

    Returns:
        ``(num_distinct, num_reqs)`` int32; one number a layer, or a single one without starts.
    """
    if starts is None or not bool(starts.any()):
        return torch.zeros(1, rows.seq_lens.shape[0], dtype=torch.int32), [0]
    # Beyond the end there are no rows to tell starts apart by.
    starts = starts.minimum(rows.seq_lens[:, None])
    distinct, chosen = starts.T.unique_consecutive(return_inverse=True, dim=0)
    return distinct, chosen.tolist()


def _distinct_layers(
    step: _Step, run: Tensor, row: Tensor, window_slots: Sequence[Tensor]
) -> list[LayerRows]:
    """The rows of every layer that differs from the layer below.

    Args:
        step: all rows.
        run: layers and segments of the rank's rows in all layers, see ``RunningSegments.spread``.
        row: these rows.
        window_slots: gathered, of every layer.
    """
    running, owned = step.running, step.running.owned(step.rank)
    counts = [by_rank[step.rank] for by_rank in running.counts]
    positions = step.positions.index_select(0, row).split(counts)
    requests = step.requests.index_select(0, row).split(counts)
    floors = step.bounds.index_select(1, running.requests[owned]).view(-1)
    floors = floors.index_select(0, run).split(counts)
    kept = _kept_rows(step, run, row)
    longest = torch.where(step.bounds < step.seq_lens, step.seq_lens, 0).amax(1).tolist()
    sources = _sources(step)
    nothing = ({}, no_links())
    layers: list[LayerRows] = []
    for index, by_rank in enumerate(running.counts):
        groups, links = sources[index] if index < len(sources) else nothing
        layers.append(
            LayerRows(
                kept=kept[index],
                positions=positions[index],
                row_request=requests[index],
                window_floor=floors[index],
                num_padded_rows=max(by_rank),
                window_slots=window_slots[index],
                groups=groups,
                links=links,
                max_seq_len=longest[index],
            )
        )
    return layers


def _kept_rows(step: _Step, run: Tensor, row: Tensor) -> list[Tensor | None]:
    """Where the rows of each layer are in the layer below, ``None`` where they are the same."""
    running, rank = step.running, step.rank
    totals = [sum(by_rank) for by_rank in running.counts]
    below = [step.batch.num_tokens, *totals]
    if below[0] == below[-1]:
        return [None] * len(totals)
    # Before the first layer nothing is left out.
    missing = running.left_out[:, running.owned(rank)].cumsum(1).roll(1, 0)
    missing[0] = 0
    missing += running.rows[rank]
    kept = row - missing.view(-1).index_select(0, run)
    by_layer = kept.split([by_rank[rank] for by_rank in running.counts])
    return [
        None if total == before else rows
        for rows, total, before in zip(by_layer, totals, below, strict=False)
    ]


def _window_slots(step: _Step, every_row: Tensor) -> list[Tensor]:
    """Gathered window slots of each layer; ``every_row`` are all ranks' rows of all layers."""
    running, ranks = step.running, step.partition.size
    table, size = step.batch.window_block_table, step.layout.window_block_size
    page, offset = _pages(step, table, size, step.positions, step.requests)
    slots = _slots("window_block_table", page, offset, size, 1)
    counts = [count for by_rank in running.counts for count in by_rank]
    parts = slots.index_select(0, every_row).split(counts)
    firsts = range(0, len(parts), ranks)
    return [pad_rank_major(parts[first : first + ranks], -1) for first in firsts]


def _pages(
    step: _Step, table: Tensor, block_size: int, positions: Tensor, requests: Tensor
) -> tuple[Tensor, Tensor]:
    """Block of each row, -1 where none is mapped, and the token's place within it."""
    num_missing = -(-step.max_seq_len // block_size) - table.shape[1]
    if num_missing > 0:
        table = torch.nn.functional.pad(table, (0, num_missing), value=-1)
    block = positions // block_size
    entry = block.add(requests, alpha=table.shape[1])
    return table.reshape(-1).index_select(0, entry), positions.sub(block, alpha=block_size)


def _slots(name: str, page: Tensor, offset: Tensor, block_size: int, ratio: int) -> Tensor:
    """Slots of rows that store a state, int64: what ``gather_slots`` says, from table lookups.

    Raises:
        ValueError: the block of a row is not mapped.
    """
    if page.shape[0] and int(page.min()) < 0:
        missing = int((page < 0).sum())
        raise ValueError(
            f"{name} expected a block for every query row, got none for {missing} rows; allocate "
            "blocks before planning"
        )
    state = offset if ratio == 1 else offset // ratio
    return state.add(page, alpha=block_size // ratio)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _NewRows:
    """Rows that are not cached, or those of them that close a group: ascending, of all ranks."""

    rows: Tensor
    """``(num_new,)`` int64, in dealt order."""
    cuts: list[int]
    """Where those of each rank start, then their number."""
    positions: Tensor
    pages: Tensor
    """Block of each row, -1 where none is mapped."""
    offsets: Tensor
    """Place within it."""

    def closing(self, running: RunningSegments, ratio: int) -> _NewRows:
        """Those that close a group of ``ratio`` positions."""
        if ratio == 1:
            return self
        chosen = ((self.positions + 1) % ratio == 0).nonzero()[:, 0]
        rows = self.rows.index_select(0, chosen)
        return _NewRows(
            rows=rows,
            cuts=running.cuts(rows),
            positions=self.positions.index_select(0, chosen),
            pages=self.pages.index_select(0, chosen),
            offsets=self.offsets.index_select(0, chosen),
        )

    def of_rank(self, running: RunningSegments, rank: int) -> Tensor:
        """A rank's, counted from its first row."""
        return self.rows[slice(*self.cuts[rank : rank + 2])] - running.rows[rank]


def _new_rows(step: _Step) -> _NewRows:
    cached = cached_tokens(step.batch).index_select(0, step.requests)
    new = (step.positions >= cached).nonzero()[:, 0]
    positions, requests = (part.index_select(0, new) for part in (step.positions, step.requests))
    table, size = step.batch.block_table, step.layout.block_size
    pages, offsets = _pages(step, table, size, positions, requests)
    cuts = step.running.cuts(new)
    return _NewRows(rows=new, cuts=cuts, positions=positions, pages=pages, offsets=offsets)


def _sources(step: _Step) -> list[tuple[dict[int, GroupRows], PairLinks]]:
    """Groups and links of the layers that can be sources: the first ones, one at least."""
    batch, rank, layout = step.batch, step.rank, step.layout
    # There everything from the cached tokens on runs, so all closing rows do.
    num_sources = int((step.bounds <= cached_tokens(batch)).all(1).sum())
    running = step.running.first_layers(num_sources)
    new = _new_rows(step)
    closing = {ratio: new.closing(running, ratio) for ratio in {*layout.ratios, 2}}
    mine = {ratio: rows.of_rank(running, rank) for ratio, rows in closing.items()}
    local = {ratio: running.local_rows(rank, rows) for ratio, rows in mine.items()}
    groups: list[dict[int, GroupRows]] = [{} for _ in running.counts]
    for ratio in layout.ratios:
        by_layer = _group_rows(step, ratio, closing[ratio], local[ratio])
        for layer, one in zip(groups, by_layer, strict=True):
            layer[ratio] = one
    links = link_layers(batch, step.partition, rank, layout.ring_rows, running, mine[2], local[2])
    return list(zip(groups, links, strict=True))


def _group_rows(step: _Step, ratio: int, closing: _NewRows, local: Tensor) -> list[GroupRows]:
    """Groups of each source; ``local`` is where the closing rows are among those of its layer."""
    size, cuts = step.layout.block_size, closing.cuts
    slots = _slots("block_table", closing.pages, closing.offsets, size, ratio)
    counts = [stop - start for start, stop in pairwise(cuts)]
    gathered = pad_rank_major(slots.split(counts), -1)
    # A closing row is the last of its group.
    positions = closing.positions[slice(*cuts[step.rank : step.rank + 2])] - (ratio - 1)
    return [
        GroupRows(closing_rows=rows, positions=positions, num_padded=max(counts), slots=gathered)
        for rows in local.unbind(0)
    ]
