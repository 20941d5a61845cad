/* Restart tiles: a JPEG whose restart segments each contain a few MCUs of one row, and which lists their lengths.
 *
 * The table is in markers of our own, APP15 "podscale tiles", so the file is an ordinary JPEG to all other programs:
 * after the name, one stream of numbers, 7 bits per byte, the lowest first, with the top bit set if the number
 * continues; the stream continues from marker to marker. It contains the restart interval and then the length of every
 * segment, without its RST marker.
 *
 * Of such a file, a crop needs a window of whole tiles, which is extracted as a small JPEG. The table is never trusted:
 * every segment must end where the table says, at the right marker, or there is no window.
 */
#ifndef PODSCALE_TILES_H
#define PODSCALE_TILES_H

#include <stddef.h>
#include <stdint.h>

#define TILES_NAME "podscale tiles" /* the final zero is part of the marker */
enum { TILES_MARKER = 0xEF, TILES_NAME_BYTES = sizeof TILES_NAME };

typedef struct {
    const uint8_t *data;
    size_t length;
    size_t frame, table, table_end, scan; /* offsets of the frame header, the table and the coded data */
    int width, height, channels;
    int mcu_width, mcu_height;
    int interval, columns, rows; /* MCUs per tile, columns of tiles, rows of tiles */
} Tiles;

/* Parses the header; returns whether the JPEG has such a table. */
int parse_tiles(Tiles *tiles, const uint8_t *data, size_t length);

/* Tiles left .. right - 1 of rows top .. bottom - 1. */
typedef struct {
    int left, top, right, bottom;
} Window;

/* Returns the smallest window that contains these columns and rows of pixels, and those around them that chroma
 * upsampling uses. */
Window compute_window(const Tiles *tiles, int left, int top, int right, int bottom);
int compute_window_width(const Tiles *tiles, const Window *window);
int compute_window_height(const Tiles *tiles, const Window *window);

/* Writes the window as a JPEG to `out`, which has at least tiles->length + WINDOW_EXTRA_BYTES bytes; returns its
 * length, or 0 if the table is wrong. */
enum { WINDOW_EXTRA_BYTES = 6000 };
size_t extract_window(const Tiles *tiles, const Window *window, uint8_t *out);

#endif
