"""route and swiglu: reference by hand, kernel against reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcpkit.kernels import experts as module
from pcpkit.kernels.experts import route, swiglu

from .bits import MODES, same_bits, spaced
from .inputs_experts import draw_logits

few = settings(max_examples=15)
seeds = st.integers(0, 2**31)


def score_by_hand(logit: float) -> float:
    return math.sqrt(logit if logit > 20 else math.log1p(math.exp(logit)))


@pytest.mark.parametrize("top_k", [1, 3])
def test_route_reference_by_hand(top_k: int) -> None:
    """Ids exactly; weights within 2^-21: at most seven FP32 roundings of 2^-24."""
    logits, bias = draw_logits(4, 9)
    logits[1, 4] = 25.0
    ids, weights = route(logits, bias, top_k, 1.5)
    for row in range(4):
        scores = [score_by_hand(logit) for logit in logits[row].tolist()]
        biased = [score + b for score, b in zip(scores, bias.tolist(), strict=True)]
        chosen = sorted(sorted(range(9), key=lambda e: (-biased[e], e))[:top_k])
        total = sum(scores[e] for e in chosen) if top_k > 1 else 1.0
        want = torch.tensor([scores[e] / total * 1.5 for e in chosen], dtype=torch.float64)
        assert ids[row].tolist() == chosen
        assert ((weights[row] - want).abs() <= 2**-21 * want).all()


# Bits: softplus is rounded once from float64, where kernel and reference differ in the last bits at
# most; an FP32 number changes for that about once in 10^8. All else is IEEE FP32.
@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize(("num_experts", "top_k"), [(384, 6), (16, 4), (5, 5), (3, 1)])
def test_route_kernel_equals_reference(device: str, num_experts: int, top_k: int) -> None:
    logits, bias = draw_logits(5, num_experts, seed=top_k)
    got = module._launch_route(logits.to(device), bias.to(device), top_k, 1.5)
    want = module.route_reference(logits, bias, top_k, 1.5)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


@pytest.mark.gpu
def test_route_kernel_at_a_real_size() -> None:
    logits, bias = draw_logits(8192, seed=1)
    got = module._launch_route(logits.cuda(), bias.cuda(), 6, 1.5)
    want = module.route_reference(logits, bias, 6, 1.5)
    assert same_bits(got[0], want[0])
    different = (got[1].cpu() != want[1]).sum()
    assert different <= 2, "float64 differs in the last bits once in 10^8 or so"


@pytest.mark.parametrize("device", MODES)
def test_route_ties_edges_and_hostile_logits(device: str) -> None:
    """Ties go to the lower id; NaN comes first, as in torch's sort; every row stands alone."""
    specials = [math.nan, math.inf, -math.inf, 20.0, 20.000002, -110.0, -800.0, 90.0, 0.0, -0.0]
    logits, bias = draw_logits(len(specials) + 3, 12, seed=2)
    bias[:] = 0.0
    for row, value in enumerate(specials):
        logits[row, 7] = value
        logits[row, 3] = value
    logits[-3] = 1.0
    logits[-2] = -800.0
    logits[-1] = math.nan
    want = module.route_reference(logits, bias, 4, 2.5)
    got = module._launch_route(logits.to(device), bias.to(device), 4, 2.5)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])
    assert want[0][-3:].tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("device", MODES)
def test_route_bias_decides_the_choice_only(device: str) -> None:
    logits = torch.zeros(2, 8)
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0, -0.0, math.inf, -math.inf, math.nan])
    bias.view(torch.int32)[7] |= -(2**31)  # a NaN comes first whatever its sign
    got = module._launch_route(logits.to(device), bias.to(device), 3, 1.5)
    want = module.route_reference(logits, bias, 3, 1.5)
    assert got[0].tolist() == want[0].tolist() == [[2, 5, 7]] * 2
    assert same_bits(got[1], want[1])
    assert ((want[1] - 0.5).abs() <= 2**-24).all()


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=seeds, data=st.data())
def test_routed_rows_do_not_depend_on_each_other(
    device: str, seed: int, data: st.DataObject
) -> None:
    logits, bias = draw_logits(5, 24, seed=seed)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, 4), max_size=7)), dtype=torch.int64)
    want = module.route_reference(logits, bias, 4, 1.5)
    for got in (
        module.route_reference(logits[chosen], bias, 4, 1.5),
        module._launch_route(spaced(logits[chosen].to(device)), bias.to(device), 4, 1.5),
    ):
        assert same_bits(got[0], want[0][chosen])
        assert same_bits(got[1], want[1][chosen])


def swiglu_by_hand(gate: float, up: float, limit: float) -> float:
    gate, up = min(gate, limit), max(-limit, min(limit, up))
    return gate / (1 + math.exp(-gate)) * up


def test_swiglu_reference_by_hand() -> None:
    """At most four FP32 roundings before the last one: within 2^-22 of the exact value."""
    generator = torch.Generator().manual_seed(3)
    gate, up = (torch.randn(2, 4, 40, generator=generator) * 8).bfloat16()
    weights = torch.rand(4, generator=generator)
    got = swiglu(gate, up, 10.0, weights)
    plain = swiglu(gate, up, 10.0)
    for row in range(4):
        for c in range(40):
            want = swiglu_by_hand(gate[row, c].item(), up[row, c].item(), 10.0)
            for value, out in ((want * weights[row].item(), got), (want, plain)):
                edges = torch.tensor([value * (1 - 2**-22), value * (1 + 2**-22)]).double()
                low, high = edges.sort().values.bfloat16()
                assert low <= out[row, c] <= high


def check_swiglu(got: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None:
    """Within 2^-18 of the exact value before the rounding to BF16.

    The kernel's exponential is a power of two of ``-gate * log2(e)``, below 128 where the result is
    not tiny: that product is rounded by at most 2^-18, which changes the power by 0.7 times 2^-18.
    What remains are a few roundings of 2^-23.
    """
    wide = gate.double().clamp(max=10.0)
    exact = wide * wide.sigmoid() * up.double().clamp(-10.0, 10.0)
    edges = torch.stack([exact * (1 - 2**-18), exact * (1 + 2**-18)]).sort(dim=0).values
    tiny = exact.abs() < 1e-35  # the hardware may flush what is below the normal numbers
    assert ((got >= edges[0].bfloat16()) | tiny).all()
    assert ((got <= edges[1].bfloat16()) | tiny).all()


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize(("num_rows", "dim"), [(5, 70), (1, 512), (9, 1)])
def test_swiglu_kernel_is_within_fp32_error(device: str, num_rows: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(4)
    gate, up = (torch.randn(2, num_rows, dim, generator=generator) * 12).bfloat16()
    there = spaced(gate.to(device)), spaced(up.to(device))
    got = module._launch_swiglu(*there, 10.0).cpu()
    check_swiglu(got, gate, up)
    ones = torch.ones(num_rows, device=device)
    assert same_bits(module._launch_swiglu(*there, 10.0, ones), got)
    halves = module._launch_swiglu(*there, 10.0, ones / 2).cpu()
    assert torch.equal(halves.float() * 2, got.float())
    assert same_bits(module._launch_swiglu(there[0][:1], there[1][:1], 10.0), got[:1])


@pytest.mark.parametrize("device", MODES)
def test_swiglu_of_hostile_values(device: str) -> None:
    """As the reference: NaN stays NaN, infinities are clamped (a gate of -inf gives NaN)."""
    specials = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-40, 0.0, -0.0, 10.0])
    gate = specials.bfloat16()[:, None].expand(9, 9).contiguous()
    up = specials.bfloat16()[None, :].expand(9, 9).contiguous()
    got = module._launch_swiglu(gate.to(device), up.to(device), 10.0).cpu()
    want = module.swiglu_reference(gate, up, 10.0)
    assert torch.equal(got.isnan(), want.isnan())
    known = ~want.isnan()
    assert ((got - want).abs()[known] <= 2**-8 * want.abs()[known] + 1e-38).all()


@pytest.mark.parametrize("device", MODES)
def test_no_rows(device: str) -> None:
    ids, weights = module._launch_route(
        torch.empty(0, 8, device=device), torch.zeros(8, device=device), 3, 1.5
    )
    assert ids.shape == weights.shape == (0, 3)
    none = torch.empty(0, 8, device=device, dtype=torch.bfloat16)
    assert module._launch_swiglu(none, none, 10.0).shape == (0, 8)


def test_public_functions_name_what_does_not_fit() -> None:
    logits, bias = draw_logits(2, 8)
    with pytest.raises(ValueError, match="logits expected dtype float32, got bfloat16"):
        route(logits.bfloat16(), bias, 2, 1.5)
    with pytest.raises(ValueError, match=r"logits expected shape \(\*, 7\), got \(2, 8\)"):
        route(logits, bias[1:], 2, 1.5)
    with pytest.raises(ValueError, match=r"up expected shape \(2, 8\), got \(2, 7\)"):
        swiglu(logits.bfloat16(), logits[:, 1:].bfloat16(), 10.0)


def test_ops_are_registered_correctly() -> None:
    logits, bias = draw_logits(2, 8)
    torch.library.opcheck(torch.ops.pcpkit.route.default, (logits, bias, 2, 1.5))
    gate = logits.bfloat16()
    torch.library.opcheck(torch.ops.pcpkit.swiglu.default, (gate, gate, 10.0, None))
    torch.library.opcheck(torch.ops.pcpkit.swiglu.default, (gate, gate, 10.0, torch.ones(2)))
