"""Field scenarios of context parallelism that need no model: plans, slots, exchanges, experts.

What each scenario was, and which test covers those that are not here: docs/field-scenarios.md.
R is the number of PCP ranks, n the rows of a request in the step, c = ceil(n / 2R) its chunks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pcpkit.config import CacheConfig, ParallelConfig
from pcpkit.kernels import record_move
from pcpkit.kernels.cache_write import encode_records, gather_records, scatter_records
from pcpkit.kernels.expert_outputs import expert_outputs, sum_outputs
from pcpkit.kernels.experts import routed_experts
from pcpkit.kernels.slot_gather import gather_slots
from pcpkit.parallel.ep import gather_routed, return_outputs
from pcpkit.parallel.groups import Groups
from pcpkit.parallel.pcp import gather_rows
from pcpkit.parallel.trace import Call, TracedGroup
from pcpkit.parallel.virtual import RankMismatch, run_virtual_ranks
from pcpkit.plan.batch import StepBatch
from pcpkit.plan.partition import STRATEGIES, Partition, dual_chunk_swap, make_partition
from pcpkit.plan.rows import LayerRows
from pcpkit.plan.step import StepPlan, plan_step
from pcpkit.testing.batches import RaggedBatch, RequestRows, assemble_steps
from pcpkit.testing.compare import assert_same_calls, bits, same_bits
from pcpkit.testing.poison import guard
from tests.kernels.inputs_experts import ExpertInputs, draw_experts

LAYOUT = CacheConfig(num_blocks=1, num_window_blocks=1, num_requests=1)


def request(name: int, computed: int, count: int, *, decode: bool = False) -> RequestRows:
    return RequestRows(
        request=name,
        num_computed_tokens=computed,
        query_len=count,
        is_prefilling=not decode,
        num_logits=1,
    )


def rows_of(requests: Sequence[RequestRows], size: int) -> list[LayerRows]:
    """Rows of all ranks of one step, DualChunkSwap; the same in every layer."""
    return [plan.layer_rows(0) for plan in plans_of(requests, size)]


def plans_of(requests: Sequence[RequestRows], size: int) -> list[StepPlan]:
    """Plans of all ranks of one step, DualChunkSwap."""
    rows = RaggedBatch(requests=tuple(requests))
    steps = assemble_steps([rows], LAYOUT)
    partition = dual(rows.query_lens, size, rows.is_prefilling)
    return [plan_dual(steps.batches[0], partition, rank) for rank in range(size)]


def plan_dual(batch: StepBatch, partition: Partition, rank: int) -> StepPlan:
    return plan_step(
        batch,
        ratios=(1, 2),
        block_size=64,
        window_block_size=32,
        ring_rows=8,
        partition=partition,
        rank=rank,
    )


def dual(lengths: Sequence[int], size: int, flags: Sequence[bool] | None = None) -> Partition:
    return make_partition(lengths, flags or [True] * len(lengths), size, dual_chunk_swap)


# --- K4: partition and metadata views -----------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_b036_positions_follow_a_prefix_of_any_length(size: int) -> None:
    """Also prefix 1 and 3,670 new tokens: the prefix is what was computed, nothing is padded."""
    sweep = [(prefix, extend) for prefix in range(13) for extend in range(1, 26)]
    for prefix, extend in [*sweep, (1, 3670)]:
        partition = dual([extend], size)
        for plan, rows in zip(
            rows_of([request(0, prefix, extend)], size), partition.rows, strict=True
        ):
            assert torch.equal(plan.positions, prefix + rows)


def test_b037_visible_lengths_are_in_local_order() -> None:
    first, second = rows_of([request(0, 0, 13)], 2)
    assert first.num_visible(1).tolist() == [1, 2, 3, 4, 13]
    assert second.num_visible(1).tolist() == [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("length", [5, 13, 64, 129])
@pytest.mark.parametrize("record", ["mxfp8", "nvfp4"])
def test_b038_cached_rows_are_rotated_by_their_own_position(length: int, record: str) -> None:
    """Latents are equal, so a cached row differs from others by its rotation alone."""
    latent = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    angles = torch.outer(torch.arange(length), 0.5 ** torch.arange(16))
    rope = torch.cat([angles.cos(), angles.sin()], dim=1)

    def cached(size: int) -> list[Tensor]:
        ranks = rows_of([request(0, 0, length)], size)

        def body(rank: int, groups: Groups) -> Tensor:
            rows = ranks[rank]
            local = latent.expand(rows.num_rows, -1).contiguous()
            records = encode_records(local, rows.positions, rope, record)
            cache = torch.zeros(-(-length // 32) + 3, 32, records.shape[1], dtype=torch.uint8)
            gathered = gather_rows(groups.pcp, records, rows.num_padded_rows)
            scatter_records(gathered, rows.window_slots, cache)
            return cache.flatten(0, 1)[:length]

        return run_virtual_ranks(ParallelConfig(pcp_size=size), body, deadline_s=20)

    (want,) = cached(1)
    alone = [encode_records(latent, torch.tensor([p]), rope, record) for p in range(length)]
    assert torch.equal(want, torch.cat(alone))
    for size in (2, 4):
        assert all(torch.equal(found, want) for found in cached(size))


def test_b039_every_view_of_a_rank_has_the_same_segments() -> None:
    """Lengths (1, 9, 2), R = 4; the block table stays that of the whole batch."""
    lengths = (1, 9, 2)
    plans = plans_of([request(i, 0, count) for i, count in enumerate(lengths)], 4)
    found = [plan.layer_rows(0).row_request.bincount(minlength=3).tolist() for plan in plans]
    assert found == [[1, 2, 1], [0, 2, 1], [0, 2, 0], [0, 3, 0]]
    for plan in plans:
        rows = plan.layer_rows(0)
        local = (plan.token_ids, plan.token_windows, rows.positions, rows.row_request)
        assert {len(one) for one in (*local, rows.window_floor)} == {plan.num_rows}
        assert len(plan.block_table) == len(plan.window_block_table) == 3


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_b041_decodes_are_padded_only_where_ranks_are_uneven(count: int) -> None:
    requests = [request(i, 3 + i, 1, decode=True) for i in range(count)]
    for size in (1, 4):
        ranks = rows_of(requests, size)
        assert [rows.num_rows for rows in ranks] == [
            len(range(rank, count, size)) for rank in range(size)
        ]
        for rows in ranks:
            assert len(rows.window_slots) == size * -(-count // size)
            assert int((rows.window_slots >= 0).sum()) == count
    assert len(rows_of(requests, 1)[0].window_slots) == count, "alone there is no padding"


def test_b043_packed_rows_come_back_in_order() -> None:
    """The hidden state of token i is i: 0 .. 13 on every rank; 500 random batches, some rows 1."""
    source = random.Random(43)
    batches = [[source.choice([1, 1, 2, 7, 30]) for _ in range(4)] for _ in range(500)]
    for lengths in [[5, 1, 8], *batches]:
        for size in (2, 4):
            for strategy in STRATEGIES.values():
                partition = make_partition(lengths, [True] * len(lengths), size, strategy)
                content = torch.arange(sum(lengths))
                gathered = content[partition.gather_index]
                assert torch.equal(gathered[partition.restore_index], content)


# --- K5: degenerate shapes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "owned"),
    [
        (1, [[0], [], [], []]),
        (2, [[0], [1], [], []]),
        (7, [[0], [1, 6], [2, 5], [3, 4]]),
        (9, [[0, 1], [2, 3], [4, 5], [6, 7, 8]]),
    ],
)
def test_b166_requests_shorter_than_the_alignment(length: int, owned: list[list[int]]) -> None:
    assert [rows.tolist() for rows in dual([length], 4).rows] == owned


def test_b166_nothing_is_lost_below_the_alignment() -> None:
    for length in range(1, 10):
        rows = [row for part in dual([length], 4).rows for row in part.tolist()]
        assert sorted(rows) == list(range(length))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((8, 1, 8), [[2, 1, 2], [2, 0, 2], [2, 0, 2], [2, 0, 2]]),
        ((1, 8), [[1, 2], [0, 2], [0, 2], [0, 2]]),
        ((8, 1), [[2, 1], [2, 0], [2, 0], [2, 0]]),
        ((1, 1), [[1, 1], [0, 0], [0, 0], [0, 0]]),
    ],
)
def test_b167_b168_empty_segments_anywhere(
    lengths: tuple[int, ...], expected: list[list[int]]
) -> None:
    ranks = rows_of([request(i, 0, count) for i, count in enumerate(lengths)], 4)
    counts = [rows.row_request.bincount(minlength=len(lengths)).tolist() for rows in ranks]
    assert counts == expected


@pytest.mark.parametrize("size", [1, 2, 4])
def test_b169_one_row_left_of_a_prompt_is_no_decode(size: int) -> None:
    """Budget 4, prompts of 9: the last row is a prefill, so it does not take a decode's turn."""
    tail = [request(0, 5, 1, decode=True), request(1, 8, 1), request(2, 4, 1, decode=True)]
    ranks = rows_of(tail, size)
    owners = {int(one): rank for rank, rows in enumerate(ranks) for one in rows.row_request}
    assert owners == {0: 0, 1: 0, 2: 1 % size}
    assert ranks[0].row_request.tolist()[-1] == 1, "prefills come last"


# --- K6: padding and sentinels ------------------------------------------------------------------


def test_b068_padding_of_a_shorter_step_is_fresh() -> None:
    """16 rows of request 0, then 5 of request 1 on two ranks: the page of request 0 stays."""
    schedule = [request(0, 0, 16), request(1, 0, 5), request(0, 16, 1, decode=True)]
    steps = assemble_steps([RaggedBatch(requests=(one,)) for one in schedule], LAYOUT)
    cache = torch.zeros(8, 32, 4, dtype=torch.uint8)
    for content, batch in enumerate(steps.batches[:2], start=1):
        partition = dual([batch.num_tokens], 2)
        plan = plan_dual(batch, partition, 0)
        slots = plan.layer_rows(0).window_slots
        assert bool((slots[~partition.write_mask] == -1).all())
        records = torch.full((len(slots), 4), content, dtype=torch.uint8)
        scatter_records(records, slots, cache)
    pages = [int(batch.window_block_table[0, 0]) for batch in steps.batches[:2]]
    assert cache[pages[0], :, 0].tolist() == [1] * 16 + [0] * 16
    assert cache[pages[1], :, 0].tolist() == [2] * 5 + [0] * 27
    assert int(cache.count_nonzero()) == 4 * 21


@pytest.mark.parametrize("write", [scatter_records, record_move._launch_scatter])
def test_b069_a_padding_slot_is_not_the_last_one(
    write: Callable[[Tensor, Tensor, Tensor], None],
) -> None:
    """Reference and interpreted kernel; guarded on all sides."""
    cache = guard(torch.zeros(2, 4, 8, dtype=torch.uint8))
    records = torch.full((3, 8), 9, dtype=torch.uint8)
    write(records, torch.tensor([-1, 5, -1]), cache.view)
    cache.check()
    changed = cache.view.flatten(0, 1).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [5]


def test_b074_positions_of_padding_read_no_table() -> None:
    """Slot -1 and position 2^31 - 1; more rows than slots are refused, not truncated."""
    rope = guard(torch.randn(4, 32), strided=False)
    latents = torch.randn(3, 64).bfloat16()
    positions = torch.tensor([2**31 - 1, 3, -1])
    records = encode_records(latents, positions, rope.view, "mxfp8")
    rope.check()
    want = encode_records(latents[1:2], positions[1:2], rope.view, "mxfp8")
    cache = torch.zeros(1, 4, records.shape[1], dtype=torch.uint8)
    scatter_records(records, torch.tensor([-1, 2, -1]), cache)
    assert torch.equal(gather_records(cache, torch.tensor([2])), want)
    assert not cache[0, [0, 1, 3]].any()
    with pytest.raises(ValueError, match="slots expected shape"):
        scatter_records(records, torch.tensor([2]), cache)


def test_b075_a_column_past_a_narrow_table_is_not_the_neighbours() -> None:
    """Block size 16, tables [[5], [9]], positions 0 and 16 of request 0: slots 80 and -1."""
    tables = guard(torch.tensor([[[5], [9]]], dtype=torch.int32))
    slots = gather_slots(
        torch.tensor([0, 16]),
        torch.tensor([0, 0], dtype=torch.int32),
        torch.tensor([0, 1]),
        torch.tensor([True, True]),
        tables.view,
        [16],
        [1],
    )
    assert slots.tolist() == [[80, -1]]
    tables.check()


# --- K11: compressor ----------------------------------------------------------------------------


@pytest.mark.parametrize("position", [*range(21), 2**20 - 1, 2**20, 2**20 + 1])
def test_b080_pairs_close_at_odd_positions_only(position: int) -> None:
    (plan,) = plans_of([request(0, position, 1, decode=True)], 1)
    rows = plan.layer_rows(0)
    pairs = rows.groups[2]
    odd = position % 2 == 1
    assert pairs.closing_rows.tolist() == ([0] if odd else [])
    assert pairs.positions.tolist() == ([position - 1] if odd else [])
    entry = (position - 1) // 2
    block = int(plan.block_table[0, position // 64])
    assert pairs.slots.tolist() == ([block * 32 + entry % 32] if odd else [])
    assert rows.num_visible(2).tolist() == [(position + 1) // 2]
    assert rows.links.open_slots.tolist() == ([] if odd else [position % 8])


# --- K14: collectives ---------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (3, 0, 2, 1)])
def test_b115_b116_uneven_and_empty_gathers(counts: tuple[int, ...]) -> None:
    """Padded alike, and no padding left after the restore; over gloo: test_collectives.py."""
    width = max(counts)
    keep = torch.tensor([j < count for count in counts for j in range(width)], dtype=torch.bool)

    def body(rank: int, groups: Groups) -> list[int]:
        rows = torch.arange(counts[rank])[:, None] + 10 * rank
        return gather_rows(groups.pcp, rows, width)[keep].flatten().tolist()

    want = [10 * rank + j for rank, count in enumerate(counts) for j in range(count)]
    found = run_virtual_ranks(ParallelConfig(pcp_size=4), body, deadline_s=20)
    assert found == [want] * 4


def test_b120_nested_gathers_are_undone_in_reverse() -> None:
    """x on rank (d, c) = 10 d + c: own rows x group size come back, swapped ones do not."""

    def body(rank: int, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
        own = torch.full((2,), 10 * groups.pcp.rank + groups.tp.rank)
        nested = groups.pcp.all_gather(groups.tp.all_gather(own))
        back = groups.tp.reduce_scatter(groups.pcp.reduce_scatter(nested))
        swapped = groups.pcp.reduce_scatter(groups.tp.reduce_scatter(nested))
        return own, back, swapped

    ranks = ParallelConfig(tp_size=2, pcp_size=2)
    found = run_virtual_ranks(ranks, body, deadline_s=20)
    assert all(torch.equal(back, 4 * own) for own, back, _ in found)
    assert not all(torch.equal(swapped, 4 * own) for own, _, swapped in found)


def test_b123_a_row_fewer_is_an_error_on_all_ranks() -> None:
    """Virtual ranks are the debug mode: the error has both shapes."""

    def body(rank: int, groups: Groups) -> Tensor:
        return groups.pcp.all_gather(torch.zeros(3 - (rank == 1), 4))

    with pytest.raises(RankMismatch, match=r"rank 0: .*\(3, 4\).*rank 1: .*\(2, 4\)"):
        run_virtual_ranks(ParallelConfig(pcp_size=2), body, deadline_s=20)


# --- K15: divergence between ranks --------------------------------------------------------------


def test_b137_rows_for_logits_come_from_their_owner() -> None:
    """Each rank's own idea of the rows is off by an ulp: what they sample from is one copy."""
    batch = [request(0, 0, 5), request(1, 3, 1, decode=True), request(2, 3, 1, decode=True)]
    plans = plans_of(batch, 4)

    def body(rank: int, groups: Groups) -> Tensor:
        noisy = torch.nextafter(torch.ones(3, 8), torch.tensor(float(rank)))
        wanted = plans[rank].logits
        names = plans[rank].layer_rows(0).row_request[wanted.local_rows].long()
        return gather_rows(groups.pcp, noisy[names], wanted.num_padded)[wanted.restore_index]

    found = run_virtual_ranks(ParallelConfig(pcp_size=4), body, deadline_s=20)
    assert all(torch.equal(bits(one), bits(found[0])) for one in found)


@pytest.mark.parametrize("length", range(1, 17))
def test_b140_the_sample_is_taken_from_the_owner_of_the_last_row(length: int) -> None:
    size = 4
    plans = plans_of([request(0, 0, length)], size)
    chunk = (length - 1) // -(-length // (2 * size))
    owner = chunk if chunk < size else 2 * size - 1 - chunk
    found = [rank for rank, plan in enumerate(plans) if len(plan.logits.local_rows)]
    assert found == [owner]
    assert {9: 3, 8: 0, 7: 1, 1: 0}.get(length, owner) == owner
    (row,) = plans[owner].logits.local_rows.tolist()
    assert int(plans[owner].layer_rows(0).positions[row]) == length - 1


# --- K20: experts -------------------------------------------------------------------------------


def spread(inputs: ExpertInputs, groups: Groups) -> Tensor:
    """Every PCP rank brings these rows, every rank runs its share of the experts."""
    count, num_rows = inputs.w1[0].shape[0] // groups.ep.size, inputs.x.shape[0]
    first = groups.ep.rank * count
    stacks = {
        name: tuple(tensor[first : first + count] for tensor in getattr(inputs, name))
        for name in ("w1", "w3", "w2")
    }
    is_row = torch.ones(groups.pcp.size * num_rows, dtype=torch.bool)
    x, ids, weights = gather_routed(groups, inputs.x, inputs.ids, inputs.weights, num_rows, is_row)
    mine = replace(inputs, x=x, ids=ids, weights=weights, first_expert=first, **stacks)
    return sum_outputs(return_outputs(groups, expert_outputs(*mine.args), num_rows))


def test_b142_rows_without_experts_contribute_nothing() -> None:
    inputs = draw_experts(6, num_experts=4, top_k=2, hidden=64, inter=32, seed=142)
    clean = routed_experts(*inputs.args)
    inputs.ids[1] = -1
    inputs.ids[3, 0] = -1
    ranks = ParallelConfig(pcp_size=2, expert_parallel=True)
    for total in run_virtual_ranks(ranks, lambda _, g: spread(inputs, g), deadline_s=20):
        assert same_bits(total, routed_experts(*inputs.args))
        assert not total[1].any()
        others = [0, 2, 4, 5]
        assert same_bits(total[others], clean[others])


@pytest.mark.parametrize("ranks", [(4, 1), (2, 2), (1, 4)])
def test_b143_every_expert_is_reached_by_its_global_id(ranks: tuple[int, int]) -> None:
    tp_size, pcp_size = ranks
    parallel = ParallelConfig(tp_size=tp_size, pcp_size=pcp_size, expert_parallel=True)
    inputs = draw_experts(2, num_experts=8, top_k=1, hidden=64, inter=32, seed=143)
    for expert in range(8):
        inputs.ids.fill_(expert)
        want = routed_experts(*inputs.args)
        assert want.any()
        for total in run_virtual_ranks(parallel, lambda _, g: spread(inputs, g), deadline_s=20):
            assert same_bits(total, want)


def test_b144_ranks_without_tokens_stay_in_step() -> None:
    """Twenty layers route to the experts of rank 0 alone, then to those of rank 1."""
    parallel = ParallelConfig(pcp_size=2, expert_parallel=True)
    inputs = draw_experts(3, num_experts=4, top_k=2, hidden=64, inter=32, seed=144)
    traces: list[list[Call]] = [[], []]

    def body(rank: int, groups: Groups) -> list[Tensor]:
        traced = Groups(tp=groups.tp, pcp=TracedGroup(groups.pcp, traces[rank]), ep=groups.ep)
        return [spread(share, traced) for share in [to_rank(0)] * 20 + [to_rank(1)] * 20]

    def to_rank(rank: int) -> ExpertInputs:
        chosen = inputs.rows(torch.arange(3))
        chosen.ids[:] = torch.tensor([2 * rank, 2 * rank + 1])
        return chosen

    want = [routed_experts(*to_rank(rank).args) for rank in (0, 1)]
    for totals in run_virtual_ranks(parallel, body, deadline_s=20):
        assert all(same_bits(total, want[index // 20]) for index, total in enumerate(totals))
    assert_same_calls(traces)
    assert len(traces[0]) == 80
