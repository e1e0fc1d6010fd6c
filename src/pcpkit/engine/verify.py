"""Does a request give the same bits when it runs alone and is cut into other steps?

The model promises row-invariance: tokens, logits and cache bytes of a request depend neither on the
requests that run beside it nor on how its rows are dealt to steps, and with ordered sums not on how
they are dealt to ranks either. `verify_requests` checks it on real requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, cycle, repeat

import torch
from torch import Tensor

from pcpkit.engine.engine import Engine
from pcpkit.engine.record import CacheRecorder
from pcpkit.engine.request import RequestOutput
from pcpkit.engine.sizing import EngineConfig
from pcpkit.model.decoder import TextModel

TOKEN_BY_TOKEN = (32, 4)
"""Rows that the check runs one at a time before it takes larger steps: of the first request, where
every case of a short context passes by, and of each other one."""
STEP_SIZES = (61, 1, 2, 127, 256)
"""Steps of the rest, in turn: odd and even cuts, and blocks that are left half full."""


def compare_requests(
    expected: RequestOutput,
    got: RequestOutput,
    expected_bytes: Mapping[str, Tensor],
    got_bytes: Mapping[str, Tensor],
) -> list[str]:
    """What differs between two runs of a request, one line a difference; empty if nothing does.

    Logits are compared as bits, so that NaN and the sign of zero count.
    """
    name = f"request {expected.request.request_id}"
    found: list[str] = []
    if expected.token_ids != got.token_ids:
        found.append(f"{name}: tokens {list(expected.token_ids)} and {list(got.token_ids)}")
    tensors = named_bytes(expected, expected_bytes), named_bytes(got, got_bytes)
    if tensors[0].keys() != tensors[1].keys():
        found.append(f"{name}: only one run has {sorted(tensors[0].keys() ^ tensors[1].keys())}")
    for key in sorted(tensors[0].keys() & tensors[1].keys()):
        left, right = tensors[0][key], tensors[1][key]
        if left.shape != right.shape:
            found.append(f"{name}: {key} of shapes {list(left.shape)} and {list(right.shape)}")
        elif not torch.equal(left, right):
            rows = (left != right).flatten(1).any(1) if left.ndim > 1 else left != right
            found.append(f"{name}: {key} differs first at row {int(rows.nonzero()[0, 0])}")
    return found


def compare_with_cold(
    cold: RequestOutput,
    got: RequestOutput,
    cold_recorder: CacheRecorder,
    got_recorder: CacheRecorder,
) -> list[str]:
    """What differs between a cold run of a request and one behind a cached prefix or a preemption.

    Tokens and kept logits, compressed records of all positions, window records of all positions
    that the second run wrote or restored (it has no others), and the open row.

    Args:
        cold, got: results of requests with the same prompt and parameters; ids may differ.
        cold_recorder, got_recorder: watched the runs.

    Returns:
        One line a difference; empty if nothing differs.
    """
    names = cold.request.request_id, got.request.request_id
    bytes_of = [r.cache_bytes(n) for r, n in zip((cold_recorder, got_recorder), names, strict=True)]
    cold_spans, got_spans = cold_recorder.spans(names[0]), got_recorder.spans(names[1])
    found: list[str] = []
    for name, span in got_spans.items():
        expected = cold_spans.get(name)
        if expected is None:
            continue  # told as a name that only one run has
        if name.startswith("window."):
            common = torch.isin(expected.positions, span.positions)
            bytes_of[0][name] = expected.records[common]
            expected_positions = expected.positions[common]
        else:
            expected_positions = expected.positions
        if not torch.equal(expected_positions, span.positions):
            found.append(f"request {names[1]}: {name} has other positions than the cold run")
    return found + compare_requests(cold, got, *bytes_of)


def named_bytes(output: RequestOutput, cache_bytes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The cache bytes of a request and, if kept, the bits of its logits; uint8 by name."""
    if output.logits is None:
        return dict(cache_bytes)
    return dict(cache_bytes) | {"logits": output.logits.contiguous().view(torch.uint8)}


def verify_requests(
    model: TextModel,
    config: EngineConfig,
    outputs: Sequence[RequestOutput],
    recorder: CacheRecorder,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Run finished requests again, each alone, cold and cut differently, and compare everything.

    Args:
        model: that made the outputs, or the same on other ranks: a whole one on this rank.
        config: of the engine that made them; steps of the second run are no larger.
        outputs: to be checked.
        recorder: watched the first run.
        progress: is told the number of rows after every step of the second run.

    Returns:
        What differs, one line a difference.
    """
    differences: list[str] = []
    for place, output in enumerate(outputs):
        again = CacheRecorder(model.config)
        engine = Engine(model, _alone(config), observe=again)
        engine.submit(output.request)
        finished: list[RequestOutput] = []
        sizes = _step_sizes(TOKEN_BY_TOKEN[min(place, 1)])
        while engine.has_work:
            result = engine.step(next(sizes))
            finished += result.finished
            progress(result.num_prompt_rows + result.num_decode_rows)
        differences += compare_with_cold(finished[0], output, again, recorder)
    return differences


def _alone(config: EngineConfig) -> EngineConfig:
    return EngineConfig(
        chunk_tokens=config.chunk_tokens,
        max_requests=1,
        block_size=config.block_size,
        window_block_size=config.window_block_size,
        compressed_format=config.compressed_format,
    )


def _step_sizes(token_by_token: int) -> Iterator[int]:
    return chain(repeat(1, token_by_token), cycle(STEP_SIZES))
