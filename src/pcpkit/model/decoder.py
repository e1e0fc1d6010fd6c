"""The DeepSeek-V4.1 text model: embedding, decoder layers, head.

A layer is "single-pass" (model-spec section 2.4): each sub-layer is fed with the *previous*
sub-layer's ``pre`` coefficients, so ``pre`` travels with the streams. There is no state besides the
caches: a step reads a plan, writes the caches, returns logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from pcpkit.cache.pool import CachePool
from pcpkit.config import ModelConfig
from pcpkit.kernels.engram import engram_gather, engram_inject, engram_rows
from pcpkit.kernels.hyper_connection import hc_collapse, hc_expand, hc_mix
from pcpkit.kernels.linear import linear_bf16, linear_fp8
from pcpkit.kernels.norm import rms_norm
from pcpkit.model.attention import AttentionStep, Selection, attention_forward, pick_selection
from pcpkit.model.engram_tables import EngramHash
from pcpkit.model.moe import moe_forward
from pcpkit.model.observe import Observer, ignore, prefixed
from pcpkit.model.rope import rope_table
from pcpkit.model.weights import EngramWeights, HyperWeights, ModelWeights
from pcpkit.parallel.groups import Groups, single_rank
from pcpkit.parallel.pcp import gather_rows
from pcpkit.parallel.tp import Reduce, gather_columns, lookup_rows, sum_exclusive
from pcpkit.plan.step import LogitsRows, StepPlan

Numerics = Literal["released", "weight_only"]
"""``released``: activations quantized as the release does. ``weight_only``: BF16 activations."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residual:
    """The residual state between layers."""

    streams: Tensor
    """``(num_rows, hc_mult, hidden)`` bf16."""
    pre: Tensor
    """``(num_rows, hc_mult)`` fp32, collapse coefficients of the next sub-layer's input."""

    def pick(self, rows: Tensor) -> Residual:
        """Of some rows."""
        return Residual(streams=self.streams[rows], pre=self.pre[rows])


class TextModel:
    """The target model of one rank.

    Args:
        config: the model.
        weights: this rank's weights.
        engram: hash constants; ``None`` for a model without Engram layers.
        max_model_len: longest request in tokens (length of the rotary tables).
        numerics: see :data:`Numerics`.
        groups: the ranks this one works with; default alone.
        reduce: how sums over ranks are taken: ``ordered`` gives the same bits on any number of
            ranks, ``fast`` leaves the order to the backend.

    Raises:
        ValueError: unknown numerics, a length beyond the config's maximum, or Engram layers without
            hash constants.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        engram: EngramHash | None,
        *,
        max_model_len: int,
        numerics: Numerics = "released",
        groups: Groups | None = None,
        reduce: Reduce = "fast",
    ) -> None:
        """See the class."""
        if numerics not in get_args(Numerics):
            raise ValueError(f"numerics expected one of {get_args(Numerics)}, got {numerics!r}")
        if not 0 < max_model_len <= config.max_position_embeddings:
            raise ValueError(
                f"max_model_len expected 1 .. {config.max_position_embeddings}, got "
                f"{max_model_len}; shorten the requests"
            )
        if config.engram_layer_ids and engram is None:
            raise ValueError(
                "engram expected hash constants for a model with Engram layers, got None; load "
                "the checkpoint's token map"
            )
        device = weights.norm.device
        self.config = config
        self.weights = weights
        self.max_model_len = max_model_len
        self.numerics: Numerics = numerics
        self.groups = single_rank() if groups is None else groups
        self.reduce: Reduce = reduce
        self._table_heights = dict(
            zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
        )
        self._engram = None if engram is None else _on_device(engram, device)
        self._plain_rope = rope_table(config, compressed=False, num_positions=max_model_len).to(
            device
        )
        self._compressed_rope = rope_table(config, compressed=True, num_positions=max_model_len).to(
            device
        )

    @property
    def device(self) -> torch.device:
        """Where weights and caches live."""
        return self.weights.norm.device

    @torch.inference_mode()
    def forward(self, plan: StepPlan, pool: CachePool, observe: Observer = ignore) -> Tensor:
        """Run one step.

        Args:
            plan: of the step, on the model's device.
            pool: the caches, mutated.
            observe: sees intermediate tensors as ``layer3.attn_in`` and so on.

        Returns:
            ``(num_logits, vocab_size)`` fp32 on every rank, wanted rows in batch order.
        """
        step = self.attention_step(plan, pool)
        table_rows = self.engram_rows(plan)
        residual = self.embed(plan.token_ids)
        selection: Selection | None = None
        below = plan.layer_rows(0)
        for layer in range(self.config.num_hidden_layers):
            rows = plan.layer_rows(layer)
            if rows.num_padded_rows == 0:
                # No rank has rows here or above: all of them stop alike.
                break
            if rows is not below and rows.kept is not None:
                residual, selection = residual.pick(rows.kept), pick_selection(selection, rows.kept)
                table_rows = None if table_rows is None else table_rows[rows.kept]
            below = rows
            residual, selection = self.layer_forward(
                step, layer, residual, selection, table_rows, prefixed(observe, f"layer{layer}")
            )
        return self.head(residual, plan.logits)

    def attention_step(self, plan: StepPlan, pool: CachePool) -> AttentionStep:
        """What the layers of one step share."""
        return AttentionStep(
            config=self.config,
            plan=plan,
            pool=pool,
            plain_rope=self._plain_rope,
            compressed_rope=self._compressed_rope,
            quantize=self.numerics == "released",
            groups=self.groups,
            reduce=self.reduce,
        )

    def engram_rows(self, plan: StepPlan) -> Tensor | None:
        """Table rows ``(num_rows, engram layers, columns)`` int64, ``None`` without Engram."""
        if self._engram is None:
            return None
        tables = self._engram
        return engram_rows(
            plan.token_windows,
            tables.token_map,
            tables.multipliers,
            tables.primes,
            tables.offsets,
            tables.pad_id,
        )

    def embed(self, token_ids: Tensor) -> Residual:
        """Streams of fresh rows: copies of the embedding, collapse coefficients ``(1, 0, ..)``."""
        rows = lookup_rows(self.groups.tp, self.weights.embed, token_ids)
        streams = rows[:, None].expand(-1, self.config.hc_mult, -1).contiguous()
        pre = torch.zeros(streams.shape[:2], dtype=torch.float32, device=rows.device)
        pre[:, 0] = 1.0
        return Residual(streams=streams, pre=pre)

    def layer_forward(
        self,
        step: AttentionStep,
        layer: int,
        residual: Residual,
        selection: Selection | None,
        table_rows: Tensor | None,
        observe: Observer = ignore,
    ) -> tuple[Residual, Selection | None]:
        """One decoder layer: Engram (if any), attention, feed-forward.

        Args:
            step: from :meth:`attention_step`.
            layer: layer id.
            residual: state before the layer.
            selection: of the last index source below.
            table_rows: from :meth:`engram_rows`.
            observe: sees this layer's tensors by their short names.
        """
        config, weights = self.config, self.weights.layers[layer]
        streams = residual.streams
        if weights.engram is not None:
            assert table_rows is not None, "an Engram layer has hash constants"
            rows = table_rows[:, config.engram_layer_ids.index(layer)]
            streams = self._inject_engram(layer, weights.engram, streams, rows)
            observe("engram_out", streams)
        pre, post, comb = self._mix(streams, weights.hc_attn)
        observe("hc_attn", torch.cat([pre, post, comb.flatten(1)], dim=1))
        x = rms_norm(hc_collapse(streams, residual.pre), weights.attn_norm, config.rms_norm_eps)
        observe("attn_in", x)
        y, selection = attention_forward(step, layer, weights.attention, x, selection, observe)
        observe("attn_out", y)
        streams = hc_expand(y, streams, post, comb)
        return self._feed_forward(step, layer, streams, pre, observe), selection

    def head(self, residual: Residual, wanted: LogitsRows) -> Tensor:
        """Logits ``(num_logits, vocab_size)`` fp32; only wanted rows travel between ranks."""
        rows = wanted.local_rows
        hidden = hc_collapse(residual.streams[rows], residual.pre[rows])
        normed = rms_norm(hidden, self.weights.norm, self.config.rms_norm_eps)
        gathered = gather_rows(self.groups.pcp, normed, wanted.num_padded)
        hidden = gathered[wanted.restore_index]
        return gather_columns(self.groups.tp, linear_bf16(hidden, self.weights.head, torch.float32))

    def _feed_forward(
        self,
        step: AttentionStep,
        layer: int,
        streams: Tensor,
        attn_pre: Tensor,
        observe: Observer,
    ) -> Residual:
        weights = self.weights.layers[layer]
        pre, post, comb = self._mix(streams, weights.hc_ffn)
        observe("hc_ffn", torch.cat([pre, post, comb.flatten(1)], dim=1))
        x = rms_norm(hc_collapse(streams, attn_pre), weights.ffn_norm, self.config.rms_norm_eps)
        observe("ffn_in", x)
        y = moe_forward(
            self.config,
            weights.moe,
            x,
            rows=step.plan.layer_rows(layer),
            groups=self.groups,
            reduce=self.reduce,
            quantize=step.quantize,
            observe=observe,
        )
        observe("ffn_out", y)
        streams = hc_expand(y, streams, post, comb)
        observe("resid", streams)
        observe("pre", pre)
        return Residual(streams=streams, pre=pre)

    def _mix(self, streams: Tensor, weights: HyperWeights) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        return hc_mix(
            streams,
            weights.fn,
            weights.base,
            weights.scale,
            config.hc_sinkhorn_iters,
            config.hc_eps,
            config.rms_norm_eps,
        )

    def _inject_engram(
        self, layer: int, weights: EngramWeights, streams: Tensor, rows: Tensor
    ) -> Tensor:
        # Ranks hold consecutive blocks of ceil(rows / size); a row outside reads as zeros.
        tp, height = self.groups.tp, self._table_heights[layer]
        local_rows = rows - tp.rank * -(-height // tp.size)
        looked_up = engram_gather(local_rows, weights.table.weight, weights.table.scale)
        looked_up = sum_exclusive(tp, looked_up)
        quantize = self.numerics == "released"
        key_value = linear_fp8(looked_up, weights.wkv.weight, weights.wkv.scale, quantize)
        return engram_inject(
            streams, key_value, weights.q_weight, weights.k_weight, self.config.rms_norm_eps
        )


def _on_device(tables: EngramHash, device: torch.device) -> EngramHash:
    return replace(
        tables,
        primes=tables.primes.to(device),
        multipliers=tables.multipliers.to(device),
        offsets=tables.offsets.to(device),
        token_map=tables.token_map.to(device),
    )
