"""The serving job: settings that it refuses, addresses, and the server by command with the openai client."""

import asyncio
import re
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from blockpilot.pairs.loading import Pair
from blockpilot.policy.store import save_policy
from helpers.command_line import error_of
from helpers.patience import patient
from helpers.policies import register, tiny_policy
from helpers.processes import listeners
from helpers.servers import ROOT, Server, free_port, has_ipv6, serving
from jobs import serve
from jobs.bench.http_load import Clients, Received
from jobs.common.cluster import num_cores
from jobs.common.config import ConfigError, PairConfig
from jobs.common.registry import Registry, model_name
from jobs.serve import LOOPBACK_NAMES, ServeConfig, build_app, is_open, run
from jobs.serving.clients import ApiKeys, api_keys
from jobs.serving.gateway import bound, close, is_loopback, netloc
from jobs.serving.models import ModelConfig, find_policy, models_by_name

# MLflow's models use a deprecated part of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture
def pair_config(tiny_pair_dirs: tuple[Path, Path]) -> PairConfig:
    target, draft = tiny_pair_dirs
    return PairConfig(target=str(target), draft=str(draft), dtype="float32")


# --- policies ---


def test_a_policy_is_a_block_size_a_directory_of_the_same_pair_or_the_registrys_champion(
    pair_config: PairConfig, tiny_pair: Pair, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def policy_of(policy: object) -> int | str | Path:
        return find_policy(ServeConfig(pair=pair_config, policy=str(policy)), tmp_path / "serve")

    assert policy_of(8) == 8
    directory, other, pair = tmp_path / "policy", tmp_path / "other", tiny_pair.id
    save_policy(tiny_policy(pair, 260, (2, 3, 5)), directory)
    assert policy_of(directory) == directory
    save_policy(tiny_policy(pair._replace(target="Qwen/Qwen3-4B"), 260, (2, 3, 5)), other)
    with pytest.raises(ValueError, match=rf"Qwen/Qwen3-4B.*this pair is.*{re.escape(pair.target)}"):
        policy_of(other)

    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert policy_of("auto") == "auto"
    with pytest.raises(ValueError, match=r"blockpilot-target@champion.*jobs/promote.py.*--policy untrained"):
        policy_of("champion")
    registry = Registry.open()
    version = register(registry, directory, pair)
    assert version.name == model_name(pair.target)
    registry.set_champion(version)
    champion = policy_of("champion")
    assert champion == policy_of("auto")
    assert isinstance(champion, Path)
    assert (champion / "policy.json").read_bytes() == (directory / "policy.json").read_bytes()


# --- settings ---


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--policy 0", "policy 0: a block size must be 1 to 32"),
        ("--policy 33", "policy 33: a block size must be 1 to 32"),
        ("--pair gpt-9", "unknown pair 'gpt-9'"),
        ("--policy /no/such/policy", "/no/such/policy/policy.json: no such file"),
        ("--draft /no/such/draft", "draft '/no/such/draft': a target is needed"),
        ("--target x --policy champion", "target 'x' has no draft, policy champion needs one"),
        ("--target x --policy 0", "policy 0: a block size must be 1 to 32"),
        ("--policy 8 --api-key-file /no/such/keys", "/no/such/keys"),
        ("--policy 8 --max-body-bytes 0", "max_body_bytes"),
        ("--policy 8 --request-timeout-s 0", "request_timeout_s"),
    ],
)
def test_bad_settings_end_in_one_line(arguments: str, complaint: str) -> None:
    assert complaint in error_of(ServeConfig, run, arguments)


def test_a_server_is_refused_where_ray_asks_for_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "RAY_AUTH_MODE disabled: Ray listens on all interfaces" in error_of(ServeConfig, run, "--policy 2")


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOCKPILOT_API_KEY", raising=False)
    assert api_keys(None) == ApiKeys()
    monkeypatch.setenv("BLOCKPILOT_API_KEY", " one ")
    assert api_keys(None) == ApiKeys.of(("one",))
    file = tmp_path / "keys"
    file.write_text("two\n\n  three  \n")
    assert api_keys(file) == ApiKeys.of(("two", "three"))
    file.write_text("two\nthree\ntwo\n", encoding="utf-8-sig")  # with a byte order mark, and a key twice
    assert api_keys(file) == ApiKeys.of(("two", "three"))
    file.write_text("two\n", encoding="utf-16")
    with pytest.raises(ValueError, match=r"keys: not UTF-8"):
        api_keys(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"keys: has no key; one per line"):
        api_keys(file)


def test_a_model_answers_to_its_target_by_default_and_otherwise_to_the_names_that_it_is_given() -> None:
    pinned = ModelConfig(pair=PairConfig(target="Qwen/Qwen3-4B@main", draft="z-lab/Qwen3-4B-DFlash-b16"))
    target, slug = pinned.names
    assert (target, slug) == ("Qwen/Qwen3-4B", "qwen3-4b")
    renamed = pinned.model_copy(update={"served_model_name": ("chat", "gpt-4o")})
    names = models_by_name((pinned, renamed))
    assert names == {target: target, slug: target, "chat": "chat", "gpt-4o": "chat"}
    assert list(ServeConfig(pair=pinned.pair, others=(renamed,)).deployments) == ["qwen3-4b", "qwen3-4b_1"]
    for models, name in (((pinned, pinned), target), ((pinned, renamed, renamed), "chat")):
        with pytest.raises(ValueError, match=f"name '{name}' of two models: set served_model_name"):
            models_by_name(models)
    for names, complaint in (("aa", "repeated name 'a'"), (("a", ""), "empty name ''"), ((" ",), "empty name ' '")):
        for config in (ServeConfig, ModelConfig):
            with pytest.raises(ConfigError, match=f"served_model_name: {complaint}"):
                config(served_model_name=tuple(names))


def test_a_server_that_anybody_may_use_says_so(
    pair_config: PairConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for host, key, warned in (("0.0.0.0", "", True), ("0.0.0.0", "one", False), ("::1", "", False)):
        monkeypatch.setenv("BLOCKPILOT_API_KEY", key)
        run(ServeConfig(pair=pair_config, policy="3", host=host, write_config=tmp_path / "serve.yaml"))
        assert ("may use this server" in capsys.readouterr().out) == warned, (host, key)


def test_the_deploy_file_is_one_that_serve_takes(
    pair_config: PairConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKPILOT_API_KEY", "a-secret-key")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    file, store = tmp_path / "serve.yaml", f"sqlite:///{tmp_path / 'mlflow.db'}"
    run(ServeConfig(pair=pair_config, host="127.0.0.1", port=8123, num_slots=2, write_config=file))
    text = file.read_text()
    assert "a-secret-key" not in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    (app,) = schema.applications
    assert (schema.http_options.host, schema.http_options.port) == ("127.0.0.1", 8123)
    assert app.import_path == "jobs.serve:build_app"
    assert app.runtime_env["env_vars"]["MLFLOW_TRACKING_URI"] == store
    (deployment,) = app.deployments
    user_config = {"policy": "auto", "store": store, "follow_s": 20.0, "folder": str(tmp_path / "runs/serve")}
    assert (deployment.name, deployment.user_config) == ("target", user_config)
    loaded_config = ServeConfig(**app.args)
    assert loaded_config.models[0].pair == pair_config
    assert (loaded_config.num_slots, loaded_config.policy, loaded_config.needs_api_key) == (2, "auto", True)
    monkeypatch.delenv("BLOCKPILOT_API_KEY")
    with pytest.raises(ValueError, match="needs_api_key: there is none in BLOCKPILOT_API_KEY"):
        build_app(loaded_config)


def test_the_deploy_file_keeps_the_accepted_hosts_and_absolute_paths(
    pair_config: PairConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File read in another directory, where the hosts, the keys and the policies are those of the command line."""
    monkeypatch.chdir(tmp_path)
    Path("keys").write_text("a-key\n")
    other = ModelConfig(pair=pair_config, served_model_name=("other",), policy="policies/b")
    for host, hosts in (("0.0.0.0", ("*",)), ("127.0.0.2", ServeConfig(host="127.0.0.2").hosts)):
        own = {"policy": "policies/a", "api_key_file": Path("keys"), "others": (other,)}
        run(ServeConfig(pair=pair_config, host=host, **own, write_config=tmp_path / "serve.yaml"))
        (app,) = ServeDeploySchema.model_validate(yaml.safe_load((tmp_path / "serve.yaml").read_text())).applications
        loaded_config = ServeConfig(**app.args)
        assert loaded_config.hosts == hosts
        assert loaded_config.api_key_file == tmp_path / "keys"
        policies = [model.policy for model in loaded_config.models]
        assert policies == [str(tmp_path / "policies" / name) for name in "ab"]
        assert loaded_config.models[0].pair == loaded_config.models[1].pair == pair_config


# --- addresses that the server listens on, and its own name for them ---

ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


@contextmanager
def listening(host: str) -> Iterator[int]:
    """Bind all addresses of a host to a free port; yields the port."""
    port = free_port()
    listeners = bound(host, port)
    yield port
    close(listeners)


def reached(port: int) -> set[str]:
    """Loopback addresses that accept connections on a port."""
    hosts = set[str]()
    for host in ("127.0.0.1", "::1"):
        with suppress(OSError):
            socket.create_connection((host, port), timeout=5).close()
            hosts.add(host)
    return hosts


@pytest.mark.parametrize(
    ("host", "by"),
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("0.0.0.0", {"127.0.0.1"}),
        pytest.param("::1", {"::1"}, marks=ipv6),
        pytest.param("::", {"127.0.0.1", "::1"}, marks=ipv6),
    ],
)
def test_a_host_is_reached_by_its_own_addresses(host: str, by: set[str]) -> None:
    with listening(host) as port:
        assert reached(port) == by


@ipv6
def test_a_name_is_reached_by_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name with several addresses, as localhost often has; one that the machine lacks is skipped if another works."""
    resolve = socket.getaddrinfo

    def both(host: str, *arguments: Any, **options: Any) -> list[Any]:
        names = ("::1", "127.0.0.1", "203.0.113.1") if host == "localhost" else (host,)
        return [address for name in names for address in resolve(name, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with listening("localhost") as port:
        assert reached(port) == {"127.0.0.1", "::1"}
        with pytest.raises(OSError, match="in use"):
            bound("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0)) as taken:  # a port that is taken on one address
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            bound("localhost", port)
        assert reached(port) == {"127.0.0.1"}
    with pytest.raises(OSError, match="assign"):
        bound("203.0.113.1", 0)


def test_loopback_answers_to_its_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOCKPILOT_API_KEY", raising=False)
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.0.0.2", "0:0:0:0:0:0:0:1"):
        config = ServeConfig(host=host)
        assert {*LOOPBACK_NAMES, config.host} <= set(config.hosts)
        assert "*" not in config.hosts
        assert not is_open(config)
    for host in ("0.0.0.0", "::", "203.0.113.1", "2001:db8::1", "example.com"):
        assert ServeConfig(host=host).hosts == ("*",)
        assert is_open(ServeConfig(host=host))
        assert not is_loopback(host)
    assert ServeConfig(host="::1", allowed_hosts=("a.example",)).hosts == ("a.example",)
    assert ServeConfig(host="[::1]").host == "::1"
    assert (netloc("::1", 80), netloc("localhost", 80)) == ("[::1]:80", "localhost:80")
    with pytest.raises(ConfigError, match="host"):
        ServeConfig(host="")


# --- by command, through Ray Serve ---

CHAT = {"messages": [{"role": "user", "content": "Once"}], "model": "target", "temperature": 0}
HOST = "[::1]" if has_ipv6() else "127.0.0.1"
DOCUMENTED_LISTENERS = (  # docs/serving.md, "What listens"
    *("/gcs_server ", "/raylet ", "/monitor.py ", "/dashboard.py ", "ray::IDLE", "ray::DashboardAgent"),
    *("ray::RuntimeEnvAgent", "ray::ServeController", "ray::ServeReplica:"),
)


@pytest.fixture(scope="module")
def server(tiny_pair_dirs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`python jobs/serve.py` on the tiny pair with block size 3, on the loopback address of IPv6 if there is one."""
    target, draft = map(str, tiny_pair_dirs)
    port, folder = free_port(), tmp_path_factory.mktemp("server")
    settings = ["--policy", "3", "--host", HOST, "--port", str(port), "--num-slots", "4"]
    command = [str(ROOT / "jobs/serve.py"), "--target", target, "--draft", draft, "--dtype", "float32", *settings]
    with serving(command, folder, port, host=HOST) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0, timeout=patient(120)) as client:
        yield client


@pytest.mark.ray
def test_health_and_the_first_line_say_what_was_chosen_and_why(server: Server) -> None:
    """Chosen dtype and threads: float32 on any CPU for the tiny pair, all cores without --num-cpus."""
    assert f"at {server.url} with policy" in server.process.log
    assert "warning" not in server.process.log.split("serving")[0]  # nobody else reaches it
    (model,) = httpx.get(f"{server.root}/health").json()["models"].values()
    cores = num_cores()
    assert (model["dtype"], model["num_threads"]) == ("float32", cores)
    assert model["chosen"]["num_threads"] == f"all {cores} cores of this machine"
    assert model["chosen"]["dtype"]


@pytest.mark.ray
def test_what_listens_beyond_loopback_is_rays(server: Server) -> None:
    sockets, port = listeners(server.process.pid), int(server.root.rpartition(":")[2])
    assert port in {listener.port for listener in sockets if listener.on_loopback}
    open_commands = {listener.command for listener in sockets if not listener.on_loopback}
    assert open_commands
    assert not [command for command in open_commands if not any(name in command for name in DOCUMENTED_LISTENERS)]
    with pytest.raises(ValueError, match=re.escape(f"cannot listen on {HOST}:{port} ")):
        serve._wait_for_port(HOST.strip("[]"), port)


@pytest.mark.ray
def test_a_server_on_loopback_answers_to_its_names_and_the_load_tool(server: Server) -> None:
    port = server.root.rpartition(":")[2]
    names = {"evil.example": 400, f"localhost:{port}": 200, HOST: 200, f"{HOST}:{port}": 200, "[::2]": 400}
    for page in ("health", ""):
        statuses = {name: httpx.get(f"{server.root}/{page}", headers={"Host": name}).status_code for name in names}
        assert statuses == names

    async def load() -> list[Received]:
        async with Clients(server.url) as clients:
            body = {"model": await clients.first_model(), "messages": CHAT["messages"], "max_tokens": 5}
            return await clients.closed_loop([body], 1)

    (received,) = asyncio.run(load())
    assert received.whole


@pytest.mark.ray
def test_served_to_the_openai_client_until_sigterm(server: Server, client: openai.OpenAI, tiny_pair: Pair) -> None:
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

    both = client.chat.completions.create(**CHAT, n=2, max_tokens=40, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in both.choices] == [whole.choices[0].message.content] * 2
    assert all(len(token.top_logprobs) == 2 for token in both.choices[0].logprobs.content)
    with pytest.raises(openai.BadRequestError, match=r"presence_penalty: .*less than or equal to 2"):
        client.chat.completions.create(**CHAT, presence_penalty=3.0)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(**CHAT | {"model": "gpt-9"})
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="target", input="x")

    long = {"model": "target", "prompt": "a", "max_tokens": 900, "temperature": 0, "stream": True}
    stream = client.completions.create(**long)
    next(stream)
    name = tiny_pair.id.target
    assert server.model(name)["num_active"] == 1
    stream.close()
    server.until(name, {"num_active": 0}, limit_s=1, factor=1)  # the whole answer takes seconds

    shorter = long | {"max_tokens": 400}  # a busy machine must finish it before the server gives up, after 120 s
    stream = client.completions.create(**shorter, extra_body={"block_size": 1})
    next(stream)
    threading.Timer(0.2, server.process.terminate).start()
    *_, last = stream
    assert last.choices[0].finish_reason == "length"  # running requests finish
    assert server.process.wait(60) == 0
