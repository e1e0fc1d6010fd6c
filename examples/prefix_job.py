"""`prefix_cache.py` from its command line to a checked job: requests that share prefixes."""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from command_line import EXIT_CODES, OneLineParser, add_ranks, positive, ranks_of, reduce_of
from job import MAX_REQUESTS, Job, default_checkpoint
from pcpkit.cache.replay import (
    BoundedReplay,
    ExactReplay,
    NoReplay,
    ReplayPolicy,
    SnapshotReplay,
)
from pcpkit.engine import (
    EngineConfig,
    Request,
    SamplingParams,
    check_request,
    open_checkpoint,
    resolve_device,
)
from pcpkit.model.tiny import PRESETS
from pcpkit.parallel.collectives import device_of_rank
from pcpkit.parallel.groups import Group
from prompts import Prompt
from results import check_writable

REPLAYS: Mapping[str, ReplayPolicy] = {
    "none": NoReplay(),
    "bounded": BoundedReplay(),
    "exact": ExactReplay(),
    "snapshot": SnapshotReplay(),
}
"""What a hit computes, by the name of `--replay`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixJob:
    """Checked input: nothing the user gave can be refused any more.

    The requests come in waves: the first with every prefix, the second with every prefix, ..
    """

    job: Job
    replay: str
    num_prefixes: int

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self.job.device

    @property
    def policy(self) -> ReplayPolicy:
        """What a hit computes."""
        return REPLAYS[self.replay]

    @property
    def waves(self) -> list[Sequence[Request]]:
        """Requests that are sent together."""
        requests, size = self.job.requests, self.num_prefixes
        return [requests[first : first + size] for first in range(0, len(requests), size)]

    @property
    def fingerprint(self) -> bytes:
        """Of everything that decides what is computed."""
        return hashlib.sha256(self.job.fingerprint + self.replay.encode()).digest()


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser(
        description="Send requests that share prefixes; show what each took from the prefix cache.",
        epilog=f"{EXIT_CODES} Bounded replay is approximate: its differences are no failure.",
    )
    add = parser.add_argument
    add("--replay", choices=tuple(REPLAYS), default="snapshot", help="default snapshot")
    add("--checkpoint", type=Path, metavar="DIR", help="default: a small one, made and cached")
    add("--preset", choices=PRESETS, help="which small one; default tiny")
    add("--prefixes", type=positive, default=2, metavar="N", help="different ones; default 2")
    add("--uses", type=positive, default=3, metavar="N", help="requests with each; default 3")
    add("--prefix-tokens", type=positive, default=320, metavar="N", help="default 320")
    add("--suffix-tokens", type=positive, default=24, metavar="N", help="of each; default 24")
    add("--max-new-tokens", type=positive, default=4, metavar="N", help="default 4")
    add("--chunk-tokens", type=positive, default=512, metavar="N", help="rows a step; default 512")
    add("--seed", type=int, default=0, metavar="N", help="of the token ids; default 0")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--numerics", choices=("released", "weight_only"), default="released")
    add(
        "--verify",
        action="store_true",
        help="run all requests again without a cache; compare tokens and logits bit for bit",
    )
    add("--json", type=Path, metavar="FILE", help="write a report")
    add_ranks(parser)
    return parser


def check_input(options: argparse.Namespace, world: Group) -> PrefixJob:
    """Check everything that can be refused before any weight is read.

    Raises ValueError or ImportError with a message for the user.
    """
    reduce = reduce_of(options)
    if world.rank == 0 and options.json is not None:
        check_writable("--json", options.json)
    if options.checkpoint is not None and options.preset is not None:
        raise ValueError(
            f"--preset expected no --checkpoint beside it, got {options.preset} and "
            f"{options.checkpoint}; leave one of them out"
        )
    device = device_of_rank(resolve_device(options.device))
    preset = options.preset or PRESETS[0]
    checkpoint = open_checkpoint(options.checkpoint or default_checkpoint(preset))
    ranks = ranks_of(options)
    ranks.validate(checkpoint.config)
    requests = make_requests(options, checkpoint.config.vocab_size)
    for request in requests:
        check_request(
            request,
            vocab_size=checkpoint.config.vocab_size,
            max_model_len=checkpoint.config.max_position_embeddings,
        )
    limits = EngineConfig(
        chunk_tokens=options.chunk_tokens, max_requests=min(options.prefixes, MAX_REQUESTS)
    )
    # Room for all of them: nothing is evicted.
    blocks = len(requests) * -(-requests[0].max_tokens // limits.block_size)
    job = Job(
        checkpoint=checkpoint,
        device=device,
        prompts=[Prompt(label=r.request_id, text=None) for r in requests],
        requests=requests,
        engine=replace(limits, num_blocks=blocks + limits.max_requests),
        ranks=ranks,
        reduce=reduce,
    )
    return PrefixJob(job=job, replay=options.replay, num_prefixes=options.prefixes)


def make_requests(options: argparse.Namespace, vocab_size: int) -> list[Request]:
    """Random ids: every prefix with one suffix, then every prefix with another, .."""
    source = random.Random(options.seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(vocab_size) for _ in range(count))

    prefixes = [draw(options.prefix_tokens) for _ in range(options.prefixes)]
    params = SamplingParams(max_new_tokens=options.max_new_tokens, ignore_eos=True, logits="last")
    return [
        Request(
            request_id=f"prefix {number}, use {use}",
            prompt_token_ids=prefix + draw(options.suffix_tokens),
            params=params,
        )
        for use in range(1, options.uses + 1)
        for number, prefix in enumerate(prefixes)
    ]
