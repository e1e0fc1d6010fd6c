"""Two medians of a call on a CUDA device, by the method of the peers' own script.

*Cold*: a 1 GiB memset evicts the L2 before every call, and hides the time the host takes to launch
it; the events enclose the call alone. *Hot*: replays of a CUDA graph of ten calls on the same data,
which leaves out the host; a call that cannot be captured is repeated instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[], object]

FLUSH_BYTES = 1 << 30
WARM_CALLS = 3
GRAPH_CALLS = 10
GRAPH_REPLAYS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds of one call.

    Attributes:
        cold_us: median of the cold repetitions.
        cold_quartiles_us: their first and third quartile; a smaller difference is noise.
        hot_us: median over the replays.
        captured: whether ``hot_us`` comes from a CUDA graph.
        repetitions: number of cold repetitions.
    """

    cold_us: float
    cold_quartiles_us: tuple[float, float]
    hot_us: float
    captured: bool
    repetitions: int


class Stopwatch:
    """Measures calls on the current CUDA device; holds the buffer that evicts the L2."""

    def __init__(self, repetitions: int) -> None:
        self._repetitions = repetitions
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def measure(self, call: Call) -> Timing:
        """Time one call; its inputs must allow it to be repeated."""
        for _ in range(WARM_CALLS):
            call()
        torch.cuda.synchronize()
        cold = self._cold(call)
        low, _, high = statistics.quantiles(cold, n=4)
        hot, captured = _hot(call)
        return Timing(
            cold_us=statistics.median(cold),
            cold_quartiles_us=(low, high),
            hot_us=hot,
            captured=captured,
            repetitions=len(cold),
        )

    def _cold(self, call: Call) -> list[float]:
        events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(self._repetitions):
            self._flush.zero_()
            begin, end = _event(), _event()
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _hot(call: Call) -> tuple[float, bool]:
    graph = _capture(call)
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(GRAPH_REPLAYS + 1):
        begin, end = _event(), _event()
        begin.record()
        if graph is None:
            for _ in range(GRAPH_CALLS):
                call()
        else:
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / GRAPH_CALLS)
    # The first replay uploads the graph.
    return statistics.median(times[1:]), graph is not None


def _capture(call: Call) -> torch.cuda.CUDAGraph | None:
    """A graph of ten calls, ``None`` if the call does something a graph cannot hold."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Torch leaves its capture stream current if a capture fails; the outer context restores ours.
    with torch.cuda.stream(torch.cuda.current_stream()):
        try:
            with torch.cuda.graph(graph):
                for _ in range(GRAPH_CALLS):
                    call()
        except RuntimeError:
            torch.cuda.synchronize()
            return None
    return graph
