"""Bounded replay row by row: appendix B of pcp-spec, and the kernel that knows the same rule."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.kernels.replay_pad import pad_replayed
from pcpkit.kernels.slot_gather import gather_slots
from pcpkit.plan.batch import row_positions, row_requests
from pcpkit.plan.rows import LayerRows

from .replayed import RATIOS, bounded, planned, prefill


def spans(rows: LayerRows) -> list[tuple[int, int]]:
    """Runs of consecutive positions."""
    out: list[tuple[int, int]] = []
    for position in rows.positions.tolist():
        if out and out[-1][1] == position:
            out[-1] = (out[-1][0], position + 1)
        else:
            out.append((position, position + 1))
    return out


def test_appendix_b_first_step() -> None:
    """Prompt 300, hit 256, window 128, budget 100: rows 128 .. 227, all replayed, no slot."""
    step = planned(prefill(128, 100, bounded(256)), 4)
    layers = [plan.layer_rows(0) for plan in step.plans]
    assert spans(layers[0]) == [(128, 141), (219, 228)]
    # Chunks 3 and 4 of rank 3, [167, 180) and [180, 193), are two segments without a gap.
    assert spans(layers[3]) == [(167, 193)]
    assert [one.num_rows for one in step.partition.segments[3]] == [13, 13]
    for rows in layers:
        assert rows.window_floor.unique().tolist() == [128]
        assert int((rows.window_slots >= 0).sum()) == 100
        for ratio in RATIOS:
            assert rows.groups[ratio].slots.tolist() == []
            assert rows.groups[ratio].closing_rows.tolist() == []
        assert rows.links.predecessors.tolist() == []
        assert rows.links.open_rows.tolist() == [], "227 is odd"
    assert len({id(rows) for rows in step.plans[0].layers}) == 1


def test_appendix_b_second_step() -> None:
    """Rows 228 .. 299: 28 replayed, 44 new; rank 3 replays 255 alone, its second chunk nothing."""
    step = planned(prefill(228, 72, bounded(256), num_logits=1), 4)
    layers = [plan.layer_rows(0) for plan in step.plans]
    assert spans(layers[0]) == [(228, 237), (291, 300)]
    replayed = [[p for p in rows.positions.tolist() if p < 256] for rows in layers]
    assert replayed == [
        [*range(228, 237)],
        [*range(237, 246)],
        [*range(246, 255)],
        [255],
    ]
    for rows in layers:
        assert int((rows.groups[1].slots >= 0).sum()) == 44
        assert int((rows.groups[2].slots >= 0).sum()) == 22
        assert rows.links.open_rows.tolist() == [], "299 is odd"
        assert rows.max_visible(2) == 150
    closed = [position for rows in layers for position in rows.groups[2].positions.tolist()]
    assert sorted(closed) == [*range(256, 300, 2)]


def test_appendix_b_fully_cached() -> None:
    """256 tokens, all cached: hit 192, start 64, 192 rows of which 64 are new."""
    step = planned(prefill(64, 192, bounded(192), num_logits=1), 4)
    every = [position for plan in step.plans for position in plan.layer_rows(0).positions.tolist()]
    assert sorted(every) == [*range(64, 256)]
    slots = step.plans[0].layer_rows(0).groups[1].slots
    assert int((slots >= 0).sum()) == 64


@given(
    num_cached=st.integers(9, 40).map(lambda half: 2 * half),
    suffix=st.integers(1, 30),
    split=st.integers(0, 60),
    size=st.integers(1, 4),
)
def test_bounded_slots_are_those_of_the_padding_kernel(
    num_cached: int, suffix: int, split: int, size: int
) -> None:
    """The rule by position and the kernel that pads gathered slots agree, chunk by chunk."""
    window, end = 16, num_cached + suffix
    start = num_cached - window
    cut = min(start + split, end - 1)
    hit = bounded(num_cached, window=window)
    for first, stop in ((start, cut), (cut, end)):
        if first == stop:
            continue
        step = planned(prefill(first, stop - first, hit), size)
        batch, partition = step.batch, step.partition
        slots = gather_slots(
            row_positions(batch),
            row_requests(batch),
            partition.gather_index,
            partition.write_mask,
            torch.stack([batch.block_table] * 2),
            [64, 64],
            [1, 2],
        )
        pad_replayed(
            slots,
            row_positions(batch),
            row_requests(batch),
            partition.gather_index,
            torch.tensor([start], dtype=torch.int32),
            [True, True],
            window,
        )
        for ratio, want in zip(RATIOS, slots, strict=True):
            if start == 0:
                continue  # the kernel's mark of a cold request
            got = step.plans[0].layer_rows(0).groups[ratio].slots
            assert got[got >= 0].sort().values.tolist() == want[want >= 0].sort().values.tolist()
