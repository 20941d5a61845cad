#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "resize.h"

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
static Reach trimmed(Reach reach, double *weights) {
    int zeros = 0;
    while (reach.count > 1 && fixed(weights[reach.count - 1]) == 0)
        reach.count--;
    while (zeros < reach.count - 1 && fixed(weights[zeros]) == 0)
        zeros++;
    for (int i = zeros; zeros && i < reach.count; i++)
        weights[i - zeros] = weights[i];
    return (Reach){reach.first + zeros, reach.count - zeros};
}

static void store(Pair *pairs, unsigned at, int32_t weight) {
    pairs[at / 2].upper[at % 2] = (int16_t)(weight >> HALVES);
    pairs[at / 2].lower[at % 2] = (int16_t)(weight & ((1 << HALVES) - 1));
}

static void store_digits(Quad *quads, unsigned at, int32_t weight) {
    int32_t rest = (weight + 128) >> 8; /* what is left once the lowest digit, -128 to 127, is taken off */
    quads[at / 4].digits[0][at % 4] = (int8_t)(weight - rest * 256);
    int32_t high = (rest + 128) >> 8;
    quads[at / 4].digits[1][at % 4] = (int8_t)(rest - high * 256);
    quads[at / 4].digits[2][at % 4] = (int8_t)high;
}

void *roomy(void *buffer, size_t *room, size_t bytes) {
    if (*room >= bytes)
        return buffer;
    free(buffer);
    buffer = calloc(1, bytes);
    *room = buffer ? bytes : 0;
    return buffer;
}

/* Real weights of every place into `scratch`, `most` apart, and the reaches into `reaches`; returns the most taps. */
static int weigh(Pass *pass, int inputs, float start, double scale, size_t most, Reach *reaches) {
    double support = scale < 1.0 ? 1.0 : scale;
    int taps = 1;
    pass->from = inputs, pass->to = 0;
    for (int place = 0; place < pass->places; place++) {
        double *weights = pass->scratch + place * most;
        Reach reach = trimmed(reach_of(place, inputs, start, scale, support, weights), weights);
        if (reach.count > taps)
            taps = reach.count;
        if (reach.first < pass->from)
            pass->from = reach.first;
        if (reach.first + reach.count > pass->to)
            pass->to = reach.first + reach.count;
        reaches[place] = reach;
    }
    return taps;
}

/* Room for the weights of so many taps, all zero. */
static int make_room(Pass *pass, int taps) {
    pass->pairs = (taps + 1) / 2;
    pass->quads = (taps + 3) / 4;
    size_t pairs = (size_t)pass->places * (size_t)pass->pairs * sizeof(Pair);
    size_t quads = (size_t)pass->places * (size_t)pass->quads * sizeof(Quad);
    pass->weights = roomy(pass->weights, &pass->room_weights, pairs);
    if (!pass->weights)
        return -1;
    memset(pass->weights, 0, pairs);
    if (!has_vnni())
        return 0;
    pass->quad = roomy(pass->quad, &pass->room_quads, quads);
    if (!pass->quad)
        return -1;
    memset(pass->quad, 0, quads);
    return 0;
}

int plan_pass(Pass *pass, int inputs, float start, float end, int places, int mirrored) {
    double scale = (double)(end - start) / places;
    size_t most = 2 * (size_t)ceil(scale < 1.0 ? 1.0 : scale) + 1, count = (size_t)places;
    pass->first = roomy(pass->first, &pass->room_places, count * sizeof *pass->first);
    pass->scratch = roomy(pass->scratch, &pass->room_scratch, count * (most * sizeof(double) + sizeof(Reach)));
    if (!pass->first || !pass->scratch)
        return -1;
    pass->places = places;
    Reach *reaches = (Reach *)(pass->scratch + count * most);
    int taps = weigh(pass, inputs, start, scale, most, reaches);

    int with_digits = has_vnni();
    if (make_room(pass, taps))
        return -1;
    for (int place = 0; place < places; place++) {
        const double *weights = pass->scratch + place * most;
        Reach reach = reaches[place];
        int slot = mirrored ? places - 1 - place : place;
        /* A place at the end begins earlier, with zeros, rather than reach past the last input. */
        int first = reach.first < pass->to - taps ? reach.first : pass->to - taps;
        pass->first[slot] = first;
        Pair *pairs = pass->weights + (size_t)slot * (size_t)pass->pairs;
        Quad *quads = with_digits ? pass->quad + (size_t)slot * (size_t)pass->quads : NULL;
        for (int i = 0; i < reach.count; i++) {
            unsigned tap = (unsigned)(reach.first - first + i);
            store(pairs, tap, fixed(weights[i]));
            if (quads)
                store_digits(quads, tap, fixed(weights[i]));
        }
    }
    return 0;
}

void free_pass(Pass *pass) {
    free(pass->first);
    free(pass->weights);
    free(pass->quad);
    free(pass->scratch);
}
