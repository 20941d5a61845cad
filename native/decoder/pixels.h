/* Crops of pictures that are pixels already: in memory, or in PPM files. */
#ifndef PODSCALE_PIXELS_H
#define PODSCALE_PIXELS_H

#include "canvas.h"

typedef struct {
    const uint8_t *bytes; /* packed RGB, [height, width, 3] */
    int width, height;
    size_t readable; /* bytes from `bytes` on, at least those of the rows that the canvas needs */
} Pixels;

/* The rows that a canvas, begun for a picture of this size, needs. */
typedef struct {
    uint8_t *line;
    size_t room;
} Spare;
const char *add_pixels(Canvas *canvas, const Pixels *pixels, Spare *spare);

/* The length of a PPM's header (P6, 8 bits) and the size it tells, or 0 where it is none. */
size_t ppm_header(const uint8_t *bytes, size_t length, int64_t *width, int64_t *height);
enum { PPM_HEADER_BYTES = 1024 }; /* no header is longer */

#endif
