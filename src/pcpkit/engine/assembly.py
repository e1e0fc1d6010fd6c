"""Puts a scheduler together: blocks, prefix cache, replay policy, snapshots, limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pcpkit.cache.blocks import BlockPool
from pcpkit.cache.prefix import PrefixCache, PrefixEvent, PrefixStats
from pcpkit.cache.replay import NoReplay, ReplayPolicy, ReplayShape
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.config import ModelConfig
from pcpkit.engine.adoption import PrefixReader
from pcpkit.engine.publishing import PrefixPublisher
from pcpkit.engine.row_budget import RankLimit
from pcpkit.engine.scheduler import Scheduler, SchedulerLimits
from pcpkit.engine.sizing import EngineConfig, TrimSetting
from pcpkit.engine.tables import CacheTables
from pcpkit.plan.partition import PartitionStrategy
from pcpkit.plan.trim import Trim


class MakePrefixCache(Protocol):
    """Makes the prefix cache over an engine's blocks, as `HashPrefixCache` does."""

    def __call__(
        self, pool: BlockPool, block_size: int, *, observe: Callable[[PrefixEvent], None]
    ) -> PrefixCache: ...


def make_scheduler(
    config: EngineConfig,
    shape: ReplayShape,
    tables: CacheTables,
    *,
    replay: ReplayPolicy,
    snapshots: SnapshotStore | None,
    make_prefix_cache: MakePrefixCache,
    observe_prefix: Callable[[PrefixEvent], None],
    pcp_size: int,
    strategy: PartitionStrategy,
    stats: PrefixStats,
) -> Scheduler:
    """The scheduler of an engine; its parts are described in `Engine` and `Scheduler`."""
    prefix: PrefixCache | None = None
    if not isinstance(replay, NoReplay):
        prefix = make_prefix_cache(tables.blocks, config.block_size, observe=observe_prefix)
    rank_limit = None
    if config.max_rows_per_rank is not None:
        rank_limit = RankLimit(max_rows=config.max_rows_per_rank, size=pcp_size, strategy=strategy)
    return Scheduler(
        tables,
        SchedulerLimits(
            max_rows=config.chunk_tokens,
            rank=rank_limit,
            num_spare_blocks=config.num_spare_blocks,
            reserve=config.reserve,
        ),
        PrefixReader(prefix, replay, shape, snapshots, trims=config.trim != "off"),
        PrefixPublisher(prefix, config.block_size),
        snapshots,
        stats,
    )


def check_snapshots(replay: ReplayPolicy, snapshots: SnapshotStore | None) -> None:
    """Refuse a policy without the store it uses, and a store that nothing uses.

    Raises:
        ValueError: either of them.
    """
    name = type(replay).__name__
    if replay.uses_snapshots and snapshots is None:
        raise ValueError(f"snapshots expected a store for {name}, got None; make a SnapshotStore")
    if snapshots is not None and not replay.uses_snapshots:
        raise ValueError(f"snapshots expected None for {name}, got a store; use SnapshotReplay")


def make_trim(setting: TrimSetting, model: ModelConfig) -> Trim | None:
    """How rows are trimmed in this model; None for `off`."""
    if setting == "off":
        return None
    return Trim(
        mode=setting,
        cut=model.kv_source_layer_ids[-1],
        num_layers=model.num_hidden_layers,
        sliding_window=model.sliding_window,
    )
