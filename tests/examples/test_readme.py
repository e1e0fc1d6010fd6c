"""The README's code runs as printed, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("place", range(len(BLOCKS)))
def test_code_blocks_run(
    place: int,
    texts_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("pcpkit.model.tiny.cached_tiny_checkpoint", lambda: texts_checkpoint)
    exec(compile(BLOCKS[place], f"README.md python block {place}", "exec"), {})
    if "print(" in BLOCKS[place]:
        assert re.match(r"\(\d+(, \d+){7}\) .", capsys.readouterr().out)


def test_there_are_code_blocks() -> None:
    assert len(BLOCKS) >= 2


def test_links_lead_to_files() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 4
    assert not [link for link in links if not (ROOT / link).is_file()]


def test_flags_in_the_readme_exist() -> None:
    example = (ROOT / "examples" / "command_line.py").read_text(encoding="utf-8")
    # argparse makes --no-ep out of --ep.
    flags = set(re.findall(r"`(--[a-z-]+)", README)) - {"--help", "--no-ep"}
    assert len(flags) > 16
    assert not [flag for flag in flags if f'"{flag}"' not in example]
