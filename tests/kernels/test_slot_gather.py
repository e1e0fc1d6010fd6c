"""gather_slots: reference against a loop, kernel against reference, the worked example."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.kernels import slot_gather
from pcpkit.kernels.slot_gather import gather_slots, gather_slots_reference

from .bits import MODES, same_bits, spaced
from .inputs_slot_gather import SlotInputs, bench_inputs, hostile_inputs

few = settings(max_examples=30)
seeds = st.integers(0, 2**31)


def slots_by_hand(inputs: SlotInputs) -> Tensor:
    """One slot at a time, in Python integers."""
    groups = zip(inputs.block_tables.tolist(), inputs.block_sizes, inputs.ratios, strict=True)
    return torch.tensor(
        [
            [
                slot_by_hand(inputs, table, size, ratio, row) if write else -1
                for row, write in zip(
                    inputs.gather_index.tolist(), inputs.write_mask.tolist(), strict=True
                )
            ]
            for table, size, ratio in groups
        ]
    )


def slot_by_hand(
    inputs: SlotInputs, table: list[list[int]], size: int, ratio: int, row: int
) -> int:
    if not 0 <= row < len(inputs.positions):
        return -1
    position, request = int(inputs.positions[row]), int(inputs.row_request[row])
    block, within = divmod(position, size)
    if not 0 <= request < len(table) or not 0 <= block < len(table[0]):
        return -1
    page = table[request][block]
    if page < 0 or within % ratio != ratio - 1:
        return -1
    return page * (size // ratio) + within // ratio


def run(inputs: SlotInputs, device: str) -> Tensor:
    """The kernel's slots: interpreted on the CPU, compiled on CUDA."""
    return slot_gather._launch(*inputs.to(device).gather)


@given(seed=seeds)
def test_reference_is_the_loop(seed: int) -> None:
    inputs = hostile_inputs(seed)
    assert same_bits(gather_slots_reference(*inputs.gather), slots_by_hand(inputs))


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=seeds)
def test_kernel_equals_reference(device: str, seed: int) -> None:
    inputs = hostile_inputs(seed)
    assert same_bits(run(inputs, device), gather_slots_reference(*inputs.gather))


@pytest.mark.gpu
@pytest.mark.parametrize(("num_gathered", "num_groups"), [(1, 6), (8192, 6), (16384, 16)])
def test_kernel_equals_reference_at_real_sizes(num_gathered: int, num_groups: int) -> None:
    inputs = bench_inputs(max(num_gathered, 8), "cpu", num_groups).pick(torch.arange(num_gathered))
    assert same_bits(run(inputs, "cuda"), gather_slots_reference(*inputs.gather))


@pytest.mark.parametrize("device", MODES)
def test_docstring_example(device: str) -> None:
    inputs = SlotInputs(
        positions=torch.tensor([3, 2]),
        row_request=torch.zeros(2).int(),
        gather_index=torch.arange(2),
        write_mask=torch.ones(2).bool(),
        block_tables=torch.tensor([[[7]], [[7]]]).int(),
        block_sizes=(4, 4),
        ratios=(1, 2),
        replay_start=torch.zeros(1).int(),
        cacheable=(True, True),
        window_size=128,
    )
    assert run(inputs, device).tolist() == [[31, 30], [15, -1]]


# pcp-spec appendix A: two ranks, one prefill of positions 5 .. 14, two padding rows.
EXAMPLE = SlotInputs(
    positions=torch.arange(5, 15),
    row_request=torch.zeros(10).int(),
    gather_index=torch.tensor([0, 1, 2, 9, 0, 0, 3, 4, 5, 6, 7, 8]),
    write_mask=torch.tensor([1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1]).bool(),
    block_tables=torch.tensor([[[3]], [[3]], [[9]]]).int(),
    block_sizes=(64, 64, 64),
    ratios=(1, 2, 1),
    replay_start=torch.zeros(1).int(),
    cacheable=(True, True, False),
    window_size=128,
)


@pytest.mark.parametrize("device", MODES)
def test_worked_example(device: str) -> None:
    main, states, window = run(EXAMPLE, device).tolist()
    assert main == [197, 198, 199, 206, -1, -1, 200, 201, 202, 203, 204, 205]
    assert states == [98, -1, 99, -1, -1, -1, -1, 100, -1, 101, -1, 102]
    assert window == [slot + 64 * 6 if slot >= 0 else -1 for slot in main]


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=seeds, data=st.data())
def test_rows_do_not_depend_on_each_other(device: str, seed: int, data: st.DataObject) -> None:
    inputs = hostile_inputs(seed)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, 15), max_size=40)), dtype=torch.int64)
    want = gather_slots_reference(*inputs.gather)[:, chosen]
    assert same_bits(gather_slots_reference(*inputs.pick(chosen).gather), want)
    assert same_bits(run(inputs.pick(chosen), device), want)


@given(seed=seeds)
def test_every_slot_is_written_once(seed: int) -> None:
    """Padding repeats a row, and no slot is named twice as long as no block is."""
    inputs = hostile_inputs(seed, num_gathered=40)
    tables = torch.randperm(inputs.block_tables.numel()).view_as(inputs.block_tables).int()
    first = torch.zeros(40).bool()
    seen: set[tuple[int, int]] = set()
    for item, row in enumerate(inputs.gather_index.tolist()):
        if 0 <= row < len(inputs.positions):
            owner = int(inputs.row_request[row]), int(inputs.positions[row])
            first[item] = owner not in seen
            seen.add(owner)
    once = replace(inputs, block_tables=tables, write_mask=first)
    for slots in gather_slots_reference(*once.gather):
        kept = slots[slots >= 0].tolist()
        assert len(set(kept)) == len(kept)


@pytest.mark.parametrize("device", MODES)
def test_strided_tables_and_poison(device: str) -> None:
    """Tables that lie apart, tables of transposed strides; slots beyond 2^31 stay exact."""
    inputs = hostile_inputs(5, num_gathered=64)
    want = gather_slots_reference(*inputs.gather)
    assert want.max() > 2**31
    there = inputs.to(device)
    doubled = there.positions.repeat_interleave(2)[::2]
    apart = spaced(there.block_tables)
    for tables in (apart, apart.transpose(1, 2).contiguous().transpose(1, 2)):
        moved = replace(there, block_tables=tables, positions=doubled)
        assert same_bits(slot_gather._launch(*moved.gather), want)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("empty", ["tokens", "requests", "blocks", "gathered", "groups"])
def test_nothing_to_look_up(device: str, empty: str) -> None:
    inputs = hostile_inputs(1)
    none = {
        "tokens": replace(
            inputs, positions=inputs.positions[:0], row_request=inputs.row_request[:0]
        ),
        "requests": replace(inputs, block_tables=inputs.block_tables[:, :0]),
        "blocks": replace(inputs, block_tables=inputs.block_tables[:, :, :0]),
        "gathered": inputs.pick(torch.arange(0)),
        "groups": replace(inputs, block_tables=inputs.block_tables[:0], block_sizes=(), ratios=()),
    }[empty]
    got = run(none, device)
    assert got.shape == (len(none.ratios), len(none.gather_index))
    assert (got == -1).all()
    assert same_bits(got, gather_slots_reference(*none.gather))


def test_public_function_names_what_does_not_fit() -> None:
    inputs = EXAMPLE
    with pytest.raises(ValueError, match="positive multiples of the group's ratio, got 64"):
        gather_slots(*replace(inputs, ratios=(1, 3, 1)).gather)
    with pytest.raises(ValueError, match="got 0 for ratio 1"):
        gather_slots(*replace(inputs, block_sizes=(64, 64, 0)).gather)
    with pytest.raises(ValueError, match="gather_index expected dtype int64, got int32"):
        gather_slots(*replace(inputs, gather_index=inputs.gather_index.int()).gather)
    with pytest.raises(ValueError, match=r"block_tables expected shape \(3, \*, \*\)"):
        gather_slots(*replace(inputs, block_tables=inputs.block_tables[1:]).gather)
    with pytest.raises(ValueError, match="write_mask expected shape"):
        gather_slots(*replace(inputs, write_mask=inputs.write_mask[1:]).gather)


@pytest.mark.parametrize(
    ("num_gathered", "block_rows"), [(1, 32), (4096, 32), (8192, 64), (16384, 128), (10**6, 128)]
)
def test_launch_choice(num_gathered: int, block_rows: int) -> None:
    choice = slot_gather.choose_launch(num_gathered)
    assert (choice.block_rows, choice.num_warps) == (block_rows, block_rows // 32)


def test_op_is_registered_correctly() -> None:
    torch.library.opcheck(torch.ops.pcpkit.gather_slots.default, hostile_inputs(0).gather)


def test_compiles_into_one_graph() -> None:
    inputs = hostile_inputs(2)
    got = torch.compile(gather_slots, fullgraph=True, backend="aot_eager")(*inputs.gather)
    assert same_bits(got, slots_by_hand(inputs))


@pytest.mark.gpu
def test_inductor_and_cuda_graph_give_the_same_slots() -> None:
    inputs = bench_inputs(512, "cuda")
    want = gather_slots_reference(*inputs.to("cpu").gather)
    assert same_bits(torch.compile(gather_slots, fullgraph=True)(*inputs.gather), want)
    gather_slots(*inputs.gather)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gather_slots(*inputs.gather)
    got.zero_()
    graph.replay()
    assert same_bits(got, want)
