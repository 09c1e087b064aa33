"""Clients against a server, by the environment of the tests: its openai library, and workers that fail."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockpilot.pairs.loading import Pair
from helpers.api import app_of, over_http, replica_of
from jobs.bench import clients
from jobs.bench.clients import CLIENTS, ClientsConfig, Use, environment, run, uses


@pytest.fixture(scope="module")
def url(tiny_pair: Pair) -> Iterator[str]:
    with (
        replica_of(tiny_pair, num_slots=2, max_length=1000, max_queue=8) as replica,
        over_http(app_of(replica)) as url,
    ):
        yield url


def test_uses_of_the_openai_library_succeed_and_are_in_the_table(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "environment", lambda client, folder: Path(sys.executable))
    succeeded = run(ClientsConfig(url=url, clients=("openai",), tokenizer=tmp_path, output=tmp_path))
    table = (tmp_path / "clients.md").read_text()
    assert table.strip() in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert rows == [[CLIENTS["openai"][0], use.what, "ok"] for use in succeeded]
    assert len(rows) == 10


def test_a_client_that_cannot_be_imported_fails_with_its_log(url: str, tmp_path: Path) -> None:
    (use,) = uses("lm_eval", Path(sys.executable), {"url": url}, tmp_path / "log", timeout_s=60)
    assert use == Use("lm_eval", "to its end", f"status 1; what it said: {tmp_path / 'log'}")
    assert "lm_eval" in (tmp_path / "log").read_text()


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLIENTS, "nothing", ())
    commands = list[list[str]]()

    def installed(command: list[str]) -> object:
        commands.append(command)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(clients.subprocess, "run", installed)
    monkeypatch.setattr(clients.venv, "create", lambda folder, **options: folder.mkdir())
    for _ in range(2):
        assert environment("nothing", tmp_path / "nothing") == tmp_path / "nothing" / "bin" / "python"
    assert len(commands) == 1


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"clients 'curl': must be one of openai, .*"):
        run(ClientsConfig(clients=("curl",), output=tmp_path))
    with pytest.raises(ValueError, match=r"url http://127\.0\.0\.1:9: no server answers"):
        run(ClientsConfig(url="http://127.0.0.1:9", tokenizer=tmp_path, output=tmp_path))
