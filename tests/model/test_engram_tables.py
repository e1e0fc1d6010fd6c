"""Engram hash constants against the release, the golden vectors and slow re-derivations."""

from __future__ import annotations

import dataclasses
import re
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models

from pcpkit.config import ModelConfig
from pcpkit.model.engram_tables import (
    EngramHash,
    check_token_map,
    engram_multipliers,
    engram_offsets,
    engram_primes,
    is_prime,
    load_token_map,
    token_map_from_tokenizer,
)

GoldenDir = Callable[[str], Path]  # the fixture of conftest.py

RELEASED_PRIMES = [
    [
        [57, 79, 81, 97, 121, 129, 133, 183],
        [189, 207, 211, 253, 277, 289, 307, 321],
        [339, 381, 393, 399, 403, 409, 447, 463],
    ],
    [
        [477, 487, 499, 507, 511, 573, 609, 627],
        [667, 669, 693, 697, 711, 729, 759, 769],
        [781, 799, 813, 819, 841, 877, 879, 889],
    ],
]
RELEASED_MULTIPLIERS = [
    [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    [67716810739261, 51510806800915, 30921347202721, 82619226485591],
]

# White_Space of Unicode; str.strip() would also take U+001C..U+001F.
WHITE_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


def released_primes() -> torch.Tensor:
    return engram_primes(num_layers=2, max_ngram_size=4, num_heads=8, vocab_size=16_000_000)


# --- primes -------------------------------------------------------------------------------------


def test_primes_and_table_heights_equal_the_release() -> None:
    start = time.perf_counter()
    primes = released_primes()
    elapsed = time.perf_counter() - start
    assert torch.equal(primes, torch.tensor(RELEASED_PRIMES) + 16_000_000)
    assert primes.flatten(1).sum(1).tolist() == [384_006_168, 384_016_682]
    assert elapsed < 1.0, f"prime search took {elapsed:.2f} s; start-up must not notice it"


def test_is_prime_equals_a_sieve() -> None:
    limit = 50_000
    sieve = [False, False] + [True] * (limit - 2)
    for number in range(2, int(limit**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = [False] * len(sieve[number * number :: number])
    assert [is_prime(number) for number in range(limit)] == sieve


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (3_215_031_751, False),  # strong pseudoprime to bases 2, 3, 5, 7
        (3_825_123_056_546_413_051, False),  # ... to bases 2..23
        (2**61 - 1, True),
        ((2**31 - 1) * (2**29 - 3), False),
    ],
)
def test_is_prime_on_hard_numbers(number: int, expected: bool) -> None:
    assert is_prime(number) is expected


@given(
    num_layers=st.integers(0, 3),
    max_ngram_size=st.integers(2, 5),
    num_heads=st.integers(1, 5),
    vocab_size=st.integers(1, 3_000),
)
@settings(deadline=None, max_examples=50)
def test_primes_are_the_next_unused_ones(
    num_layers: int, max_ngram_size: int, num_heads: int, vocab_size: int
) -> None:
    primes = engram_primes(
        num_layers=num_layers,
        max_ngram_size=max_ngram_size,
        num_heads=num_heads,
        vocab_size=vocab_size,
    )
    assert primes.shape == (num_layers, max_ngram_size - 1, num_heads)
    # The search restarts below vocab_size for every n-gram size, but the used set is shared, so the
    # whole table is the gap-free ascending sequence of primes from vocab_size on.
    flat = primes.flatten().tolist()
    upper = flat[-1] if flat else 0
    assert flat == [
        number
        for number in range(vocab_size, upper + 1)
        if number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
    ]


# --- multipliers and offsets --------------------------------------------------------------------


def test_multipliers_equal_the_release() -> None:
    multipliers = engram_multipliers((1, 14), max_ngram_size=4, compressed_vocab_size=99_092)
    assert multipliers.tolist() == RELEASED_MULTIPLIERS


def test_multipliers_never_overflow_and_depend_on_the_compressed_size() -> None:
    for compressed in (100, 99_092, 129_280):
        multipliers = engram_multipliers(
            (1, 14), max_ngram_size=4, compressed_vocab_size=compressed
        )
        assert (multipliers % 2 == 1).all()
        assert int(multipliers.max()) * (compressed - 1) < 2**63
    raw_size = engram_multipliers((1, 14), max_ngram_size=4, compressed_vocab_size=129_280)
    assert raw_size.tolist() != RELEASED_MULTIPLIERS


def test_offsets_tile_the_table() -> None:
    primes = released_primes()
    offsets = engram_offsets(primes)
    assert offsets.shape == (2, 24)
    assert (offsets[:, 0] == 0).all()
    assert torch.equal(offsets[:, 1:], (offsets + primes.flatten(1))[:, :-1])


# --- golden vectors -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["tiny-main", "tiny-dspark"])
def test_hash_constants_equal_golden(case: str, golden_dir: GoldenDir) -> None:
    golden = load_file(golden_dir(case) / "golden.safetensors")
    token_map = load_token_map(golden_dir(case))
    constants = EngramHash.from_config(ModelConfig.from_file(golden_dir(case)), token_map)
    assert torch.equal(token_map, golden["engram.token_map"])
    assert torch.equal(constants.primes, golden["engram.primes"])
    assert torch.equal(constants.multipliers, golden["engram.multipliers"])
    assert torch.equal(constants.offsets, golden["engram.offsets"].reshape(constants.offsets.shape))
    assert constants.pad_id == golden["engram.pad_id"].item()


@pytest.mark.parametrize(("case", "prompt"), [("tiny-main", 1), ("tiny-dspark", 0)])
def test_constants_reproduce_golden_rows(case: str, prompt: int, golden_dir: GoldenDir) -> None:
    """The constants, put through the hash of model-spec 5.3, give the official table rows."""
    directory = golden_dir(case)
    golden = load_file(directory / "golden.safetensors")
    config = ModelConfig.from_file(directory)
    constants = EngramHash.from_config(config, load_token_map(directory))
    ids = [int(constants.token_map[token]) for token in golden[f"p{prompt}.tokens"].tolist()]
    rows = [
        [hash_rows(constants, layer, ids, position) for layer in range(constants.primes.shape[0])]
        for position in range(len(ids))
    ]
    assert rows == golden[f"p{prompt}.engram.rows"].tolist()


def hash_rows(constants: EngramHash, layer: int, ids: list[int], position: int) -> list[int]:
    """Model-spec 5.3 with Python integers."""
    multipliers = constants.multipliers[layer].tolist()
    primes, offsets = constants.primes[layer].tolist(), constants.offsets[layer].tolist()
    mixed, rows = 0, list[int]()
    for back, multiplier in enumerate(multipliers):
        mixed ^= (ids[position - back] if position >= back else constants.pad_id) * multiplier
        if back:
            rows += [mixed % prime for prime in primes[back - 1]]
    return [row + offset for row, offset in zip(rows, offsets, strict=True)]


# --- token map ----------------------------------------------------------------------------------


def byte_level_alphabet() -> dict[int, str]:
    """How byte-level vocabularies spell each byte: printable ones stand for themselves."""
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in keep]
    return {byte: chr(byte) for byte in keep} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


def tokenizer_of(pieces: list[bytes]) -> Tokenizer:
    """A byte-level tokenizer with three special tokens (ids 0, 1, 2), then these pieces."""
    alphabet = byte_level_alphabet()
    vocab = {"<s>": 0, "</s>": 1, "<pad>": 2}
    for piece in pieces:
        vocab["".join(alphabet[byte] for byte in piece)] = len(vocab)
    assert len(vocab) == len(pieces) + 3, "pieces must be distinct"
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return tokenizer


def slow_key(piece: bytes, spelled: str) -> str:
    """Model-spec 5.1 with unicodedata only."""
    text = piece.decode("utf-8", errors="replace")
    if "\ufffd" in text:
        return spelled
    form = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    form = "".join(char for char in form if not unicodedata.category(char).startswith("M"))
    form = "".join(char.lower() for char in form)
    form = re.sub("[ \t\r\n]+", " ", form)
    form = "\ue000" if form == " " else form
    return form.strip(WHITE_SPACE).replace("\ue000", " ") or text


def slow_map(pieces: list[bytes]) -> list[int]:
    alphabet = byte_level_alphabet()
    keys = ["<s>", "</s>", "<pad>"]
    keys += [slow_key(piece, "".join(alphabet[byte] for byte in piece)) for piece in pieces]
    first: dict[str, int] = {}
    return [first.setdefault(key, len(first)) for key in keys]


CASES: list[tuple[str, list[str | bytes], list[int]]] = [
    ("case variants", ["the", "The", "THE", "thE", "then"], [3, 3, 3, 3, 4]),
    ("blanks around a word", ["the", " the", "the ", "\tThe\n", "t he"], [3, 3, 3, 3, 4]),
    ("accents", ["cafe", "caf\xe9", "cafe\u0301", "CAF\xc9", "cafes"], [3, 3, 3, 3, 4]),
    ("compatibility forms", ["fi", "\ufb01", "\uff26\uff29", "\u2460", "1"], [3, 3, 3, 4, 4]),
    ("only blanks: one space", [" ", "  ", "\t", "\r\n", " \n ", "\u3000", "\xa0"], [3] * 7),
    ("blanks the rule does not name", ["\x0b", "\x0c", "\u2028", " \x0b"], [3, 4, 5, 6]),
    ("blank inside", ["a b", "a  b", "A\tb", "ab"], [3, 3, 3, 4]),
    ("only an accent: empty, so the text", ["\u0301", "\u0300", "\u0301\u0300"], [3, 4, 5]),
    ("bytes that are not UTF-8", [b"\xc3", b"\xa9", b"\xc3\xa9", "e", b"A\xff", b"a\xff"],
     [3, 4, 5, 5, 6, 7]),
    ("a real U+FFFD is a raw piece", ["\ufffd", "A\ufffd", "a\ufffd"], [3, 4, 5]),
    ("control characters stay", ["\x1c", "\x1c ", "\x00", "\u200b"], [3, 3, 4, 5]),
    ("raw piece meets a normalised key", [b"\xe2", "\xe2", "a", "A"], [3, 4, 4, 4]),
    ("a lone U+E000 becomes the space", ["\ue000", " "], [3, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("pieces", "expected"), [case[1:] for case in CASES],
                         ids=[case[0] for case in CASES])  # fmt: skip
def test_token_map_rules(pieces: list[str | bytes], expected: list[int]) -> None:
    raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    token_map = token_map_from_tokenizer(tokenizer_of(raw)).tolist()
    assert token_map == [0, 1, 2, *expected]
    assert slow_map(raw) == token_map


# Characters old enough that Python's and the Rust crates' Unicode tables agree.
INTERESTING = st.sampled_from(
    [*" \t\r\n\x0b\xa0\u3000\u2003", *"aAbB\xe9\xc9\xdf\xfc", *"\u0301\u0308\u0903\u20dd",
     *"\ufb01\uff21\u2460\u0130\u03a3\u03c2\u1e9e", "\ue000", "\ufffd", "\U0001f600", "\u4e2d"]
)  # fmt: skip
PIECES = st.one_of(
    st.text(INTERESTING, min_size=1, max_size=4).map(str.encode), st.binary(min_size=1, max_size=3)
)


@given(pieces=st.lists(PIECES, min_size=1, max_size=40, unique=True))
@settings(deadline=None, max_examples=200)
def test_token_map_equals_slow_python(pieces: list[bytes]) -> None:
    assert token_map_from_tokenizer(tokenizer_of(pieces)).tolist() == slow_map(pieces)


def test_tokens_added_after_the_vocabulary_count() -> None:
    """The release keeps hundreds of its special tokens outside the BPE vocabulary."""
    tokenizer = tokenizer_of([b"a"])
    tokenizer.add_special_tokens([AddedToken("<|Tool|>", special=True)])
    tokenizer.add_tokens([AddedToken(" A", normalized=False)])
    assert token_map_from_tokenizer(tokenizer).tolist() == [0, 1, 2, 3, 4, 3]


def test_load_token_map_prefers_the_stored_map(tmp_path: Path) -> None:
    tokenizer_of([b"a", b"A"]).save(str(tmp_path / "tokenizer.json"))
    assert load_token_map(tmp_path).tolist() == [0, 1, 2, 3, 3]
    save_file({"token_map": torch.arange(5)}, tmp_path / "engram_token_map.safetensors")
    assert load_token_map(tmp_path).tolist() == [0, 1, 2, 3, 4]


# --- errors -------------------------------------------------------------------------------------


def test_load_token_map_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected engram_token_map.* or tokenizer\.json"):
        load_token_map(tmp_path)
    save_file({"map": torch.arange(5)}, tmp_path / "engram_token_map.safetensors")
    with pytest.raises(ValueError, match="tensor token_map"):
        load_token_map(tmp_path)
    (tmp_path / "engram_token_map.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match="expected a safetensors file"):
        load_token_map(tmp_path)


@pytest.mark.parametrize(
    ("token_map", "match"),
    [
        (torch.tensor([0, 1, 2], dtype=torch.int32), "1-D int64"),
        (torch.zeros(0, dtype=torch.int64), "non-empty"),
        (torch.zeros(2, 2, dtype=torch.int64), "1-D int64"),
        (torch.tensor([0, 2, 1]), "got 2 for token 1"),
        (torch.tensor([0, 1, -1]), "got -1 for token 2"),
        (torch.tensor([1, 0]), "got 1 for token 0"),
    ],
)
def test_check_token_map_refuses(token_map: torch.Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_token_map(token_map)


def test_from_config_names_the_broken_rule(golden_dir: GoldenDir) -> None:
    config = ModelConfig.from_file(golden_dir("tiny-main"))
    token_map = load_token_map(golden_dir("tiny-main"))
    with pytest.raises(ValueError, match="expected vocab_size = 512 entries, got 511"):
        EngramHash.from_config(config, token_map[:-1])
    with pytest.raises(ValueError, match="expected 236 distinct compressed ids, got 1"):
        EngramHash.from_config(config, torch.zeros_like(token_map))
    wrong = dataclasses.replace(config, engram_num_embeddings=(630, 835))
    with pytest.raises(ValueError, match="layer 4 expected the sum of its primes 834, got 835"):
        EngramHash.from_config(wrong, token_map)
