/* Layers of hybrid targets: gated DeltaNet over chains and trees, and the norms, gates and activations around it and
 * around attention (models/delta_net.py and native_hybrid.py, which have the same structs).
 *
 * Batch invariant: each token is computed separately, in a fixed order, from its parent's state, so it gets the same
 * bits alone, in a chunk of a prompt, in a batch and in a tree. Sums are in float32, for every stored type.
 */
#include "products.h"

#define STRIP 32 /* columns of a state that one thread updates; columns are independent */
#define VECTORS (STRIP / LANES)

struct delta_net {
    long key_heads, value_heads, key_dim, value_dim, kernel; /* dims: multiples of STRIP */
    const stored *taps; /* weights of the convolution [kernel, channels] */
    const float *rates, *time_bias; /* [value_heads] */
    const float *norm; /* [value_dim] */
    float eps;
};

/* States of a layer: the last inputs of the convolution, and the matrices of the recurrence. */
struct states {
    stored *windows; /* [slots, kernel - 1, channels] */
    float *matrices; /* [slots, value_heads, value_dim / STRIP, key_dim, STRIP] */
};

/* Tokens [num] of a forward pass, row by row. A token's sources [kernel] in the convolution are its ancestors and
 * itself, oldest first: numbers below rows * (kernel - 1) are indices into the rows' windows; from there on, tokens. */
struct delta_pass {
    long num, rows;
    const int64_t *sources; /* [num, kernel] */
    const int64_t *parents; /* [num]: index within the row; -1 for its first token */
    const int64_t *sizes, *firsts, *slots; /* [rows] */
    const uint8_t *is_text, *is_chain; /* [rows]: 1 if all tokens are accepted; 1 if parents are the tokens before */
};

/* Inputs of the recurrence and of the norm, for all tokens. */
struct delta_inputs {
    long stride;
    const stored *projected; /* [tokens, stride]: channels, gates of the output, inputs of betas and of decays */
    stored *mixed; /* [tokens, channels]: queries, keys and values after the convolution */
    float *decays, *betas; /* [tokens, value_heads] */
    float *scales; /* [tokens, 2, key_heads]: 1 / norms of queries and keys */
};

static long channels_of(const struct delta_net *net)
{
    return 2 * net->key_heads * net->key_dim + net->value_heads * net->value_dim;
}

/* min(num, LANES) numbers; the other lanes are 0. */
static inline lanes load_some(const stored *from, long num)
{
    if (num >= LANES)
        return load(from);
    stored some[LANES] = {0};
    memcpy(some, from, num * sizeof(stored));
    return load(some);
}

static inline void store_some(lanes x, stored *to, long num)
{
    if (num >= LANES) {
        store(x, to);
        return;
    }
    stored some[LANES];
    store(x, some);
    memcpy(to, some, num * sizeof(stored));
}

static inline lanes load_floats_some(const float *from, long num)
{
    lanes x = {0};
    memcpy(&x, from, (num < LANES ? num : LANES) * sizeof(float));
    return x;
}

static inline lanes sigmoid(lanes x)
{
    return by_logistic((lanes){0} + 1, x);
}

/* 1 / sqrt(mean of the squares of x [num] + eps) */
static float inverse_size(long num, const stored *x, float eps)
{
    lanes squares = {0};
    for (long i = 0; i < num; i += LANES) {
        lanes own = load_some(x + i, num - i);
        squares = fused(own, own, squares);
    }
    return 1 / sqrtf(sum(squares) / num + eps);
}

/* hidden [rows, width] += delta [rows, width], if it is not NULL; out = RMSNorm(hidden) * weight [width]. */
void add_norm_rows(long rows, long width, stored *hidden, const stored *delta, const float *weight, float eps,
                   stored *out, int threads)
{
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        stored *own = hidden + row * width;
        if (delta)
            for (long i = 0; i < width; i += LANES)
                store_some(load_some(own + i, width - i) + load_some(delta + row * width + i, width - i), own + i,
                           width - i);
        float scale = inverse_size(width, own, eps);
        for (long i = 0; i < width; i += LANES)
            store_some(load_some(own + i, width - i) * scale * load_floats_some(weight + i, width - i),
                       out + row * width + i, width - i);
    }
}

/* gate_up [rows, 2, inner] -> silu(gate) * up [rows, inner], rounded where transformers rounds. */
void swiglu_rows(long rows, long inner, const stored *gate_up, stored *out, int threads)
{
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < inner; i += LANES) {
            const stored *own = gate_up + row * 2 * inner + i;
            lanes gate = load_some(own, inner - i), up = load_some(own + inner, inner - i);
            store_some(rounded(gate * sigmoid(gate)) * up, out + row * inner + i, inner - i);
        }
}

/* out [rows, width] += x [rows, width] * sigmoid(gates [rows]), rounded where transformers rounds. */
void add_gated_rows(long rows, long width, const stored *gates, const stored *x, stored *out, int threads)
{
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        lanes gate = rounded(sigmoid((lanes){0} + number(gates + row)));
        const stored *own = x + row * width;
        stored *to = out + row * width;
        for (long i = 0; i < width; i += LANES)
            store_some(load_some(to + i, width - i) + rounded(load_some(own + i, width - i) * gate), to + i, width - i);
    }
}

/* projected [rows, stride] with a query and a gate [dim] for each of `queries` heads, then `kv` keys and values [dim]
 * -> heads [rows, queries + 2 * kv, padded] for layers.c. Queries and keys are normed by `norms` [2, dim], and their
 * channel i is stored at padded_index[i]; values are padded at the end. */
void split_heads(long rows, long stride, const stored *projected, long queries, long kv, long dim, long padded,
                 const int64_t *padded_index, const float *norms, float eps, stored *heads, int threads)
{
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        stored normed[dim];
        for (long head = 0; head < queries + 2 * kv; head++) {
            const stored *from = projected + row * stride + (head < queries ? 2 * head : queries + head) * dim;
            stored *to = heads + (row * (queries + 2 * kv) + head) * padded;
            memset(to, 0, padded * sizeof(stored));
            if (head >= queries + kv) {
                memcpy(to, from, dim * sizeof(stored));
                continue;
            }
            const float *weight = norms + (head < queries ? 0 : dim);
            float scale = inverse_size(dim, from, eps);
            for (long i = 0; i < dim; i += LANES)
                store_some(load_some(from + i, dim - i) * scale * load_floats_some(weight + i, dim - i), normed + i,
                           dim - i);
            for (long i = 0; i < dim; i++)
                to[padded_index[i]] = normed[i];
        }
    }
}

/* attended [rows, queries, padded] * sigmoid(gates in `projected`, see split_heads) -> out [rows, queries, dim]. */
void gate_heads(long rows, long stride, const stored *projected, long queries, long dim, long padded,
                const stored *attended, stored *out, int threads)
{
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < queries; head++)
            for (long i = 0; i < dim; i += LANES) {
                lanes gate = load_some(projected + row * stride + (2 * head + 1) * dim + i, dim - i);
                lanes own = load_some(attended + (row * queries + head) * padded + i, dim - i);
                store_some(own * rounded(sigmoid(gate)), out + (row * queries + head) * dim + i, dim - i);
            }
}

/* Write a token's `mixed` (convolution, then SiLU), decays, betas and scales. */
static void mix_token(const struct delta_net *net, const struct states *states, const struct delta_pass *pass,
                      const struct delta_inputs *inputs, long token)
{
    long channels = channels_of(net), heads = net->value_heads, kept = net->kernel - 1;
    const stored *from[net->kernel], *own = inputs->projected + token * inputs->stride;
    stored *to = inputs->mixed + token * channels;
    for (long tap = 0; tap < net->kernel; tap++) {
        long source = pass->sources[token * net->kernel + tap], place = source - pass->rows * kept;
        if (place >= 0)
            from[tap] = inputs->projected + place * inputs->stride;
        else
            from[tap] = states->windows + (pass->slots[source / kept] * kept + source % kept) * channels;
    }
    for (long i = 0; i < channels; i += LANES) {
        lanes total = {0};
        for (long tap = 0; tap < net->kernel; tap++)
            total = fused(load(from[tap] + i), load(net->taps + tap * channels + i), total);
        total = rounded(total);
        store(total * sigmoid(total), to + i);
    }
    for (long head = 0; head < 2 * net->key_heads; head++) {
        const stored *x = to + head * net->key_dim;
        lanes squares = {0};
        for (long i = 0; i < net->key_dim; i += LANES)
            squares = fused(load(x + i), load(x + i), squares);
        inputs->scales[token * 2 * net->key_heads + head] = 1 / sqrtf(sum(squares) + 1e-6f);
    }
    const stored *of_beta = own + channels + heads * net->value_dim, *of_decay = of_beta + heads;
    for (long head = 0; head < heads; head++) {
        lanes beta = {number(of_beta + head)};
        float time = number(of_decay + head) + net->time_bias[head];
        time = time > 20 ? time : log1pf(expf(time)); /* softplus, as in torch */
        inputs->betas[token * heads + head] = rounded(sigmoid(beta))[0];
        inputs->decays[token * heads + head] = expf(-net->rates[head] * time);
    }
}

/* Recurrence of one token on a strip [key_dim, STRIP] of a state: reads `from` and writes `to`, which may be the same,
 * and, if query is not NULL, the output query @ state [STRIP] to `out`. Delta rule: state *= decay; state += outer(key,
 * beta * (value - key @ state)). */
static inline __attribute__((always_inline)) void advance(
    long key_dim, float decay, float beta, const float *key, const float *query, const stored *value, const float *from,
    float *to, stored *out)
{
    lanes read[VECTORS] = {{0}}, change[VECTORS], total[VECTORS] = {{0}};
    for (long i = 0; i < key_dim; i++)
#pragma GCC unroll 4
        for (long v = 0; v < VECTORS; v++)
            read[v] = fused(load_floats(from + i * STRIP + v * LANES) * decay, spread(key[i]), read[v]);
    for (long v = 0; v < VECTORS; v++)
        change[v] = (load(value + v * LANES) - read[v]) * beta;
    for (long i = 0; i < key_dim; i++)
#pragma GCC unroll 4
        for (long v = 0; v < VECTORS; v++) {
            lanes state = load_floats(from + i * STRIP + v * LANES) * decay;
            state = fused(spread(key[i]), change[v], state);
            memcpy(to + i * STRIP + v * LANES, &state, sizeof state);
            if (query)
                total[v] = fused(state, spread(query[i]), total[v]);
        }
    if (query)
        for (long v = 0; v < VECTORS; v++)
            store(total[v], out + v * LANES);
}

/* out = x [key_dim], a query or key, times inverse (1 / its norm), times `scale`. */
static void unit(long key_dim, const stored *x, float inverse, float scale, float *out)
{
    for (long i = 0; i < key_dim; i += LANES) {
        lanes own = load(x + i) * inverse * scale;
        memcpy(out + i, &own, sizeof own);
    }
}

static void advance_token(const struct delta_net *net, const struct delta_inputs *inputs, long token, long head,
                          long strip, const float *from, float *to, stored *out)
{
    long key_dim = net->key_dim, keys = net->key_heads, group = head * keys / net->value_heads;
    const stored *own = inputs->mixed + token * channels_of(net);
    const float *scales = inputs->scales + token * 2 * keys;
    const stored *value = own + 2 * keys * key_dim + head * net->value_dim + strip * STRIP;
    float decay = inputs->decays[token * net->value_heads + head], beta = inputs->betas[token * net->value_heads + head];
    float key[key_dim], query[key_dim];
    unit(key_dim, own + (keys + group) * key_dim, scales[keys + group], 1, key);
    if (!out) {
        advance(key_dim, decay, beta, key, NULL, value, from, to, NULL);
        return;
    }
    unit(key_dim, own + group * key_dim, scales[group], 1 / sqrtf(key_dim), query);
    advance(key_dim, decay, beta, key, query, value, from, to, out);
}

static float *strip_of(const struct delta_net *net, const struct states *states, long slot, long head, long strip)
{
    long strips = net->value_dim / STRIP;
    return states->matrices + ((slot * net->value_heads + head) * strips + strip) * net->key_dim * STRIP;
}

/* Recurrence of all tokens of a row on one strip. The slot's state is advanced in place by accepted tokens: all of a
 * text, and the anchor, the first token of a block. States after unverified tokens are in `room` [most, key_dim,
 * STRIP]: by the index of the token in a tree; a chain needs only one. */
static void scan_row(const struct delta_net *net, const struct states *states, const struct delta_pass *pass,
                     const struct delta_inputs *inputs, long row, long head, long strip, float *room, stored *out)
{
    long size = net->key_dim * STRIP, width = net->value_heads * net->value_dim;
    float *kept = strip_of(net, states, pass->slots[row], head, strip);
    for (long i = 0; i < pass->sizes[row]; i++) {
        long token = pass->firsts[row] + i, parent = pass->parents[token];
        long one = pass->is_chain[row];
        const float *from = pass->is_text[row] || parent <= 0 ? kept : room + (one ? 0 : parent) * size;
        float *to = pass->is_text[row] || i == 0 ? kept : room + (one ? 0 : i) * size;
        advance_token(net, inputs, token, head, strip, from, to,
                      out + token * width + head * net->value_dim + strip * STRIP);
    }
}

/* RMSNorm of a token's output in each head, times SiLU of its gates, in place. */
static void norm_token(const struct delta_net *net, const stored *gates, stored *out)
{
    for (long head = 0; head < net->value_heads; head++, gates += net->value_dim, out += net->value_dim) {
        float scale = inverse_size(net->value_dim, out, net->eps);
        for (long i = 0; i < net->value_dim; i += LANES) {
            lanes gate = load(gates + i), normed = rounded(load(out + i) * scale);
            normed = rounded(normed * load_floats(net->norm + i));
            store(normed * (gate * sigmoid(gate)), out + i);
        }
    }
}

/* Append the convolution's inputs of `num` tokens to a window [kernel - 1, channels], dropping its oldest ones. They
 * are tokens [num], or, if that is NULL, `num` from `first` on. */
static void append(const struct delta_net *net, const struct delta_inputs *inputs, long num, long first,
                   const int64_t *tokens, stored *window)
{
    long channels = channels_of(net), kept = net->kernel - 1, old = kept > num ? kept - num : 0;
    if (num <= 0)
        return;
    memmove(window, window + (kept - old) * channels, old * channels * sizeof(stored));
    for (long place = old; place < kept; place++) {
        long index = num - (kept - place), token = tokens ? tokens[index] : first + index;
        memcpy(window + place * channels, inputs->projected + token * inputs->stride, channels * sizeof(stored));
    }
}

/* out = one layer's outputs [tokens, value_heads, value_dim], normed and gated; advances the slots' states by accepted
 * tokens. room [threads, most, key_dim, STRIP] is a buffer: most is 1, or the number of tokens of the largest tree. */
void delta_pass(const struct delta_net *net, const struct states *states, const struct delta_pass *pass,
                const struct delta_inputs *inputs, float *room, long most, stored *out, int threads)
{
    long strips = net->value_dim / STRIP, channels = channels_of(net);
#pragma omp parallel num_threads(threads)
    {
        float *own = room + omp_get_thread_num() * most * net->key_dim * STRIP;
#pragma omp for
        for (long token = 0; token < pass->num; token++)
            mix_token(net, states, pass, inputs, token);
#pragma omp for collapse(3) schedule(dynamic)
        for (long row = 0; row < pass->rows; row++)
            for (long head = 0; head < net->value_heads; head++)
                for (long strip = 0; strip < strips; strip++)
                    scan_row(net, states, pass, inputs, row, head, strip, own, out);
#pragma omp for nowait
        for (long row = 0; row < pass->rows; row++)
            append(net, inputs, pass->is_text[row] ? pass->sizes[row] : 1, pass->firsts[row], NULL,
                   states->windows + pass->slots[row] * (net->kernel - 1) * channels);
#pragma omp for
        for (long token = 0; token < pass->num; token++)
            norm_token(net, inputs->projected + token * inputs->stride + channels,
                       out + token * net->value_heads * net->value_dim);
    }
}

/* Advance one layer's states in slots [rows] by accepted tokens of `inputs`: for row r, sizes[r] from tokens[firsts[r]]
 * on. */
void delta_accept(const struct delta_net *net, const struct states *states, const struct delta_inputs *inputs,
                  long rows, const int64_t *slots, const int64_t *sizes, const int64_t *firsts, const int64_t *tokens,
                  int threads)
{
    long strips = net->value_dim / STRIP, channels = channels_of(net);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for collapse(3) schedule(dynamic)
        for (long row = 0; row < rows; row++)
            for (long head = 0; head < net->value_heads; head++)
                for (long strip = 0; strip < strips; strip++) {
                    float *kept = strip_of(net, states, slots[row], head, strip);
                    for (long i = 0; i < sizes[row]; i++)
                        advance_token(net, inputs, tokens[firsts[row] + i], head, strip, kept, kept, NULL);
                }
#pragma omp for
        for (long row = 0; row < rows; row++)
            append(net, inputs, sizes[row], 0, tokens + firsts[row],
                   states->windows + slots[row] * (net->kernel - 1) * channels);
    }
}
