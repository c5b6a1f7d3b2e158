// Index of the largest value of each row: the lowest index among equals, the first NaN where there is one.
#include "parallel.h"
#include "vec.h"

namespace wl {
namespace {

template <typename Test>
int64_t first_where(const float* x, int64_t n, Test test) {
    for (int64_t i = 0; i < n; i++)
        if (test(x[i])) return i;
    return 0;
}

int64_t argmax_row(const float* x, int64_t n) {
    f32x16 largest = splat(-__builtin_inff());
    i32x16 nan_lanes{};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        f32x16 v = load16(x + i);
        largest = max16(v, largest);
        nan_lanes |= v != v;
    }
    float top = reduce_max(largest);
    bool has_nan = false;
    for (int lane = 0; lane < 16; lane++) has_nan |= nan_lanes[lane] != 0;
    for (; i < n; i++) {
        has_nan |= x[i] != x[i];
        top = x[i] > top ? x[i] : top;
    }
    if (has_nan) return first_where(x, n, [](float v) { return v != v; });
    return first_where(x, n, [top](float v) { return v == top; });
}

}  // namespace
}  // namespace wl

extern "C" {
#pragma GCC visibility push(default)

// logits [rows, n] float32, rows stride elements apart; ids [rows].
void wl_argmax(const float* logits, int64_t rows, int64_t n, int64_t stride, int64_t* ids) {
    wl::parallel_for(rows, rows * n > (1 << 16), [=](int64_t r) { ids[r] = wl::argmax_row(logits + r * stride, n); });
}

#pragma GCC visibility pop
}
