// 16-lane vectors in GCC vector extensions: one source for AVX-512, AVX2 and arm64; the compiler splits what is too wide.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace wl {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

// Element types as Python passes them.
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

template <typename V>
inline V load_raw(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline f32x16 splat(float x) { return f32x16{} + x; }

inline f32x16 load16(const float* p) { return load_raw<f32x16>(p); }
inline f32x16 load16(const bf16* p) {
    u32x16 wide = __builtin_convertvector(load_raw<u16x16>(p), u32x16) << 16;
    return (f32x16)wide;
}

inline void store16(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }
inline void store16(bf16* p, f32x16 v) {
    // Round to nearest even; a NaN keeps its sign and a set mantissa bit.
    u32x16 bits = (u32x16)v;
    u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    u32x16 is_nan = (u32x16)((bits & 0x7fffffffu) > 0x7f800000u);
    u16x16 narrow = __builtin_convertvector((rounded & ~is_nan) | (((bits >> 16) | 0x40u) & is_nan), u16x16);
    std::memcpy(p, &narrow, sizeof narrow);
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline void from_float(float* p, float x) { *p = x; }
inline void from_float(bf16* p, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        p->bits = (uint16_t)((bits >> 16) | 0x40u);
    else
        p->bits = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float reduce_add(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s[4] = {};
    for (int i = 0; i < 16; i++) s[i & 3] += v[i];
    return (s[0] + s[2]) + (s[1] + s[3]);
#endif
}

// Sums of the lanes of four vectors: halves, then neighbours, then neighbouring pairs, then the two that are left.
inline void reduce_add4(const f32x16 v[4], float sums[4]) {
#if defined(__AVX512F__)
    __m256 half[4];
    for (int i = 0; i < 4; i++)
        half[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)v[i]), _mm512_extractf32x8_ps((__m512)v[i], 1));
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
    for (int i = 0; i < 4; i++) sums[i] = reduce_add(v[i]);
#endif
}

inline f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }
inline f32x16 min16(f32x16 a, f32x16 b) { return a < b ? a : b; }

inline float reduce_max(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float m = v[0];
    for (int i = 1; i < 16; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

inline f32x16 abs16(f32x16 v) { return (f32x16)((u32x16)v & 0x7fffffffu); }

// IEEE half to float for finite values: exponent rebias by one multiplication, subnormals included.
inline f32x16 half_to_float(const void* p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    u32x16 h = __builtin_convertvector(load_raw<u16x16>(p), u32x16);
    f32x16 magnitude = (f32x16)((h & 0x7fffu) << 13) * 0x1p112f;
    return (f32x16)((u32x16)magnitude | ((h & 0x8000u) << 16));
#endif
}

inline f32x16 load16(const f16* p) { return half_to_float(p); }

// The first n < 16 elements at p, zeros behind them; and the way back.
template <typename T>
inline f32x16 load_part(const T* p, int64_t n) {
    if (n >= 16) return load16(p);
    T buffer[16] = {};
    std::memcpy(buffer, p, (size_t)n * sizeof(T));
    return load16(buffer);
}
template <typename T>
inline void store_part(T* p, f32x16 v, int64_t n) {
    if (n >= 16) return store16(p, v);
    T buffer[16];
    store16(buffer, v);
    std::memcpy(p, buffer, (size_t)n * sizeof(T));
}

// exp(x), relative error about 1e-7: 2^n times a degree-6 polynomial on [-ln2/2, ln2/2]; x below -87 gives about 1e-38.
inline f32x16 exp16(f32x16 x) {
    x = min16(max16(x, splat(-87.3f)), splat(88.3f));
    const float rounding = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    f32x16 shifted = x * 1.44269504f + rounding;
    f32x16 n = shifted - rounding;
    f32x16 r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    f32x16 p = splat(1.0f / 720);
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (f32x16)((i32x16)p + ((i32x16)shifted << 23));
}

// ln(x) of positive normal x, relative error about 1e-7: exponent times ln 2 plus the logarithm of the mantissa in
// [sqrt(1/2), sqrt(2)), whose polynomial is that of Cephes' logf (Moshier 1989).
inline f32x16 log16(f32x16 x) {
    i32x16 bits = (i32x16)x - 0x3f3504f3;  // sqrt(1/2)
    f32x16 exponent = __builtin_convertvector(bits >> 23, f32x16);
    f32x16 m = (f32x16)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f, square = m * m;
    f32x16 p = splat(7.0376836292e-2f);
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    f32x16 low = p * m * square - 2.12194440e-4f * exponent - 0.5f * square;
    return (m + low) + 0.693359375f * exponent;
}

inline f32x16 tanh16(f32x16 x) { return 1.0f - 2.0f / (exp16(2.0f * x) + 1.0f); }

}  // namespace wl
