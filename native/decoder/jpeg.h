/* Crops of JPEG files: only the rows and columns that the result needs are decoded.
 *
 * Left to the caller: files with any flaw that libjpeg would warn of, CMYK, more than 8 bits, arithmetic coding, images
 * that EXIF rotates or flips, boxes that leave the image.
 */
#ifndef PODSCALE_JPEG_H
#define PODSCALE_JPEG_H

#include "crop.h"

typedef struct Decoder Decoder;

Decoder *create_decoder(void); /* NULL if memory ran out; call set_decoder_limit before use */
void set_decoder_limit(Decoder *decoder, int64_t max_bytes);
size_t count_decoder_bytes(const Decoder *decoder);
void free_decoder(Decoder *decoder);

/* Returns like crop_image. */
int crop_jpeg(Decoder *decoder, Canvas *canvas, const uint8_t *data, size_t length, const Crop *crop, char *reason);

/* Decodes the whole image, uint8 [height, width, 3]; the caller frees the pixels. Returns like crop_image. */
typedef struct {
    int width, height;
    uint8_t *pixels;
} DecodedImage;
int decode_jpeg(Decoder *decoder, const uint8_t *data, size_t length, DecodedImage *image, char *reason);

/* Does only the entropy decoding that the crop needs, of an image that crop_jpeg has cropped. */
void entropy_decode_jpeg(Decoder *decoder, Canvas *canvas, const uint8_t *data, size_t length, const Crop *crop);

#endif
