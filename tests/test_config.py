"""Every rule of the configuration, each shown to fire by one change to a valid document."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pcpkit.config import ConfigError, ModelConfig, ParallelConfig, RopeScaling

ROOT = Path(__file__).resolve().parent.parent
RELEASED_NAME = "released-config.json"

Document = dict[str, Any]
Change = Callable[[Document], object]

# A small model with every feature: both ratios, reuse and reindex layers, Engram, two draft stages.
BASE_FILE = ROOT / "tests" / "data" / "small-config.json"
BASE: Document = json.loads(BASE_FILE.read_text(encoding="utf-8"))

V4_DOCUMENT: Document = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
}


def base() -> Document:
    return copy.deepcopy(BASE)


def refusal_of(document: Document) -> str:
    """The message of the refusal; fails if it is accepted or not one line."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(document)
    message = str(caught.value)
    assert "\n" not in message
    assert " expected " in message
    assert ", got " in message
    return message


def released_config() -> ModelConfig:
    for folder in (ROOT / "tests" / "data" / "golden", ROOT.parent / "shared" / "golden"):
        if (folder / RELEASED_NAME).is_file():
            return ModelConfig.from_file(folder / RELEASED_NAME)
    pytest.skip(f"{RELEASED_NAME} is in no golden folder")


def test_fields_are_read() -> None:
    config = ModelConfig.from_dict(BASE)
    for name, value in BASE["text_config"].items():
        if name not in ("model_type", "rope_scaling"):
            wanted = tuple(value) if isinstance(value, list) else value
            assert getattr(config, name) == wanted, name
    assert config.rope_scaling == RopeScaling(
        factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=2048
    )
    assert type(config.rope_theta) is float
    assert type(config.rope_scaling.factor) is float
    tokens = (config.bos_token_id, config.eos_token_id, config.pad_token_id, config.image_token_id)
    assert tokens == (0, 1, 2, 320)
    assert (config.weight_block_size, config.expert_dtype) == ((32, 32), "fp4")


def test_reading_leaves_the_document_alone() -> None:
    document = base()
    ModelConfig.from_dict(document)
    assert document == BASE


def test_derived_values() -> None:
    config = ModelConfig.from_dict(BASE)
    layers = range(config.num_hidden_layers)
    assert [config.kv_source(i) for i in layers] == [None, 1, 1, 3, 3, 3, None]
    assert [config.selection_source(i) for i in layers] == [None, 1, 1, 3, 3, 5, None]
    assert [config.compress_ratio(i) for i in range(9)] == [0, 2, 2, 1, 1, 1, 0, 0, 0]
    assert [i for i in layers if config.is_kv_source(i)] == [1, 3]
    assert [i for i in layers if config.is_index_source(i)] == [1, 3, 5]
    assert [i for i in layers if config.has_engram(i)] == [1]
    assert config.ratio2_sources == (1,)
    assert (config.nope_head_dim, config.heads_per_group, config.num_draft_layers) == (64, 2, 2)


@pytest.mark.parametrize("layer", [-1, 9])
def test_a_layer_out_of_range_is_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=rf"layer expected 0 \.\. 8, got {layer};"):
        ModelConfig.from_dict(BASE).compress_ratio(layer)


def test_released_config_has_the_schedule_of_the_spec() -> None:
    config = released_config()
    layers = range(config.num_hidden_layers)
    reindex = [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    encoder = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6
    assert [config.kv_source(i) for i in layers] == [*encoder, *[20] * 20]
    assert [config.selection_source(i) for i in layers] == [*encoder, *reindex]
    assert config.ratio2_sources == (2, 8, 14)
    assert (config.num_draft_layers, config.nope_head_dim, config.heads_per_group) == (3, 448, 8)
    for tp in (1, 2, 4, 8):
        ParallelConfig(tp_size=tp, expert_parallel=True).validate(config)


@pytest.mark.parametrize("case", ["tiny-main", "tiny-dspark", "tiny-real-heads"])
def test_golden_configs_are_accepted(golden_dir: Callable[[str], Path], case: str) -> None:
    folder = golden_dir(case)
    assert ModelConfig.from_file(folder) == ModelConfig.from_file(folder / "config.json")


def set_text(name: str, value: object) -> Change:
    return lambda document: document["text_config"].update({name: value})


# One change per rule: (text_config field, value, words of the rule).
BROKEN_FIELDS: list[tuple[str, object, str]] = [
    ("hidden_act", "gelu", "'silu'"),
    ("scoring_func", "sigmoid", "'sqrtsoftplus'"),
    ("topk_method", "greedy", "'noaux_tc'"),
    ("norm_topk_prob", False, "True"),
    ("tie_word_embeddings", True, "False"),
    ("attention_bias", True, "False"),
    ("attention_dropout", 0.1, "0.0"),
    ("num_key_value_heads", 2, "1"),
    ("n_shared_experts", 2, "1"),
    ("model_type", "deepseek_v4_text", "'deepseek_v41_text'"),
    ("torch_dtype", "float16", "'bfloat16'"),
    ("hidden_size", 250, "a multiple of 32"),
    ("moe_intermediate_size", 48, "a multiple of 32"),
    ("head_dim", 136, "a multiple of 32"),
    ("q_lora_rank", 40, "a multiple of 32"),
    ("o_lora_rank", 16, "a multiple of 32"),
    ("index_head_dim", 100, "a multiple of 32"),
    ("engram_head_dim", 48, "a multiple of 32"),
    ("qk_rope_head_dim", 63, "an even number"),
    ("qk_rope_head_dim", 128, "less than head_dim (128)"),
    ("index_head_dim", 64, "less than index_head_dim (64)"),
    ("num_attention_heads", 6, "a multiple of o_groups (4)"),
    ("num_experts_per_tok", 9, "at most n_routed_experts (8)"),
    ("rope_theta", 1.0, "greater than 1"),
    ("compress_rope_theta", 0.5, "greater than 1"),
    ("engram_pad_token_id", 320, "a token id below vocab_size (320)"),
    ("compress_ratios", [0, 2, 2, 1, 1, 1, 0], "one entry for each of 7 layers and 2 draft layers"),
    ("compress_ratios", [0, 4, 2, 1, 1, 1, 0, 0, 0], "0, 1 or 2"),
    ("compress_ratios", [0, 2, 2, 1, 1, 1, 0, 0, 1], "0, because this is a draft layer"),
    ("kv_source_layer_ids", [3, 1], "ascending order"),
    ("kv_source_layer_ids", [1, 1, 3], "ascending order"),
    ("kv_source_layer_ids", [1, 7], "layer ids below num_hidden_layers (7)"),
    ("kv_source_layer_ids", [0, 1, 3], "compressed layers only"),
    ("kv_source_layer_ids", [3], "a source at or before compressed layer 1"),
    ("kv_source_layer_ids", [1], "a new source where the ratio changes"),
    ("kv_source_layer_ids", [], "a source at or before compressed layer 1"),
    ("index_source_layer_ids", [1, 5], "every kv source, so also layer 3"),
    ("index_source_layer_ids", [1, 5, 3], "ascending order"),
    ("index_source_layer_ids", [1, 3, 8], "layer ids below num_hidden_layers (7)"),
    ("index_source_layer_ids", [1, 3, 6], "compressed layers only"),
    ("candidate_source_layer_id", 5, "a kv source layer"),
    ("candidate_source_layer_id", 1, "a layer of ratio 1 (this one has ratio 2)"),
    ("engram_num_embeddings", [630, 834], "one table height per Engram layer (1)"),
    ("engram_layer_ids", [7], "layer ids below num_hidden_layers (7)"),
    ("engram_num_embeddings", [0], "heights from 1 to 2147483647"),
    ("engram_num_embeddings", [2**31], "heights from 1 to 2147483647"),
    ("engram_max_ngram_size", 1, "at least 2"),
    ("engram_compressed_vocab_size", 321, "at most vocab_size (320)"),
    ("dspark_noise_token_id", 320, "a token id below vocab_size (320)"),
    ("dspark_target_layer_ids", [], "at least one layer"),
    ("dspark_target_layer_ids", [3, 2], "ascending order"),
    ("dspark_target_layer_ids", [7], "layer ids below num_hidden_layers (7)"),
    ("dspark_num_experts_per_tok", 5, "at most dspark_n_routed_experts (4)"),
    ("num_hash_layers", 3, "0 (or no such field)"),
    ("gate_temp", 2.0, "1.0 (or no such field)"),
    ("sliding_windw", 16, "no such field"),
    ("use_cache", 1, "a bool"),
    ("norm_topk_prob", 1, "a bool"),
    ("hidden_act", ["silu"], "a str"),
    ("rope_scaling", None, "without it the rotary tables"),
    ("compress_rope_theta", None, "without it the rotary tables"),
]


@pytest.mark.parametrize(("name", "value", "rule"), BROKEN_FIELDS)
def test_a_broken_field_is_named_with_its_rule(name: str, value: object, rule: str) -> None:
    document = base()
    document["text_config"][name] = value
    message = refusal_of(document)
    assert rule in message
    # The index head dimension bounds the rotary one, so that refusal names the latter.
    assert name in message


def test_candidates_must_come_from_the_last_source() -> None:
    document = base()
    document["text_config"] |= {
        "kv_source_layer_ids": [1, 3, 5],
        "index_source_layer_ids": [1, 3, 5],
    }
    assert "candidate_source_layer_id expected the last kv source (5), got 3" in refusal_of(
        document
    )


def numeric_fields() -> list[str]:
    text = BASE["text_config"]
    return [name for name, value in text.items() if type(value) in (int, float)]


@pytest.mark.parametrize("name", numeric_fields())
@pytest.mark.parametrize("value", [-1, "8", True, None, [1], math.nan, math.inf])
def test_every_number_rejects_wrong_signs_and_types(name: str, value: object) -> None:
    document = base()
    document["text_config"][name] = value
    assert name in refusal_of(document)


@pytest.mark.parametrize("name", numeric_fields())
def test_zero_is_refused_where_it_means_nothing(name: str) -> None:
    may_be_zero = {"attention_dropout", "initializer_range", "engram_pad_token_id"}
    may_be_zero |= {"dspark_noise_token_id"}
    document = base()
    document["text_config"][name] = 0
    if name in may_be_zero:
        ModelConfig.from_dict(document)
    else:
        refusal_of(document)


@pytest.mark.parametrize("name", ["num_hidden_layers", "index_topk", "vocab_size"])
def test_a_fraction_is_no_integer(name: str) -> None:
    document = base()
    document["text_config"][name] = 8.0
    assert name in refusal_of(document)


@pytest.mark.parametrize("value", [3, "1,3", [1, -3], [1, 3.0], [1, True], {"a": 1}])
def test_layer_lists_must_be_lists_of_natural_numbers(value: object) -> None:
    document = base()
    document["text_config"]["kv_source_layer_ids"] = value
    assert "kv_source_layer_ids expected a list of non-negative" in refusal_of(document)


@pytest.mark.parametrize("name", sorted(set(BASE["text_config"]) | set(BASE) - {"dtype"}))
def test_every_field_is_required(name: str) -> None:
    document = base()
    document.pop(name, None)
    document.get("text_config", {}).pop(name, None)
    assert name in refusal_of(document)


def drop_drafts(document: Document) -> None:
    ratios = document["text_config"]["compress_ratios"]
    document["text_config"] |= {
        "num_nextn_predict_layers": 0,
        "compress_ratios": ratios[:7],
        "dspark_target_layer_ids": [],
        "dspark_num_experts_per_tok": 9,
    }


def drop_engram(document: Document) -> None:
    document["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": []}


def nest_rope(document: Document) -> None:
    """The spelling per layer kind."""
    text = document["text_config"]
    text["rope_parameters"] = {
        "main": {"rope_type": "default", "rope_theta": text.pop("rope_theta")},
        "compress": {**text.pop("rope_scaling"), "rope_theta": text.pop("compress_rope_theta")},
    }


def flatten_rope(document: Document) -> None:
    """What Transformers 5 makes of the released fields."""
    text = document["text_config"]
    text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}


def null_rope_scaling(document: Document) -> None:
    flatten_rope(document)
    document["text_config"]["rope_scaling"] = None


def old_type_key(document: Document) -> None:
    scaling = document["text_config"]["rope_scaling"]
    scaling["type"] = scaling.pop("rope_type")


SAME_MODEL: list[Change] = [
    nest_rope,
    flatten_rope,
    null_rope_scaling,
    old_type_key,
    set_text("_name_or_path", "somewhere"),
    set_text("transformers_version", "5.0.0"),
    set_text("torch_dtype", "bfloat16"),
    set_text("num_hash_layers", 0),
    set_text("gate_temp", 1.0),
    set_text("bos_token_id", 0),
    lambda document: document.update(vision_config={"depth": 2}, image_start_token_id=7),
    lambda document: document["text_config"].update(pad_token_id=document.pop("pad_token_id")),
    lambda document: document["quantization_config"].update(fmt="e4m3"),
    lambda document: document.update(torch_dtype=document.pop("dtype")),
]


@pytest.mark.parametrize("change", SAME_MODEL)
def test_other_spellings_give_the_same_model(change: Change) -> None:
    document = base()
    change(document)
    assert document != BASE
    assert ModelConfig.from_dict(document) == ModelConfig.from_dict(BASE)


@pytest.mark.parametrize("change", [drop_drafts, drop_engram])
def test_optional_parts_may_be_absent(change: Change) -> None:
    document = base()
    change(document)
    config = ModelConfig.from_dict(document)
    assert (config.num_draft_layers == 0) == (change is drop_drafts)


def rope(**changes: object) -> Change:
    return lambda document: document["text_config"]["rope_scaling"].update(changes)


def nested_rope(part: str, **changes: object) -> Change:
    def change(document: Document) -> None:
        nest_rope(document)
        document["text_config"]["rope_parameters"].setdefault(part, {}).update(changes)

    return change


def quantization(**changes: object) -> Change:
    return lambda document: document["quantization_config"].update(changes)


def top(**changes: object) -> Change:
    return lambda document: document.update(changes)


def lose_yarn(document: Document) -> None:
    del document["text_config"]["rope_scaling"]
    document["text_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000}


BROKEN_DOCUMENTS: list[tuple[Change, str, str]] = [
    (rope(rope_type="linear"), "rope_scaling.rope_type", "'yarn'"),
    (rope(factor=0.5), "rope_scaling.factor", "at least 1"),
    (rope(factor="16"), "rope_scaling.factor", "number"),
    (rope(beta_fast=1), "rope_scaling.beta_fast", "greater than beta_slow"),
    (rope(beta_slow=-1), "rope_scaling.beta_slow", "positive"),
    (rope(original_max_position_embeddings=2048.5), "original_max_position_embeddings", "integer"),
    (rope(mscale=1.0), "rope_scaling.mscale", "no such field"),
    (rope(attention_factor=0.9), "rope_scaling.attention_factor", "1.0"),
    (set_text("rope_scaling", "yarn"), "rope_scaling", "a JSON object"),
    (set_text("rope_parameters", {"rope_type": "yarn"}), "rope_parameters.factor", "a value"),
    (lose_yarn, "rope_parameters.rope_type", "'yarn'"),
    (nested_rope("main", rope_type="yarn"), "rope_parameters.main.rope_type", "'default'"),
    (nested_rope("main", factor=4), "rope_parameters.main.factor", "no such field"),
    (nested_rope("other", rope_theta=4), "rope_parameters.other", "main or compress only"),
    (
        lambda document: (nest_rope(document), document["text_config"].update(rope_theta=5000)),
        "rope_parameters.rope_theta",
        "the text_config value 5000",
    ),
    (quantization(quant_method="awq"), "quantization_config.quant_method", "'fp8'"),
    (quantization(activation_scheme="static"), "quantization_config.activation_scheme", "dynamic"),
    (quantization(weight_block_size=[128, 128]), "quantization_config.weight_block", "[32, 32]"),
    (quantization(scale_fmt="fp32"), "quantization_config.scale_fmt", "'ue8m0'"),
    (quantization(expert_dtype="fp8"), "quantization_config.expert_dtype", "'fp4'"),
    (quantization(fmt="e5m2"), "quantization_config.fmt", "'e4m3'"),
    (quantization(group_size=128), "quantization_config.group_size", "no such field"),
    (top(quantization_config=None), "quantization_config", "a JSON object"),
    (top(text_config=[1]), "text_config", "a JSON object"),
    (top(model_type="llama"), "model_type", "'deepseek_v41'"),
    (top(architectures=["LlamaForCausalLM"]), "architectures", "DeepseekV41ForCausalLM"),
    (top(architectures="DeepseekV41ForCausalLM"), "architectures", "['DeepseekV41ForCausalLM']"),
    (top(architectures=3), "architectures", "['DeepseekV41ForCausalLM']"),
    (top(dtype="float32"), "dtype", "'bfloat16'"),
    (top(tie_word_embeddings=True), "tie_word_embeddings", "False"),
    (top(rope_scaling={"factor": 4}), "rope_scaling", "no such field at the top level"),
    (top(bos_token_id=320), "bos_token_id", "a token id below vocab_size (320)"),
    (top(eos_token_id=[1, 2]), "eos_token_id", "a non-negative integer"),
    (top(pad_token_id=-1), "pad_token_id", "a non-negative integer"),
    (set_text("eos_token_id", 7), "text_config.eos_token_id", "the top-level value 1"),
]


@pytest.mark.parametrize(("change", "name", "rule"), BROKEN_DOCUMENTS)
def test_a_broken_document_is_named_with_its_rule(change: Change, name: str, rule: str) -> None:
    document = base()
    change(document)
    message = refusal_of(document)
    assert name in message
    assert rule in message


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("deepseek_v4", "DeepseekV4ForCausalLM"),
        ("deepseek_v3", "DeepseekV3ForCausalLM"),
        ("deepseek_v32", "DeepseekV32ForCausalLM"),
        ("deepseek_v41", "DeepseekV4ForCausalLM"),
    ],
)
def test_a_previous_generation_is_called_that(model_type: str, architecture: str) -> None:
    document = {**V4_DOCUMENT, "model_type": model_type, "architectures": [architecture]}
    message = refusal_of(document)
    assert "previous generation" in message
    assert "DeepSeek-V4.1-Flash only" in message


def test_a_long_value_is_cut() -> None:
    document = base()
    document["text_config"]["compress_ratios"] = "2" * 10_000
    assert len(refusal_of(document)) < 300


def test_replace_checks_the_rules_again() -> None:
    with pytest.raises(ConfigError, match="num_experts_per_tok expected at most"):
        replace(ModelConfig.from_dict(BASE), num_experts_per_tok=9)


@pytest.mark.parametrize("value", [None, {"factor": 16.0}])
def test_rope_scaling_must_be_its_type(value: Any) -> None:
    with pytest.raises(ConfigError, match="rope_scaling expected a RopeScaling, got"):
        replace(ModelConfig.from_dict(BASE), rope_scaling=value)


def test_from_file_reads_a_file_or_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    wanted = ModelConfig.from_dict(BASE)
    assert ModelConfig.from_file(tmp_path) == wanted
    assert ModelConfig.from_file(str(tmp_path / "config.json")) == wanted


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "check the path"),
        (b"{", "a syntax error"),
        (b"[]", "a JSON object"),
        (b"\xff\xfe", "readable UTF-8 JSON"),
        (b'{"model_type": "a", "model_type": "b"}', "model_type expected one value"),
        (b"[" * 100_000, "a syntax error"),
    ],
)
def test_an_unreadable_file_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        ModelConfig.from_file(tmp_path)
    assert "\n" not in str(caught.value)
