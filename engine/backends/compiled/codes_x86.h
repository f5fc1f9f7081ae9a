/* The products of a tile of codes by AVX-512 with VNNI, and by AVX2. */
#ifndef CODES_X86_H
#define CODES_X86_H
#include "codes.h"

#define TARGET_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")))
#define TARGET_F16C __attribute__((target("avx2,f16c,fma")))

INLINE int32_t quad(const int8_t *codes) {
    int32_t four;
    memcpy(&four, codes, 4);
    return four;
}

/* `first`: of the rows, within those of x. */
TARGET_VNNI INLINE void body_512(const Coded *m, const Weights *tile, const Rows *x, const int first,
                                float (*sums)[LANES], const int rows, const int bits, const int halves,
                                const int low) {
    const int32_t groups = m->groups, per_scale = m->per_scale;
    const int8_t *of = x->codes + first * GROUP;
    const float *row_scales = x->scales + first, *row_sums = x->sums + first;
    const int32_t *starts = x->starts + first;
    const uint8_t *codes = tile->codes;
    const uint16_t *scales = tile->scales, *minima = tile->minima;
    const __m512i nibble = _mm512_set1_epi8(15);
    const int upper = halves - 1;
    __m512 total[EIGHT];
    __m512i whole[EIGHT][2];
    for (int r = 0; r < rows; r++) total[r] = _mm512_setzero_ps();
    int32_t left = per_scale;
    for (int32_t g = 0; g < groups; g++) {
        for (int r = 0; r < rows; r++)
            for (int h = 0; h < halves; h++) whole[r][h] = _mm512_set1_epi32(starts[h * EIGHT + r]);
        for (int q = 0; q < bits; q++) {
            __m512i w = _mm512_loadu_si512(codes + q * 64), high = w;
            if (bits == 4) {
                high = _mm512_and_si512(_mm512_srli_epi16(w, 4), nibble);
                w = _mm512_and_si512(w, nibble);
            }
            const int h = bits == 8 ? q / 4 & upper : 0;
            for (int r = 0; r < rows; r++) {
                const int8_t *at = of + r * GROUP + q * 4;
                whole[r][h] = _mm512_dpbusd_epi32(whole[r][h], w, _mm512_set1_epi32(quad(at)));
                if (bits == 4) {
                    const __m512i by = _mm512_set1_epi32(quad(at + 16));
                    whole[r][upper] = _mm512_dpbusd_epi32(whole[r][upper], high, by);
                }
            }
        }
        for (int h = 0; h < halves; h++) {
            __m512 by = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
            __m512 least = _mm512_setzero_ps();
            if (low) least = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)minima));
            for (int r = 0; r < rows; r++) {
                __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(whole[r][h]), by);
                total[r] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(row_scales[r]), total[r]);
                if (low) {
                    __m512 sum = _mm512_set1_ps(row_sums[h * EIGHT + r]);
                    total[r] = _mm512_fmadd_ps(least, sum, total[r]);
                }
            }
            if (--left == 0) scales += LANES, minima += low ? LANES : 0, left = per_scale;
        }
        codes += bits * 64, of += EIGHT * GROUP, row_scales += EIGHT;
        row_sums += halves * EIGHT, starts += halves * EIGHT;
    }
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(sums[first + r], total[r]);
}

/* 16 outputs are two registers here, `side`s of a tile. */
TARGET_F16C INLINE void body_256(const Coded *m, const Weights *tile, const Rows *x, const int first,
                                float (*sums)[LANES], const int rows, const int bits, const int halves,
                                const int low) {
    const int32_t groups = m->groups, per_scale = m->per_scale;
    const int8_t *of = x->codes + first * GROUP;
    const float *row_scales = x->scales + first, *row_sums = x->sums + first;
    const int32_t *starts = x->starts + first;
    const uint8_t *codes = tile->codes;
    const uint16_t *scales = tile->scales, *minima = tile->minima;
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const __m256i flip = _mm256_set1_epi8((char)128);
    const int upper = halves - 1;
    __m256 total[2][2] = {{_mm256_setzero_ps(), _mm256_setzero_ps()},
                          {_mm256_setzero_ps(), _mm256_setzero_ps()}};
    int32_t left = per_scale;
    for (int32_t g = 0; g < groups; g++) {
        for (int side = 0; side < 2; side++) {
            const uint16_t *by_side = scales + side * 8, *low_side = minima + (low ? side * 8 : 0);
            __m256i whole[2][2];
            for (int r = 0; r < rows; r++)
                for (int h = 0; h < halves; h++) whole[r][h] = _mm256_setzero_si256();
            for (int q = 0; q < bits; q++) {
                __m256i both = _mm256_loadu_si256((const __m256i *)(codes + q * 64 + side * 32));
                if (bits == 8) { /* signed here: a sum of unsigned products does not fit 16 bits */
                    both = _mm256_xor_si256(both, flip);
                    __m256i size = _mm256_abs_epi8(both);
                    const int h = q / 4 & upper;
                    for (int r = 0; r < rows; r++) {
                        __m256i by = _mm256_set1_epi32(quad(of + r * GROUP + q * 4));
                        __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(by, both));
                        whole[r][h] = _mm256_add_epi32(whole[r][h], _mm256_madd_epi16(pairs, ones));
                    }
                } else {
                    __m256i w = _mm256_and_si256(both, nibble);
                    __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
                    for (int r = 0; r < rows; r++) {
                        const int8_t *at = of + r * GROUP + q * 4;
                        __m256i pairs = _mm256_maddubs_epi16(w, _mm256_set1_epi32(quad(at)));
                        __m256i others = _mm256_maddubs_epi16(high, _mm256_set1_epi32(quad(at + 16)));
                        whole[r][0] = _mm256_add_epi32(whole[r][0], _mm256_madd_epi16(pairs, ones));
                        whole[r][upper] =
                            _mm256_add_epi32(whole[r][upper], _mm256_madd_epi16(others, ones));
                    }
                }
            }
            for (int h = 0; h < halves; h++) {
                const int next = halves == 2 && h == 1 && left == 1 ? LANES : 0;
                __m256 by = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(by_side + next)));
                __m256 least = _mm256_setzero_ps();
                if (low) least = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(low_side + next)));
                for (int r = 0; r < rows; r++) {
                    __m256i all = whole[r][h];
                    if (bits == 4)
                        all = _mm256_add_epi32(all, _mm256_set1_epi32(starts[h * EIGHT + r]));
                    __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(all), by);
                    __m256 scale = _mm256_set1_ps(row_scales[r]);
                    total[r][side] = _mm256_fmadd_ps(scaled, scale, total[r][side]);
                    if (low) {
                        __m256 sum = _mm256_set1_ps(row_sums[h * EIGHT + r]);
                        total[r][side] = _mm256_fmadd_ps(least, sum, total[r][side]);
                    }
                }
            }
        }
        for (int h = 0; h < halves; h++)
            if (--left == 0) scales += LANES, minima += low ? LANES : 0, left = per_scale;
        codes += bits * 64, of += EIGHT * GROUP, row_scales += EIGHT;
        row_sums += halves * EIGHT, starts += halves * EIGHT;
    }
    for (int r = 0; r < rows; r++)
        for (int side = 0; side < 2; side++)
            _mm256_storeu_ps(sums[first + r] + side * 8, total[r][side]);
}

/* Bodies with constant arguments, which the compiler unrolls. */
#define EACH_FORMAT(body, rows)                                               \
    switch ((m->bits == 8) * 4 + (m->step == 16) * 2 + (m->minima != NULL)) { \
    case 0: body(m, tile, &x, first, sums, rows, 4, 1, 0); break;             \
    case 1: body(m, tile, &x, first, sums, rows, 4, 1, 1); break;             \
    case 2: body(m, tile, &x, first, sums, rows, 4, 2, 0); break;             \
    case 3: body(m, tile, &x, first, sums, rows, 4, 2, 1); break;             \
    case 4: body(m, tile, &x, first, sums, rows, 8, 1, 0); break;             \
    case 5: body(m, tile, &x, first, sums, rows, 8, 1, 1); break;             \
    case 6: body(m, tile, &x, first, sums, rows, 8, 2, 0); break;             \
    default: body(m, tile, &x, first, sums, rows, 8, 2, 1);                   \
    }

TARGET_VNNI static void tile_512(const Coded *m, const Weights *tile, Rows x, float (*sums)[LANES]) {
    int first = 0;
    for (; first + 8 <= x.rows; first += 8) EACH_FORMAT(body_512, 8)
    for (; first + 4 <= x.rows; first += 4) EACH_FORMAT(body_512, 4)
    for (; first + 2 <= x.rows; first += 2) EACH_FORMAT(body_512, 2)
    for (; first < x.rows; first++) EACH_FORMAT(body_512, 1)
}

TARGET_F16C static void tile_256(const Coded *m, const Weights *tile, Rows x, float (*sums)[LANES]) {
    int first = 0;
    for (; first + 2 <= x.rows; first += 2) EACH_FORMAT(body_256, 2)
    for (; first < x.rows; first++) EACH_FORMAT(body_256, 1)
}

#endif
