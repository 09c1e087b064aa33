/* Vectors of float32 lanes over stored numbers: float32, or bfloat16 with -DBFLOAT16. See native.py. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
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

static inline lanes load(const stored *from)
{
    packed found = *(const packed *)from;
#ifdef BFLOAT16
    return (lanes)(__builtin_convertvector(found, bits) << 16);
#else
    return found;
#endif
}

static inline packed narrowed(lanes x) /* to nearest, ties to even; NaN stays */
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

static inline void store(lanes x, stored *to) { *(packed *)to = narrowed(x); }

static inline lanes rounded(lanes x) /* as it would be stored */
{
    packed found = narrowed(x);
    return load((const stored *)&found);
}
