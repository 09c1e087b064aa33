"""Rows of a sweep: round trips, rows and files that are refused, atomic writes."""

import dataclasses
import math
import os
import resource
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.prompts.files import Message, Prompt
from blockpilot.sweep.rows import (
    METADATA_KEY,
    SCHEMA,
    Metadata,
    SweepRow,
    mismatch,
    prompt_ids,
    read_parts,
    validate,
    vectors,
    write_rows,
)
from blockpilot.types import PairId
from helpers.sweeps import read_sweep

CONFIG = {"temperature": 0.5, "prompts": ["demo"], "pair": {"name": "smollm2-135m"}}
PAIR = PairId("target", "t1", "draft", "d1")
METADATA = Metadata(CONFIG, PAIR, "float32", 100, 3, [1, 3], {"torch": "2"}, "abc")


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
        make_row("c", **STEPS, **OFFERS),
    ]
    write_rows(tmp_path / "new" / "part.parquet", rows, METADATA)
    sweep = read_sweep(tmp_path / "new" / "part.parquet")
    assert (sweep.rows, sweep.metadata) == (rows, METADATA)
    table = pq.ParquetFile(tmp_path / "new" / "part.parquet")
    assert table.schema_arrow.equals(SCHEMA)
    assert table.metadata.row_group(0).column(0).compression == "ZSTD"
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["part.parquet"]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=20),
    st.lists(st.floats(0, 1, width=32), max_size=8),
    st.lists(st.tuples(*[st.floats(-60000, 60000, width=16)] * 5), min_size=1, max_size=6),
)
def test_any_row_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[int],
    weights: list[float],
    known: list[tuple[float, ...]],
) -> None:
    total = math.fsum(weights) + 1
    contexts, embeddings = [numbers[:2] for numbers in known], [numbers[2:] for numbers in known]
    row = make_row(
        candidates=[5],
        taus=[sum(steps) / len(steps)],
        num_steps=[len(steps)],
        emitted_histograms=[[steps.count(n) for n in range(6)]],
        accepted=[[0] * 6],
        probs_ids=list(range(len(weights))),
        probs=[float(np.float32(weight / total)) for weight in weights],
        tail_mass=float(np.float32(1 / total)),
        step_places=list(range(6 - len(known), 6)),
        step_contexts=halves(*chain(*contexts)),
        step_embeddings=halves(*chain(*embeddings)),
    )
    path = tmp_path_factory.mktemp("rows") / "part.parquet"
    write_rows(path, [row], dataclasses.replace(METADATA, candidates=[5]))
    (read,) = read_sweep(path).rows
    assert read == row
    assert vectors(read.step_contexts, len(known)).tolist() == list(map(list, contexts))
    assert vectors(read.step_embeddings, len(known)).tolist() == list(map(list, embeddings))


BAD_ROWS: dict[str, dict[str, Any]] = {
    "tau of block size 3 is nan": {"taus": [1.0, math.nan]},
    "tau of block size 3 is 2.5, its histogram says 6/3": {"taus": [1.0, 2.5]},
    "counts 0 steps, num_steps is 0": {"num_steps": [0, 3], "emitted_histograms": [[0, 0], [0, 1, 1, 1]]},
    r"histograms of block size 1 is \[0, 6, 0\], not 2 counts": {"emitted_histograms": [[0, 6, 0], [0, 1, 1, 1]]},
    r"candidates \[\] are not ascending": {"candidates": []},
    r"candidates \[3, 1\] are not ascending": {"candidates": [3, 1]},
    r"candidates \[1, 4\] are not the file's \[1, 3\]": {"candidates": [1, 4]},
    "taus has 1 entries for 2 candidates": {"taus": [1.0]},
    "accepted does not have an entry for every": {"accepted": [[0] * 6, [0] * 5]},
    "accepted of block size 3 has entries outside 0 to 2": {"accepted": [[0] * 6, [2, 1, 0, 3, 0, 0]]},
    "probs has 2 entries for 3 probs_ids": {"probs": [0.5, 0.375]},
    "sum to 0.99": {"probs": [0.5, 0.25, 0.115]},
    "tail_mass below 0": {"tail_mass": -0.125, "probs": [0.75, 0.25, 0.125]},
    "not ascending token ids below 100": {"probs_ids": [0, 4, 100]},
    "context has entries": {"context": [math.inf]},
    "finish_reason 'error'": {"finish_reason": "error"},
    "output_tokens is empty": {"output_tokens": []},
    r"step_places \[4, 5, 6\] ... are not places of accepted": STEPS | {"step_places": [4, 5, 6]},
    r"step_places \[1, 2, 3\] ... are not places": STEPS | {"accepted": []},
    r"step_places \[\] ... are not places": {"step_embeddings": halves(1.0)},
    r"step_places \[2, 0, 1\] ... are not consecutive": STEPS | {"step_places": [2, 0, 1]},
    r"step_embeddings have \(12, 24\) bytes for 2 places": STEPS | {"step_places": [1, 2]},
    r"step_embeddings have \(11, 24\) bytes": STEPS | {"step_contexts": halves(1, 2, 3, 4, 5, 6)[:-1]},
    r"step_embeddings have \(12, 0\) bytes": STEPS | {"step_embeddings": b""},
    r"step_log_probs have \(4, 96, 96\) bytes": STEPS | OFFERS | {"step_ranks": bytes(4)},
    r"step_log_probs have \(6, 96, 94\) bytes": STEPS | OFFERS | {"step_log_probs": bytes(94)},
    "step_nodes has 3 bytes for 6 ranks": STEPS | OFFERS | {"step_nodes": bytes([1, 2, 3])},
    "step_nodes has 6 bytes for 6 ranks, none of them 0": STEPS | OFFERS | {"step_nodes": bytes(6)},
    "step_matches has 3 bytes for 3 places": STEPS | OFFERS | {"step_matches": bytes(3)},
    "step_contexts or step_embeddings have entries": STEPS | {"step_contexts": halves(1, 2, 3, 4, 5, math.nan)},
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_impossible_rows_are_refused(message: str) -> None:
    row = make_row(**BAD_ROWS[message])
    candidates = METADATA.candidates if "the file's" in message else row.candidates
    metadata = dataclasses.replace(METADATA, candidates=candidates)
    with pytest.raises(ValueError, match=f"^row 'a': .*{message}"):
        validate(row, metadata)


def test_impossible_rows_are_neither_written_nor_read(tmp_path: Path) -> None:
    rows = [make_row("b"), make_row(taus=[1.0, math.nan])]
    message = "row 'a': tau of block size 3 is nan"
    with pytest.raises(ValueError, match=f"part.parquet: {message}"):
        write_rows(tmp_path / "part.parquet", rows, METADATA)
    assert not list(tmp_path.iterdir())
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    schema = SCHEMA.with_metadata({METADATA_KEY: METADATA.to_json()})
    pq.write_table(pa.table(columns, schema=schema), tmp_path / "foreign.parquet")
    with pytest.raises(ValueError, match=f"foreign.parquet: {message}"):
        read_sweep(tmp_path)


def test_no_flipped_byte_is_read_as_other_values(tmp_path: Path) -> None:
    """Part files cut short are refused; those with a flipped bit (every seventh byte) are refused or read right."""
    path = tmp_path / "part.parquet"
    write_rows(path, [make_row("a", **STEPS, **OFFERS), make_row("b")], METADATA)
    content, sweep, num_refused = path.read_bytes(), read_sweep(path), 0
    for share in (0.0, 0.5, 0.99):
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(ValueError, match=r"part\.parquet: not a readable Parquet file"):
            read_sweep(path)
    for position in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            assert read_sweep(path) == sweep, position
        except ValueError:
            num_refused += 1
    assert num_refused > len(content) / 14


def test_a_file_without_a_checksum_is_read(tmp_path: Path) -> None:
    """Files of older sweeps have no checksum."""
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
        with pytest.raises(ValueError, match=f"part.parquet: .*{message}"):
            read_sweep(path)


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


def test_parts_are_read_one_by_one_in_order_of_name(tmp_path: Path) -> None:
    """A damaged part raises an error only when it is reached."""
    for name, ids in [("part-2", "e"), ("part-0", "ab"), ("part-1", "dc")]:
        write_rows(tmp_path / f"{name}.parquet", [make_row(i) for i in ids], METADATA)
    (tmp_path / "config.json").write_text("{}")
    parts = list(read_parts(tmp_path))
    assert ["".join(row.prompt_id for row in part.rows) for part in parts] == ["ab", "dc", "e"]
    assert all(part.metadata == METADATA for part in parts)
    assert [row.prompt_id for row in read_sweep(tmp_path / "part-2.parquet").rows] == ["e"]
    (tmp_path / "part-1.parquet").write_bytes(b"")
    reading = read_parts(tmp_path)
    assert [row.prompt_id for row in next(reading).rows] == ["a", "b"]
    with pytest.raises(ValueError, match=r"part-1\.parquet: not a readable Parquet file"):
        next(reading)


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Parquet files in"):
        read_sweep(tmp_path)
    with pytest.raises(ValueError, match=r"gone\.parquet: no such file"):
        read_sweep(tmp_path / "gone.parquet")


ONE_CANDIDATE = {"candidates": [1], "taus": [1.0], "num_steps": [6], "emitted_histograms": [[0, 6]]}
OTHERS: dict[str, dict[str, Any]] = {
    "pair.draft_revision: 'd1' and 'd2'": {"pair": PairId("target", "t1", "draft", "d2")},
    "config.pair.name: 'smollm2-135m' and 'x'": {"config": METADATA.config | {"pair": {"name": "x"}}},
    "config.top_p: None and 0.9": {"config": METADATA.config | {"top_p": 0.9}},
    "config.prompts: ['demo'] and None": {"config": {"temperature": 0.5, "pair": {"name": "smollm2-135m"}}},
    "dtype: 'float32' and 'bfloat16'": {"dtype": "bfloat16"},
    "vocab_size: 100 and 101": {"vocab_size": 101},
    "candidates: [1, 3] and [1]": {"candidates": [1]},
}


@pytest.mark.parametrize("difference", OTHERS)
def test_different_sweeps_do_not_mix(tmp_path: Path, difference: str) -> None:
    other = dataclasses.replace(METADATA, **OTHERS[difference])
    write_rows(tmp_path / "a.parquet", [make_row("a")], METADATA)
    write_rows(tmp_path / "b.parquet", [make_row("b", **ONE_CANDIDATE if "candidates" in difference else {})], other)
    with pytest.raises(ValueError, match=r"a\.parquet and .*b\.parquet are of different sweeps") as caught:
        read_sweep(tmp_path)
    assert difference in str(caught.value)
    assert mismatch(METADATA, other) == difference


def test_a_sweep_may_be_continued_by_newer_code_but_not_repeated(tmp_path: Path) -> None:
    newer = dataclasses.replace(METADATA, versions={"torch": "3"}, git_commit="def")
    write_rows(tmp_path / "a.parquet", [make_row("a"), make_row("b")], METADATA)
    write_rows(tmp_path / "b.parquet", [make_row("c")], newer)
    assert len(read_sweep(tmp_path).rows) == 3
    write_rows(tmp_path / "b.parquet", [make_row("b")], newer)
    with pytest.raises(ValueError, match=r"b\.parquet: prompt b is already in .*a\.parquet"):
        read_sweep(tmp_path)


def test_prompt_ids_depend_on_everything_that_they_stand_for() -> None:
    hello = Prompt("demo", (Message("user", "hello"),))
    ids = [
        prompt_ids(prompt, seed, temperature)[0]
        for prompt, seed, temperature in (
            (hello, 0, 0.0),
            (hello, 1, 0.0),
            (hello, 0, 1.0),
            (Prompt("other", hello.messages), 0, 0.0),
            (Prompt("demo", (Message("user", "Hello"),)), 0, 0.0),
            (Prompt("demo", (Message("system", "hello"),)), 0, 0.0),
            (Prompt("demo", (Message("user", "hel"), Message("user", "lo"))), 0, 0.0),
        )
    ]
    assert len(set(ids)) == len(ids)
    assert ids[0] == "8a66e03db10caa1e5b1a976236c1f7cc"  # written in stored sweeps: it must never change
    assert prompt_ids(hello, 0, 0) == (ids[0],)
    turns = prompt_ids(Prompt("demo", hello.messages, ("and?", "so?")), 0, 0.0)
    assert len({*ids, *turns}) == len(ids) + 2
    assert turns[:2] == prompt_ids(Prompt("demo", hello.messages, ("and?",)), 0, 0.0)
    assert turns[0] == ids[0]
