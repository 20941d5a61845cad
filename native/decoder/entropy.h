/* Huffman decoding of baseline JPEGs in place of libjpeg's own, which looks at 8 bits at a time.
 *
 * One lookup of 11 bits gives nearly every code: how many zeros precede its value, and the bits of both. The
 * coefficients are those of libjpeg. Whatever is unusual (codes that do not exist, missing data, markers out of place)
 * ends the attempt, and the caller decodes the image again by libjpeg, which decides what is wrong with it.
 */
#ifndef PODSCALE_ENTROPY_H
#define PODSCALE_ENTROPY_H

#include "guard.h"

enum {
    LOOKUP_BITS = 11,
    MAX_TABLES = 4,     /* of each kind, in a JPEG */
    MAX_CODE_BITS = 16, /* of a Huffman code */
    MAX_VALUE_BITS = 15,
    LOOKUPS_PER_REFILL = 2, /* of at most 16 + 10 bits, where the format is obeyed; after a refill there are 56 */
};

/* The code that the next LOOKUP_BITS bits begin with; its bits are 0 if it is longer. */
typedef struct {
    uint8_t code_bits;
    uint8_t value_bits;
    uint8_t all_bits; /* the sum of both */
    uint8_t steps;    /* from the last coefficient to this one */
} Lookup;

typedef struct {
    int is_built, is_dc;
    JHUFF_TBL source; /* what it was built from: most files use the same tables */
    Lookup lookups[1 << LOOKUP_BITS];
    int32_t last_code[MAX_CODE_BITS + 2]; /* the largest code of each length; -1 if there is none */
    int32_t offset[MAX_CODE_BITS + 1];    /* code + offset is the place of its symbol */
} CodeTable;

/* Bits that have been read and not used, first bit highest, and the bytes that follow them. */
typedef struct {
    uint64_t bits;
    int count;
    const uint8_t *next, *end;
} BitReader;

typedef struct {
    Guard *guard;
    int has_given_up; /* the image must be decoded by libjpeg */
    BitReader reader;
    int32_t last_dc[MAX_COMPS_IN_SCAN];
    unsigned until_restart; /* MCUs before the next restart marker */
    int next_restart;       /* its number, 0 to 7 */
    CodeTable dc[MAX_TABLES], ac[MAX_TABLES];
} EntropyDecoder;

/* Takes the place of the entropy decoder of an image whose decompression has started. The guard belongs to the image.
 * Does nothing where libjpeg must decode it. */
void replace_entropy_decoder(EntropyDecoder *decoder, Guard *guard, struct jpeg_decompress_struct *jpeg);

#endif
