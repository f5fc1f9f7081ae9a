/* Norms and rotations of rows, each computed by itself and rounded once. */
#ifndef POINTWISE_H
#define POINTWISE_H
#include "rows.h"

/* out = x / rms(x) * weight, for each row or for each of its heads, which follow each other. x and out: rows of
 * floats or bfloat16; `rows` counts heads, and `width` is a head's. */
typedef struct {
    const char *x;
    const float *weight;
    char *out;
    long long stride, out_stride; /* in elements */
    int32_t rows, width, heads; /* heads: of a row */
    float eps;
    int bf16;
} Norm;

INLINE void norm_row(const Norm *w, int64_t row, const int bf16) {
    const int size = bf16 ? 2 : 4;
    const int64_t token = row / w->heads, before = row % w->heads * w->width;
    const char *x = w->x + (token * w->stride + before) * size;
    char *out = w->out + (token * w->out_stride + before) * size;
    Lanes squares = {0};
    float values[LANES];
    for (int32_t k = 0; k < w->width; k += LANES) {
        Lanes each;
        if (k + LANES <= w->width) {
            for (int32_t i = 0; i < LANES; i++) values[i] = value_at(x, k + i, bf16);
        } else {
            widen(values, x + (int64_t)k * size, w->width - k, LANES, bf16);
        }
        memcpy(&each, values, 64);
        squares += each * each;
    }
    const float factor = 1.0f / sqrtf(folded(&squares) / (float)w->width + w->eps);
    for (int32_t i = 0; i < w->width; i++)
        store_at(out, i, value_at(x, i, bf16) * factor * w->weight[i], bf16);
}

/* Rotates the first heads of rows in place, then stores heads from `first` on in their KV slots. */
typedef struct {
    char *x, *pool;
    const char *cos, *sin; /* a row for each token; the sine of each head's first half is negated */
    const int64_t *slots;  /* [rows, stored] */
    long long stride, angle_stride; /* in elements */
    int32_t rows, rotated, first, stored, dim;
    int bf16;
} Placing;

INLINE void place_row(const Placing *w, int64_t row, const int bf16) {
    const int32_t dim = w->dim, half = dim / 2;
    const int64_t size = bf16 ? 2 : 4;
    char *x = w->x + row * w->stride * size;
    const char *cos = w->cos + row * w->angle_stride * size;
    const char *sin = w->sin + row * w->angle_stride * size;
    for (int32_t head = 0; head < w->rotated; head++) {
        char *low = x + head * dim * size, *high = low + half * size;
        const char *low_cos = cos + head * dim * size, *high_cos = low_cos + half * size;
        const char *low_sin = sin + head * dim * size, *high_sin = low_sin + half * size;
        for (int32_t i = 0; i < half; i++) {
            const float a = value_at(low, i, bf16), b = value_at(high, i, bf16);
            store_at(low, i, a * value_at(low_cos, i, bf16) + b * value_at(low_sin, i, bf16), bf16);
            store_at(high, i, b * value_at(high_cos, i, bf16) + a * value_at(high_sin, i, bf16), bf16);
        }
    }
    const int64_t bytes = dim * size;
    for (int32_t n = 0; n < w->stored; n++)
        memcpy(w->pool + w->slots[row * w->stored + n] * bytes, x + (w->first + n) * bytes, bytes);
}

/* Logits whose bit is not set have minus infinity added, so that one that is not finite becomes not a
 * number. index: the row of the logits for each row of the masks. */
typedef struct {
    char *logits;
    const uint32_t *masks;
    const int64_t *index;
    long long stride; /* floats between rows of logits */
    int32_t rows, vocab, words;
} Exclusion;

INLINE void exclude_row(const Exclusion *w, int64_t row) {
    float *logits = (float *)w->logits + w->index[row] * w->stride;
    const uint32_t *mask = w->masks + row * w->words;
    const int32_t whole = w->vocab / 32;
    for (int32_t n = 0; n < whole; n++) {
        if (mask[n] == 0xffffffffu) continue;
        for (int32_t i = 0; i < 32; i++)
            logits[n * 32 + i] += mask[n] >> i & 1 ? 0.0f : -INFINITY;
    }
    for (int32_t i = whole * 32; i < w->vocab; i++)
        logits[i] += mask[whole] >> (i & 31) & 1 ? 0.0f : -INFINITY;
}

/* The first id of each row's greatest logit; -1 where that is infinite, or one is not a number. */
typedef struct {
    const float *logits;
    int64_t *ids;
    long long stride; /* floats between rows of logits */
    int32_t rows, vocab;
} Greatest;
#define SEARCHED 512 /* logits among which the greatest is looked for a second time */

INLINE float greatest_of(const float *logits, int32_t count, int *strange) {
    Lanes best = {0}, each;
    Flags odd = {0};
    float found[LANES], top = -INFINITY;
    int32_t flags[LANES], k = 0;
    best -= INFINITY;
    for (; k + LANES <= count; k += LANES) {
        memcpy(&each, logits + k, 64);
        const Flags more = each > best;
        best = (Lanes)((more & (Flags)each) | (~more & (Flags)best));
        odd |= each != each;
    }
    memcpy(found, &best, 64), memcpy(flags, &odd, 64);
    for (int i = 0; i < LANES; i++) top = found[i] > top ? found[i] : top, *strange |= flags[i];
    for (; k < count; k++) top = logits[k] > top ? logits[k] : top, *strange |= logits[k] != logits[k];
    return top;
}

INLINE void greatest_of_row(const Greatest *w, int64_t row) {
    const float *logits = w->logits + row * w->stride;
    float top = -INFINITY;
    int32_t at = 0;
    int strange = 0;
    for (int32_t k = 0; k < w->vocab; k += SEARCHED) {
        const int32_t here = w->vocab - k < SEARCHED ? w->vocab - k : SEARCHED;
        const float found = greatest_of(logits + k, here, &strange);
        if (found > top) top = found, at = k;
    }
    if (strange || top - top != 0) {
        w->ids[row] = -1;
        return;
    }
    while (logits[at] != top) at++;
    w->ids[row] = at;
}

#endif
