/* Crops of images: reading, detecting the format, decoding, resizing.
 *
 * The pixels are exactly those of the reference implementation (Pillow). Whatever cannot be done here is left to the
 * caller, with a reason.
 */
#ifndef PODSCALE_CROP_H
#define PODSCALE_CROP_H

#include "canvas.h"
#include "source.h"

enum { REASON_BYTES = 200 };

typedef struct Worker Worker; /* one for each thread; its buffers are reused for the next image */

Worker *create_worker(int64_t max_bytes); /* NULL if memory ran out */
void free_worker(Worker *worker);
void set_max_bytes(Worker *worker, int64_t max_bytes);
size_t count_worker_bytes(const Worker *worker); /* that it has allocated, about */

/* Each returns 0; or -1, and the reason in at most REASON_BYTES with the final zero, and crop->out is undefined.
 * The source is an encoded image; for crop_pixels it is packed RGB pixels in memory. */
int crop_image(Worker *worker, const Source *source, const Crop *crop, char *reason);
int crop_pixels(Worker *worker, const Source *source, int width, int height, const Crop *crop, char *reason);

/* Like crop_image, and adds the seconds that each stage took. Entropy decoding is done twice, to be timed alone. */
typedef struct {
    double read, entropy, transform, resize;
} Stages;
int time_stages(Worker *worker, const Source *source, const Crop *crop, Stages *stages, char *reason);

#endif
