"""The collectives that a step will make, from its plan alone.

A forward has no data-dependent control flow: which collectives a rank makes, in which order and of
which shapes, follows from the configuration and a few sizes of the plan. Metadata needs none, so
the list below is all there is (pcp-spec section 2.3 and appendix D).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pcpkit.cache.pool import INDEX_RECORD, WINDOW_RECORD
from pcpkit.config import ModelConfig, ParallelConfig
from pcpkit.formats import RECORD_FORMATS
from pcpkit.parallel.tp import Reduce
from pcpkit.parallel.trace import Call
from pcpkit.plan.rows import LayerRows
from pcpkit.plan.step import StepPlan

_ITEM = torch.int32.itemsize
"""Bytes of the integers as which exact sums travel."""


def expected_trace(
    config: ModelConfig,
    parallel: ParallelConfig,
    plan: StepPlan,
    *,
    compressed_record: str,
    reduce: Reduce,
) -> list[Call]:
    """Every collective of one forward on the rank of ``plan``, in order.

    Args:
        config: the model.
        parallel: sizes of the groups.
        plan: the rank's plan of the step.
        compressed_record: record of the compressed KV, see ``CachePool``.
        reduce: as of the model.

    Returns:
        The calls on groups of more than one rank. PCP calls are the same on all ranks, TP calls on
        the ranks of a TP group, whose rows are the same.

    Example:
        The released 40 layers on 2 PCP ranks with expert parallelism: 40 gathers of window records,
        3 of last rows, 4 of source records, 40 of routed rows, 40 reduce-scatters of expert
        outputs, 1 gather of the rows that need logits.
    """
    calls = _Step(config, parallel, plan, compressed_record, reduce).calls()
    sizes = {"tp": parallel.tp_size, "pcp": parallel.pcp_size}
    return [call for call in calls if sizes[call.group] > 1]


class _Step:
    """The arguments of :func:`expected_trace`."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelConfig,
        plan: StepPlan,
        compressed_record: str,
        reduce: Reduce,
    ) -> None:
        self._config = config
        self._parallel = parallel
        self._plan = plan
        self._compressed_record = compressed_record
        self._reduce: Reduce = reduce

    def calls(self) -> Iterator[Call]:
        """All calls, also those on groups of one rank."""
        config, plan = self._config, self._plan
        yield self._exact_sum(plan.num_rows, config.hidden_size)
        for layer in range(config.num_hidden_layers):
            rows = plan.layer_rows(layer)
            if rows.num_padded_rows == 0:
                break
            yield from self._layer(layer, rows)
        logits = plan.logits
        yield _call("pcp", "all_gather", logits.num_padded, config.hidden_size)
        columns = config.vocab_size // self._parallel.tp_size
        wanted = logits.restore_index.shape[0]
        yield _call("tp", "all_gather", wanted, columns, dtype=torch.float32)

    def _layer(self, layer: int, rows: LayerRows) -> Iterator[Call]:
        config = self._config
        if config.has_engram(layer):
            columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
            yield self._exact_sum(rows.num_rows, columns * config.engram_head_dim)
        window = RECORD_FORMATS[WINDOW_RECORD].record_bytes(config.head_dim)
        yield _call("pcp", "all_gather", rows.num_padded_rows, window, dtype=torch.uint8)
        if config.is_kv_source(layer):
            yield from self._source(config.compress_ratio(layer), rows)
        yield self._output_projection(rows.num_rows)
        if self._parallel.ep_size > 1:
            yield from self._experts(rows)

    def _source(self, ratio: int, rows: LayerRows) -> Iterator[Call]:
        config = self._config
        if ratio == 2:
            segments = rows.links.last_rows.shape[0]
            raw_row = 2 * config.head_dim
            yield _call("pcp", "all_gather", segments, raw_row, dtype=torch.float32)
        compressed = RECORD_FORMATS[self._compressed_record].record_bytes(config.head_dim)
        index = RECORD_FORMATS[INDEX_RECORD].record_bytes(config.index_head_dim)
        groups = rows.groups[ratio].num_padded
        yield _call("pcp", "all_gather", groups, compressed + index, dtype=torch.uint8)

    def _output_projection(self, num_rows: int) -> Call:
        config = self._config
        if self._reduce == "fast":
            return _call("tp", "all_reduce", num_rows, config.hidden_size, dtype=torch.float32)
        groups = config.o_groups // self._parallel.tp_size
        return _call("tp", "all_gather", num_rows, groups, config.hidden_size, dtype=torch.float32)

    def _experts(self, rows: LayerRows) -> Iterator[Call]:
        config, ranks = self._config, self._parallel.pcp_size
        hidden, top_k = config.hidden_size, config.num_experts_per_tok
        row = hidden * torch.bfloat16.itemsize + 2 * top_k * _ITEM
        padded = rows.num_padded_rows
        yield _call("pcp", "all_gather", padded, row, dtype=torch.uint8)
        if self._reduce == "fast":
            yield _call("pcp", "reduce_scatter", ranks, padded, hidden, dtype=torch.float32)
            yield _call("tp", "all_reduce", rows.num_rows, hidden, dtype=torch.float32)
            return
        words = hidden * torch.bfloat16.itemsize // _ITEM
        yield _call("pcp", "reduce_scatter", ranks, padded, top_k, words, dtype=torch.int32)
        yield _call("tp", "all_reduce", rows.num_rows, top_k, words, dtype=torch.int32)

    def _exact_sum(self, num_rows: int, channels: int) -> Call:
        """BF16 rows of which each rank holds some, added as integers."""
        words = channels * torch.bfloat16.itemsize // _ITEM
        return _call("tp", "all_reduce", num_rows, words, dtype=torch.int32)


def _call(group: str, op: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    return Call(group, op, shape, dtype)
