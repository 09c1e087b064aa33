/* What a decoder layer does between its products, each in one pass over its rows: see native.py.
 *
 * Whatever is stored, sums and products are of float32. What a row gives does not depend on the rows beside it.
 * Widths are multiples of 16, head_dim of 32.
 */
#include "lanes.h"
#include <omp.h>

#define QUERIES 4 /* that read the same keys at once: their sums over values fill the registers */

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

/* hidden += delta [rows, width], where there is one; out = RMSNorm(hidden) * weight [width]. */
void add_norm(long rows, long width, stored *hidden, const stored *delta, const stored *weight, float eps,
              stored *out, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++) {
        stored *own = hidden + row * width;
        if (delta)
            for (long i = 0; i < width; i += LANES)
                store(load(own + i) + load(delta + row * width + i), own + i);
        norm(width, own, weight, eps, out + row * width);
    }
}

/* heads [rows, queries + 2 * kv, dim]: norm queries and keys (norms [queries + kv, dim], where there are any), rotate
 * them by cosines and sines [rows, dim], the first half of sines negated, and store keys and values in the cache:
 * row i's from slots[i] and columns[i] on, heads head_stride apart, values value_offset behind their keys. */
void rotate_and_store(long rows, long queries, long kv, long dim, stored *heads, const stored *norms, float eps,
                      const stored *cosines, const stored *sines, stored *cache, const int64_t *slots,
                      const int64_t *columns, long slot_stride, long head_stride, long value_offset, int threads)
{
    long half = dim / 2, all = queries + 2 * kv;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++) {
        const stored *cosine = cosines + row * dim, *sine = sines + row * dim;
        stored *place = cache + slots[row] * slot_stride + columns[row] * dim;
        for (long head = 0; head < queries + kv; head++) {
            stored *own = heads + (row * all + head) * dim;
            if (norms)
                norm(dim, own, norms + head * dim, eps, own);
            for (long i = 0; i < half; i += LANES) {
                lanes first = load(own + i), second = load(own + half + i);
                store(first * load(cosine + i) + second * load(sine + i), own + i);
                store(second * load(cosine + half + i) + first * load(sine + half + i), own + half + i);
            }
        }
        for (long head = 0; head < 2 * kv; head++) {
            const stored *own = heads + (row * all + queries + head) * dim;
            stored *to = place + head % kv * head_stride + head / kv * value_offset;
            for (long i = 0; i < dim; i += LANES)
                *(packed *)(to + i) = *(const packed *)(own + i);
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

/* Rows of a batch: row r has sizes[r] queries from token firsts[r] on, [tokens, kv * groups, dim] of token_stride; its
 * keys and values are row r of [rows, kv, length, dim] by their strides, its masks [width, length].
 * scores [threads, QUERIES, room], room at least length and a multiple of LANES. */
void attend(long rows, const int64_t *sizes, const int64_t *firsts, long width, long kv, long groups, long dim,
            long length, const stored *queries, long token_stride, const stored *keys, const stored *values,
            long row_stride, long head_stride, const uint8_t *masks, float scale, float *scores, long room,
            stored *out, int threads)
{
    long chunks = (width * groups + QUERIES - 1) / QUERIES;
#pragma omp parallel for collapse(3) schedule(dynamic) num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < kv; head++)
            for (long chunk = 0; chunk < chunks; chunk++) {
                long first = chunk * QUERIES, num = sizes[row] * groups - first;
                if (num <= 0)
                    continue;
                num = num < QUERIES ? num : QUERIES;
                const stored *of[QUERIES];
                const uint8_t *mask[QUERIES];
                stored *to[QUERIES];
                for (long q = 0; q < num; q++) {
                    long place = (first + q) / groups, own_head = head * groups + (first + q) % groups;
                    of[q] = queries + (firsts[row] + place) * token_stride + own_head * dim;
                    to[q] = out + ((firsts[row] + place) * kv * groups + own_head) * dim;
                    mask[q] = masks + (row * width + place) * length;
                }
                const stored *key = keys + row * row_stride + head * head_stride;
                const stored *value = values + row * row_stride + head * head_stride;
                float *own = scores + omp_get_thread_num() * QUERIES * room;
                long seen = seen_of(num, mask, length), filled = (seen + LANES - 1) / LANES * LANES;
                if (dim == 64)
                    attend_some(num, 64, seen, of, key, value, mask, scale, own, filled, to);
                else if (dim == 128)
                    attend_some(num, 128, seen, of, key, value, mask, scale, own, filled, to);
                else
                    attend_some(num, dim, seen, of, key, value, mask, scale, own, filled, to);
            }
}
