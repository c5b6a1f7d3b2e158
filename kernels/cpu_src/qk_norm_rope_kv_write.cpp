// Between the QKV product and attention: per-head norm of q and k, half-split rotation, K and V into their blocks.
#include <cmath>

#include "parallel.h"
#include "vec.h"

namespace wl {
namespace {

struct Cache {
    void* data;
    int64_t block_stride, head_stride, token_stride;  // elements; the head dimension is dense
};

struct Heads {
    int64_t q, kv, dim;
};

struct Norms {
    const float *q, *k;  // [dim] or null
    float eps;
};

// y = rotate(norm(x)), x and y [dim]; cos_sin [dim] holds dim/2 cosines, then the sines.
template <typename X, typename Y>
void rotate_head(const X* x, const float* weight, float eps, const float* cos_sin, int64_t dim, Y* y) {
    const int64_t half = dim / 2;
    float inverse = 1.0f;
    if (weight) {
        f32x16 squares{};
        for (int64_t i = 0; i < dim; i += 16) {
            f32x16 v = load_part(x + i, dim - i);
            squares += v * v;
        }
        inverse = 1.0f / std::sqrt(reduce_add(squares) / (float)dim + eps);
    }
    for (int64_t i = 0; i < half; i += 16) {
        const int64_t n = half - i;
        f32x16 a = load_part(x + i, n), b = load_part(x + half + i, n);
        if (weight) {
            // The norm's result is rounded to the activations' type, as the separate op does.
            X rounded[2][16];
            store16(rounded[0], a * inverse * load_part(weight + i, n));
            store16(rounded[1], b * inverse * load_part(weight + half + i, n));
            a = load16(rounded[0]);
            b = load16(rounded[1]);
        }
        f32x16 c = load_part(cos_sin + i, n), s = load_part(cos_sin + half + i, n);
        X first[16], second[16];
        store16(first, a * c - b * s);
        store16(second, b * c + a * s);
        store_part(y + i, load16(first), n);
        store_part(y + half + i, load16(second), n);
    }
}

template <typename X, typename Y>
void write_token(const X* qkv, const Heads& heads, const Norms& norms, const float* cos_sin, const Cache& keys,
                 const Cache& values, int64_t block, int64_t offset, X* q) {
    for (int64_t h = 0; h < heads.q; h++)
        rotate_head(qkv + h * heads.dim, norms.q, norms.eps, cos_sin, heads.dim, q + h * heads.dim);
    if (block < 0) return;
    for (int64_t h = 0; h < heads.kv; h++) {
        const X* k = qkv + (heads.q + h) * heads.dim;
        const X* v = k + heads.kv * heads.dim;
        Y* key = (Y*)keys.data + block * keys.block_stride + h * keys.head_stride + offset * keys.token_stride;
        Y* value = (Y*)values.data + block * values.block_stride + h * values.head_stride + offset * values.token_stride;
        rotate_head(k, norms.k, norms.eps, cos_sin, heads.dim, key);
        for (int64_t i = 0; i < heads.dim; i += 16) store_part(value + i, load_part(v + i, heads.dim - i), heads.dim - i);
    }
}

template <typename X, typename Y>
void write_tokens(const X* qkv, int64_t tokens, const Heads& heads, const Norms& norms, const float* cos_sin,
                  const int32_t* positions, const Cache& keys, const Cache& values, const int64_t* slots,
                  int64_t block_tokens, X* q) {
    const int64_t width = (heads.q + 2 * heads.kv) * heads.dim;
    parallel_ranges(tokens, tokens * width > (1 << 14), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const int64_t block = slots[t] < 0 ? -1 : slots[t] / block_tokens;
            write_token<X, Y>(qkv + t * width, heads, norms, cos_sin + (int64_t)positions[t] * heads.dim, keys, values,
                              block, slots[t] - block * block_tokens, q + t * heads.q * heads.dim);
        }
    });
}

}  // namespace
}  // namespace wl

extern "C" {
#pragma GCC visibility push(default)

// qkv [tokens, (Hq + 2 Hk) * D] and q [tokens, Hq, D] of dtype, dense; cos_sin rows of D; strides in elements: block,
// head, token of the key cache, then of the value cache, both of cache_dtype; slots: -1 writes nothing.
void wl_qk_norm_rope_kv_write(const void* qkv, int64_t tokens, int64_t num_heads, int64_t num_kv_heads,
                              int64_t head_dim, const float* q_norm, const float* k_norm, float eps,
                              const float* cos_sin, const int32_t* positions, void* key_cache, void* value_cache,
                              int64_t block_stride, int64_t head_stride, int64_t token_stride, const int64_t* slots,
                              int64_t block_tokens, void* q, int dtype, int cache_dtype) {
    using namespace wl;
    Heads heads{num_heads, num_kv_heads, head_dim};
    Norms norms{q_norm, k_norm, eps};
    Cache keys{key_cache, block_stride, head_stride, token_stride};
    Cache values{value_cache, block_stride, head_stride, token_stride};
#define WL_RUN(X, Y)                                                                                              \
    write_tokens<X, Y>((const X*)qkv, tokens, heads, norms, cos_sin, positions, keys, values, slots, block_tokens, \
                       (X*)q)
    if (dtype == kFloat32 && cache_dtype == kFloat32) WL_RUN(float, float);
    else if (dtype == kFloat32) WL_RUN(float, bf16);
    else if (cache_dtype == kFloat32) WL_RUN(bf16, float);
    else WL_RUN(bf16, bf16);
#undef WL_RUN
}

#pragma GCC visibility pop
}
