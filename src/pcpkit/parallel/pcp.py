"""What PCP ranks exchange: rows of this rank to rank-major rows of all, padded to the longest.

Every call happens on every rank, with or without rows of its own: its shape follows from the plan,
never from what a rank happens to hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcpkit.parallel.groups import Group


def pad_rows(rows: Tensor, num_rows: int) -> Tensor:
    """``rows`` followed by zero rows up to ``num_rows``; no copy if there is nothing to add."""
    missing = num_rows - rows.shape[0]
    if missing == 0:
        return rows
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def gather_rows(group: Group, rows: Tensor, num_padded: int) -> Tensor:
    """Rank-major rows of all ranks.

    Args:
        group: the PCP group.
        rows: ``(num_local, ...)`` this rank's rows, at most ``num_padded``.
        num_padded: rows each rank sends, equal on all ranks.

    Returns:
        ``(size * num_padded, ...)``; padding rows are zero.
    """
    return group.all_gather(pad_rows(rows, num_padded)).flatten(0, 1)


def pick_rows(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]`` with zero rows where ``index`` is -1."""
    if rows.shape[0] == 0:
        return rows.new_zeros(index.shape[0], *rows.shape[1:])
    picked = rows[index.clamp(min=0)]
    return torch.where((index >= 0)[:, None], picked, torch.zeros_like(picked))
