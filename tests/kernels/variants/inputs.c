#include <string.h>

#include "check.h"

/* SplitMix64 */
static uint64_t next(void) {
    static uint64_t state;
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

int below(int n) { return (int)(next() % (uint64_t)n); }

uint8_t any_byte(void) { return (uint8_t)next(); }

static float any_float(void) {
    static const float scales[] = {0x1p-33f, 0x1p-31f, 0x1p-30f, 0x1p-29f}; /* results up to 0.25 .. 4 */
    const float scale = scales[below(COUNT(scales))];
    return (float)(int32_t)next() * scale;
}

float *floats(size_t n) {
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

void *floats_or_bf16(size_t n, bool is_bf16) {
    if (!is_bf16) return floats(n);
    uint16_t *p = fenced(n * sizeof *p, 0);
    for (size_t i = 0; i < n; i++) p[i] = bf16(any_float());
    return p;
}

int32_t *some_counts(int n, int low, int high) {
    int32_t *counts = fenced((size_t)n * sizeof *counts, 0);
    for (int t = 0; t < n; t++) counts[t] = t == 0 ? high : low + below(high - low + 1);
    return counts;
}

float *some_scales(size_t n) {
    float *scales = fenced(n * sizeof *scales, 0);
    for (size_t i = 0; i < n; i++) scales[i] = (float)(1 + below(1 << 20)) * 0x1p-18f;
    return scales;
}

struct matrix some_matrix(struct format format, int rows, int columns, bool half_scales) {
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
