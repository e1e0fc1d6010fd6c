"""What a request may ask for, and when it ends."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pcpkit.engine.request import RequestState, SamplingParams, check_request

from .small_model import request


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**64),
        ("stop_token_ids", (3, -1)),
        ("logits", "some"),
    ],
)
def test_params_outside_their_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field} expected .*, got .*; ") as caught:
        SamplingParams(**{field: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "new", "problem"),
    [
        ((), 1, "at least one prompt token"),
        ((1, 10), 1, r"token ids 0 \.\. 9, got 10 at position 1"),
        ((1, -1), 1, r"token ids 0 \.\. 9, got -1"),
        ((True,), 1, "got True"),
        (("a",), 1, "got 'a'"),
        ((1,) * 8, 1, "at most 8 tokens, got a prompt of 8 and 1 new"),
        ((1,), 8, "at most 8 tokens"),
    ],
)
def test_requests_that_no_model_can_serve_are_refused(
    prompt: tuple[Any, ...], new: int, problem: str
) -> None:
    with pytest.raises(ValueError, match=f"^request r1 expected .*{problem}"):
        check_request(request("r1", prompt, max_new_tokens=new), vocab_size=10, max_model_len=8)


def test_the_largest_request_is_accepted() -> None:
    check_request(request("r", (0, 9), max_new_tokens=6), vocab_size=10, max_model_len=8)


def _after(output: list[int], **params: Any) -> RequestState:
    asked = request("r", (5, 1, 7), **params)
    return RequestState(request=asked, token_ids=[5, 1, 7, *output], submitted_at=0.0)


def test_a_request_ends_at_a_stop_token_or_at_its_length() -> None:
    eos = 1
    assert _after([], max_new_tokens=1).finish_reason(eos) is None
    assert _after([4], max_new_tokens=2).finish_reason(eos) is None
    assert _after([4, 6], max_new_tokens=2).finish_reason(eos) == "length"
    # Stop wins over length, and a stop id inside the prompt (5, 1) is no reason.
    assert _after([4, eos], max_new_tokens=2).finish_reason(eos) == "stop"
    assert _after([5], stop_token_ids=(5,)).finish_reason(eos) == "stop"
    assert _after([eos], ignore_eos=True).finish_reason(eos) is None
    # A stop token that the caller names counts even where it is the ignored one.
    assert _after([eos], ignore_eos=True, stop_token_ids=(eos,)).finish_reason(eos) == "stop"
