/* Draft trees of a step grown best first, as trees.py grows them: node by node of falling chance. */
#include <stdint.h>
#include <stdlib.h>

/* A choice that may become a node. Of equal chances the one of the earlier parent comes first, then the better rank. */
struct offer {
    double chance, above;
    int32_t parent, depth, after, rank, num_later;
};

static int comes_first(const struct offer *a, const struct offer *b)
{
    if (a->chance != b->chance)
        return a->chance > b->chance;
    return a->parent != b->parent ? a->parent < b->parent : a->rank < b->rank;
}

static void push(struct offer *heap, long *size, struct offer item)
{
    long place = (*size)++;
    for (; place && comes_first(&item, &heap[(place - 1) / 2]); place = (place - 1) / 2)
        heap[place] = heap[(place - 1) / 2];
    heap[place] = item;
}

static struct offer pop(struct offer *heap, long *size)
{
    struct offer first = heap[0], last = heap[--*size];
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

/* The slots of all rows [slots], each with `contexts` lists of `width` choices after a choice of the slot above.
 * chances [laters][slots][contexts][width] by the number of later choices above; places [slots][contexts][width] say
 * which list follows a choice, -1 for none. */
struct slots {
    long num, contexts, width, laters;
    const double *chances;
    const int64_t *places;
};

static void offer(const struct slots *slots, struct offer *heap, long *size, long slot, long widest, struct offer item)
{
    long later = item.num_later < slots->laters ? item.num_later : slots->laters - 1;
    if (item.after < 0 || item.rank >= widest)
        return;
    item.chance = item.above * slots->chances[((later * slots->num + slot) * slots->contexts + item.after) * slots->width + item.rank];
    if (item.chance > 0)
        push(heap, size, item);
}

/* Nodes of rows by falling chance, `most` at most of each, of slots first[r] .. first[r] + depths[r] - 1, the `widest`
 * best choices of each list. Of row r they begin at r * room: chances, parents (0 is the anchor), choices (places in
 * [slots][contexts][width]) and laters (later choices above, the node's own left out); num[r] says how many. */
int grow_trees(long rows, const int64_t *first, const int64_t *depths, const int64_t *most, const int64_t *widest,
               long num_slots, long contexts, long width, long laters, const double *chances, const int64_t *places,
               long room, double *found, int64_t *parents, int64_t *choices, int64_t *of_laters, int64_t *num)
{
    const struct slots slots = {num_slots, contexts, width, laters, chances, places};
    struct offer *heap = malloc((2 * room + 2) * sizeof *heap);
    if (!heap)
        return -1;
    for (long r = 0; r < rows; r++) {
        long size = 0, n = 0;
        if (depths[r])
            offer(&slots, heap, &size, first[r], widest[r], (struct offer){.above = 1});
        for (; size && n < most[r]; n++) {
            struct offer item = pop(heap, &size), next = item;
            long slot = first[r] + item.depth, choice = (slot * contexts + item.after) * width + item.rank;
            found[r * room + n] = item.chance, parents[r * room + n] = item.parent;
            choices[r * room + n] = choice, of_laters[r * room + n] = item.num_later;
            next.rank++;
            offer(&slots, heap, &size, slot, widest[r], next);
            next = (struct offer){item.chance, item.chance, n + 1, item.depth + 1, places[choice], 0,
                                  item.num_later + (item.rank > 0)};
            if (next.depth < depths[r])
                offer(&slots, heap, &size, slot + 1, widest[r], next);
        }
        num[r] = n;
    }
    free(heap);
    return 0;
}
