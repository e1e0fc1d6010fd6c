"""Arguments of ``index_scores`` and ``topk``: paged index keys, scores with ties."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from pcpkit.formats import MXFP4

CHUNK = 65536
"""Rows that are quantized at a time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexInputs:
    """One call of ``index_scores``."""

    query_records: Tensor
    head_weights: Tensor
    key_cache: Tensor
    block_table: Tensor
    row_request: Tensor
    num_visible: Tensor
    max_visible: int
    candidates: Tensor | None = None
    candidate_block_size: int = 8

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Positional arguments of ``index_scores``."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def rows(self, chosen: Tensor) -> IndexInputs:
        """The same call with these query rows only, in this order."""
        names = ["query_records", "head_weights", "row_request", "num_visible"]
        if self.candidates is not None:
            names.append("candidates")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    def to(self, device: str) -> IndexInputs:
        """The same on another device; strides are not kept."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self, **{k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
        )


def _records(num_rows: int, dim: int, generator: torch.Generator, size: Tensor | None) -> Tensor:
    """``(num_rows, record_bytes)`` of random rows; ``size`` (dim,) scales the channels."""
    device = generator.device
    parts: list[Tensor] = []
    for start in range(0, num_rows, CHUNK):
        count = min(CHUNK, num_rows - start)
        rows = torch.randn(count, dim, generator=generator, device=device)
        # Rows of different sizes, so that scales differ between rows too.
        rows *= 0.25 + torch.rand(count, 1, generator=generator, device=device) * 4
        parts.append(MXFP4.encode((rows if size is None else rows * size).bfloat16()))
    return torch.cat(parts)


def draw_inputs(
    *,
    num_rows: int,
    num_heads: int = 4,
    dim: int = 64,
    num_reqs: int = 2,
    max_visible: int = 100,
    rows_per_page: int = 32,
    num_candidates: int = 0,
    spread: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> IndexInputs:
    """Random queries of ``num_reqs`` requests with permuted pages; rows in request order.

    Args:
        num_rows: query rows.
        num_heads: index heads.
        dim: channels.
        num_reqs: requests.
        max_visible: keys of a request; rows see any number of them.
        rows_per_page: keys a page.
        num_candidates: candidate entries a row, some -1 or out of range; 0 for none.
        spread: how many powers of two the groups of a row may lie apart, beyond what is random.
        seed: of everything.
        device: where.
    """
    generator = torch.Generator(device).manual_seed(seed)
    kw: dict[str, Any] = {"generator": generator, "device": device}
    blocks = -(-max_visible // rows_per_page)
    num_pages = num_reqs * blocks + 2
    size = None
    if spread:
        exponent = torch.randint(-spread, 1, (dim // 32,), **kw)
        size = torch.ldexp(torch.ones_like(exponent).float(), exponent).repeat_interleave(32)
    keys = _records(num_pages * rows_per_page, dim, generator, size)
    queries = _records(num_rows * num_heads, dim, generator, size)
    num_blocks = -(-max_visible // 8)
    candidates = None
    if num_candidates:
        candidates = torch.randint(-1, num_blocks + 2, (num_rows, num_candidates), **kw).int()
    return IndexInputs(
        query_records=queries.view(num_rows, num_heads, -1),
        head_weights=(torch.randn(num_rows, num_heads, **kw) / 64).bfloat16(),
        key_cache=keys.view(num_pages, rows_per_page, -1),
        block_table=torch.randperm(num_pages, **kw)[: num_reqs * blocks].int().view(num_reqs, -1),
        row_request=torch.randint(0, num_reqs, (num_rows,), **kw).sort().values.int(),
        num_visible=torch.randint(0, max_visible + 1, (num_rows,), **kw).int(),
        max_visible=max_visible,
        candidates=candidates,
    )


def bench_inputs(
    num_rows: int,
    num_keys: int,
    device: str,
    *,
    num_reqs: int = 1,
    num_candidates: int = 0,
) -> IndexInputs:
    """The released shapes (32 heads x 128): the last rows of ``num_reqs`` equal contexts."""
    given = draw_inputs(
        num_rows=num_rows,
        num_heads=32,
        dim=128,
        num_reqs=num_reqs,
        max_visible=num_keys,
        rows_per_page=64,
        num_candidates=num_candidates,
        device=device,
    )
    each = -(-num_rows // num_reqs)
    row = torch.arange(num_rows, device=device, dtype=torch.int32)
    return replace(
        given,
        row_request=row // each,
        num_visible=(num_keys - each + 1 + row % each).clamp(min=1).int(),
    )


def draw_scores(num_rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Scores ``(num_rows, width)`` with ties, both zeros, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (num_rows, width), generator=generator)

    kind = torch.randint(0, 4, (num_rows, 1), generator=generator)
    smooth = torch.randn(num_rows, width, generator=generator)
    rectified = smooth.clamp(min=0)
    few = draw(-2, 3).float() * 2.0**-130
    scores = torch.where(kind == 0, smooth, torch.where(kind == 1, rectified, few)).to(dtype)
    # The rows that are left hold every bit pattern.
    if dtype == torch.bfloat16:
        raw = draw(-(2**15), 2**15).short().view(dtype)
    else:
        raw = draw(-(2**31), 2**31).int().view(dtype)
    scores = torch.where(kind == 3, raw, scores)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0]).to(dtype)
    rare = torch.rand(num_rows, width, generator=generator) < 0.05
    return torch.where(rare, special[draw(0, 6)], scores)
