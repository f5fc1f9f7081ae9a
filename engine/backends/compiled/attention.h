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
    int bf16;
} Attention;

INLINE int64_t attention_items(const Attention *a) {
    return (int64_t)a->sequences * a->kv_heads * ((a->queries + QUERIES - 1) / QUERIES);
}

/* Multiplications. */
INLINE int64_t attention_cost(const Attention *a) {
    return 2 * (int64_t)a->sequences * a->queries * a->positions * a->kv_heads * a->group * a->dim;
}

#define FEW 4 /* heads, which read keys and values where they lie: more of them share what is widened once */

INLINE int64_t filled_to(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

/* Floats of memory that one thread needs. */
static int64_t attention_floats(const Attention *a) {
    const int64_t dim = filled_to(a->dim, STEP), heads = (int64_t)QUERIES * a->group;
    return 2 * KEYS * dim + heads * (2 * dim + 2 * LANES) + 2 * filled_to(heads, LANES);
}

INLINE void two_at(const char *row, int64_t at, int bf16, Lanes *values) {
    if (!bf16) {
        memcpy(&values[0], row + at * 4, 64), memcpy(&values[1], row + at * 4 + 64, 64);
        return;
    }
    Words pairs;
    memcpy(&pairs, row + at * 2, 64);
    values[0] = (Lanes)(pairs << 16), values[1] = (Lanes)(pairs & 0xffff0000u);
}

/* A row with zeros up to `filled`. Of 32 values of bfloat16 those at even places come first, then those at odd
 * ones: to take them apart so costs two instructions. */
INLINE void spread(float *to, const char *row, int64_t dim, int64_t filled, int bf16) {
    Lanes values[2];
    int64_t d = 0;
    for (; d + STEP <= dim; d += STEP) {
        two_at(row, d, bf16, values);
        memcpy(to + d, &values[0], 64), memcpy(to + d + LANES, &values[1], 64);
    }
    if (d == filled) return;
    char rest[STEP * 4] = {0};
    const int size = bf16 ? 2 : 4;
    memcpy(rest, row + d * size, (size_t)(dim - d) * size);
    two_at(rest, 0, bf16, values);
    memcpy(to + d, &values[0], 64), memcpy(to + d + LANES, &values[1], 64);
}

/* What a block of keys has for the heads of some queries, one after the other, and their softmax so far.
 * All of them have the order of `spread`, but for rows of bfloat16 where they lie. */
typedef struct {
    const char *k[KEYS], *v[KEYS]; /* of the positions that a query sees */
    float *q, *sums;               /* [heads, dim] */
    float *shares, *totals;        /* [heads, 16]; totals: the lanes of a sum */
    float *best, *kept;            /* of each head; kept: by what its sums shrink */
} Keys;

/* A score that is not a number makes the total one that is not. */
INLINE void share_head(const Keys *b, int64_t at, int first, int end, float scale, float cap) {
    float *scores = b->shares + at * KEYS, each[KEYS], best = b->best[at];
    Lanes total, all;
    for (int i = 0; i < KEYS; i++) scores[i] *= scale;
    if (cap > 0)
        for (int i = first; i < end; i++) scores[i] = tanhf(scores[i] / cap) * cap;
    for (int i = 0; i < KEYS; i++) each[i] = i >= first && i < end ? scores[i] : -INFINITY;
    memcpy(&all, each, 64);
    const float most = greatest_lane(&all), top = most > best ? most : best;
    const float kept = best == top ? 1.0f : exponential(best - top);
    for (int i = 0; i < KEYS; i++) { /* all of them, so that compilers vectorise it */
        const float share = exponential(each[i] - top);
        each[i] = i >= first && i < end ? share : 0.0f;
    }
    memcpy(&all, each, 64), memcpy(&total, b->totals + at * LANES, 64);
    total = total * kept + all;
    memcpy(scores, &all, 64), memcpy(b->totals + at * LANES, &total, 64);
    b->best[at] = top, b->kept[at] = kept;
}

/* out = a head's sums over their total. */
INLINE void store_head(const Attention *a, const Keys *b, int64_t at, int64_t dim, int64_t to) {
    Lanes values[2], total;
    memcpy(&total, b->totals + at * LANES, 64);
    const float share = 1.0f / folded(&total), *sums = b->sums + at * dim;
    char *out = a->out + to * (a->bf16 ? 2 : 4);
    for (int64_t d = 0; d < a->dim; d += STEP) {
        const int64_t count = a->dim - d < STEP ? a->dim - d : STEP;
        two_at((const char *)sums, d, 0, values);
        values[0] *= share, values[1] *= share;
        if (!a->bf16) {
            memcpy(out + d * 4, values, (size_t)count * 4);
            continue;
        }
        Words words[2];
        rounded_words(&values[0], &words[0]), rounded_words(&values[1], &words[1]);
        words[0] |= words[1] << 16;
        memcpy(out + d * 2, &words[0], (size_t)count * 2);
    }
}

typedef void (*AttentionItem)(const Attention *, int64_t, float *);

#define VECTOR Quarter
#define NAMED(name) name##_plain
#define TARGET
#include "heads.h"
#if X86
#define VECTOR Half
#define NAMED(name) name##_256
#define TARGET TARGET_256
#include "heads.h"
#define VECTOR Lanes
#define NAMED(name) name##_512
#define TARGET TARGET_512
#include "heads.h"
#endif
#endif
