"""What a step leaves behind for others: full blocks in the prefix cache.

A block is published after the step that wrote its last byte, never before: until then another
request could take over bytes that do not exist, or that an abort keeps from ever existing.
"""

from __future__ import annotations

from pcpkit.cache.prefix import PrefixCache
from pcpkit.engine.request import RequestState


class PrefixPublisher:
    """Publishes the blocks that running requests fill.

    Args:
        prefix: None publishes nothing.
        block_size: tokens a compressed block.
    """

    def __init__(self, prefix: PrefixCache | None, block_size: int) -> None:
        self._prefix = prefix
        self._block_size = block_size

    def publish(self, state: RequestState) -> None:
        """Publish what is complete and was not: adopted blocks are in the cache already.

        The blocks are as exact as the request's start: what follows an approximate replay is
        approximate.
        """
        if self._prefix is None:
            return
        assert state.stay is not None, "only a running request has blocks"
        stay, complete = state.stay, state.num_computed_tokens // self._block_size
        if complete <= stay.num_published:
            return
        self._prefix.extend_hashes(state.hashes, state.token_ids, state.request.cache_salt)
        for index in range(stay.num_published, complete):
            self._prefix.publish(
                stay.tables.blocks[index], state.hashes[index], exact=stay.replay.exact
            )
        stay.num_published = complete

    def check_invariants(self, running: list[RequestState]) -> None:
        """Assert that nothing is published that is not computed."""
        if self._prefix is None:
            return
        self._prefix.check_invariants()
        for state in running:
            assert state.stay is not None, "only a running request has blocks"
            adopted = state.stay.replay.num_cached_tokens
            computed = max(state.num_computed_tokens, adopted)
            published = state.stay.num_published * self._block_size
            assert adopted <= published <= computed, "a block is published before it is computed"
