"""Deterministic top-k of index scores: the lowest position wins every tie.

Scores are BF16 sums of rectified terms, so exact ties (zeros above all) are common and an undefined
tie rule would make the selection depend on the kernel. NaN ranks as -inf; a position that scores
-inf is never selected; -0 and 0 tie (model-spec section 3.6).

Two facts make it fast. The k best scores of a row lie in the k best groups of eight adjacent scores
if groups rank by their maximum with the same tie rule; so a wide row is reduced to its maxima, the
groups are selected from those (again by groups if there are many), and the scores from at most
``8 * k`` positions. And in a program that holds its scores in registers, the k-th largest maximum
of its groups bounds the k-th largest score from below, usually closely, so few counting passes find
that score; one prefix sum then places everything above it and the first ties.

All of it compares integers of the order of the scores: no split of the work and no other row can
change a selection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpkit.kernels._ops import check_dtype, check_shape, register_op

_GROUP = tl.constexpr(8)
"""Adjacent scores that are ranked together: 16 bytes of BF16."""

_FAR = tl.constexpr(1 << 33)
"""Farther than any two keys are apart: a probe of this distance bisects."""

_BF16_INFINITY = tl.constexpr(0x7F80)
_FP32_INFINITY = tl.constexpr(0x7F800000)
"""Bits of +inf, which are its key."""

_MAX_SCORES = 32768
"""Scores one program can hold, and what the 16-bit counts of its prefix sum can count."""


def topk(scores: Tensor, num_visible: Tensor, k: int) -> Tensor:
    """Positions of the ``min(k, num_visible)`` best scores of every row.

    Args:
        scores: ``(num_rows, num_positions)`` bf16 or fp32.
        num_visible: ``(num_rows,)`` int32; positions at or above it are ignored.
        k: width of the result.

    Returns:
        ``(num_rows, k)`` int32 positions ascending, -1 at the tail.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Example:
        Scores ``[2, 5, 5, 5]``, all visible, ``k = 2``: ``[1, 2]``.
    """
    check_dtype("scores", scores, torch.bfloat16, torch.float32)
    check_shape("scores", scores, None, None, remedy="one row a query")
    check_shape("num_visible", num_visible, scores.shape[0], remedy="one count a row")
    return _topk_op(scores, num_visible, k)


def topk_reference(scores: Tensor, num_visible: Tensor, k: int) -> Tensor:
    """The specification of :func:`topk`: the k largest of distinct keys (score, -position)."""
    num_rows, width = scores.shape
    position = torch.arange(width, device=scores.device)
    ranked = scores.float() + 0.0  # -0 becomes 0: they tie
    ranked = ranked.masked_fill((position >= num_visible[:, None]) | ranked.isnan(), float("-inf"))
    # Float bits in the order of their values: a negative number counts down.
    bits = ranked.view(torch.int32)
    rank = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (rank << 32) - position
    best = keys.topk(min(k, width), dim=1, sorted=False).indices
    best = best.masked_fill(ranked.gather(1, best) == float("-inf"), width)
    best = best.sort(dim=1).values
    best = best.masked_fill(best == width, -1)
    out = torch.full((num_rows, k), -1, dtype=torch.int32, device=scores.device)
    out[:, : best.shape[1]] = best
    return out


@triton.jit
def _ordered(bits, MAGNITUDE: tl.constexpr, INFINITY: tl.constexpr):
    """Keys of sign-extended float bits; ``-MAGNITUDE - 1`` for -inf and NaN."""
    negative = bits >> 31  # -1 or 0
    # A negative code counts down from -1; one more makes -0 the key of 0.
    keys = (bits ^ (negative & MAGNITUDE)) - negative
    return tl.where((keys > -INFINITY) & (keys <= INFINITY), keys, -MAGNITUDE - 1)


@triton.jit
def _order_keys(scores):
    """int32 keys in the order of the scores; both zeros have the same, NaN and -inf the lowest one.

    Integers are keys already (`_maxima_kernel` stores them).
    """
    if scores.dtype.is_int():
        keys = scores.to(tl.int32)
    elif scores.dtype == tl.bfloat16:
        bits = scores.to(tl.int16, bitcast=True).to(tl.int32)
        keys = _ordered(bits, 0x7FFF, _BF16_INFINITY)
    else:
        keys = _ordered(scores.to(tl.int32, bitcast=True), 0x7FFFFFFF, _FP32_INFINITY)
    return keys


@triton.jit
def _threshold(keys, k, low, high, step):
    """The largest ``t`` with ``k`` or more keys ``>= t``, or some ``t`` with exactly ``k``.

    ``low`` has ``k`` or more keys above or at it, ``high`` fewer. ``step`` is the first distance
    probed from ``low``; it doubles until a probe finds too few. Scalars are int64, because two FP32
    keys may be 2^32 apart.
    """
    while high - low > 1:
        middle = low + tl.minimum(step, (high - low) >> 1)
        count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32))
        step = tl.where(count >= k, tl.minimum(step * 2, _FAR), _FAR)
        high = tl.where(count > k, high, tl.where(count == k, middle + 1, middle))
        low = tl.where(count >= k, middle, low)
    return low


@triton.jit(do_not_specialize=["width"])
def _select_kernel(
    scores_ptr,
    groups_ptr,
    visible_ptr,
    out_ptr,
    width,
    readable,
    stride_scores,
    NUM_GROUPS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FROM_GROUPS: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
):
    """One program selects from one row: from its first ``NUM_GROUPS`` groups or from ``K`` listed.

    ``readable >= width`` scores of a row may be read, so that whole vectors are.
    """
    LOWEST: tl.constexpr = -(1 << (scores_ptr.dtype.element_ty.primitive_bitwidth - 1))
    row = tl.program_id(0).to(tl.int64)
    limit = width
    if HAS_VISIBLE:
        limit = tl.minimum(tl.load(visible_ptr + row), width)
    group = tl.arange(0, NUM_GROUPS)
    listed = group < NUM_GROUPS
    if FROM_GROUPS:
        listed = group < K
        group = tl.load(groups_ptr + row * K + group, mask=listed, other=-1)
    position = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    scores = tl.load(
        scores_ptr + row * stride_scores + position,
        mask=(group >= 0)[:, None] & (position < readable),
        other=0,
    )
    inside = (group >= 0)[:, None] & (position < limit)
    keys = tl.where(inside, _order_keys(scores), LOWEST)

    # Phase 1: the threshold. ``LOWEST`` where everything that may be selected is.
    valid = tl.sum((keys > LOWEST).to(tl.int32))
    threshold = tl.full([], LOWEST, tl.int64)
    if valid > K:
        maxima = tl.max(keys, axis=1)
        high = tl.max(maxima, axis=0).to(tl.int64) + 1
        step = tl.full([], _FAR, tl.int64)
        if NUM_GROUPS >= K:
            # K groups reach the smallest of their maxima; far more do if nothing was selected yet.
            threshold = tl.min(tl.where(listed, maxima, 0x7FFFFFFF), axis=0).to(tl.int64)
            if NUM_GROUPS >= 2 * K:
                threshold = _threshold(maxima, K, threshold, high, step)
            if FROM_GROUPS or NUM_GROUPS >= 2 * K:
                step = tl.where(threshold > LOWEST, 1, step)
        threshold = _threshold(keys, K, threshold, high, step)
    bound = threshold.to(tl.int32)

    # Phase 2: what lies above the threshold is selected, and the first ties fill up.
    above = (keys > bound).to(tl.int32)
    tied = ((keys == bound) & (keys > LOWEST)).to(tl.int32)
    both = (above << 16) | tied
    group_count = tl.sum(both, axis=1)
    before = tl.cumsum(group_count, axis=0) - group_count
    before = before[:, None] + tl.cumsum(both, axis=1) - both
    num_above = tl.sum(above)
    wanted = tl.where(valid > K, K - num_above, 0)
    ties_before = before & 0xFFFF
    chosen = (above > 0) | ((tied > 0) & (ties_before < wanted))
    slot = (before >> 16) + tl.minimum(ties_before, wanted)
    tl.store(out_ptr + row * K + slot, position, mask=chosen)
    tail = tl.arange(0, BLOCK_K)
    tl.store(
        out_ptr + row * K + tail,
        tl.full([BLOCK_K], -1, tl.int32),
        mask=(tail >= num_above + wanted) & (tail < K),
    )


@triton.jit
def _comparable(scores):
    """``scores`` as 32-bit numbers of the same order: FP32, NaN as -inf; keys as int32."""
    if scores.dtype.is_int():
        wide = scores.to(tl.int32)
    else:
        wide = scores
        if scores.dtype == tl.bfloat16:
            # By bits: an interpreted cast breaks subnormals.
            bits = scores.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
            wide = bits.to(tl.float32, bitcast=True)
        wide = tl.where(wide == wide, wide, float("-inf"))
    return wide


@triton.jit
def _store_maxima(out_ptr, ordered, group, num_groups, newest):
    """Store the key of the largest of ``ordered`` [GROUPS, LANES], or of +inf in ``newest``."""
    best = tl.max(ordered, axis=1)
    if out_ptr.dtype.element_ty == tl.int16:
        INFINITY: tl.constexpr = _BF16_INFINITY
        if not ordered.dtype.is_int():
            best = _ordered(best.to(tl.int32, bitcast=True) >> 16, 0x7FFF, INFINITY)
    else:
        INFINITY: tl.constexpr = _FP32_INFINITY
        best = _order_keys(best)
    best = tl.where(group == newest, INFINITY, best)
    tl.store(out_ptr + group, best.to(out_ptr.dtype.element_ty), mask=group < num_groups)


@triton.jit(do_not_specialize=["width", "num_groups"])
def _maxima_kernel(
    scores_ptr,
    visible_ptr,
    out_ptr,
    width,
    readable,
    num_groups,
    stride_scores,
    stride_out,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    PINNED: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
):
    """One program stores the largest key of ``BLOCK_GROUPS`` groups of ``SIZE`` adjacent scores.

    ``PINNED``: the group of the newest visible position gets the key of +inf, and visibility masks
    nothing. Keys of BF16 scores are int16, those of FP32 scores int32.
    """
    LOWEST: tl.constexpr = -(1 << (scores_ptr.dtype.element_ty.primitive_bitwidth - 1))
    row = tl.program_id(0).to(tl.int64)
    limit = width
    newest = -1
    if HAS_VISIBLE:
        visible = tl.load(visible_ptr + row)
        if PINNED:
            newest = tl.where(visible > 0, (visible - 1) // SIZE, -1)
        else:
            limit = tl.minimum(visible, width)
    first = tl.program_id(1) * BLOCK_GROUPS
    group = first + tl.arange(0, BLOCK_GROUPS)
    lane = tl.arange(0, LANES)[None, :]
    position = group[:, None] * SIZE + lane
    mask = position < readable
    if LANES > SIZE:
        mask = mask & (lane < SIZE)
    scores = tl.load(scores_ptr + row * stride_scores + position, mask=mask, other=0)
    ordered = _comparable(scores)
    out_ptr += row * stride_out
    # Each branch stores, else the compiler merges them and every program pays for the mask.
    if LANES > SIZE or limit < (first + BLOCK_GROUPS) * SIZE:
        nothing = LOWEST if scores.dtype.is_int() else float("-inf")
        ordered = tl.where(mask & (position < limit), ordered, nothing)
        _store_maxima(out_ptr, ordered, group, num_groups, newest)
    else:
        _store_maxima(out_ptr, ordered, group, num_groups, newest)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """How one row is selected from.

    Attributes:
        direct: one program reads the whole row; otherwise the maxima of its groups come first.
        num_groups: groups of eight scores a selecting program holds.
        num_warps: warps of that program.
    """

    direct: bool
    num_groups: int
    num_warps: int


def choose_launch(width: int, k: int) -> LaunchChoice:
    """By the sizes of one row; the number of rows changes nothing.

    Below ``16 * k`` the two selections of the second level (of ``width / 8`` maxima, then of
    ``8 * k`` scores) handle about as many scores as a direct one, at three launches for one. Above
    16,384 scores a program is short of registers.

    Raises:
        ValueError: ``k`` is too large for a row of this width.
    """
    of_groups = 8 * triton.next_power_of_2(max(k, 1))
    direct = width <= min(_MAX_SCORES, max(4096, min(16 * k, 16384), of_groups))
    num_groups = triton.next_power_of_2(triton.cdiv(width, 8) if direct else k)
    if 8 * num_groups > _MAX_SCORES:
        raise ValueError(
            f"k expected at most {_MAX_SCORES // 8} for rows of {width} scores, got {k}; "
            "split the rows"
        )
    return LaunchChoice(direct=direct, num_groups=num_groups, num_warps=_num_warps(8 * num_groups))


def _num_warps(num_scores: int) -> int:
    """32 scores a thread, at least one warp."""
    return min(16, max(1, num_scores // 1024))


def _readable(scores: Tensor) -> int:
    """Scores of each row that may be read: up to the next multiple of 16 if the rows are padded."""
    width, stride = scores.shape[1], scores.stride(0)
    padded = triton.cdiv(width, 16) * 16
    last = scores.storage_offset() + (scores.shape[0] - 1) * stride + padded
    room = scores.untyped_storage().nbytes() // scores.element_size()
    return padded if padded <= stride and last <= room else width


def group_maxima(scores: Tensor, num_visible: Tensor | None, size: int, *, pinned: bool) -> Tensor:
    """``(num_rows, ceil(width / size))`` largest keys of groups of adjacent scores or keys.

    int16 for bf16 scores, else int32; in padded rows. ``pinned``: see `_maxima_kernel`.
    """
    num_rows, width = scores.shape
    num_groups = triton.cdiv(width, size)
    keys = torch.int16 if scores.element_size() == 2 else torch.int32
    out = scores.new_empty(num_rows, triton.cdiv(num_groups, 16) * 16, dtype=keys)[:, :num_groups]
    lanes = triton.next_power_of_2(size)
    block = max(1, min(8192 // lanes, triton.next_power_of_2(num_groups)))
    _maxima_kernel[(num_rows, triton.cdiv(num_groups, block))](
        scores,
        scores if num_visible is None else num_visible,
        out,
        width,
        _readable(scores),
        num_groups,
        scores.stride(0),
        out.stride(0),
        SIZE=size,
        LANES=lanes,
        BLOCK_GROUPS=block,
        PINNED=pinned,
        HAS_VISIBLE=num_visible is not None,
        num_warps=4,
    )
    return out


def select(
    scores: Tensor, num_visible: Tensor | None, k: int, choice: LaunchChoice | None = None
) -> Tensor:
    """Launch :func:`topk`; ``num_visible=None`` shows every position. Rows may be strided."""
    num_rows, width = scores.shape
    if num_rows == 0 or k == 0 or width == 0:
        return scores.new_full((num_rows, k), -1, dtype=torch.int32)
    if width > 1 and scores.stride(1) != 1:
        scores = scores.contiguous()
    choice = choice or choose_launch(width, k)
    if num_visible is not None:
        num_visible = num_visible.contiguous()
    groups = scores
    if not choice.direct:
        groups = select(group_maxima(scores, num_visible, 8, pinned=False), None, k)
    out = scores.new_empty(num_rows, k, dtype=torch.int32)
    _select_kernel[(num_rows,)](
        scores,
        groups,
        scores if num_visible is None else num_visible,
        out,
        width,
        _readable(scores),
        scores.stride(0),
        NUM_GROUPS=choice.num_groups,
        K=k,
        BLOCK_K=triton.next_power_of_2(k),
        FROM_GROUPS=not choice.direct,
        HAS_VISIBLE=num_visible is not None,
        num_warps=choice.num_warps,
    )
    return out


def _fake(scores: Tensor, num_visible: Tensor, k: int) -> Tensor:
    return scores.new_empty(scores.shape[0], k, dtype=torch.int32)


_topk_op = register_op(
    "topk(Tensor scores, Tensor num_visible, int k) -> Tensor",
    reference=topk_reference,
    fake=_fake,
    launch=select,
)
