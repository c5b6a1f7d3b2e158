"""Gumbel noise of token ids, a function of (seed, position, id); formulas: `kernels/reference/gumbel_noise.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _log(x, COMPILED: tl.constexpr):
    """Natural logarithm, compiled to one instruction (absolute error 2^-22) in place of twenty."""
    if COMPILED:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        result = log2 * 0.6931471805599453
    else:
        result = tl.log(x)
    return result


@triton.jit
def gumbel_noise(seed, position, first_token, SIZE: tl.constexpr, COMPILED: tl.constexpr):
    """Noise [SIZE] float32 of tokens first_token, first_token + 1, …; both are multiples of 4."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    quads = (first_token // 4 + tl.arange(0, SIZE // 4)).to(tl.uint32)
    zeros = quads * 0
    w0, w1, w2, w3 = tl.philox(seed.to(tl.uint64), zeros + low, zeros + high, quads, zeros)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape([SIZE])
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = v + v * v * (0.5 + v * (0.3333333333333333 + v * 0.25))
    return -_log(tl.where(v < 0.015625, series, -_log(1.0 - v, COMPILED)), COMPILED)
