/* Which tables of kernels this processor can run. */
#pragma once
#include "dispatch.h"

#define MAX_TABLES 4

/* Fills `tables` with those that were compiled and can run, slowest first, base among them; returns their number. */
int usable_kernels(const struct kernels *tables[MAX_TABLES]);
