"""The whole model on Triton ops: same tokens as the CPU reference, and its own bits everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pcpkit.engine import (
    CacheRecorder,
    Engine,
    EngineConfig,
    Request,
    SamplingParams,
    load_model,
    verify_requests,
)
from pcpkit.model.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.gpu
LENGTHS = (301, 350, 400)
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    return [
        Request(
            request_id=str(length),
            prompt_token_ids=tuple(torch.randint(3, 2048, (length,), generator=generator).tolist()),
            params=SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, logits="last"),
        )
        for length in LENGTHS
    ]


def test_tokens_equal_the_reference(checkpoint: Path) -> None:
    """Greedy tokens of three prompts; logits differ by accumulated BF16 noise only."""
    outputs = {}
    for device in ("cpu", "cuda"):
        model = load_model(checkpoint, device=device, max_model_len=512)
        outputs[device] = Engine(model, EngineConfig(chunk_tokens=256)).generate(requests())
    for reference, got in zip(outputs["cpu"], outputs["cuda"], strict=True):
        assert len(got.token_ids) == NEW_TOKENS
        assert got.token_ids == reference.token_ids


def test_every_chunking_gives_the_same_bits(checkpoint: Path) -> None:
    model = load_model(checkpoint, device="cuda", max_model_len=512)
    config = EngineConfig(chunk_tokens=256)
    recorder = CacheRecorder(model.config)
    outputs = Engine(model, config, observe=recorder).generate(requests()[:2])
    assert verify_requests(model, config, outputs, recorder) == []
