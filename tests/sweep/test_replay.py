"""Replaying known texts against the engine that decodes them, on the real pair in fp32."""

from itertools import chain

import pytest
import torch

from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt, load_prompts
from blockpilot.sweep.replay import Text, accepted_everywhere, know, walk
from blockpilot.sweep.sweep import sweep_prompts
from blockpilot.sweep.trees import emitted_along
from blockpilot.types import Request, Sampling

ASKED = "Count from one to twenty in words.", "Name three fruits.", "What is the capital of France?"
MAX_NEW_TOKENS = 16
CANDIDATES = 2, 3, 8


def decoded(pair: Pair, sampling: Sampling, block_size: int) -> list[tuple[Text, list[int]]]:
    """The texts that the engine gives, and the tokens of each verify step."""
    prompts = [Prompt("test", (Message("user", asked),)).encode(pair.tokenizer) for asked in ASKED]
    engine = Engine(pair, num_slots=len(ASKED), max_length=max(map(len, prompts)) + MAX_NEW_TOKENS)
    steps: dict[int, list[tuple[int, ...]]] = {}
    for ids in prompts:
        steps[engine.add(Request(ids, MAX_NEW_TOKENS, sampling, block_size, pair.stop_token_ids))] = []
    while not engine.idle:
        for step in engine.step():
            steps[step.request_id].append(step.tokens)
    return [
        (Text((*ids, *chain(*emitted)), len(ids), len(ids) + MAX_NEW_TOKENS, sampling), [len(e) for e in emitted[1:]])
        for ids, emitted in zip(prompts, steps.values(), strict=True)
    ]


def texts_of(pair: Pair, sampling: Sampling) -> list[Text]:
    return [text for text, _ in decoded(pair, sampling, block_size=1)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_walk_takes_the_engines_steps(temperature: float, embedded_pair: Pair) -> None:
    sampling = Sampling(temperature, seed=5)
    texts = texts_of(embedded_pair, sampling)
    known = know(embedded_pair, texts)
    walked = walk(embedded_pair, known, CANDIDATES)
    for place, block_size in enumerate(CANDIDATES):
        found = decoded(embedded_pair, sampling, block_size)
        assert [text for text, _ in found] == texts
        assert [of_text[place] for of_text in walked] == [emitted for _, emitted in found]
    assert max(n for of_text in walked for emitted in of_text for n in emitted) > 2
    for place, block_size in enumerate(CANDIDATES):
        everywhere = accepted_everywhere(embedded_pair, known, block_size)
        assert [emitted_along(accepted) for accepted in everywhere] == [of_text[place] for of_text in walked]


def test_texts_are_scored_in_stretches(embedded_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = texts_of(embedded_pair, Sampling())[:2]
    whole = know(embedded_pair, texts)
    monkeypatch.setattr("blockpilot.sweep.replay.PREFILL_COLUMNS", 14)
    monkeypatch.setattr("blockpilot.sweep.replay.ANCHORS_AT_ONCE", 8)
    monkeypatch.setattr("blockpilot.sweep.replay.HEAD_ROWS", 3)
    cut = know(embedded_pair, texts)
    torch.testing.assert_close(whole.prefill_context, cut.prefill_context, rtol=1e-3, atol=1e-3)
    for i, text in enumerate(texts):  # what padding leaves beyond a text's end is nobody's
        end = len(text.tokens)
        of_text = [(*(keys[i, :, :end] for keys in of.keys), of.context[i, :end]) for of in (whole, cut)]
        for a, b in zip(*of_text, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert walk(embedded_pair, cut, CANDIDATES) == walk(embedded_pair, whole, CANDIDATES)
    for i, text in enumerate(texts):
        assert len(accepted_everywhere(embedded_pair, cut, 3)[i]) == len(text.tokens) - text.num_prompt_tokens - 1


def test_context_is_kept_of_every_position(tiny_pair: Pair) -> None:
    """Against one forward pass over each text alone; texts of different lengths are padded."""
    generator = torch.Generator().manual_seed(0)
    tokens = [tuple(torch.randint(0, 256, (n,), generator=generator).tolist()) for n in (9, 17, 12)]
    texts = [Text(of, 4 + i, 20, Sampling()) for i, of in enumerate(tokens)]
    known = know(tiny_pair, texts)
    assert known.context.shape == (3, 17, tiny_pair.draft.config.hidden_size)
    for i, text in enumerate(texts):
        states = tiny_pair.target(torch.tensor([text.tokens]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1][0] for layer in tiny_pair.draft.options.target_layer_ids], dim=-1)
        alone = tiny_pair.draft.fuse(features)
        torch.testing.assert_close(known.context[i, : len(text.tokens)], alone, rtol=1e-4, atol=1e-4)
        assert torch.equal(known.prefill_context[i], known.context[i, text.num_prompt_tokens - 1])
    some = known.rows(torch.tensor([2, 0]))
    assert torch.equal(some.context, known.context[[2, 0]])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 6.0])
def test_chains_of_an_eagle_draft_replay_as_they_decode(eagle_pair: Pair, temperature: float) -> None:
    """Texts of several lengths, padded beside each other; with the dice of T = 6 a random draft is often right."""
    found = {
        method: sweep_prompts(
            eagle_pair,
            load_prompts("demo", 4),
            [1, 2, 4, 7],
            method=method,  # type: ignore[arg-type]
            max_new_tokens=24,
            temperature=temperature,
            step_samples=5,
        ).rows
        for method in ("decode", "replay", "dense")
    }
    for method in ("replay", "dense"):
        for decoded, replayed in zip(found["decode"], found[method], strict=True):
            assert replayed.output_tokens == decoded.output_tokens
            assert replayed.emitted_histograms == decoded.emitted_histograms
            assert replayed.context == pytest.approx(decoded.context, abs=1e-4)
    taus = [tau for row in found["decode"] for tau in row.taus]
    assert max(taus) > 1.5 or temperature < 6


def test_an_answer_of_one_token_has_no_step(embedded_pair: Pair) -> None:
    known = know(embedded_pair, [Text((1, 2, 3, 4), 3, 5, Sampling())])
    assert accepted_everywhere(embedded_pair, known, 4) == [[]]
    assert walk(embedded_pair, known, [4]) == [[[]]]
