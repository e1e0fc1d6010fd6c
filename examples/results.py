"""What the examples leave behind: a JSON report, a safetensors dump, a table.

Files appear complete or not at all: each is written beside its target and renamed at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file

from pcpkit.engine import RequestOutput

LABEL_WIDTH = 20


def check_writable(flag: str, path: Path) -> None:
    """Raises ValueError unless a file can be put at `path`; leaves nothing there."""
    target, problem = path.resolve(), None
    if target.exists() and not target.is_file():
        problem = "no regular file"
    else:
        try:
            _partial(target).touch()
            _partial(target).unlink()
        except OSError as error:
            problem = error.strerror
    if problem is not None:
        raise ValueError(
            f"{flag} expected a file that can be written, got {path} ({problem}); choose another "
            "path"
        )


def write_files(writers: Mapping[Path, Callable[[Path], None]]) -> None:
    """Runs every writer on a path beside its target, then renames all of them, in order."""
    staged = [(_partial(target.resolve()), target.resolve()) for target in writers]
    try:
        for (partial, _), write in zip(staged, writers.values(), strict=True):
            write(partial)
        for partial, target in staged:
            os.replace(partial, target)
    finally:
        for partial, _ in staged:
            partial.unlink(missing_ok=True)


def _partial(target: Path) -> Path:
    # The process id keeps two runs with one target apart; the last one to finish wins.
    return target.with_name(f".{target.name}.{os.getpid()}.partial")


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """The report, indented."""
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def write_dump(path: Path, outputs: Sequence[RequestOutput]) -> None:
    """Per request i: `i.tokens` int64 (prompt, then sampled ids) and, if kept, `i.logits` fp32."""
    tensors: dict[str, torch.Tensor] = {}
    for index, output in enumerate(outputs):
        token_ids = [*output.request.prompt_token_ids, *output.token_ids]
        tensors[f"{index}.tokens"] = torch.tensor(token_ids, dtype=torch.int64)
        if output.logits is not None:
            tensors[f"{index}.logits"] = output.logits.contiguous()
    save_file(tensors, path)


def print_table(
    console: Console,
    labels: Sequence[str],
    outputs: Sequence[RequestOutput],
    texts: Sequence[str | None],
) -> None:
    """One entry a request: prompt tokens, seconds to the first token (waiting included), prompt
    tokens per second of that, new tokens per second after it, text (or ids without a tokenizer).
    """
    table = Table(box=SIMPLE_HEAD, header_style="bold", collapse_padding=True, pad_edge=False)
    table.add_column("prompt", no_wrap=True)
    for name in ("tokens", "TTFT s", "tok/s", "new tok/s"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    table.add_column("continuation", overflow="fold", min_width=20)
    for label, output, text in zip(labels, outputs, texts, strict=True):
        num_prompt, steps = len(output.request.prompt_token_ids), len(output.token_ids) - 1
        shown = " ".join(map(str, output.token_ids)) if text is None else repr(text)[1:-1]
        table.add_row(
            Text(_fitted(label)),
            f"{num_prompt:,}",
            f"{output.ttft_s:.2f}",
            f"{num_prompt / output.ttft_s:,.0f}",
            f"{steps / output.decode_s:.1f}" if steps else "-",
            Text(shown),
        )
    console.print(table)


def _fitted(label: str) -> str:
    """The end of a long path, the beginning of a long text."""
    text = label.removeprefix("--prompt ")
    if len(text) <= LABEL_WIDTH:
        return text
    is_path = text == label
    return f"..{text[2 - LABEL_WIDTH :]}" if is_path else f"{text[: LABEL_WIDTH - 2]}.."
