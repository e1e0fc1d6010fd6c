"""Models small enough to run many steps in a test, with random weights.

`small_model`, for hundreds of steps, is tests/data/small-config.json: window 16, top-k 16, ratios
0, 2 and 1, one Engram layer; 320 ids, of which 0, 1, 2 are special. `micro_model`, for thousands,
has the same ids, window 4, one layer of each kind and no Engram.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pcpkit.config import ModelConfig
from pcpkit.engine import Request, SamplingParams
from pcpkit.model.checkpoint import expected_tensors, write_checkpoint
from pcpkit.model.decoder import TextModel
from pcpkit.model.engram_tables import TOKEN_MAP_FILE, EngramHash
from pcpkit.model.tiny_weights import draw_tensors
from pcpkit.model.weights import load_weights

CONFIG_FILE = Path(__file__).parent.parent / "data" / "small-config.json"
MAX_MODEL_LEN = 512


def small_document() -> dict[str, Any]:
    return json.loads(CONFIG_FILE.read_text(encoding="utf-8"))


def small_token_map(config: ModelConfig) -> Tensor:
    """Ids of the right number of classes, in order of first appearance."""
    return torch.arange(config.vocab_size) % config.engram_compressed_vocab_size


def micro_document() -> dict[str, Any]:
    document = small_document()
    document["text_config"] |= {
        "num_hidden_layers": 3,
        "compress_ratios": [2, 1, 0],
        "kv_source_layer_ids": [0, 1],
        "index_source_layer_ids": [0, 1],
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
        "index_topk": 4,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "sliding_window": 4,
        "hidden_size": 32,
        "moe_intermediate_size": 32,
        "num_attention_heads": 2,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 1,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
    }
    return document


def small_model() -> TextModel:
    """On one rank."""
    return _model(small_document())


def micro_model() -> TextModel:
    """On one rank."""
    return _model(micro_document())


def _model(document: dict[str, Any]) -> TextModel:
    config = ModelConfig.from_dict(document)
    specs = {n: s for n, s in expected_tensors(config).items() if s.section == "text"}
    tensors = draw_tensors(specs, seed=0)
    stream = ((name, tensor) for name, (tensor, _) in tensors.items())
    engram = None
    if config.engram_layer_ids:
        engram = EngramHash.from_config(config, small_token_map(config))
    return TextModel(config, load_weights(config, stream), engram, max_model_len=MAX_MODEL_LEN)


def write_small_checkpoint(folder: Path) -> Path:
    """The small model as files, with a token map and without a tokenizer."""
    return _write(folder, small_document())


def write_micro_checkpoint(folder: Path) -> Path:
    """The micro model as files."""
    return _write(folder, micro_document())


def _write(folder: Path, document: dict[str, Any]) -> Path:
    config = ModelConfig.from_dict(document)
    write_checkpoint(folder, document, draw_tensors(expected_tensors(config), seed=0))
    save_file({"token_map": small_token_map(config)}, folder / TOKEN_MAP_FILE)
    return folder


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    """Ids 3 .. 319, no special ones."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 320, (length,), generator=generator).tolist())


def request(
    name: str, prompt: Sequence[int], *, priority: int = 0, cache_salt: str = "", **params: Any
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),
        priority=priority,
        cache_salt=cache_salt,
    )
