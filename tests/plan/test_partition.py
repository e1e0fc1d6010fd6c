"""Partitions: invariants 1 to 9 of pcp-spec section 10, tables, the worked example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.config import CacheConfig, ParallelConfig
from pcpkit.kernels.slot_gather import gather_slots
from pcpkit.parallel.groups import Groups
from pcpkit.parallel.trace import Call, TracedGroup
from pcpkit.parallel.virtual import run_virtual_ranks
from pcpkit.plan.batch import row_positions, row_requests
from pcpkit.plan.partition import (
    STRATEGIES,
    Partition,
    PartitionStrategy,
    Segment,
    block_cyclic,
    dual_chunk_swap,
    levelled,
    make_partition,
)
from pcpkit.testing.batches import RaggedBatch, RequestRows, assemble_steps, random_cover
from pcpkit.testing.compare import assert_replicas_equal, assert_same_calls
from pcpkit.testing.strategies import cache_layouts, partition_strategies, ragged_batches

sizes = st.integers(1, 8)
any_batch = ragged_batches(min_requests=0, resting=True)
NAMED = sorted(STRATEGIES.items())
# Those that promise to level decodes; a random cover promises only to be exact.
turn_taking = st.one_of(
    st.sampled_from([dual_chunk_swap, levelled]), st.integers(1, 16).map(block_cyclic)
)


def dealt(batch: RaggedBatch, size: int, strategy: PartitionStrategy) -> Partition:
    return make_partition(batch.query_lens, batch.is_prefilling, size, strategy)


def prefills(*query_lens: int) -> RaggedBatch:
    return batch_of(query_lens, [True] * len(query_lens))


def batch_of(query_lens: Sequence[int], is_prefilling: Sequence[bool]) -> RaggedBatch:
    return RaggedBatch(
        requests=tuple(
            RequestRows(
                request=request,
                num_computed_tokens=0 if prefilling else 7,
                query_len=length,
                is_prefilling=prefilling,
                num_logits=0,
            )
            for request, (length, prefilling) in enumerate(
                zip(query_lens, is_prefilling, strict=True)
            )
        )
    )


def starts_of(query_lens: Sequence[int]) -> list[int]:
    return [sum(query_lens[:request]) for request in range(len(query_lens))]


# --- what holds for every exact cover -----------------------------------------------------------


@given(batch=any_batch, size=sizes, strategy=partition_strategies())
def test_every_row_is_on_exactly_one_rank(
    batch: RaggedBatch, size: int, strategy: PartitionStrategy
) -> None:
    """Invariants 1 and 9."""
    partition = dealt(batch, size, strategy)
    assert partition.size == size
    rows = [row for part in partition.rows for row in part.tolist()]
    assert sorted(rows) == list(range(batch.num_tokens))
    for request, one in enumerate(batch.requests):
        offsets = [
            offset
            for segments in partition.segments
            for segment in segments
            if segment.request == request
            for offset in range(segment.start, segment.stop)
        ]
        assert sorted(offsets) == list(range(one.query_len))


@given(batch=any_batch, size=sizes, strategy=partition_strategies())
def test_same_input_gives_same_partition(
    batch: RaggedBatch, size: int, strategy: PartitionStrategy
) -> None:
    """Invariant 2: nothing but lengths, flags and size goes in, and no state stays behind."""
    first, again = dealt(batch, size, strategy), dealt(batch, size, strategy)
    assert first.segments == again.segments
    for name in ("gather_index", "write_mask", "restore_index"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name


@given(batch=any_batch, size=sizes, strategy=partition_strategies())
def test_local_order_is_decodes_then_prefills(
    batch: RaggedBatch, size: int, strategy: PartitionStrategy
) -> None:
    """Invariant 3: by request and start; segments are not empty and rows follow them."""
    partition = dealt(batch, size, strategy)
    starts = starts_of(batch.query_lens)
    for segments, rows in zip(partition.segments, partition.rows, strict=True):
        assert all(segment.num_rows > 0 for segment in segments)
        keys = [
            (batch.is_prefilling[segment.request], segment.request, segment.start)
            for segment in segments
        ]
        assert keys == sorted(set(keys))
        assert rows.tolist() == [
            starts[segment.request] + offset
            for segment in segments
            for offset in range(segment.start, segment.stop)
        ]


@given(batch=any_batch, size=sizes, strategy=partition_strategies())
@example(batch=prefills(), size=4, strategy=dual_chunk_swap)
@example(batch=batch_of([1], [False]), size=8, strategy=levelled)
def test_gather_and_restore_invert_each_other(
    batch: RaggedBatch, size: int, strategy: PartitionStrategy
) -> None:
    """Invariants 5 and 7."""
    partition = dealt(batch, size, strategy)
    width = max(len(rows) for rows in partition.rows)
    assert partition.num_padded_rows == width
    assert partition.gather_index.shape == partition.write_mask.shape == (size * width,)
    every = torch.arange(batch.num_tokens)
    assert torch.equal(partition.gather_index[partition.restore_index], every)
    assert bool(partition.write_mask[partition.restore_index].all())
    assert partition.restore_index.unique().numel() == batch.num_tokens
    for rank, rows in enumerate(partition.rows):
        piece = slice(rank * width, (rank + 1) * width)
        padded = [*rows.tolist(), *[0] * (width - len(rows))]
        assert partition.gather_index[piece].tolist() == padded
        real = [index < len(rows) for index in range(width)]
        assert partition.write_mask[piece].tolist() == real


@given(batch=ragged_batches(), size=sizes, strategy=partition_strategies(), layout=cache_layouts())
def test_every_slot_is_written_once(
    batch: RaggedBatch, size: int, strategy: PartitionStrategy, layout: CacheConfig
) -> None:
    """Invariant 6, through the op that plans use: distinct slots, padding writes nothing."""
    partition = dealt(batch, size, strategy)
    step = assemble_steps([batch], layout).batches[0]
    slots = gather_slots(
        row_positions(step),
        row_requests(step),
        partition.gather_index,
        partition.write_mask,
        step.block_table[None].repeat(2, 1, 1),
        [layout.block_size] * 2,
        [1, 2],
    )
    odd = sum(position % 2 for _, position in batch.places)
    for group, expected in zip(slots, (batch.num_tokens, odd), strict=True):
        written = group[group >= 0]
        assert len(written) == len(written.unique()) == expected
    assert int(partition.write_mask.sum()) == batch.num_tokens
    assert bool((slots[:, ~partition.write_mask] == -1).all())


@given(batch=any_batch, size=sizes, strategy=turn_taking)
@example(batch=batch_of([2, 2, 2, 2], [False] * 4), size=2, strategy=levelled)
@example(batch=batch_of([1, 1, 1, 1], [False, True, False, True]), size=2, strategy=block_cyclic(4))
def test_decodes_are_whole_and_dealt_evenly(
    batch: RaggedBatch, size: int, strategy: PartitionStrategy
) -> None:
    """Invariant 4."""
    partition = dealt(batch, size, strategy)
    decodes = [
        [segment for segment in segments if not batch.is_prefilling[segment.request]]
        for segments in partition.segments
    ]
    for segment in (segment for segments in decodes for segment in segments):
        assert (segment.start, segment.stop) == (0, batch.query_lens[segment.request])
    counts = [len(segments) for segments in decodes]
    assert max(counts) - min(counts) <= 1


# --- the collectives of a step ------------------------------------------------------------------


@given(batch=ragged_batches(max_requests=3), strategy=partition_strategies(), data=st.data())
@example(batch=batch_of([1], [False]), strategy=dual_chunk_swap, data=None)
def test_ranks_exchange_their_rows_in_step(
    batch: RaggedBatch, strategy: PartitionStrategy, data: st.DataObject | None
) -> None:
    """Invariants 5, 7 and 8 on virtual ranks: equal calls, also of a rank without rows."""
    size = data.draw(st.integers(2, 4)) if data is not None else 4
    partition = dealt(batch, size, strategy)
    content = torch.randint(0, 256, (batch.num_tokens, 5), dtype=torch.uint8)
    traces: list[list[Call]] = [[] for _ in range(size)]

    def rank_body(rank: int, groups: Groups) -> Tensor:
        group = TracedGroup(groups.pcp, traces[rank])
        mine = content[partition.rows[rank]]
        padding = torch.full((partition.num_padded_rows - len(mine), 5), 255, dtype=torch.uint8)
        gathered = group.all_gather(torch.cat([mine, padding])).flatten(0, 1)
        return gathered[partition.restore_index]

    restored = run_virtual_ranks(ParallelConfig(pcp_size=size), rank_body, deadline_s=20)
    assert torch.equal(restored[0], content)
    assert_replicas_equal([{"rows": rows} for rows in restored])
    shape = (partition.num_padded_rows, 5)
    assert_same_calls(traces, [Call("pcp", "all_gather", shape, torch.uint8)])


# --- DualChunkSwap ------------------------------------------------------------------------------


def dual_by_hand(query_lens: Sequence[int], flags: Sequence[bool], size: int) -> dict[int, int]:
    """Owner of every global row, by the owner formula of pcp-spec appendix D."""
    owners: dict[int, int] = {}
    decodes = 0
    for start, length, prefilling in zip(starts_of(query_lens), query_lens, flags, strict=True):
        chunk = -(-length // (2 * size))
        for offset in range(length):
            piece = offset // chunk
            mirrored = piece if piece < size else 2 * size - 1 - piece
            owners[start + offset] = mirrored if prefilling else decodes % size
        decodes += not prefilling and length > 0
    return owners


@given(batch=any_batch, size=sizes)
def test_dual_follows_the_owner_formula(batch: RaggedBatch, size: int) -> None:
    """Sections 1.2 and 1.3; at most two segments of a request on a rank (invariant 3)."""
    partition = dealt(batch, size, dual_chunk_swap)
    found = {row: rank for rank, rows in enumerate(partition.rows) for row in rows.tolist()}
    assert found == dual_by_hand(batch.query_lens, batch.is_prefilling, size)
    for segments in partition.segments:
        counts = Counter(segment.request for segment in segments)
        assert max(counts.values(), default=0) <= 2


@pytest.mark.parametrize(
    ("size", "query_len", "expected"),
    [
        (2, 1, [1, 0]),
        (2, 3, [1, 2]),
        (2, 5, [2, 3]),
        (2, 9, [3, 6]),
        (2, 127, [63, 64]),
        (2, 129, [63, 66]),
        (4, 1, [1, 0, 0, 0]),
        (4, 7, [1, 2, 2, 2]),
        (4, 9, [2, 2, 2, 3]),
        (4, 17, [3, 3, 5, 6]),
        (4, 33, [5, 8, 10, 10]),
        (4, 100, [22, 26, 26, 26]),
        (4, 129, [27, 34, 34, 34]),
        (8, 17, [2] * 7 + [3]),
        (8, 33, [3, 3, 3, 3, 3, 6, 6, 6]),
        (8, 100, [7, 9] + [14] * 6),
        (8, 129, [9, 12] + [18] * 6),
        (8, 1000, [118] + [126] * 7),
    ],
)
def test_dual_is_as_lumpy_as_documented(size: int, query_len: int, expected: list[int]) -> None:
    """Section 1.6."""
    partition = dealt(prefills(query_len), size, dual_chunk_swap)
    assert [len(rows) for rows in partition.rows] == expected


def test_worked_example() -> None:
    """Appendix A: P = 2, one prefill of 10 rows from position 5."""
    partition = dealt(prefills(10), 2, dual_chunk_swap)
    spans = [[(one.start, one.stop) for one in segments] for segments in partition.segments]
    assert spans == [[(0, 3), (9, 10)], [(3, 6), (6, 9)]]
    assert partition.num_padded_rows == 6
    assert partition.gather_index.tolist() == [0, 1, 2, 9, 0, 0, 3, 4, 5, 6, 7, 8]
    assert partition.restore_index.tolist() == [0, 1, 2, 6, 7, 8, 9, 10, 11, 3]
    assert (~partition.write_mask).nonzero()[:, 0].tolist() == [4, 5]


def test_one_decode_is_on_rank_0() -> None:
    """Appendix A, the next step: the owner is ordinal 0 of the decodes."""
    partition = dealt(batch_of([1], [False]), 2, dual_chunk_swap)
    assert [rows.tolist() for rows in partition.rows] == [[0], []]


# --- the other strategies -----------------------------------------------------------------------


@given(batch=ragged_batches(kinds=("decode", "prefill", "one-row prefill", "chunk")), size=sizes)
def test_levelled_is_level_to_one_row(batch: RaggedBatch, size: int) -> None:
    lengths = [len(rows) for rows in dealt(batch, size, levelled).rows]
    assert max(lengths) - min(lengths) <= 1


@given(batch=any_batch, size=sizes)
def test_levelled_levels_each_request(batch: RaggedBatch, size: int) -> None:
    """At most one row a prefill (issue 4, P6), two segments a rank, chunks in dual's order."""
    partition = dealt(batch, size, levelled)
    for request, prefilling in enumerate(batch.is_prefilling):
        mine = [
            [segment for segment in segments if segment.request == request]
            for segments in partition.segments
        ]
        counts = [sum(segment.num_rows for segment in segments) for segments in mine]
        assert all(len(segments) <= 2 for segments in mine)
        if prefilling:
            assert max(counts) - min(counts) <= 1


def test_levelled_rotates_the_spare_row() -> None:
    partition = dealt(prefills(5, 5), 2, levelled)
    spans = [[(s.request, s.start, s.stop) for s in segments] for segments in partition.segments]
    assert spans[0] == [(0, 0, 2), (0, 4, 5), (1, 2, 3), (1, 3, 4)]
    assert spans[1] == [(0, 2, 3), (0, 3, 4), (1, 0, 2), (1, 4, 5)]


def test_levelled_keeps_the_causal_pairing() -> None:
    """An early chunk goes with a late one, so that ranks attend to equally many keys."""
    partition = dealt(prefills(1000), 4, levelled)
    work = [int((rows + 1).sum()) for rows in partition.rows]
    assert max(work) - min(work) < 1000


@given(lengths=st.lists(st.integers(0, 40), max_size=5), block=st.integers(1, 9), size=sizes)
def test_cyclic_deals_blocks_in_turn(lengths: list[int], block: int, size: int) -> None:
    partition = dealt(prefills(*lengths), size, block_cyclic(block))
    turns = [
        Segment(request=request, start=start, stop=min(start + block, length))
        for request, length in enumerate(lengths)
        for start in range(0, length, block)
    ]
    for rank, segments in enumerate(partition.segments):
        assert list(segments) == turns[rank::size]


@pytest.mark.parametrize(("name", "strategy"), NAMED)
def test_on_one_rank_rows_keep_their_order(name: str, strategy: PartitionStrategy) -> None:
    partition = dealt(batch_of([3, 1, 4], [True, False, True]), 1, strategy)
    assert partition.rows[0].tolist() == [3, 0, 1, 2, 4, 5, 6, 7]


# --- refusals -----------------------------------------------------------------------------------


def test_refuses_a_block_without_rows() -> None:
    with pytest.raises(ValueError, match=r"block expected >= 1, got 0; "):
        block_cyclic(0)


@pytest.mark.parametrize(
    ("lengths", "flags", "size", "message"),
    [
        ([1, 2], [True], 2, "is_prefilling expected 2 flags, got 1; "),
        ([1], [True], 0, "size expected >= 1, got 0; "),
        ([3, -1], [True, True], 2, r"query_lens expected counts of rows, got \[3, -1\]; "),
    ],
)
def test_refuses_inputs(lengths: list[int], flags: list[bool], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_partition(lengths, flags, size)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([[(0, 0, 2)], [(1, 0, 2)]], "every one of 5 rows on exactly one of 2 ranks, got 4 rows"),
        ([[(0, 0, 2)], [(1, 0, 3), (0, 1, 2)]], "got 6 rows on 2"),
        ([[(0, 0, 2), (1, 0, 3)]], "got 5 rows on 1"),
        ([[(0, 0, 5)], []], "rows of one request in each segment, got Segment.* on rank 0"),
        ([[(0, 0, 2), (0, 2, 2)], [(1, 0, 3)]], "rows of one request in each segment"),
        ([[(0, 0, 2)], [(2, 0, 3)]], "rows of one request in each segment, .* on rank 1"),
        ([[(-2, 0, 2)], [(1, 0, 3)]], "rows of one request in each segment"),
    ],
)
def test_refuses_what_is_no_exact_cover(
    segments: list[list[tuple[int, int, int]]], message: str
) -> None:
    def wrong(
        query_lens: Sequence[int], is_prefilling: Sequence[bool], size: int
    ) -> list[list[Segment]]:
        return [[Segment(request=r, start=a, stop=b) for r, a, b in rank] for rank in segments]

    with pytest.raises(ValueError, match=message):
        make_partition([2, 3], [True, True], 2, wrong)


def test_random_covers_differ_by_seed() -> None:
    """The hostile strategy of the properties above is none of the three in disguise."""
    batch = prefills(30, 30)
    found = {dealt(batch, 4, random_cover(seed)).segments for seed in range(8)}
    assert len(found) == 8
