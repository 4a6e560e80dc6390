/* Argument checks of the Python functions: bad arguments raise, they never crash.
 *
 * A binding declares `struct array` variables set to {0}, fills them with the functions below, which set a Python
 * error and return false when something is wrong, and releases all of them on every way out (releasing an array that
 * was never filled does nothing). */
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#define MAX_DIMENSIONS 4

struct array {
    Py_buffer view;
    void *data;
    Py_ssize_t shape[MAX_DIMENSIONS];
    char type; /* 'f' float32, 'e' float16, 'd' float64, 'B' uint8, 'b' int8, 'H' uint16, 'h' int16, 'i' int32 */
};

/* A C-contiguous array of one of the types in `types`, with exactly `dimensions` dimensions. */
bool array_read(struct array *a, PyObject *object, const char *name, const char *types, int dimensions);
bool array_write(struct array *a, PyObject *object, const char *name, const char *types, int dimensions);

/* Compares one dimension with what other arguments imply. */
bool array_size(const struct array *a, const char *name, int dimension, Py_ssize_t expected);

void array_release(struct array *a);

/* An int argument within [low, high]. */
bool int_argument(PyObject *object, const char *name, long low, long high, int *value);

bool float_argument(PyObject *object, double *value);

bool num_arguments(const char *function, Py_ssize_t given, Py_ssize_t expected);

#define METHOD(function, doc) {#function, (PyCFunction)(void (*)(void))py_##function, METH_FASTCALL, doc}
