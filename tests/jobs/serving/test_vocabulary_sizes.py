"""Tokenizers with more tokens than the target's embedding has rows, and with fewer: every kind of request works."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from blockpilot.constraints.automaton import GrammarCompiler, tokenizer_json
from blockpilot.constraints.grammar import Grammar
from blockpilot.pairs.loading import Pair
from blockpilot.types import PairId
from helpers.api import CHAT, QUESTION, ask, replica_of
from helpers.tiny import byte_tokenizer, tiny_draft, tiny_target
from jobs.serving.replica import Replica

MORE = "<one more>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"name": "s", "schema": {"type": "object", "properties": {"a": {"enum": [MORE]}}, "required": ["a"]}}
BODIES: dict[str, dict[str, Any]] = {
    "plain": {"logprobs": True, "top_logprobs": 20},
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    "tools": {"tools": [TOOL]},
    "a call": {"tools": [TOOL], "tool_choice": "required"},
}


def pair_of(kind: str) -> Pair:
    """With a token that the embedding has no row for, or 40 rows that the tokenizer has no token for."""
    target, tokenizer = tiny_target(), byte_tokenizer()
    if kind == "more tokens":
        tokenizer.add_tokens([MORE])
    else:
        config = target.config
        config.vocab_size = 300
        target = LlamaForCausalLM(config)
    target = target.eval().requires_grad_(False)
    draft = tiny_draft(target).eval().requires_grad_(False)
    return Pair(PairId("tiny", "r", "draft", "r"), target, draft, tokenizer)


@pytest.fixture(scope="module", params=["more tokens", "more rows"])
def replica(request: pytest.FixtureRequest) -> Iterator[Replica]:
    with replica_of(pair_of(request.param), num_slots=1, max_length=600) as replica:
        yield replica


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("name", BODIES)
def test_every_kind_of_request_is_answered(name: str, temperature: float, client: TestClient) -> None:
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 60, "temperature": temperature, "seed": 1}
    (choice,) = ask(client, CHAT, body | BODIES[name])["choices"]
    if name == "json_schema":
        assert json.loads(choice["message"]["content"]) == {"a": MORE}
    if name == "plain":
        assert all(len(token["top_logprobs"]) == 20 for token in choice["logprobs"]["content"])


@pytest.mark.parametrize("replica", ["more tokens"], indirect=True)
def test_a_prompt_with_a_token_that_has_no_row_is_refused(client: TestClient) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"say {MORE}"}], "max_tokens": 4}
    response = client.post(CHAT, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["message"], error["param"]) == (
        "prompt token 260: must be 0 to 259, the target embeds no other",
        "messages",
    )


def test_no_token_beyond_the_embedding_is_allowed_or_forced_or_a_stop() -> None:
    pair = pair_of("more tokens")
    compiler = GrammarCompiler(pair.tokenizer, pair.vocab_size, pair.stop_token_ids)
    automaton = compiler.compile(Grammar("json", json.dumps({"enum": [f"a{MORE}b"]}))).start()
    tokens = list[int]()
    while not automaton.ends():
        mask = automaton.mask()
        assert mask.shape == (260,)
        forced = automaton.forced()
        assert max(forced, default=0) < 260
        tokens.append(forced[0] if forced else int(mask.nonzero()[0, 0]))
        automaton.take(tokens[-1])
    text = pair.tokenizer.decode([token for token in tokens if token not in pair.stop_token_ids])
    assert json.loads(text) == f"a{MORE}b"
    pair.tokenizer.eos_token = MORE
    assert replace(pair).stop_token_ids == {257}


def test_a_vocabulary_that_is_cut_has_no_merge_into_what_is_lost() -> None:
    """A tokenizer of pieces whose last tokens, also those made by merges, have no row."""
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "ca": 5}
    backend = Tokenizer(models.BPE(vocab, [("a", "b"), ("ab", "c"), ("c", "a")]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens(["<end>"])
    cut = Tokenizer.from_str(tokenizer_json(tokenizer, 4))
    assert cut.get_vocab() == {"a": 0, "b": 1, "c": 2, "ab": 3}
    assert cut.encode("abca").ids == [3, 2, 0]
    assert Tokenizer.from_str(tokenizer_json(tokenizer, 9)).get_vocab() == vocab | {"<end>": 6}
