"""What the prefix-repetition benchmark reports of each policy: statistics and their table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.prefix_run import PolicyRun, Served

SETTLED_USE = 3
"""From this use of a prefix on its snapshot can be there: use 1 is cold, use 2 replays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """One policy. Times are of the measured prompts of all rounds; everything else is of one round,
    the warm-ups included.

    Attributes:
        mean_ttft_s, median_ttft_s, p99_ttft_s: from submission to the first token.
        input_tokens_per_s: prompt tokens of the measured prompts over their time, hits included.
        num_query_tokens, num_hit_tokens: of all prompts, and those of them taken from the cache.
        num_hits: requests that took anything.
        rows_per_hit, most_rows_per_hit: rows such a request still ran, mean and maximum; None
            without a hit.
        most_settled_rows: rows that any request ran from the third use of its prefix on
            (`Prompt.use`), at most; None if there is no such request.
        num_rows, num_replayed_rows: rows run in all, and those of them below a hit.
        num_differing: requests whose token or logits differ from the run without a cache.
        seconds: from the first measured submission to the last answer, all rounds together.
        ttfts_s: in the order sent, round by round.
    """

    policy: str
    mean_ttft_s: float
    median_ttft_s: float
    p99_ttft_s: float
    input_tokens_per_s: float
    num_requests: int
    num_query_tokens: int
    num_hit_tokens: int
    num_hits: int
    rows_per_hit: float | None
    most_rows_per_hit: int | None
    most_settled_rows: int | None
    num_rows: int
    num_replayed_rows: int
    num_differing: int
    seconds: float
    ttfts_s: tuple[float, ...]

    @property
    def hit_ratio(self) -> float:
        """Part of the prompt tokens that was taken from the cache."""
        return self.num_hit_tokens / self.num_query_tokens


def make_row(rounds: Sequence[PolicyRun], num_differing: int) -> PolicyRow:
    """Statistics of the rounds of one policy, which all decide alike."""
    run = rounds[0]
    measured = [served for one in rounds for served in one.served if not served.prompt.is_warmup]
    seconds = sum(one.seconds for one in rounds)
    hits = [served.num_computed_rows for served in run.served if served.output.num_cached_tokens]
    settled = [s.num_computed_rows for s in run.served if s.prompt.use >= SETTLED_USE]
    ttfts = tuple(served.output.ttft_s for served in measured)
    return PolicyRow(
        policy=run.policy,
        mean_ttft_s=statistics.fmean(ttfts),
        median_ttft_s=statistics.median(ttfts),
        p99_ttft_s=float(np.percentile(ttfts, 99)),
        input_tokens_per_s=_num_tokens(measured) / seconds,
        num_requests=len(run.served),
        num_query_tokens=_num_tokens(run.served),
        num_hit_tokens=sum(served.output.num_cached_tokens for served in run.served),
        num_hits=len(hits),
        rows_per_hit=statistics.fmean(hits) if hits else None,
        most_rows_per_hit=max(hits, default=None),
        most_settled_rows=max(settled, default=None),
        num_rows=sum(served.num_computed_rows for served in run.served),
        num_replayed_rows=sum(served.output.num_replayed_rows for served in run.served),
        num_differing=num_differing,
        seconds=seconds,
        ttfts_s=ttfts,
    )


def make_table(rows: Sequence[PolicyRow]) -> Table:
    """One entry a policy; changes are from the first one."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("replay", no_wrap=True)
    headings = (
        *("mean\nTTFT ms", "median\nTTFT ms", "P99\nTTFT ms", "input\ntokens/s"),
        *("hit\ntokens", "hit\nratio", "rows a hit\nmean", "max", "from\n3rd use", "rows\nin all"),
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("answers\nas cold", justify="right", no_wrap=True)
    for row in rows:
        first = rows[0]
        ttfts = [
            _changed(1e3 * getattr(row, name), 1e3 * getattr(first, name), ".1f", row is first)
            for name in ("mean_ttft_s", "median_ttft_s", "p99_ttft_s")
        ]
        rate = _changed(row.input_tokens_per_s, first.input_tokens_per_s, ",.0f", row is first)
        table.add_row(
            row.policy,
            *ttfts,
            rate,
            f"{row.num_hit_tokens:,}",
            f"{row.hit_ratio:.2%}",
            "-" if row.rows_per_hit is None else f"{row.rows_per_hit:.1f}",
            _count(row.most_rows_per_hit),
            _count(row.most_settled_rows),
            f"{row.num_rows:,}",
            f"{row.num_requests - row.num_differing}/{row.num_requests}",
        )
    return table


def _num_tokens(served: Sequence[Served]) -> int:
    return sum(len(one.prompt.token_ids) for one in served)


def _changed(value: float, base: float, style: str, is_base: bool) -> str:
    """A number and, below it, by how much it differs from the first policy's."""
    text = format(value, style)
    return text if is_base else f"{text}\n{value / base - 1:+.1%}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
