"""A model small enough to run hundreds of steps in a test: tests/data/small-config.json, random.

Window 16, top-k 16, ratios 0, 2 and 1, one Engram layer; 320 ids, of which 0, 1, 2 are special.
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


def small_model() -> TextModel:
    """On one rank."""
    config = ModelConfig.from_dict(small_document())
    specs = {n: s for n, s in expected_tensors(config).items() if s.section == "text"}
    tensors = draw_tensors(specs, seed=0)
    stream = ((name, tensor) for name, (tensor, _) in tensors.items())
    engram = EngramHash.from_config(config, small_token_map(config))
    return TextModel(config, load_weights(config, stream), engram, max_model_len=MAX_MODEL_LEN)


def write_small_checkpoint(folder: Path) -> Path:
    """The same model as files, with a token map and without a tokenizer."""
    document = small_document()
    config = ModelConfig.from_dict(document)
    write_checkpoint(folder, document, draw_tensors(expected_tensors(config), seed=0))
    save_file({"token_map": small_token_map(config)}, folder / TOKEN_MAP_FILE)
    return folder


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    """Ids 3 .. 319, no special ones."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 320, (length,), generator=generator).tolist())


def request(name: str, prompt: Sequence[int], **params: Any) -> Request:
    return Request(request_id=name, prompt_token_ids=tuple(prompt), params=SamplingParams(**params))
