/* A linear product as layers.c and products.py ask for it: see products.c. */
#include "lanes.h"
#include <omp.h>

#define PANEL 16
#define FEW 4 /* outputs of a panel that is mostly empty */
#define PER_UNIT (4 / (long)sizeof(stored))

struct linear {
    long inputs, outputs; /* inputs: a multiple of 32 */
    const uint32_t *weights; /* [panels, inputs / PER_UNIT, PANEL] */
    const stored *bias; /* [panels, PANEL], or NULL */
};

/* x [rows, inputs] -> out [rows, outputs], x @ weights.T + bias, which is to be multiplied. */
struct batch {
    const struct linear *linear;
    long rows;
    const stored *x;
    stored *out;
};

static inline long panels_of(const struct linear *linear) { return (linear->outputs + PANEL - 1) / PANEL; }

/* Its outputs from a multiple of PANEL on. */
static inline struct linear from_output(struct linear linear, long first)
{
    linear.outputs -= first;
    linear.weights += first * (linear.inputs / PER_UNIT);
    linear.bias = linear.bias ? linear.bias + first : linear.bias;
    return linear;
}

/* What each of so many threads is to multiply of `num` batches of one shape of weights, [threads]. */
void share_out(const struct linear *linear, long num, long threads, uint64_t *shares);

/* All threads of a parallel region call them together, with shares for this call alone; `product` is a region of its
 * own. */
void multiply(const struct linear *linear, long rows, const stored *x, stored *out, uint64_t *shares, long threads);
void multiply_all(const struct batch *batches, uint64_t *shares, long threads);
void product(const struct linear *linear, long rows, const stored *x, stored *out, int threads);

#define STRETCH 32 /* columns that tiles take at once */

/* 1 where this process multiplies with tiles. */
int uses_tiles(void);

/* Only with tiles: chances [columns, queries], queries FEW or PANEL, times values [columns, dim] -> sums [queries, dim],
 * chances rounded to what is stored. Query q counts the first whole[q] columns, a multiple of STRETCH, `columns` at most.
 * room: columns * queries numbers. */
void weigh(long columns, long queries, long dim, const float *chances, const long *whole, const stored *values,
           stored *room, float *sums);

/* x [rows, inputs] times the first outputs of one panel, FEW or all of them -> sums [rows, outputs] in float32. */
void panel_sums(long rows, long inputs, const stored *x, const uint32_t *panel, long outputs, float *sums);
