#include "batch.h"

#include <pthread.h>
#include <string.h>

enum {
    MAX_IDLE_WORKERS = 64,    /* kept between batches */
    MAX_IDLE_BYTES = 1 << 25, /* a worker that a huge image has made larger is freed */
};

/* Workers are kept because batches are small and should not get their memory from the kernel each time. Slots are taken
 * and filled by atomic exchange, without a lock that a fork could leave locked. */
static _Atomic(Worker *) idle_workers[MAX_IDLE_WORKERS];

static Worker *take_worker(int64_t max_bytes) {
    for (int i = 0; i < MAX_IDLE_WORKERS; i++) {
        Worker *worker = atomic_exchange(&idle_workers[i], NULL);
        if (worker) {
            set_max_bytes(worker, max_bytes);
            return worker;
        }
    }
    return create_worker(max_bytes);
}

static void return_worker(Worker *worker) {
    for (int i = 0; i < MAX_IDLE_WORKERS && count_worker_bytes(worker) <= MAX_IDLE_BYTES; i++) {
        Worker *empty = NULL;
        if (atomic_compare_exchange_strong(&idle_workers[i], &empty, worker))
            return;
    }
    free_worker(worker);
}

static void *run_tasks(void *argument) {
    Batch *batch = argument;
    Worker *worker = take_worker(batch->max_bytes);
    size_t i;
    while ((i = atomic_fetch_add(&batch->next, 1)) < batch->count) {
        CropTask *task = &batch->tasks[i];
        if (!worker)
            strcpy(task->reason, "out of memory");
        else if (task->width)
            crop_pixels(worker, &task->source, task->width, task->height, &task->crop, task->reason);
        else
            crop_image(worker, &task->source, &task->crop, task->reason);
    }
    if (worker)
        return_worker(worker);
    return NULL;
}

void run_batch(Batch *batch, int threads) {
    pthread_t others[MAX_THREADS];
    int started = 0;
    while (started < threads - 1 && pthread_create(&others[started], NULL, run_tasks, batch) == 0)
        started++;
    run_tasks(batch);
    while (started > 0)
        pthread_join(others[--started], NULL);
}
