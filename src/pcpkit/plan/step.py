"""The plan of one step on one rank: all the forward needs besides weights, caches and activations.

``plan_step`` is a pure function of the global batch, the partition and a few sizes; it reads no
device, no process group and no clock, and every rank could compute every other rank's plan. The
forward only executes it.

*Local* arrays describe this rank's rows. *Gathered* arrays describe rank-major rows after an
all-gather and are the same on every rank: their slots are -1 for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from pcpkit.kernels.slot_gather import gather_slots
from pcpkit.plan.batch import (
    StepBatch,
    check_batch,
    row_positions,
    row_requests,
    row_token_windows,
)
from pcpkit.plan.links import PairLinks, link_pairs
from pcpkit.plan.partition import Partition, whole_batch


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
    max_visible: int
    """Largest number of compressed positions any row of the step sees."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitsRows:
    """Rows whose logits are wanted."""

    local_rows: Tensor
    """``(num_local,)`` int64, this rank's."""
    num_padded: int
    """Rows of the rank that has most."""
    restore_index: Tensor
    """``(num_logits,)`` int64, gathered row of each wanted row, in batch order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """Rows, slots and links of one step on one rank."""

    token_ids: Tensor
    token_windows: Tensor
    positions: Tensor
    row_request: Tensor
    window_floor: Tensor
    """``(num_rows,)`` int32, lowest window position a row may read."""
    num_padded_rows: int
    """Rows of the longest rank."""
    window_slots: Tensor
    """``(size * num_padded_rows,)`` int64 gathered, slot of each row's window record."""
    groups: dict[int, GroupRows]
    """By compress ratio."""
    links: PairLinks
    block_table: Tensor
    window_block_table: Tensor
    logits: LogitsRows

    @property
    def num_rows(self) -> int:
        """Local query rows; may be 0."""
        return self.token_ids.shape[0]

    def num_visible(self, ratio: int) -> Tensor:
        """Visible compressed positions of every row, ``(num_rows,)`` int32: ``(P + 1) // r``."""
        return ((self.positions + 1) // ratio).int()

    def to(self, device: torch.device | str) -> StepPlan:
        """The same plan with every tensor on ``device``."""
        return _to(self, torch.device(device))


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, StepPlan | GroupRows | LogitsRows | PairLinks):
        moved = {field.name: _to(getattr(value, field.name), device) for field in fields(value)}
        return type(value)(**moved)
    return value


def plan_step(
    batch: StepBatch,
    *,
    ratios: tuple[int, ...],
    block_size: int,
    window_block_size: int,
    ring_rows: int,
    partition: Partition | None = None,
    rank: int = 0,
) -> StepPlan:
    """Plan one step for one rank.

    Args:
        batch: the global batch.
        ratios: compress ratios of the model's KV sources.
        block_size: tokens a block of compressed KV and index keys.
        window_block_size: tokens a block of window KV.
        ring_rows: rows of a ring block.
        partition: rows of every PCP rank; default all on one, in batch order.
        rank: this rank's index in the PCP group.

    Raises:
        ValueError: the batch is inconsistent, or a row has no slot in its block table.
    """
    check_batch(batch)
    partition = partition or whole_batch(batch.query_lens.tolist())
    positions, request = row_positions(batch), row_requests(batch)
    mine = partition.rows[rank]

    def slots(table: Tensor, size: int, ratio: int, index: Tensor, mask: Tensor) -> Tensor:
        return gather_slots(positions, request, index, mask, table[None], [size], [ratio])[0]

    window_slots = slots(
        batch.window_block_table,
        window_block_size,
        1,
        partition.gather_index,
        partition.write_mask,
    )
    _require_mapped("window_block_table", window_slots, partition.write_mask)
    groups = {}
    for ratio in ratios:
        closing = [rows[(positions[rows] + 1) % ratio == 0] for rows in partition.rows]
        index, mask, width = _rank_major(closing)
        group_slots = slots(batch.block_table, block_size, ratio, index, mask)
        _require_mapped("block_table", group_slots, mask)
        groups[ratio] = GroupRows(
            closing_rows=((positions[mine] + 1) % ratio == 0).nonzero()[:, 0],
            positions=positions[closing[rank]] // ratio * ratio,
            num_padded=width,
            slots=group_slots,
            max_visible=int(batch.seq_lens.max()) // ratio,
        )
    return StepPlan(
        token_ids=batch.token_ids[mine],
        token_windows=row_token_windows(batch)[mine],
        positions=positions[mine],
        row_request=request[mine],
        window_floor=torch.zeros(len(mine), dtype=torch.int32),
        num_padded_rows=partition.num_padded_rows,
        window_slots=window_slots,
        groups=groups,
        links=link_pairs(batch, partition, rank, ring_rows),
        block_table=batch.block_table,
        window_block_table=batch.window_block_table,
        logits=_logits_rows(batch, partition, rank, request),
    )


def _logits_rows(batch: StepBatch, partition: Partition, rank: int, request: Tensor) -> LogitsRows:
    ends = batch.query_start_loc[1:].long()
    wanted = torch.arange(batch.num_tokens) >= (ends - batch.num_logits.long())[request.long()]
    local = [wanted[rows].nonzero()[:, 0] for rows in partition.rows]
    index, mask, width = _rank_major(
        [rows[chosen] for rows, chosen in zip(partition.rows, local, strict=True)]
    )
    # Sorting the real gathered rows by their global row restores the batch order.
    real = mask.nonzero()[:, 0]
    return LogitsRows(
        local_rows=local[rank],
        num_padded=width,
        restore_index=real[index[real].argsort()],
    )


def _rank_major(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, int]:
    """Rows of all ranks padded to the longest with row 0, a mask of the real ones, the width."""
    width = max(len(part) for part in rows)
    index = torch.zeros(len(rows) * width, dtype=torch.int64)
    mask = torch.zeros(len(rows) * width, dtype=torch.bool)
    for owner, part in enumerate(rows):
        index[owner * width : owner * width + len(part)] = part
        mask[owner * width : owner * width + len(part)] = True
    return index, mask, width


def _require_mapped(name: str, slots: Tensor, mask: Tensor) -> None:
    if bool(((slots < 0) & mask).any()):
        raise ValueError(
            f"{name} expected a block for every query row, got none for "
            f"{int(((slots < 0) & mask).sum())} rows; allocate blocks before planning"
        )
