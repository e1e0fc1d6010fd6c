"""From logits to the next token, one row at a time.

Greedy takes the largest logit, the lowest id on ties. With a temperature the row is sampled by
inversion: ids in descending order of logit (lowest id first on ties) are laid along [0, 1) by their
probability, and the id under a number u is taken. u depends on nothing but the request's seed and
the number of the token, as there is no generator whose state other requests could advance: a
request gets the same tokens in any batch, chunking and order. Everything but the logits is float64
on the host, so every rank of a parallel engine draws alike.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from pcpkit.engine.request import SamplingParams

_FRACTION_BITS = 53


def uniform(seed: int, index: int) -> float:
    """The number u in [0, 1) that decides token `index` (0 = the first sampled) of a seed.

    53 bits of the BLAKE2b hash of both, each as 8 bytes, little-endian.

    Example:
        >>> uniform(0, 0)
        0.0564663990004608
    """
    data = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _FRACTION_BITS)) / 2**_FRACTION_BITS


def greedy_tokens(logits: Tensor) -> list[int]:
    """Id of the largest logit of every row, the lowest id on ties.

    Args:
        logits: (rows, vocab) fp32.

    Returns:
        One id a row; `vocab`, which is no id, for a row with NaN.
    """
    # argmax may return any of several equal maxima, so the lowest is taken by hand.
    ids = torch.arange(logits.shape[1], device=logits.device)
    best = logits == logits.amax(1, keepdim=True)
    return torch.where(best, ids, logits.shape[1]).amin(1).tolist()


def sample_token(logits: Tensor, params: SamplingParams, index: int) -> int:
    """Sample one token from one row; `params.temperature` must be above 0.

    Args:
        logits: (vocab,) fp32 without NaN.
        params: temperature, top_p and seed.
        index: number of the token in its request, from 0.
    """
    row = logits.double().cpu()
    order = row.sort(descending=True, stable=True)
    weights = ((order.values - order.values[0]) / params.temperature).exp()
    cumulative = weights.cumsum(0)
    # The smallest prefix that reaches top_p, at least one id.
    kept = int((cumulative < params.top_p * cumulative[-1]).sum()) + 1
    kept = min(kept, row.shape[0])
    threshold = uniform(params.seed, index) * cumulative[kept - 1]
    # Strictly above, so that an id of probability zero is never under u.
    place = int((cumulative[:kept] <= threshold).sum())
    return int(order.indices[min(place, kept - 1)])


def next_tokens(logits: Tensor, params: list[SamplingParams], indices: list[int]) -> list[int]:
    """The next token of every row.

    Args:
        logits: (rows, vocab) fp32, one row a request.
        params: of each row's request.
        indices: number of the token in each request, from 0.

    Raises:
        FloatingPointError: a row holds NaN.
    """
    if not params:
        return []
    tokens = greedy_tokens(logits)
    if max(tokens) == logits.shape[1]:
        raise FloatingPointError(
            f"logits expected numbers, got NaN in row {tokens.index(logits.shape[1])} of "
            f"{len(tokens)}; check the checkpoint for damaged weights"
        )
    for row, (asked, index) in enumerate(zip(params, indices, strict=True)):
        if asked.temperature > 0:
            tokens[row] = sample_token(logits[row], asked, index)
    return tokens
