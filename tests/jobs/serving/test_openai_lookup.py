"""The request field `lookup`, and what usage and steps say of looked-up tokens, over a tiny pair without Ray."""

from collections import Counter

import pytest
from fastapi.testclient import TestClient

from blockpilot.native.library import has_functions
from helpers.api import COMPLETIONS, JsonObject, ask, streamed, text_of

REPEATED = {"model": "target", "prompt": "abcabcabc" * 4, "max_tokens": 60, "temperature": 0}
looks_up = pytest.mark.skipif(not has_functions(), reason="texts are indexed by the library in C")


def accepted_proposals(usage: JsonObject) -> tuple[int, int]:
    """Accepted tokens that were drafted, and those that were looked up."""
    return usage["num_accepted_drafted"], usage["num_accepted_looked_up"]


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
    def num_looked_up(**settings: object) -> int:
        return accepted_proposals(ask(client, COMPLETIONS, REPEATED | settings)["usage"])[1]

    fixed = {"block_size": 6, "layout": layout}
    assert num_looked_up(**fixed, lookup=True) > 0
    assert num_looked_up(**fixed) == num_looked_up(**fixed, lookup=None) == 0
    assert num_looked_up(**fixed, lookup=False) == num_looked_up(lookup=False) == 0
    assert num_looked_up(block_size=1, lookup=True) == num_looked_up(max_tokens=1) == 0
    assert num_looked_up(lookup=1) > 0  # as other flags
    assert num_looked_up() > 0


def steps_of(choices: list[JsonObject]) -> list[JsonObject]:
    steps = [choice["step"] for choice in choices if "step" in choice]
    assert all(len(step["sources"]) == len(step["drafted"]) for step in steps)
    return steps


def accepted_sources(steps: list[JsonObject]) -> Counter[str]:
    return Counter(step["sources"][node - 1] for step in steps for node in step["path"])


@looks_up
@pytest.mark.parametrize("settings", [{"block_size": 6, "layout": "tree"}, {"block_size": 4}, {"n": 3, "seed": 3}])
def test_usage_counts_the_accepted_tokens_of_the_steps_by_source(client: TestClient, settings: JsonObject) -> None:
    choices, usage = streamed(client, COMPLETIONS, REPEATED | settings | {"lookup": True}, include_steps=True)
    steps = steps_of(choices)
    accepted = accepted_sources(steps)
    assert accepted.keys() <= {"draft", "lookup", "both"}
    assert accepted["lookup"] + accepted["both"] > 0
    assert accepted_proposals(usage) == (accepted["draft"] + accepted["both"], accepted["lookup"] + accepted["both"])
    num_prefills = settings.get("n", 1)  # which give the first tokens
    # The length limit cut those whose last token was accepted, not the target's.
    num_cut = sum(step["block_size"] > 0 and step["num_accepted"] == len(step["texts"]) for step in steps)
    assert accepted.total() == usage["completion_tokens"] - num_prefills - usage["num_steps"] + num_cut


def test_tokens_that_a_constraint_forces_are_no_proposals_of_draft_or_lookup(client: TestClient) -> None:
    forced = {"structured_outputs": {"choice": ["a text that is forced"]}, "lookup": False}
    choices, usage = streamed(client, COMPLETIONS, REPEATED | forced, include_steps=True)
    assert accepted_sources(steps_of(choices)).keys() == {"constraint"}
    assert accepted_proposals(usage) == (0, 0)
