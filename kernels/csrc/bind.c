#include "bind.h"

#include <string.h>

static const char *type_name(char type) {
    switch (type) {
    case 'f': return "float32";
    case 'e': return "float16";
    case 'd': return "float64";
    case 'B': return "uint8";
    case 'b': return "int8";
    case 'H': return "uint16";
    case 'h': return "int16";
    case 'i': return "int32";
    default: return "another type";
    }
}

/* The type letter of a buffer, 0 if it is none of ours. Native byte order only; 'l' is int32 where long has 4 bytes. */
static char type_of(const Py_buffer *view) {
    const char *format = view->format ? view->format : "B";
    if (*format == '@' || *format == '=' || *format == '^' || *format == '<') format++;
    if (format[0] == 0 || format[1] != 0) return 0;
    if (*format == 'l' && view->itemsize == 4) return 'i';
    return strchr("fedBbHhi", *format) ? *format : 0;
}

static bool get(struct array *a, PyObject *object, const char *name, const char *types, int dimensions, int flags) {
    if (PyObject_GetBuffer(object, &a->view, flags | PyBUF_FORMAT | PyBUF_ND) != 0) {
        memset(&a->view, 0, sizeof a->view);
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s: expected a C-contiguous%s array", name,
                     flags & PyBUF_WRITABLE ? " writable" : "");
        return false;
    }
    a->type = type_of(&a->view);
    if (a->type == 0 || !strchr(types, a->type)) {
        PyErr_Format(PyExc_TypeError, "%s: found elements of format %s, expected %s", name,
                     a->view.format ? a->view.format : "B", type_name(types[0]));
        return false;
    }
    if (a->view.ndim != dimensions) {
        PyErr_Format(PyExc_ValueError, "%s: found %d dimensions, expected %d", name, a->view.ndim, dimensions);
        return false;
    }
    for (int i = 0; i < dimensions; i++) {
        /* the kernels index with int; a dimension of 2^31 is beyond any weight or cache we know */
        if (a->view.shape[i] > INT32_MAX) {
            PyErr_Format(PyExc_ValueError, "%s: dimension %d is %zd, expected less than 2^31", name, i,
                         a->view.shape[i]);
            return false;
        }
        a->shape[i] = a->view.shape[i];
    }
    a->data = a->view.buf;
    return true;
}

bool array_read(struct array *a, PyObject *object, const char *name, const char *types, int dimensions) {
    return get(a, object, name, types, dimensions, PyBUF_C_CONTIGUOUS);
}

bool array_write(struct array *a, PyObject *object, const char *name, const char *types, int dimensions) {
    return get(a, object, name, types, dimensions, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE);
}

bool array_size(const struct array *a, const char *name, int dimension, Py_ssize_t expected) {
    if (a->shape[dimension] == expected) return true;
    PyErr_Format(PyExc_ValueError, "%s: dimension %d is %zd, expected %zd", name, dimension, a->shape[dimension],
                 expected);
    return false;
}

void array_release(struct array *a) {
    if (a->view.obj) PyBuffer_Release(&a->view);
}

bool int_argument(PyObject *object, const char *name, long low, long high, int *value) {
    long v = PyLong_AsLong(object);
    if (v == -1 && PyErr_Occurred()) return false;
    if (v < low || v > high) {
        PyErr_Format(PyExc_ValueError, "%s: found %ld, expected %ld to %ld", name, v, low, high);
        return false;
    }
    *value = (int)v;
    return true;
}

bool float_argument(PyObject *object, double *value) {
    *value = PyFloat_AsDouble(object);
    return *value != -1.0 || !PyErr_Occurred();
}

bool num_arguments(const char *function, Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected) return true;
    PyErr_Format(PyExc_TypeError, "%s: found %zd arguments, expected %zd", function, given, expected);
    return false;
}
