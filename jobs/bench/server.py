"""Load test of a running server: throughput and latency seen by its clients, by mode of choosing block sizes.

Modes are interleaved on one server, round by round with the same prompts. `auto` leaves the choice to the server. A
number is a fixed block size for every request; 1 is plain decoding. A round of a closed loop starts and ends idle, so
its tokens per second include filling and draining the batch, in the same way for all modes.

    python jobs/serve.py &
    python jobs/bench/server.py --concurrency 1 2 4 8 16 --modes auto 1 2 4 8
"""

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
from pydantic import Field, PositiveFloat, field_validator

from blockpilot.evaluation.statistics import Interval, ratio_of_totals
from blockpilot.evaluation.tables import markdown, with_range
from blockpilot.prompts.files import Prompt, answer_limit, load_prompts
from blockpilot.storage import write_text
from jobs.bench.http_load import Clients, Received
from jobs.common.config import Config, main
from jobs.serving.clients import environment_key


class BenchServeConfig(Config):
    """Server, requests, modes and loads."""

    url: str = "http://127.0.0.1:8000/v1"
    """Base URL of the server's API."""
    model: str | None = None
    """Name of the model; by default the server's first model."""
    prompts: tuple[str, ...] = ("demo",)
    """Names of prompt sets, and prompt files; the same number of prompts is taken from each."""
    modes: tuple[str, ...] = ("auto", "1", "2", "4", "8")
    """Modes to measure: auto and block sizes; the first one is the baseline."""
    concurrency: tuple[int, ...] = (1, 4, 16)
    """Numbers of clients of the closed loops."""
    rates: tuple[PositiveFloat, ...] = ()
    """Requests per second of the open loops, which run after the closed loops."""
    rounds: int = Field(default=3, ge=1)
    """Rounds of every mode at every concurrency and rate, each with other prompts."""
    requests_per_client: int = Field(default=2, ge=1)
    """Requests per client in a round of a closed loop."""
    num_requests: int = Field(default=32, ge=1)
    """Requests in a round of an open loop."""
    max_tokens: int = Field(default=64, ge=2)
    """Maximum tokens of an answer; each prompt has a separate limit, between half of this and this."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    first_token_slo_s: float = Field(default=5.0, gt=0)
    """Service-level objective: maximum seconds to the first token of a good request."""
    token_slo_s: float = Field(default=0.2, gt=0)
    """Service-level objective: maximum seconds per further token of a good request."""
    output: Path = Path("runs/bench_serve")
    """Output directory of the table and its figures as JSON."""

    @field_validator("modes")
    @classmethod
    def _check_modes(cls, modes: tuple[str, ...]) -> tuple[str, ...]:
        for mode in modes:
            if mode != "auto" and not mode.isdecimal():
                raise ValueError(f"mode {mode!r}: must be auto or a block size")
        if not modes or len(set(modes)) < len(modes):
            raise ValueError(f"modes {modes}: at least one is needed, and each once")
        return modes


class BenchLoad(NamedTuple):
    """A closed loop with `num_clients`, or an open loop with `rate` requests per second."""

    name: str
    num_requests: int
    """Requests in a round."""
    num_clients: int | None = None
    rate: float = 0.0


class Round(NamedTuple):
    """Results of one mode in one round."""

    seconds: float
    received: Sequence[Received]

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.received)


# --- measuring ---


async def measure(config: BenchServeConfig, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Measure all loads and print progress; returns a row for every load and mode."""
    loads = [BenchLoad(f"{num} clients", num * config.requests_per_client, num) for num in config.concurrency]
    loads += [BenchLoad(f"{rate:g} requests/s", config.num_requests, rate=rate) for rate in config.rates]
    async with Clients(config.url, environment_key()) as clients:
        bench = _Bench(config, prompts, clients, config.model or await clients.first_model())
        measured = [(load, await bench.rounds(load)) for load in loads]
    return [
        _row(config, load, mode, rounds, by_mode[config.modes[0]])
        for load, by_mode in measured
        for mode, rounds in by_mode.items()
    ]


class _Bench:
    def __init__(self, config: BenchServeConfig, prompts: Sequence[Prompt], clients: Clients, model: str) -> None:
        self._config, self._prompts, self._clients, self._model = config, prompts, clients, model

    async def rounds(self, load: BenchLoad) -> dict[str, list[Round]]:
        """Run all rounds under a load; returns them by mode."""
        rounds: dict[str, list[Round]] = {mode: [] for mode in self._config.modes}
        order, prompts = deque(self._config.modes), cycle(self._prompts)
        for number in range(self._config.rounds):
            round_prompts = list(islice(prompts, load.num_requests))
            for mode in order:
                rounds[mode].append(await self._round(mode, round_prompts, load))
            order.rotate(-1)
            print(f"{load.name}: round {number + 1} of {self._config.rounds}", flush=True)
        return rounds

    async def _round(self, mode: str, prompts: Sequence[Prompt], load: BenchLoad) -> Round:
        started = time.perf_counter()
        bodies = [self._body(prompt, mode) for prompt in prompts]
        if load.num_clients is not None:
            received = await self._clients.closed_loop(bodies, load.num_clients)
        else:
            received = await self._clients.open_loop(bodies, load.rate)
        return Round(time.perf_counter() - started, received)

    def _body(self, prompt: Prompt, mode: str) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": list(map(asdict, prompt.messages)),
            "max_tokens": answer_limit(prompt, self._config.max_tokens),
            "temperature": self._config.temperature,
            "seed": 0,
            "block_size": mode if mode == "auto" else int(mode),
            "cache_salt": uuid4().hex,  # modes share prompts, but not cached prefixes
        }


# --- reporting ---


def _row(
    config: BenchServeConfig, load: BenchLoad, mode: str, rounds: Sequence[Round], baseline: Sequence[Round]
) -> dict[str, Any]:
    """Figures of a mode under a load; the ratio to the baseline is by round, with the same prompts."""
    speeds, baseline_speeds = ([r.num_tokens / r.seconds for r in mode_rounds] for mode_rounds in (rounds, baseline))
    speed = sum(r.num_tokens for r in rounds) / sum(r.seconds for r in rounds)
    ratio = ratio_of_totals(speeds, baseline_speeds)._asdict()
    return {"load": load.name, "mode": mode, "tokens_per_s": speed, "ratio": ratio} | _seen_by_clients(config, rounds)


def _seen_by_clients(config: BenchServeConfig, rounds: Sequence[Round]) -> dict[str, Any]:
    answers = [answer for r in rounds for answer in r.received]
    complete = [answer for answer in answers if answer.whole and answer.arrivals]
    in_time = [answer for answer in complete if answer.first_token_s <= config.first_token_slo_s]
    good = [answer for answer in in_time if answer.token_s <= config.token_slo_s]
    taus = [answer.acceptance_length for answer in complete if answer.acceptance_length is not None]
    return {
        "first_token_s": _percentiles([answer.first_token_s for answer in complete]),
        "token_s": _percentiles([answer.token_s for answer in complete]),
        "gap_s": _percentiles([gap for answer in complete for gap in answer.gaps_s]),
        "good_per_s": len(good) / sum(r.seconds for r in rounds),
        "acceptance_length": float(np.mean(taus)) if taus else None,
        "num_whole": len(complete),
        "num_refused": sum(answer.status == 429 for answer in answers),
        "num_failed": sum(not a.whole and a.status != 429 for a in answers),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)} if values else {}


def _cells(row: dict[str, Any], baseline: str) -> dict[str, str]:
    """A row as text."""
    names = {"first token s": "first_token_s", "token s": "token_s", "gap s": "gap_s"}
    percentiles = {title: row[name] for title, name in names.items()}
    latencies = {
        f"{title}, p50 / p99": f"{at['p50']:.2f} / {at['p99']:.2f}" if at else "" for title, at in percentiles.items()
    }
    return {
        "load": row["load"],
        "mode": row["mode"],
        "tokens/s": f"{row['tokens_per_s']:.1f}",
        f"of {baseline}": with_range(Interval(**row["ratio"]), 2),
        **latencies,
        "good/s": f"{row['good_per_s']:.2f}",
        "tau": f"{row['acceptance_length']:.2f}" if row["acceptance_length"] else "",
        "refused or failed": str(row["num_failed"] + row["num_refused"]),
    }


def run(config: BenchServeConfig) -> list[dict[str, Any]]:
    """Print and write a table and its figures as JSON (the last line). Raises ValueError without a server."""
    sets = [load_prompts(name) for name in config.prompts]
    num = min(map(len, sets))
    prompts = [prompt for prompt_set in sets for prompt in prompt_set[:num]]
    random.Random(0).shuffle(prompts)
    rows = asyncio.run(measure(config, prompts))
    table = markdown([_cells(row, config.modes[0]) for row in rows])
    write_text(config.output / "bench_serve.md", table + "\n")
    write_text(config.output / "bench_serve.json", json.dumps(rows) + "\n")
    print(table)
    print(json.dumps({"output": str(config.output), "rows": rows}))
    return rows


if __name__ == "__main__":
    main(BenchServeConfig, run)
