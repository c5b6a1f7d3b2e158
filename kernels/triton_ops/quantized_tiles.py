"""Device functions that turn planes of `quantized_planes` into values: integers as float16, scales as float32.

On the device four bytes become four float16 in a few instructions: a byte under 0x64 is 1024 + q in float16. The
interpreter has no assembler and takes the plain way.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NIBBLES = {False: "and.b32 t, $2, 0x0F0F0F0F;", True: "shr.b32 t, $2, 4; and.b32 t, t, 0x0F0F0F0F;"}
# $3: bytes with the bits above, $4: how far up those lie, the same for all four.
_ABOVE = """
    and.b32 s, $4, 255;
    shr.b32 h, $3, s;
    and.b32 h, h, {mask};
    shl.b32 h, h, 4;
    or.b32 t, t, h;"""
_MASKS = {5: "0x01010101", 6: "0x03030303"}


def _assembler(bits: int, upper: bool, exact: bool) -> tl.constexpr:
    """Four bytes in $2 → two pairs of float16 in $0 and $1."""
    above = _ABOVE.format(mask=_MASKS[bits]) if bits in _MASKS else ""
    nibbles = "mov.b32 t, $2;" if bits == 8 else _NIBBLES[upper]
    unbias = "mov.b32 s, 0x64006400; sub.rn.f16x2 $0, $0, s; sub.rn.f16x2 $1, $1, s;" if exact else ""
    return tl.constexpr(
        f"""{{
    .reg .b32 t, h, s;
    {nibbles}{above}
    prmt.b32 $0, t, 0x64646464, 0x4140;
    prmt.b32 $1, t, 0x64646464, 0x4342;
    {unbias}
    }}"""
    )


# By whether the float16 is q or 1024 + q.
_BYTE, _BYTE_EXACT = _assembler(8, False, False), _assembler(8, False, True)
_LOW_4, _LOW_4_EXACT = _assembler(4, False, False), _assembler(4, False, True)
_HIGH_4, _HIGH_4_EXACT = _assembler(4, True, False), _assembler(4, True, True)
_LOW_5, _LOW_5_EXACT = _assembler(5, False, False), _assembler(5, False, True)
_HIGH_5, _HIGH_5_EXACT = _assembler(5, True, False), _assembler(5, True, True)
_LOW_6, _LOW_6_EXACT = _assembler(6, False, False), _assembler(6, False, True)
_HIGH_6, _HIGH_6_EXACT = _assembler(6, True, False), _assembler(6, True, True)

BIAS = tl.constexpr(1024.0)


@triton.jit
def float_values(low, high, shift, UPPER: tl.constexpr, BITS: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr):
    """Bytes → q as float16, or BIAS + q where not EXACT. UPPER takes high nibbles. `high` (uint8) and `shift` (int32,
    where the lower of a position's bits lie) count for 5 and 6 bits only."""
    if not ASM:
        if BITS == 8:
            q = low.to(tl.int32)
        elif UPPER:
            q = low.to(tl.int32) >> 4
        else:
            q = low.to(tl.int32) & 15
        if BITS == 5:
            q += ((high.to(tl.int32) >> (shift + UPPER)) & 1) << 4
        elif BITS == 6:
            q += ((high.to(tl.int32) >> (shift + 2 * UPPER)) & 3) << 4
        return (q if EXACT else q + 1024).to(tl.float16)
    if BITS == 8:
        return _four_bytes(_BYTE_EXACT if EXACT else _BYTE, low)
    if BITS == 4:
        if UPPER:
            return _four_bytes(_HIGH_4_EXACT if EXACT else _HIGH_4, low)
        return _four_bytes(_LOW_4_EXACT if EXACT else _LOW_4, low)
    if BITS == 5:
        if UPPER:
            return _four_wide(_HIGH_5_EXACT if EXACT else _HIGH_5, low, high, shift + 1)
        return _four_wide(_LOW_5_EXACT if EXACT else _LOW_5, low, high, shift)
    if UPPER:
        return _four_wide(_HIGH_6_EXACT if EXACT else _HIGH_6, low, high, shift + 2)
    return _four_wide(_LOW_6_EXACT if EXACT else _LOW_6, low, high, shift)


@triton.jit
def _four_bytes(ASSEMBLER: tl.constexpr, low):
    return tl.inline_asm_elementwise(ASSEMBLER, "=r,=r,r", [low], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def _four_wide(ASSEMBLER: tl.constexpr, low, high, shift):
    return tl.inline_asm_elementwise(
        ASSEMBLER, "=r,=r,r,r,r", [low, high, shift.to(tl.uint8)], dtype=tl.float16, is_pure=True, pack=4
    )


@triton.jit
def load_tile(
    low_ptr,
    high_ptr,
    row,
    start,
    row_bytes,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Rows `row` [ROWS] of the planes over bytes start..+BLOCK_B: (low, high, shift, group, mask).

    low, high (uint8) and shift (int32) [ROWS, BLOCK_B / GROUP, GROUP] are what `float_values` takes. group
    [1, BLOCK_B / GROUP] numbers the low nibbles' groups (the high ones' lie 32 // GROUP further); mask: within the row.
    """
    GROUPS: tl.constexpr = BLOCK_B // GROUP
    byte = start + tl.arange(0, BLOCK_B)
    inside = byte < row_bytes
    low_ptrs = low_ptr + row.to(tl.int64)[:, None] * row_bytes + byte[None, :]
    low = tl.load(low_ptrs, mask=inside[None, :], other=0, eviction_policy="evict_first")
    low = tl.reshape(low, (ROWS, GROUPS, GROUP))
    high, shift = low, low
    if BITS == 5 or BITS == 6:
        UNITS_A_BYTE: tl.constexpr = 4 if BITS == 5 else 2
        unit = byte // 32
        high_bytes = tl.cdiv(row_bytes // 32, UNITS_A_BYTE) * 32
        high_ptrs = high_ptr + row.to(tl.int64)[:, None] * high_bytes + (unit // UNITS_A_BYTE * 32 + byte % 32)[None, :]
        high = tl.reshape(tl.load(high_ptrs, mask=inside[None, :], other=0), (ROWS, GROUPS, GROUP))
        shift = (unit % UNITS_A_BYTE) * (8 // UNITS_A_BYTE)
        shift = tl.broadcast_to(tl.reshape(shift, (1, GROUPS, GROUP)), (ROWS, GROUPS, GROUP))
    byte_group = start // GROUP + tl.arange(0, GROUPS)
    mask = (byte_group * GROUP < row_bytes)[None, :]
    if BITS == 8:
        group = byte_group
    elif GROUP == 32:
        group = 2 * byte_group
    else:
        group = byte_group // 2 * 4 + byte_group % 2
    return low, high, shift, group[None, :], mask


@triton.jit
def group_scales(
    scale_ptr,
    minimum_ptr,
    sub_scale_ptr,
    sub_minimum_ptr,
    row,
    group,
    mask,
    groups_a_row,
    ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    IS_NESTED: tl.constexpr,
    GROUPS_A_BLOCK: tl.constexpr,
):
    """(scale, offset) float32 of groups: value = scale × q + offset. `row` and `group` broadcast to a tile's shape."""
    if IS_NESTED:
        at = row * (groups_a_row // GROUPS_A_BLOCK) + group // GROUPS_A_BLOCK
        scale = tl.load(scale_ptr + at, mask=mask, other=0.0).to(tl.float32)
        scale *= tl.load(sub_scale_ptr + row * groups_a_row + group, mask=mask, other=0).to(tl.float32)
        if HAS_MINIMUM:
            offset = -tl.load(minimum_ptr + at, mask=mask, other=0.0).to(tl.float32)
            offset *= tl.load(sub_minimum_ptr + row * groups_a_row + group, mask=mask, other=0).to(tl.float32)
        else:
            offset = -ZERO * scale
    else:
        scale = tl.load(scale_ptr + row * groups_a_row + group, mask=mask, other=0.0).to(tl.float32)
        if HAS_MINIMUM:
            offset = -tl.load(minimum_ptr + row * groups_a_row + group, mask=mask, other=0.0).to(tl.float32)
        else:
            offset = -ZERO * scale
    return scale, offset


def has_assembler() -> bool:
    """Whether launches compile for a GPU: the interpreter has no assembler."""
    return not triton.knobs.runtime.interpret
