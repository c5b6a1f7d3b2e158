// GGUF blocks to tiles. Block layouts: ggml's ggml-common.h structures, checked against the `gguf` package in tests.
#include <cstddef>

#include "parallel.h"
#include "tile_format.h"

namespace wl {
namespace {

// One row's block, taken apart: codes, float16 bits of d and m, per-group scales and minima.
struct Codes {
    uint8_t code[256];
    uint16_t d = 0, m = 0;
    int8_t scale[16];
    uint8_t minimum[16];
};

inline uint16_t read16(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }

inline void nibbles32(const uint8_t* qs, uint8_t* code) {
    for (int i = 0; i < 16; i++) {
        code[i] = qs[i] & 15;
        code[i + 16] = qs[i] >> 4;
    }
}

void read_5bit(const uint8_t* qh, const uint8_t* qs, Codes& c) {
    nibbles32(qs, c.code);
    uint32_t high = load_raw<uint32_t>(qh);
    for (int i = 0; i < 32; i++) c.code[i] |= (uint8_t)(((high >> i) & 1) << 4);
}

// Eight 6-bit scales and eight 6-bit minima in 12 bytes (Q4_K, Q5_K).
void read_k_scales(const uint8_t* s, Codes& c) {
    for (int j = 0; j < 4; j++) {
        c.scale[j] = (int8_t)(s[j] & 63);
        c.minimum[j] = s[j + 4] & 63;
        c.scale[j + 4] = (int8_t)((s[j + 8] & 15) | (s[j] >> 6) << 4);
        c.minimum[j + 4] = (uint8_t)(s[j + 8] >> 4 | (s[j + 4] >> 6) << 4);
    }
}

void read_k_nibbles(const uint8_t* qs, Codes& c) {
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i++) {
            c.code[64 * j + i] = qs[32 * j + i] & 15;
            c.code[64 * j + 32 + i] = qs[32 * j + i] >> 4;
        }
}

void read_q2_k(const uint8_t* b, Codes& c) {
    for (int e = 0; e < 256; e++) c.code[e] = (b[16 + (e / 128) * 32 + e % 32] >> (2 * (e / 32 % 4))) & 3;
    for (int g = 0; g < 16; g++) c.scale[g] = (int8_t)b[g];
    c.d = read16(b + 80);
    c.m = read16(b + 82);
}

void read_q3_k(const uint8_t* b, Codes& c) {
    const uint8_t *hmask = b, *qs = b + 32, *s = b + 96;
    for (int e = 0; e < 256; e++) {
        int low = (qs[(e / 128) * 32 + e % 32] >> (2 * (e / 32 % 4))) & 3;
        c.code[e] = (uint8_t)(low | ((hmask[e % 32] >> (e / 32)) & 1) << 2);
    }
    for (int g = 0; g < 16; g++) {
        int low = g < 8 ? s[g] & 15 : s[g - 8] >> 4;
        c.scale[g] = (int8_t)((low | ((s[8 + g % 4] >> (2 * (g / 4))) & 3) << 4) - 32);
    }
    c.d = read16(b + 108);
}

void read_q5_k(const uint8_t* b, Codes& c) {
    read_k_scales(b + 4, c);
    read_k_nibbles(b + 48, c);
    for (int e = 0; e < 256; e++) c.code[e] |= (uint8_t)(((b[16 + e % 32] >> (e / 32)) & 1) << 4);
}

void read_q6_k(const uint8_t* b, Codes& c) {
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i++) {
            const uint8_t *ql = b + 64 * half, high = b[128 + 32 * half + i];
            uint8_t* out = c.code + 128 * half + i;
            out[0] = (uint8_t)((ql[i] & 15) | (high & 3) << 4);
            out[32] = (uint8_t)((ql[i + 32] & 15) | (high >> 2 & 3) << 4);
            out[64] = (uint8_t)(ql[i] >> 4 | (high >> 4 & 3) << 4);
            out[96] = (uint8_t)(ql[i + 32] >> 4 | (high >> 6) << 4);
        }
    std::memcpy(c.scale, b + 192, 16);
    c.d = read16(b + 208);
}

void read_iq4_xs(const uint8_t* b, Codes& c) {
    uint16_t high = read16(b + 2);
    for (int g = 0; g < 8; g++) {
        nibbles32(b + 8 + 16 * g, c.code + 32 * g);
        int low = b[4 + g / 2] >> (4 * (g % 2)) & 15;
        c.scale[g] = (int8_t)((low | (high >> (2 * g) & 3) << 4) - 32);
    }
}

void read_block(int format, const uint8_t* b, Codes& c) {
    c.d = read16(b);
    switch (format) {
        case kQ4_0: case kIQ4_NL: nibbles32(b + 2, c.code); break;
        case kQ4_1: c.m = read16(b + 2); nibbles32(b + 4, c.code); break;
        case kQ5_0: read_5bit(b + 2, b + 6, c); break;
        case kQ5_1: c.m = read16(b + 2); read_5bit(b + 4, b + 8, c); break;
        case kQ8_0: for (int i = 0; i < 32; i++) c.code[i] = b[2 + i] ^ 0x80; break;
        case kQ2_K: read_q2_k(b, c); break;
        case kQ3_K: read_q3_k(b, c); break;
        case kQ4_K: c.m = read16(b + 2); read_k_scales(b + 4, c); read_k_nibbles(b + 16, c); break;
        case kQ5_K: c.m = read16(b + 2); read_q5_k(b, c); break;
        case kQ6_K: read_q6_k(b, c); break;
        case kIQ4_XS: read_iq4_xs(b, c); break;
    }
}

// Writes one row's 32 codes into the planes; the planes start as zeros.
void write_planes(const Format& f, const uint8_t* code, int row, uint8_t* planes) {
    uint8_t* high = planes + 64 * f.base_bits;
    for (int col = 0; col < 32; col++) {
        int v = col >> 2, byte = 4 * row + (col & 3);
        unsigned q = code[col];
        if (f.base_bits == 8) planes[64 * v + byte] = (uint8_t)q;
        if (f.base_bits == 4) planes[64 * (v & 3) + byte] |= (uint8_t)((q & 15) << (4 * (v >> 2)));
        if (f.base_bits == 2) planes[64 * (v & 1) + byte] |= (uint8_t)((q & 3) << (2 * (v >> 1)));
        if (f.high_bits == 2) high[64 * (v & 1) + byte] |= (uint8_t)((q >> 4) << (2 * (v >> 1)));
        if (f.high_bits == 1) high[8 * v + byte / 8] |= (uint8_t)((q >> f.base_bits & 1) << (byte % 8));
    }
}

void write_block(const Format& f, const Codes& c, int row, uint8_t* block) {
    std::memcpy(block + 2 * row, &c.d, 2);
    if (f.has_minimum) std::memcpy(block + 32 + 2 * row, &c.m, 2);
    if (f.is_super()) {
        uint8_t* scales = block + (f.has_minimum ? 64 : 32);
        for (int g = 0; g < f.groups(); g++) {
            scales[16 * g + row] = (uint8_t)c.scale[g];
            if (f.has_minimum && !f.packed_scales) scales[16 * (f.groups() + g) + row] = c.minimum[g];
        }
    }
    for (int part = 0; part < f.block_cols / 32; part++)
        write_planes(f, c.code + 32 * part, row, block + f.header_bytes() + part * f.plane_bytes());
}

}  // namespace
}  // namespace wl

extern "C" {
#pragma GCC visibility push(default)

// Bytes of a weight [out, in] in tiles; the last tile is padded with rows of zeros.
int64_t wl_tiled_bytes(int format, int64_t out, int64_t in) {
    return (out + wl::kTileRows - 1) / wl::kTileRows * (int64_t)wl::tile_bytes(format, in);
}

// source: GGUF rows, row_bytes apart. tiles: wl_tiled_bytes zeroed bytes.
void wl_repack(int format, const uint8_t* source, int64_t row_bytes, int64_t out, int64_t in, uint8_t* tiles) {
    using namespace wl;
    const Format& f = kFormats[format];
    const int64_t blocks = in / f.block_cols, num_tiles = (out + kTileRows - 1) / kTileRows;
    parallel_for(num_tiles, true, [&](int64_t tile) {
        Codes c;
        for (int row = 0; row < kTileRows && tile * kTileRows + row < out; row++)
            for (int64_t b = 0; b < blocks; b++) {
                read_block(format, source + (tile * kTileRows + row) * row_bytes + b * f.gguf_bytes, c);
                write_block(f, c, row, tiles + (tile * blocks + b) * f.block_bytes());
            }
    });
}

#pragma GCC visibility pop
}
