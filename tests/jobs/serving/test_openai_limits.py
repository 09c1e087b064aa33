"""API keys, size limits, models by name, steps in a stream, and the log of answers."""

import logging

import pytest
from fastapi.testclient import TestClient

from blockpilot.pairs.loading import Pair
from helpers.api import (
    CHAT,
    COMPLETIONS,
    PROMPTS,
    QUESTION,
    JsonObject,
    Send,
    app_of,
    ask,
    check_error,
    client_of,
    events,
    finish,
    replica_of,
    shown,
    streamed,
    text_of,
    until,
)
from helpers.patience import patient
from jobs.serve import LOOPBACK_NAMES
from jobs.serving.api import Exchange, Limits, make_app
from jobs.serving.clients import ApiKeys
from jobs.serving.fields import ApiError
from jobs.serving.replica import Replica
from jobs.serving.schema import Body, Objects

SHORT = {"model": "target", "prompt": "Once", "max_tokens": 20, "temperature": 0}
KEYS = ApiKeys.of(("first-key", "second-key"))


# --- keys, and pages of other sites ---


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (None, "an API key is needed"),
        ("Bearer ", "an API key is needed"),
        ("first-key", "an API key is needed"),
        ("Bearer first-ke", "unknown API key"),
        ("Bearer first-key2", "unknown API key"),
        ("Bearer FIRST-KEY", "unknown API key"),
        ("Basic first-key", "unknown API key"),
        ("Bearer \xe9\xff", "unknown API key"),
    ],
)
def test_without_one_of_the_keys_nothing_is_answered(replica: Replica, header: str | None, complaint: str) -> None:
    with client_of(replica, keys=KEYS) as client:
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
    assert "first-key" not in repr(KEYS)
    with client_of(replica, keys=KEYS) as client:
        for header in ("Bearer first-key", "bearer second-key"):
            response = client.post(COMPLETIONS, json=SHORT, headers={"Authorization": header})
            assert response.status_code == 200
        assert client.get("/health").json() == {"status": "ok"}
        told = client.get("/health", headers={"Authorization": "Bearer first-key"}).json()
        assert list(told) == ["status", "models"]
        page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    for outside in ("http://", "https://", "//cdn", "innerHTML"):
        assert outside not in page.text


def test_what_a_form_of_another_site_can_send_is_refused(client: TestClient) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"):
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


# --- bodies that do not come, and sizes ---


def test_bodies_that_do_not_arrive_hold_nothing_up(replica: Replica, send: Send) -> None:
    """Beyond the limit requests are refused at once, /health is answered, and after a while all is as before."""
    exchanges = list[Exchange]()
    late_s = patient(0.5)
    limits = Limits(body_timeout_s=late_s, max_requests=3)
    app = app_of(replica, limits=limits, on_exchange=exchanges.append)
    stuck = [send(app, None) for _ in range(3)]
    until(lambda: app.state.api.num_open == 3)
    assert send(app, SHORT).finish().status == 429
    assert send(app, {}, "/health", "GET").finish().status == 200
    assert not any(call.done for call in stuck)
    finish(stuck)
    assert [call.status for call in stuck] == [408] * 3
    assert f"within {late_s:g} s" in stuck[0].text
    assert send(app, SHORT).finish().status == 200
    assert sorted(exchange.status for exchange in exchanges) == [200, 408, 408, 408, 429]


def test_a_body_beyond_the_limit_is_refused(replica: Replica) -> None:
    with client_of(replica, limits=Limits(max_body_bytes=200)) as client:
        for content in (b"x" * 201, (part for part in [b"x" * 150, b"x" * 100])):
            response = client.post(COMPLETIONS, content=content)
            assert response.status_code == 413
            assert "200 bytes" in check_error(response.json())["message"]
        exact = b'{"model": "target", "prompt": "Once", "max_tokens": 1}'.ljust(200)
        assert client.post(COMPLETIONS, content=exact).status_code == 200


def test_max_new_tokens_limits_answers(tiny_pair: Pair) -> None:
    body = {"model": "target", "messages": QUESTION, "temperature": 0}
    with replica_of(tiny_pair, max_length=300, max_new_tokens=30) as replica, client_of(replica) as client:
        assert client.get("/v1/models/target").json()["max_completion_tokens"] == 30
        refused = client.post(CHAT, json=body | {"max_tokens": 31})
        assert refused.status_code == 400
        error = check_error(refused.json(), "max_tokens")
        assert all(number in error["message"] for number in ("31", "30"))
        assert ask(client, CHAT, body)["usage"]["completion_tokens"] == 30


# --- models ---


class Unreachable:
    """A model whose replicas are lost."""

    async def answer(self, body: Body, client: str) -> Objects:
        yield ApiError(503, "the replica with this request was lost", code="replica_lost")

    async def status(self) -> JsonObject:
        raise ApiError(503, "nobody there")


def test_models_are_asked_for_by_name_and_one_that_is_lost_does_not_take_the_others_along(replica: Replica) -> None:
    app = make_app({"here": replica, "there/model": Unreachable()}, aliases={"model": "there/model"})
    with TestClient(app) as client:
        assert ask(client, COMPLETIONS, SHORT | {"model": "here"})["usage"]["completion_tokens"] == 20
        for name in ("there/model", "model"):
            for stream in (False, True):
                lost = client.post(COMPLETIONS, json=SHORT | {"model": name, "stream": stream})
                assert (lost.status_code, lost.headers["retry-after"]) == (503, "1")
                assert check_error(lost.json())["type"] == "server_error"
        unknown = client.post(COMPLETIONS, json=SHORT | {"model": "nowhere"})
        assert unknown.status_code == 404
        message = check_error(unknown.json(), "model")["message"]
        assert all(name in message for name in ("'here'", "'there/model'"))
        models = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["here", "there/model"]
        assert [model.get("max_model_len") for model in models] == [300, None]
        health = client.get("/health")
        statuses = {name: entry["status"] for name, entry in health.json()["models"].items()}
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert statuses == {"here": "ok", "there/model": "nobody there"}


# --- chunks of a stream ---


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stops", [False, True])
def test_a_stream_can_show_its_steps(client: TestClient, path: str, stops: bool) -> None:
    body = {"model": "target", "max_tokens": 40, "temperature": 0, "block_size": 4, **PROMPTS[path]}
    if stops:
        body["stop"] = text_of(ask(client, path, body))[15:18]
    whole = ask(client, path, body)
    choices, usage = streamed(client, path, body, include_steps=True)
    plain, _ = streamed(client, path, body)
    steps = [choice["step"] for choice in choices if "step" in choice]
    assert [step["block_size"] for step in steps][:2] == [0, 4]
    assert len(steps) == usage["num_steps"] + 1
    for step in steps:
        assert step["num_accepted"] <= len(step["texts"]) <= step["num_accepted"] + 1
        assert len(step["drafted"]) == max(step["block_size"] - 1, 0)
        assert step["parents"] == list(range(len(step["drafted"])))
        assert step["path"] == list(range(1, step["num_accepted"] + 1))
    assert shown(choices) == text_of(whole)
    for choice in choices:
        assert "step" not in choice or "".join(choice["step"]["texts"]) == shown([choice])
    assert not any("step" in choice for choice in plain)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_sends_what_comes_within_its_interval_together(
    tiny_pair: Pair, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own interval, or that of a server which many ask."""
    body = {"model": "target", "max_tokens": 40, "temperature": 0, "block_size": 2, **PROMPTS[path]}
    body["logprobs"] = True if path == CHAT else 0
    texts, num_chunks, usages = [], [], []
    for interval_s, most_chunks in ((0.0, 100.0), (3600.0, 100.0), (0.001, 1e-4)):
        monkeypatch.setattr("jobs.serving.replica.MOST_CHUNKS", most_chunks)
        settings = {"max_length": 300, "stream_interval_s": interval_s}
        with replica_of(tiny_pair, **settings) as replica, client_of(replica) as client:
            choices, usage = streamed(client, path, body)
        logprobs = [
            choice["logprobs"]["content" if path == CHAT else "tokens"] for choice in choices if choice["logprobs"]
        ]
        assert sum(map(len, logprobs)) == usage["completion_tokens"] == 40
        texts.append(shown(choices))
        num_chunks.append(len(choices))
        usages.append(usage)
    assert texts[0] == texts[1] == texts[2]
    assert usages[0] == usages[1] == usages[2]
    # The first token, the others, half a character, the end.
    assert num_chunks[1] == num_chunks[2] <= 4 < usages[1]["num_steps"] < num_chunks[0]


# --- the log of answers ---


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
