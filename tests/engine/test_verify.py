"""Recording and comparing: equal runs are equal, and every kind of difference is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pcpkit.cache.pool import CachePool
from pcpkit.engine import (
    CacheRecorder,
    Engine,
    EngineConfig,
    RequestOutput,
    compare_requests,
    verify_requests,
)
from pcpkit.model.decoder import TextModel
from pcpkit.plan.step import StepPlan

from .small_model import random_prompt, request

CONFIG = EngineConfig(chunk_tokens=32, max_requests=2, block_size=8, window_block_size=8)
Run = tuple[list[RequestOutput], CacheRecorder]


def _run(model: TextModel) -> Run:
    recorder = CacheRecorder(model.config)
    engine = Engine(model, CONFIG, observe=recorder)
    asked = [
        request("odd", random_prompt(40, 0), max_new_tokens=2, logits="all", ignore_eos=True),
        request("even", random_prompt(9, 1), max_new_tokens=2, logits="last", ignore_eos=True),
    ]
    return engine.generate(asked), recorder


@pytest.fixture(scope="module")
def run(model: TextModel) -> Run:
    return _run(model)


def test_a_recorder_has_every_record_in_position_order(model: TextModel, run: Run) -> None:
    config = model.config
    # 41 and 10 tokens were computed: the last sampled one never is.
    odd, even = run[1].cache_bytes("odd"), run[1].cache_bytes("even")
    assert {odd[f"window.{layer}"].shape[0] for layer in range(config.num_hidden_layers)} == {41}
    assert even["window.0"].shape == (10, config.head_dim + config.head_dim // 32)
    for layer in config.kv_source_layer_ids:
        groups = 41 // config.compress_ratio(layer)
        assert odd[f"compressed.{layer}"].shape[0] == groups
        assert odd[f"index_keys.{layer}"].shape[0] == groups
    assert {name for name in odd if name.startswith("ring")} == {"ring.1"}
    assert odd["ring.1"].shape == (2 * config.head_dim * 4,)
    assert not {name for name in even if name.startswith("ring")}
    assert run[1].cache_bytes("unknown") == {}


def test_records_are_what_the_caches_hold(model: TextModel, run: Run) -> None:
    """Read back from the pool by block tables, apart from the plan's slots."""
    pools: list[CachePool] = []
    engine = Engine(
        model, replace(CONFIG, chunk_tokens=256), observe=lambda step: pools.append(step.pool)
    )
    asked = run[0][0].request
    engine.submit(replace(asked, params=replace(asked.params, max_new_tokens=1)))
    engine.step()
    recorded = run[1].cache_bytes("odd")
    # One request in a fresh pool has blocks 0, 1, ..: rows lie in position order.
    for layer in (0, 3):
        assert torch.equal(
            pools[0].window[layer].flatten(0, 1)[:40], recorded[f"window.{layer}"][:40]
        )
    assert torch.equal(pools[0].compressed[1].flatten(0, 1)[:20], recorded["compressed.1"][:20])
    assert torch.equal(pools[0].index_keys[3].flatten(0, 1)[:40], recorded["index_keys.3"][:40])


def test_a_sound_model_verifies(model: TextModel, run: Run) -> None:
    rows: list[int] = []
    assert verify_requests(model, CONFIG, *run, rows.append) == []
    assert sum(rows) == 41 + 10
    assert rows[0] == 1, "the second run cuts the prompt like the first"


class _Disturbed:
    """A forward that is right only for steps of several rows, as a kernel with a tile bug."""

    def __init__(self, model: TextModel, spoil: Callable[[Tensor, CachePool, StepPlan], Tensor]):
        self._forward = model.forward
        self._spoil = spoil

    def __call__(self, plan: StepPlan, pool: CachePool) -> Tensor:
        logits = self._forward(plan, pool)
        return self._spoil(logits, pool, plan) if plan.num_rows == 1 else logits


def _next_float(logits: Tensor, pool: CachePool, plan: StepPlan) -> Tensor:
    return logits.nextafter(torch.tensor(torch.inf))


def _flip_window_bit(logits: Tensor, pool: CachePool, plan: StepPlan) -> Tensor:
    slot = int(plan.layer_rows(6).window_slots[0])
    last = pool.window[6].flatten(0, 1)
    last[slot, 0] ^= 1
    return logits


@pytest.mark.parametrize(
    ("spoil", "named"), [(_next_float, "logits"), (_flip_window_bit, "window.6")]
)
def test_a_model_that_depends_on_the_step_is_found(
    model: TextModel, run: Run, spoil: Callable[[Tensor, CachePool, StepPlan], Tensor], named: str
) -> None:
    spoilt = copy.copy(model)
    spoilt.forward = _Disturbed(model, spoil)  # pyright: ignore[reportAttributeAccessIssue]
    found = verify_requests(spoilt, CONFIG, run[0][1:], run[1])
    assert any(f"request even: {named} differs first at row" in line for line in found), found


def test_each_kind_of_difference_has_a_line(run: Run) -> None:
    output, recorded = run[0][0], run[1].cache_bytes("odd")
    assert output.logits is not None
    assert compare_requests(output, output, recorded, recorded) == []
    other = replace(output, token_ids=(*output.token_ids[:-1], 5))
    assert "tokens" in compare_requests(output, other, recorded, recorded)[0]
    negative_zero = replace(output, logits=torch.full_like(output.logits, -0.0))
    zero = replace(output, logits=torch.zeros_like(output.logits))
    assert "logits differs" in compare_requests(zero, negative_zero, recorded, recorded)[0]
    for name in recorded:
        changed = recorded[name].clone()
        changed.view(-1)[-1] ^= 0x80
        (line,) = compare_requests(output, output, recorded, recorded | {name: changed})
        assert line == f"request odd: {name} differs first at row {len(changed) - 1}"
    short = recorded | {"window.2": recorded["window.2"][:-1]}
    assert "shapes [41" in compare_requests(output, output, recorded, short)[0]
    missing = {name: data for name, data in recorded.items() if name != "ring.1"}
    assert "only one run has ['ring.1']" in compare_requests(output, output, recorded, missing)[0]
