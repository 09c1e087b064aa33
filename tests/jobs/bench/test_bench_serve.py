"""Load tool against a real server over HTTP: its counts, and its messages about a faulty server."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blockpilot.engine.generate import generate
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import load_prompts
from helpers.api import app_of, over_http, replica_of
from jobs.bench.http_load import Clients
from jobs.bench.server import BenchServeConfig, run
from jobs.common.config import ConfigError
from jobs.serving.engine_loop import EngineLoop


@contextmanager
def served(pair: Pair, **sizes: int) -> Iterator[tuple[str, EngineLoop]]:
    """Serve the API over real HTTP, without Ray Serve; yields its URL and the engine loop."""
    settings = {"num_slots": 2, "max_length": 900, "max_queue": 8} | sizes
    with replica_of(pair, **settings) as replica, over_http(app_of(replica)) as root:
        yield f"{root}/v1", replica.loop


def small(url: str, output: Path, **values: Any) -> BenchServeConfig:
    sizes = {"rounds": 2, "concurrency": (1, 3), "max_tokens": 16, "requests_per_client": 2, "prompts": ("demo",)}
    return BenchServeConfig(url=url, output=output, **sizes | values)


def test_modes_are_interleaved_and_their_tokens_are_counted(
    tiny_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(tiny_pair) as (url, loop):
        rows = run(small(url, tmp_path, modes=("auto", "1", "3"), rates=()))
        assert loop.num_in_flight == 0
    assert [(row["load"], row["mode"]) for row in rows] == [
        (load, mode) for load in ("1 clients", "3 clients") for mode in ("auto", "1", "3")
    ]
    for row in rows:
        assert row["tokens_per_s"] > 0
        if row["mode"] == "auto":
            assert (row["ratio"]["value"], row["ratio"]["low"], row["ratio"]["high"]) == (1, 1, 1)
        assert row["num_whole"] == (4 if row["load"] == "1 clients" else 12)
        assert row["num_failed"] == row["num_refused"] == 0
        assert 0 < row["first_token_s"]["p50"] <= row["first_token_s"]["p99"]
        assert row["acceptance_length"] == 1 if row["mode"] == "1" else row["acceptance_length"] >= 1
    out = capsys.readouterr().out.splitlines()
    assert json.loads(out[-1])["rows"] == json.loads((tmp_path / "bench_serve.json").read_text()) == rows
    assert (tmp_path / "bench_serve.md").read_text().strip() in "\n".join(out)


def test_what_clients_receive_is_the_targets_text(tiny_pair: Pair) -> None:
    prompt = load_prompts("demo")[0]
    body = {"model": "target", "max_tokens": 12, "temperature": 0}
    body["messages"] = [{"role": message.role, "content": message.content} for message in prompt.messages]
    steps = generate(tiny_pair, prompt.encode(tiny_pair.tokenizer), block_size=1, max_new_tokens=12)
    tokens = [token for step in steps for token in step.tokens]

    async def scene(url: str) -> None:
        async with Clients(url) as clients:
            (received,) = await clients.closed_loop([body], 1)
        assert received.text == tiny_pair.tokenizer.decode(tokens, skip_special_tokens=True)
        assert (received.num_tokens, received.whole) == (len(tokens), True)
        assert received.arrivals == sorted(received.arrivals)

    with served(tiny_pair) as (url, _):
        asyncio.run(scene(url))


def test_an_open_loop_loses_what_is_refused_and_a_closed_one_comes_again(tiny_pair: Pair, tmp_path: Path) -> None:
    changes = {"modes": ("1",), "rounds": 1, "concurrency": (3,), "requests_per_client": 1, "max_tokens": 200}
    with served(tiny_pair, num_slots=1, max_queue=0) as (url, _):
        closed, opened = run(small(url, tmp_path, rates=(1000.0,), num_requests=5, **changes))
    assert (closed["num_whole"], closed["num_refused"] > 0) == (3, True)
    assert opened["num_whole"] + opened["num_refused"] == 5
    assert opened["num_refused"] > 0


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"modes": ("fast",)}, "mode 'fast': must be auto or a block size"),
        ({"modes": ()}, "at least one is needed"),
        ({"modes": ("1", "1")}, "each once"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        BenchServeConfig(**values)


def test_no_server_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9/v1: no server that lists its models"):
        run(BenchServeConfig(url="http://127.0.0.1:9/v1", modes=("1",), output=tmp_path))
