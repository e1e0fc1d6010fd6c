"""Weights of one rank as typed records, filled from a stream of named checkpoint tensors.

Names and shapes are those of model-spec section 9. Quantized weights stay as raw bytes; routed
experts are stacked into one tensor a projection while they stream in, so loading never holds a
second copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from pcpkit.config import ModelConfig
from pcpkit.model.checkpoint import pin_engram_table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp8Weight:
    """E4M3 bytes ``(out, in)`` with one E8M0 byte per 32 x 32 block."""

    weight: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp4Experts:
    """Stacked experts: packed E2M1 ``(experts, out, in / 2)``, E8M0 ``(experts, out, in / 32)``."""

    weight: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HyperWeights:
    """One mHC site, all FP32."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompressorWeights:
    """Compressor and index-key projection of a KV source; ``wgate`` only at ratio 2."""

    wkv: Tensor
    wgate: Tensor | None
    norm: Tensor
    index_wk: Tensor
    index_k_norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexerWeights:
    """Index queries of an index source, replicated over tensor-parallel ranks."""

    wq_b: Fp8Weight
    weights_proj: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionWeights:
    """Attention of one layer; ``compressor`` at KV sources, ``indexer`` at index sources."""

    sink: Tensor
    wq_a: Fp8Weight
    q_norm: Tensor
    wq_b: Fp8Weight
    wkv: Fp8Weight
    kv_norm: Tensor
    wo_a: Fp8Weight
    wo_b: Fp8Weight
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoeWeights:
    """Router, this rank's routed experts (from global id ``first_expert``) and shared expert."""

    gate: Tensor
    gate_bias: Tensor
    first_expert: int
    w1: Fp4Experts
    w3: Fp4Experts
    w2: Fp4Experts
    shared_w1: Fp8Weight
    shared_w3: Fp8Weight
    shared_w2: Fp8Weight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngramWeights:
    """Engram of one layer; the table may be memory-mapped or pinned host memory."""

    table: Fp8Weight
    wkv: Fp8Weight
    q_weight: Tensor
    k_weight: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One decoder layer."""

    hc_attn: HyperWeights
    hc_ffn: HyperWeights
    attn_norm: Tensor
    ffn_norm: Tensor
    attention: AttentionWeights
    moe: MoeWeights
    engram: EngramWeights | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelWeights:
    """The target model on one rank."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, memory-mapped tables included."""
        return _num_bytes(self)


def _num_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(_num_bytes(item) for item in value)
    if not is_dataclass(value):
        return 0
    return sum(_num_bytes(getattr(value, field.name)) for field in fields(value))


def load_weights(
    config: ModelConfig,
    stream: Iterable[tuple[str, Tensor]],
    *,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    device: torch.device | str = "cpu",
    offload_engram: bool = True,
) -> ModelWeights:
    """Fill the weights of one rank.

    Args:
        config: the model.
        stream: ``CheckpointReader.stream(..)``: rank-local tensors in any order.
        first_expert: global id of this rank's first routed expert.
        num_local_experts: routed experts of this rank; default all.
        device: target of every tensor except, with ``offload_engram``, the Engram tables.
        offload_engram: keep Engram tables on the host: as they come (memory-mapped) for a CPU,
            copied to page-locked memory for a GPU, which reads rows from there.

    Raises:
        ValueError: a tensor the model needs did not arrive.
    """
    count = config.n_routed_experts if num_local_experts is None else num_local_experts
    tensors: dict[str, Tensor] = {}
    for name, tensor in stream:
        if ".ffn.experts." in name:
            _stack_expert(tensors, name, tensor, first_expert, count, device)
        elif ".engram.embed." in name:
            tensors[name] = _place_table(tensor, torch.device(device), offload_engram)
        else:
            tensors[name] = tensor.to(device)
    take = _Tensors(tensors)
    layers = tuple(
        _layer(config, layer, take, first_expert) for layer in range(config.num_hidden_layers)
    )
    return ModelWeights(
        embed=take["embed.weight"],
        layers=layers,
        norm=take["norm.weight"],
        head=take["head.weight"],
    )


def _stack_expert(
    tensors: dict[str, Tensor],
    name: str,
    tensor: Tensor,
    first_expert: int,
    count: int,
    device: torch.device | str,
) -> None:
    """Copy ``L.ffn.experts.E.wN.kind`` into row ``E`` of the stacked ``L.ffn.experts.wN.kind``."""
    head, tail = name.split(".experts.", 1)
    expert, rest = tail.split(".", 1)
    stacked = f"{head}.experts.{rest}"
    if stacked not in tensors:
        tensors[stacked] = torch.empty((count, *tensor.shape), dtype=tensor.dtype, device=device)
    tensors[stacked][int(expert) - first_expert].copy_(tensor)


def _place_table(table: Tensor, device: torch.device, offload: bool) -> Tensor:
    if device.type == "cpu":
        return table
    return pin_engram_table(table) if offload else table.to(device)


class _Tensors:
    """Lookup by released name with an error that says what is missing."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise ValueError(f"{name} expected in the checkpoint stream, got nothing") from None

    def fp8(self, prefix: str) -> Fp8Weight:
        return Fp8Weight(weight=self[f"{prefix}.weight"], scale=self[f"{prefix}.scale"])

    def fp4(self, prefix: str) -> Fp4Experts:
        return Fp4Experts(weight=self[f"{prefix}.weight"], scale=self[f"{prefix}.scale"])

    def hyper(self, prefix: str) -> HyperWeights:
        return HyperWeights(
            fn=self[f"{prefix}_fn"], base=self[f"{prefix}_base"], scale=self[f"{prefix}_scale"]
        )


def _layer(config: ModelConfig, layer: int, take: _Tensors, first_expert: int) -> LayerWeights:
    prefix = f"layers.{layer}"
    engram = None
    if config.has_engram(layer):
        engram = EngramWeights(
            table=take.fp8(f"{prefix}.engram.embed"),
            wkv=take.fp8(f"{prefix}.engram.wkv"),
            q_weight=take[f"{prefix}.engram.q_weight"],
            k_weight=take[f"{prefix}.engram.k_weight"],
        )
    return LayerWeights(
        hc_attn=take.hyper(f"{prefix}.hc_attn"),
        hc_ffn=take.hyper(f"{prefix}.hc_ffn"),
        attn_norm=take[f"{prefix}.attn_norm.weight"],
        ffn_norm=take[f"{prefix}.ffn_norm.weight"],
        attention=_attention(config, layer, take),
        moe=_moe(f"{prefix}.ffn", take, first_expert),
        engram=engram,
    )


def _attention(config: ModelConfig, layer: int, take: _Tensors) -> AttentionWeights:
    prefix = f"layers.{layer}.attn"
    compressor, indexer = None, None
    if config.is_kv_source(layer):
        gated = config.compress_ratio(layer) == 2
        compressor = CompressorWeights(
            wkv=take[f"{prefix}.compressor.wkv.weight"],
            wgate=take[f"{prefix}.compressor.wgate.weight"] if gated else None,
            norm=take[f"{prefix}.compressor.norm.weight"],
            index_wk=take[f"{prefix}.indexer.wk.weight"],
            index_k_norm=take[f"{prefix}.indexer.k_norm.weight"],
        )
    if config.is_index_source(layer):
        indexer = IndexerWeights(
            wq_b=take.fp8(f"{prefix}.indexer.wq_b"),
            weights_proj=take[f"{prefix}.indexer.weights_proj.weight"],
        )
    return AttentionWeights(
        sink=take[f"{prefix}.attn_sink"],
        wq_a=take.fp8(f"{prefix}.wq_a"),
        q_norm=take[f"{prefix}.q_norm.weight"],
        wq_b=take.fp8(f"{prefix}.wq_b"),
        wkv=take.fp8(f"{prefix}.wkv"),
        kv_norm=take[f"{prefix}.kv_norm.weight"],
        wo_a=take.fp8(f"{prefix}.wo_a"),
        wo_b=take.fp8(f"{prefix}.wo_b"),
        compressor=compressor,
        indexer=indexer,
    )


def _moe(prefix: str, take: _Tensors, first_expert: int) -> MoeWeights:
    return MoeWeights(
        gate=take[f"{prefix}.gate.weight"],
        gate_bias=take[f"{prefix}.gate.bias"],
        first_expert=first_expert,
        w1=take.fp4(f"{prefix}.experts.w1"),
        w3=take.fp4(f"{prefix}.experts.w3"),
        w2=take.fp4(f"{prefix}.experts.w2"),
        shared_w1=take.fp8(f"{prefix}.shared_experts.w1"),
        shared_w3=take.fp8(f"{prefix}.shared_experts.w3"),
        shared_w2=take.fp8(f"{prefix}.shared_experts.w2"),
    )
