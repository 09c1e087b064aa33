"""Atomic files, first lines of errors, and addresses without secrets."""

from pathlib import Path

import pytest

from blockpilot.storage import file_names, first_line, join, remove_unfinished, without_secrets, write_text


def test_an_error_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_text(path, "Gr\u00fc\u00dfe")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half \ud800")
    assert path.read_text(encoding="utf-8") == "Gr\u00fc\u00dfe"
    assert list(path.parent.iterdir()) == [path]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    write_text(tmp_path / "train" / "a.txt", "whole")
    (tmp_path / "train" / ".a.txt.123.tmp").write_text("half")
    (tmp_path / ".config.json.123.tmp").write_text("half")
    remove_unfinished(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "train" / "a.txt"]


@pytest.mark.parametrize(
    ("place", "joined"),
    [
        ("s3://bucket/sweep?region=eu-1&scheme=http", "s3://bucket/sweep/rows/a.parquet?region=eu-1&scheme=http"),
        ("s3://bucket/sweep/", "s3://bucket/sweep/rows/a.parquet"),
        ("why?/sweep", "why?/sweep/rows/a.parquet"),
    ],
)
def test_a_uri_keeps_its_options_at_the_end(place: str, joined: str) -> None:
    assert join(join(place, "rows"), "a.parquet") == joined


def test_a_relative_place_is_below_the_present_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        write_text("here/a.txt", name)
        assert file_names("here") == ["a.txt"]
        assert (tmp_path / name / "here" / "a.txt").read_text() == name


@pytest.mark.parametrize(("message", "line"), [("one\ntwo", "one"), ("\n  one\n", "one"), ("", "ValueError")])
def test_an_error_has_a_first_line(message: str, line: str) -> None:
    assert first_line(ValueError(message)) == line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("output s3://AKIA:SE%2FC+R@bucket/sweep: no", "output s3://***@bucket/sweep: no"),
        ("postgresql://me:p@ss@host/db", "postgresql://***@host/db"),
        (
            '["s3://K:S@one/a", "https://two/b?X-Amz-Signature=ab1&x=2"]',
            '["s3://***@one/a", "https://two/b?X-Amz-Signature=***&x=2"]',
        ),
        ("https://a/b?AWSAccessKeyId=K&Expires=1&sig=S#c", "https://a/b?AWSAccessKeyId=***&Expires=1&sig=***#c"),
        ("s3://bucket/a?region=eu-1&secret_key=S", "s3://bucket/a?region=eu-1&secret_key=***"),
        ('{"a": "http://x?token=t\\"u"}', '{"a": "http://x?token=***\\"u"}'),
        ("mail me@home, s3://bucket/a@b", "mail me@home, s3://bucket/a@b"),
    ],
)
def test_addresses_lose_their_secrets(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
