"""The StepBatch of a step, entry by entry."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from pcpkit.cache.replay import ReplayPlan
from pcpkit.engine.batching import build_batch, snapshot_moves
from pcpkit.engine.request import RequestState, SnapshotPoint, Stay
from pcpkit.engine.runner import SnapshotMove
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
    replay: ReplayPlan | None = None,
    restore: SnapshotPoint | None = None,
    captures: tuple[SnapshotPoint, ...] = (),
) -> ScheduledRows:
    tables = RequestTables(
        ring_block=ring_block,
        blocks=list(blocks),
        window_blocks=list(window_blocks),
        num_retired=sum(block < 0 for block in window_blocks),
    )
    state = RequestState(
        request=request("r", token_ids, logits=logits),
        token_ids=list(token_ids),
        submitted_at=0.0,
        num_computed_tokens=start,
        stay=Stay(
            tables=tables,
            replay=ReplayPlan.cold(3) if replay is None else replay,
            num_prefill_tokens=len(token_ids),
            num_published=0,
            restore=restore,
            captures=captures,
        ),
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


def _replay(cached: int, *starts: int, restore_at: int = 0) -> ReplayPlan:
    return ReplayPlan(
        num_cached_tokens=cached,
        layer_starts=starts,
        exact=True,
        restore_at=restore_at,
        capture=0 < restore_at < cached,
    )


def test_a_batch_carries_the_replay_of_each_request() -> None:
    cold = _rows([9, 8, 7], start=0, num_rows=2)
    assert build_batch([cold], lookback=3).replay is None
    hit = _rows(range(20, 32), start=2, num_rows=3, replay=_replay(8, 2, 4, 6))
    batch = build_batch([cold, hit], lookback=3)
    check_batch(batch)
    assert batch.replay is not None
    assert batch.replay.num_cached_tokens.tolist() == [0, 8]
    assert batch.replay.layer_starts.tolist() == [[0, 0, 0], [2, 4, 6]]
    # Replayed rows see the ids before them, which this request never runs.
    assert batch.lookback_token_ids.tolist() == [[-1, -1, -1], [21, 20, -1]]
    # A request that samples keeps its replay.
    decoding = _rows(range(20, 32), start=11, num_rows=1, replay=_replay(8, 2, 4, 6))
    later = build_batch([decoding], lookback=3).replay
    assert later is not None
    assert later.num_cached_tokens.tolist() == [8]


def test_only_prefills_that_nobody_looks_at_may_be_trimmed() -> None:
    plain = _rows([9, 8, 7], start=0, num_rows=3, logits="last")
    every = _rows([9, 8, 7], start=0, num_rows=3, logits="all")
    point = SnapshotPoint(key=b"k", num_tokens=2)
    keeper = _rows([9, 8, 7], start=0, num_rows=1, captures=(point,))
    decode = _rows([9, 8, 7], start=3, num_rows=0)
    rows = [plain, every, keeper]
    assert build_batch(rows, lookback=3).may_trim is None
    batch = build_batch(rows, lookback=3, trims=True)
    check_batch(batch)
    assert batch.may_trim is not None
    assert batch.may_trim.tolist() == [True, False, False]
    assert not decode.may_trim
    assert build_batch([every], lookback=3, trims=True).may_trim is None


def test_snapshots_move_in_the_first_step_and_when_their_rows_are_there() -> None:
    point = SnapshotPoint(key=b"k", num_tokens=8)
    restored = _rows(
        range(20), start=8, num_rows=2, replay=_replay(8, 5, 5, 5, restore_at=8), restore=point
    )
    early = _rows(range(20), start=0, num_rows=7, captures=(point,))
    just = _rows(range(20), start=0, num_rows=8, captures=(point,))
    past = _rows(range(20), start=3, num_rows=9, captures=(point,))
    restores, captures = snapshot_moves([early, restored, just, past])
    assert restores == (SnapshotMove(request=1, key=b"k", num_tokens=8),)
    assert [move.request for move in captures] == [2, 3]


@pytest.mark.parametrize(("num_rows", "replayed", "is_kept"), [(3, 3, False), (9, 4, True)])
def test_a_snapshot_within_the_hit_is_restored_where_it_stands(
    num_rows: int, replayed: int, is_kept: bool
) -> None:
    """One at 8 of 12 adopted tokens: rows from 8 on, and the next snapshot at 12."""
    rows = _rows(
        range(20),
        start=8,
        num_rows=num_rows,
        blocks=(0, 1, 2, 3, 4),
        window_blocks=(-1, 0, 1, 2, 3),
        replay=_replay(12, 5, 5, 5, restore_at=8),
        restore=SnapshotPoint(key=b"near", num_tokens=8),
        captures=(SnapshotPoint(key=b"end", num_tokens=12),),
    )
    batch = build_batch([rows], lookback=3)
    check_batch(batch)
    assert batch.replay is not None
    assert batch.replay.num_cached_tokens.tolist() == [12]
    assert batch.replay.layer_starts.tolist() == [[5, 5, 5]]
    assert batch.num_computed_tokens.tolist() == [8]
    assert rows.num_replayed_rows == replayed
    restores, captures = snapshot_moves([rows])
    assert restores == (SnapshotMove(request=0, key=b"near", num_tokens=8),)
    kept = SnapshotMove(request=0, key=b"end", num_tokens=12)
    assert captures == ((kept,) if is_kept else ())


def test_a_resumed_request_keeps_logits_once() -> None:
    rows = _rows(range(20, 30), start=2, num_rows=5, logits="all")
    assert rows.num_logits == 5
    rows.state.num_logits_kept = 4
    assert rows.num_logits == 3  # positions 4, 5, 6
    rows.state.num_logits_kept = 9
    assert rows.num_logits == 0
