"""Arguments of ``sparse_mla``: paged caches of random latents, permuted blocks, any rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pcpkit.formats import RECORD_FORMATS

Arguments = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int, str
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionInputs:
    """One call of ``sparse_mla``."""

    query: Tensor
    positions: Tensor
    row_request: Tensor
    window_cache: Tensor
    window_block_table: Tensor
    window_floor: Tensor
    compressed_cache: Tensor
    block_table: Tensor
    selection: Tensor
    sink: Tensor
    window_size: int
    compressed_record: str

    @property
    def arguments(self) -> Arguments:
        """Positional arguments of ``sparse_mla``."""
        return (
            self.query,
            self.positions,
            self.row_request,
            self.window_cache,
            self.window_block_table,
            self.window_floor,
            self.compressed_cache,
            self.block_table,
            self.selection,
            self.sink,
            self.query.shape[2] ** -0.5,
            self.window_size,
            self.compressed_record,
        )

    def rows(self, chosen: Tensor) -> AttentionInputs:
        """The same call with these query rows only, in this order."""
        names = ("query", "positions", "row_request", "window_floor", "selection")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})


def draw_inputs(
    *,
    num_rows: int,
    num_heads: int = 8,
    head_dim: int = 64,
    window_size: int = 16,
    num_selected: int = 12,
    num_reqs: int = 2,
    length: int = 96,
    record: str = "nvfp4",
    seed: int = 0,
    device: str = "cpu",
    tail: int | None = None,
) -> AttentionInputs:
    """Random queries of ``num_reqs`` requests of ``length`` positions.

    Positions are anywhere, selections random with -1 entries, blocks permuted. With ``tail`` the
    queries are the last ``tail`` positions of each request and older window blocks are retired, as
    in a prefill.
    """
    generator = torch.Generator(device).manual_seed(seed)
    kw: dict[str, Any] = {"generator": generator, "device": device}
    window_page, page = 32, 64

    def pages(kind: str, rows_per_page: int) -> tuple[Tensor, Tensor]:
        blocks = -(-length // rows_per_page)
        count = num_reqs * blocks
        chunks = [
            RECORD_FORMATS[kind].encode(torch.randn(min(65536, rest), head_dim, **kw).bfloat16())
            for rest in range(count * rows_per_page, 0, -65536)
        ]
        table = torch.randperm(count, **kw).int().view(num_reqs, blocks)
        return torch.cat(chunks).view(count, rows_per_page, -1), table

    window_cache, window_table = pages("mxfp8", window_page)
    cache, table = pages(record, page)
    if tail is None:
        positions = torch.randint(0, length, (num_rows,), **kw)
        request = torch.randint(0, num_reqs, (num_rows,), **kw).int()
        selection = torch.randint(-1, length, (num_rows, num_selected), **kw).int()
        floor = torch.randint(-1, length // 2, (num_rows,), **kw).int()
    else:
        positions = torch.arange(length - tail, length, device=device).repeat(num_reqs)
        request = torch.arange(num_reqs, device=device).repeat_interleave(tail).int()
        first = torch.randint(0, length, (num_reqs * tail, 1), **kw)
        scattered = torch.randperm(length, **kw)[:num_selected]
        selection = ((scattered + first) % length).sort(1).values.int()
        floor = torch.zeros(num_reqs * tail, dtype=torch.int32, device=device)
        window_table[:, : max(0, length - tail - window_size + 1) // window_page] = -1
    num_rows = positions.shape[0]
    return AttentionInputs(
        query=torch.randn(num_rows, num_heads, head_dim, **kw).bfloat16(),
        positions=positions,
        row_request=request,
        window_cache=window_cache,
        window_block_table=window_table,
        window_floor=floor,
        compressed_cache=cache,
        block_table=table,
        selection=selection,
        sink=torch.randn(num_heads, **kw),
        window_size=window_size,
        compressed_record=record,
    )
