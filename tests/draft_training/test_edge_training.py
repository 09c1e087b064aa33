"""Training of edges on slots computed once: against slow loops, resumed fits, learning."""

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from blockpilot.draft_training.batches import draft_batch
from blockpilot.draft_training.edges import (
    DraftedSlots,
    EdgeFit,
    EdgeLoss,
    noise_of,
    read_slots,
    slots_of,
    weights_of,
    write_slots,
)
from blockpilot.draft_training.loss import dpace_weights
from blockpilot.draft_training.training import DraftFitSettings
from blockpilot.drafts.edges import CandidateSelector, Edges, GatedMarkovHead, MarkovHead
from blockpilot.pairs.loading import Pair
from helpers.dflash import slow_cap
from helpers.documents import batch_of, check_resumed, random_documents
from helpers.tiny import tiny_draft

BLOCK, WIDTH, SIZE = 4, 24, 30


@pytest.mark.parametrize("vocabulary", [None, [*range(7, 200, 3), *range(5, 256, 2)]], ids=["all", "own"])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_slots_are_those_of_the_blocks_at_random_anchors(
    cap: float | None, tiny_pair: Pair, vocabulary: list[int] | None
) -> None:
    draft = tiny_draft(tiny_pair.target, BLOCK, selector_rank=5, selector_top_k=6)
    ids = torch.arange(draft.config.vocab_size)
    if vocabulary is not None:
        draft.vocabulary = torch.tensor(vocabulary).unique().flip(0)
        ids = draft.vocabulary.sort().values
    head = tiny_pair.target.get_input_embeddings().weight.detach()
    documents = random_documents([(9, 3), (14, 3), (6, 3)], num_layers=2)
    slots = slots_of(draft, head, head, documents, [0.0, 1.0, 0.0], 3, seed=5, cap=cap)
    batch = batch_of(documents, 3, seed=5)
    hidden, num = draft_batch(draft, head, batch, BLOCK).detach(), 0
    for row, document in enumerate(documents):
        for a, anchor in enumerate(batch.anchors[row][batch.valid[row]].tolist()):
            for offset in range(1, min(BLOCK, len(document.tokens) - anchor)):
                log_probs = slow_cap(hidden[row, a, offset] @ head[ids].T, cap).log_softmax(0)
                target_logits = slow_cap(document.hidden[anchor + offset - 1] @ head[ids].T, cap)
                target_log_probs = target_logits.log_softmax(0)
                best = log_probs.topk(6)
                slot = slots.at(torch.tensor([num]))
                assert slot.tokens[0].tolist() == ids[best.indices].tolist()
                torch.testing.assert_close(slot.log_probs[0], best.values, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(
                    slot.target_log_probs[0], target_log_probs[best.indices], atol=1e-4, rtol=1e-4
                )
                torch.testing.assert_close(slot.hidden[0], hidden[row, a, offset].bfloat16())
                text = document.tokens[anchor + offset - 1 : anchor + offset + 1].tolist()
                assert [int(slot.before), int(slot.labels)] == text
                assert (int(slot.offsets), float(slot.temperatures)) == (offset, float(row == 1))
                num += 1
    assert num == len(slots.labels)


def random_slots(num_blocks: int = 40, width: int = 6, seed: int = 0) -> DraftedSlots:
    """Slots of blocks: BLOCK - 1 in even blocks, one fewer in odd ones."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([o for b in range(num_blocks) for o in range(1, BLOCK - b % 2)])
    num = len(offsets)
    tokens = torch.stack([torch.randperm(SIZE, generator=generator)[:width] for _ in range(num)])
    log_probs, target_log_probs = (
        torch.randn(num, width + 4, generator=generator).log_softmax(1)[:, :width] for _ in range(2)
    )
    before, labels = torch.randint(0, SIZE, (2, num), generator=generator)
    temperatures = offsets.eq(1).cumsum(0) % 3 / 2
    hidden = torch.randn(num, WIDTH, generator=generator).bfloat16()
    return DraftedSlots(hidden, tokens, log_probs, target_log_probs, before, labels, offsets, temperatures)


def edges_of(kind: str, rank: int = 5, width: int = 6) -> Edges:
    torch.manual_seed(0)
    edges: dict[str, Edges] = {
        "selector": CandidateSelector(SIZE, rank, WIDTH, width),
        "markov": MarkovHead(SIZE, rank),
        "gated": GatedMarkovHead(SIZE, rank, WIDTH),
    }
    return edges[kind]


EMBEDDING = torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(9))


def randomized(loss: EdgeLoss) -> EdgeLoss:
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.normal_(std=0.4)
    return loss


@pytest.mark.parametrize("kind", ["selector", "markov", "gated"])
def test_untrained_edges_change_nothing_and_trained_ones_score_as_their_plain_weights(kind: str) -> None:
    slots, plain = random_slots(), edges_of(kind)
    loss = EdgeLoss(edges_of(kind), EMBEDDING)
    assert loss.scores(slots).equal(slots.log_probs)
    assert plain.load_state_dict(randomized(loss).plain_state())
    lifts = plain.between(slots.hidden.float(), slots.before[:, None], slots.tokens)[:, 0]
    torch.testing.assert_close(slots.log_probs + lifts, loss.scores(slots), atol=1e-4, rtol=1e-4)
    assert lifts.abs().max() > 0.1


def test_edges_that_go_on_begin_as_they_are() -> None:
    trained = edges_of("selector")
    torch.nn.init.normal_(trained.successors)
    expected = {name: value.clone() for name, value in trained.state_dict().items()}
    state = EdgeLoss(trained, EMBEDDING).plain_state()
    assert state.keys() == expected.keys()
    assert all(state[name].equal(value) for name, value in expected.items())


@pytest.mark.parametrize(("distill", "overlap"), [(0.0, 0.0), (0.3, 0.0), (1.0, 0.5)])
def test_the_losses_equal_a_slow_loop(distill: float, overlap: float) -> None:
    slots = random_slots()
    loss = randomized(EdgeLoss(edges_of("selector"), EMBEDDING, distill, overlap))
    losses, scores = (values.detach() for values in loss(slots))
    for i, loss_of_slot in enumerate(losses.tolist()):
        log_probs = scores[i].log_softmax(0)
        goal = distill * slots.target_log_probs[i].exp() + (1 - distill) * (slots.tokens[i] == slots.labels[i])
        if slots.offsets[i] == 1:
            goal = slots.log_probs[i].exp() / slots.log_probs[i].exp().sum()
        mass = float(goal.sum())
        expected = -(1 - overlap) * float((goal * log_probs).sum())
        if overlap:
            expected -= overlap * mass * math.log(float(torch.minimum(goal / mass, log_probs.exp()).sum()) + 1e-4)
        assert loss_of_slot == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_weights_are_those_of_a_drafts_loss() -> None:
    """A label outside the draft's best tokens has confidence 0."""
    slots = random_slots(4)
    decay = weights_of(slots, BLOCK, "decay")
    assert decay.tolist() == pytest.approx([math.exp(-(o - 1) / (0.5 * BLOCK)) for o in slots.offsets.tolist()])
    weights, start = weights_of(slots, BLOCK, "dpace"), 0
    losses = torch.full(slots.labels.shape, math.inf)
    for i, (tokens, label) in enumerate(zip(slots.tokens.tolist(), slots.labels.tolist(), strict=True)):
        if label in tokens:
            losses[i] = -slots.log_probs[i, tokens.index(label)]
    for num in (3, 2, 3, 2):
        of_block = slice(start, start + num)
        expected = dpace_weights(losses[of_block], torch.ones(1, 1, num, dtype=torch.bool))
        torch.testing.assert_close(weights[of_block], expected[0, 0])
        start += num


def test_the_noise_is_that_under_which_the_target_chose() -> None:
    slots = random_slots(400)
    slots = slots._replace(labels=slots.tokens[:, 2])
    noise, drawn = noise_of(slots), slots.temperatures > 0
    assert (noise[~drawn] == 0).all()
    won = slots.tokens.gather(1, (slots.target_log_probs + noise).argmax(1, keepdim=True))[:, 0]
    assert won[drawn].equal(slots.labels[drawn])
    # The largest noisy score over the whole vocabulary has a Gumbel distribution, with mean Euler's constant.
    greatest = (slots.target_log_probs + noise)[drawn].amax(dim=1)
    assert float(greatest.mean()) == pytest.approx(0.577, abs=0.15)


# --- fits ---


def text_slots(num_blocks: int, seed: int = 0) -> DraftedSlots:
    """Slots of texts in which each token determines the next; the draft has it among 8 equally probable tokens."""
    slots = random_slots(num_blocks, width=8, seed=seed)
    follows = torch.randperm(SIZE, generator=torch.Generator().manual_seed(77))
    labels, tokens = follows[slots.before], slots.tokens.clone()
    places = torch.randint(0, 8, (len(labels),), generator=torch.Generator().manual_seed(seed))
    tokens[torch.arange(len(labels)), places] = labels
    flat = torch.full_like(slots.log_probs, -math.log(8))
    target_log_probs = torch.where(tokens == labels[:, None], math.log(0.9), math.log(0.1 / 7))
    hidden = torch.eye(WIDTH)[slots.offsets].bfloat16() * 3
    texts = {"labels": labels, "tokens": tokens, "temperatures": torch.zeros(len(labels))}
    return slots._replace(**texts, log_probs=flat, target_log_probs=target_log_probs, hidden=hidden)


def fit_of(slots: DraftedSlots, **changes: Any) -> EdgeFit:
    settings = DraftFitSettings(**{"epochs": 30, "num_anchors": 16, "lr": 0.02, "distill": 1.0} | changes)
    torch.manual_seed(1)
    return EdgeFit(
        EdgeLoss(edges_of("selector", rank=16, width=8), EMBEDDING, settings.distill), slots, BLOCK, settings
    )


def test_edges_learn_what_follows_what() -> None:
    """Accuracy rises after the first slot; the first changes little, as the draft already has the token before it."""
    held_out = text_slots(60, seed=8)
    fit = fit_of(text_slots(300))
    before = fit.validate(held_out).metrics()
    assert all(sums.num_blocks > 0 for sums in fit.steps())
    after = fit.validate(held_out).metrics()
    for offset in (2, 3):
        assert after[f"validation_accuracy_{offset}"] > 0.8 > 0.5 > before[f"validation_accuracy_{offset}"]
    lifts = (fit.loss.scores(held_out) - held_out.log_probs).detach().abs().amax(dim=1)
    assert lifts[held_out.offsets == 1].mean() < 0.5 * lifts[held_out.offsets == 2].mean()
    assert after["validation_loss"] < before["validation_loss"]
    assert after["validation_tau_T0"] > before["validation_tau_T0"]


def test_tau_counts_the_first_tokens_that_are_right() -> None:
    slots = random_slots(3)._replace(temperatures=torch.zeros(3 + 2 + 3))
    best = slots.tokens[:, 0]
    wrong = slots.tokens[:, 1]
    right = torch.tensor([1, 0, 1, 1, 1, 1, 1, 0], dtype=torch.bool)  # of blocks of 3, 2 and 3 slots
    slots = slots._replace(labels=torch.where(right, best, wrong), log_probs=slots.log_probs.sort(descending=True)[0])
    assert fit_of(slots).validate(slots).tau == {0.0: pytest.approx(1 + (1 + 2 + 2) / 3)}


def test_a_resumed_fit_is_the_undisturbed_one() -> None:
    slots = text_slots(300)
    whole, first, again = (fit_of(slots, epochs=3) for _ in range(3))
    assert check_resumed(whole, first, again, 4) > 4


def test_two_workers_share_the_slots() -> None:
    slots, counts = text_slots(100), []
    for rank in (0, 1):
        settings = DraftFitSettings(epochs=1, batch_size=2, num_anchors=8)
        loss = EdgeLoss(edges_of("selector", width=8), EMBEDDING)
        fit = EdgeFit(loss, slots, BLOCK, settings, rank=rank, world_size=2)
        counts.append([float(sums.count.sum()) for sums in fit.steps()])
    assert len(counts[0]) == len(counts[1]) > 1
    assert sum(map(sum, counts)) > 0.7 * len(slots.labels)


def test_every_worker_has_slots() -> None:
    """Fewer slots than two workers' batches: smaller batches; fewer than workers: an error."""
    slots, settings = random_slots(3), DraftFitSettings(epochs=2, batch_size=4, num_anchors=8)
    loss = EdgeLoss(edges_of("selector"), EMBEDDING)
    for rank in (0, 1):
        fit = EdgeFit(loss, slots, BLOCK, settings, rank=rank, world_size=2)
        steps = islice(fit.steps(), 3)
        assert [float(sums.count.sum()) for sums in steps] == [len(slots.labels) / 2] * 2
    with pytest.raises(ValueError, match="9 workers: there are only 8 drafted positions"):
        EdgeFit(loss, slots, BLOCK, settings, world_size=9)


def test_slots_come_back_from_their_files(tmp_path: Path) -> None:
    parts = [random_slots(3, seed=seed) for seed in (1, 2)]
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for path, part in zip(paths, parts, strict=True):
        write_slots(path, part)
    for values, of_parts in zip(read_slots(paths), zip(*parts, strict=True), strict=True):
        assert values.equal(torch.cat(of_parts))
