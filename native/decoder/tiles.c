#include "tiles.h"

#include <string.h>

enum {
    SOI = 0xD8, EOI = 0xD9, RST0 = 0xD0, SOF0 = 0xC0, SOF1 = 0xC1, DHT = 0xC4, DQT = 0xDB, DRI = 0xDD, SOS = 0xDA,
    APP0 = 0xE0, COM = 0xFE,
    CHROMA_MARGIN = 2,     /* pixels around the needed ones that smooth chroma upsampling uses */
    MIN_COLUMNS = 64,      /* libjpeg upsamples very narrow images in another way */
    TRAILING_BYTES = 5120, /* after the end; without them libjpeg decodes the last MCUs in a slower way */
};

static int read_uint16(const uint8_t *bytes) {
    return bytes[0] << 8 | bytes[1];
}

/* --- the header --------------------------------------------------------------------------------------------------- */

static int is_table(const uint8_t *marker, size_t size) {
    return marker[1] == TILES_MARKER && size >= 2 + TILES_NAME_BYTES &&
           !memcmp(marker + 4, TILES_NAME, TILES_NAME_BYTES);
}

/* Reads size and sampling; returns 0 if no window can be extracted from such a frame. */
static int read_frame(Tiles *tiles, size_t at, size_t size) {
    const uint8_t *frame = tiles->data + at;
    if (tiles->frame || size < 8 || frame[4] != 8)
        return 0;
    tiles->frame = at;
    tiles->height = read_uint16(frame + 5), tiles->width = read_uint16(frame + 7), tiles->channels = frame[9];
    if ((tiles->channels != 1 && tiles->channels != 3) || size != 8 + 3 * (size_t)tiles->channels)
        return 0;
    int max_h = 1, max_v = 1;
    for (int c = 0; c < tiles->channels; c++) {
        int h = frame[11 + 3 * c] >> 4, v = frame[11 + 3 * c] & 15;
        if (h < 1 || h > 4 || v < 1 || v > 4)
            return 0;
        max_h = h > max_h ? h : max_h;
        max_v = v > max_v ? v : max_v;
    }
    tiles->mcu_width = tiles->channels == 1 ? 8 : 8 * max_h;
    tiles->mcu_height = tiles->channels == 1 ? 8 : 8 * max_v;
    return tiles->width > 0 && tiles->height > 0;
}

/* Reads one marker; returns 0 if a tiled file has no such marker. */
static int read_marker(Tiles *tiles, size_t at, size_t size) {
    const uint8_t *marker = tiles->data + at;
    if (is_table(marker, size)) { /* parts of the table must follow each other */
        if (tiles->table && tiles->table_end != at)
            return 0;
        if (!tiles->table)
            tiles->table = at;
        tiles->table_end = at + 2 + size;
        return 1;
    }
    switch (marker[1]) {
        case SOF0: case SOF1: return read_frame(tiles, at, size);
        case DRI: return size == 4 && (tiles->interval = read_uint16(marker + 4)) > 0;
        case DHT: case DQT: case COM: return 1;
        default: return marker[1] >= APP0 && marker[1] < APP0 + 16;
    }
}

/* Reads the header of the scan; returns whether the header is that of a tiled file. */
static int finish_header(Tiles *tiles, size_t at, size_t size) {
    if (!tiles->table || !tiles->frame || !tiles->interval || size < 3 || tiles->data[at + 4] != tiles->channels)
        return 0;
    int mcu_columns = (tiles->width + tiles->mcu_width - 1) / tiles->mcu_width;
    tiles->scan = at + 2 + size;
    tiles->columns = mcu_columns / tiles->interval;
    tiles->rows = (tiles->height + tiles->mcu_height - 1) / tiles->mcu_height;
    return mcu_columns % tiles->interval == 0;
}

int parse_tiles(Tiles *tiles, const uint8_t *data, size_t length) {
    *tiles = (Tiles){.data = data, .length = length};
    if (length < 4 || data[0] != 0xFF || data[1] != SOI)
        return 0;
    for (size_t at = 2; length - at >= 4 && data[at] == 0xFF;) {
        size_t size = (size_t)read_uint16(data + at + 2);
        if (size < 2 || length - at - 2 < size)
            return 0;
        if (data[at + 1] == SOS)
            return finish_header(tiles, at, size);
        if (!read_marker(tiles, at, size))
            return 0;
        at += 2 + size;
    }
    return 0;
}

/* --- the table ---------------------------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *next, *end, *last; /* `end` of this marker's part, `last` of the table */
} Table;

/* Returns the next byte, skipping the headers of markers, or -1 at the end. */
static int read_table_byte(Table *table) {
    while (table->next == table->end) {
        if (table->end == table->last)
            return -1;
        table->next = table->end + 4 + TILES_NAME_BYTES;
        table->end += 2 + read_uint16(table->end + 2);
    }
    return *table->next++;
}

static int64_t read_table_number(Table *table) {
    int64_t value = 0;
    for (int shift = 0; shift < 35; shift += 7) {
        int byte = read_table_byte(table);
        if (byte < 0)
            return -1;
        value |= (int64_t)(byte & 127) << shift;
        if (byte < 128)
            return value;
    }
    return -1;
}

/* --- the window --------------------------------------------------------------------------------------------------- */

Window compute_window(const Tiles *tiles, int left, int top, int right, int bottom) {
    int tile = tiles->interval * tiles->mcu_width;
    int margin_x = tiles->mcu_width > 8 ? CHROMA_MARGIN : 0, margin_y = tiles->mcu_height > 8 ? CHROMA_MARGIN : 0;
    Window window = {
        .left = (left > margin_x ? left - margin_x : 0) / tile,
        .top = (top > margin_y ? top - margin_y : 0) / tiles->mcu_height,
        .right = (right + margin_x + tile - 1) / tile,
        .bottom = (bottom + margin_y + tiles->mcu_height - 1) / tiles->mcu_height,
    };
    window.right = window.right < tiles->columns ? window.right : tiles->columns;
    window.bottom = window.bottom < tiles->rows ? window.bottom : tiles->rows;
    while (compute_window_width(tiles, &window) < MIN_COLUMNS && window.right < tiles->columns)
        window.right++;
    while (compute_window_width(tiles, &window) < MIN_COLUMNS && window.left > 0)
        window.left--;
    return window;
}

int compute_window_width(const Tiles *tiles, const Window *window) {
    int tile = tiles->interval * tiles->mcu_width;
    return (window->right < tiles->columns ? window->right * tile : tiles->width) - window->left * tile;
}

int compute_window_height(const Tiles *tiles, const Window *window) {
    int end = window->bottom < tiles->rows ? window->bottom * tiles->mcu_height : tiles->height;
    return end - window->top * tiles->mcu_height;
}

static uint8_t *write_header(const Tiles *tiles, const Window *window, uint8_t *out) {
    memcpy(out, tiles->data, tiles->table);
    memcpy(out + tiles->table, tiles->data + tiles->table_end, tiles->scan - tiles->table_end);
    size_t table_bytes = tiles->table_end - tiles->table;
    uint8_t *frame = out + tiles->frame - (tiles->frame > tiles->table ? table_bytes : 0);
    int width = compute_window_width(tiles, window), height = compute_window_height(tiles, window);
    frame[5] = (uint8_t)(height >> 8), frame[6] = (uint8_t)height;
    frame[7] = (uint8_t)(width >> 8), frame[8] = (uint8_t)width;
    return out + tiles->scan - table_bytes;
}

static uint8_t *write_marker(uint8_t *out, int marker) {
    out[0] = 0xFF, out[1] = (uint8_t)marker;
    return out + 2;
}

/* Checks all segments and copies those of the window. The output is never longer than the input read so far. */
size_t extract_window(const Tiles *tiles, const Window *window, uint8_t *out) {
    Table table = {tiles->data + tiles->table, tiles->data + tiles->table, tiles->data + tiles->table_end};
    if (read_table_number(&table) != tiles->interval)
        return 0;
    uint8_t *to = write_header(tiles, window, out);
    const uint8_t *from = tiles->data + tiles->scan, *end = tiles->data + tiles->length;
    int64_t count = (int64_t)tiles->columns * tiles->rows;
    int written = 0, x = 0, y = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t bytes = read_table_number(&table);
        if (bytes < 0 || bytes > end - from - 2)
            return 0;
        const uint8_t *marker = from + bytes;
        if (marker[0] != 0xFF || marker[1] != (i + 1 < count ? RST0 + (i & 7) : EOI))
            return 0;
        if (y >= window->top && y < window->bottom && x >= window->left && x < window->right) {
            if (written)
                to = write_marker(to, RST0 + ((written - 1) & 7));
            memcpy(to, from, (size_t)bytes);
            to += bytes, written++;
        }
        from = marker + 2;
        if (++x == tiles->columns)
            x = 0, y++;
    }
    if (read_table_byte(&table) >= 0)
        return 0;
    to = write_marker(to, EOI);
    memset(to, 0, TRAILING_BYTES);
    return (size_t)(to - out) + TRAILING_BYTES;
}
