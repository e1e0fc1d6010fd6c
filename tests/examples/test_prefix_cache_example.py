"""examples/prefix_cache.py: what each policy takes from the cache, and what --verify says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pcpkit.config import ParallelConfig
from pcpkit.parallel.groups import single_rank
from pcpkit.testing.ranks import RankPool

from ..engine.small_model import write_small_checkpoint
from .rank_prefill import EXAMPLES, RankResult
from .rank_prefix_cache import prefix_cache

ROOT = EXAMPLES.parent
WORLD = 4
PREFIX, SUFFIX = 128, 7
WINDOW, LAYERS = 16, 7
"""Of the small checkpoint."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture
def job(checkpoint: Path) -> list[str]:
    """Two prefixes of two blocks, three uses of each, two tokens of answer."""
    return [
        *("--checkpoint", str(checkpoint), "--device", "cpu", "--max-new-tokens", "2"),
        *("--prefix-tokens", str(PREFIX), "--suffix-tokens", str(SUFFIX)),
    ]


def run(*arguments: object, spoilt: bool = False) -> RankResult:
    """The example alone in this process."""
    threads = torch.get_num_threads()
    asked = [str(argument) for argument in arguments]
    try:
        return prefix_cache(0, single_rank(), asked, 0 if spoilt else None)
    finally:
        torch.set_num_threads(threads)


# --- one rank -----------------------------------------------------------------------------------

CONE = (WINDOW - 1) * LAYERS
"""Rows that an exact replay runs again in the first layer."""


@pytest.mark.parametrize(
    ("replay", "cached", "replayed"),
    [
        ("none", (0, 0, 0), (0, 0, 0)),
        ("bounded", (0, PREFIX, PREFIX), (0, WINDOW, WINDOW)),
        ("exact", (0, PREFIX, PREFIX), (0, CONE, CONE)),
        # The full blocks of a prompt end with the prefix: the first use leaves a snapshot there.
        ("snapshot", (0, PREFIX, PREFIX), (0, 0, 0)),
    ],
)
def test_what_each_policy_computes(
    job: list[str],
    tmp_path: Path,
    replay: str,
    cached: tuple[int, ...],
    replayed: tuple[int, ...],
) -> None:
    """Use 1, 2 and 3 of each prefix."""
    file = tmp_path / "r.json"
    result = run(*job, "--replay", replay, "--verify", "--json", file)
    assert result.code == 0, result.err
    report = json.loads(file.read_text())
    entries = report["requests"]
    assert [entry["request"] for entry in entries] == [
        f"prefix {number}, use {use}" for use in (1, 2, 3) for number in (0, 1)
    ]
    assert [entry["cached_tokens"] for entry in entries] == [n for n in cached for _ in (0, 1)]
    assert [entry["replayed_rows"] for entry in entries] == [n for n in replayed for _ in (0, 1)]
    for entry in entries:
        assert entry["prompt_tokens"] == PREFIX + SUFFIX
        new = entry["prompt_tokens"] - entry["cached_tokens"]
        assert entry["computed_rows"] == new + entry["replayed_rows"]
        assert entry["ttft_s"] > 0
        assert len(entry["output_token_ids"]) == 2
    assert report["cached_tokens"] == 2 * sum(cached)
    assert (report["replay"], report["world_size"], report["reduce"]) == (replay, 1, "ordered")
    same = sum(entry["as_cold"] for entry in entries)
    assert report["verified"] == (same == 6)
    if replay == "bounded":
        # An approximation: its first use is exact, and on this model the others are not.
        assert [entry["as_cold"] for entry in entries[:2]] == [True, True]
        assert same < 6
        assert "approximate" in result.out
        assert "differs" in result.out
    else:
        assert same == 6
        assert "verified: tokens and logits of 6 of 6 answers equal a cold run's" in result.out
    assert f"{2 * sum(cached):,} of {6 * (PREFIX + SUFFIX):,} prompt tokens" in result.out


def test_without_verify_nothing_is_claimed(job: list[str], tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    result = run(*job, "--uses", 1, "--json", file)
    assert result.code == 0
    report = json.loads(file.read_text())
    assert report["verified"] is report["requests"][0]["as_cold"] is None
    assert (report["replay"], report["reduce"]) == ("snapshot", "fast")
    assert "cold" not in result.out


@pytest.mark.parametrize(("replay", "code"), [("snapshot", 1), ("bounded", 0)])
def test_a_difference_fails_exact_policies_only(
    job: list[str], tmp_path: Path, replay: str, code: int
) -> None:
    """Also one in a single bit of a logit that changes no token."""
    file = tmp_path / "r.json"
    asked = (*job, "--replay", replay, "--uses", 2, "--prefixes", 1, "--verify", "--json", file)
    result = run(*asked, spoilt=True)
    assert result.code == code
    report = json.loads(file.read_text())
    assert [entry["as_cold"] for entry in report["requests"]] == [True, False]
    assert report["verified"] is False
    assert ("verified: NO, only tokens and logits of 1 of 2" in result.out) == (code == 1)


def test_the_seed_decides_the_tokens(job: list[str], tmp_path: Path) -> None:
    def tokens(seed: int) -> Any:
        asked = (*job, "--uses", 1, "--seed", seed, "--json", tmp_path / "r")
        assert run(*asked, "--prefix-tokens", 8, "--max-new-tokens", 6).code == 0
        return [e["output_token_ids"] for e in json.loads((tmp_path / "r").read_text())["requests"]]

    assert tokens(1) == tokens(1) != tokens(2)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--preset", "tiny"), "--preset expected no --checkpoint beside it, got tiny and "),
        (("--verify", "--reduce", "fast"), "--verify expected --reduce ordered, got fast"),
        (("--replay", "half"), "argument --replay: invalid choice: 'half'"),
        (("--uses", "0"), "argument --uses: expected a whole number of at least 1, got '0'"),
        (("--prefix-tokens", "4096"), "expected at most 4096 tokens, got a prompt of 4103"),
        (("--json", "/nowhere/r.json"), "--json expected a file that can be written"),
        (("--tp", "2"), "use torchrun --nproc-per-node 2"),
    ],
)
def test_bad_input_is_one_line(job: list[str], flags: tuple[str, ...], problem: str) -> None:
    result = run(*job, *flags)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert problem in result.err


# --- several ranks ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(ParallelConfig(pcp_size=WORLD), deadline_s=30) as started:
        yield started


def run_ranks(pool: RankPool, *arguments: object, **odd: Any) -> list[RankResult]:
    asked = [str(argument) for argument in arguments]
    values = {"spoilt_rank": None, "odd_rank": None, "odd_arguments": ()} | odd
    return pool.run(prefix_cache, asked, *values.values(), timeout_s=120)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("replay", "tp", "pcp"), [("bounded", 2, 2), ("exact", 1, 4), ("snapshot", 2, 2)]
)
def test_ranks_compute_what_one_does(
    pool: RankPool, job: list[str], tmp_path: Path, replay: str, tp: int, pcp: int
) -> None:
    """The same hits, rows and tokens as on one rank; the first rank alone speaks."""
    alone, file = tmp_path / "alone.json", tmp_path / "r.json"
    assert run(*job, "--replay", replay, "--verify", "--json", alone).code == 0
    results = run_ranks(
        pool, *job, "--replay", replay, "--verify", "--json", file, "--tp", tp, "--pcp", pcp
    )
    assert [result.code for result in results] == [0] * WORLD, results
    assert all(result.out == result.err == "" for result in results[1:])
    got, expected = json.loads(file.read_text()), json.loads(alone.read_text())
    assert (got["tp"], got["pcp"], got["world_size"]) == (tp, pcp, WORLD)
    for entry in [*got["requests"], *expected["requests"]]:
        del entry["ttft_s"]
    assert got["requests"] == expected["requests"]
    assert got["verified"] == expected["verified"] == (replay != "bounded")


@pytest.mark.dist
def test_a_difference_on_any_rank_ends_all_with_1(
    pool: RankPool, job: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    asked = (*job, "--uses", 2, "--prefixes", 1, "--pcp", WORLD, "--verify", "--json", file)
    results = run_ranks(pool, *asked, spoilt_rank=2)
    assert [result.code for result in results] == [1] * WORLD, results
    report = json.loads(file.read_text())
    assert [entry["as_cold"] for entry in report["requests"]] == [True, False]


@pytest.mark.dist
def test_what_one_rank_refuses_all_refuse(pool: RankPool, job: list[str]) -> None:
    base = [*job, "--pcp", str(WORLD)]
    for odd, named in (
        ([*base, "--preset", "tiny"], "--preset expected no --checkpoint beside it"),
        # Another policy is another job, although requests and limits are the same.
        ([*base, "--replay", "bounded"], "job expected the same on all 4 ranks"),
    ):
        results = run_ranks(pool, *base, odd_rank=3, odd_arguments=odd)
        assert [result.code for result in results] == [2] * WORLD, results
        assert named in results[0].err
        assert all(result.out == result.err == "" for result in results[1:])


# --- as users start it --------------------------------------------------------------------------


@pytest.mark.dist
def test_torchrun(job: list[str], tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(EXAMPLES / "prefix_cache.py"), *job),
            *("--pcp", "2", "--uses", "2", "--verify", "--json", str(report)),
        ],
        env={
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("verified: ") == 1
    assert json.loads(report.read_text())["world_size"] == 2
