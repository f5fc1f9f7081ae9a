/* A mixture of experts for some rows: `mixture.h` says which experts, and `kernel.c` computes their products. */
#ifndef EXPERTS_H
#define EXPERTS_H

enum { EACH_UP, EACH_UP_BIAS, EACH_GATE, EACH_GATE_BIAS, EACH_DOWN, EACH_DOWN_BIAS, EXPERT_ADDRESSES };

typedef struct {
    char *rows;    /* what products read: [rows * active, filled] */
    char *inner;   /* [rows * active, inner] */
    char *found;   /* [rows * active, hidden] */
    double *scores;
    float *shares;
    int64_t *chosen;
    int32_t *places, *sources; /* of each row's experts among the grouped rows, and the row of each of these */
    Group *groups;             /* those of the first products, then those of the second */
} MixtureMemory;

/* Divides memory, and returns how much there has to be. */
static size_t mixture_memory(const Mixture *m, int64_t rows, MixtureMemory *at, char *memory) {
    const int64_t each = rows * m->active, wider = m->hidden > m->inner ? m->hidden : m->inner;
    size_t used = 0;
#define TAKE(field, bytes) at->field = (void *)(memory + used), used += ((size_t)(bytes) + 63) & ~(size_t)63
    TAKE(rows, m->coded ? codes_bytes(each, wider + STEP) : (size_t)each * (wider + STEP) * 4);
    TAKE(inner, each * m->inner * 4);
    TAKE(found, each * m->hidden * 4);
    TAKE(scores, rows * (m->hidden + m->experts) * 8);
    TAKE(shares, each * 4);
    TAKE(chosen, each * 8);
    TAKE(places, each * 4);
    TAKE(sources, each * 4);
    TAKE(groups, 2 * m->experts * sizeof(Group));
#undef TAKE
    return used;
}

static void route_rows(const Mixture *m, const char *x, int32_t rows, const MixtureMemory *at, int bf16, int threads) {
    Routing w = {*m, x, at->scores, at->shares, at->chosen, rows, bf16};
    run(route_part, &w, (int64_t)rows * m->hidden * m->experts < ALONE ? 1 : threads);
}

/* Places rows by expert, each expert's in their order; returns how many experts have any. */
static int32_t group_rows(const Mixture *m, int32_t rows, const MixtureMemory *at, const Work *up, const Work *down) {
    const int32_t all = rows * m->active;
    int32_t next[m->experts], first = 0, used = 0;
    int64_t up_units = 0, down_units = 0;
    const int32_t up_tiles = (up->outputs + LANES - 1) / LANES, down_tiles = (down->outputs + LANES - 1) / LANES;
    memset(next, 0, sizeof(next));
    for (int32_t n = 0; n < all; n++) next[at->chosen[n]]++;
    for (int32_t e = 0; e < m->experts; e++) {
        const int32_t count = next[e];
        next[e] = first, m->counts[e] += count;
        if (!count) continue;
        const int64_t *each = m->matrices + (int64_t)e * EXPERT_ADDRESSES;
#define ADDRESS(name) ((const void *)(uintptr_t)each[name])
        up_units += up_tiles, down_units += (down_tiles + 1) / 2;
        at->groups[used] = (Group){ADDRESS(EACH_UP), ADDRESS(EACH_GATE), ADDRESS(EACH_UP_BIAS),
                                   ADDRESS(EACH_GATE_BIAS), first, count, up_units};
        at->groups[m->experts + used++] = (Group){ADDRESS(EACH_DOWN), NULL, ADDRESS(EACH_DOWN_BIAS), NULL, first,
                                                  count, down_units};
#undef ADDRESS
        first += count;
    }
    for (int32_t n = 0; n < all; n++) {
        const int32_t place = next[at->chosen[n]]++;
        at->places[n] = place, at->sources[place] = n / m->active;
    }
    return used;
}

/* out: may be `other`, which is added. */
static void mix_rows(const Mixture *m, const char *x, const char *other, char *out, int32_t rows, int bf16, int kind,
                     int threads, char *memory) {
    MixtureMemory at;
    mixture_memory(m, rows, &at, memory);
    route_rows(m, x, rows, &at, bf16, threads);
    Work up = {.groups = at.groups, .x = x, .sources = at.sources, .out = at.inner, .x_stride = m->hidden,
               .out_stride = m->inner, .rows = rows * m->active, .width = m->hidden, .outputs = m->inner,
               .bf16 = bf16, .coded = m->coded, .kind = kind};
    Work down = {.groups = at.groups + m->experts, .x = at.inner, .out = at.found, .x_stride = m->inner,
                 .out_stride = m->hidden, .rows = up.rows, .width = m->inner, .outputs = m->hidden, .bf16 = bf16,
                 .coded = m->coded};
    up.count = down.count = group_rows(m, rows, &at, &up, &down);
    if (!up.count) return;
    up.units = up.groups[up.count - 1].units, down.units = down.groups[down.count - 1].units;
    make_ready(&up, at.rows, threads), multiply(&up, threads);
    make_ready(&down, at.rows, threads), multiply(&down, threads);
    Combining sum = {at.found, other, out, at.shares, at.places, rows, m->hidden, m->active, bf16};
    run(combine_part, &sum, (int64_t)up.rows * m->hidden < ALONE ? 1 : threads);
}

PyDoc_STRVAR(route_doc, "route(table, x, shares, chosen, rows, bf16, threads, /)\n--\n\n"
                        "Each row's experts, the likeliest first, and their shares as floats.");

static PyObject *route(PyObject *Py_UNUSED(module), PyObject *args) {
    Address table, x, shares, chosen;
    int rows, bf16, threads;
    if (!PyArg_ParseTuple(args, "KKKKipi", &table, &x, &shares, &chosen, &rows, &bf16, &threads)) return NULL;
    const Mixture m = mixture_at((const int64_t *)(uintptr_t)table);
    MixtureMemory at = {.shares = (float *)(uintptr_t)shares, .chosen = (int64_t *)(uintptr_t)chosen};
    at.scores = (double *)reserve((size_t)rows * (m.hidden + m.experts) * 8);
    if (!at.scores) return NULL;
    Py_BEGIN_ALLOW_THREADS
    route_rows(&m, (const char *)(uintptr_t)x, rows, &at, bf16, parallel ? threads : 1);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(mix_doc, "mix(table, x, out, rows, bf16, kind, threads, /)\n--\n\n"
                      "The mixture of a layer for contiguous rows.");

static PyObject *mix(PyObject *Py_UNUSED(module), PyObject *args) {
    Address table, x, out;
    int rows, bf16, kind, threads;
    if (!PyArg_ParseTuple(args, "KKKipii", &table, &x, &out, &rows, &bf16, &kind, &threads)) return NULL;
    const Mixture m = mixture_at((const int64_t *)(uintptr_t)table);
    MixtureMemory at;
    char *memory = reserve(mixture_memory(&m, rows, &at, NULL));
    if (!memory) return NULL;
    Py_BEGIN_ALLOW_THREADS
    mix_rows(&m, (const char *)(uintptr_t)x, NULL, (char *)(uintptr_t)out, rows, bf16, kind, parallel ? threads : 1,
             memory);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

#endif
