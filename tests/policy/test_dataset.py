"""Examples on disk: what the rows say, in an order that does not depend on theirs, read from where it lies."""

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
    Sizes,
    held_out_prompts,
    open_examples,
    prompt_key,
    read_index,
    split_examples,
    write_examples,
)
from blockpilot.policy.network import Kind, scalars
from blockpilot.sweep.rows import SweepRow, validate
from helpers.sweeps import ANCHOR_SIZE, CANDIDATES, CONTEXT_SIZE, NUM_PLACES, VOCAB_SIZE, metadata, synthetic_rows

KINDS: tuple[Kind, ...] = ("prompt", "step")


@pytest.fixture(scope="module")
def rows() -> list[SweepRow]:
    """Twelve rows; one has fewer token ids, one another temperature, one fewer recorded steps."""
    made = synthetic_rows(12, 0)
    made[4] = dataclasses.replace(made[4], probs_ids=made[4].probs_ids[:2], probs=[0.25, 0.5], tail_mass=0.25)
    made[7] = dataclasses.replace(made[7], temperature=0.7, num_prompt_tokens=90)
    made[9] = dataclasses.replace(
        made[9],
        step_places=made[9].step_places[:3],
        step_contexts=made[9].step_contexts[: 3 * CONTEXT_SIZE * 2],
        step_embeddings=made[9].step_embeddings[: 3 * ANCHOR_SIZE * 2],
    )
    for row in made:
        validate(row, metadata())
    return made


def written(
    folder: Path, rows: Sequence[SweepRow], kind: Kind, candidates: Sequence[int] = (2, 4, 6, 8), part_size: int = 5
) -> Examples:
    parts = [rows[i : i + part_size] for i in range(0, len(rows), part_size)]
    write_examples(folder, parts, candidates, kind)
    return open_examples(folder)


@dataclasses.dataclass
class Expected:
    """One example, out of its row."""

    row: SweepRow
    taus: list[float]
    context: list[float]
    anchor: list[float]
    ids: list[int]
    probs: list[float]

    @property
    def scalars(self) -> list[float]:
        return scalars(torch.tensor(self.row.probs), self.row.num_prompt_tokens, self.row.temperature)


def expected(rows: Sequence[SweepRow], kind: Kind, candidates: Sequence[int]) -> list[Expected]:
    """The slow way: row by row in the order of their ids, and step by step."""
    found = []
    for row in sorted(rows, key=lambda row: row.prompt_id):
        place_of = {size: c for c, size in enumerate(row.candidates)}
        if kind == "prompt":
            taus = [row.taus[place_of[size]] if size in place_of else 1.0 for size in candidates]
            found.append(Expected(row, taus, [], [], row.probs_ids, row.probs))
            continue
        contexts = np.frombuffer(row.step_contexts, np.float16).reshape(len(row.step_places), -1)
        anchors = np.frombuffer(row.step_embeddings, np.float16).reshape(len(row.step_places), -1)
        for i, p in enumerate(row.step_places):
            taus = [row.accepted[place_of[size]][p] + 1.0 if size in place_of else 1.0 for size in candidates]
            found.append(Expected(row, taus, contexts[i].tolist(), anchors[i].tolist(), [], []))
    return found


def check(examples: Examples, wanted: Sequence[Expected]) -> None:
    """Every value as expected; float32 on disk is exact for all that was float32 or float16."""
    assert len(examples) == len(wanted)
    features = examples.features
    starts = features.probs.offsets.tolist()
    ends = [*starts[1:], len(features.probs.ids)][: len(starts)]
    for i, (one, start, end) in enumerate(zip(wanted, starts, ends, strict=True)):
        assert features.probs.ids[start:end].tolist() == one.ids
        assert features.probs.probs[start:end].tolist() == one.probs
        assert features.context[i].tolist() == one.context
        assert features.anchor[i].tolist() == one.anchor
        assert features.scalars[i].tolist() == pytest.approx(one.scalars, rel=1e-6)
        assert examples.taus[i].tolist() == pytest.approx(one.taus, rel=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("candidates", [(2, 4, 6, 8), (4, 8), (1, 2, 4, 6, 8), (1, 6)])
def test_examples_say_what_the_rows_say(
    rows: list[SweepRow], kind: Kind, candidates: tuple[int, ...], tmp_path: Path
) -> None:
    """Plain decoding is a candidate whether the sweep has it or not: it emits one token a step."""
    examples = written(tmp_path, rows, kind, candidates)
    check(examples, expected(rows, kind, candidates))
    if candidates[0] == 1:
        assert examples.taus[:, 0].tolist() == [1.0] * len(examples)
    sizes = (CONTEXT_SIZE, ANCHOR_SIZE) if kind == "step" else (0, 0)
    assert examples.sizes == Sizes(*sizes, len(candidates), depth=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sweep_with_plain_decoding_gives_its_own(rows: list[SweepRow], kind: Kind, tmp_path: Path) -> None:
    with_one = [
        dataclasses.replace(
            row,
            candidates=[1, *row.candidates],
            taus=[1.0, *row.taus],
            accepted=[[0] * len(row.accepted[0]), *row.accepted],
        )
        for row in rows
    ]
    check(written(tmp_path, with_one, kind, (1, 4)), expected(rows, kind, (1, 4)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_rows_and_parts_does_not_matter(rows: list[SweepRow], kind: Kind, tmp_path: Path) -> None:
    shuffled = list(rows)
    random.Random(0).shuffle(shuffled)
    one = written(tmp_path / "one", rows, kind)
    other = written(tmp_path / "other", shuffled, kind, part_size=1)
    assert torch.equal(one.taus, other.taus)
    for a, b in zip(
        (*one.features.probs, *one.features[1:]), (*other.features.probs, *other.features[1:]), strict=True
    ):
        assert torch.equal(a, b)
    check(other, expected(rows, kind, CANDIDATES))


def test_the_index_names_every_row(rows: list[SweepRow], tmp_path: Path) -> None:
    parts = [rows[:7], [], rows[7:]]
    index = write_examples(tmp_path, parts, CANDIDATES, "step")
    assert index == read_index(tmp_path)
    assert index.prompt_ids == tuple(row.prompt_id for row in rows)
    assert index.prompts == tuple(prompt_key(row.prompt) for row in rows)
    assert index.sets == ("synthetic",) * 12
    assert index.num_examples == 11 * NUM_PLACES + 3
    write_examples(tmp_path, parts, CANDIDATES, "prompt")  # writes anew
    assert len(open_examples(tmp_path)) == 12


def test_who_reads_examples_keeps_them_while_they_are_written_anew(rows: list[SweepRow], tmp_path: Path) -> None:
    """As another training with the same output does; columns are mapped, and cutting those short is a bus error."""
    before = written(tmp_path, rows, "step")
    written(tmp_path, rows[:2], "step", (2, 4))
    check(before, expected(rows, "step", CANDIDATES))


def test_rows_without_steps_are_passed_over(rows: list[SweepRow], tmp_path: Path) -> None:
    """An answer may be too short for a recorded step; its row is known all the same."""
    nothing = {"step_places": [], "step_contexts": b"", "step_embeddings": b""}
    some = [dataclasses.replace(row, **nothing) if i in (0, 5, 11) else row for i, row in enumerate(rows)]
    examples = written(tmp_path, some, "step")
    check(examples, expected([row for row in some if row.step_places], "step", CANDIDATES))
    index = read_index(tmp_path)
    assert len(index.prompt_ids) == 12
    assert {index.prompt_ids[i] for i in examples.rows.tolist()} == {row.prompt_id for row in some if row.step_places}


@pytest.mark.parametrize("kind", KINDS)
def test_take_is_those_examples_in_that_order(rows: list[SweepRow], kind: Kind, tmp_path: Path) -> None:
    examples, wanted = written(tmp_path, rows, kind), expected(rows, kind, CANDIDATES)
    for chosen in ([0], [4], [8, 0, 4], [3, 3], [], list(range(len(wanted)))):
        taken = examples.take(torch.tensor(chosen, dtype=torch.int64))
        check(taken, [wanted[i] for i in chosen])
        if len(chosen) > 1:
            check(taken.take(torch.tensor([1])), [wanted[chosen[1]]])
        assert taken.context.data_ptr() == examples.context.data_ptr()  # nothing is copied


@pytest.mark.parametrize("kind", KINDS)
def test_where_keeps_all_examples_of_the_rows(rows: list[SweepRow], kind: Kind, tmp_path: Path) -> None:
    examples = written(tmp_path, rows, kind)
    even = [row for i, row in enumerate(rows) if i % 2 == 0]
    check(examples.where(lambda row: row % 2 == 0), expected(even, kind, CANDIDATES))
    assert len(examples.where(lambda _: False)) == 0
    assert len(examples.where(lambda _: False).where(lambda _: True)) == 0


def test_support_is_the_token_ids_with_the_most_mass(rows: list[SweepRow], tmp_path: Path) -> None:
    examples, wanted = written(tmp_path, rows, "prompt"), expected(rows, "prompt", CANDIDATES)
    for chosen in (list(range(12)), [3, 1], []):
        mass: Counter[int] = Counter()
        for place in chosen:
            mass.update(dict(zip(wanted[place].ids, wanted[place].probs, strict=True)))
        some = examples.take(torch.tensor(chosen, dtype=torch.int64))
        for most in (1, 5, VOCAB_SIZE):
            largest = sorted(mass, key=lambda i: -mass[i])[:most]
            assert some.support(VOCAB_SIZE, most).tolist() == sorted(largest)
    assert written(tmp_path, rows, "step").support(VOCAB_SIZE, 5).tolist() == []


@pytest.mark.parametrize("candidates", [(2, 4, 6, 8), (1, 6)])
def test_where_a_step_leads(rows: list[SweepRow], candidates: tuple[int, ...], tmp_path: Path) -> None:
    """As many places on as the step emits, if that one of the same answer is recorded."""
    examples = written(tmp_path, rows, "step", candidates)
    ordered = sorted((row for row in rows if row.step_places), key=lambda row: row.prompt_id)
    places = [(r, p) for r, row in enumerate(ordered) for p in row.step_places]
    assert examples.prompt_of.tolist() == [r for r, _ in places]
    chosen = torch.arange(len(places)) % len(candidates)
    for (r, p), c, tau, found in zip(places, chosen, examples.taus, examples.following(chosen), strict=True):
        following = (r, p + int(tau[c]))
        assert int(found) == (places.index(following) if following in places else len(places))


def test_nothing_follows_a_prompt(rows: list[SweepRow], tmp_path: Path) -> None:
    examples = written(tmp_path, rows, "prompt")
    assert examples.prompt_of.tolist() == list(range(len(rows)))
    assert set(examples.following(torch.zeros(len(rows), dtype=torch.int64)).tolist()) == {len(rows)}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_columns_are_mapped_and_not_read(rows: list[SweepRow], tmp_path: Path) -> None:
    """Tensors are the files' pages, private to the process: who changes one changes no file."""
    examples = written(tmp_path, rows, "step")
    mapped = Path("/proc/self/maps").read_text()
    assert all(str(tmp_path / name) in mapped for name in ("context", "anchor", "taus", "scalars", "rows"))
    before = (tmp_path / "context").read_bytes()
    examples.context.zero_()
    assert (tmp_path / "context").read_bytes() == before


# --- errors ---


def test_steps_must_be_recorded(rows: list[SweepRow], tmp_path: Path) -> None:
    nothing = {"step_places": [], "step_contexts": b"", "step_embeddings": b""}
    plain = [dataclasses.replace(row, accepted=[], **nothing) for row in rows]
    with pytest.raises(ValueError, match="none of 12 rows has a recorded step: sweep with --method dense"):
        written(tmp_path, plain, "step")
    check(written(tmp_path, plain, "prompt"), expected(plain, "prompt", CANDIDATES))


def test_rows_of_different_sizes_do_not_mix(rows: list[SweepRow], tmp_path: Path) -> None:
    contexts = np.zeros((NUM_PLACES, CONTEXT_SIZE + 1), np.float16).tobytes()
    other = dataclasses.replace(rows[2], context=[0.0] * (CONTEXT_SIZE + 1), step_contexts=contexts)
    with pytest.raises(ValueError, match=r"rows of different sizes: .*context=8.* and .*context=9"):
        written(tmp_path, [*rows[:2], other], "step")


def test_an_interrupted_write_is_not_opened(rows: list[SweepRow], tmp_path: Path) -> None:
    def parts() -> object:
        yield rows[:3]
        raise KeyboardInterrupt

    written(tmp_path, rows, "prompt")
    with pytest.raises(KeyboardInterrupt):
        write_examples(tmp_path, parts(), CANDIDATES, "prompt")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"index\.json"):
        open_examples(tmp_path)


# --- the split ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_on_one_side_with_all_its_examples(rows: list[SweepRow], kind: Kind, tmp_path: Path) -> None:
    """Twelve rows of four prompts, as of several seeds or temperatures."""
    same = [dataclasses.replace(row, prompt=f"p{i % 4}") for i, row in enumerate(rows)]
    examples = written(tmp_path, same, kind)
    train, validation = split_examples(tmp_path, 0.25, 0)
    assert sorted([*train.index.tolist(), *validation.index.tolist()]) == sorted(examples.index.tolist())
    index = read_index(tmp_path)
    held = {index.prompts[i] for i in validation.rows[validation.index].tolist()}
    assert len(held) == 1
    assert held == held_out_prompts(index.prompts, 0.25, 0)
    check(validation, expected([row for row in same if prompt_key(row.prompt) in held], kind, CANDIDATES))
    check(train, expected([row for row in same if prompt_key(row.prompt) not in held], kind, CANDIDATES))


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
    one, other = (held_out_prompts(prompts, 0.2, seed) for seed in (0, 1))
    assert len(one) == len(other) == 20
    assert 0 < len(one & other) < 15  # 4 are expected of independent draws
    assert held_out_prompts([*prompts, "new"], 0.2, 0) - {"new"} <= one  # the more prompts, the same order


@pytest.mark.parametrize("prompts", [[], ["p"], ["p", "p"]])
def test_a_split_needs_two_prompts(prompts: list[str]) -> None:
    with pytest.raises(ValueError, match=f"{len(set(prompts))} different prompts: at least 2"):
        held_out_prompts(prompts, 0.5, 0)
