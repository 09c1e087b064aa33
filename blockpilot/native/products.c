/* Linear products of a few rows, limited by the memory bandwidth for the weights. See products.py.
 *
 * Batch invariant: an output is one sum over the inputs in their order, regardless of the number of rows. A row gets
 * the same bits alone and among others, so a verified token equals that of plain decoding, also in bfloat16.
 *
 * Weights are in panels of 16 outputs, [outputs / 16, units, 16], where a unit has 4 bytes: one input in float32, two
 * neighbouring ones in bfloat16, as the instructions for bfloat16 read them. The last panel may have fewer outputs;
 * its other weights are 0.
 */
#include "tiles.h"
#include <stdlib.h>

#ifdef __AVX512F__
#define PANELS 4 /* multiplied together: with ROWS rows their sums fill the registers */
#else
#define PANELS 1
#endif
#define ROWS 6
#define CONVERTED_ROWS 512 /* at a time: bounds every thread's buffer of converted inputs */
#define VECTORS (PANELS * PANEL / LANES)

typedef bits unaligned __attribute__((aligned(4)));

/* Without instructions for bfloat16 the two parts of a unit are multiplied one after the other, in float32. */
#if defined(BFLOAT16) && !defined(__AVX512BF16__)
#define PARTS 2
typedef float input;
#else
#define PARTS 1
typedef stored input;
#endif

/* Weights of a part of a unit, for LANES outputs. */
static inline bits weights_of(bits unit, long part)
{
    if (PARTS == 1)
        return unit;
    return part ? unit & 0xffff0000 : unit << 16;
}

/* A row's inputs of a part of a unit, for all lanes. */
static inline bits spread_input(const input *x)
{
    float unit;
    memcpy(&unit, x, sizeof unit);
    return (bits)spread(unit);
}

/* sum + weight * x, for a part of LANES outputs and of one row. */
static inline lanes multiplied(lanes sum, bits weight, bits x)
{
#if defined(BFLOAT16) && defined(__AVX512BF16__)
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)x);
#else
    return fused((lanes)weight, (lanes)x, sum);
#endif
}

/* `num` inputs, a multiple of LANES, in the type of the products: converted in `room` if that differs from `stored`. */
static const input *as_multiplied(const stored *x, long num, input *room)
{
#if PARTS > 1
    for (long i = 0; i < num; i += LANES) {
        lanes wide = load(x + i);
        memcpy(room + i, &wide, sizeof wide);
    }
    return room;
#else
    return x;
#endif
}

/* Work stealing: a unit of work is this number of a product's panels. A thread takes units from the front of its share,
 * then from the back of other shares: some threads are slower, on cores shared with other programs. */
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

/* Add a part of a unit to the sums of `num` rows and `vectors` of LANES outputs, constants after inlining. */
static inline __attribute__((always_inline)) void add_part(
    const long num, const long vectors, const long part, long inputs, const input *x, const uint32_t *weights,
    long stride, lanes sum[ROWS][VECTORS])
{
    bits weight[VECTORS];
#pragma GCC unroll 4
    for (long v = 0; v < vectors; v++)
        weight[v] = weights_of(*(const unaligned *)(weights + v * LANES / PANEL * stride + v * LANES % PANEL), part);
#pragma GCC unroll 6
    for (long row = 0; row < num; row++) {
        bits own = spread_input(x + row * inputs + part);
#pragma GCC unroll 4
        for (long v = 0; v < vectors; v++)
            sum[row][v] = multiplied(sum[row][v], weight[v], own);
    }
}

/* Block of `num` rows and `vectors` of LANES outputs; sums go to `out`, or in float32 to `floats` if that is not NULL.
 * Rows of both have `outputs` numbers. */
static inline __attribute__((always_inline)) void block(
    const long num, const long vectors, long inputs, const input *x, const uint32_t *weights, const stored *bias,
    stored *out, float *floats, long outputs)
{
    lanes sum[ROWS][VECTORS];
    long size = inputs / PER_UNIT;
    for (long row = 0; row < num; row++)
        for (long v = 0; v < vectors; v++)
            sum[row][v] = bias ? load(bias + v * LANES) : (lanes){0};
    for (long unit = 0; unit < size; unit++, x += PER_UNIT, weights += PANEL) {
        for (long v = 0; v < vectors; v += PANEL / LANES)
            __builtin_prefetch(weights + (PANELS + v * LANES / PANEL) * size * PANEL, 0, 2);
        add_part(num, vectors, 0, inputs, x, weights, size * PANEL, sum);
        if (PARTS > 1)
            add_part(num, vectors, 1, inputs, x, weights, size * PANEL, sum);
    }
    long kept = outputs < LANES ? outputs : LANES;
    for (long row = 0; row < num; row++)
        for (long v = 0; v < vectors; v++)
            if (floats)
                memcpy(floats + row * outputs + v * LANES, &sum[row][v], kept * sizeof(float));
            else
                store(sum[row][v], out + row * outputs + v * LANES);
}

typedef void block_of(
    long inputs, const input *x, const uint32_t *weights, const stored *bias, stored *out, float *floats, long outputs);

/* Blocks, indexed by their number of rows - 1. Not inlined: GCC then keeps all sums in registers. */
#define BLOCK(name, num, vectors)                                                                                      \
    static __attribute__((noinline)) void name(                                                                        \
        long inputs, const input *x, const uint32_t *weights, const stored *bias, stored *out, float *floats,          \
        long outputs)                                                                                                  \
    {                                                                                                                  \
        block(num, vectors, inputs, x, weights, bias, out, floats, outputs);                                           \
    }
#define BLOCKS(name, vectors)                                                                                          \
    BLOCK(name##1, 1, vectors) BLOCK(name##2, 2, vectors) BLOCK(name##3, 3, vectors)                                   \
    BLOCK(name##4, 4, vectors) BLOCK(name##5, 5, vectors) BLOCK(name##6, ROWS, vectors)                                \
    static block_of *const name[ROWS] = {name##1, name##2, name##3, name##4, name##5, name##6};
BLOCKS(of_unit, VECTORS)
BLOCKS(of_panel, PANEL / LANES)
BLOCKS(of_few, 1)

/* Rows of the next block, of `left` rows. Blocks have about equal sizes: those of one or two rows are limited by the
 * latency of their sums. */
static long rows_of_block(long left)
{
    long num = (left + ROWS - 1) / ROWS;
    return (left + num - 1) / num;
}

static void blocks(
    block_of *const *by_rows, const struct linear *linear, long rows, const input *x, stored *out, long outputs)
{
    for (long row = 0, num; row < rows; row += num) {
        num = rows_of_block(rows - row);
        by_rows[num - 1](linear->inputs, x + row * linear->inputs, linear->weights, linear->bias, out + row * outputs,
                         NULL, outputs);
    }
}

/* Product of a last panel with fewer than PANEL outputs. */
static void last_outputs(const struct linear *linear, long rows, const input *x, stored *out, long outputs)
{
    float sums[ROWS * PANEL];
    stored whole[PANEL];
    for (long row = 0, num; row < rows; row += num) {
        num = rows_of_block(rows - row);
        of_panel[num - 1](linear->inputs, x + row * linear->inputs, linear->weights, linear->bias, NULL, sums, PANEL);
        for (long i = 0; i < num; i++) {
            for (long v = 0; v < PANEL; v += LANES)
                store(load_floats(sums + i * PANEL + v), whole + v);
            memcpy(out + (row + i) * outputs, whole, linear->outputs * sizeof(stored));
        }
    }
}

/* A thread's buffer of `num` inputs, reused by its next products; NULL if inputs are multiplied as they are stored. */
static input *room_for(long num)
{
    static __thread input *room;
    static __thread long size;
    if (PARTS > 1 && size < num) {
        free(room);
        room = malloc(num * sizeof *room), size = num;
        if (!room)
            abort();
    }
    return room;
}

static void by_lanes(const struct batch *batches, uint64_t *shares, long threads)
{
    long inputs = batches->linear->inputs, outputs = batches->linear->outputs, units = units_of(batches->linear);
    const struct batch *converted = NULL;
    const input *x = NULL;
    for (long place = next_unit(shares, threads); place >= 0; place = next_unit(shares, threads)) {
        const struct batch *batch = batches + place / units;
        if (batch != converted) {
            long num = batch->rows * inputs;
            x = as_multiplied(batch->x, num, room_for(num)), converted = batch;
        }
        long first = place % units * PANELS * PANEL;
        struct linear own = from_output(*batch->linear, first);
        stored *out = batch->out + first;
        if (own.outputs >= PANELS * PANEL)
            blocks(of_unit, &own, batch->rows, x, out, outputs);
        else
            for (; own.outputs > 0; own = from_output(own, PANEL), out += PANEL)
                if (own.outputs >= PANEL)
                    blocks(of_panel, &own, batch->rows, x, out, outputs);
                else
                    last_outputs(&own, batch->rows, x, out, outputs);
    }
}

static void sums_by_lanes(long rows, long inputs, const stored *x, const uint32_t *panel, long outputs, float *sums)
{
    input room[PARTS > 1 ? ROWS * inputs : 1];
    for (long row = 0, num; row < rows; row += num) {
        num = rows_of_block(rows - row);
        const input *own = as_multiplied(x + row * inputs, num * inputs, room);
        (outputs <= LANES ? of_few : of_panel)[num - 1](inputs, own, panel, NULL, NULL, sums + row * outputs, outputs);
    }
}

#ifdef TILES
/* Prefetch the weights of the thread's next unit: tile loads alone do not use the full memory bandwidth. */
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
    long most = PARTS > 1 ? CONVERTED_ROWS : rows;
    for (long row = 0; row < rows; row += most) {
        long num = rows - row < most ? rows - row : most;
        if (row) {
#pragma omp single
            share_out(linear, 1, threads, shares);
        }
        multiply_all(&(struct batch){linear, num, x + row * linear->inputs, out + row * linear->outputs}, shares,
                     threads);
    }
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
