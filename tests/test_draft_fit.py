"""Draft training: the block mask against a slow oracle, the leaks others shipped, resume, and that it learns."""

from pathlib import Path

import pytest
import torch
from conftest import tiny_draft

from blockpilot.draft import DraftModel
from blockpilot.draft_data import (
    Answer,
    Document,
    FeatureSource,
    generate_answers,
    read_documents,
    target_features,
    write_answers,
    write_features,
)
from blockpilot.draft_fit import (
    BlockLoss,
    DraftFit,
    DraftFitSettings,
    block_mask,
    collate,
    copy_target_layers,
    draw_anchors,
    frequent_tokens,
    learning_rate_factor,
    sample_vocabulary,
)
from blockpilot.engine import generate
from blockpilot.pairs import Pair
from blockpilot.prompts import Message, Prompt
from blockpilot.verify import Sampling

BLOCK = 4
SOURCE = FeatureSource("revision", (1, 3))


def documents(num: int = 6, width: int = 96, seed: int = 0) -> list[Document]:
    """Answers that count upwards, so that there is something to learn; features are random."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num):
        first, length = int(torch.randint(0, 200, (1,), generator=generator)), 18
        tokens = (first + torch.arange(length)) % 250
        found.append(Document(tokens, 5, torch.randn(length, width, generator=generator).bfloat16()))
    return found


def loss_of(pair: Pair, draft: DraftModel | None = None) -> BlockLoss:
    weight = pair.target.get_input_embeddings().weight.detach()
    return BlockLoss(draft or tiny_draft(pair.target), weight, weight)


def write_shard(path: Path, shard: list[Document]) -> Path:
    answers = [Answer("test", d.tokens.tolist(), d.num_prompt_tokens, 0.0, 0) for d in shard]
    write_answers(path, answers)
    write_features(path.with_suffix(".safetensors"), torch.cat([d.features for d in shard]), SOURCE)
    return path


def test_block_mask_equals_a_slow_loop() -> None:
    anchors, num_context = torch.tensor([[2, 5], [0, 3]]), 7
    mask = block_mask(anchors, num_context, BLOCK)
    for row in range(2):
        for query in range(2 * BLOCK):
            block = query // BLOCK
            for key in range(num_context + 2 * BLOCK):
                in_context = key < num_context
                expected = key < anchors[row, block] if in_context else (key - num_context) // BLOCK == block
                assert bool(mask[row, query, key]) == bool(expected)


def test_training_blocks_equal_the_drafting_path(tiny_pair: Pair) -> None:
    """What the loss sees of a block is what the engine's cached draft pass computes at that anchor."""
    shard = documents(2)
    batch = collate(shard, 3, BLOCK, torch.Generator().manual_seed(0))
    batch = batch._replace(features=batch.features.float())
    loss = loss_of(tiny_pair)
    draft = loss.draft
    trained = loss._draft_blocks(batch)
    for row, document in enumerate(shard):
        for a, anchor in enumerate(batch.anchors[row].tolist()):
            cache = draft.new_cache(1, 40)
            columns = torch.arange(anchor)[None]
            draft.extend(
                draft.fuse(document.features[None, :anchor].float()), columns, cache.view(0, columns, anchor)
            )
            block = torch.tensor([[int(document.tokens[anchor]), *[draft.options.mask_token_id] * (BLOCK - 1)]])
            positions = anchor + torch.arange(BLOCK)[None]
            view = cache.view(0, positions, anchor + BLOCK)
            alone = draft.propose(loss.embedding[block], positions, torch.tensor([BLOCK]), view)
            torch.testing.assert_close(trained[row, a], alone[0], rtol=1e-4, atol=1e-5)


def test_a_block_sees_neither_its_answers_nor_other_blocks(tiny_pair: Pair) -> None:
    [document] = documents(1)
    generator = torch.Generator().manual_seed(0)
    batch = collate([document], 2, BLOCK, generator)._replace(anchors=torch.tensor([[6, 11]]))
    loss = loss_of(tiny_pair)
    base = loss._draft_blocks(batch._replace(features=batch.features.float()))
    tokens, features = batch.tokens.clone(), batch.features.float().clone()
    tokens[0, 7:] = 3  # everything after the first anchor, the second anchor too
    features[0, 6:] += 1
    changed = loss._draft_blocks(batch._replace(tokens=tokens, features=features))
    assert torch.equal(changed[0, 0], base[0, 0])
    assert not torch.allclose(changed[0, 1], base[0, 1])


def test_the_loss_is_the_weighted_cross_entropy_of_a_slow_loop(tiny_pair: Pair) -> None:
    shard = documents(3)
    batch = collate(shard, 4, BLOCK, torch.Generator().manual_seed(2))
    batch = batch._replace(features=batch.features.float())
    loss = loss_of(tiny_pair)
    value, sums = loss(batch)
    hidden = loss._draft_blocks(batch).detach()
    total = weight = correct = 0.0
    for row, document in enumerate(shard):
        for a, anchor in enumerate(batch.anchors[row].tolist()):
            for slot in range(1, BLOCK):
                if anchor + slot >= len(document.tokens):
                    continue
                logits = hidden[row, a, slot] @ loss.head.T
                w = torch.exp(torch.tensor(-(slot - 1) / (0.5 * BLOCK)))
                label = int(document.tokens[anchor + slot])
                total += float(w * -(logits.log_softmax(0)[label]))
                weight += float(w)
                correct += float(logits.argmax() == label)
    assert value.item() == pytest.approx(total / weight, rel=1e-4)
    assert float(sums.correct.sum()) == correct


def test_anchors_are_distinct_and_inside_the_answer() -> None:
    [document] = documents(1)
    for seed in range(20):
        drawn = draw_anchors(document, 8, torch.Generator().manual_seed(seed)).tolist()
        assert len(set(drawn)) == 8
        assert all(5 <= anchor <= len(document.tokens) - 2 for anchor in drawn)
    short = Document(torch.arange(6), 5, torch.zeros(6, 96))
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
    assert copy_target_layers(draft, tiny_pair.target) == 2 * 9 + 1  # all of a layer but its q/k norms, and the norm
    torch.testing.assert_close(
        draft.state_dict()["layers.1.mlp.up_proj.weight"],
        tiny_pair.target.state_dict()["model.layers.5.mlp.up_proj.weight"],
    )


def settings(**changes: int) -> DraftFitSettings:
    return DraftFitSettings(**{"epochs": 4, "batch_size": 2, "num_anchors": 4, "num_sampled": 64} | changes)


def fit_on(pair: Pair, shards: list[Path], how: DraftFitSettings, **kwargs: int) -> DraftFit:
    frequent = frequent_tokens([d.tokens.tolist() for shard in shards for d in read_documents(shard)])
    return DraftFit(loss_of(pair), shards, frequent, how, **kwargs)


def test_a_resumed_run_equals_an_undisturbed_one(tiny_pair: Pair, tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / f"{i}.parquet", documents(5, seed=i)) for i in range(2)]
    whole = fit_on(tiny_pair, shards, settings())
    losses = [float(sums.loss) for sums in whole.steps()]
    assert len(losses) == whole.num_steps == 4 * 4
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


def test_features_of_another_shard_are_noticed(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "0.parquet", documents(3))
    write_features(path.with_suffix(".safetensors"), torch.zeros(7, 96), SOURCE)
    with pytest.raises(ValueError, match="7 rows for 54 tokens"):
        read_documents(path)


def test_a_draft_learns_to_be_accepted(tiny_pair: Pair, tmp_path: Path) -> None:
    """From prompts to tau: answers, features and training raise what the engine accepts on training prompts."""
    prompts = [Prompt("test", (Message("user", text),)) for text in ("abc", "the cat", "12 + 3", "why")]
    answers = generate_answers(
        tiny_pair, prompts, [Sampling()] * 4, max_new_tokens=24, max_prompt_tokens=64, num_slots=4
    )
    path = tmp_path / "0.parquet"
    write_answers(path, answers)
    write_features(path.with_suffix(".safetensors"), target_features(tiny_pair, answers), SOURCE)

    def tau(draft: DraftModel) -> float:
        pair = Pair(tiny_pair.id, tiny_pair.target, draft.eval(), tiny_pair.tokenizer)
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
    fit = DraftFit(loss, [path], frequent, settings(epochs=60, num_anchors=12, num_sampled=0))
    sums = list(fit.steps())
    assert sums[-1].metrics("train")["train_loss"] < 0.5 * sums[0].metrics("train")["train_loss"]
    after = tau(loss.draft)
    assert after > 1.5
    assert after > before + 0.4
