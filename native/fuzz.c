/* Damages JPEG files in many ways and crops what is left of them; built with sanitizers by tests/native_asan.py.
 *
 *     fuzz COUNT FILE...
 *
 * Prints how many crops succeeded and how many were left, and a checksum of all pixels.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jpeg.h"

enum { MOST_BYTES = 1 << 20, MOST_PIXELS = 1 << 19, MOST_SIZE = 64, MOST_FILES = 256 };

static uint64_t state = 88172645463325252u;

static uint64_t draw(uint64_t below) { /* xorshift64 */
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 11) % below;
}

static void repeat(uint8_t *data, size_t length, size_t to, size_t from) {
    memmove(data + to, data + from, draw(length - (to > from ? to : from)));
}

/* Flips bits, overwrites bytes, plants markers, cuts off, repeats a piece: up to four of these. */
static size_t damage(uint8_t *data, size_t length) {
    for (uint64_t times = draw(5); times > 0 && length > 8; times--) {
        size_t region = draw(2) && length > 700 ? 700 : length, at = 2 + draw(region - 4);
        switch (draw(6)) {
            case 0: case 1: data[at] ^= (uint8_t)(1u << draw(8)); break;
            case 2: data[at] = (uint8_t)draw(256); break;
            case 3: data[at] = 0xFF, data[at + 1] = (uint8_t)(0xC0 + draw(64)); break;
            case 4: length = at + draw(length - at); break;
            default: repeat(data, length, at, draw(length)); break;
        }
    }
    return length;
}

static double somewhere(uint64_t limit) {
    return draw(4) ? (double)draw(limit) : (double)draw(1000 * limit) / 1000;
}

/* Small boxes more often than large ones: most lie in the picture, whatever its size is. */
static Crop any_crop(const uint8_t *data, size_t length, uint8_t *out) {
    Crop crop = {.data = data, .length = length, .flip = (int)draw(2), .tall_first = (int)draw(2), .out = out};
    crop.size = 1 + (int)draw(MOST_SIZE);
    for (int edge = 0; edge < 2; edge++) {
        crop.box[edge] = draw(2) ? somewhere(1u << draw(7)) : 0;
        crop.box[edge + 2] = crop.box[edge] + 0.01 + somewhere(1u << draw(7));
    }
    return crop;
}

static size_t read_file(const char *path, uint8_t *data) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return 0;
    size_t length = fread(data, 1, MOST_BYTES, file);
    fclose(file);
    return length;
}

int main(int count, char **words) {
    int files = count - 2;
    if (files < 1 || files > MOST_FILES)
        return 2;
    uint8_t *whole[MOST_FILES];
    size_t lengths[MOST_FILES];
    for (int i = 0; i < files; i++) {
        whole[i] = malloc(MOST_BYTES);
        if (!whole[i] || !(lengths[i] = read_file(words[i + 2], whole[i])))
            return 2;
    }
    Decoder *decoder = new_decoder(MOST_PIXELS);
    if (!decoder)
        return 2;
    long done = 0, left = 0;
    uint64_t checksum = 0;
    for (long rounds = atol(words[1]); rounds > 0; rounds--) {
        int which = (int)draw((uint64_t)files);
        uint8_t *copy = malloc(lengths[which]); /* exactly as long, so that reading on is seen */
        if (!copy)
            return 2;
        memcpy(copy, whole[which], lengths[which]);
        size_t length = damage(copy, lengths[which]);
        uint8_t *shrunk = realloc(copy, length);
        char reason[REASON_BYTES] = "";
        uint8_t *out = malloc(3 * MOST_SIZE * MOST_SIZE);
        Crop crop = any_crop(shrunk, length, out);
        size_t bytes = 3 * (size_t)crop.size * (size_t)crop.size;
        crop.out = out = realloc(out, bytes);
        if (crop_jpeg(decoder, &crop, reason) == 0) {
            done++;
            for (size_t i = 0; i < bytes; i++)
                checksum = checksum * 31 + out[i];
        } else {
            left++;
        }
        free(out);
        free(shrunk);
    }
    free_decoder(decoder);
    for (int i = 0; i < files; i++)
        free(whole[i]);
    printf("%ld cropped, %ld left, checksum %016" PRIx64 "\n", done, left, checksum);
    return 0;
}
