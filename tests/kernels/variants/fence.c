#define _GNU_SOURCE
#include "fence.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_MAPS 128 /* of one case: an array of matrices is the most */

static struct map {
    void *start;
    size_t bytes;
} maps[MAX_MAPS];
static int num_maps;

void *fenced(size_t bytes, size_t slack) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t inside = (bytes + slack + page - 1) / page * page;
    char *start = mmap(NULL, inside + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || num_maps == MAX_MAPS || mprotect(start + inside, page, PROT_NONE) != 0) {
        perror("fenced memory");
        exit(2);
    }
    maps[num_maps++] = (struct map){start, inside + page};
    return start + inside - slack - bytes;
}

void release_fenced(void) {
    while (num_maps > 0) {
        num_maps--;
        munmap(maps[num_maps].start, maps[num_maps].bytes);
    }
}
