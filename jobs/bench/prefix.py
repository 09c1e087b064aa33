"""Worth of kept prefixes: time to the first token of a chat's second turn, and what others pay for it.

Two engines, one that keeps prefixes and one that does not, take turns. Chats share a system prompt's tokens with
nobody but their own first turn. Unrelated requests share nothing (each has a salt of its own), so all that keeping
does is cost: both engines decode them in lockstep, a step of one after the same step of the other, in changing order.
Seconds of the CPUs tell more than those of the clock where others use the machine.

    python jobs/bench/prefix.py --threads 2
"""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from pydantic import Field

from blockpilot.device import device_name, dtype_name
from blockpilot.engine.engine import Engine
from blockpilot.evaluation.statistics import ratio_of_totals
from blockpilot.evaluation.tables import markdown, with_range
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt, answer_limit, load_prompts
from blockpilot.storage import write_text
from blockpilot.types import Request, Step
from jobs.common.config import Config, PairConfig, main

NEXT = Message("user", "Now say it again, in one sentence.")


class BenchPrefixConfig(Config):
    """Pair, chats and unrelated requests."""

    pair: PairConfig = PairConfig()
    threads: int = Field(default=1, ge=1)
    """Torch threads."""
    prompts: str = "docstrings"
    """Prompt set or file: texts of the chats' system prompts, and the unrelated requests."""
    block_size: int = Field(default=5, ge=1)
    """Block size of every request, as a tree."""
    shared_tokens: int = Field(default=1000, ge=32)
    """Tokens of a chat's system prompt."""
    chats: int = Field(default=5, ge=1)
    answer_tokens: int = Field(default=48, ge=2)
    """Tokens of a chat's answers."""
    num_slots: int = Field(default=8, ge=1)
    """Unrelated requests that are decoded together."""
    rounds: int = Field(default=6, ge=2)
    """Rounds of unrelated requests, each of twice as many as there are slots."""
    max_tokens: int = Field(default=64, ge=2)
    """Tokens of an unrelated answer at most; each prompt has its own limit, from half of this to all of it."""
    max_prefill_tokens: int = Field(default=256, ge=1)
    output: Path = Path("runs/bench_prefix")


class Decoded(NamedTuple):
    """One request alone in an engine."""

    first_token_s: float
    steps: list[Step]

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens]

    @property
    def acceptance_length(self) -> float:
        return (len(self.tokens) - 1) / max(len(self.steps) - 1, 1)


def decode(engine: Engine, request: Request) -> Decoded:
    """Decode a request alone."""
    engine.add(request)
    started, steps, first_token_s = time.perf_counter(), list[Step](), 0.0
    while not engine.idle:
        steps += engine.step()
        first_token_s = first_token_s or (time.perf_counter() - started if steps else 0.0)
    return Decoded(first_token_s, steps)


def chats(config: BenchPrefixConfig, pair: Pair, texts: Sequence[str]) -> list[dict[str, float]]:
    """Second turns on engines that keep nothing and that keep prefixes: a row a chat."""
    length = min(pair.max_length, config.shared_tokens + 2 * config.answer_tokens + 256)
    options: dict[str, Any] = {"num_slots": 1, "max_length": length, "max_prefill_tokens": config.max_prefill_tokens}
    engines = [Engine(pair, **options), Engine(pair, **options, prefix_tokens=2 * length)]
    rows = []
    ids = pair.tokenizer("\n".join(texts[config.chats :])).input_ids
    for number, question in enumerate(texts[: config.chats]):
        own = ids[number * config.shared_tokens :][: config.shared_tokens]
        turns = [Message("system", _text(pair, own)), Message("user", question)]
        found = dict[Engine, Decoded]()
        for engine in engines if number % 2 else engines[::-1]:
            first = decode(engine, _request(config, pair, turns))
            answer = Message("assistant", _text(pair, first.tokens))
            found[engine] = decode(engine, _request(config, pair, [*turns, answer, NEXT]))
        without, kept = (found[engine] for engine in engines)
        rows.append(
            {
                "without_s": without.first_token_s,
                "kept_s": kept.first_token_s,
                "prompt_tokens": _num_prompt_tokens(kept),
                "reused_tokens": kept.steps[0].num_reused,
                "without_tau": without.acceptance_length,
                "kept_tau": kept.acceptance_length,
                "same_steps": _looks(without) == _looks(kept),
            }
        )
    return rows


def _text(pair: Pair, tokens: list[int]) -> str:
    return str(pair.tokenizer.decode(tokens, skip_special_tokens=True))


def _request(config: BenchPrefixConfig, pair: Pair, turns: Sequence[Message]) -> Request:
    prompt_ids = Prompt("bench", tuple(turns)).encode(pair.tokenizer)
    return Request(prompt_ids, config.answer_tokens, block_size=config.block_size, layout="tree")


def _num_prompt_tokens(decoded: Decoded) -> int:
    prefill = decoded.steps[0].prefill
    assert prefill is not None
    return prefill.num_prompt_tokens


def _looks(decoded: Decoded) -> list[Any]:
    return [(step.tokens, step.num_accepted, step.tree) for step in decoded.steps]


class Spent(NamedTuple):
    """Seconds that an engine took for a round's requests, and those of the process's CPUs alone."""

    wall_s: float
    cpu_s: float


def unrelated(config: BenchPrefixConfig, pair: Pair, prompts: Sequence[Prompt]) -> list[list[Spent]]:
    """For every round of requests, on an engine that keeps prefixes and on one that does not."""
    requests = [
        Request(prompt.encode(pair.tokenizer), answer_limit(prompt, config.max_tokens), block_size=config.block_size)
        for prompt in islice(cycle(prompts), 2 * config.num_slots * config.rounds)
    ]
    length = max(len(request.prompt_ids) for request in requests) + config.max_tokens
    limits: dict[str, Any] = {"num_slots": config.num_slots, "max_prefill_tokens": config.max_prefill_tokens}
    options = limits | {"max_length": min(length, pair.max_length)}
    engines = [Engine(pair, **options, prefix_tokens=config.num_slots * length), Engine(pair, **options)]
    rounds = []
    for number in range(config.rounds):
        of_round = requests[number :: config.rounds]
        for engine in engines:
            for i, request in enumerate(of_round):
                engine.add(replace(request, layout="tree", cache_salt=f"{number} {i}"))
        rounds.append(_in_lockstep(engines))
        print(f"unrelated requests: round {number + 1} of {config.rounds}", flush=True)
    return rounds


def _in_lockstep(engines: Sequence[Engine]) -> list[Spent]:
    """Seconds that each of two engines with the same requests takes to their ends."""
    spent, turn = [Spent(0, 0), Spent(0, 0)], 0
    while not all(engine.idle for engine in engines):
        for place in (turn, 1 - turn):
            started = time.perf_counter(), time.process_time()
            engines[place].step()
            wall_s, cpu_s = spent[place]
            spent[place] = Spent(wall_s + time.perf_counter() - started[0], cpu_s + time.process_time() - started[1])
        turn = 1 - turn
    return spent


def run(config: BenchPrefixConfig) -> dict[str, Any]:
    """Print tables and, as the last line, JSON, which is written, too."""
    torch.set_num_threads(config.threads)
    pair, prompts = config.pair.load(), load_prompts(config.prompts)
    print(f"{pair.id.target}, {dtype_name(pair.target.dtype)} on {device_name(pair.target.device)}")
    of_chats = chats(config, pair, [prompt.text for prompt in prompts])
    rounds = unrelated(config, pair, prompts)
    without, kept = (median(row[name] for row in of_chats) for name in ("without_s", "kept_s"))
    speeds = {
        name: ratio_of_totals(*([getattr(spent[place], name) for spent in rounds] for place in (1, 0)))
        for name in Spent._fields
    }
    unrelated_speeds = {name: speed._asdict() for name, speed in speeds.items()}
    found = {"chats": of_chats, "times_shorter": without / kept, "unrelated": unrelated_speeds}
    print(markdown([{name: f"{value:.3g}" for name, value in row.items()} for row in of_chats]))
    seconds = f"{without:.3f} s without, {kept:.3f} s with kept prefixes"
    print(f"\nfirst token of a second turn, median: {seconds}: {without / kept:.1f} times shorter")
    for name, speed in speeds.items():
        print(f"speed of unrelated requests, of that without, by {name}: {with_range(speed, 4)}")
    write_text(config.output / "bench_prefix.json", json.dumps(found) + "\n")
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main(BenchPrefixConfig, run)
