// y = x W^T (+ bias) for a dense float32, bfloat16 or float16 weight, products and sums in float32. Few rows take one pass
// over the weight at memory speed; many share each four rows of it. A result is the same to the bit for any number of
// rows: 16 lanes sum up every 16th product each, and one tree adds the lanes.
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "vec.h"

namespace wl {
namespace {

constexpr int kOutputs = 4;
#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 6;  // 24 sums and their operands fill 32 registers
#else
constexpr int kRowsAtOnce = 2;
#endif

// R rows of x [R][in] float32 times kOutputs rows of W.
template <typename W, int R>
void dot_outputs(const float* x, int64_t in, const W* const weight[kOutputs], float result[][kOutputs]) {
    f32x16 acc[R][kOutputs] = {};
    const int64_t whole = in & ~(int64_t)15;
    auto add = [&](auto load, int64_t k) {
        f32x16 w[kOutputs];
        for (int o = 0; o < kOutputs; o++) w[o] = load(weight[o] + k);
        for (int r = 0; r < R; r++) {
            const f32x16 a = load(x + r * in + k);
            for (int o = 0; o < kOutputs; o++) acc[r][o] += a * w[o];
        }
    };
    for (int64_t k = 0; k < whole; k += 16) add([](const auto* p) { return load16(p); }, k);
    if (whole < in) add([=](const auto* p) { return load_part(p, in - whole); }, whole);
    for (int r = 0; r < R; r++) reduce_add4(acc[r], result[r]);
}

template <typename W>
void dot_rows(const float* x, int64_t rows, int64_t in, const W* const w[kOutputs], float result[][kOutputs]) {
    switch (rows) {
        case 1: return dot_outputs<W, 1>(x, in, w, result);
        case 2: return dot_outputs<W, 2>(x, in, w, result);
#if defined(__AVX512F__)
        case 3: return dot_outputs<W, 3>(x, in, w, result);
        case 4: return dot_outputs<W, 4>(x, in, w, result);
        case 5: return dot_outputs<W, 5>(x, in, w, result);
        case 6: return dot_outputs<W, 6>(x, in, w, result);
#endif
    }
}

// Output features [begin, end).
template <typename W, typename Y>
void multiply_range(const float* x, int64_t rows, int64_t in, const W* weight, int64_t out, const float* bias, Y* y,
                    int64_t begin, int64_t end) {
    static thread_local std::vector<float> widened;
    const bool is_widened = !std::is_same_v<W, float> && rows > kRowsAtOnce;
    if (is_widened) widened.resize((size_t)(kOutputs * in));
    for (int64_t first = begin; first < end; first += kOutputs) {
        const int64_t count = end - first < kOutputs ? end - first : kOutputs;
        const W* w[kOutputs];
        const float* wide[kOutputs];
        for (int64_t o = 0; o < kOutputs; o++) {
            w[o] = weight + (first + (o < count ? o : 0)) * in;
            wide[o] = widened.data() + o * in;
            if (is_widened)
                for (int64_t k = 0; k < in; k += 16)
                    store_part(widened.data() + o * in + k, load_part(w[o] + k, in - k), in - k);
        }
        for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
            const int64_t n = rows - row < kRowsAtOnce ? rows - row : kRowsAtOnce;
            float result[kRowsAtOnce][kOutputs];
            if (is_widened)
                dot_rows(x + row * in, n, in, wide, result);
            else
                dot_rows(x + row * in, n, in, w, result);
            for (int64_t r = 0; r < n; r++)
                for (int64_t o = 0; o < count; o++)
                    from_float(y + (row + r) * out + first + o, result[r][o] + (bias ? bias[first + o] : 0.0f));
        }
    }
}

template <typename W, typename Y>
void multiply(const float* x, int64_t rows, int64_t in, const W* weight, int64_t out, const float* bias, Y* y) {
    constexpr int64_t kPanelBytes = 1 << 19;  // rows of x that stay in the second-level cache
    const int64_t groups = (out + kOutputs - 1) / kOutputs, fitting = kPanelBytes / (4 * in) / kRowsAtOnce;
    const int64_t panel = kRowsAtOnce * (fitting > 0 ? fitting : 1);
    for (int64_t row = 0; row < rows; row += panel) {
        const int64_t n = rows - row < panel ? rows - row : panel;
        parallel_ranges(groups, n * in * out > (1 << 16), [&](int64_t begin, int64_t end) {
            multiply_range(x + row * in, n, in, weight, out, bias, y + row * out, begin * kOutputs,
                           end * kOutputs < out ? end * kOutputs : out);
        });
    }
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
