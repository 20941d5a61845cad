/* Crops of images that are pixels already: in memory, or in PPM files. */
#ifndef PODSCALE_PIXELS_H
#define PODSCALE_PIXELS_H

#include "canvas.h"

typedef struct {
    const uint8_t *bytes; /* packed RGB, [height, width, 3] */
    int width, height;
    size_t readable; /* how many of `bytes` may be read: at least the rows that the canvas needs */
} Pixels;

typedef struct {
    uint8_t *bytes;
    size_t capacity;
} RowBuffer;

/* Adds the rows that a canvas needs, which was started for an image of this size. Returns NULL, or the reason of a
 * failure. */
const char *add_pixels(Canvas *canvas, const Pixels *pixels, RowBuffer *buffer);

/* Returns the length of a PPM's header (P6, 8 bits) and sets the size of the image, or returns 0 if there is none. */
size_t parse_ppm_header(const uint8_t *bytes, size_t length, int64_t *width, int64_t *height);
enum { PPM_HEADER_BYTES = 1024 }; /* longer headers are refused */

#endif
