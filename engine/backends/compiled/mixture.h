/* A mixture of experts: which experts each row uses, their products grouped by expert, and the sum of what
 * they give. Nothing that is computed for a row depends on the other rows. */
#ifndef MIXTURE_H
#define MIXTURE_H

/* What a layer has; `table` of `mix` holds it. */
typedef struct {
    const double *router, *bias; /* of the scores: [experts, hidden] and [experts], or NULL */
    const int64_t *matrices;     /* [experts, 6]: up, its bias, gate, its bias, down, its bias; 0: none */
    int64_t *counts;             /* rows that each expert has computed; they are added to */
    int32_t experts, active, hidden, inner;
    int normed; /* whether the shares of a row's experts add up to 1 */
    int coded;  /* whether the matrices are of codes: those of `up` and gates of one format, and those of `down` */
    float factor;
} Mixture;

enum { ROUTER, ROUTER_BIAS, MATRICES, COUNTS, EXPERTS, ACTIVE, HIDDEN, INNER, NORMED, FACTOR, CODED, MIXTURE_FIELDS };

static Mixture mixture_at(const int64_t *table) {
    Mixture m = {(const double *)(uintptr_t)table[ROUTER], (const double *)(uintptr_t)table[ROUTER_BIAS],
                 (const int64_t *)(uintptr_t)table[MATRICES], (int64_t *)(uintptr_t)table[COUNTS],
                 (int32_t)table[EXPERTS], (int32_t)table[ACTIVE], (int32_t)table[HIDDEN], (int32_t)table[INNER],
                 (int)table[NORMED], (int)table[CODED], 1.0f};
    memcpy(&m.factor, &table[FACTOR], 4);
    return m;
}

/* Numbers of each row's experts, the likeliest first, and their shares, rounded as rows are: [rows, active]. */
typedef struct {
    Mixture of;
    const char *x; /* [rows, hidden] */
    double *memory; /* [rows, hidden + experts] */
    float *shares;
    int64_t *chosen;
    int32_t rows;
    int bf16;
} Routing;

typedef double Doubles __attribute__((vector_size(64)));

INLINE double dot(const double *a, const double *b, int32_t width) {
    Doubles total[2] = {{0}, {0}}, left, right;
    int32_t k = 0;
    for (; k + 16 <= width; k += 16)
        for (int h = 0; h < 2; h++) {
            memcpy(&left, a + k + 8 * h, 64), memcpy(&right, b + k + 8 * h, 64);
            total[h] += left * right;
        }
    double sum = 0, each[8];
    total[0] += total[1];
    memcpy(each, &total[0], 64);
    for (int i = 0; i < 8; i++) sum += each[i];
    for (; k < width; k++) sum += a[k] * b[k];
    return sum;
}

/* In doubles: experts whose scores are nearly equal are ranked alike wherever they are computed. */
INLINE void route_row(const Routing *w, int64_t row) {
    const Mixture *m = &w->of;
    double *x = w->memory + row * (m->hidden + m->experts), *likely = x + m->hidden;
    for (int32_t k = 0; k < m->hidden; k++) x[k] = value_at(w->x, row * m->hidden + k, w->bf16);
    double most = -INFINITY, sum = 0;
    for (int32_t e = 0; e < m->experts; e++) {
        likely[e] = dot(x, m->router + (int64_t)e * m->hidden, m->hidden) + (m->bias ? m->bias[e] : 0);
        if (likely[e] > most) most = likely[e];
    }
    for (int32_t e = 0; e < m->experts; e++) sum += likely[e] = exp(likely[e] - most);
    float *shares = w->shares + row * m->active, total = 0;
    int64_t *chosen = w->chosen + row * m->active;
    for (int32_t e = 0; e < m->experts; e++) likely[e] = (float)(likely[e] / sum);
    for (int32_t n = 0; n < m->active; n++) {
        int32_t best = -1;
        for (int32_t e = 0; e < m->experts; e++)
            if (likely[e] != -INFINITY && (best < 0 || likely[e] > likely[best])) best = e;
        chosen[n] = best, shares[n] = (float)likely[best], total += shares[n];
        likely[best] = -INFINITY; /* is taken */
    }
    for (int32_t n = 0; n < m->active; n++) {
        if (m->normed) shares[n] /= total < 1e-20f ? 1e-20f : total;
        shares[n] *= m->factor;
        if (w->bf16) shares[n] = wide(narrow(shares[n]));
    }
}

/* out = the sum of what a row's experts gave, by their shares (+ other): [rows, hidden]. Doubles hold each
 * product exactly, so that no compiler changes a sum by fusing it. */
typedef struct {
    const char *found, *other; /* found: rows in the order of their experts */
    char *out;
    const float *shares;
    const int32_t *places; /* of each row's experts in `found` */
    int32_t rows, hidden, active;
    int bf16;
} Combining;

INLINE void combine_row(const Combining *w, int64_t row, const int bf16) {
    const int32_t *places = w->places + row * w->active;
    const float *shares = w->shares + row * w->active;
    enum { MANY = 64 };
    for (int32_t begin = 0; begin < w->hidden; begin += MANY) {
        const int32_t count = w->hidden - begin < MANY ? w->hidden - begin : MANY;
        double sums[MANY] = {0};
        for (int32_t n = 0; n < w->active; n++) {
            const int64_t at = (int64_t)places[n] * w->hidden + begin;
            const double share = shares[n];
            for (int32_t i = 0; i < count; i++) sums[i] += share * value_at(w->found, at + i, bf16);
        }
        const int64_t to = row * w->hidden + begin;
        if (!w->other) {
            for (int32_t i = 0; i < count; i++) store_at(w->out, to + i, (float)sums[i], bf16);
            continue;
        }
        for (int32_t i = 0; i < count; i++) {
            const float sum = bf16 ? wide(narrow((float)sums[i])) : (float)sums[i];
            store_at(w->out, to + i, sum + value_at(w->other, to + i, bf16), bf16);
        }
    }
}
#endif
