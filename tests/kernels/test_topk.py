"""topk and its launcher: brute force, every path of the kernel, ties, hostile scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.kernels.topk import LaunchChoice, choose_launch, select, topk, topk_reference

from .bits import MODES, same_bits
from .inputs_indexer import draw_scores

seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.bfloat16, torch.float32])
# An interpreted launch takes tens of milliseconds.
few = settings(max_examples=25)


def best_by_hand(scores: Tensor, num_visible: Tensor, k: int) -> Tensor:
    """Sort (-score, position) pairs in Python."""
    out: list[list[int]] = []
    for row, count in zip(scores.tolist(), num_visible.tolist(), strict=True):
        seen = [(-s, i) for i, s in enumerate(row[: max(count, 0)])]
        ranked = sorted(pair for pair in seen if not math.isnan(pair[0]) and pair[0] < math.inf)
        best = sorted(position for _, position in ranked[:k])
        out.append(best + [-1] * (k - len(best)))
    return torch.tensor(out, dtype=torch.int32).view(len(out), k)


def draw_counts(num_rows: int, width: int, seed: int) -> Tensor:
    """Visible positions of every row; also none, all, and more than there are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, width + 3, (num_rows,), generator=generator).int()


def run(
    device: str, scores: Tensor, num_visible: Tensor, k: int, choice: LaunchChoice | None = None
) -> Tensor:
    """The kernel's selection: interpreted on the CPU, compiled on CUDA."""
    return select(scores.to(device), num_visible.to(device), k, choice).cpu()


def by_groups(k: int) -> LaunchChoice:
    """Select groups first, whatever the width."""
    return LaunchChoice(direct=False, num_groups=1 << (k - 1).bit_length(), num_warps=4)


@given(seed=seeds, dtype=dtypes, width=st.integers(1, 60), k=st.integers(1, 70))
def test_reference_is_the_sort(seed: int, dtype: torch.dtype, width: int, k: int) -> None:
    scores, counts = draw_scores(4, width, dtype, seed), draw_counts(4, width, seed)
    want = best_by_hand(scores, counts, k)
    assert same_bits(topk_reference(scores, counts, k), want)
    assert same_bits(topk(scores, counts, k), want)


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=seeds, dtype=dtypes, width=st.integers(1, 700), k=st.integers(1, 130))
def test_direct_selection_equals_reference(
    device: str, seed: int, dtype: torch.dtype, width: int, k: int
) -> None:
    scores, counts = draw_scores(4, width, dtype, seed), draw_counts(4, width, seed)
    assert choose_launch(width, k).direct
    assert same_bits(run(device, scores, counts, k), topk_reference(scores, counts, k))


@pytest.mark.parametrize("device", MODES)
@few
@given(seed=seeds, dtype=dtypes, width=st.integers(1, 700), k=st.integers(1, 130))
def test_selection_by_groups_equals_reference(
    device: str, seed: int, dtype: torch.dtype, width: int, k: int
) -> None:
    scores, counts = draw_scores(4, width, dtype, seed), draw_counts(4, width, seed)
    got = run(device, scores, counts, k, by_groups(k))
    assert same_bits(got, topk_reference(scores, counts, k))


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "k"), [(8192, 512), (9001, 512), (70000, 40)])
def test_wide_rows(device: str, dtype: torch.dtype, width: int, k: int) -> None:
    """Direct, by groups, and by groups of groups."""
    scores, counts = draw_scores(4, width, dtype, 5), torch.tensor([width, 4000, 600, 511]).int()
    assert same_bits(run(device, scores, counts, k), topk_reference(scores, counts, k))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "width", "k"),
    [(1, 131072, 512), (4096, 8192, 512), (1024, 32768, 512), (300, 131072, 512), (8192, 999, 512)],
)
def test_real_sizes(num_rows: int, width: int, k: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.randn(num_rows, width, generator=generator, device="cuda").relu_().bfloat16()
    counts = torch.arange(num_rows, device="cuda").mul_(width // num_rows).add_(1).int()
    assert same_bits(select(scores, counts, k), topk_reference(scores, counts, k))


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan")])
def test_a_row_of_one_value(device: str, value: float) -> None:
    """All tied: the first k, or nothing where nothing may be selected."""
    scores = torch.full((2, 300), value, dtype=torch.bfloat16)
    got = run(device, scores, torch.tensor([300, 5], dtype=torch.int32), 7)
    selectable = value > float("-inf")
    full, short = list(range(7)), [0, 1, 2, 3, 4, -1, -1]
    assert got.tolist() == ([full, short] if selectable else [[-1] * 7] * 2)


@pytest.mark.parametrize("device", MODES)
def test_both_zeros_tie(device: str) -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]])
    counts = torch.tensor([5], dtype=torch.int32)
    assert run(device, scores, counts, 2).tolist() == [[0, 1]]
    assert topk_reference(scores, counts, 2).tolist() == [[0, 1]]


@pytest.mark.parametrize("device", MODES)
def test_docstring_example(device: str) -> None:
    scores = torch.tensor([[2.0, 5.0, 5.0, 5.0]]).bfloat16()
    assert run(device, scores, torch.tensor([4], dtype=torch.int32), 2).tolist() == [[1, 2]]


@pytest.mark.parametrize("device", MODES)
@settings(max_examples=12)
@given(seed=seeds, data=st.data())
def test_rows_do_not_depend_on_each_other(device: str, seed: int, data: st.DataObject) -> None:
    scores, counts = draw_scores(6, 90, torch.bfloat16, seed), draw_counts(6, 90, seed)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, 5), max_size=8)), dtype=torch.int64)
    want = topk_reference(scores, counts, 9)[chosen]
    assert same_bits(topk_reference(scores[chosen], counts[chosen], 9), want)
    assert same_bits(run(device, scores[chosen], counts[chosen], 9), want)
    assert same_bits(run(device, scores[chosen], counts[chosen], 9, by_groups(9)), want)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("by", [None, by_groups(9)], ids=["direct", "groups"])
@pytest.mark.parametrize("width", [90, 96])
def test_nothing_outside_the_visible_scores_is_read(
    device: str, by: LaunchChoice | None, width: int
) -> None:
    """+inf around every row, also beyond the visible scores; rows with and without padding."""
    scores = draw_scores(5, width, torch.bfloat16, 3)
    counts = torch.tensor([width, 50, 8, 1, 0], dtype=torch.int32)
    want = topk_reference(scores, counts, 9)
    for padding in (0, 1, 38):
        buffer = torch.full((7, width + padding), float("inf"), dtype=torch.bfloat16)
        rows = buffer.to(device)[1:6, :width]
        rows.copy_(scores.masked_fill(torch.arange(width) >= counts[:, None], float("inf")))
        assert same_bits(select(rows, counts.to(device), 9, by).cpu(), want)
    columns = torch.empty(width, 5, dtype=torch.bfloat16, device=device).t()
    columns.copy_(scores)
    assert same_bits(select(columns, counts.to(device), 9, by).cpu(), want)


@pytest.mark.parametrize("device", MODES)
def test_empty(device: str) -> None:
    counts = torch.zeros(0, dtype=torch.int32)
    assert run(device, torch.empty(0, 7), counts, 3).shape == (0, 3)
    assert run(device, torch.empty(2, 0), torch.ones(2).int(), 3).tolist() == [[-1] * 3] * 2
    assert run(device, torch.empty(2, 4), torch.ones(2).int(), 0).shape == (2, 0)
    assert topk_reference(torch.empty(0, 7), counts, 3).shape == (0, 3)


@pytest.mark.gpu
def test_offsets_beyond_2_31() -> None:
    """The third row starts 2^31 elements, 4 GiB, after the first."""
    width, stride = 5000, 2**30
    buffer = torch.empty(2 * stride + width, dtype=torch.bfloat16, device="cuda")
    rows = buffer.as_strided((3, width), (stride, 1))
    scores = draw_scores(3, width, torch.bfloat16, 1)
    rows.copy_(scores)
    counts = torch.full((3,), width, dtype=torch.int32)
    want = topk_reference(scores, counts, 64)
    for choice in (None, by_groups(64)):
        assert same_bits(select(rows, counts.cuda(), 64, choice), want)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    scores = draw_scores(64, 20000, torch.bfloat16, 1).cuda()
    counts = draw_counts(64, 20000, 1).cuda()
    topk(scores, counts, 512)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = topk(scores, counts, 512)
    scores.copy_(draw_scores(64, 20000, torch.bfloat16, 2))
    graph.replay()
    assert same_bits(out, topk_reference(scores, counts, 512))


def test_launch_choice() -> None:
    """One program while a row is short for its k, groups beyond; never more than 32,768 scores."""
    assert choose_launch(8192, 512) == LaunchChoice(direct=True, num_groups=1024, num_warps=8)
    assert choose_launch(32768, 512) == LaunchChoice(direct=False, num_groups=512, num_warps=4)
    assert choose_launch(16384, 2048).direct
    assert not choose_launch(20000, 2048).direct
    for width in (1, 17, 4096, 50000, 131072, 10**6):
        for k in (1, 5, 512, 2048, 4096):
            choice = choose_launch(width, k)
            covered = choice.num_groups * 8
            assert covered <= 32768
            assert covered >= width if choice.direct else choice.num_groups >= k
    with pytest.raises(ValueError, match="k expected at most 4096 for rows of 40000 scores"):
        choose_launch(40000, 5000)


def test_wrong_arguments() -> None:
    counts = torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="scores expected dtype bfloat16 or float32"):
        topk(torch.zeros(2, 4, dtype=torch.float64), counts, 2)
    with pytest.raises(ValueError, match="num_visible expected shape"):
        topk(torch.zeros(3, 4), counts, 2)


def test_opcheck_and_compile() -> None:
    scores, counts = draw_scores(3, 40, torch.bfloat16, 0), draw_counts(3, 40, 0)
    torch.library.opcheck(torch.ops.pcpkit.topk.default, (scores, counts, 5))
    compiled = torch.compile(topk, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(scores, counts, 5), topk(scores, counts, 5))


@pytest.mark.gpu
def test_compile_on_device() -> None:
    scores, counts = draw_scores(8, 9000, torch.bfloat16, 0).cuda(), draw_counts(8, 9000, 0).cuda()
    compiled = torch.compile(topk, fullgraph=True)
    assert same_bits(compiled(scores, counts, 512), topk_reference(scores, counts, 512))
