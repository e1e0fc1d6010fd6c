"""The engine on several ranks, as threads: the results of one rank, alike on all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from pcpkit.config import ConfigError, ParallelConfig
from pcpkit.engine import (
    CacheRecorder,
    Engine,
    EngineConfig,
    OpenCheckpoint,
    RequestOutput,
    compare_replicas,
    compare_requests,
    load_model,
    open_checkpoint,
)
from pcpkit.engine.runner import ComputedStep
from pcpkit.model.decoder import TextModel
from pcpkit.parallel.groups import Groups, SingleRank, single_rank
from pcpkit.parallel.virtual import run_virtual_ranks
from pcpkit.plan.partition import STRATEGIES, levelled, make_partition

from .small_model import random_prompt, request, write_small_checkpoint

# Chunks that end inside a pair and inside a window; one request waits for the other two.
CONFIG = EngineConfig(chunk_tokens=17, max_requests=2, block_size=8, window_block_size=8)
REQUESTS = [
    request("greedy", random_prompt(37, 0), max_new_tokens=2, logits="all", ignore_eos=True),
    request("one", random_prompt(1, 1), max_new_tokens=3, logits="last", ignore_eos=True),
    request(
        "drawn",
        random_prompt(8, 2),
        max_new_tokens=2,
        logits="all",
        temperature=0.8,
        seed=3,
        ignore_eos=True,
    ),
]
Outcome = tuple[list[RequestOutput], CacheRecorder]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> OpenCheckpoint:
    return open_checkpoint(write_small_checkpoint(tmp_path_factory.mktemp("ranks")))


def _load(checkpoint: OpenCheckpoint, groups: Groups, reduce: Literal["ordered", "fast"]):
    return load_model(checkpoint, max_model_len=64, groups=groups, reduce=reduce)


def _run(model: TextModel, strategy: str) -> Outcome:
    recorder = CacheRecorder(model.config)
    engine = Engine(model, CONFIG, observe=recorder, strategy=STRATEGIES[strategy])
    outputs = engine.generate(REQUESTS)
    engine.check_invariants()
    return outputs, recorder


@pytest.fixture(scope="module")
def alone(model: TextModel) -> Outcome:
    return _run(model, "levelled")


@pytest.mark.parametrize(
    ("tp", "pcp", "expert_parallel", "strategy"),
    [
        (1, 2, False, "dual"),
        (1, 4, True, "levelled"),
        (2, 2, True, "cyclic"),
        (4, 1, False, "dual"),
        (1, 3, False, "levelled"),
    ],
)
def test_every_layout_gives_the_bits_of_one_rank(
    checkpoint: OpenCheckpoint,
    alone: Outcome,
    tp: int,
    pcp: int,
    expert_parallel: bool,
    strategy: str,
) -> None:
    """Tokens, logits and cache bytes, on each rank."""
    config = ParallelConfig(tp_size=tp, pcp_size=pcp, expert_parallel=expert_parallel)

    def body(rank: int, groups: Groups) -> Outcome:
        return _run(_load(checkpoint, groups, "ordered"), strategy)

    for outputs, recorder in run_virtual_ranks(config, body):
        for got, expected in zip(outputs, alone[0], strict=True):
            name = expected.request.request_id
            expected_bytes = alone[1].cache_bytes(name)
            assert not compare_requests(expected, got, expected_bytes, recorder.cache_bytes(name))


def test_fast_sums_are_alike_on_all_ranks(checkpoint: OpenCheckpoint) -> None:
    config = ParallelConfig(tp_size=2, pcp_size=2, expert_parallel=True)

    def body(rank: int, groups: Groups) -> list[str]:
        return compare_replicas(groups.ep, *_run(_load(checkpoint, groups, "fast"), "levelled"))

    assert run_virtual_ranks(config, body) == [[]] * 4


@pytest.mark.parametrize(("tp", "pcp"), [(2, 1), (1, 2)])
def test_a_rank_that_computes_something_else_decides_like_the_others(
    checkpoint: OpenCheckpoint, tp: int, pcp: int
) -> None:
    """Every logit comes from one rank, so a rank with other hidden states cannot fork the rest."""

    def body(rank: int, groups: Groups) -> list[RequestOutput]:
        model = _load(checkpoint, groups, "fast")
        if rank == 1:
            layer = model.weights.layers[2]
            layers = list(model.weights.layers)
            layers[2] = replace(layer, attn_norm=layer.attn_norm * 1.5)
            model.weights = replace(model.weights, layers=tuple(layers))
        return _run(model, "levelled")[0]

    first, second = run_virtual_ranks(ParallelConfig(tp_size=tp, pcp_size=pcp), body)
    for left, right in zip(first, second, strict=True):
        assert not compare_requests(left, right, {}, {})
    sound = _run(_load(checkpoint, single_rank(), "fast"), "levelled")[0][0].logits
    assert sound is not None
    assert first[0].logits is not None
    assert not torch.equal(sound, first[0].logits), "rank 1 computed the same as the others"


def test_the_strategy_deals_the_rows(checkpoint: OpenCheckpoint) -> None:
    def body(rank: int, groups: Groups) -> list[ComputedStep]:
        steps: list[ComputedStep] = []
        model = _load(checkpoint, groups, "fast")
        Engine(model, CONFIG, observe=steps.append, strategy=STRATEGIES["dual"]).generate(
            REQUESTS[:1]
        )
        return steps

    ranks = run_virtual_ranks(ParallelConfig(pcp_size=2), body)
    for steps in ranks:
        assert [step.batch.num_tokens for step in steps] == [17, 17, 3, 1]
        for step in steps:
            lengths, prefills = step.batch.query_lens.tolist(), step.batch.is_prefilling.tolist()
            assert step.partition.segments == make_partition(lengths, prefills, 2).segments
    levelled_rows = make_partition([17], [True], 2, levelled).segments
    assert ranks[0][0].partition.segments != levelled_rows, "both strategies deal alike here"


def test_a_rank_reads_its_slice(checkpoint: OpenCheckpoint) -> None:
    """Half the vocabulary and heads, a quarter of the experts; all of it is told as progress."""
    config = ParallelConfig(tp_size=2, pcp_size=2, expert_parallel=True)

    def body(rank: int, groups: Groups) -> TextModel:
        told: list[tuple[int, int]] = []
        model = load_model(
            checkpoint, groups=groups, progress=lambda done, total: told.append((done, total))
        )
        assert told[-1] == (model.weights.num_bytes, model.weights.num_bytes)
        return model

    whole = load_model(checkpoint).weights
    models = run_virtual_ranks(config, body)
    heads = torch.cat([model.weights.head for model in models[:2]])
    assert torch.equal(heads, whole.head)
    for layer in range(7):
        experts = [model.weights.layers[layer].moe for model in models]
        assert [moe.first_expert for moe in experts] == [0, 2, 4, 6]
        stacked = torch.cat([moe.w1.weight for moe in experts])
        assert torch.equal(stacked, whole.layers[layer].moe.w1.weight)


# --- refusals -----------------------------------------------------------------------------------


def test_layouts_that_the_model_has_not_are_refused(checkpoint: OpenCheckpoint) -> None:
    refused = [
        (ParallelConfig(tp_size=3), r"tp_size expected a divisor of num_attention_heads \(8\)"),
        (ParallelConfig(tp_size=8), r"tp_size expected a divisor of o_groups \(4\), got 8"),
        (
            ParallelConfig(pcp_size=3, expert_parallel=True),
            r"expert-parallel size expected a divisor of n_routed_experts \(8\), got 3; .* no "
            "expert parallelism",
        ),
    ]
    for config, problem in refused:

        def body(rank: int, groups: Groups, problem: str = problem) -> None:
            with pytest.raises(ConfigError, match=problem) as caught:
                load_model(checkpoint, groups=groups)
            assert "\n" not in str(caught.value)

        run_virtual_ranks(config, body)


class _Named(SingleRank):
    """A group of another size, to be looked at only."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(name)
        self.size = size


def test_experts_are_on_one_rank_or_on_all(checkpoint: OpenCheckpoint) -> None:
    groups = Groups(tp=_Named("tp", 2), pcp=_Named("pcp", 2), ep=_Named("ep", 2))
    with pytest.raises(ValueError, match=r"^ep group expected 1 or tp x pcp = 4 ranks, got 2; "):
        load_model(checkpoint, groups=groups)


def test_unknown_sums_are_refused(checkpoint: OpenCheckpoint) -> None:
    with pytest.raises(ValueError, match=r"^reduce expected one of ordered, fast, got 'exact'; "):
        load_model(checkpoint, reduce="exact")  # pyright: ignore[reportArgumentType]


def test_a_folder_is_opened_for_a_rank(checkpoint: OpenCheckpoint) -> None:
    path = Path(checkpoint.directory)
    models = run_virtual_ranks(
        ParallelConfig(tp_size=2), lambda rank, groups: load_model(path, groups=groups)
    )
    assert [model.groups.tp.rank for model in models] == [0, 1]
