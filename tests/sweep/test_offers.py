"""Choices recorded by a dense sweep: those of the engine's draft at the same anchors."""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest

from blockpilot.engine.engine import Engine
from blockpilot.engine.trees import MAX_DEPTH, Slots
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import load_prompts
from blockpilot.sweep.rows import NUM_CHOICES, Metadata, SweepRow, validate
from blockpilot.sweep.summary import Summary
from blockpilot.sweep.sweep import sweep_prompts
from blockpilot.sweep.trees import MOST_NODES
from blockpilot.types import Request, Sampling
from helpers.drafts import proposals_of
from helpers.texts import slow_match

CANDIDATES = [1, 4, 6]


@cache
def dense(pair: Pair, temperature: float, max_new_tokens: int = 30, step_samples: int = 20) -> list[SweepRow]:
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "step_samples": step_samples}
    return sweep_prompts(pair, load_prompts("demo", 3), CANDIDATES, method="dense", **settings).rows  # type: ignore[arg-type]


def ranks_of(row: SweepRow) -> np.ndarray:
    return np.frombuffer(row.step_ranks, np.int8).reshape(len(row.step_places), -1)


# Slots that are independent, that depend on the choice above, and (two pairs) on all choices above.
PAIRS = pytest.mark.parametrize("pair", ["tiny_pair", "markov_pair", "dflash2_pair", "eagle_pair"], indirect=True)


def choices_along(slots: Slots, tokens: Sequence[int]) -> Iterator[list[int]]:
    """Candidates of each slot along the text's tokens; for linked slots, until a token is not a candidate."""
    after = 0
    for of_slot, following, token in zip(slots.tokens, slots.next_lists, tokens, strict=False):
        yield list(of_slot[after])
        if token in of_slot[after]:
            after = following[after][of_slot[after].index(token)]
        elif len(of_slot) > 1:
            return
        if after < 0:
            return


@PAIRS
@pytest.mark.parametrize("temperature", [0.0, 6.0])
def test_ranks_are_those_among_the_engines_candidates(pair: Pair, temperature: float) -> None:
    num_compared, num_right = 0, 0
    for row, prompt in zip(dense(pair, temperature), load_prompts("demo", 3), strict=True):
        ids = prompt.encode(pair.tokenizer)
        request = Request(ids, 30, Sampling(temperature, seed=row.seed), 4, pair.stop_token_ids, layout="tree")
        proposals = proposals_of(Engine(pair, num_slots=1, max_length=len(ids) + 30), [request])
        proposed = {len(proposal.tokens) - len(ids) - 1: proposal.found for proposal in proposals}
        ranks = ranks_of(row)
        assert ranks.shape == (len(row.step_places), pair.block_size - 1)
        for place, of_step in zip(row.step_places, ranks.tolist(), strict=True):
            tokens = row.output_tokens[place + 1 :]
            assert [rank == -2 for rank in of_step] == [slot >= len(tokens) for slot in range(len(of_step))]
            if place in proposed:
                for choices, token, rank in zip(
                    choices_along(proposed[place], tokens), tokens, of_step, strict=False
                ):
                    assert rank == (choices.index(token) if token in choices else -1)
                    num_compared, num_right = num_compared + 1, num_right + (rank >= 0)
    assert num_compared > 50
    assert num_right > 0


@PAIRS
@pytest.mark.parametrize("temperature", [0.0, 6.0])
def test_the_trained_block_accepts_first_choices_that_are_right(
    pair: Pair, temperature: float, tiny_pair: Pair
) -> None:
    rows = dense(pair, temperature)
    for row in rows:
        validate(row, Metadata({}, pair.id, "float32", pair.vocab_size, 4, CANDIDATES, {}, ""))
        for place, of_step in zip(row.step_places, ranks_of(row).tolist(), strict=True):
            wrong = next((slot for slot, rank in enumerate(of_step) if rank != 0), len(of_step))
            assert row.accepted[CANDIDATES.index(4)][place] == wrong
        scores = np.frombuffer(row.step_scores, "<f2").reshape(len(row.step_places), -1, NUM_CHOICES)
        assert (np.diff(scores.astype(np.float32)) <= 0).all()
        assert bool(row.step_nodes) == (pair is tiny_pair)  # empty if slots are linked
    assert any(max(row.accepted[1]) for row in rows) or not temperature


@pytest.mark.parametrize("temperature", [0.0, 6.0])
def test_every_tree_takes_the_steps_of_decoding_with_it(tiny_pair: Pair, temperature: float) -> None:
    """step_nodes predicts every step of decoding with trees of full depth, within the recorded positions."""
    prompts, seen = load_prompts("demo", 3), set[int]()
    for row, prompt in zip(dense(tiny_pair, temperature, 60, step_samples=99), prompts, strict=True):
        nodes = np.frombuffer(row.step_nodes, np.uint8).reshape(len(row.step_places), -1)
        ids, sampling = prompt.encode(tiny_pair.tokenizer), Sampling(temperature, seed=row.seed)
        for num in (3, 12, 40):
            engine, place = Engine(tiny_pair, num_slots=1, max_length=len(ids) + 60, max_block_size=64), 0
            engine.add(Request(ids, 60, sampling, num + 1, tiny_pair.stop_token_ids, layout="tree"))
            engine.step()  # prefill
            accepted = (nodes <= num).sum(axis=1).tolist()
            while place < len(accepted):
                [step] = engine.step()
                assert len(step.tokens) == min(accepted[place] + 1, len(row.output_tokens) - 1 - place)
                place += len(step.tokens)
            seen |= set(accepted)
    assert seen >= {0, 1, 2}


def test_matches_equal_a_slow_search_of_the_text_up_to_each_place(tiny_pair: Pair) -> None:
    """step_matches: length of the longest earlier match of the text's end, and number of equal tokens after both."""
    compared = 0
    for row, prompt in zip(dense(tiny_pair, 0.0), load_prompts("demo", 3), strict=True):
        text = [*prompt.encode(tiny_pair.tokenizer), *row.output_tokens]
        before = len(text) - len(row.output_tokens)
        for place, (length, held) in zip(
            row.step_places, np.frombuffer(row.step_matches, np.uint8).reshape(-1, 2).tolist(), strict=True
        ):
            known, rest = text[: before + place + 1], text[before + place + 1 :]
            expected, following, _, _ = slow_match(known, MAX_DEPTH)
            agree = [a == b for a, b in zip(following, rest, strict=False)]
            assert (length, held) == (expected, agree.index(False) if False in agree else len(agree))
            compared += length > 0
    assert compared > 0


def test_totals_of_trees_and_chains(tiny_pair: Pair) -> None:
    """tau by number of nodes of a tree, and by length of a chain; the largest tree is above a short chain."""
    rows = dense(tiny_pair, 6.0)
    total = Summary().add(rows)
    assert total.num_places == sum(len(row.step_places) for row in rows)
    assert list(total.tree_curve) == list(range(1, MOST_NODES + 1))
    assert list(total.chain_curve) == [3, 5]  # drafted tokens of the CANDIDATES that draft
    assert 1.0 < total.chain_curve[3] < total.tree_curve[MOST_NODES]


def test_accuracy_of_slots_is_that_of_their_recorded_ranks(tiny_pair: Pair) -> None:
    """Positions near the end of a text have fewer slots."""
    rows, counts = dense(tiny_pair, 6.0), dict[int, list[int]]()
    accuracy = Summary().add(rows).slot_accuracy
    for row in rows:
        depth = len(row.step_ranks) // len(row.step_places)
        for i, rank in enumerate(np.frombuffer(row.step_ranks, np.int8).tolist()):
            if rank != -2:
                of_slot = counts.setdefault(1 + i % depth, [0, 0, 0])
                for place, holds in enumerate((True, rank == 0, rank >= 0)):
                    of_slot[place] += holds
    assert accuracy == {slot: (first / num, right / num) for slot, (num, first, right) in sorted(counts.items())}
    assert len(accuracy) == tiny_pair.block_size - 1
    assert 0 < accuracy[1].first < accuracy[1].any
