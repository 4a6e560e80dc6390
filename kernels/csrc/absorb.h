/* Queries into latent space, and attended latents out of it, head by head. */
#pragma once
#include "matmul.h"

struct absorb_job {
    const float *q; /* [tokens, heads, nope] */
    struct matrix kv_b;
    int tokens, heads, nope, rows_per_head;
    float *y; /* [tokens, heads, columns] */
};

/* Weights of one group as f32, in the order of integer.h (plain numbers: of the columns), `offset_of` subtracted. */
INLINE void group_in_field_order(enum kind kind, const struct matrix *w, const uint8_t *row, int g, f32x16 out[4]) {
    if (!is_packed(kind)) {
        if (kind == KIND_F32)
            load_group(out, (const float *)(const void *)row, g * GROUP, w->columns);
        else
            load_group_bf16(out, (const uint16_t *)(const void *)row, g * GROUP, w->columns);
        return;
    }
    uint8_t tail[GROUP];
    const uint8_t *data = group_data(w, row, g, tail);
#if defined(HAS_NEON)
    values64(kind, data, out);
#else
    const i16x64 integers = unpack64(kind, data);
    int16_t in_memory[GROUP];
    float values[GROUP];
    memcpy(in_memory, &integers, sizeof in_memory);
    for (int i = 0; i < GROUP; i++) values[i] = (float)(in_memory[i] - offset_of(kind));
    for (int i = 0; i < 4; i++) out[i] = load16(values + 16 * i);
#endif
}

#if defined(__AVX512VNNI__)
/* acc += factor * weights of a group of int4, 64 columns in the order of group_in_field_order. A permute reads the lowest
 * four bits of a lane: in a table of the sixteen products, so none of the 64 is computed. */
INLINE void add_int4_products(const uint8_t *data, float factor, f32x16 acc[4]) {
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512 products = _mm512_mul_ps(_mm512_set1_ps(factor), values);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(data + 16 * i)));
        const __m512i high = _mm512_srli_epi32(bytes, 4);
        acc[i].part[0] += (f32part)_mm512_permutexvar_ps(bytes, products);
        acc[i + 2].part[0] += (f32part)_mm512_permutexvar_ps(high, products);
    }
}
#endif

/* tokens * groups <= 4: sixteen sums of sixteen lanes, all of AVX-512's registers but those for weights and factors. */
INLINE void absorb_block(enum kind kind, const int tokens, const int groups, const struct absorb_job *job, int head,
                         int token, int group) {
    const struct matrix *w = &job->kv_b;
    const bool plain_scales = w->scale_group == GROUP && !w->half_scales;
    const size_t num_scales = scales_per_row(w);
    f32x16 acc[4][4];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) acc[i / 4][i % 4] = set16(0.0f); /* not memset: they are registers */
    for (int d = 0; d < job->nope; d++) {
        const int row = head * job->rows_per_head + d;
        const uint8_t *data = row_data(w, row);
#pragma GCC unroll 4
        for (int g = 0; g < groups; g++) {
            f32x16 weights[4];
            const int at = (group + g) * group_bytes(kind);
            if (is_packed(kind) && (groups == 1 || at % 64 == 0)) prefetch_ahead(data + at);
            float scale;
            if (plain_scales) /* group_scale without its questions: a tenth of the time */
                memcpy(&scale, w->scales + (row * num_scales + group + g) * 4, 4);
            else
                scale = w->scale_group ? group_scale(w, row, group + g) : row_scale(w, row);
#if defined(__AVX512VNNI__)
            if (kind == KIND_INT4) {
                uint8_t tail[GROUP];
                const uint8_t *bytes = group_data(w, data, group + g, tail);
#pragma GCC unroll 4
                for (int t = 0; t < tokens; t++)
                    add_int4_products(bytes, job->q[((size_t)(token + t) * job->heads + head) * job->nope + d] * scale,
                                      acc[t + g]);
                continue;
            }
#endif
            group_in_field_order(kind, w, data, group + g, weights);
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++) {
                const float q = job->q[((size_t)(token + t) * job->heads + head) * job->nope + d];
                const f32x16 factor = set16(is_packed(kind) ? q * scale : q);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) acc[t + g][i] = add16(acc[t + g][i], mul16(factor, weights[i]));
            }
        }
    }
    const int per_byte = columns_per_byte(kind), per_field = GROUP / per_byte;
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
        for (int g = 0; g < groups; g++) {
            float values[GROUP];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) store16(values + 16 * i, acc[t + g][i]);
            float *y = job->y + ((size_t)(token + t) * job->heads + head) * w->columns;
            for (int i = 0; i < GROUP; i++) {
                const int column = (group + g) * GROUP + i % per_field * per_byte + i / per_field;
                if (column < w->columns) y[column] = values[i];
            }
        }
}

INLINE void absorb_head(enum kind kind, const struct absorb_job *job, int head) {
    const int groups = (job->kv_b.columns + GROUP - 1) / GROUP;
    int token = 0;
    for (; token + 4 <= job->tokens; token += 4)
        for (int g = 0; g < groups; g++) absorb_block(kind, 4, 1, job, head, token, g);
    for (; token < job->tokens; token++) {
        int g = 0;
        for (; g + 4 <= groups; g += 4) absorb_block(kind, 1, 4, job, head, token, g);
        for (; g < groups; g++) absorb_block(kind, 1, 1, job, head, token, g);
    }
}

static void absorb_task(void *arg, int head) {
    const struct absorb_job *job = arg;
    switch (job->kv_b.kind) {
    case KIND_F32: absorb_head(KIND_F32, job, head); break;
    case KIND_BF16: absorb_head(KIND_BF16, job, head); break;
    case KIND_INT8: absorb_head(KIND_INT8, job, head); break;
    case KIND_INT4: absorb_head(KIND_INT4, job, head); break;
    case KIND_INT2: absorb_head(KIND_INT2, job, head); break;
    }
}

static int absorb_query(const float *q, int tokens, int heads, int nope, const struct matrix *kv_b, int rows_per_head,
                        float *y) {
    struct absorb_job job = {q, *kv_b, tokens, heads, nope, rows_per_head, y};
    pool_run(absorb_task, &job, heads);
    return 0;
}

struct expand_job {
    const float *o; /* [tokens, heads, columns] */
    struct matrix kv_b;
    int tokens, heads, nope, rows_per_head;
    enum mode mode;
    float *y; /* [tokens, heads, value rows] */
    _Atomic bool failed;
};

/* All of one head: quantizing takes as long as the product of a single token. */
static void expand_task(void *arg, int head) {
    struct expand_job *job = arg;
    const int columns = job->kv_b.columns, value_dim = job->rows_per_head - job->nope;
    struct batch batch = {0};
    if (batch_make(&batch, job->o + (size_t)head * columns, (size_t)job->heads * columns, job->tokens, columns,
                   job->mode, job->kv_b.kind) == 0) {
        const struct matrix rows =
            matrix_rows(&job->kv_b, head * job->rows_per_head + job->nope, (head + 1) * job->rows_per_head);
        const struct product product = {rows, &batch, job->y + (size_t)head * value_dim, (size_t)job->heads * value_dim,
                                        NULL};
        const int chunk_rows = job->tokens == 1 ? LONG_CHUNK_ROWS : CHUNK_ROWS;
        for (int row = 0; row < value_dim; row += chunk_rows)
            product_rows(&product, row, value_dim - row < chunk_rows ? value_dim : row + chunk_rows);
    } else {
        job->failed = true;
    }
    batch_free(&batch);
}

/* o [tokens, heads, R] -> y [tokens, heads, value rows]; one task a head. */
static int expand_value(const float *o, int tokens, int heads, const struct matrix *kv_b, int rows_per_head, int nope,
                        enum mode mode, float *y) {
    struct expand_job job = {o, *kv_b, tokens, heads, nope, rows_per_head, mode, y, false};
    if (rows_per_head > nope) pool_run(expand_task, &job, heads);
    return job.failed ? -1 : 0;
}
