"""The plan of one step on one rank: all the forward needs besides weights, caches and activations.

``plan_step`` is a pure function of the global batch, the partition and a few sizes; it reads no
device, no process group and no clock, and every rank could compute every other rank's plan. The
forward only executes it.

*Local* arrays describe this rank's rows. *Gathered* arrays describe rank-major rows after an
all-gather and are the same on every rank: their slots are -1 for padding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from pcpkit.plan.batch import StepBatch, check_batch, row_requests, row_token_windows
from pcpkit.plan.links import PairLinks
from pcpkit.plan.partition import Partition, rank_major, whole_batch
from pcpkit.plan.rows import GroupRows, LayerRows, SlotLayout, plan_layers
from pcpkit.plan.trim import Trim, drop_idle_bounds, layer_starts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitsRows:
    """Rows whose logits are wanted."""

    local_rows: Tensor
    """``(num_local,)`` int64, this rank's, among the rows of the last layer."""
    num_padded: int
    """Rows of the rank that has most."""
    restore_index: Tensor
    """``(num_logits,)`` int64, gathered row of each wanted row, in batch order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """Rows, slots and links of one step on one rank."""

    token_ids: Tensor
    """``(num_rows,)`` int64."""
    token_windows: Tensor
    """``(num_rows, max_ngram)`` int64, see ``row_token_windows``."""
    layers: tuple[LayerRows, ...]
    """One a layer; a single one stands for all layers."""
    block_table: Tensor
    window_block_table: Tensor
    logits: LogitsRows

    @property
    def num_rows(self) -> int:
        """Local query rows; may be 0."""
        return self.token_ids.shape[0]

    def layer_rows(self, layer: int) -> LayerRows:
        """The rows that run in a layer."""
        return self.layers[layer if len(self.layers) > 1 else 0]

    def to(self, device: torch.device | str) -> StepPlan:
        """The same plan with every tensor on ``device``."""
        return _to(self, torch.device(device), {})


def _to(value: Any, device: torch.device, moved: dict[int, Any]) -> Any:
    """What layers share is moved once and stays shared; ``moved`` is by identity."""
    if id(value) in moved:
        return moved[id(value)]
    if isinstance(value, Tensor):
        result: Any = value.to(device, non_blocking=True)
    elif isinstance(value, dict):
        result = {key: _to(item, device, moved) for key, item in value.items()}
    elif isinstance(value, tuple):
        result = tuple(_to(item, device, moved) for item in value)
    elif isinstance(value, StepPlan | LayerRows | GroupRows | LogitsRows | PairLinks):
        parts = {one.name: _to(getattr(value, one.name), device, moved) for one in fields(value)}
        result = type(value)(**parts)
    else:
        return value
    moved[id(value)] = result
    return result


def plan_step(
    batch: StepBatch,
    *,
    ratios: tuple[int, ...],
    block_size: int,
    window_block_size: int,
    ring_rows: int,
    partition: Partition | None = None,
    rank: int = 0,
    sliding_window: int | None = None,
    trim: Trim | None = None,
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
        sliding_window: positions a window. Only saves work: requests that are a window past what
            they replayed then run like any other.
        trim: raises the first rows of the layers above the last KV source, where the batch allows.

    Raises:
        ValueError: the batch is inconsistent, a row has no slot in its block table, or logits are
            wanted of a row that does not run in the last layer.
    """
    check_batch(batch)
    partition = partition or whole_batch(batch.query_lens.tolist())
    mine = partition.rows[rank]
    starts = layer_starts(batch, trim)
    if starts is not None and sliding_window is not None:
        starts = drop_idle_bounds(batch, starts, sliding_window)
    layout = SlotLayout(
        ratios=ratios,
        block_size=block_size,
        window_block_size=window_block_size,
        ring_rows=ring_rows,
    )
    layers, last = plan_layers(batch, partition, rank, layout, starts)
    return StepPlan(
        token_ids=batch.token_ids[mine],
        token_windows=row_token_windows(batch)[mine],
        layers=layers,
        block_table=batch.block_table,
        window_block_table=batch.window_block_table,
        logits=_logits_rows(batch, last, rank),
    )


def _logits_rows(batch: StepBatch, partition: Partition, rank: int) -> LogitsRows:
    """Where the wanted rows are among those of the last layer, which ``partition`` deals."""
    ends = batch.query_start_loc[1:].long()
    firsts = (ends - batch.num_logits.long())[row_requests(batch).long()]
    wanted = torch.arange(batch.num_tokens) >= firsts
    local = [wanted[rows].nonzero()[:, 0] for rows in partition.rows]
    index, mask, width = rank_major(
        [rows[chosen] for rows, chosen in zip(partition.rows, local, strict=True)]
    )
    # Sorting the real gathered rows by their global row restores the batch order.
    real = mask.nonzero()[:, 0]
    if len(real) < int(batch.num_logits.sum()):
        raise ValueError(
            f"num_logits expected rows that run in the last layer, got {batch.num_logits.tolist()} "
            "for some that end below; ask for rows from the last layer's start on"
        )
    return LogitsRows(
        local_rows=local[rank],
        num_padded=width,
        restore_index=real[index[real].argsort()],
    )
