"""Draft training: the block mask against a slow oracle, the leaks others shipped, resume, and that it learns."""

import math
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot.draft_training.answers import (
    Answer,
    AnswerSource,
    answer_source,
    generate_answers,
    read_answers,
    write_answers,
    write_prompts,
)
from blockpilot.draft_training.batches import DraftBatch, collate, draft_batch, draw_anchors
from blockpilot.draft_training.features import (
    Document,
    FeatureShard,
    FeatureSource,
    StoredCorpus,
    StreamedCorpus,
    TargetFeatures,
    target_features,
    write_features,
)
from blockpilot.draft_training.loss import BlockLoss, dpace_weights, frequent_tokens, sample_vocabulary
from blockpilot.draft_training.start import start_from_target
from blockpilot.draft_training.training import DraftFit, DraftFitSettings, epoch_batches, learning_rate_factor
from blockpilot.drafts.blocks import Blocks, block_mask
from blockpilot.drafts.decoder import DraftDecoder
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.edges import GatedMarkovHead
from blockpilot.engine.generate import generate
from blockpilot.models.packing import Packing
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt
from blockpilot.types import Sampling
from helpers.tiny import tiny_draft

BLOCK = 4
ANSWERED = AnswerSource("tiny", "revision")
SOURCE = FeatureSource("revision", (1, 3))


def documents(num: int = 6, width: int = 48, seed: int = 0) -> list[Document]:
    """Answers that count upwards, so that there is something to learn; features are random."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num):
        first, length = int(torch.randint(0, 200, (1,), generator=generator)), 18
        tokens = (first + torch.arange(length)) % 250
        features = torch.randn(length, 3 * width, generator=generator).bfloat16()
        found.append(Document(tokens, 5, features[:, width:], features[:, :width]))
    return found


def batch_of(shard: list[Document], num_anchors: int, seed: int = 0) -> DraftBatch:
    """A float32 batch with random anchors."""
    generator = torch.Generator().manual_seed(seed)
    batch = collate(shard, [draw_anchors(document, num_anchors, generator) for document in shard])
    return batch._replace(features=batch.features.float(), hidden=batch.hidden.float())


def loss_of(pair: Pair, draft: DraftModel | None = None, **options: Any) -> BlockLoss:
    weight = pair.target.get_input_embeddings().weight.detach()
    return BlockLoss(draft or tiny_draft(pair.target), weight, weight, **options)


def write_shard(path: Path, shard: list[Document]) -> FeatureShard:
    files = FeatureShard(path, path.with_suffix(".safetensors"))
    write_answers(path, [Answer("test", d.tokens.tolist(), d.num_prompt_tokens, 0.0, 0) for d in shard], ANSWERED)
    features, hidden = (torch.cat(tensors) for tensors in zip(*((d.features, d.hidden) for d in shard), strict=True))
    write_features(files.features, TargetFeatures(features, hidden), SOURCE)
    return files


def test_block_mask_equals_a_slow_loop() -> None:
    anchors, sizes, num_context = torch.tensor([[2, 5], [0, 3]]), torch.tensor([[2, 4], [1, 3]]), 7
    blocks = Blocks(anchors, torch.zeros(2, 2), sizes, widths=(2, 4))
    mask = block_mask(blocks, num_context)
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]  # (block, offset) of the six positions of a row
    for row in range(2):
        for query, (block, _) in enumerate(places):
            for column in range(num_context):
                assert bool(mask[row, query, column]) == bool(column < anchors[row, block])
            for key, (other, offset) in enumerate(places):
                expected = other == block and offset < sizes[row, block]
                assert bool(mask[row, query, num_context + key]) == bool(expected)


def test_training_blocks_equal_the_drafting_path(tiny_pair: Pair) -> None:
    """What the loss sees of a block is what the engine's cached draft pass computes at that anchor."""
    shard = documents(2)
    batch = batch_of(shard, 3)
    loss = loss_of(tiny_pair)
    draft = loss.draft
    trained = draft_batch(draft, loss.embedding, batch, BLOCK)
    decoder = DraftDecoder(deepcopy(draft).requires_grad_(False))
    for row, document in enumerate(shard):
        for a, anchor in enumerate(batch.anchors[row].tolist()):
            cache = decoder.new_cache(1, 40)
            columns, block = torch.arange(anchor), Packing([BLOCK], [anchor], torch.device("cpu"))
            decoder.extend(document.features[:anchor].float(), 0 * columns, columns, cache)
            tokens = torch.tensor([int(document.tokens[anchor]), *[decoder.mask_token_id] * (BLOCK - 1)])
            view = cache.view(block.rows, block.columns, slice(0, 1), block.length)
            alone = decoder.propose(loss.embedding[tokens], block, view)
            torch.testing.assert_close(trained[row, a], alone, rtol=1e-4, atol=1e-5)


def test_a_block_sees_neither_its_answers_nor_other_blocks(tiny_pair: Pair) -> None:
    [document] = documents(1)
    batch = batch_of([document], 2)._replace(anchors=torch.tensor([[6, 11]]))
    loss = loss_of(tiny_pair)
    base = draft_batch(loss.draft, loss.embedding, batch, BLOCK)
    tokens, features = batch.tokens.clone(), batch.features.clone()
    tokens[0, 7:] = 3  # everything after the first anchor, the second anchor too
    features[0, 6:] += 1
    changed = draft_batch(loss.draft, loss.embedding, batch._replace(tokens=tokens, features=features), BLOCK)
    assert torch.equal(changed[0, 0], base[0, 0])
    assert not torch.allclose(changed[0, 1], base[0, 1])


PARTS: list[dict[str, Any]] = [
    {},
    {"markov_rank": 5},
    {"markov_rank": 5, "markov_head_type": "gated"},
    {"selector_rank": 5, "selector_top_k": 40, "conv_kernel_size": 2, "conv_group_size": 8},
]


def lift(draft: DraftModel, hidden: Tensor, before: int) -> Tensor:
    """Scores that the edges add to all tokens after another."""
    if draft.candidate_selector is not None:
        edges = draft.candidate_selector
        vector = edges.predecessor_codebook[before] * (edges.hidden_projection.weight @ hidden)
        return (edges.successor_codebook @ vector).detach()
    if draft.markov_head is None:
        return torch.zeros(draft.config.vocab_size)
    vector = draft.markov_head.markov_w1.weight[before]
    if isinstance(draft.markov_head, GatedMarkovHead):
        vector = draft.markov_head.gate_proj(torch.cat([hidden, vector])).sigmoid() * vector
    return (draft.markov_head.markov_w2.weight @ vector).detach()


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
@pytest.mark.parametrize(("distill", "overlap"), [(0.0, 0.0), (0.3, 0.0), (1.0, 0.5), (0.0, 0.2)])
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("vocabulary", [None, [*range(7, 200, 3), *range(5, 256, 2)]], ids=["all", "some"])
def test_the_loss_equals_a_slow_loop(
    weighting: str,
    distill: float,
    overlap: float,
    parts: dict[str, Any],
    vocabulary: list[int] | None,
    tiny_pair: Pair,
) -> None:
    """With an own vocabulary, positions of tokens outside it have no weight, and count as wrong."""
    shard = documents(3)
    batch = batch_of(shard, 4, seed=2)
    draft = tiny_draft(tiny_pair.target, BLOCK, **parts)
    ids = torch.arange(draft.config.vocab_size)
    if vocabulary is not None:
        draft.vocabulary = torch.tensor(vocabulary).unique().flip(0)
        ids = draft.vocabulary.sort().values
    number = {token: i for i, token in enumerate(ids.tolist())}
    loss = loss_of(tiny_pair, draft, weighting=weighting, distill=distill, overlap=overlap)
    scores = loss(batch)
    drafted = draft_batch(loss.draft, loss.embedding, batch, BLOCK).detach()
    total = weight = 0.0
    for row, document in enumerate(shard):
        for a, anchor in enumerate(batch.anchors[row].tolist()):
            offsets = range(1, min(BLOCK, len(document.tokens) - anchor))
            logits = [drafted[row, a, offset] @ loss.head[ids].T for offset in offsets]
            before = [int(document.tokens[anchor + offset - 1]) for offset in offsets]
            lifts = [
                lift(draft, drafted[row, a, offset], token)[ids]
                for offset, token in zip(offsets, before, strict=True)
            ]
            labels = [number.get(int(document.tokens[anchor + offset])) for offset in offsets]
            of_target = [
                (document.hidden[anchor + offset - 1].float() @ loss.head[ids].T).softmax(0) for offset in offsets
            ]
            selected = dict[int, float]()  # losses of the selector by offset
            if draft.candidate_selector is None:
                logits = [found + of for found, of in zip(logits, lifts, strict=True)]
                chosen = [int(found.argmax()) for found in logits]
            else:
                bests = [found.topk(draft.candidate_selector.width).indices for found in logits]
                lifted = [(found + of)[best] for found, of, best in zip(logits, lifts, bests, strict=True)]
                chosen = [int(best[found.argmax()]) for found, best in zip(lifted, bests, strict=True)]
                for offset, best, found, wanted, label in zip(offsets, bests, lifted, of_target, labels, strict=True):
                    if label in best.tolist():
                        of_best = wanted[best] / wanted[best].sum()
                        selected[offset] = mixed(found, of_best, best.tolist().index(label), distill, overlap)
            hard = [
                math.inf if label is None else -float(found.log_softmax(0)[label])
                for found, label in zip(logits, labels, strict=True)
            ]
            for offset, found, wanted, label in zip(offsets, logits, of_target, labels, strict=True):
                w = math.exp(-(offset - 1) / (0.5 * BLOCK))
                if weighting == "dpace":
                    smoothed = [0.5 * math.exp(-value) + 0.5 for value in hard]
                    w = sum(math.prod(smoothed[:k]) for k in range(offset, len(smoothed) + 1))
                if label is not None:
                    total += w * (mixed(found, wanted, label, distill, overlap) + selected.get(offset, 0.0))
                    weight += w
            right = [token == label for token, label in zip(chosen, labels, strict=True)]
            assert scores.num_accepted[row, a] == [*right, False].index(False)
    assert scores.loss.item() == pytest.approx(total / weight, rel=1e-4)


def mixed(logits: Tensor, of_target: Tensor, label: int, distill: float, overlap: float) -> float:
    """Loss of one position: cross entropies with the answer's token and the target, and the LK loss."""
    log_probs = logits.log_softmax(0)
    cross_entropy = -(1 - distill) * log_probs[label] - distill * (of_target * log_probs).sum()
    common = torch.minimum(of_target, log_probs.exp()).sum()
    return float((1 - overlap) * cross_entropy - overlap * torch.log(common))


def test_dpace_weights_of_a_case_worked_by_hand() -> None:
    """Confidences .5 and .25 smooth to .75 and .625: weights .75 + .46875 and .46875, outside nothing."""
    losses = -torch.tensor([0.5, 0.25]).log()
    inside = torch.tensor([[[True, True, False]]])
    torch.testing.assert_close(dpace_weights(losses, inside), torch.tensor([[[1.21875, 0.46875, 0.0]]]))


def test_anchors_are_distinct_and_inside_the_answer() -> None:
    [document] = documents(1)
    for seed in range(20):
        drawn = draw_anchors(document, 8, torch.Generator().manual_seed(seed)).tolist()
        assert len(set(drawn)) == 8
        assert all(5 <= anchor <= len(document.tokens) - 2 for anchor in drawn)
    short = Document(torch.arange(6), 5, torch.zeros(6, 96), torch.zeros(6, 48))
    assert len(draw_anchors(short, 8, torch.Generator())) == 0


def test_sampled_vocabulary_estimates_the_full_partition_function() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, frequent = torch.randn(2000, generator=generator), torch.arange(50)
    labels = torch.tensor([7, 1900])
    full = logits.logsumexp(0).exp()
    estimates = []
    for _ in range(300):
        vocabulary = sample_vocabulary(frequent, labels, 2000, 100, generator)
        assert set(frequent.tolist()) | {1900} <= set(vocabulary.ids.tolist())
        estimates.append((logits[vocabulary.ids] + vocabulary.correction).logsumexp(0).exp())
    found = torch.stack(estimates)
    assert abs(found.mean() - full) < 4 * found.std() / 300**0.5


def test_frequent_tokens() -> None:
    assert frequent_tokens([[5] * 90 + [3] * 9 + [8]], share=0.99).tolist() == [3, 5]
    assert frequent_tokens([[5] * 90 + [3] * 9 + [8]], share=1.0).tolist() == [3, 5, 8]


def test_learning_rate() -> None:
    factors = [learning_rate_factor(step, 100) for step in range(100)]
    assert factors[3] == 1.0
    assert factors[:4] == sorted(factors[:4])
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[-1] < 0.01


def test_starting_from_the_targets_layers(tiny_pair: Pair) -> None:
    draft = tiny_draft(tiny_pair.target)
    # All of a layer but its q/k norms, and two norms.
    assert start_from_target(draft, tiny_pair.target, range(20)) == 2 * 9 + 2
    torch.testing.assert_close(
        draft.state_dict()["layers.1.mlp.up_proj.weight"],
        tiny_pair.target.state_dict()["model.layers.5.mlp.up_proj.weight"],
    )
    with torch.no_grad():
        states = tiny_pair.target.model(torch.arange(20)[None], output_hidden_states=True).hidden_states
        layer = tiny_pair.target.model.layers[-1]
        keys = layer.self_attn.k_proj(layer.input_layernorm(states[-2]))
    found = draft.state_dict()["layers.1.self_attn.k_norm.weight"]
    torch.testing.assert_close(found, keys.square().mean().sqrt().expand(found.shape))
    features = torch.randn(3, draft.fc.in_features)
    assert torch.equal(draft.fc(features), features[:, -draft.config.hidden_size :])


def settings(**changes: int) -> DraftFitSettings:
    return DraftFitSettings(
        **{"epochs": 4, "batch_size": 2, "num_anchors": 4, "num_sampled": 64, "autocast": False} | changes
    )


def fit_on(pair: Pair, shards: list[FeatureShard], how: DraftFitSettings, **kwargs: int) -> DraftFit:
    corpus = StoredCorpus(shards)
    return DraftFit(loss_of(pair), corpus, frequent_tokens([a.tokens for a in corpus.answers]), how, **kwargs)


def test_a_resumed_run_equals_an_undisturbed_one(tiny_pair: Pair, tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / f"{i}.parquet", documents(5, seed=i)) for i in range(2)]
    whole = fit_on(tiny_pair, shards, settings())
    losses = [float(sums.loss) for sums in whole.steps()]
    assert len(losses) == whole.num_steps == 4 * 5
    first = fit_on(tiny_pair, shards, settings())
    steps = first.steps()
    for _ in range(6):
        next(steps)
    state = first.state_dict()
    second = fit_on(tiny_pair, shards, settings())
    torch.save(state, tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [float(sums.loss) for sums in second.steps()] == losses[6:]
    for a, b in zip(whole.state_dict()["draft"].values(), second.state_dict()["draft"].values(), strict=True):
        assert torch.equal(a, b)


def test_workers_share_an_epoch_without_overlap(tiny_pair: Pair, tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / "0.parquet", documents(8))]
    fits = [fit_on(tiny_pair, shards, settings(epochs=1), rank=rank, world_size=2) for rank in range(2)]
    assert [len(list(fit.steps())) for fit in fits] == [2, 2]


def test_too_few_documents_are_refused(tiny_pair: Pair, tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / "0.parquet", documents(2))]
    with pytest.raises(ValueError, match="batch_size 8 on 1 workers"):
        fit_on(tiny_pair, shards, settings(batch_size=8))


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


def test_prompts_that_cannot_be_answered_are_left_out_and_named(
    tiny_pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('odd roles') }}{% endif %}"
    monkeypatch.setattr(tiny_pair.tokenizer, "chat_template", refusing + str(tiny_pair.tokenizer.chat_template))
    of_texts = {text: Prompt("some", (Message("user", text),)) for text in ("short", "long " * 20, "long " * 300)}
    prompts = [*of_texts.values(), Prompt("other", (Message("tool", "42"),))]
    settings = {"max_new_tokens": 4, "max_prompt_tokens": 64}
    (answer,) = generate_answers(tiny_pair, prompts, [Sampling()] * 4, **settings)  # type: ignore[arg-type]
    assert answer.tokens[: answer.num_prompt_tokens] == list(prompts[0].encode(tiny_pair.tokenizer))
    assert caplog.messages == [
        "3 of 4 prompts left out: prompt 2 (some): 118 tokens, max_prompt_tokens is 64; "
        "prompt 3 (some): 1518 tokens, the model's limit is 1024 with the answer; "
        "prompt 4 (other): chat template: odd roles"
    ]


def test_validation_walks_the_text_as_decoding_would(tiny_pair: Pair, tmp_path: Path) -> None:
    """Tau from one pass over all anchors equals the steps of the engine on the same answers."""
    prompts = [Prompt("test", (Message("user", text),)) for text in ("abc", "the cat", "12 + 3", "why")]
    answers = generate_answers(tiny_pair, prompts, [Sampling()] * 4, max_new_tokens=20, max_prompt_tokens=64)
    files = FeatureShard(tmp_path / "0.parquet", tmp_path / "0.safetensors")
    write_answers(files.answers, answers, ANSWERED)
    write_features(files.features, features_of(tiny_pair, answers), SOURCE)
    draft = tiny_draft(tiny_pair.target)
    # An untrained draft is never right: one that draws on the context as the target does sometimes is.
    start_from_target(draft, tiny_pair.target, range(20))
    corpus = StoredCorpus([files])
    fit = DraftFit(loss_of(tiny_pair, draft), corpus, torch.arange(9), settings())
    pair = Pair(tiny_pair.id, tiny_pair.target, deepcopy(draft).eval(), tiny_pair.tokenizer)
    steps = [
        step
        for prompt in prompts
        for step in generate(pair, prompt.encode(pair.tokenizer), max_new_tokens=20, block_size=pair.block_size)
        if step.block_size
    ]
    emitted = sum(len(step.tokens) for step in steps)
    assert fit.validate(corpus, range(4)).tau == {0.0: pytest.approx(emitted / len(steps), rel=0.02)}


def features_of(pair: Pair, answers: list[Answer]) -> TargetFeatures:
    return target_features(Target(pair.target, pair.draft.options.target_layer_ids), answers)


def test_features_of_another_shard_are_noticed(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "0.parquet", documents(3))
    write_features(shard.features, TargetFeatures(torch.zeros(7, 96), torch.zeros(7, 48)), SOURCE)
    with pytest.raises(ValueError, match="7 rows for 54 tokens"):
        StoredCorpus([shard])


def test_a_corpus_reads_what_was_written(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / f"{i}.parquet", documents(3, seed=i)) for i in range(2)]
    corpus = StoredCorpus(shards)
    for found, expected in zip(corpus.read(range(6)), documents(3, seed=0) + documents(3, seed=1), strict=True):
        assert found.num_prompt_tokens == expected.num_prompt_tokens
        assert all(
            torch.equal(a, b) for a, b in zip((found[0], *found[2:]), (expected[0], *expected[2:]), strict=True)
        )
    few = corpus.sample(2)
    assert len(few) == len(corpus.read(few)) == 2
    assert corpus.sample(99) == list(range(6))


def test_a_streamed_corpus_equals_the_stored_one(tiny_pair: Pair, tmp_path: Path) -> None:
    prompts = [Prompt("test", (Message("user", text),)) for text in ("abc", "the cat", "12 + 3")]
    answers = generate_answers(tiny_pair, prompts, [Sampling()] * 3, max_new_tokens=8, max_prompt_tokens=64)
    files = FeatureShard(tmp_path / "0.parquet", tmp_path / "0.safetensors")
    write_answers(files.answers, answers, ANSWERED)
    write_features(files.features, features_of(tiny_pair, answers), SOURCE)
    stored = StoredCorpus([files]).read([2, 0])
    target = Target(tiny_pair.target, tiny_pair.draft.options.target_layer_ids)
    streamed = StreamedCorpus(answers, target).read([2, 0])
    for a, b in zip(stored, streamed, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        torch.testing.assert_close(a.features, b.features, rtol=0.02, atol=1e-3)
        torch.testing.assert_close(a.hidden, b.hidden, rtol=0.02, atol=1e-3)


def test_a_shard_says_who_wrote_it(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "0.parquet", documents(1))
    assert answer_source(shard.answers) == ANSWERED
    assert [a.num_prompt_tokens for a in read_answers(shard.answers)] == [5]


def test_a_target_writes_prompts_of_its_own(embedded_pair: Pair) -> None:
    texts = write_prompts(embedded_pair, range(6), ("What is",), max_new_tokens=40, num_slots=6)
    assert texts == write_prompts(embedded_pair, range(6), ("What is",), max_new_tokens=40)
    assert texts
    assert len(set(texts)) == len(texts)
    assert all(text.startswith("What is") and "<|im" not in text for text in texts)


def test_a_target_without_a_chat_template_cannot_write_prompts(tiny_pair: Pair) -> None:
    tokenizer = copy(tiny_pair.tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="without a chat template cannot write prompts"):
        write_prompts(replace(tiny_pair, tokenizer=tokenizer), range(2))


def test_a_draft_learns_to_be_accepted(tiny_pair: Pair, tmp_path: Path) -> None:
    """From prompts to tau: answers, features and training raise what the engine accepts on training prompts."""
    prompts = [Prompt("test", (Message("user", text),)) for text in ("abc", "the cat", "12 + 3", "why")]
    answers = generate_answers(
        tiny_pair, prompts, [Sampling()] * 4, max_new_tokens=24, max_prompt_tokens=64, num_slots=4
    )
    files = FeatureShard(tmp_path / "0.parquet", tmp_path / "0.safetensors")
    write_answers(files.answers, answers, ANSWERED)
    write_features(files.features, features_of(tiny_pair, answers), SOURCE)

    def tau(draft: DraftModel) -> float:
        pair = Pair(tiny_pair.id, tiny_pair.target, deepcopy(draft).eval(), tiny_pair.tokenizer)
        steps = [
            step
            for prompt in prompts
            for step in generate(pair, prompt.encode(pair.tokenizer), max_new_tokens=24, stop_token_ids=frozenset())
            if step.block_size
        ]
        return sum(len(step.tokens) for step in steps) / len(steps)

    loss = loss_of(tiny_pair)
    before = tau(loss.draft)
    frequent = frequent_tokens([answer.tokens for answer in answers])
    fit = DraftFit(loss, StoredCorpus([files]), frequent, settings(epochs=60, num_anchors=12, num_sampled=0))
    sums = list(fit.steps())
    assert sums[-1].metrics("train")["train_loss"] < 0.5 * sums[0].metrics("train")["train_loss"]
    after = tau(loss.draft)
    assert after > 1.5
    assert after > before + 0.4
