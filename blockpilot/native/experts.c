/* SwiGLU and GeGLU, and mixtures of experts, as in Qwen3-MoE, Qwen3.5, gpt-oss and Gemma 4.
 *
 * Batch invariant, as products are: a row's experts are summed in the order of their scores, in float32, regardless of
 * the other rows. Each expert multiplies all of its rows together.
 */
#include "experts.h"

void swiglu(long rows, long inner, const stored *gate_up, stored *out)
{
#pragma omp for
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < inner; i += LANES) {
            lanes gate = load(gate_up + row * 2 * inner + i), up = load(gate_up + (row * 2 + 1) * inner + i);
            store(rounded(by_logistic(gate, gate)) * up, out + row * inner + i);
        }
}

void geglu(long rows, long inner, const stored *gate_up, stored *out)
{
#pragma omp for
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < inner; i += LANES) {
            lanes gate = load(gate_up + row * 2 * inner + i), up = load(gate_up + (row * 2 + 1) * inner + i);
            store(rounded(gelu(gate)) * up, out + row * inner + i);
        }
}

void clamped_swiglu(long rows, long inner, float limit, float alpha, const stored *gate_up, stored *out)
{
    const lanes low = (lanes){0} - limit;
#pragma omp for
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < inner; i += LANES) { /* `larger` returns a NaN in its second argument */
            lanes gate = -larger(low, -load(gate_up + row * 2 * inner + i));
            lanes up = larger(low, -larger(low, -load(gate_up + (row * 2 + 1) * inner + i)));
            store(rounded(by_logistic(gate, gate * alpha)) * (up + 1), out + row * inner + i);
        }
}

/* Index of the best of scores [num] that is not yet taken, the first of equal ones. Marks it as taken. */
static long take_best(long num, const stored *scores, uint8_t *taken)
{
    long best = -1;
    for (long i = 0; i < num; i++)
        if (!taken[i] && (best < 0 || number(scores + i) > number(scores + best)))
            best = i;
    taken[best] = 1;
    return best;
}

/* Gating: scores [num] of a row -> its top experts `ids` and their weights [chosen], by softmax over all experts. The
 * weights are NaN if a score is NaN. */
static void route(const struct experts *experts, const stored *scores, int64_t *ids, float *weights)
{
    float total = 0, of_chosen = 0;
    uint8_t taken[experts->num];
    memset(taken, 0, sizeof taken);
    for (long i = 0; i < experts->chosen; i++)
        ids[i] = take_best(experts->num, scores, taken);
    float top = number(scores + ids[0]);
    for (long i = 0; i < experts->num; i++)
        total += expf(number(scores + i) - top);
    for (long i = 0; i < experts->chosen; i++) {
        weights[i] = expf(number(scores + ids[i]) - top) / total;
        of_chosen += weights[i];
    }
    for (long i = 0; i < experts->chosen; i++) {
        lanes weight = (lanes){0} + (experts->normed ? weights[i] / of_chosen : weights[i]);
        weights[i] = experts->scales ? weight[0] * experts->scales[ids[i]] : rounded(weight)[0];
    }
}

/* Sort the (row, expert) pairs by expert, and distribute the products of the active experts over the threads. */
static void order(const struct experts *experts, long pairs, long hidden, const struct expert_buffers *buffers,
                  long threads)
{
    long firsts[experts->num + 1], active = 0;
    memset(firsts, 0, sizeof firsts);
    for (long pair = 0; pair < pairs; pair++)
        firsts[buffers->ids[pair] + 1]++;
    for (long i = 0; i < experts->num; i++) {
        long first = firsts[i], rows = firsts[i + 1];
        firsts[i + 1] += first;
        if (!rows)
            continue;
        buffers->up[active] = (struct batch){experts->gate_up + i, rows, buffers->x + first * hidden,
                                          buffers->gate_up + first * 2 * experts->inner};
        buffers->down[active++] = (struct batch){experts->down + i, rows, buffers->gated + first * experts->inner,
                                              buffers->outputs + first * hidden};
    }
    for (long pair = 0; pair < pairs; pair++)
        buffers->indices[pair] = firsts[buffers->ids[pair]]++;
    share_out(experts->gate_up, active, threads, buffers->shares + threads);
    share_out(experts->down, active, threads, buffers->shares + 2 * threads);
}

void mix(const struct experts *experts, long rows, long hidden, const stored *x, const stored *routed,
         const struct expert_buffers *buffers, stored *out, long threads)
{
    long num = experts->num, chosen = experts->chosen, pairs = rows * chosen;
#pragma omp single
    share_out(&experts->router, 1, threads, buffers->shares);
    multiply(&experts->router, rows, routed, buffers->scores, buffers->shares, threads);
#pragma omp for
    for (long row = 0; row < rows; row++)
        route(experts, buffers->scores + row * num, buffers->ids + row * chosen, buffers->weights + row * chosen);
#pragma omp single
    order(experts, pairs, hidden, buffers, threads);
#pragma omp for
    for (long pair = 0; pair < pairs; pair++)
        memcpy(buffers->x + buffers->indices[pair] * hidden, x + pair / chosen * hidden, hidden * sizeof(stored));
    multiply_all(buffers->up, buffers->shares + threads, threads);
    if (experts->limit)
        clamped_swiglu(pairs, experts->inner, experts->limit, experts->alpha, buffers->gate_up, buffers->gated);
    else
        (experts->gelu ? geglu : swiglu)(pairs, experts->inner, buffers->gate_up, buffers->gated);
    multiply_all(buffers->down, buffers->shares + 2 * threads, threads);
#pragma omp for
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < hidden; i += LANES) {
            lanes sum = {0};
            for (long pair = row * chosen; pair < (row + 1) * chosen; pair++)
                sum = fused(spread(buffers->weights[pair]), load(buffers->outputs + buffers->indices[pair] * hidden + i), sum);
            store(sum, out + row * hidden + i);
        }
}

/* As `mix`, with routed = x; opens the parallel region itself. */
void mix_rows(const struct experts *experts, long rows, long hidden, const stored *x,
              const struct expert_buffers *buffers, stored *out, int threads)
{
#pragma omp parallel num_threads(threads)
    mix(experts, rows, hidden, x, x, buffers, out, threads);
}
