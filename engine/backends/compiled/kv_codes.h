/* Keys and values in 8 bits: see `kv.py` for the layout. Every level gives the same bits. */
#ifndef KV_CODES_H
#define KV_CODES_H
#include "rows.h"

typedef struct {
    char *pool;        /* the first row of the layer */
    const int64_t *at; /* of each head: its KV slot, or its row of the pool */
    char *floats;
    int64_t stride, count; /* elements from one token to the next; heads in all */
    int32_t heads, dim, size;
    int bf16, fp8;
} KvWork;

INLINE int64_t row_bytes(const KvWork *w) { return (int64_t)w->size * (w->dim + 2); }

/* To the type whose scale is at least the value: no code exceeds the largest. */
INLINE uint16_t scale_of(uint32_t largest, float most) {
    float value;
    if (largest >= 0x7f800000) return 0x7fc0; /* a number that is not finite stays one */
    memcpy(&value, &largest, 4);
    value /= most;
    if (value < 0x1p-64f) value = 0x1p-64f;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0xffff) >> 16);
}

/* Float8 e4m3 of a value within +-448, rounded to the nearest, ties to even. */
INLINE uint8_t to_e4m3(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 24 & 0x80, rest = bits & 0x7fffffff;
    uint32_t normal = (rest + 0x7ffff + (rest >> 20 & 1)) >> 20;
    normal -= 120 << 3;
    uint32_t small = (uint32_t)(int32_t)__builtin_rintf(__builtin_fabsf(x) * 512.0f);
    return (uint8_t)(sign | (rest < 0x3c800000 ? small : normal));
}

INLINE float from_e4m3(uint8_t code) {
    uint32_t rest = code & 0x7f, bits = (rest << 20) + (120u << 23);
    float value;
    memcpy(&value, &bits, 4);
    value = rest < 8 ? (float)(int32_t)rest * 0x1p-9f : value;
    return code & 0x80 ? -value : value;
}

INLINE void kv_store(const KvWork *w) {
    const int32_t dim = w->dim, size = w->size;
    float wide_head[dim];
    for (int64_t n = 0; n < w->count; n++) {
        const int64_t first = n / w->heads * w->stride + n % w->heads * dim;
        const float *head = (const float *)w->floats + first;
        if (w->bf16) {
            for (int32_t i = 0; i < dim; i++) wide_head[i] = wide(((const uint16_t *)w->floats)[first + i]);
            head = wide_head;
        }
        char *row = w->pool + w->at[n] / size * row_bytes(w);
        const int32_t place = (int32_t)(w->at[n] % size);
        uint32_t largest = 0;
        for (int32_t i = 0; i < dim; i++) {
            uint32_t bits;
            memcpy(&bits, head + i, 4);
            bits &= 0x7fffffff;
            largest = bits > largest ? bits : largest;
        }
        const uint16_t scale = scale_of(largest, w->fp8 ? 448.0f : 127.0f);
        memcpy(row + (int64_t)size * dim + 2 * place, &scale, 2);
        char *codes = row + (int64_t)place * dim;
        if (scale == 0x7fc0) {
            memset(codes, 1, dim);
            continue;
        }
        const float inverse = 1.0f / wide(scale);
        if (w->fp8)
            for (int32_t i = 0; i < dim; i++) codes[i] = (char)to_e4m3(head[i] * inverse);
        else
            for (int32_t i = 0; i < dim; i++)
                codes[i] = (char)(int32_t)__builtin_rintf(head[i] * inverse);
    }
}

INLINE void kv_row(const KvWork *w, int64_t n, const int fp8, const int bf16) {
    const int32_t dim = w->dim, size = w->size;
    const uint8_t *codes = (const uint8_t *)w->pool + w->at[n] * row_bytes(w);
    const uint8_t *scales = codes + (int64_t)size * dim;
    for (int32_t place = 0; place < size; place++, codes += dim) {
        uint16_t stored;
        memcpy(&stored, scales + 2 * place, 2);
        const float scale = wide(stored);
        const int64_t first = (n * size + place) * dim;
        float *out = (float *)w->floats + first;
        uint16_t *halves = (uint16_t *)w->floats + first;
        for (int32_t i = 0; i < dim; i++) {
            const float value = scale * (fp8 ? from_e4m3(codes[i]) : (float)(int8_t)codes[i]);
            if (bf16) halves[i] = narrow(value);
            else out[i] = value;
        }
    }
}

INLINE void kv_gather(const KvWork *w, int64_t first, int64_t end) {
    for (int64_t n = first; n < end; n++) {
        if (w->fp8) w->bf16 ? kv_row(w, n, 1, 1) : kv_row(w, n, 1, 0);
        else w->bf16 ? kv_row(w, n, 0, 1) : kv_row(w, n, 0, 0);
    }
}

static void kv_store_plain(const KvWork *w) { kv_store(w); }
static void kv_gather_plain(const KvWork *w, int64_t first, int64_t end) { kv_gather(w, first, end); }
#if X86
#define KV_512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))
#define KV_256 __attribute__((target("avx2")))
KV_512 static void kv_store_512(const KvWork *w) { kv_store(w); }
KV_512 static void kv_gather_512(const KvWork *w, int64_t first, int64_t end) { kv_gather(w, first, end); }
KV_256 static void kv_store_256(const KvWork *w) { kv_store(w); }
KV_256 static void kv_gather_256(const KvWork *w, int64_t first, int64_t end) { kv_gather(w, first, end); }
#endif
#endif
