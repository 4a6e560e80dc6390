/* attend, index_scores, select_top and route. */
#include "check.h"

static int run_attend(const struct kernels *k, const void *arguments) { return k->attend(arguments); }

/* Ascending rows of each token out of S positions, max_rows of them. */
static int32_t *some_rows(int T, int max_rows, int S) {
    int32_t *rows = fenced((size_t)T * max_rows * 4, 0);
    for (int t = 0; t < T; t++)
        for (int j = 0, row = 0; j < max_rows; j++, row++) {
            row += below(S - row - (max_rows - j) + 1);
            rows[t * max_rows + j] = row;
        }
    return rows;
}

void check_attend(void) {
    static const int shapes[][7] = { /* T, H, KV, key width, value width, S, max_rows; no KV: a latent cache */
        {1, 1, 0, 1, 1, 1, 0}, {1, 20, 0, 576, 512, 37, 0}, {3, 5, 0, 80, 64, 150, 70}, {2, 3, 0, 600, 530, 17, 16},
        {1, 4, 4, 16, 16, 33, 0}, {4, 6, 2, 31, 33, 129, 0}, {5, 8, 1, 128, 65, 66, 65},
    };
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++)
        for (int s = 0; s < COUNT(shapes); s++) {
            const int T = shapes[s][0], H = shapes[s][1], KV = shapes[s][2] ? shapes[s][2] : 1, S = shapes[s][5];
            const int key_width = shapes[s][3], value_width = shapes[s][4], max_rows = shapes[s][6];
            const size_t bytes = (size_t)T * H * value_width * 4;
            struct attention a = {
                .q = floats((size_t)T * H * key_width), .keys = floats_or_bf16((size_t)S * KV * key_width, is_bf16),
                .key_stride = (ptrdiff_t)KV * key_width, .key_head_stride = key_width, .is_bf16 = is_bf16,
                .rows = max_rows ? some_rows(T, max_rows, S) : NULL, .max_rows = max_rows,
                .counts = some_counts(T, 1, max_rows ? max_rows : S), .num_tokens = T, .num_heads = H,
                .num_kv_heads = KV, .key_width = key_width, .value_width = value_width, .scale = 0.125f,
                .out = fenced(bytes, 0),
            };
            if (shapes[s][2]) {
                a.values = floats_or_bf16((size_t)S * KV * value_width, is_bf16);
                a.value_stride = (ptrdiff_t)KV * value_width;
                a.value_head_stride = value_width;
            } else {
                a.values = a.keys;
                a.value_stride = a.key_stride;
            }
            CHECK(run_attend, &a, a.out, bytes, "attend bf16 %d T %d H %d KV %d widths %d %d S %d rows %d", is_bf16, T,
                  H, shapes[s][2], key_width, value_width, S, max_rows);
        }
}

static int run_index_scores(const struct kernels *k, const void *arguments) { return k->index_scores(arguments), 0; }
static int run_select_top(const struct kernels *k, const void *arguments) { return k->select_top(arguments), 0; }

void check_indexer(void) {
    static const int scored[][4] = {{1, 1, 1, 1}, {2, 3, 128, 65}, {3, 32, 128, 17}, {1, 2, 600, 130}, {2, 5, 33, 16}};
    static const int selected[][3] = {{1, 1, 1}, {3, 40, 7}, {2, 3000, 2048}, {4, 100, 100}, {2, 65, 64}};
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++)
        for (int s = 0; s < COUNT(scored); s++) {
            const int T = scored[s][0], J = scored[s][1], M = scored[s][2], S = scored[s][3];
            const size_t bytes = (size_t)T * S * 4;
            struct index_scores a = {
                .q = floats((size_t)T * J * M), .head_weights = floats((size_t)T * J),
                .keys = floats_or_bf16((size_t)S * M, is_bf16), .is_bf16 = is_bf16, .counts = some_counts(T, 0, S),
                .num_tokens = T, .num_heads = J, .width = M, .num_positions = S, .scale = 0.3f, .out = fenced(bytes, 0),
            };
            CHECK(run_index_scores, &a, a.out, bytes, "index_scores bf16 %d T %d J %d M %d S %d", is_bf16, T, J, M, S);
        }
    for (int s = 0; s < COUNT(selected); s++) {
        const int T = selected[s][0], S = selected[s][1], max_rows = selected[s][2];
        float *scores = fenced((size_t)T * S * 4, 0);
        for (int i = 0; i < T * S; i++) scores[i] = (float)(below(41) - 20) * -0.25f; /* many ties; -0 and +0 */
        const size_t bytes = (size_t)T * (max_rows + 1) * 4;
        int32_t *out = fenced(bytes, 0);
        struct select_top a = {scores, some_counts(T, 0, S), T, S, max_rows, out, out + (size_t)T * max_rows};
        CHECK(run_select_top, &a, out, bytes, "select_top T %d S %d rows %d", T, S, max_rows);
    }
}

static int run_route(const struct kernels *k, const void *arguments) { return k->route(arguments); }

void check_route(void) {
    static const int shapes[][6] = { /* T, D, E, K, n_group, topk_group */
        {1, 1, 1, 1, 1, 1}, {3, 65, 7, 2, 1, 1}, {17, 200, 64, 8, 1, 1}, {2, 640, 256, 8, 8, 4}, {33, 31, 24, 4, 4, 2},
    };
    for (int is_sigmoid = 0; is_sigmoid < 2; is_sigmoid++)
        for (int s = 0; s < COUNT(shapes); s++) {
            const int T = shapes[s][0], D = shapes[s][1], E = shapes[s][2], K = shapes[s][3];
            const size_t bytes = (size_t)T * K * 8;
            int32_t *out = fenced(bytes, 0);
            struct route a = {
                .x = floats((size_t)T * D), .gate = floats((size_t)E * D), .bias = is_sigmoid ? floats(E) : NULL,
                .num_tokens = T, .hidden = D, .num_experts = E, .experts_per_tok = K, .n_group = shapes[s][4],
                .topk_group = shapes[s][5], .norm_topk_prob = s % 2, .scale = is_sigmoid ? 2.5f : 1.0f, .ids = out,
                .weights = (float *)(out + (size_t)T * K),
            };
            CHECK(run_route, &a, out, bytes, "route sigmoid %d T %d D %d E %d K %d", is_sigmoid, T, D, E, K);
        }
}
