/* One table of functions for each instruction set; module.c picks one when the extension is loaded.
 *
 * isa.c is compiled once per instruction set, with that set's flags and ISA_NAME = base, avx2, avx512vnni, amxint8 or
 * neondot.
 * It includes every family of kernels and fills the table kernels_<ISA_NAME>. To add a family, say "norm":
 *
 *   1. norm.h       the code, all static, on the lanes of vec.h; intrinsics only under #if __AVX512VNNI__ and the like.
 *                   It is included by isa.c only.
 *   2. dispatch.h   its entry points as members of struct kernels, with plain C types.
 *   3. isa.c        #include "norm.h" and the members' values.
 *   4. bind_norm.c  the Python functions, on the argument checks of bind.h, compiled once without special flags;
 *                   they call active->member(...) and end in an array `PyMethodDef norm_methods[]`.
 *   5. module.c     norm_methods in the list of families; meson.build: bind_norm.c in the list of sources.
 *   6. kernels/_cpu.pyi and the dispatch in kernels/norm.py:  if cpu.active: cpu.active.norm(...) else the NumPy body.
 *
 * Rules: a kernel gives the bits of its NumPy body on every instruction set, for any number of rows and threads. It
 * splits its work with pool_run, allocates nothing it cannot free on every way out, and reads no byte beyond the
 * arrays it was given, whose addresses may be unaligned.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "matrix.h"

/* All matrices are C-contiguous. Rows, counts and ids are checked by the binding. */

struct attention {
    const float *q;                        /* [T, H, key_width] */
    const void *keys, *values;             /* f32, or bfloat16 bit patterns; a head's row of a position begins at */
    ptrdiff_t key_stride, value_stride;    /*   position * stride + head * head_stride elements */
    ptrdiff_t key_head_stride, value_head_stride;
    const void *const *token_keys;         /* [T], each token's own keys, which are its values too; or NULL */
    bool is_bf16;
    const int32_t *rows;                   /* [T, max_rows] or NULL: position j of a token is j */
    const int32_t *counts;                 /* [T], at least 1 */
    int max_rows, num_tokens, num_heads, num_kv_heads, key_width, value_width;
    float scale;
    float *out;                            /* [T, H, value_width] */
};

struct index_scores {
    const float *q, *head_weights;         /* [T, J, width], [T, J] */
    const void *keys;                      /* [S, width] f32, or bfloat16 bit patterns */
    bool is_bf16;
    const int32_t *counts;                 /* [T] */
    int num_tokens, num_heads, width, num_positions;
    float scale;
    float *out;                            /* [T, S] */
};

struct select_top {
    const float *scores;                   /* [T, S] */
    const int32_t *counts;                 /* [T], 0 to S */
    int num_tokens, num_positions, max_rows;
    int32_t *rows, *num;                   /* [T, max_rows], [T] */
};

#define MAX_EXPERTS 1024

struct route {
    const float *x, *gate;                 /* [T, D], [E, D] */
    const float *bias;                     /* [E] for sigmoid scores, NULL for softmax */
    int num_tokens, hidden, num_experts, experts_per_tok, n_group, topk_group;
    bool norm_topk_prob;
    float scale;
    int32_t *ids;                          /* [T, K] */
    float *weights;                        /* [T, K] */
};

struct norm {
    const float *x, *weight;               /* [T, width], [width] */
    const float *bias;                     /* [width] for LayerNorm, NULL for RMSNorm */
    double eps;
    int num_tokens, width;
    float *out;                            /* [T, width] */
};

struct rope {
    const float *x;                        /* [T, num_vectors, width] */
    const float *cos, *sin;                /* [T, width / 2] */
    bool is_interleaved;                   /* pairs (2j, 2j + 1), else (j, j + width / 2) */
    int num_tokens, num_vectors, width;
    float *out;                            /* like x, another array */
};

struct group_rows {
    const float *w;                        /* [num_rows, num_columns] */
    int num_rows, num_columns;
    int group;                             /* columns that share a scale: a multiple of 64, or all */
};

struct fp8_rows {
    const uint8_t *codes;                  /* [num_rows, num_columns], rows of a matrix from first_row on */
    const float *table, *scales;           /* [256]; of the whole matrix, a row of grid_columns for each block_rows */
    int num_rows, num_columns, first_row, block_rows, block_columns, grid_columns;
};

#define INTEGER_STEPS 20000 /* of a task: some 50 us */
#define MULTIPLY_ADD_STEPS 100000 /* of a task: about a millisecond */

struct kernels {
    const char *name;

    /* Each returns 0, or -1 without memory. Shapes as in the NumPy bodies of the same name. */
    int (*matmul)(const struct matrix *w, const float *x, int tokens, enum mode mode, float *y);
    int (*expert_ffn)(const struct expert *experts, int num_experts, const float *x, int tokens, const int32_t *chosen,
                      const float *weights, int num_choices, enum mode mode, float *y);
    int (*absorb_query)(const float *q, int tokens, int heads, int nope, const struct matrix *kv_b, int rows_per_head,
                        float *y);
    int (*expand_value)(const float *o, int tokens, int heads, const struct matrix *kv_b, int rows_per_head, int nope,
                        enum mode mode, float *y);

    int (*attend)(const struct attention *a); /* 0, or -1 when there is no memory; so is route */
    void (*index_scores)(const struct index_scores *a);
    void (*select_top)(const struct select_top *a);
    int (*route)(const struct route *a);
    void (*norm)(const struct norm *a);
    void (*rope)(const struct rope *a);
    void (*read_all)(const void *data, uint32_t *sums, int num_tasks); /* tasks of 1 MiB */
    double (*multiply_add)(float *sums, int num_tasks);
    double (*integer_multiply_add)(int32_t *sums, int num_tasks);
    bool (*group_absmax)(const struct group_rows *a, float *out); /* whether all are finite */
    int (*group_errors)(const struct group_rows *a, const float *scales, int qmax, double *out);
    void (*pack_rows)(const struct group_rows *a, const float *scales, int bits, uint8_t *out);
    void (*decode_fp8)(const struct fp8_rows *a, float *out);
    void (*silu_mul)(const float *gate, const float *up, float *out, ptrdiff_t size);
};

extern const struct kernels kernels_base, kernels_avx2, kernels_avx512vnni, kernels_amxint8,
    kernels_neondot;

/* The table in use. Changed only while no kernel runs (the tests do). */
extern const struct kernels *active;
