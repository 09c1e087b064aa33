"""Benchmark of several replicas of a model on this machine: routing of conversations, and autoscaling in a burst.

Conversations of several turns are sent with both ways of routing, to measure the cached share of later turns' prompts
and the seconds to their first tokens. Then a burst of conversations starts on one replica with autoscaling, to plot
replicas and seconds to the first token over time, and to count the requests that were refused or failed.

    python -m jobs.bench.replicas --prompts gsm8k mt-bench
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field
from ray import serve
from ray.serve._private.common import ReplicaState

from blockpilot.evaluation.tables import markdown
from blockpilot.prompts.files import Prompt, load_prompts
from blockpilot.storage import write_bytes, write_text
from jobs.bench.http_load import Clients, Received
from jobs.common.config import Config, PairConfig, main
from jobs.common.figures import over_time
from jobs.serve import APP, ServeConfig, start, stop
from jobs.serving.models import ReplicaResources

Routing = Literal["prefix", "least-loaded"]
ROUTINGS: tuple[Routing, ...] = ("prefix", "least-loaded")


class BenchReplicasConfig(Config):
    """Replicas, conversations and the burst."""

    pair: PairConfig = PairConfig()
    prompts: tuple[str, ...] = ("demo",)
    """Prompt sets and files; a conversation sends several of their prompts, one after the other."""
    num_replicas: int = Field(default=3, ge=2)
    """Number of replicas in the test of routing, and the maximum in the burst."""
    num_slots: int = Field(default=4, ge=1)
    """Slots of a replica: requests that it decodes together."""
    num_clients: int = Field(default=4, ge=1)
    """Concurrent conversations in the test of routing."""
    num_conversations: int = Field(default=24, ge=1)
    """Conversations with each way of routing, and in the burst."""
    num_turns: int = Field(default=4, ge=2)
    """Turns of a conversation."""
    max_tokens: int = Field(default=48, ge=2)
    """Maximum tokens of an answer."""
    burst_s: float = Field(default=60.0, gt=0)
    """Seconds from the start of the burst in which replicas are counted."""
    port: int = Field(default=8765, ge=1, le=65535)
    output: Path = Path("runs/bench_replicas")
    """Output directory of the table, the figures as JSON, and the picture."""


class AskedTurn(NamedTuple):
    """A turn of a conversation, from 0, and its answer."""

    number: int
    received: Received


async def conversations(
    config: BenchReplicasConfig, url: str, prompts: Sequence[Prompt], at_a_time: int
) -> list[AskedTurn]:
    """Send all conversations, `at_a_time` of them together; a turn includes the turns and answers before it."""
    turns, starts = list[AskedTurn](), iter(range(config.num_conversations))
    async with Clients(url) as clients:
        model = await clients.first_model()

        async def client() -> None:
            for start_index in starts:
                messages: list[dict[str, Any]] = []
                for number in range(config.num_turns):
                    prompt = prompts[(start_index * config.num_turns + number) % len(prompts)]
                    messages += map(asdict, prompt.messages)
                    body = {"model": model, "messages": messages, "max_tokens": config.max_tokens, "temperature": 0}
                    received = await clients.send(body)
                    turns.append(AskedTurn(number, received))
                    messages = [*messages, {"role": "assistant", "content": received.text}]

        await asyncio.gather(*(client() for _ in range(at_a_time)))
    return turns


def served(config: BenchReplicasConfig, routing: Routing, num_replicas: int, cpus: float) -> ServeConfig:
    """Configuration of a server with this number of replicas at the start."""
    resources = ReplicaResources(num_actors=num_replicas, num_cpus=cpus)
    shared: dict[str, Any] = {"pair": config.pair, "port": config.port, "num_slots": config.num_slots}
    return ServeConfig(
        **shared, resources=resources, max_replicas=config.num_replicas, routing=routing, policy="untrained"
    )


def row_of(routing: str, turns: Sequence[AskedTurn]) -> dict[str, Any]:
    """Figures of the turns after the first."""
    later = [turn.received for turn in turns if turn.number and turn.received.whole and turn.received.arrivals]
    cached, sizes = (sum(getattr(r, name) for r in later) for name in ("num_cached_tokens", "num_prompt_tokens"))
    first = [r.first_token_s for r in later]
    return {
        "routing": routing,
        "turns": len(later),
        "cached": cached / max(1, sizes),
        "first_token_s": {f"p{q}": float(np.percentile(first, q)) for q in (50, 90)},
        "failed": num_failed(turns),
    }


def num_failed(turns: Sequence[AskedTurn]) -> int:
    """Turns that were refused, or whose answers are incomplete."""
    return sum(not turn.received.whole for turn in turns)


async def burst(config: BenchReplicasConfig, url: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Send all conversations together; the number of replicas is sampled until `burst_s`."""
    began, sampled = time.perf_counter(), list[tuple[float, int]]()

    async def watch() -> None:
        while (now := time.perf_counter() - began) < config.burst_s:
            sampled.append((now, await asyncio.to_thread(num_running)))
            await asyncio.sleep(0.5)

    turns, _ = await asyncio.gather(conversations(config, url, prompts, config.num_conversations), watch())
    answered = sorted((t.received.sent - began, t.received.first_token_s) for t in turns if t.received.arrivals)
    return {
        "replicas": sampled,
        "first_token_s": answered,
        "turns": len(turns),
        "failed": num_failed(turns),
    }


def num_running() -> int:
    """Running replicas of the model."""
    deployments = serve.status().applications[APP].deployments
    return sum(d.replica_states.get(ReplicaState.RUNNING, 0) for name, d in deployments.items() if name != "gateway")


def run(config: BenchReplicasConfig) -> dict[str, Any]:
    """Print and write a table, figures as JSON, and the picture of the burst."""
    prompts = [prompt for name in config.prompts for prompt in load_prompts(name)]
    cpus, rows = 1 / config.num_replicas, list[dict[str, Any]]()
    for routing in ROUTINGS:
        url = start(served(config, routing, config.num_replicas, cpus))
        rows.append(row_of(routing, asyncio.run(conversations(config, url, prompts, config.num_clients))))
        print(json.dumps(rows[-1]), flush=True)
        stop(drain_s=0)
    url = start(served(config, "prefix", 1, cpus))
    seen = asyncio.run(burst(config, url, prompts))
    stop(drain_s=0)
    table = markdown(
        [
            {
                "routing": row["routing"],
                "later turns": str(row["turns"]),
                "of the prompt cached": f"{row['cached']:.0%}",
                "first token s, p50 / p90": "{p50:.2f} / {p90:.2f}".format(**row["first_token_s"]),
                "failed": str(row["failed"]),
            }
            for row in rows
        ]
    )
    print(table)
    config.output.mkdir(parents=True, exist_ok=True)
    write_text(config.output / "replicas.md", table)
    write_text(config.output / "replicas.json", json.dumps({"routing": rows, "burst": seen}))
    series = {"replicas": seen["replicas"], "seconds to the first token": seen["first_token_s"]}
    write_bytes(config.output / "burst.png", over_time(series))
    most = max(num for _, num in seen["replicas"])
    print(f"burst: at most {most} replicas, {seen['turns']} turns, {seen['failed']} failed")
    return {"routing": rows, "burst": seen}


if __name__ == "__main__":
    main(BenchReplicasConfig, run)
