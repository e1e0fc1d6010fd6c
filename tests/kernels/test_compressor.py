"""The compressor: reference against brute force, kernels against the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.kernels import compressor
from pcpkit.kernels.compressor import (
    close_and_write_ring,
    close_and_write_ring_reference,
    close_groups,
    close_groups_reference,
    write_ring,
    write_ring_reference,
)

from .bits import MODES, base_of, bits, differing, same_bits, spaced
from .inputs_compressor import EPS, CompressorInputs, bench_inputs

# Interpreted launches take milliseconds a group: few examples, small rows.
few = settings(max_examples=25)


def draw(
    num_rows: int, num_gathered: int, num_groups: int, dim: int, seed: int
) -> CompressorInputs:
    """Random rows and random links: every source, padding (-1) and indices out of range."""
    generator = torch.Generator().manual_seed(seed)
    num_sources = num_rows + num_gathered + 3 * 4

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 2

    def index(high: int) -> Tensor:
        return torch.randint(-2, high + 2, (num_groups,), generator=generator)

    return CompressorInputs(
        rows=normal(num_rows, 2 * dim),
        gathered_rows=normal(num_gathered, 2 * dim),
        ring=normal(3, 4, 2 * dim),
        closing_rows=index(num_rows),
        predecessors=index(num_sources),
        norm_weight=normal(dim).bfloat16(),
        source_rows=index(num_rows),
        ring_slots=torch.randperm(num_groups + 12, generator=generator)[:num_groups] - 2,
    )


def pairs_of(rows: Tensor) -> CompressorInputs:
    """Rows 2i and 2i + 1 form group i; nothing is gathered, the ring is empty, weights are one."""
    odd = torch.arange(1, len(rows), 2)
    return CompressorInputs(
        rows=rows,
        gathered_rows=rows[:0],
        ring=rows[:0].unflatten(0, (0, 8)),
        closing_rows=odd,
        predecessors=odd - 1,
        norm_weight=torch.ones(rows.shape[1] // 2, dtype=torch.bfloat16),
        source_rows=odd[:0],
        ring_slots=odd[:0],
    )


def run_close(inputs: CompressorInputs, device: str) -> Tensor:
    """The kernel's latents: interpreted on the CPU, compiled on CUDA."""
    return compressor._launch(*inputs.to(device).close)


def pool_by_hand(even: Tensor, odd: Tensor, weight: Tensor) -> Tensor:
    """One group, channel by channel in numpy FP32 scalars; the sum of squares is exact."""
    dim, one = weight.shape[0], np.float32(1)
    pooled: list[np.float32] = []
    for channel in range(dim):
        v0, g0 = np.float32(even[channel]), np.float32(even[dim + channel])
        v1, g1 = np.float32(odd[channel]), np.float32(odd[dim + channel])
        top = max(g0, g1)
        w0, w1 = (np.float32(math.exp(float(gate - top))) for gate in (g0, g1))
        pooled.append(w0 / (w0 + w1) * v0 + w1 / (w0 + w1) * v1)
    latent = torch.tensor(np.array(pooled)).bfloat16().float()
    mean = np.float32(math.fsum(float(x) ** 2 for x in latent) / dim)
    factor = one / np.sqrt(mean + np.float32(EPS))
    return (weight.float() * (latent * float(factor))).bfloat16()


@pytest.mark.parametrize("seed", range(5))
def test_reference_is_the_hand_computed_pool(seed: int) -> None:
    inputs = draw(num_rows=7, num_gathered=3, num_groups=20, dim=12, seed=seed)
    sources = torch.cat([inputs.rows, inputs.gathered_rows, inputs.ring.flatten(0, 1)])
    got = close_groups_reference(*inputs.close)
    links = zip(inputs.closing_rows.tolist(), inputs.predecessors.tolist(), strict=True)
    for row, (closing, predecessor) in zip(got, links, strict=True):
        if 0 <= closing < 7 and 0 <= predecessor < len(sources):
            want = pool_by_hand(sources[predecessor], inputs.rows[closing], inputs.norm_weight)
        else:
            want = torch.zeros(12, dtype=torch.bfloat16)
        assert same_bits(row, want)


def test_docstring_example() -> None:
    rows, ring = torch.randn(3, 8), torch.randn(2, 4, 8)
    weight = torch.ones(4, dtype=torch.bfloat16)
    got = close_groups(
        rows, rows[:0], ring, torch.tensor([0, 2]), torch.tensor([3 + 6, 1]), weight, EPS
    )
    assert same_bits(got[0], pool_by_hand(ring[1, 2], rows[0], weight))
    assert same_bits(got[1], pool_by_hand(rows[1], rows[2], weight))


# Bits, although exp is a transcendental: both sides round it once from float64, and two float64
# values that differ in their last bits give different FP32 numbers about once in 10^8.
@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("dim", [512, 48, 1])
def test_kernel_equals_reference(device: str, dim: int) -> None:
    inputs = draw(num_rows=9, num_gathered=4, num_groups=30, dim=dim, seed=dim)
    assert same_bits(run_close(inputs, device), close_groups_reference(*inputs.close))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 4096, 16384])
def test_kernel_equals_reference_at_real_sizes(num_rows: int) -> None:
    inputs = bench_inputs(num_rows, "cpu")
    fraction, largest = differing(run_close(inputs, "cuda"), close_groups_reference(*inputs.close))
    # exp in float64 by two libraries.
    assert fraction <= 1e-5
    assert largest <= 1


@pytest.mark.parametrize("device", MODES)
def test_only_named_rows_are_read(device: str) -> None:
    """Every row that no link names is NaN, and rows and ring blocks lie apart between NaNs."""
    inputs = draw(num_rows=12, num_gathered=5, num_groups=9, dim=32, seed=3)
    clean = close_groups_reference(*inputs.close)
    valid = (inputs.closing_rows >= 0) & (inputs.closing_rows < 12)
    valid &= (inputs.predecessors >= 0) & (inputs.predecessors < 12 + 5 + 12)
    sources = torch.cat([inputs.rows, inputs.gathered_rows, inputs.ring.flatten(0, 1)])
    named = torch.zeros(len(sources), dtype=torch.bool)
    named[inputs.closing_rows[valid]] = True
    named[inputs.predecessors[valid]] = True
    assert 2 < int(named.sum()) < len(sources)
    sources[~named] = float("nan")
    rows, gathered, ring = sources.to(device).split([12, 5, 12])
    poisoned = replace(
        inputs.to(device),
        rows=spaced(rows),
        gathered_rows=spaced(gathered),
        ring=spaced(ring.unflatten(0, (3, 4))),
        norm_weight=inputs.norm_weight.to(device).repeat_interleave(2)[::2],
    )
    got = compressor._launch(*poisoned.close)
    assert same_bits(got, clean)
    assert not got.isnan().any()
    assert not got[~valid.to(device)].any()


SPECIAL = [0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1e-40, -1e-40, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("device", MODES)
def test_special_values_stay_in_their_group(device: str) -> None:
    """All pairs of special gates and values, a group a pair, between two ordinary groups."""
    pairs = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * len(pairs) + 2, 16, generator=generator)
    rows[0 : 2 * len(pairs) : 4, 11], rows[1 : 2 * len(pairs) : 4, 11] = pairs[::2].unbind(1)
    rows[2 : 2 * len(pairs) : 4, 3], rows[3 : 2 * len(pairs) : 4, 3] = pairs[1::2].unbind(1)
    rows[-2:] = 0.0
    got = run_close(pairs_of(rows), device)
    assert same_bits(got, close_groups_reference(*pairs_of(rows).close))
    assert not got[-1].any(), "a group of zeros is zero"
    ordinary = rows.unflatten(0, (-1, 2)).isfinite().all(dim=(1, 2))
    assert got.cpu()[ordinary].isfinite().all()
    assert got.isnan().any()


@pytest.mark.parametrize("device", MODES)
def test_equal_gates_give_the_mean(device: str) -> None:
    rows = torch.randn(2, 16).bfloat16().float()
    rows[:, 8:] = -7.25
    want = rows[:, :8].mean(0, keepdim=True).bfloat16().float()
    scale = want.double().square().mean().float().add(EPS).sqrt()
    assert same_bits(run_close(pairs_of(rows), device), (want * (1 / scale)).bfloat16())


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=st.integers(0, 2**31), data=st.data())
def test_groups_do_not_depend_on_each_other(device: str, seed: int, data: st.DataObject) -> None:
    """A subset, permutation or repetition of the groups, read from another source, same bits."""
    inputs = draw(num_rows=6, num_gathered=3, num_groups=8, dim=32, seed=seed)
    # Everything that can be a predecessor is in the ring as well.
    sources = torch.cat([inputs.rows, inputs.gathered_rows, inputs.ring.flatten(0, 1)])
    moved = replace(
        inputs,
        ring=sources.unflatten(0, (len(sources), 1)),
        gathered_rows=sources[:2],
        predecessors=torch.where(
            (inputs.predecessors >= 0) & (inputs.predecessors < len(sources)),
            inputs.predecessors + 6 + 2,
            -1,
        ),
    )
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, 7), max_size=6)), dtype=torch.int64)
    fewer = replace(
        moved, closing_rows=moved.closing_rows[chosen], predecessors=moved.predecessors[chosen]
    )
    whole = close_groups_reference(*inputs.close)
    assert same_bits(close_groups_reference(*fewer.close), whole[chosen])
    assert same_bits(run_close(inputs, device), whole)
    assert same_bits(run_close(fewer, device), whole[chosen])


@pytest.mark.parametrize("device", MODES)
def test_no_groups_no_rows(device: str) -> None:
    inputs = draw(num_rows=0, num_gathered=0, num_groups=3, dim=16, seed=0)
    assert not run_close(inputs, device).any()
    none = replace(
        inputs, closing_rows=inputs.closing_rows[:0], predecessors=inputs.predecessors[:0]
    )
    assert run_close(none, device).shape == (0, 16)


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=st.integers(0, 2**31), num_open=st.integers(0, 10))
def test_write_ring_stores_named_rows_only(device: str, seed: int, num_open: int) -> None:
    inputs = draw(num_rows=6, num_gathered=0, num_groups=num_open, dim=24, seed=seed)
    inputs.rows[::2] = float("nan")  # moved like any other bits
    want = base_of(spaced(inputs.ring)).clone()
    for row, slot in zip(inputs.source_rows.tolist(), inputs.ring_slots.tolist(), strict=True):
        if 0 <= row < 6 and 0 <= slot < 12:
            want[1 + slot // 4, 1 + slot % 4, 1:-2] = inputs.rows[row]
    for write, where in ((write_ring_reference, "cpu"), (compressor._launch_write_ring, device)):
        here = inputs.to(where)
        ring = spaced(here.ring)
        write(spaced(here.rows), here.source_rows, here.ring_slots, ring)
        assert torch.equal(bits(base_of(ring).cpu()), bits(want))


@pytest.mark.parametrize("device", MODES)
def test_a_ring_row_is_read_before_it_is_replaced(device: str) -> None:
    """One request, ring of 2 rows: its first row closes with ring row 0, its last one opens it."""
    inputs = draw(num_rows=2, num_gathered=0, num_groups=1, dim=16, seed=1).to(device)
    ring = inputs.ring[:1, :2].contiguous()
    old, index = ring[0, 0].cpu().clone(), torch.tensor([[0], [2], [1], [0]], device=device)
    weight = inputs.norm_weight
    got = compressor._launch(inputs.rows, inputs.rows[:0], ring, index[0], index[1], weight, EPS)
    compressor._launch_write_ring(inputs.rows, index[2], index[3], ring)
    assert same_bits(got[0], pool_by_hand(old, inputs.rows[0].cpu(), weight.cpu()))
    assert same_bits(ring[0, 0], inputs.rows[1])


def step_inputs(inputs: CompressorInputs) -> tuple[Any, ...]:
    """Arguments of ``close_and_write_ring``; the ring rows that are read are distinct."""
    first_ring = inputs.rows.shape[0] + inputs.gathered_rows.shape[0]
    seen: set[int] = set()
    predecessors = inputs.predecessors.clone()
    for group, predecessor in enumerate(predecessors.tolist()):
        if predecessor >= first_ring and predecessor in seen:
            predecessors[group] = -1
        seen.add(predecessor)
    return (*replace(inputs, predecessors=predecessors).close, *inputs.open[:3])


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=st.integers(0, 2**31), num_groups=st.integers(0, 12), spread=st.booleans())
def test_one_launch_equals_both(device: str, seed: int, num_groups: int, spread: bool) -> None:
    """Ring rows that are read, replaced, both, or neither; strided rows and rings as well."""
    inputs = draw(num_rows=6, num_gathered=2, num_groups=num_groups, dim=24, seed=seed)
    if not spread:
        # As many groups as possible read a ring row that is replaced.
        predecessors = torch.where(inputs.ring_slots >= 0, 6 + 2 + inputs.ring_slots, -1)
        inputs = replace(inputs, predecessors=predecessors)
    want_ring, got_ring = inputs.ring.clone(), spaced(inputs.ring.to(device))
    arguments = step_inputs(replace(inputs, ring=want_ring))
    want = close_and_write_ring_reference(*arguments)
    here: list[Any] = [x.to(device) if isinstance(x, Tensor) else x for x in arguments]
    here[0], here[2], here[7] = spaced(here[0]), got_ring, spaced(here[7])
    got = compressor._launch(*here)
    assert same_bits(got, want)
    outside = base_of(spaced(inputs.ring))
    outside[1:-2, 1:-2, 1:-2] = want_ring
    assert torch.equal(bits(base_of(got_ring).cpu()), bits(outside))


@pytest.mark.parametrize("device", MODES)
def test_every_request_replaces_the_row_it_reads(device: str) -> None:
    """More groups and open rows than one scan covers; each slot is read by another program."""
    count = 600 if device == "cuda" else 140
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * count, 32, generator=generator).to(device)
    ring = torch.randn(count, 2, 32, generator=generator).to(device)
    request, weight = torch.arange(count, device=device), torch.ones(16, device=device).bfloat16()
    links = 2 * request, len(rows) + 2 * request.flip(0)
    before = ring.clone()
    want = compressor._launch(rows, rows[:0], before, *links, weight, EPS)
    opened = rows, 2 * request + 1, 2 * request
    got = compressor._launch(rows, rows[:0], ring, *links, weight, EPS, *opened)
    assert same_bits(got, want)
    assert same_bits(ring[:, 0], rows[1::2])
    assert same_bits(ring[:, 1], before[:, 1])


def test_channels_must_be_contiguous() -> None:
    inputs = draw(num_rows=4, num_gathered=0, num_groups=2, dim=16, seed=0)
    apart = inputs.ring.repeat_interleave(2, dim=2)[..., ::2]
    with pytest.raises(ValueError, match="ring expected channels of stride 1, got stride 2"):
        compressor._launch(*replace(inputs, ring=apart).close)
    with pytest.raises(ValueError, match="ring expected channels of stride 1"):
        compressor._launch_write_ring(*replace(inputs, ring=apart).open)


def test_public_functions_name_what_does_not_fit() -> None:
    inputs = draw(num_rows=4, num_gathered=0, num_groups=2, dim=16, seed=0)
    with pytest.raises(ValueError, match=r"rows expected shape \(\*, 32\), got \(4, 31\)"):
        close_groups(*replace(inputs, rows=inputs.rows[:, 1:]).close)
    with pytest.raises(ValueError, match="closing_rows expected dtype int64, got int32"):
        close_groups(*replace(inputs, closing_rows=inputs.closing_rows.int()).close)
    with pytest.raises(ValueError, match=r"ring_slots expected shape \(2\), got \(1\)|ring_slots"):
        write_ring(*replace(inputs, ring_slots=inputs.ring_slots[:1]).open)


@pytest.mark.parametrize(
    ("dim", "block_dim", "num_warps"), [(512, 512, 4), (1024, 1024, 8), (48, 64, 1), (1, 1, 1)]
)
def test_launch_choice(dim: int, block_dim: int, num_warps: int) -> None:
    choice = compressor._choose_launch(dim)
    assert (choice.block_dim, choice.num_warps) == (block_dim, num_warps)


def test_ops_are_registered_correctly() -> None:
    inputs = draw(num_rows=5, num_gathered=2, num_groups=4, dim=16, seed=0)
    torch.library.opcheck(torch.ops.pcpkit.close_groups.default, inputs.close)
    torch.library.opcheck(torch.ops.pcpkit.write_ring.default, inputs.open)
    torch.library.opcheck(torch.ops.pcpkit.close_and_write_ring.default, step_inputs(inputs))


def step(
    close: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float],
    source_rows: Tensor,
    ring_slots: Tensor,
) -> Tensor:
    """Both public functions, in two launches and in one."""
    latents = close_groups(*close)
    write_ring(close[0], source_rows, ring_slots, close[2])
    again = close_and_write_ring(*close, close[0], source_rows, ring_slots)
    return torch.cat([latents, again])


def test_compiles_into_one_graph() -> None:
    inputs = draw(num_rows=5, num_gathered=2, num_groups=4, dim=16, seed=0)
    compiled = replace(inputs, ring=inputs.ring.clone())
    links = inputs.source_rows, inputs.ring_slots
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled.close, *links)
    assert same_bits(got, step(inputs.close, *links))
    assert same_bits(compiled.ring, inputs.ring)


@pytest.mark.gpu
def test_inductor_and_cuda_graph_give_the_same_bits() -> None:
    def fresh() -> CompressorInputs:
        return bench_inputs(64, "cuda")

    eager, compiled, captured = fresh(), fresh(), fresh()
    links = eager.source_rows, eager.ring_slots
    want = step(eager.close, *links)  # compiles the kernels before the capture
    assert same_bits(torch.compile(step, fullgraph=True)(compiled.close, *links), want)
    assert same_bits(compiled.ring, eager.ring)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(captured.close, *links)
    captured.ring.copy_(fresh().ring)
    graph.replay()
    assert same_bits(got, want)
    assert same_bits(captured.ring, eager.ring)


@pytest.mark.gpu
def test_offsets_past_2_to_31() -> None:
    """Rows and ring blocks 2^30 elements apart: the third lies beyond 2^31."""
    stride, needed = 1 << 30, ((3 << 30) + 8 * 1024) * 4
    if torch.cuda.mem_get_info()[0] < needed + (1 << 30):
        pytest.skip(f"needs {needed} bytes of device memory")
    buffer = torch.empty(needed // 4, device="cuda")
    inputs = draw(num_rows=4, num_gathered=0, num_groups=6, dim=512, seed=9)
    rows = buffer.as_strided((4, 1024), (stride, 1))
    ring = buffer.as_strided((4, 4, 1024), (stride, 1024, 1), 4096)
    rows.copy_(inputs.rows)
    ring.copy_(torch.randn(4, 4, 1024))
    want = replace(inputs, ring=ring.cpu(), ring_slots=torch.tensor([15, -1, 3, 14, 12, 0]))
    far = replace(want.to("cuda"), rows=rows, ring=ring)
    assert same_bits(compressor._launch(*far.close), close_groups_reference(*want.close))
    write_ring_reference(*want.open)
    compressor._launch_write_ring(*far.open)
    assert same_bits(ring, want.ring)
