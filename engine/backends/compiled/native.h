/* What the compiled kernels share: bfloat16, an exponential, and torch's threads. */
#ifndef NATIVE_H
#define NATIVE_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__)
#define X86 1
#else
#define X86 0
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE float wide(uint16_t bf16) {
    uint32_t bits = (uint32_t)bf16 << 16;
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

/* Threads of the OpenMP library that torch has loaded, so that two pools never compete; `parallel` is
 * NULL without one. */
static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_number)(void), (*thread_count)(void);

static void find_threads(void) {
#ifdef RTLD_DEFAULT
    *(void **)&parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    *(void **)&thread_number = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    *(void **)&thread_count = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    if (!thread_number || !thread_count) parallel = NULL;
#endif
}

#endif
