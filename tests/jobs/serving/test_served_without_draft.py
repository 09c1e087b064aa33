"""Servers of a target without a draft: lookup by default, no policy of the registry, and no fixed block size."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from blockpilot.control.cost import NOMINAL
from blockpilot.pairs.loading import Pair, load_pair
from blockpilot.types import Sampling
from helpers.api import ask, client_of, replica_of
from helpers.engines import plain_text
from helpers.patience import wait_until
from helpers.servers import ROOT, free_port, serving
from jobs.common.config import PairConfig
from jobs.serve import ServeConfig
from jobs.serving.models import find_policy
from jobs.serving.replica import Replica

NUM = 40


@pytest.fixture(scope="module")
def alone(tiny_pair_dirs: tuple[Path, Path]) -> Pair:
    return load_pair(target=tiny_pair_dirs[0], dtype="float32")


@pytest.fixture
def replica(alone: Pair) -> Iterator[Replica]:
    with replica_of(alone, num_slots=2, max_length=256) as replica:
        yield replica


def test_auto_is_lookup_and_asks_no_registry(replica: Replica, alone: Pair, tmp_path: Path) -> None:
    replica.reconfigure({"policy": "auto", "store": f"sqlite:///{tmp_path}/none.db", "folder": str(tmp_path)})
    assert replica.policy.watch is None
    wait_until(lambda: replica.loop.engine.controller.price is not NOMINAL, limit_s=10)  # put by the engine's thread
    found = asyncio.run(replica.status())
    assert (found["draft"], found["policy"]) == ("none", {"name": "untrained", "version": None})
    assert (found["step_price_s"]["launch_s"], found["step_price_s"]["slot_s"]) == (0, 0)
    assert not [*tmp_path.iterdir()]
    prompt = [97, 98, 99, 100] * 8
    body = {"model": "target", "prompt": prompt, "max_tokens": NUM, "temperature": 0, "ignore_eos": True}
    with client_of(replica) as client:
        text = ask(client, "/v1/completions", body)
        expected = alone.tokenizer.decode(plain_text(alone, prompt, NUM, Sampling()), skip_special_tokens=True)
        assert text["choices"][0]["text"] == expected
        refused = client.post("/v1/completions", json=body | {"block_size": 4})
        assert refused.status_code == 400
        assert "block_size 4: the pair has no draft" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "block_size"


def test_policies_that_need_a_draft_are_refused(replica: Replica, tmp_path: Path) -> None:
    config = ServeConfig(pair=PairConfig(target=replica.pair.id.target))
    for policy in (4, "champion", str(tmp_path)):
        message = f"has no draft, policy {policy} needs one: --draft names one"
        with pytest.raises(ValueError, match=message):
            replica.reconfigure({"policy": policy})
        with pytest.raises(ValueError, match=message):
            find_policy(config.model_copy(update={"policy": str(policy)}), tmp_path)
    for policy in (1, "untrained"):
        replica.reconfigure({"policy": policy})
        assert find_policy(config.model_copy(update={"policy": str(policy)}), tmp_path) == policy
    assert find_policy(config, tmp_path) == "auto"


@pytest.mark.ray
def test_a_target_is_served_alone(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    port = free_port()
    settings = ["--target", str(tiny_pair_dirs[0]), "--dtype", "float32", "--port", str(port), "--num-slots", "2"]
    with serving([str(ROOT / "jobs/serve.py"), *settings], tmp_path, port) as server:
        said = (
            "with no draft (plain decoding plus what is looked up in each text; --draft names one), policy untrained"
        )
        assert said in server.process.log
        (model,) = httpx.get(f"{server.root}/health").json()["models"].values()
        assert model["draft"] == "none"
        client = openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0)
        answer = client.completions.create(model="target", prompt="a a a a a a a a", max_tokens=20, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        server.process.terminate()
        assert server.process.wait(60) == 0
