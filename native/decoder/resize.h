/* Resize: Pillow's antialiased bilinear filter, bit for bit, across and then down.
 *
 * A pass turns every output place into a weighted sum of a few neighbouring inputs. Weights are fixed-point numbers of
 * PRECISION bits, sums are rounded half up, and the horizontal pass rounds to 8 bits before the vertical one begins:
 * Pillow's scheme, so that equal input pixels give equal output pixels.
 */
#ifndef PODSCALE_RESIZE_H
#define PODSCALE_RESIZE_H

#include <stddef.h>
#include <stdint.h>

enum { PRECISION = 22, HALVES = PRECISION / 2, HALF = 1 << (PRECISION - 1) };

/* Two neighbouring weights, each cut into an upper and a lower part of HALVES bits: products of 16-bit numbers are what
 * processors multiply fastest, and `upper << HALVES | lower` puts the exact weight together again. */
typedef struct {
    int16_t upper[2], lower[2];
} Pair;

/* Four neighbouring weights, each cut into three digits, of 256, the lower two signed: the same for dot products of
 * bytes. */
typedef struct {
    int8_t digits[3][4];
} Quad;

/* What every output place needs: inputs first[place] and on, 2 * pairs or 4 * quads of them. All inputs together are
 * from .. to - 1; BEYOND more may be read too, and are multiplied by zero. */
enum { BEYOND = 3 };
typedef struct {
    int places, pairs, quads;
    int from, to;
    int *first;    /* [places] */
    Pair *weights; /* [places, pairs] */
    Quad *quad;    /* [places, quads], where the processor can use them */
    double *scratch;
    size_t room_places, room_weights, room_quads, room_scratch; /* bytes allocated */
} Pass;

/* Plans the pass from the stretch start..end of `inputs` pixels to `places` pixels, in reverse order if `mirrored`.
 * Returns 0, or -1 where memory ran out. Buffers of an earlier plan are used again. */
int plan_pass(Pass *pass, int inputs, float start, float end, int places, int mirrored);
void free_pass(Pass *pass);

/* A buffer of at least `bytes`, the old one where it is large enough; NULL where memory ran out. */
void *roomy(void *buffer, size_t *room, size_t bytes);

/* Some rows of pixels: input `offset` is the first of each; RGB of `step` bytes, 3 or 4. Up to OVER bytes after the
 * last of the BEYOND pixels are read too. */
typedef struct {
    const uint8_t *bytes;
    size_t pitch;
    int count, offset, step;
} Lines;

/* The horizontal pass on all lines. `rows`, `stride` apart, receive packed RGB, each with up to WASTE bytes of rubbish
 * after it. */
enum { WASTE = 16, OVER = 16 };
void resize_rows(const Pass *pass, const Lines *lines, uint8_t *rows, size_t stride);

/* The vertical pass for one place: `rows` begins with input `from`, each of `bytes` bytes, `stride` apart. */
void resize_column(const Pass *pass, int place, const uint8_t *rows, size_t stride, int bytes, uint8_t *out);

/* The same for some processors: four rows at a time across, and so many bytes at least down. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(PLAIN_SUMS)
#define HAVE_AVX2 1
enum { AVX2_BYTES = 32, VNNI_BYTES = 64 };
void four_rows_avx2(const Pass *pass, const uint8_t *const from[4], int offset, int step, uint8_t *const to[4]);
void resize_column_avx2(const Pair *pairs, int n, const uint8_t *rows, size_t stride, int bytes, uint8_t *out);
#ifndef NO_VNNI
#define HAVE_VNNI 1
void four_rows_vnni(const Pass *pass, const uint8_t *const from[4], int offset, int step, uint8_t *const to[4]);
void resize_column_vnni(const Quad *quad, int n, const uint8_t *rows, size_t stride, int bytes, uint8_t *out);
#endif
#endif
int has_vnni(void);

#endif
