"""Following the registry's champion: new ones are used, and whatever goes wrong the policy stays."""

import asyncio
import json
import pickle
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.control.cost import StepPrice
from blockpilot.device import device_name
from blockpilot.engine.engine import Engine
from blockpilot.evaluation.pricing import measure_price
from blockpilot.pairs.loading import Pair
from blockpilot.policy.learned import LearnedPolicy, PromptPolicy
from blockpilot.policy.store import load_policy, save_policy
from blockpilot.types import PairId
from helpers.api import client_of, replica_of
from helpers.patience import patient, wait_until
from helpers.policies import step_policy, tiny_policy
from helpers.prices import price
from jobs.common.registry import Registry, Version, model_name
from jobs.serving import champions
from jobs.serving.champions import ChampionWatch
from jobs.serving.fields import ApiError
from jobs.serving.replica import Replica, cache_bytes, check_memory
from jobs.serving.schema import ChatRequest, parse

CHAT = {"messages": [{"role": "user", "content": "Once"}], "model": "target", "temperature": 0, "max_tokens": 20}
NEVER_S = 3600.0
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture
def registry(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return Registry.open()


def crown(registry: Registry, folder: Path, pair_id: PairId, target: str, candidates: tuple[int, ...]) -> Version:
    """Register a policy under a target's name and make it champion."""
    return crown_policy(registry, folder, tiny_policy(pair_id, 260, candidates), target)


def crown_policy(registry: Registry, folder: Path, policy: LearnedPolicy, target: str) -> Version:
    """`crown` for any policy."""
    directory = folder / f"policy-{sum(1 for _ in folder.glob('policy-*'))}"
    save_policy(policy, directory)
    with registry.log_run("train") as record:
        version = registry.register_policy(directory, target=target, run_id=record.id, tags={})
    registry.set_champion(version)
    return version


@pytest.fixture
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    with replica_of(tiny_pair, num_slots=2, max_length=600, max_prefill_tokens=64, max_queue=4) as replica:
        yield replica


@pytest.fixture
def client(replica: Replica) -> Iterator[TestClient]:
    with client_of(replica) as client:
        yield client


def following(registry: Registry, folder: Path) -> dict[str, object]:
    return {"policy": "champion", "store": registry.uri, "follow_s": NEVER_S, "folder": str(folder)}


def status(replica: Replica) -> dict[str, object]:
    """Of the policy, as /health tells it."""
    found = asyncio.run(replica.status())["policy"]
    assert isinstance(found, dict)
    return found


def test_a_new_champion_is_used_for_new_requests_and_changes_no_text(
    replica: Replica, client: TestClient, registry: Registry, tiny_pair: Pair, tmp_path: Path
) -> None:
    target = tiny_pair.id.target
    first = crown(registry, tmp_path, tiny_pair.id, target, (3,))
    replica.reconfigure(following(registry, tmp_path / "copies"))
    assert (status(replica)["version"], status(replica)["follows"]) == (first.number, model_name(target))
    before = client.post("/v1/chat/completions", json=CHAT).json()

    answers: list[dict[str, object]] = []
    long = CHAT | {"max_tokens": 500}
    in_flight = threading.Thread(target=lambda: answers.append(client.post("/v1/chat/completions", json=long).json()))
    in_flight.start()
    while not replica.loop.engine.num_active:
        pass
    second = crown(registry, tmp_path, tiny_pair.id, target, (5,))
    assert replica.policy.watch is not None
    replica.policy.watch.look()
    assert status(replica)["version"] == second.number
    after = client.post("/v1/chat/completions", json=CHAT).json()
    in_flight.join()
    assert (before["usage"]["block_size"], after["usage"]["block_size"]) == (3, 5)
    assert before["choices"] == after["choices"]
    assert answers[0]["usage"]["block_size"] == 3  # type: ignore[index]
    assert answers[0]["usage"]["completion_tokens"] > 100  # type: ignore[index]


def test_the_watch_polls_the_registry(replica: Replica, registry: Registry, tiny_pair: Pair, tmp_path: Path) -> None:
    crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (3,))
    replica.reconfigure(following(registry, tmp_path / "copies") | {"follow_s": 0.05})
    second = crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (5,))
    arrived = threading.Event()
    for _ in range(200):
        if status(replica)["version"] == second.number:
            break
        arrived.wait(0.05)
    assert status(replica)["version"] == second.number


def test_an_outage_keeps_the_policy_and_is_reported_until_it_is_over(
    replica: Replica, client: TestClient, registry: Registry, tiny_pair: Pair, tmp_path: Path
) -> None:
    first = crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (3,))
    replica.reconfigure(following(registry, tmp_path / "copies"))
    assert replica.policy.watch is not None
    crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (5,))
    store, kept = tmp_path / "mlflow.db", (tmp_path / "mlflow.db").read_bytes()
    store.write_bytes(b"no database at all" * 1000)
    replica.policy.watch.look()
    assert status(replica)["version"] == first.number
    assert "mlflow.db" in str(status(replica)["error"])
    assert client.post("/v1/chat/completions", json=CHAT).json()["usage"]["block_size"] == 3
    store.write_bytes(kept)
    replica.policy.watch.look()
    assert status(replica)["error"] is None
    assert client.post("/v1/chat/completions", json=CHAT).json()["usage"]["block_size"] == 5


def test_a_champion_of_another_pair_is_refused_and_reported(
    replica: Replica, client: TestClient, registry: Registry, tiny_pair: Pair, tmp_path: Path
) -> None:
    target = tiny_pair.id.target
    first = crown(registry, tmp_path, tiny_pair.id, target, (3,))
    replica.reconfigure(following(registry, tmp_path / "copies"))
    assert replica.policy.watch is not None
    crown(registry, tmp_path, tiny_pair.id._replace(draft_revision="0123abcd"), target, (5,))
    replica.policy.watch.look()
    assert status(replica)["version"] == first.number
    assert "0123abcd" in str(status(replica)["error"])
    assert client.post("/v1/chat/completions", json=CHAT).json()["usage"]["block_size"] == 3
    third = crown(registry, tmp_path, tiny_pair.id, target, (6,))
    replica.policy.watch.look()
    assert (status(replica)["version"], status(replica)["error"]) == (third.number, None)


def test_a_champion_that_fails_where_it_decides_is_not_used(
    replica: Replica,
    client: TestClient,
    registry: Registry,
    tiny_pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One with a block size that no engine verifies, and one of each kind that fails in an engine."""
    target = tiny_pair.id.target
    first = crown(registry, tmp_path, tiny_pair.id, target, (3,))
    replica.reconfigure(following(registry, tmp_path / "copies"))
    assert replica.policy.watch is not None
    crown(registry, tmp_path, tiny_pair.id, target, (3, 33))
    replica.policy.watch.look()
    assert "block size 33: must be at most 32" in str(status(replica)["error"])

    def fail(*_: object) -> None:
        raise RuntimeError("no choice")

    by_kind = {PromptPolicy: tiny_policy(tiny_pair.id, 260, (1, 4)), AcceptanceModel: step_policy(tiny_pair.id, 260)}
    for broken, policy in by_kind.items():
        with monkeypatch.context() as while_tried:
            while_tried.setattr(broken, "__call__" if broken is PromptPolicy else "propose", fail)
            crown_policy(registry, tmp_path, policy, target)
            replica.policy.watch.look()
        assert "fails when it is tried (RuntimeError: no choice)" in str(status(replica)["error"])
        assert status(replica)["version"] == first.number
    assert client.post("/v1/chat/completions", json=CHAT).json()["usage"]["block_size"] == 3


def test_a_champion_of_kind_step_is_the_prior_of_every_choice(
    replica: Replica, client: TestClient, registry: Registry, tiny_pair: Pair, tmp_path: Path
) -> None:
    """Its kind may change: each fixes block sizes, or leaves rows to a controller that starts with its weights."""
    target, policy, engine = tiny_pair.id.target, step_policy(tiny_pair.id, 260), replica.loop.engine
    crown(registry, tmp_path, tiny_pair.id, target, (3,))
    replica.reconfigure(following(registry, tmp_path / "copies"))
    before = client.post("/v1/chat/completions", json=CHAT).json()
    assert isinstance(engine.policy, PromptPolicy)
    second = crown_policy(registry, tmp_path, policy, target)
    assert replica.policy.watch is not None
    replica.policy.watch.look()
    assert (status(replica)["version"], status(replica)["error"]) == (second.number, None)
    after = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1}).json()
    assert engine.policy is None
    assert np.array_equal(engine.controller.model.weights, policy.weights)
    after = client.post("/v1/chat/completions", json=CHAT).json()
    assert before["choices"] == after["choices"]
    third = crown(registry, tmp_path, tiny_pair.id, target, (6,))
    replica.policy.watch.look()
    assert status(replica)["version"] == third.number
    assert client.post("/v1/chat/completions", json=CHAT).json()["usage"]["block_size"] == 6
    assert not engine.controller.model.weights.any()


def test_a_refused_champion_is_tried_once(
    replica: Replica, registry: Registry, tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the registry has named another; /health says all the time why it is not used."""
    target, copied = tiny_pair.id.target, []
    download = Registry.download

    def counted(self: Registry, version: Version, directory: Path) -> Path:
        copied.append(version.number)
        return download(self, version, directory)

    monkeypatch.setattr(Registry, "download", counted)
    first = crown(registry, tmp_path, tiny_pair.id, target, (3,))
    replica.reconfigure(following(registry, tmp_path / "copies"))
    watch = replica.policy.watch
    assert watch is not None
    refused = crown(registry, tmp_path, tiny_pair.id._replace(draft_revision="0123abcd"), target, (5,))
    store, kept = tmp_path / "mlflow.db", (tmp_path / "mlflow.db").read_bytes()
    for _ in range(3):
        watch.look()
        assert "0123abcd" in str(status(replica)["error"])
    store.write_bytes(b"no database at all" * 1000)
    watch.look()
    assert "mlflow.db" in str(status(replica)["error"])
    store.write_bytes(kept)
    watch.look()
    assert "0123abcd" in str(status(replica)["error"])
    assert copied == [first.number, refused.number]
    registry.set_champion(first)
    watch.look()
    assert (status(replica)["version"], status(replica)["error"]) == (first.number, None)
    registry.set_champion(refused)
    watch.look()
    assert "0123abcd" in str(status(replica)["error"])
    assert copied == [first.number, refused.number, refused.number]


def test_whatever_a_look_meets_the_watch_goes_on(registry: Registry, tiny_pair: Pair, tmp_path: Path) -> None:
    crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (3,))
    errors: list[Exception] = [TypeError("no such thing"), RuntimeError("out of memory"), MemoryError("none left")]
    used = threading.Event()

    def use(directory: Path, number: int) -> None:
        if errors:
            raise errors.pop()
        used.set()

    watch = ChampionWatch(model_name(tiny_pair.id.target), registry.uri, tmp_path / "copies", 0.02, use)
    assert watch.error == "none left"
    watch.follow()
    assert used.wait(patient(20))
    watch.stop()


def test_a_replica_that_starts_without_the_registry_uses_the_last_copy(
    replica: Replica, registry: Registry, tiny_pair: Pair, tmp_path: Path
) -> None:
    folder, name = tmp_path / "copies", model_name(tiny_pair.id.target)
    with pytest.raises(ValueError, match="blockpilot-target"):
        replica.reconfigure(following(registry, folder))
    for candidates in ((3,), (5,)):
        crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, candidates)
        ChampionWatch(name, registry.uri, folder, NEVER_S, lambda path, number: None).stop()
    nowhere = f"sqlite:///{tmp_path / 'nowhere' / 'mlflow.db'}"
    replica.reconfigure(following(registry, folder) | {"store": nowhere})
    assert status(replica)["version"] == 2
    assert "nowhere" in str(status(replica)["error"])


def test_a_policy_of_another_revision_is_refused_by_name(
    replica: Replica, client: TestClient, tiny_pair: Pair, tmp_path: Path
) -> None:
    replica.reconfigure({"policy": 4})
    save_policy(tiny_policy(tiny_pair.id._replace(draft_revision="0123abcd"), 260, (2, 3)), tmp_path / "policy")
    with pytest.raises(ValueError, match="0123abcd") as error:
        replica.reconfigure({"policy": str(tmp_path / "policy")})
    assert tiny_pair.id.draft_revision in str(error.value)
    assert client.post("/v1/chat/completions", json=CHAT).json()["usage"]["block_size"] == 4


def test_broken_engine_fails_the_health_check(replica: Replica) -> None:
    replica.check_health()
    replica.loop.close()
    with pytest.raises(RuntimeError, match="broken"):
        replica.check_health()


def test_a_replica_yields_refusals_as_values(replica: Replica) -> None:
    """Serve takes what a replica raises for a failure."""
    body = parse(ChatRequest, json.dumps(CHAT | {"max_tokens": 10_000}).encode())

    async def scene() -> None:
        for stream in (False, True):
            (refused,) = [found async for found in replica.answer(body.model_copy(update={"stream": stream}))]
            assert isinstance(refused, ApiError)
            copy = pickle.loads(pickle.dumps(refused))
            assert (copy.status, copy.body()) == (400, refused.body())

    asyncio.run(scene())


def test_caches_that_do_not_fit_are_refused_with_their_size(tiny_pair: Pair, eagle_pair: Pair) -> None:
    for pair in (tiny_pair, eagle_pair):
        for kept in (0, 50):
            engine = Engine(pair, num_slots=3, max_length=100, prefix_tokens=kept)
            assert cache_bytes(pair, 3, 100, kept) == engine.cache_bytes
    check_memory(tiny_pair, 3, 100, 300)
    complaint = r"num_slots 100000000 of 1000 tokens, prefix_tokens 0: the caches take [\d.]+ GiB, [\d.]+ GiB are"
    with pytest.raises(ValueError, match=complaint):
        check_memory(tiny_pair, 100_000_000, 1000, 0)


def test_another_policy_source_ends_the_watch(
    replica: Replica, registry: Registry, tiny_pair: Pair, tmp_path: Path
) -> None:
    crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (3,))
    replica.reconfigure(following(registry, tmp_path / "copies"))
    replica.reconfigure({"policy": 7})
    assert status(replica) == {"name": "block size 7", "version": None}


def test_a_look_that_has_begun_does_not_overrule_what_came_later(
    replica: Replica, registry: Registry, tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (3,))
    replica.reconfigure(following(registry, tmp_path / "copies"))
    watch = replica.policy.watch
    assert watch is not None
    crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (5,))
    asked, answered, copy = threading.Event(), threading.Event(), champions.copy_of

    def slow_copy(*arguments: Any) -> Path:
        asked.set()
        assert answered.wait(patient(20))
        return copy(*arguments)

    monkeypatch.setattr(champions, "copy_of", slow_copy)
    look = threading.Thread(target=watch.look)
    look.start()
    assert asked.wait(patient(20))
    replica.reconfigure({"policy": 7})
    answered.set()
    look.join(patient(20))
    assert not look.is_alive()
    assert status(replica) == {"name": "block size 7", "version": None}


def test_a_damaged_copy_is_made_anew(replica: Replica, registry: Registry, tiny_pair: Pair, tmp_path: Path) -> None:
    version = crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (3,))
    copy = champions.copy_of(registry, version, tmp_path / "copies")
    (copy / "policy.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        replica.reconfigure(following(registry, tmp_path / "copies"))
    replica.reconfigure(following(registry, tmp_path / "copies"))
    assert status(replica)["version"] == version.number


def test_copies_are_made_once(registry: Registry, tiny_pair: Pair, tmp_path: Path) -> None:
    crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (3,))
    used: list[Path] = []
    for _ in range(2):
        name = model_name(tiny_pair.id.target)
        ChampionWatch(name, registry.uri, tmp_path / "copies", NEVER_S, lambda path, number: used.append(path)).stop()
    assert used[0] == used[1]
    assert (used[0] / "policy.json").exists()


# --- step prices ---


def priced_policy(pair: Pair, folder: Path, seed: int, device: str = "another device") -> str:
    """The directory of a policy of kind `step` whose step price is of this device."""
    policy = step_policy(pair.id, 260, price=price(pair=pair.id, device=device, token_s=0.1), seed=seed)
    directory = folder / f"{device[:3]}-{seed}"
    save_policy(policy, directory)
    return str(directory)


@pytest.fixture
def timed(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests in flight whenever a price is measured."""
    found: list[int] = []

    def timing(*arguments: Any) -> StepPrice:
        found.append(replica.loop.num_in_flight)
        return measure_price(*arguments)

    monkeypatch.setattr("jobs.serving.policies.measure_price", timing)
    return found


def price_in_use(replica: Replica, client: TestClient) -> StepPrice:
    """Of the controller that decides on another request."""
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    return replica.loop.engine.controller.price


def test_the_price_of_a_step_is_measured_at_the_start_and_never_beside_decoding(
    replica: Replica, client: TestClient, tiny_pair: Pair, tmp_path: Path, timed: list[int]
) -> None:
    """Any later policy is weighed with the price of the start."""
    replica.reconfigure({"policy": priced_policy(tiny_pair, tmp_path, 0)})
    assert timed == [0]
    assert price_in_use(replica, client).device == device_name(tiny_pair.target.device)

    long = CHAT | {"max_tokens": 500}
    answers: list[dict[str, object]] = []
    in_flight = threading.Thread(target=lambda: answers.append(client.post("/v1/chat/completions", json=long).json()))
    in_flight.start()
    while not replica.loop.engine.num_active:
        pass
    replica.reconfigure({"policy": 3})
    replica.reconfigure({"policy": priced_policy(tiny_pair, tmp_path, 1)})
    assert replica.loop.num_in_flight == 1
    assert str(status(replica)["name"]).endswith("/ano-1")
    in_flight.join()
    assert answers[0]["usage"]["completion_tokens"] > 100  # type: ignore[index]
    assert price_in_use(replica, client).device == device_name(tiny_pair.target.device)
    assert timed == [0]


def test_a_server_that_starts_with_a_block_size_weighs_later_policies_with_prices_of_their_own(
    replica: Replica, client: TestClient, tiny_pair: Pair, tmp_path: Path, timed: list[int]
) -> None:
    replica.reconfigure({"policy": 2})
    replica.reconfigure({"policy": priced_policy(tiny_pair, tmp_path, 0)})
    assert price_in_use(replica, client).device == "another device"
    assert timed == []


def test_a_price_that_came_with_a_policy_of_this_device_is_that_of_later_ones(
    replica: Replica, client: TestClient, tiny_pair: Pair, tmp_path: Path, timed: list[int]
) -> None:
    here = device_name(tiny_pair.target.device)
    for device in (here, "another device"):
        replica.reconfigure({"policy": priced_policy(tiny_pair, tmp_path, 0, device)})
        assert price_in_use(replica, client).device == here
    assert timed == []


def test_without_a_champion_auto_serves_at_once_and_takes_the_first_one(
    replica: Replica, registry: Registry, tiny_pair: Pair, tmp_path: Path
) -> None:
    settings = {"store": f"sqlite:///{tmp_path / 'mlflow.db'}", "folder": str(tmp_path / "serve"), "follow_s": 0.2}
    with pytest.raises(ValueError, match="not found"):
        replica.reconfigure(settings | {"policy": "champion"})
    replica.reconfigure(settings | {"policy": "auto"})
    policy = asyncio.run(replica.status())["policy"]
    assert policy["name"] == "untrained"
    assert "not found" in policy["error"]
    crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (2, 3))
    wait_until(lambda: asyncio.run(replica.status())["policy"]["version"] == 1, 30, poll_s=0.1)


def test_auto_is_untrained_for_the_embedded_pair_too(embedded_pair: Pair, registry: Registry, tmp_path: Path) -> None:
    """The policies of the repository are served where they are asked for."""
    committed = Path(__file__).parents[3] / "workflows" / "policies" / "policy-step"
    policy = load_policy(committed)
    with replica_of(embedded_pair, num_slots=1, max_length=64) as replica:
        store = f"sqlite:///{tmp_path / 'mlflow.db'}"
        replica.reconfigure({"policy": "auto", "store": store, "folder": str(tmp_path), "follow_s": NEVER_S})
        assert status(replica)["name"] == "untrained"
        if policy.info.pair == embedded_pair.id:
            replica.reconfigure({"policy": str(committed)})
            assert status(replica) == {"name": str(committed), "version": None}
