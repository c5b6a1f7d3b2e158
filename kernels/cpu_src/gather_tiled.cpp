// Rows of a tiled weight in floats: token embeddings, and the way back from tiles.
#include <vector>

#include "parallel.h"
#include "tile_format.h"

namespace wl {
namespace {

template <int F>
void dequantize_tile(const uint8_t* tile, int64_t blocks, float* out) {  // out [blocks * block_cols][16]
    constexpr Format f = kFormats[F];
    for (int64_t b = 0; b < blocks; b++, tile += f.block_bytes()) {
        f32x16 d = half_to_float(tile), m{};
        if constexpr (f.has_minimum) m = half_to_float(tile + 32);
        for (int part = 0; part < f.block_cols / 32; part++) {
            u8x64 codes[8];
            unpack_codes<F>(tile + f.header_bytes() + part * f.plane_bytes(), codes);
            for (int col = 0; col < 32; col++, out += 16) {
                f32x16 scale, minimum{};
                load_scales<F>(tile, (32 * part + col) / f.group_cols, d, m, scale, minimum);
                i32x16 q = ((i32x16)codes[col >> 2] >> (8 * (col & 3))) & 255;
                f32x16 w = scale * __builtin_convertvector(q - f.zero_point, f32x16);
                if constexpr (f.has_minimum) w += minimum;
                store16(out, w);
            }
        }
    }
}

using DequantizeTile = void (*)(const uint8_t*, int64_t, float*);
constexpr DequantizeTile kDequantize[kNumFormats] = {
    dequantize_tile<kQ4_0>, dequantize_tile<kQ4_1>, dequantize_tile<kQ5_0>, dequantize_tile<kQ5_1>,
    dequantize_tile<kQ8_0>, dequantize_tile<kQ2_K>, dequantize_tile<kQ3_K>, dequantize_tile<kQ4_K>,
    dequantize_tile<kQ5_K>, dequantize_tile<kQ6_K>, dequantize_tile<kIQ4_NL>, dequantize_tile<kIQ4_XS>};

template <typename Y>
void gather_rows(int format, const int32_t* ids, int64_t count, int64_t in, const uint8_t* tiles, float factor, Y* y) {
    const int64_t bytes = (int64_t)tile_bytes(format, in), blocks = in / kFormats[format].block_cols;
    parallel_for(count, count > 4, [&](int64_t i) {
        std::vector<float> columns((size_t)in * 16);
        kDequantize[format](tiles + ids[i] / kTileRows * bytes, blocks, columns.data());
        const float* lane = columns.data() + ids[i] % kTileRows;
        for (int64_t k = 0; k < in; k++) from_float(y + i * in + k, lane[16 * k] * factor);
    });
}

}  // namespace
}  // namespace wl

extern "C" {
#pragma GCC visibility push(default)

// Rows ids [count] of the weight [out, in], times factor, as y [count, in]. Returns -1, or, with nothing written, the
// index of an id outside the weight.
int64_t wl_gather_tiled(int format, const int32_t* ids, int64_t count, int64_t out, int64_t in, const uint8_t* tiles,
                        float factor, void* y, int y_dtype) {
    using namespace wl;
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= out) return i;
    if (y_dtype == kFloat32)
        gather_rows(format, ids, count, in, tiles, factor, (float*)y);
    else
        gather_rows(format, ids, count, in, tiles, factor, (bf16*)y);
    return -1;
}

#pragma GCC visibility pop
}
