"""Tensors for ``gather_slots`` and ``pad_replayed``: random hostile ones, and a realistic step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotInputs:
    """A global batch, its gathered rows and the layout of the cache groups."""

    positions: Tensor
    row_request: Tensor
    gather_index: Tensor
    write_mask: Tensor
    block_tables: Tensor
    block_sizes: tuple[int, ...]
    ratios: tuple[int, ...]
    replay_start: Tensor
    cacheable: tuple[bool, ...]
    window_size: int

    @property
    def gather(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[int], list[int]]:
        """Arguments of ``gather_slots``."""
        return (
            self.positions,
            self.row_request,
            self.gather_index,
            self.write_mask,
            self.block_tables,
            list(self.block_sizes),
            list(self.ratios),
        )

    def pad(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[bool], int]:
        """Arguments of ``pad_replayed``."""
        return (
            slots,
            self.positions,
            self.row_request,
            self.gather_index,
            self.replay_start,
            list(self.cacheable),
            self.window_size,
        )

    def to(self, device: str) -> SlotInputs:
        """The same on another device; strides are not kept."""
        names = ("positions", "row_request", "gather_index", "write_mask", "block_tables")
        names = (*names, "replay_start")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def pick(self, chosen: Tensor) -> SlotInputs:
        """The same with only the ``chosen`` gathered rows."""
        return replace(
            self, gather_index=self.gather_index[chosen], write_mask=self.write_mask[chosen]
        )


def hostile_inputs(
    seed: int, *, num_tokens: int = 11, num_reqs: int = 3, num_gathered: int = 16
) -> SlotInputs:
    """Small random arguments in which every index is sometimes -1 or out of range."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    sizes, ratios = (64, 64, 32, 12, 5), (1, 2, 1, 3, 5)
    tables = integers(-1, 1 << 31, len(sizes), num_reqs, 4).int()
    tables[integers(0, 4, *tables.shape) == 0] = -1
    positions = integers(0, 300, num_tokens)
    outside = torch.tensor([-1, -2, -64, 2**40])[integers(0, 4, num_tokens)]
    positions = torch.where(integers(0, 8, num_tokens) == 0, outside, positions)
    return SlotInputs(
        positions=positions,
        row_request=integers(-1, num_reqs + 1, num_tokens).int(),
        gather_index=integers(-2, num_tokens + 2, num_gathered),
        write_mask=integers(0, 4, num_gathered) > 0,
        block_tables=tables,
        block_sizes=sizes,
        ratios=ratios,
        replay_start=integers(0, 4, num_reqs).int() * 64,
        cacheable=(True, True, False, True, False),
        window_size=128,
    )


def bench_inputs(num_gathered: int, device: str, num_groups: int = 6, seed: int = 0) -> SlotInputs:
    """A step of 4 requests at PCP 4: 3 of them replay, an eighth of the gathered rows is padding.

    Groups: compressed KV and index keys of ratio 2, the same of ratio 1, window groups.
    """
    generator = torch.Generator().manual_seed(seed)
    num_reqs, num_tokens = 4, num_gathered - num_gathered // 8
    request = torch.arange(num_tokens) * num_reqs // num_tokens
    first = torch.tensor([0, 128, 4096, 65536])
    positions = first[request] + torch.arange(num_tokens) % (num_tokens // num_reqs)
    kept = torch.randperm(num_gathered, generator=generator)[:num_tokens]
    gather_index, write_mask = torch.zeros(num_gathered).long(), torch.zeros(num_gathered).bool()
    gather_index[kept] = torch.randperm(num_tokens, generator=generator)
    write_mask[kept] = True
    num_blocks = int(positions.max()) // 32 + 1
    tables = torch.randint(0, 100_000, (num_groups, num_reqs, num_blocks), generator=generator)
    inputs = SlotInputs(
        positions=positions,
        row_request=request.int(),
        gather_index=gather_index,
        write_mask=write_mask,
        block_tables=tables.int(),
        block_sizes=(64, 64, 64, 64, *(32,) * 12)[:num_groups],
        ratios=(2, 2, *(1,) * 14)[:num_groups],
        replay_start=first.int(),
        cacheable=(*(True,) * 4, *(False,) * 12)[:num_groups],
        window_size=128,
    )
    return inputs.to(device)
