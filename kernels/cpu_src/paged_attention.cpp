// Causal attention over paged keys and values with an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
// One unit of work is a tile of queries of one sequence under one KV head: its rows (queries x heads of the group) share
// each chunk of 32 keys (attention_chunk.h). Decode over a long context is cut into splits whose results are merged.
#include <cmath>
#include <vector>

#include "attention_chunk.h"
#include "parallel.h"

namespace wl {
namespace {

constexpr int kTileRows = 64;       // queries x group
constexpr int kTransposeRows = 12;  // from here on transposing the keys pays
constexpr int kSplitKeys = 128;     // a split is not shorter
constexpr float kInfinity = __builtin_inff();

struct Attention {
    const void *q, *keys, *values;
    int64_t block_stride, head_stride, token_stride, block_tokens;
    const int32_t *block_tables, *context_lens, *cu_seqlens_q;
    int64_t tables_stride, sequences, num_heads, num_kv_heads, dim;
    float scale, soft_cap;   // soft_cap 0: none
    int64_t window;          // 0: none
    void* out;

    int64_t group() const { return num_heads / num_kv_heads; }
};

struct Work {
    int64_t sequence, kv_head, first_query, num_queries;  // queries as packed rows
    int64_t first_key, end_key;                           // keys this work may look at
    float* partial;  // null: write the output; else [rows][dim] sums, [rows] maxima, [rows] weights
};

struct Scratch {
    std::vector<float> memory;
    float *q, *out, *keys, *values, *scores, *maximum, *weight;

    void reserve(int64_t dim) {
        memory.resize((size_t)(2 * kTileRows * dim + 2 * kChunk * dim + kTileRows * (kChunk + 2)));
        q = memory.data();
        out = q + kTileRows * dim;
        keys = out + kTileRows * dim;
        values = keys + kChunk * dim;
        scores = values + kChunk * dim;
        maximum = scores + kTileRows * kChunk;
        weight = maximum + kTileRows;
    }
};

// Where keys and values of [position, position + kChunk) lie: pointers past the end
// repeat the last key. The rows are asked for at once: a page of keys is often not in any cache.
template <typename KV>
void find_chunk(const Attention& a, const Work& w, int64_t position, ChunkRows<KV>& rows) {
    const int32_t* table = a.block_tables + w.sequence * a.tables_stride;
    const int64_t left = w.end_key - position, count = left < kChunk ? left : kChunk;
    int64_t block = position / a.block_tokens, offset = position % a.block_tokens;  // divided once, then counted
    int64_t at = table[block] * a.block_stride + w.kv_head * a.head_stride + offset * a.token_stride;
    for (int64_t t = 0; t < kChunk; t++) {
        rows.key[t] = (const KV*)a.keys + at;
        rows.value[t] = (const KV*)a.values + at;
        if (t + 1 < count) {
            at += a.token_stride;
            if (++offset == a.block_tokens) {
                offset = 0;
                at = table[++block] * a.block_stride + w.kv_head * a.head_stride;
            }
        }
        if (t >= count) continue;
        for (int64_t d = 0; d < a.dim; d += 64 / (int64_t)sizeof(KV)) {
            __builtin_prefetch(rows.key[t] + d);
            __builtin_prefetch(rows.value[t] + d);
        }
    }
}

// Scores of one row to softmax weights, in place; the running maximum and weight move on; returns the factor on what
// was summed so far. Keys outside [first, last] count nothing.
float soften_row(float* scores, int64_t first, int64_t last, float soft_cap, float& maximum, float& weight) {
    f32x16 s[2] = {load16(scores), load16(scores + 16)};
    if (soft_cap > 0)
        for (auto& v : s) v = soft_cap * tanh16(v / soft_cap);
    const bool masked = first > 0 || last < kChunk - 1;
    if (masked) {
        const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int half = 0; half < 2; half++) {
            i32x16 key = lane + 16 * half;
            s[half] = (key >= (int32_t)first) & (key <= (int32_t)last) ? s[half] : splat(-kInfinity);
        }
    }
    const float top = std::fmax(maximum, reduce_max(max16(s[0], s[1])));
    if (top == -kInfinity) {
        store16(scores, f32x16{});
        store16(scores + 16, f32x16{});
        return 1.0f;
    }
    f32x16 sum{};
    for (int half = 0; half < 2; half++) {
        f32x16 p = exp16(s[half] - top);
        if (masked) p = s[half] == -kInfinity ? f32x16{} : p;
        store16(scores + 16 * half, p);
        sum += p;
    }
    const float factor = maximum == -kInfinity ? 0.0f : std::exp(maximum - top);
    weight = weight * factor + reduce_add(sum);
    maximum = top;
    return factor;
}

// The softmax of all rows of a work item over one chunk of scores; sums so far are scaled to the new maximum.
void soften_rows(const Attention& a, const Work& w, int64_t position, int64_t first_position, Scratch& s) {
    for (int64_t r = 0; r < w.num_queries * a.group(); r++) {
        const int64_t query = first_position + r / a.group();
        const int64_t lowest = a.window > 0 ? query - a.window + 1 : 0;
        const int64_t first = (lowest > w.first_key ? lowest : w.first_key) - position;
        const int64_t last = (query < w.end_key - 1 ? query : w.end_key - 1) - position;
        const float factor = soften_row(s.scores + r * kChunk, first, last, a.soft_cap, s.maximum[r], s.weight[r]);
        if (factor != 1.0f)
            for (int64_t d = 0; d < a.dim; d += 16)
                store16(s.out + r * a.dim + d, load16(s.out + r * a.dim + d) * factor);
    }
}

template <typename Q, typename KV>
void attend(const Attention& a, const Work& w, Scratch& s) {
    const int64_t group = a.group(), rows = w.num_queries * group;
    const int64_t last_query = a.cu_seqlens_q[w.sequence + 1] - 1;
    const int64_t first_position = a.context_lens[w.sequence] - 1 - (last_query - w.first_query);
    auto row_of = [&](int64_t r) {
        return ((w.first_query + r / group) * a.num_heads + w.kv_head * group + r % group) * a.dim;
    };
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t d = 0; d < a.dim; d += 16) {
            store16(s.q + r * a.dim + d, load16((const Q*)a.q + row_of(r) + d) * a.scale);
            store16(s.out + r * a.dim + d, f32x16{});
        }
        s.maximum[r] = -kInfinity;
        s.weight[r] = 0.0f;
    }
    ChunkRows<KV> chunks[2];
    find_chunk(a, w, w.first_key, chunks[0]);
    for (int64_t position = w.first_key, i = 0; position < w.end_key; position += kChunk, i ^= 1) {
        if (position + kChunk < w.end_key) find_chunk(a, w, position + kChunk, chunks[i ^ 1]);
        const ChunkRows<KV>& chunk = chunks[i];
        if (rows < kTransposeRows) {
            score_direct(s.q, rows, a.dim, chunk, s.scores);
            soften_rows(a, w, position, first_position, s);
            mix_direct(s.scores, rows, a.dim, chunk, s.out);
        } else {
            widen_chunk(chunk, a.dim, s.keys, s.values);
            score_widened(s.q, rows, a.dim, s.keys, s.scores);
            soften_rows(a, w, position, first_position, s);
            mix_widened(s.scores, rows, a.dim, s.values, s.out);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const float* sums = s.out + r * a.dim;
        if (w.partial) {
            std::memcpy(w.partial + r * a.dim, sums, (size_t)a.dim * 4);
            w.partial[rows * a.dim + r] = s.maximum[r];
            w.partial[rows * (a.dim + 1) + r] = s.weight[r];
        } else {
            for (int64_t d = 0; d < a.dim; d += 16)
                store16((Q*)a.out + row_of(r) + d, load16(sums + d) / s.weight[r]);
        }
    }
}

// The output rows of one sequence and KV head from its splits' partial results, `splits` of them `size` floats apart.
template <typename Q>
void merge_splits(const Attention& a, const Work& w, int64_t splits, int64_t size) {
    const int64_t rows = a.group();
    for (int64_t r = 0; r < rows; r++) {
        float top = -kInfinity, weight = 0.0f, factor[64];
        for (int64_t s = 0; s < splits; s++) top = std::fmax(top, w.partial[s * size + rows * a.dim + r]);
        for (int64_t s = 0; s < splits; s++) {
            factor[s] = std::exp(w.partial[s * size + rows * a.dim + r] - top);
            weight += factor[s] * w.partial[s * size + rows * (a.dim + 1) + r];
        }
        Q* out = (Q*)a.out + (w.first_query * a.num_heads + w.kv_head * rows + r) * a.dim;
        for (int64_t d = 0; d < a.dim; d += 16) {
            f32x16 sum{};
            for (int64_t s = 0; s < splits; s++) sum += load16(w.partial + s * size + r * a.dim + d) * factor[s];
            store16(out + d, sum / weight);
        }
    }
}

// Work items in order; a decode sequence with few peers is split so that every thread has something to do.
std::vector<Work> plan(const Attention& a, int threads, std::vector<float>& partials, int64_t& work_keys) {
    std::vector<Work> items;
    const int64_t group = a.group(), tile = group < kTileRows ? kTileRows / group : 1;
    const int64_t size = group * (a.dim + 2), max_splits = 4 * threads / (a.sequences * a.num_kv_heads) + 1;
    partials.resize(max_splits > 1 ? (size_t)(a.sequences * a.num_kv_heads * max_splits * size) : 0);
    float* partial = partials.data();
    work_keys = 0;
    for (int64_t b = 0; b < a.sequences; b++) {
        const int64_t start = a.cu_seqlens_q[b], end = a.cu_seqlens_q[b + 1], context = a.context_lens[b];
        for (int64_t first = start; first < end; first += tile) {
            const int64_t count = end - first < tile ? end - first : tile;
            const int64_t first_position = context - (end - first), end_key = first_position + count;
            const int64_t lowest = a.window > 0 && first_position >= a.window ? first_position - a.window + 1 : 0;
            const int64_t keys = end_key - lowest;
            int64_t splits = end - start > 1 || threads == 1 ? 1 : keys / kSplitKeys;
            splits = splits < 1 ? 1 : splits > max_splits ? max_splits : splits > 64 ? 64 : splits;
            for (int64_t h = 0; h < a.num_kv_heads; h++)
                for (int64_t s = 0; s < splits; s++) {
                    items.push_back({b, h, first, count, lowest + keys * s / splits, lowest + keys * (s + 1) / splits,
                                     splits > 1 ? partial : nullptr});
                    if (splits > 1) partial += size;
                }
            work_keys += keys * count * a.num_heads;
        }
    }
    return items;
}

template <typename Q, typename KV>
void run(const Attention& a) {
    static thread_local std::vector<float> partials;
    int64_t work_keys;
    const std::vector<Work> items = plan(a, num_threads(), partials, work_keys);
    const int64_t count = (int64_t)items.size();
    parallel_for(count, work_keys * a.dim > (1 << 14), [&](int64_t i) {
        static thread_local Scratch scratch;
        scratch.reserve(a.dim);
        attend<Q, KV>(a, items[count - 1 - i], scratch);  // the longest queries tend to come last
    });
    for (int64_t i = 0; i < count;) {
        int64_t splits = 1;
        if (items[i].partial) {
            while (i + splits < count && items[i + splits].sequence == items[i].sequence &&
                   items[i + splits].kv_head == items[i].kv_head)
                splits++;
            merge_splits<Q>(a, items[i], splits, a.group() * (a.dim + 2));
        }
        i += splits;
    }
}

}  // namespace
}  // namespace wl

extern "C" {
#pragma GCC visibility push(default)

// q, out [tokens, Hq, D] of dtype, dense, D a multiple of 16; caches of cache_dtype with equal strides in elements;
// block_tables rows of tables_stride; window 0 and soft_cap 0 mean none.
void wl_paged_attention(const void* q, const void* key_cache, const void* value_cache, int64_t block_stride,
                        int64_t head_stride, int64_t token_stride, int64_t block_tokens, const int32_t* block_tables,
                        int64_t tables_stride, const int32_t* context_lens, const int32_t* cu_seqlens_q,
                        int64_t sequences, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, float scale,
                        int64_t window, float soft_cap, void* out, int dtype, int cache_dtype) {
    using namespace wl;
    Attention a{q, key_cache, value_cache, block_stride, head_stride, token_stride, block_tokens, block_tables,
                context_lens, cu_seqlens_q, tables_stride, sequences, num_heads, num_kv_heads, head_dim, scale,
                soft_cap, window, out};
    if (dtype == kFloat32 && cache_dtype == kFloat32) run<float, float>(a);
    else if (dtype == kFloat32) run<float, bf16>(a);
    else if (cache_dtype == kFloat32) run<bf16, float>(a);
    else run<bf16, bf16>(a);
}

#pragma GCC visibility pop
}
