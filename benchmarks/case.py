"""What one benchmark is: an operator at one shape, how it is checked, and its peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.timing import Call

Output = Tensor | tuple[Tensor, ...]

ROUNDING_LIMIT = 5e-4
"""FP32 values that differ in their last bits: one in a thousand rounds to the next BF16 (2^-8)."""


class CheckFailed(AssertionError):
    """An operator's output is wrong; no time is printed for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """Where the peers' script reports a kernel.

    Attributes:
        section, name: as in its table; ``name`` may be the beginning of the name.
        shape: the first words of its shape column.
    """

    section: str
    name: str
    shape: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What an operator is compared with.

    Attributes:
        name: for the table. A peer without ``row`` and ``recorded_us`` runs in this process: its
            factory is ``Run.peers[name]``.
        row: of the peers' script.
        recorded_us: cold time measured before on an H200 (design/performance.md section 0); taken
            if the peers' script did not run, and always marked.
        recorded_tflops: its rate then.
        target: what is asked for, as text; empty if the peer is there for information.
        max_ratio: the target as a bound of our time over the peer's.
        by_rate: compare floating-point operations a second instead of times (the work differs).
    """

    name: str
    row: PeerRow | None = None
    recorded_us: float | None = None
    recorded_tflops: float | None = None
    target: str = ""
    max_ratio: float | None = None
    by_rate: bool = False

    @property
    def in_process(self) -> bool:
        """Whether this process runs it."""
        return self.row is None and self.recorded_us is None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """An operator with its inputs on a device.

    Attributes:
        call: runs it; may be repeated, returns the output (a cache it mutated included).
        check: compares an output of ``call`` with the reference, on sampled rows where that is
            slow; returns a note, raises :class:`CheckFailed`.
        flops: floating-point operations of the definition.
        num_bytes: the fewest bytes to move: each input read once, each output written once.
        peers: factories of the in-process peers; they allocate only when called.
    """

    call: Callable[[], Output]
    check: Callable[[Output], str]
    flops: float
    num_bytes: float
    peers: Mapping[str, Callable[[], Call]] = field(default_factory=dict[str, Callable[[], Call]])


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCase:
    """One row of the benchmark, or one a peer.

    Attributes:
        op: name of the kernel file.
        shape: function and sizes.
        make: builds the inputs on a device.
        peers: what to compare with.
        max_us: bound of the cold time itself, or ``None``.
        quick: part of ``--quick``.
    """

    op: str
    shape: str
    make: Callable[[str], Run]
    peers: tuple[Peer, ...] = ()
    max_us: float | None = None
    quick: bool = False


COPY = Peer(name="torch copy, same bytes")
"""A device copy that reads and writes as many bytes in all: the floor of a memory-bound op."""


def copy_peer(num_bytes: float, device: str) -> Mapping[str, Callable[[], Call]]:
    """Factory of :data:`COPY`."""

    def build() -> Call:
        source = torch.randint(0, 256, (int(num_bytes) // 2,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return {COPY.name: build}


def sample_rows(num_rows: int, count: int, device: str) -> Tensor:
    """About ``count`` distinct row numbers, int64 ascending: the first, the last, some between."""
    return torch.linspace(0, num_rows - 1, min(count, num_rows)).long().unique().to(device)


def require_equal(name: str, got: Tensor, want: Tensor) -> str:
    """Every bit of ``got`` is that of ``want``."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise CheckFailed(
            f"{name}: {got.dtype}{tuple(got.shape)}, want {want.dtype}{tuple(want.shape)}"
        )
    got, want = (x.contiguous().view(torch.uint8) for x in (got, want))
    wrong = (got != want).sum().item()
    if wrong:
        raise CheckFailed(f"{name}: {wrong} of {want.numel()} bytes differ")
    return "equal"


def require_close(name: str, got: Tensor, want: Tensor, limit: float) -> str:
    """``|got - want| / |want| <= limit`` over finite values; the others are in the same places.

    Both are upcast to float64. The caller says where ``limit`` comes from.
    """
    if got.shape != want.shape:
        raise CheckFailed(f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}")
    wide, exact = got.double(), want.double()
    finite = exact.isfinite()
    if not torch.equal(wide[~finite], exact[~finite]) or not wide[finite].isfinite().all():
        raise CheckFailed(f"{name}: other values than the reference's are not finite")
    error = (wide[finite] - exact[finite]).norm() / exact[finite].norm().clamp(min=1e-300)
    relative = float(error)
    if not relative <= limit:
        raise CheckFailed(f"{name}: relative error {relative:.1e}, at most {limit:.0e}")
    return f"rel {relative:.0e}"


def one(output: Output) -> Tensor:
    """The output of a call that returns one tensor."""
    assert isinstance(output, Tensor), "the call returns one tensor"
    return output


def several(output: Output) -> tuple[Tensor, ...]:
    """The outputs of a call that returns several tensors."""
    assert isinstance(output, tuple), "the call returns a tuple"
    return output
