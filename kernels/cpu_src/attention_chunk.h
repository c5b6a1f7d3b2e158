// Scores and weighted sums of query rows against one chunk of 32 keys, in two forms: few rows read keys and values where
// they lie; many rows share a copy in float32 with the keys transposed, so that a vector holds scores of 16 keys.
// Both add the products of a score in one order, so a row's result does not depend on how many rows there are: lane by
// lane over d = lane, lane + 16, ..., then neighbouring lanes, neighbouring pairs and so on.
#pragma once
#include "vec.h"

namespace wl {

constexpr int kChunk = 32;  // keys

template <typename KV>
struct ChunkRows {
    const KV *key[kChunk], *value[kChunk];
};

typedef int32_t Shuffle __attribute__((vector_size(64)));

// Sums of neighbouring lanes: of a in the low half, of b in the high half.
inline f32x16 add_pairs(f32x16 a, f32x16 b) {
    const Shuffle even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const Shuffle odd = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}

// N dot products of q with keys, N lanes' shares of each side by side; N = 16 leaves product t in lane t.
template <int N, typename KV>
inline __attribute__((always_inline)) f32x16 dot_tree(const float* q, int64_t dim, const KV* const* keys) {
    if constexpr (N == 1) {
        f32x16 acc{};  // from zero: then every product is one fused multiply-add, in either form
        for (int64_t d = 0; d < dim; d += 16) acc += load16(q + d) * load16(keys[0] + d);
        return acc;
    } else {
        f32x16 low = dot_tree<N / 2>(q, dim, keys);
        return add_pairs(low, dot_tree<N / 2>(q, dim, keys + N / 2));
    }
}

// scores[r][key], q [rows][dim].
template <typename KV>
void score_direct(const float* q, int64_t rows, int64_t dim, const ChunkRows<KV>& chunk, float* scores) {
    for (int64_t r = 0; r < rows; r++, q += dim)
        for (int half = 0; half < kChunk; half += 16) {
            // A constant trip count lets the compiler keep q in registers for the usual head sizes.
            f32x16 s = dim == 64    ? dot_tree<16>(q, 64, chunk.key + half)
                       : dim == 128 ? dot_tree<16>(q, 128, chunk.key + half)
                                    : dot_tree<16>(q, dim, chunk.key + half);
            store16(scores + r * kChunk + half, s);
        }
}

// out[r][0..16 N) += sum over keys of weights[r][key] * value[key][d..d + 16 N)
template <int R, int N, typename Value>
inline void mix_block(const float* weights, Value value, int64_t dim, float* out) {
    f32x16 acc[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) acc[r][n] = load16(out + r * dim + 16 * n);
    for (int t = 0; t < kChunk; t++)
        for (int n = 0; n < N; n++) {
            f32x16 v = load16(value(t) + 16 * n);
            for (int r = 0; r < R; r++) acc[r][n] += weights[r * kChunk + t] * v;
        }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) store16(out + r * dim + 16 * n, acc[r][n]);
}

template <int R, typename Value>
void mix_columns(const float* weights, Value value, int64_t dim, float* out) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) mix_block<R, 4>(weights, [=](int t) { return value(t) + d; }, dim, out + d);
    for (; d < dim; d += 16) mix_block<R, 1>(weights, [=](int t) { return value(t) + d; }, dim, out + d);
}

// out[r] += sum over keys of weights[r][key] * value(key); four rows share what they read.
template <typename Value>
void mix(const float* weights, int64_t rows, int64_t dim, Value value, float* out) {
    for (int64_t r = 0; r < rows; r += 4, weights += 4 * kChunk, out += 4 * dim) switch (rows - r) {
            case 1: mix_columns<1>(weights, value, dim, out); break;
            case 2: mix_columns<2>(weights, value, dim, out); break;
            case 3: mix_columns<3>(weights, value, dim, out); break;
            default: mix_columns<4>(weights, value, dim, out);
        }
}

template <typename KV>
void mix_direct(const float* weights, int64_t rows, int64_t dim, const ChunkRows<KV>& chunk, float* out) {
    const KV* const* values = chunk.value;
    mix(weights, rows, dim, [=](int t) { return values[t]; }, out);
}

inline void mix_widened(const float* weights, int64_t rows, int64_t dim, const float* values, float* out) {
    mix(weights, rows, dim, [=](int t) { return values + t * dim; }, out);
}

// rows[i][j] -> rows[j][i], 16 x 16: four rounds that interleave rows i and i + 8.
inline __attribute__((always_inline)) void transpose(f32x16 rows[16]) {
    const Shuffle low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    const Shuffle high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
        f32x16 other[16];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            other[2 * i] = __builtin_shuffle(rows[i], rows[i + 8], low);
            other[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + 8], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) rows[i] = other[i];
    }
}

// keys [dim][kChunk], values [kChunk][dim], float32.
template <typename KV>
void widen_chunk(const ChunkRows<KV>& chunk, int64_t dim, float* keys, float* values) {
    for (int64_t d = 0; d < dim; d += 16) {
        for (int half = 0; half < kChunk; half += 16) {
            f32x16 rows[16];
#pragma GCC unroll 16
            for (int t = 0; t < 16; t++) rows[t] = load16(chunk.key[half + t] + d);
            transpose(rows);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) store16(keys + (d + i) * kChunk + half, rows[i]);
        }
        for (int t = 0; t < kChunk; t++) store16(values + t * dim + d, load16(chunk.value[t] + d));
    }
}

// acc[r] = the scores' shares of lanes [L, L + N) for 16 keys: the sum tree of dot_tree, 16 keys a vector.
template <int R, int L, int N>
inline __attribute__((always_inline)) void lane_tree(const float* q, const float* keys, int64_t dim, f32x16* acc) {
    if constexpr (N == 1) {
        for (int r = 0; r < R; r++) acc[r] = f32x16{};
        for (int64_t d = L; d < dim; d += 16) {
            const f32x16 key = load16(keys + d * kChunk);
            for (int r = 0; r < R; r++) acc[r] += q[r * dim + d] * key;
        }
    } else {
        f32x16 high[R];
        lane_tree<R, L, N / 2>(q, keys, dim, acc);
        lane_tree<R, L + N / 2, N / 2>(q, keys, dim, high);
        for (int r = 0; r < R; r++) acc[r] += high[r];
    }
}

template <int R>
void score_block(const float* q, const float* keys, int64_t dim, float* scores) {
    for (int half = 0; half < kChunk; half += 16) {
        f32x16 acc[R];
        if (dim == 64)
            lane_tree<R, 0, 16>(q, keys + half, 64, acc);
        else if (dim == 128)
            lane_tree<R, 0, 16>(q, keys + half, 128, acc);
        else
            lane_tree<R, 0, 16>(q, keys + half, dim, acc);
        for (int r = 0; r < R; r++) store16(scores + r * kChunk + half, acc[r]);
    }
}

inline void score_widened(const float* q, int64_t rows, int64_t dim, const float* keys, float* scores) {
    for (int64_t r = 0; r < rows; r += 4, q += 4 * dim, scores += 4 * kChunk) switch (rows - r) {
            case 1: score_block<1>(q, keys, dim, scores); break;
            case 2: score_block<2>(q, keys, dim, scores); break;
            case 3: score_block<3>(q, keys, dim, scores); break;
            default: score_block<4>(q, keys, dim, scores);
        }
}

}  // namespace wl
