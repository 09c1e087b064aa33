"""Policies: the sparse network is the dense one, and a directory is loaded as saved or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blockpilot.engine import Prefill
from blockpilot.pairs import Pair, PairId
from blockpilot.policy import (
    CandidateSet,
    ClassPolicy,
    FixedPolicy,
    PolicyInfo,
    ProbsMLP,
    load_policy,
    save_policy,
    sparse_probs,
)

VOCAB_SIZE, HIDDEN, THRESHOLD = 50, 16, 0.01
CANDIDATES = CandidateSet((1, 2, 4, 8))
PAIR = PairId("org/Target", "1111", "org/draft", "2222")


def random_network(support: list[int], seed: int = 0) -> ProbsMLP:
    torch.manual_seed(seed)
    network = ProbsMLP(torch.tensor(support), VOCAB_SIZE, len(CANDIDATES), HIDDEN)
    nn.init.normal_(network.rows)
    nn.init.normal_(network.bias)
    return network.eval()


def random_policy(seed: int = 0) -> ClassPolicy:
    info = PolicyInfo(PAIR, VOCAB_SIZE, CANDIDATES, THRESHOLD, {"seed": seed, "sweep_id": "abc"})
    return ClassPolicy(info, random_network(list(range(0, 50, 2)), seed))


def random_prefill(seed: int) -> Prefill:
    logits = 3 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    return Prefill(logits, None, 5)


def dense_oracle(network: ProbsMLP, probs: Tensor) -> Tensor:
    """The paper's network written down with dense layers: logits [K] of prefill_probs [V]."""
    first = nn.Linear(VOCAB_SIZE, HIDDEN)
    with torch.no_grad():
        first.weight.zero_()
        for row, token in enumerate(network.support.tolist()):
            first.weight[:, token] = network.rows[row]
        first.bias.copy_(network.bias)
        hidden = torch.relu(first(torch.where(probs >= THRESHOLD, probs, 0.0)))
        return network.head(network.mix(hidden) + hidden)


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


@settings(max_examples=50, deadline=None)
@given(
    support=st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1).map(sorted),
    seed=st.integers(0, 2**31),
    sharpness=st.floats(0.1, 20),
)
def test_sparse_network_is_the_dense_one(support: list[int], seed: int, sharpness: float) -> None:
    network = random_network(support, seed)
    probs = torch.softmax(sharpness * torch.randn(VOCAB_SIZE), dim=0)
    sparse = network(*sparse_probs(probs, THRESHOLD))[0]
    # The same sums of at most 50 float32 products, in another order.
    torch.testing.assert_close(sparse, dense_oracle(network, probs), rtol=1e-4, atol=1e-5)


def test_batch_rows_are_independent() -> None:
    network = random_network([0, 7, 20])
    probs = [torch.softmax(5 * torch.randn(VOCAB_SIZE), dim=0) for _ in range(4)]
    parts = [sparse_probs(p, THRESHOLD) for p in probs]
    starts = torch.tensor([len(p.ids) for p in parts]).cumsum(0) - torch.tensor([len(p.ids) for p in parts])
    batch = network(torch.cat([p.ids for p in parts]), torch.cat([p.probs for p in parts]), starts)
    alone = torch.cat([network(*p) for p in parts])
    torch.testing.assert_close(batch, alone)


def test_policy_chooses_the_largest_logit() -> None:
    policy = random_policy()
    chosen = set()
    for seed in range(30):
        prefill = random_prefill(seed)
        oracle = dense_oracle(policy.network, torch.softmax(prefill.logits, dim=0))
        assert policy(prefill) == CANDIDATES[int(oracle.argmax())]
        chosen.add(policy(prefill))
    assert len(chosen) > 1


def test_equal_logits_choose_the_smallest() -> None:
    policy = random_policy()
    nn.init.zeros_(policy.network.head.weight)
    nn.init.zeros_(policy.network.head.bias)
    assert policy(random_prefill(0)) == 1


def test_policy_refuses_another_vocabulary() -> None:
    with pytest.raises(ValueError, match=r"51.*50"):
        random_policy()(Prefill(torch.zeros(51), None, 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_policy_follows_its_input_to_the_gpu() -> None:
    policy, prefill = random_policy(), random_prefill(0)
    on_cpu = policy(prefill)
    assert policy(Prefill(prefill.logits.cuda(), None, 5)) == on_cpu
    assert policy.network.rows.is_cuda


# --- which pair ---


def test_check_accepts_its_own_pair(tiny_pair: Pair) -> None:
    info = PolicyInfo(tiny_pair.id, tiny_pair.vocab_size, CANDIDATES, THRESHOLD)
    network = ProbsMLP(torch.tensor([1]), tiny_pair.vocab_size, len(CANDIDATES), HIDDEN)
    ClassPolicy(info, network).check(tiny_pair)


@pytest.mark.parametrize("part", PairId._fields)
def test_check_names_both_pairs(tiny_pair: Pair, part: str) -> None:
    other = tiny_pair.id._replace(**{part: "another"})
    network = ProbsMLP(torch.tensor([1]), tiny_pair.vocab_size, len(CANDIDATES), HIDDEN)
    policy = ClassPolicy(PolicyInfo(other, tiny_pair.vocab_size, CANDIDATES, THRESHOLD), network)
    with pytest.raises(ValueError, match="policy made for") as caught:
        policy.check(tiny_pair)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in (*other, *tiny_pair.id))


def test_check_names_both_vocabularies(tiny_pair: Pair) -> None:
    network = ProbsMLP(torch.tensor([1]), 77, len(CANDIDATES), HIDDEN)
    policy = ClassPolicy(PolicyInfo(tiny_pair.id, 77, CANDIDATES, THRESHOLD), network)
    with pytest.raises(ValueError, match=rf"vocabulary 77.*vocabulary {tiny_pair.vocab_size}"):
        policy.check(tiny_pair)


# --- directories ---


def test_round_trip(tmp_path: Path) -> None:
    policy = random_policy(3)
    save_policy(policy, tmp_path / "p")
    loaded = load_policy(tmp_path / "p")
    assert loaded.info == policy.info
    for seed in range(10):
        probs = random_prefill(seed).probs
        assert torch.equal(loaded.logits(probs), policy.logits(probs))
    assert sorted(f.name for f in (tmp_path / "p").iterdir()) == ["policy.json", "policy.safetensors"]


def test_saving_again_replaces(tmp_path: Path) -> None:
    save_policy(random_policy(1), tmp_path)
    save_policy(random_policy(2), tmp_path)
    assert torch.equal(load_policy(tmp_path).network.rows, random_policy(2).network.rows)


def edit_json(**changes: Any) -> Callable[[Path], None]:
    """An edit of policy.json; a value of None removes the field."""

    def edit(folder: Path) -> None:
        fields = json.loads((folder / "policy.json").read_text()) | changes
        kept = {name: value for name, value in fields.items() if value is not None}
        (folder / "policy.json").write_text(json.dumps(kept))

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


PAIR_FIELDS = PAIR._asdict()
FAULTS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no json": (lambda d: (d / "policy.json").unlink(), ["policy.json", "no such file"]),
    "no weights": (lambda d: (d / "policy.safetensors").unlink(), ["policy.safetensors", "no such file"]),
    "half json": (truncate("policy.json"), ["policy.json", "JSON"]),
    "half weights": (truncate("policy.safetensors"), ["policy.safetensors"]),
    "json list": (lambda d: (d / "policy.json").write_text("[]"), ["policy.json", "list"]),
    "missing field": (edit_json(candidates=None), ["policy.json", "missing", "'candidates'"]),
    "unknown field": (edit_json(colour="red"), ["policy.json", "unknown", "'colour'"]),
    "other format": (edit_json(format=2), ["policy.json", "'format'", "2"]),
    "other objective": (edit_json(objective="throughput"), ["policy.json", "'objective'", "throughput"]),
    "other head": (edit_json(head="tau"), ["policy.json", "'head'", "tau"]),
    "bad candidates": (edit_json(candidates=[4, 2, 1, 8]), ["policy.json", "'candidates'"]),
    "no candidates": (edit_json(candidates=7), ["policy.json", "'candidates'"]),
    "bad vocabulary": (edit_json(vocab_size="50"), ["policy.json", "'vocab_size'", "'50'"]),
    "bad threshold": (edit_json(threshold=1.5), ["policy.json", "'threshold'", "1.5"]),
    "bad training": (edit_json(training=[1]), ["policy.json", "'training'"]),
    "half a pair": (edit_json(pair={"target": "x"}), ["policy.json", "'pair'", "draft_revision"]),
    "pair of numbers": (edit_json(pair=dict.fromkeys(PAIR_FIELDS, 1)), ["policy.json", "'pair'"]),
    "fewer candidates": (edit_json(candidates=[1, 2]), ["policy.safetensors", "'head.weight'", "(2, 16)"]),
    "smaller vocabulary": (edit_json(vocab_size=40), ["policy.safetensors", "'support'", "40"]),
    "missing tensor": (edit_tensors(lambda t: t.pop("mix.weight")), ["policy.safetensors", "'mix.weight'"]),
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
    "no support": (edit_tensors(lambda t: t.pop("support")), ["policy.safetensors", "'support'"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_damage_is_refused_by_name(name: str, tmp_path: Path) -> None:
    save_policy(random_policy(), tmp_path)
    damage, words = FAULTS[name]
    damage(tmp_path)
    with pytest.raises(ValueError, match="policy") as caught:
        load_policy(tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_interrupted_save_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_policy(random_policy(1), tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_policy(random_policy(2), tmp_path)
    with pytest.raises(ValueError, match=r"policy\.json: no such file"):
        load_policy(tmp_path)
