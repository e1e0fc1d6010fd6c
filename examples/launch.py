"""From the start of a process to a loaded model, and to the exit code, the same on every rank."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from command_line import ranks_of
from job import Job, one_line
from pcpkit.config import ParallelConfig
from pcpkit.engine import load_model
from pcpkit.model.decoder import TextModel
from pcpkit.parallel.agreement import wait_for_all
from pcpkit.parallel.collectives import (
    CollectiveError,
    in_job,
    join_job,
    launched_by_torchrun,
    start_process_groups,
    stop_process_groups,
    world_rank,
)
from pcpkit.parallel.groups import Group, Groups, SingleRank, single_rank

PARSING_DEADLINE_S = 30.0
"""For the ranks of a job that all refuse the same arguments."""


def launch(
    parser: argparse.ArgumentParser,
    run_job: Callable[[argparse.Namespace, Group], int],
    arguments: Sequence[str] | None,
) -> int:
    """Parse, meet the other ranks, run the job on this one; returns the exit code.

    Args:
        parser: of the arguments, with the flags of `command_line.add_ranks`.
        run_job: returns the same exit code on every rank.
        arguments: None takes those of the process.
    """
    joined_by_caller = in_job()
    try:
        options = parse(parser, arguments)
        try:
            world = join(options)
        except ValueError as error:
            return refuse(error)
        code = run_job(options, world)
        # torchrun stops all ranks when one fails: none may before the first has told everything.
        wait_for_all(world)
        return code
    except CollectiveError as error:
        # Not only on the first rank: it may be the one that was lost.
        print(f"error: rank {world_rank()[0]}: {one_line(error)}", file=sys.stderr)
        return 3
    finally:
        if not joined_by_caller:
            stop_process_groups()


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ranks that leave here (bad arguments, --help) leave together."""
    try:
        return parser.parse_args(arguments)
    except SystemExit:
        if launched_by_torchrun():
            wait_for_all(join_job(ParallelConfig(), deadline_s=PARSING_DEADLINE_S))
        raise


def join(options: argparse.Namespace) -> Group:
    """All ranks of the job; this one alone if nobody started more and no more are asked for.

    Raises:
        ValueError: more are asked for, and nobody started them.
        CollectiveError: a rank did not come.
    """
    ranks = ranks_of(options)
    if ranks.world_size == 1 and not launched_by_torchrun():
        return SingleRank("world")
    return join_job(ranks, deadline_s=options.deadline_s)


def start_ranks(job: Job, world: Group, deadline_s: float) -> Groups:
    """The groups of the model."""
    if job.device.type == "cpu":
        # The reference ops work on small tensors: more threads gain little, and on a machine that
        # is busy they wait for one another (20 times slower was seen).
        torch.set_num_threads(1)
    if world.size == 1:
        return single_rank()
    return start_process_groups(job.ranks, job.device, deadline_s=deadline_s)


def make_progress(console: Console, *, shown: bool) -> Progress:
    """Bars on standard error, so that standard output holds the results only."""
    return Progress(
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not shown,
    )


def load(
    job: Job,
    numerics: Any,
    progress: Progress,
    groups: Groups,
    beat: Callable[[], None] = lambda: None,
) -> TextModel:
    """Load this rank's weights, with a bar in MB."""
    bar = progress.add_task("load", total=None, unit="MB")

    def show(done: int, total: int) -> None:
        progress.update(bar, completed=done // 10**6, total=total // 10**6)
        beat()

    return load_model(
        job.checkpoint,
        device=job.device,
        numerics=numerics,
        max_model_len=max(request.max_tokens for request in job.requests),
        groups=groups,
        reduce=job.reduce,
        progress=show,
    )


def refuse(error: Exception) -> int:
    """Print a refusal; returns the exit code."""
    print("error:", one_line(error), file=sys.stderr)
    return 2
