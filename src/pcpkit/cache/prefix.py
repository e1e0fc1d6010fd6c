"""Which blocks hold the compressed KV of a known prefix.

The name of a full block is a digest over all tokens up to its end:

    root = digest(TAG | salt in UTF-8),  h[i] = digest(h[i - 1] | token ids of block i as uint32 LE)

with h[-1] = root. It depends on tokens and salt only, so it is the same in every process, on every
rank, for any chunking, before and after preemption. The salt enters once and separates tenants
throughout the chain. A partly filled block has no name. Two prefixes are taken for equal when their
digests are, so a digest below 256 bits is refused.

A block is published only after its bytes are written, and carries whether they equal a cold run's
(`exact`) or come from a run after an approximate replay. Blocks are never swapped for others: two
requests that computed the same prefix leave two blocks under one name.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pcpkit.cache.blocks import BlockPool

MIN_DIGEST_BYTES = 32
"""Digests decide alone whether two prefixes are equal: 256 bits make a collision infeasible."""
CHAIN_TAG = b"pcpkit prefix chain 1\n"
"""Starts every chain; changes when the encoding does."""


class Digest(Protocol):
    """What `hashlib` constructors return, as far as it is used here."""

    @property
    def digest_size(self) -> int: ...

    def digest(self) -> bytes: ...


DigestFunction = Callable[[bytes], Digest]
"""A `hashlib` constructor: `hashlib.sha256`, `hashlib.sha3_256`, `hashlib.blake2b`."""


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    salt: str = "",
    *,
    digest_function: DigestFunction = hashlib.sha256,
) -> list[bytes]:
    """Names of the full blocks of a sequence.

    Args:
        token_ids: ids in 0 .. 2**32 - 1 (Python or numpy integers).
        block_size: tokens of a block.
        salt: sequences with different salts share no block.
        digest_function: of at least 256 bits.

    Returns:
        One digest for each full block; the tokens after the last one do not matter.

    Raises:
        ValueError: an id is out of range, `block_size` < 1, or the digest is too short.

    Example:
        >>> names = block_hashes([5, 6, 7, 8, 9], 2)
        >>> len(names), names == block_hashes([5, 6, 7, 8], 2)
        (2, True)
        >>> names[1] == block_hashes([0, 0, 7, 8], 2)[1]  # the same block after another prefix
        False
    """
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, block_size, salt, digest_function=digest_function)
    return hashes


def extend_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    salt: str = "",
    *,
    digest_function: DigestFunction = hashlib.sha256,
) -> None:
    """Append the names of the blocks that have become full; for a sequence that grows.

    Args:
        hashes: names of the first blocks of this sequence, mutated.
        token_ids: the whole sequence so far; ids of named blocks are not read.
        block_size, salt, digest_function: the same in every call; see `block_hashes`.

    Raises:
        ValueError: as `block_hashes`, or `token_ids` is shorter than what `hashes` name; `hashes`
            is unchanged.

    Example:
        >>> hashes = block_hashes([5, 6, 7], 2)
        >>> extend_hashes(hashes, [5, 6, 7, 8], 2)
        >>> hashes == block_hashes([5, 6, 7, 8], 2)
        True
    """
    if block_size < 1:
        raise ValueError(f"block_size expected >= 1, got {block_size}; use the CacheConfig's")
    _check_digest_function(digest_function)
    num_full = len(token_ids) // block_size
    if num_full < len(hashes):
        raise ValueError(
            f"token_ids expected >= {len(hashes) * block_size} tokens (those already named), "
            f"got {len(token_ids)}; pass the whole sequence"
        )
    parent = hashes[-1] if hashes else digest_function(CHAIN_TAG + salt.encode()).digest()
    added: list[bytes] = []
    for index in range(len(hashes), num_full):
        block = token_ids[index * block_size : (index + 1) * block_size]
        parent = digest_function(parent + _encode(block)).digest()
        added.append(parent)
    hashes += added


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """Cached blocks of a prefix, from its first block on without a gap."""

    blocks: tuple[int, ...]
    exact: bool
    """Every block equals a cold run's; true for no block."""
    num_refused: int
    """Cached blocks that would have followed, had the first of them an exact copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixEvent:
    """A block entered or left the cache."""

    kind: Literal["stored", "evicted"]
    block_hash: bytes
    block: int
    exact: bool


class PrefixCache(Protocol):
    """Finds blocks by the tokens they hold. `HashPrefixCache` is the default.

    What it answers must depend only on the calls so far: every rank asks for itself.
    """

    def extend_hashes(self, hashes: list[bytes], token_ids: Sequence[int], salt: str = "") -> None:
        """Append to `hashes` (mutated) the names of newly full blocks of a growing sequence."""
        ...

    def match(self, hashes: Sequence[bytes], *, exact_only: bool) -> PrefixMatch:
        """The longest run of cached blocks from the first one on; changes nothing.

        The caller acquires the blocks before it allocates any: until then they can be evicted.
        """
        ...

    def publish(self, block: int, block_hash: bytes, *, exact: bool) -> None:
        """Let others find a held block all of whose bytes are written."""
        ...

    def forget(self, block: int) -> None:
        """Let nobody find a published block any more."""
        ...

    def check_invariants(self) -> None:
        """Assert that index and pool agree."""
        ...


@dataclass(slots=True)
class _Copies:
    """Blocks under one name, in order of publication (dicts as ordered sets)."""

    exact: dict[int, None]
    approximate: dict[int, None]


class HashPrefixCache:
    """An index from block hash to blocks over one `BlockPool`.

    It takes the pool's `on_evict`: a block that is allocated anew is forgotten at that moment.

    Args:
        pool: deals the blocks; its `on_evict` must be free, and is set.
        block_size: tokens of a block.
        digest_function: names blocks, see `block_hashes`.
        observe: called after each change; must not raise.

    Raises:
        ValueError: the digest has fewer than 256 bits, the block size is not positive, or the
            pool has another `on_evict`.

    Example:
        >>> pool = BlockPool(4)
        >>> cache = HashPrefixCache(pool, block_size=2)
        >>> hashes = block_hashes([5, 6, 7, 8], 2)
        >>> first = pool.allocate(2)
        >>> cache.publish(first[0], hashes[0], exact=True)  # its two tokens are computed
        >>> cache.match(hashes, exact_only=True).blocks
        (0,)
        >>> pool.free(first)
        >>> taken = pool.allocate(4)  # evicts it
        >>> cache.match(hashes, exact_only=True).blocks
        ()
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        digest_function: DigestFunction = hashlib.sha256,
        observe: Callable[[PrefixEvent], None] | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size expected >= 1, got {block_size}; use the CacheConfig's")
        self._digest_size = _check_digest_function(digest_function)
        if pool.on_evict is not None:
            raise ValueError(
                f"pool.on_evict expected None, got {pool.on_evict}; one prefix cache a pool"
            )
        self._pool = pool
        self._block_size = block_size
        self._digest_function = digest_function
        self._observe = observe
        self._copies: dict[bytes, _Copies] = {}
        self._hash_of: dict[int, bytes] = {}
        pool.on_evict = self.forget

    def __len__(self) -> int:
        """Published blocks."""
        return len(self._hash_of)

    def extend_hashes(self, hashes: list[bytes], token_ids: Sequence[int], salt: str = "") -> None:
        """Append to `hashes` (mutated) the names of newly full blocks of a growing sequence.

        Raises:
            ValueError: as the function of this name.
        """
        extend_hashes(
            hashes, token_ids, self._block_size, salt, digest_function=self._digest_function
        )

    def match(self, hashes: Sequence[bytes], *, exact_only: bool) -> PrefixMatch:
        """The longest run of cached blocks from the first one on; changes nothing.

        The caller acquires the blocks before it allocates any: until then they can be evicted.

        Args:
            hashes: names of the first blocks of a sequence; leave out the block of the last token.
            exact_only: end before the first block that has no exact copy.

        Returns:
            Of several copies, an exact one before an approximate one, then the oldest.
        """
        blocks: list[int] = []
        exact = True
        num_refused = 0
        for block_hash in hashes:
            copies = self._copies.get(block_hash)
            if copies is None:
                break
            if num_refused or (exact_only and not copies.exact):
                num_refused += 1
                continue
            exact = exact and bool(copies.exact)
            blocks.append(next(iter(copies.exact or copies.approximate)))
        return PrefixMatch(blocks=tuple(blocks), exact=exact, num_refused=num_refused)

    def publish(self, block: int, block_hash: bytes, *, exact: bool) -> None:
        """Let others find a held block all of whose bytes are written; the pool keeps them.

        Args:
            block: held and not published.
            block_hash: of the tokens up to the end of the block.
            exact: the bytes equal a cold run's.

        Raises:
            ValueError: the block is free or published already, or the digest has another size.
        """
        if len(block_hash) != self._digest_size:
            raise ValueError(
                f"block_hash expected {self._digest_size} bytes, got {len(block_hash)}; "
                "take it from extend_hashes()"
            )
        self._pool.mark_cached(block)
        copies = self._copies.setdefault(block_hash, _Copies({}, {}))
        (copies.exact if exact else copies.approximate)[block] = None
        self._hash_of[block] = block_hash
        self._report("stored", block_hash, block, exact)

    def forget(self, block: int) -> None:
        """Let nobody find a published block any more.

        The pool calls this for a block that it deals anew. A caller may, too, for a block whose
        bytes turn out wrong; if it is free, it is reused first.

        Raises:
            ValueError: the block is not published.
        """
        if block not in self._hash_of:
            raise ValueError(f"block expected a published one, got {block}; publish() comes first")
        if self._pool.is_cached(block):
            self._pool.mark_uncached(block)
        block_hash = self._hash_of.pop(block)
        copies = self._copies[block_hash]
        exact = block in copies.exact
        del (copies.exact if exact else copies.approximate)[block]
        if not copies.exact and not copies.approximate:
            del self._copies[block_hash]
        self._report("evicted", block_hash, block, exact)

    def check_invariants(self) -> None:
        """Assert that both directions of the index and the pool's cached blocks agree."""
        indexed = {
            block: block_hash
            for block_hash, copies in self._copies.items()
            for block in (*copies.exact, *copies.approximate)
        }
        assert indexed == self._hash_of, "the two directions of the index disagree"
        count = sum(len(one.exact) + len(one.approximate) for one in self._copies.values())
        assert count == len(indexed), "a block stands under two names"
        assert all(one.exact or one.approximate for one in self._copies.values()), "an empty name"
        cached = {block for block in range(self._pool.num_blocks) if self._pool.is_cached(block)}
        assert cached == set(indexed), "published blocks and the pool's cached blocks disagree"

    def _report(
        self, kind: Literal["stored", "evicted"], block_hash: bytes, block: int, exact: bool
    ) -> None:
        if self._observe is not None:
            event = PrefixEvent(kind=kind, block_hash=block_hash, block=block, exact=exact)
            self._observe(event)


@dataclass(slots=True, kw_only=True)
class PrefixStats:
    """Counters since the start. The engine adds a request once, at its first admission: what a
    preempted request finds again of its own is no reuse.
    """

    num_queries: int = 0
    """Requests that looked up."""
    num_query_tokens: int = 0
    """Their tokens."""
    num_hit_tokens: int = 0
    """Tokens adopted."""
    num_replayed_rows: int = 0
    """Rows below an adopted hit that run again."""
    num_computed_rows: int = 0
    """Rows that run, replayed ones included."""
    num_refused_blocks: int = 0
    """Blocks that were there, but approximate, for a policy that adopts only exact ones."""
    num_evictions: int = 0
    """Published blocks that were dealt anew."""

    @property
    def hit_ratio(self) -> float:
        """Adopted part of the tokens, 0 before the first query."""
        return self.num_hit_tokens / self.num_query_tokens if self.num_query_tokens else 0.0


def _encode(token_ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ValueError(
            f"token_ids expected integers in 0 .. 2**32 - 1, got {list(token_ids)[:8]} ({error}); "
            "use the tokenizer's ids"
        ) from error


def _check_digest_function(digest_function: DigestFunction) -> int:
    """Bytes of a digest."""
    size = digest_function(b"").digest_size
    if size < MIN_DIGEST_BYTES:
        raise ValueError(
            f"digest_function expected >= {8 * MIN_DIGEST_BYTES} bits, got {8 * size}; "
            "use hashlib.sha256"
        )
    return size
