#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include "source.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* The length of the part that is asked for of `size` bytes, or -1 where they do not reach so far. */
static int64_t part_of(int64_t size, const Source *source) {
    if (source->offset < 0 || source->length < -1 || source->offset > size)
        return -1;
    int64_t left = size - source->offset;
    return source->length < 0 ? left : source->length <= left ? source->length : -1;
}

/* A path stands for the whole file where its range begins at 0; then no other size will do. */
static const char *measure(Range *range, const Source *source) {
    struct stat found;
    if (fstat(range->descriptor, &found))
        return "its size is unknown";
    if (!S_ISREG(found.st_mode))
        return "not a file";
    int64_t size = found.st_size, length = part_of(size, source);
    if (source->kind == AT_PATH && source->offset == 0 && source->length >= 0 && source->length != size)
        return "its size has changed";
    if (length < 0)
        return "the file ends before it";
    range->length = (size_t)length;
    return NULL;
}

static const char *open_file(Range *range, const Source *source) {
    if (source->kind == IN_OPEN_FILE) {
        range->descriptor = source->descriptor;
    } else {
        do /* not to wait where the path turns out to be a pipe */
            range->descriptor = open(source->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        while (range->descriptor < 0 && errno == EINTR);
        if (range->descriptor < 0)
            return "cannot be opened";
        range->opened = 1;
    }
    const char *why = measure(range, source);
    if (why)
        close_source(range);
    return why;
}

const char *open_source(Range *range, const Source *source) {
    *range = (Range){.descriptor = -1, .offset = source->offset};
    if (source->kind != IN_MEMORY)
        return open_file(range, source);
    int64_t length = part_of((int64_t)source->room, source);
    if (length < 0)
        return "the memory ends before it";
    range->memory = source->memory + source->offset;
    range->length = (size_t)length;
    return NULL;
}

const char *read_source(const Range *range, size_t from, size_t count, uint8_t *into) {
    while (count > 0) {
        ssize_t got = pread(range->descriptor, into, count, (off_t)(range->offset + (int64_t)from));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return "cannot be read";
        if (got == 0)
            return "the file ends before it";
        from += (size_t)got, into += got, count -= (size_t)got;
    }
    return NULL;
}

void close_source(Range *range) {
    if (range->opened)
        close(range->descriptor);
    range->opened = 0;
}

void advise_source(const Source *source) {
#ifdef POSIX_FADV_WILLNEED
    Range range;
    if (source->kind == IN_MEMORY || open_source(&range, source))
        return;
    posix_fadvise(range.descriptor, (off_t)range.offset, (off_t)range.length, POSIX_FADV_WILLNEED);
    close_source(&range);
#else
    (void)source;
#endif
}
