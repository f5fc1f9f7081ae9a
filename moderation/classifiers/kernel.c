/* The products of the classifier for one text, from the numbers of its words: see `ensemble.py`.
 *
 * Built when a C compiler is there; without it numpy computes the same, within 1e-6.
 * A Kernel reads arrays that its scorer owns and is called by one thread at a time; long texts are
 * computed without the interpreter's lock.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

enum {
    ROWS, HASHES, COUNTS, FIRST, SECOND, LAST, MATRIX, FLOOR, CALIBRATION, OFFSETS,
    GRAM_WEIGHTS, GRAM_VECTORS, VECTORS, FILTERS_1, FILTERS_2, FILTERS_3, BIASES_1, BIASES_2, BIASES_3,
    ARRAYS
};
enum { WRITTEN = LAST + 1 }; /* the arrays before it are written by `add_word` */
static const char *const FORMATS[ARRAYS] = {"f", "i", "i", "f", "f", "f", "f", "f", "f", "f",
                                            "f", "f", "f", "f", "f", "f", "f", "f", "f"};

#define LONG_TEXT 200     /* words, from which on the interpreter's lock is released */
#define WIDEST 512        /* most filters, features and logits */
#define PAIR_FACTOR 1000003u
#define MEAN_SCALE 3.0f
#define LENGTH_OFFSET 4
#define LONGEST_WORD 24
#define MOST_GRAMS (3 * (LONGEST_WORD + 2))
#define GRAMS_OF_VECTOR 24
#define MAX_EXPONENT 80   /* beyond it the result does not change */
#define LEAST_TOP 1e-6    /* of the harms' probabilities */

typedef struct {
    PyObject_HEAD
    Py_buffer views[ARRAYS];
    int held;               /* how many of the views are */
    int32_t buckets, before, behind, beyond;
    int32_t heads, filters, features, logits, words, width;
    uint64_t *seen_hashes, *seen_words; /* one bit each, all clear between calls */
    int32_t *list;          /* the padded words of a text */
    int32_t room;
} Kernel;

static const float *floats(const Kernel *self, int which) { return self->views[which].buf; }

/* Sets the bit and tells whether it was clear. */
static inline int is_new(uint64_t *bits, int32_t at) {
    uint64_t bit = 1ull << (at & 63), *word = bits + (at >> 6);
    int found = !(*word & bit);
    *word |= bit;
    return found;
}

static inline void forget(uint64_t *bits, int32_t at) { bits[at >> 6] = 0; }

static inline void add_row(float *restrict sum, const float *restrict row, int32_t width) {
    for (int32_t i = 0; i < width; i++) sum[i] += row[i];
}

/* The linear half, without its bias: hashed words and adjacent pairs once each, weighted by the root
 * of their number, then the n-grams of each word. */
FOR_EACH_PROCESSOR
static void linear(Kernel *self, const int32_t *words, int32_t count, float *restrict out) {
    const float *rows = floats(self, ROWS);
    const int32_t *hashes = self->views[HASHES].buf, *grams = self->views[COUNTS].buf;
    const int32_t heads = self->heads, mask = self->buckets - 1;
    float pairs[WIDEST], inner[WIDEST];
    int32_t distinct = 0;
    int64_t gram_count = 0;
    memset(pairs, 0, sizeof(float) * heads);
    memset(inner, 0, sizeof(float) * heads);
    memset(out, 0, sizeof(float) * heads);
    if (!count) return;
    for (int32_t i = 0; i < count; i++) {
        int32_t hash = hashes[words[i]];
        if (is_new(self->seen_hashes, hash)) {
            add_row(pairs, rows + (size_t)hash * heads, heads);
            distinct++;
        }
        if (i + 1 < count) {
            uint32_t lead = (uint32_t)hash * PAIR_FACTOR;
            int32_t pair = (int32_t)((lead + (uint32_t)hashes[words[i + 1]]) & (uint32_t)mask);
            if (is_new(self->seen_hashes, pair)) {
                add_row(pairs, rows + (size_t)pair * heads, heads);
                distinct++;
            }
        }
        if (is_new(self->seen_words, words[i])) {
            add_row(inner, rows + (size_t)(self->buckets + words[i]) * heads, heads);
            gram_count += grams[words[i]];
        }
    }
    for (int32_t i = 0; i < count; i++) {
        uint32_t lead = (uint32_t)hashes[words[i]] * PAIR_FACTOR;
        forget(self->seen_hashes, hashes[words[i]]);
        forget(self->seen_words, words[i]);
        if (i + 1 < count)
            forget(self->seen_hashes,
                   (int32_t)((lead + (uint32_t)hashes[words[i + 1]]) & (uint32_t)mask));
    }
    float of_pairs = 1.0f / sqrtf((float)distinct), of_grams = 1.0f / sqrtf((float)gram_count);
    for (int32_t i = 0; i < heads; i++) out[i] = of_pairs * pairs[i] + of_grams * inner[i];
}

/* The convolutional half's features: filters of every three adjacent words, after a ReLU pooled by
 * maximum and mean. `list` holds two words of padding before and two after. */
FOR_EACH_PROCESSOR
static void pool(const Kernel *self, const int32_t *list, int32_t length, float *restrict out) {
    const int32_t filters = self->filters, third = filters / 3;
    const float *first = floats(self, FIRST), *second = floats(self, SECOND), *last = floats(self, LAST);
    float *restrict top = out, *restrict sum = out + filters;
    float value[WIDEST];
    memset(out, 0, sizeof(float) * 2 * filters); /* a ReLU's results are not below 0 */
    for (int32_t at = 2; at < length; at++) {
        memcpy(value, last + (size_t)list[at] * filters, sizeof(float) * filters);
        add_row(value, second + (size_t)list[at - 1] * filters, 2 * third);
        add_row(value, first + (size_t)list[at - 2] * filters, third);
        for (int32_t i = 0; i < filters; i++) {
            float x = value[i] > 0 ? value[i] : 0;
            top[i] = x > top[i] ? x : top[i];
            sum[i] += x;
        }
    }
    float mean = MEAN_SCALE / (float)(length - 2 - 3 + 1 + LENGTH_OFFSET);
    for (int32_t i = 0; i < filters; i++) sum[i] *= mean;
}

/* out = row x matrix + bias. Of widths that fit registers, with the sums kept there: the sums are made in
 * the same order, so they are the same. */
#if defined(__GNUC__)
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
#define PRODUCT_OF(count_of)                                                              \
    case count_of: {                                                                      \
        Eight sum[count_of];                                                              \
        for (int i = 0; i < count_of; i++) sum[i] = ((const Eight *)bias)[i];             \
        for (int32_t k = 0; k < count; k++) {                                             \
            const float by = row[k];                                                      \
            const Eight *line = (const Eight *)(matrix + (size_t)k * width);              \
            for (int i = 0; i < count_of; i++) sum[i] += by * line[i];                    \
        }                                                                                 \
        for (int i = 0; i < count_of; i++) ((Eight *)out)[i] = sum[i];                    \
        return;                                                                           \
    }
#define WIDE_PRODUCTS                                                                     \
    switch (width % 8 ? 0 : width / 8) {                                                  \
        PRODUCT_OF(1) PRODUCT_OF(2) PRODUCT_OF(3) PRODUCT_OF(4) PRODUCT_OF(5) PRODUCT_OF(6) PRODUCT_OF(7) \
    }
#else
#define WIDE_PRODUCTS
#endif

FOR_EACH_PROCESSOR
static void product(const float *restrict row, int32_t count, const float *restrict matrix,
                    const float *restrict bias, int32_t width, float *restrict out) {
    WIDE_PRODUCTS
    memcpy(out, bias, sizeof(float) * width);
    for (int32_t k = 0; k < count; k++) {
        const float by = row[k], *restrict line = matrix + (size_t)k * width;
        for (int32_t i = 0; i < width; i++) out[i] += by * line[i];
    }
}

static void compute(Kernel *self, int32_t count, float *logits) {
    float pooled[2 * WIDEST], said[2 * WIDEST];
    const float *matrix = floats(self, MATRIX), *floor = floats(self, FLOOR);
    const int32_t features = self->features, inputs = 2 * self->filters;
    int32_t length = (count ? count : 1) + 4;
    pool(self, self->list, length, pooled);
    product(pooled, inputs, matrix, matrix + (size_t)inputs * features, features, said);
    for (int32_t i = 0; i < features; i++) said[i] = said[i] > floor[i] ? said[i] : floor[i];
    linear(self, self->list + 2, count, said + features);
    product(said, features + self->heads, floats(self, CALIBRATION), floats(self, OFFSETS),
            self->logits, logits);
}

/* zlib's crc32, since the features of training use it */
static uint32_t crc_table[256];

static void fill_crc_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++) value = value & 1 ? 0xEDB88320u ^ (value >> 1) : value >> 1;
        crc_table[i] = value;
    }
}

/* The hashes of the n-grams of 3 to 5 characters of a word with a space on either side. */
static int32_t hash_grams(const char *word, int32_t length, uint32_t *found) {
    unsigned char padded[LONGEST_WORD + 2];
    int32_t count = 0, size = length + 2;
    padded[0] = padded[size - 1] = ' ';
    memcpy(padded + 1, word, length);
    for (int32_t n = 3; n <= 5; n++)
        for (int32_t i = 0; i + n <= size; i++) {
            uint32_t hash = 0xFFFFFFFFu;
            for (int32_t k = i; k < i + n; k++) hash = crc_table[(hash ^ padded[k]) & 255] ^ (hash >> 8);
            found[count++] = hash ^ 0xFFFFFFFFu;
        }
    return count;
}

/* What a word adds to any text that contains it: the rows of its n-grams, and its filters. */
static void contribute(Kernel *self, int32_t number, const uint32_t *grams, int32_t count) {
    const float *weights = floats(self, GRAM_WEIGHTS), *vectors = floats(self, GRAM_VECTORS);
    float *row = (float *)self->views[ROWS].buf + (size_t)(self->buckets + number) * self->heads;
    memset(row, 0, sizeof(float) * self->heads);
    for (int32_t i = 0; i < count; i++)
        add_row(row, weights + (size_t)(grams[i] & (uint32_t)(self->buckets - 1)) * self->heads,
                self->heads);
    const float *vector = floats(self, VECTORS) + (size_t)number * self->width;
    float mean[WIDEST];
    if (number >= self->views[VECTORS].shape[0]) {
        const int32_t used = count < GRAMS_OF_VECTOR ? count : GRAMS_OF_VECTOR;
        const uint32_t rows = (uint32_t)self->views[GRAM_VECTORS].shape[0];
        memset(mean, 0, sizeof(float) * self->width);
        for (int32_t i = 0; i < used; i++)
            add_row(mean, vectors + (size_t)(grams[i] % rows) * self->width, self->width);
        for (int32_t i = 0; i < self->width; i++) mean[i] /= (float)(used ? used : 1);
        vector = mean;
    }
    for (int32_t place = 0; place < 3; place++) {
        float *out = (float *)self->views[FIRST + place].buf + (size_t)number * self->filters;
        product(vector, self->width, floats(self, FILTERS_1 + place), floats(self, BIASES_1 + place),
                (int32_t)self->views[BIASES_1 + place].shape[0], out);
    }
}

static uint32_t checksum(const char *word, Py_ssize_t length) {
    uint32_t hash = 0xFFFFFFFFu;
    for (Py_ssize_t i = 0; i < length; i++)
        hash = crc_table[(hash ^ (unsigned char)word[i]) & 255] ^ (hash >> 8);
    return hash ^ 0xFFFFFFFFu;
}

/* Stores what an ASCII word contributes; returns the number of its n-grams. */
static int32_t store_word(Kernel *self, int32_t number, const char *word, Py_ssize_t length, int32_t hash) {
    uint32_t grams[MOST_GRAMS];
    int32_t count = hash_grams(word, length < LONGEST_WORD ? (int32_t)length : LONGEST_WORD, grams);
    contribute(self, number, grams, count);
    ((int32_t *)self->views[HASHES].buf)[number] = hash;
    ((int32_t *)self->views[COUNTS].buf)[number] = count;
    return count;
}

PyDoc_STRVAR(add_word_doc, "add_word(number: int, word: bytes, hash: int, /) -> int\n--\n\n"
                           "Store what an ASCII word contributes; returns the number of its n-grams.");

static PyObject *kernel_add_word(Kernel *self, PyObject *args) {
    int number, hash;
    const char *word;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "iy#i", &number, &word, &length, &hash)) return NULL;
    if (number < 0 || number >= self->words || hash < 0 || hash >= self->buckets || !length)
        return PyErr_SetString(PyExc_ValueError, "no such word"), NULL;
    return PyLong_FromLong(store_word(self, number, word, length, hash));
}

static int reserve(Kernel *self, Py_ssize_t length) {
    if (length <= self->room) return 0;
    int32_t *list = PyMem_Realloc(self->list, sizeof(int32_t) * length);
    if (!list) return PyErr_NoMemory(), -1;
    self->list = list;
    self->room = (int32_t)length;
    return 0;
}

/* Computes the logits of a text from the numbers of its words; -1 with an exception where it cannot. */
static int read_text(Kernel *self, PyObject *numbers, float *logits) {
    if (!PyList_Check(numbers))
        return PyErr_SetString(PyExc_TypeError, "the numbers of the words are a list"), -1;
    Py_ssize_t count = PyList_GET_SIZE(numbers);
    if (count > INT32_MAX - 4)
        return PyErr_SetString(PyExc_ValueError, "too many words"), -1;
    if (reserve(self, (count ? count : 1) + 4)) return -1;
    int32_t *words = self->list + 2;
    for (Py_ssize_t i = 0; i < count; i++) {
        long number = PyLong_AsLong(PyList_GET_ITEM(numbers, i));
        if (number < 0 || number >= self->words) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "no word has the number %ld", number);
            return -1;
        }
        words[i] = (int32_t)number;
    }
    if (!count) words[0] = self->before;
    self->list[0] = self->list[1] = self->before;
    words[count ? count : 1] = self->behind;
    words[(count ? count : 1) + 1] = self->beyond;
    if (count >= LONG_TEXT) {
        Py_BEGIN_ALLOW_THREADS
        compute(self, (int32_t)count, logits);
        Py_END_ALLOW_THREADS
    } else {
        compute(self, (int32_t)count, logits);
    }
    return 0;
}

static PyObject *list_of(const float *values, int32_t count) {
    PyObject *result = PyList_New(count);
    for (int32_t i = 0; result && i < count; i++) {
        PyObject *value = PyFloat_FromDouble(values[i]);
        if (!value) return Py_DECREF(result), NULL;
        PyList_SET_ITEM(result, i, value);
    }
    return result;
}

PyDoc_STRVAR(logits_doc, "logits(numbers: list[int], /) -> list[float]\n--\n\n"
                         "The calibrated logits of a text, from the numbers of its words.");

static PyObject *kernel_logits(Kernel *self, PyObject *numbers) {
    float logits[WIDEST];
    return read_text(self, numbers, logits) ? NULL : list_of(logits, self->logits);
}

/* Makes of the logits the probabilities of the heads; the last logit is that of any harm, by which the
 * harms are scaled (`blend_any_harm`). */
static void blend(const Kernel *self, float *logits) {
    double chances[WIDEST], top = LEAST_TOP;
    const int32_t heads = self->logits - 1, harms = heads - 1;
    for (int32_t i = 0; i <= heads; i++)
        chances[i] = 1 / (1 + exp(logits[i] > -MAX_EXPONENT ? -(double)logits[i] : MAX_EXPONENT));
    for (int32_t i = 0; i < harms; i++) top = chances[i] > top ? chances[i] : top;
    const double scale = (top + chances[heads]) / (2 * top);
    for (int32_t i = 0; i < heads; i++) {
        const double scaled = i < harms ? chances[i] * scale : chances[i];
        logits[i] = (float)(scaled > 1 ? 1 : scaled);
    }
}

PyDoc_STRVAR(scores_doc, "scores(numbers: list[int], /) -> list[float]\n--\n\n"
                         "The probabilities of the heads: the last one is no harm.");

static PyObject *kernel_scores(Kernel *self, PyObject *numbers) {
    float logits[WIDEST];
    if (self->logits < 2) return PyErr_SetString(PyExc_ValueError, "there are no heads"), NULL;
    if (read_text(self, numbers, logits)) return NULL;
    blend(self, logits);
    return list_of(logits, self->logits - 1);
}

static Py_ssize_t side(const Kernel *self, int which, int axis) { return self->views[which].shape[axis]; }

/* -1 with an exception where the arrays do not fit together: then nothing could be read safely. */
static int measure(Kernel *self) {
    for (int i = 0; i < ARRAYS; i++) {
        int axes = i == HASHES || i == COUNTS || i == FLOOR || i == OFFSETS || i >= BIASES_1 ? 1 : 2;
        if (strcmp(self->views[i].format, FORMATS[i]) || self->views[i].ndim != axes)
            return PyErr_Format(PyExc_TypeError, "array %d has the wrong type or shape", i), -1;
    }
    self->heads = (int32_t)side(self, ROWS, 1);
    self->filters = (int32_t)side(self, LAST, 1);
    self->features = (int32_t)side(self, MATRIX, 1);
    self->logits = (int32_t)side(self, CALIBRATION, 1);
    self->words = (int32_t)side(self, HASHES, 0);
    self->width = (int32_t)side(self, VECTORS, 1);
    Py_ssize_t rows = side(self, LAST, 0);
    int fits = self->buckets > 0 && !(self->buckets & (self->buckets - 1)) && self->filters % 3 == 0
        && self->heads <= WIDEST && self->filters <= WIDEST && self->features + self->heads <= WIDEST
        && self->logits <= WIDEST && side(self, ROWS, 0) == (Py_ssize_t)self->buckets + self->words
        && side(self, COUNTS, 0) == self->words && side(self, FIRST, 0) == rows
        && side(self, SECOND, 0) == rows && side(self, FIRST, 1) == self->filters
        && side(self, SECOND, 1) == self->filters && side(self, MATRIX, 0) == 2 * self->filters + 1
        && side(self, FLOOR, 0) == self->features && side(self, OFFSETS, 0) == self->logits
        && side(self, CALIBRATION, 0) == self->features + self->heads && self->words <= rows
        && self->before >= 0 && self->before < rows && self->behind >= 0 && self->behind < rows
        && self->beyond >= 0 && self->beyond < rows;
    for (int i = 0; i < 3; i++)
        fits = fits && side(self, FILTERS_1 + i, 0) == self->width
            && side(self, FILTERS_1 + i, 1) == side(self, BIASES_1 + i, 0)
            && side(self, BIASES_1 + i, 0) == self->filters / 3 * (i + 1);
    fits = fits && self->width <= WIDEST && side(self, GRAM_VECTORS, 1) == self->width
        && side(self, GRAM_VECTORS, 0) > 0 && side(self, GRAM_WEIGHTS, 1) == self->heads
        && side(self, GRAM_WEIGHTS, 0) >= self->buckets;
    if (!fits) return PyErr_SetString(PyExc_ValueError, "the arrays do not fit together"), -1;
    return 0;
}

static void kernel_dealloc(Kernel *self) {
    for (int i = 0; i < self->held; i++) PyBuffer_Release(&self->views[i]);
    PyMem_Free(self->seen_hashes);
    PyMem_Free(self->seen_words);
    PyMem_Free(self->list);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *kernel_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(named)) {
    PyObject *arrays;
    int buckets, before, behind, beyond;
    if (!PyArg_ParseTuple(args, "O!i(iii)", &PyTuple_Type, &arrays, &buckets, &before, &behind, &beyond))
        return NULL;
    if (PyTuple_GET_SIZE(arrays) != ARRAYS)
        return PyErr_Format(PyExc_ValueError, "%d arrays are needed", (int)ARRAYS), NULL;
    Kernel *self = (Kernel *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->buckets = buckets, self->before = before, self->behind = behind, self->beyond = beyond;
    for (; self->held < ARRAYS; self->held++)
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(arrays, self->held), &self->views[self->held],
                               PyBUF_FORMAT | PyBUF_C_CONTIGUOUS
                                   | (self->held < WRITTEN ? PyBUF_WRITABLE : 0)))
            return Py_DECREF(self), NULL;
    if (measure(self)) return Py_DECREF(self), NULL;
    self->seen_hashes = PyMem_Calloc(buckets / 64 + 1, sizeof(uint64_t));
    self->seen_words = PyMem_Calloc(self->words / 64 + 1, sizeof(uint64_t));
    if (!self->seen_hashes || !self->seen_words) return Py_DECREF(self), PyErr_NoMemory();
    return (PyObject *)self;
}

#include "loose.h"
#include "window.h"

static PyMethodDef methods[] = {
    {"logits", (PyCFunction)kernel_logits, METH_O, logits_doc},
    {"scores", (PyCFunction)kernel_scores, METH_O, scores_doc},
    {"add_word", (PyCFunction)kernel_add_word, METH_VARARGS, add_word_doc},
    {0}};
static PyType_Slot slots[] = {{Py_tp_new, kernel_new}, {Py_tp_dealloc, kernel_dealloc},
                              {Py_tp_methods, methods}, {0}};
static PyType_Spec spec = {"moderation.classifiers._kernel.Kernel", sizeof(Kernel), 0,
                           Py_TPFLAGS_DEFAULT, slots};

// What `compiled.py` expects of this module; both change together, so that an older build is not used.
#define INTERFACE 4

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_kernel", .m_size = -1};

/* Takes the reference; `type` may be NULL, with an exception. */
static int add_type(PyObject *module_made, const char *name, PyObject *type) {
    int failed = !type || PyModule_AddObjectRef(module_made, name, type);
    Py_XDECREF(type);
    return failed;
}

PyMODINIT_FUNC PyInit__kernel(void) {
    fill_crc_table();
    fill_kinds();
    PyObject *made = PyModule_Create(&module), *type = made ? PyType_FromSpec(&spec) : NULL;
    kernel_type = (PyTypeObject *)type;
    if (!made || PyModule_AddIntMacro(made, INTERFACE) || add_type(made, "Kernel", type)
        || add_type(made, "Window", PyType_FromSpec(&window_spec))
        || add_type(made, "LooseText", PyType_FromSpec(&loose_spec))) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
