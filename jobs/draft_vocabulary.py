"""Give a draft a vocabulary of its own: the tokens that its target writes most.

A draft's pass then reads as many rows of the LM head and no more (blockpilot/drafts/head.py). Counts the tokens of
answers that jobs/answers.py has written, says what share of the held-out answers each size covers, and writes the
vocabulary beside the draft's weights. What a size costs of tau, jobs/measure_draft.py says with `--vocab-size`.

An EAGLE-3 draft has an LM head of its own: of that the rows are cut, in a copy (`--output`).
"""

from pathlib import Path

import torch
from pydantic import Field

from blockpilot.draft_training.answers import read_answers
from blockpilot.draft_training.vocabulary import by_frequency, coverage
from blockpilot.drafts.checkpoint import write_vocabulary
from blockpilot.drafts.eagle3 import Eagle3Model
from blockpilot.drafts.eagle3_checkpoint import save_eagle3
from blockpilot.drafts.families import load_any_draft
from blockpilot.evaluation.tables import markdown
from jobs.common.config import Config, main


class DraftVocabularyConfig(Config):
    """Draft, answers and size."""

    draft: Path
    """Directory of a draft's checkpoint, which gets a file more."""
    output: Path | None = None
    """Directory of the copy of an EAGLE-3 draft."""
    answers: Path = Path("runs/answers")
    """Directory of the shards of jobs/answers.py."""
    size: int = Field(default=16384, ge=8)
    """Tokens that the draft proposes."""


def run(config: DraftVocabularyConfig) -> None:
    """Write the vocabulary, or the copy; raises ValueError for a directory without a draft or without answers."""
    draft = load_any_draft(config.draft)
    of_target = draft.config.vocab_size
    if isinstance(draft, Eagle3Model) and config.output is None:
        raise ValueError("output: needed for the copy of an EAGLE-3 draft, whose LM head is cut")
    if isinstance(draft, Eagle3Model) and config.size > (most := len(draft.vocabulary)):
        raise ValueError(f"size {config.size}: the draft proposes {most} tokens")
    if config.size > of_target:
        raise ValueError(f"size {config.size}: the target has {of_target} tokens")
    written = {side: _answers(config.answers / side) for side in ("train", "held_out")}
    if not written["train"]:
        raise ValueError(f"answers {config.answers}: no answers in train/ there")
    ranked = by_frequency(written["train"], of_target)
    sizes = sorted({config.size} | {of_target >> shift for shift in range(5)})
    rows = [{"tokens": f"{n:,}", "covers": f"{coverage(ranked[:n], written['held_out']):.2%}"} for n in sizes]
    print(markdown(rows))
    if isinstance(draft, Eagle3Model) and config.output is not None:
        known = ranked[torch.isin(ranked, draft.vocabulary)]
        save_eagle3(draft.of_tokens(known[: config.size]), config.output)
    else:
        write_vocabulary(config.draft, ranked[: config.size])


def _answers(folder: Path) -> list[list[int]]:
    """Tokens of all answers of a folder, without their prompts."""
    return [a.tokens[a.num_prompt_tokens :] for file in sorted(folder.glob("*.parquet")) for a in read_answers(file)]


if __name__ == "__main__":
    main(DraftVocabularyConfig, run)
