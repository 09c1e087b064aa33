"""Bad input over the OpenAI API: errors that name the field, values that change nothing, and any JSON at all."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from helpers.api import ApiClient, neighbour
from helpers.bodies import CHAT, COMPLETIONS, PROMPTS, QUESTION, JsonObject, check_error
from jobs.serving.fields import NEUTRAL, ApiError
from jobs.serving.schema import ChatRequest, CompletionRequest, parse

MAX_LENGTH = 300
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

# A field of a chat request, values that are refused, and the error's `param` if it is not the name of the field.
BAD_CHAT_FIELDS: list[tuple[str, list[object], str]] = [
    ("model", [None, 5], ""),
    ("messages", [None, [], "hello", [{"role": "user", "content": "x" * MAX_LENGTH}]], ""),
    ("messages", [[{"role": "tool", "content": "x"}]], "messages.0"),
    ("messages", [[{"role": "critic", "name": "f", "content": "x"}]], "messages.0.role"),
    ("messages", [[{"role": "function", "name": "f", "content": "x"}]], "messages.0.role"),
    ("messages", [[{"role": "assistant", "function_call": {"name": "f"}}]], "messages.0.function_call"),
    ("messages", [[{"role": "user", "content": "x", "tool_calls": [CALL]}]], "messages.0"),
    ("messages", [[{"role": "user"}], [{"role": "user", "content": [{"type": "image_url"}]}]], "messages.0.content"),
    ("prompt", ["x"], ""),
    ("max_tokens", [0, MAX_LENGTH, 10**30, "5", 1.5], ""),
    ("max_completion_tokens", [True], ""),
    ("min_tokens", [-1, 300], ""),
    ("temperature", [-0.1, 2.1, "1"], ""),
    ("top_p", [0, 1.01], ""),
    ("top_k", [-2], ""),
    ("min_p", [-0.1, 1.1], ""),
    ("frequency_penalty", [2.1], ""),
    ("presence_penalty", [-2.1, "high"], ""),
    ("repetition_penalty", [0, 101], ""),
    ("logit_bias", [{"5": 101}, {"5": True}, {"a": 1}, {"-1": 1}, {"260": 1}, {"9" * 4000: 1}, [5]], ""),
    ("logit_bias", [dict.fromkeys(map(str, range(1025)), 1)], ""),
    ("seed", [2**63, -(2**63) - 1, 1.5], ""),
    ("stop", [["a"] * 17], ""),
    ("stop", ["x" * 4097, [""], [1]], "stop.0"),
    ("stop_token_ids", [[5, 260], [-1]], ""),
    ("stop_token_ids", [[5, "a"]], "stop_token_ids.1"),
    ("ignore_eos", ["yes", 2], ""),
    ("block_size", [0, 33, "fast", True], ""),
    ("layout", ["star"], ""),
    ("lookup", ["auto", 2, 0.5, []], ""),
    ("stream", ["yes"], ""),
    ("stream_options", [{"include_obfuscation": True}], "stream_options.include_obfuscation"),
    ("n", [0, 9, True], ""),
    ("best_of", [2], ""),
    ("top_logprobs", [2], ""),  # without logprobs
    ("prompt_logprobs", [21], ""),
    ("metadata", [{"a": 1}, "a"], ""),
    ("prompt_cache_key", [1], ""),
    ("cache_salt", ["x" * 257], ""),
    ("chat_template_kwargs", [{"messages": []}, "thinking"], ""),
    ("continue_final_message", [True], ""),
    ("reasoning_effort", ["high"], ""),
    ("response_format", [{"type": "json_schema"}], ""),
    ("structured_outputs", [{"json": 5}], "structured_outputs.json"),
    ("tool_choice", ["sometimes", 5, []], ""),
    ("tool_choice", [{"type": "function"}], "tool_choice.function"),
    ("tool_choice", [{"type": "function", "function": {}}], "tool_choice.function.name"),
    *((name, [7], "") for name in NEUTRAL),
]
BAD_COMBINATIONS: list[tuple[str, JsonObject, str]] = [
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"min_tokens": 21, "max_tokens": 20}, "min_tokens"),
    (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {"speculative.n_max": 3, "block_size": 4}, "speculative.n_max"),
    (COMPLETIONS, {"best_of": 3, "n": 2}, "best_of"),
    (COMPLETIONS, {"echo": "yes"}, "echo"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"logprobs": 6}, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (COMPLETIONS, {"top_logprobs": 1}, "top_logprobs"),
]


SHORT: dict[str, JsonObject] = {path: {"model": "target", "max_tokens": 2} | PROMPTS[path] for path in PROMPTS}


@pytest.mark.parametrize(("name", "values", "param"), BAD_CHAT_FIELDS, ids=lambda part: str(part)[:40])
def test_bad_chat_fields_are_refused_by_name(client: ApiClient, name: str, values: list[object], param: str) -> None:
    for value in values:
        client.refusal(CHAT, PROMPTS[CHAT] | {name: value}, param or name)


def test_fields_that_do_not_go_together_are_refused(client: ApiClient) -> None:
    for path, change, param in BAD_COMBINATIONS:
        client.refusal(path, PROMPTS[path] | change, param)


def test_errors_say_what_is_allowed(client: ApiClient) -> None:
    body = {"prompt": [65] * 290, "max_tokens": 11}
    message = client.refusal(COMPLETIONS, body, "max_tokens")["message"]
    assert all(number in message for number in ("300", "290", "11"))
    assert client.ask(COMPLETIONS, body | {"max_tokens": 10})["usage"]["total_tokens"] <= 300
    for name, value, allowed in (
        ("layout", "star", "'auto', 'chain' or 'tree'"),
        ("lookup", "auto", "valid boolean"),
        ("presence_penalty", 3, "less than or equal to 2"),
        ("store", True, "false"),
        ("tool_choice", "sometimes", '"none", "auto", "required", or an object that names a function'),
    ):
        assert allowed in client.refusal(CHAT, SHORT[CHAT] | {name: value}, name)["message"]
    unknown = client.refusal(CHAT, SHORT[CHAT] | {"model": "gpt-9"}, "model", status=404)
    assert "gpt-9" in unknown["message"]


def test_values_that_change_nothing_are_taken(client: ApiClient) -> None:
    body = {"messages": QUESTION, "max_tokens": 8, "seed": 1}
    unchanged = client.ask(CHAT, body)["choices"]
    neutral_fields = [{name: value} for name, values in NEUTRAL.items() for value in (*values, None)]
    for change in (*neutral_fields, *NEUTRAL_HERE):
        assert client.ask(CHAT, body | change)["choices"] == unchanged


NEUTRAL_HERE: list[JsonObject] = [
    {"unknown": None, "stop": None, "user": None},
    {"user": "me", "prompt_cache_key": "key", "safety_identifier": "me", "request_id": "1"},
    {"metadata": {}},
    {"metadata": {"team": "a", "run": "7"}},
    {"reasoning_effort": "none", "chat_template_kwargs": {}},
    {"chat_template_kwargs": {"enable_thinking": False, "unread": [1, {"a": None}]}},
    {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False},
    {"response_format": {"type": "text"}, "tool_choice": "auto", "parallel_tool_calls": False},
    {"best_of": 1, "n": 1.0, "stream": 0, "logprobs": 0, "top_logprobs": 0, "ignore_eos": 0},
    {"max_tokens": 8.0, "seed": 1.0, "top_k": 0.0, "min_tokens": 0.0},
    {"top_k": -1, "min_p": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "stop_token_ids": []},
    {"temperature": 1, "top_p": 1, "frequency_penalty": 0.0},
]


def test_bad_prompts_are_refused(client: ApiClient) -> None:
    empty = ["", [], [""], [[]], ["a", ""]]
    mixed = [["a", 1], [1, "a"], ["a", ["b"]], [[1], ["a"]], [True], [[True]], 5, {}]
    unknown = [[260], [-1], [[1], [260]], [2**70]]
    too_long = ["x" * 300, ["a", "x" * 300], [1] * 285]
    for prompt in empty + mixed + unknown + too_long:
        param = client.refusal(COMPLETIONS, {"prompt": prompt})["param"]
        assert param in ("prompt", "max_tokens") or param.startswith("prompt."), prompt


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bodies_that_are_no_json_object(client: ApiClient, path: str) -> None:
    numbers = [f'{{"{value}, "model": "target", "prompt": "x"}}' for value in ('temperature": NaN', 'seed": 1e999')]
    numbers.append('{"seed": ' + "9" * 5000 + "}")
    texts = [b"\xff\xfe{}", b'{"model": "\xc3\x28"}', b'{"model": "\\ud800"}']
    for raw in [b"", b"{", b"null", b"[]", b"model=target", b"[" * 10**5, b'{"a":' * 50_000, *numbers, *texts]:
        response = client.post(path, content=raw)
        assert response.status_code == 400, raw[:20]
        check_error(response.json())


def test_routes_and_methods_that_are_not_there(client: ApiClient) -> None:
    missing = (("GET", "/v1/embeddings", 404), ("POST", f"{CHAT}/", 404), ("GET", CHAT, 405), ("POST", "/", 405))
    for method, path, status in missing:
        response = client.request(method, path)
        assert response.status_code == status
        assert path in check_error(response.json())["message"]
    assert client.get(CHAT).headers["allow"] == "POST"


MANY_FIELDS = {f"f{i}": 1 for i in range(5000)}
MESSAGE = {"role": "user", "content": ""}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"messages": [{}] * 5000}, "messages.0.role: this field is required"),
        ({"messages": [1] * 5000}, "messages.0: Input should be an object"),
        ({"messages": [MANY_FIELDS]}, "messages.0: 5000 fields; at most 64 are read"),
        ({"messages": [MESSAGE] * 5000}, "messages: List should have at most 4096 items"),
        ({"messages": [MESSAGE], "stop": [1] * 5000}, "stop.0: Input should be a valid string"),
        ({"messages": [MESSAGE], "stream_options": MANY_FIELDS}, "stream_options: 5000 fields; at most 64 are read"),
        ({"messages": [MESSAGE]} | MANY_FIELDS, "request body: 5002 fields; at most 64 are read"),
    ],
)
def test_a_body_full_of_errors_costs_one(change: JsonObject, complaint: str) -> None:
    """First error only: all errors of a 1 MiB body took seconds of the gateway's event loop and hundreds of MiB."""
    raw = json.dumps({"model": "target"} | change).encode()
    with pytest.raises(ValidationError) as validation:
        ChatRequest.model_validate_json(raw)
    assert validation.value.error_count() <= 2  # a message has two fields
    with pytest.raises(ApiError) as error:
        parse(ChatRequest, raw)
    assert str(error.value).startswith(complaint)
    assert len(str(error.value)) < 250


# --- any JSON, next to another client's requests ---

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KINDS = (ChatRequest, CompletionRequest)
NAMES = {field.alias or name for kind in KINDS for name, field in kind.model_fields.items()} - {"timeout_s"}
FIELDS = st.sampled_from([*sorted(NAMES), "\ud7ff", "🙂"])
MESSAGES = st.lists(
    st.fixed_dictionaries({}, optional={"role": JSON | st.just("user"), "content": JSON, "name": JSON}),
    max_size=2,
)
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


@pytest.fixture
def beside(client: ApiClient) -> Iterator[None]:
    with neighbour(client, {"prompt": "Once", "max_tokens": 60, "seed": 3}):
        yield


@given(SAMPLING)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_sampling_that_is_allowed_is_answered(client: ApiClient, beside: None, change: JsonObject) -> None:
    response = client.post(CHAT, json=SHORT[CHAT] | change)
    assert response.status_code == 200, response.text


@given(
    st.sampled_from([CHAT, COMPLETIONS]),
    st.dictionaries(FIELDS, JSON | MESSAGES, max_size=4),
    st.binary(max_size=20),
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_request_can_make_the_server_fail(
    client: ApiClient, beside: None, path: str, change: JsonObject, junk: bytes
) -> None:
    for raw in (json.dumps(SHORT[path] | change).encode(), json.dumps(change).encode(), junk):
        response = client.post(path, content=raw)
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            check_error(response.json())
