/* Damages pictures in many ways and crops or tiles what is left; built with sanitizers by tests/native_asan.py.
 *
 *     fuzz COUNT FILE...
 *
 * Prints how many crops, tilings and crops of pixels succeeded and how many were left, and a checksum of all results.
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

enum { MOST_BYTES = 1 << 20, MOST_PIXELS = 1 << 19, MOST_SIZE = 64, MOST_FILES = 256 };

static uint64_t state = 88172645463325252u, checksum;
static long done, left_over;

static uint64_t draw(uint64_t below) { /* xorshift64 */
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 11) % below;
}

static void count(int status, const uint8_t *bytes, size_t length) {
    if (status) {
        left_over++;
        return;
    }
    done++;
    for (size_t i = 0; i < length; i++)
        checksum = checksum * 31 + bytes[i];
}

/* --- damage ------------------------------------------------------------------------------------------------------- */

static void repeat(uint8_t *data, size_t length, size_t to, size_t from) {
    memmove(data + to, data + from, draw(length - (to > from ? to : from)));
}

/* Flips bits, overwrites bytes, plants markers, asks for a huge picture, cuts off, repeats a piece: up to four of
 * these, half of them near the start, where headers and tables of tiles lie. */
static size_t damage(uint8_t *data, size_t length) {
    for (uint64_t times = draw(5); times > 0 && length > 16; times--) {
        size_t region = draw(2) && length > 700 ? 700 : length, at = 2 + draw(region - 12);
        switch (draw(7)) {
            case 0: case 1: data[at] ^= (uint8_t)(1u << draw(8)); break;
            case 2: data[at] = (uint8_t)draw(256); break;
            case 3: data[at] = 0xFF, data[at + 1] = (uint8_t)(0xC0 + draw(64)); break;
            case 4: length = at + draw(length - at); break;
            case 5: memset(data + at, data[0] == 'P' ? '9' : 0xFF, 1 + draw(8)); break;
            default: repeat(data, length, at, draw(length)); break;
        }
    }
    return length;
}

/* --- one round ---------------------------------------------------------------------------------------------------- */

static double somewhere(uint64_t limit) {
    return draw(4) ? (double)draw(limit) : (double)draw(1000 * limit) / 1000;
}

/* Small boxes more often than large ones: most lie in the picture, whatever its size is. */
static Crop any_crop(void) {
    Crop crop = {.flip = (int)draw(2), .size = 1 + (int)draw(MOST_SIZE)};
    for (int edge = 0; edge < 2; edge++) {
        crop.box[edge] = draw(2) ? somewhere(1u << draw(7)) : 0;
        crop.box[edge + 2] = crop.box[edge] + 0.01 + somewhere(1u << draw(7));
    }
    crop.out = malloc(3 * (size_t)crop.size * (size_t)crop.size);
    return crop.out ? crop : (exit(2), crop);
}

/* In memory, exactly as long as it is, so that reading on is seen; or, one time in sixteen, in a file. */
static void crop_one(Worker *worker, const uint8_t *data, size_t length, int file) {
    char reason[REASON_BYTES];
    Stages stages = {0, 0, 0, 0};
    Crop crop = any_crop();
    Source source = {.kind = IN_MEMORY, .memory = data, .room = length, .length = -1};
    if (draw(16) == 0) {
        source.kind = IN_OPEN_FILE, source.descriptor = file;
        if (pwrite(file, data, length, 0) != (ssize_t)length || ftruncate(file, (off_t)length))
            exit(2);
    }
    if (draw(8) == 0)
        source.offset = (int64_t)draw(20) - 2, source.length = (int64_t)draw(2 * length + 1);
    int timed = draw(8) == 0;
    int status = timed ? time_stages(worker, &source, &crop, &stages, reason)
                       : crop_picture(worker, &source, &crop, reason);
    count(status, crop.out, 3 * (size_t)crop.size * (size_t)crop.size);
    free(crop.out);
}

static void tile_one(const uint8_t *data, size_t length) {
    char reason[REASON_BYTES];
    Output output;
    int status = tile_jpeg(data, length, MOST_PIXELS, &output, reason);
    count(status, output.bytes, output.length);
    free(output.bytes);
}

static void decode_one(const uint8_t *data, size_t length) {
    char reason[REASON_BYTES];
    Whole whole;
    Decoder *decoder = new_decoder();
    if (!decoder)
        exit(2);
    limit_decoder(decoder, MOST_PIXELS);
    int status = decode_jpeg(decoder, data, length, &whole, reason);
    count(status, status ? NULL : whole.pixels, status ? 0 : 3 * (size_t)whole.width * (size_t)whole.height);
    if (status == 0)
        free(whole.pixels);
    free_decoder(decoder);
}

/* Any bytes are pixels. */
static void crop_bytes(Worker *worker, const uint8_t *data, size_t length) {
    char reason[REASON_BYTES];
    Crop crop = any_crop();
    Source source = {.kind = IN_MEMORY, .memory = data, .room = length, .offset = (int64_t)draw(length + 3) - 1};
    int status = crop_pixels(worker, &source, (int)draw(90) - 1, (int)draw(90) - 1, &crop, reason);
    count(status, crop.out, 3 * (size_t)crop.size * (size_t)crop.size);
    free(crop.out);
}

static void one_round(Worker *worker, const uint8_t *whole, size_t length, int file) {
    uint8_t *copy = malloc(length);
    if (!copy)
        exit(2);
    memcpy(copy, whole, length);
    length = damage(copy, length);
    copy = realloc(copy, length);
    crop_one(worker, copy, length, file);
    if (draw(4) == 0)
        tile_one(copy, length);
    if (draw(4) == 0)
        decode_one(copy, length);
    if (draw(4) == 0)
        crop_bytes(worker, copy, length);
    free(copy);
}

static size_t read_file(const char *path, uint8_t *data) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return 0;
    size_t length = fread(data, 1, MOST_BYTES, file);
    fclose(file);
    return length;
}

int main(int words, char **word) {
    static uint8_t *whole[MOST_FILES];
    size_t lengths[MOST_FILES];
    int files = words - 2;
    if (files < 1 || files > MOST_FILES)
        return 2;
    for (int i = 0; i < files; i++) {
        whole[i] = malloc(MOST_BYTES);
        if (!whole[i] || !(lengths[i] = read_file(word[i + 2], whole[i])))
            return 2;
    }
    FILE *held = tmpfile();
    Worker *worker = new_worker(MOST_PIXELS);
    if (!worker || !held)
        return 2;
    for (long rounds = atol(word[1]); rounds > 0; rounds--) {
        int which = (int)draw((uint64_t)files);
        one_round(worker, whole[which], lengths[which], fileno(held));
    }
    free_worker(worker);
    fclose(held);
    for (int i = 0; i < files; i++)
        free(whole[i]);
    printf("%ld done, %ld left, checksum %016" PRIx64 "\n", done, left_over, checksum);
    return 0;
}
