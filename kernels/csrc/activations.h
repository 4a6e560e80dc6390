/* Activations, quantized once per token, and the batches of tokens that the products read. */
#pragma once
#include <stdlib.h>

#include "integer.h"

enum layout {
    BY_TOKEN, /* integers [tokens][groups][64]; scales, corrections [tokens][stride] */
    BY_FOUR,  /* integers [tokens / 4][stride][8][4 tokens][8]; scales, corrections [tokens / 4][stride][4 tokens][4 alike] */
    BY_SIXTEEN, /* integers [tokens / 16][groups][32][16 tokens][2]; scales, corrections [tokens / 16][stride][16 tokens] */
    BY_DIGIT,  /* int4 weights: bytes [tokens][stride / 2][even high, even low, odd high, odd low][2 groups][32];
                * x = 256 * high + low, high signed, low unsigned; scales, corrections as BY_TOKEN */
    BY_TILE,   /* digits as BY_DIGIT, bytes [tokens / lines][stride][high, low][lines][64];
                * scales [tokens / lines][stride][lines], no corrections */
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
    void *memory;
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
#endif
    (void)tokens, (void)kind;
    return BY_TOKEN;
}

/* How many tokens lie side by side. */
static int lines_for(enum layout layout, int tokens) {
    if (layout == BY_FOUR) return 4;
    if (layout == BY_SIXTEEN) return 16;
    int lines = 1;
    if (layout == BY_TILE || layout == BY_COLUMN)
        while (lines < tokens && lines < 16) lines *= 2;
    return lines;
}

/* Memory for `tokens` activations of `columns`, zeroed. Returns 0, or -1 without memory. */
static int batch_create(struct batch *batch, enum layout layout, int tokens, int columns) {
    const int lines = lines_for(layout, tokens);
    const size_t padded = round_up(tokens, lines);
    *batch = (struct batch){.layout = layout, .tokens = tokens, .columns = columns, .lines = lines};
    batch->groups = (columns + GROUP - 1) / GROUP;
    batch->stride = (int)round_up(batch->groups, 16);
    size_t groups = padded * batch->stride;
    size_t element = layout == AS_FLOATS ? sizeof(float) : sizeof(int16_t);
    size_t factors = layout == BY_FOUR ? groups * 4 : groups;
    size_t values = groups * GROUP * element, bytes = values + factors * 8;
    bytes = round_up(bytes ? bytes : 1, 64);
    char *memory = batch->memory = aligned_alloc(64, bytes);
    if (!memory) return -1;
    memset(memory, 0, bytes);
    if (layout == AS_FLOATS) {
        batch->floats = (float *)(void *)memory;
    } else {
        batch->integers = (int16_t *)(void *)memory;
        batch->scales = (float *)(void *)(memory + values);
        batch->corrections = (int32_t *)(void *)(memory + values + factors * 4);
    }
    return 0;
}

static void batch_free(struct batch *batch) { free(batch->memory); }

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
#if defined(__AVX512VNNI__)
    if (per_byte <= 2) {
        __m512i whole[4];
        for (int i = 0; i < 4; i++) whole[i] = _mm512_cvtps_epi32((__m512)mul16(v[i], set16(factor)).part[0]);
        *sum = _mm512_reduce_add_epi32(
            _mm512_add_epi32(_mm512_add_epi32(whole[0], whole[1]), _mm512_add_epi32(whole[2], whole[3])));
        for (int i = 0; i < 4; i++) {
            __m512i field = whole[i];
            if (per_byte == 2) { /* fields 0 and 1 are the even columns, 2 and 3 the odd ones */
                const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
                const __m512i columns = _mm512_add_epi32(even, _mm512_set1_epi32(i / 2));
                field = _mm512_permutex2var_epi32(whole[i % 2 * 2], columns, whole[i % 2 * 2 + 1]);
            }
            _mm256_storeu_si256((void *)(integers + 16 * i), _mm512_cvtepi32_epi16(field));
        }
        return;
    }
#endif
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
    float limit = mode == MODE_INT16 ? LIMIT_INT16 : LIMIT_INT8;
    for (int g = 0; g < batch->groups; g++) {
        int n = batch->columns - g * GROUP;
        int16_t *integers = batch->integers + ((size_t)token * batch->groups + g) * GROUP;
        size_t i = (size_t)token * batch->stride + g;
        int32_t sum;
        float *scale = batch->scales + i;
        if (n > GROUP) n = GROUP;
        if (kind == KIND_INT4)
            quantize_group(x + g * GROUP, n, limit, 2, integers, scale, &sum);
        else
            quantize_group(x + g * GROUP, n, limit, columns_per_byte(kind), integers, scale, &sum);
        batch->corrections[i] = arrange64(kind, integers, sum);
    }
}

/* Groups that BY_DIGIT holds of a token: eight are held twice, so that two rows of weights may pass as one. */
static int digit_groups(const struct batch *batch) {
    return batch->columns == 8 * GROUP ? 16 : batch->groups;
}

/* Splits one token's integers [groups][64], even columns first, into digits. */
static void split_digits(struct batch *batch, int token, const int16_t *integers) {
    char *bytes = (char *)(batch->integers + (size_t)token * batch->stride * GROUP);
    for (int g = 0; g < digit_groups(batch); g++)
        for (int odd = 0; odd < 2; odd++) {
            const int16_t *x = integers + g % batch->groups * GROUP + odd * 32;
            char *high = bytes + (g / 2 * 4 + odd * 2) * 64 + g % 2 * 32;
            for (int i = 0; i < 32; i++) high[i] = (char)(x[i] >> 8);
            for (int i = 0; i < 32; i++) high[64 + i] = (char)x[i];
        }
}

/* The same for BY_TILE, scales too. */
static void set_tile_token(struct batch *batch, int token, const int16_t *integers, const float *scales) {
    const size_t lines = batch->lines, first = token / lines * batch->stride, line = token % lines;
    for (size_t g = 0; g < (size_t)batch->groups; g++) {
        char *high = (char *)batch->integers + ((first + g) * 2 * lines + line) * GROUP, *low = high + lines * GROUP;
        const int16_t *x = integers + g * GROUP;
        for (int i = 0; i < GROUP; i++) high[i] = (char)(x[i] >> 8);
        for (int i = 0; i < GROUP; i++) low[i] = (char)x[i];
        batch->scales[(first + g) * lines + line] = scales[g];
    }
}

/* The same for BY_COLUMN. */
static void set_column_token(struct batch *batch, int token, const int16_t *integers, const float *scales) {
    const size_t lines = batch->lines;
    for (size_t g = 0; g < (size_t)batch->groups; g++) {
        const int16_t *x = integers + g * GROUP;
        char high[GROUP], low[GROUP], *out = (char *)batch->integers + g * GROUP * 2 * lines + token * 4;
        for (int i = 0; i < GROUP; i++) high[i] = (char)((x[i] + 128) >> 8);
        for (int i = 0; i < GROUP; i++) low[i] = (char)x[i];
        for (int k = 0; k < GROUP / 4; k++, out += 8 * lines) {
            memcpy(out, high + 4 * k, 4);
            memcpy(out + 4 * lines, low + 4 * k, 4);
        }
        batch->scales[g * lines + token] = scales[g];
    }
}

/* Copies token `from` of a BY_TOKEN or AS_FLOATS batch to place `to` of a batch with any layout. */
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
    if (batch->layout == BY_TILE || batch->layout == BY_COLUMN) {
        (batch->layout == BY_TILE ? set_tile_token : set_column_token)(batch, to, integers, scales);
        return;
    }
    if (batch->layout == BY_TOKEN || batch->layout == BY_DIGIT) {
        if (batch->layout == BY_DIGIT)
            split_digits(batch, to, integers);
        else
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
