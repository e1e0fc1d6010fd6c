"""Runs one case: build, check, time, time its peers; an op that fails costs its own row only."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.case import BenchCase, CheckFailed, Peer, Run
from benchmarks.peer_rows import find_row
from benchmarks.report import PeerTime, Row, failed_row, measured_rows
from benchmarks.timing import Stopwatch


class ContextLost(RuntimeError):
    """CUDA answers nothing any more: every later result of this process would be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What all cases of a run share.

    Attributes:
        device: "cuda" or "cpu".
        stopwatch: ``None`` where nothing is timed.
        peer_rows: rows of the peers' script.
        deadline: ``time.monotonic()`` from which no case is started.
        say: takes a line of progress.
    """

    device: str
    stopwatch: Stopwatch | None
    peer_rows: Sequence[dict[str, Any]]
    deadline: float
    say: Callable[[str], None]

    def run(self, case: BenchCase) -> list[Row]:
        """Rows of a case, one a peer.

        Raises:
            ContextLost: the case broke the CUDA context.
        """
        if time.monotonic() > self.deadline:
            return [failed_row(case.op, case.shape, "skipped", "the time budget is used up")]
        try:
            return self._checked_and_timed(case)
        except CheckFailed as error:
            return [failed_row(case.op, case.shape, "RED", str(error))]
        except NotImplementedError as error:
            return [failed_row(case.op, case.shape, "no kernel", str(error))]
        except Exception as error:
            # Builds and launches fail in many ways (torch, Triton, the driver); all are one row.
            self._require_context(error)
            note = f"{type(error).__name__}: {error}"
            return [failed_row(case.op, case.shape, "error", note)]
        finally:
            if self.device != "cpu":
                # A caught error's frames still hold its tensors.
                gc.collect()
                torch.cuda.empty_cache()

    def _checked_and_timed(self, case: BenchCase) -> list[Row]:
        run = case.make(self.device)
        note = run.check(run.call())
        if self.stopwatch is None:
            return measured_rows(case, run, note, None, [None] * len(case.peers))
        timing = self.stopwatch.measure(run.call)
        peers = [self._peer_time(self.stopwatch, peer, run) for peer in case.peers]
        return measured_rows(case, run, note, timing, peers)

    def _peer_time(self, stopwatch: Stopwatch, peer: Peer, run: Run) -> PeerTime | None:
        """From this process, the peers' script or a recorded figure, in this order."""
        if peer.in_process:
            try:
                timing = stopwatch.measure(run.peers[peer.name]())
            except (RuntimeError, NotImplementedError) as error:
                self._require_context(error)
                self.say(f"peer {peer.name}: {' '.join(str(error).split())[:200]}")
                return None
            return PeerTime(
                cold_us=timing.cold_us, hot_us=timing.hot_us, tflops=None, source="this process"
            )
        found = None if peer.row is None else find_row(self.peer_rows, peer.row)
        if found is not None:
            return PeerTime(
                cold_us=found.cold_us, hot_us=found.hot_us, tflops=found.tflops, source="peers.py"
            )
        if peer.recorded_us is None:
            return None
        return PeerTime(
            cold_us=peer.recorded_us, hot_us=None, tflops=peer.recorded_tflops, source="recorded"
        )

    def _require_context(self, error: Exception) -> None:
        if self.device == "cpu":
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise ContextLost(" ".join(str(error).split())[:300]) from error
