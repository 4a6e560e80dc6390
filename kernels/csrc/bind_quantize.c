#include "bind.h"
#include "dispatch.h"

/* quantize_rows(data, bits, group, packed, scales, code_values, block_scales, scale_rows, columns_per_scale) -> bool
 * The last four are None, or for FP8 codes: [256] f32, [n, m] f32, [rows] int32 below n, an int. */
static PyObject *py_quantize_rows(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    struct array data = {0}, packed = {0}, scales = {0}, values = {0}, block_scales = {0}, scale_rows = {0};
    struct quantize a = {0};
    int bits, failed = 0;
    bool good = num_arguments("quantize_rows", nargs, 9) && array_read(&data, args[0], "data", "fHB", 2) &&
                int_argument(args[1], "bits", 2, 8, &bits) && int_argument(args[2], "group", 0, 128, &a.scale_group) &&
                array_write(&packed, args[3], "packed", "B", 2) && array_write(&scales, args[4], "scales", "fe", 2);
    if (good && ((bits != 2 && bits != 4 && bits != 8) || (a.scale_group & 63) != 0)) {
        PyErr_Format(PyExc_ValueError, "bits %d in groups of %d: no such format", bits, a.scale_group);
        good = false;
    }
    if (good) {
        a.kind = bits == 8 ? KIND_INT8 : bits == 4 ? KIND_INT4 : KIND_INT2;
        a.source = data.type == 'f' ? SOURCE_F32 : data.type == 'H' ? SOURCE_BF16 : SOURCE_CODES;
        a.rows = (int)data.shape[0], a.columns = (int)data.shape[1];
        a.half_scales = scales.type == 'e';
        a.data = data.data, a.packed = packed.data, a.scales = scales.data;
        const struct matrix form = {.rows = a.rows, .columns = a.columns, .kind = a.kind, .scale_group = a.scale_group};
        good = array_size(&packed, "packed", 0, a.rows) && array_size(&packed, "packed", 1, (Py_ssize_t)row_bytes(&form)) &&
               array_size(&scales, "scales", 0, a.rows) && array_size(&scales, "scales", 1, scales_per_row(&form));
    }
    if (good && a.source == SOURCE_CODES) {
        good = array_read(&values, args[5], "code_values", "f", 1) && array_size(&values, "code_values", 0, 256) &&
               array_read(&block_scales, args[6], "block_scales", "f", 2) &&
               array_read(&scale_rows, args[7], "scale_rows", "i", 1) &&
               array_size(&scale_rows, "scale_rows", 0, a.rows) &&
               int_argument(args[8], "columns_per_scale", 1, INT32_MAX, &a.columns_per_scale);
        if (good) {
            a.code_values = values.data, a.block_scales = block_scales.data, a.scale_rows = scale_rows.data;
            a.scale_columns = (int)block_scales.shape[1];
            good = array_size(&block_scales, "block_scales", 1,
                              ((Py_ssize_t)a.columns + a.columns_per_scale - 1) / a.columns_per_scale);
        }
        for (int i = 0; good && i < a.rows; i++)
            if (a.scale_rows[i] < 0 || a.scale_rows[i] >= block_scales.shape[0]) {
                PyErr_Format(PyExc_ValueError, "scale_rows: found %d, expected less than %zd", (int)a.scale_rows[i],
                             block_scales.shape[0]);
                good = false;
            }
    }
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        failed = active->quantize_rows(&a);
        Py_END_ALLOW_THREADS
    }
    array_release(&data), array_release(&packed), array_release(&scales);
    array_release(&values), array_release(&block_scales), array_release(&scale_rows);
    return good ? PyBool_FromLong(!failed) : NULL;
}

PyMethodDef quantize_methods[] = {
    METHOD(quantize_rows, "quantize_rows(data, bits, group, packed, scales, code_values, block_scales, scale_rows, "
                          "columns_per_scale): False when something is not finite or does not fit."),
    {NULL, NULL, 0, NULL},
};
