"""Index scores of a chunk at the end of a context over paged 68-byte keys; candidate blocks."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.case import (
    BenchCase,
    Output,
    Peer,
    PeerRow,
    Run,
    one,
    require_close,
    require_equal,
    sample_rows,
)
from benchmarks.inputs import Draw, short
from pcpkit.formats import MXFP4
from pcpkit.kernels.indexer import (
    candidate_blocks,
    candidate_blocks_reference,
    index_scores,
    index_scores_reference,
)

PAGE = 64
BLOCK = 8
SCORE_LIMIT = 2e-3
"""A dot product whose FP32 sum rounds to the other BF16 moves a term by 2^-8; few do."""


def _deep_gemm(num_rows: int, num_keys: int, recorded_us: float) -> Peer:
    target = num_keys == 32768
    return Peer(
        name="DeepGEMM FP8 logits (by rate)",
        row=PeerRow(
            section="indexer",
            name="DeepGEMM fp8_fp4_mqa_logits",
            shape=f"T={num_rows} S={num_keys}",
        ),
        recorded_us=recorded_us,
        # It scores every key, also those that a causal row does not see.
        recorded_tflops=2.0 * num_rows * num_keys * 32 * 128 / recorded_us / 1e6,
        target=">= 0.5x rate" if target else "",
        max_ratio=2.0 if target else None,
        by_rate=True,
    )


def causal_counts(num_rows: int, num_keys: int, device: str) -> Tensor:
    """``num_visible`` of the last rows of a context with as many keys as tokens."""
    return torch.arange(num_keys - num_rows + 1, num_keys + 1, device=device, dtype=torch.int32)


def random_candidates(draw: Draw, num_rows: int, num_blocks: int, count: int) -> Tensor:
    """``(num_rows, count)`` int32 block ids ascending, the newest block among them."""
    blocks = draw.selection(num_rows, num_blocks - 1, count)
    blocks[:, -1] = num_blocks - 1
    return blocks


def make_scores(
    num_rows: int, num_keys: int, num_heads: int, num_candidates: int, device: str
) -> Run:
    """Build a case of ``index_scores``; ``num_candidates`` blocks a row, or 0 for all keys."""
    draw = Draw.on(device)
    key_cache, pages = draw.paged(draw.latents(num_keys, 128), "mxfp4", PAGE)
    query = MXFP4.encode(draw.latents(num_rows * num_heads, 128)).unflatten(0, (num_rows, -1))
    weights = draw.normal(num_rows, num_heads).bfloat16() / 64
    request = pages.new_zeros(num_rows)
    visible = causal_counts(num_rows, num_keys, device)
    table = pages[None]
    candidates = None
    if num_candidates:
        candidates = random_candidates(draw, num_rows, num_keys // BLOCK, num_candidates)

    def call() -> Tensor:
        return index_scores(
            query, weights, key_cache, table, request, visible, num_keys, candidates, BLOCK
        )

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 12, device)
        want = index_scores_reference(
            query[rows],
            weights[rows],
            key_cache,
            table,
            request[rows],
            visible[rows],
            num_keys,
            None if candidates is None else candidates[rows],
            BLOCK,
        )
        return require_close("scores", one(output)[rows], want, SCORE_LIMIT)

    scored = float(visible.sum()) if candidates is None else float(candidates.numel() * BLOCK)
    return Run(
        call=call,
        check=check,
        flops=2.0 * scored * num_heads * 128,
        num_bytes=query.nbytes + weights.nbytes + 68.0 * num_keys + 2.0 * num_rows * num_keys,
    )


def make_blocks(num_rows: int, num_keys: int, count: int, device: str) -> Run:
    """Build a case of ``candidate_blocks``."""
    scores = Draw.on(device).normal(num_rows, num_keys).bfloat16()
    visible = causal_counts(num_rows, num_keys, device)
    scores.masked_fill_(torch.arange(num_keys, device=device) >= visible[:, None], float("-inf"))

    def call() -> Tensor:
        return candidate_blocks(scores, visible, BLOCK, count)

    def check(output: Output) -> str:
        rows = sample_rows(num_rows, 64, device)
        want = candidate_blocks_reference(scores[rows], visible[rows], BLOCK, count)
        return require_equal("blocks", one(output)[rows], want)

    def torch_blocks() -> object:
        return scores.unflatten(1, (-1, BLOCK)).amax(-1).topk(count, dim=1)

    num_bytes = scores.nbytes + 4.0 * num_rows * count
    return Run(
        call=call,
        check=check,
        flops=0.0,
        num_bytes=num_bytes,
        peers={"torch amax + topk": lambda: torch_blocks},
    )


def cases(tiny: bool = False) -> list[BenchCase]:
    """All keys and candidates only, at 8k and 32k; selection of candidate blocks."""
    if tiny:
        return [
            _scores(16, 64, 2, 0, ()),
            _scores(16, 64, 2, 4, ()),
            _blocks(16, 64, 4),
        ]
    return [
        _scores(4096, 8192, 32, 0, (_deep_gemm(4096, 8192, 300.0),)),
        _scores(4096, 32768, 32, 0, (_deep_gemm(4096, 32768, 1155.0),), quick=True),
        _scores(4096, 32768, 32, 2048, ()),
        _blocks(4096, 32768, 2048),
    ]


def _scores(
    num_rows: int,
    num_keys: int,
    num_heads: int,
    num_candidates: int,
    peers: tuple[Peer, ...],
    *,
    quick: bool = False,
) -> BenchCase:
    name = f"index_scores T={num_rows} S={short(num_keys)} H={num_heads}"
    return BenchCase(
        op="indexer",
        shape=name + (f" in {num_candidates} blocks" if num_candidates else ""),
        make=partial(make_scores, num_rows, num_keys, num_heads, num_candidates),
        peers=peers,
        quick=quick,
    )


def _blocks(num_rows: int, num_keys: int, count: int) -> BenchCase:
    return BenchCase(
        op="indexer",
        shape=f"candidate_blocks T={num_rows} S={short(num_keys)} k={count}",
        make=partial(make_blocks, num_rows, num_keys, count),
        peers=(Peer(name="torch amax + topk"),),
    )
