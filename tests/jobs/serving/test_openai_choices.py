"""Several choices and log probabilities: every choice is the text of its own seed."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from blockpilot.pairs.loading import Pair
from helpers.api import (
    CHAT,
    COMPLETIONS,
    QUESTION,
    JsonObject,
    ask,
    check_error,
    client_of,
    events,
    replica_of,
    text_of,
)
from helpers.tiny import byte_fallback_tokenizer
from jobs.serving.replica import Replica

NAMES = ("<pad>", "<mask>", "<unused>")  # of special tokens, which have no text
PROMPTS: dict[str, JsonObject] = {CHAT: {"messages": QUESTION}, COMPLETIONS: {"prompt": "Once"}}


@pytest.fixture
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    with replica_of(tiny_pair, num_slots=4, max_length=300, max_queue=2) as replica:
        yield replica


@pytest.fixture
def client(replica: Replica) -> Iterator[TestClient]:
    with client_of(replica) as client:
        yield client


def streamed(client: TestClient, path: str, body: JsonObject) -> tuple[list[JsonObject], JsonObject]:
    """All choices of a stream's chunks, and its usage."""
    *chunks, usage = events(
        client.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}}).text
    )
    return [choice for chunk in chunks for choice in chunk["choices"]], usage["usage"]


def shown(path: str, choices: list[JsonObject], index: int) -> str:
    mine = [choice for choice in choices if choice["index"] == index]
    return "".join(c["delta"].get("content", "") if path == CHAT else c["text"] for c in mine)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("seed", [5, 2**63 - 2])
def test_choices_are_those_of_following_seeds(client: TestClient, path: str, seed: int) -> None:
    body = {"model": "target", "max_tokens": 25, "seed": seed, "block_size": 4, **PROMPTS[path]}
    alone = []
    for i in range(3):
        wrapped = (seed + i + 2**63) % 2**64 - 2**63
        alone.append(ask(client, path, body | {"seed": wrapped}))
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

    choices, streamed_usage = streamed(client, path, body | {"n": 3})
    assert [shown(path, choices, i) for i in range(3)] == texts
    assert streamed_usage == usage
    for i in range(3):
        mine = [choice for choice in choices if choice["index"] == i]
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == alone[i]["choices"][0]["finish_reason"]
        assert path != CHAT or [c["delta"].get("role") for c in mine] == ["assistant"] + [None] * (len(mine) - 1)


def test_all_choices_or_none(client: TestClient, replica: Replica) -> None:
    """Six places: a request for seven choices takes none of them, and never can."""
    changes = [({"n": 7}, "n"), ({"prompt": ["x"] * 7}, "prompt"), ({"prompt": ["x"] * 4, "n": 2}, "prompt")]
    for change, param in changes:
        refused = client.post(COMPLETIONS, json={"model": "target", "prompt": "x"} | change)
        assert refused.status_code == 400
        assert "at most 6" in check_error(refused.json(), param)["message"]
        assert replica.loop.num_in_flight == 0
    body = {"model": "target", "prompt": "x", "n": 6, "best_of": 6}
    assert len(ask(client, COMPLETIONS, body)["choices"]) == 6


@pytest.mark.parametrize("block_size", [1, 4])
def test_chat_log_probabilities(client: TestClient, block_size: int) -> None:
    body = {"model": "target", "max_tokens": 20, "seed": 1, "block_size": block_size, **PROMPTS[CHAT]}
    body |= {"logprobs": True, "top_logprobs": 3}
    (choice,) = ask(client, CHAT, body)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 20
    for token in content:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        values = [each["logprob"] for each in token["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert values[0] >= token["logprob"]
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        for each in (token, *token["top_logprobs"]):
            assert bytes(each["bytes"]).decode(errors="replace") == each["token"]
    data = b"".join(bytes(token["bytes"]) for token in content if token["token"] not in NAMES)
    assert data.decode(errors="replace") == choice["message"]["content"]
    choices, _ = streamed(client, CHAT, body)
    pieces = [token for each in choices if each["logprobs"] for token in each["logprobs"]["content"]]
    assert [token["token"] for token in pieces] == [token["token"] for token in content]
    assert [token["logprob"] for token in pieces] == pytest.approx([token["logprob"] for token in content], abs=1e-4)
    without = ask(client, CHAT, body | {"logprobs": False, "top_logprobs": None})
    assert without["choices"][0]["logprobs"] is None
    none = ask(client, CHAT, body | {"top_logprobs": None})["choices"][0]["logprobs"]["content"]
    assert {len(token["top_logprobs"]) for token in none} == {0}


def test_completion_log_probabilities(client: TestClient) -> None:
    body = {"model": "target", "max_tokens": 20, "temperature": 0, "logprobs": 2, **PROMPTS[COMPLETIONS]}
    (choice,) = ask(client, COMPLETIONS, body)["choices"]
    found = choice["logprobs"]
    assert {len(column) for column in found.values()} == {20}
    check_offsets(choice)
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(top) == 2
        assert max(top.values()) == pytest.approx(top.get(token, logprob))  # greedy: the likeliest is taken
    choices, _ = streamed(client, COMPLETIONS, body)
    pieces = [each["logprobs"] for each in choices if each["logprobs"]]
    for name in ("tokens", "text_offset"):
        assert [value for piece in pieces for value in piece[name]] == found[name]


def check_offsets(choice: JsonObject) -> None:
    """Whole tokens are where their offset says, and offsets follow each other."""
    found, text = choice["logprobs"], choice["text"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if "\ufffd" not in token and token not in NAMES:
            assert text[offset : offset + len(token)] == token
    assert found["text_offset"] == sorted(found["text_offset"])


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
                more = limited | {"block_size": size, "stop": stop}
                again = ask(client, COMPLETIONS, more)["choices"][0]
                choices, _ = streamed(client, COMPLETIONS, more)
                assert (again["text"], shown(COMPLETIONS, choices, 0)) == (text, text)
                parts = [part["logprobs"] for part in choices if part["logprobs"]]
                for name in ("tokens", "text_offset"):
                    assert again["logprobs"][name] == logprobs[name]
                    assert [value for part in parts for value in part[name]] == logprobs[name]
        assert "\ufffd" in ends


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"echo": "yes"}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
    ],
)
def test_what_does_not_go_together_is_refused(client: TestClient, change: JsonObject, param: str) -> None:
    response = client.post(COMPLETIONS, json={"model": "target", "prompt": "x"} | change)
    assert response.status_code == 400
    check_error(response.json(), param)
