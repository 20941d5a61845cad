/* Damages images in many ways and crops, tiles and decodes the result; tests/faults/native_asan.py builds it with
 * sanitizers.
 *
 *     fuzz COUNT FILE...
 *
 * Prints how many crops, tilings and crops of pixels succeeded and how many were rejected, and a checksum of all
 * results.
 */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "crop.h"
#include "jpeg.h"
#include "transcode.h"

enum { MAX_BYTES = 1 << 20, MAX_DECODED_BYTES = 12 << 19, MAX_CROP_SIZE = 64, MAX_FILES = 256 };

static uint64_t state = 88172645463325252u, checksum;
static long succeeded, rejected;

static uint64_t draw(uint64_t below) { /* xorshift64 */
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 11) % below;
}

static void count_result(int status, const uint8_t *bytes, size_t length) {
    if (status) {
        rejected++;
        return;
    }
    succeeded++;
    for (size_t i = 0; i < length; i++)
        checksum = checksum * 31 + bytes[i];
}

/* --- damage ------------------------------------------------------------------------------------------------------- */

static void repeat_part(uint8_t *data, size_t length, size_t to, size_t from) {
    memmove(data + to, data + from, draw(length - (to > from ? to : from)));
}

/* Flips bits, overwrites bytes, inserts markers, claims a huge image, truncates, repeats a part: up to four of these,
 * half of them near the start, where the headers and the table of tiles are. */
static size_t damage(uint8_t *data, size_t length) {
    for (uint64_t times = draw(5); times > 0 && length > 16; times--) {
        size_t region = draw(2) && length > 700 ? 700 : length, at = 2 + draw(region - 12);
        switch (draw(7)) {
            case 0: case 1: data[at] ^= (uint8_t)(1u << draw(8)); break;
            case 2: data[at] = (uint8_t)draw(256); break;
            case 3: data[at] = 0xFF, data[at + 1] = (uint8_t)(0xC0 + draw(64)); break;
            case 4: length = at + draw(length - at); break;
            case 5: memset(data + at, data[0] == 'P' ? '9' : 0xFF, 1 + draw(8)); break;
            default: repeat_part(data, length, at, draw(length)); break;
        }
    }
    return length;
}

/* --- one round ---------------------------------------------------------------------------------------------------- */

static double draw_position(uint64_t limit) {
    return draw(4) ? (double)draw(limit) : (double)draw(1000 * limit) / 1000;
}

/* Draws small boxes more often than large ones: most are inside the image, whatever its size is. */
static Crop draw_crop(void) {
    Crop crop = {.flip = (int)draw(2), .size = 1 + (int)draw(MAX_CROP_SIZE)};
    for (int edge = 0; edge < 2; edge++) {
        crop.box[edge] = draw(2) ? draw_position(1u << draw(7)) : 0;
        crop.box[edge + 2] = crop.box[edge] + 0.01 + draw_position(1u << draw(7));
    }
    crop.out = malloc(3 * (size_t)crop.size * (size_t)crop.size);
    return crop.out ? crop : (exit(2), crop);
}

/* The data is in memory of exactly its length, so that reading past its end is detected; or, one time in sixteen, in a
 * file. */
static void crop_data(Worker *worker, const uint8_t *data, size_t length, int file) {
    char reason[REASON_BYTES];
    Stages stages = {0, 0, 0, 0};
    Crop crop = draw_crop();
    Source source = {.kind = IN_MEMORY, .memory = data, .memory_bytes = length, .length = -1};
    if (draw(16) == 0) {
        source.kind = IN_OPEN_FILE, source.descriptor = file;
        if (pwrite(file, data, length, 0) != (ssize_t)length || ftruncate(file, (off_t)length))
            exit(2);
    }
    if (draw(8) == 0)
        source.offset = (int64_t)draw(20) - 2, source.length = (int64_t)draw(2 * length + 1);
    int is_timed = draw(8) == 0;
    int status = is_timed ? time_stages(worker, &source, &crop, &stages, reason)
                       : crop_image(worker, &source, &crop, reason);
    count_result(status, crop.out, 3 * (size_t)crop.size * (size_t)crop.size);
    free(crop.out);
}

static void tile_data(const uint8_t *data, size_t length) {
    char reason[REASON_BYTES];
    Output output;
    int status = tile_jpeg(data, length, MAX_DECODED_BYTES, &output, reason);
    count_result(status, output.bytes, output.length);
    free(output.bytes);
}

static void decode_data(const uint8_t *data, size_t length) {
    char reason[REASON_BYTES];
    DecodedImage image;
    Decoder *decoder = create_decoder();
    if (!decoder)
        exit(2);
    set_decoder_limit(decoder, MAX_DECODED_BYTES);
    int status = decode_jpeg(decoder, data, length, &image, reason);
    count_result(status, status ? NULL : image.pixels, status ? 0 : 3 * (size_t)image.width * (size_t)image.height);
    if (status == 0)
        free(image.pixels);
    free_decoder(decoder);
}

/* Takes any bytes as pixels. */
static void crop_bytes(Worker *worker, const uint8_t *data, size_t length) {
    char reason[REASON_BYTES];
    Crop crop = draw_crop();
    int64_t offset = (int64_t)draw(length + 3) - 1;
    Source source = {.kind = IN_MEMORY, .memory = data, .memory_bytes = length, .offset = offset};
    int status = crop_pixels(worker, &source, (int)draw(90) - 1, (int)draw(90) - 1, &crop, reason);
    count_result(status, crop.out, 3 * (size_t)crop.size * (size_t)crop.size);
    free(crop.out);
}

static void run_round(Worker *worker, const uint8_t *image, size_t length, int file) {
    uint8_t *copy = malloc(length);
    if (!copy)
        exit(2);
    memcpy(copy, image, length);
    length = damage(copy, length);
    copy = realloc(copy, length);
    crop_data(worker, copy, length, file);
    if (draw(4) == 0)
        tile_data(copy, length);
    if (draw(4) == 0)
        decode_data(copy, length);
    if (draw(4) == 0)
        crop_bytes(worker, copy, length);
    free(copy);
}

static size_t read_file(const char *path, uint8_t *data) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return 0;
    size_t length = fread(data, 1, MAX_BYTES, file);
    fclose(file);
    return length;
}

int main(int argc, char **argv) {
    static uint8_t *image[MAX_FILES];
    size_t lengths[MAX_FILES];
    int files = argc - 2;
    if (files < 1 || files > MAX_FILES)
        return 2;
    for (int i = 0; i < files; i++) {
        image[i] = malloc(MAX_BYTES);
        if (!image[i] || !(lengths[i] = read_file(argv[i + 2], image[i])))
            return 2;
    }
    FILE *temporary = tmpfile();
    Worker *worker = create_worker(MAX_DECODED_BYTES);
    if (!worker || !temporary)
        return 2;
    for (long rounds = atol(argv[1]); rounds > 0; rounds--) {
        int which = (int)draw((uint64_t)files);
        run_round(worker, image[which], lengths[which], fileno(temporary));
    }
    free_worker(worker);
    fclose(temporary);
    for (int i = 0; i < files; i++)
        free(image[i]);
    printf("%ld done, %ld left, checksum %016" PRIx64 "\n", succeeded, rejected, checksum);
    return 0;
}
