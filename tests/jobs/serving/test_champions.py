"""Following the registry's champion: new ones are used, and whatever goes wrong the policy stays."""

import asyncio
import json
import pickle
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from blockpilot.engine.engine import Engine, cache_bytes
from blockpilot.pairs.loading import Pair
from blockpilot.policy.store import save_policy
from blockpilot.types import PairId
from helpers.policies import tiny_policy
from jobs.common.config import PairConfig
from jobs.common.registry import Registry, Version, model_name
from jobs.serving.api import make_app
from jobs.serving.champions import ChampionWatch
from jobs.serving.replica import Decoder, check_memory
from jobs.serving.schema import ApiError, ChatRequest, parse

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
    directory = folder / f"policy-{'-'.join(map(str, candidates))}"
    save_policy(tiny_policy(pair_id, 260, candidates), directory)
    with registry.log_run("train") as record:
        version = registry.register_policy(directory, target=target, run_id=record.id, tags={})
    registry.set_champion(version)
    return version


@pytest.fixture
def decoder(tiny_pair_dirs: tuple[Path, Path]) -> Iterator[Decoder]:
    """A replica as Serve makes it, in this process."""
    target, draft = tiny_pair_dirs
    decoder = Decoder(
        PairConfig(target=str(target), draft=str(draft)),
        num_threads=1,
        num_slots=2,
        max_length=600,
        max_prefill_tokens=64,
        max_queue=4,
        max_new_tokens=None,
        stream_interval_s=0.0,
        logs_prompts=False,
    )
    yield decoder
    if decoder._watch is not None:
        decoder._watch.stop()
    decoder._backend.loop.close()


@pytest.fixture
def client(decoder: Decoder) -> Iterator[TestClient]:
    with TestClient(make_app({"target": decoder._backend})) as client:
        yield client


def following(registry: Registry, folder: Path) -> dict[str, object]:
    return {"policy": "champion", "store": registry.uri, "follow_s": NEVER_S, "folder": str(folder)}


def status(decoder: Decoder) -> dict[str, object]:
    """Of the policy, as /health tells it."""
    found = asyncio.run(decoder.status())["policy"]
    assert isinstance(found, dict)
    return found


def test_a_new_champion_is_used_for_new_requests_and_changes_no_text(
    decoder: Decoder, client: TestClient, registry: Registry, tiny_pair: Pair, tmp_path: Path
) -> None:
    target = tiny_pair.id.target
    first = crown(registry, tmp_path, tiny_pair.id, target, (3,))
    decoder.reconfigure(following(registry, tmp_path / "copies"))
    assert (status(decoder)["version"], status(decoder)["follows"]) == (first.number, model_name(target))
    before = client.post("/v1/chat/completions", json=CHAT).json()

    answers: list[dict[str, object]] = []
    long = CHAT | {"max_tokens": 500}
    in_flight = threading.Thread(target=lambda: answers.append(client.post("/v1/chat/completions", json=long).json()))
    in_flight.start()
    while not decoder._backend.loop.engine.num_active:
        pass
    second = crown(registry, tmp_path, tiny_pair.id, target, (5,))
    assert decoder._watch is not None
    decoder._watch.look()
    assert status(decoder)["version"] == second.number
    after = client.post("/v1/chat/completions", json=CHAT).json()
    in_flight.join()
    assert (before["usage"]["block_size"], after["usage"]["block_size"]) == (3, 5)
    assert before["choices"] == after["choices"]
    assert answers[0]["usage"]["block_size"] == 3  # type: ignore[index]
    assert answers[0]["usage"]["completion_tokens"] > 100  # type: ignore[index]


def test_it_looks_by_itself(decoder: Decoder, registry: Registry, tiny_pair: Pair, tmp_path: Path) -> None:
    crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (3,))
    decoder.reconfigure(following(registry, tmp_path / "copies") | {"follow_s": 0.05})
    second = crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (5,))
    arrived = threading.Event()
    for _ in range(200):
        if status(decoder)["version"] == second.number:
            break
        arrived.wait(0.05)
    assert status(decoder)["version"] == second.number


def test_an_outage_keeps_the_policy_and_is_reported_until_it_is_over(
    decoder: Decoder, client: TestClient, registry: Registry, tiny_pair: Pair, tmp_path: Path
) -> None:
    first = crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (3,))
    decoder.reconfigure(following(registry, tmp_path / "copies"))
    assert decoder._watch is not None
    crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (5,))
    store, kept = tmp_path / "mlflow.db", (tmp_path / "mlflow.db").read_bytes()
    store.write_bytes(b"no database at all" * 1000)
    decoder._watch.look()
    assert status(decoder)["version"] == first.number
    assert "mlflow.db" in str(status(decoder)["error"])
    assert client.post("/v1/chat/completions", json=CHAT).json()["usage"]["block_size"] == 3
    store.write_bytes(kept)
    decoder._watch.look()
    assert status(decoder)["error"] is None
    assert client.post("/v1/chat/completions", json=CHAT).json()["usage"]["block_size"] == 5


def test_a_champion_of_another_pair_is_refused_and_reported(
    decoder: Decoder, client: TestClient, registry: Registry, tiny_pair: Pair, tmp_path: Path
) -> None:
    target = tiny_pair.id.target
    first = crown(registry, tmp_path, tiny_pair.id, target, (3,))
    decoder.reconfigure(following(registry, tmp_path / "copies"))
    assert decoder._watch is not None
    crown(registry, tmp_path, tiny_pair.id._replace(draft_revision="0123abcd"), target, (5,))
    decoder._watch.look()
    assert status(decoder)["version"] == first.number
    assert "0123abcd" in str(status(decoder)["error"])
    assert client.post("/v1/chat/completions", json=CHAT).json()["usage"]["block_size"] == 3
    third = crown(registry, tmp_path, tiny_pair.id, target, (6,))
    decoder._watch.look()
    assert (status(decoder)["version"], status(decoder)["error"]) == (third.number, None)


def test_a_replica_that_starts_without_the_registry_uses_the_last_copy(
    decoder: Decoder, registry: Registry, tiny_pair: Pair, tmp_path: Path
) -> None:
    folder, name = tmp_path / "copies", model_name(tiny_pair.id.target)
    with pytest.raises(ValueError, match="blockpilot-target"):
        decoder.reconfigure(following(registry, folder))
    for candidates in ((3,), (5,)):
        crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, candidates)
        ChampionWatch(name, registry.uri, folder, NEVER_S, lambda path, number: None).stop()
    nowhere = f"sqlite:///{tmp_path / 'nowhere' / 'mlflow.db'}"
    decoder.reconfigure(following(registry, folder) | {"store": nowhere})
    assert status(decoder)["version"] == 2
    assert "nowhere" in str(status(decoder)["error"])


def test_a_policy_of_another_revision_is_refused_by_name(
    decoder: Decoder, client: TestClient, tiny_pair: Pair, tmp_path: Path
) -> None:
    decoder.reconfigure({"policy": 4})
    save_policy(tiny_policy(tiny_pair.id._replace(draft_revision="0123abcd"), 260, (2, 3)), tmp_path / "policy")
    with pytest.raises(ValueError, match="0123abcd") as error:
        decoder.reconfigure({"policy": str(tmp_path / "policy")})
    assert tiny_pair.id.draft_revision in str(error.value)
    assert client.post("/v1/chat/completions", json=CHAT).json()["usage"]["block_size"] == 4


def test_broken_engine_fails_the_health_check(decoder: Decoder) -> None:
    decoder.check_health()
    decoder._backend.loop.close()
    with pytest.raises(RuntimeError, match="broken"):
        decoder.check_health()


def test_what_is_refused_comes_back_as_a_value(decoder: Decoder) -> None:
    """Serve takes what a replica raises for a failure."""
    body = parse(ChatRequest, json.dumps(CHAT | {"max_tokens": 10_000}).encode())

    async def scene() -> None:
        whole = await decoder.whole(body)
        (chunk,) = [chunk async for chunk in decoder.chunks(body)]
        for refused in (whole, chunk):
            assert isinstance(refused, ApiError)
            copy = pickle.loads(pickle.dumps(refused))
            assert (copy.status, copy.body()) == (400, refused.body())

    asyncio.run(scene())


def test_caches_that_do_not_fit_are_refused_with_their_size(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=3, max_length=100)
    assert cache_bytes(tiny_pair, 3, 100) == engine.cache_bytes
    check_memory(tiny_pair, 3, 100)
    complaint = r"num_slots 100000000 of 1000 tokens: the caches take [\d.]+ GiB, [\d.]+ GiB are free"
    with pytest.raises(ValueError, match=complaint):
        check_memory(tiny_pair, 100_000_000, 1000)


def test_a_policy_by_name_ends_the_watch(
    decoder: Decoder, registry: Registry, tiny_pair: Pair, tmp_path: Path
) -> None:
    crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (3,))
    decoder.reconfigure(following(registry, tmp_path / "copies"))
    decoder.reconfigure({"policy": 7})
    assert status(decoder) == {"name": "block size 7", "version": None}


def test_copies_are_made_once(registry: Registry, tiny_pair: Pair, tmp_path: Path) -> None:
    crown(registry, tmp_path, tiny_pair.id, tiny_pair.id.target, (3,))
    used: list[Path] = []
    for _ in range(2):
        name = model_name(tiny_pair.id.target)
        ChampionWatch(name, registry.uri, tmp_path / "copies", NEVER_S, lambda path, number: used.append(path)).stop()
    assert used[0] == used[1]
    assert (used[0] / "policy.json").exists()
