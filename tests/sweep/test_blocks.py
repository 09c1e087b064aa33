"""What a draft would have accepted at every anchor of a known text, against the engine that decodes it."""

import importlib.util
from pathlib import Path

import pytest
import torch

from blockpilot.draft_training.batches import collate, draft_batch, possible_anchors
from blockpilot.draft_training.features import Document
from blockpilot.drafts.dflash_checkpoint import save_draft
from blockpilot.engine.generate import generate
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt
from blockpilot.sweep.trees import emitted_along

MAX_NEW_TOKENS = 40


@pytest.mark.skipif(importlib.util.find_spec("dflash") is None, reason="needs pip install --no-deps dflash==0.1.0")
def test_the_published_package_drafts_the_same_tokens(embedded_pair: Pair, tmp_path: Path) -> None:
    """Our exported directory, loaded by `dflash` 0.1.0, at several anchors of an answer, in fp32."""
    from dflash.model import DFlashDraftModel

    prompt = Prompt("test", (Message("user", "Name three fruits."),))
    ids = prompt.encode(embedded_pair.tokenizer)
    text = [t for step in generate(embedded_pair, ids, block_size=1, max_new_tokens=24) for t in step.tokens]
    document = document_of(embedded_pair, ids, text)
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


def document_of(pair: Pair, prompt_ids: tuple[int, ...], text: list[int]) -> Document:
    """The document with features in the target's own precision."""
    target = Target(pair.target, pair.layer_ids)
    tokens = torch.tensor([*prompt_ids, *text])
    with torch.inference_mode():
        scored = target.score_rows(tokens[None], 0, target.new_cache(1, len(tokens)), torch.tensor([0]))
    assert scored.features is not None
    return Document(tokens, len(prompt_ids), scored.features[0], scored.hidden[0])


@pytest.mark.parametrize(
    ("num_accepted", "emitted"), [([], []), ([0, 0, 0], [1, 1, 1]), ([2, 9, 9, 0], [3, 1]), ([7, 0], [2])]
)
def test_a_step_jumps_over_accepted_and_bonus_tokens(num_accepted: list[int], emitted: list[int]) -> None:
    assert emitted_along(num_accepted) == emitted
