"""examples/prefill.py on several processes: one result, one voice, one exit code, and no hang."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pcpkit.config import ParallelConfig
from pcpkit.testing.ranks import RankPool

from ..engine.small_model import random_prompt, write_small_checkpoint
from . import rank_prefill
from .rank_prefill import RankResult

ROOT = Path(__file__).resolve().parents[2]
PREFILL = ROOT / "examples" / "prefill.py"
DEADLINE_S = 4
WORLD = 4

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(ParallelConfig(pcp_size=WORLD), deadline_s=30) as started:
        yield started


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def job(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a short job: two prompts in three steps, then decodes."""
    ids = tmp_path_factory.mktemp("ids") / "ids.json"
    ids.write_text(json.dumps([random_prompt(13, 0), random_prompt(5, 1)]))
    return [
        *("--checkpoint", str(checkpoint), "--token-ids", str(ids), "--device", "cpu"),
        *("--max-new-tokens", "2", "--chunk-tokens", "8", "--deadline-s", "30"),
    ]


def _run(pool: RankPool, *arguments: Any, **odd: Any) -> list[RankResult]:
    asked = [str(argument) for argument in arguments]
    values = {"odd_rank": None, "odd_arguments": (), "stdin": b"", "spoilt": False} | odd
    return pool.run(rank_prefill.prefill, asked, *values.values(), timeout_s=120)


def _assert_refused(results: Sequence[RankResult], *named: str) -> None:
    """Code 2 everywhere, one line from the first rank, nothing from the others."""
    assert [result.code for result in results] == [2] * WORLD
    assert [result.out for result in results] == [""] * WORLD
    assert [result.err for result in results[1:]] == [""] * (WORLD - 1)
    assert results[0].err.startswith("error: ")
    assert results[0].err.count("\n") == 1, results[0].err
    assert "; " in results[0].err, "no remedy"
    for text in named:
        assert text in results[0].err


def test_layouts_verify_and_give_the_same_tokens(
    pool: RankPool, job: list[str], tmp_path: Path
) -> None:
    """P3 of the parallel engine, on a small model."""
    tokens: list[Any] = []
    for tp, pcp, more in (
        (2, 2, ("--show-plan", "--partition", "dual")),
        (1, 4, ("--logits", "all", "--partition", "cyclic")),
        (4, 1, ("--no-ep",)),
    ):
        file = tmp_path / f"{tp}-{pcp}.json"
        results = _run(pool, *job, "--tp", tp, "--pcp", pcp, "--verify", "--json", file, *more)
        assert [result.code for result in results] == [0] * WORLD, results
        assert "the same on 4 ranks and on one, alone and in other chunks" in results[0].out
        assert ("step 2: 3 rows on 2 PCP ranks" in results[0].out) == ("--show-plan" in more)
        assert all(result.out == result.err == "" for result in results[1:])
        report = json.loads(file.read_text())
        assert (report["tp"], report["pcp"], report["world_size"]) == (tp, pcp, 4)
        assert report["expert_parallel"] == ("--no-ep" not in more)
        assert (report["reduce"], report["verified"]) == ("ordered", True)
        tokens.append([entry["output_token_ids"] for entry in report["requests"]])
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_difference_on_any_rank_ends_all_with_1(
    pool: RankPool, job: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    base = (*job, "--tp", 2, "--pcp", 2, "--verify", "--json", file)
    for rank, named in (
        (2, "rank 2, request 1: window.3 differs from rank 0"),
        # The first rank is the one that is compared with a run on one rank.
        (0, "request 0: window.3 differs first at row 2"),
    ):
        results = _run(pool, *base, odd_rank=rank, spoilt=True)
        assert [result.code for result in results] == [1] * WORLD, results
        assert named in results[0].out
        assert "verified: NO" in results[0].out
        assert json.loads(file.read_text())["verified"] is False


def test_standard_input_reaches_every_rank(
    pool: RankPool, texts_checkpoint: Path, tmp_path: Path
) -> None:
    base = ("--checkpoint", texts_checkpoint, "--max-new-tokens", 1, "--pcp", 4)
    from_stdin = (*base, "--prompt-file", "-", "--json", tmp_path / "r")
    results = _run(pool, *from_stdin, stdin="d\u00e9f main".encode())
    assert [result.code for result in results] == [0] * WORLD, results
    got = json.loads((tmp_path / "r").read_text())
    assert got["reduce"] == "fast"
    _run(pool, *base, "--prompt", "d\u00e9f main", "--json", tmp_path / "r")
    same = json.loads((tmp_path / "r").read_text())["requests"][0]
    assert got["requests"][0]["prompt_tokens"] == same["prompt_tokens"]
    assert got["requests"][0]["output_token_ids"] == same["output_token_ids"]
    _assert_refused(_run(pool, *from_stdin), "standard input expected a prompt, got no text")


def test_what_one_rank_refuses_all_refuse(
    pool: RankPool, job: list[str], checkpoint: Path, tmp_path: Path
) -> None:
    """Seen by every rank, by the first alone, by another alone; and ranks that were told apart."""
    ranks = (*job, "--tp", 2, "--pcp", 2)
    _assert_refused(_run(pool, *ranks, "--frobnicate"), "--frobnicate", "see --help")
    _assert_refused(
        _run(pool, *job, "--tp", 2, "--pcp", 4),
        "world size expected tp_size x pcp_size = 2 x 4, got 4; start torchrun",
    )
    _assert_refused(_run(pool, *ranks, "--json", tmp_path / "no" / "r"), "--json expected a file")

    def with_other(*arguments: str) -> list[RankResult]:
        return _run(pool, *ranks, odd_rank=3, odd_arguments=[*map(str, ranks), *arguments])

    _assert_refused(with_other("--token-ids", "/nowhere/i.json"), "/nowhere/i.json", "No such file")
    _assert_refused(with_other("--chunk-tokens", "13"), "job expected the same", "on rank 3")


# --- ranks that are lost ------------------------------------------------------------------------


def _launch(*arguments: str) -> list[subprocess.Popen[str]]:
    """The ranks of a job, each a process of its own that nobody stops when another ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    everyone = {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(WORLD),
    }
    return [
        subprocess.Popen(
            [sys.executable, rank_prefill.__file__, *arguments],
            env={**everyone, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]


@pytest.mark.parametrize(("how", "code"), [("killed", -9), ("stuck", None), ("raising", 1)])
def test_a_lost_rank_ends_the_others_with_a_named_error(
    job: list[str], how: str, code: int | None
) -> None:
    """Rank 3 is a peer of 1 and 2 in the model's groups; rank 0 loses those."""
    layout = ("--tp", "2", "--pcp", "2", "--deadline-s", str(DEADLINE_S))
    ranks = _launch(how, "3", *job, *layout)
    try:
        # From the start of the processes, which nobody can bound, to the loss and what follows it.
        told = [rank.communicate(timeout=120)[1] for rank in ranks[1:2]]
        began = time.monotonic()
        told = [ranks[0].communicate(timeout=60)[1], *told, ranks[2].communicate(timeout=60)[1]]
        assert time.monotonic() - began < DEADLINE_S + 2
        assert code is None or ranks[3].wait(timeout=10) == code
        assert [rank.returncode for rank in ranks[:3]] == [3] * 3
        for rank, err in enumerate(told):
            errors = [line for line in err.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1, err
            assert errors[0].startswith(f"error: rank {rank}: ")
            assert "of (" in errors[0], "no call is named"
            assert "expected all 2 ranks" in errors[0]
            assert errors[0].endswith("; look at the first rank that failed")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


# --- as users start it --------------------------------------------------------------------------


def _torchrun(count: int, home: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(count), str(PREFILL), *map(str, arguments)),
        ],
        env={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_torchrun(job: list[str], tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    done = _torchrun(2, tmp_path, *job, "--pcp", 2, "--verify", "--show-plan", "--json", report)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("verified: ") == 1
    assert "step 0: 8 rows on 2 PCP ranks, no padding" in done.stdout
    assert json.loads(report.read_text())["world_size"] == 2


def test_torchrun_tells_a_refusal_once(job: list[str], tmp_path: Path) -> None:
    """Also before the ranks can talk: torchrun stops the others as soon as one rank ends."""
    done = _torchrun(2, tmp_path, *job, "--pcp", "two")
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: argument --pcp: expected a whole number")


@pytest.mark.slow
def test_default_prompts_on_four_ranks(tmp_path: Path) -> None:
    """The acceptance commands of the parallel engine, in a home where all ranks make the
    checkpoint at once."""
    reports: list[Any] = []
    for tp, pcp in ((2, 2), (1, 4), (4, 1)):
        file = tmp_path / f"{tp}-{pcp}.json"
        done = _torchrun(4, tmp_path, "--tp", tp, "--pcp", pcp, "--verify", "--json", file)
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(file.read_text()))
        assert reports[-1]["verified"] is True
    tokens = [[entry["output_token_ids"] for entry in report["requests"]] for report in reports]
    assert tokens[0] == tokens[1] == tokens[2]
