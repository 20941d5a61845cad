#include "resize.h"

static int32_t get_weight(const Pair *pair, int index) {
    return ((int32_t)pair->upper[index] << HALF_BITS) + pair->lower[index];
}

static uint8_t round_sum(int32_t sum) {
    int32_t value = (sum + ONE_HALF) >> PRECISION;
    return (uint8_t)(value > 255 ? 255 : value);
}

static void resize_row_reference(const Pass *pass, const uint8_t *restrict line, int offset, int step,
                                 uint8_t *restrict row) {
    const Pair *pair = pass->pair_weights;
    for (int output = 0; output < pass->outputs; output++, row += 3) {
        const uint8_t *left = line + (size_t)step * (size_t)(pass->first_input[output] - offset), *right = left + step;
        int32_t red = 0, green = 0, blue = 0;
        for (int p = 0; p < pass->pairs; p++, pair++, left += 2 * step, right += 2 * step) {
            int32_t near = get_weight(pair, 0), far = get_weight(pair, 1);
            red += left[0] * near + right[0] * far;
            green += left[1] * near + right[1] * far;
            blue += left[2] * near + right[2] * far;
        }
        row[0] = round_sum(red), row[1] = round_sum(green), row[2] = round_sum(blue);
    }
}

/* Works on a block of bytes at a time, so that the compiler can vectorize the innermost loop. */
static void resize_column_reference(const Pair *pairs, int n, const uint8_t *restrict rows, size_t stride, int bytes,
                         uint8_t *restrict out) {
    enum { BLOCK = 64 };
    for (int x = 0; x < bytes; x += BLOCK) {
        int width = bytes - x < BLOCK ? bytes - x : BLOCK;
        int32_t sums[BLOCK] = {0};
        const uint8_t *even = rows + x, *odd = even + stride;
        for (int p = 0; p < n; p++, even += 2 * stride, odd += 2 * stride) {
            int32_t above = get_weight(&pairs[p], 0), below = get_weight(&pairs[p], 1);
            for (int i = 0; i < width; i++)
                sums[i] += even[i] * above + odd[i] * below;
        }
        for (int i = 0; i < width; i++)
            out[x + i] = round_sum(sums[i]);
    }
}

int has_avx512(void) {
#ifdef HAVE_AVX512
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#else
    return 0;
#endif
}

#ifdef HAVE_AVX2
static void resize_row_groups(const Pass *pass, const Lines *lines, uint8_t *rows, size_t stride) {
    for (int i = 0; i < lines->count; i += ROW_GROUP) {
        const uint8_t *from[ROW_GROUP];
        uint8_t *to[ROW_GROUP];
        for (int k = 0; k < ROW_GROUP; k++) { /* the last row replaces those that are missing */
            int line = i + k < lines->count ? i + k : lines->count - 1;
            from[k] = lines->bytes + (size_t)line * lines->pitch;
            to[k] = rows + (size_t)line * stride;
        }
#ifdef HAVE_AVX512
        if (pass->quads) {
            resize_rows_avx512(pass, from, lines->offset, to);
            continue;
        }
#endif
        resize_rows_avx2(pass, from, lines->offset, lines->step, to);
    }
}
#endif

void resize_horizontally(const Pass *pass, const Lines *lines, uint8_t *rows, size_t stride) {
#ifdef HAVE_AVX2
    if (__builtin_cpu_supports("avx2")) {
        resize_row_groups(pass, lines, rows, stride);
        return;
    }
#endif
    for (int i = 0; i < lines->count; i++)
        resize_row_reference(pass, lines->bytes + (size_t)i * lines->pitch, lines->offset, lines->step,
                             rows + (size_t)i * stride);
}

void resize_vertically(const Pass *pass, int output, const uint8_t *rows, size_t stride, int bytes, uint8_t *out) {
    const Pair *pairs = pass->pair_weights + (size_t)output * (size_t)pass->pairs;
    rows += (size_t)(pass->first_input[output] - pass->from) * stride;
#ifdef HAVE_AVX512
    if (pass->quads) {
        const Quad *quads = pass->quad_weights + (size_t)output * (size_t)pass->quads;
        resize_vertically_avx512(quads, pass->quads, rows, stride, bytes, out);
        return;
    }
#endif
#ifdef HAVE_AVX2
    if (bytes >= AVX2_BYTES && __builtin_cpu_supports("avx2")) {
        resize_vertically_avx2(pairs, pass->pairs, rows, stride, bytes, out);
        return;
    }
#endif
    resize_column_reference(pairs, pass->pairs, rows, stride, bytes, out);
}
