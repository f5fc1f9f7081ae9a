/* The threads of a call that computes many things one after the other: they stay together in between, because
 * to meet costs a tenth of what to begin and to end together costs. While one of them waits for the others, it
 * fetches weights that the next product needs: memory is what few rows wait for. */
#ifndef CREW_H
#define CREW_H
#include <sched.h>
#include <stddef.h>

#define STREAMS 6           /* codes, scales and minima of a matrix and of its gate */
#define PATIENCE 4096       /* looks, after which a waiting thread lets another program run */
#define LINE 64
#define FETCHED (256 << 10) /* bytes, a part of what the second cache of a core holds */

/* Weights of a product, unit after unit. */
typedef struct {
    const char *at[STREAMS];
    int64_t bytes[STREAMS]; /* of a unit */
    int64_t units;
    int streams;
} Ahead;

typedef struct {
    void (*part)(void *, int, int);
    void *work;
    Ahead ahead;    /* what `part` is followed by */
    uint64_t begun; /* jobs, each of which all threads do */
    uint64_t ended; /* by others than the first thread */
    void (*leads)(void *);
    void *given; /* to `leads` */
} Crew;

static _Thread_local Crew *crew; /* of its first thread */

INLINE void relax(int64_t looks) {
#if X86
    __builtin_ia32_pause();
#endif
    if (looks % PATIENCE == PATIENCE - 1) sched_yield();
}

/* The units with which a thread begins, so that it can fetch them before: a part of those of all. */
INLINE int64_t first_units(int64_t units, int count) { return units / (2 * count); }

INLINE int is_reached(const uint64_t *counter, uint64_t least) {
    return __atomic_load_n(counter, __ATOMIC_ACQUIRE) >= least;
}

/* Fetches what this thread begins with, then what no thread begins with. Whether it ended before the counter
 * was reached. */
static int fetch_until(const Ahead *a, int number, int count, const uint64_t *counter, uint64_t least) {
    const int64_t own = first_units(a->units, count), shared = own * count;
    int64_t left = FETCHED;
    for (int64_t n = 0; n < own + a->units - shared; n++) {
        const int64_t unit = n < own ? own * number + n : shared + n - own;
        for (int s = 0; s < a->streams; s++) {
            const char *at = a->at[s] + unit * a->bytes[s];
            for (int64_t k = 0; k < a->bytes[s]; k += LINE) {
                if (k % (4 * LINE) == 0 && is_reached(counter, least)) return 0;
                __builtin_prefetch(at + k, 0, 2);
            }
            if ((left -= a->bytes[s]) <= 0) return 1;
        }
    }
    return 1;
}

/* Until the counter is `least`. */
static void wait_for(const Ahead *a, int number, int count, const uint64_t *counter, uint64_t least) {
    if (!is_reached(counter, least) && fetch_until(a, number, count, counter, least))
        for (int64_t looks = 0; !is_reached(counter, least); looks++) relax(looks);
}

/* Does a job with the others, as their first thread. */
static void lead(Crew *c, void (*part)(void *, int, int), void *work) {
    const int count = thread_count();
    c->part = part, c->work = work;
    const uint64_t begun = c->begun + 1;
    __atomic_store_n(&c->begun, begun, __ATOMIC_RELEASE);
    if (!part) return;
    part(work, 0, count);
    wait_for(&c->ahead, 0, count, &c->ended, begun * (count - 1));
}

typedef struct {
    void (*part)(void *, int, int);
    void *work;
} Job;

static void on_thread(void *given) {
    Job *job = given;
    job->part(job->work, thread_number(), thread_count());
}

static void run(void (*part)(void *, int, int), void *work, int threads) {
    Job job = {part, work};
    if (!parallel || threads < 2) part(work, 0, 1);
    else if (crew) lead(crew, part, work);
    else parallel(on_thread, &job, (unsigned)threads, 0);
}

static void follow(Crew *c, int number, int count) {
    Ahead ahead = {.streams = 0};
    for (uint64_t job = 1;; job++) {
        wait_for(&ahead, number, count, &c->begun, job);
        if (!c->part) return;
        ahead = c->ahead;
        c->part(c->work, number, count);
        __atomic_fetch_add(&c->ended, 1, __ATOMIC_RELEASE);
    }
}

static void on_member(void *given) {
    Crew *c = given;
    const int number = thread_number();
    if (number) {
        follow(c, number, thread_count());
        return;
    }
    crew = c;
    c->leads(c->given);
    crew = NULL;
    lead(c, NULL, NULL);
}

/* Calls `leads`, whose `run`s are done by a crew. */
static void with_crew(void (*leads)(void *), void *given, int threads) {
    Crew c = {.leads = leads, .given = given};
    if (parallel && threads > 1) parallel(on_member, &c, (unsigned)threads, 0);
    else leads(given);
}

#endif
