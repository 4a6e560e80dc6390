/* Memory for the length of a call, kept for the next one: fresh pages cost more to get than many kernels take to run.
 *
 * [2048, 6144] int4 with 64 tokens on a Xeon (Sapphire Rapids): 0.7 of 3.6 ms were page faults. */
#pragma once
#include <stddef.h>

/* At least num_bytes, on a cache line of its own, contents undefined; NULL without memory. */
void *scratch_take(size_t num_bytes);

/* Gives it back; NULL is allowed. At most SCRATCH_BLOCKS blocks of at most SCRATCH_BYTES each are kept. */
void scratch_give(void *memory);

#define SCRATCH_BLOCKS 6
#define SCRATCH_BYTES ((size_t)4 << 20)
