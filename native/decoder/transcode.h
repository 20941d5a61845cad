/* Transcoding: a JPEG with restart tiles (tiles.h), in one baseline scan, of exactly the same coefficients. */
#ifndef PODSCALE_TRANSCODE_H
#define PODSCALE_TRANSCODE_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint8_t *bytes; /* to be freed */
    size_t length, room;
} Output;

/* Returns 0, or -1 and why not, as crop_picture; the output holds nothing then. */
int tile_jpeg(const uint8_t *data, size_t length, int64_t max_pixels, Output *output, char *reason);

#endif
