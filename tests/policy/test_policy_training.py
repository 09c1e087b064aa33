"""Training a policy: it learns what is there, claims nothing that is not, and is the same however it is run."""

import copy
import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from blockpilot.control.choose import choose_depths
from blockpilot.control.cost import Load
from blockpilot.evaluation.oracle import Table, potential
from blockpilot.evaluation.statistics import interval
from blockpilot.policy.dataset import Examples, open_examples, write_examples
from blockpilot.policy.learned import (
    LearnedForecast,
    LearnedPolicy,
    Objective,
    PolicyInfo,
    expected_taus,
    slot_gaps,
)
from blockpilot.policy.network import Kind, PolicyNetwork, SparseProbs
from blockpilot.policy.offline import decode, hindsight, lookup_report
from blockpilot.policy.training import (
    EpochSums,
    Fit,
    FitSettings,
    FitTask,
    batches,
    evaluate,
    fitted_network,
    new_network,
    predict,
    shrink,
    train_epoch,
)
from blockpilot.sweep.rows import SweepRow, validate
from blockpilot.types import CandidateSet, Prefill
from helpers.prices import price
from helpers.sweeps import (
    ANCHOR_SIZE,
    CANDIDATES,
    CONTEXT_SIZE,
    LEADS,
    NUM_ANCHORS,
    NUM_PLACES,
    PAIR,
    TRAILS,
    VOCAB_SIZE,
    heaviest,
    metadata,
    synthetic_rows,
)


def dense(row: SweepRow) -> Tensor:
    probs = torch.zeros(VOCAB_SIZE)
    probs[row.probs_ids] = torch.tensor(row.probs)
    return probs


def test_synthetic_rows_are_those_of_a_dense_sweep() -> None:
    for row in [*synthetic_rows(20, 0), *synthetic_rows(20, 1, signal=False)]:
        validate(row, metadata())
        assert len(row.step_places) == NUM_PLACES
        assert [sum(histogram) for histogram in row.emitted_histograms] == row.num_steps


# --- what is learned ---

SMALL = FitSettings("prompt", hidden=64, epochs=12, batch_size=64, lr=3e-3, dropout=0.1)
SECONDS = torch.tensor([1 + 0.1 * size for size in CANDIDATES])  # of a step
DEEPEST = torch.tensor([[min(depth, size) - 1.0 for size in CANDIDATES] for depth in CANDIDATES])
"""[depth, candidate]: drafts that are right if any are."""
Make = Callable[..., Examples]


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of policy with its objective, and how many rows it takes to learn the known functions."""

    kind: Kind
    objective: Objective
    num_rows: int
    epochs: int

    @property
    def settings(self) -> FitSettings:
        return dataclasses.replace(SMALL, kind=self.kind, epochs=self.epochs)

    def task(self, step_costs: Tensor | None = None) -> FitTask:
        costs = SECONDS if self.objective == "throughput" else torch.ones(4)
        return FitTask(self.kind, self.objective, tuple(CANDIDATES), costs if step_costs is None else step_costs)


CASES = {
    "prompt for tau": Case("prompt", "tau", 1000, 12),
    "prompt for throughput": Case("prompt", "throughput", 2000, 12),
    "step": Case("step", "throughput", 1000, 8),
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Examples of rows, in a folder of their own."""

    def made(rows: Sequence[SweepRow], kind: Kind = "prompt", candidates: Sequence[int] = CANDIDATES) -> Examples:
        folder = tmp_path_factory.mktemp("examples")
        write_examples(folder, [rows], candidates, kind)
        return open_examples(folder)

    return made


def of_case(case: Case, num_rows: int, seed: int, signal: bool = True) -> list[SweepRow]:
    """For steps, rows all of whose candidates are alike: what a step cannot see would be noise."""
    return synthetic_rows(num_rows, seed, signal, LEADS if case.kind == "step" else TRAILS)


def trained(train: Examples, validation: Examples, settings: FitSettings, task: FitTask) -> PolicyNetwork:
    fit = run_fit(train, validation, settings, task)
    return fitted_network(new_network(train, VOCAB_SIZE, settings), fit.best_weights(), train, settings, task)


def run_fit(train: Examples, validation: Examples, settings: FitSettings, task: FitTask) -> Fit:
    fit = Fit(new_network(train, VOCAB_SIZE, settings), train, validation, settings, task)
    while not fit.done:
        fit.run_epoch()
    return fit


def true_taus(case: Case, rows: Sequence[SweepRow], examples: Examples) -> Tensor:
    """What each example's candidates give on average, noise left out: [E, K]."""
    if case.kind == "step":
        features = examples.features
        return 1 + LEADS * DEEPEST[(features.context[:, :4] + features.anchor[:, :4]).argmax(dim=1)]
    best = [heaviest(row.probs_ids, row.probs)[0] for row in sorted(rows, key=lambda row: row.prompt_id)]
    chances = torch.full((len(rows), 4), TRAILS)
    chances[torch.arange(len(rows)), best] = LEADS
    return 1 + chances * DEEPEST.mean(dim=0)


def prefill_of(row: SweepRow) -> Prefill:
    """As the engine shows it; with the context as exact as it is stored."""
    anchor = torch.zeros(ANCHOR_SIZE)
    context = torch.tensor(row.context).half().float()
    return Prefill(dense(row).log(), context, row.num_prompt_tokens, row.temperature, anchor)


def decided(case: Case, network: PolicyNetwork, rows: Sequence[SweepRow], examples: Examples) -> list[int]:
    """The block sizes that the policy takes in use, one request after the other."""
    candidates = CandidateSet(tuple(CANDIDATES))
    used = price(pair=PAIR, base_s=1.1, slot_s=0.1) if case.objective == "throughput" else None
    info = PolicyInfo(PAIR, candidates, case.objective, network.shape, 1e-5)
    policy = LearnedPolicy(info, network, used)
    found = []
    if case.kind == "step":
        assert used is not None
        assert torch.tensor([used.chains_s(size, 1) for size in candidates]).allclose(SECONDS)
        forecast = policy(prefill_of(rows[0]))
        assert isinstance(forecast, LearnedForecast)
        features = examples.features
        for context, anchor in zip(features.context, features.anchor, strict=True):
            policy.read([forecast], context[None], anchor[None])
            [depth] = choose_depths([forecast.reach], used, Load(0), [1.0] * len(forecast.reach)).depths
            found.append(1 + depth)
        return found
    for row in sorted(rows, key=lambda row: row.prompt_id):
        made = policy(prefill_of(row))
        assert isinstance(made, int)
        found.append(made)
    return found


@pytest.mark.parametrize("name", CASES)
def test_learns_a_known_function(name: str, make: Make) -> None:
    """On new rows, by what is true of them: 95% of the rate there is, and 85% of what is to be had beyond one size.

    Over seeds it is 97% to 100% and 90% to 100%; the least where taus are regressed on probs, since the smallest size
    leads by half a token only.
    """
    case = CASES[name]
    train, test_rows = make(of_case(case, case.num_rows, 0), case.kind), of_case(case, 300, 99)
    test, task = make(test_rows, case.kind), case.task()
    network = trained(train, test, case.settings, task)
    chosen = task.chosen(predict(network, test))
    tokens, seconds = (values.double().numpy() for values in task.table(true_taus(case, test_rows, test)))
    table = Table(tokens, seconds)
    there = potential(table, CANDIDATES)
    assert there.headroom > 0.1
    rate = table.rate(chosen.numpy())
    assert rate >= 0.95 * there.oracle
    assert (rate - there.best_fixed_rate) / (there.oracle - there.best_fixed_rate) >= 0.85
    report = lookup_report(network, task, train, test)
    assert report.claims_gain
    assert report.best_fixed < report.policy <= report.oracle
    some = test_rows[:60]
    few = test.take(torch.arange(60)) if case.kind == "step" else make(some)
    sizes = decided(case, network, some, few)
    assert sizes == [CANDIDATES[c] for c in task.chosen(predict(network, few)).tolist()]
    assert len(set(sizes)) > 1


@pytest.mark.parametrize("name", CASES)
def test_claims_no_gain_where_there_is_none(name: str, make: Make) -> None:
    """Once with costs that make every size worth the same, so that nothing but luck tells them apart."""
    case, gains = CASES[name], []
    settings = dataclasses.replace(case.settings, epochs=10, lr=3e-3)
    taus = make(of_case(case, 1000, 7, signal=False), case.kind).taus
    even = taus.mean(dim=0) if case.kind == "step" or case.objective == "tau" else 1 / (1 / taus).mean(dim=0)
    for seed in range(3):
        train = make(of_case(case, 120, 10 * seed, signal=False), case.kind)
        validation = make(of_case(case, 60, 10 * seed + 1, signal=False), case.kind)
        for task in (case.task(), dataclasses.replace(case.task(), objective="throughput", step_costs=even)):
            report = lookup_report(trained(train, validation, settings, task), task, train, validation)
            assert not report.claims_gain
            assert report.oracle > report.best_fixed  # the winner's curse that a look-up of labels would show
            gains.append(report.gain)
    assert sum(gains) / len(gains) < 0.05


# --- losses ---


def test_the_loss_of_a_step_is_unbiased() -> None:
    """At the logits of the mean shares its gradient is zero, though single shares lie outside of 0 to 1."""
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 2, 4, 8)
    # Each size drafts anew: a wider block may well emit less.
    taus = torch.stack([torch.randint(1, size + 1, (500,), generator=generator) for size in sizes], dim=1).float()
    gaps = torch.tensor(slot_gaps(sizes)[1:])
    shares = taus.diff(dim=1) / gaps
    assert bool((shares < 0).any())
    mean = shares.mean(dim=0)
    outputs = torch.cat([torch.tensor([5.0]), mean.logit()]).expand(500, 4).clone().requires_grad_()
    task = FitTask("step", "tau", sizes, torch.ones(4))
    task.loss(outputs, taus).backward()  # type: ignore[no-untyped-call]
    assert outputs.grad is not None
    torch.testing.assert_close(outputs.grad.sum(dim=0), torch.zeros(4), rtol=0, atol=1e-4)
    assert not outputs.grad[:, 0].any()  # block size 1 has nothing to learn
    assert float(outputs.grad.abs().sum()) > 1
    torch.testing.assert_close(task.taus(outputs)[0], taus.mean(dim=0), rtol=1e-5, atol=1e-5)


def test_a_network_that_sees_the_same_everywhere_learns_the_mean(make: Make) -> None:
    """Adam's last steps are of the order of lr / epochs, in logits; taus are up to 8."""
    contexts, embeddings = bytes(2 * CONTEXT_SIZE * NUM_PLACES), bytes(2 * ANCHOR_SIZE * NUM_PLACES)
    nothing = {"probs_ids": [0], "probs": [1.0], "step_contexts": contexts, "step_embeddings": embeddings}
    rows = [dataclasses.replace(row, **nothing) for row in synthetic_rows(200, 0, trails=LEADS)]  # type: ignore[arg-type]
    examples = make(rows, "step", [1, *CANDIDATES])
    settings = FitSettings("step", hidden=8, epochs=30, batch_size=50, lr=3e-2, dropout=0.0)
    task = FitTask("step", "tau", (1, *CANDIDATES), torch.ones(5))
    network = trained(examples, examples, settings, task)
    mean = examples.taus.mean(dim=0)
    assert mean.max() > 1.9
    for taus in task.taus(predict(network, examples))[:5]:
        assert taus[0] == 1
        torch.testing.assert_close(taus, mean, rtol=0.02, atol=0)


def test_shrunk_forecasts_lie_between_what_was_learned_and_the_mean(make: Make) -> None:
    """In logits: what every further position's share of the mean is the logistic of."""
    case = CASES["step"]
    examples = make(of_case(case, 60, 0), case.kind)
    whole, weights = case.task(), new_network(examples, VOCAB_SIZE, case.settings).state_dict()
    networks = [new_network(examples, VOCAB_SIZE, case.settings) for _ in range(3)]
    learned, shrunk, mean = (
        fitted_network(network, weights, examples, dataclasses.replace(case.settings, shrink=share), whole)
        for network, share in zip(networks, (0.0, 0.3, 1.0), strict=True)
    )
    outputs, between, of_mean = (predict(network, examples) for network in (learned, shrunk, mean))
    assert outputs.std(dim=0).min() > 1e-3
    torch.testing.assert_close(between, 0.7 * outputs + 0.3 * of_mean, rtol=1e-4, atol=1e-4)
    expected = examples.taus.mean(dim=0).expand_as(of_mean)
    torch.testing.assert_close(whole.taus(of_mean), expected, rtol=1e-2, atol=1e-2)


def test_a_fitted_network_is_the_folded_one(make: Make) -> None:
    case = CASES["step"]
    examples = make(of_case(case, 60, 0), case.kind)
    network = new_network(examples, VOCAB_SIZE, case.settings)
    outputs = predict(network, examples)
    assert network.mean is not None
    settings = dataclasses.replace(case.settings, shrink=0.0)
    fitted = fitted_network(network, network.state_dict(), examples, settings, case.task())
    assert fitted.mean is None
    torch.testing.assert_close(predict(fitted, examples), outputs, rtol=1e-4, atol=1e-4)


def test_a_prompt_policy_is_not_shrunk(make: Make) -> None:
    case = CASES["prompt for tau"]
    examples = make(of_case(case, 60, 0), case.kind)
    network, settings = (
        new_network(examples, VOCAB_SIZE, case.settings),
        dataclasses.replace(case.settings, shrink=0.9),
    )
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network = fitted_network(network, weights, examples, settings, case.task())
    assert weights_equal(network.state_dict(), weights)


def test_the_loss_of_a_class_is_that_of_its_label() -> None:
    task = FitTask("prompt", "throughput", (2, 8), torch.tensor([1.0, 3.0]))
    outputs = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    taus = torch.tensor([[1.0, 2.9], [1.0, 3.1]])  # over the costs, 2 is the best and then 8
    expected = math.log(1 + math.e) + math.log(1 + 1 / math.e)
    assert float(task.loss(outputs, taus)) == pytest.approx(expected)


# --- what a task makes of taus ---


def test_label_is_the_smallest_of_equals() -> None:
    taus = torch.tensor([[1.0, 2.0, 2.0, 1.5], [3.0, 3.0, 3.0, 3.0], [1.0, 1.1, 1.2, 1.3]])
    assert CASES["prompt for tau"].task().labels(taus).tolist() == [1, 0, 3]
    assert CASES["prompt for throughput"].task().labels(taus).tolist() == [1, 0, 0]


def test_a_table_of_requests_and_one_of_steps() -> None:
    """A request that is served twice as fast takes half the seconds of a token; a step takes what it costs."""
    taus, costs = torch.tensor([[1.0, 3.0], [2.0, 2.0]]), torch.tensor([1.0, 4.0])
    for kind, objective, expected in [
        ("prompt", "tau", (taus, [[1, 4], [1, 4]])),
        ("step", "throughput", (taus, [[1, 4], [1, 4]])),
        ("prompt", "throughput", ([[1, 1], [1, 1]], [[1, 4 / 3], [1 / 2, 2]])),
    ]:
        table = FitTask(kind, objective, (2, 8), costs).table(taus)  # type: ignore[arg-type]
        for found, values in zip(table, expected, strict=True):
            torch.testing.assert_close(found, torch.as_tensor(values, dtype=torch.float32))


def test_what_is_chosen_of_outputs() -> None:
    outputs = torch.tensor([[0.5, 9.0, 2.0, 8.5], [2.0, 2.0, 2.0, 2.0]])
    assert CASES["prompt for tau"].task().chosen(outputs).tolist() == [1, 0]
    steps = CASES["step"].task()
    taus = expected_taus(outputs, CANDIDATES) / SECONDS
    assert steps.chosen(outputs).tolist() == [row.index(max(row)) for row in taus.tolist()]


# --- the same however it is run ---

BOTH = ["prompt for tau", "step"]


@pytest.fixture(scope="module")
def data(make: Make) -> dict[str, tuple[Examples, Examples]]:
    """(training, validation) by kind, small."""
    rows = synthetic_rows(60, 0), synthetic_rows(20, 1)
    return {name: (make(rows[0], case.kind), make(rows[1], case.kind)) for name, case in CASES.items()}


Data = dict[str, tuple[Examples, Examples]]


def weights_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", BOTH)
def test_seed_decides_everything_and_the_global_generator_nothing(name: str, data: Data) -> None:
    case = CASES[name]
    settings, task = dataclasses.replace(case.settings, epochs=4), case.task()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = run_fit(*data[name], settings, task).best_weights()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert weights_equal(first, run_fit(*data[name], settings, task).best_weights())
    other = run_fit(*data[name], dataclasses.replace(settings, seed=1), task).best_weights()
    assert not weights_equal(first, other)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("stop_after", [1, 3, 6])
def test_resuming_changes_nothing(name: str, data: Data, stop_after: int) -> None:
    case = CASES[name]
    settings, task = dataclasses.replace(case.settings, epochs=7, patience=3), case.task()
    straight = run_fit(*data[name], settings, task)

    def begun() -> Fit:
        return Fit(new_network(data[name][0], VOCAB_SIZE, settings), *data[name], settings, task)

    interrupted = begun()
    for _ in range(min(stop_after, straight.epoch)):
        interrupted.run_epoch()
    buffer = io.BytesIO()
    torch.save(interrupted.state_dict(), buffer)
    buffer.seek(0)
    resumed = begun()
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    while not resumed.done:
        resumed.run_epoch()
    assert weights_equal(resumed.best_weights(), straight.best_weights())
    assert weights_equal(resumed.state_dict()["network"], straight.state_dict()["network"])
    assert (resumed.epoch, resumed.best_epoch) == (straight.epoch, straight.best_epoch)
    assert resumed.history == straight.history
    assert len(straight.history) == straight.epoch


@pytest.mark.parametrize("anneal", [True, False])
def test_the_learning_rate_falls_to_zero_in_a_line(anneal: bool, data: Data) -> None:
    """The last epoch has an eighth of it; a resumed training goes on where the line is."""
    case = CASES["prompt for tau"]
    settings = dataclasses.replace(case.settings, epochs=8, anneal=anneal)

    def begun() -> Fit:
        train, validation = data["prompt for tau"]
        return Fit(new_network(train, VOCAB_SIZE, settings), train, validation, settings, case.task())

    fit, rates = begun(), []
    while not fit.done:
        if fit.epoch == 5:
            state = copy.deepcopy(fit.state_dict())
            fit = begun()
            fit.load_state_dict(state)
        fit.run_epoch()
        rates.append(fit.optimizer.param_groups[0]["lr"])
    line = [settings.lr * (1 - i / 8) for i in range(8)]
    assert rates == pytest.approx(line if anneal else [settings.lr] * 8)


def test_stops_early_and_keeps_the_best_epoch(make: Make) -> None:
    case = CASES["prompt for tau"]
    train = make(synthetic_rows(40, 0, signal=False))
    validation = make(synthetic_rows(40, 1, signal=False))
    settings = dataclasses.replace(case.settings, epochs=100, patience=5)
    fit = Fit(new_network(train, VOCAB_SIZE, settings), train, validation, settings, case.task())
    losses = []
    while not fit.done:
        losses.append(fit.run_epoch()["validation_loss"])
    assert len(losses) == fit.best_epoch + 5 < 100
    assert min(losses) == losses[fit.best_epoch - 1]
    network = new_network(train, VOCAB_SIZE, settings)
    network.load_state_dict(fit.best_weights())
    assert EpochSums(*evaluate(network, validation, case.task()).tolist()).mean_loss == pytest.approx(
        min(losses), rel=1e-6
    )


def test_without_patience_the_last_epoch_counts(data: Data) -> None:
    case = CASES["prompt for tau"]
    settings = dataclasses.replace(case.settings, epochs=5, patience=None)
    fit = run_fit(*data["prompt for tau"], settings, case.task())
    assert fit.epoch == fit.best_epoch == 5
    assert weights_equal(fit.best_weights(), fit.state_dict()["network"])


@pytest.mark.parametrize("num_rows", [7, 32, 33])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_cover_every_row_once_over_the_ranks(num_rows: int, world_size: int) -> None:
    ranks = [list(batches(num_rows, 8, 0, 1, rank, world_size)) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1  # as many optimizer steps on each
    seen = sorted(i for rank in ranks for batch in rank for i in batch.rows.tolist())
    assert seen == list(range(num_rows))
    for parts in zip(*ranks, strict=True):
        assert {part.num_global for part in parts} == {sum(len(part.rows) for part in parts)}
    again = [b.rows.tolist() for b in batches(num_rows, 8, 0, 1)]
    assert again == [b.rows.tolist() for b in batches(num_rows, 8, 0, 1)]
    assert again != [b.rows.tolist() for b in batches(num_rows, 8, 0, 2)]
    assert again != [b.rows.tolist() for b in batches(num_rows, 8, 1, 1)]


class _Gradients(torch.optim.Optimizer):
    """Keeps the gradients of its one step."""

    def __init__(self, network: PolicyNetwork) -> None:
        super().__init__(network.parameters(), {})
        self.kept: list[Tensor] = []

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.kept = [p.grad.clone() for group in self.param_groups for p in group["params"]]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_ranks_average_to_the_gradient_of_one(name: str, data: Data, world_size: int, num_rows: int) -> None:
    case = CASES[name]
    settings, task = dataclasses.replace(case.settings, dropout=0.0), case.task()
    train = data[name][0]
    rows = train.take(torch.arange(num_rows))  # with one row, some ranks have an empty part

    def gradients(rank: int, world_size: int) -> tuple[list[Tensor], Tensor]:
        network = new_network(train, VOCAB_SIZE, settings)
        optimizer = _Gradients(network)
        order = batches(num_rows, 8, 0, 1, rank, world_size)
        sums = train_epoch(network, optimizer, rows, task, order, world_size)
        return optimizer.kept, sums

    alone, sums = gradients(0, 1)
    ranks = [gradients(rank, world_size) for rank in range(world_size)]
    for i, whole in enumerate(alone):
        torch.testing.assert_close(sum(g[i] for g, _ in ranks) / world_size, whole, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sum(s for _, s in ranks), sums, rtol=1e-6, atol=0)


@pytest.mark.parametrize("world_size", [1, 3, 30])
def test_ranks_validate_every_example_once(world_size: int, data: Data) -> None:
    """With more ranks than examples, some have none."""
    name = "prompt for tau"
    case, (train, validation) = CASES[name], data[name]
    network = new_network(train, VOCAB_SIZE, case.settings)
    fits = [
        Fit(network, train, validation, case.settings, case.task(), rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert sorted(i for fit in fits for i in fit.validation.index.tolist()) == sorted(validation.index.tolist())
    parts = [evaluate(network, fit.validation, case.task()) for fit in fits]
    torch.testing.assert_close(sum(parts), evaluate(network, validation, case.task()), rtol=1e-6, atol=0)


def test_training_is_that_of_the_dense_layer(make: Make) -> None:
    """The dense first layer, begun at zero, gets the same weights; columns of unseen ids stay zero exactly."""
    rows = [row for row in synthetic_rows(60, 0) if max(row.probs_ids) < VOCAB_SIZE - 4]
    rows.sort(key=lambda row: row.prompt_id)  # as examples are
    train, case = make(rows), CASES["prompt for tau"]
    settings, task = dataclasses.replace(case.settings, dropout=0.0), case.task()
    sparse = new_network(train, VOCAB_SIZE, settings)
    dense_first = torch.nn.Linear(VOCAB_SIZE, settings.hidden)
    dense_first.weight.data.zero_()
    dense_first.bias.data.copy_(sparse.bias)
    head = copy.deepcopy(sparse.head)
    parameters = [p for module in (dense_first, head) for p in module.parameters()]
    dense_adam, adam = (torch.optim.AdamW(p, lr=1e-2) for p in (parameters, list(sparse.parameters())))
    x, labels = torch.stack([dense(row) for row in rows]), task.labels(train.taus)
    for epoch in range(1, 6):
        train_epoch(sparse, adam, train, task, batches(len(train), 16, 0, epoch))
        for batch in batches(len(train), 16, 0, epoch):
            hidden = torch.relu(dense_first(x[batch.rows]))
            loss = torch.nn.functional.cross_entropy(head(hidden), labels[batch.rows])
            dense_adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            dense_adam.step()
    columns = dense_first.weight.T
    unseen = sorted(set(range(VOCAB_SIZE)) - set(sparse.support.tolist()))
    assert unseen
    assert not columns[unseen].any()
    assert columns[sparse.support].any()
    torch.testing.assert_close(columns[sparse.support], sparse.rows, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(head.weight, sparse.head.weight, rtol=1e-3, atol=1e-4)


# --- a new network ---


def test_a_new_network_knows_scales_or_token_ids(data: Data) -> None:
    for name, case in CASES.items():
        train = data[name][0]
        network = new_network(train, VOCAB_SIZE, case.settings)
        assert network.shape.kind == case.kind
        if case.kind == "step":
            torch.testing.assert_close(network.mean, train.features.dense.mean(dim=0), rtol=1e-4, atol=1e-5)
            assert not len(network.support)
        else:
            assert network.mean is None
            assert network.support.tolist() == train.support(VOCAB_SIZE, VOCAB_SIZE).tolist()


def test_the_support_is_bounded(data: Data) -> None:
    case, (train, _) = CASES["prompt for tau"], data["prompt for tau"]
    network = new_network(train, VOCAB_SIZE, dataclasses.replace(case.settings, max_support=5))
    assert network.support.tolist() == train.support(VOCAB_SIZE, 5).tolist()
    assert len(network.rows) == 5


def test_scales_are_those_of_some_of_the_rows(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    case, (train, _) = CASES["step"], data["step"]
    monkeypatch.setattr("blockpilot.policy.training.STANDARDISE_ROWS", 7)
    network = new_network(train, VOCAB_SIZE, case.settings)
    dense = train.features.dense
    assert network.mean is not None
    assert torch.equal(network.mean, new_network(train, VOCAB_SIZE, case.settings).mean)  # type: ignore[arg-type]
    assert not torch.allclose(network.mean, dense.mean(dim=0))
    assert bool(((network.mean >= dense.min(dim=0).values) & (network.mean <= dense.max(dim=0).values)).all())


def test_predictions_do_not_depend_on_the_batch(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BOTH:
        network = trained(*data[name], dataclasses.replace(CASES[name].settings, epochs=1), CASES[name].task())
        whole = predict(network, data[name][1])
        monkeypatch.setattr("blockpilot.policy.training.PREDICT_ROWS", 7)
        torch.testing.assert_close(predict(network, data[name][1]), whole)
        assert predict(network, data[name][1].take(torch.arange(0))).shape == (0, 4)
        monkeypatch.undo()


# --- the report ---


def walked(examples: Examples, task: FitTask, take: Callable[[int], int]) -> list[tuple[float, float]]:
    """(tokens, seconds) of each prompt, step by step; take(e) is the candidate taken at example e."""
    taus, found = examples.taus, dict[int, tuple[float, float]]()
    until: dict[int, int] = {}
    for e, row in enumerate(examples.rows[examples.index].tolist()):
        if e < until.get(row, 0):
            continue
        c = take(e)
        tau, cost = float(taus[e, c]), float(task.step_costs[c])
        per_token = task.kind == "prompt" and task.objective == "throughput"
        tokens, seconds = found.get(row, (0.0, 0.0))
        found[row] = (tokens + (1 if per_token else tau), seconds + (cost / tau if per_token else cost))
        until[row] = e + int(tau)
    return list(found.values())


def rate_of(decoded: Sequence[tuple[float, float]]) -> float:
    tokens, seconds = zip(*decoded, strict=True)
    return sum(tokens) / sum(seconds)


@pytest.mark.parametrize("name", CASES)
def test_lookup_report_is_the_slow_one(name: str, data: Data) -> None:
    """Answer by answer and step by step: what is taken, what it emits and costs, and where it leads."""
    case, (train, validation) = CASES[name], data[name]
    task = case.task()
    network = trained(train, validation, dataclasses.replace(case.settings, epochs=3), task)
    report = lookup_report(network, task, train, validation)
    rates = [rate_of(walked(train, task, lambda _, c=c: c)) for c in range(4)]  # type: ignore[misc]
    fixed = rates.index(max(rates))
    took, right, labelled, square = [], 0, 0, torch.zeros(4)
    for i, taus in enumerate(validation.taus.tolist()):
        outputs = network(validation.take(torch.tensor([i])).features)
        expected = outputs if case.kind == "prompt" else expected_taus(outputs, CANDIDATES)
        worth = expected[0] if case.kind == "prompt" else expected[0] / task.step_costs
        took.append(int(worth.argmax()))
        best = int((torch.tensor(taus) / task.step_costs).argmax())
        right += took[-1] == best
        labelled += fixed == best
        square += (expected[0].detach() - torch.tensor(taus)) ** 2
    num = len(validation)
    assert report.num_examples == num
    assert report.best_fixed_block_size == CANDIDATES[fixed]
    assert (report.accuracy, report.accuracy_best_fixed) == pytest.approx((right / num, labelled / num))
    decoded = [walked(validation, task, take) for take in (lambda e: took[e], lambda _: fixed)]
    (tokens, seconds), (fixed_tokens, fixed_seconds) = (np.array(values).T[:, None] for values in decoded)
    policy, best_fixed = tokens.sum() / seconds.sum(), fixed_tokens.sum() / fixed_seconds.sum()
    ratio = interval([tokens, fixed_seconds], [seconds, fixed_tokens])
    assert (report.policy, report.best_fixed) == pytest.approx((policy, best_fixed), rel=1e-5)
    assert (report.gain, report.gain_low, report.gain_high) == pytest.approx(np.array(ratio) - 1, abs=1e-5)
    assert min(rates) * 0.5 < report.random < report.oracle
    assert report.oracle >= max(policy, best_fixed) - 1e-9
    room = report.oracle - best_fixed
    assert report.share_captured == pytest.approx((policy - best_fixed) / room, abs=1e-4)
    spread = ((validation.taus - validation.taus.mean(dim=0)) ** 2).sum(dim=0)
    r2 = math.nan if case.kind == "prompt" else float((1 - square / spread).mean())
    assert report.r2 == pytest.approx(r2, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("name", CASES)
def test_hindsight_is_the_best_of_all_choices(name: str, make: Make) -> None:
    """Against all there are, on answers that are short enough to try them."""
    case = CASES[name]
    task = case.task()
    for seed in range(5):
        rows = [few_steps(row) for row in synthetic_rows(2, seed)]
        examples = make(rows, case.kind)
        assert len(examples) <= 6
        every = product(range(4), repeat=len(examples))
        best = max(rate_of(walked(examples, task, choices.__getitem__)) for choices in every)
        found = decode(task, examples, hindsight(task, examples))
        assert rate_of(list(zip(*found, strict=True))) == pytest.approx(best, rel=1e-6)


def few_steps(row: SweepRow) -> SweepRow:
    """The first three recorded places of a row only."""
    num, contexts, embeddings = len(row.step_places), row.step_contexts, row.step_embeddings
    return dataclasses.replace(
        row,
        step_places=row.step_places[:3],
        step_contexts=contexts[: 3 * len(contexts) // num],
        step_embeddings=embeddings[: 3 * len(embeddings) // num],
    )


def test_the_same_choice_everywhere_is_that_fixed_size(make: Make) -> None:
    """A policy that expects the mean of everything gains nothing, whatever its steps look like one by one."""
    case = CASES["step"]
    examples = make(synthetic_rows(40, 0, signal=False), "step")
    network = new_network(examples, VOCAB_SIZE, case.settings)
    shrink(network, examples, case.task(), 1.0)
    report = lookup_report(network, case.task(), examples, examples)
    fixed = [rate_of(walked(examples, case.task(), lambda _, c=c: c)) for c in range(4)]  # type: ignore[misc]
    assert report.policy == pytest.approx(fixed[int(case.task().chosen(predict(network, examples))[0])], rel=1e-6)
    assert not report.claims_gain
    assert report.gain <= 0


def test_the_best_fixed_size_is_that_of_decodings(make: Make) -> None:
    """Rows on which a size does badly are passed in more steps: an average over all places flatters it."""
    case = CASES["step"]
    rows = synthetic_rows(200, 0)
    task, examples = case.task(torch.tensor([1.0, 9.0, 9.0, 1.5])), make(rows, "step")
    of_places = examples.taus.mean(dim=0) / task.step_costs
    tokens = NUM_ANCHORS * len(rows)
    of_decodings = [tokens / sum(row.num_steps[c] for row in rows) / float(task.step_costs[c]) for c in range(4)]
    assert int(of_places.argmax()) == 3
    assert of_decodings.index(max(of_decodings)) == 0
    network = new_network(examples, VOCAB_SIZE, case.settings)
    report = lookup_report(network, task, examples, examples)
    assert report.best_fixed_block_size == 2


def test_candidates_that_never_vary_have_no_r2(make: Make) -> None:
    """Plain decoding emits one token whatever is known; its prediction is exact and explains nothing."""
    case = CASES["step"]
    rows = synthetic_rows(40, 0), synthetic_rows(30, 1)
    with_one = [make(of, "step", [1, *CANDIDATES]) for of in rows]
    task = FitTask("step", "tau", (1, *CANDIDATES), torch.ones(5))
    settings = dataclasses.replace(case.settings, epochs=3)
    report = lookup_report(trained(with_one[0], with_one[1], settings, task), task, *with_one)
    assert math.isfinite(report.r2)
    assert report.r2 < 1


def test_probs_do_not_matter_to_kind_step(data: Data) -> None:
    train, _ = data["step"]
    network = new_network(train, VOCAB_SIZE, CASES["step"].settings).eval()
    features = train.features
    probs = SparseProbs(torch.arange(len(train)), torch.ones(len(train)), torch.arange(len(train)))
    assert torch.equal(network(features), network(features._replace(probs=probs)))
