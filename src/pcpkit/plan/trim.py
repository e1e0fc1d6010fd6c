"""Trim: rows of a prefill that stop below the last layers, since nothing reads them there.

Above the last KV source, the *cut*, a layer's output is needed for the logits of the last row, and
to write the window records that the rows to come will read: those of the last ``W`` rows. A row of
a layer reads ``W - 1`` rows before it, so one layer further down ``W - 1`` more rows have to be
right, and so on (pcp-spec section 6). ``exact`` runs all of them, and everything that is read
later has the bits of an untrimmed step. ``bounded``, the published rule, runs the last ``W`` rows
in all layers above the cut: their windows are cut off, so it is an approximation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from pcpkit.plan.batch import StepBatch

TrimMode = Literal["exact", "bounded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trim:
    """How the prefills of a step are trimmed.

    Raises:
        ValueError: an unknown mode, or a cut that is no layer.
    """

    mode: TrimMode
    cut: int
    """The last KV source; layers above it are trimmed."""
    num_layers: int
    sliding_window: int

    def __post_init__(self) -> None:
        """See the class."""
        if self.mode not in get_args(TrimMode):
            raise ValueError(
                f"mode expected one of {get_args(TrimMode)}, got {self.mode!r}; without a trim "
                "pass None"
            )
        if not 0 <= self.cut < self.num_layers:
            raise ValueError(
                f"cut expected 0 .. {self.num_layers - 1}, got {self.cut}; pass the last KV source"
            )

    def num_kept(self, layer: int) -> int:
        """Last rows of a prefill that run in a layer above the cut."""
        if self.mode == "bounded":
            return self.sliding_window
        return self.sliding_window + (self.sliding_window - 1) * (self.num_layers - 1 - layer)


def layer_starts(batch: StepBatch, trim: Trim | None) -> Tensor | None:
    """First position that runs in each layer, and the lowest window position read there.

    Args:
        batch: the global batch.
        trim: raises the starts of the requests that ``may_trim``, for this step only.

    Returns:
        ``(num_reqs, num_layers)`` int32, ascending along the layers; ``None`` if all are 0 because
        nothing was replayed and nothing is trimmed. A start that would trim no row of the step is
        not raised: the window records of the steps before are there to be read.

    Raises:
        ValueError: replay and trim differ in the number of layers.

    Example:
        Window 4, 3 layers, cut 0, a prompt of 20 in one step: exact starts 0, 13, 16, bounded
        0, 16, 16.
    """
    starts = None if batch.replay is None else batch.replay.layer_starts
    if trim is None or batch.may_trim is None or not bool(batch.may_trim.any()):
        return starts
    if starts is None:
        starts = torch.zeros(batch.num_reqs, trim.num_layers, dtype=torch.int32)
    elif starts.shape[1] != trim.num_layers:
        raise ValueError(
            f"layer_starts expected {trim.num_layers} layers, got {starts.shape[1]}; replay and "
            "trim are of one model"
        )
    trimmed = starts.clone()
    for layer in range(trim.cut + 1, trim.num_layers):
        first = batch.seq_lens - trim.num_kept(layer)
        raised = batch.may_trim & (first > batch.num_computed_tokens)
        trimmed[:, layer] = torch.where(raised, starts[:, layer].maximum(first), starts[:, layer])
    return trimmed


def drop_idle_bounds(batch: StepBatch, starts: Tensor, sliding_window: int) -> Tensor:
    """The same starts, 0 where a start bounds neither the rows nor the windows of this step.

    A request that has long left its hit then runs like any other, so that layers share their rows.
    """
    first_read = batch.num_computed_tokens - sliding_window + 1
    return torch.where(starts <= first_read[:, None], 0, starts)
