/* Products of rows with matrices of 8-bit or 4-bit codes: see `packed.py` for the layout.
 *
 * Built when a C compiler is there; without it torch computes the same, within rounding. Rows are
 * quantised in groups of 32, products of codes are added as integers within a group, and groups are
 * added in order as floats: a row's result does not depend on the rows beside it.
 * Threads are those of the OpenMP library that torch has loaded, so that two pools never compete.
 */
#include "kv.h"
#include "tiles.h"
#if X86
#include "tiles_x86.h"
#endif
#include <stdlib.h>
#if defined(__unix__) || defined(__APPLE__)
#endif

static Tile the_tile = tile_plain;
static void (*the_codes)(const float *, int32_t, const Codes *, int32_t) = to_codes_plain;
static void (*the_store)(const KvWork *) = kv_store_plain;
static void (*the_gather)(const KvWork *, int64_t, int64_t) = kv_gather_plain;
static const char *level = "plain";

/* Chooses the instructions; -1 for a name that this processor does not have. */
static int choose(const char *name) {
    if (!strcmp(name, "plain")) {
        the_tile = tile_plain, the_codes = to_codes_plain, level = "plain";
        the_store = kv_store_plain, the_gather = kv_gather_plain;
        return 0;
    }
#if X86
    int wide_ones = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (!strcmp(name, "avx512") && wide_ones) {
        the_tile = tile_512, the_codes = to_codes_512, level = "avx512";
        the_store = kv_store_512, the_gather = kv_gather_512;
        return 0;
    }
    if (!strcmp(name, "avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        the_tile = tile_256, the_codes = to_codes_256, level = "avx2";
        the_store = kv_store_256, the_gather = kv_gather_256;
        return 0;
    }
#endif
    return -1;
}

typedef struct {
    const Matrix *matrix, *gate; /* the gate is NULL, or of the same format */
    const char *x, *other;       /* rows of floats or bfloat16; `other` is added */
    char *out;
    int64_t x_stride, out_stride, other_stride; /* in elements */
    int32_t rows, width;
    int brain, kind, threads;
    Codes codes;
} Work;

static void run(void (*part)(Work *, int, int), Work *work);

static void code_rows(Work *w, int number, int count) {
    float row[w->codes.groups * GROUP];
    for (int32_t r = number; r < w->rows; r += count) {
        const float *from = (const float *)w->x + r * w->x_stride;
        if (w->brain) {
            const uint16_t *given = (const uint16_t *)w->x + r * w->x_stride;
            for (int32_t i = 0; i < w->width; i++) row[i] = wide(given[i]);
            from = row;
        }
        the_codes(from, w->width, &w->codes, r);
    }
}

INLINE void finish(const Matrix *m, int32_t tile, float *sums) {
    const float *factors = (const float *)m->views[FACTORS].buf + tile * LANES;
    const float *bias = m->views[BIAS].buf;
    for (int i = 0; i < LANES; i++) sums[i] *= factors[i];
    if (bias)
        for (int i = 0; i < LANES; i++) sums[i] += bias[tile * LANES + i];
}

INLINE void store(const Work *w, int32_t tile, int32_t row, const float *sums) {
    int32_t at = tile * LANES, count = w->matrix->out - at;
    if (count > LANES) count = LANES;
    if (w->brain) {
        uint16_t *to = (uint16_t *)w->out + row * w->out_stride + at;
        const uint16_t *more = (const uint16_t *)w->other + row * w->other_stride + at;
        for (int i = 0; i < count; i++) to[i] = narrow(w->other ? sums[i] + wide(more[i]) : sums[i]);
    } else {
        float *to = (float *)w->out + row * w->out_stride + at;
        const float *more = (const float *)w->other + row * w->other_stride + at;
        for (int i = 0; i < count; i++) to[i] = w->other ? sums[i] + more[i] : sums[i];
    }
}

static void multiply(Work *w, int number, int count) {
    const Matrix *m = w->matrix;
    const int pair = w->gate ? 1 : 2; /* tiles of one matrix, or one of each */
    const int32_t units = (m->tiles + pair - 1) / pair;
    const int32_t first = (int32_t)((int64_t)units * number / count);
    const int32_t end = (int32_t)((int64_t)units * (number + 1) / count);
    float sums[2][BLOCK][LANES];
    for (int32_t unit = first; unit < end; unit++) {
        const int32_t tile = unit * pair, other = w->gate ? tile : tile + 1;
        const int tiles = other < m->tiles ? 2 : 1;
        const Weights weights[2] = {weights_of(m, tile),
                                    weights_of(w->gate ? w->gate : m, tiles > 1 ? other : tile)};
        for (int32_t row = 0; row < w->rows; row += BLOCK) {
            const int rows = w->rows - row < BLOCK ? w->rows - row : BLOCK;
            the_tile(m, weights, tiles, rows_of(&w->codes, row, rows), sums);
            for (int r = 0; r < rows; r++) {
                finish(m, tile, sums[0][r]);
                if (w->gate) {
                    finish(w->gate, tile, sums[1][r]);
                    for (int i = 0; i < LANES; i++)
                        sums[0][r][i] *= activated(sums[1][r][i], w->kind);
                } else if (tiles > 1) {
                    finish(m, other, sums[1][r]);
                    store(w, other, row + r, sums[1][r]);
                }
                store(w, tile, row + r, sums[0][r]);
            }
        }
    }
}

typedef struct {
    void (*part)(Work *, int, int);
    Work *work;
} Job;

static void on_thread(void *given) {
    Job *job = given;
    job->part(job->work, thread_number(), thread_count());
}

static void run(void (*part)(Work *, int, int), Work *work) {
    Job job = {part, work};
    if (parallel && work->threads > 1) parallel(on_thread, &job, (unsigned)work->threads, 0);
    else part(work, 0, 1);
}

/* The memory of the rows' codes, kept between calls; one thread computes at a time on each. */
static _Thread_local struct { char *memory; size_t size; } scratch;

static int reserve(Work *w) {
    Codes *c = &w->codes;
    size_t rows = ((size_t)w->rows + BLOCK - 1) / BLOCK * BLOCK, padded = rows * c->groups * GROUP;
    size_t size = padded + rows * (c->groups * sizeof(float) + c->steps * 2 * sizeof(float));
    if (size > scratch.size) {
        free(scratch.memory);
        scratch.size = 0;
        scratch.memory = malloc(size + 64);
        if (!scratch.memory) return PyErr_NoMemory(), -1;
        scratch.size = size;
    }
    char *start = (char *)(((uintptr_t)scratch.memory + 63) & ~(uintptr_t)63);
    c->codes = (int8_t *)start;
    c->scales = (float *)(start + padded);
    c->sums = c->scales + rows * c->groups;
    c->starts = (int32_t *)(c->sums + rows * c->steps);
    return 0;
}

static void compute(Work *w) {
    int threads = w->threads;
    if ((int64_t)w->rows * w->width < ALONE) w->threads = 1;
    run(code_rows, w);
    w->threads = threads;
    run(multiply, w);
}

static int perform(Work *w) {
    const Matrix *m = w->matrix;
    if (w->rows < 1) return 0;
    if (w->width < 1 || w->width > m->groups * GROUP)
        return PyErr_SetString(PyExc_ValueError, "the rows have another width"), -1;
    w->codes.groups = m->groups, w->codes.step = m->step, w->codes.zero = m->zero;
    w->codes.steps = m->groups * (GROUP / m->step);
    if (reserve(w)) return -1;
    int64_t work = (int64_t)w->rows * m->out * m->groups * GROUP * (w->gate ? 2 : 1);
    if (work < ALONE) w->threads = 1;
    if (work < LONG) return compute(w), 0;
    Py_BEGIN_ALLOW_THREADS
    compute(w);
    Py_END_ALLOW_THREADS
    return 0;
}

/* A row of memory: (address, elements from one row to the next). */
static int reads_rows(PyObject *pair, char **start, int64_t *stride) {
    unsigned long long at;
    long long step;
    if (!PyArg_ParseTuple(pair, "KL", &at, &step)) return -1;
    *start = (char *)(uintptr_t)at, *stride = step;
    return 0;
}

static PyTypeObject *matrix_type;

static Matrix *as_matrix(PyObject *given) {
    if (Py_TYPE(given) == matrix_type) return (Matrix *)given;
    PyErr_SetString(PyExc_TypeError, "a Matrix is needed");
    return NULL;
}

static int reads_work(Work *w, PyObject *rows, PyObject *out, int count, int brain, int threads) {
    char *x;
    if (reads_rows(rows, &x, &w->x_stride) || reads_rows(out, &w->out, &w->out_stride)) return -1;
    w->x = x, w->rows = count, w->brain = brain, w->threads = threads;
    return 0;
}

PyDoc_STRVAR(product_doc,
    "product(matrix, x, out, other, width, rows, brain, threads, /)\n--\n\n"
    "out = x W^T + bias (+ other). x, out and other: (address, elements between rows).");

static PyObject *product(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *given, *x, *out, *other;
    int width, rows, brain, threads;
    if (!PyArg_ParseTuple(args, "OO!O!Oiipi", &given, &PyTuple_Type, &x, &PyTuple_Type, &out, &other,
                          &width, &rows, &brain, &threads))
        return NULL;
    Work w = {.matrix = as_matrix(given), .width = width};
    if (!w.matrix || reads_work(&w, x, out, rows, brain, threads)) return NULL;
    if (other != Py_None) {
        char *more;
        if (!PyTuple_Check(other))
            return PyErr_SetString(PyExc_TypeError, "other is a tuple or None"), NULL;
        if (reads_rows(other, &more, &w.other_stride)) return NULL;
        w.other = more;
    }
    if (perform(&w)) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(gated_doc,
    "gated(gate, up, x, out, width, rows, brain, threads, gelu, /)\n--\n\n"
    "out = activation(x G^T) * (x U^T), for two matrices of one format.");

static PyObject *gated(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *gate, *up, *x, *out;
    int width, rows, brain, threads, gelu;
    if (!PyArg_ParseTuple(args, "OOO!O!iipip", &gate, &up, &PyTuple_Type, &x, &PyTuple_Type, &out,
                          &width, &rows, &brain, &threads, &gelu))
        return NULL;
    Work w = {.matrix = as_matrix(up), .gate = as_matrix(gate), .width = width};
    if (!w.matrix || !w.gate || reads_work(&w, x, out, rows, brain, threads)) return NULL;
    w.kind = gelu ? GELU : SILU;
    if (w.gate->groups != w.matrix->groups || w.gate->out != w.matrix->out
        || w.gate->step != w.matrix->step || w.gate->zero != w.matrix->zero
        || w.gate->bits != w.matrix->bits || w.gate->scales != w.matrix->scales
        || !w.gate->views[MINIMA].buf != !w.matrix->views[MINIMA].buf)
        return PyErr_SetString(PyExc_ValueError, "the matrices have different formats"), NULL;
    if (perform(&w)) return NULL;
    Py_RETURN_NONE;
}

static void gather_on_thread(void *given) {
    const KvWork *w = given;
    const int64_t number = thread_number(), count = thread_count();
    the_gather(w, w->count * number / count, w->count * (number + 1) / count);
}

PyDoc_STRVAR(store_kv_doc,
    "store_kv(pool, slots, heads, stride, count, heads_of_token, dim, size, brain, fp8, /)\n--\n\n"
    "Rounds `count` heads to 8 bits at their KV slots.");

static PyObject *store_kv(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long pool, at, floats;
    long long stride, count;
    KvWork w = {0};
    if (!PyArg_ParseTuple(args, "KKKLLiiipp", &pool, &at, &floats, &stride, &count, &w.heads, &w.dim,
                          &w.size, &w.brain, &w.fp8))
        return NULL;
    w.pool = (char *)(uintptr_t)pool, w.at = (const int64_t *)(uintptr_t)at;
    w.floats = (char *)(uintptr_t)floats, w.stride = stride, w.count = count;
    the_store(&w);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(gather_kv_doc,
    "gather_kv(pool, rows, out, count, dim, size, brain, fp8, threads, /)\n--\n\n"
    "The floats of `count` rows of the pool.");

static PyObject *gather_kv(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long pool, at, floats;
    long long count;
    int threads;
    KvWork w = {0};
    if (!PyArg_ParseTuple(args, "KKKLiippi", &pool, &at, &floats, &count, &w.dim, &w.size, &w.brain,
                          &w.fp8, &threads))
        return NULL;
    w.pool = (char *)(uintptr_t)pool, w.at = (const int64_t *)(uintptr_t)at;
    w.floats = (char *)(uintptr_t)floats, w.count = count;
    const int many = parallel && threads > 1 && count * w.dim * w.size >= ALONE;
    Py_BEGIN_ALLOW_THREADS
    if (many) parallel(gather_on_thread, &w, (unsigned)threads, 0);
    else the_gather(&w, 0, count);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(instructions_doc, "instructions(name=None, /) -> str\n--\n\n"
                               "Which instructions are used; `name` chooses them.");

static PyObject *instructions(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *name = NULL;
    if (!PyArg_ParseTuple(args, "|z", &name)) return NULL;
    if (name && choose(name))
        return PyErr_Format(PyExc_ValueError, "this processor has no %s", name), NULL;
    return PyUnicode_FromString(level);
}

/* -1 with an exception where the arrays do not fit together: then nothing could be read safely. */
static int measure(Matrix *m, int64_t group) {
    int64_t steps = m->groups * (int64_t)(GROUP / m->step), scales = m->scales;
    int64_t needed[ARRAYS] = {
        (int64_t)m->tiles * m->groups * m->bits * 64, m->tiles * scales * LANES * 2,
        m->tiles * scales * LANES * 2, (int64_t)m->tiles * LANES * 4, (int64_t)m->tiles * LANES * 4};
    int fits = (m->bits == 4 || m->bits == 8) && m->out > 0 && m->groups > 0
        && (group == 16 || (group > 0 && group % GROUP == 0))
        && scales * m->per_scale >= steps && m->zero >= 0 && m->zero < 1 << m->bits
        && (m->bits == 4 || m->zero == 128);
    for (int i = 0; i < ARRAYS; i++)
        if (m->views[i].buf) fits = fits && m->views[i].len == needed[i];
    if (!fits) return PyErr_SetString(PyExc_ValueError, "the arrays do not fit together"), -1;
    return 0;
}

static void matrix_dealloc(Matrix *self) {
    for (int i = 0; i < ARRAYS; i++) PyBuffer_Release(&self->views[i]);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *matrix_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(named)) {
    PyObject *arrays;
    int out, groups, bits, zero;
    long long group;
    if (!PyArg_ParseTuple(args, "O!iiiLi", &PyTuple_Type, &arrays, &out, &groups, &bits, &group, &zero))
        return NULL;
    if (PyTuple_GET_SIZE(arrays) != ARRAYS)
        return PyErr_Format(PyExc_ValueError, "%d arrays are needed", (int)ARRAYS), NULL;
    Matrix *self = (Matrix *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->out = out, self->groups = groups, self->bits = bits, self->zero = zero;
    self->tiles = out / LANES + (out % LANES != 0);
    self->step = group == 16 ? 16 : GROUP;
    self->per_scale = group > self->step ? (int32_t)(group / self->step) : 1;
    int32_t steps = groups * (GROUP / self->step);
    self->scales = (steps + self->per_scale - 1) / self->per_scale;
    for (int i = 0; i < ARRAYS; i++) {
        PyObject *array = PyTuple_GET_ITEM(arrays, i);
        if (array == Py_None && (i == MINIMA || i == BIAS)) continue;
        if (PyObject_GetBuffer(array, &self->views[i], PyBUF_C_CONTIGUOUS)) return Py_DECREF(self), NULL;
    }
    if (measure(self, group)) return Py_DECREF(self), NULL;
    return (PyObject *)self;
}

static PyType_Slot slots[] = {{Py_tp_new, matrix_new}, {Py_tp_dealloc, matrix_dealloc}, {0}};
static PyType_Spec spec = {"engine.quantization._kernel.Matrix", sizeof(Matrix), 0, Py_TPFLAGS_DEFAULT,
                           slots};
static PyMethodDef methods[] = {{"product", product, METH_VARARGS, product_doc},
                                {"gated", gated, METH_VARARGS, gated_doc},
                                {"store_kv", store_kv, METH_VARARGS, store_kv_doc},
                                {"gather_kv", gather_kv, METH_VARARGS, gather_kv_doc},
                                {"instructions", instructions, METH_VARARGS, instructions_doc},
                                {0}};
// What `linear.py` expects of this module; both change together, so that an older build is not used.
#define INTERFACE 2

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_kernel", .m_size = -1,
                                    .m_methods = methods};

PyMODINIT_FUNC PyInit__kernel(void) {
    find_threads();
#if X86
    __builtin_cpu_init();
    if (choose("avx512")) choose("avx2");
#endif
    PyObject *made = PyModule_Create(&module);
    matrix_type = made ? (PyTypeObject *)PyType_FromSpec(&spec) : NULL;
    if (!matrix_type || PyModule_AddObjectRef(made, "Matrix", (PyObject *)matrix_type) ||
        PyModule_AddIntMacro(made, INTERFACE)) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
