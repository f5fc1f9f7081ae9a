/* The words of the last characters of a text that grows: what a token adds is added, what leaves is
 * taken away, so that a score costs the same however long the window is. See `windows.py`, whose plain
 * version says what each call returns. Included by kernel.c.
 */
#define BLOCK 16      /* phrases whose maximum and sum are kept together */
#define MOST_LAST 3   /* words that the end of a text makes of what is unfinished */
#define MOST_HEADS 32

enum { BETWEEN, LETTERS, APOSTROPHE, LETTERS_AFTER, DIGITS };

typedef struct {
    PyObject_HEAD
    Kernel *kernel;
    PyObject *numbers, *vocabulary, *number_of;
    int32_t scratch, reach;
    double limits[MOST_HEADS];
    /* Those in the window are from `first` to `count`, oldest first. pairs[i]: of words i - 1 and i. */
    int32_t *words, *hashes, *pairs;
    int64_t *ends;
    float *blocks; /* of each BLOCK phrases, by their last word: the maximum, then the sum */
    int32_t first, count, room;
    int64_t length; /* characters of the text so far */
    double of_pairs[MOST_HEADS], of_grams[MOST_HEADS];
    int64_t distinct, grams;
    int state; /* of the unfinished word, which is lower-case ASCII */
    char *word;
    Py_ssize_t size, word_room;
    /* Of the run of characters without white space: how many, the last three, and how often the last one
     * in a row; of the one before: how many, and whether it ended with a letter on its own. */
    int64_t run, run_before;
    Py_UCS4 last, second_last, third_last;
    int same, lone_before, lone_last;
    int loose; /* whether the loose view of the run may be another */
} Window;

static int is_among(const int32_t *restrict list, int32_t from, int32_t to, int32_t wanted) {
    int found = 0;
    for (int32_t i = from; i < to; i++) found |= list[i] == wanted;
    return found;
}

static void add_scaled(double *restrict sum, const float *restrict row, int32_t width, double by) {
    for (int32_t i = 0; i < width; i++) sum[i] += by * row[i];
}

static inline void keep(float *restrict top, float *restrict sum, float x) {
    x = x > 0 ? x : 0;
    *top = x > *top ? x : *top;
    *sum += x;
}

/* The maximum and sum of filters after a ReLU, with the phrase of three words added. */
static inline void add_phrase(const Kernel *self, float *restrict top, int32_t one, int32_t two,
                              int32_t three) {
    const int32_t filters = self->filters, third = filters / 3;
    const float *restrict first = floats(self, FIRST) + (size_t)one * filters;
    const float *restrict second = floats(self, SECOND) + (size_t)two * filters;
    const float *restrict last = floats(self, LAST) + (size_t)three * filters;
    float *restrict sum = top + filters;
    for (int32_t i = 0; i < third; i++) keep(top + i, sum + i, last[i] + second[i] + first[i]);
    for (int32_t i = third; i < 2 * third; i++) keep(top + i, sum + i, last[i] + second[i]);
    for (int32_t i = 2 * third; i < filters; i++) keep(top + i, sum + i, last[i]);
}

FOR_EACH_PROCESSOR
static void add_to_block(Window *self, int32_t at) {
    float *block = self->blocks + (size_t)(at / BLOCK) * 2 * self->kernel->filters;
    if (at % BLOCK == 0) memset(block, 0, sizeof(float) * 2 * self->kernel->filters);
    if (at >= 2)
        add_phrase(self->kernel, block, self->words[at - 2], self->words[at - 1], self->words[at]);
}

/* What `pool` computes of the window's words. */
FOR_EACH_PROCESSOR
static void pool_window(const Window *self, float *restrict out) {
    const Kernel *kernel = self->kernel;
    const int32_t filters = kernel->filters, first = self->first, count = self->count;
    const int32_t before = kernel->before, *words = self->words;
    int32_t size = count - first;
    const int32_t only = size ? words[count - 1] : before;
    const int32_t one_before = size > 1 ? words[count - 2] : before;
    memset(out, 0, sizeof(float) * 2 * filters);
    add_phrase(kernel, out, before, before, size ? words[first] : before);
    if (size > 1) add_phrase(kernel, out, before, words[first], words[first + 1]);
    for (int32_t at = first + 2; at < count;) {
        int32_t end = at + BLOCK <= count ? at + BLOCK : count;
        if (at % BLOCK) {
            add_phrase(kernel, out, words[at - 2], words[at - 1], words[at]);
            at++;
            continue;
        }
        const float *restrict block = self->blocks + (size_t)(at / BLOCK) * 2 * filters;
        float *restrict sum = out + filters;
        for (int32_t i = 0; i < filters; i++) out[i] = block[i] > out[i] ? block[i] : out[i];
        for (int32_t i = 0; i < filters; i++) sum[i] += block[filters + i];
        at = end;
    }
    add_phrase(kernel, out, one_before, only, kernel->behind);
    add_phrase(kernel, out, only, kernel->behind, kernel->beyond);
    float mean = MEAN_SCALE / (float)((size ? size : 1) + LENGTH_OFFSET);
    for (int32_t i = 0; i < filters; i++) out[filters + i] *= mean;
}

static void window_logits(const Window *self, float *logits) {
    float pooled[2 * WIDEST], said[2 * WIDEST];
    const Kernel *kernel = self->kernel;
    const float *matrix = floats(kernel, MATRIX), *floor = floats(kernel, FLOOR);
    const int32_t features = kernel->features, inputs = 2 * kernel->filters;
    pool_window(self, pooled);
    product(pooled, inputs, matrix, matrix + (size_t)inputs * features, features, said);
    for (int32_t i = 0; i < features; i++) said[i] = said[i] > floor[i] ? said[i] : floor[i];
    const int some = self->count > self->first;
    const double by_pairs = some ? 1 / sqrt((double)self->distinct) : 0;
    const double by_grams = some ? 1 / sqrt((double)self->grams) : 0;
    for (int32_t i = 0; i < kernel->heads; i++)
        said[features + i] = (float)(by_pairs * self->of_pairs[i] + by_grams * self->of_grams[i]);
    product(said, features + kernel->heads, floats(kernel, CALIBRATION), floats(kernel, OFFSETS),
            kernel->logits, logits);
}

static const float *row_of(const Window *self, int32_t number) {
    return floats(self->kernel, ROWS) + (size_t)number * self->kernel->heads;
}

/* Whether the words from `from` to `to`, or their pairs, have the hash. */
static int has_hash(const Window *self, int32_t from, int32_t to, int32_t hash) {
    return is_among(self->hashes, from, to, hash) || is_among(self->pairs, from + 1, to, hash);
}

static void add_word(Window *self, int32_t number, int64_t end) {
    const Kernel *kernel = self->kernel;
    const int32_t *hashes = kernel->views[HASHES].buf, *grams = kernel->views[COUNTS].buf;
    const int32_t at = self->count, first = self->first, hash = hashes[number];
    int32_t pair = -1;
    if (at) {
        uint32_t lead = (uint32_t)self->hashes[at - 1] * PAIR_FACTOR;
        pair = (int32_t)((lead + (uint32_t)hash) & (uint32_t)(kernel->buckets - 1));
    }
    if (!has_hash(self, first, at, hash)) {
        add_scaled(self->of_pairs, row_of(self, hash), kernel->heads, 1);
        self->distinct++;
    }
    if (at > first && pair != hash && !has_hash(self, first, at, pair)) {
        add_scaled(self->of_pairs, row_of(self, pair), kernel->heads, 1);
        self->distinct++;
    }
    if (!is_among(self->words, first, at, number)) {
        add_scaled(self->of_grams, row_of(self, kernel->buckets + number), kernel->heads, 1);
        self->grams += grams[number];
    }
    self->words[at] = number, self->hashes[at] = hash, self->pairs[at] = pair, self->ends[at] = end;
    self->count++;
    add_to_block(self, at);
}

/* Drops the words that lie entirely before the last `reach` characters. */
static void drop_words(Window *self) {
    const Kernel *kernel = self->kernel;
    const int32_t *grams = kernel->views[COUNTS].buf, count = self->count;
    while (self->first < count && self->ends[self->first] <= self->length - self->reach) {
        const int32_t first = self->first++, hash = self->hashes[first], number = self->words[first];
        const int32_t pair = first + 1 < count ? self->pairs[first + 1] : hash;
        if (!has_hash(self, first + 1, count, hash)) {
            add_scaled(self->of_pairs, row_of(self, hash), kernel->heads, -1);
            self->distinct--;
        }
        if (pair != hash && !has_hash(self, first + 1, count, pair)) {
            add_scaled(self->of_pairs, row_of(self, pair), kernel->heads, -1);
            self->distinct--;
        }
        if (!is_among(self->words, first + 1, count, number)) {
            add_scaled(self->of_grams, row_of(self, kernel->buckets + number), kernel->heads, -1);
            self->grams -= grams[number];
        }
    }
    if (self->first == count) { /* what adding and taking away has left of rounding */
        memset(self->of_pairs, 0, sizeof(self->of_pairs));
        memset(self->of_grams, 0, sizeof(self->of_grams));
    }
}

/* The number of a word; -1 with an exception, or where a tentative one has none. */
static int32_t number_of(const Window *self, PyObject *word, int tentative) {
    PyObject *found = PyDict_GetItemWithError(self->numbers, word);
    if (!found) {
        if (PyErr_Occurred()) return -1;
        if (tentative && !PyDict_Contains(self->vocabulary, word)) return -1;
        if (!(found = PyObject_CallOneArg(self->number_of, word))) return -1;
    } else {
        Py_INCREF(found);
    }
    long number = PyLong_AsLong(found);
    Py_DECREF(found);
    if (number >= 0 && number < self->kernel->words) return (int32_t)number;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "no word has the number %ld", number);
    return -1;
}

/* Adds a word of `size` ASCII characters. A tentative one that has no number gets none: it takes the
 * place of the last such. */
static int add_ascii(Window *self, Py_ssize_t size, int64_t end, int tentative) {
    PyObject *word = PyUnicode_FromKindAndData(PyUnicode_1BYTE_KIND, self->word, size);
    if (!word) return -1;
    int32_t number = number_of(self, word, tentative);
    Py_DECREF(word);
    if (number < 0) {
        if (PyErr_Occurred()) return -1;
        store_word(self->kernel, number = self->scratch, self->word, size,
                   (int32_t)(checksum(self->word, size) & (uint32_t)(self->kernel->buckets - 1)));
    }
    return add_word(self, number, end), 0;
}

static int add_sign(Window *self, Py_UCS4 sign, int64_t end) {
    PyObject *word = PyUnicode_FromOrdinal((int)sign);
    if (!word) return -1;
    int32_t number = number_of(self, word, 0);
    Py_DECREF(word);
    return number < 0 ? -1 : (add_word(self, number, end), 0);
}

/* Ends the unfinished word where the text is `length` characters long. */
static int end_word(Window *self, int tentative) {
    const int state = self->state;
    if (state == BETWEEN) return 0;
    self->state = BETWEEN;
    if (state != APOSTROPHE) return add_ascii(self, self->size, self->length, tentative);
    return add_ascii(self, self->size - 1, self->length - 1, tentative)
        || add_sign(self, '\'', self->length) ? -1 : 0;
}

static int begin_or_extend(Window *self, Py_UCS4 c, int state) {
    if (self->state == BETWEEN) self->size = 0;
    if (self->size == self->word_room) {
        Py_ssize_t room = self->word_room ? 2 * self->word_room : 32;
        char *word = PyMem_Realloc(self->word, room);
        if (!word) return PyErr_NoMemory(), -1;
        self->word = word, self->word_room = room;
    }
    self->word[self->size++] = (char)c;
    self->state = state;
    self->length++;
    return 0;
}


/* Follows the runs by a lower-case character. A run for which `loose` stays clear is the same in the
 * loose view: see the patterns of `loose.py`. */
static void follow_run(Window *self, Py_UCS4 c) {
    if (Py_UNICODE_ISSPACE(c)) {
        if (!self->run) return;
        self->lone_last = self->lone_before;
        self->lone_before = is_ascii_letter(self->last) && !is_of(self->second_last, IS_LETTER | IS_DIGIT);
        self->run_before = self->run;
        self->run = 0, self->last = self->second_last = self->third_last = 0, self->same = 0, self->loose = 0;
        return;
    }
    const Py_UCS4 last = self->last, second = self->second_last, third = self->third_last;
    self->same = c == last ? self->same + 1 : 1;
    const int sign_before = letter_of(last) != 0;
    const int read_as_letter = sign_before
        && (is_ascii_letter(c) || (is_ascii_letter(second) && (c == '*' || letter_of(c))));
    const int spelled = last && last == third && is_of(last, IS_SEPARATOR)
        && (is_ascii_letter(second) || letter_of(second)) && (is_ascii_letter(c) || letter_of(c));
    const int apart = !self->run && self->run_before == 1 && self->lone_last;
    const int stretched = self->same > 2 && is_ascii_letter(c);
    self->loose |= read_as_letter || spelled || apart || stretched || c == FILLER;
    self->third_last = second, self->second_last = last, self->last = c;
    self->run++;
}

static int read_character(Window *self, Py_UCS4 c) {
    c = c < 128 ? (Py_UCS4)(c >= 'A' && c <= 'Z' ? c + 32 : c) : Py_UNICODE_TOLOWER(c);
    follow_run(self, c);
    const int state = self->state;
    if (c >= 'a' && c <= 'z') {
        if (state == DIGITS && end_word(self, 0)) return -1;
        const int after = state == APOSTROPHE || state == LETTERS_AFTER;
        return begin_or_extend(self, c, after ? LETTERS_AFTER : LETTERS);
    }
    if (c == '\'' && state == LETTERS) return begin_or_extend(self, c, APOSTROPHE);
    if (c >= '0' && c <= '9') {
        if (state != DIGITS && end_word(self, 0)) return -1;
        return begin_or_extend(self, c, DIGITS);
    }
    if (end_word(self, 0)) return -1;
    self->length++;
    return Py_UNICODE_ISSPACE(c) ? 0 : add_sign(self, c, self->length);
}

#define GROWN(field, count) (grown = PyMem_Realloc(self->field, sizeof(*self->field) * (count)))

/* Makes room for `more` words: words that have left are forgotten, by whole blocks. */
static int make_room(Window *self, Py_ssize_t more) {
    const size_t line = 2 * (size_t)self->kernel->filters;
    if (more > INT32_MAX / 4 - self->count) return PyErr_SetString(PyExc_ValueError, "too long"), -1;
    if (self->count + more <= self->room) return 0;
    const int32_t gone = self->first / BLOCK * BLOCK, kept = self->count - gone;
    memmove(self->words, self->words + gone, sizeof(int32_t) * kept);
    memmove(self->hashes, self->hashes + gone, sizeof(int32_t) * kept);
    memmove(self->pairs, self->pairs + gone, sizeof(int32_t) * kept);
    memmove(self->ends, self->ends + gone, sizeof(int64_t) * kept);
    memmove(self->blocks, self->blocks + gone / BLOCK * line,
            sizeof(float) * line * ((kept + BLOCK - 1) / BLOCK));
    self->first -= gone, self->count -= gone;
    if (self->count + more <= self->room) return 0;
    const int32_t room = (self->count + (int32_t)more + 2 * BLOCK) * 5 / 4 / BLOCK * BLOCK;
    void *grown;
    if (!GROWN(words, room)) return PyErr_NoMemory(), -1;
    self->words = grown;
    if (!GROWN(hashes, room)) return PyErr_NoMemory(), -1;
    self->hashes = grown;
    if (!GROWN(pairs, room)) return PyErr_NoMemory(), -1;
    self->pairs = grown;
    if (!GROWN(ends, room)) return PyErr_NoMemory(), -1;
    self->ends = grown;
    if (!GROWN(blocks, room / BLOCK * line)) return PyErr_NoMemory(), -1;
    self->blocks = grown;
    self->room = room;
    return 0;
}

static int read_all(Window *self, PyObject *text) {
    const Py_ssize_t length = PyUnicode_GET_LENGTH(text);
    const int kind = PyUnicode_KIND(text);
    const void *data = PyUnicode_DATA(text);
    for (Py_ssize_t i = 0; i < length; i++)
        if (read_character(self, PyUnicode_READ(kind, data, i))) return -1;
    return 0;
}

/* Continues the text. Whether the loose view of a run that it is part of may be another, or -1. */
static int continue_text(Window *self, PyObject *text) {
    if (!PyUnicode_Check(text)) return PyErr_SetString(PyExc_TypeError, "the text is a str"), -1;
    const Py_ssize_t length = PyUnicode_GET_LENGTH(text);
    const int kind = PyUnicode_KIND(text);
    const void *data = PyUnicode_DATA(text);
    int loose = 0;
    /* In parts, so that a long text needs no more room than the window. */
    for (Py_ssize_t begin = 0; begin < length; begin += self->reach) {
        Py_ssize_t end = begin + self->reach < length ? begin + self->reach : length;
        if (make_room(self, end - begin + MOST_LAST)) return -1;
        for (Py_ssize_t i = begin; i < end; i++)
            if (read_character(self, PyUnicode_READ(kind, data, i))) return -1;
            else loose |= self->loose;
        drop_words(self);
    }
    return loose;
}

PyDoc_STRVAR(add_doc, "add(text: str, /) -> bool\n--\n\n"
                      "Continue the text. Whether the loose view of a run that it is part of may be another.");

static PyObject *window_add(Window *self, PyObject *text) {
    int loose = continue_text(self, text);
    return loose < 0 ? NULL : PyBool_FromLong(loose);
}

/* Computes the scores of the text continued by `tail`, which is not kept, or -1. Whether any is not
 * below its limit. */
static int look_at(Window *self, PyObject *tail, float *scores) {
    if (make_room(self, (tail ? PyUnicode_GET_LENGTH(tail) : 0) + MOST_LAST)) return -1;
    const size_t line = 2 * (size_t)self->kernel->filters;
    const int32_t heads = self->kernel->logits - 1;
    float block[2 * WIDEST], *const changed = self->blocks + self->count / BLOCK * line;
    const Py_ssize_t size = self->state == BETWEEN ? 0 : self->size;
    char word[64], *unfinished = word;
    int failed = 0, above = 0;
    if (size > (Py_ssize_t)sizeof(word) && !(unfinished = PyMem_Malloc(size)))
        return PyErr_NoMemory(), -1;
    if (size) memcpy(unfinished, self->word, size);
    memcpy(block, changed, sizeof(float) * line);
    Window before = *self;
    if ((tail && read_all(self, tail)) || end_word(self, 1)) {
        failed = 1;
    } else {
        drop_words(self);
        window_logits(self, scores);
        blend(self->kernel, scores);
        for (int32_t i = 0; i < heads; i++) above |= !((double)scores[i] < self->limits[i]);
    }
    memcpy(changed, block, sizeof(float) * line);
    before.word = self->word, before.word_room = self->word_room;
    before.ob_base = self->ob_base;
    *self = before;
    if (size) memcpy(self->word, unfinished, size);
    if (unfinished != word) PyMem_Free(unfinished);
    return failed ? -1 : above;
}

PyDoc_STRVAR(look_doc, "look(tail: str = '', /) -> list[float] | None\n--\n\n"
                       "The scores of the text continued by `tail`, which is not kept; None where each\n"
                       "is below its limit.");

static PyObject *window_look(Window *self, PyObject *const *given, Py_ssize_t count) {
    float scores[WIDEST];
    if (count > 1 || (count && !PyUnicode_Check(given[0])))
        return PyErr_SetString(PyExc_TypeError, "look takes one str"), NULL;
    int above = look_at(self, count ? given[0] : NULL, scores);
    if (above < 0) return NULL;
    return above ? list_of(scores, self->kernel->logits - 1) : Py_NewRef(Py_None);
}

PyDoc_STRVAR(read_doc, "read(text: str, /) -> int\n--\n\n"
                       "`add` and `look` together: 1 where the loose view may be another, 2 where a score\n"
                       "is not below its limit, or both added up.");

static PyObject *window_read(Window *self, PyObject *text) {
    float scores[WIDEST];
    int loose = continue_text(self, text), above = loose < 0 ? -1 : look_at(self, NULL, scores);
    return above < 0 ? NULL : PyLong_FromLong(loose + 2 * above);
}

static void window_dealloc(Window *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->kernel);
    Py_XDECREF(self->numbers);
    Py_XDECREF(self->vocabulary);
    Py_XDECREF(self->number_of);
    PyMem_Free(self->words);
    PyMem_Free(self->hashes);
    PyMem_Free(self->pairs);
    PyMem_Free(self->ends);
    PyMem_Free(self->blocks);
    PyMem_Free(self->word);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyTypeObject *kernel_type;

static PyObject *window_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(named)) {
    PyObject *kernel, *numbers, *vocabulary, *number_of, *limits;
    int scratch, reach;
    if (!PyArg_ParseTuple(args, "O!O!O!OiiO!", kernel_type, &kernel, &PyDict_Type, &numbers,
                          &PyDict_Type, &vocabulary, &number_of, &scratch, &reach, &PyTuple_Type,
                          &limits))
        return NULL;
    const Kernel *tables = (Kernel *)kernel;
    if (scratch < 0 || scratch >= tables->words || scratch < side(tables, VECTORS, 0) || reach < 1
        || tables->logits < 2 || tables->logits > MOST_HEADS || tables->heads > MOST_HEADS
        || PyTuple_GET_SIZE(limits) != tables->logits - 1)
        return PyErr_SetString(PyExc_ValueError, "the window does not fit its kernel"), NULL;
    Window *self = (Window *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->kernel = (Kernel *)Py_NewRef(kernel);
    self->numbers = Py_NewRef(numbers);
    self->vocabulary = Py_NewRef(vocabulary);
    self->number_of = Py_NewRef(number_of);
    self->scratch = scratch, self->reach = reach;
    for (int32_t i = 0; i < tables->logits - 1; i++) {
        self->limits[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(limits, i));
        if (PyErr_Occurred()) return Py_DECREF(self), NULL;
    }
    return (PyObject *)self;
}

static PyMethodDef window_methods[] = {
    {"add", (PyCFunction)window_add, METH_O, add_doc},
    {"read", (PyCFunction)window_read, METH_O, read_doc},
    {"look", (PyCFunction)(void (*)(void))window_look, METH_FASTCALL, look_doc},
    {0}};
static PyType_Slot window_slots[] = {
    {Py_tp_new, window_new}, {Py_tp_dealloc, window_dealloc},
    {Py_tp_methods, window_methods}, {0}};
static PyType_Spec window_spec = {"moderation.classifiers._kernel.Window", sizeof(Window), 0,
                                  Py_TPFLAGS_DEFAULT, window_slots};
