"""A draft with a smaller vocabulary: fewer rows of the LM head, the same text."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockpilot.draft_training.loss import by_frequency
from blockpilot.drafts.dflash_checkpoint import load_draft, save_draft, write_vocabulary
from blockpilot.drafts.head import DraftHead
from blockpilot.drafts.options import VOCABULARY_FILE
from blockpilot.engine.drafting import draft_candidates
from blockpilot.engine.engine import Engine
from blockpilot.engine.sampling import best_choices
from blockpilot.pairs.loading import Pair, load_pair
from blockpilot.types import Request, Sampling
from helpers.dflash import slow_cap
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of
from helpers.tiny import tiny_gemma4

IDS = torch.randperm(260, generator=torch.Generator().manual_seed(0))[:150]


@pytest.fixture
def draft_dir(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> Path:
    """The tiny draft with a vocabulary of IDS tokens."""
    shutil.copytree(tiny_pair_dirs[1], tmp_path / "draft")
    write_vocabulary(tmp_path / "draft", IDS)
    return tmp_path / "draft"


@pytest.fixture
def pair(tiny_pair_dirs: tuple[Path, Path], draft_dir: Path) -> Pair:
    return load_pair(target=str(tiny_pair_dirs[0]), draft=str(draft_dir), dtype="float32")


def of_all(head: DraftHead, hidden: Tensor) -> Tensor:
    """Logits of all tokens, -inf for those that the draft does not propose."""
    return head(hidden) if head.subset is None else head.subset.expanded(head(hidden))


def test_tokens_outside_are_never_proposed_and_the_others_score_as_ever(pair: Pair, tiny_pair: Pair) -> None:
    hidden = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    whole, narrowed = (of_all(each_pair.prepared_draft.head, hidden) for each_pair in (tiny_pair, pair))
    assert narrowed.shape == whole.shape
    torch.testing.assert_close(narrowed[:, IDS], whole[:, IDS])
    outside = torch.ones(260, dtype=torch.bool).index_fill_(0, IDS, False)
    assert (narrowed[:, outside] == -torch.inf).all()


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "own"])
@torch.inference_mode()
def test_scores_by_the_targets_head_have_its_soft_cap(ids: Tensor | None) -> None:
    """Gemma 4 bounds its logits, so a draft without an LM head proposes with bounded ones."""
    target, hidden = tiny_gemma4(), 20 * torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(260) if ids is None else ids
    logits = target.lm_head(hidden)[:, tokens]
    assert logits.abs().max() > target.config.final_logit_softcapping == 9.0
    scores = of_all(DraftHead.from_target(target, ids), hidden)[:, tokens]
    torch.testing.assert_close(scores, slow_cap(logits, 9.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("second", [Sampling(), Sampling(0.8, seed=2)])
def test_choices_are_those_of_the_whole_vocabulary(pair: Pair, num: int, second: Sampling) -> None:
    """Choices within the draft's vocabulary if all rows are greedy, within the whole one if a row is sampled."""
    hidden, sampling = torch.randn(2, 48, generator=torch.Generator().manual_seed(1)), [Sampling(), second]
    best = draft_candidates(pair.prepared_draft.head, hidden, [3, 4], sampling, num)
    expected = best_choices(of_all(pair.prepared_draft.head, hidden), [3, 4], sampling, num)
    assert best.tokens.equal(expected.tokens)
    for values, expected_values in zip(best[1:], expected[1:], strict=True):
        torch.testing.assert_close(values, expected_values)


def test_the_text_is_that_of_one_token_at_a_time(pair: Pair) -> None:
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        requests = [
            Request(PROMPT, 24, sampling, size, NEVER, layout=layout)
            for size in (4, 8)
            for layout in ("chain", "tree")
        ]
        texts = {text_of(steps) for steps in run(Engine(pair, num_slots=4, max_length=64), requests)}
        assert texts == {plain_text(pair, PROMPT, 24, sampling)}


def test_a_draft_keeps_its_vocabulary(draft_dir: Path, tmp_path: Path) -> None:
    save_draft(load_draft(draft_dir), tmp_path / "again")
    vocabulary = load_draft(tmp_path / "again").vocabulary
    assert vocabulary is not None
    assert vocabulary.tolist() == json.loads((tmp_path / "again" / VOCABULARY_FILE).read_text()) == IDS.tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2", "not JSON"),
        *((content, "list of different token ids") for content in ("{}", "[]", "[1, 1]", "[true, 2]")),
        ("[1, 260]", "token 260, must be 0 to 259"),
        ("[-1]", "token -1, must be 0 to 259"),
    ],
)
def test_a_bad_vocabulary_is_refused(content: str, message: str, draft_dir: Path) -> None:
    (draft_dir / VOCABULARY_FILE).write_text(content)
    with pytest.raises(ValueError, match=f"{VOCABULARY_FILE}.*{message}"):
        load_draft(draft_dir)


def test_frequent_tokens_come_first() -> None:
    ranked = by_frequency([(5, 5, 5, 2), (2, 7)], vocab_size=9)
    assert ranked.tolist() == [5, 2, 7, 0, 1, 3, 4, 6, 8]
