"""Following the registry's champion: new ones are used, and whatever goes wrong the policy stays."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.control.cost import StepPrice
from blockpilot.device import device_name
from blockpilot.evaluation.pricing import measure_price
from blockpilot.pairs.loading import Pair
from blockpilot.policy.learned import LearnedPolicy, PromptPolicy
from blockpilot.policy.store import load_policy, save_policy
from blockpilot.types import PairId
from helpers.api import CHAT, JsonObject, ask, replica_of
from helpers.patience import patient, wait_until
from helpers.policies import step_policy, tiny_policy
from helpers.prices import price
from jobs.common.registry import Registry, Version
from jobs.serving import champions
from jobs.serving.champions import ChampionWatch
from jobs.serving.replica import Replica

BODY = {"messages": [{"role": "user", "content": "Once"}], "model": "target", "temperature": 0, "max_tokens": 20}
NEVER_S = 3600.0
POLICIES = Path(__file__).parents[3] / "workflows" / "policies"
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture
def registry(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return Registry.open()


Crown = Callable[..., Version]


@pytest.fixture
def crown(registry: Registry, tiny_pair: Pair, tmp_path: Path) -> Crown:
    """Registers a policy, or one of these candidates, and makes it champion."""

    def crown_(*candidates: int, pair: PairId = tiny_pair.id, policy: LearnedPolicy | None = None) -> Version:
        directory = tmp_path / f"policy-{sum(1 for _ in tmp_path.glob('policy-*'))}"
        save_policy(policy or tiny_policy(pair, 260, candidates), directory)
        with registry.log_run("train") as record:
            target = tiny_pair.id.target
            version = registry.register_policy(directory, target=target, run_id=record.id, tags={})
        registry.set_champion(version)
        return version

    return crown_


@pytest.fixture
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    with replica_of(tiny_pair, num_slots=2, max_length=600, max_prefill_tokens=64, max_queue=4) as replica:
        yield replica


@pytest.fixture
def following(registry: Registry, tmp_path: Path) -> JsonObject:
    """Settings of a replica that follows the champion, and looks at it only when told."""
    return {"policy": "champion", "store": registry.uri, "follow_s": NEVER_S, "folder": str(tmp_path / "copies")}


@pytest.fixture
def first(replica: Replica, crown: Crown, following: JsonObject) -> Version:
    """A champion of block size 3, which the replica uses."""
    version = crown(3)
    replica.reconfigure(following)
    return version


def look(replica: Replica) -> JsonObject:
    """Look at the registry; what /health then says of the policy."""
    assert replica.policy.watch is not None
    replica.policy.watch.look()
    return status(replica)


def status(replica: Replica) -> JsonObject:
    policy: JsonObject = asyncio.run(replica.status())["policy"]
    return policy


def block_size(client: TestClient) -> int:
    return int(ask(client, CHAT, BODY)["usage"]["block_size"])


@contextmanager
def request_in_flight(replica: Replica, client: TestClient) -> Iterator[list[JsonObject]]:
    """A long request, which is answered at the end; the list then has its usage."""
    usages = list[JsonObject]()
    thread = threading.Thread(target=lambda: usages.append(ask(client, CHAT, BODY | {"max_tokens": 500})["usage"]))
    thread.start()
    while not replica.loop.engine.num_active:
        pass
    yield usages
    thread.join()
    assert usages[0]["completion_tokens"] > 100


@contextmanager
def damaged_store(tmp_path: Path) -> Iterator[None]:
    store = tmp_path / "mlflow.db"
    content = store.read_bytes()
    store.write_bytes(b"no database at all" * 1000)
    yield
    store.write_bytes(content)


def test_a_new_champion_is_used_for_new_requests_and_changes_no_text(
    replica: Replica, client: TestClient, crown: Crown, first: Version
) -> None:
    assert (status(replica)["version"], status(replica)["follows"]) == (first.number, first.name)
    before = ask(client, CHAT, BODY)
    with request_in_flight(replica, client) as usages:
        second = crown(5)
        assert look(replica)["version"] == second.number
        after = ask(client, CHAT, BODY)
    assert (before["usage"]["block_size"], after["usage"]["block_size"]) == (3, 5)
    assert before["choices"] == after["choices"]
    assert usages[0]["block_size"] == 3


def test_an_outage_keeps_the_policy_and_is_reported_until_it_is_over(
    replica: Replica, client: TestClient, crown: Crown, first: Version, tmp_path: Path
) -> None:
    crown(5)
    with damaged_store(tmp_path):
        assert "mlflow.db" in look(replica)["error"]
        assert status(replica)["version"] == first.number
        assert block_size(client) == 3
    assert look(replica)["error"] is None
    assert block_size(client) == 5


def test_a_refused_champion_is_reported_and_tried_once(
    replica: Replica,
    client: TestClient,
    registry: Registry,
    crown: Crown,
    first: Version,
    tiny_pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of another revision; until the registry has named another, /health says why it is not used."""
    copied, download = list[int](), Registry.download

    def counted(self: Registry, version: Version, directory: Path) -> Path:
        copied.append(version.number)
        return download(self, version, directory)

    monkeypatch.setattr(Registry, "download", counted)
    refused = crown(5, pair=tiny_pair.id._replace(draft_revision="0123abcd"))
    for _ in range(2):
        assert "0123abcd" in look(replica)["error"]
        assert tiny_pair.id.draft_revision in status(replica)["error"]
    assert status(replica)["version"] == first.number
    assert block_size(client) == 3
    with damaged_store(tmp_path):
        assert "mlflow.db" in look(replica)["error"]
    assert "0123abcd" in look(replica)["error"]
    assert copied == [refused.number]
    registry.set_champion(first)
    policy = look(replica)
    assert (policy["version"], policy["error"]) == (first.number, None)
    registry.set_champion(refused)
    assert "0123abcd" in look(replica)["error"]
    assert copied == [refused.number] * 2
    third = crown(6)
    policy = look(replica)
    assert (policy["version"], policy["error"]) == (third.number, None)


def test_a_champion_that_fails_where_it_decides_is_not_used(
    replica: Replica,
    client: TestClient,
    crown: Crown,
    first: Version,
    tiny_pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One with a block size that no engine verifies, and one of each kind that fails in an engine."""
    crown(3, 33)
    assert "block size 33: must be at most 32" in look(replica)["error"]

    def fail(*_: object) -> None:
        raise RuntimeError("no choice")

    by_kind = {PromptPolicy: tiny_policy(tiny_pair.id, 260, (1, 4)), AcceptanceModel: step_policy(tiny_pair.id, 260)}
    for broken, policy in by_kind.items():
        with monkeypatch.context() as while_tried:
            while_tried.setattr(broken, "__call__" if broken is PromptPolicy else "propose", fail)
            crown(policy=policy)
            assert "fails when it is tried (RuntimeError: no choice)" in look(replica)["error"]
        assert status(replica)["version"] == first.number
    assert block_size(client) == 3


def test_a_champion_of_kind_step_is_the_prior_of_every_choice(
    replica: Replica, client: TestClient, crown: Crown, first: Version, tiny_pair: Pair
) -> None:
    """Its kind may change: each fixes block sizes, or leaves rows to a controller that starts with its weights."""
    policy, engine = step_policy(tiny_pair.id, 260), replica.loop.engine
    before = ask(client, CHAT, BODY)
    assert isinstance(engine.policy, PromptPolicy)
    second = crown(policy=policy)
    told = look(replica)
    assert (told["version"], told["error"]) == (second.number, None)
    ask(client, CHAT, BODY | {"max_tokens": 1})
    assert engine.policy is None
    assert np.array_equal(engine.controller.model.weights, policy.weights)
    assert ask(client, CHAT, BODY)["choices"] == before["choices"]
    third = crown(6)
    assert look(replica)["version"] == third.number
    assert block_size(client) == 6
    assert not engine.controller.model.weights.any()


def test_whatever_a_look_meets_the_watch_goes_on(registry: Registry, crown: Crown, tmp_path: Path) -> None:
    name = crown(3).name
    errors: list[Exception] = [TypeError("no such thing"), RuntimeError("out of memory"), MemoryError("none left")]
    used = threading.Event()

    def use(directory: Path, number: int) -> None:
        if errors:
            raise errors.pop()
        used.set()

    watch = ChampionWatch(name, registry.uri, tmp_path / "copies", 0.02, use)
    assert watch.error == "none left"
    watch.follow()
    assert used.wait(patient(20))
    watch.stop()


def test_a_replica_that_starts_without_the_registry_uses_the_last_copy(
    replica: Replica, registry: Registry, crown: Crown, following: JsonObject, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="blockpilot-target"):
        replica.reconfigure(following)
    for candidate in (3, 5):
        name = crown(candidate).name
        ChampionWatch(name, registry.uri, tmp_path / "copies", NEVER_S, lambda path, number: None).stop()
    replica.reconfigure(following | {"store": f"sqlite:///{tmp_path / 'nowhere' / 'mlflow.db'}"})
    assert status(replica)["version"] == 2
    assert "nowhere" in status(replica)["error"]


def test_a_look_that_has_begun_does_not_overrule_what_came_later(
    replica: Replica, crown: Crown, first: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = replica.policy.watch
    assert watch is not None
    crown(5)
    asked, answered, copy = threading.Event(), threading.Event(), champions.copy_of

    def slow_copy(*arguments: Any) -> Path:
        asked.set()
        assert answered.wait(patient(20))
        return copy(*arguments)

    monkeypatch.setattr(champions, "copy_of", slow_copy)
    thread = threading.Thread(target=watch.look)
    thread.start()
    assert asked.wait(patient(20))
    replica.reconfigure({"policy": 7})
    answered.set()
    thread.join(patient(20))
    assert not thread.is_alive()
    assert status(replica) == {"name": "block size 7", "version": None}


def test_a_damaged_copy_is_made_anew(
    replica: Replica, registry: Registry, crown: Crown, following: JsonObject, tmp_path: Path
) -> None:
    version = crown(3)
    copy = champions.copy_of(registry, version, tmp_path / "copies")
    made = (copy / "policy.json").stat().st_mtime_ns
    assert champions.copy_of(registry, version, tmp_path / "copies") == copy
    assert (copy / "policy.json").stat().st_mtime_ns == made
    (copy / "policy.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        replica.reconfigure(following)
    replica.reconfigure(following)
    assert status(replica)["version"] == version.number


def test_without_a_champion_auto_serves_at_once_and_takes_the_first_one(
    replica: Replica, crown: Crown, following: JsonObject
) -> None:
    with pytest.raises(ValueError, match="not found"):
        replica.reconfigure(following)
    replica.reconfigure(following | {"policy": "auto", "follow_s": 0.1})
    assert status(replica)["name"] == "untrained"
    assert "not found" in status(replica)["error"]
    crown(2, 3)
    wait_until(lambda: status(replica)["version"] == 1, 30)


def test_the_policies_of_the_repository_are_served_where_they_are_asked_for(embedded_pair: Pair) -> None:
    policy = str(POLICIES / "policy-step")
    if load_policy(policy).info.pair != embedded_pair.id:
        pytest.skip("they are of another revision of the pair")
    with replica_of(embedded_pair, num_slots=1, max_length=64) as replica:
        replica.reconfigure({"policy": 1})  # so that no price is measured
        replica.reconfigure({"policy": policy})
        assert status(replica) == {"name": policy, "version": None}


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
    nums_in_flight = list[int]()

    def timing(*arguments: Any) -> StepPrice:
        nums_in_flight.append(replica.loop.num_in_flight)
        return measure_price(*arguments)

    monkeypatch.setattr("jobs.serving.policies.kept_price", timing)
    return nums_in_flight


def priced_device(replica: Replica, client: TestClient) -> str:
    """Where the step price in use was measured: that of the controller of another request."""
    ask(client, CHAT, BODY)
    return replica.loop.engine.controller.price.device


def test_the_price_of_a_step_is_measured_at_the_start_and_never_beside_decoding(
    replica: Replica, client: TestClient, tiny_pair: Pair, tmp_path: Path, timed: list[int]
) -> None:
    """Any later policy is weighed with the price of the start."""
    here = device_name(tiny_pair.target.device)
    replica.reconfigure({"policy": priced_policy(tiny_pair, tmp_path, 0)})
    assert timed == [0]
    assert priced_device(replica, client) == here
    with request_in_flight(replica, client):
        replica.reconfigure({"policy": 3})
        replica.reconfigure({"policy": priced_policy(tiny_pair, tmp_path, 1)})
        assert replica.loop.num_in_flight == 1
        assert str(status(replica)["name"]).endswith("/ano-1")
    assert priced_device(replica, client) == here
    assert timed == [0]


def test_prices_that_come_with_policies_are_used_where_none_was_measured_and_kept_where_they_are_of_this_device(
    replica: Replica, client: TestClient, tiny_pair: Pair, tmp_path: Path, timed: list[int]
) -> None:
    here = device_name(tiny_pair.target.device)
    replica.reconfigure({"policy": 2})  # a server that starts so measures nothing
    for device, expected in (("another device", "another device"), (here, here), ("another device", here)):
        replica.reconfigure({"policy": priced_policy(tiny_pair, tmp_path, 0, device)})
        assert priced_device(replica, client) == expected
    assert timed == []
