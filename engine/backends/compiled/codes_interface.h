/* Matrices of codes, and keys and values in 8 bits, for Python. */
#ifndef CODES_INTERFACE_H
#define CODES_INTERFACE_H
#include <structmember.h>

enum { CODES, SCALES, MINIMA, FACTORS, ARRAYS };

typedef struct {
    PyObject_HEAD
    Py_buffer views[ARRAYS];
    Coded coded;
    Address address; /* of `coded` */
} Matrix;

/* -1 with an exception where the arrays do not fit together: then nothing could be read safely. */
static int measure(const Matrix *self, int64_t group) {
    const Coded *m = &self->coded;
    int64_t steps = m->groups * (int64_t)(GROUP / m->step), scales = m->scale_count;
    int64_t needed[ARRAYS] = {
        (int64_t)m->tiles * m->groups * m->bits * 64, m->tiles * scales * LANES * 2,
        m->tiles * scales * LANES * 2, (int64_t)m->tiles * LANES * 4};
    int fits = (m->bits == 4 || m->bits == 8) && m->out > 0 && m->groups > 0
        && (group == 16 || (group > 0 && group % GROUP == 0))
        && scales * m->per_scale >= steps && m->zero >= 0 && m->zero < 1 << m->bits
        && (m->bits == 4 || m->zero == 128);
    for (int i = 0; i < ARRAYS; i++)
        if (self->views[i].buf) fits = fits && self->views[i].len == needed[i];
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
    Coded *m = &self->coded;
    m->out = out, m->groups = groups, m->bits = bits, m->zero = zero;
    m->tiles = out / LANES + (out % LANES != 0);
    m->step = group == 16 ? 16 : GROUP;
    m->per_scale = group > m->step ? (int32_t)(group / m->step) : 1;
    const int32_t steps = groups * (GROUP / m->step);
    m->scale_count = (steps + m->per_scale - 1) / m->per_scale;
    for (int i = 0; i < ARRAYS; i++) {
        PyObject *array = PyTuple_GET_ITEM(arrays, i);
        if (array == Py_None && i == MINIMA) continue;
        if (PyObject_GetBuffer(array, &self->views[i], PyBUF_C_CONTIGUOUS)) return Py_DECREF(self), NULL;
    }
    if (measure(self, group)) return Py_DECREF(self), NULL;
    m->codes = self->views[CODES].buf, m->scales = self->views[SCALES].buf;
    m->minima = self->views[MINIMA].buf, m->factors = self->views[FACTORS].buf;
    self->address = (Address)(uintptr_t)m;
    return (PyObject *)self;
}

static PyMemberDef members[] = {
    {"address", T_ULONGLONG, offsetof(Matrix, address), READONLY, "Where products find it."}, {0}};
static PyType_Slot slots[] = {{Py_tp_new, matrix_new}, {Py_tp_dealloc, matrix_dealloc}, {Py_tp_members, members},
                              {0}};
static PyType_Spec matrix_spec = {"engine.backends.compiled._kernel.Matrix", sizeof(Matrix), 0, Py_TPFLAGS_DEFAULT, slots};

static void gather_part(void *given, int number, int count) {
    const KvWork *w = given;
    level->gather_kv(w, w->count * number / count, w->count * (number + 1) / count);
}

PyDoc_STRVAR(store_kv_doc,
    "store_kv(pool, slots, heads, stride, count, heads_of_token, dim, size, bf16, fp8, /)\n--\n\n"
    "Rounds `count` heads to 8 bits at their KV slots.");

static PyObject *store_kv(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long pool, at, floats;
    long long stride, count;
    KvWork w = {0};
    if (!PyArg_ParseTuple(args, "KKKLLiiipp", &pool, &at, &floats, &stride, &count, &w.heads, &w.dim,
                          &w.size, &w.bf16, &w.fp8))
        return NULL;
    w.pool = (char *)(uintptr_t)pool, w.at = (const int64_t *)(uintptr_t)at;
    w.floats = (char *)(uintptr_t)floats, w.stride = stride, w.count = count;
    level->store_kv(&w);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(gather_kv_doc,
    "gather_kv(pool, rows, out, count, dim, size, bf16, fp8, threads, /)\n--\n\n"
    "The floats of `count` rows of the pool.");

static PyObject *gather_kv(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long pool, at, floats;
    long long count;
    int threads;
    KvWork w = {0};
    if (!PyArg_ParseTuple(args, "KKKLiippi", &pool, &at, &floats, &count, &w.dim, &w.size, &w.bf16,
                          &w.fp8, &threads))
        return NULL;
    w.pool = (char *)(uintptr_t)pool, w.at = (const int64_t *)(uintptr_t)at;
    w.floats = (char *)(uintptr_t)floats, w.count = count;
    Py_BEGIN_ALLOW_THREADS
    run(gather_part, &w, count * w.dim * w.size < ALONE ? 1 : threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

#endif
