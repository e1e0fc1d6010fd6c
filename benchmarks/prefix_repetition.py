"""Prefix caching under every replay policy, on the workload of the public reference result.

    python3 benchmarks/prefix_repetition.py --device cuda --preset tiny-real-heads
    python3 benchmarks/prefix_repetition.py --device cpu [--no-quick]  # a quarter of all lengths
    python3 benchmarks/prefix_repetition.py --device cuda --preset layer-slice [--num-layers 7]
    python3 benchmarks/prefix_repetition.py --device cuda --checkpoint DIR --policies none,snapshot

The workload: 10 prefixes of 1,024 tokens, 8 prompts on each with a suffix of 128, shuffled; 8
requests in the engine at any time; 1 output token. Random ids, seed 42. Nothing is ever evicted.

*Warm-ups.* The first 8 of the shuffled prompts are sent before the measurement, then again with all
80. So of 88 requests with 101,376 tokens the first on each prefix finds nothing (10), the prompts
that were warm-ups find 1,088 tokens, all their full blocks but the one of the last token (8), and
the others find their prefix (70): 8 x 1,088 + 70 x 1,024 = 78 x 1,024 + 8 x 64 = 80,384 tokens,
79.29 %. That is the reference's ratio, and the most there is.

*Comparison.* Every policy gets an engine of its own over one loaded model. The run without a cache
comes first; the answers of exact policies (token and logits of every request) must equal it in
every bit, or nothing is reported. On a GPU each policy first serves the same workload in other
token ids, so that nothing is compiled in the measured time; then all policies run `--rounds` times
in turn, and times are of all rounds together.

*Models.* With the small ones a step takes as long as its launches. `layer-slice` has the released
widths in a few layers, random weights made on the device, and no file (benchmarks/layer_slice.py).

TTFT runs from submission to the first token. It is of the 80 prompts, as the throughput is; tokens
and rows are of all 88 requests. Rows are those of the first layer: `exact` runs fewer above it.

Prints a table, appends a JSON line a policy to ``<gpu>-prefix-repetition.jsonl`` in
``benchmarks/results/`` and draws a PNG beside it. Exit status: 1 if an answer is wrong, 2 for bad
input, else 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Run as a program from a checkout in which nothing is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks import layer_slice
from benchmarks.prefix_plot import check_plotting, write_plot
from benchmarks.prefix_rows import PolicyRow, make_row, make_table
from benchmarks.prefix_run import (
    COLD,
    POLICIES,
    PolicyRun,
    differing_requests,
    engine_config,
    run_policy,
)
from benchmarks.prefix_workload import WorkloadShape, make_workload, with_other_tokens
from benchmarks.report import append_rows, machine, results_file
from pcpkit.engine import EngineConfig, load_model, open_checkpoint, resolve_device
from pcpkit.engine.sizing import cache_config
from pcpkit.model.decoder import TextModel
from pcpkit.model.tiny import PRESETS, cached_tiny_checkpoint

RESULTS = Path(__file__).resolve().parent / "results"
NAME = "prefix-repetition"
QUICK = 4
"""What --quick divides every length by: the hit ratio stays, to the last digit. On two CPU cores
all policies take a minute and a half then, and almost five minutes without."""
TABLE_WIDTH = 140
"""Of the table where the output is no terminal."""


class WrongAnswer(Exception):
    """An exact policy gave another answer than a cold run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    given = _parse(arguments)
    try:
        check_num_layers(given)
        policies = check_policies(given.policies)
        shape = shape_of(given)
        if given.rounds < 1:
            raise ValueError(f"--rounds expected at least 1, got {given.rounds}; leave it out")
        config = config_of(given, shape)
        if given.plot:
            check_plotting()
        model = load(given, shape, config)
    except (ValueError, ImportError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {line}", file=sys.stderr, flush=True)

    try:
        rows = measure(policies, model, config, shape, given.rounds, say)
    except WrongAnswer as error:
        print(f"WRONG: {error}; nothing is reported", file=sys.stderr)
        return 1
    report(given, shape, config, rows)
    return 0


def measure(
    policies: Sequence[str],
    model: TextModel,
    config: EngineConfig,
    shape: WorkloadShape,
    num_rounds: int,
    say: Callable[[str], None],
) -> list[PolicyRow]:
    """Run all policies in turn and compare their answers; the run without a cache is the first.

    Raises:
        WrongAnswer: an exact policy differs from it.
    """
    prompts = make_workload(shape, model.config.vocab_size)
    if model.device.type == "cuda":
        rehearsal = with_other_tokens(prompts, model.config.vocab_size)
        for policy in policies:
            run_policy(policy, model, config, rehearsal)
            say(f"{policy}: rehearsed")
    cold: PolicyRun | None = None
    runs: dict[str, list[PolicyRun]] = {policy: [] for policy in policies}
    num_differing: dict[str, int] = {}
    for _ in range(num_rounds):
        for policy in policies:
            run = run_policy(policy, model, config, prompts)
            cold = cold or run
            differing = differing_requests(cold, run)
            say(f"{policy}: {run.seconds:.2f} s, {len(differing)} answers differ from cold")
            if differing and POLICIES[policy]().exact_only:
                raise WrongAnswer(f"{policy}: requests {', '.join(differing)} differ from cold")
            runs[policy].append(run)
            num_differing[policy] = len(differing)
    return [make_row(runs[policy], num_differing[policy]) for policy in policies]


def report(
    given: argparse.Namespace, shape: WorkloadShape, config: EngineConfig, rows: list[PolicyRow]
) -> None:
    """Print the table, append the lines, draw the picture."""
    model = model_name(given)
    facts: dict[str, Any] = machine(given.device, given.commit) | {
        "model": model,
        "workload": asdict(shape),
        "concurrency": config.max_requests,
        "chunk_tokens": config.chunk_tokens,
        "block_size": config.block_size,
        "rounds": given.rounds,
    }
    path = results_file(given.results, facts["gpu"], NAME)
    append_rows(path, rows, facts)
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    print(", ".join(f"{name} {value}" for name, value in facts.items() if name != "workload"))
    print(
        f"{shape.num_prefixes} prefixes x {shape.prefix_len:,} + {shape.suffix_len} tokens, "
        f"{shape.num_prompts} prompts after {shape.num_warmups} warm-ups, seed {shape.seed}: "
        f"{shape.num_query_tokens:,} tokens, at most {shape.most_hit_tokens(config.block_size):,} "
        "of them hits"
    )
    console.print(make_table(rows))
    if given.plot:
        title = f"prefix repetition on {facts['gpu']}, {model}, {facts['commit']}"
        write_plot(path.with_suffix(".png"), rows, title)
        print(f"{path.with_suffix('.png')}")


def check_policies(text: str) -> list[str]:
    """Names in the order they run; the run without a cache is always among them.

    Raises:
        ValueError: an unknown name.
    """
    names = text.split(",")
    for name in names:
        if name not in POLICIES:
            raise ValueError(f"--policies expected some of {', '.join(POLICIES)}, got {name!r}")
    return [name for name in POLICIES if name in names or name == COLD]


def check_num_layers(given: argparse.Namespace) -> None:
    """Raises ValueError if --num-layers is given for a model that has its own."""
    if given.num_layers is not None and not _is_slice(given):
        raise ValueError(
            f"--num-layers expected with --preset {layer_slice.NAME}, got {given.num_layers} with "
            f"{model_name(given)}; drop it"
        )


def model_name(given: argparse.Namespace) -> str:
    """The model of the table and of the JSON lines; one of other depth is another model."""
    if given.checkpoint is not None:
        return given.checkpoint.name
    return f"{given.preset}-{_num_layers(given)}" if _is_slice(given) else given.preset


def shape_of(given: argparse.Namespace) -> WorkloadShape:
    """The workload asked for. Raises ValueError as `WorkloadShape`."""
    divisor = _divisor(given)
    full = WorkloadShape()
    return WorkloadShape(
        num_prefixes=given.num_prefixes,
        prefix_len=full.prefix_len // divisor if given.prefix_len is None else given.prefix_len,
        suffix_len=full.suffix_len // divisor if given.suffix_len is None else given.suffix_len,
        num_prompts=given.num_prompts,
        num_warmups=given.warmups,
        seed=given.seed,
    )


def config_of(given: argparse.Namespace, shape: WorkloadShape) -> EngineConfig:
    """Limits of every engine. Raises ConfigError as `EngineConfig`."""
    return engine_config(
        shape,
        concurrency=given.concurrency,
        chunk_tokens=_chunk_tokens(given),
        block_size=64 // _divisor(given) if given.block_size is None else given.block_size,
    )


def load(given: argparse.Namespace, shape: WorkloadShape, config: EngineConfig) -> TextModel:
    """The model of --checkpoint or --preset. Raises ValueError, ImportError or OSError."""
    device = resolve_device(given.device)
    max_model_len = shape.prompt_len + 1
    if _is_slice(given):
        sliced = layer_slice.slice_config(_num_layers(given))
        cache_config(sliced, config, max_model_len)
        print(f"{model_name(given)}: {layer_slice.describe(sliced)}", file=sys.stderr, flush=True)
        return layer_slice.make_model(sliced, device=device, max_model_len=max_model_len)
    opened = open_checkpoint(given.checkpoint or cached_tiny_checkpoint(preset=given.preset))
    cache_config(opened.config, config, max_model_len)
    return load_model(opened, device=device, max_model_len=max_model_len)


def _divisor(given: argparse.Namespace) -> int:
    """What lengths are divided by that are not given."""
    is_quick = given.device == "cpu" if given.quick is None else given.quick
    return QUICK if is_quick else 1


def _chunk_tokens(given: argparse.Namespace) -> int:
    """Rows of a step. Fewer on a CPU, where large temporary tensors cost page faults."""
    if given.chunk_tokens is not None:
        return given.chunk_tokens
    return 1024 if given.device == "cpu" else 4096 // _divisor(given)


def _is_slice(given: argparse.Namespace) -> bool:
    return given.checkpoint is None and given.preset == layer_slice.NAME


def _num_layers(given: argparse.Namespace) -> int:
    return layer_slice.NUM_LAYERS if given.num_layers is None else given.num_layers


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    shape = WorkloadShape()
    add("--policies", default=",".join(POLICIES), help="separated by commas; none always runs")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    presets, depth = (*PRESETS, layer_slice.NAME), layer_slice.NUM_LAYERS
    add("--preset", choices=presets, default=PRESETS[0], help="random model, see Models")
    add("--num-layers", type=int, help=f"of {layer_slice.NAME}; default {depth}, 7.4 GB each")
    add("--checkpoint", type=Path, help="another model, instead of --preset")
    quick = argparse.BooleanOptionalAction
    add("--quick", action=quick, help=f"all lengths over {QUICK}, unless given; default on a CPU")
    add("--num-prefixes", type=int, default=shape.num_prefixes)
    add("--prefix-len", type=int, help=f"tokens; default {shape.prefix_len}, unless quick")
    add("--suffix-len", type=int, help=f"tokens; default {shape.suffix_len}, unless quick")
    add("--num-prompts", type=int, default=shape.num_prompts)
    add("--warmups", type=int, default=shape.num_warmups, help="prompts sent before, and again")
    add("--concurrency", type=int, default=8, help="requests in the engine at any time")
    add("--seed", type=int, default=shape.seed)
    add("--rounds", type=int, default=1, help="how often all policies run; default 1")
    add("--chunk-tokens", type=int, help="rows of a step; default 4096, quick or on a CPU 1024")
    add("--block-size", type=int, help="tokens of a cached block; default 64, unless quick")
    add("--results", type=Path, default=RESULTS)
    add("--plot", action=argparse.BooleanOptionalAction, default=True)
    add("--commit", help="where there is no .git: the commit that is measured")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
