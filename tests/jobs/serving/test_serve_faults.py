"""Server on Ray with two models, one with three replicas, whose parts are killed, stopped or overloaded."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from helpers.bodies import events
from helpers.patience import Patience, patient, wait_until
from helpers.processes import descendants
from helpers.servers import ROOT, Server, configured, free_port
from helpers.tiny import byte_tokenizer, tiny_target
from jobs.serving.fields import WAITING
from jobs.serving.routing import WaitingScaling, affinity
from jobs.serving.schema import Body, ChatRequest, CompletionRequest

KEY = "a-key-of-the-test"
LONG = {"model": "target", "prompt": "a", "max_tokens": 800, "temperature": 0}
SHORT = {"model": "target", "prompt": "a", "max_tokens": 20, "temperature": 0}
DOCS = ROOT / "docs/serving.md"
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another target than the tiny pair's."""
    folder = tmp_path_factory.mktemp("second") / "other"
    tiny_target(seed=5).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(
    tiny_pair_dirs: tuple[Path, Path], second: str, metrics_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Server of two models: the tiny pair, and another target without a draft, with three replicas."""
    target, draft = map(str, tiny_pair_dirs)
    other = {"pair": {"target": second, "dtype": "float32"}, "served_model_name": ["second", "other"]}
    other |= {"resources": {"num_actors": 3, "num_cpus": 0.5}, "num_slots": 4, "max_length": 800}
    config = {"pair": {"target": target, "draft": draft}, "policy": "3", "num_slots": 4, "max_queue": 4}
    config |= {"others": [other], "metrics_port": metrics_port}
    variables = {"BLOCKPILOT_API_KEY": KEY, "RAY_metrics_report_interval_ms": "1000"}  # Ray's own is 10 s
    with configured(config, tmp_path_factory.mktemp("server"), **variables) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=patient(120)) as client:
        yield client


@pytest.fixture
def name(tiny_pair_dirs: tuple[Path, Path]) -> str:
    return str(tiny_pair_dirs[0])


def test_models_share_a_server_by_name(server: Server, client: openai.OpenAI, second: str, name: str) -> None:
    assert {model.id: model.model_dump()["root"] for model in client.models.list()} == {name: name, "second": second}
    first, other, alias_answer = (
        client.completions.create(**SHORT | {"model": model}) for model in ("target", "other", "second")
    )
    assert first.choices[0].text != other.choices[0].text
    assert alias_answer.choices == other.choices
    assert (first.model, other.model, first.usage.model_dump()["block_size"]) == (name, "second", 3)
    with pytest.raises(openai.NotFoundError, match=r"this server has .*, 'second'"):
        client.completions.create(model=second, prompt="a")
    lookup = "with no draft (plain decoding plus what is looked up in each text; --draft names one), policy untrained"
    wait_until(lambda: lookup in server.process.log, 10)
    assert server.model("second")["draft"] == "none"


def test_without_the_key_nothing_is_answered(server: Server) -> None:
    stranger = openai.OpenAI(base_url=server.url, api_key="another", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    health = httpx.get(f"{server.root}/health", headers={"x-request-id": "an-id"})
    assert (health.status_code, health.headers["x-request-id"]) == (200, "an-id")
    ids = {httpx.get(f"{server.url}/nothing").headers["x-request-id"] for _ in range(2)}
    assert [len(id_) for id_ in ids] == [36, 36]


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
    """Concurrent requests, four times as many as there are places."""
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
    assert max(seconds for seconds, _ in refused) < max(accepted)  # none has waited in the queue
    assert {retry for _, retry in refused} == {"1"}
    server.until(name, {"num_in_flight": 0})


def test_a_client_that_does_not_read_holds_no_row_beyond_its_deadline(server: Server, name: str) -> None:
    body = json.dumps(LONG | {"stream": True, "timeout_s": 0.3, "logprobs": 5, "n": 8}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(server.root.rpartition(":")[2])))
        connection.sendall(head.encode() + body)
        first = connection.recv(1)  # the server has taken the request; nothing else is read until its rows are free
        server.until(name, {"num_in_flight": 0, "num_active": 0}, limit_s=5, factor=1)
        with connection.makefile("rb") as stream:
            received = first + stream.read()
    assert received.startswith(b"HTTP/1.1 200")
    assert b"deadline_exceeded" in received[-500:]


# --- metrics ---


def documented_metrics() -> dict[str, tuple[str, set[str]]]:
    """Type and labels by metric, from the table in docs/serving.md."""
    rows = re.findall(r"^\| `(ray_blockpilot_\w+)` \| (\w+) \| ([\w, ]+) \|", DOCS.read_text(), re.MULTILINE)
    return {name: (kind, set(labels.split(", "))) for name, kind, labels in rows}


def exposed_metrics(text: str) -> dict[str, tuple[str, set[str]]]:
    """Type and labels by metric in Prometheus' format, without the labels that Serve and Ray add to all metrics."""
    samples = re.findall(r"^(ray_blockpilot_\w+?)(?:_bucket|_sum|_count)?\{(.*)\}", text, re.MULTILINE)
    labels = {name: set(re.findall(r'(\w+)="', label_text)) - {"le"} for name, label_text in samples}
    common_labels = set[str].intersection(*labels.values()) - {"model"} if labels else set()
    kinds = re.findall(r"^# TYPE (ray_blockpilot_\w+) (\w+)", text, re.MULTILINE)
    return {name: (kind, labels[name] - common_labels) for name, kind in kinds}


def test_the_table_of_metrics_is_what_the_server_exposes(client: openai.OpenAI, metrics_port: int) -> None:
    forced = {"structured_outputs": {"choice": ["a text that a grammar drafts, token by token"]}}
    for extra in (forced, forced, {"lookup": True}):  # the second prompt is cached
        client.completions.create(model="target", prompt="a" * 40, max_tokens=60, temperature=0, extra_body=extra)
    documented, text, sources = documented_metrics(), "", set[str]()
    assert len(documented) >= 17
    patience = Patience(patient(60))
    # Processes export every second.
    while not (exposed_metrics(text) == documented and "constraint" in sources) and patience.left:
        time.sleep(0.2)
        text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=patient(5)).text
        sources = set(re.findall(r'ray_blockpilot_accepted_tokens_total\{[^}]*source="(\w+)"', text))
    assert exposed_metrics(text) == documented
    assert 'block_size="3"' in text
    assert {"constraint"} <= sources <= {"draft", "lookup", "both", "constraint"}
    assert re.search(r'ray_blockpilot_slots\{[^}]*model="second"', text)
    assert KEY not in text


# --- several replicas of a model ---

NUM_CONVERSATIONS = 8


def conversation(number: int, num_turns: int) -> Any:
    system = "Answer in short and simple words, and say so where you do not know."
    question = f"Conversation {number}: tell me what a block of tokens is, please."
    turns = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    for turn in range(1, num_turns):
        turns += [{"role": "assistant", "content": f"It is number {turn}."}, {"role": "user", "content": "And then?"}]
    return turns


def num_cached(client: openai.OpenAI, number: int, num_turns: int) -> tuple[int, int]:
    """Numbers of cached and of all prompt tokens of a conversation's turn."""
    messages = conversation(number, num_turns)
    usage = client.chat.completions.create(model="second", messages=messages, max_tokens=4, seed=1).usage
    return usage.prompt_tokens_details.cached_tokens or 0, usage.prompt_tokens


def finished_by_replica(metrics_port: int) -> Counter[str]:
    """Finished requests of model "second" by replica, as exported."""
    text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=patient(5)).text
    numbers = Counter[str]()
    for labels, number in re.findall(r"^ray_blockpilot_answers_total\{(.*)\} (\S+)", text, re.MULTILINE):
        tags = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if (tags["model"], tags["outcome"]) == ("second", "finished"):
            numbers[tags["replica"]] += int(float(number))
    return numbers


def test_more_requests_than_rows_spill_over(server: Server, client: openai.OpenAI, metrics_port: int) -> None:
    """Requests with one prompt_cache_key: its replica has 4 rows; the others take requests before its queue grows."""
    body: dict[str, Any] = {"model": "second", "messages": conversation(0, 1), "temperature": 1, "max_tokens": 600}
    body |= {"extra_body": {"prompt_cache_key": "all"}}
    server.until("second", {"num_in_flight": 0})
    time.sleep(2)  # processes export every second
    before = finished_by_replica(metrics_port)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda seed: client.chat.completions.create(**body, seed=seed), range(12)))
    assert all(answer.usage.completion_tokens > 0 for answer in answers)
    wait_until(lambda: (finished_by_replica(metrics_port) - before).total() == 12, 30)
    assert len(numbers := finished_by_replica(metrics_port) - before) > 1
    assert max(numbers.values()) < 9


def test_turns_return_to_their_replica_and_move_on_when_it_is_lost(server: Server, client: openai.OpenAI) -> None:
    _, first_size = num_cached(client, 99, 1)
    for number in range(NUM_CONVERSATIONS):
        num_cached(client, number, 1)
    # All of the first turn but an unfinished page; the system prompt alone would be less than half of it.
    for number in range(NUM_CONVERSATIONS):
        cached, size = num_cached(client, number, 2)
        assert cached > size - 80 > first_size / 2
    os.kill(server.model("second")["pid"], signal.SIGKILL)
    for number in range(NUM_CONVERSATIONS):  # none is refused
        assert num_cached(client, number, 3)[1] > 0


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


# --- routing, and the number of replicas ---


def chat(number: int, num_turns: int, **more: Any) -> Body:
    return ChatRequest.model_validate({"model": "m", "messages": conversation(number, num_turns), **more})


def completion(number: int, num_turns: int, **more: Any) -> Body:
    prompt = f"{number} " * 600 + "more" * num_turns
    return CompletionRequest.model_validate({"model": "m", "prompt": prompt, **more})


@pytest.mark.parametrize("body", [chat, completion])
def test_affinity_is_that_of_the_beginning(body: Any) -> None:
    assert affinity(body(0, 1)) == affinity(body(0, 3))
    assert affinity(body(0, 1)) != affinity(body(1, 1))
    assert affinity(body(0, 1)) != affinity(body(0, 1, cache_salt="mine"))
    assert affinity(body(0, 1, prompt_cache_key="a")) == affinity(body(1, 1, prompt_cache_key="a"))
    assert affinity(body(0, 1, prompt_cache_key="a")) != affinity(body(0, 1, prompt_cache_key="b"))


@pytest.mark.parametrize(
    ("num", "num_requests", "waiting_s", "desired"),
    [
        (1, 4, 0.0, 1),
        (1, 5, 0.0, 2),  # more requests than rows
        (1, 4, 2.5, 2),  # too slow, though there are rows
        (2, 2, 2.5, 3),
        (3, 5, 0.0, 2),
        (3, 7, 0.0, 3),  # two replicas would be nearly full
        (3, 2, 1.5, 3),  # still slow
        (3, 0, 0.0, 0),  # Serve keeps the least number
    ],
)
def test_scaling_follows_what_users_feel(num: int, num_requests: int, waiting_s: float, desired: int) -> None:
    context: Any = SimpleNamespace(
        current_num_replicas=num,
        total_num_requests=num_requests,
        aggregated_metrics={WAITING: {"a": 0.0, "b": waiting_s}},
    )
    assert WaitingScaling(num_slots=4, target_s=2.0)(context) == (desired, {})
