"""Reads the fields of ModelConfig out of a config.json document (model-spec section 1.1).

Three spellings of the rotary settings are read: `rope_scaling` next to `rope_theta` (the release),
one flat `rope_parameters` object (Transformers 5 moves both into it), and `rope_parameters` split
into `main` and `compress`. An unknown field is an error, because a field that changes the model
must not be dropped silently; the few fields that are known to change nothing are listed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

MODEL_TYPE = "deepseek_v41"
TEXT_MODEL_TYPE = "deepseek_v41_text"
ARCHITECTURE = "DeepseekV41ForCausalLM"
PREVIOUS_GENERATIONS = ("v2", "v3", "v32", "v4")

TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
ROPE_SCALING_FIELDS = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")

# Written by Transformers or used by the vision part only: no effect on the text model.
IGNORED_FIELDS = frozenset(
    {
        "_name_or_path",
        "_attn_implementation",
        "_commit_hash",
        "architectures",
        "auto_map",
        "transformers_version",
        "vision_config",
        "chunk_size_feed_forward",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
    }
)
IGNORED_TOP_LEVEL_PREFIXES = ("vision_", "aligner_", "image_", "projector_")

# Fields of sibling models that are accepted only at the value that makes them do nothing.
INERT_FIELDS: Mapping[str, object] = {"num_hash_layers": 0, "gate_temp": 1.0}
INERT_ROPE_FIELDS: Mapping[str, object] = {"attention_factor": 1.0, "truncate": True}
INERT_QUANTIZATION_FIELDS: Mapping[str, object] = {
    "fmt": "e4m3",
    "modules_to_not_convert": None,
    "dequantize": False,
}

QUANTIZATION_VALUES: Mapping[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

Document = Mapping[str, Any]


class ConfigError(ValueError):
    """A refused configuration; the one-line message names the field, its value and the rule."""


def refusal(
    name: str, expected: str, value: object, remedy: str = "correct it in config.json"
) -> ConfigError:
    """Returns (does not raise) the ConfigError `<name> expected ..., got ...; <remedy>`."""
    shown = repr(value)
    if len(shown) > 120:
        shown = f"{shown[:117]}..."
    return ConfigError(f"{name} expected {expected}, got {shown}; {remedy}")


def load_document(path: Path) -> Document:
    """Parses config.json; `path` is the file or the directory that holds it.

    Raises ConfigError for a missing or unreadable file, invalid JSON and a key that is given twice.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"config file expected readable UTF-8 JSON at {file}, got {error}; check the path"
        ) from error
    try:
        return _as_object(str(file), json.loads(text, object_pairs_hook=_unique_keys))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"config file expected JSON in {file}, got a syntax error ({error}); restore the file"
        ) from error


def read_fields(document: Document, field_names: Iterable[str]) -> dict[str, Any]:
    """Collects the values of `field_names` from a released config.json document.

    Lists become tuples; nothing is converted otherwise. `rope_scaling` comes back as a plain
    mapping of its four numbers. Raises ConfigError for a foreign model, a missing or unknown field
    and contradictory spellings.
    """
    _check_generation(_as_object("config.json", document))
    text = _as_object("text_config", _take(document, "text_config"))
    if (kind := _take(text, "model_type", "text_config.model_type")) != TEXT_MODEL_TYPE:
        raise refusal("text_config.model_type", repr(TEXT_MODEL_TYPE), kind)
    names = frozenset(field_names)
    _check_unknown(document, text, names)
    _check_dtype(document, text)
    values: dict[str, Any] = dict(_read_quantization(_take(document, "quantization_config")))
    values |= {name: _read_token(document, text, name) for name in TOKEN_FIELDS}
    values |= _read_rope(text)
    for name in names - values.keys():
        values[name] = _take(text, name)
    return {name: _tuples(values[name]) for name in names}


def _check_generation(document: Document) -> None:
    model_type = _take(document, "model_type")
    architectures: Any = _take(document, "architectures")
    listed = cast("list[Any]", architectures)
    if not isinstance(architectures, list):
        raise refusal("architectures", repr([ARCHITECTURE]), architectures)
    for name, found in [("model_type", model_type), *(("architectures", item) for item in listed)]:
        compact = str(found).lower().replace("_", "").removesuffix("forcausallm")
        if compact.removeprefix("deepseek") in PREVIOUS_GENERATIONS:
            raise refusal(
                name,
                f"{MODEL_TYPE} ({ARCHITECTURE})",
                found,
                "this is a previous generation of the model; pcpkit runs DeepSeek-V4.1-Flash only",
            )
    if model_type != MODEL_TYPE:
        raise refusal("model_type", repr(MODEL_TYPE), model_type)
    if listed != [ARCHITECTURE]:
        raise refusal("architectures", repr([ARCHITECTURE]), listed)


def _check_unknown(document: Document, text: Document, names: frozenset[str]) -> None:
    shared = names | IGNORED_FIELDS | {"model_type", "dtype", "torch_dtype"}
    text_known = shared | {"rope_parameters"} | INERT_FIELDS.keys()
    top_known = (shared & (IGNORED_FIELDS | set(TOKEN_FIELDS) | {"model_type"})) | {
        "dtype",
        "torch_dtype",
        "quantization_config",
        "text_config",
        "tie_word_embeddings",
    }
    for name, value in INERT_FIELDS.items():
        if text.get(name, value) != value:
            raise refusal(f"text_config.{name}", f"{value!r} (or no such field)", text[name])
    if (tied := document.get("tie_word_embeddings", False)) is not False:
        raise refusal("tie_word_embeddings", "False", tied)
    remedy = "remove it, or use a pcpkit version that knows it"
    for name in text:
        if name not in text_known:
            raise refusal(f"text_config.{name}", "no such field", text[name], remedy)
    for name in document:
        if name not in top_known and not name.startswith(IGNORED_TOP_LEVEL_PREFIXES):
            raise refusal(name, "no such field at the top level", document[name], remedy)


def _check_dtype(document: Document, text: Document) -> None:
    for place, source in (("", document), ("text_config.", text)):
        for key in ("dtype", "torch_dtype"):
            if source.get(key) not in (None, "bfloat16"):
                raise refusal(f"{place}{key}", "'bfloat16'", source[key])


def _read_quantization(raw: object) -> dict[str, Any]:
    section = _as_object("quantization_config", raw)
    for key, value in section.items():
        name = f"quantization_config.{key}"
        if key in INERT_QUANTIZATION_FIELDS:
            if value != INERT_QUANTIZATION_FIELDS[key]:
                raise refusal(name, repr(INERT_QUANTIZATION_FIELDS[key]), value)
        elif key not in QUANTIZATION_VALUES:
            raise refusal(name, "no such field", value, "remove it")
    for key, expected in QUANTIZATION_VALUES.items():
        found = _take(section, key, f"quantization_config.{key}")
        if found != expected or isinstance(found, bool):
            raise refusal(
                f"quantization_config.{key}", repr(expected), found, "use the released weights"
            )
    return {key: section[key] for key in ("weight_block_size", "expert_dtype")}


def _read_token(document: Document, text: Document, name: str) -> object:
    places = [source[name] for source in (document, text) if source.get(name) is not None]
    if not places:
        raise refusal(name, "a token id", "no such field", "add it to config.json")
    if places[-1] != places[0]:
        raise refusal(f"text_config.{name}", f"the top-level value {places[0]!r}", places[-1])
    return places[0]


def _read_rope(text: Document) -> dict[str, Any]:
    """Returns rope_theta, compress_rope_theta and rope_scaling from any of the three spellings."""
    found: dict[str, Any] = {}
    for name in ("rope_theta", "compress_rope_theta"):
        _merge(found, name, text.get(name))
    if (scaling := text.get("rope_scaling")) is not None:
        _merge(found, "rope_scaling", _read_scaling("rope_scaling", scaling, ()))
    if (raw := text.get("rope_parameters")) is not None:
        parameters = _as_object("rope_parameters", raw)
        nested = {"main", "compress"} & parameters.keys()
        for name, value in _read_rope_parameters(parameters, bool(nested)).items():
            _merge(found, name, value)
    for name in ("rope_theta", "compress_rope_theta", "rope_scaling"):
        if name not in found:
            raise refusal(
                name,
                "a value in text_config or in rope_parameters",
                "no such field",
                "without it the rotary tables of the compressed layers would be wrong",
            )
    return found


def _read_rope_parameters(parameters: Document, nested: bool) -> dict[str, Any]:
    if not nested:
        thetas = ("rope_theta", "compress_rope_theta")
        result: dict[str, Any] = {k: parameters[k] for k in thetas if k in parameters}
        result["rope_scaling"] = _read_scaling("rope_parameters", parameters, thetas)
        return result
    for name, value in parameters.items():
        if name not in ("main", "compress"):
            raise refusal(f"rope_parameters.{name}", "main or compress only", value, "remove it")
    main_name, name = "rope_parameters.main", "rope_parameters.compress"
    main = _as_object(main_name, _take(parameters, "main", main_name))
    compress = _as_object(name, _take(parameters, "compress", name))
    if (kind := main.get("rope_type", "default")) != "default":
        raise refusal(f"{main_name}.rope_type", "'default' (plain layers have no YaRN)", kind)
    for key in main.keys() - {"rope_type", "rope_theta"}:
        raise refusal(f"{main_name}.{key}", "no such field", main[key], "remove it")
    return {
        "rope_theta": _take(main, "rope_theta", f"{main_name}.rope_theta"),
        "compress_rope_theta": _take(compress, "rope_theta", f"{name}.rope_theta"),
        "rope_scaling": _read_scaling(name, compress, ("rope_theta",)),
    }


def _read_scaling(place: str, raw: object, also: tuple[str, ...]) -> dict[str, Any]:
    section = _as_object(place, raw)
    kind = section.get("rope_type", section.get("type"))
    if kind != "yarn":
        raise refusal(f"{place}.rope_type", "'yarn'", kind)
    for key, value in section.items():
        if key in INERT_ROPE_FIELDS:
            if value != INERT_ROPE_FIELDS[key]:
                raise refusal(f"{place}.{key}", repr(INERT_ROPE_FIELDS[key]), value)
        elif key not in (*ROPE_SCALING_FIELDS, "rope_type", "type", *also):
            raise refusal(f"{place}.{key}", "no such field", value, "remove it")
    return {key: _take(section, key, f"{place}.{key}") for key in ROPE_SCALING_FIELDS}


def _merge(found: dict[str, Any], name: str, value: object) -> None:
    if value is None:
        return
    if name in found and found[name] != value:
        raise refusal(
            f"rope_parameters.{name}", f"the text_config value {found[name]!r}", value, "keep one"
        )
    found[name] = value


def _take(section: Document, key: str, name: str | None = None) -> Any:
    if key not in section:
        raise refusal(name or key, "a value", "no such field", "add it to config.json")
    return section[key]


def _as_object(name: str, value: object) -> Document:
    if not isinstance(value, Mapping):
        raise refusal(name, "a JSON object", value)
    return cast("Document", value)


def _tuples(value: Any) -> Any:
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise refusal(key, "one value", f"two: {result[key]!r} and {value!r}", "keep one")
        result[key] = value
    return result
