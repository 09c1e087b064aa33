"""What a dense sweep records of the draft's choices is what the engine's draft proposes there."""

import dataclasses
from collections.abc import Iterator, Sequence

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
from helpers.drafts import Pass, slots_of
from helpers.texts import slow_match

CANDIDATES = [1, 4, 6]


def dense(pair: Pair, temperature: float) -> list[SweepRow]:
    settings = {"max_new_tokens": 30, "temperature": temperature, "step_samples": 20}
    return sweep_prompts(pair, load_prompts("demo", 3), CANDIDATES, method="dense", **settings).rows  # type: ignore[arg-type]


def ranks_of(row: SweepRow) -> np.ndarray:
    return np.frombuffer(row.step_ranks, np.int8).reshape(len(row.step_places), -1)


@pytest.fixture(params=["tiny_pair", "markov_pair", "dflash2_pair", "eagle_pair"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """One whose slots are drawn apart, one whose slots depend on the choice above, one on all of them."""
    found: Pair = request.getfixturevalue(request.param)
    return found


def choices_along(slots: Slots, tokens: Sequence[int]) -> Iterator[list[int]]:
    """What each slot offers after the text's own tokens, as far as those are offered."""
    after = 0
    for of_slot, places, token in zip(slots.tokens, slots.places, tokens, strict=False):
        yield list(of_slot[after])
        if token in of_slot[after]:
            after = places[after][of_slot[after].index(token)]
        elif len(of_slot) > 1:
            return
        if after < 0:
            return


@pytest.mark.parametrize("temperature", [0.0, 6.0])
def test_ranks_are_places_among_what_the_engine_is_offered(
    pair: Pair, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, right = 0, 0
    for row, prompt in zip(dense(pair, temperature), load_prompts("demo", 3), strict=True):
        ids = prompt.encode(pair.tokenizer)
        engine = Engine(pair, num_slots=1, max_length=len(ids) + 30)
        offered = {}
        propose = engine._drafter.propose

        def watched(rows, slots, depths, num):  # type: ignore[no-untyped-def]
            found = propose(rows, slots, depths, num)  # noqa: B023
            offered[len(rows[0].tokens) - len(ids) - 1] = slots_of(Pass(depths, found))[0]  # noqa: B023
            return found

        monkeypatch.setattr(engine._drafter, "propose", watched)
        sampling = Sampling(temperature, seed=row.seed)
        engine.add(Request(ids, 30, sampling, 4, pair.stop_token_ids, layout="tree"))
        while not engine.idle:
            engine.step()
        ranks = ranks_of(row)
        assert ranks.shape == (len(row.step_places), pair.block_size - 1)
        for place, of_step in zip(row.step_places, ranks.tolist(), strict=True):
            assert all(
                (rank == -2) == (place + slot + 1 >= len(row.output_tokens)) for slot, rank in enumerate(of_step)
            )
            if place not in offered:
                continue
            tokens = row.output_tokens[place + 1 :]
            for choices, token, rank in zip(choices_along(offered[place], tokens), tokens, of_step, strict=False):
                assert rank == (choices.index(token) if token in choices else -1)
                compared, right = compared + 1, right + (rank >= 0)
    assert compared > 50
    assert right > 0


@pytest.mark.parametrize("temperature", [0.0, 6.0])
def test_first_choices_that_are_right_are_those_that_the_trained_block_accepts(
    pair: Pair, temperature: float
) -> None:
    rows = dense(pair, temperature)
    for row in rows:
        validate(row, Metadata({}, pair.id, "float32", pair.vocab_size, 4, CANDIDATES, {}, ""))
        for place, of_step in zip(row.step_places, ranks_of(row).tolist(), strict=True):
            wrong = next((slot for slot, rank in enumerate(of_step) if rank != 0), len(of_step))
            assert row.accepted[CANDIDATES.index(4)][place] == wrong
        scores = np.frombuffer(row.step_scores, "<f2").reshape(len(row.step_places), -1, NUM_CHOICES)
        assert (np.diff(scores.astype(np.float32)) <= 0).all()
    assert any(max(row.accepted[1]) for row in rows) or not temperature


def test_a_row_whose_offers_are_torn_is_refused(tiny_pair: Pair) -> None:
    row = dense(tiny_pair, 0.0)[0]
    metadata = Metadata({}, tiny_pair.id, "float32", tiny_pair.vocab_size, 4, CANDIDATES, {}, "")
    for name in ("step_ranks", "step_scores", "step_log_probs"):
        torn = dataclasses.replace(row, **{name: getattr(row, name)[:-2]})
        with pytest.raises(ValueError, match="step_ranks, step_scores and step_log_probs have"):
            validate(torn, metadata)


@pytest.mark.parametrize("temperature", [0.0, 6.0])
def test_every_tree_takes_the_steps_of_decoding_with_it(tiny_pair: Pair, temperature: float) -> None:
    """Those that draft the whole block, as far as a row shows its places."""
    settings = {"max_new_tokens": 60, "temperature": temperature, "step_samples": 99}
    prompts, seen = load_prompts("demo", 3), set[int]()
    for row, prompt in zip(
        sweep_prompts(tiny_pair, prompts, [1, 4], method="dense", **settings).rows, prompts, strict=True
    ):
        nodes = np.frombuffer(row.step_nodes, np.uint8).reshape(len(row.step_places), -1)
        ids, sampling = prompt.encode(tiny_pair.tokenizer), Sampling(temperature, seed=row.seed)
        for num in (3, 5, 12, 40):
            engine, place = Engine(tiny_pair, num_slots=1, max_length=len(ids) + 60, max_block_size=64), 0
            engine.add(Request(ids, 60, sampling, num + 1, tiny_pair.stop_token_ids, layout="tree"))
            engine.step()  # the prompt
            accepted = (nodes <= num).sum(axis=1).tolist()
            while place < len(accepted):
                [step] = engine.step()
                assert len(step.tokens) == min(accepted[place] + 1, len(row.output_tokens) - 1 - place)
                place += len(step.tokens)
            seen |= set(accepted)
    assert seen >= {0, 1, 2}


def test_matches_are_those_of_the_text_up_to_each_place(tiny_pair: Pair) -> None:
    """The longest earlier end that is shared, and how much of what followed there follows again."""
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


def test_linked_slots_show_no_trees(markov_pair: Pair, dflash2_pair: Pair, eagle_pair: Pair) -> None:
    for pair in (markov_pair, dflash2_pair, eagle_pair):
        assert all(row.step_ranks and not row.step_nodes for row in dense(pair, 0.0))


def test_totals_of_trees_and_chains(tiny_pair: Pair) -> None:
    """tau by nodes rises to that of a draft whose every right choice is in the tree."""
    rows = dense(tiny_pair, 6.0)
    total = Summary().add(rows)
    assert total.num_places == sum(len(row.step_places) for row in rows)
    assert list(total.tree_curve) == list(range(1, MOST_NODES + 1))
    assert list(total.chain_curve) == [3, 5]  # of CANDIDATES those that draft
    assert 1.0 < total.chain_curve[3] < total.tree_curve[MOST_NODES]
