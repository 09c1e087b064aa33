"""Examples on disk: the values of the rows, in an order that does not depend on theirs; selections share data."""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.policy.dataset import (
    Examples,
    held_out_prompts,
    open_examples,
    prompt_key,
    read_index,
    read_steps,
    split_examples,
    split_steps,
    write_examples,
    write_steps,
)
from blockpilot.policy.outcomes import Proposed
from blockpilot.sweep.rows import SweepRow, validate
from helpers.sweeps import CANDIDATES, DEPTH, NUM_PLACES, VOCAB_SIZE, metadata, synthetic_rows, with_choices


@pytest.fixture(scope="module")
def rows() -> list[SweepRow]:
    """Twelve rows; one has fewer token ids, one another temperature, one fewer recorded steps."""
    made = synthetic_rows(12, 0)
    made[4] = dataclasses.replace(made[4], probs_ids=made[4].probs_ids[:2], probs=[0.25, 0.5], tail_mass=0.25)
    made[7] = dataclasses.replace(made[7], temperature=0.7, num_prompt_tokens=90)
    nine, num = made[9], len(made[9].step_places)
    vectors = {name: getattr(nine, name)[: 3 * len(getattr(nine, name)) // num] for name in VECTORS}
    made[9] = dataclasses.replace(nine, step_places=nine.step_places[:3], **vectors)
    made = [with_choices(row, seed) for seed, row in enumerate(made)]
    for row in made:
        validate(row, metadata())
    return made


VECTORS = "step_contexts", "step_embeddings"
NO_STEPS = {"step_places": [], **dict.fromkeys((*VECTORS, "step_ranks", "step_scores", "step_log_probs"), b"")}


def in_parts(rows: Sequence[SweepRow], part_size: int = 5) -> list[Sequence[SweepRow]]:
    return [rows[i : i + part_size] for i in range(0, len(rows), part_size)]


def written(
    folder: Path, rows: Sequence[SweepRow], candidates: Sequence[int] = (2, 4, 6, 8), part_size: int = 5
) -> Examples:
    write_examples(folder, in_parts(rows, part_size), candidates)
    return open_examples(folder)


def steps_of(folder: Path, rows: Sequence[SweepRow], part_size: int = 5) -> Proposed:
    write_steps(folder, in_parts(rows, part_size))
    return read_steps(folder)


# --- kind `prompt` ---


def check(examples: Examples, rows: Sequence[SweepRow], candidates: Sequence[int] = CANDIDATES) -> None:
    """Check all values against the rows: exactly those that are float32 there, tau to float32 precision."""
    assert len(examples) == len(rows)
    features, taus = examples.features, examples.taus
    starts = features.offsets.tolist()
    ends = [*starts[1:], len(features.ids)][: len(starts)]
    for i, (row, start, end) in enumerate(zip(rows, starts, ends, strict=True)):
        assert features.ids[start:end].tolist() == row.probs_ids
        assert features.probs[start:end].tolist() == row.probs
        of_sizes = {1: 1.0} | dict(zip(row.candidates, row.taus, strict=True))
        assert taus[i].tolist() == pytest.approx([of_sizes[size] for size in candidates], rel=1e-7)


def ordered(rows: Sequence[SweepRow]) -> list[SweepRow]:
    return sorted(rows, key=lambda row: row.prompt_id)


@pytest.mark.parametrize("candidates", [(2, 4, 6, 8), (4, 8), (1, 2, 4, 6, 8), (1, 6)])
def test_examples_say_what_the_rows_say(rows: list[SweepRow], candidates: tuple[int, ...], tmp_path: Path) -> None:
    """Equal examples for any order of rows and parts. Plain decoding is always a candidate: its tau is 1."""
    examples = written(tmp_path, rows, candidates)
    check(examples, ordered(rows), candidates)
    if candidates[0] == 1:
        assert examples.taus[:, 0].tolist() == [1.0] * len(examples)
    shuffled = random.Random(0).sample(rows, len(rows))
    with_plain = [
        dataclasses.replace(row, candidates=[1, *row.candidates], taus=[1.0, *row.taus]) for row in shuffled
    ]
    other = written(tmp_path / "other", with_plain, candidates, part_size=1)
    assert torch.equal(examples.taus, other.taus)
    assert all(torch.equal(a, b) for a, b in zip(examples.features, other.features, strict=True))


def test_the_index_names_every_row(rows: list[SweepRow], tmp_path: Path) -> None:
    parts = [rows[:7], [], rows[7:]]
    index = write_steps(tmp_path, parts)
    assert index == read_index(tmp_path)
    assert index.prompt_ids == tuple(row.prompt_id for row in rows)
    assert index.prompts == tuple(prompt_key(row.prompt) for row in rows)
    assert index.sets == ("synthetic",) * 12
    assert (index.kind, index.num_examples, index.width) == ("step", 11 * NUM_PLACES + 3, DEPTH)
    with pytest.raises(ValueError, match="of kind 'step', not 'prompt'"):
        open_examples(tmp_path)
    index = write_examples(tmp_path, parts, CANDIDATES)  # overwrites
    assert (index.kind, index.num_examples, index.width) == ("prompt", 12, 4)
    assert len(open_examples(tmp_path)) == 12
    with pytest.raises(ValueError, match="of kind 'prompt', not 'step'"):
        read_steps(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"index.json", "examples.arrow"}


def test_take_is_those_examples_in_that_order(rows: list[SweepRow], tmp_path: Path) -> None:
    examples, wanted = written(tmp_path, rows), ordered(rows)
    for chosen in ([0], [4], [8, 0, 4], [3, 3], [], list(range(len(wanted)))):
        taken = examples.take(torch.tensor(chosen, dtype=torch.int64))
        check(taken, [wanted[i] for i in chosen])
        if len(chosen) > 1:
            check(taken.take(torch.tensor([1])), [wanted[chosen[1]]])
        assert taken.all_taus.data_ptr() == examples.all_taus.data_ptr()  # nothing is copied


def test_where_keeps_the_examples_of_the_rows(rows: list[SweepRow], tmp_path: Path) -> None:
    examples = written(tmp_path, rows)
    check(examples.where(lambda row: row % 2 == 0), ordered(rows[::2]))
    assert len(examples.where(lambda _: False).where(lambda _: True)) == 0


def test_support_is_the_token_ids_with_the_most_mass(rows: list[SweepRow], tmp_path: Path) -> None:
    examples, wanted = written(tmp_path, rows), ordered(rows)
    for chosen in (list(range(12)), [3, 1], []):
        mass: Counter[int] = Counter()
        for place in chosen:
            mass.update(dict(zip(wanted[place].probs_ids, wanted[place].probs, strict=True)))
        taken = examples.take(torch.tensor(chosen, dtype=torch.int64))
        for most in (1, 5, VOCAB_SIZE):
            largest = sorted(mass, key=lambda i: -mass[i])[:most]
            assert taken.support(VOCAB_SIZE, most).tolist() == sorted(largest)


# --- kind `step` ---


def check_steps(steps: Proposed, rows: Sequence[SweepRow]) -> None:
    """Check the draft's proposals at all recorded positions of these rows, in order."""
    assert steps.drawn.tolist() == [row.temperature > 0 for row in rows for _ in row.step_places]
    for name, values, kind in (
        ("step_ranks", steps.ranks, np.int8),
        ("step_scores", steps.scores, np.float16),
        ("step_log_probs", steps.log_probs, np.float16),
    ):
        assert values.numpy().tobytes() == b"".join(getattr(row, name) for row in rows)
        assert values.numpy().dtype == kind


@pytest.mark.parametrize("part_size", [1, 5, 100])
def test_steps_say_what_the_draft_proposed(rows: list[SweepRow], part_size: int, tmp_path: Path) -> None:
    shuffled = random.Random(part_size).sample(rows, len(rows))
    steps = steps_of(tmp_path, shuffled, part_size)
    assert steps.scores.shape == (11 * NUM_PLACES + 3, DEPTH, 8)
    check_steps(steps, ordered(rows))
    assert int(steps.drawn.sum()) == NUM_PLACES
    check_steps(read_steps(tmp_path, lambda row: row % 3 == 0), ordered(shuffled[::3]))
    assert len(read_steps(tmp_path, lambda row: False)) == 0


def test_rows_without_steps_are_skipped(rows: list[SweepRow], tmp_path: Path) -> None:
    """Rows whose answer is too short for a recorded step are in the index but have no steps."""
    with_short = [dataclasses.replace(row, **NO_STEPS) if i in (0, 5, 11) else row for i, row in enumerate(rows)]  # type: ignore[arg-type]
    check_steps(steps_of(tmp_path, with_short), ordered([row for row in with_short if row.step_places]))
    assert len(read_index(tmp_path).prompt_ids) == 12


# --- errors ---


def test_choices_must_be_recorded(rows: list[SweepRow], tmp_path: Path) -> None:
    plain = [dataclasses.replace(row, accepted=[], **NO_STEPS) for row in rows]  # type: ignore[arg-type]
    complaint = "none of 12 rows has recorded choices of a draft: sweep with --method dense, or train --kind prompt"
    for without in (plain, synthetic_rows(12, 0)):  # no recorded steps, or only their contexts
        with pytest.raises(ValueError, match=complaint):
            steps_of(tmp_path, without)
    check(written(tmp_path, plain), ordered(plain))


def test_drafts_of_different_depths_do_not_mix(rows: list[SweepRow], tmp_path: Path) -> None:
    other = with_choices(rows[2], 0, depth=DEPTH + 1)
    with pytest.raises(ValueError, match=f"rows of drafts with {DEPTH} and {DEPTH + 1} slots: must be of one draft"):
        steps_of(tmp_path, [*rows[:2], other])


def test_an_interrupted_write_is_not_opened(rows: list[SweepRow], tmp_path: Path) -> None:
    def parts() -> object:
        yield rows[:3]
        raise KeyboardInterrupt

    written(tmp_path, rows)
    with pytest.raises(KeyboardInterrupt):
        write_examples(tmp_path, parts(), CANDIDATES)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"index\.json"):
        open_examples(tmp_path)


# --- the split ---


def test_a_prompt_is_on_one_side_with_all_its_examples(rows: list[SweepRow], tmp_path: Path) -> None:
    """Twelve rows of four prompts, as with several seeds or temperatures; both kinds hold out the same prompts."""
    same = [dataclasses.replace(row, prompt=f"p{i % 4}") for i, row in enumerate(rows)]
    examples = written(tmp_path, same)
    train, validation = split_examples(tmp_path, 0.25, 0)
    assert sorted([*train.index.tolist(), *validation.index.tolist()]) == sorted(examples.index.tolist())
    index = read_index(tmp_path)
    held = {index.prompts[i] for i in validation.rows[validation.index].tolist()}
    assert len(held) == 1
    assert held == held_out_prompts(index.prompts, 0.25, 0)
    sides = [[row for row in ordered(same) if (prompt_key(row.prompt) in held) == side] for side in (False, True)]
    check(train, sides[0])
    check(validation, sides[1])
    write_steps(tmp_path, in_parts(same))
    for steps, side in zip(split_steps(tmp_path, 0.25, 0), sides, strict=True):
        check_steps(steps, side)


keys = st.lists(st.text("abc", max_size=3), min_size=2, max_size=30).filter(lambda keys: len(set(keys)) > 1)


@settings(deadline=None)
@given(keys, st.floats(0.001, 0.999), st.integers(0, 99), st.randoms())
def test_what_is_held_out_depends_on_prompts_and_seed(
    prompts: list[str], share: float, seed: int, draw: random.Random
) -> None:
    held = held_out_prompts(prompts, share, seed)
    shuffled = prompts + prompts[:1]
    draw.shuffle(shuffled)
    assert held_out_prompts(shuffled, share, seed) == held
    different = len(set(prompts))
    assert held < set(prompts)
    assert len(held) == min(max(1, round(share * different)), different - 1)


def test_another_seed_holds_out_others() -> None:
    prompts = [f"p{i}" for i in range(100)]
    first, second = (held_out_prompts(prompts, 0.2, seed) for seed in (0, 1))
    assert len(first) == len(second) == 20
    assert 0 < len(first & second) < 15  # 4 are expected of independent draws
    assert held_out_prompts([*prompts, "new"], 0.2, 0) - {"new"} <= first  # one more prompt, the same order
    with pytest.raises(ValueError, match="1 different prompts: at least 2"):
        held_out_prompts(["p", "p"], 0.5, 0)
