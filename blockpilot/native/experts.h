/* MLPs of a layer: see experts.c. */
#include "products.h"

/* A mixture of `num` experts, of which every row uses `chosen`; see models/kernels.py. */
struct experts {
    long num, chosen, inner; /* inner: a multiple of 32 */
    int normed; /* 1: the weights of the chosen experts are divided by their sum */
    int gelu; /* 1: `geglu` */
    float limit, alpha; /* of `clamped_swiglu`; limit 0: `swiglu` or `geglu` */
    struct linear router; /* hidden -> num */
    const float *scales; /* factors [num] of the weights of experts, or NULL */
    const struct linear *gate_up, *down; /* [num] */
};

/* Buffers for a pass through experts: `pairs` = rows * chosen of rows and experts, `num` experts. */
struct expert_buffers {
    stored *scores; /* [rows, num] */
    float *weights; /* [pairs] */
    int64_t *ids, *indices; /* [pairs]: the expert; the index of the pair, ordered by expert */
    stored *x, *gate_up, *gated, *outputs; /* [pairs, hidden], [pairs, 2, inner], [pairs, inner], [pairs, hidden] */
    struct batch *up, *down; /* [num] */
    uint64_t *shares; /* [3, threads] */
};

/* gate_up [rows, 2, inner] -> silu(gate) * up [rows, inner], rounded where transformers rounds. */
void swiglu(long rows, long inner, const stored *gate_up, stored *out);

/* The same with the tanh approximation of GELU. */
void geglu(long rows, long inner, const stored *gate_up, stored *out);

/* gpt-oss's: gate * logistic(alpha * gate) * (up + 1), with gate at most and up within +-limit. */
void clamped_swiglu(long rows, long inner, float limit, float alpha, const stored *gate_up, stored *out);

/* x [rows, hidden] and the router's input `routed` [rows, hidden], which may be x -> out [rows, hidden], which may be
 * either: all threads of a parallel region call it together. */
void mix(const struct experts *experts, long rows, long hidden, const stored *x, const stored *routed,
         const struct expert_buffers *buffers, stored *out, long threads);
