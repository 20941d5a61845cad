/* A batch of crops, in threads, without Python. */
#ifndef PODSCALE_BATCH_H
#define PODSCALE_BATCH_H

#include <stdatomic.h>

#include "crop.h"

enum { MAX_THREADS = 256 };

typedef struct {
    Source source;
    Crop crop;
    int width, height;         /* 0 for encoded pictures */
    char reason[REASON_BYTES]; /* empty where the crop succeeded */
} Job;

typedef struct {
    size_t count;
    Job *jobs;
    int64_t max_pixels;
    _Atomic size_t next; /* the first job that no thread has taken */
} Batch;

/* Works in this thread and, as far as they can be had, in others. */
void work_in_threads(Batch *batch, int threads);

#endif
