"""candidate_blocks: brute force, kernel against reference, the pinned block, ties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcpkit.kernels import indexer as module
from pcpkit.kernels.indexer import candidate_blocks, candidate_blocks_reference

from .bits import MODES, same_bits
from .inputs_indexer import draw_scores

few = settings(max_examples=20)
calls = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "width": st.integers(1, 200),
        "block_size": st.sampled_from([1, 2, 4, 8, 12]),
        "count": st.integers(1, 40),
    }
)


def draw(seed: int, width: int, num_rows: int = 4) -> tuple[Tensor, Tensor]:
    """Scores that are -inf where they are not visible, and the visible counts."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, width + 1, (num_rows,), generator=generator).int()
    scores = draw_scores(num_rows, width, torch.bfloat16, seed)
    return scores.masked_fill(torch.arange(width) >= counts[:, None], float("-inf")), counts


def blocks_by_hand(scores: Tensor, counts: Tensor, block_size: int, count: int) -> Tensor:
    """Sort (-score, block) pairs in Python."""
    out: list[list[int]] = []
    num_blocks = -(-scores.shape[1] // block_size)
    for row, visible in zip(scores.tolist(), counts.tolist(), strict=True):
        clean = [-math.inf if math.isnan(s) else s for s in row]
        best = [max(clean[b * block_size : (b + 1) * block_size]) for b in range(num_blocks)]
        if visible:
            best[(visible - 1) // block_size] = math.inf
        ranked = sorted((-s, block) for block, s in enumerate(best) if s > -math.inf)
        kept = sorted(block for _, block in ranked[:count])
        out.append(kept + [-1] * (min(count, num_blocks) - len(kept)))
    return torch.tensor(out, dtype=torch.int32)


def run(device: str, scores: Tensor, counts: Tensor, block_size: int, count: int) -> Tensor:
    """The kernel's blocks: interpreted on the CPU, compiled on CUDA."""
    return module._launch_candidates(scores.to(device), counts.to(device), block_size, count).cpu()


@given(call=calls)
def test_reference_is_the_sort(call: dict[str, Any]) -> None:
    scores, counts = draw(call["seed"], call["width"])
    want = blocks_by_hand(scores, counts, call["block_size"], call["count"])
    got = candidate_blocks(scores, counts, call["block_size"], call["count"])
    assert same_bits(got, want)


@pytest.mark.parametrize("device", MODES)
@few
@given(call=calls)
def test_kernel_equals_reference(device: str, call: dict[str, Any]) -> None:
    scores, counts = draw(call["seed"], call["width"])
    want = candidate_blocks_reference(scores, counts, call["block_size"], call["count"])
    assert same_bits(run(device, scores, counts, call["block_size"], call["count"]), want)


@pytest.mark.parametrize("device", MODES)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), data=st.data())
def test_rows_do_not_depend_on_each_other(device: str, seed: int, data: st.DataObject) -> None:
    scores, counts = draw(seed, 70, 6)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, 5), max_size=8)), dtype=torch.int64)
    want = candidate_blocks_reference(scores, counts, 4, 5)[chosen]
    assert same_bits(candidate_blocks_reference(scores[chosen], counts[chosen], 4, 5), want)
    assert same_bits(run(device, scores[chosen], counts[chosen], 4, 5), want)


@pytest.mark.parametrize("device", MODES)
def test_docstring_example(device: str) -> None:
    scores = torch.tensor([[1.0, 0.0, 3.0, 2.0, 0.0]]).bfloat16()
    assert run(device, scores, torch.tensor([5]).int(), 2, 2).tolist() == [[1, 2]]


@pytest.mark.parametrize("device", MODES)
def test_ties_go_to_the_lower_block(device: str) -> None:
    scores = torch.zeros(1, 40).bfloat16()
    assert run(device, scores, torch.tensor([40]).int(), 8, 3).tolist() == [[0, 1, 4]]


@pytest.mark.parametrize("device", MODES)
def test_padded_rows_are_not_read(device: str) -> None:
    """+inf behind every row."""
    scores, counts = draw(3, 90)
    buffer = torch.full((4, 128), float("inf"), dtype=torch.bfloat16).to(device)
    rows = buffer[:, :90]
    rows.copy_(scores)
    got = module._launch_candidates(rows, counts.to(device), 8, 6).cpu()
    assert same_bits(got, candidate_blocks_reference(scores, counts, 8, 6))


@pytest.mark.parametrize("device", MODES)
def test_empty(device: str) -> None:
    none = torch.zeros(0, dtype=torch.int32)
    assert run(device, torch.empty(0, 9).bfloat16(), none, 4, 2).shape == (0, 2)
    assert run(device, torch.empty(2, 0).bfloat16(), torch.zeros(2).int(), 4, 2).shape == (2, 0)


def test_opcheck_and_compile() -> None:
    scores, counts = draw(0, 50)
    torch.library.opcheck(torch.ops.pcpkit.candidate_blocks.default, (scores, counts, 8, 3))
    compiled = torch.compile(candidate_blocks, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(scores, counts, 8, 3), candidate_blocks(scores, counts, 8, 3))


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "width"), [(1024, 32768), (64, 131072)])
def test_real_sizes(num_rows: int, width: int) -> None:
    """2,048 blocks of 8 of up to 16,384."""
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.randn(num_rows, width, generator=generator, device="cuda").relu_().bfloat16()
    counts = torch.arange(num_rows, device="cuda").mul_(width // num_rows).add_(1).int()
    position = torch.arange(width, device="cuda")
    scores.masked_fill_(position >= counts[:, None], float("-inf"))
    want = candidate_blocks_reference(scores, counts, 8, 2048)
    assert same_bits(candidate_blocks(scores, counts, 8, 2048), want)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    scores, counts = (x.cuda() for x in draw(1, 9000))
    candidate_blocks(scores, counts, 8, 300)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = candidate_blocks(scores, counts, 8, 300)
    changed, _ = draw(2, 9000)
    scores.copy_(changed)
    graph.replay()
    assert same_bits(out, candidate_blocks_reference(scores, counts, 8, 300))
