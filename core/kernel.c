/* A request's arithmetic: what it takes from its token buckets, the headers that tell it, the known
 * words of its prompt, and scores as they are recorded.
 *
 * Built when a C compiler is there; `token_buckets.py`, `gateway/admission/headers.py`,
 * `gateway/catalog/codec/word_cache.py` and `moderation/records.py` have the same in Python. Debts are 128 bits wide, because the largest capacity times the longest period passes 64.
 * Called by one thread at a time, with the interpreter's lock.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <inttypes.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define INTERFACE 1
#define LONGEST_NUMBER 24 /* characters of one, and of the letters around it */
#define LONGEST_DURATION 64

typedef __int128 wide;

static PyObject *number_of(wide value) {
    if (value >= INT64_MIN && value <= INT64_MAX) return PyLong_FromLongLong((long long)value);
    PyObject *high = PyLong_FromLongLong((long long)(value >> 64)), *shift = NULL, *shifted = NULL;
    PyObject *low = PyLong_FromUnsignedLongLong((unsigned long long)value), *whole = NULL;
    if (high && low && (shift = PyLong_FromLong(64)) && (shifted = PyNumber_Lshift(high, shift)))
        whole = PyNumber_Or(shifted, low);
    Py_XDECREF(high);
    Py_XDECREF(low);
    Py_XDECREF(shift);
    Py_XDECREF(shifted);
    return whole;
}

/* 0, or -1 with an exception. */
static int read_wide(PyObject *given, wide *value) {
    int overflow;
    long long small = PyLong_AsLongLongAndOverflow(given, &overflow);
    if (!overflow) {
        *value = small;
        return small == -1 && PyErr_Occurred() ? -1 : 0;
    }
    PyObject *shift = PyLong_FromLong(64), *shifted = shift ? PyNumber_Rshift(given, shift) : NULL;
    long long high = shifted ? PyLong_AsLongLong(shifted) : -1;
    uint64_t low = PyLong_AsUnsignedLongLongMask(given);
    Py_XDECREF(shift);
    Py_XDECREF(shifted);
    if (PyErr_Occurred()) return -1;
    *value = (wide)(((unsigned __int128)(uint64_t)high << 64) | low);
    return 0;
}

static int read_long(PyObject *given, int64_t *value) {
    *value = PyLong_AsLongLong(given);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Rounded up. A division of 128 bits costs ten times one of 64. */
static inline wide over(wide amount, int64_t by) {
    if (amount >= INT64_MIN && amount <= INT64_MAX) {
        int64_t small = (int64_t)amount;
        return small / by + (small % by > 0);
    }
    return amount / by + (amount % by > 0);
}

/* As `token_buckets.PlainBucket`. */
typedef struct {
    PyObject_HEAD
    wide debt;
    int64_t at;
} Bucket;

static PyTypeObject BucketType;

static int bucket_set_debt(Bucket *self, PyObject *value, void *unused) {
    (void)unused;
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "debt cannot be deleted");
        return -1;
    }
    return read_wide(value, &self->debt);
}

static PyObject *bucket_debt(Bucket *self, void *unused) {
    (void)unused;
    return number_of(self->debt);
}

static PyObject *bucket_at(Bucket *self, void *unused) {
    (void)unused;
    return PyLong_FromLongLong(self->at);
}

static PyObject *bucket_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *debt;
    long long at;
    (void)names;
    if (!PyArg_ParseTuple(args, "OL", &debt, &at)) return NULL;
    Bucket *self = (Bucket *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->at = at;
    if (read_wide(debt, &self->debt) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyGetSetDef bucket_fields[] = {
    {"debt", (getter)bucket_debt, (setter)bucket_set_debt, NULL, NULL},
    {"at", (getter)bucket_at, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject BucketType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "core._kernel.Bucket",
    .tp_basicsize = sizeof(Bucket),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = bucket_new,
    .tp_getset = bucket_fields,
};

typedef struct {
    wide amount, most;
    int64_t capacity, period;
    Bucket *bucket;  /* of `rows`, as is the next */
    PyObject *take;
} Row;

/* As `token_buckets.PlainRows`. */
typedef struct {
    PyObject_HEAD
    PyObject *given; /* the tuple of tuples */
    Row *rows;
    Py_ssize_t count;
} Rows;

static void rows_dealloc(Rows *self) {
    Py_XDECREF(self->given);
    PyMem_Free(self->rows);
    Py_TYPE(self)->tp_free(self);
}

static int read_row(PyObject *given, Row *row) {
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 6 ||
        !PyObject_TypeCheck(PyTuple_GET_ITEM(given, 0), &BucketType)) {
        PyErr_SetString(PyExc_TypeError, "a row is a bucket, four numbers and a take");
        return -1;
    }
    row->bucket = (Bucket *)PyTuple_GET_ITEM(given, 0);
    row->take = PyTuple_GET_ITEM(given, 5);
    if (read_long(PyTuple_GET_ITEM(given, 1), &row->capacity) < 0 ||
        read_long(PyTuple_GET_ITEM(given, 2), &row->period) < 0 ||
        read_wide(PyTuple_GET_ITEM(given, 3), &row->amount) < 0 ||
        read_wide(PyTuple_GET_ITEM(given, 4), &row->most) < 0)
        return -1;
    if (row->capacity < 1 || row->period < 1) {
        PyErr_SetString(PyExc_ValueError, "capacity and period are above 0");
        return -1;
    }
    return 0;
}

static PyObject *rows_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *given;
    (void)names;
    if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &given)) return NULL;
    Rows *self = (Rows *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->given = Py_NewRef(given);
    self->count = PyTuple_GET_SIZE(given);
    self->rows = PyMem_Calloc((size_t)self->count + 1, sizeof(Row));
    if (self->rows == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t at = 0; at < self->count; at++)
        if (read_row(PyTuple_GET_ITEM(given, at), &self->rows[at]) < 0) {
            Py_DECREF(self);
            return NULL;
        }
    return (PyObject *)self;
}

static inline wide refilled(const Bucket *bucket, int64_t capacity, int64_t now) {
    wide debt = bucket->debt;
    if (bucket->at < now) {
        debt -= (wide)(now - bucket->at) * capacity;
        if (debt < 0) debt = 0;
    }
    return debt;
}

static PyObject *rows_take(Rows *self, PyObject *given) {
    int64_t now;
    if (read_long(given, &now) < 0) return NULL;
    PyObject *full = PyList_New(0), *remaining = PyTuple_New(self->count);
    PyObject *reset = PyTuple_New(self->count), *result = NULL;
    if (full == NULL || remaining == NULL || reset == NULL) goto done;
    for (Py_ssize_t at = 0; at < self->count; at++) {
        const Row *row = &self->rows[at];
        Bucket *bucket = row->bucket;
        wide debt = refilled(bucket, row->capacity, now);
        if (bucket->at < now) bucket->at = now;
        if (debt > row->most && PyList_Append(full, row->take) < 0) goto done;
        bucket->debt = debt += row->amount;
        wide left = row->capacity - over(debt, row->period);
        PyObject *of_bucket = number_of(left > 0 ? left : 0);
        PyObject *until = number_of(over(debt, row->capacity));
        PyTuple_SET_ITEM(remaining, at, of_bucket);
        PyTuple_SET_ITEM(reset, at, until);
        if (of_bucket == NULL || until == NULL) goto done;
    }
    result = PyTuple_Pack(3, full, remaining, reset);
done:
    Py_XDECREF(full);
    Py_XDECREF(remaining);
    Py_XDECREF(reset);
    return result;
}

static PyObject *rows_change(Rows *self, PyObject *const *args, Py_ssize_t count) {
    int64_t now;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "change takes what was taken, the amounts, and the time");
        return NULL;
    }
    PyObject *before = PySequence_Fast(args[0], "the amounts before are no sequence"), *after = NULL;
    PyObject *result = NULL;
    if (before == NULL || read_long(args[2], &now) < 0) goto done;
    after = PySequence_Fast(args[1], "the amounts are no sequence");
    if (after == NULL) goto done;
    Py_ssize_t most = self->count;
    if (PySequence_Fast_GET_SIZE(before) < most) most = PySequence_Fast_GET_SIZE(before);
    if (PySequence_Fast_GET_SIZE(after) < most) most = PySequence_Fast_GET_SIZE(after);
    for (Py_ssize_t at = 0; at < most; at++) {
        const Row *row = &self->rows[at];
        wide old, new;
        if (read_wide(PySequence_Fast_GET_ITEM(before, at), &old) < 0 ||
            read_wide(PySequence_Fast_GET_ITEM(after, at), &new) < 0)
            goto done;
        if (old == new) continue;
        Bucket *bucket = row->bucket;
        wide debt = refilled(bucket, row->capacity, now) + (new - old) * row->period;
        if (bucket->at < now) bucket->at = now;
        bucket->debt = debt > 0 ? debt : 0;
    }
    result = Py_NewRef(Py_None);
done:
    Py_XDECREF(before);
    Py_XDECREF(after);
    return result;
}

static PyObject *rows_given(Rows *self, void *unused) {
    (void)unused;
    return Py_NewRef(self->given);
}

static PyMethodDef rows_methods[] = {
    {"take", (PyCFunction)rows_take, METH_O, NULL},
    {"change", (PyCFunction)(void (*)(void))rows_change, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef rows_fields[] = {
    {"rows", (getter)rows_given, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject RowsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "core._kernel.Rows",
    .tp_basicsize = sizeof(Rows),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = rows_new,
    .tp_dealloc = (destructor)rows_dealloc,
    .tp_methods = rows_methods,
    .tp_getset = rows_fields,
};

/* One kind of limit: OpenAI's requests or tokens. */
typedef struct {
    PyObject *remaining, *reset; /* names of headers */
    PyObject *limits;            /* by bucket of the kind: the whole header */
    int64_t *indexes, *capacities;
    Py_ssize_t count;
} Kind;

/* The headers of the buckets of one plan, as `headers.bucket_headers` writes them. */
typedef struct {
    PyObject_HEAD
    PyObject *given;
    PyObject *policies;    /* a whole header, of `given`, as is the next */
    PyObject *states_name;
    PyObject *names;       /* of the buckets, in quotes */
    Kind *kinds;
    Py_ssize_t kind_count, bucket_count, longest;
} Fields;

static void fields_dealloc(Fields *self) {
    for (Py_ssize_t at = 0; at < self->kind_count; at++) {
        PyMem_Free(self->kinds[at].indexes);
        PyMem_Free(self->kinds[at].capacities);
    }
    PyMem_Free(self->kinds);
    Py_XDECREF(self->given);
    Py_TYPE(self)->tp_free(self);
}

static int read_kind(PyObject *given, Kind *kind, Py_ssize_t buckets) {
    PyObject *of;
    if (!PyTuple_Check(given) ||
        !PyArg_ParseTuple(given, "SSO!O!", &kind->remaining, &kind->reset, &PyTuple_Type,
                          &kind->limits, &PyTuple_Type, &of)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a kind is a tuple");
        return -1;
    }
    kind->count = PyTuple_GET_SIZE(of);
    if (PyTuple_GET_SIZE(kind->limits) != kind->count || kind->count == 0) {
        PyErr_SetString(PyExc_ValueError, "a kind has one limit for each of its buckets");
        return -1;
    }
    kind->indexes = PyMem_Calloc((size_t)kind->count, sizeof(int64_t));
    kind->capacities = PyMem_Calloc((size_t)kind->count, sizeof(int64_t));
    if (kind->indexes == NULL || kind->capacities == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t at = 0; at < kind->count; at++) {
        long long index, capacity;
        PyObject *pair = PyTuple_GET_ITEM(of, at);
        if (!PyTuple_Check(pair) || !PyArg_ParseTuple(pair, "LL", &index, &capacity)) return -1;
        if (index < 0 || index >= buckets) {
            PyErr_SetString(PyExc_IndexError, "a kind names a bucket that is not there");
            return -1;
        }
        kind->indexes[at] = index;
        kind->capacities[at] = capacity;
    }
    return 0;
}

static PyObject *fields_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *kinds;
    (void)names;
    Fields *self = (Fields *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->given = Py_NewRef(args);
    if (!PyArg_ParseTuple(args, "O!O!SO!", &PyTuple_Type, &kinds, &PyTuple_Type, &self->policies,
                          &self->states_name, &PyTuple_Type, &self->names))
        goto failed;
    self->bucket_count = PyTuple_GET_SIZE(self->names);
    self->longest = 1;
    for (Py_ssize_t at = 0; at < self->bucket_count; at++) {
        PyObject *name = PyTuple_GET_ITEM(self->names, at);
        if (!PyBytes_Check(name)) {
            PyErr_SetString(PyExc_TypeError, "a bucket's name is bytes");
            goto failed;
        }
        self->longest += PyBytes_GET_SIZE(name) + 2 * LONGEST_NUMBER + 2;
    }
    self->kinds = PyMem_Calloc((size_t)PyTuple_GET_SIZE(kinds) + 1, sizeof(Kind));
    if (self->kinds == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    self->kind_count = PyTuple_GET_SIZE(kinds);
    for (Py_ssize_t at = 0; at < self->kind_count; at++)
        if (read_kind(PyTuple_GET_ITEM(kinds, at), &self->kinds[at], self->bucket_count) < 0)
            goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* Steals `value`. */
static int put(PyObject *headers, Py_ssize_t at, PyObject *name, PyObject *value) {
    PyObject *pair = value ? PyTuple_New(2) : NULL;
    if (pair == NULL) {
        Py_XDECREF(value);
        return -1;
    }
    PyTuple_SET_ITEM(pair, 0, Py_NewRef(name));
    PyTuple_SET_ITEM(pair, 1, value);
    PyList_SET_ITEM(headers, at, pair);
    return 0;
}

/* As `headers.go_duration`. */
static PyObject *duration_of(int64_t millis) {
    char text[LONGEST_DURATION];
    int length;
    if (millis < 1000) {
        length = millis ? snprintf(text, sizeof text, "%" PRId64 "ms", millis)
                        : snprintf(text, sizeof text, "0s");
        return PyBytes_FromStringAndSize(text, length);
    }
    int64_t minutes = millis / 60000, hours = minutes / 60;
    int rest = (int)(millis % 60000);
    length = hours ? snprintf(text, sizeof text, "%" PRId64 "h%dm", hours, (int)(minutes % 60))
             : minutes ? snprintf(text, sizeof text, "%dm", (int)minutes)
                       : 0;
    length += snprintf(text + length, sizeof text - length, "%d.%03d", rest / 1000, rest % 1000);
    while (text[length - 1] == '0') length--;
    if (text[length - 1] == '.') length--;
    text[length++] = 's';
    return PyBytes_FromStringAndSize(text, length);
}

static PyObject *bytes_of(int64_t number) {
    char text[LONGEST_NUMBER];
    int length = snprintf(text, sizeof text, "%" PRId64, number);
    return PyBytes_FromStringAndSize(text, length);
}

static char *write_number(char *to, int64_t number) {
    char digits[LONGEST_NUMBER];
    int length = 0;
    uint64_t left = number < 0 ? -(uint64_t)number : (uint64_t)number;
    if (number < 0) *to++ = '-';
    do digits[length++] = (char)('0' + left % 10);
    while (left /= 10);
    while (length) *to++ = digits[--length];
    return to;
}

/* The numbers of the buckets: 0, or -1 with an exception. */
static int read_numbers(PyObject *given, int64_t *numbers, Py_ssize_t count) {
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != count) {
        PyErr_SetString(PyExc_ValueError, "there is one number for each bucket, in a tuple");
        return -1;
    }
    for (Py_ssize_t at = 0; at < count; at++)
        if (read_long(PyTuple_GET_ITEM(given, at), &numbers[at]) < 0) return -1;
    return 0;
}

static PyObject *states_of(const Fields *self, const int64_t *left, const int64_t *reset) {
    char *text = PyMem_Malloc((size_t)self->longest), *to = text;
    if (text == NULL) return PyErr_NoMemory();
    for (Py_ssize_t at = 0; at < self->bucket_count; at++) {
        PyObject *name = PyTuple_GET_ITEM(self->names, at);
        if (at) {
            *to++ = ',';
            *to++ = ' ';
        }
        memcpy(to, PyBytes_AS_STRING(name), (size_t)PyBytes_GET_SIZE(name));
        to += PyBytes_GET_SIZE(name);
        memcpy(to, ";r=", 3);
        to = write_number(to + 3, left[at]);
        memcpy(to, ";t=", 3);
        to = write_number(to + 3, reset[at] / 1000 + (reset[at] % 1000 > 0));
    }
    PyObject *made = PyBytes_FromStringAndSize(text, to - text);
    PyMem_Free(text);
    return made;
}

static PyObject *fields_write(Fields *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "write takes what remains, and the times until it is full");
        return NULL;
    }
    int64_t *left = PyMem_Calloc(2 * (size_t)self->bucket_count + 1, sizeof(int64_t));
    if (left == NULL) return PyErr_NoMemory();
    int64_t *reset = left + self->bucket_count;
    PyObject *headers = NULL;
    if (read_numbers(args[0], left, self->bucket_count) < 0 ||
        read_numbers(args[1], reset, self->bucket_count) < 0)
        goto done;
    headers = PyList_New(3 * self->kind_count + 2);
    if (headers == NULL) goto done;
    for (Py_ssize_t number = 0; number < self->kind_count; number++) {
        const Kind *kind = &self->kinds[number];
        Py_ssize_t tightest = 0;
        for (Py_ssize_t at = 1; at < kind->count; at++)
            if ((wide)left[kind->indexes[at]] * kind->capacities[tightest] <
                (wide)left[kind->indexes[tightest]] * kind->capacities[at])
                tightest = at;
        int64_t index = kind->indexes[tightest];
        PyList_SET_ITEM(headers, 3 * number, Py_NewRef(PyTuple_GET_ITEM(kind->limits, tightest)));
        if (put(headers, 3 * number + 1, kind->remaining, bytes_of(left[index])) < 0 ||
            put(headers, 3 * number + 2, kind->reset, duration_of(reset[index])) < 0) {
            Py_CLEAR(headers);
            goto done;
        }
    }
    PyList_SET_ITEM(headers, 3 * self->kind_count, Py_NewRef(self->policies));
    if (put(headers, 3 * self->kind_count + 1, self->states_name, states_of(self, left, reset)) < 0)
        Py_CLEAR(headers);
done:
    PyMem_Free(left);
    return headers;
}

static PyMethodDef fields_methods[] = {
    {"write", (PyCFunction)(void (*)(void))fields_write, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject FieldsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "core._kernel.Fields",
    .tp_basicsize = sizeof(Fields),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = fields_new,
    .tp_dealloc = (destructor)fields_dealloc,
    .tp_methods = fields_methods,
};

/* As `records.recorded_scores`. */
static PyObject *recorded_scores(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !PyDict_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "recorded_scores takes a dict and the least score");
        return NULL;
    }
    double least = PyFloat_AsDouble(args[1]);
    if (least == -1 && PyErr_Occurred()) return NULL;
    PyObject *found = PyDict_New(), *name, *score;
    Py_ssize_t at = 0;
    while (found && PyDict_Next(args[0], &at, &name, &score)) {
        double value = PyFloat_AsDouble(score);
        if (value == -1 && PyErr_Occurred()) {
            Py_CLEAR(found);
        } else if (value >= least) {
            PyObject *rounded = PyFloat_FromDouble(floor(value * 10000 + 0.5) / 10000);
            if (rounded == NULL || PyDict_SetItem(found, name, rounded) < 0) Py_CLEAR(found);
            Py_XDECREF(rounded);
        }
    }
    return found;
}

enum { LETTER = 1, DIGIT = 2, SPACE = 4, OTHER = 8 };

static inline int kind_of(unsigned char c) {
    if ((unsigned char)((c | 32) - 'a') < 26) return LETTER;
    if ((unsigned char)(c - '0') < 10) return DIGIT;
    return c == ' ' || (c >= '\t' && c <= '\r') ? SPACE : OTHER;
}

static Py_ssize_t run(const unsigned char *text, Py_ssize_t at, Py_ssize_t end, int kind) {
    while (at < end && kind_of(text[at]) == kind) at++;
    return at;
}

/* The end of 's, 't, 're, 've, 'm, 'll or 'd, which begins at `at`; or `at`. */
static Py_ssize_t contraction(const unsigned char *text, Py_ssize_t at, Py_ssize_t end, int lower) {
    if (text[at] != '\'' || at + 1 >= end) return at;
    unsigned char first = text[at + 1] | lower, second = at + 2 < end ? text[at + 2] | lower : 0;
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
    if ((second == 'e' && (first == 'r' || first == 'v')) || (first == 'l' && second == 'l'))
        return at + 3;
    return at;
}

/* White space that is no word's first character: all but the last, unless it ends the text. */
static Py_ssize_t spaces(const unsigned char *text, Py_ssize_t at, Py_ssize_t end) {
    Py_ssize_t last = run(text, at, end, SPACE);
    return last < end && last - at > 1 ? last - 1 : last;
}

static Py_ssize_t plain_word(const unsigned char *text, Py_ssize_t at, Py_ssize_t end) {
    Py_ssize_t found = contraction(text, at, end, 0), first = at + (text[at] == ' ');
    if (found > at) return found;
    if (first < end && kind_of(text[first]) != SPACE)
        return run(text, first, end, kind_of(text[first]));
    return spaces(text, at, end);
}

/* As Llama and Qwen cut: `digits` at most in a word. */
static Py_ssize_t later_word(const unsigned char *text, Py_ssize_t at, Py_ssize_t end, int digits) {
    Py_ssize_t found = contraction(text, at, end, 32), first = at + (text[at] == ' ');
    int kind = kind_of(text[at]), breaks = text[at] == '\r' || text[at] == '\n';
    if (found > at) return found;
    if (kind == LETTER) return run(text, at, end, LETTER);
    if (kind != DIGIT && !breaks && at + 1 < end && kind_of(text[at + 1]) == LETTER)
        return run(text, at + 1, end, LETTER);
    if (kind == DIGIT) return run(text, at, end - at > digits ? at + digits : end, DIGIT);
    if (first < end && kind_of(text[first]) == OTHER) {
        found = run(text, first, end, OTHER);
        while (found < end && (text[found] == '\r' || text[found] == '\n')) found++;
        return found;
    }
    for (found = run(text, at, end, SPACE); found > at; found--)
        if (text[found - 1] == '\r' || text[found - 1] == '\n') return found;
    return spaces(text, at, end);
}

/* The ids of the words of an ASCII text, and how many words it has; None where one is not known. */
static PyObject *word_ids(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 3 || !PyUnicode_Check(args[0]) || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "word_ids takes a text, a dict and the digits of a word");
        return NULL;
    }
    if (PyUnicode_READY(args[0]) < 0) return NULL;
    long digits = PyLong_AsLong(args[2]);
    if (digits == -1 && PyErr_Occurred()) return NULL;
    if (!PyUnicode_IS_ASCII(args[0])) {
        PyErr_SetString(PyExc_ValueError, "the text is not ASCII");
        return NULL;
    }
    const unsigned char *text = PyUnicode_1BYTE_DATA(args[0]);
    Py_ssize_t end = PyUnicode_GET_LENGTH(args[0]), words = 0, next;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t at = 0; found && at < end; at = next, words++) {
        next = digits ? later_word(text, at, end, (int)digits) : plain_word(text, at, end);
        PyObject *word = PyUnicode_Substring(args[0], at, next);
        PyObject *ids = word ? PyDict_GetItemWithError(args[1], word) : NULL;
        Py_XDECREF(word);
        if (ids == NULL) {
            Py_CLEAR(found);
            if (PyErr_Occurred()) return NULL;
            Py_RETURN_NONE;
        }
        if (!PyList_Check(ids)) {
            Py_CLEAR(found);
            PyErr_SetString(PyExc_TypeError, "the ids of a word are a list");
        }
        for (Py_ssize_t id = 0; found && id < PyList_GET_SIZE(ids); id++)
            if (PyList_Append(found, PyList_GET_ITEM(ids, id)) < 0) Py_CLEAR(found);
    }
    return found ? Py_BuildValue("(Nn)", found, words) : NULL;
}

static PyMethodDef functions[] = {
    {"word_ids", (PyCFunction)(void (*)(void))word_ids, METH_FASTCALL, NULL},
    {"recorded_scores", (PyCFunction)(void (*)(void))recorded_scores, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_kernel", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__kernel(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0 ||
        PyModule_AddType(module, &BucketType) < 0 || PyModule_AddType(module, &RowsType) < 0 ||
        PyModule_AddType(module, &FieldsType) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
