"""The OpenAI API over a real engine with a tiny random pair: texts are those of plain decoding, and usage adds up."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi.testclient import TestClient

from blockpilot.control.cost import COEFFICIENTS
from blockpilot.engine.generate import generate
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt
from blockpilot.types import Prefill
from helpers.api import CHAT, COMPLETIONS, PROMPTS, QUESTION, JsonObject, ask, events, idle, shown, text_of
from jobs.serving.replica import Replica

MAX_LENGTH = 300


def plain_text(pair: Pair, prompt_ids: tuple[int, ...], max_new_tokens: int, seed: int, temperature: float) -> str:
    """The text of one-token-at-a-time decoding, by the library alone."""
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    steps = generate(pair, prompt_ids, block_size=1, **settings)
    return str(pair.tokenizer.decode([t for s in steps for t in s.tokens], skip_special_tokens=True))


def question_ids(pair: Pair) -> tuple[int, ...]:
    return Prompt("test", (Message("user", QUESTION[0]["content"]),)).encode(pair.tokenizer)


def test_models_and_health(client: TestClient, tiny_pair: Pair) -> None:
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
    client: TestClient, replica: Replica, monkeypatch: pytest.MonkeyPatch, block_size: int, drafting: set[bool]
) -> None:
    """Steps that take in a prompt, or have one token left, do not draft."""
    told = set[bool]()
    body = {"model": "target", "messages": QUESTION}
    ask(client, CHAT, body | {"max_tokens": 4, "block_size": 1})  # prompts alone leave what the last block said
    idle(replica)
    monkeypatch.setattr(
        replica.loop, "on_step", lambda steps, seconds: told.add(asyncio.run(replica.status())["drafting"])
    )
    ask(client, CHAT, body | {"max_tokens": 20, "block_size": block_size})
    assert told == drafting


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chat_gives_the_text_of_plain_decoding_at_every_block_size(
    client: TestClient, tiny_pair: Pair, temperature: float
) -> None:
    expected = plain_text(tiny_pair, question_ids(tiny_pair), 40, seed=7, temperature=temperature)
    body = {"model": "target", "messages": QUESTION, "max_tokens": 40, "seed": 7, "temperature": temperature}
    for block_size in ("auto", 1, 2, 3, 5, 8, 12):
        answer = ask(client, CHAT, body | {"block_size": block_size})
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected, "refusal": None}
        tree = ask(client, CHAT, body | {"block_size": block_size, "layout": "tree"})
        assert tree["choices"] == answer["choices"]
        if block_size == "auto":  # every step chooses
            continue
        assert answer["usage"]["block_size"] == block_size
        assert answer["usage"]["layout"] == (None if block_size == 1 else "chain")
        assert tree["usage"]["layout"] == {1: None, 2: "chain"}.get(block_size, "tree")


def test_completion_of_a_string_and_of_its_tokens(client: TestClient, tiny_pair: Pair) -> None:
    name, ids = tiny_pair.id.target, tuple(tiny_pair.tokenizer("Once upon")["input_ids"])
    expected = plain_text(tiny_pair, ids, 30, seed=-5, temperature=1.0)
    for prompt in ("Once upon", list(ids), ["Once upon"], [list(ids)]):
        answer = ask(client, COMPLETIONS, {"model": name, "max_tokens": 30, "seed": -5, "prompt": prompt})
        assert answer["choices"][0]["text"] == expected
        assert (answer["object"], answer["model"], answer["seed"]) == ("text_completion", name, -5)


def test_usage_adds_up_and_lengths_have_openais_defaults(client: TestClient, tiny_pair: Pair) -> None:
    """A completion has 16 tokens; a chat answer may fill the context."""
    body = {"model": "target", "messages": QUESTION, "temperature": 0}
    answer = ask(client, CHAT, body | {"max_completion_tokens": 21})
    usage = answer["usage"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert usage["prompt_tokens"] == len(question_ids(tiny_pair))
    assert usage["completion_tokens"] == 21
    assert usage["total_tokens"] == usage["prompt_tokens"] + 21
    assert usage["acceptance_length"] == 20 / usage["num_steps"]  # the first token comes from the prefill
    one = ask(client, CHAT, body | {"max_tokens": 1})["usage"]
    assert (one["num_steps"], one["block_size"], one["acceptance_length"]) == (0, None, None)
    assert ask(client, CHAT, body | {"ignore_eos": True})["usage"]["total_tokens"] == MAX_LENGTH
    completion = ask(client, COMPLETIONS, {"model": "target", "prompt": "x", "temperature": 0})
    assert completion["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stops", [False, True])
def test_stream_has_the_same_text(client: TestClient, path: str, stops: bool) -> None:
    body = {"model": "target", "max_tokens": 60, "temperature": 0, "block_size": 4, **PROMPTS[path]}
    if stops:
        text = text_of(ask(client, path, body))
        body["stop"] = [text[20:23], "never"]
        for block_size in (1, 9):  # a stop string ends the text before it
            stopped = ask(client, path, body | {"block_size": block_size})
            assert text_of(stopped) == text[: text.index(text[20:23])]
            assert stopped["usage"]["completion_tokens"] < 60
    whole = ask(client, path, body | {"cache_salt": "whole"})  # neither finds what the other one left
    options = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": "stream"}
    response = client.post(path, json=body | options)
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
    assert "usage" not in events(client.post(path, json=body | {"stream": True}).text)[-1]


def test_without_a_seed_answers_differ_and_tell_their_seed(client: TestClient) -> None:
    body = {"model": "target", "prompt": "Once", "max_tokens": 30}
    first, second = ask(client, COMPLETIONS, body), ask(client, COMPLETIONS, body)
    assert first["seed"] != second["seed"]
    assert first["choices"] != second["choices"]
    assert ask(client, COMPLETIONS, body | {"seed": first["seed"]})["choices"] == first["choices"]


def test_same_text_alone_and_in_a_crowd(client: TestClient, replica: Replica) -> None:
    """More requests than slots, mixed block sizes: they share batches and do not show it."""

    def body(i: int) -> JsonObject:
        return {"model": "target", "prompt": "abc" * (1 + i), "max_tokens": 20 + 3 * i, "seed": i}

    alone = [ask(client, COMPLETIONS, body(i) | {"block_size": 1})["choices"] for i in range(10)]
    num_active: list[int] = []
    engine = replica.loop.engine
    policy_before = engine.policy

    def policy(prefill: Prefill) -> int:
        num_active.append(engine.num_active)
        return 1 + prefill.num_prompt_tokens % 7

    replica.loop.use(policy, engine.controller)
    with ThreadPoolExecutor(10) as pool:
        crowd = list(pool.map(lambda i: ask(client, COMPLETIONS, body(i))["choices"], range(10)))
    replica.loop.use(policy_before, engine.controller)
    assert crowd == alone
    assert max(num_active) > 1, "the requests never shared a batch"


def test_acceptance_comes_under_vllms_names_and_llama_cpps_field_is_read(client: TestClient) -> None:
    body = {"model": "target", "prompt": "Once", "max_tokens": 40, "temperature": 0}
    answer = ask(client, COMPLETIONS, body | {"speculative.n_max": 3})
    assert answer["usage"]["block_size"] == 4
    metrics, num_steps = answer["metrics"]["speculative_decoding"], answer["usage"]["num_steps"]
    histogram = metrics["acceptance_histogram"]
    num_accepted = sum(length * num for length, num in enumerate(histogram))
    assert sum(histogram) == num_steps
    assert metrics["mean_acceptance_length"] == pytest.approx(1 + num_accepted / num_steps)
    assert metrics["draft_acceptance_rate"] == pytest.approx(num_accepted / metrics["num_draft_tokens"])
    assert "metrics" not in ask(client, COMPLETIONS, body | {"speculative.n_max": 0})
