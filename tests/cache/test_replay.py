"""Replay plans: the exact cone against its definition, the bounded rule against its examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.cache.replay import (
    BoundedReplay,
    ExactReplay,
    NoReplay,
    ReplayPlan,
    ReplayPolicy,
    ReplayShape,
    SnapshotReplay,
    row_layers,
    rows_to_compute,
)

POLICIES: list[ReplayPolicy] = [NoReplay(), BoundedReplay(), ExactReplay(), SnapshotReplay()]
SHAPE = ReplayShape(num_layers=3, sliding_window=8, block_size=4)


def _plan(policy: ReplayPolicy, hit: int, shape: ReplayShape = SHAPE) -> ReplayPlan:
    return policy.plan(hit, shape, snapshot_tokens=0, blocks_exact=True)


@st.composite
def _hits(draw: st.DrawFn) -> tuple[int, ReplayShape]:
    shape = ReplayShape(
        num_layers=draw(st.integers(1, 5)),
        sliding_window=draw(st.integers(1, 9)),
        block_size=draw(st.sampled_from([2, 4, 6])),
    )
    return draw(st.integers(0, 16)) * shape.block_size, shape


@st.composite
def _snapshots(draw: st.DrawFn) -> tuple[int, int, ReplayShape]:
    """Hit, and where in it the last snapshot stands."""
    hit, shape = draw(_hits().filter(lambda case: case[0] > 0))
    return hit, draw(st.integers(1, hit // shape.block_size)) * shape.block_size, shape


def _rows_are_right(plan: ReplayPlan, starts: tuple[int, ...], window: int, end: int) -> bool:
    """Whether every row from the hit on gets its cold output in every layer.

    By the definition, row by row: a layer that runs row p writes its record, which is right if the
    layer before gave p its right output (the embedding always does). The output is right if the
    records of p - W + 1 .. p were all read, none being below the start of the layer, and right.
    Records [S - W + 1, S) are right from the outset if the plan restores them, and no row below S
    runs then.
    """
    hit, stored = plan.num_cached_tokens, plan.restore_at
    restored = range(max(stored - window + 1, 0), stored)
    right = set(range(end))
    for start in starts:
        first = max(start, stored)
        records = (right & set(range(first, end))) | set(restored)
        right = {
            row
            for row in range(first, end)
            if row in records
            and all(
                at >= start and at in records for at in range(max(row - window + 1, 0), row + 1)
            )
        }
        if not set(range(hit, end)) <= right:
            return False
    return True


@given(case=_hits())
def test_the_exact_cone_is_sufficient_and_minimal(case: tuple[int, ReplayShape]) -> None:
    hit, shape = case
    plan = _plan(ExactReplay(), hit, shape)
    end = hit + shape.sliding_window + 2
    starts = plan.layer_starts
    assert plan.exact
    assert _rows_are_right(plan, starts, shape.sliding_window, end)
    if not plan.num_cached_tokens:
        return
    assert plan.num_cached_tokens == hit
    for layer, start in enumerate(starts):
        later = tuple(max(start + 1, value) for value in starts[layer:])
        shrunk = (*starts[:layer], *later)
        if start < hit:
            assert not _rows_are_right(plan, shrunk, shape.sliding_window, end), f"layer {layer}"


@given(case=_hits())
def test_an_exact_hit_is_cold_only_where_no_layer_gains(case: tuple[int, ReplayShape]) -> None:
    hit, shape = case
    plan = _plan(ExactReplay(), hit, shape)
    needed = set(range(max(hit - shape.sliding_window + 1, 0), hit))  # records of the last layer
    lowest = [min(needed, default=hit)]
    for _ in range(shape.num_layers - 1):  # downwards: the rows whose output those records need
        needed = {
            at for row in needed for at in range(max(row - shape.sliding_window + 1, 0), row + 1)
        }
        lowest.append(min(needed, default=hit))
    if any(lowest):
        assert plan.layer_starts == tuple(reversed(lowest))
    else:
        assert plan == ReplayPlan.cold(shape.num_layers)


@given(case=_hits().filter(lambda case: case[0] > 0), suffix=st.integers(1, 20))
def test_snapshots_restore_what_the_first_rows_read(
    case: tuple[int, ReplayShape], suffix: int
) -> None:
    hit, shape = case
    plan = SnapshotReplay().plan(hit, shape, snapshot_tokens=hit, blocks_exact=True)
    assert plan.exact
    assert not plan.capture
    assert _rows_are_right(plan, plan.layer_starts, shape.sliding_window, hit + suffix)
    assert plan.start == plan.restore_at == hit
    assert rows_to_compute(plan, hit + suffix) == suffix
    assert row_layers(plan, hit + suffix) == suffix * shape.num_layers
    assert plan.num_replayed_rows == 0
    first_read = max(hit - shape.sliding_window + 1, 0)
    assert plan.layer_starts == (first_read,) * shape.num_layers


@given(case=_snapshots(), suffix=st.integers(1, 20))
def test_a_snapshot_before_the_end_gives_the_rest_of_the_hit(
    case: tuple[int, int, ReplayShape], suffix: int
) -> None:
    """All of the hit is adopted, and the rows between do what the cone would, for less."""
    hit, stored, shape = case
    plan = SnapshotReplay().plan(hit, shape, snapshot_tokens=stored, blocks_exact=True)
    cone = _plan(SnapshotReplay(), hit, shape)
    total, window = hit + suffix, shape.sliding_window
    between = (hit - stored) * shape.num_layers
    restored = (hit - stored + suffix) * shape.num_layers
    assert row_layers(plan, total) == min(restored, row_layers(cone, total))
    if restored > row_layers(cone, total):
        assert plan == cone
        return
    assert (plan.num_cached_tokens, plan.restore_at, plan.start) == (hit, stored, stored)
    assert plan.num_replayed_rows == hit - stored
    assert rows_to_compute(plan, total) == hit - stored + suffix
    assert row_layers(plan, total) == between + suffix * shape.num_layers
    assert plan.capture == (stored < hit)
    assert plan.exact
    assert _rows_are_right(plan, plan.layer_starts, window, total)
    first = plan.layer_starts[0]
    if first < stored and shape.num_layers > 1 and hit - stored < window:
        # Row S reads the lowest record of the snapshot, and row H reads what layer 1 made of row S.
        assert not _rows_are_right(plan, (first + 1,) * shape.num_layers, window, total)


@given(case=_hits(), suffix=st.integers(1, 20))
def test_no_policy_does_more_than_a_cold_run(case: tuple[int, ReplayShape], suffix: int) -> None:
    hit, shape = case
    total = hit + suffix
    cold = ReplayPlan.cold(shape.num_layers)
    assert row_layers(cold, total) == total * shape.num_layers
    for policy in POLICIES:
        plan = _plan(policy, hit, shape)
        assert plan.num_cached_tokens in (0, hit)
        assert rows_to_compute(plan, total) <= total
        ran = [range(max(start, plan.start), total) for start in plan.layer_starts]
        assert row_layers(plan, total) == sum(len(rows) for rows in ran)
        assert plan.start + rows_to_compute(plan, total) == total
        if plan != cold:
            assert row_layers(plan, total) < row_layers(cold, total)


@given(case=_hits())
def test_bounded_starts_one_window_before_the_end(case: tuple[int, ReplayShape]) -> None:
    hit, shape = case
    window = shape.sliding_window
    plan = _plan(BoundedReplay(), hit, shape)
    if hit <= window:
        assert plan == ReplayPlan.cold(shape.num_layers)
        return
    assert plan.num_cached_tokens == hit
    assert plan.layer_starts == (hit - window,) * shape.num_layers
    assert (plan.exact, plan.restore_at, plan.capture) == (False, 0, False)
    assert plan.num_replayed_rows == window
    deep = shape.num_layers > 1 and window > 2
    if deep:  # it says that it is approximate because it is
        assert not _rows_are_right(plan, plan.layer_starts, window, hit + 2)


@pytest.mark.parametrize(
    ("num_tokens", "hit", "adopted", "start", "rows"),
    [
        (300, 256, 256, 128, 172),
        (300, 128, 0, 0, 300),
        (300, 192, 192, 64, 236),
        (256, 192, 192, 64, 192),
        (257, 256, 256, 128, 129),
        (1152, 1024, 1024, 896, 256),
    ],
)
def test_worked_examples_of_the_bounded_rule(
    num_tokens: int, hit: int, adopted: int, start: int, rows: int
) -> None:
    shape = ReplayShape(num_layers=40, sliding_window=128, block_size=64)
    plan = _plan(BoundedReplay(), hit, shape)
    assert (plan.num_cached_tokens, plan.start) == (adopted, start)
    assert rows_to_compute(plan, num_tokens) == rows


@pytest.mark.parametrize(("hit", "adopted", "rows"), [(4, 0, 20), (8, 0, 20), (12, 12, 16)])
def test_a_hit_within_the_window_is_dropped(hit: int, adopted: int, rows: int) -> None:
    """B015."""
    plan = _plan(BoundedReplay(), hit)
    assert (plan.num_cached_tokens, rows_to_compute(plan, 20)) == (adopted, rows)


def test_the_cone_of_the_released_model() -> None:
    """5,081 positions before the end for all 40 layers (127 * 40, and the row itself)."""
    shape = ReplayShape(num_layers=40, sliding_window=128, block_size=64)
    plan = _plan(ExactReplay(), 8192, shape)
    assert plan.start == 8192 - 127 * 40
    assert plan.layer_starts[-1] == 8192 - 127
    short = _plan(ExactReplay(), 1024, shape)
    assert short.layer_starts[:33] == (*(0,) * 32, 1024 - 127 * 8)


def test_the_first_use_of_a_hit_captures_and_a_worthless_one_does_not() -> None:
    plan = _plan(SnapshotReplay(), 12)
    assert plan == replace(_plan(ExactReplay(), 12), capture=True)
    assert plan.capture
    assert not _plan(ExactReplay(), 12).capture
    assert _plan(SnapshotReplay(), 4) == ReplayPlan.cold(3)
    restored = SnapshotReplay().plan(4, SHAPE, snapshot_tokens=4, blocks_exact=True)
    assert (restored.num_cached_tokens, restored.start, restored.restore_at) == (4, 4, 4)
    exact = ExactReplay().plan(12, SHAPE, snapshot_tokens=12, blocks_exact=True)
    assert not exact.restore_at


@pytest.mark.parametrize(
    ("stored", "start", "starts"),
    [(4, 39, (39, 46, 53)), (44, 39, (39, 46, 53)), (48, 48, (41,) * 3), (56, 56, (49,) * 3)],
)
def test_a_far_snapshot_is_worse_than_the_cone(
    stored: int, start: int, starts: tuple[int, ...]
) -> None:
    """Before 60: 42 row-layers of the cone are as many as 14 rows in 3 layers."""
    plan = SnapshotReplay().plan(60, SHAPE, snapshot_tokens=stored, blocks_exact=True)
    assert (plan.num_cached_tokens, plan.start, plan.layer_starts) == (60, start, starts)
    assert plan.capture


def test_of_equal_work_the_snapshot_is_taken() -> None:
    shape = ReplayShape(num_layers=3, sliding_window=5, block_size=8)
    plan = SnapshotReplay().plan(24, shape, snapshot_tokens=16, blocks_exact=True)
    assert row_layers(plan, 25) == row_layers(_plan(ExactReplay(), 24, shape), 25)
    assert (plan.restore_at, plan.capture) == (16, True)


@pytest.mark.parametrize("hit", [0, 4, 64])
def test_no_replay_adopts_nothing(hit: int) -> None:
    plan = NoReplay().plan(hit, SHAPE, snapshot_tokens=hit, blocks_exact=False)
    assert plan == ReplayPlan.cold(3)
    assert (plan.start, plan.layer_starts, plan.exact) == (0, (0, 0, 0), True)


def test_only_the_bounded_rule_takes_approximate_blocks() -> None:
    assert [policy.exact_only for policy in POLICIES] == [True, False, True, True]
    assert [policy.uses_snapshots for policy in POLICIES] == [False, False, False, True]
    bounded = BoundedReplay().plan(12, SHAPE, snapshot_tokens=0, blocks_exact=False)
    assert bounded.num_cached_tokens == 12
    for policy in (ExactReplay(), SnapshotReplay()):
        for stored in (0, 8, 12):
            with pytest.raises(ValueError, match="blocks_exact expected True"):
                policy.plan(12, SHAPE, snapshot_tokens=stored, blocks_exact=False)
        policy.plan(0, SHAPE, snapshot_tokens=0, blocks_exact=False)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("hit", [-4, 2, 13])
def test_unaligned_hits_are_refused(policy: ReplayPolicy, hit: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of block_size .4., got {hit}"):
        _plan(policy, hit)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize(("hit", "stored"), [(12, -4), (12, 6), (12, 16), (0, 4)])
def test_snapshots_outside_the_hit_are_refused(policy: ReplayPolicy, hit: int, stored: int) -> None:
    problem = f"snapshot_tokens expected a multiple of block_size .4. up to {hit}, got {stored}"
    with pytest.raises(ValueError, match=problem):
        policy.plan(hit, SHAPE, snapshot_tokens=stored, blocks_exact=True)


@pytest.mark.parametrize(
    ("num_layers", "sliding_window", "block_size", "message"),
    [
        (0, 8, 4, "num_layers"),
        (3, 0, 4, "sliding_window"),
        (3, 8, 0, "block_size"),
        (3, 8, 3, "block_size"),
    ],
)
def test_bad_shapes_are_refused(
    num_layers: int, sliding_window: int, block_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"{message} expected"):
        ReplayShape(num_layers=num_layers, sliding_window=sliding_window, block_size=block_size)


@pytest.mark.parametrize(
    ("cached", "starts", "exact", "restore_at", "capture", "message"),
    [
        (8, (), True, 0, False, "layer_starts expected positions"),
        (8, (-1, 4), True, 0, False, "layer_starts expected positions"),
        (8, (4, 9), True, 0, False, "layer_starts expected positions in 0 .. 8"),
        (8, (4, 2, 8), True, 0, False, "never to fall"),
        (8, (4, 4), True, 8, True, "capture expected False where 8 are restored"),
        (8, (4, 4), True, -4, False, "restore_at expected 0 .. 8, got -4"),
        (8, (4, 4), True, 12, False, "restore_at expected 0 .. 8, got 12"),
        (8, (2, 3), True, 4, True, "layer_starts expected one position up to 4 in all layers"),
        (8, (5, 5), True, 4, True, "layer_starts expected one position up to 4 in all layers"),
        (0, (0, 1), True, 0, False, "layer_starts expected positions in 0 .. 0"),
        (0, (0, 0), False, 0, False, "num_cached_tokens expected > 0"),
        (0, (0, 0), True, 4, False, "restore_at expected 0 .. 0, got 4"),
        (0, (0, 0), True, 0, True, "num_cached_tokens expected > 0"),
    ],
)
def test_contradictory_plans_are_refused(
    cached: int, starts: tuple[int, ...], exact: bool, restore_at: int, capture: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayPlan(
            num_cached_tokens=cached,
            layer_starts=starts,
            exact=exact,
            restore_at=restore_at,
            capture=capture,
        )


@pytest.mark.parametrize("measure", [rows_to_compute, row_layers])
def test_the_last_token_has_to_run(measure: Callable[[ReplayPlan, int], int]) -> None:
    plan = _plan(BoundedReplay(), 12)
    with pytest.raises(ValueError, match="num_tokens expected > 12"):
        measure(plan, 12)
