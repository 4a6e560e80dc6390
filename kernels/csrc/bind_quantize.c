#include "bind.h"
#include "dispatch.h"

#include <limits.h>

/* Weights, and what lies beside them for each group: [rows, columns] and [rows, groups]. */
static bool rows_and_groups(const struct array *w, int group, const struct array *beside, const char *name) {
    Py_ssize_t columns = w->shape[1];
    if (w->shape[0] > INT_MAX || columns > INT_MAX) {
        PyErr_SetString(PyExc_ValueError, "w has more rows or columns than an int holds");
        return false;
    }
    if (group % 64 && group < columns) {
        PyErr_Format(PyExc_ValueError, "group is %d, expected a multiple of 64 or at least %zd", group, columns);
        return false;
    }
    return array_size(beside, name, 0, w->shape[0]) && array_size(beside, name, 1, (columns + group - 1) / group);
}

static struct group_rows group_rows_of(const struct array *w, int group) {
    return (struct group_rows){
        .w = w->data, .num_rows = (int)w->shape[0], .num_columns = (int)w->shape[1], .group = group,
    };
}

static PyObject *py_group_absmax(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array w = {0}, out = {0};
    int group;
    bool is_finite = false;
    bool ok = num_arguments("group_absmax", nargs, 3) && array_read(&w, args[0], "w", "f", 2) &&
              int_argument(args[1], "group", 1, INT_MAX, &group) && array_write(&out, args[2], "out", "f", 2) &&
              rows_and_groups(&w, group, &out, "out");
    if (ok) {
        struct group_rows a = group_rows_of(&w, group);
        Py_BEGIN_ALLOW_THREADS
        is_finite = active->group_absmax(&a, out.data);
        Py_END_ALLOW_THREADS
    }
    array_release(&w), array_release(&out);
    return ok ? PyBool_FromLong(is_finite) : NULL;
}

static PyObject *py_group_errors(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array w = {0}, scales = {0}, out = {0};
    int group, qmax, failed = 0;
    bool ok = num_arguments("group_errors", nargs, 5) && array_read(&w, args[0], "w", "f", 2) &&
              array_read(&scales, args[1], "scales", "f", 2) && int_argument(args[2], "group", 1, INT_MAX, &group) &&
              int_argument(args[3], "qmax", 1, 127, &qmax) && array_write(&out, args[4], "out", "d", 2) &&
              rows_and_groups(&w, group, &scales, "scales") && rows_and_groups(&w, group, &out, "out");
    if (ok) {
        struct group_rows a = group_rows_of(&w, group);
        Py_BEGIN_ALLOW_THREADS
        failed = active->group_errors(&a, scales.data, qmax, out.data);
        Py_END_ALLOW_THREADS
    }
    array_release(&w), array_release(&scales), array_release(&out);
    if (!ok) return NULL;
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *py_pack_rows(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array w = {0}, scales = {0}, out = {0};
    int group, bits;
    bool ok = num_arguments("pack_rows", nargs, 5) && array_read(&w, args[0], "w", "f", 2) &&
              array_read(&scales, args[1], "scales", "f", 2) && int_argument(args[2], "group", 1, INT_MAX, &group) &&
              int_argument(args[3], "bits", 2, 8, &bits) && array_write(&out, args[4], "out", "B", 2) &&
              rows_and_groups(&w, group, &scales, "scales") && array_size(&out, "out", 0, w.shape[0]) &&
              array_size(&out, "out", 1, (w.shape[1] * bits + 7) / 8);
    if (ok && bits != 2 && bits != 4 && bits != 8) {
        PyErr_Format(PyExc_ValueError, "bits is %d, expected 2, 4 or 8", bits);
        ok = false;
    }
    if (ok) {
        struct group_rows a = group_rows_of(&w, group);
        Py_BEGIN_ALLOW_THREADS
        active->pack_rows(&a, scales.data, bits, out.data);
        Py_END_ALLOW_THREADS
    }
    array_release(&w), array_release(&scales), array_release(&out);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_decode_fp8(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array codes = {0}, table = {0}, scales = {0}, out = {0};
    struct fp8_rows a = {0};
    bool ok = num_arguments("decode_fp8", nargs, 7) && array_read(&codes, args[0], "codes", "B", 2) &&
              array_read(&table, args[1], "table", "f", 1) && array_size(&table, "table", 0, 256) &&
              array_read(&scales, args[2], "scales", "f", 2) &&
              int_argument(args[3], "block_rows", 1, INT_MAX, &a.block_rows) &&
              int_argument(args[4], "block_columns", 1, INT_MAX, &a.block_columns) &&
              int_argument(args[5], "first_row", 0, INT_MAX, &a.first_row) &&
              array_write(&out, args[6], "out", "f", 2) && array_size(&out, "out", 0, codes.shape[0]) &&
              array_size(&out, "out", 1, codes.shape[1]);
    if (ok && (codes.shape[1] > INT_MAX || a.first_row + codes.shape[0] > INT_MAX ||
               scales.shape[0] * a.block_rows < a.first_row + codes.shape[0] ||
               scales.shape[1] * a.block_columns < codes.shape[1])) {
        PyErr_SetString(PyExc_ValueError, "scales do not cover all codes");
        ok = false;
    }
    if (ok) {
        a.codes = codes.data, a.table = table.data, a.scales = scales.data;
        a.num_rows = (int)codes.shape[0], a.num_columns = (int)codes.shape[1], a.grid_columns = (int)scales.shape[1];
        Py_BEGIN_ALLOW_THREADS
        active->decode_fp8(&a, out.data);
        Py_END_ALLOW_THREADS
    }
    array_release(&codes), array_release(&table), array_release(&scales), array_release(&out);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

/* To nearest, ties to even; NaN stays NaN, made quiet. */
static uint16_t bf16_of(uint32_t bits) {
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static PyObject *py_round_bf16(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array values = {0}, out = {0};
    bool ok = num_arguments("round_bf16", nargs, 2) && array_read(&values, args[0], "values", "f", 2) &&
              array_write(&out, args[1], "out", "H", 2) && array_size(&out, "out", 0, values.shape[0]) &&
              array_size(&out, "out", 1, values.shape[1]);
    if (ok) {
        const uint32_t *bits = values.data;
        uint16_t *rounded = out.data;
        Py_ssize_t size = values.shape[0] * values.shape[1];
        for (Py_ssize_t i = 0; i < size; i++) rounded[i] = bf16_of(bits[i]);
    }
    array_release(&values), array_release(&out);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

PyMethodDef quantize_methods[] = {
    METHOD(group_absmax, "group_absmax(w, group, out): whether all weights are finite; out gets their groups' largest."),
    METHOD(group_errors, "group_errors(w, scales, group, qmax, out): each group's squared error under its scale."),
    METHOD(pack_rows, "pack_rows(w, scales, group, bits, out): packed integers under given scales."),
    METHOD(decode_fp8, "decode_fp8(codes, table, scales, block_rows, block_columns, first_row, out)"),
    METHOD(round_bf16, "round_bf16(values, out): bit patterns of the nearest bf16 values."),
    {NULL, NULL, 0, NULL},
};
