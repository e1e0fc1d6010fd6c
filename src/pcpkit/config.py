"""Frozen, validated configuration of the model, the caches and the parallel layout.

Every rule is checked at construction; every refusal is a one-line ConfigError that names field,
value and rule. The model is read from the released config.json.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from pcpkit.config_rules import check_model, check_number, require
from pcpkit.config_source import ConfigError, load_document, read_fields

__all__ = [
    "CacheConfig",
    "CompressedFormat",
    "ConfigError",
    "ModelConfig",
    "ParallelConfig",
    "RopeScaling",
]

CompressedFormat = Literal["nvfp4", "mxfp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN of the compressed layers (model-spec section 0.8); length in tokens, betas in turns."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """DeepSeek-V4.1-Flash text model (model-spec section 1), field names as in config.json.

    Layers 0 .. num_hidden_layers-1 are the target model, the next num_nextn_predict_layers are
    draft layers. Construction raises ConfigError when a rule is broken.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    hidden_act: str
    swiglu_limit: float
    rms_norm_eps: float
    attention_bias: bool
    attention_dropout: float
    initializer_range: float
    use_cache: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    weight_block_size: tuple[int, ...]
    expert_dtype: str

    def __post_init__(self) -> None:
        check_model(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ModelConfig:
        """Reads a released config.json document (text fields nested in `text_config`)."""
        kinds = {field.name: str(field.type) for field in fields(cls)}
        values = read_fields(document, kinds)
        scaling = {f.name: str(f.type) for f in fields(RopeScaling)}
        raw_scaling = values.pop("rope_scaling")
        rope = RopeScaling(**{k: _as_float(scaling[k], v) for k, v in raw_scaling.items()})
        return cls(**{k: _as_float(kinds[k], v) for k, v in values.items()}, rope_scaling=rope)

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Reads `path`, a config.json file or the directory that holds one."""
        return cls.from_dict(load_document(Path(path)))

    @property
    def num_draft_layers(self) -> int:
        """Number of DSpark stages (0 = no draft model)."""
        return self.num_nextn_predict_layers

    @property
    def nope_head_dim(self) -> int:
        """Channels of a head that do not rotate."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def heads_per_group(self) -> int:
        """Attention heads of one output-projection group."""
        return self.num_attention_heads // self.o_groups

    @property
    def ratio2_sources(self) -> tuple[int, ...]:
        """KV sources of ratio 2: their compressors carry an open row between steps."""
        return tuple(i for i in self.kv_source_layer_ids if self.compress_ratios[i] == 2)

    def compress_ratio(self, layer: int) -> int:
        """0 (window only), 1 or 2 tokens per compressed row; draft layers are 0."""
        if not 0 <= layer < len(self.compress_ratios):
            raise ValueError(
                f"layer expected 0 .. {len(self.compress_ratios) - 1}, got {layer}; pass a layer id"
            )
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed KV `layer` reads; None for a ratio-0 layer."""
        return self._latest(self.kv_source_layer_ids, layer)

    def selection_source(self, layer: int) -> int | None:
        """The layer whose top-k selection `layer` uses; None for a ratio-0 layer."""
        return self._latest(self.index_source_layer_ids, layer)

    def is_kv_source(self, layer: int) -> bool:
        """True if `layer` has its own compressor and index keys."""
        return layer in self.kv_source_layer_ids

    def is_index_source(self, layer: int) -> bool:
        """True if `layer` has its own index queries and selection."""
        return layer in self.index_source_layer_ids

    def has_engram(self, layer: int) -> bool:
        """True if an Engram lookup runs before `layer`."""
        return layer in self.engram_layer_ids

    def _latest(self, sources: tuple[int, ...], layer: int) -> int | None:
        count = bisect_right(sources, layer)
        return sources[count - 1] if count and self.compress_ratio(layer) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Sizes of the cache pools of one rank.

    `block_size` and `window_block_size` are tokens per block; `ring_rows` is the number of
    compressor rows kept per request and ratio-2 source; the `num_*` fields count blocks and
    requests.
    """

    num_blocks: int
    num_window_blocks: int
    num_requests: int
    block_size: int = 64
    window_block_size: int = 32
    compressed_format: CompressedFormat = "nvfp4"
    ring_rows: int = 8

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int":
                check_number(field.name, getattr(self, field.name), "int", 1)
        known = get_args(CompressedFormat)
        require(
            self.compressed_format in known,
            "compressed_format",
            f"one of {', '.join(known)}",
            self.compressed_format,
        )
        # Ratio 2 is the largest there is; an odd block or ring would split a pair of tokens.
        require(self.block_size % 2 == 0, "block_size", "a multiple of ratio 2", self.block_size)
        require(self.ring_rows % 2 == 0, "ring_rows", "an even number, at least 2", self.ring_rows)

    def validate(self, config: ModelConfig) -> None:
        """Raises ConfigError if the caches cannot serve `config`."""
        if config.num_draft_layers:
            # Model-spec section 8: rejected draft rows stay in the ring until they are overwritten.
            needed = config.dspark_block_size + 2
            expected = f"at least dspark_block_size + 2 ({needed})"
            require(self.ring_rows >= needed, "ring_rows", expected, self.ring_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Ranks of one model instance, tp_size x pcp_size; `expert_parallel`: all share the experts."""

    tp_size: int = 1
    pcp_size: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        check_number("tp_size", self.tp_size, "int", 1)
        check_number("pcp_size", self.pcp_size, "int", 1)
        flag = self.expert_parallel
        require(type(flag) is bool, "expert_parallel", "true or false", flag)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp_size * self.pcp_size

    @property
    def ep_size(self) -> int:
        """Ranks the experts are dealt to, in contiguous blocks (1 = every rank holds all)."""
        return self.world_size if self.expert_parallel else 1

    def validate(self, config: ModelConfig) -> None:
        """Raises ConfigError if `config` cannot be split so (model-spec sections 3.9, 5.6, 14)."""
        tp = self.tp_size
        # head_dim and o_lora_rank are multiples of 32: whole heads and groups are whole blocks.
        for name in ("num_attention_heads", "o_groups", "vocab_size"):
            value = getattr(config, name)
            expected = f"a divisor of {name} ({value})"
            require(value % tp == 0, "tp_size", expected, tp, "choose another one")
        for rows in config.engram_num_embeddings:
            expected = f"small enough that every rank owns rows of an Engram table of {rows}"
            fits = (tp - 1) * -(-rows // tp) < rows
            require(fits, "tp_size", expected, tp, "choose a smaller one")
        experts = {"n_routed_experts": config.n_routed_experts}
        if config.num_draft_layers:
            experts["dspark_n_routed_experts"] = config.dspark_n_routed_experts
        for name, value in experts.items():
            expected = f"a divisor of {name} ({value})"
            divides = value % self.ep_size == 0
            remedy = "choose another number of ranks, or no expert parallelism"
            require(divides, "expert-parallel size", expected, self.ep_size, remedy)


def _as_float(kind: str, value: Any) -> Any:
    return float(value) if kind == "float" and type(value) is int else value
