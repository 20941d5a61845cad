/* A canvas: one crop's resize in progress. Rows of pixels come in from the top; finished rows go out to the batch. */
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
    Pass across, down; /* which columns and rows are needed: from .. to - 1 of each */
    const Crop *crop;
    uint8_t *rows; /* what the horizontal pass made */
    size_t room, stride;
    int received, made;
    int timed;
    double seconds; /* spent in add_rows, where it is timed */
} Canvas;

/* Plans a crop of a picture; returns NULL, or why not. */
const char *begin_canvas(Canvas *canvas, const Crop *crop, int width, int height);

/* The next rows, from row down.from on. */
void add_rows(Canvas *canvas, const Lines *lines);

size_t canvas_bytes(const Canvas *canvas); /* allocated */
void free_canvas(Canvas *canvas);
double now(void); /* seconds, for differences */

#endif
