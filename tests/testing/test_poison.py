"""Poison spoils what is computed from it, and a guarded tensor notices every stray write."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcpkit.formats import RECORD_FORMATS
from pcpkit.testing.poison import CanaryError, check_all, guard, poison, poisoned

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poisoned_floats_are_nan(dtype: torch.dtype) -> None:
    assert bool(poisoned(3, 2, dtype=dtype).isnan().all())


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_poisoned_integers_are_far_out_of_range(dtype: torch.dtype) -> None:
    """Not -1, which means "skip"; beyond the middle of what the type holds."""
    assert bool((poisoned(3, dtype=dtype) > torch.iinfo(dtype).max // 2).all())


@pytest.mark.parametrize("name", sorted(RECORD_FORMATS))
def test_poisoned_records_decode_to_nan(name: str) -> None:
    record = RECORD_FORMATS[name]
    rows = poisoned(4, record.record_bytes(64), dtype=torch.uint8)
    assert bool(record.decode(rows).isnan().all())


def test_poison_follows_strides() -> None:
    base = torch.zeros(4, 6)
    assert poison(base[1:3, ::2]).isnan().all()
    expected = torch.zeros(4, 6).bool()
    expected[1:3, ::2] = True
    assert torch.equal(base.isnan(), expected)


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    margin=st.integers(0, 3),
    strided=st.booleans(),
)
def test_a_guarded_copy_equals_its_original(
    shape: list[int], dtype: torch.dtype, margin: int, strided: bool
) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    guarded = guard(tensor, margin=margin, strided=strided)
    assert guarded.view.dtype == dtype
    assert torch.equal(guarded.view, tensor)
    assert guarded.view.is_contiguous() or strided
    guarded.view.copy_(tensor)
    guarded.check()


@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    dtype=st.sampled_from([dtype for dtype in DTYPES if dtype != torch.bool]),
    strided=st.booleans(),
    data=st.data(),
)
def test_any_stray_write_is_found(
    shape: list[int], dtype: torch.dtype, strided: bool, data: st.DataObject
) -> None:
    """One element anywhere outside the view, also -1 in integers and 0 in floats."""
    guarded = guard(torch.zeros(shape, dtype=dtype), margin=2, strided=strided)
    outside = torch.ones(guarded.base.shape, dtype=torch.bool)
    outside[guarded.inside] = False
    places = outside.nonzero().tolist()
    place = data.draw(st.sampled_from(places))
    value = data.draw(st.sampled_from([0, 1] if dtype == torch.uint8 else [0, 1, -1]))
    guarded.base[tuple(place)] = value
    relative = [index - (2 if dim < len(guarded.inside) else 0) for dim, index in enumerate(place)]
    with pytest.raises(CanaryError) as caught:
        guarded.check()
    assert f"at index {relative} of the view" in str(caught.value)
    assert "and 0 more" in str(caught.value)


def test_a_write_between_strided_rows_is_found() -> None:
    guarded = guard(torch.zeros(2, 4))
    flat = guarded.base.view(-1)
    start = guarded.view.storage_offset()
    flat[start : start + 8] = 1.0  # eight floats in a row, as if the view were contiguous
    with pytest.raises(CanaryError, match=r"got 1\.0 at index \[0, 4\] of the view .* 3 more"):
        guarded.check()


def test_check_all_looks_at_every_one() -> None:
    clean, dirty = guard(torch.zeros(2)), guard(torch.zeros(2).int())
    check_all([clean, dirty])
    dirty.base[0] = -1
    with pytest.raises(CanaryError, match=r"got -1 at index \[-3\]"):
        check_all([clean, dirty])


@pytest.mark.parametrize(("shape", "margin"), [((), 1), ((2,), -1)])
def test_refuses_what_has_no_margins(shape: tuple[int, ...], margin: int) -> None:
    with pytest.raises(ValueError, match=r"^tensor expected a dimension and margin >= 0, got "):
        guard(torch.zeros(shape), margin=margin)
