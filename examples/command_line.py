"""The command line of `prefill.py`: flags, their ranges, and what follows from them.

`prefix_cache.py` shares the flags of the ranks.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pcpkit.config import ParallelConfig
from pcpkit.parallel.collectives import host_rank
from pcpkit.plan.partition import STRATEGIES
from prompts import Source

EXIT_CODES = (
    "Exit code: 0, 1 if --verify finds a difference, 2 for bad input, 3 if a rank was lost; the "
    "same on every rank."
)


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage text, from one of a host's ranks."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2."""
        self.exit(2, f"error: {message}; see --help\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        # Every rank parses the same arguments, before it knows more than its number on its host.
        if host_rank() == 0:
            super()._print_message(message, file)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser(
        description="Prefill prompts with DeepSeek-V4.1-Flash, decode a few tokens, report.",
        epilog=EXIT_CODES,
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="default: a small one, made and cached")
    text, file = partial(Source, kind="text"), partial(Source, kind="file")
    add("--prompt", action="append", dest="sources", type=lambda v: text(value=v), metavar="TEXT")
    add(
        "--prompt-file",
        action="append",
        dest="sources",
        type=lambda v: file(value=v),
        metavar="F",
        help="text file, - is standard input; like --prompt repeatable (default: README and docs)",
    )
    add("--token-ids", type=Path, metavar="F.json", help="a list of lists of token ids")
    add("--max-new-tokens", type=positive, default=16, metavar="N", help="default 16")
    add("--chunk-tokens", type=positive, default=512, metavar="N", help="rows a step; default 512")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--numerics", choices=("released", "weight_only"), default="released")
    add(
        "--logits",
        choices=("none", "last", "all"),
        default="last",
        help="kept for --dump, --verify",
    )
    add(
        "--verify",
        action="store_true",
        help="run again on one rank, cut differently; compare bit for bit (default prompts: only "
        "their first tokens)",
    )
    add("--json", type=Path, metavar="FILE", help="write a report")
    add("--dump", type=Path, metavar="F.safetensors", help="write tokens and logits")
    add = add_ranks(parser).add_argument
    add("--show-plan", action="store_true", help="print who owns which rows of the first steps")
    add("--plan-png", type=Path, metavar="F", help="the same as a picture (needs matplotlib)")
    return parser


def add_ranks(parser: argparse.ArgumentParser) -> Any:
    """Add what decides how many ranks do what; returns the group of flags."""
    group = parser.add_argument_group("ranks", "torchrun starts T x P processes")
    add = group.add_argument
    add("--tp", type=positive, default=1, metavar="T", help="tensor-parallel ranks; default 1")
    add("--pcp", type=positive, default=1, metavar="P", help="context-parallel ranks; default 1")
    add(
        "--ep",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="deal the experts to all T x P ranks, or give every rank all of them; default --ep",
    )
    add(
        "--partition",
        choices=tuple(STRATEGIES),
        default="levelled",
        help="who computes which rows; default levelled",
    )
    add(
        "--reduce",
        choices=("fast", "ordered"),
        help="sums over ranks: fast, or with the bits of one rank; default fast, and ordered with "
        "--verify",
    )
    add(
        "--deadline-s",
        type=seconds,
        default=120.0,
        metavar="S",
        help="longest wait for a peer; default 120",
    )
    return group


def positive(value: str) -> int:
    """An argument that counts something."""
    if not value.isascii() or not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {value!r}")
    return int(value)


def seconds(value: str) -> float:
    """An argument that is a time to wait."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 1 <= number <= 86400:
        raise argparse.ArgumentTypeError(f"expected seconds, 1 .. 86400, got {value!r}")
    return number


def ranks_of(options: argparse.Namespace) -> ParallelConfig:
    """The layout asked for."""
    return ParallelConfig(
        tp_size=options.tp,
        pcp_size=options.pcp,
        expert_parallel=options.ep and options.tp * options.pcp > 1,
    )


def reduce_of(options: argparse.Namespace) -> str:
    """How sums over ranks are taken.

    Raises:
        ValueError: fast sums, whose order nobody defined, are to be verified bit for bit.
    """
    if options.verify and options.reduce == "fast":
        raise ValueError(
            "--verify expected --reduce ordered, got fast, which has no defined order of sums; "
            "leave --reduce out"
        )
    return options.reduce or ("ordered" if options.verify else "fast")
