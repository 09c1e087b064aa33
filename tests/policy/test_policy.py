"""Policies: the sparse network is the dense one, and a directory is loaded as saved or refused by name."""

import dataclasses
import json
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

from blockpilot.control.acceptance import NUM_WEIGHTS, AcceptanceModel
from blockpilot.control.controller import FixedPolicy
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
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
from blockpilot.types import Candidates, CandidateSet, PairId, Prefill
from helpers.policies import step_policy as tiny_step_policy
from helpers.prices import price

VOCAB_SIZE, HIDDEN, THRESHOLD = 50, 16, 0.01
CANDIDATES = CandidateSet((1, 2, 4, 8))
PAIR = PairId("org/Target", "1111", "org/draft", "2222")
PRICE = price(pair=PAIR, base_s=1.0, row_s=0.2, launch_s=0.3, slot_s=0.04, token_s=0.1, error=0.05)
KINDS: tuple[Kind, ...] = ("prompt", "step")
SHAPE = NetworkShape(VOCAB_SIZE, len(CANDIDATES), HIDDEN)


def random_network(support: list[int] | None = None, seed: int = 0) -> PolicyNetwork:
    """With random parameters; it knows every other token id unless told."""
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


NO_PROBS = SparseProbs(torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(1, dtype=torch.int64))


def random_prefill(seed: int) -> Prefill:
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    return Prefill(3 * logits, None, 5 + seed, temperature=seed / 10)


def features_of(prefill: Prefill) -> SparseProbs:
    """A batch of one, as a policy makes it."""
    return sparse_probs(prefill.probs, THRESHOLD)


def batch_of(parts: list[SparseProbs]) -> SparseProbs:
    lengths = torch.tensor([len(part.ids) for part in parts])
    ids, values = (torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "probs"))
    return SparseProbs(ids, values, lengths.cumsum(0) - lengths)


def dense_oracle(network: PolicyNetwork, prefill: Prefill) -> Tensor:
    """The network written down with dense layers and one request: outputs [K]."""
    probs = torch.softmax(prefill.logits, dim=0)
    with torch.no_grad():
        first = torch.zeros(HIDDEN, VOCAB_SIZE)
        for row, token in enumerate(network.support.tolist()):
            first[:, token] = network.rows[row]
        hidden = network.bias + first @ torch.where(probs >= THRESHOLD, probs, 0.0)
        outputs: Tensor = network.head.weight @ torch.relu(hidden) + network.head.bias
        return outputs


# --- candidate sets ---


@pytest.mark.parametrize("sizes", [(), (0,), (-1, 2), (2, 2), (4, 2), (1.0, 2), (True, 2), ("1",)])
def test_candidate_set_refuses(sizes: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="candidates"):
        CandidateSet(sizes)


def test_candidate_set_is_a_sequence() -> None:
    assert list(CANDIDATES) == [1, 2, 4, 8]
    assert (len(CANDIDATES), CANDIDATES[2]) == (4, 4)


def test_fixed_policy() -> None:
    assert FixedPolicy(6)(random_prefill(0)) == 6
    with pytest.raises(ValueError, match="0"):
        FixedPolicy(0)


# --- the network ---


# The same sums of at most 50 float32 products as the oracle's, in another order; entries are of order 1 to 10.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@settings(max_examples=60, deadline=None)
@given(
    support=st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1).map(sorted),
    seed=st.integers(0, 2**31),
    sharpness=st.floats(0.1, 20),
)
def test_sparse_network_is_the_dense_one(support: list[int], seed: int, sharpness: float) -> None:
    network = random_network(support, seed)
    prefill = random_prefill(seed % 1000)
    prefill = prefill._replace(logits=prefill.logits * sharpness / 3)
    torch.testing.assert_close(network(features_of(prefill))[0], dense_oracle(network, prefill), **CLOSE)


def test_requests_of_a_batch_are_independent() -> None:
    network = random_network()
    parts = [features_of(random_prefill(seed)) for seed in range(4)]
    parts[2] = NO_PROBS
    alone = torch.cat([network(part) for part in parts])
    torch.testing.assert_close(network(batch_of(parts)), alone)


def test_token_ids_without_a_row_count_nothing() -> None:
    prefill = random_prefill(0)
    unknown = [i for i in range(VOCAB_SIZE) if prefill.probs[i] < THRESHOLD]
    network = random_network(unknown)
    torch.testing.assert_close(network(features_of(prefill)), network(NO_PROBS), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size 0: must be 1 to 16777216"),
        ({"num_outputs": 0}, "num_outputs 0"),
        ({"hidden": 0}, "hidden 0"),
        ({"hidden": 2**24 + 1}, "hidden 16777217: must be 1 to 16777216"),
        ({"hidden": 1.5}, "hidden 1.5: must be a whole number"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHAPE, **changes)


# --- what policies choose ---


def test_prompt_kind_chooses_the_largest_logit() -> None:
    policy = random_policy()
    chosen = set()
    for seed in range(30):
        prefill = random_prefill(seed)
        decided = policy(prefill)
        assert decided == CANDIDATES[int(dense_oracle(policy.network, prefill).argmax())]
        chosen.add(decided)
    assert len(chosen) > 1


def test_equal_logits_choose_the_smallest() -> None:
    policy = random_policy()
    for values in (policy.network.head.weight, policy.network.head.bias):
        nn.init.zeros_(values)
    assert policy(random_prefill(0)) == 1


def test_a_step_policy_is_the_prior_of_the_engines_choice(tiny_pair: Pair) -> None:
    """An engine begins with its weights, which decide how much is drafted and change no text."""
    texts, num_verified = set[tuple[int, ...]](), []
    for bias in (-8.0, 8.0):  # nothing, or everything, is expected to be accepted
        policy = tiny_step_policy(tiny_pair.id, tiny_pair.vocab_size, scale=0.0, bias=bias)
        controller = Engine(tiny_pair, policy=policy).controller
        assert np.array_equal(controller.model.weights, policy.weights)
        assert controller.model.weights is not policy.weights  # which stay as they were trained
        steps = list(generate(tiny_pair, (1, 2, 3), policy=policy, max_new_tokens=12, stop_token_ids=()))
        texts.add(tuple(token for step in steps for token in step.tokens))
        num_verified.append(sum(len(step.tree.tokens) for step in steps))
    assert len(texts) == 1
    assert num_verified[0] < num_verified[1]


# --- refusals ---


def test_policy_refuses_another_vocabulary() -> None:
    with pytest.raises(ValueError, match=r"51.*50"):
        random_policy()(random_prefill(0)._replace(logits=torch.zeros(51)))


def test_info_refuses_objectives_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="objective 'best'"):
        dataclasses.replace(random_policy().info, objective="best")  # type: ignore[arg-type]


def test_info_refuses_outputs_of_other_candidates() -> None:
    with pytest.raises(ValueError, match="4 outputs for 2 candidates"):
        dataclasses.replace(random_policy().info, candidates=CandidateSet((1, 2)))


def test_a_price_belongs_to_throughput() -> None:
    plain, priced = random_policy(), random_policy("throughput")
    with pytest.raises(ValueError, match="objective 'throughput': needs a step price"):
        PromptPolicy(priced.info, priced.network)
    with pytest.raises(ValueError, match="objective 'tau': has no step price"):
        PromptPolicy(plain.info, plain.network, PRICE)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.zeros((2, NUM_WEIGHTS - 1)), rf"weights \(2, {NUM_WEIGHTS - 1}\): must be \(2, {NUM_WEIGHTS}\)"),
        (np.zeros(NUM_WEIGHTS), r"must be \(2, "),
        (np.full((2, NUM_WEIGHTS), np.nan), "weights: must be finite"),
        (np.full((2, NUM_WEIGHTS), -np.inf), "weights: must be finite"),
    ],
)
def test_a_step_policy_refuses_weights_that_cannot_be(weights: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepPolicy(weights, StepInfo(PAIR, VOCAB_SIZE))


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
    shape = dataclasses.replace(SHAPE, vocab_size=vocab_size)
    return PromptPolicy(
        PromptInfo(pair, CANDIDATES, "tau", shape, THRESHOLD), PolicyNetwork(shape, torch.tensor([1]))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_check_accepts_its_own_pair(kind: Kind, tiny_pair: Pair) -> None:
    policy = policy_of(kind, tiny_pair.id, tiny_pair.vocab_size)
    policy.check(tiny_pair)
    assert (policy.info.kind, policy.info.vocab_size) == (kind, tiny_pair.vocab_size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", PairId._fields)
def test_check_names_both_pairs(kind: Kind, tiny_pair: Pair, part: str) -> None:
    other = tiny_pair.id._replace(**{part: "another"})
    with pytest.raises(ValueError, match="policy made for") as caught:
        policy_of(kind, other, tiny_pair.vocab_size).check(tiny_pair)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in (*other, *tiny_pair.id))


@pytest.mark.parametrize("kind", KINDS)
def test_check_names_both_vocabularies(kind: Kind, tiny_pair: Pair) -> None:
    with pytest.raises(ValueError, match=rf"vocabulary 77.*vocabulary {tiny_pair.vocab_size}"):
        policy_of(kind, tiny_pair.id, 77).check(tiny_pair)


# --- directories ---


def files_of(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("objective", ["tau", "throughput"])
def test_round_trip_of_kind_prompt(objective: Objective, tmp_path: Path) -> None:
    policy = random_policy(objective, seed=3)
    save_policy(policy, tmp_path / "p")
    loaded = load_policy(tmp_path / "p")
    assert isinstance(loaded, PromptPolicy)
    assert (loaded.info, loaded.price) == (policy.info, policy.price)
    for seed in range(10):
        prefill = random_prefill(seed)
        assert torch.equal(loaded.network(features_of(prefill)), policy.network(features_of(prefill)))
        assert loaded(prefill) == policy(prefill)
    price = ["price.json"] if objective == "throughput" else []
    assert files_of(tmp_path / "p") == ["policy.json", "policy.safetensors", *price]


@pytest.mark.parametrize("priced", [False, True])
def test_round_trip_of_kind_step(priced: bool, tmp_path: Path) -> None:
    policy = step_policy(3, priced=priced)
    save_policy(policy, tmp_path / "p")
    loaded = load_policy(tmp_path / "p")
    assert isinstance(loaded, StepPolicy)
    assert (loaded.info, loaded.price) == (policy.info, policy.price)
    assert np.array_equal(loaded.weights, policy.weights)
    assert files_of(tmp_path / "p") == ["policy.json", *["price.json"] * priced]
    log_probs = torch.rand(6, 4).sort(descending=True).values.log()
    found = Candidates(torch.zeros(6, 4), log_probs, log_probs, torch.arange(6) % 2 == 0)
    one, other = (
        AcceptanceModel(3, each).propose(np.ones(6, dtype=bool), found, np.tile(np.arange(3), 2)).chances
        for each in (policy, loaded)
    )
    assert np.array_equal(one, other)


def test_weights_are_stored_by_name(tmp_path: Path) -> None:
    """In the order of what they multiply: see `AcceptanceModel`."""
    policy = step_policy()
    save_policy(policy, tmp_path)
    stored = json.loads((tmp_path / "policy.json").read_text())["weights"]
    assert list(stored) == list(WEIGHT_NAMES)
    assert WEIGHT_NAMES[:6] == (
        "own_logit",
        "log_prob",
        "to_first",
        "to_next",
        "inverse_depth",
        "first_after_0_later",
    )
    assert WEIGHT_NAMES[-2:] == ("first_after_2_later", "later_after_2_later")
    assert stored["to_next"] == policy.weights[:, 3].tolist()


def test_saving_again_replaces(tmp_path: Path) -> None:
    save_policy(random_policy("throughput", seed=1), tmp_path)
    save_policy(random_policy(seed=2), tmp_path)
    loaded = load_policy(tmp_path)
    assert isinstance(loaded, PromptPolicy)
    assert torch.equal(loaded.network.rows, random_policy(seed=2).network.rows)
    assert not (tmp_path / "price.json").exists()  # of the one before
    save_policy(step_policy(), tmp_path)
    assert files_of(tmp_path) == ["policy.json"]
    assert isinstance(load_policy(tmp_path), StepPolicy)


def edit_json(**changes: Any) -> Callable[[Path], None]:
    """An edit of policy.json; a value of None removes the field."""

    def edit(folder: Path) -> None:
        fields = json.loads((folder / "policy.json").read_text()) | changes
        kept = {name: value for name, value in fields.items() if value is not None}
        (folder / "policy.json").write_text(json.dumps(kept))

    return edit


def edit_shape(**changes: Any) -> Callable[[Path], None]:
    """An edit of the network's shape in policy.json; a value of None removes the field."""

    def edit(folder: Path) -> None:
        fields = json.loads((folder / "policy.json").read_text())["network"] | changes
        edit_json(network={name: value for name, value in fields.items() if value is not None})(folder)

    return edit


def edit_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "policy.safetensors")
        change(tensors)
        save_file(tensors, folder / "policy.safetensors")

    return edit


def truncate(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return edit


def edit_weights(**changes: Any) -> Callable[[Path], None]:
    """An edit of the weights in policy.json; a value of None removes one."""

    def edit(folder: Path) -> None:
        weights = json.loads((folder / "policy.json").read_text())["weights"] | changes
        edit_json(weights={name: value for name, value in weights.items() if value is not None})(folder)

    return edit


PAIR_FIELDS = PAIR._asdict()
FAULTS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no json": (lambda d: (d / "policy.json").unlink(), ["policy.json", "no such file"]),
    "no weights": (lambda d: (d / "policy.safetensors").unlink(), ["policy.safetensors", "no such file"]),
    "no price": (lambda d: (d / "price.json").unlink(), ["price.json"]),
    "half json": (truncate("policy.json"), ["policy.json", "JSON"]),
    "half weights": (truncate("policy.safetensors"), ["policy.safetensors"]),
    "half a price": (truncate("price.json"), ["price.json", "not the step price"]),
    "json list": (lambda d: (d / "policy.json").write_text("[]"), ["policy.json", "list"]),
    "missing field": (edit_json(candidates=None), ["policy.json", "missing", "'candidates'"]),
    "missing shape": (edit_json(network=None), ["policy.json", "missing", "'network'"]),
    "unknown field": (edit_json(colour="red"), ["policy.json", "unknown", "'colour'"]),
    "old format": (edit_json(format=2), ["policy.json", "format 2", "reads 5", "train anew with jobs/train.py"]),
    "other objective": (edit_json(objective="price"), ["policy.json", "objective", "'price'"]),
    "other kind": (edit_json(kind="class"), ["policy.json", "'kind'", "prompt, step", "'class'"]),
    "no kind": (edit_json(kind=None), ["policy.json", "'kind'", "None"]),
    "kind that is a list": (edit_json(kind=["step"]), ["policy.json", "'kind'"]),
    "fields of another kind": (edit_json(kind="step"), ["policy.json", "unknown", "'candidates'"]),
    "bad candidates": (edit_json(candidates=[4, 2, 1, 8]), ["policy.json", "'candidates'"]),
    "no candidates": (edit_json(candidates=7), ["policy.json", "'candidates'"]),
    "fewer candidates": (edit_json(candidates=[1, 2]), ["policy.json", "4 outputs for 2 candidates"]),
    "bad vocabulary": (edit_shape(vocab_size="50"), ["policy.json", "vocab_size", "'50'", "whole number"]),
    "wide as true": (edit_shape(hidden=True), ["policy.json", "hidden", "True", "whole number"]),
    "bad threshold": (edit_json(threshold=1.5), ["policy.json", "'threshold'", "1.5"]),
    "bad training": (edit_json(training=[1]), ["policy.json", "'training'"]),
    "half a pair": (edit_json(pair={"target": "x"}), ["policy.json", "'pair'", "draft_revision"]),
    "pair of numbers": (edit_json(pair=dict.fromkeys(PAIR_FIELDS, 1)), ["policy.json", "'pair'"]),
    "shape without a width": (edit_shape(hidden=None), ["policy.json", "hidden"]),
    "shape with more": (edit_shape(colour="red"), ["policy.json", "colour"]),
    "shape that is a list": (edit_json(network=[1]), ["policy.json"]),
    "other outputs": (
        lambda d: (edit_shape(num_outputs=2)(d), edit_json(candidates=[1, 2])(d)),
        ["policy.safetensors", "(4, 16)", "needed", "(2, 16)"],
    ),
    "wider": (edit_shape(hidden=32), ["policy.safetensors", "'bias'", "(32,)"]),
    "smaller vocabulary": (edit_shape(vocab_size=40), ["policy.safetensors", "'support'", "40"]),
    "missing tensor": (edit_tensors(lambda t: t.pop("head.weight")), ["policy.safetensors", "'head.weight'"]),
    "missing bias": (edit_tensors(lambda t: t.pop("bias")), ["policy.safetensors", "'bias'"]),
    "unknown tensor": (edit_tensors(lambda t: t.update(x=torch.ones(1))), ["policy.safetensors", "'x'"]),
    "not finite": (
        edit_tensors(lambda t: t["rows"].fill_(float("nan"))),
        ["policy.safetensors", "'rows'", "finite"],
    ),
    "other dtype": (
        edit_tensors(lambda t: t.update(rows=t["rows"].half())),
        ["policy.safetensors", "'rows'", "float16"],
    ),
    "unordered support": (
        edit_tensors(lambda t: t.update(support=t["support"].flip(0))),
        ["policy.safetensors", "'support'"],
    ),
    "empty support": (
        edit_tensors(lambda t: t.update(support=t["support"][:0])),
        ["policy.safetensors", "'support' is empty"],
    ),
    "support of numbers": (
        edit_tensors(lambda t: t.update(support=t["support"].float())),
        ["policy.safetensors", "'support'", "int64"],
    ),
    "no support": (edit_tensors(lambda t: t.pop("support")), ["policy.safetensors", "'support'"]),
}


STEP_FAULTS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "old format": (edit_json(format=4), ["policy.json", "format 4", "reads 5", "train anew with jobs/train.py"]),
    "half json": (truncate("policy.json"), ["policy.json", "JSON"]),
    "half a price": (truncate("price.json"), ["price.json", "not the step price"]),
    "no weights": (edit_json(weights=None), ["policy.json", "missing", "'weights'"]),
    "weights in a list": (edit_json(weights=[1]), ["policy.json", "'weights'", "object"]),
    "fields of another kind": (edit_json(candidates=[1, 2]), ["policy.json", "unknown", "'candidates'"]),
    "named as another kind": (edit_json(kind="prompt"), ["policy.json", "missing", "'candidates'"]),
    "missing weight": (edit_weights(to_next=None), ["policy.json", "missing weight 'to_next'"]),
    "unknown weight": (edit_weights(colour=[0.0, 1.0]), ["policy.json", "unknown weight 'colour'"]),
    "one number": (edit_weights(to_next=1.0), ["policy.json", "'to_next'", "two finite numbers", "1.0"]),
    "three numbers": (edit_weights(to_next=[1.0] * 3), ["policy.json", "'to_next'", "two finite numbers"]),
    "weight in words": (edit_weights(to_next=[1.0, "x"]), ["policy.json", "'to_next'", "two finite numbers"]),
    "weight of true": (edit_weights(to_next=[1.0, True]), ["policy.json", "'to_next'", "two finite numbers"]),
    "no number": (edit_weights(to_next=[1.0, float("nan")]), ["policy.json", "'to_next'", "two finite numbers"]),
    "infinite": (edit_weights(to_next=[-float("inf"), 0]), ["policy.json", "'to_next'", "two finite numbers"]),
    "beyond floats": (edit_weights(to_next=[10**400, 0]), ["policy.json", "'to_next'", "two finite numbers"]),
    "bad vocabulary": (edit_json(vocab_size="50"), ["policy.json", "vocab_size '50'", "whole number"]),
    "no vocabulary": (edit_json(vocab_size=0), ["policy.json", "vocab_size 0", "at least 1"]),
    "bad training": (edit_json(training=[1]), ["policy.json", "'training'"]),
    "half a pair": (edit_json(pair={"target": "x"}), ["policy.json", "'pair'", "draft_revision"]),
}


def check_refused(folder: Path, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"policy\.|price\.json") as caught:
        load_policy(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", FAULTS)
def test_damage_is_refused_by_name(name: str, tmp_path: Path) -> None:
    save_policy(random_policy("throughput"), tmp_path)
    damage, words = FAULTS[name]
    damage(tmp_path)
    check_refused(tmp_path, words)


@pytest.mark.parametrize("name", STEP_FAULTS)
def test_damage_of_a_step_policy_is_refused_by_name(name: str, tmp_path: Path) -> None:
    save_policy(step_policy(priced=True), tmp_path)
    damage, words = STEP_FAULTS[name]
    damage(tmp_path)
    check_refused(tmp_path, words)


def test_whole_numbers_are_weights(tmp_path: Path) -> None:
    save_policy(step_policy(), tmp_path)
    edit_weights(to_next=[1, -2])(tmp_path)
    loaded = load_policy(tmp_path)
    assert isinstance(loaded, StepPolicy)
    assert loaded.weights[:, WEIGHT_NAMES.index("to_next")].tolist() == [1, -2]


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_save_is_not_loaded(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def policy(seed: int) -> LearnedPolicy:
        return random_policy("throughput", seed=seed) if kind == "prompt" else step_policy(seed, priced=True)

    save_policy(policy(1), tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_policy(policy(2), tmp_path)
    with pytest.raises(ValueError, match=r"policy\.json: no such file"):
        load_policy(tmp_path)
