"""The StepBatch of a step, entry by entry."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from pcpkit.engine.batching import build_batch
from pcpkit.engine.request import RequestState
from pcpkit.engine.scheduler import ScheduledRows
from pcpkit.engine.tables import RequestTables
from pcpkit.plan.batch import check_batch

from .small_model import request


def _rows(
    token_ids: Sequence[int],
    *,
    start: int,
    num_rows: int,
    logits: str = "none",
    blocks: Sequence[int] = (0,),
    window_blocks: Sequence[int] = (0,),
    ring_block: int = 0,
) -> ScheduledRows:
    tables = RequestTables(
        ring_block=ring_block,
        num_promised_blocks=len(blocks),
        blocks=list(blocks),
        window_blocks=list(window_blocks),
        num_retired=sum(block < 0 for block in window_blocks),
    )
    state = RequestState(
        request=request("r", token_ids, logits=logits),
        token_ids=list(token_ids),
        submitted_at=0.0,
        num_computed_tokens=start,
        tables=tables,
    )
    return ScheduledRows(state=state, start=start, num_rows=num_rows)


def test_requests_lie_one_after_the_other() -> None:
    decode = _rows([9, 8, 7, 6, 5], start=4, num_rows=1, blocks=(3,), window_blocks=(-1, 2))
    chunk = _rows([20, 21, 22, 23], start=1, num_rows=2, blocks=(1, 0), ring_block=1)
    whole = _rows([30, 31, 32], start=0, num_rows=3, logits="all", ring_block=2)
    batch = build_batch([decode, chunk, whole], lookback=3)
    check_batch(batch)
    assert batch.query_start_loc.tolist() == [0, 1, 3, 6]
    assert batch.num_computed_tokens.tolist() == [4, 1, 0]
    assert batch.token_ids.tolist() == [5, 21, 22, 30, 31, 32]
    assert batch.block_table.tolist() == [[3, -1], [1, 0], [0, -1]]
    assert batch.window_block_table.tolist() == [[-1, 2], [0, -1], [0, -1]]
    assert batch.ring_blocks.tolist() == [0, 1, 2]
    # The decode row samples, the chunk does not reach its end, "all" wants every row.
    assert batch.num_logits.tolist() == [1, 0, 3]
    assert batch.token_ids.dtype == batch.lookback_token_ids.dtype == torch.int64
    assert batch.block_table.dtype == batch.query_start_loc.dtype == torch.int32


@pytest.mark.parametrize(
    ("start", "before"),
    [(0, [-1, -1, -1]), (1, [9, -1, -1]), (2, [8, 9, -1]), (3, [7, 8, 9]), (5, [5, 6, 7])],
)
def test_the_ids_before_a_chunk_come_newest_first(start: int, before: list[int]) -> None:
    batch = build_batch([_rows([9, 8, 7, 6, 5, 4, 3], start=start, num_rows=1)], lookback=3)
    assert batch.lookback_token_ids.tolist() == [before]
