"""Kept prefixes through the server: usage and metrics say what was not computed, and every text stays the same."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from blockpilot.pairs.loading import Pair
from helpers.api import CHAT, COMPLETIONS, JsonObject, ask, client_of, events, replica_of, text_of
from jobs.serving.replica import Replica

SYSTEM = {"role": "system", "content": "Answer in short and simple words, and say so where you do not know."}
FIRST = [SYSTEM, {"role": "user", "content": "What is a block?"}]
MAX_LENGTH = 400


@pytest.fixture
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    with replica_of(tiny_pair, num_slots=4, max_length=MAX_LENGTH) as replica:
        yield replica


@pytest.fixture
def client(replica: Replica) -> Iterator[TestClient]:
    with client_of(replica) as client:
        yield client


def chat(messages: Any, **more: Any) -> JsonObject:
    return {"model": "target", "messages": messages, "max_tokens": 40, "seed": 3, "block_size": 5} | more


def cached(answer: JsonObject) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def second_turn(answer: JsonObject) -> list[dict[str, str]]:
    """The chat goes on with ASCII, which the tokenizer of bytes gives back as it came."""
    said = text_of(answer).encode("ascii", errors="ignore").decode()
    return [*FIRST, {"role": "assistant", "content": said}, {"role": "user", "content": "And what is a tree?"}]


def test_the_second_turn_of_a_chat_computes_only_what_is_new(client: TestClient, tiny_pair: Pair) -> None:
    first = ask(client, CHAT, chat(FIRST))
    messages = second_turn(first)
    second = ask(client, CHAT, chat(messages))
    again = ask(client, CHAT, chat(messages))
    of_first, of_second = (answer["usage"]["prompt_tokens"] for answer in (first, second))
    assert cached(first) == 0
    assert of_first - 16 <= cached(second) < of_second
    assert of_second - 17 <= cached(again) < of_second
    off = {"num_slots": 1, "max_length": MAX_LENGTH, "prefix_tokens": 0}
    with replica_of(tiny_pair, **off) as replica, client_of(replica) as without:
        expected = [ask(without, CHAT, chat(each)) for each in (FIRST, messages, messages)]
    for found, known in zip((first, second, again), expected, strict=True):
        assert cached(known) == 0
        assert found["choices"] == known["choices"]
        del found["usage"]["prompt_tokens_details"], known["usage"]["prompt_tokens_details"]
        assert found["usage"] == known["usage"]  # steps and acceptance length, too


def test_a_stream_and_a_completion_say_so_too(client: TestClient) -> None:
    body = {"model": "target", "prompt": "Once upon a time there was a tree in a wood.", "max_tokens": 5, "seed": 1}
    assert cached(ask(client, COMPLETIONS, body)) == 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = events(client.post(COMPLETIONS, json=body | options).text)
    assert cached(last) == 32


def test_choices_share_their_prompt_which_is_counted_once(client: TestClient) -> None:
    """The first choice computes it: nothing was there for the request."""
    assert cached(ask(client, CHAT, chat(FIRST, n=3))) == 0
    found = ask(client, CHAT, chat(FIRST, n=3))
    assert found["usage"]["prompt_tokens"] - 17 <= cached(found) < found["usage"]["prompt_tokens"]


def test_a_salt_is_a_cache_of_its_own(client: TestClient) -> None:
    found = [cached(ask(client, CHAT, chat(FIRST, cache_salt=salt))) for salt in ("mine", "yours", "mine", None)]
    assert (found[0], found[1], found[3]) == (0, 0, 0)
    assert found[2] > 0
    response = client.post(CHAT, json=chat(FIRST, cache_salt="x" * 257))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")


def test_health_and_metrics_count_what_is_kept(client: TestClient, replica: Replica) -> None:
    counted = dict[str, float]()
    for name in ("_prompts", "_cached"):
        counter = getattr(replica._metrics, name)
        counted[name] = 0.0

        def count(value: float, tags: Any = None, name: str = name) -> None:
            counted[name] += value

        counter.inc = count
    answers = [ask(client, CHAT, chat(FIRST)) for _ in range(2)]
    assert counted["_cached"] == cached(answers[1]) > 0
    assert counted["_prompts"] == 2 * answers[0]["usage"]["prompt_tokens"]
    found = client.get("/health").json()["models"][replica.pair.id.target]
    assert found["num_kept_tokens"] == replica.loop.engine.num_kept_tokens > 0
