/* Ranks of one host that compute parts of one model: sums over all of them, in memory that they share.
 *
 * Each rank copies its part into memory of its own, says so by a count, waits for the counts of the others, and
 * adds all parts in the order of the ranks, so that every rank has the same bits. A rank has two such memories
 * in turns: it begins to write one only after a call in which all others had read it. */
#ifndef PEERS_H
#define PEERS_H
#include <errno.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { PEER_LINE = 64, PEER_HEAD = 4096, LOOKS = 1 << 14, PEER_SUMS = 64 };

/* A rank's own view; written by its first thread alone. */
typedef struct {
    int64_t base, rank, size;
    int64_t room;     /* bytes of each of a rank's two memories */
    int64_t calls;    /* so far */
    int64_t patience; /* nanoseconds that a wait may take; 0: any */
    int64_t failed;   /* the rank that was waited for in vain; -1: none; -2: another rank ended the group */
} Peers;

static int64_t peer_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint64_t *peer_count(const Peers *p, int64_t rank) {
    return (uint64_t *)(uintptr_t)(p->base + PEER_LINE * (1 + rank));
}

static char *peer_memory(const Peers *p, int64_t rank, uint64_t call) {
    return (char *)(uintptr_t)(p->base + PEER_HEAD + (2 * rank + (int64_t)(call & 1)) * p->room);
}

/* Until the count is `least`: 0, or 1 for the time being over, or 2 for an end of the group, which `over` says. */
static int peer_wait(const uint64_t *count, uint64_t least, const uint32_t *over, int64_t patience) {
    int64_t begun = 0;
    for (int64_t looks = 0; __atomic_load_n(count, __ATOMIC_ACQUIRE) < least; looks++) {
        relax(looks);
        if (looks % LOOKS != LOOKS - 1) continue;
        if (__atomic_load_n(over, __ATOMIC_ACQUIRE)) return 2;
        const int64_t now = peer_now();
        if (!begun) begun = now;
        if (patience && now - begun > patience) return 1;
        if (now - begun > 20000000) nanosleep(&(struct timespec){0, 50000}, NULL);
    }
    return 0;
}

/* Says that this rank's part is there, and waits for those of all others. */
static int peers_meet(Peers *p, uint64_t call) {
    __atomic_store_n(peer_count(p, p->rank), call, __ATOMIC_RELEASE);
    for (int64_t n = 0; n < p->size; n++) {
        const int state = peer_wait(peer_count(p, n), call, (const uint32_t *)(uintptr_t)p->base, p->patience);
        if (state) return p->failed = state == 1 ? n : -2, 1;
    }
    return 0;
}

/* x becomes the sum of all ranks' x. Whether that failed. */
static int sum_peers(Peers *p, char *x, int64_t count, int bf16) {
    const int size = bf16 ? 2 : 4;
    const int64_t most = p->room / size;
    for (int64_t first = 0; first < count; first += most) {
        const int64_t some = count - first < most ? count - first : most;
        const uint64_t call = (uint64_t)++p->calls;
        char *at = x + first * size;
        memcpy(peer_memory(p, p->rank, call), at, (size_t)some * size);
        if (peers_meet(p, call)) return 1;
        for (int64_t begin = 0; begin < some; begin += PEER_SUMS) {
            const int64_t many = some - begin < PEER_SUMS ? some - begin : PEER_SUMS;
            float sums[PEER_SUMS] = {0};
            for (int64_t n = 0; n < p->size; n++) {
                const char *part = peer_memory(p, n, call);
                if (bf16)
                    for (int64_t i = 0; i < many; i++) sums[i] += value_at(part, begin + i, 1);
                else
                    for (int64_t i = 0; i < many; i++) sums[i] += ((const float *)part)[begin + i];
            }
            for (int64_t i = 0; i < many; i++) store_at(at, begin + i, sums[i], bf16);
        }
    }
    return 0;
}

PyDoc_STRVAR(sum_ranks_doc,
    "sum_ranks(peers, x, count, bf16, /)\n--\n\n"
    "x becomes the sum of all ranks' x, in place. peers: the address of a `Peers`. Whether all ranks came.");

static PyObject *sum_ranks(PyObject *Py_UNUSED(module), PyObject *args) {
    Address peers, x;
    long long count;
    int bf16, failed;
    if (!PyArg_ParseTuple(args, "KKLp", &peers, &x, &count, &bf16)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    failed = sum_peers((Peers *)(uintptr_t)peers, (char *)(uintptr_t)x, count, bf16);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!failed);
}

PyDoc_STRVAR(meet_ranks_doc,
    "meet_ranks(peers, x, bytes, /)\n--\n\n"
    "Gives the others these bytes, no more than a rank's memory holds, and waits for theirs. Whether all ranks came.");

static PyObject *meet_ranks(PyObject *Py_UNUSED(module), PyObject *args) {
    Address peers, x;
    long long bytes;
    if (!PyArg_ParseTuple(args, "KKL", &peers, &x, &bytes)) return NULL;
    Peers *p = (Peers *)(uintptr_t)peers;
    if (bytes > p->room) return PyErr_SetString(PyExc_ValueError, "more bytes than a rank's memory holds"), NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    const uint64_t call = (uint64_t)++p->calls;
    memcpy(peer_memory(p, p->rank, call), (const char *)(uintptr_t)x, (size_t)bytes);
    failed = peers_meet(p, call);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!failed);
}

/* A count that others wait for, and how many of them sleep. */
typedef struct {
    uint64_t count;
    uint32_t sleepers;
} Posted;

PyDoc_STRVAR(post_doc, "post(posted, count, /)\n--\n\nSets a count that others wait for by `await_post`.");

static PyObject *post(PyObject *Py_UNUSED(module), PyObject *args) {
    Address posted;
    unsigned long long count;
    if (!PyArg_ParseTuple(args, "KK", &posted, &count)) return NULL;
    Posted *p = (Posted *)(uintptr_t)posted;
    __atomic_store_n(&p->count, (uint64_t)count, __ATOMIC_SEQ_CST);
#if defined(__linux__)
    if (__atomic_load_n(&p->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &p->count, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
#endif
    Py_RETURN_NONE;
}

PyDoc_STRVAR(await_post_doc,
    "await_post(posted, least, over, spin_ns, patience_ns, /)\n--\n\n"
    "Waits until the count is `least`: in a loop, then asleep. 0: it is; 1: the time is over; 2: the number at "
    "`over` is not 0.");

static PyObject *await_post(PyObject *Py_UNUSED(module), PyObject *args) {
    Address posted, over;
    unsigned long long least;
    long long spin, patience;
    if (!PyArg_ParseTuple(args, "KKKLL", &posted, &least, &over, &spin, &patience)) return NULL;
    Posted *p = (Posted *)(uintptr_t)posted;
    const uint32_t *ended = (const uint32_t *)(uintptr_t)over;
    int state = 0;
    Py_BEGIN_ALLOW_THREADS
    const int64_t begun = peer_now();
    for (int64_t looks = 0; __atomic_load_n(&p->count, __ATOMIC_ACQUIRE) < least; looks++) {
        relax(looks);
        if (looks % 256 != 255) continue;
        const int64_t waited = peer_now() - begun;
        if (__atomic_load_n(ended, __ATOMIC_ACQUIRE)) { state = 2; break; }
        if (waited > patience) { state = 1; break; }
        if (waited < spin) continue;
#if defined(__linux__)
        __atomic_fetch_add(&p->sleepers, 1, __ATOMIC_SEQ_CST);
        const uint64_t seen = __atomic_load_n(&p->count, __ATOMIC_SEQ_CST);
        if (seen < least) /* a look now and then, for the end of the group wakes nobody */
            syscall(SYS_futex, &p->count, FUTEX_WAIT, (uint32_t)seen, &(struct timespec){0, 50000000}, NULL, 0);
        __atomic_fetch_sub(&p->sleepers, 1, __ATOMIC_SEQ_CST);
#else
        nanosleep(&(struct timespec){0, 200000}, NULL);
#endif
        looks = 254;
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(state);
}

#endif
