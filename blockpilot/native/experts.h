/* MLPs of a layer: see experts.c. */
#include "products.h"

/* Mixture of `num` experts, of which every row uses `chosen`; see models/kernels.py. */
struct experts {
    long num, chosen, inner; /* inner: a multiple of 32 */
    int normed; /* 1: the weights of the chosen experts are divided by their sum */
    int gelu; /* 1: `geglu` */
    float limit, alpha; /* of `clamped_swiglu`; limit 0: `swiglu` or `geglu` */
    struct linear router; /* hidden -> num */
    const float *scales; /* factors [num] of the experts' gating weights, or NULL */
    const struct linear *gate_up, *down; /* [num] */
};

/* Buffers of `mix`: pairs = rows * chosen is the number of (row, expert) pairs, num that of experts. */
struct expert_buffers {
    stored *scores; /* [rows, num] */
    float *weights; /* [pairs] */
    int64_t *ids, *indices; /* [pairs]: the pair's expert; its index when sorted by expert */
    stored *x, *gate_up, *gated, *outputs; /* [pairs, hidden], [pairs, 2, inner], [pairs, inner], [pairs, hidden] */
    struct batch *up, *down; /* [num] */
    uint64_t *shares; /* [3, threads] */
};

/* gate_up [rows, 2, inner] -> silu(gate) * up [rows, inner], rounded where transformers rounds. */
void swiglu(long rows, long inner, const stored *gate_up, stored *out);

/* As swiglu, with the tanh approximation of GELU. */
void geglu(long rows, long inner, const stored *gate_up, stored *out);

/* Activation of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), with gate clamped to at most limit and up to [-limit,
 * limit]. */
void clamped_swiglu(long rows, long inner, float limit, float alpha, const stored *gate_up, stored *out);

/* Mixture of experts: x [rows, hidden] -> out [rows, hidden]. routed [rows, hidden], the router's input, may be x; out
 * may be either. All threads of a parallel region must call it. */
void mix(const struct experts *experts, long rows, long hidden, const stored *x, const stored *routed,
         const struct expert_buffers *buffers, stored *out, long threads);
