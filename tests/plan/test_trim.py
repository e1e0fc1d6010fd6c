"""Trim: which rows stop below the last layers, against the dependencies worked out row by row.

Invariants 33 to 36 of pcp-spec section 10 as far as a plan decides them; that trimmed forwards
compute the same bits is in tests/model/test_replay.py and tests/parallel/test_replay.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.config import CacheConfig
from pcpkit.plan.batch import StepBatch, check_batch
from pcpkit.plan.partition import dual_chunk_swap, make_partition
from pcpkit.plan.step import plan_step
from pcpkit.plan.trim import Trim, TrimMode, layer_starts
from pcpkit.testing.batches import PrefixHit, RaggedBatch, RequestRows, assemble_steps

LAYOUT = CacheConfig(num_blocks=1, num_window_blocks=1, num_requests=1)


def prefill(request: int, computed: int, count: int, **changes: Any) -> RequestRows:
    rows = RequestRows(
        request=request,
        num_computed_tokens=computed,
        query_len=count,
        is_prefilling=True,
        num_logits=1,
        may_trim=True,
    )
    return replace(rows, **changes)


def batch_of(*requests: RequestRows) -> StepBatch:
    return assemble_steps([RaggedBatch(requests=requests)], LAYOUT).batches[0]


def trim_of(mode: TrimMode, num_layers: int, cut: int, window: int) -> Trim:
    return Trim(mode=mode, cut=cut, num_layers=num_layers, sliding_window=window)


def starts_of(batch: StepBatch, trim: Trim) -> list[list[int]]:
    starts = layer_starts(batch, trim)
    if starts is None:
        return [[0] * trim.num_layers] * batch.num_reqs
    return starts.tolist()


def cone(end: int, num_layers: int, window: int) -> list[int]:
    """First row whose window record or output is needed, by layer, step by step from the top.

    Needed of a step are the window records of its last ``window`` rows in every layer, and the
    logits of the last row. A record needs the row's output below, an output what its window holds.
    """
    first_record = [max(end - window, 0)] * num_layers
    for layer in range(num_layers - 1, 0, -1):
        first_output = first_record[layer]
        first_record[layer - 1] = min(first_record[layer - 1], max(first_output - window + 1, 0))
    return first_record


@given(
    end=st.integers(1, 400),
    num_layers=st.integers(1, 12),
    window=st.integers(2, 20),
    data=st.data(),
)
def test_exact_starts_are_the_cone(
    end: int, num_layers: int, window: int, data: st.DataObject
) -> None:
    """Sufficient and minimal above the cut, and nothing is cut below it."""
    cut = data.draw(st.integers(0, num_layers - 1))
    (starts,) = starts_of(batch_of(prefill(0, 0, end)), trim_of("exact", num_layers, cut, window))
    needed = cone(end, num_layers, window)
    assert starts == [0 if layer <= cut else needed[layer] for layer in range(num_layers)]


@given(
    computed=st.integers(0, 60),
    count=st.integers(1, 60),
    hit=st.integers(0, 30).map(lambda half: 2 * half),
    mode=st.sampled_from(["exact", "bounded"]),
)
def test_kept_rows_of_a_chunk(computed: int, count: int, hit: int, mode: TrimMode) -> None:
    """Invariants 33 and 35: the last min(q, W) rows, read from max(s, end - W) on."""
    window, num_layers, cut = 8, 5, 2
    replay = None
    if 0 < hit <= computed:
        replay = PrefixHit(num_tokens=hit, layer_starts=(max(hit - window, 0),) * num_layers)
    end, s = computed + count, 0 if replay is None else replay.layer_starts[0]
    batch = batch_of(prefill(0, computed, count, hit=replay))
    (starts,) = starts_of(batch, trim_of(mode, num_layers, cut, window))
    assert starts[: cut + 1] == [s] * (cut + 1)
    last = starts[-1]
    assert end - max(last, computed) == min(count, window)
    assert last == (max(s, end - window) if count > window else s)
    if mode == "bounded":
        assert starts[cut + 1 :] == [last] * (num_layers - cut - 1)
    assert starts == sorted(starts)


def test_docstring_example() -> None:
    batch = batch_of(prefill(0, 0, 20))
    assert starts_of(batch, trim_of("exact", 3, 0, 4)) == [[0, 13, 16]]
    assert starts_of(batch, trim_of("bounded", 3, 0, 4)) == [[0, 16, 16]]


def test_exact_halo_of_the_release() -> None:
    """2,414 rows at layer 21 of 40 for a window of 128 (pcp-spec 5.1)."""
    assert trim_of("exact", 40, 20, 128).num_kept(21) == 128 + 18 * 127 == 2414
    assert trim_of("bounded", 40, 20, 128).num_kept(21) == 128


def test_only_those_who_may_are_trimmed() -> None:
    """Invariant 36: decodes, and prefills that are wanted whole, run everywhere."""
    batch = batch_of(
        prefill(0, 0, 30),
        prefill(1, 0, 30, may_trim=False, num_logits=30),
        prefill(2, 30, 1, may_trim=False, is_prefilling=False),
    )
    trim = trim_of("bounded", 4, 1, 4)
    assert starts_of(batch, trim) == [[0, 0, 26, 26], [0] * 4, [0] * 4]
    assert layer_starts(batch_of(prefill(0, 0, 30, may_trim=False)), trim) is None
    assert layer_starts(batch, None) is None


def test_the_balance_of_kept_rows_stays_with_their_owners() -> None:
    """q = 512 on 4 ranks, window 128: the tail is on ranks 0 and 1 (pcp-spec 6.5)."""
    batch = batch_of(prefill(0, 0, 512))
    partition = make_partition([512], [True], 4, dual_chunk_swap)
    plans = [
        plan_step(
            batch,
            ratios=(1, 2),
            block_size=64,
            window_block_size=32,
            ring_rows=8,
            partition=partition,
            rank=rank,
            trim=trim_of("bounded", 40, 20, 128),
        )
        for rank in range(4)
    ]
    assert [plan.layer_rows(20).num_rows for plan in plans] == [128] * 4
    assert [plan.layer_rows(21).num_rows for plan in plans] == [64, 64, 0, 0]
    for plan in plans:
        assert plan.layer_rows(21).num_padded_rows == 64
        assert plan.layer_rows(21) is plan.layer_rows(39)
        assert plan.layer_rows(0) is plan.layer_rows(20)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "off"}, "mode expected one of .* got 'off'"),
        ({"cut": 4}, r"cut expected 0 \.\. 3, got 4"),
        ({"cut": -1}, r"cut expected 0 \.\. 3, got -1"),
    ],
)
def test_refuses_a_trim_of_no_model(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(trim_of("exact", 4, 1, 8), **changes)


def test_refuses_replay_and_trim_of_two_models() -> None:
    hit = PrefixHit(num_tokens=2, layer_starts=(0, 0, 2))
    with pytest.raises(ValueError, match="layer_starts expected 4 layers, got 3"):
        layer_starts(batch_of(prefill(0, 2, 30, hit=hit)), trim_of("exact", 4, 1, 8))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            prefill(0, 4, 1, is_prefilling=False),
            r"may_trim expected prefills .* got requests \[0\]",
        ),
        (prefill(0, 0, 4, num_logits=2), r"may_trim expected prefills without logits but the last"),
    ],
)
def test_refuses_to_trim_what_is_wanted(rows: RequestRows, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_batch(batch_of(rows))


def test_refuses_flags_that_do_not_fit() -> None:
    batch = batch_of(prefill(0, 0, 4))
    for flags in (torch.tensor([True, True]), torch.tensor([1])):
        with pytest.raises(ValueError, match="may_trim expected 1 flags"):
            check_batch(replace(batch, may_trim=flags))
