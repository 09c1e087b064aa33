"""Following the registry's champion: a new one is used, and after any error the present policy stays."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.control.cost import StepPrice
from blockpilot.device import device_name
from blockpilot.evaluation.pricing import measure_price
from blockpilot.pairs.loading import Pair
from blockpilot.policy.learned import LearnedPolicy, PromptPolicy
from blockpilot.policy.store import load_policy, save_policy
from blockpilot.types import PairId
from helpers.api import ApiClient, replica_of, until
from helpers.bodies import CHAT, JsonObject
from helpers.patience import patient, wait_until
from helpers.policies import register, step_policy, tiny_policy
from helpers.prices import price
from jobs.common.registry import Registry, Version
from jobs.serving import champions
from jobs.serving.champions import ChampionWatch
from jobs.serving.policies import PolicyInUse
from jobs.serving.replica import Replica

BODY = {"messages": [{"role": "user", "content": "Once"}], "temperature": 0, "max_tokens": 20}
NEVER_S = 3600.0
POLICIES = Path(__file__).parents[3] / "workflows" / "policies"
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


class Followed:
    """A replica, a client of it, and a registry whose champion it can follow."""

    def __init__(self, replica: Replica, client: ApiClient, pair: Pair, folder: Path) -> None:
        self.replica, self.client, self.pair, self.folder = replica, client, pair, folder
        self.registry = Registry.open()
        self.settings: JsonObject = {
            "policy": "champion", "store": self.registry.uri, "follow_s": NEVER_S, "folder": str(folder / "copies")
        }  # fmt: skip

    def crown(self, *candidates: int, pair: PairId | None = None, policy: LearnedPolicy | None = None) -> Version:
        """Register `policy`, or one with these candidate block sizes, and make it champion."""
        directory = self.folder / f"policy-{sum(1 for _ in self.folder.glob('policy-*'))}"
        save_policy(policy or tiny_policy(pair or self.pair.id, 260, candidates), directory)
        version = register(self.registry, directory, self.pair.id)
        self.registry.set_champion(version)
        return version

    def follow(self, *candidates: int) -> Version:
        """New champion, which the replica uses from now on; it polls the registry again only in `look`."""
        version = self.crown(*candidates)
        self.configure()
        return version

    def configure(self, **settings: object) -> None:
        self.replica.reconfigure(self.settings | settings)

    def look(self) -> JsonObject:
        """Poll the registry; returns the policy's part of /health afterwards."""
        assert self.replica.policy.watch is not None
        self.replica.policy.watch.look()
        return self.status

    @property
    def status(self) -> JsonObject:
        policy: JsonObject = asyncio.run(self.replica.status())["policy"]
        return policy

    @property
    def block_size(self) -> int:
        return int(self.client.ask(CHAT, BODY)["usage"]["block_size"])

    @property
    def priced_device(self) -> str:
        """Device of the step cost in use, read from the controller after another request."""
        self.client.ask(CHAT, BODY)
        return self.replica.loop.engine.controller.price.device

    @contextmanager
    def request_in_flight(self) -> Iterator[list[JsonObject]]:
        """Long request during the block; at its end the request is answered and the list has its usage."""
        usages, body = list[JsonObject](), BODY | {"max_tokens": 500}
        thread = threading.Thread(target=lambda: usages.append(self.client.ask(CHAT, body)["usage"]))
        thread.start()
        until(lambda: self.replica.loop.engine.num_active == 1)
        yield usages
        thread.join()
        assert usages[0]["completion_tokens"] > 100

    @contextmanager
    def damaged_store(self) -> Iterator[None]:
        store = self.folder / "mlflow.db"
        content = store.read_bytes()
        store.write_bytes(b"no database at all" * 1000)
        yield
        store.write_bytes(content)


@pytest.fixture
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    with replica_of(tiny_pair, num_slots=2, max_length=600, max_prefill_tokens=64, max_queue=4) as replica:
        yield replica


@pytest.fixture
def followed(
    replica: Replica,
    client: ApiClient,
    tiny_pair: Pair,
    empty_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Followed:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return Followed(replica, client, tiny_pair, tmp_path)


def test_a_new_champion_is_used_for_new_requests_and_changes_no_text(followed: Followed) -> None:
    first, ask = followed.follow(3), followed.client.ask
    assert (followed.status["version"], followed.status["follows"]) == (first.number, first.name)
    before = ask(CHAT, BODY)
    with followed.request_in_flight() as usages:
        second = followed.crown(5)
        assert followed.look()["version"] == second.number
        after = ask(CHAT, BODY)
    assert (before["usage"]["block_size"], after["usage"]["block_size"]) == (3, 5)
    assert before["choices"] == after["choices"]
    assert usages[0]["block_size"] == 3


def test_an_outage_keeps_the_policy_and_is_reported_until_it_is_over(followed: Followed) -> None:
    first = followed.follow(3)
    followed.crown(5)
    with followed.damaged_store():
        assert "mlflow.db" in followed.look()["error"]
        assert followed.status["version"] == first.number
        assert followed.replica.policy.champion() == (first.number, True)
        assert followed.block_size == 3
    assert followed.look()["error"] is None
    assert followed.block_size == 5


def test_a_refused_champion_is_reported_and_tried_once(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Champion of another revision; until the registry has another one, /health says why it is not used."""
    first, pair = followed.follow(3), followed.pair.id
    copied, download = list[int](), Registry.download

    def counted(self: Registry, version: Version, directory: Path) -> Path:
        copied.append(version.number)
        return download(self, version, directory)

    monkeypatch.setattr(Registry, "download", counted)
    refused = followed.crown(5, pair=pair._replace(draft_revision="0123abcd"))
    for _ in range(2):
        assert "0123abcd" in followed.look()["error"]
        assert pair.draft_revision in followed.status["error"]
    assert followed.status["version"] == first.number
    assert followed.block_size == 3
    with followed.damaged_store():
        assert "mlflow.db" in followed.look()["error"]
    assert "0123abcd" in followed.look()["error"]
    assert copied == [refused.number]
    followed.registry.set_champion(first)
    policy = followed.look()
    assert (policy["version"], policy["error"]) == (first.number, None)
    followed.registry.set_champion(refused)
    assert "0123abcd" in followed.look()["error"]
    assert copied == [refused.number] * 2
    third, policy = followed.crown(6), followed.look()
    assert (policy["version"], policy["error"]) == (third.number, None)


def test_a_champion_that_fails_where_it_decides_is_not_used(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Champion with a block size above the engine's limit, and one of each kind that fails in an engine."""
    first, pair = followed.follow(3), followed.pair.id
    followed.crown(3, 33)
    assert "block size 33: must be at most 32" in followed.look()["error"]

    def fail(*_: object) -> None:
        raise RuntimeError("no choice")

    by_kind = {PromptPolicy: tiny_policy(pair, 260, (1, 4)), AcceptanceModel: step_policy(pair, 260)}
    for broken, policy in by_kind.items():
        with monkeypatch.context() as patch:
            patch.setattr(broken, "__call__" if broken is PromptPolicy else "propose", fail)
            followed.crown(policy=policy)
            assert "fails when it is tried (RuntimeError: no choice)" in followed.look()["error"]
        assert followed.status["version"] == first.number
    assert followed.block_size == 3


def test_a_champion_of_kind_step_is_the_prior_of_every_choice(followed: Followed) -> None:
    """Change of the champion's kind: it fixes block sizes, or is the prior of the controller that selects them."""
    followed.follow(3)
    policy, engine, ask = step_policy(followed.pair.id, 260), followed.replica.loop.engine, followed.client.ask
    before = ask(CHAT, BODY)
    assert isinstance(engine.policy, PromptPolicy)
    second, status = followed.crown(policy=policy), followed.look()
    assert (status["version"], status["error"]) == (second.number, None)
    ask(CHAT, BODY | {"max_tokens": 1})
    assert engine.policy is None
    assert np.array_equal(engine.controller.model.weights, policy.weights)
    assert ask(CHAT, BODY)["choices"] == before["choices"]
    third = followed.crown(6)
    assert followed.look()["version"] == third.number
    assert followed.block_size == 6
    assert not engine.controller.model.weights.any()


def test_whatever_a_look_meets_the_watch_goes_on(followed: Followed) -> None:
    errors: list[Exception] = [TypeError("no such thing"), RuntimeError("out of memory"), MemoryError("none left")]
    used = threading.Event()

    def use(directory: Path, number: int) -> None:
        if errors:
            raise errors.pop()
        used.set()

    name, store = followed.crown(3).name, followed.registry.uri
    watch = ChampionWatch(name, store, followed.folder / "copies", 0.02, use)
    assert watch.error == "none left"
    watch.follow()
    assert used.wait(patient(20))
    watch.stop()


def test_a_replica_that_starts_without_the_registry_uses_the_last_copy(followed: Followed) -> None:
    with pytest.raises(ValueError, match="blockpilot-target"):
        followed.configure()
    for candidate in (3, 5):
        name, copies = followed.crown(candidate).name, followed.folder / "copies"
        ChampionWatch(name, followed.registry.uri, copies, NEVER_S, lambda path, number: None).stop()
    followed.configure(store=f"sqlite:///{followed.folder / 'nowhere' / 'mlflow.db'}")
    assert followed.status["version"] == 2
    assert "nowhere" in followed.status["error"]


def test_a_replica_that_starts_without_the_registry_uses_the_copy_that_was_used_last(followed: Followed) -> None:
    """Champion set back to the first version, whose copy is older and was used later than that of the second."""
    first = followed.follow(3)
    followed.crown(5)
    followed.look()
    followed.registry.set_champion(first)
    assert followed.look()["version"] == first.number
    followed.replica.policy = PolicyInUse(followed.pair, followed.replica.loop)  # as at a start
    followed.configure(store=f"sqlite:///{followed.folder / 'nowhere' / 'mlflow.db'}")
    assert followed.status["version"] == first.number


def test_the_first_version_of_a_new_store_is_another_champion(followed: Followed, empty_store: Path) -> None:
    assert followed.follow(3).number == 1
    shutil.copy(empty_store, followed.folder / "mlflow.db")
    assert followed.crown(5).number == 1
    assert (followed.look()["error"], followed.block_size) == (None, 5)


def test_a_look_that_has_begun_does_not_overrule_what_came_later(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.follow(3)
    copy_started, copy_released, copy = threading.Event(), threading.Event(), champions.copy_of
    followed.crown(5)

    def slow_copy(*arguments: Any) -> Path:
        copy_started.set()
        assert copy_released.wait(patient(20))
        return copy(*arguments)

    monkeypatch.setattr(champions, "copy_of", slow_copy)
    thread = threading.Thread(target=followed.look)
    thread.start()
    assert copy_started.wait(patient(20))
    followed.replica.reconfigure({"policy": 7})
    copy_released.set()
    thread.join(patient(20))
    assert not thread.is_alive()
    assert followed.status == {"name": "block size 7", "version": None}


def test_a_damaged_copy_is_made_anew(followed: Followed) -> None:
    version, copies = followed.crown(3), followed.folder / "copies"
    copy = champions.copy_of(followed.registry, version, copies)
    mtime_ns = (copy / "policy.json").stat().st_mtime_ns
    assert champions.copy_of(followed.registry, version, copies) == copy
    assert (copy / "policy.json").stat().st_mtime_ns == mtime_ns
    (copy / "policy.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        followed.configure()
    followed.configure()
    assert followed.status["version"] == version.number


def test_without_a_champion_auto_serves_at_once_and_takes_the_first_one(followed: Followed) -> None:
    with pytest.raises(ValueError, match="not found"):
        followed.configure()
    followed.configure(policy="auto", follow_s=0.1)
    assert followed.status["name"] == "untrained"
    assert "not found" in followed.status["error"]
    assert followed.replica.policy.champion() == (0, False)  # none that cannot be used
    followed.crown(2, 3)
    wait_until(lambda: followed.status["version"] == 1, 30)


def test_auto_without_a_champion_ends_a_fixed_block_size(followed: Followed) -> None:
    """Change of a running replica; a champion in use stays where the registry fails."""
    followed.replica.reconfigure({"policy": 4})
    followed.configure(policy="auto")
    assert followed.status["name"] == "untrained"
    version = followed.crown(3)
    assert followed.look()["version"] == version.number
    with followed.damaged_store():
        followed.configure(policy="auto")
        assert followed.status["version"] == version.number


def test_the_policies_of_the_repository_are_served_where_they_are_asked_for(embedded_pair: Pair) -> None:
    policy = str(POLICIES / "policy-step")
    if load_policy(policy).info.pair != embedded_pair.id:
        pytest.skip("they are of another revision of the pair")
    with replica_of(embedded_pair, num_slots=1, max_length=64) as replica:
        replica.reconfigure({"policy": 1})  # so that no price is measured
        replica.reconfigure({"policy": policy})
        assert asyncio.run(replica.status())["policy"] == {"name": policy, "version": None}


# --- step prices ---


def priced_policy(followed: Followed, seed: int, device: str = "another device") -> str:
    """Directory of a policy of kind `step` with a step price of this device."""
    pair, directory = followed.pair.id, followed.folder / f"{device[:3]}-{seed}"
    save_policy(step_policy(pair, 260, price=price(pair=pair, device=device, token_s=0.1), seed=seed), directory)
    return str(directory)


def test_the_price_of_a_step_is_measured_at_the_start_and_never_beside_decoding(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured price, also used for later policies. A policy's price is used if none was measured, and kept if it is
    of this device."""
    replica, this_device, other_device = followed.replica, device_name(followed.pair.target.device), "another device"
    nums_in_flight = list[int]()

    def timing(*arguments: Any) -> StepPrice:
        nums_in_flight.append(replica.loop.num_in_flight)
        return measure_price(*arguments)

    monkeypatch.setattr("jobs.serving.policies.kept_price", timing)
    replica.reconfigure({"policy": 2})  # a start with a block size measures nothing
    for device, expected in ((other_device, other_device), (this_device, this_device), (other_device, this_device)):
        replica.reconfigure({"policy": priced_policy(followed, 0, device)})
        assert followed.priced_device == expected
    assert nums_in_flight == []

    replica.policy = PolicyInUse(followed.pair, replica.loop)  # as at a start
    replica.reconfigure({"policy": priced_policy(followed, 0)})
    with followed.request_in_flight():
        replica.reconfigure({"policy": 3})
        replica.reconfigure({"policy": priced_policy(followed, 1)})
        assert replica.loop.num_in_flight == 1
        assert str(followed.status["name"]).endswith("/ano-1")
    assert followed.priced_device == this_device
    assert nums_in_flight == [0]
