// Causal attention over paged keys and values with an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
// One unit of work is a tile of queries of one sequence under one KV head: its rows (queries x heads of the group) share
// each chunk of 32 keys (attention_chunk.h). Keys are summed up in segments of 256 positions, and segments are merged in
// order: the threads of a decode step may share the segments of a sequence, and whoever adds them up, the result of a
// query is the same to the bit, whatever its tile, its neighbours and the number of threads.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "attention_chunk.h"
#include "parallel.h"

namespace wl {
namespace {

constexpr int kTileRows = 64;       // queries x group
constexpr int kTransposeRows = 12;  // from here on transposing the keys pays
constexpr int kSegment = 256;       // keys; chunks and segments start at multiples of their length
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
    int64_t first_key, end_key;                           // keys this work may look at; the first begins a chunk
    bool is_segment;  // one of several of a sequence and head, which are merged afterwards
    float* partial;   // null: write the output; else a Sums of one segment
};

// Weighted sums of values [rows][dim], and each row's largest score and sum of weights.
struct Sums {
    float *out, *maximum, *weight;

    Sums(float* memory, int64_t rows, int64_t dim)
        : out(memory), maximum(memory + rows * dim), weight(memory + rows * (dim + 1)) {}
    static int64_t size(int64_t rows, int64_t dim) { return rows * (dim + 2); }

    void clear(int64_t rows, int64_t dim) const {
        std::fill(out, out + rows * dim, 0.0f);
        std::fill(maximum, maximum + rows, -kInfinity);
        std::fill(weight, weight + rows, 0.0f);
    }
};

// total[row] += part[row]. Not inlined: one compiled form, whose roundings are the same for everybody.
__attribute__((noinline)) void merge_row(const Sums& total, const Sums& part, int64_t row, int64_t dim) {
    if (part.maximum[row] == -kInfinity) return;  // the row saw no key of this segment
    const float top = std::fmax(total.maximum[row], part.maximum[row]);
    const float old = std::exp(total.maximum[row] - top), added = std::exp(part.maximum[row] - top);
    for (int64_t d = row * dim; d < (row + 1) * dim; d += 16)
        store16(total.out + d, load16(total.out + d) * old + load16(part.out + d) * added);
    total.weight[row] = total.weight[row] * old + part.weight[row] * added;
    total.maximum[row] = top;
}

struct Scratch {
    std::vector<float> memory;
    float *q, *keys, *values, *scores;

    // What a thread needs for a tile; returns its sums: of the segment, of all.
    std::pair<Sums, Sums> reserve(int64_t dim) {
        const int64_t sums = Sums::size(kTileRows, dim);
        memory.resize((size_t)(kTileRows * dim + 2 * kChunk * dim + kTileRows * kChunk + 2 * sums));
        q = memory.data();
        keys = q + kTileRows * dim;
        values = keys + kChunk * dim;
        scores = values + kChunk * dim;
        float* rest = scores + kTileRows * kChunk;
        return {Sums(rest, kTileRows, dim), Sums(rest + sums, kTileRows, dim)};
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
void soften_rows(const Attention& a, const Work& w, int64_t position, int64_t first_position, float* scores,
                 const Sums& sums) {
    for (int64_t r = 0; r < w.num_queries * a.group(); r++) {
        const int64_t query = first_position + r / a.group();
        const int64_t lowest = a.window > 0 ? query - a.window + 1 : 0;
        const int64_t first = lowest - position;
        const int64_t last = (query < w.end_key - 1 ? query : w.end_key - 1) - position;
        const float factor = soften_row(scores + r * kChunk, first, last, a.soft_cap, sums.maximum[r], sums.weight[r]);
        if (factor != 1.0f)
            for (int64_t d = r * a.dim; d < (r + 1) * a.dim; d += 16)
                store16(sums.out + d, load16(sums.out + d) * factor);
    }
}

template <typename Q>
void write_row(const Attention& a, const Sums& sums, int64_t row, Q* out) {
    for (int64_t d = 0; d < a.dim; d += 16) store16(out + d, load16(sums.out + row * a.dim + d) / sums.weight[row]);
}

template <typename Q, typename KV>
void attend(const Attention& a, const Work& w, Scratch& s) {
    const auto [segment, total] = s.reserve(a.dim);
    const int64_t group = a.group(), rows = w.num_queries * group;
    const int64_t last_query = a.cu_seqlens_q[w.sequence + 1] - 1;
    const int64_t first_position = a.context_lens[w.sequence] - 1 - (last_query - w.first_query);
    auto row_of = [&](int64_t r) {
        return ((w.first_query + r / group) * a.num_heads + w.kv_head * group + r % group) * a.dim;
    };
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < a.dim; d += 16)
            store16(s.q + r * a.dim + d, load16((const Q*)a.q + row_of(r) + d) * a.scale);
    segment.clear(rows, a.dim);
    const bool is_one_segment = w.first_key / kSegment == (w.end_key - 1) / kSegment;
    if (!is_one_segment) total.clear(rows, a.dim);
    ChunkRows<KV> chunks[2];
    find_chunk(a, w, w.first_key, chunks[0]);
    for (int64_t position = w.first_key, i = 0; position < w.end_key; position += kChunk, i ^= 1) {
        const int64_t next = position + kChunk;
        if (next < w.end_key) find_chunk(a, w, next, chunks[i ^ 1]);
        const ChunkRows<KV>& chunk = chunks[i];
        if (rows < kTransposeRows) {
            score_direct(s.q, rows, a.dim, chunk, s.scores);
            soften_rows(a, w, position, first_position, s.scores, segment);
            mix_direct(s.scores, rows, a.dim, chunk, segment.out);
        } else {
            widen_chunk(chunk, a.dim, s.keys, s.values);
            score_widened(s.q, rows, a.dim, s.keys, s.scores);
            soften_rows(a, w, position, first_position, s.scores, segment);
            mix_widened(s.scores, rows, a.dim, s.values, segment.out);
        }
        if (!is_one_segment && (next % kSegment == 0 || next >= w.end_key)) {
            for (int64_t r = 0; r < rows; r++) merge_row(total, segment, r, a.dim);
            segment.clear(rows, a.dim);
        }
    }
    const Sums& result = is_one_segment ? segment : total;
    if (w.partial) {
        const Sums partial(w.partial, rows, a.dim);
        std::copy(result.out, result.out + rows * a.dim, partial.out);
        std::copy(result.maximum, result.maximum + rows, partial.maximum);
        std::copy(result.weight, result.weight + rows, partial.weight);
    } else {
        for (int64_t r = 0; r < rows; r++) write_row<Q>(a, result, r, (Q*)a.out + row_of(r));
    }
}

// The output rows of one sequence and KV head from its segments' sums, which lie one behind the other; the first is
// written over.
template <typename Q>
void merge_segments(const Attention& a, const Work& w, int64_t segments) {
    const int64_t rows = a.group(), size = Sums::size(rows, a.dim);
    const Sums total(w.partial, rows, a.dim);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t s = 1; s < segments; s++) merge_row(total, Sums(w.partial + s * size, rows, a.dim), r, a.dim);
        write_row<Q>(a, total, r, (Q*)a.out + (w.first_query * a.num_heads + w.kv_head * rows + r) * a.dim);
    }
}

// Work items in order; a decode sequence with few peers is split by segments, so that every thread has something to do.
std::vector<Work> plan(const Attention& a, int threads, std::vector<float>& partials, int64_t& work_keys) {
    std::vector<Work> items;
    const int64_t group = a.group(), tile = group < kTileRows ? kTileRows / group : 1;
    const bool has_few = threads > 1 && a.sequences * a.num_kv_heads <= 4 * threads;
    int64_t num_partials = 0;
    work_keys = 0;
    for (int64_t b = 0; b < a.sequences; b++) {
        const int64_t start = a.cu_seqlens_q[b], end = a.cu_seqlens_q[b + 1], context = a.context_lens[b];
        for (int64_t first = start; first < end; first += tile) {
            const int64_t count = end - first < tile ? end - first : tile;
            const int64_t first_position = context - (end - first), end_key = first_position + count;
            const int64_t in_window = a.window > 0 && first_position >= a.window ? first_position - a.window + 1 : 0;
            const int64_t lowest = in_window / kChunk * kChunk;
            const bool is_split = has_few && end - start == 1 && lowest / kSegment != (end_key - 1) / kSegment;
            for (int64_t h = 0; h < a.num_kv_heads; h++)
                for (int64_t key = lowest, next; key < end_key; key = next) {
                    next = is_split ? (key / kSegment + 1) * kSegment : end_key;
                    if (next > end_key) next = end_key;
                    items.push_back({b, h, first, count, key, next, is_split, nullptr});
                    num_partials += is_split;
                }
            work_keys += (end_key - lowest) * count * a.num_heads;
        }
    }
    const int64_t size = Sums::size(group, a.dim);
    partials.resize((size_t)(num_partials * size));
    float* partial = partials.data();
    for (Work& item : items)
        if (item.is_segment) {
            item.partial = partial;
            partial += size;
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
        attend<Q, KV>(a, items[count - 1 - i], scratch);  // the longest queries tend to come last
    });
    for (int64_t i = 0; i < count;) {
        int64_t segments = 1;
        if (items[i].is_segment) {
            while (i + segments < count && items[i + segments].sequence == items[i].sequence &&
                   items[i + segments].kv_head == items[i].kv_head)
                segments++;
            merge_segments<Q>(a, items[i], segments);
        }
        i += segments;
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
