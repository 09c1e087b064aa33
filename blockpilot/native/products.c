/* Linear products of a few rows, limited by the memory bandwidth of the weights. See products.py.
 *
 * Batch invariant: an output is one sum over the inputs in their order, whatever the number of rows. A row gets the
 * same bits alone and among others, so a verified token equals that of plain decoding, also in bfloat16.
 *
 * Weights are in panels of 16 outputs, [outputs / 16, units, 16], where a unit has 4 bytes: one input in float32, two
 * neighbouring ones in bfloat16, as the instructions for bfloat16 read them. The last panel may have fewer outputs;
 * its other weights are 0.
 */
#include "tiles.h"

#ifdef __AVX512F__
#define PANELS 4 /* multiplied side by side: with ROWS rows their sums fill the registers */
#else
#define PANELS 1
#endif
#define ROWS 6
#define VECTORS (PANELS * PANEL / LANES)

typedef bits unaligned __attribute__((aligned(4)));
typedef uint32_t units __attribute__((may_alias, aligned(2)));

/* sum + weight * x, for one unit of LANES outputs and of one row. */
static inline lanes multiplied(lanes sum, bits weight, uint32_t x)
{
#ifndef BFLOAT16
    float input;
    memcpy(&input, &x, sizeof input);
    return fused((lanes)weight, (lanes){0} + input, sum);
#elif defined(__AVX512BF16__)
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)((bits){0} + x));
#else
    lanes low = (lanes)(weight << 16), high = (lanes)(weight & 0xffff0000);
    bits both = (bits){0} + x;
    return fused(high, (lanes)(both & 0xffff0000), fused(low, (lanes)(both << 16), sum));
#endif
}

/* Work stealing: panels that a thread takes at once from a product. A thread takes the units of its own share from the
 * front, then those of other shares from the back: some threads are slower, on cores shared with other programs. */
static long unit(void) { return has_tiles ? 2 : PANELS; }

/* Take a unit from the front or the back of a share (its first unit and one past its last, 32 bits each); -1 if
 * empty. */
static long take(uint64_t *share, int back)
{
    uint64_t left = __atomic_load_n(share, __ATOMIC_RELAXED), after;
    long first, end;
    do {
        first = left >> 32, end = left & UINT32_MAX;
        if (first >= end)
            return -1;
        after = back ? left - 1 : left + (1ull << 32);
    } while (!__atomic_compare_exchange_n(share, &left, after, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return back ? end - 1 : first;
}

/* The next unit for this thread, or -1. */
static long next_unit(uint64_t *shares, long threads)
{
    long self = omp_get_thread_num(), found = take(shares + self, 0);
    for (long i = 1; found < 0 && i < threads; i++)
        found = take(shares + (self + i) % threads, 1);
    return found;
}

static long units_of(const struct linear *linear) { return (panels_of(linear) + unit() - 1) / unit(); }

void share_out(const struct linear *linear, long num, long threads, uint64_t *shares)
{
    uint64_t units = units_of(linear) * num;
    for (long i = 0; i < threads; i++)
        shares[i] = units * i / threads << 32 | units * (i + 1) / threads;
}

/* A block of `num` rows and `vectors` of LANES outputs, constants after inlining; sums go to `out`, or in float32 to
 * `floats` if that is not NULL. */
static inline __attribute__((always_inline)) void block(
    const long num, const long vectors, long inputs, const stored *x, const uint32_t *weights, const stored *bias,
    stored *out, float *floats, long outputs)
{
    lanes sum[ROWS][VECTORS];
    long size = inputs / PER_UNIT;
    for (long row = 0; row < num; row++)
        for (long v = 0; v < vectors; v++)
            sum[row][v] = bias ? load(bias + v * LANES) : (lanes){0};
    for (long unit = 0; unit < size; unit++) {
        bits weight[VECTORS];
#pragma GCC unroll 4
        for (long v = 0; v < vectors; v++)
            weight[v] = *(const unaligned *)(weights + (v * LANES / PANEL * size + unit) * PANEL + v * LANES % PANEL);
#pragma GCC unroll 6
        for (long row = 0; row < num; row++) {
            uint32_t input = ((const units *)(x + row * inputs))[unit];
#pragma GCC unroll 4
            for (long v = 0; v < vectors; v++)
                sum[row][v] = multiplied(sum[row][v], weight[v], input);
        }
    }
    long kept = outputs < LANES ? outputs : LANES;
    for (long row = 0; row < num; row++)
        for (long v = 0; v < vectors; v++)
            if (floats)
                memcpy(floats + row * outputs + v * LANES, &sum[row][v], kept * sizeof(float));
            else
                store(sum[row][v], out + row * outputs + v * LANES);
}

/* Blocks of ROWS rows, and one of the remaining rows. */
static inline __attribute__((always_inline)) void blocks(
    long rows, const long vectors, long inputs, const stored *x, const uint32_t *weights, const stored *bias,
    stored *out, float *floats, long outputs)
{
    for (long row = 0; row < rows; row += ROWS, x += ROWS * inputs) {
        stored *own = out ? out + row * outputs : out;
        float *own_floats = floats ? floats + row * outputs : floats;
        switch (rows - row) {
        case 1: block(1, vectors, inputs, x, weights, bias, own, own_floats, outputs); break;
        case 2: block(2, vectors, inputs, x, weights, bias, own, own_floats, outputs); break;
        case 3: block(3, vectors, inputs, x, weights, bias, own, own_floats, outputs); break;
        case 4: block(4, vectors, inputs, x, weights, bias, own, own_floats, outputs); break;
        case 5: block(5, vectors, inputs, x, weights, bias, own, own_floats, outputs); break;
        default: block(ROWS, vectors, inputs, x, weights, bias, own, own_floats, outputs);
        }
    }
}

/* The outputs of a last panel, fewer than PANEL. */
static void last_outputs(const struct linear *linear, long rows, const stored *x, stored *out, long outputs)
{
    float sums[ROWS * PANEL];
    stored whole[PANEL];
    for (long row = 0; row < rows; row += ROWS) {
        long num = rows - row < ROWS ? rows - row : ROWS;
        blocks(num, PANEL / LANES, linear->inputs, x + row * linear->inputs, linear->weights, linear->bias, NULL, sums,
               PANEL);
        for (long i = 0; i < num; i++) {
            for (long v = 0; v < PANEL; v += LANES)
                store(load_floats(sums + i * PANEL + v), whole + v);
            memcpy(out + (row + i) * outputs, whole, linear->outputs * sizeof(stored));
        }
    }
}

static void by_lanes(const struct batch *batches, uint64_t *shares, long threads)
{
    long inputs = batches->linear->inputs, outputs = batches->linear->outputs, units = units_of(batches->linear);
    for (long place = next_unit(shares, threads); place >= 0; place = next_unit(shares, threads)) {
        const struct batch *batch = batches + place / units;
        long first = place % units * PANELS * PANEL;
        struct linear own = from_output(*batch->linear, first);
        stored *out = batch->out + first;
        if (own.outputs >= PANELS * PANEL)
            blocks(batch->rows, VECTORS, inputs, batch->x, own.weights, own.bias, out, NULL, outputs);
        else
            for (; own.outputs > 0; own = from_output(own, PANEL), out += PANEL)
                if (own.outputs >= PANEL)
                    blocks(batch->rows, PANEL / LANES, inputs, batch->x, own.weights, own.bias, out, NULL, outputs);
                else
                    last_outputs(&own, batch->rows, batch->x, out, outputs);
    }
}

static void sums_by_lanes(long rows, long inputs, const stored *x, const uint32_t *panel, long outputs, float *sums)
{
    if (outputs == FEW)
        blocks(rows, 1, inputs, x, panel, NULL, NULL, sums, FEW);
    else
        blocks(rows, PANEL / LANES, inputs, x, panel, NULL, NULL, sums, PANEL);
}

#ifdef TILES
/* Prefetches the weights of the thread's next unit: tile loads alone do not use the full memory bandwidth. */
static void by_tiles(const struct batch *batches, uint64_t *shares, long threads)
{
    long inputs = batches->linear->inputs, outputs = batches->linear->outputs, units = units_of(batches->linear);
    long place = next_unit(shares, threads), shaped = 0;
    while (place >= 0) {
        const struct batch *batch = batches + place / units;
        long first = place % units * 2 * PANEL, next = take(shares + omp_get_thread_num(), 0);
        struct linear own = from_output(*batch->linear, first);
        const uint32_t *asked = NULL;
        if (next >= 0)
            asked = from_output(*batches[next / units].linear, next % units * 2 * PANEL).weights;
        for (long row = 0; row < batch->rows; row += 32, asked = NULL) {
            long num = batch->rows - row < 32 ? batch->rows - row : 32, upper = num < 16 ? num : 16, lower = num - upper;
            if (shaped != num)
                shape_tiles(upper, lower ? lower : 1, PANEL), shaped = num;
            block_of_tiles(upper, lower, &own, batch->x + row * inputs, asked, batch->out + row * outputs + first,
                           outputs);
        }
        place = next < 0 ? next_unit(shares, threads) : next;
    }
    if (shaped)
        _tile_release();
}

#else
#define by_tiles by_lanes
#define sums_by_tiles sums_by_lanes
#endif

void multiply_all(const struct batch *batches, uint64_t *shares, long threads)
{
    (has_tiles ? by_tiles : by_lanes)(batches, shares, threads);
#pragma omp barrier
}

void multiply(const struct linear *linear, long rows, const stored *x, stored *out, uint64_t *shares, long threads)
{
    multiply_all(&(struct batch){linear, rows, x, out}, shares, threads);
}

void product(const struct linear *linear, long rows, const stored *x, stored *out, int threads)
{
    uint64_t shares[threads];
    share_out(linear, 1, threads, shares);
#pragma omp parallel num_threads(threads)
    multiply(linear, rows, x, out, shares, threads);
}

void panel_sums(long rows, long inputs, const stored *x, const uint32_t *panel, long outputs, float *sums)
{
    (has_tiles ? sums_by_tiles : sums_by_lanes)(rows, inputs, x, panel, outputs, sums);
}
