#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "resize.h"

/* The inputs of one output. */
typedef struct {
    int first, count;
} TapRange;

static int32_t to_fixed_point(double weight) {
    return (int32_t)(0.5 + weight * (1 << PRECISION));
}

/* Computes the weights of an output, which sum to 1 before they are rounded, and the range of its inputs. All
 * arithmetic is Pillow's, in its order. */
static TapRange compute_range(int output, int inputs, float start, double scale, double support, int32_t *weights) {
    double center = start + (output + 0.5) * scale;
    int first = (int)(center - support + 0.5), end = (int)(center + support + 0.5);
    if (first < 0)
        first = 0;
    if (end > inputs)
        end = inputs;
    double sum = 0, inverse_support = 1.0 / support;
    for (int i = first; i < end; i++) {
        double distance = fabs((i - center + 0.5) * inverse_support);
        sum += distance < 1.0 ? 1.0 - distance : 0.0;
    }
    for (int i = first; i < end; i++) {
        double distance = fabs((i - center + 0.5) * inverse_support), weight = distance < 1.0 ? 1.0 - distance : 0.0;
        weights[i - first] = to_fixed_point(sum != 0.0 ? weight / sum : weight);
    }
    return (TapRange){first, end - first};
}

/* Drops the weights that are zero at either end, so that fewer rows and columns are decoded. */
static TapRange trim_range(TapRange range, int32_t *weights) {
    int zeros = 0;
    while (range.count > 1 && weights[range.count - 1] == 0)
        range.count--;
    while (zeros < range.count - 1 && weights[zeros] == 0)
        zeros++;
    for (int i = zeros; zeros && i < range.count; i++)
        weights[i - zeros] = weights[i];
    return (TapRange){range.first + zeros, range.count - zeros};
}

static void store_pair(Pair *pairs, unsigned at, int32_t weight) {
    pairs[at / 2].upper[at % 2] = (int16_t)(weight >> HALF_BITS);
    pairs[at / 2].lower[at % 2] = (int16_t)(weight & ((1 << HALF_BITS) - 1));
}

static void store_digits(Quad *quads, unsigned at, int32_t weight) {
    int32_t upper = (weight + 128) >> 8; /* without the lowest digit, which is -128 to 127 */
    quads[at / 4].digits[0][at % 4] = (int8_t)(weight - upper * 256);
    int32_t high = (upper + 128) >> 8;
    quads[at / 4].digits[1][at % 4] = (int8_t)(upper - high * 256);
    quads[at / 4].digits[2][at % 4] = (int8_t)high;
}

void *ensure_capacity(void *buffer, size_t *capacity, size_t bytes) {
    if (*capacity >= bytes)
        return buffer;
    free(buffer);
    bytes = (bytes + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES;
    if ((buffer = aligned_alloc(VECTOR_BYTES, bytes)))
        memset(buffer, 0, bytes);
    *capacity = buffer ? bytes : 0;
    return buffer;
}

/* Computes the weights of every output into `scratch`, max_taps apart, and the ranges; returns the largest number of
 * taps. */
static int compute_weights(Pass *pass, int inputs, float start, double scale, size_t max_taps, TapRange *ranges) {
    double support = scale < 1.0 ? 1.0 : scale;
    int taps = 1;
    pass->from = inputs, pass->to = 0;
    for (int output = 0; output < pass->outputs; output++) {
        int32_t *weights = pass->scratch + output * max_taps;
        TapRange range = trim_range(compute_range(output, inputs, start, scale, support, weights), weights);
        if (range.count > taps)
            taps = range.count;
        if (range.first < pass->from)
            pass->from = range.first;
        if (range.first + range.count > pass->to)
            pass->to = range.first + range.count;
        ranges[output] = range;
    }
    return taps;
}

/* Allocates the weights, all zero. */
static int allocate_weights(Pass *pass) {
    size_t outputs = (size_t)pass->outputs;
    size_t pairs = outputs * (size_t)pass->pairs * sizeof(Pair), quads = outputs * (size_t)pass->quads * sizeof(Quad);
    if (pairs && !(pass->pair_weights = ensure_capacity(pass->pair_weights, &pass->pair_capacity, pairs)))
        return -1;
    if (quads && !(pass->quad_weights = ensure_capacity(pass->quad_weights, &pass->quad_capacity, quads)))
        return -1;
    if (pairs)
        memset(pass->pair_weights, 0, pairs);
    if (quads)
        memset(pass->quad_weights, 0, quads);
    return 0;
}

static void store_weights(Pass *pass, int output, unsigned tap, const int32_t *weights, int count) {
    Pair *pairs = pass->pair_weights + (size_t)output * (size_t)pass->pairs;
    Quad *quads = pass->quad_weights + (size_t)output * (size_t)pass->quads;
    for (unsigned i = 0; i < (unsigned)count; i++)
        if (pass->quads)
            store_digits(quads, tap + i, weights[i]);
        else
            store_pair(pairs, tap + i, weights[i]);
}

int plan_pass(Pass *pass, int inputs, float start, float end, int outputs, int flip) {
    double scale = (double)(end - start) / outputs;
    size_t max_taps = 2 * (size_t)ceil(scale < 1.0 ? 1.0 : scale) + 1, count = (size_t)outputs;
    size_t first_input_bytes = count * sizeof *pass->first_input;
    size_t scratch_bytes = count * (max_taps * sizeof *pass->scratch + sizeof(TapRange));
    pass->first_input = ensure_capacity(pass->first_input, &pass->first_input_capacity, first_input_bytes);
    pass->scratch = ensure_capacity(pass->scratch, &pass->scratch_capacity, scratch_bytes);
    if (!pass->first_input || !pass->scratch)
        return -1;
    pass->outputs = outputs;
    TapRange *ranges = (TapRange *)(pass->scratch + count * max_taps);
    int taps = pass->taps = compute_weights(pass, inputs, start, scale, max_taps, ranges);

    int uses_quads = has_avx512() && 3 * outputs >= AVX512_BYTES && scale <= MAX_QUAD_SCALE;
    pass->pairs = uses_quads ? 0 : (taps + 1) / 2;
    pass->quads = uses_quads ? (taps + 3) / 4 : 0;
    if (allocate_weights(pass))
        return -1;
    for (int output = 0; output < outputs; output++) {
        TapRange range = ranges[output];
        int slot = flip ? outputs - 1 - output : output;
        /* An output at the end begins earlier, with zero weights, so that it does not extend past the last input. */
        int first = range.first < pass->to - taps ? range.first : pass->to - taps;
        pass->first_input[slot] = first;
        store_weights(pass, slot, (unsigned)(range.first - first), pass->scratch + output * max_taps, range.count);
    }
    return 0;
}

size_t count_pass_bytes(const Pass *pass) {
    return pass->scratch_capacity + pass->pair_capacity + pass->quad_capacity + pass->blocks.weight_capacity;
}

void free_pass(Pass *pass) {
    free(pass->first_input);
    free(pass->pair_weights);
    free(pass->quad_weights);
    free(pass->scratch);
    free_blocks(&pass->blocks);
}
