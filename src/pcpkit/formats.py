"""Number formats and cache records: exact torch codecs and every byte constant of the caches.

Three group quantisers (model-spec 0.2 - 0.5), all along the last axis, all exact in every bit:

| name  | elements | scale per group      | group | used for                                   |
|-------|----------|----------------------|-------|--------------------------------------------|
| mxfp8 | E4M3     | E8M0 (power of two)  | 32    | activations, window KV (528 B at dim 512)  |
| mxfp4 | E2M1     | E8M0 (power of two)  | 32    | index queries and keys (68 B at dim 128)   |
| nvfp4 | E2M1     | E4M3 (rounded)       | 16    | compressed KV (288 B at dim 512)           |

Rounding points: the group scale is FP32 arithmetic on the group's largest magnitude; the element
is `x / scale` (one IEEE division) rounded once, to nearest, ties to even. Zeros keep their sign.

Hostile values: a group that holds a NaN or an infinity is stored as a NaN scale byte (E8M0 0xff,
E4M3 0x7f) and codes 0, so exactly this group decodes to NaN; no other group or row changes. An MX
format decodes a magnitude above 2^127 that rounds up to 2^128 as inf; nvfp4 saturates at 2688.

Plain torch without state, for CPU and CUDA tensors; nothing reads a value back to the host.
Layouts: docs/cache-layout.md. Magnitudes below 2^-126 need unflushed subnormals (torch's default).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch
from torch import Tensor

WINDOW_GROUP: Final = 32
COMPRESSED_GROUP: Final = 16
INDEX_GROUP: Final = 32
WEIGHT_BLOCK: Final = 32
E4M3_MAX: Final = 448.0
E2M1_MAX: Final = 6.0
MXFP8_AMAX_FLOOR: Final = 1e-4
INDEX_AMAX_FLOOR: Final = 6.0 * 2.0**-126
NVFP4_AMAX_FLOOR: Final = 6.0 * 2.0**-9
E8M0_NAN: Final = 0xFF

_EXPONENT_MASK: Final = 0x7F800000
_QUIET_BIT: Final = 0x00400000
_MANTISSA_ONES: Final = 0x007FFFFF


def pow2ceil(x: Tensor) -> Tensor:
    """Smallest power of two that is >= x (model-spec 0.2), by integer arithmetic on the FP32 bits.

    Args:
        x: fp32, any shape, positive normal values.

    Returns:
        fp32 of the same shape. Outside the domain: 0 -> 0, positive subnormals -> 2^-126, above
        2^127 and inf -> inf, NaN and negative values (-0 included) -> NaN.

    Example: 1.0 -> 1.0, 1.0000001 -> 2.0, 3.0 -> 4.0
    """
    _require_dtype(x, "x", (torch.float32,))
    bits = x.view(torch.int32)
    rounded = ((bits + _MANTISSA_ONES) & _EXPONENT_MASK).view(torch.float32)
    # NaN bits lie above those of inf; a set sign bit makes the integer negative.
    valid = (bits >= 0) & (bits <= _EXPONENT_MASK)
    return torch.where(valid, rounded, torch.nan)


def e8m0_encode(scale: Tensor) -> Tensor:
    """Exponent byte of power-of-two scales: byte b stands for 2^(b-127).

    `scale` holds fp32 powers of two from 2^-127 to 2^127; the result is uint8 of the same shape.
    inf, NaN and negative values -> 0xff (NaN). Mantissa bits are dropped and 0 becomes byte 0, so
    pass the scale through `pow2ceil` first.
    """
    _require_dtype(scale, "scale", (torch.float32,))
    bits = scale.view(torch.int32)
    return torch.where(bits >= 0, bits >> 23, E8M0_NAN).to(torch.uint8)


def e8m0_decode(codes: Tensor) -> Tensor:
    """fp32 value 2^(b-127) of each byte b (uint8, int8 or float8_e8m0fnu); 0xff -> NaN; exact."""
    exponent = _as_bytes(codes, "codes").to(torch.int32)
    # Byte 0 is the subnormal 2^-127, byte 255 is NaN: both have mantissa bit 22 set.
    special = (exponent == 0) | (exponent == E8M0_NAN)
    return ((exponent << 23) | special.to(torch.int32) * _QUIET_BIT).view(torch.float32)


def e4m3_encode(x: Tensor) -> Tensor:
    """E4M3FN code of every value: nearest, ties to even, saturating at +-448 (infinities too).

    x is fp32 or bf16 of any shape, the result uint8 of that shape. Zeros keep their sign; NaN gives
    0x7f with the sign of the NaN.
    """
    _require_dtype(x, "x", (torch.float32, torch.bfloat16))
    # torch's cast is nearest-even inside +-448; beyond, versions differ (NaN or saturation).
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(codes: Tensor) -> Tensor:
    """fp32 value of each E4M3FN code (uint8, int8 or float8_e4m3fn); 0x7f, 0xff -> NaN; exact."""
    return _lookup(_e4m3_table(codes.device), _as_bytes(codes, "codes"))


def e2m1_encode(x: Tensor) -> Tensor:
    """E2M1 code 0..15 of every value: nearest, ties to the even code, saturating at +-6.

    x is fp32 or bf16 of any shape, the result uint8 of that shape: bit 3 the sign (kept for zeros),
    bits 0-2 the index into 0 .5 1 1.5 2 3 4 6. E2M1 has no NaN: a NaN gives +-6 by its sign bit,
    and the quantisers put the NaN into the group scale.

    Example: 0.25 -> 0, 0.75 -> 2, -5.0 -> 14, -0.0 -> 8
    """
    _require_dtype(x, "x", (torch.float32, torch.bfloat16))
    magnitude = x.float().abs()
    # 7 minus the number of midpoints above; a midpoint belongs to its even neighbour: the lower one
    # for "<=", the upper one for "<". NaN is below none of them.
    code = 7 - (magnitude <= 0.25).view(torch.uint8)
    code -= (magnitude < 0.75).view(torch.uint8)
    code -= (magnitude <= 1.25).view(torch.uint8)
    code -= (magnitude < 1.75).view(torch.uint8)
    code -= (magnitude <= 2.5).view(torch.uint8)
    code -= (magnitude < 3.5).view(torch.uint8)
    code -= (magnitude <= 5.0).view(torch.uint8)
    return code | (torch.signbit(x).view(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """fp32 value of every E2M1 code (uint8 or int8; the high four bits are ignored); exact."""
    nibble = _as_bytes(codes, "codes") & 15
    # seem -> E4M3 s00eem00: the same float up to the exponent bias (1 against 7).
    as_e4m3 = ((nibble & 7) << 2) | ((nibble & 8) << 4)
    return as_e4m3.view(torch.float8_e4m3fn).to(torch.float32) * 64.0


def pack_e2m1(codes: Tensor) -> Tensor:
    """Codes uint8 [..., d] in 0..15 -> uint8 [..., d/2], the even channel in the low nibble."""
    if codes.dtype != torch.uint8 or codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(
            f"codes expected uint8 with an even last axis, got {codes.dtype} {tuple(codes.shape)}; "
            "pass whole groups of e2m1_encode"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Inverse of `pack_e2m1`: bytes [..., n] -> codes uint8 [..., 2n]."""
    raw = _as_bytes(packed, "packed")
    return torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)


def quantize_mxfp8(x: Tensor, group: int = WINDOW_GROUP) -> tuple[Tensor, Tensor]:
    """Q8_32 (model-spec 0.3): E4M3 codes with one power-of-two scale a group.

    Args:
        x: bf16 or fp32 [..., d], d a positive multiple of `group`.

    Returns:
        (codes uint8 [..., d], scales uint8 E8M0 [..., d/group]).
    """
    grouped, amax = _group(x, group)
    scale = pow2ceil(amax.clamp(min=MXFP8_AMAX_FLOOR) * (1.0 / E4M3_MAX))
    return _group_codes(e4m3_encode, grouped, scale), e8m0_encode(scale)


def quantize_mxfp4(x: Tensor, group: int = INDEX_GROUP) -> tuple[Tensor, Tensor]:
    """Q4_32 (model-spec 0.4): E2M1 codes with one power-of-two scale a group.

    Args:
        x: bf16 or fp32 [..., d], d a positive multiple of `group`.

    Returns:
        (packed uint8 [..., d/2], scales uint8 E8M0 [..., d/group]).
    """
    grouped, amax = _group(x, group)
    scale = pow2ceil(amax.clamp(min=INDEX_AMAX_FLOOR) * (1.0 / E2M1_MAX))
    return pack_e2m1(_group_codes(e2m1_encode, grouped, scale)), e8m0_encode(scale)


def quantize_nvfp4(x: Tensor, group: int = COMPRESSED_GROUP) -> tuple[Tensor, Tensor]:
    """Q4_16 (model-spec 0.5): E2M1 codes with one rounded E4M3 scale a group and no global scale.

    The scale is rounded to nearest, so `x / scale` may exceed 6 (clamped), and saturates at 448.

    Args:
        x: bf16 or fp32 [..., d], d a positive multiple of `group`.

    Returns:
        (packed uint8 [..., d/2], scales uint8 E4M3 [..., d/group]).
    """
    grouped, amax = _group(x, group)
    # By a tensor: on CUDA torch turns a division by a number into a multiplication by 1/6.
    ratio = amax.clamp(min=NVFP4_AMAX_FLOOR) / torch.full_like(amax, E2M1_MAX)
    scales = e4m3_encode(torch.where(torch.isfinite(amax), ratio, torch.nan))
    return pack_e2m1(_group_codes(e2m1_encode, grouped, e4m3_decode(scales))), scales


def dequantize_mxfp8(codes: Tensor, scales: Tensor) -> Tensor:
    """codes uint8 [..., d], E8M0 scales [..., d/group] -> bf16 [..., d]; exact for all bytes that
    the quantiser writes."""
    values = _lookup(_e4m3_table(codes.device).to(torch.bfloat16), _as_bytes(codes, "codes"))
    return _scale_groups(values, e8m0_decode(scales).to(torch.bfloat16))


def dequantize_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """packed uint8 [..., d/2], E8M0 scales [..., d/group] -> bf16 [..., d]; exact as above."""
    values = _decode_pairs(packed, torch.bfloat16)
    return _scale_groups(values, e8m0_decode(scales).to(torch.bfloat16))


def dequantize_nvfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """packed uint8 [..., d/2], E4M3 scales [..., d/group] -> bf16 [..., d]; exact for all bytes."""
    values = _decode_pairs(packed, torch.bfloat16)
    return _scale_groups(values, e4m3_decode(scales).to(torch.bfloat16))


def fp8_block_dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 weight of the FP8 linear: code * 2^(scale - 127) per 32 x 32 block (model-spec 0.6).

    Args:
        codes: uint8, int8 or float8_e4m3fn [N, K].
        scale: uint8, int8 or float8_e8m0fnu [ceil(N/32), ceil(K/32)].

    Returns:
        fp32 [N, K], exact within the range of fp32.
    """
    if codes.ndim != 2:
        raise ValueError(f"codes expected shape [N, K], got {tuple(codes.shape)}; pass one matrix")
    num_rows, num_columns = codes.shape
    expected = (-(-num_rows // WEIGHT_BLOCK), -(-num_columns // WEIGHT_BLOCK))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"scale expected shape {expected}, got {tuple(scale.shape)}; one byte per 32 x 32 block"
        )
    factor = e8m0_decode(scale).repeat_interleave(WEIGHT_BLOCK, dim=1)[:, :num_columns]
    return e4m3_decode(codes).mul_(factor.repeat_interleave(WEIGHT_BLOCK, dim=0)[:num_rows])


def fp4_row_dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 weight of the FP4 linear: E2M1, one E8M0 scale per row and 32 values (model-spec 0.6).

    Args:
        packed: uint8 or int8 [..., N, K/2], even k in the low nibble.
        scale: uint8, int8 or float8_e8m0fnu [..., N, K/32].

    Returns:
        fp32 [..., N, K], exact within the range of fp32.
    """
    expected = (*packed.shape[:-1], packed.shape[-1] * 2 // WEIGHT_BLOCK) if packed.ndim else None
    if tuple(scale.shape) != expected or packed.shape[-1] * 2 % WEIGHT_BLOCK:
        raise ValueError(
            f"scale expected shape {expected} for packed {tuple(packed.shape)}, "
            f"got {tuple(scale.shape)}; one byte per row and 32 values"
        )
    return _scale_groups(_decode_pairs(packed, torch.float32), e8m0_decode(scale))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFormat:
    """Byte layout of one cache row: code bytes in channel order, then scale bytes in group order.

    Attributes:
        name: key in `RECORD_FORMATS`.
        group: channels that share a scale byte.
        element_bits: 8 (E4M3) or 4 (E2M1, two a byte, even channel in the low nibble).
        scale: format of the scale byte; "e4m3" only with 4-bit elements.
    """

    name: str
    group: int
    element_bits: int
    scale: Literal["e8m0", "e4m3"]

    def __post_init__(self) -> None:
        if (self.element_bits, self.scale) not in ((8, "e8m0"), (4, "e8m0"), (4, "e4m3")):
            raise ValueError(
                "element_bits, scale expected (8, e8m0), (4, e8m0) or (4, e4m3), got "
                f"({self.element_bits}, {self.scale}); use one of RECORD_FORMATS"
            )
        if self.group < 2 or self.group % 2:
            raise ValueError(
                f"group expected an even number >= 2, got {self.group}; use one of RECORD_FORMATS"
            )

    def code_bytes(self, dim: int) -> int:
        """Bytes of the codes of one row of `dim` channels (the offset of its first scale byte)."""
        if dim <= 0 or dim % self.group:
            raise ValueError(
                f"dim expected a positive multiple of {self.group} for {self.name}, got {dim}; "
                "pad the row or choose another record format"
            )
        return dim * self.element_bits // 8

    def record_bytes(self, dim: int) -> int:
        """Bytes of one row: 528 (mxfp8) or 288 (nvfp4) at dim 512, 68 (mxfp4) at dim 128."""
        return self.code_bytes(dim) + dim // self.group

    def dim_of(self, record_bytes: int) -> int:
        """Channels of a record of `record_bytes` bytes, the inverse of `record_bytes`."""
        group_bytes = self.group * self.element_bits // 8 + 1
        if record_bytes <= 0 or record_bytes % group_bytes:
            raise ValueError(
                f"record_bytes expected a positive multiple of {group_bytes} for {self.name}, "
                f"got {record_bytes}; check the record format"
            )
        return record_bytes // group_bytes * self.group

    def encode(self, x: Tensor) -> Tensor:
        """Quantises rows: x bf16 or fp32 [..., dim] -> uint8 [..., record_bytes(dim)]."""
        if self.element_bits == 8:
            return torch.cat(quantize_mxfp8(x, self.group), dim=-1)
        quantize = quantize_mxfp4 if self.scale == "e8m0" else quantize_nvfp4
        return torch.cat(quantize(x, self.group), dim=-1)

    def decode(self, records: Tensor) -> Tensor:
        """Exact values of rows: uint8 [..., record_bytes(dim)] -> bf16 [..., dim]."""
        if records.dtype != torch.uint8 or records.ndim == 0:
            raise ValueError(
                f"records expected uint8 [..., record_bytes], got {records.dtype} "
                f"{tuple(records.shape)}; pass raw cache rows"
            )
        split = self.code_bytes(self.dim_of(records.shape[-1]))
        codes, scales = records[..., :split], records[..., split:]
        if self.element_bits == 8:
            return dequantize_mxfp8(codes, scales)
        decode = dequantize_mxfp4 if self.scale == "e8m0" else dequantize_nvfp4
        return decode(codes, scales)


MXFP8: Final = RecordFormat(name="mxfp8", group=WINDOW_GROUP, element_bits=8, scale="e8m0")
NVFP4: Final = RecordFormat(name="nvfp4", group=COMPRESSED_GROUP, element_bits=4, scale="e4m3")
MXFP4: Final = RecordFormat(name="mxfp4", group=INDEX_GROUP, element_bits=4, scale="e8m0")
RECORD_FORMATS: Final[Mapping[str, RecordFormat]] = MappingProxyType(
    {record.name: record for record in (MXFP8, NVFP4, MXFP4)}
)


def _require_dtype(x: Tensor, name: str, allowed: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"{name} expected dtype {names}, got {x.dtype}; convert it explicitly")


def _as_bytes(x: Tensor, name: str) -> Tensor:
    if x.dtype not in (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu):
        raise ValueError(
            f"{name} expected raw bytes (uint8, int8 or float8), got {x.dtype}; view, never cast"
        )
    return x.view(torch.uint8)


def _group(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(fp32 [..., d/group, group], largest magnitude [..., d/group], NaN where a NaN is)."""
    _require_dtype(x, "x", (torch.bfloat16, torch.float32))
    if x.ndim == 0 or x.shape[-1] == 0 or x.shape[-1] % group:
        raise ValueError(
            f"x expected a last axis divisible by {group}, got shape {tuple(x.shape)}; pad the rows"
        )
    grouped = x.float().unflatten(-1, (x.shape[-1] // group, group))
    return grouped, grouped.abs().amax(dim=-1)


def _group_codes(encode: Callable[[Tensor], Tensor], grouped: Tensor, scale: Tensor) -> Tensor:
    """Codes [..., d] of the IEEE quotients; 0 in groups whose scale is not finite."""
    codes = encode(grouped / scale.unsqueeze(-1))
    # A NaN's sign and payload differ between devices; stored bytes must not.
    codes *= torch.isfinite(scale).view(torch.uint8).unsqueeze(-1)
    return codes.flatten(-2)


def _scale_groups(values: Tensor, scale: Tensor) -> Tensor:
    """values [..., d] *= scale [..., num_groups], d / num_groups consecutive channels a group."""
    num_groups = scale.shape[-1] if scale.ndim else 0
    if num_groups == 0 or values.shape[-1] % num_groups or values.shape[:-1] != scale.shape[:-1]:
        raise ValueError(
            f"scales expected shape {(*values.shape[:-1], 'groups')}, got {tuple(scale.shape)} for "
            f"{values.shape[-1]} channels; one scale byte per group and row"
        )
    values.unflatten(-1, (num_groups, values.shape[-1] // num_groups)).mul_(scale.unsqueeze(-1))
    return values


def _lookup(table: Tensor, raw: Tensor) -> Tensor:
    """table[raw] as a new contiguous tensor of shape [*raw.shape, *table.shape[1:]]."""
    rows = table.index_select(0, raw.reshape(-1).to(torch.int32))
    return rows.view(*raw.shape, *table.shape[1:])


def _all_bytes(device: torch.device) -> Tensor:
    # Built on the device at each call: no state to keep, and no host copy inside a captured graph.
    return torch.arange(256, device=device, dtype=torch.int32).to(torch.uint8)


def _e4m3_table(device: torch.device) -> Tensor:
    # A 256-entry table: torch's CPU cast from float8 is a scalar loop, about three times slower.
    return _all_bytes(device).view(torch.float8_e4m3fn).to(torch.float32)


def _decode_pairs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., 2n] of packed [..., n], one lookup a byte."""
    table = e2m1_decode(unpack_e2m1(_all_bytes(packed.device).unsqueeze(-1))).to(dtype)
    return _lookup(table, _as_bytes(packed, "packed")).flatten(-2)
