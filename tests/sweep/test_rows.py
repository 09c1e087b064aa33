"""Rows of a sweep: round trips, what validation refuses, files that are there whole or not at all."""

import dataclasses
import math
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.prompts.files import Message, Prompt
from blockpilot.storage import Place
from blockpilot.sweep.rows import (
    METADATA_KEY,
    SCHEMA,
    Metadata,
    Sweep,
    SweepRow,
    difference,
    mismatch,
    prompt_ids,
    read_parts,
    validate,
    vectors,
    write_rows,
)
from blockpilot.types import PairId
from helpers.sweeps import read_sweep

METADATA = Metadata(
    config={"temperature": 0.5, "prompts": ["demo"], "pair": {"name": "smollm2-135m"}},
    pair=PairId("target", "t1", "draft", "d1"),
    dtype="float32",
    vocab_size=100,
    block_size=3,
    candidates=[1, 3],
    versions={"torch": "2"},
    git_commit="abc",
)


def make_row(prompt_id: str = "a", **changes: object) -> SweepRow:
    """A valid row: six tokens after the prefill's, one by one and in steps of 3, 2 and 1."""
    row = SweepRow(
        prompt_id=prompt_id,
        prompt_set="demo",
        prompt="Grüße, 世界\n\x00",
        num_prompt_tokens=5,
        output_tokens=[7, 8, 9, 1, 2, 3, 99],
        finish_reason="length",
        candidates=[1, 3],
        taus=[1.0, 2.0],
        num_steps=[6, 3],
        emitted_histograms=[[0, 6], [0, 1, 1, 1]],
        accepted=[],
        texts_agree=True,
        probs_ids=[0, 4, 99],
        probs=[0.5, 0.25, 0.125],
        tail_mass=0.125,
        context=[-1.5, 0.25],
        step_places=[],
        step_contexts=b"",
        step_embeddings=b"",
        seed=-(2**63),
        temperature=0.5,
    )
    return dataclasses.replace(row, **changes)  # type: ignore[arg-type]


def halves(*values: float) -> bytes:
    return np.array(values, "<f2").tobytes()


STEPS: dict[str, Any] = {
    "accepted": [[0] * 6, [2, 0, 1, 2, 0, 0]],
    "step_places": [1, 2, 3],
    "step_contexts": halves(1, 2, 3, 4, 5, 6.5),  # two numbers each, as many as `context` has
    "step_embeddings": halves(*range(12)),
}
OFFERS = {"step_ranks": bytes(6), "step_scores": bytes(96), "step_log_probs": bytes(96)}  # two slots at each of STEPS


def test_rows_and_metadata_survive_the_file(tmp_path: Path) -> None:
    rows = [
        make_row("b"),
        make_row("a", context=[], finish_reason="stop", seed=2**63 - 1, accepted=[[0] * 6, [2] * 6]),
        make_row("c", **STEPS),
    ]
    write_rows(tmp_path / "new" / "part.parquet", rows, METADATA)
    sweep = read_sweep(tmp_path / "new" / "part.parquet")
    assert sweep.rows == rows
    assert sweep.metadata == METADATA
    table = pq.ParquetFile(tmp_path / "new" / "part.parquet")
    assert table.schema_arrow.equals(SCHEMA)
    assert table.metadata.row_group(0).column(0).compression == "ZSTD"
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["part.parquet"]


float32s = st.floats(0, 1, width=32)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=20),
    st.lists(float32s, max_size=8),
    st.integers(0, 2**32),
)
def test_any_measured_row_survives(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], weights: list[float], seed: int
) -> None:
    total = math.fsum(weights) + 1
    probs = [float(np.float32(weight / total)) for weight in weights]
    row = make_row(
        candidates=[5],
        taus=[sum(steps) / len(steps)],
        num_steps=[len(steps)],
        emitted_histograms=[[steps.count(n) for n in range(6)]],
        probs_ids=list(range(len(probs))),
        probs=probs,
        tail_mass=float(np.float32(1 / total)),
        seed=seed,
    )
    path = tmp_path_factory.mktemp("rows") / "part.parquet"
    write_rows(path, [row], dataclasses.replace(METADATA, candidates=[5]))
    assert read_sweep(path).rows == [row]


@settings(deadline=None)
@given(st.data())
def test_any_recorded_steps_survive(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, 5))
    places = list(range(first, data.draw(st.integers(first, 5)) + 1))
    halves_of = st.floats(-60000, 60000, width=16)
    contexts = data.draw(st.lists(halves_of, min_size=2 * len(places), max_size=2 * len(places)))
    embeddings = data.draw(st.lists(halves_of, min_size=3 * len(places), max_size=3 * len(places)))
    steps = {"step_places": places, "step_contexts": halves(*contexts), "step_embeddings": halves(*embeddings)}
    row = make_row(**STEPS | steps)
    path = tmp_path_factory.mktemp("rows") / "part.parquet"
    write_rows(path, [row, make_row("b")], METADATA)
    read, without = read_sweep(path).rows
    assert (read, without.step_places) == (row, [])
    assert vectors(read.step_contexts, len(places)).tolist() == np.reshape(contexts, (-1, 2)).tolist()
    assert vectors(read.step_embeddings, len(places)).tolist() == np.reshape(embeddings, (-1, 3)).tolist()


BAD_ROWS: dict[str, dict[str, Any]] = {
    "tau of block size 3 is nan": {"taus": [1.0, math.nan]},
    "tau of block size 1 is inf": {"taus": [math.inf, 2.0]},
    r"tau of block size 3 is 2.5, its histogram says 6/3": {"taus": [1.0, 2.5]},
    "counts 3 steps, num_steps is 4": {"num_steps": [6, 4]},
    "counts 0 steps, num_steps is 0": {"num_steps": [0, 3], "emitted_histograms": [[0, 0], [0, 1, 1, 1]]},
    r"histograms of block size 1 is \[0, 6, 0\], not 2 counts": {"emitted_histograms": [[0, 6, 0], [0, 1, 1, 1]]},
    r"candidates \[\] are not": {"candidates": [], "taus": [], "num_steps": [], "emitted_histograms": []},
    r"candidates \[3, 1\] are not": {"candidates": [3, 1]},
    r"candidates \[1, 4\] are not the file's \[1, 3\]": {"candidates": [1, 4]},
    "taus has 1 entries for 2 candidates": {"taus": [1.0]},
    "num_steps has 3 entries for 2 candidates": {"num_steps": [6, 3, 1]},
    "emitted_histograms has 1 entries for 2 candidates": {"emitted_histograms": [[0, 6]]},
    "accepted does not have an entry for every": {"accepted": [[0] * 6, [0] * 5]},
    "accepted of block size 3 has entries outside 0 to 2": {"accepted": [[0] * 6, [2, 1, 0, 3, 0, 0]]},
    "probs has 2 entries for 3 probs_ids": {"probs": [0.5, 0.375]},
    "sum to 0.99": {"probs": [0.5, 0.25, 0.115]},
    "tail_mass below 0": {"tail_mass": -0.125, "probs": [0.75, 0.25, 0.125]},
    "sum to nan": {"tail_mass": math.nan},
    "below 0": {"probs": [1.0, -0.25, 0.125]},
    "not ascending token ids below 100": {"probs_ids": [0, 4, 100]},
    "ascending token ids": {"probs_ids": [4, 0, 99]},
    "context has entries": {"context": [math.inf]},
    "finish_reason 'error'": {"finish_reason": "error"},
    "output_tokens is empty": {"output_tokens": []},
    r"step_places \[4, 5, 6\] ... are not places of accepted": STEPS | {"step_places": [4, 5, 6]},
    r"step_places \[-1, 0, 1\] ... are not places": STEPS | {"step_places": [-1, 0, 1]},
    r"step_places \[1, 2, 3\] ... are not places": STEPS | {"accepted": []},
    r"step_places \[\] ... are not places": STEPS | {"step_places": []},
    r"step_places \[\] \.\.\. are not places": {"step_embeddings": halves(1.0)},
    r"step_places \[2, 0, 1\] ... are not consecutive": STEPS | {"step_places": [2, 0, 1]},
    r"step_places \[0, 2, 3\] ... are not consecutive": STEPS | {"step_places": [0, 2, 3]},
    r"step_places \[1, 2, 2\] ... are not consecutive": STEPS | {"step_places": [1, 2, 2]},
    r"step_embeddings have \(12, 24\) bytes for 2 places": STEPS | {"step_places": [1, 2]},
    r"step_embeddings have \(10, 24\) bytes": STEPS | {"step_contexts": halves(1, 2, 3, 4, 5)},
    r"step_embeddings have \(11, 24\) bytes": STEPS | {"step_contexts": halves(1, 2, 3, 4, 5, 6)[:-1]},
    r"step_embeddings have \(12, 0\) bytes": STEPS | {"step_embeddings": b""},
    r"step_embeddings have \(12, 22\) bytes": STEPS | {"step_embeddings": halves(*range(11))},
    r"step_embeddings have \(12, 9\) bytes": STEPS | {"step_embeddings": halves(*range(12))[:9]},
    "step_nodes has 3 bytes for 6 ranks": STEPS | OFFERS | {"step_nodes": bytes([1, 2, 3])},
    "step_nodes has 6 bytes for 6 ranks, none of them 0": STEPS | OFFERS | {"step_nodes": bytes(6)},
    "step_contexts or step_embeddings have entries": STEPS | {"step_contexts": halves(1, 2, 3, 4, 5, math.nan)},
    "step_embeddings have entries that are not finite": STEPS | {"step_embeddings": halves(*range(11), math.inf)},
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_impossible_rows_are_refused(tmp_path: Path, message: str) -> None:
    row = make_row(**BAD_ROWS[message])
    candidates = METADATA.candidates if "the file's" in message else row.candidates
    metadata = dataclasses.replace(METADATA, candidates=candidates)
    with pytest.raises(ValueError, match=f"^row 'a': .*{message}"):
        validate(row, metadata)
    with pytest.raises(ValueError, match=f"part.parquet: row 'a': .*{message}"):
        write_rows(tmp_path / "part.parquet", [row], metadata)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("message", ["tau of block size 3 is nan", "probs has 2 entries", "taus has 1 entries"])
def test_impossible_rows_are_refused_when_read(tmp_path: Path, message: str) -> None:
    changes = next(changes for key, changes in BAD_ROWS.items() if key.startswith(message))
    rows = [make_row("b"), make_row(**changes)]
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    schema = SCHEMA.with_metadata({METADATA_KEY: METADATA.to_json()})
    pq.write_table(pa.table(columns, schema=schema), tmp_path / "foreign.parquet")
    with pytest.raises(ValueError, match=f"foreign.parquet: row 'a': {message}"):
        read_sweep(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_files_are_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "part.parquet"
    write_rows(path, [make_row(str(i)) for i in range(50)], METADATA)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=r"part\.parquet: not a readable Parquet file"):
        read_sweep(path)


def test_no_flipped_byte_is_read_as_other_values(tmp_path: Path) -> None:
    """Every third byte of a part file, one at a time: refused, or nothing that is read depends on it."""
    path = tmp_path / "part.parquet"
    rows = [make_row("a", **STEPS, **OFFERS), make_row("b")]
    write_rows(path, rows, METADATA)
    whole, wanted, num_refused = path.read_bytes(), read_sweep(path), 0
    for place in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            assert read_sweep(path) == wanted, place
        except ValueError:
            num_refused += 1
    assert num_refused > len(whole) / 6


def test_a_file_without_a_checksum_is_read(tmp_path: Path) -> None:
    """As sweeps before it wrote them."""
    path = tmp_path / "part.parquet"
    write_rows(path, [make_row()], METADATA)
    table = pq.read_table(path)
    about = {METADATA_KEY: table.schema.metadata[METADATA_KEY]}
    pq.write_table(table.replace_schema_metadata(about), path)
    assert read_sweep(path).rows == [make_row()]


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    columns = {name: [getattr(make_row(), name)] for name in SCHEMA.names}
    for table, message in [
        (pa.table({"x": [1]}), r"not the schema of a sweep \(x: 'int64' and None\)"),
        (pa.table(columns | {"seed": ["0"]}), "not the schema of a sweep"),
        (pa.table(columns, schema=SCHEMA), "no 'blockpilot' metadata"),
        (pa.table(columns, schema=SCHEMA.with_metadata({METADATA_KEY: "{]"})), "Expecting"),
        (pa.table(columns, schema=SCHEMA.with_metadata({METADATA_KEY: "[]"})), "metadata is not an object"),
        (pa.table(columns, schema=SCHEMA.with_metadata({METADATA_KEY: '{"config": {}}'})), "candidates"),
    ]:
        pq.write_table(table, path)
        for read in (read_sweep, every_part):
            with pytest.raises(ValueError, match=f"part.parquet: .*{message}"):
                read(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    write_rows(path, [make_row("old")], METADATA)
    many = [make_row(str(i), prompt=os.urandom(40).hex()) for i in range(2000)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # like a full disk, but for this process only
    try:
        with pytest.raises(OSError, match="too large"):
            write_rows(path, many, METADATA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [row.prompt_id for row in read_sweep(path).rows] == ["old"]
    assert list(tmp_path.iterdir()) == [path]


def test_part_files_are_read_in_order_of_name(tmp_path: Path) -> None:
    for name, ids in [("rows/part-2", "e"), ("rows/part-0", "ab"), ("rows/part-1", "dc")]:
        write_rows(tmp_path / f"{name}.parquet", [make_row(i) for i in ids], METADATA)
    (tmp_path / "config.json").write_text("{}")
    assert "".join(row.prompt_id for row in read_sweep(tmp_path).rows) == "abdce"
    assert "".join(row.prompt_id for row in read_sweep(tmp_path / "rows/part-2.parquet").rows) == "e"


def test_parts_are_read_one_by_one(tmp_path: Path) -> None:
    """As `read_sweep` reads them together; a damaged one is found when its turn comes."""
    for name, ids in [("part-2", "e"), ("part-0", "ab"), ("part-1", "dc")]:
        write_rows(tmp_path / f"{name}.parquet", [make_row(i) for i in ids], METADATA)
    parts = list(read_parts(tmp_path))
    assert ["".join(row.prompt_id for row in part.rows) for part in parts] == ["ab", "dc", "e"]
    assert all(part.metadata == METADATA for part in parts)
    assert [row for part in parts for row in part.rows] == read_sweep(tmp_path).rows
    (tmp_path / "part-1.parquet").write_bytes(b"")
    found = read_parts(tmp_path)
    assert [row.prompt_id for row in next(found).rows] == ["a", "b"]
    with pytest.raises(ValueError, match=r"part-1\.parquet: not a readable Parquet file"):
        next(found)


def every_part(place: Place) -> list[Sweep]:
    return list(read_parts(place))


READERS = pytest.mark.parametrize("read", [read_sweep, every_part])
Read = Callable[[Place], object]


@READERS
def test_nothing_to_read_is_an_error(tmp_path: Path, read: Read) -> None:
    with pytest.raises(ValueError, match="no Parquet files in"):
        read(tmp_path)
    with pytest.raises(ValueError, match=r"gone\.parquet: no such file"):
        read(tmp_path / "gone.parquet")


OTHERS = {
    "pair.draft_revision: 'd1' and 'd2'": {"pair": PairId("target", "t1", "draft", "d2")},
    "config.pair.name: 'smollm2-135m' and 'x'": {"config": METADATA.config | {"pair": {"name": "x"}}},
    "config.top_p: None and 0.9": {"config": METADATA.config | {"top_p": 0.9}},
    "config.prompts: ['demo'] and None": {"config": {"temperature": 0.5, "pair": {"name": "smollm2-135m"}}},
    "dtype: 'float32' and 'bfloat16'": {"dtype": "bfloat16"},
    "vocab_size: 100 and 101": {"vocab_size": 101},
}


@READERS
@pytest.mark.parametrize("difference", OTHERS)
def test_different_sweeps_do_not_mix(tmp_path: Path, difference: str, read: Read) -> None:
    other = dataclasses.replace(METADATA, **OTHERS[difference])
    write_rows(tmp_path / "a.parquet", [make_row("a")], METADATA)
    write_rows(tmp_path / "b.parquet", [make_row("b")], other)
    with pytest.raises(ValueError, match=r"a\.parquet and .*b\.parquet are of different sweeps") as caught:
        read(tmp_path)
    assert difference in str(caught.value)
    assert mismatch(METADATA, other) == difference


@READERS
def test_candidate_sets_do_not_mix(tmp_path: Path, read: Read) -> None:
    other = make_row("b", candidates=[1], taus=[1.0], num_steps=[6], emitted_histograms=[[0, 6]])
    write_rows(tmp_path / "a.parquet", [make_row("a")], METADATA)
    write_rows(tmp_path / "b.parquet", [other], dataclasses.replace(METADATA, candidates=[1]))
    with pytest.raises(ValueError, match=r"candidates: \[1, 3\] and \[1\]"):
        read(tmp_path)


def test_a_sweep_may_be_continued_by_newer_code(tmp_path: Path) -> None:
    newer = dataclasses.replace(METADATA, versions={"torch": "3"}, git_commit="def")
    write_rows(tmp_path / "a.parquet", [make_row("a")], METADATA)
    write_rows(tmp_path / "b.parquet", [make_row("b")], newer)
    assert len(read_sweep(tmp_path).rows) == 2


@READERS
def test_a_prompt_comes_once(tmp_path: Path, read: Read) -> None:
    write_rows(tmp_path / "a.parquet", [make_row("a"), make_row("b")], METADATA)
    write_rows(tmp_path / "b.parquet", [make_row("b")], METADATA)
    with pytest.raises(ValueError, match=r"b\.parquet: prompt b is already in .*a\.parquet"):
        read(tmp_path)


def first_id(prompt: Prompt, seed: int, temperature: float) -> str:
    return prompt_ids(prompt, seed, temperature)[0]


def test_prompt_ids_depend_on_all_that_they_stand_for() -> None:
    hello = Prompt("demo", (Message("user", "hello"),))
    ids = [
        first_id(hello, 0, 0.0),
        first_id(hello, 1, 0.0),
        first_id(hello, 0, 1.0),
        first_id(Prompt("other", hello.messages), 0, 0.0),
        first_id(Prompt("demo", (Message("user", "Hello"),)), 0, 0.0),
        first_id(Prompt("demo", (Message("system", "hello"),)), 0, 0.0),
        first_id(Prompt("demo", (Message("user", "hel"), Message("user", "lo"))), 0, 0.0),
    ]
    assert len(set(ids)) == len(ids)
    assert all(len(key) == 32 and int(key, 16) >= 0 for key in ids)
    assert first_id(hello, 0, 0) == ids[0]
    more = prompt_ids(Prompt("demo", hello.messages, ("and?", "so?")), 0, 0.0)
    assert len({*ids, *more}) == len(ids) + 2
    assert more[:2] == prompt_ids(Prompt("demo", hello.messages, ("and?",)), 0, 0.0)
    assert more[0] == ids[0]
    # Written in sweeps that are kept: it must never change.
    assert ids[0] == "8a66e03db10caa1e5b1a976236c1f7cc"


def test_difference_is_empty_for_equals() -> None:
    assert difference({"a": {"b": [1]}}, {"a": {"b": [1]}}) == ""
