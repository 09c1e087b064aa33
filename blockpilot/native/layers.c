/* Layers of a decoder, target or draft, in one parallel region: see models/native_layers.py, which has the same
 * structs.
 *
 * Sums and products are in float32, for every stored type. Batch invariant: a row's result does not depend on the other
 * rows. Widths and dim are multiples of 32: others are padded with zeros, in heads at the end of each half.
 */
#include "experts.h"

#define QUERIES PANEL /* queries that read the same keys together, as a panel of a product */
#define SUMS 8 /* queries whose sums over values, of VALUES vectors each, are in registers together */
#define VALUES (LANES / 8)
#define FEW_VALUES 2 /* the same of half as many queries: fewer sums would wait for each other */

typedef float four __attribute__((vector_size(16), may_alias));

/* Norm weights [hidden] of the inputs and outputs of a layer's experts and MLP, which run in parallel. */
struct expert_norms {
    const stored *experts_in, *router_in, *experts_out, *mlp_out;
};

/* Gated per-layer input, added at the end of a layer: projection(gelu(gate(hidden)) * input), normed by weights
 * [hidden]. */
struct inputs {
    struct linear gate, projection;
    const stored *norm;
};

/* Convolution around a sublayer, over the tokens of a block (DFlash 2). A kernel is the sum of a fixed one and a
 * projection of the sublayer's input. */
struct convolution {
    struct linear projection; /* [hidden] -> [2, taps, hidden / group] */
    const stored *fixed; /* [2, taps, hidden] */
    long taps, group; /* channels that share a projected kernel */
};

struct layer {
    struct linear qkv, out, gate_up, down; /* the last two are unused if the layer has experts and no MLP */
    const struct experts *experts; /* or NULL */
    const struct expert_norms *expert_norms; /* if experts and an MLP run in parallel, or NULL */
    const struct inputs *inputs; /* weights of the per-layer input, or NULL */
    const struct convolution *convolutions; /* [2], of attention and of the MLP, or NULL */
    const stored *attention_in, *mlp_in; /* norm weights [hidden] of the inputs of attention and of the MLP */
    const stored *heads; /* norm weights of queries and keys [queries + kv, dim], or NULL */
    const stored *attention_out, *mlp_out; /* norm weights [hidden] of their outputs, or NULL */
    const stored *sinks; /* scores [queries] added to the softmax's denominator, or NULL */
    float scalar; /* factor of the layer's output */
};

/* Shape of a layer; all layers have the same `hidden`. */
struct shape {
    long hidden, queries, kv;
    long made; /* heads of keys and values in `qkv`: 2 * kv; kv if the keys before their norm are also the values; 0 if
                * the layer uses keys and values of an earlier layer */
    long dim, inner;
    long unpadded_hidden, unpadded_dim;
    float eps, scale; /* scale: of attention scores */
    float offset; /* added to norm weights */
    int gelu; /* 1: the MLP's gates are GELU (tanh), 0: SiLU */
    int in_float; /* 1: only the products with norm weights are rounded (Gemma) */
    int norms_values; /* 1: values are normed, without weights */
};

/* Rotary embeddings of a layer for the pass's tokens [num]; the first half of sines is negated. */
struct rotary {
    const stored *cosines, *sines; /* [num, dim] */
};

/* KV cache, and the slots and columns of the pass's tokens [num]. */
struct tokens {
    long num;
    stored *const *caches; /* [layers]: [2, slots, kv, length, dim] */
    long slots, length;
    const int64_t *token_slots, *token_columns; /* [num] */
};

/* Rows that attend together: row r has sizes[r] queries from token firsts[r] on, which attend to slot slots[r]. */
struct part {
    long rows, width, length;
    const int64_t *sizes, *firsts, *slots; /* [rows] */
    const uint8_t *visible; /* [rows, width, length] */
    const int64_t *positions; /* [rows, width] */
};

/* In every lane, the largest of the lanes with the same index modulo 4. */
static inline lanes largest_of_fours(lanes x)
{
#if LANES == 16
    x = larger(x, PICKED(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    return larger(x, PICKED(x, x, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3));
#else
    return larger(x, PICKED(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
#endif
}

/* x [width], of which `num` are not padding -> out = RMSNorm(x) * weight [width], or RMSNorm(x) if weight is NULL,
 * rounded where transformers rounds. */
static inline void norm(const struct shape *shape, long width, long num, const stored *x, const stored *weight,
                        stored *out)
{
    lanes squares = {0};
    for (long i = 0; i < width; i += LANES)
        squares = fused(load(x + i), load(x + i), squares);
    float scale = 1 / sqrtf(sum(squares) / num + shape->eps);
    for (long i = 0; i < width; i += LANES)
        if (!weight)
            store(load(x + i) * scale, out + i);
        else if (shape->in_float)
            store(load(x + i) * scale * (load(weight + i) + shape->offset), out + i);
        else
            store(rounded(load(x + i) * scale) * load(weight + i), out + i);
}

/* hidden [width] = (hidden + delta [width]) * scalar. delta may be NULL; if delta_norm [width] is not NULL, delta is
 * normed in place first. */
static inline void add(const struct shape *shape, stored *hidden, stored *delta, const stored *delta_norm, float scalar)
{
    long width = shape->hidden;
    if (delta && delta_norm)
        norm(shape, width, shape->unpadded_hidden, delta, delta_norm, delta);
    if (delta)
        for (long i = 0; i < width; i += LANES)
            store(load(hidden + i) + load(delta + i), hidden + i);
    if (scalar != 1)
        for (long i = 0; i < width; i += LANES)
            store(load(hidden + i) * scalar, hidden + i);
}

/* `add` of all rows, with delta [rows, hidden] or NULL; then out = RMSNorm(hidden) * weight [hidden]. */
static void add_norm(const struct shape *shape, long rows, stored *hidden, stored *delta, const stored *delta_norm,
                     float scalar, const stored *weight, stored *out)
{
    long width = shape->hidden;
#pragma omp for
    for (long row = 0; row < rows; row++) {
        stored *state = hidden + row * width, *added = delta ? delta + row * width : NULL;
        add(shape, state, added, delta_norm, scalar);
        norm(shape, width, shape->unpadded_hidden, state, weight, out + row * width);
    }
}

static int is_finite(long dim, const stored *x)
{
    ints broken = {0};
    for (long i = 0; i < dim; i += LANES)
        broken |= load(x + i) - load(x + i) != 0; /* NaN and infinity */
    return !any(broken);
}

/* heads [tokens, queries + made, dim]: norm queries and keys, if norms is not NULL, rotate them in place, and store
 * keys and values in the layer's cache. Values that are not finite are stored as 0 with a key of NaN: queries that
 * attend to them get NaN; masked queries, which multiply the value by 0, do not. */
static void rotate_and_store(const struct tokens *tokens, const struct rotary *rotary, const struct shape *shape,
                             long queries, const stored *norms, stored *cache, stored *heads)
{
    long dim = shape->dim, half = dim / 2, all = queries + shape->made, kv = shape->made ? shape->kv : 0;
    long head_size = tokens->length * dim, slot_size = shape->kv * head_size, kind_size = tokens->slots * slot_size;
#pragma omp for
    for (long token = 0; token < tokens->num; token++) {
        const stored *cosine = rotary->cosines + token * dim, *sine = rotary->sines + token * dim;
        stored *keys = cache + tokens->token_slots[token] * slot_size + tokens->token_columns[token] * dim;
        for (long head = 0; head < kv; head++) { /* values first: they may be the keys before their norm */
            const stored *from = heads + (token * all + all - kv + head) * dim;
            stored *to = keys + kind_size + head * head_size;
            if (shape->norms_values)
                norm(shape, dim, shape->unpadded_dim, from, NULL, to);
            else
                memcpy(to, from, dim * sizeof(stored));
        }
        for (long head = 0; head < queries + kv; head++) {
            stored *vector = heads + (token * all + head) * dim;
            if (norms)
                norm(shape, dim, shape->unpadded_dim, vector, norms + head * dim, vector);
            for (long i = 0; i < half; i += LANES) {
                lanes first = load(vector + i), second = load(vector + half + i);
                store(fused(first, load(cosine + i), second * load(sine + i)), vector + i);
                store(fused(second, load(cosine + half + i), first * load(sine + half + i)), vector + half + i);
            }
        }
        for (long head = 0; head < kv; head++) {
            stored *key = keys + head * head_size, *value = key + kind_size;
            memcpy(key, heads + (token * all + queries + head) * dim, dim * sizeof(stored));
            if (!is_finite(dim, value)) {
                memset(value, 0, dim * sizeof(stored));
                store((lanes){0} + NAN, key);
            }
        }
    }
}

/* panel [units, QUERIES] = `num` queries [dim], padded with 0. */
static void pack(long num, long dim, const stored *const *queries, uint32_t *panel)
{
    long units = dim / PER_UNIT;
    memset(panel, 0, units * QUERIES * sizeof *panel);
    for (long q = 0; q < num; q++)
        for (long unit = 0; unit < units; unit++)
            memcpy(panel + unit * QUERIES + q, queries[q] + unit * PER_UNIT, sizeof *panel);
}

/* Softmax before normalisation, in place: scores [length, stride] -> e^(scale * (score - top)), and for each query its
 * top and total [stride]. stride is FEW, LANES or QUERIES; scores has room up to a multiple of LANES. */
static inline __attribute__((always_inline)) void exponentials(long length, const long stride, float scale,
                                                               float *scores, float *tops, float *totals)
{
    lanes top[PANEL / LANES];
    long vectors = stride < LANES ? 1 : stride / LANES, end = (length * stride + LANES - 1) / LANES * LANES;
    for (long i = length * stride; i < end; i++)
        scores[i] = -INFINITY;
    for (long v = 0; v < vectors; v++) {
        top[v] = *(const lanes *)(scores + v * LANES);
        for (long i = v * LANES; i < end; i += vectors * LANES)
            top[v] = larger(top[v], *(const lanes *)(scores + i));
        if (stride < LANES)
            top[v] = largest_of_fours(top[v]);
    }
    lanes total[PANEL / LANES] = {0};
    for (long i = 0; i < end; i += vectors * LANES)
        for (long v = 0; v < vectors; v++) {
            lanes *score = (lanes *)(scores + i + v * LANES);
            *score = exponential((*score - top[v]) * scale);
            total[v] += *score;
        }
    if (stride < LANES) { /* add one by one, in the order of the columns */
        *(four *)total = (four){0};
        for (long column = 0; column < length; column++)
            *(four *)total += ((const four *)scores)[column];
    }
    memcpy(tops, top, stride * sizeof(float));
    memcpy(totals, total, stride * sizeof(float));
}

/* sums [num, dim] += attention weights ("chances") of `num` queries [length, stride] times values [length, dim], from
 * column `from` on. Added in the order of the columns: masked ones add 0, so a token of a tree gets the same bits as in
 * a text. */
static inline __attribute__((always_inline)) void add_values(
    const long num, const long vectors, long dim, long from, long length, const float *chances, const long stride,
    const stored *values, float *sums)
{
    for (long first = 0; first < dim; first += vectors * LANES) {
        lanes sum[SUMS][FEW_VALUES];
        for (long q = 0; q < num; q++)
            memcpy(sum[q], sums + q * dim + first, vectors * sizeof(lanes));
        for (long column = from; column < length; column++) {
            const stored *vector = values + column * dim + first;
#pragma GCC unroll 2
            for (long v = 0; v < vectors; v++) {
                lanes value = load(vector + v * LANES);
#pragma GCC unroll 8
                for (long q = 0; q < num; q++)
                    sum[q][v] = fused(spread(chances[column * stride + q]), value, sum[q][v]);
            }
        }
        for (long q = 0; q < num; q++)
            memcpy(sums + q * dim + first, sum[q], vectors * sizeof(lanes));
    }
}

/* Number of leading columns, of `seen`, that tiles may sum in another order: whole stretches that a token at this
 * position attends to in a text as in any tree, because trees are less deep than a stretch. */
static long whole_columns(long position, long seen)
{
    long last = position + 1 < seen ? position + 1 : seen, stretches = uses_tiles() ? last / STRETCH - 1 : 0;
    return stretches > 0 ? stretches * STRETCH : 0;
}

/* sums [num, dim] = weighted values of `num` queries, at most `stride`; tiles sum the first whole[q] columns.
 * Overwrites chances. */
static inline __attribute__((always_inline)) void sum_values(
    long num, const long stride, long dim, long length, float *chances, const long *whole, const stored *values,
    float *sums)
{
    long least = whole[0], most = whole[0];
    for (long q = 1; q < num; q++) {
        least = whole[q] < least ? whole[q] : least;
        most = whole[q] > most ? whole[q] : most;
    }
    memset(sums, 0, stride * dim * sizeof *sums);
    if (most)
        weigh(most, stride, dim, chances, whole, values, (stored *)(chances + (length * stride / LANES + 1) * LANES), sums);
    for (long q = 0; q < num; q++)
        for (long column = least; column < whole[q]; column++)
            chances[column * stride + q] = 0;
    for (long first = 0; first < num; first += SUMS)
        if (num - first <= SUMS / 2)
            add_values(SUMS / 2, FEW_VALUES, dim, least, length, chances + first, stride, values, sums + first * dim);
        else
            add_values(SUMS, VALUES, dim, least, length, chances + first, stride, values, sums + first * dim);
}

/* Attention of `num` queries, at most `stride`, with masks [length], to one head of keys and values [length, dim].
 * sinks: of the queries, or NULL. scores: buffer of 2 * `stride` numbers per column, and LANES more. */
static inline __attribute__((always_inline)) void attend_some(
    long num, const long stride, long dim, float scale, long length, const stored *const *queries, const stored *keys,
    const stored *values, const uint8_t *const *masks, const stored *const *sinks, const long *whole, float *scores,
    stored *const *out)
{
    uint32_t panel[dim / PER_UNIT * QUERIES] __attribute__((aligned(64)));
    float sums[stride * dim] __attribute__((aligned(64)));
    float tops[stride], totals[stride];
    pack(num, dim, queries, panel);
    panel_sums(length, dim, keys, panel, stride, scores);
    for (long q = 0; q < num; q++) {
        const uint8_t *hidden = memchr(masks[q], 0, length);
        for (long column = hidden ? hidden - masks[q] : length; column < length; column++)
            if (!masks[q][column])
                scores[column * stride + q] = -INFINITY;
    }
    exponentials(length, stride, scale, scores, tops, totals);
    for (long q = 0; sinks && q < num; q++)
        totals[q] += expf(number(sinks[q]) - scale * tops[q]);
    sum_values(num, stride, dim, length, scores, whole, values, sums);
    for (long q = 0; q < num; q++)
        for (long i = 0; i < dim; i += LANES)
            store(*(const lanes *)(sums + q * dim + i) / totals[q], out[q] + i);
}

enum { FETCHED = 1 << 15 }; /* numbers that stay in the level 2 cache until they are read */

/* Prefetch the first of `num` numbers that are read soon: otherwise each read would wait for memory separately. */
static void fetch(const stored *from, long num)
{
    for (long i = 0; i < num && i < FETCHED; i += 64 / sizeof(stored))
        __builtin_prefetch(from + i);
}

/* One past the last visible column of a mask, of `length`; 0 if none is. */
static long end_of(const uint8_t *mask, long length)
{
    for (uint64_t word; length >= 8; length -= 8) { /* masks are as long as the longest row's: many columns are 0 */
        memcpy(&word, mask + length - 8, 8);
        if (word)
            break;
    }
    while (length > 0 && !mask[length - 1])
        length--;
    return length;
}

/* One past the last column, of `length`, that is visible in any of the masks; 0 if none is. */
static long seen_of(long num, const uint8_t *const *masks, long length)
{
    long seen = 0;
    for (long q = 0; q < num; q++) {
        long end = end_of(masks[q], length);
        seen = end > seen ? end : seen;
    }
    return seen;
}

/* Number of columns, of `length`, before the first that is visible in any of the masks, rounded down to whole
 * stretches: skipping them changes no sum. */
static long unseen_of(long num, const uint8_t *const *masks, long length)
{
    long unseen = length;
    for (long q = 0; q < num && unseen; q++) {
        const uint8_t *first = memchr(masks[q], 1, unseen);
        unseen = first ? first - masks[q] : unseen;
    }
    return unseen / STRETCH * STRETCH;
}

/* Attention of the queries in heads [tokens, queries + made, dim] to the cache of the layer -> out [tokens, queries,
 * dim]. sinks [queries], or NULL. scores [threads, room, 2 * QUERIES], aligned to 64 bytes, with room > length. */
static void attend(const struct part *part, const struct tokens *tokens, const struct shape *shape,
                   const stored *cache, const stored *heads, const stored *sinks, float *scores, long room, stored *out)
{
    long kv = shape->kv, groups = shape->queries / kv, dim = shape->dim, all = shape->queries + shape->made;
    long chunks = (part->width * groups + QUERIES - 1) / QUERIES, head_size = tokens->length * dim;
#pragma omp for collapse(3) schedule(dynamic)
    for (long row = 0; row < part->rows; row++)
        for (long head = 0; head < kv; head++)
            for (long chunk = 0; chunk < chunks; chunk++) {
                long first = chunk * QUERIES, num = part->sizes[row] * groups - first;
                if (num <= 0)
                    continue;
                num = num < QUERIES ? num : QUERIES;
                const stored *query[QUERIES], *sink[QUERIES];
                const uint8_t *mask[QUERIES];
                stored *result[QUERIES];
                long num_whole[QUERIES] = {0};
                for (long q = 0; q < num; q++) {
                    long token = (first + q) / groups, query_head = head * groups + (first + q) % groups;
                    query[q] = heads + ((part->firsts[row] + token) * all + query_head) * dim;
                    result[q] = out + ((part->firsts[row] + token) * groups * kv + query_head) * dim;
                    mask[q] = part->visible + (row * part->width + token) * part->length;
                    sink[q] = sinks ? sinks + query_head : NULL;
                }
                const stored *key = cache + (part->slots[row] * kv + head) * head_size;
                const stored *value = key + tokens->slots * kv * head_size;
                float *scratch = scores + omp_get_thread_num() * room * 2 * QUERIES;
                long seen = seen_of(num, mask, part->length), unseen = unseen_of(num, mask, seen);
                for (long q = 0; q < num; q++) {
                    long last = whole_columns(part->positions[row * part->width + (first + q) / groups], seen);
                    num_whole[q] = last > unseen ? last - unseen : 0;
                    mask[q] += unseen;
                }
                key += unseen * dim, value += unseen * dim, seen -= unseen;
                if (chunk == 0)
                    fetch(key, seen * dim), fetch(value, seen * dim);
                const stored *const *row_sinks = sinks ? sink : NULL;
                if (num <= FEW)
                    attend_some(num, FEW, dim, shape->scale, seen, query, key, value, mask, row_sinks, num_whole,
                                scratch, result);
                else if (LANES < QUERIES && num <= LANES)
                    attend_some(num, LANES, dim, shape->scale, seen, query, key, value, mask, row_sinks, num_whole,
                                scratch, result);
                else
                    attend_some(num, QUERIES, dim, shape->scale, seen, query, key, value, mask, row_sinks, num_whole,
                                scratch, result);
            }
}

/* 1 if all slots and columns are in the cache. */
static int fits(const struct tokens *tokens)
{
    for (long token = 0; token < tokens->num; token++)
        if (tokens->token_slots[token] < 0 || tokens->token_slots[token] >= tokens->slots
            || tokens->token_columns[token] < 0 || tokens->token_columns[token] >= tokens->length)
            return 0;
    return 1;
}

/* Copy the hidden states after a layer [tokens, hidden] to features [tokens, num_kept, hidden], if `kept` has the
 * layer. */
static void keep(long layer, long num_kept, const int64_t *kept, long tokens, long hidden, const stored *from,
                 stored *features)
{
    for (long place = 0; place < num_kept; place++)
        if (kept[place] == layer) {
#pragma omp for
            for (long token = 0; token < tokens; token++)
                memcpy(features + (token * num_kept + place) * hidden, from + token * hidden, hidden * sizeof(stored));
        }
}

/* output [rows, hidden], of the MLP, = norm(output) + norm(experts(hidden [rows, hidden])). x, routed: buffers [rows,
 * hidden]. */
static void add_experts(const struct shape *shape, const struct layer *layer, long rows, const stored *hidden, stored *x,
                        stored *routed, const struct expert_buffers *buffers, stored *output, long threads)
{
    const struct expert_norms *norms = layer->expert_norms;
    long width = shape->hidden, unpadded = shape->unpadded_hidden;
#pragma omp for
    for (long row = 0; row < rows; row++) {
        norm(shape, width, unpadded, hidden + row * width, norms->experts_in, x + row * width);
        norm(shape, width, unpadded, hidden + row * width, norms->router_in, routed + row * width);
    }
    mix(layer->experts, rows, width, x, routed, buffers, x, threads);
#pragma omp for
    for (long row = 0; row < rows; row++) {
        stored *added = x + row * width, *to = output + row * width;
        norm(shape, width, unpadded, added, norms->experts_out, added);
        norm(shape, width, unpadded, to, norms->mlp_out, to);
        for (long i = 0; i < width; i += LANES)
            store(load(to + i) + load(added + i), to + i);
    }
}

/* hidden [rows, hidden] += the MLP's output `output` [rows, hidden], normed by mlp_out. Then output = what the
 * per-layer inputs add (struct inputs), before its norm; row r's input is at inputs + r * stride. gated: buffer [rows,
 * numbers of an input]. */
static void add_inputs(const struct shape *shape, const struct inputs *weights, long rows, const stored *inputs,
                       long stride, stored *hidden, const stored *mlp_out, stored *gated, stored *output,
                       uint64_t *gate_shares, uint64_t *projection_shares, long threads)
{
    long width = shape->hidden, num = weights->gate.outputs;
#pragma omp for
    for (long row = 0; row < rows; row++)
        add(shape, hidden + row * width, output + row * width, mlp_out, 1);
    multiply(&weights->gate, rows, hidden, gated, gate_shares, threads);
#pragma omp for
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < num; i += LANES) {
            stored *gate = gated + row * num + i;
            store(rounded(gelu(load(gate))) * load(inputs + row * stride + i), gate);
        }
    multiply(&weights->projection, rows, gated, output, projection_shares, threads);
}

/* Projected kernels of LANES channels from `first` on; `group` channels share one of `groups`. */
static inline lanes kernels_of(const stored *projected, long first, long group, long groups)
{
    float kernel[LANES];
    long step = group % LANES ? 1 : LANES;
    for (long lane = 0; lane < LANES; lane += step) {
        long index = (first + lane) / group;
        kernel[lane] = number(projected + (index < groups ? index : groups - 1)); /* padding is multiplied by 0 */
    }
    return step > 1 ? spread(kernel[0]) : load_floats(kernel);
}

/* x [tokens, hidden] -> out: for every token the sum over taps t of a kernel times the token t before it in its row.
 * side: 0 for the sublayer's input, 1 for its output. projected: kernels [tokens, 2, taps, hidden / group]. */
static void convolve(const struct shape *shape, const struct convolution *convolution, long side, long num_parts,
                     const struct part *parts, const stored *projected, const stored *x, stored *out)
{
    long width = shape->hidden, groups = shape->unpadded_hidden / convolution->group;
    for (const struct part *part = parts; part < parts + num_parts; part++)
#pragma omp for
        for (long row = 0; row < part->rows; row++)
            for (long offset = 0; offset < part->sizes[row]; offset++) {
                long token = part->firsts[row] + offset;
                const stored *kernels = projected + token * convolution->projection.outputs;
                for (long i = 0; i < width; i += LANES) {
                    lanes total = {0};
                    for (long tap = 0; tap < convolution->taps && tap <= offset; tap++) {
                        long kernel = side * convolution->taps + tap;
                        lanes both = load(convolution->fixed + kernel * width + i)
                                     + kernels_of(kernels + kernel * groups, i, convolution->group, groups);
                        total = fused(both, load(x + (token - tap) * width + i), total);
                    }
                    store(total, out + token * width + i);
                }
            }
}

/* Run all layers on hidden [tokens, hidden], in place; x is its norm after the last layer, by `last` [hidden];
 * features: see keep. shapes, rotaries [layers]; parts [layers] of num_parts each. The first layer's queries, keys and
 * values are computed from `given`, or from normed hidden if that is NULL. inputs [tokens, layers, numbers of an
 * input]: per-layer inputs, for layers that have them. Returns 0, or -1, before anything is written, if a slot or
 * column is outside the cache.
 *
 * Buffers, large enough for all layers: x [tokens, hidden], heads [tokens, queries + made, dim], attended [tokens,
 * queries, dim], output [tokens, hidden], gate_up [tokens, 2, inner], gated [tokens, inner], routed [tokens, hidden] if
 * experts and an MLP run in parallel, projected (see convolve) and convolved [tokens, hidden] if there are
 * convolutions, scores (see attend), and `buffers` if there are experts. */
int run_layers(long num_layers, const struct shape *shapes, const struct layer *layers, const stored *last,
               const struct tokens *tokens, const struct rotary *rotaries, long num_parts,
               const struct part *const *parts, const stored *given, const stored *inputs, stored *hidden, stored *x,
               stored *heads, stored *attended, stored *output, stored *gate_up, stored *gated, stored *routed,
               stored *projected, stored *convolved, float *scores, long room, const struct expert_buffers *buffers,
               long num_kept, const int64_t *kept, stored *features, int threads)
{
    long num = tokens->num, width = shapes->hidden;
    uint64_t shares[num_layers][8][threads];
    if (!fits(tokens))
        return -1;
    for (long i = 0; i < num_layers; i++) {
        share_out(&layers[i].qkv, 1, threads, shares[i][0]);
        share_out(&layers[i].out, 1, threads, shares[i][1]);
        share_out(&layers[i].gate_up, 1, threads, shares[i][2]);
        share_out(&layers[i].down, 1, threads, shares[i][3]);
        if (layers[i].inputs) {
            share_out(&layers[i].inputs->gate, 1, threads, shares[i][4]);
            share_out(&layers[i].inputs->projection, 1, threads, shares[i][5]);
        }
        for (long c = 0; layers[i].convolutions && c < 2; c++)
            share_out(&layers[i].convolutions[c].projection, 1, threads, shares[i][6 + c]);
    }
#pragma omp parallel num_threads(threads)
    {
        const stored *delta_norm = NULL;
        stored *delta = NULL; /* added to hidden before the next norm */
        float scalar = 1;
        for (long i = 0; i < num_layers; i++) {
            const struct layer *layer = layers + i;
            const struct shape *shape = shapes + i;
            const struct convolution *around_attention = layer->convolutions;
            const struct convolution *around_mlp = around_attention ? around_attention + 1 : NULL;
            const stored *read = x;
            if (!i && given)
                read = given;
            else
                add_norm(shape, num, hidden, delta, delta_norm, scalar, layer->attention_in, x);
            keep(i - 1, num_kept, kept, num, width, hidden, features);
            if (around_attention) {
                multiply(&around_attention->projection, num, x, projected, shares[i][6], threads);
                convolve(shape, around_attention, 0, num_parts, parts[i], projected, x, convolved);
                read = convolved;
            }
            multiply(&layer->qkv, num, read, heads, shares[i][0], threads);
            rotate_and_store(tokens, rotaries + i, shape, shape->queries, layer->heads, tokens->caches[i], heads);
            for (long part = 0; part < num_parts; part++)
                attend(parts[i] + part, tokens, shape, tokens->caches[i], heads, layer->sinks, scores, room, attended);
            multiply(&layer->out, num, attended, output, shares[i][1], threads);
            delta = output, read = x;
            if (around_attention) {
                convolve(shape, around_attention, 1, num_parts, parts[i], projected, output, convolved);
                delta = convolved;
            }
            add_norm(shape, num, hidden, delta, layer->attention_out, 1, layer->mlp_in, x);
            delta_norm = layer->mlp_out, scalar = layer->scalar, delta = output;
            if (layer->experts && !layer->expert_norms) {
                mix(layer->experts, num, width, x, x, buffers, output, threads);
                continue;
            }
            if (around_mlp) {
                multiply(&around_mlp->projection, num, x, projected, shares[i][7], threads);
                convolve(shape, around_mlp, 0, num_parts, parts[i], projected, x, convolved);
                read = convolved;
            }
            multiply(&layer->gate_up, num, read, gate_up, shares[i][2], threads);
            (shape->gelu ? geglu : swiglu)(num, shape->inner, gate_up, gated);
            multiply(&layer->down, num, gated, output, shares[i][3], threads);
            if (around_mlp) {
                convolve(shape, around_mlp, 1, num_parts, parts[i], projected, output, convolved);
                delta = convolved;
            }
            if (layer->expert_norms)
                add_experts(shape, layer, num, hidden, x, routed, buffers, output, threads);
            if (layer->inputs) {
                long size = layer->inputs->gate.outputs;
                add_inputs(shape, layer->inputs, num, inputs + i * size, num_layers * size, hidden, delta_norm, gated,
                           output, shares[i][4], shares[i][5], threads);
                delta_norm = layer->inputs->norm;
            }
        }
        add_norm(shapes, num, hidden, delta, delta_norm, scalar, last, x);
        keep(num_layers - 1, num_kept, kept, num, width, x, features); /* normed, as in transformers */
    }
    return 0;
}

/* x [tokens, hidden] = the product of features [tokens, inputs], normed by `norms` [hidden]: the draft's context.
 * Stores each layer's keys and values of x in its cache. heads [tokens, made, dim] is a buffer. Returns as
 * run_layers. */
int project_layers(long num_layers, const struct shape *shapes, const struct layer *layers,
                   const struct tokens *tokens, const struct rotary *rotary, const struct linear *product,
                   const stored *norms, const stored *features, stored *x, stored *heads, int threads)
{
    uint64_t shares[num_layers + 1][threads];
    if (!fits(tokens))
        return -1;
    for (long i = 0; i < num_layers; i++) {
        struct linear kv = from_output(layers[i].qkv, shapes[i].queries * shapes[i].dim);
        share_out(&kv, 1, threads, shares[i]);
    }
    share_out(product, 1, threads, shares[num_layers]);
#pragma omp parallel num_threads(threads)
    {
        long width = shapes->hidden;
        multiply(product, tokens->num, features, x, shares[num_layers], threads);
#pragma omp for
        for (long token = 0; token < tokens->num; token++)
            norm(shapes, width, shapes->unpadded_hidden, x + token * width, norms, x + token * width);
        for (long i = 0; i < num_layers; i++) {
            long skipped = shapes[i].queries * shapes[i].dim;
            struct linear kv = from_output(layers[i].qkv, skipped);
            const stored *key_norms = layers[i].heads ? layers[i].heads + skipped : NULL;
            multiply(&kv, tokens->num, x, heads, shares[i], threads);
            rotate_and_store(tokens, rotary, shapes + i, 0, key_norms, tokens->caches[i], heads);
        }
    }
    return 0;
}

/* Attention of one layer: heads [tokens, queries + made, dim] -> attended [tokens, queries, dim]; stores their keys and
 * values in layer `layer` of the cache. Returns as run_layers. */
int attend_layer(const struct shape *shape, const struct tokens *tokens, const struct rotary *rotary, long layer,
                 long num_parts, const struct part *parts, stored *heads, float *scores, long room, stored *attended,
                 int threads)
{
    stored *cache = tokens->caches[layer];
    if (!fits(tokens))
        return -1;
#pragma omp parallel num_threads(threads)
    {
        rotate_and_store(tokens, rotary, shape, shape->queries, NULL, cache, heads);
        for (long part = 0; part < num_parts; part++)
            attend(parts + part, tokens, shape, cache, heads, NULL, scores, room, attended);
    }
    return 0;
}
