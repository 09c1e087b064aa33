"""vLLM with the plug-in beside vLLM without it: fixed numbers of drafted tokens, the plug-in's choice, this engine.

Run by the Python of an environment that has vLLM and BlockPilot. Every engine is a process of its own that loads once
and is stopped while others work; methods take turns, batch by batch. An engine with the plug-in decodes with every
fixed number, which a request asks for, and by its policy. `stock` engines, which have no plug-in, tell what its hooks
cost: the same number of drafted tokens in both. A cell is tokens a second, and its ratio to plain decoding with the
interval over batches.

    python jobs/bench/vllm_plugin.py --policy champion --price runs/sweep/price.json --threads 2
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field
from transformers import AutoTokenizer

from blockpilot.evaluation.statistics import Interval, ratio_of_totals
from blockpilot.evaluation.tables import markdown
from blockpilot.pairs.checkpoints import find_draft, find_target
from blockpilot.prompts.files import load_prompts
from jobs.bench.peers import DecodedBatch, Peer, Worker, keep, running
from jobs.common.config import Config, PairConfig, Place, main, pick_dtype
from jobs.common.registry import CHAMPION
from jobs.vllm_plugin.policies import PluginSettings

PLAIN, CHOSEN = "vLLM, plain", "plug-in, chosen"
WARM_UP = 4  # tokens


class PluginBenchConfig(Config):
    """Policy and price of the plug-in, and the work."""

    pair: PairConfig = PairConfig(dtype="fast")
    policy: str = CHAMPION
    """Policy of the plug-in: "champion", the directory of a policy, "untrained", or one block size."""
    price: Place | None = None
    """Price of its steps: price.json of a sweep by vLLM."""
    prompts: str = "demo"
    """A prompt set or file."""
    requests: tuple[int, ...] = (1, 4, 16)
    """Decoded together."""
    rounds: int = Field(default=8, ge=2)
    """Batches of every number of requests, after one that warms up."""
    num_tokens: int = Field(default=64, ge=2)
    """Tokens of every answer."""
    drafted: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    """Fixed numbers of drafted tokens, with the plug-in; the largest is what vLLM is started with."""
    stock: tuple[int, ...] = (3,)
    """Numbers of drafted tokens of engines without the plug-in; each is 4 GB more on a CPU."""
    own: tuple[int, ...] = (4,)
    """Block sizes of this engine, beside its trees."""
    threads: int = Field(default=1, ge=1)
    """Threads of every engine."""
    enforce_eager: bool = False
    """vLLM's engines start in seconds, not compiled; their steps are slower then."""
    output: Path = Path("runs/vllm_plugin")


class Method(NamedTuple):
    """A way to decode: the engine's settings as JSON, and what a batch is sent with."""

    engine: str
    more: dict[str, Any]


def methods(config: PluginBenchConfig) -> dict[str, Method]:
    """By name; the first is what others are compared with."""
    target, draft = config.pair.models
    shared = {"dtype": pick_dtype(config.pair.dtype, "cpu"), "threads": config.threads, "bought": False}
    # The engine with the plug-in meets every prompt once a method: cached prompts would be its advantage.
    shared |= {"options": {"enforce_eager": config.enforce_eager, "enable_prefix_caching": False}}
    shared |= {"target": str(find_target(target).directory), "draft": str(find_draft(draft).directory)}

    def engine(peer: str, num_drafted: int, **changes: Any) -> str:
        return json.dumps(shared | {"peer": peer, "num_drafted": num_drafted} | changes)

    plugin = PluginSettings(policy=config.policy, price=config.price, target=target, draft=draft)
    adaptive = engine("vllm plug-in", max(config.drafted), plugin=plugin.model_dump(mode="json"))
    found = {PLAIN: Method(engine("vllm", 0), {})}
    found |= {f"vLLM, K={n}": Method(engine("vllm", n), {}) for n in config.stock}
    found |= {f"plug-in, K={n}": Method(adaptive, {"block_size": n + 1}) for n in config.drafted}
    found |= {CHOSEN: Method(adaptive, {})}
    found |= {f"blockpilot, B={n}": Method(engine("blockpilot", n - 1), {}) for n in config.own}
    return found | {"blockpilot, trees": Method(engine("blockpilot", 0, bought=True), {})}


def measure(config: PluginBenchConfig) -> dict[int, dict[str, list[DecodedBatch]]]:
    """Batches by number of requests and method, in the same order for all."""
    tokenizer = AutoTokenizer.from_pretrained(find_target(config.pair.models[0]).directory)
    prompts = [list(prompt.encode(tokenizer)) for prompt in load_prompts(config.prompts)]
    config.output.mkdir(parents=True, exist_ok=True)
    chosen = methods(config)
    found = {num: {name: list[DecodedBatch]() for name in chosen} for num in config.requests}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, method in chosen.items():
            if method.engine not in workers:
                print(f"vllm_plugin: loading {name}", flush=True)
                peer = Peer(name, Path(sys.executable), json.loads(method.engine))
                log = config.output / f"{name.replace(', ', '-')}.log"
                workers[method.engine] = stack.enter_context(running(peer, log))
        for num in config.requests:
            every = prompts * num * (config.rounds + 1)
            batches = [every[i * num : (i + 1) * num] for i in range(config.rounds + 1)]
            for i, batch in enumerate(batches):
                order = list(chosen.items())
                for name, method in order[i % len(order) :] + order[: i % len(order)]:
                    worker = workers[method.engine]
                    worker.decode(batch[:1], WARM_UP, **method.more)  # it may have been stopped for long
                    decoded = worker.decode(batch, config.num_tokens if i else WARM_UP, **method.more)
                    if i:
                        found[num][name].append(decoded)
                print(f"vllm_plugin: {num} requests, {i}/{config.rounds} batches", flush=True)
    return found


def speed_ratio(one: list[DecodedBatch], other: list[DecodedBatch]) -> Interval:
    """Speed of a method over another's, on the same batches of answers of equal length."""
    return ratio_of_totals([batch.seconds for batch in other], [batch.seconds for batch in one])


def table(found: dict[int, dict[str, list[DecodedBatch]]]) -> str:
    """A row a method, a column a number of requests."""
    rows = []
    for name in found[next(iter(found))]:
        row = {"method": name}
        for num, of_load in found.items():
            batches, ratio = of_load[name], speed_ratio(of_load[name], of_load[PLAIN])
            speed = sum(len(a) for b in batches for a in b.answers) / sum(b.seconds for b in batches)
            row[f"{num} at a time"] = f"{speed:.1f} ({ratio.value:.2f}, {ratio.low:.2f} to {ratio.high:.2f})"
        rows.append(row)
    return markdown(rows)


def overheads(config: PluginBenchConfig, found: dict[int, dict[str, list[DecodedBatch]]]) -> str:
    """A line for each fixed number that both decode with: seconds with the plug-in over those without."""
    lines = []
    for num, of_load in found.items():
        for n in sorted(set(config.stock) & set(config.drafted)):
            cost = speed_ratio(of_load[f"vLLM, K={n}"], of_load[f"plug-in, K={n}"])
            shown = f"{cost.value - 1:+.1%} ({cost.low - 1:+.1%} to {cost.high - 1:+.1%})"
            lines.append(f"- hooks with K={n} fixed, {num} at a time: {shown}\n")
    return "".join(lines)


def run(config: PluginBenchConfig) -> None:
    """Measure, print and keep the table."""
    found = measure(config)
    text = f"Tokens/s, and times vLLM's plain decoding.\n\n{table(found)}\n\n{overheads(config, found)}"
    keep(config.output, text, found)


if __name__ == "__main__":
    main(PluginBenchConfig, run)
