"""The GEMM of many rows: every tile gives the bits of `_gemm`; the choice is pure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pcpkit.kernels import linear as module
from pcpkit.kernels._gemm import gemm
from pcpkit.kernels._gemm_many import _PARTS_TILE, _TILES, ManyChoice, choose_many, gemm_many

from .bits import MODES, base_of, same_bits, spaced
from .inputs_linear import draw_linear
from .test_linear import integer_inputs

TILES = [pytest.param(tile, id=f"{tile.block_rows}x{tile.block_cols}") for tile in _TILES]


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("tile", [*TILES, pytest.param(_PARTS_TILE, id="parts")])
def test_every_tile_computes_the_same(tile: ManyChoice, parts: int, device: str) -> None:
    """Rows, columns and channels end within a tile; what lies around the output is kept."""
    num_channels = 200 if parts == 1 else 3 * 128
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-8, 9, (150, num_channels), generator=generator).bfloat16().to(device)
    weight = torch.randint(-8, 9, (300, num_channels), generator=generator).bfloat16().to(device)
    want = (x.double() @ weight.double().t()).bfloat16()
    out = spaced(torch.zeros(150, 1, 300, dtype=torch.bfloat16, device=device))
    gemm_many(x.unsqueeze(1), weight, out, num_parts=parts, choice=tile)
    assert same_bits(out[:, 0], want)
    out.fill_(float("nan"))
    assert base_of(out).isnan().all()


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("tile", TILES)
def test_groups_and_fp32_results(tile: ManyChoice, device: str) -> None:
    """Groups of 40 columns: a tile reaches into the weight of the next group and drops it."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randint(-8, 9, (70, 3, 64), generator=generator).bfloat16().to(device)
    weight = torch.randint(-8, 9, (120, 64), generator=generator).bfloat16().to(device)
    out = torch.full((70, 3, 40), torch.nan, device=device)
    gemm_many(x, weight, out, choice=tile)
    want = torch.einsum("ngk,gmk->ngm", x.double(), weight.view(3, 40, 64).double())
    assert same_bits(out, want.float())


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_group_does_not_see_the_next_one(value: float, device: str) -> None:
    """96 channels a group: the second block of 64 would read 32 of the next group's rows."""
    generator = torch.Generator().manual_seed(8)
    x = torch.randint(-8, 9, (70, 3, 96), generator=generator).bfloat16().to(device)
    weight = torch.randint(-8, 9, (120, 96), generator=generator).bfloat16().to(device)
    clean, spoilt = (torch.full((70, 3, 40), torch.nan, device=device) for _ in range(2))
    gemm_many(x, weight, clean, choice=_TILES[2])
    x[:, 1] = value
    gemm_many(x, weight, spoilt, choice=_TILES[2])
    assert same_bits(spoilt[:, [0, 2]], clean[:, [0, 2]])
    assert not spoilt[:, 1].isfinite().any()


@pytest.mark.parametrize("device", MODES)
def test_what_does_not_suit_takes_the_other_kernel(device: str) -> None:
    """Rows that are not 16-byte aligned, groups that lie apart, FP32 rows."""
    generator = torch.Generator().manual_seed(7)
    odd = torch.randint(-8, 9, (20, 65), generator=generator).bfloat16().to(device)
    weight = torch.randint(-8, 9, (40, 64), generator=generator).bfloat16().to(device)
    apart = spaced(odd[:, :64].unflatten(1, (2, 32)))
    groups = odd.new_zeros(20, 2, 20)
    gemm_many(apart, weight[:, :32].contiguous(), groups, choice=_TILES[0])
    for group in range(2):
        rows, cols = apart[:, group].double(), weight[20 * group : 20 * (group + 1), :32].double()
        assert same_bits(groups[:, group], (rows @ cols.t()).bfloat16())
    for x in (odd[:, 1:], odd[:, :64].float()):
        out = odd.new_zeros(20, 1, 40)
        gemm_many(x.unsqueeze(1), weight, out, choice=_TILES[0])
        assert same_bits(out[:, 0], (x.double() @ weight.double().t()).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("fp32", [False, True])
def test_every_tile_gives_the_bits_of_gemm(parts: int, fp32: bool) -> None:
    """Random values, so every order of additions and every instruction would show."""
    inputs = draw_linear(300, 720, 1280, fp8=False, seed=1, device="cuda")
    x, dtype = inputs.x.unsqueeze(1), torch.float32 if fp32 else torch.bfloat16
    want = torch.full((300, 1, 720), torch.nan, dtype=dtype, device="cuda")
    gemm(x, inputs.weight, None, want, num_parts=parts)
    for tile in (*_TILES, _PARTS_TILE):
        out = torch.full_like(want, torch.nan)
        if parts > 1 and 1280 // parts % tile.block_depth:
            with pytest.raises(ValueError, match="a part"):
                gemm_many(x, inputs.weight, out, num_parts=parts, choice=tile)
            continue
        gemm_many(x, inputs.weight, out, num_parts=parts, choice=tile)
        assert same_bits(out, want), tile


def pair(x: Tensor, weight: Tensor, scale: Tensor, quantize: bool) -> tuple[Tensor, Tensor]:
    """The first 64 columns and the others as a pair."""
    both = module._launch_fp8_pair(
        x, weight[:64], scale[:2], weight[64:], scale[2:].contiguous(), quantize
    )
    return both[:, :64], both[:, 64:]


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("many_rows", [1, 1 << 30])
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("depth", [256, 96])
def test_a_pair_is_two_layers(
    depth: int, quantize: bool, many_rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits of `linear_fp8`; random values on the device, where the order of additions is ours."""
    monkeypatch.setattr(module, "MANY_ROWS", many_rows)
    inputs = integer_inputs(9, 160, depth)
    if device == "cuda":
        inputs = draw_linear(1500, 160, depth, seed=3)
    x, weight, scale = inputs.to(device).fp8
    first, second = pair(spaced(x), weight, scale, quantize)
    assert same_bits(first, module._launch_fp8(x, weight[:64], scale[:2], quantize))
    assert same_bits(second, module._launch_fp8(x, weight[64:], scale[2:], quantize))


def test_pair_reference_and_registration() -> None:
    x, weight, scale = draw_linear(3, 96, 64).fp8
    args = (x, weight[:64], scale[:2], weight[64:], scale[2:], True)
    for got, want in zip(
        module.linear_fp8_pair(*args),
        (
            module.linear_fp8(x, weight[:64], scale[:2], True),
            module.linear_fp8(x, weight[64:], scale[2:], True),
        ),
        strict=True,
    ):
        assert same_bits(got, want)
    torch.library.opcheck(torch.ops.pcpkit.linear_fp8_pair.default, args)
    assert [part.shape for part in module.linear_fp8_pair(x[:0], *args[1:])] == [(0, 64), (0, 32)]
    with pytest.raises(ValueError, match=r"x expected shape \(\*, 32\)"):
        module.linear_fp8_pair(x, weight[:64], scale[:2], weight[64:, :32], scale[2:, :1], True)


@pytest.mark.parametrize(
    ("num_rows", "num_cols", "depth", "groups", "parts", "tile"),
    [
        (4096, 1792, 5120, 1, 1, _TILES[0]),
        (4096, 4608, 5120, 1, 1, _TILES[0]),
        (4096, 5120, 2304, 1, 1, _TILES[0]),
        (4096, 1024, 4096, 8, 1, _TILES[0]),
        (4096, 32768, 1280, 1, 1, _TILES[1]),
        (4096, 4096, 1280, 1, 1, _TILES[1]),
        (4096, 1280, 5120, 1, 1, _TILES[2]),
        (4096, 512, 5120, 1, 1, _TILES[3]),
        (4096, 384, 5120, 1, 1, _TILES[3]),
        (4096, 32, 5120, 1, 1, _TILES[4]),
        (4096, 5120, 1024, 1, 8, _PARTS_TILE),
        (1024, 384, 5120, 1, 1, None),
        (4096, 5120, 96, 1, 8, None),
        (4096, 4096, 96, 8, 1, None),
    ],
)
def test_launch_choice(
    num_rows: int, num_cols: int, depth: int, groups: int, parts: int, tile: ManyChoice | None
) -> None:
    """The fastest measured tile of every layer of the model at 4,096 rows; `_gemm` for others."""
    assert choose_many(num_rows, num_cols, depth, groups, parts) == tile


def test_every_tile_keeps_the_instruction() -> None:
    """64 rows a group of four warps: the condition under which Triton emits wgmma."""
    for tile in (*_TILES, _PARTS_TILE):
        assert tile.num_warps % 4 == 0
        assert tile.block_rows % (16 * tile.num_warps) == 0
