#include "crop.h"

#include <stdio.h>
#include <stdlib.h>

#include "jpeg.h"
#include "limits.h"
#include "pixels.h"

enum { PROBE_BYTES = 4096 }; /* of a file, read first to detect its format */

struct Worker {
    Canvas canvas;
    Decoder *decoder;
    int64_t max_bytes;
    uint8_t *file; /* bytes read from a file, each at its offset */
    size_t capacity;
    RowBuffer row_buffer;
    Stages *stages; /* NULL if nothing is timed */
};

static int fail(char *reason, const char *failure) {
    snprintf(reason, REASON_BYTES, "%s", failure);
    return -1;
}

/* --- encoded images ----------------------------------------------------------------------------------------------- */

/* Reads bytes from .. to - 1 of the range into worker->file, unless the range is in memory. */
static const char *fetch(Worker *worker, const Range *range, size_t from, size_t to) {
    if (range->memory || to <= from)
        return NULL;
    double start_time = worker->stages ? read_clock() : 0;
    const char *failure = read_source(range, from, to - from, worker->file + from);
    if (worker->stages)
        worker->stages->read += read_clock() - start_time;
    return failure;
}

/* Reads only the needed rows of a file. */
static const char *crop_ppm(Worker *worker, const Range *range, const uint8_t *data, const Crop *crop) {
    int64_t width, height;
    size_t start = parse_ppm_header(data, range->length, &width, &height);
    if (!start)
        return "not an ordinary PPM";
    if (exceeds_memory(width, height, worker->max_bytes))
        return "too much memory";
    if (range->length - start != 3 * (size_t)(width * height))
        return "more or fewer pixels than its header says";
    const char *failure = start_canvas(&worker->canvas, crop, (int)width, (int)height, 3);
    if (failure)
        return failure;
    size_t pitch = 3 * (size_t)width, from = start + (size_t)worker->canvas.vertical.from * pitch;
    if ((failure = fetch(worker, range, from, start + (size_t)worker->canvas.vertical.to * pitch)))
        return failure;
    Pixels pixels = {data + start, (int)width, (int)height, range->length - start};
    return add_pixels(&worker->canvas, &pixels, &worker->row_buffer);
}

static int time_jpeg(Worker *worker, const uint8_t *data, size_t length, const Crop *crop, char *reason) {
    Stages *stages = worker->stages;
    double resize_before = worker->canvas.seconds, start_time = read_clock();
    int status = crop_jpeg(worker->decoder, &worker->canvas, data, length, crop, reason);
    double end_time = read_clock(), resize = worker->canvas.seconds - resize_before;
    if (status == 0)
        entropy_decode_jpeg(worker->decoder, &worker->canvas, data, length, crop);
    double entropy = status == 0 ? read_clock() - end_time : 0, transform = end_time - start_time - resize - entropy;
    stages->entropy += entropy;
    stages->transform += transform > 0 ? transform : 0;
    return status;
}

static int crop_range(Worker *worker, const Range *range, const Crop *crop, char *reason) {
    if (!range->memory && !(worker->file = ensure_capacity(worker->file, &worker->capacity, range->length + 1)))
        return fail(reason, "out of memory");
    const uint8_t *data = range->memory ? range->memory : worker->file;
    size_t start = range->length < PROBE_BYTES ? range->length : PROBE_BYTES;
    const char *failure = fetch(worker, range, 0, start);
    if (!failure && range->length >= 2 && data[0] == 'P' && data[1] == '6') {
        failure = crop_ppm(worker, range, data, crop);
        return failure ? fail(reason, failure) : 0;
    }
    if (failure || (failure = fetch(worker, range, start, range->length)))
        return fail(reason, failure);
    if (worker->stages)
        return time_jpeg(worker, data, range->length, crop, reason);
    return crop_jpeg(worker->decoder, &worker->canvas, data, range->length, crop, reason);
}

int crop_image(Worker *worker, const Source *source, const Crop *crop, char *reason) {
    Range range;
    const char *failure = open_source(&range, source);
    if (failure)
        return fail(reason, failure);
    int status = crop_range(worker, &range, crop, reason);
    close_source(&range);
    return status;
}

int time_stages(Worker *worker, const Source *source, const Crop *crop, Stages *stages, char *reason) {
    worker->stages = stages;
    worker->canvas.is_timed = 1;
    worker->canvas.seconds = 0;
    int status = crop_image(worker, source, crop, reason);
    stages->resize += worker->canvas.seconds;
    worker->canvas.is_timed = 0;
    worker->stages = NULL;
    return status;
}

/* --- pixels ------------------------------------------------------------------------------------------------------- */

int crop_pixels(Worker *worker, const Source *source, int width, int height, const Crop *crop, char *reason) {
    int64_t bytes = 3 * (int64_t)width * height, capacity = (int64_t)source->memory_bytes;
    if (width < 1 || height < 1 || source->offset < 0 || source->offset > capacity || bytes > capacity - source->offset)
        return fail(reason, "the memory ends before it");
    Pixels pixels = {source->memory + source->offset, width, height, (size_t)(capacity - source->offset)};
    const char *failure = start_canvas(&worker->canvas, crop, width, height, 3);
    if (failure || (failure = add_pixels(&worker->canvas, &pixels, &worker->row_buffer)))
        return fail(reason, failure);
    return 0;
}

/* --- lifetime ----------------------------------------------------------------------------------------------------- */

Worker *create_worker(int64_t max_bytes) {
    Worker *worker = calloc(1, sizeof *worker);
    if (worker && !(worker->decoder = create_decoder())) {
        free(worker);
        return NULL;
    }
    if (worker)
        set_max_bytes(worker, max_bytes);
    return worker;
}

void set_max_bytes(Worker *worker, int64_t max_bytes) {
    worker->max_bytes = max_bytes;
    set_decoder_limit(worker->decoder, max_bytes);
}

size_t count_worker_bytes(const Worker *worker) {
    return worker->capacity + worker->row_buffer.capacity + count_canvas_bytes(&worker->canvas) +
           count_decoder_bytes(worker->decoder);
}

void free_worker(Worker *worker) {
    free_decoder(worker->decoder);
    free_canvas(&worker->canvas);
    free(worker->file);
    free(worker->row_buffer.bytes);
    free(worker);
}
