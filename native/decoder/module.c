/* podscale.data._native: crops in batches, without the GIL. _native.pyi documents each function. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "batch.h"
#include "jpeg.h"
#include "transcode.h"

/* --- arguments ---------------------------------------------------------------------------------------------------- */

/* The arguments that both kinds of crops share. */
typedef struct {
    Py_buffer offsets, boxes, flips, out;
    int size, threads;
} Arguments;

static void release_arguments(Arguments *arguments) {
    PyBuffer_Release(&arguments->offsets);
    PyBuffer_Release(&arguments->boxes);
    PyBuffer_Release(&arguments->flips);
    PyBuffer_Release(&arguments->out);
}

static int has_elements(const Py_buffer *buffer, Py_ssize_t n, size_t bytes) {
    return buffer->len == n * (Py_ssize_t)bytes;
}

/* Fills in what all tasks share; returns -1 with an exception if a buffer has the wrong length. `out` may be absent. */
static int fill_tasks(CropTask *tasks, Py_ssize_t n, const Arguments *arguments) {
    int size = arguments->size;
    const Py_buffer *out = &arguments->out;
    if (size < 1 || size > MAX_SIZE || arguments->threads < 1 || arguments->threads > MAX_THREADS)
        PyErr_SetString(PyExc_ValueError, "size or threads out of range");
    else if (!has_elements(&arguments->offsets, n, sizeof(int64_t)))
        PyErr_SetString(PyExc_ValueError, "offsets must be int64 [n]");
    else if (!has_elements(&arguments->boxes, n, 4 * sizeof(double)) || !has_elements(&arguments->flips, n, 1))
        PyErr_SetString(PyExc_ValueError, "boxes must be float64 [n, 4] and flips bool [n]");
    else if (out->obj && (out->len / 3 / size / size != n || out->len != n * 3 * size * size))
        PyErr_SetString(PyExc_ValueError, "out must be uint8 [n, size, size, 3]");
    if (PyErr_Occurred())
        return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        Crop *crop = &tasks[i].crop;
        memcpy(&tasks[i].source.offset, (const int64_t *)arguments->offsets.buf + i, sizeof(int64_t));
        memcpy(crop->box, (const double *)arguments->boxes.buf + 4 * i, sizeof crop->box);
        crop->flip = ((const char *)arguments->flips.buf)[i] != 0;
        crop->size = size;
        crop->out = out->obj ? (uint8_t *)out->buf + (size_t)i * 3 * (size_t)size * (size_t)size : NULL;
    }
    return 0;
}

/* Keeps a source alive while the GIL is released. */
typedef struct {
    Py_buffer bytes;
    PyObject *path;
} SourceRef;

static int acquire_source(PyObject *object, SourceRef *ref, Source *source) {
    if (PyUnicode_Check(object)) {
        source->kind = AT_PATH;
        if (!PyUnicode_FSConverter(object, &ref->path))
            return -1;
        source->path = PyBytes_AsString(ref->path);
        return source->path ? 0 : -1;
    }
    if (PyIndex_Check(object) && !PySequence_Check(object)) { /* also NumPy's integers, which are buffers as well */
        source->kind = IN_OPEN_FILE;
        Py_ssize_t number = PyNumber_AsSsize_t(object, PyExc_OverflowError);
        source->descriptor = number >= 0 && number <= INT_MAX ? (int)number : -1;
        return PyErr_Occurred() ? -1 : 0;
    }
    source->kind = IN_MEMORY;
    if (PyObject_GetBuffer(object, &ref->bytes, PyBUF_SIMPLE))
        return -1;
    source->memory = ref->bytes.buf;
    source->memory_bytes = (size_t)ref->bytes.len;
    return 0;
}

static int acquire_sources(PyObject *sources, const Py_buffer *lengths, SourceRef *refs, CropTask *tasks) {
    Py_ssize_t n = PyList_Size(sources);
    if (!has_elements(lengths, n, sizeof(int64_t))) {
        PyErr_SetString(PyExc_ValueError, "lengths must be int64 [n]");
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *source = PyList_GetItem(sources, i);
        if (!source || acquire_source(source, &refs[i], &tasks[i].source))
            return -1;
        memcpy(&tasks[i].source.length, (const int64_t *)lengths->buf + i, sizeof(int64_t));
    }
    return 0;
}

static void release_sources(SourceRef *refs, Py_ssize_t n) {
    for (Py_ssize_t i = 0; refs && i < n; i++) {
        PyBuffer_Release(&refs[i].bytes); /* does nothing if there is none */
        Py_XDECREF(refs[i].path);
    }
    free(refs);
}

/* --- results ------------------------------------------------------------------------------------------------------ */

static PyObject *list_failures(const CropTask *tasks, Py_ssize_t n) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < n; i++) {
        const char *reason = tasks[i].reason;
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

static PyObject *crop_tasks(CropTask *tasks, Py_ssize_t n, int threads, int64_t max_bytes) {
    Batch batch = {.count = (size_t)n, .tasks = tasks, .max_bytes = max_bytes};
    Py_BEGIN_ALLOW_THREADS
    run_batch(&batch, threads);
    Py_END_ALLOW_THREADS
    return list_failures(tasks, n);
}

/* --- functions ---------------------------------------------------------------------------------------------------- */

static PyObject *py_crop(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *sources, *result = NULL;
    Arguments arguments;
    Py_buffer lengths;
    long long max_bytes;
    if (!PyArg_ParseTuple(args, "O!y*y*y*y*iw*iL", &PyList_Type, &sources, &arguments.offsets, &lengths,
                          &arguments.boxes, &arguments.flips, &arguments.size, &arguments.out, &arguments.threads,
                          &max_bytes))
        return NULL;
    Py_ssize_t n = PyList_Size(sources);
    CropTask *tasks = calloc((size_t)n + 1, sizeof *tasks);
    SourceRef *refs = calloc((size_t)n + 1, sizeof *refs);
    if (!tasks || !refs)
        PyErr_NoMemory();
    else if (fill_tasks(tasks, n, &arguments) == 0 && acquire_sources(sources, &lengths, refs, tasks) == 0)
        result = crop_tasks(tasks, n, arguments.threads, max_bytes);
    release_sources(refs, n);
    free(tasks);
    PyBuffer_Release(&lengths);
    release_arguments(&arguments);
    return result;
}

/* Invalid sizes become -1, which crop_pixels refuses later, with a reason. */
static int fill_pixel_tasks(CropTask *tasks, Py_ssize_t n, const Py_buffer *source, const Py_buffer *sizes) {
    if (!has_elements(sizes, n, 2 * sizeof(int32_t))) {
        PyErr_SetString(PyExc_ValueError, "sizes must be int32 [n, 2]");
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        const int32_t *size = (const int32_t *)sizes->buf + 2 * i;
        tasks[i].source.memory = source->buf;
        tasks[i].source.memory_bytes = (size_t)source->len;
        tasks[i].width = size[0] > 0 ? size[0] : -1;
        tasks[i].height = size[1];
    }
    return 0;
}

static PyObject *py_crop_pixels(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *result = NULL;
    Arguments arguments;
    Py_buffer source, sizes;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*iw*i", &source, &arguments.offsets, &sizes, &arguments.boxes,
                          &arguments.flips, &arguments.size, &arguments.out, &arguments.threads))
        return NULL;
    Py_ssize_t n = arguments.flips.len;
    CropTask *tasks = calloc((size_t)n + 1, sizeof *tasks);
    if (!tasks)
        PyErr_NoMemory();
    else if (fill_tasks(tasks, n, &arguments) == 0 && fill_pixel_tasks(tasks, n, &source, &sizes) == 0)
        result = crop_tasks(tasks, n, arguments.threads, 0);
    free(tasks);
    PyBuffer_Release(&source);
    PyBuffer_Release(&sizes);
    release_arguments(&arguments);
    return result;
}

/* Crops every image in turn, in one thread, into the same `out`. */
static Stages time_tasks(CropTask *tasks, Py_ssize_t n, int64_t max_bytes, uint8_t *out) {
    Stages stages = {0, 0, 0, 0};
    Worker *worker = out ? create_worker(max_bytes) : NULL;
    for (Py_ssize_t i = 0; worker && i < n; i++) {
        tasks[i].crop.out = out;
        time_stages(worker, &tasks[i].source, &tasks[i].crop, &stages, tasks[i].reason);
    }
    if (worker)
        free_worker(worker);
    return stages;
}

static PyObject *py_time_stages(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *sources, *result = NULL;
    Arguments arguments = {.threads = 1};
    Py_buffer lengths;
    long long max_bytes;
    if (!PyArg_ParseTuple(args, "O!y*y*y*y*iL", &PyList_Type, &sources, &arguments.offsets, &lengths, &arguments.boxes,
                          &arguments.flips, &arguments.size, &max_bytes))
        return NULL;
    Py_ssize_t n = PyList_Size(sources);
    CropTask *tasks = calloc((size_t)n + 1, sizeof *tasks);
    SourceRef *refs = calloc((size_t)n + 1, sizeof *refs);
    int is_valid = arguments.size > 0 && arguments.size <= MAX_SIZE;
    uint8_t *out = is_valid ? calloc(3 * (size_t)arguments.size, (size_t)arguments.size) : NULL;
    if (!tasks || !refs)
        PyErr_NoMemory();
    else if (fill_tasks(tasks, n, &arguments) == 0 && acquire_sources(sources, &lengths, refs, tasks) == 0) {
        Stages totals;
        Py_BEGIN_ALLOW_THREADS
        totals = time_tasks(tasks, n, max_bytes, out);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("(dddd)", totals.read, totals.entropy, totals.transform, totals.resize);
    }
    free(out);
    release_sources(refs, n);
    free(tasks);
    PyBuffer_Release(&lengths);
    release_arguments(&arguments);
    return result;
}

static PyObject *py_tile(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer data;
    long long max_bytes;
    if (!PyArg_ParseTuple(args, "y*L", &data, &max_bytes))
        return NULL;
    Output output;
    char reason[REASON_BYTES];
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = tile_jpeg(data.buf, (size_t)data.len, max_bytes, &output, reason);
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

/* Returns width, height and pixels; raises ValueError with the reason if the image is left to the reference
 * implementation. */
static PyObject *py_decode(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer data;
    long long max_bytes;
    if (!PyArg_ParseTuple(args, "y*L", &data, &max_bytes))
        return NULL;
    DecodedImage image = {0, 0, NULL};
    char reason[REASON_BYTES] = "out of memory";
    int status = -1;
    Py_BEGIN_ALLOW_THREADS
    Decoder *decoder = create_decoder();
    if (decoder) {
        set_decoder_limit(decoder, max_bytes);
        status = decode_jpeg(decoder, data.buf, (size_t)data.len, &image, reason);
        free_decoder(decoder);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    if (status) {
        PyErr_SetString(PyExc_ValueError, reason);
        return NULL;
    }
    Py_ssize_t bytes = 3 * (Py_ssize_t)image.width * image.height;
    PyObject *result = Py_BuildValue("(iiy#)", image.width, image.height, (const char *)image.pixels, bytes);
    free(image.pixels);
    return result;
}

static PyObject *py_advise(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *sources, *result = NULL;
    Py_buffer offsets, lengths;
    if (!PyArg_ParseTuple(args, "O!y*y*", &PyList_Type, &sources, &offsets, &lengths))
        return NULL;
    Py_ssize_t n = PyList_Size(sources);
    CropTask *tasks = calloc((size_t)n + 1, sizeof *tasks);
    SourceRef *refs = calloc((size_t)n + 1, sizeof *refs);
    if (!tasks || !refs) {
        PyErr_NoMemory();
    } else if (!has_elements(&offsets, n, sizeof(int64_t))) {
        PyErr_SetString(PyExc_ValueError, "offsets must be int64 [n]");
    } else if (acquire_sources(sources, &lengths, refs, tasks) == 0) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < n; i++) {
            memcpy(&tasks[i].source.offset, (const int64_t *)offsets.buf + i, sizeof(int64_t));
            advise_source(&tasks[i].source);
        }
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release_sources(refs, n);
    free(tasks);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&lengths);
    return result;
}

/* --- the module --------------------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"crop", py_crop, METH_VARARGS,
     "crop(sources, offsets, lengths, boxes, flips, size, out, threads, max_bytes) -> [(number, reason), ...]"},
    {"crop_pixels", py_crop_pixels, METH_VARARGS,
     "crop_pixels(source, offsets, sizes, boxes, flips, size, out, threads) -> [(number, reason), ...]"},
    {"time_stages", py_time_stages, METH_VARARGS,
     "time_stages(sources, offsets, lengths, boxes, flips, size, max_bytes) -> "
     "(read_s, entropy_s, transform_s, resize_s)"},
    {"decode", py_decode, METH_VARARGS, "decode(data, max_bytes) -> (width, height, pixels)"},
    {"advise", py_advise, METH_VARARGS, "advise(sources, offsets, lengths)"},
    {"tile", py_tile, METH_VARARGS, "tile(data, max_bytes) -> bytes"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Crops of images; see podscale.data.decode.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    return PyModuleDef_Init(&definition);
}
