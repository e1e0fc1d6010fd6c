"""The paged quantized caches of one rank: tensors only, no policy.

Three kinds of storage (docs/cache-layout.md):

- window KV: every layer, MXFP8 records, blocks of ``window_block_size`` tokens;
- compressed KV and index keys: KV source layers, blocks of ``block_size`` tokens that hold
  ``block_size / ratio`` records, one block table for ratio 1 and 2;
- the compressor ring: ratio-2 sources, FP32 ``[value | gate]`` rows, one block a request.

Block ids are shared by all layers of a kind. Memory starts as zero bytes; nothing may depend on
the bytes of a slot before it is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pcpkit.config import CacheConfig, ModelConfig
from pcpkit.formats import RECORD_FORMATS

WINDOW_RECORD = "mxfp8"
INDEX_RECORD = "mxfp4"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachePool:
    """Cache tensors by layer id; see :func:`allocate_pool`."""

    window: dict[int, Tensor]
    """``(num_window_blocks, window_block_size, record_bytes)`` uint8, every layer."""
    compressed: dict[int, Tensor]
    """``(num_blocks, block_size / ratio, record_bytes)`` uint8, KV sources."""
    index_keys: dict[int, Tensor]
    """``(num_blocks, block_size / ratio, record_bytes)`` uint8, KV sources."""
    ring: dict[int, Tensor]
    """``(num_requests, ring_rows, 2 * head_dim)`` fp32, ratio-2 sources."""
    compressed_record: str
    """Record of ``compressed``: ``"nvfp4"`` or ``"mxfp8"``."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        groups = (self.window, self.compressed, self.index_keys, self.ring)
        return sum(tensor.nbytes for group in groups for tensor in group.values())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under a unique name, in a fixed order (byte comparison of replicas)."""
        named = {}
        for kind in ("window", "compressed", "index_keys", "ring"):
            for layer, tensor in sorted(getattr(self, kind).items()):
                named[f"{kind}.{layer}"] = tensor
        return named


def allocate_pool(
    config: ModelConfig, cache: CacheConfig, device: torch.device | str = "cpu"
) -> CachePool:
    """Allocate the caches of the target layers.

    Args:
        config: the model.
        cache: block counts and sizes.
        device: where the tensors live.

    Raises:
        ConfigError: the sizes do not fit the model.
    """
    cache.validate(config)
    window_bytes = RECORD_FORMATS[WINDOW_RECORD].record_bytes(config.head_dim)
    compressed_bytes = RECORD_FORMATS[cache.compressed_format].record_bytes(config.head_dim)
    index_bytes = RECORD_FORMATS[INDEX_RECORD].record_bytes(config.index_head_dim)

    def pages(layer: int, size: int) -> Tensor:
        states = cache.block_size // config.compress_ratio(layer)
        return torch.zeros(cache.num_blocks, states, size, dtype=torch.uint8, device=device)

    return CachePool(
        window={
            layer: torch.zeros(
                cache.num_window_blocks,
                cache.window_block_size,
                window_bytes,
                dtype=torch.uint8,
                device=device,
            )
            for layer in range(config.num_hidden_layers)
        },
        compressed={layer: pages(layer, compressed_bytes) for layer in config.kv_source_layer_ids},
        index_keys={layer: pages(layer, index_bytes) for layer in config.kv_source_layer_ids},
        ring={
            layer: torch.zeros(
                cache.num_requests, cache.ring_rows, 2 * config.head_dim, device=device
            )
            for layer in config.ratio2_sources
        },
        compressed_record=cache.compressed_format,
    )
