#include "bind.h"
#include "dispatch.h"

static bool check_counts(const struct array *counts, Py_ssize_t num_tokens, Py_ssize_t num_positions) {
    if (!array_size(counts, "counts", 0, num_tokens)) return false;
    const int32_t *count = counts->data;
    for (Py_ssize_t t = 0; t < num_tokens; t++)
        if (count[t] < 0 || count[t] > num_positions) {
            PyErr_Format(PyExc_ValueError, "counts: token %zd sees %d positions, expected 0 to %zd", t, count[t],
                         num_positions);
            return false;
        }
    return true;
}

static PyObject *py_index_scores(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array q = {0}, head_weights = {0}, keys = {0}, counts = {0}, out = {0};
    double scale;
    bool ok = num_arguments("index_scores", nargs, 6) && array_read(&q, args[0], "q", "f", 3) &&
              array_read(&head_weights, args[1], "head_weights", "f", 2) &&
              array_size(&head_weights, "head_weights", 0, q.shape[0]) &&
              array_size(&head_weights, "head_weights", 1, q.shape[1]) &&
              array_read(&keys, args[2], "keys", "fH", 2) && array_size(&keys, "keys", 1, q.shape[2]) &&
              array_read(&counts, args[3], "counts", "i", 1) && check_counts(&counts, q.shape[0], keys.shape[0]) &&
              float_argument(args[4], &scale) && array_write(&out, args[5], "out", "f", 2) &&
              array_size(&out, "out", 0, q.shape[0]) && array_size(&out, "out", 1, keys.shape[0]);
    if (ok) {
        struct index_scores a = {
            .q = q.data, .head_weights = head_weights.data, .keys = keys.data, .is_bf16 = keys.type == 'H',
            .counts = counts.data, .num_tokens = (int)q.shape[0], .num_heads = (int)q.shape[1],
            .width = (int)q.shape[2], .num_positions = (int)keys.shape[0], .scale = (float)scale, .out = out.data,
        };
        Py_BEGIN_ALLOW_THREADS
        active->index_scores(&a);
        Py_END_ALLOW_THREADS
    }
    array_release(&q), array_release(&head_weights), array_release(&keys), array_release(&counts);
    array_release(&out);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_select_top(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array scores = {0}, counts = {0}, rows = {0}, num = {0};
    bool ok = num_arguments("select_top", nargs, 4) && array_read(&scores, args[0], "scores", "f", 2) &&
              array_read(&counts, args[1], "counts", "i", 1) &&
              check_counts(&counts, scores.shape[0], scores.shape[1]) &&
              array_write(&rows, args[2], "rows", "i", 2) && array_size(&rows, "rows", 0, scores.shape[0]) &&
              array_write(&num, args[3], "num", "i", 1) && array_size(&num, "num", 0, scores.shape[0]);
    if (ok) {
        struct select_top a = {
            .scores = scores.data, .counts = counts.data, .num_tokens = (int)scores.shape[0],
            .num_positions = (int)scores.shape[1], .max_rows = (int)rows.shape[1], .rows = rows.data, .num = num.data,
        };
        Py_BEGIN_ALLOW_THREADS
        active->select_top(&a);
        Py_END_ALLOW_THREADS
    }
    array_release(&scores), array_release(&counts), array_release(&rows), array_release(&num);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

PyMethodDef indexer_methods[] = {
    METHOD(index_scores, "index_scores(q, head_weights, keys, counts, scale, out)"),
    METHOD(select_top, "select_top(scores, counts, rows, num)"),
    {NULL, NULL, 0, NULL},
};
