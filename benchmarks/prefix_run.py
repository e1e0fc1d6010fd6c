"""Runs the prefix-repetition workload under one replay policy, on an engine of its own."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.prefix_workload import Prompt, WorkloadShape
from pcpkit.cache.replay import (
    BoundedReplay,
    ExactReplay,
    NoReplay,
    ReplayPolicy,
    SnapshotReplay,
)
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.engine import (
    Engine,
    EngineConfig,
    Request,
    RequestOutput,
    SamplingParams,
    compare_requests,
)
from pcpkit.model.decoder import TextModel

COLD = "none"
POLICIES: Mapping[str, Callable[[], ReplayPolicy]] = {
    COLD: NoReplay,
    "bounded": BoundedReplay,
    "exact": ExactReplay,
    "snapshot": SnapshotReplay,
}
"""By name, in the order they run. The first one is what answers are compared with."""
SNAPSHOT_BYTES = 2**30
"""More than all prefixes and prompts take: 2.7 MB an entry with the released layers, 0.5 with 7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A finished request and what it was sent as."""

    prompt: Prompt
    output: RequestOutput

    @property
    def num_computed_rows(self) -> int:
        """Rows it ran in its first layer, replayed ones included."""
        output = self.output
        return len(self.prompt.token_ids) - output.num_cached_tokens + output.num_replayed_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """All requests of one policy in the order they were sent.

    Attributes:
        seconds: from the first measured submission to the last measured answer.
    """

    policy: str
    served: tuple[Served, ...]
    seconds: float


def engine_config(
    shape: WorkloadShape, *, concurrency: int, chunk_tokens: int, block_size: int
) -> EngineConfig:
    """Limits with room for every prompt in the cache: nothing is evicted or preempted.

    Raises ConfigError as `EngineConfig`.
    """
    limits = EngineConfig(
        chunk_tokens=chunk_tokens, max_requests=concurrency, block_size=block_size
    )
    num_requests = shape.num_prompts + shape.num_warmups + concurrency
    return replace(limits, num_blocks=num_requests * -(-(shape.prompt_len + 1) // block_size))


def run_policy(
    policy: str, model: TextModel, config: EngineConfig, prompts: Sequence[Prompt]
) -> PolicyRun:
    """Send the warm-ups, wait for them, then send and time the rest.

    Args:
        policy: one of ``POLICIES``.
        model: loaded once for all policies.
        config: of the engine; ``max_requests`` is the number of requests kept in flight.
        prompts: in the order they are sent, warm-ups first.
    """
    # What an earlier engine left is not collected while this one is timed, and what is there now,
    # thousands of weights among it, is not looked through: a step in 26 took 30 ms more for it.
    gc.collect()
    gc.freeze()
    replay = POLICIES[policy]()
    snapshots = SnapshotStore(SNAPSHOT_BYTES) if replay.uses_snapshots else None
    engine = Engine(model, config, replay=replay, snapshots=snapshots)
    num_warmups = sum(prompt.is_warmup for prompt in prompts)
    requests = [_request(str(place), prompt) for place, prompt in enumerate(prompts)]
    outputs = closed_loop(engine, requests[:num_warmups])
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    began = time.perf_counter()
    outputs += closed_loop(engine, requests[num_warmups:])
    seconds = time.perf_counter() - began
    served = [
        Served(prompt=prompt, output=output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return PolicyRun(policy=policy, served=tuple(served), seconds=seconds)


def closed_loop(engine: Engine, requests: Sequence[Request]) -> list[RequestOutput]:
    """Keep ``max_requests`` requests in the engine until none is left; results in order sent."""
    waiting = iter(requests)
    finished: dict[str, RequestOutput] = {}

    def submit_one() -> None:
        request = next(waiting, None)
        if request is not None:
            engine.submit(request)

    for _ in range(engine.config.max_requests):
        submit_one()
    while engine.has_work:
        for output in engine.step().finished:
            finished[output.request.request_id] = output
            submit_one()
    return [finished[request.request_id] for request in requests]


def differing_requests(cold: PolicyRun, run: PolicyRun) -> list[str]:
    """Ids of the requests whose token or logits differ in any bit from the run without a cache."""
    return [
        expected.output.request.request_id
        for expected, got in zip(cold.served, run.served, strict=True)
        if compare_requests(expected.output, got.output, {}, {})
    ]


def _request(request_id: str, prompt: Prompt) -> Request:
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, logits="last")
    return Request(request_id=request_id, prompt_token_ids=prompt.token_ids, params=params)
