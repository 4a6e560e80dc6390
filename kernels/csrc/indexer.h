/* Index scores and the choice of the best positions; same bits as glm_gpu.kernels.indexer. */
#pragma once
#include <math.h>

#include "dispatch.h"
#include "pool.h"
#include "tile.h"

#define INDEX_ROWS 64 /* positions of a task */

static void index_tile(const struct index_scores *a, int token, int first, struct tile *tile) {
    int num_positions = a->num_positions - first < ROWS ? a->num_positions - first : ROWS;
    int seen = a->counts[token] - first;
    float room[TILE_COLUMNS] __attribute__((aligned(64)));
    f32x16 total = set16(0.0f);
    int loaded = -1; /* the column the tile begins at: one load serves all heads unless keys are wider than a tile */
    for (int head = 0; seen > 0 && head < a->num_heads; head++) {
        f32x16 dot = set16(0.0f);
        for (int column = 0; column < a->width; column += TILE_COLUMNS) {
            int width = a->width - column < TILE_COLUMNS ? a->width - column : TILE_COLUMNS;
            if (loaded != column) {
                ptrdiff_t offsets[ROWS];
                for (int i = 0; i < ROWS; i++)
                    offsets[i] = (ptrdiff_t)(first + (i < num_positions ? i : 0)) * a->width + column;
                load_tile(tile, a->keys, a->is_bf16, offsets, width);
                loaded = column;
            }
            const float *q = a->q + ((ptrdiff_t)token * a->num_heads + head) * a->width + column;
            dot = dot_rows16(dot, whole_groups(q, width, room), tile->rows, ROUND_UP(width, 64));
        }
        f32x16 positive = max16(mul16(dot, set16(a->scale)), set16(0.0f));
        total = add16(total, mul16(set16(a->head_weights[(ptrdiff_t)token * a->num_heads + head]), positive));
    }
    float scores[ROWS];
    store16(scores, total);
    float *out = a->out + (ptrdiff_t)token * a->num_positions + first;
    for (int i = 0; i < num_positions; i++) out[i] = i < seen ? scores[i] : -INFINITY;
}

static void index_task(void *job, int chunk) {
    const struct index_scores *a = job;
    int tasks = ROUND_UP(a->num_positions, INDEX_ROWS) / INDEX_ROWS;
    int token = chunk / tasks, first = chunk % tasks * INDEX_ROWS;
    struct tile tile;
    for (int row = first; row < first + INDEX_ROWS && row < a->num_positions; row += ROWS)
        index_tile(a, token, row, &tile);
}

static void index_scores(const struct index_scores *a) {
    int tasks = ROUND_UP(a->num_positions, INDEX_ROWS) / INDEX_ROWS;
    pool_run(index_task, (void *)a, a->num_tokens * tasks);
}

/* Unsigned integers in the order of the floats; -0 and +0 are one value. */
INLINE uint32_t ordered(float score) {
    float positive_zero = score + 0.0f;
    uint32_t bits;
    memcpy(&bits, &positive_zero, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The k-th largest of n ordered scores, 1 <= k <= n: three counts of its bits from the top, 11, 11 and 10 at a time.
 * num_equal: how many of those that equal it are among the k largest. */
static uint32_t kth_largest(const float *scores, int n, int k, int *num_equal) {
    uint32_t prefix = 0;
    int low = 32;
    for (int digit = 0; digit < 3; digit++) {
        int num_bits = digit < 2 ? 11 : 10;
        int counts[1 << 11] = {0};
        int high = low;
        low -= num_bits;
        for (int s = 0; s < n; s++) {
            uint32_t key = ordered(scores[s]);
            if (high == 32 || key >> high == prefix) counts[key >> low & ((1u << num_bits) - 1)]++;
        }
        int value = (1 << num_bits) - 1;
        while (counts[value] < k) k -= counts[value--];
        prefix = prefix << num_bits | (uint32_t)value;
    }
    *num_equal = k;
    return prefix;
}

static void select_task(void *job, int token) {
    const struct select_top *a = job;
    const float *scores = a->scores + (ptrdiff_t)token * a->num_positions;
    int32_t *rows = a->rows + (ptrdiff_t)token * a->max_rows;
    int n = a->counts[token], k = n < a->max_rows ? n : a->max_rows, found = 0;
    a->num[token] = k;
    if (k == n) {
        for (int s = 0; s < n; s++) rows[found++] = s;
    } else if (k > 0) {
        int num_equal;
        uint32_t threshold = kth_largest(scores, n, k, &num_equal);
        for (int s = 0; s < n && found < k; s++) {
            uint32_t key = ordered(scores[s]);
            if (key > threshold || (key == threshold && num_equal-- > 0)) rows[found++] = s;
        }
    }
    for (; found < a->max_rows; found++) rows[found] = -1;
}

static void select_top(const struct select_top *a) { pool_run(select_task, (void *)a, a->num_tokens); }
