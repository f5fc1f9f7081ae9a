/* The loose view of a folded text that arrives in pieces, as `LooseStream` of `loose.py` makes it, without
 * the offsets. Included by kernel.c.
 */
#define STRETCHED 3
#define MIN_SPELLED 3
#define MOST_SPELLED (2 * MIN_SPELLED + 2)
#define MOST_OPEN 32 /* characters that may be read otherwise with what follows */
#define FILLER 0x2800

typedef struct {
    Py_UCS4 *out;
    Py_ssize_t size;
    Py_UCS4 waiting, previous, same; /* 0: none */
    Py_ssize_t times;                /* how often `same` came in a row */
    Py_UCS4 spell[MOST_SPELLED];     /* letter, sign, letter... */
    int spelled, joining, in_word, was_leet;
} Loose;

/* By ASCII character: whether it is a letter, a digit, may part the letters of a spelled word, and the
 * letter that it may be read as (`LEET`). */
enum { IS_LETTER = 1, IS_DIGIT = 2, IS_SEPARATOR = 4 };
static uint8_t kinds[128], letters_of[128];

static void fill_kinds(void) {
    static const char signs[] = "013457@$!|+8", letters[] = "oieastasiltb", separators[] = " .-_*~/";
    for (int c = 'a'; c <= 'z'; c++) kinds[c] = kinds[c - 32] = IS_LETTER;
    for (int c = '0'; c <= '9'; c++) kinds[c] = IS_DIGIT;
    for (int i = 0; separators[i]; i++) kinds[(int)separators[i]] |= IS_SEPARATOR;
    for (int i = 0; signs[i]; i++) letters_of[(int)signs[i]] = (uint8_t)letters[i];
}

static inline int is_of(Py_UCS4 c, int kind) { return c < 128 && (kinds[c] & kind); }
static inline int is_ascii_letter(Py_UCS4 c) { return is_of(c, IS_LETTER); }
static inline int is_alnum(Py_UCS4 c) {
    return c < 128 ? kinds[c] & (IS_LETTER | IS_DIGIT) : Py_UNICODE_ISALNUM(c);
}

/* The letter that a sign may be read as, or 0. */
static inline Py_UCS4 letter_of(Py_UCS4 c) {
    return c < 128 ? letters_of[c] : c == 0x20AC ? 'e' : c == 0xA3 ? 'l' : c == 0xA2 ? 'c' : 0;
}

/* Of one character, without changing the length. */
static Py_UCS4 lowered(Py_UCS4 c) {
    if (c < 128) return c >= 'A' && c <= 'Z' ? c + 32 : c;
    return c == 0x130 ? c : Py_UNICODE_TOLOWER(c);
}

static void close_same(Loose *self) {
    Py_ssize_t times = self->times >= STRETCHED ? 1 : self->times;
    for (Py_ssize_t i = 0; i < times; i++) self->out[self->size++] = self->same;
    self->times = 0;
}

static void append_final(Loose *self, Py_UCS4 c, Py_UCS4 following) {
    const Py_UCS4 letter = letter_of(c);
    if (letter
        && (is_ascii_letter(following) || self->was_leet
            || (is_ascii_letter(self->previous) && (following == '*' || letter_of(following))))) {
        self->was_leet = 1;
        c = letter;
    } else {
        self->was_leet = 0;
    }
    self->previous = c;
    c = lowered(c);
    if (self->times && (self->same != c || !is_ascii_letter(c))) close_same(self);
    self->same = c;
    self->times++;
}

static void take(Loose *self, Py_UCS4 c) {
    if (self->waiting) append_final(self, self->waiting, c);
    self->waiting = c;
    self->in_word = is_alnum(c);
}

static void flush_spelled(Loose *self, int word_goes_on) {
    const int count = self->spelled, tail = word_goes_on && count > 1 ? 2 : 1 - count % 2;
    const int letters = count - tail;
    const int step = self->joining || letters >= 2 * MIN_SPELLED - 1 ? 2 : 1;
    Py_UCS4 spell[MOST_SPELLED];
    memcpy(spell, self->spell, sizeof(spell));
    self->spelled = 0;
    for (int i = 0; i < letters; i += step) take(self, spell[i]);
    for (int i = letters > 0 ? letters : 0; i < count; i++) take(self, spell[i]);
    self->joining = 0;
}

/* Whether a character is held, because it may be part of a spelled word. */
static int spells(Loose *self, Py_UCS4 c) {
    const int letter = is_ascii_letter(c) || (self->spelled && letter_of(c));
    if (!self->spelled) {
        if (!letter || self->in_word) return 0;
        self->spell[self->spelled++] = c;
        return 1;
    }
    if (self->spelled % 2) {
        if (is_of(c, IS_SEPARATOR) && (self->spelled < 2 || c == self->spell[1])) {
            self->spell[self->spelled++] = c;
            return 1;
        }
        flush_spelled(self, is_alnum(c));
        return 0;
    }
    if (!letter) {
        flush_spelled(self, 0);
        return 0;
    }
    self->spell[self->spelled++] = c;
    if (self->joining || self->spelled >= 2 * MIN_SPELLED + 1) {
        self->joining = 1;
        take(self, self->spell[0]);
        self->spelled -= 2;
        memmove(self->spell, self->spell + 2, sizeof(Py_UCS4) * self->spelled);
    }
    return 1;
}

static void read_loosely(Loose *self, PyObject *text) {
    const Py_ssize_t length = PyUnicode_GET_LENGTH(text);
    const int kind = PyUnicode_KIND(text);
    const void *data = PyUnicode_DATA(text);
    for (Py_ssize_t i = 0; i < length; i++) {
        Py_UCS4 c = PyUnicode_READ(kind, data, i);
        if (c != FILLER && !spells(self, c)) take(self, c);
    }
}

static void finish_loosely(Loose *self) {
    flush_spelled(self, 0);
    if (self->waiting) append_final(self, self->waiting, ' ');
    close_same(self);
}

typedef struct {
    PyObject_HEAD
    Loose loose;
} LooseText;

PyDoc_STRVAR(loose_add_doc, "add(text: str, /) -> str\n--\n\n"
                            "Continue the text; the characters of its loose view that are final now.");

static PyObject *loose_add(LooseText *self, PyObject *text) {
    if (!PyUnicode_Check(text)) return PyErr_SetString(PyExc_TypeError, "the text is a str"), NULL;
    /* No more than what was open before. */
    const Py_ssize_t room = PyUnicode_GET_LENGTH(text) + MOST_OPEN;
    Py_UCS4 few[256], *out = room <= 256 ? few : PyMem_Malloc(sizeof(Py_UCS4) * room);
    if (!out) return PyErr_NoMemory();
    self->loose.out = out, self->loose.size = 0;
    read_loosely(&self->loose, text);
    PyObject *found = PyUnicode_FromKindAndData(PyUnicode_4BYTE_KIND, out, self->loose.size);
    if (out != few) PyMem_Free(out);
    return found;
}

PyDoc_STRVAR(loose_rest_doc, "rest() -> str\n--\n\n"
                             "The other characters of its loose view, as if the text ended here.");

static PyObject *loose_rest(LooseText *self, PyObject *Py_UNUSED(none)) {
    Py_UCS4 out[MOST_OPEN];
    Loose ended = self->loose;
    ended.out = out, ended.size = 0;
    finish_loosely(&ended);
    return PyUnicode_FromKindAndData(PyUnicode_4BYTE_KIND, out, ended.size);
}

static void loose_dealloc(LooseText *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *loose_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(named)) {
    return PyArg_ParseTuple(args, "") ? type->tp_alloc(type, 0) : NULL;
}

static PyMethodDef loose_methods[] = {
    {"add", (PyCFunction)loose_add, METH_O, loose_add_doc},
    {"rest", (PyCFunction)loose_rest, METH_NOARGS, loose_rest_doc},
    {0}};
static PyType_Slot loose_slots[] = {{Py_tp_new, loose_new}, {Py_tp_dealloc, loose_dealloc},
                                    {Py_tp_methods, loose_methods}, {0}};
static PyType_Spec loose_spec = {"moderation.classifiers._kernel.LooseText", sizeof(LooseText), 0,
                                 Py_TPFLAGS_DEFAULT, loose_slots};
