/* Matrices of 8-bit or 4-bit codes, whose layout `packed.py` describes: rows to codes, and the products of
 * codes with a tile of a matrix, for each kind of processor.
 *
 * Rows are rounded in groups of 32, products of codes are added as integers within a group, and groups are
 * added in order as floats: a row's result does not depend on the other rows. */
#ifndef CODES_H
#define CODES_H
#include "product.h"

#define GROUP 32 /* inputs that share the scale of a row's codes */
#define EIGHT 8  /* rows whose codes lie together */

/* A matrix of codes. */
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales, *minima; /* of float16; minima may be NULL */
    const float *factors;            /* of each output */
    int32_t out, groups, tiles; /* groups of 32 inputs; tiles of 16 outputs */
    int32_t bits, step;         /* step: the inputs, 16 or 32, between two scales or fewer */
    int32_t per_scale;          /* steps that share a scale */
    int32_t scale_count;        /* of a row */
    int32_t zero;               /* the code that stands for 0 */
} Coded;

/* Rows of codes with what every step of a product needs of them. Eight rows are a block, in which a
 * group of all rows comes before the next group. */
typedef struct {
    int8_t *codes;   /* [blocks, groups, 8, 32] */
    float *scales;   /* [blocks, groups, 8] */
    float *sums;     /* [blocks, steps, 8]: scale x the sum of the codes */
    int32_t *starts; /* [blocks, steps, 8]: -zero x the sum of the codes */
    int32_t groups, steps, step, zero;
} Codes;

static float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits;
    float value;
    if (rest >= 0x7c00) bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) bits = sign | ((rest << 13) + (112u << 23));
    else {
        value = (float)rest * 0x1p-24f;
        return sign ? -value : value;
    }
    memcpy(&value, &bits, 4);
    return value;
}

/* Bytes for the codes of rows that are `filled` wide, a multiple of 32, whatever a matrix's step is. */
INLINE size_t codes_bytes(int64_t rows, int64_t filled) {
    return (size_t)((rows + EIGHT - 1) / EIGHT * EIGHT * (filled + filled / GROUP * 4 + filled / 16 * 8));
}

/* memory: `codes_bytes`. m: of the format for which these are. */
INLINE Codes codes_in(char *memory, int64_t rows, const Coded *m) {
    Codes c = {.groups = m->groups, .steps = m->groups * (GROUP / m->step), .step = m->step, .zero = m->zero};
    const int64_t places = (rows + EIGHT - 1) / EIGHT * EIGHT;
    c.codes = (int8_t *)memory;
    c.scales = (float *)(memory + places * c.groups * GROUP);
    c.sums = c.scales + places * c.groups;
    c.starts = (int32_t *)(c.sums + places * c.steps);
    return c;
}

typedef int8_t Bytes __attribute__((vector_size(16)));

INLINE int32_t total_of(const Flags *given) {
    int32_t each[LANES], sum = 0;
    memcpy(each, given, 64);
    for (int i = 0; i < LANES; i++) sum += each[i];
    return sum;
}

/* The greatest size of a group, or the bits of something that is not finite. */
INLINE int32_t greatest_size(const Lanes part[2]) {
    const Flags one = (Flags)part[0] & 0x7fffffff, two = (Flags)part[1] & 0x7fffffff, more = one > two;
    const Flags greater = (more & one) | (~more & two);
    int32_t each[LANES], top = 0;
    memcpy(each, &greater, 64);
    for (int i = 0; i < LANES; i++) top = each[i] > top ? each[i] : top;
    return top;
}

/* One row, x [groups * 32], to codes. A row that is not finite keeps a scale that is not a number, so that its
 * results are none either. */
INLINE void to_codes(const float *x, const Codes *to, int64_t row) {
    const size_t block = (size_t)(row / EIGHT), at_row = (size_t)(row % EIGHT);
    for (int32_t g = 0; g < to->groups; g++) {
        const size_t place = (block * to->groups + g) * EIGHT + at_row;
        Lanes part[2];
        memcpy(part, x + g * GROUP, sizeof(part));
        const int32_t top = greatest_size(part);
        const int finite = top < 0x7f800000;
        float most;
        memcpy(&most, &top, 4);
        const float scale = finite ? most / 127.0f : NAN, by = finite && most > 1e-30f ? 127.0f / most : 0.0f;
        int32_t sums[2];
        for (int h = 0; h < 2; h++) {
            if (!finite) part[h] = (Lanes){0};
            const Lanes shifted = part[h] * by + 12582912.0f;
            const Flags whole = (Flags)shifted - 0x4b400000;
            const Bytes codes = __builtin_convertvector(whole, Bytes);
            memcpy(to->codes + place * GROUP + h * LANES, &codes, sizeof(codes));
            sums[h] = total_of(&whole);
        }
        to->scales[place] = scale;
        if (to->step == GROUP) sums[0] += sums[1];
        for (int h = 0; h < GROUP / to->step; h++) {
            size_t at = (block * to->steps + g * (GROUP / to->step) + h) * EIGHT + at_row;
            to->sums[at] = scale * (float)sums[h];
            to->starts[at] = -to->zero * sums[h];
        }
    }
}

/* Where the weights of a tile begin. */
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales, *minima;
} Weights;

static Weights weights_of(const Coded *m, int32_t tile) {
    const size_t at = (size_t)tile * m->scale_count * LANES;
    return (Weights){m->codes + (size_t)tile * m->groups * m->bits * 64, m->scales + at,
                     m->minima ? m->minima + at : NULL};
}

/* The part of a block of rows that a tile is multiplied with: `rows` of them from `first` on. */
typedef struct {
    const int8_t *codes;
    const float *scales, *sums;
    const int32_t *starts;
    int rows;
} Rows;

static Rows rows_of(const Codes *x, int64_t first, int rows) {
    const size_t block = (size_t)(first / EIGHT), at = (size_t)(first % EIGHT);
    const size_t step = block * x->steps * EIGHT + at, group = block * x->groups * EIGHT + at;
    return (Rows){x->codes + group * GROUP, x->scales + group, x->sums + step, x->starts + step, rows};
}

/* The sums of some rows with the outputs of a tile. One tile after the other, so that a processor reads memory
 * in one stream: two tiles at once take 1.5 times as long for one row, and 1.1 times for 32. */
typedef void (*Tile)(const Coded *, const Weights *, Rows, float (*)[LANES]);

static void tile_plain(const Coded *m, const Weights *tile, Rows x, float (*sums)[LANES]) {
    const int loads = m->bits, halves = GROUP / m->step; /* 64-byte loads of a group: 8 or 4 */
    const uint8_t *codes = tile->codes;
    for (int r = 0; r < x.rows; r++) memset(sums[r], 0, sizeof(sums[r]));
    for (int32_t g = 0; g < m->groups; g++, codes += loads * 64) {
        uint8_t whole_codes[GROUP][LANES];
        for (int q = 0; q < 8; q++)
            for (int lane = 0; lane < LANES; lane++)
                for (int i = 0; i < 4; i++) {
                    uint8_t byte = codes[(loads == 8 ? q : q & 3) * 64 + lane * 4 + i];
                    whole_codes[q * 4 + i][lane] = loads == 8 ? byte : q < 4 ? byte & 15 : byte >> 4;
                }
        for (int h = 0; h < halves; h++) {
            int32_t step = g * halves + h, at = step / m->per_scale * LANES;
            const uint16_t *minima = tile->minima;
            float by[LANES], low[LANES];
            for (int lane = 0; lane < LANES; lane++) {
                by[lane] = half_to_float(tile->scales[at + lane]);
                low[lane] = minima ? half_to_float(minima[at + lane]) : 0;
            }
            for (int r = 0; r < x.rows; r++) {
                const int8_t *of = x.codes + ((size_t)g * EIGHT + r) * GROUP + h * m->step;
                int32_t whole[LANES];
                for (int lane = 0; lane < LANES; lane++)
                    whole[lane] = x.starts[(size_t)step * EIGHT + r];
                for (int k = 0; k < m->step; k++)
                    for (int lane = 0; lane < LANES; lane++)
                        whole[lane] += whole_codes[h * m->step + k][lane] * of[k];
                float scale = x.scales[(size_t)g * EIGHT + r];
                float sum = x.sums[(size_t)step * EIGHT + r];
                for (int lane = 0; lane < LANES; lane++) {
                    sums[r][lane] += (float)whole[lane] * by[lane] * scale;
                    if (minima) sums[r][lane] += low[lane] * sum;
                }
            }
        }
    }
}

/* The sums of rows from `row` on with one or two tiles, `at`, of matrices of one format. */
INLINE void sums_of_codes(const Codes *x, const Coded *const m[2], const int32_t at[2], int tiles, int64_t row,
                          int rows, float (*sums)[BLOCK][LANES], Tile tile) {
    for (int t = 0; t < tiles; t++) {
        const Weights weights = weights_of(m[t], at[t]);
        for (int done = 0, here; done < rows; done += here) {
            const int left = EIGHT - (int)((row + done) % EIGHT);
            here = rows - done < left ? rows - done : left;
            tile(m[t], &weights, rows_of(x, row + done, here), sums[t] + done);
        }
        Lanes factors, values;
        memcpy(&factors, m[t]->factors + at[t] * LANES, 64);
        for (int r = 0; r < rows; r++) {
            memcpy(&values, sums[t][r], 64);
            values *= factors;
            memcpy(sums[t][r], &values, 64);
        }
    }
}

#endif
