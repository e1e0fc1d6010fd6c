"""From scheduled rows to the StepBatch, the only thing that planning sees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pcpkit.engine.scheduler import ScheduledRows
from pcpkit.engine.tables import NO_BLOCK
from pcpkit.plan.batch import StepBatch


def build_batch(scheduled: Sequence[ScheduledRows], lookback: int) -> StepBatch:
    """Batch of one step, requests in the order of `scheduled`.

    Args:
        scheduled: rows of each request, blocks mapped.
        lookback: ids before the first row that the Engram hash needs, `max_ngram - 1`.
    """
    tokens = [token for rows in scheduled for token in rows.token_ids]
    starts = accumulate((rows.num_rows for rows in scheduled), initial=0)
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
    )


def _ids_before(rows: ScheduledRows, lookback: int) -> list[int]:
    """The `lookback` ids before the first row, newest first, -1 before the start."""
    known = rows.state.token_ids[max(rows.start - lookback, 0) : rows.start][::-1]
    return known + [-1] * (lookback - len(known))


def _table(lists: Sequence[Sequence[int]]) -> Tensor:
    width = max(len(blocks) for blocks in lists)
    return _int32([[*blocks, *[NO_BLOCK] * (width - len(blocks))] for blocks in lists])


def _int32(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
