/* A guard over libjpeg: errors and warnings become a reason and a long jump, bytes come from memory. */
#ifndef PODSCALE_GUARD_H
#define PODSCALE_GUARD_H

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

#ifndef LIBJPEG_TURBO_VERSION
#error "libjpeg-turbo is needed: other libjpegs cannot skip rows"
#endif

typedef struct {
    struct jpeg_error_mgr errors;
    struct jpeg_source_mgr source;
    struct jpeg_progress_mgr progress;
    jmp_buf escape; /* set by whoever calls libjpeg */
    char *reason;   /* REASON_BYTES */
} Guard;

_Noreturn void leave(Guard *guard, const char *reason);
void *needed(Guard *guard, void *memory); /* leaves where it is NULL */

/* Makes a decompressor under the guard; the jump must have been set. */
void create_guarded(Guard *guard, struct jpeg_decompress_struct *jpeg);
void give_bytes(Guard *guard, const uint8_t *data, size_t length);

/* A progressive file that lacks scans is smoothed, with a view on blocks all around. */
int lacks_scans(const struct jpeg_decompress_struct *jpeg);

#endif
