#include "jpeg.h"

#include <stdlib.h>
#include <string.h>

#include "entropy.h"
#include "guard.h"
#include "limits.h"
#include "tiles.h"

enum {
    CHROMA_MARGIN = 2,  /* columns on either side that smooth chroma upsampling uses */
    MIN_COLUMNS = 64,   /* libjpeg upsamples very narrow images in another way */
    RGBX_BYTES = 4,     /* of a pixel that libjpeg decodes */
    ROWS_PER_READ = 16, /* requested from libjpeg at a time */
    /* Decoded rows begin 4 bytes after a larger power of 2: libjpeg writes aligned rows past the caches, straight to
     * memory, from which the resize would have to fetch them again. */
    MISALIGNMENT = 4,
    ROW_ALIGNMENT = 64, /* bytes between the starts of rows are a multiple of this */
};

struct Decoder {
    Guard guard;
    struct jpeg_decompress_struct jpeg;
    EntropyDecoder entropy;
    int64_t max_bytes;
    Canvas *canvas;
    int left, top;  /* position in the image of what libjpeg decodes */
    uint8_t *lines; /* decoded RGBX */
    size_t lines_capacity;
    uint8_t *window; /* the part of a tiled file that is decoded instead of the whole */
    size_t window_capacity;
};

/* --- end of the file ---------------------------------------------------------------------------------------------- */

static int is_restart(int marker) {
    return marker >= JPEG_RST0 && marker < JPEG_RST0 + 8;
}

/* Returns whether the unread bytes contain the end-of-image marker before any other marker. Pillow reads them all, and
 * fails if they are truncated or if damage looks like a new header; other damage there cannot fail. */
static int has_valid_end(const Decoder *decoder) {
    int marker = decoder->jpeg.unread_marker;
    if (marker && !is_restart(marker))
        return marker == JPEG_EOI;
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

static int64_t read_number(const Tiff *tiff, size_t at, int width) {
    if (at > tiff->length || tiff->length - at < (size_t)width)
        return -1;
    int64_t value = 0;
    for (int i = 0; i < width; i++)
        value = value << 8 | tiff->bytes[tiff->little ? at + width - 1 - i : at + i];
    return value;
}

/* Returns tag 274 of EXIF's first directory; 1 (upright) if it is absent or invalid. */
static int parse_orientation(const uint8_t *bytes, size_t length) {
    Tiff tiff = {bytes, length, length >= 4 && !memcmp(bytes, "II*\0", 4)};
    if (!tiff.little && (length < 4 || memcmp(bytes, "MM\0*", 4)))
        return 1;
    int64_t directory = read_number(&tiff, 4, 4);
    int64_t entries = directory < 0 ? 0 : read_number(&tiff, (size_t)directory, 2);
    for (int64_t i = 0; i < entries; i++) {
        size_t entry = (size_t)(directory + 2 + 12 * i);
        int64_t value = read_number(&tiff, entry + 8, 2);
        if (value < 0)
            return 1;
        if (read_number(&tiff, entry, 2) == 274 && read_number(&tiff, entry + 2, 2) == 3)
            return value >= 1 && value <= 8 ? (int)value : 1;
    }
    return 1;
}

static int is_upright(const Decoder *decoder) {
    int segments = 0;
    for (jpeg_saved_marker_ptr marker = decoder->jpeg.marker_list; marker; marker = marker->next) {
        if (marker->data_length < 6 || memcmp(marker->data, "Exif\0\0", 6))
            continue;
        if (segments++ || parse_orientation(marker->data + 6, marker->data_length - 6) != 1)
            return 0; /* a second segment continues the first */
    }
    return 1;
}

/* --- opening ------------------------------------------------------------------------------------------------------ */

static void read_header(Decoder *decoder, const uint8_t *data, size_t length) {
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    Guard *guard = &decoder->guard;
    set_input(guard, data, length);
    jpeg_save_markers(jpeg, JPEG_APP0 + 1, 0xFFFF);
    jpeg_read_header(jpeg, TRUE);
    if (exceeds_memory(jpeg->image_width, jpeg->image_height, decoder->max_bytes))
        reject(guard, "too much memory");
    if (jpeg->data_precision != 8)
        reject(guard, "not 8 bits a channel");
    if (jpeg->num_components != 1 && jpeg->num_components != 3)
        reject(guard, "neither gray nor three channels");
    if (jpeg->arith_code)
        reject(guard, "arithmetic coding");
    if (!is_upright(decoder))
        reject(guard, "EXIF turns it");
}

static void start_crop(Decoder *decoder, const Crop *crop, int width, int height) {
    const char *failure = start_canvas(decoder->canvas, crop, width, height, RGBX_BYTES);
    if (failure)
        reject(&decoder->guard, failure);
}

static void open_image(Decoder *decoder, const uint8_t *data, size_t length, const Crop *crop) {
    read_header(decoder, data, length);
    start_crop(decoder, crop, (int)decoder->jpeg.image_width, (int)decoder->jpeg.image_height);
    decoder->left = decoder->top = 0;
}

/* Returns whether a window saves enough decoding to be worth extracting. */
static int is_worthwhile(const Tiles *tiles, const Window *window, int bottom) {
    int64_t rows = (bottom + tiles->mcu_height - 1) / tiles->mcu_height, all_tiles = rows * tiles->columns;
    int64_t needed_tiles = (int64_t)(window->bottom - window->top) * (window->right - window->left);
    return 10 * needed_tiles < 9 * all_tiles;
}

/* Rejects anything unusual, which is then decoded without tiles. */
static void open_window(Decoder *decoder, const Tiles *tiles, const Crop *crop) {
    if (exceeds_memory(tiles->width, tiles->height, decoder->max_bytes))
        reject(&decoder->guard, "too much memory");
    start_crop(decoder, crop, tiles->width, tiles->height);
    const Pass *horizontal = &decoder->canvas->horizontal, *vertical = &decoder->canvas->vertical;
    Window window = compute_window(tiles, horizontal->from, vertical->from, horizontal->to, vertical->to);
    if (!is_worthwhile(tiles, &window, vertical->to))
        reject(&decoder->guard, "nearly all of it is needed");
    decoder->window = ensure_capacity(decoder->window, &decoder->window_capacity, tiles->length + WINDOW_EXTRA_BYTES);
    size_t length = extract_window(tiles, &window, require_memory(&decoder->guard, decoder->window));
    if (!length)
        reject(&decoder->guard, "the table of tiles is wrong");
    read_header(decoder, decoder->window, length);
    decoder->left = window.left * tiles->interval * tiles->mcu_width;
    decoder->top = window.top * tiles->mcu_height;
    int width = (int)decoder->jpeg.image_width, height = (int)decoder->jpeg.image_height;
    if (width != compute_window_width(tiles, &window) || height != compute_window_height(tiles, &window))
        reject(&decoder->guard, "the window is wrong");
}

/* --- decoding ----------------------------------------------------------------------------------------------------- */

/* Limits decoding to the columns that the horizontal pass needs; returns the first column that is decoded. */
static int crop_columns(Decoder *decoder) {
    int width = (int)decoder->jpeg.output_width;
    int left = decoder->canvas->horizontal.from - decoder->left - CHROMA_MARGIN;
    int right = decoder->canvas->horizontal.to - decoder->left + CHROMA_MARGIN;
    if (right - left < MIN_COLUMNS)
        right = left + MIN_COLUMNS;
    if (right > width)
        right = width;
    if (right - left < MIN_COLUMNS)
        left = right - MIN_COLUMNS;
    if (left <= 0 && right == width)
        return 0;
    JDIMENSION offset = left < 0 ? 0 : (JDIMENSION)left, columns = (JDIMENSION)right - offset;
    jpeg_crop_scanline(&decoder->jpeg, &offset, &columns);
    return (int)offset;
}

/* Skips to row `to` of the image. */
static void skip_rows(Decoder *decoder, int to) {
    JDIMENSION count = (JDIMENSION)(to - decoder->top);
    if (count > 0 && jpeg_skip_scanlines(&decoder->jpeg, count) != count)
        reject(&decoder->guard, "rows cannot be skipped");
}

/* libjpeg returns only one or two rows at a time. */
static void read_scanlines(Decoder *decoder, JSAMPROW *rows, int count) {
    for (int read; count > 0; rows += read, count -= read)
        if (!(read = (int)jpeg_read_scanlines(&decoder->jpeg, rows, (JDIMENSION)count)))
            reject(&decoder->guard, "rows are missing");
}

/* Resizes rows while they are in the caches. */
static void read_rows(Decoder *decoder, int offset) {
    size_t pixels = (size_t)decoder->jpeg.output_width + EXTRA_INPUTS;
    size_t pitch = (4 * pixels + ROW_ALIGNMENT - 1) / ROW_ALIGNMENT * ROW_ALIGNMENT;
    size_t size = MISALIGNMENT + ROWS_PER_READ * pitch + READ_SLACK;
    decoder->lines = ensure_capacity(decoder->lines, &decoder->lines_capacity, size);
    uint8_t *bytes = (uint8_t *)require_memory(&decoder->guard, decoder->lines) + MISALIGNMENT;
    Lines lines = {bytes, pitch, 0, decoder->left + offset, RGBX_BYTES};
    JSAMPROW rows[ROWS_PER_READ];
    for (int i = 0; i < ROWS_PER_READ; i++)
        rows[i] = bytes + i * pitch;
    const Pass *vertical = &decoder->canvas->vertical;
    for (int y = vertical->from; y < vertical->to; y += lines.count) {
        lines.count = vertical->to - y < ROWS_PER_READ ? vertical->to - y : ROWS_PER_READ;
        read_scanlines(decoder, rows, lines.count);
        add_rows(decoder->canvas, &lines);
    }
}

static void start_decompress(Decoder *decoder, J_COLOR_SPACE space) {
    decoder->jpeg.out_color_space = space;
    decoder->jpeg.dct_method = JDCT_ISLOW;
    jpeg_start_decompress(&decoder->jpeg);
    if (has_missing_scans(&decoder->jpeg))
        reject(&decoder->guard, "scans are missing");
    if (!decoder->entropy.has_given_up)
        replace_entropy_decoder(&decoder->entropy, &decoder->guard, &decoder->jpeg);
}

static void decode_rows(Decoder *decoder) {
    int offset = crop_columns(decoder);
    skip_rows(decoder, decoder->canvas->vertical.from);
    read_rows(decoder, offset);
}

/* Entropy-decodes all rows but the last: libjpeg would skip to the end of the image without decoding any. */
static void skip_to_last_row(Decoder *decoder) {
    skip_rows(decoder, decoder->canvas->vertical.to - 1);
}

/* Called for every image: libjpeg would use the tables of the previous image for one that lacks its own. */
static void reset_decompressor(Decoder *decoder) {
    jpeg_destroy_decompress(&decoder->jpeg);
    create_decompressor(&decoder->guard, &decoder->jpeg);
}

/* Processes the crop, from a window of the tiles if there are any. */
static int process_once(Decoder *decoder, const uint8_t *data, size_t length, const Tiles *tiles, const Crop *crop,
                   void (*process_rows)(Decoder *)) {
    if (setjmp(decoder->guard.escape)) {
        jpeg_abort_decompress(&decoder->jpeg); /* frees the image's memory */
        return -1;
    }
    reset_decompressor(decoder);
    if (tiles)
        open_window(decoder, tiles, crop);
    else
        open_image(decoder, data, length, crop);
    start_decompress(decoder, JCS_EXT_RGBX);
    process_rows(decoder);
    if (!tiles && process_rows == decode_rows && !jpeg_input_complete(&decoder->jpeg) && !has_valid_end(decoder))
        reject(&decoder->guard, "damaged or truncated below the crop");
    jpeg_abort_decompress(&decoder->jpeg);
    return 0;
}

static int attempt(Decoder *decoder, const uint8_t *data, size_t length, const Tiles *tiles, const Crop *crop,
                   void (*process_rows)(Decoder *)) {
    decoder->entropy.has_given_up = 0;
    int status = process_once(decoder, data, length, tiles, crop, process_rows);
    if (decoder->entropy.has_given_up) /* libjpeg knows what to do with it */
        status = process_once(decoder, data, length, tiles, crop, process_rows);
    return status;
}

static int attempt_with_tiles(Decoder *decoder, const uint8_t *data, size_t length, const Crop *crop,
                              void (*process_rows)(Decoder *)) {
    Tiles tiles;
    if (parse_tiles(&tiles, data, length) && attempt(decoder, data, length, &tiles, crop, process_rows) == 0)
        return 0;
    return attempt(decoder, data, length, NULL, crop, process_rows);
}

int crop_jpeg(Decoder *decoder, Canvas *canvas, const uint8_t *data, size_t length, const Crop *crop, char *reason) {
    decoder->canvas = canvas;
    decoder->guard.reason = reason;
    int status = attempt_with_tiles(decoder, data, length, crop, decode_rows);
    if (status == 0)
        reason[0] = 0; /* the attempt with tiles may have set one */
    return status;
}

void entropy_decode_jpeg(Decoder *decoder, Canvas *canvas, const uint8_t *data, size_t length, const Crop *crop) {
    char reason[REASON_BYTES];
    decoder->canvas = canvas;
    decoder->guard.reason = reason;
    attempt_with_tiles(decoder, data, length, crop, skip_to_last_row);
}

static void read_all_rows(Decoder *decoder, DecodedImage *image) {
    size_t pitch = 3 * (size_t)image->width;
    JSAMPROW rows[ROWS_PER_READ];
    for (int y = 0; y < image->height; y += ROWS_PER_READ) {
        int count = image->height - y < ROWS_PER_READ ? image->height - y : ROWS_PER_READ;
        for (int i = 0; i < count; i++)
            rows[i] = image->pixels + (size_t)(y + i) * pitch;
        read_scanlines(decoder, rows, count);
    }
}

static int decode_once(Decoder *decoder, const uint8_t *data, size_t length, DecodedImage *image, char *reason) {
    image->pixels = NULL;
    decoder->guard.reason = reason;
    if (setjmp(decoder->guard.escape)) {
        jpeg_abort_decompress(&decoder->jpeg);
        free(image->pixels);
        return -1;
    }
    reset_decompressor(decoder);
    read_header(decoder, data, length);
    start_decompress(decoder, JCS_EXT_RGB);
    image->width = (int)decoder->jpeg.output_width;
    image->height = (int)decoder->jpeg.output_height;
    image->pixels = require_memory(&decoder->guard, malloc(3 * (size_t)image->width * (size_t)image->height));
    read_all_rows(decoder, image);
    if (!jpeg_input_complete(&decoder->jpeg) && !has_valid_end(decoder))
        reject(&decoder->guard, "damaged or truncated at the end");
    jpeg_abort_decompress(&decoder->jpeg);
    return 0;
}

int decode_jpeg(Decoder *decoder, const uint8_t *data, size_t length, DecodedImage *image, char *reason) {
    decoder->entropy.has_given_up = 0;
    int status = decode_once(decoder, data, length, image, reason);
    if (decoder->entropy.has_given_up)
        status = decode_once(decoder, data, length, image, reason);
    return status;
}

/* --- lifetime ----------------------------------------------------------------------------------------------------- */

Decoder *create_decoder(void) {
    return calloc(1, sizeof(Decoder));
}

void set_decoder_limit(Decoder *decoder, int64_t max_bytes) {
    decoder->max_bytes = max_bytes;
}

/* libjpeg frees its own memory after every image. */
size_t count_decoder_bytes(const Decoder *decoder) {
    return decoder->lines_capacity + decoder->window_capacity;
}

void free_decoder(Decoder *decoder) {
    jpeg_destroy_decompress(&decoder->jpeg);
    free(decoder->lines);
    free(decoder->window);
    free(decoder);
}
