"""Plans of a step on any number of ranks against formulas written out row by row.

Invariants 6, 7 and 17 of pcp-spec section 10, and appendix A. Pair links have their own tests in
test_links.py, partitions in test_partition.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.config import CacheConfig
from pcpkit.kernels.slot_gather import gather_slots_reference
from pcpkit.plan.batch import StepBatch, row_positions, row_requests
from pcpkit.plan.partition import Partition, dual_chunk_swap, make_partition
from pcpkit.plan.rows import LayerRows
from pcpkit.plan.step import StepPlan, _collect, _packed_copies, _rebuilt, plan_step
from pcpkit.testing.batches import RaggedBatch, RequestRows, assemble_steps
from pcpkit.testing.strategies import cache_layouts, partitions, ragged_batches

from .linking import link_pairs

RATIOS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A batch dealt to ranks, and the plans of all of them."""

    rows: RaggedBatch
    batch: StepBatch
    partition: Partition
    cache: CacheConfig
    plans: tuple[StepPlan, ...]

    @property
    def layers(self) -> list[LayerRows]:
        """Rows of each rank, in every layer."""
        assert all(len(plan.layers) == 1 for plan in self.plans), "nothing is replayed or trimmed"
        return [plan.layer_rows(0) for plan in self.plans]

    def gathered(self, by_rank: list[list[int]]) -> list[int]:
        """Rank-major rows: each rank's list, padded with -1 to the longest."""
        width = max(len(one) for one in by_rank)
        return [row for one in by_rank for row in [*one, *[-1] * (width - len(one))]]

    def slot(self, row: int, ratio: int, table: Tensor, block_size: int) -> int:
        """Where global row `row` stores its state."""
        request = [i for i, one in enumerate(self.rows.requests) for _ in range(one.query_len)][row]
        state = self.rows.places[row][1] // ratio
        states = block_size // ratio
        return int(table[request, state // states]) * states + state % states


def plans_of(batch: StepBatch, partition: Partition, cache: CacheConfig) -> tuple[StepPlan, ...]:
    return tuple(
        plan_step(
            batch,
            ratios=RATIOS,
            block_size=cache.block_size,
            window_block_size=cache.window_block_size,
            ring_rows=cache.ring_rows,
            partition=partition,
            rank=rank,
        )
        for rank in range(partition.size)
    )


def assembled(rows: RaggedBatch, layout: CacheConfig, partition: Partition, seed: int = 0) -> Step:
    steps = assemble_steps([rows], layout, seed=seed)
    batch = steps.batches[0]
    return Step(
        rows=rows,
        batch=batch,
        partition=partition,
        cache=steps.cache,
        plans=plans_of(batch, partition, steps.cache),
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    rows = draw(ragged_batches())
    seed = draw(st.integers(0, 2**16))
    return assembled(rows, draw(cache_layouts()), draw(partitions(rows)), seed)


def tensors_of(value: Any, name: str = "plan") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a plan by its path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, f"{name}[{key}]")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from tensors_of(item, f"{name}[{index}]")
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name), f"{name}.{field.name}")


# --- every row of every rank --------------------------------------------------------------------


@given(step=steps())
def test_local_rows(step: Step) -> None:
    requests = [i for i, one in enumerate(step.rows.requests) for _ in range(one.query_len)]
    for plan, layer, rows in zip(step.plans, step.layers, step.partition.rows, strict=True):
        mine = rows.tolist()
        assert layer.kept is None
        assert plan.num_rows == layer.num_rows == len(mine)
        assert layer.positions.tolist() == [step.rows.places[row][1] for row in mine]
        assert layer.row_request.tolist() == [requests[row] for row in mine]
        assert plan.token_ids.tolist() == step.batch.token_ids[rows].tolist()
        assert layer.window_floor.tolist() == [0] * len(mine)
        assert plan.block_table is step.batch.block_table
        assert plan.window_block_table is step.batch.window_block_table
        for ratio in RATIOS:
            seen = [(step.rows.places[row][1] + 1) // ratio for row in mine]
            assert layer.num_visible(ratio).tolist() == seen


@given(step=steps())
def test_token_windows_reach_across_segments(step: Step) -> None:
    """A row's predecessors are those of its request, wherever they are computed."""
    starts = step.batch.query_start_loc.tolist()
    for plan, rows in zip(step.plans, step.partition.rows, strict=True):
        row_request = plan.layer_rows(0).row_request
        for window, row, request in zip(
            plan.token_windows.tolist(), rows.tolist(), row_request.tolist(), strict=True
        ):
            before = step.batch.lookback_token_ids[request].tolist()
            query = step.batch.token_ids[starts[request] : row + 1].tolist()
            assert window == [*query[::-1], *before][: len(window)]


@given(step=steps())
def test_window_slots(step: Step) -> None:
    """Every row once, padding nowhere, alike on all ranks."""
    want = [
        -1
        if row < 0
        else step.slot(row, 1, step.batch.window_block_table, step.cache.window_block_size)
        for row in step.gathered([rows.tolist() for rows in step.partition.rows])
    ]
    for layer in step.layers:
        assert layer.window_slots.tolist() == want
        assert layer.num_padded_rows == step.partition.num_padded_rows
    real = [slot for slot in want if slot >= 0]
    assert len(real) == len(set(real)) == step.rows.num_tokens


@given(step=steps(), ratio=st.sampled_from(RATIOS))
def test_states_are_stored_by_their_last_token(step: Step, ratio: int) -> None:
    """Invariant 17, and rows that close no group neither travel nor take a slot."""
    closing = [
        [row for row in rows.tolist() if (step.rows.places[row][1] + 1) % ratio == 0]
        for rows in step.partition.rows
    ]
    want = [
        -1 if row < 0 else step.slot(row, ratio, step.batch.block_table, step.cache.block_size)
        for row in step.gathered(closing)
    ]
    for layer, rows, mine in zip(step.layers, step.partition.rows, closing, strict=True):
        group = layer.groups[ratio]
        assert rows[group.closing_rows].tolist() == mine
        firsts = [step.rows.places[row][1] // ratio * ratio for row in mine]
        assert group.positions.tolist() == firsts
        assert group.num_padded == max(len(one) for one in closing)
        assert group.slots.tolist() == want
        assert layer.max_visible(ratio) == max(step.rows.seq_lens) // ratio
    real = [slot for slot in want if slot >= 0]
    assert len(real) == len(set(real)) == sum(len(one) for one in closing)


@given(step=steps())
def test_wanted_rows_come_back_in_batch_order(step: Step) -> None:
    ends = step.batch.query_start_loc[1:].tolist()
    wanted = [
        row
        for end, one in zip(ends, step.rows.requests, strict=True)
        for row in range(end - one.num_logits, end)
    ]
    sent = [
        rows[plan.logits.local_rows].tolist()
        for plan, rows in zip(step.plans, step.partition.rows, strict=True)
    ]
    assert sorted(row for one in sent for row in one) == wanted, "no other row travels"
    gathered = step.gathered(sent)
    for plan in step.plans:
        assert plan.logits.num_padded == max(len(one) for one in sent)
        assert [gathered[i] for i in plan.logits.restore_index.tolist()] == wanted


@given(step=steps())
def test_ranks_agree_on_what_they_exchange(step: Step) -> None:
    """Invariant 7: shapes of collectives and slots of gathered rows are equal on all ranks."""
    first, wanted = step.layers[0], step.plans[0].logits
    for rank, layer in enumerate(step.layers):
        assert torch.equal(layer.window_slots, first.window_slots)
        assert layer.num_padded_rows == first.num_padded_rows
        assert layer.max_seq_len == first.max_seq_len
        for ratio in RATIOS:
            assert torch.equal(layer.groups[ratio].slots, first.groups[ratio].slots)
            assert layer.groups[ratio].num_padded == first.groups[ratio].num_padded
        assert torch.equal(step.plans[rank].logits.restore_index, wanted.restore_index)
        links = link_pairs(step.batch, step.partition, rank, step.cache.ring_rows)
        for field in fields(links):
            expected = getattr(links, field.name)
            assert torch.equal(getattr(layer.links, field.name), expected), field.name
        assert len(layer.links.last_rows) == len(first.links.last_rows)
        assert len(layer.links.predecessors) == len(layer.groups[2].closing_rows)


@given(step=steps())
def test_planning_has_no_memory(step: Step) -> None:
    """Nothing of the batch is changed, and the same batch gives the same plans."""
    before = {name: tensor.clone() for name, tensor in tensors_of(step.batch)}
    again = plans_of(step.batch, step.partition, step.cache)
    for name, tensor in tensors_of(step.batch):
        assert torch.equal(tensor, before[name]), name
    for plan, other in zip(step.plans, again, strict=True):
        for (name, tensor), (_, copy) in zip(tensors_of(plan), tensors_of(other), strict=True):
            assert torch.equal(tensor, copy), name


# --- details ------------------------------------------------------------------------------------

LAYOUT = CacheConfig(num_blocks=1, num_window_blocks=1, num_requests=1)


def prefill(computed: int, count: int, num_logits: int = 1) -> RequestRows:
    return RequestRows(
        request=0,
        num_computed_tokens=computed,
        query_len=count,
        is_prefilling=True,
        num_logits=num_logits,
    )


def test_appendix_a() -> None:
    """Two ranks, positions 5 .. 14: pairs (4, 5) .. (12, 13) close where their odd token is."""
    rows = RaggedBatch(requests=(prefill(5, 10),))
    partition = make_partition([10], [True], 2, dual_chunk_swap)
    step = assembled(rows, LAYOUT, partition)
    first, second = step.layers
    assert first.positions.tolist() == [5, 6, 7, 14]
    assert second.positions.tolist() == [8, 9, 10, 11, 12, 13]
    assert first.window_slots.tolist() == [5, 6, 7, 14, -1, -1, 8, 9, 10, 11, 12, 13]
    assert first.groups[2].positions.tolist() == [4, 6]
    assert second.groups[2].positions.tolist() == [8, 10, 12]
    assert first.groups[2].slots.tolist() == [2, 3, -1, 4, 5, 6]
    assert first.groups[1].slots.tolist() == first.window_slots.tolist()
    assert first.max_visible(2) == 7
    wanted, other = (plan.logits for plan in step.plans)
    assert wanted.local_rows.tolist() == [3]
    assert other.local_rows.tolist() == []
    assert other.restore_index.tolist() == [0]


def test_default_is_one_rank_in_batch_order() -> None:
    rows = RaggedBatch(requests=(prefill(3, 4, 4),))
    batch = assemble_steps([rows], LAYOUT).batches[0]
    plan = plan_step(batch, ratios=(2,), block_size=64, window_block_size=32, ring_rows=8)
    (layer,) = plan.layers
    assert layer.positions.tolist() == [3, 4, 5, 6]
    assert plan.logits.restore_index.tolist() == [0, 1, 2, 3]
    assert list(layer.groups) == [2]


def test_to_moves_every_tensor_and_nothing_else() -> None:
    rows = RaggedBatch(requests=(prefill(3, 4),))
    partition = make_partition([4], [True], 2, dual_chunk_swap)
    plan = assembled(rows, LAYOUT, partition).plans[1]
    moved = plan.to("meta")
    originals = dict(tensors_of(plan))
    assert len(originals) > 15
    for name, tensor in tensors_of(moved):
        assert tensor.device.type == "meta", name
        assert (tensor.shape, tensor.dtype) == (originals[name].shape, originals[name].dtype)
    assert moved.layer_rows(0).num_padded_rows == plan.layer_rows(0).num_padded_rows
    assert moved.layer_rows(0).max_seq_len == plan.layer_rows(0).max_seq_len
    assert plan.token_ids.device.type == "cpu"


def test_to_the_same_device_is_the_plan() -> None:
    rows = RaggedBatch(requests=(prefill(3, 4),))
    plan = assembled(rows, LAYOUT, make_partition([4], [True], 2, dual_chunk_swap)).plans[0]
    assert plan.to("cpu") is plan


ODD_TENSORS = [
    torch.arange(7),
    torch.empty(0, dtype=torch.int64),
    torch.arange(5, dtype=torch.int32),
    torch.tensor([True, False, True]),
    torch.empty(0, dtype=torch.bool),
    torch.arange(12, dtype=torch.int32).view(3, 4),
    torch.empty(0, 4, dtype=torch.int32),
    torch.arange(12).view(3, 4).T,
    torch.arange(9)[1::2],
    torch.arange(6, dtype=torch.int32)[None].expand(2, 6),
    torch.tensor(2**40),
    torch.arange(8),
]
"""Kinds of tensors that a plan may have, with and without room for padding behind them."""


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_packed_copies(device: str) -> None:
    """Values, dtypes and shapes stay; all are contiguous, aligned, apart, and in one buffer."""
    copies = _packed_copies(ODD_TENSORS, torch.device(device))
    places: set[int] = set()
    for tensor, copy in zip(ODD_TENSORS, copies, strict=True):
        assert (copy.shape, copy.dtype, copy.device.type) == (tensor.shape, tensor.dtype, device)
        assert copy.is_contiguous()
        first = copy.storage_offset() * copy.itemsize
        assert first % 16 == 0
        own = set(range(first, first + copy.nbytes))
        assert not own & places
        places |= own
        assert copy.untyped_storage().nbytes() == copies[0].untyped_storage().nbytes()
        if device == "cpu":
            assert torch.equal(copy, tensor)
            assert copy.untyped_storage().data_ptr() == copies[0].untyped_storage().data_ptr()
            assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@given(step=steps())
def test_a_packed_plan_has_the_values_of_the_plan(step: Step) -> None:
    for plan in step.plans:
        originals = dict(tensors_of(plan))
        copies = _packed_copies(list(originals.values()), torch.device("cpu"))
        for (name, tensor), copy in zip(originals.items(), copies, strict=True):
            assert torch.equal(tensor, copy), name
        # Put together again as `to` does: every tensor is where it was.
        tensors: dict[int, Tensor] = {}
        _collect(plan, tensors)
        moved = _packed_copies(list(tensors.values()), torch.device("cpu"))
        rebuilt = dict(tensors_of(_rebuilt(plan, dict(zip(tensors, moved, strict=True)))))
        assert rebuilt.keys() == originals.keys()
        for name, tensor in originals.items():
            assert rebuilt[name] is not tensor or not tensor.numel(), name
            assert torch.equal(rebuilt[name], tensor), name


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_size": 63}, r"block_size expected a positive multiple of the ratios \(1, 2\)"),
        ({"block_size": 0}, "block_size expected a positive multiple"),
        ({"window_block_size": 0}, "window_block_size expected >= 1, got 0"),
        ({"ratios": (0,)}, "block_size expected a positive multiple"),
    ],
)
def test_refuses_blocks_without_whole_states(sizes: dict[str, Any], message: str) -> None:
    batch = assemble_steps([RaggedBatch(requests=(prefill(0, 2),))], LAYOUT).batches[0]
    known: dict[str, Any] = {"ratios": RATIOS, "block_size": 64, "window_block_size": 32}
    with pytest.raises(ValueError, match=message):
        plan_step(batch, ring_rows=8, **(known | sizes))


@given(step=steps())
def test_slots_are_those_of_the_op(step: Step) -> None:
    """Planning looks slots up itself; :func:`gather_slots` says what they are."""
    batch, cache, partition = step.batch, step.cache, step.partition
    rows = row_positions(batch), row_requests(batch), partition.gather_index, partition.write_mask
    window, size = batch.window_block_table[None], cache.window_block_size
    states, both = torch.stack([batch.block_table] * 2), [cache.block_size] * 2
    (want,) = gather_slots_reference(*rows, window, [size], [1])
    by_ratio = gather_slots_reference(*rows, states, both, RATIOS)
    for layer in step.layers:
        assert torch.equal(layer.window_slots, want)
        for ratio, slots in zip(RATIOS, by_ratio, strict=True):
            got = layer.groups[ratio].slots
            assert torch.equal(got[got >= 0], slots[slots >= 0])


@pytest.mark.parametrize(("name", "computed"), [("block_table", 63), ("window_block_table", 31)])
def test_refuses_rows_without_a_block(name: str, computed: int) -> None:
    """B075: the second row is one past the last mapped block, whatever lies behind it."""
    rows = RaggedBatch(requests=(prefill(computed, 2),))
    batch = assemble_steps([rows], LAYOUT).batches[0]
    table = getattr(batch, name).clone()
    table[0, -1] = -1
    message = f"{name} expected a block for every query row, got none for 1 rows"
    for change in (table, table[:, :-1]):
        with pytest.raises(ValueError, match=message):
            plan_step(
                replace(batch, **{name: change}),
                ratios=RATIOS,
                block_size=64,
                window_block_size=32,
                ring_rows=8,
            )


def test_refuses_an_inconsistent_batch() -> None:
    rows = RaggedBatch(requests=(prefill(0, 2),))
    batch = assemble_steps([rows], LAYOUT).batches[0]
    with pytest.raises(ValueError, match=r"num_logits expected 0 \.\. query length"):
        plan_step(
            replace(batch, num_logits=torch.tensor([3], dtype=torch.int32)),
            ratios=RATIOS,
            block_size=64,
            window_block_size=32,
            ring_rows=8,
        )
