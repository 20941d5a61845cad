/* The sums of resize.c for processors with AVX-512 and its dot products of bytes (VNNI): the same numbers. */
#include "resize.h"

#ifdef HAVE_VNNI
#include <immintrin.h>
#include <string.h>

#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define INLINE VNNI static inline __attribute__((always_inline))

typedef struct {
    __m512i low, middle, high;
} Sums; /* sixteen sums, in digits of base 256 */

INLINE Sums start_sums(void) {
    return (Sums){_mm512_set1_epi32(ONE_HALF), _mm512_setzero_si512(), _mm512_setzero_si512()};
}

INLINE __m512i broadcast_digits(const int8_t *digits) {
    int32_t all;
    memcpy(&all, digits, sizeof all);
    return _mm512_set1_epi32(all);
}

/* Adds four bytes of each sum's inputs times their four weights. */
INLINE Sums add_products(Sums sums, __m512i inputs, const Quad *quad) {
    sums.low = _mm512_dpbusd_epi32(sums.low, inputs, broadcast_digits(quad->digits[0]));
    sums.middle = _mm512_dpbusd_epi32(sums.middle, inputs, broadcast_digits(quad->digits[1]));
    sums.high = _mm512_dpbusd_epi32(sums.high, inputs, broadcast_digits(quad->digits[2]));
    return sums;
}

INLINE __m512i round_sums(Sums sums) {
    __m512i upper = _mm512_add_epi32(sums.middle, _mm512_slli_epi32(sums.high, 8));
    return _mm512_srai_epi32(_mm512_add_epi32(sums.low, _mm512_slli_epi32(upper, 8)), PRECISION);
}

INLINE __m512i pack_bytes(__m512i a, __m512i b, __m512i c, __m512i d) {
    return _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
}

/* --- horizontally: one output of four rows at a time -------------------------------------------------------------- */

INLINE __m512i load_pixels(const uint8_t *const row[4], size_t at) {
    __m512i all = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(row[0] + at)));
    all = _mm512_inserti32x4(all, _mm_loadu_si128((const __m128i *)(row[1] + at)), 1);
    all = _mm512_inserti32x4(all, _mm_loadu_si128((const __m128i *)(row[2] + at)), 2);
    return _mm512_inserti32x4(all, _mm_loadu_si128((const __m128i *)(row[3] + at)), 3);
}

INLINE __m512i sum_output(const Quad *quad, size_t at, const uint8_t *const row[4], const int step, const int quads) {
    const char s = (char)step;
    const __m512i by_color = _mm512_broadcast_i32x4(_mm_setr_epi8(
        0, s, 2 * s, 3 * s, 1, s + 1, 2 * s + 1, 3 * s + 1, 2, s + 2, 2 * s + 2, 3 * s + 2, -1, -1, -1, -1));
    Sums sums = start_sums();
    for (int q = 0; q < quads; q++, at += 4 * (size_t)step)
        sums = add_products(sums, _mm512_shuffle_epi8(load_pixels(row, at), by_color), quad + q);
    return round_sums(sums);
}

INLINE void resize_four_rows(const Pass *pass, const uint8_t *const from[4], int offset, uint8_t *const to[4],
                      const int step, const int quads) {
    const __m512i without_x = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    /* Copies, since the compiler must assume that writing bytes may change `from` and `to`. */
    const uint8_t *const row[4] = {from[0], from[1], from[2], from[3]};
    uint8_t *a = to[0], *b = to[1], *c = to[2], *d = to[3];
    const Quad *weights = pass->quad_weights;
    const int *first = pass->first_input;
    int last = pass->outputs - 1;
    for (int output = 0; output <= last; output += 4, a += 12, b += 12, c += 12, d += 12) {
        __m512i sums[4];
        for (int i = 0; i < 4; i++) {
            int index = output + i < last ? output + i : last;
            size_t at = (size_t)step * (size_t)(first[index] - offset);
            sums[i] = sum_output(weights + (size_t)index * (size_t)quads, at, row, step, quads);
        }
        __m512i bytes = _mm512_shuffle_epi8(pack_bytes(sums[0], sums[1], sums[2], sums[3]), without_x);
        _mm_storeu_si128((__m128i *)a, _mm512_castsi512_si128(bytes));
        _mm_storeu_si128((__m128i *)b, _mm512_extracti32x4_epi32(bytes, 1));
        _mm_storeu_si128((__m128i *)c, _mm512_extracti32x4_epi32(bytes, 2));
        _mm_storeu_si128((__m128i *)d, _mm512_extracti32x4_epi32(bytes, 3));
    }
}

INLINE void dispatch_four_rows(const Pass *pass, const uint8_t *const from[4], int offset, uint8_t *const to[4],
                    const int step) {
    switch (pass->quads) { /* a constant number gives an unrolled loop */
        case 1: resize_four_rows(pass, from, offset, to, step, 1); break;
        case 2: resize_four_rows(pass, from, offset, to, step, 2); break;
        default: resize_four_rows(pass, from, offset, to, step, pass->quads);
    }
}

VNNI void resize_four_rows_vnni(const Pass *pass, const uint8_t *const from[4], int offset, int step,
                                uint8_t *const to[4]) {
    if (step == 3)
        dispatch_four_rows(pass, from, offset, to, 3);
    else
        dispatch_four_rows(pass, from, offset, to, 4);
}

/* --- vertically: 64 bytes at a time ------------------------------------------------------------------------------- */

INLINE void resize_block(const Quad *quad, const int n, const uint8_t *rows, size_t stride, uint8_t *out) {
    Sums sums[4] = {start_sums(), start_sums(), start_sums(), start_sums()};
    for (int q = 0; q < n; q++, rows += 4 * stride) {
        __m512i a = _mm512_loadu_si512(rows), b = _mm512_loadu_si512(rows + stride);
        __m512i c = _mm512_loadu_si512(rows + 2 * stride), d = _mm512_loadu_si512(rows + 3 * stride);
        __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
        sums[0] = add_products(sums[0], _mm512_unpacklo_epi16(ab, cd), quad + q);
        sums[1] = add_products(sums[1], _mm512_unpackhi_epi16(ab, cd), quad + q);
        ab = _mm512_unpackhi_epi8(a, b), cd = _mm512_unpackhi_epi8(c, d);
        sums[2] = add_products(sums[2], _mm512_unpacklo_epi16(ab, cd), quad + q);
        sums[3] = add_products(sums[3], _mm512_unpackhi_epi16(ab, cd), quad + q);
    }
    __m512i bytes = pack_bytes(round_sums(sums[0]), round_sums(sums[1]), round_sums(sums[2]), round_sums(sums[3]));
    _mm512_storeu_si512(out, bytes);
}

/* The last 64 bytes overlap those before them. */
INLINE void resize_column(const Quad *quad, const int n, const uint8_t *rows, size_t stride, int bytes, uint8_t *out) {
    for (int x = 0; x < bytes - 64; x += 64)
        resize_block(quad, n, rows + x, stride, out + x);
    resize_block(quad, n, rows + bytes - 64, stride, out + bytes - 64);
}

VNNI void resize_vertically_vnni(const Quad *quad, int n, const uint8_t *rows, size_t stride, int bytes, uint8_t *out) {
    switch (n) {
        case 1: resize_column(quad, 1, rows, stride, bytes, out); break;
        case 2: resize_column(quad, 2, rows, stride, bytes, out); break;
        default: resize_column(quad, n, rows, stride, bytes, out);
    }
}
#endif
