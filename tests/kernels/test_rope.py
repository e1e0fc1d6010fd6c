"""apply_rope and apply_rope_: reference against complex numbers, kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.kernels import rope as module
from pcpkit.kernels.rope import apply_rope, apply_rope_, apply_rope_reference

from .bits import MODES, base_of, bits, same_bits, spaced
from .inputs_cache_write import hostile_latents, rope_table

few = settings(max_examples=25)

# (heads, head_dim, rope_dim): released query heads; all channels rotate; no power of two; none.
SHAPES = [(3, 512, 64), (5, 64, 64), (4, 96, 24), (1, 2, 2), (2, 48, 0)]


def draw(num_rows: int, heads: int, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Hostile rows and positions; some positions lie outside a table of 40."""
    generator = torch.Generator().manual_seed(seed)
    x = hostile_latents(num_rows * heads, dim, seed).view(num_rows, heads, dim)
    return x, torch.randint(-1, 41, (num_rows,), generator=generator)


@pytest.mark.parametrize("inverse", [False, True])
def test_reference_is_a_complex_product(inverse: bool) -> None:
    """Within the FP32 roundings of two products and a sum, and the one to BF16."""
    x, table = torch.randn(6, 2, 32).bfloat16(), rope_table(10, 16)
    positions = torch.tensor([0, 9, 3, 3, 1, 7])
    got = apply_rope_reference(x, positions, table, inverse)
    turn = torch.complex(table[:, :8].double(), table[:, 8:].double())[positions][:, None]
    tail = torch.view_as_complex(x[..., 16:].double().unflatten(-1, (8, 2)).contiguous())
    want = torch.view_as_real(tail * (turn.conj() if inverse else turn)).flatten(-2)
    error = (got[..., 16:].double() - want).abs()
    # BF16 keeps 8 bits: half a unit is 2^-8 of the value; FP32 adds less than 2^-22 of the pair.
    bound = want.abs() * 2.0**-8 + tail.abs().repeat_interleave(2, dim=-1) * 2.0**-22
    assert (error <= bound).all()
    assert same_bits(got[..., :16], x[..., :16])
    assert same_bits(got[0], x[0]), "a row at position 0 comes back unchanged"


def test_inverse_undoes_the_rotation() -> None:
    """Quarter turns are exact, so both directions together are the identity."""
    x = torch.randn(4, 1, 8).bfloat16()
    table = torch.tensor([[1.0] * 4 + [0.0] * 4, [0.0] * 4 + [1.0] * 4])
    positions = torch.tensor([1, 0, 1, 1])
    there = apply_rope(x, positions, table)
    assert same_bits(there[1], x[1])
    # (a + ib) * i = -b + ia
    assert torch.equal(there[0, 0, 0::2], -x[0, 0, 1::2])
    assert torch.equal(there[0, 0, 1::2], x[0, 0, 0::2])
    assert torch.equal(apply_rope(there, positions, table, inverse=True), x)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("heads", "dim", "rope_dim"), SHAPES)
def test_kernels_equal_the_reference(
    heads: int, dim: int, rope_dim: int, inverse: bool, device: str
) -> None:
    """Hostile values and positions, everything apart in poisoned buffers."""
    x, positions = draw(7, heads, dim, seed=dim + inverse)
    table = rope_table(40, rope_dim)
    want = apply_rope_reference(x, positions, table, inverse)
    far, here = spaced(x.to(device)), spaced(table.to(device))
    where = positions.to(device).repeat_interleave(2)[::2]
    got = module._launch(far, where, here, inverse)
    assert same_bits(got, want)
    # Copied channels keep every bit, NaN payloads included.
    copied = slice(0, dim - rope_dim)
    assert torch.equal(bits(got[..., copied]).cpu(), bits(x[..., copied]))
    before = base_of(far).clone()
    module._launch_inplace(far, where, here, inverse)
    assert same_bits(far, want)
    after = base_of(far).clone()
    inside = (slice(1, -2), slice(1, -2), slice(1 + dim - rope_dim, 1 + dim))
    before[inside], after[inside] = 0.0, 0.0
    assert torch.equal(bits(after), bits(before)), "only rotated channels are touched"


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 8, 64])
def test_kernels_equal_the_reference_at_real_sizes(heads: int) -> None:
    x = torch.randn(4096, heads, 512, device="cuda").bfloat16()
    positions, table = torch.arange(4096, device="cuda") + 7, rope_table(4200, 64).cuda()
    want = apply_rope_reference(x, positions, table)
    some = slice(None, None, 97)
    on_cpu = apply_rope_reference(x[some].cpu(), positions[some].cpu(), table.cpu())
    assert same_bits(want[some], on_cpu)
    assert torch.equal(bits(module._launch(x, positions, table)), bits(want))
    module._launch_inplace(x, positions, table)
    assert torch.equal(bits(x), bits(want))


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=st.integers(0, 2**31), chosen=st.lists(st.integers(0, 6), max_size=9))
def test_a_row_does_not_depend_on_the_others(device: str, seed: int, chosen: list[int]) -> None:
    x, positions = draw(7, 3, 16, seed)
    table, index = rope_table(40, 8), torch.tensor(chosen, dtype=torch.int64)
    whole = apply_rope_reference(x, positions, table)
    assert same_bits(apply_rope_reference(x[index], positions[index], table), whole[index])
    fewer = x[index].to(device), positions[index].to(device), table.to(device)
    assert same_bits(module._launch(*fewer), whole[index])
    module._launch_inplace(*fewer)
    assert same_bits(fewer[0], whole[index])


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8)])
def test_no_rows_or_no_heads(shape: tuple[int, int, int], device: str) -> None:
    x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    positions = torch.zeros(shape[0], dtype=torch.int64, device=device)
    assert module._launch(x, positions, rope_table(4, 8).to(device)).shape == shape
    module._launch_inplace(x, positions, rope_table(4, 8).to(device))


@pytest.mark.parametrize(
    ("heads", "dim", "block_heads", "num_warps"),
    [(64, 512, 8, 4), (64, 64, 64, 4), (3, 512, 4, 4), (1, 64, 1, 1), (1, 8192, 1, 4)],
)
def test_launch_choice(heads: int, dim: int, block_heads: int, num_warps: int) -> None:
    choice = module._choose_launch(heads, dim)
    assert (choice.block_heads, choice.num_warps) == (block_heads, num_warps)


def test_public_functions_name_what_does_not_fit() -> None:
    x, positions = draw(4, 2, 16, seed=0)
    table = rope_table(40, 8)
    with pytest.raises(ValueError, match="x expected dtype bfloat16, got float32"):
        apply_rope(x.float(), positions, table)
    with pytest.raises(ValueError, match=r"x expected shape \(3, \*, \*\), got \(4, 2, 16\)"):
        apply_rope(x, positions[:3], table)
    with pytest.raises(ValueError, match="positions expected dtype int64, got int32"):
        apply_rope(x, positions.int(), table)
    with pytest.raises(ValueError, match="cos_sin expected an even number of columns <= head_dim"):
        apply_rope(x, positions, rope_table(40, 18))
    with pytest.raises(ValueError, match="x expected contiguous channels, got strides"):
        apply_rope_(x.repeat_interleave(2, dim=2)[..., ::2], positions, table)


def test_ops_are_registered_correctly() -> None:
    x, positions = draw(4, 2, 16, seed=0)
    arguments = (x.nan_to_num(), positions.clamp(0, 39), rope_table(40, 8), True)
    torch.library.opcheck(torch.ops.pcpkit.apply_rope.default, arguments)
    torch.library.opcheck(torch.ops.pcpkit.apply_rope_.default, arguments)


def step(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Both public functions; mutates ``x``."""
    out = apply_rope(x, positions, table, inverse=True)
    apply_rope_(x, positions, table)
    return out + x


def test_compiles_into_one_graph() -> None:
    x, positions = draw(4, 2, 16, seed=0)
    table, other = rope_table(40, 8), x.clone()
    want = step(x, positions, table)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(other, positions, table)
    assert same_bits(got, want)
    assert same_bits(other, x)


@pytest.mark.gpu
def test_inductor_and_cuda_graph_give_the_same_bits() -> None:
    start = torch.randn(64, 8, 512, device="cuda").bfloat16()
    positions, table = torch.arange(64, device="cuda"), rope_table(64, 64).cuda()
    eager, compiled, captured = start.clone(), start.clone(), start.clone()
    want = step(eager, positions, table)
    assert same_bits(torch.compile(step, fullgraph=True)(compiled, positions, table), want)
    assert same_bits(compiled, eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(captured, positions, table)
    captured.copy_(start)
    graph.replay()
    assert same_bits(got, want)
    assert same_bits(captured, eager)


@pytest.mark.gpu
def test_offsets_past_2_to_31() -> None:
    """Rows 2^30 elements apart: the third lies beyond 2^31."""
    needed = ((3 << 30) + 4096) * 2
    if torch.cuda.mem_get_info()[0] < needed + (1 << 30):
        pytest.skip(f"needs {needed} bytes of device memory")
    buffer = torch.empty(needed // 2, dtype=torch.bfloat16, device="cuda")
    x, positions = draw(4, 8, 512, seed=5)
    far = buffer.as_strided((4, 8, 512), (1 << 30, 512, 1))
    far.copy_(x)
    table, want = rope_table(40, 64), apply_rope_reference(x, positions, rope_table(40, 64))
    assert same_bits(module._launch(far, positions.cuda(), table.cuda()), want)
    module._launch_inplace(far, positions.cuda(), table.cuda())
    assert same_bits(far, want)
