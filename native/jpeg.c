#include "jpeg.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

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
};

struct Decoder {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    struct jpeg_source_mgr source;
    jmp_buf escape;
    char *reason;
    int64_t max_pixels;
    Canvas *canvas;
    uint8_t *lines; /* decoded RGBX */
    size_t room;
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

static void read_header(Decoder *decoder, const uint8_t *data, size_t length) {
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    decoder->source.next_input_byte = data;
    decoder->source.bytes_in_buffer = length;
    jpeg_save_markers(jpeg, JPEG_APP0 + 1, 0xFFFF);
    jpeg_read_header(jpeg, TRUE);
    if ((int64_t)jpeg->image_width * jpeg->image_height > decoder->max_pixels)
        leave(decoder, "too many pixels");
    if (jpeg->data_precision != 8)
        leave(decoder, "not 8 bits a channel");
    if (jpeg->num_components != 1 && jpeg->num_components != 3)
        leave(decoder, "neither gray nor three channels");
    if (jpeg->arith_code)
        leave(decoder, "arithmetic coding");
    if (!upright(decoder))
        leave(decoder, "EXIF turns it");
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
    int left = decoder->canvas->across.from - MARGIN, right = decoder->canvas->across.to + MARGIN;
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
    JDIMENSION from = (JDIMENSION)decoder->canvas->down.from;
    if (from > 0 && jpeg_skip_scanlines(&decoder->jpeg, from) != from)
        leave(decoder, "rows cannot be skipped");
}

/* Every row is resized as soon as it is decoded. */
static void read_rows(Decoder *decoder, int offset) {
    size_t pixels = (size_t)decoder->jpeg.output_width + 1; /* one more, which is multiplied by zero */
    size_t pitch = (4 * pixels + APART - 1) / APART * APART;
    decoder->lines = roomy(decoder->lines, &decoder->room, ASKEW + LINES * pitch + OVER);
    Lines lines = {(uint8_t *)needed(decoder, decoder->lines) + ASKEW, pitch, 0, offset, 4};
    JSAMPROW rows[LINES];
    for (int i = 0; i < LINES; i++)
        rows[i] = decoder->lines + ASKEW + i * pitch;
    JDIMENSION left;
    while ((left = (JDIMENSION)decoder->canvas->down.to - decoder->jpeg.output_scanline) > 0) {
        lines.count = (int)jpeg_read_scanlines(&decoder->jpeg, rows, left < LINES ? left : LINES);
        if (lines.count == 0)
            leave(decoder, "rows are missing");
        add_rows(decoder->canvas, &lines);
    }
}

static void crop_or_leave(Decoder *decoder, const uint8_t *data, size_t length, const Crop *crop) {
    struct jpeg_decompress_struct *jpeg = &decoder->jpeg;
    read_header(decoder, data, length);
    const char *why = begin_canvas(decoder->canvas, crop, (int)jpeg->image_width, (int)jpeg->image_height);
    if (why)
        leave(decoder, why);
    jpeg->out_color_space = JCS_EXT_RGBX;
    jpeg->dct_method = JDCT_ISLOW;
    jpeg_start_decompress(jpeg);
    if (lacks_scans(jpeg))
        leave(decoder, "scans are missing");
    int offset = crop_columns(decoder);
    skip_rows(decoder);
    read_rows(decoder, offset);
    if (!jpeg_input_complete(jpeg) && !ends_well(decoder))
        leave(decoder, "damaged or cut off below the crop");
}

int crop_jpeg(Decoder *decoder, Canvas *canvas, const uint8_t *data, size_t length, const Crop *crop, char *reason) {
    decoder->canvas = canvas;
    decoder->reason = reason;
    if (setjmp(decoder->escape)) {
        jpeg_abort_decompress(&decoder->jpeg);
        return -1;
    }
    crop_or_leave(decoder, data, length, crop);
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
    free(decoder->lines);
    free(decoder);
}
