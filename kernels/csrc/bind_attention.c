#include "bind_matrix.h"

#include <stdlib.h>
#include <string.h>

/* Rows may be absent, then tokens see positions 0 .. counts[t]-1. */
static bool take_rows(struct attention *a, const struct array *rows, const struct array *counts) {
    if (!array_size(counts, "counts", 0, a->num_tokens)) return false;
    if (rows->data && !array_size(rows, "rows", 0, a->num_tokens)) return false;
    a->counts = counts->data;
    a->rows = rows->data;
    a->max_rows = rows->data ? (int)rows->shape[1] : 0;
    return true;
}

/* Every position that tokens first .. stop-1 see must exist in a cache of `size`. */
static bool check_rows(const struct attention *a, int first, int stop, Py_ssize_t size) {
    Py_ssize_t limit = a->rows ? a->max_rows : size;
    for (int t = first; t < stop; t++) {
        if (a->counts[t] < 1 || a->counts[t] > limit) {
            PyErr_Format(PyExc_ValueError, "counts: token %d sees %d rows, expected 1 to %zd", t, a->counts[t], limit);
            return false;
        }
        for (int j = 0; a->rows && j < a->counts[t]; j++) {
            int32_t row = a->rows[(ptrdiff_t)t * a->max_rows + j];
            if (row < 0 || row >= size) {
                PyErr_Format(PyExc_ValueError, "rows: token %d sees row %d, expected 0 to %zd", t, row, size - 1);
                return false;
            }
        }
    }
    return true;
}

static bool run(const struct attention *a) {
    int error = 0;
    if (a->num_tokens == 0) return true;
    Py_BEGIN_ALLOW_THREADS
    error = active->attend(a);
    Py_END_ALLOW_THREADS
    if (error) PyErr_NoMemory();
    return error == 0;
}

static bool read_rows(struct array *rows, PyObject *object) {
    return object == Py_None || array_read(rows, object, "rows", "i", 2);
}

/* Values are the first columns of a cached row, as wide as a query. */
static bool check_heads(const struct array *q, const struct array *out) {
    if (out->shape[2] >= 1 && out->shape[2] <= q->shape[2] && q->shape[1] >= 1) return true;
    PyErr_Format(PyExc_ValueError, "out: found %zd heads of %zd values, expected at least 1 of 1 to %zd", q->shape[1],
                 out->shape[2], q->shape[2]);
    return false;
}

static PyObject *py_attend_latent(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array q = {0}, cache = {0}, rows = {0}, counts = {0}, out = {0};
    double scale;
    bool ok = num_arguments("attend_latent", nargs, 6) && array_read(&q, args[0], "q", "f", 3) &&
              array_read(&cache, args[1], "cache", "fH", 2) && array_size(&cache, "cache", 1, q.shape[2]) &&
              read_rows(&rows, args[2]) && array_read(&counts, args[3], "counts", "i", 1) &&
              float_argument(args[4], &scale) && array_write(&out, args[5], "out", "f", 3) &&
              array_size(&out, "out", 0, q.shape[0]) && array_size(&out, "out", 1, q.shape[1]) && check_heads(&q, &out);
    if (ok) {
        int width = (int)q.shape[2];
        struct attention a = {
            .q = q.data, .keys = cache.data, .values = cache.data, .key_stride = width, .value_stride = width,
            .is_bf16 = cache.type == 'H', .num_tokens = (int)q.shape[0], .num_heads = (int)q.shape[1],
            .num_kv_heads = 1, .key_width = width, .value_width = (int)out.shape[2], .scale = (float)scale,
            .out = out.data,
        };
        ok = take_rows(&a, &rows, &counts) && check_rows(&a, 0, a.num_tokens, cache.shape[0]) && run(&a);
    }
    array_release(&q), array_release(&cache), array_release(&rows), array_release(&counts), array_release(&out);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

/* Caches of several sequences, and for each token the one that it sees. */
struct sequences {
    struct array *caches;
    const void **of_token;
    Py_ssize_t num;
};

/* Tokens stops[i-1] .. stops[i]-1 are of cache i; what they see of it must exist. */
static bool read_sequences(struct sequences *s, PyObject *caches, const struct array *stops, struct attention *a) {
    Py_ssize_t num = PyTuple_Check(caches) ? PyTuple_Size(caches) : 0;
    if (num < 1) {
        PyErr_SetString(PyExc_TypeError, "caches: expected a tuple of at least one array");
        return false;
    }
    if (!array_size(stops, "stops", 0, num)) return false;
    s->caches = calloc(num, sizeof *s->caches);
    s->of_token = malloc((a->num_tokens + 1) * sizeof *s->of_token);
    if (!s->caches || !s->of_token) {
        PyErr_NoMemory();
        return false;
    }
    const int32_t *stop = stops->data;
    for (int first = 0; s->num < num; first = stop[s->num++]) {
        struct array *cache = &s->caches[s->num];
        const char *types = s->num == 0 ? "fH" : s->caches[0].type == 'H' ? "H" : "f";
        if (stop[s->num] < first || stop[s->num] > a->num_tokens || (s->num == num - 1 && stop[s->num] < a->num_tokens)) {
            PyErr_Format(PyExc_ValueError, "stops: found %d behind %d, expected them to ascend to %d", stop[s->num], first,
                         a->num_tokens);
            return false;
        }
        if (!array_read(cache, PyTuple_GetItem(caches, s->num), "cache", types, 2)) return false;
        for (int t = first; t < stop[s->num]; t++) s->of_token[t] = cache->data;
        if (!array_size(cache, "cache", 1, a->key_width) || !check_rows(a, first, stop[s->num], cache->shape[0])) {
            s->num++;
            return false;
        }
    }
    a->token_keys = s->of_token;
    a->is_bf16 = s->caches[0].type == 'H';
    return true;
}

static void release_sequences(struct sequences *s) {
    for (Py_ssize_t i = 0; i < s->num; i++) array_release(&s->caches[i]);
    free(s->caches);
    free(s->of_token);
}

/* attend_latents(q, caches, stops, rows, counts, scale, out) */
static PyObject *py_attend_latents(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array q = {0}, stops = {0}, rows = {0}, counts = {0}, out = {0};
    struct sequences sequences = {0};
    double scale;
    bool ok = num_arguments("attend_latents", nargs, 7) && array_read(&q, args[0], "q", "f", 3) &&
              array_read(&stops, args[2], "stops", "i", 1) && read_rows(&rows, args[3]) &&
              array_read(&counts, args[4], "counts", "i", 1) && float_argument(args[5], &scale) &&
              array_write(&out, args[6], "out", "f", 3) && array_size(&out, "out", 0, q.shape[0]) &&
              array_size(&out, "out", 1, q.shape[1]) && check_heads(&q, &out);
    if (ok) {
        int width = (int)q.shape[2];
        struct attention a = {
            .q = q.data, .key_stride = width, .value_stride = width, .num_tokens = (int)q.shape[0],
            .num_heads = (int)q.shape[1], .num_kv_heads = 1, .key_width = width, .value_width = (int)out.shape[2],
            .scale = (float)scale, .out = out.data,
        };
        ok = take_rows(&a, &rows, &counts) && read_sequences(&sequences, args[1], &stops, &a) && run(&a);
    }
    release_sequences(&sequences);
    array_release(&q), array_release(&stops), array_release(&rows), array_release(&counts), array_release(&out);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

struct absorbed {
    const float *q_nope, *q_rope; /* [T, H, nope], [T, H, rope] */
    struct matrix kv_b;           /* [H * (nope + value), rank] */
    int nope, rope, rank, value;
    enum mode mode;
    float *out; /* [T, H, value] */
};

/* Three kernels one after the other; 0, or -1 without memory. */
static int run_absorbed(const struct absorbed *b, struct attention *a) {
    const size_t num_heads = (size_t)a->num_tokens * a->num_heads;
    float *latent = malloc(num_heads * b->rank * sizeof *latent); /* absorbed queries, later attended latents */
    float *queries = malloc(num_heads * (b->rank + b->rope) * sizeof *queries);
    int failed = latent && queries ? 0 : -1;
    if (!failed)
        failed = active->absorb_query(b->q_nope, a->num_tokens, a->num_heads, b->nope, &b->kv_b, b->nope + b->value, latent);
    if (!failed) {
        for (size_t head = 0; head < num_heads; head++) {
            float *query = queries + head * (b->rank + b->rope);
            memcpy(query, latent + head * b->rank, b->rank * sizeof *query);
            memcpy(query + b->rank, b->q_rope + head * b->rope, b->rope * sizeof *query);
        }
        a->q = queries;
        a->out = latent;
        failed = active->attend(a);
    }
    if (!failed)
        failed = active->expand_value(latent, a->num_tokens, a->num_heads, &b->kv_b, b->nope + b->value, b->nope,
                                      b->mode, b->out);
    free(latent);
    free(queries);
    return failed;
}

/* attend_absorbed(q_nope, q_rope, bits, group, data, scales, cache, rows, counts, scale, activations, out) */
static PyObject *py_attend_absorbed(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array q_nope = {0}, q_rope = {0}, cache = {0}, rows = {0}, counts = {0}, out = {0};
    struct matrix_arrays arrays = {0};
    struct absorbed b = {0};
    struct attention a = {0};
    double scale;
    bool ok = num_arguments("attend_absorbed", nargs, 8 + MATRIX_ARGUMENTS) &&
              array_read(&q_nope, args[0], "q_nope", "f", 3) && array_read(&q_rope, args[1], "q_rope", "f", 3) &&
              array_size(&q_rope, "q_rope", 0, q_nope.shape[0]) && array_size(&q_rope, "q_rope", 1, q_nope.shape[1]) &&
              array_read(&cache, args[6], "cache", "fH", 2) && read_rows(&rows, args[7]) &&
              array_read(&counts, args[8], "counts", "i", 1) && float_argument(args[9], &scale) &&
              mode_argument(args[10], &b.mode) && array_write(&out, args[11], "out", "f", 3) &&
              array_size(&out, "out", 0, q_nope.shape[0]) && array_size(&out, "out", 1, q_nope.shape[1]);
    if (ok && (q_nope.shape[1] < 1 || cache.shape[1] <= q_rope.shape[2])) {
        PyErr_Format(PyExc_ValueError, "cache: found rows of %zd values for %zd heads, expected latents before %zd of rope",
                     cache.shape[1], q_nope.shape[1], q_rope.shape[2]);
        ok = false;
    }
    if (ok) {
        b.nope = (int)q_nope.shape[2], b.rope = (int)q_rope.shape[2], b.value = (int)out.shape[2];
        b.rank = (int)(cache.shape[1] - q_rope.shape[2]);
        b.q_nope = q_nope.data, b.q_rope = q_rope.data, b.out = out.data;
        ok = matrix_arguments(&b.kv_b, &arrays, args + 2, b.rank) &&
             array_size(&arrays.data, "kv_b", 0, q_nope.shape[1] * (q_nope.shape[2] + out.shape[2]));
    }
    if (ok) {
        int width = (int)cache.shape[1];
        a = (struct attention){
            .keys = cache.data, .values = cache.data, .key_stride = width, .value_stride = width,
            .is_bf16 = cache.type == 'H', .num_tokens = (int)q_nope.shape[0], .num_heads = (int)q_nope.shape[1],
            .num_kv_heads = 1, .key_width = width, .value_width = b.rank, .scale = (float)scale,
        };
        ok = take_rows(&a, &rows, &counts) && check_rows(&a, 0, a.num_tokens, cache.shape[0]);
    }
    if (ok && a.num_tokens > 0) {
        int failed;
        Py_BEGIN_ALLOW_THREADS
        failed = run_absorbed(&b, &a);
        Py_END_ALLOW_THREADS
        if (failed) PyErr_NoMemory();
        ok = !failed;
    }
    array_release(&q_nope), array_release(&q_rope), array_release(&cache), array_release(&rows);
    array_release(&counts), array_release(&out), matrix_release(&arrays);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_attend_explicit(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array q = {0}, keys = {0}, values = {0}, rows = {0}, counts = {0}, out = {0};
    double scale;
    bool ok = num_arguments("attend_explicit", nargs, 7) && array_read(&q, args[0], "q", "f", 3) &&
              array_read(&keys, args[1], "keys", "fH", 3) && array_size(&keys, "keys", 2, q.shape[2]) &&
              array_read(&values, args[2], "values", keys.type == 'H' ? "H" : "f", 3) &&
              array_size(&values, "values", 0, keys.shape[0]) && array_size(&values, "values", 1, keys.shape[1]) &&
              read_rows(&rows, args[3]) && array_read(&counts, args[4], "counts", "i", 1) &&
              float_argument(args[5], &scale) && array_write(&out, args[6], "out", "f", 3) &&
              array_size(&out, "out", 0, q.shape[0]) && array_size(&out, "out", 1, q.shape[1]) &&
              array_size(&out, "out", 2, values.shape[2]);
    if (ok && (keys.shape[1] < 1 || q.shape[1] < 1 || q.shape[1] % keys.shape[1] || q.shape[2] < 1 ||
               values.shape[2] < 1)) {
        PyErr_Format(PyExc_ValueError, "keys: %zd key heads cannot serve %zd query heads", keys.shape[1], q.shape[1]);
        ok = false;
    }
    if (ok) {
        int key_width = (int)q.shape[2], value_width = (int)values.shape[2], num_kv_heads = (int)keys.shape[1];
        struct attention a = {
            .q = q.data, .keys = keys.data, .values = values.data,
            .key_stride = (ptrdiff_t)num_kv_heads * key_width, .key_head_stride = key_width,
            .value_stride = (ptrdiff_t)num_kv_heads * value_width, .value_head_stride = value_width,
            .is_bf16 = keys.type == 'H', .num_tokens = (int)q.shape[0], .num_heads = (int)q.shape[1],
            .num_kv_heads = num_kv_heads, .key_width = key_width, .value_width = value_width,
            .scale = (float)scale, .out = out.data,
        };
        ok = take_rows(&a, &rows, &counts) && check_rows(&a, 0, a.num_tokens, keys.shape[0]) && run(&a);
    }
    array_release(&q), array_release(&keys), array_release(&values), array_release(&rows), array_release(&counts);
    array_release(&out);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

PyMethodDef attention_methods[] = {
    METHOD(attend_latent, "attend_latent(q, cache, rows, counts, scale, out)"),
    METHOD(attend_latents, "attend_latents(q, caches, stops, rows, counts, scale, out)"),
    METHOD(attend_absorbed,
           "attend_absorbed(q_nope, q_rope, bits, group, data, scales, cache, rows, counts, scale, activations, out)"),
    METHOD(attend_explicit, "attend_explicit(q, keys, values, rows, counts, scale, out)"),
    {NULL, NULL, 0, NULL},
};
