"""The golden check has teeth: each known way to get the model subtly wrong makes it fail.

Most mistakes are rows of the table in tests/data/golden/README.md section 5. One is planted at a
time, as small as it can be, then every layer runs on golden inputs and check_golden.py judges, as
in test_golden.py. `shows_in` names a tensor that must fail, so that a mistake cannot count as
found because something else broke.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pcpkit import formats
from pcpkit.cache import pool as cache_pool
from pcpkit.formats import RECORD_FORMATS
from pcpkit.kernels import cache_write, sparse_mla
from pcpkit.kernels.experts import swiglu
from pcpkit.kernels.norm import rms_norm
from pcpkit.model import attention, decoder, moe
from pcpkit.model.attention import AttentionStep
from pcpkit.model.weights import LayerWeights
from pcpkit.plan.rows import LayerRows
from pcpkit.plan.step import StepPlan

from . import golden
from .golden import (
    Case,
    GoldenDir,
    Profile,
    check_decode_selections,
    check_layers,
    load_case,
    prefill_and_decode,
)

Plant = Callable[[pytest.MonkeyPatch, Case], Case]

HEAD_DIM = 128
PROMPT = 1  # the shortest with dropped positions, dropped blocks and a full window


@pytest.fixture(scope="module")
def case(golden_dir: GoldenDir) -> Case:
    return load_case(golden_dir("tiny-main"))


# --- how to plant -------------------------------------------------------------------------------


def configured(**changes: Any) -> Plant:
    """Another value in config.json."""

    def plant(_: pytest.MonkeyPatch, case: Case) -> Case:
        checkpoint = replace(case.checkpoint, config=replace(case.config, **changes))
        return replace(case, checkpoint=checkpoint)

    return plant


def instead(module: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Another function in place of `module.name`, made from it."""

    def plant(patch: pytest.MonkeyPatch, case: Case) -> Case:
        patch.setattr(module, name, make(getattr(module, name)))
        return case

    return plant


def own_pre_mix(patch: pytest.MonkeyPatch, case: Case) -> Case:
    mixes: list[Tensor] = []
    mix, collapse = decoder.hc_mix, decoder.hc_collapse

    def remember(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, comb = mix(*args)
        mixes.append(pre)
        return pre, post, comb

    patch.setattr(decoder, "hc_mix", remember)
    patch.setattr(decoder, "hc_collapse", lambda streams, _: collapse(streams, mixes[-1]))
    return case


def pow2_floor(value: Tensor) -> Tensor:
    return torch.exp2(value.double().log2().floor()).float()


def unquantized_window(patch: pytest.MonkeyPatch, case: Case) -> Case:
    class Raw:
        """A window record that is the BF16 row itself."""

        def record_bytes(self, dim: int) -> int:
            return 2 * dim

        def encode(self, x: Tensor) -> Tensor:
            return x.bfloat16().contiguous().view(torch.uint8)

        def decode(self, records: Tensor) -> Tensor:
            return records.contiguous().view(torch.bfloat16)

    for module in (cache_pool, cache_write, sparse_mla, golden):
        patch.setattr(module, "RECORD_FORMATS", {**RECORD_FORMATS, "mxfp8": Raw()})
    return case


def fp8_compressed(patch: pytest.MonkeyPatch, case: Case) -> Case:
    patch.setattr(golden, "CACHE", replace(golden.CACHE, compressed_format="mxfp8"))
    stored = {
        f"{name}_record": RECORD_FORMATS["mxfp8"].encode(values)
        for name, values in case.inputs.items()
        if name.endswith(".compressed")
    }
    return replace(case, inputs=case.inputs | stored)


def weight_after_down(routed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def late(x: Tensor, ids: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        total = torch.zeros(x.shape)
        for column in range(ids.shape[1]):
            one = ids[:, column : column + 1].contiguous()
            total += weights[:, column, None] * routed(x, one, torch.ones(one.shape), *rest)
        return total

    return late


def raw_pad(_: pytest.MonkeyPatch, case: Case) -> Case:
    engram = case.checkpoint.engram
    assert engram is not None
    assert engram.pad_id != case.config.engram_pad_token_id, "the case cannot tell them apart"
    wrong = replace(engram, pad_id=case.config.engram_pad_token_id)
    return replace(case, checkpoint=replace(case.checkpoint, engram=wrong))


def without_sink(_: pytest.MonkeyPatch, case: Case) -> Case:
    def drained(layer: LayerWeights) -> LayerWeights:
        sink = torch.full_like(layer.attention.sink, float("-inf"))
        return replace(layer, attention=replace(layer.attention, sink=sink))

    weights = case.checkpoint.weights
    weights = replace(weights, layers=tuple(map(drained, weights.layers)))
    return replace(case, checkpoint=replace(case.checkpoint, weights=weights))


def without_yarn(patch: pytest.MonkeyPatch, case: Case) -> Case:
    return configured(rope_scaling=replace(case.config.rope_scaling, factor=1.0))(patch, case)


def one_table(compressed: bool) -> Callable[[Any], Any]:
    def rope(step: AttentionStep, layer: int) -> Tensor:
        return step.compressed_rope if compressed else step.plain_rope

    return lambda _: rope


def rope_at_last_token(plan_step: Callable[..., StepPlan]) -> Callable[..., StepPlan]:
    def moved(*args: Any, **kwargs: Any) -> StepPlan:
        plan = plan_step(*args, **kwargs)
        (rows,) = plan.layers
        groups = {
            ratio: replace(group, positions=group.positions + ratio - 1)
            for ratio, group in rows.groups.items()
        }
        return replace(plan, layers=(replace(rows, groups=groups),))

    return moved


def weight_only(_: pytest.MonkeyPatch, case: Case) -> Case:
    return replace(case, checkpoint=replace(case.checkpoint, numerics="weight_only"))


def ignoring_candidates(scores: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: scores(*args[:7])


def unpinned(blocks: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Scores of invisible positions are -inf already: the count only serves to pin the newest block.
    return lambda scores, visible, *sizes: blocks(scores, torch.zeros_like(visible), *sizes)


def without_duplicates(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def once(query: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        selection, window = rest[6], rest[9]
        inside = selection > positions[:, None] - window
        return attend(query, positions, *rest[:6], selection.masked_fill(inside, -1), *rest[7:])

    return once


def unrounded_collapse(_: object) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda streams, pre: (pre[:, :, None] * streams.float()).sum(1)


def unrounded_pool(_: object) -> Callable[..., Tensor]:
    def close(rows: Tensor, *rest: Any) -> Tensor:
        _gathered, _ring, closing, predecessors, weight, eps, *_open = rest
        # A prompt in one step: every predecessor is a row of the batch, and the ring is not read.
        pair = torch.stack([rows[predecessors], rows[closing]])
        value, gate = pair.chunk(2, dim=-1)
        return rms_norm((gate.softmax(0) * value).sum(0), weight, eps)

    return close


def scale_rounded_up(encode: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def up(x: Tensor) -> Tensor:
        codes = encode(x)
        if x.shape[-1] != HEAD_DIM // formats.COMPRESSED_GROUP:
            return codes  # codes of a window row, not scales of a compressed one
        return torch.where(formats.e4m3_decode(codes) < x, codes + 1, codes)

    return up


# --- the mistakes -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    name: str
    plant: Plant
    shows_in: str
    profile: Profile


def mistake(name: str, shows_in: str, plant: Plant, *, profile: Profile = "layerwise") -> Mistake:
    return Mistake(name=name, plant=plant, shows_in=shows_in, profile=profile)


MISTAKES = [
    mistake("own pre-mix instead of lagged", r"\.attn_out$", own_pre_mix),
    mistake(
        "comb transposed",
        r"\.resid$",
        instead(
            decoder,
            "hc_expand",
            lambda f: lambda y, x, post, comb: f(y, x, post, comb.mT.contiguous()),
        ),
    ),
    mistake("sinkhorn 1 iteration", r"\.resid$", configured(hc_sinkhorn_iters=1)),
    mistake(
        "E8M0 floor instead of ceil",
        r"\.window$",
        instead(formats, "pow2ceil", lambda _: pow2_floor),
    ),
    mistake("window KV not quantised", r"\.attn_out$", unquantized_window),
    mistake("compressed KV as FP8/32", r"\.compressed$", fp8_compressed),
    mistake(
        "routing weight after w2",
        r"\.resid$",
        instead(moe, "routed_experts", weight_after_down),
        profile="exact",
    ),
    mistake("engram pad = raw id 2", r"layer1\.resid$", raw_pad),
    mistake("no sink", r"\.attn_out$", without_sink),
    mistake(
        "no inverse RoPE",
        r"\.attn_out$",
        instead(
            attention,
            "apply_rope",
            lambda f: lambda x, at, table, inverse=False: x if inverse else f(x, at, table),
        ),
    ),
    mistake("no YaRN", r"layer2\.attn_out$", without_yarn),
    mistake(
        "compress_rope_theta 10000", r"layer2\.compressed$", configured(compress_rope_theta=1e4)
    ),
    mistake(
        "compressed RoPE table in window-only layers",
        r"layer0\.attn_out$",
        instead(AttentionStep, "rope", one_table(compressed=True)),
    ),
    mistake(
        "plain RoPE table in compressed layers",
        r"layer3\.attn_out$",
        instead(AttentionStep, "rope", one_table(compressed=False)),
    ),
    mistake("window 1 shorter", r"layer0\.attn_out$", configured(sliding_window=15)),
    mistake("window 1 longer", r"layer0\.attn_out$", configured(sliding_window=17)),
    mistake(
        "newest group invisible",
        r"layer2\.topk$",
        instead(
            LayerRows,
            "num_visible",
            lambda f: lambda rows, ratio: (f(rows, ratio) - 1).clamp(min=0),
        ),
    ),
    mistake(
        "candidate pool ignored by reindex",
        r"layer8\.topk$",
        instead(attention, "index_scores", ignoring_candidates),
    ),
    mistake(
        "newest block not pinned",
        r"layer6\.candidate_blocks$",
        instead(attention, "candidate_blocks", unpinned),
    ),
    mistake(
        "compressed RoPE at last token",
        r"layer2\.compressed$",
        instead(golden, "next_plan", rope_at_last_token),
    ),
    mistake("eps 1e-6", r"\.compressed$", configured(rms_norm_eps=1e-6)),
    mistake("route scale 1", r"\.resid$", configured(routed_scaling_factor=1.0)),
    mistake("index_topk - 1", r"layer2\.topk$", configured(index_topk=15)),
    mistake("activations not quantised", r"\.attn_out$", weight_only),
    mistake(
        "token in window and selection counted once",
        r"layer7\.attn_out$",
        instead(attention, "sparse_mla", without_duplicates),
    ),
    mistake(
        "scale of FP4 rows rounded up",
        r"\.compressed$",
        instead(formats, "e4m3_encode", scale_rounded_up),
    ),
    mistake(
        "collapse not rounded before the norm",
        r"\.window$",
        instead(decoder, "hc_collapse", unrounded_collapse),
    ),
    mistake(
        "pooled pair not rounded before the norm",
        r"\.compressed$",
        instead(attention, "close_and_write_ring", unrounded_pool),
    ),
]


@pytest.mark.parametrize("profile", ["layerwise", "exact"])
def test_nothing_fails_without_a_mistake(case: Case, profile: Profile, tmp_path: Path) -> None:
    assert check_layers(case, PROMPT, profile, tmp_path) == ()


@pytest.mark.parametrize("planted", MISTAKES, ids=lambda planted: planted.name)
def test_mistake_is_found(
    planted: Mistake, case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = check_layers(planted.plant(monkeypatch, case), PROMPT, planted.profile, tmp_path)
    assert any(re.search(planted.shows_in, name) for name in failed), failed


def test_literal_decode_is_found(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A ratio-2 source with an open pair scores the keys last published, those of the last source.

    The end-to-end limits have to leave room for noise, so the mistake shows only in the exact check
    of these sources' selections.
    """
    select, ratio1_source = attention._select, case.config.kv_source_layer_ids[-1]

    def literal(step: AttentionStep, layer: int, *rest: Any) -> attention.Selection:
        position = int(step.plan.layer_rows(layer).positions[-1])
        if layer in case.config.ratio2_sources and step.plan.num_rows == 1 and position % 2 == 0:
            keys = step.pool.index_keys
            published = {**keys, layer: keys[ratio1_source]}
            step = replace(step, pool=replace(step.pool, index_keys=published))
        return select(step, layer, *rest)

    tensors = prefill_and_decode(case, PROMPT)
    assert check_decode_selections(case, PROMPT, tensors, tmp_path) == ()
    monkeypatch.setattr(attention, "_select", literal)
    tensors = prefill_and_decode(case, PROMPT)
    assert check_decode_selections(case, PROMPT, tensors, tmp_path)


def test_gate_is_clamped_from_above_only() -> None:
    """The golden vectors are almost blind to this one: their gates are rarely below -10."""
    gate = torch.tensor([[-30.0, -12.0, 12.0, 30.0]], dtype=torch.bfloat16)
    found = swiglu(gate, torch.ones_like(gate), limit=10.0)
    kept = gate.double().clamp(max=10.0)
    assert torch.equal(found, (kept * kept.sigmoid()).bfloat16())
    both = gate.double().clamp(-10.0, 10.0)
    assert not torch.equal(found, (both * both.sigmoid()).bfloat16()), "the inputs cannot tell"
