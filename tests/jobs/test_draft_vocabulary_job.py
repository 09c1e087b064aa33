"""The job that gives a draft its vocabulary: counted from stored answers, refused where there are none."""

import shutil
from pathlib import Path

import pytest

from blockpilot.draft_training.answers import Answer, AnswerSource, write_answers
from blockpilot.drafts.checkpoint import load_draft
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
