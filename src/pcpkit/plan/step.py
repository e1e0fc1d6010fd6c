"""The plan of one step on one rank: all the forward needs besides weights, caches and activations.

``plan_step`` is a pure function of the global batch, the partition and a few sizes; it reads no
device, no process group and no clock, and every rank could compute every other rank's plan. The
forward only executes it.

*Local* arrays describe this rank's rows. *Gathered* arrays describe rank-major rows after an
all-gather and are the same on every rank: their slots are -1 for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pcpkit.plan.batch import QueryRows, StepBatch, check_batch, query_rows, row_token_windows
from pcpkit.plan.links import PairLinks
from pcpkit.plan.partition import Partition, pad_rank_major, whole_batch
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
        """The same plan with every tensor on ``device``, there contiguous and copied at once.

        What layers share stays shared. A plan that is there already is returned as it is.
        """
        device = torch.device(device)
        if self.token_ids.device == device:
            return self
        tensors: dict[int, Tensor] = {}
        _collect(self, tensors)
        copies = _packed_copies(list(tensors.values()), device)
        return _rebuilt(self, dict(zip(tensors, copies, strict=True)))


_PARTS = (StepPlan, LayerRows, GroupRows, LogitsRows, PairLinks)
"""What a plan consists of, besides tensors, numbers, tuples and dictionaries."""


def _collect(value: Any, tensors: dict[int, Tensor]) -> None:
    """Every tensor of a plan once, by identity."""
    if isinstance(value, Tensor):
        tensors[id(value)] = value
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, tensors)
    elif isinstance(value, tuple):
        # Layers follow those that they share their rows with.
        for item, before in zip(value, (None, *value), strict=False):
            if item is not before:
                _collect(item, tensors)
    elif isinstance(value, _PARTS):
        for name in value.__slots__:
            _collect(getattr(value, name), tensors)


def _rebuilt(value: Any, moved: dict[int, Any]) -> Any:
    """A copy of a plan; ``moved`` has its tensors, by the identity of those they replace."""
    if id(value) in moved:
        return moved[id(value)]
    if isinstance(value, dict):
        result: Any = {key: _rebuilt(item, moved) for key, item in value.items()}
    elif isinstance(value, tuple):
        result = tuple([_rebuilt(item, moved) for item in value])
    elif isinstance(value, _PARTS):
        parts = {name: _rebuilt(getattr(value, name), moved) for name in value.__slots__}
        result = type(value)(**parts)
    else:
        return value
    moved[id(value)] = result
    return result


_ALIGNMENT = 16
"""Bytes: kernels are compiled for pointers that are multiples of it, and again for others."""


def _packed_copies(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Contiguous copies on ``device``, parts of one buffer that is copied at once.

    A plan has many small tensors, and to copy each would take longer than to plan them. Those of a
    dtype stand together, each from a multiple of ``_ALIGNMENT`` bytes on.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    source = tensors[0].device
    sections: list[list[Tensor]] = []
    rooms: list[list[int]] = []
    for dtype, members in by_dtype.items():
        unit = _ALIGNMENT // dtype.itemsize
        fillers = [torch.zeros(count, dtype=dtype, device=source) for count in range(unit)]
        section, room = list[Tensor](), list[int]()
        for index in members:
            tensor, padding = tensors[index], -tensors[index].numel() % unit
            section.append(tensor if tensor.dim() == 1 else tensor.reshape(-1))
            if padding:
                section.append(fillers[padding])
            room.append(tensor.numel() + padding)
        sections.append(section)
        rooms.append(room)
    num_bytes = [sum(room) * dtype.itemsize for dtype, room in zip(by_dtype, rooms, strict=True)]
    # From pinned memory the copy runs beside the host, and torch keeps the memory until it is done.
    pinned = source.type == "cpu" and device.type == "cuda"
    staged = torch.empty(sum(num_bytes), dtype=torch.uint8, device=source, pin_memory=pinned)
    for dtype, section, part in zip(by_dtype, sections, staged.split(num_bytes), strict=True):
        torch.cat(section, out=part.view(dtype))
    buffer = staged.to(device, non_blocking=pinned)
    copies = list(tensors)
    for dtype, room, part in zip(by_dtype, rooms, buffer.split(num_bytes), strict=True):
        for index, copy in zip(by_dtype[dtype], part.view(dtype).split(room), strict=True):
            tensor = tensors[index]
            own = copy if copy.numel() == tensor.numel() else copy[: tensor.numel()]
            copies[index] = own if tensor.dim() == 1 else own.view(tensor.shape)
    return copies


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
    rows = query_rows(batch)
    layers, last_rows = plan_layers(batch, rows, partition, rank, layout, starts)
    return StepPlan(
        token_ids=batch.token_ids.index_select(0, mine),
        token_windows=row_token_windows(batch, rows).index_select(0, mine),
        layers=layers,
        block_table=batch.block_table,
        window_block_table=batch.window_block_table,
        logits=_logits_rows(batch, rows, last_rows, rank),
    )


def _logits_rows(
    batch: StepBatch, rows: QueryRows, last_rows: Sequence[Tensor], rank: int
) -> LogitsRows:
    """Where the wanted rows are among those of the last layer: ``last_rows``, by rank."""
    firsts = rows.seq_lens - batch.num_logits
    wanted = rows.positions >= firsts.index_select(0, rows.requests)
    local = [wanted.index_select(0, owned).nonzero()[:, 0] for owned in last_rows]
    sent = [owned.index_select(0, part) for owned, part in zip(last_rows, local, strict=True)]
    counts = [part.shape[0] for part in local]
    num_logits = batch.num_logits.tolist()
    if sum(counts) < sum(num_logits):
        raise ValueError(
            f"num_logits expected rows that run in the last layer, got {num_logits} "
            "for some that end below; ask for rows from the last layer's start on"
        )
    # Sorting the real gathered rows by their global row restores the batch order.
    gathered = pad_rank_major(sent, -1)
    real = (gathered >= 0).nonzero()[:, 0]
    return LogitsRows(
        local_rows=local[rank],
        num_padded=max(counts),
        restore_index=real[gathered[real].argsort()],
    )
