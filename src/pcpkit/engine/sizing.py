"""Sizes of the cache pools that an engine needs so that no running request ever waits for a block.

Symbols: R requests at once, W sliding window, B tokens a window block, C rows a step (all requests
together).
"""

from __future__ import annotations

from dataclasses import dataclass

from pcpkit.config import CacheConfig, CompressedFormat, ModelConfig
from pcpkit.config_rules import check_number

RING_ROWS = 8
"""Rows of a compressor ring where no draft model asks for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of an engine. Raises ConfigError for a number below 1."""

    chunk_tokens: int = 512
    """Rows of one step at most, over all requests; a longer prompt takes several steps."""
    max_requests: int = 8
    """Requests that run at once; more of them wait."""
    num_blocks: int | None = None
    """Compressed blocks; None is enough for `max_requests` requests of the longest length."""
    block_size: int = 64
    """Tokens a block of compressed KV and index keys."""
    window_block_size: int = 32
    """Tokens a block of window KV."""
    compressed_format: CompressedFormat = "nvfp4"
    """Record of compressed KV: `nvfp4`, the released one, or `mxfp8`, which loses less."""

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "max_requests", "block_size", "window_block_size"):
            check_number(name, getattr(self, name), "int", 1)
        if self.num_blocks is not None:
            check_number("num_blocks", self.num_blocks, "int", 1)


def num_window_blocks(
    *, max_requests: int, chunk_tokens: int, sliding_window: int, window_block_size: int
) -> int:
    """Window blocks that always suffice.

    Before a step a request holds what its next row reads, W consecutive positions with that row:
    at most (W + B - 2) // B + 1 blocks. q rows add at most one block, and one more for every B rows
    after the second; over all requests q sums to C at most.

    Example:
        >>> num_window_blocks(
        ...     max_requests=2, chunk_tokens=64, sliding_window=128, window_block_size=32
        ... )
        14
    """
    resting = (sliding_window + window_block_size - 2) // window_block_size + 1
    return max_requests * (resting + 1) + chunk_tokens // window_block_size


def cache_config(model: ModelConfig, engine: EngineConfig, max_model_len: int) -> CacheConfig:
    """Pool sizes for an engine over `model` with requests of at most `max_model_len` tokens.

    Raises ConfigError if the block sizes do not fit the model.
    """
    ring_rows = RING_ROWS
    if model.num_draft_layers:
        # Rejected draft rows stay in the ring until they are overwritten (model-spec section 8).
        needed = model.dspark_block_size + 2
        ring_rows = max(ring_rows, needed + needed % 2)
    per_request = -(-max_model_len // engine.block_size)
    sizes = CacheConfig(
        num_blocks=engine.num_blocks or engine.max_requests * per_request,
        num_window_blocks=num_window_blocks(
            max_requests=engine.max_requests,
            chunk_tokens=engine.chunk_tokens,
            sliding_window=model.sliding_window,
            window_block_size=engine.window_block_size,
        ),
        num_requests=engine.max_requests,
        block_size=engine.block_size,
        window_block_size=engine.window_block_size,
        compressed_format=engine.compressed_format,
        ring_rows=ring_rows,
    )
    sizes.validate(model)
    return sizes
