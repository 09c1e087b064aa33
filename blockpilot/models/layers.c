/* The layers of a decoder, target or draft, in one parallel region: see native_layers.py, which has the same structs.
 *
 * Whatever is stored, sums and products are of float32. What a row gives does not depend on the rows beside it.
 * Widths are multiples of 32 and head_dim is, too.
 */
#include "products.h"

#define QUERIES 4 /* that read the same keys at once: their sums over values fill the registers */

struct layer {
    struct linear qkv, out, gate_up, down;
    const stored *before, *after; /* weights of its norms [hidden] */
    const stored *of_heads; /* of the norms of queries and keys [queries + kv, dim], or NULL */
};

struct shape {
    long layers, hidden, queries, kv, dim, inner;
    float eps;
};

/* Keys and values, and where those of the pass's tokens [num] go; the first half of sines is negated. */
struct tokens {
    long num;
    const stored *cosines, *sines; /* [num, dim] */
    stored *cache; /* [layers, 2, slots, kv, length, dim] */
    long slots, length;
    const int64_t *own_slots, *own_columns; /* [num] */
};

/* Rows that attend together: row r has sizes[r] queries from token firsts[r] on, to slots[r]. */
struct part {
    long rows, width, length;
    const int64_t *sizes, *firsts, *slots; /* [rows] */
    const uint8_t *visible; /* [rows, width, length] */
};

/* Sums of four vectors, of vector i in lane i * LANES / 4: halves are added to halves, then quarters, and so on. */
static inline lanes sums(lanes a, lanes b, lanes c, lanes d)
{
#if LANES == 16
    lanes ab = PICKED(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
             + PICKED(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    lanes cd = PICKED(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
             + PICKED(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    lanes all = PICKED(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
              + PICKED(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    all += PICKED(all, all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return all + PICKED(all, all, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#else
    lanes ab = PICKED(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + PICKED(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    lanes cd = PICKED(c, d, 0, 1, 2, 3, 8, 9, 10, 11) + PICKED(c, d, 4, 5, 6, 7, 12, 13, 14, 15);
    lanes all = PICKED(ab, cd, 0, 1, 4, 5, 8, 9, 12, 13) + PICKED(ab, cd, 2, 3, 6, 7, 10, 11, 14, 15);
    return all + PICKED(all, all, 1, 0, 3, 2, 5, 4, 7, 6);
#endif
}

static inline float sum(lanes x) { return sums(x, x, x, x)[0]; }

static inline lanes exponential(lanes x) /* e^x for x <= 0, relative error 2e-7; 0 below -87; NaN stays */
{
    lanes limited = chosen(x < -87, (lanes){0} - 87, x);
    ints power = __builtin_convertvector(limited * 1.44269504f + 127.5f, ints) - 127; /* rounded: it is positive */
    lanes whole = __builtin_convertvector(power, lanes);
    lanes rest = limited - whole * 0.693359375f + whole * 2.12194440e-4f;
    lanes y = rest * 1.9875691500e-4f + 1.3981999507e-3f; /* Cephes */
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1;
    lanes found = chosen(x < -87, (lanes){0}, y * (lanes)((power + 127) << 23));
    return chosen(x == x, found, x);
}

/* x [width] -> RMSNorm(x) * weight [width], rounded where transformers rounds. */
static inline void norm(long width, const stored *x, const stored *weight, float eps, stored *out)
{
    lanes squares = {0};
    for (long i = 0; i < width; i += LANES)
        squares += load(x + i) * load(x + i);
    float scale = 1 / sqrtf(sum(squares) / width + eps);
    for (long i = 0; i < width; i += LANES)
        store(rounded(load(x + i) * scale) * load(weight + i), out + i);
}

/* Of all rows: hidden += delta [rows, width], where there is one; out = RMSNorm(hidden) * weight [width]. */
static void add_norm(long rows, long width, stored *hidden, const stored *delta, const stored *weight, float eps,
                     stored *out)
{
#pragma omp for
    for (long row = 0; row < rows; row++) {
        stored *own = hidden + row * width;
        if (delta)
            for (long i = 0; i < width; i += LANES)
                store(load(own + i) + load(delta + row * width + i), own + i);
        norm(width, own, weight, eps, out + row * width);
    }
}

/* gate_up [rows, 2, inner] -> silu(gate) * up [rows, inner], rounded where transformers rounds. */
static void swiglu(long rows, long inner, const stored *gate_up, stored *out)
{
#pragma omp for
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < inner; i += LANES) {
            lanes gate = load(gate_up + row * 2 * inner + i), up = load(gate_up + (row * 2 + 1) * inner + i);
            lanes small = exponential(chosen(gate > 0, -gate, gate)); /* at most 1 */
            lanes silu = gate * chosen(gate > 0, (lanes){0} + 1, small) / (1 + small);
            store(rounded(silu) * up, out + row * inner + i);
        }
}

/* heads [tokens, queries + 2 * kv, dim]: norm queries and keys, where there are norms, rotate them, and store keys and
 * values in the cache of the layer. */
static void rotate_and_store(const struct tokens *tokens, long queries, long kv, long dim, const stored *norms,
                             float eps, long layer, stored *heads)
{
    long half = dim / 2, all = queries + 2 * kv, each = tokens->length * dim; /* a head of a slot */
#pragma omp for
    for (long token = 0; token < tokens->num; token++) {
        const stored *cosine = tokens->cosines + token * dim, *sine = tokens->sines + token * dim;
        for (long head = 0; head < queries + kv; head++) {
            stored *own = heads + (token * all + head) * dim;
            if (norms)
                norm(dim, own, norms + head * dim, eps, own);
            for (long i = 0; i < half; i += LANES) {
                lanes first = load(own + i), second = load(own + half + i);
                store(first * load(cosine + i) + second * load(sine + i), own + i);
                store(second * load(cosine + half + i) + first * load(sine + half + i), own + half + i);
            }
        }
        for (long head = 0; head < 2 * kv; head++) {
            long of_slot = (layer * 2 + head / kv) * tokens->slots + tokens->own_slots[token];
            stored *to = tokens->cache + (of_slot * kv + head % kv) * each + tokens->own_columns[token] * dim;
            memcpy(to, heads + (token * all + queries + head) * dim, dim * sizeof(stored));
        }
    }
}

/* Up to QUERIES queries of one head of keys and values [length, dim], each with its mask [length]: softmax of their
 * products over what they see, times the values. scores [QUERIES, room], room a multiple of LANES. */
static inline __attribute__((always_inline)) void attend_some(
    long num, const long dim, long length, const stored *const *queries, const stored *keys, const stored *values,
    const uint8_t *const *masks, float scale, float *scores, long room, stored *const *out)
{
    lanes query[QUERIES][dim / LANES];
    float total[QUERIES] = {0};
    for (long q = 0; q < QUERIES; q++)
        for (long i = 0; i < dim / LANES; i++)
            query[q][i] = load(queries[q < num ? q : 0] + i * LANES) * scale;
    for (long column = 0; column < length; column++) {
        lanes score[QUERIES] = {0};
#pragma GCC unroll 8
        for (long i = 0; i < dim / LANES; i++) {
            lanes key = load(keys + column * dim + i * LANES);
#pragma GCC unroll 4
            for (long q = 0; q < QUERIES; q++)
                score[q] += query[q][i] * key;
        }
        lanes found = sums(score[0], score[1], score[2], score[3]);
        for (long q = 0; q < QUERIES; q++)
            scores[q * room + column] = found[q * LANES / QUERIES];
    }
    for (long q = 0; q < num; q++) {
        float *own = scores + q * room, top = -INFINITY;
        for (long column = 0; column < room; column++)
            own[column] = column < length && masks[q][column] ? own[column] : -INFINITY;
        lanes highest = {0};
        highest -= INFINITY;
        for (long column = 0; column < room; column += LANES) {
            lanes score = *(const lanes *)(own + column);
            highest = chosen(score > highest, score, highest);
        }
        for (long i = 0; i < LANES; i++)
            top = highest[i] > top ? highest[i] : top;
        for (long column = 0; column < room; column += LANES) {
            lanes *score = (lanes *)(own + column);
            *score = exponential(*score - top);
        }
    }
    lanes value_sums[QUERIES][dim / LANES];
    for (long i = 0; i < dim / LANES; i++)
        for (long q = 0; q < QUERIES; q++)
            value_sums[q][i] = (lanes){0};
    /* In the order of the columns: those between that are not seen add 0, so that a token of a tree gives the bits that
     * it gives in a text. */
    for (long column = 0; column < length; column++) {
        for (long q = 0; q < num; q++)
            total[q] += scores[q * room + column];
#pragma GCC unroll 8
        for (long i = 0; i < dim / LANES; i++) {
            lanes value = load(values + column * dim + i * LANES);
#pragma GCC unroll 4
            for (long q = 0; q < QUERIES; q++)
                value_sums[q][i] += scores[q * room + column] * value;
        }
    }
    for (long q = 0; q < num; q++)
        for (long i = 0; i < dim / LANES; i++)
            store(value_sums[q][i] / total[q], out[q] + i * LANES);
}

/* Past the last column of `length` that one of these masks lets see. */
static long seen_of(long num, const uint8_t *const *masks, long length)
{
    for (; length > 0; length--)
        for (long q = 0; q < num; q++)
            if (masks[q][length - 1])
                return length;
    return length;
}

/* heads [tokens, groups * kv + 2 * kv, dim], of which the queries attend -> out [tokens, groups * kv, dim].
 * scores [threads, QUERIES, room], room at least the length and a multiple of LANES. */
static void attend(const struct part *part, const struct tokens *tokens, long groups, long kv, long dim, long layer,
                   const stored *heads, float *scores, long room, stored *out)
{
    long chunks = (part->width * groups + QUERIES - 1) / QUERIES, each = tokens->length * dim;
    float scale = 1 / sqrtf(dim);
#pragma omp for collapse(3) schedule(dynamic)
    for (long row = 0; row < part->rows; row++)
        for (long head = 0; head < kv; head++)
            for (long chunk = 0; chunk < chunks; chunk++) {
                long first = chunk * QUERIES, num = part->sizes[row] * groups - first;
                if (num <= 0)
                    continue;
                num = num < QUERIES ? num : QUERIES;
                const stored *of[QUERIES];
                const uint8_t *mask[QUERIES];
                stored *to[QUERIES];
                for (long q = 0; q < num; q++) {
                    long place = (first + q) / groups, own_head = head * groups + (first + q) % groups;
                    of[q] = heads + ((part->firsts[row] + place) * (groups + 2) * kv + own_head) * dim;
                    to[q] = out + ((part->firsts[row] + place) * groups * kv + own_head) * dim;
                    mask[q] = part->visible + (row * part->width + place) * part->length;
                }
                const stored *key = tokens->cache + ((layer * 2 * tokens->slots + part->slots[row]) * kv + head) * each;
                const stored *value = key + tokens->slots * kv * each;
                float *own = scores + omp_get_thread_num() * QUERIES * room;
                long seen = seen_of(num, mask, part->length), filled = (seen + LANES - 1) / LANES * LANES;
                if (dim == 64)
                    attend_some(num, 64, seen, of, key, value, mask, scale, own, filled, to);
                else if (dim == 128)
                    attend_some(num, 128, seen, of, key, value, mask, scale, own, filled, to);
                else
                    attend_some(num, dim, seen, of, key, value, mask, scale, own, filled, to);
            }
}

/* 1 if all slots and columns are in the cache. */
static int fits(const struct tokens *tokens)
{
    for (long token = 0; token < tokens->num; token++)
        if (tokens->own_slots[token] < 0 || tokens->own_slots[token] >= tokens->slots
            || tokens->own_columns[token] < 0 || tokens->own_columns[token] >= tokens->length)
            return 0;
    return 1;
}

/* Copy what is known after a layer, [tokens, hidden], to its places among the features [tokens, num_kept, hidden]. */
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

/* hidden [tokens, hidden], which is worked on -> x, normed after the last layer by `last` [hidden]; features: see keep.
 * parts [layers] of num_parts each. Room is given for x [tokens, hidden], heads [tokens, queries + 2 * kv, dim], attended
 * [tokens, queries, dim], found [tokens, hidden], gate_up [tokens, 2, inner], gated [tokens, inner] and scores (see
 * attend). Returns 0, or -1 for tokens that the cache has no place for, before anything is written. */
int run_layers(const struct shape *shape, const struct layer *layers, const stored *last, const struct tokens *tokens,
               long num_parts, const struct part *const *parts, stored *hidden, stored *x, stored *heads,
               stored *attended, stored *found, stored *gate_up, stored *gated, float *scores, long room,
               long num_kept, const int64_t *kept, stored *features, int threads)
{
    long num = tokens->num, groups = shape->queries / shape->kv;
    if (!fits(tokens))
        return -1;
#pragma omp parallel num_threads(threads)
    {
        for (long i = 0; i < shape->layers; i++) {
            const struct layer *layer = layers + i;
            add_norm(num, shape->hidden, hidden, i ? found : NULL, layer->before, shape->eps, x);
            keep(i - 1, num_kept, kept, num, shape->hidden, hidden, features);
            multiply(&layer->qkv, num, x, heads);
            rotate_and_store(tokens, shape->queries, shape->kv, shape->dim, layer->of_heads, shape->eps, i, heads);
            for (long part = 0; part < num_parts; part++)
                attend(parts[i] + part, tokens, groups, shape->kv, shape->dim, i, heads, scores, room, attended);
            multiply(&layer->out, num, attended, found);
            add_norm(num, shape->hidden, hidden, found, layer->after, shape->eps, x);
            multiply(&layer->gate_up, num, x, gate_up);
            swiglu(num, shape->inner, gate_up, gated);
            multiply(&layer->down, num, gated, found);
        }
        add_norm(num, shape->hidden, hidden, found, last, shape->eps, x);
        keep(shape->layers - 1, num_kept, kept, num, shape->hidden, x, features); /* normed, as in transformers */
    }
    return 0;
}

/* Store every layer's keys and values of x [tokens, hidden]; room for heads [tokens, 2 * kv, dim]. Returns as above. */
int project_layers(const struct shape *shape, const struct layer *layers, const struct tokens *tokens, const stored *x,
                   stored *heads, int threads)
{
    long skipped = shape->queries * shape->dim;
    if (!fits(tokens))
        return -1;
#pragma omp parallel num_threads(threads)
    for (long i = 0; i < shape->layers; i++) {
        struct linear kv = from_output(layers[i].qkv, skipped);
        multiply(&kv, tokens->num, x, heads);
        rotate_and_store(tokens, 0, shape->kv, shape->dim, layers[i].of_heads ? layers[i].of_heads + skipped : NULL,
                         shape->eps, i, heads);
    }
    return 0;
}
