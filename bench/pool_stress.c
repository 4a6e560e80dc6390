/* Jobs of random size on the pool, each chunk counted; then the same from two threads at once, and in a forked child.
 *
 * cc -O1 -g -fsanitize=thread -I kernels/csrc bench/pool_stress.c kernels/csrc/pool.c -lpthread -o stress
 * ./stress THREADS JOBS        prints "ok", or what went wrong; tests/kernels/test_pool.py compiles and runs it. */
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_CHUNKS 300

struct job {
    int num_chunks;
    int plain[MAX_CHUNKS]; /* not atomic: a race with the caller's reads is for ThreadSanitizer to see */
    _Atomic int hits[MAX_CHUNKS];
};

static void task(void *arg, int chunk) {
    struct job *job = arg;
    if (chunk < 0 || chunk >= job->num_chunks) {
        printf("chunk %d of a job of %d\n", chunk, job->num_chunks);
        abort();
    }
    /* some chunks last longer, so that the caller is often done before a worker is */
    for (volatile int i = chunk % 8 == 7 ? 3000 : 0; i > 0;) i = i - 1;
    job->plain[chunk] += 1;
    atomic_fetch_add(&job->hits[chunk], 1);
}

static void run_jobs(int num_jobs, unsigned seed) {
    for (int k = 0; k < num_jobs; k++) {
        struct job *job = calloc(1, sizeof *job); /* freed at once, so a late worker would touch freed memory */
        seed = seed * 1664525u + 1013904223u;
        job->num_chunks = 1 + (int)(seed >> 8) % 256;
        pool_run(task, job, job->num_chunks);
        for (int i = 0; i < MAX_CHUNKS; i++)
            if (job->hits[i] != (i < job->num_chunks) || job->plain[i] != job->hits[i]) {
                printf("job %d of %d chunks: chunk %d ran %d times\n", k, job->num_chunks, i, job->hits[i]);
                exit(1);
            }
        free(job);
    }
}

static void *other_caller(void *num_jobs) {
    run_jobs(*(int *)num_jobs, 7);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    int num_threads = atoi(argv[1]), num_jobs = atoi(argv[2]), few = num_jobs / 10 + 1;
    pthread_t other;
    if (pool_init() != 0) return 1;
    pool_set_threads(num_threads);
    run_jobs(num_jobs, 1);
    if (pthread_create(&other, NULL, other_caller, &few) != 0) return 1;
    run_jobs(few, 2);
    pthread_join(other, NULL);
    pool_set_threads(num_threads + 1);
    run_jobs(few, 3);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        run_jobs(few, 4);
        _exit(0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    run_jobs(few, 5);
    pool_set_threads(1);
    if (status != 0) printf("the child of a fork ended with status %d\n", status);
    else puts("ok");
    return status != 0;
}
