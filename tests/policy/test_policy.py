"""Policies: the sparse network equals the dense one; a directory loads as saved, or an error names the damage."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blockpilot.control.acceptance import UNTRAINED
from blockpilot.control.controller import FixedPolicy
from blockpilot.engine.engine import Engine
from blockpilot.engine.trees import MAX_DEPTH
from blockpilot.pairs.loading import Pair
from blockpilot.policy.learned import (
    WEIGHT_NAMES,
    Kind,
    LearnedPolicy,
    Objective,
    PromptInfo,
    PromptPolicy,
    StepInfo,
    StepPolicy,
)
from blockpilot.policy.network import NetworkShape, PolicyNetwork, SparseProbs, sparse_probs
from blockpilot.policy.store import load_policy, save_policy
from blockpilot.types import CandidateSet, PairId, Prefill, Request
from helpers.engines import NEVER, run, text_of
from helpers.policies import step_policy as tiny_step_policy
from helpers.policies import tiny_policy
from helpers.prices import price

VOCAB_SIZE, HIDDEN, THRESHOLD = 50, 16, 0.01
CANDIDATES = CandidateSet((1, 2, 4, 8))
PAIR = PairId("org/Target", "1111", "org/draft", "2222")
PRICE = price(pair=PAIR, base_s=1.0, row_s=0.2, launch_s=0.3, slot_s=0.04, token_s=0.1, error=0.05)
KINDS: tuple[Kind, ...] = ("prompt", "step")
SHAPE = NetworkShape(VOCAB_SIZE, len(CANDIDATES), HIDDEN)


def random_network(support: list[int] | None = None, seed: int = 0) -> PolicyNetwork:
    """Network with random parameters; `support` None: every other token id."""
    torch.manual_seed(seed)
    ids = list(range(0, VOCAB_SIZE, 2)) if support is None else support
    network = PolicyNetwork(SHAPE, torch.tensor(ids, dtype=torch.int64))
    for values in (network.rows, network.bias):
        nn.init.normal_(values)
    return network.eval()


def random_policy(objective: Objective = "tau", seed: int = 0) -> PromptPolicy:
    info = PromptInfo(PAIR, CANDIDATES, objective, SHAPE, THRESHOLD, {"seed": seed, "sweep_id": "abc"})
    return PromptPolicy(info, random_network(seed=seed), PRICE if objective == "throughput" else None)


def step_policy(seed: int = 0, *, priced: bool = False) -> StepPolicy:
    training = {"seed": seed, "sweep_id": "abc"}
    return tiny_step_policy(PAIR, VOCAB_SIZE, price=PRICE if priced else None, training=training, seed=seed)


def priced_policy(kind: Kind, seed: int = 1) -> LearnedPolicy:
    return random_policy("throughput", seed=seed) if kind == "prompt" else step_policy(seed, priced=True)


NO_PROBS = SparseProbs(torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(1, dtype=torch.int64))


def random_prefill(seed: int) -> Prefill:
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    return Prefill(3 * logits, None, 5 + seed, temperature=seed / 10)


def features_of(prefill: Prefill) -> SparseProbs:
    """A batch of one request, as a policy makes it."""
    return sparse_probs(prefill.probs, THRESHOLD)


def batch_of(parts: list[SparseProbs]) -> SparseProbs:
    lengths = torch.tensor([len(part.ids) for part in parts])
    ids, values = (torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "probs"))
    return SparseProbs(ids, values, lengths.cumsum(0) - lengths)


def dense_oracle(network: PolicyNetwork, prefill: Prefill) -> Tensor:
    """Outputs [K] of the network for one request, computed with dense layers."""
    probs = torch.softmax(prefill.logits, dim=0)
    with torch.no_grad():
        first = torch.zeros(HIDDEN, VOCAB_SIZE)
        for row, token in enumerate(network.support.tolist()):
            first[:, token] = network.rows[row]
        hidden = network.bias + first @ torch.where(probs >= THRESHOLD, probs, 0.0)
        outputs: Tensor = network.head.weight @ torch.relu(hidden) + network.head.bias
        return outputs


# --- the network ---


# The same sums of at most 50 float32 products as the oracle's, in another order; entries are of order 1 to 10.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@settings(max_examples=60, deadline=None)
@given(
    support=st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1).map(sorted),
    seed=st.integers(0, 1000),
    sharpness=st.floats(0.1, 20),
)
def test_sparse_network_is_the_dense_one(support: list[int], seed: int, sharpness: float) -> None:
    """Equal outputs for every request of a batch, one of them without a probability above the threshold."""
    network = random_network(support, seed)
    prefills = [random_prefill(seed), random_prefill(seed + 1)]
    prefills = [prefill._replace(logits=prefill.logits * sharpness / 3) for prefill in prefills]
    first, second = map(features_of, prefills)
    outputs = network(batch_of([first, NO_PROBS, second]))
    expected = [dense_oracle(network, prefill) for prefill in prefills]
    torch.testing.assert_close(outputs, torch.stack([expected[0], network(NO_PROBS)[0], expected[1]]), **CLOSE)


# --- what policies choose ---


def test_kind_prompt_chooses_the_largest_logit_and_the_smallest_of_equals() -> None:
    policy = random_policy()
    prefills = [random_prefill(seed) for seed in range(30)]
    sizes = [policy(prefill) for prefill in prefills]
    assert sizes == [CANDIDATES[int(dense_oracle(policy.network, prefill).argmax())] for prefill in prefills]
    assert len(set(sizes)) > 1
    for values in (policy.network.head.weight, policy.network.head.bias):
        nn.init.zeros_(values)
    assert policy(prefills[0]) == 1


def test_a_step_policy_is_the_prior_of_the_engines_choice(tiny_pair: Pair) -> None:
    """The engine starts with the policy's weights, which change how much is verified and no text."""
    texts, num_verified = set[tuple[int, ...]](), []
    for bias in (-8.0, 8.0):  # nothing, or everything, is expected to be accepted
        policy = tiny_step_policy(tiny_pair.id, tiny_pair.vocab_size, scale=0.0, bias=bias)
        engine, trained = Engine(tiny_pair, policy=policy), policy.weights.copy()
        assert engine.policy is None  # no fixed block size: rows adapt
        assert np.array_equal(engine.controller.model.weights, trained)
        assert engine.controller.model.deepest == tiny_pair.block_size - 1 < MAX_DEPTH
        [steps] = run(engine, [Request((1, 2, 3), 12, stop_token_ids=NEVER)])
        texts.add(text_of(steps))
        num_verified.append(sum(len(step.tree.tokens) for step in steps))
        assert np.array_equal(policy.weights, trained)  # learning changes a copy
    assert np.array_equal(Engine(tiny_pair).controller.model.weights, UNTRAINED.weights)
    assert len(texts) == 1
    assert num_verified[0] < num_verified[1]


REFUSED: dict[str, Callable[[], object]] = {
    r"candidates \(\)": lambda: CandidateSet(()),
    r"candidates \(0,\): 0 is not a block size": lambda: FixedPolicy(0),
    r"candidates \(2, 2\)": lambda: CandidateSet((2, 2)),
    r"candidates \(4, 2\)": lambda: CandidateSet((4, 2)),
    r"candidates \(1.0, 2\)": lambda: CandidateSet((1.0, 2)),  # type: ignore[arg-type]
    r"candidates \(True, 2\)": lambda: CandidateSet((True, 2)),
    r"candidates \('1',\)": lambda: CandidateSet(("1",)),  # type: ignore[arg-type]
    "vocab_size 0: must be 1 to 16777216": lambda: NetworkShape(0, 4, HIDDEN),
    "num_outputs 0": lambda: NetworkShape(VOCAB_SIZE, 0, HIDDEN),
    "hidden 16777217: must be 1 to 16777216": lambda: NetworkShape(VOCAB_SIZE, 4, 2**24 + 1),
    "hidden 1.5: must be a whole number": lambda: NetworkShape(VOCAB_SIZE, 4, 1.5),  # type: ignore[arg-type]
    "51.*vocabulary is 50": lambda: random_policy()(random_prefill(0)._replace(logits=torch.zeros(51))),
    "objective 'best': must be one of tau, throughput": lambda: random_policy("best"),  # type: ignore[arg-type]
    "4 outputs for 2 candidates": lambda: PromptInfo(PAIR, CandidateSet((1, 2)), "tau", SHAPE, THRESHOLD),
    "'throughput': needs a step price": lambda: PromptPolicy(random_policy("throughput").info, random_network()),
    "'tau': has no step price": lambda: PromptPolicy(random_policy().info, random_network(), PRICE),
    r"weights \(11,\): must be \(2, 11\)": lambda: StepPolicy(np.zeros(11), StepInfo(PAIR, VOCAB_SIZE)),
    "weights: must be finite": lambda: StepPolicy(np.full((2, 11), np.nan), StepInfo(PAIR, VOCAB_SIZE)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_values_that_cannot_be_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_policy_follows_its_input_to_the_gpu() -> None:
    prefill, policy = random_prefill(0), random_policy()
    on_cpu = policy(prefill)
    assert policy(prefill._replace(logits=prefill.logits.cuda())) == on_cpu
    assert policy.network.rows.is_cuda


# --- which pair ---


def policy_of(kind: Kind, pair: PairId, vocab_size: int) -> LearnedPolicy:
    if kind == "step":
        return tiny_step_policy(pair, vocab_size)
    return tiny_policy(pair, vocab_size, tuple(CANDIDATES))


@pytest.mark.parametrize("kind", KINDS)
def test_check_refuses_other_pairs_and_names_both(kind: Kind, tiny_pair: Pair) -> None:
    policy = policy_of(kind, tiny_pair.id, tiny_pair.vocab_size)
    policy.check(tiny_pair)
    assert (policy.info.kind, policy.info.vocab_size) == (kind, tiny_pair.vocab_size)
    for part in PairId._fields:
        other = tiny_pair.id._replace(**{part: "another"})
        with pytest.raises(ValueError, match="policy made for") as caught:
            policy_of(kind, other, tiny_pair.vocab_size).check(tiny_pair)
        assert "\n" not in str(caught.value)
        assert all(word in str(caught.value) for word in (*other, *tiny_pair.id))
    with pytest.raises(ValueError, match=rf"vocabulary 77.*vocabulary {tiny_pair.vocab_size}"):
        policy_of(kind, tiny_pair.id, 77).check(tiny_pair)


# --- directories ---


def files_of(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("priced", [False, True])
def test_round_trips(priced: bool, tmp_path: Path) -> None:
    price = ["price.json"] * priced
    policy = random_policy("throughput" if priced else "tau", seed=3)
    save_policy(policy, tmp_path / "prompt")
    loaded = load_policy(tmp_path / "prompt")
    assert isinstance(loaded, PromptPolicy)
    assert (loaded.info, loaded.price) == (policy.info, policy.price)
    for prefill in map(random_prefill, range(10)):
        assert torch.equal(loaded.network(features_of(prefill)), policy.network(features_of(prefill)))
        assert loaded(prefill) == policy(prefill)
    assert files_of(tmp_path / "prompt") == ["policy.json", "policy.safetensors", *price]
    prior = step_policy(3, priced=priced)
    save_policy(prior, tmp_path / "step")
    loaded = load_policy(tmp_path / "step")
    assert isinstance(loaded, StepPolicy)
    assert (loaded.info, loaded.price) == (prior.info, prior.price)
    assert np.array_equal(loaded.weights, prior.weights)
    assert files_of(tmp_path / "step") == ["policy.json", *price]


def test_weights_are_stored_by_name(tmp_path: Path) -> None:
    """Names in the order of the inputs (see `AcceptanceModel`); integers are valid weights."""
    policy = step_policy()
    save_policy(policy, tmp_path)
    stored = json.loads((tmp_path / "policy.json").read_text())["weights"]
    assert list(stored) == list(WEIGHT_NAMES)
    assert WEIGHT_NAMES[:5] == ("own_logit", "log_prob", "to_first", "to_next", "inverse_depth")
    assert (WEIGHT_NAMES[5], WEIGHT_NAMES[-1]) == ("first_after_0_later", "later_after_2_later")
    assert stored["to_next"] == policy.weights[:, 3].tolist()
    edit("weights", to_next=[1, -2])(tmp_path)
    loaded = load_policy(tmp_path)
    assert isinstance(loaded, StepPolicy)
    assert loaded.weights[:, 3].tolist() == [1, -2]


def test_saving_again_replaces(tmp_path: Path) -> None:
    save_policy(random_policy("throughput", seed=1), tmp_path)
    save_policy(random_policy(seed=2), tmp_path)
    loaded = load_policy(tmp_path)
    assert isinstance(loaded, PromptPolicy)
    assert torch.equal(loaded.network.rows, random_policy(seed=2).network.rows)
    assert not (tmp_path / "price.json").exists()  # of the first policy
    save_policy(step_policy(), tmp_path)
    assert files_of(tmp_path) == ["policy.json"]
    assert isinstance(load_policy(tmp_path), StepPolicy)


# --- damage ---

Damage = Callable[[Path], Any]


def edit(part: str = "", **changes: Any) -> Damage:
    """An edit of policy.json, or of an object in it; a value of None removes the field."""

    def damage(folder: Path) -> None:
        fields = json.loads((folder / "policy.json").read_text())
        edited = fields[part] if part else fields
        edited.update(changes)
        for name in [name for name, value in changes.items() if value is None]:
            del edited[name]
        (folder / "policy.json").write_text(json.dumps(fields))

    return damage


def edit_tensor(name: str, change: Callable[[Tensor], Tensor | None]) -> Damage:
    """A tensor changed by `change`, or removed if it returns None."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "policy.safetensors")
        changed = change(tensors.pop(name, torch.zeros(0)))
        save_file(tensors if changed is None else tensors | {name: changed}, folder / "policy.safetensors")

    return damage


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def truncate(name: str) -> Damage:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def with_two_outputs(folder: Path) -> None:
    edit("network", num_outputs=2)(folder)
    edit(candidates=[1, 2])(folder)


Faults = dict[str, tuple[Damage, str]]
"""Name of the fault -> the damage, and a pattern of the error message."""
OF_BOTH_KINDS: Faults = {
    "no json": (remove("policy.json"), "policy.json: no such file"),
    "half json": (truncate("policy.json"), "policy.json: not readable as JSON"),
    "json list": (lambda folder: (folder / "policy.json").write_text("[]"), "policy.json: .*list"),
    "half a price": (truncate("price.json"), "price.json.*not the step price"),
    "old format": (edit(format=4), "policy.json: format 4.*reads 5: retrain with jobs/train.py"),
    "other kind": (edit(kind="class"), "policy.json: field 'kind'.*prompt, step.*'class'"),
    "unknown field": (edit(colour="red"), "policy.json: unknown field 'colour'"),
    "missing field": (edit(training=None), "policy.json: missing field 'training'"),
    "bad training": (edit(training=[1]), "policy.json: field 'training'"),
    "half a pair": (edit(pair={"target": "x"}), "policy.json: field 'pair'.*draft_revision"),
}
OF_KIND_PROMPT: Faults = {
    "no weights": (remove("policy.safetensors"), "policy.safetensors: no such file"),
    "half weights": (truncate("policy.safetensors"), "policy.safetensors: not a readable safetensors file"),
    "no price": (remove("price.json"), "price.json"),
    "other objective": (edit(objective="price"), "policy.json: objective 'price'"),
    "fields of another kind": (edit(kind="step"), "policy.json: unknown field 'candidates'"),
    "bad candidates": (edit(candidates=[4, 2, 1, 8]), "policy.json: field 'candidates'"),
    "number for candidates": (edit(candidates=7), "policy.json: field 'candidates'"),
    "fewer candidates": (edit(candidates=[1, 2]), "policy.json: 4 outputs for 2 candidates"),
    "bad threshold": (edit(threshold=1.5), "policy.json: field 'threshold'.*1.5"),
    "vocabulary as text": (edit("network", vocab_size="50"), "policy.json: vocab_size '50': must be a whole number"),
    "shape without a width": (edit("network", hidden=None), "policy.json: .*hidden"),
    "other outputs": (with_two_outputs, r"policy.safetensors: .*\(4, 16\).*needed.*\(2, 16\)"),
    "smaller vocabulary": (edit("network", vocab_size=40), "policy.safetensors: tensor 'support'.*below 40"),
    "missing tensor": (
        edit_tensor("head.weight", lambda t: None),
        "policy.safetensors: missing tensor 'head.weight'",
    ),
    "unknown tensor": (edit_tensor("x", lambda t: torch.ones(1)), "policy.safetensors: unknown tensor 'x'"),
    "not finite": (edit_tensor("rows", lambda t: t * torch.nan), "policy.safetensors: tensor 'rows'.*not finite"),
    "other dtype": (edit_tensor("rows", lambda t: t.half()), "policy.safetensors: tensor 'rows'.*float16"),
    "unordered support": (
        edit_tensor("support", lambda t: t.flip(0)),
        "policy.safetensors: .*increasing ids below 50",
    ),
    "empty support": (edit_tensor("support", lambda t: t[:0]), "policy.safetensors: tensor 'support' is empty"),
    "support of floats": (edit_tensor("support", lambda t: t.float()), "policy.safetensors: .*'support'.*int64"),
}
NOT_FINITE_PAIRS = 1.0, [1.0] * 3, [1.0, "x"], [1.0, True], [1.0, math.nan], [-math.inf, 0], [10**400, 0]
OF_KIND_STEP: Faults = {
    "named as another kind": (edit(kind="prompt"), "policy.json: missing field 'candidates'"),
    "weights in a list": (edit(weights=[1]), "policy.json: field 'weights'.*object"),
    "missing weight": (edit("weights", to_next=None), "policy.json: missing weight 'to_next'"),
    "unknown weight": (edit("weights", colour=[0.0, 1.0]), "policy.json: unknown weight 'colour'"),
    "no vocabulary": (edit(vocab_size=0), "policy.json: vocab_size 0: must be a whole number, at least 1"),
} | {
    f"weight {i}": (edit("weights", to_next=value), "policy.json: weight 'to_next' must be two finite numbers")
    for i, value in enumerate(NOT_FINITE_PAIRS)
}
FAULTS = [
    *(("prompt", *fault) for fault in (OF_BOTH_KINDS | OF_KIND_PROMPT).values()),
    *(("step", *fault) for fault in (OF_BOTH_KINDS | OF_KIND_STEP).values()),
]
NAMES = [*OF_BOTH_KINDS, *OF_KIND_PROMPT, *OF_BOTH_KINDS, *OF_KIND_STEP]


@pytest.mark.parametrize(("kind", "damage", "pattern"), FAULTS, ids=NAMES)
def test_damage_is_refused_by_name(kind: Kind, damage: Damage, pattern: str, tmp_path: Path) -> None:
    save_policy(priced_policy(kind), tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=pattern) as caught:
        load_policy(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_save_is_not_loaded(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_policy(priced_policy(kind), tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_policy(priced_policy(kind, seed=2), tmp_path)
    with pytest.raises(ValueError, match=r"policy\.json: no such file"):
        load_policy(tmp_path)
