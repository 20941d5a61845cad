#include "tiles.h"

#include <string.h>

enum {
    SOI = 0xD8, EOI = 0xD9, RST0 = 0xD0, SOF0 = 0xC0, SOF1 = 0xC1, DHT = 0xC4, DQT = 0xDB, DRI = 0xDD, SOS = 0xDA,
    APP0 = 0xE0, COM = 0xFE,
    MARGIN = 2,     /* pixels around the needed ones that smooth chroma upsampling looks at */
    NARROWEST = 64, /* columns; libjpeg upsamples very narrow pictures in another way */
    SPARE = 5120,   /* bytes after the end without which libjpeg decodes the last MCUs by its slower way */
};

static int pair_at(const uint8_t *bytes) {
    return bytes[0] << 8 | bytes[1];
}

/* --- the header --------------------------------------------------------------------------------------------------- */

static int is_table(const uint8_t *marker, size_t size) {
    return marker[1] == TILES_MARKER && size >= 2 + TILES_NAME_BYTES &&
           !memcmp(marker + 4, TILES_NAME, TILES_NAME_BYTES);
}

/* Size and sampling; 0 where there is anything that a window cannot be cut of. */
static int read_frame(Tiles *tiles, size_t at, size_t size) {
    const uint8_t *frame = tiles->data + at;
    if (tiles->frame || size < 8 || frame[4] != 8)
        return 0;
    tiles->frame = at;
    tiles->height = pair_at(frame + 5), tiles->width = pair_at(frame + 7), tiles->channels = frame[9];
    if ((tiles->channels != 1 && tiles->channels != 3) || size != 8 + 3 * (size_t)tiles->channels)
        return 0;
    int most_across = 1, most_down = 1;
    for (int c = 0; c < tiles->channels; c++) {
        int across = frame[11 + 3 * c] >> 4, down = frame[11 + 3 * c] & 15;
        if (across < 1 || across > 4 || down < 1 || down > 4)
            return 0;
        most_across = across > most_across ? across : most_across;
        most_down = down > most_down ? down : most_down;
    }
    tiles->mcu_width = tiles->channels == 1 ? 8 : 8 * most_across;
    tiles->mcu_height = tiles->channels == 1 ? 8 : 8 * most_down;
    return tiles->width > 0 && tiles->height > 0;
}

/* Takes note of one marker; 0 where it is none that a tiled file has. */
static int read_marker(Tiles *tiles, size_t at, size_t size) {
    const uint8_t *marker = tiles->data + at;
    if (is_table(marker, size)) { /* parts of the table follow each other */
        if (tiles->table && tiles->table_end != at)
            return 0;
        if (!tiles->table)
            tiles->table = at;
        tiles->table_end = at + 2 + size;
        return 1;
    }
    switch (marker[1]) {
        case SOF0: case SOF1: return read_frame(tiles, at, size);
        case DRI: return size == 4 && (tiles->interval = pair_at(marker + 4)) > 0;
        case DHT: case DQT: case COM: return 1;
        default: return marker[1] >= APP0 && marker[1] < APP0 + 16;
    }
}

static int has_all(Tiles *tiles, size_t at, size_t size) {
    if (!tiles->table || !tiles->frame || !tiles->interval || size < 3 || tiles->data[at + 4] != tiles->channels)
        return 0;
    int columns = (tiles->width + tiles->mcu_width - 1) / tiles->mcu_width;
    tiles->scan = at + 2 + size;
    tiles->across = columns / tiles->interval;
    tiles->down = (tiles->height + tiles->mcu_height - 1) / tiles->mcu_height;
    return columns % tiles->interval == 0;
}

int find_tiles(Tiles *tiles, const uint8_t *data, size_t length) {
    *tiles = (Tiles){.data = data, .length = length};
    if (length < 4 || data[0] != 0xFF || data[1] != SOI)
        return 0;
    for (size_t at = 2; length - at >= 4 && data[at] == 0xFF;) {
        size_t size = (size_t)pair_at(data + at + 2);
        if (size < 2 || length - at - 2 < size)
            return 0;
        if (data[at + 1] == SOS)
            return has_all(tiles, at, size);
        if (!read_marker(tiles, at, size))
            return 0;
        at += 2 + size;
    }
    return 0;
}

/* --- the table ---------------------------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *next, *end, *last; /* of this marker's part, and of the table */
} Table;

/* The next byte, past the heads of markers, or -1. */
static int table_byte(Table *table) {
    while (table->next == table->end) {
        if (table->end == table->last)
            return -1;
        table->next = table->end + 4 + TILES_NAME_BYTES;
        table->end += 2 + pair_at(table->end + 2);
    }
    return *table->next++;
}

static int64_t table_number(Table *table) {
    int64_t value = 0;
    for (int shift = 0; shift < 35; shift += 7) {
        int byte = table_byte(table);
        if (byte < 0)
            return -1;
        value |= (int64_t)(byte & 127) << shift;
        if (byte < 128)
            return value;
    }
    return -1;
}

/* --- the window --------------------------------------------------------------------------------------------------- */

Window window_around(const Tiles *tiles, int left, int top, int right, int bottom) {
    int tile = tiles->interval * tiles->mcu_width;
    int beside = tiles->mcu_width > 8 ? MARGIN : 0, above = tiles->mcu_height > 8 ? MARGIN : 0;
    Window window = {
        .left = (left > beside ? left - beside : 0) / tile,
        .top = (top > above ? top - above : 0) / tiles->mcu_height,
        .right = (right + beside + tile - 1) / tile,
        .bottom = (bottom + above + tiles->mcu_height - 1) / tiles->mcu_height,
    };
    window.right = window.right < tiles->across ? window.right : tiles->across;
    window.bottom = window.bottom < tiles->down ? window.bottom : tiles->down;
    while (window_width(tiles, &window) < NARROWEST && window.right < tiles->across)
        window.right++;
    while (window_width(tiles, &window) < NARROWEST && window.left > 0)
        window.left--;
    return window;
}

int window_width(const Tiles *tiles, const Window *window) {
    int tile = tiles->interval * tiles->mcu_width;
    return (window->right < tiles->across ? window->right * tile : tiles->width) - window->left * tile;
}

int window_height(const Tiles *tiles, const Window *window) {
    int end = window->bottom < tiles->down ? window->bottom * tiles->mcu_height : tiles->height;
    return end - window->top * tiles->mcu_height;
}

static uint8_t *put_header(const Tiles *tiles, const Window *window, uint8_t *out) {
    memcpy(out, tiles->data, tiles->table);
    memcpy(out + tiles->table, tiles->data + tiles->table_end, tiles->scan - tiles->table_end);
    size_t gone = tiles->table_end - tiles->table;
    uint8_t *frame = out + tiles->frame - (tiles->frame > tiles->table ? gone : 0);
    int width = window_width(tiles, window), height = window_height(tiles, window);
    frame[5] = (uint8_t)(height >> 8), frame[6] = (uint8_t)height;
    frame[7] = (uint8_t)(width >> 8), frame[8] = (uint8_t)width;
    return out + tiles->scan - gone;
}

static uint8_t *put_marker(uint8_t *out, int marker) {
    out[0] = 0xFF, out[1] = (uint8_t)marker;
    return out + 2;
}

/* All segments are checked, and those of the window taken. What is written is never longer than what was passed. */
size_t cut_window(const Tiles *tiles, const Window *window, uint8_t *out) {
    Table table = {tiles->data + tiles->table, tiles->data + tiles->table, tiles->data + tiles->table_end};
    if (table_number(&table) != tiles->interval)
        return 0;
    uint8_t *to = put_header(tiles, window, out);
    const uint8_t *from = tiles->data + tiles->scan, *end = tiles->data + tiles->length;
    int64_t count = (int64_t)tiles->across * tiles->down;
    int taken = 0, x = 0, y = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t bytes = table_number(&table);
        if (bytes < 0 || bytes > end - from - 2)
            return 0;
        const uint8_t *marker = from + bytes;
        if (marker[0] != 0xFF || marker[1] != (i + 1 < count ? RST0 + (i & 7) : EOI))
            return 0;
        if (y >= window->top && y < window->bottom && x >= window->left && x < window->right) {
            if (taken)
                to = put_marker(to, RST0 + ((taken - 1) & 7));
            memcpy(to, from, (size_t)bytes);
            to += bytes, taken++;
        }
        from = marker + 2;
        if (++x == tiles->across)
            x = 0, y++;
    }
    if (table_byte(&table) >= 0)
        return 0;
    to = put_marker(to, EOI);
    memset(to, 0, SPARE);
    return (size_t)(to - out) + SPARE;
}
