/* Test arrays that end where a page without access begins: a kernel that reads or writes beyond one crashes. */
#pragma once
#include <stddef.h>

/* `bytes` of memory, zeroed, whose end is `slack` bytes before the forbidden page; its start is aligned to nothing. */
void *fenced(size_t bytes, size_t slack);

/* Unmaps all of them. */
void release_fenced(void);
