#include "bind.h"
#include "dispatch.h"

static PyObject *py_norm(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array x = {0}, weight = {0}, bias = {0}, out = {0};
    double eps;
    bool ok = num_arguments("norm", nargs, 5) && array_read(&x, args[0], "x", "f", 2) &&
              array_read(&weight, args[1], "weight", "f", 1) && array_size(&weight, "weight", 0, x.shape[1]) &&
              (args[2] == Py_None ||
               (array_read(&bias, args[2], "bias", "f", 1) && array_size(&bias, "bias", 0, x.shape[1]))) &&
              float_argument(args[3], &eps) && array_write(&out, args[4], "out", "f", 2) &&
              array_size(&out, "out", 0, x.shape[0]) && array_size(&out, "out", 1, x.shape[1]);
    if (ok) {
        struct norm a = {
            .x = x.data, .weight = weight.data, .bias = bias.data, .eps = eps, .num_tokens = (int)x.shape[0],
            .width = (int)x.shape[1], .out = out.data,
        };
        Py_BEGIN_ALLOW_THREADS
        active->norm(&a);
        Py_END_ALLOW_THREADS
    }
    array_release(&x), array_release(&weight), array_release(&bias), array_release(&out);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_silu_mul(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array gate = {0}, up = {0}, out = {0};
    bool ok = num_arguments("silu_mul", nargs, 3) && array_read(&gate, args[0], "gate", "f", 1) &&
              array_read(&up, args[1], "up", "f", 1) && array_size(&up, "up", 0, gate.shape[0]) &&
              array_write(&out, args[2], "out", "f", 1) && array_size(&out, "out", 0, gate.shape[0]);
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        active->silu_mul(gate.data, up.data, out.data, gate.shape[0]);
        Py_END_ALLOW_THREADS
    }
    array_release(&gate), array_release(&up), array_release(&out);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

PyMethodDef norm_methods[] = {
    METHOD(norm, "norm(x, weight, bias, eps, out): RMSNorm where bias is None, else LayerNorm."),
    METHOD(silu_mul, "silu_mul(gate, up, out)"),
    {NULL, NULL, 0, NULL},
};
