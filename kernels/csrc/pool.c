#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MAX_THREADS 256
#define SPINS 2000 /* pauses before a sleep: about 50 us at 40 cycles a pause; a longer spin gains nothing on a busy host */

typedef _Atomic uint32_t word;

/* Chunks that lie behind each other and that one thread takes from the first on, until others help. */
struct range {
    _Alignas(64) _Atomic uint64_t ticket; /* job number << 32 | chunks not yet claimed */
};

static struct {
    /* Each on its own cache line: workers poll generation while others count in their range and done. */
    _Alignas(64) word generation; /* number of the newest job; what sleeping workers wait on */
    _Alignas(64) word done;       /* finished chunks of the current job */
    _Alignas(64) word sleepers;
    word caller_sleeps;
    _Atomic(pool_task) task; /* null tells the workers to end */
    _Atomic(void *) job;
    _Atomic int num_chunks;
    _Atomic int num_ranges;
    _Atomic int num_threads;
    int num_workers;
    word first_generation; /* the newest job when workers were started last; one that misses a job does no harm */
    pthread_t workers[MAX_THREADS];
    pthread_mutex_t busy; /* held by the one caller whose job is running */
    struct range ranges[MAX_THREADS]; /* of the caller, then of each worker */
} pool = {.num_threads = 1, .busy = PTHREAD_MUTEX_INITIALIZER};

static void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* yield is a no-op on most cores, isb waits about as long as x86's pause */
#endif
}

#ifdef __linux__
static void sleep_while(word *w, uint32_t value) {
    syscall(SYS_futex, w, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}
static void wake(word *w) { syscall(SYS_futex, w, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0); }
static void reset_sleep(void) {}
#else
static pthread_mutex_t sleep_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleep_condition = PTHREAD_COND_INITIALIZER;
static void sleep_while(word *w, uint32_t value) {
    pthread_mutex_lock(&sleep_mutex);
    while (atomic_load(w) == value) pthread_cond_wait(&sleep_condition, &sleep_mutex);
    pthread_mutex_unlock(&sleep_mutex);
}
static void wake(word *w) {
    (void)w;
    pthread_mutex_lock(&sleep_mutex);
    pthread_cond_broadcast(&sleep_condition);
    pthread_mutex_unlock(&sleep_mutex);
}
static void reset_sleep(void) {
    pthread_mutex_init(&sleep_mutex, NULL);
    pthread_cond_init(&sleep_condition, NULL);
}
#endif

/* The first chunk of a range: each of `num_ranges` has equally many, or one more. */
static int range_begin(int range, int num_ranges, int num_chunks) {
    return (int)((int64_t)num_chunks * range / num_ranges);
}

/* Takes the chunks of a thread's own range in order, so that what it asks of memory ahead is what it needs next; then what
 * others have left. A claim is a compare-and-swap that takes one chunk of exactly this job. The caller publishes the next
 * job only after every claimed chunk is done, so a late worker, whatever task it read, can never run a chunk with another
 * job's task. */
static void work(uint32_t generation, int own, int num_ranges, pool_task task, void *job, int num_chunks) {
    for (int i = 0; i < num_ranges; i++) {
        const int range = (own + i) % num_ranges, end = range_begin(range + 1, num_ranges, num_chunks);
        _Atomic uint64_t *left = &pool.ranges[range].ticket;
        uint64_t ticket = atomic_load_explicit(left, memory_order_acquire);
        while ((uint32_t)(ticket >> 32) == generation && (uint32_t)ticket != 0) {
            if (!atomic_compare_exchange_weak_explicit(left, &ticket, ticket - 1, memory_order_acq_rel,
                                                       memory_order_acquire))
                continue;
            task(job, end - (int)(uint32_t)ticket);
            atomic_fetch_add(&pool.done, 1);
            if (atomic_load(&pool.caller_sleeps)) wake(&pool.done);
            ticket = atomic_load_explicit(left, memory_order_acquire);
        }
    }
}

static void *worker_main(void *arg) {
    const int own = (int)(uintptr_t)arg; /* range */
    uint32_t seen = atomic_load(&pool.first_generation), generation;
    for (;;) {
        int spins = 0;
        while ((generation = atomic_load_explicit(&pool.generation, memory_order_acquire)) == seen) {
            if (++spins < SPINS) {
                pause_cpu();
                continue;
            }
            /* The caller bumps generation, then reads sleepers; we count ourselves, then re-read generation (both
             * sequentially consistent, and the futex compares again), so one of the two sees the other. */
            atomic_fetch_add(&pool.sleepers, 1);
            if (atomic_load(&pool.generation) == seen) sleep_while(&pool.generation, seen);
            atomic_fetch_sub(&pool.sleepers, 1);
            spins = 0;
        }
        seen = generation;
        pool_task task = atomic_load_explicit(&pool.task, memory_order_relaxed);
        void *job = atomic_load_explicit(&pool.job, memory_order_relaxed);
        int num_chunks = atomic_load_explicit(&pool.num_chunks, memory_order_relaxed);
        int num_ranges = atomic_load_explicit(&pool.num_ranges, memory_order_relaxed);
        if (!task) return NULL;
        work(generation, own, num_ranges, task, job, num_chunks);
    }
}

static uint32_t publish(pool_task task, void *job, int num_chunks) {
    uint32_t generation = atomic_load_explicit(&pool.generation, memory_order_relaxed) + 1;
    atomic_store_explicit(&pool.task, task, memory_order_relaxed);
    atomic_store_explicit(&pool.job, job, memory_order_relaxed);
    const int num_ranges = pool.num_workers + 1;
    atomic_store_explicit(&pool.num_chunks, num_chunks, memory_order_relaxed);
    atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.num_ranges, num_ranges, memory_order_relaxed);
    for (int i = 0; i < num_ranges; i++) {
        const int size = range_begin(i + 1, num_ranges, num_chunks) - range_begin(i, num_ranges, num_chunks);
        atomic_store_explicit(&pool.ranges[i].ticket, (uint64_t)generation << 32 | (uint32_t)size, memory_order_release);
    }
    atomic_store(&pool.generation, generation);
    if (atomic_load(&pool.sleepers)) wake(&pool.generation);
    return generation;
}

static void start_workers(void) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* workers inherit this: signals stay with the program's own threads */
    atomic_store(&pool.first_generation, atomic_load(&pool.generation));
    while (pool.num_workers < pool.num_threads - 1) {
        /* A refused thread (ulimit, cgroup pids) costs speed, not results. */
        if (pthread_create(&pool.workers[pool.num_workers], NULL, worker_main,
                           (void *)(uintptr_t)(pool.num_workers + 1)))
            break;
        pool.num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

static void end_workers(void) {
    if (pool.num_workers == 0) return;
    publish(NULL, NULL, 0);
    while (pool.num_workers > 0) pthread_join(pool.workers[--pool.num_workers], NULL);
}

void pool_run(pool_task task, void *job, int num_chunks) {
    if (num_chunks <= 0) return;
    if (num_chunks == 1 || pthread_mutex_trylock(&pool.busy) != 0) {
        for (int i = 0; i < num_chunks; i++) task(job, i);
        return;
    }
    if (pool.num_workers < pool.num_threads - 1) start_workers();
    if (pool.num_workers == 0) {
        for (int i = 0; i < num_chunks; i++) task(job, i);
    } else {
        uint32_t generation = publish(task, job, num_chunks), done;
        work(generation, 0, pool.num_workers + 1, task, job, num_chunks);
        for (int spins = 0; (done = atomic_load(&pool.done)) != (uint32_t)num_chunks;) {
            if (++spins < SPINS) {
                pause_cpu();
                continue;
            }
            atomic_store(&pool.caller_sleeps, 1); /* the same two-sided check as in worker_main */
            if ((done = atomic_load(&pool.done)) != (uint32_t)num_chunks) sleep_while(&pool.done, done);
            atomic_store(&pool.caller_sleeps, 0);
        }
    }
    pthread_mutex_unlock(&pool.busy);
}

void pool_set_threads(int num_threads) {
    if (num_threads < 1) num_threads = 1;
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    pthread_mutex_lock(&pool.busy);
    if (num_threads != pool.num_threads) end_workers();
    pool.num_threads = num_threads;
    pthread_mutex_unlock(&pool.busy);
}

int pool_threads(void) { return pool.num_threads; }

/* The fork waits until no job runs. The child has no workers: it forgets them and starts new ones at its first job. */
static void before_fork(void) { pthread_mutex_lock(&pool.busy); }
static void after_fork_parent(void) { pthread_mutex_unlock(&pool.busy); }
static void after_fork_child(void) {
    pool.num_workers = 0;
    atomic_store(&pool.sleepers, 0);
    reset_sleep();
    pthread_mutex_init(&pool.busy, NULL);
}

int pool_init(void) { return pthread_atfork(before_fork, after_fork_parent, after_fork_child); }
