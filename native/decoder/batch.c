#include "batch.h"

#include <pthread.h>
#include <string.h>

enum {
    IDLE = 64,            /* workers kept between batches */
    KEPT_BYTES = 1 << 25, /* no worker that a huge picture made larger is kept */
};

/* Batches are small, and need not fetch their memory from the kernel each time. Slots are taken and filled by exchange,
 * without a lock that a fork could leave locked. */
static _Atomic(Worker *) idle[IDLE];

static Worker *take_worker(int64_t max_pixels) {
    for (int i = 0; i < IDLE; i++) {
        Worker *worker = atomic_exchange(&idle[i], NULL);
        if (worker) {
            limit_pixels(worker, max_pixels);
            return worker;
        }
    }
    return new_worker(max_pixels);
}

static void put_back(Worker *worker) {
    for (int i = 0; i < IDLE && worker_bytes(worker) <= KEPT_BYTES; i++) {
        Worker *none = NULL;
        if (atomic_compare_exchange_strong(&idle[i], &none, worker))
            return;
    }
    free_worker(worker);
}

static void *work(void *argument) {
    Batch *batch = argument;
    Worker *worker = take_worker(batch->max_pixels);
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
        put_back(worker);
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
