"""The prefix-repetition benchmark: the reference's numbers, to the token, and an honest table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from benchmarks.prefix_rows import PolicyRow, make_row, make_table
from benchmarks.prefix_run import (
    POLICIES,
    PolicyRun,
    Served,
    closed_loop,
    differing_requests,
    engine_config,
    run_policy,
)
from benchmarks.prefix_workload import Prompt, WorkloadShape, make_workload
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from benchmarks import prefix_repetition
from pcpkit.cache.pool import CachePool
from pcpkit.engine import Engine, Request, RequestOutput, SamplingParams
from pcpkit.model.decoder import TextModel
from pcpkit.parallel.groups import single_rank
from pcpkit.plan.step import StepPlan

from ..engine.dataflow_model import dataflow_config
from ..engine.small_model import write_small_checkpoint

REFERENCE = WorkloadShape()
VOCAB = 320


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("small"))


# --- the workload -------------------------------------------------------------------------------


def test_the_reference_workload() -> None:
    """systems.md section 2: 10 prefixes x 1,024 + 128, 80 prompts after 8 warm-ups, seed 42."""
    prompts = make_workload(REFERENCE, VOCAB)
    assert len(prompts) == 88
    assert {len(prompt.token_ids) for prompt in prompts} == {1152}
    assert sum(len(prompt.token_ids) for prompt in prompts) == 101_376
    assert REFERENCE.num_query_tokens == 101_376
    assert REFERENCE.most_hit_tokens(64) == 80_384
    assert round(80_384 / 101_376, 4) == 0.7929
    measured = prompts[8:]
    assert Counter(prompt.prefix for prompt in measured) == dict.fromkeys(range(10), 8)
    assert len({prompt.token_ids[:1024] for prompt in prompts}) == 10
    assert len({prompt.token_ids for prompt in measured}) == 80
    order = [prompt.prefix for prompt in measured]
    assert order != sorted(order), "shuffled"
    assert [p.is_warmup for p in prompts] == [True] * 8 + [False] * 80
    assert [p.token_ids for p in prompts[:8]] == [p.token_ids for p in measured[:8]]


def test_the_seed_decides_everything() -> None:
    first, again = make_workload(REFERENCE, VOCAB), make_workload(REFERENCE, VOCAB)
    assert first == again
    assert first != make_workload(replace(REFERENCE, seed=43), VOCAB)
    # The order, and so what a cache finds, does not depend on the model.
    other = make_workload(REFERENCE, 10 * VOCAB)
    assert [prompt.prefix for prompt in first] == [prompt.prefix for prompt in other]
    assert all(0 <= token < VOCAB for prompt in first for token in prompt.token_ids)


def test_uses_count_different_prompts() -> None:
    shape = WorkloadShape(
        num_prefixes=1, prefix_len=4, suffix_len=4, num_prompts=3, num_warmups=2, seed=0
    )
    prompts = make_workload(shape, VOCAB)
    assert [prompt.use for prompt in prompts] == [1, 2, 2, 2, 3]


@st.composite
def shapes(draw: st.DrawFn) -> WorkloadShape:
    num_prefixes, num_uses = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return WorkloadShape(
        num_prefixes=num_prefixes,
        prefix_len=draw(st.integers(1, 40)),
        suffix_len=draw(st.integers(1, 20)),
        num_prompts=num_prefixes * num_uses,
        num_warmups=draw(st.integers(0, num_prefixes * num_uses)),
        seed=draw(st.integers(0, 99)),
    )


@given(shape=shapes(), block_size=st.sampled_from((2, 4, 8)))
def test_the_most_hits_are_those_of_a_cache_of_everything(
    shape: WorkloadShape, block_size: int
) -> None:
    """Against a set of all block-aligned prefixes, with ids that are never equal by chance."""
    prompts = make_workload(shape, 2**40)
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for prompt in prompts:
        ends = range(block_size, len(prompt.token_ids), block_size)
        hits += max((end for end in ends if prompt.token_ids[:end] in seen), default=0)
        seen |= {prompt.token_ids[:end] for end in [*ends, len(prompt.token_ids)]}
    assert hits == shape.most_hit_tokens(block_size)
    assert sum(len(prompt.token_ids) for prompt in prompts) == shape.num_query_tokens


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prefix_len": 0}, "prefix_len expected >= 1, got 0"),
        ({"num_prompts": 81}, r"num_prompts expected a multiple of num_prefixes \(10\), got 81"),
        ({"num_warmups": 81}, r"num_warmups expected 0 \.\. 80 \(num_prompts\), got 81"),
    ],
)
def test_a_workload_that_cannot_be(change: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        WorkloadShape(**change)


# --- the engine's decisions, without a forward --------------------------------------------------


class NoModel:
    """Gives every request the same logits at once; window 128 and 7 layers, as the preset."""

    def __init__(self) -> None:
        self.config = dataflow_config(sliding_window=128, compress_ratios=(0, 2, 2, 1, 1, 1, 1))
        self.max_model_len = REFERENCE.prompt_len + 1
        self.groups = single_rank()
        self.device = torch.device("cpu")

    def forward(self, plan: StepPlan, pool: CachePool) -> Tensor:
        return torch.zeros(len(plan.logits.restore_index), self.config.vocab_size)


def no_model() -> TextModel:
    return cast(TextModel, NoModel())


def decide(policy: str) -> PolicyRow:
    """The reference workload under a policy."""
    prompts = make_workload(REFERENCE, VOCAB)
    config = engine_config(REFERENCE, concurrency=8, chunk_tokens=4096, block_size=64)
    return make_row([run_policy(policy, no_model(), config, prompts)], 0)


def test_without_a_cache_everything_runs() -> None:
    row = decide("none")
    assert (row.num_hit_tokens, row.num_hits, row.num_rows) == (0, 0, 101_376)
    assert row.rows_per_hit is row.most_rows_per_hit is None


def test_bounded_replay_reaches_the_references_hits() -> None:
    row = decide("bounded")
    assert (row.num_hit_tokens, row.num_query_tokens) == (80_384, 101_376)
    assert row.num_hits == 78
    assert row.most_rows_per_hit == 256  # R3: the suffix and one window
    assert row.num_replayed_rows == 78 * 128
    assert row.num_rows == 101_376 - 80_384 + 78 * 128


def test_exact_replay_reaches_the_references_hits() -> None:
    row = decide("exact")
    assert row.num_hit_tokens == 80_384
    # The first layer runs (W - 1) x L rows before the hit.
    assert row.num_replayed_rows == 78 * 127 * 7


def test_snapshots_leave_the_suffix_alone_from_the_third_use_on() -> None:
    """R3; and a prompt that was a warm-up finds the snapshot at its own end, at 1,088 tokens."""
    row = decide("snapshot")
    assert row.most_settled_rows is not None
    assert row.most_settled_rows <= 128
    assert row.num_hit_tokens == 80_384
    assert f"{row.hit_ratio:.2%}" == "79.29%"
    # Each prefix is rebuilt once.
    assert row.num_replayed_rows == 10 * 127 * 7


def test_the_loop_keeps_so_many_requests_in_the_engine() -> None:
    """Eight are in flight until no more are left, and results come in the order sent."""
    in_flight: list[int] = []
    prompts = make_workload(replace(REFERENCE, num_warmups=0), VOCAB)
    config = engine_config(REFERENCE, concurrency=8, chunk_tokens=512, block_size=64)

    class Counting(Engine):
        num_live = 0

        def submit(self, request: Request) -> None:
            super().submit(request)
            self.num_live += 1

        def step(self, max_rows: int | None = None) -> Any:
            in_flight.append(self.num_live)
            result = super().step(max_rows)
            self.num_live -= len(result.finished)
            return result

    requests = [
        Request(
            request_id=str(place),
            prompt_token_ids=prompt.token_ids,
            params=SamplingParams(max_new_tokens=1),
        )
        for place, prompt in enumerate(prompts)
    ]
    outputs = closed_loop(Counting(no_model(), config), requests)
    assert [output.request.request_id for output in outputs] == [str(i) for i in range(80)]
    assert in_flight == sorted(in_flight, reverse=True)
    assert in_flight[0] == 8
    assert in_flight.count(8) > 0.9 * len(in_flight) - 8


# --- statistics and table -----------------------------------------------------------------------


def served(
    ttft_s: float, *, cached: int = 0, replayed: int = 0, use: int = 1, **more: Any
) -> Served:
    request = Request(request_id=str(more.get("name", 0)), prompt_token_ids=(1,) * 100)
    output = RequestOutput(
        request=request,
        token_ids=(more.get("token", 5),),
        finish_reason="length",
        logits=more.get("logits", torch.zeros(1, 4)),
        ttft_s=ttft_s,
        decode_s=0.0,
        num_cached_tokens=cached,
        num_replayed_rows=replayed,
    )
    prompt = Prompt(
        prefix=0,
        token_ids=request.prompt_token_ids,
        use=use,
        is_warmup=more.get("is_warmup", False),
    )
    return Served(prompt=prompt, output=output)


KNOWN = PolicyRun(
    policy="bounded",
    served=(
        served(9.0, is_warmup=True),
        served(1.0, cached=64, replayed=16, use=2),
        served(2.0, cached=80, replayed=16, use=3),
        served(6.0, cached=80, replayed=0, use=3),
    ),
    seconds=4.0,
)


def test_statistics_of_known_numbers() -> None:
    row = make_row([KNOWN], 1)
    assert (row.mean_ttft_s, row.median_ttft_s) == (3.0, 2.0)
    assert row.p99_ttft_s == pytest.approx(5.92)  # 98 % of the way from 2 to 6
    assert row.input_tokens_per_s == 75.0  # 300 measured tokens in 4 s
    assert (row.num_requests, row.num_query_tokens, row.num_hit_tokens) == (4, 400, 224)
    assert row.hit_ratio == 0.56
    assert row.num_hits == 3
    assert row.rows_per_hit == pytest.approx((52 + 36 + 20) / 3)
    assert (row.most_rows_per_hit, row.most_settled_rows) == (52, 36)
    assert (row.num_rows, row.num_replayed_rows) == (208, 32)
    assert row.ttfts_s == (1.0, 2.0, 6.0)
    slower = replace(KNOWN, seconds=8.0, served=(served(9.0, is_warmup=True), served(7.0)))
    both = make_row([KNOWN, slower], 1)
    assert (both.mean_ttft_s, both.ttfts_s) == (4.0, (1.0, 2.0, 6.0, 7.0))
    assert both.input_tokens_per_s == pytest.approx(400 / 12)
    assert (both.num_requests, both.num_rows, both.seconds) == (4, 208, 12.0)


def printed(rows: Sequence[PolicyRow]) -> list[str]:
    console = Console(width=prefix_repetition.TABLE_WIDTH)
    with console.capture() as capture:
        console.print(make_table(rows))
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_the_table_compares_with_the_first_policy() -> None:
    cold = PolicyRun(policy="none", served=(served(6.0), served(4.0)), seconds=4.0)
    lines = printed([make_row([cold], 0), make_row([KNOWN], 1)])
    assert lines[-4:-1] == [
        "none 5000.0 5000.0 5980.0 50 0 0.00% - - - 200 2/2",
        "bounded 3000.0 2000.0 5920.0 75 224 56.00% 36.0 52 36 208 3/4",
        "-40.0% -60.0% -1.0% +50.0%",
    ]


def test_answers_are_compared_as_bits() -> None:
    def run(*answers: Served) -> PolicyRun:
        return PolicyRun(policy="exact", served=answers, seconds=1.0)

    minus_zero = served(1.0, name="b", logits=torch.tensor([[0.0, -0.0, 0.0, 0.0]]))
    cold = run(served(1.0, name="a"), served(1.0, name="b"), served(1.0, name="c"))
    got = run(served(2.0, name="a"), minus_zero, served(1.0, name="c", token=6))
    assert differing_requests(cold, cold) == []
    assert differing_requests(cold, got) == ["b", "c"]


# --- as a program -------------------------------------------------------------------------------

SMALL = (
    *("--num-prefixes", "2", "--num-prompts", "6", "--warmups", "2", "--concurrency", "2"),
    *("--prefix-len", "64", "--suffix-len", "16", "--block-size", "16", "--chunk-tokens", "128"),
)


def run_program(checkpoint: Path, results: Path, *more: str) -> int:
    base = ("--device", "cpu", "--checkpoint", str(checkpoint), "--results", str(results))
    return prefix_repetition.main([*base, *SMALL, "--commit", "abc", *more])


def test_all_policies_in_one_run(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert run_program(checkpoint, tmp_path) == 0
    out = capsys.readouterr().out
    lines = (tmp_path / "cpu-prefix-repetition.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["policy"]: row for row in map(json.loads, lines)}
    assert list(rows) == list(POLICIES)
    shape = WorkloadShape(
        num_prefixes=2, num_prompts=6, num_warmups=2, prefix_len=64, suffix_len=16
    )
    assert f"at most {shape.most_hit_tokens(16)} of them hits" in out
    for policy, row in rows.items():
        assert policy in out
        assert (row["commit"], row["gpu"]) == ("abc", "cpu")
        assert row["workload"]["prefix_len"] == 64
        assert (row["concurrency"], row["chunk_tokens"], row["block_size"]) == (2, 128, 16)
        assert len(row["ttfts_s"]) == 6
        assert row["num_query_tokens"] == 8 * 80
    assert {rows[policy]["num_differing"] for policy in ("none", "exact", "snapshot")} == {0}
    assert rows["bounded"]["num_hit_tokens"] == shape.most_hit_tokens(16)
    assert rows["snapshot"]["most_settled_rows"] == 16
    png = (tmp_path / "cpu-prefix-repetition.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    # A second run appends, with the policies asked for and the run they are compared with.
    assert run_program(checkpoint, tmp_path, "--policies", "bounded", "--no-plot") == 0
    lines = (tmp_path / "cpu-prefix-repetition.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["policy"] for line in lines[4:]] == ["none", "bounded"]


def test_a_wrong_answer_of_an_exact_policy_is_not_reported(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An approximate policy may differ; the same answers of an exact one end the benchmark."""

    def spoilt(policy: str, *arguments: Any) -> PolicyRun:
        run = run_policy(policy, *arguments)
        if policy == "none":
            return run
        last = run.served[-1]
        other = replace(last.output, token_ids=(last.output.token_ids[0] ^ 1,))
        return replace(run, served=(*run.served[:-1], replace(last, output=other)))

    monkeypatch.setattr(prefix_repetition, "run_policy", spoilt)
    assert run_program(checkpoint, tmp_path, "--policies", "snapshot", "--no-plot") == 1
    assert "WRONG: snapshot: requests 7 differ" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert run_program(checkpoint, tmp_path, "--policies", "bounded", "--no-plot") == 0


def test_a_gpu_rehearses_the_workload_in_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every policy serves the same shapes once before any is timed, with nothing to be found."""
    calls: list[tuple[str, Sequence[Prompt]]] = []

    def noted(policy: str, model: TextModel, config: Any, prompts: Sequence[Prompt]) -> PolicyRun:
        calls.append((policy, prompts))
        return replace(KNOWN, policy=policy)

    monkeypatch.setattr(prefix_repetition, "run_policy", noted)
    model = NoModel()
    model.device = torch.device("cuda")
    config = engine_config(REFERENCE, concurrency=8, chunk_tokens=64, block_size=64)
    measure = prefix_repetition.measure
    measure(["none", "exact"], cast(TextModel, model), config, REFERENCE, 2, lambda _line: None)
    assert [policy for policy, _ in calls] == ["none", "exact"] * 3
    rehearsed, measured = calls[0][1], calls[2][1]
    assert [(p.prefix, p.use, p.is_warmup) for p in rehearsed] == [
        (p.prefix, p.use, p.is_warmup) for p in measured
    ]
    names = [{p.token_ids: place for place, p in enumerate(ps)} for ps in (rehearsed, measured)]
    assert [names[0][p.token_ids] for p in rehearsed] == [names[1][p.token_ids] for p in measured]
    assert not {p.token_ids[:64] for p in rehearsed} & {p.token_ids[:64] for p in measured}


def test_quick_divides_every_length() -> None:
    parse = prefix_repetition._parse
    quick = prefix_repetition.shape_of(parse(["--quick", "--prefix-len", "100"]))
    assert (quick.prefix_len, quick.suffix_len, quick.num_prompts) == (100, 32, 80)
    quick = prefix_repetition.shape_of(parse(["--quick"]))
    assert quick.most_hit_tokens(16) * 4 == 80_384
    assert prefix_repetition.shape_of(parse([])) == REFERENCE
    # A CPU is slow enough to be quick unless told otherwise.
    assert prefix_repetition.shape_of(parse(["--device", "cpu"])) == quick
    assert prefix_repetition.shape_of(parse(["--device", "cpu", "--no-quick"])) == REFERENCE
    assert prefix_repetition.shape_of(parse(["--device", "cuda", "--quick"])) == quick


def test_a_cpu_takes_smaller_steps() -> None:
    parse = prefix_repetition._parse

    def chunk_tokens(*flags: str) -> int:
        given = parse(flags)
        return prefix_repetition.config_of(given, prefix_repetition.shape_of(given)).chunk_tokens

    assert (chunk_tokens(), chunk_tokens("--quick")) == (4096, 1024)
    on_cpu = [chunk_tokens("--device", "cpu", flag) for flag in ("--quick", "--no-quick")]
    assert on_cpu == [1024, 1024]
    assert chunk_tokens("--device", "cpu", "--chunk-tokens", "64") == 64


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--policies", "none,all"), "--policies expected some of none, bounded, exact, snapshot"),
        (("--num-prompts", "7"), "num_prompts expected a multiple of num_prefixes (2), got 7"),
        (("--prefix-len", "9000"), "max_model_len expected 1 .. 4096, got 9017"),
        (("--concurrency", "0"), "max_requests expected"),
        (("--block-size", "7"), "block_size expected"),
        (("--rounds", "0"), "--rounds expected at least 1, got 0"),
    ],
)
def test_bad_flags(
    checkpoint: Path,
    tmp_path: Path,
    flags: tuple[str, str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_program(checkpoint, tmp_path, *flags, "--no-plot") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert problem in err
    assert list(tmp_path.iterdir()) == []
