/* All layers of a model in one call, for rows that decode: the functions of `kernel.c` one after the other,
 * whose work on few rows takes less time than calling them. */
#ifndef LAYERS_H
#define LAYERS_H

/* Addresses of a layer: packed matrices with their biases (0: none), norms, its part
 * of the pool, and the table of its mixture of experts, which then stands for the last three matrices. */
enum {
    INPUT_NORM, QKV, QKV_BIAS, O, O_BIAS, MLP_NORM, UP, UP_BIAS, GATE, GATE_BIAS, DOWN, DOWN_BIAS, POOL, MIXTURE, ADDRESSES
};

typedef struct {
    const int64_t *table; /* [layers, ADDRESSES] */
    char *x;              /* [rows, hidden], changed */
    Placing place;        /* but for `x` and the pool */
    Attention attention;  /* but for what follows from a tile and a layer */
    PyObject *tiles;      /* of (first row, rows, sequences, queries, positions, keys, values, starts, newest) */
    Adapters adapters;
    char *widened;        /* memory for the widest rows as floats, where products need these */
    char *mixing;         /* memory for mixtures of experts */
    int32_t layers, rows, hidden, inner;
    int brain, kind, threads;
    float eps;
} Layers;

enum { OF_QKV, OF_O, OF_GATE_UP, OF_DOWN }; /* sites */

typedef struct {
    const char *weights, *gate;
    const float *bias, *gate_bias;
    int32_t width, outputs, stride; /* stride: of the outputs' rows; 0: they are contiguous */
    int64_t layer;
    int site;
    int32_t ends[2]; /* outputs before the second and third part; 0: there is one part */
} Matrix;

/* With what the adapters of the rows add. */
static void multiply_rows(const Layers *l, Matrix m, const char *x, char *out, const char *other) {
    const int32_t tiles = (m.outputs + LANES - 1) / LANES, stride = m.stride ? m.stride : m.outputs;
    Group group = {.weights = m.weights, .gate = m.gate, .bias = m.bias, .gate_bias = m.gate_bias,
                   .rows = l->rows, .units = m.gate ? tiles : (tiles + 1) / 2};
    Work w = {.groups = &group, .count = 1, .x = x, .out = out, .other = other, .x_stride = m.width,
              .out_stride = stride, .other_stride = stride, .units = group.units, .rows = l->rows,
              .width = m.width, .outputs = m.outputs, .brain = l->brain, .kind = l->kind,
              .adapted = l->adapters.found, .ends = {m.outputs, m.outputs}};
    if (m.ends[0]) w.ends[0] = m.ends[0], w.ends[1] = m.ends[1];
    make_ready(&w, l->widened, l->threads);
    if (l->adapters.count) w.adapters = shrink(&l->adapters, m.layer, m.site, &w);
    multiply(&w, l->threads);
}

/* Memory for the mixture that needs most. */
static size_t most_of_mixtures(const Layers *l) {
    size_t most = 0;
    for (int32_t n = 0; n < l->layers; n++) {
        const int64_t table = l->table[(int64_t)n * ADDRESSES + MIXTURE];
        if (!table) continue;
        MixtureMemory at;
        const Mixture mixture = mixture_at((const int64_t *)(uintptr_t)table);
        const size_t needed = mixture_memory(&mixture, l->rows, &at, NULL);
        if (needed > most) most = needed;
    }
    return most;
}

static int32_t largest(int32_t a, int32_t b, int32_t c) {
    const int32_t most = a > b ? a : b;
    return most > c ? most : c;
}

static void norm_rows(const Layers *l, int64_t weight, char *out) {
    Norm w = {.x = l->x, .weight = (const float *)(uintptr_t)weight, .out = out, .stride = l->hidden,
              .out_stride = l->hidden, .rows = l->rows, .width = l->hidden, .eps = l->eps, .brain = l->brain};
    run(norm_part, &w, (int64_t)w.rows * w.width < ALONE ? 1 : l->threads);
}

static void attend_rows(const Layers *l, const Attention *tiles, int count, float *memory) {
    for (int n = 0; n < count; n++) {
        Attending w = {.attention = tiles[n], .memory = memory};
        run(attend_part, &w, attention_cost(&tiles[n]) < ATTEND_ALONE ? 1 : l->threads);
    }
}

/* memory: rows of each width that follows, then what attention needs. */
static void all_layers(const Layers *l, Attention *tiles, const int64_t *first, int count, char *memory) {
    const int size = l->brain ? 2 : 4;
    const Attention *a = &l->attention;
    const int32_t q_width = a->kv_heads * a->group * a->dim, kv_width = a->kv_heads * a->dim;
    const int64_t row = size, rows = l->rows * row;
    char *normed = memory, *qkv = normed + rows * l->hidden;
    char *attended = qkv + rows * (q_width + 2 * kv_width), *inner = attended + rows * q_width;
    float *rest = (float *)(((uintptr_t)(inner + rows * l->inner) + 63) & ~(uintptr_t)63);
    for (int32_t n = 0; n < l->layers; n++) {
        const int64_t *at = l->table + (int64_t)n * ADDRESSES;
#define AT(name) ((const void *)(uintptr_t)at[name])
        norm_rows(l, at[INPUT_NORM], normed);
        multiply_rows(l, (Matrix){AT(QKV), NULL, AT(QKV_BIAS), NULL, l->hidden, q_width + 2 * kv_width, 0, n, OF_QKV,
                                 {q_width, q_width + kv_width}}, normed, qkv, NULL);
        Placing place = l->place;
        place.x = qkv, place.pool = (char *)(uintptr_t)at[POOL];
        run(place_part, &place, (int64_t)l->rows * (q_width + 3 * kv_width) < ALONE ? 1 : l->threads);
        for (int t = 0; t < count; t++) {
            tiles[t].q = qkv + first[t] * row * (q_width + 2 * kv_width);
            tiles[t].out = attended + first[t] * row * q_width;
            tiles[t].pool = AT(POOL);
        }
        attend_rows(l, tiles, count, rest);
        multiply_rows(l, (Matrix){AT(O), NULL, AT(O_BIAS), NULL, q_width, l->hidden, 0, n, OF_O, {0}}, attended, l->x,
                      l->x);
        norm_rows(l, at[MLP_NORM], normed);
        if (at[MIXTURE]) {
            const Mixture mixture = mixture_at(AT(MIXTURE));
            mix_rows(&mixture, normed, l->x, l->x, l->rows, l->brain, l->kind, l->threads, l->mixing);
            continue;
        }
        multiply_rows(l, (Matrix){AT(UP), AT(GATE), AT(UP_BIAS), AT(GATE_BIAS), l->hidden, l->inner, 0, n, OF_GATE_UP,
                                 {0}}, normed, inner, NULL);
        multiply_rows(l, (Matrix){AT(DOWN), NULL, AT(DOWN_BIAS), NULL, l->inner, l->hidden, 0, n, OF_DOWN, {0}}, inner,
                      l->x, l->x);
#undef AT
    }
}

PyDoc_STRVAR(layers_doc,
    "layers(table, layers, x, angles, slots, tiles, adapters, shape, eps, scale, cap, brain, threads, /)\n--\n\n"
    "x after all layers, in place. angles: (cosines, sines, stride). shape: (rows, hidden, inner, kv heads, "
    "group, dim, window, block size, activation).");

static PyObject *layers(PyObject *Py_UNUSED(module), PyObject *args) {
    Address table, x, cos, sin, slots;
    Layers l = {0};
    Attention *a = &l.attention;
    Placing *p = &l.place;
    PyObject *adapters;
    if (!PyArg_ParseTuple(args, "KiK(KKL)KO!O!(iiiiiiiii)fffpi", &table, &l.layers, &x, &cos, &sin,
                          &p->angle_stride, &slots, &PyList_Type, &l.tiles, &PyList_Type, &adapters, &l.rows, &l.hidden, &l.inner,
                          &a->kv_heads, &a->group, &a->dim, &a->window, &a->size, &l.kind, &l.eps,
                          &a->scale, &a->cap, &l.brain, &l.threads))
        return NULL;
    const int32_t q_width = a->kv_heads * a->group * a->dim, kv_width = a->kv_heads * a->dim;
    if (l.hidden % STEP || l.inner % STEP || q_width % STEP || (l.brain && !level->pairs) || a->size < 1)
        return PyErr_SetString(PyExc_ValueError, "widths are multiples of 32, and bfloat16 is multiplied"), NULL;
    l.table = (const int64_t *)(uintptr_t)table, l.x = (char *)(uintptr_t)x;
    p->cos = (const char *)(uintptr_t)cos, p->sin = (const char *)(uintptr_t)sin;
    p->slots = (const int64_t *)(uintptr_t)slots, p->stride = q_width + 2 * kv_width;
    p->rows = l.rows, p->rotated = a->kv_heads * (a->group + 1), p->first = a->kv_heads * a->group;
    p->stored = 2 * a->kv_heads, p->dim = a->dim, p->brain = l.brain;
    a->stride = p->stride, a->brain = l.brain;
    const int count = (int)PyList_GET_SIZE(l.tiles);
    Attention tiles[count + 1];
    int64_t first[count + 1];
    for (int n = 0; n < count; n++) {
        Address rows, k, v, starts, newest;
        long long begin;
        tiles[n] = *a;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(l.tiles, n), "LKiiiKKKK", &begin, &rows, &tiles[n].sequences,
                              &tiles[n].queries, &tiles[n].positions, &k, &v, &starts, &newest))
            return NULL;
        first[n] = begin, tiles[n].rows = (const int64_t *)(uintptr_t)rows;
        tiles[n].k = (const int64_t *)(uintptr_t)k, tiles[n].v = (const int64_t *)(uintptr_t)v;
        tiles[n].starts = (const int64_t *)(uintptr_t)starts;
        tiles[n].newest = (const int64_t *)(uintptr_t)newest;
    }
    if (!parallel) l.threads = 1;
    if (reads_adapters(adapters, &l.adapters)) return NULL;
    l.adapters.brain = l.brain, l.adapters.threads = l.threads, l.adapters.only = -1;
    const size_t wide = (size_t)(l.hidden + 2 * q_width + 2 * kv_width + l.inner);
    const size_t shrunk = ((size_t)l.rows * l.adapters.widest * 4 + 63) & ~(size_t)63;
    const size_t widened = (size_t)l.rows * largest(l.hidden, q_width, l.inner) * 4;
    const size_t mixing = most_of_mixtures(&l);
    char *memory = reserve(shrunk + widened + mixing + l.rows * wide * 4 + 64
                           + (size_t)l.threads * attention_floats(a) * sizeof(float));
    if (!memory) return PyMem_Free(l.adapters.all), NULL;
    l.adapters.inner = memory, l.widened = memory + shrunk, l.mixing = memory + shrunk + widened;
    Py_BEGIN_ALLOW_THREADS
    all_layers(&l, tiles, first, count, memory + shrunk + widened + mixing);
    Py_END_ALLOW_THREADS
    PyMem_Free(l.adapters.all);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(adapted_doc,
    "adapted(adapters, layer, site, part, matrix, ends, x, out, other, shape, brain, threads, /)\n--\n\n"
    "A site's product with what the adapters of the rows add, as `layers` computes it. matrix: (weights, bias, "
    "gate, gate bias). part: -1, or the only one whose outputs these are. shape: "
    "(rows, width, outputs, stride of their rows, activation).");

static PyObject *adapted(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *adapters;
    Address weights, bias, gate, gate_bias, x, out, other;
    int part;
    Layers l = {0};
    Matrix m = {0};
    if (!PyArg_ParseTuple(args, "O!Lii(KKKK)(ii)KKK(iiiii)pi", &PyList_Type, &adapters, &m.layer, &m.site, &part,
                          &weights, &bias, &gate, &gate_bias, &m.ends[0], &m.ends[1], &x, &out, &other, &l.rows,
                          &m.width, &m.outputs, &m.stride, &l.kind, &l.brain, &l.threads))
        return NULL;
    if (m.width % STEP || m.outputs % LANES || (l.brain && !level->pairs))
        return PyErr_SetString(PyExc_ValueError, "widths are multiples of 32, and bfloat16 is multiplied"), NULL;
    m.weights = (const char *)(uintptr_t)weights, m.gate = (const char *)(uintptr_t)gate;
    m.bias = (const float *)(uintptr_t)bias, m.gate_bias = (const float *)(uintptr_t)gate_bias;
    if (reads_adapters(adapters, &l.adapters)) return NULL;
    l.adapters.brain = l.brain, l.adapters.threads = l.threads, l.adapters.only = part;
    l.widened = reserve((size_t)l.rows * (m.width + l.adapters.widest) * 4);
    if (!l.widened) return PyMem_Free(l.adapters.all), NULL;
    l.adapters.inner = l.widened + (size_t)l.rows * m.width * 4;
    PyThreadState *state = (int64_t)l.rows * m.outputs * m.width < LONG ? NULL : PyEval_SaveThread();
    multiply_rows(&l, m, (const char *)(uintptr_t)x, (char *)(uintptr_t)out, (const char *)(uintptr_t)other);
    if (state) PyEval_RestoreThread(state);
    PyMem_Free(l.adapters.all);
    Py_RETURN_NONE;
}

#endif
