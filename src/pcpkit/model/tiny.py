"""Small random checkpoints in the released schema, for tests, examples and benchmarks.

    python -m pcpkit.model.tiny --out DIR [--seed N] [--preset tiny|tiny-real-heads]

A tiny checkpoint has everything the released one has except size, vision and draft layers: every
layer mode of model-spec 1.2, Engram tables, FP8 and FP4 weights, and a real byte-level BPE
tokenizer, trained on the sources of Python's standard library.

The same seed gives the same bytes wherever Python and `tokenizers` have the same versions.
"""

from __future__ import annotations

import argparse
import builtins
import copy
import hashlib
import json
import platform
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pcpkit.config import ModelConfig
from pcpkit.model import tiny_weights
from pcpkit.model.checkpoint import write_checkpoint
from pcpkit.model.checkpoint_schema import expected_tensors
from pcpkit.model.engram_tables import check_token_map, engram_primes, token_map_from_tokenizer
from pcpkit.model.tiny_weights import draw_tensors
from pcpkit.model.tokenizer import TOKENIZER_FILE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MARKER_FILE: Final = "pcpkit_tiny.json"  # says that a directory is ours to replace

# Spelled as in the release; their order makes them ids 0, 1 and 2.
_SPECIAL_TOKENS = tuple(
    f"<\uff5c{name}\uff5c>"
    for name in ("begin\u2581of\u2581sentence", "end\u2581of\u2581sentence", "\u2581pad\u2581")
)
_MIN_TRAINING_CHARS = 200_000

_COMMON: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "model_type": "deepseek_v41_text",
        "vocab_size": 2048,
        "moe_intermediate_size": 64,
        "num_key_value_heads": 1,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 8,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        "rope_theta": 10000,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "compress_rope_theta": 160000,
        "index_head_dim": 128,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_max_ngram_size": 4,
        "engram_pad_token_id": 2,
        "num_nextn_predict_layers": 0,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 2047,
        "dspark_target_layer_ids": [],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    }
)
_PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        # Every layer mode: 0-1 window only; 2, 4 Full and 3, 5 Reuse at ratio 2; 6 Full with the
        # candidates, 7 Reuse, 8, 10 Reindex and 9, 11 Reuse of a Reindex at ratio 1. Top-k and
        # candidate pool cut from 17 and 33 compressed rows on; splits up to TP = EP = 8.
        "tiny": {
            "hidden_size": 256,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "head_dim": 128,
            "rope_original": 2048,  # moves the YaRN ramp away from the released pairs 15..25
            "sliding_window": 16,
            "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1],
            "kv_source_layer_ids": [2, 4, 6],
            "index_source_layer_ids": [2, 4, 6, 8, 10],
            "index_n_heads": 8,
            "index_topk": 16,
            "candidate_source_layer_id": 6,
            "candidate_topk_blocks": 8,
            "candidate_block_size": 4,
            "engram_layer_ids": [1, 4],
            "engram_vocab_size": 1000,
            "engram_n_heads": 8,
            "engram_head_dim": 32,
        },
        # The released head shapes, window, rotary values and record sizes.
        "tiny-real-heads": {
            "hidden_size": 512,
            "num_hidden_layers": 7,
            "num_attention_heads": 16,
            "head_dim": 512,
            "rope_original": 65536,
            "sliding_window": 128,
            "compress_ratios": [0, 2, 2, 1, 1, 1, 1],
            "kv_source_layer_ids": [1, 3],
            "index_source_layer_ids": [1, 3, 5],
            "index_n_heads": 32,
            "index_topk": 64,
            "candidate_source_layer_id": 3,
            "candidate_topk_blocks": 16,
            "candidate_block_size": 8,
            "engram_layer_ids": [1],
            "engram_vocab_size": 1000,
            "engram_n_heads": 2,
            "engram_head_dim": 256,
        },
    }
)
PRESETS: Final = tuple(_PRESETS)


def make_tiny_checkpoint(out: Path, *, seed: int = 0, preset: str = "tiny") -> Path:
    """Write config.json, model.safetensors and tokenizer.json of a random model to `out`.

    The directory appears complete or not at all. Takes a few seconds.

    Args:
        out: a path that does not exist, an empty directory, or an earlier tiny checkpoint, which is
            replaced.
        seed: any integer; selects the weights, not the tokenizer.
        preset: one of PRESETS.

    Raises:
        ValueError: unknown preset, or `out` holds anything else.
    """
    _check_preset(preset)
    out = out.resolve()
    _check_replaceable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        staged = Path(scratch) / "new"
        origin, texts = training_text()
        tokenizer = train_tokenizer(texts, vocab_size=_COMMON["vocab_size"])
        document = tiny_config(preset, check_token_map(token_map_from_tokenizer(tokenizer)))
        tensors = draw_tensors(expected_tensors(ModelConfig.from_dict(document)), seed)
        write_checkpoint(staged, document, tensors)
        tokenizer.save(str(staged / TOKENIZER_FILE), pretty=False)
        marker = {
            "preset": preset,
            "seed": seed,
            "fingerprint": _fingerprint(preset),
            "tokenizer_text": origin,
        }
        (staged / MARKER_FILE).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        _swap_in(staged, out, aside=Path(scratch) / "old")
    return out


def cached_tiny_checkpoint(
    cache_root: Path | None = None, *, seed: int = 0, preset: str = "tiny"
) -> Path:
    """Directory of a tiny checkpoint, made on the first call and read-only by agreement.

    Args:
        cache_root: parent of the cached directories; None is ~/.cache/pcpkit/tiny. The name below
            it holds preset, seed and a hash of everything else that decides the bytes.

    Several processes may call this at once.
    """
    _check_preset(preset)
    root = Path.home() / ".cache" / "pcpkit" / "tiny" if cache_root is None else cache_root
    out = root / f"{preset}-seed{seed}-{_fingerprint(preset)}"
    if (out / MARKER_FILE).is_file():
        return out
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".making.") as scratch:
        made = make_tiny_checkpoint(Path(scratch) / "checkpoint", seed=seed, preset=preset)
        try:
            made.rename(out)
        except OSError:
            # Another process was faster; its directory is complete, because it was renamed too.
            if not (out / MARKER_FILE).is_file():
                raise
    return out


def _fingerprint(preset: str) -> str:
    """Hash of what decides the bytes besides the seed: this code, Python's text, the trainer."""
    import tokenizers

    parts = [preset, platform.python_version(), tokenizers.__version__]
    sources = (Path(__file__), Path(tiny_weights.__file__))
    data = "\n".join(parts).encode() + b"".join(path.read_bytes() for path in sources)
    return hashlib.sha256(data).hexdigest()[:12]


def _swap_in(new: Path, out: Path, aside: Path) -> None:
    """Rename `new` to `out`; what was there goes to `aside`, or back if the rename fails."""
    if not out.exists():
        new.rename(out)
        return
    out.rename(aside)
    try:
        new.rename(out)
    except BaseException:
        aside.rename(out)
        raise


def _check_preset(preset: str) -> None:
    if preset not in _PRESETS:
        raise ValueError(f"preset expected one of {', '.join(PRESETS)}, got {preset!r}; pick one")


def _check_replaceable(out: Path) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"out expected a directory, got {out}, which is not; choose another path")
    found = sorted(path.name for path in out.iterdir())
    ours = {MARKER_FILE, TOKENIZER_FILE, "config.json", "model.safetensors"}
    if found and (MARKER_FILE not in found or not ours.issuperset(found)):
        foreign = next((name for name in found if name not in ours), found[0])
        raise ValueError(
            f"out expected an empty directory or an earlier tiny checkpoint, got {out} with "
            f"{foreign} in it; choose another path or empty it"
        )


# ---- configuration -------------------------------------------------------------------------------


def tiny_config(preset: str, compressed_vocab_size: int) -> dict[str, Any]:
    """The config.json document of a preset, for a tokenizer with that many compressed ids."""
    text = {**copy.deepcopy(dict(_COMMON)), **copy.deepcopy(dict(_PRESETS[preset]))}
    primes = engram_primes(
        num_layers=len(text["engram_layer_ids"]),
        max_ngram_size=text["engram_max_ngram_size"],
        num_heads=text["engram_n_heads"],
        vocab_size=text["engram_vocab_size"],
    )
    text["engram_num_embeddings"] = [int(columns.sum()) for columns in primes]
    text["engram_compressed_vocab_size"] = compressed_vocab_size
    text["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": text.pop("rope_original"),
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": text["vocab_size"],  # no id ever meets it: a text-only model
        "text_config": text,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }


# ---- tokenizer -----------------------------------------------------------------------------------


def training_text(library: Path | None = None) -> tuple[str, list[str]]:
    """What the tokenizer learns from: (name of the source, texts).

    The sources of the standard library in `library` (None: this Python's) in name order; where
    Python ships without them, the docstrings of the built-in types stand in.
    """
    root = Path(sysconfig.get_path("stdlib")) if library is None else library
    texts = [path.read_text("utf-8", errors="replace") for path in sorted(root.glob("*.py"))]
    if sum(map(len, texts)) >= _MIN_TRAINING_CHARS:
        return "standard library sources", texts
    return "built-in docstrings", list(_builtin_docstrings())


def _builtin_docstrings() -> Iterator[str]:
    for _, item in sorted(vars(builtins).items()):
        yield getattr(item, "__doc__", None) or ""
        for _, member in sorted(vars(item).items()) if isinstance(item, type) else ():
            yield getattr(member, "__doc__", None) or ""


def train_tokenizer(texts: Sequence[str], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly `vocab_size` tokens; bos, eos, pad are 0, 1, 2.

    Raises:
        ValueError: the text is too short to fill the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (size := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(
            f"texts expected enough text for {vocab_size} tokens, got {size} tokens out of "
            f"{sum(map(len, texts))} characters; use a Python that ships its sources"
        )
    return tokenizer


# ---- command line --------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m pcpkit.model.tiny`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pcpkit.model.tiny",
        description="Write a small random checkpoint in the released schema.",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    parser.add_argument("--preset", choices=PRESETS, default=PRESETS[0], help="model to write")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        out = make_tiny_checkpoint(options.out, seed=options.seed, preset=options.preset)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in out.iterdir())
    seconds = time.perf_counter() - start
    print(f"{out}: {options.preset}, seed {options.seed}, {size / 2**20:.1f} MiB, {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
