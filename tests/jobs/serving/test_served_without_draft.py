"""Replicas of a target without a draft: lookup by default, no policy of the registry, and no fixed block size."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from blockpilot.control.cost import NOMINAL
from blockpilot.pairs.loading import load_pair
from blockpilot.types import Sampling
from helpers.api import COMPLETIONS, ask, check_error, replica_of, text_of
from helpers.engines import plain_text
from helpers.patience import wait_until
from jobs.common.config import PairConfig
from jobs.serve import ServeConfig
from jobs.serving.models import find_policy
from jobs.serving.replica import Replica

NUM = 40


@pytest.fixture
def replica(tiny_pair_dirs: tuple[Path, Path]) -> Iterator[Replica]:
    alone = load_pair(target=tiny_pair_dirs[0], dtype="float32")
    with replica_of(alone, num_slots=2, max_length=256) as replica:
        yield replica


def test_auto_is_lookup_and_asks_no_registry(replica: Replica, client: TestClient, tmp_path: Path) -> None:
    replica.reconfigure({"policy": "auto", "store": f"sqlite:///{tmp_path}/none.db", "folder": str(tmp_path)})
    assert replica.policy.watch is None
    wait_until(lambda: replica.loop.engine.controller.price is not NOMINAL, limit_s=10)  # put by the engine's thread
    status = asyncio.run(replica.status())
    assert (status["draft"], status["policy"]) == ("none", {"name": "untrained", "version": None})
    assert (status["step_price_s"]["launch_s"], status["step_price_s"]["slot_s"]) == (0, 0)
    assert not [*tmp_path.iterdir()]
    prompt, pair = [97, 98, 99, 100] * 8, replica.pair
    body = {"model": "target", "prompt": prompt, "max_tokens": NUM, "temperature": 0, "ignore_eos": True}
    expected = pair.tokenizer.decode(plain_text(pair, prompt, NUM, Sampling()), skip_special_tokens=True)
    assert text_of(ask(client, COMPLETIONS, body)) == expected
    refused = client.post(COMPLETIONS, json=body | {"block_size": 4})
    assert refused.status_code == 400
    assert "block_size 4: the pair has no draft" in check_error(refused.json(), "block_size")["message"]


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
