/* matmul, expert_ffn, absorb_query and expand_value. */
#include "check.h"

static const struct format formats[] = {
    {"f32", KIND_F32, 0},           {"bf16", KIND_BF16, 0},         {"int8", KIND_INT8, 0},
    {"int8_g64", KIND_INT8, 64},    {"int4", KIND_INT4, 0},         {"int4_g64", KIND_INT4, 64},
    {"int4_g128", KIND_INT4, 128},  {"int2", KIND_INT2, 0},         {"int2_g128", KIND_INT2, 128},
};

static const char *const mode_names[] = {"int16", "int8", "f32"};

struct matmul_call {
    struct matrix w;
    const float *x;
    int tokens;
    enum mode mode;
    float *y;
};

static int run_matmul(const struct kernels *k, const void *arguments) {
    const struct matmul_call *c = arguments;
    return k->matmul(&c->w, c->x, c->tokens, c->mode, c->y);
}

void check_matmul(void) {
    static const int shapes[][3] = { /* T, O, I; 16449 columns are more groups than one panel of the kernels holds */
        {1, 1, 1}, {1, 3, 31}, {1, 49, 65}, {2, 47, 64}, {3, 48, 33}, {4, 5, 129}, {5, 97, 200},
        {12, 3, 1023}, {13, 50, 320}, {16, 2, 1024}, {17, 33, 1088}, {33, 7, 127}, {63, 9, 1151},
        {1, 5, 16449}, {20, 3, 16449}, {1, 70, 1100}, {2, 40, 2112}, {3, 33, 832}, {4, 96, 1536}, {6, 64, 1090},
        {8, 35, 768}, {7, 32, 512}, {1, 35, 512}, {3, 97, 512},
    };
    for (int f = 0; f < COUNT(formats); f++)
        for (int mode = is_packed(formats[f].kind) ? MODE_INT16 : MODE_F32; mode <= MODE_F32; mode++)
            for (int s = 0; s < COUNT(shapes); s++) {
                const int T = shapes[s][0], O = shapes[s][1], I = shapes[s][2];
                const bool half = below(2);
                const size_t bytes = (size_t)T * O * 4;
                struct matmul_call c = {some_matrix(formats[f], O, I, half), floats((size_t)T * I), T, (enum mode)mode,
                                        fenced(bytes, 0)};
                CHECK(run_matmul, &c, c.y, bytes, "matmul %s half_scales %d activations %s T %d O %d I %d",
                      formats[f].name, half, mode_names[mode], T, O, I);
            }
}

struct ffn_call {
    struct expert experts[8];
    const float *x, *weights;
    const int32_t *chosen;
    int num_experts, tokens, num_choices;
    enum mode mode;
    float *y;
};

static int run_ffn(const struct kernels *k, const void *arguments) {
    const struct ffn_call *c = arguments;
    return k->expert_ffn(c->experts, c->num_experts, c->x, c->tokens, c->chosen, c->weights, c->num_choices, c->mode,
                         c->y);
}

void check_ffn(void) {
    static const int shapes[][5] = { /* T, E, K, D, F; K 0: one expert without a choice, as in mlp */
        {1, 1, 0, 1, 1}, {1, 1, 0, 200, 95}, {21, 1, 0, 64, 66}, {1, 4, 2, 65, 33}, {3, 5, 3, 128, 47},
        {17, 3, 2, 200, 64}, {40, 2, 2, 96, 31}, {5, 8, 8, 130, 192},
    };
    for (int f = 0; f < COUNT(formats); f++)
        for (int s = 0; s < COUNT(shapes); s++) {
            const int T = shapes[s][0], E = shapes[s][1], K = shapes[s][2], D = shapes[s][3], F = shapes[s][4];
            const bool half = below(2);
            const enum mode mode = is_packed(formats[f].kind) ? (enum mode)((f + s) % 3) : MODE_F32;
            const size_t bytes = (size_t)T * D * 4;
            struct ffn_call c = {.x = floats((size_t)T * D), .num_experts = E, .tokens = T, .num_choices = K ? K : 1,
                                 .mode = mode, .y = fenced(bytes, 0)};
            for (int e = 0; e < E; e++)
                c.experts[e] = (struct expert){some_matrix(formats[f], F, D, half), some_matrix(formats[f], F, D, half),
                                               some_matrix(formats[f], D, F, half)};
            if (K) {
                int32_t *chosen = fenced((size_t)T * K * 4, 0);
                for (int i = 0; i < T * K; i++) chosen[i] = below(E);
                c.chosen = chosen;
                c.weights = floats((size_t)T * K);
            }
            CHECK(run_ffn, &c, c.y, bytes, "expert_ffn %s half_scales %d activations %s T %d E %d K %d D %d F %d",
                  formats[f].name, half, mode_names[mode], T, E, K, D, F);
        }
}

struct latent_call {
    struct matrix kv_b; /* [H * (N + A), R] */
    const float *in;
    int tokens, heads, nope, rows_per_head;
    enum mode mode;
    float *y;
};

static int run_absorb(const struct kernels *k, const void *arguments) {
    const struct latent_call *c = arguments;
    return k->absorb_query(c->in, c->tokens, c->heads, c->nope, &c->kv_b, c->rows_per_head, c->y);
}

static int run_expand(const struct kernels *k, const void *arguments) {
    const struct latent_call *c = arguments;
    return k->expand_value(c->in, c->tokens, c->heads, &c->kv_b, c->rows_per_head, c->nope, c->mode, c->y);
}

void check_latent(void) {
    static const int shapes[][5] = { /* T, H, N, A, R */
        {1, 1, 1, 1, 1}, {1, 3, 7, 5, 65}, {4, 2, 12, 3, 512}, {5, 2, 3, 4, 257}, {13, 3, 5, 4, 96},
        {17, 1, 20, 50, 64}, {1, 2, 12, 37, 512}, {2, 1, 6, 100, 512},
    };
    for (int f = 0; f < COUNT(formats); f++)
        for (int s = 0; s < COUNT(shapes); s++) {
            const int T = shapes[s][0], H = shapes[s][1], N = shapes[s][2], A = shapes[s][3], R = shapes[s][4];
            const bool half = below(2);
            const enum mode mode = is_packed(formats[f].kind) ? (enum mode)((f + s) % 3) : MODE_F32;
            size_t bytes = (size_t)T * H * R * 4;
            struct latent_call c = {some_matrix(formats[f], H * (N + A), R, half), floats((size_t)T * H * N), T, H, N,
                                    N + A, mode, fenced(bytes, 0)};
            CHECK(run_absorb, &c, c.y, bytes, "absorb_query %s half_scales %d T %d H %d N %d R %d", formats[f].name,
                  half, T, H, N, R);
            bytes = (size_t)T * H * A * 4;
            c.kv_b = some_matrix(formats[f], H * (N + A), R, half);
            c.in = floats((size_t)T * H * R);
            c.y = fenced(bytes, 0);
            CHECK(run_expand, &c, c.y, bytes, "expand_value %s half_scales %d activations %s T %d H %d A %d R %d",
                  formats[f].name, half, mode_names[mode], T, H, A, R);
        }
}
