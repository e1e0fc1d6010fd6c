"""Rounded and reordered activations: bits of the codec, positions of the documented table."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.kernels._operand import CHANNEL_ORDER, ORDER_BLOCK, prepare_operand
from pcpkit.kernels.linear import quantized_input

from .bits import MODES, same_bits, spaced

few = settings(max_examples=15)


def position(channel: int, order: int) -> int:
    """The table of pcpkit.kernels._operand, for one channel of a row."""
    block, c = divmod(channel, ORDER_BLOCK[order])
    if order == 8:
        q, s, u, p = c // 16, c // 4 % 4, c // 2 % 2, c % 2
        return 64 * block + 16 * s + 8 * u + 2 * q + p
    if order == 4:
        q, s, u, p, h = c // 32, c // 8 % 4, c // 4 % 2, c // 2 % 2, c % 2
        return 128 * block + 64 * h + 16 * s + 8 * u + 2 * q + p
    return channel


def expected(x: Tensor, quantize: bool, order: int) -> Tensor:
    depth, block = x.shape[1], ORDER_BLOCK[order]
    out = x.new_zeros(x.shape[0], -(-depth // block) * block)
    places = torch.tensor([position(channel, order) for channel in range(depth)])
    out[:, places] = quantized_input(x, quantize)
    return out


def hostile_rows(depth: int) -> Tensor:
    """Magnitudes over the range of BF16, ties and edges of E4M3, empty groups, NaN, infinity."""
    generator = torch.Generator().manual_seed(depth)
    x = torch.randn(9, depth, generator=generator)
    x *= torch.exp2(torch.randint(-130, 120, (9, depth // 32), generator=generator).float()).repeat(
        1, 32
    )
    x[1] = torch.randint(-1024, 1025, (depth,), generator=generator).float() / 16
    x[2] = 448.0 * torch.linspace(-1.1, 1.1, depth)
    x[3, :32] = 0.0
    x[3, 32:] = -0.0
    x[4] = 1e-40
    x[5, 7], x[6, 8], x[7, 9] = math.nan, math.inf, -math.inf
    x[8] = 3.3e38
    return x.bfloat16()


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("order", [CHANNEL_ORDER, 4, 8])
@pytest.mark.parametrize("depth", [32, 64, 576])
@pytest.mark.parametrize("quantize", [True, False])
def test_kernel_equals_codec_and_table(device: str, order: int, depth: int, quantize: bool) -> None:
    x = hostile_rows(depth)
    got = prepare_operand(x.to(device), quantize, order)
    assert same_bits(got, expected(x, quantize, order))


def test_orders_are_permutations_of_a_block() -> None:
    for order, block in ORDER_BLOCK.items():
        assert sorted(position(c, order) for c in range(2 * block)) == list(range(2 * block))


@pytest.mark.parametrize("device", MODES)
def test_strided_rows_and_used_rows(device: str) -> None:
    """Rows behind the used ones are neither read nor written."""
    x = hostile_rows(96)
    there = spaced(x.to(device))
    assert same_bits(prepare_operand(there, True, 8), expected(x, True, 8))
    used = torch.tensor([6], dtype=torch.int32, device=device)
    assert same_bits(prepare_operand(there, True, 4, used)[:6], expected(x, True, 4)[:6])
    none = torch.zeros(1, dtype=torch.int32, device=device)
    assert prepare_operand(there, True, 4, none).shape == (9, 128)


def test_nothing_to_do_copies_nothing() -> None:
    x = hostile_rows(64)
    assert prepare_operand(x, False, CHANNEL_ORDER) is x


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=st.integers(0, 2**31), data=st.data())
def test_rows_do_not_depend_on_each_other(device: str, seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 64, generator=generator).bfloat16()
    rows = st.lists(st.integers(0, 5), min_size=1, max_size=9)
    chosen = torch.tensor(data.draw(rows))
    got = prepare_operand(x[chosen].to(device), True, 8)
    assert same_bits(got, expected(x, True, 8)[chosen])
