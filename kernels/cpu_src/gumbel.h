// Gumbel noise of token ids, a function of (seed, position, id): kernels/reference/gumbel_noise.py has the formulas.
#pragma once
#include "vec.h"

namespace wl {

typedef uint64_t u64x16 __attribute__((vector_size(128)));

// No token has more noise than this: the largest -log E, at v = 2^-33.
constexpr float kMaxNoise = 22.9f;

// High and low words of factor * x.
inline void multiply_words(uint32_t factor, u32x16 x, u32x16& high, u32x16& low) {
    u64x16 product = __builtin_convertvector(x, u64x16) * (uint64_t)factor;
    high = __builtin_convertvector(product >> 32, u32x16);
    low = x * factor;
}

// Philox4x32-10 of counters (position, quad + lane, 0): four words of each of 16 lanes.
inline void philox(uint64_t seed, uint64_t position, uint32_t quad, u32x16 words[4]) {
    const u32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    u32x16 x0 = (u32x16{}) + (uint32_t)position, x1 = (u32x16{}) + (uint32_t)(position >> 32);
    u32x16 x2 = lanes + quad, x3{};
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        u32x16 high0, low0, high1, low1;
        multiply_words(0xD2511F53u, x0, high0, low0);
        multiply_words(0xCD9E8D57u, x2, high1, low1);
        x0 = high1 ^ x1 ^ k0;
        x1 = low1;
        x2 = high0 ^ x3 ^ k1;
        x3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = x0, words[1] = x1, words[2] = x2, words[3] = x3;
}

inline f32x16 noise_of_words(u32x16 words) {
    f32x16 v = (__builtin_convertvector(words, f32x16) + 0.5f) * 0x1p-32f;
    v = min16(v, splat(1.0f - 0x1p-24f));
    f32x16 series = v + v * v * (0.5f + v * (1.0f / 3 + v * 0.25f));
    return -log16(v < 1.0f / 64 ? series : -log16(1.0f - v));
}

// noise[64] of token ids 64 * block ...
inline void block_noise(uint64_t seed, uint64_t position, int64_t block, float* noise) {
    u32x16 words[4];
    philox(seed, position, (uint32_t)(16 * block), words);
    float by_word[4][16];
    for (int w = 0; w < 4; w++) store16(by_word[w], noise_of_words(words[w]));
    for (int i = 0; i < 64; i++) noise[i] = by_word[i & 3][i >> 2];
}

}  // namespace wl
