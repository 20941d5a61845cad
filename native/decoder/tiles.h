/* Restart tiles: a JPEG whose restart segments each hold a few MCUs of one row, and which says how long each is.
 *
 * The table lies in markers of our own, APP15 "podscale tiles", so the file is an ordinary JPEG to everyone else: after
 * the name, one stream of numbers, 7 bits a byte, the lowest first, the top bit set where a number goes on; it runs on
 * from marker to marker. First the restart interval, then the length of every segment without its RST marker.
 *
 * Of such a file, a crop needs a window of whole tiles. It is cut out as a small JPEG. The table is never trusted:
 * every segment must end where it says, at the right marker, or the window is not to be had.
 */
#ifndef PODSCALE_TILES_H
#define PODSCALE_TILES_H

#include <stddef.h>
#include <stdint.h>

#define TILES_NAME "podscale tiles" /* its final zero is part of the marker */
enum { TILES_MARKER = 0xEF, TILES_NAME_BYTES = sizeof TILES_NAME };

typedef struct {
    const uint8_t *data;
    size_t length;
    size_t frame, table, table_end, scan; /* where the frame header, the table and the coded data begin */
    int width, height, channels;
    int mcu_width, mcu_height;
    int interval, across, down; /* MCUs a tile, tiles across, rows of tiles */
} Tiles;

/* Whether a JPEG has such a table, as far as its header tells. */
int find_tiles(Tiles *tiles, const uint8_t *data, size_t length);

/* Tiles left .. right - 1 of rows top .. bottom - 1. */
typedef struct {
    int left, top, right, bottom;
} Window;

/* The smallest window that holds these columns and rows of pixels, and what chroma upsampling looks at around them. */
Window window_around(const Tiles *tiles, int left, int top, int right, int bottom);
int window_width(const Tiles *tiles, const Window *window);
int window_height(const Tiles *tiles, const Window *window);

/* Writes the window as a JPEG into `out`, of at least tiles->length + WINDOW_ROOM bytes; returns its length, or 0 where
 * the table is wrong. */
enum { WINDOW_ROOM = 6000 };
size_t cut_window(const Tiles *tiles, const Window *window, uint8_t *out);

#endif
