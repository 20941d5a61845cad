#include "resize.h"

#include <math.h>
#include <stdlib.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(PLAIN_SUMS)
#define HAVE_AVX2 1
#endif

enum { HALF = 1 << (PRECISION - 1) };

/* --- weights ------------------------------------------------------------------------------------------------------ */

/* The inputs that reach a place, and their real weights, which sum to 1. All arithmetic is Pillow's, in its order. */
typedef struct {
    int first, count;
} Reach;

static Reach reach_of(int place, int inputs, float start, double scale, double support, double *weights) {
    double centre = start + (place + 0.5) * scale;
    int first = (int)(centre - support + 0.5), end = (int)(centre + support + 0.5);
    if (first < 0)
        first = 0;
    if (end > inputs)
        end = inputs;
    double sum = 0, narrowing = 1.0 / support;
    for (int i = first; i < end; i++) {
        double distance = fabs((i - centre + 0.5) * narrowing);
        weights[i - first] = distance < 1.0 ? 1.0 - distance : 0.0;
        sum += weights[i - first];
    }
    for (int i = first; i < end && sum != 0.0; i++)
        weights[i - first] /= sum;
    return (Reach){first, end - first};
}

static int32_t fixed(double weight) {
    return (int32_t)(0.5 + weight * (1 << PRECISION));
}

/* Without the weights that are zero at either end, so that fewer rows and columns need be decoded. */
static Reach trimmed(Reach reach, const double **weights) {
    while (reach.count > 1 && fixed((*weights)[reach.count - 1]) == 0)
        reach.count--;
    while (reach.count > 1 && fixed(**weights) == 0)
        reach.first++, reach.count--, (*weights)++;
    return reach;
}

static void store(Pair *pairs, int at, int32_t weight) {
    pairs[at / 2].upper[at % 2] = (int16_t)(weight >> HALVES);
    pairs[at / 2].lower[at % 2] = (int16_t)(weight & ((1 << HALVES) - 1));
}

void *roomy(void *buffer, size_t *room, size_t bytes) {
    if (*room >= bytes)
        return buffer;
    free(buffer);
    buffer = calloc(1, bytes);
    *room = buffer ? bytes : 0;
    return buffer;
}

int plan_pass(Pass *pass, int inputs, float start, float end, int places, int mirrored) {
    double scale = (double)(end - start) / places;
    double support = scale < 1.0 ? 1.0 : scale;
    size_t most = 2 * (size_t)ceil(support) + 1;
    pass->first = roomy(pass->first, &pass->room_places, places * sizeof *pass->first);
    pass->scratch = roomy(pass->scratch, &pass->room_scratch, most * sizeof *pass->scratch);
    if (!pass->first || !pass->scratch)
        return -1;

    int taps = 1;
    pass->from = inputs, pass->to = 0;
    for (int place = 0; place < places; place++) {
        const double *weights = pass->scratch;
        Reach reach = trimmed(reach_of(place, inputs, start, scale, support, pass->scratch), &weights);
        if (reach.count > taps)
            taps = reach.count;
        if (reach.first < pass->from)
            pass->from = reach.first;
        if (reach.first + reach.count > pass->to)
            pass->to = reach.first + reach.count;
    }

    pass->places = places;
    pass->pairs = (taps + 1) / 2;
    pass->weights = roomy(pass->weights, &pass->room_weights, (size_t)places * pass->pairs * sizeof *pass->weights);
    if (!pass->weights)
        return -1;
    for (int place = 0; place < places; place++) {
        const double *weights = pass->scratch;
        Reach reach = trimmed(reach_of(place, inputs, start, scale, support, pass->scratch), &weights);
        int slot = mirrored ? places - 1 - place : place;
        Pair *pairs = pass->weights + (size_t)slot * pass->pairs;
        /* A place at the end begins earlier, with zeros, rather than reach past the last input. */
        int first = reach.first < pass->to - taps ? reach.first : pass->to - taps;
        pass->first[slot] = first;
        for (int t = 0; t < 2 * pass->pairs; t++) {
            int i = first + t - reach.first;
            store(pairs, t, i >= 0 && i < reach.count ? fixed(weights[i]) : 0);
        }
    }
    return 0;
}

void free_pass(Pass *pass) {
    free(pass->first);
    free(pass->weights);
    free(pass->scratch);
}

/* --- sums, in plain C --------------------------------------------------------------------------------------------- */

static int32_t weight(const Pair *pair, int which) {
    return ((int32_t)pair->upper[which] << HALVES) + pair->lower[which];
}

static uint8_t rounded(int32_t sum) {
    int32_t value = (sum + HALF) >> PRECISION;
    return (uint8_t)(value > 255 ? 255 : value);
}

static void row_plain(const Pass *pass, const uint8_t *restrict line, int offset, uint8_t *restrict row) {
    const Pair *pair = pass->weights;
    for (int place = 0; place < pass->places; place++, row += 3) {
        const uint8_t *pixel = line + 4 * (size_t)(pass->first[place] - offset);
        int32_t red = 0, green = 0, blue = 0;
        for (int p = 0; p < pass->pairs; p++, pair++, pixel += 8) {
            int32_t left = weight(pair, 0), right = weight(pair, 1);
            red += pixel[0] * left + pixel[4] * right;
            green += pixel[1] * left + pixel[5] * right;
            blue += pixel[2] * left + pixel[6] * right;
        }
        row[0] = rounded(red), row[1] = rounded(green), row[2] = rounded(blue);
    }
}

/* A block of bytes at a time, so that the compiler can make vectors of the innermost loop. */
static void column_plain(const Pair *pairs, int n, const uint8_t *restrict rows, size_t stride, int from, int bytes,
                         uint8_t *restrict out) {
    enum { BLOCK = 64 };
    for (int x = from; x < bytes; x += BLOCK) {
        int width = bytes - x < BLOCK ? bytes - x : BLOCK;
        int32_t sums[BLOCK] = {0};
        const uint8_t *even = rows + x, *odd = even + stride;
        for (int p = 0; p < n; p++, even += 2 * stride, odd += 2 * stride) {
            int32_t above = weight(&pairs[p], 0), below = weight(&pairs[p], 1);
            for (int i = 0; i < width; i++)
                sums[i] += even[i] * above + odd[i] * below;
        }
        for (int i = 0; i < width; i++)
            out[x + i] = rounded(sums[i]);
    }
}

/* --- the same sums, in AVX2 --------------------------------------------------------------------------------------- */

#ifdef HAVE_AVX2
#include <immintrin.h>
#include <string.h>
#define AVX2 __attribute__((target("avx2")))

/* Eight sums put together of their upper and lower halves, and rounded. */
AVX2 static inline __m256i whole(__m256i upper, __m256i lower) {
    __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(upper, HALVES), lower);
    return _mm256_srai_epi32(_mm256_add_epi32(sum, _mm256_set1_epi32(HALF)), PRECISION);
}

AVX2 static inline __m256i both(const void *low, const void *high) {
    __m128i first = _mm_loadl_epi64(low);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadl_epi64(high), 1);
}

/* Two places at a time, one in each half of the register: R0R1 G0G1 B0B1 X0X1 of two pixels, and their two weights. */
AVX2 static inline __attribute__((always_inline)) void row_pairs(const Pass *pass, const uint8_t *line, int offset,
                                                                 uint8_t *row, const int pairs) {
    const __m256i interleave = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1));
    const __m128i pack = _mm_setr_epi8(0, 1, 2, 4, 5, 6, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    for (int place = 0; place < pass->places; place += 2, row += 6) {
        int other = place + 1 < pass->places ? place + 1 : place;
        const uint8_t *left = line + 4 * (size_t)(pass->first[place] - offset);
        const uint8_t *right = line + 4 * (size_t)(pass->first[other] - offset);
        const Pair *a = pass->weights + (size_t)place * pairs, *b = pass->weights + (size_t)other * pairs;
        __m256i upper = _mm256_setzero_si256(), lower = upper;
        for (int p = 0; p < pairs; p++, left += 8, right += 8) {
            __m256i pixels = _mm256_shuffle_epi8(both(left, right), interleave);
            __m256i weights = both(a + p, b + p);
            upper = _mm256_add_epi32(upper, _mm256_madd_epi16(pixels, _mm256_shuffle_epi32(weights, 0x00)));
            lower = _mm256_add_epi32(lower, _mm256_madd_epi16(pixels, _mm256_shuffle_epi32(weights, 0x55)));
        }
        __m256i sums = whole(upper, lower);
        __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        _mm_storel_epi64((__m128i *)row, _mm_shuffle_epi8(_mm_packus_epi16(words, words), pack));
    }
}

AVX2 static void row_avx2(const Pass *pass, const uint8_t *line, int offset, uint8_t *row) {
    switch (pass->pairs) { /* a known number of pairs is an unrolled loop */
        case 1: row_pairs(pass, line, offset, row, 1); break;
        case 2: row_pairs(pass, line, offset, row, 2); break;
        case 3: row_pairs(pass, line, offset, row, 3); break;
        case 4: row_pairs(pass, line, offset, row, 4); break;
        default: row_pairs(pass, line, offset, row, pass->pairs);
    }
}

/* Sixteen bytes at a time; the rest in plain C. */
AVX2 static void column_avx2(const Pair *pairs, int n, const uint8_t *rows, size_t stride, int bytes, uint8_t *out) {
    int x = 0;
    for (; x + 16 <= bytes; x += 16) {
        const uint8_t *above = rows + x;
        __m256i upper[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        __m256i lower[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        for (int p = 0; p < n; p++, above += 2 * stride) {
            __m128i even = _mm_loadu_si128((const __m128i *)above);
            __m128i odd = _mm_loadu_si128((const __m128i *)(above + stride));
            __m256i pixels[2] = {_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(even, odd)),
                                 _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(even, odd))};
            int32_t halves[2];
            memcpy(halves, pairs + p, sizeof halves);
            __m256i high = _mm256_set1_epi32(halves[0]), low = _mm256_set1_epi32(halves[1]);
            for (int h = 0; h < 2; h++) {
                upper[h] = _mm256_add_epi32(upper[h], _mm256_madd_epi16(pixels[h], high));
                lower[h] = _mm256_add_epi32(lower[h], _mm256_madd_epi16(pixels[h], low));
            }
        }
        __m256i words = _mm256_packs_epi32(whole(upper[0], lower[0]), whole(upper[1], lower[1]));
        words = _mm256_permute4x64_epi64(words, 0xD8);
        __m128i result = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128((__m128i *)(out + x), result);
    }
    column_plain(pairs, n, rows, stride, x, bytes, out);
}
#endif

/* --- the choice --------------------------------------------------------------------------------------------------- */

void resize_row(const Pass *pass, const uint8_t *line, int offset, uint8_t *row) {
#ifdef HAVE_AVX2
    if (__builtin_cpu_supports("avx2")) {
        row_avx2(pass, line, offset, row);
        return;
    }
#endif
    row_plain(pass, line, offset, row);
}

void resize_column(const Pass *pass, int place, const uint8_t *rows, size_t stride, int bytes, uint8_t *out) {
    const Pair *pairs = pass->weights + (size_t)place * pass->pairs;
    rows += (size_t)(pass->first[place] - pass->from) * stride;
#ifdef HAVE_AVX2
    if (__builtin_cpu_supports("avx2")) {
        column_avx2(pairs, pass->pairs, rows, stride, bytes, out);
        return;
    }
#endif
    column_plain(pairs, pass->pairs, rows, stride, 0, bytes, out);
}
