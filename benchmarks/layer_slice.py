"""A slice of the released model: its widths in a few layers, random weights made on the device.

For measurements that need the work of a real layer without the real weights. There is no file, and
the host never holds the model: each tensor is drawn on the device, as for the tiny checkpoints, and
goes straight into `load_weights`. One rank.

What differs from the release: the number of layers, one of them with a window only and one with
Engram, where it has two of each; a small vocabulary and a small Engram table, which like the real
one lies in page-locked host memory beside a GPU. No draft layers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pcpkit.config import ModelConfig
from pcpkit.model.checkpoint_schema import TensorSpec, expected_tensors
from pcpkit.model.decoder import TextModel
from pcpkit.model.engram_tables import EngramHash, engram_primes
from pcpkit.model.tiny_weights import stream_tensors
from pcpkit.model.weights import load_weights

NAME = "layer-slice"
NUM_LAYERS = 7
"""The fewest that have every kind of layer."""
MAX_LAYERS = 40
VOCAB_SIZE = 8192
COMPRESSED_VOCAB_SIZE = 6279
"""Ids that Engram tells apart: 77 % of them, as in the release."""
ENGRAM_VOCAB_SIZE = 4096
"""Buckets of a hash column; 16,000,000 in the release."""
SPARE_BYTES = 32
"""Free memory asked for beside the weights, for each channel of the largest of them (157 million,
the Engram projection): drawing it takes half of that, and a step of 4,096 rows no more."""

RELEASED: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "deepseek_v41_text",
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "compress_rope_theta": 160000,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    }
)
"""Fields of the released text_config that a slice keeps: all but those of `_sliced_fields`."""


def slice_config(num_layers: int = NUM_LAYERS, kept: Mapping[str, Any] = RELEASED) -> ModelConfig:
    """The config of a slice.

    Layer 0 has a window only. Of the others 9 in 19 have ratio 2 and the rest ratio 1, as in the
    release. Sources are as far apart as there, or closer where there are too few layers: every
    slice has Full and Reuse at ratio 2, then Full with the candidates, Reuse, Reindex and Reuse.

    Args:
        num_layers: 7 .. 40.
        kept: the fields that do not depend on the depth; a test passes small ones.

    Raises:
        ValueError: `num_layers` out of range, or as `ModelConfig`.
    """
    if not NUM_LAYERS <= num_layers <= MAX_LAYERS:
        raise ValueError(
            f"num_layers expected {NUM_LAYERS} .. {MAX_LAYERS}, got {num_layers}; fewer have not "
            "every kind of layer, and the release has no more"
        )
    text = {**kept, **_sliced_fields(num_layers, kept)}
    return ModelConfig.from_dict(
        {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "image_token_id": VOCAB_SIZE,  # no id ever meets it: a text-only model
            "text_config": text,
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [32, 32],
                "scale_fmt": "ue8m0",
                "expert_dtype": "fp4",
            },
        }
    )


def _sliced_fields(num_layers: int, kept: Mapping[str, Any]) -> dict[str, Any]:
    num_ratio2 = 9 * (num_layers - 1) // 19
    num_ratio1 = num_layers - 1 - num_ratio2
    first_ratio1 = 1 + num_ratio2
    ratio2_sources = list(range(1, first_ratio1, 6))
    primes = engram_primes(
        num_layers=1,
        max_ngram_size=kept["engram_max_ngram_size"],
        num_heads=kept["engram_n_heads"],
        vocab_size=ENGRAM_VOCAB_SIZE,
    )
    return {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": num_layers,
        "compress_ratios": [0] + [2] * num_ratio2 + [1] * num_ratio1,
        "kv_source_layer_ids": [*ratio2_sources, first_ratio1],
        "index_source_layer_ids": [
            *ratio2_sources,
            *range(first_ratio1, num_layers, min(4, num_ratio1 // 2)),
        ],
        "candidate_source_layer_id": first_ratio1,
        "engram_layer_ids": [1],
        "engram_num_embeddings": [int(primes.sum())],
        "engram_vocab_size": ENGRAM_VOCAB_SIZE,
        "engram_compressed_vocab_size": COMPRESSED_VOCAB_SIZE,
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
    }


def weight_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """The tensors of a slice by name: those of a checkpoint that a text model reads."""
    expected = expected_tensors(config)
    return {n: spec for n, spec in expected.items() if spec.section == "text" and spec.is_read}


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of all weights, from the schema."""
    return sum(spec.num_bytes for spec in weight_specs(config).values())


def needed_bytes(config: ModelConfig) -> int:
    """Free memory that `make_model` asks for: see `SPARE_BYTES`."""
    largest = max(prod(spec.shape) for spec in weight_specs(config).values())
    return weight_bytes(config) + SPARE_BYTES * largest


def describe(config: ModelConfig) -> str:
    """One line: the size of a slice, before anything is allocated."""
    specs = weight_specs(config)
    experts = sum(spec.num_bytes for spec in specs.values() if spec.expert is not None)
    return (
        f"{config.num_hidden_layers} layers, {len(specs):,} tensors, "
        f"{weight_bytes(config) / 1e9:.1f} GB of weights ({experts / 1e9:.1f} GB of routed "
        f"experts), {needed_bytes(config) / 1e9:.1f} GB with room to run"
    )


def make_model(
    config: ModelConfig, *, device: torch.device | str, max_model_len: int, seed: int = 0
) -> TextModel:
    """A model of `slice_config` on one device.

    The same seed gives the same weights on the same kind of device: a GPU and a CPU differ.

    Raises:
        ValueError: the device has too little free memory, or `max_model_len` as `TextModel`.
    """
    target = torch.device(device)
    needed, free = needed_bytes(config), free_bytes(target)
    if free < needed:
        raise ValueError(
            f"device expected {needed / 1e9:.1f} GB of free memory for a slice of "
            f"{config.num_hidden_layers} layers, got {free / 1e9:.1f} GB on {target}; take fewer "
            "layers, a larger device or a tiny preset"
        )
    token_map = torch.arange(config.vocab_size) % config.engram_compressed_vocab_size
    weights = load_weights(config, _stream(config, seed, target), device=target)
    hashes = EngramHash.from_config(config, token_map)
    return TextModel(config, weights, hashes, max_model_len=max_model_len)


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU; beside a CPU all there is, because what is cached counts as used."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _stream(config: ModelConfig, seed: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in stream_tensors(weight_specs(config), seed, device):
        # Where a checkpoint's table is, too: `load_weights` page-locks it from there.
        yield name, tensor.cpu() if ".engram.embed." in name else tensor
