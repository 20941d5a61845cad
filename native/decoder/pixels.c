#include "pixels.h"

#include <string.h>

enum { ROWS = 16 }; /* at a time: few enough to be in the fastest cache still when the vertical pass comes */

/* The last row of all, of which no byte too many may be read, is copied to where there is room. */
const char *add_pixels(Canvas *canvas, const Pixels *pixels, Spare *spare) {
    size_t pitch = 3 * (size_t)pixels->width, from = (size_t)canvas->across.from;
    size_t used = 3 * ((size_t)canvas->across.to - from), reading = used + 3 * BEYOND + OVER;
    for (int y = canvas->down.from, count; y < canvas->down.to; y += count) {
        count = canvas->down.to - y < ROWS ? canvas->down.to - y : ROWS;
        size_t at = (size_t)y * pitch + 3 * from;
        while (count > 0 && at + (size_t)(count - 1) * pitch + reading > pixels->readable)
            count--;
        Lines lines = {pixels->bytes + at, pitch, count, canvas->across.from, 3};
        if (count == 0) {
            spare->line = roomy(spare->line, &spare->room, reading);
            if (!spare->line)
                return "out of memory";
            memcpy(spare->line, lines.bytes, used);
            lines.bytes = spare->line, lines.count = count = 1;
        }
        add_rows(canvas, &lines);
    }
    return NULL;
}

/* --- PPM's header: P6, width, height and 255, apart by white space or comments; then one white space ------------ */

typedef struct {
    const uint8_t *bytes;
    size_t length, at;
} Text;

static int is_white(const Text *text) {
    return text->at < text->length && text->bytes[text->at] && strchr(" \t\n\v\f\r", text->bytes[text->at]) != NULL;
}

static int is_line_end(uint8_t letter) {
    return letter == '\n' || letter == '\r';
}

/* Past white space and comments; returns whether there was any. */
static int skip_gap(Text *text) {
    size_t began = text->at;
    for (;;) {
        if (is_white(text)) {
            text->at++;
        } else if (text->at < text->length && text->bytes[text->at] == '#') {
            while (text->at < text->length && !is_line_end(text->bytes[text->at]))
                text->at++;
        } else {
            return text->at > began;
        }
    }
}

/* A number of up to nine digits, or -1. */
static int64_t digits(Text *text) {
    int64_t value = 0;
    size_t began = text->at;
    for (; text->at < text->length && text->bytes[text->at] >= '0' && text->bytes[text->at] <= '9'; text->at++)
        if (text->at - began < 9)
            value = 10 * value + text->bytes[text->at] - '0';
        else
            return -1;
    return text->at > began ? value : -1;
}

size_t ppm_header(const uint8_t *bytes, size_t length, int64_t *width, int64_t *height) {
    Text text = {bytes, length < PPM_HEADER_BYTES ? length : PPM_HEADER_BYTES, 2};
    if (length < 2 || memcmp(bytes, "P6", 2))
        return 0;
    if (!skip_gap(&text) || (*width = digits(&text)) < 1 || !skip_gap(&text) || (*height = digits(&text)) < 1)
        return 0;
    if (!skip_gap(&text) || digits(&text) != 255 || !is_white(&text))
        return 0;
    return text.at + 1;
}
