/* A team of threads for a call with many jobs in sequence. It stays together between jobs, because a barrier
 * costs a tenth of starting and joining threads. A waiting thread prefetches the weights of the next product:
 * steps of few rows are bound by memory. */
#ifndef TEAM_H
#define TEAM_H
#include <sched.h>
#include <stddef.h>

#define STREAMS 6           /* codes, scales and minima of a matrix and of its gate */
#define PATIENCE 4096       /* polls, after which a waiting thread yields its core */
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
    Ahead ahead;    /* of the job after `part` */
    uint64_t begun; /* jobs, each of which all threads do */
    uint64_t ended; /* by others than the first thread */
    void (*leads)(void *);
    void *given; /* to `leads` */
} Team;

static _Thread_local Team *team; /* of its first thread */

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
static void lead(Team *c, void (*part)(void *, int, int), void *work) {
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
    else if (team) lead(team, part, work);
    else parallel(on_thread, &job, (unsigned)threads, 0);
}

static void follow(Team *c, int number, int count) {
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
    Team *c = given;
    const int number = thread_number();
    if (number) {
        follow(c, number, thread_count());
        return;
    }
    team = c;
    c->leads(c->given);
    team = NULL;
    lead(c, NULL, NULL);
}

/* Calls `leads`, whose `run`s are done by a team. */
static void with_team(void (*leads)(void *), void *given, int threads) {
    Team c = {.leads = leads, .given = given};
    if (parallel && threads > 1) parallel(on_member, &c, (unsigned)threads, 0);
    else leads(given);
}

#endif
