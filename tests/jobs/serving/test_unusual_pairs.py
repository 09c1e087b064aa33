"""Unusual pairs: a tokenizer with more or fewer tokens than the target's embedding has rows; a target without a
draft, which has lookup by default, no policy of the registry, and no fixed block size; a template that demands
alternating roles."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from blockpilot.constraints.automaton import tokenizer_json
from blockpilot.pairs.loading import Pair, load_pair
from blockpilot.types import PairId, Sampling
from helpers.api import ApiClient, client_of, replica_of, served
from helpers.bodies import CHAT, COMPLETIONS, QUESTION, text_of
from helpers.engines import plain_text
from helpers.patience import wait_until
from helpers.tiny import byte_tokenizer, tiny_draft, tiny_target
from jobs.common.config import PairConfig
from jobs.serve import ServeConfig
from jobs.serving import messages
from jobs.serving.constraints.tools import in_words, without_system
from jobs.serving.models import find_policy
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
    """Pair with a token that has no embedding row, or with 40 embedding rows that have no token."""
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
def test_every_kind_of_request_is_answered(name: str, temperature: float, client: ApiClient) -> None:
    body = {"messages": QUESTION, "max_tokens": 60, "temperature": temperature, "seed": 1}
    (choice,) = client.ask(CHAT, body | BODIES[name])["choices"]
    if name == "json_schema":
        assert json.loads(choice["message"]["content"]) == {"a": MORE}
    if name == "plain":
        assert all(len(token["top_logprobs"]) == 20 for token in choice["logprobs"]["content"])


@pytest.mark.parametrize("replica", ["more tokens"], indirect=True)
def test_a_prompt_with_a_token_that_has_no_row_is_refused(client: ApiClient) -> None:
    error = client.refusal(CHAT, {"messages": [{"role": "user", "content": f"say {MORE}"}], "max_tokens": 4})
    message = "prompt token 260: must be 0 to 259, the target embeds no other"
    assert (error["message"], error["param"]) == (message, "messages")


def test_no_token_beyond_the_embedding_is_a_stop() -> None:
    pair = pair_of("more tokens")
    pair.tokenizer.eos_token = MORE
    assert replace(pair).stop_token_ids == {257}


def test_a_vocabulary_that_is_cut_has_no_merge_into_what_is_lost() -> None:
    """BPE tokenizer whose last tokens, including results of merges, have no embedding row."""
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "ca": 5}
    backend = Tokenizer(models.BPE(vocab, [("a", "b"), ("ab", "c"), ("c", "a")]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens(["<end>"])
    cut = Tokenizer.from_str(tokenizer_json(tokenizer, 4))
    assert cut.get_vocab() == {"a": 0, "b": 1, "c": 2, "ab": 3}
    assert cut.encode("abca").ids == [3, 2, 0]
    assert Tokenizer.from_str(tokenizer_json(tokenizer, 9)).get_vocab() == vocab | {"<end>": 6}


# --- a target without a draft ---

NUM = 40


@pytest.fixture(scope="module")
def alone(tiny_pair_dirs: tuple[Path, Path]) -> Iterator[Replica]:
    pair = load_pair(target=tiny_pair_dirs[0], dtype="float32")
    with replica_of(pair, num_slots=2, max_length=256) as replica:
        yield replica


def test_auto_is_lookup_and_asks_no_registry(alone: Replica, tmp_path: Path) -> None:
    alone.reconfigure({"policy": "auto", "store": f"sqlite:///{tmp_path}/none.db", "folder": str(tmp_path)})
    assert alone.policy.watch is None
    wait_until(lambda: alone.loop.engine.controller.price.is_measured, limit_s=10)  # set by the engine's thread
    status = asyncio.run(alone.status())
    assert (status["draft"], status["policy"]) == ("none", {"name": "untrained", "version": None})
    assert (status["step_price_s"]["launch_s"], status["step_price_s"]["slot_s"]) == (0, 0)
    assert not [*tmp_path.iterdir()]
    prompt, pair = [97, 98, 99, 100] * 8, alone.pair
    body = {"prompt": prompt, "max_tokens": NUM, "temperature": 0, "ignore_eos": True}
    expected = pair.tokenizer.decode(plain_text(pair, prompt, NUM, Sampling()), skip_special_tokens=True)
    with client_of(alone) as client:
        assert text_of(client.ask(COMPLETIONS, body)) == expected
        refused = client.refusal(COMPLETIONS, body | {"block_size": 4}, "block_size")
    assert "block_size 4: the pair has no draft" in refused["message"]


def test_policies_that_need_a_draft_are_refused(alone: Replica, tmp_path: Path) -> None:
    config = ServeConfig(pair=PairConfig(target=alone.pair.id.target))
    for policy in (4, "champion", str(tmp_path)):
        message = f"has no draft, policy {policy} needs one: --draft names one"
        with pytest.raises(ValueError, match=message):
            alone.reconfigure({"policy": policy})
        with pytest.raises(ValueError, match=message):
            find_policy(config.model_copy(update={"policy": str(policy)}), tmp_path)
    for policy in (1, "untrained"):
        alone.reconfigure({"policy": policy})
        assert find_policy(config.model_copy(update={"policy": str(policy)}), tmp_path) == policy
    assert find_policy(config, tmp_path) == "auto"


# --- a template whose roles must alternate ---

ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
)


def test_results_of_tools_are_in_turns_that_alternate(tiny_pair: Pair) -> None:
    """Template that refuses system turns and demands alternating roles, as Gemma's and Mistral's first one do."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ALTERNATING
    calls = [{"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id_ in "ab"]
    results = [{"role": "tool", "tool_call_id": id_, "content": id_} for id_ in "ab"]
    turns = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    pair = replace(tiny_pair, tokenizer=tokenizer)
    with served(pair, num_slots=1, max_length=1000) as client:
        for further in ([], QUESTION):
            client.ask(CHAT, {"messages": [*turns, *further], "tools": [TOOL], "max_tokens": 2})
        assert "must alternate" in client.refusal(CHAT, {"messages": [*QUESTION, *QUESTION]})["message"]
    results_text = "\n".join(f"<tool_response>\n{id_}\n</tool_response>" for id_ in "ab")
    shown_turns = messages.shown([messages.ChatMessage.model_validate(turn) for turn in [*turns, *QUESTION]])
    first, assistant, last = without_system(in_words(shown_turns, [TOOL]))
    assert (first["role"], assistant["role"], last["role"]) == ("user", "assistant", "user")
    assert last["content"] == f"{results_text}\n{QUESTION[0]['content']}"
    assert first["content"].startswith("# Tools")
    assert first["content"].endswith(f"\n\n{QUESTION[0]['content']}")
