/* Weights as arguments of Python functions. */
#pragma once
#include "bind.h"
#include "dispatch.h"

/* What a weight is, from four arguments: bits, group (0 for none), data, scales (None for plain numbers). */
#define MATRIX_ARGUMENTS 4

struct matrix_arrays {
    struct array data, scales;
};

/* Sets a Python error and returns false when the arguments are no weight with so many columns. */
bool matrix_arguments(struct matrix *w, struct matrix_arrays *arrays, PyObject *const *args, int columns);

void matrix_release(struct matrix_arrays *arrays);

bool mode_argument(PyObject *object, enum mode *mode);
