"""Limits of an engine, and the sizes of the cache pools that follow from them.

Window and ring blocks always suffice for the requests that run; compressed blocks may run out, then
requests wait or are preempted.

Symbols: R requests at once, W sliding window, B tokens a window block, C rows a step (all requests
together).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pcpkit.cache.blocks import blocks_in
from pcpkit.cache.pool import INDEX_RECORD
from pcpkit.config import CacheConfig, CompressedFormat, ModelConfig
from pcpkit.config_rules import check_number, require
from pcpkit.formats import RECORD_FORMATS

RING_ROWS = 8
"""Rows of a compressor ring where no draft model asks for more."""


TrimSetting = Literal["off", "exact", "bounded"]
"""Whether rows of a prefill stop below the last layers where nothing reads them (`plan.trim`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of an engine. Raises ConfigError for a number below 1 or an unknown setting."""

    chunk_tokens: int = 512
    """Rows of one step at most, over all requests; a longer prompt takes several steps."""
    max_requests: int = 8
    """Requests that run at once; more of them wait."""
    num_blocks: int | None = None
    """Compressed blocks; None is enough for `max_requests` requests of the longest length."""
    cache_bytes: int | None = None
    """Bytes of compressed KV and index keys on each rank, instead of `num_blocks`."""
    block_size: int = 64
    """Tokens a block of compressed KV and index keys."""
    window_block_size: int = 32
    """Tokens a block of window KV."""
    compressed_format: CompressedFormat = "nvfp4"
    """Record of compressed KV: `nvfp4`, the released one, or `mxfp8`, which loses less."""
    max_rows_per_rank: int | None = None
    """Rows of one step at most on any PCP rank; None leaves it to `chunk_tokens` alone."""
    trim: TrimSetting = "off"
    """`exact` changes no result, `bounded` is the published approximation. With either, prefills
    leave no snapshot at their ends (`ReplayPolicy.keeps_prompt_ends`); hits still do."""
    num_spare_blocks: int | None = None
    """Compressed blocks that an admission leaves free for running requests to grow into, as far as
    they can; None is one for each. More of them, fewer preemptions."""
    reserve: bool = False
    """True admits a request only when all blocks it can ever need can be promised: fewer run at
    once, and none is preempted."""

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "max_requests", "block_size", "window_block_size"):
            check_number(name, getattr(self, name), "int", 1)
        for name, least in (("num_blocks", 1), ("max_rows_per_rank", 1), ("num_spare_blocks", 0)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), "int", least)
        if self.cache_bytes is not None:
            check_number("cache_bytes", self.cache_bytes, "int", 1)
            alone = self.num_blocks is None
            require(alone, "cache_bytes", "None beside num_blocks", self.cache_bytes)
        settings = get_args(TrimSetting)
        require(self.trim in settings, "trim", f"one of {', '.join(settings)}", self.trim)
        require(type(self.reserve) is bool, "reserve", "true or false", self.reserve)


def num_window_blocks(
    *, max_requests: int, chunk_tokens: int, sliding_window: int, window_block_size: int
) -> int:
    """Window blocks that always suffice.

    Before a step a request holds what its next row reads, W consecutive positions with that row:
    at most (W + B - 2) // B + 1 blocks. One that starts behind a cached prefix holds no more: a
    snapshot brings just those records, and a replay writes its own from the first row on. q rows
    add at most one block, and one more for every B rows after the second; over all requests q sums
    to C at most.

    Example:
        >>> num_window_blocks(
        ...     max_requests=2, chunk_tokens=64, sliding_window=128, window_block_size=32
        ... )
        14
    """
    resting = (sliding_window + window_block_size - 2) // window_block_size + 1
    return max_requests * (resting + 1) + chunk_tokens // window_block_size


def bytes_per_block(model: ModelConfig, block_size: int, compressed_format: str) -> int:
    """Bytes of one compressed block over all layers: compressed KV and index keys.

    Example:
        One source of ratio 1 at 64 tokens a block takes `64 * (288 + 68)` bytes with the released
        records; one of ratio 2 half of it.
    """
    row = RECORD_FORMATS[compressed_format].record_bytes(model.head_dim)
    row += RECORD_FORMATS[INDEX_RECORD].record_bytes(model.index_head_dim)
    return sum(
        block_size // model.compress_ratio(layer) * row for layer in model.kv_source_layer_ids
    )


def cache_config(model: ModelConfig, engine: EngineConfig, max_model_len: int) -> CacheConfig:
    """Pool sizes for an engine over `model` with requests of at most `max_model_len` tokens.

    Raises ConfigError if the block sizes do not fit the model, ValueError if `cache_bytes` holds no
    block.
    """
    ring_rows = RING_ROWS
    if model.num_draft_layers:
        # Rejected draft rows stay in the ring until they are overwritten (model-spec section 8).
        needed = model.dspark_block_size + 2
        ring_rows = max(ring_rows, needed + needed % 2)
    num_blocks = engine.num_blocks
    if engine.cache_bytes is not None:
        size = bytes_per_block(model, engine.block_size, engine.compressed_format)
        num_blocks = blocks_in(engine.cache_bytes, size)
    if num_blocks is None:
        num_blocks = engine.max_requests * -(-max_model_len // engine.block_size)
    sizes = CacheConfig(
        num_blocks=num_blocks,
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
