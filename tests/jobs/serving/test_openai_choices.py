"""Several choices and log probabilities: every choice is the text of its own seed."""

import math
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from blockpilot.pairs.loading import Pair
from helpers.api import (
    CHAT,
    COMPLETIONS,
    PROMPTS,
    JsonObject,
    ask,
    check_error,
    client_of,
    replica_of,
    shown,
    streamed,
    text_of,
)
from helpers.tiny import byte_fallback_tokenizer

NAMES = ("<pad>", "<mask>", "<unused>")  # of special tokens, which have no text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("seed", [5, 2**63 - 2])
def test_choices_are_those_of_following_seeds(client: TestClient, path: str, seed: int) -> None:
    body = {"model": "target", "max_tokens": 25, "seed": seed, "block_size": 4, **PROMPTS[path]}
    seeds = [(seed + i + 2**63) % 2**64 - 2**63 for i in range(3)]  # they wrap around
    alone = [ask(client, path, body | {"seed": seed}) for seed in seeds]
    together = ask(client, path, body | {"n": 3})
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    texts = [text_of({"choices": [choice]}) for choice in together["choices"]]
    assert texts == [text_of(answer) for answer in alone]
    assert len(set(texts)) == 3
    usage = together["usage"]
    for name in ("completion_tokens", "num_steps"):
        assert usage[name] == sum(answer["usage"][name] for answer in alone)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["acceptance_length"] == pytest.approx((usage["completion_tokens"] - 3) / usage["num_steps"])

    chunks, streamed_usage = streamed(client, path, body | {"n": 3})
    assert streamed_usage == usage
    for i in range(3):
        choices = [choice for choice in chunks if choice["index"] == i]
        assert shown(choices) == texts[i]
        *finish_reasons, last = [choice["finish_reason"] for choice in choices]
        assert (set(finish_reasons), last) == ({None}, alone[i]["choices"][0]["finish_reason"])
        if path == CHAT:
            assert [c["delta"].get("role") for c in choices] == ["assistant"] + [None] * (len(choices) - 1)


def test_all_choices_or_none(tiny_pair: Pair) -> None:
    """Six places: a request for seven choices takes none of them, and never can."""
    body = {"model": "target", "prompt": "x"}
    changes = [({"n": 7}, "n"), ({"prompt": ["x"] * 7}, "prompt"), ({"prompt": ["x"] * 4, "n": 2}, "prompt")]
    sizes = {"num_slots": 4, "max_length": 300, "max_queue": 2}
    with replica_of(tiny_pair, **sizes) as replica, client_of(replica) as client:
        for change, param in changes:
            refused = client.post(COMPLETIONS, json=body | change)
            assert refused.status_code == 400
            assert "at most 6" in check_error(refused.json(), param)["message"]
            assert replica.loop.num_in_flight == 0
        assert len(ask(client, COMPLETIONS, body | {"n": 6, "best_of": 6})["choices"]) == 6


@pytest.mark.parametrize("block_size", [1, 4])
def test_chat_log_probabilities(client: TestClient, block_size: int) -> None:
    body = {"model": "target", "max_tokens": 20, "seed": 1, "block_size": block_size, **PROMPTS[CHAT]}
    body |= {"logprobs": True, "top_logprobs": 3}
    (choice,) = ask(client, CHAT, body)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 20
    for token in content:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        values = [likely["logprob"] for likely in token["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert values[0] >= token["logprob"]
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        for named in (token, *token["top_logprobs"]):
            assert bytes(named["bytes"]).decode(errors="replace") == named["token"]
    data = b"".join(bytes(token["bytes"]) for token in content if token["token"] not in NAMES)
    assert data.decode(errors="replace") == choice["message"]["content"]
    chunks, _ = streamed(client, CHAT, body)
    pieces = [token for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["content"]]
    assert [token["token"] for token in pieces] == [token["token"] for token in content]
    assert [token["logprob"] for token in pieces] == pytest.approx([token["logprob"] for token in content], abs=1e-4)
    without = ask(client, CHAT, body | {"logprobs": False, "top_logprobs": None})
    assert without["choices"][0]["logprobs"] is None
    taken_only = ask(client, CHAT, body | {"top_logprobs": None})["choices"][0]["logprobs"]["content"]
    assert {len(token["top_logprobs"]) for token in taken_only} == {0}


def check_offsets(choice: JsonObject) -> None:
    """Whole tokens are where their offset says, and offsets follow each other."""
    logprobs, text = choice["logprobs"], choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if "\ufffd" not in token and token not in NAMES:
            assert text[offset : offset + len(token)] == token
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_text_of_half_characters_is_one_at_every_block_size(tiny_pair: Pair, kind: str) -> None:
    """Characters of one to four bytes, the last one cut by max_tokens; streamed or not, with stop strings or not."""
    pair = replace(tiny_pair, tokenizer=byte_fallback_tokenizer()) if kind == "byte-fallback" else tiny_pair
    body = {"model": "target", "prompt": [10, 20, 30], "seed": 1, "logprobs": 5}
    body |= {"structured_outputs": {"regex": "(\U0001f642|\U0001f643|\u4f60|\u00e9|a){40}"}}
    with replica_of(pair, num_slots=2, max_length=300) as replica, client_of(replica) as client:
        ends = set()
        for num in range(8, 14):
            limited = body | {"max_tokens": num}
            choice = ask(client, COMPLETIONS, limited | {"block_size": 1})["choices"][0]
            text, logprobs = choice["text"], choice["logprobs"]
            ends.add(text[-1])
            assert "\ufffd" not in text[:-1]
            assert [len(top) for top in logprobs["top_logprobs"]] == [5] * num
            check_offsets(choice)
            for size, stop in ((1, ["zz"]), (4, []), (4, ["zz", "\U0001f642z"])):
                drafting = limited | {"block_size": size, "stop": stop}
                again = ask(client, COMPLETIONS, drafting)["choices"][0]
                chunks, _ = streamed(client, COMPLETIONS, drafting)
                assert (again["text"], shown(chunks)) == (text, text)
                parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
                for name in ("tokens", "text_offset"):
                    assert again["logprobs"][name] == logprobs[name]
                    assert [value for part in parts for value in part[name]] == logprobs[name]
        assert "\ufffd" in ends
