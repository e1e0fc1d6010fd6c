"""Rules of ModelConfig, checked at construction (model-spec sections 1, 3.4-3.6, 5.2, 14)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from pcpkit.config_source import refusal

if TYPE_CHECKING:
    from pcpkit.config import ModelConfig

SCALE_BLOCK = (
    32  # weight scales cover 32 x 32 blocks, so every sliced or scaled dimension is a multiple
)
MAX_TABLE_ROWS = 2**31  # Engram row numbers are int32

REQUIRED_VALUES: dict[str, object] = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "weight_block_size": (SCALE_BLOCK, SCALE_BLOCK),
    "expert_dtype": "fp4",
}
MAY_BE_ZERO = frozenset(
    {
        "attention_dropout",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "image_token_id",
        "candidate_source_layer_id",
        "num_nextn_predict_layers",
        "engram_pad_token_id",
        "dspark_noise_token_id",
    }
)
SCALED_DIMENSIONS = (
    "hidden_size",
    "moe_intermediate_size",
    "head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "index_head_dim",
    "engram_head_dim",
)


def check_model(config: ModelConfig) -> None:
    """Raises ConfigError for the first rule that `config` breaks."""
    _check_types(config)
    for name, value in REQUIRED_VALUES.items():
        found = getattr(config, name)
        require(found == value, name, f"{value!r}", found, "no other value is implemented")
    _check_dimensions(config)
    _check_rope(config)
    _check_tokens(config)
    _check_ratios(config)
    _check_sources(config)
    _check_candidates(config)
    _check_engram(config)
    if config.num_nextn_predict_layers:
        _check_draft(config)


def require(
    condition: bool, name: str, expected: str, value: object, remedy: str = "correct it"
) -> None:
    """Raises the one-line ConfigError unless `condition` holds."""
    if not condition:
        raise refusal(name, expected, value, remedy)


def check_number(name: str, value: object, kind: str, minimum: int) -> None:
    """Checks one scalar: `kind` is `int` or `float`; minimum 1 = positive, 0 = not negative."""
    rule = (
        f"a {'positive' if minimum else 'non-negative'} {'integer' if kind == 'int' else 'number'}"
    )
    if kind == "int":
        require(type(value) is int and value >= minimum, name, rule, value)
        return
    number = type(value) in (int, float) and math.isfinite(float(str(value)))
    require(number, name, f"{rule}, finite", value)
    assert isinstance(value, int | float), "checked above"
    require(value > 0 or (minimum == 0 and value == 0), name, rule, value)


def _check_types(config: ModelConfig) -> None:
    for field in fields(config):
        name, kind, value = field.name, str(field.type), getattr(config, field.name)
        if kind in ("int", "float"):
            check_number(name, value, kind, 0 if name in MAY_BE_ZERO else 1)
        elif kind == "tuple[int, ...]":
            natural = _is_natural_tuple(value)
            require(natural, name, "a list of non-negative integers", value)
        else:
            require(type(value).__name__ == kind, name, f"a {kind}", value)


def _is_natural_tuple(value: Any) -> bool:
    if not isinstance(value, tuple):
        return False
    items = cast("tuple[Any, ...]", value)
    return all(type(item) is int and item >= 0 for item in items)


def _check_dimensions(config: ModelConfig) -> None:
    for name in SCALED_DIMENSIONS:
        value = getattr(config, name)
        require(value % SCALE_BLOCK == 0, name, f"a multiple of {SCALE_BLOCK}", value)
    rope = config.qk_rope_head_dim
    require(rope % 2 == 0, "qk_rope_head_dim", "an even number", rope)
    for name in ("head_dim", "index_head_dim"):
        limit = getattr(config, name)
        require(rope < limit, "qk_rope_head_dim", f"less than {name} ({limit})", rope)
    heads, groups = config.num_attention_heads, config.o_groups
    require(heads % groups == 0, "num_attention_heads", f"a multiple of o_groups ({groups})", heads)
    chosen, experts = config.num_experts_per_tok, config.n_routed_experts
    require(
        chosen <= experts, "num_experts_per_tok", f"at most n_routed_experts ({experts})", chosen
    )


def _check_rope(config: ModelConfig) -> None:
    for name in ("rope_theta", "compress_rope_theta"):
        value = getattr(config, name)
        require(value > 1, name, "greater than 1", value)
    scaling = config.rope_scaling
    for field in fields(scaling):
        name = f"rope_scaling.{field.name}"
        check_number(name, getattr(scaling, field.name), str(field.type), 1)
    require(scaling.factor >= 1, "rope_scaling.factor", "at least 1", scaling.factor)
    require(
        scaling.beta_fast > scaling.beta_slow,
        "rope_scaling.beta_fast",
        f"greater than beta_slow ({scaling.beta_slow})",
        scaling.beta_fast,
    )


def _check_tokens(config: ModelConfig) -> None:
    # image_token_id has no upper bound: text-only models put it at vocab_size, which no id meets.
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "engram_pad_token_id"):
        value, limit = getattr(config, name), config.vocab_size
        require(value < limit, name, f"a token id below vocab_size ({limit})", value)


def _check_ratios(config: ModelConfig) -> None:
    ratios, layers = config.compress_ratios, config.num_hidden_layers
    drafts = config.num_nextn_predict_layers
    require(
        len(ratios) == layers + drafts,
        "compress_ratios",
        f"one entry for each of {layers} layers and {drafts} draft layers",
        f"{len(ratios)} entries",
    )
    for layer, ratio in enumerate(ratios):
        name = f"compress_ratios[{layer}]"
        require(ratio in (0, 1, 2), name, "0, 1 or 2", ratio)
        require(layer < layers or ratio == 0, name, "0, because this is a draft layer", ratio)


def _check_ascending(name: str, ids: Sequence[int], limit: int) -> None:
    for left, right in pairwise(ids):
        require(left < right, name, "layer ids in ascending order without repeats", tuple(ids))
    for layer in ids:
        require(layer < limit, name, f"layer ids below num_hidden_layers ({limit})", layer)


def _check_sources(config: ModelConfig) -> None:
    ratios, layers = config.compress_ratios, config.num_hidden_layers
    kv_sources, index_sources = config.kv_source_layer_ids, config.index_source_layer_ids
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids: tuple[int, ...] = getattr(config, name)
        _check_ascending(name, ids, layers)
        for layer in ids:
            require(ratios[layer] != 0, name, "compressed layers only (ratio 1 or 2)", layer)
    for layer in kv_sources:
        require(
            layer in index_sources,
            "index_source_layer_ids",
            f"every kv source, so also layer {layer}",
            index_sources,
        )
    for layer in range(layers):
        if ratios[layer] == 0:
            continue
        source = config.kv_source(layer)
        if source is None:
            raise refusal(
                "kv_source_layer_ids",
                f"a source at or before compressed layer {layer}",
                kv_sources,
            )
        require(
            ratios[source] == ratios[layer],
            "kv_source_layer_ids",
            f"a new source where the ratio changes (layer {layer} has ratio {ratios[layer]}, "
            f"its source {source} has {ratios[source]})",
            kv_sources,
        )


def _check_candidates(config: ModelConfig) -> None:
    source, name = config.candidate_source_layer_id, "candidate_source_layer_id"
    require(source in config.kv_source_layer_ids, name, "a kv source layer", source)
    ratio = config.compress_ratios[source]
    require(ratio == 1, name, f"a layer of ratio 1 (this one has ratio {ratio})", source)
    # Candidate blocks number the source's own keys; they mean nothing to readers of other keys.
    last = config.kv_source_layer_ids[-1]
    require(source == last, name, f"the last kv source ({last})", source)


def _check_engram(config: ModelConfig) -> None:
    layers, rows = config.engram_layer_ids, config.engram_num_embeddings
    _check_ascending("engram_layer_ids", layers, config.num_hidden_layers)
    require(
        len(rows) == len(layers),
        "engram_num_embeddings",
        f"one table height per Engram layer ({len(layers)})",
        rows,
    )
    for count in rows:
        fits = 0 < count < MAX_TABLE_ROWS
        require(fits, "engram_num_embeddings", f"heights from 1 to {MAX_TABLE_ROWS - 1}", count)
    ngram = config.engram_max_ngram_size
    require(ngram >= 2, "engram_max_ngram_size", "at least 2", ngram)
    size, limit = config.engram_compressed_vocab_size, config.vocab_size
    require(size <= limit, "engram_compressed_vocab_size", f"at most vocab_size ({limit})", size)


def _check_draft(config: ModelConfig) -> None:
    noise, limit = config.dspark_noise_token_id, config.vocab_size
    require(noise < limit, "dspark_noise_token_id", f"a token id below vocab_size ({limit})", noise)
    targets = config.dspark_target_layer_ids
    require(len(targets) > 0, "dspark_target_layer_ids", "at least one layer", targets)
    _check_ascending("dspark_target_layer_ids", targets, config.num_hidden_layers)
    chosen, experts = config.dspark_num_experts_per_tok, config.dspark_n_routed_experts
    require(
        chosen <= experts,
        "dspark_num_experts_per_tok",
        f"at most dspark_n_routed_experts ({experts})",
        chosen,
    )
