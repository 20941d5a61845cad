/* Sources: where the bytes of a picture lie, and reading them without Python. */
#ifndef PODSCALE_SOURCE_H
#define PODSCALE_SOURCE_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    enum { IN_MEMORY, AT_PATH, IN_OPEN_FILE } kind;
    const uint8_t *memory; /* `room` bytes */
    size_t room;
    const char *path;
    int descriptor;
    int64_t offset, length; /* length -1: all from offset on */
} Source;

/* Bytes that can be had: all of them in memory, or from a file piece by piece. */
typedef struct {
    const uint8_t *memory; /* NULL for a file */
    int descriptor, opened; /* opened: to be closed */
    int64_t offset;
    size_t length;
} Range;

/* Each returns NULL, or why not. After open_source succeeded, close_source must follow. */
const char *open_source(Range *range, const Source *source);
const char *read_source(const Range *range, size_t from, size_t count, uint8_t *into); /* of a file */
void close_source(Range *range);

void advise_source(const Source *source); /* has the kernel read it ahead of time, if it can */

#endif
