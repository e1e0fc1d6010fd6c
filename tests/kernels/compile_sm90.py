"""Compile kernels for sm_90 without a GPU and report spills: `python compile_sm90.py`.

Run in a process where TRITON_INTERPRET is unset. The interpreter accepts Python that the compiler
rejects, so this finds errors that CPU tests cannot. Types follow from parameter names.
"""

# A launch passes ints for constexpr parameters; Triton's compiler interface is untyped.
# pyright: reportArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pcpkit.formats import RECORD_FORMATS
from pcpkit.kernels import (
    _dense_weight,
    cache_write,
    hyper_connection,
    hyper_connection_mix,
    norm,
    record_move,
    rope,
    sparse_mla_rows,
)

BFLOAT16, FLOAT32, BYTES, INT64 = "*bf16", "*fp32", "*u8", "*i64"
POINTERS = {
    "x_ptr": BFLOAT16,
    "out_ptr": BFLOAT16,
    "output_ptr": BFLOAT16,
    "latents_ptr": BFLOAT16,
    "streams_ptr": BFLOAT16,
    "expanded_ptr": BFLOAT16,
    "weight_ptr": BFLOAT16,
    "positions_ptr": INT64,
    "slots_ptr": INT64,
    "records_ptr": BYTES,
    "cache_ptr": BYTES,
}
FLOATS = ("eps", "hc_eps", "norm_eps")

Case = tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]


def cases() -> Iterator[Case]:
    """(kernel, types that differ from `POINTERS`, constexprs, options) at the released shapes."""
    exact: dict[str, Any] = {"enable_fp_fusion": False}
    shared: dict[str, Any] = {"stride_position": 1, "INVERSE": False, "ROPE_DIM": 64}
    for dim, heads in ((512, 8), (64, 64)):
        block = {"DIM": dim, "BLOCK_DIM": dim, "BLOCK_HEADS": heads}
        yield rope._apply_rope_kernel, {}, {**shared, **block}, exact
    for record, dim, align in (("mxfp8", 512, 16), ("nvfp4", 512, 16), ("mxfp4", 128, 4)):
        rows = cache_write._choose_encode(dim).block_rows
        encode = {
            "stride_position": 1, "stride_slot": 1, "ROWS_PER_PAGE": 64, "ALIGN": align,
            "RECORD": record, "GROUP": RECORD_FORMATS[record].group, "DIM": dim, "ROPE_DIM": 64,
            "TAIL": 64, "BLOCK_HEAD": dim if dim == 512 else 64, "BLOCK_TAIL": 64,
            "BLOCK_ROWS": rows,
        }  # fmt: skip
        yield cache_write._encode_kernel, {"out_ptr": BYTES}, encode, exact
        one_row = {**encode, "slots_ptr": None, "num_rows": 1, "stride_slot": 0}
        yield cache_write._encode_kernel, {"out_ptr": BYTES}, one_row, exact
        size = RECORD_FORMATS[record].record_bytes(dim)
        move = {
            "stride_slot": 1, "ROWS_PER_PAGE": 64, "RECORD_BYTES": size, "UNIT": align,
            "BLOCK_ROWS": 15, "BLOCK_UNITS": 512,
        }  # fmt: skip
        for scatter in (False, True):
            yield record_move._move_records_kernel, {}, {**move, "SCATTER": scatter}, {}
    for dim in (128, 512, 5120):
        choice = norm._choose_launch(dim)
        block = {"DIM": dim, "BLOCK_ROWS": choice.block_rows, "BLOCK_DIM": choice.block_dim}
        for dtype in (BFLOAT16, FLOAT32):
            yield norm._rms_norm_kernel, {"x_ptr": dtype}, block, exact
    row = {"COUNT": 4, "DIM": 5120, "BLOCK_DIM": hyper_connection._choose_launch(5120).block_dim}
    yield hyper_connection._collapse_kernel, {}, row, exact
    yield hyper_connection._expand_kernel, {}, row, exact
    unused = dict.fromkeys(("output_ptr", "post_ptr", "comb_ptr", "expanded_ptr"))
    yield hyper_connection._collapse_norm_kernel, {}, {**row, **unused, "EXPAND": False}, exact
    yield hyper_connection._collapse_norm_kernel, {}, {**row, "EXPAND": True}, exact
    mix = hyper_connection_mix._choose_launch()
    project = {
        "K": 20480, "OUTPUTS": 24, "BLOCK_OUTPUTS": 32, "BLOCK_ROWS": mix.block_rows,
        "BLOCK_K": mix.block_k, "SLICE": mix.slice_size,
    }  # fmt: skip
    finish = {
        "ITERATIONS": 20, "K": 20480, "STREAMS": 4, "SLICES": 20480 // mix.slice_size,
        "BLOCK_ROWS": mix.coefficient_rows,
    }  # fmt: skip
    for extra in ({}, {"num_rows": 1}):  # Triton compiles an argument of 1 as a constant
        yield hyper_connection_mix._project_kernel, {}, {**project, **extra}, {"num_stages": 3}
        yield hyper_connection_mix._coefficients_kernel, {}, {**finish, **extra}, exact
    collect = {
        "WINDOW": 128, "WINDOW_PAGE": 32, "PAGE": 64, "DIM": 512,
        "ROWS": sparse_mla_rows._ROWS_PER_PROGRAM, "BLOCK": sparse_mla_rows._SLOTS_PER_PROGRAM,
    }  # fmt: skip
    pointers = dict.fromkeys(
        ("index_ptr", "request_ptr", "floor_ptr", "window_table_ptr", "table_ptr", "selection_ptr"),
        "*i32",
    )
    pointers |= {"window_ptr": BYTES, "compressed_ptr": BYTES, "rows_ptr": BFLOAT16}
    for holds in (sparse_mla_rows.POOL, sparse_mla_rows.REQUESTS, sparse_mla_rows.QUERIES):
        parts = {"WINDOW_HOLDS": holds.value, "COMPRESSED_HOLDS": holds.value}
        for packed in (True, False):
            constants = {**collect, **parts, "PACKED": packed}
            warps = {"num_warps": sparse_mla_rows._WARPS}
            yield sparse_mla_rows._collect_kernel, pointers, constants, warps
    names = ("first_ptr", "first_scale_ptr", "second_ptr", "second_scale_ptr")
    pointers = {**dict.fromkeys(names, BYTES), "weights_ptr": BFLOAT16, "operand_ptr": BFLOAT16}
    for order in (0, 8):
        constants = {"ORDER": order, "ROWS": _dense_weight._ROWS, "DEPTH": _dense_weight._DEPTH}
        warps = {"num_warps": _dense_weight._WARPS}
        yield _dense_weight._prepare_kernel, pointers, constants, warps


def compile_case(case: Case) -> str:
    """One report line; raises where the compiler does."""
    kernel, types, constants, options = case
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = {**POINTERS, **types}.get(name, FLOAT32)
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    place = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = {
        place[name]: [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*") or name.startswith("stride_")
    }
    values = {place[name]: value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return f"{kernel.__name__}: {_resources(compiled.asm['cubin'])}"


def _resources(cubin: bytes) -> str:
    """Registers and spilled bytes a thread, from the disassembler that Triton ships."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return f"{found[1]} registers, {found[2]} bytes of stack"


if __name__ == "__main__":
    for each in cases():
        sys.stdout.write(compile_case(each) + "\n")
