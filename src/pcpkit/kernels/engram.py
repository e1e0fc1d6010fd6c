"""Engram: hashed n-gram rows of a token and their lookup in the table.

The hash of position ``P`` uses the compressed ids ``t_0 .. t_3`` of the tokens at ``P, P-1, P-2,
P-3``; from the first position before the start of the request on, all further ones are the pad id.
With ``R_0 = t_0 m_0`` and ``R_i = R_{i-1} XOR (t_i m_i)``, the n-gram of size ``i + 1`` and head
``h`` looks up row ``R_i mod prime + offset`` of the table (model-spec section 5.3). Image tokens do
not exist in the text-only model: every id is an ordinary token.

Hashes are int64 and wrap, looked-up values are exact in BF16: reference and kernel agree in every
bit. The injection of the looked-up values is in ``engram_inject.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.formats import MXFP8, dequantize_mxfp8
from pcpkit.kernels._jit import e4m3_decode, e8m0_decode, to_bfloat16
from pcpkit.kernels._ops import check_dtype, check_shape, register_op
from pcpkit.kernels.engram_inject import engram_inject

__all__ = ["engram_gather", "engram_inject", "engram_rows"]


def engram_rows(
    token_windows: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
) -> Tensor:
    """Table rows of every token for all Engram layers.

    Args:
        token_windows: ``(num_rows, max_ngram)`` int64 raw token ids, newest first; -1 = before the
            start of the request. An id that the map does not hold counts as such a start.
        token_map: ``(vocab_size,)`` int64 compressed id of each token id.
        multipliers: ``(num_layers, max_ngram)`` int64.
        primes: ``(num_layers, max_ngram - 1, num_heads)`` int64 bucket counts, positive.
        offsets: ``(num_layers, (max_ngram - 1) * num_heads)`` int64 first row of each column.
        pad_id: compressed id used before the start.

    Returns:
        ``(num_rows, num_layers, (max_ngram - 1) * num_heads)`` int64, columns by n-gram size, then
        head.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    for name, tensor in (
        ("token_windows", token_windows),
        ("token_map", token_map),
        ("multipliers", multipliers),
        ("primes", primes),
        ("offsets", offsets),
    ):
        check_dtype(name, tensor, torch.int64)
    num_layers, max_ngram = multipliers.shape
    check_shape("token_windows", token_windows, None, max_ngram, remedy="max_ngram ids")
    check_shape("primes", primes, num_layers, max_ngram - 1, None, remedy="primes of all layers")
    columns = (max_ngram - 1) * primes.shape[2]
    check_shape("offsets", offsets, num_layers, columns, remedy="one offset a column")
    return _engram_rows_op(token_windows, token_map, multipliers, primes, offsets, pad_id)


def engram_rows_reference(
    token_windows: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
) -> Tensor:
    """The specification of :func:`engram_rows`."""
    absent = (token_windows < 0) | (token_windows >= token_map.shape[0])
    blocked = absent.int().cumsum(dim=1) > 0
    ids = torch.where(blocked, pad_id, token_map[torch.where(absent, 0, token_windows)])
    products = ids[:, None, :] * multipliers
    hashed = products[..., 0]
    columns = []
    for back in range(1, multipliers.shape[1]):
        hashed = hashed ^ products[..., back]
        columns.append(hashed[..., None] % primes[:, back - 1])
    return torch.cat(columns, dim=-1) + offsets


@triton.jit(do_not_specialize=["num_rows", "vocab_size", "pad_id"])
def _engram_rows_kernel(
    window_ptr,
    map_ptr,
    multiplier_ptr,
    prime_ptr,
    offset_ptr,
    out_ptr,
    num_rows,
    vocab_size,
    pad_id,
    stride_window_row,
    stride_window_back,
    NGRAM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One program owns BLOCK_ROWS tokens in one Engram layer."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    layer = tl.program_id(1)
    columns: tl.constexpr = (NGRAM - 1) * HEADS
    inside = row < num_rows
    head = tl.arange(0, BLOCK_HEADS)
    real_head = head < HEADS
    mask = inside[:, None] & real_head[None, :]
    blocked = row < 0
    hashed = row * 0
    out_row = out_ptr + (row * tl.num_programs(1) + layer) * columns
    for back in tl.static_range(NGRAM):  # pyright: ignore[reportGeneralTypeIssues]
        token_ptr = window_ptr + row * stride_window_row + back * stride_window_back
        token = tl.load(token_ptr, mask=inside, other=-1)
        blocked = blocked | (token < 0) | (token >= vocab_size)
        compressed = tl.load(map_ptr + token, mask=blocked == 0, other=0)
        compressed = tl.where(blocked, pad_id, compressed)
        hashed = hashed ^ (compressed * tl.load(multiplier_ptr + layer * NGRAM + back))
        if back > 0:
            column = layer * columns + (back - 1) * HEADS + head
            prime = tl.load(prime_ptr + column, mask=real_head, other=1)[None, :]
            offset = tl.load(offset_ptr + column, mask=real_head, other=0)[None, :]
            # ``%`` takes the sign of the dividend here, that of the divisor in torch.
            bucket = hashed[:, None] % prime
            bucket = tl.where(bucket < 0, bucket + prime, bucket) + offset
            out_column = (back - 1) * HEADS + head
            tl.store(out_row[:, None] + out_column[None, :], bucket, mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """Tokens or lookups of a program."""

    block: int
    num_warps: int


def _choose_rows_launch(num_rows: int) -> LaunchChoice:
    """32 tokens by 8 heads fill 4 warps with two 64-bit remainders a thread and n-gram."""
    return LaunchChoice(block=32 if num_rows > 32 else 8, num_warps=4 if num_rows > 32 else 1)


def _launch_rows(
    token_windows: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
    choice: LaunchChoice | None = None,
) -> Tensor:
    """Launch :func:`engram_rows`."""
    num_rows = token_windows.shape[0]
    out = token_windows.new_empty(num_rows, *offsets.shape)
    if out.numel() == 0:
        return out
    choice = choice or _choose_rows_launch(num_rows)
    _engram_rows_kernel[(triton.cdiv(num_rows, choice.block), multipliers.shape[0])](
        token_windows,
        token_map.contiguous(),
        multipliers.contiguous(),
        primes.contiguous(),
        offsets.contiguous(),
        out,
        num_rows,
        token_map.shape[0],
        pad_id,
        token_windows.stride(0),
        token_windows.stride(1),
        NGRAM=multipliers.shape[1],
        HEADS=primes.shape[2],
        BLOCK_HEADS=triton.next_power_of_2(primes.shape[2]),
        BLOCK_ROWS=choice.block,
        num_warps=choice.num_warps,
    )
    return out


def engram_gather(rows: Tensor, table: Tensor, scale: Tensor) -> Tensor:
    """Dequantized table rows, concatenated per token.

    Args:
        rows: ``(num_rows, num_columns)`` int64. A row outside the table (another rank's, say)
            reads as zeros.
        table: ``(table_rows, dim)`` uint8 raw E4M3 bytes, on the device of ``rows``. With ``rows``
            on CUDA it may lie in pinned host memory instead: then the GPU reads the few rows it
            needs over the bus and nothing is copied in advance.
        scale: ``(table_rows, dim / 32)`` uint8 raw E8M0 bytes, placed like ``table``.

    Returns:
        ``(num_rows, num_columns * dim)`` bf16 (exact).

    Raises:
        ValueError: shapes or dtypes do not fit, or a host table is not pinned.
    """
    check_dtype("rows", rows, torch.int64)
    check_dtype("table", table, torch.uint8)
    check_dtype("scale", scale, torch.uint8)
    check_shape("rows", rows, None, None, remedy="pass the rows of one layer")
    groups = MXFP8.record_bytes(table.shape[1]) - table.shape[1]
    check_shape("scale", scale, table.shape[0], groups, remedy="one scale a 32 channels")
    return _engram_gather_op(rows, table, scale)


def engram_gather_reference(rows: Tensor, table: Tensor, scale: Tensor) -> Tensor:
    """The specification of :func:`engram_gather`."""
    flat = rows.flatten()
    out = torch.zeros(flat.shape[0], table.shape[1], dtype=torch.bfloat16, device=rows.device)
    here = (flat >= 0) & (flat < table.shape[0])
    local = flat[here]
    out[here] = dequantize_mxfp8(table.index_select(0, local), scale.index_select(0, local))
    return out.reshape(rows.shape[0], rows.shape[1] * table.shape[1])


@triton.jit(do_not_specialize=["num_lookups", "table_rows"])
def _engram_gather_kernel(
    rows_ptr,
    table_ptr,
    scale_ptr,
    out_ptr,
    num_lookups,
    table_rows,
    stride_row,
    stride_column,
    stride_table,
    stride_scale,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program owns BLOCK lookups; ``out`` is dense, ``[num_lookups, GROUPS * GROUP]``."""
    lookup = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row_ptr = rows_ptr + lookup // COLUMNS * stride_row + lookup % COLUMNS * stride_column
    row = tl.load(row_ptr, mask=lookup < num_lookups, other=-1)
    here = (row >= 0) & (row < table_rows)
    group = tl.arange(0, BLOCK_GROUPS)
    real_group = group < GROUPS
    channel = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]

    # 16 codes a thread: one 16-byte read, which is what a table behind the bus needs most.
    code_ptr = table_ptr + row[:, None, None] * stride_table + channel[None, :, :]
    mask = here[:, None, None] & real_group[None, :, None]
    codes = tl.load(code_ptr, mask=mask, other=0)
    scale_mask = here[:, None] & real_group[None, :]
    scale = tl.load(scale_ptr + row[:, None] * stride_scale + group, mask=scale_mask, other=127)
    values = e4m3_decode(codes).to(tl.float32) * e8m0_decode(scale)[:, :, None]
    out = out_ptr + lookup[:, None, None] * (GROUPS * GROUP) + channel[None, :, :]
    written = (lookup < num_lookups)[:, None, None] & real_group[None, :, None]
    tl.store(out, to_bfloat16(values), mask=written)


def _choose_gather_launch(dim: int) -> LaunchChoice:
    """About 4 KiB of codes a program: two 16-byte reads a thread in flight."""
    return LaunchChoice(block=max(1, 4096 // triton.next_power_of_2(dim)), num_warps=4)


def _launch_gather(
    rows: Tensor, table: Tensor, scale: Tensor, choice: LaunchChoice | None = None
) -> Tensor:
    """Launch :func:`engram_gather`. Rows and the first dims of table and scale may be strided.

    Arguments on several devices reach this function if one of them is a CUDA tensor.
    """
    (num_rows, num_columns), dim = rows.shape, table.shape[1]
    out = rows.new_empty(num_rows, num_columns * dim, dtype=torch.bfloat16)
    for name, tensor in (("table", table), ("scale", scale)):
        if tensor.device != rows.device and not tensor.is_pinned():
            raise ValueError(
                f"{name} expected {rows.device} or pinned host memory, got unpinned "
                f"{tensor.device} memory; call pin_memory() once when loading"
            )
        if tensor.stride(1) != 1:
            raise ValueError(f"{name} expected channels of stride 1, got {tensor.stride(1)}")
    if out.numel() == 0:
        return out
    choice = choice or _choose_gather_launch(dim)
    groups = dim // MXFP8.group
    _engram_gather_kernel[(triton.cdiv(num_rows * num_columns, choice.block),)](
        rows,
        table,
        scale,
        out,
        num_rows * num_columns,
        table.shape[0],
        rows.stride(0),
        rows.stride(1),
        table.stride(0),
        scale.stride(0),
        COLUMNS=num_columns,
        GROUPS=groups,
        GROUP=MXFP8.group,
        BLOCK_GROUPS=triton.next_power_of_2(groups),
        BLOCK=choice.block,
        num_warps=choice.num_warps,
    )
    return out


def _fake_rows(
    token_windows: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
) -> Tensor:
    return token_windows.new_empty(token_windows.shape[0], *offsets.shape)


def _fake_gather(rows: Tensor, table: Tensor, scale: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], rows.shape[1] * table.shape[1], dtype=torch.bfloat16)


_engram_rows_op = register_op(
    "engram_rows(Tensor token_windows, Tensor token_map, Tensor multipliers, Tensor primes,"
    " Tensor offsets, int pad_id) -> Tensor",
    reference=engram_rows_reference,
    fake=_fake_rows,
    launch=_launch_rows,
)
_engram_gather_op = register_op(
    "engram_gather(Tensor rows, Tensor table, Tensor scale) -> Tensor",
    reference=engram_gather_reference,
    fake=_fake_gather,
    launch=_launch_gather,
)
