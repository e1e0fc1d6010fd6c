"""Requests, the scheduler and the step loop."""

from pcpkit.engine.engine import Engine, StepResult
from pcpkit.engine.loading import (
    OpenCheckpoint,
    check_groups,
    load_model,
    open_checkpoint,
    resolve_device,
)
from pcpkit.engine.metrics import EngineMetrics
from pcpkit.engine.record import CacheRecorder
from pcpkit.engine.replicas import compare_replicas
from pcpkit.engine.request import Request, RequestOutput, SamplingParams, check_request
from pcpkit.engine.sizing import EngineConfig
from pcpkit.engine.verify import compare_requests, compare_with_cold, verify_requests

__all__ = [
    "CacheRecorder",
    "Engine",
    "EngineConfig",
    "EngineMetrics",
    "OpenCheckpoint",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "StepResult",
    "check_groups",
    "check_request",
    "compare_replicas",
    "compare_requests",
    "compare_with_cold",
    "load_model",
    "open_checkpoint",
    "resolve_device",
    "verify_requests",
]
