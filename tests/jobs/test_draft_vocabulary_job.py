"""The job that gives a draft its vocabulary: counted from stored answers, refused where there are none."""

import shutil
from pathlib import Path

import pytest
import torch

from blockpilot.draft_training.answers import Answer, AnswerSource, write_answers
from blockpilot.drafts.checkpoint import load_draft
from blockpilot.drafts.eagle3_checkpoint import load_eagle3, save_eagle3
from helpers.eagle3 import random_eagle3
from helpers.tiny import tiny_target
from jobs.draft_vocabulary import DraftVocabularyConfig, run


@pytest.fixture
def config(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> DraftVocabularyConfig:
    shutil.copytree(tiny_pair_dirs[1], tmp_path / "draft")
    return DraftVocabularyConfig(draft=tmp_path / "draft", answers=tmp_path / "answers", size=8)


def store(config: DraftVocabularyConfig, side: str, tokens: list[int]) -> None:
    (config.answers / side).mkdir(parents=True)
    answer = Answer("some", [1, 1, 1, *tokens], 3, 0.0, 0)
    write_answers(config.answers / side / "some-000000.parquet", [answer], AnswerSource("target", "revision"))


def test_the_answers_tokens_are_counted_without_their_prompts(
    config: DraftVocabularyConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    store(config, "train", [90, 80, 90, 70, 80, 90])
    store(config, "held_out", [90, 80, 200, 210])
    run(config)
    vocabulary = load_draft(config.draft).vocabulary
    assert vocabulary is not None
    assert vocabulary.tolist() == [90, 80, 70, 0, 1, 2, 3, 4]
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| 8 "))
    assert "50.00%" in line


def test_a_folder_without_answers_is_named(config: DraftVocabularyConfig) -> None:
    with pytest.raises(ValueError, match=f"answers {config.answers}: no answers"):
        run(config)


def test_more_tokens_than_the_target_has_are_refused(config: DraftVocabularyConfig) -> None:
    store(config, "train", [90])
    with pytest.raises(ValueError, match="size 261: the target has 260 tokens"):
        run(config.model_copy(update={"size": 261}))


def test_of_an_eagle_draft_the_head_is_cut_in_a_copy(config: DraftVocabularyConfig, tmp_path: Path) -> None:
    store(config, "train", [90, 81, 90, 70, 80, 90])
    draft = random_eagle3(tiny_target().config, torch.arange(0, 260, 2))
    draft.carry_embeddings(torch.randn(260, 48))
    save_eagle3(draft, tmp_path / "eagle", dtype=torch.float32)
    config = config.model_copy(update={"draft": tmp_path / "eagle"})
    with pytest.raises(ValueError, match="output: needed for the copy of an EAGLE-3 draft"):
        run(config)
    config = config.model_copy(update={"output": tmp_path / "small"})
    with pytest.raises(ValueError, match="size 131: the draft proposes 130 tokens"):
        run(config.model_copy(update={"size": 131}))
    run(config)
    small = load_eagle3(tmp_path / "small")
    assert small.vocabulary.tolist() == [0, 2, 4, 6, 8, 70, 80, 90]
    rows = [draft.vocabulary.tolist().index(token) for token in small.vocabulary.tolist()]
    assert torch.equal(small.lm_head.weight, draft.lm_head.weight[rows].bfloat16().float())
    assert small.embed_tokens is not None
    assert len(load_eagle3(tmp_path / "eagle").vocabulary) == 130
