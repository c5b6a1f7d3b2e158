// act(gate) * up. silu(x) = x / (1 + exp(-x)); gelu_tanh(x) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3).
#include "parallel.h"
#include "vec.h"

namespace wl {
namespace {

template <typename T>
void gate_row(const T* gate_up, int64_t width, bool gelu, T* y) {
    for (int64_t i = 0; i < width; i += 16) {
        int64_t n = width - i;
        f32x16 gate = load_part(gate_up + i, n), up = load_part(gate_up + width + i, n);
        f32x16 slope = gelu ? 1.5957691216f * (gate + 0.044715f * gate * gate * gate) : gate;
        store_part(y + i, gate / (1.0f + exp16(-slope)) * up, n);
    }
}

template <typename T>
void gate_rows(const T* gate_up, int64_t rows, int64_t width, bool gelu, T* y) {
    parallel_ranges(rows, rows * width > (1 << 14), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) gate_row(gate_up + 2 * r * width, width, gelu, y + r * width);
    });
}

}  // namespace
}  // namespace wl

extern "C" {
#pragma GCC visibility push(default)

// gate_up [rows, 2 * width], gate first; y [rows, width], both of dtype and dense.
void wl_gated_activation(const void* gate_up, int64_t rows, int64_t width, int gelu, void* y, int dtype) {
    using namespace wl;
    if (dtype == kFloat32)
        gate_rows((const float*)gate_up, rows, width, gelu != 0, (float*)y);
    else
        gate_rows((const bf16*)gate_up, rows, width, gelu != 0, (bf16*)y);
}

#pragma GCC visibility pop
}
