/* Crops of pictures: reading, telling the format, decoding, resizing.
 *
 * What this takes on, it does exactly as the plain twin would. Everything else it leaves to its caller, with a reason.
 */
#ifndef PODSCALE_CROP_H
#define PODSCALE_CROP_H

#include "canvas.h"
#include "source.h"

enum { REASON_BYTES = 200 };

typedef struct Worker Worker; /* one for each thread; what it has allocated is used again for the next picture */

Worker *new_worker(int64_t max_pixels); /* NULL where memory ran out */
void free_worker(Worker *worker);
void limit_pixels(Worker *worker, int64_t max_pixels);
size_t worker_bytes(const Worker *worker); /* what it has allocated, about */

/* Each returns 0, or -1 and why not, in at most REASON_BYTES with the final zero; crop->out then holds anything.
 * The source holds an encoded picture, or packed RGB pixels, in memory. */
int crop_picture(Worker *worker, const Source *source, const Crop *crop, char *reason);
int crop_pixels(Worker *worker, const Source *source, int width, int height, const Crop *crop, char *reason);

/* As crop_picture, and adds the seconds that each stage took. Entropy decoding is done twice, to be timed alone. */
typedef struct {
    double read, entropy, transform, resize;
} Stages;
int time_stages(Worker *worker, const Source *source, const Crop *crop, Stages *stages, char *reason);

#endif
