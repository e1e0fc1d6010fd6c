"""Slots of a gathered step in all cache groups, replayed rows padded: two launches."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from benchmarks.case import BenchCase, Output, Run, one, require_equal
from pcpkit.kernels.replay_pad import pad_replayed, pad_replayed_reference
from pcpkit.kernels.slot_gather import gather_slots, gather_slots_reference
from tests.kernels.inputs_slot_gather import bench_inputs


def make(num_rows: int, num_groups: int, device: str) -> Run:
    """Build one case: four requests, three of which replay; an eighth of the rows is padding."""
    given = bench_inputs(num_rows, device, num_groups)

    def call() -> Tensor:
        slots = gather_slots(*given.gather)
        pad_replayed(*given.pad(slots))
        return slots

    def check(output: Output) -> str:
        want = gather_slots_reference(*given.gather)
        pad_replayed_reference(*given.pad(want))
        return require_equal("slots", one(output), want)

    num_bytes = num_rows * (8.0 + 8 + 4 + 1 + 8 * num_groups)
    return Run(call=call, check=check, flops=0.0, num_bytes=num_bytes)


def cases(tiny: bool = False) -> list[BenchCase]:
    """8,192 rows in 6 groups."""
    num_rows, num_groups = (64, 6) if tiny else (8192, 6)
    return [
        BenchCase(
            op="slot_gather",
            shape=f"gather_slots + pad_replayed {num_rows} rows x {num_groups} groups",
            make=partial(make, num_rows, num_groups),
            max_us=10.0,
            quick=True,
        )
    ]
