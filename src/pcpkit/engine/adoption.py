"""What a request can take over from the prefix cache now, and whether it should wait for more.

Pure decisions: nothing is acquired or changed here. They hold until the next allocation, so the
scheduler acts on them at once and asks again later (a request that is not admitted looks up anew).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from pcpkit.cache.prefix import PrefixCache
from pcpkit.cache.replay import ReplayPlan, ReplayPolicy, ReplayShape, row_layers
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.engine.request import RequestState, SnapshotPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """How a request would start."""

    plan: ReplayPlan
    blocks: tuple[int, ...] = ()
    """Blocks of the adopted tokens."""
    restore: SnapshotPoint | None = None
    captures: tuple[SnapshotPoint, ...] = ()
    """See `Stay`, both."""
    num_refused: int = 0
    """Cached blocks that an exact policy leaves alone because they are approximate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUnderWay:
    """A block that a running request is about to compute."""

    priority: int
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """What running requests will have left when they have computed the tokens they know."""

    blocks: dict[bytes, BlockUnderWay] = field(default_factory=dict[bytes, BlockUnderWay])
    """By name."""
    snapshots: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """Name of the block they stand at, and the best priority of who keeps them."""


class PrefixReader:
    """Looks prefixes up and plans how to use them.

    Args:
        prefix: finds blocks by hash; None switches prefix caching off.
        policy: what a hit computes.
        shape: of the model and its caches.
        snapshots: for a policy that uses them.
        trims: whether prefills may be trimmed: they have not the rows then, in the last layers,
            that a snapshot at the end of a prompt needs.
    """

    def __init__(
        self,
        prefix: PrefixCache | None,
        policy: ReplayPolicy,
        shape: ReplayShape,
        snapshots: SnapshotStore | None,
        *,
        trims: bool = False,
    ) -> None:
        self._prefix = prefix
        self._policy = policy
        self._shape = shape
        self._block_size = shape.block_size
        self._snapshots = snapshots if policy.uses_snapshots else None
        self._keeps_prompt_ends = policy.keeps_prompt_ends and not trims

    def reads(self, state: RequestState) -> bool:
        """Whether a request looks up at all: not if it needs the logits of every prompt row."""
        return self._prefix is not None and state.request.params.logits != "all"

    def find(self, state: RequestState) -> Adoption:
        """The best start with what is cached; a cold one if nothing is, or nothing helps."""
        if self._prefix is None or not self.reads(state):
            return Adoption(plan=ReplayPlan.cold(self._shape.num_layers))
        hashes = self._usable_hashes(state)
        match = self._prefix.match(hashes, exact_only=self._policy.exact_only)
        plan = self._plan(hashes[: len(match.blocks)], match.exact)
        return Adoption(
            plan=plan,
            blocks=match.blocks[: plan.num_cached_tokens // self._block_size],
            restore=self._point(hashes, plan.restore_at) if plan.restore_at else None,
            captures=self._captures(hashes, plan),
            num_refused=match.num_refused,
        )

    def should_wait(self, state: RequestState, adoption: Adoption, under_way: UnderWay) -> bool:
        """Whether what running requests are computing would make a better start.

        Two requests with one new prefix that arrive together would compute it twice otherwise, and
        two that rebuild the windows before one hit would do that twice. Only requests of the same
        or a better priority are waited for, so none waits for one that it should overtake.
        """
        if self._prefix is None or not self.reads(state):
            return False
        hashes, priority = self._usable_hashes(state), state.request.priority
        match = self._prefix.match(hashes, exact_only=self._policy.exact_only)
        length, exact = len(match.blocks), match.exact
        for name in hashes[length:]:
            block = under_way.blocks.get(name)
            if block is None or block.priority > priority:
                break
            if self._policy.exact_only and not block.exact:
                break
            length, exact = length + 1, exact and block.exact
        kept = {name for name, best in under_way.snapshots.items() if best <= priority}
        if self._snapshots is None or self._snapshots.is_too_small:
            # One that is refused is not worth waiting for.
            kept = set[bytes]()
        if length == len(match.blocks) and not kept:
            return False
        later = self._plan(hashes[:length], exact, kept)
        num_tokens = len(state.token_ids)
        return row_layers(later, num_tokens) < row_layers(adoption.plan, num_tokens)

    def under_way(self, running: Iterable[RequestState]) -> UnderWay:
        """What running requests know the tokens of and have not left yet."""
        found = UnderWay()
        for state in running:
            self.add_under_way(found, state)
        return found

    def add_under_way(self, found: UnderWay, state: RequestState) -> None:
        """Add what one running request will leave."""
        if self._prefix is None or state.stay is None:
            return
        self._prefix.extend_hashes(state.hashes, state.token_ids, state.request.cache_salt)
        own = BlockUnderWay(priority=state.request.priority, exact=state.stay.replay.exact)
        for name in state.hashes[state.stay.num_published :]:
            other = found.blocks.get(name, own)
            found.blocks[name] = BlockUnderWay(
                priority=min(own.priority, other.priority), exact=own.exact or other.exact
            )
        for point in state.stay.captures:
            best = found.snapshots.get(point.key, own.priority)
            found.snapshots[point.key] = min(own.priority, best)

    def _usable_hashes(self, state: RequestState) -> list[bytes]:
        """Names of the full blocks before the last token, which must run to give logits."""
        assert self._prefix is not None, "nothing is looked up without a prefix cache"
        self._prefix.extend_hashes(state.hashes, state.token_ids, state.request.cache_salt)
        return state.hashes[: (len(state.token_ids) - 1) // self._block_size]

    def _point(self, hashes: list[bytes], num_tokens: int) -> SnapshotPoint:
        return SnapshotPoint(key=hashes[num_tokens // self._block_size - 1], num_tokens=num_tokens)

    def _captures(self, hashes: list[bytes], plan: ReplayPlan) -> tuple[SnapshotPoint, ...]:
        """Snapshots to keep: at the end of the hit, and at that of all the full blocks."""
        wanted = {plan.num_cached_tokens} if plan.capture else set[int]()
        end = len(hashes) * self._block_size
        if self._keeps_prompt_ends and end > plan.restore_at:
            wanted.add(end)
        return tuple(self._point(hashes, num_tokens) for num_tokens in sorted(wanted))

    def _plan(self, hashes: list[bytes], exact: bool, kept: Collection[bytes] = ()) -> ReplayPlan:
        """The policy's plan for a cached prefix, with the last snapshot in it.

        `kept` are snapshots to plan with as if they were stored already.
        """
        store = self._snapshots
        stored = [name in kept or (store is not None and name in store) for name in hashes]
        last = max((place for place, is_stored in enumerate(stored, 1) if is_stored), default=0)
        return self._policy.plan(
            len(hashes) * self._block_size,
            self._shape,
            snapshot_tokens=last * self._block_size,
            blocks_exact=exact,
        )
