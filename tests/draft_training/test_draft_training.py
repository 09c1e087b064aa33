"""Draft training: blocks against the engine's draft pass, the loss against a slow loop, resumed fits, learning."""

import math
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot.draft_training.answers import Answer, answer_source, generate_answers, read_answers, write_prompts
from blockpilot.draft_training.batches import draft_batch, draw_anchors
from blockpilot.draft_training.features import Document, FeatureShard, StoredCorpus, StreamedCorpus
from blockpilot.draft_training.loss import BlockLoss, frequent_tokens, sample_vocabulary
from blockpilot.draft_training.start import start_from_target
from blockpilot.draft_training.training import DraftFit, DraftFitSettings, epoch_batches, learning_rate_factor
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_prepared import CachedDFlash
from blockpilot.engine.generate import generate
from blockpilot.models.packing import Packing
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt
from blockpilot.types import Sampling
from helpers.dflash import slow_cap, slow_lift
from helpers.documents import (
    PROMPTS,
    SOURCE,
    batch_of,
    check_resumed,
    greedy_answers,
    random_documents,
    stored_corpus,
    write_shard,
)
from helpers.tiny import tiny_draft, tiny_gemma, tiny_gemma4, tiny_hybrid

BLOCK = 4


def documents(num: int, seed: int = 0) -> list[Document]:
    return random_documents([(18, 5)] * num, num_layers=2, seed=seed)


def loss_of(pair: Pair, draft: DraftModel | None = None, **options: Any) -> BlockLoss:
    weight = pair.target.get_input_embeddings().weight.detach()
    return BlockLoss(draft or tiny_draft(pair.target), weight, weight, **options)


@pytest.fixture(scope="module")
def answers(tiny_pair: Pair) -> list[Answer]:
    return greedy_answers(tiny_pair)


@pytest.fixture
def corpus(tiny_pair: Pair, answers: list[Answer], tmp_path: Path) -> StoredCorpus:
    return stored_corpus(tiny_pair, answers, tiny_pair.layer_ids, tmp_path)


def test_training_blocks_equal_the_drafting_path(tiny_pair: Pair) -> None:
    """Hidden states equal those of the engine's cached draft pass, which has no tokens after the anchor and no other
    blocks.
    """
    shard = documents(2)
    batch = batch_of(shard, 3, seed=2)
    loss = loss_of(tiny_pair)
    trained = draft_batch(loss.draft, loss.embedding, batch, BLOCK)
    decoder = CachedDFlash(deepcopy(loss.draft).requires_grad_(False))
    for row, document in enumerate(shard):
        for a, anchor in enumerate(batch.anchors[row].tolist()):
            cache = decoder.new_cache(1, 40)
            columns, block = torch.arange(anchor), Packing([BLOCK], [anchor], torch.device("cpu"))
            decoder.extend(document.features[:anchor], 0 * columns, columns, cache)
            tokens = torch.tensor([int(document.tokens[anchor]), *[decoder.mask_token_id] * (BLOCK - 1)])
            view = cache.view(block.rows, block.columns, slice(0, 1), block.length)
            alone = decoder.propose(loss.embedding[tokens], block, view)
            torch.testing.assert_close(trained[row, a], alone, rtol=1e-4, atol=1e-5)


# --- loss ---


PARTS: list[dict[str, Any]] = [
    {},
    {"markov_rank": 5},
    {"markov_rank": 5, "markov_head_type": "gated"},
    {"selector_rank": 5, "selector_top_k": 40, "conv_kernel_size": 2, "conv_group_size": 8},
]


def mixed(logits: Tensor, target_probs: Tensor, label: int, distill: float, overlap: float) -> float:
    """Loss of one position: cross entropies with the answer's token and the target, and the LK loss."""
    log_probs = logits.log_softmax(0)
    cross_entropy = -(1 - distill) * log_probs[label] - distill * (target_probs * log_probs).sum()
    common = torch.minimum(target_probs, log_probs.exp()).sum()
    return float((1 - overlap) * cross_entropy - overlap * torch.log(common))


@pytest.mark.parametrize(
    ("weighting", "distill", "overlap", "cap"),
    [("decay", 0.0, 0.0, None), ("dpace", 0.3, 0.0, None), ("decay", 1.0, 0.5, 2.0), ("dpace", 0.0, 0.2, None)],
)
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("vocabulary", [None, [*range(7, 200, 3), *range(5, 256, 2)]], ids=["all", "own"])
def test_the_loss_equals_a_slow_loop(
    weighting: str,
    distill: float,
    overlap: float,
    cap: float | None,
    parts: dict[str, Any],
    vocabulary: Any,
    tiny_pair: Pair,
) -> None:
    """With a smaller vocabulary, positions whose token is outside it have weight 0 and count as wrong.

    A soft cap bounds the logits of target and draft.
    """
    shard = documents(3)
    batch = batch_of(shard, 4, seed=2)
    draft = tiny_draft(tiny_pair.target, BLOCK, **parts)
    ids = torch.arange(draft.config.vocab_size)
    if vocabulary is not None:
        draft.vocabulary = torch.tensor(vocabulary).unique().flip(0)
        ids = draft.vocabulary.sort().values
    number = {token: i for i, token in enumerate(ids.tolist())}
    loss = loss_of(tiny_pair, draft, weighting=weighting, distill=distill, overlap=overlap, cap=cap)
    scores = loss(batch)
    scores.loss.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in draft.layers.parameters())
    drafted, weights = draft_batch(loss.draft, loss.embedding, batch, BLOCK).detach(), draft.state_dict()
    total = weight = 0.0
    for row, document in enumerate(shard):
        for a, anchor in enumerate(batch.anchors[row].tolist()):
            losses, hard, labels, right = [], [], [], []  # by offset
            for offset in range(1, min(BLOCK, len(document.tokens) - anchor)):
                before, token = document.tokens[anchor + offset - 1 : anchor + offset + 1].tolist()
                hidden, label = drafted[row, a, offset], number.get(token)
                logits = slow_cap(loss.head[ids] @ hidden, cap)
                lifted = logits + slow_lift(weights, hidden, before, len(loss.head))[ids]
                target_probs = slow_cap(loss.head[ids] @ document.hidden[anchor + offset - 1], cap).softmax(0)
                selection = 0.0
                if draft.candidate_selector is None:
                    logits, chosen = lifted, int(lifted.argmax())
                else:
                    best = logits.topk(draft.candidate_selector.width).indices
                    chosen = int(best[lifted[best].argmax()])
                    if label in best.tolist():
                        best_probs = target_probs[best] / target_probs[best].sum()
                        selection = mixed(lifted[best], best_probs, best.tolist().index(label), distill, overlap)
                labels.append(label)
                right.append(chosen == label)
                hard.append(math.inf if label is None else -float(logits.log_softmax(0)[label]))
                losses.append(
                    0.0 if label is None else mixed(logits, target_probs, label, distill, overlap) + selection
                )
            smoothed = [0.5 * math.exp(-value) + 0.5 for value in hard]
            for i, label in enumerate(labels):
                w = math.exp(-i / (0.5 * BLOCK))
                if weighting == "dpace":
                    w = sum(math.prod(smoothed[:k]) for k in range(i + 1, len(smoothed) + 1))
                total += w * losses[i]
                weight += w * (label is not None)
            assert scores.num_accepted[row, a] == [*right, False].index(False)
    assert scores.loss.item() == pytest.approx(total / weight, rel=1e-4)


def test_a_batch_without_a_token_of_the_drafts_vocabulary_has_no_loss(tiny_pair: Pair) -> None:
    shard = documents(2)
    batch, draft = batch_of(shard, 4, seed=2), tiny_draft(tiny_pair.target, BLOCK)
    used = {token for document in shard for token in document.tokens.tolist()}
    draft.vocabulary = torch.tensor([token for token in range(draft.config.vocab_size) if token not in used])
    assert loss_of(tiny_pair, draft)(batch).loss.item() == 0


def test_anchors_are_distinct_and_inside_the_answer() -> None:
    [document] = documents(1)
    for seed in range(20):
        drawn = draw_anchors(document, 8, torch.Generator().manual_seed(seed)).tolist()
        assert len(set(drawn)) == 8
        assert all(5 <= anchor <= len(document.tokens) - 2 for anchor in drawn)
    [short] = random_documents([(6, 5)], num_layers=2)
    assert len(draw_anchors(short, 8, torch.Generator())) == 0


def test_sampled_vocabulary_estimates_the_full_partition_function() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, frequent = torch.randn(2000, generator=generator), torch.arange(50)
    labels = torch.tensor([7, 1900])
    full, sampled = logits.logsumexp(0).exp(), []
    for _ in range(300):
        vocabulary = sample_vocabulary(frequent, labels, 2000, 100, generator)
        assert set(frequent.tolist()) | {1900} <= set(vocabulary.ids.tolist())
        sampled.append((logits[vocabulary.ids] + vocabulary.correction).logsumexp(0).exp())
    estimates = torch.stack(sampled)
    assert abs(estimates.mean() - full) < 4 * estimates.std() / 300**0.5


def test_frequent_tokens() -> None:
    assert frequent_tokens([[5] * 90 + [3] * 9 + [8]], share=0.99).tolist() == [3, 5]
    assert frequent_tokens([[5] * 90 + [3] * 9 + [8]], share=1.0).tolist() == [3, 5, 8]


def test_starting_from_the_targets_layers(tiny_pair: Pair) -> None:
    draft = tiny_draft(tiny_pair.target)
    # 9 weights of each layer (all but the q/k norms), and two norms.
    assert start_from_target(draft, tiny_pair.target, range(20)) == 2 * 9 + 2
    copied, source = draft.state_dict(), tiny_pair.target.state_dict()
    assert copied["layers.1.mlp.up_proj.weight"].equal(source["model.layers.5.mlp.up_proj.weight"])
    with torch.no_grad():
        states = tiny_pair.target.model(torch.arange(20)[None], output_hidden_states=True).hidden_states
        layer = tiny_pair.target.model.layers[-1]
        keys = layer.self_attn.k_proj(layer.input_layernorm(states[-2]))
    norm = copied["layers.1.self_attn.k_norm.weight"]
    torch.testing.assert_close(norm, keys.square().mean().sqrt().expand(norm.shape))
    features = torch.randn(3, draft.fc.in_features)
    assert torch.equal(draft.fc(features), features[:, -draft.config.hidden_size :])


@pytest.mark.parametrize(("build", "what"), [(tiny_hybrid, "recurrent states"), (tiny_gemma4, "scales")])
def test_targets_whose_layers_are_no_start_are_refused(build: Callable[[], Any], what: str) -> None:
    target = build()
    with pytest.raises(ValueError, match=rf"start 'target': .* layers have {what}.* 'random'"):
        start_from_target(tiny_draft(target), target, range(20))


def test_starting_from_the_layers_of_a_gemma() -> None:
    """Norm weights follow Qwen3's convention; norms of a sublayer's output are folded into its last projection."""
    target = tiny_gemma().eval()
    draft = tiny_draft(target)
    assert start_from_target(draft, target, range(20)) == 2 * 11 + 2
    layer, copied = target.model.layers[-1], draft.layers[-1]
    for norm, own in (
        (layer.input_layernorm, copied.input_layernorm),
        (layer.pre_feedforward_layernorm, copied.post_attention_layernorm),
        (layer.self_attn.q_norm, copied.self_attn.q_norm),
        (target.model.norm, draft.norm),
    ):
        x = torch.randn(5, len(norm.weight))
        torch.testing.assert_close(own(x), norm(x))
    outputs = list[torch.Tensor]()
    handle = layer.self_attn.o_proj.register_forward_hook(lambda _, inputs, output: outputs.extend([*inputs, output]))
    with torch.no_grad():
        target(torch.arange(20)[None])
    handle.remove()
    expected = outputs[1] / outputs[1].square().mean().sqrt() * (1 + layer.post_attention_layernorm.weight)
    torch.testing.assert_close(copied.self_attn.o_proj(outputs[0]), expected)


# --- fit ---


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    factors = [learning_rate_factor(step, 100) for step in range(100)]
    assert factors[3] == 1.0
    assert factors[:4] == sorted(factors[:4])
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[-1] < 0.01


def settings(**changes: int) -> DraftFitSettings:
    defaults: dict[str, Any] = {"epochs": 4, "batch_size": 2, "num_anchors": 4, "num_sampled": 64, "autocast": False}
    return DraftFitSettings(**defaults | changes)


def fit_on(pair: Pair, shards: list[FeatureShard], how: DraftFitSettings, **kwargs: int) -> DraftFit:
    corpus = StoredCorpus(shards)
    return DraftFit(loss_of(pair), corpus, frequent_tokens([a.tokens for a in corpus.answers]), how, **kwargs)


def test_a_resumed_run_equals_an_undisturbed_one(tiny_pair: Pair, tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / f"{i}.parquet", documents(5, seed=i)) for i in range(2)]
    whole, first, second = (fit_on(tiny_pair, shards, settings()) for _ in range(3))
    assert whole.num_steps == check_resumed(whole, first, second, 6) == 4 * 5


def test_workers_share_an_epoch_of_enough_documents(tiny_pair: Pair, tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / "0.parquet", documents(8))]
    fits = [fit_on(tiny_pair, shards, settings(epochs=1), rank=rank, world_size=2) for rank in range(2)]
    assert [len(list(fit.steps())) for fit in fits] == [2, 2]
    with pytest.raises(ValueError, match="batch_size 9 on 1 workers: there are only 8 documents"):
        fit_on(tiny_pair, shards, settings(batch_size=9))


@pytest.mark.parametrize(
    "change", [{"epochs": 0}, {"lr": 0.0}, {"distill": 1.5}, {"overlap": -0.1}, {"num_sampled": -1}]
)
def test_settings_out_of_range_are_refused_by_name(change: dict[str, float]) -> None:
    [name] = change
    with pytest.raises(ValueError, match=f"{name} {change[name]}: must be"):
        replace(DraftFitSettings(), **change).check()


def test_an_epoch_visits_every_document_once_and_batches_alike_lengths() -> None:
    lengths = [i % 50 for i in range(100)]
    batches = list(epoch_batches(lengths, 4, seed=1, epoch=0))
    assert sorted(i for batch in batches for i in batch) == list(range(100))
    spread = sum(max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in batches) / len(batches)
    assert spread < 10
    assert batches == list(epoch_batches(lengths, 4, seed=1, epoch=0))
    assert batches != list(epoch_batches(lengths, 4, seed=1, epoch=1))


def tokens_per_step(pair: Pair, draft: DraftModel) -> float:
    """Acceptance length of a draft on PROMPTS, in the engine."""
    pair = Pair(pair.id, pair.target, deepcopy(draft).eval(), pair.tokenizer)
    options: dict[str, Any] = {"max_new_tokens": 24, "block_size": pair.block_size}
    texts = [generate(pair, prompt.encode(pair.tokenizer), **options) for prompt in PROMPTS]
    steps = [step for text in texts for step in text if step.block_size]
    return sum(len(step.tokens) for step in steps) / len(steps)


def test_validation_walks_the_text_as_decoding_would(tiny_pair: Pair, corpus: StoredCorpus) -> None:
    """tau from one pass over all anchors equals the engine's on the same answers."""
    draft = tiny_draft(tiny_pair.target)
    # A random draft is never right; one that starts from the target's layers sometimes is.
    start_from_target(draft, tiny_pair.target, range(20))
    fit = DraftFit(loss_of(tiny_pair, draft), corpus, torch.arange(9), settings())
    assert fit.validate(corpus, range(4)).tau == {0.0: pytest.approx(tokens_per_step(tiny_pair, draft), rel=0.02)}


def test_a_draft_learns_to_be_accepted(tiny_pair: Pair, corpus: StoredCorpus) -> None:
    """Answers, features and training together raise the engine's acceptance length on training prompts."""
    loss = loss_of(tiny_pair)
    before = tokens_per_step(tiny_pair, loss.draft)
    frequent = frequent_tokens([answer.tokens for answer in corpus.answers])
    fit = DraftFit(loss, corpus, frequent, settings(epochs=60, num_anchors=12, num_sampled=0))
    sums = list(fit.steps())
    assert sums[-1].metrics("train")["train_loss"] < 0.5 * sums[0].metrics("train")["train_loss"]
    assert tokens_per_step(tiny_pair, loss.draft) > max(1.5, before + 0.4)


@pytest.mark.filterwarnings("ignore")  # from the compiler
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_a_compiled_fit_takes_the_same_steps(
    backend: str, tiny_pair: Pair, corpus: StoredCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and tau equal those without compilation, with padding to a few shapes and a selector over the draft's
    vocabulary. "aot_eager" traces as every backend does; "inductor", the default, compiles C++ for a minute.

    The layers share compiled code, one version without and one with a gradient of the input. A version for each layer
    would exceed the recompile limit, beyond which layers run uncompiled.
    """

    def losses(*, compile: bool) -> list[float]:
        torch.manual_seed(0)
        layer_ids = tiny_pair.draft.layer_ids(tiny_pair.target.config.num_hidden_layers)  # those of the corpus
        parts = {"target_layer_ids": layer_ids, "selector_rank": 3, "selector_top_k": 6}
        draft = tiny_draft(tiny_pair.target, BLOCK, num_layers=3, **parts)
        draft.vocabulary = torch.arange(256)
        loss = loss_of(tiny_pair, draft, weighting="dpace", distill=1.0, overlap=0.5)
        how = replace(settings(epochs=2, num_anchors=30, num_sampled=0), compile=compile)
        fit = DraftFit(loss, corpus, torch.arange(9), how)
        steps = [float(sums.loss / sums.weight) for sums in fit.steps()]
        return [*steps, *fit.validate(corpus, range(4)).tau.values()]

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        compiled = losses(compile=True)
    assert compiled == pytest.approx(losses(compile=False), rel=1e-3)


# --- answers and features ---


def test_prompts_that_cannot_be_answered_are_left_out_and_named(
    tiny_pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('odd roles') }}{% endif %}"
    monkeypatch.setattr(tiny_pair.tokenizer, "chat_template", refusing + str(tiny_pair.tokenizer.chat_template))
    prompts = [Prompt("set", (Message("user", text),)) for text in ("short", "long " * 20, "long " * 300)]
    prompts.append(Prompt("other", (Message("tool", "42"),)))
    (answer,) = generate_answers(tiny_pair, prompts, [Sampling()] * 4, max_new_tokens=4, max_prompt_tokens=64)
    assert answer.tokens[: answer.num_prompt_tokens] == list(prompts[0].encode(tiny_pair.tokenizer))
    assert caplog.messages == [
        "3 of 4 prompts left out: prompt 2 (set): 118 tokens, max_prompt_tokens is 64; "
        "prompt 3 (set): 1518 tokens, the model's limit is 1024 with the answer; "
        "prompt 4 (other): chat template: odd roles"
    ]


def test_features_of_another_shard_are_noticed(tmp_path: Path) -> None:
    shard, other = (write_shard(tmp_path / f"{num}.parquet", documents(num)) for num in (3, 2))
    with pytest.raises(ValueError, match="36 rows for 54 tokens"):
        StoredCorpus([shard._replace(features=other.features)])


def test_a_corpus_reads_what_was_written(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / f"{i}.parquet", documents(3, seed=i)) for i in range(2)]
    corpus = StoredCorpus(shards)
    for document, expected in zip(corpus.read(range(6)), documents(3, seed=0) + documents(3, seed=1), strict=True):
        assert document.num_prompt_tokens == expected.num_prompt_tokens
        assert all(
            getattr(document, name).equal(getattr(expected, name)) for name in ("tokens", "features", "hidden")
        )
    assert len(corpus.read(corpus.sample(2))) == 2
    assert corpus.sample(99) == list(range(6))
    assert answer_source(shards[0].answers) == SOURCE
    assert [a.num_prompt_tokens for a in read_answers(shards[0].answers)] == [5] * 3


def test_answers_of_one_token_are_no_documents(tiny_pair: Pair, tmp_path: Path) -> None:
    """With them, a batch of such answers would end every attempt at a training."""
    mixed = random_documents([(18, 5), (6, 5), (12, 5), (6, 5), (5, 5), (6, 5)], num_layers=2)
    shard = write_shard(tmp_path / "0.parquet", mixed)
    corpus = StoredCorpus([shard])
    for document, expected in zip(corpus.read(range(2)), (mixed[0], mixed[2]), strict=True):
        assert document.tokens.equal(expected.tokens)
        assert document.features.equal(expected.features)
    streamed = StreamedCorpus(read_answers(shard.answers), Target(tiny_pair.target, tiny_pair.layer_ids))
    assert [len(answer.tokens) for answer in streamed.answers] == [18, 12]
    fit = fit_on(tiny_pair, [shard], settings(epochs=2, batch_size=1))
    assert all(math.isfinite(sums.loss) for sums in fit.steps())


def test_a_streamed_corpus_equals_the_stored_one(
    tiny_pair: Pair, answers: list[Answer], corpus: StoredCorpus
) -> None:
    streamed = StreamedCorpus(answers, Target(tiny_pair.target, tiny_pair.layer_ids))
    for a, b in zip(corpus.read([2, 0]), streamed.read([2, 0]), strict=True):
        assert torch.equal(a.tokens, b.tokens)
        torch.testing.assert_close(a.features, b.features, rtol=0.02, atol=1e-3)
        torch.testing.assert_close(a.hidden, b.hidden, rtol=0.02, atol=1e-3)


def test_a_target_writes_its_own_prompts(embedded_pair: Pair) -> None:
    texts = write_prompts(embedded_pair, range(4), ("What is",), max_new_tokens=24, num_slots=4)
    assert texts == write_prompts(embedded_pair, range(4), ("What is",), max_new_tokens=24)
    assert texts
    assert len(set(texts)) == len(texts)
    assert all(text.startswith("What is") and "<|im" not in text for text in texts)


def test_a_target_without_a_chat_template_cannot_write_prompts(tiny_pair: Pair) -> None:
    tokenizer = copy(tiny_pair.tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="without a chat template cannot write prompts"):
        write_prompts(replace(tiny_pair, tokenizer=tokenizer), range(2))
