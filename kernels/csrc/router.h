/* Router logits and the choice of experts; same bits as glm_gpu.kernels.router. */
#pragma once
#include <math.h>
#include <stdlib.h>

#include "dispatch.h"
#include "pool.h"
#include "tile.h"
#include "vec_exp.h"

#define ROUTE_TOKENS 16 /* tokens of a logit task: they share sixteen rows of the gate in the second-level cache */

struct route_pass {
    const struct route *a;
    int padded;       /* experts rounded up to 16 */
    float *logits;    /* [T, padded]; then the probability of each expert */
};

static void logit_task(void *job, int chunk) {
    const struct route_pass *pass = job;
    const struct route *a = pass->a;
    int expert_tasks = pass->padded / ROWS;
    int first_expert = chunk % expert_tasks * ROWS, first_token = chunk / expert_tasks * ROUTE_TOKENS;
    int whole = a->hidden / 64 * 64, rest = a->hidden - whole;
    const float *rows[ROWS];
    ptrdiff_t offsets[ROWS];
    struct tile end;
    for (int i = 0; i < ROWS; i++) { /* the last expert stands in for those beyond it */
        int expert = first_expert + i < a->num_experts ? first_expert + i : a->num_experts - 1;
        rows[i] = a->gate + (ptrdiff_t)expert * a->hidden;
        offsets[i] = (ptrdiff_t)expert * a->hidden + whole;
    }
    if (rest) load_tile(&end, a->gate, false, offsets, rest);
    for (int t = first_token; t < first_token + ROUTE_TOKENS && t < a->num_tokens; t++) {
        const float *x = a->x + (ptrdiff_t)t * a->hidden;
        f32x16 acc = dot_rows16(set16(0.0f), x, rows, whole);
        if (rest) {
            float room[TILE_COLUMNS] __attribute__((aligned(64)));
            acc = dot_rows16(acc, whole_groups(x + whole, rest, room), end.rows, 64);
        }
        store16(pass->logits + (ptrdiff_t)t * pass->padded + first_expert, acc);
    }
}

/* Sigmoid of every logit in place; choice = sigmoid + bias, -inf for experts of refused groups. */
static void sigmoid_choice(const struct route *a, float *scores, float *choice, int padded) {
    for (int e = 0; e < padded; e += 16) {
        f32x16 x = load16(scores + e);
        EACH_PART x.part[part] = -x.part[part];
        store16(scores + e, div16(set16(1.0f), add16(set16(1.0f), exp16(x))));
    }
    for (int e = 0; e < a->num_experts; e++) choice[e] = scores[e] + a->bias[e];
    if (a->n_group == 1) return;
    int size = a->num_experts / a->n_group;
    float strength[MAX_EXPERTS];
    for (int group = 0; group < a->n_group; group++) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = group * size; e < (group + 1) * size; e++) {
            if (choice[e] > first) second = first, first = choice[e];
            else if (choice[e] > second) second = choice[e];
        }
        strength[group] = first + second;
    }
    for (int group = 0; group < a->n_group; group++) {
        int num_better = 0;
        for (int other = 0; other < a->n_group; other++)
            num_better += strength[other] > strength[group] || (strength[other] == strength[group] && other < group);
        for (int e = group * size; num_better >= a->topk_group && e < (group + 1) * size; e++) choice[e] = -INFINITY;
    }
}

/* Softmax over all logits in place; the probability is the choice, too. */
static void softmax_choice(const struct route *a, float *scores, float *choice, int padded) {
    float top = -INFINITY;
    for (int e = 0; e < a->num_experts; e++) top = scores[e] > top ? scores[e] : top;
    for (int e = a->num_experts; e < padded; e++) scores[e] = -INFINITY;
    f32x16 lanes = set16(0.0f);
    for (int e = 0; e < padded; e += 16) {
        f32x16 exponential = exp16(sub16(load16(scores + e), set16(top)));
        store16(scores + e, exponential);
        lanes = add16(lanes, exponential);
    }
    f32x16 sum = set16(fold16(lanes));
    for (int e = 0; e < padded; e += 16) {
        f32x16 probability = div16(load16(scores + e), sum);
        store16(scores + e, probability);
        store16(choice + e, probability);
    }
}

static void choose_task(void *job, int token) {
    const struct route_pass *pass = job;
    const struct route *a = pass->a;
    float *scores = pass->logits + (ptrdiff_t)token * pass->padded;
    int32_t *ids = a->ids + (ptrdiff_t)token * a->experts_per_tok;
    float *weights = a->weights + (ptrdiff_t)token * a->experts_per_tok;
    float choice[MAX_EXPERTS];
    bool is_taken[MAX_EXPERTS] = {false};
    if (a->bias) sigmoid_choice(a, scores, choice, pass->padded);
    else softmax_choice(a, scores, choice, pass->padded);
    float sum = 0.0f;
    for (int k = 0; k < a->experts_per_tok; k++) {
        int best = -1;
        for (int e = 0; e < a->num_experts; e++)
            if (!is_taken[e] && (best < 0 || choice[e] > choice[best])) best = e;
        is_taken[best] = true;
        ids[k] = best;
        weights[k] = scores[best];
        sum += weights[k];
    }
    if (a->bias) sum += 1e-20f;
    for (int k = 0; k < a->experts_per_tok; k++) {
        if (a->norm_topk_prob) weights[k] /= sum;
        weights[k] *= a->scale;
    }
}

static int route(const struct route *a) {
    struct route_pass pass = {.a = a, .padded = ROUND_UP(a->num_experts, 16)};
    pass.logits = malloc((size_t)a->num_tokens * pass.padded * sizeof(float));
    if (!pass.logits) return -1;
    pool_run(logit_task, &pass, pass.padded / ROWS * (ROUND_UP(a->num_tokens, ROUTE_TOKENS) / ROUTE_TOKENS));
    pool_run(choose_task, &pass, a->num_tokens);
    free(pass.logits);
    return 0;
}
