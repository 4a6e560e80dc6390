#define _GNU_SOURCE
#include "scratch.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#define HUGE_PAGE ((size_t)2 << 20)

/* In front of what the caller gets, a cache line. */
struct block {
    _Alignas(64) size_t num_bytes; /* with this line */
};

/* Each holds a block that nobody uses, or NULL. Taking is an exchange, so threads and forks need no lock. */
static _Atomic(struct block *) kept[SCRATCH_BLOCKS];

static struct block *new_block(size_t num_bytes) {
    const size_t page = num_bytes > SCRATCH_BYTES ? HUGE_PAGE : 64; /* one fault for 2 MiB where the system allows it */
    num_bytes = (num_bytes + page - 1) / page * page;
    struct block *block = aligned_alloc(page, num_bytes);
    if (!block) return NULL;
#ifdef __linux__
    if (page == HUGE_PAGE) madvise(block, num_bytes, MADV_HUGEPAGE);
#endif
    block->num_bytes = num_bytes;
    return block;
}

void *scratch_take(size_t num_bytes) {
    if (num_bytes > SIZE_MAX / 2) return NULL;
    num_bytes += sizeof(struct block);
    for (int i = 0; num_bytes <= SCRATCH_BYTES && i < SCRATCH_BLOCKS; i++) {
        struct block *block = atomic_exchange(&kept[i], NULL);
        if (!block) continue;
        if (block->num_bytes >= num_bytes) return block + 1;
        block = atomic_exchange(&kept[i], block);
        free(block); /* what somebody else put there meanwhile */
    }
    struct block *block = new_block(num_bytes);
    return block ? block + 1 : NULL;
}

void scratch_give(void *memory) {
    if (!memory) return;
    struct block *block = (struct block *)memory - 1;
    if (block->num_bytes <= SCRATCH_BYTES) /* the newest comes first, the oldest falls off the end */
        for (int i = 0; block && i < SCRATCH_BLOCKS; i++) block = atomic_exchange(&kept[i], block);
    free(block);
}
