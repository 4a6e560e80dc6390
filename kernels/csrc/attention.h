/* Softmax attention; same bits as glm_gpu.kernels.attention.
 *
 * Three passes over a block of tokens, so that the work of a single token still splits over many threads: products
 * of queries and keys (a task: 64 rows of a token, all heads); softmax (a head of a token); weighted sums of values
 * (up to 16 heads that share a value, 64 columns). In the first and last a row is widened once for all heads. */
#pragma once
#include <math.h>
#include <stdlib.h>

#include "dispatch.h"
#include "pool.h"
#include "tile.h"
#include "vec_exp.h"

#define SCORE_ROWS 64       /* rows of a score task */
#define VALUE_ROWS 64       /* rows widened at a time: 64 x 64 f32 are 16 KiB */
#define VALUE_COLUMNS 64
#define VALUE_HEADS 16
#define SCORE_BYTES (4 << 20) /* scores of a block of tokens, kept near the second-level cache */

/* Accumulators are VALUE_STEP heads x VALUE_LANES f32x16: what the register file holds beside a row. */
#if VEC_BYTES == 64
#define VALUE_STEP 4
#define VALUE_LANES 4
#elif VEC_BYTES == 32
#define VALUE_STEP 4
#define VALUE_LANES 1
#else
#define VALUE_STEP 2
#define VALUE_LANES 1
#endif

struct attention_pass {
    const struct attention *a;
    int first_token, num_tokens;
    int padded;    /* rows of a score line, a multiple of 16 */
    int row_tasks; /* score tasks of a token */
    int head_tasks, column_tasks; /* value tasks of a key head, of a head block */
    float *scores; /* [num_tokens, H, padded] */
    float *sums;   /* [num_tokens, H] */
};

INLINE ptrdiff_t position_of(const struct attention *a, int token, int j) {
    return a->rows ? a->rows[(ptrdiff_t)token * a->max_rows + j] : j;
}

INLINE const void *keys_of(const struct attention *a, int token) {
    return a->token_keys ? a->token_keys[token] : a->keys;
}

INLINE const void *values_of(const struct attention *a, int token) {
    return a->token_keys ? a->token_keys[token] : a->values;
}

INLINE float *score_line(const struct attention_pass *pass, int token, int head) {
    return pass->scores + ((ptrdiff_t)(token - pass->first_token) * pass->a->num_heads + head) * pass->padded;
}

INLINE void score_tile(const struct attention_pass *pass, int token, int first_row, struct tile *tile) {
    const struct attention *a = pass->a;
    int share = a->num_heads / a->num_kv_heads;
    int last = a->counts[token] - 1;
    const void *keys = keys_of(a, token);
    float room[TILE_COLUMNS] __attribute__((aligned(64)));
    for (int kv = 0; kv < a->num_kv_heads; kv++)
        for (int column = 0; column < a->key_width; column += TILE_COLUMNS) {
            int width = a->key_width - column < TILE_COLUMNS ? a->key_width - column : TILE_COLUMNS;
            ptrdiff_t offsets[ROWS];
            for (int i = 0; i < ROWS; i++) /* the last row stands in for those beyond it */
                offsets[i] = position_of(a, token, first_row + i < last ? first_row + i : last) * a->key_stride +
                             (ptrdiff_t)kv * a->key_head_stride + column;
            load_tile(tile, keys, a->is_bf16, offsets, width);
            for (int i = 0; i < ROWS && first_row + ROWS + i <= last; i++)
                prefetch_row(keys, a->is_bf16,
                             position_of(a, token, first_row + ROWS + i) * a->key_stride +
                                 (ptrdiff_t)kv * a->key_head_stride + column,
                             width);
            for (int head = kv * share; head < (kv + 1) * share; head++) {
                const float *q = a->q + ((ptrdiff_t)token * a->num_heads + head) * a->key_width + column;
                float *score = score_line(pass, token, head) + first_row;
                f32x16 acc = column ? load16(score) : set16(0.0f);
                store16(score, dot_rows16(acc, whole_groups(q, width, room), tile->rows, ROUND_UP(width, 64)));
            }
        }
}

static void score_task(void *job, int chunk) {
    const struct attention_pass *pass = job;
    int token = pass->first_token + chunk / pass->row_tasks;
    int first = chunk % pass->row_tasks * SCORE_ROWS, end = first + SCORE_ROWS;
    struct tile tile;
    for (int row = first; row < end && row < pass->a->counts[token]; row += ROWS) score_tile(pass, token, row, &tile);
}

static void softmax_task(void *job, int chunk) {
    const struct attention_pass *pass = job;
    const struct attention *a = pass->a;
    int token = pass->first_token + chunk / a->num_heads, head = chunk % a->num_heads;
    float *score = score_line(pass, token, head);
    int count = a->counts[token], padded = ROUND_UP(count, 16);
    f32x16 scale = set16(a->scale), best = set16(-INFINITY), sum = set16(0.0f);
    for (int j = 0; j < padded; j += 16) { /* beyond count the last row's score stands again: no other maximum */
        f32x16 scaled = mul16(load16(score + j), scale);
        store16(score + j, scaled);
        best = max16(best, scaled);
    }
    for (int j = count; j < padded; j++) score[j] = -INFINITY;
    float lanes[16], top = -INFINITY;
    store16(lanes, best);
    for (int i = 0; i < 16; i++) top = lanes[i] > top ? lanes[i] : top;
    for (int j = 0; j < padded; j += 16) {
        f32x16 e = exp16(sub16(load16(score + j), set16(top)));
        store16(score + j, e);
        sum = add16(sum, e);
    }
    pass->sums[chunk] = fold16(sum);
}

/* acc[head][column] += weight[head][j] * row j, for VALUE_LANES * 16 columns. */
INLINE void add_rows(float (*acc)[VALUE_COLUMNS], float *const weights[], float (*rows)[VALUE_COLUMNS],
                     int num_rows, int num_heads, int column) {
    f32x16 sum[VALUE_STEP][VALUE_LANES];
    for (int h = 0; h < num_heads; h++)
        for (int v = 0; v < VALUE_LANES; v++) sum[h][v] = load16(acc[h] + column + 16 * v);
    for (int j = 0; j < num_rows; j++) {
        f32x16 row[VALUE_LANES];
        for (int v = 0; v < VALUE_LANES; v++) row[v] = load16(rows[j] + column + 16 * v);
        for (int h = 0; h < num_heads; h++) {
            f32x16 weight = set16(weights[h][j]);
            for (int v = 0; v < VALUE_LANES; v++) sum[h][v] = add16(sum[h][v], mul16(weight, row[v]));
        }
    }
    for (int h = 0; h < num_heads; h++)
        for (int v = 0; v < VALUE_LANES; v++) store16(acc[h] + column + 16 * v, sum[h][v]);
}

INLINE ptrdiff_t value_offset(const struct attention *a, int token, int j, int kv) {
    return position_of(a, token, j) * a->value_stride + (ptrdiff_t)kv * a->value_head_stride;
}

static void value_task(void *job, int chunk) {
    const struct attention_pass *pass = job;
    const struct attention *a = pass->a;
    int share = a->num_heads / a->num_kv_heads;
    int column = chunk % pass->column_tasks * VALUE_COLUMNS;
    chunk /= pass->column_tasks;
    int block = chunk % pass->head_tasks * VALUE_HEADS;
    chunk /= pass->head_tasks;
    int kv = chunk % a->num_kv_heads, token = pass->first_token + chunk / a->num_kv_heads;
    int first_head = kv * share + block;
    int num_heads = share - block < VALUE_HEADS ? share - block : VALUE_HEADS;
    int width = a->value_width - column < VALUE_COLUMNS ? a->value_width - column : VALUE_COLUMNS;
    const void *values = values_of(a, token);

    float acc[VALUE_HEADS][VALUE_COLUMNS] __attribute__((aligned(64))) = {{0}};
    float rows[VALUE_ROWS][VALUE_COLUMNS] __attribute__((aligned(64)));
    int count = a->counts[token];
    for (int first = 0; first < count; first += VALUE_ROWS) {
        int num_rows = count - first < VALUE_ROWS ? count - first : VALUE_ROWS;
        for (int j = 0; j < num_rows; j++)
            widen_row(rows[j], values, a->is_bf16, value_offset(a, token, first + j, kv) + column, width);
        for (int j = first + VALUE_ROWS; j < count && j < first + 2 * VALUE_ROWS; j++)
            prefetch_row(values, a->is_bf16, value_offset(a, token, j, kv) + column, width);
        float *weights[VALUE_HEADS];
        for (int h = 0; h < num_heads; h++) weights[h] = score_line(pass, token, first_head + h) + first;
        for (int c = 0; c < VALUE_COLUMNS; c += 16 * VALUE_LANES) {
            int h = 0;
            for (; h + VALUE_STEP <= num_heads; h += VALUE_STEP)
                add_rows(acc + h, weights + h, rows, num_rows, VALUE_STEP, c);
            for (; h < num_heads; h++) add_rows(acc + h, weights + h, rows, num_rows, 1, c);
        }
    }
    for (int h = 0; h < num_heads; h++) {
        ptrdiff_t line = (ptrdiff_t)token * a->num_heads + first_head + h;
        f32x16 sum = set16(pass->sums[line - (ptrdiff_t)pass->first_token * a->num_heads]);
        for (int c = 0; c < width; c += 16) {
            f32x16 result = div16(load16(acc[h] + c), sum);
            store16_head(a->out + line * a->value_width + column + c, result, width - c < 16 ? width - c : 16);
        }
    }
}

static int attend(const struct attention *a) {
    int longest = 0;
    for (int t = 0; t < a->num_tokens; t++)
        if (a->counts[t] > longest) longest = a->counts[t];
    int share = a->num_heads / a->num_kv_heads;
    struct attention_pass pass = {
        .a = a,
        .padded = ROUND_UP(longest, 16),
        .row_tasks = ROUND_UP(longest, SCORE_ROWS) / SCORE_ROWS,
        .head_tasks = ROUND_UP(share, VALUE_HEADS) / VALUE_HEADS,
        .column_tasks = ROUND_UP(a->value_width, VALUE_COLUMNS) / VALUE_COLUMNS,
    };
    size_t token_bytes = (size_t)a->num_heads * pass.padded * sizeof(float);
    int block = token_bytes < SCORE_BYTES ? (int)(SCORE_BYTES / token_bytes) : 1;
    if (block > a->num_tokens) block = a->num_tokens;
    pass.scores = malloc(block * (token_bytes + a->num_heads * sizeof(float)));
    if (!pass.scores) return -1;
    pass.sums = pass.scores + block * (token_bytes / sizeof(float));
    for (int t = 0; t < a->num_tokens; t += block) {
        pass.first_token = t;
        pass.num_tokens = a->num_tokens - t < block ? a->num_tokens - t : block;
        pool_run(score_task, &pass, pass.num_tokens * pass.row_tasks);
        pool_run(softmax_task, &pass, pass.num_tokens * a->num_heads);
        pool_run(value_task, &pass, pass.num_tokens * a->num_kv_heads * pass.head_tasks * pass.column_tasks);
    }
    free(pass.scores);
    return 0;
}
