"""What a dense sweep records of the draft's choices is what the engine's draft proposes there."""

import dataclasses

import numpy as np
import pytest

from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import load_prompts
from blockpilot.sweep.rows import NUM_CHOICES, Metadata, SweepRow, validate
from blockpilot.sweep.sweep import sweep_prompts
from blockpilot.types import Request, Sampling

CANDIDATES = [1, 4, 6]


def dense(pair: Pair, temperature: float) -> list[SweepRow]:
    settings = {"max_new_tokens": 30, "temperature": temperature, "step_samples": 20}
    return sweep_prompts(pair, load_prompts("demo", 3), CANDIDATES, method="dense", **settings).rows  # type: ignore[arg-type]


def ranks_of(row: SweepRow) -> np.ndarray:
    return np.frombuffer(row.step_ranks, np.int8).reshape(len(row.step_places), -1)


@pytest.mark.parametrize("temperature", [0.0, 6.0])
def test_ranks_are_places_among_what_the_engine_is_offered(
    tiny_pair: Pair, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, right = 0, 0
    for row, prompt in zip(dense(tiny_pair, temperature), load_prompts("demo", 3), strict=True):
        ids = prompt.encode(tiny_pair.tokenizer)
        engine = Engine(tiny_pair, num_slots=1, max_length=len(ids) + 30)
        offered = {}
        propose = engine._drafter.propose

        def watched(rows, *rest):  # type: ignore[no-untyped-def]
            found = propose(rows, *rest)  # noqa: B023
            offered[len(rows[0].tokens) - len(ids) - 1] = found[0].tokens  # noqa: B023
            return found

        monkeypatch.setattr(engine._drafter, "propose", watched)
        sampling = Sampling(temperature, seed=row.seed)
        engine.add(Request(ids, 30, sampling, 4, tiny_pair.stop_token_ids, layout="tree"))
        while not engine.idle:
            engine.step()
        ranks = ranks_of(row)
        assert ranks.shape == (len(row.step_places), tiny_pair.block_size - 1)
        for place, of_step in zip(row.step_places, ranks.tolist(), strict=True):
            for slot, rank in enumerate(of_step):
                if rank == -2:
                    assert place + slot + 1 >= len(row.output_tokens)
                elif place in offered:
                    token = row.output_tokens[place + slot + 1]
                    choices = offered[place][slot]
                    assert rank == (choices.index(token) if token in choices else -1)
                    compared, right = compared + 1, right + (rank >= 0)
    assert compared > 50
    assert right > 0


@pytest.mark.parametrize("temperature", [0.0, 6.0])
def test_first_choices_that_are_right_are_those_that_the_trained_block_accepts(
    tiny_pair: Pair, temperature: float
) -> None:
    rows = dense(tiny_pair, temperature)
    for row in rows:
        validate(row, Metadata({}, tiny_pair.id, "float32", tiny_pair.vocab_size, 4, CANDIDATES, {}, ""))
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
