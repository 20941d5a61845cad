/* The sums of resize.c for processors with AVX-512, its dot products of bytes (VNNI) and its permutations of bytes
 * (VBMI): the same numbers. */
#include "resize.h"

#ifdef HAVE_AVX512
#include <immintrin.h>
#include <string.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")))
#define INLINE AVX512 static inline __attribute__((always_inline))

typedef struct {
    __m512i low, middle, high;
} Digits; /* sixteen numbers, in digits of base 256 */

INLINE Digits start_sums(void) {
    return (Digits){_mm512_set1_epi32(ONE_HALF), _mm512_setzero_si512(), _mm512_setzero_si512()};
}

/* Adds four bytes of each sum's inputs times their four weights. */
INLINE Digits add_products(Digits sums, __m512i inputs, Digits weights) {
    sums.low = _mm512_dpbusd_epi32(sums.low, inputs, weights.low);
    sums.middle = _mm512_dpbusd_epi32(sums.middle, inputs, weights.middle);
    sums.high = _mm512_dpbusd_epi32(sums.high, inputs, weights.high);
    return sums;
}

INLINE __m512i round_sums(Digits sums) {
    __m512i upper = _mm512_add_epi32(sums.middle, _mm512_slli_epi32(sums.high, 8));
    return _mm512_srai_epi32(_mm512_add_epi32(sums.low, _mm512_slli_epi32(upper, 8)), PRECISION);
}

/* --- horizontally: a block of output bytes of several rows at a time ---------------------------------------------- */

/* Gathers the next four inputs of each output byte; they lie in one vector, or in two if the block is wide. */
INLINE __m512i gather_inputs(const uint8_t *from, __m512i index, const int is_wide) {
    __m512i inputs = _mm512_loadu_si512(from);
    if (is_wide)
        return _mm512_permutex2var_epi8(inputs, index, _mm512_loadu_si512(from + VECTOR_BYTES));
    return _mm512_permutexvar_epi8(index, inputs);
}

INLINE void resize_rows(const Pass *pass, const uint8_t *const from[ROW_GROUP], int offset,
                        uint8_t *const to[ROW_GROUP], const int quads, const int is_wide) {
    const Blocks *blocks = &pass->blocks;
    const uint8_t *index = blocks->indices;
    const int8_t *digits = blocks->weights;
    size_t quad_bytes = 4 * (size_t)blocks->step;
    for (int block = 0; block < blocks->count; block++, index += VECTOR_BYTES) {
        size_t at = (size_t)blocks->step * (size_t)(blocks->first_input[block] - offset);
        __m512i gather = _mm512_load_si512(index);
        Digits sums[ROW_GROUP];
        for (int row = 0; row < ROW_GROUP; row++)
            sums[row] = start_sums();
        for (int q = 0; q < quads; q++, at += quad_bytes, digits += 3 * VECTOR_BYTES) {
            Digits weights = {_mm512_load_si512(digits), _mm512_load_si512(digits + VECTOR_BYTES),
                              _mm512_load_si512(digits + 2 * VECTOR_BYTES)};
            for (int row = 0; row < ROW_GROUP; row++)
                sums[row] = add_products(sums[row], gather_inputs(from[row] + at, gather, is_wide), weights);
        }
        for (int row = 0; row < ROW_GROUP; row++)
            _mm_storeu_si128((__m128i *)(to[row] + BLOCK_BYTES * block), _mm512_cvtusepi32_epi8(round_sums(sums[row])));
    }
}

AVX512 void resize_rows_avx512(const Pass *pass, const uint8_t *const from[ROW_GROUP], int offset,
                               uint8_t *const to[ROW_GROUP]) {
    if (pass->blocks.is_wide)
        resize_rows(pass, from, offset, to, pass->quads, 1);
    else if (pass->quads == 1) /* a constant number gives an unrolled loop */
        resize_rows(pass, from, offset, to, 1, 0);
    else if (pass->quads == 2)
        resize_rows(pass, from, offset, to, 2, 0);
    else
        resize_rows(pass, from, offset, to, pass->quads, 0);
}

/* --- vertically: 64 bytes at a time ------------------------------------------------------------------------------- */

INLINE __m512i broadcast_digits(const int8_t *digits) {
    int32_t all;
    memcpy(&all, digits, sizeof all);
    return _mm512_set1_epi32(all);
}

INLINE Digits broadcast_quad(const Quad *quad) {
    return (Digits){broadcast_digits(quad->digits[0]), broadcast_digits(quad->digits[1]),
                    broadcast_digits(quad->digits[2])};
}

INLINE __m512i pack_bytes(__m512i a, __m512i b, __m512i c, __m512i d) {
    return _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
}

INLINE void resize_block(const Quad *quad, const int n, const uint8_t *rows, size_t stride, uint8_t *out) {
    Digits sums[4] = {start_sums(), start_sums(), start_sums(), start_sums()};
    for (int q = 0; q < n; q++, rows += 4 * stride) {
        Digits weights = broadcast_quad(quad + q);
        __m512i a = _mm512_loadu_si512(rows), b = _mm512_loadu_si512(rows + stride);
        __m512i c = _mm512_loadu_si512(rows + 2 * stride), d = _mm512_loadu_si512(rows + 3 * stride);
        __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
        sums[0] = add_products(sums[0], _mm512_unpacklo_epi16(ab, cd), weights);
        sums[1] = add_products(sums[1], _mm512_unpackhi_epi16(ab, cd), weights);
        ab = _mm512_unpackhi_epi8(a, b), cd = _mm512_unpackhi_epi8(c, d);
        sums[2] = add_products(sums[2], _mm512_unpacklo_epi16(ab, cd), weights);
        sums[3] = add_products(sums[3], _mm512_unpackhi_epi16(ab, cd), weights);
    }
    __m512i bytes = pack_bytes(round_sums(sums[0]), round_sums(sums[1]), round_sums(sums[2]), round_sums(sums[3]));
    _mm512_storeu_si512(out, bytes);
}

/* The last 64 bytes overlap those before them. */
INLINE void resize_column(const Quad *quad, const int n, const uint8_t *rows, size_t stride, int bytes, uint8_t *out) {
    for (int x = 0; x < bytes - VECTOR_BYTES; x += VECTOR_BYTES)
        resize_block(quad, n, rows + x, stride, out + x);
    resize_block(quad, n, rows + bytes - VECTOR_BYTES, stride, out + bytes - VECTOR_BYTES);
}

AVX512 void resize_vertically_avx512(const Quad *quad, int n, const uint8_t *rows, size_t stride, int bytes,
                                     uint8_t *out) {
    switch (n) {
        case 1: resize_column(quad, 1, rows, stride, bytes, out); break;
        case 2: resize_column(quad, 2, rows, stride, bytes, out); break;
        default: resize_column(quad, n, rows, stride, bytes, out);
    }
}
#endif
