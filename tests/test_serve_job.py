"""The serving job: its refusals, its replica without Ray, and the real thing by command with the openai client."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from fastapi.testclient import TestClient
from policies import tiny_policy

from blockpilot.pairs import Pair, PairId
from blockpilot.policy import save_policy
from jobs.config import ConfigError, PairConfig, Resources, main
from jobs.registry import Registry, model_name
from jobs.serve import Decoder, ServeConfig, find_policy, run

ROOT = Path(__file__).parent.parent
CHAT = {"messages": [{"role": "user", "content": "Once"}], "model": "target", "temperature": 0}
START_TIMEOUT_S = 120


# MLflow's own models use a part of SQLAlchemy that will go.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture
def pair_config(tiny_pair_dirs: tuple[Path, Path]) -> PairConfig:
    target, draft = tiny_pair_dirs
    return PairConfig(target=str(target), draft=str(draft))


def write_policy(directory: Path, pair_id: PairId, vocab_size: int = 260) -> Path:
    """A policy of random weights with the candidates 2, 3 and 5."""
    save_policy(tiny_policy(pair_id, vocab_size, (2, 3, 5)), directory)
    return directory


def test_policy_may_be_a_block_size_or_a_directory(pair_config: PairConfig, tiny_pair: Pair, tmp_path: Path) -> None:
    assert find_policy(ServeConfig(pair=pair_config, policy="8")) == 8
    directory = write_policy(tmp_path / "policy", tiny_pair.id)
    assert find_policy(ServeConfig(pair=pair_config, policy=str(directory))) == str(directory)


def test_policy_of_other_models_is_refused_before_they_load(
    pair_config: PairConfig, tiny_pair: Pair, tmp_path: Path
) -> None:
    directory = write_policy(tmp_path, tiny_pair.id._replace(target="Qwen/Qwen3-4B"))
    with pytest.raises(ValueError, match=r"Qwen/Qwen3-4B.*to be served.*target") as error:
        find_policy(ServeConfig(pair=pair_config, policy=str(directory)))
    assert tiny_pair.id.target in str(error.value)


def test_champion_comes_from_the_registry(
    pair_config: PairConfig, tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    config = ServeConfig(pair=pair_config, output=tmp_path / "serve")
    with pytest.raises(ValueError, match=r"blockpilot-target@champion.*jobs/promote.py.*--policy 8"):
        find_policy(config)
    registry = Registry.open()
    directory = write_policy(tmp_path / "policy", tiny_pair.id)
    with registry.log_run("train") as record:
        version = registry.register_policy(
            directory, target=tiny_pair.id.target, run_id=record.id, tags={"draft": tiny_pair.id.draft}
        )
    assert version.name == model_name(tiny_pair.id.target)
    registry.set_champion(version)
    found = find_policy(config)
    assert isinstance(found, str)
    assert (Path(found) / "policy.json").read_bytes() == (directory / "policy.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policy", "0"], "policy 0: a block size must be 1 to 32"),
        (["--policy", "33"], "policy 33: a block size must be 1 to 32"),
        (["--pair", "gpt-9"], "unknown pair 'gpt-9'"),
        (["--policy", "/no/such/policy"], "/no/such/policy/policy.json: no such file"),
        (["--target", "/no/such/target"], "both are needed"),
    ],
)
def test_bad_settings_end_in_one_line(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve.py", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main(ServeConfig, run)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert complaint in message
    assert message.count("\n") == 1


@pytest.fixture
def decoder(pair_config: PairConfig) -> Iterator[Decoder]:
    """A replica as Serve makes it, in this process."""
    decoder = Decoder(pair_config, num_threads=1, num_slots=2, max_length=200, max_prefill_tokens=64, max_queue=4)
    decoder.reconfigure({"policy": 4})
    yield decoder
    decoder._backend.loop.close()


def test_replica_swaps_its_policy_and_keeps_its_text(decoder: Decoder, tiny_pair: Pair, tmp_path: Path) -> None:
    directory = write_policy(tmp_path / "policy", tiny_pair.id)
    with TestClient(decoder.__serve_build_asgi_app__()) as client:
        first = client.post("/v1/chat/completions", json=CHAT).json()
        assert client.get("/health").json()["policy"] == "block size 4"
        decoder.reconfigure({"policy": str(directory)})
        second = client.post("/v1/chat/completions", json=CHAT).json()
        assert client.get("/health").json()["policy"] == str(directory)
    assert first["usage"]["block_size"] == 4
    assert second["usage"]["block_size"] in (2, 3, 5)
    assert second["choices"] == first["choices"]


def test_replica_refuses_a_policy_of_another_revision_and_keeps_its_own(
    decoder: Decoder, tiny_pair: Pair, tmp_path: Path
) -> None:
    other = write_policy(tmp_path, tiny_pair.id._replace(draft_revision="0123abcd"))
    with pytest.raises(ValueError, match="0123abcd") as error:
        decoder.reconfigure({"policy": str(other)})
    assert tiny_pair.id.draft_revision in str(error.value)
    with TestClient(decoder.__serve_build_asgi_app__()) as client:
        assert client.post("/v1/chat/completions", json=CHAT).json()["usage"]["block_size"] == 4


def test_broken_engine_fails_the_health_check(decoder: Decoder) -> None:
    decoder.check_health()
    decoder._backend.loop.close()
    with pytest.raises(RuntimeError, match="broken"):
        decoder.check_health()


# --- by command, through Ray Serve ---


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def server(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`python jobs/serve.py` on the tiny pair with block size 3, ready; and its address."""
    target, draft = tiny_pair_dirs
    port = free_port()
    settings = ["--policy", "3", "--port", str(port), "--num-slots", "4"]
    command = [sys.executable, str(ROOT / "jobs/serve.py"), "--target", target, "--draft", draft, *settings]
    log = tmp_path / "log"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path, env=environment)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while b"serving" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


@pytest.mark.ray
def test_served_to_the_openai_client_until_sigterm(server: tuple[subprocess.Popen[bytes], str]) -> None:
    process, url = server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    assert client.models.list().data[0].id == client.models.retrieve("target").id
    whole = client.chat.completions.create(**CHAT, max_tokens=40)
    assert whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40
    assert whole.usage.model_dump()["block_size"] == 3

    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 40}
    chunks = list(client.chat.completions.create(**CHAT, **options, extra_body={"block_size": 5}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.model_dump()["block_size"] == 5

    completion = client.completions.create(model="target", prompt="Once", max_tokens=5, temperature=0)
    assert completion.choices[0].finish_reason == "length"
    both = client.chat.completions.create(**CHAT, n=2, max_tokens=40, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in both.choices] == [whole.choices[0].message.content] * 2
    assert all(len(token.top_logprobs) == 2 for token in both.choices[0].logprobs.content)
    with pytest.raises(openai.BadRequestError, match=r"presence_penalty: 1\.0 is not supported; allowed: 0"):
        client.chat.completions.create(**CHAT, presence_penalty=1.0)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(**CHAT | {"model": "gpt-9"})
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="target", input="x")

    stream = client.completions.create(model="target", prompt="a", max_tokens=900, temperature=0, stream=True)
    next(stream)
    assert httpx.get(f"{url}/health").json()["num_active"] == 1
    stream.close()
    time.sleep(0.5)  # the whole answer takes seconds
    assert httpx.get(f"{url}/health").json()["num_active"] == 0
    check_drain(process, client)


def check_drain(process: subprocess.Popen[bytes], client: openai.OpenAI) -> None:
    """A stream that is under way at SIGTERM runs to its end, and then the process leaves with status 0."""
    stream = client.completions.create(
        model="target", prompt="a", max_tokens=900, temperature=0, stream=True, extra_body={"block_size": 1}
    )
    next(stream)
    timer = threading.Timer(0.2, process.send_signal, [signal.SIGTERM])
    timer.start()
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    assert process.wait(timeout=60) == 0


def test_resources_say_how_many_replicas() -> None:
    with pytest.raises(ConfigError, match="num_actors"):
        ServeConfig(policy="8", resources=Resources(num_actors=0))
