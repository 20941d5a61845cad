/* The sums of resize.c in AVX2: the same numbers, many at a time. */
#include "resize.h"

#ifdef HAVE_AVX2
#include <immintrin.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2")))
#define INLINE AVX2 static inline __attribute__((always_inline))

INLINE __m256i twice(const void *weights) {
    int32_t both;
    memcpy(&both, weights, sizeof both);
    return _mm256_set1_epi32(both);
}

/* Upper and lower sums of eight values put together and rounded; `lower` began with one half. */
INLINE __m256i whole(__m256i upper, __m256i lower) {
    return _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(upper, HALVES), lower), PRECISION);
}

/* --- across: one place of four rows at a time, so that its weights are fetched once ------------------------------- */

typedef struct {
    __m256i upper, lower;
} Sums; /* red, green, blue and rubbish, of two rows */

INLINE Sums added(Sums sums, __m256i pixels, const Pair *pair) {
    sums.upper = _mm256_add_epi32(sums.upper, _mm256_madd_epi16(pixels, twice(pair->upper)));
    sums.lower = _mm256_add_epi32(sums.lower, _mm256_madd_epi16(pixels, twice(pair->lower)));
    return sums;
}

INLINE __m256i four_pixels(const uint8_t *a, const uint8_t *b) {
    __m128i first = _mm_loadu_si128((const __m128i *)a);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadu_si128((const __m128i *)b), 1);
}

INLINE __m256i two_pixels(const uint8_t *a, const uint8_t *b) {
    __m128i first = _mm_loadl_epi64((const __m128i *)a);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadl_epi64((const __m128i *)b), 1);
}

/* Pixels `at` and at + 1 as 16-bit numbers side by side: R0R1 G0G1 B0B1. */
INLINE __m256i side_by_side(const int step, const int at) {
    const char r = (char)(at * step), n = (char)(r + step);
    const char none = -1;
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(r, none, n, none, r + 1, none, n + 1, none, r + 2, none, n + 2,
                                                     none, none, none, none, none));
}

/* The sums of one place for rows a to d, into ab and cd. */
INLINE void place_sums(const Pair *pair, size_t at, const uint8_t *const row[4], const int step, const int pairs,
                       __m256i *ab, __m256i *cd) {
    const __m256i near = side_by_side(step, 0), far = side_by_side(step, 2);
    Sums first = {_mm256_setzero_si256(), _mm256_set1_epi32(HALF)}, second = first;
    int p = 0;
    for (; p + 2 <= pairs; p += 2, at += 4 * (size_t)step) {
        __m256i pixels = four_pixels(row[0] + at, row[1] + at), others = four_pixels(row[2] + at, row[3] + at);
        first = added(first, _mm256_shuffle_epi8(pixels, near), pair + p);
        second = added(second, _mm256_shuffle_epi8(others, near), pair + p);
        first = added(first, _mm256_shuffle_epi8(pixels, far), pair + p + 1);
        second = added(second, _mm256_shuffle_epi8(others, far), pair + p + 1);
    }
    if (p < pairs) {
        __m256i pixels = two_pixels(row[0] + at, row[1] + at), others = two_pixels(row[2] + at, row[3] + at);
        first = added(first, _mm256_shuffle_epi8(pixels, near), pair + p);
        second = added(second, _mm256_shuffle_epi8(others, near), pair + p);
    }
    *ab = whole(first.upper, first.lower);
    *cd = whole(second.upper, second.lower);
}

/* Four places of two rows, packed to RGB. */
INLINE void put(const __m256i sums[4], uint8_t *a, uint8_t *b) {
    const __m256i pack = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    __m256i words = _mm256_packs_epi32(sums[0], sums[1]), more = _mm256_packs_epi32(sums[2], sums[3]);
    __m256i bytes = _mm256_shuffle_epi8(_mm256_packus_epi16(words, more), pack);
    _mm_storeu_si128((__m128i *)a, _mm256_castsi256_si128(bytes));
    _mm_storeu_si128((__m128i *)b, _mm256_extracti128_si256(bytes, 1));
}

INLINE void four_rows(const Pass *pass, const uint8_t *const from[4], int offset, uint8_t *const to[4],
                      const int step, const int pairs) {
    /* Copies, since bytes that are written might otherwise be taken for these. */
    const uint8_t *const row[4] = {from[0], from[1], from[2], from[3]};
    uint8_t *a = to[0], *b = to[1], *c = to[2], *d = to[3];
    const Pair *weights = pass->weights;
    const int *first = pass->first;
    int last = pass->places - 1;
    for (int place = 0; place <= last; place += 4, a += 12, b += 12, c += 12, d += 12) {
        __m256i ab[4], cd[4];
        for (int i = 0; i < 4; i++) {
            int slot = place + i < last ? place + i : last;
            size_t at = (size_t)step * (size_t)(first[slot] - offset);
            place_sums(weights + (size_t)slot * (size_t)pairs, at, row, step, pairs, &ab[i], &cd[i]);
        }
        put(ab, a, b);
        put(cd, c, d);
    }
}

INLINE void rows_of(const Pass *pass, const uint8_t *const from[4], int offset, uint8_t *const to[4],
                    const int step) {
    switch (pass->pairs) { /* a known number of pairs is an unrolled loop */
        case 1: four_rows(pass, from, offset, to, step, 1); break;
        case 2: four_rows(pass, from, offset, to, step, 2); break;
        case 3: four_rows(pass, from, offset, to, step, 3); break;
        case 4: four_rows(pass, from, offset, to, step, 4); break;
        default: four_rows(pass, from, offset, to, step, pass->pairs);
    }
}

AVX2 void four_rows_avx2(const Pass *pass, const uint8_t *const from[4], int offset, int step, uint8_t *const to[4]) {
    if (step == 3)
        rows_of(pass, from, offset, to, 3);
    else
        rows_of(pass, from, offset, to, 4);
}

/* --- down: 32 bytes at a time ------------------------------------------------------------------------------------- */

INLINE void column_at(const Pair *pairs, const int n, const uint8_t *rows, size_t stride, uint8_t *out) {
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(HALF);
    __m256i upper[4] = {zero, zero, zero, zero}, lower[4] = {half, half, half, half};
    for (int p = 0; p < n; p++, rows += 2 * stride) {
        __m256i even = _mm256_loadu_si256((const __m256i *)rows);
        __m256i odd = _mm256_loadu_si256((const __m256i *)(rows + stride));
        __m256i low = _mm256_unpacklo_epi8(even, odd), high = _mm256_unpackhi_epi8(even, odd);
        __m256i pixels[4] = {_mm256_unpacklo_epi8(low, zero), _mm256_unpackhi_epi8(low, zero),
                             _mm256_unpacklo_epi8(high, zero), _mm256_unpackhi_epi8(high, zero)};
        __m256i heavy = twice(pairs[p].upper), light = twice(pairs[p].lower);
        for (int i = 0; i < 4; i++) {
            upper[i] = _mm256_add_epi32(upper[i], _mm256_madd_epi16(pixels[i], heavy));
            lower[i] = _mm256_add_epi32(lower[i], _mm256_madd_epi16(pixels[i], light));
        }
    }
    __m256i words = _mm256_packs_epi32(whole(upper[0], lower[0]), whole(upper[1], lower[1]));
    __m256i more = _mm256_packs_epi32(whole(upper[2], lower[2]), whole(upper[3], lower[3]));
    _mm256_storeu_si256((__m256i *)out, _mm256_packus_epi16(words, more));
}

/* The last 32 bytes overlap those before them. */
INLINE void column_of(const Pair *pairs, const int n, const uint8_t *rows, size_t stride, int bytes, uint8_t *out) {
    for (int x = 0; x < bytes - 32; x += 32)
        column_at(pairs, n, rows + x, stride, out + x);
    column_at(pairs, n, rows + bytes - 32, stride, out + bytes - 32);
}

AVX2 void resize_column_avx2(const Pair *pairs, int n, const uint8_t *rows, size_t stride, int bytes, uint8_t *out) {
    switch (n) {
        case 1: column_of(pairs, 1, rows, stride, bytes, out); break;
        case 2: column_of(pairs, 2, rows, stride, bytes, out); break;
        case 3: column_of(pairs, 3, rows, stride, bytes, out); break;
        default: column_of(pairs, n, rows, stride, bytes, out);
    }
}
#endif
