#include "entropy.h"

#include <stdlib.h>
#include <string.h>

#if defined(__has_include) && !defined(NO_FAST_ENTROPY)
#if __has_include(<jpegint.h>)
#define HAS_FAST_ENTROPY
#endif
#endif

#ifndef HAS_FAST_ENTROPY

void replace_entropy_decoder(EntropyDecoder *decoder, Guard *guard, struct jpeg_decompress_struct *jpeg) {
    (void)decoder, (void)guard, (void)jpeg;
}

#else

#define JPEG_INTERNALS
#include <jpeglib.h>

#include <jpegint.h>

#define ALWAYS_INLINE __attribute__((always_inline))

enum { MAX_DC = 1 << 30 }; /* libjpeg refuses sums of differences that overflow */

enum {
    SIXTEEN_ZEROS = 0xF0, /* a symbol */
    END_OF_BLOCK = 64,    /* steps that lead past the last coefficient from anywhere */
};

/* Where a coefficient lies in its block. As in libjpeg, what a run leads past the end to replaces the last one. */
static const uint8_t NATURAL_ORDER[DCTSIZE2 + END_OF_BLOCK] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,
    14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60,
    61, 54, 47, 55, 62, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
};

static _Noreturn void give_up(EntropyDecoder *decoder) {
    decoder->has_given_up = 1;
    reject(decoder->guard, "its entropy-coded data is unusual");
}

/* --- tables ------------------------------------------------------------------------------------------------------- */

static Lookup describe_code(int length, int symbol, int is_dc) {
    int size = symbol & MAX_VALUE_BITS, steps = is_dc ? 0 : (symbol >> 4) + 1;
    if (!is_dc && !size && symbol != SIXTEEN_ZEROS)
        steps = END_OF_BLOCK;
    return (Lookup){(uint8_t)length, (uint8_t)size, (uint8_t)(length + size), (uint8_t)steps};
}

/* Fills in the lookups that begin with a code. */
static void add_code(CodeTable *table, int code, int length, Lookup lookup) {
    int spare = LOOKUP_BITS - length;
    for (int i = 0; i < 1 << spare; i++)
        table->lookups[(code << spare) + i] = lookup;
}

/* Builds a table whose codes libjpeg has checked (ITU-T T.81, annex C). */
static void build_table(CodeTable *table, const JHUFF_TBL *source, int is_dc) {
    if (table->is_built && !memcmp(table->source.bits, source->bits, sizeof source->bits) &&
        !memcmp(table->source.huffval, source->huffval, sizeof source->huffval))
        return;
    table->is_built = 1;
    table->is_dc = is_dc;
    table->source = *source;
    memset(table->lookups, 0, sizeof table->lookups);
    int code = 0, place = 0;
    for (int length = 1; length <= MAX_CODE_BITS; length++, code <<= 1) {
        table->offset[length] = place - code;
        for (int i = 0; i < source->bits[length]; i++, code++, place++)
            if (length <= LOOKUP_BITS)
                add_code(table, code, length, describe_code(length, source->huffval[place], is_dc));
        table->last_code[length] = source->bits[length] ? code - 1 : -1;
    }
}

/* --- bits --------------------------------------------------------------------------------------------------------- */

static inline uint64_t load_big_endian(const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* Reads byte by byte up to the next marker: a byte 0xFF of the data is followed by 0. */
static __attribute__((noinline)) void refill_slowly(EntropyDecoder *decoder) {
    BitReader *reader = &decoder->reader;
    if (reader->count < 0)
        give_up(decoder);
    while (reader->count <= 56 && reader->next < reader->end) {
        if (*reader->next == 0xFF && (reader->end - reader->next < 2 || reader->next[1] != 0))
            break;
        reader->bits |= (uint64_t)*reader->next << (56 - reader->count);
        reader->next += 1 + (*reader->next == 0xFF);
        reader->count += 8;
    }
}

/* Reads whole bytes until there are at least 56 bits, or all up to the next marker. `reader` is a copy of the
 * decoder's that the compiler keeps in registers: no other function may take its address. */
static inline ALWAYS_INLINE void refill(EntropyDecoder *decoder, BitReader *reader) {
    const uint64_t ones = 0x0101010101010101, highs = 0x8080808080808080;
    if (reader->count >= 0 && reader->end - reader->next >= 8) {
        uint64_t word = load_big_endian(reader->next);
        if (!((~word - ones) & word & highs)) { /* no byte is 0xFF */
            int bytes = (63 - reader->count) >> 3;
            reader->bits |= word >> reader->count;
            reader->next += bytes;
            reader->count += 8 * bytes;
            return;
        }
    }
    decoder->reader = *reader;
    refill_slowly(decoder);
    *reader = decoder->reader;
}

/* Finds a code of more than LOOKUP_BITS bits. */
static __attribute__((noinline)) Lookup find_long_code(EntropyDecoder *decoder, const CodeTable *table, uint64_t bits) {
    for (int length = LOOKUP_BITS + 1; length <= MAX_CODE_BITS; length++) {
        int32_t code = (int32_t)(bits >> (64 - length));
        if (code <= table->last_code[length])
            return describe_code(length, table->source.huffval[(code + table->offset[length]) & 0xFF], table->is_dc);
    }
    give_up(decoder);
}

/* Returns the next value and the steps that lead to it. A value of n bits is negative if the first of them is 0
 * (ITU-T T.81, table F.12). What the next value waits for is a lookup and a shift; the rest is done meanwhile. */
static inline ALWAYS_INLINE int32_t decode_value(EntropyDecoder *decoder, const CodeTable *table, BitReader *reader,
                                                 int *steps) {
    Lookup lookup = table->lookups[reader->bits >> (64 - LOOKUP_BITS)];
    if (__builtin_expect(!lookup.code_bits, 0))
        lookup = find_long_code(decoder, table, reader->bits);
    uint64_t value = reader->bits << lookup.code_bits;
    int32_t number = (int32_t)(value >> 1 >> (63 - lookup.value_bits));
    int32_t is_negative = ~(int32_t)((int64_t)value >> 63);
    reader->bits <<= lookup.all_bits;
    reader->count -= lookup.all_bits;
    *steps = lookup.steps;
    return number + (is_negative & (1 - (1 << lookup.value_bits)));
}

/* --- blocks ------------------------------------------------------------------------------------------------------- */

static inline ALWAYS_INLINE void decode_dc(EntropyDecoder *decoder, const CodeTable *table, BitReader *reader,
                                           int32_t *last) {
    int steps;
    refill(decoder, reader);
    *last += decode_value(decoder, table, reader, &steps);
    if (*last > MAX_DC || *last < -MAX_DC)
        give_up(decoder);
}

/* Decodes all coefficients of a block but the first; `block` is NULL if they are not needed. The end of a block and
 * sixteen zeros are stored as values of 0, where there is no other value. */
static inline ALWAYS_INLINE void decode_ac(EntropyDecoder *decoder, const CodeTable *table, BitReader *reader,
                                           JCOEF *block) {
    for (int k = 0, steps;;) {
        refill(decoder, reader);
        for (int i = 0; i < LOOKUPS_PER_REFILL; i++) {
            int32_t value = decode_value(decoder, table, reader, &steps);
            k += steps;
            if (block)
                block[NATURAL_ORDER[k]] = (JCOEF)value;
            if (k >= DCTSIZE2 - 1)
                return;
        }
    }
}

/* --- MCUs --------------------------------------------------------------------------------------------------------- */

/* Continues after a restart marker, which must follow at once. */
static void restart(EntropyDecoder *decoder, const struct jpeg_decompress_struct *jpeg) {
    BitReader *reader = &decoder->reader;
    if (reader->count >= 8 || reader->end - reader->next < 2 || reader->next[0] != 0xFF ||
        reader->next[1] != JPEG_RST0 + decoder->next_restart)
        give_up(decoder);
    reader->next += 2;
    reader->bits = 0;
    reader->count = 0;
    memset(decoder->last_dc, 0, sizeof decoder->last_dc);
    decoder->next_restart = (decoder->next_restart + 1) & 7;
    decoder->until_restart = jpeg->restart_interval;
}

/* libjpeg calls this for every MCU, without blocks for one that it skips. */
static boolean decode_mcu(j_decompress_ptr jpeg, JBLOCKROW *blocks) {
    EntropyDecoder *decoder = ((Guard *)jpeg->client_data)->entropy;
    if (jpeg->restart_interval && decoder->until_restart-- == 0) {
        restart(decoder, jpeg);
        decoder->until_restart--;
    }
    BitReader reader = decoder->reader;
    for (int i = 0; i < jpeg->blocks_in_MCU; i++) {
        int c = jpeg->MCU_membership[i];
        const jpeg_component_info *component = jpeg->cur_comp_info[c];
        const CodeTable *ac = &decoder->ac[component->ac_tbl_no];
        decode_dc(decoder, &decoder->dc[component->dc_tbl_no], &reader, &decoder->last_dc[c]);
        if (blocks) {
            blocks[i][0][0] = (JCOEF)decoder->last_dc[c];
            decode_ac(decoder, ac, &reader, blocks[i][0]);
        } else {
            decode_ac(decoder, ac, &reader, NULL);
        }
    }
    if (reader.count < 0)
        give_up(decoder);
    decoder->reader = reader;
    jpeg->src->next_input_byte = reader.next; /* where the end of the image is looked for */
    jpeg->src->bytes_in_buffer = (size_t)(reader.end - reader.next);
    return TRUE;
}

static int is_baseline(const struct jpeg_decompress_struct *jpeg) {
    return !jpeg->progressive_mode && !jpeg->arith_code && !jpeg_has_multiple_scans((j_decompress_ptr)jpeg) &&
           jpeg->Ss == 0 && jpeg->Se == DCTSIZE2 - 1 && jpeg->Ah == 0 && jpeg->Al == 0;
}

void replace_entropy_decoder(EntropyDecoder *decoder, Guard *guard, struct jpeg_decompress_struct *jpeg) {
    if (!is_baseline(jpeg) || jpeg->src->bytes_in_buffer == 0)
        return;
    for (int c = 0; c < jpeg->comps_in_scan; c++) {
        int dc = jpeg->cur_comp_info[c]->dc_tbl_no, ac = jpeg->cur_comp_info[c]->ac_tbl_no;
        build_table(&decoder->dc[dc], jpeg->dc_huff_tbl_ptrs[dc], 1);
        build_table(&decoder->ac[ac], jpeg->ac_huff_tbl_ptrs[ac], 0);
    }
    const uint8_t *next = jpeg->src->next_input_byte;
    decoder->guard = guard;
    decoder->reader = (BitReader){0, 0, next, next + jpeg->src->bytes_in_buffer};
    memset(decoder->last_dc, 0, sizeof decoder->last_dc);
    decoder->until_restart = jpeg->restart_interval;
    decoder->next_restart = 0;
    guard->entropy = decoder;
    jpeg->entropy->decode_mcu = decode_mcu;
}

#endif
