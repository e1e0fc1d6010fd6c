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

from rich.console import Console
from rich.progress import Progress

from command_line import make_parser
from job import Job, prepare, prepare_alike, read_stdin
from launch import launch, load, make_progress, refuse, start_ranks
from pcpkit.engine import (
    CacheRecorder,
    Engine,
    RequestOutput,
    compare_replicas,
    verify_requests,
)
from pcpkit.engine.runner import ComputedStep
from pcpkit.model.decoder import TextModel
from pcpkit.model.tokenizer import decode
from pcpkit.parallel.agreement import run_on_first, share_bytes
from pcpkit.parallel.groups import Group, single_rank
from pcpkit.plan.partition import STRATEGIES
from results import print_table, write_dump, write_files, write_json
from show_plan import PlanRecorder, print_plan, write_plan_png


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
    return launch(make_parser(), run_job, arguments)


def run_job(options: argparse.Namespace, world: Group) -> int:
    """Check, load, run, verify, report; returns the exit code, the same on every rank."""
    first = world.rank == 0
    try:
        job = prepare_alike(options, world, check_input)
    except ValueError as error:
        return refuse(error) if first else 2
    groups = start_ranks(job, world, options.deadline_s)
    differences = None
    with make_progress(Console(stderr=True), shown=first) as progress:
        model = load(job, options.numerics, progress, groups)
        run = run_requests(job, model, progress, options)
        if options.verify:
            differences = verify(job, model, run, world, options.numerics, progress)
    if first:
        present(options, job, run, differences)
    return 1 if differences else 0


def check_input(options: argparse.Namespace, world: Group) -> Job:
    """The job, from arguments and the first rank's standard input; raises as `prepare`."""
    stdin = share_bytes(world, read_stdin(options) if world.rank == 0 else b"")
    return prepare(options, stdin, writes=world.rank == 0)


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


if __name__ == "__main__":
    sys.exit(main())
