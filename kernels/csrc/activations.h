/* Activations, quantized once per token, and the batches of tokens that the products read. */
#pragma once
#include <stdlib.h>

#include "digits.h"
#include "scratch.h"

enum layout {
    BY_TOKEN, /* integers [tokens][groups][64]; scales, corrections [tokens][stride] */
    BY_FOUR,  /* integers [tokens / 4][stride][8][4 tokens][8]; scales, corrections [tokens / 4][stride][4 tokens][4 alike] */
    BY_SIXTEEN, /* integers [tokens / 16][groups][32][16 tokens][2]; scales, corrections [tokens / 16][stride][16 tokens] */
    BY_DIGIT,  /* int4 weights: bytes [tokens][stride / 2][even high, even low, odd high, odd low][2 groups][32];
                * x = 256 * high + low, high signed, low unsigned; scales, corrections as BY_TOKEN */
    BY_TILE,   /* bytes [tokens / 16][stride][high, low][16][16 tokens][4 columns], digits as BY_DIGIT;
                * scales [tokens / 16][stride][16], no corrections */
    BY_COLUMN, /* bytes [stride][16][high, low][lines][4 columns], x = 256 * high + low, both signed; scales
                * [stride][lines], no corrections */
    AS_FLOATS /* floats [tokens][groups * 64], in order of the columns */
};

#define MAX_DIGIT_TOKENS 4 /* more take less time BY_FOUR */
#define MAX_COLUMN_TOKENS 8

/* As in glm_gpu/kernels/matmul.py: x = 256 * high + low with both digits in signed bytes, for -x too. */
#define LIMIT_INT16 32639
#define LIMIT_INT8 127

struct batch {
    enum layout layout;
    int tokens, columns, groups;
    int lines;  /* tokens side by side, 16 at most; 1 in layouts of single tokens */
    int stride; /* groups, rounded up to 16: vectors of 16 groups may be loaded anywhere */
    int16_t *integers;
    float *scales;
    int32_t *corrections; /* offset * sum of the group's integers */
    float *floats;
    void *memory; /* its own; NULL when it lies in somebody else's */
};

static size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

static enum layout layout_for(int tokens, enum kind kind) {
#if defined(__AMX_INT8__)
    if (kind == KIND_INT4 && tokens == 1) return BY_DIGIT;
    if (tokens > 0) return tokens <= MAX_COLUMN_TOKENS ? BY_COLUMN : BY_TILE;
#elif defined(__AVX512VNNI__)
    /* tuned on [2048, 6144] int4: three blocks of four still cost less than sixteen tokens */
    if (tokens > 12) return BY_SIXTEEN;
    if (kind == KIND_INT4 && tokens >= 1 && tokens <= MAX_DIGIT_TOKENS) return BY_DIGIT;
    if (tokens > 1) return BY_FOUR;
#elif defined(__AVX2__)
    if (tokens > 11) return BY_SIXTEEN; /* which takes as long for one token as for sixteen */
#endif
    (void)tokens, (void)kind;
    return BY_TOKEN;
}

/* How many tokens lie side by side. */
static int lines_for(enum layout layout, int tokens) {
    if (layout == BY_FOUR) return 4;
    if (layout == BY_SIXTEEN || layout == BY_TILE) return 16;
    int lines = 1;
    if (layout == BY_COLUMN)
        while (lines < tokens) lines *= 2;
    return lines;
}

/* An empty batch for `tokens` activations of `columns`. */
static struct batch batch_shape(enum layout layout, int tokens, int columns) {
    const int groups = (columns + GROUP - 1) / GROUP;
    return (struct batch){.layout = layout, .tokens = tokens, .columns = columns, .groups = groups,
                          .lines = lines_for(layout, tokens), .stride = (int)round_up(groups, 16)};
}

static size_t value_bytes(const struct batch *batch) {
    const size_t element = batch->layout == AS_FLOATS ? sizeof(float) : sizeof(int16_t);
    return round_up(batch->tokens, batch->lines) * batch->stride * GROUP * element;
}

static size_t factor_bytes(const struct batch *batch) {
    return round_up(batch->tokens, batch->lines) * batch->stride * 4 * (batch->layout == BY_FOUR ? 4 : 1);
}

/* A multiple of a cache line. */
static size_t batch_bytes(const struct batch *batch) {
    return round_up(value_bytes(batch) + 2 * factor_bytes(batch) + 1, 64);
}

/* Gives the batch its memory, from a cache line on, zeroed. */
static void batch_place(struct batch *batch, char *memory) {
    const size_t values = value_bytes(batch);
    if (batch->layout != BY_TILE) memset(memory, 0, batch_bytes(batch)); /* that one's blocks are written whole */
    if (batch->layout == AS_FLOATS) {
        batch->floats = (float *)(void *)memory;
    } else {
        batch->integers = (int16_t *)(void *)memory;
        batch->scales = (float *)(void *)(memory + values);
        batch->corrections = (int32_t *)(void *)(memory + values + factor_bytes(batch));
    }
}

/* The same with memory of its own. Returns 0, or -1 without memory. */
static int batch_create(struct batch *batch, enum layout layout, int tokens, int columns) {
    *batch = batch_shape(layout, tokens, columns);
    batch->memory = scratch_take(batch_bytes(batch));
    if (!batch->memory) return -1;
    batch_place(batch, batch->memory);
    return 0;
}

static void batch_free(struct batch *batch) { scratch_give(batch->memory); }

/* The largest |v| by its bits, which order NaN above infinity above all numbers. */
INLINE float largest_magnitude(const f32x16 v[4]) {
    i32part largest = {0};
    for (int i = 0; i < 4; i++) EACH_PART {
        i32part bits = (i32part)v[i].part[part] & 0x7FFFFFFF, more = bits > largest;
        largest = (more & bits) | (~more & largest);
    }
#if defined(__AVX512F__)
    const int32_t result = _mm512_reduce_max_epi32((__m512i)largest);
#else
    int32_t result = 0;
    for (int i = 0; i < VEC_BYTES / 4; i++)
        if (largest[i] > result) result = largest[i];
#endif
    float magnitude;
    memcpy(&magnitude, &result, 4);
    return magnitude;
}

/* One group of one token; see quantize_activations in glm_gpu/kernels/matmul.py. */
INLINE void quantize_group(const float *x, int n, float limit, int per_byte, int16_t *integers, float *scale,
                           int32_t *sum) {
    f32x16 v[4];
    for (int i = 0; i < 4; i++) {
        int left = n - 16 * i;
        v[i] = left >= 16 ? load16(x + 16 * i) : load16_head(x + 16 * i, left > 0 ? left : 0);
    }
    float amax = largest_magnitude(v);
    *scale = amax / limit;
    *sum = 0;
    if (!(amax >= 1e-30f && amax < __builtin_inff())) return; /* integers are zero already */
    float factor = limit / amax;
    int32_t total = 0;
    int16_t in_order[GROUP];
    for (int i = 0; i < 4; i++) {
        f32x16 rounded = rint16(mul16(v[i], set16(factor)));
        int32_t whole[16];
        EACH_PART {
            i32part w = __builtin_convertvector(rounded.part[part], i32part);
            memcpy((char *)whole + part * sizeof w, &w, sizeof w);
        }
        for (int j = 0; j < 16; j++) in_order[16 * i + j] = (int16_t)whole[j], total += whole[j];
    }
    *sum = total;
    int per_field = GROUP / per_byte;
    for (int field = 0; field < per_byte; field++)
        for (int j = 0; j < per_field; j++) integers[field * per_field + j] = in_order[j * per_byte + field];
}

/* One row of f32 into a BY_TOKEN or AS_FLOATS batch. */
static void batch_set_token(struct batch *batch, int token, const float *x, enum mode mode, enum kind kind) {
    if (batch->layout == AS_FLOATS) {
        memcpy(batch->floats + (size_t)token * batch->groups * GROUP, x, (size_t)batch->columns * 4);
        return;
    }
    const float limit = mode == MODE_INT16 ? LIMIT_INT16 : LIMIT_INT8;
    int16_t *integers = batch->integers + (size_t)token * batch->groups * GROUP;
    float *scales = batch->scales + (size_t)token * batch->stride;
    int32_t *corrections = batch->corrections + (size_t)token * batch->stride;
    int g = 0;
#if defined(__AVX512VNNI__)
    for (; kind != KIND_INT2 && (g + 16) * GROUP <= batch->columns; g += 16) {
        if (kind == KIND_INT4)
            quantize_groups16(x + g * GROUP, limit, 2, integers + g * GROUP, scales + g, corrections + g);
        else
            quantize_groups16(x + g * GROUP, limit, 1, integers + g * GROUP, scales + g, corrections + g);
        for (int i = g; i < g + 16; i++) corrections[i] *= offset_of(kind);
    }
#endif
    for (; g < batch->groups; g++) {
        const int left = batch->columns - g * GROUP, n = left < GROUP ? left : GROUP;
        int32_t sum;
        if (kind == KIND_INT4)
            quantize_group(x + g * GROUP, n, limit, 2, integers + g * GROUP, scales + g, &sum);
        else
            quantize_group(x + g * GROUP, n, limit, columns_per_byte(kind), integers + g * GROUP, scales + g, &sum);
        corrections[g] = arrange64(kind, integers + g * GROUP, sum);
    }
}

/* Groups that BY_DIGIT holds of a token: eight are held twice, so that two rows of weights may pass as one. */
static int digit_groups(const struct batch *batch) {
    return batch->columns == 8 * GROUP ? 16 : batch->groups;
}

#if defined(__AVX512VNNI__)
/* One token's integers [groups][64], even columns first, as BY_DIGIT. */
static void set_digit_token(struct batch *batch, int token, const int16_t *integers) {
    char *bytes = (char *)(batch->integers + (size_t)token * batch->stride * GROUP);
    for (int g = 0; g < digit_groups(batch); g++)
        for (int odd = 0; odd < 2; odd++) {
            const int16_t *x = integers + g % batch->groups * GROUP + odd * 32;
            char *high = bytes + (g / 2 * 4 + odd * 2) * 64 + g % 2 * 32;
            _mm256_storeu_si256((void *)high, high_digits(x, 0));
            _mm256_storeu_si256((void *)(high + 64), low_digits(x));
        }
}
#endif

#if defined(__AMX_INT8__)
/* The digits of a group, high ones rounded by `bias`. */
INLINE __m512i group_high(const int16_t *x, int bias) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(high_digits(x, bias)), high_digits(x + 32, bias), 1);
}
INLINE __m512i group_low(const int16_t *x) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low_digits(x)), low_digits(x + 32), 1);
}

/* A BY_COLUMN batch from tokens[0 .. n - 1] of a BY_TOKEN batch, n <= lines; what is not written is zeros already. */
static void set_columns(struct batch *batch, const struct batch *source, const int *tokens, int n) {
    const int lines = batch->lines, each = 2 * lines; /* rows that a group has: high digits of each token, then low ones */
    for (int first = 0; first < batch->groups; first += 16 / each) {
        __m512 rows[16];
        for (int i = 0; i < 16; i++) {
            const int g = first + i / each, token = i % lines;
            rows[i] = _mm512_setzero_ps();
            if (g >= batch->groups || token >= n) continue;
            const int16_t *x = source->integers + ((size_t)tokens[token] * source->groups + g) * GROUP;
            rows[i] = _mm512_castsi512_ps(i % each < lines ? group_high(x, 128) : group_low(x));
        }
        transpose16(rows);
        for (int g = first, at = 0; g < batch->groups && at < 16; g++, at += each) {
            char *out = (char *)batch->integers + (size_t)g * GROUP * each - 4 * at; /* lanes before `at` are masked out */
            for (int k = 0; k < 16; k++, out += 4 * each)
                _mm512_mask_storeu_ps(out, (__mmask16)(((1u << each) - 1) << at), rows[k]);
        }
    }
    for (int g = 0; g < batch->groups; g++)
        for (int t = 0; t < n; t++) batch->scales[g * lines + t] = source->scales[(size_t)tokens[t] * source->stride + g];
}

/* Tokens 16 * block .. 16 * block + 15 of a BY_TILE batch, from tokens[0 .. n - 1] of a BY_TOKEN batch, n <= 16; zeros for
 * the rest. */
static void set_tile_block(struct batch *batch, int block, const struct batch *source, const int *tokens, int n) {
    for (int g = 0; g < batch->groups; g++) {
        const size_t at = (size_t)block * batch->stride + g;
        char *out = (char *)batch->integers + at * 2048;
        __m512 high[16], low[16];
        for (int t = 0; t < 16; t++) {
            const int16_t *x = source->integers + ((size_t)tokens[t < n ? t : 0] * source->groups + g) * GROUP;
            high[t] = t < n ? _mm512_castsi512_ps(group_high(x, 0)) : _mm512_setzero_ps();
            low[t] = t < n ? _mm512_castsi512_ps(group_low(x)) : _mm512_setzero_ps();
            batch->scales[at * 16 + t] = t < n ? source->scales[(size_t)tokens[t] * source->stride + g] : 0.0f;
        }
        transpose16(high);
        transpose16(low);
        for (int k = 0; k < 16; k++) {
            _mm512_store_ps(out + 64 * k, high[k]);
            _mm512_store_ps(out + 1024 + 64 * k, low[k]);
        }
    }
}
#endif

/* Copies token `from` of a BY_TOKEN or AS_FLOATS batch to place `to` of a batch that lays no tokens side by side for AMX. */
static void batch_copy_token(struct batch *batch, int to, const struct batch *source, int from) {
    const int groups = batch->groups;
    if (source->layout == AS_FLOATS) {
        memcpy(batch->floats + (size_t)to * groups * GROUP, source->floats + (size_t)from * groups * GROUP,
               (size_t)groups * GROUP * 4);
        return;
    }
    const int16_t *integers = source->integers + (size_t)from * groups * GROUP;
    const float *scales = source->scales + (size_t)from * batch->stride;
    const int32_t *corrections = source->corrections + (size_t)from * batch->stride;
    if (batch->layout == BY_TOKEN || batch->layout == BY_DIGIT) {
#if defined(__AVX512VNNI__)
        if (batch->layout == BY_DIGIT) set_digit_token(batch, to, integers);
#endif
        if (batch->layout == BY_TOKEN)
            memcpy(batch->integers + (size_t)to * groups * GROUP, integers, (size_t)groups * GROUP * 2);
        for (int g = 0; g < (batch->layout == BY_DIGIT ? digit_groups(batch) : groups); g += groups) {
            const size_t at = (size_t)to * batch->stride + g;
            memcpy(batch->scales + at, scales, (size_t)groups * 4);
            memcpy(batch->corrections + at, corrections, (size_t)groups * 4);
        }
        return;
    }
    const int wide = batch->layout == BY_FOUR ? 4 : 16;  /* tokens side by side */
    const int piece = batch->layout == BY_FOUR ? 16 : 4; /* bytes of one token that lie together */
    const int lane = to % wide;
    const size_t block = to / wide;
    const size_t block_groups = batch->layout == BY_FOUR ? batch->stride : groups;
    char *target = (char *)batch->integers + block * block_groups * wide * GROUP * 2 + lane * piece;
    const char *bytes = (const char *)integers;
    const size_t pieces = (size_t)groups * GROUP * 2 / piece;
    if (piece == 16)
        for (size_t i = 0; i < pieces; i++) memcpy(target + i * 64, bytes + i * 16, 16);
    else
        for (size_t i = 0; i < pieces; i++) memcpy(target + i * 64, bytes + i * 4, 4);
    for (int g = 0; g < groups; g++) {
        const int alike = 16 / wide;
        const size_t i = (block * batch->stride + g) * 16 + lane * alike;
        for (int j = 0; j < alike; j++) batch->scales[i + j] = scales[g], batch->corrections[i + j] = corrections[g];
    }
}
