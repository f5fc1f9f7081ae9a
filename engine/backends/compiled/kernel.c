/* Products of float rows with packed matrices of floats or codes, and attention, in which nothing that is computed for a row
 * depends on the other rows: `product.h` and `attention.h` say how.
 *
 * Built when a C compiler is there. Threads are those of the OpenMP library that torch has loaded.
 */
#include "attention.h"
#include "codes.h"
#include "team.h"
#include "kv_codes.h"
#include "mixture.h"
#include "pointwise.h"
#if X86
#include "codes_x86.h"
#endif

#define ALONE (1 << 16) /* multiplications, below which waking a second thread costs more */
#define ATTEND_ALONE (team ? 1 << 15 : 1 << 19) /* the same of attention; threads of a team are awake */
#define LONG (1 << 22)  /* multiplications, from which on the interpreter's lock is released */

typedef struct {
    const char *weights, *gate;     /* packed matrices of one shape, or their `Coded`; the gate may be NULL */
    const float *bias, *gate_bias;  /* may be NULL */
    int32_t first, rows;            /* of the rows of x */
    int64_t units;                  /* of this group and of those before it */
} Group;

/* What an adapter adds to its rows: inner B, for each of the parts of which the outputs are made. */
typedef struct {
    const char *inner; /* of its first row: `rank` values for each part, as the instructions read them */
    const char *b[3];  /* packed; NULL where the adapter does not change the part */
    int64_t stride;    /* bytes between rows of inner */
    int32_t first, rows, rank;
} Adapted;

typedef struct {
    Group *groups;
    const char *x, *other; /* rows of floats or bfloat16; `other` is added */
    char *out, *ready;     /* ready: the rows of x as the instructions read them */
    int64_t x_stride, out_stride, other_stride; /* in elements */
    int64_t ready_stride;                       /* in bytes */
    int64_t units, next;                        /* next: shared by the threads */
    const int32_t *sources;                     /* the row of x for each row; NULL: the same */
    const Adapted *adapted;                     /* adapters of the rows, in their order */
    int32_t adapters, ends[2];                  /* ends: outputs before the second and third part */
    int32_t before;                             /* outputs before the first of these, of an adapted site */
    int32_t count, rows, width, filled, outputs;
    int bf16, widened, coded, kind, threads;   /* coded: the matrices are of codes, all of one format */
    Codes codes;                                /* the rows, where the matrices are coded */
} Work;

/* Loops of one kind each, which compilers vectorise. */
INLINE void multiply_activated(float *sum, const float *gate, int kind) {
    if (kind == SILU)
        for (int i = 0; i < LANES; i++) sum[i] *= activated(gate[i], SILU);
    else if (kind == GELU_TANH)
        for (int i = 0; i < LANES; i++) sum[i] *= activated(gate[i], GELU_TANH);
    else
        for (int i = 0; i < LANES; i++) sum[i] *= activated(gate[i], GELU);
}

/* What is left of a row's outputs from `at` on, and storing them. */
INLINE void finish(const Work *w, const Group *g, float *sum, float *gate, int64_t row, int32_t at,
                   const int32_t lanes) {
    if (g->bias)
        for (int32_t i = 0; i < lanes; i++) sum[i] += g->bias[at + i];
    if (g->gate) {
        if (g->gate_bias)
            for (int32_t i = 0; i < lanes; i++) gate[i] += g->gate_bias[at + i];
        multiply_activated(sum, gate, w->kind);
    }
    const int64_t to = row * w->out_stride + at, more = row * w->other_stride + at;
    if (lanes == LANES) {
        Lanes values, other;
        memcpy(&values, sum, 64);
        if (w->other) lanes_at(w->other, more, w->bf16, &other), values += other;
        store_lanes(w->out, to, &values, w->bf16);
        return;
    }
    if (w->other)
        for (int32_t i = 0; i < lanes; i++) sum[i] += value_at(w->other, more + i, w->bf16);
    for (int32_t i = 0; i < lanes; i++) store_at(w->out, to + i, sum[i], w->bf16);
}

/* Adds what the adapters of some rows give to a pair of tiles: to their sums, before these are rounded. */
INLINE void add_adapters(const Work *w, int64_t row, int32_t rows, int32_t tile, const int pair,
                         const int gated, float (*sums)[BLOCK][LANES], Sums sums_of) {
    const int64_t size = w->bf16 ? 2 : 4;
    for (const Adapted *a = w->adapted; a < w->adapted + w->adapters && a->first < row + rows; a++) {
        const int64_t begin = a->first > row ? a->first - row : 0;
        const int64_t end = a->first + a->rows < row + rows ? a->first + a->rows - row : rows;
        if (begin >= end) continue;
        int32_t parts[2], at[2]; /* of each tile: its part, and the output of that part */
        for (int t = 0; t < pair; t++) {
            at[t] = w->before + (gated ? tile : tile + t) * LANES;
            /* Of a gate's pair the first tile is the other matrix's, which is the second part. */
            parts[t] = gated ? 1 - t : (at[t] >= w->ends[0]) + (at[t] >= w->ends[1]);
            if (!gated && parts[t]) at[t] -= w->ends[parts[t] - 1];
        }
        for (int t = 0; t < pair; t++) {
            const char *b = a->b[parts[t]];
            if (!b) continue;
            Part part = {.x = a->inner + (a->first < row ? (row - a->first) * a->stride : 0)
                             + parts[t] * a->rank * size,
                         .stride = a->stride, .width = a->rank, .tiles = 1, .rows = (int)(end - begin),
                         .bf16 = w->bf16, .more = 1};
            float (*to)[BLOCK][LANES] = (float (*)[BLOCK][LANES])sums[t][begin];
            part.weights[0] = b + (int64_t)at[t] * a->rank * size;
            if (t + 1 < pair && parts[t + 1] == parts[t]) {
                part.weights[1] = b + (int64_t)at[++t] * a->rank * size;
                part.tiles = 2;
            }
            /* Of the next unit: of an adapter with few rows, a processor does not look that far ahead. */
            const int64_t bytes = (int64_t)part.tiles * a->rank * LANES * size;
            for (int64_t at_next = bytes; at_next < 2 * bytes; at_next += 64)
                __builtin_prefetch(part.weights[0] + at_next);
            sums_of(&part, to);
        }
    }
}

/* few: what sums the few products of adapters; codes: of matrices of codes, which then are the base. */
INLINE void do_unit(const Work *w, const Group *g, int64_t unit, Sums sums_of, Sums few, Tile codes) {
    const int32_t tiles = (w->outputs + LANES - 1) / LANES;
    const int64_t bytes = (int64_t)w->filled * LANES * (w->bf16 ? 2 : 4);
    const int32_t tile = (int32_t)(g->gate ? unit : unit * 2);
    const int pair = g->gate || tile + 1 < tiles ? 2 : 1, stored = g->gate ? 1 : pair;
    float sums[2][BLOCK][LANES];
    Part part = {.weights = {g->weights + tile * bytes, (g->gate ? g->gate + tile * bytes
                                                                 : g->weights + (tile + 1) * bytes)},
                 .stride = w->ready_stride, .width = w->filled, .tiles = pair, .bf16 = w->bf16};
    if (!codes && g->rows <= BLOCK) { /* weights that several blocks of rows need are near by then */
        const int last = tile + stored >= tiles;
        const Group *next = last && g + 1 < w->groups + w->count ? g + 1 : g;
        const int64_t at = last ? 0 : (tile + stored) * bytes;
        part.next[0] = next->weights + at;
        part.next[1] = next->gate ? next->gate + at : part.next[0] + bytes;
    }
    for (int32_t begin = 0; begin < g->rows; begin += BLOCK) {
        const int64_t row = g->first + begin;
        part.rows = g->rows - begin < BLOCK ? g->rows - begin : BLOCK;
        part.x = w->ready + row * w->ready_stride;
        if (codes) {
            const Coded *const matrices[2] = {(const Coded *)g->weights, (const Coded *)(g->gate ? g->gate : g->weights)};
            const int32_t at[2] = {tile, g->gate ? tile : tile + 1};
            sums_of_codes(&w->codes, matrices, at, pair, row, part.rows, sums, codes);
        } else if (g->weights) sums_of(&part, sums);
        else memset(sums, 0, sizeof(sums));
        if (w->adapters)
            add_adapters(w, row, part.rows, tile, pair, g->gate != NULL, sums, few);
        /* Neighbouring outputs one after the other: together they fill a line of the cache. */
        for (int r = 0; r < part.rows; r++)
            for (int t = 0; t < stored; t++) {
                const int32_t at = (tile + t) * LANES;
                const int32_t lanes = w->outputs - at < LANES ? w->outputs - at : LANES;
                finish(w, g, sums[t][r], sums[1][r], row + r, at, lanes);
            }
    }
}

INLINE void fill_row(const Work *w, int64_t row) {
    const char *from = w->x + (w->sources ? w->sources[row] : row) * w->x_stride * (w->bf16 ? 2 : 4);
    if (w->coded) {
        float values[w->filled];
        widen(values, from, w->width, w->filled, w->bf16);
        to_codes(values, &w->codes, row);
        return;
    }
    char *to = w->ready + row * w->ready_stride;
    if (w->widened || !w->bf16) {
        widen((float *)to, from, w->width, w->filled, w->bf16);
        return;
    }
    memcpy(to, from, (size_t)w->width * 2);
    memset(to + (size_t)w->width * 2, 0, (size_t)(w->filled - w->width) * 2);
}

/* inner = x A^T, out += inner B: a of [rank, width], b of [rank, outputs]. */
typedef struct {
    const char *x, *a, *b;
    char *out;
    int64_t x_stride, out_stride;
    int32_t rows, width, rank, outputs;
    int bf16, threads;
} Ranks;

INLINE void add_ranks(const Ranks *w, int64_t row) {
    const int size = w->bf16 ? 2 : 4;
    const char *x = w->x + row * w->x_stride * size;
    char *out = w->out + row * w->out_stride * size;
    float inner[w->rank];
    for (int32_t j = 0; j < w->rank; j++) {
        const char *a = w->a + (int64_t)j * w->width * size;
        float one[LANES], two[LANES];
        Lanes total = {0}, left, right;
        for (int32_t k = 0; k < w->width; k += LANES) {
            const int32_t here = w->width - k < LANES ? w->width - k : LANES;
            widen(one, x + (int64_t)k * size, here, LANES, w->bf16);
            widen(two, a + (int64_t)k * size, here, LANES, w->bf16);
            memcpy(&left, one, 64), memcpy(&right, two, 64);
            total += left * right;
        }
        inner[j] = folded(&total);
    }
    for (int32_t k = 0; k < w->outputs; k += LANES) {
        const int32_t here = w->outputs - k < LANES ? w->outputs - k : LANES;
        float one[LANES];
        Lanes total = {0}, right;
        for (int32_t j = 0; j < w->rank; j++) {
            widen(one, w->b + ((int64_t)j * w->outputs + k) * size, here, LANES, w->bf16);
            memcpy(&right, one, 64);
            total += right * inner[j];
        }
        memcpy(one, &total, 64);
        for (int32_t i = 0; i < here; i++)
            store_at(out, k + i, value_at(out, k + i, w->bf16) + one[i], w->bf16);
    }
}

typedef struct {
    char *gate;
    const char *up;
    long long gate_stride, up_stride;
    int32_t rows, width;
    int bf16, kind;
} Activation;

/* One row at a time, so that a value's instructions follow from its column alone. */
INLINE void activate_rows(const Activation *w, const int bf16) {
    for (int64_t row = 0; row < w->rows; row++) {
        char *gate = w->gate + row * w->gate_stride * (bf16 ? 2 : 4);
        const char *up = w->up ? w->up + row * w->up_stride * (bf16 ? 2 : 4) : NULL;
        for (int32_t i = 0; i < w->width; i++) {
            float value = activated(value_at(gate, i, bf16), w->kind);
            store_at(gate, i, up ? value * value_at(up, i, bf16) : value, bf16);
        }
    }
}

/* One of each for every kind of processor. */
#define EACH_LEVEL(target, name, sums)                                                        \
    target static void unit_##name(const Work *w, const Group *g, int64_t unit) {             \
        do_unit(w, g, unit, sums, sums, NULL);                                                \
    }                                                                                         \
    target static void fill_##name(const Work *w, int64_t row) { fill_row(w, row); }          \
    target static void ranks_##name(const Ranks *w, int64_t row) { add_ranks(w, row); }       \
    target static void activate_##name(const Activation *w) {                                 \
        if (w->bf16) activate_rows(w, 1);                                                    \
        else activate_rows(w, 0);                                                             \
    }                                                                                         \
    target static void norm_##name(const Norm *w, int64_t row) {                              \
        if (w->bf16) norm_row(w, row, 1);                                                    \
        else norm_row(w, row, 0);                                                             \
    }                                                                                         \
    target static void place_##name(const Placing *w, int64_t row) {                          \
        if (w->bf16) place_row(w, row, 1);                                                   \
        else place_row(w, row, 0);                                                            \
    }                                                                                         \
    target static void route_##name(const Routing *w, int64_t row) { route_row(w, row); }     \
    target static void combine_##name(const Combining *w, int64_t row) {                      \
        if (w->bf16) combine_row(w, row, 1);                                                 \
        else combine_row(w, row, 0);                                                          \
    }                                                                                         \
    target static void exclude_##name(const Exclusion *w, int64_t row) { exclude_row(w, row); }           \
    target static void greatest_##name(const Greatest *w, int64_t row) { greatest_of_row(w, row); }

EACH_LEVEL(, plain, sums_plain)
static void coded_plain(const Work *w, const Group *g, int64_t unit) {
    do_unit(w, g, unit, sums_plain, sums_plain, tile_plain);
}
#if X86
EACH_LEVEL(TARGET_256, 256, sums_256)
EACH_LEVEL(TARGET_512, 512, sums_512)
TARGET_256 static void coded_256(const Work *w, const Group *g, int64_t unit) {
    do_unit(w, g, unit, sums_256, sums_256, tile_256);
}
static Tile tile_of_512 = tile_512; /* some processors with AVX-512 have no VNNI */
TARGET_512 static void coded_512(const Work *w, const Group *g, int64_t unit) {
    const Sums few = w->bf16 ? sums_bf16 : sums_512;
    do_unit(w, g, unit, few, few, tile_of_512);
}
TARGET_512 static void unit_bf16(const Work *w, const Group *g, int64_t unit) {
    do_unit(w, g, unit, w->bf16 ? sums_bf16 : sums_512, w->bf16 ? sums_bf16 : sums_512, NULL);
}
TARGET_512 static void unit_wide(const Work *w, const Group *g, int64_t unit) {
    do_unit(w, g, unit, w->bf16 ? sums_widened : sums_512, w->bf16 ? sums_bf16 : sums_512, NULL);
}
TARGET_512 static void unit_amx(const Work *w, const Group *g, int64_t unit) {
    /* To set up the tiles takes longer than all products of an adapter of one row. */
    do_unit(w, g, unit, w->bf16 ? sums_amx : sums_512, w->bf16 ? sums_bf16 : sums_512, NULL);
}
#endif

typedef struct {
    const char *name;
    void (*unit)(const Work *, const Group *, int64_t);
    void (*coded)(const Work *, const Group *, int64_t);
    void (*fill)(const Work *, int64_t);
    void (*ranks)(const Ranks *, int64_t);
    void (*activate)(const Activation *);
    AttentionItem attend;
    void (*norm)(const Norm *, int64_t);
    void (*place)(const Placing *, int64_t);
    void (*route)(const Routing *, int64_t);
    void (*combine)(const Combining *, int64_t);
    void (*exclude)(const Exclusion *, int64_t);
    void (*greatest)(const Greatest *, int64_t);
    void (*store_kv)(const KvWork *);
    void (*gather_kv)(const KvWork *, int64_t, int64_t);
    int pairs;  /* whether there are products of bfloat16 */
    int widens; /* whether rows of bfloat16 are widened to floats before their products */
} Level;

/* `unit` sums a unit of products; everything else is compiled for `isa`. */
#define LEVEL(name, unit, isa, pairs, widens)                                                             \
    {name, unit_##unit, coded_##isa, fill_##isa, ranks_##isa, activate_##isa, attention_##isa, norm_##isa, \
     place_##isa, route_##isa, combine_##isa, exclude_##isa, greatest_##isa, kv_store_##isa,     \
     kv_gather_##isa, pairs, widens}

static const Level levels[] = {
#if X86
    LEVEL("amx", amx, 512, 1, 0),
    LEVEL("avx512wide", wide, 512, 1, 1),
    LEVEL("avx512bf16", bf16, 512, 1, 0),
    LEVEL("avx512", 512, 512, 0, 1),
    LEVEL("avx2", 256, 256, 0, 1),
#endif
    LEVEL("plain", plain, plain, 0, 1),
};
#define LEVELS ((int)(sizeof(levels) / sizeof(levels[0])))
static const Level *level;

static int has(const char *name) {
#if X86
    const int wide_ones = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512dq");
    if (!strcmp(name, "amx")) return has("avx512bf16") && has_amx();
    if (!strcmp(name, "avx512wide")) return has("avx512bf16");
    if (!strcmp(name, "avx512bf16")) return wide_ones && __builtin_cpu_supports("avx512bf16");
    if (!strcmp(name, "avx512")) return wide_ones;
    if (!strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return !strcmp(name, "plain");
}

/* Intel's processors multiply twice as many floats as pairs of bfloat16 in a cycle, AMD's half as many. */
static int is_best(const char *name) {
#if X86
    return strcmp(name, "avx512wide") || __builtin_cpu_is("intel");
#else
    return name != NULL;
#endif
}

/* Chooses the instructions, the best where `name` is NULL; -1 for what this processor does not have. */
static int choose(const char *name) {
#if X86
    if (!__builtin_cpu_supports("avx512vnni")) tile_of_512 = tile_256;
#endif
    for (int i = 0; i < LEVELS; i++)
        if ((name ? !strcmp(name, levels[i].name) : is_best(levels[i].name)) && has(levels[i].name))
            return level = &levels[i], 0;
    return -1;
}

/* A thread's share of work whose rows are computed one by one. */
#define ROWS_PART(name, Type)                                                                \
    static void name##_part(void *given, int number, int count) {                            \
        const Type *w = given;                                                               \
        for (int32_t row = number; row < w->rows; row += count) level->name(w, row);         \
    }

ROWS_PART(fill, Work)
ROWS_PART(ranks, Ranks)
ROWS_PART(norm, Norm)
ROWS_PART(place, Placing)
ROWS_PART(route, Routing)
ROWS_PART(combine, Combining)

/* Threads take the next units when they are done with some: another program may hold one of them up.
 * The first take many at once, because a processor reads ahead in neighbouring memory. before: units with which
 * threads begin. */
static int64_t take_units(Work *w, int threads, int64_t before, int64_t *first) {
    int64_t taken = __atomic_load_n(&w->next, __ATOMIC_RELAXED), count;
    do {
        const int64_t left = w->units - before - taken;
        if (left <= 0) return 0;
        count = left / (2 * threads);
        if (threads == 1) count = left;
        if (count < 1) count = 1;
    } while (!__atomic_compare_exchange_n(&w->next, &taken, taken + count, 1, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    *first = before + taken;
    return count;
}

static void multiply_part(void *given, int number, int count) {
    Work *w = given;
    const Group *group = w->groups;
    const int64_t own = count > 1 ? first_units(w->units, count) : 0;
    int64_t before = 0, unit = number * own, many = own;
    do
        for (; many > 0; many--, unit++) {
            while (unit >= group->units) before = group->units, group++;
            (w->coded ? level->coded : level->unit)(w, group, unit - before);
        }
    while ((many = take_units(w, count, own * count, &unit)) > 0);
}

/* Bytes for the rows of x as products read them; 0 where they are read as they lie. */
static size_t ready_bytes(Work *w) {
    w->filled = (w->width + STEP - 1) / STEP * STEP;
    if (w->coded) return codes_bytes(w->rows, w->filled);
    w->widened = w->bf16 && level->widens;
    const int size = w->bf16 && !w->widened ? 2 : 4, copied = w->sources || w->widened || w->filled > w->width;
    w->ready_stride = (copied ? w->filled : w->x_stride) * size;
    return copied ? (size_t)w->rows * w->ready_stride : 0;
}

/* memory: `ready_bytes`. */
static void make_ready(Work *w, char *memory, int threads) {
    const size_t bytes = ready_bytes(w);
    w->ready = bytes ? memory : (char *)w->x;
    if (w->coded) w->codes = codes_in(memory, w->rows, (const Coded *)w->groups->weights);
    if (bytes) run(fill_part, w, (int64_t)w->rows * w->width < ALONE ? 1 : threads);
}

static void multiply(Work *w, int threads) {
    run(multiply_part, w, (int64_t)w->rows * w->outputs * w->filled < ALONE ? 1 : threads);
}

typedef struct {
    Attention attention;
    float *memory;
    int64_t next;
} Attending;

static void attend_part(void *given, int number, int count) {
    Attending *w = given;
    const int64_t items = attention_items(&w->attention);
    float *memory = w->memory + number * attention_floats(&w->attention);
    int64_t item;
    (void)count;
    while ((item = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED)) < items)
        level->attend(&w->attention, item, memory);
}

#include "interface.h"
