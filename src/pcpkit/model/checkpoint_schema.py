"""Which tensors a released checkpoint holds, and which part of each one a rank reads.

Source: model-spec sections 9 (names, dtypes, shapes), 3.9 and 14 (TP slices), 5.6 (Engram row
blocks), 6 (experts whole, contiguous blocks per rank). The indexer is replicated on purpose
(section 3.9), so that every rank selects the same rows without a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from pcpkit.config import ModelConfig

ShardRule = Literal["replicated", "rows", "columns", "expert", "engram_rows"]
Section = Literal["text", "draft", "vision"]

SCALE_BLOCK = 32  # an E8M0 scale covers 32 channels of a row (experts, Engram) or a 32 x 32 block

# Bits per element of every dtype a safetensors header may name.
DTYPE_BITS: dict[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

# Vision parts of the release: known, never read by a text model.
VISION_PREFIXES = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
DRAFT_PREFIX = "mtp."


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of the checkpoint.

    `dtype` is the safetensors dtype string, `shape` the stored shape (packed FP4 weights count
    bytes), `expert` is (expert id, number of experts) of an expert's tensor and None otherwise.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: ShardRule
    section: Section
    expert: tuple[int, int] | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes per stored element."""
        return DTYPE_BITS[self.dtype] // 8

    @property
    def num_bytes(self) -> int:
        """Data bytes of the whole tensor."""
        return prod(self.shape) * self.item_bytes

    @property
    def is_read(self) -> bool:
        """False for the routing bias of image tokens, which no text-only model has."""
        return not self.name.endswith(".gate.bias_vl")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlice:
    """Half-open row and column range of a tensor that one rank holds; no `columns` in 1-D."""

    rows: tuple[int, int]
    columns: tuple[int, int] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's part."""
        height = self.rows[1] - self.rows[0]
        return (height,) if self.columns is None else (height, self.columns[1] - self.columns[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """One rank's place in the tensor-parallel and the expert-parallel group."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "ep"):
            rank, size = getattr(self, f"{name}_rank"), getattr(self, f"{name}_size")
            if size < 1 or not 0 <= rank < size:
                raise ValueError(
                    f"{name}_rank expected 0 .. {name}_size - 1, got rank {rank} of {size}; "
                    "pass the rank inside its own group"
                )


def rank_slice(spec: TensorSpec, position: RankPosition) -> RankSlice | None:
    """The part of `spec` that a rank reads; None if it reads nothing of it.

    An Engram table is cut into row blocks of ceil(rows / tp_size), the last one shorter. Raises
    ValueError if the other dimensions do not divide evenly.
    """
    height = spec.shape[0]
    whole = (0, spec.shape[1]) if len(spec.shape) == 2 else None
    rank, size = position.tp_rank, position.tp_size
    if not spec.is_read:
        return None
    if spec.shard == "expert":
        assert spec.expert is not None, f"{spec.name} is an expert tensor without an expert id"
        owner = spec.expert[0] // _even(spec.name, spec.expert[1], position.ep_size)
        return RankSlice(rows=(0, height), columns=whole) if owner == position.ep_rank else None
    if spec.shard == "rows":
        step = _even(spec.name, height, size)
        return RankSlice(rows=(rank * step, (rank + 1) * step), columns=whole)
    if spec.shard == "columns":
        step = _even(spec.name, spec.shape[1], size)
        return RankSlice(rows=(0, height), columns=(rank * step, (rank + 1) * step))
    if spec.shard == "engram_rows":
        step = -(-height // size)
        rows = (min(rank * step, height), min((rank + 1) * step, height))
        return RankSlice(rows=rows, columns=whole)
    return RankSlice(rows=(0, height), columns=whole)


def _even(name: str, length: int, parts: int) -> int:
    if length % parts:
        raise ValueError(
            f"{name} expected a length divisible by {parts} ranks, got {length}; "
            "choose a smaller group"
        )
    return length // parts


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """All text and draft tensors of a checkpoint by name, in the order of model-spec section 9."""
    return {spec.name: spec for spec in _all_tensors(config)}


def _all_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    vocab, hidden = config.vocab_size, config.hidden_size
    yield _plain("embed.weight", "BF16", (vocab, hidden), "rows")
    yield _plain("head.weight", "BF16", (vocab, hidden), "rows")
    yield _plain("norm.weight", "BF16", (hidden,))
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}"
        yield from _block(prefix, config, config.n_routed_experts)
        yield from _compressor_and_indexer(f"{prefix}.attn", config, layer)
        yield from _engram(f"{prefix}.engram", config, layer)
    for stage in range(config.num_draft_layers):
        for spec in _draft_stage(config, stage):
            yield replace(spec, section="draft")


def _block(prefix: str, config: ModelConfig, num_experts: int) -> Iterator[TensorSpec]:
    """What target layers and draft stages have in common."""
    hidden = config.hidden_size
    for site in ("attn", "ffn"):
        yield _plain(f"{prefix}.{site}_norm.weight", "BF16", (hidden,))
        yield from _hyper_connection(f"{prefix}.hc_{site}", config)
    yield from _attention(f"{prefix}.attn", config)
    yield from _experts(f"{prefix}.ffn", config, num_experts)


def _hyper_connection(prefix: str, config: ModelConfig) -> Iterator[TensorSpec]:
    streams = config.hc_mult
    coefficients = streams * (2 + streams)  # pre, post and the mixing matrix
    yield _plain(f"{prefix}_fn", "F32", (coefficients, streams * config.hidden_size))
    yield _plain(f"{prefix}_base", "F32", (coefficients,))
    yield _plain(f"{prefix}_scale", "F32", (3,))


def _attention(prefix: str, config: ModelConfig) -> Iterator[TensorSpec]:
    hidden, rank = config.hidden_size, config.q_lora_rank
    heads, groups = config.num_attention_heads, config.o_groups
    group_width = config.heads_per_group * config.head_dim
    yield _plain(f"{prefix}.attn_sink", "F32", (heads,), "rows")
    yield from _fp8(f"{prefix}.wq_a", rank, hidden)
    yield _plain(f"{prefix}.q_norm.weight", "BF16", (rank,))
    yield from _fp8(f"{prefix}.wq_b", heads * config.head_dim, rank, "rows")
    yield from _fp8(f"{prefix}.wkv", config.head_dim, hidden)
    yield _plain(f"{prefix}.kv_norm.weight", "BF16", (config.head_dim,))
    yield from _fp8(f"{prefix}.wo_a", groups * config.o_lora_rank, group_width, "rows")
    yield from _fp8(f"{prefix}.wo_b", hidden, groups * config.o_lora_rank, "columns")


def _compressor_and_indexer(prefix: str, config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    hidden, head_dim, index_dim = config.hidden_size, config.head_dim, config.index_head_dim
    if config.is_kv_source(layer):
        yield _plain(f"{prefix}.compressor.wkv.weight", "BF16", (head_dim, hidden))
        if config.compress_ratio(layer) == 2:
            yield _plain(f"{prefix}.compressor.wgate.weight", "BF16", (head_dim, hidden))
        yield _plain(f"{prefix}.compressor.norm.weight", "BF16", (head_dim,))
        yield _plain(f"{prefix}.indexer.wk.weight", "BF16", (index_dim, head_dim))
        yield _plain(f"{prefix}.indexer.k_norm.weight", "BF16", (index_dim,))
    if config.is_index_source(layer):
        heads = config.index_n_heads
        yield from _fp8(f"{prefix}.indexer.wq_b", heads * index_dim, config.q_lora_rank)
        yield _plain(f"{prefix}.indexer.weights_proj.weight", "BF16", (heads, hidden))


def _experts(prefix: str, config: ModelConfig, num_experts: int) -> Iterator[TensorSpec]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    yield _plain(f"{prefix}.gate.weight", "BF16", (num_experts, hidden))
    yield _plain(f"{prefix}.gate.bias", "F32", (num_experts,))
    yield _plain(f"{prefix}.gate.bias_vl", "F32", (num_experts,))
    shapes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
    for expert in range(num_experts):
        for name, (rows, columns) in shapes.items():
            yield from _fp4(
                f"{prefix}.experts.{expert}.{name}", rows, columns, (expert, num_experts)
            )
    for name, (rows, columns) in shapes.items():
        yield from _fp8(f"{prefix}.shared_experts.{name}", rows, columns)


def _engram(prefix: str, config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    if not config.has_engram(layer):
        return
    hidden, width, streams = config.hidden_size, config.engram_head_dim, config.hc_mult
    rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    scale_shape = (rows, width // SCALE_BLOCK)
    yield _plain(f"{prefix}.embed.weight", "F8_E4M3", (rows, width), "engram_rows")
    yield _plain(f"{prefix}.embed.scale", "F8_E8M0", scale_shape, "engram_rows")
    yield from _fp8(f"{prefix}.wkv", (streams + 1) * hidden, columns * width)  # keys, then value
    yield _plain(f"{prefix}.q_weight", "BF16", (streams, hidden))
    yield _plain(f"{prefix}.k_weight", "BF16", (streams, hidden))


def _draft_stage(config: ModelConfig, stage: int) -> Iterator[TensorSpec]:
    prefix, hidden = f"{DRAFT_PREFIX}{stage}", config.hidden_size
    yield from _block(prefix, config, config.dspark_n_routed_experts)
    if stage == 0:
        yield from _fp8(f"{prefix}.main_proj", hidden, len(config.dspark_target_layer_ids) * hidden)
        yield _plain(f"{prefix}.main_norm.weight", "BF16", (hidden,))
    if stage == config.num_draft_layers - 1:
        markov = (config.vocab_size, config.dspark_markov_rank)
        confidence = (1, hidden + config.dspark_markov_rank)
        yield _plain(f"{prefix}.norm.weight", "BF16", (hidden,))
        yield _plain(f"{prefix}.markov_head.embed.weight", "BF16", markov, "rows")
        yield _plain(f"{prefix}.markov_head.head.weight", "BF16", markov, "rows")
        yield _plain(f"{prefix}.confidence_head.proj.weight", "BF16", confidence)


def _plain(
    name: str, dtype: str, shape: tuple[int, ...], shard: ShardRule = "replicated"
) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, shard=shard, section="text")


def _fp8(
    name: str, rows: int, columns: int, shard: ShardRule = "replicated"
) -> Iterator[TensorSpec]:
    """An FP8 linear: E4M3 codes and one E8M0 byte per 32 x 32 block (model-spec section 0.6)."""
    blocks = (-(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
    yield _plain(f"{name}.weight", "F8_E4M3", (rows, columns), shard)
    yield _plain(f"{name}.scale", "F8_E8M0", blocks, shard)


def _fp4(name: str, rows: int, columns: int, expert: tuple[int, int]) -> Iterator[TensorSpec]:
    """An FP4 linear: two E2M1 codes per byte and one E8M0 byte per row and 32 columns."""
    packed, scales = (rows, columns // 2), (rows, columns // SCALE_BLOCK)
    for part, dtype, shape in (("weight", "I8", packed), ("scale", "F8_E8M0", scales)):
        yield TensorSpec(
            name=f"{name}.{part}",
            dtype=dtype,
            shape=shape,
            shard="expert",
            section="text",
            expert=expert,
        )
