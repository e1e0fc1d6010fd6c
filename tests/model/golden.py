"""The golden cases: run the model the way the vectors were made and let check_golden.py judge.

Names, shapes and meaning of the tensors: tests/data/golden/README.md section 2.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pcpkit.cache.pool import CachePool
from pcpkit.config import CacheConfig, ModelConfig
from pcpkit.formats import RECORD_FORMATS
from pcpkit.kernels.cache_write import scatter_records
from pcpkit.model.attention import Selection
from pcpkit.model.decoder import Residual, TextModel
from pcpkit.plan.step import StepPlan

from .stepping import (
    Checkpoint,
    Request,
    compressed_rows,
    index_rows,
    load_checkpoint,
    next_plan,
    whole_pool,
    window_rows,
)

CACHE = CacheConfig(num_blocks=16, num_window_blocks=32, num_requests=1)
DECODE_STEPS = 12

# The official vectors sum in FP32 in the order of the official kernels; pcpkit sums exactly. The
# caches, selections and sub-layer outputs of the forced layers round to the same bits all the same.
# A sum of streams sometimes does not, and one flipped code before the down projection of an expert
# moves several channels of its row: up to 9 of 48,128 elements are seen.
STREAMS = (".resid", ".ffn_in")
STRAY_ROUNDINGS = 16

GoldenDir = Callable[[str], Path]  # the fixture of conftest.py
Profile = Literal["exact", "layerwise", "e2e"]
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One golden case: its folder, its tensors, and the checkpoint (or a spoilt one).

    `inputs` is `golden` and, for prompts saved without them, the bytes of compressed records.
    """

    folder: Path
    golden: Tensors
    inputs: Tensors
    checkpoint: Checkpoint

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config


def load_case(folder: Path) -> Case:
    golden = load_file(folder / "golden.safetensors")
    return Case(
        folder=folder,
        golden=golden,
        inputs=_with_records(golden),
        checkpoint=load_checkpoint(folder),
    )


def _with_records(golden: Tensors) -> Tensors:
    records: Tensors = {}
    for name, values in golden.items():
        for leaf, record_leaf, record in (
            (".compressed", ".compressed_record", "nvfp4"),
            (".index_k", ".index_record", "mxfp4"),
        ):
            if name.endswith(leaf):
                encoded = RECORD_FORMATS[record].encode(values)
                decoded = RECORD_FORMATS[record].decode(encoded)
                assert torch.equal(decoded, values), f"{name} does not fit its record"
                records[name.removesuffix(leaf) + record_leaf] = encoded
    return records | golden


# --- the judge ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What check_golden.py says: names that failed or are missing, and its whole output."""

    failed: tuple[str, ...]
    num_passed: int
    report: str


def judge(case: Case, tensors: Tensors, profile: Profile, only: str, scratch: Path) -> Verdict:
    """Run the independent checker on every golden tensor whose name matches `only`.

    A golden tensor that `tensors` lacks counts as failed.
    """
    path = scratch / "candidate.safetensors"
    save_file({name: tensors[name].clone() for name in case.golden if name in tensors}, path)
    checker = case.folder.parent / "check_golden.py"
    limits = ["--profile", profile, "--only", only, "--require", ".", "-v"]
    command = [sys.executable, str(checker), str(case.folder), str(path), *limits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    failed = tuple(re.findall(r"^(?:FAIL|SHAPE|MISSING) +(\S+)", done.stdout, re.MULTILINE))
    passed = len(re.findall(r"^ok ", done.stdout, re.MULTILINE))
    assert done.returncode == (1 if failed or not passed else 0), done.stdout + done.stderr
    assert failed or passed, f"no golden tensor of {case.folder.name} matches {only!r}"
    return Verdict(failed=failed, num_passed=passed, report=done.stdout)


def check_layers(case: Case, prompt: int, profile: Profile, scratch: Path) -> tuple[str, ...]:
    """Names of the tensors of a prompt that fail where every layer runs on golden inputs.

    In the profile "exact", streams may hold a few stray roundings (`STRAY_ROUNDINGS`).
    """
    tensors = forced_layers(case, prompt)
    failed = judge(case, tensors, profile, rf"^p{prompt}\.layer", scratch).failed
    if profile != "exact":
        return failed
    return tuple(name for name in failed if not is_stray(case, name, tensors[name]))


def is_stray(case: Case, name: str, tensor: Tensor) -> bool:
    """Whether a stream differs from the golden one in at most `STRAY_ROUNDINGS` elements."""
    if not name.endswith(STREAMS) or tensor.shape != case.golden[name].shape:
        return False
    return int((tensor != case.golden[name]).sum()) <= STRAY_ROUNDINGS


def check_decode_selections(
    case: Case, prompt: int, tensors: Tensors, scratch: Path
) -> tuple[str, ...]:
    """Names of decode selections of ratio-2 sources that are not exactly the golden ones.

    The official file, taken literally, lets these sources score the keys that the ratio-1 source
    left behind whenever a pair is open (README section 4); `decode.*` and pcpkit do not.
    """
    layers = "|".join(map(str, case.config.ratio2_sources))
    only = rf"^p{prompt}\.decode\.layer({layers})\.topk$"
    return judge(case, tensors, "exact", only, scratch).failed


# --- whole prompts ------------------------------------------------------------------------------


def constants(case: Case) -> Tensors:
    """``engram.*``: what the model hashes with."""
    engram = case.checkpoint.engram
    assert engram is not None, "the case has no Engram layers"
    return {
        "engram.token_map": engram.token_map,
        "engram.primes": engram.primes,
        "engram.multipliers": engram.multipliers,
        "engram.offsets": engram.offsets,
        "engram.pad_id": torch.tensor([engram.pad_id]),
    }


def prefill_and_decode(case: Case, prompt: int) -> Tensors:
    """The whole model: the prompt in one step, then greedy decoding, one token a step.

    Every token fed is our own choice. Cache tensors are read back from the pool.
    """
    model, name = case.checkpoint.model(), f"p{prompt}"
    pool, request = whole_pool(case.config, CACHE)
    ids: list[int] = case.golden[f"{name}.tokens"].tolist()
    plan = next_plan(case.config, CACHE, [(request, ids)])
    seen: Tensors = {}
    logits = model.forward(plan, pool, seen.__setitem__)
    out = {f"{name}.tokens": torch.tensor(request.ids)}
    out |= _logits(f"{name}.prefill", logits)
    rows = model.engram_rows(plan)
    if rows is not None:
        out[f"{name}.engram.rows"] = rows
    for layer in range(case.config.num_hidden_layers):
        mine = _of_layer(seen, layer)
        out |= _layer_tensors(case, f"{name}.layer{layer}", layer, mine, pool, request)
    if f"{name}.prefill.taps" in case.golden:
        out[f"{name}.prefill.taps"] = _taps(case.config, seen)
    if f"{name}.decode.tokens" in case.golden:
        out |= _decode(case, model, name, pool, request, int(logits[-1].argmax()))
    return out


def _decode(
    case: Case, model: TextModel, name: str, pool: CachePool, request: Request, first: int
) -> Tensors:
    prompt_len, tokens = len(request.ids), [first]
    logits: list[Tensor] = []
    steps: list[Tensors] = []
    for _ in range(DECODE_STEPS):
        seen: Tensors = {}
        plan = next_plan(case.config, CACHE, [(request, [tokens[-1]])])
        logits.append(model.forward(plan, pool, seen.__setitem__))
        steps.append(seen)
        tokens.append(int(logits[-1][0].argmax()))
    prefix = f"{name}.decode"
    out = {f"{prefix}.tokens": torch.tensor(tokens), f"{prefix}.logits": torch.cat(logits)}
    for layer in range(case.config.num_hidden_layers):
        key = f"{prefix}.layer{layer}"
        out[f"{key}.window_ring"] = _ring(case.config, pool, request, layer)
        if case.config.is_index_source(layer):
            topk = torch.cat([seen[f"layer{layer}.topk"] for seen in steps])
            out[f"{key}.topk"] = _fit(topk, case.golden[f"{key}.topk"].shape[1])
        if case.config.is_kv_source(layer):
            ratio = case.config.compress_ratio(layer)
            new = prompt_len // ratio, len(request.ids) // ratio
            records = compressed_rows(pool, request, layer, *new)
            out[f"{key}.compressed_new"] = RECORD_FORMATS[pool.compressed_record].decode(records)
            keys = index_rows(pool, request, layer, *new)
            out[f"{key}.index_k_new"] = RECORD_FORMATS["mxfp4"].decode(keys)
    if f"{prefix}.taps" in case.golden:
        out[f"{prefix}.taps"] = torch.cat([_taps(case.config, seen) for seen in steps])
    return out


def _logits(prefix: str, logits: Tensor) -> Tensors:
    return {f"{prefix}.logits": logits, f"{prefix}.logits_last8": logits[-8:]}


def _ring(config: ModelConfig, pool: CachePool, request: Request, layer: int) -> Tensor:
    """The last window of positions in the official ring order: slot = position mod window."""
    end, size = len(request.ids), config.sliding_window
    last = RECORD_FORMATS["mxfp8"].decode(window_rows(pool, request, layer, end - size, end))
    return last.roll(end % size, dims=0)


def _taps(config: ModelConfig, seen: Tensors) -> Tensor:
    """DSpark features: the mean over the streams that enter each target layer."""
    streams = [
        seen.get(f"layer{layer}.engram_out", seen[f"layer{layer - 1}.resid"])
        for layer in config.dspark_target_layer_ids
    ]
    return torch.cat([x.float().mean(1).bfloat16() for x in streams], dim=1)


# --- teacher forcing ----------------------------------------------------------------------------


def forced_layers(case: Case, prompt: int) -> Tensors:
    """Each layer on golden inputs: streams, pre-mix, and the sources' caches and selections."""
    model, golden, name = case.checkpoint.model(), case.inputs, f"p{prompt}"
    out: Tensors = {}
    for layer in range(case.config.num_hidden_layers):
        pool, request = whole_pool(case.config, CACHE)
        plan = next_plan(case.config, CACHE, [(request, golden[f"{name}.tokens"].tolist())])
        residual = model.embed(plan.token_ids)
        if layer:
            below = f"{name}.layer{layer - 1}"
            residual = Residual(streams=golden[f"{below}.resid"], pre=golden[f"{below}.pre"])
        selection = _golden_selection(case, name, layer, plan, pool)
        seen: Tensors = {}
        with torch.inference_mode():
            model.layer_forward(
                model.attention_step(plan, pool),
                layer,
                residual,
                selection,
                model.engram_rows(plan),
                lambda leaf, tensor, seen=seen: seen.__setitem__(leaf, tensor.clone()),
            )
        out |= _layer_tensors(case, f"{name}.layer{layer}", layer, seen, pool, request)
    return out


def _golden_selection(
    case: Case, name: str, layer: int, plan: StepPlan, pool: CachePool
) -> Selection | None:
    """What the sources below `layer` left: fills their caches, returns their selection."""
    config, golden = case.config, case.inputs
    source, selector = config.kv_source(layer), config.selection_source(layer)
    if source is None or selector is None or source == layer:
        return None
    slots = plan.layer_rows(layer).groups[config.compress_ratio(layer)].slots
    key = f"{name}.layer{source}"
    scatter_records(golden[f"{key}.compressed_record"], slots, pool.compressed[source])
    scatter_records(golden[f"{key}.index_record"], slots, pool.index_keys[source])
    # An index layer replaces the positions: it takes over no more than the candidates.
    nothing = torch.full((plan.num_rows, 1), -1, dtype=torch.int32)
    positions = nothing if selector == layer else golden[f"{name}.layer{selector}.topk"].int()
    candidates = None
    if layer > config.candidate_source_layer_id:
        dense = golden[f"{name}.layer{config.candidate_source_layer_id}.candidate_blocks"]
        blocks = torch.arange(dense.shape[1]).masked_fill(dense == 0, dense.shape[1])
        listed = blocks.sort(dim=1).values[:, : config.candidate_topk_blocks]
        candidates = listed.masked_fill(listed == dense.shape[1], -1).int()
    return Selection(positions=positions, candidates=candidates)


# --- shared -------------------------------------------------------------------------------------


def _layer_tensors(
    case: Case, key: str, layer: int, seen: Tensors, pool: CachePool, request: Request
) -> Tensors:
    """What a layer computed and stored, under golden names and in golden shapes."""
    config, golden, end = case.config, case.golden, len(request.ids)
    direct = dict(seen)
    records = window_rows(pool, request, layer, 0, end)
    direct |= {"window_record": records, "window": RECORD_FORMATS["mxfp8"].decode(records)}
    for leaf in ("window", "window_record"):
        direct[f"{leaf}_last"] = direct[leaf][-config.sliding_window :]
    if config.is_kv_source(layer):
        count = end // config.compress_ratio(layer)
        records = compressed_rows(pool, request, layer, 0, count)
        keys = index_rows(pool, request, layer, 0, count)
        direct |= {
            "compressed_record": records,
            "compressed": RECORD_FORMATS[pool.compressed_record].decode(records),
            "index_record": keys,
            "index_k": RECORD_FORMATS["mxfp4"].decode(keys),
        }
    direct["resid_last8"] = seen["resid"][-8:]
    if "topk" in seen:
        direct["topk"] = _fit(seen["topk"], golden[f"{key}.topk"].shape[1])
    if "candidate_blocks" in seen:
        width = golden[f"{key}.candidate_blocks"].shape[1]
        direct["candidate_blocks"] = _dense(seen["candidate_blocks"], width)
    if "index_scores" in seen:
        direct["index_scores"] = seen["index_scores"].float()
    return {f"{key}.{leaf}": tensor for leaf, tensor in direct.items()}


def _of_layer(seen: Tensors, layer: int) -> Tensors:
    prefix = f"layer{layer}."
    return {k.removeprefix(prefix): x for k, x in seen.items() if k.startswith(prefix)}


def _fit(listed: Tensor, width: int) -> Tensor:
    """Ascending ids with a -1 tail, cut or padded to `width`; never cuts off an id."""
    assert bool((listed[:, width:] == -1).all()), "more ids than the golden tensor has room for"
    padding = listed.new_full((listed.shape[0], max(0, width - listed.shape[1])), -1)
    return torch.cat([listed[:, :width], padding], dim=1)


def _dense(blocks: Tensor, width: int) -> Tensor:
    """Listed block ids as one flag a block."""
    kept = torch.zeros(blocks.shape[0], width + 1, dtype=torch.uint8)
    kept.scatter_(1, blocks.masked_fill(blocks < 0, width).long(), 1)
    return kept[:, :width]
