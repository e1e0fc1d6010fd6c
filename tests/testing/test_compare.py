"""Comparisons find any difference, and say where it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.parallel.trace import Call
from pcpkit.testing.compare import (
    ReplicaMismatch,
    TraceMismatch,
    assert_replicas_equal,
    assert_same_calls,
    bits,
    same_bits,
)

DTYPES = (torch.uint8, torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float32)
NAN = float("nan")


def message_of(replicas: list[dict[str, Tensor]]) -> str:
    with pytest.raises(ReplicaMismatch) as caught:
        assert_replicas_equal(replicas)
    return str(caught.value)


@given(
    ranks=st.integers(2, 4),
    shape=st.lists(st.integers(1, 4), max_size=3),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_one_wrong_element_is_named(
    ranks: int, shape: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    replicas = [
        {"window.0": torch.zeros(2), "ring.2": torch.ones(shape, dtype=dtype)} for _ in range(ranks)
    ]
    assert_replicas_equal(replicas)
    rank = data.draw(st.integers(1, ranks - 1))
    place = [data.draw(st.integers(0, size - 1)) for size in shape]
    replicas[rank]["ring.2"][tuple(place)] = 0
    message = message_of(replicas)
    count = replicas[0]["ring.2"].numel()
    assert message.startswith(f"rank {rank} tensor 'ring.2' at index {place} expected ")
    assert message.endswith(f"; 1 of {count} elements differ")


def test_replicas_are_compared_as_bytes() -> None:
    """Equal NaNs are equal; other NaNs, and zeros of other sign, are not."""
    assert_replicas_equal([{"x": torch.tensor([NAN])}, {"x": torch.tensor([NAN])}])
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert "got nan (0x7fc00001)" in message_of([{"x": torch.tensor([NAN])}, {"x": other}])
    message = message_of([{"x": torch.tensor([0.0])}, {"x": torch.tensor([-0.0])}])
    assert "expected 0.0 (0x00000000) as on rank 0, got -0.0 (0x80000000)" in message


def test_strides_do_not_matter_and_shapes_do() -> None:
    tensor = torch.arange(6).view(2, 3)
    assert_replicas_equal([{"x": tensor}, {"x": tensor.t().contiguous().t()}])
    message = message_of([{"x": tensor}, {"x": tensor.view(3, 2)}])
    assert message == (
        "rank 1 tensor 'x' expected torch.int64 (2, 3) as on rank 0, got torch.int64 (3, 2)"
    )
    assert "got torch.int32 (2, 3)" in message_of([{"x": tensor}, {"x": tensor.int()}])


def test_missing_tensors_are_named() -> None:
    x = torch.zeros(1)
    message = message_of([{"a": x, "b": x}, {"a": x, "b": x}, {"a": x, "c": x}])
    assert message == "rank 2 expected the tensors of rank 0, differs in ['b', 'c']"


@pytest.mark.parametrize("replicas", [[], [{}], [{}, {}], [{"x": torch.empty(0, 3)}] * 2])
def test_nothing_is_equal_to_nothing(replicas: list[dict[str, Tensor]]) -> None:
    assert_replicas_equal(replicas)


def test_same_bits_counts_all_nans_as_one() -> None:
    other = torch.tensor([0x7FC00001, 1], dtype=torch.int32).view(torch.float32)
    assert same_bits(other, torch.stack([torch.tensor(NAN), other[1]]))
    assert not same_bits(torch.tensor([NAN]), torch.tensor([1.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert not same_bits(torch.zeros(2), torch.zeros(2).int())


def test_bits_refuse_an_unknown_width() -> None:
    assert bits(torch.tensor([1.0])).tolist() == [0x3F800000]
    with pytest.raises(ValueError, match=r"^tensor expected elements of .* got torch.complex128"):
        bits(torch.zeros(1, dtype=torch.complex128))


# --- traces -------------------------------------------------------------------------------------


def call(rows: int, op: str = "all_gather") -> Call:
    return Call("pcp", op, (rows, 4), torch.uint8)


@given(length=st.integers(1, 6), ranks=st.integers(2, 4), data=st.data())
def test_the_first_differing_call_is_named(length: int, ranks: int, data: st.DataObject) -> None:
    traces = [[call(place) for place in range(length)] for _ in range(ranks)]
    assert_same_calls(traces)
    rank = data.draw(st.integers(1, ranks - 1))
    place = data.draw(st.integers(0, length - 1))
    traces[rank][place] = call(place, "all_reduce")
    with pytest.raises(TraceMismatch) as caught:
        assert_same_calls(traces)
    assert str(caught.value) == (
        f"rank {rank} call {place} expected pcp all_gather of ({place}, 4) torch.uint8 as rank 0, "
        f"got pcp all_reduce of ({place}, 4) torch.uint8"
    )


def test_missing_and_additional_calls_are_named() -> None:
    with pytest.raises(TraceMismatch, match=r"^rank 1 call 1 expected pcp .* got no more calls$"):
        assert_same_calls([[call(1), call(2)], [call(1)]])
    with pytest.raises(TraceMismatch, match=r"^rank 1 call 1 expected no more calls as rank 0, "):
        assert_same_calls([[call(1)], [call(1), call(2)]])


def test_a_plan_is_compared_with_rank_0_too() -> None:
    assert_same_calls([[call(1)], [call(1)]], [call(1)])
    with pytest.raises(TraceMismatch, match=r"^rank 0 call 0 expected .*\(2, 4\).* as planned"):
        assert_same_calls([[call(1)], [call(1)]], [call(2)])
    assert_same_calls([])
