"""Requests that share prefixes: what each takes from the prefix cache, and is the answer the same?

    python examples/prefix_cache.py --verify                      # snapshots
    python examples/prefix_cache.py --replay bounded --verify     # the published approximation
    torchrun --nproc-per-node 4 examples/prefix_cache.py --replay exact --tp 2 --pcp 2 --verify

A hit brings the compressed KV and index keys of the prefix, but no window KV: `--replay` says how
that is rebuilt. The requests come in waves, one with each prefix: the first wave finds nothing, the
second finds the prefix. With `snapshot` it leaves what the third wave only has to copy; where the
full blocks of a prompt end with the prefix, as by default, the first wave has left it already.

`--verify` runs all requests again without a cache, on the same ranks. The exit code, the same on
every rank: 0, 1 if an answer differs although the policy is exact, 2 for bad input, 3 if a rank was
lost.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from job import prepare_alike
from launch import launch, load, make_progress, refuse, start_ranks
from pcpkit.cache.replay import NoReplay, ReplayPolicy
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.engine import Engine, RequestOutput, compare_requests
from pcpkit.model.decoder import TextModel
from pcpkit.parallel.agreement import gather_bytes
from pcpkit.parallel.groups import Group
from pcpkit.plan.partition import STRATEGIES
from prefix_job import PrefixJob, check_input, make_parser
from results import write_files, write_json

SNAPSHOT_BYTES = 2**28


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job on this rank; returns the exit code."""
    return launch(make_parser(), run_job, arguments)


def run_job(options: argparse.Namespace, world: Group) -> int:
    """Check, load, serve, verify, report; returns the exit code, the same on every rank."""
    first = world.rank == 0
    try:
        job = prepare_alike(options, world, check_input)
    except ValueError as error:
        return refuse(error) if first else 2
    groups = start_ranks(job.job, world, options.deadline_s)
    differing = None
    with make_progress(Console(stderr=True), shown=first) as progress:
        model = load(job.job, options.numerics, progress, groups)
        serve_as = partial(serve, job, model, STRATEGIES[options.partition], progress)
        outputs = serve_as(job.policy, "serve")
        if options.verify:
            differing = differing_requests(serve_as(NoReplay(), "verify"), outputs, world)
    if first:
        present(options, job, outputs, differing)
    return 1 if differing and job.policy.exact_only else 0


def serve(
    job: PrefixJob,
    model: TextModel,
    strategy: Any,
    progress: Progress,
    replay: ReplayPolicy,
    label: str,
) -> list[RequestOutput]:
    """Send wave after wave to a new engine, each when the one before is answered."""
    snapshots = SnapshotStore(SNAPSHOT_BYTES) if replay.uses_snapshots else None
    engine = Engine(model, job.job.engine, replay=replay, snapshots=snapshots, strategy=strategy)
    bar = progress.add_task(label, total=len(job.job.requests), unit="requests")
    outputs: list[RequestOutput] = []
    for wave in job.waves:
        outputs += engine.generate(wave)
        progress.advance(bar, len(wave))
    return outputs


def differing_requests(
    cold: Sequence[RequestOutput], outputs: Sequence[RequestOutput], world: Group
) -> list[str]:
    """Ids of the requests whose tokens or logits differ in any bit, on any rank."""
    own = [
        expected.request.request_id
        for expected, got in zip(cold, outputs, strict=True)
        if compare_requests(expected, got, {}, {})
    ]
    told = [json.loads(data) for data in gather_bytes(world, json.dumps(own).encode())]
    ids = [output.request.request_id for output in outputs]
    return [one for one in ids if any(one in other for other in told)]


def present(
    options: argparse.Namespace,
    job: PrefixJob,
    outputs: Sequence[RequestOutput],
    differing: Collection[str] | None,
) -> None:
    """Print the results and write the report; the first rank's part."""
    console = Console()
    report = make_report(options, job, outputs, differing)
    console.print(make_table(report["requests"]))
    console.print(
        f"{options.replay}: {report['cached_tokens']:,} of {report['prompt_tokens']:,} prompt "
        f"tokens from the cache, {report['replayed_rows']:,} of them computed again",
        soft_wrap=True,
    )
    if options.json is not None:
        write_files({options.json: partial(write_json, report=report)})
    if differing is not None:
        same = len(outputs) - len(differing)
        told = f"tokens and logits of {same} of {len(outputs)} answers equal a cold run's"
        if not differing:
            told = f"verified: {told}, bit for bit"
        elif job.policy.exact_only:
            told = f"verified: NO, only {told}"
        else:
            told = f"compared: {told}; {options.replay} replay is approximate"
        console.print(told, soft_wrap=True)


def make_report(
    options: argparse.Namespace,
    job: PrefixJob,
    outputs: Sequence[RequestOutput],
    differing: Collection[str] | None,
) -> dict[str, Any]:
    """What `--json` writes; `verified` and `as_cold` are null without `--verify`."""
    requests: list[dict[str, Any]] = [
        {
            "request": output.request.request_id,
            "prompt_tokens": len(output.request.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "replayed_rows": output.num_replayed_rows,
            "computed_rows": len(output.request.prompt_token_ids)
            - output.num_cached_tokens
            + output.num_replayed_rows,
            "ttft_s": output.ttft_s,
            "output_token_ids": list(output.token_ids),
            "as_cold": None if differing is None else output.request.request_id not in differing,
        }
        for output in outputs
    ]
    totals = ("prompt_tokens", "cached_tokens", "replayed_rows", "computed_rows")
    return {
        "replay": options.replay,
        "tp": job.job.ranks.tp_size,
        "pcp": job.job.ranks.pcp_size,
        "world_size": job.job.ranks.world_size,
        "reduce": job.job.reduce,
        "device": job.device.type,
        **{name: sum(request[name] for request in requests) for name in totals},
        "requests": requests,
        "verified": None if differing is None else not differing,
    }


def make_table(requests: Sequence[dict[str, Any]]) -> Table:
    """One entry a request; computed rows are those of the first layer."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("request", no_wrap=True)
    for name in ("tokens", "cached", "replayed", "computed", "TTFT s", "answer"):
        table.add_column(name, justify="right", no_wrap=True)
    answers = {None: "-", True: "as cold", False: "differs"}
    for request in requests:
        counts = ("prompt_tokens", "cached_tokens", "replayed_rows", "computed_rows")
        table.add_row(
            request["request"],
            *(f"{request[name]:,}" for name in counts),
            f"{request['ttft_s']:.2f}",
            answers[request["as_cold"]],
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
