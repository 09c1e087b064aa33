/* Acceptance probabilities ("chances") of a draft's choices, as in acceptance.py, and best-first growth of draft trees,
 * as in trees.py: node by node in descending order of probability. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { CONTEXTS = 3, WEIGHTS = 11 }; /* of acceptance.py */
enum { DRAFTED = 1, LOOKED_UP = 2 };   /* of types.py */
static const double LEAST_SCORE = -30, LEAST_CHANCE = 1e-4;

static double bounded(float score) { return score > LEAST_SCORE ? score : LEAST_SCORE; /* also if it is NaN */ }

/* own = the draft's probabilities of a slot's choices [width]; for sampled tokens the softmax of their scores, of which
 * the first is the best. */
static void draft_probs(long width, const float *scores, const float *log_probs, int drawn, double *own)
{
    double total = 0;
    for (long k = 0; k < width; k++)
        total += own[k] = exp(drawn ? bounded(scores[k]) - bounded(scores[0]) : bounded(log_probs[k]));
    for (long k = 0; drawn && k < width; k++)
        own[k] /= total;
}

/* chances [CONTEXTS][num][width] = acceptance probabilities of the choices of `num` slots, by the number of later (not
 * first) choices above; they fall along width. From the logistic regression of acceptance.py with weights [2][WEIGHTS]
 * (greedy, sampled), or from the draft if known [num] is 0. slots [num]: index below the anchor, from 0. */
void choice_chances(long num, long width, const float *scores, const float *log_probs, const uint8_t *drawn,
                    const int64_t *slots, const uint8_t *known, const double *weights, double *chances)
{
    for (long n = 0; n < num; n++, scores += width, log_probs += width) {
        const double *w = weights + (drawn[n] ? WEIGHTS : 0), *context_weights = w + 5;
        double own[width], logits[width];
        draft_probs(width, scores, log_probs, drawn[n], own);
        for (long k = 0; k < width; k++) {
            if (!(scores[k] > -INFINITY)) { /* cannot be sampled, or NaN */
                own[k] = 0, logits[k] = -INFINITY;
                continue;
            }
            double p = fmin(fmax(own[k], LEAST_CHANCE), 1 - LEAST_CHANCE), score = bounded(scores[k]);
            double to_next = k + 1 < width ? score - bounded(scores[k + 1]) : 0;
            logits[k] = log(p / (1 - p)) * (1 + w[0]) + w[1] * bounded(log_probs[k]) + w[3] * to_next
                      + w[2] * (score - bounded(scores[0])) + w[4] / (1 + slots[n]);
        }
        for (long context = 0; context < CONTEXTS; context++) {
            double *out = chances + (context * num + n) * width, total = 0, least = INFINITY;
            if (context && !known[n]) {
                memcpy(out, out - num * width, width * sizeof *out);
                continue;
            }
            for (long k = 0; k < width && known[n]; k++)
                total += out[k] = 1 / (1 + exp(-logits[k] - context_weights[2 * context + (k > 0)]));
            for (long k = 0; k < width; k++) {
                out[k] = !known[n] ? own[k] : total > 1 ? out[k] / total : out[k];
                out[k] = least = fmin(least, out[k]);
            }
        }
    }
}

/* A choice that may become a node. Ties of probability go to the earlier parent, then to the better rank. */
struct candidate {
    double chance, above;
    int32_t parent, depth, after, rank, num_later;
};

static int comes_first(const struct candidate *a, const struct candidate *b)
{
    if (a->chance != b->chance)
        return a->chance > b->chance;
    return a->parent != b->parent ? a->parent < b->parent : a->rank < b->rank;
}

static void push(struct candidate *heap, long *size, struct candidate item)
{
    long place = (*size)++;
    for (; place && comes_first(&item, &heap[(place - 1) / 2]); place = (place - 1) / 2)
        heap[place] = heap[(place - 1) / 2];
    heap[place] = item;
}

static struct candidate pop(struct candidate *heap, long *size)
{
    struct candidate first = heap[0], last = heap[--*size];
    long place = 0, below;
    while ((below = 2 * place + 1) < *size) {
        if (below + 1 < *size && comes_first(&heap[below + 1], &heap[below]))
            below++;
        if (!comes_first(&heap[below], &last))
            break;
        heap[place] = heap[below];
        place = below;
    }
    heap[place] = last;
    return first;
}

/* The `num` slots of all rows, each with `lists` lists of `width` choices; the choice in the slot above selects the
 * list. chances [laters][slots][lists][width] by the number of later (not first) choices above, at most laters - 1;
 * next_lists [slots][lists][width]: index of the list in the next slot after a choice, -1 for none. */
struct slots {
    long num, lists, width, laters;
    const double *chances;
    const int64_t *next_lists;
    const uint8_t *is_later; /* [slots][lists][width]; NULL: all choices but the first */
};

/* Push a candidate, whose list and rank in `slot` are set, onto the heap, unless its chance is 0. */
static void push_choice(const struct slots *slots, struct candidate *heap, long *size, long slot, long widest,
                        struct candidate item)
{
    long later = item.num_later < slots->laters ? item.num_later : slots->laters - 1;
    if (item.after < 0 || item.rank >= widest)
        return;
    long list = (later * slots->num + slot) * slots->lists + item.after;
    item.chance = item.above * slots->chances[list * slots->width + item.rank];
    if (item.chance > 0)
        push(heap, size, item);
}

/* lists_with_paths: a draft's lists of choices, as in `struct slots`, and one more list per slot for nodes on a lookup
 * path: the path's next token, merged with the draft's choices. So a token that both propose is one node.
 *
 * Inputs of row r: slots first[r] .. first[r] + depths[r] - 1 of the draft, and the first sizes[r] tokens of paths
 * [rows][most]. Its output slots begin at begins[r]; their number is max(depths[r], sizes[r]). matches
 * [rows][MATCH_INPUTS] are regression inputs of path tokens, weights [2][PATH_INPUTS] (greedy, sampled) those of the
 * regression; `independent` is 1 if the draft's choices do not depend on those above. Output choices
 * [slots][1 + lists][1 + width]: list 0 is that of the path, the others are the draft's with an empty entry (token
 * -1) at the end. choice_index is the flat index among the draft's choices, -1 for none; path_index is r * most + d for
 * token d of a path, else -1; inputs [rows][most][PATH_INPUTS] are the regression inputs of the paths' tokens. */
enum { MATCH_INPUTS = 3, PATH_INPUTS = 9 }; /* of acceptance.py */

static double path_chance(const double *match, long depth, int has_draft, long rank, double own, const double *weights,
                          double *inputs)
{
    double p = fmin(fmax(own, LEAST_CHANCE), 1 - LEAST_CHANCE), sum = 0;
    inputs[0] = 1;
    inputs[1] = log2(match[0] + depth) / 5;
    inputs[2] = match[1], inputs[3] = match[2];
    inputs[4] = depth > 0;
    inputs[5] = rank >= 0 ? log(p / (1 - p)) / 5 : 0;
    inputs[6] = rank == 0, inputs[7] = rank > 0, inputs[8] = has_draft && rank < 0;
    for (long i = 0; i < PATH_INPUTS; i++)
        sum += weights[i] * inputs[i];
    return 1 / (1 + exp(-sum));
}

/* Truncate lookup paths, before drafting: sizes[r] is reduced to the tokens whose probability of being accepted,
 * together with all before, is at least `least`; gains[r] is the expected number of accepted tokens among them. */
void cut_paths(long rows, int64_t *sizes, const double *matches, const int64_t *drawn,
                  const double *weights, double least, double *gains)
{
    double inputs[PATH_INPUTS];
    for (long r = 0; r < rows; r++) {
        double reached = 1;
        gains[r] = 0;
        for (long d = 0; d < sizes[r]; d++) {
            const double *w = weights + (drawn[r] ? PATH_INPUTS : 0);
            reached *= path_chance(matches + r * MATCH_INPUTS, d, 0, -1, 0, w, inputs);
            if (reached < least)
                sizes[r] = d;
            else
                gains[r] += reached;
        }
    }
}

void lists_with_paths(long rows, const int64_t *first, const int64_t *depths, long num, long lists, long width,
                      long laters, const int64_t *tokens, const double *chances, const int64_t *next_lists, int independent,
                      const int64_t *drawn, const int64_t *sizes, const int32_t *paths, long most,
                      const double *matches, const double *weights, const int64_t *begins, long num_all,
                      int64_t *out_tokens, double *out_chances, int64_t *out_next, int64_t *choice_index,
                      uint8_t *is_later, int64_t *path_index, double *inputs)
{
    long wide = width + 1, all_lists = lists + 1, all = num_all * all_lists * wide;
    for (long i = 0; i < all; i++)
        out_tokens[i] = out_next[i] = choice_index[i] = path_index[i] = -1, is_later[i] = 1;
    for (long i = 0; i < laters * all; i++)
        out_chances[i] = 0;
    for (long r = 0; r < rows; r++) {
        long after = 0, later = 0, end = depths[r] > sizes[r] ? depths[r] : sizes[r];
        for (long d = 0; d < end; d++) {
            long start = (begins[r] + d) * all_lists * wide, drafted = d < depths[r] ? (first[r] + d) * lists : -1;
            for (long c = 0; drafted >= 0 && c < lists; c++)
                for (long k = 0; k < width; k++) {
                    long source = (drafted + c) * width + k, at = start + (c + 1) * wide + k;
                    out_tokens[at] = tokens[source], choice_index[at] = source, is_later[at] = k > 0;
                    out_next[at] = next_lists[source] < 0 ? -1 : next_lists[source] + 1;
                    for (long a = 0; a < laters; a++)
                        out_chances[a * all + at] = chances[a * num * lists * width + source];
                }
            if (d > sizes[r])
                continue; /* no choice leads to list 0 here */
            int has_draft = drafted >= 0 && after >= 0, follows = d < sizes[r];
            long list = has_draft ? (drafted + after) * width : 0, rank = -1;
            long later_class = later < laters ? later : laters - 1;
            const double *list_chances = chances + later_class * num * lists * width + list;
            for (long k = 0; has_draft && follows && k < width && rank < 0; k++)
                if (tokens[list + k] == paths[r * most + d] && list_chances[k] > 0)
                    rank = k;
            double own = rank >= 0 ? list_chances[rank] : 0, chance = 0;
            if (follows)
                chance = path_chance(matches + r * MATCH_INPUTS, d, has_draft, rank, own,
                                     weights + (drawn[r] ? PATH_INPUTS : 0), inputs + (r * most + d) * PATH_INPUTS);
            double scale = fmin(1, (1 - chance) / fmax(1 - own, LEAST_CHANCE));
            int placed = !follows;
            for (long k = 0, n = 0; n < wide && (k < width || !placed); ) {
                long at = start + n;
                if (k == rank) {
                    k++;
                    continue;
                }
                if (!placed && (!has_draft || k >= width || chance >= list_chances[k] * scale)) {
                    out_tokens[at] = paths[r * most + d], out_next[at] = 0, is_later[at] = rank != 0;
                    choice_index[at] = rank >= 0 ? list + rank : -1, path_index[at] = r * most + d;
                    for (long a = 0; a < laters; a++)
                        out_chances[a * all + at] = chance;
                    placed = 1, n++;
                    continue;
                }
                if (!has_draft)
                    break;
                out_tokens[at] = tokens[list + k], choice_index[at] = list + k, is_later[at] = k > 0;
                out_next[at] = next_lists[list + k] < 0 ? -1 : next_lists[list + k] + 1;
                for (long a = 0; a < laters; a++)
                    out_chances[a * all + at] = list_chances[k] * scale;
                k++, n++;
            }
            later += rank != 0;
            after = rank >= 0 ? next_lists[list + rank] : independent ? 0 : -1;
        }
    }
}

/* Grow a tree for each row: at most most[r] nodes in descending order of probability, from slots first[r] .. first[r] +
 * depths[r] - 1 and the widest[r] best choices of each list [slots][lists][width]. Inputs of choices: choice_tokens,
 * and from_choice and from_path, their flat indices among the draft's choices and the paths' tokens, -1 for none;
 * without paths both are NULL, and choices are the draft's. Outputs: num[r] nodes of row r, which begin at r * room,
 * with their chances, tokens, parents (0 is the anchor), depths (1 below the anchor), choice_index and path_index (as
 * from_choice and from_path), num_later (later choices above the node) and sources. Returns 0, or -1 if memory is
 * exhausted. */
int grow_trees(long rows, const int64_t *first, const int64_t *depths, const int64_t *most, const int64_t *widest,
               long num_slots, long lists, long width, long laters, const double *chances,
               const int64_t *next_lists, const uint8_t *is_later, const int64_t *choice_tokens,
               const int64_t *from_choice, const int64_t *from_path, long room, double *node_chances, int64_t *tokens,
               int64_t *parents, int64_t *node_depths, int64_t *choice_index, int64_t *num_later, int64_t *path_index,
               int64_t *sources, int64_t *num)
{
    const struct slots slots = {num_slots, lists, width, laters, chances, next_lists, is_later};
    struct candidate *heap = malloc((2 * room + 2) * sizeof *heap);
    if (!heap)
        return -1;
    for (long r = 0; r < rows; r++) {
        long size = 0, n = 0;
        if (depths[r])
            push_choice(&slots, heap, &size, first[r], widest[r], (struct candidate){.above = 1});
        for (; size && n < most[r]; n++) {
            struct candidate item = pop(heap, &size), next = item;
            long slot = first[r] + item.depth, choice = (slot * lists + item.after) * width + item.rank;
            long at = r * room + n;
            node_chances[at] = item.chance, tokens[at] = choice_tokens[choice], parents[at] = item.parent;
            node_depths[at] = item.depth + 1, num_later[at] = item.num_later;
            choice_index[at] = from_choice ? from_choice[choice] : choice;
            path_index[at] = from_path ? from_path[choice] : -1;
            sources[at] = (choice_index[at] >= 0 ? DRAFTED : 0) + (path_index[at] >= 0 ? LOOKED_UP : 0);
            next.rank++;
            push_choice(&slots, heap, &size, slot, widest[r], next);
            next = (struct candidate){item.chance, item.chance, n + 1, item.depth + 1, next_lists[choice], 0,
                                  item.num_later + (is_later ? is_later[choice] : item.rank > 0)};
            if (next.depth < depths[r])
                push_choice(&slots, heap, &size, slot + 1, widest[r], next);
        }
        num[r] = n;
    }
    free(heap);
    return 0;
}

/* Sort the first sizes[r] nodes of each tree into the order of verification (`tree_order` of trees.py): the chain of
 * first children, then the others in their order. indices [rows][1 + room], initially 0, become the new indices of the
 * anchor and of the nodes; tokens, parents and sources [rows][room] are in the new order. */
void order_trees(long rows, long room, const int64_t *sizes, const int64_t *node_tokens, const int64_t *node_parents,
                 const int64_t *node_sources, int64_t *indices, int64_t *tokens, int64_t *parents, int64_t *sources)
{
    for (long r = 0; r < rows; r++, indices += 1 + room) {
        const int64_t *parent = node_parents + r * room;
        long last = 0, index = 0;
        for (long n = 1; n <= sizes[r]; n++)
            if (parent[n - 1] == last)
                indices[n] = ++index, last = n;
        for (long n = 1; n <= sizes[r]; n++) {
            if (!indices[n])
                indices[n] = ++index;
            long from = r * room + n - 1, to = r * room + indices[n] - 1;
            tokens[to] = node_tokens[from], sources[to] = node_sources[from], parents[to] = indices[parent[n - 1]];
        }
    }
}

/* selected [trees] = number of nodes to verify of each tree: the best nodes of all trees, as many as maximise the
 * expected gain minus the cost, as choose_nodes of choose.py. saved_s [trees][room] are the gains of num[r] nodes,
 * descending. The step has `tokens` tokens so far. Each further token costs token_s; the first of every `further`
 * tokens beyond the first `tile` also costs tile_s. Loading all experts costs experts_s; a token chooses a `share` of
 * them and pays for those that no token before has chosen. heads [trees] is a buffer. */
void select_nodes(long trees, long room, const double *saved_s, const int64_t *num, long tokens, double token_s,
                  double tile_s, long tile, long further, double experts_s, double share, int64_t *selected,
                  int64_t *heads)
{
    double gain = 0, best = 0, new_experts_s = experts_s * share * pow(1 - share, tokens);
    for (long r = 0; r < trees; r++)
        selected[r] = heads[r] = 0;
    for (;;) {
        long first = -1;
        for (long r = 0; r < trees; r++)
            if (heads[r] < num[r] && (first < 0 || saved_s[r * room + heads[r]] > saved_s[first * room + heads[first]]))
                first = r;
        if (first < 0 || saved_s[first * room + heads[first]] <= token_s)
            return; /* the gains of the next ones are not above their cost, either */
        gain += saved_s[first * room + heads[first]++] - token_s - new_experts_s;
        if (tokens >= tile && (tokens - tile) % further == 0)
            gain -= tile_s;
        tokens++;
        new_experts_s *= 1 - share;
        if (gain > best) {
            best = gain;
            for (long r = 0; r < trees; r++)
                selected[r] = heads[r];
        }
    }
}
