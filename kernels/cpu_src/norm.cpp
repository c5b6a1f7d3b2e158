// RMS norm, alone and behind the residual addition. Sums in float32, the result rounded once.
#include <cmath>

#include "parallel.h"
#include "vec.h"

namespace wl {
namespace {

constexpr int64_t kParallelElements = 1 << 16;  // about 10 us of one core

// y = x / rms(x) * weight; with a residual, x + residual (rounded to T, stored in total) takes the place of x.
template <typename T>
void norm_row(const T* x, const T* residual, const float* weight, int64_t hidden, float eps, T* y, T* total) {
    f32x16 squares[2] = {};
    for (int64_t i = 0, k = 0; i < hidden; i += 16, k ^= 1) {
        int64_t n = hidden - i;
        f32x16 v = load_part(x + i, n);
        if (residual) {
            store_part(total + i, v + load_part(residual + i, n), n);
            v = load_part(total + i, n);
        }
        squares[k] += v * v;
    }
    const T* source = residual ? total : x;
    float inverse = 1.0f / std::sqrt(reduce_add(squares[0] + squares[1]) / (float)hidden + eps);
    for (int64_t i = 0; i < hidden; i += 16) {
        int64_t n = hidden - i;
        store_part(y + i, load_part(source + i, n) * inverse * load_part(weight + i, n), n);
    }
}

template <typename T>
void norm_rows(const T* x, const T* residual, const float* weight, int64_t rows, int64_t hidden, float eps, T* y,
               T* total) {
    parallel_ranges(rows, rows * hidden >= kParallelElements, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin * hidden; at < end * hidden; at += hidden)
            norm_row(x + at, residual ? residual + at : nullptr, weight, hidden, eps, y + at,
                     total ? total + at : nullptr);
    });
}

}  // namespace
}  // namespace wl

extern "C" {
#pragma GCC visibility push(default)

// x, residual, y, total [rows, hidden] of dtype, dense; residual and total null for the plain norm.
void wl_rms_norm(const void* x, const void* residual, const float* weight, int64_t rows, int64_t hidden, float eps,
                 void* y, void* total, int dtype) {
    using namespace wl;
    if (dtype == kFloat32)
        norm_rows((const float*)x, (const float*)residual, weight, rows, hidden, eps, (float*)y, (float*)total);
    else
        norm_rows((const bf16*)x, (const bf16*)residual, weight, rows, hidden, eps, (bf16*)y, (bf16*)total);
}

#pragma GCC visibility pop
}
