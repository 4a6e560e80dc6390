/* norm, rope, silu_mul, multiply_add, and the quantizers. */
#include "check.h"

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

void check_elementwise(void) {
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
            struct rope a = {floats(values), floats((size_t)T * half), floats((size_t)T * half), is_interleaved, T,
                             vectors, 2 * half, fenced(values * 4, 0)};
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

struct quantize_call {
    struct group_rows rows;
    const float *scales;
    int bits;
    void *out;
};

static int run_absmax(const struct kernels *k, const void *arguments) {
    const struct quantize_call *c = arguments;
    return !k->group_absmax(&c->rows, c->out);
}

static int run_errors(const struct kernels *k, const void *arguments) {
    const struct quantize_call *c = arguments;
    return k->group_errors(&c->rows, c->scales, (1 << (c->bits - 1)) - 1, c->out);
}

static int run_pack(const struct kernels *k, const void *arguments) {
    const struct quantize_call *c = arguments;
    return k->pack_rows(&c->rows, c->scales, c->bits, c->out), 0;
}

void check_quantize(void) {
    static const int shapes[][3] = {{1, 1, 64}, {3, 31, 64}, {5, 64, 64}, {2, 200, 128}, {4, 129, 129}, {3, 333, 333}};
    for (int bits = 2; bits <= 8; bits *= 2)
        for (int s = 0; s < COUNT(shapes); s++) {
            const int O = shapes[s][0], I = shapes[s][1], group = shapes[s][2];
            const size_t num_groups = (size_t)O * ((I + group - 1) / group), packed = (size_t)O * ((I * bits + 7) / 8);
            static const call runs[] = {run_absmax, run_errors, run_pack};
            static const char *const names[] = {"group_absmax", "group_errors", "pack_rows"};
            const size_t bytes[] = {num_groups * sizeof(float), num_groups * sizeof(double), packed};
            for (int r = 0; r < COUNT(runs); r++) {
                struct quantize_call c = {{floats((size_t)O * I), O, I, group}, some_scales(num_groups), bits,
                                          fenced(bytes[r], 0)};
                CHECK(runs[r], &c, c.out, bytes[r], "%s bits %d O %d I %d group %d", names[r], bits, O, I, group);
            }
        }
}

struct fp8_call {
    struct fp8_rows rows;
    float *out;
};

static int run_fp8(const struct kernels *k, const void *arguments) {
    const struct fp8_call *c = arguments;
    return k->decode_fp8(&c->rows, c->out), 0;
}

void check_fp8(void) {
    static const int shapes[][5] = { /* O, I, first row, rows and columns of a block */
        {1, 1, 0, 1, 1}, {5, 300, 126, 128, 128}, {3, 33, 0, 1, 33}, {7, 130, 2, 4, 16},
    };
    for (int s = 0; s < COUNT(shapes); s++) {
        const int O = shapes[s][0], I = shapes[s][1], first = shapes[s][2];
        const int grid_columns = (I + shapes[s][4] - 1) / shapes[s][4], grid_rows = (first + O - 1) / shapes[s][3] + 1;
        uint8_t *codes = fenced((size_t)O * I, below(2));
        for (int i = 0; i < O * I; i++) codes[i] = any_byte();
        const size_t bytes = (size_t)O * I * 4;
        struct fp8_call c = {{codes, floats(256), some_scales((size_t)grid_rows * grid_columns), O, I, first,
                              shapes[s][3], shapes[s][4], grid_columns}, fenced(bytes, 0)};
        CHECK(run_fp8, &c, c.out, bytes, "decode_fp8 O %d I %d blocks %d %d", O, I, shapes[s][3], shapes[s][4]);
    }
}
