#include "resize.h"

static int32_t weight(const Pair *pair, int which) {
    return ((int32_t)pair->upper[which] << HALVES) + pair->lower[which];
}

static uint8_t rounded(int32_t sum) {
    int32_t value = (sum + HALF) >> PRECISION;
    return (uint8_t)(value > 255 ? 255 : value);
}

static void row_plain(const Pass *pass, const uint8_t *restrict line, int offset, int step, uint8_t *restrict row) {
    const Pair *pair = pass->weights;
    for (int place = 0; place < pass->places; place++, row += 3) {
        const uint8_t *left = line + (size_t)step * (size_t)(pass->first[place] - offset), *right = left + step;
        int32_t red = 0, green = 0, blue = 0;
        for (int p = 0; p < pass->pairs; p++, pair++, left += 2 * step, right += 2 * step) {
            int32_t near = weight(pair, 0), far = weight(pair, 1);
            red += left[0] * near + right[0] * far;
            green += left[1] * near + right[1] * far;
            blue += left[2] * near + right[2] * far;
        }
        row[0] = rounded(red), row[1] = rounded(green), row[2] = rounded(blue);
    }
}

/* A block of bytes at a time, so that the compiler can make vectors of the innermost loop. */
static void column_plain(const Pair *pairs, int n, const uint8_t *restrict rows, size_t stride, int bytes,
                         uint8_t *restrict out) {
    enum { BLOCK = 64 };
    for (int x = 0; x < bytes; x += BLOCK) {
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

int has_vnni(void) {
#ifdef HAVE_VNNI
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
#else
    return 0;
#endif
}

#ifdef HAVE_AVX2
static void rows_by_four(const Pass *pass, const Lines *lines, uint8_t *rows, size_t stride) {
    for (int i = 0; i < lines->count; i += 4) {
        const uint8_t *from[4];
        uint8_t *to[4];
        for (int k = 0; k < 4; k++) { /* the last row stands in for those that are missing */
            int line = i + k < lines->count ? i + k : lines->count - 1;
            from[k] = lines->bytes + (size_t)line * lines->pitch;
            to[k] = rows + (size_t)line * stride;
        }
#ifdef HAVE_VNNI
        if (has_vnni()) {
            four_rows_vnni(pass, from, lines->offset, lines->step, to);
            continue;
        }
#endif
        four_rows_avx2(pass, from, lines->offset, lines->step, to);
    }
}
#endif

void resize_rows(const Pass *pass, const Lines *lines, uint8_t *rows, size_t stride) {
#ifdef HAVE_AVX2
    if (__builtin_cpu_supports("avx2")) {
        rows_by_four(pass, lines, rows, stride);
        return;
    }
#endif
    for (int i = 0; i < lines->count; i++)
        row_plain(pass, lines->bytes + (size_t)i * lines->pitch, lines->offset, lines->step, rows + (size_t)i * stride);
}

void resize_column(const Pass *pass, int place, const uint8_t *rows, size_t stride, int bytes, uint8_t *out) {
    const Pair *pairs = pass->weights + (size_t)place * (size_t)pass->pairs;
    rows += (size_t)(pass->first[place] - pass->from) * stride;
#ifdef HAVE_VNNI
    if (bytes >= VNNI_BYTES && has_vnni()) {
        resize_column_vnni(pass->quad + (size_t)place * (size_t)pass->quads, pass->quads, rows, stride, bytes, out);
        return;
    }
#endif
#ifdef HAVE_AVX2
    if (bytes >= AVX2_BYTES && __builtin_cpu_supports("avx2")) {
        resize_column_avx2(pairs, pass->pairs, rows, stride, bytes, out);
        return;
    }
#endif
    column_plain(pairs, pass->pairs, rows, stride, bytes, out);
}
