"""Prefill prompts, decode a few tokens, report: the main job of pcpkit.

    python examples/prefill.py                # small checkpoint, the project's own docs
    python examples/prefill.py --prompt 'def main' --max-new-tokens 32 --verify
    cat notes.txt | python examples/prefill.py --prompt-file - --json report.json
    torchrun --nproc-per-node 4 examples/prefill.py --tp 2 --pcp 2 --verify --show-plan

Without `--checkpoint` it makes a small checkpoint with random weights (16 MiB, in ~/.cache/pcpkit)
that has every part of the released model, so the continuation is noise and the numbers are real.

With torchrun every rank runs this file on the same arguments. All run the same engine on the same
requests and decide alike; the first rank alone prints and writes files. What a single rank can see
(standard input, a file that cannot be written, what `--verify` found) it tells the others, so that
all end with the same exit code: 0, 1 if `--verify` finds a difference, 2 for bad input, 3 if a rank
was lost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from command_line import make_parser, ranks_of
from job import Job, one_line, prepare_alike
from pcpkit.config import ParallelConfig
from pcpkit.engine import (
    CacheRecorder,
    Engine,
    RequestOutput,
    compare_replicas,
    load_model,
    verify_requests,
)
from pcpkit.engine.runner import ComputedStep
from pcpkit.model.decoder import TextModel
from pcpkit.model.tokenizer import decode
from pcpkit.parallel.agreement import run_on_first, wait_for_all
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
from pcpkit.plan.partition import STRATEGIES
from results import print_table, write_dump, write_files, write_json
from show_plan import PlanRecorder, print_plan, write_plan_png

PARSING_DEADLINE_S = 30.0
"""For the ranks of a job that all refuse the same arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the engine did; `prefill_s` is the time of all steps with prompt rows."""

    outputs: Sequence[RequestOutput]
    recorder: CacheRecorder | None
    plan: PlanRecorder
    prefill_tokens: int
    prefill_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job on this rank; returns the exit code."""
    joined_by_caller = in_job()
    try:
        options = parse(arguments)
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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ranks that leave here (bad arguments, --help) leave together."""
    try:
        return make_parser().parse_args(arguments)
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


def run_job(options: argparse.Namespace, world: Group) -> int:
    """Check, load, run, verify, report; returns the exit code, the same on every rank."""
    first = world.rank == 0
    try:
        job = prepare_alike(options, world)
    except ValueError as error:
        return refuse(error) if first else 2
    if job.device.type == "cpu":
        # The reference ops work on small tensors: more threads gain little, and on a machine that
        # is busy they wait for one another (20 times slower was seen).
        torch.set_num_threads(1)
    groups = single_rank()
    if world.size > 1:
        groups = start_process_groups(job.ranks, job.device, deadline_s=options.deadline_s)
    differences = None
    with make_progress(Console(stderr=True), shown=first) as progress:
        model = load(job, options.numerics, progress, groups)
        run = run_requests(job, model, progress, options)
        if options.verify:
            differences = verify(job, model, run, world, options.numerics, progress)
    if first:
        present(options, job, run, differences)
    return 1 if differences else 0


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


def run_requests(
    job: Job, model: TextModel, progress: Progress, options: argparse.Namespace
) -> Run:
    """Run all requests, with a bar of prompt tokens; every rank runs the same."""
    recorder = CacheRecorder(model.config) if options.verify else None
    plan = PlanRecorder()

    def observe(step: ComputedStep) -> None:
        plan(step)
        if recorder is not None:
            recorder(step)

    engine = Engine(model, job.engine, observe=observe, strategy=STRATEGIES[options.partition])
    prompt_tokens = sum(len(request.prompt_token_ids) for request in job.requests)
    prefill = progress.add_task("prefill", total=prompt_tokens, unit="tokens")
    for request in job.requests:
        engine.submit(request)
    finished: dict[str, RequestOutput] = {}
    prefill_s = 0.0
    while engine.has_work:
        result = engine.step()
        prefill_s += result.seconds if result.num_prompt_rows else 0.0
        progress.advance(prefill, result.num_prompt_rows)
        finished |= {output.request.request_id: output for output in result.finished}
    return Run(
        outputs=[finished[request.request_id] for request in job.requests],
        recorder=recorder,
        plan=plan,
        prefill_tokens=prompt_tokens,
        prefill_s=prefill_s,
    )


def verify(
    job: Job, model: TextModel, run: Run, world: Group, numerics: Any, progress: Progress
) -> tuple[str, ...]:
    """Compare the ranks with one another and with one rank alone; what differs, on every rank.

    The second run is the first rank's: each request alone, cut differently, on the whole model.
    """
    recorder = run.recorder
    assert recorder is not None, "the first run was recorded"
    unlike = compare_replicas(world, run.outputs, recorder)

    def again(beat: Callable[[], None]) -> Sequence[str]:
        alone = model if world.size == 1 else load(job, numerics, progress, single_rank(), beat)
        bar = progress.add_task("verify", total=sum(map(fed_tokens, run.outputs)), unit="tokens")

        def show(rows: int) -> None:
            progress.advance(bar, rows)
            beat()

        return verify_requests(alone, job.engine, run.outputs, recorder, show)

    return (*unlike, *run_on_first(world, again))


def fed_tokens(output: RequestOutput) -> int:
    """Tokens that ran: the last sampled one never does."""
    return len(output.request.prompt_token_ids) + len(output.token_ids) - 1


def present(
    options: argparse.Namespace, job: Job, run: Run, differences: Sequence[str] | None
) -> None:
    """Print the results and write the files; the first rank's part."""
    console = Console()
    tokenizer = job.checkpoint.tokenizer
    texts = [None if tokenizer is None else decode(tokenizer, o.token_ids) for o in run.outputs]
    if options.show_plan:
        print_plan(console, run.plan.steps)
    print_table(console, [prompt.label for prompt in job.prompts], run.outputs, texts)
    report = make_report(options, job, run, texts, differences)
    ranks = f"{job.ranks.world_size} ranks, " if job.ranks.world_size > 1 else ""
    console.print(
        f"{report['prefill_tokens']:,} prompt tokens at {report['prefill_tokens_per_s']:,.0f} "
        f"tokens/s on {ranks}{report['device']}, {report['numerics']} numerics"
    )
    title = f"{options.partition} partition, {options.pcp} PCP ranks"
    writers: dict[Path | None, Callable[[Path], None]] = {
        options.dump: partial(write_dump, outputs=run.outputs),
        options.json: partial(write_json, report=report),
        options.plan_png: partial(write_plan_png, steps=run.plan.steps, title=title),
    }
    write_files({path: write for path, write in writers.items() if path is not None})
    print_verdict(console, differences, job.ranks.world_size)


def make_report(
    options: argparse.Namespace,
    job: Job,
    run: Run,
    texts: Sequence[str | None],
    differences: Sequence[str] | None,
) -> dict[str, Any]:
    """What `--json` writes; `verified` is null without `--verify`."""
    return {
        "tp": job.ranks.tp_size,
        "pcp": job.ranks.pcp_size,
        "world_size": job.ranks.world_size,
        "expert_parallel": job.ranks.expert_parallel,
        "partition": options.partition,
        "reduce": job.reduce,
        "device": job.device.type,
        "numerics": options.numerics,
        "prefill_tokens": run.prefill_tokens,
        "prefill_tokens_per_s": run.prefill_tokens / run.prefill_s,
        "requests": [
            {
                "prompt_tokens": len(output.request.prompt_token_ids),
                "output_token_ids": list(output.token_ids),
                "text": text,
                "ttft_s": output.ttft_s,
            }
            for output, text in zip(run.outputs, texts, strict=True)
        ],
        "verified": None if differences is None else not differences,
    }


def print_verdict(console: Console, differences: Sequence[str] | None, world_size: int) -> None:
    """Print what `--verify` found."""
    if differences is None:
        return
    for line in differences:
        console.print(line, markup=False)
    same = "tokens, logits and cache bytes are the same"
    ranks = f" on {world_size} ranks and on one," if world_size > 1 else ""
    console.print(
        "verified: NO, see above"
        if differences
        else f"verified: {same}{ranks} alone and in other chunks",
        soft_wrap=True,
    )


def refuse(error: Exception) -> int:
    """Print a refusal; returns the exit code."""
    print("error:", one_line(error), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
