#include "bind.h"
#include "dispatch.h"

static PyObject *py_route(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array x = {0}, gate = {0}, bias = {0}, ids = {0}, weights = {0};
    struct route a = {0};
    int norm_topk_prob;
    double scale;
    bool ok = num_arguments("route", nargs, 9) && array_read(&x, args[0], "x", "f", 2) &&
              array_read(&gate, args[1], "gate", "f", 2) && array_size(&gate, "gate", 1, x.shape[1]) &&
              (args[2] == Py_None ||
               (array_read(&bias, args[2], "bias", "f", 1) && array_size(&bias, "bias", 0, gate.shape[0]))) &&
              int_argument(args[3], "n_group", 1, MAX_EXPERTS, &a.n_group) &&
              int_argument(args[4], "topk_group", 1, MAX_EXPERTS, &a.topk_group) &&
              int_argument(args[5], "norm_topk_prob", 0, 1, &norm_topk_prob) && float_argument(args[6], &scale) &&
              array_write(&ids, args[7], "ids", "i", 2) && array_size(&ids, "ids", 0, x.shape[0]) &&
              array_write(&weights, args[8], "weights", "f", 2) && array_size(&weights, "weights", 0, x.shape[0]) &&
              array_size(&weights, "weights", 1, ids.shape[1]);
    if (ok && (gate.shape[0] < 1 || gate.shape[0] > MAX_EXPERTS || ids.shape[1] > gate.shape[0])) {
        PyErr_Format(PyExc_ValueError, "route: found %zd of %zd experts, expected at most all of 1 to %d",
                     ids.shape[1], gate.shape[0], MAX_EXPERTS);
        ok = false;
    }
    if (ok && a.n_group > 1 && (gate.shape[0] % a.n_group || gate.shape[0] < 2 * a.n_group)) {
        PyErr_Format(PyExc_ValueError, "n_group: %zd experts cannot be split into %d groups of at least 2",
                     gate.shape[0], a.n_group);
        ok = false;
    }
    if (ok && x.shape[0] > 0) {
        a.x = x.data, a.gate = gate.data, a.bias = bias.data, a.ids = ids.data, a.weights = weights.data;
        a.num_tokens = (int)x.shape[0], a.hidden = (int)x.shape[1], a.num_experts = (int)gate.shape[0];
        a.experts_per_tok = (int)ids.shape[1], a.norm_topk_prob = norm_topk_prob, a.scale = (float)scale;
        int error;
        Py_BEGIN_ALLOW_THREADS
        error = active->route(&a);
        Py_END_ALLOW_THREADS
        if (error) PyErr_NoMemory(), ok = false;
    }
    array_release(&x), array_release(&gate), array_release(&bias), array_release(&ids), array_release(&weights);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

PyMethodDef router_methods[] = {
    METHOD(route, "route(x, gate, bias, n_group, topk_group, norm_topk_prob, scale, ids, weights): "
                  "sigmoid scores with a bias, softmax where bias is None."),
    {NULL, NULL, 0, NULL},
};
