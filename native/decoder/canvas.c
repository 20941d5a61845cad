#define _POSIX_C_SOURCE 200809L
#include "canvas.h"

#include <stdlib.h>
#include <time.h>

enum { ROW_ALIGNMENT = 64 }; /* bytes between the starts of rows are a multiple of this */

/* Pillow takes boxes in single precision. */
const char *start_canvas(Canvas *canvas, const Crop *crop, int width, int height, int step) {
    const double *box = crop->box;
    if (!(box[0] >= 0 && box[1] >= 0 && box[2] <= width && box[3] <= height))
        return "the box leaves the image";
    float left = (float)box[0], top = (float)box[1], right = (float)box[2], bottom = (float)box[3];
    if (!(left < right && top < bottom))
        return "the box is empty";
    if (plan_pass(&canvas->horizontal, width, left, right, crop->size, crop->flip) ||
        plan_blocks(&canvas->horizontal, step) ||
        plan_pass(&canvas->vertical, height, top, bottom, crop->size, 0))
        return "out of memory";
    canvas->stride = (3 * (size_t)crop->size + OUTPUT_SLACK + ROW_ALIGNMENT - 1) / ROW_ALIGNMENT * ROW_ALIGNMENT;
    size_t count = (size_t)(canvas->vertical.to - canvas->vertical.from + EXTRA_INPUTS);
    canvas->rows = ensure_capacity(canvas->rows, &canvas->capacity, count * canvas->stride);
    if (!canvas->rows)
        return "out of memory";
    canvas->crop = crop;
    canvas->rows_received = canvas->rows_done = 0;
    return NULL;
}

/* Runs the vertical pass for every output row whose inputs are complete, while they are in the caches. */
static void finish_rows(Canvas *canvas) {
    const Pass *vertical = &canvas->vertical;
    int bytes = 3 * canvas->crop->size, end = vertical->from + canvas->rows_received;
    for (; canvas->rows_done < vertical->outputs; canvas->rows_done++) {
        if (end < vertical->to && vertical->first_input[canvas->rows_done] + vertical->taps > end)
            return; /* not all inputs that have a weight are there */
        uint8_t *out = canvas->crop->out + (size_t)canvas->rows_done * (size_t)bytes;
        resize_vertically(vertical, canvas->rows_done, canvas->rows, canvas->stride, bytes, out);
    }
}

void add_rows(Canvas *canvas, const Lines *lines) {
    double start = canvas->is_timed ? read_clock() : 0;
    uint8_t *rows = canvas->rows + (size_t)canvas->rows_received * canvas->stride;
    resize_horizontally(&canvas->horizontal, lines, rows, canvas->stride);
    canvas->rows_received += lines->count;
    finish_rows(canvas);
    if (canvas->is_timed)
        canvas->seconds += read_clock() - start;
}

size_t count_canvas_bytes(const Canvas *canvas) {
    return canvas->capacity + count_pass_bytes(&canvas->horizontal) + count_pass_bytes(&canvas->vertical);
}

void free_canvas(Canvas *canvas) {
    free_pass(&canvas->horizontal);
    free_pass(&canvas->vertical);
    free(canvas->rows);
}

double read_clock(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}
