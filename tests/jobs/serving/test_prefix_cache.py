"""The prefix cache through the server: usage and metrics say what was not computed, and every text stays the same."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from blockpilot.pairs.loading import Pair
from helpers.api import CHAT, COMPLETIONS, JsonObject, ask, client_of, replica_of, streamed, text_of
from jobs.serving.replica import Replica

SYSTEM = {"role": "system", "content": "Answer in short and simple words, and say so where you do not know."}
FIRST = [SYSTEM, {"role": "user", "content": "What is a block?"}]
MAX_LENGTH = 400


@pytest.fixture
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    with replica_of(tiny_pair, num_slots=4, max_length=MAX_LENGTH) as replica:
        yield replica


def chat(messages: Any, **more: Any) -> JsonObject:
    return {"model": "target", "messages": messages, "max_tokens": 40, "seed": 3, "block_size": 5} | more


def cached(usage: JsonObject) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_the_second_turn_of_a_chat_computes_only_what_is_new(client: TestClient, tiny_pair: Pair) -> None:
    first = ask(client, CHAT, chat(FIRST))
    # ASCII, which the tokenizer of bytes gives back as it came.
    turn = {"role": "assistant", "content": text_of(first).encode("ascii", errors="ignore").decode()}
    messages = [*FIRST, turn, {"role": "user", "content": "And what is a tree?"}]
    answers = [first, ask(client, CHAT, chat(messages)), ask(client, CHAT, chat(messages))]
    of_first, of_second, again = (answer["usage"] for answer in answers)
    assert cached(of_first) == 0
    assert of_first["prompt_tokens"] - 16 <= cached(of_second) < of_second["prompt_tokens"]
    assert of_second["prompt_tokens"] - 17 <= cached(again) < of_second["prompt_tokens"]
    off = {"num_slots": 1, "max_length": MAX_LENGTH, "prefix_tokens": 0}
    with replica_of(tiny_pair, **off) as replica, client_of(replica) as without:
        expected = [ask(without, CHAT, chat(body)) for body in (FIRST, messages, messages)]
    for answer, computed in zip(answers, expected, strict=True):
        assert cached(computed["usage"]) == 0
        assert answer["choices"] == computed["choices"]
        del answer["usage"]["prompt_tokens_details"], computed["usage"]["prompt_tokens_details"]
        assert answer["usage"] == computed["usage"]  # steps and acceptance length, too


def test_choices_share_their_prompt_which_is_counted_once_in_streams_too(client: TestClient) -> None:
    """The first choice computes it: nothing was there for the request."""
    body = {"model": "target", "prompt": "Once upon a time there was a tree in a wood.", "max_tokens": 5, "n": 3}
    assert cached(ask(client, COMPLETIONS, body)["usage"]) == 0
    assert cached(streamed(client, COMPLETIONS, body)[1]) == 32


def test_a_salt_is_a_cache_of_its_own(client: TestClient) -> None:
    mine, yours, mine_again, without = (
        cached(ask(client, CHAT, chat(FIRST, cache_salt=salt))["usage"]) for salt in ("mine", "yours", "mine", None)
    )
    assert (mine, yours, without) == (0, 0, 0)
    assert mine_again > 0


def test_health_and_metrics_count_what_is_kept(client: TestClient, replica: Replica) -> None:
    counted = dict[str, float]()
    for name in ("_prompts", "_cached"):
        counter = getattr(replica._metrics, name)
        counted[name] = 0.0

        def count(value: float, tags: Any = None, name: str = name) -> None:
            counted[name] += value

        counter.inc = count
    usages = [ask(client, CHAT, chat(FIRST))["usage"] for _ in range(2)]
    assert counted["_cached"] == cached(usages[1]) > 0
    assert counted["_prompts"] == 2 * usages[0]["prompt_tokens"]
    entry = client.get("/health").json()["models"][replica.pair.id.target]
    assert entry["num_kept_tokens"] == replica.loop.engine.num_kept_tokens > 0
