/* Products by tiles of 16 rows of 64 bytes (Intel AMX): tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights. */
#include "tiles.h"

#ifdef TILES
#include <sys/syscall.h>
#include <unistd.h>

int has_tiles;

/* Compiler barrier: GCC does not know that tile instructions read memory, and might drop the stores of their operands
 * or move them after the instructions. */
static inline void stored_by_now(const void *read) { __asm__ volatile("" : : "r"(read) : "memory"); }

/* Ask the system for permission to use tiles. */
__attribute__((constructor)) static void ask_for_tiles(void)
{
    const long request_permission = 0x1023, tile_data = 18; /* Linux 5.16 and newer */
    has_tiles = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

void shape_tiles(long upper, long lower, long outputs)
{
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shapes = {.palette = 1};
    for (long tile = 0; tile < 8; tile++)
        shapes.bytes[tile] = tile == 4 || tile == 5 ? 64 : outputs * 4, shapes.rows[tile] = 16;
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = upper;
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = lower;
    stored_by_now(&shapes);
    _tile_loadconfig(&shapes);
}

static void store_tile(const float *sums, long rows, const stored *bias, stored *out, long kept, long outputs)
{
    for (long row = 0; row < rows; row++) {
        lanes own = *(const lanes *)(sums + row * PANEL) + (bias ? load(bias) : (lanes){0});
        packed whole = narrowed(own);
        if (kept < PANEL)
            memcpy(out + row * outputs, &whole, kept * sizeof(stored));
        else
            store(own, out + row * outputs);
    }
}

void block_of_tiles(long upper, long lower, const struct linear *linear, const stored *x, const uint32_t *next,
                           stored *out, long outputs)
{
    long inputs = linear->inputs;
    const uint32_t *weights = linear->weights, *second = weights + (linear->outputs > PANEL ? inputs / 2 * PANEL : 0);
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
    for (long i = 0; i < 4; i++) {
        struct linear own = from_output(*linear, i % 2 * PANEL);
        if (own.outputs > 0)
            store_tile(sums[i], i < 2 ? upper : lower, own.bias, out + i / 2 * 16 * outputs + i % 2 * PANEL,
                       own.outputs < PANEL ? own.outputs : PANEL, outputs);
    }
}

void sums_by_tiles(long rows, long inputs, const stored *x, const uint32_t *panel, long outputs, float *sums)
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

/* Transpose 16 vectors of 16 units in place. */
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

/* Stretch of attention weights [STRETCH, queries] -> rows [queries, STRETCH] in bfloat16, as tiles read rows of x. */
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
    __m512i eights[4], twos[2][2]; /* eights of columns; twos of queries, by half of the columns */
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

/* First `panels` panels of values [STRETCH, dim], a stretch -> weights as tiles read them, two columns per unit. */
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
            stored_by_now(tiles);
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
int uses_tiles(void) { return 0; }

void weigh(long columns, long queries, long dim, const float *chances, const long *whole, const stored *values,
           stored *room, float *sums)
{
}
#endif
