"""Several prompts, prompts that are shown, and log probabilities of prompts; the forms of lm-eval's bodies."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from fastapi.testclient import TestClient
from tokenizers.processors import TemplateProcessing

from blockpilot.pairs.loading import Pair
from helpers.api import CHAT, COMPLETIONS, QUESTION, JsonObject, ask, client_of, events, replica_of
from helpers.tiny import EOS_ID
from jobs.serving.replica import Replica

PROMPTS = ["Once upon a time", "Two", "A block of tokens"]


@pytest.fixture
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    with replica_of(tiny_pair, num_slots=4, max_length=300, max_queue=8) as replica:
        yield replica


@pytest.fixture
def client(replica: Replica) -> Iterator[TestClient]:
    with client_of(replica) as client:
        yield client


def target_logprobs(pair: Pair, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens - 1, vocab]: of every token after the first, by one pass of the stock model."""
    return pair.target(torch.tensor([tokens])).logits[0, :-1].log_softmax(dim=-1)


# --- several prompts ---


def as_ids(pair: Pair, prompts: Sequence[str]) -> list[list[int]]:
    return [list(pair.tokenizer(prompt)["input_ids"]) for prompt in prompts]


@pytest.mark.parametrize("n", [1, 2])
def test_prompts_are_answered_as_each_is_alone(client: TestClient, tiny_pair: Pair, n: int) -> None:
    body = {"model": "target", "max_tokens": 12, "seed": 5, "n": n, "logprobs": 1}
    alone = [ask(client, COMPLETIONS, body | {"prompt": prompt}) for prompt in PROMPTS]
    ids = as_ids(tiny_pair, PROMPTS)
    for prompts in (PROMPTS, ids, [ids[0], *PROMPTS[1:]]):
        together = ask(client, COMPLETIONS, body | {"prompt": prompts})
        choices = together["choices"]
        assert [choice["index"] for choice in choices] == list(range(3 * n))
        wanted = [choice for answer in alone for choice in answer["choices"]]
        assert [choice["text"] for choice in choices] == [choice["text"] for choice in wanted]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert together["usage"][name] == sum(answer["usage"][name] for answer in alone)
        assert together["usage"]["prompt_tokens"] == sum(map(len, ids))

    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client.post(COMPLETIONS, json=body | {"prompt": PROMPTS} | options).text)
    streamed = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in choices:
        assert "".join(c["text"] for c in streamed if c["index"] == choice["index"]) == choice["text"]
    assert last["usage"]["total_tokens"] == together["usage"]["total_tokens"]


def test_a_list_of_one_prompt_is_that_prompt(client: TestClient) -> None:
    body = {"model": "target", "max_tokens": 8, "temperature": 0, "block_size": 4}
    one = ask(client, COMPLETIONS, body | {"prompt": "Once"})
    for prompt in (["Once"], [list(b"Once")]):
        assert ask(client, COMPLETIONS, body | {"prompt": prompt})["usage"] | {"prompt_tokens_details": 0} == one[
            "usage"
        ] | {"prompt_tokens_details": 0}


def test_a_prompt_without_the_tokenizers_special_tokens(tiny_pair: Pair) -> None:
    """A tokenizer that begins texts with one, as Llama's does."""
    tokenizer = type(tiny_pair.tokenizer)(tokenizer_object=tiny_pair.tokenizer.backend_tokenizer, eos_token="<eos>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", EOS_ID)]
    )
    try:
        with replica_of(replace(tiny_pair, tokenizer=tokenizer)) as replica, client_of(replica) as client:
            body = {"model": "target", "prompt": "Once", "max_tokens": 1}
            counts = [
                ask(client, COMPLETIONS, body | change)["usage"]["prompt_tokens"]
                for change in ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
            ]
    finally:
        tokenizer.backend_tokenizer.post_processor = None
    assert counts == [5, 5, 4]


# --- a prompt that is shown ---


@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_echo_shows_the_prompt_and_its_log_probabilities(
    client: TestClient, tiny_pair: Pair, max_tokens: int
) -> None:
    body = {"model": "target", "max_tokens": max_tokens, "temperature": 0, "echo": True, "logprobs": 3}
    for prompt in PROMPTS:
        ids = list(tiny_pair.tokenizer(prompt)["input_ids"])
        answer = ask(client, COMPLETIONS, body | {"prompt": prompt})
        (choice,) = answer["choices"]
        assert choice["text"].startswith(prompt)
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert choice["finish_reason"] == "length"
        found = choice["logprobs"]
        assert {len(column) for column in found.values()} == {len(ids) + max_tokens}
        assert (found["token_logprobs"][0], found["top_logprobs"][0], found["text_offset"][0]) == (None, None, 0)
        assert found["tokens"][: len(ids)] == list(prompt)
        assert found["text_offset"][: len(ids)] == list(range(len(ids)))
        wanted = target_logprobs(tiny_pair, ids)
        for i in range(1, len(ids)):
            assert found["token_logprobs"][i] == pytest.approx(float(wanted[i - 1, ids[i]]), abs=1e-4)
            top, likeliest = list(found["top_logprobs"][i].values()), wanted[i - 1].topk(3).values
            assert top
            assert all((likeliest - value).abs().min() < 1e-4 for value in top)
        without = ask(client, COMPLETIONS, body | {"prompt": prompt, "logprobs": None, "echo": max_tokens == 0})
        if max_tokens:
            assert choice["text"] == prompt + without["choices"][0]["text"]
        assert without["choices"][0]["logprobs"] is None


def test_a_stream_begins_with_the_prompt(client: TestClient) -> None:
    body = {"model": "target", "prompt": PROMPTS, "max_tokens": 7, "seed": 2, "echo": True, "logprobs": 1, "n": 2}
    whole = ask(client, COMPLETIONS, body)
    chunks = events(client.post(COMPLETIONS, json=body | {"stream": True}).text)
    streamed = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in whole["choices"]:
        mine = [each for each in streamed if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]
        assert choice["text"].startswith(PROMPTS[choice["index"] // 2])
        for name in ("tokens", "text_offset"):
            pieces = [value for each in mine if each["logprobs"] for value in each["logprobs"][name]]
            assert pieces == choice["logprobs"][name]
    nothing = events(client.post(COMPLETIONS, json=body | {"stream": True, "max_tokens": 0}).text)
    ends = [choice["finish_reason"] for chunk in nothing for choice in chunk["choices"]]
    assert ends.count("length") == 6


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("of_ids", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_lm_evals_body_gives_the_likelihood_of_a_continuation(
    client: TestClient, tiny_pair: Pair, batch: int, of_ids: bool, biased: bool
) -> None:
    """It takes tokens [context:-1] of each choice, so the one token of the answer is there even where it is a stop
    token, and it compares each with the likeliest one exactly.
    """
    ids, num_context = as_ids(tiny_pair, PROMPTS), 2
    body = {"model": "target", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    body |= {"logit_bias": {str(EOS_ID): 100}} if biased else {}
    prompts = ids if of_ids else PROMPTS
    for start in range(0, 3, batch):
        answer = ask(client, COMPLETIONS, body | {"prompt": prompts[start : start + batch]})
        assert len(answer["choices"]) == batch
        for choice, tokens in zip(answer["choices"], ids[start : start + batch], strict=True):
            wanted = target_logprobs(tiny_pair, tokens)[torch.arange(len(tokens) - 1), tokens[1:]]
            found = choice["logprobs"]["token_logprobs"][num_context:-1]
            assert found == pytest.approx(wanted[num_context - 1 :].tolist(), abs=1e-4)
            top = choice["logprobs"]["top_logprobs"][num_context:-1]
            greedy = target_logprobs(tiny_pair, tokens).argmax(dim=-1)[num_context - 1 :].tolist()
            is_first = [value == max(each.values()) for value, each in zip(found, top, strict=True)]
            assert is_first == [a == b for a, b in zip(greedy, tokens[num_context:], strict=True)]


def test_lm_evals_body_finds_a_greedy_continuation(client: TestClient, tiny_pair: Pair) -> None:
    start = list(tiny_pair.tokenizer(PROMPTS[0])["input_ids"])
    tokens = list(start)
    for _ in range(6):
        tokens.append(int(pair_argmax(tiny_pair, tokens)))
    body = {"model": "target", "prompt": [tokens], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    found = ask(client, COMPLETIONS, body)["choices"][0]["logprobs"]
    values, top = (found[name][len(start) : -1] for name in ("token_logprobs", "top_logprobs"))
    assert len(values) == 6
    assert [max(each.values()) for each in top] == values


def pair_argmax(pair: Pair, tokens: Sequence[int]) -> torch.Tensor:
    return pair.target(torch.tensor([tokens])).logits[0, -1].argmax()


def test_an_echo_fills_the_context(client: TestClient) -> None:
    """299 tokens and the one that every request decodes; one more does not fit."""
    body = {"model": "target", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = ask(client, COMPLETIONS, body | {"prompt": [65] * 299})
    assert answer["usage"]["total_tokens"] == 299
    assert client.post(COMPLETIONS, json=body | {"prompt": [65] * 300}).status_code == 400


# --- as vLLM has them ---


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("num", [0, 2])
def test_prompt_log_probabilities_by_token_id(client: TestClient, tiny_pair: Pair, path: str, num: int) -> None:
    prompt: JsonObject = {"messages": QUESTION} if path == CHAT else {"prompt": PROMPTS[0]}
    answer = ask(client, path, {"model": "target", "max_tokens": 3, "prompt_logprobs": num} | prompt)
    rows = answer["prompt_logprobs"] if path == CHAT else answer["choices"][0]["prompt_logprobs"]
    text = f"<user>{QUESTION[0]['content']}\n<assistant>" if path == CHAT else PROMPTS[0]
    ids = list(tiny_pair.tokenizer(text)["input_ids"])
    assert rows[0] is None
    assert len(rows) == len(ids)
    wanted = target_logprobs(tiny_pair, ids)
    for i, row in enumerate(rows[1:], 1):
        own = row[str(ids[i])]
        assert own["logprob"] == pytest.approx(float(wanted[i - 1, ids[i]]), abs=1e-4)
        assert own["decoded_token"] == text[i]
        assert num <= len(row) <= num + 1
        if num:
            first = [each for each in row.values() if each["rank"] == 1]
            assert [each["logprob"] for each in first] == pytest.approx([float(wanted[i - 1].max())], abs=1e-4)


def test_a_prompt_with_log_probabilities_is_the_same_when_its_keys_and_values_were_kept(client: TestClient) -> None:
    prompt = "x" * 100
    ask(client, COMPLETIONS, {"model": "target", "prompt": prompt, "max_tokens": 2})
    body = {"model": "target", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    plain = ask(client, COMPLETIONS, body)
    echo = ask(client, COMPLETIONS, body | {"echo": True, "logprobs": 0})
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert echo["choices"][0]["text"] == prompt + plain["choices"][0]["text"]
    assert None not in echo["choices"][0]["logprobs"]["token_logprobs"][1:]
