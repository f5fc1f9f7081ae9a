/* Attention of one query row after the other over the keys and values of its sequence, where they lie:
 * in the blocks of a pool.
 *
 * Keys are taken in blocks of 16 at fixed positions, and the softmax is made block after block
 * (arXiv 1805.02867): what a query finds depends on its position, its window and its keys alone.
 */
#ifndef ATTENTION_H
#define ATTENTION_H
#include "rows.h"

#define KEYS 16
#define QUERIES 8 /* that share one pass over the keys */

typedef struct {
    const char *q, *pool; /* q: [rows, heads, dim]; pool: rows of [size, dim], a head of a block each */
    char *out;            /* [rows, heads, dim] */
    const int64_t *k, *v; /* rows of the pool: [sequences, kv heads, positions / size] */
    const int64_t *starts, *newest; /* of each sequence: position of the first key, of the last query */
    const float *sinks;             /* of each query head, or NULL */
    const int64_t *rows; /* of q and out, of each sequence with one query; NULL: one after the other */
    int64_t stride;                 /* elements between rows of q */
    int32_t sequences, queries, positions, kv_heads, group, dim, window, size;
    float scale, cap;
    int brain;
} Attention;

INLINE int64_t attention_items(const Attention *a) {
    return (int64_t)a->sequences * a->kv_heads * ((a->queries + QUERIES - 1) / QUERIES);
}

/* Multiplications. */
INLINE int64_t attention_cost(const Attention *a) {
    return 2 * (int64_t)a->sequences * a->queries * a->positions * a->kv_heads * a->group * a->dim;
}

/* Floats of memory that one thread needs. */
static int64_t attention_floats(const Attention *a) {
    int64_t dim = (a->dim + LANES - 1) / LANES * LANES, heads = (int64_t)QUERIES * a->group;
    return 2 * KEYS * dim + heads * (2 * dim + 2);
}

/* One block of keys for one head of one query. best and total: the softmax so far. */
INLINE void one_block(const float *q, const float *k, const float *v, float *sum, float *best,
                      float *total, int first, int end, int64_t dim, float scale, float cap) {
    float scores[KEYS] = {0}, top = *best;
    for (int i = first; i < end; i++) {
        Lanes each = {0}, x, y;
        for (int64_t d = 0; d < dim; d += LANES) {
            memcpy(&x, q + d, 64), memcpy(&y, k + i * dim + d, 64);
            each += x * y;
        }
        float score = folded(&each) * scale;
        if (cap > 0) score = tanhf(score / cap) * cap;
        scores[i] = score;
        top = score > top || score != score ? score : top;
    }
    const float kept = *best == top ? 1.0f : exponential(*best - top);
    for (int i = 0; i < KEYS; i++) { /* all of them, so that compilers vectorise it */
        const float share = exponential(scores[i] - top);
        scores[i] = i >= first && i < end ? share : 0.0f;
    }
    float weights = *total * kept;
    for (int i = first; i < end; i++) weights += scores[i];
    for (int64_t d = 0; d < dim; d += LANES) {
        Lanes all, value;
        memcpy(&all, sum + d, 64);
        all *= kept;
        for (int i = first; i < end; i++) {
            memcpy(&value, v + i * dim + d, 64);
            all += value * scores[i];
        }
        memcpy(sum + d, &all, 64);
    }
    *best = top, *total = weights;
}

INLINE void attention_item(const Attention *a, int64_t item, float *memory) {
    const int size = a->brain ? 2 : 4;
    const int32_t parts = (a->queries + QUERIES - 1) / QUERIES, part = (int32_t)(item % parts);
    const int32_t head = (int32_t)(item / parts % a->kv_heads);
    const int32_t sequence = (int32_t)(item / parts / a->kv_heads);
    const int32_t begin = part * QUERIES;
    const int32_t count = a->queries - begin < QUERIES ? a->queries - begin : QUERIES;
    const int64_t dim = (a->dim + LANES - 1) / LANES * LANES, heads = (int64_t)QUERIES * a->group;
    float *k = memory, *v = k + KEYS * dim, *q = v + KEYS * dim, *sums = q + heads * dim;
    float *best = sums + heads * dim, *total = best + heads;
    const int64_t start = a->starts[sequence];
    const int64_t oldest = a->newest[sequence] - (a->queries - 1 - begin), last = oldest + count - 1;
    const int64_t row = a->rows ? a->rows[sequence] : (int64_t)sequence * a->queries + begin;
    for (int32_t i = 0; i < count; i++)
        for (int32_t g = 0; g < a->group; g++) {
            const int64_t at = (int64_t)i * a->group + g, of = head * a->group + g;
            widen(q + at * dim, a->q + ((row + i) * a->stride + of * a->dim) * size, a->dim, dim, a->brain);
            memset(sums + at * dim, 0, sizeof(float) * dim);
            best[at] = a->sinks ? a->sinks[of] : -1e30f;
            total[at] = a->sinks ? 1.0f : 0.0f;
        }
    int64_t low = a->window && oldest - a->window + 1 > 0 ? oldest - a->window + 1 : 0;
    const int64_t keys_at = ((int64_t)sequence * a->kv_heads + head) * (a->positions / a->size);
    const int64_t *k_rows = a->k + keys_at, *v_rows = a->v + keys_at;
    const int64_t head_bytes = (int64_t)a->dim * size, row_bytes = a->size * head_bytes;
    for (int64_t base = low / KEYS * KEYS; base <= last; base += KEYS) {
        const int64_t here = last - base + 1 < KEYS ? last - base + 1 : KEYS;
        for (int64_t i = base < start ? start - base : 0; i < here; i++) {
            const uint32_t place = (uint32_t)(base + i - start), block = place / (uint32_t)a->size;
            const char *at = a->pool + (place % (uint32_t)a->size) * head_bytes;
            widen(k + i * dim, at + k_rows[block] * row_bytes, a->dim, dim, a->brain);
            widen(v + i * dim, at + v_rows[block] * row_bytes, a->dim, dim, a->brain);
        }
        for (int32_t i = 0; i < count; i++) {
            const int64_t position = oldest + i;
            int64_t first = a->window ? position - a->window + 1 - base : 0, end = position + 1 - base;
            first = first < 0 ? 0 : first, end = end > KEYS ? KEYS : end;
            if (first >= end) continue;
            for (int64_t at = (int64_t)i * a->group; at < (int64_t)(i + 1) * a->group; at++)
                if (dim == 64 && a->cap <= 0 && first == 0 && end == KEYS)
                    one_block(q + at * 64, k, v, sums + at * 64, best + at, total + at, 0, KEYS, 64,
                              a->scale, 0);
                else
                    one_block(q + at * dim, k, v, sums + at * dim, best + at, total + at, (int)first,
                              (int)end, dim, a->scale, a->cap);
        }
    }
    for (int32_t i = 0; i < count; i++)
        for (int32_t g = 0; g < a->group; g++) {
            const int64_t at = (int64_t)i * a->group + g;
            const int64_t to = ((row + i) * a->kv_heads * a->group + head * a->group + g) * a->dim;
            const float share = 1.0f / total[at];
            for (int32_t d = 0; d < a->dim; d++)
                store_at(a->out, to + d, sums[at * dim + d] * share, a->brain);
        }
}

typedef void (*AttentionItem)(const Attention *, int64_t, float *);
static void attention_plain(const Attention *a, int64_t item, float *memory) {
    attention_item(a, item, memory);
}
#if X86
TARGET_256 static void attention_256(const Attention *a, int64_t item, float *memory) {
    attention_item(a, item, memory);
}
TARGET_512 static void attention_512(const Attention *a, int64_t item, float *memory) {
    attention_item(a, item, memory);
}
#endif
#endif
