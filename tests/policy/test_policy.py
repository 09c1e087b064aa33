"""Policies: the sparse network is the dense one, and a directory is loaded as saved or refused by name."""

import dataclasses
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blockpilot.control.choose import choose_depths
from blockpilot.control.controller import FixedPolicy
from blockpilot.control.cost import Load
from blockpilot.pairs.loading import Pair
from blockpilot.policy.learned import (
    LearnedForecast,
    LearnedPolicy,
    Objective,
    PolicyInfo,
    expected_taus,
    slot_gaps,
)
from blockpilot.policy.network import (
    SCALARS,
    Kind,
    NetworkShape,
    PolicyFeatures,
    PolicyNetwork,
    SparseProbs,
    scalars,
    sparse_probs,
)
from blockpilot.policy.store import load_policy, save_policy
from blockpilot.types import CandidateSet, PairId, Prefill
from helpers.prices import linear_price, price

VOCAB_SIZE, HIDDEN, THRESHOLD = 50, 16, 0.01
CONTEXT_SIZE, ANCHOR_SIZE = 6, 5
CANDIDATES = CandidateSet((1, 2, 4, 8))
PAIR = PairId("org/Target", "1111", "org/draft", "2222")
PRICE = price(pair=PAIR, base_s=1.0, row_s=0.2, launch_s=0.3, slot_s=0.04, token_s=0.1, error=0.05)
KINDS: tuple[Kind, ...] = ("prompt", "step")


def shape_of(kind: Kind = "prompt", **changes: Any) -> NetworkShape:
    sizes = (CONTEXT_SIZE, ANCHOR_SIZE) if kind == "step" else (0, 0)
    return dataclasses.replace(NetworkShape(kind, VOCAB_SIZE, *sizes, len(CANDIDATES), HIDDEN), **changes)


def random_network(shape: NetworkShape, support: list[int] | None = None, seed: int = 0) -> PolicyNetwork:
    """With random parameters; it knows every other token id unless told."""
    torch.manual_seed(seed)
    ids = list(range(0, VOCAB_SIZE, 2)) if support is None else support
    network = PolicyNetwork(shape, torch.tensor(ids if shape.kind == "prompt" else [], dtype=torch.int64))
    for name, values in network.named_parameters():
        if name in ("rows", "bias"):
            nn.init.normal_(values)
    return network.eval()


def random_policy(kind: Kind = "prompt", objective: Objective = "tau", seed: int = 0) -> LearnedPolicy:
    info = PolicyInfo(PAIR, CANDIDATES, objective, shape_of(kind), THRESHOLD, {"seed": seed, "sweep_id": "abc"})
    return LearnedPolicy(info, random_network(info.shape, seed=seed), PRICE if objective == "throughput" else None)


def step_policy(seed: int = 0) -> LearnedPolicy:
    return random_policy("step", seed=seed)


NO_PROBS = SparseProbs(torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(1, dtype=torch.int64))


def random_prefill(seed: int) -> Prefill:
    generator = torch.Generator().manual_seed(seed)
    logits, context, anchor = (torch.randn(n, generator=generator) for n in (VOCAB_SIZE, CONTEXT_SIZE, ANCHOR_SIZE))
    return Prefill(3 * logits, context, 5 + seed, temperature=seed / 10, anchor=anchor)


def features_of(prefill: Prefill) -> PolicyFeatures:
    """A batch of one, as a policy makes it."""
    assert prefill.context is not None
    assert prefill.anchor is not None
    probs = sparse_probs(prefill.probs, THRESHOLD)
    values = torch.tensor([scalars(probs.probs, prefill.num_prompt_tokens, prefill.temperature)])
    return PolicyFeatures(probs, prefill.context[None], prefill.anchor[None], values)


def batch_of(parts: list[PolicyFeatures]) -> PolicyFeatures:
    lengths = torch.tensor([len(p.probs.ids) for p in parts])
    ids, values = (torch.cat([getattr(p.probs, name) for p in parts]) for name in ("ids", "probs"))
    probs = SparseProbs(ids, values, lengths.cumsum(0) - lengths)
    dense = (torch.cat([getattr(p, name) for p in parts]) for name in ("context", "anchor", "scalars"))
    return PolicyFeatures(probs, *dense)


def dense_oracle(network: PolicyNetwork, prefill: Prefill) -> Tensor:
    """The network written down with dense layers and one request: outputs [K]."""
    probs = torch.softmax(prefill.logits, dim=0)
    with torch.no_grad():
        hidden = network.bias.clone()
        if network.shape.kind == "prompt":
            first = torch.zeros(HIDDEN, VOCAB_SIZE)
            for row, token in enumerate(network.support.tolist()):
                first[:, token] = network.rows[row]
            hidden += first @ torch.where(probs >= THRESHOLD, probs, 0.0)
        else:
            entropy = -sum(p * math.log(p) for p in probs.tolist() if p >= THRESHOLD)
            of_prompt = [entropy, math.log(prefill.num_prompt_tokens), prefill.temperature]
            values = [*prefill.context.tolist(), *prefill.anchor.tolist(), *of_prompt]  # type: ignore[union-attr]
            for i, value in enumerate(values):
                hidden += network.dense.weight[:, i] * value
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
    network = random_network(shape_of(), support, seed)
    prefill = random_prefill(seed % 1000)
    prefill = prefill._replace(logits=prefill.logits * sharpness / 3)
    torch.testing.assert_close(network(features_of(prefill))[0], dense_oracle(network, prefill), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_every_feature_of_a_kind_is_read(kind: Kind) -> None:
    network = random_network(shape_of(kind))
    for seed in range(5):
        prefill = random_prefill(seed)
        torch.testing.assert_close(network(features_of(prefill))[0], dense_oracle(network, prefill), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_a_batch_are_independent(kind: Kind) -> None:
    network = random_network(shape_of(kind))
    parts = [features_of(random_prefill(seed)) for seed in range(4)]
    parts[2] = parts[2]._replace(probs=NO_PROBS)
    alone = torch.cat([network(part) for part in parts])
    torch.testing.assert_close(network(batch_of(parts)), alone)


def test_token_ids_without_a_row_count_nothing() -> None:
    prefill = random_prefill(0)
    unknown = [i for i in range(VOCAB_SIZE) if prefill.probs[i] < THRESHOLD]
    network = random_network(shape_of(), unknown)
    nothing = features_of(prefill)._replace(probs=NO_PROBS)
    torch.testing.assert_close(network(features_of(prefill)), network(nothing), rtol=0, atol=0)


def test_standardise_takes_means_and_deviations() -> None:
    network = random_network(shape_of("step"))
    batch = batch_of([features_of(random_prefill(seed)) for seed in range(9)])
    batch.context[:, 2] = 7.0  # never varies
    plain = random_network(shape_of("step"))
    network.standardise(batch)
    assert network.mean is not None
    assert network.std is not None
    columns = [*batch.context.T.tolist(), *batch.anchor.T.tolist(), *batch.scalars.T.tolist()]
    for i, column in enumerate(columns):
        mean = sum(column) / 9
        spread = math.sqrt(sum((x - mean) ** 2 for x in column) / 9)
        assert float(network.mean[i]) == pytest.approx(mean, rel=1e-5, abs=1e-6)
        assert float(network.std[i]) == pytest.approx(1.0 if i == 2 else spread, rel=1e-5)
    dense = (batch.dense - network.mean) / network.std
    parts = dense.split([CONTEXT_SIZE, ANCHOR_SIZE, len(SCALARS)], dim=1)
    torch.testing.assert_close(network(batch), plain(PolicyFeatures(batch.probs, *parts)))


def test_fold_keeps_the_function_and_leaves_no_means() -> None:
    network = random_network(shape_of("step"))
    batch = batch_of([features_of(random_prefill(seed)) for seed in range(9)])
    network.standardise(batch)
    before = network(batch)
    network.fold()
    torch.testing.assert_close(network(batch), before, **CLOSE)
    assert sorted(network.state_dict()) == ["bias", "dense.weight", "head.bias", "head.weight"]
    network.fold()  # nothing is left to fold
    torch.testing.assert_close(network(batch), before, **CLOSE)


def test_scalars_of_a_request() -> None:
    probs = torch.tensor([0.5, 0.25])
    expected = [0.5 * math.log(2) + 0.25 * math.log(4), math.log(12), 0.7]
    assert scalars(probs, 12, 0.7) == pytest.approx(expected)
    assert len(SCALARS) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "class"}, "kind 'class': must be one of prompt, step"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"num_outputs": 0}, "num_outputs 0"),
        ({"hidden": 0}, "hidden 0"),
        ({"hidden": 1.5}, "hidden 1.5: must be a whole number"),
        ({"context_size": 0}, "context_size 0 with kind 'step': must be 1 to 16777216"),
        ({"anchor_size": 0}, "anchor_size 0 with kind 'step': must be 1 to 16777216"),
        ({"kind": "prompt", "anchor_size": 0}, "context_size 6 with kind 'prompt': must be 0"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(shape_of("step"), **changes)


# --- what kinds make of outputs ---


def test_prompt_kind_chooses_the_largest_logit() -> None:
    policy = random_policy("prompt")
    chosen = set()
    for seed in range(30):
        prefill = random_prefill(seed)
        decided = policy(prefill)
        assert decided == CANDIDATES[int(dense_oracle(policy.network, prefill).argmax())]
        chosen.add(decided)
    assert len(chosen) > 1


def test_equal_logits_choose_the_smallest() -> None:
    policy = random_policy("prompt")
    for values in (policy.network.head.weight, policy.network.head.bias):
        nn.init.zeros_(values)
    assert policy(random_prefill(0)) == 1


def reach_of(outputs: Tensor, sizes: Sequence[int]) -> list[float]:
    """Chance of each position, written down: that of the first candidate that holds it, and none before it less."""
    shares = [1 / (1 + math.exp(-min(max(x, -8.0), 8.0))) for x in outputs.tolist()]
    holds = [next(c for c, size in enumerate(sizes) if size > place) for place in range(1, sizes[-1])]
    return [min(shares[k] for k in holds[: i + 1]) for i in range(len(holds))]


def test_step_kind_gives_a_forecast() -> None:
    policy = step_policy()
    reaches = []
    for seed in range(20):
        prefill = random_prefill(seed)
        forecast = policy(prefill)
        assert isinstance(forecast, LearnedForecast)
        assert forecast.reader is policy
        assert forecast.reach == pytest.approx(
            reach_of(dense_oracle(policy.network, prefill), CANDIDATES.sizes), rel=1e-4, abs=1e-4
        )
        reaches.append(tuple(forecast.reach))
    assert len(set(reaches)) > 1


candidate_sets = st.sets(st.integers(1, 32), min_size=1, max_size=8).map(sorted)


@settings(deadline=None)
@given(sizes=candidate_sets, data=st.data())
def test_expected_taus_of_a_step_ascend_within_the_block(sizes: list[int], data: st.DataObject) -> None:
    values = st.lists(st.floats(-1e6, 1e6, width=32), min_size=len(sizes), max_size=len(sizes))
    outputs = torch.tensor([data.draw(values), data.draw(values)])
    for taus in expected_taus(outputs, sizes).tolist():
        assert taus == sorted(taus)
        assert all(1 <= tau <= size for tau, size in zip(taus, sizes, strict=True))
        assert sizes[0] > 1 or taus[0] == 1.0


def test_a_share_of_half_takes_half_of_every_gap() -> None:
    assert expected_taus(torch.zeros(1, 4), (1, 2, 4, 8)).tolist() == [[1.0, 1.5, 2.5, 4.5]]
    assert expected_taus(torch.zeros(1, 2), (3, 4)).tolist() == [[2.0, 2.5]]


def test_extreme_outputs_are_all_drafts_or_none() -> None:
    """But for sigmoid(8) of them: beyond it outputs are cut off, in training too."""
    none, every = (expected_taus(torch.full((1, 4), x), tuple(CANDIDATES))[0] for x in (-100.0, 100.0))
    miss = 1 / (1 + math.exp(8))
    torch.testing.assert_close(none, torch.tensor([1 + miss * (size - 1) for size in CANDIDATES]))
    torch.testing.assert_close(every, torch.tensor([size - miss * (size - 1) for size in CANDIDATES]))


@settings(deadline=None)
@given(sizes=candidate_sets, data=st.data())
def test_the_reach_falls_and_adds_up_to_the_expected_tokens(sizes: list[int], data: st.DataObject) -> None:
    """Where shares fall, as they do in truth; otherwise a later position is no more likely than one before it."""
    values = st.lists(st.floats(-9, 9, width=32), min_size=len(sizes), max_size=len(sizes))
    outputs, candidates = data.draw(values), CandidateSet(tuple(sizes))
    for drawn in (sorted(outputs, reverse=True), outputs):
        policy = step_policy()
        shape = shape_of("step", num_outputs=len(sizes))
        info = dataclasses.replace(policy.info, candidates=candidates, shape=shape)
        policy = LearnedPolicy(info, random_network(shape))
        policy.network.head.weight.zero_()
        policy.network.head.bias.copy_(torch.tensor(drawn))
        forecast = policy(random_prefill(0))
        assert isinstance(forecast, LearnedForecast)
        reach = list(forecast.reach)
        assert len(reach) == sizes[-1] - 1
        assert reach == sorted(reach, reverse=True)
        taus = expected_taus(torch.tensor([drawn]), sizes)[0].tolist()
        found = [1 + sum(reach[: size - 1]) for size in sizes]
        if drawn == sorted(drawn, reverse=True):
            assert found == pytest.approx(taus, rel=1e-4)
        assert all(one <= other + 1e-4 for one, other in zip(found, taus, strict=True))


@settings(deadline=None)
@given(candidate_sets)
def test_gaps_add_up_to_the_drafts(sizes: list[int]) -> None:
    gaps = slot_gaps(sizes)
    assert [sum(gaps[: i + 1]) for i in range(len(sizes))] == [size - 1 for size in sizes]


# --- what came of forecasts ---


def learned_forecast(policy: LearnedPolicy, expected: Sequence[float]) -> LearnedForecast:
    """A request whose every step's positions are accepted with these chances by the policy."""
    forecast = policy(random_prefill(0))
    assert isinstance(forecast, LearnedForecast)
    forecast.expected = expected
    return forecast


def test_forecasts_follow_what_came_of_them() -> None:
    """Less than half of what was expected, in one request: it is expected to go on, and of another one somewhat."""
    policy, expected = step_policy(), [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    one, other = (learned_forecast(policy, expected) for _ in range(2))
    assert one.reach == pytest.approx(expected)
    for _ in range(40):
        one.observe(7, 9, 1)
    ratios = [np.array(forecast.reach) / np.array(expected) for forecast in (one, other)]
    assert all(np.ptp(each) == pytest.approx(0) for each in ratios)  # all positions alike
    assert 1 / 3.5 < ratios[0][0] < ratios[1][0] < 1
    assert ratios[1][0] == pytest.approx(policy.record.ratio)
    assert learned_forecast(policy, expected).reach == pytest.approx(other.reach)
    assert learned_forecast(step_policy(), expected).reach == pytest.approx(expected)  # another policy knows nothing


def test_vectors_that_are_no_numbers_spoil_no_other_request() -> None:
    policy = step_policy()
    broken, other = (learned_forecast(policy, [0.8] * 7) for _ in range(2))
    policy.read([broken], torch.full((1, CONTEXT_SIZE), torch.nan), torch.randn(1, ANCHOR_SIZE))
    assert broken.reach == pytest.approx([0.0] * 7, abs=1e-3)
    broken.observe(7, 7, 0)
    assert 0 < policy.record.ratio < 2
    assert other.reach == pytest.approx([0.8] * 7, rel=0.01)


def test_no_chance_is_more_than_certain() -> None:
    policy = step_policy()
    forecast = learned_forecast(policy, [0.9, 0.5, 0.5])
    for _ in range(200):
        forecast.observe(3, 3, 3)
    assert forecast.reach[0] == 1
    assert forecast.reach[1] == forecast.reach[2] == pytest.approx(3 / 3.8, rel=0.01)


def test_what_was_drafted_counts_as_deep_as_it_went() -> None:
    """Positions that the draft did not run for are neither expected nor missed."""
    policy = step_policy()
    forecast = learned_forecast(policy, [0.5] * 7)
    forecast.observe(0, 0, 0)
    assert policy.record.ratio == 1
    forecast.observe(2, 1, 1)
    assert policy.record.ratio == pytest.approx(1)
    forecast.observe(4, 4, 4)
    assert policy.record.ratio == pytest.approx((100 + 5) / (100 + 3), rel=1e-3)


@pytest.mark.parametrize("error", [0.6, 1.0, 1.6])
def test_a_policy_that_errs_chooses_as_one_that_does_not(error: float) -> None:
    """Half of the requests are worth drafting for; told what is a constant factor off, it learns which, by doing."""
    hazards, price = {True: 0.8, False: 0.25}, linear_price(0.35)
    reach = {easy: [p**k for k in range(1, 8)] for easy, p in hazards.items()}
    best = {easy: choose_depths([of], price, Load(0), [1.0] * 7).depths[0] for easy, of in reach.items()}
    assert best[False] == 0 < best[True]
    policy, draw = step_policy(), random.Random(0)
    chosen: dict[bool, list[int]] = {True: [], False: []}
    for request in range(120):
        easy = request % 2 == 0
        forecast = learned_forecast(policy, [min(1.0, error * chance) for chance in reach[easy]])
        for _ in range(50):
            [depth] = choose_depths([forecast.reach], price, Load(0), [1.0] * 7).depths
            accepted = next((k for k in range(depth) if draw.random() > hazards[easy]), depth)
            forecast.observe(depth, depth, accepted)
            if request >= 60:
                chosen[easy].append(depth)
    near = [depth for depth in chosen[True] if abs(depth - best[True]) <= 1]
    assert len(near) > 0.6 * len(chosen[True])
    assert chosen[False].count(0) > 0.9 * len(chosen[False])


# --- reading every step ---


def test_reading_several_is_reading_each() -> None:
    policy = step_policy()
    prefills = [random_prefill(seed) for seed in range(5)]
    contexts, anchors = torch.randn(5, CONTEXT_SIZE), torch.randn(5, ANCHOR_SIZE)
    together, alone = ([policy(prefill) for prefill in prefills] for _ in range(2))
    before = [f.reach for f in together]  # type: ignore[union-attr]
    policy.read(together, contexts, anchors)  # type: ignore[arg-type]
    for i, (one, other, prefill) in enumerate(zip(together, alone, prefills, strict=True)):
        assert isinstance(one, LearnedForecast)
        assert isinstance(other, LearnedForecast)
        policy.read([other], contexts[i : i + 1], anchors[i : i + 1])
        assert one.reach == pytest.approx(other.reach, rel=1e-5)
        assert one.reach != before[i]
        # The scalars stay those of the request's prefill.
        then = prefill._replace(context=contexts[i], anchor=anchors[i])
        expected = reach_of(dense_oracle(policy.network, then), CANDIDATES.sizes)
        assert one.reach == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_reading_what_the_prefill_showed_changes_nothing() -> None:
    policy, prefill = step_policy(), random_prefill(3)
    forecast = policy(prefill)
    assert isinstance(forecast, LearnedForecast)
    assert prefill.context is not None
    assert prefill.anchor is not None
    before = forecast.reach
    policy.read([forecast], prefill.context[None].half(), prefill.anchor[None].half())
    assert forecast.reach == pytest.approx(before, rel=1e-2)  # of half precision
    policy.read([forecast], prefill.context[None], prefill.anchor[None])
    assert forecast.reach == before


# --- refusals ---


def test_policy_refuses_another_vocabulary() -> None:
    with pytest.raises(ValueError, match=r"51.*50"):
        random_policy()(random_prefill(0)._replace(logits=torch.zeros(51)))


@pytest.mark.parametrize("name", ["context", "anchor"])
@pytest.mark.parametrize(("vector", "found"), [(None, "no vector"), (torch.zeros(3), "size 3")])
def test_policy_refuses_vectors_of_another_draft(name: str, vector: Tensor | None, found: str) -> None:
    size = {"context": CONTEXT_SIZE, "anchor": ANCHOR_SIZE}[name]
    prefill = random_prefill(0)._replace(**{name: vector})
    with pytest.raises(ValueError, match=f"{name}: {found}; the policy's has size {size}"):
        step_policy()(prefill)
    assert random_policy("prompt")(prefill) in tuple(CANDIDATES)  # which does not read them


def test_info_refuses_objectives_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="objective 'best'"):
        dataclasses.replace(random_policy().info, objective="best")  # type: ignore[arg-type]


def test_info_refuses_outputs_of_other_candidates() -> None:
    with pytest.raises(ValueError, match="4 outputs for 2 candidates"):
        dataclasses.replace(random_policy().info, candidates=CandidateSet((1, 2)))


def test_a_price_belongs_to_throughput() -> None:
    policy, dear = step_policy(), random_policy("step", "throughput")
    with pytest.raises(ValueError, match="objective 'throughput': needs a step price"):
        LearnedPolicy(dear.info, dear.network)
    with pytest.raises(ValueError, match="objective 'tau': has no step price"):
        LearnedPolicy(policy.info, policy.network, PRICE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_policy_follows_its_input_to_the_gpu() -> None:
    prefill = random_prefill(0)
    assert prefill.context is not None
    assert prefill.anchor is not None
    there = prefill._replace(
        logits=prefill.logits.cuda(), context=prefill.context.cuda(), anchor=prefill.anchor.cuda()
    )
    policy = random_policy()
    on_cpu = policy(prefill)
    assert policy(there) == on_cpu
    assert policy.network.rows.is_cuda
    reader = step_policy()
    here, moved = reader(prefill), reader(there)
    assert isinstance(here, LearnedForecast)
    assert isinstance(moved, LearnedForecast)
    assert moved.reach == pytest.approx(here.reach, rel=1e-3)
    moved.expected = ()
    reader.read([moved], there.context[None], there.anchor[None])  # type: ignore[index]
    assert moved.reach == pytest.approx(here.reach, rel=1e-3)


# --- which pair ---


def policy_of(pair: PairId, vocab_size: int) -> LearnedPolicy:
    shape = shape_of(vocab_size=vocab_size)
    info = PolicyInfo(pair, CANDIDATES, "tau", shape, THRESHOLD)
    return LearnedPolicy(info, PolicyNetwork(shape, torch.tensor([1])))


def test_check_accepts_its_own_pair(tiny_pair: Pair) -> None:
    policy_of(tiny_pair.id, tiny_pair.vocab_size).check(tiny_pair)


@pytest.mark.parametrize("part", PairId._fields)
def test_check_names_both_pairs(tiny_pair: Pair, part: str) -> None:
    other = tiny_pair.id._replace(**{part: "another"})
    with pytest.raises(ValueError, match="policy made for") as caught:
        policy_of(other, tiny_pair.vocab_size).check(tiny_pair)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in (*other, *tiny_pair.id))


def test_check_names_both_vocabularies(tiny_pair: Pair) -> None:
    with pytest.raises(ValueError, match=rf"vocabulary 77.*vocabulary {tiny_pair.vocab_size}"):
        policy_of(tiny_pair.id, 77).check(tiny_pair)


# --- directories ---


@pytest.mark.parametrize("objective", ["tau", "throughput"])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: Kind, objective: Objective, tmp_path: Path) -> None:
    policy = random_policy(kind, objective, seed=3)
    save_policy(policy, tmp_path / "p")
    loaded = load_policy(tmp_path / "p")
    assert (loaded.info, loaded.price) == (policy.info, policy.price)
    for seed in range(10):
        prefill = random_prefill(seed)
        assert torch.equal(loaded.network(features_of(prefill)), policy.network(features_of(prefill)))
        one, other = loaded(prefill), policy(prefill)
        assert one == other if kind == "prompt" else one.reach == other.reach  # type: ignore[union-attr]
    price = ["price.json"] if objective == "throughput" else []
    assert sorted(f.name for f in (tmp_path / "p").iterdir()) == ["policy.json", "policy.safetensors", *price]


def test_saving_again_replaces(tmp_path: Path) -> None:
    save_policy(random_policy(objective="throughput", seed=1), tmp_path)
    save_policy(random_policy(seed=2), tmp_path)
    assert torch.equal(load_policy(tmp_path).network.rows, random_policy(seed=2).network.rows)
    assert not (tmp_path / "price.json").exists()  # of the one before


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
    "old format": (edit_json(format=2), ["policy.json", "format 2", "reads 4", "train anew with jobs/train.py"]),
    "other objective": (edit_json(objective="price"), ["policy.json", "objective", "'price'"]),
    "other kind": (edit_json(kind="class"), ["policy.json", "kind", "'class'"]),
    "kind of other tensors": (edit_json(kind="step"), ["policy.json", "context_size 0", "'step'"]),
    "bad candidates": (edit_json(candidates=[4, 2, 1, 8]), ["policy.json", "'candidates'"]),
    "no candidates": (edit_json(candidates=7), ["policy.json", "'candidates'"]),
    "fewer candidates": (edit_json(candidates=[1, 2]), ["policy.json", "4 outputs for 2 candidates"]),
    "bad vocabulary": (edit_shape(vocab_size="50"), ["policy.json", "vocab_size", "'50'", "whole number"]),
    "wide as true": (edit_shape(hidden=True), ["policy.json", "hidden", "True", "whole number"]),
    "bad threshold": (edit_json(threshold=1.5), ["policy.json", "'threshold'", "1.5"]),
    "bad training": (edit_json(training=[1]), ["policy.json", "'training'"]),
    "half a pair": (edit_json(pair={"target": "x"}), ["policy.json", "'pair'", "draft_revision"]),
    "pair of numbers": (edit_json(pair=dict.fromkeys(PAIR_FIELDS, 1)), ["policy.json", "'pair'"]),
    "shape without a width": (edit_shape(context_size=None), ["policy.json", "context_size"]),
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


@pytest.mark.parametrize("name", FAULTS)
def test_damage_is_refused_by_name(name: str, tmp_path: Path) -> None:
    save_policy(random_policy(objective="throughput"), tmp_path)
    damage, words = FAULTS[name]
    damage(tmp_path)
    with pytest.raises(ValueError, match=r"policy\.|price\.json") as caught:
        load_policy(tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_step_policy_of_another_draft_is_refused(tmp_path: Path) -> None:
    save_policy(step_policy(), tmp_path)
    edit_shape(context_size=7)(tmp_path)
    with pytest.raises(ValueError, match=r"policy\.safetensors: tensor 'dense.weight' .* needed: .*\(16, 15\)"):
        load_policy(tmp_path)


@pytest.mark.parametrize("objective", ["tau", "throughput"])
def test_interrupted_save_is_not_loaded(
    objective: Objective, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_policy(random_policy(objective=objective, seed=1), tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_policy(random_policy(objective=objective, seed=2), tmp_path)
    with pytest.raises(ValueError, match=r"policy\.json: no such file"):
        load_policy(tmp_path)
