"""Hypothesis strategies: batches, block tables, schedules, partitions, as an engine meets them.

Everything shrinks towards one request, one row, one rank, ascending blocks and small token ids.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from pcpkit.config import CacheConfig, ParallelConfig
from pcpkit.plan.batch import StepBatch
from pcpkit.plan.partition import (
    Partition,
    PartitionStrategy,
    block_cyclic,
    dual_chunk_swap,
    levelled,
    make_partition,
)
from pcpkit.testing.batches import (
    PrefixHit,
    RaggedBatch,
    RequestRows,
    Steps,
    assemble_steps,
    random_cover,
    shuffled,
)

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "hypothesis expected for pcpkit.testing.strategies, got none; install the extra `test`: "
        "pip install 'pcpkit[test]'"
    ) from error

KINDS = ("decode", "prefill", "one-row prefill", "chunk", "drafts")
"""What a request does in a step. A resumed request is one of the prefills: what it had generated
counts as its prompt, so it may start at 0 or behind a prefix hit."""
_SEEDS = st.integers(0, 2**16)


# --- one batch ----------------------------------------------------------------------------------


@st.composite
def ragged_batches(
    draw: st.DrawFn,
    *,
    min_requests: int = 1,
    max_requests: int = 6,
    max_query_len: int = 40,
    max_computed: int = 100,
    max_drafts: int = 5,
    kinds: Sequence[str] = KINDS,
    resting: bool = False,
) -> RaggedBatch:
    """A step's requests: decodes, decodes with drafts, prefills, later chunks, one-row prefills.

    Args:
        draw: given by hypothesis.
        min_requests: 0 allows a step without requests.
        max_requests: upper bound of requests.
        max_query_len: upper bound of the rows of a prefill.
        max_computed: upper bound of the tokens computed before.
        max_drafts: upper bound of the draft tokens verified by a decode.
        kinds: which of :data:`KINDS` occur.
        resting: requests with no row occur too (padded requests); ``StepBatch`` refuses those.
    """
    count = draw(st.integers(min_requests, max_requests))
    requests: list[RequestRows] = []
    for request in range(count):
        kind = draw(st.sampled_from([*kinds, "rests"] if resting else list(kinds)))
        prefills = kind in ("prefill", "one-row prefill", "chunk")
        computed = 0 if kind == "prefill" else draw(st.integers(int(kind == "chunk"), max_computed))
        length = 1
        if kind == "rests":
            length = 0
        elif kind == "drafts":
            length += draw(st.integers(min(1, max_drafts), max_drafts))
        elif kind in ("prefill", "chunk"):
            length = draw(st.integers(1, max_query_len))
        requests.append(
            RequestRows(
                request=request,
                # A decode has computed at least its prompt.
                num_computed_tokens=computed if prefills else max(computed, 1),
                query_len=length,
                is_prefilling=prefills,
                num_logits=draw(st.sampled_from([min(length, 1), 0, length]))
                if prefills
                else length,
            )
        )
    return RaggedBatch(requests=tuple(requests))


@st.composite
def parallel_sizes(
    draw: st.DrawFn,
    *,
    tp_sizes: Sequence[int] = (1, 2, 4),
    pcp_sizes: Sequence[int] = (1, 2, 3, 4, 8),
    max_ranks: int = 8,
) -> ParallelConfig:
    """TP x PCP with at most ``max_ranks`` ranks, expert parallelism on or off."""
    pairs = [(tp, pcp) for tp in tp_sizes for pcp in pcp_sizes if tp * pcp <= max_ranks]
    tp_size, pcp_size = draw(st.sampled_from(pairs))
    return ParallelConfig(tp_size=tp_size, pcp_size=pcp_size, expert_parallel=draw(st.booleans()))


@st.composite
def cache_layouts(draw: st.DrawFn, *, num_blocks: int = 64, num_requests: int = 16) -> CacheConfig:
    """Block sizes, formats and ring rows; blocks so small that short prompts fill several."""
    return CacheConfig(
        num_blocks=num_blocks,
        num_window_blocks=num_blocks,
        num_requests=num_requests,
        block_size=2 * draw(st.integers(1, 8)),
        window_block_size=draw(st.integers(1, 16)),
        compressed_format=draw(st.sampled_from(["nvfp4", "mxfp8"])),
        ring_rows=2 * draw(st.integers(1, 4)),
    )


# --- partitions ---------------------------------------------------------------------------------


def partition_strategies() -> st.SearchStrategy[PartitionStrategy]:
    """DualChunkSwap, levelled, block-cyclic of small blocks, and random exact covers."""
    return st.one_of(
        st.sampled_from([dual_chunk_swap, levelled]),
        st.integers(1, 16).map(block_cyclic),
        _SEEDS.map(random_cover),
    )


@st.composite
def partitions(
    draw: st.DrawFn, batch: RaggedBatch, *, min_ranks: int = 1, max_ranks: int = 8
) -> Partition:
    """Any of :func:`partition_strategies` on ``min_ranks`` to ``max_ranks`` ranks."""
    strategy = draw(partition_strategies())
    size = draw(st.integers(min_ranks, max_ranks))
    return make_partition(batch.query_lens, batch.is_prefilling, size, strategy)


# --- what a batch refers to ---------------------------------------------------------------------


@st.composite
def block_tables(
    draw: st.DrawFn,
    seq_lens: Sequence[int],
    block_size: int,
    *,
    first_positions: Sequence[int] | None = None,
    num_spare_blocks: int = 3,
) -> Tensor:
    """Distinct physical blocks in any order, -1 where no block is mapped.

    Args:
        draw: given by hypothesis.
        seq_lens: tokens of each request.
        block_size: tokens a block.
        first_positions: positions below these need no block (a window has left them).
        num_spare_blocks: physical blocks that belong to nobody, anywhere between the others.

    Returns:
        ``(num_reqs, max_blocks)`` int32, as wide as the longest request needs or one block wider.
    """
    firsts = [0] * len(seq_lens) if first_positions is None else first_positions
    needed = [-(-length // block_size) for length in seq_lens]
    width = max(needed, default=0) + draw(st.integers(0, 1))
    blocks = shuffled(draw(_SEEDS), sum(needed) + num_spare_blocks)
    table = torch.full((len(seq_lens), width), -1, dtype=torch.int32)
    for row, (first, count) in enumerate(zip(firsts, needed, strict=True)):
        for index in range(max(first, 0) // block_size, count):
            table[row, index] = blocks.pop()
    return table


@st.composite
def topk_sets(draw: st.DrawFn, num_visible: Sequence[int], k: int) -> Tensor:
    """Selections of at most ``k`` visible positions a row.

    Args:
        draw: given by hypothesis.
        num_visible: by row, positions ``0 .. num_visible - 1`` may be selected.
        k: width.

    Returns:
        ``(num_rows, k)`` int32, ascending and distinct, then -1. Rows with fewer than ``k`` occur
        also where more are visible.
    """
    selected = torch.full((len(num_visible), k), -1, dtype=torch.int32)
    for row, visible in enumerate(num_visible):
        largest = min(k, visible)
        count = draw(st.sampled_from([largest, 0, largest // 2]))
        chosen = sorted(random.Random(draw(_SEEDS)).sample(range(visible), count))
        selected[row, :count] = torch.tensor(chosen, dtype=torch.int32)
    return selected


# --- several steps ------------------------------------------------------------------------------


@st.composite
def chunk_splits(draw: st.DrawFn, length: int, *, max_chunks: int = 8) -> tuple[int, ...]:
    """Positive chunk lengths that add up to ``length``: a prompt over several steps."""
    most = max(0, min(max_chunks, length) - 1)
    inner = st.integers(1, max(1, length - 1))
    cuts = sorted(draw(st.sets(inner, max_size=most))) if most else []
    ends = [*cuts, length] if length else []
    return tuple(end - start for start, end in zip([0, *cuts], ends, strict=False))


@st.composite
def step_schedules(
    draw: st.DrawFn,
    *,
    max_requests: int = 4,
    max_prompt: int = 40,
    max_decodes: int = 4,
    max_drafts: int = 0,
    preemption: bool = True,
    num_layers: int = 0,
) -> tuple[RaggedBatch, ...]:
    """Steps that run some requests to their end, each joining, pausing and leaving when it likes.

    Args:
        draw: given by hypothesis.
        max_requests: upper bound of requests.
        max_prompt: upper bound of a prompt's tokens.
        max_decodes: upper bound of the tokens decoded after a prompt.
        max_drafts: upper bound of the drafts a decode verifies; all are accepted.
        preemption: at most one request loses what it has computed and resumes at 0, where its
            generated tokens count as prompt.
        num_layers: if there are any, some requests start behind a prefix hit, by
            :func:`prefix_hits`, and some rows may be trimmed.
    """
    count = draw(st.integers(1, max_requests))
    prompts = [draw(st.integers(1, max_prompt)) for _ in range(count)]
    ends = [prompt + draw(st.integers(0, max_decodes)) for prompt in prompts]
    victim = draw(st.integers(0, count - 1)) if preemption and draw(st.booleans()) else None
    computed, steps = [0] * count, list[RaggedBatch]()
    hits: list[PrefixHit | None] = [None] * count
    for index in range(count if num_layers else 0):
        if prompts[index] > 2 and draw(st.booleans()):
            hit = draw(prefix_hits(prompts[index], num_layers))
            hits[index], computed[index] = (
                hit,
                draw(st.integers(hit.layer_starts[0], hit.num_tokens)),
            )
    while any(computed[i] < ends[i] for i in range(count)):
        if victim is not None and 0 < computed[victim] < ends[victim] and draw(st.booleans()):
            prompts[victim] = max(prompts[victim], computed[victim])
            computed[victim], hits[victim], victim = 0, None, None
        waiting = draw(st.permutations([i for i in range(count) if computed[i] < ends[i]]))
        rows: list[RequestRows] = []
        for request in waiting[: draw(st.integers(1, len(waiting)))]:
            prefills = computed[request] < prompts[request]
            end = prompts[request] if prefills else ends[request]
            most = draw(st.sampled_from([max_prompt, 1, 2, 3, 7])) if prefills else 1 + max_drafts
            length = min(end - computed[request], most)
            rows.append(
                RequestRows(
                    request=request,
                    num_computed_tokens=computed[request],
                    query_len=length,
                    is_prefilling=prefills,
                    num_logits=int(computed[request] + length == end) if prefills else length,
                    hit=hits[request],
                    may_trim=bool(num_layers) and prefills and draw(st.booleans()),
                )
            )
            computed[request] += length
        steps.append(RaggedBatch(requests=tuple(rows)))
    return tuple(steps)


@st.composite
def prefix_hits(draw: st.DrawFn, prompt: int, num_layers: int) -> PrefixHit:
    """A hit of an even number of tokens below ``prompt``, and any ascending starts up to it."""
    num_tokens = 2 * draw(st.integers(1, (prompt - 1) // 2))
    start = st.integers(0, num_tokens)
    starts = draw(st.lists(start, min_size=num_layers, max_size=num_layers))
    return PrefixHit(num_tokens=num_tokens, layer_starts=tuple(sorted(starts)))


def step_batches(
    rows: st.SearchStrategy[RaggedBatch] | None = None,
    *,
    layouts: st.SearchStrategy[CacheConfig] | None = None,
    vocab_size: int = 64,
    window_size: int | None = None,
) -> st.SearchStrategy[StepBatch]:
    """One step: ``rows`` (by default :func:`ragged_batches`) as :func:`step_sequences` does it."""
    one = (ragged_batches() if rows is None else rows).map(lambda batch: (batch,))
    drawn = step_sequences(one, layouts=layouts, vocab_size=vocab_size, window_size=window_size)
    return drawn.map(lambda steps: steps.batches[0])


@st.composite
def step_sequences(
    draw: st.DrawFn,
    schedules: st.SearchStrategy[tuple[RaggedBatch, ...]] | None = None,
    *,
    layouts: st.SearchStrategy[CacheConfig] | None = None,
    vocab_size: int = 64,
    window_size: int | None = None,
) -> Steps:
    """Steps as planning takes them, with pools they fit into, by ``batches.assemble_steps``.

    Args:
        draw: given by hypothesis.
        schedules: the rows of the steps, by default :func:`step_schedules`.
        layouts: block sizes and ring rows, by default :func:`cache_layouts`; the numbers of blocks
            and requests are replaced by what the steps need.
        vocab_size: token ids are below it.
        window_size: window blocks that no row can read any more are freed; by default none.
    """
    return assemble_steps(
        draw(step_schedules() if schedules is None else schedules),
        draw(cache_layouts() if layouts is None else layouts),
        seed=draw(_SEEDS),
        vocab_size=vocab_size,
        window_size=window_size,
    )
