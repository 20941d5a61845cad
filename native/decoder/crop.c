#include "crop.h"

#include <stdio.h>
#include <stdlib.h>

#include "jpeg.h"
#include "pixels.h"

enum { START_BYTES = 4096 }; /* of a file, which tell its format */

struct Worker {
    Canvas canvas;
    Decoder *decoder;
    int64_t max_pixels;
    uint8_t *file; /* what was read of a file, every byte in its place */
    size_t room;
    Spare spare;
    Stages *stages; /* NULL where nobody asks */
};

static int fail(char *reason, const char *why) {
    snprintf(reason, REASON_BYTES, "%s", why);
    return -1;
}

/* --- encoded pictures --------------------------------------------------------------------------------------------- */

/* Bytes from .. to - 1 of the range, in worker->file; memory has them anyway. */
static const char *fetch(Worker *worker, const Range *range, size_t from, size_t to) {
    if (range->memory || to <= from)
        return NULL;
    double began = worker->stages ? now() : 0;
    const char *why = read_source(range, from, to - from, worker->file + from);
    if (worker->stages)
        worker->stages->read += now() - began;
    return why;
}

/* Of a file, only the rows that are needed are read. */
static const char *crop_ppm(Worker *worker, const Range *range, const uint8_t *data, const Crop *crop) {
    int64_t width, height;
    size_t start = ppm_header(data, range->length, &width, &height);
    if (!start)
        return "not an ordinary PPM";
    if (width * height > worker->max_pixels)
        return "too many pixels";
    if (range->length - start != 3 * (size_t)(width * height))
        return "more or fewer pixels than its header says";
    const char *why = begin_canvas(&worker->canvas, crop, (int)width, (int)height);
    if (why)
        return why;
    size_t pitch = 3 * (size_t)width, from = start + (size_t)worker->canvas.down.from * pitch;
    if ((why = fetch(worker, range, from, start + (size_t)worker->canvas.down.to * pitch)))
        return why;
    Pixels pixels = {data + start, (int)width, (int)height, range->length - start};
    return add_pixels(&worker->canvas, &pixels, &worker->spare);
}

static int time_jpeg(Worker *worker, const uint8_t *data, size_t length, const Crop *crop, char *reason) {
    Stages *stages = worker->stages;
    double resized = worker->canvas.seconds, began = now();
    int status = crop_jpeg(worker->decoder, &worker->canvas, data, length, crop, reason);
    double done = now(), resize = worker->canvas.seconds - resized;
    if (status == 0)
        skim_jpeg(worker->decoder, &worker->canvas, data, length, crop);
    double entropy = status == 0 ? now() - done : 0, transform = done - began - resize - entropy;
    stages->entropy += entropy;
    stages->transform += transform > 0 ? transform : 0;
    return status;
}

static int crop_range(Worker *worker, const Range *range, const Crop *crop, char *reason) {
    if (!range->memory && !(worker->file = roomy(worker->file, &worker->room, range->length + 1)))
        return fail(reason, "out of memory");
    const uint8_t *data = range->memory ? range->memory : worker->file;
    size_t start = range->length < START_BYTES ? range->length : START_BYTES;
    const char *why = fetch(worker, range, 0, start);
    if (!why && range->length >= 2 && data[0] == 'P' && data[1] == '6') {
        why = crop_ppm(worker, range, data, crop);
        return why ? fail(reason, why) : 0;
    }
    if (why || (why = fetch(worker, range, start, range->length)))
        return fail(reason, why);
    if (worker->stages)
        return time_jpeg(worker, data, range->length, crop, reason);
    return crop_jpeg(worker->decoder, &worker->canvas, data, range->length, crop, reason);
}

int crop_picture(Worker *worker, const Source *source, const Crop *crop, char *reason) {
    Range range;
    const char *why = open_source(&range, source);
    if (why)
        return fail(reason, why);
    int status = crop_range(worker, &range, crop, reason);
    close_source(&range);
    return status;
}

int time_stages(Worker *worker, const Source *source, const Crop *crop, Stages *stages, char *reason) {
    worker->stages = stages;
    worker->canvas.timed = 1;
    worker->canvas.seconds = 0;
    int status = crop_picture(worker, source, crop, reason);
    stages->resize += worker->canvas.seconds;
    worker->canvas.timed = 0;
    worker->stages = NULL;
    return status;
}

/* --- pixels ------------------------------------------------------------------------------------------------------- */

int crop_pixels(Worker *worker, const Source *source, int width, int height, const Crop *crop, char *reason) {
    int64_t bytes = 3 * (int64_t)width * height, room = (int64_t)source->room;
    if (width < 1 || height < 1 || source->offset < 0 || source->offset > room || bytes > room - source->offset)
        return fail(reason, "the memory ends before it");
    Pixels pixels = {source->memory + source->offset, width, height, (size_t)(room - source->offset)};
    const char *why = begin_canvas(&worker->canvas, crop, width, height);
    if (why || (why = add_pixels(&worker->canvas, &pixels, &worker->spare)))
        return fail(reason, why);
    return 0;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

Worker *new_worker(int64_t max_pixels) {
    Worker *worker = calloc(1, sizeof *worker);
    if (worker && !(worker->decoder = new_decoder())) {
        free(worker);
        return NULL;
    }
    if (worker)
        limit_pixels(worker, max_pixels);
    return worker;
}

void limit_pixels(Worker *worker, int64_t max_pixels) {
    worker->max_pixels = max_pixels;
    limit_decoder(worker->decoder, max_pixels);
}

size_t worker_bytes(const Worker *worker) {
    return worker->room + worker->spare.room + canvas_bytes(&worker->canvas) + decoder_bytes(worker->decoder);
}

void free_worker(Worker *worker) {
    free_decoder(worker->decoder);
    free_canvas(&worker->canvas);
    free(worker->file);
    free(worker->spare.line);
    free(worker);
}
