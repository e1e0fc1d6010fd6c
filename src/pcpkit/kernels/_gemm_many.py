"""GEMM of many BF16 rows with a BF16 weight: tiles that TMA feeds, for one launch over a chunk.

An output element is the chain of additions that `_gemm` describes: 16 channels a ``wgmma`` step,
ascending, one FP32 accumulator a part, parts added in ascending order; zeros beyond the last
channel add nothing. Here rows are the left operand, so a tile spans 128 x 256 and both operands
come by TMA straight into shared memory: 9 to 35 % faster than `_gemm` on the same operands for
4,096 rows of the model's layers [measured: H200]. Both files give the same bits, so the number of
rows may choose between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pcpkit.kernels._gemm import NUM_SMS, gemm
from pcpkit.kernels._jit import dot, to_bfloat16

_MIN_TILES = 64
"""A launch of fewer tiles leaves most multiprocessors idle: the smaller tiles of `_gemm` do not."""


@triton.jit(do_not_specialize=["num_rows"])
def _gemm_many_kernel(
    x_desc,
    weight_desc,
    out_ptr,
    num_rows,
    num_cols,
    depth,
    num_groups,
    stride_out_row,
    stride_out_group,
    NUM_PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Programs take tiles of BLOCK_ROWS rows x BLOCK_COLS columns of one group's output in turn.

    ``depth`` channels a part, a whole number of BLOCK_DEPTH if there are several.
    """
    # Programs that run together share SPAN row tiles, so that L2 serves their weights.
    num_row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    col_tiles = tl.cdiv(num_cols, BLOCK_COLS)
    per_span = SPAN * col_tiles * num_groups
    num_tiles = num_row_tiles * col_tiles * num_groups
    # One tile each; without this loop ptxas waits after every wgmma of a 128 x 256 tile.
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        first = tile // per_span * SPAN
        height = tl.minimum(num_row_tiles - first, SPAN)
        within = tile % per_span
        row = (first + within % height) * BLOCK_ROWS
        group = within // height // col_tiles
        col = within // height % col_tiles * BLOCK_COLS

        x_start = group * (depth * NUM_PARTS)
        weight_row = group * num_cols + col
        total = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        if NUM_PARTS == 1:
            for start in range(0, depth, BLOCK_DEPTH):
                x = x_desc.load([row, x_start + start])
                weight = weight_desc.load([weight_row, start])
                total = dot(x, tl.trans(weight), total)
        else:
            for part in range(NUM_PARTS):
                acc = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
                for start in range(part * depth, part * depth + depth, BLOCK_DEPTH):
                    x = x_desc.load([row, x_start + start])
                    weight = weight_desc.load([weight_row, start])
                    acc = dot(x, tl.trans(weight), acc)
                total += acc

        rows = row + tl.arange(0, BLOCK_ROWS)
        cols = col + tl.arange(0, BLOCK_COLS)
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out_row
        out_ptrs += group.to(tl.int64) * stride_out_group + cols[None, :]
        if out_ptr.dtype.element_ty == tl.bfloat16:
            total = to_bfloat16(total)
        tl.store(out_ptrs, total, mask=(rows < num_rows)[:, None] & (cols < num_cols)[None, :])


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyChoice:
    """Tile and pipeline of one launch.

    Attributes:
        block_rows, block_cols, block_depth: tile of rows x weight rows x channels.
        num_warps, num_stages: as Triton takes them.
        span: row tiles whose programs run together.
        programs: how many run at once on the whole GPU.
        channel_ns, tile_ns: estimated time of one channel and of what a tile takes besides.
    """

    block_rows: int
    block_cols: int
    block_depth: int
    num_warps: int
    num_stages: int
    span: int
    programs: int
    channel_ns: float
    tile_ns: float


def _tile(
    shape: tuple[int, int, int],
    warps: int,
    stages: int,
    a_sm: int,
    channel: float,
    tile: float,
    span: int = 8,
) -> ManyChoice:
    return ManyChoice(
        block_rows=shape[0],
        block_cols=shape[1],
        block_depth=shape[2],
        num_warps=warps,
        num_stages=stages,
        span=span,
        programs=a_sm * NUM_SMS,
        channel_ns=channel,
        tile_ns=tile,
    )


# Times are fitted to launches of 4,096 rows with 1,280 and 5,120 channels on an H200. Compiled by
# Triton 3.6 for sm_90 no tile spills; at most 197 KB of shared memory.
_TILES = (
    _tile((128, 256, 64), 8, 4, 1, 9.7, 4300),
    # Two programs a multiprocessor: one loads its first channels while the other stores.
    _tile((128, 128, 64), 4, 3, 2, 10.6, 2900),
    _tile((128, 128, 64), 8, 4, 1, 5.9, 2300),
    _tile((64, 128, 64), 4, 4, 2, 5.8, 2000),
    _tile((64, 32, 128), 4, 8, 1, 2.5, 2000),
)
_PARTS_TILE = _tile((128, 128, 64), 8, 6, 1, 6.5, 2300, span=16)
"""Two accumulators a part leave room for no larger one."""


@lru_cache(maxsize=4096)
def choose_many(
    num_rows: int, num_cols: int, depth: int, num_groups: int, num_parts: int
) -> ManyChoice | None:
    """The tile with the least estimated time, waves x time of a tile; None: `_gemm` is better.

    Args:
        num_rows: rows of the input.
        num_cols: output features of one group.
        depth: channels of one part.
        num_groups: blocks of a block-diagonal weight.
        num_parts: ordered partial sums.
    """

    def num_tiles(tile: ManyChoice) -> int:
        col_tiles = triton.cdiv(num_cols, tile.block_cols)
        return triton.cdiv(num_rows, tile.block_rows) * col_tiles * num_groups

    def cost(tile: ManyChoice) -> float:
        waves = triton.cdiv(num_tiles(tile), tile.programs)
        return waves * (depth * tile.channel_ns + tile.tile_ns)

    # Small tiles were measured where all of them run at once, and nowhere else.
    tiles = [t for t in _TILES if t.block_rows == 128 or num_tiles(t) <= t.programs]
    best = _PARTS_TILE if num_parts > 1 else min(tiles, key=cost)
    crosses = max(num_parts, num_groups) > 1 and depth % best.block_depth != 0
    return None if crosses or num_tiles(best) < _MIN_TILES else best


def gemm_many(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    num_parts: int = 1,
    choice: ManyChoice | None = None,
) -> None:
    """``out[:, g] = x[:, g] weight[g]^T``, as ``gemm`` with BF16 operands, for many rows.

    Takes what ``gemm`` takes and hands over to it what does not suit: few tiles, another GPU than
    an H100 or H200, operands that TMA cannot address, groups that blocks of channels cross.

    Args:
        x: ``(num_rows, num_groups, depth)`` bf16 or fp32, last dim contiguous.
        weight: ``(num_groups * num_cols, depth)`` bf16 or fp32, last dim contiguous.
        out: ``(num_rows, num_groups, num_cols)`` bf16 or fp32, last dim contiguous, overwritten.
        num_parts: equal parts of ``depth``, one FP32 partial sum each, added in ascending order.
        choice: tile, default :func:`choose_many`.

    Raises:
        ValueError: a block of ``choice`` would reach over the end of a part.
    """
    num_rows, num_groups, num_cols = out.shape
    depth = weight.shape[1] // num_parts
    choice = choice or choose_many(num_rows, num_cols, depth, num_groups, num_parts)
    if choice is not None and num_parts > 1 and depth % choice.block_depth:
        raise ValueError(
            f"choice expected blocks that divide {depth} channels a part, got "
            f"{choice.block_depth}; leave it out"
        )
    # A last block of channels that reaches into the next group would multiply its rows by zeros:
    # nothing, unless they are infinite or NaN.
    crosses_groups = choice is not None and num_groups > 1 and depth % choice.block_depth != 0
    if choice is None or crosses_groups or not (_suits_tma(x) and _suits_tma(weight)):
        gemm(x, weight, None, out, num_parts=num_parts)
        return
    rows, cols, block_depth = choice.block_rows, choice.block_cols, choice.block_depth
    tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_cols, cols) * num_groups
    _gemm_many_kernel[(tiles,)](
        TensorDescriptor.from_tensor(x.flatten(1), [rows, block_depth]),
        TensorDescriptor.from_tensor(weight, [cols, block_depth]),
        out,
        num_rows,
        num_cols,
        depth,
        num_groups,
        out.stride(0),
        out.stride(1),
        NUM_PARTS=num_parts,
        BLOCK_ROWS=rows,
        BLOCK_COLS=cols,
        BLOCK_DEPTH=block_depth,
        SPAN=choice.span,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )


def _suits_tma(tensor: Tensor) -> bool:
    """BF16, rows without gaps between groups, 16-byte aligned, on a GPU with TMA and wgmma."""
    if tensor.dtype != torch.bfloat16 or tensor.stride(-1) != 1:
        return False
    if tensor.ndim == 3 and tensor.shape[1] > 1 and tensor.stride(1) != tensor.shape[2]:
        return False
    if tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) != (9, 0):
        return False
    return tensor.data_ptr() % 16 == 0 and tensor.stride(0) % 8 == 0
