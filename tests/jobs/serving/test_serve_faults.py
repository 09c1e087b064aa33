"""A server through Ray with three models, and what happens when parts of it are killed, stopped or overrun."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from blockpilot.drafts.dflash_checkpoint import save_draft
from helpers.api import events
from helpers.patience import Patience, patient, wait_until
from helpers.processes import descendants
from helpers.servers import ROOT, Server, configured, free_port
from helpers.tiny import byte_tokenizer, tiny_draft, tiny_target

KEY = "a-key-of-the-test"
MODEL = {"num_slots": 4, "max_queue": 4, "policy": "3"}
LONG = {"model": "target", "prompt": "a", "max_tokens": 800, "temperature": 0}
SHORT = {"model": "target", "prompt": "a", "max_tokens": 20, "temperature": 0}
DOCS = ROOT / "docs/serving.md"
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def second_pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Another target than the tiny pair's."""
    root = tmp_path_factory.mktemp("second")
    target = tiny_target(seed=5)
    target.save_pretrained(root / "other")
    byte_tokenizer().save_pretrained(root / "other")
    save_draft(tiny_draft(target), root / "draft", dtype=torch.float32)
    return {"target": str(root / "other"), "draft": str(root / "draft"), "dtype": "float32"}


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(
    tiny_pair_dirs: tuple[Path, Path],
    second_pair: dict[str, str],
    metrics_port: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """Models of the tiny pair, of another one, and of the other one's target without a draft."""
    target, draft = map(str, tiny_pair_dirs)
    second = {"pair": second_pair, "policy": "2", "served_model_name": ["second", "other"]}
    alone = {"pair": {"target": second_pair["target"], "dtype": "float32"}, "served_model_name": ["alone"]}
    config = MODEL | {"pair": {"target": target, "draft": draft}, "others": [second, alone]}
    folder = tmp_path_factory.mktemp("server")
    with configured(config | {"metrics_port": metrics_port}, folder, BLOCKPILOT_API_KEY=KEY) as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=patient(120))


@pytest.fixture
def name(tiny_pair_dirs: tuple[Path, Path]) -> str:
    return str(tiny_pair_dirs[0])


def test_models_share_a_server_by_name(
    server: Server, client: openai.OpenAI, second_pair: dict[str, str], name: str
) -> None:
    roots = {model.id: model.model_dump()["root"] for model in client.models.list()}
    assert roots == {name: name, "second": second_pair["target"], "alone": second_pair["target"]}
    first, second, again, alone = (
        client.completions.create(**SHORT | {"model": model}) for model in ("target", "other", "second", "alone")
    )
    assert first.choices[0].text != second.choices[0].text
    assert again.choices == second.choices
    assert alone.choices[0].text == second.choices[0].text
    assert (first.model, second.model, alone.model) == (name, "second", "alone")
    assert (first.usage.model_dump()["block_size"], second.usage.model_dump()["block_size"]) == (3, 2)
    with pytest.raises(openai.NotFoundError, match=r"this server has .*, 'second'"):
        client.completions.create(model=second_pair["target"], prompt="a")
    lookup = "with no draft (plain decoding plus what is looked up in each text; --draft names one), policy untrained"
    wait_until(lambda: lookup in server.process.log, 10)
    assert server.model("alone")["draft"] == "none"


def test_without_the_key_nothing_is_answered(server: Server) -> None:
    stranger = openai.OpenAI(base_url=server.url, api_key="another", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    health = httpx.get(f"{server.root}/health", headers={"x-request-id": "an-id"})
    assert (health.status_code, health.headers["x-request-id"]) == (200, "an-id")
    new, newer = (httpx.get(f"{server.url}/nothing").headers["x-request-id"] for _ in range(2))
    assert len(new) == len(newer) == 36
    assert new != newer


HUGGING_FACE = """
import sys
from huggingface_hub import InferenceClient
client = InferenceClient(base_url=sys.argv[1], api_key=sys.argv[2])
asked = {"messages": [{"role": "user", "content": "Once"}], "model": "target", "max_tokens": 20, "temperature": 0}
print(client.chat_completion(**asked).choices[0].message.content)
print("".join(c.choices[0].delta.content or "" for c in client.chat_completion(**asked, stream=True) if c.choices))
"""


def test_other_clients_work_unmodified(server: Server, client: openai.OpenAI) -> None:
    body = {"model": "target", "messages": [{"role": "user", "content": "Once"}], "max_tokens": 20, "temperature": 0}
    text = client.chat.completions.create(**body).choices[0].message.content
    command = [sys.executable, "-c", HUGGING_FACE, server.url, KEY]
    online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    assert subprocess.check_output(command, text=True, env=online) == f"{text}\n{text}\n"

    headers = ["-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json"]
    curl = ["curl", "--silent", "--no-buffer", *headers, f"{server.url}/chat/completions"]
    whole = json.loads(subprocess.check_output([*curl, "-d", json.dumps(body)]))
    assert whole["choices"][0]["message"]["content"] == text
    chunks = events(subprocess.check_output([*curl, "-d", json.dumps(body | {"stream": True})], text=True))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text


def test_a_killed_replica_ends_its_streams_with_an_error_and_its_whole_requests_are_put_again(
    server: Server, client: openai.OpenAI, name: str
) -> None:
    expected = client.completions.create(**LONG).choices[0].text
    with ThreadPoolExecutor(2) as pool:
        stream = client.completions.create(**LONG, stream=True)
        first = next(stream)
        whole = pool.submit(client.completions.create, **LONG)
        pid = server.until(name, {"num_active": 2})["pid"]
        os.kill(pid, signal.SIGKILL)
        texts = [first.choices[0].text]
        with pytest.raises(openai.APIError, match="replica with this request was lost"):
            texts.extend(chunk.choices[0].text for chunk in stream)
        assert len("".join(texts)) < len(expected)
        assert expected.startswith("".join(texts))
        assert whole.result(timeout=patient(120)).choices[0].text == expected
    after = server.until(name, {"num_in_flight": 0})
    assert after["pid"] != pid
    assert client.completions.create(**SHORT).usage.completion_tokens == 20


def test_a_stopped_replica_takes_neither_health_nor_the_other_model_along(
    server: Server, client: openai.OpenAI, name: str
) -> None:
    pid = server.model(name)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        health = httpx.get(f"{server.root}/health", timeout=patient(30))
        assert time.monotonic() - started < patient(8)
        assert health.status_code == 503
        other = client.completions.create(**SHORT | {"model": "other"})
        assert other.usage.completion_tokens == 20
    finally:
        os.kill(pid, signal.SIGCONT)
    server.until(name, {"status": "ok"})


def test_a_full_queue_is_429_at_once_and_what_was_accepted_ends(server: Server, name: str) -> None:
    """Four times as many as there are places, at once."""
    body = LONG | {"max_tokens": 200}
    limits = httpx.Limits(max_connections=32)
    with (
        httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=patient(120), limits=limits) as client,
        ThreadPoolExecutor(32) as pool,
    ):

        def post(_: int) -> tuple[int, float, str | None]:
            started = time.monotonic()
            response = client.post(f"{server.url}/completions", json=body)
            return response.status_code, time.monotonic() - started, response.headers.get("retry-after")

        answers = list(pool.map(post, range(32)))
    refused = [(seconds, retry) for status, seconds, retry in answers if status == 429]
    accepted = [seconds for status, seconds, _ in answers if status == 200]
    assert len(accepted) == 32 - len(refused)
    assert 8 <= len(accepted) <= 24
    assert max(seconds for seconds, _ in refused) < max(accepted)  # none has waited for its turn
    assert {retry for _, retry in refused} == {"1"}
    server.until(name, {"num_in_flight": 0})


# --- clients that leave, or do not read ---


def sent(connection: socket.socket, server: Server, body: dict[str, Any]) -> None:
    """Connect, and send a completion's body."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.connect(("127.0.0.1", int(server.root.rpartition(":")[2])))
    connection.sendall(head.encode() + content)


def test_clients_that_vanish_leave_no_rows(server: Server, name: str) -> None:
    def leave(number: int) -> None:
        with socket.socket() as connection:
            sent(connection, server, LONG | {"stream": number % 2 == 0})
            time.sleep(0.1 * number)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(leave, range(6)))
    server.until(name, {"num_in_flight": 0, "num_active": 0}, limit_s=5, factor=1)


def test_a_client_that_does_not_read_holds_no_row_beyond_its_deadline(server: Server, name: str) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sent(connection, server, LONG | {"stream": True, "timeout_s": 0.3, "logprobs": 5, "n": 8})
        first = connection.recv(1)  # the server has taken the request; nothing else is read until its rows are free
        server.until(name, {"num_in_flight": 0, "num_active": 0}, limit_s=5, factor=1)
        with connection.makefile("rb") as stream:
            received = first + stream.read()
    assert received.startswith(b"HTTP/1.1 200")
    assert b"deadline_exceeded" in received[-500:]


# --- metrics ---


def documented_metrics() -> dict[str, tuple[str, set[str]]]:
    """Type and labels by name, of the table in docs/serving.md."""
    rows = re.findall(r"^\| `(ray_blockpilot_\w+)` \| (\w+) \| ([\w, ]+) \|", DOCS.read_text(), re.MULTILINE)
    return {name: (kind, set(labels.split(", "))) for name, kind, labels in rows}


def exposed_metrics(text: str) -> dict[str, tuple[str, set[str]]]:
    """Those in Prometheus' format, without the labels that Serve and Ray put to all of them."""
    samples = re.findall(r"^(ray_blockpilot_\w+?)(?:_bucket|_sum|_count)?\{(.*)\}", text, re.MULTILINE)
    labels = {name: set(re.findall(r'(\w+)="', shown)) - {"le"} for name, shown in samples}
    everywhere = set[str].intersection(*labels.values()) - {"model"} if labels else set()
    kinds = re.findall(r"^# TYPE (ray_blockpilot_\w+) (\w+)", text, re.MULTILINE)
    return {name: (kind, labels[name] - everywhere) for name, kind in kinds}


def test_the_table_of_metrics_is_what_the_server_exposes(client: openai.OpenAI, metrics_port: int) -> None:
    forced = {"structured_outputs": {"choice": ["a text that a grammar drafts, token by token"]}}
    for extra in (forced, forced, {"lookup": True}):  # the second prompt is found
        client.completions.create(model="target", prompt="a" * 40, max_tokens=60, temperature=0, extra_body=extra)
    documented, text = documented_metrics(), ""
    assert len(documented) >= 17
    patience = Patience(patient(60))
    while exposed_metrics(text) != documented and patience.left:  # processes export every few seconds
        time.sleep(0.5)
        text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=patient(5)).text
    assert exposed_metrics(text) == documented
    assert 'block_size="3"' in text
    sources = re.findall(r'ray_blockpilot_accepted_tokens_total\{[^}]*source="(\w+)"', text)
    assert {"constraint"} <= set(sources) <= {"draft", "lookup", "both", "constraint"}
    assert re.search(r'ray_blockpilot_slots\{[^}]*model="second"', text)
    assert KEY not in text


def test_one_seed_is_one_text_alone_and_in_a_crowd_at_every_block_size(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "target", "prompt": "Once", "max_tokens": 60, "temperature": 1, "seed": 11}
    expected = client.completions.create(**body).choices[0].text
    stop = threading.Event()

    def crowd(number: int) -> None:
        while not stop.is_set():
            client.completions.create(model="target", prompt="b" * (number + 3), max_tokens=50, seed=number)

    with ThreadPoolExecutor(3) as pool:
        for number in range(3):
            pool.submit(crowd, number)
        try:
            for size in (1, 2, 5, 8, "auto"):
                answer = client.completions.create(**body, extra_body={"block_size": size})
                assert answer.choices[0].text == expected
        finally:
            stop.set()


def test_a_killed_gateway_is_replaced_and_listens_again(server: Server, client: openai.OpenAI) -> None:
    expected = client.completions.create(**SHORT).choices[0].text
    (pid,) = descendants(server.process.pid, "ServeReplica:blockpilot:gateway")
    os.kill(pid, signal.SIGKILL)

    def answers() -> bool:
        try:
            return httpx.get(f"{server.root}/health", timeout=patient(30)).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(answers, 90, lambda: server.process.log, poll_s=0.2)
    assert client.completions.create(**SHORT).choices[0].text == expected
