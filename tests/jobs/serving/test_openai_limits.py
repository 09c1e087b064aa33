"""API keys, size limits, models by name, steps in a stream, and the log of answers."""

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from blockpilot.pairs.loading import Pair
from helpers.api import (
    CHAT,
    COMPLETIONS,
    QUESTION,
    HttpCall,
    JsonObject,
    app_of,
    ask,
    check_error,
    client_of,
    events,
    replica_of,
    text_of,
)
from helpers.patience import patient
from jobs.serve import LOOPBACK_NAMES
from jobs.serving.api import Exchange, Limits, make_app
from jobs.serving.clients import ApiKeys
from jobs.serving.fields import ApiError
from jobs.serving.replica import Replica
from jobs.serving.schema import Body, ChatRequest, Objects, parse

SHORT = {"model": "target", "prompt": "Once", "max_tokens": 20, "temperature": 0}


@pytest.fixture
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    with replica_of(tiny_pair, num_slots=2, max_length=300, max_queue=2) as replica:
        yield replica


# --- keys ---


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (None, "an API key is needed"),
        ("Bearer", "an API key is needed"),
        ("Bearer ", "an API key is needed"),
        ("Bearer first-ke", "unknown API key"),
        ("Bearer first-key2", "unknown API key"),
        ("Bearer FIRST-KEY", "unknown API key"),
        ("Basic first-key", "unknown API key"),
        ("first-key", "an API key is needed"),
        ("Bearer \xe9\xff", "unknown API key"),
    ],
)
def test_without_one_of_the_keys_nothing_is_answered(replica: Replica, header: str | None, complaint: str) -> None:
    with client_of(replica, keys=ApiKeys.of(("first-key", "second-key"))) as client:
        headers = {} if header is None else {"Authorization": header.encode("latin-1")}
        for response in (
            client.post(COMPLETIONS, json=SHORT, headers=headers),
            client.post(CHAT, content=b"{", headers=headers),
            client.get("/v1/models", headers=headers),
            client.get("/v1/models/target", headers=headers),
        ):
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            error = check_error(response.json())
            assert (error["code"], complaint in error["message"]) == ("invalid_api_key", True)


def test_each_key_opens_and_health_and_the_page_need_none(replica: Replica) -> None:
    with client_of(replica, keys=ApiKeys.of(("first-key", "second-key"))) as client:
        for header in ("Bearer first-key", "bearer second-key"):
            response = client.post(COMPLETIONS, json=SHORT, headers={"Authorization": header})
            assert response.status_code == 200
        assert client.get("/health").json() == {"status": "ok"}
        told = client.get("/health", headers={"Authorization": "Bearer first-key"}).json()
        assert list(told) == ["status", "models"]
        assert client.get("/").status_code == 200


def test_keys_are_kept_as_digests_only() -> None:
    assert "first-key" not in repr(ApiKeys.of(("first-key",)))


# --- pages of other sites ---


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_what_a_form_of_another_site_can_send_is_refused(content_type: str, replica: Replica) -> None:
    with client_of(replica) as client:
        refused = client.post(COMPLETIONS, json=SHORT, headers={"Content-Type": content_type})
        assert refused.status_code == 415
        assert check_error(refused.json())["code"] == "unsupported_media_type"
        headers = {"Content-Type": "Application/JSON; charset=utf-8"}
        assert client.post(COMPLETIONS, json=SHORT, headers=headers).status_code == 200


def test_another_name_for_loopback_is_refused(replica: Replica) -> None:
    """A page whose name was rebound to 127.0.0.1 sends its own name."""
    with client_of(replica, hosts=LOOPBACK_NAMES) as client:
        for host, status in (("evil.example", 400), ("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:8000", 200)):
            for response in (
                client.post(COMPLETIONS, json=SHORT, headers={"Host": host}),
                client.get("/health", headers={"Host": host}),
            ):
                assert response.status_code == status


# --- bodies that do not come ---


def test_bodies_that_do_not_arrive_hold_nothing_up(replica: Replica) -> None:
    """Beyond the limit requests are refused at once, /health is answered, and after a while all is as before."""
    exchanges = list[Exchange]()
    late_s = patient(0.5)
    limits = Limits(body_timeout_s=late_s, max_requests=3)
    app = app_of(replica, limits=limits, on_exchange=exchanges.append)

    async def scene() -> None:
        stuck = [HttpCall(app, COMPLETIONS, None) for _ in range(3)]
        await asyncio.sleep(0.05)
        async with asyncio.timeout(0.6 * late_s):
            refused, health = HttpCall(app, COMPLETIONS, SHORT), HttpCall(app, "/health", {}, method="GET")
            await asyncio.gather(refused.task, health.task)
        assert (refused.status, health.status) == (429, 200)
        await asyncio.gather(*(call.task for call in stuck))
        assert [call.status for call in stuck] == [408] * 3
        assert f"within {late_s:g} s" in check_error(json.loads(stuck[0].text))["message"]
        again = HttpCall(app, COMPLETIONS, SHORT)
        await again.task
        assert again.status == 200

    asyncio.run(scene())
    assert sorted(exchange.status for exchange in exchanges) == [200, 408, 408, 408, 429]


# --- sizes ---

MANY = {f"f{i}": 1 for i in range(5000)}
MESSAGE = {"role": "user", "content": ""}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"messages": [{}] * 5000}, "messages.0.role: this field is required"),
        ({"messages": [1] * 5000}, "messages.0: Input should be an object"),
        ({"messages": [MANY]}, "messages.0: 5000 fields; at most 64 are read"),
        ({"messages": [MESSAGE] * 5000}, "messages: List should have at most 4096 items"),
        ({"messages": [MESSAGE], "stop": [1] * 5000}, "stop.0: Input should be a valid string"),
        ({"messages": [MESSAGE], "stream_options": MANY}, "stream_options: 5000 fields; at most 64 are read"),
        ({"messages": [MESSAGE]} | MANY, "request body: 5002 fields; at most 64 are read"),
    ],
)
def test_a_body_full_of_errors_costs_one(change: JsonObject, complaint: str) -> None:
    """All errors of 1 MiB of them took seconds of the gateway's event loop, and hundreds of MiB."""
    raw = json.dumps({"model": "target"} | change).encode()
    with pytest.raises(ValidationError) as found:
        ChatRequest.model_validate_json(raw)
    assert found.value.error_count() <= 2  # a message has two fields
    with pytest.raises(ApiError) as error:
        parse(ChatRequest, raw)
    assert str(error.value).startswith(complaint)
    assert len(str(error.value)) < 250


def test_a_body_beyond_the_limit_is_refused(replica: Replica) -> None:
    with client_of(replica, limits=Limits(max_body_bytes=200)) as client:
        for content in (b"x" * 201, (part for part in [b"x" * 150, b"x" * 100])):
            response = client.post(COMPLETIONS, content=content)
            assert response.status_code == 413
            assert "200 bytes" in check_error(response.json())["message"]
        exact = b'{"model": "target", "prompt": "Once", "max_tokens": 1}'.ljust(200)
        assert client.post(COMPLETIONS, content=exact).status_code == 200


def test_max_new_tokens_limits_answers(tiny_pair: Pair) -> None:
    with replica_of(tiny_pair, max_length=300, max_new_tokens=30) as replica, client_of(replica) as client:
        assert client.get("/v1/models/target").json()["max_completion_tokens"] == 30
        refused = client.post(CHAT, json={"model": "target", "messages": QUESTION, "max_tokens": 31})
        assert refused.status_code == 400
        error = check_error(refused.json(), "max_tokens")
        assert all(number in error["message"] for number in ("31", "30"))
        answer = ask(client, CHAT, {"model": "target", "messages": QUESTION, "temperature": 0})
        assert answer["usage"]["completion_tokens"] == 30


# --- models ---


class Elsewhere:
    """A model that cannot be reached."""

    async def answer(self, body: Body, client: str) -> Objects:
        yield ApiError(503, "the replica with this request was lost", code="replica_lost")

    async def status(self) -> JsonObject:
        raise ApiError(503, "nobody there")


def test_models_are_asked_for_by_name_and_one_that_is_lost_does_not_take_the_others_along(replica: Replica) -> None:
    app = make_app({"here": replica, "there/model": Elsewhere()}, aliases={"model": "there/model"})
    with TestClient(app) as client:
        assert ask(client, COMPLETIONS, SHORT | {"model": "here"})["usage"]["completion_tokens"] == 20
        for name in ("there/model", "model"):
            for stream in (False, True):
                lost = client.post(COMPLETIONS, json=SHORT | {"model": name, "stream": stream})
                assert lost.status_code == 503
                assert lost.headers["retry-after"] == "1"
                assert check_error(lost.json())["type"] == "server_error"
        unknown = client.post(COMPLETIONS, json=SHORT | {"model": "nowhere"})
        assert unknown.status_code == 404
        message = check_error(unknown.json(), "model")["message"]
        assert "'here'" in message
        assert "'there/model'" in message
        listed = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["here", "there/model"]
        assert [model.get("max_model_len") for model in listed] == [300, None]
        health = client.get("/health")
        assert health.status_code == 503
        found = health.json()
        assert (found["status"], found["models"]["here"]["status"]) == ("failed", "ok")
        assert found["models"]["there/model"]["status"] == "nobody there"


# --- steps ---


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stops", [False, True])
def test_a_stream_can_show_its_steps(replica: Replica, path: str, stops: bool) -> None:
    prompt = {"messages": QUESTION} if path == CHAT else {"prompt": "Once"}
    body = {"model": "target", "max_tokens": 40, "temperature": 0, "block_size": 4, **prompt}
    with client_of(replica) as client:
        if stops:
            body["stop"] = text_of(ask(client, path, body))[15:18]
        whole = ask(client, path, body)
        options = {"include_steps": True, "include_usage": True}
        *chunks, usage = events(client.post(path, json=body | {"stream": True, "stream_options": options}).text)
        plain = events(client.post(path, json=body | {"stream": True}).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    steps = [choice["step"] for choice in choices if "step" in choice]
    assert [step["block_size"] for step in steps][:2] == [0, 4]
    assert len(steps) == usage["usage"]["num_steps"] + 1
    assert all(step["num_accepted"] <= len(step["texts"]) <= step["num_accepted"] + 1 for step in steps)
    assert all(len(step["drafted"]) == max(step["block_size"] - 1, 0) for step in steps)
    assert all(step["parents"] == list(range(len(step["drafted"]))) for step in steps)
    assert all(step["path"] == list(range(1, step["num_accepted"] + 1)) for step in steps)
    shown = "".join(choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in choices)
    assert shown == text_of(whole)
    for choice in choices:
        if "step" in choice:
            assert "".join(choice["step"]["texts"]) == (
                choice["delta"]["content"] if path == CHAT else choice["text"]
            )
    assert not any("step" in choice for chunk in plain for choice in chunk["choices"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_sends_what_comes_within_its_interval_together(
    tiny_pair: Pair, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own, or that of a server which many ask."""
    prompt = {"messages": QUESTION} if path == CHAT else {"prompt": "Once"}
    body = {"model": "target", "max_tokens": 40, "temperature": 0, "block_size": 2, **prompt}
    body["logprobs"] = True if path == CHAT else 0
    rest = {"stream": True, "stream_options": {"include_usage": True}}
    texts, num_chunks, usages = [], [], []
    for interval_s, most_chunks in ((0.0, 100.0), (3600.0, 100.0), (0.001, 1e-4)):
        monkeypatch.setattr("jobs.serving.replica.MOST_CHUNKS", most_chunks)
        settings = {"max_length": 300, "stream_interval_s": interval_s}
        with replica_of(tiny_pair, **settings) as replica, client_of(replica) as client:
            *chunks, last = events(client.post(path, json=body | rest).text)
        choices = [chunk["choices"][0] for chunk in chunks]
        texts.append("".join(c["delta"].get("content", "") if path == CHAT else c["text"] for c in choices))
        found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        tokens = [token for each in found for token in each["content" if path == CHAT else "tokens"]]
        assert len(tokens) == last["usage"]["completion_tokens"] == 40
        num_chunks.append(len(chunks))
        usages.append(last["usage"])
    assert texts[0] == texts[1] == texts[2]
    assert usages[0] == usages[1] == usages[2]
    # The first token, the others, half a character, the end.
    assert num_chunks[1] == num_chunks[2] <= 4 < usages[1]["num_steps"] < num_chunks[0]


# --- what is kept of requests ---


@pytest.mark.parametrize("logs_prompts", [False, True])
def test_what_is_logged_has_ids_and_counts_but_no_text_unless_asked(
    tiny_pair: Pair, caplog: pytest.LogCaptureFixture, logs_prompts: bool
) -> None:
    with (
        caplog.at_level(logging.INFO, "ray.serve.blockpilot"),
        replica_of(tiny_pair, max_length=300, logs_prompts=logs_prompts) as replica,
        client_of(replica) as client,
    ):
        answer = ask(client, CHAT, {"model": "target", "messages": [{"role": "user", "content": "secret"}]})
        events(client.post(COMPLETIONS, json=SHORT | {"stream": True, "n": 2}).text)
        assert client.post(COMPLETIONS, json=SHORT | {"prompt": "secret", "max_tokens": 0}).status_code == 400
    first, second = (vars(record) for record in caplog.records if record.message == "answered")
    assert first["response_id"] == answer["id"]
    assert first["num_tokens"] == answer["usage"]["completion_tokens"]
    assert (second["num_choices"], second["outcome"], second["endpoint"]) == (2, "finished", COMPLETIONS)
    assert 0 < second["first_token_s"] <= second["seconds"]
    assert ("secret" in repr([vars(record) for record in caplog.records])) is logs_prompts


def test_the_playground_loads_nothing_from_other_hosts(replica: Replica) -> None:
    with client_of(replica) as client:
        page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    for outside in ("http://", "https://", "//cdn", "innerHTML"):
        assert outside not in page.text
