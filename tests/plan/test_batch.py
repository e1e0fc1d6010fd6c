"""The global batch: rows against loops over requests, and what check_batch refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.config import CacheConfig
from pcpkit.plan.batch import (
    StepBatch,
    check_batch,
    query_rows,
    row_positions,
    row_requests,
    row_token_windows,
    run_of_each,
)
from pcpkit.testing.batches import RaggedBatch, RequestRows, Steps, assemble_steps
from pcpkit.testing.strategies import step_batches, step_sequences

LAYOUT = CacheConfig(num_blocks=1, num_window_blocks=1, num_requests=1)


def a_batch() -> StepBatch:
    """Two requests: the last 3 of 8 prompt tokens, and a decode at position 6."""
    prompt = RequestRows(
        request=0, num_computed_tokens=5, query_len=3, is_prefilling=True, num_logits=1
    )
    decode = RequestRows(
        request=1, num_computed_tokens=6, query_len=1, is_prefilling=False, num_logits=1
    )
    return assemble_steps([RaggedBatch(requests=(prompt, decode))], LAYOUT, seed=1).batches[0]


@given(batch=step_batches())
def test_rows_continue_their_requests(batch: StepBatch) -> None:
    check_batch(batch)
    positions, requests = row_positions(batch), row_requests(batch)
    assert (positions.dtype, requests.dtype) == (torch.int64, torch.int32)
    expected = [
        (request, computed + offset)
        for request, (computed, length) in enumerate(
            zip(batch.num_computed_tokens.tolist(), batch.query_lens.tolist(), strict=True)
        )
        for offset in range(length)
    ]
    assert list(zip(requests.tolist(), positions.tolist(), strict=True)) == expected
    assert batch.num_tokens == len(expected)
    assert batch.seq_lens.tolist() == [
        max(position for owner, position in expected if owner == request) + 1
        for request in range(batch.num_reqs)
    ]


@given(steps=step_sequences())
def test_token_windows_over_several_steps(steps: Steps) -> None:
    """A row's window is the request's own history, however it was cut into steps."""
    history: dict[int, list[int]] = {}
    for rows, batch in zip(steps.rows, steps.batches, strict=True):
        check_batch(batch)
        windows = row_token_windows(batch, query_rows(batch)).tolist()
        ids = batch.token_ids.tolist()
        for (request, position), token, window in zip(rows.places, ids, windows, strict=True):
            if position == 0:
                history[request] = []
            history[request].append(token)
            newest_first = history[request][::-1]
            assert window == [*newest_first, -1, -1, -1][:4]


def test_token_windows_of_the_docstring() -> None:
    batch = replace(
        a_batch(),
        query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
        token_ids=torch.tensor([7, 8]),
        lookback_token_ids=torch.tensor([[6, -1, -1]]),
    )
    windows = row_token_windows(batch, query_rows(batch))
    assert windows.tolist() == [[7, 6, -1, -1], [8, 7, 6, -1]]


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_runs_of_items(lengths: list[int]) -> None:
    """Also runs without items, wherever they are."""
    ends = torch.tensor(lengths).cumsum(0)
    runs = run_of_each(ends, sum(lengths))
    assert runs.dtype == torch.int32
    assert runs.tolist() == [index for index, length in enumerate(lengths) for _ in range(length)]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("query_start_loc", torch.tensor([0, 4]), r"expected shape \(3,\), got \(2,\)"),
        ("query_start_loc", torch.tensor([1, 3, 4]), "expected 0 followed by growing ends"),
        ("query_start_loc", torch.tensor([0, 4, 4]), "leave out requests without rows"),
        ("query_start_loc", torch.tensor([0, 3, 2]), r"got \[0, 3, 2\]"),
        ("is_prefilling", torch.tensor([True]), r"expected shape \(2,\), got \(1,\)"),
        ("ring_blocks", torch.tensor([0, 1, 2]), r"expected shape \(2,\), got \(3,\)"),
        ("num_logits", torch.tensor([1]), r"expected shape \(2,\)"),
        ("num_logits", torch.tensor([4, 1]), r"expected 0 .. query length, got \[4, 1\]"),
        ("num_logits", torch.tensor([1, -1]), r"got \[1, -1\] for lengths \[3, 1\]"),
        ("token_ids", torch.tensor([1, 2, 3]), "expected 4 ids, got 3"),
        ("lookback_token_ids", torch.zeros(1, 3), "expected 2 rows, got 1"),
        ("block_table", torch.zeros(3, 1), "expected 2 rows, got 3"),
        ("window_block_table", torch.zeros(1, 1), "expected 2 rows, got 1"),
        ("block_table", torch.zeros(2, 1), r"expected int32, got torch\.float32"),
        ("window_block_table", torch.zeros(2, 1).long(), r"expected int32, got torch\.int64"),
    ],
)
def test_refuses_parts_that_do_not_fit(name: str, value: Tensor, message: str) -> None:
    check_batch(a_batch())
    with pytest.raises(ValueError, match=f"^{name} .*{message}"):
        check_batch(replace(a_batch(), **{name: value}))


def test_refuses_a_batch_without_requests() -> None:
    batch = a_batch()
    empty = {
        name: getattr(batch, name)[:0]
        for name in (
            "num_computed_tokens",
            "is_prefilling",
            "token_ids",
            "lookback_token_ids",
            "block_table",
            "window_block_table",
            "ring_blocks",
            "num_logits",
        )
    }
    with pytest.raises(ValueError, match=r"^query_start_loc expected 0 followed by growing ends"):
        check_batch(replace(batch, query_start_loc=batch.query_start_loc[:1], **empty))
