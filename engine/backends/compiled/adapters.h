/* Adapters of low rank for the rows of a product: inner = x A^T for the rows of each adapter, then
 * `add_adapters` of kernel.c adds inner B to the base's sums.
 *
 * An adapter is one piece of memory with all of its matrices, packed as those of the base are: A of each
 * site, whose outputs are `rank` for each part, and B of each part. Its bytes are read once for all rows. */
#ifndef ADAPTERS_H
#define ADAPTERS_H

enum { SITES = 4, PARTS = 7 };
static const int first_part[SITES + 1] = {0, 3, 4, 6, 7}; /* q k v, o, gate up, down */

typedef struct {
    const char *data;
    const int64_t *offsets; /* bytes from `data`: [layers, SITES + PARTS], A of sites, then B of parts */
    const uint8_t *changed; /* whether the adapter changes a part: [layers, PARTS] */
    int32_t first, rows, rank;
} Adapter;

typedef struct {
    Adapter *all;   /* in the order of their rows; those of one rank are neighbours */
    Adapted *found; /* those of one site */
    Group *groups;  /* their A */
    char *inner;    /* [rows, widest], of one site */
    int32_t count, widest;
    int only; /* the part to which alone something is added; -1: all */
    int bf16, threads;
} Adapters;

/* Reads (data, offsets, changed, rank, first row, rows) into memory that PyMem_Free(all) releases. */
static int reads_adapters(PyObject *given, Adapters *a) {
    a->count = (int32_t)PyList_GET_SIZE(given);
    a->all = PyMem_Malloc((sizeof(Adapter) + sizeof(Adapted) + sizeof(Group)) * (a->count + 1));
    if (!a->all) return PyErr_NoMemory(), -1;
    a->found = (Adapted *)(a->all + a->count), a->groups = (Group *)(a->found + a->count);
    for (int32_t n = 0; n < a->count; n++) {
        Address data, offsets, changed;
        Adapter *each = &a->all[n];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(given, n), "KKKiii", &data, &offsets, &changed, &each->rank,
                              &each->first, &each->rows))
            return PyMem_Free(a->all), -1;
        each->data = (const char *)(uintptr_t)data, each->offsets = (const int64_t *)(uintptr_t)offsets;
        each->changed = (const uint8_t *)(uintptr_t)changed;
        if (3 * each->rank > a->widest) a->widest = 3 * each->rank;
    }
    return 0;
}

/* Computes inner for the adapters that change the site, and returns how many these are. base: the product
 * to whose sums they add. */
static int32_t shrink(const Adapters *a, int64_t layer, int site, const Work *base) {
    const int64_t size = a->bf16 ? 2 : 4;
    const int32_t width = base->width;
    const int parts = first_part[site + 1] - first_part[site];
    int32_t count = 0;
    for (int32_t n = 0; n < a->count;) {
        Work w = {.groups = a->groups + count, .ready = base->ready, .ready_stride = base->ready_stride,
                  .out = a->inner, .out_stride = a->widest, .width = width, .filled = width,
                  .outputs = parts * a->all[n].rank, .bf16 = a->bf16};
        const int32_t rank = a->all[n].rank, pairs = ((w.outputs + LANES - 1) / LANES + 1) / 2;
        for (; n < a->count && a->all[n].rank == rank; n++) {
            const Adapter *each = &a->all[n];
            const int64_t *at = each->offsets + layer * (SITES + PARTS);
            Adapted *adapted = &a->found[count];
            int any = 0;
            for (int p = 0; p < parts; p++) {
                const int part = first_part[site] + p, changes = each->changed[layer * PARTS + part];
                adapted->b[p] = changes ? each->data + at[SITES + part] : NULL;
                any |= changes;
            }
            if (!any) continue;
            adapted->inner = a->inner + each->first * a->widest * size;
            adapted->stride = a->widest * size, adapted->rank = rank;
            adapted->first = each->first, adapted->rows = each->rows;
            if (a->only >= 0)
                adapted->b[0] = adapted->b[a->only], adapted->inner += a->only * rank * size;
            w.units += pairs, w.rows += each->rows, w.count++;
            a->groups[count++] = (Group){.weights = each->data + at[site], .first = each->first,
                                         .rows = each->rows, .units = w.units};
        }
        multiply(&w, a->threads);
    }
    return count;
}

#endif
