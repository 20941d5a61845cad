#include <math.h>
#include <stdlib.h>

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

    pass->pairs = (taps + 1) / 2;
    pass->weights = roomy(pass->weights, &pass->room_weights, count * pass->pairs * sizeof *pass->weights);
    if (!pass->weights)
        return -1;
    for (int place = 0; place < places; place++) {
        const double *weights = pass->scratch + place * most;
        Reach reach = reaches[place];
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
