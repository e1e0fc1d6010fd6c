"""The picture of the prefix-repetition benchmark: how TTFT is distributed, which rows ran again."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from benchmarks.prefix_rows import PolicyRow

COLOURS = ("#4C4C4C", "#E69F00", "#0072B2", "#009E73")
"""Told apart also by readers who confuse red and green."""


def check_plotting() -> None:
    """Raises ImportError unless matplotlib is there, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "--plot expected matplotlib, got no such package; pip install 'pcpkit[bench]', or pass "
            "--no-plot"
        )


def write_plot(path: Path, rows: Sequence[PolicyRow], title: str) -> None:
    """Left: part of the prompts that had their token by a time. Right: rows run, in three kinds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    times, kinds = figure.subplots(1, 2)
    for row, colour in zip(rows, COLOURS, strict=False):
        ordered = sorted(1e3 * ttft for ttft in row.ttfts_s)
        times.ecdf(
            ordered, label=f"{row.policy}, mean {1e3 * row.mean_ttft_s:,.0f} ms", color=colour
        )
    times.set_xlim(left=0)
    times.set_xlabel("TTFT, ms")
    times.set_ylabel("part of the prompts")
    times.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)
    times.set_title("time to the first token")
    names = [row.policy for row in rows]
    replayed = [row.num_replayed_rows for row in rows]
    new = [row.num_rows - row.num_replayed_rows for row in rows]
    kinds.barh(names, new, color="#B0B0B0", label="not in the cache")
    kinds.barh(names, replayed, left=new, color="#D55E00", label="cached, computed again")
    for place, row in enumerate(rows):
        kinds.text(row.num_rows, place, f" {row.num_replayed_rows:,} again", va="center")
    kinds.set_xlim(0, 1.2 * max(row.num_rows for row in rows))
    kinds.invert_yaxis()
    kinds.set_xlabel("rows of the first layer, all requests")
    kinds.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)
    kinds.set_title("computed tokens")
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)
