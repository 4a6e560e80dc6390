/* glm_gpu.kernels._cpu: picks the instruction set, owns the threads, collects the families' functions. */
#include "bind.h"
#include "dispatch.h"
#include "pool.h"

#include <string.h>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#endif

const struct kernels *active = &kernels_base;

#define MAX_TABLES 4
static const struct kernels *usable[MAX_TABLES]; /* slowest first */
static int num_usable;

static void find_usable(void) {
    num_usable = 0;
    usable[num_usable++] = &kernels_base;
#if defined(__x86_64__)
    __builtin_cpu_init(); /* checks that the operating system saves the wide registers, too */
#ifdef HAVE_AVX2
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2) usable[num_usable++] = &kernels_avx2;
#ifdef HAVE_AVX512VNNI
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni"))
        usable[num_usable++] = &kernels_avx512vnni;
#endif
#endif
#elif defined(__aarch64__) && defined(HAVE_NEONDOT)
#if defined(__linux__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) usable[num_usable++] = &kernels_neondot;
#elif defined(__APPLE__)
    usable[num_usable++] = &kernels_neondot; /* every Apple silicon Mac has dotprod and fp16 */
#endif
#endif
}

static PyObject *py_available(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self, (void)args;
    if (!num_arguments("available", nargs, 0)) return NULL;
    PyObject *names = PyList_New(0);
    for (int i = 0; names && i < num_usable; i++) {
        PyObject *name = PyUnicode_FromString(usable[i]->name);
        if (!name || PyList_Append(names, name) != 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *py_implementation(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self, (void)args;
    return num_arguments("implementation", nargs, 0) ? PyUnicode_FromString(active->name) : NULL;
}

static PyObject *py_select(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (!num_arguments("select", nargs, 1)) return NULL;
    const char *name = PyUnicode_AsUTF8AndSize(args[0], NULL);
    if (!name) return NULL;
    for (int i = 0; i < num_usable; i++)
        if (strcmp(usable[i]->name, name) == 0) {
            active = usable[i];
            Py_RETURN_NONE;
        }
    PyErr_Format(PyExc_ValueError, "select: this machine cannot run %s", name);
    return NULL;
}

static PyObject *py_set_threads(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    int num_threads;
    if (!num_arguments("set_threads", nargs, 1)) return NULL;
    if (!int_argument(args[0], "num_threads", 1, 256, &num_threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS /* waits for a running job */
    pool_set_threads(num_threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_get_threads(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self, (void)args;
    return num_arguments("get_threads", nargs, 0) ? PyLong_FromLong(pool_threads()) : NULL;
}

static PyMethodDef module_methods[] = {
    METHOD(available, "Names of the instruction sets this machine can run, slowest first."),
    METHOD(implementation, "Name of the instruction set in use."),
    METHOD(select, "Use an instruction set by name; not while a kernel runs."),
    METHOD(set_threads, "Set how many threads a kernel runs on, the caller among them."),
    METHOD(get_threads, "How many threads a kernel runs on."),
    {NULL, NULL, 0, NULL},
};

extern PyMethodDef attention_methods[];
extern PyMethodDef indexer_methods[];
extern PyMethodDef limits_methods[];
extern PyMethodDef matmul_methods[];
extern PyMethodDef norm_methods[];
extern PyMethodDef quantize_methods[];
extern PyMethodDef rope_methods[];
extern PyMethodDef router_methods[];

static PyMethodDef *const families[] = {
    module_methods,
    attention_methods,
    indexer_methods,
    limits_methods,
    matmul_methods,
    norm_methods,
    quantize_methods,
    rope_methods,
    router_methods,
};

static int module_exec(PyObject *module) {
    find_usable();
    active = usable[num_usable - 1];
    int error = pool_init();
    if (error) {
        PyErr_Format(PyExc_OSError, "pthread_atfork: %s", strerror(error));
        return -1;
    }
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (PyModule_AddFunctions(module, families[i]) != 0) return -1;
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)module_exec}, {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_cpu", "C kernels of glm_gpu.kernels.", 0, NULL, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__cpu(void) { return PyModuleDef_Init(&module_definition); }
