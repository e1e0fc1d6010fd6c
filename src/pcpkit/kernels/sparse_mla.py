"""Sparse multi-query latent attention over the window and the selected compressed rows, with sink.

Keys equal values: the dequantized cache record of a position. A query row at position ``P`` attends
to the window positions ``max(P - window + 1, floor) .. P`` of its own layer and to the selected
compressed positions of the source layer; a token present in both counts twice (model-spec 3.7):

    ``s_i = (q . kv_i) * scale``; ``M = max(-1e30, max_i s_i)``; ``e_i = exp(s_i - M)``
    ``out = BF16((sum_i BF16(e_i) kv_i) / (sum_i e_i + exp(sink - M)))``

Scores, sums and the division are FP32. Slot order: window oldest to newest, then compressed
positions as listed. Entries of -1, unmapped pages and positions before the floor are skipped; a row
with no valid slot gives zeros.

On CUDA two phases run: ``sparse_mla_rows`` dequantizes the rows that are read into a BF16
workspace, then one program a query and head block walks its slots in tiles with an online softmax,
each row serving as key and as value. ``BF16(e_i)`` is then relative to the running maximum. The
tiles are the same for every number of queries, so a row's bits do not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.formats import RECORD_FORMATS
from pcpkit.kernels import _reference as wide
from pcpkit.kernels import sparse_mla_hopper as hopper
from pcpkit.kernels._jit import INTERPRETED, dot
from pcpkit.kernels._ops import check_dtype, check_shape, register_op
from pcpkit.kernels.sparse_mla_decode import attend_few
from pcpkit.kernels.sparse_mla_rows import collect_rows

FEW_ROWS = 16
"""Up to this many query rows of 64 heads take the route of ``sparse_mla_decode``."""

_ELEMENTS = 1 << 23
"""Key elements the reference holds at a time."""


def sparse_mla(
    query: Tensor,
    positions: Tensor,
    row_request: Tensor,
    window_cache: Tensor,
    window_block_table: Tensor,
    window_floor: Tensor,
    compressed_cache: Tensor,
    block_table: Tensor,
    selection: Tensor,
    sink: Tensor,
    softmax_scale: float,
    window_size: int,
    compressed_record: str,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of rotated queries over the paged quantized caches.

    Args:
        query: ``(num_rows, num_heads, head_dim)`` bf16.
        positions: ``(num_rows,)`` int64.
        row_request: ``(num_rows,)`` int32, block-table row of each query row.
        window_cache: ``(num_window_blocks, window_block_size, record_bytes)`` uint8, MXFP8 records.
        window_block_table: ``(num_reqs, max_window_blocks)`` int32, -1 = retired or never mapped.
        window_floor: ``(num_rows,)`` int32, lowest window position the row may read.
        compressed_cache: ``(num_blocks, rows_per_page, record_bytes)`` uint8.
        block_table: ``(num_reqs, max_blocks)`` int32, page of each ``rows_per_page`` positions.
        selection: ``(num_rows, num_selected)`` int32 compressed positions, -1 = none; may have
            width 0 (window-only layers).
        sink: ``(num_heads,)`` fp32 logit that takes probability and contributes no value.
        softmax_scale: factor of the scores.
        window_size: positions a window, the query's own included.
        compressed_record: ``"nvfp4"`` or ``"mxfp8"``.
        out: ``(num_rows, num_heads, head_dim)`` bf16, contiguous; written and returned if given.
        lse: ``(num_rows, num_heads)`` fp32; if given, filled with ``log sum_i exp(s_i)``, natural
            and without the sink, -inf for a row without a valid slot.

    Returns:
        ``(num_rows, num_heads, head_dim)`` bf16, before the inverse RoPE.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    num_rows, num_heads, head_dim = query.shape
    check_dtype("query", query, torch.bfloat16)
    check_shape("positions", positions, num_rows, remedy="one position a query row")
    check_shape("selection", selection, num_rows, None, remedy="one selection a query row")
    check_shape("sink", sink, num_heads, remedy="pass the sinks of this rank's heads")
    for name, cache, record in (
        ("window_cache", window_cache, "mxfp8"),
        ("compressed_cache", compressed_cache, compressed_record),
    ):
        size = RECORD_FORMATS[record].record_bytes(head_dim)
        check_shape(name, cache, None, None, size, remedy=f"store {record} records")
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if lse is None:
        lse = query.new_empty(0, num_heads, dtype=torch.float32)
    check_shape("out", out, *query.shape, remedy="pass a tensor like query")
    _sparse_mla_op(
        query,
        positions,
        row_request,
        window_cache,
        window_block_table,
        window_floor,
        compressed_cache,
        block_table,
        selection,
        sink,
        softmax_scale,
        window_size,
        compressed_record,
        out,
        lse,
    )
    return out


def sparse_mla_reference(
    query: Tensor,
    positions: Tensor,
    row_request: Tensor,
    window_cache: Tensor,
    window_block_table: Tensor,
    window_floor: Tensor,
    compressed_cache: Tensor,
    block_table: Tensor,
    selection: Tensor,
    sink: Tensor,
    softmax_scale: float,
    window_size: int,
    compressed_record: str,
    out: Tensor,
    lse: Tensor,
) -> None:
    """The specification of :func:`sparse_mla`, a few rows at a time; ``lse`` may have 0 rows."""
    offsets = torch.arange(1 - window_size, 1, device=query.device)
    step = max(1, _ELEMENTS // ((window_size + selection.shape[1]) * query.shape[2]))
    for part in torch.arange(query.shape[0], device=query.device).split(step):
        window = positions[part, None] + offsets
        window = window.masked_fill(window < window_floor[part, None].clamp(min=0), -1)
        keys, valid = _read("mxfp8", window_cache, window_block_table, row_request[part], window)
        if selection.shape[1]:
            more, more_valid = _read(
                compressed_record,
                compressed_cache,
                block_table,
                row_request[part],
                selection[part].long(),
            )
            keys = torch.cat([keys, more], dim=1)
            valid = torch.cat([valid, more_valid], dim=1)
        out[part], norm = _attend(query[part], keys, valid, sink, softmax_scale)
        if lse.shape[0]:
            lse[part] = norm


def _read(
    record: str, cache: Tensor, block_table: Tensor, request: Tensor, where: Tensor
) -> tuple[Tensor, Tensor]:
    """Dequantized rows ``(rows, slots, dim)`` bf16 of positions ``where`` and their validity."""
    rows_per_page = cache.shape[1]
    block = where.clamp(min=0) // rows_per_page
    inside = (where >= 0) & (block < block_table.shape[1])
    page = block_table[request.long()[:, None], block.clamp(max=block_table.shape[1] - 1)].long()
    valid = inside & (page >= 0)
    if cache.shape[0] == 0:
        raise ValueError("compressed_cache expected pages for a non-empty selection, got none")
    records = cache[page.clamp(min=0), where.clamp(min=0) % rows_per_page]
    keys = RECORD_FORMATS[record].decode(records)
    return torch.where(valid[..., None], keys, torch.zeros_like(keys)), valid


def _attend(
    query: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax with sink over the valid slots: ``(rows, heads, dim)`` bf16 and the LSE."""
    dense = keys.double()
    scores = (query.double() @ dense.transpose(1, 2)).float() * scale
    scores = scores.masked_fill(~valid[:, None], float("-inf"))
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = wide.exp(scores - top)
    total = weights.double().sum(-1, keepdim=True).float()
    value = (weights.bfloat16().double() @ dense).float()
    lse = (top.double() + total.double().log()).float()[..., 0]
    return (value / (total + wide.exp(sink[:, None] - top))).bfloat16(), lse


@triton.jit
def weight_sum(weight):
    """Sum over slots of weights in [0, 1], exact in units of 2^-23: the order cannot matter."""
    units = (weight + 1.0).to(tl.int32, bitcast=True) - 0x3F800000
    return tl.sum(units, 1).to(tl.float32) * 1.1920928955078125e-07


@triton.jit
def _attend_kernel(
    query_ptr,
    rows_ptr,
    index_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    num_heads,
    num_slots,
    stride_query_row,
    stride_query_head,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """One program owns one query row and ``HEADS`` heads and walks its slots in tiles."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, DIM)
    own = head < num_heads
    query_at = query_ptr + row * stride_query_row + head[:, None] * stride_query_head
    query = tl.load(query_at + dim[None, :], mask=own[:, None], other=0.0)
    # Scores live in units of log2, so that every exponential is an exp2.
    log2e: tl.constexpr = 1.4426950408889634
    scale_log2 = scale * log2e
    top = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, DIM], tl.float32)
    for start in range(0, num_slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        entry = tl.load(index_ptr + row * num_slots + slot, mask=slot < num_slots, other=-1)
        valid = entry >= 0
        # A skipped slot must hold zeros: its probability is 0, and 0 * NaN would still be NaN.
        key_at = rows_ptr + entry.to(tl.int64)[:, None] * DIM + dim[None, :]
        keys = tl.load(key_at, mask=valid[:, None], other=0.0)
        scores = dot(query, tl.trans(keys), tl.zeros([HEADS, SLOTS], tl.float32)) * scale_log2
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        decay = tl.exp2(top - new_top)
        weight = tl.exp2(scores - new_top[:, None])
        total = total * decay + weight_sum(weight)
        acc = dot(weight.to(tl.bfloat16), keys, acc * decay[:, None])
        top = new_top
    sink = tl.load(sink_ptr + head, mask=own, other=0.0)
    denominator = total + tl.exp2(sink * log2e - top)
    out = (acc / denominator[:, None]).to(tl.bfloat16)
    out_at = out_ptr + (row * num_heads + head[:, None]) * DIM + dim[None, :]
    tl.store(out_at, out, mask=own[:, None])
    if STORE_LSE:
        lse = top / log2e + tl.log(total)
        tl.store(lse_ptr + row * num_heads + head, lse, mask=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """Launch of the attention kernel; a function of the number of heads alone."""

    heads: int
    slots: int
    num_warps: int
    num_stages: int
    gluon: bool = False


def choose_launch(num_heads: int, head_dim: int, hopper_gpu: bool) -> LaunchChoice:
    """Tiles of the attention kernel.

    The number of query rows must not enter: other tiles would round a row differently.
    """
    if hopper_gpu and (num_heads, head_dim) == (hopper.HEADS, 512):
        return LaunchChoice(
            heads=hopper.HEADS,
            slots=hopper.SLOTS,
            num_warps=hopper.NUM_WARPS,
            num_stages=1,
            gluon=True,
        )
    if num_heads <= 16 or head_dim <= 256:
        return LaunchChoice(heads=16, slots=64, num_warps=4, num_stages=2)
    return LaunchChoice(heads=32, slots=64, num_warps=4, num_stages=2)


def _launch(
    query: Tensor,
    positions: Tensor,
    row_request: Tensor,
    window_cache: Tensor,
    window_block_table: Tensor,
    window_floor: Tensor,
    compressed_cache: Tensor,
    block_table: Tensor,
    selection: Tensor,
    sink: Tensor,
    softmax_scale: float,
    window_size: int,
    compressed_record: str,
    out: Tensor,
    lse: Tensor,
) -> None:
    num_rows, num_heads, head_dim = query.shape
    if num_rows == 0:
        return
    choice = choose_launch(num_heads, head_dim, _is_hopper(query))
    caches = (
        positions,
        row_request,
        window_cache,
        window_block_table,
        window_floor,
        compressed_cache,
        block_table,
        selection,
    )
    if num_rows <= FEW_ROWS and choice.gluon and window_size % choice.slots == 0:
        attend_few(
            query,
            *caches,
            sink,
            softmax_scale,
            window_size,
            compressed_record,
            out,
            lse,
            heads=choice.heads,
            slots=choice.slots,
        )
        return
    rows, index = collect_rows(*caches, window_size, compressed_record, query)
    attend_rows(query, rows, index, sink, softmax_scale, out, lse, choice)


def attend_rows(
    query: Tensor,
    rows: Tensor,
    row_index: Tensor,
    sink: Tensor,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    choice: LaunchChoice | None = None,
) -> None:
    """Second phase on its own: attention over indexed BF16 rows; writes ``out`` (and ``lse``).

    Args:
        query: ``(num_rows, num_heads, head_dim)`` bf16, channels contiguous.
        rows: ``(num_workspace_rows, head_dim)`` bf16, contiguous.
        row_index: ``(num_rows, num_slots)`` int32, -1 = skip.
        sink: ``(num_heads,)`` fp32.
        softmax_scale: factor of the scores.
        out: ``(num_rows, num_heads, head_dim)`` bf16, contiguous, mutated.
        lse: ``(num_rows, num_heads)`` fp32, mutated, or 0 rows for none.
        choice: launch to use instead of :func:`choose_launch` (benchmarks).
    """
    num_rows, num_heads, head_dim = query.shape
    choice = choice or choose_launch(num_heads, head_dim, _is_hopper(query))
    arguments = (query.stride(0), query.stride(1), softmax_scale)
    sizes = {
        "HEADS": choice.heads,
        "DIM": head_dim,
        "SLOTS": choice.slots,
        "STORE_LSE": lse.shape[0] > 0,
    }
    tensors = (query, rows, row_index, sink, out, lse)
    num_slots = row_index.shape[1]
    if choice.gluon:
        hopper.attend_64_kernel[(num_rows,)](
            *tensors, num_slots, *arguments, **sizes, num_warps=choice.num_warps
        )
        return
    _attend_kernel[(num_rows, triton.cdiv(num_heads, choice.heads))](
        *tensors,
        num_heads,
        num_slots,
        *arguments,
        **sizes,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )


def _is_hopper(tensor: Tensor) -> bool:
    if not tensor.is_cuda or INTERPRETED.value:
        return False
    return torch.cuda.get_device_capability(tensor.device) == (9, 0)


def _fake(query: Tensor, *_: object) -> None:
    return None


_sparse_mla_op = register_op(
    "sparse_mla(Tensor query, Tensor positions, Tensor row_request, Tensor window_cache,"
    " Tensor window_block_table, Tensor window_floor, Tensor compressed_cache, Tensor block_table,"
    " Tensor selection, Tensor sink, float softmax_scale, int window_size,"
    " str compressed_record, Tensor(a!) out, Tensor(b!) lse) -> ()",
    reference=sparse_mla_reference,
    fake=_fake,
    launch=_launch,
)
