"""Replaying known texts against the engine that decodes them, on the real pair in fp32."""

import pytest
import torch

from blockpilot.blocks import emitted_along
from blockpilot.engine import generate
from blockpilot.pairs import Pair
from blockpilot.prompts import Message, Prompt
from blockpilot.replay import Text, accepted_everywhere, know, walk
from blockpilot.verify import Sampling

ASKED = "Count from one to twenty in words.", "Name three fruits.", "What is the capital of France?"
MAX_NEW_TOKENS = 40
CANDIDATES = 2, 3, 8


def decoded(pair: Pair, asked: str, sampling: Sampling, block_size: int) -> tuple[Text, list[int]]:
    """The text that the engine gives, and the tokens of each verify step."""
    ids = Prompt("test", (Message("user", asked),)).encode(pair.tokenizer)
    how = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": sampling.temperature, "seed": sampling.seed}
    steps = list(generate(pair, ids, block_size=block_size, **how))
    tokens = [t for step in steps for t in step.tokens]
    return Text((*ids, *tokens), len(ids), len(ids) + MAX_NEW_TOKENS, sampling), [len(s.tokens) for s in steps[1:]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_walk_takes_the_engines_steps(temperature: float, embedded_pair: Pair) -> None:
    sampling = Sampling(temperature, seed=5)
    texts = [decoded(embedded_pair, asked, sampling, block_size=1)[0] for asked in ASKED]
    known = know(embedded_pair, texts)
    walked = walk(embedded_pair, known, CANDIDATES)
    for i, asked in enumerate(ASKED):
        for place, block_size in enumerate(CANDIDATES):
            text, emitted = decoded(embedded_pair, asked, sampling, block_size)
            assert text == texts[i]
            assert walked[i][place] == emitted
    assert max(n for of_text in walked for emitted in of_text for n in emitted) > 2
    for place, block_size in enumerate(CANDIDATES):
        everywhere = accepted_everywhere(embedded_pair, known, block_size)
        assert [emitted_along(accepted) for accepted in everywhere] == [of_text[place] for of_text in walked]


def test_texts_are_scored_in_stretches(embedded_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [decoded(embedded_pair, asked, Sampling(), block_size=1)[0] for asked in ASKED[:2]]
    whole = know(embedded_pair, texts)
    monkeypatch.setattr("blockpilot.replay.PREFILL_COLUMNS", 14)
    monkeypatch.setattr("blockpilot.replay.ANCHORS_AT_ONCE", 8)
    monkeypatch.setattr("blockpilot.replay.HEAD_ROWS", 3)
    cut = know(embedded_pair, texts)
    for a, b in zip((*whole.keys, whole.prefill_context), (*cut.keys, cut.prefill_context), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert walk(embedded_pair, cut, CANDIDATES) == walk(embedded_pair, whole, CANDIDATES)
    for i, text in enumerate(texts):
        assert len(accepted_everywhere(embedded_pair, cut, 3)[i]) == len(text.tokens) - text.num_prompt_tokens - 1


def test_an_answer_of_one_token_has_no_step(embedded_pair: Pair) -> None:
    known = know(embedded_pair, [Text((1, 2, 3, 4), 3, 5, Sampling())])
    assert accepted_everywhere(embedded_pair, known, 4) == [[]]
    assert walk(embedded_pair, known, [4]) == [[[]]]
