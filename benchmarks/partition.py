"""How much the partition strategies pad: rows that travel and run, over rows that are real.

    python3 benchmarks/partition.py                 # 4,000 random mixed batches for each rank count
    python3 benchmarks/partition.py --batches 200   # a quick look

A step of N rows runs on P ranks as P x n rows, n being the rows of the longest rank (pcp-spec
section 1.6). No times: the numbers follow from the seed. Prints one table and appends a JSON line
for each of its rows to ``benchmarks/results/partition.jsonl``.

The mix: 1 to 16 requests a batch, each a decode in one case of two (of these one in four verifies 1
to 5 drafts), else a prefill of 1 to 512 rows, short ones as likely as long ones. Every hundredth
batch is a single decode, which no strategy can split. DualChunkSwap then pads to 1.29 N rows on
average over the numbers of ranks, as pcp-spec found on its own mix. "bound" is what is left if any
row may go to any rank.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Run as a program from a checkout in which nothing is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import machine
from pcpkit.plan.partition import STRATEGIES, PartitionStrategy, Segment

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = (2, 3, 4, 8)
BOUND = "bound"
MAX_REQUESTS = 16
MAX_PREFILL = 512
MAX_DRAFTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Query lengths and prefill flags of a step."""

    query_lens: tuple[int, ...]
    is_prefilling: tuple[bool, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(self.query_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingRow:
    """One strategy on one number of ranks.

    Attributes:
        mean, worst: of P x n / N over all batches; a single decode has the worst there is, P.
        worst_full: the worst of the batches with at least 8 rows a rank.
        worst_request: largest difference between two ranks in the rows of one prefill; means
            nothing for the bound.
        within_one: whether that is at most 1, which issue P6 asks of "levelled".
    """

    strategy: str
    size: int
    batches: int
    seed: int
    mean: float
    worst: float
    worst_full: float
    worst_request: int
    within_one: bool


def mixed_batches(count: int, seed: int) -> Iterator[Batch]:
    """The mix described above, the same for a seed."""
    source = random.Random(seed)
    for index in range(count):
        if index % 100 == 0:
            yield Batch(query_lens=(1,), is_prefilling=(False,))
            continue
        flags = [source.random() < 0.5 for _ in range(source.randint(1, MAX_REQUESTS))]
        yield Batch(
            query_lens=tuple(_length(source, prefilling) for prefilling in flags),
            is_prefilling=tuple(flags),
        )


def _length(source: random.Random, prefilling: bool) -> int:
    if prefilling:
        return int(MAX_PREFILL ** source.random() + 0.5)
    return 1 + (source.randint(1, MAX_DRAFTS) if source.random() < 0.25 else 0)


def split_anywhere(
    query_lens: Sequence[int], is_prefilling: Sequence[bool], size: int
) -> list[list[Segment]]:
    """The bound: the rows of the batch in equal runs, cutting decodes too."""
    num_tokens = sum(query_lens)
    ends = [(rank + 1) * num_tokens // size for rank in range(size)]
    ranks: list[list[Segment]] = [[] for _ in range(size)]
    row = rank = 0
    for request, length in enumerate(query_lens):
        offset = 0
        while offset < length:
            while row == ends[rank]:
                rank += 1
            stop = min(length, offset + ends[rank] - row)
            ranks[rank].append(Segment(request=request, start=offset, stop=stop))
            row, offset = row + stop - offset, stop
    return ranks


def padding_of(
    name: str, strategy: PartitionStrategy, size: int, batches: Sequence[Batch], seed: int
) -> PaddingRow:
    """Measure one strategy."""
    ratios: list[float] = []
    full: list[float] = [1.0]
    worst_request = 0
    for batch in batches:
        ranks = strategy(batch.query_lens, batch.is_prefilling, size)
        longest = max(sum(segment.num_rows for segment in segments) for segments in ranks)
        ratios.append(size * longest / batch.num_tokens)
        if batch.num_tokens >= 8 * size:
            full.append(ratios[-1])
        counts = [[0] * size for _ in batch.query_lens]
        for rank, segments in enumerate(ranks):
            for segment in segments:
                counts[segment.request][rank] += segment.num_rows
        for prefilling, rows in zip(batch.is_prefilling, counts, strict=True):
            if prefilling:
                worst_request = max(worst_request, max(rows) - min(rows))
    return PaddingRow(
        strategy=name,
        size=size,
        batches=len(batches),
        seed=seed,
        mean=statistics.fmean(ratios),
        worst=max(ratios),
        worst_full=max(full),
        worst_request=worst_request,
        within_one=worst_request <= 1,
    )


HEADINGS = ("strategy", "ranks", "mean", "worst", "worst, 8 rows a rank", "rows apart in a prefill")


def table(rows: Sequence[PaddingRow]) -> str:
    """The rows as aligned text, then the mean over all numbers of ranks."""
    lines: list[tuple[str, ...]] = [HEADINGS]
    for row in rows:
        numbers = (f"{row.mean:.3f}", f"{row.worst:.2f}", f"{row.worst_full:.2f}")
        apart = "-" if row.strategy == BOUND else str(row.worst_request)
        lines.append((row.strategy, str(row.size), *numbers, apart))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    text = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    ]
    text.insert(1, "-" * max(map(len, text)))
    for name in dict.fromkeys(row.strategy for row in rows):
        means = [row.mean for row in rows if row.strategy == name]
        text.append(f"{name}: {statistics.fmean(means):.3f} x N rows on average")
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--batches", type=int, default=4000, help="for each number of ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="where there is no .git: the commit that is measured")
    given = parser.parse_args(arguments)
    if given.batches < 1:
        raise SystemExit(f"--batches expected >= 1, got {given.batches}")
    batches = list(mixed_batches(given.batches, given.seed))
    rows = [
        padding_of(name, strategy, size, batches, given.seed)
        for size in SIZES
        for name, strategy in {**STRATEGIES, BOUND: split_anywhere}.items()
    ]
    facts = machine("cpu", given.commit)
    given.results.mkdir(parents=True, exist_ok=True)
    with (given.results / "partition.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**facts, **asdict(row)}) + "\n" for row in rows)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
