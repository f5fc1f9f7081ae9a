/* Vectors of 16 floats, which compilers lower to AVX-512, AVX2 or what there is, and bfloat16. */
#ifndef ROWS_H
#define ROWS_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__)
#define X86 1
#define TARGET_512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define TARGET_256 __attribute__((target("avx2,fma")))
#else
#define X86 0
#endif
#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define STEP 32 /* inputs, to a multiple of which a packed matrix is filled up with zeros */

typedef float Lanes __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));

INLINE float wide(uint16_t brain) {
    uint32_t bits = (uint32_t)brain << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float value_at(const char *row, int64_t at, int brain) {
    return brain ? wide(((const uint16_t *)row)[at]) : ((const float *)row)[at];
}

INLINE void store_at(char *row, int64_t at, float value, int brain) {
    if (brain) ((uint16_t *)row)[at] = narrow(value);
    else ((float *)row)[at] = value;
}

/* `count` values as floats, and zeros up to `filled`. */
INLINE void widen(float *to, const char *from, int64_t count, int64_t filled, int brain) {
    if (brain)
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

/* exp within 2e-7, in a form that compilers vectorise. */
INLINE float exponential(float x) {
    x = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    float n = x * 1.44269504f + 12582912.0f; /* rounds to a whole number */
    int32_t whole;
    memcpy(&whole, &n, 4);
    n -= 12582912.0f;
    float r = x - n * 0.693145752f - n * 1.42860677e-6f;
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * (0.0416666418f
        + r * (0.00833345205f + r * 0.00139334158f)))));
    uint32_t bits = (uint32_t)(whole - 0x4b400000 + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

enum { SILU, GELU_TANH, GELU };

INLINE float activated(float x, int kind) {
    if (kind == SILU) return x / (1.0f + exponential(-x));
    if (kind == GELU) return 0.5f * x * (1.0f + erff(x * 0.707106781f));
    float inner = 0.797884561f * (x + 0.044715f * x * x * x);
    return x - x / (exponential(2.0f * inner) + 1.0f);
}

#endif
