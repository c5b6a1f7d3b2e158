// y = x W^T (+ bias) for few rows of x and a dense float32, bfloat16 or float16 weight: one pass over the weight at
// memory speed, products and sums in float32. Many rows belong to a blocked matrix product.
#include <vector>

#include "parallel.h"
#include "vec.h"

namespace wl {
namespace {

constexpr int kOutputs = 4;

// R rows of x [R][in] float32 times kOutputs rows of W.
template <typename W, int R>
void dot_outputs(const float* x, int64_t in, const W* const weight[kOutputs], float result[][kOutputs]) {
    f32x16 acc[R][kOutputs] = {};
    for (int64_t k = 0; k < in; k += 16) {
        f32x16 w[kOutputs];
        for (int o = 0; o < kOutputs; o++) w[o] = load_part(weight[o] + k, in - k);
        for (int r = 0; r < R; r++) {
            f32x16 a = load_part(x + r * in + k, in - k);
            for (int o = 0; o < kOutputs; o++) acc[r][o] += a * w[o];
        }
    }
    for (int r = 0; r < R; r++)
        for (int o = 0; o < kOutputs; o++) result[r][o] = reduce_add(acc[r][o]);
}

// Output features [begin, end).
template <typename W, typename Y>
void multiply_range(const float* x, int64_t rows, int64_t in, const W* weight, int64_t out, const float* bias, Y* y,
                    int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kOutputs) {
        const int64_t count = end - first < kOutputs ? end - first : kOutputs;
        const W* w[kOutputs];
        for (int64_t o = 0; o < kOutputs; o++) w[o] = weight + (first + (o < count ? o : 0)) * in;
        for (int64_t row = 0; row < rows; row += 4) {
            const int64_t n = rows - row < 4 ? rows - row : 4;
            float result[4][kOutputs];
            switch (n) {
                case 1: dot_outputs<W, 1>(x + row * in, in, w, result); break;
                case 2: dot_outputs<W, 2>(x + row * in, in, w, result); break;
                case 3: dot_outputs<W, 3>(x + row * in, in, w, result); break;
                default: dot_outputs<W, 4>(x + row * in, in, w, result);
            }
            for (int64_t r = 0; r < n; r++)
                for (int64_t o = 0; o < count; o++)
                    from_float(y + (row + r) * out + first + o, result[r][o] + (bias ? bias[first + o] : 0.0f));
        }
    }
}

template <typename W, typename Y>
void multiply(const float* x, int64_t rows, int64_t in, const W* weight, int64_t out, const float* bias, Y* y) {
    const int64_t groups = (out + kOutputs - 1) / kOutputs;
    parallel_ranges(groups, rows * in * out > (1 << 16), [&](int64_t begin, int64_t end) {
        multiply_range(x, rows, in, weight, out, bias, y, begin * kOutputs,
                       end * kOutputs < out ? end * kOutputs : out);
    });
}

template <typename X>
const float* widen(const X* x, int64_t stride, int64_t rows, int64_t in, std::vector<float>& buffer) {
    buffer.resize((size_t)(rows * in));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < in; k += 16)
            store_part(buffer.data() + r * in + k, load_part(x + r * stride + k, in - k), in - k);
    return buffer.data();
}

}  // namespace
}  // namespace wl

extern "C" {
#pragma GCC visibility push(default)

// x [rows, in] of x_dtype, rows x_stride apart; weight [out, in] of w_dtype, dense; bias [out] float32 or null;
// y [rows, out] of y_dtype (float32 or bfloat16), dense.
void wl_linear_dense(const void* x, int x_dtype, int64_t x_stride, int64_t rows, int64_t in, const void* weight,
                     int w_dtype, int64_t out, const float* bias, void* y, int y_dtype) {
    using namespace wl;
    static thread_local std::vector<float> buffer;
    const float* a = x_dtype == kFloat32 ? widen((const float*)x, x_stride, rows, in, buffer)
                                         : widen((const bf16*)x, x_stride, rows, in, buffer);
#define WL_RUN(W)                                                                          \
    (y_dtype == kFloat32 ? multiply(a, rows, in, (const W*)weight, out, bias, (float*)y)   \
                         : multiply(a, rows, in, (const W*)weight, out, bias, (bf16*)y))
    if (w_dtype == kFloat32) WL_RUN(float);
    else if (w_dtype == kBFloat16) WL_RUN(bf16);
    else WL_RUN(f16);
#undef WL_RUN
}

#pragma GCC visibility pop
}
