"""The OpenAI API over a real engine with a tiny random pair: texts are those of plain decoding, and usage adds up."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blockpilot.control.cost import COEFFICIENTS
from blockpilot.engine.generate import generate
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt
from blockpilot.types import DRAFTED, LOOKED_UP, Prefill, Step, Tree
from helpers.api import ApiClient, idle, served
from helpers.bodies import CHAT, COMPLETIONS, MODEL, PROMPTS, QUESTION, JsonObject, events, shown, text_of
from jobs.serving import metrics
from jobs.serving.replica import Replica

MAX_LENGTH = 300


def question_ids(pair: Pair) -> tuple[int, ...]:
    return Prompt("test", (Message("user", QUESTION[0]["content"]),)).encode(pair.tokenizer)


def test_models_and_health(client: ApiClient, tiny_pair: Pair) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    target = tiny_pair.id.target
    limits = {"max_model_len": MAX_LENGTH, "max_completion_tokens": MAX_LENGTH - 1}
    kind = {"object": "model", "created": 0, "owned_by": "blockpilot"}
    assert model == {"id": target, "root": target, **kind, **limits}
    assert client.get("/v1/models/target").json() == model  # by its slug
    assert client.get(f"/v1/models/{target.lstrip('/')}x").status_code == 404
    health = client.get("/health").json()
    entry = health["models"][target]
    assert (health["status"], entry["status"], entry["num_active"]) == ("ok", "ok", 0)
    assert (entry["num_slots"], entry["max_model_len"], entry["capacity"]) == (4, MAX_LENGTH, 12)
    assert entry["cache_bytes"] > 0
    assert list(entry["step_price_s"]) == list(COEFFICIENTS)
    assert entry["step_price_s"]["base_s"] > 0
    assert entry["drafting"] in (False, True)  # the replica has served other tests
    assert entry["exactness"].split(":")[0] in ("bit for bit", "up to rounding")


@pytest.mark.parametrize(("block_size", "drafting"), [(4, {True, False}), (1, {False})])
def test_health_tells_whether_the_last_step_drafted(
    client: ApiClient, replica: Replica, monkeypatch: pytest.MonkeyPatch, block_size: int, drafting: set[bool]
) -> None:
    """Flag `drafting` of the last step. Steps with a prefill, or with one token left, do not draft."""
    flags = set[bool]()
    body = {"messages": QUESTION, "max_tokens": 20}
    client.ask(CHAT, body | {"block_size": 1})  # steps with a prefill do not change the flag
    idle(replica)
    monkeypatch.setattr(replica.loop, "on_step", lambda *_: flags.add(asyncio.run(replica.status())["drafting"]))
    client.ask(CHAT, body | {"block_size": block_size})
    assert flags == drafting


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chat_gives_the_text_of_plain_decoding_at_every_block_size(
    client: ApiClient, tiny_pair: Pair, temperature: float
) -> None:
    sampling = {"temperature": temperature, "seed": 7}
    steps = generate(tiny_pair, question_ids(tiny_pair), block_size=1, max_new_tokens=40, **sampling)
    expected = tiny_pair.tokenizer.decode([t for s in steps for t in s.tokens], skip_special_tokens=True)
    body = {"messages": QUESTION, "max_tokens": 40} | sampling
    for block_size in ("auto", 1, 2, 3, 5, 8, 12):
        answer = client.ask(CHAT, body | {"block_size": block_size})
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected, "refusal": None}
        tree_answer = client.ask(CHAT, body | {"block_size": block_size, "layout": "tree"})
        assert tree_answer["choices"] == answer["choices"]
        if block_size == "auto":  # every step chooses
            continue
        assert answer["usage"]["block_size"] == block_size
        assert answer["usage"]["layout"] == (None if block_size == 1 else "chain")
        assert tree_answer["usage"]["layout"] == {1: None, 2: "chain"}.get(block_size, "tree")


def test_usage_adds_up_and_lengths_have_openais_defaults(client: ApiClient, tiny_pair: Pair) -> None:
    """Default lengths: 16 tokens for a completion, the rest of the context for a chat."""
    body = {"messages": QUESTION, "temperature": 0}
    answer = client.ask(CHAT, body | {"max_completion_tokens": 21})
    usage = answer["usage"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert usage["prompt_tokens"] == len(question_ids(tiny_pair))
    assert usage["completion_tokens"] == 21
    assert usage["total_tokens"] == usage["prompt_tokens"] + 21
    assert usage["acceptance_length"] == 20 / usage["num_steps"]  # the first token comes from the prefill
    short_usage = client.ask(CHAT, body | {"max_tokens": 1})["usage"]
    assert (short_usage["num_steps"], short_usage["block_size"], short_usage["acceptance_length"]) == (0, None, None)
    assert client.ask(CHAT, body | {"ignore_eos": True})["usage"]["total_tokens"] == MAX_LENGTH
    completion = client.ask(COMPLETIONS, {"prompt": "x", "temperature": 0})
    assert completion["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stops", [False, True])
def test_stream_has_the_same_text_and_can_show_its_steps(client: ApiClient, path: str, stops: bool) -> None:
    body = {"max_tokens": 60, "temperature": 0, "block_size": 4, **PROMPTS[path]}
    if stops:
        text = text_of(client.ask(path, body))
        body["stop"] = [text[20:23], "never"]
        for block_size in (1, 9):  # a stop string ends the text before it
            stopped = client.ask(path, body | {"block_size": block_size})
            assert text_of(stopped) == text[: text.index(text[20:23])]
            assert stopped["usage"]["completion_tokens"] < 60
    whole = client.ask(path, body | {"cache_salt": "whole"})  # separate prefix caches
    options = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": "stream"}
    response = client.post(path, json=MODEL | body | options)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last, usage = events(response.text)
    pieces = [c["choices"][0] for c in [*chunks, last]]
    if path == CHAT:
        assert [p["delta"].get("role") for p in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    assert shown(pieces) == text_of(whole)
    assert len(shown(pieces)) >= 10
    finish_reason = "stop" if stops else "length"
    assert [p["finish_reason"] for p in pieces] == [None] * len(chunks) + [finish_reason]
    assert whole["choices"][0]["finish_reason"] == finish_reason
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert {c["usage"] for c in chunks} == {None}
    assert len({c["id"] for c in chunks}) == 1
    plain = events(client.post(path, json=MODEL | body | {"stream": True}).text)
    assert "usage" not in plain[-1]
    assert not any("step" in choice for chunk in plain for choice in chunk["choices"])

    shorter = body | {"max_tokens": 40} | ({"stop": text[15:18]} if stops else {})
    choices, shorter_usage = client.streamed(path, shorter, include_steps=True)
    steps = [choice["step"] for choice in choices if "step" in choice]
    assert [step["block_size"] for step in steps][:2] == [0, 4]
    assert len(steps) == shorter_usage["num_steps"] + 1
    for step in steps:
        assert step["num_accepted"] <= len(step["texts"]) <= step["num_accepted"] + 1
        assert len(step["drafted"]) == max(step["block_size"] - 1, 0)
        assert step["parents"] == list(range(len(step["drafted"])))
        assert step["path"] == list(range(1, step["num_accepted"] + 1))
    assert shown(choices) == text_of(client.ask(path, shorter))
    for choice in choices:
        assert "step" not in choice or "".join(choice["step"]["texts"]) == shown([choice])


def test_without_a_seed_answers_differ_and_tell_their_seed(client: ApiClient) -> None:
    body = {"prompt": "Once", "max_tokens": 30}
    first, second = client.ask(COMPLETIONS, body), client.ask(COMPLETIONS, body)
    assert first["seed"] != second["seed"]
    assert first["choices"] != second["choices"]
    assert client.ask(COMPLETIONS, body | {"seed": first["seed"]})["choices"] == first["choices"]


def test_same_text_alone_and_in_a_crowd(client: ApiClient, replica: Replica) -> None:
    """Same texts alone and in shared batches, with mixed block sizes and more requests than slots."""
    bodies = [{"prompt": "abc" * (1 + i), "max_tokens": 20 + 3 * i, "seed": i} for i in range(10)]
    alone = [client.ask(COMPLETIONS, body | {"block_size": 1})["choices"] for body in bodies]
    num_active, engine = list[int](), replica.loop.engine
    policy_before = engine.policy

    def policy(prefill: Prefill) -> int:
        num_active.append(engine.num_active)
        return 1 + prefill.num_prompt_tokens % 7

    replica.loop.use(policy, engine.controller)
    with ThreadPoolExecutor(10) as pool:
        crowd = list(pool.map(lambda body: client.ask(COMPLETIONS, body)["choices"], bodies))
    replica.loop.use(policy_before, engine.controller)
    assert crowd == alone
    assert max(num_active) > 1, "the requests never shared a batch"


def test_acceptance_comes_under_vllms_names_and_llama_cpps_field_is_read(client: ApiClient) -> None:
    body = {"prompt": "Once", "max_tokens": 40, "temperature": 0}
    answer = client.ask(COMPLETIONS, body | {"speculative.n_max": 3})
    assert answer["usage"]["block_size"] == 4
    metrics, num_steps = answer["metrics"]["speculative_decoding"], answer["usage"]["num_steps"]
    histogram = metrics["acceptance_histogram"]
    num_accepted = sum(length * num for length, num in enumerate(histogram))
    assert sum(histogram) == num_steps
    assert metrics["mean_acceptance_length"] == pytest.approx(1 + num_accepted / num_steps)
    assert metrics["draft_acceptance_rate"] == pytest.approx(num_accepted / metrics["num_draft_tokens"])
    assert "metrics" not in client.ask(COMPLETIONS, body | {"speculative.n_max": 0})


# --- the prefix cache: usage and metrics count cached tokens, and every text stays the same ---

SYSTEM = {"role": "system", "content": "Answer in short and simple words, and say so where you do not know."}
FIRST = [SYSTEM, *QUESTION]


def chat(messages: Any, salt: str | None) -> JsonObject:
    return {"messages": messages, "max_tokens": 40, "seed": 3, "block_size": 5, "cache_salt": salt}


def cached(usage: JsonObject) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_the_second_turn_of_a_chat_computes_only_what_is_new(client: ApiClient, tiny_pair: Pair) -> None:
    first = client.ask(CHAT, chat(FIRST, "turns"))
    # ASCII, which the byte tokenizer decodes and encodes without loss.
    turn = {"role": "assistant", "content": text_of(first).encode("ascii", errors="ignore").decode()}
    messages = [*FIRST, turn, {"role": "user", "content": "And what is a tree?"}]
    answers = [first, *(client.ask(CHAT, chat(messages, "turns")) for _ in range(2))]
    first_usage, second_usage, repeated_usage = (answer["usage"] for answer in answers)
    assert cached(first_usage) == 0
    assert first_usage["prompt_tokens"] - 16 <= cached(second_usage) < second_usage["prompt_tokens"]
    assert second_usage["prompt_tokens"] - 17 <= cached(repeated_usage) < second_usage["prompt_tokens"]
    with served(tiny_pair, num_slots=1, max_length=MAX_LENGTH, prefix_tokens=0) as uncached_client:
        expected = [uncached_client.ask(CHAT, chat(turns, None)) for turns in (FIRST, messages, messages)]
    for answer, computed in zip(answers, expected, strict=True):
        assert cached(computed["usage"]) == 0
        assert answer["choices"] == computed["choices"]
        del answer["usage"]["prompt_tokens_details"], computed["usage"]["prompt_tokens_details"]
        assert answer["usage"] == computed["usage"]  # steps and acceptance length, too


def test_choices_share_their_prompt_which_is_counted_once_in_streams_too(client: ApiClient) -> None:
    """Cached tokens are counted once per request: none for the first one, whose first choice computes the prompt."""
    body = {
        "prompt": "Once upon a time there was a tree in a wood.",
        "max_tokens": 5,
        "n": 3,
        "cache_salt": "choices",
    }
    assert cached(client.ask(COMPLETIONS, body)["usage"]) == 0
    assert cached(client.streamed(COMPLETIONS, body)[1]) == 32


def test_a_salt_is_a_cache_of_its_own(client: ApiClient) -> None:
    mine, yours, mine_again, without = (
        cached(client.ask(CHAT, chat(FIRST, salt))["usage"]) for salt in ("mine", "yours", "mine", None)
    )
    assert (mine, yours, without) == (0, 0, 0)
    assert mine_again > 0


# --- metrics, and the dashboard that shows them ---


@pytest.fixture
def counted(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, ...]]:
    """Counts of the replica's counters, by name and labels."""
    counts = Counter[tuple[str, ...]]()

    def count(counter: metrics.Counter, value: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
        counts[str(counter.info["name"]), *(tags or {}).values()] += int(value)

    monkeypatch.setattr(metrics.Counter, "inc", count)
    return counts


def test_health_and_metrics_count_what_is_kept(
    client: ApiClient, replica: Replica, counted: Counter[tuple[str, ...]]
) -> None:
    usages = [client.ask(CHAT, chat(FIRST, "counted"))["usage"] for _ in range(2)]
    assert counted["blockpilot_cached_tokens",] == cached(usages[1]) > 0
    assert counted["blockpilot_prompt_tokens",] == 2 * usages[0]["prompt_tokens"]
    entry = client.get("/health").json()["models"][replica.pair.id.target]
    assert entry["num_kept_tokens"] == replica.loop.engine.num_kept_tokens > 0


def test_accepted_tokens_are_counted_by_what_proposed_them(
    replica: Replica, counted: Counter[tuple[str, ...]]
) -> None:
    tree = Tree((7, 8, 9, 10), (0, 1, 2, 3), (DRAFTED, LOOKED_UP, DRAFTED + LOOKED_UP, 0))
    side = Tree((5, 7), (0, 0), (LOOKED_UP, DRAFTED))
    steps = [
        Step(0, (3,), 0, 0, None),  # a prefill
        Step(0, (7, 8, 9, 10, 1), 5, 4, None, tree=tree),
        Step(1, (7, 8, 2), 5, 2, None, tree=tree),
        Step(2, (7, 2), 3, 1, None, tree=side),
        Step(3, (1,), 5, 0, None, tree=tree),
    ]
    replica.loop.on_step(steps, 0.01)
    accepted = {labels[1]: num for labels, num in counted.items() if labels[0] == "blockpilot_accepted_tokens"}
    assert accepted == {"draft": 3, "lookup": 2, "both": 1, "constraint": 1}


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    """Metrics under the names that Ray exports, in panels that do not overlap."""
    suffix = {"Counter": "_total", "Gauge": "", "Histogram": "_bucket"}
    folder, metric = Path(metrics.__file__).parent, r'(Counter|Gauge|Histogram)\(\s*"(blockpilot_\w+)"'
    exported = re.findall(metric, (folder / "metrics.py").read_text())
    exported += [("Gauge", name) for name in metrics.GAUGES]
    panels = json.loads((folder / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    displayed = {name for query in queries for name in re.findall(r"ray_blockpilot_\w+", query)}
    assert len(exported) >= 14
    assert displayed == {f"ray_{name}{suffix[kind]}" for kind, name in exported}
    corners = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(corners) == len(panels) == len({panel["id"] for panel in panels})
