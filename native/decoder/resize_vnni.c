/* The sums of resize.c for processors with AVX-512 and its dot products of bytes (VNNI): the same numbers. */
#include "resize.h"

#ifdef HAVE_VNNI
#include <immintrin.h>
#include <string.h>

#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define INLINE VNNI static inline __attribute__((always_inline))

typedef struct {
    __m512i low, middle, high;
} Sums; /* sixteen sums, in digits of 256 */

INLINE Sums nothing_yet(void) {
    return (Sums){_mm512_set1_epi32(HALF), _mm512_setzero_si512(), _mm512_setzero_si512()};
}

INLINE __m512i four_times(const int8_t *digits) {
    int32_t all;
    memcpy(&all, digits, sizeof all);
    return _mm512_set1_epi32(all);
}

/* Four bytes of each sum's inputs times their four weights. */
INLINE Sums added(Sums sums, __m512i inputs, const Quad *quad) {
    sums.low = _mm512_dpbusd_epi32(sums.low, inputs, four_times(quad->digits[0]));
    sums.middle = _mm512_dpbusd_epi32(sums.middle, inputs, four_times(quad->digits[1]));
    sums.high = _mm512_dpbusd_epi32(sums.high, inputs, four_times(quad->digits[2]));
    return sums;
}

INLINE __m512i whole(Sums sums) {
    __m512i upper = _mm512_add_epi32(sums.middle, _mm512_slli_epi32(sums.high, 8));
    return _mm512_srai_epi32(_mm512_add_epi32(sums.low, _mm512_slli_epi32(upper, 8)), PRECISION);
}

INLINE __m512i packed(__m512i a, __m512i b, __m512i c, __m512i d) {
    return _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
}

/* --- across: one place of four rows at a time --------------------------------------------------------------------- */

INLINE __m512i four_pixels(const uint8_t *const row[4], size_t at) {
    __m512i all = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(row[0] + at)));
    all = _mm512_inserti32x4(all, _mm_loadu_si128((const __m128i *)(row[1] + at)), 1);
    all = _mm512_inserti32x4(all, _mm_loadu_si128((const __m128i *)(row[2] + at)), 2);
    return _mm512_inserti32x4(all, _mm_loadu_si128((const __m128i *)(row[3] + at)), 3);
}

INLINE __m512i place_sums(const Quad *quad, size_t at, const uint8_t *const row[4], const int step, const int quads) {
    const char s = (char)step;
    const __m512i by_colour = _mm512_broadcast_i32x4(_mm_setr_epi8(
        0, s, 2 * s, 3 * s, 1, s + 1, 2 * s + 1, 3 * s + 1, 2, s + 2, 2 * s + 2, 3 * s + 2, -1, -1, -1, -1));
    Sums sums = nothing_yet();
    for (int q = 0; q < quads; q++, at += 4 * (size_t)step)
        sums = added(sums, _mm512_shuffle_epi8(four_pixels(row, at), by_colour), quad + q);
    return whole(sums);
}

INLINE void four_rows(const Pass *pass, const uint8_t *const from[4], int offset, uint8_t *const to[4],
                      const int step, const int quads) {
    const __m512i without_x = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    /* Copies, since bytes that are written might otherwise be taken for these. */
    const uint8_t *const row[4] = {from[0], from[1], from[2], from[3]};
    uint8_t *a = to[0], *b = to[1], *c = to[2], *d = to[3];
    const Quad *weights = pass->quad;
    const int *first = pass->first;
    int last = pass->places - 1;
    for (int place = 0; place <= last; place += 4, a += 12, b += 12, c += 12, d += 12) {
        __m512i sums[4];
        for (int i = 0; i < 4; i++) {
            int slot = place + i < last ? place + i : last;
            size_t at = (size_t)step * (size_t)(first[slot] - offset);
            sums[i] = place_sums(weights + (size_t)slot * (size_t)quads, at, row, step, quads);
        }
        __m512i bytes = _mm512_shuffle_epi8(packed(sums[0], sums[1], sums[2], sums[3]), without_x);
        _mm_storeu_si128((__m128i *)a, _mm512_castsi512_si128(bytes));
        _mm_storeu_si128((__m128i *)b, _mm512_extracti32x4_epi32(bytes, 1));
        _mm_storeu_si128((__m128i *)c, _mm512_extracti32x4_epi32(bytes, 2));
        _mm_storeu_si128((__m128i *)d, _mm512_extracti32x4_epi32(bytes, 3));
    }
}

INLINE void rows_of(const Pass *pass, const uint8_t *const from[4], int offset, uint8_t *const to[4],
                    const int step) {
    switch (pass->quads) { /* a known number is an unrolled loop */
        case 1: four_rows(pass, from, offset, to, step, 1); break;
        case 2: four_rows(pass, from, offset, to, step, 2); break;
        default: four_rows(pass, from, offset, to, step, pass->quads);
    }
}

VNNI void four_rows_vnni(const Pass *pass, const uint8_t *const from[4], int offset, int step, uint8_t *const to[4]) {
    if (step == 3)
        rows_of(pass, from, offset, to, 3);
    else
        rows_of(pass, from, offset, to, 4);
}

/* --- down: 64 bytes at a time ------------------------------------------------------------------------------------- */

INLINE void column_at(const Quad *quad, const int n, const uint8_t *rows, size_t stride, uint8_t *out) {
    Sums sums[4] = {nothing_yet(), nothing_yet(), nothing_yet(), nothing_yet()};
    for (int q = 0; q < n; q++, rows += 4 * stride) {
        __m512i a = _mm512_loadu_si512(rows), b = _mm512_loadu_si512(rows + stride);
        __m512i c = _mm512_loadu_si512(rows + 2 * stride), d = _mm512_loadu_si512(rows + 3 * stride);
        __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
        sums[0] = added(sums[0], _mm512_unpacklo_epi16(ab, cd), quad + q);
        sums[1] = added(sums[1], _mm512_unpackhi_epi16(ab, cd), quad + q);
        ab = _mm512_unpackhi_epi8(a, b), cd = _mm512_unpackhi_epi8(c, d);
        sums[2] = added(sums[2], _mm512_unpacklo_epi16(ab, cd), quad + q);
        sums[3] = added(sums[3], _mm512_unpackhi_epi16(ab, cd), quad + q);
    }
    _mm512_storeu_si512(out, packed(whole(sums[0]), whole(sums[1]), whole(sums[2]), whole(sums[3])));
}

/* The last 64 bytes overlap those before them. */
INLINE void column_of(const Quad *quad, const int n, const uint8_t *rows, size_t stride, int bytes, uint8_t *out) {
    for (int x = 0; x < bytes - 64; x += 64)
        column_at(quad, n, rows + x, stride, out + x);
    column_at(quad, n, rows + bytes - 64, stride, out + bytes - 64);
}

VNNI void resize_column_vnni(const Quad *quad, int n, const uint8_t *rows, size_t stride, int bytes, uint8_t *out) {
    switch (n) {
        case 1: column_of(quad, 1, rows, stride, bytes, out); break;
        case 2: column_of(quad, 2, rows, stride, bytes, out); break;
        default: column_of(quad, n, rows, stride, bytes, out);
    }
}
#endif
