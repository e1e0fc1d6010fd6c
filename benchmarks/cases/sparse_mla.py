"""Sparse MLA: prefill of a chunk at the end of a context, decode of many requests.

Keys as in the peers' script: 512 compressed rows drawn uniformly for every query and its window of
128. The peers read BF16 rows or other records; the attention is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    sample_rows,
)
from benchmarks.inputs import Draw, short
from pcpkit.formats import RECORD_FORMATS
from pcpkit.kernels.sparse_mla import sparse_mla, sparse_mla_reference

WINDOW_PAGE = 32
PAGE = 64
BF16_LIMIT = 6e-3
"""Output, probabilities and their rescaling round at 2^-9 each; the peers' bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """One attention call; ``num_reqs`` is 1 (a chunk) or ``num_rows`` (decodes, same prefix)."""

    num_rows: int
    num_heads: int
    context: int
    record: str
    num_reqs: int = 1
    head_dim: int = 512
    num_selected: int = 512
    window: int = 128

    @property
    def label(self) -> str:
        kind = "prefill" if self.num_reqs == 1 else "decode"
        return f"{kind} T={self.num_rows} H={self.num_heads} NC={short(self.context)} {self.record}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Arguments of ``sparse_mla`` that have a row a query, and the others in order."""

    query: Tensor
    positions: Tensor
    row_request: Tensor
    window_floor: Tensor
    selection: Tensor
    window_cache: Tensor
    window_table: Tensor
    compressed_cache: Tensor
    table: Tensor
    sink: Tensor


def make_inputs(sizes: Sizes, device: str) -> Inputs:
    """The last ``num_rows`` positions of a context of ``context`` tokens at ratio 1.

    Of the window table only blocks that a window of these rows reaches are mapped; the older ones
    are retired (-1).
    """
    draw = Draw.on(device)
    rows, context = sizes.num_rows, sizes.context
    first = max(0, context - rows - sizes.window + 1) // WINDOW_PAGE * WINDOW_PAGE
    window_cache, window_pages = draw.paged(
        draw.latents(context - first, sizes.head_dim), "mxfp8", WINDOW_PAGE
    )
    compressed_cache, pages = draw.paged(draw.latents(context, sizes.head_dim), sizes.record, PAGE)
    window_table = window_pages.new_full((context // WINDOW_PAGE,), -1)
    window_table[first // WINDOW_PAGE :] = window_pages
    request = torch.arange(rows, device=device, dtype=torch.int32)
    if sizes.num_reqs == 1:
        request.zero_()
    return Inputs(
        query=draw.activations(rows, sizes.num_heads, sizes.head_dim),
        positions=torch.arange(context - rows, context, device=device),
        row_request=request,
        window_floor=window_pages.new_zeros(rows),
        selection=draw.selection(rows, context, sizes.num_selected),
        window_cache=window_cache,
        window_table=window_table.repeat(sizes.num_reqs, 1),
        compressed_cache=compressed_cache,
        table=pages.repeat(sizes.num_reqs, 1),
        sink=draw.normal(sizes.num_heads),
    )


def make(sizes: Sizes, device: str) -> Run:
    """Build one case."""
    given = make_inputs(sizes, device)
    scale = sizes.head_dim**-0.5
    constants = (given.sink, scale, sizes.window, sizes.record)
    out = torch.empty_like(given.query)

    def call() -> Tensor:
        return sparse_mla(
            given.query,
            given.positions,
            given.row_request,
            given.window_cache,
            given.window_table,
            given.window_floor,
            given.compressed_cache,
            given.table,
            given.selection,
            *constants,
            out=out,
        )

    def check(output: Output) -> str:
        rows = sample_rows(sizes.num_rows, 24, device)
        want = torch.empty_like(given.query[rows])
        sparse_mla_reference(
            given.query[rows],
            given.positions[rows],
            given.row_request[rows],
            given.window_cache,
            given.window_table,
            given.window_floor[rows],
            given.compressed_cache,
            given.table,
            given.selection[rows],
            *constants,
            want,
            want.new_empty(0, sizes.num_heads, dtype=torch.float32),
        )
        return require_close("out", one(output)[rows], want, BF16_LIMIT)

    slots = sizes.window + sizes.num_selected
    record_bytes = RECORD_FORMATS[sizes.record].record_bytes(sizes.head_dim)
    compressed_rows = min(sizes.context, sizes.num_rows * sizes.num_selected)
    window_rows = min(sizes.context, sizes.num_rows + sizes.window - 1)
    return Run(
        call=call,
        check=check,
        flops=4.0 * sizes.num_rows * sizes.num_heads * slots * sizes.head_dim,
        num_bytes=2.0 * given.query.nbytes
        + given.selection.nbytes
        + compressed_rows * record_bytes
        + window_rows * RECORD_FORMATS["mxfp8"].record_bytes(sizes.head_dim),
    )


# heads -> (target, bound, us recorded at 32k)
_PREFILL_TARGETS: dict[int, tuple[str, float, float | None]] = {
    64: ("<= 1.6x", 1.6, 668.0),
    32: ("< 1x", 1.0, 1301.0),
    16: ("< 1x", 1.0, None),
    8: ("<= 1x", 1.0, 713.0),
}
_CHAIN_RECORDED: dict[tuple[int, int], float] = {
    (64, 32768): 839.0,
    (64, 131072): 1280.0,
    (8, 32768): 885.0,
    (8, 131072): 1319.0,
}
_DECODE_RECORDED: dict[int, float] = {8: 20.0, 64: 41.0, 1024: 310.0}


def _flash_mla(heads: int, context: int) -> PeerRow:
    return PeerRow(
        section="prefill", name="FlashMLA sparse_prefill", shape=f"T=4096 H={heads} NC={context}"
    )


def prefill_peers(heads: int, context: int) -> tuple[Peer, ...]:
    """FlashMLA on the same heads, FlashMLA padded to 64 heads, and its chain with the gather."""
    target, bound, recorded = _PREFILL_TARGETS[heads]
    if context != 32768:
        target, bound, recorded = "", None, {64: 738.0, 8: 767.0}.get(heads)
    peers = [
        Peer(
            name=f"FlashMLA H={heads}, BF16 rows",
            row=_flash_mla(heads, context),
            recorded_us=recorded,
            target=target,
            max_ratio=bound,
        )
    ]
    if heads != 64:
        peers.append(
            Peer(
                name="FlashMLA padded to H=64",
                row=_flash_mla(64, context),
                recorded_us=668.0 if context == 32768 else 738.0,
            )
        )
    if (heads, context) in _CHAIN_RECORDED:
        peers.append(
            Peer(
                name="vLLM gather + FlashMLA 528B",
                row=PeerRow(
                    section="chain",
                    name="vLLM gather+combine+FlashMLA 528B",
                    shape=f"T=4096 H={heads} NC={context}",
                ),
                recorded_us=_CHAIN_RECORDED[heads, context],
            )
        )
    return tuple(peers)


def decode_peers(rows: int, *, target: bool) -> tuple[Peer, ...]:
    """FlashMLA's FP8 decode kernel over its own 584-byte record."""
    peer = Peer(
        name="FlashMLA FP8 decode 584B",
        row=PeerRow(
            section="decode", name="FlashMLA sparse_decode_fwd", shape=f"T={rows} H=64 NC=32768"
        ),
        recorded_us=_DECODE_RECORDED[rows],
        target="<= 1.5x" if target else "",
        max_ratio=1.5 if target else None,
    )
    return (peer,)


def _case(sizes: Sizes, peers: tuple[Peer, ...] = (), *, quick: bool = False) -> BenchCase:
    return BenchCase(
        op="sparse_mla", shape=sizes.label, make=partial(make, sizes), peers=peers, quick=quick
    )


def cases(tiny: bool = False) -> list[BenchCase]:
    """Prefill of 4,096 rows by heads, record and context; decodes."""
    if tiny:
        small = {"num_heads": 2, "context": 128, "head_dim": 64, "num_selected": 16, "window": 32}
        return [
            _case(Sizes(num_rows=8, record="nvfp4", **small)),
            _case(Sizes(num_rows=4, record="mxfp8", num_reqs=4, **small)),
        ]
    found: list[BenchCase] = []
    for record in ("nvfp4", "mxfp8"):
        for heads in (64, 32, 16, 8):
            sizes = Sizes(num_rows=4096, num_heads=heads, context=32768, record=record)
            found.append(_case(sizes, prefill_peers(heads, 32768), quick=record == "nvfp4"))
    for heads in (64, 8):
        sizes = Sizes(num_rows=4096, num_heads=heads, context=131072, record="nvfp4")
        found.append(_case(sizes, prefill_peers(heads, 131072)))
    for rows in (8, 64, 1024):
        sizes = Sizes(num_rows=rows, num_heads=64, context=32768, record="nvfp4", num_reqs=rows)
        found.append(_case(sizes, decode_peers(rows, target=True), quick=True))
    chunk = Sizes(num_rows=1024, num_heads=64, context=32768, record="nvfp4")
    found.append(_case(chunk, decode_peers(1024, target=False)))
    return found
