"""The benchmark itself, at sizes a CPU runs: inputs, checks, peers, table, JSON lines. No times."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.case import (
    BenchCase,
    CheckFailed,
    Output,
    Peer,
    PeerRow,
    Run,
    require_close,
    require_equal,
)
from benchmarks.cases import OPS, cases_of
from benchmarks.peer_rows import PREFILL_SHAPES, find_row, run_peers, sections_for
from benchmarks.report import PeerTime, Row, git_commit, measured_rows, results_file, table
from benchmarks.session import ContextLost, Session
from benchmarks.timing import Stopwatch, Timing
from torch import Tensor

from benchmarks import kernels

TINY = [pytest.param(case, id=case.shape) for op in OPS for case in cases_of(op, tiny=True)]


def _tensors(output: Output) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def _spoiled(tensor: Tensor) -> Tensor:
    """Another value everywhere (-inf stays)."""
    if tensor.dtype == torch.uint8:
        return 255 - tensor
    return tensor * 2 + 1


@pytest.mark.parametrize("case", TINY)
def test_case_passes_its_check_and_a_wrong_output_does_not(case: BenchCase) -> None:
    run = case.make("cpu")
    output = run.call()
    assert run.check(output)
    assert run.num_bytes > 0
    tensors = _tensors(output)
    for index in range(len(tensors)):
        wrong = tuple(_spoiled(t) if i == index else t for i, t in enumerate(tensors))
        with pytest.raises(CheckFailed):
            run.check(wrong if isinstance(output, tuple) else wrong[0])


@pytest.mark.parametrize("case", TINY)
def test_a_second_call_gives_the_same_output(case: BenchCase) -> None:
    """Timing repeats the call on the same inputs: it must not consume them."""
    run = case.make("cpu")
    first = [tensor.clone() for tensor in _tensors(run.call())]
    for again, before in zip(_tensors(run.call()), first, strict=True):
        assert torch.equal(again, before)


@pytest.mark.parametrize("case", TINY)
def test_in_process_peers_run(case: BenchCase) -> None:
    run = case.make("cpu")
    for peer in case.peers:
        if peer.in_process:
            assert run.peers[peer.name]()() is not None


@pytest.mark.parametrize("op", OPS)
def test_cases_of_an_op_have_names_of_their_own(op: str) -> None:
    cases = cases_of(op, tiny=False)
    assert len({case.shape for case in cases}) == len(cases)
    assert {case.op for case in cases} == {op}


def test_targets_of_the_project_are_asked_for() -> None:
    asked = {
        (case.op, case.shape.split()[0], peer.target)
        for op in OPS
        for case in cases_of(op, tiny=False)
        for peer in case.peers
        if peer.target
    }
    assert asked >= {
        ("sparse_mla", "prefill", "<= 1.6x"),
        ("sparse_mla", "prefill", "< 1x"),
        ("sparse_mla", "prefill", "<= 1x"),
        ("sparse_mla", "decode", "<= 1.5x"),
        ("cache_write", "cache_write", "<= 1x"),
        ("compressor", "close_and_write_ring", "<= 1x"),
        ("indexer", "index_scores", ">= 0.5x rate"),
        ("topk", "T=4096", ">= 3x faster"),
        ("linear", "wq_b", ">= 70% rate"),
        ("experts", "routed_experts", "<= 1.5x"),
    }
    assert [case.max_us for case in cases_of("slot_gather", tiny=False)] == [10.0]


def test_comparisons_see_shape_type_and_values() -> None:
    one = torch.ones(4)
    assert require_equal("x", one, one.clone()) == "equal"
    for wrong in (one.half(), one[:3], one * 2):
        with pytest.raises(CheckFailed, match="x"):
            require_equal("x", wrong, one)
    assert require_close("x", one * 1.001, one, 2e-3) == "rel 1e-03"
    hole = torch.tensor([1.0, 1.0, 1.0, float("-inf")])
    assert require_close("x", hole, hole, 0.0)
    nan = torch.tensor([1.0, 1.0, 1.0, float("nan")])
    for got, want in ((one * 1.01, one), (nan, one), (one, hole), (nan, nan)):
        with pytest.raises(CheckFailed, match="x"):
            require_close("x", got, want, 2e-3)


def _driver(tmp_path: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    arguments = ["--device", "cpu", "--tiny", "--results", str(tmp_path), *options]
    status = kernels.main(arguments)
    lines = results_file(tmp_path, "cpu").read_text(encoding="utf-8").splitlines()
    return status, [json.loads(line) for line in lines]


def test_driver_prints_a_table_and_appends_lines_without_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = _driver(tmp_path, "--only", "topk,slot_gather", "--commit", "abc")
    assert status == 0
    assert [line["op"] for line in lines] == ["topk", "topk", "slot_gather"]
    assert all(line["status"] == "ok" and line["timing"] is None for line in lines)
    assert {(line["commit"], line["gpu"]) for line in lines} == {("abc", "cpu")}
    assert {"time", "driver", "torch", "triton", "shape", "note"} <= set(lines[0])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("time ")
    assert printed[1].split()[:3] == ["op", "shape", "us"]
    assert [line.split()[0] for line in printed[3:6]] == ["topk", "topk", "slot_gather"]
    assert printed[7] == "Targets, and what did not run"
    assert [line.split()[0] for line in printed[10:]] == ["slot_gather"]
    _, lines = _driver(tmp_path, "--only", "topk")
    assert len(lines) == 5, "a second run appends"


def test_driver_runs_every_op(tmp_path: Path) -> None:
    status, lines = _driver(tmp_path)
    assert status == 0
    assert list(dict.fromkeys(line["op"] for line in lines)) == list(OPS)


def _failing(error: Exception) -> Callable[[str], Run]:
    def make(_device: str) -> Run:
        raise error

    return make


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (CheckFailed("y: 3 of 4 bytes differ"), "RED", 1),
        (NotImplementedError("no CUDA kernel"), "no kernel", 0),
        (RuntimeError("out of resources"), "error", 1),
    ],
)
def test_a_case_that_fails_gets_no_time_and_costs_no_other(
    error: Exception,
    kind: str,
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cases(op: str, *, tiny: bool) -> list[BenchCase]:
        bad = BenchCase(op=op, shape="bad", make=_failing(error))
        return [bad, *cases_of(op, tiny=tiny)]

    monkeypatch.setattr(kernels, "cases_of", cases)
    got, lines = _driver(tmp_path, "--only", "topk")
    assert got == status
    assert [line["status"] for line in lines] == [kind, "ok", "ok"]
    assert lines[0]["timing"] is None
    assert str(error) in capsys.readouterr().out


def test_an_op_that_cannot_be_imported_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cases(op: str, *, tiny: bool) -> list[BenchCase]:
        if op == "rope":
            raise ImportError("cannot import name 'gone'")
        return cases_of(op, tiny=tiny)

    monkeypatch.setattr(kernels, "cases_of", cases)
    status, lines = _driver(tmp_path, "--only", "rope,slot_gather")
    assert status == 1
    assert [line["status"] for line in lines] == ["error", "ok"]


def test_driver_refuses_unknown_ops_and_gpu_sizes_on_a_cpu() -> None:
    with pytest.raises(SystemExit, match=r"--only expected ops of .*, got nosuch"):
        kernels.main(["--only", "topk,nosuch"])
    with pytest.raises(SystemExit, match="expected --tiny"):
        kernels.main(["--device", "cpu"])


def test_budget_skips_the_rest(tmp_path: Path) -> None:
    status, lines = _driver(tmp_path, "--only", "topk", "--budget", "0")
    assert status == 0
    assert [line["status"] for line in lines] == ["skipped"]


TIMING = Timing(
    cold_us=50.0, cold_quartiles_us=(49.0, 51.0), hot_us=40.0, captured=True, repetitions=31
)
RUN = Run(
    call=lambda: torch.ones(1), check=lambda _output: "equal", flops=1e6, num_bytes=5e4, peers={}
)
CASE = BenchCase(
    op="topk",
    shape="T=1",
    make=lambda _device: RUN,
    peers=(
        Peer(name="slow", recorded_us=100.0, target="<= 0.6x", max_ratio=0.6),
        Peer(name="fast", recorded_us=40.0, target="<= 1x", max_ratio=1.0),
        Peer(name="rate", recorded_us=40.0, target=">= 0.5x rate", max_ratio=2.0, by_rate=True),
        Peer(name="absent", recorded_us=1.0, target="<= 1x", max_ratio=1.0),
    ),
    max_us=45.0,
)
TIMES = [
    PeerTime(cold_us=100.0, hot_us=None, tflops=None, source="recorded"),
    PeerTime(cold_us=40.0, hot_us=30.0, tflops=None, source="peers.py"),
    PeerTime(cold_us=40.0, hot_us=30.0, tflops=0.03, source="peers.py"),
    None,
]


def test_rows_compare_with_each_peer() -> None:
    rows = measured_rows(CASE, RUN, "equal", TIMING, TIMES)
    assert [row.peer for row in rows] == ["", "slow", "fast", "rate", "absent"]
    assert [row.ratio for row in rows] == [None, 0.5, 1.25, pytest.approx(1.5), None]
    assert [row.met for row in rows] == [False, True, False, True, None]
    assert rows[0].tflops == pytest.approx(0.02)
    assert rows[0].gbytes_per_s == pytest.approx(1.0)
    assert rows[0].target == "<= 45 us"


def test_table_marks_losses_recorded_and_uncaptured_times() -> None:
    rows = measured_rows(CASE, RUN, "equal", TIMING, TIMES)
    lines = table([*rows, replace(rows[1], timing=replace(TIMING, captured=False))]).splitlines()
    assert lines[2].split()[-2:] == ["us", "LOSS"]
    assert "100.0*" in lines[3]
    assert lines[3].endswith("ok")
    assert "40.0*" not in lines[4]
    assert lines[4].endswith("LOSS")
    assert "(40.0)" in lines[7]
    assert lines[8].startswith("(hot)")
    assert lines[9].startswith("* recorded")
    assert table(rows[:1]).count("\n") == 2, "no legend where nothing is marked"


class _FixedStopwatch(Stopwatch):
    """Runs a call once and reports the same time for each."""

    def __init__(self) -> None:
        """See the class."""

    def measure(self, call: Callable[[], object]) -> Timing:
        call()
        return TIMING


def test_peer_times_come_from_this_process_the_script_or_the_record() -> None:
    def refuses() -> object:
        raise RuntimeError("not on this device")

    row = PeerRow(section="helpers", name="insert", shape="T=1")
    names = ("here", "refused", "script", "record", "none")
    here, refused, script, record, none = (Peer(name=name) for name in names)
    case = replace(
        CASE,
        make=lambda _device: replace(RUN, peers={"here": lambda: list, "refused": lambda: refuses}),
        peers=(
            here,
            refused,
            replace(script, row=row, recorded_us=1.0),
            replace(record, row=replace(row, shape="T=2"), recorded_us=25.0, recorded_tflops=2.0),
            replace(none, row=replace(row, shape="T=2")),
        ),
        max_us=None,
    )
    measured = {"section": "helpers", "name": "insert 528B", "shape": "T=1", "status": "ok"}
    said: list[str] = []
    session = Session(
        device="cpu",
        stopwatch=_FixedStopwatch(),
        peer_rows=[{**measured, "cold_us": 100.0, "hot_us": 90.0, "tflops": None}],
        deadline=float("inf"),
        say=said.append,
    )
    rows = session.run(case)
    assert [row.ratio for row in rows] == [1.0, None, 0.5, 2.0, None]
    sources = [row.peer_time and row.peer_time.source for row in rows]
    assert sources == ["this process", None, "peers.py", "recorded", None]
    assert said == ["peer refused: not on this device"]


def test_parts_are_checked_in_processes_of_their_own() -> None:
    given = kernels._parse(["--device", "cpu", "--tiny", "--jobs", "1"])
    parts = kernels._parts(["topk"], given)
    assert [(part.op, part.first, len(part.cases)) for part in parts] == [("topk", 0, 1)]
    assert kernels._warm_up(parts, given) == {}
    refused = kernels._warm_one(["--nosuch"], parts[0])
    assert refused.startswith("exit status 2: ")
    assert "unrecognized arguments: --nosuch" in refused


def test_parts_hold_every_case_once_and_can_be_named() -> None:
    given = kernels._parse([])
    parts = kernels._parts(["linear"], given)
    cases = [case.shape for part in parts for case in part.cases]
    assert cases == [case.shape for case in cases_of("linear", tiny=False)]
    assert max(len(part.cases) for part in parts) == kernels.CASES_PER_PROCESS
    second = kernels._parts(["linear"], kernels._parse(["--first", str(parts[1].first)]))
    assert [part.first for part in second] == [parts[1].first]


def test_parts_that_crashed_get_a_row_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    given = kernels._parse(["--device", "cpu", "--tiny"])
    parts = kernels._parts(["topk", "rope"], given)
    session = Session(
        device="cpu", stopwatch=None, peer_rows=[], deadline=float("inf"), say=lambda _line: None
    )
    rows = [row for new in kernels._run_all(parts, {0: "no end"}, session) for row in new]
    assert [row.status for row in rows] == ["crashed", "ok", "ok"]
    assert kernels._exit_status(rows) == kernels.CONTEXT_LOST

    def lose(self: Session, case: BenchCase) -> list[Row]:
        raise ContextLost("illegal memory access")

    monkeypatch.setattr(Session, "run", lose)
    rows = [row for new in kernels._run_all(parts, {}, session) for row in new]
    assert [row.status for row in rows] == ["crashed"] * 3
    assert "illegal" in rows[1].note


PEER_ROWS: list[dict[str, Any]] = [
    {"section": "decode", "name": "FlashMLA fp8 V4", "shape": "T=64 H=8", "cold_us": 9.0},
    {"section": "decode", "name": "FlashMLA fp8 V4", "shape": "T=640 H=64", "cold_us": 8.0},
    {"section": "decode", "name": "FlashMLA fp8 V4", "shape": "T=64 H=64 k=640", "cold_us": 41.0},
]


def test_find_row_wants_section_name_whole_words_and_a_passed_check() -> None:
    rows = [{"hot_us": 7.0, "tflops": 2.0, "status": "ok", **row} for row in PEER_ROWS]
    wanted = PeerRow(section="decode", name="FlashMLA fp8", shape="T=64 H=64")
    found = find_row(rows, wanted)
    assert found is not None
    assert (found.cold_us, found.hot_us, found.tflops) == (41.0, 7.0, 2.0)
    assert find_row(rows, replace(wanted, section="prefill")) is None
    assert find_row(rows, replace(wanted, shape="T=6")) is None
    assert find_row([{**rows[2], "status": "MISMATCH"}], wanted) is None


SCRIPT = """
import argparse, json, sys
def sweep(a):
    return [(1, 1, 1)]
def main():
    p = argparse.ArgumentParser()
    p.add_argument("--only"); p.add_argument("--json")
    a = p.parse_args()
    rows = [{"section": a.only, "shape": f"T={t} H={h} NC={n}"} for t, h, n in sweep(a)]
    open(a.json, "w").write(json.dumps({"rows": rows}))
    sys.exit(STATUS)
"""


@pytest.mark.parametrize("status", [0, 2])
def test_peers_script_runs_with_our_shapes(
    status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "peers.py").write_text(SCRIPT.replace("STATUS", str(status)), encoding="utf-8")
    rows = run_peers(tmp_path, ["prefill", "decode"], quick=False)
    assert {row["section"] for row in rows} == {"prefill,decode"}
    assert [row["shape"] for row in rows] == [f"T={t} H={h} NC={n}" for t, h, n in PREFILL_SHAPES]
    assert ("exit status 2" in capsys.readouterr().err) == (status == 2)


def test_peers_script_that_is_missing_leaves_no_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_peers(tmp_path, ["prefill"], quick=True) == []
    assert "exit status" in capsys.readouterr().err
    assert run_peers(tmp_path, [], quick=True) == []


def test_every_peer_row_is_in_a_section_that_is_run_for_its_op() -> None:
    for op in OPS:
        for case in cases_of(op, tiny=False):
            for peer in case.peers:
                if peer.row is not None:
                    assert peer.row.section in sections_for([op]), f"{case.shape}: {peer.name}"
                if peer.row is not None and peer.row.section == "prefill":
                    shapes = [f"T={t} H={h} NC={n}" for t, h, n in PREFILL_SHAPES]
                    assert peer.row.shape in shapes
    assert sections_for(OPS)[-1] == "prefill", "the one that may fail comes last"


def test_commit_says_whether_files_differ(tmp_path: Path) -> None:
    assert git_commit(tmp_path) == "unknown"

    def git(*arguments: str) -> None:
        options = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *options, *arguments]
        subprocess.run(command, check=True, capture_output=True)

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "one")
    clean = git_commit(tmp_path)
    assert len(clean) == 12
    (tmp_path / "new").touch()
    assert git_commit(tmp_path) == clean + "-dirty"


@pytest.mark.gpu
def test_stopwatch_measures_what_the_device_does() -> None:
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    watch = Stopwatch(repetitions=7)
    timing = watch.measure(lambda: x @ x)
    assert timing.captured
    assert timing.repetitions == 7
    # 137 GFLOP: 174 us at the 790 TFLOP/s of a large product on an H200; slower GPUs take longer.
    assert timing.cold_us > 120
    assert timing.hot_us > 120
    assert timing.cold_quartiles_us[0] <= timing.cold_us <= timing.cold_quartiles_us[1]
    assert not watch.measure(lambda: x[0, 0].item()).captured


@pytest.mark.gpu
def test_session_times_a_tiny_case_and_its_peers() -> None:
    session = Session(
        device="cuda",
        stopwatch=Stopwatch(repetitions=3),
        peer_rows=[],
        deadline=float("inf"),
        say=lambda _line: None,
    )
    for case in cases_of("topk", tiny=True):
        rows = session.run(case)
        assert [row.status for row in rows] == ["ok"] * len(rows), rows
        assert all(row.timing is not None and row.ratio is not None for row in rows)
