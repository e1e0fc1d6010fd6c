"""From the command line to a checked job, the same on every rank."""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from command_line import ranks_of, reduce_of
from pcpkit.config import ParallelConfig
from pcpkit.engine import (
    EngineConfig,
    OpenCheckpoint,
    Request,
    SamplingParams,
    open_checkpoint,
    resolve_device,
)
from pcpkit.model.tiny import PRESETS, cached_tiny_checkpoint
from pcpkit.parallel.agreement import check_alike, first_problem
from pcpkit.parallel.collectives import check_world_size, device_of_rank
from pcpkit.parallel.groups import Group
from prompts import Prompt, Source, default_sources, make_requests, read_text, read_token_ids
from results import check_writable
from show_plan import check_plotting

MAX_REQUESTS = 8
VERIFIED_TOKENS = 500
"""Of each default prompt under --verify: enough for every path, and minutes less on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Checked input: nothing the user gave can be refused any more."""

    checkpoint: OpenCheckpoint
    device: torch.device
    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    engine: EngineConfig
    ranks: ParallelConfig
    reduce: Any

    @property
    def fingerprint(self) -> bytes:
        """Of everything that decides what is computed."""
        parts = (self.requests, self.engine, self.ranks, self.reduce, self.checkpoint.config)
        return hashlib.sha256(repr(parts).encode()).digest()


class Checked(Protocol):
    """What ranks must agree on before they start: a `Job`, or what holds one."""

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        ...

    @property
    def fingerprint(self) -> bytes:
        """Of everything that decides what is computed."""
        ...


AnyJob = TypeVar("AnyJob", bound=Checked)


def prepare_alike(
    options: argparse.Namespace,
    world: Group,
    check_input: Callable[[argparse.Namespace, Group], AnyJob],
) -> AnyJob:
    """Check the input on every rank; if one refuses it, all do.

    Raises:
        ValueError: the job has not --tp x --pcp ranks, a rank refuses (with the lowest one's
            message), or the ranks were given different jobs.
    """
    check_world_size(ranks_of(options), world.size)
    try:
        job, problem = check_input(options, world), None
    except (ValueError, ImportError) as error:
        job, problem = None, one_line(error)
    problem = first_problem(world, problem)
    if job is None or problem is not None:
        raise ValueError(problem)
    check_alike(world, "device", job.device.type.encode())
    check_alike(world, "job", job.fingerprint)
    return job


def prepare(options: argparse.Namespace, stdin: bytes, *, writes: bool) -> Job:
    """Check everything that can be refused before any weight is read.

    Args:
        options: the command line.
        stdin: of the first rank, if a prompt comes from there.
        writes: whether this rank writes the files.

    Raises ValueError or ImportError with a message for the user.
    """
    reduce = reduce_of(options)
    if writes:
        check_outputs(options)
    device = device_of_rank(resolve_device(options.device))
    prompts, is_default = read_prompts(options, stdin)
    checkpoint = open_checkpoint(options.checkpoint or default_checkpoint())
    ranks = ranks_of(options)
    ranks.validate(checkpoint.config)
    whole = checkpoint.config.max_position_embeddings
    cut_to = VERIFIED_TOKENS if options.verify else whole
    requests = make_requests(
        prompts,
        checkpoint.config,
        checkpoint.tokenizer,
        SamplingParams(max_new_tokens=options.max_new_tokens, logits=options.logits),
        cut_to=cut_to if is_default else None,
    )
    engine = EngineConfig(
        chunk_tokens=options.chunk_tokens, max_requests=min(len(requests), MAX_REQUESTS)
    )
    return Job(
        checkpoint=checkpoint,
        device=device,
        prompts=prompts,
        requests=requests,
        engine=engine,
        ranks=ranks,
        reduce=reduce,
    )


def check_outputs(options: argparse.Namespace) -> None:
    """Raises ValueError or ImportError unless all files asked for can be written."""
    files = {"--json": options.json, "--dump": options.dump, "--plan-png": options.plan_png}
    seen: dict[Path, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        check_writable(flag, path)
        if path in seen:
            raise ValueError(
                f"{flag} expected another file than {seen[path]}, got {path} twice; choose two "
                "paths"
            )
        seen[path] = flag
    if options.plan_png is not None:
        check_plotting()


def default_checkpoint(preset: str = PRESETS[0]) -> Path:
    """A small checkpoint, made on the first use."""
    try:
        return cached_tiny_checkpoint(preset=preset)
    except (OSError, ImportError) as error:
        raise ValueError(
            f"--checkpoint expected to default to a small one in ~/.cache/pcpkit, got {error}; "
            "pass --checkpoint DIR, or install pcpkit[text] and make that folder writable"
        ) from error


def read_stdin(options: argparse.Namespace) -> bytes:
    """All of standard input if a prompt comes from there."""
    asked = any(source.kind == "file" and source.value == "-" for source in options.sources or [])
    return sys.stdin.buffer.read() if asked else b""


def read_prompts(options: argparse.Namespace, stdin: bytes) -> tuple[list[Prompt], bool]:
    """All prompts in the order given, token ids last; True if they are the default ones."""
    is_default = not options.sources and options.token_ids is None
    sources: list[Source] = default_sources() if is_default else options.sources or []
    text = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    prompts = [read_text(source, text) for source in sources]
    if options.token_ids is not None:
        prompts += read_token_ids(options.token_ids)
    return prompts, is_default


def one_line(error: Exception) -> str:
    """The message without line breaks."""
    return " ".join(str(error).split())
