/* All layers of a model in one call, for rows that decode: the functions of `kernel.c` one after the other,
 * whose work on few rows takes less time than calling them. */
#ifndef LAYERS_H
#define LAYERS_H

/* Addresses of a layer: norms (0: it has none of queries or keys), the tables of its sites, its part of the
 * pool, and the table of its mixture of experts, which then stands for the last two sites. */
enum { INPUT_NORM, QKV, Q_NORM, K_NORM, O, MLP_NORM, GATE_UP, DOWN, POOL, MIXTURE, ADDRESSES };

/* Of a site, a row for each of the matrices whose outputs follow each other: packed floats or a `Coded`, its bias,
 * the same of a gate (0: none), how many outputs it has, and whether it is of codes. */
enum { WEIGHTS, WEIGHTS_BIAS, ITS_GATE, ITS_GATE_BIAS, OUTPUTS, IS_CODED, MATRIX_FIELDS };

typedef struct {
    const int64_t *table; /* [layers, ADDRESSES] */
    char *x;              /* [rows, hidden], changed */
    Placing place;        /* but for `x` and the pool */
    Attention attention;  /* but for what follows from a tile and a layer */
    PyObject *tiles;      /* of (first row, rows, sequences, queries, positions, keys, values, starts, newest) */
    Adapters adapters;
    char *widened;        /* memory for the widest rows as floats, where products need these */
    char *coded;          /* and as codes */
    char *mixing;         /* memory for mixtures of experts */
    Peers *peers;         /* the ranks that compute parts of each layer; NULL: there are no others */
    int32_t layers, rows, hidden, inner;
    int bf16, kind, threads;
    float eps;
} Layers;

enum { OF_QKV, OF_O, OF_GATE_UP, OF_DOWN }; /* sites */

typedef struct {
    const int64_t *matrices;        /* [matrices, MATRIX_FIELDS]; NULL: there is nothing but adapters */
    int32_t width, outputs, stride; /* stride: of the outputs' rows; 0: they are contiguous */
    int64_t layer;
    int site;
    int32_t ends[2]; /* outputs before the second and third part; 0: there is one part */
} Site;

/* With what the adapters of the rows add. */
static void multiply_rows(const Layers *l, Site s, const char *x, char *out, const char *other) {
    const int32_t stride = s.stride ? s.stride : s.outputs, size = l->bf16 ? 2 : 4;
    Work floats = {.x = x, .x_stride = s.width, .rows = l->rows, .width = s.width, .bf16 = l->bf16};
    int32_t count = 0;
    Codes codes = {0};
    int64_t fields[MATRIX_FIELDS] = {[OUTPUTS] = s.outputs};
    for (int32_t first = 0; first < s.outputs; first += (int32_t)fields[OUTPUTS]) {
        if (s.matrices) memcpy(fields, s.matrices, sizeof(fields)), s.matrices += MATRIX_FIELDS;
        const int32_t outputs = (int32_t)fields[OUTPUTS], tiles = (outputs + LANES - 1) / LANES;
#define FIELD(name) ((const void *)(uintptr_t)fields[name])
        Group group = {FIELD(WEIGHTS), FIELD(ITS_GATE), FIELD(WEIGHTS_BIAS), FIELD(ITS_GATE_BIAS), 0, l->rows,
                       fields[ITS_GATE] ? tiles : (tiles + 1) / 2};
#undef FIELD
        Work w = floats;
        w.groups = &group, w.count = 1, w.units = group.units, w.outputs = outputs, w.kind = l->kind;
        w.out = out + (int64_t)first * size, w.other = other ? other + (int64_t)first * size : NULL;
        w.out_stride = w.other_stride = stride, w.coded = (int)fields[IS_CODED];
        if (w.coded) {
            const Coded *m = (const Coded *)group.weights;
            w.codes = codes, w.filled = s.width;
            if (codes.step != m->step || codes.zero != m->zero) make_ready(&w, l->coded, l->threads);
            codes = w.codes;
        }
        if (!floats.ready && (!w.coded || l->adapters.count)) {
            make_ready(&floats, l->widened, l->threads);
            if (l->adapters.count) count = shrink(&l->adapters, s.layer, s.site, &floats);
        }
        if (!w.coded) w.ready = floats.ready, w.ready_stride = floats.ready_stride, w.filled = floats.filled;
        w.adapted = l->adapters.found, w.adapters = count, w.before = first;
        w.ends[0] = s.ends[0] ? s.ends[0] : s.outputs, w.ends[1] = s.ends[0] ? s.ends[1] : s.outputs;
        multiply(&w, l->threads);
    }
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
              .out_stride = l->hidden, .rows = l->rows, .width = l->hidden, .heads = 1, .eps = l->eps,
              .bf16 = l->bf16};
    run(norm_part, &w, (int64_t)w.rows * w.width < ALONE ? 1 : l->threads);
}

/* In place, each of the heads that begin at `x` in every row. */
static void norm_heads(const Layers *l, int64_t weight, char *x, int32_t heads) {
    Norm w = {.x = x, .weight = (const float *)(uintptr_t)weight, .out = x, .stride = l->attention.stride,
              .out_stride = l->attention.stride, .rows = l->rows * heads, .width = l->attention.dim, .heads = heads,
              .eps = l->eps, .bf16 = l->bf16};
    if (weight) run(norm_part, &w, (int64_t)w.rows * w.width < ALONE ? 1 : l->threads);
}

static void attend_rows(const Layers *l, const Attention *tiles, int count, float *memory) {
    for (int n = 0; n < count; n++) {
        Attending w = {.attention = tiles[n], .memory = memory};
        run(attend_part, &w, attention_cost(&tiles[n]) < ATTEND_ALONE ? 1 : l->threads);
    }
}

/* What a team fetches while it waits: the weights of a site's first matrix. */
static void announce(const Layers *l, const int64_t *matrix, int64_t width) {
    if (!team || !matrix) return;
    Ahead a = {.units = (matrix[OUTPUTS] + LANES - 1) / LANES};
    int64_t tiles = 1; /* of a unit */
    if (!matrix[ITS_GATE]) tiles = 2, a.units = (a.units + 1) / 2;
    for (int n = WEIGHTS; n <= ITS_GATE; n += ITS_GATE - WEIGHTS) {
        const void *weights = (const void *)(uintptr_t)matrix[n];
        if (!weights) continue;
        if (!matrix[IS_CODED]) {
            a.at[a.streams] = weights, a.bytes[a.streams++] = tiles * width * LANES * (l->bf16 ? 2 : 4);
            continue;
        }
        const Coded *m = weights;
        const Weights from = weights_of(m, 0);
        const int64_t scales = tiles * m->scale_count * LANES * 2;
        a.at[a.streams] = (const char *)from.codes, a.bytes[a.streams++] = tiles * m->groups * m->bits * 64;
        a.at[a.streams] = (const char *)from.scales, a.bytes[a.streams++] = scales;
        if (from.minima) a.at[a.streams] = (const char *)from.minima, a.bytes[a.streams++] = scales;
    }
    team->ahead = a;
}

/* What is added to a product that all ranks have a part of: x, by the first rank alone. */
static const char *stream_of(const Layers *l) { return l->peers && l->peers->rank ? NULL : l->x; }

/* x becomes the sum over all ranks. Whether that failed. */
static int sum_stream(const Layers *l) {
    return l->peers && sum_peers(l->peers, l->x, (int64_t)l->rows * l->hidden, l->bf16);
}

typedef struct {
    const Layers *layers;
    Attention *tiles;
    const int64_t *first; /* row of each tile */
    int count;
    char *memory; /* rows of each width that follows, then what attention needs */
} Pass;

static void all_layers(void *given) {
    const Pass *pass = given;
    const Layers *l = pass->layers;
    Attention *tiles = pass->tiles;
    const int64_t *first = pass->first;
    const int count = pass->count;
    char *memory = pass->memory;
    const int size = l->bf16 ? 2 : 4;
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
        announce(l, AT(O), q_width);
        multiply_rows(l, (Site){AT(QKV), l->hidden, q_width + 2 * kv_width, 0, n, OF_QKV, {q_width, q_width + kv_width}},
                      normed, qkv, NULL);
        norm_heads(l, at[Q_NORM], qkv, a->kv_heads * a->group);
        norm_heads(l, at[K_NORM], qkv + row * q_width, a->kv_heads);
        Placing place = l->place;
        place.x = qkv, place.pool = (char *)(uintptr_t)at[POOL];
        run(place_part, &place, (int64_t)l->rows * (q_width + 3 * kv_width) < ALONE ? 1 : l->threads);
        for (int t = 0; t < count; t++) {
            tiles[t].q = qkv + first[t] * row * (q_width + 2 * kv_width);
            tiles[t].out = attended + first[t] * row * q_width;
            tiles[t].pool = AT(POOL);
        }
        attend_rows(l, tiles, count, rest);
        announce(l, at[MIXTURE] ? NULL : AT(GATE_UP), l->hidden);
        multiply_rows(l, (Site){AT(O), q_width, l->hidden, 0, n, OF_O, {0}}, attended, l->x, stream_of(l));
        if (sum_stream(l)) return;
        norm_rows(l, at[MLP_NORM], normed);
        if (at[MIXTURE]) {
            const Mixture mixture = mixture_at(AT(MIXTURE));
            mix_rows(&mixture, normed, stream_of(l), l->x, l->rows, l->bf16, l->kind, l->threads, l->mixing);
            if (sum_stream(l)) return;
            continue;
        }
        announce(l, AT(DOWN), l->inner);
        multiply_rows(l, (Site){AT(GATE_UP), l->hidden, l->inner, 0, n, OF_GATE_UP, {0}}, normed, inner, NULL);
        if (n + 1 < l->layers) announce(l, (const int64_t *)(uintptr_t)at[ADDRESSES + QKV], l->hidden);
        multiply_rows(l, (Site){AT(DOWN), l->inner, l->hidden, 0, n, OF_DOWN, {0}}, inner, l->x, stream_of(l));
        if (sum_stream(l)) return;
#undef AT
    }
}

PyDoc_STRVAR(layers_doc,
    "layers(table, layers, x, angles, slots, tiles, adapters, shape, eps, scale, cap, bf16, threads, peers=0, /)\n"
    "--\n\n"
    "x after all layers, in place. angles: (cosines, sines, stride). shape: (rows, hidden, inner, kv heads, "
    "group, dim, window, block size, activation). peers: the address of a `Peers`, whose ranks compute parts; its "
    "`failed` says whether one did not come.");

static PyObject *layers(PyObject *Py_UNUSED(module), PyObject *args) {
    Address table, x, cos, sin, slots, peers = 0;
    Layers l = {0};
    Attention *a = &l.attention;
    Placing *p = &l.place;
    PyObject *adapters;
    if (!PyArg_ParseTuple(args, "KiK(KKL)KO!O!(iiiiiiiii)fffpi|K", &table, &l.layers, &x, &cos, &sin,
                          &p->angle_stride, &slots, &PyList_Type, &l.tiles, &PyList_Type, &adapters, &l.rows, &l.hidden, &l.inner,
                          &a->kv_heads, &a->group, &a->dim, &a->window, &a->size, &l.kind, &l.eps,
                          &a->scale, &a->cap, &l.bf16, &l.threads, &peers))
        return NULL;
    l.peers = (Peers *)(uintptr_t)peers;
    const int32_t q_width = a->kv_heads * a->group * a->dim, kv_width = a->kv_heads * a->dim;
    if (l.hidden % STEP || l.inner % STEP || q_width % STEP || (l.bf16 && !level->pairs) || a->size < 1)
        return PyErr_SetString(PyExc_ValueError, "widths are multiples of 32, and bfloat16 is multiplied"), NULL;
    l.table = (const int64_t *)(uintptr_t)table, l.x = (char *)(uintptr_t)x;
    p->cos = (const char *)(uintptr_t)cos, p->sin = (const char *)(uintptr_t)sin;
    p->slots = (const int64_t *)(uintptr_t)slots, p->stride = q_width + 2 * kv_width;
    p->rows = l.rows, p->rotated = a->kv_heads * (a->group + 1), p->first = a->kv_heads * a->group;
    p->stored = 2 * a->kv_heads, p->dim = a->dim, p->bf16 = l.bf16;
    a->stride = p->stride, a->bf16 = l.bf16;
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
    l.adapters.bf16 = l.bf16, l.adapters.threads = l.threads, l.adapters.only = -1;
    const size_t wide = (size_t)(l.hidden + 2 * q_width + 2 * kv_width + l.inner);
    const size_t shrunk = ((size_t)l.rows * l.adapters.widest * 4 + 63) & ~(size_t)63;
    const int32_t widest = largest(l.hidden, q_width, l.inner);
    const size_t widened = (size_t)l.rows * widest * 4, coded = (codes_bytes(l.rows, widest) + 63) & ~(size_t)63;
    const size_t mixing = most_of_mixtures(&l);
    char *memory = reserve(shrunk + coded + widened + mixing + l.rows * wide * 4 + 64
                           + (size_t)l.threads * attention_floats(a) * sizeof(float));
    if (!memory) return PyMem_Free(l.adapters.all), NULL;
    l.adapters.inner = memory, l.coded = memory + shrunk, l.widened = l.coded + coded, l.mixing = l.widened + widened;
    Pass pass = {&l, tiles, first, count, l.mixing + mixing};
    Py_BEGIN_ALLOW_THREADS
    with_team(all_layers, &pass, l.threads);
    Py_END_ALLOW_THREADS
    PyMem_Free(l.adapters.all);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(adapted_doc,
    "adapted(adapters, layer, site, part, matrices, ends, x, out, other, shape, bf16, threads, /)\n--\n\n"
    "A site's products with what the adapters of the rows add, as `layers` computes them. matrices: the site's "
    "table, or 0. part: -1, or the only one whose outputs these are. shape: (rows, width, outputs, stride of "
    "their rows, activation).");

static PyObject *adapted(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *adapters;
    Address matrices, x, out, other;
    int part;
    Layers l = {0};
    Site s = {0};
    if (!PyArg_ParseTuple(args, "O!LiiK(ii)KKK(iiiii)pi", &PyList_Type, &adapters, &s.layer, &s.site, &part,
                          &matrices, &s.ends[0], &s.ends[1], &x, &out, &other, &l.rows, &s.width, &s.outputs,
                          &s.stride, &l.kind, &l.bf16, &l.threads))
        return NULL;
    if (s.width % STEP || s.outputs % LANES || (l.bf16 && !level->pairs))
        return PyErr_SetString(PyExc_ValueError, "widths are multiples of 32, and bfloat16 is multiplied"), NULL;
    s.matrices = (const int64_t *)(uintptr_t)matrices;
    if (reads_adapters(adapters, &l.adapters)) return NULL;
    l.adapters.bf16 = l.bf16, l.adapters.threads = l.threads, l.adapters.only = part;
    const size_t coded = (codes_bytes(l.rows, s.width) + 63) & ~(size_t)63;
    l.coded = reserve(coded + (size_t)l.rows * (s.width + l.adapters.widest) * 4);
    if (!l.coded) return PyMem_Free(l.adapters.all), NULL;
    l.widened = l.coded + coded, l.adapters.inner = l.widened + (size_t)l.rows * s.width * 4;
    PyThreadState *state = (int64_t)l.rows * s.outputs * s.width < LONG ? NULL : PyEval_SaveThread();
    multiply_rows(&l, s, (const char *)(uintptr_t)x, (char *)(uintptr_t)out, (const char *)(uintptr_t)other);
    if (state) PyEval_RestoreThread(state);
    PyMem_Free(l.adapters.all);
    Py_RETURN_NONE;
}

#endif
