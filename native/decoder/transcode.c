#include "transcode.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "crop.h"
#include "guard.h"
#include "limits.h"
#include "tiles.h"

enum {
    TARGET_INTERVAL = 6, /* the best number of MCUs per tile: fewer cost bytes, more are decoded without need */
    MAX_PART_BYTES = 0xFFFF - 2 - TILES_NAME_BYTES, /* of the table, in one marker */
};

typedef struct {
    Guard guard; /* the first member: libjpeg's client data points to both */
    struct jpeg_decompress_struct from;
    struct jpeg_compress_struct to;
    struct jpeg_destination_mgr destination;
    Output output;
} Transcoder;

/* --- growing output ----------------------------------------------------------------------------------------------- */

static int grow(Output *output, size_t capacity) {
    uint8_t *bytes = realloc(output->bytes, capacity);
    if (!bytes)
        return -1;
    output->bytes = bytes, output->capacity = capacity;
    return 0;
}

static int append(Output *output, const void *bytes, size_t count) {
    if (output->capacity - output->length < count && grow(output, 2 * (output->length + count)))
        return -1;
    memcpy(output->bytes + output->length, bytes, count);
    output->length += count;
    return 0;
}

static void set_destination(Transcoder *transcoder) {
    Output *output = &transcoder->output;
    transcoder->destination.next_output_byte = output->bytes + output->length;
    transcoder->destination.free_in_buffer = output->capacity - output->length;
}

static void start_output(j_compress_ptr jpeg) {
    set_destination((Transcoder *)jpeg->client_data);
}

/* Called when libjpeg has filled the output. */
static boolean on_full(j_compress_ptr jpeg) {
    Transcoder *transcoder = (Transcoder *)jpeg->client_data;
    transcoder->output.length = transcoder->output.capacity;
    if (grow(&transcoder->output, 2 * transcoder->output.capacity))
        reject(&transcoder->guard, "out of memory");
    set_destination(transcoder);
    return TRUE;
}

static void finish_output(j_compress_ptr jpeg) {
    Transcoder *transcoder = (Transcoder *)jpeg->client_data;
    transcoder->output.length = transcoder->output.capacity - transcoder->destination.free_in_buffer;
}

/* --- one baseline scan -------------------------------------------------------------------------------------------- */

/* Returns the divisor of the MCUs in a row that is nearest to TARGET_INTERVAL, on a logarithmic scale. */
static int choose_interval(const struct jpeg_decompress_struct *jpeg) {
    int side = jpeg->num_components == 1 ? DCTSIZE : DCTSIZE * jpeg->max_h_samp_factor, best = 1;
    int columns = ((int)jpeg->image_width + side - 1) / side;
    for (int divisor = 1; divisor <= columns; divisor++)
        if (columns % divisor == 0 &&
            fabs(log((double)divisor / TARGET_INTERVAL)) <= fabs(log((double)best / TARGET_INTERVAL)))
            best = divisor;
    return best;
}

static void read_header(Transcoder *transcoder, const uint8_t *data, size_t length, int64_t max_bytes) {
    struct jpeg_decompress_struct *jpeg = &transcoder->from;
    create_decompressor(&transcoder->guard, jpeg);
    set_input(&transcoder->guard, data, length);
    jpeg_save_markers(jpeg, JPEG_COM, 0xFFFF);
    for (int i = 0; i < 16; i++)
        jpeg_save_markers(jpeg, JPEG_APP0 + i, 0xFFFF);
    jpeg_read_header(jpeg, TRUE);
    if (exceeds_memory(jpeg->image_width, jpeg->image_height, max_bytes))
        reject(&transcoder->guard, "too much memory");
    if (jpeg->data_precision != 8)
        reject(&transcoder->guard, "not 8 bits a channel");
    if (jpeg->arith_code)
        reject(&transcoder->guard, "arithmetic coding");
}

/* Returns whether a marker is not copied: libjpeg writes JFIF's and Adobe's itself. */
static int is_redundant(const struct jpeg_compress_struct *jpeg, jpeg_saved_marker_ptr marker) {
    if (marker->marker == JPEG_APP0 && marker->data_length >= 5 && !memcmp(marker->data, "JFIF", 5))
        return jpeg->write_JFIF_header;
    if (marker->marker == JPEG_APP0 + 14 && marker->data_length >= 5 && !memcmp(marker->data, "Adobe", 5))
        return jpeg->write_Adobe_marker;
    return marker->marker == TILES_MARKER && marker->data_length >= TILES_NAME_BYTES &&
           !memcmp(marker->data, TILES_NAME, TILES_NAME_BYTES); /* an old table */
}

static void write_jpeg(Transcoder *transcoder, jvirt_barray_ptr *coefficients) {
    struct jpeg_compress_struct *jpeg = &transcoder->to;
    jpeg->dest = &transcoder->destination;
    jpeg_copy_critical_parameters(&transcoder->from, jpeg);
    jpeg->restart_interval = (unsigned)choose_interval(&transcoder->from);
    jpeg->optimize_coding = TRUE;
    jpeg_write_coefficients(jpeg, coefficients);
    for (jpeg_saved_marker_ptr marker = transcoder->from.marker_list; marker; marker = marker->next)
        if (!is_redundant(jpeg, marker))
            jpeg_write_marker(jpeg, marker->marker, marker->data, marker->data_length);
    jpeg_finish_compress(jpeg);
}

static int transcode(Transcoder *transcoder, const uint8_t *data, size_t length, int64_t max_bytes) {
    if (setjmp(transcoder->guard.escape))
        return -1;
    read_header(transcoder, data, length, max_bytes);
    transcoder->to.err = &transcoder->guard.errors;
    transcoder->to.client_data = transcoder;
    jpeg_create_compress(&transcoder->to);
    transcoder->destination = (struct jpeg_destination_mgr){
        .init_destination = start_output, .empty_output_buffer = on_full, .term_destination = finish_output};
    if (grow(&transcoder->output, length / 2 + 1))
        reject(&transcoder->guard, "out of memory");
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(&transcoder->from);
    if (has_missing_scans(&transcoder->from))
        reject(&transcoder->guard, "scans are missing");
    write_jpeg(transcoder, coefficients);
    return 0;
}

/* --- the table ---------------------------------------------------------------------------------------------------- */

static int append_number(Output *table, size_t number) {
    for (; number > 127; number >>= 7)
        if (append(table, &(uint8_t){(uint8_t)(number | 128)}, 1))
            return -1;
    return append(table, &(uint8_t){(uint8_t)number}, 1);
}

/* Appends the interval and the lengths of all segments; the coded data begins at `at`. */
static int append_segment_lengths(const Output *jpeg, size_t at, int interval, Output *table) {
    const uint8_t *from = jpeg->bytes + at, *end = jpeg->bytes + jpeg->length;
    if (append_number(table, (size_t)interval))
        return -1;
    for (const uint8_t *next = from; (next = memchr(next, 0xFF, (size_t)(end - next))) && end - next >= 2; next += 2) {
        if (next[1] == 0)
            continue;
        if (append_number(table, (size_t)(next - from)))
            return -1;
        from = next + 2;
    }
    return 0;
}

/* Finds the offsets of the decoder's tables and of the coded data in a file that libjpeg has just written. */
static void find_tables_and_scan(const Output *jpeg, size_t *tables, size_t *scan) {
    *tables = 0;
    for (size_t at = 2;; at += 2 + (size_t)(jpeg->bytes[at + 2] << 8 | jpeg->bytes[at + 3])) {
        int marker = jpeg->bytes[at + 1];
        if (!*tables && !(marker >= JPEG_APP0 && marker < JPEG_APP0 + 16) && marker != JPEG_COM)
            *tables = at;
        if (marker == 0xDA) {
            *scan = at + 2 + (size_t)(jpeg->bytes[at + 2] << 8 | jpeg->bytes[at + 3]);
            return;
        }
    }
}

static int append_table(Output *output, const Output *table) {
    for (size_t done = 0; done < table->length;) {
        size_t part = table->length - done < MAX_PART_BYTES ? table->length - done : MAX_PART_BYTES;
        size_t size = 2 + TILES_NAME_BYTES + part;
        const uint8_t head[4] = {0xFF, TILES_MARKER, (uint8_t)(size >> 8), (uint8_t)size};
        if (append(output, head, 4) || append(output, TILES_NAME, TILES_NAME_BYTES) ||
            append(output, table->bytes + done, part))
            return -1;
        done += part;
    }
    return 0;
}

static int insert_table(const Output *jpeg, int interval, Output *output) {
    Output table = {0};
    size_t tables, scan;
    find_tables_and_scan(jpeg, &tables, &scan);
    int status = append_segment_lengths(jpeg, scan, interval, &table) || append(output, jpeg->bytes, tables) ||
                 append_table(output, &table) || append(output, jpeg->bytes + tables, jpeg->length - tables);
    free(table.bytes);
    return status ? -1 : 0;
}

int tile_jpeg(const uint8_t *data, size_t length, int64_t max_bytes, Output *output, char *reason) {
    *output = (Output){0};
    Transcoder *transcoder = calloc(1, sizeof *transcoder);
    if (!transcoder) {
        snprintf(reason, REASON_BYTES, "out of memory");
        return -1;
    }
    transcoder->guard.reason = reason;
    int status = transcode(transcoder, data, length, max_bytes);
    if (status == 0 && insert_table(&transcoder->output, (int)transcoder->to.restart_interval, output)) {
        snprintf(reason, REASON_BYTES, "out of memory");
        free(output->bytes);
        *output = (Output){0};
        status = -1;
    }
    jpeg_destroy_compress(&transcoder->to);
    jpeg_destroy_decompress(&transcoder->from);
    free(transcoder->output.bytes);
    free(transcoder);
    return status;
}
