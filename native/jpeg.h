/* A part of a JPEG file, resized: only the rows and columns that the result needs are decoded.
 *
 * What this takes on, it does exactly as Pillow would. Everything else it leaves to its caller, with a reason: files
 * with any flaw that libjpeg would warn of, inks, more than 8 bits, arithmetic coding, pictures that EXIF turns, boxes
 * that leave the picture.
 */
#ifndef PODSCALE_JPEG_H
#define PODSCALE_JPEG_H

#include <stddef.h>
#include <stdint.h>

enum { REASON_BYTES = 200, MAX_SIZE = 1 << 15 };

typedef struct Decoder Decoder; /* one for each thread; what it has allocated is used again for the next picture */

typedef struct {
    const uint8_t *data;
    size_t length;
    double box[4]; /* left, top, right, bottom */
    int flip, tall_first; /* tall_first: the vertical pass comes first in tall pictures, as in Pillow 13 */
    int size;     /* 1 to MAX_SIZE */
    uint8_t *out; /* [size, size, 3] */
} Crop;

Decoder *new_decoder(int64_t max_pixels); /* NULL where memory ran out */
void free_decoder(Decoder *decoder);

/* Returns 0, or -1 and why not, in at most REASON_BYTES with the final zero; `out` then holds anything. */
int crop_jpeg(Decoder *decoder, const Crop *crop, char *reason);

#endif
