"""Counters and histograms for Prometheus (extra `metrics`); off unless an engine is given them.

    registry = prometheus_client.CollectorRegistry()
    engine = Engine(model, metrics=EngineMetrics(registry))
    prometheus_client.start_http_server(9000, registry=registry)

Several engines in one process need a registry each. Nothing is decided by a metric.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pcpkit.cache.prefix import PrefixStats
from pcpkit.engine.request import RequestOutput

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PREFIX = "pcpkit_"
SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of the histograms of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLevels:
    """How full an engine is after a step."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    """Compressed blocks that nobody holds, cached ones included."""
    num_cached_free_blocks: int
    """Those of them that the prefix cache would still find."""
    snapshot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """What one step added."""

    num_prompt_rows: int
    num_decode_rows: int
    num_replayed_rows: int
    """Those of the prompt rows that stand below adopted tokens."""
    num_preemptions: int
    seconds: float


class EngineMetrics:
    """The metrics of one engine.

    Args:
        registry: where they are registered; None is the client's own, for one engine a process.

    Raises:
        ImportError: prometheus-client is not installed.
        ValueError: the registry has metrics of another engine.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client as client
        except ImportError as error:
            raise ImportError(
                "metrics expected prometheus-client, got none; pip install 'pcpkit[metrics]'"
            ) from error
        where = client.REGISTRY if registry is None else registry

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> client.Counter:
            return client.Counter(PREFIX + name, text, labels, registry=where)

        def gauge(name: str, text: str) -> client.Gauge:
            return client.Gauge(PREFIX + name, text, registry=where)

        def seconds(name: str, text: str) -> client.Histogram:
            return client.Histogram(PREFIX + name, text, registry=where, buckets=SECONDS)

        self._ttft = seconds("ttft_seconds", "From submission to the first token")
        self._queue = seconds("queue_seconds", "From submission to the first step of a request")
        self._step = seconds("step_seconds", "Duration of a step")
        self._rows = counter("rows", "Rows that ran", ("kind",))
        self._replayed = counter("replayed_rows", "Rows that ran again below adopted tokens")
        self._query_tokens = counter("prefix_query_tokens", "Prompt tokens of started requests")
        self._hit_tokens = counter("prefix_hit_tokens", "Those taken over from the prefix cache")
        self._evictions = counter("prefix_evictions", "Cached blocks that were dealt anew")
        self._preemptions = counter("preemptions", "Requests that lost their blocks")
        self._finished = counter("requests_finished", "Requests by how they ended", ("reason",))
        self._seen = PrefixStats()
        self._levels = {
            "num_running": gauge("requests_running", "Requests that hold blocks"),
            "num_waiting": gauge("requests_waiting", "Requests that hold nothing"),
            "num_free_blocks": gauge("free_blocks", "Compressed blocks that nobody holds"),
            "num_cached_free_blocks": gauge(
                "cached_free_blocks", "Free blocks that the prefix cache still finds"
            ),
            "snapshot_bytes": gauge("snapshot_bytes", "Bytes of window snapshots"),
        }

    def count_start(self, queue_s: float) -> None:
        """A request runs for the first time."""
        self._queue.observe(queue_s)

    def count_step(self, counts: StepCounts, stats: PrefixStats, levels: EngineLevels) -> None:
        """A step is done; `stats` are the engine's counters after it."""
        self._rows.labels("prompt").inc(counts.num_prompt_rows)
        self._rows.labels("decode").inc(counts.num_decode_rows)
        self._replayed.inc(counts.num_replayed_rows)
        self._preemptions.inc(counts.num_preemptions)
        self._step.observe(counts.seconds)
        self._query_tokens.inc(stats.num_query_tokens - self._seen.num_query_tokens)
        self._hit_tokens.inc(stats.num_hit_tokens - self._seen.num_hit_tokens)
        self._evictions.inc(stats.num_evictions - self._seen.num_evictions)
        self._seen = replace(stats)
        for name, gauge in self._levels.items():
            gauge.set(getattr(levels, name))

    def count_finished(self, output: RequestOutput) -> None:
        """A request ended by itself."""
        self._finished.labels(output.finish_reason).inc()
        self._ttft.observe(output.ttft_s)

    def count_aborted(self) -> None:
        """A request was aborted."""
        self._finished.labels("abort").inc()
