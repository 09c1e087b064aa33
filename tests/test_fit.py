"""Training a policy: it learns what is there, claims nothing that is not, and is the same however it is run."""

import copy
import dataclasses
import io
import statistics

import pytest
import torch
from torch import Tensor

from blockpilot.fit import (
    Examples,
    Fit,
    FitSettings,
    batches,
    evaluate,
    examples,
    lookup_report,
    new_network,
    split_rows,
    train_epoch,
)
from blockpilot.pairs import PairId
from blockpilot.policy import CandidateSet, ClassPolicy, PolicyInfo, ProbsMLP
from blockpilot.prompts import Message, Prompt
from blockpilot.records import Metadata, SweepRow, prompt_ids

CANDIDATES = [2, 4, 6, 8]
VOCAB_SIZE = 64
PAIR = PairId("org/Target-1B", "rev-t", "org/draft", "rev-d")
SMALL = FitSettings(hidden=64, lr=1e-3)


def metadata(**changes: object) -> Metadata:
    plain = Metadata({"seed": 0}, PAIR, "float32", VOCAB_SIZE, 8, CANDIDATES, {}, "unknown")
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def _heaviest(ids: list[int], probs: list[float]) -> tuple[int, float]:
    """The known function: ids belong to candidates in turn, the heaviest candidate wins. With its lead."""
    mass = [sum(p for i, p in zip(ids, probs, strict=True) if i % 4 == c) for c in range(4)]
    order = sorted(range(4), key=lambda c: mass[c])
    return order[-1], mass[order[-1]] - mass[order[-2]]


def _distribution(generator: torch.Generator) -> tuple[list[int], list[float]]:
    """Six random ids with probabilities that one candidate wins clearly."""
    while True:
        ids = sorted(torch.randperm(VOCAB_SIZE, generator=generator)[:6].tolist())
        weights = torch.rand(6, generator=generator) ** 2 + 1e-3
        probs: list[float] = (weights / weights.sum()).tolist()
        if _heaviest(ids, probs)[1] > 0.1:
            return ids, probs


def synthetic_rows(num_rows: int, seed: int, signal: bool = True) -> list[SweepRow]:
    """Rows of random distributions. Whole counts of emitted tokens in 60 steps make every tau."""
    generator = torch.Generator().manual_seed(seed)
    return [_row(f"prompt {seed} {i}", generator, signal) for i in range(num_rows)]


def _row(text: str, generator: torch.Generator, signal: bool) -> SweepRow:
    ids, probs = _distribution(generator)
    best = _heaviest(ids, probs)[0] if signal else -1
    num_steps, histograms, taus = 60, [], []
    for c, block_size in enumerate(CANDIDATES):
        most = int(torch.randint(0, 20, (1,), generator=generator)) + (40 if c == best else 0)
        histogram = [0] * (block_size + 1)
        histogram[1], histogram[2] = num_steps - most, most
        histograms.append(histogram)
        taus.append(sum(n * count for n, count in enumerate(histogram)) / num_steps)
    prompt = Prompt("synthetic", (Message("user", text),))
    return SweepRow(
        prompt_ids(prompt, 0, 0.0)[0],
        "synthetic",
        text,
        3,
        [1],
        "length",
        CANDIDATES,
        taus,
        [num_steps] * 4,
        histograms,
        [],
        True,
        ids,
        probs,
        0.0,
        [0.0],
        0,
        0.0,
    )


def dense(row: SweepRow) -> Tensor:
    probs = torch.zeros(VOCAB_SIZE)
    probs[row.probs_ids] = torch.tensor(row.probs)
    return probs


def run_fit(train: Examples, validation: Examples, settings: FitSettings) -> Fit:
    fit = Fit(new_network(train, VOCAB_SIZE, settings), train, validation, settings)
    while not fit.done:
        fit.run_epoch()
    return fit


@pytest.fixture(scope="module")
def data() -> tuple[Examples, Examples]:
    """(training, validation) with a signal, small."""
    return examples(synthetic_rows(60, 0)), examples(synthetic_rows(20, 1))


# --- what is learned ---


def test_learns_a_known_function_of_the_probs() -> None:
    train, validation = split_rows(synthetic_rows(2000, 0), 0.2, 0)
    fit = run_fit(examples(train), examples(validation), SMALL)
    network = new_network(examples(train), VOCAB_SIZE, SMALL)
    network.load_state_dict(fit.best_weights())
    policy = ClassPolicy(PolicyInfo(PAIR, VOCAB_SIZE, CandidateSet(tuple(CANDIDATES)), 1e-5), network)
    test = synthetic_rows(500, 99)
    chosen = [policy.candidates[int(policy.logits(dense(row)).argmax())] for row in test]
    right = sum(b == CANDIDATES[_heaviest(row.probs_ids, row.probs)[0]] for b, row in zip(chosen, test, strict=True))
    assert right / len(test) >= 0.95
    report = lookup_report(network, policy.candidates, examples(train), examples(test))
    assert report.claims_gain
    assert report.tau_best_fixed < report.tau_policy <= report.tau_oracle


def test_claims_no_gain_where_there_is_none() -> None:
    gains = []
    for seed in range(6):
        train = examples(synthetic_rows(120, 10 * seed, signal=False))
        validation = examples(synthetic_rows(60, 10 * seed + 1, signal=False))
        fit = run_fit(train, validation, SMALL)
        network = new_network(train, VOCAB_SIZE, SMALL)
        network.load_state_dict(fit.best_weights())
        report = lookup_report(network, CandidateSet(tuple(CANDIDATES)), train, validation)
        assert not report.claims_gain
        assert report.tau_oracle > report.tau_best_fixed  # the winner's curse that a look-up of labels would show
        gains.append(report.tau_policy - report.tau_best_fixed)
    assert sum(gains) / len(gains) < 0.05


# --- the same however it is run ---


def weights_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_seed_decides_everything_and_the_global_generator_nothing(data: tuple[Examples, Examples]) -> None:
    settings = dataclasses.replace(SMALL, epochs=4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = run_fit(*data, settings).best_weights()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert weights_equal(first, run_fit(*data, settings).best_weights())
    assert not weights_equal(first, run_fit(*data, dataclasses.replace(settings, seed=1)).best_weights())


@pytest.mark.parametrize("stop_after", [1, 3, 6])
def test_resuming_changes_nothing(data: tuple[Examples, Examples], stop_after: int) -> None:
    settings = dataclasses.replace(SMALL, epochs=7, patience=3)
    straight = run_fit(*data, settings)
    interrupted = Fit(new_network(data[0], VOCAB_SIZE, settings), *data, settings)
    for _ in range(stop_after):
        interrupted.run_epoch()
    buffer = io.BytesIO()
    torch.save(interrupted.state_dict(), buffer)
    buffer.seek(0)
    resumed = Fit(new_network(data[0], VOCAB_SIZE, settings), *data, settings)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    while not resumed.done:
        resumed.run_epoch()
    assert weights_equal(resumed.best_weights(), straight.best_weights())
    assert weights_equal(resumed.state_dict()["network"], straight.state_dict()["network"])
    assert (resumed.epoch, resumed.best_epoch) == (straight.epoch, straight.best_epoch)


def test_stops_early_and_keeps_the_best_epoch() -> None:
    train = examples(synthetic_rows(40, 0, signal=False))
    validation = examples(synthetic_rows(40, 1, signal=False))
    settings = dataclasses.replace(SMALL, epochs=100, patience=5)
    fit = Fit(new_network(train, VOCAB_SIZE, settings), train, validation, settings)
    losses = []
    while not fit.done:
        losses.append(fit.run_epoch().validation.mean_loss)
    assert len(losses) == fit.best_epoch + 5 < 100
    assert min(losses) == losses[fit.best_epoch - 1]
    network = new_network(train, VOCAB_SIZE, settings)
    network.load_state_dict(fit.best_weights())
    loss, _, count = evaluate(network, validation).tolist()
    assert loss / count == pytest.approx(min(losses), rel=1e-6)


def test_without_patience_the_last_epoch_counts(data: tuple[Examples, Examples]) -> None:
    fit = run_fit(*data, dataclasses.replace(SMALL, epochs=5, patience=None))
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

    def __init__(self, network: ProbsMLP) -> None:
        super().__init__(network.parameters(), {})
        self.kept: list[Tensor] = []

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.kept = [p.grad.clone() for group in self.param_groups for p in group["params"]]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_ranks_average_to_the_gradient_of_one(
    data: tuple[Examples, Examples], world_size: int, num_rows: int
) -> None:
    settings = dataclasses.replace(SMALL, dropout=0.0)
    rows = data[0].take(torch.arange(num_rows))  # with one row, some ranks have an empty part

    def gradients(rank: int, world_size: int) -> tuple[list[Tensor], Tensor]:
        network = new_network(data[0], VOCAB_SIZE, settings)
        optimizer = _Gradients(network)
        sums = train_epoch(network, optimizer, rows, batches(num_rows, 8, 0, 1, rank, world_size), world_size)
        return optimizer.kept, sums

    alone, sums = gradients(0, 1)
    ranks = [gradients(rank, world_size) for rank in range(world_size)]
    for i, whole in enumerate(alone):
        torch.testing.assert_close(sum(g[i] for g, _ in ranks) / world_size, whole, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(sum(s for _, s in ranks), sums, rtol=1e-6, atol=0)


def test_training_is_that_of_the_dense_layer(data: tuple[Examples, Examples]) -> None:
    """The dense first layer, begun at zero, gets the same weights; columns of unseen ids stay zero exactly."""
    train = examples([row for row in synthetic_rows(60, 0) if max(row.probs_ids) < VOCAB_SIZE - 4])
    settings = dataclasses.replace(SMALL, dropout=0.0)
    sparse = new_network(train, VOCAB_SIZE, settings)
    dense_first = torch.nn.Linear(VOCAB_SIZE, settings.hidden)
    dense_first.weight.data.zero_()
    dense_first.bias.data.copy_(sparse.bias)
    mix, head = copy.deepcopy(sparse.mix), copy.deepcopy(sparse.head)
    parameters = [p for module in (dense_first, mix, head) for p in module.parameters()]
    dense_adam, adam = (torch.optim.Adam(p, lr=1e-2) for p in (parameters, list(sparse.parameters())))
    x = torch.stack([dense(row) for row in synthetic_rows(60, 0) if max(row.probs_ids) < VOCAB_SIZE - 4])
    for epoch in range(1, 6):
        train_epoch(sparse, adam, train, batches(len(train), 16, 0, epoch))
        for batch in batches(len(train), 16, 0, epoch):
            hidden = torch.relu(dense_first(x[batch.rows]))
            loss = torch.nn.functional.cross_entropy(head(hidden + mix(hidden)), train.labels[batch.rows])
            dense_adam.zero_grad()
            loss.backward()
            dense_adam.step()
    columns = dense_first.weight.T
    unseen = sorted(set(range(VOCAB_SIZE)) - set(sparse.support.tolist()))
    assert unseen
    assert not columns[unseen].any()
    torch.testing.assert_close(columns[sparse.support], sparse.rows, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(head.weight, sparse.head.weight, rtol=1e-3, atol=1e-4)


# --- rows ---


def test_label_is_the_smallest_of_equals() -> None:
    row = synthetic_rows(1, 0)[0]
    taus = [[1.0, 2.0, 2.0, 1.5], [3.0, 3.0, 3.0, 3.0], [1.0, 1.1, 1.2, 1.3]]
    assert examples([dataclasses.replace(row, taus=t) for t in taus]).labels.tolist() == [1, 0, 3]


def test_take_is_the_examples_of_those_rows() -> None:
    rows = synthetic_rows(9, 0)
    rows[4] = dataclasses.replace(rows[4], probs_ids=rows[4].probs_ids[:2], probs=rows[4].probs[:2])
    for chosen in ([0], [4], [8, 0, 4], [], list(range(9))):
        taken = examples(rows).take(torch.tensor(chosen, dtype=torch.int64))
        ends = [*taken.probs.offsets.tolist()[1:], len(taken.probs.ids)]
        spans = list(zip(taken.probs.offsets.tolist(), ends, strict=False))
        assert [taken.probs.ids[a:b].tolist() for a, b in spans] == [rows[i].probs_ids for i in chosen]
        assert [taken.probs.probs[a:b].tolist() for a, b in spans] == [rows[i].probs for i in chosen]
        torch.testing.assert_close(taken.taus, torch.tensor([rows[i].taus for i in chosen]).reshape(-1, 4))


def test_split_keeps_the_rows_of_a_prompt_together() -> None:
    rows = [dataclasses.replace(r, prompt=f"p{i // 3}") for i, r in enumerate(synthetic_rows(60, 0))]
    train, validation = split_rows(rows, 0.25, 0)
    assert len(train) + len(validation) == 60
    assert len({r.prompt for r in validation}) == 5
    assert not {r.prompt for r in train} & {r.prompt for r in validation}
    assert split_rows(rows[::-1], 0.25, 0) == (train, validation)
    assert split_rows(rows, 0.25, 1) != (train, validation)


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_split_leaves_something_on_both_sides(share: float) -> None:
    assert all(split_rows(synthetic_rows(2, 0), share, 0))


def test_split_needs_two_prompts() -> None:
    with pytest.raises(ValueError, match="1 different prompts"):
        split_rows(synthetic_rows(1, 0), 0.5, 0)


def test_lookup_report_is_the_slow_one(data: tuple[Examples, Examples]) -> None:
    train, validation = data
    network = run_fit(train, validation, dataclasses.replace(SMALL, epochs=3)).network
    assert isinstance(network, ProbsMLP)
    report = lookup_report(network, CandidateSet(tuple(CANDIDATES)), train, validation)
    means = [sum(taus[c] for taus in train.taus.tolist()) / len(train) for c in range(4)]
    fixed = means.index(max(means))
    policy, best_fixed, oracle, right = [], [], [], 0
    for i, taus in enumerate(validation.taus.tolist()):
        choice = int(network(*validation.take(torch.tensor([i])).probs).argmax())
        policy.append(taus[choice])
        best_fixed.append(taus[fixed])
        oracle.append(max(taus))
        right += choice == taus.index(max(taus))
    gains = [a - b for a, b in zip(policy, best_fixed, strict=True)]
    mean, margin = statistics.mean(gains), 1.96 * statistics.stdev(gains) / len(gains) ** 0.5
    assert report.best_fixed == CANDIDATES[fixed]
    assert report.accuracy == pytest.approx(right / len(validation))
    assert report.tau_policy == pytest.approx(statistics.mean(policy))
    assert report.tau_best_fixed == pytest.approx(statistics.mean(best_fixed))
    assert report.tau_oracle == pytest.approx(statistics.mean(oracle))
    assert (report.gain_low, report.gain_high) == pytest.approx((mean - margin, mean + margin))
