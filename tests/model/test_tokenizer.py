"""The tokenizer wrapper: round trips, special tokens, and what it says when a file is unusable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pcpkit.model.tokenizer import decode, encode, load_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer() -> Tokenizer:
    """Ids 0, 1, 2 are special, 3.. are the 256 bytes in alphabet order, then one merge."""
    vocab = {"<bos>": 0, "<eos>": 1, "<pad>": 2}
    for char in [*ALPHABET, "ab"]:
        vocab[char] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<bos>", "<eos>", "<pad>")])
    return tokenizer


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


def test_known_ids(loaded: Tokenizer) -> None:
    a, b, c = (3 + ALPHABET.index(char) for char in "abc")
    merged = 3 + len(ALPHABET)
    assert encode(loaded, "abc") == [merged, c]
    assert encode(loaded, "ba") == [b, a]
    assert encode(loaded, "") == []


def test_bos_only_on_request(loaded: Tokenizer) -> None:
    ids = encode(loaded, "ab")
    assert encode(loaded, "ab", bos_token_id=0) == [0, *ids]
    assert encode(loaded, "", bos_token_id=0) == [0]


def test_special_tokens_in_text_and_in_ids(loaded: Tokenizer) -> None:
    ids = encode(loaded, "<bos>ab<eos>")
    assert ids[0] == 0
    assert ids[-1] == 1
    assert decode(loaded, ids) == "ab"
    assert decode(loaded, ids, skip_special_tokens=False) == "<bos>ab<eos>"


@given(text=st.text(max_size=60))
@settings(deadline=None)
def test_decode_inverts_encode(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert decode(tokenizer, encode(tokenizer, text), skip_special_tokens=False) == text


def test_decode_marks_broken_utf8(loaded: Tokenizer) -> None:
    ids = encode(loaded, "\xe9")
    assert len(ids) == 2
    assert decode(loaded, tuple(ids)) == "\xe9"
    assert decode(loaded, ids[:1]) == "\ufffd"


def test_no_file_is_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(tmp_path / "missing") is None


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": {"type": "Nope"}}'])
def test_malformed_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json expected a tokenizer in the"):
        load_tokenizer(tmp_path)


def test_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_tokenizer(tmp_path) is None  # nothing to read, so nothing to complain about
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ImportError, match=r"install pcpkit\[text\]"):
        load_tokenizer(tmp_path)
