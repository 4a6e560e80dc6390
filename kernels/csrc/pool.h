/* A fork-join pool: the caller and its workers take chunks of one job until none is left.
 *
 * Each begins with a range of its own, so that it reads memory in one direction; who is done helps the others.
 * The caller waits only for chunks that were claimed, never for a worker that has not woken up; at worst it does all
 * of them itself. Idle workers spin for about 50 us, then sleep on a futex. A second thread that calls while the pool
 * is busy does its own job alone. After a fork the child starts its own workers at its first job. */
#pragma once

typedef void (*pool_task)(void *job, int chunk);

/* Calls task(job, 0 .. num_chunks-1), each once, in any order, on up to pool_threads() threads. num_chunks < 2^31. */
void pool_run(pool_task task, void *job, int num_chunks);

/* Ends the workers; the next job starts num_threads - 1 new ones. */
void pool_set_threads(int num_threads);
int pool_threads(void);

/* Installs the fork handlers; call once. Returns 0, or an errno. */
int pool_init(void);
