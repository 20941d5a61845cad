#include "pixels.h"

#include <string.h>

enum {
    ROWS_PER_CALL = ROW_GROUP, /* few, so that the next ones come from memory while these are resized */
    CACHE_LINE = 64,
};

/* Asks for rows ahead of time: each is too short to be noticed by the processor as a stream. */
static void prefetch_rows(const uint8_t *bytes, size_t pitch, size_t row_bytes, int count) {
    for (const uint8_t *row = bytes, *end = bytes + (count > 0 ? count : 0) * pitch; row < end; row += pitch)
        for (size_t at = 0; at < row_bytes; at += CACHE_LINE)
            __builtin_prefetch(row + at);
}

/* The last row of the memory, past whose end nothing may be read, is copied to a buffer that is long enough. */
const char *add_pixels(Canvas *canvas, const Pixels *pixels, RowBuffer *buffer) {
    size_t pitch = 3 * (size_t)pixels->width, from = (size_t)canvas->horizontal.from;
    size_t row_bytes = 3 * ((size_t)canvas->horizontal.to - from);
    size_t read_bytes = row_bytes + 3 * EXTRA_INPUTS + READ_SLACK;
    int rows = canvas->vertical.to - canvas->vertical.from;
    prefetch_rows(pixels->bytes + (size_t)canvas->vertical.from * pitch + 3 * from, pitch, row_bytes,
                  rows < ROWS_PER_CALL ? rows : ROWS_PER_CALL);
    for (int y = canvas->vertical.from, count; y < canvas->vertical.to; y += count) {
        count = canvas->vertical.to - y < ROWS_PER_CALL ? canvas->vertical.to - y : ROWS_PER_CALL;
        size_t at = (size_t)y * pitch + 3 * from;
        while (count > 0 && at + (size_t)(count - 1) * pitch + read_bytes > pixels->readable)
            count--;
        Lines lines = {pixels->bytes + at, pitch, count, canvas->horizontal.from, 3};
        if (count == 0) {
            buffer->bytes = ensure_capacity(buffer->bytes, &buffer->capacity, read_bytes);
            if (!buffer->bytes)
                return "out of memory";
            memcpy(buffer->bytes, lines.bytes, row_bytes);
            lines.bytes = buffer->bytes, lines.count = count = 1;
        }
        int ahead = canvas->vertical.to - y - count;
        prefetch_rows(pixels->bytes + at + (size_t)count * pitch, pitch, row_bytes,
                      ahead < ROWS_PER_CALL ? ahead : ROWS_PER_CALL);
        add_rows(canvas, &lines);
    }
    return NULL;
}

/* --- PPM header: P6, width, height and 255, separated by white space or comments; then one white space ----------- */

typedef struct {
    const uint8_t *bytes;
    size_t length, at;
} Text;

static int is_whitespace(const Text *text) {
    return text->at < text->length && text->bytes[text->at] && strchr(" \t\n\v\f\r", text->bytes[text->at]) != NULL;
}

static int is_line_end(uint8_t byte) {
    return byte == '\n' || byte == '\r';
}

/* Skips white space and comments; returns whether there was any. */
static int skip_whitespace(Text *text) {
    size_t start = text->at;
    for (;;) {
        if (is_whitespace(text)) {
            text->at++;
        } else if (text->at < text->length && text->bytes[text->at] == '#') {
            while (text->at < text->length && !is_line_end(text->bytes[text->at]))
                text->at++;
        } else {
            return text->at > start;
        }
    }
}

/* Returns a number of up to nine digits, or -1. */
static int64_t parse_number(Text *text) {
    int64_t value = 0;
    size_t start = text->at;
    for (; text->at < text->length && text->bytes[text->at] >= '0' && text->bytes[text->at] <= '9'; text->at++)
        if (text->at - start < 9)
            value = 10 * value + text->bytes[text->at] - '0';
        else
            return -1;
    return text->at > start ? value : -1;
}

size_t parse_ppm_header(const uint8_t *bytes, size_t length, int64_t *width, int64_t *height) {
    Text text = {bytes, length < PPM_HEADER_BYTES ? length : PPM_HEADER_BYTES, 2};
    if (length < 2 || memcmp(bytes, "P6", 2))
        return 0;
    if (!skip_whitespace(&text) || (*width = parse_number(&text)) < 1)
        return 0;
    if (!skip_whitespace(&text) || (*height = parse_number(&text)) < 1)
        return 0;
    if (!skip_whitespace(&text) || parse_number(&text) != 255 || !is_whitespace(&text))
        return 0;
    return text.at + 1;
}
