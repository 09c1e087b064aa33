/* Best choices of a slot after each possible previous token, as Edges.link of drafts/edges.py. */
#include <math.h>
#include <stdint.h>

enum { MOST_WIDTH = 64, MOST_RANK = 512 }; /* of linking.py */

static float dot(long rank, const float *a, const float *b)
{
    float lanes[8] = {0}, total = 0;
    long i = 0;
    for (; i + 8 <= rank; i += 8)
        for (int lane = 0; lane < 8; lane++)
            lanes[lane] += a[i + lane] * b[i + lane];
    for (; i < rank; i++)
        total += a[i] * b[i];
    for (int lane = 0; lane < 8; lane++)
        total += lanes[lane];
    return total;
}

/* log(sum(exp(values [num])) + exp(more)) */
static float log_sum(long num, const float *values, float more)
{
    float most = more, total = 0;
    for (long i = 0; i < num; i++)
        most = fmaxf(most, values[i]);
    if (!(most > -INFINITY))
        return most;
    for (long i = 0; i < num; i++)
        total += expf(values[i] - most);
    return most + logf(total + expf(more - most));
}

/* Rerank the choices tokens, log_probs and scores [num][width] of slots after each previous token `before`
 * [num][contexts].
 *
 * Adds to log_probs and scores the inner product of the previous token's row of `predecessors` and the choice's row of
 * `successors` [vocab][rank], gated by `projection` [rank][inner] times the slot's hidden state [num][inner] (unless
 * projection is NULL), and divided by the temperature [num]. Then normalises both over the choices; with `is_whole`,
 * all other tokens together keep their probability mass. Writes the `best` choices after each previous token to
 * found_tokens, found_log_probs and found_scores [num][contexts][best], and their indices among the slot's choices to
 * indices. width is at most MOST_WIDTH, rank at most MOST_RANK. */
void link_choices(long num, long contexts, long width, long rank, long inner, long best, const float *hidden,
                  const float *projection, const float *predecessors, const float *successors, const int64_t *before,
                  const float *temperatures, int is_whole, const int64_t *tokens, const float *log_probs,
                  const float *scores, int64_t *found_tokens, float *found_log_probs, float *found_scores,
                  int64_t *indices)
{
    const float *rows[MOST_WIDTH];
    float lifted_probs[MOST_WIDTH], lifted_scores[MOST_WIDTH], gates[MOST_RANK], vector[MOST_RANK];
    for (long n = 0; n < num; n++, tokens += width, log_probs += width, scores += width, hidden += inner) {
        float known = 0;
        for (long k = 0; k < width; k++) {
            rows[k] = successors + tokens[k] * rank;
            known += expf(log_probs[k]);
        }
        for (long i = 0; i < rank; i++)
            gates[i] = (projection ? dot(inner, hidden, projection + i * inner) : 1) / temperatures[n];
        float log_rest = is_whole ? log1pf(-fminf(known, 1 - 1e-6f)) : -INFINITY;
        for (long context = 0; context < contexts; context++, before++) {
            for (long i = 0; i < rank; i++)
                vector[i] = gates[i] * predecessors[*before * rank + i];
            for (long k = 0; k < width; k++) {
                float lift = dot(rank, vector, rows[k]);
                lifted_probs[k] = log_probs[k] + lift;
                lifted_scores[k] = scores[k] + lift;
            }
            float total = log_sum(width, lifted_probs, log_rest);
            uint64_t taken = 0;
            for (long i = 0; i < best; i++) {
                long next = -1;
                for (long k = 0; k < width; k++)
                    if (!(taken >> k & 1) && (next < 0 || lifted_scores[k] > lifted_scores[next]))
                        next = k;
                taken |= (uint64_t)1 << next;
                *found_tokens++ = tokens[next];
                *found_log_probs++ = lifted_probs[next] - total;
                *found_scores++ = lifted_scores[next] - total;
                *indices++ = next;
            }
        }
    }
}
