"""API keys, size limits, models by name, intervals of a stream, and the log of answers."""

import logging
from collections import Counter

import pytest

from blockpilot.pairs.loading import Pair
from helpers.api import ApiClient, client_of, served
from helpers.bodies import CHAT, COMPLETIONS, PROMPTS, QUESTION, JsonObject, check_error, events, shown
from jobs.serving.api import Exchange, Limits, make_app
from jobs.serving.clients import ApiKeys
from jobs.serving.fields import ApiError
from jobs.serving.replica import Replica
from jobs.serving.schema import Body, Objects

SHORT: JsonObject = {"model": "target", "prompt": "Once", "max_tokens": 20, "temperature": 0}
KEYS = ApiKeys.of(("first-key", "second-key"))


# --- keys, and pages of other sites ---


def test_without_one_of_the_keys_nothing_is_answered(replica: Replica) -> None:
    unknown = ("Bearer first-ke", "Bearer first-key2", "Bearer FIRST-KEY", "Basic first-key", "Bearer \xe9\xff")
    missing = dict.fromkeys((None, "Bearer ", "first-key"), "an API key is needed")
    exchanges = list[Exchange]()
    with client_of(replica, keys=KEYS, on_exchange=exchanges.append) as client:
        for header, complaint in (missing | dict.fromkeys(unknown, "unknown API key")).items():
            headers = {} if header is None else {"Authorization": header.encode("latin-1")}
            for response in (
                client.post(COMPLETIONS, json=SHORT, headers=headers),
                client.post(CHAT, content=b"{", headers=headers),
                *(client.get(path, headers=headers) for path in ("/v1/models", "/v1/models/target")),
            ):
                assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
                error = check_error(response.json())
                assert (error["code"], complaint in error["message"]) == ("invalid_api_key", True)
    assert {(exchange.status, exchange.code) for exchange in exchanges} == {(401, "invalid_api_key")}
    paths = Counter(exchange.path for exchange in exchanges)
    assert paths == dict.fromkeys(
        (COMPLETIONS, CHAT, "/v1/models", "/v1/models/{name:path}"), len(missing) + len(unknown)
    )


def test_each_key_opens_and_health_and_the_page_need_none(replica: Replica) -> None:
    assert "first-key" not in repr(KEYS)
    with client_of(replica, keys=KEYS) as client:
        for header in ("Bearer first-key", "bearer second-key"):
            response = client.post(COMPLETIONS, json=SHORT, headers={"Authorization": header})
            assert response.status_code == 200
        assert client.get("/health").json() == {"status": "ok"}
        health = client.get("/health", headers={"Authorization": "Bearer first-key"}).json()
        assert list(health) == ["status", "models"]
        page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    for outside in ("http://", "https://", "//cdn", "innerHTML"):
        assert outside not in page.text


def test_what_a_form_of_another_site_can_send_is_refused(client: ApiClient) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"):
        refused = client.post(COMPLETIONS, json=SHORT, headers={"Content-Type": content_type})
        assert refused.status_code == 415
        assert check_error(refused.json())["code"] == "unsupported_media_type"
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post(COMPLETIONS, json=SHORT, headers=headers).status_code == 200


# --- sizes ---


def test_a_body_beyond_the_limit_is_refused(replica: Replica) -> None:
    with client_of(replica, limits=Limits(max_body_bytes=200)) as client:
        for content in (b"x" * 201, (part for part in [b"x" * 150, b"x" * 100])):
            response = client.post(COMPLETIONS, content=content)
            assert response.status_code == 413
            assert "200 bytes" in check_error(response.json())["message"]
        exact = b'{"model": "target", "prompt": "Once", "max_tokens": 1}'.ljust(200)
        assert client.post(COMPLETIONS, content=exact).status_code == 200


def test_max_new_tokens_limits_answers(tiny_pair: Pair) -> None:
    body = {"messages": QUESTION, "temperature": 0}
    with served(tiny_pair, max_length=300, max_new_tokens=30) as client:
        assert client.get("/v1/models/target").json()["max_completion_tokens"] == 30
        error = client.refusal(CHAT, body | {"max_tokens": 31}, "max_tokens")
        assert all(number in error["message"] for number in ("31", "30"))
        assert client.ask(CHAT, body)["usage"]["completion_tokens"] == 30


# --- models ---


class Unreachable:
    """A model whose replicas are lost."""

    async def answer(self, body: Body, client: str) -> Objects:
        yield ApiError(503, "the replica with this request was lost", code="replica_lost")

    async def status(self) -> JsonObject:
        raise ApiError(503, "nobody there")


def test_models_are_asked_for_by_name_and_one_that_is_lost_does_not_take_the_others_along(replica: Replica) -> None:
    app = make_app({"here": replica, "there/model": Unreachable()}, aliases={"model": "there/model"})
    with ApiClient(app) as client:
        assert client.ask(COMPLETIONS, SHORT | {"model": "here"})["usage"]["completion_tokens"] == 20
        for name in ("there/model", "model"):
            for stream in (False, True):
                lost = client.post(COMPLETIONS, json=SHORT | {"model": name, "stream": stream})
                assert (lost.status_code, lost.headers["retry-after"]) == (503, "1")
                assert check_error(lost.json())["type"] == "server_error"
        message = client.refusal(COMPLETIONS, SHORT | {"model": "nowhere"}, "model", status=404)["message"]
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
def test_a_stream_sends_what_comes_within_its_interval_together(
    tiny_pair: Pair, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks merged within the configured interval, or within that of a server with many requests."""
    body = {"max_tokens": 40, "temperature": 0, "block_size": 2, **PROMPTS[path]}
    body["logprobs"], field = (True, "content") if path == CHAT else (0, "tokens")
    answers, num_chunks = [], []
    for interval_s, most_chunks in ((0.0, 100.0), (3600.0, 100.0), (0.001, 1e-4)):
        monkeypatch.setattr("jobs.serving.replica.MOST_CHUNKS", most_chunks)
        with served(tiny_pair, max_length=300, stream_interval_s=interval_s) as client:
            choices, usage = client.streamed(path, body)
        num_scored = sum(len(choice["logprobs"][field]) for choice in choices if choice["logprobs"])
        assert num_scored == usage["completion_tokens"] == 40
        answers.append((shown(choices), usage))
        num_chunks.append(len(choices))
    assert answers[0] == answers[1] == answers[2]
    # The first token, the others, half a character, the end.
    assert num_chunks[1] == num_chunks[2] <= 4 < usage["num_steps"] < num_chunks[0]


def test_a_stream_has_no_end_of_line_within_an_event(client: ApiClient) -> None:
    """Ends of lines of Unicode, at which clients of Python's splitlines would cut an event."""
    text = "a\u2028b\u2029c\x85d"
    body = {"messages": QUESTION, "max_tokens": 40, "stream": True, "structured_outputs": {"choice": [text]}}
    stream = client.send_body(CHAT, body).text
    assert {line[:6] for line in stream.splitlines() if line} == {"data: "}
    assert shown([chunk["choices"][0] for chunk in events(stream)]) == text


# --- the log of answers ---


@pytest.mark.parametrize("logs_prompts", [False, True])
def test_what_is_logged_has_ids_and_counts_but_no_text_unless_asked(
    tiny_pair: Pair, caplog: pytest.LogCaptureFixture, logs_prompts: bool
) -> None:
    with (
        caplog.at_level(logging.INFO, "ray.serve.blockpilot"),
        served(tiny_pair, max_length=300, logs_prompts=logs_prompts) as client,
    ):
        answer = client.ask(CHAT, {"messages": [{"role": "user", "content": "secret"}]})
        client.streamed(COMPLETIONS, SHORT | {"n": 2})
        client.refusal(COMPLETIONS, SHORT | {"prompt": "secret", "max_tokens": 0})
    first, second = (vars(record) for record in caplog.records if record.message == "answered")
    assert first["response_id"] == answer["id"]
    assert first["num_tokens"] == answer["usage"]["completion_tokens"]
    assert (second["num_choices"], second["outcome"], second["endpoint"]) == (2, "finished", COMPLETIONS)
    assert 0 < second["first_token_s"] <= second["seconds"]
    assert ("secret" in repr([vars(record) for record in caplog.records])) is logs_prompts
