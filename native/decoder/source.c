#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include "source.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* Returns the length of the requested part of `size` bytes, or -1 if they end before it. */
static int64_t compute_length(int64_t size, const Source *source) {
    if (source->offset < 0 || source->length < -1 || source->offset > size)
        return -1;
    int64_t remaining = size - source->offset;
    return source->length < 0 ? remaining : source->length <= remaining ? source->length : -1;
}

/* Sets the length of the range. A path whose range begins at 0 means the whole file, whose size must then match. */
static const char *check_file(Range *range, const Source *source) {
    struct stat status;
    if (fstat(range->descriptor, &status))
        return "its size is unknown";
    if (!S_ISREG(status.st_mode))
        return "not a file";
    int64_t size = status.st_size, length = compute_length(size, source);
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
        do /* without waiting if the path turns out to be a pipe */
            range->descriptor = open(source->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        while (range->descriptor < 0 && errno == EINTR);
        if (range->descriptor < 0)
            return "cannot be opened";
        range->must_close = 1;
    }
    const char *reason = check_file(range, source);
    if (reason)
        close_source(range);
    return reason;
}

const char *open_source(Range *range, const Source *source) {
    *range = (Range){.descriptor = -1, .offset = source->offset};
    if (source->kind != IN_MEMORY)
        return open_file(range, source);
    int64_t length = compute_length((int64_t)source->memory_bytes, source);
    if (length < 0)
        return "the memory ends before it";
    range->memory = source->memory + source->offset;
    range->length = (size_t)length;
    return NULL;
}

const char *read_source(const Range *range, size_t from, size_t count, uint8_t *out) {
    while (count > 0) {
        ssize_t got = pread(range->descriptor, out, count, (off_t)(range->offset + (int64_t)from));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return "cannot be read";
        if (got == 0)
            return "the file ends before it";
        from += (size_t)got, out += got, count -= (size_t)got;
    }
    return NULL;
}

void close_source(Range *range) {
    if (range->must_close)
        close(range->descriptor);
    range->must_close = 0;
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
