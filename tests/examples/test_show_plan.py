"""Who owns which rows: what the table and the picture say about a partition."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pcpkit.cache.pool import CachePool
from pcpkit.engine.runner import ComputedStep
from pcpkit.plan.batch import StepBatch
from pcpkit.plan.partition import STRATEGIES, make_partition

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def show_plan() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("show_plan")


def step(starts: list[int], lengths: list[int], size: int, strategy: str = "dual") -> ComputedStep:
    """Requests a, b, ..; those that start at 0 are prompts."""
    count = len(lengths)
    none = torch.zeros(count, 0, dtype=torch.int32)
    prefills = [start == 0 for start in starts]
    return ComputedStep(
        request_ids=tuple("abcdefgh"[:count]),
        batch=StepBatch(
            query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int(),
            num_computed_tokens=torch.tensor(starts, dtype=torch.int32),
            is_prefilling=torch.tensor(prefills),
            token_ids=torch.zeros(sum(lengths), dtype=torch.int64),
            lookback_token_ids=none,
            block_table=none,
            window_block_table=none,
            ring_blocks=none[:, 0:0].flatten(),
            num_logits=torch.zeros(count, dtype=torch.int32),
        ),
        partition=make_partition(lengths, prefills, size, STRATEGIES[strategy]),
        pool=CachePool(window={}, compressed={}, index_keys={}, ring={}, compressed_record="nvfp4"),
        logits=torch.zeros(0, 1),
    )


def printed(show_plan: Any, *steps: ComputedStep, colour: bool = False) -> str:
    recorder = show_plan.PlanRecorder()
    for one in steps:
        recorder(one)
    out = io.StringIO()
    console = Console(file=out, width=100, color_system="truecolor" if colour else None)
    show_plan.print_plan(console, recorder.steps)
    return out.getvalue()


def test_the_worked_example(show_plan: Any) -> None:
    """10 rows on 2 ranks by DualChunkSwap (make_partition's docstring), beside a decode."""
    text = printed(show_plan, step([7, 0], [1, 10], 2))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "step 0: 11 rows on 2 PCP ranks, 1 of padding" in lines
    assert "a 7 .. 7 0" in lines
    assert "b 0 .. 9 0001111110" in lines
    assert "0 5 a: 7-7, b: 0-2, b: 9-9" in lines
    assert "1 6 b: 3-5, b: 6-8" in lines


def test_ranks_without_rows_are_listed(show_plan: Any) -> None:
    lines = [" ".join(line.split()) for line in printed(show_plan, step([4], [1], 3)).splitlines()]
    assert {"0 1 a: 4-4", "1 0 none", "2 0 none"} <= set(lines)
    assert "step 0: 1 rows on 3 PCP ranks, 2 of padding" in lines


def test_every_rank_has_its_colour(show_plan: Any) -> None:
    text = printed(show_plan, step([0], [64], 4), colour=True)
    for colour in show_plan.COLOURS[:4]:
        red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
        assert f"48;2;{red};{green};{blue}m" in text
    assert "\x1b" not in printed(show_plan, step([0], [64], 4))


def test_only_the_first_steps_are_kept(show_plan: Any) -> None:
    steps = [step([place], [1], 2) for place in range(6)]
    assert "step 2: " in printed(show_plan, *steps)
    assert "step 3: " not in printed(show_plan, *steps)


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    decodes=st.lists(st.booleans(), min_size=5, max_size=5),
    size=st.integers(1, 5),
    strategy=st.sampled_from(sorted(STRATEGIES)),
)
def test_every_row_has_one_owner(
    show_plan: Any, lengths: list[int], decodes: list[bool], size: int, strategy: str
) -> None:
    starts = [30 * decode for decode, _ in zip(decodes, lengths, strict=False)]
    computed = step(starts, lengths, size, strategy)
    owned = show_plan.owned_rows(computed)
    row = 0
    for piece in owned.pieces:
        assert piece.row == row, "rows are listed in order, without a gap"
        request = computed.request_ids.index(piece.request_id)
        first = int(computed.batch.query_start_loc[request])
        assert piece.start == starts[request] + row - first
        rows = torch.arange(row, row + piece.stop - piece.start)
        assert bool(torch.isin(rows, computed.partition.rows[piece.rank]).all())
        row += piece.stop - piece.start
    assert row == owned.num_rows == sum(lengths)
    assert owned.num_padding == computed.partition.gather_index.shape[0] - sum(lengths)


def test_a_picture(show_plan: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = tmp_path / "one.png", tmp_path / "two.png"
    plans = step([0, 3], [40, 1], 4), step([0, 3], [40, 1], 4, "cyclic")
    for file, computed in zip(files, plans, strict=True):
        show_plan.write_plan_png(file, [show_plan.owned_rows(computed)], "title")
        assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert files[0].read_bytes() != files[1].read_bytes()


def test_a_missing_package_is_a_clear_refusal(
    show_plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show_plan.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"^--plan-png expected matplotlib.*pip install"
    ) as caught:
        show_plan.check_plotting()
    assert "\n" not in str(caught.value)
