#include "batch.h"

#include <pthread.h>
#include <string.h>

static void *work(void *argument) {
    Batch *batch = argument;
    Worker *worker = new_worker(batch->max_pixels);
    size_t i;
    while ((i = atomic_fetch_add(&batch->next, 1)) < batch->count) {
        Job *job = &batch->jobs[i];
        if (!worker)
            strcpy(job->reason, "out of memory");
        else if (job->width)
            crop_pixels(worker, &job->source, job->width, job->height, &job->crop, job->reason);
        else
            crop_picture(worker, &job->source, &job->crop, job->reason);
    }
    if (worker)
        free_worker(worker);
    return NULL;
}

void work_in_threads(Batch *batch, int threads) {
    pthread_t others[MAX_THREADS];
    int started = 0;
    while (started < threads - 1 && pthread_create(&others[started], NULL, work, batch) == 0)
        started++;
    work(batch);
    while (started > 0)
        pthread_join(others[--started], NULL);
}
