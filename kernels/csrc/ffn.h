/* Feed-forward networks: tokens grouped by expert, gate and up as one job, then down as one job. */
#pragma once
#include "matmul.h"
#include "vec_exp.h"

/* The pairs of a pass, (token, place in the results), ordered by expert. */
struct routing {
    int num_pairs, num_experts;
    const struct expert **experts; /* those with at least one pair */
    int *begins;                   /* [num_experts + 1] */
    int *tokens, *places;          /* [num_pairs] */
};

struct ffn_memory {
    struct batch *inputs, *hiddens; /* [num_experts] */
    struct gathered *parts;         /* [num_experts] */
    struct product *products;       /* [2 * num_experts] */
    float *gate, *up;               /* [num_pairs, F] */
    struct batch hidden;            /* all pairs */
    void *input_memory, *hidden_memory;
};

static void ffn_free(struct ffn_memory *m) {
    free(m->inputs);
    free(m->hiddens);
    free(m->parts);
    free(m->products);
    scratch_give(m->gate);
    scratch_give(m->up);
    scratch_give(m->input_memory);
    scratch_give(m->hidden_memory);
    batch_free(&m->hidden);
}

static int ffn_create(struct ffn_memory *m, const struct routing *r, int width, bool floats) {
    m->inputs = calloc(r->num_experts, sizeof *m->inputs);
    m->hiddens = calloc(r->num_experts, sizeof *m->hiddens);
    m->parts = calloc(r->num_experts, sizeof *m->parts);
    m->products = calloc(2 * (size_t)r->num_experts, sizeof *m->products);
    m->gate = scratch_take((size_t)r->num_pairs * width * sizeof(float));
    m->up = scratch_take((size_t)r->num_pairs * width * sizeof(float));
    if (!m->inputs || !m->hiddens || !m->parts || !m->products || !m->gate || !m->up) return -1;
    return batch_create(&m->hidden, floats ? AS_FLOATS : BY_TOKEN, r->num_pairs, width);
}

struct hidden_job {
    const struct ffn_memory *m;
    enum mode mode;
    enum kind kind;
    int width;
};

/* silu(gate) * up of one pair, quantized for the down projection. */
static void hidden_task(void *arg, int pair) {
    const struct hidden_job *job = arg;
    float *gate = job->m->gate + (size_t)pair * job->width;
    const float *up = job->m->up + (size_t)pair * job->width;
    int i = 0;
    for (; i + 16 <= job->width; i += 16) store16(gate + i, silu_mul16(load16(gate + i), load16(up + i)));
    if (i < job->width) {
        const int n = job->width - i;
        store16_head(gate + i, silu_mul16(load16_head(gate + i, n), load16_head(up + i, n)), n);
    }
    struct batch hidden = job->m->hidden;
    batch_set_token(&hidden, pair, gate, job->mode, job->kind);
}

/* results[place] = down(silu(gate x) * up x) for every pair; `x` holds the tokens, singly. */
static int ffn_pairs(struct ffn_memory *m, const struct routing *r, const struct batch *x, enum mode mode,
                     float *results) {
    const struct expert *any = r->experts[0];
    const int width = any->gate.rows;
    const enum kind kind = any->gate.kind;
    if (ffn_create(m, r, width, x->layout == AS_FLOATS) != 0) return -1;
    int num_parts = 0;
    for (int e = 0; e < r->num_experts; e++) {
        const int begin = r->begins[e], n = r->begins[e + 1] - begin;
        const int *tokens = r->tokens + begin;
        const bool is_repeated = e > 0 && begin - r->begins[e - 1] == n && !memcmp(tokens, tokens - n, n * sizeof *tokens);
        if (!is_repeated) { /* a single token goes to all its experts in the same form */
            m->inputs[num_parts] = gathered_shape(x, n, kind);
            m->parts[num_parts] = (struct gathered){&m->inputs[num_parts], tokens, 0};
            num_parts++;
        }
        const struct batch *input = &m->inputs[num_parts - 1];
        const size_t at = (size_t)begin * width;
        m->products[2 * e] = (struct product){r->experts[e]->gate, input, m->gate + at, width, NULL};
        m->products[2 * e + 1] = (struct product){r->experts[e]->up, input, m->up + at, width, NULL};
    }
    if (gather(m->parts, num_parts, x, &m->input_memory) != 0) return -1;
    run_products(m->products, 2 * r->num_experts);
    struct hidden_job job = {m, mode, kind, width};
    pool_run(hidden_task, &job, r->num_pairs);
    for (int e = 0; e < r->num_experts; e++) {
        const int begin = r->begins[e];
        m->hiddens[e] = gathered_shape(&m->hidden, r->begins[e + 1] - begin, kind);
        m->parts[e] = (struct gathered){&m->hiddens[e], NULL, begin};
        m->products[e] =
            (struct product){r->experts[e]->down, &m->hiddens[e], results, any->down.rows, r->places + begin};
    }
    if (gather(m->parts, r->num_experts, &m->hidden, &m->hidden_memory) != 0) return -1;
    run_products(m->products, r->num_experts);
    return 0;
}

/* Orders the pairs by expert, tokens ascending: counting sort. `chosen` [T * K], or NULL: one expert, T pairs. */
static int routing_create(struct routing *r, const struct expert *experts, int num_experts, const int32_t *chosen,
                          int num_tokens, int num_choices) {
    const int pairs = num_tokens * num_choices;
    int *next = calloc((size_t)num_experts + 1, sizeof *next);
    r->num_pairs = pairs;
    r->experts = calloc(num_experts, sizeof *r->experts);
    r->begins = calloc((size_t)num_experts + 1, sizeof *r->begins);
    r->tokens = malloc(pairs * sizeof *r->tokens);
    r->places = malloc(pairs * sizeof *r->places);
    if (!next || !r->experts || !r->begins || !r->tokens || !r->places) {
        free(next);
        return -1;
    }
    for (int i = 0; i < pairs; i++) next[(chosen ? chosen[i] : 0) + 1]++;
    for (int e = 0; e < num_experts; e++) {
        if (next[e + 1]) {
            r->experts[r->num_experts++] = experts + e;
            r->begins[r->num_experts] = next[e] + next[e + 1];
        }
        next[e + 1] += next[e];
    }
    for (int i = 0; i < pairs; i++) {
        const int at = next[chosen ? chosen[i] : 0]++;
        r->tokens[at] = i / num_choices;
        r->places[at] = i;
    }
    free(next);
    return 0;
}

static void routing_free(struct routing *r) {
    free(r->experts);
    free(r->begins);
    free(r->tokens);
    free(r->places);
}

struct combine_job {
    const float *results, *weights;
    float *y;
    int num_choices, columns;
};

/* ((w0 * e0) + w1 * e1) + ... of one token */
static void combine_task(void *arg, int token) {
    const struct combine_job *job = arg;
    float *y = job->y + (size_t)token * job->columns;
    for (int k = 0; k < job->num_choices; k++) {
        const size_t pair = (size_t)token * job->num_choices + k;
        const float *e = job->results + pair * job->columns, weight = job->weights[pair];
        if (k == 0)
            for (int i = 0; i < job->columns; i++) y[i] = weight * e[i];
        else
            for (int i = 0; i < job->columns; i++) y[i] = y[i] + weight * e[i];
    }
}

static int expert_ffn(const struct expert *experts, int num_experts, const float *x, int tokens, const int32_t *chosen,
                      const float *weights, int num_choices, enum mode mode, float *y) {
    if (tokens == 0) return 0;
    const int columns = experts[0].gate.columns;
    struct batch batch = {0};
    struct routing routing = {0};
    struct ffn_memory memory = {0};
    const size_t pairs = (size_t)tokens * num_choices;
    float *results = weights ? scratch_take(pairs * columns * sizeof *results) : y;
    int failed = !results ||
                 batch_from_rows(&batch, x, columns, tokens, columns, mode, experts[0].gate.kind) != 0 ||
                 routing_create(&routing, experts, num_experts, chosen, tokens, num_choices) != 0 ||
                 ffn_pairs(&memory, &routing, &batch, mode, results) != 0;
    if (!failed && weights) {
        struct combine_job job = {results, weights, y, num_choices, columns};
        pool_run(combine_task, &job, tokens);
    }
    ffn_free(&memory);
    routing_free(&routing);
    batch_free(&batch);
    if (weights) scratch_give(results);
    return failed ? -1 : 0;
}
