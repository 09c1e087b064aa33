/* Linear products of a few rows, at the speed at which memory gives the weights. See products.py.
 *
 * An output is one sum over the inputs, in their order, whatever number of rows there is: a row gives the same bits
 * alone and among others, so a verified token equals the one that plain decoding draws, also in bfloat16.
 *
 * Weights lie in panels of 16 outputs, [outputs / 16, units, 16], where a unit has 4 bytes: an input in float32, two
 * neighbouring ones in bfloat16, as the instructions that multiply bfloat16 read them.
 */
#include "products.h"

#if defined(BFLOAT16) && defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef __AVX512F__
#define PANELS 4 /* multiplied side by side: with ROWS rows their sums fill the registers */
#else
#define PANELS 1
#endif
#define ROWS 6
#define VECTORS (PANELS * PANEL / LANES)

typedef bits unaligned __attribute__((aligned(4)));
typedef uint32_t units __attribute__((may_alias, aligned(2)));

/* sum + weight * x, of one unit of LANES outputs and of a row. */
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

#ifdef TILES
static int has_tiles;

/* Whether the system lets this process use tiles. */
__attribute__((constructor)) static void ask_for_tiles(void)
{
    const long request_permission = 0x1023, tile_data = 18; /* Linux 5.16 and newer */
    has_tiles = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#else
static const int has_tiles = 0;
#endif

/* What the threads take from a product's panels: units of so many. A thread takes its own, one after the other, and
 * then the last ones of others: some are slower, on cores that they share with other programs. */
static long unit(void) { return has_tiles ? 2 : PANELS; }

/* From a share, first unit and the one after its last in 32 bits each, one from the front or the back; -1 of none. */
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

void share_out(const struct linear *linear, long threads, uint64_t *shares)
{
    uint64_t units = (linear->outputs / PANEL + unit() - 1) / unit();
    for (long i = 0; i < threads; i++)
        shares[i] = units * i / threads << 32 | units * (i + 1) / threads;
}

/* A block of `num` rows and `vectors` of LANES outputs, constants where it is inlined; its sums are stored, or left in
 * float32 in `floats`. */
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

/* Blocks of ROWS rows, and of those that are left. */
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

static void by_lanes(const struct linear *linear, long rows, const stored *x, stored *out, uint64_t *shares,
                     long threads)
{
    long inputs = linear->inputs, outputs = linear->outputs, panels = outputs / PANEL;
    for (long place = next_unit(shares, threads); place >= 0; place = next_unit(shares, threads)) {
        long first = place * PANELS, num = panels - first < PANELS ? panels - first : PANELS;
        struct linear own = from_output(*linear, first * PANEL);
        if (num == PANELS)
            blocks(rows, VECTORS, inputs, x, own.weights, own.bias, out + first * PANEL, NULL, outputs);
        else
            for (long i = 0; i < num; i++, own = from_output(own, PANEL))
                blocks(rows, PANEL / LANES, inputs, x, own.weights, own.bias, out + (first + i) * PANEL, NULL, outputs);
    }
}

static void sums_by_lanes(long rows, long inputs, const stored *x, const uint32_t *panel, long outputs, float *sums)
{
    if (outputs == FEW)
        blocks(rows, 1, inputs, x, panel, NULL, NULL, sums, FEW);
    else
        blocks(rows, PANEL / LANES, inputs, x, panel, NULL, NULL, sums, PANEL);
}

#ifdef TILES /* of 16 rows by 64 bytes (Intel's AMX); 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights */

/* Tiles for `upper` rows of x and `lower` ones below them, each 1 to 16, and as many outputs of a panel. */
static void shape_tiles(long upper, long lower, long outputs)
{
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shapes = {.palette = 1};
    for (long tile = 0; tile < 8; tile++)
        shapes.bytes[tile] = tile == 4 || tile == 5 ? 64 : outputs * 4, shapes.rows[tile] = 16;
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = upper;
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = lower;
    _tile_loadconfig(&shapes);
}

static void store_tile(const float *sums, long rows, const stored *bias, stored *out, long outputs)
{
    for (long row = 0; row < rows; row++)
        store(*(const lanes *)(sums + row * PANEL) + (bias ? load(bias) : (lanes){0}), out + row * outputs);
}

/* `upper` rows and `lower` ones below them, 0 to 16, by 2 panels: every tile that is loaded is multiplied twice. `next`
 * are as many weights to ask memory for, or NULL. */
static void block_of_tiles(long upper, long lower, long panels, long inputs, const stored *x, const uint32_t *weights,
                           const uint32_t *next, const stored *bias, stored *out, long outputs)
{
    const uint32_t *second = weights + (panels > 1 ? inputs / 2 * PANEL : 0);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < inputs; k += 32) {
        for (long i = k; next && i < k + 32; i++)
            __builtin_prefetch(next + i * PANEL, 0, 2);
        _tile_loadd(4, x + k, inputs * 2);
        _tile_stream_loadd(6, weights + k / 2 * PANEL, 64);
        _tile_stream_loadd(7, second + k / 2 * PANEL, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (lower) {
            _tile_loadd(5, x + 16 * inputs + k, inputs * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    float sums[4][16 * PANEL] __attribute__((aligned(64)));
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (long i = 0; i < 4; i++)
        if (i % 2 < panels)
            store_tile(sums[i], i < 2 ? upper : lower, bias ? bias + i % 2 * PANEL : bias,
                       out + i / 2 * 16 * outputs + i % 2 * PANEL, outputs);
}

/* A thread that knows what it multiplies next asks memory for it: tiles by themselves do not keep memory busy. */
static void by_tiles(const struct linear *linear, long rows, const stored *x, stored *out, uint64_t *shares,
                     long threads)
{
    long inputs = linear->inputs, outputs = linear->outputs, panels = outputs / PANEL, shaped = 0;
    long place = next_unit(shares, threads);
    while (place >= 0) {
        long panel = place * 2, next = take(shares + omp_get_thread_num(), 0);
        struct linear own = from_output(*linear, panel * PANEL);
        const uint32_t *asked = next < 0 ? NULL : from_output(*linear, next * 2 * PANEL).weights;
        for (long row = 0; row < rows; row += 32, asked = NULL) {
            long num = rows - row < 32 ? rows - row : 32, upper = num < 16 ? num : 16, lower = num - upper;
            if (shaped != num)
                shape_tiles(upper, lower ? lower : 1, PANEL), shaped = num;
            block_of_tiles(upper, lower, panels - panel < 2 ? 1 : 2, inputs, x + row * inputs, own.weights, asked,
                           own.bias, out + row * outputs + panel * PANEL, outputs);
        }
        place = next < 0 ? next_unit(shares, threads) : next;
    }
    if (shaped)
        _tile_release();
}

static void sums_by_tiles(long rows, long inputs, const stored *x, const uint32_t *panel, long outputs, float *sums)
{
    for (long row = 0; row < rows; row += 32, x += 32 * inputs, sums += 32 * outputs) {
        long num = rows - row < 32 ? rows - row : 32, upper = num < 16 ? num : 16, lower = num - upper;
        if (row == 0 || num < 32)
            shape_tiles(upper, lower ? lower : 1, outputs);
        _tile_zero(0);
        _tile_zero(2);
        for (long k = 0; k < inputs; k += 32) {
            _tile_loadd(4, x + k, inputs * 2);
            _tile_loadd(6, panel + k / 2 * PANEL, 64);
            _tile_dpbf16ps(0, 4, 6);
            if (lower) {
                _tile_loadd(5, x + 16 * inputs + k, inputs * 2);
                _tile_dpbf16ps(2, 5, 6);
            }
        }
        _tile_stored(0, sums, outputs * 4);
        if (lower)
            _tile_stored(2, sums + 16 * outputs, outputs * 4);
    }
    _tile_release();
}

/* 16 vectors of 16 units -> the vectors of their first units, second ones, and so on. */
static void transpose(__m512i x[16])
{
    __m512i y[16];
    for (long i = 0; i < 16; i += 2)
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    for (long i = 0; i < 16; i += 4)
        for (long j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    for (long i = 0; i < 4; i++)
        for (long j = 0; j < 16; j += 8) {
            y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
            y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
        }
    for (long i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

static inline __m512i both_narrowed(const float *low, const float *high)
{
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(high), _mm512_loadu_ps(low));
}

/* A stretch of chances [STRETCH, queries] -> [queries, STRETCH], as tiles read rows of x. */
static void tile_of_chances(long queries, const float *chances, __m512i *rows)
{
    const __m512i in_pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                              21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    if (queries == PANEL) {
        for (long i = 0; i < 16; i++, chances += 2 * PANEL)
            rows[i] = _mm512_permutexvar_epi16(in_pairs, both_narrowed(chances, chances + PANEL));
        transpose(rows);
        return;
    }
    const __m512i first_two = _mm512_set_epi16(61, 57, 53, 49, 45, 41, 37, 33, 29, 25, 21, 17, 13, 9, 5, 1, 60, 56, 52,
                                               48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0);
    const __m512i last_two = _mm512_add_epi16(first_two, _mm512_set1_epi16(2));
    __m512i eights[4], twos[2][2]; /* of columns, and of queries by half of the columns */
    for (long i = 0; i < 4; i++, chances += 8 * FEW)
        eights[i] = both_narrowed(chances, chances + 4 * FEW);
    for (long half = 0; half < 2; half++) {
        twos[0][half] = _mm512_permutex2var_epi16(eights[2 * half], first_two, eights[2 * half + 1]);
        twos[1][half] = _mm512_permutex2var_epi16(eights[2 * half], last_two, eights[2 * half + 1]);
    }
    for (long i = 0; i < 2; i++) {
        rows[2 * i] = _mm512_shuffle_i64x2(twos[i][0], twos[i][1], 0x44);
        rows[2 * i + 1] = _mm512_shuffle_i64x2(twos[i][0], twos[i][1], 0xee);
    }
}

/* A stretch of values [STRETCH, dim], `panels` of 16 of them -> weights as tiles read them, two columns a unit. */
static void tiles_of_values(long panels, long dim, const stored *values, __m512i tiles[4][16])
{
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (long unit = 0; unit < 16; unit++, values += 2 * dim)
        for (long panel = 0; panel < panels; panel += 2) {
            __m512i first = _mm512_loadu_si512(values + panel * PANEL);
            __m512i second = _mm512_loadu_si512(values + dim + panel * PANEL);
            tiles[panel][unit] = _mm512_permutex2var_epi16(first, low, second);
            tiles[panel + 1][unit] = _mm512_permutex2var_epi16(first, high, second);
        }
}

int uses_tiles(void) { return has_tiles; }

void weigh(long columns, long queries, long dim, const float *chances, const long *whole, const stored *values,
           stored *room, float *sums)
{
    __m512i rows[16], tiles[4][16];
    for (long column = 0; column < columns; column += STRETCH) {
        tile_of_chances(queries, chances + column * queries, rows);
        for (long q = 0; q < queries; q++)
            _mm512_storeu_si512(room + column * queries + q * STRETCH, column < whole[q] ? rows[q] : (__m512i){0});
    }
    shape_tiles(queries, queries, PANEL);
    for (long first = 0; first < dim; first += 4 * PANEL) {
        long panels = dim - first < 4 * PANEL ? 2 : 4;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (long column = 0; column < columns; column += STRETCH) {
            tiles_of_values(panels, dim, values + column * dim + first, tiles);
            _tile_loadd(4, room + column * queries, STRETCH * sizeof(stored));
            _tile_loadd(6, tiles[0], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, tiles[1], 64);
            _tile_dpbf16ps(1, 4, 7);
            if (panels > 2) {
                _tile_loadd(6, tiles[2], 64);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(7, tiles[3], 64);
                _tile_dpbf16ps(3, 4, 7);
            }
        }
        _tile_stored(0, sums + first, dim * sizeof *sums);
        _tile_stored(1, sums + first + PANEL, dim * sizeof *sums);
        if (panels > 2) {
            _tile_stored(2, sums + first + 2 * PANEL, dim * sizeof *sums);
            _tile_stored(3, sums + first + 3 * PANEL, dim * sizeof *sums);
        }
    }
    _tile_release();
}

#else
#define by_tiles by_lanes
#define sums_by_tiles sums_by_lanes

int uses_tiles(void) { return 0; }

void weigh(long columns, long queries, long dim, const float *chances, const long *whole, const stored *values,
           stored *room, float *sums)
{
}
#endif

void multiply(const struct linear *linear, long rows, const stored *x, stored *out, uint64_t *shares, long threads)
{
    (has_tiles ? by_tiles : by_lanes)(linear, rows, x, out, shares, threads);
#pragma omp barrier
}

void product(const struct linear *linear, long rows, const stored *x, stored *out, int threads)
{
    uint64_t shares[threads];
    share_out(linear, threads, shares);
#pragma omp parallel num_threads(threads)
    multiply(linear, rows, x, out, shares, threads);
}

void panel_sums(long rows, long inputs, const stored *x, const uint32_t *panel, long outputs, float *sums)
{
    (has_tiles ? sums_by_tiles : sums_by_lanes)(rows, inputs, x, panel, outputs, sums);
}
