/* A batch of crops, in threads, without Python. */
#ifndef PODSCALE_BATCH_H
#define PODSCALE_BATCH_H

#include <stdatomic.h>

#include "crop.h"

enum { MAX_THREADS = 256 };

typedef struct {
    Source source;
    Crop crop;
    int width, height;         /* 0 for encoded images */
    char reason[REASON_BYTES]; /* empty where the crop succeeded */
} CropTask;

typedef struct {
    size_t count;
    CropTask *tasks;
    int64_t max_bytes;
    _Atomic size_t next; /* the first task that no thread has started */
} Batch;

/* Runs all tasks, in this thread and in up to `threads` - 1 others, as many as can be started. */
void run_batch(Batch *batch, int threads);

#endif
