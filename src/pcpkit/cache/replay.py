"""What a prefix-cache hit still has to compute, and whether the answer equals a cold run's.

A hit of H tokens brings the compressed KV and index keys of [0, H). It brings no window KV: that is
kept for running requests only. The first row after the hit reads the window records of the W - 1
positions before it, in each of the L layers, so something has to put them there. A policy decides
what; all of them leave the cached bytes below H as they are.

- `NoReplay`: nothing is adopted.
- `BoundedReplay`: the last W tokens run again through all layers, and read no window record from
  before their start. The published rule: cheap, and an approximation from layer 1 on.
- `ExactReplay`: each layer runs the rows that the layer above it needs. The record of row p in
  layer l is made from layer l - 1's output of p, and that from the records of p - W + 1 .. p in
  layer l - 1; so layer l starts at H - (W - 1) * (L - l).
- `SnapshotReplay`: the first hit that ends at H does that, then keeps the window records before H;
  later hits that end there copy them back and compute nothing below H. A longer hit may copy them
  back too: it runs the rows from there to its own end in all layers, and keeps the records there.
  A prefill keeps those at its own end as well (the last full block before its last token), for
  whoever sends that prompt again or goes on from it.

All the cached prefix is adopted, or nothing: where the rows start does not change what is written.

Symbols: H `num_cached_tokens`, S `restore_at`, W `sliding_window`, L `num_layers`. All lengths are
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayShape:
    """What replay depends on.

    Raises:
        ValueError: a field is out of range.
    """

    num_layers: int
    """Layers that own window KV, >= 1."""
    sliding_window: int
    """Tokens a row sees in the window, its own included, >= 1."""
    block_size: int
    """Tokens of a cacheable block; even, so that no ratio-2 group straddles the end of a hit."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "sliding_window"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} expected >= 1, got {value}; take it from the ModelConfig")
        if self.block_size < 2 or self.block_size % 2:
            raise ValueError(
                f"block_size expected even and >= 2, got {self.block_size}; "
                "take it from the CacheConfig"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """How one request starts; it keeps its plan until it ends or is preempted.

    Raises:
        ValueError: the fields contradict one another.
    """

    num_cached_tokens: int
    """H: tokens whose compressed KV and index keys are adopted; 0 is a cold start."""
    layer_starts: tuple[int, ...]
    """Lowest position that runs in each layer, never falling from layer to layer, at most H. No
    window record below it is read in that layer. All 0 in a cold start. Behind a snapshot rows run
    from S on, and all the starts are where its records start, max(S - W + 1, 0)."""
    exact: bool
    """Whether all the request computes from H on equals a cold run bit for bit."""
    restore_at: int
    """S, whole blocks, at most H: the window records [S - W + 1, S) come from a snapshot, and rows
    run from S on; 0: none does."""
    capture: bool
    """Keep a snapshot at H, as soon as the rows below H are computed; not if it is restored."""

    def __post_init__(self) -> None:
        starts = self.layer_starts
        if not starts or starts[0] < 0 or starts[-1] > self.num_cached_tokens:
            raise ValueError(
                f"layer_starts expected positions in 0 .. {self.num_cached_tokens}, got {starts}; "
                "let a ReplayPolicy make the plan"
            )
        if any(left > right for left, right in pairwise(starts)):
            raise ValueError(
                f"layer_starts expected never to fall, got {starts}; "
                "a layer cannot run rows that the one before it did not"
            )
        if not 0 <= self.restore_at <= self.num_cached_tokens:
            raise ValueError(
                f"restore_at expected 0 .. {self.num_cached_tokens}, got {self.restore_at}; "
                "restore a snapshot of the adopted tokens"
            )
        if self.restore_at and not starts[0] == starts[-1] <= self.restore_at:
            raise ValueError(
                f"layer_starts expected one position up to {self.restore_at} in all layers, "
                f"got {starts}; a snapshot has the same records of every layer"
            )
        if not self.num_cached_tokens and (self.capture or not self.exact):
            raise ValueError(
                f"num_cached_tokens expected > 0 for {self}, got 0; use ReplayPlan.cold()"
            )
        if self.capture and self.restore_at == self.num_cached_tokens:
            raise ValueError(
                f"capture expected False where {self.restore_at} are restored, got True; "
                "it is stored already"
            )

    @classmethod
    def cold(cls, num_layers: int) -> ReplayPlan:
        """Nothing is adopted, every row runs in every layer."""
        return cls(
            num_cached_tokens=0,
            layer_starts=(0,) * num_layers,
            exact=True,
            restore_at=0,
            capture=False,
        )

    @property
    def start(self) -> int:
        """First position the request runs."""
        return self.restore_at or self.layer_starts[0]

    @property
    def num_replayed_rows(self) -> int:
        """Positions below H that run again, in one layer or more."""
        return self.num_cached_tokens - self.start


class ReplayPolicy(Protocol):
    """Decides what a hit computes; without state, so all ranks decide alike."""

    @property
    def exact_only(self) -> bool:
        """Whether it adopts only blocks whose bytes equal a cold run's."""
        ...

    @property
    def uses_snapshots(self) -> bool:
        """Whether `snapshot_tokens` matters and a plan may have `restore_at` or `capture`."""
        ...

    @property
    def keeps_prompt_ends(self) -> bool:
        """Whether a prefill, hit or not, keeps a snapshot at the last full block before its last
        token; never if it looks nothing up (``logits="all"``) or the engine trims."""
        ...

    def plan(
        self, num_hit_tokens: int, shape: ReplayShape, *, snapshot_tokens: int, blocks_exact: bool
    ) -> ReplayPlan:
        """The plan of a request whose cached prefix has `num_hit_tokens` tokens.

        Args:
            num_hit_tokens: a multiple of `block_size` below the length of the request; 0: no hit.
                The plan adopts all of it or nothing.
            shape: of the model and its caches.
            snapshot_tokens: the longest prefix of the hit, in whole blocks, before whose end the
                window records are in the snapshot store; 0: none.
            blocks_exact: every block of the hit equals a cold run's.

        Raises:
            ValueError: the hit is negative or not aligned, or not exact although `exact_only`; the
                snapshot is not aligned or not in the hit.
        """
        ...


@dataclass(frozen=True, slots=True)
class NoReplay:
    """Prefix caching off: every request is cold."""

    exact_only = True
    uses_snapshots = False
    keeps_prompt_ends = False

    def plan(
        self, num_hit_tokens: int, shape: ReplayShape, *, snapshot_tokens: int, blocks_exact: bool
    ) -> ReplayPlan:
        """Cold; see `ReplayPolicy.plan`."""
        _check_hit(num_hit_tokens, snapshot_tokens, shape)
        return ReplayPlan.cold(shape.num_layers)


@dataclass(frozen=True, slots=True)
class BoundedReplay:
    """Run the last W tokens of the hit again; a hit of at most W tokens is not worth adopting.

    Example:
        >>> shape = ReplayShape(num_layers=3, sliding_window=128, block_size=64)
        >>> plan = BoundedReplay().plan(256, shape, snapshot_tokens=0, blocks_exact=True)
        >>> plan.layer_starts, plan.exact, rows_to_compute(plan, 300)
        ((128, 128, 128), False, 172)
    """

    exact_only = False
    uses_snapshots = False
    keeps_prompt_ends = False

    def plan(
        self, num_hit_tokens: int, shape: ReplayShape, *, snapshot_tokens: int, blocks_exact: bool
    ) -> ReplayPlan:
        """Start at H - W in every layer; see `ReplayPolicy.plan`."""
        _check_hit(num_hit_tokens, snapshot_tokens, shape)
        if num_hit_tokens <= shape.sliding_window:
            return ReplayPlan.cold(shape.num_layers)
        return ReplayPlan(
            num_cached_tokens=num_hit_tokens,
            layer_starts=(num_hit_tokens - shape.sliding_window,) * shape.num_layers,
            exact=False,
            restore_at=0,
            capture=False,
        )


@dataclass(frozen=True, slots=True)
class ExactReplay:
    """Run exactly the rows of each layer that the window records before H depend on.

    A hit that no layer gains from (H < W) is cold.

    Example:
        >>> shape = ReplayShape(num_layers=3, sliding_window=5, block_size=8)
        >>> plan = ExactReplay().plan(16, shape, snapshot_tokens=0, blocks_exact=True)
        >>> plan.layer_starts, plan.exact
        ((4, 8, 12), True)
        >>> rows_to_compute(plan, 20), row_layers(plan, 20)  # cold: 20 rows, 60 row-layers
        (16, 36)
    """

    exact_only = True
    uses_snapshots = False
    keeps_prompt_ends = False

    def plan(
        self, num_hit_tokens: int, shape: ReplayShape, *, snapshot_tokens: int, blocks_exact: bool
    ) -> ReplayPlan:
        """Start at max(0, H - (W - 1) * (L - l)) in layer l; see `ReplayPolicy.plan`."""
        _check_hit(num_hit_tokens, snapshot_tokens, shape)
        _check_exact(num_hit_tokens, blocks_exact)
        return _dependency_cone(num_hit_tokens, shape, capture=False)


@dataclass(frozen=True, slots=True)
class SnapshotReplay:
    """Restore the last window records that are stored, or replay exactly, and store those before H.

    Whichever runs fewer rows, summed over the layers. A hit of fewer than W tokens without a
    snapshot is cold, and leaves none at its end unless its prompt ends there.

    Args:
        keeps_prompt_ends: see `ReplayPolicy`. Off, only hits leave snapshots: less to copy and to
            keep where no prompt comes again and none is gone on from.

    Example:
        >>> shape = ReplayShape(num_layers=3, sliding_window=5, block_size=8)
        >>> first = SnapshotReplay().plan(16, shape, snapshot_tokens=0, blocks_exact=True)
        >>> first.layer_starts, first.capture
        ((4, 8, 12), True)
        >>> later = SnapshotReplay().plan(16, shape, snapshot_tokens=16, blocks_exact=True)
        >>> later.layer_starts, later.restore_at, later.start, later.capture
        ((12, 12, 12), 16, 16, False)
        >>> longer = SnapshotReplay().plan(24, shape, snapshot_tokens=16, blocks_exact=True)
        >>> longer.layer_starts, longer.start, longer.capture  # 3 x 8 rows again, as in the cone
        ((12, 12, 12), 16, True)
    """

    exact_only = True
    uses_snapshots = True
    keeps_prompt_ends: bool = True

    def plan(
        self, num_hit_tokens: int, shape: ReplayShape, *, snapshot_tokens: int, blocks_exact: bool
    ) -> ReplayPlan:
        """Restore at S, or `ExactReplay`'s plan with `capture`; see `ReplayPolicy.plan`."""
        _check_hit(num_hit_tokens, snapshot_tokens, shape)
        _check_exact(num_hit_tokens, blocks_exact)
        cone = _dependency_cone(num_hit_tokens, shape, capture=True)
        if not snapshot_tokens:
            return cone
        restoring = ReplayPlan(
            num_cached_tokens=num_hit_tokens,
            layer_starts=(max(snapshot_tokens - shape.sliding_window + 1, 0),) * shape.num_layers,
            exact=True,
            restore_at=snapshot_tokens,
            capture=snapshot_tokens < num_hit_tokens,
        )
        # From the hit on both run every row, so any length tells which one does less.
        some_length = num_hit_tokens + 1
        if row_layers(restoring, some_length) <= row_layers(cone, some_length):
            return restoring
        return cone


def rows_to_compute(plan: ReplayPlan, num_tokens: int) -> int:
    """Rows that a request of `num_tokens` tokens runs in its first layer.

    Raises:
        ValueError: the plan adopts all tokens or more; the last one must run to give logits.
    """
    _check_length(plan, num_tokens)
    return num_tokens - plan.start


def row_layers(plan: ReplayPlan, num_tokens: int) -> int:
    """Rows summed over the layers: the work that a request of `num_tokens` tokens is.

    Raises:
        ValueError: as `rows_to_compute`.
    """
    _check_length(plan, num_tokens)
    return sum(num_tokens - max(start, plan.start) for start in plan.layer_starts)


def _dependency_cone(num_hit_tokens: int, shape: ReplayShape, *, capture: bool) -> ReplayPlan:
    reach = shape.sliding_window - 1
    starts = tuple(
        max(0, num_hit_tokens - reach * (shape.num_layers - layer))
        for layer in range(shape.num_layers)
    )
    if starts[-1] == 0:
        return ReplayPlan.cold(shape.num_layers)
    return ReplayPlan(
        num_cached_tokens=num_hit_tokens,
        layer_starts=starts,
        exact=True,
        restore_at=0,
        capture=capture,
    )


def _check_hit(num_hit_tokens: int, snapshot_tokens: int, shape: ReplayShape) -> None:
    if num_hit_tokens < 0 or num_hit_tokens % shape.block_size:
        raise ValueError(
            f"num_hit_tokens expected a multiple of block_size ({shape.block_size}), "
            f"got {num_hit_tokens}; count whole blocks"
        )
    if not 0 <= snapshot_tokens <= num_hit_tokens or snapshot_tokens % shape.block_size:
        raise ValueError(
            f"snapshot_tokens expected a multiple of block_size ({shape.block_size}) up to "
            f"{num_hit_tokens}, got {snapshot_tokens}; look for snapshots in the hit"
        )


def _check_exact(num_hit_tokens: int, blocks_exact: bool) -> None:
    if num_hit_tokens and not blocks_exact:
        raise ValueError(
            "blocks_exact expected True for a policy with exact_only, got False; "
            "match with exact_only=True"
        )


def _check_length(plan: ReplayPlan, num_tokens: int) -> None:
    if num_tokens <= plan.num_cached_tokens:
        raise ValueError(
            f"num_tokens expected > {plan.num_cached_tokens} (num_cached_tokens), "
            f"got {num_tokens}; look up at most num_tokens - 1 tokens"
        )
