"""Pair links of a layer that runs all rows, from a batch and a partition alone."""

from __future__ import annotations

import torch

from pcpkit.plan.batch import StepBatch, cached_tokens, query_rows
from pcpkit.plan.links import PairLinks, link_layers
from pcpkit.plan.partition import Partition
from pcpkit.plan.running import running_segments


def link_pairs(batch: StepBatch, partition: Partition, rank: int, ring_rows: int) -> PairLinks:
    """The links of `rank`; groups below the cached tokens are not closed."""
    rows, mine = query_rows(batch), partition.rows[rank]
    positions, cached = rows.positions[mine], cached_tokens(batch)[rows.requests[mine]]
    closing = ((positions % 2 == 1) & (positions >= cached)).nonzero()[:, 0]
    every = running_segments(partition, torch.zeros(1, batch.num_reqs, dtype=torch.int64))
    (links,) = link_layers(batch, partition, rank, ring_rows, every, closing, closing[None])
    return links
