#include "jpeg.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#include "resize.h"

#ifndef LIBJPEG_TURBO_VERSION
#error "libjpeg-turbo is needed: other libjpegs cannot skip rows"
#endif

enum {
    MARGIN = 2,     /* columns on either side that smooth chroma upsampling looks at */
    NARROWEST = 64, /* columns; libjpeg upsamples very narrow pictures in another way */
    LINES = 16,     /* rows asked of libjpeg at a time */
    /* Decoded rows begin 4 bytes off any larger power of 2: libjpeg writes aligned rows past the caches, straight to
     * memory, whence the resize would have to fetch them again. */
    ASKEW = 4,
    APART = 64, /* bytes between rows are a multiple of this */
    TALL = 100,     /* times as high as wide: some Pillow 12 resizes such pictures in another order */
};

struct Decoder {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    struct jpeg_source_mgr source;
    jmp_buf escape;
    char *reason;
    int64_t max_pixels;
    Pass across, down;
    uint8_t *lines, *rows; /* decoded RGBX, and what the horizontal pass made of it */
    size_t room_lines, room_rows;
};

/* --- leaving ------------------------------------------------------------------------------------------------------ */

static _Noreturn void leave(Decoder *decoder, const char *reason) {
    snprintf(decoder->reason, REASON_BYTES, "%s", reason);
    longjmp(decoder->escape, 1);
}

static _Noreturn void on_error(j_common_ptr jpeg) {
    Decoder *decoder = jpeg->client_data;
    char message[JMSG_LENGTH_MAX];
    jpeg->err->format_message(jpeg, message);
    leave(decoder, message);
}

/* Pillow carries on after a warning, with pixels that depend on how the file reached libjpeg: it shall decide. */
static void on_message(j_common_ptr jpeg, int level) {
    if (level < 0)
        on_error(jpeg);
}

static void *needed(Decoder *decoder, void *memory) {
    if (!memory)
        leave(decoder, "out of memory");
    return memory;
}

/* --- bytes -------------------------------------------------------------------------------------------------------- */

static void nothing(j_decompress_ptr jpeg) {
    (void)jpeg;
}

/* Called only when all bytes are used up. */
static boolean on_end(j_decompress_ptr jpeg) {
    leave(jpeg->client_data, "the file is truncated");
}

static void skip_bytes(j_decompress_ptr jpeg, long count) {
    struct jpeg_source_mgr *source = jpeg->src;
    size_t step = count < 0 ? 0 : (size_t)count;
    if (step > source->bytes_in_buffer)
        step = source->bytes_in_buffer;
    source->next_input_byte += step;
    source->bytes_in_buffer -= step;
}

static int is_restart(int marker) {
    return marker >= JPEG_RST0 && marker < JPEG_RST0 + 8;
}

/* Whether what has not been read runs on to the end-of-image marker without any other. Pillow reads it all, and fails
 * where it is cut off or where damage looks like a new header; other damage there cannot fail. */
static int ends_well(const Decoder *decoder) {
    int parked = decoder->jpeg.unread_marker;
    if (parked && !is_restart(parked))
        return parked == JPEG_EOI;
    const uint8_t *next = decoder->source.next_input_byte, *end = next + decoder->source.bytes_in_buffer;
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

/* --- decoding ----------------------------------------------------------------------------------------------------- */

static void read_header(Decoder *decoder, const Crop *crop) {
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    decoder->source.next_input_byte = crop->data;
    decoder->source.bytes_in_buffer = crop->length;
    jpeg_save_markers(jpeg, JPEG_APP0 + 1, 0xFFFF);
    jpeg_read_header(jpeg, TRUE);
    int64_t width = jpeg->image_width, height = jpeg->image_height;
    if (width * height > decoder->max_pixels)
        leave(decoder, "too many pixels");
    if (jpeg->data_precision != 8)
        leave(decoder, "not 8 bits a channel");
    if (jpeg->num_components != 1 && jpeg->num_components != 3)
        leave(decoder, "neither gray nor three channels");
    if (jpeg->arith_code)
        leave(decoder, "arithmetic coding");
    if (!upright(decoder))
        leave(decoder, "EXIF turns it");
    if (!crop->tall_first && height > TALL * width)
        leave(decoder, "very tall");
}

/* Pillow takes boxes in single precision. */
static void plan_resize(Decoder *decoder, const Crop *crop) {
    int width = (int)decoder->jpeg.image_width, height = (int)decoder->jpeg.image_height;
    const double *box = crop->box;
    if (!(box[0] >= 0 && box[1] >= 0 && box[2] <= width && box[3] <= height))
        leave(decoder, "the box leaves the picture");
    float left = (float)box[0], top = (float)box[1], right = (float)box[2], bottom = (float)box[3];
    if (!(left < right && top < bottom))
        leave(decoder, "the box is empty");
    if (plan_pass(&decoder->across, width, left, right, crop->size, crop->flip) ||
        plan_pass(&decoder->down, height, top, bottom, crop->size, 0))
        leave(decoder, "out of memory");
}

/* A progressive file that lacks scans is smoothed, with a view on blocks all around. */
static int lacks_scans(const struct jpeg_decompress_struct *jpeg) {
    if (!jpeg->progressive_mode || !jpeg->coef_bits)
        return 0;
    for (int c = 0; c < jpeg->num_components; c++)
        for (int k = 0; k < DCTSIZE2; k++)
            if (jpeg->coef_bits[c][k])
                return 1;
    return 0;
}

/* Limits decoding to the columns that the horizontal pass needs; returns the first that will be decoded. */
static int crop_columns(Decoder *decoder) {
    int width = (int)decoder->jpeg.output_width;
    int left = decoder->across.from - MARGIN, right = decoder->across.to + MARGIN;
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

static void skip_rows(Decoder *decoder) {
    JDIMENSION from = (JDIMENSION)decoder->down.from;
    if (from > 0 && jpeg_skip_scanlines(&decoder->jpeg, from) != from)
        leave(decoder, "rows cannot be skipped");
}

/* Reads the next rows, LINES or what is left of those needed, `pitch` apart; returns how many. */
static size_t read_rows(Decoder *decoder, uint8_t *rows, size_t pitch) {
    JSAMPROW lines[LINES];
    for (int i = 0; i < LINES; i++)
        lines[i] = rows + i * pitch;
    JDIMENSION left = (JDIMENSION)decoder->down.to - decoder->jpeg.output_scanline;
    return jpeg_read_scanlines(&decoder->jpeg, lines, left < LINES ? left : LINES);
}

static uint8_t *rows_of(Decoder *decoder, size_t bytes) {
    decoder->rows = roomy(decoder->rows, &decoder->room_rows, ASKEW + bytes + WASTE);
    return (uint8_t *)needed(decoder, decoder->rows) + ASKEW;
}

static uint8_t *lines_of(Decoder *decoder, size_t bytes) {
    decoder->lines = roomy(decoder->lines, &decoder->room_lines, ASKEW + bytes + WASTE);
    return (uint8_t *)needed(decoder, decoder->lines) + ASKEW;
}

/* The usual order: every row is resized as soon as it is decoded. */
static void across_then_down(Decoder *decoder, const Crop *crop, int offset, size_t pitch) {
    size_t stride = 3 * (size_t)crop->size;
    size_t count = (size_t)(decoder->down.to - decoder->down.from);
    uint8_t *rows = rows_of(decoder, (count + 1) * stride); /* one more, which is multiplied by zero */
    uint8_t *lines = lines_of(decoder, LINES * pitch);
    for (size_t done = 0; done < count;)
        for (size_t fresh = read_rows(decoder, lines, pitch), i = 0; i < fresh; i++, done++)
            resize_row(&decoder->across, lines + i * pitch, offset, rows + done * stride);
    for (int y = 0; y < crop->size; y++)
        resize_column(&decoder->down, y, rows, stride, (int)stride, crop->out + y * stride);
}

/* The order of tall pictures: all rows are decoded before the first is resized. */
static void down_then_across(Decoder *decoder, const Crop *crop, int offset, size_t pitch) {
    size_t stride = 3 * (size_t)crop->size;
    size_t count = (size_t)(decoder->down.to - decoder->down.from);
    uint8_t *rows = rows_of(decoder, (count + LINES) * pitch); /* room for pointers past the last row */
    uint8_t *line = lines_of(decoder, pitch + stride), *result = line + pitch;
    for (size_t done = 0; done < count;)
        done += read_rows(decoder, rows + done * pitch, pitch);
    for (int y = 0; y < crop->size; y++) {
        resize_column(&decoder->down, y, rows, pitch, (int)pitch, line);
        resize_row(&decoder->across, line, offset, result);
        memcpy(crop->out + y * stride, result, stride);
    }
}

/* Pillow 13's rule. The order shows in the last bit of a pixel, since the first pass rounds. */
static int down_comes_first(const Decoder *decoder, const Crop *crop) {
    int64_t width = decoder->jpeg.image_width, height = decoder->jpeg.image_height;
    return crop->tall_first && height > crop->size && height - crop->size > 2 * (width - crop->size);
}

static void crop_or_leave(Decoder *decoder, const Crop *crop) {
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    read_header(decoder, crop);
    plan_resize(decoder, crop);
    jpeg->out_color_space = JCS_EXT_RGBX;
    jpeg->dct_method = JDCT_ISLOW;
    jpeg_start_decompress(jpeg);
    if (lacks_scans(jpeg))
        leave(decoder, "scans are missing");
    int offset = crop_columns(decoder);
    size_t pixels = (size_t)jpeg->output_width + 1; /* one more, which is multiplied by zero */
    size_t pitch = (4 * pixels + APART - 1) / APART * APART;
    skip_rows(decoder);
    (down_comes_first(decoder, crop) ? down_then_across : across_then_down)(decoder, crop, offset, pitch);
    if (!jpeg_input_complete(jpeg) && !ends_well(decoder))
        leave(decoder, "damaged or cut off below the crop");
}

int crop_jpeg(Decoder *decoder, const Crop *crop, char *reason) {
    decoder->reason = reason;
    if (setjmp(decoder->escape)) {
        jpeg_abort_decompress(&decoder->jpeg);
        return -1;
    }
    crop_or_leave(decoder, crop);
    jpeg_abort_decompress(&decoder->jpeg);
    return 0;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

static int create(Decoder *decoder) {
    char reason[REASON_BYTES];
    decoder->reason = reason;
    if (setjmp(decoder->escape))
        return -1;
    jpeg_create_decompress(&decoder->jpeg);
    decoder->jpeg.src = &decoder->source;
    return 0;
}

Decoder *new_decoder(int64_t max_pixels) {
    Decoder *decoder = calloc(1, sizeof *decoder);
    if (!decoder)
        return NULL;
    decoder->max_pixels = max_pixels;
    decoder->jpeg.err = jpeg_std_error(&decoder->errors);
    decoder->jpeg.client_data = decoder;
    decoder->errors.error_exit = on_error;
    decoder->errors.emit_message = on_message;
    decoder->source = (struct jpeg_source_mgr){
        .init_source = nothing,
        .fill_input_buffer = on_end,
        .skip_input_data = skip_bytes,
        .resync_to_restart = jpeg_resync_to_restart,
        .term_source = nothing,
    };
    if (create(decoder) == 0)
        return decoder;
    free_decoder(decoder);
    return NULL;
}

void free_decoder(Decoder *decoder) {
    jpeg_destroy_decompress(&decoder->jpeg);
    free_pass(&decoder->across);
    free_pass(&decoder->down);
    free(decoder->lines);
    free(decoder->rows);
    free(decoder);
}
