/* podscale.data._native: crops in batches, without Python's lock. What each function does is said in _native.pyi. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "batch.h"
#include "jpeg.h"
#include "transcode.h"

/* --- arguments ---------------------------------------------------------------------------------------------------- */

/* What both kinds of crops have in common. */
typedef struct {
    Py_buffer offsets, boxes, flips, out;
    int size, threads;
} Common;

static void release(Common *common) {
    PyBuffer_Release(&common->offsets);
    PyBuffer_Release(&common->boxes);
    PyBuffer_Release(&common->flips);
    PyBuffer_Release(&common->out);
}

static int holds(const Py_buffer *buffer, Py_ssize_t n, size_t bytes) {
    return buffer->len == n * (Py_ssize_t)bytes;
}

/* The common part of every job; -1 with an exception where lengths do not fit. There need be no `out`. */
static int fill(Job *jobs, Py_ssize_t n, const Common *common) {
    int size = common->size;
    if (size < 1 || size > MAX_SIZE || common->threads < 1 || common->threads > MAX_THREADS)
        PyErr_SetString(PyExc_ValueError, "size or threads out of range");
    else if (!holds(&common->offsets, n, sizeof(int64_t)))
        PyErr_SetString(PyExc_ValueError, "offsets must be int64 [n]");
    else if (!holds(&common->boxes, n, 4 * sizeof(double)) || !holds(&common->flips, n, 1))
        PyErr_SetString(PyExc_ValueError, "boxes must be float64 [n, 4] and flips bool [n]");
    else if (common->out.obj && (common->out.len / 3 / size / size != n || common->out.len != n * 3 * size * size))
        PyErr_SetString(PyExc_ValueError, "out must be uint8 [n, size, size, 3]");
    if (PyErr_Occurred())
        return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        Crop *crop = &jobs[i].crop;
        memcpy(&jobs[i].source.offset, (const int64_t *)common->offsets.buf + i, sizeof(int64_t));
        memcpy(crop->box, (const double *)common->boxes.buf + 4 * i, sizeof crop->box);
        crop->flip = ((const char *)common->flips.buf)[i] != 0;
        crop->size = size;
        crop->out = common->out.obj ? (uint8_t *)common->out.buf + (size_t)i * 3 * (size_t)size * (size_t)size : NULL;
    }
    return 0;
}

/* What keeps a source alive while Python is not looking. */
typedef struct {
    Py_buffer bytes;
    PyObject *path;
} Hold;

static int hold(PyObject *object, Hold *held, Source *source) {
    if (PyUnicode_Check(object)) {
        source->kind = AT_PATH;
        if (!PyUnicode_FSConverter(object, &held->path))
            return -1;
        source->path = PyBytes_AsString(held->path);
        return source->path ? 0 : -1;
    }
    if (PyIndex_Check(object) && !PySequence_Check(object)) { /* NumPy's numbers too, which have bytes as well */
        source->kind = IN_OPEN_FILE;
        Py_ssize_t number = PyNumber_AsSsize_t(object, PyExc_OverflowError);
        source->descriptor = number >= 0 && number <= INT_MAX ? (int)number : -1;
        return PyErr_Occurred() ? -1 : 0;
    }
    source->kind = IN_MEMORY;
    if (PyObject_GetBuffer(object, &held->bytes, PyBUF_SIMPLE))
        return -1;
    source->memory = held->bytes.buf;
    source->room = (size_t)held->bytes.len;
    return 0;
}

static int hold_all(PyObject *sources, const Py_buffer *lengths, Hold *held, Job *jobs) {
    Py_ssize_t n = PyList_Size(sources);
    if (!holds(lengths, n, sizeof(int64_t))) {
        PyErr_SetString(PyExc_ValueError, "lengths must be int64 [n]");
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *source = PyList_GetItem(sources, i);
        if (!source || hold(source, &held[i], &jobs[i].source))
            return -1;
        memcpy(&jobs[i].source.length, (const int64_t *)lengths->buf + i, sizeof(int64_t));
    }
    return 0;
}

static void let_go(Hold *held, Py_ssize_t n) {
    for (Py_ssize_t i = 0; held && i < n; i++) {
        PyBuffer_Release(&held[i].bytes); /* does nothing where there is none */
        Py_XDECREF(held[i].path);
    }
    free(held);
}

/* --- results ------------------------------------------------------------------------------------------------------ */

static PyObject *left_over(const Job *jobs, Py_ssize_t n) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < n; i++) {
        const char *reason = jobs[i].reason;
        if (!reason[0])
            continue;
        PyObject *text = PyUnicode_DecodeLatin1(reason, (Py_ssize_t)strlen(reason), NULL);
        PyObject *pair = Py_BuildValue("(nN)", i, text);
        if (!pair || PyList_Append(list, pair))
            Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}

static PyObject *run(Job *jobs, Py_ssize_t n, int threads, int64_t max_pixels) {
    Batch batch = {.count = (size_t)n, .jobs = jobs, .max_pixels = max_pixels};
    Py_BEGIN_ALLOW_THREADS
    work_in_threads(&batch, threads);
    Py_END_ALLOW_THREADS
    return left_over(jobs, n);
}

/* --- functions ---------------------------------------------------------------------------------------------------- */

static PyObject *crop(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *sources, *result = NULL;
    Common common;
    Py_buffer lengths;
    long long max_pixels;
    if (!PyArg_ParseTuple(arguments, "O!y*y*y*y*iw*iL", &PyList_Type, &sources, &common.offsets, &lengths,
                          &common.boxes, &common.flips, &common.size, &common.out, &common.threads, &max_pixels))
        return NULL;
    Py_ssize_t n = PyList_Size(sources);
    Job *jobs = calloc((size_t)n + 1, sizeof *jobs);
    Hold *held = calloc((size_t)n + 1, sizeof *held);
    if (!jobs || !held)
        PyErr_NoMemory();
    else if (fill(jobs, n, &common) == 0 && hold_all(sources, &lengths, held, jobs) == 0)
        result = run(jobs, n, common.threads, max_pixels);
    let_go(held, n);
    free(jobs);
    PyBuffer_Release(&lengths);
    release(&common);
    return result;
}

/* Sizes that are no sizes become -1, which is refused later, by name. */
static int fill_pixels(Job *jobs, Py_ssize_t n, const Py_buffer *source, const Py_buffer *sizes) {
    if (!holds(sizes, n, 2 * sizeof(int32_t))) {
        PyErr_SetString(PyExc_ValueError, "sizes must be int32 [n, 2]");
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        const int32_t *size = (const int32_t *)sizes->buf + 2 * i;
        jobs[i].source.memory = source->buf;
        jobs[i].source.room = (size_t)source->len;
        jobs[i].width = size[0] > 0 ? size[0] : -1;
        jobs[i].height = size[1];
    }
    return 0;
}

static PyObject *crop_all_pixels(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *result = NULL;
    Common common;
    Py_buffer source, sizes;
    if (!PyArg_ParseTuple(arguments, "y*y*y*y*y*iw*i", &source, &common.offsets, &sizes, &common.boxes, &common.flips,
                          &common.size, &common.out, &common.threads))
        return NULL;
    Py_ssize_t n = common.flips.len;
    Job *jobs = calloc((size_t)n + 1, sizeof *jobs);
    if (!jobs)
        PyErr_NoMemory();
    else if (fill(jobs, n, &common) == 0 && fill_pixels(jobs, n, &source, &sizes) == 0)
        result = run(jobs, n, common.threads, 0);
    free(jobs);
    PyBuffer_Release(&source);
    PyBuffer_Release(&sizes);
    release(&common);
    return result;
}

/* Every picture in turn, in one thread, into the same `out`. */
static Stages time_all(Job *jobs, Py_ssize_t n, int64_t max_pixels, uint8_t *out) {
    Stages stages = {0, 0, 0, 0};
    Worker *worker = out ? new_worker(max_pixels) : NULL;
    for (Py_ssize_t i = 0; worker && i < n; i++) {
        jobs[i].crop.out = out;
        time_stages(worker, &jobs[i].source, &jobs[i].crop, &stages, jobs[i].reason);
    }
    if (worker)
        free_worker(worker);
    return stages;
}

static PyObject *stages(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *sources, *result = NULL;
    Common common = {.threads = 1};
    Py_buffer lengths;
    long long max_pixels;
    if (!PyArg_ParseTuple(arguments, "O!y*y*y*y*iL", &PyList_Type, &sources, &common.offsets, &lengths, &common.boxes,
                          &common.flips, &common.size, &max_pixels))
        return NULL;
    Py_ssize_t n = PyList_Size(sources);
    Job *jobs = calloc((size_t)n + 1, sizeof *jobs);
    Hold *held = calloc((size_t)n + 1, sizeof *held);
    int sane = common.size > 0 && common.size <= MAX_SIZE;
    uint8_t *out = sane ? calloc(3 * (size_t)common.size, (size_t)common.size) : NULL;
    if (!jobs || !held)
        PyErr_NoMemory();
    else if (fill(jobs, n, &common) == 0 && hold_all(sources, &lengths, held, jobs) == 0) {
        Stages found;
        Py_BEGIN_ALLOW_THREADS
        found = time_all(jobs, n, max_pixels, out);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("(dddd)", found.read, found.entropy, found.transform, found.resize);
    }
    free(out);
    let_go(held, n);
    free(jobs);
    PyBuffer_Release(&lengths);
    release(&common);
    return result;
}

static PyObject *tile(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer data;
    long long max_pixels;
    if (!PyArg_ParseTuple(arguments, "y*L", &data, &max_pixels))
        return NULL;
    Output output;
    char reason[REASON_BYTES];
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = tile_jpeg(data.buf, (size_t)data.len, max_pixels, &output, reason);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    if (status) {
        PyErr_SetString(PyExc_ValueError, reason);
        return NULL;
    }
    PyObject *result = PyBytes_FromStringAndSize((const char *)output.bytes, (Py_ssize_t)output.length);
    free(output.bytes);
    return result;
}

/* Width, height and pixels; ValueError with the reason where the picture is left to the plain twin. */
static PyObject *decode(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer data;
    long long max_pixels;
    if (!PyArg_ParseTuple(arguments, "y*L", &data, &max_pixels))
        return NULL;
    Whole whole = {0, 0, NULL};
    char reason[REASON_BYTES] = "out of memory";
    int status = -1;
    Py_BEGIN_ALLOW_THREADS
    Decoder *decoder = new_decoder();
    if (decoder) {
        limit_decoder(decoder, max_pixels);
        status = decode_jpeg(decoder, data.buf, (size_t)data.len, &whole, reason);
        free_decoder(decoder);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    if (status) {
        PyErr_SetString(PyExc_ValueError, reason);
        return NULL;
    }
    Py_ssize_t bytes = 3 * (Py_ssize_t)whole.width * whole.height;
    PyObject *result = Py_BuildValue("(iiy#)", whole.width, whole.height, (const char *)whole.pixels, bytes);
    free(whole.pixels);
    return result;
}

static PyObject *advise(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *sources, *result = NULL;
    Py_buffer offsets, lengths;
    if (!PyArg_ParseTuple(arguments, "O!y*y*", &PyList_Type, &sources, &offsets, &lengths))
        return NULL;
    Py_ssize_t n = PyList_Size(sources);
    Job *jobs = calloc((size_t)n + 1, sizeof *jobs);
    Hold *held = calloc((size_t)n + 1, sizeof *held);
    if (!jobs || !held) {
        PyErr_NoMemory();
    } else if (!holds(&offsets, n, sizeof(int64_t))) {
        PyErr_SetString(PyExc_ValueError, "offsets must be int64 [n]");
    } else if (hold_all(sources, &lengths, held, jobs) == 0) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < n; i++) {
            memcpy(&jobs[i].source.offset, (const int64_t *)offsets.buf + i, sizeof(int64_t));
            advise_source(&jobs[i].source);
        }
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    let_go(held, n);
    free(jobs);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&lengths);
    return result;
}

/* --- the module --------------------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"crop", crop, METH_VARARGS,
     "crop(sources, offsets, lengths, boxes, flips, size, out, threads, max_pixels) -> [(number, reason), ...]"},
    {"crop_pixels", crop_all_pixels, METH_VARARGS,
     "crop_pixels(source, offsets, sizes, boxes, flips, size, out, threads) -> [(number, reason), ...]"},
    {"stages", stages, METH_VARARGS,
     "stages(sources, offsets, lengths, boxes, flips, size, max_pixels) -> (read_s, entropy_s, transform_s, resize_s)"},
    {"decode", decode, METH_VARARGS, "decode(data, max_pixels) -> (width, height, pixels)"},
    {"advise", advise, METH_VARARGS, "advise(sources, offsets, lengths)"},
    {"tile", tile, METH_VARARGS, "tile(data, max_pixels) -> bytes"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Crops of pictures; see podscale.data.decode.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    return PyModuleDef_Init(&definition);
}
