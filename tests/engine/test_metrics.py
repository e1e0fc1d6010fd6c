"""Prometheus metrics: what they count, and that an engine needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pcpkit.cache.replay import SnapshotReplay
from pcpkit.cache.snapshot import SnapshotStore
from pcpkit.engine import Engine, EngineConfig, EngineMetrics

from .dataflow_model import dataflow_config, dataflow_model
from .small_model import random_prompt, request

ROOT = Path(__file__).parents[2]


def test_everything_that_happens_is_counted() -> None:
    registry = CollectorRegistry()
    ticks = iter(range(10**6))
    engine = Engine(
        dataflow_model(dataflow_config()),
        EngineConfig(
            chunk_tokens=64,
            max_requests=2,
            num_blocks=24,
            block_size=4,
            window_block_size=4,
            num_spare_blocks=0,
        ),
        replay=SnapshotReplay(keeps_prompt_ends=False),
        snapshots=SnapshotStore(10**6),
        metrics=EngineMetrics(registry),
        clock=lambda: float(next(ticks)),
    )
    prefix = random_prompt(64, 0)
    rows = 0
    for name in "abc":
        engine.submit(request(name, (*prefix, 3, ord(name)), max_new_tokens=2, ignore_eos=True))
        while engine.has_work:
            result = engine.step()
            rows += result.num_prompt_rows + result.num_decode_rows
    engine.submit(request("gone", (3, 4, 5)))
    engine.abort("gone")
    # Two that cannot grow side by side.
    for name, seed in (("x", 1), ("y", 2)):
        asked = request(name, random_prompt(40, seed), max_new_tokens=30, ignore_eos=True)
        engine.submit(asked)
    rest = [engine.step() for _ in range(200) if engine.has_work]
    engine.check_invariants()

    def value(name: str, **labels: str) -> float:
        found = registry.get_sample_value(f"pcpkit_{name}", labels)
        assert found is not None, name
        return found

    prompt = value("rows_total", kind="prompt")
    decode = value("rows_total", kind="decode")
    assert prompt + decode == rows + sum(r.num_prompt_rows + r.num_decode_rows for r in rest)
    # Of the second request with the prefix, and of whoever was preempted.
    assert value("replayed_rows_total") == 12 + sum(r.num_replayed_rows for r in rest) > 12
    assert value("prefix_query_tokens_total") == 3 * 66 + 2 * 40
    assert value("prefix_hit_tokens_total") == 2 * 64
    assert value("prefix_evictions_total") == engine.stats.num_evictions > 0
    assert value("preemptions_total") == sum(len(r.preempted) for r in rest) > 0
    assert value("requests_finished_total", reason="length") == 5
    assert value("requests_finished_total", reason="abort") == 1
    assert value("ttft_seconds_count") == value("queue_seconds_count") == 5
    assert value("queue_seconds_sum") > 0
    assert value("step_seconds_count") > 0
    assert value("requests_running") == value("requests_waiting") == 0
    assert value("free_blocks") == 24
    assert 0 < value("cached_free_blocks") <= 24
    assert value("snapshot_bytes") > 0


def test_two_engines_need_a_registry_each() -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        EngineMetrics(registry)


def test_an_engine_imports_without_the_client() -> None:
    """And says what is missing only when metrics are asked for."""
    program = """
import sys
sys.modules["prometheus_client"] = None
from pcpkit.engine import EngineMetrics
try:
    EngineMetrics()
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": os.defpath},
    )
    assert done.stdout == (
        "metrics expected prometheus-client, got none; pip install 'pcpkit[metrics]'\n"
    )
