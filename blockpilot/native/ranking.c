/* Ranking of rows of logits, as in sampling.py: greedy, or by the exponential race of a temperature and a key.
 *
 * One or two passes over a row: vectors of logits that cannot rank among the best are skipped. Ties go to the lower
 * token.
 */
#include "lanes.h"
#include <float.h>
#include <omp.h>
#include <stdlib.h>

#define ARRIVALS 256 /* NUM_ARRIVALS of sampling.py: every sampled text depends on it */
#define ROUNDING 1e-3 /* bound of float32 scores' rounding error, with a wide margin; race() adds 1e-6 * |top| */
#define LARGEST 1e30f
#define BINS 2048 /* of scores, by their distance from the best */
#define SPAN 32.0f /* range of the distances; scores further away are in the last bin */

/* Size of the vocabulary, and the tokens that rows have logits of: ids [size], ascending, and indices [vocabulary], the
 * index of each token in ids, -1 if it is not there. Both NULL: all tokens. */
struct subset {
    long vocabulary;
    const int64_t *ids;
    const int32_t *indices;
};

static inline int64_t token_at(const struct subset *subset, long place) { return subset->ids ? subset->ids[place] : place; }
static inline long place_of(const struct subset *subset, int64_t token)
{
    return subset->indices ? subset->indices[token] : token;
}

/* Best tokens so far, best first: `found` of at most `num`. */
struct ranking {
    long num, found;
    int64_t *tokens;
    double *values;
};

/* Value that a token must exceed to enter the ranking. */
static double bound(const struct ranking *ranking)
{
    return ranking->found < ranking->num ? -INFINITY : ranking->values[ranking->num - 1];
}

/* Insert a token; if it is already ranked, the better of its two values counts. */
static void rank(struct ranking *ranking, int64_t token, double value)
{
    int64_t *tokens = ranking->tokens;
    double *values = ranking->values;
    long place, known = 0;
    if (!(value > bound(ranking)))
        return;
    while (known < ranking->found && tokens[known] != token)
        known++;
    if (known < ranking->found && values[known] >= value)
        return;
    if (known == ranking->found && ranking->found < ranking->num)
        ranking->found++;
    for (place = known < ranking->num ? known : ranking->num - 1; place && values[place - 1] < value; place--)
        tokens[place] = tokens[place - 1], values[place] = values[place - 1];
    tokens[place] = token, values[place] = value;
}

static const uint64_t step = 0x9E3779B97F4A7C15;

static uint64_t mixed(uint64_t x) /* the finaliser of splitmix64 */
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

static double uniform(uint64_t key, uint64_t number) { return ((mixed(key + number * step) >> 12) + 0.5) * 0x1p-52; }
static double waiting(uint64_t key, uint64_t number) { return -log1p(-uniform(key, number)); }

/* LANES numbers of a row [size] from index i on; -INFINITY past its end. */
static inline lanes vector(const stored *row, long size, long i)
{
    lanes found = {0};
    if (i + LANES <= size)
        return load(row + i);
    found -= INFINITY;
    for (long lane = 0; i + lane < size; lane++)
        found[lane] = number(row + i + lane);
    return found;
}

/* Largest number of a row; NaN if any is NaN. */
static float largest(const stored *row, long size)
{
    lanes top = {0};
    ints broken = {0};
    float found = -INFINITY;
    top -= INFINITY;
    for (long i = 0; i < size; i += LANES) {
        lanes x = vector(row, size, i);
        broken |= x != x;
        top = larger(top, x);
    }
    for (long lane = 0; lane < LANES; lane++)
        found = top[lane] > found ? top[lane] : found;
    return any(broken) ? NAN : found;
}

static void rank_all(const stored *row, long size, const struct subset *subset, struct ranking *ranking)
{
    for (long i = 0; i < size; i += LANES) {
        lanes x = vector(row, size, i);
        if (any(x > (float)bound(ranking)))
            for (long lane = 0; lane < LANES; lane++)
                if (i + lane < size)
                    rank(ranking, token_at(subset, i + lane), x[lane]);
    }
}

/* --- min_p, top_k and top_p --- */

/* Histogram of a row's scores by their distance from the best, and the state of a walk from the best on. */
struct bins {
    long count[BINS];
    double mass[BINS]; /* sums of e^(score - best) */
    const stored *row;
    long size, above; /* above: number of scores in the bins before `bin` */
    float top, temperature;
    double mass_above;
    int bin;
    float *members; /* logits of `bin`, best first */
};

static inline lanes bin_of(lanes x, float top, float temperature)
{
    float scale = BINS / SPAN / temperature;
    lanes bin = (top - x) * (scale < 1e30f ? scale : 1e30f);
    return chosen(bin < BINS - 1, bin, (lanes){0} + (BINS - 1));
}

static void fill(struct bins *bins)
{
    memset(bins->count, 0, sizeof bins->count), memset(bins->mass, 0, sizeof bins->mass);
    for (long i = 0; i < bins->size; i += LANES) {
        lanes x = vector(bins->row, bins->size, i), mass = exponential((x - bins->top) * (1 / bins->temperature));
        ints bin = __builtin_convertvector(bin_of(x, bins->top, bins->temperature), ints);
        for (long lane = 0; lane < LANES && i + lane < bins->size; lane++)
            bins->count[bin[lane]]++, bins->mass[bin[lane]] += mass[lane];
    }
}

static int falling(const void *x, const void *y)
{
    float a = *(const float *)x, b = *(const float *)y;
    return (a < b) - (a > b);
}

static double mass_of(const struct bins *bins, float logit) { return exp((logit - bins->top) / (double)bins->temperature); }

/* Walk from the best to the bin in which `count` scores or `mass` are reached, and sort its logits. */
static void walk_to(struct bins *bins, long count, double mass)
{
    long found = 0;
    float first;
    bins->above = 0, bins->mass_above = 0, bins->bin = 0;
    while (bins->bin < BINS - 1 && bins->above + bins->count[bins->bin] < count &&
           bins->mass_above + bins->mass[bins->bin] < mass) {
        bins->above += bins->count[bins->bin], bins->mass_above += bins->mass[bins->bin];
        bins->bin++;
    }
    first = bins->bin;
    for (long i = 0; i < bins->size; i += LANES) {
        lanes x = vector(bins->row, bins->size, i), bin = bin_of(x, bins->top, bins->temperature);
        if (any((bin >= first) & (bin < first + 1)))
            for (long lane = 0; lane < LANES && i + lane < bins->size; lane++)
                if (bin[lane] >= first && bin[lane] < first + 1)
                    bins->members[found++] = x[lane];
    }
    qsort(bins->members, found, sizeof *bins->members, falling);
}

/* Number of logits of a row that are at least `floor`. */
static long count_from(const stored *row, long size, float floor)
{
    long found = 0;
    for (long i = 0; i < size; i += LANES) {
        lanes x = vector(row, size, i);
        if (any(x >= floor))
            for (long lane = 0; lane < LANES && i + lane < size; lane++)
                found += x[lane] >= floor;
    }
    return found;
}

/* Smallest logit of a row that top_k and then top_p include; ties with it are included. */
static float least_kept(const stored *row, long size, float top, float temperature, long top_k, double top_p)
{
    struct bins bins = {.row = row, .size = size, .top = top, .temperature = temperature};
    float least = -INFINITY;
    double total = 0;
    bins.members = malloc(size * sizeof *bins.members);
    if (!bins.members)
        abort();
    fill(&bins);
    for (long bin = 0; bin < BINS; bin++)
        total += bins.mass[bin];
    if (top_k < size) {
        walk_to(&bins, top_k, INFINITY);
        least = bins.members[top_k - bins.above - 1];
        total = bins.mass_above;
        for (long i = 0; i < top_k - bins.above; i++)
            total += mass_of(&bins, bins.members[i]);
    }
    if (top_p < 1) {
        double mass;
        long i = 0, left;
        walk_to(&bins, top_k, top_p * total);
        left = bins.count[bins.bin] < top_k - bins.above ? bins.count[bins.bin] : top_k - bins.above;
        for (mass = bins.mass_above; i < left && (mass < top_p * total || !i); i++)
            mass += mass_of(&bins, bins.members[i]);
        least = bins.members[i - 1];
    }
    free(bins.members);
    return least;
}

/* --- the race --- */

/* Exponential race over logits of at least `least`: the first arrivals one by one, then all other tokens whose score is
 * high enough to rank among the best. */
static void race(const stored *row, long size, const struct subset *subset, float top, float temperature, float least,
                 uint64_t key, struct ranking *ranking)
{
    long all = subset->vocabulary;
    double time = 0;
    for (long i = 0; i < ARRIVALS; i++) {
        int64_t token = uniform(key, i + ARRIVALS) * all;
        long place = place_of(subset, token = token < all ? token : all - 1);
        time += waiting(key, i) / all;
        if (place >= 0 && number(row + place) >= least)
            rank(ranking, token, number(row + place) / temperature - log(time));
    }
    double until = log(time), rounding = ROUNDING * temperature + 1e-6 * fabsf(top);
    for (long i = 0; i < size; i += LANES) {
        lanes x = vector(row, size, i);
        double enough = (bound(ranking) + until) * temperature - rounding;
        float limit = enough > -FLT_MAX ? enough : -FLT_MAX;
        limit = limit > least ? limit : least;
        if (any(x >= limit))
            for (long lane = 0; lane < LANES; lane++)
                if (x[lane] >= limit) {
                    int64_t token = token_at(subset, i + lane);
                    double late = time + waiting(key, token + 2 * ARRIVALS);
                    rank(ranking, token, x[lane] / temperature - log(late));
                }
    }
}

/* Logarithm of the sum of e^(x / temperature) over logits of at least `least`. */
static double log_total(const stored *row, long size, float top, float temperature, float least)
{
    lanes total = {0};
    for (long i = 0; i < size; i += LANES) {
        lanes x = vector(row, size, i);
        total += chosen(x >= least, exponential((x - top) * (1 / temperature)), (lanes){0});
    }
    return top / temperature + log(sum(total));
}

/* logits [rows, size] of a `vocabulary`, or of its tokens `ids` with their `indices` (struct subset; NULL for all) ->
 * the best tokens of each row and their values [rows, num], as in `sampling.race`.
 *
 * limits [rows, 3]: temperature, top_p and log_min_p; temperature 0 is greedy, without limits. draws [rows, 2]: top_k
 * and seed; a row's key is a hash of its seed and position. If log_probs [rows, num] is not NULL, it is written, and
 * values are normalised over the row, too. broken [rows] is 1 if a row's largest logit is NaN, not finite or beyond
 * LARGEST. In broken rows, and beyond the tokens that can be sampled, values are -INFINITY and tokens arbitrary. room
 * [rows, num] is a buffer. */
void rank_rows(long rows, long size, long vocabulary, const int64_t *ids, const int32_t *indices, const stored *logits,
               const double *limits, const int64_t *draws, const int64_t *positions, long num, int64_t *tokens,
               float *values, float *log_probs, uint8_t *broken, double *room, int threads)
{
    const struct subset subset = {vocabulary, ids, indices};
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long i = 0; i < rows; i++) {
        const stored *row = logits + i * size;
        struct ranking ranking = {num, 0, tokens + i * num, room + i * num};
        double top_p = limits[3 * i + 1], log_min_p = limits[3 * i + 2];
        long most = draws[2 * i], seed = draws[2 * i + 1], is_drawn = limits[3 * i] > 0;
        float top = largest(row, size), temperature = is_drawn ? limits[3 * i] : 1, least = -INFINITY;
        broken[i] = !(fabsf(top) < LARGEST);
        if (!broken[i] && is_drawn && (most < size || top_p < 1 || log_min_p > -INFINITY)) {
            if (log_min_p > -INFINITY) { /* min_p includes the `left` best tokens, as a top_k does */
                long left = count_from(row, size, top + temperature * log_min_p);
                most = left < most ? left : most;
            }
            least = least_kept(row, size, top, temperature, most, top_p);
        }
        if (!broken[i] && is_drawn)
            race(row, size, &subset, top, temperature, least, mixed((mixed(seed + step) ^ positions[i]) + step),
                 &ranking);
        else if (!broken[i])
            rank_all(row, size, &subset, &ranking);
        double total = log_probs && !broken[i] ? log_total(row, size, top, temperature, least) : 0;
        for (long place = 0; place < num; place++) {
            int is_found = place < ranking.found;
            ranking.tokens[place] = is_found ? ranking.tokens[place] : token_at(&subset, 0);
            values[i * num + place] = is_found ? ranking.values[place] - total : -INFINITY;
            if (log_probs)
                log_probs[i * num + place] =
                    is_found ? number(row + place_of(&subset, ranking.tokens[place])) / temperature - total : -INFINITY;
        }
    }
}
