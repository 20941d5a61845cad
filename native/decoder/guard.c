#include "guard.h"

#include "crop.h"
#include "limits.h"

_Noreturn void reject(Guard *guard, const char *reason) {
    snprintf(guard->reason, REASON_BYTES, "%s", reason);
    longjmp(guard->escape, 1);
}

void *require_memory(Guard *guard, void *memory) {
    if (!memory)
        reject(guard, "out of memory");
    return memory;
}

static _Noreturn void on_error(j_common_ptr jpeg) {
    char message[JMSG_LENGTH_MAX];
    jpeg->err->format_message(jpeg, message);
    reject(jpeg->client_data, message);
}

/* After a warning, Pillow continues, with pixels that depend on how the file reached libjpeg. Such files are left to
 * it. */
static void on_message(j_common_ptr jpeg, int level) {
    if (level < 0)
        on_error(jpeg);
}

static void do_nothing(j_decompress_ptr jpeg) {
    (void)jpeg;
}

/* Called only when all bytes have been read. */
static boolean on_end(j_decompress_ptr jpeg) {
    reject(jpeg->client_data, "the file is truncated");
}

static void skip_bytes(j_decompress_ptr jpeg, long count) {
    struct jpeg_source_mgr *source = jpeg->src;
    size_t step = count < 0 ? 0 : (size_t)count;
    if (step > source->bytes_in_buffer)
        step = source->bytes_in_buffer;
    source->next_input_byte += step;
    source->bytes_in_buffer -= step;
}

static void on_progress(j_common_ptr common) {
    j_decompress_ptr jpeg = (j_decompress_ptr)common;
    if (exceeds_scans(jpeg->input_scan_number, jpeg->image_width, jpeg->image_height))
        reject(jpeg->client_data, "too many scans");
}

void create_decompressor(Guard *guard, struct jpeg_decompress_struct *jpeg) {
    jpeg->err = jpeg_std_error(&guard->errors);
    jpeg->client_data = guard;
    guard->errors.error_exit = on_error;
    guard->errors.emit_message = on_message;
    guard->source = (struct jpeg_source_mgr){
        .init_source = do_nothing,
        .fill_input_buffer = on_end,
        .skip_input_data = skip_bytes,
        .resync_to_restart = jpeg_resync_to_restart,
        .term_source = do_nothing,
    };
    jpeg_create_decompress(jpeg);
    jpeg->src = &guard->source;
    guard->progress.progress_monitor = on_progress;
    jpeg->progress = &guard->progress;
}

void set_input(Guard *guard, const uint8_t *data, size_t length) {
    guard->source.next_input_byte = data;
    guard->source.bytes_in_buffer = length;
}

int has_missing_scans(const struct jpeg_decompress_struct *jpeg) {
    if (!jpeg->progressive_mode || !jpeg->coef_bits)
        return 0;
    for (int c = 0; c < jpeg->num_components; c++)
        for (int k = 0; k < DCTSIZE2; k++)
            if (jpeg->coef_bits[c][k])
                return 1;
    return 0;
}
