"""Replays of known texts against the engine that decodes them, and against the published drafter's package."""

import importlib.util
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from blockpilot.draft_training.batches import collate, draft_batch, possible_anchors
from blockpilot.draft_training.features import Document
from blockpilot.drafts.dflash_checkpoint import save_draft
from blockpilot.engine.engine import Engine
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair, load_pair
from blockpilot.prompts.files import Message, Prompt, load_prompts
from blockpilot.sweep.replay import Text, accepted_everywhere, know, walk
from blockpilot.sweep.rows import Method
from blockpilot.sweep.summary import fewest_steps
from blockpilot.sweep.sweep import sweep_prompts
from blockpilot.types import Request, Sampling
from helpers.engines import run, text_of
from helpers.published import small_draft, small_target
from helpers.tiny import tiny_draft, tiny_target

ASKED = "Count from one to twenty in words.", "Name three fruits."
MAX_NEW_TOKENS = 16
CANDIDATES = 2, 3, 8
METHODS: tuple[Method, ...] = ("decode", "replay", "dense")


def texts_of(pair: Pair, sampling: Sampling) -> list[Text]:
    """Texts decoded by the engine."""
    prompts = [Prompt("test", (Message("user", asked),)).encode(pair.tokenizer) for asked in ASKED]
    engine = Engine(pair, num_slots=len(ASKED), max_length=max(map(len, prompts)) + MAX_NEW_TOKENS)
    answers = run(engine, [Request(ids, MAX_NEW_TOKENS, sampling, 1, pair.stop_token_ids) for ids in prompts])
    return [
        Text((*ids, *text_of(steps)), len(ids), len(ids) + MAX_NEW_TOKENS, sampling)
        for ids, steps in zip(prompts, answers, strict=True)
    ]


@pytest.mark.parametrize("pair", ["tiny_pair", "eagle_pair"], indirect=True)
def test_texts_are_scored_in_stretches(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = texts_of(pair, Sampling(6.0, seed=5))
    whole = know(pair, texts)
    monkeypatch.setattr("blockpilot.sweep.replay.PREFILL_COLUMNS", 14)
    monkeypatch.setattr("blockpilot.sweep.replay.ANCHORS_AT_ONCE", 8)
    monkeypatch.setattr("blockpilot.sweep.replay.HEAD_ROWS", 3)
    cut = know(pair, texts)
    torch.testing.assert_close(whole.prefill_context, cut.prefill_context, rtol=1e-3, atol=1e-3)
    walked = walk(pair, cut, CANDIDATES)
    assert walked == walk(pair, whole, CANDIDATES)
    assert max(chain.from_iterable(chain.from_iterable(walked))) > 1
    for text, accepted in zip(texts, accepted_everywhere(pair, cut, 3), strict=True):
        assert len(accepted) == len(text.tokens) - text.num_prompt_tokens - 1


def test_an_answer_of_one_token_has_no_step(tiny_pair: Pair) -> None:
    known = know(tiny_pair, [Text((1, 2, 3, 4), 3, 5, Sampling())])
    assert accepted_everywhere(tiny_pair, known, 4) == [[]]
    assert walk(tiny_pair, known, [4]) == [[[]]]


@pytest.fixture(scope="module")
def narrow_pair(tiny_pair: Pair) -> Pair:
    """The tiny pair with a draft that has a smaller vocabulary."""
    draft = tiny_draft(tiny_target()).eval().requires_grad_(False)
    draft.vocabulary = torch.randperm(260, generator=torch.Generator().manual_seed(0))[:150]
    return replace(tiny_pair, draft=draft)


@pytest.fixture(scope="module")
def dspark_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """DSpark draft, which has a separate LM head and proposes a token at its anchor."""
    root, name = tmp_path_factory.mktemp("dspark"), "qwen3-4b-dspark"
    return load_pair(
        target=small_target(name, root / "target"), draft=small_draft(name, root / "draft"), dtype="float32"
    )


PAIRS = "tiny_pair", "markov_pair", "gated_pair", "dflash2_pair", "eagle_pair", "narrow_pair", "dspark_pair"


@pytest.mark.parametrize("pair", PAIRS, indirect=True)
@pytest.mark.parametrize("temperature", [0.0, 6.0])
def test_a_replay_equals_decoding(pair: Pair, temperature: float) -> None:
    """Texts of several lengths, padded in a batch; with the noise of T = 6 a random draft is often right."""
    settings: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "step_samples": 5}
    decoded, *replays = (
        sweep_prompts(pair, load_prompts("demo", 4), [1, 2, 4, 7], method=method, **settings).rows
        for method in METHODS
    )
    for replayed in replays:
        for by_engine, row in zip(decoded, replayed, strict=True):
            assert row.output_tokens == by_engine.output_tokens
            assert row.emitted_histograms == by_engine.emitted_histograms
            assert row.context == pytest.approx(by_engine.context, abs=1e-4)
            assert not row.accepted or fewest_steps(row.accepted) <= min(row.num_steps)
    most = max(tau for row in decoded for tau in row.taus)
    assert most > (1.5 if pair.draft.is_sequential else 1) or temperature < 6


@pytest.mark.skipif(importlib.util.find_spec("dflash") is None, reason="needs pip install --no-deps dflash==0.1.0")
def test_the_published_package_drafts_the_same_tokens(embedded_pair: Pair, tmp_path: Path) -> None:
    """Our exported directory, loaded by `dflash` 0.1.0, at several anchors of an answer, in fp32."""
    from dflash.model import DFlashDraftModel

    document = document_of(embedded_pair, texts_of(embedded_pair, Sampling())[1])
    anchors = possible_anchors(document)[::5]
    size, draft, target = embedded_pair.block_size, embedded_pair.draft, embedded_pair.target
    save_draft(draft, tmp_path, dtype=torch.float32)
    theirs = DFlashDraftModel.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        ours = draft_batch(draft, embedding.weight, collate([document], [anchors]), size)[0]
        for anchor, hidden in zip(anchors.tolist(), ours, strict=True):
            block = torch.full((1, size), draft.options.mask_token_id)
            block[0, 0] = document.tokens[anchor]
            expected = theirs(
                position_ids=torch.arange(anchor + size)[None],
                noise_embedding=embedding(block),
                target_hidden=document.features[None, :anchor],
            )
            assert head(hidden).argmax(-1)[1:].tolist() == head(expected[0]).argmax(-1)[1:].tolist()


def document_of(pair: Pair, text: Text) -> Document:
    """Document of a text, with features in the target's precision."""
    target, tokens = Target(pair.target, pair.layer_ids), torch.tensor(text.tokens)
    with torch.inference_mode():
        scored = target.score_rows(tokens[None], 0, target.new_cache(1, len(tokens)), torch.tensor([0]))
    assert scored.features is not None
    return Document(tokens, text.num_prompt_tokens, scored.features[0], scored.hidden[0])
