#include "bind.h"
#include "dispatch.h"

static PyObject *py_read_all(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array data = {0}, sums = {0};
    bool ok = num_arguments("read_all", nargs, 2) && array_read(&data, args[0], "data", "B", 2) &&
              array_size(&data, "data", 1, 1 << 20) && array_write(&sums, args[1], "sums", "i", 1) &&
              array_size(&sums, "sums", 0, data.shape[0]);
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        active->read_all(data.data, sums.data, (int)data.shape[0]);
        Py_END_ALLOW_THREADS
    }
    array_release(&data), array_release(&sums);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_multiply_add(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array sums = {0};
    double num_operations = 0.0;
    bool ok = num_arguments("multiply_add", nargs, 1) && array_write(&sums, args[0], "sums", "f", 1);
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        num_operations = active->multiply_add(sums.data, (int)sums.shape[0]);
        Py_END_ALLOW_THREADS
    }
    array_release(&sums);
    return ok ? PyFloat_FromDouble(num_operations) : NULL;
}

static PyObject *py_integer_multiply_add(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array sums = {0};
    double num_operations = 0.0;
    bool ok = num_arguments("integer_multiply_add", nargs, 1) && array_write(&sums, args[0], "sums", "i", 1);
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        num_operations = active->integer_multiply_add(sums.data, (int)sums.shape[0]);
        Py_END_ALLOW_THREADS
    }
    array_release(&sums);
    return ok ? PyFloat_FromDouble(num_operations) : NULL;
}

PyMethodDef limits_methods[] = {
    METHOD(read_all, "read_all(data [n, 2^20] uint8, sums [n] int32): reads every byte."),
    METHOD(multiply_add, "multiply_add(sums [n] f32): n tasks of f32 products and sums; returns the operations done."),
    METHOD(integer_multiply_add, "integer_multiply_add(sums [n] int32): n tasks of int16 products; returns their number."),
    {NULL, NULL, 0, NULL},
};
