// Gumbel-max sampling under top-k, top-p and min-p, without a sort (specification: kernels/reference/sample.py).
//
// The winner among all tokens is drawn first; if the filters keep it, it is the winner among those kept. If not, no token
// that is at most as likely is kept either, so the next winner is looked for among the likelier ones. That takes about
// 1 + ln(1 / top_p) rounds, each a pass over the logits.
#include <algorithm>
#include <cmath>
#include <vector>

#include "gumbel.h"
#include "parallel.h"

namespace wl {
namespace {

constexpr float kInfinity = __builtin_inff();

struct Row {
    const float* logits;
    int64_t vocab, best;
    float temperature, top_p, min_p;
    int64_t top_k;
    uint64_t seed, position;
    float largest = 0.0f, lowest = -kInfinity;  // logits kept by top-k where top-p must know: all at least `lowest`

    f32x16 load(int64_t first) const {
        if (first + 16 <= vocab) return load16(logits + first);
        f32x16 x = splat(-kInfinity);
        for (int64_t i = first; i < vocab; i++) x[i - first] = logits[i];
        return x;
    }
    // Log-probability behind the likeliest token, at least 0.
    f32x16 distance(f32x16 x) const { return max16((largest - x) / temperature, f32x16{}); }
};

struct Above {
    float mass = 0.0f;
    int64_t count = 0;
};

// exp(-distance) in all, and how many, of the tokens whose logit is above `bound`.
Above above(const Row& row, float bound) {
    f32x16 mass{};
    i32x16 count{};
    for (int64_t i = 0; i < row.vocab; i += 16) {
        f32x16 x = row.load(i);
        i32x16 is_above = x > bound;
        mass += is_above ? exp16(-row.distance(x)) : f32x16{};
        count -= is_above;
    }
    Above sums{reduce_add(mass), 0};
    for (int lane = 0; lane < 16; lane++) sums.count += count[lane];
    return sums;
}

// The k-th largest logit. The k-th largest of the maxima of 16 tokens each is a lower bound: few tokens reach it.
float kth_largest(const Row& row, int64_t k) {
    static thread_local std::vector<float> values;
    auto keep_kth = [&] {
        std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
        return values[(size_t)k - 1];
    };
    values.clear();
    for (int64_t i = 0; i < row.vocab; i += 16) values.push_back(reduce_max(row.load(i)));
    const float bound = (int64_t)values.size() < k ? -kInfinity : keep_kth();
    values.clear();
    for (int64_t i = 0; i < row.vocab; i++)
        if (row.logits[i] >= bound) values.push_back(row.logits[i]);
    return keep_kth();
}

struct Winner {
    int64_t token;
    float score;
};

// The better of `best` and the tokens of block `block` (64 ids) above `bound`, of a mass of at least min_p.
Winner block_winner(const Row& row, int64_t block, float bound, Winner best) {
    const int64_t first = 64 * block;
    float behind[64], noise[64];
    f32x16 nearest = splat(kInfinity);
    for (int i = 0; i < 64; i += 16) {
        f32x16 x = row.load(first + i), d = row.distance(x);
        i32x16 is_kept = (x > bound) & (x >= row.lowest);
        if (row.min_p > 0) is_kept &= exp16(-d) >= row.min_p;
        d = is_kept ? d : splat(kInfinity);
        nearest = min16(nearest, d);
        store16(behind + i, d);
    }
    if (!(kMaxNoise + reduce_max(-nearest) > best.score)) return best;
    block_noise(row.seed, row.position, block, noise);
    for (int i = 0; i < 64; i++) {
        const float score = noise[i] - behind[i];
        const bool wins = score > best.score || (score == best.score && first + i < best.token && behind[i] < kInfinity);
        if (wins) best = {first + i, score};
    }
    return best;
}

Winner winner_above(const Row& row, float bound) {
    // The likeliest token's block first: most others are then too far behind for any noise to help.
    Winner best = block_winner(row, row.best / 64, bound, {row.best, -kInfinity});
    for (int64_t block = 0; 64 * block < row.vocab; block++)
        if (block != row.best / 64) best = block_winner(row, block, bound, best);
    return best;
}

int64_t draw(Row row) {
    row.largest = row.logits[row.best];
    const bool has_top_p = row.top_p < 1.0f, has_top_k = row.top_k > 0 && row.top_k < row.vocab;
    if (has_top_p && has_top_k) row.lowest = kth_largest(row, row.top_k);
    float wanted = kInfinity;
    if (has_top_p) {
        const float below = std::nextafterf(row.lowest, -kInfinity);
        wanted = row.top_p * above(row, below).mass;
    }
    float bound = -kInfinity;
    for (;;) {
        const Winner winner = winner_above(row, bound);
        if (winner.token == row.best || !(has_top_p || has_top_k)) return winner.token;
        bound = row.logits[winner.token];
        const Above likelier = above(row, bound);
        if (likelier.mass < wanted && !(has_top_k && likelier.count >= row.top_k)) return winner.token;
    }
}

}  // namespace
}  // namespace wl

extern "C" {
#pragma GCC visibility push(default)

// logits [rows, vocab] float32, rows stride apart; the rest [rows]: best_ids int64 (their argmax), temperature float32,
// top_k int32, top_p, min_p float32, seeds, positions int64; out int64.
void wl_sample(const float* logits, int64_t rows, int64_t vocab, int64_t stride, const int64_t* best_ids,
               const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p,
               const int64_t* seeds, const int64_t* positions, int64_t* out) {
    wl::parallel_for(rows, rows * vocab > (1 << 12), [=](int64_t r) {
        wl::Row row{logits + r * stride, vocab,    best_ids[r],        temperature[r],       top_p[r],
                    min_p[r],            top_k[r], (uint64_t)seeds[r], (uint64_t)positions[r]};
        out[r] = temperature[r] > 0 ? wl::draw(row) : best_ids[r];
    });
}

#pragma GCC visibility pop
}
