/* Test inputs from a fixed seed, and the comparison of one call on every instruction set. */
#pragma once
#include <stdio.h>

#include "dispatch.h"
#include "fence.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* A number from 0 to n - 1. Calls inside an initializer are made in order, as GCC and Clang do. */
int below(int n);
uint8_t any_byte(void);

/* Fenced arrays, all of them unmapped by the check that follows. */

/* Numbers in blocks of 64, the groups of quantized activations; some are all zero, too small to be quantized, or of one
 * magnitude, which makes every integer the largest. */
float *floats(size_t n);
void *floats_or_bf16(size_t n, bool is_bf16);
float *some_scales(size_t n);

/* counts[t] within low .. high, the first one high */
int32_t *some_counts(int n, int low, int high);

struct format {
    const char *name;
    enum kind kind;
    int group;
};

/* A weight at any address. A row in four is one byte over and over: the integers of largest magnitude, -128 too. */
struct matrix some_matrix(struct format format, int rows, int columns, bool half_scales);

/* One call of a kernel, all of whose results are `bytes` at `out`. Returns what the kernel returns. */
typedef int (*call)(const struct kernels *k, const void *arguments);

void check(const char *what, call run, const void *arguments, void *out, size_t bytes);

#define CHECK(run, arguments, out, bytes, ...) \
    do { \
        char what[160]; \
        snprintf(what, sizeof what, __VA_ARGS__); \
        check(what, run, arguments, out, bytes); \
    } while (0)

void check_matmul(void);
void check_ffn(void);
void check_latent(void);
void check_attend(void);
void check_indexer(void);
void check_route(void);
void check_elementwise(void);
void check_quantize(void);
void check_fp8(void);
