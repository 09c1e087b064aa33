"""Training a policy of kind `prompt`: it learns a known function, claims no gain without one, and is reproducible."""

import copy
import dataclasses
import io
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from blockpilot.evaluation.oracle import gain, oracle, potential
from blockpilot.policy.dataset import Examples, open_examples, write_examples
from blockpilot.policy.learned import PromptInfo, PromptPolicy
from blockpilot.policy.network import PolicyNetwork
from blockpilot.policy.offline import lookup_report
from blockpilot.policy.training import (
    EpochSums,
    Fit,
    FitSettings,
    FitTask,
    batches,
    evaluate,
    new_network,
    predict,
    train_epoch,
)
from blockpilot.sweep.rows import SweepRow
from blockpilot.types import CandidateSet, Prefill
from helpers.prices import price
from helpers.sweeps import (
    CANDIDATES,
    LEADS,
    PAIR,
    TRAILS,
    VOCAB_SIZE,
    heaviest,
    synthetic_rows,
)


def dense(row: SweepRow) -> Tensor:
    probs = torch.zeros(VOCAB_SIZE)
    probs[row.probs_ids] = torch.tensor(row.probs)
    return probs


# --- what is learned ---

SMALL = FitSettings("prompt", hidden=64, epochs=12, batch_size=64, lr=3e-3, dropout=0.1)
SECONDS = torch.tensor([1 + 0.1 * size for size in CANDIDATES])  # of a step
DEEPEST = torch.tensor([[min(depth, size) - 1.0 for size in CANDIDATES] for depth in CANDIDATES])
"""[depth, candidate]: accepted tokens if any are accepted."""
Make = Callable[..., Examples]


TAU = FitTask("tau", tuple(CANDIDATES), torch.ones(4))
THROUGHPUT = FitTask("throughput", tuple(CANDIDATES), SECONDS)
TASKS = pytest.mark.parametrize("task", [TAU, THROUGHPUT], ids=["tau", "throughput"])


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Function that writes the examples of rows to a new folder and opens them."""

    def made(rows: Sequence[SweepRow], candidates: Sequence[int] = CANDIDATES) -> Examples:
        folder = tmp_path_factory.mktemp("examples")
        write_examples(folder, [rows], candidates)
        return open_examples(folder)

    return made


def new_fit(train: Examples, validation: Examples, settings: FitSettings, task: FitTask = TAU) -> Fit:
    return Fit(new_network(train, VOCAB_SIZE, settings), train, validation, settings, task)


def run_fit(train: Examples, validation: Examples, settings: FitSettings, task: FitTask = TAU) -> Fit:
    fit = new_fit(train, validation, settings, task)
    while not fit.done:
        fit.run_epoch()
    return fit


def trained(train: Examples, validation: Examples, settings: FitSettings, task: FitTask) -> PolicyNetwork:
    network = new_network(train, VOCAB_SIZE, settings)
    network.load_state_dict(run_fit(train, validation, settings, task).best)
    return network


def true_taus(rows: Sequence[SweepRow]) -> Tensor:
    """Expected tau [E, K] of every candidate for each example, without noise."""
    best = [heaviest(row.probs_ids, row.probs)[0] for row in sorted(rows, key=lambda row: row.prompt_id)]
    chances = torch.full((len(rows), 4), TRAILS)
    chances[torch.arange(len(rows)), best] = LEADS
    return 1 + chances * DEEPEST.mean(dim=0)


def decided(task: FitTask, network: PolicyNetwork, rows: Sequence[SweepRow]) -> list[int]:
    """Block sizes that the policy selects for one request at a time."""
    step_price = price(pair=PAIR, base_s=1.1, slot_s=0.1) if task.objective == "throughput" else None
    info = PromptInfo(PAIR, CandidateSet(task.candidates), task.objective, network.shape, 1e-5)
    policy = PromptPolicy(info, network, step_price)
    in_order = sorted(rows, key=lambda row: row.prompt_id)
    return [policy(Prefill(dense(row).log(), None, row.num_prompt_tokens, row.temperature)) for row in in_order]


@TASKS
def test_learns_a_known_function(task: FitTask, make: Make) -> None:
    """At least 95% of the oracle's rate and 85% of its gain over the best fixed size, on new rows by their true tau.

    Over seeds it is 97% to 100% and 90% to 100%.
    """
    train, test_rows = make(synthetic_rows(1000 if task is TAU else 2000, 0)), synthetic_rows(300, 99)
    test = make(test_rows)
    network = trained(train, test, SMALL, task)
    table = task.table(true_taus(test_rows))
    rates = potential(table, CANDIDATES)
    best_fixed = rates.fixed[rates.best_fixed]
    assert rates.oracle > 1.1 * best_fixed
    rate = table.rate(predict(network, test).argmax(dim=1).numpy())
    assert rate >= 0.95 * rates.oracle
    assert (rate - best_fixed) / (rates.oracle - best_fixed) >= 0.85
    report = lookup_report(network, task, train, test)
    assert report.claims_gain
    assert report.best_fixed < report.policy <= report.oracle
    sizes = decided(task, network, test_rows[:60])
    assert sizes == [CANDIDATES[c] for c in predict(network, make(test_rows[:60])).argmax(dim=1).tolist()]
    assert len(set(sizes)) > 1


@TASKS
def test_claims_no_gain_without_one(task: FitTask, make: Make) -> None:
    """Also with step costs for which every size has the same rate, so that sizes differ by noise only."""
    gains, settings = [], dataclasses.replace(SMALL, epochs=10)
    taus = make(synthetic_rows(1000, 7, signal=False)).taus
    even = taus.mean(dim=0) if task is TAU else 1 / (1 / taus).mean(dim=0)
    for seed in range(3):
        train = make(synthetic_rows(120, 10 * seed, signal=False))
        validation = make(synthetic_rows(60, 10 * seed + 1, signal=False))
        for costs in (task, dataclasses.replace(task, objective="throughput", step_costs=even)):
            report = lookup_report(trained(train, validation, settings, costs), costs, train, validation)
            assert not report.claims_gain
            assert report.oracle > report.best_fixed  # the winner's curse that a look-up of labels would show
            gains.append(report.gain)
    assert sum(gains) / len(gains) < 0.05


def test_labels_losses_and_tables_by_hand() -> None:
    taus = torch.tensor([[1.0, 2.0, 2.0, 1.5], [3.0, 3.0, 3.0, 3.0], [1.0, 1.1, 1.2, 1.3]])
    assert TAU.labels(taus).tolist() == [1, 0, 3]  # the smallest of equals
    assert THROUGHPUT.labels(taus).tolist() == [1, 0, 0]
    by_cost = FitTask("throughput", (2, 8), torch.tensor([1.0, 3.0]))
    taus = torch.tensor([[1.0, 2.9], [1.0, 3.1]])  # per cost, the best sizes are 2 and then 8
    expected = math.log(1 + math.e) + math.log(1 + 1 / math.e)
    assert float(by_cost.loss(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), taus)) == pytest.approx(expected)
    taus, costs = torch.tensor([[1.0, 3.0], [2.0, 2.0]]), torch.tensor([1.0, 4.0])
    of_tau, of_speed = (FitTask(objective, (2, 8), costs).table(taus) for objective in ("tau", "throughput"))
    assert (of_tau.tokens.tolist(), of_tau.seconds.tolist()) == (taus.tolist(), [[1, 4], [1, 4]])
    assert of_speed.tokens.tolist() == [[1, 1], [1, 1]]
    assert of_speed.seconds == pytest.approx(np.array([[1, 4 / 3], [1 / 2, 2]]))  # twice as fast, half the seconds


# --- reproducibility ---

Data = tuple[Examples, Examples]


@pytest.fixture(scope="module")
def data(make: Make) -> Data:
    """(training, validation), small."""
    return make(synthetic_rows(60, 0)), make(synthetic_rows(20, 1))


def weights_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_seed_decides_everything_and_the_global_generator_nothing(data: Data) -> None:
    settings = dataclasses.replace(SMALL, epochs=4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = run_fit(*data, settings).best
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert weights_equal(first, run_fit(*data, settings).best)
    assert not weights_equal(first, run_fit(*data, dataclasses.replace(settings, seed=1)).best)


@pytest.mark.parametrize(("stop_after", "anneal"), [(1, True), (5, True), (2, False)])
def test_resuming_changes_nothing(data: Data, stop_after: int, anneal: bool) -> None:
    """Equal weights, history and learning rates; the rate anneals linearly to zero: an eighth in the last epoch."""
    settings = dataclasses.replace(SMALL, epochs=8, patience=5, anneal=anneal)
    straight, rates, state = new_fit(*data, settings), [], io.BytesIO()
    while not straight.done:
        straight.run_epoch()
        rates.append(straight.optimizer.param_groups[0]["lr"])
        if straight.epoch == stop_after:
            torch.save(straight.state_dict(), state)
    assert rates == pytest.approx([settings.lr * (1 - i / 8 * anneal) for i in range(8)])
    state.seek(0)
    resumed = new_fit(*data, settings)
    resumed.load_state_dict(torch.load(state, weights_only=True))
    while not resumed.done:
        resumed.run_epoch()
        assert resumed.optimizer.param_groups[0]["lr"] == rates[resumed.epoch - 1]
    assert weights_equal(resumed.best, straight.best)
    assert weights_equal(resumed.state_dict()["network"], straight.state_dict()["network"])
    assert (resumed.epoch, resumed.best_epoch) == (straight.epoch, straight.best_epoch)
    assert resumed.history == straight.history


def test_patience_stops_early_and_keeps_the_best_epoch(make: Make, data: Data) -> None:
    train = make(synthetic_rows(40, 0, signal=False))
    validation = make(synthetic_rows(40, 1, signal=False))
    settings = dataclasses.replace(SMALL, epochs=100, patience=5)
    fit = run_fit(train, validation, settings)
    losses = [metrics["validation_loss"] for metrics in fit.history]
    assert len(losses) == fit.best_epoch + 5 < 100
    assert min(losses) == losses[fit.best_epoch - 1]
    network = new_network(train, VOCAB_SIZE, settings)
    network.load_state_dict(fit.best)
    assert EpochSums(*evaluate(network, validation, TAU).tolist()).mean_loss == pytest.approx(min(losses), rel=1e-6)
    fit = run_fit(*data, dataclasses.replace(SMALL, epochs=5, patience=None))
    assert fit.epoch == fit.best_epoch == 5  # without patience the last epoch counts
    assert weights_equal(fit.best, fit.state_dict()["network"])


@pytest.mark.parametrize("num_rows", [7, 33])
@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_cover_every_row_once_over_the_ranks(num_rows: int, world_size: int) -> None:
    ranks = [list(batches(num_rows, 8, 0, 1, rank, world_size)) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1  # the same number of optimizer steps on each
    seen = sorted(i for rank in ranks for batch in rank for i in batch.rows.tolist())
    assert seen == list(range(num_rows))
    for parts in zip(*ranks, strict=True):
        assert {part.num_global for part in parts} == {sum(len(part.rows) for part in parts)}

    def order(seed: int, epoch: int) -> list[list[int]]:
        return [batch.rows.tolist() for batch in batches(num_rows, 8, seed, epoch)]

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) not in (order(0, 2), order(1, 1))


@pytest.mark.parametrize(("num_rows", "world_size"), [(1, 2), (7, 3)])
def test_gradients_of_ranks_average_to_that_of_one(data: Data, num_rows: int, world_size: int) -> None:
    """With one row, one of two ranks has an empty part."""
    train, settings = data[0], dataclasses.replace(SMALL, dropout=0.0)
    rows = train.take(torch.arange(num_rows))

    def step(rank: int, world_size: int) -> tuple[list[Tensor], Tensor]:
        network = new_network(train, VOCAB_SIZE, settings)
        before = [parameter.detach().clone() for parameter in network.parameters()]
        order = batches(num_rows, 8, 0, 1, rank, world_size)
        sgd = torch.optim.SGD(network.parameters(), lr=1.0)
        sums = train_epoch(network, sgd, rows, THROUGHPUT, order, world_size)
        return [a - b.detach() for a, b in zip(before, network.parameters(), strict=True)], sums

    gradients, sums = step(0, 1)
    ranks = [step(rank, world_size) for rank in range(world_size)]
    for i, whole in enumerate(gradients):
        torch.testing.assert_close(sum(of[i] for of, _ in ranks) / world_size, whole, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sum(of for _, of in ranks), sums, rtol=1e-6, atol=0)


def test_ranks_validate_every_example_once(data: Data) -> None:
    """With more ranks than examples, some have none."""
    train, validation = data
    network = new_network(train, VOCAB_SIZE, SMALL)
    fits = [Fit(network, train, validation, SMALL, TAU, rank=rank, world_size=30) for rank in range(30)]
    assert sorted(i for fit in fits for i in fit.validation.index.tolist()) == sorted(validation.index.tolist())
    parts = [evaluate(network, fit.validation, TAU) for fit in fits]
    torch.testing.assert_close(sum(parts), evaluate(network, validation, TAU), rtol=1e-6, atol=0)


def test_training_equals_that_of_a_dense_first_layer(make: Make) -> None:
    """The dense layer starts at zero, and its columns of unseen ids stay exactly zero."""
    rows = [row for row in synthetic_rows(60, 0) if max(row.probs_ids) < VOCAB_SIZE - 4]
    rows.sort(key=lambda row: row.prompt_id)  # as examples are
    train, settings = make(rows), dataclasses.replace(SMALL, dropout=0.0)
    sparse = new_network(train, VOCAB_SIZE, settings)
    dense_first = torch.nn.Linear(VOCAB_SIZE, settings.hidden)
    dense_first.weight.data.zero_()
    dense_first.bias.data.copy_(sparse.bias)
    head = copy.deepcopy(sparse.head)
    parameters = [p for module in (dense_first, head) for p in module.parameters()]
    dense_adam, adam = (torch.optim.AdamW(p, lr=1e-2) for p in (parameters, list(sparse.parameters())))
    x, labels = torch.stack([dense(row) for row in rows]), TAU.labels(train.taus)
    for epoch in range(1, 6):
        train_epoch(sparse, adam, train, TAU, batches(len(train), 16, 0, epoch))
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
    torch.testing.assert_close(columns[sparse.support], sparse.rows, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(head.weight, sparse.head.weight, rtol=1e-3, atol=1e-4)


def test_a_new_network_knows_the_token_ids_with_the_most_mass(data: Data) -> None:
    for most in (5, VOCAB_SIZE):
        network = new_network(data[0], VOCAB_SIZE, dataclasses.replace(SMALL, max_support=most))
        assert network.support.tolist() == data[0].support(VOCAB_SIZE, most).tolist()
    assert (network.shape.num_outputs, network.shape.hidden) == (4, SMALL.hidden)


def test_predictions_do_not_depend_on_the_batch(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    network = trained(*data, dataclasses.replace(SMALL, epochs=1), TAU)
    whole = predict(network, data[1])
    monkeypatch.setattr("blockpilot.policy.training.PREDICT_ROWS", 7)
    torch.testing.assert_close(predict(network, data[1]), whole)
    assert predict(network, data[1].take(torch.arange(0))).shape == (0, 4)


# --- the report ---


@TASKS
def test_lookup_report_of_decisions_one_by_one(task: FitTask, data: Data) -> None:
    train, validation = data
    network = trained(train, validation, dataclasses.replace(SMALL, epochs=3), task)
    report = lookup_report(network, task, train, validation)
    table, num = task.table(validation.taus), len(validation)
    rates = potential(task.table(train.taus), CANDIDATES).fixed
    assert report.best_fixed_block_size == max(rates, key=rates.__getitem__)
    fixed = np.full(num, CANDIDATES.index(report.best_fixed_block_size))
    chosen = np.array([int(network(validation.take(torch.tensor([i])).features).argmax()) for i in range(num)])
    best = np.array([int((taus / task.step_costs).argmax()) for taus in validation.taus])
    assert report.num_examples == num
    assert (report.accuracy, report.accuracy_best_fixed) == ((best == chosen).mean(), (best == fixed).mean())
    assert (report.policy, report.best_fixed) == (table.rate(chosen), table.rate(fixed))
    assert (report.gain, report.gain_low, report.gain_high) == gain(table, chosen, fixed)
    assert report.oracle == table.rate(oracle(table)) >= max(report.policy, report.best_fixed)
    if task is THROUGHPUT:  # all token counts are equal, so each request's best is the best overall
        assert report.oracle == pytest.approx(table.rate(best))
    assert min(rates.values()) * 0.5 < report.random < report.oracle
    headroom = report.oracle - report.best_fixed
    assert report.share_captured == pytest.approx((report.policy - report.best_fixed) / headroom)


def test_without_headroom_no_share_is_captured(data: Data) -> None:
    """With one candidate that is always the best, the oracle gains nothing and the share is NaN."""
    train, validation = data
    task = FitTask("throughput", tuple(CANDIDATES), torch.tensor([1e-6, 1.0, 1.0, 1.0]))
    report = lookup_report(new_network(train, VOCAB_SIZE, SMALL), task, train, validation)
    assert report.best_fixed_block_size == CANDIDATES[0]
    assert math.isnan(report.share_captured)
    assert not report.claims_gain
