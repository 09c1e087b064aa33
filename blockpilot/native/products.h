/* Linear products for layers.c and products.py: see products.c. */
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

/* A product to compute: x [rows, inputs] -> out [rows, outputs], x @ weights.T + bias. */
struct batch {
    const struct linear *linear;
    long rows;
    const stored *x;
    stored *out;
};

static inline long panels_of(const struct linear *linear) { return (linear->outputs + PANEL - 1) / PANEL; }

/* `linear` restricted to its outputs from `first` on, a multiple of PANEL. */
static inline struct linear from_output(struct linear linear, long first)
{
    linear.outputs -= first;
    linear.weights += first * (linear.inputs / PER_UNIT);
    linear.bias = linear.bias ? linear.bias + first : linear.bias;
    return linear;
}

/* shares [threads] = initial shares of the threads in the work of `num` batches with weights of the same shape. */
void share_out(const struct linear *linear, long num, long threads, uint64_t *shares);

/* x @ weights.T + bias -> out. All threads of a parallel region must call multiply and multiply_all, with shares for
 * this call only; `product` opens a region itself. */
void multiply(const struct linear *linear, long rows, const stored *x, stored *out, uint64_t *shares, long threads);
void multiply_all(const struct batch *batches, uint64_t *shares, long threads);
void product(const struct linear *linear, long rows, const stored *x, stored *out, int threads);

#define STRETCH 32 /* columns in one tile product */

/* 1 if this process multiplies with tiles. */
int uses_tiles(void);

/* Only if uses_tiles(): attention weights ("chances") [columns, queries], queries FEW or PANEL, rounded to `stored`,
 * times values [columns, dim] -> sums [queries, dim], over the first whole[q] columns of query q, a multiple of
 * STRETCH, at most `columns`. room: buffer of columns * queries numbers. */
void weigh(long columns, long queries, long dim, const float *chances, const long *whole, const stored *values,
           stored *room, float *sums);

/* x [rows, inputs] times the first FEW, LANES or PANEL outputs of one panel -> sums [rows, outputs] in float32. */
void panel_sums(long rows, long inputs, const stored *x, const uint32_t *panel, long outputs, float *sums);
