"""EAGLE-3 training: the unrolled loss against one chain at a time, and that DraftFit learns with it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot.draft_training.batches import collate
from blockpilot.draft_training.eagle3_loss import Eagle3Loss
from blockpilot.draft_training.features import Document
from blockpilot.draft_training.loss import Vocabulary
from blockpilot.draft_training.start import start_eagle3_from_target
from blockpilot.draft_training.training import DraftFit, DraftFitSettings
from blockpilot.drafts.eagle3_checkpoint import new_eagle3
from blockpilot.pairs.loading import Pair
from helpers.dflash import slow_cap
from helpers.documents import batch_of, check_resumed, greedy_answers, random_documents, stored_corpus
from helpers.eagle3 import Cache, SlowEagle3, random_eagle3

BLOCK = 4
OWN = torch.arange(20, 240)  # the draft's vocabulary


def documents(seed: int = 0) -> list[Document]:
    """Texts of different lengths, with some tokens outside the draft's vocabulary; one has no possible anchor."""
    return random_documents(((9, 4), (13, 5), (7, 6), (11, 1)), num_layers=3, seed=seed)


def loss_of(pair: Pair, **options: Any) -> Eagle3Loss:
    weight = pair.target.get_input_embeddings().weight.detach()
    return Eagle3Loss(random_eagle3(pair.target.config, OWN, BLOCK), weight, weight.flip(0), **options)


def chain(slow: SlowEagle3, loss: Eagle3Loss, document: Document, anchor: int, text: Tensor | None) -> list[Tensor]:
    """Scores of the tokens after an anchor, one step at a time.

    Each step embeds the next token of `text`, or the draft's own proposal if `text` is None.
    """
    cache: Cache = []
    tokens = document.tokens.tolist()
    for i in range(anchor):
        hidden = slow.step(document.features[i], loss.embedding[tokens[i + 1]], i, cache)
    scores = [slow.logits(hidden)]
    for k in range(1, BLOCK - 1):
        token = int(OWN[scores[-1].argmax()]) if text is None else int(text[anchor + k])
        hidden = slow.step(hidden, loss.embedding[token], anchor - 1 + k, cache)
        scores.append(slow.logits(hidden))
    return scores


@pytest.mark.parametrize(
    ("distill", "overlap", "anchors_only", "cap"),
    [
        *((1.0, 0.0, False, 2.0), (0.3, 0.0, False, None), (0.0, 0.0, False, None)),
        *((1.0, 0.5, True, None), (0.0, 0.3, False, None)),
    ],
)
def test_the_unrolled_loss_equals_one_chain_at_a_time(
    distill: float, overlap: float, anchors_only: bool, cap: float | None, tiny_pair: Pair
) -> None:
    """Each chain attends to the features before its anchor and the text before each step, and to nothing later. A
    soft cap bounds the target's logits.
    """
    shard = documents()
    batch = batch_of(shard, 3, seed=1)
    loss = loss_of(tiny_pair, distill=distill, overlap=overlap, anchors_only=anchors_only, cap=cap)
    slow = SlowEagle3(loss.draft.state_dict(), loss.draft.config)
    total, weight, count = 0.0, 0.0, [0] * (BLOCK - 1)
    for row, document in enumerate(shard):
        length = len(document.tokens)
        anchors = batch.anchors[row][batch.valid[row]].tolist()
        for anchor in anchors if anchors_only else range(document.num_prompt_tokens, length - 1):
            padded = torch.nn.functional.pad(document.tokens, (0, BLOCK))
            scores = chain(slow, loss, document, anchor, padded)
            for k in range(1, min(BLOCK, length - anchor)):
                count[k - 1] += 1
                label = int(document.tokens[anchor + k])
                if label not in OWN:
                    continue
                one_hot_label = torch.nn.functional.one_hot(torch.tensor(label - 20), len(OWN))
                target_probs = slow_cap(loss.head @ document.hidden[anchor + k - 1], cap)[OWN].softmax(0)
                goal = distill * target_probs + (1 - distill) * one_hot_label
                cross_entropy = -float(goal @ scores[k - 1].log_softmax(0))
                common = float(torch.minimum(target_probs, scores[k - 1].softmax(0)).sum())
                total += 0.8 ** (k - 1) * ((1 - overlap) * cross_entropy - overlap * math.log(common))
                weight += 0.8 ** (k - 1)
    result = loss(batch)
    assert result.loss.item() == pytest.approx(total / weight, rel=1e-4)
    assert float(result.sums.weight) == pytest.approx(weight, rel=1e-5)
    assert result.sums.count.tolist() == count


def test_accepted_tokens_are_those_of_drafting_one_by_one(tiny_pair: Pair) -> None:
    """num_accepted equals that of drafting step by step, on texts that repeat some drafted tokens after an anchor."""
    loss = loss_of(tiny_pair)
    slow = SlowEagle3(loss.draft.state_dict(), loss.draft.config)
    shard, accepted = documents(2), []
    for document, (anchor, right) in zip(shard, ((5, 3), (6, 1), (6, 0), (3, 2)), strict=True):
        drafted = [int(OWN[scores.argmax()]) for scores in chain(slow, loss, document, anchor, None)]
        rest = document.tokens[anchor + 1 : anchor + 1 + right]
        rest.copy_(torch.tensor(drafted[: len(rest)]))
        if (after := anchor + 1 + right) < len(document.tokens) and right < BLOCK - 1:
            document.tokens[after] = 20 + (drafted[right] - 20 + 1) % len(OWN)
        accepted.append(len(rest))
    batch = collate(shard, [torch.tensor([anchor]) for anchor in (5, 6, 6, 3)])._replace(
        valid=torch.tensor([[True], [True], [False], [True]])
    )
    assert accepted == [3, 1, 0, 2]
    assert loss(batch).num_accepted[:, 0].tolist() == accepted


def test_a_sampled_vocabulary_is_refused(tiny_pair: Pair) -> None:
    with pytest.raises(ValueError, match="num_sampled"):
        loss_of(tiny_pair)(batch_of(documents(), 3, seed=1), Vocabulary(OWN, torch.zeros(len(OWN))))


@pytest.mark.parametrize(("autocast", "distill"), [(False, 0.0), (True, 1.0)])
def test_a_draft_learns_its_targets_answers(autocast: bool, distill: float, tiny_pair: Pair, tmp_path: Path) -> None:
    answers = greedy_answers(tiny_pair)
    corpus = stored_corpus(tiny_pair, answers, (0, 2, 4), tmp_path)
    tokens = torch.tensor([token for answer in answers for token in answer.tokens[answer.num_prompt_tokens :]])
    torch.manual_seed(0)
    draft = new_eagle3(tiny_pair.target.config, tokens.unique(), block_size=BLOCK, target_layer_ids=(0, 2, 4))
    start_eagle3_from_target(draft, tiny_pair.target, range(20))
    weight = tiny_pair.target.get_input_embeddings().weight.detach()
    settings = DraftFitSettings(epochs=40, batch_size=2, num_anchors=2, lr=3e-3, num_sampled=0, autocast=autocast)
    fit = DraftFit(Eagle3Loss(draft, weight, weight, distill=distill), corpus, torch.arange(9), settings)
    losses = [float(sums.loss / sums.weight) for sums in fit.steps()]
    # With distillation the loss cannot fall below the target's entropy, 3 nats.
    assert losses[-1] < (losses[0] - 1 if distill else 0.2 * losses[0])
    tau = fit.validate(corpus, range(4)).tau[0.0]
    assert tau > 1.5 if distill else tau > 3


def test_a_resumed_fit_is_the_undisturbed_one(tiny_pair: Pair, tmp_path: Path) -> None:
    corpus = stored_corpus(tiny_pair, greedy_answers(tiny_pair), (0, 2, 4), tmp_path)
    settings = DraftFitSettings(epochs=4, batch_size=2, num_anchors=2, num_sampled=0, autocast=False)
    whole, first, again = (DraftFit(loss_of(tiny_pair), corpus, torch.arange(9), settings) for _ in range(3))
    assert check_resumed(whole, first, again, 3) > 3
