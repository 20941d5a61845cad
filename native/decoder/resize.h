/* Resize: Pillow's antialiased bilinear filter, bit for bit, horizontally and then vertically.
 *
 * In a pass, every output is a weighted sum of a few neighboring inputs. Weights are fixed-point numbers of PRECISION
 * bits, sums are rounded half up, and the horizontal pass rounds to 8 bits before the vertical one begins. This is
 * Pillow's scheme, so equal input pixels give equal output pixels.
 */
#ifndef PODSCALE_RESIZE_H
#define PODSCALE_RESIZE_H

#include <stddef.h>
#include <stdint.h>

enum { PRECISION = 22, HALF_BITS = PRECISION / 2, ONE_HALF = 1 << (PRECISION - 1) };

/* Two neighboring weights, each split into an upper and a lower part of HALF_BITS bits: processors are fastest at
 * products of 16-bit numbers, and `upper << HALF_BITS | lower` is the exact weight. */
typedef struct {
    int16_t upper[2], lower[2];
} Pair;

/* Four neighboring weights, each split into three digits of base 256, the lower two signed: the same for dot products
 * of bytes (AVX-512). */
typedef struct {
    int8_t digits[3][4];
} Quad;

/* The quads of a horizontal pass, arranged for blocks of 16 output bytes. Each block has its first input; from there,
 * the byte at which each of the four inputs of each output byte lies; and, for each quad, a vector of each digit. */
enum { BLOCK_BYTES = 16, VECTOR_BYTES = 64 };
typedef struct {
    int count, step; /* step: bytes per pixel */
    int is_wide;     /* whether a block's inputs lie in two vectors, not in one */
    int *first_input;
    uint8_t *indices; /* [count, BLOCK_BYTES, 4] */
    int8_t *weights;  /* [count, quads, 3, BLOCK_BYTES, 4] */
    size_t first_input_capacity, index_capacity, weight_capacity; /* bytes allocated */
} Blocks;

/* What every output needs: `taps` inputs, starting with first_input[output]. Their weights are pairs or quads, and the
 * number of the others is 0. All inputs together are from .. to - 1; EXTRA_INPUTS more may be read too, and are
 * multiplied by zero. */
enum { EXTRA_INPUTS = 3, MAX_QUAD_SCALE = 5 }; /* up to this scale the inputs of a block fit into two vectors */
typedef struct {
    int outputs, taps, pairs, quads;
    int from, to;
    int *first_input;   /* [outputs] */
    Pair *pair_weights; /* [outputs, pairs] */
    Quad *quad_weights; /* [outputs, quads] */
    Blocks blocks;
    int32_t *scratch;
    size_t first_input_capacity, pair_capacity, quad_capacity, scratch_capacity; /* bytes allocated */
} Pass;

/* Plans the pass from the interval start..end of `inputs` pixels to `outputs` pixels, in reverse order if `flip`.
 * Returns 0, or -1 if memory ran out. Buffers of an earlier plan are reused. */
int plan_pass(Pass *pass, int inputs, float start, float end, int outputs, int flip);
size_t count_pass_bytes(const Pass *pass); /* that it has allocated, about */
void free_pass(Pass *pass);

/* Arranges the quads of a planned pass, if any, for pixels of `step` bytes. Returns 0, or -1 if memory ran out. */
int plan_blocks(Pass *pass, int step);
void free_blocks(Blocks *blocks);

/* Returns a buffer of at least `bytes`, aligned to vectors: the old one if it is large enough; NULL if memory ran
 * out. */
void *ensure_capacity(void *buffer, size_t *capacity, size_t bytes);

/* Some rows of pixels: input `offset` is the first of each; RGB of `step` bytes, 3 or 4. Up to READ_SLACK bytes after
 * the last of the EXTRA_INPUTS pixels are read too. */
typedef struct {
    const uint8_t *bytes;
    size_t pitch;
    int count, offset, step;
} Lines;

/* The horizontal pass on all lines. `rows`, `stride` apart, receive packed RGB, each followed by up to OUTPUT_SLACK
 * undefined bytes. */
enum { OUTPUT_SLACK = BLOCK_BYTES, READ_SLACK = 2 * VECTOR_BYTES };
void resize_horizontally(const Pass *pass, const Lines *lines, uint8_t *rows, size_t stride);

/* The vertical pass for one output: `rows` begins with input `from`, each of `bytes` bytes, `stride` apart. */
void resize_vertically(const Pass *pass, int output, const uint8_t *rows, size_t stride, int bytes, uint8_t *out);

/* The same for some processors: ROW_GROUP rows at a time horizontally, and at least this many bytes vertically. */
enum { ROW_GROUP = 4, AVX2_BYTES = 32, AVX512_BYTES = VECTOR_BYTES };
#if defined(__x86_64__) && defined(__GNUC__) && !defined(NO_AVX2)
#define HAVE_AVX2 1
void resize_rows_avx2(const Pass *pass, const uint8_t *const from[ROW_GROUP], int offset, int step,
                      uint8_t *const to[ROW_GROUP]);
void resize_vertically_avx2(const Pair *pairs, int n, const uint8_t *rows, size_t stride, int bytes, uint8_t *out);
#ifndef NO_AVX512
#define HAVE_AVX512 1
void resize_rows_avx512(const Pass *pass, const uint8_t *const from[ROW_GROUP], int offset,
                        uint8_t *const to[ROW_GROUP]);
void resize_vertically_avx512(const Quad *quads, int n, const uint8_t *rows, size_t stride, int bytes, uint8_t *out);
#endif
#endif
int has_avx512(void);

#endif
