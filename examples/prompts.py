"""What `prefill.py` is asked to continue: texts, files, standard input, lists of token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from pcpkit.config import ModelConfig
from pcpkit.engine import Request, SamplingParams, check_request
from pcpkit.model.tokenizer import encode

PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One `--prompt` (kind `text`) or `--prompt-file` (kind `file`) as given."""

    kind: str
    value: str

    @property
    def label(self) -> str:
        """How errors and the table name it."""
        if self.kind == "text":
            return f"--prompt {_shortened(self.value)}"
        if self.value == "-":
            return "standard input"
        path = Path(self.value)
        return str(path.relative_to(PROJECT)) if path.is_relative_to(PROJECT) else self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt with the name that errors and the table use; `text` is None for token ids."""

    label: str
    text: str | None
    token_ids: tuple[int, ...] = ()


def default_sources() -> list[Source]:
    """The project's own README and docs."""
    files = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
    return [Source(kind="file", value=str(file)) for file in files if file.is_file()]


def read_text(source: Source, stdin: TextIO) -> Prompt:
    """Raises ValueError for a file that cannot be read, and for no text at all."""
    try:
        if source.kind == "text":
            text = source.value
        elif source.value == "-":
            text = stdin.read()
        else:
            text = Path(source.value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "bytes that are not UTF-8"
        raise ValueError(
            f"{source.label} expected readable UTF-8 text, got {reason}; check the path"
        ) from error
    if not text:
        raise ValueError(f"{source.label} expected a prompt, got no text; add some text")
    return Prompt(label=source.label, text=text)


def read_token_ids(path: Path) -> list[Prompt]:
    """Reads a JSON list of id lists. Raises ValueError for anything else."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no JSON ({error})"
        raise ValueError(
            f"{path} expected a JSON list of lists of token ids, got {reason}; check the file"
        ) from error
    lists = cast("list[Any]", document) if isinstance(document, list) else []
    if not lists or not all(isinstance(ids, list) for ids in lists):
        raise ValueError(
            f"{path} expected a JSON list of lists of token ids, got {_shortened(document)}; "
            "write [[0, 17, 4], ...]"
        )
    return [
        Prompt(label=f"{path} list {place}", text=None, token_ids=tuple(ids))
        for place, ids in enumerate(lists)
    ]


def make_requests(
    prompts: Sequence[Prompt],
    config: ModelConfig,
    tokenizer: Any,
    params: SamplingParams,
    *,
    cut_to: int | None,
) -> list[Request]:
    """Requests `0`, `1`, .. in order; texts get the beginning-of-sentence id in front.

    Args:
        prompts: what to continue.
        config: of the model.
        tokenizer: None if the checkpoint has none.
        params: of every request.
        cut_to: shorten a text to so many tokens, and to what the model takes; None keeps all of it,
            and refuses what is too long.

    Raises:
        ValueError: a text without a tokenizer, or a prompt that the model cannot take.
    """
    limit = config.max_position_embeddings
    requests: list[Request] = []
    for index, prompt in enumerate(prompts):
        token_ids = prompt.token_ids
        if prompt.text is not None:
            if tokenizer is None:
                raise ValueError(
                    f"{prompt.label} expected a checkpoint with tokenizer.json, got one without; "
                    "copy tokenizer.json of the release there, or pass --token-ids"
                )
            token_ids = tuple(encode(tokenizer, prompt.text, bos_token_id=config.bos_token_id))
            if cut_to is not None:
                token_ids = token_ids[: min(cut_to, limit - params.max_new_tokens)]
        request = Request(request_id=str(index), prompt_token_ids=token_ids, params=params)
        try:
            check_request(request, vocab_size=config.vocab_size, max_model_len=limit)
        except ValueError as error:
            raise ValueError(f"{prompt.label}: {error}") from None
        requests.append(request)
    return requests


def _shortened(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
