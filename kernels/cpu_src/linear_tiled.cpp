// y = x W^T (+ bias) for tiled quantised weights: integer products of rounded activations (act_block.h), so a product
// costs half of float32 FMA and weights are never expanded.
#include <vector>

#include "act_block.h"
#include "parallel.h"
#include "tile_format.h"

namespace wl {
namespace {

// One tile times R rows of activations; block c of row r is x[c * stride + r].
template <int F, int R>
void tile_product(const uint8_t* tile, int64_t blocks, const ActBlock* x, int64_t stride, f32x16* out) {
    constexpr Format f = kFormats[F];
    f32x16 acc[R];
    for (int r = 0; r < R; r++) acc[r] = f32x16{};
    for (int64_t b = 0; b < blocks; b++) {
        f32x16 d = half_to_float(tile), m{};
        if constexpr (f.has_minimum) m = half_to_float(tile + 32);
        const uint8_t* planes = tile + f.header_bytes();
#pragma GCC unroll 1
        for (int part = 0; part < f.block_cols / 32; part++, planes += f.plane_bytes(), x += stride) {
            // Far enough ahead to hide memory at one row; the tiles of a thread are one contiguous stream.
            if constexpr (R == 1)
                for (int line = 0; line < f.plane_bytes() + 64; line += 64) __builtin_prefetch(planes + 4096 + line);
            u8x64 codes[8];
            unpack_codes<F>(planes, codes);
            f32x16 scale[2], minimum[2];
            if constexpr (f.group_cols == 32) {
                load_scales<F>(tile, part, d, m, scale[0], minimum[0]);
            } else {
                load_scales<F>(tile, 2 * part, d, m, scale[0], minimum[0]);
                load_scales<F>(tile, 2 * part + 1, d, m, scale[1], minimum[1]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const ActBlock& a = x[r];
                if constexpr (f.group_cols == 32) {
                    i32x16 sum = dot<0, 8>(codes, a, -f.zero_point * (a.sum[0] + a.sum[1]));
                    if constexpr (f.has_minimum) acc[r] += minimum[0] * a.total;
                    acc[r] += (scale[0] * a.scale) * __builtin_convertvector(sum, f32x16);
                } else {
                    f32x16 both = scale[0] * __builtin_convertvector(dot<0, 4>(codes, a, -f.zero_point * a.sum[0]), f32x16);
                    both += scale[1] * __builtin_convertvector(dot<4, 4>(codes, a, -f.zero_point * a.sum[1]), f32x16);
                    if constexpr (f.has_minimum) both += minimum[0] * (float)a.sum[0] + minimum[1] * (float)a.sum[1];
                    acc[r] += both * a.scale;
                }
            }
        }
        tile += f.block_bytes();
    }
    for (int r = 0; r < R; r++) out[r] = acc[r];
}

using TileProduct = void (*)(const uint8_t*, int64_t, const ActBlock*, int64_t, f32x16*);
#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 8;
#else
constexpr int kRowsAtOnce = 2;  // more sums than that leave the registers, and take a minute to compile
#endif

template <int F>
TileProduct pick_rows(int rows) {
#if defined(__AVX512F__)
    static const TileProduct by_rows[kRowsAtOnce] = {
        tile_product<F, 1>, tile_product<F, 2>, tile_product<F, 3>, tile_product<F, 4>,
        tile_product<F, 5>, tile_product<F, 6>, tile_product<F, 7>, tile_product<F, 8>};
#else
    static const TileProduct by_rows[kRowsAtOnce] = {tile_product<F, 1>, tile_product<F, 2>};
#endif
    return by_rows[rows - 1];
}

TileProduct pick(int format, int rows) {
    switch (format) {
        case kQ4_0: return pick_rows<kQ4_0>(rows);
        case kQ4_1: return pick_rows<kQ4_1>(rows);
        case kQ5_0: return pick_rows<kQ5_0>(rows);
        case kQ5_1: return pick_rows<kQ5_1>(rows);
        case kQ8_0: return pick_rows<kQ8_0>(rows);
        case kQ2_K: return pick_rows<kQ2_K>(rows);
        case kQ3_K: return pick_rows<kQ3_K>(rows);
        case kQ4_K: return pick_rows<kQ4_K>(rows);
        case kQ5_K: return pick_rows<kQ5_K>(rows);
        case kQ6_K: return pick_rows<kQ6_K>(rows);
        case kIQ4_NL: return pick_rows<kIQ4_NL>(rows);
        default: return pick_rows<kIQ4_XS>(rows);
    }
}

struct Call {
    int format;
    int64_t in, out;
    const uint8_t* tiles;
    const float* bias;
};

template <typename Y>
void store_tile(const Call& c, int64_t tile, f32x16 v, Y* y) {
    int64_t first = tile * kTileRows, left = c.out - first;
    if (left >= kTileRows) {
        if (c.bias) v += load16(c.bias + first);
        store16(y + first, v);
    } else {
        for (int64_t i = 0; i < left; i++) from_float(y + first + i, v[i] + (c.bias ? c.bias[first + i] : 0.0f));
    }
}

// Rows [0, rows) of quantised activations times tiles [begin, end).
template <typename Y>
void multiply_tiles(const Call& c, const ActBlock* x, int64_t rows, Y* y, int64_t begin, int64_t end) {
    const int64_t blocks = c.in / kFormats[c.format].block_cols, bytes = (int64_t)tile_bytes(c.format, c.in);
    for (int64_t tile = begin; tile < end; tile++)
        for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
            int count = (int)(rows - row < kRowsAtOnce ? rows - row : kRowsAtOnce);
            f32x16 result[kRowsAtOnce];
            pick(c.format, count)(c.tiles + tile * bytes, blocks, x + row, rows, result);
            for (int r = 0; r < count; r++) store_tile(c, tile, result[r], y + (row + r) * c.out);
        }
}

template <typename X>
void quantize_row(const X* x, int64_t in, ActBlock* blocks, int64_t stride) {
    for (int64_t b = 0; b < in / 32; b++) quantize_block(x + 32 * b, blocks[b * stride]);
}

template <typename X, typename Y>
void linear(const Call& c, const X* x, int64_t x_stride, int64_t rows, Y* y) {
    constexpr int64_t kPanel = 128;  // rows whose codes stay in the second-level cache
    // Elements to round and products to sum below which a second thread costs more than it gives.
    constexpr int64_t kParallelRounding = 1 << 13, kParallelWork = 1 << 16;
    static thread_local std::vector<ActBlock> scratch;
    const int64_t blocks = c.in / 32;
    scratch.resize((size_t)(blocks * (rows < kPanel ? rows : kPanel)));
    ActBlock* act = scratch.data();
    const int64_t num_tiles = (c.out + kTileRows - 1) / kTileRows;
    for (int64_t first = 0; first < rows; first += kPanel) {
        const int64_t n = rows - first < kPanel ? rows - first : kPanel;
        const X* panel = x + first * x_stride;
        parallel_ranges(n, n * c.in >= kParallelRounding, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; r++) quantize_row(panel + r * x_stride, c.in, act + r, n);
        });
        parallel_ranges(num_tiles, n * c.in * c.out >= kParallelWork, [&](int64_t begin, int64_t end) {
            multiply_tiles(c, act, n, y + first * c.out, begin, end);
        });
    }
}

}  // namespace
}  // namespace wl

extern "C" {
#pragma GCC visibility push(default)

// x [rows, in] of x_dtype, rows x_stride elements apart; y [rows, out] of y_dtype, dense; bias [out] float32 or null.
void wl_linear_tiled(int format, const void* x, int x_dtype, int64_t x_stride, int64_t rows, int64_t in,
                     const uint8_t* tiles, int64_t out, const float* bias, void* y, int y_dtype) {
    using namespace wl;
    Call c{format, in, out, tiles, bias};
    if (x_dtype == kFloat32 && y_dtype == kFloat32)
        linear(c, (const float*)x, x_stride, rows, (float*)y);
    else if (x_dtype == kFloat32)
        linear(c, (const float*)x, x_stride, rows, (bf16*)y);
    else if (y_dtype == kFloat32)
        linear(c, (const bf16*)x, x_stride, rows, (float*)y);
    else
        linear(c, (const bf16*)x, x_stride, rows, (bf16*)y);
}

#pragma GCC visibility pop
}
