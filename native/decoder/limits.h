/* Limits that are checked before memory is allocated; src/podscale/data/limits.py has the same numbers and says why. */
#ifndef PODSCALE_LIMITS_H
#define PODSCALE_LIMITS_H

#include <stdint.h>

enum {
    BYTES_PER_PIXEL = 12, /* that decoding takes at its peak; by the reference implementation, which may have to do it */
    FREE_SCANS = 16,
    MIN_SCAN_PIXELS = 1 << 16,
    MAX_SCAN_PIXELS = 1 << 30,
};

static inline int exceeds_memory(int64_t width, int64_t height, int64_t max_bytes) {
    return width * height > max_bytes / BYTES_PER_PIXEL;
}

/* Returns whether a JPEG demands too many passes over its pixels: a small file can demand any number of them. */
static inline int exceeds_scans(int64_t scans, int64_t width, int64_t height) {
    int64_t pixels = width * height > MIN_SCAN_PIXELS ? width * height : MIN_SCAN_PIXELS;
    return scans > FREE_SCANS && scans > MAX_SCAN_PIXELS / pixels;
}

#endif
