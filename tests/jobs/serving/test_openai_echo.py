"""Several prompts, prompts that are shown, and log probabilities of prompts; the forms of lm-eval's bodies."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from fastapi.testclient import TestClient
from tokenizers.processors import TemplateProcessing

from blockpilot.pairs.loading import Pair
from helpers.api import CHAT, COMPLETIONS, QUESTION, JsonObject, ask, client_of, replica_of, shown, streamed
from helpers.tiny import EOS_ID

PROMPTS = ["Once upon a time", "Two", "A block of tokens"]


def target_logprobs(pair: Pair, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens - 1, vocab]: of every token after the first, by one pass of the stock model."""
    return pair.target(torch.tensor([tokens])).logits[0, :-1].log_softmax(dim=-1)


def as_ids(pair: Pair, prompts: Sequence[str]) -> list[list[int]]:
    return [list(pair.tokenizer(prompt)["input_ids"]) for prompt in prompts]


@pytest.mark.parametrize("n", [1, 2])
def test_prompts_are_answered_as_each_is_alone(client: TestClient, tiny_pair: Pair, n: int) -> None:
    body = {"model": "target", "max_tokens": 12, "seed": 5, "n": n, "logprobs": 1}
    alone = [ask(client, COMPLETIONS, body | {"prompt": prompt}) for prompt in PROMPTS]
    expected = [choice["text"] for answer in alone for choice in answer["choices"]]
    ids = as_ids(tiny_pair, PROMPTS)
    for prompts in (PROMPTS, ids, [ids[0], *PROMPTS[1:]]):
        together = ask(client, COMPLETIONS, body | {"prompt": prompts})
        assert [choice["index"] for choice in together["choices"]] == list(range(3 * n))
        assert [choice["text"] for choice in together["choices"]] == expected
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert together["usage"][name] == sum(answer["usage"][name] for answer in alone)
        assert together["usage"]["prompt_tokens"] == sum(map(len, ids))
    chunks, usage = streamed(client, COMPLETIONS, body | {"prompt": PROMPTS})
    assert [shown([chunk for chunk in chunks if chunk["index"] == i]) for i in range(3 * n)] == expected
    assert usage["total_tokens"] == together["usage"]["total_tokens"]


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


@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_echo_shows_prompts_and_their_log_probabilities(client: TestClient, tiny_pair: Pair, max_tokens: int) -> None:
    """lm-eval sends such bodies with one token, which must come even where it is a stop token, and takes a token for
    the likeliest one where the log probabilities are equal. The last prompt goes on with the likeliest ones.
    """
    ids = as_ids(tiny_pair, PROMPTS)
    for _ in range(6):
        ids[2].append(int(tiny_pair.target(torch.tensor([ids[2]])).logits[0, -1].argmax()))
    body = {"model": "target", "max_tokens": max_tokens, "temperature": 0, "prompt": ids}
    body |= {"logit_bias": {str(EOS_ID): 100}} if max_tokens == 1 else {}
    answer = ask(client, COMPLETIONS, body | {"echo": True, "logprobs": 3})
    assert answer["usage"]["completion_tokens"] == 3 * max_tokens
    for choice, tokens in zip(answer["choices"], ids, strict=True):
        logprobs, num = choice["logprobs"], len(tokens)
        assert {len(column) for column in logprobs.values()} == {num + max_tokens}
        assert choice["text"].startswith(tiny_pair.tokenizer.decode(tokens[:3]))
        assert logprobs["text_offset"][:3] == [0, 1, 2]
        (no_logprob, *values), (no_top, *top) = logprobs["token_logprobs"][:num], logprobs["top_logprobs"][:num]
        assert (no_logprob, no_top) == (None, None)
        expected = target_logprobs(tiny_pair, tokens)
        assert values == pytest.approx(expected[torch.arange(num - 1), tokens[1:]].tolist(), abs=1e-4)
        for row, likeliest in zip(expected.topk(3).values, top, strict=True):
            assert likeliest
            assert all((row - value).abs().min() < 1e-4 for value in likeliest.values())
        is_likeliest = [value == max(likely.values()) for value, likely in zip(values, top, strict=True)]
        assert is_likeliest == (expected.argmax(dim=-1) == torch.tensor(tokens[1:])).tolist()
    assert is_likeliest[-6:] == [True] * 6
    without = ask(client, COMPLETIONS, body | {"echo": max_tokens == 0})["choices"]
    assert [choice["logprobs"] for choice in without] == [None] * 3
    if max_tokens:
        for choice, answered, prompt in zip(answer["choices"], without, PROMPTS, strict=True):
            assert choice["text"].startswith(prompt)
            assert choice["text"].endswith(answered["text"])


def test_a_stream_begins_with_the_prompt(client: TestClient) -> None:
    body = {"model": "target", "prompt": PROMPTS, "max_tokens": 7, "seed": 2, "echo": True, "logprobs": 1, "n": 2}
    whole = ask(client, COMPLETIONS, body)
    chunks, _ = streamed(client, COMPLETIONS, body)
    for choice in whole["choices"]:
        parts = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert shown(parts) == choice["text"]
        assert choice["text"].startswith(PROMPTS[choice["index"] // 2])
        for name in ("tokens", "text_offset"):
            values = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
            assert values == choice["logprobs"][name]
    nothing, _ = streamed(client, COMPLETIONS, body | {"max_tokens": 0})
    assert [choice["finish_reason"] for choice in nothing].count("length") == 6


def test_an_echo_fills_the_context(client: TestClient) -> None:
    """299 tokens and the one that every request decodes; one more does not fit."""
    body = {"model": "target", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = ask(client, COMPLETIONS, body | {"prompt": [65] * 299})
    assert answer["usage"]["total_tokens"] == 299
    assert client.post(COMPLETIONS, json=body | {"prompt": [65] * 300}).status_code == 400


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("num", [0, 2])
def test_prompt_log_probabilities_by_token_id_as_vllm_has_them(
    client: TestClient, tiny_pair: Pair, path: str, num: int
) -> None:
    prompt: JsonObject = {"messages": QUESTION} if path == CHAT else {"prompt": PROMPTS[0]}
    answer = ask(client, path, {"model": "target", "max_tokens": 3, "prompt_logprobs": num} | prompt)
    rows = answer["prompt_logprobs"] if path == CHAT else answer["choices"][0]["prompt_logprobs"]
    text = f"<user>{QUESTION[0]['content']}\n<assistant>" if path == CHAT else PROMPTS[0]
    (ids,) = as_ids(tiny_pair, [text])
    assert rows[0] is None
    assert len(rows) == len(ids)
    expected = target_logprobs(tiny_pair, ids)
    for i, row in enumerate(rows[1:], 1):
        of_token = row[str(ids[i])]
        assert of_token["logprob"] == pytest.approx(float(expected[i - 1, ids[i]]), abs=1e-4)
        assert of_token["decoded_token"] == text[i]
        assert num <= len(row) <= num + 1
        if num:
            likeliest = [token["logprob"] for token in row.values() if token["rank"] == 1]
            assert likeliest == pytest.approx([float(expected[i - 1].max())], abs=1e-4)


def test_a_prompt_with_log_probabilities_is_the_same_when_its_keys_and_values_were_kept(client: TestClient) -> None:
    body = {"model": "target", "prompt": "x" * 100, "max_tokens": 2, "temperature": 0}
    ask(client, COMPLETIONS, body)
    plain = ask(client, COMPLETIONS, body)
    echo = ask(client, COMPLETIONS, body | {"echo": True, "logprobs": 0})
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert echo["choices"][0]["text"] == body["prompt"] + plain["choices"][0]["text"]
    assert None not in echo["choices"][0]["logprobs"]["token_logprobs"][1:]
