/* The sums of rows with tiles of 16 outputs, for each kind of processor.
 *
 * A packed matrix has its tiles one after the other: floats [inputs, 16], or bfloat16 in pairs of inputs
 * [inputs / 2, 16, 2], which is what the products of bfloat16 read. Every sum of a row is made in
 * one order, whatever the number of rows is.
 */
#ifndef PRODUCT_H
#define PRODUCT_H
#include "rows.h"
#if X86
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define BLOCK 32 /* rows that one pass over a tile's weights serves */

/* `x`: floats, or bfloat16 where products of it are made; `width`: a multiple of 32, or even and at most 32.
 * sums: [tiles][rows][16], from 0 or, with `more`, from what they are. */
typedef struct {
    const char *weights[2], *x;
    const char *next[2]; /* weights that will be needed next, or NULL */
    int64_t stride;      /* bytes between rows */
    int32_t width;
    int tiles, rows, bf16, more;
} Part;
typedef void (*Sums)(const Part *, float (*)[BLOCK][LANES]);

INLINE void some_rows(const Part *p, const char *weights, const int first, float (*sums)[LANES],
                      const int rows, const int bf16) {
    const char *x = p->x + first * p->stride;
    Lanes total[8];
    for (int r = 0; r < rows; r++) {
        total[r] = (Lanes){0};
        if (p->more) memcpy(&total[r], sums[first + r], 64);
    }
    if (bf16)
        for (int32_t k = 0; k < p->width; k += 2) {
            Words pair;
            memcpy(&pair, weights + (int64_t)k * LANES * 2, 64);
            const Words low = pair << 16, high = pair & 0xffff0000u;
            Lanes even, odd;
            memcpy(&even, &low, 64), memcpy(&odd, &high, 64);
            for (int r = 0; r < rows; r++) {
                const float *row = (const float *)(x + r * p->stride);
                total[r] += even * row[k];
                total[r] += odd * row[k + 1];
            }
        }
    else
        for (int32_t k = 0; k < p->width; k++) {
            Lanes w;
            memcpy(&w, weights + (int64_t)k * LANES * 4, 64);
            for (int r = 0; r < rows; r++)
                total[r] += w * ((const float *)(x + r * p->stride))[k];
        }
    for (int r = 0; r < rows; r++) memcpy(sums[first + r], &total[r], 64);
}

/* Bodies with constant arguments, which the compiler unrolls. */
INLINE void all_rows(const Part *p, float (*sums)[BLOCK][LANES], const int many) {
    for (int t = 0; t < p->tiles; t++) {
        int first = 0;
        if (p->bf16) {
            for (; first + many <= p->rows; first += many)
                some_rows(p, p->weights[t], first, sums[t], many, 1);
            for (; first + 2 <= p->rows; first += 2)
                some_rows(p, p->weights[t], first, sums[t], 2, 1);
            for (; first < p->rows; first++) some_rows(p, p->weights[t], first, sums[t], 1, 1);
        } else {
            for (; first + many <= p->rows; first += many)
                some_rows(p, p->weights[t], first, sums[t], many, 0);
            for (; first + 2 <= p->rows; first += 2)
                some_rows(p, p->weights[t], first, sums[t], 2, 0);
            for (; first < p->rows; first++) some_rows(p, p->weights[t], first, sums[t], 1, 0);
        }
    }
}

static void sums_plain(const Part *p, float (*sums)[BLOCK][LANES]) { all_rows(p, sums, 4); }

#if X86
TARGET_256 static void sums_256(const Part *p, float (*sums)[BLOCK][LANES]) { all_rows(p, sums, 4); }
TARGET_512 static void sums_512(const Part *p, float (*sums)[BLOCK][LANES]) { all_rows(p, sums, 8); }

#define MOST_ROWS 12 /* whose sums with two tiles are in registers */
#define TARGET_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))

TARGET_BF16 INLINE void some_pairs(const Part *p, const int first, float (*sums)[BLOCK][LANES],
                                    const int tiles, const int rows, const int fetch) {
    const int64_t stride = p->stride;
    const char *x[MOST_ROWS / 3]; /* every third row: the two after it have addresses in one instruction */
    for (int r = 0; r < rows; r += 3) x[r / 3] = p->x + (first + r) * stride;
    __m512 total[2][MOST_ROWS];
    for (int t = 0; t < tiles; t++)
        for (int r = 0; r < rows; r++)
            total[t][r] = p->more ? _mm512_loadu_ps(sums[t][first + r]) : _mm512_setzero_ps();
    for (int32_t k = 0; k < p->width; k += 2) {
        __m512i w[2];
        for (int t = 0; t < tiles; t++) {
            w[t] = _mm512_loadu_si512(p->weights[t] + (int64_t)k * LANES * 2);
            if (fetch) _mm_prefetch(p->next[t] + (int64_t)k * LANES * 2, _MM_HINT_T1);
        }
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x[r / 3] + r % 3 * stride, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int t = 0; t < tiles; t++) total[t][r] = _mm512_dpbf16_ps(total[t][r], (__m512bh)w[t], both);
        }
        for (int r = 0; r < rows; r += 3) x[r / 3] += 4;
    }
    for (int t = 0; t < tiles; t++)
        for (int r = 0; r < rows; r++) _mm512_storeu_ps(sums[t][first + r], total[t][r]);
}

/* Weights of bfloat16 times floats, widened in registers: where products of bfloat16 have half the
 * throughput of those of floats, this takes 0.56 of their time. */
TARGET_512 INLINE void some_widened(const Part *p, const int first, float (*sums)[BLOCK][LANES],
                                    const int tiles, const int rows, const int fetch) {
    const char *x = p->x + first * p->stride;
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    __m512 total[2][MOST_ROWS];
    for (int t = 0; t < tiles; t++)
        for (int r = 0; r < rows; r++)
            total[t][r] = p->more ? _mm512_loadu_ps(sums[t][first + r]) : _mm512_setzero_ps();
    for (int32_t k = 0; k < p->width; k += 2) {
        __m512 even[2], odd[2];
        for (int t = 0; t < tiles; t++) {
            const __m512i w = _mm512_loadu_si512(p->weights[t] + (int64_t)k * LANES * 2);
            if (fetch) _mm_prefetch(p->next[t] + (int64_t)k * LANES * 2, _MM_HINT_T0);
            even[t] = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
            odd[t] = _mm512_castsi512_ps(_mm512_and_si512(w, high));
        }
        for (int r = 0; r < rows; r++) {
            const float *pair = (const float *)(x + r * p->stride) + k;
            for (int t = 0; t < tiles; t++)
                total[t][r] = _mm512_fmadd_ps(even[t], _mm512_set1_ps(pair[0]), total[t][r]);
            for (int t = 0; t < tiles; t++)
                total[t][r] = _mm512_fmadd_ps(odd[t], _mm512_set1_ps(pair[1]), total[t][r]);
        }
    }
    for (int t = 0; t < tiles; t++)
        for (int r = 0; r < rows; r++) _mm512_storeu_ps(sums[t][first + r], total[t][r]);
}

/* Rows of the first of as few parts as there have to be. */
INLINE int equal_part(int rows) {
    const int parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
    return parts ? (rows + parts - 1) / parts : 0;
}

/* All rows in equal parts of at most twelve, by a body whose arguments are constant. */
#define EQUAL_PARTS(target, name, some)                                                    \
    target INLINE void name##_tiles(const Part *p, float (*sums)[BLOCK][LANES], const int tiles) { \
        for (int first = 0, many; first < p->rows; first += many) {                        \
            many = equal_part(p->rows - first);                                            \
            switch (many) {                                                                \
            case 12: some(p, first, sums, tiles, 12); break;                               \
            case 11: some(p, first, sums, tiles, 11); break;                               \
            case 10: some(p, first, sums, tiles, 10); break;                               \
            case 9: some(p, first, sums, tiles, 9); break;                                 \
            case 8: some(p, first, sums, tiles, 8); break;                                 \
            case 7: some(p, first, sums, tiles, 7); break;                                 \
            case 6: some(p, first, sums, tiles, 6); break;                                 \
            case 5: some(p, first, sums, tiles, 5); break;                                 \
            case 4: some(p, first, sums, tiles, 4); break;                                 \
            case 3: some(p, first, sums, tiles, 3); break;                                 \
            case 2: some(p, first, sums, tiles, 2); break;                                 \
            case 1: some(p, first, sums, tiles, 1); break;                                 \
            }                                                                              \
        }                                                                                  \
    }                                                                                      \
    target static void name(const Part *p, float (*sums)[BLOCK][LANES]) {                  \
        if (p->tiles == 2) name##_tiles(p, sums, 2);                                       \
        else name##_tiles(p, sums, 1);                                                     \
    }

#define PAIRS(p, first, sums, tiles, rows) some_pairs(p, first, sums, tiles, rows, 0)
#define PAIRS_FETCHING(p, first, sums, tiles, rows) some_pairs(p, first, sums, tiles, rows, (first) == 0)
EQUAL_PARTS(TARGET_BF16, pairs_near, PAIRS)
EQUAL_PARTS(TARGET_BF16, pairs_fetching, PAIRS_FETCHING)

#define FEW 4 /* rows, whose sums wait for the weights */

/* One tile after the other, which a processor reads from memory in one stream: one to four rows take 0.8 of
 * the time of two tiles at once. */
TARGET_BF16 INLINE void pairs_one_by_one(const Part *p, float (*sums)[BLOCK][LANES]) {
    Part one = *p;
    one.tiles = 1;
    for (int t = 0; t < p->tiles; t++) {
        one.weights[0] = p->weights[t];
        pairs_near(&one, sums + t);
    }
}

/* While the first rows are multiplied, the weights that follow are fetched into the second cache. Of an expert's
 * gate and up in memory, seven to nine rows take 0.7 of the time and 24 take 0.9; up to four, which have one
 * stream of weights, would take 1.2, because memory has no time to spare. */
TARGET_BF16 static void sums_bf16(const Part *p, float (*sums)[BLOCK][LANES]) {
    if (p->rows <= FEW) pairs_one_by_one(p, sums);
    else if (p->next[0]) pairs_fetching(p, sums);
    else pairs_near(p, sums);
}
#define SOME_NEAR(p, first, sums, tiles, rows) some_widened(p, first, sums, tiles, rows, 0)
#define SOME_FETCHING(p, first, sums, tiles, rows) some_widened(p, first, sums, tiles, rows, 1)
EQUAL_PARTS(TARGET_512, sums_near, SOME_NEAR)
EQUAL_PARTS(TARGET_512, sums_fetching, SOME_FETCHING)

#define KEPT 128 /* inputs, whose weights stay in the nearest cache with those that are fetched */

/* While the first rows are multiplied, the weights that follow are fetched: a processor does not look
 * that far ahead. One row takes 0.8 of the time, eight rows 0.7, and 32 take 0.87. */
TARGET_512 static void sums_widened(const Part *p, float (*sums)[BLOCK][LANES]) {
    Part part = *p;
    const int32_t kept = p->next[0] ? KEPT : 2 * KEPT;
    for (int32_t k = 0; k < p->width; k += kept) {
        const int last = k + kept >= p->width;
        part.width = last ? p->width - k : kept;
        for (int t = 0; t < p->tiles; t++) {
            part.weights[t] = p->weights[t] + (int64_t)k * LANES * 2;
            part.next[t] = last ? p->next[t] : part.weights[t] + kept * LANES * 2;
        }
        Part few = part, rest = part;
        few.rows = !p->next[0] ? 0 : equal_part(p->rows);
        if (few.rows) sums_fetching(&few, sums);
        rest.rows -= few.rows, rest.x += few.rows * p->stride;
        if (rest.rows) sums_near(&rest, (float (*)[BLOCK][LANES])sums[0][few.rows]);
        part.x += kept * 4, part.more = 1;
    }
}

#define TARGET_AMX __attribute__((target("amx-tile,amx-bf16,avx512f")))

/* Registers 0 to 3: sums; 4 and 5: 16 rows each, 6 and 7: the weights of a tile, of 32 inputs. */
TARGET_AMX static void sums_amx(const Part *p, float (*sums)[BLOCK][LANES]) {
    struct { uint8_t palette, start, zeros[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape;
    memset(&shape, 0, sizeof(shape));
    shape.palette = 1;
    const int low = p->rows < 16 ? p->rows : 16, high = p->rows - low;
    const int of[8] = {low, low, high, high, low, high, 16, 16};
    for (int i = 0; i < 8; i++)
        if (of[i]) shape.bytes[i] = 64, shape.rows[i] = (uint8_t)of[i];
    _tile_loadconfig(&shape);
    const int two = p->tiles > 1;
    const char *x = p->x, *more = p->x + 16 * p->stride;
    _tile_zero(0);
    if (two) _tile_zero(1);
    if (high) {
        _tile_zero(2);
        if (two) _tile_zero(3);
    }
    for (int64_t k = 0; k < p->width; k += STEP) {
        _tile_loadd(4, x + k * 2, p->stride);
        _tile_loadd(6, p->weights[0] + k * LANES * 2, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two) {
            _tile_loadd(7, p->weights[1] + k * LANES * 2, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (high) {
            _tile_loadd(5, more + k * 2, p->stride);
            _tile_dpbf16ps(2, 5, 6);
            if (two) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    if (two) _tile_stored(1, sums[1][0], 64);
    if (high) {
        _tile_stored(2, sums[0][16], 64);
        if (two) _tile_stored(3, sums[1][16], 64);
    }
    _tile_release();
}

/* Whether the processor has the tiles, and Linux lets this process use them. */
static int has_amx(void) {
#ifdef __linux__
    unsigned a, b, c, d;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    const unsigned needed = 1u << 22 | 1u << 24; /* AMX-BF16 and AMX-TILE */
    return (d & needed) == needed && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return 0;
#endif
}
#endif
#endif
