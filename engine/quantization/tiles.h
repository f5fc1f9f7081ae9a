/* Rows to codes, and the products of codes with one tile of a matrix, for each kind of processor. */
#ifndef TILES_H
#define TILES_H
#include "../native.h"
#include <math.h>

enum { CODES, SCALES, MINIMA, FACTORS, BIAS, ARRAYS };
enum { SILU, GELU };

#define LANES 16         /* outputs of a tile, which lie side by side */
#define GROUP 32         /* inputs that share the scale of a row's codes */
#define BLOCK 8          /* rows that one pass over a tile's weights serves */
#define ALONE (1 << 16)  /* multiplications, below which waking a second thread costs more */
#define LONG (1 << 22)   /* multiplications, from which on the interpreter's lock is released */

typedef struct {
    PyObject_HEAD
    Py_buffer views[ARRAYS];
    int32_t out, groups, tiles; /* groups of 32 inputs; tiles of 16 outputs */
    int32_t bits, step;         /* step: the inputs, 16 or 32, between two scales or fewer */
    int32_t per_scale;          /* steps that share a scale */
    int32_t scales;             /* of a row */
    int32_t zero;               /* the code that stands for 0 */
} Matrix;

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

INLINE float activated(float x, int kind) {
    if (kind == SILU) return x / (1.0f + exponential(-x));
    float inner = 0.797884561f * (x + 0.044715f * x * x * x);
    return x - x / (exponential(2.0f * inner) + 1.0f);
}

/* One row to codes. A row that is not finite keeps a scale that is not a number, so that its
 * results are none either. */
INLINE void to_codes(const float *x, int32_t width, const Codes *to, int32_t row) {
    const size_t block = (size_t)(row / BLOCK), at_row = (size_t)(row % BLOCK);
    for (int32_t g = 0; g < to->groups; g++) {
        const size_t place = (block * to->groups + g) * BLOCK + at_row;
        int8_t *codes = to->codes + place * GROUP;
        float part[GROUP];
        int32_t here = width - g * GROUP < GROUP ? width - g * GROUP : GROUP;
        memcpy(part, x + g * GROUP, sizeof(float) * here);
        for (int32_t i = here; i < GROUP; i++) part[i] = 0;
        int32_t bits[GROUP], top = 0;
        memcpy(bits, part, sizeof(part));
        for (int i = 0; i < GROUP; i++) {
            int32_t size = bits[i] & 0x7fffffff;
            top = size > top ? size : top;
        }
        float most;
        memcpy(&most, &top, 4);
        int finite = top < 0x7f800000;
        float scale = finite ? most / 127.0f : NAN;
        float by = finite && most > 1e-30f ? 127.0f / most : 0.0f;
        int32_t sums[2] = {0, 0}, whole[GROUP];
        for (int i = 0; i < GROUP; i++) {
            float shifted = (finite ? part[i] * by : 0.0f) + 12582912.0f;
            memcpy(&whole[i], &shifted, 4);
            whole[i] -= 0x4b400000;
        }
        for (int i = 0; i < GROUP; i++) codes[i] = (int8_t)whole[i];
        for (int i = 0; i < 16; i++) sums[0] += whole[i], sums[1] += whole[i + 16];
        to->scales[place] = scale;
        if (to->step == GROUP) sums[0] += sums[1];
        for (int h = 0; h < GROUP / to->step; h++) {
            size_t at = (block * to->steps + g * (GROUP / to->step) + h) * BLOCK + at_row;
            to->sums[at] = scale * (float)sums[h];
            to->starts[at] = -to->zero * sums[h];
        }
    }
}

static void to_codes_plain(const float *x, int32_t width, const Codes *to, int32_t row) {
    to_codes(x, width, to, row);
}

/* Where the weights of a tile begin. */
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales, *minima;
} Weights;

static Weights weights_of(const Matrix *m, int32_t tile) {
    const size_t at = (size_t)tile * m->scales * LANES;
    const uint16_t *minima = m->views[MINIMA].buf;
    return (Weights){(const uint8_t *)m->views[CODES].buf + (size_t)tile * m->groups * m->bits * 64,
                     (const uint16_t *)m->views[SCALES].buf + at, minima ? minima + at : NULL};
}

/* The part of a block of rows that a tile is multiplied with: `rows` of them from `first` on. */
typedef struct {
    const int8_t *codes;
    const float *scales, *sums;
    const int32_t *starts;
    int rows;
} Rows;

static Rows rows_of(const Codes *x, int32_t first, int rows) {
    const size_t block = (size_t)(first / BLOCK), at = (size_t)(first % BLOCK);
    const size_t step = block * x->steps * BLOCK + at, group = block * x->groups * BLOCK + at;
    return (Rows){x->codes + group * GROUP, x->scales + group, x->sums + step, x->starts + step, rows};
}

/* The sums of some rows with the outputs of one or two tiles of one format: sums[tile][row]. */
typedef void (*Tile)(const Matrix *, const Weights *, int, Rows, float (*)[BLOCK][LANES]);

static void tile_plain(const Matrix *m, const Weights *tiles, int count, Rows x,
                       float (*sums)[BLOCK][LANES]) {
    const int loads = m->bits, halves = GROUP / m->step; /* 64-byte loads of a group: 8 or 4 */
    for (int t = 0; t < count; t++) {
        const uint8_t *codes = tiles[t].codes;
        for (int r = 0; r < x.rows; r++) memset(sums[t][r], 0, sizeof(sums[t][r]));
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
                const uint16_t *minima = tiles[t].minima;
                float by[LANES], low[LANES];
                for (int lane = 0; lane < LANES; lane++) {
                    by[lane] = half_to_float(tiles[t].scales[at + lane]);
                    low[lane] = minima ? half_to_float(minima[at + lane]) : 0;
                }
                for (int r = 0; r < x.rows; r++) {
                    const int8_t *of = x.codes + ((size_t)g * BLOCK + r) * GROUP + h * m->step;
                    int32_t whole[LANES];
                    for (int lane = 0; lane < LANES; lane++)
                        whole[lane] = x.starts[(size_t)step * BLOCK + r];
                    for (int k = 0; k < m->step; k++)
                        for (int lane = 0; lane < LANES; lane++)
                            whole[lane] += whole_codes[h * m->step + k][lane] * of[k];
                    float scale = x.scales[(size_t)g * BLOCK + r];
                    float sum = x.sums[(size_t)step * BLOCK + r];
                    for (int lane = 0; lane < LANES; lane++) {
                        sums[t][r][lane] += (float)whole[lane] * by[lane] * scale;
                        if (minima) sums[t][r][lane] += low[lane] * sum;
                    }
                }
            }
        }
    }
}

#endif
