"""examples/prefill.py: the main paths as a user runs them, and every bad input.

Most cases call the example's `main` in this process, which saves seconds of imports each; the exit
code, standard input and the default checkpoint are tested in a process of their own.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pcpkit.model.engram_tables import TOKEN_MAP_FILE

from ..engine.small_model import random_prompt, write_small_checkpoint

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str


Prefill = Callable[..., Result]


@pytest.fixture
def prefill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Prefill]:
    """The example's `main` with its output and exit code."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("prefill")
    threads = torch.get_num_threads()

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        try:
            code = example.main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = int(str(error.code))
        captured = capsys.readouterr()
        return Result(code=code, out=captured.out, err=captured.err)

    yield run
    torch.set_num_threads(threads)


def _process(home: Path, *arguments: object, stdin: str = "") -> Result:
    """The example as `python examples/prefill.py`, in an almost empty environment."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "prefill.py"), *map(str, arguments)],
        env={"HOME": str(home), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Result(code=done.returncode, out=done.stdout, err=done.stderr)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small, with a token map and without a tokenizer."""
    return write_small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture
def ids_file(tmp_path: Path) -> Path:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps([random_prompt(21, 0), random_prompt(6, 1)]))
    return path


# --- what it does -------------------------------------------------------------------------------


def test_token_ids_give_a_report_a_dump_and_a_verdict(
    prefill: Prefill, checkpoint: Path, ids_file: Path, tmp_path: Path
) -> None:
    report_file, dump_file = tmp_path / "report.json", tmp_path / "dump.safetensors"
    result = prefill(
        *("--checkpoint", checkpoint, "--token-ids", ids_file, "--max-new-tokens", 3),
        *("--chunk-tokens", 16, "--device", "cpu", "--logits", "all", "--verify"),
        *("--json", report_file, "--dump", dump_file),
    )
    assert result.code == 0, result.err
    report: dict[str, Any] = json.loads(report_file.read_text())
    assert list(report) == [
        *("tp", "pcp", "world_size", "expert_parallel", "partition", "reduce"),
        *("device", "numerics"),
        *("prefill_tokens", "prefill_tokens_per_s", "requests", "verified"),
    ]
    expected = [1, 1, 1, False, "levelled", "ordered", "cpu", "released", 27]
    assert [report[key] for key in list(report)[:9]] == expected
    assert report["prefill_tokens_per_s"] > 0
    assert report["verified"] is True
    assert [list(entry) for entry in report["requests"]] == [
        ["prompt_tokens", "output_token_ids", "text", "ttft_s"]
    ] * 2
    dump = load_file(dump_file)
    assert set(dump) == {"0.tokens", "0.logits", "1.tokens", "1.logits"}
    for index, (length, entry) in enumerate(zip((21, 6), report["requests"], strict=True)):
        assert entry["prompt_tokens"] == length
        assert entry["text"] is None
        assert entry["ttft_s"] > 0
        new = entry["output_token_ids"]
        assert dump[f"{index}.tokens"].tolist() == [*random_prompt(length, index), *new]
        assert dump[f"{index}.tokens"].dtype == torch.int64
        logits = dump[f"{index}.logits"]
        assert logits.shape == (length + len(new) - 1, 320)
        assert logits.dtype == torch.float32
        assert logits[length - 1 :].argmax(1).tolist() == new
    assert "verified: tokens, logits and cache bytes are the same" in result.out
    assert not list(tmp_path.glob(".*")), "temporary files are left behind"


def test_logits_of_the_last_rows_are_the_default(
    prefill: Prefill, checkpoint: Path, ids_file: Path, tmp_path: Path
) -> None:
    base = ("--checkpoint", checkpoint, "--token-ids", ids_file, "--max-new-tokens", 2)
    for kept, name in ((("--logits", "all"), "all"), ((), "last"), (("--logits", "none"), "none")):
        assert prefill(*base, *kept, "--dump", tmp_path / name, "--json", tmp_path / "r").code == 0
    everything, last, none = (load_file(tmp_path / name) for name in ("all", "last", "none"))
    assert json.loads((tmp_path / "r").read_text())["verified"] is None
    assert set(none) == {"0.tokens", "1.tokens"}
    for index in range(2):
        new = last[f"{index}.logits"].shape[0]
        assert torch.equal(last[f"{index}.logits"], everything[f"{index}.logits"][-new:])
        assert torch.equal(last[f"{index}.tokens"], none[f"{index}.tokens"])


def test_a_difference_makes_the_exit_code_1(
    prefill: Prefill,
    checkpoint: Path,
    ids_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        importlib.import_module("prefill"), "verify_requests", lambda *_: ["request 0: logits"]
    )
    base = ("--checkpoint", checkpoint, "--token-ids", ids_file, "--max-new-tokens", 1)
    result = prefill(*base, "--verify", "--json", tmp_path / "report.json")
    assert result.code == 1
    assert "request 0: logits" in result.out
    assert json.loads((tmp_path / "report.json").read_text())["verified"] is False


def test_weight_only_numerics_are_another_model(
    prefill: Prefill, checkpoint: Path, ids_file: Path, tmp_path: Path
) -> None:
    base = ("--checkpoint", checkpoint, "--token-ids", ids_file, "--max-new-tokens", 1)
    for numerics in ("released", "weight_only"):
        assert prefill(*base, "--numerics", numerics, "--dump", tmp_path / numerics).code == 0
    one, other = (load_file(tmp_path / name)["0.logits"] for name in ("released", "weight_only"))
    assert not torch.equal(one, other)


def test_the_plan_is_shown_and_drawn(
    prefill: Prefill, checkpoint: Path, ids_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    base = ("--checkpoint", checkpoint, "--token-ids", ids_file, "--max-new-tokens", 1)
    result = prefill(*base, "--show-plan", "--plan-png", tmp_path / "plan.png")
    assert result.code == 0, result.err
    assert "step 0: 27 rows on 1 PCP ranks, no padding" in result.out
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "step 0" not in prefill(*base).out


def test_prompts_run_in_the_order_given(
    prefill: Prefill, texts_checkpoint: Path, tmp_path: Path
) -> None:
    file, ids = tmp_path / "text.txt", tmp_path / "ids.json"
    file.write_text("import os\n", encoding="utf-8")
    ids.write_text("[[0, 5, 6, 7]]")
    result = prefill(
        *("--checkpoint", texts_checkpoint, "--token-ids", ids, "--prompt", "def main"),
        *("--prompt-file", file, "--prompt", "class", "--max-new-tokens", 2),
        *("--json", tmp_path / "r", "--dump", tmp_path / "d"),
    )
    assert result.code == 0, result.err
    from pcpkit.model.tokenizer import decode, load_tokenizer

    tokenizer = load_tokenizer(texts_checkpoint)
    assert tokenizer is not None
    dump, report = load_file(tmp_path / "d"), json.loads((tmp_path / "r").read_text())
    prompts = [dump[f"{i}.tokens"][:-2].tolist() for i in range(4)]
    assert [ids[0] for ids in prompts] == [0] * 4, "texts start with the bos id"
    assert [decode(tokenizer, ids) for ids in prompts[:3]] == ["def main", "import os\n", "class"]
    assert prompts[3] == [0, 5, 6, 7]
    for entry in report["requests"]:
        assert entry["text"] == decode(tokenizer, entry["output_token_ids"])


def test_defaults_in_a_fresh_home(tmp_path: Path) -> None:
    """The default checkpoint is made and cached; a prompt comes from standard input."""
    arguments = ("--prompt-file", "-", "--max-new-tokens", 2, "--json", tmp_path / "r")
    first = _process(tmp_path, *arguments, stdin="Prefill context parallelism")
    assert first.code == 0, first.err
    made = list((tmp_path / ".cache" / "pcpkit" / "tiny").iterdir())
    assert len(made) == 1
    stamp = (made[0] / "model.safetensors").stat().st_mtime_ns
    report = json.loads((tmp_path / "r").read_text())
    assert report["requests"][0]["text"]
    again = _process(tmp_path, *arguments, stdin="Prefill context parallelism")
    assert again.code == 0
    assert (made[0] / "model.safetensors").stat().st_mtime_ns == stamp
    repeated = json.loads((tmp_path / "r").read_text())
    assert repeated["requests"][0]["output_token_ids"] == report["requests"][0]["output_token_ids"]


def test_the_default_prompts_are_the_projects_own_texts(
    prefill: Prefill, texts_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too long ones are cut to what the model takes, not refused."""
    prompts = importlib.import_module("prompts")
    labels = [source.label for source in prompts.default_sources()]
    assert labels[0] == "README.md"
    assert {"docs/glossary.md", "docs/numerics.md", "docs/cache-layout.md"} <= set(labels)
    long = tmp_path / "long.md"
    long.write_text("word " * 20_000)
    config_file = _copy(texts_checkpoint, tmp_path / "c") / "config.json"
    config = json.loads(config_file.read_text())
    config["text_config"]["max_position_embeddings"] = 64
    config_file.write_text(json.dumps(config))
    monkeypatch.setattr(
        importlib.import_module("job"),
        "default_sources",
        lambda: [prompts.Source(kind="file", value=str(long))],
    )
    base = ("--checkpoint", tmp_path / "c", "--max-new-tokens", 4, "--json", tmp_path / "r")
    assert prefill(*base).code == 0
    assert json.loads((tmp_path / "r").read_text())["requests"][0]["prompt_tokens"] == 60
    refused = prefill(*base, "--prompt-file", long)
    assert refused.code == 2
    assert "at most 64 tokens, got a prompt of" in refused.err


def _copy(folder: Path, out: Path) -> Path:
    shutil.copytree(folder, out)
    return out


# --- bad input ----------------------------------------------------------------------------------


def _assert_refused(result: Result, *named: str, written: Path) -> None:
    """One line on standard error that names thing and remedy, code 2, nothing written."""
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1, result.err
    for text in named:
        assert text in result.err
    assert "; " in result.err, "no remedy"
    assert not list(written.iterdir())


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--prompt", ""), ("--prompt '' expected a prompt, got no text",)),
        (("--prompt-file", "/nowhere/p.txt"), ("/nowhere/p.txt", "No such file")),
        (("--prompt", "text"), ("tokenizer.json", "pass --token-ids")),
        ((), ("README.md", "tokenizer.json", "pass --token-ids")),
        (("--token-ids", "/nowhere/i.json"), ("/nowhere/i.json", "No such file")),
        (("--max-new-tokens", 0), ("--max-new-tokens", "at least 1, got '0'")),
        (("--max-new-tokens", "many"), ("--max-new-tokens", "got 'many'")),
        (("--chunk-tokens", -1), ("--chunk-tokens", "got '-1'")),
        (("--numerics", "exact"), ("--numerics", "released")),
        (("--device", "tpu"), ("--device", "'cpu'")),
        (("--frobnicate",), ("--frobnicate", "see --help")),
        (("--tp", 2), ("job expected ranks that torchrun started", "--nproc-per-node 2")),
        (("--pcp", 4), ("RANK", "use torchrun --nproc-per-node 4")),
        (("--partition", "striped"), ("--partition", "'levelled'")),
        (("--reduce", "exact"), ("--reduce", "'ordered'")),
        (("--verify", "--reduce", "fast"), ("--verify expected --reduce ordered, got fast",)),
        (("--deadline-s", 0), ("--deadline-s", "expected seconds, 1 .. 86400, got '0'")),
        (("--deadline-s", "nan"), ("got 'nan'",)),
        (("--deadline-s", "soon"), ("got 'soon'",)),
    ],
)
def test_bad_arguments(
    prefill: Prefill, checkpoint: Path, outputs: Path, arguments: tuple[Any, ...], named: Any
) -> None:
    result = prefill("--checkpoint", checkpoint, "--json", outputs / "r", *arguments)
    _assert_refused(result, *named, written=outputs)


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (("--tp", "8"), r"^tp_size expected a divisor of o_groups \(4\), got 8; choose another"),
        (("--pcp", "3"), r"^expert-parallel size expected .* got 3; .*, or no expert parallelism$"),
    ],
)
def test_layouts_that_the_model_has_not(
    prefill: Prefill, checkpoint: Path, ids_file: Path, layout: tuple[str, str], problem: str
) -> None:
    """What each rank checks before it reads weights; no other rank is needed for it."""
    job, command_line = (importlib.import_module(name) for name in ("job", "command_line"))
    base = ["--checkpoint", str(checkpoint), "--token-ids", str(ids_file)]
    options = command_line.make_parser().parse_args([*base, *layout])
    with pytest.raises(ValueError, match=problem):
        job.prepare(options, b"", writes=True)
    sound = command_line.make_parser().parse_args([*base, "--tp", "2", "--pcp", "2"])
    assert job.prepare(sound, b"", writes=True).ranks.ep_size == 4


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[[3, 320]]", ("ids.json list 0", "token ids 0 .. 319, got 320 at position 1")),
        ("[[3], [4, -1]]", ("list 1", "got -1 at position 1")),
        ("[[3, 4.5]]", ("got 4.5",)),
        ("[[true]]", ("got True",)),
        ("[[3], []]", ("list 1", "at least one prompt token")),
        ("[]", ("ids.json expected a JSON list of lists", "got []")),
        ("[3, 4]", ("got [3, 4]", "write [[0, 17, 4], ...]")),
        ('{"ids": [3]}', ("got {'ids': [3]}",)),
        ("[[3]", ("got no JSON",)),
        (json.dumps([[3] * 4096]), ("at most 4096 tokens, got a prompt of 4096 and 16 new",)),
    ],
)
def test_bad_token_ids(
    prefill: Prefill, checkpoint: Path, outputs: Path, tmp_path: Path, content: str, named: Any
) -> None:
    (tmp_path / "ids.json").write_text(content)
    result = prefill(
        *("--checkpoint", checkpoint, "--token-ids", tmp_path / "ids.json"),
        *("--json", outputs / "r", "--dump", outputs / "d"),
    )
    _assert_refused(result, *named, written=outputs)


def test_bad_prompt_files(
    prefill: Prefill, texts_checkpoint: Path, outputs: Path, tmp_path: Path
) -> None:
    file = tmp_path / "p.txt"
    base = ("--checkpoint", texts_checkpoint, "--json", outputs / "r", "--prompt-file")
    file.write_text("")
    _assert_refused(prefill(*base, file), "p.txt expected a prompt, got no text", written=outputs)
    file.write_bytes(b"\xff\xfe\x00")
    _assert_refused(prefill(*base, file), "p.txt", "not UTF-8", written=outputs)
    _assert_refused(prefill(*base, tmp_path), "Is a directory", written=outputs)


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _make_foreign(folder: Path) -> None:
    (folder / "model.safetensors").write_text("these are no weights, however long this text is")


def _drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _drop_token_map(folder: Path) -> None:
    (folder / TOKEN_MAP_FILE).unlink()


def _drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    text = {key: changes.pop(key) for key in list(changes) if key in config["text_config"]}
    config["text_config"] |= text
    file.write_text(json.dumps(config | changes))


def _previous_config(folder: Path) -> None:
    _edit_config(folder, model_type="deepseek_v4", architectures=["DeepseekV4ForCausalLM"])


def _previous_weights(folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"model.layers.0.self_attn.q_a_proj.weight": torch.zeros(4, 4)}
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_truncate, ("model.safetensors is truncated", "download")),
        (_make_foreign, ("model.safetensors is no safetensors file",)),
        (_drop_weights, ("neither model.safetensors nor",)),
        (_drop_token_map, (TOKEN_MAP_FILE, "copy tokenizer.json")),
        (_drop_config, ("config.json", "check the path")),
        (_previous_config, ("deepseek_v4", "previous generation")),
        (_previous_weights, ("previous generation", "download")),
        (lambda folder: _edit_config(folder, hidden_act="gelu"), ("hidden_act", "'gelu'")),
        (lambda folder: _edit_config(folder, scoring_func="softmax"), ("scoring_func",)),
        (lambda folder: _edit_config(folder, novelty=1), ("novelty", "remove it")),
        (lambda folder: _edit_config(folder, head_dim=64), ("head_dim",)),
    ],
)
def test_bad_checkpoints(
    prefill: Prefill,
    checkpoint: Path,
    ids_file: Path,
    tmp_path: Path,
    outputs: Path,
    spoil: Callable[[Path], None],
    named: Any,
) -> None:
    spoil(_copy(checkpoint, tmp_path / "c"))
    result = prefill(
        *("--checkpoint", tmp_path / "c", "--token-ids", ids_file, "--json", outputs / "r")
    )
    _assert_refused(result, *named, written=outputs)


def test_a_checkpoint_that_is_not_there(prefill: Prefill, ids_file: Path, outputs: Path) -> None:
    result = prefill("--checkpoint", "/nowhere", "--token-ids", ids_file, "--json", outputs / "r")
    _assert_refused(result, "expected a directory, got /nowhere", written=outputs)


@pytest.mark.parametrize("flag", ["--json", "--dump", "--plan-png"])
def test_outputs_that_cannot_be_written(
    prefill: Prefill, checkpoint: Path, ids_file: Path, tmp_path: Path, outputs: Path, flag: str
) -> None:
    """Refused before the run: a run that cannot keep its results is not worth starting."""
    base = ("--checkpoint", checkpoint, "--token-ids", ids_file, flag)
    for path in (outputs / "missing" / "r", tmp_path, ids_file / "r"):
        _assert_refused(prefill(*base, path), f"{flag} expected a file", str(path), written=outputs)
    same = outputs / "r"
    result = prefill(*base[:-1], "--json", same, "--dump", same)
    _assert_refused(result, "--dump expected another file than --json", written=outputs)
    result = prefill(*base[:-1], "--dump", same, "--plan-png", same)
    _assert_refused(result, "--plan-png expected another file than --dump", written=outputs)


def test_an_old_report_survives_a_refused_run(
    prefill: Prefill, checkpoint: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    report.write_text("old")
    assert prefill("--checkpoint", checkpoint, "--prompt", "x", "--json", report).code == 2
    assert report.read_text() == "old"


def test_a_refusal_is_an_exit_code_of_the_process(tmp_path: Path, checkpoint: Path) -> None:
    result = _process(tmp_path, "--checkpoint", checkpoint, "--prompt-file", "-", stdin="")
    _assert_refused(result, "standard input expected a prompt", written=tmp_path)
