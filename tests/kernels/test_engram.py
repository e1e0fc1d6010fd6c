"""engram_rows and engram_gather: references against loops, kernels against references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.kernels import engram
from pcpkit.kernels.engram import (
    engram_gather,
    engram_gather_reference,
    engram_rows,
    engram_rows_reference,
)

from .bits import MODES, same_bits, spaced
from .inputs_engram import (
    HashInputs,
    bench_lookups,
    bench_table,
    random_table,
    released_hash,
)

few = settings(max_examples=20)
seeds = st.integers(0, 2**31)


def wrapped(value: int) -> int:
    """Two's complement int64."""
    return (value + 2**63) % 2**64 - 2**63


def rows_by_hand(inputs: HashInputs) -> Tensor:
    """One token, layer and column at a time, in Python integers."""
    token_map, multipliers = inputs.token_map.tolist(), inputs.multipliers.tolist()
    layers = list(zip(multipliers, inputs.primes.tolist(), inputs.offsets.tolist(), strict=True))
    return torch.tensor(
        [
            [layer_by_hand(window, token_map, inputs.pad_id, *layer) for layer in layers]
            for window in inputs.token_windows.tolist()
        ]
    )


def layer_by_hand(
    window: list[int],
    token_map: list[int],
    pad_id: int,
    multipliers: list[int],
    primes: list[list[int]],
    offsets: list[int],
) -> list[int]:
    ids: list[int] = []
    for token in window:
        alive = len(ids) == 0 or ids[-1] >= 0
        ids.append(token_map[token] if alive and 0 <= token < len(token_map) else -1)
    ids = [pad_id if compressed < 0 else compressed for compressed in ids]
    hashed, columns = wrapped(ids[0] * multipliers[0]), list[int]()
    for compressed, multiplier, counts in zip(ids[1:], multipliers[1:], primes, strict=True):
        hashed ^= wrapped(compressed * multiplier)
        columns += [hashed % count for count in counts]
    return [column + offset for column, offset in zip(columns, offsets, strict=True)]


def small_hash(seed: int, *, num_rows: int = 9, heads: int = 3) -> HashInputs:
    """Random constants, sometimes so large that products wrap and hashes turn negative."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    return HashInputs(
        token_windows=integers(-1, 22, num_rows, 4),
        token_map=integers(0, 2**20, 20),
        multipliers=integers(0, 2**62 if seed % 2 else 2**30, 2, 4),
        primes=integers(1, 2**33, 2, 3, heads),
        offsets=integers(0, 2**40, 2, 3 * heads),
    )


def run_rows(inputs: HashInputs, device: str) -> Tensor:
    """The kernel's rows: interpreted on the CPU, compiled on CUDA."""
    return engram._launch_rows(*inputs.to(device).args)


@given(seed=seeds)
@example(seed=1)
def test_rows_reference_is_the_loop(seed: int) -> None:
    inputs = small_hash(seed)
    assert same_bits(engram_rows_reference(*inputs.args), rows_by_hand(inputs))


def test_released_rows_lie_in_their_buckets() -> None:
    inputs = released_hash(40)
    rows = engram_rows(*inputs.args)
    assert same_bits(rows, rows_by_hand(inputs))
    assert rows.shape == (40, 2, 24)
    assert (rows >= inputs.offsets).all()
    assert (rows < inputs.offsets + inputs.primes.flatten(1)).all()
    assert rows.amax(dim=(0, 2)).le(torch.tensor([384_006_167, 384_016_681])).all()


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=seeds, heads=st.integers(1, 9))
def test_rows_kernel_equals_reference(device: str, seed: int, heads: int) -> None:
    inputs = small_hash(seed, heads=heads)
    assert same_bits(run_rows(inputs, device), engram_rows_reference(*inputs.args))


@pytest.mark.parametrize(
    ("device", "num_rows"),
    [("cpu", 1), ("cpu", 33), pytest.param("cuda", 4096, marks=pytest.mark.gpu)],
)
def test_rows_kernel_on_released_constants(device: str, num_rows: int) -> None:
    inputs = released_hash(num_rows)
    windows = spaced(inputs.to(device).token_windows)
    got = engram._launch_rows(windows, *inputs.to(device).args[1:])
    assert same_bits(got, engram_rows_reference(*inputs.args))


@pytest.mark.parametrize("device", MODES)
def test_everything_older_than_a_start_is_pad(device: str) -> None:
    """A start, an id beyond the map and an id far outside int32 all block what is older."""
    inputs = small_hash(0, num_rows=6)
    start = torch.tensor(
        [
            [3, 4, -1, 5],
            [3, 4, -1, 9],
            [3, 4, 20, 5],
            [3, 4, 2**40, 5],
            [-(2**40), 4, 5, 6],
            [-1] * 4,
        ]
    )
    got = run_rows(replace(inputs, token_windows=start), device).cpu()
    assert all(torch.equal(got[0], row) for row in got[1:4])
    assert torch.equal(got[4], got[5])
    assert same_bits(got, rows_by_hand(replace(inputs, token_windows=start)))


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=seeds, data=st.data())
def test_tokens_do_not_depend_on_each_other(device: str, seed: int, data: st.DataObject) -> None:
    inputs = small_hash(seed)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, 8), max_size=40)), dtype=torch.int64)
    picked = replace(inputs, token_windows=inputs.token_windows[chosen])
    want = engram_rows_reference(*inputs.args)[chosen]
    assert same_bits(engram_rows_reference(*picked.args), want)
    assert same_bits(run_rows(picked, device), want)


def gather_by_hand(rows: Tensor, table: Tensor, scale: Tensor) -> Tensor:
    """Value by value from the definition of both bytes; 2^-127 scales reach BF16 subnormals."""
    out = torch.zeros(*rows.shape, table.shape[1], dtype=torch.bfloat16)
    for index in torch.cartesian_prod(*map(torch.arange, rows.shape)).tolist():
        row = int(rows[tuple(index)])
        if 0 <= row < len(table):
            codes = table[row].view(torch.float8_e4m3fn).double()
            power = torch.exp2(scale[row].double() - 127)
            power[scale[row] == 255] = torch.nan
            out[tuple(index)] = (codes * power.repeat_interleave(32)).bfloat16()
    return out.flatten(1)


@pytest.mark.parametrize("dim", [32, 96, 256])
def test_gather_reference_is_the_definition(dim: int) -> None:
    table, scale = random_table(50, dim)
    rows = torch.randint(-3, 53, (7, 5), generator=torch.Generator().manual_seed(dim))
    assert same_bits(engram_gather(rows, table, scale), gather_by_hand(rows, table, scale))


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("dim", [32, 96, 256])
def test_gather_kernel_equals_reference(device: str, dim: int) -> None:
    """All 256 codes at all 256 scales, rows in and out of the table, strided lookups."""
    table, scale = random_table(300, dim)
    if dim == 256:
        table[:256] = torch.arange(256).byte()
        scale[:256] = torch.arange(256).byte()[:, None]
    rows = torch.cat([torch.arange(-5, 305), torch.tensor([2**40, -(2**40)])]).view(26, 12)
    got = engram._launch_gather(spaced(rows.to(device)), table.to(device), scale.to(device))
    assert same_bits(got, engram_gather_reference(rows, table, scale))


@pytest.mark.parametrize("device", MODES)
def test_gather_reads_the_named_rows_only(device: str) -> None:
    """Table and scale rows lie apart between NaN bytes, so do those that no lookup names."""
    table, scale = random_table(20, 64)
    table[table % 128 == 127], scale[scale == 255] = 3, 127
    rows = torch.tensor([[3, 7, 3], [19, -1, 0]])
    want = engram_gather_reference(rows, table, scale)
    unnamed = torch.ones(20).bool()
    unnamed[rows[rows >= 0]] = False
    table[unnamed], scale[unnamed] = 0x7F, 255
    got = engram._launch_gather(rows.to(device), spaced(table.to(device)), spaced(scale.to(device)))
    assert same_bits(got, want)
    assert got.isfinite().all()
    assert not got[1, 64:128].any(), "a row outside the table reads as zeros"


@pytest.mark.parametrize("device", MODES)
@few
@given(data=st.data())
def test_lookups_do_not_depend_on_each_other(device: str, data: st.DataObject) -> None:
    table, scale = random_table(10, 64)
    rows = torch.randint(-1, 11, (6, 3), generator=torch.Generator().manual_seed(2))
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, 5), max_size=20)), dtype=torch.int64)
    want = engram_gather_reference(rows, table, scale)[chosen]
    assert same_bits(engram_gather_reference(rows[chosen], table, scale), want)
    args = rows[chosen].to(device), table.to(device), scale.to(device)
    assert same_bits(engram._launch_gather(*args), want)


@pytest.mark.parametrize("device", MODES)
def test_nothing_to_look_up(device: str) -> None:
    table, scale = (x.to(device) for x in random_table(10, 64))
    rows = torch.zeros(3, 2, dtype=torch.int64, device=device)
    assert engram._launch_gather(rows[:0], table, scale).shape == (0, 128)
    assert engram._launch_gather(rows[:, :0], table, scale).shape == (3, 0)
    assert not engram._launch_gather(rows, table[:0], scale[:0]).any()
    assert run_rows(small_hash(0, num_rows=0), device).shape == (0, 2, 9)


def test_a_cuda_tensor_among_the_arguments_dispatches_to_cuda() -> None:
    """Host tables and device rows: the dispatcher takes the key of highest priority."""
    key, keys = torch._C.DispatchKey, torch._C.DispatchKeySet
    mixed = keys(key.CPU) | keys(key.CUDA)
    assert mixed.highestPriorityTypeId() == key.CUDA


@pytest.mark.gpu
def test_pinned_host_table_equals_device_table() -> None:
    """Zero copy: the public op with rows on the device and the table in pinned host memory."""
    table, scale = bench_table(100_000, "pinned")
    rows = bench_lookups(512, 100_000, "cuda")
    rows[3, 3] = -1
    got = engram_gather(rows, table, scale)
    assert got.device.type == "cuda"
    assert same_bits(got, engram_gather_reference(rows.cpu(), table, scale))
    assert same_bits(got, engram_gather(rows, table.cuda(), scale.cuda()))
    assert same_bits(torch.compile(engram_gather, fullgraph=True)(rows, table, scale), got)
    with pytest.raises(ValueError, match="table expected cuda:0 or pinned host memory, got unpinn"):
        engram_gather(rows, table.clone(), scale)
    with pytest.raises(ValueError, match="scale expected cuda:0 or pinned host memory"):
        engram_gather(rows, table, scale.clone())


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 4096])
def test_gather_kernel_equals_reference_at_real_sizes(num_rows: int) -> None:
    table, scale = random_table(200_000, 256)
    rows = bench_lookups(num_rows, 200_000, "cpu")
    got = engram._launch_gather(rows.cuda(), table.cuda(), scale.cuda())
    assert same_bits(got, engram_gather_reference(rows, table, scale))


@pytest.mark.gpu
def test_gather_offsets_past_2_to_31() -> None:
    """The last rows of a table of 10 million rows start 2.5 GB into it."""
    count = 10_000_000
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of device memory")
    table = torch.empty(count, 256, dtype=torch.uint8, device="cuda")
    scale = torch.full((count, 8), 127, dtype=torch.uint8, device="cuda")
    codes, scales = random_table(6, 256)
    there = torch.tensor([0, 8_388_607, 8_388_608, 8_388_609, 9_000_000, count - 1])
    table[there.cuda()], scale[there.cuda()] = codes.cuda(), scales.cuda()
    got = engram._launch_gather(there.cuda().view(3, 2), table, scale)
    assert same_bits(got, engram_gather_reference(torch.arange(6).view(3, 2), codes, scales))


@pytest.mark.gpu
def test_inductor_and_cuda_graph_give_the_same_bits() -> None:
    table, scale = bench_table(5000, "pinned")
    inputs = released_hash(96).to("cuda")
    small = replace(inputs, primes=inputs.primes % 200 + 1, offsets=inputs.offsets % 4000)

    def look_up(windows: Tensor) -> Tensor:
        rows = engram_rows(windows, *small.args[1:])
        return engram_gather(rows[:, 1], table, scale)

    windows = small.token_windows
    want = look_up(windows)
    assert same_bits(torch.compile(look_up, fullgraph=True)(windows), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = look_up(windows)
    got.zero_()
    graph.replay()
    assert same_bits(got, want)


def test_public_functions_name_what_does_not_fit() -> None:
    table, scale = random_table(10, 64)
    rows, inputs = torch.zeros(3, 2, dtype=torch.int64), small_hash(0)
    with pytest.raises(ValueError, match=r"scale expected shape \(10, 2\), got \(10, 1\)"):
        engram_gather(rows, table, scale[:, 1:])
    with pytest.raises(ValueError, match="rows expected dtype int64, got int32"):
        engram_gather(rows.int(), table, scale)
    with pytest.raises(ValueError, match="scale expected channels of stride 1, got 2"):
        engram._launch_gather(rows, table, scale.repeat_interleave(2, dim=1)[:, ::2])
    with pytest.raises(ValueError, match=r"offsets expected shape \(2, 9\), got \(2, 8\)"):
        engram_rows(*replace(inputs, offsets=inputs.offsets[:, 1:]).args)
    with pytest.raises(ValueError, match="token_map expected dtype int64"):
        engram_rows(*replace(inputs, token_map=inputs.token_map.int()).args)


def test_launch_choices() -> None:
    rows = [engram._choose_rows_launch(count) for count in (1, 32, 33, 4096)]
    assert [(choice.block, choice.num_warps) for choice in rows] == [
        (8, 1),
        (8, 1),
        (32, 4),
        (32, 4),
    ]
    gather = [engram._choose_gather_launch(dim) for dim in (32, 96, 256, 8192)]
    assert [choice.block for choice in gather] == [128, 32, 16, 1]


def test_ops_are_registered_correctly() -> None:
    table, scale = bench_table(10, "cpu", dim=64)  # opcheck calls NaN different from NaN
    rows = torch.tensor([[1, 2], [-1, 9]])
    torch.library.opcheck(torch.ops.pcpkit.engram_gather.default, (rows, table, scale))
    torch.library.opcheck(torch.ops.pcpkit.engram_rows.default, small_hash(0).args)


def test_compiles_into_one_graph() -> None:
    inputs = small_hash(4)
    table, scale = random_table(10, 64)

    def look_up(windows: Tensor) -> Tensor:
        rows = engram_rows(windows, *inputs.args[1:])
        return engram_gather(rows[:, 0] % 10, table, scale)

    got = torch.compile(look_up, fullgraph=True, backend="aot_eager")(inputs.token_windows)
    assert same_bits(got, look_up(inputs.token_windows))
