"""A request: what is asked, how far it is, what came out.

`Request` and `SamplingParams` are what a caller submits and never change; `RequestState` is the
engine's own, mutable record of the progress; `RequestOutput` is the finished result.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from pcpkit.cache.replay import ReplayPlan
from pcpkit.engine.tables import RequestTables

LogitsKept = Literal["none", "last", "all"]
"""Which logits a request keeps: none, of every row a token was sampled from, or of every row."""

FinishReason = Literal["stop", "length"]
"""A stop token was sampled, or `max_new_tokens` were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request continues and when it ends.

    Raises ValueError for a value outside its range.
    """

    max_new_tokens: int = 16
    """Tokens to sample at most, at least 1."""
    temperature: float = 0.0
    """0 takes the most likely token (lowest id on ties), above 0 samples."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens that holds this probability."""
    seed: int = 0
    """With the number of the token it decides the draw; two requests may share one."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the request; the token itself is part of the output."""
    ignore_eos: bool = False
    """True goes on after the model's end-of-sentence token."""
    logits: LogitsKept = "none"
    """See `LogitsKept`."""

    def __post_init__(self) -> None:
        _check_int("max_new_tokens", self.max_new_tokens, 1, "ask for at least one token")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature expected a finite number >= 0, got {self.temperature!r}; use 0 for "
                "the most likely token"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p expected 0 < p <= 1, got {self.top_p!r}; use 1 to keep all")
        _check_int("seed", self.seed, 0, "pass a non-negative integer below 2**64")
        if self.seed >= 2**64:
            raise ValueError(f"seed expected below 2**64, got {self.seed}; pass a smaller one")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, "pass token ids")
        if self.logits not in get_args(LogitsKept):
            raise ValueError(
                f"logits expected one of {', '.join(get_args(LogitsKept))}, got {self.logits!r}; "
                "pick one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue. `request_id` names it in errors and results.

    Raises ValueError for a priority that is no integer or a salt that is no text.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Lower runs first; among equals, who came first."""
    cache_salt: str = ""
    """Requests with different salts share no cached prefix: the name of a tenant, chosen by the
    server."""

    def __post_init__(self) -> None:
        if type(self.priority) is not int:
            raise ValueError(
                f"priority expected an integer, got {self.priority!r}; lower runs first"
            )
        if type(self.cache_salt) is not str:
            raise ValueError(
                f"cache_salt expected a string, got {self.cache_salt!r}; leave it out to share"
            )

    @property
    def max_tokens(self) -> int:
        """Tokens of prompt and continuation at most."""
        return len(self.prompt_token_ids) + self.params.max_new_tokens


def check_request(request: Request, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse a request that the model can never serve.

    Args:
        request: to be checked.
        vocab_size: of the model.
        max_model_len: longest prompt plus continuation in tokens.

    Raises:
        ValueError: empty prompt, a token id outside the vocabulary, or too many tokens.
    """
    name, prompt = f"request {request.request_id}", request.prompt_token_ids
    if not prompt:
        raise ValueError(f"{name} expected at least one prompt token, got none; add some text")
    for place, token in enumerate(prompt):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} expected token ids 0 .. {vocab_size - 1}, got {token!r} at position "
                f"{place}; use the tokenizer that belongs to the checkpoint"
            )
    if request.max_tokens > max_model_len:
        raise ValueError(
            f"{name} expected at most {max_model_len} tokens, got a prompt of {len(prompt)} and "
            f"{request.params.max_new_tokens} new ones; shorten the prompt or ask for fewer"
        )


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestOutput:
    """Result of a finished request."""

    request: Request
    token_ids: tuple[int, ...]
    """Sampled ids, a stop token included."""
    finish_reason: FinishReason
    logits: Tensor | None
    """(rows, vocab) fp32 on the CPU: prompt positions (`all`) or its last (`last`), then one row a
    decode step; None if none were asked for. The last sampled token was never fed, so it has no
    row."""
    ttft_s: float
    """Seconds from submission to the first token, waiting included."""
    decode_s: float
    """Seconds from the first token to the last."""
    queue_s: float = 0.0
    """Seconds from submission to the first step that ran rows of it."""
    num_cached_tokens: int = 0
    """Tokens taken over from the prefix cache at its first start."""
    num_replayed_rows: int = 0
    """Rows below them that ran again then, to rebuild window records."""
    num_preemptions: int = 0
    """How often it lost its blocks and computed them again."""
    exact: bool = True
    """False if a start was an approximate replay, or rows were trimmed to one window (`bounded`):
    the answer may differ from a cold run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPoint:
    """Where a snapshot of window records stands: after `num_tokens` tokens, named by `key`."""

    key: bytes
    num_tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class Stay:
    """What a request has from one admission to its end or preemption; dropped as a whole.

    So nothing of a start survives a preemption: a resumed request looks up and plans anew.
    """

    tables: RequestTables
    """Physical blocks."""
    replay: ReplayPlan
    num_prefill_tokens: int
    """Tokens known at the admission: the prompt, and what was sampled before a preemption."""
    num_published: int
    """Leading blocks that are in the prefix cache: adopted ones, and own ones since."""
    restore: SnapshotPoint | None = None
    """Copied back before the first step; held in the store until that step is done."""
    captures: tuple[SnapshotPoint, ...] = ()
    """To be kept, each as soon as so many tokens are computed; without those that are."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """Progress of one request inside the engine; the scheduler and the engine mutate it."""

    request: Request
    token_ids: list[int]
    """Prompt and sampled ids; the last sampled one has no caches yet."""
    submitted_at: float
    """Clock reading in seconds, as the two below."""
    arrival: int = 0
    """Counts submissions; set by the scheduler."""
    phase: Phase = Phase.WAITING
    num_computed_tokens: int = 0
    """Position of the next row; everything below has caches, its own or adopted ones."""
    stay: Stay | None = None
    """None unless running."""
    hashes: list[bytes] = field(default_factory=list[bytes])
    """Names of the full blocks of `token_ids`, as far as they were needed."""
    kept_logits: list[Tensor] = field(default_factory=list[Tensor])
    """(rows, vocab) fp32 CPU pieces in position order, see `LogitsKept`."""
    num_logits_kept: int = 0
    """Their rows; a preempted request does not keep them twice."""
    first_plan: ReplayPlan | None = None
    """Of the first admission, which counts in the statistics."""
    exact: bool = True
    """Nothing so far was approximate: no replay at a start, no trim."""
    num_preemptions: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None

    @property
    def tables(self) -> RequestTables:
        """Blocks of a running request."""
        assert self.stay is not None, "only a running request has tables"
        return self.stay.tables

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes before whom: the lower one."""
        return self.request.priority, self.arrival

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens before decode starts: the prompt; after a preemption, all that were known."""
        return self.num_prompt_tokens if self.stay is None else self.stay.num_prefill_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that still have to run: what is left of the prefill, or 1 in decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """True until all tokens known at the admission are computed."""
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Sampled ids so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def finish_reason(self, eos_token_id: int) -> FinishReason | None:
        """Why the request ends after its newest token, None if it goes on."""
        output, params = self.output_token_ids, self.request.params
        if not output:
            return None
        ends = output[-1] in params.stop_token_ids
        if ends or (output[-1] == eos_token_id and not params.ignore_eos):
            return "stop"
        return "length" if len(output) >= params.max_new_tokens else None

    def output(self, reason: FinishReason, now: float) -> RequestOutput:
        """The result of a request that ends `now`, with its newest token."""
        assert self.first_token_at is not None, "a finished request has a token"
        assert self.admitted_at is not None, "a finished request has run"
        assert self.first_plan is not None, "a finished request was admitted"
        return RequestOutput(
            request=self.request,
            token_ids=tuple(self.output_token_ids),
            finish_reason=reason,
            logits=torch.cat(self.kept_logits) if self.kept_logits else None,
            ttft_s=self.first_token_at - self.submitted_at,
            decode_s=now - self.first_token_at,
            queue_s=self.admitted_at - self.submitted_at,
            num_cached_tokens=self.first_plan.num_cached_tokens,
            num_replayed_rows=self.first_plan.num_replayed_rows,
            num_preemptions=self.num_preemptions,
            exact=self.exact,
        )


def _check_int(name: str, value: Sequence[int] | int, least: int, remedy: str) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} expected an integer >= {least}, got {value!r}; {remedy}")
