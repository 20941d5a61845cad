/* Transcoding to a JPEG with restart tiles (tiles.h), in one baseline scan, of exactly the same coefficients. */
#ifndef PODSCALE_TRANSCODE_H
#define PODSCALE_TRANSCODE_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint8_t *bytes; /* the caller frees them */
    size_t length, capacity;
} Output;

/* Returns like crop_image; after a failure the output is empty. */
int tile_jpeg(const uint8_t *data, size_t length, int64_t max_bytes, Output *output, char *reason);

#endif
