"""Engram hash constants: token compression map, bucket primes, multipliers (model-spec 5.1, 5.2).

Everything here is a pure function of the configuration and of the tokenizer; nothing is stored in
the checkpoint except, optionally, the finished token map.

Symbols: L Engram layers, N largest n-gram size (so n = 2..N and N - 1 sizes), H hash heads,
C = (N - 1) * H hash columns in the order (n-gram size, head).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pcpkit.config import ModelConfig
from pcpkit.model.tokenizer import TOKENIZER_FILE, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer

TOKEN_MAP_FILE = "engram_token_map.safetensors"

_SEED_FACTOR = 10007  # default_rng(10007 * layer), model-spec 5.2
_INT64_MAX = 2**63 - 1
_REPLACEMENT = "\ufffd"  # marks a piece that is not valid UTF-8 on its own
_LONE_SPACE = "\ue000"  # private use: protects a lone space from the strip step
# Deterministic Miller-Rabin: these bases decide every n < 3.3e24, far past int64.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngramHash:
    """Hash constants of all Engram layers of one model (model-spec 5.2), int64 CPU tensors.

    primes (L, N - 1, H): bucket count of each hash column.
    multipliers (L, N): odd factor of each look-back 0..N - 1.
    offsets (L, C): first table row of each column; column c owns rows
        [offsets[c], offsets[c] + prime_c).
    pad_id: compressed id of the pad token, used where the look-back leaves the request.
    token_map (vocab_size,): token id -> compressed id.
    """

    primes: Tensor
    multipliers: Tensor
    offsets: Tensor
    pad_id: int
    token_map: Tensor

    @classmethod
    def from_config(cls, config: ModelConfig, token_map: Tensor) -> Self:
        """Build and check the constants.

        Args:
            config: supplies the engram_* fields, vocab_size and num_hidden_layers.
            token_map: (vocab_size,) int64, from `load_token_map`.

        Raises:
            ValueError: the map is malformed or does not have engram_compressed_vocab_size distinct
                ids (the multipliers depend on that number), or the primes of a layer do not sum to
                its engram_num_embeddings (the table height).
        """
        num_keys = check_token_map(token_map)
        if token_map.numel() != config.vocab_size:
            raise ValueError(
                f"token_map expected vocab_size = {config.vocab_size} entries, got "
                f"{token_map.numel()}; use the tokenizer that belongs to this checkpoint"
            )
        if num_keys != config.engram_compressed_vocab_size:
            raise ValueError(
                f"engram_compressed_vocab_size expected {config.engram_compressed_vocab_size} "
                f"distinct compressed ids, got {num_keys} from the token map; use the tokenizer "
                f"that belongs to this checkpoint"
            )
        primes = engram_primes(
            num_layers=len(config.engram_layer_ids),
            max_ngram_size=config.engram_max_ngram_size,
            num_heads=config.engram_n_heads,
            vocab_size=config.engram_vocab_size,
        )
        _check_table_heights(primes, config.engram_layer_ids, config.engram_num_embeddings)
        return cls(
            primes=primes,
            multipliers=engram_multipliers(
                config.engram_layer_ids,
                max_ngram_size=config.engram_max_ngram_size,
                compressed_vocab_size=config.engram_compressed_vocab_size,
            ),
            offsets=engram_offsets(primes),
            pad_id=int(token_map[config.engram_pad_token_id]),
            token_map=token_map,
        )


def is_prime(number: int) -> bool:
    """Exact primality test for 0 <= number < 3.3e24 (Miller-Rabin with fixed bases)."""
    if number < 2:
        return False
    for base in _WITNESSES:
        if number % base == 0:
            return number == base
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in _WITNESSES:
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def engram_primes(
    *, num_layers: int, max_ngram_size: int, num_heads: int, vocab_size: int
) -> Tensor:
    """Bucket counts, int64 (num_layers, max_ngram_size - 1, num_heads) (model-spec 5.2).

    Layers in order, n-gram sizes 2..max_ngram_size in order: take the num_heads smallest primes
    >= vocab_size that no earlier column of *any* layer has taken.

    Example:
        >>> engram_primes(num_layers=2, max_ngram_size=3, num_heads=2, vocab_size=11).tolist()
        [[[11, 13], [17, 19]], [[23, 29], [31, 37]]]
    """
    used: set[int] = set()
    rows = [
        list(_take_unused_primes(vocab_size, num_heads, used))
        for _ in range(num_layers * (max_ngram_size - 1))
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(num_layers, max_ngram_size - 1, num_heads)


def _take_unused_primes(start: int, count: int, used: set[int]) -> Iterator[int]:
    """Yield the `count` smallest primes >= start outside `used`, adding them to it."""
    candidate = start - 1
    for _ in range(count):
        candidate += 1
        while candidate in used or not is_prime(candidate):
            candidate += 1
        used.add(candidate)
        yield candidate


def engram_offsets(primes: Tensor) -> Tensor:
    """First table row of each hash column, int64 (L, C): exclusive prefix sums of the primes.

    Example:
        >>> engram_offsets(torch.tensor([[[11, 13], [17, 19]]])).tolist()
        [[0, 11, 24, 41]]
    """
    columns = primes.flatten(1)
    return columns.cumsum(1) - columns


def engram_multipliers(
    layer_ids: tuple[int, ...], *, max_ngram_size: int, compressed_vocab_size: int
) -> Tensor:
    """Odd hash multipliers, int64 (len(layer_ids), max_ngram_size), one per look-back.

    The bound keeps `compressed id * multiplier` inside int64, so it follows the compressed
    vocabulary size *of the configuration* (model-spec 5.2).
    """
    bound = _INT64_MAX // compressed_vocab_size // 2
    rows = np.empty((len(layer_ids), max_ngram_size), dtype=np.int64)
    for row, layer in zip(rows, layer_ids, strict=True):
        generator = np.random.default_rng(_SEED_FACTOR * layer)
        row[:] = 2 * generator.integers(0, bound, size=max_ngram_size, dtype=np.int64) + 1
    return torch.from_numpy(rows)


def token_map_from_tokenizer(tokenizer: Tokenizer) -> Tensor:
    """Compression map of a tokenizer, int64 (vocabulary size incl. added tokens,) (model-spec 5.1).

    Two tokens get the same compressed id iff they have the same key: the raw vocabulary piece where
    the token alone is not valid UTF-8, else the normalised text, else (normalised to nothing) the
    plain text. Keys are numbered in order of first appearance.
    """
    normalizer = _build_normalizer()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
    ids: dict[str, int] = {}
    token_map = [
        ids.setdefault(_compression_key(tokenizer, normalizer, token, text), len(ids))
        for token, text in enumerate(texts)
    ]
    return torch.tensor(token_map, dtype=torch.int64)


def _compression_key(tokenizer: Tokenizer, normalizer: Normalizer, token: int, text: str) -> str:
    if _REPLACEMENT in text:
        # A piece is missing only for an unassigned id, whose text is empty.
        return tokenizer.id_to_token(token) or text
    return normalizer.normalize_str(text) or text


def _build_normalizer() -> Normalizer:
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"\A \z"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def load_token_map(directory: Path) -> Tensor:
    """Token map of a checkpoint directory, int64 (vocabulary size,).

    Reads engram_token_map.safetensors (key token_map) if it is there, else builds the map from
    tokenizer.json, which takes about a second at the released size.

    Raises:
        ValueError: neither file is there, or the map is malformed.
    """
    path = directory / TOKEN_MAP_FILE
    if path.exists():
        token_map = _read_token_map(path)
        check_token_map(token_map)
        return token_map
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise ValueError(
            f"directory expected {TOKEN_MAP_FILE} or {TOKENIZER_FILE} for the Engram token map, "
            f"got neither in {directory}; copy tokenizer.json of the release there"
        )
    return token_map_from_tokenizer(tokenizer)


def _read_token_map(path: Path) -> Tensor:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path} expected a safetensors file, got: {error}; "
            f"delete it to rebuild the map from {TOKENIZER_FILE}"
        ) from error
    if "token_map" not in tensors:
        raise ValueError(
            f"{path} expected the tensor token_map, got {sorted(tensors)}; "
            f"delete it to rebuild the map from {TOKENIZER_FILE}"
        )
    return tensors["token_map"]


def check_token_map(token_map: Tensor) -> int:
    """Return the number of distinct compressed ids.

    Raises:
        ValueError: not a non-empty 1-D int64 CPU tensor, or not numbered 0, 1, 2, ... in order of
            first appearance (model-spec 5.1).
    """
    if token_map.dtype != torch.int64 or token_map.ndim != 1 or token_map.numel() == 0:
        raise ValueError(
            f"token_map expected a non-empty 1-D int64 tensor, got {token_map.dtype} of shape "
            f"{tuple(token_map.shape)}; build it with token_map_from_tokenizer"
        )
    # First appearances in order <=> every entry is at most one past the running maximum before it.
    before = torch.cat([token_map.new_full((1,), -1), token_map.cummax(0).values[:-1]])
    wrong = ((token_map > before + 1) | (token_map < 0)).nonzero()
    if wrong.numel():
        token = int(wrong[0])
        raise ValueError(
            f"token_map expected ids numbered in order of first appearance, got {token_map[token]} "
            f"for token {token}; build it with token_map_from_tokenizer"
        )
    return int(token_map.max()) + 1


def _check_table_heights(
    primes: Tensor, layer_ids: tuple[int, ...], num_embeddings: tuple[int, ...]
) -> None:
    for layer, columns, expected in zip(layer_ids, primes, num_embeddings, strict=True):
        height = int(columns.sum())
        if height != expected:
            raise ValueError(
                f"engram_num_embeddings of layer {layer} expected the sum of its primes {height}, "
                f"got {expected}; check engram_vocab_size, engram_n_heads, engram_max_ngram_size "
                f"and the order of engram_layer_ids"
            )
