/* A part of a JPEG file, resized: only the rows and columns that the result needs are decoded.
 *
 * Left to the caller: files with any flaw that libjpeg would warn of, inks, more than 8 bits, arithmetic coding,
 * pictures that EXIF turns, boxes that leave the picture.
 */
#ifndef PODSCALE_JPEG_H
#define PODSCALE_JPEG_H

#include "crop.h"

typedef struct Decoder Decoder;

Decoder *new_decoder(void); /* NULL where memory ran out; to be limited before use */
void limit_decoder(Decoder *decoder, int64_t max_pixels);
size_t decoder_bytes(const Decoder *decoder);
void free_decoder(Decoder *decoder);

/* As crop_picture. */
int crop_jpeg(Decoder *decoder, Canvas *canvas, const uint8_t *data, size_t length, const Crop *crop, char *reason);

/* The whole picture, uint8 [height, width, 3], to be freed. Returns as crop_picture. */
typedef struct {
    int width, height;
    uint8_t *pixels;
} Whole;
int decode_jpeg(Decoder *decoder, const uint8_t *data, size_t length, Whole *whole, char *reason);

/* Does nothing but the entropy decoding that the crop needs, of a picture that could be cropped. */
void skim_jpeg(Decoder *decoder, Canvas *canvas, const uint8_t *data, size_t length, const Crop *crop);

#endif
