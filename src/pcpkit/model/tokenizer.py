"""Text in and out: a thin wrapper around the `tokenizers` library (extra `text`).

The engine itself works on token ids; only examples, the command line and the Engram token map need
a tokenizer, so nothing here is imported when pcpkit is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """Load DIRECTORY/tokenizer.json; None if the directory has no such file.

    Raises:
        ValueError: the file is there but is not a tokenizer.
        ImportError: the file is there but the `tokenizers` package is not installed.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs the package tokenizers, which is not installed; "
            f"install pcpkit[text]"
        ) from error
    # The Rust side raises a bare Exception for any malformed file: translate only that type.
    data = path.read_bytes()
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:
        raise ValueError(
            f"{path} expected a tokenizer in the tokenizers JSON format, got: {error}; "
            f"copy tokenizer.json of the release again"
        ) from error


def encode(tokenizer: Tokenizer, text: str, *, bos_token_id: int | None = None) -> list[int]:
    """Token ids of `text`, after `bos_token_id` if one is given.

    Special tokens written out in the text are recognised; the tokenizer adds none by itself, so the
    beginning-of-sentence id is the caller's explicit choice.
    """
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    return token_ids if bos_token_id is None else [bos_token_id, *token_ids]


def decode(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """Text of `token_ids`, without clean-up; U+FFFD stands for bytes that are not valid UTF-8."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
