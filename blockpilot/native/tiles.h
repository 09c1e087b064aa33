/* Products by tiles, where the CPU has them and the numbers are bfloat16: see tiles.c. */
#include "products.h"

#if defined(BFLOAT16) && defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__)
#define TILES
extern int has_tiles; /* whether the system lets this process use them */

/* Tiles for `upper` rows of x and `lower` ones below them, each 1 to 16, and as many outputs of a panel. */
void shape_tiles(long upper, long lower, long outputs);

/* `upper` rows and `lower` ones below them, 0 to 16, by the first 2 panels of `linear`: every tile that is loaded is
 * multiplied twice. `next` are as many weights to ask memory for, or NULL. out: a row has `outputs`. */
void block_of_tiles(long upper, long lower, const struct linear *linear, const stored *x, const uint32_t *next,
                    stored *out, long outputs);

/* As panel_sums. */
void sums_by_tiles(long rows, long inputs, const stored *x, const uint32_t *panel, long outputs, float *sums);
#else
#define has_tiles 0
#endif
