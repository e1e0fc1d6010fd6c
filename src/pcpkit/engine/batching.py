"""From scheduled rows to the StepBatch, the only thing that planning sees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pcpkit.cache.blocks import NULL_BLOCK
from pcpkit.engine.runner import SnapshotMove
from pcpkit.engine.scheduler import ScheduledRows
from pcpkit.plan.batch import BatchReplay, StepBatch


def build_batch(
    scheduled: Sequence[ScheduledRows], lookback: int, *, trims: bool = False
) -> StepBatch:
    """Batch of one step, requests in the order of `scheduled`.

    Args:
        scheduled: rows of each request, blocks mapped.
        lookback: ids before the first row that the Engram hash needs, `max_ngram - 1`.
        trims: whether rows may be trimmed at all.
    """
    tokens = [token for rows in scheduled for token in rows.token_ids]
    starts = accumulate((rows.num_rows for rows in scheduled), initial=0)
    may_trim = [rows.may_trim for rows in scheduled]
    return StepBatch(
        query_start_loc=_int32(list(starts)),
        num_computed_tokens=_int32([rows.start for rows in scheduled]),
        is_prefilling=torch.tensor([rows.state.is_prefilling for rows in scheduled]),
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        lookback_token_ids=torch.tensor(
            [_ids_before(rows, lookback) for rows in scheduled], dtype=torch.int64
        ),
        block_table=_table([rows.tables.blocks for rows in scheduled]),
        window_block_table=_table([rows.tables.window_blocks for rows in scheduled]),
        ring_blocks=_int32([rows.tables.ring_block for rows in scheduled]),
        num_logits=_int32([rows.num_logits for rows in scheduled]),
        replay=_replay(scheduled),
        may_trim=torch.tensor(may_trim) if trims and any(may_trim) else None,
    )


def snapshot_moves(
    scheduled: Sequence[ScheduledRows],
) -> tuple[tuple[SnapshotMove, ...], tuple[SnapshotMove, ...]]:
    """Snapshots to copy back before the step, and those to keep after it."""
    restores = tuple(
        SnapshotMove(request=index, key=point.key, num_tokens=point.num_tokens)
        for index, rows in enumerate(scheduled)
        if (point := rows.stay.restore) is not None
    )
    captures = tuple(
        SnapshotMove(request=index, key=point.key, num_tokens=point.num_tokens)
        for index, rows in enumerate(scheduled)
        for point in rows.captures
    )
    return restores, captures


def _replay(scheduled: Sequence[ScheduledRows]) -> BatchReplay | None:
    plans = [rows.stay.replay for rows in scheduled]
    if not any(plan.num_cached_tokens for plan in plans):
        return None
    return BatchReplay(
        num_cached_tokens=_int32([plan.num_cached_tokens for plan in plans]),
        layer_starts=_int32([plan.layer_starts for plan in plans]),
    )


def _ids_before(rows: ScheduledRows, lookback: int) -> list[int]:
    """The `lookback` ids before the first row, newest first, -1 before the start."""
    known = rows.state.token_ids[max(rows.start - lookback, 0) : rows.start][::-1]
    return known + [-1] * (lookback - len(known))


def _table(lists: Sequence[Sequence[int]]) -> Tensor:
    width = max(len(blocks) for blocks in lists)
    return _int32([[*blocks, *[NULL_BLOCK] * (width - len(blocks))] for blocks in lists])


def _int32(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
