"""The rows that run in each layer of a step: where they write and what they may read.

Without replay and trim all layers run all rows and share one :class:`LayerRows`. Otherwise a layer
runs the rows of a request from a start on that never falls from layer to layer, so its rows are
some of those below it, on the ranks that own them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pcpkit.kernels.slot_gather import gather_slots
from pcpkit.plan.batch import StepBatch, cached_tokens, row_positions, row_requests
from pcpkit.plan.links import PairLinks, link_pairs, no_links
from pcpkit.plan.partition import Partition, drop_rows, rank_major


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
    """Sizes that slots depend on."""

    ratios: tuple[int, ...]
    block_size: int
    window_block_size: int
    ring_rows: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Closings:
    """Groups of one ratio that the step closes, the same at every source."""

    mask: Tensor
    """``(num_tokens,)`` bool, global rows that close one."""
    positions: Tensor
    num_padded: int
    slots: Tensor
    """As in :class:`GroupRows`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shared:
    """What all layers take from: arrays over the rows of the global batch."""

    batch: StepBatch
    rank: int
    ring_rows: int
    positions: Tensor
    row_request: Tensor
    window_slots: Tensor
    closings: dict[int, _Closings]


def plan_layers(
    batch: StepBatch, partition: Partition, rank: int, layout: SlotLayout, starts: Tensor | None
) -> tuple[tuple[LayerRows, ...], Partition]:
    """Rows of every layer, and the partition of the last one's.

    Args:
        batch: the global batch.
        partition: of all rows.
        rank: whose rows.
        layout: sizes of blocks and groups.
        starts: ``(num_reqs, num_layers)`` int32 first position that runs in a layer and lowest
            window position that is read there, ascending; 0 = no bound. ``None``: 0 everywhere.

    Returns:
        One entry a layer, or a single one that stands for all if there are no starts.

    Raises:
        ValueError: a row has no slot in its block table.
    """
    shared = _shared(batch, partition, rank, layout)
    lens, computed = batch.query_lens, batch.num_computed_tokens
    if starts is None or not bool(starts.any()):
        no_bound = torch.zeros_like(computed)
        return (_layer(shared, partition, None, no_bound, int(batch.seq_lens.max()), True),), (
            partition
        )
    layers: list[LayerRows] = []
    # Beyond the end there are no rows to tell starts apart by.
    starts = starts.minimum(batch.seq_lens[:, None])
    below = torch.zeros_like(lens)
    for index, start in enumerate(starts.unbind(1)):
        if index and torch.equal(start, starts[:, index - 1]):
            layers.append(layers[-1])
            continue
        kept, dropped = None, (start - computed).clamp(min=0).minimum(lens)
        if not torch.equal(dropped, below):
            rows_below = partition.rows[rank]
            partition = drop_rows(partition, lens.tolist(), dropped.tolist())
            kept = (partition.restore_index[rows_below] >= 0).nonzero()[:, 0]
            below = dropped
        longest = int(torch.where(dropped < lens, batch.seq_lens, 0).max())
        # Everything from the cached tokens on runs, so all closing rows do.
        closes = bool((start <= cached_tokens(batch)).all())
        layers.append(_layer(shared, partition, kept, start, longest, closes))
    return tuple(layers), partition


def _layer(
    shared: _Shared,
    partition: Partition,
    kept: Tensor | None,
    floor: Tensor,
    max_seq_len: int,
    closes: bool,
) -> LayerRows:
    mine = partition.rows[shared.rank]
    request = shared.row_request[mine]
    slots = shared.window_slots[partition.gather_index]
    groups = {
        ratio: GroupRows(
            closing_rows=one.mask[mine].nonzero()[:, 0],
            positions=one.positions,
            num_padded=one.num_padded,
            slots=one.slots,
        )
        for ratio, one in shared.closings.items()
        if closes
    }
    links = no_links()
    if closes:
        links = link_pairs(shared.batch, partition, shared.rank, shared.ring_rows)
    return LayerRows(
        kept=kept,
        positions=shared.positions[mine],
        row_request=request,
        window_floor=floor[request.long()].int(),
        num_padded_rows=partition.num_padded_rows,
        window_slots=slots.masked_fill_(~partition.write_mask, -1),
        groups=groups,
        links=links,
        max_seq_len=max_seq_len,
    )


def _shared(batch: StepBatch, partition: Partition, rank: int, layout: SlotLayout) -> _Shared:
    positions, request = row_positions(batch), row_requests(batch)
    every = torch.arange(batch.num_tokens)
    is_cached = positions < cached_tokens(batch)[request.long()]

    def slots(table: Tensor, block_size: int, ratio: int, mask: Tensor) -> Tensor:
        return gather_slots(positions, request, every, mask, table[None], [block_size], [ratio])[0]

    all_rows = torch.ones_like(is_cached)
    window_slots = slots(batch.window_block_table, layout.window_block_size, 1, all_rows)
    _require_mapped("window_block_table", window_slots, all_rows)
    closings: dict[int, _Closings] = {}
    for ratio in layout.ratios:
        closing = ((positions + 1) % ratio == 0) & ~is_cached
        states = slots(batch.block_table, layout.block_size, ratio, closing)
        _require_mapped("block_table", states, closing)
        by_rank = [rows[closing[rows]] for rows in partition.rows]
        index, mask, width = rank_major(by_rank)
        closings[ratio] = _Closings(
            mask=closing,
            positions=positions[by_rank[rank]] // ratio * ratio,
            num_padded=width,
            slots=states[index].masked_fill_(~mask, -1),
        )
    return _Shared(
        batch=batch,
        rank=rank,
        ring_rows=layout.ring_rows,
        positions=positions,
        row_request=request,
        window_slots=window_slots,
        closings=closings,
    )


def _require_mapped(name: str, slots: Tensor, mask: Tensor) -> None:
    if bool(((slots < 0) & mask).any()):
        raise ValueError(
            f"{name} expected a block for every query row, got none for "
            f"{int(((slots < 0) & mask).sum())} rows; allocate blocks before planning"
        )
