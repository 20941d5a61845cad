#include <stdlib.h>
#include <string.h>

#include "resize.h"

static int allocate_blocks(Blocks *blocks, int quads) {
    size_t count = (size_t)blocks->count, vectors = count * VECTOR_BYTES;
    blocks->first_input = ensure_capacity(blocks->first_input, &blocks->first_input_capacity, count * sizeof(int));
    blocks->indices = ensure_capacity(blocks->indices, &blocks->index_capacity, vectors);
    blocks->weights = ensure_capacity(blocks->weights, &blocks->weight_capacity, 3 * (size_t)quads * vectors);
    return blocks->first_input && blocks->indices && blocks->weights ? 0 : -1;
}

static int find_first_input(const Pass *pass, int first_output, int last_output) {
    int left = pass->first_input[first_output], right = pass->first_input[last_output];
    return left < right ? left : right; /* they descend if the row is flipped */
}

/* Fills a block; returns the greatest of its indices. Bytes after the last output repeat it. */
static int fill_block(Pass *pass, int block) {
    Blocks *blocks = &pass->blocks;
    int step = blocks->step, start = block * BLOCK_BYTES, last = pass->outputs - 1, greatest = 0;
    int end = (start + BLOCK_BYTES - 1) / 3, first = find_first_input(pass, start / 3, end < last ? end : last);
    uint8_t *index = blocks->indices + (size_t)block * VECTOR_BYTES;
    int8_t *weights = blocks->weights + (size_t)block * 3 * (size_t)pass->quads * VECTOR_BYTES;
    blocks->first_input[block] = first;
    for (int byte = start; byte < start + BLOCK_BYTES; byte++, index += 4, weights += 4) {
        int output = byte / 3 < last ? byte / 3 : last;
        int at = (pass->first_input[output] - first) * step + byte % 3;
        for (int i = 0; i < 4; i++)
            index[i] = (uint8_t)(at + i * step);
        if (at + 3 * step > greatest)
            greatest = at + 3 * step;
        const Quad *quad = pass->quad_weights + (size_t)output * (size_t)pass->quads;
        for (int q = 0; q < pass->quads; q++)
            for (int digit = 0; digit < 3; digit++)
                memcpy(weights + (3 * q + digit) * VECTOR_BYTES, quad[q].digits[digit], 4);
    }
    return greatest;
}

int plan_blocks(Pass *pass, int step) {
    Blocks *blocks = &pass->blocks;
    if (!pass->quads)
        return 0;
    blocks->count = (3 * pass->outputs + BLOCK_BYTES - 1) / BLOCK_BYTES, blocks->step = step, blocks->is_wide = 0;
    if (allocate_blocks(blocks, pass->quads))
        return -1;
    for (int block = 0; block < blocks->count; block++)
        blocks->is_wide |= fill_block(pass, block) >= VECTOR_BYTES;
    return 0;
}

void free_blocks(Blocks *blocks) {
    free(blocks->first_input);
    free(blocks->indices);
    free(blocks->weights);
}
