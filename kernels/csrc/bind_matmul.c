/* Python functions of the products: matmul, matmuls, mlp, expert_ffn, absorb_query, expand_value. */
#include "bind_matrix.h"

#include <stdlib.h>

void matrix_release(struct matrix_arrays *arrays) {
    array_release(&arrays->data);
    array_release(&arrays->scales);
}

static bool kind_arguments(PyObject *bits_object, PyObject *group_object, enum kind *kind, int *group) {
    int bits;
    if (!int_argument(bits_object, "bits", 2, 32, &bits) || !int_argument(group_object, "group", 0, 128, group))
        return false;
    for (*kind = KIND_F32; *kind <= KIND_INT2; ++*kind)
        if (bits_of(*kind) == bits) break;
    if (*kind > KIND_INT2 || (*group != 0 && *group != 64 && *group != 128) || (*group && !is_packed(*kind))) {
        PyErr_Format(PyExc_ValueError, "bits %d in groups of %d: no such format", bits, *group);
        return false;
    }
    return true;
}

bool matrix_arguments(struct matrix *w, struct matrix_arrays *arrays, PyObject *const *args, int columns) {
    static const char *const types[] = {"f", "H", "B", "B", "B"};
    *w = (struct matrix){.columns = columns};
    if (!kind_arguments(args[0], args[1], &w->kind, &w->scale_group)) return false;
    if (!array_read(&arrays->data, args[2], "weight data", types[w->kind], 2)) return false;
    w->data = arrays->data.data;
    w->rows = (int)arrays->data.shape[0];
    if (!array_size(&arrays->data, "weight data", 1, is_packed(w->kind) ? (Py_ssize_t)row_bytes(w) : columns))
        return false;
    if (!is_packed(w->kind)) return true;
    if (!array_read(&arrays->scales, args[3], "weight scales", "fe", 2)) return false;
    w->scales = arrays->scales.data;
    w->half_scales = arrays->scales.type == 'e';
    return array_size(&arrays->scales, "weight scales", 0, w->rows) &&
           array_size(&arrays->scales, "weight scales", 1, scales_per_row(w));
}

bool mode_argument(PyObject *object, enum mode *mode) {
    int value;
    if (!int_argument(object, "activations", MODE_INT16, MODE_F32, &value)) return false;
    *mode = (enum mode)value;
    return true;
}

static PyObject *result(int failed) {
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* matmul(x, bits, group, data, scales, activations, out) */
static PyObject *py_matmul(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array x = {0}, y = {0};
    struct matrix_arrays arrays = {0};
    struct matrix w;
    enum mode mode;
    PyObject *returned = NULL;
    if (num_arguments("matmul", nargs, 3 + MATRIX_ARGUMENTS) && array_read(&x, args[0], "x", "f", 2) &&
        matrix_arguments(&w, &arrays, args + 1, (int)x.shape[1]) && mode_argument(args[5], &mode) &&
        array_write(&y, args[6], "out", "f", 2) && array_size(&y, "out", 0, x.shape[0]) &&
        array_size(&y, "out", 1, w.rows)) {
        int failed;
        Py_BEGIN_ALLOW_THREADS
        failed = active->matmul(&w, x.data, (int)x.shape[0], mode, y.data);
        Py_END_ALLOW_THREADS
        returned = result(failed);
    }
    array_release(&x);
    array_release(&y);
    matrix_release(&arrays);
    return returned;
}

/* One of several weights and its result: (bits, group, data, scales) and an array. */
static bool weight_arguments(struct matrix *w, struct matrix_arrays *arrays, struct array *y, PyObject *weights,
                             PyObject *outs, Py_ssize_t index, const struct array *x) {
    PyObject *weight = PyTuple_GetItem(weights, index), *out = PyTuple_GetItem(outs, index), *args[MATRIX_ARGUMENTS];
    if (!weight || !out) return false;
    if (!PyTuple_Check(weight) || PyTuple_Size(weight) != MATRIX_ARGUMENTS) {
        PyErr_SetString(PyExc_ValueError, "weights: expected tuples of bits, group, data and scales");
        return false;
    }
    for (int i = 0; i < MATRIX_ARGUMENTS; i++) args[i] = PyTuple_GetItem(weight, i);
    return matrix_arguments(w, arrays, args, (int)x->shape[1]) && array_write(y, out, "out", "f", 2) &&
           array_size(y, "out", 0, x->shape[0]) && array_size(y, "out", 1, w->rows);
}

#define MAX_WEIGHTS 8

/* matmuls(x, weights, activations, outs) */
static PyObject *py_matmuls(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array x = {0}, y[MAX_WEIGHTS] = {0};
    struct matrix_arrays arrays[MAX_WEIGHTS] = {0};
    struct matrix w[MAX_WEIGHTS];
    enum mode mode;
    Py_ssize_t num_weights = 0;
    PyObject *returned = NULL;
    bool ok = num_arguments("matmuls", nargs, 4) && array_read(&x, args[0], "x", "f", 2) && mode_argument(args[2], &mode);
    if (ok && (!PyTuple_Check(args[1]) || !PyTuple_Check(args[3]) || PyTuple_Size(args[1]) > MAX_WEIGHTS ||
               PyTuple_Size(args[1]) != PyTuple_Size(args[3]))) {
        PyErr_Format(PyExc_ValueError, "matmuls: expected tuples of as many weights as results, at most %d", MAX_WEIGHTS);
        ok = false;
    }
    if (ok) num_weights = PyTuple_Size(args[1]);
    for (Py_ssize_t i = 0; ok && i < num_weights; i++)
        ok = weight_arguments(&w[i], &arrays[i], &y[i], args[1], args[3], i, &x);
    if (ok) {
        int failed = 0;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; !failed && i < num_weights; i++)
            failed = active->matmul(&w[i], x.data, (int)x.shape[0], mode, y[i].data);
        Py_END_ALLOW_THREADS
        returned = result(failed);
    }
    array_release(&x);
    for (int i = 0; i < MAX_WEIGHTS; i++) array_release(&y[i]), matrix_release(&arrays[i]);
    return returned;
}

/* mlp(x, gate x 4, up x 4, down x 4, activations, out) */
static PyObject *py_mlp(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array x = {0}, y = {0};
    struct matrix_arrays arrays[3] = {0};
    struct expert e;
    enum mode mode;
    PyObject *returned = NULL;
    if (num_arguments("mlp", nargs, 3 + 3 * MATRIX_ARGUMENTS) && array_read(&x, args[0], "x", "f", 2) &&
        matrix_arguments(&e.gate, &arrays[0], args + 1, (int)x.shape[1]) &&
        matrix_arguments(&e.up, &arrays[1], args + 5, (int)x.shape[1]) &&
        array_size(&arrays[1].data, "up", 0, e.gate.rows) &&
        matrix_arguments(&e.down, &arrays[2], args + 9, e.gate.rows) &&
        array_size(&arrays[2].data, "down", 0, x.shape[1]) && mode_argument(args[13], &mode) &&
        array_write(&y, args[14], "out", "f", 2) && array_size(&y, "out", 0, x.shape[0]) &&
        array_size(&y, "out", 1, x.shape[1])) {
        if (e.up.kind != e.gate.kind || e.down.kind != e.gate.kind) {
            PyErr_SetString(PyExc_ValueError, "mlp: gate, up and down differ in bits");
        } else {
            int failed;
            Py_BEGIN_ALLOW_THREADS
            failed = active->expert_ffn(&e, 1, x.data, (int)x.shape[0], NULL, NULL, 1, mode, y.data);
            Py_END_ALLOW_THREADS
            returned = result(failed);
        }
    }
    array_release(&x);
    array_release(&y);
    for (int i = 0; i < 3; i++) matrix_release(&arrays[i]);
    return returned;
}

/* Where a slab's parts begin: gate, up, down, and for packed formats gate.qs, up.qs, down.qs. */
static bool offsets_argument(PyObject *tuple, int expected, Py_ssize_t offsets[6]) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != expected) {
        PyErr_Format(PyExc_ValueError, "offsets: expected a tuple of %d", expected);
        return false;
    }
    for (int i = 0; i < expected; i++) {
        offsets[i] = PyLong_AsSsize_t(PyTuple_GetItem(tuple, i));
        if (offsets[i] == -1 && PyErr_Occurred()) return false;
    }
    return true;
}

static bool place_matrix(struct matrix *w, const struct array *slab, int index, const Py_ssize_t offsets[6]) {
    const Py_ssize_t length = slab->shape[0];
    const Py_ssize_t data = offsets[index], data_size = (Py_ssize_t)(w->rows * row_bytes(w));
    bool inside = data >= 0 && data <= length - data_size;
    w->data = (const uint8_t *)slab->data + (inside ? data : 0);
    if (is_packed(w->kind)) {
        const Py_ssize_t scales = offsets[index + 3];
        const Py_ssize_t scales_size = (Py_ssize_t)w->rows * scales_per_row(w) * (w->half_scales ? 2 : 4);
        inside = inside && scales >= 0 && scales <= length - scales_size;
        w->scales = (const uint8_t *)slab->data + (inside ? scales : 0);
    }
    if (!inside) PyErr_Format(PyExc_ValueError, "slab: %zd bytes are too few for its matrices", length);
    return inside;
}

static bool slab_arguments(struct expert *experts, struct array *slabs, PyObject *list, Py_ssize_t num_slabs,
                           const struct expert *form, const Py_ssize_t offsets[6]) {
    for (Py_ssize_t i = 0; i < num_slabs; i++) {
        PyObject *item = PySequence_GetItem(list, i);
        if (!item) return false;
        const bool found = array_read(&slabs[i], item, "slab", "B", 1);
        Py_DECREF(item); /* the buffer keeps its object alive */
        experts[i] = *form;
        if (!found || !place_matrix(&experts[i].gate, &slabs[i], 0, offsets) ||
            !place_matrix(&experts[i].up, &slabs[i], 1, offsets) ||
            !place_matrix(&experts[i].down, &slabs[i], 2, offsets))
            return false;
    }
    return true;
}

static bool choices_exist(const struct array *choice, Py_ssize_t num_slabs) {
    const int32_t *chosen = choice->data;
    for (Py_ssize_t i = 0; i < choice->shape[0] * choice->shape[1]; i++)
        if (chosen[i] < 0 || chosen[i] >= num_slabs) {
            PyErr_Format(PyExc_ValueError, "choice: found %d, expected 0 to %zd", (int)chosen[i], num_slabs - 1);
            return false;
        }
    return true;
}

/* expert_ffn(x, slabs, bits, group, half_scales, width, offsets, choice, weights, activations, out) */
static PyObject *py_expert_ffn(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array x = {0}, choice = {0}, weights = {0}, y = {0};
    struct array *slabs = NULL;
    struct expert form = {{0}, {0}, {0}}, *experts = NULL;
    enum mode mode;
    int half, width;
    Py_ssize_t offsets[6], num_slabs = 0;
    PyObject *returned = NULL;
    struct matrix in = {0};
    if (!num_arguments("expert_ffn", nargs, 11) || !array_read(&x, args[0], "x", "f", 2) ||
        !kind_arguments(args[2], args[3], &in.kind, &in.scale_group) ||
        !int_argument(args[4], "half_scales", 0, 1, &half) || !int_argument(args[5], "width", 1, INT32_MAX, &width) ||
        !offsets_argument(args[6], is_packed(in.kind) ? 6 : 3, offsets) ||
        !array_read(&choice, args[7], "choice", "i", 2) || !array_size(&choice, "choice", 0, x.shape[0]) ||
        !array_read(&weights, args[8], "weights", "f", 2) || !array_size(&weights, "weights", 0, x.shape[0]) ||
        !array_size(&weights, "weights", 1, choice.shape[1]) || !mode_argument(args[9], &mode) ||
        !array_write(&y, args[10], "out", "f", 2) || !array_size(&y, "out", 0, x.shape[0]) ||
        !array_size(&y, "out", 1, x.shape[1]))
        goto done;
    num_slabs = PySequence_Size(args[1]);
    if (num_slabs < 0) goto done;
    if (num_slabs == 0 || choice.shape[1] == 0 || x.shape[0] * choice.shape[1] > INT32_MAX / 2) {
        PyErr_SetString(PyExc_ValueError, "expert_ffn: expected slabs, and 1 to 2^30 choices");
        num_slabs = 0;
        goto done;
    }
    in.half_scales = half;
    in.rows = width;
    in.columns = (int)x.shape[1];
    form.gate = form.up = form.down = in;
    form.down.rows = in.columns;
    form.down.columns = width;
    slabs = calloc(num_slabs, sizeof *slabs);
    experts = calloc(num_slabs, sizeof *experts);
    if (!slabs || !experts) {
        PyErr_NoMemory();
    } else if (slab_arguments(experts, slabs, args[1], num_slabs, &form, offsets) && choices_exist(&choice, num_slabs)) {
        int failed;
        Py_BEGIN_ALLOW_THREADS
        failed = active->expert_ffn(experts, (int)num_slabs, x.data, (int)x.shape[0], choice.data, weights.data,
                                    (int)choice.shape[1], mode, y.data);
        Py_END_ALLOW_THREADS
        returned = result(failed);
    }
done:
    for (Py_ssize_t i = 0; slabs && i < num_slabs; i++) array_release(&slabs[i]);
    free(slabs);
    free(experts);
    array_release(&x);
    array_release(&choice);
    array_release(&weights);
    array_release(&y);
    return returned;
}

/* absorb_query(q, bits, group, data, scales, value_dim, out) */
static PyObject *py_absorb_query(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array q = {0}, y = {0};
    struct matrix_arrays arrays = {0};
    struct matrix w;
    int value_dim;
    PyObject *returned = NULL;
    if (num_arguments("absorb_query", nargs, 7) && array_read(&q, args[0], "q", "f", 3) &&
        array_write(&y, args[6], "out", "f", 3) && array_size(&y, "out", 0, q.shape[0]) &&
        array_size(&y, "out", 1, q.shape[1]) && matrix_arguments(&w, &arrays, args + 1, (int)y.shape[2]) &&
        int_argument(args[5], "value_dim", 0, w.rows, &value_dim) &&
        array_size(&arrays.data, "kv_b", 0, q.shape[1] * (q.shape[2] + value_dim))) {
        Py_BEGIN_ALLOW_THREADS
        active->absorb_query(q.data, (int)q.shape[0], (int)q.shape[1], (int)q.shape[2], &w,
                             (int)q.shape[2] + value_dim, y.data);
        Py_END_ALLOW_THREADS
        returned = result(0);
    }
    array_release(&q);
    array_release(&y);
    matrix_release(&arrays);
    return returned;
}

/* expand_value(o, bits, group, data, scales, nope_dim, activations, out) */
static PyObject *py_expand_value(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array o = {0}, y = {0};
    struct matrix_arrays arrays = {0};
    struct matrix w;
    int nope_dim;
    enum mode mode;
    PyObject *returned = NULL;
    if (num_arguments("expand_value", nargs, 8) && array_read(&o, args[0], "o", "f", 3) &&
        matrix_arguments(&w, &arrays, args + 1, (int)o.shape[2]) &&
        int_argument(args[5], "nope_dim", 0, w.rows, &nope_dim) && mode_argument(args[6], &mode) &&
        array_write(&y, args[7], "out", "f", 3) && array_size(&y, "out", 0, o.shape[0]) &&
        array_size(&y, "out", 1, o.shape[1]) &&
        array_size(&arrays.data, "kv_b", 0, o.shape[1] * (nope_dim + y.shape[2]))) {
        int failed;
        Py_BEGIN_ALLOW_THREADS
        failed = active->expand_value(o.data, (int)o.shape[0], (int)o.shape[1], &w, nope_dim + (int)y.shape[2],
                                      nope_dim, mode, y.data);
        Py_END_ALLOW_THREADS
        returned = result(failed);
    }
    array_release(&o);
    array_release(&y);
    matrix_release(&arrays);
    return returned;
}

PyMethodDef matmul_methods[] = {
    METHOD(matmul, "matmul(x, bits, group, data, scales, activations, out)"),
    METHOD(matmuls, "matmuls(x, weights, activations, outs): tuples of matmul's four arguments, and of its results."),
    METHOD(mlp, "mlp(x, gate: 4 arguments, up: 4, down: 4, activations, out)"),
    METHOD(expert_ffn,
           "expert_ffn(x, slabs, bits, group, half_scales, width, offsets, choice, weights, activations, out)"),
    METHOD(absorb_query, "absorb_query(q, bits, group, data, scales, value_dim, out)"),
    METHOD(expand_value, "expand_value(o, bits, group, data, scales, nope_dim, activations, out)"),
    {NULL, NULL, 0, NULL},
};
