// y = x W^T (+ bias) for tiled quantised weights. Activations are rounded to 15 bits and a sign per 32 columns (relative
// to the largest of them: 2^-14, near float32 for this purpose) and multiplied as integers, so a product costs half of
// float32 FMA and weights are never expanded. With VNNI the 15 bits are two signed bytes, x = 128 * high + low.
#include <cmath>
#include <vector>

#include "parallel.h"
#include "tile_format.h"

namespace wl {
namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WL_VNNI 1
#endif

constexpr int kMaxCode = 127 * 128 + 63;

// 32 activations of one row. Without VNNI: int16 in the order 0 2 1 3 of each four, the pairs of multiply-add.
struct ActBlock {
#ifdef WL_VNNI
    int8_t high[32];
    int8_t low[32];
#else
    int16_t x[32];
#endif
    float scale;
    int32_t sum[2];  // of the codes, first and second 16 columns
    float total;     // scale * (sum[0] + sum[1])
};

template <typename T>
void quantize_block(const T* x, ActBlock& block) {
    f32x16 a = load16(x), b = load16(x + 16);
    float largest = reduce_max(max16(abs16(a), abs16(b)));
    // A NaN or infinity must reach the output: it poisons the scale.
    bool finite = reduce_add(a * 0.0f + b * 0.0f) == 0.0f;
    float scale = largest / kMaxCode, inverse = largest > 1e-30f && finite ? kMaxCode / largest : 0.0f;
    i32x16 q[2];
    const float rounding = 12582912.0f;
    q[0] = (i32x16)(a * inverse + rounding) - 0x4b400000;
    q[1] = (i32x16)(b * inverse + rounding) - 0x4b400000;
    for (int half = 0; half < 2; half++) {
#ifdef WL_VNNI
        i32x16 high = (q[half] + 64) >> 7, low = q[half] - (high << 7);
        i8x16 h = __builtin_convertvector(high, i8x16), l = __builtin_convertvector(low, i8x16);
        std::memcpy(block.high + 16 * half, &h, 16);
        std::memcpy(block.low + 16 * half, &l, 16);
        block.sum[half] = _mm512_reduce_add_epi32((__m512i)q[half]);
#else
        int32_t sum = 0;
        for (int i = 0; i < 16; i++) {
            constexpr int order[4] = {0, 2, 1, 3};
            block.x[16 * half + i] = (int16_t)q[half][(i & ~3) + order[i & 3]];
            sum += q[half][i];
        }
        block.sum[half] = sum;
#endif
    }
    block.scale = finite ? scale : NAN;
    block.total = block.scale * (float)(block.sum[0] + block.sum[1]);
}

// start + sum over vectors first..first+count-1 of codes times activations, 16 rows.
template <int first, int count>
inline i32x16 dot(const u8x64* codes, const ActBlock& x, int32_t start) {
#ifdef WL_VNNI
    __m512i high = _mm512_setzero_si512(), low = _mm512_set1_epi32(start);
    for (int v = first; v < first + count; v++) {
        high = _mm512_dpbusd_epi32(high, (__m512i)codes[v], _mm512_set1_epi32(load_raw<int32_t>(x.high + 4 * v)));
        low = _mm512_dpbusd_epi32(low, (__m512i)codes[v], _mm512_set1_epi32(load_raw<int32_t>(x.low + 4 * v)));
    }
    return (i32x16)_mm512_add_epi32(low, _mm512_slli_epi32(high, 7));
#elif defined(__AVX2__)
    __m256i acc[2] = {_mm256_set1_epi32(start), _mm256_set1_epi32(start)};
    const __m256i mask = _mm256_set1_epi32(0x00ff00ff);
    for (int v = first; v < first + count; v++) {
        __m256i even = _mm256_set1_epi32(load_raw<int32_t>(x.x + 4 * v));
        __m256i odd = _mm256_set1_epi32(load_raw<int32_t>(x.x + 4 * v + 2));
        for (int half = 0; half < 2; half++) {
            __m256i q = _mm256_loadu_si256((const __m256i*)&codes[v] + half);
            acc[half] = _mm256_add_epi32(acc[half], _mm256_madd_epi16(_mm256_and_si256(q, mask), even));
            acc[half] = _mm256_add_epi32(acc[half],
                                         _mm256_madd_epi16(_mm256_and_si256(_mm256_srli_epi16(q, 8), mask), odd));
        }
    }
    i32x16 result;
    std::memcpy(&result, acc, sizeof result);
    return result;
#else
    i32x16 acc = i32x16{} + start;
    for (int v = first; v < first + count; v++) {
        i32x16 q = (i32x16)codes[v];
        constexpr int order[4] = {0, 2, 1, 3};
        for (int i = 0; i < 4; i++) acc += ((q >> (8 * order[i])) & 255) * (int32_t)x.x[4 * v + i];
    }
    return acc;
#endif
}

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
constexpr int kRowsAtOnce = 8;

template <int F>
TileProduct pick_rows(int rows) {
    static const TileProduct by_rows[kRowsAtOnce] = {
        tile_product<F, 1>, tile_product<F, 2>, tile_product<F, 3>, tile_product<F, 4>,
        tile_product<F, 5>, tile_product<F, 6>, tile_product<F, 7>, tile_product<F, 8>};
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
void gather_rows(const Call& c, const int32_t* ids, int64_t count, float factor, Y* y) {
    const int64_t bytes = (int64_t)tile_bytes(c.format, c.in), blocks = c.in / kFormats[c.format].block_cols;
    parallel_for(count, count > 4, [&](int64_t i) {
        std::vector<float> columns((size_t)c.in * 16);
        kDequantize[c.format](c.tiles + ids[i] / kTileRows * bytes, blocks, columns.data());
        const float* lane = columns.data() + ids[i] % kTileRows;
        for (int64_t k = 0; k < c.in; k++) from_float(y + i * c.in + k, lane[16 * k] * factor);
    });
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

// Rows ids [count] of the weight [out, in], times factor, as y [count, in]. Returns -1, or, with nothing written, the
// index of an id outside the weight.
int64_t wl_gather_tiled(int format, const int32_t* ids, int64_t count, int64_t out, int64_t in, const uint8_t* tiles,
                        float factor, void* y, int y_dtype) {
    using namespace wl;
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= out) return i;
    Call c{format, in, out, tiles, nullptr};
    if (y_dtype == kFloat32)
        gather_rows(c, ids, count, factor, (float*)y);
    else
        gather_rows(c, ids, count, factor, (bf16*)y);
    return -1;
}

#pragma GCC visibility pop
}
