"""The request field `lookup`, and what usage and steps say of looked-up tokens, over a tiny pair without Ray."""

from collections import Counter
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from blockpilot.native.library import has_functions
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

PROPOSED = ("num_accepted_drafted", "num_accepted_looked_up")
REPEATED = {"model": "target", "prompt": "abcabcabc" * 4, "max_tokens": 60, "temperature": 0}
looks_up = pytest.mark.skipif(not has_functions(), reason="texts are indexed by the library in C")


@pytest.fixture(scope="module")
def client(tiny_pair: Pair) -> Iterator[TestClient]:
    with replica_of(tiny_pair, num_slots=4, max_length=300, max_queue=8) as replica, client_of(replica) as client:
        yield client


def num_looked_up(client: TestClient, **settings: object) -> int:
    return int(ask(client, COMPLETIONS, REPEATED | settings)["usage"]["num_accepted_looked_up"])


@looks_up
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_text_is_the_same_with_and_without_lookup(client: TestClient, temperature: float) -> None:
    body = REPEATED | {"temperature": temperature, "seed": 5, "max_tokens": 30}
    texts = {
        text_of(ask(client, COMPLETIONS, body | {"block_size": size, "lookup": lookup, "layout": layout}))
        for size, lookup, layout in (
            *((1, True, "auto"), (2, True, "tree"), (6, None, "chain"), (6, True, "chain"), (6, True, "tree")),
            *(("auto", None, "auto"), ("auto", False, "auto"), ("auto", True, "chain")),
        )
    }
    assert len(texts) == 1


@looks_up
@pytest.mark.parametrize("layout", ["chain", "tree"])
def test_true_looks_up_beside_a_fixed_size_and_null_only_where_steps_choose(client: TestClient, layout: str) -> None:
    fixed = {"block_size": 6, "layout": layout}
    assert num_looked_up(client, **fixed, lookup=True) > 0
    assert num_looked_up(client, **fixed) == num_looked_up(client, **fixed, lookup=None) == 0
    assert num_looked_up(client, **fixed, lookup=False) == num_looked_up(client, lookup=False) == 0
    assert num_looked_up(client, block_size=1, lookup=True) == 0
    assert num_looked_up(client, lookup=1) > 0  # as other flags
    assert num_looked_up(client) > 0


@pytest.mark.parametrize("value", ["auto", "true", 2, 0.5, [], {}])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_neither_true_false_nor_null_is_refused(client: TestClient, path: str, value: object) -> None:
    prompt = {"messages": QUESTION} if path == CHAT else {"prompt": "Once"}
    response = client.post(path, json={"model": "target", "lookup": value, **prompt})
    assert response.status_code == 400
    assert "valid boolean" in check_error(response.json(), "lookup")["message"]


def accepted_sources(chunks: list[JsonObject]) -> Counter[str]:
    """Accepted tokens by source, from the steps of a stream."""
    steps = [choice["step"] for chunk in chunks for choice in chunk["choices"] if "step" in choice]
    assert all(len(step["sources"]) == len(step["drafted"]) for step in steps)
    return Counter(step["sources"][node - 1] for step in steps for node in step["path"])


@looks_up
@pytest.mark.parametrize("settings", [{"block_size": 6, "layout": "tree"}, {"block_size": 4}, {"n": 3, "seed": 3}])
def test_usage_counts_the_accepted_tokens_of_the_steps_by_source(client: TestClient, settings: JsonObject) -> None:
    shown = {"stream": True, "stream_options": {"include_steps": True, "include_usage": True}}
    *chunks, last = events(client.post(COMPLETIONS, json=REPEATED | shown | settings | {"lookup": True}).text)
    found, usage = accepted_sources(chunks), last["usage"]
    assert found.keys() <= {"draft", "lookup", "both"}
    assert found["lookup"] + found["both"] > 0
    assert [usage[name] for name in PROPOSED] == [found["draft"] + found["both"], found["lookup"] + found["both"]]
    num_choices = settings.get("n", 1)  # whose first tokens come from the prefill
    assert found.total() == usage["completion_tokens"] - num_choices - usage["num_steps"] + num_last(chunks)


def num_last(chunks: list[JsonObject]) -> int:
    """Steps whose last token was accepted, not the target's own: the length limit cut them."""
    steps = [choice["step"] for chunk in chunks for choice in chunk["choices"] if "step" in choice]
    return sum(step["block_size"] > 0 and step["num_accepted"] == len(step["texts"]) for step in steps)


def test_tokens_that_a_constraint_forces_are_no_proposals_of_draft_or_lookup(client: TestClient) -> None:
    forced = {"structured_outputs": {"choice": ["a text that is forced"]}, "lookup": False}
    shown = {"stream": True, "stream_options": {"include_steps": True, "include_usage": True}}
    *chunks, last = events(client.post(COMPLETIONS, json=REPEATED | shown | forced).text)
    found = accepted_sources(chunks)
    assert found.keys() == {"constraint"}
    assert [last["usage"][name] for name in PROPOSED] == [0, 0]


def test_a_request_of_one_token_has_accepted_none(client: TestClient) -> None:
    usage = ask(client, COMPLETIONS, REPEATED | {"max_tokens": 1})["usage"]
    assert [usage[name] for name in PROPOSED] == [0, 0]
