"""Policies that the plug-in takes and refuses; none of this needs vLLM."""

from pathlib import Path
from typing import Any

import pytest
import torch

from blockpilot.control.controller import FixedPolicy
from blockpilot.policy.store import save_policy
from blockpilot.types import PairId, Prefill
from helpers.policies import tiny_policy
from helpers.prices import price
from jobs.common.config import ConfigError
from jobs.vllm_plugin.choice import Chooser
from jobs.vllm_plugin.policies import PluginSettings, PolicyFile, ServedPair, follow_policy

PAIR_ID = PairId("org/target", "1", "org/draft", "2")
PAIR = ServedPair("org/target@main", "org/draft", 50, 7)


def _followed(pair: ServedPair = PAIR, **settings: Any) -> Chooser:
    found: list[Chooser] = []
    assert follow_policy(PluginSettings(**settings), pair, found.append) is None
    (chooser,) = found
    return chooser


def _saved(folder: Path, **changes: Any) -> str:
    made = {"pair": PAIR_ID, "vocab_size": 50, "candidates": (1, 4, 8)} | changes
    save_policy(tiny_policy(**made), folder / "policy")
    return str(folder / "policy")


def _price_file(folder: Path) -> str:
    (folder / "price.json").write_text(price(token_s=0.01).to_json())
    return str(folder / "price.json")


def test_policy_of_a_directory_chooses_without_a_price_or_with_one(tmp_path: Path) -> None:
    directory = _saved(tmp_path)
    chooser = _followed(policy=directory)
    assert chooser.policy is not None
    assert chooser.policy(Prefill(torch.randn(50), None, 3)) in (1, 4, 8)
    assert chooser.controller is None
    priced = _followed(policy=directory, price=_price_file(tmp_path)).controller
    assert priced is not None
    assert priced.price == price(token_s=0.01)


def test_one_block_size_and_no_policy(tmp_path: Path) -> None:
    assert _followed(policy="5").policy == FixedPolicy(5)
    untrained = _followed(policy="untrained", price=_price_file(tmp_path))
    assert untrained.policy is None
    assert untrained.controller is not None


@pytest.mark.parametrize(
    ("changes", "pair", "error"),
    [
        (
            {"kind": "step", "sizes": (4, 4)},
            PAIR,
            "policy of kind 'step': .*; allowed: 'prompt'",
        ),
        (
            {},
            PAIR._replace(draft="/models/draft"),
            "made for target org/target with draft org/draft; this",
        ),
        ({}, PAIR._replace(num_drafted=3), "block size 8: num_speculative_tokens is 3; needed: 7"),
        ({}, PAIR._replace(vocab_size=60), "the policy's vocabulary is 50"),
    ],
)
def test_policies_that_do_not_fit_are_refused_by_name(
    changes: dict[str, Any], pair: ServedPair, error: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=error):
        _followed(pair, policy=_saved(tmp_path, **changes))


def test_a_policy_file_is_followed_and_what_it_cannot_name_changes_nothing(tmp_path: Path) -> None:
    file, found = tmp_path / "followed", list[Chooser]()
    file.write_text("5\n")
    watch = follow_policy(PluginSettings(policy=str(file)), PAIR, found.append)
    assert isinstance(watch, PolicyFile)
    assert [chooser.policy for chooser in found] == [FixedPolicy(5)]
    watch.look()
    assert len(found) == 1  # the file is the same
    for content in ("untrained", "/no/such/directory", _saved(tmp_path, kind="step", sizes=(4, 4))):
        _replace(file, content)
        watch.look()
    assert len(found) == 1
    _replace(file, "3")
    watch.look()
    assert found[-1].policy == FixedPolicy(3)
    file.unlink()
    watch.look()
    assert len(found) == 2


def _replace(file: Path, content: str) -> None:
    (new := file.with_suffix(".new")).write_text(content)
    new.replace(file)


def test_settings_that_choose_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"policy 'untrained': .* `price` is needed"):
        _followed(policy="untrained")
    with pytest.raises(ValueError, match=r"no such file"):
        _followed(policy=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="pollicy"):
        PluginSettings(**{"pollicy": "champion"})
