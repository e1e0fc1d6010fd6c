"""Steps with replay and trim: what their plans should say by definition, and how to plan them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from pcpkit.config import CacheConfig
from pcpkit.plan.batch import StepBatch
from pcpkit.plan.partition import Partition, dual_chunk_swap, make_partition
from pcpkit.plan.step import StepPlan, plan_step
from pcpkit.plan.trim import Trim
from pcpkit.testing.batches import PrefixHit, RaggedBatch, RequestRows, assemble_steps
from pcpkit.testing.strategies import partitions, step_schedules, step_sequences

RATIOS = (1, 2)
NUM_LAYERS, CUT, WINDOW = 5, 2, 4
NO_TRIM = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A step dealt to ranks and the plans of all of them."""

    rows: RaggedBatch
    batch: StepBatch
    partition: Partition
    cache: CacheConfig
    trim: Trim | None
    plans: tuple[StepPlan, ...]

    def start(self, request: int, layer: int) -> int:
        """First position of a request that runs in a layer, from the definitions."""
        one = self.rows.requests[request]
        start = one.hit.layer_starts[layer] if one.hit is not None else 0
        if self.trim is None or not one.may_trim or layer <= self.trim.cut:
            return start
        hops = self.trim.num_layers - 1 - layer if self.trim.mode == "exact" else 0
        size = self.trim.sliding_window
        first = one.seq_len - size - hops * (size - 1)
        return max(start, first) if first > one.num_computed_tokens else start

    def runs(self, row: int, layer: int) -> bool:
        """Whether a global row runs in a layer."""
        return self.rows.places[row][1] >= self.start(self.request(row), layer)

    def request(self, row: int) -> int:
        """Place in the batch of the request of a global row."""
        return [i for i, one in enumerate(self.rows.requests) for _ in range(one.query_len)][row]

    def num_cached(self, row: int) -> int:
        """Tokens that the request of a global row took over."""
        hit = self.rows.requests[self.request(row)].hit
        return 0 if hit is None else hit.num_tokens


def plan_all(
    rows: RaggedBatch,
    batch: StepBatch,
    partition: Partition,
    cache: CacheConfig,
    trim: Trim | None = NO_TRIM,
    sliding_window: int | None = None,
) -> Step:
    plans = tuple(
        plan_step(
            batch,
            ratios=RATIOS,
            block_size=cache.block_size,
            window_block_size=cache.window_block_size,
            ring_rows=cache.ring_rows,
            partition=partition,
            rank=rank,
            sliding_window=sliding_window,
            trim=trim,
        )
        for rank in range(partition.size)
    )
    return Step(rows=rows, batch=batch, partition=partition, cache=cache, trim=trim, plans=plans)


trims = st.sampled_from(
    [
        NO_TRIM,
        Trim(mode="exact", cut=CUT, num_layers=NUM_LAYERS, sliding_window=WINDOW),
        Trim(mode="bounded", cut=CUT, num_layers=NUM_LAYERS, sliding_window=WINDOW),
    ]
)


@st.composite
def replayed_steps(draw: st.DrawFn) -> Step:
    """Any step of a schedule in which some requests start behind a hit."""
    schedules = step_schedules(max_requests=3, max_prompt=30, max_decodes=2, num_layers=NUM_LAYERS)
    steps = draw(step_sequences(schedules))
    index = draw(st.integers(0, len(steps.rows) - 1))
    rows = steps.rows[index]
    partition, trim = draw(partitions(rows, max_ranks=4)), draw(trims)
    return plan_all(rows, steps.batches[index], partition, steps.cache, trim)


def local_rows(step: Step, rank: int, layer: int) -> list[int]:
    """Global rows of a rank that run in a layer, in local order."""
    return [row for row in step.partition.rows[rank].tolist() if step.runs(row, layer)]


# --- single steps ---

LAYOUT = CacheConfig(num_blocks=1, num_window_blocks=1, num_requests=1)


def bounded(num_cached: int, num_layers: int = NUM_LAYERS, window: int = 128) -> PrefixHit:
    return PrefixHit(num_tokens=num_cached, layer_starts=(num_cached - window,) * num_layers)


def prefill(computed: int, count: int, hit: PrefixHit | None, num_logits: int = 0) -> RequestRows:
    return RequestRows(
        request=0,
        num_computed_tokens=computed,
        query_len=count,
        is_prefilling=True,
        num_logits=num_logits,
        hit=hit,
    )


def planned(rows: RequestRows, size: int, trim: Trim | None = None) -> Step:
    step = RaggedBatch(requests=(rows,))
    steps = assemble_steps([step], LAYOUT)
    partition = make_partition([rows.query_len], [True], size, dual_chunk_swap)
    return plan_all(step, steps.batches[0], partition, steps.cache, trim)
