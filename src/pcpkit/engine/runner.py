"""Runs one StepBatch on this rank: partition, plan, forward, caches.

The engine above knows requests and no tensors of the model; the model below knows a plan and no
requests. Here a step is spread over the ranks of the model's PCP group, with no word between them:
each deals the rows of the same batch by the same rule, and takes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from pcpkit.cache.pool import CachePool, allocate_pool
from pcpkit.cache.snapshot import SnapshotPlace, SnapshotStore
from pcpkit.config import CacheConfig
from pcpkit.engine.continuity import ComputedTokens
from pcpkit.model.decoder import TextModel
from pcpkit.plan.batch import StepBatch
from pcpkit.plan.partition import (
    Partition,
    PartitionStrategy,
    levelled,
    make_partition,
    whole_batch,
)
from pcpkit.plan.step import plan_step
from pcpkit.plan.trim import Trim, layer_starts


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMove:
    """Window records of a request of the step, from or to the snapshot store."""

    request: int
    """Place in the batch."""
    key: bytes
    num_tokens: int
    """The records are those that the row at this position reads besides its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputedStep:
    """A step after its forward, for those who look at caches: blocks are still as planned."""

    request_ids: tuple[str, ...]
    batch: StepBatch
    partition: Partition
    """Rows of every PCP rank; the batch in its order on a model without others."""
    pool: CachePool
    logits: Tensor
    layer_starts: Tensor | None = None
    """(num_reqs, num_layers) int32: the first position that ran in each layer; a request's rows
    before it did not, and wrote no window record. None: all rows ran everywhere."""


StepObserver = Callable[[ComputedStep], None]
"""Is shown every step; must not change what it sees."""


def ignore_step(step: ComputedStep) -> None:
    """The observer that looks at nothing."""


class ModelRunner:
    """The model of one rank with its caches.

    Every rank of the model's groups runs the same batches in the same order. Afterwards all hold
    the same caches and get the same logits: each logit comes from the one rank that computed it, by
    a collective, so that whatever is decided from it is decided alike.

    Args:
        model: runs the forward.
        cache: sizes of the caches, which are allocated here.
        max_rows: rows of one step at most, over all requests and ranks.
        observe: is shown every step after its forward.
        strategy: deals the rows to the model's PCP ranks.
        snapshots: this rank's store, for steps that restore or keep window records.
        trim: how the rows are trimmed that a batch allows to be; None trims nothing.
    """

    def __init__(
        self,
        model: TextModel,
        cache: CacheConfig,
        *,
        max_rows: int,
        observe: StepObserver = ignore_step,
        strategy: PartitionStrategy = levelled,
        snapshots: SnapshotStore | None = None,
        trim: Trim | None = None,
    ) -> None:
        config = model.config
        self._model = model
        self._cache = cache
        self._observe = observe
        self._strategy = strategy
        self._snapshots = snapshots
        self._trim = trim
        self._computed = ComputedTokens(max_rows)
        self._pool = allocate_pool(config, cache, model.device)
        self._ratios = tuple(
            sorted({config.compress_ratio(layer) for layer in config.kv_source_layer_ids})
        )

    def run(
        self,
        batch: StepBatch,
        request_ids: tuple[str, ...],
        *,
        restores: Sequence[SnapshotMove] = (),
    ) -> Tensor:
        """Compute one step: writes the caches, returns its (num_logits, vocab) fp32 logits.

        Args:
            batch: the global batch, the same on every rank.
            request_ids: of its requests, in order.
            restores: snapshots to copy back before the forward, of requests that start.

        Raises:
            ValueError: the batch is inconsistent, too large, or does not continue what was computed
                (see `ComputedTokens.check`); no rank has computed anything then.
        """
        restored = {request_ids[move.request]: move.num_tokens for move in restores}
        self._computed.check(batch, request_ids, restored)
        partition = self._deal(batch)
        plan = plan_step(
            batch,
            ratios=self._ratios,
            block_size=self._cache.block_size,
            window_block_size=self._cache.window_block_size,
            ring_rows=self._cache.ring_rows,
            partition=partition,
            rank=self._model.groups.pcp.rank,
            sliding_window=self._model.config.sliding_window,
            trim=self._trim,
        ).to(self._model.device)
        self._restore(batch, restores)
        logits = self._model.forward(plan, self._pool)
        self._computed.advance(batch, request_ids)
        self._observe(
            ComputedStep(
                request_ids=request_ids,
                batch=batch,
                partition=partition,
                pool=self._pool,
                logits=logits,
                layer_starts=layer_starts(batch, self._trim),
            )
        )
        return logits

    def capture(self, batch: StepBatch, moves: Sequence[SnapshotMove]) -> None:
        """Keep window records of requests of the step that was run last.

        Args:
            batch: of that step; blocks are still as planned.
            moves: of requests that have computed so many tokens.
        """
        if moves:
            assert self._snapshots is not None, "a captured snapshot has a store"
            window = self._model.config.sliding_window
            self._snapshots.capture(_places(batch, moves), self._pool, sliding_window=window)

    def forget(self, request_id: str) -> None:
        """A request ended or lost its blocks; its id may start again."""
        self._computed.forget(request_id)

    def _restore(self, batch: StepBatch, moves: Sequence[SnapshotMove]) -> None:
        if moves:
            assert self._snapshots is not None, "a restored snapshot has a store"
            window = self._model.config.sliding_window
            self._snapshots.restore(_places(batch, moves), self._pool, sliding_window=window)

    def _deal(self, batch: StepBatch) -> Partition:
        lengths, size = batch.query_lens.tolist(), self._model.groups.pcp.size
        if size == 1:
            return whole_batch(lengths)
        return make_partition(lengths, batch.is_prefilling.tolist(), size, self._strategy)


def _places(batch: StepBatch, moves: Sequence[SnapshotMove]) -> list[SnapshotPlace]:
    return [
        SnapshotPlace(
            key=move.key,
            window_blocks=batch.window_block_table[move.request].tolist(),
            num_tokens=move.num_tokens,
        )
        for move in moves
    ]
