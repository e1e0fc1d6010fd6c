"""pad_replayed: reference against a loop, kernel against reference, the worked examples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.kernels import replay_pad, slot_gather
from pcpkit.kernels.replay_pad import pad_replayed, pad_replayed_reference
from pcpkit.kernels.slot_gather import gather_slots, gather_slots_reference

from .bits import MODES, base_of, same_bits
from .inputs_slot_gather import SlotInputs, bench_inputs, hostile_inputs

few = settings(max_examples=30)
seeds = st.integers(0, 2**31)


def numbered(inputs: SlotInputs) -> Tensor:
    """Slots 0, 1, 2, ... in one row a group, so that each is known again."""
    shape = len(inputs.cacheable), len(inputs.gather_index)
    return torch.arange(shape[0] * shape[1]).view(shape)


def padded_by_hand(inputs: SlotInputs, slots: Tensor) -> Tensor:
    """One slot at a time, in Python integers."""
    padded = slots.clone()
    for item, row in enumerate(inputs.gather_index.tolist()):
        if not 0 <= row < len(inputs.positions):
            continue
        position, request = int(inputs.positions[row]), int(inputs.row_request[row])
        if not 0 <= request < len(inputs.replay_start):
            continue
        start = int(inputs.replay_start[request])
        if start != 0 and start <= position < start + inputs.window_size:
            for group, pads in enumerate(inputs.cacheable):
                padded[group, item] = -1 if pads else padded[group, item]
    return padded


def run(inputs: SlotInputs, slots: Tensor, device: str) -> Tensor:
    """Slots after the kernel: interpreted on the CPU, compiled on CUDA."""
    padded = slots.to(device).clone()
    replay_pad._launch(*inputs.to(device).pad(padded))
    return padded


@given(seed=seeds)
def test_reference_is_the_loop(seed: int) -> None:
    inputs = hostile_inputs(seed, num_gathered=24)
    slots = numbered(inputs)
    pad_replayed_reference(*inputs.pad(slots))
    assert same_bits(slots, padded_by_hand(inputs, numbered(inputs)))


def test_hostile_inputs_replay_at_all() -> None:
    kinds = [padded_by_hand(x, numbered(x)) for x in map(hostile_inputs, range(20))]
    assert sum(bool((slots == -1).any()) for slots in kinds) > 10


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=seeds)
def test_kernel_equals_reference(device: str, seed: int) -> None:
    inputs = hostile_inputs(seed, num_gathered=24)
    want = numbered(inputs)
    pad_replayed_reference(*inputs.pad(want))
    assert same_bits(run(inputs, numbered(inputs), device), want)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_gathered", "num_groups"), [(8, 6), (8192, 6), (16384, 16)])
def test_kernel_equals_reference_at_real_sizes(num_gathered: int, num_groups: int) -> None:
    inputs = bench_inputs(num_gathered, "cpu", num_groups)
    want = numbered(inputs)
    pad_replayed_reference(*inputs.pad(want))
    assert (want == -1).any()
    assert same_bits(run(inputs, numbered(inputs), "cuda"), want)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("window_size", [1, 128])
def test_both_ends_of_the_window(device: str, window_size: int) -> None:
    """Every position around the replay of requests with starts 0 (none), 128 and 2^31 - 64."""
    starts = [0, 128, 2**31 - 64]
    positions = torch.cat(
        [torch.arange(max(0, start - 3), start + window_size + 3) for start in starts]
    )
    sizes = [min(3, start) + window_size + 3 for start in starts]
    inputs = SlotInputs(
        positions=positions,
        row_request=torch.repeat_interleave(torch.arange(3), torch.tensor(sizes)).int(),
        gather_index=torch.arange(len(positions)).flip(0),
        write_mask=torch.ones(len(positions)).bool(),
        block_tables=torch.zeros(2, 3, 1).int(),
        block_sizes=(64, 64),
        ratios=(1, 1),
        replay_start=torch.tensor(starts).int(),
        cacheable=(False, True),
        window_size=window_size,
    )
    window, cacheable = run(inputs, numbered(inputs), device).flip(1)
    assert (window >= 0).all()
    ends = torch.tensor(sizes).cumsum(0).tolist()
    replayed = [
        list(range(ends[request] - 3 - window_size, ends[request] - 3)) for request in (1, 2)
    ]
    assert (cacheable == -1).nonzero()[:, 0].tolist() == [*replayed[0], *replayed[1]]


def example_step(first: int, last: int) -> SlotInputs:
    """pcp-spec appendix B: prompt of 300 tokens, hit of 256, so s = 128; blocks of 64 tokens."""
    positions = torch.arange(first, last)
    return SlotInputs(
        positions=positions,
        row_request=torch.zeros(len(positions)).int(),
        gather_index=torch.randperm(len(positions), generator=torch.Generator().manual_seed(0)),
        write_mask=torch.ones(len(positions)).bool(),
        block_tables=torch.arange(30).view(3, 1, 10).int(),
        block_sizes=(64, 64, 32),
        ratios=(1, 2, 1),
        replay_start=torch.tensor([128]).int(),
        cacheable=(True, True, False),
        window_size=128,
    )


@pytest.mark.parametrize("device", MODES)
def test_worked_example(device: str) -> None:
    """Step 1 writes no cacheable slot at all; step 2 none below the hit, every one above it."""
    for first, last in ((128, 228), (228, 300)):
        inputs = example_step(first, last)
        before = slot_gather._launch(*inputs.to(device).gather).cpu()
        tokens, states, window = run(inputs, before, device).cpu()
        where = inputs.positions[inputs.gather_index]
        assert torch.equal(window, before[2])
        assert (window >= 0).all()
        assert torch.equal(tokens >= 0, where >= 256)
        assert torch.equal(states >= 0, (where >= 256) & (where % 2 == 1))
        kept = where >= 256
        assert torch.equal(tokens[kept], before[0][kept])


@few
@given(chunk=st.integers(7, 172))
def test_cached_bytes_are_never_written(chunk: int) -> None:
    """Write floor: in any chunking, no cacheable slot belongs to a position below the hit."""
    for first in range(128, 300, chunk):
        inputs = example_step(first, min(300, first + chunk))
        slots = gather_slots_reference(*inputs.gather)
        pad_replayed_reference(*inputs.pad(slots))
        where = inputs.positions[inputs.gather_index]
        assert not ((slots[:2] >= 0) & (where < 256)).any()
        assert ((slots[0] >= 0) | (where < 256)).all()


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=seeds, data=st.data())
def test_rows_do_not_depend_on_each_other(device: str, seed: int, data: st.DataObject) -> None:
    inputs = hostile_inputs(seed)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, 15), max_size=40)), dtype=torch.int64)
    want = padded_by_hand(inputs, numbered(inputs))[:, chosen]
    picked = numbered(inputs)[:, chosen]
    assert same_bits(run(inputs.pick(chosen), picked, device), want)
    pad_replayed_reference(*inputs.pick(chosen).pad(picked))
    assert same_bits(picked, want)


@pytest.mark.parametrize("device", MODES)
def test_only_the_slots_of_the_view_change(device: str) -> None:
    """Slots as a strided view; what lies between and around it keeps its canary."""
    inputs = hostile_inputs(5, num_gathered=24).to(device)
    want = padded_by_hand(inputs.to("cpu"), numbered(inputs))
    assert (want == -1).any()
    buffer = torch.full((2 * len(want) + 1, 2 * 24 + 3), 777, device=device)
    view = buffer[1::2, 2:-1:2]
    view.copy_(numbered(inputs))
    replay_pad._launch(*inputs.pad(view))
    assert same_bits(view, want)
    view.fill_(777)
    assert (base_of(view) == 777).all()


@pytest.mark.parametrize("device", MODES)
def test_nothing_to_pad(device: str) -> None:
    inputs = hostile_inputs(3, num_gathered=24)
    for none in (
        replace(inputs, cacheable=(False,) * 5),
        replace(inputs, replay_start=torch.zeros_like(inputs.replay_start)),
        replace(inputs, replay_start=inputs.replay_start[:0]),
        replace(inputs, positions=inputs.positions[:0], row_request=inputs.row_request[:0]),
        replace(inputs, window_size=0),
        inputs.pick(torch.arange(0)),
        replace(inputs, cacheable=()),
    ):
        slots = numbered(none)
        pad_replayed_reference(*none.pad(slots))
        assert same_bits(slots, numbered(none))
        assert same_bits(run(none, numbered(none), device), numbered(none))


def test_public_function_names_what_does_not_fit() -> None:
    inputs = hostile_inputs(0)
    with pytest.raises(ValueError, match=r"slots expected shape \(5, 16\), got \(4, 16\)"):
        pad_replayed(*inputs.pad(numbered(inputs)[1:]))
    with pytest.raises(ValueError, match="slots expected dtype int64, got int32"):
        pad_replayed(*inputs.pad(numbered(inputs).int()))
    wide = replace(inputs, replay_start=inputs.replay_start.long())
    with pytest.raises(ValueError, match="replay_start expected dtype int32, got int64"):
        pad_replayed(*wide.pad(numbered(inputs)))


def test_op_is_registered_correctly() -> None:
    inputs = hostile_inputs(0)
    torch.library.opcheck(torch.ops.pcpkit.pad_replayed.default, inputs.pad(numbered(inputs)))


def plan(
    gather: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[int], list[int]],
    replay_start: Tensor,
    cacheable: list[bool],
) -> Tensor:
    """Both launches of a step, window 128."""
    slots = gather_slots(*gather)
    pad_replayed(slots, *gather[:3], replay_start, cacheable, 128)
    return slots


def test_compiles_into_one_graph() -> None:
    inputs = example_step(200, 280)
    args = inputs.gather, inputs.replay_start, list(inputs.cacheable)
    got = torch.compile(plan, fullgraph=True, backend="aot_eager")(*args)
    assert same_bits(got, plan(*args))
    assert (got == -1).any()


@pytest.mark.gpu
def test_inductor_and_cuda_graph_give_the_same_slots() -> None:
    inputs = bench_inputs(512, "cuda")
    args = inputs.gather, inputs.replay_start, list(inputs.cacheable)
    want = plan(inputs.to("cpu").gather, inputs.replay_start.cpu(), args[2])
    assert same_bits(torch.compile(plan, fullgraph=True)(*args), want)
    plan(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = plan(*args)
    got.zero_()
    graph.replay()
    assert same_bits(got, want)
