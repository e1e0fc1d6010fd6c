"""The padding benchmark: a reproducible mix, a true bound, and the promise of issue 4, P6."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.partition import SIZES, main, mixed_batches, padding_of, split_anywhere

from pcpkit.plan.partition import STRATEGIES, make_partition


def test_prints_a_table_and_appends_json_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--batches", "60", "--results", str(tmp_path), "--commit", "abc"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    lines = (tmp_path / "partition.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    names = [*STRATEGIES, "bound"]
    assert [(row["size"], row["strategy"]) for row in rows] == [
        (size, name) for size in SIZES for name in names
    ]
    for row in rows:
        assert row["commit"] == "abc"
        assert 1.0 <= row["mean"] <= row["worst"] <= row["size"]
        assert f"{row['mean']:.3f}" in printed
    means = {(row["strategy"], row["size"]): row["mean"] for row in rows}
    for size in SIZES:
        assert means["bound", size] <= means["levelled", size] < means["dual", size]
    # P6: at most one row a request.
    assert all(row["within_one"] for row in rows if row["strategy"] == "levelled")
    assert not any(row["within_one"] for row in rows if row["strategy"] == "dual")
    main(arguments)
    assert len((tmp_path / "partition.jsonl").read_text(encoding="utf-8").splitlines()) == 32


def test_the_mix_follows_the_seed() -> None:
    first, again, other = (list(mixed_batches(20, seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert first[0].query_lens == (1,)


def test_the_bound_deals_every_row_once_and_evenly() -> None:
    for batch in mixed_batches(40, 3):
        for size in SIZES:
            dealt = make_partition(batch.query_lens, batch.is_prefilling, size, split_anywhere)
            assert dealt.num_padded_rows == -(-batch.num_tokens // size)


def test_padding_of_a_single_decode_is_the_number_of_ranks() -> None:
    batches = list(mixed_batches(1, 0))
    row = padding_of("dual", STRATEGIES["dual"], 4, batches, 0)
    assert (row.mean, row.worst, row.worst_full) == (4.0, 4.0, 1.0)
