"""How many rows a step may still take: over all ranks, and on the rank that gets most.

Rows of a step are dealt by a partition strategy, which gives ranks different numbers of them. With
a limit a rank the scheduler deals what it has chosen so far, and one request more, before it
accepts that request's rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pcpkit.plan.partition import PartitionStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimit:
    """At most `max_rows` rows of a step on any of `size` ranks, dealt by `strategy`."""

    max_rows: int
    size: int
    strategy: PartitionStrategy

    def excess(self, query_lens: list[int], is_prefilling: list[bool]) -> int:
        """Rows above the limit on the rank that gets most; negative if there is room."""
        dealt = self.strategy(query_lens, is_prefilling, self.size)
        fullest = max(sum(segment.num_rows for segment in owned) for owned in dealt)
        return fullest - self.max_rows


@dataclass(slots=True, kw_only=True, eq=False)
class RowBudget:
    """Budget of one step; `take` uses it up.

    Example:
        Two ranks of at most 3 rows: 5 rows of a prompt fit, and a decode row beside them.
    """

    left: int
    """Rows over all ranks."""
    limit: RankLimit | None = None
    query_lens: list[int] = field(default_factory=list[int])
    """Rows taken so far, by request in batch order."""
    is_prefilling: list[bool] = field(default_factory=list[bool])

    def room(self, wanted: int, is_prefilling: bool) -> int:
        """How many of a request's next `wanted` rows fit, as the next entry of the batch."""
        count = min(wanted, self.left)
        if self.limit is None:
            return count
        free = self.limit.size * self.limit.max_rows - sum(self.query_lens)
        count = min(count, free)
        while count > 0:
            lengths, flags = [*self.query_lens, count], [*self.is_prefilling, is_prefilling]
            excess = self.limit.excess(lengths, flags)
            if excess <= 0:
                return count
            count -= excess
        return 0

    def take(self, count: int, is_prefilling: bool) -> None:
        """Use rows that `room` allowed."""
        assert 0 < count <= self.left, "more rows than there is room for"
        self.left -= count
        self.query_lens.append(count)
        self.is_prefilling.append(is_prefilling)
