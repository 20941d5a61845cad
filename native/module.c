/* podscale.data._native: `crop_jpeg` for a batch, in threads, without Python's lock. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "jpeg.h"

enum { MAX_THREADS = 256 };

typedef struct {
    Py_ssize_t count;
    Crop *crops;
    char (*reasons)[REASON_BYTES]; /* empty where a crop succeeded */
    int64_t max_pixels;
    int tall_first;
    _Atomic Py_ssize_t next; /* the first crop that no thread has taken */
} Batch;

/* --- without Python ----------------------------------------------------------------------------------------------- */

static void *work(void *argument) {
    Batch *batch = argument;
    Decoder *decoder = new_decoder(batch->max_pixels);
    Py_ssize_t i;
    while ((i = atomic_fetch_add(&batch->next, 1)) < batch->count)
        if (!decoder)
            strcpy(batch->reasons[i], "no decoder");
        else
            crop_jpeg(decoder, &batch->crops[i], batch->reasons[i]);
    if (decoder)
        free_decoder(decoder);
    return NULL;
}

/* Works in this thread and, as far as they can be had, in others. */
static void work_in_threads(Batch *batch, int threads) {
    pthread_t others[MAX_THREADS];
    int started = 0;
    while (started < threads - 1 && pthread_create(&others[started], NULL, work, batch) == 0)
        started++;
    work(batch);
    while (started > 0)
        pthread_join(others[--started], NULL);
}

/* --- with Python -------------------------------------------------------------------------------------------------- */

static int check_lengths(Py_ssize_t n, int size, int threads, const Py_buffer *boxes, const Py_buffer *flips,
                         const Py_buffer *out) {
    if (size < 1 || size > MAX_SIZE || threads < 1 || threads > MAX_THREADS)
        PyErr_SetString(PyExc_ValueError, "size or threads out of range");
    else if (boxes->len != n * 4 * (Py_ssize_t)sizeof(double) || flips->len != n)
        PyErr_SetString(PyExc_ValueError, "boxes must be float64 [n, 4] and flips bool [n]");
    else if (out->len / 3 / size / size != n || out->len != n * 3 * size * size)
        PyErr_SetString(PyExc_ValueError, "out must be uint8 [n, size, size, 3]");
    else
        return 0;
    return -1;
}

/* Holds the bytes of every source; returns how many it holds, which is fewer than n after an error. */
static Py_ssize_t hold(PyObject *sources, Py_ssize_t n, Py_buffer *held) {
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *source = PyList_GetItem(sources, i);
        if (!source || PyObject_GetBuffer(source, &held[i], PyBUF_SIMPLE))
            return i;
    }
    return n;
}

static void fill(Batch *batch, const Py_buffer *held, const Py_buffer *boxes, const Py_buffer *flips, int size,
                 const Py_buffer *out) {
    for (Py_ssize_t i = 0; i < batch->count; i++) {
        batch->crops[i] = (Crop){
            .data = held[i].buf,
            .length = (size_t)held[i].len,
            .flip = ((const char *)flips->buf)[i] != 0,
            .tall_first = batch->tall_first,
            .size = size,
            .out = (uint8_t *)out->buf + (size_t)i * 3 * size * size,
        };
        memcpy(batch->crops[i].box, (const double *)boxes->buf + 4 * i, sizeof batch->crops[i].box);
    }
}

static PyObject *left_over(const Batch *batch) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < batch->count; i++) {
        if (!batch->reasons[i][0])
            continue;
        const char *reason = batch->reasons[i];
        PyObject *text = PyUnicode_DecodeLatin1(reason, (Py_ssize_t)strlen(reason), NULL);
        PyObject *pair = Py_BuildValue("(nN)", i, text);
        if (!pair || PyList_Append(list, pair))
            Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}

static PyObject *run(PyObject *sources, const Py_buffer *boxes, const Py_buffer *flips, int size, const Py_buffer *out,
                     int threads, long long max_pixels, int tall_first) {
    Py_ssize_t n = PyList_Size(sources);
    if (check_lengths(n, size, threads, boxes, flips, out))
        return NULL;
    Batch batch = {.count = n, .max_pixels = max_pixels, .tall_first = tall_first};
    Py_buffer *held = calloc((size_t)n + 1, sizeof *held);
    batch.crops = calloc((size_t)n + 1, sizeof *batch.crops);
    batch.reasons = calloc((size_t)n + 1, sizeof *batch.reasons);
    PyObject *result = NULL;
    Py_ssize_t holding = 0;
    if (!held || !batch.crops || !batch.reasons) {
        PyErr_NoMemory();
    } else if ((holding = hold(sources, n, held)) == n) {
        fill(&batch, held, boxes, flips, size, out);
        Py_BEGIN_ALLOW_THREADS
        work_in_threads(&batch, threads);
        Py_END_ALLOW_THREADS
        result = left_over(&batch);
    }
    while (holding > 0)
        PyBuffer_Release(&held[--holding]);
    free(held);
    free(batch.crops);
    free(batch.reasons);
    return result;
}

static PyObject *crop_jpegs(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *sources;
    Py_buffer boxes, flips, out;
    int size, threads, tall_first;
    long long max_pixels;
    if (!PyArg_ParseTuple(arguments, "O!y*y*iw*iLp", &PyList_Type, &sources, &boxes, &flips, &size, &out, &threads,
                          &max_pixels, &tall_first))
        return NULL;
    PyObject *result = run(sources, &boxes, &flips, size, &out, threads, max_pixels, tall_first);
    PyBuffer_Release(&boxes);
    PyBuffer_Release(&flips);
    PyBuffer_Release(&out);
    return result;
}

static PyMethodDef methods[] = {
    {"crop_jpegs", crop_jpegs, METH_VARARGS,
     "crop_jpegs(sources, boxes, flips, size, out, threads, max_pixels, tall_first) -> [(number, reason), ...]\n\n"
     "Fills out, uint8 [n, size, size, 3], from a list of n files' bytes, boxes float64 [n, 4] and flips bool [n],\n"
     "and returns the pictures that it left to the plain decoder."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "JPEG crops on libjpeg-turbo; see podscale.data.decode.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    return PyModuleDef_Init(&definition);
}
