"""The global batch of one step: the only input of planning, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from operator import le, lt

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchReplay:
    """What the requests of a step took over from the prefix cache, and where each layer starts.

    A request keeps both for its lifetime, also when it decodes. Layer ``l`` runs its rows from
    ``layer_starts[r, l]`` on and reads no window record below; rows below ``num_cached_tokens[r]``
    rebuild window records only: they close no compressed group, since those are in the cache and
    other requests read them (pcp-spec section 5).
    """

    num_cached_tokens: Tensor
    """``(num_reqs,)`` int32, even: tokens whose compressed KV and index keys were there; or 0."""
    layer_starts: Tensor
    """``(num_reqs, num_layers)`` int32: ascending, at most the cached tokens; 0 = everything."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """What the scheduler decided for one step; host tensors.

    Query rows of a request are consecutive and continue what it has computed: row ``i`` of request
    ``r`` stands at position ``num_computed_tokens[r] + i``.
    """

    query_start_loc: Tensor
    """``(num_reqs + 1,)`` int32, exclusive prefix sum of the query lengths."""
    num_computed_tokens: Tensor
    """``(num_reqs,)`` int32, tokens whose caches are valid before the step."""
    is_prefilling: Tensor
    """``(num_reqs,)`` bool, whether the request still computes its prompt (pcp-spec 1.1)."""
    token_ids: Tensor
    """``(num_tokens,)`` int64, ids of the query rows."""
    lookback_token_ids: Tensor
    """``(num_reqs, max_ngram - 1)`` int64, the ids before the query, newest first, -1 = none."""
    block_table: Tensor
    """``(num_reqs, max_blocks)`` int32, compressed KV and index keys; -1 = not mapped."""
    window_block_table: Tensor
    """``(num_reqs, max_window_blocks)`` int32, window KV; -1 = retired or not mapped."""
    ring_blocks: Tensor
    """``(num_reqs,)`` int32, ring block of each request."""
    num_logits: Tensor
    """``(num_reqs,)`` int32, how many of the request's last rows need logits."""
    replay: BatchReplay | None = None
    """``None``: no request took anything over."""
    may_trim: Tensor | None = None
    """``(num_reqs,)`` bool, prefills whose rows may stop below the last layers (see ``Trim``); they
    want no logits but their last row's. ``None``: nobody."""

    @property
    def num_reqs(self) -> int:
        """Requests in the step."""
        return self.num_computed_tokens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Query rows in the step."""
        return self.token_ids.shape[0]

    @property
    def query_lens(self) -> Tensor:
        """``(num_reqs,)`` int32."""
        return self.query_start_loc.diff()

    @property
    def seq_lens(self) -> Tensor:
        """``(num_reqs,)`` int32, tokens after the step."""
        return self.num_computed_tokens + self.query_lens


def check_batch(batch: StepBatch) -> None:
    """Refuse a batch whose parts do not fit together.

    Raises:
        ValueError: naming the field, what was expected and what was found.
    """
    num_reqs, num_tokens = batch.num_reqs, batch.num_tokens
    expected = {
        "query_start_loc": (num_reqs + 1,),
        "is_prefilling": (num_reqs,),
        "ring_blocks": (num_reqs,),
        "num_logits": (num_reqs,),
    }
    for name, shape in expected.items():
        got = tuple(getattr(batch, name).shape)
        if got != shape:
            raise ValueError(f"{name} expected shape {shape}, got {got}; one entry a request")
    for name in ("lookback_token_ids", "block_table", "window_block_table"):
        rows = getattr(batch, name).shape[0]
        if rows != num_reqs:
            raise ValueError(f"{name} expected {num_reqs} rows, got {rows}; one row a request")
    for name in ("block_table", "window_block_table"):
        dtype = getattr(batch, name).dtype
        if dtype != torch.int32:
            raise ValueError(f"{name} expected int32, got {dtype}; convert it before planning")
    # One entry a request is faster to look at as Python numbers than by one small op a question.
    starts, num_logits = batch.query_start_loc.tolist(), batch.num_logits.tolist()
    lens = [stop - start for start, stop in pairwise(starts)]
    if num_reqs == 0 or starts[0] != 0 or min(lens) < 1:
        raise ValueError(
            f"query_start_loc expected 0 followed by growing ends, got {starts}; leave out "
            "requests without rows"
        )
    if starts[-1] != num_tokens:
        raise ValueError(
            f"token_ids expected {starts[-1]} ids, got {num_tokens}; "
            "concatenate the query rows of all requests"
        )
    if any(not 0 <= count <= length for count, length in zip(num_logits, lens, strict=True)):
        raise ValueError(
            f"num_logits expected 0 .. query length, got {num_logits} for lengths "
            f"{lens}; ask for rows of this step only"
        )
    if batch.replay is not None:
        _check_replay(batch, batch.replay)
    if batch.may_trim is not None:
        _check_may_trim(batch, batch.may_trim)


def _check_replay(batch: StepBatch, replay: BatchReplay) -> None:
    cached, starts = replay.num_cached_tokens, replay.layer_starts
    if tuple(cached.shape) != (batch.num_reqs,):
        raise ValueError(
            f"num_cached_tokens expected shape {(batch.num_reqs,)}, got {tuple(cached.shape)}; "
            "one entry a request"
        )
    if starts.dim() != 2 or starts.shape[0] != batch.num_reqs or starts.shape[1] == 0:
        raise ValueError(
            f"layer_starts expected shape ({batch.num_reqs}, num_layers), got "
            f"{tuple(starts.shape)}; one row a request, one column a layer"
        )
    num_cached = cached.tolist()
    if any(count < 0 or count % 2 for count in num_cached):
        raise ValueError(
            f"num_cached_tokens expected even counts, got {num_cached}; a hit ends with a "
            "block, never within a pair"
        )
    # Starts that ascend lie between the first and the last.
    lowest, highest = starts[:, 0].tolist(), starts[:, -1].tolist()
    within = min(lowest) >= 0 and all(map(le, highest, num_cached))
    if not within or not bool((starts.diff(dim=1) >= 0).all()):
        raise ValueError(
            f"layer_starts expected ascending positions from 0 to {num_cached}, got "
            f"{starts.tolist()}; a layer needs all rows of the layers above it"
        )
    computed = batch.num_computed_tokens
    if any(map(lt, computed.tolist(), lowest)):
        early = computed < starts[:, 0]
        raise ValueError(
            f"num_computed_tokens expected at least the first layer's start, got "
            f"{computed[early].tolist()} before {starts[early, 0].tolist()}; "
            "leave out rows that run in no layer"
        )


def _check_may_trim(batch: StepBatch, may_trim: Tensor) -> None:
    if tuple(may_trim.shape) != (batch.num_reqs,) or may_trim.dtype != torch.bool:
        raise ValueError(
            f"may_trim expected {batch.num_reqs} flags, got {may_trim.dtype} "
            f"{tuple(may_trim.shape)}; one flag a request"
        )
    wrong = may_trim & (~batch.is_prefilling | (batch.num_logits > 1))
    if bool(wrong.any()):
        raise ValueError(
            f"may_trim expected prefills without logits but the last row's, got requests "
            f"{wrong.nonzero()[:, 0].tolist()}; never trim decodes or rows that are asked for"
        )


def cached_tokens(batch: StepBatch) -> Tensor:
    """``(num_reqs,)`` int32, tokens that each request took over from the prefix cache."""
    if batch.replay is None:
        return torch.zeros_like(batch.num_computed_tokens)
    return batch.replay.num_cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryRows:
    """What most of planning starts from; computed once a step."""

    requests: Tensor
    """``(num_tokens,)`` int32, request of every query row."""
    positions: Tensor
    """``(num_tokens,)`` int64, absolute position of every query row."""
    seq_lens: Tensor
    """``(num_reqs,)`` int32, tokens after the step."""


def query_rows(batch: StepBatch) -> QueryRows:
    """The query rows of a batch."""
    requests = row_requests(batch)
    # Within a request positions and rows grow alike.
    shift = batch.num_computed_tokens - batch.query_start_loc[:-1]
    positions = torch.arange(batch.num_tokens) + shift.index_select(0, requests)
    return QueryRows(requests=requests, positions=positions, seq_lens=batch.seq_lens)


def row_requests(batch: StepBatch) -> Tensor:
    """Request of every query row, ``(num_tokens,)`` int32."""
    return run_of_each(batch.query_start_loc[1:], batch.num_tokens)


def run_of_each(ends: Tensor, count: int) -> Tensor:
    """Which of some runs each of ``count`` consecutive items is in, ``(count,)`` int32.

    Like ``repeat_interleave``, which took 0.4 ms of each step on a host of 16 cores.

    Example:
        Runs that end at ``[2, 2, 3]``: ``[0, 0, 2]``.
    """
    return torch.bincount(ends[:-1], minlength=count)[:count].cumsum(0, dtype=torch.int32)


def row_positions(batch: StepBatch) -> Tensor:
    """Absolute position of every query row, ``(num_tokens,)`` int64."""
    return query_rows(batch).positions


def row_token_windows(batch: StepBatch, rows: QueryRows) -> Tensor:
    """Ids at ``P, P - 1, ..`` of every row, ``(num_tokens, max_ngram)`` int64, -1 = before start.

    Example:
        One request, query ``[7, 8]``, look-back ``[6, -1, -1]``: rows ``[7, 6, -1, -1]`` and
        ``[8, 7, 6, -1]``.
    """
    num_reqs, back = batch.lookback_token_ids.shape
    # Backwards from the last request to the first: the ids of its query, then its look-back.
    num_ids = batch.num_tokens + num_reqs * back
    newest = num_ids - back - 1
    place = torch.arange(newest, newest - batch.num_tokens, -1).sub(rows.requests, alpha=back)
    history = torch.empty(num_ids, dtype=torch.int64)
    history[place] = batch.token_ids
    firsts = place.index_select(0, batch.query_start_loc[:-1])
    history[firsts[:, None] + torch.arange(1, back + 1)] = batch.lookback_token_ids
    return history.unfold(0, back + 1, 1).index_select(0, place)
