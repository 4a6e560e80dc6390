/* Compares the kernels of every instruction set that this machine can run with plain C, bit for bit.
 *
 * isa.c is compiled once more as kernels_plain: without intrinsics and without the compiler's vectorizer. Its results,
 * on one thread, are what every usable table must give on one thread and on three. Inputs come from a fixed seed; the
 * checksum of all results that is printed at the end is therefore the same on every architecture.
 *
 * read_all and integer_multiply_add are left out: they measure the machine, and their sums mean nothing.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fence.h"
#include "pool.h"
#include "usable.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

extern const struct kernels kernels_plain;

static const struct kernels *tables[MAX_TABLES];
static int num_tables, num_cases, num_failures;
static char running[200]; /* table and case, for report_fault */
static uint64_t checksum = 0xCBF29CE484222325u; /* FNV-1a */

/* SplitMix64 */
static uint64_t next(void) {
    static uint64_t state;
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static int below(int n) { return (int)(next() % (uint64_t)n); }

static float any_float(void) {
    static const float scales[] = {0x1p-33f, 0x1p-31f, 0x1p-30f, 0x1p-29f}; /* results up to 0.25 .. 4 */
    return (float)(int32_t)next() * scales[below(COUNT(scales))];
}

/* Numbers in blocks of 64, the groups of quantized activations; some are all zero, too small to be quantized, or of one
 * magnitude, which makes every integer the largest. */
static float *floats(size_t n) {
    float *p = fenced(n * sizeof *p, 0);
    for (size_t begin = 0; begin < n; begin += 64) {
        const int style = below(8);
        for (size_t i = begin; i < n && i < begin + 64; i++) {
            const float x = any_float();
            p[i] = style == 0 ? 0.0f * x : style == 1 ? 0x1p-120f * x : style == 2 ? (x < 0 ? -1.5f : 1.5f) : x;
        }
    }
    return p;
}

static uint16_t bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)(bits >> 16);
}

static void *floats_or_bf16(size_t n, bool is_bf16) {
    if (!is_bf16) return floats(n);
    uint16_t *p = fenced(n * sizeof *p, 0);
    for (size_t i = 0; i < n; i++) p[i] = bf16(any_float());
    return p;
}

/* counts[t] within low .. high, the first one high */
static int32_t *some_counts(int n, int low, int high) {
    int32_t *counts = fenced((size_t)n * sizeof *counts, 0);
    for (int t = 0; t < n; t++) counts[t] = t == 0 ? high : low + below(high - low + 1);
    return counts;
}

/* Ends the program at an access beyond a fenced array, whose kernel and case it names. */
static void report_fault(int signal) {
    (void)signal;
    static const char what[] = ": touches memory beyond its arrays\n";
    if (write(STDOUT_FILENO, running, strlen(running)) < 0 || write(STDOUT_FILENO, what, sizeof what - 1) < 0) _exit(2);
    _exit(1);
}

static void set_running(const struct kernels *k, const char *what) {
    snprintf(running, sizeof running, "%s, threads %d: %s", k->name, pool_threads(), what);
}

/* One call of a kernel, all of whose results are `bytes` at `out`. Returns what the kernel returns. */
typedef int (*call)(const struct kernels *k, const void *arguments);

static void check(const char *what, call run, const void *arguments, void *out, size_t bytes) {
    uint8_t *expected = malloc(bytes);
    if (!expected) exit(2);
    memset(out, 0xFF, bytes); /* NaN */
    pool_set_threads(1);
    set_running(&kernels_plain, what);
    int failed = run(&kernels_plain, arguments);
    memcpy(expected, out, bytes);
    for (size_t i = 0; i < bytes; i++) checksum = (checksum ^ expected[i]) * 0x100000001B3u;
    for (int threads = 1; threads <= 3; threads += 2) {
        pool_set_threads(threads);
        for (int i = 0; i < num_tables; i++) {
            memset(out, 0xFF, bytes);
            set_running(tables[i], what);
            failed |= run(tables[i], arguments);
            if (!failed && memcmp(expected, out, bytes) == 0) continue;
            size_t at = 0;
            while (at < bytes && expected[at] == ((uint8_t *)out)[at]) at++;
            printf("%s: byte %zu of %zu differs from plain C\n", running, at, bytes);
            num_failures++;
        }
    }
    num_cases++;
    free(expected);
    release_fenced();
}

#define CHECK(run, arguments, out, bytes, ...) \
    do { \
        char what[160]; \
        snprintf(what, sizeof what, __VA_ARGS__); \
        check(what, run, arguments, out, bytes); \
    } while (0)

static const struct format {
    const char *name;
    enum kind kind;
    int group;
} formats[] = {
    {"f32", KIND_F32, 0},           {"bf16", KIND_BF16, 0},         {"int8", KIND_INT8, 0},
    {"int8_g64", KIND_INT8, 64},    {"int4", KIND_INT4, 0},         {"int4_g64", KIND_INT4, 64},
    {"int4_g128", KIND_INT4, 128},  {"int2", KIND_INT2, 0},         {"int2_g128", KIND_INT2, 128},
};

/* A weight at any address. A row in four is one byte over and over: the integers of largest magnitude, -128 too. */
static struct matrix some_matrix(struct format format, int rows, int columns, bool half_scales) {
    struct matrix w = {.rows = rows, .columns = columns, .kind = format.kind, .scale_group = format.group,
                       .half_scales = half_scales};
    if (!is_packed(w.kind)) {
        w.data = floats_or_bf16((size_t)rows * columns, w.kind == KIND_BF16);
        return w;
    }
    static const uint8_t extremes[] = {0x80, 0x7F, 0x00, 0xFF};
    uint8_t *data = fenced(rows * row_bytes(&w), below(2));
    for (int row = 0; row < rows; row++)
        for (size_t i = 0; i < row_bytes(&w); i++)
            data[row * row_bytes(&w) + i] = row % 4 == 3 ? extremes[row / 4 % 4] : (uint8_t)next();
    w.data = data;
    const size_t num_scales = (size_t)rows * scales_per_row(&w);
    uint8_t *scales = fenced(num_scales * (half_scales ? 2 : 4), below(2));
    for (size_t i = 0; i < num_scales; i++) {
        const uint16_t half = (uint16_t)below(0x7C00); /* every finite number without a sign */
        const float scale = (float)(1 + below(1 << 24)) * 0x1p-30f;
        if (half_scales) memcpy(scales + 2 * i, &half, 2);
        else memcpy(scales + 4 * i, &scale, 4);
    }
    w.scales = scales;
    return w;
}

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

static void check_matmul(void) {
    static const int shapes[][3] = { /* T, O, I; 16449 columns are more groups than one panel of the kernels holds */
        {1, 1, 1},    {1, 3, 31},   {1, 49, 65},  {2, 47, 64},   {3, 48, 33},   {4, 5, 129},   {5, 97, 200}, {12, 3, 1023},
        {13, 50, 320}, {16, 2, 1024}, {17, 33, 1088}, {33, 7, 127}, {63, 9, 1151}, {1, 5, 16449}, {20, 3, 16449},
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

static void check_ffn(void) {
    static const int shapes[][5] = { /* T, E, K, D, F; K 0: one expert without a choice, as in mlp */
        {1, 1, 0, 1, 1}, {1, 1, 0, 200, 95}, {21, 1, 0, 64, 66}, {1, 4, 2, 65, 33}, {3, 5, 3, 128, 47}, {17, 3, 2, 200, 64},
        {40, 2, 2, 96, 31}, {5, 8, 8, 130, 192},
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

static void check_latent(void) {
    static const int shapes[][5] = { /* T, H, N, A, R */
        {1, 1, 1, 1, 1}, {1, 3, 7, 5, 65}, {4, 2, 12, 3, 512}, {5, 2, 3, 4, 257}, {13, 3, 5, 4, 96}, {17, 1, 20, 50, 64},
    };
    for (int f = 0; f < COUNT(formats); f++)
        for (int s = 0; s < COUNT(shapes); s++) {
            const int T = shapes[s][0], H = shapes[s][1], N = shapes[s][2], A = shapes[s][3], R = shapes[s][4];
            const bool half = below(2);
            const enum mode mode = is_packed(formats[f].kind) ? (enum mode)((f + s) % 3) : MODE_F32;
            size_t bytes = (size_t)T * H * R * 4;
            struct latent_call c = {some_matrix(formats[f], H * (N + A), R, half), floats((size_t)T * H * N), T, H, N,
                                    N + A, mode, fenced(bytes, 0)};
            CHECK(run_absorb, &c, c.y, bytes, "absorb_query %s half_scales %d T %d H %d N %d R %d", formats[f].name, half,
                  T, H, N, R);
            bytes = (size_t)T * H * A * 4;
            c.kv_b = some_matrix(formats[f], H * (N + A), R, half);
            c.in = floats((size_t)T * H * R);
            c.y = fenced(bytes, 0);
            CHECK(run_expand, &c, c.y, bytes, "expand_value %s half_scales %d activations %s T %d H %d A %d R %d",
                  formats[f].name, half, mode_names[mode], T, H, A, R);
        }
}

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

static void check_attend(void) {
    static const int shapes[][7] = { /* T, H, KV, key width, value width, S, max_rows (0: no rows); KV 0: a latent cache */
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
                .counts = some_counts(T, 1, max_rows ? max_rows : S), .num_tokens = T, .num_heads = H, .num_kv_heads = KV,
                .key_width = key_width, .value_width = value_width, .scale = 0.125f, .out = fenced(bytes, 0),
            };
            if (shapes[s][2]) {
                a.values = floats_or_bf16((size_t)S * KV * value_width, is_bf16);
                a.value_stride = (ptrdiff_t)KV * value_width;
                a.value_head_stride = value_width;
            } else {
                a.values = a.keys;
                a.value_stride = a.key_stride;
            }
            CHECK(run_attend, &a, a.out, bytes, "attend bf16 %d T %d H %d KV %d widths %d %d S %d rows %d", is_bf16, T, H,
                  shapes[s][2], key_width, value_width, S, max_rows);
        }
}

static int run_index_scores(const struct kernels *k, const void *arguments) { return k->index_scores(arguments), 0; }
static int run_select_top(const struct kernels *k, const void *arguments) { return k->select_top(arguments), 0; }

static void check_indexer(void) {
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

static void check_route(void) {
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

static int run_norm(const struct kernels *k, const void *arguments) { return k->norm(arguments), 0; }
static int run_rope(const struct kernels *k, const void *arguments) { return k->rope(arguments), 0; }

struct silu_call {
    const float *gate, *up;
    float *out;
    int size;
};

static int run_silu_mul(const struct kernels *k, const void *arguments) {
    const struct silu_call *c = arguments;
    return k->silu_mul(c->gate, c->up, c->out, c->size), 0;
}

static int run_multiply_add(const struct kernels *k, const void *arguments) {
    return k->multiply_add((float *)arguments, 2), 0;
}

static void check_elementwise(void) {
    static const int widths[] = {1, 15, 16, 31, 33, 100, 1024};
    static const int sizes[] = {1, 15, 17, 4096, 4097, 10000};
    for (int s = 0; s < COUNT(widths); s++)
        for (int has_bias = 0; has_bias < 2; has_bias++) {
            const int T = 1 + 2 * s, width = widths[s];
            const size_t bytes = (size_t)T * width * 4;
            struct norm a = {floats((size_t)T * width), floats(width), has_bias ? floats(width) : NULL, 1e-5, T, width,
                             fenced(bytes, 0)};
            CHECK(run_norm, &a, a.out, bytes, "norm bias %d T %d width %d", has_bias, T, width);
        }
    for (int s = 0; s < COUNT(widths); s++)
        for (int is_interleaved = 0; is_interleaved < 2; is_interleaved++) {
            const int T = 3, vectors = 1 + s, half = widths[s];
            const size_t values = (size_t)T * vectors * 2 * half;
            struct rope a = {floats(values), floats((size_t)T * half), floats((size_t)T * half), is_interleaved, T, vectors,
                             2 * half, fenced(values * 4, 0)};
            CHECK(run_rope, &a, a.out, values * 4, "rope interleaved %d width %d", is_interleaved, 2 * half);
        }
    for (int s = 0; s < COUNT(sizes); s++) {
        float *gate = floats(sizes[s]);
        for (int i = 0; i < sizes[s]; i++) gate[i] *= 60.0f; /* past both ends of exp */
        struct silu_call c = {gate, floats(sizes[s]), fenced((size_t)sizes[s] * 4, 0), sizes[s]};
        CHECK(run_silu_mul, &c, c.out, (size_t)sizes[s] * 4, "silu_mul size %d", sizes[s]);
    }
    float *sums = fenced(2 * sizeof *sums, 0);
    CHECK(run_multiply_add, sums, sums, 2 * sizeof *sums, "multiply_add");
}

int main(void) {
    signal(SIGSEGV, report_fault);
    num_tables = usable_kernels(tables);
    check_matmul();
    check_ffn();
    check_latent();
    check_attend();
    check_indexer();
    check_route();
    check_elementwise();
    for (int i = 0; i < num_tables; i++) printf("%s%s", tables[i]->name, i + 1 < num_tables ? ", " : "");
    printf(": %d cases against plain C, %d results differ, checksum %016llx\n", num_cases, num_failures,
           (unsigned long long)checksum);
    return num_failures != 0;
}
