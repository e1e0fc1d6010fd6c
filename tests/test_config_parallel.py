"""Rules of CacheConfig and ParallelConfig, alone and against a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pcpkit.config import CacheConfig, ConfigError, ModelConfig, ParallelConfig

Document = dict[str, Any]
SMALL_CONFIG = Path(__file__).resolve().parent / "data" / "small-config.json"


def model(**changes: Any) -> ModelConfig:
    return replace(ModelConfig.from_file(SMALL_CONFIG), **changes)


def cache(**changes: Any) -> CacheConfig:
    sizes: Document = {"num_blocks": 4, "num_window_blocks": 4, "num_requests": 1}
    return CacheConfig(**(sizes | changes))


def test_cache_defaults_serve_the_model() -> None:
    config = cache()
    assert (config.block_size, config.window_block_size, config.ring_rows) == (64, 32, 8)
    assert config.compressed_format == "nvfp4"
    config.validate(model())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_blocks": 0}, "num_blocks expected a positive integer"),
        ({"num_window_blocks": -1}, "num_window_blocks expected a positive integer"),
        ({"num_requests": 1.0}, "num_requests expected a positive integer"),
        ({"window_block_size": 0}, "window_block_size expected a positive integer"),
        ({"block_size": 33}, "block_size expected a multiple of ratio 2"),
        ({"ring_rows": 7}, "ring_rows expected an even number"),
        ({"ring_rows": 0}, "ring_rows expected a positive integer"),
        ({"compressed_format": "fp8_ds_mla"}, "compressed_format expected one of nvfp4, mxfp8"),
    ],
)
def test_cache_rules(changes: Document, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cache(**changes)


def test_the_ring_must_hold_a_rejected_draft() -> None:
    config = model()
    with pytest.raises(ConfigError, match=r"ring_rows expected at least .* \(7\), got 6"):
        cache(ring_rows=6).validate(config)
    without_drafts = replace(
        config, num_nextn_predict_layers=0, compress_ratios=(0, 2, 2, 1, 1, 1, 0)
    )
    cache(ring_rows=2).validate(without_drafts)


def test_parallel_sizes() -> None:
    config = ParallelConfig(tp_size=4, pcp_size=2, expert_parallel=True)
    assert (config.world_size, config.ep_size) == (8, 8)
    assert replace(config, expert_parallel=False).ep_size == 1
    assert ParallelConfig() == ParallelConfig(tp_size=1, pcp_size=1, expert_parallel=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp_size": 0}, "tp_size expected a positive integer"),
        ({"pcp_size": True}, "pcp_size expected a positive integer"),
        ({"expert_parallel": 1}, "expert_parallel expected true or false"),
    ],
)
def test_parallel_rules(changes: Document, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**changes)


@pytest.mark.parametrize(
    ("text", "parallel", "words"),
    [
        ({}, {"tp_size": 3}, r"tp_size expected a divisor of num_attention_heads \(8\), got 3"),
        ({}, {"tp_size": 8}, r"tp_size expected a divisor of o_groups \(4\), got 8"),
        ({"vocab_size": 322}, {"tp_size": 4}, r"a divisor of vocab_size \(322\), got 4"),
        (
            {"engram_num_embeddings": (5,)},
            {"tp_size": 4},
            "every rank owns rows of an Engram table",
        ),
        ({"n_routed_experts": 6}, {"tp_size": 4, "expert_parallel": True}, "of n_routed_experts"),
        ({}, {"pcp_size": 8, "expert_parallel": True}, "of dspark_n_routed_experts"),
    ],
)
def test_a_model_that_does_not_split_is_refused(
    text: Document, parallel: Document, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**parallel).validate(model(**text))
