"""CSA2 attention of one layer: window KV, compressor, indexer, sparse attention, output projection.

Order within a layer (model-spec sections 3 and 13): finished records of this rank's rows are
gathered from all PCP ranks and written by every rank before any query of the step reads, and every
read goes through the quantized record, also for rows of this step. KV sources replace the
compressed rows and index keys, index sources the selection, for all layers up to the next source.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pcpkit.cache.pool import INDEX_RECORD, WINDOW_RECORD, CachePool
from pcpkit.config import ModelConfig
from pcpkit.kernels.cache_write import encode_records, scatter_records
from pcpkit.kernels.compressor import close_and_write_ring
from pcpkit.kernels.indexer import candidate_blocks, index_scores
from pcpkit.kernels.linear import (
    linear_bf16,
    linear_fp8,
    linear_fp8_pair,
    linear_fp8_partials,
    linear_grouped,
)
from pcpkit.kernels.norm import rms_norm
from pcpkit.kernels.rope import apply_rope
from pcpkit.kernels.sparse_mla import sparse_mla
from pcpkit.kernels.topk import topk
from pcpkit.model.observe import Observer
from pcpkit.model.weights import AttentionWeights, CompressorWeights, IndexerWeights
from pcpkit.parallel.groups import Groups
from pcpkit.parallel.pcp import gather_rows, pick_rows
from pcpkit.parallel.tp import Reduce, sum_groups
from pcpkit.plan.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """What index sources hand on to later layers of the same step."""

    positions: Tensor
    """``(num_rows, index_topk)`` int32 selected compressed positions, -1 at the tail."""
    candidates: Tensor | None
    """``(num_rows, max_candidates)`` int32 candidate blocks of the candidate source."""


def pick_selection(selection: Selection | None, rows: Tensor) -> Selection | None:
    """The selection of some rows."""
    if selection is None:
        return None
    candidates = None if selection.candidates is None else selection.candidates[rows]
    return Selection(positions=selection.positions[rows], candidates=candidates)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionStep:
    """What all layers of a step share: plan, caches, rotary tables, numerics, ranks."""

    config: ModelConfig
    plan: StepPlan
    pool: CachePool
    plain_rope: Tensor
    compressed_rope: Tensor
    quantize: bool
    groups: Groups
    reduce: Reduce

    def rope(self, layer: int) -> Tensor:
        """The rotary table of a layer."""
        return self.compressed_rope if self.config.compress_ratio(layer) else self.plain_rope


def attention_forward(
    step: AttentionStep,
    layer: int,
    weights: AttentionWeights,
    x: Tensor,
    selection: Selection | None,
    observe: Observer,
) -> tuple[Tensor, Selection | None]:
    """Attention of one layer.

    Args:
        step: the shared state of the step; its caches are mutated.
        layer: layer id.
        weights: of the layer.
        x: ``(num_rows, hidden)`` bf16 after attn_norm.
        selection: of the last index source, ``None`` before the first.
        observe: sees intermediate tensors.

    Returns:
        ``(num_rows, hidden)`` bf16 output and the selection for the following layers.
    """
    config, rows, rope = step.config, step.plan.layer_rows(layer), step.rope(layer)
    wq_a, wkv = weights.wq_a, weights.wkv
    low, window = linear_fp8_pair(x, wq_a.weight, wq_a.scale, wkv.weight, wkv.scale, step.quantize)
    latent = rms_norm(low, weights.q_norm, config.rms_norm_eps)
    observe("q_latent", latent)
    query = linear_fp8(latent, weights.wq_b.weight, weights.wq_b.scale, step.quantize)
    query = apply_rope(query.unflatten(1, (-1, config.head_dim)), rows.positions, rope)
    _write_window(step, layer, weights.kv_norm, window, observe)
    if weights.compressor is not None:
        _write_compressed(step, layer, weights.compressor, x, observe)
    if weights.indexer is not None:
        selection = _select(step, layer, weights.indexer, x, latent, selection, observe)
    attended = _attend(step, layer, weights, query, selection)
    attended = apply_rope(attended, rows.positions, rope, inverse=True)
    return _project_output(step, weights, attended), selection


def _write_window(
    step: AttentionStep, layer: int, norm: Tensor, projected: Tensor, observe: Observer
) -> None:
    config, rows = step.config, step.plan.layer_rows(layer)
    latent = rms_norm(projected, norm, config.rms_norm_eps)
    records = encode_records(latent, rows.positions, step.rope(layer), WINDOW_RECORD)
    observe("window_record", records)
    gathered = gather_rows(step.groups.pcp, records, rows.num_padded_rows)
    scatter_records(gathered, rows.window_slots, step.pool.window[layer])


def _write_compressed(
    step: AttentionStep, layer: int, weights: CompressorWeights, x: Tensor, observe: Observer
) -> None:
    """Finish the groups that close in this step: compressed KV and index keys.

    Both records of a group travel in one gather; rows that close no group do not travel.
    """
    config, pool, rows = step.config, step.pool, step.plan.layer_rows(layer)
    group = rows.groups[config.compress_ratio(layer)]
    if weights.wgate is None:
        if group.closing_rows.shape[0] < rows.num_rows:
            # Replayed rows: their groups are in the cache already.
            x = x[group.closing_rows]
        projected = linear_bf16(x, weights.wkv)
        latent = rms_norm(projected, weights.norm, config.rms_norm_eps)
    else:
        latent = _close_pairs(step, layer, weights, x)
    records = encode_records(latent, group.positions, step.rope(layer), pool.compressed_record)
    observe("compressed_record", records)
    key = rms_norm(linear_bf16(latent, weights.index_wk), weights.index_k_norm, config.rms_norm_eps)
    index_records = encode_records(key, group.positions, step.rope(layer), INDEX_RECORD)
    observe("index_record", index_records)
    gathered = gather_rows(
        step.groups.pcp, torch.cat([records, index_records], dim=1), group.num_padded
    )
    size = records.shape[1]
    scatter_records(gathered[:, :size], group.slots, pool.compressed[layer])
    scatter_records(gathered[:, size:], group.slots, pool.index_keys[layer])


def _close_pairs(step: AttentionStep, layer: int, weights: CompressorWeights, x: Tensor) -> Tensor:
    assert weights.wgate is not None, "only ratio-2 sources have a gate"
    rows_of_layer, ring = step.plan.layer_rows(layer), step.pool.ring[layer]
    links, closing = rows_of_layer.links, rows_of_layer.groups[2].closing_rows
    value = linear_bf16(x, weights.wkv, torch.float32)
    gate = linear_bf16(x, weights.wgate, torch.float32)
    rows = torch.cat([value, gate], dim=1)
    last_rows = pick_rows(rows, links.last_rows)
    exchanged = gather_rows(step.groups.pcp, last_rows, links.last_rows.shape[0])
    # A ring row may be read and then replaced in the same step. Every rank writes the same rows, so
    # any rank may own the request's next token.
    return close_and_write_ring(
        rows,
        exchanged,
        ring,
        closing,
        links.predecessors,
        weights.norm,
        step.config.rms_norm_eps,
        exchanged,
        links.open_rows,
        links.open_slots,
    )


def _select(
    step: AttentionStep,
    layer: int,
    weights: IndexerWeights,
    x: Tensor,
    latent: Tensor,
    previous: Selection | None,
    observe: Observer,
) -> Selection:
    config, rows = step.config, step.plan.layer_rows(layer)
    ratio, source = config.compress_ratio(layer), config.kv_source(layer)
    assert source is not None, "an index source reads the keys of a KV source"
    records = _index_queries(step, layer, weights, latent)
    observe("index_q_record", records)
    # One BF16 rounding, exact when the factor is a power of two as in the release (1/64).
    factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    head_weights = linear_bf16(x, weights.weights_proj) * factor
    num_visible = rows.num_visible(ratio)
    candidates = None if config.is_kv_source(layer) or previous is None else previous.candidates
    scores = index_scores(
        records,
        head_weights,
        step.pool.index_keys[source],
        step.plan.block_table,
        rows.row_request,
        num_visible,
        rows.max_visible(ratio),
        candidates,
        config.candidate_block_size,
    )
    observe("index_scores", scores)
    if layer == config.candidate_source_layer_id:
        candidates = candidate_blocks(
            scores, num_visible, config.candidate_block_size, config.candidate_topk_blocks
        )
        observe("candidate_blocks", candidates)
    positions = topk(scores, num_visible, config.index_topk)
    observe("topk", positions)
    return Selection(positions=positions, candidates=candidates)


def _index_queries(
    step: AttentionStep, layer: int, weights: IndexerWeights, latent: Tensor
) -> Tensor:
    """Quantized rotated index queries, ``(num_rows, index_n_heads, record_bytes)`` uint8."""
    heads = step.config.index_n_heads
    query = linear_fp8(latent, weights.wq_b.weight, weights.wq_b.scale, step.quantize)
    positions = step.plan.layer_rows(layer).positions.repeat_interleave(heads)
    flat = query.unflatten(1, (heads, -1)).flatten(0, 1)
    return encode_records(flat, positions, step.rope(layer), INDEX_RECORD).unflatten(0, (-1, heads))


def _attend(
    step: AttentionStep,
    layer: int,
    weights: AttentionWeights,
    query: Tensor,
    selection: Selection | None,
) -> Tensor:
    config, plan, pool = step.config, step.plan, step.pool
    rows = plan.layer_rows(layer)
    source = config.kv_source(layer)
    if source is None or selection is None:
        # A window-only layer: no compressed rows, so the cache that is passed is never read.
        compressed = next(iter(pool.compressed.values()))[:0]
        positions = rows.row_request.new_empty(rows.num_rows, 0)
    else:
        compressed, positions = pool.compressed[source], selection.positions
    return sparse_mla(
        query,
        rows.positions,
        rows.row_request,
        pool.window[layer],
        plan.window_block_table,
        rows.window_floor,
        compressed,
        plan.block_table,
        positions,
        weights.sink,
        config.head_dim**-0.5,
        config.sliding_window,
        pool.compressed_record,
    )


def _project_output(step: AttentionStep, weights: AttentionWeights, attended: Tensor) -> Tensor:
    """Grouped low-rank projection, groups summed in ascending order (architecture section 3.6)."""
    out_per_group = step.config.o_lora_rank
    groups = weights.wo_a.weight.shape[0] // out_per_group
    grouped = attended.flatten(1).unflatten(1, (groups, -1))
    low = linear_grouped(grouped, weights.wo_a.weight, weights.wo_a.scale).flatten(1)
    weight, scale = weights.wo_b.weight, weights.wo_b.scale
    if step.groups.tp.size == 1:
        return linear_fp8(low, weight, scale, step.quantize, groups)
    partials = linear_fp8_partials(low, weight, scale, step.quantize, groups)
    return sum_groups(step.groups.tp, partials, step.reduce)
