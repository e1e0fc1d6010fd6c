"""routed_experts: reference by hand, kernel within the error of its roundings, sorted pairs.

Between the two products an expert rounds three times to BF16 and once to MXFP8, so a value near a
rounding boundary may fall on the other side than the reference's. The tests therefore check each
half against float64 on the very operands that it read, and the whole on values that are exact.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.formats import e2m1_decode, e8m0_decode, fp4_row_dequantize, pack_e2m1, unpack_e2m1
from pcpkit.kernels import _expert_gemm as grouped
from pcpkit.kernels import experts as module
from pcpkit.kernels._expert_gemm import ExpertChoice, Fp4Stack, sort_pairs
from pcpkit.kernels._operand import prepare_operand
from pcpkit.kernels.experts import routed_experts
from pcpkit.kernels.linear import quantized_input

from .bits import MODES, base_of, same_bits, spaced
from .inputs_experts import LIMIT, ExpertInputs, draw_experts

few = settings(max_examples=8)
seeds = st.integers(0, 2**31)

SMALL = ExpertChoice(block_rows=16, block_weights=64, num_warps=4, num_stages=2)
# All that `choose_experts` gives for 384 experts, and a small one.
CHOICES = (SMALL, *(grouped.choose_experts(384 * mean, 384) for mean in (12, 1, 29, 73)))


def run(inputs: ExpertInputs, device: str, choice: ExpertChoice = SMALL) -> Tensor:
    """The kernels' result: interpreted on the CPU, compiled on CUDA."""
    return module._launch_experts(*inputs.to(device).args, choice=choice)


def reference(inputs: ExpertInputs) -> Tensor:
    return module.routed_experts_reference(*inputs.args)


def simple_inputs(num_rows: int, *, num_experts: int, top_k: int, seed: int) -> ExpertInputs:
    """Values for which no FP32 operation rounds, so that results are equal, not close.

    Rows hold 1 and 2; a row of W1 or W3 has one channel that is not zero. Gates are 64 ... 384,
    where the logistic function is 1 in FP32 and the clamp does not act; up values are multiples of
    one half. Hidden values are multiples of 8 below 2^14 (of 4 significant bits after MXFP8), and
    sums of their products with E2M1 codes have less than 24 bits.
    """
    inputs = draw_experts(num_rows, num_experts=num_experts, top_k=top_k, seed=seed)
    hidden = inputs.x.shape[1]
    generator = torch.Generator().manual_seed(99)

    def draw(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    for stack, low, high, scale in ((inputs.w1, 6, 8, 131), (inputs.w3, 0, 16, 127)):
        codes = torch.zeros(*stack[0].shape[:2], hidden, dtype=torch.uint8)
        channel = draw(0, hidden, (*codes.shape[:2], 1))
        codes.scatter_(2, channel, draw(low, high, tuple(channel.shape)).to(torch.uint8))
        stack[0].copy_(pack_e2m1(codes))
        stack[1].fill_(scale)
    inputs.w2[1].fill_(120)
    inputs.x.copy_(draw(1, 3, tuple(inputs.x.shape)))
    inputs.weights.copy_(torch.exp2(draw(-1, 2, tuple(inputs.weights.shape)).float()))
    return replace(inputs, limit=1e6)


def test_reference_by_hand() -> None:
    """Python floats with exact sums; the three BF16 roundings are those of the specification."""
    inputs = draw_experts(2, num_experts=4, top_k=2, hidden=64, inter=32, quantize=False, seed=1)
    inputs.ids[1, 0] = -1
    got = routed_experts(*inputs.args)

    def product(stack: tuple[Tensor, Tensor], expert: int, values: list[float]) -> list[float]:
        codes, scales = unpack_e2m1(stack[0][expert]), stack[1][expert]
        weights = e2m1_decode(codes).tolist()
        factors = e8m0_decode(scales).tolist()
        sums = [
            math.fsum(w * factor[k // 32] * values[k] for k, w in enumerate(row))
            for row, factor in zip(weights, factors, strict=True)
        ]
        return torch.tensor(sums, dtype=torch.float32).bfloat16().tolist()

    for row in range(2):
        total = torch.zeros(64)
        for j, expert in enumerate(inputs.ids[row].tolist()):
            if expert < 0:
                continue
            values = inputs.x[row].tolist()
            gates, ups = product(inputs.w1, expert, values), product(inputs.w3, expert, values)
            hidden = [
                inputs.weights[row, j].item()
                * (min(g, LIMIT) / (1 + math.exp(-min(g, LIMIT))))
                * max(-LIMIT, min(LIMIT, u))
                for g, u in zip(gates, ups, strict=True)
            ]
            hidden = torch.tensor(hidden, dtype=torch.float32).bfloat16().tolist()
            total += torch.tensor(product(inputs.w2, expert, hidden))
        assert same_bits(got[row], total)


def sorted_by_hand(ids: Tensor, first: int, count: int, rows: int) -> tuple[list[int], ...]:
    flat = ids.flatten().tolist()
    pairs = [[p for p, e in enumerate(flat) if e == first + expert] for expert in range(count)]
    starts, tiles = [0], [0]
    for found in pairs:
        starts.append(starts[-1] + len(found))
        tiles.append(tiles[-1] + -(-len(found) // rows))
    return [p for found in pairs for p in found], starts, tiles


@pytest.mark.parametrize("device", MODES)
@few
@given(
    ids=st.lists(st.integers(-2, 9), min_size=1, max_size=300),
    first=st.integers(0, 8),
    count=st.integers(1, 9),
    block_rows=st.sampled_from([1, 16]),
)
@example(ids=[3, 1, 4, 1, 5] * 60, first=1, count=4, block_rows=16)
def test_pairs_are_sorted(
    device: str, ids: list[int], first: int, count: int, block_rows: int
) -> None:
    """Any ids: none, foreign, all alike; up to three blocks of 128 of them."""
    there = torch.tensor(ids, dtype=torch.int32, device=device)[:, None]
    got = sort_pairs(there, first, count, block_rows, block=128)
    pairs, starts, tiles = sorted_by_hand(there, first, count, block_rows)
    assert got.row_starts.tolist() == starts
    assert got.tile_starts.tolist() == tiles
    assert got.pairs[: len(pairs)].tolist() == pairs
    assert got.max_tiles >= tiles[-1]


def dequantized(stack: tuple[Tensor, Tensor], expert: int) -> Tensor:
    return fp4_row_dequantize(stack[0][expert], stack[1][expert]).double()


def check_halves(inputs: ExpertInputs, device: str, choice: ExpertChoice) -> None:
    """Each GEMM against float64 on the operand it read, within the error of an FP32 sum."""
    there = inputs.to(device)
    found = sort_pairs(there.ids, there.first_expert, there.w1[0].shape[0], choice.block_rows)
    num_pairs, top_k = there.ids.numel(), there.ids.shape[1]
    hidden = spaced(torch.zeros(num_pairs, there.w1[0].shape[1], device=device).bfloat16())
    hidden.fill_(float("nan"))
    x = prepare_operand(there.x, there.quantize, 4)
    grouped.expert_gemm(
        x,
        found,
        top_k,
        Fp4Stack(*there.w1),
        hidden,
        choice,
        up=Fp4Stack(*there.w3),
        weights=there.weights,
        limit=LIMIT,
    )
    output = spaced(torch.full_like(inputs.x.repeat_interleave(top_k, 0), torch.nan).to(device))
    operand = prepare_operand(hidden, there.quantize, 4)
    grouped.expert_gemm(operand, found, top_k, Fp4Stack(*there.w2), output, choice)

    ids = inputs.ids.flatten() - inputs.first_expert
    local = (ids >= 0) & (ids < inputs.w1[0].shape[0])
    places = found.pairs[: int(local.sum())].long().cpu()
    assert torch.equal(places.sort().values, local.nonzero().flatten())
    for buffer, written in ((hidden, len(places)), (output, int(local.sum()))):
        clean = base_of(buffer).isnan().sum()
        assert int((~buffer.isnan()).sum()) == written * buffer.shape[1]
        assert int(clean) == base_of(buffer).numel() - written * buffer.shape[1]
    rows = quantized_input(inputs.x, inputs.quantize).double()
    for place, pair in enumerate(places.tolist()):
        expert, weight = int(ids[pair]), inputs.weights.flatten()[pair].double()
        check_hidden(hidden[place].cpu(), rows[pair // top_k], inputs, expert, weight)
        read = quantized_input(hidden[place, None].cpu(), inputs.quantize).double()
        dense = dequantized(inputs.w2, expert)
        check_between(output[pair, None].cpu(), read @ dense.t(), sum_error(read, dense))


def sum_error(x: Tensor, dense: Tensor) -> Tensor:
    """Of an FP32 sum in any order, each addition truncated: K 2^-23 of the magnitudes."""
    return dense.shape[1] * 2**-23 * (x.abs() @ dense.abs().t())


def check_between(got: Tensor, exact: Tensor, bound: Tensor) -> None:
    assert (got >= (exact - bound).bfloat16()).all()
    assert (got <= (exact + bound).bfloat16()).all()


def check_hidden(
    got: Tensor, row: Tensor, inputs: ExpertInputs, expert: int, weight: Tensor
) -> None:
    """Gate and up may each round to a BF16 neighbour: the result lies within what those allow."""
    ends: list[Tensor] = []
    for stack, low, high in ((inputs.w1, -1e30, LIMIT), (inputs.w3, -LIMIT, LIMIT)):
        dense = dequantized(stack, expert)
        exact, bound = dense @ row, sum_error(row, dense)
        edges = torch.stack([exact - bound, exact + bound]).bfloat16().double()
        ends.append(edges.clamp(low, high))
    silu = ends[0] * ends[0].sigmoid()
    corners = torch.stack([weight * s * u for s in silu for u in ends[1]])
    slack = 2**-18 * corners.abs().amax(0)
    # silu falls below -1.28: its least value lies inside an interval that holds that point.
    turning = (ends[0][0] < -1.2784) & (ends[0][1] > -1.2785)
    assert ((got >= (corners.amin(0) - slack).bfloat16()) | turning).all()
    assert ((got <= (corners.amax(0) + slack).bfloat16()) | turning).all()


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(("hidden", "inter"), [(128, 96), (96, 160), (256, 32)])
def test_halves_are_within_fp32_error(device: str, quantize: bool, hidden: int, inter: int) -> None:
    """Some ids foreign, one expert without rows, one with more than a tile; NaN around outputs."""
    inputs = draw_experts(
        20,
        num_experts=6,
        num_local=4,
        first_expert=1,
        top_k=2,
        hidden=hidden,
        inter=inter,
        quantize=quantize,
        seed=inter,
    )
    inputs.ids[inputs.ids == 2] = -1
    inputs.ids[:18, 1] = 4
    check_halves(inputs, device, SMALL)


@pytest.mark.parametrize("device", MODES)
def test_every_choice_equals_the_reference_on_exact_values(device: str) -> None:
    inputs = simple_inputs(9, num_experts=4, top_k=2, seed=2)
    want = reference(inputs)
    for choice in CHOICES if device == "cuda" else CHOICES[:2]:
        assert same_bits(run(inputs, device, choice), want), choice


@pytest.mark.parametrize("device", MODES)
def test_foreign_and_missing_experts(device: str) -> None:
    """The sum over expert-parallel ranks is that of one rank; rows of -1 are zero."""
    inputs = simple_inputs(5, num_experts=6, top_k=3, seed=3)
    inputs.ids[2] = -1
    inputs.ids[3, 0] = -1
    want = reference(inputs)
    assert (want[2] == 0).all()
    assert same_bits(run(inputs, device), want)
    for first in (0, 3):
        stacks = {
            name: tuple(t[first : first + 3] for t in getattr(inputs, name))
            for name in ("w1", "w3", "w2")
        }
        part = replace(inputs, first_expert=first, **stacks)
        assert same_bits(run(part, device), reference(part))


@pytest.mark.parametrize("device", MODES)
def test_strided_tensors_between_nan(device: str) -> None:
    inputs = simple_inputs(4, num_experts=3, top_k=2, seed=4)
    there = inputs.to(device)
    apart = replace(
        there,
        x=spaced(there.x),
        ids=spaced(there.ids),
        weights=spaced(there.weights),
        w1=(spaced(there.w1[0]), spaced(there.w1[1])),
        w3=(spaced(there.w3[0]), spaced(there.w3[1])),
        w2=(spaced(there.w2[0]), spaced(there.w2[1])),
    )
    assert same_bits(run(apart, device), reference(inputs))
    columns = there.x.t().contiguous().t()
    got = module._launch_experts(columns, *there.args[1:], choice=SMALL)
    assert same_bits(got, reference(inputs))


@pytest.mark.parametrize("device", MODES)
def test_special_values_stay_in_their_row_and_expert(device: str) -> None:
    clean = simple_inputs(7, num_experts=3, top_k=1, seed=5)
    x, weights = clean.x.clone(), clean.weights.clone()
    x[0, 5], x[1, 5], x[2] = math.nan, math.inf, 0.0
    weights[3] = math.nan
    w1_scale = clean.w1[1].clone()
    w1_scale[1, 4, 0] = 255
    clean.ids[:] = torch.tensor([0, 0, 0, 0, 1, 2, 2], dtype=torch.int32)[:, None]
    inputs = replace(clean, x=x, weights=weights, w1=(clean.w1[0], w1_scale))
    got, want = run(inputs, device).cpu(), reference(inputs)
    assert same_bits(got, want)
    assert want[:2].isnan().all()
    assert (want[2] == 0).all()
    assert want[3:5].isnan().all()
    assert same_bits(got[5:], reference(clean)[5:])


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("scale", [3, 127, 128, 129, 200, 252, 254, 255])
def test_fp4_decode_is_exact_for_every_code(device: str, scale: int) -> None:
    """All codes in both nibbles through the kernel: rows that pick one channel each.

    Below scale 3 a weight may be subnormal, which the device may flush. From 253 on the product
    with the largest codes overflows to infinity, as in FP32.
    """
    packed = torch.arange(256, dtype=torch.uint8).repeat(2)[:, None].expand(512, 16)
    weight = packed.reshape(1, 512, 16).contiguous()
    scales = torch.full((1, 512, 1), scale, dtype=torch.uint8)
    x = torch.zeros(2, 32).bfloat16()
    x[0, 6], x[1, 7] = 1.0, 1.0
    found = sort_pairs(torch.zeros(2, 1, dtype=torch.int32, device=device), 0, 1, 16)
    out = torch.empty(2, 512, dtype=torch.bfloat16, device=device)
    operand = prepare_operand(x.to(device), False, 4)
    stack = Fp4Stack(weight.to(device), scales.to(device))
    grouped.expert_gemm(operand, found, 1, stack, out, SMALL)
    want = fp4_row_dequantize(weight[0], scales[0])[:, 6:8].t()
    if scale >= 253:  # 0 times infinity is NaN: only rows without an infinity are comparable
        finite = want.isfinite().all(0)
        assert torch.equal(out.cpu()[:, finite].float(), want[:, finite])
    else:
        assert torch.equal(out.cpu().float(), want.bfloat16().float())


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=seeds, data=st.data())
def test_rows_do_not_depend_on_each_other(device: str, seed: int, data: st.DataObject) -> None:
    inputs = draw_experts(4, num_experts=3, top_k=2, hidden=64, inter=32, seed=seed)
    rows = st.lists(st.integers(0, 3), min_size=1, max_size=6)
    chosen = torch.tensor(data.draw(rows))
    assert same_bits(reference(inputs.rows(chosen)), reference(inputs)[chosen])
    whole = run(inputs, device).cpu()
    assert same_bits(run(inputs.rows(chosen), device).cpu(), whole[chosen])


@pytest.mark.parametrize("device", MODES)
def test_nothing_to_do(device: str) -> None:
    inputs = draw_experts(3, num_experts=2, top_k=2, hidden=64, inter=32)
    none = inputs.rows(torch.arange(0))
    assert run(none, device).shape == (0, 64)
    inputs.ids.fill_(7)
    assert (run(inputs, device) == 0).all()


def test_public_function_names_what_does_not_fit() -> None:
    inputs = draw_experts(2, num_experts=2, top_k=2, hidden=64, inter=32)
    with pytest.raises(ValueError, match=r"ids expected shape \(2, \*\), got \(1, 2\)"):
        routed_experts(*replace(inputs, ids=inputs.ids[:1]).args)
    with pytest.raises(ValueError, match=r"weights expected shape \(2, 2\), got \(2, 1\)"):
        routed_experts(*replace(inputs, weights=inputs.weights[:, :1]).args)
    odd = replace(inputs, w3=(spaced(inputs.w3[0]), inputs.w3[1]))
    with pytest.raises(ValueError, match="expert weight expected equal strides"):
        run(odd, "cpu")


@pytest.mark.parametrize(
    ("mean", "rows", "weights", "registers"),
    [
        *((0, 16, 128, None), (11, 16, 128, None)),
        *((12, 32, 128, 168), (28, 32, 128, 168)),
        *((29, 64, 128, 168), (64, 64, 128, 168), (72, 64, 128, 168)),
        *((73, 128, 256, None), (256, 128, 256, None)),
    ],
)
def test_launch_choice(mean: int, rows: int, weights: int, registers: int | None) -> None:
    """By pairs an expert."""
    choice = grouped.choose_experts(384 * mean, 384)
    assert (choice.block_rows, choice.block_weights) == (rows, weights)
    assert choice.max_registers == registers
    assert choice.block_weights % (16 * choice.num_warps) == 0, "below that Triton emits no wgmma"


def test_op_is_registered_correctly() -> None:
    inputs = draw_experts(2, num_experts=2, top_k=2, hidden=64, inter=32)
    torch.library.opcheck(torch.ops.pcpkit.routed_experts.default, inputs.args)


def test_compiles_into_one_graph() -> None:
    inputs = draw_experts(2, num_experts=2, top_k=2, hidden=64, inter=32)
    got = torch.compile(routed_experts, fullgraph=True, backend="aot_eager")(*inputs.args)
    assert same_bits(got, reference(inputs))
