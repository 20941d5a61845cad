/* A canvas: one crop's resize in progress. Rows of pixels are added from the top; finished rows are written to the
 * batch. */
#ifndef PODSCALE_CANVAS_H
#define PODSCALE_CANVAS_H

#include "resize.h"

enum { MAX_SIZE = 1 << 15 };

typedef struct {
    double box[4]; /* left, top, right, bottom */
    int flip;
    int size;     /* 1 to MAX_SIZE */
    uint8_t *out; /* [size, size, 3] */
} Crop;

typedef struct {
    Pass horizontal, vertical; /* which columns and rows are needed: from .. to - 1 of each */
    const Crop *crop;
    uint8_t *rows; /* output of the horizontal pass */
    size_t capacity, stride;
    int rows_received, rows_done;
    int is_timed;
    double seconds; /* spent in add_rows, if it is timed */
} Canvas;

/* Plans a crop of an image whose rows will have `step` bytes per pixel; returns NULL, or the reason of a failure. */
const char *start_canvas(Canvas *canvas, const Crop *crop, int width, int height, int step);

/* Adds the next rows, starting with row vertical.from. */
void add_rows(Canvas *canvas, const Lines *lines);

size_t count_canvas_bytes(const Canvas *canvas); /* that it has allocated */
void free_canvas(Canvas *canvas);
double read_clock(void); /* in seconds, for differences */

#endif
