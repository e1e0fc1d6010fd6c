"""The code in docs/testing.md runs as printed, finds what it says, and its names exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ATTENTION, EXCHANGE = 0, 1  # the third starts processes: test_ranks.py runs it


def run(code: str, max_examples: int = 30) -> None:
    """As printed, but for the number of examples; failing ones are not made smaller."""
    assert "\n@given(" in code
    limits = f"settings(max_examples={max_examples}, phases=(Phase.generate,))"
    code = code.replace("\n@given(", f"\n@{limits}\n@given(")
    code = f"from hypothesis import Phase, settings\n{code}"
    exec(compile(code, "docs/testing.md", "exec"), {"__name__": "docs_testing"})


def test_there_are_three_blocks() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("place", [ATTENTION, EXCHANGE])
def test_properties_hold(place: int) -> None:
    run(BLOCKS[place])


def edited(place: int, before: str, after: str) -> str:
    assert before in BLOCKS[place], f"the page no longer has {before}"
    return BLOCKS[place].replace(before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("position - WINDOW + 1)", "position - WINDOW)"),
        ("seen // block_size]", "seen * 0]"),
        ("        out[row] = ", "        out.view(-1)[row * DIM : (row + 1) * DIM] = query[0] - "),
    ],
    ids=["window too wide", "always the first block", "depends on a neighbour"],
)
def test_the_attention_example_finds_mistakes(before: str, after: str) -> None:
    code = edited(ATTENTION, before, after)
    with pytest.raises((AssertionError, IndexError)):
        run(code, max_examples=300)


def test_the_exchange_example_finds_a_rank_that_does_not_call() -> None:
    code = edited(
        EXCHANGE,
        "        return {",
        '        if not len(mine):\n            return {"rows": content}\n        return {',
    )
    with pytest.raises(RuntimeError, match=r"rank \d+ returned; a rank left out a call"):
        run(code, max_examples=300)


def test_names_of_the_table_exist() -> None:
    """Every backticked word of a module's line is one of its names."""
    lines = re.findall(r"^\| `((?:testing|parallel)\.\w+)` \| (.*?) \|", PAGE, re.MULTILINE)
    assert len(lines) == 6
    for module, names in lines:
        loaded = importlib.import_module(f"pcpkit.{module}")
        for name in re.findall(r"`(\w+)", names):
            assert hasattr(loaded, name), f"{module} has no {name}"


def test_every_public_strategy_is_in_the_table() -> None:
    source = (ROOT / "src" / "pcpkit" / "testing" / "strategies.py").read_text(encoding="utf-8")
    public = re.findall(r"^def ([a-z]\w+)", source, re.MULTILINE)
    assert len(public) > 8
    assert not [name for name in public if f"`{name}`" not in PAGE]


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert links
    assert not [link for link in links if not (ROOT / "docs" / link).is_file()]
