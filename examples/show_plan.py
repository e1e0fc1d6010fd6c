"""Who owns which rows: the partition of the first steps as a coloured table, and as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pcpkit.engine.runner import ComputedStep

NUM_STEPS = 3
BAR_WIDTH = 40
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#edc948", "#76b7b2", "#9c755f")
"""By rank, again from the start after the last."""
RANK_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedRows:
    """Positions `start` .. `stop - 1` of a request, on one rank; `row` is the first one's place in
    the step."""

    request_id: str
    rank: int
    start: int
    stop: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedStep:
    """One step: its pieces in row order, and the rows of every rank."""

    pieces: tuple[OwnedRows, ...]
    rank_rows: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all ranks."""
        return sum(self.rank_rows)

    @property
    def num_padding(self) -> int:
        """Rows that are sent and are none: every rank is padded to the longest."""
        return max(self.rank_rows) * len(self.rank_rows) - self.num_rows


class PlanRecorder:
    """Keeps who owned the rows of the first steps; a step observer of the engine."""

    def __init__(self) -> None:
        self.steps: list[OwnedStep] = []

    def __call__(self, step: ComputedStep) -> None:
        """Look at the partition, not at the caches."""
        if len(self.steps) < NUM_STEPS:
            self.steps.append(owned_rows(step))


def owned_rows(step: ComputedStep) -> OwnedStep:
    """Who owns which rows of a step."""
    computed = step.batch.num_computed_tokens.tolist()
    rows = step.batch.query_start_loc.tolist()
    pieces = [
        OwnedRows(
            request_id=step.request_ids[segment.request],
            rank=rank,
            start=computed[segment.request] + segment.start,
            stop=computed[segment.request] + segment.stop,
            row=rows[segment.request] + segment.start,
        )
        for rank, segments in enumerate(step.partition.segments)
        for segment in segments
    ]
    return OwnedStep(
        pieces=tuple(sorted(pieces, key=lambda piece: piece.row)),
        rank_rows=tuple(len(part) for part in step.partition.rows),
    )


def print_plan(console: Console, steps: Sequence[OwnedStep]) -> None:
    """One table a step: a bar of owners for each request, then the rows of each rank."""
    for number, step in enumerate(steps):
        padding = f"{step.num_padding} of padding" if step.num_padding else "no padding"
        console.print(
            f"step {number}: {step.num_rows} rows on {len(step.rank_rows)} PCP ranks, {padding}"
        )
        console.print(_requests_table(step))
        console.print(_ranks_table(step))


def _requests_table(step: OwnedStep) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("request", no_wrap=True)
    table.add_column("positions", no_wrap=True)
    table.add_column("owner, first position to last", no_wrap=True)
    for request_id, pieces in _by_request(step):
        positions = f"{pieces[0].start} .. {pieces[-1].stop - 1}"
        table.add_row(Text(request_id), positions, _bar(pieces))
    return table


def _ranks_table(step: OwnedStep) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("rank", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("request: first position - last", overflow="fold")
    for rank, count in enumerate(step.rank_rows):
        mine = [piece for piece in step.pieces if piece.rank == rank]
        listed = ", ".join(f"{p.request_id}: {p.start}-{p.stop - 1}" for p in mine)
        style = f"bold {_colour(rank)}"
        table.add_row(Text(str(rank), style=style), str(count), Text(listed or "none"))
    return table


def _by_request(step: OwnedStep) -> Iterator[tuple[str, list[OwnedRows]]]:
    """Pieces of each request, in row order; a request's rows are consecutive."""
    names = dict.fromkeys(piece.request_id for piece in step.pieces)
    for name in names:
        yield name, [piece for piece in step.pieces if piece.request_id == name]


def _bar(pieces: Sequence[OwnedRows]) -> Text:
    """The owner of every row, or of evenly spaced ones of a longer request."""
    first, length = pieces[0].start, pieces[-1].stop - pieces[0].start
    bar = Text()
    for place in range(min(BAR_WIDTH, length)):
        position = first + place * length // min(BAR_WIDTH, length)
        owner = next(piece.rank for piece in pieces if position < piece.stop)
        letter = RANK_LETTERS[owner % len(RANK_LETTERS)]
        bar.append(letter, style=f"black on {_colour(owner)}")
    return bar


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def check_plotting() -> None:
    """Raises ImportError unless pictures can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "--plan-png expected matplotlib, got no such package; pip install 'pcpkit[bench]', or "
            "use --show-plan"
        )


def write_plan_png(path: Path, steps: Sequence[OwnedStep], title: str) -> None:
    """One panel a step: a bar of owners for each request, rows of the step from left to right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    counts = [len(list(_by_request(step))) for step in steps]
    height = 1.0 + sum(0.9 + 0.3 * count for count in counts)
    figure = Figure(figsize=(9.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(
        len(steps), 1, squeeze=False, height_ratios=[c + 2 for c in counts]
    )
    for number, (step, axes) in enumerate(zip(steps, panels[:, 0], strict=True)):
        names: list[str] = []
        for name, pieces in _by_request(step):
            for piece in pieces:
                width = piece.stop - piece.start
                axes.barh(
                    len(names), width, left=piece.row, color=_colour(piece.rank), edgecolor="white"
                )
            names.append(name)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, step.num_rows)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("row of the step")
        axes.set_ylabel("request")
        axes.set_title(f"step {number}: {step.num_rows} rows, {step.num_padding} of padding")
    size = len(steps[0].rank_rows)
    marks = [Patch(color=_colour(rank), label=f"rank {rank}") for rank in range(size)]
    figure.legend(handles=marks, loc="outside lower center", ncols=min(size, 8))
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)
