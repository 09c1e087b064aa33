"""The OpenAI API over a real engine with a tiny random pair, without Ray."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockpilot.control.cost import COEFFICIENTS
from blockpilot.engine.generate import generate
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt
from blockpilot.types import Prefill
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
from jobs.serving.replica import Replica
from jobs.serving.schema import NEUTRAL

MAX_LENGTH = 300


@pytest.fixture
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    with replica_of(tiny_pair, num_slots=4, max_length=MAX_LENGTH, max_queue=8) as replica:
        yield replica


@pytest.fixture
def client(replica: Replica) -> Iterator[TestClient]:
    with client_of(replica) as client:
        yield client


def expected(pair: Pair, prompt_ids: tuple[int, ...], max_new_tokens: int, seed: int, temperature: float) -> str:
    """The text of one-token-at-a-time decoding, by the library alone."""
    steps = generate(
        pair,
        prompt_ids,
        block_size=1,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )
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
    assert client.get(f"/v1/models/{tiny_pair.id.target.lstrip('/')}x").status_code == 404
    health = client.get("/health").json()
    found = health["models"][tiny_pair.id.target]
    assert (health["status"], found["status"], found["num_active"]) == ("ok", "ok", 0)
    assert (found["num_slots"], found["max_model_len"], found["capacity"]) == (4, MAX_LENGTH, 12)
    assert found["cache_bytes"] > 0
    assert list(found["step_price_s"]) == list(COEFFICIENTS)
    assert found["step_price_s"]["base_s"] > 0
    assert found["drafting"] is False
    assert not {"accepted_over_expected", "backed_off"} & found.keys()
    assert found["exactness"].split(":")[0] in ("bit for bit", "up to rounding")


@pytest.mark.parametrize(("block_size", "drafting"), [(4, {True, False}), (1, {False})])
def test_health_tells_whether_the_last_step_drafted(
    client: TestClient, replica: Replica, block_size: int, drafting: set[bool]
) -> None:
    """Those that take in a prompt, or have one token left, do not."""
    found = set[bool]()
    replica.loop.on_step = lambda steps, seconds: found.add(asyncio.run(replica.status())["drafting"])
    ask(client, CHAT, {"model": "target", "messages": QUESTION, "max_tokens": 20, "block_size": block_size})
    assert found == drafting


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chat_gives_the_text_of_plain_decoding_at_every_block_size(
    client: TestClient, tiny_pair: Pair, temperature: float
) -> None:
    want = expected(tiny_pair, question_ids(tiny_pair), 40, seed=7, temperature=temperature)
    body = {"model": "target", "messages": QUESTION, "max_tokens": 40, "seed": 7, "temperature": temperature}
    for block_size in ("auto", 1, 2, 3, 5, 8, 12):
        answer = ask(client, CHAT, body | {"block_size": block_size})
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": want, "refusal": None}
        tree = ask(client, CHAT, body | {"block_size": block_size, "layout": "tree"})
        assert tree["choices"] == answer["choices"]
        if block_size == "auto":  # every step chooses
            continue
        assert answer["usage"]["block_size"] == block_size
        assert answer["usage"]["layout"] == (None if block_size == 1 else "chain")
        assert tree["usage"]["layout"] == {1: None, 2: "chain"}.get(block_size, "tree")


def test_an_unknown_layout_is_refused(client: TestClient) -> None:
    response = client.post(CHAT, json={"model": "target", "messages": QUESTION, "layout": "star"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "layout"
    assert "'auto', 'chain' or 'tree'" in error["message"]


def test_completion_of_a_string_and_of_its_tokens(client: TestClient, tiny_pair: Pair) -> None:
    ids = tuple(tiny_pair.tokenizer("Once upon")["input_ids"])
    want = expected(tiny_pair, ids, 30, seed=-5, temperature=1.0)
    body = {"model": tiny_pair.id.target, "max_tokens": 30, "seed": -5}
    for prompt in ("Once upon", list(ids)):
        answer = ask(client, COMPLETIONS, body | {"prompt": prompt})
        assert answer["choices"][0]["text"] == want
        assert (answer["object"], answer["model"], answer["seed"]) == (
            "text_completion",
            tiny_pair.id.target,
            -5,
        )


def test_usage_adds_up(client: TestClient, tiny_pair: Pair) -> None:
    body = {"model": "target", "messages": QUESTION, "max_completion_tokens": 21, "temperature": 0}
    answer = ask(client, CHAT, body)
    usage = answer["usage"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert usage["prompt_tokens"] == len(question_ids(tiny_pair))
    assert usage["completion_tokens"] == 21
    assert usage["total_tokens"] == usage["prompt_tokens"] + 21
    assert usage["acceptance_length"] == 20 / usage["num_steps"]  # the first token comes from the prefill
    one = ask(client, CHAT, body | {"max_completion_tokens": 1})["usage"]
    assert (one["num_steps"], one["block_size"], one["acceptance_length"]) == (0, None, None)


def test_default_lengths(client: TestClient, tiny_pair: Pair) -> None:
    """A completion has 16 tokens, as OpenAI documents; a chat answer may fill the context."""
    completion = ask(client, COMPLETIONS, {"model": "target", "prompt": "x", "temperature": 0})
    assert completion["usage"]["completion_tokens"] == 16
    once = [{"role": "user", "content": "Once"}]
    for field in ("max_tokens", "max_completion_tokens"):
        few = ask(client, COMPLETIONS, {"model": "target", "prompt": "x", "temperature": 0, field: 3})
        assert few["usage"]["completion_tokens"] == 3
    chat = ask(client, CHAT, {"model": "target", "messages": once, "temperature": 0})
    assert chat["usage"]["total_tokens"] == MAX_LENGTH


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stops", [False, True])
def test_stream_has_the_same_text(client: TestClient, path: str, stops: bool) -> None:
    prompt = {"messages": QUESTION} if path == CHAT else {"prompt": "Once"}
    body = {"model": "target", "max_tokens": 60, "temperature": 0, "block_size": 4, **prompt}
    if stops:
        body["stop"] = text_of(ask(client, path, body))[20:23]
    whole = ask(client, path, body | {"cache_salt": "whole"})  # neither finds what the other one left
    options = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": "stream"}
    response = client.post(path, json=body | options)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last, usage = events(response.text)
    pieces = [c["choices"][0] for c in [*chunks, last]]
    if path == CHAT:
        assert [p["delta"].get("role") for p in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    shown = "".join(p["delta"].get("content", "") if path == CHAT else p["text"] for p in pieces)
    assert shown == text_of(whole)
    assert len(shown) >= 10
    finish_reason = "stop" if stops else "length"
    assert [p["finish_reason"] for p in pieces] == [None] * len(chunks) + [finish_reason]
    assert whole["choices"][0]["finish_reason"] == finish_reason
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert {c["usage"] for c in chunks} == {None}
    assert len({c["id"] for c in chunks}) == 1
    assert "usage" not in events(client.post(path, json=body | {"stream": True}).text)[-1]


def test_stop_string_ends_the_text_before_it(client: TestClient) -> None:
    body = {"model": "target", "messages": QUESTION, "max_tokens": 60, "temperature": 0}
    text = text_of(ask(client, CHAT, body))
    stop = text[10:13]
    for block_size in (1, 4, 9):
        answer = ask(client, CHAT, body | {"stop": [stop, "never"], "block_size": block_size})
        assert text_of(answer) == text[: text.index(stop)]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] < 60


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
    seen: list[int] = []
    engine = replica.loop.engine

    def policy(prefill: Prefill) -> int:
        seen.append(engine.num_active)
        return 1 + prefill.num_prompt_tokens % 7

    replica.loop.use(policy, engine.controller)
    with ThreadPoolExecutor(10) as pool:
        crowd = list(pool.map(lambda i: ask(client, COMPLETIONS, body(i))["choices"], range(10)))
    assert crowd == alone
    assert max(seen) > 1, "the requests never shared a batch"


def test_text_parts_and_developer_role(client: TestClient) -> None:
    def text(messages: list[JsonObject]) -> str:
        body = {"model": "target", "messages": messages, "max_tokens": 12, "seed": 1}
        return ask(client, CHAT, body)["choices"][0]["message"]["content"]

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text([{"role": "user", "content": parts}]) == text([{"role": "user", "content": "a\nb"}])
    user = {"role": "user", "content": "hi"}
    system = text([{"role": "system", "content": "Be brief."}, user])
    assert text([{"role": "developer", "content": "Be brief."}, user]) == system != text([user])


# --- bad input ---

BAD_FIELDS: list[tuple[JsonObject, int, str | None]] = [
    ({"model": "gpt-9"}, 404, "model"),
    ({"model": None}, 400, "model"),
    ({"model": 5}, 400, "model"),
    ({"messages": None}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hello"}, 400, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0"),
    ({"messages": [{"role": "critic", "content": "x"}]}, 400, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, 400, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x" * MAX_LENGTH}]}, 400, "messages"),
    ({"prompt": "x"}, 400, "prompt"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": MAX_LENGTH}, 400, "max_tokens"),
    ({"max_tokens": 10**30}, 400, "max_tokens"),
    ({"max_tokens": "5"}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"max_completion_tokens": True}, 400, "max_completion_tokens"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": 2.1}, 400, "temperature"),
    ({"temperature": "1"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.01}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"seed": 2**63}, 400, "seed"),
    ({"seed": -(2**63) - 1}, 400, "seed"),
    ({"seed": 1.5}, 400, "seed"),
    ({"stop": ["a"] * 17}, 400, "stop"),
    ({"stop": "x" * 4097}, 400, "stop.0"),
    ({"stop": [""]}, 400, "stop.0"),
    ({"stop": [1]}, 400, "stop.0"),
    ({"block_size": 0}, 400, "block_size"),
    ({"block_size": 33}, 400, "block_size"),
    ({"block_size": "fast"}, 400, "block_size"),
    ({"block_size": True}, 400, "block_size"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"include_obfuscation": True}}, 400, "stream_options.include_obfuscation"),
    ({"n": 0}, 400, "n"),
    ({"n": 9}, 400, "n"),
    ({"n": True}, 400, "n"),
    ({"best_of": 2}, 400, "best_of"),
    ({"logprobs": 2}, 400, "logprobs"),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, 400, "top_logprobs"),
    ({"echo": True}, 400, "echo"),
    ({"stop_token_ids": [5, "a"]}, 400, "stop_token_ids.1"),
    ({"stop_token_ids": [5, 260]}, 400, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids"),
    ({"ignore_eos": "yes"}, 400, "ignore_eos"),
    ({"ignore_eos": 2}, 400, "ignore_eos"),
    ({"min_tokens": -1}, 400, "min_tokens"),
    ({"min_tokens": 21, "max_tokens": 20}, 400, "min_tokens"),
    ({"min_tokens": 300}, 400, "min_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"min_p": 1.1}, 400, "min_p"),
    ({"min_p": -0.1}, 400, "min_p"),
    ({"frequency_penalty": 2.1}, 400, "frequency_penalty"),
    ({"presence_penalty": -2.1}, 400, "presence_penalty"),
    ({"presence_penalty": "high"}, 400, "presence_penalty"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"repetition_penalty": 101}, 400, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias"),
    ({"logit_bias": {"5": True}}, 400, "logit_bias"),
    ({"logit_bias": {"a": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"260": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"9" * 4000: 1}}, 400, "logit_bias"),
    ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, 400, "logit_bias"),
    ({"logit_bias": [5]}, 400, "logit_bias"),
    ({"prompt_logprobs": 21}, 400, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    ({"metadata": {"a": 1}}, 400, "metadata"),
    ({"metadata": "a"}, 400, "metadata"),
    ({"prompt_cache_key": 1}, 400, "prompt_cache_key"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": False}}, 400, "chat_template_kwargs"),
    ({"chat_template_kwargs": "thinking"}, 400, "chat_template_kwargs"),
    ({"continue_final_message": True}, 400, "continue_final_message"),
    ({"reasoning_effort": "high"}, 400, "reasoning_effort"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "param"), BAD_FIELDS, ids=lambda v: str(v)[:50])
def test_bad_chat_fields_are_refused_by_name(
    client: TestClient, change: JsonObject, status: int, param: str | None
) -> None:
    response = client.post(CHAT, json={"model": "target", "messages": QUESTION} | change)
    assert response.status_code == status
    check_error(response.json(), param)


def test_values_that_change_nothing_are_taken(client: TestClient) -> None:
    body = {"model": "target", "messages": QUESTION, "max_tokens": 20, "seed": 1}
    unchanged = ask(client, CHAT, body)["choices"]
    for name, values in NEUTRAL.items():
        for value in (*values, None):
            assert ask(client, CHAT, body | {name: value})["choices"] == unchanged
        refused = client.post(CHAT, json=body | {name: 7})
        assert refused.status_code == 400
        check_error(refused.json(), name)
    for change in SAYS_NOTHING:
        assert ask(client, CHAT, body | change)["choices"] == unchanged


SAYS_NOTHING: list[JsonObject] = [
    {"unknown": None, "stop": None, "user": None},
    {"user": "me", "prompt_cache_key": "key", "safety_identifier": "me", "request_id": "1"},
    {"metadata": {}},
    {"metadata": {"team": "a", "run": "7"}},
    {"reasoning_effort": "none"},
    {"chat_template_kwargs": {}},
    {"chat_template_kwargs": {"enable_thinking": False, "unread": [1, {"a": None}]}},
    {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False},
    {"response_format": {"type": "text"}, "tool_choice": "auto", "parallel_tool_calls": False},
    {"best_of": 1, "n": 1.0, "stream": 0, "logprobs": 0, "top_logprobs": 0, "ignore_eos": 0},
    {"max_tokens": 20.0, "seed": 1.0, "top_k": 0.0, "min_tokens": 0.0},
    {"top_k": -1, "min_p": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "stop_token_ids": []},
    {"temperature": 1, "top_p": 1, "frequency_penalty": 0.0},
]


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        ["a", ""],
        ["a", 1],
        [1, "a"],
        ["a", ["b"]],
        [[1], ["a"]],
        [True],
        [[True]],
        [260],
        [-1],
        [[1], [260]],
        [2**70],
        5,
        {},
        "x" * 300,
        ["a", "x" * 300],
        [1] * 285,
    ],
)
def test_bad_prompts_are_refused(client: TestClient, prompt: object) -> None:
    response = client.post(COMPLETIONS, json={"model": "target", "prompt": prompt})
    assert response.status_code == 400
    param = check_error(response.json())["param"]
    assert param in ("prompt", "max_tokens") or param.startswith("prompt.")


def test_context_error_has_the_numbers(client: TestClient) -> None:
    body = {"model": "target", "prompt": [65] * 290, "max_tokens": 11}
    error = check_error(client.post(COMPLETIONS, json=body).json(), "max_tokens")
    assert all(number in error["message"] for number in ("300", "290", "11"))
    assert ask(client, COMPLETIONS, body | {"max_tokens": 10})["usage"]["total_tokens"] <= 300


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe{}",
        b'{"model": "\xc3\x28"}',
        b'{"model": "\\ud800"}',
        b'{"temperature": NaN, "model": "target", "prompt": "x"}',
        b'{"temperature": 1e999, "model": "target", "prompt": "x"}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"model=target",
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_bodies_that_are_no_json_object(client: TestClient, raw: bytes) -> None:
    for path in (CHAT, COMPLETIONS):
        response = client.post(path, content=raw)
        assert response.status_code == 400
        check_error(response.json())


def test_routes_and_methods_that_are_not_there(client: TestClient) -> None:
    for method, path, status in [
        ("GET", "/v1/embeddings", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/", 405),
        ("GET", "/nothing", 404),
    ]:
        response = client.request(method, path)
        assert response.status_code == status
        assert path in check_error(response.json())["message"]
    assert client.get(CHAT).headers["allow"] == "POST"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        "model",
        "messages",
        "prompt",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "block_size",
        "lookup",
        "stream",
        "stream_options",
        "user",
        "n",
        "logprobs",
        "echo",
        "best_of",
        "tools",
        "logit_bias",
        "metadata",
        "min_p",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "presence_penalty",
        "repetition_penalty",
        "prompt_logprobs",
        "chat_template_kwargs",
        "continue_final_message",
        "\ud7ff",
        "🙂",
    ]
)
MESSAGES = st.lists(
    st.fixed_dictionaries({}, optional={"role": JSON | st.just("user"), "content": JSON, "name": JSON}),
    max_size=2,
)


@pytest.fixture
def neighbour(client: TestClient) -> Iterator[None]:
    """Another client that streams all the time; its texts are checked at the end."""
    body = {"model": "target", "prompt": "Once", "max_tokens": 60, "seed": 3, "stream": True}
    stop, texts = threading.Event(), list[str]()

    def ask_again() -> None:
        while not stop.is_set():
            chunks = events(client.post(COMPLETIONS, json=body).text)
            texts.append("".join(chunk["choices"][0]["text"] for chunk in chunks))

    thread = threading.Thread(target=ask_again)
    thread.start()
    yield
    stop.set()
    thread.join()
    alone = ask(client, COMPLETIONS, body | {"stream": False})
    assert len(texts) > 3
    assert set(texts) == {text_of(alone)}


def of_path(path: str) -> JsonObject:
    return {"model": "target", "max_tokens": 2} | ({"messages": QUESTION} if path == CHAT else {"prompt": "x"})


SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2) | st.sampled_from([1e-40, 5e-324, 1e-5]),
        "top_p": st.floats(0, 1, exclude_min=True) | st.sampled_from([1e-50, 5e-324]),
        "top_k": st.integers(0) | st.just(10**30),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "logprobs": st.booleans(),
        "min_p": st.floats(0, 1) | st.sampled_from([5e-324]),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 100),
        "logit_bias": st.dictionaries(st.integers(0, 259).map(str), st.floats(-100, 100), max_size=3),
        "min_tokens": st.integers(0, 2),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, 259), max_size=3),
        "prompt_logprobs": st.integers(0, 20),
    },
)


@given(SAMPLING)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_sampling_that_is_allowed_is_answered(client: TestClient, neighbour: None, change: JsonObject) -> None:
    response = client.post(CHAT, json=of_path(CHAT) | change)
    assert response.status_code == 200, response.text


@given(
    st.sampled_from([CHAT, COMPLETIONS]),
    st.dictionaries(FIELDS, JSON | MESSAGES, max_size=4),
    st.binary(max_size=20),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_request_can_make_the_server_fail(
    client: TestClient, neighbour: None, path: str, change: JsonObject, junk: bytes
) -> None:
    valid = of_path(path)
    for raw in (json.dumps(valid | change).encode(), json.dumps(change).encode(), junk):
        response = client.post(path, content=raw)
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            check_error(response.json())


def test_acceptance_comes_under_vllms_names_and_llama_cpps_field_is_read(client: TestClient) -> None:
    body = {"model": "target", "prompt": "Once", "max_tokens": 40, "temperature": 0}
    answer = ask(client, COMPLETIONS, body | {"speculative.n_max": 3})
    assert answer["usage"]["block_size"] == 4
    found, num_steps = answer["metrics"]["speculative_decoding"], answer["usage"]["num_steps"]
    histogram = found["acceptance_histogram"]
    num_accepted = sum(length * num for length, num in enumerate(histogram))
    assert sum(histogram) == num_steps
    assert found["mean_acceptance_length"] == pytest.approx(1 + num_accepted / num_steps)
    assert found["draft_acceptance_rate"] == pytest.approx(num_accepted / found["num_draft_tokens"])
    assert "metrics" not in ask(client, COMPLETIONS, body | {"speculative.n_max": 0})
    refused = client.post(COMPLETIONS, json=body | {"speculative.n_max": 3, "block_size": 4})
    assert refused.status_code == 400
    assert "speculative.n_max" in refused.json()["error"]["message"]
