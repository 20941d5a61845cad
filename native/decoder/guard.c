#include "guard.h"

#include "crop.h"

enum { MOST_SCANS = 100 }; /* encoders make ten or so */

_Noreturn void leave(Guard *guard, const char *reason) {
    snprintf(guard->reason, REASON_BYTES, "%s", reason);
    longjmp(guard->escape, 1);
}

void *needed(Guard *guard, void *memory) {
    if (!memory)
        leave(guard, "out of memory");
    return memory;
}

static _Noreturn void on_error(j_common_ptr jpeg) {
    char message[JMSG_LENGTH_MAX];
    jpeg->err->format_message(jpeg, message);
    leave(jpeg->client_data, message);
}

/* Pillow carries on after a warning, with pixels that depend on how the file reached libjpeg: it shall decide. */
static void on_message(j_common_ptr jpeg, int level) {
    if (level < 0)
        on_error(jpeg);
}

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

/* A small file can ask for any number of passes over a large picture. */
static void on_progress(j_common_ptr jpeg) {
    if (((j_decompress_ptr)jpeg)->input_scan_number > MOST_SCANS)
        leave(jpeg->client_data, "too many scans");
}

void create_guarded(Guard *guard, struct jpeg_decompress_struct *jpeg) {
    jpeg->err = jpeg_std_error(&guard->errors);
    jpeg->client_data = guard;
    guard->errors.error_exit = on_error;
    guard->errors.emit_message = on_message;
    guard->source = (struct jpeg_source_mgr){
        .init_source = nothing,
        .fill_input_buffer = on_end,
        .skip_input_data = skip_bytes,
        .resync_to_restart = jpeg_resync_to_restart,
        .term_source = nothing,
    };
    jpeg_create_decompress(jpeg);
    jpeg->src = &guard->source;
    guard->progress.progress_monitor = on_progress;
    jpeg->progress = &guard->progress;
}

void give_bytes(Guard *guard, const uint8_t *data, size_t length) {
    guard->source.next_input_byte = data;
    guard->source.bytes_in_buffer = length;
}

int lacks_scans(const struct jpeg_decompress_struct *jpeg) {
    if (!jpeg->progressive_mode || !jpeg->coef_bits)
        return 0;
    for (int c = 0; c < jpeg->num_components; c++)
        for (int k = 0; k < DCTSIZE2; k++)
            if (jpeg->coef_bits[c][k])
                return 1;
    return 0;
}
