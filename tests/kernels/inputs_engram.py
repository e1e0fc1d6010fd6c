"""Tensors for the Engram ops: tables with every byte, released hash constants, residual streams."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

EPS = 1e-20

# model-spec 5.2, layer 1 and 14: multipliers and the ends of the bucket counts, prefix 16000.
MULTIPLIERS = (
    (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (67716810739261, 51510806800915, 30921347202721, 82619226485591),
)
PRIME_ENDS = (
    *(57, 79, 81, 97, 121, 129, 133, 183, 189, 207, 211, 253, 277, 289, 307, 321),
    *(339, 381, 393, 399, 403, 409, 447, 463),
    *(477, 487, 499, 507, 511, 573, 609, 627, 667, 669, 693, 697, 711, 729, 759, 769),
    *(781, 799, 813, 819, 841, 877, 879, 889),
)
NUM_COMPRESSED = 99092


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HashInputs:
    """Arguments of ``engram_rows``."""

    token_windows: Tensor
    token_map: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor
    pad_id: int = 2

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        """In the op's order."""
        return (
            self.token_windows,
            self.token_map,
            self.multipliers,
            self.primes,
            self.offsets,
            self.pad_id,
        )

    def to(self, device: str) -> HashInputs:
        """The same on another device."""
        names = ("token_windows", "token_map", "multipliers", "primes", "offsets")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def released_hash(num_rows: int, seed: int = 0, vocab_size: int = 129280) -> HashInputs:
    """The constants of the released model on random tokens; a few windows start the request."""
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randint(0, vocab_size, (num_rows, 4), generator=generator)
    windows[::7, 2:] = -1
    primes = 16_000_000 + torch.tensor(PRIME_ENDS).view(2, 3, 8)
    columns = primes.flatten(1)
    return HashInputs(
        token_windows=windows,
        token_map=torch.randint(0, NUM_COMPRESSED, (vocab_size,), generator=generator),
        multipliers=torch.tensor(MULTIPLIERS),
        primes=primes,
        offsets=columns.cumsum(1) - columns,
    )


def random_table(num_rows: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Codes and scales with every byte, NaN codes and NaN scales included."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 256, (num_rows, dim), generator=generator).byte()
    return table, torch.randint(0, 256, (num_rows, dim // 32), generator=generator).byte()


def bench_table(num_rows: int, device: str, dim: int = 256) -> tuple[Tensor, Tensor]:
    """A table of ordinary values; ``device`` "pinned" puts it into pinned host memory."""
    table = torch.randint(0, 120, (num_rows, dim), dtype=torch.uint8)
    scale = torch.randint(115, 125, (num_rows, dim // 32), dtype=torch.uint8)
    if device == "pinned":
        return table.pin_memory(), scale.pin_memory()
    return table.to(device), scale.to(device)


def bench_lookups(num_rows: int, table_rows: int, device: str, columns: int = 24) -> Tensor:
    """Uniform rows: hashes spread the lookups over the whole table."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, table_rows, (num_rows, columns), generator=generator).to(device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InjectInputs:
    """Arguments of ``engram_inject``."""

    streams: Tensor
    key_value: Tensor
    query_weight: Tensor
    key_weight: Tensor

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        """In the op's order."""
        return self.streams, self.key_value, self.query_weight, self.key_weight, EPS

    def to(self, device: str) -> InjectInputs:
        """The same on another device; strides are not kept."""
        names = self.__slots__
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def pick(self, chosen: Tensor) -> InjectInputs:
        """The same with only the ``chosen`` rows."""
        return replace(self, streams=self.streams[chosen], key_value=self.key_value[chosen])


def inject_inputs(
    num_rows: int, device: str = "cpu", *, count: int = 4, dim: int = 5120, seed: int = 0
) -> InjectInputs:
    """Normal values. A key that resembles its stream gives gates away from one half."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    streams = normal(num_rows, count, dim)
    likeness = normal(num_rows, count, 1)
    keys = likeness * streams + normal(num_rows, count, dim)
    inputs = InjectInputs(
        streams=streams.bfloat16(),
        key_value=torch.cat([keys.flatten(1), normal(num_rows, dim)], dim=1).bfloat16(),
        query_weight=(1 + 0.1 * normal(count, dim)).bfloat16(),
        key_weight=(1 + 0.1 * normal(count, dim)).bfloat16(),
    )
    return inputs.to(device)
