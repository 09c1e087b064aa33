"""`python jobs/serve.py --engine vllm` as a user starts it, with the openai client, on the embedded pair in float32;
where vLLM is installed (docs/vllm.md).
"""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from blockpilot.pairs.checkpoints import find_target
from blockpilot.pairs.loading import Pair
from blockpilot.pairs.table import EMBEDDED_TARGET
from blockpilot.policy.store import save_policy
from helpers.api import events
from helpers.patience import patient, wait_until
from helpers.policies import tiny_policy
from helpers.processes import descendants
from helpers.servers import ROOT, Server, free_port, serving
from helpers.vllm_engine import vllm_process
from jobs.common.registry import Registry

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import
    pytest.mark.ray,
]
MODEL = "smollm2-135m-instruct"
QUESTIONS = "Write a poem about the sea.", "List five colours.", "Say hello in French."
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(registry: Registry, metrics_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With three places, two of which decode."""
    port = free_port()
    options = ["--engine", "vllm", "--enforce-eager", "--dtype", "float32", "--num-slots", "2", "--max-queue", "1"]
    options += ["--max-length", "256", "--registry-every-s", "0.5", "--stream-interval-s", "0"]
    options += ["--port", str(port), "--metrics-port", str(metrics_port)]
    folder = tmp_path_factory.mktemp("server")
    variables = {"MLFLOW_TRACKING_URI": registry.uri, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with serving([str(ROOT / "jobs/serve.py"), *options], folder, port, **variables) as server:
        yield server
        left = engine_pids(server)
    assert left
    assert server.process.poll() == 0
    wait_until(lambda: not any(map(lives, left)), 10)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0, timeout=patient(120)) as client:
        yield client


def engine_pids(server: Server) -> list[int]:
    return descendants(server.process.pid, "EngineCore")


def lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def ask(question: str, **more: Any) -> dict[str, Any]:
    """Arguments of a chat."""
    options = {"model": MODEL, "temperature": 0, "max_tokens": NUM_TOKENS}
    return options | {"messages": [{"role": "user", "content": question}]} | more


@pytest.fixture(scope="module")
def wanted(embedded_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers to the questions by vLLM without a draft."""
    tokenizer = embedded_pair.tokenizer
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    plain = {"target": str(find_target(EMBEDDED_TARGET).directory), "draft": None, "num_drafted": 0}
    with vllm_process(tmp_path_factory.mktemp("plain"), **plain) as engine:
        answers = engine.decode([{"prompt_ids": list(p), "max_new_tokens": NUM_TOKENS} for p in prompts])
    return [tokenizer.decode(answer["tokens"], skip_special_tokens=True) for answer in answers]


def test_greedy_texts_are_vllms_own_whatever_the_block_sizes_of_a_batch(
    client: openai.OpenAI, wanted: list[str]
) -> None:
    with ThreadPoolExecutor(3) as pool:
        for sizes in ((8, 1, 3), ("auto", 5, "auto")):
            asked = [ask(q, extra_body={"block_size": size}) for q, size in zip(QUESTIONS, sizes, strict=True)]
            answers = list(pool.map(lambda body: client.chat.completions.create(**body), asked))
            assert [answer.choices[0].message.content for answer in answers] == wanted
            found = [answer.usage.model_dump()["block_size"] for answer in answers]
            assert found == [8 if size == "auto" else size for size in sizes]  # no champion: as the draft was trained


def test_a_stream_shows_each_step_and_what_it_drafted(server: Server, wanted: list[str]) -> None:
    body = ask(QUESTIONS[0], stream=True, block_size=4, stream_options={"include_steps": True, "include_usage": True})
    *chunks, last = events(httpx.post(f"{server.url}/chat/completions", json=body, timeout=patient(60)).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == wanted[0]
    first, *steps = (choice["step"] for choice in choices if "step" in choice)
    assert (first["block_size"], len(first["texts"])) == (0, 1)
    assert {step["block_size"] for step in steps[:-1]} <= {1, 4}
    assert all(len(step["drafted"]) == step["block_size"] - 1 for step in steps)
    assert all(step["drafted"][: step["num_accepted"]] == step["texts"][: step["num_accepted"]] for step in steps)
    assert last["usage"]["num_steps"] == len(steps)
    assert last["usage"]["acceptance_length"] == (NUM_TOKENS - 1) / len(steps) > 1
    speculation = last["metrics"]["speculative_decoding"]
    assert speculation["num_draft_tokens"] == sum(len(step["drafted"]) for step in steps)


def test_choices_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ask(QUESTIONS[0], temperature=1.0, seed=7, n=2))
    first, second = (choice.message.content for choice in answer.choices)
    assert first != second
    assert answer.model_dump()["seed"] == 7
    assert answer.usage.completion_tokens == 2 * NUM_TOKENS


def test_log_probabilities_are_the_targets(client: openai.OpenAI, embedded_pair: Pair) -> None:
    answer = client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=6, temperature=0, logprobs=2)
    found = answer.choices[0].logprobs
    scores = embedded_pair.target(torch.tensor([[1, 2, 3]])).logits[0, -1].log_softmax(dim=-1)
    assert found.token_logprobs[0] == pytest.approx(scores.max().item(), abs=1e-3)
    assert sorted(found.top_logprobs[0].values(), reverse=True) == pytest.approx(
        scores.topk(2).values.tolist(), abs=1e-3
    )
    assert len(found.tokens) == 6


def test_a_stop_string_ends_the_text_before_it_and_frees_the_row(
    client: openai.OpenAI, server: Server, wanted: list[str]
) -> None:
    stop = wanted[0][15:19]
    answer = client.chat.completions.create(**ask(QUESTIONS[0], stop=[stop]))
    assert answer.choices[0].message.content == wanted[0][: wanted[0].index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    server.until(EMBEDDED_TARGET, {"num_active": 0}, limit_s=5, factor=1)


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}}}


def test_structures_hold_beside_drafts(client: openai.OpenAI) -> None:
    shape = {
        "type": "json_schema",
        "json_schema": {"name": "one", "schema": SCHEMA | {"additionalProperties": False}},
    }
    answer = client.chat.completions.create(**ask(QUESTIONS[0], response_format=shape))
    assert json.loads(answer.choices[0].message.content).keys() == {"name"}
    assert answer.choices[0].finish_reason == "stop"
    for outputs, allowed in (
        ({"regex": "(ab){3}c"}, {"abababc"}),
        ({"choice": ["red", "green"]}, {"red", "green"}),
        ({"grammar": 'start: "x" "y"+ "z"'}, None),
    ):
        text = (
            client.chat.completions.create(**ask(QUESTIONS[1], extra_body={"structured_outputs": outputs}))
            .choices[0]
            .message.content
        )
        assert text in allowed if allowed else text.startswith("xy")
    tools = [
        {"type": "function", "function": WEATHER | {"parameters": WEATHER["parameters"] | {"required": ["city"]}}}
    ]
    answer = client.chat.completions.create(**ask("Weather in Rome?", tools=tools, tool_choice="required"))
    call = answer.choices[0].message.tool_calls[0].function
    assert call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Bonn")


@pytest.mark.parametrize(
    ("field", "body", "complaint"),
    [
        ("block_size", {"block_size": 9}, "block_size 9: must be 1 to 8"),
        ("layout", {"layout": "tree"}, "layout 'tree': vLLM verifies chains; must be one of auto, chain"),
        ("temperature", {"temperature": 0.001}, "temperature 0.001: by vLLM it must be 0 or at least 0.01"),
        ("structured_outputs", {"structured_outputs": {"regex": "("}}, "structured_outputs: grammar:"),
        ("min_p", {"min_p": 0.1}, "min_p: 0.1 is not supported"),
        ("max_tokens", {"max_tokens": 256}, "maximum context length is 256 tokens"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(
    field: str, body: dict[str, Any], complaint: str, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**ask(QUESTIONS[0]) | {"extra_body": body})
    assert complaint in error.value.body["message"]
    assert error.value.body["param"] == field


def test_more_than_the_places_is_429_and_who_vanishes_frees_the_row(client: openai.OpenAI, server: Server) -> None:
    body = ask(QUESTIONS[0], max_tokens=200, extra_body={"block_size": 1})
    with ThreadPoolExecutor(1) as pool:
        streams = [client.chat.completions.create(**body, stream=True) for _ in range(2)]
        waiting = pool.submit(client.chat.completions.create, **body | {"max_tokens": 4})
        server.until(EMBEDDED_TARGET, {"num_in_flight": 3, "num_active": 2})
        with pytest.raises(openai.RateLimitError, match="3 requests are in flight"):
            client.chat.completions.create(**body)
        for stream in streams:
            stream.close()
        assert waiting.result(timeout=patient(60)).usage.completion_tokens == 4
    server.until(EMBEDDED_TARGET, {"num_in_flight": 0, "num_active": 0}, limit_s=5, factor=1)


def test_health_and_metrics_have_the_names_of_the_other_engine(
    client: openai.OpenAI, server: Server, metrics_port: int
) -> None:
    client.chat.completions.create(**ask(QUESTIONS[0], extra_body={"block_size": 3}))
    health = server.model(EMBEDDED_TARGET)
    assert health["engine"].startswith("vllm ")
    assert (health["status"], health["policy"]["name"]) == ("ok", "block size 8")
    assert "champion" in health["policy"]["error"]
    counted = (
        "blocks_total",
        "accepted_tokens_total",
        "tokens_total",
        "step_seconds_bucket",
        "answers_total",
        "slots",
    )
    page = ""

    def exported() -> bool:
        nonlocal page
        page = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").text
        return all(f"ray_blockpilot_{name}{{" in page for name in counted) and 'block_size="3"' in page

    wait_until(exported, 30)


def test_the_registrys_champion_is_followed(
    client: openai.OpenAI, server: Server, registry: Registry, embedded_pair: Pair, tmp_path: Path
) -> None:
    save_policy(tiny_policy(embedded_pair.id, embedded_pair.vocab_size, (5,)), tmp_path / "policy")
    with registry.log_run("train") as record:
        version = registry.register_policy(tmp_path / "policy", target=EMBEDDED_TARGET, run_id=record.id, tags={})
    registry.set_champion(version)
    wait_until(lambda: server.model(EMBEDDED_TARGET)["policy"]["version"] == version.number, 30)
    answer = client.chat.completions.create(**ask(QUESTIONS[0]))
    assert answer.usage.model_dump()["block_size"] == 5


def test_a_replica_whose_engine_process_dies_is_replaced(client: openai.OpenAI, server: Server) -> None:
    before, (engine,) = server.model(EMBEDDED_TARGET)["pid"], engine_pids(server)
    stream = client.chat.completions.create(**ask(QUESTIONS[0], max_tokens=200, stream=True))
    next(stream)
    os.kill(engine, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="the request is lost"):
        list(stream)
    wait_until(lambda: answers(server) not in (None, before), 120)
    assert client.chat.completions.create(**ask(QUESTIONS[0])).usage.completion_tokens == NUM_TOKENS


def test_no_engine_process_outlives_a_replica_that_is_killed(client: openai.OpenAI, server: Server) -> None:
    replica, (engine,) = server.model(EMBEDDED_TARGET)["pid"], engine_pids(server)
    os.kill(replica, signal.SIGKILL)
    wait_until(lambda: not lives(engine), 10)
    wait_until(lambda: answers(server) not in (None, replica), 120)
    assert client.chat.completions.create(**ask(QUESTIONS[0])).usage.completion_tokens == NUM_TOKENS


def answers(server: Server) -> int | None:
    """Pid of a replica that is well; None while there is none."""
    try:
        found = httpx.get(f"{server.root}/health", timeout=patient(30)).json()["models"][EMBEDDED_TARGET]
    except (httpx.HTTPError, KeyError):
        return None
    return found["pid"] if found.get("status") == "ok" else None
