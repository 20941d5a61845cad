/* The sums of resize.c with AVX2: the same numbers, many at a time. */
#include "resize.h"

#ifdef HAVE_AVX2
#include <immintrin.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2")))
#define INLINE AVX2 static inline __attribute__((always_inline))

INLINE __m256i broadcast_pair(const void *weights) {
    int32_t both;
    memcpy(&both, weights, sizeof both);
    return _mm256_set1_epi32(both);
}

/* Combines and rounds the upper and lower sums of eight values; `lower` started with one half. */
INLINE __m256i round_sums(__m256i upper, __m256i lower) {
    return _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(upper, HALF_BITS), lower), PRECISION);
}

/* --- horizontally: one output of four rows at a time, so that its weights are loaded once ------------------------- */

typedef struct {
    __m256i upper, lower;
} Sums; /* red, green, blue and an unused value, of two rows */

INLINE Sums add_products(Sums sums, __m256i pixels, const Pair *pair) {
    sums.upper = _mm256_add_epi32(sums.upper, _mm256_madd_epi16(pixels, broadcast_pair(pair->upper)));
    sums.lower = _mm256_add_epi32(sums.lower, _mm256_madd_epi16(pixels, broadcast_pair(pair->lower)));
    return sums;
}

INLINE __m256i load_four_pixels(const uint8_t *a, const uint8_t *b) {
    __m128i first = _mm_loadu_si128((const __m128i *)a);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadu_si128((const __m128i *)b), 1);
}

INLINE __m256i load_two_pixels(const uint8_t *a, const uint8_t *b) {
    __m128i first = _mm_loadl_epi64((const __m128i *)a);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadl_epi64((const __m128i *)b), 1);
}

/* The shuffle that puts pixels `at` and at + 1 side by side as 16-bit numbers: R0R1 G0G1 B0B1. */
INLINE __m256i make_pair_shuffle(const int step, const int at) {
    const char r = (char)(at * step), n = (char)(r + step);
    const char none = -1;
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(r, none, n, none, r + 1, none, n + 1, none, r + 2, none, n + 2,
                                                     none, none, none, none, none));
}

/* Computes the sums of one output for rows a to d, into ab and cd. */
INLINE void sum_output(const Pair *pair, size_t at, const uint8_t *const row[4], const int step, const int pairs,
                       __m256i *ab, __m256i *cd) {
    const __m256i near = make_pair_shuffle(step, 0), far = make_pair_shuffle(step, 2);
    Sums first = {_mm256_setzero_si256(), _mm256_set1_epi32(ONE_HALF)}, second = first;
    int p = 0;
    for (; p + 2 <= pairs; p += 2, at += 4 * (size_t)step) {
        __m256i pixels = load_four_pixels(row[0] + at, row[1] + at);
        __m256i others = load_four_pixels(row[2] + at, row[3] + at);
        first = add_products(first, _mm256_shuffle_epi8(pixels, near), pair + p);
        second = add_products(second, _mm256_shuffle_epi8(others, near), pair + p);
        first = add_products(first, _mm256_shuffle_epi8(pixels, far), pair + p + 1);
        second = add_products(second, _mm256_shuffle_epi8(others, far), pair + p + 1);
    }
    if (p < pairs) {
        __m256i pixels = load_two_pixels(row[0] + at, row[1] + at), others = load_two_pixels(row[2] + at, row[3] + at);
        first = add_products(first, _mm256_shuffle_epi8(pixels, near), pair + p);
        second = add_products(second, _mm256_shuffle_epi8(others, near), pair + p);
    }
    *ab = round_sums(first.upper, first.lower);
    *cd = round_sums(second.upper, second.lower);
}

/* Stores four outputs of two rows, packed to RGB. */
INLINE void store_outputs(const __m256i sums[4], uint8_t *a, uint8_t *b) {
    const __m256i pack = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    __m256i low_words = _mm256_packs_epi32(sums[0], sums[1]), high_words = _mm256_packs_epi32(sums[2], sums[3]);
    __m256i bytes = _mm256_shuffle_epi8(_mm256_packus_epi16(low_words, high_words), pack);
    _mm_storeu_si128((__m128i *)a, _mm256_castsi256_si128(bytes));
    _mm_storeu_si128((__m128i *)b, _mm256_extracti128_si256(bytes, 1));
}

INLINE void resize_four_rows(const Pass *pass, const uint8_t *const from[4], int offset, uint8_t *const to[4],
                      const int step, const int pairs) {
    /* Copies, since the compiler must assume that writing bytes may change `from` and `to`. */
    const uint8_t *const row[4] = {from[0], from[1], from[2], from[3]};
    uint8_t *a = to[0], *b = to[1], *c = to[2], *d = to[3];
    const Pair *weights = pass->pair_weights;
    const int *first = pass->first_input;
    int last = pass->outputs - 1;
    for (int output = 0; output <= last; output += 4, a += 12, b += 12, c += 12, d += 12) {
        __m256i ab[4], cd[4];
        for (int i = 0; i < 4; i++) {
            int index = output + i < last ? output + i : last;
            size_t at = (size_t)step * (size_t)(first[index] - offset);
            sum_output(weights + (size_t)index * (size_t)pairs, at, row, step, pairs, &ab[i], &cd[i]);
        }
        store_outputs(ab, a, b);
        store_outputs(cd, c, d);
    }
}

INLINE void dispatch_four_rows(const Pass *pass, const uint8_t *const from[4], int offset, uint8_t *const to[4],
                    const int step) {
    switch (pass->pairs) { /* a constant number of pairs gives an unrolled loop */
        case 1: resize_four_rows(pass, from, offset, to, step, 1); break;
        case 2: resize_four_rows(pass, from, offset, to, step, 2); break;
        case 3: resize_four_rows(pass, from, offset, to, step, 3); break;
        case 4: resize_four_rows(pass, from, offset, to, step, 4); break;
        default: resize_four_rows(pass, from, offset, to, step, pass->pairs);
    }
}

AVX2 void resize_rows_avx2(const Pass *pass, const uint8_t *const from[4], int offset, int step,
                                uint8_t *const to[4]) {
    if (step == 3)
        dispatch_four_rows(pass, from, offset, to, 3);
    else
        dispatch_four_rows(pass, from, offset, to, 4);
}

/* --- vertically: 32 bytes at a time ------------------------------------------------------------------------------- */

INLINE void resize_block(const Pair *pairs, const int n, const uint8_t *rows, size_t stride, uint8_t *out) {
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(ONE_HALF);
    __m256i upper[4] = {zero, zero, zero, zero}, lower[4] = {half, half, half, half};
    for (int p = 0; p < n; p++, rows += 2 * stride) {
        __m256i even = _mm256_loadu_si256((const __m256i *)rows);
        __m256i odd = _mm256_loadu_si256((const __m256i *)(rows + stride));
        __m256i low = _mm256_unpacklo_epi8(even, odd), high = _mm256_unpackhi_epi8(even, odd);
        __m256i pixels[4] = {_mm256_unpacklo_epi8(low, zero), _mm256_unpackhi_epi8(low, zero),
                             _mm256_unpacklo_epi8(high, zero), _mm256_unpackhi_epi8(high, zero)};
        __m256i upper_weights = broadcast_pair(pairs[p].upper), lower_weights = broadcast_pair(pairs[p].lower);
        for (int i = 0; i < 4; i++) {
            upper[i] = _mm256_add_epi32(upper[i], _mm256_madd_epi16(pixels[i], upper_weights));
            lower[i] = _mm256_add_epi32(lower[i], _mm256_madd_epi16(pixels[i], lower_weights));
        }
    }
    __m256i low_words = _mm256_packs_epi32(round_sums(upper[0], lower[0]), round_sums(upper[1], lower[1]));
    __m256i high_words = _mm256_packs_epi32(round_sums(upper[2], lower[2]), round_sums(upper[3], lower[3]));
    _mm256_storeu_si256((__m256i *)out, _mm256_packus_epi16(low_words, high_words));
}

/* The last 32 bytes overlap those before them. */
INLINE void resize_column(const Pair *pairs, const int n, const uint8_t *rows, size_t stride, int bytes, uint8_t *out) {
    for (int x = 0; x < bytes - 32; x += 32)
        resize_block(pairs, n, rows + x, stride, out + x);
    resize_block(pairs, n, rows + bytes - 32, stride, out + bytes - 32);
}

AVX2 void resize_vertically_avx2(const Pair *pairs, int n, const uint8_t *rows, size_t stride, int bytes,
                                 uint8_t *out) {
    switch (n) {
        case 1: resize_column(pairs, 1, rows, stride, bytes, out); break;
        case 2: resize_column(pairs, 2, rows, stride, bytes, out); break;
        case 3: resize_column(pairs, 3, rows, stride, bytes, out); break;
        default: resize_column(pairs, n, rows, stride, bytes, out);
    }
}
#endif
