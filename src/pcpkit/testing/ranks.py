"""Real ranks for tests: processes that stay, and run one function after another.

Starting a process costs seconds, a call on processes that wait costs a fraction of a millisecond,
so that hundreds of examples of a property can run on real collectives.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from pcpkit.config import ParallelConfig
from pcpkit.parallel.collectives import (
    CollectiveError,
    JobMember,
    start_process_groups,
    stop_process_groups,
)
from pcpkit.parallel.groups import Groups

Result = TypeVar("Result")

START_TIMEOUT_S = 120.0
"""For spawning a process and importing torch, on a busy machine."""
STOP_TIMEOUT_S = 5.0
STACK_TIMEOUT_S = 1.0
DIED, NO_ANSWER = "died", "no answer"
_STOP = b"stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """What happened on one rank."""

    rank: int
    kind: str
    """Name of the exception's class, ``"died"`` or ``"no answer"``."""
    text: str
    """Traceback of the exception, exit status, or the stack where the rank was stuck."""

    usable: bool
    """Whether the rank can take another call: it is idle, and none of its collectives failed."""


class RanksFailed(RuntimeError):
    """A call failed on some ranks; the message has every traceback."""

    def __init__(self, name: str, size: int, failures: Sequence[RankFailure]) -> None:
        """Made by :meth:`RankPool.run`."""
        self.failures = tuple(failures)
        parts = [f"--- rank {one.rank}: {one.kind}\n{one.text.rstrip()}" for one in failures]
        super().__init__("\n".join([f"{name} failed on {len(failures)} of {size} ranks", *parts]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    stack_file: Path


class RankPool:
    """Processes that joined one job; they start with the first call and again after a broken one.

    A context manager, or call :meth:`close`.

    Example:
        ``with RankPool(ParallelConfig(pcp_size=2)) as pool: pool.run(function, argument)``
    """

    def __init__(
        self, config: ParallelConfig, *, device: str = "cpu", deadline_s: float = 10.0
    ) -> None:
        """Set up, start nothing.

        Args:
            config: sizes of the groups; as many processes.
            device: ``"cpu"`` for gloo, ``"cuda"`` for NCCL with one device a rank.
            deadline_s: seconds a rank waits for its peers in one collective.
        """
        self.config = config
        self.device = device
        self._deadline_s = deadline_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._workers: list[_Worker] = []

    def run(
        self, function: Callable[..., Result], *arguments: Any, timeout_s: float = 60.0
    ) -> list[Result]:
        """``function(rank, groups, *arguments)`` on every rank; the results in rank order.

        Args:
            function: importable by name: defined at the top level of a module.
            arguments: the same on every rank. They and the results are pickled.
            timeout_s: seconds until a rank that has not answered is stopped.

        Raises:
            RanksFailed: a rank raised, died or did not answer; with the tracebacks of all.
        """
        payload = pickle.dumps((function, arguments))
        self._start()
        for worker in self._workers:
            _send(worker, payload)
        answers, failures = self._collect(timeout_s)
        if failures:
            if not all(one.usable for one in failures):
                self._kill()
            name = f"{function.__module__}.{function.__qualname__}"
            raise RanksFailed(name, self.config.world_size, failures)
        return [answers[rank] for rank in range(self.config.world_size)]

    def close(self) -> None:
        """Stop the processes; the next call starts new ones."""
        for worker in self._workers:
            _send(worker, _STOP)
        for worker in self._workers:
            worker.process.join(STOP_TIMEOUT_S)
        self._kill()

    def __enter__(self) -> Self:
        """The pool."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def _start(self) -> None:
        if self._workers:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="pcpkit-ranks-")
        folder = Path(self._folder.name)
        context = multiprocessing.get_context("spawn")
        for rank in range(self.config.world_size):
            pipe, far_end = context.Pipe()
            stack_file = folder / f"stack-{rank}"
            member = JobMember(
                init_method=(folder / "store").as_uri(),
                rank=rank,
                world_size=self.config.world_size,
            )
            process = context.Process(
                target=_work,
                args=(far_end, stack_file, self.config, member, self.device, self._deadline_s),
                name=f"rank{rank}",
                daemon=True,
            )
            process.start()
            far_end.close()
            self._workers.append(_Worker(process=process, pipe=pipe, stack_file=stack_file))
        # First all import torch, then all join: joining has the deadline of a collective.
        failures = self._collect(START_TIMEOUT_S)[1]
        if not failures:
            for worker in self._workers:
                _send(worker, b"join")
            failures = self._collect(START_TIMEOUT_S)[1]
        if failures:
            self._kill()
            raise RanksFailed("start", self.config.world_size, failures)

    def _collect(self, timeout_s: float) -> tuple[Mapping[int, Any], list[RankFailure]]:
        """One answer of every rank."""
        answers: dict[int, Any] = {}
        failures: list[RankFailure] = []
        pending = {worker.pipe: rank for rank, worker in enumerate(self._workers)}
        end = time.monotonic() + timeout_s
        while pending:
            ready = wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in [pipe for pipe in pending if pipe in ready]:
                rank = pending.pop(pipe)
                answer = self._receive(rank)
                if isinstance(answer, RankFailure):
                    failures.append(answer)
                else:
                    answers[rank] = answer[0]
        for rank in pending.values():
            text = f"within {timeout_s} s; it was at\n{_stack(self._workers[rank])}"
            failures.append(RankFailure(rank=rank, kind=NO_ANSWER, text=text, usable=False))
        return answers, sorted(failures, key=lambda one: one.rank)

    def _receive(self, rank: int) -> Any:
        worker = self._workers[rank]
        try:
            answer = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            worker.process.join(STOP_TIMEOUT_S)
            text = f"exit status {worker.process.exitcode}"
            return RankFailure(rank=rank, kind=DIED, text=text, usable=False)
        return answer

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _send(worker: _Worker, payload: bytes) -> None:
    try:
        worker.pipe.send_bytes(payload)
    except ConnectionError:
        # It died; reading its answer says so.
        return


def _stack(worker: _Worker) -> str:
    """Where a process is, also inside a call into C; it is stopped afterwards."""
    if worker.process.pid is None or not worker.process.is_alive():
        return "(not running)"
    os.kill(worker.process.pid, signal.SIGUSR1)
    end = time.monotonic() + STACK_TIMEOUT_S
    while time.monotonic() < end:
        time.sleep(0.05)
        if worker.stack_file.exists() and worker.stack_file.stat().st_size:
            return worker.stack_file.read_text(encoding="utf-8")
    return "(no stack)"


# --- in the worker ------------------------------------------------------------------------------


def _work(
    pipe: Connection,
    stack_file: Path,
    config: ParallelConfig,
    member: JobMember,
    device: str,
    deadline_s: float,
) -> None:
    """A rank's life: join, then answer calls until the pool closes or is gone."""
    torch.set_num_threads(1)
    with stack_file.open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        pipe.send_bytes(pickle.dumps((None,)))
        try:
            pipe.recv_bytes()
            groups = _join(config, member, device, deadline_s)
            pipe.send_bytes(pickle.dumps((None,)))
            while (payload := pipe.recv_bytes()) != _STOP:
                pipe.send_bytes(_answer(member.rank, groups, payload))
        except (EOFError, ConnectionError):
            return
        except Exception as error:
            pipe.send_bytes(pickle.dumps(_failure(member.rank, error)))
        finally:
            stop_process_groups()


def _join(config: ParallelConfig, member: JobMember, device: str, deadline_s: float) -> Groups:
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(member.rank)
    return start_process_groups(config, device, deadline_s=deadline_s, member=member)


def _answer(rank: int, groups: Groups, payload: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(payload)
        return pickle.dumps((function(rank, groups, *arguments),))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Also what is no Exception: pytest's own outcomes, SystemExit.
        return pickle.dumps(_failure(rank, error))


def _failure(rank: int, error: BaseException) -> RankFailure:
    link: BaseException | None = error
    while link is not None and not isinstance(link, CollectiveError):
        link = link.__cause__ or link.__context__
    return RankFailure(
        rank=rank,
        kind=type(error).__name__,
        text="".join(traceback.format_exception(error)),
        usable=link is None,
    )
