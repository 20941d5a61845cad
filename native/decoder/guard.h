/* A guard around libjpeg: errors and warnings become a reason and a long jump; bytes come from memory. */
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
    jmp_buf escape; /* set by the caller of libjpeg */
    char *reason;   /* REASON_BYTES */
    void *entropy;  /* the EntropyDecoder, where it takes libjpeg's place */
} Guard;

_Noreturn void reject(Guard *guard, const char *reason); /* jumps to guard->escape */
void *require_memory(Guard *guard, void *memory);        /* rejects if it is NULL */

/* Creates a decompressor with this guard; guard->escape must have been set. */
void create_decompressor(Guard *guard, struct jpeg_decompress_struct *jpeg);
void set_input(Guard *guard, const uint8_t *data, size_t length);

/* libjpeg smooths a progressive file of which scans are missing, using the blocks all around each block. */
int has_missing_scans(const struct jpeg_decompress_struct *jpeg);

#endif
