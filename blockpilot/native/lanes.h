/* Vectors of float32 lanes over stored numbers: float32, or bfloat16 with -DBFLOAT16. See library.py. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

#ifdef BFLOAT16
typedef uint16_t stored;
#else
typedef float stored;
#endif
typedef stored packed __attribute__((vector_size(sizeof(stored) * LANES), aligned(sizeof(stored))));

#ifdef __clang__
#define PICKED(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define PICKED(x, y, ...) __builtin_shuffle(x, y, (bits){__VA_ARGS__})
#endif

static inline lanes chosen(ints where, lanes yes, lanes no)
{
    return (lanes)(((bits)where & (bits)yes) | (~(bits)where & (bits)no));
}

static inline int any(ints where)
{
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)where, (__m512i)where) != 0;
#else
    return _mm256_movemask_epi8((__m256i)where) != 0;
#endif
}

/* x * y + z, rounded once (if the CPU has FMA). Compilers contract some loops to FMA and not others (GCC for AMD's
 * Zen), so a row's result would depend on the number of rows: library.py forbids contraction (-ffp-contract=off), and
 * this function is explicit. */
static inline lanes fused(lanes x, lanes y, lanes z)
{
#ifdef __AVX512F__
    return (lanes)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__)
    return (lanes)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#else
    return x * y + z;
#endif
}

static inline lanes spread(float x) /* x in every lane; `(lanes){0} + x` would add */
{
#ifdef __AVX512F__
    return (lanes)_mm512_set1_ps(x);
#else
    return (lanes)_mm256_set1_ps(x);
#endif
}

static inline lanes load(const stored *from)
{
    packed found = *(const packed *)from;
#ifdef BFLOAT16
    return (lanes)(__builtin_convertvector(found, bits) << 16);
#else
    return found;
#endif
}

static inline packed narrowed(lanes x) /* to nearest, ties to even; NaN stays NaN */
{
#if defined(BFLOAT16) && defined(__AVX512BF16__)
    return (packed)_mm512_cvtneps_pbh((__m512)x);
#elif defined(BFLOAT16)
    bits from = (bits)x, up = (from + 0x7fff + ((from >> 16) & 1)) >> 16;
    return __builtin_convertvector((bits)chosen(x == x, (lanes)up, (lanes)(from >> 16 | 64)), packed);
#else
    return x;
#endif
}

static inline lanes load_floats(const float *from)
{
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void store(lanes x, stored *to) { *(packed *)to = narrowed(x); }

static inline lanes rounded(lanes x) /* to the precision of `stored` */
{
    packed found = narrowed(x);
    return load((const stored *)&found);
}

static inline float sum(lanes x) /* pairwise: halves, then quarters, and so on */
{
#if LANES == 16
    x += PICKED(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
#endif
    x += PICKED(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
    x += PICKED(x, x, 2, 3, 0, 1, 4, 5, 6, 7);
    return x[0] + x[1];
}

static inline lanes larger(lanes x, lanes y) /* y if one is NaN */
{
#ifdef __AVX512F__
    return (lanes)_mm512_max_ps((__m512)x, (__m512)y);
#else
    return chosen(x > y, x, y);
#endif
}

static inline lanes exponential(lanes x) /* e^x for x <= 0, relative error 2e-7; 0 far below -87; NaN stays NaN */
{
    x = larger((lanes){0} - 200, x);
#ifdef __AVX512F__
    lanes whole = (lanes)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 8); /* to nearest */
#else
    ints power = __builtin_convertvector(x * 1.44269504f - 0.5f, ints); /* truncates: to nearest, as x <= 0 */
    lanes whole = __builtin_convertvector(power, lanes);
#endif
    const lanes none = {0};
    lanes rest = fused(whole, none + 2.12194440e-4f, fused(whole, none - 0.693359375f, x));
    lanes y = fused(rest, none + 1.9875691500e-4f, none + 1.3981999507e-3f); /* polynomial of Cephes */
    y = fused(y, rest, none + 8.3334519073e-3f);
    y = fused(y, rest, none + 4.1665795894e-2f);
    y = fused(y, rest, none + 1.6666665459e-1f);
    y = fused(y, rest, none + 5.0000001201e-1f);
    y = fused(y * rest, rest, rest) + 1;
#ifdef __AVX512F__
    return (lanes)_mm512_scalef_ps((__m512)y, (__m512)whole);
#else
    y = chosen(power < -126, (lanes){0}, y * (lanes)((power + 127) << 23));
    return chosen(x == x, y, x);
#endif
}

static inline float number(const stored *from)
{
#ifdef BFLOAT16
    uint32_t bits = (uint32_t)*from << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
#else
    return *from;
#endif
}

/* number / (1 + e^-x) */
static inline lanes by_logistic(lanes number, lanes x)
{
    lanes small = exponential(chosen(x > 0, -x, x)); /* at most 1 */
    return number * chosen(x > 0, (lanes){0} + 1, small) / (1 + small);
}

static inline lanes gelu(lanes x) /* tanh approximation */
{
    const float twice = 1.59576912f; /* 2 * sqrt(2 / pi); (1 + tanh(x)) / 2 is the logistic function of 2 * x */
    return by_logistic(x, twice * fused(x * x * x, (lanes){0} + 0.044715f, x));
}
