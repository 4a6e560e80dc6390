/* Lists of products shared out to the pool, and the plain product. */
#pragma once
#include "pool.h"
#include "rows_amx.h"
#include "rows_avx512.h"
#include "rows_columns.h"
#include "rows_f32.h"
#include "rows_integer.h"

/* Rows begin .. end-1 for all tokens; at most CHUNK_ROWS rows for several tokens. One function for each kind: its loops
 * are unrolled. */
#if defined(__AMX_INT8__)
#define ROWS_SEVERAL(kind, p, begin, end) \
    if (p->x->layout == BY_TILE) \
        rows_by_tile(kind, p, begin, end); \
    else if (p->x->layout == BY_COLUMN) \
        rows_by_column(kind, p, begin, end); \
    else if (p->x->layout == BY_DIGIT && kind == KIND_INT4) \
        rows_by_digit(p, begin, end); \
    else
#elif defined(__AVX512VNNI__)
#define ROWS_SEVERAL(kind, p, begin, end) \
    if (p->x->layout == BY_DIGIT && kind == KIND_INT4) \
        rows_by_digit(p, begin, end); \
    else if (p->x->layout == BY_FOUR) \
        rows_by_four(kind, p, begin, end); \
    else if (p->x->layout == BY_SIXTEEN) \
        rows_by_sixteen(kind, p, begin, end); \
    else
#else
#define ROWS_SEVERAL(kind, p, begin, end)
#endif
#define DEFINE_ROWS(name, kind) \
    static __attribute__((noinline)) void name(const struct product *p, int begin, int end) { \
        if (p->x->layout == AS_FLOATS) \
            rows_as_floats(kind, p, begin, end); \
        else \
            ROWS_SEVERAL(kind, p, begin, end) rows_by_token(kind, p, begin, end); \
    }
DEFINE_ROWS(rows_int8, KIND_INT8)
DEFINE_ROWS(rows_int4, KIND_INT4)
DEFINE_ROWS(rows_int2, KIND_INT2)

static void product_rows(const struct product *p, int begin, int end) {
    switch (p->w.kind) {
    case KIND_F32: rows_as_floats(KIND_F32, p, begin, end); break;
    case KIND_BF16: rows_as_floats(KIND_BF16, p, begin, end); break;
    case KIND_INT8: rows_int8(p, begin, end); break;
    case KIND_INT4: rows_int4(p, begin, end); break;
    case KIND_INT2: rows_int2(p, begin, end); break;
    }
}

/* Products of equally many rows, as one job. */
struct product_job {
    const struct product *products;
    int chunk_rows, chunks_each;
};

static void product_task(void *arg, int chunk) {
    const struct product_job *job = arg;
    const struct product *p = job->products + chunk / job->chunks_each;
    const int begin = chunk % job->chunks_each * job->chunk_rows;
    product_rows(p, begin, p->w.rows - begin < job->chunk_rows ? p->w.rows : begin + job->chunk_rows);
}

static void run_products(const struct product *products, int num_products) {
    if (num_products == 0) return;
    const int rows = products[0].w.rows;
    bool may_be_long = (size_t)rows * num_products >= (size_t)8 * LONG_CHUNK_ROWS * pool_threads();
    bool by_column = true;
    for (int i = 0; i < num_products; i++) {
        by_column &= products[i].x->layout == BY_COLUMN;
        may_be_long &= products[i].x->layout == BY_COLUMN || products[i].x->tokens == 1;
    }
    const int chunk_rows = may_be_long ? LONG_CHUNK_ROWS : by_column ? COLUMN_ROWS : CHUNK_ROWS;
    struct product_job job = {products, chunk_rows, (rows + chunk_rows - 1) / chunk_rows};
    pool_run(product_task, &job, num_products * job.chunks_each);
}

/* Quantizing: one chunk a token. */
struct token_job {
    struct batch *batch;
    const float *x;
    size_t stride;
    enum mode mode;
    enum kind kind;
};

static void token_task(void *arg, int token) {
    const struct token_job *job = arg;
    batch_set_token(job->batch, token, job->x + token * job->stride, job->mode, job->kind);
}

/* All rows of x (f32, `stride` apart) as a batch for weights of this kind, in the layout of single tokens. */
static int batch_from_rows(struct batch *batch, const float *x, size_t stride, int tokens, int columns, enum mode mode,
                           enum kind kind) {
    bool floats = mode == MODE_F32 || !is_packed(kind);
    if (batch_create(batch, floats ? AS_FLOATS : BY_TOKEN, tokens, columns) != 0) return -1;
    struct token_job job = {batch, x, stride, mode, kind};
    pool_run(token_task, &job, tokens);
    return 0;
}

struct gather_job {
    struct batch *batch;
    const struct batch *source;
    const int *tokens;
};

/* One chunk is sixteen tokens: those share cache lines in the layouts that lay tokens side by side. */
static void gather_task(void *arg, int chunk) {
    const struct gather_job *job = arg;
    for (int token = 16 * chunk; token < 16 * chunk + 16 && token < job->batch->tokens; token++)
        batch_copy_token(job->batch, token, job->source, job->tokens ? job->tokens[token] : token);
}

/* Some tokens of a batch (all in order: tokens = NULL), in the layout that suits their number. */
static int batch_gather(struct batch *batch, const struct batch *source, const int *tokens, int num_tokens,
                        enum kind kind) {
    enum layout layout = source->layout == AS_FLOATS ? AS_FLOATS : layout_for(num_tokens, kind);
    if (batch_create(batch, layout, num_tokens, source->columns) != 0) return -1;
    struct gather_job job = {batch, source, tokens};
    pool_run(gather_task, &job, (num_tokens + 15) / 16);
    return 0;
}

/* All rows of x in the layout that suits their number. */
static int batch_make(struct batch *batch, const float *x, size_t stride, int tokens, int columns, enum mode mode,
                      enum kind kind) {
    if (batch_from_rows(batch, x, stride, tokens, columns, mode, kind) != 0) return -1;
    if (batch->layout == AS_FLOATS || layout_for(tokens, kind) == BY_TOKEN) return 0;
    struct batch single = *batch;
    int failed = batch_gather(batch, &single, NULL, tokens, kind);
    batch_free(&single);
    return failed;
}

static int matmul(const struct matrix *w, const float *x, int tokens, enum mode mode, float *y) {
    struct batch batch = {0};
    if (batch_make(&batch, x, w->columns, tokens, w->columns, mode, w->kind) != 0) {
        batch_free(&batch);
        return -1;
    }
    struct product product = {*w, &batch, y, w->rows, NULL};
    run_products(&product, 1);
    batch_free(&batch);
    return 0;
}
