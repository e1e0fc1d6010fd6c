"""FP8 weights in a BF16 workspace: exact values in operand order; both paths give the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pcpkit.formats import fp8_block_dequantize
from pcpkit.kernels import linear as module
from pcpkit.kernels._dense_weight import dense_weight, prepare_many
from pcpkit.kernels._operand import CHANNEL_ORDER, prepare_operand

from .bits import MODES, same_bits, spaced
from .inputs_linear import draw_linear
from .test_linear import integer_inputs


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("order", [CHANNEL_ORDER, 8])
@pytest.mark.parametrize(("num_cols", "depth"), [(1, 64), (40, 192), (33, 576)])
def test_values_are_exact_and_in_order(device: str, order: int, num_cols: int, depth: int) -> None:
    """All codes, NaN included; scales of the whole range that BF16 holds without subnormals."""
    generator = torch.Generator().manual_seed(depth)
    codes = torch.randint(0, 256, (num_cols, depth), generator=generator).to(torch.uint8)
    shape = (-(-num_cols // 32), depth // 32)
    scale = torch.randint(10, 246, shape, generator=generator).to(torch.uint8)
    scale[0, -1] = 255
    values = fp8_block_dequantize(codes, scale).bfloat16()
    want = prepare_operand(values.to(device), False, order)
    got = dense_weight(spaced(codes.to(device)), spaced(scale.to(device)), order)
    assert same_bits(got, want)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("order", [CHANNEL_ORDER, 8])
@pytest.mark.parametrize("num_weights", [1, 2])
def test_one_launch_prepares_rows_and_weights(num_weights: int, order: int, device: str) -> None:
    inputs = draw_linear(9, 72, 576, seed=2).to(device)
    weights = [(inputs.weight[:40], inputs.fp8[2][:2]), (inputs.weight[40:], inputs.fp8[2][1:])]
    weights = weights[:num_weights]
    x = spaced(inputs.x)
    operand, dense = prepare_many(x, weights, True, order)
    assert same_bits(operand, prepare_operand(x, True, order))
    assert same_bits(dense, torch.cat([dense_weight(*weight, order) for weight in weights]))
    operand, dense_again = prepare_many(x, weights, False, order)
    assert operand is x
    assert same_bits(dense_again, dense)


def run(x: Tensor, weight: Tensor, scale: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Every function that has two paths, on inputs that suit all of them."""
    grouped = x.view(x.shape[0], 2, -1)
    return (
        module._launch_fp8(x, weight, scale, True, parts),
        module._launch_fp8(x, weight, scale, False),
        module._launch_grouped(
            grouped, weight[:, : x.shape[1] // 2], scale[:, : scale.shape[1] // 2]
        ),
    )


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("exact", [True, False])
def test_both_paths_give_the_same_bits(
    device: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter's FP32 sums follow the tile, so random values are for the device only."""
    if device == "cpu" and not exact:
        pytest.skip("the order of additions is that of numpy")
    inputs = integer_inputs(9, 96, 256) if exact else draw_linear(150, 720, 2560, seed=7)
    args = inputs.to(device).fp8
    results: list[tuple[Tensor, ...]] = []
    for many_rows in (1, 1 << 30):
        monkeypatch.setattr(module, "MANY_ROWS", many_rows)
        results.append(run(*args, parts=2))
    for dense, fused in zip(*results, strict=True):
        assert same_bits(dense, fused)
