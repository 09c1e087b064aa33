/* Products by tiles (AMX), for bfloat16 on CPUs that have them: see tiles.c. */
#include "products.h"

#if defined(BFLOAT16) && defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__)
#define TILES
extern int has_tiles; /* 1 if the system lets this process use tiles */

/* Configure tiles for `upper` rows of x and `lower` rows below them, each 1 to 16, and `outputs` outputs of a panel. */
void shape_tiles(long upper, long lower, long outputs);

/* `upper` rows and `lower` rows below them, 0 to 16, times the first 2 panels of `linear`: every loaded tile is
 * multiplied twice. `next`: weights of the same size to prefetch, or NULL. Rows of `out` have `outputs` numbers. */
void block_of_tiles(long upper, long lower, const struct linear *linear, const stored *x, const uint32_t *next,
                    stored *out, long outputs);

/* As panel_sums. */
void sums_by_tiles(long rows, long inputs, const stored *x, const uint32_t *panel, long outputs, float *sums);
#else
#define has_tiles 0
#endif
