#include "jpeg.h"

#include <stdlib.h>
#include <string.h>

#include "guard.h"
#include "tiles.h"

enum {
    MARGIN = 2,     /* columns on either side that smooth chroma upsampling looks at */
    NARROWEST = 64, /* columns; libjpeg upsamples very narrow pictures in another way */
    LINES = 16,     /* rows asked of libjpeg at a time */
    /* Decoded rows begin 4 bytes off any larger power of 2: libjpeg writes aligned rows past the caches, straight to
     * memory, whence the resize would have to fetch them again. */
    ASKEW = 4,
    APART = 64, /* bytes between rows are a multiple of this */
};

struct Decoder {
    Guard guard;
    struct jpeg_decompress_struct jpeg;
    int64_t max_pixels;
    Canvas *canvas;
    int left, top;  /* where what libjpeg decodes lies in the picture */
    uint8_t *lines; /* decoded RGBX */
    size_t room;
    uint8_t *window; /* the part of a tiled file that is decoded in its place */
    size_t window_room;
};

/* --- the end ------------------------------------------------------------------------------------------------------ */

static int is_restart(int marker) {
    return marker >= JPEG_RST0 && marker < JPEG_RST0 + 8;
}

/* Whether what has not been read runs on to the end-of-image marker without any other. Pillow reads it all, and fails
 * where it is cut off or where damage looks like a new header; other damage there cannot fail. */
static int ends_well(const Decoder *decoder) {
    int parked = decoder->jpeg.unread_marker;
    if (parked && !is_restart(parked))
        return parked == JPEG_EOI;
    const uint8_t *next = decoder->guard.source.next_input_byte, *end = next + decoder->guard.source.bytes_in_buffer;
    while ((next = memchr(next, 0xFF, (size_t)(end - next))) && ++next < end)
        if (*next != 0 && *next != 0xFF && !is_restart(*next))
            return *next == JPEG_EOI;
    return 0;
}

/* --- orientation -------------------------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *bytes;
    size_t length;
    int little;
} Tiff;

static int64_t number(const Tiff *tiff, size_t at, int width) {
    if (at > tiff->length || tiff->length - at < (size_t)width)
        return -1;
    int64_t value = 0;
    for (int i = 0; i < width; i++)
        value = value << 8 | tiff->bytes[tiff->little ? at + width - 1 - i : at + i];
    return value;
}

/* EXIF's tag 274 of the first directory; 1, upright, where there is none or where it makes no sense. */
static int orientation(const uint8_t *bytes, size_t length) {
    Tiff tiff = {bytes, length, length >= 4 && !memcmp(bytes, "II*\0", 4)};
    if (!tiff.little && (length < 4 || memcmp(bytes, "MM\0*", 4)))
        return 1;
    int64_t directory = number(&tiff, 4, 4);
    int64_t entries = directory < 0 ? 0 : number(&tiff, (size_t)directory, 2);
    for (int64_t i = 0; i < entries; i++) {
        size_t entry = (size_t)(directory + 2 + 12 * i);
        int64_t value = number(&tiff, entry + 8, 2);
        if (value < 0)
            return 1;
        if (number(&tiff, entry, 2) == 274 && number(&tiff, entry + 2, 2) == 3)
            return value >= 1 && value <= 8 ? (int)value : 1;
    }
    return 1;
}

static int upright(const Decoder *decoder) {
    int found = 0;
    for (jpeg_saved_marker_ptr marker = decoder->jpeg.marker_list; marker; marker = marker->next) {
        if (marker->data_length < 6 || memcmp(marker->data, "Exif\0\0", 6))
            continue;
        if (found++ || orientation(marker->data + 6, marker->data_length - 6) != 1)
            return 0; /* a second segment continues the first */
    }
    return 1;
}

/* --- opening ------------------------------------------------------------------------------------------------------ */

static void read_header(Decoder *decoder, const uint8_t *data, size_t length) {
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    Guard *guard = &decoder->guard;
    give_bytes(guard, data, length);
    jpeg_save_markers(jpeg, JPEG_APP0 + 1, 0xFFFF);
    jpeg_read_header(jpeg, TRUE);
    if ((int64_t)jpeg->image_width * jpeg->image_height > decoder->max_pixels)
        leave(guard, "too many pixels");
    if (jpeg->data_precision != 8)
        leave(guard, "not 8 bits a channel");
    if (jpeg->num_components != 1 && jpeg->num_components != 3)
        leave(guard, "neither gray nor three channels");
    if (jpeg->arith_code)
        leave(guard, "arithmetic coding");
    if (!upright(decoder))
        leave(guard, "EXIF turns it");
}

static void begin(Decoder *decoder, const Crop *crop, int width, int height) {
    const char *why = begin_canvas(decoder->canvas, crop, width, height);
    if (why)
        leave(&decoder->guard, why);
}

static void open_whole(Decoder *decoder, const uint8_t *data, size_t length, const Crop *crop) {
    read_header(decoder, data, length);
    begin(decoder, crop, (int)decoder->jpeg.image_width, (int)decoder->jpeg.image_height);
    decoder->left = decoder->top = 0;
}

/* Whether a window spares enough of what would be decoded without it to be worth cutting. */
static int is_worthwhile(const Tiles *tiles, const Window *window, int bottom) {
    int64_t rows = (bottom + tiles->mcu_height - 1) / tiles->mcu_height, all = rows * tiles->across;
    int64_t taken = (int64_t)(window->bottom - window->top) * (window->right - window->left);
    return 10 * taken < 9 * all;
}

/* Leaves, for the way without tiles, wherever anything is odd. */
static void open_window(Decoder *decoder, const Tiles *tiles, const Crop *crop) {
    if ((int64_t)tiles->width * tiles->height > decoder->max_pixels)
        leave(&decoder->guard, "too many pixels");
    begin(decoder, crop, tiles->width, tiles->height);
    const Pass *across = &decoder->canvas->across, *down = &decoder->canvas->down;
    Window window = window_around(tiles, across->from, down->from, across->to, down->to);
    if (!is_worthwhile(tiles, &window, down->to))
        leave(&decoder->guard, "nearly all of it is needed");
    decoder->window = roomy(decoder->window, &decoder->window_room, tiles->length + WINDOW_ROOM);
    size_t length = cut_window(tiles, &window, needed(&decoder->guard, decoder->window));
    if (!length)
        leave(&decoder->guard, "the table of tiles is wrong");
    read_header(decoder, decoder->window, length);
    decoder->left = window.left * tiles->interval * tiles->mcu_width;
    decoder->top = window.top * tiles->mcu_height;
    int width = (int)decoder->jpeg.image_width, height = (int)decoder->jpeg.image_height;
    if (width != window_width(tiles, &window) || height != window_height(tiles, &window))
        leave(&decoder->guard, "the window is wrong");
}

/* --- decoding ----------------------------------------------------------------------------------------------------- */

/* Limits decoding to the columns that the horizontal pass needs; returns the first that will be decoded. */
static int crop_columns(Decoder *decoder) {
    int width = (int)decoder->jpeg.output_width;
    int left = decoder->canvas->across.from - decoder->left - MARGIN;
    int right = decoder->canvas->across.to - decoder->left + MARGIN;
    if (right - left < NARROWEST)
        right = left + NARROWEST;
    if (right > width)
        right = width;
    if (right - left < NARROWEST)
        left = right - NARROWEST;
    if (left <= 0 && right == width)
        return 0;
    JDIMENSION offset = left < 0 ? 0 : (JDIMENSION)left, columns = (JDIMENSION)right - offset;
    jpeg_crop_scanline(&decoder->jpeg, &offset, &columns);
    return (int)offset;
}

/* Up to row `to` of the picture. */
static void skip_rows(Decoder *decoder, int to) {
    JDIMENSION count = (JDIMENSION)(to - decoder->top);
    if (count > 0 && jpeg_skip_scanlines(&decoder->jpeg, count) != count)
        leave(&decoder->guard, "rows cannot be skipped");
}

/* libjpeg gives but one or two rows at a time. */
static void fill_lines(Decoder *decoder, JSAMPROW *rows, int count) {
    for (int got; count > 0; rows += got, count -= got)
        if (!(got = (int)jpeg_read_scanlines(&decoder->jpeg, rows, (JDIMENSION)count)))
            leave(&decoder->guard, "rows are missing");
}

/* Rows are resized while they are in the caches. */
static void read_rows(Decoder *decoder, int offset) {
    size_t pixels = (size_t)decoder->jpeg.output_width + BEYOND;
    size_t pitch = (4 * pixels + APART - 1) / APART * APART;
    decoder->lines = roomy(decoder->lines, &decoder->room, ASKEW + LINES * pitch + OVER);
    uint8_t *bytes = (uint8_t *)needed(&decoder->guard, decoder->lines) + ASKEW;
    Lines lines = {bytes, pitch, 0, decoder->left + offset, 4};
    JSAMPROW rows[LINES];
    for (int i = 0; i < LINES; i++)
        rows[i] = bytes + i * pitch;
    for (int y = decoder->canvas->down.from; y < decoder->canvas->down.to; y += lines.count) {
        lines.count = decoder->canvas->down.to - y < LINES ? decoder->canvas->down.to - y : LINES;
        fill_lines(decoder, rows, lines.count);
        add_rows(decoder->canvas, &lines);
    }
}

static void start(Decoder *decoder, J_COLOR_SPACE space) {
    decoder->jpeg.out_color_space = space;
    decoder->jpeg.dct_method = JDCT_ISLOW;
    jpeg_start_decompress(&decoder->jpeg);
    if (lacks_scans(&decoder->jpeg))
        leave(&decoder->guard, "scans are missing");
}

static void decode(Decoder *decoder) {
    int offset = crop_columns(decoder);
    skip_rows(decoder, decoder->canvas->down.from);
    read_rows(decoder, offset);
}

/* All but the last row, which libjpeg would skip to without looking at any other. */
static void skim(Decoder *decoder) {
    skip_rows(decoder, decoder->canvas->down.to - 1);
}

/* For every picture: libjpeg would keep the tables of the one before for a picture that lacks its own. */
static void begin_anew(Decoder *decoder) {
    jpeg_destroy_decompress(&decoder->jpeg);
    create_guarded(&decoder->guard, &decoder->jpeg);
}

/* By way of the tiles, where there are any. */
static int attempt(Decoder *decoder, const uint8_t *data, size_t length, const Tiles *tiles, const Crop *crop,
                   void (*work)(Decoder *)) {
    if (setjmp(decoder->guard.escape)) {
        jpeg_abort_decompress(&decoder->jpeg); /* gives the picture's memory back */
        return -1;
    }
    begin_anew(decoder);
    if (tiles)
        open_window(decoder, tiles, crop);
    else
        open_whole(decoder, data, length, crop);
    start(decoder, JCS_EXT_RGBX);
    work(decoder);
    if (!tiles && work == decode && !jpeg_input_complete(&decoder->jpeg) && !ends_well(decoder))
        leave(&decoder->guard, "damaged or cut off below the crop");
    jpeg_abort_decompress(&decoder->jpeg);
    return 0;
}

static int attempt_all(Decoder *decoder, const uint8_t *data, size_t length, const Crop *crop,
                       void (*work)(Decoder *)) {
    Tiles tiles;
    if (find_tiles(&tiles, data, length) && attempt(decoder, data, length, &tiles, crop, work) == 0)
        return 0;
    return attempt(decoder, data, length, NULL, crop, work);
}

int crop_jpeg(Decoder *decoder, Canvas *canvas, const uint8_t *data, size_t length, const Crop *crop, char *reason) {
    decoder->canvas = canvas;
    decoder->guard.reason = reason;
    int status = attempt_all(decoder, data, length, crop, decode);
    if (status == 0)
        reason[0] = 0; /* the tiles may have left one */
    return status;
}

void skim_jpeg(Decoder *decoder, Canvas *canvas, const uint8_t *data, size_t length, const Crop *crop) {
    char reason[REASON_BYTES];
    decoder->canvas = canvas;
    decoder->guard.reason = reason;
    attempt_all(decoder, data, length, crop, skim);
}

static void read_whole(Decoder *decoder, Whole *whole) {
    size_t pitch = 3 * (size_t)whole->width;
    JSAMPROW rows[LINES];
    for (int y = 0; y < whole->height; y += LINES) {
        int count = whole->height - y < LINES ? whole->height - y : LINES;
        for (int i = 0; i < count; i++)
            rows[i] = whole->pixels + (size_t)(y + i) * pitch;
        fill_lines(decoder, rows, count);
    }
}

int decode_jpeg(Decoder *decoder, const uint8_t *data, size_t length, Whole *whole, char *reason) {
    whole->pixels = NULL;
    decoder->guard.reason = reason;
    if (setjmp(decoder->guard.escape)) {
        jpeg_abort_decompress(&decoder->jpeg);
        free(whole->pixels);
        return -1;
    }
    begin_anew(decoder);
    read_header(decoder, data, length);
    start(decoder, JCS_EXT_RGB);
    whole->width = (int)decoder->jpeg.output_width;
    whole->height = (int)decoder->jpeg.output_height;
    whole->pixels = needed(&decoder->guard, malloc(3 * (size_t)whole->width * (size_t)whole->height));
    read_whole(decoder, whole);
    if (!jpeg_input_complete(&decoder->jpeg) && !ends_well(decoder))
        leave(&decoder->guard, "damaged or cut off at the end");
    jpeg_abort_decompress(&decoder->jpeg);
    return 0;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

Decoder *new_decoder(void) {
    return calloc(1, sizeof(Decoder));
}

void limit_decoder(Decoder *decoder, int64_t max_pixels) {
    decoder->max_pixels = max_pixels;
}

/* libjpeg gives its own memory back after every picture. */
size_t decoder_bytes(const Decoder *decoder) {
    return decoder->room + decoder->window_room;
}

void free_decoder(Decoder *decoder) {
    jpeg_destroy_decompress(&decoder->jpeg);
    free(decoder->lines);
    free(decoder->window);
    free(decoder);
}
