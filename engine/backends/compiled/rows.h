/* Vectors of 16 floats, which compilers lower to AVX-512, AVX2 or what there is, and bfloat16. */
#ifndef ROWS_H
#define ROWS_H
#include "native.h"
#include <math.h>
#include <stdlib.h>

#if X86
#define TARGET_512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define TARGET_256 __attribute__((target("avx2,fma")))
#endif
#define LANES 16
#define STEP 32 /* inputs, to a multiple of which a packed matrix is filled up with zeros */

typedef float Lanes __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Flags __attribute__((vector_size(64))); /* of a comparison: -1 where it holds */
typedef uint16_t Bf16Lanes __attribute__((vector_size(32)));
typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));
typedef int32_t QuarterFlags __attribute__((vector_size(16)));

INLINE float value_at(const char *row, int64_t at, int bf16) {
    return bf16 ? wide(((const uint16_t *)row)[at]) : ((const float *)row)[at];
}

INLINE void store_at(char *row, int64_t at, float value, int bf16) {
    if (bf16) ((uint16_t *)row)[at] = narrow(value);
    else ((float *)row)[at] = value;
}

/* 16 values at once, which compilers do not make of the loops over one. */
INLINE void lanes_at(const char *row, int64_t at, int bf16, Lanes *values) {
    if (!bf16) {
        memcpy(values, row + at * 4, 64);
        return;
    }
    Bf16Lanes narrow;
    memcpy(&narrow, row + at * 2, 32);
    *values = (Lanes)(__builtin_convertvector(narrow, Words) << 16);
}

/* Of bfloat16, each in a word. */
INLINE void rounded_words(const Lanes *values, Words *words) {
    const Words bits = (Words)*values, none = (Words)((bits & 0x7fffffff) > 0x7f800000);
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, kept = bits >> 16 | 64;
    *words = (none & kept) | (~none & rounded);
}

INLINE void store_lanes(char *row, int64_t at, const Lanes *values, int bf16) {
    if (!bf16) {
        memcpy(row + at * 4, values, 64);
        return;
    }
    Words words;
    rounded_words(values, &words);
    const Bf16Lanes narrow = __builtin_convertvector(words, Bf16Lanes);
    memcpy(row + at * 2, &narrow, 32);
}

/* `count` values as floats, and zeros up to `filled`. */
INLINE void widen(float *to, const char *from, int64_t count, int64_t filled, int bf16) {
    if (bf16)
        for (int64_t i = 0; i < count; i++) to[i] = wide(((const uint16_t *)from)[i]);
    else memcpy(to, from, sizeof(float) * count);
    for (int64_t i = count; i < filled; i++) to[i] = 0;
}

/* The sum of the lanes, always in the same order. */
INLINE float folded(const Lanes *given) {
    Half half[2], sum;
    memcpy(half, given, 64);
    sum = half[0] + half[1];
    Quarter quarter[2], rest;
    memcpy(quarter, &sum, 32);
    rest = quarter[0] + quarter[1];
    return (rest[0] + rest[2]) + (rest[1] + rest[3]);
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef PICK
#define PICK(a, b, ...) __builtin_shuffle(a, b, (QuarterFlags){__VA_ARGS__})
#endif

INLINE float greatest_lane(const Lanes *given) {
    Quarter each[4];
    for (int i = 0; i < 4; i++) memcpy(&each[i], (const char *)given + 16 * i, 16);
#define GREATER(a, b) (Quarter)(((a > b) & (QuarterFlags)a) | (~(a > b) & (QuarterFlags)b))
    each[0] = GREATER(each[0], each[1]), each[2] = GREATER(each[2], each[3]), each[0] = GREATER(each[0], each[2]);
#undef GREATER
    const float a = each[0][0] > each[0][1] ? each[0][0] : each[0][1];
    const float b = each[0][2] > each[0][3] ? each[0][2] : each[0][3];
    return a > b ? a : b;
}

enum { SILU, GELU_TANH, GELU };

INLINE float activated(float x, int kind) {
    if (kind == SILU) return x / (1.0f + exponential(-x));
    if (kind == GELU) return 0.5f * x * (1.0f + erff(x * 0.707106781f));
    float inner = 0.797884561f * (x + 0.044715f * x * x * x);
    return x - x / (exponential(2.0f * inner) + 1.0f);
}

#endif
