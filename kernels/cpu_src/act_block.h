// Activations as integers: 15 bits and a sign per 32 columns, relative to the largest of them, so rounding costs 2^-15 of
// that. With VNNI the 15 bits are two signed bytes, x = 128 * high + low, each multiplied with the codes on its own.
#pragma once
#include <cmath>

#include "vec.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WL_VNNI 1
#endif

namespace wl {

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

}  // namespace wl
