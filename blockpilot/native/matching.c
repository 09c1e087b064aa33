/* Prompt lookup in growing texts: earlier occurrences of a text's end, by hash chains of token pairs, as in deflate. */
#include <stdint.h>

enum { MOST_PLACES = 256, MOST_FOLLOWERS = 64, LONGEST = 32 }; /* of matching.py */
static const double HELD_DECAY = 0.8; /* of matching.py; per step */

static uint32_t bucket(int32_t first, int32_t second, int bits)
{
    uint64_t mixed = ((uint64_t)(uint32_t)first << 32 | (uint32_t)second) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(mixed >> (64 - bits));
}

/* Append tokens [ends[r - 1] .. ends[r]) of `added` to text texts[r], for each row r. A text has tokens and previous
 * [room], heads [1 << bits] and num[text] tokens so far: heads is the latest position in each bucket at which a pair of
 * tokens ends, previous the position before it in the same bucket; -1 for none. expected[text] is the first token that
 * its latest match predicted, -1 for none, and held[text] the moving average of how often that was right. Returns 0,
 * or, before anything is written, the new length of a text if that exceeds room. */
int extend_texts(long rows, const int64_t *texts, long room, int bits, int32_t *tokens, int32_t *previous,
                  int32_t *heads, int64_t *num, const int32_t *expected, double *held, const int32_t *added,
                  const int64_t *ends)
{
    for (long r = 0, from = 0; r < rows; from = ends[r++])
        if (num[texts[r]] + ends[r] - from > room)
            return num[texts[r]] + ends[r] - from;
    for (long r = 0, from = 0; r < rows; from = ends[r++]) {
        int32_t *text = tokens + texts[r] * room, *before = previous + texts[r] * room;
        int32_t *latest = heads + (texts[r] << bits), promised = expected[texts[r]];
        if (promised >= 0 && ends[r] > from)
            held[texts[r]] = HELD_DECAY * held[texts[r]] + (1 - HELD_DECAY) * (added[from] == promised);
        for (long i = from; i < ends[r]; i++) {
            long place = num[texts[r]]++;
            text[place] = added[i];
            if (place) {
                uint32_t b = bucket(text[place - 1], text[place], bits);
                before[place] = latest[b], latest[b] = place;
            }
        }
    }
    return 0;
}

/* Longest match of the end of each text texts[r] (at most LONGEST tokens) among the latest MOST_PLACES positions in the
 * bucket of its last two tokens; of equal ones the latest. paths [rows][most] are the tokens that followed; past the
 * text's end they repeat the path from its start. sizes[r] is `most`, or 0 without a match. known [rows][3]: the length
 * of the match; the share of the latest seen[r] <= MOST_FOLLOWERS occurrences that have the same next token; and held.
 * Sets expected. Returns the number of matches. */
long match_texts(long rows, const int64_t *texts, long room, int bits, const int32_t *tokens, const int32_t *previous,
                 const int32_t *heads, const int64_t *num, int32_t *expected, const double *held, long most,
                 int32_t *paths, int64_t *sizes, double *known, int64_t *seen)
{
    long num_matches = 0;
    for (long r = 0; r < rows; r++) {
        const int32_t *text = tokens + texts[r] * room, *before = previous + texts[r] * room;
        long end = num[texts[r]], start = 0, num_same = 0, longest = 0;
        int32_t followers[MOST_FOLLOWERS];
        sizes[r] = seen[r] = 0, expected[texts[r]] = -1;
        known[3 * r] = known[3 * r + 1] = 0, known[3 * r + 2] = held[texts[r]];
        if (end < 3)
            continue;
        int32_t place = heads[(texts[r] << bits) + bucket(text[end - 2], text[end - 1], bits)];
        for (long looked = 0; place >= 0 && looked < MOST_PLACES; place = before[place], looked++) {
            if (place >= end - 1 || text[place] != text[end - 1] || text[place - 1] != text[end - 2])
                continue;
            long shared = 2;
            while (shared < LONGEST && shared <= place && text[place - shared] == text[end - 1 - shared])
                shared++;
            if (seen[r] < MOST_FOLLOWERS)
                followers[seen[r]++] = text[place + 1];
            if (shared > longest)
                longest = shared, start = place + 1;
        }
        if (!longest)
            continue;
        for (long i = 0; i < seen[r]; i++)
            num_same += followers[i] == text[start];
        known[3 * r] = longest, known[3 * r + 1] = (double)num_same / seen[r], sizes[r] = most;
        int32_t *path = paths + r * most;
        for (long i = 0; i < most; i++)
            path[i] = start + i < end ? text[start + i] : path[i - (end - start)];
        expected[texts[r]] = path[0], num_matches++;
    }
    return num_matches;
}
