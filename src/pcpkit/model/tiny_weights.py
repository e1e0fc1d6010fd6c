"""Random weights for the tiny checkpoints: which numbers, and their FP8 / FP4 form.

Weights are integer draws turned into floats by correctly rounded operations only, so that a seed
gives the same bytes on every CPU (torch's own normal draws depend on the CPU's vector width). A GPU
draws other integers, of the same distribution.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod, sqrt
from typing import Final

import torch
from torch import Tensor

from pcpkit.formats import (
    E2M1_MAX,
    E4M3_MAX,
    WEIGHT_BLOCK,
    e2m1_encode,
    e4m3_encode,
    e8m0_encode,
    pack_e2m1,
    pow2ceil,
)
from pcpkit.model.checkpoint_schema import TensorSpec

_TORCH_DTYPES: Final = {"BF16": torch.bfloat16, "F32": torch.float32}
_QUANTIZED: Final = ("F8_E4M3", "I8")

# Every scale block is multiplied by a random one of these, or all scales of a matrix would be one
# number and a wrong scale index would not show. _BLOCK_SPREAD restores the standard deviation.
_BLOCK_FACTORS: Final = (1.0, 0.5, 0.25)
_BLOCK_SPREAD: Final = sqrt(sum(factor**2 for factor in _BLOCK_FACTORS) / len(_BLOCK_FACTORS))

# Sum of four integers uniform on 0..65535: near-normal, symmetric around the mean, exact in FP32.
_DRAW_LEVELS: Final = 1 << 16
_DRAW_TERMS: Final = 4
_DRAW_MEAN: Final = _DRAW_TERMS * (_DRAW_LEVELS - 1) // 2
_DRAW_SPREAD: Final = sqrt(_DRAW_TERMS * (_DRAW_LEVELS**2 - 1) / 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """How to draw a tensor: `mean` + noise of standard deviation `spread`.

    `per_input` divides the spread by sqrt(row length), so it is the gain of the projection.
    `max_shift` > 0 also scales the whole tensor by a random 2^-k, k = 0..max_shift: the projection
    feeds an RMSNorm, where that is an exact no-op for the right eps and an error for a larger one.
    """

    spread: float
    mean: float = 0.0
    per_input: bool = True
    max_shift: int = 0


# The first matching name ending wins. The gains keep the streams near unit size through the depth,
# put a percent of the SwiGLU inputs past its clamp and give logits a standard deviation of 2.
#
# What a sub-layer adds (wo_b, w2) is small against the streams, as in a trained model: 4 to 8 % of
# them. Otherwise one flipped rounding grows until it decides tokens: a near tie at the cut of a
# selection (or of the router) exchanges whole rows, with 6 times these gains in every row of every
# selecting layer. Compressed rows weigh less than the window's for the same reason. Noise of FP32
# roundings now moves the logits by 2 % after 12 layers, where attention makes up 14 % of them, the
# experts 23 % and the Engram tables 52 %.
_DRAWS: Final[tuple[tuple[str, _Draw], ...]] = (
    ("engram.embed.weight", _Draw(spread=1.3, per_input=False)),
    ("engram.wkv.weight", _Draw(spread=0.6)),
    ("engram.q_weight", _Draw(spread=0.3, mean=1.0, per_input=False)),
    ("engram.k_weight", _Draw(spread=0.5, mean=3.0, per_input=False)),
    ("compressor.norm.weight", _Draw(spread=0.12, mean=0.5, per_input=False)),
    ("norm.weight", _Draw(spread=0.2, mean=1.0, per_input=False)),
    ("embed.weight", _Draw(spread=1.0, per_input=False)),
    ("markov_head.head.weight", _Draw(spread=0.5)),
    ("head.weight", _Draw(spread=2.0)),
    ("_fn", _Draw(spread=1.0)),
    ("_base", _Draw(spread=1.5, per_input=False)),
    ("_scale", _Draw(spread=0.1, mean=0.8, per_input=False)),
    ("attn_sink", _Draw(spread=0.8, per_input=False)),
    ("indexer.wq_b.weight", _Draw(spread=1.3)),
    ("indexer.wk.weight", _Draw(spread=1.0, max_shift=12)),
    ("indexer.weights_proj.weight", _Draw(spread=1.0)),
    ("compressor.wkv.weight", _Draw(spread=1.0, max_shift=12)),
    ("compressor.wgate.weight", _Draw(spread=1.5)),
    ("attn.wq_a.weight", _Draw(spread=1.3, max_shift=12)),
    ("attn.wq_b.weight", _Draw(spread=1.5)),
    ("attn.wkv.weight", _Draw(spread=1.3, max_shift=12)),
    ("attn.wo_a.weight", _Draw(spread=2.0)),
    ("attn.wo_b.weight", _Draw(spread=0.06)),
    ("ffn.gate.weight", _Draw(spread=1.5)),
    ("ffn.gate.bias", _Draw(spread=0.2, per_input=False)),
    ("ffn.gate.bias_vl", _Draw(spread=0.2, per_input=False)),
    (".w1.weight", _Draw(spread=4.0)),
    (".w3.weight", _Draw(spread=3.0)),
    (".w2.weight", _Draw(spread=0.006)),
    ("main_proj.weight", _Draw(spread=1.0, max_shift=12)),
    ("confidence_head.proj.weight", _Draw(spread=1.0)),
)


def draw_tensors(specs: Mapping[str, TensorSpec], seed: int) -> dict[str, tuple[Tensor, str]]:
    """Random content for every tensor of `specs`: name -> (CPU tensor, safetensors dtype).

    Every weight has its own generator, seeded by `seed` and its name, so one tensor does not depend
    on which others exist. FP8, FP4 and scale tensors are uint8 bytes.

    Raises:
        ValueError: a tensor for which there is no rule.
    """
    tensors = dict(stream_tensors(specs, seed))
    return {name: (tensors[name], spec.dtype) for name, spec in specs.items()}


def stream_tensors(
    specs: Mapping[str, TensorSpec], seed: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """What `draw_tensors` makes, drawn on `device` one by one: a scale comes after its weight.

    Beside what is yielded it holds about 16 bytes for each channel of one weight.

    Raises:
        ValueError: a tensor for which there is no rule.
    """
    for name, spec in specs.items():
        if name.endswith(".scale"):
            continue  # made with its weight
        generator = torch.Generator(device).manual_seed(_tensor_seed(seed, name))
        draw = _draw_of(name)
        if spec.dtype in _QUANTIZED:
            scale_name = f"{name.removesuffix('.weight')}.scale"
            codes, scale = _draw_quantized(draw, spec, specs[scale_name].shape, generator)
            yield name, codes
            yield scale_name, scale
        else:
            yield name, _draw_values(draw, spec.shape, generator).to(_TORCH_DTYPES[spec.dtype])


def _tensor_seed(seed: int, name: str) -> int:
    # 32 bits, because torch's CPU generator uses no more of a seed.
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "little")


def _draw_of(name: str) -> _Draw:
    for ending, draw in _DRAWS:
        if name.endswith(ending):
            return draw
    raise ValueError(f"name expected a tensor with a drawing rule, got {name}; add one to _DRAWS")


def _draw_values(draw: _Draw, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """fp32 values of a logical (unpacked) shape, on the generator's device."""
    device = generator.device
    total = torch.full((prod(shape),), -_DRAW_MEAN, dtype=torch.int32, device=device)
    for _ in range(_DRAW_TERMS):
        total += torch.randint(
            _DRAW_LEVELS, total.shape, generator=generator, dtype=torch.int32, device=device
        )
    noise = total.to(torch.float32).reshape(shape)
    spread = draw.spread / (sqrt(shape[-1]) if draw.per_input else 1.0)
    values = noise.mul_(spread / _DRAW_SPREAD).add_(draw.mean)
    shift = int(torch.randint(draw.max_shift + 1, (1,), generator=generator, device=device))
    return values.mul_(2.0**-shift)


def _draw_quantized(
    draw: _Draw, spec: TensorSpec, scale_shape: tuple[int, ...], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Codes and E8M0 scales, uint8, of an FP8 (per 32 x 32 or per row) or FP4 (per row) matrix."""
    rows, columns = scale_shape
    height = spec.shape[0] // rows  # 32, or 1 where every row has its own scales
    values = _draw_values(draw, (spec.shape[0], columns * WEIGHT_BLOCK), generator)
    blocks = values.reshape(rows, height, columns, WEIGHT_BLOCK)
    device = generator.device
    choice = torch.randint(
        len(_BLOCK_FACTORS), (rows, 1, columns, 1), generator=generator, device=device
    )
    blocks *= torch.tensor(_BLOCK_FACTORS, device=device)[choice] * (1 / _BLOCK_SPREAD)
    largest = E4M3_MAX if spec.dtype == "F8_E4M3" else E2M1_MAX
    scale = pow2ceil(blocks.abs().amax(3, keepdim=True).amax(1, keepdim=True) * (1 / largest))
    scaled = (blocks / scale).reshape(spec.shape[0], -1)
    codes = e4m3_encode(scaled) if spec.dtype == "F8_E4M3" else pack_e2m1(e2m1_encode(scaled))
    return codes, e8m0_encode(scale).reshape(scale_shape)
