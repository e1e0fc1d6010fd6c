"""Batches and schedules as plain values, and the step batches they become; needs no hypothesis."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pcpkit.config import CacheConfig
from pcpkit.plan.batch import BatchReplay, StepBatch
from pcpkit.plan.partition import PartitionStrategy, Segment

NUM_SPARE_BLOCKS = 3
"""Blocks of a pool that belong to nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """What a request took over instead of computing it, and where each layer starts."""

    num_tokens: int
    """Even; their compressed KV and index keys are there."""
    layer_starts: tuple[int, ...]
    """First position that runs in each layer; ascending, at most ``num_tokens``."""
    donor: int | None = None
    """Request whose first blocks and ids these are; ``None``: blocks of its own, as if filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRows:
    """The rows of one request in one step."""

    request: int
    """Which request: its place in a single batch, its name in a schedule of several steps."""
    num_computed_tokens: int
    query_len: int
    is_prefilling: bool
    num_logits: int
    """Last rows that need logits."""
    hit: PrefixHit | None = None
    """The same in all steps of a request."""
    may_trim: bool = False

    @property
    def seq_len(self) -> int:
        """Tokens after the step."""
        return self.num_computed_tokens + self.query_len


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """Requests of one step, in batch order."""

    requests: tuple[RequestRows, ...]

    @property
    def query_lens(self) -> list[int]:
        """Rows by request."""
        return [rows.query_len for rows in self.requests]

    @property
    def is_prefilling(self) -> list[bool]:
        """Prefill flags by request."""
        return [rows.is_prefilling for rows in self.requests]

    @property
    def seq_lens(self) -> list[int]:
        """Tokens after the step by request."""
        return [rows.seq_len for rows in self.requests]

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(self.query_lens)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Request and position of every row, in batch order."""
        return [
            (rows.request, position)
            for rows in self.requests
            for position in range(rows.num_computed_tokens, rows.seq_len)
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Consecutive steps as planning takes them, and pools that they fit into."""

    rows: tuple[RaggedBatch, ...]
    batches: tuple[StepBatch, ...]
    """The same steps."""
    cache: CacheConfig
    token_ids: tuple[tuple[int, ...], ...]
    """By request, all its ids."""


def random_cover(seed: int) -> PartitionStrategy:
    """Prefills cut anywhere, every piece on any rank, decodes whole on any rank: still exact."""

    def deal(
        query_lens: Sequence[int], is_prefilling: Sequence[bool], size: int
    ) -> list[list[Segment]]:
        # Every rank has to come to the same cover.
        source = random.Random(repr((seed, list(query_lens), list(is_prefilling), size)))
        ranks: list[list[Segment]] = [[] for _ in range(size)]
        for request, (length, prefill) in enumerate(zip(query_lens, is_prefilling, strict=True)):
            inner = range(1, length) if prefill else ()
            cuts = sorted(source.sample(inner, source.randint(0, min(len(inner), 2 * size))))
            for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
                if start < stop:
                    segment = Segment(request=request, start=start, stop=stop)
                    source.choice(ranks).append(segment)
        return ranks

    return deal


def shuffled(seed: int, count: int) -> list[int]:
    """``count - 1 .. 0`` for seed 0, so that popping ascends; the same in another order else."""
    numbers = list(range(count - 1, -1, -1))
    if seed:
        random.Random(seed).shuffle(numbers)
    return numbers


def assemble_steps(
    rows: Sequence[RaggedBatch],
    layout: CacheConfig,
    *,
    seed: int = 0,
    vocab_size: int = 64,
    window_size: int | None = None,
    lookback: int = 3,
    token_ids: Sequence[Sequence[int]] | None = None,
) -> Steps:
    """Give steps token ids and blocks that keep a request's caches where they are.

    A block is mapped when a step needs it, and freed when its request has ended or starts again;
    whoever comes next takes it. Blocks of tokens computed before the first step are mapped, too. A
    request with a hit shares its donor's blocks, which are freed with the last of them.

    Args:
        rows: at least one row in each step.
        layout: block sizes; the numbers of blocks and requests are replaced by what is needed.
        seed: of token ids and of the order of physical blocks; 0 is ascending order.
        vocab_size: token ids are below it.
        window_size: window blocks that no row can read any more are freed; by default none.
        lookback: ids before the query that a step carries.
        token_ids: by request, at least as many ids as it computes; by default they are drawn.

    Raises:
        ValueError: a donor is no request of an earlier step, or the hit ends within a block.
    """
    names = [one.request for step in rows for one in step.requests]
    lengths = [0] * (max(names) + 1)
    for step in rows:
        for one in step.requests:
            lengths[one.request] = max(lengths[one.request], one.seq_len)
    cache = replace(
        layout,
        num_blocks=sum(-(-n // layout.block_size) for n in lengths) + NUM_SPARE_BLOCKS,
        num_window_blocks=sum(-(-n // layout.window_block_size) for n in lengths)
        + NUM_SPARE_BLOCKS,
        num_requests=len(lengths) + 1,
    )
    source = random.Random(seed)
    ids = [[source.randrange(vocab_size) for _ in range(count)] for count in lengths]
    if token_ids is not None:
        ids = [list(known[:count]) for known, count in zip(token_ids, lengths, strict=True)]
    for one in (one for step in rows for one in step.requests):
        if one.hit is not None and one.hit.donor is not None:
            count = one.hit.num_tokens
            ids[one.request][:count] = ids[one.hit.donor][:count]
    tables = _Tables(cache, seed, window_size)
    batches: list[StepBatch] = []
    for index, step in enumerate(rows):
        for one in step.requests:
            tables.prepare(one)
        batches.append(_assemble(step, tables, ids, lookback))
        later = {one.request for step in rows[index + 1 :] for one in step.requests}
        later |= {
            one.hit.donor
            for step in rows[index + 1 :]
            for one in step.requests
            if one.hit is not None and one.hit.donor is not None
        }
        # Those of this step first, then donors that nobody waits for any more.
        for request in dict.fromkeys([one.request for one in step.requests] + list(tables.held)):
            if request not in later:
                tables.release(request)
    return Steps(
        rows=tuple(rows),
        batches=tuple(batches),
        cache=cache,
        token_ids=tuple(tuple(known) for known in ids),
    )


@dataclass(slots=True, kw_only=True)
class _Held:
    """Blocks of one request."""

    ring_block: int
    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list[int])
    window_blocks: list[int] = field(default_factory=list[int])


class _Tables:
    """Who holds which block; freed blocks are taken first."""

    def __init__(self, cache: CacheConfig, seed: int, window_size: int | None) -> None:
        self._cache = cache
        self._window_size = window_size
        self._free = shuffled(seed, cache.num_blocks)
        self._free_window = shuffled(seed, cache.num_window_blocks)
        self._free_rings = shuffled(seed, cache.num_requests)
        self._num_holders: dict[int, int] = {}
        self.held: dict[int, _Held] = {}

    def prepare(self, rows: RequestRows) -> None:
        """Map what the rows of a step need, and free what they do not."""
        if rows.request in self.held and rows.num_computed_tokens == 0:
            self.release(rows.request)
        if rows.request not in self.held:
            blocks = self._adopted(rows.hit)
            self.held[rows.request] = _Held(ring_block=self._free_rings.pop(), blocks=blocks)
        held = self.held[rows.request]
        while len(held.blocks) * self._cache.block_size < rows.seq_len:
            held.blocks.append(self._free.pop())
            self._num_holders[held.blocks[-1]] = 1
        while len(held.window_blocks) * self._cache.window_block_size < rows.seq_len:
            held.window_blocks.append(self._free_window.pop())
        if self._window_size is not None:
            lowest = max(0, rows.num_computed_tokens - self._window_size + 1)
            for index in range(lowest // self._cache.window_block_size):
                if held.window_blocks[index] >= 0:
                    self._free_window.append(held.window_blocks[index])
                    held.window_blocks[index] = -1

    def _adopted(self, hit: PrefixHit | None) -> list[int]:
        """The donor's first blocks, from now on also this request's."""
        if hit is None or hit.donor is None:
            return []
        count, rest = divmod(hit.num_tokens, self._cache.block_size)
        donor = self.held.get(hit.donor)
        if rest or donor is None or len(donor.blocks) < count:
            raise ValueError(
                f"hit expected whole blocks of {self._cache.block_size} tokens that request "
                f"{hit.donor} computed before, got {hit.num_tokens} tokens; put the donor's steps "
                "first"
            )
        for block in donor.blocks[:count]:
            self._num_holders[block] += 1
        return donor.blocks[:count]

    def release(self, request: int) -> None:
        """Free everything that only this request holds."""
        held = self.held.pop(request)
        for block in held.blocks:
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free.append(block)
        self._free_window += [block for block in held.window_blocks if block >= 0]
        self._free_rings.append(held.ring_block)


def _assemble(
    step: RaggedBatch, tables: _Tables, ids: Sequence[Sequence[int]], lookback: int
) -> StepBatch:
    held = [tables.held[one.request] for one in step.requests]
    before = [list(ids[one.request][: one.num_computed_tokens]) for one in step.requests]
    return StepBatch(
        query_start_loc=_prefix_sums(step.query_lens),
        num_computed_tokens=_int32([one.num_computed_tokens for one in step.requests]),
        is_prefilling=torch.tensor(step.is_prefilling, dtype=torch.bool),
        token_ids=torch.tensor([ids[name][position] for name, position in step.places]),
        lookback_token_ids=torch.tensor(
            [[*history[::-1], *[-1] * lookback][:lookback] for history in before], dtype=torch.int64
        ).reshape(len(before), lookback),
        block_table=_padded([one.blocks for one in held]),
        window_block_table=_padded([one.window_blocks for one in held]),
        ring_blocks=_int32([one.ring_block for one in held]),
        num_logits=_int32([one.num_logits for one in step.requests]),
        replay=_replay([one.hit for one in step.requests]),
        may_trim=torch.tensor([one.may_trim for one in step.requests])
        if any(one.may_trim for one in step.requests)
        else None,
    )


def _replay(hits: Sequence[PrefixHit | None]) -> BatchReplay | None:
    num_layers = max((len(hit.layer_starts) for hit in hits if hit is not None), default=0)
    if num_layers == 0:
        return None
    cold = PrefixHit(num_tokens=0, layer_starts=(0,) * num_layers)
    every = [hit or cold for hit in hits]
    return BatchReplay(
        num_cached_tokens=_int32([hit.num_tokens for hit in every]),
        layer_starts=_int32([hit.layer_starts for hit in every]),
    )


def _int32(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _prefix_sums(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(len(row) for row in rows)
    return _int32([[*row, *[-1] * (width - len(row))] for row in rows])
