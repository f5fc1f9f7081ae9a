/* The functions of kernel.c for Python. */
#ifndef INTERFACE_H
#define INTERFACE_H

typedef unsigned long long Address;

/* Memory that is kept between calls; one thread computes at a time on each. */
static _Thread_local struct { char *memory; size_t size; } scratch;

static char *reserve(size_t size) {
    if (size > scratch.size) {
        free(scratch.memory);
        scratch.size = 0;
        scratch.memory = malloc(size + 64);
        if (!scratch.memory) return PyErr_NoMemory(), NULL;
        scratch.size = size;
    }
    return (char *)(((uintptr_t)scratch.memory + 63) & ~(uintptr_t)63);
}

/* Whether a matrix of codes, and its gate if any, are what a product's memory is made for. */
static int fits(const Coded *m, const Coded *gate, int32_t width, int32_t outputs) {
    const int same = !gate || (gate->groups == m->groups && gate->out == m->out && gate->step == m->step
                               && gate->zero == m->zero && gate->bits == m->bits
                               && gate->per_scale == m->per_scale && !gate->minima == !m->minima);
    return same && m->out == outputs && m->groups == (width + GROUP - 1) / GROUP;
}

/* Reads the groups, (weights, gate, bias, gate bias, first row, rows), into memory of this call. */
static Group *reads_groups(PyObject *given, Work *w) {
    const int32_t tiles = (w->outputs + LANES - 1) / LANES;
    w->count = (int32_t)PyList_GET_SIZE(given);
    Group *groups = PyMem_Malloc(sizeof(Group) * (w->count ? w->count : 1));
    if (!groups) return PyErr_NoMemory(), NULL;
    for (int32_t i = 0; i < w->count; i++) {
        Address weights, gate, bias, gate_bias;
        Group *g = &groups[i];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(given, i), "KKKKii", &weights, &gate, &bias, &gate_bias,
                              &g->first, &g->rows))
            return PyMem_Free(groups), NULL;
        g->weights = (const char *)(uintptr_t)weights, g->gate = (const char *)(uintptr_t)gate;
        g->bias = (const float *)(uintptr_t)bias, g->gate_bias = (const float *)(uintptr_t)gate_bias;
        if (w->coded && !fits((const Coded *)g->weights, (const Coded *)g->gate, w->width, w->outputs)) {
            PyErr_SetString(PyExc_ValueError, "the matrices have another format or width");
            return PyMem_Free(groups), NULL;
        }
        if (g->rows > 0) w->units += gate ? tiles : (tiles + 1) / 2;
        g->units = w->units;
        if (g->first + g->rows > w->rows) w->rows = g->first + g->rows;
    }
    return groups;
}

PyDoc_STRVAR(product_doc,
    "product(groups, outputs, width, x, x_stride, out, out_stride, other, other_stride, bf16, coded, "
    "kind, threads, /)\n--\n\n"
    "out = x W^T + bias (+ other), or (x W^T + bias) activation(x G^T + gate bias), for each group's rows.");

static PyObject *product(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *groups;
    Address x, out, other;
    long long x_stride, out_stride, other_stride;
    Work w = {0};
    if (!PyArg_ParseTuple(args, "O!iiKLKLKLppii", &PyList_Type, &groups, &w.outputs, &w.width, &x,
                          &x_stride, &out, &out_stride, &other, &other_stride, &w.bf16, &w.coded,
                          &w.kind, &w.threads))
        return NULL;
    if (!(w.groups = reads_groups(groups, &w))) return NULL;
    if (!w.count) return PyMem_Free(w.groups), Py_NewRef(Py_None);
    w.x = (const char *)(uintptr_t)x, w.out = (char *)(uintptr_t)out;
    w.other = (const char *)(uintptr_t)other;
    w.x_stride = x_stride, w.out_stride = out_stride, w.other_stride = other_stride;
    const size_t bytes = ready_bytes(&w);
    char *memory = bytes ? reserve(bytes) : NULL;
    if (bytes && !memory) return PyMem_Free(w.groups), NULL;
    const int64_t work = (int64_t)w.rows * w.outputs * w.filled;
    PyThreadState *state = work < LONG ? NULL : PyEval_SaveThread();
    make_ready(&w, memory, w.threads), multiply(&w, w.threads);
    if (state) PyEval_RestoreThread(state);
    PyMem_Free(w.groups);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(activate_doc,
    "activate(gate, gate_stride, up, up_stride, rows, width, bf16, kind, /)\n--\n\n"
    "gate = activation(gate) * up, in place; without a product where up is 0.");

static PyObject *activate(PyObject *Py_UNUSED(module), PyObject *args) {
    Address gate, up;
    Activation w = {0};
    if (!PyArg_ParseTuple(args, "KLKLiipi", &gate, &w.gate_stride, &up, &w.up_stride, &w.rows, &w.width,
                          &w.bf16, &w.kind))
        return NULL;
    w.gate = (char *)(uintptr_t)gate, w.up = (const char *)(uintptr_t)up;
    Py_BEGIN_ALLOW_THREADS
    level->activate(&w);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(add_ranks_doc,
    "add_ranks(x, x_stride, a, b, out, out_stride, rows, width, rank, outputs, bf16, threads, /)\n--\n\n"
    "out += (x A^T) B.");

static PyObject *add_ranks_of(PyObject *Py_UNUSED(module), PyObject *args) {
    Address x, a, b, out;
    long long x_stride, out_stride;
    Ranks w = {0};
    if (!PyArg_ParseTuple(args, "KLKKKLiiiipi", &x, &x_stride, &a, &b, &out, &out_stride, &w.rows,
                          &w.width, &w.rank, &w.outputs, &w.bf16, &w.threads))
        return NULL;
    w.x = (const char *)(uintptr_t)x, w.a = (const char *)(uintptr_t)a;
    w.b = (const char *)(uintptr_t)b, w.out = (char *)(uintptr_t)out;
    w.x_stride = x_stride, w.out_stride = out_stride;
    const int64_t work = (int64_t)w.rows * w.rank * (w.width + w.outputs);
    PyThreadState *state = work < LONG ? NULL : PyEval_SaveThread();
    run(ranks_part, &w, work < ALONE ? 1 : w.threads);
    if (state) PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(attend_doc,
    "attend(q, stride, pool, k, v, out, starts, newest, sinks, shape, scale, cap, bf16, threads, /)\n--\n\n"
    "shape: (sequences, queries, positions, kv heads, group, dim, window, block size).");

static PyObject *attend(PyObject *Py_UNUSED(module), PyObject *args) {
    Address q, pool, k, v, out, starts, newest, sinks;
    long long stride;
    int threads;
    Attending work = {0};
    Attention *a = &work.attention;
    if (!PyArg_ParseTuple(args, "KLKKKKKKK(iiiiiiii)ffpi", &q, &stride, &pool, &k, &v, &out, &starts, &newest,
                          &sinks, &a->sequences, &a->queries, &a->positions, &a->kv_heads, &a->group,
                          &a->dim, &a->window, &a->size, &a->scale, &a->cap, &a->bf16, &threads))
        return NULL;
    if (a->size < 1) return PyErr_SetString(PyExc_ValueError, "a block has positions"), NULL;
    a->q = (const char *)(uintptr_t)q, a->pool = (const char *)(uintptr_t)pool;
    a->k = (const int64_t *)(uintptr_t)k, a->v = (const int64_t *)(uintptr_t)v;
    a->out = (char *)(uintptr_t)out;
    a->starts = (const int64_t *)(uintptr_t)starts, a->newest = (const int64_t *)(uintptr_t)newest;
    a->sinks = (const float *)(uintptr_t)sinks, a->stride = stride;
    const int64_t cost = attention_cost(a);
    if (!parallel || cost < ATTEND_ALONE) threads = 1;
    work.memory = (float *)reserve((size_t)threads * attention_floats(a) * sizeof(float));
    if (!work.memory) return NULL;
    PyThreadState *state = cost < LONG ? NULL : PyEval_SaveThread();
    run(attend_part, &work, threads);
    if (state) PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(norm_doc,
    "norm(x, stride, weight, out, out_stride, rows, heads, width, eps, bf16, threads, /)\n--\n\n"
    "out = x / rms(x) * weight, for each of the heads of a row, and float weights.");

static PyObject *norm(PyObject *Py_UNUSED(module), PyObject *args) {
    Address x, weight, out;
    int threads;
    Norm w = {0};
    if (!PyArg_ParseTuple(args, "KLKKLiiifpi", &x, &w.stride, &weight, &out, &w.out_stride, &w.rows,
                          &w.heads, &w.width, &w.eps, &w.bf16, &threads))
        return NULL;
    w.rows *= w.heads;
    w.x = (const char *)(uintptr_t)x, w.weight = (const float *)(uintptr_t)weight;
    w.out = (char *)(uintptr_t)out;
    run(norm_part, &w, (int64_t)w.rows * w.width < ALONE ? 1 : threads);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(place_doc,
    "place(x, stride, cos, sin, angle_stride, pool, slots, shape, bf16, threads, /)\n--\n\n"
    "Rotates heads of x in place and stores others. shape: (rows, rotated, first, stored, dim).");

static PyObject *place(PyObject *Py_UNUSED(module), PyObject *args) {
    Address x, cos, sin, pool, slots;
    int threads;
    Placing w = {0};
    if (!PyArg_ParseTuple(args, "KLKKLKK(iiiii)pi", &x, &w.stride, &cos, &sin, &w.angle_stride, &pool,
                          &slots, &w.rows, &w.rotated, &w.first, &w.stored, &w.dim, &w.bf16, &threads))
        return NULL;
    w.x = (char *)(uintptr_t)x, w.pool = (char *)(uintptr_t)pool;
    w.cos = (const char *)(uintptr_t)cos, w.sin = (const char *)(uintptr_t)sin;
    w.slots = (const int64_t *)(uintptr_t)slots;
    const int64_t values = (int64_t)w.rows * (w.rotated + w.stored) * w.dim;
    run(place_part, &w, values < ALONE ? 1 : threads);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(exclude_doc,
    "exclude(logits, stride, vocab, masks, words, index, rows, /)\n--\n\n"
    "Adds minus infinity to the float logits whose bit is not set.");

static PyObject *exclude(PyObject *Py_UNUSED(module), PyObject *args) {
    Address logits, masks, index;
    Exclusion w = {0};
    if (!PyArg_ParseTuple(args, "KLiKiKi", &logits, &w.stride, &w.vocab, &masks, &w.words, &index, &w.rows))
        return NULL;
    w.logits = (char *)(uintptr_t)logits, w.masks = (const uint32_t *)(uintptr_t)masks;
    w.index = (const int64_t *)(uintptr_t)index;
    for (int32_t row = 0; row < w.rows; row++) level->exclude(&w, row);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(greatest_doc,
    "greatest(logits, stride, vocab, ids, rows, /)\n--\n\n"
    "ids: of each row's greatest float, the first; -1 where one is not a number, or the greatest infinite.");

static PyObject *greatest(PyObject *Py_UNUSED(module), PyObject *args) {
    Address logits, ids;
    Greatest w = {0};
    if (!PyArg_ParseTuple(args, "KLiKi", &logits, &w.stride, &w.vocab, &ids, &w.rows)) return NULL;
    w.logits = (const float *)(uintptr_t)logits, w.ids = (int64_t *)(uintptr_t)ids;
    for (int32_t row = 0; row < w.rows; row++) level->greatest(&w, row);
    Py_RETURN_NONE;
}

#include "adapters.h"
#include "codes_interface.h"
#include "experts.h"
#include "peers.h"
#include "layers.h"

PyDoc_STRVAR(instructions_doc, "instructions(name=None, /) -> str\n--\n\n"
                               "Which instructions are used; `name` chooses them.");

static PyObject *instructions(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *name = NULL;
    if (!PyArg_ParseTuple(args, "|z", &name)) return NULL;
    if (name && choose(name))
        return PyErr_Format(PyExc_ValueError, "this processor has no %s", name), NULL;
    return PyUnicode_FromString(level->name);
}

static PyMethodDef methods[] = {{"product", product, METH_VARARGS, product_doc},
                                {"add_ranks", add_ranks_of, METH_VARARGS, add_ranks_doc},
                                {"activate", activate, METH_VARARGS, activate_doc},
                                {"attend", attend, METH_VARARGS, attend_doc},
                                {"norm", norm, METH_VARARGS, norm_doc},
                                {"place", place, METH_VARARGS, place_doc},
                                {"exclude", exclude, METH_VARARGS, exclude_doc},
                                {"route", route, METH_VARARGS, route_doc},
                                {"mix", mix, METH_VARARGS, mix_doc},
                                {"adapted", adapted, METH_VARARGS, adapted_doc},
                                {"layers", layers, METH_VARARGS, layers_doc},
                                {"greatest", greatest, METH_VARARGS, greatest_doc},
                                {"store_kv", store_kv, METH_VARARGS, store_kv_doc},
                                {"gather_kv", gather_kv, METH_VARARGS, gather_kv_doc},
                                {"sum_ranks", sum_ranks, METH_VARARGS, sum_ranks_doc},
                                {"meet_ranks", meet_ranks, METH_VARARGS, meet_ranks_doc},
                                {"post", post, METH_VARARGS, post_doc},
                                {"await_post", await_post, METH_VARARGS, await_post_doc},
                                {"instructions", instructions, METH_VARARGS, instructions_doc},
                                {0}};
// What `linear.py` expects of this module; both change together, so that an older build is not used.
#define INTERFACE 10

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_kernel", .m_size = -1,
                                    .m_methods = methods};

PyMODINIT_FUNC PyInit__kernel(void) {
    find_threads();
#if X86
    __builtin_cpu_init();
#endif
    choose(NULL);
    PyObject *made = PyModule_Create(&module), *matrix = made ? PyType_FromSpec(&matrix_spec) : NULL;
    if (!matrix || PyModule_AddObjectRef(made, "Matrix", matrix) || PyModule_AddIntMacro(made, INTERFACE))
        Py_CLEAR(made);
    Py_XDECREF(matrix);
    return made;
}

#endif
