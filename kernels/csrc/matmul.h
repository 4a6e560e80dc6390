/* Lists of products shared out to the pool, and the plain product. */
#pragma once
#include "pool.h"
#include "rows_amx.h"
#include "rows_avx512.h"
#include "rows_columns.h"
#include "rows_f32.h"
#include "rows_integer.h"
#include "rows_panel.h"

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
#elif defined(__AVX2__)
#define ROWS_SEVERAL(kind, p, begin, end) \
    if (p->x->layout == BY_SIXTEEN) \
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

/* Some tokens of a batch, in the layout that suits their number: a part of a gather. */
struct gathered {
    struct batch *batch;
    const int *tokens; /* of the source; NULL: first_token and those after */
    int first_token;
};

struct gather_job {
    const struct gathered *parts;
    const int *first_chunks; /* [num_parts + 1] */
    const struct batch *source;
    int num_parts;
};

/* One chunk is sixteen tokens: those share cache lines in the layouts that lay tokens side by side. */
static void gather_task(void *arg, int chunk) {
    const struct gather_job *job = arg;
    int part = 0, beyond = job->num_parts; /* the last part that begins at this chunk or before */
    while (beyond - part > 1) {
        const int middle = (part + beyond) / 2;
        if (job->first_chunks[middle] <= chunk)
            part = middle;
        else
            beyond = middle;
    }
    const struct gathered *p = &job->parts[part];
    const int begin = 16 * (chunk - job->first_chunks[part]), left = p->batch->tokens - begin, n = left < 16 ? left : 16;
    int tokens[16];
    for (int i = 0; i < n; i++) tokens[i] = p->tokens ? p->tokens[begin + i] : p->first_token + begin + i;
#if defined(__AMX_INT8__)
    if (p->batch->layout == BY_TILE || p->batch->layout == BY_COLUMN) {
        if (p->batch->layout == BY_TILE)
            set_tile_block(p->batch, begin / 16, job->source, tokens, n);
        else
            set_columns(p->batch, job->source, tokens, n);
        return;
    }
#endif
    for (int i = 0; i < n; i++) batch_copy_token(p->batch, begin + i, job->source, tokens[i]);
}

/* Fills batches, whose shapes are set, from tokens of the source. Their memory is one piece, which the caller gives back
 * with scratch_give. Returns 0, or -1 without memory. */
static int gather(const struct gathered *parts, int num_parts, const struct batch *source, void **memory) {
    int *first_chunks = malloc((num_parts + 1) * sizeof *first_chunks);
    size_t bytes = 0;
    for (int i = 0; i < num_parts; i++) bytes += batch_bytes(parts[i].batch);
    char *at = *memory = scratch_take(bytes);
    if (!first_chunks || !at) {
        free(first_chunks);
        return -1;
    }
    first_chunks[0] = 0;
    for (int i = 0; i < num_parts; i++) {
        batch_place(parts[i].batch, at);
        at += batch_bytes(parts[i].batch);
        first_chunks[i + 1] = first_chunks[i] + (parts[i].batch->tokens + 15) / 16;
    }
    struct gather_job job = {parts, first_chunks, source, num_parts};
    pool_run(gather_task, &job, first_chunks[num_parts]);
    free(first_chunks);
    return 0;
}

/* The shape that suits `tokens` of a batch. */
static struct batch gathered_shape(const struct batch *source, int tokens, enum kind kind) {
    return batch_shape(source->layout == AS_FLOATS ? AS_FLOATS : layout_for(tokens, kind), tokens, source->columns);
}

/* All rows of x in the layout that suits their number. */
static int batch_make(struct batch *batch, const float *x, size_t stride, int tokens, int columns, enum mode mode,
                      enum kind kind) {
    if (batch_from_rows(batch, x, stride, tokens, columns, mode, kind) != 0) return -1;
    if (batch->layout == AS_FLOATS || layout_for(tokens, kind) == BY_TOKEN) return 0;
    struct batch single = *batch;
    *batch = gathered_shape(&single, tokens, kind);
    const struct gathered all = {batch, NULL, 0};
    void *memory = NULL;
    const int failed = gather(&all, 1, &single, &memory);
    batch->memory = memory;
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
