/* Sources: where the bytes of an image are, and reading them without Python. */
#ifndef PODSCALE_SOURCE_H
#define PODSCALE_SOURCE_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    enum { IN_MEMORY, AT_PATH, IN_OPEN_FILE } kind;
    const uint8_t *memory; /* memory_bytes of them */
    size_t memory_bytes;
    const char *path;
    int descriptor;
    int64_t offset, length; /* length -1: all from offset on */
} Source;

/* Bytes that can be read: all of them in memory, or parts of them from a file. */
typedef struct {
    const uint8_t *memory; /* NULL for a file */
    int descriptor, must_close;
    int64_t offset;
    size_t length;
} Range;

/* Each returns NULL, or the reason of a failure. After open_source has succeeded, close_source must be called. */
const char *open_source(Range *range, const Source *source);
const char *read_source(const Range *range, size_t from, size_t count, uint8_t *out); /* from a file */
void close_source(Range *range);

void advise_source(const Source *source); /* asks the kernel to read it ahead of time */

#endif
