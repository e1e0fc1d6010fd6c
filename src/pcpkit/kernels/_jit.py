"""Device functions shared by the kernels; they hide what the Triton interpreter gets wrong.

Traps of the interpreter (Triton 3.6 to 3.9), each hidden by a helper that works in both modes:

| what                          | interpreted                         | use               |
|-------------------------------|-------------------------------------|-------------------|
| FP32 -> BF16 cast             | truncates, some NaN become inf      | `to_bfloat16`     |
| BF16 -> FP32 cast             | subnormal numbers go wrong          | `from_bfloat16`   |
| FP32 -> E4M3 cast             | not nearest-even, wraps at 448      | `e4m3_encode`     |
| E4M3 -> FP16 cast             | NaN becomes 480                     | `e4m3_decode`     |
| `tl.dot` of BF16 operands     | multiplies the raw 16-bit integers  | `dot`             |
| `+ - * / < max` on BF16       | act on the raw 16-bit integers      | `from_bfloat16`   |

One trap is the compiler's: `tl.full` of -0.0 gives +0.0 compiled; use `minus_zeros`.

Codecs mirror `pcpkit.formats` bit for bit; that module states the rules. Kernels that must match
their reference bit for bit are launched with ``enable_fp_fusion=False``: the references round every
product and every sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from pcpkit import formats

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
"""Whether jit functions run in Triton's interpreter, as decided when this module is imported."""

_ROUND = tl.constexpr(8388608.0)
"""2^23: adding and subtracting it rounds a value in [0, 2^22] to the nearest even integer."""

_INFINITY_BITS = tl.constexpr(0x7F800000)
_MXFP8_FLOOR = tl.constexpr(formats.MXFP8_AMAX_FLOOR)
_E4M3_FACTOR = tl.constexpr(1.0 / formats.E4M3_MAX)
_MXFP4_FLOOR = tl.constexpr(formats.INDEX_AMAX_FLOOR)
_E2M1_FACTOR = tl.constexpr(1.0 / formats.E2M1_MAX)
_NVFP4_FLOOR = tl.constexpr(formats.NVFP4_AMAX_FLOOR)


@triton.jit
def to_bfloat16(x):
    """BF16 of FP32 ``x``, nearest even; NaN stays NaN."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, (bits >> 16) | 0x40, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def from_bfloat16(x):
    """FP32 of BF16 ``x``, exact, subnormal numbers included."""
    if INTERPRETED:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def widen(x):
    """FP32 of BF16, FP16 or FP32 ``x``, exact."""
    if x.dtype == tl.bfloat16:
        return from_bfloat16(x)
    return x.to(tl.float32)


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` with FP32 accumulation; exact products of at most 16-bit operands."""
    if INTERPRETED:
        return tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def minus_zeros(shape):
    """FP32 -0.0, the neutral element of addition: a first term of either sign keeps its bits."""
    return tl.full(shape, -0x80000000, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def round_even(x):
    """Nearest even integer of ``0 <= x <= 2^22``, as FP32."""
    return (x + _ROUND) - _ROUND


@triton.jit
def round_even_int(x):
    """Nearest even integer of ``0 <= x <= 2^22``, as int32 (no slow float to integer cast)."""
    return (x + _ROUND).to(tl.int32, bitcast=True) - 0x4B000000


@triton.jit
def exp(x):
    """FP32 ``exp`` rounded once from float64, as ``_reference.exp``."""
    return tl.exp(x.to(tl.float64)).to(tl.float32)


@triton.jit
def sigmoid(x):
    """FP32 logistic function rounded once from float64, as ``_reference.sigmoid``."""
    return (1.0 / (1.0 + tl.exp(-x.to(tl.float64)))).to(tl.float32)


@triton.jit
def inverse_root_mean(total, DIM: tl.constexpr, eps):
    """FP32 ``1 / sqrt(total / DIM + eps)`` of a float64 sum of squares.

    The mean is rounded to FP32 once, so sums of different order give the same bits, unless the mean
    lies within about 2^-50 (relative) of a rounding boundary.
    """
    mean = (total / DIM).to(tl.float32)
    return tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))


@triton.jit
def inverse_rms(x, DIM: tl.constexpr, eps):
    """``_reference.inverse_rms`` over the last axis of FP32 ``x``, of which ``DIM`` values count.

    Padding must be 0.
    """
    wide = x.to(tl.float64)
    return inverse_root_mean(tl.sum(wide * wide, axis=-1), DIM, eps)


@triton.jit
def pow2ceil(x):
    """Smallest power of two >= ``x``: 0 gives 0, above 2^127 inf, NaN and negative values NaN."""
    bits = x.to(tl.int32, bitcast=True)
    valid = (bits >= 0) & (bits <= _INFINITY_BITS)
    # Masked first: the carry must not leave the integer, whose overflow is undefined.
    rounded = ((bits & _INFINITY_BITS) + 0x007FFFFF + (bits & 0x007FFFFF)) & _INFINITY_BITS
    return tl.where(valid, rounded, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def pow2_inverse(scale):
    """Exact ``1 / scale`` of a power of two in [2^-126, 2^126]; garbage for any other value.

    ``x * pow2_inverse(scale)`` equals ``x / scale`` in every bit: both round the same real number.
    """
    return (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_encode(scale):
    """Byte (uint8) of a power of two; inf, NaN and negative values give 255, 0 gives 0."""
    bits = scale.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits >> 23, 255).to(tl.uint8)


@triton.jit
def e8m0_decode(byte):
    """FP32 power of two of a scale byte: ``2^(byte - 127)``, 255 is NaN."""
    exponent = byte.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_encode(x):
    """E4M3FN byte (uint8) of FP32 ``x``: nearest even, saturating at 448, signed zero.

    NaN gives 0x7f whatever its sign (the reference codec keeps the sign of the NaN).
    """
    if not INTERPRETED:
        # cvt.rn.satfinite.e4m3x2.f32: the same rule in one instruction for two values.
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    nan = x != x
    magnitude = tl.where(nan, 0.0, tl.minimum(tl.abs(x), 448.0))
    exponent = (magnitude.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.maximum(exponent, -6)
    # 2^(3 - exponent): the last mantissa bit becomes the unit; a carry moves into the exponent.
    scale = ((130 - exponent) << 23).to(tl.float32, bitcast=True)
    code = ((exponent + 7) << 3) + round_even_int(magnitude * scale) - 8
    return tl.where(nan, 0x7F, sign | code).to(tl.uint8)


@triton.jit
def e4m3_decode(byte):
    """FP16 value of an E4M3FN byte (exact); 0x7f and 0xff are NaN."""
    if not INTERPRETED:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    code = byte.to(tl.int32)
    # The same float up to the exponent bias, 7 against 15.
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def e2m1_encode(x):
    """E2M1 code 0..15 (int32) of FP32 ``x``: nearest even, saturating at 6, signed zero.

    E2M1 has no NaN: a NaN gives 6 or -6 by its sign bit.
    """
    bits = x.to(tl.int32, bitcast=True)
    # As integers, so that NaN saturates in both modes.
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x40C00000)
    # 2^max(exponent, 0). Times 2^22 it is a number whose unit in the last place is that of E2M1, so
    # one addition rounds, and the last bits of the sum count units.
    power = tl.maximum(magnitude, 0x3F800000) & _INFINITY_BITS
    anchor = power + (22 << 23)
    total = magnitude.to(tl.float32, bitcast=True) + anchor.to(tl.float32, bitcast=True)
    code = total.to(tl.int32, bitcast=True) - anchor + ((power - 0x3F800000) >> 22)
    return ((bits >> 28) & 0x8) | code


@triton.jit
def e2m1_decode(code):
    """FP32 value of an E2M1 code 0..15 (exact): 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    bits = code.to(tl.int32)
    # The same float up to the exponent bias, 1 against 127; code 1 is a subnormal number there.
    magnitude = ((bits & 7) << 22) | ((bits & 8) << 28)
    return magnitude.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _group_amax(x, ROWS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr):
    """(``x`` [ROWS, DIM / GROUP, GROUP], bits [ROWS, DIM / GROUP] of the largest magnitude).

    Compared as integers: NaN lies above infinity, so neither is lost.
    """
    grouped = tl.reshape(x, [ROWS, DIM // GROUP, GROUP])
    magnitude = grouped.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return grouped, tl.max(magnitude, axis=2)


@triton.jit
def pack_e2m1(codes, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Codes [ROWS, DIM] -> bytes (uint8) [ROWS, DIM / 2], the even channel in the low nibble."""
    low, high = tl.split(tl.reshape(codes, [ROWS, DIM // 2, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def quantize_mxfp8(x, ROWS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr):
    """``formats.quantize_mxfp8`` of FP32 ``x`` [ROWS, DIM].

    Returns (codes uint8 [ROWS, DIM], scales uint8 [ROWS, DIM / GROUP]).
    """
    grouped, bits = _group_amax(x, ROWS, DIM, GROUP)
    hostile = bits >= _INFINITY_BITS
    amax = tl.maximum(bits.to(tl.float32, bitcast=True), _MXFP8_FLOOR)
    scale = pow2ceil(tl.where(hostile, 1.0, amax) * _E4M3_FACTOR)
    quotient = grouped * pow2_inverse(scale)[:, :, None]
    codes = e4m3_encode(tl.where(hostile[:, :, None], 0.0, quotient))
    scales = tl.where(hostile, 255, e8m0_encode(scale)).to(tl.uint8)
    return tl.reshape(codes, [ROWS, DIM]), scales


@triton.jit
def quantize_mxfp4(x, ROWS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr):
    """``formats.quantize_mxfp4`` of FP32 ``x`` [ROWS, DIM].

    Returns (packed uint8 [ROWS, DIM / 2], scales uint8 [ROWS, DIM / GROUP]).
    """
    grouped, bits = _group_amax(x, ROWS, DIM, GROUP)
    hostile = bits >= _INFINITY_BITS
    amax = tl.maximum(bits.to(tl.float32, bitcast=True), _MXFP4_FLOOR)
    scale = pow2ceil(tl.where(hostile, 1.0, amax) * _E2M1_FACTOR)
    quotient = grouped * pow2_inverse(scale)[:, :, None]
    codes = e2m1_encode(tl.where(hostile[:, :, None], 0.0, quotient))
    scales = tl.where(hostile, 255, e8m0_encode(scale)).to(tl.uint8)
    return pack_e2m1(tl.reshape(codes, [ROWS, DIM]), ROWS, DIM), scales


@triton.jit
def _to_12_bits(x):
    """FP32 ``x`` rounded to 12 significant bits.

    Replaces an IEEE division in front of a rounding to 4 bits or fewer. Let ``q = a / b`` with at
    most 8 significant bits in ``a`` and 4 in ``b``. A midpoint ``m`` of the coarse grid has at most
    5 bits, so ``m * b`` has at most 9 and ``q`` either equals ``m`` or differs from it by one part
    in 2^9 or more. A product ``x`` within 2^-20 of ``q``, rounded to 12 bits, therefore equals
    ``m`` where ``q`` does and lies on the same side of ``m`` where it does not.
    """
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x400) & -0x800).to(tl.float32, bitcast=True)


@triton.jit
def quantize_nvfp4(x, ROWS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr):
    """``formats.quantize_nvfp4`` of BF16 values ``x`` (as FP32) [ROWS, DIM].

    Returns (packed uint8 [ROWS, DIM / 2], scales uint8 [ROWS, DIM / GROUP]).
    """
    grouped, bits = _group_amax(x, ROWS, DIM, GROUP)
    hostile = bits >= _INFINITY_BITS
    amax = tl.maximum(bits.to(tl.float32, bitcast=True), _NVFP4_FLOOR)
    # The product reaches the code of the quotient amax / 6 for every BF16 amax: test_jit tries all.
    scales = e4m3_encode(tl.where(hostile, 1.0, amax) * _E2M1_FACTOR)
    inverse = 1.0 / e4m3_decode(scales).to(tl.float32)
    quotient = tl.where(hostile[:, :, None], 0.0, grouped) * inverse[:, :, None]
    codes = e2m1_encode(_to_12_bits(quotient))
    scales = tl.where(hostile, 0x7F, scales).to(tl.uint8)
    return pack_e2m1(tl.reshape(codes, [ROWS, DIM]), ROWS, DIM), scales
