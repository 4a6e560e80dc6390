#include "bind.h"
#include "dispatch.h"

static PyObject *py_rope(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array x = {0}, cos = {0}, sin = {0}, out = {0};
    int is_interleaved;
    bool ok = num_arguments("rope", nargs, 5) && array_read(&x, args[0], "x", "f", 3) &&
              array_read(&cos, args[1], "cos", "f", 2) && array_size(&cos, "cos", 0, x.shape[0]) &&
              array_read(&sin, args[2], "sin", "f", 2) && array_size(&sin, "sin", 0, x.shape[0]) &&
              array_size(&sin, "sin", 1, cos.shape[1]) && array_size(&x, "x", 2, 2 * cos.shape[1]) &&
              int_argument(args[3], "is_interleaved", 0, 1, &is_interleaved) &&
              array_write(&out, args[4], "out", "f", 3);
    for (int i = 0; ok && i < 3; i++) ok = array_size(&out, "out", i, x.shape[i]);
    if (ok) {
        struct rope a = {
            .x = x.data, .cos = cos.data, .sin = sin.data, .out = out.data, .is_interleaved = is_interleaved,
            .num_tokens = (int)x.shape[0], .num_vectors = (int)x.shape[1], .width = (int)x.shape[2],
        };
        Py_BEGIN_ALLOW_THREADS
        active->rope(&a);
        Py_END_ALLOW_THREADS
    }
    array_release(&x), array_release(&cos), array_release(&sin), array_release(&out);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

PyMethodDef rope_methods[] = {
    METHOD(rope, "rope(x, cos, sin, is_interleaved, out)"),
    {NULL, NULL, 0, NULL},
};
