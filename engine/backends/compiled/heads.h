/* A block of keys for the heads of some queries, with vectors of one width: `attention.h` includes this once for
 * each kind of processor, because compilers make poor code of vectors that are wider than its registers. */
enum { NAMED(WIDTH) = sizeof(VECTOR) / 4 };
typedef uint32_t NAMED(Bits) __attribute__((vector_size(sizeof(VECTOR))));

/* Values of a row at even and odd places, as many of each as a vector has; `at` counts values. */
INLINE void NAMED(pairs)(const char *row, int64_t at, const int bf16, VECTOR *even, VECTOR *odd) {
    if (!bf16) {
        const float *values = (const float *)row + at / STEP * STEP + at % STEP / 2;
        memcpy(even, values, sizeof(VECTOR)), memcpy(odd, values + LANES, sizeof(VECTOR));
        return;
    }
    NAMED(Bits) both;
    memcpy(&both, row + at * 2, sizeof(VECTOR));
    *even = (VECTOR)(both << 16), *odd = (VECTOR)(both & 0xffff0000u);
}

/* The sums of four vectors' lanes. */
INLINE void NAMED(fold)(const VECTOR *given, float *sums) {
    Quarter each[4];
    for (int i = 0; i < 4; i++) {
        const char *from = (const char *)&given[i];
        Half half[2];
        if (NAMED(WIDTH) == 16) {
            memcpy(&half[0], from, 32), memcpy(&half[1], from + 32, 32);
            half[0] += half[1], from = (const char *)&half[0];
        }
        Quarter quarter;
        memcpy(&each[i], from, 16);
        if (NAMED(WIDTH) > 4) memcpy(&quarter, from + 16, 16), each[i] += quarter;
    }
    const Quarter low = PICK(each[0], each[1], 0, 1, 4, 5) + PICK(each[0], each[1], 2, 3, 6, 7);
    const Quarter high = PICK(each[2], each[3], 0, 1, 4, 5) + PICK(each[2], each[3], 2, 3, 6, 7);
    const Quarter all = PICK(low, high, 0, 2, 4, 6) + PICK(low, high, 1, 3, 5, 7);
    memcpy(sums, &all, 16);
}

/* Of all keys: `share_head` leaves those out that the query does not see. */
INLINE void NAMED(score)(const Keys *b, int64_t at, const int64_t dim, const int bf16) {
    const char *q = (const char *)(b->q + at * dim);
    for (int four = 0; four < KEYS; four += 4) {
        VECTOR each[4], x[2], y[2];
        for (int i = 0; i < 4; i++) {
            each[i] = (VECTOR){0};
            for (int64_t d = 0; d < dim; d += 2 * NAMED(WIDTH)) {
                NAMED(pairs)(q, d, 0, &x[0], &x[1]), NAMED(pairs)(b->k[four + i], d, bf16, &y[0], &y[1]);
                each[i] += x[0] * y[0];
                each[i] += x[1] * y[1];
            }
        }
        NAMED(fold)(each, b->shares + at * KEYS + four);
    }
}

INLINE void NAMED(sum)(const Keys *b, int64_t at, int first, int end, const int64_t dim, const int bf16) {
    enum { PAIRS = 32 / NAMED(WIDTH) > 4 ? 4 : 32 / NAMED(WIDTH) };
    const float *shares = b->shares + at * KEYS;
    const int pairs = dim % (2 * PAIRS * NAMED(WIDTH)) ? PAIRS / 2 : PAIRS;
    for (int64_t d = 0; d < dim; d += 2 * pairs * NAMED(WIDTH)) {
        char *sums = (char *)(b->sums + at * dim);
        VECTOR even[PAIRS], odd[PAIRS], value[2];
        for (int n = 0; n < pairs; n++) {
            NAMED(pairs)(sums, d + n * 2 * NAMED(WIDTH), 0, &even[n], &odd[n]);
            even[n] *= b->kept[at], odd[n] *= b->kept[at];
        }
        for (int i = first; i < end; i++)
            for (int n = 0; n < pairs; n++) {
                NAMED(pairs)(b->v[i], d + n * 2 * NAMED(WIDTH), bf16, &value[0], &value[1]);
                even[n] += value[0] * shares[i], odd[n] += value[1] * shares[i];
            }
        for (int n = 0; n < pairs; n++) {
            const int64_t to = d + n * 2 * NAMED(WIDTH);
            float *out = (float *)sums + to / STEP * STEP + to % STEP / 2;
            memcpy(out, &even[n], sizeof(VECTOR)), memcpy(out + LANES, &odd[n], sizeof(VECTOR));
        }
    }
}

/* Each step for all heads before the next: a processor has more to do while it waits for one of them. */
INLINE void NAMED(block)(const Attention *a, const Keys *b, int32_t count, int64_t oldest, int64_t base,
                      const int64_t dim, const int bf16) {
    int ranges[QUERIES][2];
    for (int32_t i = 0; i < count; i++) {
        const int64_t first = a->window ? oldest + i - a->window + 1 - base : 0, end = oldest + i + 1 - base;
        ranges[i][0] = first < 0 ? 0 : first > KEYS ? KEYS : (int)first;
        ranges[i][1] = end > KEYS ? KEYS : end < 0 ? 0 : (int)end;
    }
#define EACH_HEAD(step)                                                                        \
    for (int32_t i = 0; i < count; i++) {                                                      \
        const int first = ranges[i][0], end = ranges[i][1];                                    \
        if (first >= end) continue;                                                            \
        for (int64_t at = (int64_t)i * a->group; at < (int64_t)(i + 1) * a->group; at++) step; \
    }
    EACH_HEAD(NAMED(score)(b, at, dim, bf16))
    EACH_HEAD(if (first == 0 && end == KEYS) share_head(b, at, 0, KEYS, a->scale, a->cap);
              else share_head(b, at, first, end, a->scale, a->cap))
    EACH_HEAD(if (first == 0 && end == KEYS) NAMED(sum)(b, at, 0, KEYS, dim, bf16);
              else NAMED(sum)(b, at, first, end, dim, bf16))
#undef EACH_HEAD
}

TARGET static void NAMED(attention)(const Attention *a, int64_t item, float *memory) {
    const int size = a->bf16 ? 2 : 4;
    const int32_t parts = (a->queries + QUERIES - 1) / QUERIES, part = (int32_t)(item % parts);
    const int32_t head = (int32_t)(item / parts % a->kv_heads);
    const int32_t sequence = (int32_t)(item / parts / a->kv_heads);
    const int32_t begin = part * QUERIES;
    const int32_t count = a->queries - begin < QUERIES ? a->queries - begin : QUERIES;
    const int64_t dim = filled_to(a->dim, STEP), heads = (int64_t)QUERIES * a->group;
    const int copied = dim > a->dim || (int64_t)count * a->group > FEW;
    float *k = memory, *v = k + KEYS * dim;
    Keys b = {.q = v + KEYS * dim};
    for (int i = 0; i < KEYS; i++) b.k[i] = (char *)b.q; /* any row, of which nothing comes */
    b.sums = b.q + heads * dim, b.shares = b.sums + heads * dim, b.totals = b.shares + heads * LANES;
    b.best = b.totals + heads * LANES, b.kept = b.best + filled_to(heads, LANES);
    const int64_t start = a->starts[sequence];
    const int64_t oldest = a->newest[sequence] - (a->queries - 1 - begin), last = oldest + count - 1;
    const int64_t row = a->rows ? a->rows[sequence] : (int64_t)sequence * a->queries + begin;
    for (int32_t i = 0; i < count; i++)
        for (int32_t g = 0; g < a->group; g++) {
            const int64_t at = (int64_t)i * a->group + g, of = head * a->group + g;
            spread(b.q + at * dim, a->q + ((row + i) * a->stride + of * a->dim) * size, a->dim, dim, a->bf16);
            memset(b.sums + at * dim, 0, sizeof(float) * dim);
            memset(b.totals + at * LANES, 0, sizeof(float) * LANES);
            b.best[at] = a->sinks ? a->sinks[of] : -1e30f;
            b.totals[at * LANES] = a->sinks ? 1.0f : 0.0f;
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
            b.k[i] = at + k_rows[block] * row_bytes, b.v[i] = at + v_rows[block] * row_bytes;
            if (!copied) continue;
            spread(k + i * dim, b.k[i], a->dim, dim, a->bf16), b.k[i] = (char *)(k + i * dim);
            spread(v + i * dim, b.v[i], a->dim, dim, a->bf16), b.v[i] = (char *)(v + i * dim);
        }
        if (copied || !a->bf16) {
            if (dim == 64) NAMED(block)(a, &b, count, oldest, base, 64, 0);
            else NAMED(block)(a, &b, count, oldest, base, dim, 0);
        } else if (dim == 64) NAMED(block)(a, &b, count, oldest, base, 64, 1);
        else NAMED(block)(a, &b, count, oldest, base, dim, 1);
    }
    for (int32_t i = 0; i < count; i++)
        for (int32_t g = 0; g < a->group; g++)
            store_head(a, &b, (int64_t)i * a->group + g, dim,
                       ((row + i) * a->kv_heads * a->group + head * a->group + g) * a->dim);
}
#undef VECTOR
#undef NAMED
#undef TARGET
