"""Sparse MLA over indexed BF16 rows for 64 heads on Hopper, in Gluon.

Plain Triton gives both warpgroups of a 64-head tile the same score product. Here the warpgroups
split a tile's keys for the scores and the channels for the values, so nothing is computed twice.
Rows arrive by asynchronous copies into one of two shared buffers while the other one is multiplied.

Same arithmetic as ``sparse_mla._attend_kernel``: BF16 operands, FP32 accumulation, online softmax
over tiles of ``SLOTS`` slots in order. Gluon has no interpreter, so this file runs on the GPU only;
the plain kernel remains the one that CI exercises.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.6 calls it thread_barrier.
barrier = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier")  # noqa: B009

HEADS = 64
SLOTS = 64
NUM_WARPS = 8


@gluon.jit
def _copy_rows(buffer, rows_ptr, entry, dim, DIM: gl.constexpr):
    """Start the copy of one tile; skipped slots become zeros."""
    pointer = rows_ptr + entry.to(gl.int64)[:, None] * DIM + dim[None, :]
    async_copy.async_copy_global_to_shared(buffer, pointer, mask=(entry >= 0)[:, None])
    async_copy.commit_group()


@gluon.jit
def attend_64_kernel(
    query_ptr,
    rows_ptr,
    index_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    num_slots,
    stride_query_row,
    stride_query_head,
    scale,
    HEADS: gl.constexpr,
    DIM: gl.constexpr,
    SLOTS: gl.constexpr,
    STORE_LSE: gl.constexpr,
):
    """One program owns the 64 heads of one query row."""
    # A warp copies 8 consecutive rows, 16 bytes a lane: their indices come in two vector loads.
    copy_layout: gl.constexpr = gl.BlockedLayout([8, 8], [1, 32], [8, 1], [1, 0])
    key_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SLOTS, DIM], gl.bfloat16)
    query_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, DIM], gl.bfloat16)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, SLOTS // 2, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    score_row: gl.constexpr = gl.SliceLayout(1, score_layout)
    value_row: gl.constexpr = gl.SliceLayout(1, value_layout)

    row = gl.program_id(0).to(gl.int64)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, copy_layout))
    slot = gl.arange(0, SLOTS, gl.SliceLayout(1, copy_layout))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, copy_layout))
    column = gl.arange(0, SLOTS, gl.SliceLayout(0, score_layout))
    index_ptr += row * num_slots
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, SLOTS, DIM], key_layout)
    queries = gl.allocate_shared_memory(gl.bfloat16, [HEADS, DIM], query_layout)

    entry = gl.load(index_ptr + slot, mask=slot < num_slots, other=-1)
    query_at = query_ptr + row * stride_query_row + head[:, None] * stride_query_head
    async_copy.async_copy_global_to_shared(queries, query_at + dim[None, :])
    _copy_rows(keys.index(0), rows_ptr, entry, dim, DIM)
    entry = gl.load(index_ptr + SLOTS + slot, mask=SLOTS + slot < num_slots, other=-1)

    log2e: gl.constexpr = 1.4426950408889634
    scale_log2 = scale * log2e
    top = gl.full([HEADS], -1e30, gl.float32, score_row)
    total = gl.full([HEADS], 0.0, gl.float32, score_row)
    acc = gl.zeros([HEADS, DIM], gl.float32, value_layout)
    for start in range(0, num_slots, SLOTS):
        current = start // SLOTS % 2
        async_copy.wait_group(0)
        fence_async_shared()
        # This tile has arrived for all warps, and all warps are done with the other buffer.
        barrier()
        _copy_rows(keys.index(1 - current), rows_ptr, entry, dim, DIM)
        ahead = start + 2 * SLOTS + slot
        entry = gl.load(index_ptr + ahead, mask=ahead < num_slots, other=-1)
        valid_at = index_ptr + start + column
        valid = gl.load(valid_at, mask=start + column < num_slots, other=-1) >= 0
        scores = warpgroup_mma(
            queries,
            keys.index(current).permute((1, 0)),
            gl.zeros([HEADS, SLOTS], gl.float32, score_layout),
            use_acc=False,
            is_async=True,
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = gl.where(valid[None, :], scores * scale_log2, float("-inf"))
        new_top = gl.maximum(top, gl.max(scores, 1))
        decay = gl.exp2(top - new_top)
        weight = gl.exp2(scores - new_top[:, None])
        # The sum of weights is exact in units of 2^-23, so its order cannot matter.
        units = (weight + 1.0).to(gl.int32, bitcast=True) - 0x3F800000
        total = total * decay + gl.sum(units, 1).to(gl.float32) * 1.1920928955078125e-07
        top = new_top
        acc = acc * gl.convert_layout(decay, value_row)[:, None]
        operand = gl.convert_layout(weight.to(gl.bfloat16), weight_layout)
        acc = warpgroup_mma(operand, keys.index(current), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)

    score_head = gl.arange(0, HEADS, score_row)
    sink = gl.load(sink_ptr + score_head)
    denominator = total + gl.exp2(sink * log2e - top)
    out = acc / gl.convert_layout(denominator, value_row)[:, None]
    # Through the queries' buffer, so that the stores are 16 bytes a lane.
    queries.store(out.to(gl.bfloat16))
    barrier()
    out_at = out_ptr + (row * HEADS + head[:, None]) * DIM + dim[None, :]
    gl.store(out_at, queries.load(copy_layout))
    if STORE_LSE:
        gl.store(lse_ptr + row * HEADS + score_head, top / log2e + gl.log(total))
