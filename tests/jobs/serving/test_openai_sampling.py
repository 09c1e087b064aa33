"""Sampling beyond OpenAI's, and what ends an answer: the texts are those of the library's own requests."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling
from helpers.api import CHAT, COMPLETIONS, QUESTION, JsonObject, ask, client_of, events, replica_of, text_of
from helpers.engines import run
from helpers.tiny import CHAT_TEMPLATE, EOS_ID

BODY = {"model": "target", "prompt": "Once upon a time", "max_tokens": 40, "seed": 3, "ignore_eos": True}


def library_text(pair: Pair, sampling: Sampling) -> str:
    """The text of BODY, one token at a time by the library."""
    prompt = tuple(pair.tokenizer(BODY["prompt"])["input_ids"])
    request = Request(prompt, 40, sampling, 1)
    (steps,) = run(Engine(pair, num_slots=1, max_length=300), [request])
    return str(pair.tokenizer.decode([t for s in steps for t in s.tokens], skip_special_tokens=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "fields",
    [
        {"min_p": 0.2},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -1.0},
        {"repetition_penalty": 1.3},
        {"logit_bias": {65: 5.0, 66: -100.0}},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.05, "presence_penalty": 0.5, "repetition_penalty": 0.8},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_each_field_gives_the_librarys_text_at_every_block_size(
    client: TestClient, tiny_pair: Pair, fields: dict[str, Any], temperature: float
) -> None:
    of_library = fields | {"logit_bias": tuple(fields.get("logit_bias", {}).items())}
    expected = library_text(tiny_pair, Sampling(temperature=temperature, seed=3, **of_library))
    for block_size in (1, 4):
        body = BODY | {"temperature": temperature, "block_size": block_size}
        assert text_of(ask(client, COMPLETIONS, body | fields)) == expected
    if temperature or "min_p" not in fields:  # the likeliest token stays that
        assert text_of(ask(client, COMPLETIONS, BODY | {"temperature": temperature})) != expected


def test_stop_tokens_of_the_request_end_it_without_their_text(client: TestClient, tiny_pair: Pair) -> None:
    whole = ask(client, COMPLETIONS, BODY | {"logprobs": 0})["choices"][0]
    tokens = whole["logprobs"]["tokens"]
    stop = next(token for token in tokens[5:] if token.isascii())
    (stop_id,) = tiny_pair.tokenizer(stop)["input_ids"]
    answer = ask(client, COMPLETIONS, BODY | {"stop_token_ids": [stop_id, 7]})
    index = tokens.index(stop)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == index + 1
    assert whole["text"].startswith(text_of(answer))
    assert not text_of(answer).endswith(stop)
    later = ask(client, COMPLETIONS, BODY | {"stop_token_ids": [stop_id], "min_tokens": index + 2})
    assert later["usage"]["completion_tokens"] >= index + 2
    assert stop not in text_of(later)[: index + 1]  # it has no chance so long


def test_stop_strings_do_not_count_before_min_tokens(client: TestClient) -> None:
    body = BODY | {"temperature": 0}
    text = text_of(ask(client, COMPLETIONS, body))
    stop = text[4:6]
    assert text_of(ask(client, COMPLETIONS, body | {"stop": stop})) == text[: text.index(stop)]
    late = ask(client, COMPLETIONS, body | {"stop": stop, "min_tokens": 20})
    assert late["usage"]["completion_tokens"] >= 20


def test_ignore_eos_goes_on_to_the_limit_or_the_end_of_a_grammar(client: TestClient) -> None:
    ends = BODY | {"logit_bias": {str(EOS_ID): 100}, "ignore_eos": False}
    goes_on = ends | {"ignore_eos": True}
    for body, num, finish_reason in (
        (ends, 1, "stop"),
        (goes_on, 40, "length"),
        (goes_on | {"min_tokens": 40}, 40, "length"),
        (goes_on | {"stop_token_ids": [EOS_ID]}, 1, "stop"),
    ):
        answer = ask(client, COMPLETIONS, body)
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (num, finish_reason)
        assert text_of(answer) == ""  # it is a control token
    grammar = ask(client, COMPLETIONS, BODY | {"structured_outputs": {"choice": ["yes", "no"]}, "min_tokens": 30})
    assert text_of(grammar) in ("yes", "no")
    assert grammar["choices"][0]["finish_reason"] == "stop"


def test_a_stream_tells_the_usage_so_far(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(client.post(COMPLETIONS, json=BODY | {"stream": True, "stream_options": options}).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 40)
    assert len(set(counts)) > 5


# --- what the chat template reads ---

TEMPLATE = CHAT_TEMPLATE.replace("<assistant>", "<assistant>{{ note }}{% if enable_thinking %}<think>{% endif %}")
TEMPLATE += "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}"


@pytest.fixture(scope="module")
def reader(tiny_pair: Pair) -> Iterator[TestClient]:
    """A pair whose template reads more than messages, and divides by what a request says."""
    tokenizer = type(tiny_pair.tokenizer)(tokenizer_object=tiny_pair.tokenizer.backend_tokenizer, eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE + "{% if zero is defined %}{{ 1 // zero }}{% endif %}"
    with replica_of(replace(tiny_pair, tokenizer=tokenizer), max_length=300) as replica, client_of(replica) as client:
        yield client


@pytest.mark.parametrize(
    ("change", "written"),
    [
        ({}, "<assistant>"),
        ({"chat_template_kwargs": {"note": "!"}}, "<assistant>!"),
        ({"chat_template_kwargs": {"enable_thinking": True, "note": 5}}, "<assistant>5<think>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<assistant>"),
        ({"reasoning_effort": "high"}, "<assistant>(high)"),
        ({"reasoning_effort": "none"}, "<assistant>"),
        ({"add_generation_prompt": False}, ""),
    ],
)
def test_the_template_reads_what_a_request_hands_it(reader: TestClient, change: JsonObject, written: str) -> None:
    body = {"model": "target", "messages": QUESTION, "max_tokens": 12, "seed": 1}
    prompt = f"<user>{QUESTION[0]['content']}\n{written}"
    completion = ask(reader, COMPLETIONS, {"model": "target", "prompt": prompt, "max_tokens": 12, "seed": 1})
    answer = ask(reader, CHAT, body | change)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert text_of(answer) == text_of(completion)


@pytest.mark.parametrize("content", ["Once upon", "Once <eos> upon"])
def test_an_answer_can_go_on_with_the_last_message(reader: TestClient, content: str) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": content}]
    body = {"model": "target", "messages": messages, "max_tokens": 12, "seed": 1}
    answer = ask(reader, CHAT, body | {"add_generation_prompt": False, "continue_final_message": True})
    prompt = f"<user>{QUESTION[0]['content']}\n<assistant>{content}"
    assert answer["usage"]["prompt_tokens"] == len(prompt)  # a control token in a text is text


@pytest.mark.parametrize("kwargs", [{"zero": 0}, {"self": 1}])
def test_a_template_that_fails_is_400(reader: TestClient, kwargs: JsonObject) -> None:
    body = {"model": "target", "messages": QUESTION, "chat_template_kwargs": kwargs}
    refused = reader.post(CHAT, json=body)
    assert refused.status_code == 400
    assert "chat template" in refused.json()["error"]["message"]
