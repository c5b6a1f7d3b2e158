// The tiled weight layout: 16 output rows side by side, so that one vector register holds 4 columns of 16 rows and a
// product needs no horizontal sum. A tile is a sequence of blocks along the input; a block holds the same bits as the
// GGUF blocks of its 16 rows (codes in bit planes, scales as stored), 0 to 4 % larger where 6-bit scales become bytes.
//
// Block:   float16 d[16] | float16 m[16] (when it has minima)
//          | super-blocks only: int8 scale[groups][16], uint8 minimum[groups][16]   (Q2_K: one byte, scale | minimum << 4)
//          | per 32 columns: the planes
// Planes of 32 columns; "code c" is column c, byte 4*row + (c & 3) of a 64-byte vector, vector c >> 2 of 8:
//   4-bit base:  4 vectors, vector v = codes of vector v | codes of vector v+4 << 4
//   2-bit:       2 vectors, vector v = sum over s of codes of vector v+2s << 2s  (as base, or as bits 4..5 over a 4-bit base)
//   1-bit high:  8 words of 64 bits, one a vector
//   8-bit base:  8 vectors
// Weight = scale * (code - zero_point) - minimum; codes are unsigned.
#pragma once
#include "vec.h"

namespace wl {

constexpr int kTileRows = 16;

// Ids shared with kernels/cpu_ops/tile_formats.py.
enum FormatId : int {
    kQ4_0 = 0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS, kNumFormats
};

struct Format {
    int base_bits;     // 2, 4 or 8
    int high_bits;     // 0, 1 or 2 more bits in planes of their own
    int block_cols;    // columns that share d: 32, or 256 with a scale a group
    int group_cols;    // columns that share a scale: 32 or 16
    bool has_minimum;
    bool packed_scales;  // Q2_K: 4-bit scale and 4-bit minimum in one byte
    int zero_point;
    bool lookup;       // the 4-bit code indexes kIQ4Values
    int gguf_bytes;    // bytes of a GGUF block

    constexpr int groups() const { return block_cols / group_cols; }
    constexpr int plane_bytes() const { return 64 * (base_bits + high_bits); }
    constexpr bool is_super() const { return block_cols == 256; }
    constexpr int header_bytes() const {
        int d = 32 * (has_minimum ? 2 : 1);
        if (!is_super()) return d;
        return d + 16 * groups() * (has_minimum && !packed_scales ? 2 : 1);
    }
    constexpr int block_bytes() const { return header_bytes() + (block_cols / 32) * plane_bytes(); }
};

constexpr Format kFormats[kNumFormats] = {
    /* Q4_0   */ {4, 0, 32, 32, false, false, 8, false, 18},
    /* Q4_1   */ {4, 0, 32, 32, true, false, 0, false, 20},
    /* Q5_0   */ {4, 1, 32, 32, false, false, 16, false, 22},
    /* Q5_1   */ {4, 1, 32, 32, true, false, 0, false, 24},
    /* Q8_0   */ {8, 0, 32, 32, false, false, 128, false, 34},
    /* Q2_K   */ {2, 0, 256, 16, true, true, 0, false, 84},
    /* Q3_K   */ {2, 1, 256, 16, false, false, 4, false, 110},
    /* Q4_K   */ {4, 0, 256, 32, true, false, 0, false, 144},
    /* Q5_K   */ {4, 1, 256, 32, true, false, 0, false, 176},
    /* Q6_K   */ {4, 2, 256, 16, false, false, 32, false, 210},
    /* IQ4_NL */ {4, 0, 32, 32, false, false, 128, true, 18},
    /* IQ4_XS */ {4, 0, 256, 32, false, false, 128, true, 136},
};

// The non-linear 4-bit code book of ggml, plus 128.
alignas(16) constexpr uint8_t kIQ4Values[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// Codes of 32 columns: eight vectors of [16 rows][4 columns].
template <int F>
inline void unpack_codes(const uint8_t* planes, u8x64 codes[8]) {
    constexpr Format f = kFormats[F];
    if constexpr (f.base_bits == 8) {
        for (int v = 0; v < 8; v++) codes[v] = load_raw<u8x64>(planes + 64 * v);
    } else if constexpr (f.base_bits == 4) {
        for (int v = 0; v < 4; v++) {
            u8x64 both = load_raw<u8x64>(planes + 64 * v);
            codes[v] = both & 15;
            codes[v + 4] = both >> 4;
        }
    } else {
        for (int v = 0; v < 2; v++) {
            u8x64 four = load_raw<u8x64>(planes + 64 * v);
            for (int s = 0; s < 4; s++) codes[v + 2 * s] = (four >> (2 * s)) & 3;
        }
    }
    const uint8_t* high = planes + 64 * f.base_bits;
    if constexpr (f.high_bits == 2) {
        for (int v = 0; v < 2; v++) {
            u8x64 four = load_raw<u8x64>(high + 64 * v);
            for (int s = 0; s < 4; s++) codes[v + 2 * s] |= ((four >> (2 * s)) & 3) << 4;
        }
    } else if constexpr (f.high_bits == 1) {
        for (int v = 0; v < 8; v++) {
            uint64_t mask = load_raw<uint64_t>(high + 8 * v);
#if defined(__AVX512BW__)
            codes[v] = (u8x64)_mm512_mask_add_epi8((__m512i)codes[v], mask, (__m512i)codes[v],
                                                   _mm512_set1_epi8(1 << f.base_bits));
#else
            for (int i = 0; i < 64; i++) codes[v][i] |= (uint8_t)(((mask >> i) & 1) << f.base_bits);
#endif
        }
    }
    if constexpr (f.lookup) {
        for (int v = 0; v < 8; v++) {
#if defined(__AVX512BW__)
            __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)kIQ4Values));
            codes[v] = (u8x64)_mm512_shuffle_epi8(table, (__m512i)codes[v]);
#else
            for (int i = 0; i < 64; i++) codes[v][i] = kIQ4Values[codes[v][i]];
#endif
        }
    }
}

// Scale and minimum of the 16 rows for group `group` of a block. `minimum` is what is added: negative for K formats.
template <int F>
inline void load_scales(const uint8_t* block, int group, f32x16 d, f32x16 m, f32x16& scale, f32x16& minimum) {
    constexpr Format f = kFormats[F];
    if constexpr (!f.is_super()) {
        scale = d;
        minimum = m;
    } else {
        const uint8_t* scales = block + (f.has_minimum ? 64 : 32) + 16 * group;
        if constexpr (f.packed_scales) {
            i32x16 both = __builtin_convertvector(load_raw<u8x16>(scales), i32x16);
            scale = d * __builtin_convertvector(both & 15, f32x16);
            minimum = -(m * __builtin_convertvector(both >> 4, f32x16));
        } else {
            i32x16 s = __builtin_convertvector(load_raw<i8x16>(scales), i32x16);
            scale = d * __builtin_convertvector(s, f32x16);
            if constexpr (f.has_minimum) {
                i32x16 low = __builtin_convertvector(load_raw<u8x16>(scales + 16 * f.groups()), i32x16);
                minimum = -(m * __builtin_convertvector(low, f32x16));
            }
        }
    }
}

inline size_t tile_bytes(int format, int64_t in) {
    return (size_t)(in / kFormats[format].block_cols) * kFormats[format].block_bytes();
}

}  // namespace wl
