"""Rows of each layer with replay and trim, against definitions written out row by row.

Invariants 24 to 27 of pcp-spec section 10 as far as a plan decides them; appendix B has its own
file, and so has the trim. That forwards which follow such plans compute the right bits is in
tests/model/test_replay.py and tests/parallel/test_replay.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.plan.batch import BatchReplay, StepBatch
from pcpkit.plan.partition import make_partition
from pcpkit.plan.rows import LayerRows
from pcpkit.plan.running import running_segments
from pcpkit.plan.step import StepPlan, plan_step
from pcpkit.plan.trim import Trim
from pcpkit.testing.batches import (
    PrefixHit,
    RaggedBatch,
    RequestRows,
    Steps,
    assemble_steps,
)
from pcpkit.testing.strategies import partitions, step_schedules, step_sequences

from .replayed import (
    CUT,
    LAYOUT,
    NUM_LAYERS,
    RATIOS,
    WINDOW,
    Step,
    local_rows,
    plan_all,
    planned,
    prefill,
    replayed_steps,
    trims,
)

# --- every row of every rank in every layer -----------------------------------------------------


@given(step=replayed_steps())
def test_rows_of_every_layer(step: Step) -> None:
    """What runs, where it stands and how low it reads; what is kept leads from layer to layer."""
    for rank, plan in enumerate(step.plans):
        known, below = step.partition.rows[rank].tolist(), plan.layer_rows(0)
        for layer in range(NUM_LAYERS):
            rows, mine = plan.layer_rows(layer), local_rows(step, rank, layer)
            if rows is not below:
                every = range(step.partition.size)
                same = all(
                    local_rows(step, r, layer) == local_rows(step, r, layer - 1) for r in every
                )
                assert (rows.kept is None) == same
                if rows.kept is not None:
                    known = [known[index] for index in rows.kept.tolist()]
            below = rows
            assert known == mine
            assert rows.num_rows == len(mine)
            assert rows.positions.tolist() == [step.rows.places[row][1] for row in mine]
            assert rows.row_request.tolist() == [step.request(row) for row in mine]
            floors = [step.start(step.request(row), layer) for row in mine]
            assert rows.window_floor.tolist() == floors


@given(step=replayed_steps())
def test_sizes_are_those_of_all_ranks(step: Step) -> None:
    for layer in range(NUM_LAYERS):
        by_rank = [local_rows(step, rank, layer) for rank in range(step.partition.size)]
        running = {step.request(row) for mine in by_rank for row in mine}
        longest = max((step.rows.requests[one].seq_len for one in running), default=0)
        for plan in step.plans:
            rows = plan.layer_rows(layer)
            assert rows.num_padded_rows == max(len(mine) for mine in by_rank)
            assert rows.max_seq_len == longest


@given(step=replayed_steps())
def test_window_records_of_every_row_that_runs(step: Step) -> None:
    table, size = step.batch.window_block_table, step.cache.window_block_size
    for layer in range(NUM_LAYERS):
        by_rank = [local_rows(step, rank, layer) for rank in range(step.partition.size)]
        width, want = max(len(mine) for mine in by_rank), list[int]()
        for mine in by_rank:
            for row in mine:
                position = step.rows.places[row][1]
                page = int(table[step.request(row), position // size])
                want.append(page * size + position % size)
            want += [-1] * (width - len(mine))
        for plan in step.plans:
            assert plan.layer_rows(layer).window_slots.tolist() == want


@given(step=replayed_steps())
def test_nothing_is_written_below_a_hit(step: Step) -> None:
    """Invariant 24, and every group above it is closed at its odd token, also by trimmed steps."""
    size = step.cache.block_size
    for layer in range(NUM_LAYERS):
        for ratio in RATIOS:
            by_rank = [
                [
                    row
                    for row in rows.tolist()
                    if (step.rows.places[row][1] + 1) % ratio == 0
                    and step.rows.places[row][1] >= step.num_cached(row)
                ]
                for rows in step.partition.rows
            ]
            width, want = max(len(mine) for mine in by_rank), list[int]()
            for mine in by_rank:
                for row in mine:
                    state, states = step.rows.places[row][1] // ratio, size // ratio
                    page = int(step.batch.block_table[step.request(row), state // states])
                    want.append(page * states + state % states)
                want += [-1] * (width - len(mine))
            for rank, plan in enumerate(step.plans):
                rows = plan.layer_rows(layer)
                if layer > CUT and not rows.groups:
                    assert step.trim is not None, "only a trim leaves out groups"
                    assert len(rows.links.last_rows) == len(rows.links.open_rows) == 0
                    continue
                group, mine = rows.groups[ratio], local_rows(step, rank, layer)
                assert group.slots.tolist() == want
                assert group.num_padded == width
                assert [mine[index] for index in group.closing_rows.tolist()] == by_rank[rank]
                firsts = [step.rows.places[row][1] // ratio * ratio for row in by_rank[rank]]
                assert group.positions.tolist() == firsts


@given(step=replayed_steps())
def test_wanted_logits_come_back_in_batch_order(step: Step) -> None:
    """Their rows are counted in the last layer."""
    wanted: list[int] = []
    for end, one in zip(step.batch.query_start_loc[1:].tolist(), step.rows.requests, strict=True):
        wanted += range(end - one.num_logits, end)
    sent: list[list[int]] = []
    for rank, plan in enumerate(step.plans):
        mine = local_rows(step, rank, NUM_LAYERS - 1)
        sent.append([mine[index] for index in plan.logits.local_rows.tolist()])
    width = max(len(one) for one in sent)
    gathered = [row for one in sent for row in [*one, *[-1] * (width - len(one))]]
    for plan in step.plans:
        assert plan.logits.num_padded == width
        assert [gathered[index] for index in plan.logits.restore_index.tolist()] == wanted


@given(step=replayed_steps())
def test_layers_with_the_same_rows_share_them(step: Step) -> None:
    """One object where nothing differs, also after a move; one for all layers without bounds."""
    for rank, plan in enumerate(step.plans):
        bounds = [
            [min(step.start(i, layer), one.seq_len) for i, one in enumerate(step.rows.requests)]
            for layer in range(NUM_LAYERS)
        ]
        if not any(any(one) for one in bounds):
            assert len(plan.layers) == 1
            continue
        assert len(plan.layers) == NUM_LAYERS
        moved = plan.to("meta")
        for layer in range(1, NUM_LAYERS):
            same = bounds[layer] == bounds[layer - 1]
            assert (plan.layers[layer] is plan.layers[layer - 1]) == same, rank
            assert (moved.layers[layer] is moved.layers[layer - 1]) == same


@given(step=replayed_steps())
def test_idle_bounds_are_dropped(step: Step) -> None:
    """Told the window, a plan says the same with fewer bounds: the same rows, the same reads."""
    told = plan_all(
        step.rows, step.batch, step.partition, step.cache, step.trim, sliding_window=WINDOW
    )
    for plan, other in zip(step.plans, told.plans, strict=True):
        assert len({id(rows) for rows in other.layers}) <= len({id(rows) for rows in plan.layers})
        for layer in range(NUM_LAYERS):
            want, got = plan.layer_rows(layer), other.layer_rows(layer)
            lowest = [
                (rows.positions - WINDOW + 1).clamp(min=0).maximum(rows.window_floor)
                for rows in (want, got)
            ]
            assert torch.equal(*lowest)
            assert torch.equal(want.window_slots, got.window_slots)


def test_a_decode_far_behind_its_hit_runs_like_any_other() -> None:
    """A window past the last start no bound is left, and all layers share their rows."""
    hit = PrefixHit(num_tokens=8, layer_starts=(0, 2, 4, 6, 8))
    one = RequestRows(
        request=0,
        num_computed_tokens=8 + WINDOW,
        query_len=1,
        is_prefilling=False,
        num_logits=1,
        hit=hit,
    )
    rows = RaggedBatch(requests=(one,))
    batch = assemble_steps([rows], LAYOUT).batches[0]
    partition = make_partition([1], [False], 1)
    (bounded,) = plan_all(rows, batch, partition, LAYOUT, None).plans
    (idle,) = plan_all(rows, batch, partition, LAYOUT, None, sliding_window=WINDOW).plans
    assert len(bounded.layers) == NUM_LAYERS
    assert len(idle.layers) == 1
    assert idle.layers[0].window_floor.tolist() == [0]


# --- windows of a schedule ----------------------------------------------------------------------


@given(
    steps=step_sequences(
        step_schedules(max_requests=3, max_prompt=30, preemption=False, num_layers=NUM_LAYERS)
    ),
    trim=trims,
    data=st.data(),
)
def test_what_a_window_reads_was_written(
    steps: Steps, trim: Trim | None, data: st.DataObject
) -> None:
    """Invariants 25 and 26: by this request, in this step or before, and never below the floor.

    A request that starts above its first layer's start has restored what lies between.
    """
    written: set[tuple[int, int, int]] = set()
    for rows, batch in zip(steps.rows, steps.batches, strict=True):
        partition = data.draw(partitions(rows, max_ranks=3))
        step = plan_all(rows, batch, partition, steps.cache, trim)
        for one in rows.requests:
            if one.hit is not None and (one.request, -1, -1) not in written:
                written.add((one.request, -1, -1))
                written |= {
                    (one.request, layer, position)
                    for layer, start in enumerate(one.hit.layer_starts)
                    for position in range(start, one.num_computed_tokens)
                }
        for layer in range(NUM_LAYERS):
            every = [plan.layer_rows(layer) for plan in step.plans]
            written |= {(name, layer, position) for name, position in _places(rows, every)}
            for part in every:
                for (name, position), floor in zip(
                    _places(rows, [part]), part.window_floor.tolist(), strict=True
                ):
                    read = range(max(position - WINDOW + 1, floor, 0), position + 1)
                    assert {(name, layer, one) for one in read} <= written


def _places(rows: RaggedBatch, parts: list[LayerRows]) -> list[tuple[int, int]]:
    """Request and position of the rows of a layer."""
    return [
        (rows.requests[request].request, position)
        for part in parts
        for request, position in zip(
            part.row_request.tolist(), part.positions.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize("window", [2, 8, 16, 128])
@pytest.mark.parametrize("block_size", [2, 8, 32, 64, 128])
def test_blocks_of_replayed_windows_are_not_retired(window: int, block_size: int) -> None:
    """Invariant 27: blocks retired from an even hit on leave the first replayed row its block."""
    for hit in range(window + 2, window + 4 * block_size, 2):
        retired = (hit - window + 1) // block_size * block_size
        assert retired <= hit - window
    assert (255 - 128 + 1) // 128 * 128 > 255 - 128, "the odd hit that bites (pcp-spec 5.6)"


# --- what runs of each segment ------------------------------------------------------------------


@given(data=st.data())
def test_what_layers_run_of_segments(data: st.DataObject) -> None:
    """Against rows counted one by one, in two layers, for each rank and for all of them."""
    rows = data.draw(step_sequences(step_schedules(max_requests=3, max_prompt=30))).rows[0]
    partition = data.draw(partitions(rows))
    every = [data.draw(st.integers(0, count)) for count in rows.query_lens]
    layers = [[0] * len(every), every]
    running = running_segments(partition, torch.tensor(layers))
    segments = [segment for owned in partition.segments for segment in owned]
    dealt = [(one, offset) for one in segments for offset in range(one.start, one.stop)]
    want: list[tuple[int, int]] = []
    for layer, dropped in enumerate(layers):
        for row, (segment, offset) in enumerate(dealt):
            if offset >= dropped[segment.request]:
                want.append((layer * len(segments) + segments.index(segment), row))
    run, row = running.spread(0, partition.size)
    assert list(zip(run.tolist(), row.tolist(), strict=True)) == want
    first = 0
    for rank, owned in enumerate(partition.rows):
        own = range(first, first + len(owned))
        for index, dropped in enumerate(layers):
            runs = [row for row in own if dealt[row][1] >= dropped[dealt[row][0].request]]
            assert running.counts[index][rank] == len(runs)
            local = running.local_rows(rank, torch.tensor(runs, dtype=torch.int64) - first)
            assert local[index].tolist() == list(range(len(runs)))
        run, row = running.spread(rank, 1)
        assert row.tolist() == [row for _, row in want if row in own]
        first += len(owned)


# --- what is refused ----------------------------------------------------------------------------


def test_refuses_logits_of_rows_that_end_below_the_last_layer() -> None:
    hit = PrefixHit(num_tokens=8, layer_starts=(0, 2, 4, 6, 8))
    planned(prefill(0, 10, hit, num_logits=2), 2)
    with pytest.raises(ValueError, match="num_logits expected rows that run in the last layer"):
        planned(prefill(0, 10, hit, num_logits=3), 2)


def replay_of(cached: list[int], starts: list[list[int]]) -> BatchReplay:
    return BatchReplay(
        num_cached_tokens=torch.tensor(cached, dtype=torch.int32),
        layer_starts=torch.tensor(starts, dtype=torch.int32),
    )


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        (replay_of([4, 4], [[0, 2]]), r"num_cached_tokens expected shape \(1,\), got \(2,\)"),
        (replay_of([4], [[0, 2], [0, 2]]), r"layer_starts expected shape \(1, num_layers\)"),
        (replay_of([4], [[]]), r"layer_starts expected shape \(1, num_layers\), got \(1, 0\)"),
        (replay_of([3], [[0, 2]]), r"num_cached_tokens expected even counts, got \[3\]"),
        (replay_of([-2], [[0, 0]]), "num_cached_tokens expected even counts"),
        (replay_of([4], [[2, 0]]), "layer_starts expected ascending positions"),
        (replay_of([4], [[0, 5]]), r"layer_starts expected ascending positions from 0 to \[4\]"),
        (replay_of([4], [[-1, 0]]), "layer_starts expected ascending positions"),
        (replay_of([4], [[3, 4]]), r"num_computed_tokens expected at least .* \[2\] before \[3\]"),
    ],
)
def test_refuses_a_replay_that_does_not_fit(replay: BatchReplay, message: str) -> None:
    batch = assemble_steps([RaggedBatch(requests=(prefill(2, 4, None),))], LAYOUT).batches[0]
    plan_with(replace(batch, replay=replay_of([4], [[2, 4]])))
    with pytest.raises(ValueError, match=message):
        plan_with(replace(batch, replay=replay))


def plan_with(batch: StepBatch) -> StepPlan:
    return plan_step(batch, ratios=RATIOS, block_size=64, window_block_size=32, ring_rows=8)
