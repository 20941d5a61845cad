#define _POSIX_C_SOURCE 200809L
#include "canvas.h"

#include <stdlib.h>
#include <time.h>

enum { APART = 64 }; /* bytes between rows are a multiple of this */

/* Pillow takes boxes in single precision. */
const char *begin_canvas(Canvas *canvas, const Crop *crop, int width, int height) {
    const double *box = crop->box;
    if (!(box[0] >= 0 && box[1] >= 0 && box[2] <= width && box[3] <= height))
        return "the box leaves the picture";
    float left = (float)box[0], top = (float)box[1], right = (float)box[2], bottom = (float)box[3];
    if (!(left < right && top < bottom))
        return "the box is empty";
    if (plan_pass(&canvas->across, width, left, right, crop->size, crop->flip) ||
        plan_pass(&canvas->down, height, top, bottom, crop->size, 0))
        return "out of memory";
    canvas->stride = (3 * (size_t)crop->size + WASTE + APART - 1) / APART * APART;
    size_t count = (size_t)(canvas->down.to - canvas->down.from + BEYOND);
    canvas->rows = roomy(canvas->rows, &canvas->room, count * canvas->stride);
    if (!canvas->rows)
        return "out of memory";
    canvas->crop = crop;
    canvas->received = canvas->made = 0;
    return NULL;
}

/* The vertical pass for every place that has all its rows, while they are in the caches. */
static void make_columns(Canvas *canvas) {
    const Pass *down = &canvas->down;
    int bytes = 3 * canvas->crop->size, reached = down->from + canvas->received;
    for (; canvas->made < down->places; canvas->made++) {
        if (reached < down->to && down->first[canvas->made] + 2 * down->pairs > reached) /* all that count, at least */
            return;
        uint8_t *out = canvas->crop->out + (size_t)canvas->made * (size_t)bytes;
        resize_column(down, canvas->made, canvas->rows, canvas->stride, bytes, out);
    }
}

void add_rows(Canvas *canvas, const Lines *lines) {
    double began = canvas->timed ? now() : 0;
    resize_rows(&canvas->across, lines, canvas->rows + (size_t)canvas->received * canvas->stride, canvas->stride);
    canvas->received += lines->count;
    make_columns(canvas);
    if (canvas->timed)
        canvas->seconds += now() - began;
}

size_t canvas_bytes(const Canvas *canvas) {
    return canvas->room + canvas->across.room_scratch + canvas->across.room_weights + canvas->down.room_scratch +
           canvas->down.room_weights;
}

void free_canvas(Canvas *canvas) {
    free_pass(&canvas->across);
    free_pass(&canvas->down);
    free(canvas->rows);
}

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}
